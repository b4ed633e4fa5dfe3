/* linear.h — y = W x for any stored weight.
 *
 * Schedule: four weight rows at a time are widened into `work` (they stay in the first or second cache) and
 * multiplied with all rows of x, TILE_X at a time.  So widening is paid once per call and weight row, whatever the
 * number of rows.  Bound: weight bytes when there are few rows, multiply-adds when there are many. */
#ifndef KERN_LINEAR_H
#define KERN_LINEAR_H

static size_t linear_work(const kern_linear *p) { return (size_t)TILE_W * (size_t)p->w.in * sizeof(float); }

INLINE void linear_store(const kern_linear *p, int r, int o, real v) {
    int64_t at = r * p->y_stride + o;
    switch (p->kind) {
    case KERN_OUT_REAL: ((real *)p->y)[at] = v; break;
    case KERN_OUT_F32: ((float *)p->y)[at] = (float)v; break;
    case KERN_OUT_BF16: ((float *)p->y)[at] = bf16_round((float)v); break;
    }
}

static void op_linear(const kern_linear *p) {
    float *buf = p->work;
    int in = p->w.in;
    for (int o = p->out_begin; o < p->out_end; o += TILE_W) {
        int nw = p->out_end - o < TILE_W ? p->out_end - o : TILE_W;
        const float *w[TILE_W];
        for (int j = 0; j < TILE_W; j++) w[j] = j < nw ? widen_row(&p->w, o + j, buf + (size_t)j * (size_t)in) : w[0];
        for (int r = 0; r < p->rows; r += TILE_X) {
            int nx = p->rows - r < TILE_X ? p->rows - r : TILE_X;
            const float *x[TILE_X];
            for (int i = 0; i < nx; i++) x[i] = p->x + (p->x_row ? p->x_row[r + i] : r + i) * p->x_stride;
            real out[TILE_X][TILE_W];
            dot_tile(nx, x, w, in, out);
            for (int i = 0; i < nx; i++)
                for (int j = 0; j < nw; j++) linear_store(p, r + i, o + j, out[i][j]);
        }
    }
}

#endif
