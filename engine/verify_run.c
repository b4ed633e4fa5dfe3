/* verify_run.c — one traced run of a model over a test sequence, its MTP layer included. */
#include <string.h>

#include "engine/verify_int.h"

#define WHERE "verify"
#define ROWS_WHOLE_MAX 4096 /* "whole" in one step, up to here */

static int step_all(vrun *v, dm_forward *f, dm_fseq *s, int64_t chunk, dm_err *e) {
    for (int64_t at = 0; at < v->f->n; at += chunk) {
        int64_t n = v->f->n - at < chunk ? v->f->n - at : chunk;
        dm_run run = {.seq = s, .ids = v->f->ids + at, .n = (int)n};
        if (v->fn && !v->fn(v->ctx, v->what, at, v->f->n)) return dm_err_set(e, DM_ECANCELED, WHERE, "cancelled");
        int rc = f->ops->step(f, &run, 1, e);
        if (rc < 0) return rc;
    }
    return 0;
}

/* The MTP layer over every token: streams of token t with the id of token t+1. */
static int mtp_all(vrun *v, dm_forward *f, dm_fseq *s, int64_t chunk, dm_err *e) {
    const dm_config *c = dm_model_config(v->m);
    size_t width = (size_t)c->hc_mult * (size_t)c->hidden_size, n;
    if (!c->num_nextn_predict_layers) return 0;
    float *streams = dm_malloc((size_t)chunk * width * sizeof *streams), *logits = dm_malloc((size_t)chunk * (size_t)c->vocab_size * sizeof *logits);
    int rc = streams && logits ? 0 : dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    for (int64_t at = 0; at < v->f->n && rc == 0; at += chunk) {
        int64_t rows = v->f->n - at < chunk ? v->f->n - at : chunk;
        for (int64_t i = 0; i < rows && rc == 0; i++) {
            const void *h = vrec_get(v->streams, FT_H, c->num_hidden_layers - 1, at + i, &n);
            if (!h || n != width * sizeof *streams) rc = dm_err_set(e, DM_ESTATE, WHERE, "the run showed no streams of position %lld", (long long)(at + i));
            else memcpy(streams + (size_t)i * width, h, n);
        }
        if (rc == 0) rc = forward_mtp(f, s, streams, v->f->ids + at + 1, (int)rows, logits, e);
    }
    dm_free(streams);
    dm_free(logits);
    return rc;
}

static int run_sequence(vrun *v, dm_forward *f, dm_err *e) {
    int64_t chunk = f->rows_max;
    dm_fseq *s;
    int rc = f->ops->seq_create(f, &s, e);
    if (rc < 0) return rc;
    forward_set_trace(f, v->trace);
    rc = step_all(v, f, s, chunk, e);
    if (rc == 0 && v->streams->rc < 0) rc = dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    if (rc == 0) rc = mtp_all(v, f, s, chunk, e);
    forward_set_trace(f, NULL);
    f->ops->seq_destroy(f, s);
    return rc;
}

int vrun_go(vrun *v, dm_err *e) {
    int64_t whole = v->f->n < ROWS_WHOLE_MAX ? v->f->n : ROWS_WHOLE_MAX;
    dm_forward_opts o = {.numerics = v->numerics,
                         .threads = v->o->threads,
                         .isa = v->isa,
                         .rows_max = v->o->chunk > 0 ? v->o->chunk : (int)whole,
                         .ctx_tokens_max = v->f->n,
                         .switches = v->o->switches};
    dm_forward *f;
    for (int64_t i = 0; i <= v->f->n; i++)
        if (v->f->ids[i] < 0 || v->f->ids[i] >= dm_model_config(v->m)->vocab_size)
            return dm_err_set(e, DM_EFORMAT, WHERE, "token %lld has id %d, outside the vocabulary", (long long)i, v->f->ids[i]);
    if (v->f->n > dm_model_config(v->m)->max_position_embeddings)
        return dm_err_set(e, DM_EFORMAT, WHERE, "a run of %lld tokens is longer than the model's context", (long long)v->f->n);
    int rc = dm_forward_create(&f, v->m, &o, e);
    if (rc < 0) return rc;
    snprintf(v->numerics_id, sizeof v->numerics_id, "%s", f->numerics_id);
    rc = run_sequence(v, f, e);
    dm_forward_destroy(f);
    if (rc == 0 && v->streams->rc < 0) rc = dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    return rc;
}
