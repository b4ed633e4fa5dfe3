/* The parser of model output.  However the bytes are cut it must say the same; texts are whole characters; the pieces of
 * a call's arguments join to their whole, which is JSON for everybody.
 *
 * Bytes of an input: how the parser is set up (thinking, tools, cut short, limit of a call), a seed for the cuts (odd:
 * single bytes instead; bit 1: as tokens too), then the output, in which \x01 … \x1D stand for the texts in `words` and \x1F for the byte that follows, as it is. */
#include "engine/engine.h"
#include "engine/pyjson_int.h"
#include "tests/fuzz/lib.h"

#define DSML "｜DSML｜"
#define EOS "<｜end▁of▁sentence｜>"

static const char *const words[] = {
    [1] = "<" DSML "tool_calls>", "</" DSML "tool_calls>", "<" DSML "invoke name=\"bash\">", "</" DSML "invoke>",
    "<" DSML "parameter name=\"command\" string=\"true\">", "</" DSML "parameter>", "<" DSML "parameter name=\"limit\" string=\"false\">",
    "</think>", NULL /* \t */, NULL /* \n */, EOS, "<" DSML "invoke name=\"", NULL /* \r */, DSML,
    "<" DSML "parameter name=\"", "\" string=\"true\">", "\" string=\"false\">", "<invoke name=\"read\">", "</invoke>", "<parameter name=\"path\">",
    "</parameter>", "<|DSML|invoke name=\"now\">", "<" DSML "invoke name=\"edit\">", "<" DSML "parameter name=\"edits\">",
    "<" DSML "parameter name=\"arguments\" string=\"true\">", "{\"command\": \"ls\"}", "<" DSML "invoke name=\"read\">",
    "<" DSML "parameter name=\"path\" string=\"true\">", "</" DSML "paramter>",
};
_Static_assert(DM_COUNT(words) == 0x1E, "one word for each byte below FUZZ_PART");

static const dm_parser_tool tools[] = {
    {"bash", "{\"type\":\"object\",\"properties\":{\"command\":{\"type\":\"string\"}},\"required\":[\"command\"]}"},
    {"read", "{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\"},\"limit\":{\"type\":\"integer\"}},\"required\":[\"path\"]}"},
    {"edit", "{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\"},\"edits\":{\"type\":\"array\"}},\"required\":[\"path\",\"edits\"]}"},
    {"now", "{\"type\":\"object\",\"properties\":{}}"},
    {"own", "{\"type\":\"object\",\"properties\":{\"arguments\":{\"type\":\"object\"}},\"required\":[\"arguments\"]}"},
    {"free", NULL},
};

static void expand(dm_buf *out, fuzz_bytes in)
{
    while (in.n) {
        uint8_t c = fuzz_byte(&in);
        if (c < DM_COUNT(words) && words[c]) FUZZ_OK(dm_buf_str(out, words[c]));
        else FUZZ_OK(dm_buf_byte(out, c == 0x1F ? fuzz_byte(&in) : c));
    }
}

/* ---- what one run said ---- */

typedef struct said {
    dm_buf log;  /* every event; pieces of one text joined */
    dm_buf args; /* of the open call */
    dm_parse_kind last;
    int last_index, begun, whole, errors;
} said;

static void said_free(said *s)
{
    dm_buf_free(&s->log);
    dm_buf_free(&s->args);
}

static void check_json(const char *p, size_t n)
{
    pj_doc d;
    dm_buf again = {0};
    dm_err e = {0};
    if (pj_read(&d, p, n, &e) < 0) FUZZ_FAIL("arguments are no JSON: %s: %.*s", e.text, (int)n, p);
    FUZZ_OK(pj_write(&d.root, &again));
    bool same = again.n == n && memcmp(again.p, p, n) == 0;
    same |= memmem(p, n, "\xEF\xBF\xBD", 3) != NULL; /* keys may have become equal with it */
    if (d.root.kind != PJ_DICT || !pj_finite(&d.root) || !same) FUZZ_FAIL("arguments are not in form: %.*s", (int)n, p);
    dm_buf_free(&again);
    pj_free(&d);
}

static bool is_text(dm_parse_kind k) { return k == DM_PARSE_REASONING || k == DM_PARSE_CONTENT || k == DM_PARSE_ARGS; }

