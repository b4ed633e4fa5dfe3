/* norm.h — RMS norms, rotation, activation quantisation. */
#ifndef KERN_NORM_H
#define KERN_NORM_H

INLINE void rmsnorm_scale(const float *x, const uint16_t *weight, real f, float *y, int dim, bool round) {
    for (int i = 0; i < dim; i++) y[i] = round_to((real)x[i] * f * (real)bf16_float(weight[i]), round);
}
static void rmsnorm_row(const float *x, const uint16_t *weight, float *y, int dim, double eps, bool round) {
    real f = (real)1 / real_sqrt(square_sum(x, dim) / (real)dim + (real)eps);
    BY_ROUND(round, rmsnorm_scale, x, weight, f, y, dim);
}
static void op_rmsnorm(const kern_rmsnorm *p) {
    for (int r = 0; r < p->rows; r++)
        rmsnorm_row(p->x + r * p->x_stride, p->weight, p->y + r * p->y_stride, p->dim, p->eps, p->round);
}

/* Interleaved pairs; the last 64 of dim. */
INLINE void rope_pairs(float *v, const float *cs, const float *sn, real sign, bool round) {
    for (int i = 0; i < KERN_ROPE_DIM / 2; i++) {
        real a = v[2 * i], b = v[2 * i + 1], c = cs[i], s = sign * (real)sn[i];
        v[2 * i] = round_to(a * c - b * s, round);
        v[2 * i + 1] = round_to(a * s + b * c, round);
    }
}
static void rope_vector(float *x, int dim, const float *cs, const float *sn, real sign, bool round) {
    BY_ROUND(round, rope_pairs, x + dim - KERN_ROPE_DIM, cs, sn, sign);
}
static void op_rope(const kern_rope *p) {
    for (int i = 0; i < p->count; i++)
        rope_vector(p->x + (size_t)i * (size_t)p->dim, p->dim, p->cos, p->sin, p->inverse ? (real)-1 : (real)1, p->round);
}

/* Scaling of a query head.  With rounding every step is a bf16 operation: squares, mean, sum with eps, rsqrt, product. */
INLINE void qhead_scale(float *q, double eps, bool round) {
    if (!round) {
        real f = (real)1 / real_sqrt(square_sum(q, KERN_HEAD_DIM) / (real)KERN_HEAD_DIM + (real)eps);
        for (int i = 0; i < KERN_HEAD_DIM; i++) q[i] = (float)((real)q[i] * f);
        return;
    }
    real lane[LANES] = {0};
    for (int i = 0; i < KERN_HEAD_DIM; i += LANES)
        for (int l = 0; l < LANES; l++) lane[l] += (real)bf16_round(q[i + l] * q[i + l]);
    float mean = round_to(lanes_sum(lane) / (real)KERN_HEAD_DIM, true);
    float sum = round_to((real)mean + (real)eps, true);
    float f = round_to((real)1 / real_sqrt((real)sum), true);
    for (int i = 0; i < KERN_HEAD_DIM; i++) q[i] = bf16_round(q[i] * f); /* two bf16: the float product is exact */
}
static void op_qhead(const kern_qhead *p) {
    for (int h = 0; h < p->heads; h++) {
        float *q = p->q + (size_t)h * KERN_HEAD_DIM;
        qhead_scale(q, p->eps, p->round);
        rope_vector(q, KERN_HEAD_DIM, p->cos, p->sin, (real)1, p->round);
    }
}

/* n values that share one scale, to the values of their codes. */
INLINE void quant_block(const float *x, float *y, int n) {
    int e = fp8_exp(abs_max(x, n));
    float s = pow2f(e), inv = pow2f(-e);
    for (int i = 0; i < n; i++) y[i] = e4m3_round(x[i] * inv) * s;
}
static void op_quant(const kern_quant *p) {
    for (int r = 0; r < p->rows; r++)
        for (int k = 0; k < p->dim; k += 128) quant_block(p->x + r * p->x_stride + k, p->y + r * p->y_stride + k, 128);
}

#endif
