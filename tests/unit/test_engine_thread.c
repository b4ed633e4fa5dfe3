/* The engine thread over a forward whose cache is a running hash of its tokens: every row checks the rows before
 * it, so a wrong order, a lost or a doubled token shows at once. */
#include "tests/lib/testlib.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

#include "engine/engine.h"

enum { V = 64, EOS = 1, ROWS = 32, CTX = 3000 };

struct dm_fseq {
    int64_t pos;
    uint64_t hash;             /* of all tokens so far */
    uint64_t *block_hash;      /* hash at each block's end: the block's bytes */
    int64_t nblocks;
    bool has_logits;
    float logits[V];
};
typedef struct fake {
    dm_forward f;
    int fail_at_step, steps, max_rows, max_runs;
    _Atomic int sleep_us;
} fake;

static uint64_t mix(uint64_t h, int32_t id)
{
    h ^= (uint64_t)id + 0x9E3779B97F4A7C15u + (h << 6) + (h >> 2);
    return h * 0xD6E8FEB86659FD93u;
}
/* The "model": the next token is a function of everything before; never EOS before 5 tokens have gone by. */
static int32_t next_token(uint64_t h) { return (int32_t)(2 + h % (V - 2)); }

static int f_seq_create(dm_forward *f, dm_fseq **out, dm_err *e)
{
    (void)f;
    *out = dm_calloc(1, sizeof **out);
    if (!*out) return dm_err_set(e, DM_ENOMEM, "fake", "no memory");
    (*out)->block_hash = dm_calloc(CTX / DM_BLOCK_TOKENS + 1, sizeof(uint64_t));
    return 0;
}
static void f_seq_destroy(dm_forward *f, dm_fseq *s)
{
    (void)f;
    dm_free(s->block_hash);
    dm_free(s);
}
static int64_t f_pos(const dm_fseq *s) { return s->pos; }
static int f_step(dm_forward *f, const dm_run *runs, int n, dm_err *e)
{
    fake *k = (fake *)f;
    int rows = 0;
    if (++k->steps == k->fail_at_step) return dm_err_set(e, DM_EIO, "fake", "the device failed");
    if (atomic_load(&k->sleep_us)) usleep((useconds_t)atomic_load(&k->sleep_us));
    for (int i = 0; i < n; i++) {
        dm_fseq *s = runs[i].seq;
        rows += runs[i].n;
        for (int t = 0; t < runs[i].n; t++) {
            s->hash = mix(s->hash, runs[i].ids[t]);
            if (++s->pos % DM_BLOCK_TOKENS == 0) s->block_hash[s->nblocks++] = s->hash;
        }
        s->has_logits = runs[i].logits != NULL;
        for (int v = 0; v < V; v++) s->logits[v] = v == next_token(s->hash) ? 1 : 0;
        if (runs[i].logits) memcpy(runs[i].logits, s->logits, sizeof s->logits);
    }
    if (rows > k->max_rows) k->max_rows = rows;
    if (n > k->max_runs) k->max_runs = n;
    return 0;
}
static int f_block(dm_forward *f, const dm_fseq *s, int64_t i, const void **p, dm_err *e)
{
    (void)f, (void)e;
    *p = &s->block_hash[i];
    return 0;
}
static int f_block_load(dm_forward *f, dm_fseq *s, int64_t i, const void *p, dm_err *e)
{
    (void)f, (void)e;
    memcpy(&s->block_hash[i], p, 8);
    s->nblocks = i + 1;
    return 0;
}
static int f_state_save(dm_forward *f, const dm_fseq *s, dm_buf *out, dm_err *e)
{
    (void)f, (void)e;
    return dm_buf_append(out, s, sizeof *s);
}
static int f_state_load(dm_forward *f, dm_fseq *s, const void *p, size_t n, dm_err *e)
{
    (void)f, (void)e;
    assert_int_equal(n, sizeof *s);
    uint64_t *keep = s->block_hash;
    memcpy(s, p, n);
    s->block_hash = keep;
    return 0;
}
static const float *f_logits(const dm_fseq *s) { return s->has_logits ? s->logits : NULL; }
static void f_destroy(dm_forward *f) { (void)f; }
static const dm_forward_ops ops = {f_destroy, f_seq_create, f_seq_destroy, f_pos, f_step, f_block, f_block_load, f_state_save, f_state_load, f_logits};

