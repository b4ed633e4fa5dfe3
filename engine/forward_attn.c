/* forward_attn.c — the attention sublayer of all rows of a step, phase by phase:
 *
 *   project   x → q latent, kv, compressor rows K and S, index weights
 *   condense  q latent norm; kv → cache rows; K, S → folds (finished entries come out pooled)
 *   expand    q latent → queries, index queries
 *   finish    query norm and rope; index queries; entries → block memory; window keys widened for long runs
 *   select    index scores and the best entries of each row (c4, only where not everything is selected anyway)
 *   attend    entries widened for long runs; scores, softmax, values, inverse rope
 *   output    grouped wo_a, wo_b; the chunk's rows go into the window rings
 *
 * The query at t reads window rows t−127 … t: those of this step from kv_row, older ones from the ring, which is only
 * overwritten after `attend`.  Entries are visible up to ⌊(t+1)/m⌋; an entry that a later row of this step completes is
 * in block memory already, but not below that count, so rows of one chunk see exactly what they would have seen alone. */
#include <math.h>
#include <string.h>

#include "engine/forward_int.h"

static const model_compressor *compressor_of(const fwd_layer *l, bool index) {
    return index ? &l->w->indexer.compressor : &l->w->compressor;
}
static int64_t visible(const fwd_layer *l, int64_t pos) { return l->ratio ? (pos + 1) / l->ratio : 0; }

/* ---- project ---------------------------------------------------------------------------------------- */

static void compressor_linears(fwd *f, const model_compressor *c, float *k, float *s) {
    int D = f->c->hidden_size, wide = c->lanes * c->dim;
    kern_linear p = {.x = f->x, .x_stride = D, .rows = f->rows, .out_end = wide, .y_stride = wide, .kind = KERN_OUT_F32};
    p.w = fwd_bf16(c->wkv, wide, D), p.y = k;
    phase_linear(f, &p);
    p.w = fwd_bf16(c->wgate, wide, D), p.y = s;
    phase_linear(f, &p);
}

static void project(fwd *f, const fwd_layer *l) {
    int D = f->c->hidden_size, rq = f->c->q_lora_rank, Hi = f->c->index_n_heads;
    kern_linear p = {.x_stride = D, .rows = f->rows, .kind = f->kind};
    p.w = fwd_mat(&l->w->wq_a), p.x = fwd_input(f, &l->w->wq_a, f->x, f->xq), p.out_end = rq, p.y = f->qr, p.y_stride = rq;
    phase_linear(f, &p);
    p.w = fwd_mat(&l->w->wkv), p.x = fwd_input(f, &l->w->wkv, f->x, f->xq), p.out_end = KERN_HEAD_DIM, p.y = f->kv, p.y_stride = KERN_HEAD_DIM;
    phase_linear(f, &p);
    if (l->ratio) compressor_linears(f, &l->w->compressor, f->ck, f->cs);
    if (l->ratio == 4) {
        compressor_linears(f, &l->w->indexer.compressor, f->ik, f->is);
        p.w = fwd_bf16(l->w->indexer.weights_proj, Hi, D), p.x = f->x, p.out_end = Hi, p.y = f->iw, p.y_stride = Hi;
        phase_linear(f, &p);
    }
    phase_run(f);
}

/* ---- condense ----------------------------------------------------------------------------------------- */

