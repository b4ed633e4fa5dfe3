/* C1, exact resume: for every position P, blocks before P plus the state at P plus the rest give the same logits,
 * the same blocks and the same later states, byte for byte, as a run that never stopped.
 *
 * One long run passes through all cuts and saves a state and logits at each.  Then every cut is restored into a fresh
 * sequence of a forward with other threads and rows, fed up to a later cut in some chunking, perhaps with a
 * neighbour in the same batch, and compared with what the long run had there. */
#include "forward_test.h"

#define LENGTH 1500
#define CUTS_MAX 256
/* What the sanitizers look for does not need every cut; under them a cut takes many times as long. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define CUTS(full, quick) ((quick) < 12 ? (quick) : 12)
#else
#define CUTS(full, quick) (test_full() ? (full) : (quick))
#endif

typedef struct cut { int pos; dm_buf state; float *logits; } cut;
typedef struct run {
    dm_forward *one, *two; /* 1 thread, LENGTH rows; 2 threads, 256 rows */
    int32_t *ids, *mate_ids;
    cut cuts[CUTS_MAX];
    int ncuts;
    uint8_t *blocks; /* of the long run */
} run;

static int by_pos(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* The places where something changes, and random ones; ascending, distinct. */
static int choose_cuts(int *pos, int want, int length, uint64_t *rng) {
    static const int special[] = {0, 1, 2, 3, 4, 5, 7, 8, 126, 127, 128, 129, 130, 255, 256, 257, 383, 384, 385, 511, 512, 513, 640, 1023, 1024, 1025};
    int n = 0, kept = 1;
    for (size_t i = 0; i < DM_COUNT(special) && n < want; i++)
        if (special[i] <= length) pos[n++] = special[i];
    while (n < want) pos[n++] = (int)(dm_splitmix64(rng) % (uint64_t)(length + 1));
    qsort(pos, (size_t)n, sizeof *pos, by_pos);
    for (int i = 1; i < n; i++)
        if (pos[i] != pos[kept - 1]) pos[kept++] = pos[i];
    return kept;
}

static void save(dm_forward *f, const dm_fseq *s, dm_buf *out) {
    dm_err e = {0};
    assert_ok_e(f->ops->state_save(f, s, out, &e), e);
}

/* The run that never stops. */
static void long_run(run *r, const int *pos, int n) {
    dm_forward *f = r->one;
    dm_fseq *s = forward_test_seq(f);
    dm_err e = {0};
    for (int i = 0, at = 0; i < n; at = pos[i++]) {
        cut *c = &r->cuts[r->ncuts++];
        c->pos = pos[i];
        c->logits = calloc((size_t)f->vocab, sizeof(float));
        assert_non_null(c->logits);
        if (pos[i] > at) forward_test_feed(f, s, r->ids + at, pos[i] - at, 211, c->logits);
        save(f, s, &c->state);
    }
    int64_t whole = f->ops->seq_pos(s) / DM_BLOCK_TOKENS;
    r->blocks = malloc((size_t)whole * f->block_bytes + 1);
    assert_non_null(r->blocks);
    for (int64_t i = 0; i < whole; i++) {
        const void *p;
        assert_ok_e(f->ops->block(f, s, i, &p, &e), e);
        memcpy(r->blocks + (size_t)i * f->block_bytes, p, f->block_bytes);
    }
    f->ops->seq_destroy(f, s);
}

static dm_fseq *restore(run *r, dm_forward *f, const cut *c) {
    dm_err e = {0};
    dm_fseq *s = forward_test_seq(f);
    for (int i = 0; i < c->pos / DM_BLOCK_TOKENS; i++)
        assert_ok_e(f->ops->block_load(f, s, i, r->blocks + (size_t)i * f->block_bytes, &e), e);
    assert_ok_e(f->ops->state_load(f, s, c->state.p, c->state.n, &e), e);
    assert_int_equal(f->ops->seq_pos(s), c->pos);
    return s;
}

/* Feeds [from, to) in chunks, with a neighbour in every step if there is room. */
static void feed_with_mate(run *r, dm_forward *f, dm_fseq *s, int from, int to, int chunk, int mate_rows, float *logits) {
    dm_err e = {0};
    dm_fseq *mate = mate_rows ? forward_test_seq(f) : NULL;
    for (int at = from, m = 0; at < to;) {
        int n = to - at < chunk ? to - at : chunk;
        dm_run mine = {.seq = s, .ids = r->ids + at, .n = n, .logits = at + n == to ? logits : NULL};
        dm_run other = {.seq = mate, .ids = r->mate_ids + m, .n = mate_rows};
        bool both = mate && n + mate_rows <= f->rows_max && m + mate_rows <= LENGTH;
        dm_run runs[2] = {both ? other : mine, mine};
        assert_ok_e(f->ops->step(f, runs, both ? 2 : 1, &e), e);
        at += n;
        m += both ? mate_rows : 0;
    }
    f->ops->seq_destroy(f, mate);
}

static void resume(run *r, int from, int to, int chunk, int mate_rows, dm_forward *f) {
    const cut *a = &r->cuts[from], *b = &r->cuts[to];
    dm_fseq *s = restore(r, f, a);
    dm_err e = {0};
    if (a->pos) assert_memory_equal(f->ops->seq_logits(s), a->logits, (size_t)f->vocab * sizeof(float));
    if (b->pos == a->pos) {
        f->ops->seq_destroy(f, s);
        return;
    }
    float *logits = malloc((size_t)f->vocab * sizeof(float));
    assert_non_null(logits);
    feed_with_mate(r, f, s, a->pos, b->pos, chunk, mate_rows, logits);
    if (memcmp(logits, b->logits, (size_t)f->vocab * sizeof(float)) != 0)
        fail_msg("%s: other logits at %d after a cut at %d, chunk %d, %d rows of a neighbour", f->numerics_id, b->pos, a->pos, chunk, mate_rows);
    for (int i = 0; i < b->pos / DM_BLOCK_TOKENS; i++) {
        const void *p;
        assert_ok_e(f->ops->block(f, s, i, &p, &e), e);
        assert_memory_equal(p, r->blocks + (size_t)i * f->block_bytes, f->block_bytes);
    }
    dm_buf state = {0};
    save(f, s, &state);
    assert_int_equal(state.n, b->state.n);
    assert_memory_equal(state.p, b->state.p, state.n);
    dm_buf_free(&state);
    free(logits);
    f->ops->seq_destroy(f, s);
}

static void check(const dm_model *m, dm_numerics numerics, const char *isa, int length, int want, int rest_max) {
    static const int chunks[] = {1, 7, 64, 256, LENGTH};
    uint64_t rng = test_seed();
    int pos[CUTS_MAX];
    run *r = calloc(1, sizeof *r);
    assert_non_null(r);
    r->one = forward_test_create(m, (dm_forward_opts){.numerics = numerics, .isa = isa, .threads = 1, .rows_max = LENGTH});
    r->two = forward_test_create(m, (dm_forward_opts){.numerics = numerics, .isa = isa, .threads = 2, .rows_max = 256});
    r->ids = forward_test_ids(r->one, 1);
    r->mate_ids = forward_test_ids(r->one, 2);
    long_run(r, pos, choose_cuts(pos, want, length, &rng));
    for (int i = 0; i < r->ncuts; i++) {
        int to = i;
        while (to + 1 < r->ncuts && r->cuts[to + 1].pos - r->cuts[i].pos <= rest_max) to++;
        if (to == i && i + 1 < r->ncuts) to = i + 1;
        uint64_t z = dm_splitmix64(&rng);
        dm_forward *f = z & 1 ? r->one : r->two;
        int chunk = chunks[(z >> 8) % DM_COUNT(chunks)];
        if (chunk > f->rows_max) chunk = f->rows_max;
        resume(r, i, to, chunk, z & 2 ? (int)((z >> 16) % 40) : 0, f);
    }
    for (int i = 0; i < r->ncuts; i++) dm_buf_free(&r->cuts[i].state), free(r->cuts[i].logits);
    free(r->blocks), free(r->ids), free(r->mate_ids);
    dm_forward_destroy(r->one);
    dm_forward_destroy(r->two);
    free(r);
}

static void fast_resumes_exactly_at_cuts_of_a_synthetic_model(void **state) {
    (void)state;
    dm_model *m = forward_test_model("tiny2", 2);
    check(m, DM_NUM_FAST, NULL, LENGTH, CUTS(200, 50), test_full() ? 300 : 24);
    dm_model_close(m);
}
static void fast_resumes_exactly_at_200_cuts_of_the_embedded_model(void **state) {
    (void)state;
    dm_model *m = forward_test_embedded();
    check(m, DM_NUM_FAST, NULL, LENGTH, CUTS(200, 200), test_full() ? 300 : 16);
    dm_model_close(m);
}
static void every_instruction_set_resumes_exactly(void **state) {
    (void)state;
    dm_model *m = forward_test_embedded();
    for (const char *const *isa = dm_forward_isas(); *isa; isa++) check(m, DM_NUM_FAST, *isa, 270, CUTS(200, 22), 16);
    dm_model_close(m);
}
static void plain_and_exact_resume_exactly(void **state) {
    (void)state;
    dm_model *m = forward_test_model("tiny", 1);
    check(m, DM_NUM_PLAIN, NULL, 600, CUTS(200, 30), 16);
    check(m, DM_NUM_EXACT, NULL, test_full() ? 600 : 131, CUTS(200, 14), 8);
    dm_model_close(m);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fast_resumes_exactly_at_cuts_of_a_synthetic_model),
        cmocka_unit_test(fast_resumes_exactly_at_200_cuts_of_the_embedded_model),
        cmocka_unit_test(every_instruction_set_resumes_exactly),
        cmocka_unit_test(plain_and_exact_resume_exactly),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
