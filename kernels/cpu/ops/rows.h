/* rows.h — making the rows and keys that the cache holds. */
#ifndef KERN_ROWS_H
#define KERN_ROWS_H

/* 512 finished values to a row. */
static void pack_row(const float *x, uint8_t *row) {
    for (int b = 0; b < KERN_NOPE_DIM / 64; b++) {
        const float *v = x + 64 * b;
        int e = fp8_exp(abs_max(v, 64));
        float inv = pow2f(-e);
        for (int i = 0; i < 64; i++) row[64 * b + i] = e4m3_pack(e4m3_round(v[i] * inv));
        row[576 + b] = (uint8_t)(e + 127);
    }
    uint16_t rope[KERN_ROPE_DIM];
    for (int i = 0; i < KERN_ROPE_DIM; i++) rope[i] = (uint16_t)(bits_of(x[KERN_NOPE_DIM + i]) >> 16);
    memcpy(row + KERN_NOPE_DIM, rope, sizeof rope);
    row[583] = 0;
}

static void op_kv_row(const kern_kv_row *p) {
    rmsnorm_row(p->x, p->weight, p->x, KERN_HEAD_DIM, p->eps, p->round);
    rope_vector(p->x, KERN_HEAD_DIM, p->cos, p->sin, (real)1, p->round);
    if (p->round) pack_row(p->x, p->row);
    else memcpy(p->row, p->x, KERN_ROW_F32_BYTES);
}

/* Natural order, 128^−1/2 at the end, one rounding. */
static void hadamard(float *x) {
    real v[KERN_INDEX_DIM];
    for (int i = 0; i < KERN_INDEX_DIM; i++) v[i] = x[i];
    for (int h = 1; h < KERN_INDEX_DIM; h *= 2)
        for (int i = 0; i < KERN_INDEX_DIM; i += 2 * h)
            for (int j = i; j < i + h; j++) {
                real a = v[j], b = v[j + h];
                v[j] = a + b;
                v[j + h] = a - b;
            }
    const float c = 0x1.6a09e6p-4f; /* 128^−1/2 */
    for (int i = 0; i < KERN_INDEX_DIM; i++) x[i] = bf16_round((float)(v[i] * (real)c));
}

/* 32 values that share one scale, to the values of their codes; returns the exponent. */
INLINE int fp4_block(float *x) {
    int e = fp4_exp(abs_max(x, 32));
    float s = pow2f(e), inv = pow2f(-e);
    for (int i = 0; i < 32; i++) x[i] = e2m1_round(x[i] * inv) * s;
    return e;
}
static void pack_key(const float *x, uint8_t *key) {
    for (int b = 0; b < KERN_INDEX_DIM / 32; b++) {
        const float *v = x + 32 * b;
        int e = fp4_exp(abs_max(v, 32));
        float inv = pow2f(-e);
        for (int i = 0; i < 16; i++) {
            uint8_t lo = e2m1_pack(e2m1_round(v[2 * i] * inv)), hi = e2m1_pack(e2m1_round(v[2 * i + 1] * inv));
            key[16 * b + i] = (uint8_t)(lo | hi << 4);
        }
        key[64 + b] = (uint8_t)(e + 127);
    }
}

static void op_entry(const kern_entry *p) {
    const real *pooled = p->pooled;
    float x[KERN_HEAD_DIM] = {0};
    for (int i = 0; i < p->dim; i++) x[i] = round_to(pooled[i], p->round);
    rmsnorm_row(x, p->weight, x, p->dim, p->eps, p->round);
    rope_vector(x, p->dim, p->cos, p->sin, (real)1, p->round);
    if (!p->round) memcpy(p->row, x, (size_t)p->dim * sizeof(float));
    else if (p->dim == KERN_HEAD_DIM) pack_row(x, p->row);
    else {
        hadamard(x);
        pack_key(x, p->row);
    }
}

#endif