/* A row of the window cache from what wkv made; x is scratch afterwards. */
static void cache_row(fwd *f, float *x, const uint16_t *norm, const float *cs, const float *sn, void *row) {
    if (f->round == f->row_fp8) {
        f->k->kv_row(&(kern_kv_row){.x = x, .weight = norm, .cos = cs, .sin = sn, .eps = f->c->rms_norm_eps, .round = f->round, .row = row});
        return;
    }
    f->k->rmsnorm(&(kern_rmsnorm){.x = x, .x_stride = KERN_HEAD_DIM, .weight = norm, .y = x, .y_stride = KERN_HEAD_DIM, .rows = 1,
                                  .dim = KERN_HEAD_DIM, .eps = f->c->rms_norm_eps, .round = true});
    f->k->rope(&(kern_rope){.x = x, .count = 1, .dim = KERN_HEAD_DIM, .cos = cs, .sin = sn, .round = true});
    memcpy(row, x, KERN_ROW_F32_BYTES);
}
/* The same for a compressed entry, from what was pooled. */
static void cache_entry(fwd *f, const void *pooled, const uint16_t *norm, const float *cs, const float *sn, void *row) {
    float x[KERN_HEAD_DIM];
    if (f->round == f->row_fp8) {
        f->k->entry(&(kern_entry){.pooled = pooled, .weight = norm, .dim = KERN_HEAD_DIM, .cos = cs, .sin = sn, .eps = f->c->rms_norm_eps,
                                  .round = f->round, .row = row});
        return;
    }
    for (int i = 0; i < KERN_HEAD_DIM; i++)
        x[i] = dm_bf16_round(f->k->real_bytes == 8 ? (float)((const double *)pooled)[i] : ((const float *)pooled)[i]);
    cache_row(f, x, norm, cs, sn, row);
}

static void window_rows(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const fwd_layer *l = arg;
    for (int64_t r = begin; r < end; r++)
        cache_row(f, f->kv + r * KERN_HEAD_DIM, l->w->kv_norm, l->cos[r], l->sin[r], f->kv_row + (size_t)r * f->row_bytes);
}

static void latent_rows(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const fwd_layer *l = arg;
    int rq = f->c->q_lora_rank, n = (int)(end - begin);
    f->k->rmsnorm(&(kern_rmsnorm){.x = f->qr + begin * rq, .x_stride = rq, .weight = l->w->q_norm, .y = f->qr + begin * rq, .y_stride = rq,
                                  .rows = n, .dim = rq, .eps = f->c->rms_norm_eps, .round = f->round});
    if (f->round)
        f->k->quant(&(kern_quant){.x = f->qr + begin * rq, .x_stride = rq, .y = f->qrq + begin * rq, .y_stride = rq, .rows = n, .dim = rq});
    window_rows(f, l, begin, end, NULL);
}

#define FOLD_CHANNELS 64
/* Rows [row, row + n) of the run. */
static void fold_rows(fwd *f, const fwd_fold *d, int row, int n, int c_begin, int c_end) {
    const fwd_layer *l = d->layer;
    const model_compressor *c = compressor_of(l, d->index);
    int wide = c->lanes * c->dim;
    int64_t at = (int64_t)(d->run->row0 + row) * wide, t0 = d->run->pos0 + row, done = t0 / c->ratio - d->run->pos0 / c->ratio;
    f->k->fold(&(kern_fold){.k = (d->index ? f->ik : f->ck) + at, .s = (d->index ? f->is : f->cs) + at, .stride = wide, .ape = c->ape,
                            .rows = n, .lanes = c->lanes, .dim = c->dim, .m = c->ratio, .t0 = t0,
                            .own = seq_fold(d->run->seq, l, d->index, false), .next = seq_fold(d->run->seq, l, d->index, true),
                            .pooled = real_at(f, d->pooled, done * c->dim), .c_begin = c_begin, .c_end = c_end});
}
/* The accumulators of these channels, as they are before tentative row i. */
static void snap_fold(const fwd *f, const fwd_fold *d, int i, int c_begin, int c_end) {
    const dm_fseq *s = d->run->seq;
    const model_compressor *c = compressor_of(d->layer, d->index);
    size_t real = (size_t)f->k->real_bytes;
    for (int lane = 0; lane < c->lanes; lane++) {
        const uint8_t *acc = seq_fold(s, d->layer, d->index, lane == 1);
        uint8_t *to = seq_snap(s, i) + (acc - s->fold);
        for (int v = 0; v < 3; v++) { /* maximum, sum, weighted sum */
            size_t from = (size_t)(v * c->dim + c_begin) * real;
            memcpy(to + from, acc + from, (size_t)(c_end - c_begin) * real);
        }
    }
}
static void fold_channels(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const fwd_fold *d = arg;
    int c_begin = (int)begin * FOLD_CHANNELS, c_end = (int)end * FOLD_CHANNELS, firm = d->run->n - d->run->tentative;
    fold_rows(f, d, 0, firm, c_begin, c_end);
    for (int i = 0; i < d->run->tentative; i++) {
        snap_fold(f, d, i, c_begin, c_end);
        fold_rows(f, d, firm + i, 1, c_begin, c_end);
    }
}

