/* Is there a tag at this place?  The trained spelling is
 *
 *   <｜DSML｜tool_calls>   <｜DSML｜invoke name="NAME">   <｜DSML｜parameter name="KEY" string="true|false">
 *   and the closers </｜DSML｜…>
 *
 * Models drift from it: doubled or ASCII bars, a space behind the bars, a letter lost or doubled in the word, other
 * quotes, another order of attributes, no '>'.  All that is still a tag, and marked as odd.  What is data is for
 * the caller to say, who knows where in a block it stands. */
#include <string.h>

#include "engine/parser_int.h"

typedef struct cursor {
    const tag_view *v;
    size_t i, n; /* n: the view, at most TAG_BYTES_MAX */
} cursor;

static lex more(const cursor *c) { return c->v->final || c->v->n > TAG_BYTES_MAX ? LEX_NO : LEX_MORE; }

int tag_canonical(bool in_text) { return in_text ? 0x11 : 0; }

lex tag_literal(const tag_view *v, const char *text)
{
    size_t want = strlen(text), n = v->n < want ? v->n : want;
    if (memcmp(v->p, text, n) != 0) return LEX_NO;
    return n == want ? LEX_YES : v->final ? LEX_NO : LEX_MORE;
}

/* ---- < / bars DSML bars ---- */

/* Up to two bars, full width or ASCII.  code: their number, plus 4 if any is ASCII. */
static lex bars(cursor *c, int *code)
{
    int count = 0, ascii = 0;
    while (count < 2) {
        const uint8_t *p = c->v->p + c->i;
        size_t left = c->n - c->i;
        if (!left) return more(c);
        if (*p == '|') ascii = 4, c->i++;
        else if (*p != 0xEF) break;
        else if (left >= 3 && p[1] == 0xBD && p[2] == 0x9C) c->i += 3;
        else if (left < 3 && (left < 2 || p[1] == 0xBD)) return more(c);
        else break;
        count++;
    }
    *code = count + (count ? ascii : 0);
    return LEX_YES;
}

static lex dsml(cursor *c, tag *t)
{
    int left, right;
    lex l = bars(c, &left);
    if (l != LEX_YES) return l;
    if (c->i == c->n) return more(c);
    bool mark;
    if (c->v->in_text) {
        size_t n = c->n - c->i < 4 ? c->n - c->i : 4;
        mark = left && memcmp(c->v->p + c->i, "DSML", n) == 0;
        if (mark && n < 4) return more(c);
        if (mark) c->i += 4;
    } else {
        mark = c->v->p[c->i] == SYM_DSML;
        if (mark) c->i++;
    }
    if (!mark) {
        t->dialect = DIALECT_PLAIN;
        return c->v->plain && !left ? LEX_YES : LEX_NO;
    }
    l = bars(c, &right);
    if (l != LEX_YES) return l;
    t->dialect = left << 4 | right;
    return c->v->in_text && !right ? LEX_NO : LEX_YES;
}

/* ---- the word ---- */

static bool is_word(const char *w, size_t n, const char *want) { return n == strlen(want) && memcmp(w, want, n) == 0; }

static bool classify(const char *w, size_t n, tag *t)
{
    static const struct { const char *word; tag_kind kind; int slack; } words[] = {
        {"tool_calls", TAG_CALLS, 2}, {"invoke", TAG_INVOKE, 1}, {"parameter", TAG_PARAM, 2},
        {"calls", TAG_CALLS, 0}, {"function_calls", TAG_CALLS, 2},
    };
    for (size_t i = 0; i < DM_COUNT(words); i++) {
        if (!is_word(w, n, words[i].word)) continue;
        t->kind = words[i].kind;
        t->near_word = false;
        t->odd |= i >= 3;
        return true;
    }
    for (size_t i = 0; i < DM_COUNT(words); i++) {
        if (t->dialect == DIALECT_PLAIN || dm_text_distance(w, n, words[i].word, strlen(words[i].word)) > words[i].slack) continue;
        t->kind = words[i].kind;
        t->near_word = t->odd = true;
        return true;
    }
    return false;
}

