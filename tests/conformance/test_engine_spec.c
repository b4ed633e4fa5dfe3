/* Speculation changes no output: everything that an engine tells and hands out in a run with drafts is compared, byte for byte and in
 * order, with the run without.
 *
 * A case is drawn from its seed: one to three sequences that decode together, each with prompts, stop ids, a hook, a mask, a
 * sampler, and a second turn behind a pause, in which the sequence is the same or one that was restored from what was handed
 * out.  It runs plainly first; then with drafts of which none, some or all are right. */
#include <math.h>
#include <pthread.h>

#include "tests/lib/forward_test.h"
#include "tests/lib/oracle.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SEEDS = 12 };
#else
enum { SEEDS = 60 };
#endif
enum { SEEDS_FULL = 2000, JOBS = 3, TURNS = 2, BLOCKS = 3, TOKENS = 620 };

/* ---- a case ---- */

typedef struct turn {
    int at, n;      /* its prompt: text[at, at + n) */
    int max_new;
    int hook_after; /* tokens; 0: never */
    bool fresh;     /* restored, not awake */
} turn;
typedef struct talk {
    int32_t text[TOKENS];
    turn turns[TURNS];
    dm_sample_params sampling;
    int32_t stop[2];
    uint64_t mask; /* 0: none */
    int tops;
} talk;
typedef struct spec_case { int jobs; talk talk[JOBS]; } spec_case;

static int pick_int(uint64_t *rng, int lo, int hi) { return lo + (int)(dm_splitmix64(rng) % (uint64_t)(hi - lo + 1)); }

static void draw_talk(talk *t, int vocab, uint64_t *rng)
{
    dm_err e = {0};
    assert_ok_e(dm_synth_tokens(t->text, TOKENS, dm_splitmix64(rng) >> 40, vocab, &e), e);
    /* Short ones, and ones whose decoding goes across a block's or an entry's end. */
    static const int ends[] = {4, 4, 4, 128, 256};
    int end = ends[dm_splitmix64(rng) % DM_COUNT(ends)], first = end - pick_int(rng, 0, 12);
    t->turns[0] = (turn){.at = 0, .n = first < 1 ? 1 : first, .max_new = pick_int(rng, 1, 24)};
    t->turns[1] = (turn){.at = 300, .n = pick_int(rng, 1, 12), .max_new = pick_int(rng, 1, 24), .fresh = dm_splitmix64(rng) & 1};
    for (int i = 0; i < TURNS; i++)
        if (pick_int(rng, 0, 2) == 0) t->turns[i].hook_after = pick_int(rng, 1, 12);
    t->sampling = (dm_sample_params){.top_p = 1, .seed = dm_splitmix64(rng)};
    if (pick_int(rng, 0, 2)) t->sampling.temperature = 0.2 + 0.1 * pick_int(rng, 0, 10);
    if (pick_int(rng, 0, 1)) t->sampling.top_k = pick_int(rng, 1, 8);
    if (pick_int(rng, 0, 1)) t->sampling.top_p = 0.5 + 0.05 * pick_int(rng, 0, 10);
    if (pick_int(rng, 0, 3) == 0) t->sampling.min_p = 0.1;
    /* Of some 700 tokens one is hit now and then in a few hundred. */
    t->stop[0] = pick_int(rng, 0, vocab - 1), t->stop[1] = pick_int(rng, 0, vocab - 1);
    if (pick_int(rng, 0, 1)) t->mask = dm_splitmix64(rng) | 1;
    t->tops = pick_int(rng, 0, DM_LOGPROBS_MAX);
}

/* ---- a client: all that it is told, as text ---- */

typedef struct client {
    const talk *t;
    const turn *now;
    int vocab;
    dm_buf log;
    dm_ids ids;               /* of the sequence, by prompts and tokens */
    int tokens;               /* of this turn */
    dm_buf state;
    int64_t state_pos;
    uint8_t *block[BLOCKS];
    size_t block_bytes;
    dm_gen_event end;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool done;
} client;