/* One fold per run and compressor; lists the entries that it will finish. */
static void add_folds(fwd *f, const fwd_layer *l, bool index) {
    const model_compressor *c = compressor_of(l, index);
    int done = 0;
    for (int i = 0; i < f->nruns; i++) {
        const fwd_run *run = &f->runs[i];
        fwd_fold *d = &f->fold[f->folds++];
        *d = (fwd_fold){.run = run, .layer = l, .index = index, .pooled = real_at(f, index ? f->pooled_index : f->pooled, (int64_t)done * c->dim)};
        for (int64_t j = run->pos0 / c->ratio; j < (run->pos0 + run->n) / c->ratio; j++, done++)
            f->entry[f->entries++] = (fwd_entry){.seq = run->seq, .j = j, .index = index,
                                                 .pooled = real_at(f, index ? f->pooled_index : f->pooled, (int64_t)done * c->dim)};
        phase_add(f, fold_channels, d, c->dim / FOLD_CHANNELS, 0, (double)run->n * c->dim * c->lanes * 20);
    }
}

static void condense(fwd *f, const fwd_layer *l) {
    f->folds = f->entries = 0;
    phase_add(f, latent_rows, l, f->rows, 0, (double)f->rows * (f->c->q_lora_rank + KERN_HEAD_DIM) * 20);
    if (l->ratio) add_folds(f, l, false);
    if (l->ratio == 4) add_folds(f, l, true);
    phase_run(f);
    trace_bytes(f, FT_ATTN_KV, l->number, f->kv_row, (int64_t)f->row_bytes, (int64_t)f->row_bytes);
    if (l->ratio) {
        int wide = l->w->compressor.lanes * KERN_HEAD_DIM;
        trace_f32(f, FT_COMP_K, l->number, f->ck, wide, wide);
        trace_f32(f, FT_COMP_S, l->number, f->cs, wide, wide);
    }
    if (l->ratio == 4) {
        trace_f32(f, FT_INDEX_COMP_K, l->number, f->ik, 2 * KERN_INDEX_DIM, 2 * KERN_INDEX_DIM);
        trace_f32(f, FT_INDEX_COMP_S, l->number, f->is, 2 * KERN_INDEX_DIM, 2 * KERN_INDEX_DIM);
    }
}

/* ---- expand and finish ---------------------------------------------------------------------------------- */

static void expand(fwd *f, const fwd_layer *l) {
    int rq = f->c->q_lora_rank, qd = f->c->num_attention_heads * KERN_HEAD_DIM, id = f->c->index_n_heads * KERN_INDEX_DIM;
    kern_linear p = {.x_stride = rq, .rows = f->rows, .kind = f->kind};
    p.w = fwd_mat(&l->w->wq_b), p.x = fwd_input(f, &l->w->wq_b, f->qr, f->qrq), p.out_end = qd, p.y = f->q, p.y_stride = qd;
    phase_linear(f, &p);
    if (l->ratio == 4) {
        p.w = fwd_mat(&l->w->indexer.wq_b), p.x = fwd_input(f, &l->w->indexer.wq_b, f->qr, f->qrq), p.out_end = id, p.y = f->iq, p.y_stride = id;
        phase_linear(f, &p);
    }
    phase_run(f);
}