static size_t blanks(const cursor *c, size_t i)
{
    while (i < c->n && (c->v->p[i] == ' ' || c->v->p[i] == '\t')) i++;
    return i;
}

static bool letter(uint8_t x) { return (x | 32) >= 'a' && (x | 32) <= 'z'; }

static lex word(cursor *c, tag *t)
{
    size_t from = blanks(c, c->i), i = from;
    if (from - c->i > 2) return LEX_NO;
    t->odd |= from > c->i;
    while (i < c->n && (letter(c->v->p[i]) || c->v->p[i] == '_' || c->v->p[i] == '-')) i++;
    if (i - from > 24) return LEX_NO;
    if (i == c->n && !(c->v->final && t->close)) return more(c);
    if (i == from || !classify((const char *)c->v->p + from, i - from, t)) return LEX_NO;
    c->i = i;
    return LEX_YES;
}

/* ---- attributes ---- */

static lex done(cursor *c, tag *t, size_t i)
{
    t->len = i;
    c->i = i;
    return LEX_YES;
}

/* '>' or, from a careless model, the line break or tag that should have come behind it. */
static lex end_of_tag(cursor *c, tag *t, bool at_eof)
{
    size_t i = blanks(c, c->i);
    if (i == c->n) {
        if (!c->v->final || !at_eof) return more(c);
        t->odd = true;
        return done(c, t, i);
    }
    uint8_t x = c->v->p[i];
    t->odd |= i > c->i || x != '>';
    if (x == '>') return done(c, t, i + 1);
    return x == '\n' || x == '\r' || x == '<' ? done(c, t, i) : LEX_NO;
}

/* Length of the quotation mark at p: 0 none.  class: ' or ". */
static size_t quote(const uint8_t *p, size_t n, char *class)
{
    if (n && (*p == '"' || *p == '\'')) {
        *class = (char)*p;
        return 1;
    }
    if (n < 3 || p[0] != 0xE2 || p[1] != 0x80) return 0;
    *class = p[2] == 0x9C || p[2] == 0x9D ? '"' : '\'';
    return p[2] == 0x98 || p[2] == 0x99 || p[2] == 0x9C || p[2] == 0x9D ? 3 : 0;
}

/* May the value end here, i.e. does what follows look like the rest of a tag?  A key may hold quotes itself. */
static lex continues(const cursor *c, size_t i)
{
    static const char *const names[] = {"string", "name"};
    size_t j = blanks(c, i);
    if (j == c->n) return more(c);
    if (memchr(">\n\r", c->v->p[j], 3)) return LEX_YES;
    if (c->v->p[j] == '/') return j + 1 == c->n ? more(c) : c->v->p[j + 1] == '>' ? LEX_YES : LEX_NO;
    for (size_t k = 0; j > i && k < DM_COUNT(names); k++) {
        size_t len = strlen(names[k]), n = c->n - j < len ? c->n - j : len;
        if (memcmp(c->v->p + j, names[k], n) != 0) continue;
        if (n < len) return more(c);
        size_t eq = blanks(c, j + len);
        if (eq == c->n) return more(c);
        if (c->v->p[eq] == '=') return LEX_YES;
    }
    return LEX_NO;
}

static lex quoted(cursor *c, const tag *t, size_t *from, size_t *n)
{
    char open, close;
    size_t q = quote(c->v->p + c->i, c->n - c->i, &open);
    if (!q) return c->n - c->i < 3 && (c->i == c->n || c->v->p[c->i] == 0xE2) ? more(c) : LEX_NO;
    *from = c->i + q;
    for (size_t i = *from; i < c->n; i++) {
        if (t->kind == TAG_INVOKE && c->v->p[i] == '\n') return LEX_NO;
        q = quote(c->v->p + i, c->n - i, &close);
        if (!q || close != open) continue;
        lex l = continues(c, i + q);
        if (l == LEX_NO) continue;
        *n = i - *from;
        c->i = i + q;
        return l;
    }
    return more(c);
}

