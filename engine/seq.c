/* seq.c — sequences of a CPU forward: window rings, folds, blocks. */
#include <string.h>

#include "engine/forward_int.h"

uint8_t *seq_window_row(const dm_fseq *s, const fwd_layer *l, int64_t pos) {
    const fwd *f = s->f;
    size_t slot = (size_t)(pos % f->ring) * f->row_bytes;
    if (l->number == f->layers) return s->mtp_window + slot;
    return s->window + (size_t)l->number * (size_t)f->ring * f->row_bytes + slot;
}
uint8_t *seq_entry(const dm_fseq *s, const fwd_layer *l, int64_t j) {
    return s->block[j / l->per_block] + l->entry_off + (size_t)(j % l->per_block) * s->f->row_bytes;
}
uint8_t *seq_key(const dm_fseq *s, const fwd_layer *l, int64_t j) {
    return s->block[j / l->per_block] + l->key_off + (size_t)(j % l->per_block) * s->f->key_bytes;
}
uint8_t *seq_fold(const dm_fseq *s, const fwd_layer *l, bool index, bool next) {
    const fwd *f = s->f;
    uint8_t *acc = s->fold + l->fold_off;
    if (index) acc += 2 * fold_acc_bytes(f, KERN_HEAD_DIM);
    return next ? acc + fold_acc_bytes(f, index ? KERN_INDEX_DIM : KERN_HEAD_DIM) : acc;
}

void seq_reset(dm_fseq *s) {
    const fwd *f = s->f;
    for (int i = 0; i < f->layers; i++) {
        const fwd_layer *l = &f->layer[i];
        if (!l->ratio) continue;
        f->k->fold_reset(seq_fold(s, l, false, false), KERN_HEAD_DIM);
        if (l->ratio != 4) continue;
        f->k->fold_reset(seq_fold(s, l, false, true), KERN_HEAD_DIM);
        f->k->fold_reset(seq_fold(s, l, true, false), KERN_INDEX_DIM);
        f->k->fold_reset(seq_fold(s, l, true, true), KERN_INDEX_DIM);
    }
}

int seq_create(dm_forward *df, dm_fseq **out, dm_err *e) {
    fwd *f = fwd_of(df);
    dm_fseq *s = *out = dm_calloc(1, sizeof *s);
    if (!s) return dm_err_set(e, DM_ENOMEM, "sequence", "out of memory");
    s->f = f;
    s->window = dm_calloc(1, f->window_bytes);
    s->fold = dm_calloc(1, f->fold_bytes + 1);
    if (f->draft) {
        s->mtp_window = dm_calloc((size_t)f->ring, f->row_bytes);
        s->held = dm_malloc((size_t)FWD_HELD * KERN_HC * (size_t)f->c->hidden_size * sizeof *s->held);
    }
    if (!s->window || !s->fold || (f->draft && (!s->mtp_window || !s->held))) {
        seq_destroy(df, s);
        *out = NULL;
        return dm_err_set(e, DM_ENOMEM, "sequence", "out of memory for a sequence of %zu bytes", f->window_bytes + f->fold_bytes);
    }
    seq_reset(s);
    return 0;
}

void seq_destroy(dm_forward *df, dm_fseq *s) {
    (void)df;
    if (!s) return;
    for (int64_t i = 0; i < s->blocks; i++) pool_put(s->f->pool, s->block[i]);
    dm_free(s->block);
    dm_free(s->window);
    dm_free(s->fold);
    dm_free(s->logits);
    dm_free(s->mtp_window);
    dm_free(s->held);
    dm_free(s->snap);
    dm_free(s);
}

static int grow_table(dm_fseq *s, int64_t need, dm_err *e) {
    if (need <= s->blocks_cap) return 0;
    int64_t cap = s->blocks_cap ? s->blocks_cap * 2 : 8;
    if (cap < need) cap = need;
    uint8_t **p = dm_realloc(s->block, (size_t)cap * sizeof *p);
    if (!p) return dm_err_set(e, DM_ENOMEM, "sequence", "out of memory for a table of %lld blocks", (long long)cap);
    s->block = p;
    s->blocks_cap = cap;
    return 0;
}

/* What was got stays with the sequence when a later part fails; the next try uses it. */
int seq_reserve(dm_fseq *s, int64_t pos_end, bool logits, dm_err *e) {
    fwd *f = s->f;
    int64_t need = (pos_end + DM_BLOCK_TOKENS - 1) / DM_BLOCK_TOKENS;
    int rc = grow_table(s, need, e);
    while (rc == 0 && s->blocks < need) {
        rc = pool_get(f->pool, &s->block[s->blocks], e);
        if (rc == 0) s->blocks++;
    }
    if (rc == 0 && logits && !s->logits) {
        s->logits = dm_malloc((size_t)f->base.vocab * sizeof(float));
        if (!s->logits) rc = dm_err_set(e, DM_ENOMEM, "sequence", "out of memory for the logits of a sequence");
    }
    return rc;
}

void seq_trim(dm_fseq *s) {
    int64_t need = (s->pos + DM_BLOCK_TOKENS - 1) / DM_BLOCK_TOKENS;
    while (s->blocks > need) pool_put(s->f->pool, s->block[--s->blocks]);
}

int seq_reserve_snaps(dm_fseq *s, int n, dm_err *e) {
    if (n <= s->snaps) return 0;
    uint8_t *p = dm_realloc(s->snap, (size_t)n * s->f->fold_bytes + 1);
    if (!p) return dm_err_set(e, DM_ENOMEM, "sequence", "out of memory for %d tentative rows", n);
    s->snap = p;
    s->snaps = n;
    return 0;
}

int seq_block(dm_forward *df, const dm_fseq *s, int64_t i, const void **bytes, dm_err *e) {
    (void)df;
    if (i < 0 || i >= s->pos / DM_BLOCK_TOKENS)
        return dm_err_set(e, DM_EINVAL, "forward.block", "block %lld is not whole: the sequence is at position %lld", (long long)i,
                          (long long)s->pos);
    *bytes = s->block[i];
    return 0;
}

int seq_block_load(dm_forward *df, dm_fseq *s, int64_t i, const void *bytes, dm_err *e) {
    fwd *f = fwd_of(df);
    if (s->pos) return dm_err_set(e, DM_ESTATE, "forward.block_load", "blocks can be loaded into a fresh sequence only");
    if (i != s->loaded)
        return dm_err_set(e, DM_EINVAL, "forward.block_load", "block %lld comes where block %lld is due", (long long)i, (long long)s->loaded);
    if ((i + 1) * DM_BLOCK_TOKENS > f->base.ctx_tokens_max)
        return dm_err_set(e, DM_ECONTEXT, "forward.block_load", "block %lld lies behind the context of %lld tokens", (long long)i,
                          (long long)f->base.ctx_tokens_max);
    int rc = seq_reserve(s, (i + 1) * DM_BLOCK_TOKENS, false, e);
    if (rc < 0) return rc;
    memcpy(s->block[i], bytes, f->base.block_bytes);
    s->loaded++;
    return 0;
}
