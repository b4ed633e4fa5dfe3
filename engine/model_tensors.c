/* model_tensors.c — names, dtypes and shapes of a checkpoint in the official layout, from its configuration. */
#include "engine/model_tensors_int.h"

#include <string.h>

typedef struct walk {
    model_want_fn fn;
    void *ctx;
    int shard;
    model_part part;
    bool mtp;
    char prefix[64];
    int rc; /* first negative answer; the rest of the walk is then silent */
} walk;

/* want: without the name */
static void emit(walk *w, const char *name, model_want want) {
    char full[160];
    if (w->rc < 0) return;
    snprintf(full, sizeof full, "%s%s", w->prefix, name);
    want.name = full, want.shard = w->shard, want.part = w->part, want.mtp = w->mtp;
    int rc = w->fn(w->ctx, &want);
    if (rc < 0) w->rc = rc;
}

#define SLOT(p) ((const void **)(uintptr_t)(p))
static void vec(walk *w, const char *name, model_dtype dtype, int64_t n, const void *slot) {
    emit(w, name, (model_want){.dtype = dtype, .ndim = 1, .dim = {n, 1}, .slot = SLOT(slot)});
}
static void mat(walk *w, const char *name, model_dtype dtype, int64_t out, int64_t in, const void *slot) {
    emit(w, name, (model_want){.dtype = dtype, .ndim = 2, .dim = {out, in}, .slot = SLOT(slot)});
}

void model_want_kind(model_want *w, bool fp4, bool bf16) {
    model_mat *m = w->mat;
    m->fp4 = fp4, m->bf16 = bf16;
    w->fp4 = fp4, w->quantised = !bf16;
    w->dtype = bf16 ? MODEL_BF16 : fp4 ? MODEL_I8 : MODEL_F8_E4M3;
    w->dim[0] = m->out, w->dim[1] = fp4 ? m->in / 2 : m->in;
}

/* The weight of a matrix and, when it is quantised, its scale. */
static void qmat(walk *w, const char *name, bool fp4, bool bf16, int64_t out, int64_t in, model_mat *m) {
    char leaf[96];
    model_want want = {.ndim = 2, .slot = SLOT(&m->w), .mat = m};
    m->out = (int)out, m->in = (int)in;
    model_want_kind(&want, fp4, bf16);
    snprintf(leaf, sizeof leaf, "%s.weight", name);
    emit(w, leaf, want);
    if (m->bf16) return;
    snprintf(leaf, sizeof leaf, "%s.scale", name);
    emit(w, leaf, (model_want){.dtype = MODEL_F8_E8M0, .ndim = 2, .dim = {m->fp4 ? out : (out + 127) / 128, m->fp4 ? in / 32 : (in + 127) / 128},
                               .slot = SLOT(&m->scale), .fp4 = m->fp4});
}

static void hc(walk *w, const char *name, int64_t rows, int64_t scales, int64_t streams_dim, model_hc *h) {
    char leaf[48];
    snprintf(leaf, sizeof leaf, "%s_fn", name);
    mat(w, leaf, MODEL_F32, rows, streams_dim, &h->fn);
    snprintf(leaf, sizeof leaf, "%s_base", name);
    vec(w, leaf, MODEL_F32, rows, &h->base);
    snprintf(leaf, sizeof leaf, "%s_scale", name);
    vec(w, leaf, MODEL_F32, scales, &h->scale);
}

static void compressor(walk *w, const char *name, int ratio, int dim, int64_t D, model_compressor *c) {
    char leaf[96];
    c->ratio = ratio, c->lanes = ratio == 4 ? 2 : 1, c->dim = dim;
    int64_t wide = (int64_t)c->lanes * dim;
    snprintf(leaf, sizeof leaf, "%s.ape", name);
    mat(w, leaf, MODEL_F32, ratio, wide, &c->ape);
    snprintf(leaf, sizeof leaf, "%s.wkv.weight", name);
    mat(w, leaf, MODEL_BF16, wide, D, &c->wkv);
    snprintf(leaf, sizeof leaf, "%s.wgate.weight", name);
    mat(w, leaf, MODEL_BF16, wide, D, &c->wgate);
    snprintf(leaf, sizeof leaf, "%s.norm.weight", name);
    vec(w, leaf, MODEL_BF16, dim, &c->norm);
}

