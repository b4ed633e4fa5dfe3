/* numeric.h — rounding, codes and reductions that every operation is made of.
 *
 * This folder is one source that is compiled once per backend: table_<backend>.c defines KERN_REAL (the type
 * between rounding points), KERN_EXACT, KERN_ISA and KERN_TABLE and includes ops/all.h.  Everything is static, so
 * the builds do not meet.  No operation may be contracted into a fused multiply-add unless written as one.
 *
 * Loops here are plain enough for the compiler to turn into vectors; where a sum is split into lanes the split is
 * by index, so it is the same on every instruction set. */
#ifndef KERN_NUMERIC_H
#define KERN_NUMERIC_H

#include <math.h>
#include <string.h>

#include "kernels/kernels.h"

typedef KERN_REAL real;

#define INLINE static inline __attribute__((always_inline, unused))
#define LANES 16 /* partial sums of a reduction */

INLINE uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }
INLINE float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
INLINE float pow2f(int n) { return n >= -126 ? float_of((uint32_t)(n + 127) << 23) : float_of(1u << (149 + n)); }

/* ---- bf16 --------------------------------------------------------------------------------------- */

INLINE float bf16_round(float x) {
    uint32_t u = bits_of(x);
    uint32_t r = (u + 0x7fffu + ((u >> 16) & 1u)) & 0xffff0000u;
    uint32_t nan = -(uint32_t)((u & 0x7fffffffu) > 0x7f800000u); /* a select without a branch: loops stay vectors */
    return float_of((r & ~nan) | ((u | 0x400000u) & nan));
}
/* A rounding point: real → float → bf16, or real → float when nothing is rounded.  Loops over it are functions
 * that are inlined once per value of `round` (BY_ROUND), or the question would be asked for every element. */
INLINE float round_to(real x, bool round) { return round ? bf16_round((float)x) : (float)x; }
#define BY_ROUND(round, fn, ...) ((round) ? fn(__VA_ARGS__, true) : fn(__VA_ARGS__, false))
INLINE float bf16_float(uint16_t b) { return float_of((uint32_t)b << 16); }

/* ---- e4m3 and e2m1 -------------------------------------------------------------------------------- */

/* Nearest value with `bits` mantissa bits and exponents from `emin` up, ties to even: adding 2^(e+23−bits)
 * pushes everything below the last kept bit out of the float. */
INLINE float round_mantissa(float x, int bits, int emin) {
    uint32_t u = bits_of(x), a = u & 0x7fffffffu, e = a >> 23;
    e = e > (uint32_t)(127 + emin) ? e : (uint32_t)(127 + emin);
    float c = float_of((e + 23u - (uint32_t)bits) << 23);
    float r = (float_of(a) + c) - c;
    return float_of(bits_of(r) | (u & 0x80000000u));
}
INLINE float clampf(float x, float lim) { x = x > lim ? lim : x; return x < -lim ? -lim : x; }
INLINE float e4m3_round(float x) { return round_mantissa(clampf(x, 448.0f), 3, -6); }
INLINE float e2m1_round(float x) { return round_mantissa(clampf(x, 6.0f), 1, 0); }

