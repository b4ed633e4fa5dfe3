/* attention.h — one query row, some heads, over a list of rows that are keys and values at once.
 *
 * Two passes over the keys with one maximum per head for all of them: scores; then p = e^{s−M}, rounded to bf16
 * for the product with the values, unrounded in the denominator.  584-byte rows are widened into `work`: all of
 * them when they fit into ATTN_WIDE rows, else tile by tile and once more for the second pass.
 * Bound: at few heads the widening, else the loads of dot_tile and axpy_tile. */
#ifndef KERN_ATTENTION_H
#define KERN_ATTENTION_H

#define ATTN_TILE 64
#define ATTN_WIDE 256

INLINE size_t attention_pad(int keys) { return ((size_t)keys + ATTN_TILE - 1) / ATTN_TILE * ATTN_TILE; }
static size_t attention_work(const kern_attention *p) {
    return (size_t)ATTN_WIDE * KERN_HEAD_DIM * sizeof(float) + (size_t)p->heads * attention_pad(p->keys) * sizeof(real)
         + (size_t)p->heads * KERN_HEAD_DIM * sizeof(real);
}

/* Float pointers of keys [first, first + n), padded with the first one; `wide` as described above. */
static void attention_keys(const kern_attention *p, float *wide, bool widen, int first, int n, const float **key) {
    int packed = p->keys - p->keys_f32;
    for (int i = 0; i < n; i++) {
        int j = first + i;
        if (j < p->keys_f32) {
            key[i] = p->key[j];
            continue;
        }
        int slot = packed <= ATTN_WIDE ? j - p->keys_f32 : i;
        float *to = wide + (size_t)slot * KERN_HEAD_DIM;
        if (widen || packed > ATTN_WIDE) unpack_row(p->key[j], to);
        key[i] = to;
    }
    for (int i = n; i % TILE_W; i++) key[i] = key[0];
}

static void attention_scores(const kern_attention *p, const float *const *key, int first, int n, real *s, size_t s_stride) {
    const real c = (real)0x1.6a09e6p-5f; /* 512^−1/2 */
    for (int h = 0; h < p->heads; h += TILE_X) {
        int nx = p->heads - h < TILE_X ? p->heads - h : TILE_X;
        const float *x[TILE_X];
        for (int i = 0; i < nx; i++) x[i] = p->q + (size_t)(h + i) * KERN_HEAD_DIM;
        for (int j = 0; j < n; j += TILE_W) {
            real out[TILE_X][TILE_W];
            dot_tile(nx, x, key + j, KERN_HEAD_DIM, out);
            for (int i = 0; i < nx; i++)
                for (int w = 0; w < TILE_W; w++) s[(size_t)(h + i) * s_stride + (size_t)(first + j + w)] = out[i][w] * c;
        }
    }
}

/* s → p in place, rounded for the values; returns Z. */
INLINE real attention_softmax(real *s, int keys, float sink, bool round) {
    real m = s[0], lane[LANES];
    int i = 0;
    for (int l = 0; l < LANES; l++) lane[l] = m;
    for (; i + LANES <= keys; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] = s[i + l] > lane[l] ? s[i + l] : lane[l];
    for (; i < keys; i++) m = s[i] > m ? s[i] : m;
    for (int l = 0; l < LANES; l++) m = lane[l] > m ? lane[l] : m;
    memset(lane, 0, sizeof lane);
    i = 0;
    for (; i + LANES <= keys; i += LANES)
        for (int l = 0; l < LANES; l++) {
            real e = real_exp(s[i + l] - m);
            lane[l] += e;
            s[i + l] = round ? (real)round_to(e, true) : e;
        }
    for (int l = 0; i + l < keys; l++) {
        real e = real_exp(s[i + l] - m);
        lane[l] += e;
        s[i + l] = round ? (real)round_to(e, true) : e;
    }
    return lanes_sum(lane) + real_exp((real)sink - m);
}

INLINE void attention_result(const real *acc, real z, float *o, bool round) {
    for (int d = 0; d < KERN_HEAD_DIM; d++) o[d] = round_to(acc[d] / z, round);
}

static void op_attention(const kern_attention *p) {
    size_t s_stride = attention_pad(p->keys);
    float *wide = p->work;
    real *s = (real *)(wide + (size_t)ATTN_WIDE * KERN_HEAD_DIM);
    real *acc = s + (size_t)p->heads * s_stride;
    const float *key[ATTN_TILE];
    for (int j = 0; j < p->keys; j += ATTN_TILE) {
        int n = p->keys - j < ATTN_TILE ? p->keys - j : ATTN_TILE;
        attention_keys(p, wide, true, j, n, key);
        attention_scores(p, key, j, n, s, s_stride);
    }
    memset(acc, 0, (size_t)p->heads * KERN_HEAD_DIM * sizeof(real));
    real z[64]; /* denominators; heads are at most 64 per call (supports) */
    for (int h = 0; h < p->heads; h++) z[h] = BY_ROUND(p->round, attention_softmax, s + (size_t)h * s_stride, p->keys, p->sink[h]);
    for (int j = 0; j < p->keys; j += ATTN_TILE) {
        int n = p->keys - j < ATTN_TILE ? p->keys - j : ATTN_TILE;
        attention_keys(p, wide, false, j, n, key);
        for (int h = 0; h < p->heads; h += TILE_X) {
            int nx = p->heads - h < TILE_X ? p->heads - h : TILE_X;
            const real *pp[TILE_X];
            real *aa[TILE_X];
            for (int i = 0; i < nx; i++) pp[i] = s + (size_t)(h + i) * s_stride + j, aa[i] = acc + (size_t)(h + i) * KERN_HEAD_DIM;
            axpy_tile(nx, pp, key, n, KERN_HEAD_DIM, aa);
        }
    }
    for (int h = 0; h < p->heads; h++) BY_ROUND(p->round, attention_result, acc + (size_t)h * KERN_HEAD_DIM, z[h], p->o + (size_t)h * KERN_HEAD_DIM);
}

#endif