static uint64_t hash(const void *p, size_t n)
{
    uint64_t h[2];
    dm_xxh3_128((uint8_t *)h, p, n);
    return h[0] ^ h[1];
}

static void on_event(void *ctx, const dm_gen_event *ev)
{
    client *c = ctx;
    if (ev->kind == DM_GEN_TOKEN) {
        uint64_t top = hash(ev->top, sizeof *ev->top * (size_t)ev->ntop);
        assert_int_equal(ev->ntop, c->t->tops);
        dm_ids_push(&c->ids, ev->id);
        c->tokens++;
        dm_buf_printf(&c->log, "token %d decoded %lld logprob %a top %016llx\n", ev->id, (long long)ev->decoded, (double)ev->logprob, (unsigned long long)top);
    }
    if (ev->kind != DM_GEN_END) return;
    dm_buf_printf(&c->log, "end %d prefilled %lld decoded %lld rng %016llx %s\n", (int)ev->end, (long long)ev->prefilled, (long long)ev->decoded,
                  (unsigned long long)ev->sampler.rng, ev->err.text);
    pthread_mutex_lock(&c->lock);
    c->end = *ev;
    c->done = true;
    pthread_cond_signal(&c->ended);
    pthread_mutex_unlock(&c->lock);
}
static bool on_hook(void *ctx, int32_t id)
{
    client *c = ctx;
    dm_buf_printf(&c->log, "hook %d\n", id);
    return c->now->hook_after && c->tokens >= c->now->hook_after;
}
/* What is forbidden depends on what was sampled before, as with a grammar. */
static void on_mask(void *ctx, float *logits, int vocab)
{
    client *c = ctx;
    uint64_t z = c->t->mask + (uint64_t)c->ids.n * 977 + (uint64_t)c->ids.p[c->ids.n - 1];
    for (int i = 0; i < vocab; i++)
        if ((dm_splitmix64(&z) & 7) == 0) logits[i] = -INFINITY;
}
static void on_block(void *ctx, int64_t i, const int32_t *ids, const void *p, size_t n)
{
    client *c = ctx;
    dm_buf_printf(&c->log, "block %lld ids %016llx bytes %016llx\n", (long long)i, (unsigned long long)hash(ids, DM_BLOCK_TOKENS * sizeof *ids), (unsigned long long)hash(p, n));
    assert_in_range(i, 0, BLOCKS - 1);
    if (!c->block[i]) c->block[i] = malloc(n);
    memcpy(c->block[i], p, n);
    c->block_bytes = n;
}
static void on_state(void *ctx, int64_t pos, const int32_t *tail, const void *p, size_t n)
{
    client *c = ctx;
    dm_buf_printf(&c->log, "state %lld tail %016llx bytes %016llx\n", (long long)pos, (unsigned long long)hash(tail, (size_t)(pos % DM_BLOCK_TOKENS) * sizeof *tail), (unsigned long long)hash(p, n));
    dm_buf_clear(&c->state);
    dm_buf_append(&c->state, p, n);
    c->state_pos = pos;
}
static void client_free(client *c)
{
    dm_buf_free(&c->log), dm_buf_free(&c->state);
    dm_ids_free(&c->ids);
    for (int i = 0; i < BLOCKS; i++) free(c->block[i]);
    pthread_mutex_destroy(&c->lock);
    pthread_cond_destroy(&c->ended);
}

/* ---- running a case ---- */

typedef struct outcome { client c[JOBS]; } outcome;
typedef struct truth { const outcome *plain; dm_fseq *of[JOBS]; int jobs; } truth;

/* Sequences come to be in the order of the jobs and turns, so the test knows whose they are by their ids so far. */
static int32_t true_token(void *ctx, const dm_fseq *s, int64_t pos)
{
    const truth *t = ctx;
    for (int i = 0; i < t->jobs; i++)
        if (t->of[i] == s && pos < (int64_t)t->plain->c[i].ids.n) return t->plain->c[i].ids.p[pos];
    return -1;
}