static void hear(void *ctx, const dm_parse_event *ev)
{
    said *s = ctx;
    if (!dm_utf8_valid(ev->p, ev->n)) FUZZ_FAIL("a piece of text is not whole: kind %d, %zu bytes", ev->kind, ev->n);
    if (!s->log.n || !is_text(ev->kind) || ev->kind != s->last || ev->index != s->last_index) FUZZ_OK(dm_buf_printf(&s->log, "\n[%d %d] ", ev->kind, ev->index));
    FUZZ_OK(dm_buf_append(&s->log, ev->p, ev->n));
    s->last = ev->kind, s->last_index = ev->index;
    switch (ev->kind) {
    case DM_PARSE_CALL:
        FUZZ_CHECK(ev->index == s->begun && ev->n > 0);
        s->begun++;
        dm_buf_clear(&s->args);
        break;
    case DM_PARSE_ARGS:
        FUZZ_CHECK(ev->index == s->begun - 1 && ev->n > 0);
        FUZZ_OK(dm_buf_append(&s->args, ev->p, ev->n));
        break;
    case DM_PARSE_CALL_END:
        FUZZ_CHECK(ev->index == s->begun - 1 && s->args.n == ev->n && memcmp(s->args.p, ev->p, ev->n) == 0);
        check_json(ev->p, ev->n);
        s->whole++;
        break;
    case DM_PARSE_ERROR: s->errors++; break;
    default: break;
    }
}

/* ---- ways to feed ---- */

typedef enum way { WHOLE, BYTES, CUTS, TOKENS, TOKEN_CUTS } way;

static size_t mark_at(const uint8_t *p, size_t n)
{
    static const char *const marks[] = {DSML, "</think>", EOS};
    for (size_t i = 0; i < DM_COUNT(marks); i++) {
        size_t len = strlen(marks[i]);
        if (len <= n && memcmp(p, marks[i], len) == 0) return len;
    }
    return 0;
}

/* Length of the next piece; *special: it is an added token. */
static size_t next_piece(const uint8_t *p, size_t n, way how, uint64_t *seed, bool *special)
{
    size_t mark = how >= TOKENS ? mark_at(p, n) : 0, len = n;
    *special = mark > 0;
    if (mark) return mark;
    if (how == BYTES || how == TOKENS) return 1;
    if (how != WHOLE) len = 1 + dm_splitmix64(seed) % 9;
    if (len > n) len = n;
    for (size_t i = 1; how == TOKEN_CUTS && i < len; i++)
        if (mark_at(p + i, n - i)) len = i;
    return len;
}

static said run(dm_parser_opts o, const dm_buf *text, way how, uint64_t seed, bool cut)
{
    said s = {0};
    dm_parser *p;
    dm_err e = {0};
    o.markers_in_text = how < TOKENS;
    FUZZ_OK(dm_parser_create(&p, &o, hear, &s, &e));
    for (size_t i = 0; i < text->n;) {
        bool special;
        size_t len = next_piece(text->p + i, text->n - i, how, &seed, &special);
        FUZZ_OK(dm_parser_feed(p, (const char *)text->p + i, len, special));
        i += len;
    }
    FUZZ_OK(dm_parser_finish(p, cut));
    FUZZ_CHECK(dm_parser_calls(p) == s.whole && dm_parser_errors(p) == s.errors);
    for (int i = 0; i < s.whole; i++) FUZZ_OK(dm_buf_printf(&s.log, "\n%s %s", dm_parser_call_name(p, i), dm_parser_call_args(p, i)));
    for (int i = 0; i < s.errors; i++) FUZZ_CHECK(strlen(dm_parser_error(p, i)) > 10);
    FUZZ_OK(dm_buf_printf(&s.log, "\nclosed: %d", dm_parser_block_closed(p)));
    dm_parser_destroy(p);
    return s;
}

static void compare(dm_parser_opts o, const dm_buf *text, way a, way b, uint64_t seed, bool cut)
{
    said x = run(o, text, a, seed, cut), y = run(o, text, b, seed, cut);
    if (x.log.n != y.log.n || memcmp(x.log.p, y.log.p, x.log.n) != 0)
        FUZZ_FAIL("ways %d and %d differ on: %s\n---%s\n---%s", a, b, dm_buf_cstr(text), dm_buf_cstr(&x.log), dm_buf_cstr(&y.log));
    if (o.ntools == 0) FUZZ_CHECK(x.begun + x.errors == 0);
    said_free(&x);
    said_free(&y);
}

int FUZZ_ENTRY(const uint8_t *data, size_t n)
{
    fuzz_bytes in = {data, n};
    uint8_t how = fuzz_byte(&in), seed = fuzz_byte(&in);
    dm_parser_opts o = {.thinking = how & 1, .tools = tools, .ntools = how & 2 ? 0 : DM_COUNT(tools), .call_bytes_max = how & 8 ? 20 + (how >> 4) * 12u : 0};
    bool cut = how & 4;
    dm_buf text = {0};
    expand(&text, in);
    compare(o, &text, WHOLE, seed & 1 ? BYTES : CUTS, seed, cut);
    if (seed & 2) compare(o, &text, TOKENS, TOKEN_CUTS, seed, cut);
    dm_buf_free(&text);
    return 0;
}
