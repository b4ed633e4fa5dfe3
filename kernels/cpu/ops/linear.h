/* linear.h — y = W x for any stored weight.
 *
 * Schedule: four weight rows at a time are widened into `work` (they stay in the first or second cache) and
 * multiplied with all rows of x, TILE_X at a time.  So widening is paid once per call and weight row, whatever the
 * number of rows.  One or two rows skip the detour through memory: weights are widened into registers and used at
 * once, with the same operations in the same order, so a row cannot tell which way it went.
 * Bound: weight bytes when there are few rows, multiply-adds when there are many. */
#ifndef KERN_LINEAR_H
#define KERN_LINEAR_H

INLINE void linear_store(const kern_linear *p, int r, int o, real v) {
    int64_t at = r * p->y_stride + o;
    switch (p->kind) {
    case KERN_OUT_REAL: ((real *)p->y)[at] = v; break;
    case KERN_OUT_F32: ((float *)p->y)[at] = (float)v; break;
    case KERN_OUT_BF16: ((float *)p->y)[at] = bf16_round((float)v); break;
    }
}

INLINE const float *linear_row(const kern_linear *p, int r) { return p->x + (p->x_row ? p->x_row[r] : r) * p->x_stride; }

#ifdef VEC
#define FUSED_ROWS 2

INLINE void unit_load(const kern_mat *m, int o, int k, vec v[UNIT_VECS]) {
    size_t row = (size_t)o * (size_t)m->in + (size_t)k;
    switch (m->type) {
    case KERN_W_F32:
        for (int i = 0; i < UNIT_VECS; i++) v[i] = vec_load((const float *)m->w + row + i * VEC);
        break;
    case KERN_W_BF16: unit_bf16((const uint16_t *)m->w + row, v); break;
    case KERN_W_FP8: {
        uint8_t scale = m->scale[(size_t)(o / 128) * (size_t)((m->in + 127) / 128) + (size_t)(k / 128)];
        unit_e4m3((const uint8_t *)m->w + row, vec_set(ue8m0_float(scale) * 256.0f), v);
        break;
    }
    case KERN_W_FP4: unit_e2m1((const uint8_t *)m->w + row / 2, vec_set(ue8m0_float(m->scale[row / 32])), v); break;
    }
}
INLINE void fused_tile(const kern_mat *m, int nx, const float *const *x, int o, int nw, real out[][TILE_W]) {
    vec acc[FUSED_ROWS][TILE_W];
    for (int i = 0; i < nx; i++)
        for (int j = 0; j < TILE_W; j++) acc[i][j] = vec_zero();
    for (int k = 0; k < m->in; k += UNIT)
        for (int j = 0; j < TILE_W; j++) {
            vec w[UNIT_VECS];
            unit_load(m, j < nw ? o + j : o, k, w);
            for (int i = 0; i < nx; i++)
                for (int v = 0; v < UNIT_VECS; v++) acc[i][j] = vec_fma(vec_load(x[i] + k + v * VEC), w[v], acc[i][j]);
        }
    for (int i = 0; i < nx; i++) _mm_storeu_ps(out[i], vec_sum4(acc[i][0], acc[i][1], acc[i][2], acc[i][3]));
}
/* Type and number of rows become constants, so that the inner loop has no branches. */
INLINE void fused_outputs(const kern_linear *p, kern_wtype type, int nx) {
    kern_mat m = p->w;
    m.type = type;
    const float *x[FUSED_ROWS];
    for (int i = 0; i < nx; i++) x[i] = linear_row(p, i);
    for (int o = p->out_begin; o < p->out_end; o += TILE_W) {
        int nw = p->out_end - o < TILE_W ? p->out_end - o : TILE_W;
        real out[FUSED_ROWS][TILE_W];
        fused_tile(&m, nx, x, o, nw, out);
        for (int i = 0; i < nx; i++)
            for (int j = 0; j < nw; j++) linear_store(p, i, o + j, out[i][j]);
    }
}
static void fused_linear(const kern_linear *p) {
    switch (p->w.type * 2 + p->rows - 1) {
    case KERN_W_BF16 * 2: fused_outputs(p, KERN_W_BF16, 1); break;
    case KERN_W_BF16 * 2 + 1: fused_outputs(p, KERN_W_BF16, 2); break;
    case KERN_W_F32 * 2: fused_outputs(p, KERN_W_F32, 1); break;
    case KERN_W_F32 * 2 + 1: fused_outputs(p, KERN_W_F32, 2); break;
    case KERN_W_FP8 * 2: fused_outputs(p, KERN_W_FP8, 1); break;
    case KERN_W_FP8 * 2 + 1: fused_outputs(p, KERN_W_FP8, 2); break;
    case KERN_W_FP4 * 2: fused_outputs(p, KERN_W_FP4, 1); break;
    case KERN_W_FP4 * 2 + 1: fused_outputs(p, KERN_W_FP4, 2); break;
    default: break;
    }
}
#endif

#ifdef KERN_AMX
#include "kernels/cpu/ops/linear_amx.h"
#endif

static size_t linear_work(const kern_linear *p) {
    size_t n = (size_t)TILE_W * (size_t)p->w.in * sizeof(float);
#ifdef KERN_AMX
    n = amx_work(p->w.in) > n ? amx_work(p->w.in) : n;
#endif
    return n;
}

static void op_linear(const kern_linear *p) {
#ifdef KERN_AMX
    if (amx_fits(p)) {
        amx_linear(p);
        return;
    }
#endif
#ifdef VEC
    if (p->rows <= FUSED_ROWS) {
        if (p->rows > 0) fused_linear(p);
        return;
    }
#endif
    float *buf = p->work;
    int in = p->w.in;
    for (int o = p->out_begin; o < p->out_end; o += TILE_W) {
        int nw = p->out_end - o < TILE_W ? p->out_end - o : TILE_W;
        const float *w[TILE_W];
        for (int j = 0; j < TILE_W; j++) w[j] = j < nw ? widen_row(&p->w, o + j, buf + (size_t)j * (size_t)in) : w[0];
        for (int r = 0; r < p->rows; r += TILE_X) {
            int nx = p->rows - r < TILE_X ? p->rows - r : TILE_X;
            const float *x[TILE_X];
            for (int i = 0; i < nx; i++) x[i] = linear_row(p, r + i);
            real out[TILE_X][TILE_W];
            dot_tile(nx, x, w, in, out);
            for (int i = 0; i < nx; i++)
                for (int j = 0; j < nw; j++) linear_store(p, r + i, o + j, out[i][j]);
        }
    }
}

#endif
