/* forward.c — making a model runnable on this processor, and the step.
 *
 * All memory of a step is one arena, laid out at creation for rows_max rows; a step allocates nothing but cache
 * blocks, and those before the first row is touched.  So a step that was started cannot fail. */
#include <string.h>

#include "engine/forward_int.h"

/* ---- the step ------------------------------------------------------------------------------------------ */

static int check_run(fwd *f, const dm_run *run, int i, dm_err *e) {
    const dm_fseq *s = run->seq;
    if (!s || !run->ids || run->n < 1) return dm_err_set(e, DM_EINVAL, "forward.step", "run %d has no sequence or no tokens", i);
    if (s->f != f) return dm_err_set(e, DM_EINVAL, "forward.step", "the sequence of run %d belongs to another forward", i);
    if (s->in_step) return dm_err_set(e, DM_EINVAL, "forward.step", "run %d names a sequence that the step already has", i);
    if (s->loaded) return dm_err_set(e, DM_ESTATE, "forward.step", "the sequence of run %d has blocks but no state yet", i);
    if (run->nlogits < 0 || run->nlogits > run->n || (run->nlogits && !run->logits))
        return dm_err_set(e, DM_EINVAL, "forward.step", "run %d of %d rows asks for the logits of %d", i, run->n, run->nlogits);
    if (run->tentative < 0 || run->tentative >= run->n || run->tentative > DM_DRAFT_MAX)
        return dm_err_set(e, DM_EINVAL, "forward.step", "%d rows of %d in run %d cannot be tentative", run->tentative, run->n, i);
    if (run->tentative && !f->draft)
        return dm_err_set(e, DM_ENOTSUP, "forward.step", "run %d has tentative rows, but this forward was not made for drafting", i);
    if (run->n > f->base.ctx_tokens_max - s->pos)
        return dm_err_set(e, DM_ECONTEXT, "forward.step", "%d tokens do not fit behind position %lld: the context has %lld", run->n,
                          (long long)s->pos, (long long)f->base.ctx_tokens_max);
    for (int r = 0; r < run->n; r++)
        if (run->ids[r] < 0 || run->ids[r] >= f->base.vocab)
            return dm_err_set(e, DM_EINVAL, "forward.step", "token id %d of run %d is not in the vocabulary of %d", run->ids[r], i, f->base.vocab);
    return 0;
}
/* Everything that can go wrong goes wrong here, before a row is touched. */
static int check_runs(fwd *f, const dm_run *runs, int nruns, dm_err *e) {
    int rc = 0, checked = 0;
    int64_t rows = 0;
    for (; rc == 0 && checked < nruns; checked++) {
        rc = check_run(f, &runs[checked], checked, e);
        if (rc < 0) break;
        rows += runs[checked].n;
        runs[checked].seq->in_step = true;
    }
    for (int i = 0; i < checked; i++) runs[i].seq->in_step = false;
    if (rc < 0) return rc;
    if (rows > f->base.rows_max)
        return dm_err_set(e, DM_EINVAL, "forward.step", "a step of %lld rows; at most %d are possible", (long long)rows, f->base.rows_max);
    for (int i = 0; i < nruns; i++) {
        rc = seq_reserve(runs[i].seq, runs[i].seq->pos + runs[i].n, runs[i].logits != NULL, e);
        if (rc == 0) rc = seq_reserve_snaps(runs[i].seq, runs[i].tentative, e);
        if (rc == 0) continue;
        for (int k = 0; k <= i; k++)
            if (runs[k].tentative) seq_trim(runs[k].seq); /* nobody goes without for the sake of a guess */
        return rc;
    }
    return 0;
}

static void set_rows(fwd *f, const dm_run *runs, int nruns) {
    f->rows = 0;
    f->nruns = nruns;
    for (int i = 0; i < nruns; i++) {
        f->runs[i] = (fwd_run){.seq = runs[i].seq, .row0 = f->rows, .n = runs[i].n, .pos0 = runs[i].seq->pos, .logits = runs[i].logits,
                               .nlogits = !runs[i].logits ? 0 : runs[i].nlogits ? runs[i].nlogits : 1, .tentative = runs[i].tentative,
                               .wide_at = -1, .entries_at = -1};
        for (int r = 0; r < runs[i].n; r++)
            f->row[f->rows++] = (fwd_row){.seq = runs[i].seq, .pos = runs[i].seq->pos + r, .id = runs[i].ids[r], .run = i};
    }
    fwd_angles(f);
}

