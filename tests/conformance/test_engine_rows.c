/* Row invariance (the first rule of C1): the value of a token's row never depends on which rows share the step.
 *
 * A reference decodes a few sequences alone, one token a step, on one thread, and keeps the logits of every position and states
 * at some.  Then steps are drawn at random: which forward (and so how many threads), which sequences, where each was cut and restored,
 * how many rows each gives to this step, who its batch mates are.  The last row of every run of every step is one combination and
 * must have the reference's logits in all bytes.  Quick: some hundreds; with DM_TEST_FULL: 100,000, about as many seconds as the
 * line at the end says. */
#include "tests/lib/forward_test.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { QUICK = 60, LENGTH = 140, SHORT = 40 };
#else
enum { QUICK = 800, LENGTH = 300, SHORT = 140 };
#endif
enum { FULL = 100000, SEQUENCES = 5, CUT_EVERY = 20, LIVE = 4, ROWS = 256, FORWARDS = 3 };

typedef struct reference {
    int32_t *ids[SEQUENCES];
    float *logits[SEQUENCES];                       /* [LENGTH][vocab] */
    dm_buf states[SEQUENCES][LENGTH / CUT_EVERY];   /* at (i + 1) * CUT_EVERY */
    uint8_t *block[SEQUENCES];                      /* block 0, once it is whole */
    size_t vocab;
    int length; /* <= LENGTH */
} reference;

typedef struct live { /* a sequence somewhere in its course */
    dm_fseq *s;
    int of, pos;
} live;

static void reference_make(reference *r, dm_forward *f, int length)
{
    dm_err e = {0};
    r->vocab = (size_t)f->vocab;
    r->length = length;
    for (int q = 0; q < SEQUENCES; q++) {
        r->ids[q] = forward_test_ids(f, test_seed() + 100 + (uint64_t)q);
        r->logits[q] = calloc(LENGTH * r->vocab, sizeof(float));
        r->block[q] = malloc(f->block_bytes);
        assert_non_null(r->logits[q]);
        assert_non_null(r->block[q]);
        dm_fseq *s = forward_test_seq(f);
        for (int i = 0; i < length; i++) {
            forward_test_feed(f, s, r->ids[q] + i, 1, 1, r->logits[q] + (size_t)i * r->vocab);
            if ((i + 1) % CUT_EVERY == 0) assert_ok_e(f->ops->state_save(f, s, &r->states[q][i / CUT_EVERY], &e), e);
        }
        const void *bytes;
        if (length >= DM_BLOCK_TOKENS) {
            assert_ok_e(f->ops->block(f, s, 0, &bytes, &e), e);
            memcpy(r->block[q], bytes, f->block_bytes);
        }
        f->ops->seq_destroy(f, s);
    }
}

static void reference_free(reference *r)
{
    for (int q = 0; q < SEQUENCES; q++) {
        free(r->ids[q]), free(r->logits[q]), free(r->block[q]);
        for (size_t i = 0; i < DM_COUNT(r->states[q]); i++) dm_buf_free(&r->states[q][i]);
    }
}

/* At a random cut of a random sequence; sometimes at its beginning. */
static void live_start(const reference *r, dm_forward *f, live *l, uint64_t z)
{
    dm_err e = {0};
    if (l->s) f->ops->seq_destroy(f, l->s);
    l->of = (int)(z % SEQUENCES);
    int cut = (int)((z >> 8) % (uint64_t)(r->length / CUT_EVERY)); /* 0: from nothing; never the last */
    l->pos = cut * CUT_EVERY;
    l->s = forward_test_seq(f);
    if (cut == 0) return;
    const dm_buf *state = &r->states[l->of][cut - 1];
    if (l->pos >= DM_BLOCK_TOKENS) assert_ok_e(f->ops->block_load(f, l->s, 0, r->block[l->of], &e), e);
    assert_ok_e(f->ops->state_load(f, l->s, state->p, state->n, &e), e);
}