static fake make(void) { return (fake){.f = {.ops = &ops, .vocab = V, .rows_max = ROWS, .block_bytes = 8, .ctx_tokens_max = CTX, .numerics_id = "fake"}}; }

/* ---- a client: collects what the engine says ---- */

typedef struct client {
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool done;
    dm_ids tokens;
    dm_gen_event end;
    int64_t progress_last;
    int stop_after; /* the hook stops there; 0: never */
    int64_t blocks, states;
    int64_t state_pos[64];
    dm_buf last_state;
    dm_ids tail;
    dm_buf all_blocks;
    dm_ids block_ids;
} client;

static void on_event(void *ctx, const dm_gen_event *ev)
{
    client *c = ctx;
    if (ev->kind == DM_GEN_TOKEN) dm_ids_push(&c->tokens, ev->id);
    if (ev->kind == DM_GEN_PROGRESS) {
        assert_true(ev->done > c->progress_last);
        c->progress_last = ev->done;
    }
    if (ev->kind != DM_GEN_END) return;
    pthread_mutex_lock(&c->lock);
    c->end = *ev;
    c->done = true;
    pthread_cond_signal(&c->ended);
    pthread_mutex_unlock(&c->lock);
}
static bool on_hook(void *ctx, int32_t id)
{
    (void)id;
    client *c = ctx;
    return c->stop_after && (int)c->tokens.n >= c->stop_after;
}
static void on_block(void *ctx, int64_t i, const int32_t *ids, const void *p, size_t n)
{
    client *c = ctx;
    assert_int_equal(i, c->blocks++);
    dm_buf_append(&c->all_blocks, p, n);
    dm_ids_append(&c->block_ids, ids, DM_BLOCK_TOKENS);
}
static void on_state(void *ctx, int64_t pos, const int32_t *tail, const void *p, size_t n)
{
    client *c = ctx;
    if (c->states < 64) c->state_pos[c->states] = pos;
    c->states++;
    assert_int_equal(c->blocks, pos / DM_BLOCK_TOKENS); /* E3: blocks come first */
    dm_buf_clear(&c->last_state);
    dm_buf_append(&c->last_state, p, n);
    c->tail.n = 0;
    dm_ids_append(&c->tail, tail, (size_t)(pos % DM_BLOCK_TOKENS));
}
static void client_init(client *c)
{
    *c = (client){0};
    pthread_mutex_init(&c->lock, NULL);
    pthread_cond_init(&c->ended, NULL);
}
static void client_wait(client *c)
{
    pthread_mutex_lock(&c->lock);
    while (!c->done) pthread_cond_wait(&c->ended, &c->lock);
    c->done = false;
    pthread_mutex_unlock(&c->lock);
}
static void client_free(client *c)
{
    dm_ids_free(&c->tokens), dm_ids_free(&c->tail), dm_ids_free(&c->block_ids);
    dm_buf_free(&c->last_state), dm_buf_free(&c->all_blocks);
}
static dm_gen gen_for(client *c, const int32_t *ids, size_t n, int64_t max_new)
{
    static const int32_t stop[] = {EOS};
    dm_gen g = {.ids = ids, .n = n, .max_new = max_new, .stop = stop, .nstop = 1, .ctx = c, .event = on_event, .hook = on_hook,
                .sink = {.ctx = c, .block = on_block, .state = on_state}};
    dm_sampler_init(&g.sampler, &(dm_sample_params){.top_p = 1});
    return g;
}

static int32_t prompt[CTX];
static void fill_prompt(uint64_t seed)
{
    for (int i = 0; i < CTX; i++) prompt[i] = (int32_t)(2 + dm_splitmix64(&seed) % (V - 2));
}

