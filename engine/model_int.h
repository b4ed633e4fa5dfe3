/* model_int.h — what the rest of the engine sees of an opened model: tensors by name, and the same weights
 * as one typed table per layer.  Everything here points into read-only mappings that live as long as the
 * dm_model; nothing is ever written, so any thread may read.
 *
 * Guaranteed after dm_model_open (so the forward pass checks none of it again):
 *   - every pointer below is set unless its comment names the case in which it is NULL;
 *   - dtype, shape and byte count are the ones stated beside the field;
 *   - data is aligned to its element size (2, 4, 8 bytes) and to no more than that: use unaligned vector loads;
 *   - D, q_lora_rank, o_groups·o_lora_rank and moe_intermediate_size are multiples of 128, heads divide by
 *     groups, head_dim is 512, qk_rope_head_dim 64, index_head_dim 128, hc_mult 4, sliding_window 128;
 *   - tid2eid rows hold distinct experts in [0, E); the MTP layer's ratio is 0; swiglu_limit is above 0.
 * Not checked: NaN codes inside FP8 data, scales and BF16 values. */
#ifndef DM_MODEL_INT_H
#define DM_MODEL_INT_H

#include "engine/engine.h"

/* ---- tensors by name ------------------------------------------------------------------------ */

typedef enum model_dtype {
    MODEL_BF16,
    MODEL_F16,
    MODEL_F32,
    MODEL_F64,
    MODEL_F8_E4M3,
    MODEL_F8_E5M2,
    MODEL_F8_E8M0,
    MODEL_I8,
    MODEL_U8,
    MODEL_I16,
    MODEL_U16,
    MODEL_I32,
    MODEL_U32,
    MODEL_I64,
    MODEL_U64,
    MODEL_BOOL,
    MODEL_DTYPES,
} model_dtype;

#define MODEL_DIMS_MAX 8
#define MODEL_TOPK_MAX 64 /* num_experts_per_tok is at most this */

typedef struct model_tensor {
    const char *name;    /* as in the file, NUL-terminated */
    const uint8_t *data; /* bytes of them; aligned to the element size if the configuration calls for the tensor */
    int64_t bytes;
    model_dtype dtype;
    int ndim;
    int64_t dim[MODEL_DIMS_MAX];
    int shard;           /* index of the file that holds it */
} model_tensor;

/* NULL when the checkpoint has no such tensor. */
const model_tensor *model_find(const dm_model *m, const char *name);

const char *model_dtype_name(model_dtype t); /* "BF16", … as safetensors spells it */
int model_dtype_size(model_dtype t);         /* bytes of one element */
bool model_dtype_parse(const char *s, model_dtype *out);

/* ---- the same, typed ---------------------------------------------------------------------------
 * Names of fields are the names in the file.  BF16 values are uint16_t bit patterns.  D hidden_size, H heads,
 * E experts, k experts per token, I moe_intermediate_size, V vocab_size, Hi index_n_heads, rq q_lora_rank,
 * G o_groups, ro o_lora_rank. */

/* A matrix that may be quantised, y = W x.  FP8: w e4m3 [out, in], scale ue8m0 [⌈out/128⌉, ⌈in/128⌉].
 * FP4: w two e2m1 codes per byte, low nibble = even input, [out, in/2]; scale ue8m0 [out, in/32].
 * BF16: w bf16 [out, in], no scale; its input is not quantised either.  Comments below name the usual kind. */
typedef struct model_mat {
    const uint8_t *w, *scale; /* scale NULL: BF16 */
    int out, in;              /* in counts unpacked elements */
    bool fp4, bf16;           /* neither: FP8 */
} model_mat;

typedef struct model_compressor {
    int ratio;                     /* tokens per entry, m: 4 or 128 */
    int lanes;                     /* coff: 2 when m = 4, else 1 */
    int dim;                       /* 512; 128 in the indexer */
    const float *ape;              /* [m, lanes·dim] */
    const uint16_t *wkv, *wgate;   /* bf16 [lanes·dim, D] */
    const uint16_t *norm;          /* bf16 [dim] */
} model_compressor;

typedef struct model_indexer {
    model_mat wq_b;                /* FP8 [Hi·128, rq] */
    const uint16_t *weights_proj;  /* bf16 [Hi, D] */
    model_compressor compressor;   /* ratio 4, dim 128 */
} model_indexer;

typedef struct model_expert { model_mat w1, w2, w3; } model_expert; /* gate [I,D], down [D,I], up [I,D] */

typedef struct model_hc {          /* one hyper-connection site */
    const float *fn;               /* [24, 4D]; head: [4, 4D] */
    const float *base;             /* [24];     head: [4] */
    const float *scale;            /* [3];      head: [1] */
} model_hc;

typedef struct model_block {
    int ratio;                     /* 0, 4 or 128 */
    model_hc hc_attn, hc_ffn;
    const uint16_t *attn_norm, *ffn_norm; /* bf16 [D] */
    const float *attn_sink;        /* [H] */
    model_mat wq_a;                /* FP8 [rq, D] */
    const uint16_t *q_norm;        /* bf16 [rq] */
    model_mat wq_b;                /* FP8 [H·512, rq] */
    model_mat wkv;                 /* FP8 [512, D] */
    const uint16_t *kv_norm;       /* bf16 [512] */
    model_mat wo_a;                /* FP8 [G·ro, H·512/G] */
    model_mat wo_b;                /* FP8 [D, G·ro] */
    model_compressor compressor;   /* ratio != 0 */
    model_indexer indexer;         /* ratio == 4 */
    const uint16_t *gate;          /* bf16 [E, D] */
    const float *gate_bias;        /* [E]; NULL in hash layers */
    const int64_t *tid2eid;        /* [V, k]; NULL in all others */
    const model_expert *expert;    /* [E], FP4 or FP8 */
    model_expert shared;           /* FP8 */
} model_block;

typedef struct model_mtp {
    model_block block;             /* ratio compress_ratio[L] */
    model_mat e_proj, h_proj;      /* FP8 [D, D] */
    const uint16_t *enorm, *hnorm, *norm; /* bf16 [D] */
    model_hc hc_head;
} model_mtp;

typedef struct model_weights {
    const uint16_t *embed, *head;  /* bf16 [V, D] */
    const uint16_t *norm;          /* bf16 [D] */
    model_hc hc_head;
    const model_block *layer;      /* [num_hidden_layers] */
    const model_mtp *mtp;          /* NULL when num_nextn_predict_layers is 0 */
} model_weights;

const model_weights *model_weights_of(const dm_model *m);

#endif