/* All streams start as the token's embedding. */
static void embed_rows(fwd *f) {
    int D = f->c->hidden_size;
    for (int r = 0; r < f->rows; r++) {
        const uint16_t *w = f->w->embed + (size_t)f->row[r].id * (size_t)D;
        float *h = f->h + (size_t)r * KERN_HC * (size_t)D;
        for (int i = 0; i < D; i++) {
            uint32_t u = (uint32_t)w[i] << 16;
            memcpy(&h[i], &u, sizeof u);
        }
        for (int j = 1; j < KERN_HC; j++) memcpy(h + (size_t)j * (size_t)D, h, (size_t)D * sizeof *h);
    }
}

static bool wants_logits(const fwd *f, int r) {
    const fwd_run *run = &f->runs[f->row[r].run];
    return f->trace.all_logits || r >= run->row0 + run->n - run->nlogits;
}
static void deliver(fwd *f, int r, const float *x, const float *logits) {
    fwd_run *run = &f->runs[f->row[r].run];
    size_t bytes = (size_t)f->base.vocab * sizeof(float);
    trace_one(f, FT_HEAD_X, -1, f->row[r].pos, x, (size_t)f->c->hidden_size * sizeof(float));
    trace_one(f, FT_LOGITS, -1, f->row[r].pos, logits, bytes);
    int i = r - (run->row0 + run->n - run->nlogits);
    if (i < 0) return;
    memcpy(run->logits + (size_t)i * (size_t)f->base.vocab, logits, bytes);
    if (i < run->nlogits - 1) return;
    memcpy(run->seq->logits, logits, bytes);
    run->seq->has_logits = true;
}
static void trunk_head(fwd *f) {
    int32_t rows[FWD_LOGIT_ROWS];
    for (int r = 0; r < f->rows;) {
        int n = 0;
        for (; r < f->rows && n < FWD_LOGIT_ROWS; r++)
            if (wants_logits(f, r)) rows[n++] = r;
        if (!n) break;
        fwd_head(f, &f->w->hc_head, f->w->norm, rows, n);
        for (int i = 0; i < n; i++)
            deliver(f, rows[i], f->head_x + (size_t)i * (size_t)f->c->hidden_size, f->logits + (size_t)i * (size_t)f->base.vocab);
    }
}

static int forward_step(dm_forward *df, const dm_run *runs, int nruns, dm_err *e) {
    fwd *f = fwd_of(df);
    if (nruns < 0 || (nruns && !runs)) return dm_err_set(e, DM_EINVAL, "forward.step", "a step with %d runs", nruns);
    pthread_mutex_lock(&f->step_lock);
    int rc = check_runs(f, runs, nruns, e);
    if (rc == 0 && nruns) {
        if (f->draft) draft_before_step(f, runs, nruns);
        set_rows(f, runs, nruns);
        embed_rows(f);
        for (int i = 0; i < nruns; i++) runs[i].seq->has_logits = false;
        for (int l = 0; l < f->layers; l++) fwd_block(f, &f->layer[l]);
        trunk_head(f);
        if (f->draft) draft_after_step(f, runs, nruns);
        for (int i = 0; i < nruns; i++) {
            runs[i].seq->pos += runs[i].n;
            runs[i].seq->firm = runs[i].seq->pos - runs[i].tentative;
        }
    }
    pthread_mutex_unlock(&f->step_lock);
    return rc;
}

static int64_t forward_seq_pos(const dm_fseq *s) { return s->pos; }
static const float *forward_seq_logits(const dm_fseq *s) { return s->has_logits ? s->logits : NULL; }

static void forward_destroy(dm_forward *df) {
    fwd *f = fwd_of(df);
    workers_destroy(f->workers);
    pool_destroy(f->pool);
    pthread_mutex_destroy(&f->step_lock);
    dm_free(f->arena);
    dm_free(f->layer);
    dm_free(f);
}