static void query_rows(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const fwd_layer *l = arg;
    int H = f->c->num_attention_heads;
    for (int64_t r = begin; r < end; r++)
        f->k->qhead(&(kern_qhead){.q = f->q + r * H * KERN_HEAD_DIM, .heads = H, .cos = l->cos[r], .sin = l->sin[r],
                                  .eps = f->c->rms_norm_eps, .round = f->round});
}
static void index_query_rows(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const fwd_layer *l = arg;
    int Hi = f->c->index_n_heads;
    for (int64_t r = begin; r < end; r++)
        f->k->index_query(&(kern_index_query){.q = f->iq + r * Hi * KERN_INDEX_DIM, .w = f->iw + r * Hi, .heads = Hi, .cos = l->cos[r],
                                              .sin = l->sin[r], .c = f->index_c, .round = f->key_fp4});
}
static void finish_entries(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const fwd_layer *l = arg;
    for (int64_t i = begin; i < end; i++) {
        const fwd_entry *n = &f->entry[i];
        const model_compressor *c = compressor_of(l, n->index);
        float cs[FWD_PAIRS], sn[FWD_PAIRS];
        dm_rope_angles(f->freq[l->table], n->j * c->ratio, cs, sn);
        if (n->index)
            f->k->entry(&(kern_entry){.pooled = n->pooled, .weight = c->norm, .dim = c->dim, .cos = cs, .sin = sn, .eps = f->c->rms_norm_eps,
                                      .round = f->key_fp4, .row = seq_key(n->seq, l, n->j)});
        else cache_entry(f, n->pooled, c->norm, cs, sn, seq_entry(n->seq, l, n->j));
    }
}

/* First position that the query at pos reads. */
static int64_t window_begin(const fwd *f, const fwd_layer *l, const dm_fseq *s, int64_t pos) {
    int64_t u = pos > FWD_WINDOW - 1 ? pos - (FWD_WINDOW - 1) : 0;
    return l->number == f->layers && u < s->mtp_from ? s->mtp_from : u; /* behind a restore the MTP layer knows less */
}
static const uint8_t *window_row(const fwd *f, const fwd_layer *l, const fwd_run *run, int64_t pos) {
    if (pos >= run->pos0) return f->kv_row + (size_t)(run->row0 + (pos - run->pos0)) * f->row_bytes;
    return seq_window_row(run->seq, l, pos);
}
static void widen_window(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const fwd_widen *w = arg;
    for (int64_t i = begin; i < end; i++) {
        const void *row = window_row(f, w->layer, w->run, w->run->wide_pos0 + i);
        f->k->unpack(&(kern_unpack){.row = &row, .x = f->wide + (w->run->wide_at + i) * KERN_HEAD_DIM, .x_stride = KERN_HEAD_DIM, .rows = 1});
    }
}
static void add_widening(fwd *f, const fwd_layer *l) {
    int64_t used = 0;
    for (int i = 0; i < f->nruns; i++) {
        fwd_run *run = &f->runs[i];
        run->wide_at = -1;
        if (!f->row_fp8 || run->n < FWD_WIDEN_ROWS) continue;
        run->wide_pos0 = window_begin(f, l, run->seq, run->pos0);
        int64_t n = run->pos0 + run->n - run->wide_pos0;
        if (used + n > f->wide_cap) continue;
        run->wide_at = used;
        used += n;
        f->widen[i] = (fwd_widen){.run = run, .layer = l};
        phase_add(f, widen_window, &f->widen[i], n, 0, (double)n * KERN_HEAD_DIM);
    }
}

static void finish(fwd *f, const fwd_layer *l) {
    int H = f->c->num_attention_heads, Hi = f->c->index_n_heads;
    phase_add(f, query_rows, l, f->rows, 0, (double)f->rows * H * KERN_HEAD_DIM * 4);
    if (l->ratio == 4) phase_add(f, index_query_rows, l, f->rows, 0, (double)f->rows * Hi * KERN_INDEX_DIM * 10);
    phase_add(f, finish_entries, l, f->entries, 0, (double)f->entries * 10e3);
    add_widening(f, l);
    phase_run(f);
    trace_f32(f, FT_ATTN_Q, l->number, f->q, H * KERN_HEAD_DIM, H * KERN_HEAD_DIM);
    if (l->ratio == 4) {
        trace_f32(f, FT_INDEX_Q, l->number, f->iq, Hi * KERN_INDEX_DIM, Hi * KERN_INDEX_DIM);
        trace_f32(f, FT_INDEX_W, l->number, f->iw, Hi, Hi);
    }
    for (int i = 0; f->tracing && i < f->entries; i++) {
        const fwd_entry *n = &f->entry[i];
        if (n->index) trace_one(f, FT_INDEX_ENT, l->number, n->j, seq_key(n->seq, l, n->j), f->key_bytes);
        else trace_one(f, FT_ENT, l->number, n->j, seq_entry(n->seq, l, n->j), f->row_bytes);
    }
}

