/* The automaton of a JSON value under a schema, up to the '<' of the closer behind it.
 *
 *   VALUE -> STRING | NUMBER | WORD | ENUM -> AFTER          AFTER without brackets: '<' ends the parameter
 *   VALUE -> ITEM_FIRST -> VALUE -> AFTER -> VALUE … ]
 *   VALUE -> KEY_FIRST -> NAME, NAME_FREE -> COLON -> VALUE -> AFTER -> KEY … }
 *
 * Blanks may stand wherever JSON has them, but only so many in a row: a model must not get stuck in them. */
#include <string.h>

#include "engine/grammar_int.h"

static gr_frame *top(gr_state *s) { return &s->frames[s->depth - 1]; }

static bool possible(const dm_grammar *g, int32_t schema)
{
    const gr_schema *v = &g->rules.schemas[schema];
    for (uint32_t i = 0; i < v->nleaves; i++)
        if (v->leaves[i]->types) return true;
    return false;
}

static void value_done(const gr_state *s, gr_set *out)
{
    gr_state t;
    gr_moved(&t, s, AT_AFTER);
    t.schema = SCHEMA_ANY;
    if (t.depth) top(&t)->count++;
    gr_push(out, &t);
}

/* ---- strings ---- */

static bool is_hex(int c) { return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'f'); }

/* Behind a backslash.  False: no such escape, or a NUL, which no tool can take. */
static bool step_escape(gr_state *t, int unit)
{
    if (t->escape == 1) {
        if (unit <= 0 || unit > 127 || !strchr("\"\\/bfnrtu", unit)) return false;
        t->escape = unit == 'u' ? 2 : 0;
        t->zeros = 0;
        t->chars += unit != 'u';
        return true;
    }
    if (!is_hex(unit) || (t->zeros == 3 && unit == '0')) return false;
    t->zeros += unit == '0';
    t->escape = t->escape == 5 ? 0 : t->escape + 1;
    return true;
}

static void step_string(const gr_state *s, int unit, gr_set *out)
{
    gr_state t;
    memcpy(&t, s, gr_state_bytes(s));
    if (s->escape) {
        if (step_escape(&t, unit)) gr_push(out, &t);
        return;
    }
    if (unit == '"') {
        if (s->chars >= s->leaf->chars_min) value_done(s, out);
        return;
    }
    if (unit < 0x20 || unit == U_EOS) return;
    if (unit == '\\') t.escape = 1;
    else if (unit == U_DSML && s->tail == 2) t.at = AT_STRING_MARK;
    else if (unit > 255 || (unit & 0xC0) != 0x80) t.chars += t.chars < UINT32_MAX / 2;
    t.tail = gr_tail(s->tail, unit);
    gr_push(out, &t);
}

/* Behind `</` and the mark in a string: the parameter's closer would end the value in the middle. */
static void step_string_mark(const gr_state *s, int unit, gr_set *out)
{
    gr_state t;
    if (unit == 'i') gr_literal(&t, s, LIT_STRING_INVOKE);
    else if (unit == 't') gr_literal(&t, s, LIT_STRING_CALLS);
    else return;
    gr_push(out, &t);
}

/* ---- numbers ---- */

static bool whole_only(const gr_leaf *l) { return !(l->types & T_NUMBER); }

/* Is the integer, or one that begins with its digits (more), within the bounds? */
static bool within(const gr_leaf *l, bool negative, uint64_t magnitude, bool more)
{
    __int128 low = magnitude, high = magnitude;
    for (int k = 0; k < 19; k++) {
        __int128 from = negative ? -high : low, to = negative ? -low : high;
        if (from <= l->int_max && to >= l->int_min) return true;
        if (!more || magnitude == 0) return false;
        low *= 10;
        high = high * 10 + 9;
    }
    return false;
}

static bool number_whole(const gr_state *s)
{
    if (s->num == NUM_FRACTION || s->num == NUM_EXP) return true;
    if (s->num != NUM_ZERO && s->num != NUM_INT) return false;
    return !whole_only(s->leaf) || within(s->leaf, s->negative, s->magnitude, false);
}

