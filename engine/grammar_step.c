/* The automaton of a call block, from behind `<｜DSML｜` of its opener to its closer.  The trained spelling:
 *
 *   tool_calls>\n<｜DSML｜invoke name="NAME">\n
 *     <｜DSML｜parameter name="KEY" string="true">text</｜DSML｜parameter>\n      any number
 *     <｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>\n
 *   </｜DSML｜invoke>\n                                 without parameters: an empty line before it, or not
 *   <｜DSML｜invoke …                                    more calls
 *   </｜DSML｜tool_calls>
 *
 * In text values everything is data but the value's own closer.  Behind `</｜DSML｜` the parser also reads misspelt
 * closers, so there only the closer and the two other closing tags, which are data to it, can follow. */
#include <string.h>

#include "engine/grammar_int.h"

/* \1 stands for the mark. */
static const struct { const char *text; gr_at next; } literals[] = {
    [LIT_OPEN] = { "tool_calls>\n<\1invoke name=\"", AT_TOOL },
    [LIT_INVOKE] = { "invoke name=\"", AT_TOOL },
    [LIT_PARAM] = { "parameter name=\"", AT_PARAM },
    [LIT_TRUE] = { "rue\">", AT_RAW },
    [LIT_FALSE] = { "alse\">", AT_VALUE },
    [LIT_PARAM_CLOSE] = { "/\1parameter>\n<", AT_TAG },
    [LIT_RAW_CLOSE] = { "arameter>\n<", AT_TAG },
    [LIT_INVOKE_CLOSE] = { "\1invoke>\n<", AT_BLOCK },
    [LIT_EMPTY_CLOSE] = { "</\1invoke>\n<", AT_BLOCK },
    [LIT_BLOCK_CLOSE] = { "\1tool_calls>", AT_DONE },
    [LIT_RAW_INVOKE] = { "nvoke>", AT_RAW },
    [LIT_RAW_CALLS] = { "ool_calls>", AT_RAW },
    [LIT_STRING_INVOKE] = { "nvoke>", AT_STRING },
    [LIT_STRING_CALLS] = { "ool_calls>", AT_STRING },
};

void gr_push(gr_set *out, const gr_state *s)
{
    size_t n = gr_state_bytes(s);
    for (int i = 0; i < out->n; i++)
        if (out->s[i].depth == s->depth && memcmp(&out->s[i], s, n) == 0) return;
    if (out->n < GR_THREADS_MAX) memcpy(&out->s[out->n++], s, n);
}

void gr_moved(gr_state *to, const gr_state *from, gr_at at)
{
    memset(to, 0, offsetof(gr_state, frames));
    to->at = (uint8_t)at;
    to->depth = from->depth;
    to->tool = from->tool;
    to->param = from->param;
    to->schema = from->schema;
    memcpy(to->frames, from->frames, from->depth * sizeof *to->frames);
}

void gr_literal(gr_state *to, const gr_state *from, gr_lit lit)
{
    gr_moved(to, from, AT_LITERAL);
    to->lit = (uint8_t)lit;
    /* Inside a text value its length goes on being counted. */
    if (lit < LIT_RAW_INVOKE) return;
    to->leaf = from->leaf;
    to->chars = from->chars;
}

uint8_t gr_tail(uint8_t tail, int unit) { return unit == '<' ? 1 : unit == '/' && tail == 1 ? 2 : 0; }

/* ---- what can still be given ---- */

static const gr_tool *tool_of(const dm_grammar *g, const gr_state *s) { return &g->rules.tools[s->tool]; }

static bool complete(const dm_grammar *g, const gr_state *s)
{
    const gr_tool *t = tool_of(g, s);
    for (uint32_t i = 0; i < t->nprops; i++)
        if (t->props[i].required && !g->used[i]) return false;
    return true;
}

static bool unused_in(const dm_grammar *g, const gr_tool *t, uint32_t lo, uint32_t hi)
{
    for (uint32_t i = lo; i < hi; i++)
        if (!g->used[t->names.v[i].what]) return true;
    return false;
}

static bool more_params(const dm_grammar *g, const gr_state *s)
{
    const gr_tool *t = tool_of(g, s);
    return t->extra >= 0 || unused_in(g, t, 0, t->names.n);
}

/* ---- literals ---- */

/* The value begins: one thread for each form that text may have. */
static void begin_raw(const dm_grammar *g, const gr_state *s, gr_set *out)
{
    const gr_schema *v = &g->rules.schemas[s->schema];
    for (uint32_t i = 0; i < v->nleaves; i++) {
        const gr_leaf *l = v->leaves[i];
        if (!(l->types & T_STRING)) continue;
        gr_state t;
        gr_moved(&t, s, l->values_of ? AT_RAW_VALUE : AT_RAW);
        t.leaf = l;
        t.hi = l->raw.n;
        gr_push(out, &t);
    }
}

static void begin_tool(const dm_grammar *g, gr_state *t, gr_set *out)
{
    t->tool = -1;
    t->hi = g->rules.names.n;
    gr_push(out, t);
}