static void start(dm_engine *g, dm_seq *s, client *c, const turn *t)
{
    dm_err e = {0};
    c->now = t;
    c->tokens = 0;
    dm_gen gen = {.ids = c->t->text + t->at, .n = (size_t)t->n, .max_new = t->max_new, .stop = c->t->stop, .nstop = 2, .logprobs = true,
                  .top_logprobs = c->t->tops, .ctx = c, .event = on_event, .hook = on_hook, .mask = c->t->mask ? on_mask : NULL,
                  .sink = {.ctx = c, .block = on_block, .state = on_state}, .sampler = c->end.sampler};
    if (t == c->t->turns) dm_sampler_init(&gen.sampler, &c->t->sampling);
    dm_ids_append(&c->ids, gen.ids, gen.n);
    assert_ok_e(dm_engine_submit(g, s, &gen, &e), e);
}
static void wait_end(client *c)
{
    pthread_mutex_lock(&c->lock);
    while (!c->done) pthread_cond_wait(&c->ended, &c->lock);
    c->done = false;
    pthread_mutex_unlock(&c->lock);
    assert_int_not_equal(c->end.end, DM_END_ERROR);
}

/* From what `from` was handed at the end of its first turn. */
static dm_seq *restore(dm_engine *g, const client *from, int64_t pos, const dm_buf *state)
{
    dm_err e = {0};
    dm_seq *s;
    assert_ok_e(dm_seq_create(g, &s, &e), e);
    for (int64_t i = 0; i < pos / DM_BLOCK_TOKENS; i++)
        assert_ok_e(dm_seq_block_load(g, s, i, from->ids.p + i * DM_BLOCK_TOKENS, from->block[i], &e), e);
    assert_ok_e(dm_seq_state_load(g, s, pos, from->ids.p + pos / DM_BLOCK_TOKENS * DM_BLOCK_TOKENS, state->p, state->n, &e), e);
    return s;
}

/* dm_seq is the engine's; the oracle is told which forward sequence was made last. */
static dm_fseq *last_made;
static int note_seq(dm_forward *f, dm_fseq **out, dm_err *e)
{
    int rc = oracle_create_seq(f, out, e);
    last_made = *out;
    return rc;
}

static void run_case(const spec_case *k, dm_forward *f, int speculate, truth *t, outcome *out)
{
    dm_err e = {0};
    dm_engine *g;
    dm_seq *s[JOBS];
    assert_ok_e(dm_engine_create(&g, f, &(dm_engine_opts){.speculate = speculate, .chunk_tokens = 64}, &e), e);
    for (int i = 0; i < k->jobs; i++) {
        out->c[i] = (client){.t = &k->talk[i], .vocab = f->vocab};
        pthread_mutex_init(&out->c[i].lock, NULL);
        pthread_cond_init(&out->c[i].ended, NULL);
        assert_ok_e(dm_seq_create(g, &s[i], &e), e);
        if (t) t->of[i] = last_made;
    }
    for (int n = 0; n < TURNS; n++) {
        for (int i = 0; i < k->jobs; i++) {
            client *c = &out->c[i];
            if (n && k->talk[i].turns[n].fresh) {
                dm_seq_destroy(g, s[i]);
                s[i] = restore(g, c, c->state_pos, &c->state);
                if (t) t->of[i] = last_made;
            }
        }
        for (int i = 0; i < k->jobs; i++) start(g, s[i], &out->c[i], &k->talk[i].turns[n]);
        for (int i = 0; i < k->jobs; i++) wait_end(&out->c[i]);
    }
    for (int i = 0; i < k->jobs; i++) {
        assert_int_equal(dm_seq_pos(s[i]), out->c[i].ids.n); /* E1 */
        assert_memory_equal(dm_seq_ids(s[i]), out->c[i].ids.p, out->c[i].ids.n * sizeof(int32_t));
        dm_seq_destroy(g, s[i]);
    }
    dm_engine_destroy(g);
}

