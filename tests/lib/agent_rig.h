/* agent_rig.h — a host for tests: the scripted forward behind the real engine thread, store, tools, sandbox and
 * journal.  Header only, so that the test library needs nothing but base. */
#ifndef DM_TEST_AGENT_RIG_H
#define DM_TEST_AGENT_RIG_H

#include "testlib.h"

#include <sys/stat.h>
#include <unistd.h>

#include "agent/agent.h"
#include "scripted.h"

#define RIG_FN __attribute__((unused)) static

typedef struct rig_opts {
    bool no_kv, keep_awake, no_sandbox, grammar;
    int64_t ctx_tokens_max;
    int jobs_max;            /* of the engine's queue */
    const char *numerics_id, *system;
    const json_t *tools;     /* borrowed; NULL: all built-ins */
    uint8_t weights;         /* first byte of the fingerprint */
    dm_chat_mode mode;
    dm_sample_params sampling;
} rig_opts;

typedef struct rig {
    rig_opts o;
    char state[600], ws[600];
    uv_loop_t loop;
    dm_sandbox *sandbox;
    dm_tok *tok;
    dm_vocab *vocab;
    dm_forward *f;
    dm_engine *g;
    dm_kv *kv;
    dm_journal *j;
    dm_host *h;
    dm_session *s;
    json_t *events;          /* everything the client was told */
    json_t *result;          /* the last result; owned */
    bool finished;
    void (*on)(struct rig *r, const dm_host_event *ev); /* looks over the shoulder */
    void *ctx;
} rig;

/* A fresh pair of directories NAME.state and NAME.ws under the test's own. */
RIG_FN void rig_dirs(rig *r, const char *name)
{
    dm_err e = { 0 };
    snprintf(r->state, sizeof r->state, "%s/%s.state", test_dir(), name);
    snprintf(r->ws, sizeof r->ws, "%s/%s.ws", test_dir(), name);
    assert_ok_e(dm_mkdirs(r->state, 0700, &e), e);
    assert_ok_e(dm_mkdirs(r->ws, 0755, &e), e);
}

RIG_FN void rig_open_at(rig *r, const rig_opts *o)
{
    dm_err e = { 0 };
    char path[800];
    r->o = o ? *o : (rig_opts){ 0 };
    const char *hide[] = { r->state, NULL };
    if (!r->o.no_sandbox) assert_ok_e(dm_sandbox_start(&r->sandbox, &(dm_sandbox_opts){ .level = DM_SANDBOX_FULL, .hide = hide }, &e), e);
    assert_ok_e(dm_tok_open(&r->tok, DM_SOURCE_DIR "/examples/models/tiny", &e), e);
    r->f = scripted_create(&(scripted_opts){ .vocab = dm_tok_vocab(r->tok), .assistant = dm_tok_special(r->tok, "<｜Assistant｜>"),
                                             .eos = dm_tok_special(r->tok, "<｜end▁of▁sentence｜>"), .ctx_tokens_max = r->o.ctx_tokens_max,
                                             .numerics_id = r->o.numerics_id });
    assert_non_null(r->f);
    assert_ok_e(dm_engine_create(&r->g, r->f, &(dm_engine_opts){ .jobs_max = r->o.jobs_max }, &e), e);
    assert_ok_e(dm_journal_open(&r->j, r->state, false, &e), e);
    dm_host_opts h = { .loop = &r->loop, .engine = r->g, .forward = r->f, .tok = r->tok, .journal = r->j, .sandbox = r->sandbox, .model_name = "scripted",
                       .state_dir = r->state, .system = r->o.system ? r->o.system : "You are a test. Use the tools.", .tools = r->o.tools, .mode = r->o.mode, .sampling = r->o.sampling, .keep_awake = r->o.keep_awake };
    h.weights.b[0] = r->o.weights;
    h.kv_root.b[0] = r->o.weights;
    h.kv_root.b[1] = r->o.numerics_id ? 1 : 0;
    if (r->o.grammar) {
        assert_ok_e(dm_vocab_create(&r->vocab, r->tok, &e), e);
        h.vocab = r->vocab;
    }
    if (!r->o.no_kv) {
        snprintf(path, sizeof path, "%s/kv-%d-%d", r->state, h.kv_root.b[0], h.kv_root.b[1]);
        assert_ok_e(dm_kv_open(&r->kv, &(dm_kv_opts){ .dir = path, .root = h.kv_root, .block_bytes = r->f->block_bytes }, &e), e);
        h.kv = r->kv;
    }
    assert_int_equal(uv_loop_init(&r->loop), 0);
    assert_ok_e(dm_host_create(&r->h, &h, &e), e);
    r->events = json_array();
}