/* Mostly decode, often a few rows, now and then a long chunk. */
static int rows_for(uint64_t z)
{
    int kind = (int)(z & 63), v = (int)((z >> 6) & 0xFFFF);
    return kind < 38 ? 1 : kind < 57 ? 2 + v % 7 : kind < 62 ? 9 + v % 40 : 49 + v % 150;
}

/* One step of a forward with some of its live sequences; the combinations that it was. */
static int one_step(const reference *r, dm_forward *f, live *lives, float *logits, uint64_t *rng)
{
    dm_err e = {0};
    dm_run runs[LIVE];
    live *who[LIVE];
    int n = 0, room = ROWS;
    uint64_t mask = dm_splitmix64(rng);
    for (int i = 0; i < LIVE; i++) {
        live *l = &lives[i];
        uint64_t z = dm_splitmix64(rng);
        if (!l->s || l->pos >= r->length || (z >> 60) == 0) live_start(r, f, l, dm_splitmix64(rng));
        if (!(mask >> i & 1) && (n || i + 1 < LIVE)) continue;
        int rows = rows_for(z);
        if (rows > r->length - l->pos) rows = r->length - l->pos;
        if (rows > room) rows = room;
        if (rows <= 0) continue;
        room -= rows;
        who[n] = l;
        runs[n] = (dm_run){.seq = l->s, .ids = r->ids[l->of] + l->pos, .n = rows, .logits = logits + (size_t)n * r->vocab};
        memset(runs[n].logits, 0xFF, r->vocab * sizeof(float)); /* what is not written shows */
        n++;
    }
    assert_ok_e(f->ops->step(f, runs, n, &e), e);
    for (int i = 0; i < n; i++) {
        int from = who[i]->pos;
        who[i]->pos += runs[i].n;
        const float *want = r->logits[who[i]->of] + (size_t)(who[i]->pos - 1) * r->vocab;
        if (memcmp(runs[i].logits, want, r->vocab * sizeof(float)) != 0)
            fail_msg("%s: sequence %d, rows %d to %d, run %d of %d in the step: logits differ from decoding alone", f->numerics_id, who[i]->of, from, who[i]->pos, i, n);
    }
    return n;
}

static void check(const dm_model *m, const char *isa, int length, int want)
{
    static const dm_forward_opts ways[FORWARDS] = {{.threads = 1, .rows_max = ROWS}, {.threads = 2, .rows_max = ROWS}, {.threads = 3, .rows_max = ROWS}};
    reference r = {0};
    dm_forward *f[FORWARDS];
    live lives[FORWARDS][LIVE] = {0};
    uint64_t rng = test_seed();
    int64_t began = dm_now_ns();
    int done = 0;
    for (int i = 0; i < FORWARDS; i++) {
        dm_forward_opts o = ways[i];
        o.numerics = DM_NUM_FAST, o.isa = isa;
        f[i] = forward_test_create(m, o);
    }
    reference_make(&r, f[0], length);
    float *logits = malloc(LIVE * r.vocab * sizeof(float));
    assert_non_null(logits);
    while (done < want) {
        size_t i = dm_splitmix64(&rng) % FORWARDS;
        done += one_step(&r, f[i], lives[i], logits, &rng);
    }
    printf("# %s: %d combinations, %.1f s\n", f[0]->numerics_id, done, (double)(dm_now_ns() - began) * 1e-9);
    for (int i = 0; i < FORWARDS; i++) {
        for (int k = 0; k < LIVE; k++) f[i]->ops->seq_destroy(f[i], lives[i][k].s);
        dm_forward_destroy(f[i]);
    }
    free(logits);
    reference_free(&r);
}

static void a_row_does_not_see_its_batch_on_any_instruction_set(void **state)
{
    (void)state;
    dm_model *m = forward_test_model("tiny2", 2);
    /* The first, the best one, is the default and gets most of the combinations. */
    const char *const *isas = dm_forward_isas();
    check(m, isas[0], LENGTH, test_full() ? FULL : QUICK);
    for (size_t i = 1; isas[i]; i++) check(m, isas[i], SHORT, QUICK / 8);
    dm_model_close(m);
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_row_does_not_see_its_batch_on_any_instruction_set),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
