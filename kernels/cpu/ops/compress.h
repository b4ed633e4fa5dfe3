/* compress.h — pooling of compressed entries: softmax over slots per channel, as a fold over tokens.
 *
 * An accumulator is the triple (m, Σ e^{s−m}, Σ e^{s−m}·k).  Folding (s, k) in: the larger of m and s becomes m, and
 * whichever side is smaller is scaled by e^{−|m−s|}; one exponential per channel and token.  The order is the
 * order of tokens, always, so a fold that stopped goes on exactly where it was. */
#ifndef KERN_COMPRESS_H
#define KERN_COMPRESS_H

static void op_fold_reset(void *acc, int dim) {
    real *m = acc;
    for (int c = 0; c < dim; c++) m[c] = -(real)INFINITY;
    memset(m + dim, 0, 2 * (size_t)dim * sizeof(real));
}

INLINE void fold_row(real *acc, int dim, const float *restrict k, const float *restrict s, int c0, int c1) {
    real *restrict m = acc, *restrict sum = acc + dim, *restrict weighted = acc + 2 * dim;
    for (int c = c0; c < c1; c++) {
        real sv = s[c], mv = m[c], diff = sv - mv;
        bool up = diff > 0;
        real e = real_exp(up ? -diff : diff);
        real old = up ? e : (real)1, new = up ? (real)1 : e;
        m[c] = up ? sv : mv;
        sum[c] = sum[c] * old + new;
        weighted[c] = weighted[c] * old + new * (real)k[c];
    }
}

static void op_fold(const kern_fold *p) {
    int dim = p->dim, c0 = p->c_begin, c1 = p->c_end, wide = p->lanes * dim;
    real *own = p->own, *next = p->next, *pooled = p->pooled;
    for (int r = 0; r < p->rows; r++) {
        const float *k = p->k + r * p->stride;
        float *s = p->s + r * p->stride;
        int slot = (int)((p->t0 + r) % p->m);
        const float *ape = p->ape + (size_t)slot * (size_t)wide;
        for (int lane = 0; lane < p->lanes; lane++)
            for (int c = lane * dim + c0; c < lane * dim + c1; c++) s[c] += ape[c];
        if (p->lanes == 2) fold_row(next, dim, k, s, c0, c1);
        int own_lane = (p->lanes - 1) * dim;
        fold_row(own, dim, k + own_lane, s + own_lane, c0, c1);
        if (slot != p->m - 1) continue;
        for (int c = c0; c < c1; c++) pooled[c] = own[2 * dim + c] / own[dim + c];
        pooled += dim;
        for (int c = c0; c < c1; c++) { /* own ← next, next ← empty; with one lane own ← empty */
            own[c] = p->lanes == 2 ? next[c] : -(real)INFINITY;
            own[dim + c] = p->lanes == 2 ? next[dim + c] : (real)0;
            own[2 * dim + c] = p->lanes == 2 ? next[2 * dim + c] : (real)0;
            if (p->lanes == 2) next[c] = -(real)INFINITY, next[dim + c] = 0, next[2 * dim + c] = 0;
        }
    }
}

#endif