static void compare(const outcome *a, const outcome *b, int jobs, uint64_t seed, int speculate, int percent)
{
    for (int i = 0; i < jobs; i++) {
        const char *x = dm_buf_cstr((dm_buf *)&a->c[i].log), *y = dm_buf_cstr((dm_buf *)&b->c[i].log);
        if (strcmp(x, y) == 0) continue;
        size_t at = 0;
        while (x[at] == y[at]) at++;
        while (at && x[at - 1] != '\n') at--;
        fail_msg("seed %llu, job %d, %d drafts, %d %% of them right: plain says \"%.*s\", with drafts \"%.*s\"", (unsigned long long)seed, i, speculate,
                 percent, (int)strcspn(x + at, "\n"), x + at, (int)strcspn(y + at, "\n"), y + at);
    }
}

static void nothing_that_is_told_or_handed_out_depends_on_drafts(void **state)
{
    (void)state;
    dm_model *m = forward_test_model("tiny2", 2);
    dm_forward *plain = forward_test_create(m, (dm_forward_opts){.threads = 1}), *drafting[2];
    oracle o[2];
    int64_t drafted = 0, accepted = 0, seeds = test_full() ? SEEDS_FULL : SEEDS;
    int stops = 0, restored = 0, refused = 0;
    for (int i = 0; i < 2; i++) {
        drafting[i] = forward_test_create(m, (dm_forward_opts){.threads = i + 1, .draft = true});
        oracle_init(&o[i], drafting[i]);
        ((dm_forward_ops *)o[i].f.ops)->seq_create = note_seq;
    }
    for (int64_t n = 0; n < seeds; n++) {
        uint64_t seed = test_seed() + (uint64_t)n, rng = seed;
        spec_case k = {0};
        static const int rights[] = {0, 50, 90, 100, 100, -1};
        k.jobs = pick_int(&rng, 1, JOBS);
        for (int i = 0; i < k.jobs; i++) draw_talk(&k.talk[i], plain->vocab, &rng);
        outcome *a = calloc(1, sizeof *a), *b = calloc(1, sizeof *b);
        run_case(&k, plain, 0, NULL, a);
        truth t = {.plain = a, .jobs = k.jobs};
        oracle *use = &o[pick_int(&rng, 0, 1)];
        use->percent = rights[dm_splitmix64(&rng) % DM_COUNT(rights)], use->rng = rng, use->truth = true_token, use->ctx = &t;
        int was = use->fail_tentative = pick_int(&rng, 0, 5) == 0 ? 3 : 0;
        int speculate = pick_int(&rng, -1, DM_DRAFT_MAX - 1);
        if (speculate == 0) speculate = DM_DRAFT_MAX;
        run_case(&k, &use->f, speculate, &t, b);
        compare(a, b, k.jobs, seed, speculate, use->percent);
        refused += was - use->fail_tentative;
        for (int i = 0; i < k.jobs; i++) {
            drafted += b->c[i].end.drafted, accepted += b->c[i].end.accepted;
            assert_true(b->c[i].end.accepted <= b->c[i].end.drafted);
            assert_int_equal(a->c[i].end.drafted, 0);
            stops += b->c[i].end.end == DM_END_STOP;
            restored += k.talk[i].turns[1].fresh;
        }
        for (int i = 0; i < k.jobs; i++) client_free(&a->c[i]), client_free(&b->c[i]);
        free(a), free(b);
    }
    printf("# %lld seeds; %lld of %lld drafts of the second turns were right; %d of these ended by a stop, %d began with a restore; %d steps were refused once\n", (long long)seeds,
           (long long)accepted, (long long)drafted, stops, restored, refused);
    assert_true(accepted > seeds && drafted > accepted && stops && restored && refused); /* else nothing was tried */
    for (int i = 0; i < 2; i++) dm_forward_destroy(drafting[i]);
    dm_forward_destroy(plain);
    dm_model_close(m);
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_that_is_told_or_handed_out_depends_on_drafts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