RIG_FN void rig_open(rig *r, const char *name, const rig_opts *o)
{
    memset(r, 0, sizeof *r);
    rig_dirs(r, name);
    rig_open_at(r, o);
}

RIG_FN void rig_close(rig *r)
{
    if (r->s) dm_session_close(r->s);
    while (uv_run(&r->loop, UV_RUN_DEFAULT)) {} /* a uv_stop may be left over */
    dm_host_destroy(r->h);
    assert_int_equal(uv_loop_close(&r->loop), 0); /* no handle was left behind */
    dm_engine_destroy(r->g);
    dm_kv_close(r->kv);
    dm_forward_destroy(r->f);
    dm_vocab_destroy(r->vocab);
    dm_tok_close(r->tok);
    dm_journal_close(r->j);
    dm_sandbox_stop(r->sandbox);
    json_decref(r->events);
    json_decref(r->result);
    char state[600], ws[600];
    memcpy(state, r->state, sizeof state);
    memcpy(ws, r->ws, sizeof ws);
    memset(r, 0, sizeof *r);
    memcpy(r->state, state, sizeof state);
    memcpy(r->ws, ws, sizeof ws);
}

/* ---- scripts ------------------------------------------------------------------------------------------ */

#define DSML(x) "<｜DSML｜" x ">"
#define END_DSML(x) "</｜DSML｜" x ">"
#define CALLS(x) "\n\n" DSML("tool_calls") "\n" x END_DSML("tool_calls")
#define INVOKE(name, x) DSML("invoke name=\"" name "\"") "\n" x END_DSML("invoke") "\n"
#define STR(key, value) DSML("parameter name=\"" key "\" string=\"true\"") value END_DSML("parameter") "\n"
#define JSON(key, value) DSML("parameter name=\"" key "\" string=\"false\"") value END_DSML("parameter") "\n"
#define BASH(command) INVOKE("bash", STR("command", command))
#define READ(path) INVOKE("read", STR("path", path))
#define WRITE(path, content) INVOKE("write", STR("path", path) STR("content", content))

/* What the model says in its next turn; EOS follows by itself. */
RIG_FN void rig_says(rig *r, const char *text)
{
    dm_ids ids = { 0 };
    dm_err e = { 0 };
    assert_ok_e(dm_tok_encode(r->tok, text, strlen(text), true, &ids, &e), e);
    scripted_reply(r->f, ids.p, ids.n);
    dm_ids_free(&ids);
}

RIG_FN size_t rig_tokens(rig *r, const char *text)
{
    dm_ids ids = { 0 };
    dm_err e = { 0 };
    assert_ok_e(dm_tok_encode(r->tok, text, strlen(text), true, &ids, &e), e);
    size_t n = ids.n;
    dm_ids_free(&ids);
    return n;
}

/* ---- running ------------------------------------------------------------------------------------------- */

RIG_FN void rig_event(void *ctx, dm_session *s, const dm_host_event *ev)
{
    rig *r = ctx;
    (void)s;
    if (ev->json) json_array_append_new(r->events, json_deep_copy(ev->json));
    if (r->on) r->on(r, ev);
    if (ev->kind != DM_EV_RESULT) return;
    json_decref(r->result);
    r->result = json_deep_copy(ev->json);
    r->finished = true;
    uv_stop(&r->loop);
}

RIG_FN dm_session_opts rig_session_opts(rig *r) { return (dm_session_opts){ .workspace = r->ws, .fn = rig_event, .ctx = r }; }

RIG_FN void rig_create(rig *r, const dm_session_opts *o)
{
    dm_err e = { 0 };
    dm_session_opts so = o ? *o : rig_session_opts(r);
    assert_ok_e(dm_session_create(r->h, &so, &r->s, &e), e);
}

RIG_FN void rig_close_session(rig *r)
{
    dm_session_close(r->s);
    r->s = NULL;
    while (uv_run(&r->loop, UV_RUN_DEFAULT)) {} /* a uv_stop may be left over */
}

RIG_FN void rig_resume(rig *r, const char *id, const dm_session_opts *o)
{
    dm_err e = { 0 };
    dm_session_opts so = o ? *o : rig_session_opts(r);
    assert_ok_e(dm_session_resume(r->h, id, &so, &r->s, &e), e);
}