/* ---- select ------------------------------------------------------------------------------------------------- */

#define SCORE_KEYS 1024 /* keys of one scoring task */

static bool needs_scores(const fwd *f, const fwd_layer *l, int r) {
    int64_t n = visible(l, f->row[r].pos);
    return n > f->c->index_topk || (f->tracing && n > 0);
}
static void score_keys(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    const fwd_scores *s = arg;
    const fwd_row *row = &f->row[s->row];
    int Hi = f->c->index_n_heads;
    int64_t n = visible(s->layer, row->pos), per = s->layer->per_block, last = end * SCORE_KEYS < n ? end * SCORE_KEYS : n;
    const void **seg = scratch;
    int64_t seg0 = begin * SCORE_KEYS / per, segs = (last - 1) / per - seg0 + 1;
    for (int64_t i = 0; i < segs; i++) seg[i] = seq_key(row->seq, s->layer, (seg0 + i) * per);
    void *work = (char *)scratch + f->seg_bytes;
    f->k->index_score(&(kern_index_score){.q = f->iq + (int64_t)s->row * Hi * KERN_INDEX_DIM, .w = f->iw + (int64_t)s->row * Hi, .heads = Hi,
                                          .seg = seg, .seg_keys = (int)per, .begin = begin * SCORE_KEYS - seg0 * per, .end = last - seg0 * per,
                                          .score = s->score + seg0 * per, .round = f->key_fp4, .work = work});
}
static void topk_rows(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const fwd_scores *s = arg;
    for (int64_t i = begin; i < end; i++) {
        int r = s[i].row;
        int64_t n = visible(s[i].layer, f->row[r].pos);
        f->k->topk(&(kern_topk){.score = s[i].score, .n = n, .k = f->nsel[r], .sel = f->sel + (int64_t)r * f->topk_max,
                                .margin = f->tracing ? &f->sel_margin[r] : NULL});
    }
}

static void select_trace(const fwd *f, const fwd_layer *l) {
    if (!f->tracing) return;
    for (int r = 0; r < f->rows; r++) {
        float none = INFINITY;
        bool scored = needs_scores(f, l, r);
        trace_one(f, FT_INDEX_SEL, l->number, f->row[r].pos, f->sel + (int64_t)r * f->topk_max, scored ? (size_t)f->nsel[r] * 4 : 0);
        trace_one(f, FT_INDEX_MARGIN, l->number, f->row[r].pos, scored ? &f->sel_margin[r] : &none, sizeof none);
        if (!scored) trace_one(f, FT_INDEX_SCORE, l->number, f->row[r].pos, &none, 0);
    }
}

/* Scores of as many rows as fit into the score memory, then their best; again until all rows are done. */
static void select_entries(fwd *f, const fwd_layer *l) {
    for (int r = 0; r < f->rows; r++) {
        int64_t n = visible(l, f->row[r].pos);
        f->nsel[r] = (int32_t)(n < f->c->index_topk ? n : f->c->index_topk);
    }
    for (int r = 0; r < f->rows;) {
        int count = 0;
        int64_t used = 0;
        for (; r < f->rows; r++) {
            if (!needs_scores(f, l, r)) continue;
            int64_t n = visible(l, f->row[r].pos);
            if (used + n > f->score_cap) break;
            fwd_scores *s = &f->scores[count++];
            *s = (fwd_scores){.layer = l, .row = r, .score = f->score + used};
            used += n;
            phase_add(f, score_keys, s, (n + SCORE_KEYS - 1) / SCORE_KEYS, 1, (double)n * f->c->index_n_heads * KERN_INDEX_DIM);
        }
        if (!count) break;
        phase_run(f);
        phase_add(f, topk_rows, f->scores, count, 1, (double)used * 10);
        phase_run(f);
        for (int i = 0; f->tracing && i < count; i++) {
            int64_t pos = f->row[f->scores[i].row].pos;
            trace_one(f, FT_INDEX_SCORE, l->number, pos, f->scores[i].score, (size_t)visible(l, pos) * sizeof(float));
        }
    }
    select_trace(f, l);
}