static void every_reported_token_is_in_the_sequence_and_the_next_turn_costs_only_its_own(void **state)
{
    (void)state;
    fake k = make();
    dm_engine *g;
    dm_seq *s;
    dm_err e;
    client c;
    client_init(&c);
    assert_ok_e(dm_engine_create(&g, &k.f, NULL, &e), e);
    assert_ok_e(dm_seq_create(g, &s, &e), e);
    int64_t expect = 0;
    uint64_t hash = 0;
    for (int turn = 0; turn < 10; turn++) {
        fill_prompt((uint64_t)turn + 5);
        size_t n = 37 + (size_t)turn;
        c.tokens.n = 0, c.progress_last = 0;
        dm_gen gen = gen_for(&c, prompt, n, 20);
        assert_ok_e(dm_engine_submit(g, s, &gen, &e), e);
        client_wait(&c);
        assert_int_equal(c.end.end, DM_END_LENGTH);
        assert_int_equal(c.end.prefilled, n);
        assert_int_equal(c.end.decoded, 20);
        expect += (int64_t)n + 20;
        assert_int_equal(dm_seq_pos(s), expect);
        for (size_t i = 0; i < n; i++) hash = mix(hash, prompt[i]);
        for (int i = 0; i < 20; i++) {
            assert_int_equal(c.tokens.p[i], next_token(hash));
            hash = mix(hash, c.tokens.p[i]);
        }
    }
    assert_true(k.max_rows <= ROWS);
    assert_int_equal(c.blocks, expect / DM_BLOCK_TOKENS);
    dm_seq_destroy(g, s);
    dm_engine_destroy(g);
    client_free(&c);
}

static void a_hook_ends_the_turn_behind_its_token(void **state)
{
    (void)state;
    fake k = make();
    dm_engine *g;
    dm_seq *s;
    dm_err e;
    client c;
    client_init(&c);
    fill_prompt(1);
    assert_ok_e(dm_engine_create(&g, &k.f, NULL, &e), e);
    assert_ok_e(dm_seq_create(g, &s, &e), e);
    c.stop_after = 7;
    dm_gen gen = gen_for(&c, prompt, 300, 100);
    assert_ok_e(dm_engine_submit(g, s, &gen, &e), e);
    client_wait(&c);
    assert_int_equal(c.end.end, DM_END_STOP);
    assert_int_equal(c.tokens.n, 7);
    assert_int_equal(dm_seq_pos(s), 307);
    assert_int_equal(c.states, 2); /* end of input, end of output */
    assert_int_equal(c.state_pos[0], 300);
    assert_int_equal(c.state_pos[1], 307);
    dm_seq_destroy(g, s);
    dm_engine_destroy(g);
    client_free(&c);
}

static void a_restored_sequence_goes_on_as_if_it_had_never_stopped(void **state)
{
    (void)state;
    fake k = make();
    dm_engine *g;
    dm_seq *s, *r;
    dm_err e;
    client c, d;
    client_init(&c), client_init(&d);
    fill_prompt(2);
    assert_ok_e(dm_engine_create(&g, &k.f, NULL, &e), e);
    assert_ok_e(dm_seq_create(g, &s, &e), e);
    dm_gen gen = gen_for(&c, prompt, 700, 30);
    assert_ok_e(dm_engine_submit(g, s, &gen, &e), e);
    client_wait(&c);
    assert_ok_e(dm_seq_create(g, &r, &e), e);
    for (int64_t i = 0; i < c.blocks; i++)
        assert_ok_e(dm_seq_block_load(g, r, i, c.block_ids.p + i * DM_BLOCK_TOKENS, c.all_blocks.p + i * 8, &e), e);
    assert_err(DM_ESTATE, dm_seq_block_load(g, r, 7, prompt, c.all_blocks.p, &e));
    assert_ok_e(dm_seq_state_load(g, r, 730, c.tail.p, c.last_state.p, c.last_state.n, &e), e);
    assert_memory_equal(dm_seq_ids(r), dm_seq_ids(s), 730 * sizeof(int32_t));
    d.blocks = c.blocks; /* what came from the sink is not handed out again */
    c.tokens.n = 0, c.progress_last = 0;
    gen = gen_for(&c, prompt, 11, 40);
    assert_ok_e(dm_engine_submit(g, s, &gen, &e), e);
    dm_gen gen2 = gen_for(&d, prompt, 11, 40);
    assert_ok_e(dm_engine_submit(g, r, &gen2, &e), e);
    client_wait(&c), client_wait(&d);
    assert_int_equal(d.end.prefilled, 11);
    assert_memory_equal(c.tokens.p, d.tokens.p, 40 * sizeof(int32_t));
    dm_seq_destroy(g, s), dm_seq_destroy(g, r);
    dm_engine_destroy(g);
    client_free(&c), client_free(&d);
}