/* Runs until the result, which it returns (borrowed). */
RIG_FN const json_t *rig_wait(rig *r)
{
    while (!r->finished)
        if (!uv_run(&r->loop, UV_RUN_DEFAULT) && !r->finished) fail_msg("the loop ended without a result");
    assert_non_null(r->result);
    return r->result;
}

RIG_FN const json_t *rig_send(rig *r, const char *text)
{
    dm_err e = { 0 };
    r->finished = false;
    assert_ok_e(dm_session_send(r->s, text, &e), e);
    return rig_wait(r);
}

/* ---- looking ---------------------------------------------------------------------------------------------- */

RIG_FN const char *str_of(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}
RIG_FN int64_t int_of(const json_t *o, const char *key) { return (int64_t)json_integer_value(json_object_get(o, key)); }
RIG_FN json_t *turn_of(const json_t *result, size_t i) { return json_array_get(json_object_get(result, "turns"), i); }
RIG_FN json_t *tool_of(const json_t *result, size_t i) { return json_array_get(json_object_get(result, "tools"), i); }

#define assert_subtype(result, want) assert_string_equal(str_of(result, "subtype"), want)

/* The i-th tool result that the client was told, over the life of the rig. */
RIG_FN const char *result_text(const rig *r, size_t i)
{
    size_t k;
    json_t *ev;
    json_array_foreach(r->events, k, ev)
        if (!strcmp(str_of(ev, "type"), "user") && i-- == 0)
            return str_of(json_array_get(json_object_get(json_object_get(ev, "message"), "content"), 0), "content");
    fail_msg("no such tool result");
    return "";
}

RIG_FN size_t count_results(const rig *r)
{
    size_t n = 0, k;
    json_t *ev;
    json_array_foreach(r->events, k, ev) n += !strcmp(str_of(ev, "type"), "user");
    return n;
}

typedef struct events_of { json_t *list; } events_of;
RIG_FN int collect_event(void *ctx, int64_t seq, const json_t *ev)
{
    (void)seq;
    return json_array_append_new(ctx, json_deep_copy(ev));
}
/* The journal of a session; the caller drops it. */
RIG_FN json_t *rig_journal(rig *r, const char *id)
{
    dm_err e = { 0 };
    json_t *list = json_array();
    assert_ok_e(dm_journal_read(r->j, id, collect_event, list, &e), e);
    return list;
}
RIG_FN size_t count_events(const json_t *list, const char *type, const char *key, const char *value)
{
    size_t n = 0, k;
    json_t *ev;
    json_array_foreach((json_t *)list, k, ev) n += !strcmp(str_of(ev, "type"), type) && (!key || !strcmp(str_of(ev, key), value));
    return n;
}
/* The whole token timeline that the journal holds. */
RIG_FN void journal_ids(const json_t *list, dm_ids *out)
{
    size_t k, i;
    json_t *ev, *id;
    json_array_foreach((json_t *)list, k, ev)
    {
        if (strcmp(str_of(ev, "type"), "tokens")) continue;
        json_array_foreach(json_object_get(ev, "ids"), i, id) assert_ok(dm_ids_push(out, (int32_t)json_integer_value(id)));
    }
}
RIG_FN char *journal_text(rig *r, const json_t *list)
{
    dm_ids ids = { 0 };
    dm_buf b = { 0 };
    journal_ids(list, &ids);
    assert_ok(dm_tok_decode(r->tok, ids.p, ids.n, &b));
    dm_ids_free(&ids);
    return b.p ? (char *)b.p : dm_strdup("");
}

RIG_FN void put_file(rig *r, const char *name, const char *text)
{
    char path[800];
    dm_err e = { 0 };
    snprintf(path, sizeof path, "%s/%s", r->ws, name);
    assert_ok_e(dm_file_write_atomic(path, text, strlen(text), 0644, &e), e);
}
/* Content of a file in the workspace (dm_free); "" when there is none. */
RIG_FN char *get_file(rig *r, const char *name)
{
    char path[800];
    dm_buf b = { 0 };
    snprintf(path, sizeof path, "%s/%s", r->ws, name);
    if (dm_file_read(path, 1 << 20, &b, NULL) < 0 || !b.p) {
        dm_buf_free(&b);
        return dm_strdup("");
    }
    return (char *)b.p;
}
RIG_FN int lines_of(rig *r, const char *name)
{
    char *s = get_file(r, name);
    int n = 0;
    for (const char *p = s; *p; p++) n += *p == '\n';
    dm_free(s);
    return n;
}

#endif
