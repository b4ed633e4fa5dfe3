/* moe.h — router, the expert's activation, and sums of parts. */
#ifndef KERN_MOE_H
#define KERN_MOE_H

static size_t route_work(const kern_route *p) { return (size_t)p->experts * sizeof(real); }

INLINE real sqrt_softplus(real r) { return real_sqrt(r > (real)20 ? r : real_log1p(real_exp(r))); }

INLINE bool listed(const int32_t *id, int n, int e) {
    for (int i = 0; i < n; i++)
        if (id[i] == e) return true;
    return false;
}
/* Largest s + bias first; returns the best that is not chosen, or −1. */
static int route_best(const kern_route *p, const real *s, int chosen) {
    int best = -1;
    for (int e = 0; e < p->experts; e++) {
        if (listed(p->id, chosen, e)) continue;
        if (best < 0 || s[e] + (real)p->bias[e] > s[best] + (real)p->bias[best]) best = e;
    }
    return best;
}

static void op_route(const kern_route *p) {
    const real *logit = p->logit;
    real *s = p->work, *weight = p->weight, sum = 0;
    int last = 0, k = p->k;
    for (int e = 0; e < p->experts; e++) s[e] = sqrt_softplus(logit[e]);
    for (int i = 0; i < k; i++) p->id[i] = last = p->bias ? route_best(p, s, i) : (int32_t)p->fixed[i];
    if (p->bias && p->margin) {
        int other = k < p->experts ? route_best(p, s, k) : -1;
        *p->margin = other < 0 ? INFINITY : (float)((s[last] + (real)p->bias[last]) - (s[other] + (real)p->bias[other]));
    }
    for (int i = 1; i < k; i++) /* ascending */
        for (int j = i; j > 0 && p->id[j - 1] > p->id[j]; j--) {
            int32_t t = p->id[j];
            p->id[j] = p->id[j - 1], p->id[j - 1] = t;
        }
    for (int i = 0; i < k; i++) sum += s[p->id[i]];
    for (int i = 0; i < k; i++) {
        weight[i] = s[p->id[i]] / sum * (real)p->scale;
        if (p->weight_f32) p->weight_f32[i] = (float)weight[i];
    }
}

INLINE void swiglu_row(const float *gate, const float *up, float *a, int dim, real lim, real w, bool round) {
    for (int i = 0; i < dim; i++) {
        real g = gate[i], u = up[i];
        g = g > lim ? lim : g;
        u = u > lim ? lim : u;
        u = u < -lim ? -lim : u;
        a[i] = round_to(g * sigmoid(g) * u * w, round);
    }
}
static void op_swiglu(const kern_swiglu *p) {
    BY_ROUND(p->round, swiglu_row, p->g, p->u, p->a, p->dim, (real)p->limit, p->weight ? *(const real *)p->weight : (real)1);
    if (p->round && !p->unquantised)
        for (int i = 0; i < p->dim; i += 128) quant_block(p->a + i, p->a + i, 128);
}

/* In strips of LANES, so that the strip's sums stay in registers. */
INLINE void sum_parts(const float *const *part, int parts, float *y, int dim, bool round) {
    for (int i = 0; i < dim; i += LANES) {
        real v[LANES] = {0};
        for (int j = 0; j < parts; j++)
            for (int l = 0; l < LANES; l++) v[l] += (real)part[j][i + l];
        for (int l = 0; l < LANES; l++) y[i + l] = round_to(v[l], round);
    }
}
static void op_sum(const kern_sum *p) { BY_ROUND(p->round, sum_parts, p->part, p->parts, p->y, p->dim); }

#endif
