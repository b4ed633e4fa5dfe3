/* forward_mtp.c — the MTP layer: streams of token t and the id of token t+1 at position t, through one block of its
 * own, its own mixing head and norm, and the shared output head.  It has its own window rows. */
#include <string.h>

#include "engine/forward_int.h"

/* h'[j] = bf16(e_proj(norm(embed)) + h_proj(norm(h[j]))), both terms rounded.  g: [R·4][D], e: [R][D] scratch. */
void fwd_mtp_mix(fwd *f, const float *streams, float *g, float *e) {
    const model_mtp *m = f->w->mtp;
    int D = f->c->hidden_size, R = f->rows, S = R * KERN_HC;
    for (int r = 0; r < R; r++) {
        const uint16_t *w = f->w->embed + (size_t)f->row[r].id * (size_t)D;
        for (int i = 0; i < D; i++) {
            uint32_t u = (uint32_t)w[i] << 16;
            memcpy(&f->x[(size_t)r * (size_t)D + (size_t)i], &u, sizeof u);
        }
    }
    kern_rmsnorm n = {.x = f->x, .x_stride = D, .weight = m->enorm, .y = f->x, .y_stride = D, .rows = R, .dim = D,
                      .eps = f->c->rms_norm_eps, .round = f->round};
    f->k->rmsnorm(&n);
    n.x = streams, n.weight = m->hnorm, n.y = g, n.rows = S;
    f->k->rmsnorm(&n);
    if (f->round && !m->e_proj.bf16) f->k->quant(&(kern_quant){.x = f->x, .x_stride = D, .y = f->x, .y_stride = D, .rows = R, .dim = D});
    if (f->round && !m->h_proj.bf16) f->k->quant(&(kern_quant){.x = g, .x_stride = D, .y = g, .y_stride = D, .rows = S, .dim = D});
    kern_linear p = {.w = fwd_mat(&m->e_proj), .x = f->x, .x_stride = D, .rows = R, .out_end = D, .y = e, .y_stride = D, .kind = f->kind};
    phase_linear(f, &p);
    p.w = fwd_mat(&m->h_proj), p.x = g, p.rows = S, p.y = f->h;
    phase_linear(f, &p);
    phase_run(f);
    for (int i = 0; i < S; i++) {
        float *h = f->h + (size_t)i * (size_t)D;
        const float *part[2] = {e + (size_t)(i / KERN_HC) * (size_t)D, h};
        f->k->sum(&(kern_sum){.part = part, .parts = 2, .y = h, .dim = D, .round = f->round});
    }
}

static void mtp_rows(fwd *f, dm_fseq *s, const float *streams, const int32_t *next_ids, int n, float *logits, float *g, float *e) {
    const fwd_layer *l = &f->layer[f->layers];
    int D = f->c->hidden_size, V = f->base.vocab;
    f->rows = n;
    f->nruns = 1;
    f->runs[0] = (fwd_run){.seq = s, .n = n, .pos0 = s->mtp_pos, .wide_at = -1, .entries_at = -1};
    for (int r = 0; r < n; r++) f->row[r] = (fwd_row){.seq = s, .pos = s->mtp_pos + r, .id = next_ids[r]};
    fwd_angles(f);
    fwd_mtp_mix(f, streams, g, e);
    fwd_block(f, l);
    for (int r = 0; r < n && logits; r += FWD_LOGIT_ROWS) {
        int32_t rows[FWD_LOGIT_ROWS];
        int count = n - r < FWD_LOGIT_ROWS ? n - r : FWD_LOGIT_ROWS;
        for (int i = 0; i < count; i++) rows[i] = r + i;
        fwd_head(f, &f->w->mtp->hc_head, f->w->mtp->norm, rows, count);
        for (int i = 0; i < count; i++) {
            trace_one(f, FT_HEAD_X, l->number, f->row[r + i].pos, f->head_x + (size_t)i * (size_t)D, (size_t)D * sizeof(float));
            trace_one(f, FT_LOGITS, l->number, f->row[r + i].pos, f->logits + (size_t)i * (size_t)V, (size_t)V * sizeof(float));
        }
        memcpy(logits + (size_t)r * (size_t)V, f->logits, (size_t)count * (size_t)V * sizeof(float));
    }
    s->mtp_pos += n;
}

static int check_mtp(const fwd *f, const dm_fseq *s, const int32_t *next_ids, int n, dm_err *e) {
    static const char where[] = "forward.mtp";
    if (!f->w->mtp || f->w->mtp->block.ratio) return dm_err_set(e, DM_ENOTSUP, where, "the model has no MTP layer, or one with a compressor");
    if (f->draft) return dm_err_set(e, DM_ESTATE, where, "the MTP rows of a forward that drafts are its own");
    if (s->mtp_off) return dm_err_set(e, DM_ESTATE, where, "a restored sequence has no MTP rows");
    if (n < 0 || n > f->base.ctx_tokens_max - s->mtp_pos)
        return dm_err_set(e, DM_ECONTEXT, where, "%d rows do not fit into the context", n);
    for (int i = 0; i < n; i++)
        if (next_ids[i] < 0 || next_ids[i] >= f->base.vocab)
            return dm_err_set(e, DM_EINVAL, where, "token id %d is not in the vocabulary", next_ids[i]);
    return 0;
}

int forward_mtp(dm_forward *df, dm_fseq *s, const float *streams, const int32_t *next_ids, int n, float *logits, dm_err *e) {
    fwd *f = fwd_of(df);
    int rc = check_mtp(f, s, next_ids, n, e);
    if (rc < 0) return rc;
    size_t D = (size_t)f->c->hidden_size, V = (size_t)f->base.vocab, R = (size_t)f->base.rows_max;
    if (!s->mtp_window) s->mtp_window = dm_calloc((size_t)f->ring, f->row_bytes);
    float *g = dm_malloc(R * KERN_HC * D * sizeof *g), *ex = dm_malloc(R * D * sizeof *ex);
    if (s->mtp_window && g && ex) {
        pthread_mutex_lock(&f->step_lock);
        for (int at = 0; at < n; at += f->base.rows_max) {
            int count = n - at < f->base.rows_max ? n - at : f->base.rows_max;
            mtp_rows(f, s, streams + (size_t)at * KERN_HC * D, next_ids + at, count, logits ? logits + (size_t)at * V : NULL, g, ex);
        }
        pthread_mutex_unlock(&f->step_lock);
    } else rc = dm_err_set(e, DM_ENOMEM, "forward.mtp", "out of memory for the MTP layer's rows");
    dm_free(ex);
    dm_free(g);
    return rc;
}
