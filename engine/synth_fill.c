/* synth_fill.c — elements of synthetic tensors; compiled for speed, since a checkpoint has billions of them. */
#include <math.h>
#include <string.h>

#include "engine/synth_int.h"

/* Everything between here and synth_rows() is inlined into one function per instruction set. */
#define HOT static inline __attribute__((always_inline))

/* A float and its bits. */
HOT float bits_float(uint32_t u) {
    float x;
    memcpy(&x, &u, 4);
    return x;
}
HOT uint32_t float_bits(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return u;
}

/* ---- streams ------------------------------------------------------------------------------------ */

uint64_t synth_key(uint64_t seed, const char *name, const char *suffix) {
    char text[256];
    int n = snprintf(text, sizeof text, "%llu:%s%s", (unsigned long long)seed, name, suffix);
    DM_ASSERT(n > 0 && n < (int)sizeof text);
    dm_sha256 h;
    dm_hash digest;
    dm_sha256_init(&h);
    dm_sha256_add(&h, text, (size_t)n);
    dm_sha256_end(&h, &digest);
    uint64_t key = 0;
    for (int i = 7; i >= 0; i--) key = key << 8 | digest.b[i];
    return key;
}

/* Four 16-bit fields summed: mean 2 − 2^−15 in units of 65536, variance 1/3. */
HOT float normal(uint64_t z) {
    const uint64_t even = 0x0000FFFF0000FFFFull;
    uint64_t pair = (z & even) + (z >> 16 & even);
    int32_t sum = (int32_t)((uint32_t)pair + (uint32_t)(pair >> 32));
    return (float)(((double)sum * (1.0 / 65536) - 2.0 + 0x1p-15) * 1.7320508075688772935);
}

/* ---- which rule ------------------------------------------------------------------------------------ */

static bool ends(const char *s, const char *tail) {
    size_t n = strlen(s), k = strlen(tail);
    return n >= k && memcmp(s + n - k, tail, k) == 0;
}

/* Last dotted component without ".weight". */
static void leaf_of(char out[64], const char *name) {
    size_t n = strlen(name);
    if (ends(name, ".weight")) n -= strlen(".weight");
    size_t at = n;
    while (at > 0 && name[at - 1] != '.') at--;
    size_t len = n - at < 63 ? n - at : 63;
    memcpy(out, name + at, len);
    out[len] = '\0';
}

static float over_root(double c, int64_t n) { return (float)(c / sqrt((double)n)); }

static float norm_gain(const char *name, const char *leaf) {
    if (strstr(name, "compressor")) return 1.8f;
    if (strcmp(leaf, "kv_norm") == 0) return 1.5f;
    return strcmp(leaf, "q_norm") == 0 ? 1.2f : 1.0f;
}

static double matrix_gain(const char *leaf) {
    static const struct { const char *leaf; double gain; } gains[] = {
        {"wo_b", 1.2}, {"w1", 2.6}, {"w3", 2.6}, {"w2", 0.11}, {"e_proj", 0.7}, {"h_proj", 0.7},
    };
    for (size_t i = 0; i < DM_COUNT(gains); i++)
        if (strcmp(leaf, gains[i].leaf) == 0) return gains[i].gain;
    return 1.0;
}

static synth_rule rule_of(const char *name, int64_t in, int64_t D) {
    char leaf[64];
    leaf_of(leaf, name);
    synth_rule r = {.coef = 1, .add = 0, .mul = 1};
    if (strcmp(leaf, "embed") == 0) return r;
    if (strcmp(leaf, "head") == 0) r.coef = over_root(2.5, D);
    else if (ends(leaf, "norm")) r.coef = 0.25f, r.add = 1, r.mul = norm_gain(name, leaf);
    else if (dm_str_prefix(leaf, "hc_") && ends(leaf, "_fn")) r.coef = over_root(1.2, 4 * D);
    else if (dm_str_prefix(leaf, "hc_") && ends(leaf, "_scale")) r.coef = 0.3f, r.add = 1;
    else if (dm_str_prefix(leaf, "hc_") && ends(leaf, "_base")) r.coef = 0.5f, r.add = -0.3f, r.mix_base = in == 24;
    else if (strcmp(leaf, "attn_sink") == 0) r.coef = 1.5f, r.add = 2;
    else if (strcmp(leaf, "ape") == 0) r.coef = 1.2f;
    else if (strcmp(leaf, "wgate") == 0) r.coef = over_root(2, D);
    else if (strcmp(leaf, "weights_proj") == 0) r.coef = over_root(3, D);
    else if (ends(name, "ffn.gate.weight")) r.coef = over_root(1.5, D);
    else if (ends(name, "ffn.gate.bias")) r.coef = 0.3f;
    else if (strcmp(leaf, "tid2eid") == 0) r.top_k = true;
    else r.coef = over_root(matrix_gain(leaf), in);
    return r;
}