/* A digit of the whole part: within 64 bits, and within the bounds of an integer. */
static bool whole_digit(gr_state *t, int d)
{
    uint64_t most = (uint64_t)INT64_MAX + t->negative;
    if (t->magnitude > (most - (uint64_t)d) / 10) return false;
    t->magnitude = t->magnitude * 10 + (uint64_t)d;
    t->digits++;
    t->num = t->magnitude ? NUM_INT : NUM_ZERO;
    return !whole_only(t->leaf) || within(t->leaf, t->negative, t->magnitude, true);
}

/* The value stays below 1e308. */
static bool exp_digit(gr_state *t, int d)
{
    if (t->exp_digits == 3) return false;
    t->exp_digits++;
    t->exp = (uint16_t)(t->exp * 10 + d);
    t->num = NUM_EXP;
    return t->exp_negative || t->exp + t->digits <= 308;
}

enum { FRACTION_DIGITS_MAX = 30 };

static bool number_digit(gr_state *t, int d)
{
    switch ((gr_num)t->num) {
    case NUM_MINUS: case NUM_INT: return whole_digit(t, d);
    case NUM_ZERO: return false;
    case NUM_DOT: case NUM_FRACTION:
        t->num = NUM_FRACTION;
        return ++t->fraction <= FRACTION_DIGITS_MAX;
    case NUM_E: case NUM_SIGN: case NUM_EXP: break;
    }
    return exp_digit(t, d);
}

static bool number_other(gr_state *t, int unit)
{
    bool behind_whole = t->num == NUM_ZERO || t->num == NUM_INT;
    if (whole_only(t->leaf)) return false;
    if (unit == '.' && behind_whole) t->num = NUM_DOT;
    else if ((unit | 32) == 'e' && (behind_whole || t->num == NUM_FRACTION)) t->num = NUM_E;
    else if ((unit == '-' || unit == '+') && t->num == NUM_E) {
        t->num = NUM_SIGN;
        t->exp_negative = unit == '-';
    } else return false;
    return true;
}

static void step_after(const dm_grammar *g, const gr_state *s, int unit, gr_set *out);

static void step_number(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    gr_state t;
    memcpy(&t, s, gr_state_bytes(s));
    bool digit = unit >= '0' && unit <= '9';
    if (digit ? number_digit(&t, unit - '0') : number_other(&t, unit)) {
        gr_push(out, &t);
        return;
    }
    if (digit || !number_whole(s)) return;
    gr_set done = { .n = 0 };
    value_done(s, &done);
    step_after(g, &done.s[0], unit, out);
}

static void begin_number(const gr_state *s, const gr_leaf *l, int unit, gr_set *out)
{
    gr_state t;
    gr_moved(&t, s, AT_NUMBER);
    t.leaf = l;
    t.num = NUM_MINUS; /* digits of the whole part come next */
    if (unit == '-') {
        if (whole_only(l) ? l->int_min >= 0 : l->no_minus) return;
        t.negative = 1;
    } else if (!whole_digit(&t, unit - '0')) return;
    gr_push(out, &t);
}

/* ---- words and listed values ---- */

static const char *const words[] = { "true", "false", "null" };

static void step_word(const gr_state *s, int unit, gr_set *out)
{
    gr_state t;
    if (unit != words[s->word][s->pos]) return;
    memcpy(&t, s, gr_state_bytes(s));
    if (!words[s->word][++t.pos]) value_done(&t, out);
    else gr_push(out, &t);
}

static void step_enum(const gr_state *s, int unit, gr_set *out)
{
    const gr_texts *values = &s->leaf->values;
    gr_state t;
    memcpy(&t, s, gr_state_bytes(s));
    if (unit > 255 || !gr_texts_next(values, &t.lo, &t.hi, t.pos++, unit)) return;
    if (values->v[t.lo].n == t.pos) value_done(&t, out);
    if (values->v[t.hi - 1].n > t.pos) gr_push(out, &t);
}

/* ---- values ---- */

static void begin_word(const gr_state *s, uint8_t word, gr_set *out)
{
    gr_state t;
    gr_moved(&t, s, AT_WORD);
    t.word = word;
    t.pos = 1;
    gr_push(out, &t);
}

static void begin_bracket(const gr_state *s, const gr_leaf *l, bool object, gr_set *out)
{
    gr_state t;
    if (s->depth == GR_DEPTH_MAX) return;
    gr_moved(&t, s, object ? AT_KEY_FIRST : AT_ITEM_FIRST);
    memset(&t.frames[t.depth], 0, sizeof *t.frames);
    t.frames[t.depth].leaf = l;
    t.frames[t.depth].object = object;
    t.depth++;
    gr_push(out, &t);
}

