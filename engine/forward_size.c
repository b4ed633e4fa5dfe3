/* forward_size.c — what a forward needs, from a configuration and options alone: kernels, offsets, workspaces.
 *
 * Making a forward and planning one go through the same functions, so that the plan cannot say anything else. */
#include <math.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "engine/forward_int.h"

#define ROWS_DEFAULT 256
#define ROWS_LIMIT 65536
#define THREADS_LIMIT 1024
#define SCORE_FLOATS ((int64_t)4 << 20) /* index scores held at once, unless one row alone needs more */

/* ---- sizes ------------------------------------------------------------------------------------------ */

/* The arena is walked twice: once to count, once to hand out. */
typedef struct carve { uint8_t *base; size_t at; } carve;
static void *take(carve *c, size_t count, size_t size) {
    void *p = c->base ? c->base + c->at : NULL;
    c->at += (count * size + 63) / 64 * 64;
    return p;
}

static void lay_out(fwd *f, carve *a) {
    const dm_config *c = f->c;
    size_t R = (size_t)f->base.rows_max, real = (size_t)f->k->real_bytes, F = sizeof(float);
    size_t D = (size_t)c->hidden_size, H = (size_t)c->num_attention_heads, Hi = (size_t)c->index_n_heads, rq = (size_t)c->q_lora_rank;
    size_t k = (size_t)c->num_experts_per_tok, E = (size_t)c->n_routed_experts, I = (size_t)c->moe_intermediate_size, V = (size_t)c->vocab_size;
    size_t heads = R < FWD_LOGIT_ROWS ? R : FWD_LOGIT_ROWS;
    f->row = take(a, R, sizeof *f->row);
    f->runs = take(a, R, sizeof *f->runs);
    for (int t = 0; t < 2; t++) {
        f->cos[t] = take(a, R, sizeof *f->cos[t]);
        f->sin[t] = take(a, R, sizeof *f->sin[t]);
    }
    f->h = take(a, R * KERN_HC * D, F);
    f->mix = take(a, R * KERN_HC_MIX, real);
    f->split = take(a, R * KERN_HC_MIX, real);
    f->split_f32 = take(a, R * KERN_HC_MIX, F);
    f->x = take(a, R * D, F);
    f->xq = take(a, R * D, F);
    f->qr = take(a, R * rq, F);
    f->qrq = take(a, R * rq, F);
    f->q = take(a, R * H * KERN_HEAD_DIM, F);
    f->kv = take(a, R * KERN_HEAD_DIM, F);
    f->kv_row = take(a, R, f->row_bytes);
    f->ck = take(a, R * 2 * KERN_HEAD_DIM, F);
    f->cs = take(a, R * 2 * KERN_HEAD_DIM, F);
    f->ik = take(a, R * 2 * KERN_INDEX_DIM, F);
    f->is = take(a, R * 2 * KERN_INDEX_DIM, F);
    f->iq = take(a, R * Hi * KERN_INDEX_DIM, F);
    f->iw = take(a, R * Hi, F);
    f->pooled = take(a, R * KERN_HEAD_DIM, real);
    f->pooled_index = take(a, R * KERN_INDEX_DIM, real);
    f->sel = take(a, R * (size_t)f->topk_max, sizeof(int32_t));
    f->nsel = take(a, R, sizeof(int32_t));
    f->sel_margin = take(a, R, F);
    if (f->draft) {
        f->mtp_g = take(a, R * KERN_HC * D, F);
        f->mtp_e = take(a, R * D, F);
    }
    f->score = take(a, (size_t)f->score_cap, F);
    f->scores = take(a, R, sizeof *f->scores);
    f->z = take(a, R * (size_t)c->o_groups * (size_t)c->o_lora_rank, F);
    f->y = take(a, R * D, F);
    f->wide = take(a, (size_t)(f->wide_cap + f->entries_cap), KERN_ROW_F32_BYTES);
    f->widen = take(a, R, sizeof *f->widen);
    f->router = take(a, R * E, real);
    f->route_id = take(a, R * k, sizeof(int32_t));
    f->route_w = take(a, R * k, real);
    f->route_w_f32 = take(a, R * k, F);
    f->route_margin = take(a, R, F);
    f->slot = take(a, R * k, sizeof(int32_t));
    f->expert_row = take(a, R * k, sizeof(int32_t));
    f->slot_route = take(a, R * k, sizeof(int32_t));
    f->expert_at = take(a, E + 1, sizeof(int32_t));
    f->eg = take(a, R * (k + 1) * I, F);
    f->eu = take(a, R * (k + 1) * I, F);
    f->ey = take(a, R * (k + 1) * D, F);
    f->head_h = take(a, heads * KERN_HC * D, F);
    f->head_x = take(a, heads * D, F);
    f->logits = take(a, heads * V, F);
    f->group = take(a, (size_t)f->groups_cap, sizeof *f->group);
    f->linear = take(a, (size_t)f->groups_cap, sizeof *f->linear);
    f->fold = take(a, 2 * R, sizeof *f->fold);
    f->entry = take(a, 2 * R, sizeof *f->entry);
}