void synth_tensor_init(synth_tensor *t, const model_want *w, const dm_config *c, uint64_t seed) {
    t->dtype = w->dtype, t->fp4 = w->fp4, t->quantised = w->quantised;
    t->out = w->ndim > 1 ? w->dim[0] : 1;
    t->in = (w->ndim > 1 ? w->dim[1] : w->dim[0]) * (w->quantised && w->fp4 ? 2 : 1);
    t->rule = rule_of(w->name, t->in, c->hidden_size);
    t->experts = c->n_routed_experts, t->top_k = c->num_experts_per_tok;
    t->key = synth_key(seed, w->name, "");
    t->block_key = t->quantised ? synth_key(seed, w->name, ":block") : 0;
}

int64_t synth_row_bytes(const synth_tensor *t) { return t->quantised && t->fp4 ? t->in / 2 : t->in * model_dtype_size(t->dtype); }

int64_t synth_scale_bytes(const synth_tensor *t, int64_t rows) {
    if (!t->quantised) return 0;
    return t->fp4 ? rows * (t->in / 32) : (rows + 127) / 128 * ((t->in + 127) / 128);
}

/* ---- plain tensors ------------------------------------------------------------------------------------ */

HOT float value(const synth_rule *r, uint64_t key, int64_t i) {
    float v = r->coef * normal(synth_number(key, (uint64_t)i + 1));
    v = r->add + v;
    return r->mul * v;
}

HOT uint16_t to_bf16(float x) {
    uint32_t u = float_bits(x);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

/* The 4×4 mixing matrix leans to the diagonal, so that streams stay apart. */
static float mix_addition(int64_t i) {
    if (i < 8) return 0;
    return (i - 8) / 4 == (i - 8) % 4 ? 1.5f : 0.3f;
}

HOT void fill_f32(const synth_tensor *t, int64_t i0, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++) out[i] = value(&t->rule, t->key, i0 + i);
    if (t->rule.mix_base)
        for (int64_t i = 0; i < n; i++)
            if (i0 + i >= 8) out[i] = out[i] + mix_addition(i0 + i);
}

HOT void fill_bf16(const synth_tensor *t, int64_t i0, int64_t n, uint16_t *out) {
    for (int64_t i = 0; i < n; i++) out[i] = to_bf16(value(&t->rule, t->key, i0 + i));
}

/* Per token the experts with the smallest numbers, ascending; equal numbers: lower expert first. */
HOT void fill_top_k(const synth_tensor *t, int64_t r0, int64_t r1, int64_t *out) {
    uint64_t best[MODEL_TOPK_MAX];
    for (int64_t row = r0; row < r1; row++, out += t->top_k) {
        int have = 0;
        for (int e = 0; e < t->experts; e++) {
            uint64_t z = synth_number(t->key, (uint64_t)(row * t->experts + e) + 1);
            if (have == t->top_k && z >= best[have - 1]) continue;
            int at = have < t->top_k ? have++ : have - 1;
            for (; at > 0 && best[at - 1] > z; at--) best[at] = best[at - 1], out[at] = out[at - 1];
            best[at] = z, out[at] = e;
        }
    }
}

/* ---- quantised matrices ----------------------------------------------------------------------------------- */

/* 2^(j/4), j = round_half_even(4·clip(0.7·b, ±1.5)), so |j| <= 6 */
HOT float block_factor(uint64_t key, int64_t block) {
    static const float quarter[4] = {1.0f, (float)1.189207115002721, (float)1.4142135623730951, (float)1.681792830507429};
    float x = 0.7f * normal(synth_number(key, (uint64_t)block + 1));
    x = x < -1.5f ? -1.5f : x > 1.5f ? 1.5f : x;
    uint32_t j = (uint32_t)((int)lrintf(4 * x) + 8); /* the octave is j / 4 − 2 */
    return quarter[j % 4] * bits_float((127 + j / 4 - 2) << 23);
}

/* ⌈log2(amax / top)⌉ exactly, for top = 448 (1.75·2^8) and 6 (1.5·2^2); nothing here is subnormal */
HOT int exponent_for(float amax, uint32_t top) {
    uint32_t u = float_bits(amax);
    return (int)(u >> 23) - (int)(top >> 23) + ((u & 0x7FFFFF) > (top & 0x7FFFFF));
}
#define TOP_E4M3 0x43E00000u
#define TOP_E2M1 0x40C00000u

HOT float inverse_power(int exponent) { return bits_float((uint32_t)(127 - exponent) << 23); }

/* Nearest e4m3 code of |x| <= 448, ties to the even code, sign bit for x < 0. */
HOT uint8_t to_e4m3(float x) {
    /* the last bit of the sum is worth 2^−9, the subnormal step */
    uint32_t u = float_bits(x), s = float_bits(__builtin_fabsf(x) + 16384.0f);
    uint32_t sign = u >> 24 & 0x80, mag = u & 0x7FFFFFFF;
    uint32_t normal_code = ((mag + 0x7FFFF + (mag >> 20 & 1)) >> 20) - (120 << 3); /* bias 127 → 7 */
    uint32_t small_code = s - 0x46800000;
    return (uint8_t)(sign | (mag < 0x3C800000 ? small_code : normal_code)); /* 2^−6 */
}