/* Unquoted: letters, digits and the like. */
static lex bare_value(cursor *c, size_t *from, size_t *n)
{
    size_t i = *from = c->i;
    while (i < c->n && (letter(c->v->p[i]) || (c->v->p[i] >= '0' && c->v->p[i] <= '9') || memchr("_-.", c->v->p[i], 3))) i++;
    if (i == c->n) return more(c);
    *n = i - *from;
    c->i = i;
    return *n ? LEX_YES : LEX_NO;
}

static void set_attribute(const cursor *c, tag *t, size_t at, size_t len, size_t from, size_t n)
{
    const char *p = (const char *)c->v->p;
    if (is_word(p + at, len, "name") && !t->has_name) {
        t->has_name = true, t->name = from, t->name_n = n;
        t->odd |= t->string != STRING_ABSENT; /* not in the usual order */
    } else if (is_word(p + at, len, "string") && t->string == STRING_ABSENT) {
        bool yes = is_word(p + from, n, "true"), no = is_word(p + from, n, "false");
        t->string = yes ? STRING_TRUE : no ? STRING_FALSE : STRING_ODD;
        t->odd |= !yes && !no;
    } else {
        t->odd = true;
    }
}

static lex attribute(cursor *c, tag *t)
{
    size_t at = c->i, i = at, from = 0, n = 0;
    while (i < c->n && (letter(c->v->p[i]) || c->v->p[i] == '_')) i++;
    size_t len = i - at;
    c->i = blanks(c, i);
    if (c->i == c->n) return more(c);
    if (!len || c->v->p[c->i] != '=') return LEX_NO;
    t->odd |= c->i > i;
    i = c->i + 1;
    c->i = blanks(c, i);
    if (c->i == c->n) return more(c);
    t->odd |= c->i > i || c->v->p[c->i] != '"';
    lex l = quoted(c, t, &from, &n);
    if (l == LEX_NO && c->v->p[c->i] != '"' && c->v->p[c->i] != '\'') l = bare_value(c, &from, &n);
    if (l == LEX_YES) set_attribute(c, t, at, len, from, n);
    return l;
}

static lex attributes(cursor *c, tag *t)
{
    for (;;) {
        size_t i = blanks(c, c->i);
        if (i == c->n) return more(c);
        uint8_t x = c->v->p[i];
        if (x == '/') {
            if (i + 1 == c->n) return more(c);
            t->self_closed = t->odd = true;
            return c->v->p[i + 1] == '>' ? done(c, t, i + 2) : LEX_NO;
        }
        if (x == '>') {
            t->odd |= i > c->i;
            return done(c, t, i + 1);
        }
        if (x == '\n' || x == '\r' || x == '<') {
            t->odd = true;
            return t->has_name ? done(c, t, i) : LEX_NO;
        }
        if (i == c->i) return LEX_NO; /* no blank before an attribute */
        t->odd |= i - c->i > 1;
        c->i = i;
        lex l = attribute(c, t);
        if (l != LEX_YES) return l;
    }
}

lex tag_lex(const tag_view *v, tag *t)
{
    cursor c = {.v = v, .i = 1, .n = v->n < TAG_BYTES_MAX ? v->n : TAG_BYTES_MAX};
    memset(t, 0, sizeof *t);
    if (c.i == c.n) return more(&c);
    if (v->p[1] == '/') t->close = true, c.i++;
    if (c.i == c.n) return more(&c);
    lex l = dsml(&c, t);
    if (l == LEX_YES) l = word(&c, t);
    if (l != LEX_YES) return l;
    if (t->dialect == DIALECT_PLAIN && t->kind == TAG_CALLS) return LEX_NO;
    t->odd |= t->dialect != tag_canonical(v->in_text);
    if (t->close || t->kind == TAG_CALLS) l = end_of_tag(&c, t, t->close);
    else l = attributes(&c, t);
    if (t->kind == TAG_PARAM && !t->close && t->string == STRING_ABSENT) t->odd = true;
    return l;
}