size_t fwd_lay_out(fwd *f, void *arena) {
    carve a = {.base = arena};
    lay_out(f, &a);
    return a.at;
}

static int max_int(int a, int b) { return a > b ? a : b; }

static void count_sizes(fwd *f) {
    const dm_config *c = f->c;
    int64_t ctx = f->base.ctx_tokens_max, R = f->base.rows_max;
    bool c4 = false, c128 = false;
    for (int l = 0; l < f->layers; l++) c4 |= f->layer[l].ratio == 4, c128 |= f->layer[l].ratio == 128;
    int64_t entries4 = c4 ? ctx / 4 : 0, entries128 = c128 ? ctx / 128 : 0;
    f->topk_max = (int)(entries4 < c->index_topk ? entries4 : c->index_topk) + 1;
    f->keys_max = FWD_WINDOW + (int)(entries128 > f->topk_max ? entries128 : f->topk_max);
    f->score_cap = R * entries4 < SCORE_FLOATS ? R * entries4 : SCORE_FLOATS;
    if (f->score_cap < entries4) f->score_cap = entries4;
    if (f->row_fp8 && R >= FWD_WIDEN_ROWS) {
        int64_t runs = R / FWD_WIDEN_ROWS < FWD_WIDEN_RUNS ? R / FWD_WIDEN_ROWS : FWD_WIDEN_RUNS;
        f->wide_cap = R + (FWD_WINDOW - 1) * runs;
        f->entries_cap = c4 ? entries4 : entries128;
        if (f->entries_cap > FWD_WIDEN_ENTRIES) f->entries_cap = FWD_WIDEN_ENTRIES;
    }
    f->in_max = max_int(KERN_HC * c->hidden_size, max_int(c->q_lora_rank, c->moe_intermediate_size));
    f->in_max = max_int(f->in_max, max_int(c->num_attention_heads * KERN_HEAD_DIM / c->o_groups, c->o_groups * c->o_lora_rank));
    f->groups_cap = max_int(2 * c->n_routed_experts + 2, max_int(4 * (int)R + 16, c->o_groups + 1));
    f->index_c = (float)(1.0 / sqrt((double)KERN_INDEX_DIM * c->index_n_heads));
}

static size_t max_size(size_t a, size_t b) { return a > b ? a : b; }
size_t fwd_scratch_bytes(fwd *f) {
    const dm_config *c = f->c;
    int heads = c->num_attention_heads < FWD_HEADS_TASK ? c->num_attention_heads : FWD_HEADS_TASK;
    f->key_list_bytes = ((size_t)f->keys_max * sizeof(void *) + 63) / 64 * 64;
    f->seg_bytes = 256; /* 1024 keys touch at most 17 blocks of 64 */
    size_t n = f->k->workspace_bytes(KERN_LINEAR, &(kern_linear){.w = {.in = f->in_max, .out = 4}});
    n = max_size(n, f->key_list_bytes + f->k->workspace_bytes(KERN_ATTENTION, &(kern_attention){.heads = heads, .keys = f->keys_max}));
    n = max_size(n, f->seg_bytes + f->k->workspace_bytes(KERN_INDEX_SCORE, &(kern_index_score){.heads = c->index_n_heads}));
    n = max_size(n, f->k->workspace_bytes(KERN_ROUTE, &(kern_route){.experts = c->n_routed_experts}));
    return max_size(n, (size_t)(c->num_experts_per_tok + 1) * sizeof(void *));
}

