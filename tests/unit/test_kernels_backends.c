/* Every backend of this processor against the double reference and against itself: random shapes, NaN in all memory
 * that must not be read, NaN in all memory that must be written, guards around it. */
#include <math.h>
#include <stdio.h>

#include "kernels/kernels.h"
#include "testlib.h"

static uint64_t rng;
static uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
static uint64_t next(void) { return dm_splitmix64(&rng); }
static int below(int n) { return (int)(next() % (uint64_t)n); }
static float uniform(void) { return (float)((double)(next() >> 11) * 0x1p-53 * 2 - 1); }
static float normal(void) { return uniform() + uniform() + uniform(); }
static float normal_bf16(void) { return dm_bf16_round(normal()); }

/* n bytes of NaN patterns (0xff) between two guards. */
typedef struct block { uint8_t *base; size_t n; } block;
#define GUARD 256
static void *poison(block *b, size_t n) {
    b->n = n;
    b->base = malloc(n + 2 * GUARD);
    assert_non_null(b->base);
    memset(b->base, 0xff, n + 2 * GUARD);
    return b->base + GUARD;
}
static void release(block *b) {
    for (size_t i = 0; i < GUARD; i++)
        if (b->base[i] != 0xff || b->base[GUARD + b->n + i] != 0xff) fail_msg("written outside of %zu bytes", b->n);
    free(b->base);
}

/* Runs fn for every backend. */
static void each(void (*fn)(const dm_kernels *)) {
    for (const char *const *isa = dm_kernels_isas(); *isa; isa++) {
        const dm_kernels *k = dm_kernels_get(*isa);
        assert_non_null(k);
        rng = test_seed();
        fn(k);
    }
    rng = test_seed();
    fn(dm_kernels_exact());
}

/* ---- linear --------------------------------------------------------------------------------------- */

static uint8_t *random_weights(kern_mat *m) {
    size_t n = (size_t)m->out * (size_t)m->in;
    size_t scales = m->type == KERN_W_FP4 ? n / 32 : (size_t)((m->out + 127) / 128) * (size_t)((m->in + 127) / 128);
    uint8_t *w = malloc(n * 4), *s = malloc(scales);
    assert_true(w && s);
    for (size_t i = 0; i < n; i++) {
        float v = normal();
        uint16_t b = (uint16_t)(bits_of(normal_bf16()) >> 16);
        switch (m->type) {
        case KERN_W_F32: memcpy(w + 4 * i, &v, 4); break;
        case KERN_W_BF16: memcpy(w + 2 * i, &b, 2); break;
        case KERN_W_FP8: do w[i] = (uint8_t)next(); while ((w[i] & 0x7f) == 0x7f); break;
        case KERN_W_FP4: if (i % 2 == 0) w[i / 2] = (uint8_t)next(); break;
        }
    }
    for (size_t i = 0; i < scales; i++) s[i] = (uint8_t)(100 + below(40));
    m->w = w, m->scale = s;
    return w;
}
/* W[o][k] by the definition of the formats. */
static double weight(const kern_mat *m, int o, int k) {
    size_t at = (size_t)o * (size_t)m->in + (size_t)k;
    const uint8_t *w = m->w;
    float f;
    switch (m->type) {
    case KERN_W_F32: memcpy(&f, w + 4 * at, 4); return f;
    case KERN_W_BF16: {
        uint16_t b;
        memcpy(&b, w + 2 * at, 2);
        uint32_t u = (uint32_t)b << 16;
        memcpy(&f, &u, 4);
        return f;
    }
    case KERN_W_FP8: return ldexp(dm_e4m3_value(w[at]), m->scale[(size_t)(o / 128) * (size_t)((m->in + 127) / 128) + (size_t)(k / 128)] - 127);
    case KERN_W_FP4: return ldexp(dm_e2m1_value((w[at / 2] >> (at % 2 ? 4 : 0)) & 15), m->scale[at / 32] - 127);
    }
    return 0;
}

