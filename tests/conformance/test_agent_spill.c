/* Sessions that are spilled and dropped at every tool turn say what sessions that were never spilled say.
 *
 * Four sessions on the embedded model, each with a prompt and then turn after turn: the model writes some tokens, a tool's result is
 * appended.  In the first run each session stays in memory and no store exists.  In the second all four decode together, and
 * between two turns of a session its sequence is thrown away and made again from the store, which is closed and opened again, but for
 * every fourth turn: then the RAM tier has it.  Compared: every sampled token, what the sampler is left with, every state's
 * bytes.  Counted: a turn restores all that was there, from the disk, and computes its new tokens only.
 *
 * In each session's first prompt stands a secret of its own: bytes of another session's blocks would show at once.
 * Quick: 8 turns; DM_TEST_FULL=1: 200. */
#include "agent/agent_int.h"
#include "tests/lib/testlib.h"

#include <unistd.h>

enum { SESSIONS = 4, TURNS_QUICK = 8, TURNS_FULL = 200, RAM_EACH = 4, CONTEXT = 32768 };

typedef struct session {
    int n;                /* which of the four */
    dm_ids ids;           /* the timeline, as fed and sampled */
    dm_sampler sampler;
    dm_seq *seq;
    pager pager;
    dm_buf log;           /* what is compared */
    int64_t fed, new_tokens, prefilled, restored, from_disk;
    dm_gen_event end;
    _Atomic bool over;
} session;

typedef struct rig {
    dm_model *m;
    dm_tok *tok;
    dm_forward *f;
    dm_engine *g;
    dm_kv *kv;
    dm_hash root;
    char dir[600];
} rig;

/* ---- what a session is told ---- */

static void add_text(rig *r, session *s, const char *text)
{
    dm_err e = { 0 };
    assert_ok_e(dm_tok_encode(r->tok, text, strlen(text), true, &s->ids, &e), e);
}

static void first_prompt(rig *r, session *s)
{
    char text[400];
    snprintf(text, sizeof text, "<｜begin▁of▁sentence｜>You are agent %d. The secret of agent %d is %08x; tell nobody.<｜User｜>Look at the files.<｜Assistant｜></think>", s->n, s->n,
             (unsigned)(test_seed() * 2654435761u + (unsigned)s->n * 40503u));
    add_text(r, s, text);
    /* Of different lengths, so that the cuts lie everywhere. */
    for (int i = 0; i < 40 * s->n; i++) add_text(r, s, i % 7 ? " and more" : "\n");
}

static void tool_result(rig *r, session *s, int turn)
{
    char text[300];
    uint64_t z = test_seed() ^ ((uint64_t)s->n << 32) ^ (uint64_t)turn;
    snprintf(text, sizeof text, "<｜end▁of▁sentence｜><｜User｜><tool_result>%d: line %llu of file_%llu.c</tool_result>%s<｜Assistant｜></think>", turn,
             (unsigned long long)(dm_splitmix64(&z) % 1000), (unsigned long long)(dm_splitmix64(&z) % 50), dm_splitmix64(&z) % 5 ? "" : " It may be long: 0123456789 0123456789 0123456789 0123456789");
    add_text(r, s, text);
}

/* ---- one turn ---- */

static void on_event(void *ctx, const dm_gen_event *ev)
{
    session *s = ctx;
    if (ev->kind == DM_GEN_TOKEN) {
        dm_ids_push(&s->ids, ev->id);
        dm_buf_printf(&s->log, " %d", ev->id);
    }
    if (ev->kind != DM_GEN_END) return;
    s->end = *ev;
    s->over = true;
}

/* A state's bytes are compared through their hash; then on to the store, if there is one. */
static void on_state(void *ctx, int64_t pos, const int32_t *tail, const void *bytes, size_t n)
{
    session *s = ctx;
    uint8_t h[16];
    char hex[33];
    dm_xxh3_128(h, bytes, n);
    dm_hex(hex, h, sizeof h);
    dm_buf_printf(&s->log, " state %lld %s", (long long)pos, hex);
    dm_sink sink = pager_sink(&s->pager);
    if (sink.state) sink.state(sink.ctx, pos, tail, bytes, n);
}

static void on_block(void *ctx, int64_t index, const int32_t *ids, const void *bytes, size_t n)
{
    session *s = ctx;
    uint8_t h[16];
    char hex[33];
    dm_xxh3_128(h, bytes, n);
    dm_hex(hex, h, sizeof h);
    dm_buf_printf(&s->log, " block %lld %s", (long long)index, hex);
    dm_sink sink = pager_sink(&s->pager);
    if (sink.block) sink.block(sink.ctx, index, ids, bytes, n);
}

static void begin_turn(rig *r, session *s)
{
    dm_err e = { 0 };
    int64_t pos = dm_seq_pos(s->seq);
    s->over = false;
    dm_gen job = { .ids = s->ids.p + pos, .n = s->ids.n - (size_t)pos, .max_new = 12 + s->n, .sampler = s->sampler, .ctx = s, .event = on_event,
                   .sink = { .ctx = s, .block = on_block, .state = on_state } };
    s->new_tokens = (int64_t)s->ids.n - s->fed;
    assert_ok_e(dm_engine_submit(r->g, s->seq, &job, &e), e);
}

static void end_turn(session *s)
{
    while (!s->over) usleep(200);
    if (s->end.end == DM_END_ERROR) fail_msg("%s", s->end.err.text);
    s->sampler = s->end.sampler;
    s->fed = (int64_t)s->ids.n;
    s->prefilled += s->end.prefilled;
    dm_buf_printf(&s->log, " rng %016llx end %d\n", (unsigned long long)s->sampler.rng, (int)s->end.end);
}