size_t fold_acc_bytes(const fwd *f, int dim) { return 3 * (size_t)dim * (size_t)f->k->real_bytes; }

size_t fwd_draft_bytes(const fwd *f) {
    size_t streams = KERN_HC * (size_t)f->c->hidden_size * sizeof(float);
    return f->draft ? (size_t)f->ring * f->row_bytes + FWD_HELD * streams + DM_DRAFT_MAX * f->fold_bytes : 0;
}

/* Where every layer keeps its entries in a block and its accumulators in the fold memory. */
static int place_layers(fwd *f, dm_err *e) {
    const dm_config *c = f->c;
    f->layers = c->num_hidden_layers;
    f->layer = dm_calloc((size_t)f->layers + 1, sizeof *f->layer);
    if (!f->layer) return dm_err_set(e, DM_ENOMEM, "forward", "out of memory for %d layers", f->layers);
    for (int i = 0; i <= f->layers; i++) {
        fwd_layer *l = &f->layer[i];
        if (i == f->layers && !c->num_nextn_predict_layers) break;
        l->number = i;
        l->ratio = c->compress_ratio[i];
        l->table = l->ratio ? 1 : 0;
        if (i == f->layers || !l->ratio) continue;
        l->per_block = DM_BLOCK_TOKENS / l->ratio;
        l->entry_off = f->base.block_bytes;
        f->base.block_bytes += (size_t)l->per_block * f->row_bytes;
        l->fold_off = f->fold_bytes;
        f->fold_bytes += fold_acc_bytes(f, KERN_HEAD_DIM) * (l->ratio == 4 ? 2 : 1);
        if (l->ratio != 4) continue;
        l->key_off = f->base.block_bytes;
        f->base.block_bytes += (size_t)l->per_block * f->key_bytes;
        f->fold_bytes += 2 * fold_acc_bytes(f, KERN_INDEX_DIM);
    }
    f->window_bytes = (size_t)f->layers * (size_t)f->ring * f->row_bytes;
    return 0;
}

/* ---- options ------------------------------------------------------------------------------------------------- */

static int cores(void) {
    cpu_set_t set;
    int n = sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
    return n > 0 ? n : 1;
}

static const struct { dm_switch bit; const char *name, *id; } switches[] = {
    {DM_SWITCH_SHARED_UNCLAMPED, "shared-unclamped", "+noclamp"},
    {DM_SWITCH_KV_BF16, "kv-bf16", "+kvbf16"},
    {DM_SWITCH_INDEX_F32, "index-f32", "+idxf32"},
};

int dm_switch_parse(const char *text, unsigned *out, dm_err *e) {
    *out = 0;
    for (const char *p = text; *p;) {
        size_t n = strcspn(p, ","), i = 0;
        while (i < DM_COUNT(switches) && (strlen(switches[i].name) != n || memcmp(switches[i].name, p, n) != 0)) i++;
        if (i == DM_COUNT(switches))
            return dm_err_set(e, DM_EUSAGE, "forward", "'%.*s' is no debug switch; there are %s, %s and %s", (int)(n < 80 ? n : 80), p, switches[0].name,
                              switches[1].name, switches[2].name);
        *out |= switches[i].bit;
        p += n + (p[n] == ',');
    }
    return 0;
}

/* What the switches change is part of what bytes mean, so the numerics id names them. */
static int apply_switches(fwd *f, unsigned on, dm_err *e) {
    unsigned known = 0;
    for (size_t i = 0; i < DM_COUNT(switches); i++) {
        known |= switches[i].bit;
        size_t n = strlen(f->base.numerics_id);
        if (on & switches[i].bit) snprintf(f->base.numerics_id + n, sizeof f->base.numerics_id - n, "%s", switches[i].id);
    }
    if (on & ~known) return dm_err_set(e, DM_EINVAL, "forward", "switches 0x%x are not all known", on);
    if (!f->round && on & (DM_SWITCH_KV_BF16 | DM_SWITCH_INDEX_F32))
        return dm_err_set(e, DM_EINVAL, "forward", "the plain path rounds neither cache rows nor index keys: there is nothing to switch off");
    f->shared_clamp = !(on & DM_SWITCH_SHARED_UNCLAMPED);
    f->row_fp8 = f->round && !(on & DM_SWITCH_KV_BF16);
    f->key_fp4 = f->round && !(on & DM_SWITCH_INDEX_F32);
    f->row_bytes = f->row_fp8 ? KERN_ROW_FP8_BYTES : KERN_ROW_F32_BYTES;
    f->key_bytes = f->key_fp4 ? KERN_KEY_FP4_BYTES : KERN_KEY_F32_BYTES;
    return 0;
}

