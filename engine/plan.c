/* plan.c — what a model needs, from config.json alone: weights, cache, sequences, workspaces; and whether that fits.
 *
 * Sizes of a forward are those of forward_size.c and workers.c, which also make it; only what the operating system does
 * with mapped files is a rule of its own here (resident_bytes). */
#include <string.h>

#include "engine/forward_int.h"
#include "engine/model_tensors_int.h"
#include "engine/plan_int.h"
#include "engine/safetensors_int.h"

#define WHERE "plan"
#define FAULT_BYTES 65536 /* the kernel maps that much around a page that is read */
#define CTX_TOKENS_LEAST 4096 /* a context that nobody asked for is not cut below this */
#define STACK_BYTES 65536 /* of a worker thread, as far as it is touched */

/* ---- weights -------------------------------------------------------------------------------------- */

static int add_tensor(void *ctx, model_want *w) {
    dm_plan *p = ctx;
    int64_t bytes = model_want_bytes(w), *const part[MODEL_PARTS] = {
        [MODEL_PART_EXPERT] = &p->weight_bytes_expert, [MODEL_PART_SHARED] = &p->weight_bytes_shared, [MODEL_PART_ATTN] = &p->weight_bytes_attn,
        [MODEL_PART_INDEX] = &p->weight_bytes_index,   [MODEL_PART_ROUTER] = &p->weight_bytes_router, [MODEL_PART_EMBED] = &p->weight_bytes_embed,
        [MODEL_PART_HEAD] = &p->weight_bytes_head};
    p->weight_bytes += bytes;
    p->weight_tensors++;
    *(w->mtp ? &p->weight_bytes_mtp : part[w->part]) += bytes;
    /* An entry in its shard's list and one in the model's, the name, and the JSON of the headers on the way. */
    p->table_bytes += 2 * (int64_t)sizeof(model_tensor) + (int64_t)strlen(w->name) + 1 + PLAN_JSON_BYTES;
    return 0;
}

static int add_weights(const dm_config *c, dm_plan *p, dm_err *e) {
    model_table table;
    int rc = model_table_init(&table, c, e);
    if (rc < 0) return rc;
    rc = model_table_walk(&table, c, add_tensor, p); /* add_tensor never fails */
    model_table_free(&table);
    p->table_bytes += (int64_t)(c->num_hidden_layers + 1) * c->n_routed_experts * (int64_t)sizeof(model_expert);
    return rc;
}

/* Weights are mapped and may be thrown out and read again, but a step that waits for the disk is no step: everything that
 * tokens can reach counts in full.  Of the embedding only the rows of tokens that occur are read, with their surroundings. */
static int64_t resident_bytes(const dm_config *c, const dm_plan *p, bool draft) {
    int64_t ids = p->ctx_tokens < c->vocab_size ? p->ctx_tokens : c->vocab_size;
    int64_t row = (int64_t)c->hidden_size * 2, touched = ids * (row > FAULT_BYTES ? row + FAULT_BYTES : FAULT_BYTES);
    int64_t embed = touched < p->weight_bytes_embed ? touched : p->weight_bytes_embed;
    return p->weight_bytes - p->weight_bytes_embed - (draft ? 0 : p->weight_bytes_mtp) + embed;
}

/* ---- cache ------------------------------------------------------------------------------------------ */

/* The way in which the figures of the model's authors count: bf16, window included, no residual state. */
static int64_t bf16_bytes(const dm_config *c, int ratio, int64_t tokens) {
    int64_t entries = ratio ? tokens / ratio : 0;
    return (c->sliding_window + entries) * c->head_dim * 2 + (ratio == 4 ? entries * c->index_head_dim * 2 : 0);
}

static int64_t blocks_of(int64_t tokens) { return (tokens + DM_BLOCK_TOKENS - 1) / DM_BLOCK_TOKENS; }

static void add_cache(const dm_config *c, const fwd *f, dm_plan *p) {
    int64_t max = c->max_position_embeddings;
    p->block_bytes = (int64_t)f->base.block_bytes;
    p->kv_bytes_at_max = p->block_bytes * blocks_of(max);
    p->window_bytes = (int64_t)f->window_bytes;
    /* the largest state is cut one token before a block is whole */
    p->state_bytes_max = PLAN_STATE_HEADER + p->window_bytes / f->ring * (FWD_WINDOW - 1) + (int64_t)f->fold_bytes;
    for (int i = 0; i < f->layers; i++) {
        const fwd_layer *l = &f->layer[i];
        p->kv_bytes_bf16_at_max += bf16_bytes(c, l->ratio, max);
        if (l->ratio) p->state_bytes_max += (DM_BLOCK_TOKENS - 1) / l->ratio * (int64_t)(f->row_bytes + (l->ratio == 4 ? f->key_bytes : 0));
    }
    p->kv_bytes_per_token = (double)p->block_bytes / DM_BLOCK_TOKENS;
}

/* ---- the whole ---------------------------------------------------------------------------------------- */

