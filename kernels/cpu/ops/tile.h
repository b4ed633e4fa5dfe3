/* tile.h — the two inner loops that take nearly all of the time.
 *
 *   dot_tile   out[i][j] = Σ_k x_i[k]·w_j[k]         linears, attention scores, index scores
 *   axpy_tile  acc_h[d] += p_h[i]·k_i[d], i in order  values of attention
 *
 * One output's sum runs over k in vector lanes (AVX) or straight (scalar), then over the lanes in a fixed tree:
 * the same order whatever the number of rows in the tile, which is what makes rows independent of their
 * neighbours.  Bound: both are limited by loads, 8 of them per 16 multiply-adds at the full tile. */
#ifndef KERN_TILE_H
#define KERN_TILE_H

#define TILE_W 4 /* weight rows or keys per tile */

#if defined(KERN_AVX512)
#include <immintrin.h>
#define TILE_X 4
typedef __m512 vec;
#define VEC 16
#define vec_zero() _mm512_setzero_ps()
#define vec_load(p) _mm512_loadu_ps(p)
#define vec_store(p, v) _mm512_storeu_ps(p, v)
#define vec_set(x) _mm512_set1_ps(x)
#define vec_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
/* Sums of four vectors at once, every one in the same tree: pairs in a quarter, then the quarters. */
INLINE __m128 vec_sum4(vec a, vec b, vec c, vec d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d lo = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d hi = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512 all = _mm512_add_ps(_mm512_castpd_ps(lo), _mm512_castpd_ps(hi));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}
#elif defined(KERN_AVX2)
#include <immintrin.h>
#define TILE_X 2
typedef __m256 vec;
#define VEC 8
#define vec_zero() _mm256_setzero_ps()
#define vec_load(p) _mm256_loadu_ps(p)
#define vec_store(p, v) _mm256_storeu_ps(p, v)
#define vec_set(x) _mm256_set1_ps(x)
#define vec_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
INLINE __m128 vec_sum4(vec a, vec b, vec c, vec d) {
    __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    __m256d lo = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    __m256d hi = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
    __m256 all = _mm256_add_ps(_mm256_castpd_ps(lo), _mm256_castpd_ps(hi));
    return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}
#else
#define TILE_X 4
#endif

#ifdef VEC

INLINE void dot_block(int nx, const float *const *x, const float *const *w, int k, real out[][TILE_W]) {
    vec acc[TILE_X][TILE_W];
    for (int i = 0; i < nx; i++)
        for (int j = 0; j < TILE_W; j++) acc[i][j] = vec_zero();
    for (int at = 0; at < k; at += VEC) {
        vec wv[TILE_W];
        for (int j = 0; j < TILE_W; j++) wv[j] = vec_load(w[j] + at);
        for (int i = 0; i < nx; i++) {
            vec xv = vec_load(x[i] + at);
            for (int j = 0; j < TILE_W; j++) acc[i][j] = vec_fma(xv, wv[j], acc[i][j]);
        }
    }
    for (int i = 0; i < nx; i++) _mm_storeu_ps(out[i], vec_sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
}
/* k is a multiple of 32.  x[0..nx), w[0..TILE_W) must all be readable. */
static void dot_tile(int nx, const float *const *x, const float *const *w, int k, real out[][TILE_W]) {
    switch (nx) {
    case 1: dot_block(1, x, w, k, out); break;
    case 2: dot_block(2, x, w, k, out); break;
#if TILE_X == 4
    case 3: dot_block(3, x, w, k, out); break;
    case 4: dot_block(4, x, w, k, out); break;
#endif
    default: break;
    }
}

INLINE void axpy_block(int nh, const real *const *p, const float *const *key, int keys, int d, real *const *acc) {
    vec a[TILE_X][4];
    for (int h = 0; h < nh; h++)
        for (int c = 0; c < 4; c++) a[h][c] = vec_load(acc[h] + d + c * VEC);
    for (int i = 0; i < keys; i++) {
        vec kv[4];
        for (int c = 0; c < 4; c++) kv[c] = vec_load(key[i] + d + c * VEC);
        for (int h = 0; h < nh; h++) {
            vec pv = vec_set(p[h][i]);
            for (int c = 0; c < 4; c++) a[h][c] = vec_fma(pv, kv[c], a[h][c]);
        }
    }
    for (int h = 0; h < nh; h++)
        for (int c = 0; c < 4; c++) vec_store(acc[h] + d + c * VEC, a[h][c]);
}
/* nh heads, `keys` keys of `dim` values (a multiple of 64) into acc. */
static void axpy_tile(int nh, const real *const *p, const float *const *key, int keys, int dim, real *const *acc) {
    for (int d = 0; d < dim; d += 4 * VEC) switch (nh) {
        case 1: axpy_block(1, p, key, keys, d, acc); break;
        case 2: axpy_block(2, p, key, keys, d, acc); break;
#if TILE_X == 4
        case 3: axpy_block(3, p, key, keys, d, acc); break;
        case 4: axpy_block(4, p, key, keys, d, acc); break;
#endif
        default: break;
        }
}

#else

static void dot_tile(int nx, const float *const *x, const float *const *w, int k, real out[][TILE_W]) {
    for (int i = 0; i < nx; i++) {
        real a0 = 0, a1 = 0, a2 = 0, a3 = 0; /* four sums at once only to hide the latency of an addition */
        const float *xi = x[i];
        for (int at = 0; at < k; at++) {
            real xv = xi[at];
            a0 += xv * (real)w[0][at];
            a1 += xv * (real)w[1][at];
            a2 += xv * (real)w[2][at];
            a3 += xv * (real)w[3][at];
        }
        out[i][0] = a0, out[i][1] = a1, out[i][2] = a2, out[i][3] = a3;
    }
}
static void axpy_tile(int nh, const real *const *p, const float *const *key, int keys, int dim, real *const *acc) {
    for (int h = 0; h < nh; h++) {
        real *restrict a = acc[h];
        for (int i = 0; i < keys; i++) {
            real pv = p[h][i];
            const float *restrict k = key[i];
            for (int d = 0; d < dim; d++) a[d] += pv * (real)k[d];
        }
    }
}

#endif
#endif
