/* forward_ffn.c — the mixture of experts.
 *
 * Slots: every (row, chosen expert) pair is a slot, ordered by expert, so that an expert's rows are consecutive; the
 * shared expert's rows follow behind all of them.  The sum over a row's experts runs in ascending id, which is the
 * order of route_id, so the grouping has no influence on values. */
#include <math.h>
#include <string.h>

#include "engine/forward_int.h"

static void route_rows(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const fwd_layer *l = arg;
    int E = f->c->n_routed_experts, k = f->c->num_experts_per_tok;
    for (int64_t r = begin; r < end; r++)
        f->k->route(&(kern_route){
            .logit = real_at(f, f->router, r * E), .bias = l->w->gate_bias,
            .fixed = l->w->tid2eid ? l->w->tid2eid + (int64_t)f->row[r].id * k : NULL, .experts = E, .k = k, .scale = f->c->routed_scaling_factor,
            .id = f->route_id + r * k, .weight = real_at(f, f->route_w, r * k), .weight_f32 = f->tracing ? f->route_w_f32 + r * k : NULL,
            .margin = f->tracing ? f->route_margin + r : NULL, .work = scratch});
}

/* Counting sort of (row, choice) pairs by expert. */
static void group_rows(fwd *f) {
    int E = f->c->n_routed_experts, k = f->c->num_experts_per_tok;
    int pairs = f->rows * k;
    memset(f->expert_at, 0, (size_t)(E + 1) * sizeof *f->expert_at);
    for (int i = 0; i < pairs; i++) f->expert_at[f->route_id[i] + 1]++;
    for (int e = 0; e < E; e++) f->expert_at[e + 1] += f->expert_at[e];
    for (int i = 0; i < pairs; i++) {
        int32_t at = f->expert_at[f->route_id[i]]++;
        f->expert_row[at] = i / k;
        f->slot_route[at] = i;
        f->slot[i] = at;
    }
    for (int e = E; e > 0; e--) f->expert_at[e] = f->expert_at[e - 1]; /* undo the advance */
    f->expert_at[0] = 0;
}

static void up_linears(fwd *f, const model_expert *x, const int32_t *rows, int n, int slot0) {
    int I = f->c->moe_intermediate_size, D = f->c->hidden_size;
    kern_linear p = {.x_stride = D, .x_row = rows, .rows = n, .out_end = I, .y_stride = I, .kind = f->kind};
    p.w = fwd_mat(&x->w1), p.x = fwd_input(f, &x->w1, f->x, f->xq), p.y = f->eg + (size_t)slot0 * (size_t)I;
    phase_linear(f, &p);
    p.w = fwd_mat(&x->w3), p.x = fwd_input(f, &x->w3, f->x, f->xq), p.y = f->eu + (size_t)slot0 * (size_t)I;
    phase_linear(f, &p);
}
static void down_linear(fwd *f, const model_expert *x, int n, int slot0) {
    int I = f->c->moe_intermediate_size, D = f->c->hidden_size;
    phase_linear(f, &(kern_linear){.w = fwd_mat(&x->w2), .x = f->eg + (size_t)slot0 * (size_t)I, .x_stride = I, .rows = n, .out_end = D,
                                   .y = f->ey + (size_t)slot0 * (size_t)D, .y_stride = D, .kind = f->kind});
}

static void swiglu_slots(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const fwd_layer *l = arg;
    int I = f->c->moe_intermediate_size, routed = f->rows * f->c->num_experts_per_tok;
    for (int64_t s = begin; s < end; s++) {
        bool shared = s >= routed;
        const model_expert *x = shared ? &l->w->shared : &l->w->expert[f->route_id[f->slot_route[s]]];
        f->k->swiglu(&(kern_swiglu){.g = f->eg + s * I, .u = f->eu + s * I, .a = f->eg + s * I,
                                    .weight = shared ? NULL : real_at(f, f->route_w, f->slot_route[s]), .dim = I,
                                    .limit = shared && !f->shared_clamp ? (double)INFINITY : f->c->swiglu_limit, .round = f->round,
                                    .unquantised = x->w2.bf16});
    }
}

static void sum_rows(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)arg;
    int D = f->c->hidden_size, k = f->c->num_experts_per_tok, routed = f->rows * k;
    const float **part = scratch;
    for (int64_t r = begin; r < end; r++) {
        for (int i = 0; i < k; i++) part[i] = f->ey + (int64_t)f->slot[r * k + i] * D;
        part[k] = f->ey + (routed + r) * D;
        f->k->sum(&(kern_sum){.part = part, .parts = k + 1, .y = f->y + r * D, .dim = D, .round = f->round});
    }
}

void fwd_ffn(fwd *f, const fwd_layer *l) {
    int D = f->c->hidden_size, I = f->c->moe_intermediate_size, E = f->c->n_routed_experts, k = f->c->num_experts_per_tok;
    int R = f->rows, routed = R * k;
    phase_linear(f, &(kern_linear){.w = fwd_bf16(l->w->gate, E, D), .x = f->x, .x_stride = D, .rows = R, .out_end = E, .y = f->router,
                                   .y_stride = E, .kind = KERN_OUT_REAL});
    phase_run(f);
    phase_add(f, route_rows, l, R, 0, (double)R * E * 40);
    phase_run(f);
    trace_i32(f, FT_ROUTE_ID, l->number, f->route_id, k, k);
    trace_f32(f, FT_ROUTE_W, l->number, f->route_w_f32, k, k);
    if (l->w->gate_bias) trace_f32(f, FT_FFN_MARGIN, l->number, f->route_margin, 1, 1);

    group_rows(f);
    for (int e = 0; e < E; e++)
        up_linears(f, &l->w->expert[e], f->expert_row + f->expert_at[e], f->expert_at[e + 1] - f->expert_at[e], f->expert_at[e]);
    up_linears(f, &l->w->shared, NULL, R, routed);
    phase_run(f);
    phase_add(f, swiglu_slots, l, routed + R, 0, (double)(routed + R) * I * 20);
    phase_run(f);
    for (int e = 0; e < E; e++) down_linear(f, &l->w->expert[e], f->expert_at[e + 1] - f->expert_at[e], f->expert_at[e]);
    down_linear(f, &l->w->shared, R, routed);
    phase_run(f);
    phase_add(f, sum_rows, NULL, R, 0, (double)R * D * (k + 1));
    phase_run(f);
}