static void begin_leaf(const gr_state *s, const gr_leaf *l, int unit, gr_set *out)
{
    gr_state t;
    uint8_t types = s->depth ? l->types : l->types & (uint8_t)~T_STRING; /* a parameter's own text is string="true" */
    if (l->values_of && types) {
        gr_moved(&t, s, AT_ENUM);
        t.leaf = l;
        t.lo = s->depth ? 0 : l->nstrings;
        t.hi = l->values.n;
        step_enum(&t, unit, out);
    } else if (unit == '"' && types & T_STRING) {
        gr_moved(&t, s, AT_STRING);
        t.leaf = l;
        gr_push(out, &t);
    } else if (unit == '{' && types & T_OBJECT) begin_bracket(s, l, true, out);
    else if (unit == '[' && types & T_ARRAY) begin_bracket(s, l, false, out);
    else if ((unit == 't' || unit == 'f') && types & T_BOOLEAN) begin_word(s, unit == 'f', out);
    else if (unit == 'n' && types & T_NULL) begin_word(s, 2, out);
    else if ((unit == '-' || (unit >= '0' && unit <= '9')) && types & (T_INTEGER | T_NUMBER)) begin_number(s, l, unit, out);
}

static bool step_blank(const gr_state *s, int unit, gr_set *out)
{
    gr_state t;
    if (unit != ' ' && unit != '\n' && unit != '\t' && unit != '\r') return false;
    if (s->blanks == GR_BLANKS_MAX) return true;
    memcpy(&t, s, gr_state_bytes(s));
    t.blanks++;
    gr_push(out, &t);
    return true;
}

static void step_value(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    const gr_schema *v = &g->rules.schemas[s->schema];
    for (uint32_t i = 0; i < v->nleaves; i++) begin_leaf(s, v->leaves[i], unit, out);
}

/* ---- arrays ---- */

static int32_t item_schema(const gr_leaf *l, uint32_t i) { return i < l->nprefix ? l->prefix[i] : l->items; }

static bool more_items(const dm_grammar *g, const gr_frame *f)
{
    return f->count < f->leaf->items_max && possible(g, item_schema(f->leaf, f->count));
}

static void pop(const gr_state *s, gr_set *out)
{
    gr_state t;
    memcpy(&t, s, gr_state_bytes(s));
    t.depth--;
    value_done(&t, out);
}

static void step_item_first(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    const gr_frame *f = &s->frames[s->depth - 1];
    gr_state t;
    if (unit == ']') {
        if (!f->leaf->items_min) pop(s, out);
        return;
    }
    if (!more_items(g, f)) return;
    gr_moved(&t, s, AT_VALUE);
    t.schema = item_schema(f->leaf, 0);
    step_value(g, &t, unit, out);
}

static void after_item(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    const gr_frame *f = &s->frames[s->depth - 1];
    gr_state t;
    if (unit == ']' && f->count >= f->leaf->items_min) pop(s, out);
    if (unit != ',' || !more_items(g, f)) return;
    gr_moved(&t, s, AT_VALUE);
    t.schema = item_schema(f->leaf, f->count);
    gr_push(out, &t);
}

/* ---- objects ---- */

static bool used(const gr_frame *f, int32_t i) { return f->used[i / 64] >> (i % 64) & 1; }

static bool unused_in(const gr_frame *f, uint32_t lo, uint32_t hi)
{
    for (uint32_t i = lo; i < hi; i++)
        if (!used(f, f->leaf->keys.v[i].what)) return true;
    return false;
}

static bool more_keys(const gr_frame *f) { return !f->leaf->closed || unused_in(f, 0, f->leaf->keys.n); }

static bool has_required(const gr_frame *f)
{
    for (uint32_t i = 0; i < f->leaf->nprops; i++)
        if (f->leaf->props[i].required && !used(f, (int32_t)i)) return false;
    return true;
}

static void begin_key(const gr_state *s, gr_set *out)
{
    const gr_frame *f = &s->frames[s->depth - 1];
    gr_state t;
    gr_moved(&t, s, AT_NAME);
    t.hi = f->leaf->keys.n;
    if (unused_in(f, 0, t.hi)) gr_push(out, &t);
    t.at = AT_NAME_FREE;
    if (!f->leaf->closed) gr_push(out, &t);
}