static void attention(walk *w, const dm_config *c, model_block *b) {
    int64_t D = c->hidden_size, H = c->num_attention_heads, d = c->head_dim, rq = c->q_lora_rank, G = c->o_groups, z = G * c->o_lora_rank;
    bool bf = c->weights_bf16;
    w->part = MODEL_PART_ATTN;
    vec(w, "attn.attn_sink", MODEL_F32, H, &b->attn_sink);
    qmat(w, "attn.wq_a", false, bf, rq, D, &b->wq_a);
    vec(w, "attn.q_norm.weight", MODEL_BF16, rq, &b->q_norm);
    qmat(w, "attn.wq_b", false, bf, H * d, rq, &b->wq_b);
    qmat(w, "attn.wkv", false, bf, d, D, &b->wkv);
    vec(w, "attn.kv_norm.weight", MODEL_BF16, d, &b->kv_norm);
    qmat(w, "attn.wo_a", false, bf, z, H * d / G, &b->wo_a);
    qmat(w, "attn.wo_b", false, bf, D, z, &b->wo_b);
    w->part = MODEL_PART_INDEX;
    if (b->ratio) compressor(w, "attn.compressor", b->ratio, (int)d, D, &b->compressor);
    if (b->ratio != 4) return;
    int64_t Hi = c->index_n_heads, di = c->index_head_dim;
    qmat(w, "attn.indexer.wq_b", false, bf, Hi * di, rq, &b->indexer.wq_b);
    mat(w, "attn.indexer.weights_proj.weight", MODEL_BF16, Hi, D, &b->indexer.weights_proj);
    compressor(w, "attn.indexer.compressor", 4, (int)di, D, &b->indexer.compressor);
}

static void expert(walk *w, const char *name, bool fp4, bool bf16, const dm_config *c, model_expert *x) {
    char leaf[64];
    int64_t D = c->hidden_size, I = c->moe_intermediate_size;
    snprintf(leaf, sizeof leaf, "%s.w1", name);
    qmat(w, leaf, fp4, bf16, I, D, &x->w1);
    snprintf(leaf, sizeof leaf, "%s.w2", name);
    qmat(w, leaf, fp4, bf16, D, I, &x->w2);
    snprintf(leaf, sizeof leaf, "%s.w3", name);
    qmat(w, leaf, fp4, bf16, I, D, &x->w3);
}

static void moe(walk *w, const dm_config *c, bool hash, model_block *b, model_expert *experts) {
    int64_t D = c->hidden_size, E = c->n_routed_experts;
    w->part = MODEL_PART_ROUTER;
    mat(w, "ffn.gate.weight", MODEL_BF16, E, D, &b->gate);
    if (hash) mat(w, "ffn.gate.tid2eid", MODEL_I64, c->vocab_size, c->num_experts_per_tok, &b->tid2eid);
    else vec(w, "ffn.gate.bias", MODEL_F32, E, &b->gate_bias);
    w->part = MODEL_PART_EXPERT;
    b->expert = experts;
    for (int i = 0; i < c->n_routed_experts && w->rc >= 0; i++) {
        char name[48];
        snprintf(name, sizeof name, "ffn.experts.%d", i);
        expert(w, name, c->expert_fp4, c->expert_bf16, c, &experts[i]);
    }
    w->part = MODEL_PART_SHARED;
    expert(w, "ffn.shared_experts", false, c->weights_bf16, c, &b->shared);
}