HOT uint8_t to_e2m1(float x) {
    float a = __builtin_fabsf(x);
    int code = (a > 0.25f) + (a >= 0.75f) + (a > 1.25f) + (a >= 1.75f) + (a > 2.5f) + (a >= 3.5f) + (a > 5.0f);
    return (uint8_t)(code | (x < 0) << 3);
}

/* One row of a block, scaled by its factor; returns the largest magnitude so far. */
HOT float block_row(const synth_tensor *t, int64_t i0, int64_t n, float factor, float *w, float amax) {
    for (int64_t i = 0; i < n; i++) w[i] = t->rule.coef * normal(synth_number(t->key, (uint64_t)(i0 + i) + 1)) * factor;
    for (int64_t i = 0; i < n; i++) {
        float a = __builtin_fabsf(w[i]);
        amax = a > amax ? a : amax;
    }
    return amax;
}

HOT void fp8_block(const synth_tensor *t, int64_t row, int64_t rows, int64_t col, int64_t cols, int64_t block, uint8_t *out, uint8_t *scale) {
    float w[128][128], amax = 0, factor = block_factor(t->block_key, block);
    for (int64_t r = 0; r < rows; r++) amax = block_row(t, (row + r) * t->in + col, cols, factor, w[r], amax);
    int exponent = amax > 0 ? exponent_for(amax, TOP_E4M3) : 0;
    float inverse = inverse_power(exponent);
    *scale = (uint8_t)(exponent + 127);
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < cols; c++) out[r * t->in + c] = to_e4m3(w[r][c] * inverse);
}

HOT void fp8_rows(const synth_tensor *t, int64_t r0, int64_t r1, uint8_t *out, uint8_t *scale) {
    int64_t grid = (t->in + 127) / 128;
    for (int64_t row = r0; row < r1; row += 128)
        for (int64_t col = 0; col < t->in; col += 128) {
            int64_t rows = r1 - row < 128 ? r1 - row : 128, cols = t->in - col < 128 ? t->in - col : 128;
            fp8_block(t, row, rows, col, cols, row / 128 * grid + col / 128, out + (row - r0) * t->in + col, scale++);
        }
}

HOT void fp4_rows(const synth_tensor *t, int64_t r0, int64_t r1, uint8_t *out, uint8_t *scale) {
    int64_t grid = t->in / 32;
    for (int64_t block = r0 * grid; block < r1 * grid; block++, out += 16) {
        float w[32], amax = block_row(t, block * 32, 32, block_factor(t->block_key, block), w, 0);
        int exponent = amax > 0 ? exponent_for(amax, TOP_E2M1) : 0;
        float inverse = inverse_power(exponent);
        *scale++ = (uint8_t)(exponent + 127);
        for (int i = 0; i < 16; i++) out[i] = (uint8_t)(to_e2m1(w[2 * i] * inverse) | to_e2m1(w[2 * i + 1] * inverse) << 4);
    }
}

HOT void rows(const synth_tensor *t, int64_t r0, int64_t r1, uint8_t *out, uint8_t *scale) {
    int64_t i0 = r0 * t->in, n = (r1 - r0) * t->in;
    if (t->rule.top_k) fill_top_k(t, r0, r1, (int64_t *)(void *)out);
    else if (t->quantised && t->fp4) fp4_rows(t, r0, r1, out, scale);
    else if (t->quantised) fp8_rows(t, r0, r1, out, scale);
    else if (t->dtype == MODEL_F32) fill_f32(t, i0, n, (float *)(void *)out);
    else fill_bf16(t, i0, n, (uint16_t *)(void *)out);
}

/* The same statements under wider vectors; -ffp-contract=off keeps the rounding the same. */
static void rows_plain(const synth_tensor *t, int64_t r0, int64_t r1, uint8_t *out, uint8_t *scale) { rows(t, r0, r1, out, scale); }

#if defined(__x86_64__)
__attribute__((target("avx2"))) static void rows_avx2(const synth_tensor *t, int64_t r0, int64_t r1, uint8_t *out, uint8_t *scale) {
    rows(t, r0, r1, out, scale);
}
__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,prefer-vector-width=512"))) static void rows_avx512(const synth_tensor *t, int64_t r0, int64_t r1,
                                                                                uint8_t *out, uint8_t *scale) {
    rows(t, r0, r1, out, scale);
}
#endif

void synth_rows(const synth_tensor *t, int64_t r0, int64_t r1, uint8_t *out, uint8_t *scale) {
#if defined(__x86_64__)
    bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl");
    if (wide) rows_avx512(t, r0, r1, out, scale);
    else if (__builtin_cpu_supports("avx2")) rows_avx2(t, r0, r1, out, scale);
    else rows_plain(t, r0, r1, out, scale);
#else
    rows_plain(t, r0, r1, out, scale);
#endif
}