/* Codes of values that are on the grid already. */
INLINE uint8_t e4m3_pack(float r) {
    uint32_t u = bits_of(r), a = u & 0x7fffffffu;
    uint32_t normal = (a >> 20) - (120u << 3);
    uint32_t sub = (uint32_t)(int32_t)(float_of(a < 121u << 23 ? a : 0) * 512.0f); /* never of a NaN */
    return (uint8_t)((a >= (121u << 23) ? normal : sub) | (u >> 31 << 7));
}
INLINE uint8_t e2m1_pack(float r) {
    uint32_t u = bits_of(r), a = u & 0x7fffffffu;
    uint32_t normal = (a >> 22) - (127u << 1) + 2u;
    uint32_t sub = (uint32_t)(int32_t)(float_of(a < 127u << 23 ? a : 0) * 2.0f);
    return (uint8_t)((a >= (127u << 23) ? normal : sub) | (u >> 31 << 3));
}
#define E4M3_ABS(c) ((c) >> 3 ? (8 + ((c) & 7)) * (float)(1 << ((c) >> 3)) / 1024.0f : ((c) & 7) / 512.0f)
#define E4M3(c) (((c) & 0x7f) == 0x7f ? NAN : ((c) & 0x80 ? -1.0f : 1.0f) * E4M3_ABS((c) & 0x7f))
#define E4M3_4(c) E4M3(c), E4M3((c) + 1), E4M3((c) + 2), E4M3((c) + 3)
#define E4M3_16(c) E4M3_4(c), E4M3_4((c) + 4), E4M3_4((c) + 8), E4M3_4((c) + 12)
#define E4M3_64(c) E4M3_16(c), E4M3_16((c) + 16), E4M3_16((c) + 32), E4M3_16((c) + 48)
INLINE float e4m3_float(uint8_t c) {
    static const float value[256] = {E4M3_64(0), E4M3_64(64), E4M3_64(128), E4M3_64(192)};
    return value[c];
}
INLINE float e2m1_float(uint8_t c) {
    static const float value[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
    return value[c & 15];
}

/* ⌈log2(v)⌉ from the bits of the float v; the byte n + 127 must stay a number. */
INLINE int ceil_log2_bits(float v) {
    uint32_t u = bits_of(v);
    int n = (int)((u >> 23) & 255u) - 127 + ((u & 0x7fffffu) != 0);
    return n > 127 ? 127 : n < -127 ? -127 : n;
}
INLINE int fp8_exp(float amax) {
    float a = amax > 1e-4f ? amax : 1e-4f;
    return ceil_log2_bits(a * (1.0f / 448.0f)); /* a float product: see the notes on 448·2^k */
}
INLINE int fp4_exp(float amax) {
    float a = amax > 6.0f * 0x1p-126f ? amax : 6.0f * 0x1p-126f;
    return ceil_log2_bits(a * (1.0f / 6.0f));
}
INLINE float abs_max(const float *x, int n) {
    float lane[LANES] = {0};
    for (int i = 0; i < n; i += LANES)
        for (int l = 0; l < LANES; l++) {
            float a = fabsf(x[i + l]);
            lane[l] = a > lane[l] ? a : lane[l];
        }
    float m = 0;
    for (int l = 0; l < LANES; l++) m = lane[l] > m ? lane[l] : m;
    return m;
}

/* ---- functions ------------------------------------------------------------------------------------- */

/* e^x in float: x = n·ln2 + r, a polynomial for e^r, n into the exponent.  Within 2 ulp; 0 below −87.3, inf above 88.3. */
INLINE float exp_f32(float x) {
    float xc = x < -87.3f ? -87.3f : x;
    xc = xc > 88.3f ? 88.3f : xc;
    float shifted = xc * 1.44269504088896341f + 12582912.0f;
    float n = shifted - 12582912.0f;
    float r = (xc - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    uint32_t e = (bits_of(shifted) - bits_of(12582912.0f) + 127u) << 23;
    float y = p * float_of(e);
    y = x < -87.3f ? 0.0f : y;
    return x > 88.3f ? INFINITY : y;
}

#if KERN_EXACT
INLINE real real_exp(real x) { return exp(x); }
INLINE real real_sqrt(real x) { return sqrt(x); }
INLINE real real_log1p(real x) { return log1p(x); }
#else
INLINE real real_exp(real x) { return exp_f32(x); }
INLINE real real_sqrt(real x) { return sqrtf(x); }
INLINE real real_log1p(real x) { return log1pf(x); }
#endif
INLINE real sigmoid(real x) { return (real)1 / ((real)1 + real_exp(-x)); }

/* ---- reductions ------------------------------------------------------------------------------------- */

INLINE real lanes_sum(const real lane[LANES]) {
    real s[LANES];
    memcpy(s, lane, sizeof s);
    for (int half = LANES / 2; half; half /= 2)
        for (int l = 0; l < half; l++) s[l] += s[l + half];
    return s[0];
}
/* Σ x², n a multiple of LANES. */
INLINE real square_sum(const float *x, int n) {
    real lane[LANES] = {0};
    for (int i = 0; i < n; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] += (real)x[i + l] * (real)x[i + l];
    return lanes_sum(lane);
}

#endif
