/* Pooling of compressed entries: any chunking and any cut gives the entries of the definition, to the bit. */
#include <math.h>

#include "kernels/kernels.h"
#include "testlib.h"

enum { DIM = 128, TOKENS = 300 };

typedef struct run {
    const dm_kernels *k;
    int m, lanes;
    float *keys, *scores, *ape; /* [TOKENS][lanes·DIM], [m][lanes·DIM] */
} run;

static double real_of(const dm_kernels *k, const void *p, int64_t i) {
    return k->real_bytes == 8 ? ((const double *)p)[i] : (double)((const float *)p)[i];
}
static void *reals(const dm_kernels *k, size_t n) {
    void *p = malloc(n * (size_t)k->real_bytes);
    assert_non_null(p);
    memset(p, 0xff, n * (size_t)k->real_bytes);
    return p;
}
static run make(const dm_kernels *k, int m) {
    run r = {.k = k, .m = m, .lanes = m == 4 ? 2 : 1};
    size_t wide = (size_t)r.lanes * DIM;
    uint64_t rng = test_seed();
    r.keys = malloc(TOKENS * wide * 4), r.scores = malloc(TOKENS * wide * 4), r.ape = malloc((size_t)m * wide * 4);
    assert_true(r.keys && r.scores && r.ape);
    for (size_t i = 0; i < TOKENS * wide; i++) {
        r.keys[i] = (float)((double)(dm_splitmix64(&rng) >> 11) * 0x1p-52 - 1);
        r.scores[i] = (float)((double)(dm_splitmix64(&rng) >> 11) * 0x1p-50 - 4);
    }
    for (size_t i = 0; i < (size_t)m * wide; i++) r.ape[i] = (float)((double)(dm_splitmix64(&rng) >> 11) * 0x1p-52 - 1);
    return r;
}
static void drop(run *r) { free(r->keys), free(r->scores), free(r->ape); }

typedef struct fold { void *own, *next, *pooled; int64_t t, entries; } fold;
static fold fold_new(const run *r) {
    fold f = {.own = reals(r->k, 3 * DIM), .next = reals(r->k, 3 * DIM), .pooled = reals(r->k, (TOKENS / 4 + 1) * DIM)};
    r->k->fold_reset(f.own, DIM);
    r->k->fold_reset(f.next, DIM);
    return f;
}
static void fold_drop(fold *f) { free(f->own), free(f->next), free(f->pooled); }
static void fold_feed(const run *r, fold *f, int n) {
    int wide = r->lanes * DIM;
    float *s = malloc((size_t)n * (size_t)wide * 4); /* ape is added in place */
    assert_non_null(s);
    memcpy(s, r->scores + f->t * wide, (size_t)n * (size_t)wide * 4);
    for (int c = 0; c < DIM; c += 32) /* channels may be split over calls; only the last one moves the position */
        r->k->fold(&(kern_fold){.k = r->keys + f->t * wide, .s = s, .stride = wide, .ape = r->ape, .rows = n, .lanes = r->lanes, .dim = DIM, .m = r->m,
                                .t0 = f->t, .own = f->own, .next = f->next, .pooled = (char *)f->pooled + f->entries * DIM * r->k->real_bytes,
                                .c_begin = c, .c_end = c + 32});
    for (int i = 0; i < n; i++)
        for (int c = 0; c < wide; c++) assert_true(s[i * wide + c] == r->scores[(f->t + i) * wide + c] + r->ape[(int)((f->t + i) % r->m) * wide + c]);
    f->entries = (f->t + n) / r->m;
    f->t += n;
    free(s);
}

/* Entry j, channel c, in two passes. */
static double by_definition(const run *r, int j, int c) {
    int wide = r->lanes * DIM, slots = r->m * r->lanes;
    double max = -INFINITY, sum = 0, weighted = 0;
    for (int pass = 0; pass < 2; pass++)
        for (int i = 0; i < slots; i++) {
            int t = (j + 1) * r->m - slots + i, at = t * wide + (r->lanes == 2 && i >= r->m ? DIM : 0) + c;
            if (t < 0) continue;
            float s = r->scores[at] + r->ape[(t % r->m) * wide + at - t * wide];
            if (pass == 0) max = s > max ? s : max;
            else sum += exp(s - max), weighted += exp(s - max) * (double)r->keys[at];
        }
    return weighted / sum;
}

static void check(const dm_kernels *k, int m) {
    run r = make(k, m);
    fold whole = fold_new(&r);
    fold_feed(&r, &whole, TOKENS);
    assert_int_equal(whole.entries, TOKENS / m);
    for (int j = 0; j < TOKENS / m; j++)
        for (int c = 0; c < DIM; c++) {
            double want = by_definition(&r, j, c), got = real_of(k, whole.pooled, (int64_t)j * DIM + c);
            if (!(fabs(got - want) <= (k->real_bytes == 8 ? 1e-13 : 3e-6))) fail_msg("entry %d channel %d: %g instead of %g", j, c, got, want);
        }
    static const int chunks[] = {1, 2, 3, 4, 5, 7, 64, 127, 128, 129, 255};
    for (size_t i = 0; i < DM_COUNT(chunks); i++) {
        fold f = fold_new(&r);
        while (f.t < TOKENS) {
            fold_feed(&r, &f, TOKENS - f.t < chunks[i] ? (int)(TOKENS - f.t) : chunks[i]);
            assert_int_equal(f.entries, f.t / m);
        }
        assert_memory_equal(f.pooled, whole.pooled, (size_t)(TOKENS / m) * DIM * (size_t)k->real_bytes);
        assert_memory_equal(f.own, whole.own, 3 * DIM * (size_t)k->real_bytes);
        fold_drop(&f);
    }
    for (int cut = 0; cut <= TOKENS; cut++) { /* stopped, copied elsewhere, continued */
        fold f = fold_new(&r), g = fold_new(&r);
        if (cut) fold_feed(&r, &f, cut);
        memcpy(g.own, f.own, 3 * DIM * (size_t)k->real_bytes);
        memcpy(g.next, f.next, 3 * DIM * (size_t)k->real_bytes);
        memcpy(g.pooled, f.pooled, (size_t)f.entries * DIM * (size_t)k->real_bytes);
        g.t = f.t, g.entries = f.entries;
        if (cut < TOKENS) fold_feed(&r, &g, TOKENS - cut);
        assert_memory_equal(g.pooled, whole.pooled, (size_t)(TOKENS / m) * DIM * (size_t)k->real_bytes);
        fold_drop(&f), fold_drop(&g);
    }
    fold_drop(&whole);
    drop(&r);
}

static void every_chunking_and_cut_gives_the_same_c4_entries(void **state) {
    (void)state;
    check(dm_kernels_exact(), 4);
    for (const char *const *isa = dm_kernels_isas(); *isa; isa++) check(dm_kernels_get(*isa), 4);
}
static void every_chunking_and_cut_gives_the_same_c128_entries(void **state) {
    (void)state;
    check(dm_kernels_exact(), 128);
    for (const char *const *isa = dm_kernels_isas(); *isa; isa++) check(dm_kernels_get(*isa), 128);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_chunking_and_cut_gives_the_same_c4_entries),
        cmocka_unit_test(every_chunking_and_cut_gives_the_same_c128_entries),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
