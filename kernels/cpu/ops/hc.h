/* hc.h — hyper-connections: reading one input from the four residual streams and writing the result back. */
#ifndef KERN_HC_H
#define KERN_HC_H

/* Rows are sources, columns destinations: softmax over a row, then columns and rows in turn, ending on columns. */
static void sinkhorn(real c[KERN_HC][KERN_HC], int iters, real eps) {
    for (int j = 0; j < KERN_HC; j++) {
        real max = c[j][0], sum = 0;
        for (int k = 1; k < KERN_HC; k++) max = c[j][k] > max ? c[j][k] : max;
        for (int k = 0; k < KERN_HC; k++) sum += c[j][k] = real_exp(c[j][k] - max);
        for (int k = 0; k < KERN_HC; k++) c[j][k] = c[j][k] / sum + eps;
    }
    for (int it = 0; it < iters; it++) {
        if (it) for (int j = 0; j < KERN_HC; j++) {
            real sum = eps + (((c[j][0] + c[j][1]) + c[j][2]) + c[j][3]);
            for (int k = 0; k < KERN_HC; k++) c[j][k] /= sum;
        }
        for (int k = 0; k < KERN_HC; k++) {
            real sum = eps + (((c[0][k] + c[1][k]) + c[2][k]) + c[3][k]);
            for (int j = 0; j < KERN_HC; j++) c[j][k] /= sum;
        }
    }
}

/* mix already holds fn·X; f is the RMS factor over all streams. */
static void hc_split(const kern_hc_pre *p, const real *mix, real f, real *split) {
    for (int j = 0; j < KERN_HC; j++)
        split[j] = sigmoid(mix[j] * f * (real)p->scale[0] + (real)p->base[j]) + (real)p->hc_eps;
    if (p->head) return;
    for (int j = KERN_HC; j < 2 * KERN_HC; j++)
        split[j] = (real)2 * sigmoid(mix[j] * f * (real)p->scale[1] + (real)p->base[j]);
    real c[KERN_HC][KERN_HC];
    for (int i = 0; i < KERN_HC * KERN_HC; i++)
        c[i / KERN_HC][i % KERN_HC] = mix[8 + i] * f * (real)p->scale[2] + (real)p->base[8 + i];
    sinkhorn(c, p->sinkhorn_iters, (real)p->hc_eps);
    for (int i = 0; i < KERN_HC * KERN_HC; i++) split[8 + i] = c[i / KERN_HC][i % KERN_HC];
}

/* Sums start at +0: four times −0 gives +0. */
INLINE void hc_mix(const float *restrict h, const real *split, float *restrict x, int dim, bool round) {
    const float *h1 = h + dim, *h2 = h1 + dim, *h3 = h2 + dim;
    const real zero = 0, a = split[0], b = split[1], c = split[2], d = split[3];
    for (int i = 0; i < dim; i++)
        x[i] = round_to((((zero + a * (real)h[i]) + b * (real)h1[i]) + c * (real)h2[i]) + d * (real)h3[i], round);
}
static void op_hc_pre(const kern_hc_pre *p) {
    int n = p->head ? KERN_HC : KERN_HC_MIX, dim = p->dim;
    for (int r = 0; r < p->rows; r++) {
        const float *h = p->h + r * p->h_stride;
        real f = (real)1 / real_sqrt(square_sum(h, KERN_HC * dim) / (real)(KERN_HC * dim) + (real)p->rms_eps);
        real *split = (real *)p->split + (size_t)r * (size_t)n;
        hc_split(p, (const real *)p->mix + (size_t)r * (size_t)n, f, split);
        if (p->split_f32)
            for (int i = 0; i < n; i++) p->split_f32[(size_t)r * (size_t)n + (size_t)i] = (float)split[i];
        BY_ROUND(p->round, hc_mix, h, split, p->x + r * p->x_stride, dim);
    }
}

INLINE void hc_spread(float *restrict h0, const float *restrict y, const real *split, int dim, bool round) {
    float *restrict h1 = h0 + dim, *restrict h2 = h1 + dim, *restrict h3 = h2 + dim;
    const real zero = 0;
    real post[KERN_HC], c[KERN_HC * KERN_HC];
    memcpy(post, split + KERN_HC, sizeof post);
    memcpy(c, split + 2 * KERN_HC, sizeof c);
    for (int i = 0; i < dim; i++) {
        real s0 = h0[i], s1 = h1[i], s2 = h2[i], s3 = h3[i], v = y[i];
        h0[i] = round_to(post[0] * v + ((((zero + c[0] * s0) + c[4] * s1) + c[8] * s2) + c[12] * s3), round);
        h1[i] = round_to(post[1] * v + ((((zero + c[1] * s0) + c[5] * s1) + c[9] * s2) + c[13] * s3), round);
        h2[i] = round_to(post[2] * v + ((((zero + c[2] * s0) + c[6] * s1) + c[10] * s2) + c[14] * s3), round);
        h3[i] = round_to(post[3] * v + ((((zero + c[3] * s0) + c[7] * s1) + c[11] * s2) + c[15] * s3), round);
    }
}
static void op_hc_post(const kern_hc_post *p) {
    for (int r = 0; r < p->rows; r++)
        BY_ROUND(p->round, hc_spread, p->h + r * p->h_stride, p->y + r * p->y_stride, (const real *)p->split + (size_t)r * KERN_HC_MIX, p->dim);
}

#endif