static void linear_case(const dm_kernels *k, kern_wtype type, int in, int out, int rows) {
    enum { PAD = 32 };
    kern_mat m = {.type = type, .out = out, .in = in};
    uint8_t *w = random_weights(&m);
    int pool = rows + 3, stride = in + PAD, y_stride = out + 5;
    block bx, by, bw;
    float *x = poison(&bx, (size_t)pool * (size_t)stride * 4), *y = poison(&by, (size_t)rows * (size_t)y_stride * 4);
    int32_t *gather = malloc((size_t)rows * sizeof *gather);
    for (int r = 0; r < rows; r++) gather[r] = below(pool);
    for (int r = 0; r < pool; r++)
        for (int i = 0; i < in; i++) x[r * stride + i] = normal_bf16();
    int o0 = below(out), o1 = o0 + 1 + below(out - o0);
    kern_linear p = {.w = m, .x = x, .x_stride = stride, .x_row = gather, .rows = rows, .x_bf16 = below(2), .out_begin = o0, .out_end = o1, .y = y, .y_stride = y_stride, .kind = KERN_OUT_F32};
    assert_true(k->supports(KERN_LINEAR, &p));
    p.work = poison(&bw, k->workspace_bytes(KERN_LINEAR, &p));
    k->linear(&p);
    for (int r = 0; r < rows; r++)
        for (int o = 0; o < y_stride; o++) {
            float got = y[r * y_stride + o];
            if (o < o0 || o >= o1) {
                if (bits_of(got) != 0xffffffff) fail_msg("output %d outside of [%d, %d) was written", o, o0, o1);
                continue;
            }
            double want = 0, size = 0;
            for (int i = 0; i < in; i++) {
                double v = weight(&m, o, i) * (double)x[gather[r] * stride + i];
                want += v, size += fabs(v);
            }
            if (!(fabs(got - want) <= 1e-6 * size + 1e-30)) fail_msg("%s: type %d, %dx%d, row %d, output %d: %g instead of %g", k->isa, type, out, in, r, o, got, want);
        }
    /* A row alone, one output alone, rounded: the same sum. */
    float one = NAN, all = y[(rows - 1) * y_stride + o1 - 1];
    kern_linear q = p;
    q.x_row = &gather[rows - 1], q.rows = 1, q.out_begin = o1 - 1, q.y = &one - (o1 - 1);
    k->linear(&q);
    assert_int_equal(bits_of(one), bits_of(all));
    q.kind = KERN_OUT_BF16;
    k->linear(&q);
    assert_int_equal(bits_of(one), bits_of(dm_bf16_round(all)));
    free(gather), free(w), free((void *)m.scale);
    release(&bx), release(&by), release(&bw);
}
static void linear_of(const dm_kernels *k) {
    for (kern_wtype t = KERN_W_BF16; t <= KERN_W_FP4; t++)
        for (int i = 0; i < 24; i++) {
            int in = t == KERN_W_FP8 ? 128 * (1 + below(4)) : 32 * (1 + below(12));
            linear_case(k, t, in, 1 + below(i % 4 ? 20 : 300), 1 + (i < 8 ? i : below(i % 3 ? 40 : 150)));
        }
}
static void linear_agrees_for_every_weight_and_row_alone_or_in_company(void **state) { (void)state; each(linear_of); }

static void unusable_shapes_are_refused(void **state) {
    (void)state;
    for (const char *const *isa = dm_kernels_isas(); *isa; isa++) {
        const dm_kernels *k = dm_kernels_get(*isa);
        assert_false(k->supports(KERN_LINEAR, &(kern_linear){.w = {.in = 33, .out = 4}}));
        assert_false(k->supports(KERN_LINEAR, &(kern_linear){.w = {.in = 0, .out = 4}}));
        assert_false(k->supports(KERN_ATTENTION, &(kern_attention){.heads = 65}));
        assert_false(k->supports(KERN_ROUTE, &(kern_route){.experts = 3, .k = 4}));
    }
    assert_null(dm_kernels_get("avx1024"));
    assert_non_null(dm_kernels_get(NULL));
}

/* ---- rows: everything without a long sum must not differ by a bit between float backends -------------------- */

static void fill(float *x, int n) { for (int i = 0; i < n; i++) x[i] = normal_bf16(); }
static void fill_bf16(uint16_t *x, int n) { for (int i = 0; i < n; i++) x[i] = (uint16_t)(bits_of(normal_bf16()) >> 16); }

