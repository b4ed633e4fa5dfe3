/* Feeds the parser in many ways and writes down what it says, so that two feedings can be compared as texts. */
#ifndef TEST_ENGINE_PARSER_KIT_H
#define TEST_ENGINE_PARSER_KIT_H

#include "engine/engine.h"
#include "testlib.h"

#define DSML "｜DSML｜"
#define TC "<" DSML "tool_calls>"
#define TC_ "</" DSML "tool_calls>"
#define INV(n) "<" DSML "invoke name=\"" n "\">"
#define INV_ "</" DSML "invoke>"
#define PS(k) "<" DSML "parameter name=\"" k "\" string=\"true\">"
#define PJ(k) "<" DSML "parameter name=\"" k "\" string=\"false\">"
#define P_ "</" DSML "parameter>"
#define EOS "<｜end▁of▁sentence｜>"
#define C1 TC "\n" INV("bash") "\n" PS("command") "ls -la" P_ "\n" INV_ "\n" TC_
#define C1_CALL "bash {\"command\": \"ls -la\"}\n"

static const dm_parser_tool kit_tools[] = {
    {"bash", "{\"type\":\"object\",\"properties\":{\"command\":{\"type\":\"string\"}},\"required\":[\"command\"]}"},
    {"read", "{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\"},\"limit\":{\"type\":\"integer\"}},\"required\":[\"path\"]}"},
    {"write", "{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\"},\"content\":{\"type\":\"string\"}},\"required\":[\"path\",\"content\"]}"},
    {"edit", "{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\"},\"edits\":{\"type\":\"array\"}},\"required\":[\"path\",\"edits\"]}"},
    {"now", "{\"type\":\"object\",\"properties\":{}}"},
    {"own", "{\"type\":\"object\",\"properties\":{\"arguments\":{\"type\":\"object\"}},\"required\":[\"arguments\"]}"},
    {"free", NULL},
};

typedef struct kit {
    dm_buf log;                /* every event; texts of one kind in a row are joined */
    dm_buf reasoning, content; /* joined */
    dm_buf calls;              /* "name args\n" of whole calls, by dm_parser_call_* */
    dm_buf args;               /* deltas of the call that is open */
    dm_parse_kind last;
    int last_index, errors, repairs, begun;
    bool broken;               /* a delta was not valid UTF-8, or deltas did not join to the whole */
    bool closed;
} kit;

static void kit_free(kit *k)
{
    dm_buf_free(&k->log);
    dm_buf_free(&k->reasoning);
    dm_buf_free(&k->content);
    dm_buf_free(&k->calls);
    dm_buf_free(&k->args);
}

static void kit_event(void *ctx, const dm_parse_event *ev)
{
    static const char *const names[] = {"reasoning", "content", "call", "args", "end", "error", "repair"};
    kit *k = ctx;
    bool joins = k->log.n && ev->kind == k->last && ev->index == k->last_index &&
                 (ev->kind == DM_PARSE_REASONING || ev->kind == DM_PARSE_CONTENT || ev->kind == DM_PARSE_ARGS);
    if (!dm_utf8_valid(ev->p, ev->n)) k->broken = true;
    if (!joins) dm_buf_printf(&k->log, "\n[%s %d] ", names[ev->kind], ev->index);
    dm_buf_append(&k->log, ev->p, ev->n);
    k->last = ev->kind, k->last_index = ev->index;
    if (ev->kind == DM_PARSE_REASONING) dm_buf_append(&k->reasoning, ev->p, ev->n);
    if (ev->kind == DM_PARSE_CONTENT) dm_buf_append(&k->content, ev->p, ev->n);
    if (ev->kind == DM_PARSE_CALL) dm_buf_clear(&k->args), k->begun++;
    if (ev->kind == DM_PARSE_ARGS) dm_buf_append(&k->args, ev->p, ev->n);
    if (ev->kind == DM_PARSE_ERROR) k->errors++;
    if (ev->kind == DM_PARSE_REPAIR) k->repairs++;
    if (ev->kind == DM_PARSE_CALL_END) {
        dm_buf json = {0};
        if (k->args.n != ev->n || memcmp(k->args.p, ev->p, ev->n) != 0) k->broken = true;
        if (dm_json_python(ev->p, ev->n, &json, NULL) < 0 || json.n != ev->n) k->broken = true;
        dm_buf_free(&json);
    }
}

static inline void kit_end(kit *k, dm_parser *p, bool cut)
{
    assert_ok(dm_parser_finish(p, cut));
    for (int i = 0; i < dm_parser_calls(p); i++)
        assert_ok(dm_buf_printf(&k->calls, "%s %s\n", dm_parser_call_name(p, i), dm_parser_call_args(p, i)));
    assert_int_equal(dm_parser_errors(p), k->errors);
    for (int i = 0; i < dm_parser_errors(p); i++) assert_true(strlen(dm_parser_error(p, i)) > 10);
    k->closed = dm_parser_block_closed(p);
    dm_parser_destroy(p);
}

static inline dm_parser *kit_start(kit *k, const dm_parser_opts *o)
{
    dm_parser *p;
    dm_err e = {0};
    memset(k, 0, sizeof *k);
    assert_ok_e(dm_parser_create(&p, o, kit_event, k, &e), e);
    return p;
}

/* The text in pieces [0,a), [a,b), [b,n); b = a: two pieces. */
static inline void kit_pieces(kit *k, const dm_parser_opts *o, const char *s, size_t n, size_t a, size_t b, bool cut)
{
    dm_parser *p = kit_start(k, o);
    assert_ok(dm_parser_feed(p, s, a, false));
    assert_ok(dm_parser_feed(p, s + a, b - a, false));
    assert_ok(dm_parser_feed(p, s + b, n - b, false));
    kit_end(k, p, cut);
}

static inline void kit_bytes(kit *k, const dm_parser_opts *o, const char *s, size_t n, bool cut)
{
    dm_parser *p = kit_start(k, o);
    for (size_t i = 0; i < n; i++) assert_ok(dm_parser_feed(p, s + i, 1, false));
    kit_end(k, p, cut);
}

static inline const char *kit_mark(const char *s)
{
    static const char *const marks[] = {DSML, "</think>", EOS};
    for (size_t i = 0; i < DM_COUNT(marks); i++)
        if (dm_str_prefix(s, marks[i])) return marks[i];
    return NULL;
}

/* As a model would give it: markers as added tokens, all else as one token per byte. */
static inline void kit_tokens(kit *k, const dm_parser_opts *o, const char *s, size_t n, bool cut)
{
    dm_parser_opts t = *o;
    t.markers_in_text = false;
    dm_parser *p = kit_start(k, &t);
    for (size_t i = 0; i < n;) {
        const char *mark = kit_mark(s + i);
        size_t len = mark ? strlen(mark) : 1;
        assert_ok(dm_parser_feed(p, s + i, len, mark != NULL));
        i += len;
    }
    kit_end(k, p, cut);
}

static inline void kit_same(const kit *a, const kit *b, const char *how, size_t at)
{
    if (a->broken || b->broken) fail_msg("broken delta (%s %zu)%s", how, at, dm_buf_cstr(&a->log));
    if (strcmp(dm_buf_cstr(&a->log), dm_buf_cstr(&b->log)) != 0)
        fail_msg("%s %zu differs from whole:%s\n--- whole:%s", how, at, dm_buf_cstr(&b->log), dm_buf_cstr(&a->log));
    if (strcmp(dm_buf_cstr(&a->calls), dm_buf_cstr(&b->calls)) != 0 || a->closed != b->closed) fail_msg("%s %zu: calls differ", how, at);
}

#endif
