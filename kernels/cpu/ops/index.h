/* index.h — the indexer of c4 layers: its queries, the scores of all visible entries, and the best k. */
#ifndef KERN_INDEX_H
#define KERN_INDEX_H

static void op_index_query(const kern_index_query *p) {
    for (int h = 0; h < p->heads; h++) {
        float *q = p->q + (size_t)h * KERN_INDEX_DIM;
        rope_vector(q, KERN_INDEX_DIM, p->cos, p->sin, (real)1, p->round);
        if (p->round) {
            hadamard(q);
            for (int b = 0; b < KERN_INDEX_DIM; b += 32) (void)fp4_block(q + b);
        }
        p->w[h] = round_to((real)p->w[h] * (real)p->c, p->round);
    }
}

#define INDEX_TILE 64
static size_t index_work(const kern_index_score *p) {
    return INDEX_TILE * KERN_INDEX_DIM * sizeof(float) + (size_t)p->heads * INDEX_TILE * sizeof(real);
}

/* Dot products of all heads with n keys of the tile. */
static void index_dots(const kern_index_score *p, const float *const *key, int n, real *dots) {
    for (int h = 0; h < p->heads; h += TILE_X) {
        int nx = p->heads - h < TILE_X ? p->heads - h : TILE_X;
        const float *x[TILE_X];
        for (int i = 0; i < nx; i++) x[i] = p->q + (size_t)(h + i) * KERN_INDEX_DIM;
        for (int j = 0; j < n; j += TILE_W) { /* key[] is padded to a multiple of TILE_W */
            real out[TILE_X][TILE_W];
            dot_tile(nx, x, key + j, KERN_INDEX_DIM, out);
            for (int i = 0; i < nx; i++) memcpy(dots + (size_t)(h + i) * INDEX_TILE + j, out[i], sizeof out[i]);
        }
    }
}

/* Σ_h w_h·relu(dot); the tile's slots behind n hold the first key again and are left out. */
INLINE void index_combine(const real *dots, const float *weight, int heads, int n, float *score, bool round) {
    real sum[INDEX_TILE] = {0};
    for (int h = 0; h < heads; h++) {
        real w = weight[h];
        const real *d = dots + (size_t)h * INDEX_TILE;
        for (int i = 0; i < INDEX_TILE; i++) {
            real v = round ? (real)bf16_round((float)d[i]) : d[i];
            v = v > 0 ? v : (real)0;
            sum[i] += round ? (real)bf16_round((float)(v * w)) : v * w;
        }
    }
    for (int i = 0; i < n; i++) score[i] = round_to(sum[i], round);
}

static void op_index_score(const kern_index_score *p) {
    float *wide = p->work;
    real *dots = (real *)(wide + INDEX_TILE * KERN_INDEX_DIM);
    for (int64_t j0 = p->begin; j0 < p->end; j0 += INDEX_TILE) {
        int n = p->end - j0 < INDEX_TILE ? (int)(p->end - j0) : INDEX_TILE;
        const float *key[INDEX_TILE];
        for (int i = 0; i < INDEX_TILE; i++) {
            int64_t j = j0 + (i < n ? i : 0), seg = j / p->seg_keys, at = j % p->seg_keys;
            if (!p->round) key[i] = (const float *)p->seg[seg] + at * KERN_INDEX_DIM;
            else {
                key[i] = i < n ? wide + i * KERN_INDEX_DIM : wide;
                if (i < n) unpack_key((const uint8_t *)p->seg[seg] + at * KERN_KEY_FP4_BYTES, wide + i * KERN_INDEX_DIM);
            }
        }
        index_dots(p, key, INDEX_TILE, dots);
        BY_ROUND(p->round, index_combine, dots, p->w, p->heads, n, p->score + j0);
    }
}

/* Order of floats as order of integers; −0 and +0 are equal; NaN is below everything. */
INLINE uint32_t order_key(float x) {
    uint32_t u = bits_of(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0;
    if (u == 0x80000000u) u = 0;
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
INLINE float order_float(uint32_t k) { return float_of(k & 0x80000000u ? k & 0x7fffffffu : ~k); }

/* The k-th largest key by two counting passes over 16 bits each; then one pass in index order. */
static void op_topk(const kern_topk *p) {
    int64_t n = p->n, want = p->k;
    if (p->margin) *p->margin = INFINITY;
    if (want >= n) {
        for (int64_t j = 0; j < n; j++) p->sel[j] = (int32_t)j;
        return;
    }
    uint32_t prefix = 0, mask = 0;
    int64_t left = want; /* how many of the wanted have the prefix so far */
    for (int shift = 24; shift >= 0; shift -= 8) {
        int64_t count[256] = {0};
        for (int64_t j = 0; j < n; j++) {
            uint32_t key = order_key(p->score[j]);
            if ((key & mask) == prefix) count[(key >> shift) & 255u]++;
        }
        int digit = 255;
        while (digit > 0 && count[digit] < left) left -= count[digit--];
        prefix |= (uint32_t)digit << shift;
        mask |= 255u << shift;
    }
    int64_t at = 0;
    uint32_t below = 0; /* largest key that is not chosen */
    for (int64_t j = 0; j < n; j++) {
        uint32_t key = order_key(p->score[j]);
        bool take = key > prefix || (key == prefix && left > 0);
        if (key == prefix && take) left--;
        if (take) p->sel[at++] = (int32_t)j;
        else if (key > below) below = key;
    }
    if (p->margin) *p->margin = order_float(prefix) - order_float(below);
}

#endif