static void a_long_prefill_does_not_stop_a_decode(void **state)
{
    (void)state;
    fake k = make();
    dm_engine *g;
    dm_seq *a, *b;
    dm_err e;
    client c, d;
    client_init(&c), client_init(&d);
    fill_prompt(3);
    atomic_store(&k.sleep_us, 200);
    assert_ok_e(dm_engine_create(&g, &k.f, NULL, &e), e);
    assert_ok_e(dm_seq_create(g, &a, &e), e);
    assert_ok_e(dm_seq_create(g, &b, &e), e);
    dm_gen long_gen = gen_for(&c, prompt, 2500, 0), short_gen = gen_for(&d, prompt, 3, 40);
    assert_ok_e(dm_engine_submit(g, b, &short_gen, &e), e);
    assert_ok_e(dm_engine_submit(g, a, &long_gen, &e), e);
    client_wait(&c), client_wait(&d);
    /* 2,500 rows at 31 a step are 81 steps; the 40 tokens ran beside them, not behind. */
    dm_engine_stat st;
    dm_engine_stat_get(g, &st);
    assert_true(st.steps < 100);
    assert_true(k.max_runs == 2);
    assert_int_equal(st.rows_prefill, 2503);
    assert_int_equal(c.end.end, DM_END_STOP);
    dm_seq_destroy(g, a), dm_seq_destroy(g, b);
    dm_engine_destroy(g);
    client_free(&c), client_free(&d);
}

static void a_cancelled_prefill_keeps_its_chunks_and_frees_the_sequence(void **state)
{
    (void)state;
    fake k = make();
    dm_engine *g;
    dm_seq *s;
    dm_err e;
    client c;
    client_init(&c);
    fill_prompt(4);
    atomic_store(&k.sleep_us, 3000);
    assert_ok_e(dm_engine_create(&g, &k.f, NULL, &e), e);
    assert_ok_e(dm_seq_create(g, &s, &e), e);
    dm_gen gen = gen_for(&c, prompt, 2900, 10);
    assert_ok_e(dm_engine_submit(g, s, &gen, &e), e);
    assert_err(DM_EBUSY, dm_engine_submit(g, s, &gen, &e));
    usleep(20000);
    dm_engine_cancel(g, s);
    client_wait(&c);
    assert_int_equal(c.end.end, DM_END_CANCEL);
    assert_true(c.end.prefilled < 2900);
    assert_int_equal(dm_seq_pos(s), c.end.prefilled);
    atomic_store(&k.sleep_us, 0);
    gen = gen_for(&c, prompt + dm_seq_pos(s), 2900 - (size_t)dm_seq_pos(s), 5);
    c.progress_last = 0;
    assert_ok_e(dm_engine_submit(g, s, &gen, &e), e);
    client_wait(&c);
    assert_int_equal(c.end.decoded, 5);
    dm_seq_destroy(g, s);
    dm_engine_destroy(g);
    client_free(&c);
}

static void destroying_the_engine_ends_every_job(void **state)
{
    (void)state;
    fake k = make();
    dm_engine *g;
    dm_seq *s[4];
    dm_err e;
    client c[4];
    fill_prompt(6);
    atomic_store(&k.sleep_us, 1000);
    assert_ok_e(dm_engine_create(&g, &k.f, NULL, &e), e);
    for (int i = 0; i < 4; i++) {
        client_init(&c[i]);
        assert_ok_e(dm_seq_create(g, &s[i], &e), e);
        dm_gen gen = gen_for(&c[i], prompt, 100, 2000);
        assert_ok_e(dm_engine_submit(g, s[i], &gen, &e), e);
    }
    usleep(10000);
    /* The sequences outlive the thread here only to be looked at: the engine's memory goes last. */
    for (int i = 0; i < 4; i++) dm_engine_cancel(g, s[i]);
    for (int i = 0; i < 4; i++) {
        client_wait(&c[i]);
        assert_int_equal(c[i].end.end, DM_END_CANCEL);
        assert_int_equal(dm_seq_pos(s[i]), (int64_t)c[i].end.prefilled + (int64_t)c[i].tokens.n); /* E1 */
        dm_seq_destroy(g, s[i]);
        client_free(&c[i]);
    }
    dm_engine_destroy(g);
    dm_engine_destroy(NULL);
}