/* ---- attend -------------------------------------------------------------------------------------------------- */

static void widen_entries(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const fwd_widen *w = arg;
    for (int64_t j = begin; j < end; j++) {
        const void *row = seq_entry(w->run->seq, w->layer, j);
        f->k->unpack(&(kern_unpack){.row = &row, .x = f->wide + (w->run->entries_at + j) * KERN_HEAD_DIM, .x_stride = KERN_HEAD_DIM, .rows = 1});
    }
}
/* Long runs share their entries among many rows. */
static void add_entry_widening(fwd *f, const fwd_layer *l) {
    int64_t used = f->wide_cap, end = f->wide_cap + f->entries_cap;
    for (int i = 0; i < f->nruns; i++) {
        fwd_run *run = &f->runs[i];
        int64_t n = visible(l, run->pos0 + run->n - 1);
        run->entries_at = -1;
        if (run->wide_at < 0 || n > end - used) continue;
        run->entries_at = used;
        used += n;
        phase_add(f, widen_entries, &f->widen[i], n, 0, (double)n * KERN_HEAD_DIM);
    }
    phase_run(f);
}

/* Keys of row r in order: window, then compressed entries. Returns their number. */
static int row_keys(const fwd *f, const fwd_layer *l, int r, const void **key, int *keys_f32) {
    const fwd_row *row = &f->row[r];
    const fwd_run *run = &f->runs[row->run];
    int n = 0;
    for (int64_t u = window_begin(f, l, row->seq, row->pos); u <= row->pos; u++)
        key[n++] = run->wide_at >= 0 ? (const void *)(f->wide + (run->wide_at + (u - run->wide_pos0)) * KERN_HEAD_DIM) : window_row(f, l, run, u);
    int window = n;
    int64_t entries = visible(l, row->pos);
    bool chosen = l->ratio == 4 && entries > f->c->index_topk;
    const int32_t *sel = f->sel + (int64_t)r * f->topk_max;
    for (int64_t i = 0, count = chosen ? f->nsel[r] : entries; i < count; i++) {
        int64_t j = chosen ? sel[i] : i;
        key[n++] = run->entries_at >= 0 ? (const void *)(f->wide + (run->entries_at + j) * KERN_HEAD_DIM) : seq_entry(row->seq, l, j);
    }
    *keys_f32 = run->wide_at < 0 ? 0 : run->entries_at < 0 ? window : n;
    if (!f->row_fp8) *keys_f32 = n;
    return n;
}

/* Items: (row, group of heads). */
static void attend_heads(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    const fwd_layer *l = arg;
    int H = f->c->num_attention_heads, groups = (H + FWD_HEADS_TASK - 1) / FWD_HEADS_TASK;
    const void **key = scratch;
    void *work = (char *)scratch + f->key_list_bytes;
    for (int64_t i = begin; i < end; i++) {
        int r = (int)(i / groups), h0 = (int)(i % groups) * FWD_HEADS_TASK, heads = H - h0 < FWD_HEADS_TASK ? H - h0 : FWD_HEADS_TASK;
        float *q = f->q + ((int64_t)r * H + h0) * KERN_HEAD_DIM;
        int keys_f32, keys = row_keys(f, l, r, key, &keys_f32);
        f->k->attention(&(kern_attention){.q = q, .o = q, .sink = l->w->attn_sink + h0, .heads = heads, .key = key, .keys = keys,
                                          .keys_f32 = keys_f32, .round = f->round, .work = work});
        f->k->rope(&(kern_rope){.x = q, .count = heads, .dim = KERN_HEAD_DIM, .cos = l->cos[r], .sin = l->sin[r], .inverse = true,
                                .round = f->round});
    }
}

