/* verify_mtp.c — what the MTP layer of a checkpoint would be worth: how often its greedy draft is the trunk's next token. */
#include <string.h>

#include "engine/verify_int.h"

#define WHERE "mtp"
#define ROWS_MAX 512 /* streams of so many rows are kept */
#define ROWS_STEP 16 /* logits of so many */

static int argmax(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

typedef struct watch {
    int64_t n;
    int last_layer, vocab;
    size_t width;     /* floats of a row of streams */
    float *streams;   /* [n][width] */
    int32_t *next;    /* [n] the trunk's greedy token behind each position */
} watch;

static void see_row(void *ctx, forward_tag tag, int layer, int64_t pos, const void *data, size_t nbytes) {
    watch *w = ctx;
    if (pos >= w->n) return;
    if (tag == FT_H && layer == w->last_layer && nbytes == w->width * sizeof(float)) memcpy(w->streams + (size_t)pos * w->width, data, nbytes);
    if (tag == FT_LOGITS && layer < 0) w->next[pos] = argmax(data, w->vocab);
}

static int trunk(dm_forward *f, dm_fseq *s, const int32_t *ids, int64_t n, dm_err *e) {
    int rc = 0;
    for (int64_t at = 0; at < n && rc == 0; at += f->rows_max) {
        int64_t rows = n - at < f->rows_max ? n - at : f->rows_max;
        rc = f->ops->step(f, &(dm_run){.seq = s, .ids = ids + at, .n = (int)rows}, 1, e);
    }
    return rc;
}

/* Row t drafts the token at t + 2 from the streams of t and the id of t + 1; the trunk chooses it at t + 1. */
static int drafts(dm_forward *f, dm_fseq *s, const watch *w, const int32_t *ids, int64_t *agree, dm_err *e) {
    float *logits = dm_malloc((size_t)ROWS_STEP * (size_t)f->vocab * sizeof *logits);
    int rc = logits ? 0 : dm_err_set(e, DM_ENOMEM, WHERE, "out of memory for logits");
    for (int64_t at = 0; at < w->n - 1 && rc == 0; at += ROWS_STEP) {
        int64_t rows = w->n - 1 - at < ROWS_STEP ? w->n - 1 - at : ROWS_STEP;
        rc = forward_mtp(f, s, w->streams + (size_t)at * w->width, ids + at + 1, (int)rows, logits, e);
        for (int64_t i = 0; i < rows && rc == 0; i++) *agree += argmax(logits + (size_t)i * (size_t)f->vocab, f->vocab) == w->next[at + i + 1];
    }
    dm_free(logits);
    return rc;
}

int dm_model_mtp_agreement(const dm_model *m, const dm_forward_opts *o, const int32_t *ids, int64_t n, int64_t *rows, int64_t *agree, dm_err *e) {
    const dm_config *c = dm_model_config(m);
    watch w = {.n = n < ROWS_MAX ? n : ROWS_MAX, .last_layer = c->num_hidden_layers - 1, .vocab = c->vocab_size, .width = (size_t)c->hc_mult * (size_t)c->hidden_size};
    dm_forward *f = NULL;
    dm_fseq *s = NULL;
    *rows = *agree = 0;
    if (!c->num_nextn_predict_layers) return dm_err_set(e, DM_ENOTSUP, WHERE, "the model has no MTP layer");
    if (w.n < 2) return dm_err_set(e, DM_EINVAL, WHERE, "a draft needs two tokens at least");
    w.streams = dm_malloc((size_t)w.n * w.width * sizeof *w.streams);
    w.next = dm_calloc((size_t)w.n, sizeof *w.next);
    int rc = w.streams && w.next ? dm_forward_create(&f, m, o, e) : dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    if (rc == 0) rc = f->ops->seq_create(f, &s, e);
    if (rc == 0) {
        forward_trace t = {.ctx = &w, .row = see_row, .all_logits = true};
        forward_set_trace(f, &t);
        rc = trunk(f, s, ids, w.n, e);
        forward_set_trace(f, NULL);
    }
    if (rc == 0) rc = drafts(f, s, &w, ids, agree, e);
    if (rc == 0) *rows = w.n - 1;
    if (s) f->ops->seq_destroy(f, s);
    dm_forward_destroy(f);
    dm_free(w.streams);
    dm_free(w.next);
    return rc;
}