#define ROW_BYTES 65536
/* Writes all results of the row operations of one backend one after the other; returns the bytes. */
static size_t row_ops(const dm_kernels *k, bool round, uint8_t *out) {
    enum { D = 256, H = 3, R = 3 };
    float cs[32], sn[32], f[32], x[R * D], y[R * D], h[R * 4 * D], q[H * 512], kv[512], iq[H * 128], iw[H], base[24], scale[3];
    float mix[R * 24], split[R * 24], split32[R * 24], g[D], u[D], w = 0.7f;
    uint16_t norm[512];
    uint8_t *at = out;
    rng = test_seed();
#define KEEP(p, n) (memcpy(at, p, n), at += (n))
    dm_rope_freqs(f, 10000, NULL);
    dm_rope_angles(f, 777, cs, sn);
    fill(x, R * D), fill(h, R * 4 * D), fill(q, H * 512), fill(kv, 512), fill(iq, H * 128), fill(iw, H), fill(base, 24), fill(scale, 3);
    fill(mix, R * 24), fill(g, D), fill(u, D), fill_bf16(norm, 512);
    memset(y, 0xff, sizeof y);
    k->rmsnorm(&(kern_rmsnorm){.x = x, .x_stride = D, .weight = norm, .y = y, .y_stride = D, .rows = R, .dim = D, .eps = 1e-6, .round = round});
    KEEP(y, sizeof y);
    k->quant(&(kern_quant){.x = x, .x_stride = D, .y = y, .y_stride = D, .rows = R, .dim = D});
    KEEP(y, sizeof y);
    k->hc_pre(&(kern_hc_pre){.h = h, .h_stride = 4 * D, .mix = mix, .base = base, .scale = scale, .split = split, .split_f32 = split32, .x = y, .x_stride = D,
                             .rows = R, .dim = D, .sinkhorn_iters = 20, .rms_eps = 1e-6, .hc_eps = 1e-6, .round = round});
    KEEP(y, sizeof y), KEEP(split, sizeof split), KEEP(split32, sizeof split32);
    k->hc_post(&(kern_hc_post){.h = h, .h_stride = 4 * D, .y = x, .y_stride = D, .split = split, .rows = R, .dim = D, .round = round});
    KEEP(h, sizeof h);
    k->qhead(&(kern_qhead){.q = q, .heads = H, .cos = cs, .sin = sn, .eps = 1e-6, .round = round});
    KEEP(q, sizeof q);
    k->rope(&(kern_rope){.x = q, .count = H, .dim = 512, .cos = cs, .sin = sn, .inverse = true, .round = round});
    KEEP(q, sizeof q);
    k->entry(&(kern_entry){.pooled = kv, .weight = norm, .dim = 512, .cos = cs, .sin = sn, .eps = 1e-6, .round = round, .row = at});
    at += round ? KERN_ROW_FP8_BYTES : KERN_ROW_F32_BYTES;
    k->entry(&(kern_entry){.pooled = kv, .weight = norm, .dim = 128, .cos = cs, .sin = sn, .eps = 1e-6, .round = round, .row = at});
    at += round ? KERN_KEY_FP4_BYTES : KERN_KEY_F32_BYTES;
    k->kv_row(&(kern_kv_row){.x = kv, .weight = norm, .cos = cs, .sin = sn, .eps = 1e-6, .round = round, .row = at});
    at += round ? KERN_ROW_FP8_BYTES : KERN_ROW_F32_BYTES;
    k->index_query(&(kern_index_query){.q = iq, .w = iw, .heads = H, .cos = cs, .sin = sn, .c = 0.044f, .round = round});
    KEEP(iq, sizeof iq), KEEP(iw, sizeof iw);
    k->swiglu(&(kern_swiglu){.g = g, .u = u, .a = g, .weight = &w, .dim = D, .limit = 1.5, .round = round});
    KEEP(g, sizeof g);
    const float *part[3] = {x, x + D, u};
    k->sum(&(kern_sum){.part = part, .parts = 3, .y = y, .dim = D, .round = round});
    KEEP(y, D * sizeof *y);
#undef KEEP
    assert_true((size_t)(at - out) < ROW_BYTES);
    return (size_t)(at - out);
}
static void row_operations_are_the_same_on_every_instruction_set(void **state) {
    (void)state;
    uint8_t *want = malloc(ROW_BYTES), *got = malloc(ROW_BYTES);
    assert_true(want && got);
    for (int round = 0; round < 2; round++) {
        size_t n = row_ops(dm_kernels_get("scalar"), round, want);
        for (const char *const *isa = dm_kernels_isas(); *isa; isa++) {
            memset(got, 0xff, ROW_BYTES);
            assert_int_equal(row_ops(dm_kernels_get(*isa), round, got), n);
            assert_memory_equal(got, want, n);
        }
    }
    free(want), free(got);
}