static void a_failing_step_ends_its_jobs_with_the_reason(void **state)
{
    (void)state;
    fake k = make();
    k.fail_at_step = 3;
    dm_engine *g;
    dm_seq *s;
    dm_err e;
    client c;
    client_init(&c);
    fill_prompt(7);
    assert_ok_e(dm_engine_create(&g, &k.f, NULL, &e), e);
    assert_ok_e(dm_seq_create(g, &s, &e), e);
    dm_gen gen = gen_for(&c, prompt, 200, 10);
    assert_ok_e(dm_engine_submit(g, s, &gen, &e), e);
    client_wait(&c);
    assert_int_equal(c.end.end, DM_END_ERROR);
    assert_int_equal(c.end.err.code, DM_EIO);
    assert_string_equal(c.end.err.text, "the device failed");
    dm_seq_destroy(g, s);
    dm_engine_destroy(g);
    client_free(&c);
}

static void limits_are_refused_before_anything_runs(void **state)
{
    (void)state;
    fake k = make();
    dm_engine *g;
    dm_seq *s;
    dm_err e;
    client c;
    client_init(&c);
    fill_prompt(8);
    assert_ok_e(dm_engine_create(&g, &k.f, NULL, &e), e);
    assert_ok_e(dm_seq_create(g, &s, &e), e);
    dm_gen gen = gen_for(&c, prompt, CTX, 10);
    gen.n = CTX;
    int32_t wild = V;
    dm_gen bad = gen_for(&c, &wild, 1, 1), none = gen_for(&c, prompt, 0, 1);
    assert_err(DM_EINVAL, dm_engine_submit(g, s, &bad, &e));
    assert_ok_e(dm_engine_submit(g, s, &none, &e), e); /* accepted, and ends with a reason */
    client_wait(&c);
    assert_int_equal(c.end.end, DM_END_ERROR);
    assert_int_equal(c.end.err.code, DM_ESTATE);
    assert_ok_e(dm_engine_submit(g, s, &gen, &e), e);
    client_wait(&c);
    assert_int_equal(c.end.end, DM_END_CONTEXT); /* full to the last token: nothing is sampled */
    assert_int_equal(c.end.decoded, 0);
    dm_gen more = gen_for(&c, prompt, 1, 1);
    assert_err(DM_ECONTEXT, dm_engine_submit(g, s, &more, &e));
    dm_seq_destroy(g, s);
    dm_engine_destroy(g);
    client_free(&c);
}

static void states_stand_at_multiples_of_the_interval_inside_a_long_prefill(void **state)
{
    (void)state;
    fake k = make();
    dm_engine *g;
    dm_seq *s;
    dm_err e;
    client c;
    client_init(&c);
    fill_prompt(9);
    assert_ok_e(dm_engine_create(&g, &k.f, &(dm_engine_opts){.chunk_tokens = 7, .state_interval = 500}, &e), e);
    assert_ok_e(dm_seq_create(g, &s, &e), e);
    dm_gen gen = gen_for(&c, prompt, 1700, 0);
    assert_ok_e(dm_engine_submit(g, s, &gen, &e), e);
    client_wait(&c);
    static const int64_t want[] = {500, 1000, 1500, 1700};
    assert_int_equal(c.states, 4);
    for (int i = 0; i < 4; i++) assert_int_equal(c.state_pos[i], want[i]);
    /* All of it is stored: sample from the kept logits without running a token (K15). */
    dm_gen again = gen_for(&c, prompt, 0, 1);
    assert_ok_e(dm_engine_submit(g, s, &again, &e), e);
    client_wait(&c);
    assert_int_equal(c.end.prefilled, 0);
    assert_int_equal(c.end.decoded, 1);
    dm_seq_destroy(g, s);
    dm_engine_destroy(g);
    client_free(&c);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_reported_token_is_in_the_sequence_and_the_next_turn_costs_only_its_own),
        cmocka_unit_test(a_hook_ends_the_turn_behind_its_token),
        cmocka_unit_test(a_restored_sequence_goes_on_as_if_it_had_never_stopped),
        cmocka_unit_test(a_long_prefill_does_not_stop_a_decode),
        cmocka_unit_test(a_cancelled_prefill_keeps_its_chunks_and_frees_the_sequence),
        cmocka_unit_test(destroying_the_engine_ends_every_job),
        cmocka_unit_test(a_failing_step_ends_its_jobs_with_the_reason),
        cmocka_unit_test(limits_are_refused_before_anything_runs),
        cmocka_unit_test(states_stand_at_multiples_of_the_interval_inside_a_long_prefill),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
