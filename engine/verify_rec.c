/* verify_rec.c — keeping the rows that a trace shows, and putting them together as the tensors of a vector file. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/verify_int.h"

#define WHERE "verify"

/* ---- which rows -------------------------------------------------------------------------------- */

/* Which tags a vector file holds for every position, and which only when it is "full". */
static bool every_position(forward_tag tag) {
    return tag == FT_ATTN_KV || tag == FT_ENT || tag == FT_INDEX_ENT || tag == FT_INDEX_SEL || tag == FT_INDEX_MARGIN || tag == FT_ROUTE_ID ||
           tag == FT_ROUTE_W || tag == FT_FFN_MARGIN;
}
static bool sublayer_row(forward_tag tag) { return tag == FT_HIN || tag == FT_ATTN_X || tag == FT_ATTN_Y || tag == FT_FFN_X || tag == FT_FFN_Y; }
static bool fold_row(forward_tag tag) { return tag == FT_COMP_K || tag == FT_COMP_S || tag == FT_INDEX_COMP_K || tag == FT_INDEX_COMP_S; }

static bool wanted(const vrec *r, forward_tag tag, int layer, int64_t pos) {
    if (every_position(tag)) return true;
    if (pos < 0 || pos >= r->n) return false;
    if (sublayer_row(tag) && (r->full || (r->all && tag != FT_HIN))) return true;
    if (r->all && (fold_row(tag) || tag == FT_INDEX_SCORE || tag == FT_INDEX_Q || tag == FT_INDEX_W)) return true;
    if (tag == FT_H && layer == r->c->num_hidden_layers - 1) return true; /* the MTP layer's input */
    if (!fold_row(tag)) return r->keep[pos] & VREC_POS;
    if (layer < 0 || layer >= r->c->num_hidden_layers) return false;
    return r->keep[pos] & (r->c->compress_ratio[layer] == 128 ? VREC_K128 : VREC_K4);
}

/* A cut at P needs the rows of the unfinished entries and of the c4 window before them. */
static void mark_cut(vrec *r, int64_t p) {
    int64_t four = p / 4 * 4;
    for (int64_t i = four < 4 ? 0 : four - 4; i < p; i++) r->keep[i] |= VREC_K4;
    for (int64_t i = p / 128 * 128; i < p; i++) r->keep[i] |= VREC_K128;
}

/* ---- rows ------------------------------------------------------------------------------------------ */

static vlane *lane_of(const vrec *r, forward_tag tag, int layer) {
    int columns = r->c->num_hidden_layers + 2, column = layer < 0 ? columns - 1 : layer;
    return column < columns ? &r->lane[(int)tag * columns + column] : NULL;
}

int vrec_init(vrec *r, const dm_config *c, const vref *f, bool all, dm_err *e) {
    memset(r, 0, sizeof *r);
    r->c = c, r->n = f->n, r->full = f->full, r->all = all;
    r->lane = dm_calloc((size_t)FT_COUNT * (size_t)(c->num_hidden_layers + 2), sizeof *r->lane);
    r->keep = dm_calloc((size_t)f->n, 1);
    if (!r->lane || !r->keep) return dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    for (int64_t i = 0; i < f->npos; i++) r->keep[f->pos[i]] |= VREC_POS;
    for (int64_t i = 0; i < f->ncut; i++) mark_cut(r, f->cut[i]);
    return 0;
}

void vrec_free(vrec *r) {
    if (r->lane)
        for (int i = 0; i < FT_COUNT * (r->c->num_hidden_layers + 2); i++) {
            dm_buf_free(&r->lane[i].data);
            dm_free(r->lane[i].row);
        }
    dm_free(r->lane);
    dm_free(r->keep);
    memset(r, 0, sizeof *r);
}

void vrec_row(void *ctx, forward_tag tag, int layer, int64_t pos, const void *data, size_t nbytes) {
    vrec *r = ctx;
    vlane *l = lane_of(r, tag, layer);
    if (r->rc < 0 || !l || !wanted(r, tag, layer, pos)) return;
    if (l->nrows == l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 32;
        vrow *p = dm_realloc(l->row, cap * sizeof *p);
        if (!p) {
            r->rc = DM_ENOMEM;
            return;
        }
        l->row = p, l->cap = cap;
    }
    size_t at = l->data.n;
    if (nbytes && dm_buf_append(&l->data, data, nbytes) < 0) r->rc = DM_ENOMEM;
    else {
        size_t i = l->nrows++; /* nearly always at the end */
        for (; i > 0 && l->row[i - 1].pos > pos; i--) l->row[i] = l->row[i - 1];
        l->row[i] = (vrow){pos, at, nbytes};
    }
}