/* A declared name, or one of the model's own. */
static void begin_param(const dm_grammar *g, gr_state *t, gr_set *out)
{
    const gr_tool *tool = tool_of(g, t);
    t->hi = tool->names.n;
    if (unused_in(g, tool, 0, t->hi)) gr_push(out, t);
    if (tool->extra < 0) return;
    t->at = AT_FREE;
    t->hi2 = g->keys.n;
    gr_push(out, t);
}

static void literal_end(const dm_grammar *g, const gr_state *s, gr_set *out)
{
    gr_at at = literals[s->lit].next;
    gr_state t;
    gr_moved(&t, s, at);
    switch (s->lit) {
    case LIT_TRUE: begin_raw(g, s, out); return;
    case LIT_OPEN: case LIT_INVOKE: begin_tool(g, &t, out); return;
    case LIT_PARAM: begin_param(g, &t, out); return;
    case LIT_PARAM_CLOSE: case LIT_RAW_CLOSE:
        t.param = PARAM_NONE;
        t.schema = SCHEMA_ANY;
        break;
    case LIT_INVOKE_CLOSE: case LIT_EMPTY_CLOSE: t.tool = -1; break;
    case LIT_RAW_INVOKE: case LIT_RAW_CALLS: case LIT_STRING_INVOKE: case LIT_STRING_CALLS:
        t.leaf = s->leaf;
        t.chars = s->chars + (uint32_t)strlen(literals[s->lit].text) + 1;
        break;
    default: break;
    }
    gr_push(out, &t);
}

static void step_literal(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    const char *text = literals[s->lit].text;
    int want = text[s->pos] == 1 ? U_DSML : (uint8_t)text[s->pos];
    if (unit != want) return;
    if (!text[s->pos + 1]) {
        literal_end(g, s, out);
        return;
    }
    gr_state t;
    memcpy(&t, s, gr_state_bytes(s));
    t.pos++;
    gr_push(out, &t);
}

/* ---- names ---- */

static void step_tool(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    const gr_texts *names = &g->rules.names;
    gr_state t;
    memcpy(&t, s, gr_state_bytes(s));
    if (!gr_texts_next(names, &t.lo, &t.hi, t.pos++, unit)) return;
    for (uint32_t i = t.lo; i < t.hi && names->v[i].n == t.pos; i++) {
        gr_state named;
        gr_moved(&named, s, AT_FIRST);
        named.tool = names->v[i].what;
        gr_push(out, &named);
    }
    if (names->v[t.hi - 1].n > t.pos) gr_push(out, &t);
}

static void named_param(const gr_state *s, int32_t param, int32_t schema, gr_set *out)
{
    gr_state t;
    gr_moved(&t, s, AT_BOOL);
    t.param = param;
    t.schema = schema;
    gr_push(out, &t);
}

static void step_param(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    const gr_tool *tool = tool_of(g, s);
    const gr_texts *names = &tool->names;
    gr_state t;
    memcpy(&t, s, gr_state_bytes(s));
    if (!gr_texts_next(names, &t.lo, &t.hi, t.pos++, unit) || !unused_in(g, tool, t.lo, t.hi)) return;
    for (uint32_t i = t.lo; i < t.hi && names->v[i].n == t.pos; i++)
        if (!g->used[names->v[i].what]) named_param(s, names->v[i].what, tool->props[names->v[i].what].schema, out);
    if (names->v[t.hi - 1].n > t.pos) gr_push(out, &t);
}

/* Does [lo,hi) hold a text of exactly n bytes? */
static bool holds(const gr_texts *t, uint32_t lo, uint32_t hi, size_t n)
{
    for (uint32_t i = lo; i < hi; i++)
        if (t->v[i].n == n) return true;
    return false;
}

static bool free_key_byte(int c) { return (c >= '0' && c <= '9') || ((c | 32) >= 'a' && (c | 32) <= 'z') || (c && c < 128 && strchr("_-.$:@ ", c)); }

/* The model's own name: plain ASCII, not a declared one, not given before.  hi, hi2: 0 once nothing is like it. */
static void step_free(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    static const char tail[] = "\" string=\"";
    const gr_tool *tool = tool_of(g, s);
    gr_state t;
    memcpy(&t, s, gr_state_bytes(s));
    if (s->num == 0 && unit == '"') { /* the name is whole */
        if (!s->pos || holds(&tool->names, s->lo, s->hi, s->pos + strlen(tail)) || holds(&g->keys, s->lo2, s->hi2, s->pos)) return;
        t.num = 1;
        gr_push(out, &t);
        return;
    }
    if (s->num) {
        if (unit != tail[s->num]) return;
        if (!tail[++t.num]) named_param(s, PARAM_FREE, tool->extra, out);
        else gr_push(out, &t);
        return;
    }
    if (!free_key_byte(unit) || s->pos == GR_FREE_KEY_BYTES_MAX) return;
    if (!gr_texts_next(&tool->names, &t.lo, &t.hi, t.pos, unit)) t.lo = t.hi = 0;
    if (!gr_texts_next(&g->keys, &t.lo2, &t.hi2, t.pos, unit)) t.lo2 = t.hi2 = 0;
    t.pos++;
    gr_push(out, &t);
}