static void step_key(const gr_state *s, int unit, gr_set *out)
{
    const gr_frame *f = &s->frames[s->depth - 1];
    if (unit == '"' && more_keys(f)) begin_key(s, out);
    if (unit == '}' && s->at == AT_KEY_FIRST && has_required(f)) pop(s, out);
}

static void after_pair(const gr_state *s, int unit, gr_set *out)
{
    const gr_frame *f = &s->frames[s->depth - 1];
    gr_state t;
    if (unit == '}' && has_required(f)) pop(s, out);
    if (unit != ',' || !more_keys(f)) return;
    gr_moved(&t, s, AT_KEY);
    gr_push(out, &t);
}

static void step_name(const gr_state *s, int unit, gr_set *out)
{
    const gr_leaf *l = s->frames[s->depth - 1].leaf;
    gr_state t;
    memcpy(&t, s, gr_state_bytes(s));
    if (unit > 255 || !gr_texts_next(&l->keys, &t.lo, &t.hi, t.pos++, unit) || !unused_in(top(&t), t.lo, t.hi)) return;
    if (l->keys.v[t.lo].n < t.pos + 1) { /* whole: no key goes on behind its closing quote */
        int32_t i = l->keys.v[t.lo].what;
        gr_state named;
        gr_moved(&named, s, AT_COLON);
        named.schema = l->props[i].schema;
        top(&named)->used[i / 64] |= UINT64_C(1) << (i % 64);
        gr_push(out, &named);
        return;
    }
    gr_push(out, &t);
}

/* A key that is not declared.  Escapes could spell a declared one, so beside such keys there are none. */
static void step_name_free(const gr_state *s, int unit, gr_set *out)
{
    const gr_leaf *l = s->frames[s->depth - 1].leaf;
    gr_state t;
    memcpy(&t, s, gr_state_bytes(s));
    if (s->escape) {
        if (step_escape(&t, unit)) gr_push(out, &t);
        return;
    }
    if (unit < 0x20 || unit > 255 || (unit == '\\' && l->nprops)) return;
    if (unit == '\\') {
        t.escape = 1;
        gr_push(out, &t);
        return;
    }
    if (!gr_texts_next(&l->keys, &t.lo, &t.hi, t.pos++, unit)) t.lo = t.hi = 0;
    if (unit != '"') {
        gr_push(out, &t);
        return;
    }
    if (t.lo < t.hi && l->keys.v[t.lo].n == t.pos) return;
    gr_moved(&t, s, AT_COLON);
    t.schema = l->extra;
    gr_push(out, &t);
}

/* ---- all ---- */

static void step_after(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    gr_state t;
    if (step_blank(s, unit, out)) return;
    if (s->depth && s->frames[s->depth - 1].object) after_pair(s, unit, out);
    else if (s->depth) after_item(g, s, unit, out);
    else if (unit == '<') {
        gr_literal(&t, s, LIT_PARAM_CLOSE);
        gr_push(out, &t);
    }
}

static void step_colon(const gr_state *s, int unit, gr_set *out)
{
    gr_state t;
    if (unit != ':') return;
    gr_moved(&t, s, AT_VALUE);
    gr_push(out, &t);
}

void gr_json_step(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    switch ((gr_at)s->at) {
    case AT_STRING: step_string(s, unit, out); return;
    case AT_STRING_MARK: step_string_mark(s, unit, out); return;
    case AT_WORD: step_word(s, unit, out); return;
    case AT_ENUM: step_enum(s, unit, out); return;
    case AT_NUMBER: step_number(g, s, unit, out); return;
    case AT_NAME: step_name(s, unit, out); return;
    case AT_NAME_FREE: step_name_free(s, unit, out); return;
    case AT_AFTER: step_after(g, s, unit, out); return;
    default: break;
    }
    if (step_blank(s, unit, out)) return;
    switch ((gr_at)s->at) {
    case AT_VALUE: step_value(g, s, unit, out); return;
    case AT_ITEM_FIRST: step_item_first(g, s, unit, out); return;
    case AT_KEY_FIRST: case AT_KEY: step_key(s, unit, out); return;
    case AT_COLON: step_colon(s, unit, out); return;
    default: return;
    }
}