const void *vrec_get(const vrec *r, forward_tag tag, int layer, int64_t pos, size_t *nbytes) {
    const vlane *l = lane_of(r, tag, layer);
    size_t lo = 0, hi = l ? l->nrows : 0;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        if (l->row[mid].pos == pos) {
            *nbytes = l->row[mid].n;
            return l->data.p ? l->data.p + l->row[mid].at : (const uint8_t *)"";
        }
        if (l->row[mid].pos < pos) lo = mid + 1;
        else hi = mid;
    }
    return NULL;
}

/* ---- tensors ------------------------------------------------------------------------------------------ */

/* How one tensor is laid out: rows, and numbers per row; padded rows are filled up with one value. */
typedef struct shape { int64_t rows, width; bool padded; } shape;

static int64_t bounded(int64_t topk, int64_t entries) { return topk < entries ? topk : entries; }

static shape rows_shape(const dm_config *c, const vref *f, const vname *v) {
    forward_tag tag = v->tag;
    int64_t D = c->hidden_size, streams = c->hc_mult * D, heads = (int64_t)c->num_attention_heads * c->head_dim, wide = (int64_t)c->index_n_heads * c->index_head_dim;
    int ratio = v->layer >= 0 ? c->compress_ratio[v->layer] : 0;
    int64_t rows = every_position(tag) || (sublayer_row(tag) && f->full) ? f->n : f->npos, entries = f->n / 4, kv = f->plain ? 512 : 584, key = f->plain ? 128 : 68;
    switch (tag) {
    case FT_HIN:
    case FT_H: return (shape){rows, streams, false};
    case FT_HC_ATTN:
    case FT_HC_FFN: return (shape){rows, (2 + c->hc_mult) * c->hc_mult, false};
    case FT_ATTN_Q:
    case FT_ATTN_O: return (shape){rows, heads, false};
    case FT_ATTN_KV: return (shape){rows, kv, false};
    case FT_ENT: return (shape){ratio ? f->n / ratio : 0, kv, false};
    case FT_INDEX_ENT: return (shape){entries, key, false};
    case FT_INDEX_Q: return (shape){rows, wide, false};
    case FT_INDEX_W: return (shape){rows, c->index_n_heads, false};
    case FT_INDEX_SCORE: return (shape){rows, entries, true};
    case FT_INDEX_SEL: return (shape){rows, bounded(c->index_topk, entries), true};
    case FT_INDEX_MARGIN:
    case FT_FFN_MARGIN: return (shape){rows, 1, false};
    case FT_ROUTE_ID:
    case FT_ROUTE_W: return (shape){rows, c->num_experts_per_tok, false};
    case FT_LOGITS: return (shape){rows, c->vocab_size, false};
    default: return (shape){rows, D, false};
    }
}

int64_t vrec_row_pos(const vref *f, const vname *name, int64_t row) {
    if (name->kind == VN_CUT) return name->cut;
    if (name->kind != VN_ROWS || every_position(name->tag) || (sublayer_row(name->tag) && f->full)) return row;
    return row < f->npos ? f->pos[row] : row;
}

static int no_memory(dm_err *e) { return dm_err_set(e, DM_ENOMEM, WHERE, "out of memory"); }

/* Appends one row: floats that stand for bf16 values are cut to their upper halves; a float that is no bf16 value
 * spoils the row, and the comparison shows it. */
static int put_row(dm_buf *out, const vref_tensor *t, const void *row, size_t n) {
    if (t->dtype != MODEL_BF16) return dm_buf_append(out, row, n);
    for (size_t i = 0; i < n / 4; i++) {
        uint32_t u;
        memcpy(&u, (const uint8_t *)row + 4 * i, 4);
        uint16_t half = (uint16_t)(u & 0xFFFF ? 0x7FC1 : u >> 16);
        int rc = dm_buf_append(out, &half, 2);
        if (rc < 0) return rc;
    }
    return 0;
}

static int pad_row(dm_buf *out, forward_tag tag, int64_t n) {
    static const uint32_t minus_one = 0xFFFFFFFF, minus_inf = 0xFF800000;
    int rc = 0;
    for (int64_t i = 0; i < n && rc >= 0; i++) rc = dm_buf_append(out, tag == FT_INDEX_SEL ? &minus_one : &minus_inf, 4);
    return rc;
}