static int choose_kernels(fwd *f, const dm_forward_opts *o, dm_err *e) {
    f->numerics = o->numerics;
    f->k = dm_kernels_get(o->isa);
    if (!f->k) {
        char list[64] = "";
        for (const char *const *i = dm_kernels_isas(); *i; i++)
            snprintf(list + strlen(list), sizeof list - strlen(list), "%s%s", *list ? ", " : "", *i);
        return dm_err_set(e, DM_ENOTSUP, "forward", "no instruction set '%s' here; this processor has: %s", o->isa, list);
    }
    switch (o->numerics) {
    case DM_NUM_EXACT:
        f->k = dm_kernels_exact();
        snprintf(f->base.numerics_id, sizeof f->base.numerics_id, "exact");
        break;
    case DM_NUM_FAST: snprintf(f->base.numerics_id, sizeof f->base.numerics_id, "fast/%s", f->k->isa); break;
    case DM_NUM_PLAIN: snprintf(f->base.numerics_id, sizeof f->base.numerics_id, "plain/%s", f->k->isa); break;
    default: return dm_err_set(e, DM_EINVAL, "forward", "numerics %d is none of fast, exact, plain", (int)o->numerics);
    }
    f->round = o->numerics != DM_NUM_PLAIN;
    f->kind = f->round ? KERN_OUT_BF16 : KERN_OUT_F32;
    return apply_switches(f, o->switches, e);
}

static int check_opts(const fwd *f, const dm_forward_opts *o, dm_err *e) {
    if (o->rows_max < 0 || o->rows_max > ROWS_LIMIT)
        return dm_err_set(e, DM_EINVAL, "forward", "rows_max %d is not in 0..%d", o->rows_max, ROWS_LIMIT);
    if (o->threads < 0 || o->threads > THREADS_LIMIT)
        return dm_err_set(e, DM_EINVAL, "forward", "%d threads are not in 0..%d", o->threads, THREADS_LIMIT);
    if (o->ctx_tokens_max < 0 || o->ctx_tokens_max > f->c->max_position_embeddings)
        return dm_err_set(e, DM_EINVAL, "forward", "a context of %lld tokens is not in 1..%lld, what the model was made for",
                          (long long)o->ctx_tokens_max, (long long)f->c->max_position_embeddings);
    if (f->c->sliding_window != FWD_WINDOW || f->c->hc_mult != KERN_HC || f->c->head_dim != KERN_HEAD_DIM
        || f->c->qk_rope_head_dim != KERN_ROPE_DIM)
        return dm_err_set(e, DM_ENOTSUP, "forward", "only window 128, 4 streams and heads of 512 with 64 rotated dimensions can be run");
    return 0;
}

int fwd_shape(fwd *f, const dm_forward_opts *o, dm_err *e) {
    int rc = choose_kernels(f, o, e);
    if (rc == 0) rc = check_opts(f, o, e);
    if (rc < 0) return rc;
    f->threads = o->threads ? o->threads : cores();
    f->draft = o->draft && f->c->num_nextn_predict_layers > 0;
    f->ring = FWD_WINDOW + (f->draft ? DM_DRAFT_MAX : 0);
    f->base.draft_max = f->draft ? DM_DRAFT_MAX : 0;
    f->base.vocab = f->c->vocab_size;
    f->base.rows_max = o->rows_max ? o->rows_max : ROWS_DEFAULT;
    f->base.ctx_tokens_max = o->ctx_tokens_max ? o->ctx_tokens_max : f->c->max_position_embeddings;
    rc = place_layers(f, e);
    if (rc == 0) count_sizes(f);
    return rc;
}