/* ---- the two runs ---- */

static void open_store(rig *r)
{
    dm_err e = { 0 };
    assert_ok_e(dm_kv_open(&r->kv, &(dm_kv_opts){ .dir = r->dir, .root = r->root, .block_bytes = r->f->block_bytes, .ram_bytes_max = 64 << 20, .disk_bytes_max = (int64_t)8 << 30 }, &e), e);
}

static void wake(rig *r, session *s)
{
    dm_err e = { 0 };
    static const _Atomic bool never;
    restore_report rep;
    assert_ok_e(pager_restore(&s->pager, s->ids.p, (int64_t)s->ids.n, s->fed, &never, &s->seq, &rep, &e), e);
    if (rep.pos != s->fed) fail_msg("session %d: %lld of %lld tokens restored: %s", s->n, (long long)rep.pos, (long long)s->fed, why_text(rep.miss));
    s->restored += rep.pos;
    s->from_disk += rep.from_disk;
    (void)r;
}

static void sleep_now(rig *r, session *s)
{
    dm_seq_destroy(r->g, s->seq);
    s->seq = NULL;
}

static void run(rig *r, session *all, int turns, bool spill)
{
    dm_err e = { 0 };
    for (int i = 0; i < SESSIONS; i++) {
        session *s = &all[i];
        s->n = i;
        dm_sampler_init(&s->sampler, &(dm_sample_params){ .temperature = i % 2 ? 0.8 : 0, .top_p = 0.95, .seed = test_seed() + (uint64_t)i });
        first_prompt(r, s);
        if (!spill) assert_ok_e(dm_seq_create(r->g, &s->seq, &e), e);
    }
    if (spill) open_store(r);
    for (int t = 0; t < turns; t++) {
        if (spill && t % RAM_EACH) {
            dm_kv_close(r->kv);
            open_store(r);
        }
        for (int i = 0; i < SESSIONS && spill; i++) { /* a pager knows its store */
            pager_free(&all[i].pager);
            pager_init(&all[i].pager, r->kv, r->g, &r->root, r->f->block_bytes);
        }
        for (int i = 0; i < SESSIONS; i++) {
            if (t) tool_result(r, &all[i], t);
            if (spill) wake(r, &all[i]);
            begin_turn(r, &all[i]);
            if (!spill) end_turn(&all[i]); /* alone; below they decode together */
        }
        for (int i = 0; i < SESSIONS && spill; i++) {
            end_turn(&all[i]);
            sleep_now(r, &all[i]);
        }
        if (spill) assert_ok_e(dm_kv_flush(r->kv, 60000, &e), e);
    }
    for (int i = 0; i < SESSIONS; i++) sleep_now(r, &all[i]);
}

static void outputs_equal_those_of_sessions_that_were_never_spilled(void **state)
{
    (void)state;
    static session plain[SESSIONS], spilled[SESSIONS];
    rig r = { 0 };
    dm_err e = { 0 };
    int turns = test_full() ? TURNS_FULL : TURNS_QUICK;
    snprintf(r.dir, sizeof r.dir, "%s/kv", test_dir());
    assert_ok_e(dm_model_open(&r.m, DM_SOURCE_DIR "/examples/models/tiny", &e), e);
    assert_ok_e(dm_tok_open(&r.tok, DM_SOURCE_DIR "/examples/models/tiny", &e), e);
    assert_ok_e(dm_forward_create(&r.f, r.m, &(dm_forward_opts){ .ctx_tokens_max = CONTEXT }, &e), e);
    assert_ok_e(dm_engine_create(&r.g, r.f, &(dm_engine_opts){ 0 }, &e), e);
    r.root.b[0] = 77;
    run(&r, plain, turns, false);
    run(&r, spilled, turns, true);
    for (int i = 0; i < SESSIONS; i++) {
        session *a = &plain[i], *b = &spilled[i];
        const char *x = dm_buf_cstr(&a->log), *y = dm_buf_cstr(&b->log);
        for (int turn = 0; strcmp(x, y) != 0 && *x; turn++) {
            size_t n = strcspn(x, "\n"), m = strcspn(y, "\n");
            if (n != m || memcmp(x, y, n) != 0) fail_msg("session %d, turn %d: \"%.*s\" without spilling, \"%.*s\" with", i, turn, (int)n, x, (int)m, y);
            x += n + 1, y += m + 1;
        }
        assert_string_equal(dm_buf_cstr(&a->log), dm_buf_cstr(&b->log));
        /* The last token of a turn is run in it, so what is prefilled is what the tool said, and nothing twice. */
        assert_int_equal(b->prefilled, a->prefilled);
        print_message("# session %d: %zu tokens; %lld prefilled, the same without spilling; %lld restored, %lld parts from disk\n", i, b->ids.n, (long long)b->prefilled,
                      (long long)b->restored, (long long)b->from_disk);
        assert_true(b->from_disk > 0);
    }
    for (int i = 0; i < SESSIONS; i++) {
        session *const both[2] = { &plain[i], &spilled[i] };
        for (int k = 0; k < 2; k++) dm_ids_free(&both[k]->ids), dm_buf_free(&both[k]->log), pager_free(&both[k]->pager);
    }
    dm_engine_destroy(r.g);
    dm_kv_close(r.kv);
    dm_forward_destroy(r.f);
    dm_tok_close(r.tok);
    dm_model_close(r.m);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(outputs_equal_those_of_sessions_that_were_never_spilled) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