/* ---- unpacking -------------------------------------------------------------------------------------------------- */

static void unpack_of(const dm_kernels *k) {
    for (int n = 0; n < 40; n++) {
        uint8_t row[KERN_ROW_FP8_BYTES];
        float x[512];
        for (int i = 0; i < 448; i++) do row[i] = (uint8_t)next(); while ((row[i] & 0x7f) == 0x7f);
        for (int i = 0; i < 64; i++) {
            uint16_t b = (uint16_t)(bits_of(normal_bf16()) >> 16);
            memcpy(row + 448 + 2 * i, &b, 2);
        }
        for (int i = 0; i < 7; i++) row[576 + i] = (uint8_t)(105 + below(30));
        row[583] = 0;
        const void *p = row;
        memset(x, 0xff, sizeof x);
        k->unpack(&(kern_unpack){.row = &p, .x = x, .x_stride = 512, .rows = 1});
        for (int i = 0; i < 512; i++) {
            uint32_t u = (uint32_t)(row[448 + 2 * (i - 448 >= 0 ? i - 448 : 0)] | row[449 + 2 * (i - 448 >= 0 ? i - 448 : 0)] << 8) << 16;
            float want = i < 448 ? ldexpf(dm_e4m3_value(row[i]), row[576 + i / 64] - 127) : 0;
            if (i >= 448) memcpy(&want, &u, 4);
            assert_int_equal(bits_of(x[i]), bits_of(want));
        }
    }
}
static void packed_rows_unpack_to_the_bit(void **state) { (void)state; each(unpack_of); }

/* ---- attention ---------------------------------------------------------------------------------------------------- */

/* One head by the definition, in double; p rounded to bf16 for the values. */
static void attention_by_hand(const float *q, const float *const *key, int n, float sink, bool round, double o[512]) {
    double *s = malloc((size_t)n * sizeof *s), m = -INFINITY, z = 0;
    for (int i = 0; i < n; i++) {
        s[i] = 0;
        for (int d = 0; d < 512; d++) s[i] += (double)q[d] * key[i][d];
        s[i] *= (double)(float)(1 / sqrt(512));
        m = s[i] > m ? s[i] : m;
    }
    for (int d = 0; d < 512; d++) o[d] = 0;
    for (int i = 0; i < n; i++) {
        double p = exp(s[i] - m);
        z += p;
        for (int d = 0; d < 512; d++) o[d] += (round ? (double)dm_bf16_round((float)p) : p) * key[i][d];
    }
    z += exp(sink - m);
    for (int d = 0; d < 512; d++) o[d] /= z;
    free(s);
}
static void attention_case(const dm_kernels *k, int heads, int keys, int keys_f32, bool round) {
    block bq, bo, bw;
    float *q = poison(&bq, (size_t)heads * 2048), *o = poison(&bo, (size_t)heads * 2048), *wide = malloc((size_t)keys * 2048), sink[64];
    uint8_t *packed = malloc((size_t)keys * KERN_ROW_FP8_BYTES);
    const void **key = malloc((size_t)keys * sizeof *key);
    const float **by_hand = malloc((size_t)keys * sizeof *by_hand);
    assert_true(wide && packed && key && by_hand);
    float one[32], none[32] = {0};
    uint16_t norm[512];
    for (int i = 0; i < 32; i++) one[i] = 1;
    for (int i = 0; i < 512; i++) norm[i] = 0x3f80;
    for (int i = 0; i < heads * 512; i++) q[i] = normal_bf16();
    for (int h = 0; h < heads; h++) sink[h] = normal() * 3;
    for (int i = 0; i < keys; i++) {
        by_hand[i] = wide + i * 512;
        for (int d = 0; d < 512; d++) wide[i * 512 + d] = normal();
        key[i] = wide + i * 512;
        if (i < keys_f32) continue;
        float x[512];
        memcpy(x, wide + i * 512, sizeof x);
        key[i] = packed + i * KERN_ROW_FP8_BYTES;
        k->kv_row(&(kern_kv_row){.x = x, .weight = norm, .cos = one, .sin = none, .eps = 1e-6, .round = true, .row = packed + i * KERN_ROW_FP8_BYTES});
        k->unpack(&(kern_unpack){.row = &key[i], .x = wide + i * 512, .x_stride = 512, .rows = 1});
    }
    kern_attention p = {.q = q, .o = o, .sink = sink, .heads = heads, .key = key, .keys = keys, .keys_f32 = keys_f32, .round = round};
    p.work = poison(&bw, k->workspace_bytes(KERN_ATTENTION, &p));
    k->attention(&p);
    for (int h = 0; h < heads; h++) {
        double want[512], err = 0, size = 0;
        attention_by_hand(q + h * 512, by_hand, keys, sink[h], round, want);
        for (int d = 0; d < 512; d++) err += pow(o[h * 512 + d] - want[d], 2), size += want[d] * want[d];
        if (!(sqrt(err) <= (round ? 0.006 : 3e-6) * sqrt(size))) fail_msg("%s: %d keys, head %d: relative error %g", k->isa, keys, h, sqrt(err / size));
    }
    float alone[512]; /* the last head in a call of its own, packed or not, in place */
    memcpy(alone, q + (heads - 1) * 512, sizeof alone);
    kern_attention a = p;
    a.q = a.o = alone, a.heads = 1, a.sink = &sink[heads - 1], a.key = (const void *const *)by_hand, a.keys_f32 = keys;
    k->attention(&a);
    assert_memory_equal(alone, o + (heads - 1) * 512, sizeof alone);
    free(wide), free(packed), free(key), free(by_hand);
    release(&bq), release(&bo), release(&bw);
}
static void attention_of(const dm_kernels *k) {
    static const int keys[] = {1, 2, 3, 4, 5, 63, 64, 65, 128, 200, 257, 300, 500};
    for (size_t i = 0; i < DM_COUNT(keys); i++)
        for (int round = 0; round < 2; round++) attention_case(k, 1 + below(9), keys[i], round ? below(keys[i] + 1) : keys[i], round);
    attention_case(k, 2, 600, 100, true); /* more packed rows than are kept wide */
}
static void attention_agrees_for_any_number_of_keys_and_heads(void **state) { (void)state; each(attention_of); }

