/* plan.c — what a model needs, from config.json alone: weights as stored, cache, states, one step. */
#include <string.h>

#include "engine/model_tensors_int.h"
#include "engine/plan_int.h"

/* ---- weights -------------------------------------------------------------------------------------- */

static int add_tensor(void *ctx, model_want *w) {
    dm_plan *p = ctx;
    int64_t bytes = model_want_bytes(w);
    p->weight_bytes += bytes;
    p->weight_tensors++;
    if (w->part == MODEL_PART_EXPERT) p->weight_bytes_expert += bytes;
    else if (w->part == MODEL_PART_ATTN) p->weight_bytes_attn += bytes;
    else p->weight_bytes_other += bytes;
    return 0;
}

/* ---- cache ------------------------------------------------------------------------------------------ */

/* Packed bytes of the entries that `tokens` positions complete in one layer. */
int64_t plan_entry_bytes(int ratio, int64_t tokens) {
    if (ratio == 0) return 0;
    return tokens / ratio * (PLAN_ENTRY_BYTES + (ratio == 4 ? PLAN_INDEX_BYTES : 0));
}

/* The way in which the figures of the model's authors count: bf16, window included, no residual state. */
static int64_t bf16_bytes(const dm_config *c, int ratio, int64_t tokens) {
    int64_t entries = ratio ? tokens / ratio : 0;
    return (c->sliding_window + entries) * c->head_dim * 2 + (ratio == 4 ? entries * c->index_head_dim * 2 : 0);
}

/* What a half-built entry keeps: per lane and channel a running maximum, sum and weighted sum. */
static int64_t fold_bytes(const dm_config *c, int ratio) {
    if (ratio == 0) return 0;
    int64_t lanes = ratio == 4 ? 2 : 1, channels = c->head_dim + (ratio == 4 ? c->index_head_dim : 0);
    return lanes * channels * 3 * (int64_t)sizeof(float);
}

static void add_cache(const dm_config *c, dm_plan *p) {
    int64_t max = c->max_position_embeddings, window = (int64_t)c->sliding_window * PLAN_ENTRY_BYTES;
    for (int i = 0; i < c->num_hidden_layers; i++) {
        int m = c->compress_ratio[i];
        p->block_bytes += plan_entry_bytes(m, DM_BLOCK_TOKENS);
        p->kv_bytes_at_max += plan_entry_bytes(m, max);
        p->kv_bytes_bf16_at_max += bf16_bytes(c, m, max);
        p->window_bytes += window;
        /* the largest state is cut one token before a block is whole */
        p->state_bytes_max += window - PLAN_ENTRY_BYTES + plan_entry_bytes(m, DM_BLOCK_TOKENS - 1) + fold_bytes(c, m);
    }
    p->state_bytes_max += PLAN_STATE_HEADER;
    p->kv_bytes_per_token = (double)p->block_bytes / DM_BLOCK_TOKENS;
}

/* ---- one step ----------------------------------------------------------------------------------------- */

/* Floats of one row of a step: streams and their mixes, the query path, compressor rows, the experts' inner and
 * outer vectors; then what rows share: index scores, widened cache rows, logits. */
static int64_t scratch_bytes(const dm_config *c) {
    int64_t D = c->hidden_size, heads = (int64_t)c->num_attention_heads * c->head_dim, k = c->num_experts_per_tok, d = c->head_dim;
    int64_t attn = 2 * (int64_t)c->q_lora_rank + heads + (int64_t)c->o_groups * c->o_lora_rank + (int64_t)c->index_n_heads * c->index_head_dim;
    int64_t moe = (k + 1) * (2 * (int64_t)c->moe_intermediate_size + D) + 2 * c->n_routed_experts;
    int64_t row = (c->hc_mult + 3) * D + attn + moe + 6 * d + 4 * c->index_head_dim + c->index_topk;
    int64_t entries = c->max_position_embeddings / 4;
    int64_t shared = PLAN_SCORES + (4 * PLAN_ROWS + (entries < PLAN_WIDE_MAX ? entries : PLAN_WIDE_MAX)) * d + PLAN_LOGIT_ROWS * (int64_t)c->vocab_size;
    return (int64_t)sizeof(float) * (PLAN_ROWS * row + shared);
}

/* Whole blocks beside the weights, one sequence's window and state, and one step. */
static int64_t tokens_that_fit(const dm_config *c, const dm_plan *p, int64_t mem) {
    int64_t left = mem - p->weight_bytes - p->scratch_bytes - p->window_bytes - p->state_bytes_max;
    if (left < 0) return 0;
    int64_t tokens = p->block_bytes ? left / p->block_bytes * DM_BLOCK_TOKENS : c->max_position_embeddings;
    return tokens < c->max_position_embeddings ? tokens : c->max_position_embeddings;
}

int dm_model_plan(const dm_config *c, int64_t mem_bytes, dm_plan *out, dm_err *e) {
    dm_plan p = {.ctx_tokens_fit = -1};
    model_table table;
    int rc = model_table_init(&table, c, e);
    if (rc < 0) return rc;
    model_table_walk(&table, c, add_tensor, &p); /* add_tensor never fails */
    model_table_free(&table);
    add_cache(c, &p);
    p.scratch_bytes = scratch_bytes(c);
    if (mem_bytes > 0) p.ctx_tokens_fit = tokens_that_fit(c, &p, mem_bytes);
    *out = p;
    return 0;
}