static int rows_tensor(const vrec *r, const vref *f, const vref_tensor *t, const vname *v, dm_buf *out, dm_err *e) {
    shape s = rows_shape(r->c, f, v);
    size_t want = (size_t)s.width * (size_t)(t->dtype == MODEL_U8 ? 1 : 4);
    for (int64_t i = 0; i < s.rows; i++) {
        size_t n = 0;
        int64_t pos = vrec_row_pos(f, v, i);
        const void *row = vrec_get(r, v->tag, v->layer, pos, &n);
        if (s.width == 0) continue;
        if (!row) return dm_err_set(e, DM_EMISMATCH, WHERE, "%.100s: the model showed no row %lld", t->name, (long long)pos);
        if (s.padded ? n > want : n != want)
            return dm_err_set(e, DM_EMISMATCH, WHERE, "%.100s: row %lld has %zu bytes instead of %zu", t->name, (long long)pos, n, want);
        if (put_row(out, t, row, n) < 0 || pad_row(out, v->tag, (int64_t)(want - n) / 4) < 0) return no_memory(e);
    }
    return 0;
}

/* One K or S row of the window before a cut: its lane A, or what stands in for a token before the first. */
static int prev_row(const vrec *r, const vname *v, int64_t pos, int dim, dm_buf *out, dm_err *e) {
    bool value = v->tag == FT_COMP_K || v->tag == FT_INDEX_COMP_K;
    size_t n = 0;
    if (pos < 0) {
        static const float zero = 0;
        int rc = value ? 0 : pad_row(out, FT_INDEX_SCORE, dim);
        for (int i = 0; value && i < dim && rc >= 0; i++) rc = dm_buf_append(out, &zero, 4);
        return rc < 0 ? no_memory(e) : 0;
    }
    const void *row = vrec_get(r, v->tag, v->layer, pos, &n);
    if (!row || n != (size_t)dim * 8) return dm_err_set(e, DM_EMISMATCH, WHERE, "the model showed no compressor row of position %lld", (long long)pos);
    return dm_buf_append(out, row, (size_t)dim * 4) < 0 ? no_memory(e) : 0;
}

static int cut_tensor(const vrec *r, const vname *v, dm_buf *out, dm_err *e) {
    bool index = v->tag == FT_INDEX_COMP_K || v->tag == FT_INDEX_COMP_S;
    int m = v->layer < r->c->num_hidden_layers ? r->c->compress_ratio[v->layer] : 0, dim = index ? r->c->index_head_dim : r->c->head_dim;
    if (m == 0 || ((index || v->prev) && m != 4)) return dm_err_set(e, DM_EMISMATCH, WHERE, "layer %d has no such compressor", v->layer);
    int64_t start = v->cut / m * m, from = v->prev ? start - 4 : start, to = v->prev ? start : v->cut;
    size_t want = (size_t)dim * 4 * (m == 4 ? 2 : 1);
    for (int64_t pos = from; pos < to; pos++) {
        size_t n = 0;
        if (v->prev) {
            int rc = prev_row(r, v, pos, dim, out, e);
            if (rc < 0) return rc;
            continue;
        }
        const void *row = vrec_get(r, v->tag, v->layer, pos, &n);
        if (!row || n != want) return dm_err_set(e, DM_EMISMATCH, WHERE, "the model showed no compressor row of position %lld", (long long)pos);
        if (dm_buf_append(out, row, n) < 0) return no_memory(e);
    }
    return 0;
}

int vrec_tensor(const vrec *r, const vref *f, const vref_tensor *t, const vname *name, dm_buf *out, dm_err *e) {
    int rc;
    dm_buf_clear(out);
    if (name->kind == VN_TOKENS) rc = dm_buf_append(out, f->ids, (size_t)(f->n + 1) * 4) < 0 ? no_memory(e) : 0;
    else if (name->kind == VN_POS) rc = dm_buf_append(out, f->pos, (size_t)f->npos * 4) < 0 ? no_memory(e) : 0;
    else if (name->kind == VN_CUT) rc = cut_tensor(r, name, out, e);
    else rc = rows_tensor(r, f, t, name, out, e);
    if (rc == 0 && (int64_t)out->n != t->bytes)
        return dm_err_set(e, DM_EMISMATCH, WHERE, "%.100s: %zu bytes instead of %lld: made with another configuration", t->name, out->n, (long long)t->bytes);
    return rc;
}