static void a_huge_sink_gives_zero_and_not_a_number(void **state) {
    (void)state;
    for (const char *const *isa = dm_kernels_isas(); *isa; isa++) {
        const dm_kernels *k = dm_kernels_get(*isa);
        float q[512] = {1}, key[512] = {1}, o[512], sink = 1e6f;
        const void *p = key;
        kern_attention a = {.q = q, .o = o, .sink = &sink, .heads = 1, .key = &p, .keys = 1, .keys_f32 = 1, .round = true};
        a.work = malloc(k->workspace_bytes(KERN_ATTENTION, &a));
        assert_non_null(a.work);
        k->attention(&a);
        for (int d = 0; d < 512; d++) assert_true(o[d] == 0);
        free(a.work);
    }
}

/* ---- indexer -------------------------------------------------------------------------------------------------------- */

static void score_case(const dm_kernels *k, int heads, int keys, bool round) {
    size_t row = round ? KERN_KEY_FP4_BYTES : KERN_KEY_F32_BYTES;
    int segs = (keys + 63) / 64;
    uint8_t *mem = malloc((size_t)segs * 64 * row);
    const void **seg = malloc((size_t)segs * sizeof *seg);
    float *q = malloc((size_t)heads * 512), w[64], *wide = malloc((size_t)keys * 512), *want = malloc((size_t)keys * 4);
    block bs, bw;
    float *score = poison(&bs, (size_t)keys * 4);
    assert_true(mem && seg && q && wide && want);
    memset(mem, 0xff, (size_t)segs * 64 * row);
    for (int s = 0; s < segs; s++) seg[s] = mem + (size_t)(segs - 1 - s) * 64 * row; /* not in order in memory */
    for (int i = 0; i < heads * 128; i++) q[i] = dm_e2m1_value((uint8_t)below(16));
    for (int h = 0; h < heads; h++) w[h] = normal_bf16();
    for (int j = 0; j < keys; j++) {
        uint8_t *at = (uint8_t *)seg[j / 64] + (size_t)(j % 64) * row;
        for (int d = 0; d < 128; d++) wide[j * 128 + d] = dm_e2m1_value((uint8_t)below(16)) * 0.25f;
        if (!round) memcpy(at, wide + j * 128, row);
        for (int d = 0; round && d < 64; d++)
            at[d] = (uint8_t)(dm_e2m1_code(wide[j * 128 + 2 * d] * 4) | dm_e2m1_code(wide[j * 128 + 2 * d + 1] * 4) << 4);
        for (int b = 0; round && b < 4; b++) at[64 + b] = 125;
    }
    kern_index_score p = {.q = q, .w = w, .heads = heads, .seg = seg, .seg_keys = 64, .begin = 0, .end = keys, .score = score, .round = round};
    p.work = poison(&bw, k->workspace_bytes(KERN_INDEX_SCORE, &p));
    k->index_score(&p);
    for (int j = 0; j < keys; j++) {
        double sum = 0, size = 0;
        for (int h = 0; h < heads; h++) {
            double dot = 0;
            for (int d = 0; d < 128; d++) dot += (double)q[h * 128 + d] * wide[j * 128 + d];
            dot = round ? (double)dm_bf16_round((float)dot) : dot;
            double v = (dot > 0 ? dot : 0) * w[h];
            sum += round ? (double)dm_bf16_round((float)v) : v;
            size += fabs(v);
        }
        want[j] = round ? dm_bf16_round((float)sum) : (float)sum;
        if (!(fabs(score[j] - want[j]) <= (round ? 0.008 * fabs(sum) + 1e-6 * size : 1e-5 * size))) fail_msg("%s: key %d: %g instead of %g", k->isa, j, score[j], want[j]);
        want[j] = score[j];
    }
    int cut = 1 + below(keys); /* two calls that meet anywhere give the same */
    memset(score, 0xff, (size_t)keys * 4);
    p.end = cut;
    k->index_score(&p);
    p.begin = cut, p.end = keys;
    k->index_score(&p);
    assert_memory_equal(score, want, (size_t)keys * 4);
    free(mem), free(seg), free(q), free(wide), free(want);
    release(&bs), release(&bw);
}
static void score_of(const dm_kernels *k) {
    for (int i = 0; i < 12; i++) score_case(k, 1 + below(16), 1 + below(i < 6 ? 70 : 300), i % 2);
}
static void index_scores_agree_and_may_be_cut_anywhere(void **state) { (void)state; each(score_of); }