static void attend(fwd *f, const fwd_layer *l) {
    int H = f->c->num_attention_heads, groups = (H + FWD_HEADS_TASK - 1) / FWD_HEADS_TASK;
    double cost = 0;
    for (int r = 0; r < f->rows; r++) cost += (double)(FWD_WINDOW + visible(l, f->row[r].pos)) * H * KERN_HEAD_DIM * 2;
    add_entry_widening(f, l);
    phase_add(f, attend_heads, l, (int64_t)f->rows * groups, f->rows > 64 ? 0 : 1, cost);
    phase_run(f);
    trace_f32(f, FT_ATTN_O, l->number, f->q, H * KERN_HEAD_DIM, H * KERN_HEAD_DIM);
}

/* ---- output ---------------------------------------------------------------------------------------------------- */

static void commit_windows(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)scratch;
    const fwd_layer *l = arg;
    for (int64_t i = begin; i < end; i++) {
        const fwd_run *run = &f->runs[i];
        int skip = run->n > f->ring ? run->n - f->ring : 0;
        for (int r = skip; r < run->n; r++)
            memcpy(seq_window_row(run->seq, l, run->pos0 + r), f->kv_row + (size_t)(run->row0 + r) * f->row_bytes, f->row_bytes);
    }
}
static void quant_z_rows(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    (void)arg, (void)scratch;
    int zd = f->c->o_groups * f->c->o_lora_rank;
    f->k->quant(&(kern_quant){.x = f->z + begin * zd, .x_stride = zd, .y = f->z + begin * zd, .y_stride = zd, .rows = (int)(end - begin), .dim = zd});
}

static void output(fwd *f, const fwd_layer *l) {
    int D = f->c->hidden_size, G = f->c->o_groups, ro = f->c->o_lora_rank, qd = f->c->num_attention_heads * KERN_HEAD_DIM, zd = G * ro;
    for (int g = 0; g < G; g++)
        phase_linear(f, &(kern_linear){.w = fwd_mat(&l->w->wo_a), .x = f->q + (int64_t)g * (qd / G), .x_stride = qd, .rows = f->rows,
                                       .out_begin = g * ro, .out_end = (g + 1) * ro, .y = f->z, .y_stride = zd, .kind = f->kind});
    phase_add(f, commit_windows, l, f->nruns, 1, (double)f->rows * 100);
    phase_run(f);
    if (f->round && !l->w->wo_b.bf16) {
        phase_add(f, quant_z_rows, NULL, f->rows, 0, (double)f->rows * zd * 4);
        phase_run(f);
    }
    phase_linear(f, &(kern_linear){.w = fwd_mat(&l->w->wo_b), .x = f->z, .x_stride = zd, .rows = f->rows, .out_end = D, .y = f->y,
                                   .y_stride = D, .kind = f->kind});
    phase_run(f);
}

void fwd_window_rows(fwd *f, const fwd_layer *l) {
    int D = f->c->hidden_size;
    phase_linear(f, &(kern_linear){.w = fwd_mat(&l->w->wkv), .x = fwd_input(f, &l->w->wkv, f->x, f->xq), .x_stride = D, .rows = f->rows,
                                   .out_end = KERN_HEAD_DIM, .y = f->kv, .y_stride = KERN_HEAD_DIM, .kind = f->kind});
    phase_run(f);
    phase_add(f, window_rows, l, f->rows, 0, (double)f->rows * KERN_HEAD_DIM * 20);
    phase_run(f);
    for (int r = 0; r < f->rows; r++) memcpy(seq_window_row(f->row[r].seq, l, f->row[r].pos), f->kv_row + (size_t)r * f->row_bytes, f->row_bytes);
}

void fwd_attn(fwd *f, const fwd_layer *l) {
    project(f, l);
    condense(f, l);
    expand(f, l);
    finish(f, l);
    if (l->ratio == 4) select_entries(f, l);
    attend(f, l);
    output(f, l);
}