static void block(walk *w, const dm_config *c, int ratio, bool hash, model_block *b, model_expert *experts) {
    int64_t D = c->hidden_size, mix = (2 + c->hc_mult) * c->hc_mult;
    b->ratio = ratio;
    w->part = MODEL_PART_ROUTER;
    hc(w, "hc_attn", mix, 3, c->hc_mult * D, &b->hc_attn);
    hc(w, "hc_ffn", mix, 3, c->hc_mult * D, &b->hc_ffn);
    vec(w, "attn_norm.weight", MODEL_BF16, D, &b->attn_norm);
    vec(w, "ffn_norm.weight", MODEL_BF16, D, &b->ffn_norm);
    attention(w, c, b);
    moe(w, c, hash, b, experts);
}

static void mtp_layer(walk *w, const dm_config *c, model_mtp *m, model_expert *experts) {
    int64_t D = c->hidden_size;
    block(w, c, c->compress_ratio[c->num_hidden_layers], false, &m->block, experts);
    w->part = MODEL_PART_ROUTER;
    qmat(w, "e_proj", false, c->weights_bf16, D, D, &m->e_proj);
    qmat(w, "h_proj", false, c->weights_bf16, D, D, &m->h_proj);
    vec(w, "enorm.weight", MODEL_BF16, D, &m->enorm);
    vec(w, "hnorm.weight", MODEL_BF16, D, &m->hnorm);
    vec(w, "norm.weight", MODEL_BF16, D, &m->norm);
    hc(w, "hc_head", c->hc_mult, 1, c->hc_mult * D, &m->hc_head);
}

int model_table_walk(model_table *t, const dm_config *c, model_want_fn fn, void *ctx) {
    int64_t V = c->vocab_size, D = c->hidden_size;
    int L = c->num_hidden_layers, E = c->n_routed_experts;
    walk w = {.fn = fn, .ctx = ctx, .part = MODEL_PART_EMBED};
    mat(&w, "embed.weight", MODEL_BF16, V, D, &t->w.embed);
    for (int i = 0; i < L && w.rc >= 0; i++) {
        w.shard = 1 + i;
        snprintf(w.prefix, sizeof w.prefix, "layers.%d.", i);
        block(&w, c, c->compress_ratio[i], i < c->num_hash_layers, &t->layer[i], t->expert + (int64_t)i * E);
    }
    w.prefix[0] = '\0';
    w.shard = L + 1, w.part = MODEL_PART_HEAD;
    vec(&w, "norm.weight", MODEL_BF16, D, &t->w.norm);
    mat(&w, "head.weight", MODEL_BF16, V, D, &t->w.head);
    hc(&w, "hc_head", c->hc_mult, 1, c->hc_mult * D, &t->w.hc_head);
    if (t->mtp) {
        w.shard = L + 2, w.mtp = true;
        snprintf(w.prefix, sizeof w.prefix, "mtp.0.");
        mtp_layer(&w, c, t->mtp, t->expert + (int64_t)L * E);
    }
    return w.rc;
}

int model_table_init(model_table *t, const dm_config *c, dm_err *e) {
    memset(t, 0, sizeof *t);
    size_t L = (size_t)c->num_hidden_layers;
    t->layer = dm_calloc(L, sizeof *t->layer);
    t->expert = dm_calloc((L + 1) * (size_t)c->n_routed_experts, sizeof *t->expert);
    if (c->num_nextn_predict_layers) t->mtp = dm_calloc(1, sizeof *t->mtp);
    if (!t->layer || !t->expert || (c->num_nextn_predict_layers && !t->mtp)) {
        model_table_free(t);
        return dm_err_set(e, DM_ENOMEM, "model", "out of memory");
    }
    t->w.layer = t->layer;
    t->w.mtp = t->mtp;
    return 0;
}

void model_table_free(model_table *t) {
    dm_free(t->layer);
    dm_free(t->expert);
    dm_free(t->mtp);
    memset(t, 0, sizeof *t);
}
