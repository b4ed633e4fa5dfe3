/* forward_head.c — reading from and writing to the residual streams, a whole block, and the output head. */
#include <string.h>

#include "engine/forward_int.h"

typedef struct hc_site {
    const model_hc *hc;
    const uint16_t *norm;
} hc_site;

void fwd_angles(fwd *f) {
    for (int r = 0; r < f->rows; r++)
        for (int t = 0; t < 2; t++) dm_rope_angles(f->freq[t], f->row[r].pos, f->cos[t][r], f->sin[t][r]);
}

static void hc_pre_rows(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const hc_site *s = arg;
    int D = f->c->hidden_size, n = (int)(end - begin);
    f->k->hc_pre(&(kern_hc_pre){
        .h = f->h + begin * KERN_HC * D, .h_stride = KERN_HC * D, .mix = real_at(f, f->mix, begin * KERN_HC_MIX),
        .base = s->hc->base, .scale = s->hc->scale, .split = real_at(f, f->split, begin * KERN_HC_MIX),
        .split_f32 = f->tracing ? f->split_f32 + begin * KERN_HC_MIX : NULL, .x = f->x + begin * D, .x_stride = D, .rows = n, .dim = D,
        .sinkhorn_iters = f->c->hc_sinkhorn_iters, .rms_eps = f->c->rms_norm_eps, .hc_eps = f->c->hc_eps, .round = f->round});
    f->k->rmsnorm(&(kern_rmsnorm){.x = f->x + begin * D, .x_stride = D, .weight = s->norm, .y = f->x + begin * D, .y_stride = D,
                                  .rows = n, .dim = D, .eps = f->c->rms_norm_eps, .round = f->round});
    if (f->round && !trace_forces(f))
        f->k->quant(&(kern_quant){.x = f->x + begin * D, .x_stride = D, .y = f->xq + begin * D, .y_stride = D, .rows = n, .dim = D});
}

void fwd_hc_pre(fwd *f, const fwd_layer *l, bool attn) {
    int D = f->c->hidden_size;
    hc_site s = attn ? (hc_site){&l->w->hc_attn, l->w->attn_norm} : (hc_site){&l->w->hc_ffn, l->w->ffn_norm};
    phase_linear(f, &(kern_linear){.w = fwd_f32(s.hc->fn, KERN_HC_MIX, KERN_HC * D), .x = f->h, .x_stride = KERN_HC * D, .rows = f->rows,
                                   .out_end = KERN_HC_MIX, .y = f->mix, .y_stride = KERN_HC_MIX, .kind = KERN_OUT_REAL});
    phase_run(f);
    phase_add(f, hc_pre_rows, &s, f->rows, 0, (double)f->rows * D * 40);
    phase_run(f);
    trace_f32(f, attn ? FT_HC_ATTN : FT_HC_FFN, l->number, f->split_f32, KERN_HC_MIX, KERN_HC_MIX);
    forward_tag tag = attn ? FT_ATTN_X : FT_FFN_X;
    if (trace_forces(f)) {
        trace_force(f, tag, l->number, f->x, D);
        if (f->round)
            f->k->quant(&(kern_quant){.x = f->x, .x_stride = D, .y = f->xq, .y_stride = D, .rows = f->rows, .dim = D});
    }
    trace_f32(f, tag, l->number, f->x, D, D);
}

void fwd_hc_post_rows(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)arg, (void)scratch;
    int D = f->c->hidden_size;
    f->k->hc_post(&(kern_hc_post){.h = f->h + begin * KERN_HC * D, .h_stride = KERN_HC * D, .y = f->y + begin * D, .y_stride = D,
                                  .split = real_at(f, f->split, begin * KERN_HC_MIX), .rows = (int)(end - begin), .dim = D, .round = f->round});
}

void fwd_block(fwd *f, const fwd_layer *l) {
    int D = f->c->hidden_size;
    double cost = (double)f->rows * D * 30;
    trace_f32(f, FT_HIN, l->number, f->h, KERN_HC * D, KERN_HC * D);
    fwd_hc_pre(f, l, true);
    fwd_attn(f, l);
    trace_f32(f, FT_ATTN_Y, l->number, f->y, D, D);
    phase_add(f, fwd_hc_post_rows, NULL, f->rows, 0, cost);
    phase_run(f);
    fwd_hc_pre(f, l, false);
    fwd_ffn(f, l);
    trace_f32(f, FT_FFN_Y, l->number, f->y, D, D);
    phase_add(f, fwd_hc_post_rows, NULL, f->rows, 0, cost);
    phase_run(f);
    trace_f32(f, FT_H, l->number, f->h, KERN_HC * D, KERN_HC * D);
}

void fwd_head(fwd *f, const model_hc *hc, const uint16_t *norm, const int32_t *rows, int n) {
    int D = f->c->hidden_size, V = f->c->vocab_size;
    for (int i = 0; i < n; i++)
        memcpy(f->head_h + (size_t)i * KERN_HC * (size_t)D, f->h + (size_t)rows[i] * KERN_HC * (size_t)D, KERN_HC * (size_t)D * sizeof(float));
    phase_linear(f, &(kern_linear){.w = fwd_f32(hc->fn, KERN_HC, KERN_HC * D), .x = f->head_h, .x_stride = KERN_HC * D, .rows = n,
                                   .out_end = KERN_HC, .y = f->mix, .y_stride = KERN_HC, .kind = KERN_OUT_REAL});
    phase_run(f);
    f->k->hc_pre(&(kern_hc_pre){.h = f->head_h, .h_stride = KERN_HC * D, .mix = f->mix, .base = hc->base, .scale = hc->scale,
                                .split = f->split, .x = f->head_x, .x_stride = D, .rows = n, .dim = D, .rms_eps = f->c->rms_norm_eps,
                                .hc_eps = f->c->hc_eps, .head = true, .round = f->round});
    f->k->rmsnorm(&(kern_rmsnorm){.x = f->head_x, .x_stride = D, .weight = norm, .y = f->head_x, .y_stride = D, .rows = n, .dim = D,
                                  .eps = f->c->rms_norm_eps, .round = f->round});
    phase_linear(f, &(kern_linear){.w = fwd_bf16(f->w->head, V, D), .x = f->head_x, .x_stride = D, .rows = n, .out_end = V,
                                   .y = f->logits, .y_stride = V, .kind = KERN_OUT_F32});
    phase_run(f);
}