/* All that depends on the context: p->ctx_tokens → need_bytes and its parts.  The weights are already in p. */
static int add_context(const dm_config *c, const dm_plan_opts *o, int64_t ctx, dm_plan *p, dm_err *e) {
    dm_forward_opts fo = o->forward;
    fwd f = {.c = c};
    fo.ctx_tokens_max = ctx;
    int rc = fwd_shape(&f, &fo, e);
    if (rc == 0) {
        p->ctx_tokens = f.base.ctx_tokens_max, p->rows = f.base.rows_max, p->threads = f.threads;
        p->kv_bytes_bf16_at_max = 0;
        add_cache(c, &f, p);
        p->kv_bytes = p->block_bytes * blocks_of(p->ctx_tokens);
        if (fo.pool_bytes_max > 0 && p->kv_bytes > fo.pool_bytes_max) p->kv_bytes = fo.pool_bytes_max;
        p->scratch_bytes = (int64_t)fwd_lay_out(&f, NULL);
        p->worker_bytes = (int64_t)workers_bytes(f.threads, fwd_scratch_bytes(&f)) + (int64_t)f.threads * STACK_BYTES;
        /* window and folds; logits in the sequence and once more, or once for each drafted row, for who samples from them */
        p->sequence_bytes = (int64_t)(f.window_bytes + f.fold_bytes + fwd_draft_bytes(&f))
                            + (2 + (f.draft ? DM_DRAFT_MAX + 1 : 0)) * (int64_t)c->vocab_size * (int64_t)sizeof(float);
        p->weight_bytes_resident = resident_bytes(c, p, fo.draft);
        p->need_bytes = p->weight_bytes_resident + p->table_bytes + p->scratch_bytes + p->worker_bytes + p->sequence_bytes + p->kv_bytes + o->other_bytes;
    }
    dm_free(f.layer);
    return rc;
}

/* Whole blocks of context under the bound; need_bytes grows with the context. */
static int find_fit(const dm_config *c, const dm_plan_opts *o, dm_plan *p, dm_err *e) {
    int64_t lo = 0, hi = blocks_of(c->max_position_embeddings) + 1; /* lo fits or is 0, hi does not */
    while (hi - lo > 1) {
        int64_t mid = lo + (hi - lo) / 2, ctx = mid * DM_BLOCK_TOKENS;
        dm_plan at = *p;
        int rc = add_context(c, o, ctx < c->max_position_embeddings ? ctx : c->max_position_embeddings, &at, e);
        if (rc < 0) return rc;
        if (at.need_bytes <= o->mem_bytes) lo = mid;
        else hi = mid;
    }
    int64_t fit = lo * DM_BLOCK_TOKENS;
    p->ctx_tokens_fit = fit < c->max_position_embeddings ? fit : c->max_position_embeddings;
    return 0;
}

int dm_model_plan(const dm_config *c, const dm_plan_opts *o, dm_plan *out, dm_err *e) {
    static const dm_plan_opts defaults = {0};
    dm_plan p = {.ctx_tokens_fit = -1};
    if (!o) o = &defaults;
    int rc = add_weights(c, &p, e);
    p.mem_bytes = o->mem_bytes, p.other_bytes = o->other_bytes;
    if (rc == 0 && o->mem_bytes > 0) rc = find_fit(c, o, &p, e);
    if (rc == 0) rc = add_context(c, o, o->forward.ctx_tokens_max, &p, e);
    int64_t least = c->max_position_embeddings < CTX_TOKENS_LEAST ? c->max_position_embeddings : CTX_TOKENS_LEAST;
    if (rc == 0 && !o->forward.ctx_tokens_max && o->mem_bytes > 0 && p.need_bytes > o->mem_bytes && p.ctx_tokens_fit >= least)
        rc = add_context(c, o, p.ctx_tokens_fit, &p, e);
    if (rc == 0) *out = p;
    return rc;
}

int dm_plan_check(const dm_plan *p, dm_err *e) {
    char need[24], have[24], weights[24], kv[24], rest[24], ways[160];
    if (p->mem_bytes <= 0 || p->need_bytes <= p->mem_bytes) return 0;
    dm_bytes_text(need, sizeof need, (uint64_t)p->need_bytes), dm_bytes_text(have, sizeof have, (uint64_t)p->mem_bytes);
    dm_bytes_text(weights, sizeof weights, (uint64_t)p->weight_bytes_resident), dm_bytes_text(kv, sizeof kv, (uint64_t)p->kv_bytes);
    dm_bytes_text(rest, sizeof rest, (uint64_t)(p->need_bytes - p->weight_bytes_resident - p->kv_bytes));
    if (p->weight_bytes_resident > p->mem_bytes)
        snprintf(ways, sizeof ways, "the weights alone do not fit: take a smaller model or a machine with more memory");
    else if (p->ctx_tokens_fit >= DM_BLOCK_TOKENS)
        snprintf(ways, sizeof ways, "a context of %lld tokens would fit (--context), and fewer rows per step (--rows) need less", (long long)p->ctx_tokens_fit);
    else snprintf(ways, sizeof ways, "not even a context of %d tokens fits; fewer rows per step (--rows) or threads (--threads) need less", DM_BLOCK_TOKENS);
    return dm_err_set(e, DM_ELIMIT, WHERE, "the model needs %s (weights %s, KV of %lld tokens %s, the rest %s) and %s may be used: %s; --memory SIZE sets another bound",
                      need, weights, (long long)p->ctx_tokens, kv, rest, have, ways);
}