static const dm_forward_ops ops = {
    .destroy = forward_destroy,
    .seq_create = seq_create,
    .seq_destroy = seq_destroy,
    .seq_pos = forward_seq_pos,
    .step = forward_step,
    .block = seq_block,
    .block_load = seq_block_load,
    .state_save = seq_state_save,
    .state_load = seq_state_load,
    .seq_logits = forward_seq_logits,
    .draft = forward_draft,
    .retreat = forward_retreat,
};

/* ---- creation -------------------------------------------------------------------------------------------- */

const char *const *dm_forward_isas(void) { return dm_kernels_isas(); }

static void make_tables(fwd *f) {
    const dm_config *c = f->c;
    dm_rope_freqs(f->freq[0], c->rope_theta, NULL);
    dm_rope_freqs(f->freq[1], c->compress_rope_theta,
                  &(kern_yarn){.factor = c->rope_factor, .beta_fast = c->rope_beta_fast, .beta_slow = c->rope_beta_slow,
                               .original_max = c->rope_original_max});
    for (int i = 0; i <= f->layers; i++) f->layer[i].cos = f->cos[f->layer[i].table], f->layer[i].sin = f->sin[f->layer[i].table];
}

/* Every layer gets its weights; where it keeps its things was decided by the shape. */
static void bind_layers(fwd *f) {
    for (int i = 0; i <= f->layers; i++)
        if (i < f->layers || f->w->mtp) f->layer[i].w = i < f->layers ? &f->w->layer[i] : &f->w->mtp->block;
}

/* Refuses what does not fit; *o gets the context that does when none was asked for. */
static int check_memory(const fwd *f, dm_forward_opts *o, dm_err *e) {
    dm_plan p;
    if (o->mem_bytes_max < 0) return 0;
    int rc = dm_model_plan(f->c, &(dm_plan_opts){.forward = *o, .mem_bytes = o->mem_bytes_max ? o->mem_bytes_max : dm_memory_limit()}, &p, e);
    if (rc == 0) rc = dm_plan_check(&p, e);
    if (rc < 0 || o->ctx_tokens_max) return rc;
    if (p.ctx_tokens < f->c->max_position_embeddings)
        dm_log(DM_LOG_WARN, "forward: the context is %lld tokens, which is what fits in memory; the model could have %lld", (long long)p.ctx_tokens,
               (long long)f->c->max_position_embeddings);
    o->ctx_tokens_max = p.ctx_tokens;
    return 0;
}

static int build(fwd *f, const dm_forward_opts *asked, dm_err *e) {
    dm_forward_opts opts = *asked, *o = &opts;
    int rc = check_memory(f, o, e);
    if (rc == 0) rc = fwd_shape(f, o, e);
    if (rc < 0) return rc;
    f->base.ops = &ops;
    bind_layers(f);
    size_t bytes = fwd_lay_out(f, NULL);
    f->arena = dm_aligned(64, bytes);
    if (!f->arena) return dm_err_set(e, DM_ENOMEM, "forward", "out of memory for %zu bytes of scratch; fewer rows per step need less", bytes);
    memset(f->arena, 0, bytes); /* taken now, as the account says, and not when the first long step comes */
    fwd_lay_out(f, f->arena);
    make_tables(f);
    rc = pool_create(&f->pool, f->base.block_bytes, o->pool_bytes_max, e);
    if (rc == 0) rc = workers_create(&f->workers, f->threads, fwd_scratch_bytes(f), e);
    return rc;
}

int dm_forward_create(dm_forward **out, const dm_model *m, const dm_forward_opts *o, dm_err *e) {
    static const dm_forward_opts defaults = {0};
    *out = NULL;
    if (!m) return dm_err_set(e, DM_EINVAL, "forward", "no model");
    fwd *f = dm_calloc(1, sizeof *f);
    if (!f) return dm_err_set(e, DM_ENOMEM, "forward", "out of memory");
    f->model = m;
    f->c = dm_model_config(m);
    f->w = model_weights_of(m);
    pthread_mutex_init(&f->step_lock, NULL);
    int rc = build(f, o ? o : &defaults, e);
    if (rc < 0) {
        forward_destroy(&f->base);
        return rc;
    }
    *out = &f->base;
    return 0;
}