/* ---- between tags ---- */

/* Behind string=": true where the value may be text, false where it may be anything else. */
static void step_bool(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    const gr_schema *v = &g->rules.schemas[s->schema];
    uint8_t types = 0;
    gr_state t;
    for (uint32_t i = 0; i < v->nleaves; i++) types |= v->leaves[i]->types;
    if (unit == 't' && types & T_STRING) gr_literal(&t, s, LIT_TRUE);
    else if (unit == 'f' && types & ~T_STRING) gr_literal(&t, s, LIT_FALSE);
    else return;
    gr_push(out, &t);
}

/* Behind the line of the invoke tag (first) or behind the '<' of a line. */
static void step_tag(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    bool first = s->at == AT_FIRST;
    gr_state t;
    if (first && unit == '<') gr_moved(&t, s, AT_TAG);
    else if (first && unit == '\n' && complete(g, s)) gr_literal(&t, s, LIT_EMPTY_CLOSE);
    else if (!first && unit == U_DSML && more_params(g, s)) gr_literal(&t, s, LIT_PARAM);
    else if (!first && unit == '/' && complete(g, s)) gr_literal(&t, s, LIT_INVOKE_CLOSE);
    else return;
    gr_push(out, &t);
}

static void step_block(const gr_state *s, int unit, gr_set *out)
{
    gr_state t;
    if (unit == U_DSML) gr_literal(&t, s, LIT_INVOKE);
    else if (unit == '/') gr_literal(&t, s, LIT_BLOCK_CLOSE);
    else return;
    gr_push(out, &t);
}

/* ---- text values ---- */

static void step_raw(const gr_state *s, int unit, gr_set *out)
{
    if (unit == U_EOS || unit == 0) return;
    gr_state t;
    memcpy(&t, s, gr_state_bytes(s));
    if (unit == U_DSML && s->tail == 2) t.at = AT_RAW_MARK;
    else if (unit > 255 || (unit & 0xC0) != 0x80) t.chars += t.chars < UINT32_MAX / 2;
    t.tail = gr_tail(s->tail, unit);
    gr_push(out, &t);
}

/* Behind `</` and the mark; chars counts the `</`. */
static void step_raw_mark(const gr_state *s, int unit, gr_set *out)
{
    gr_state t;
    if (unit == 'p' && s->chars - 2 >= s->leaf->chars_min) gr_literal(&t, s, LIT_RAW_CLOSE);
    else if (unit == 'i') gr_literal(&t, s, LIT_RAW_INVOKE);
    else if (unit == 't') gr_literal(&t, s, LIT_RAW_CALLS);
    else return;
    gr_push(out, &t);
}

static void step_raw_value(const gr_state *s, int unit, gr_set *out)
{
    const gr_texts *raw = &s->leaf->raw;
    gr_state t;
    memcpy(&t, s, gr_state_bytes(s));
    if (unit == U_DSML) { /* the literal of the closer from its mark on */
        if (!holds(raw, s->lo, s->hi, s->pos)) return;
        gr_literal(&t, s, LIT_PARAM_CLOSE);
        t.pos = 2;
        gr_push(out, &t);
        return;
    }
    if (unit > 255 || !gr_texts_next(raw, &t.lo, &t.hi, t.pos++, unit)) return;
    gr_push(out, &t);
}

/* ---- all ---- */

void gr_step(const dm_grammar *g, const gr_state *s, int unit, gr_set *out)
{
    switch ((gr_at)s->at) {
    case AT_LITERAL: step_literal(g, s, unit, out); break;
    case AT_TOOL: step_tool(g, s, unit, out); break;
    case AT_FIRST: case AT_TAG: step_tag(g, s, unit, out); break;
    case AT_PARAM: step_param(g, s, unit, out); break;
    case AT_FREE: step_free(g, s, unit, out); break;
    case AT_BOOL: step_bool(g, s, unit, out); break;
    case AT_RAW: step_raw(s, unit, out); break;
    case AT_RAW_MARK: step_raw_mark(s, unit, out); break;
    case AT_RAW_VALUE: step_raw_value(s, unit, out); break;
    case AT_BLOCK: step_block(s, unit, out); break;
    case AT_DONE: break; /* the end token, which gr_set's caller knows */
    default: gr_json_step(g, s, unit, out); break;
    }
}

void gr_step_set(const dm_grammar *g, const gr_set *from, int unit, gr_set *out)
{
    out->n = 0;
    for (int i = 0; i < from->n; i++) gr_step(g, &from->s[i], unit, out);
}

void gr_block_begin(gr_set *out)
{
    gr_state none, s;
    memset(&none, 0, sizeof none);
    none.tool = -1;
    none.param = PARAM_NONE;
    none.schema = SCHEMA_ANY;
    gr_literal(&s, &none, LIT_OPEN);
    out->n = 0;
    gr_push(out, &s);
}