static void topk_of(const dm_kernels *k) {
    for (int round = 0; round < 200; round++) {
        enum { N = 300 };
        float score[N], margin;
        int32_t sel[N];
        int n = 1 + below(N), kk = 1 + below(n), values = 1 + below(20);
        for (int j = 0; j < n; j++) score[j] = round % 3 ? (float)(below(values) - values / 2) : normal();
        if (round % 5 == 0) score[below(n)] = -0.0f;
        if (round % 7 == 0) score[below(n)] = -INFINITY;
        k->topk(&(kern_topk){.score = score, .n = n, .k = kk, .sel = sel, .margin = &margin});
        bool chosen[N] = {false};
        float last = 0, rest = -INFINITY;
        for (int i = 0; i < kk; i++) { /* the largest left, lowest index first */
            int best = -1;
            for (int j = 0; j < n; j++)
                if (!chosen[j] && (best < 0 || score[j] > score[best])) best = j;
            chosen[best] = true;
            last = score[best];
        }
        for (int j = 0, i = 0; j < n; j++)
            if (chosen[j]) assert_int_equal(sel[i++], j);
            else rest = score[j] > rest ? score[j] : rest;
        if (kk == n) assert_true(isinf(margin) && margin > 0);
        else if (isfinite(last)) assert_true(margin == last - rest);
    }
}
static void topk_takes_the_lowest_index_among_equals(void **state) { (void)state; each(topk_of); }

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_agrees_for_every_weight_and_row_alone_or_in_company),
        cmocka_unit_test(unusable_shapes_are_refused),
        cmocka_unit_test(row_operations_are_the_same_on_every_instruction_set),
        cmocka_unit_test(packed_rows_unpack_to_the_bit),
        cmocka_unit_test(attention_agrees_for_any_number_of_keys_and_heads),
        cmocka_unit_test(a_huge_sink_gives_zero_and_not_a_number),
        cmocka_unit_test(index_scores_agree_and_may_be_cut_anywhere),
        cmocka_unit_test(topk_takes_the_lowest_index_among_equals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
