/* kernels.h — the numeric operations of a DeepSeek-V4 forward pass behind one small interface.
 *
 * A backend is one const table (dm_kernels) of operations.  Operations see pointers and shapes, never a
 * model; each takes a params struct, neither allocates nor synchronises nor fails: ask supports() once for
 * the shapes that will be used, and give it workspace_bytes() of memory where the struct has `work`.
 *
 * Numbers
 *   - Activations are float32 in memory.  With `round` set, every rounding point of the model rounds to bf16 (and
 *     to FP8/FP4 where the model does); the float then holds that value exactly.  Without it nothing is rounded.
 *   - Values between rounding points are `real`: double in the exact backend, float in all others.  real buffers
 *     are void * here; their element size is real_bytes.  Callers never look into them.
 *   - Weights stay as stored (bf16, f32, FP8 with 128x128 scales, FP4 with 1x32 scales) and are widened tile by
 *     tile inside `linear`.  NaN codes in FP8 data have no defined meaning.
 *   - Row invariance: the value of a row depends on that row's input and on the shapes of the model, never on how
 *     many rows a call has, on how a caller cut them, or on which thread runs.  Reduction orders are fixed by shapes.
 *
 * Threads: every operation may run at once on any number of threads as long as outputs and workspaces differ. */
#ifndef DM_KERNELS_H
#define DM_KERNELS_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- formats ---------------------------------------------------------------------------------- */

#define KERN_HEAD_DIM 512   /* main rows: 448 plain dims, then 64 rotated ones */
#define KERN_NOPE_DIM 448
#define KERN_ROPE_DIM 64
#define KERN_INDEX_DIM 128  /* index keys: 64 plain dims, then 64 rotated ones */
#define KERN_HC 4           /* residual streams */
#define KERN_HC_MIX 24      /* (2 + KERN_HC)·KERN_HC */

/* 584-byte row: 448 e4m3 codes · 64 bf16 · 7 ue8m0 scales (one per 64 dims) · 0.
 * 68-byte key:  64 bytes of two e2m1 codes (low nibble = even dim) · 4 ue8m0 scales (one per 32 dims). */
#define KERN_ROW_FP8_BYTES 584
#define KERN_KEY_FP4_BYTES 68
#define KERN_ROW_F32_BYTES (KERN_HEAD_DIM * 4)
#define KERN_KEY_F32_BYTES (KERN_INDEX_DIM * 4)

typedef enum kern_wtype { KERN_W_BF16, KERN_W_F32, KERN_W_FP8, KERN_W_FP4 } kern_wtype;

/* y = W x; W row-major [out, in].  FP8: scale [⌈out/128⌉, ⌈in/128⌉]; FP4: two codes a byte, scale [out, in/32]. */
typedef struct kern_mat {
    kern_wtype type;
    const void *w;
    const uint8_t *scale; /* ue8m0; NULL for bf16 and f32 */
    int out, in;
} kern_mat;

typedef enum kern_out {
    KERN_OUT_REAL, /* unrounded, real */
    KERN_OUT_F32,  /* (float)dot */
    KERN_OUT_BF16, /* float, rounded to bf16 */
} kern_out;

/* ---- params -------------------------------------------------------------------------------------
 * Strides count elements.  r runs over rows. */

/* y[r][o] = Σ_k x[row(r)][k]·W[o][k] for o in [out_begin, out_end); y is addressed by o itself. */
typedef struct kern_linear {
    kern_mat w;
    const float *x;        /* [*, in] */
    int64_t x_stride;
    const int32_t *x_row;  /* [rows] which row of x; NULL: r */
    int rows;
    bool x_bf16;           /* every x is a bf16 value: a backend may multiply in bf16 */
    int out_begin, out_end;
    void *y;               /* real or float by `kind` */
    int64_t y_stride;
    kern_out kind;
    void *work;
} kern_linear;

/* y = x·rsqrt(mean(x²) + eps)·weight, one rounding at the end. */
typedef struct kern_rmsnorm {
    const float *x; int64_t x_stride;
    const uint16_t *weight; /* bf16 [dim] */
    float *y; int64_t y_stride;
    int rows, dim;
    double eps;
    bool round;
} kern_rmsnorm;

/* FP8 activation quantisation in blocks of 128, written back as the values that the codes stand for. */
typedef struct kern_quant {
    const float *x; int64_t x_stride;
    float *y; int64_t y_stride; /* may be x */
    int rows, dim;              /* dim % 128 == 0 */
} kern_quant;

/* hc site: mix is real [rows][24] = fn·X (head: [rows][4], only `pre` is made).  Makes split = pre 4, post 4,
 * comb 16 [source][destination] (Sinkhorn), real, and x = Σ_j pre[j]·h[j]. */
typedef struct kern_hc_pre {
    const float *h; int64_t h_stride; /* [rows][4][dim] */
    const void *mix;    /* real [rows][24 or 4] */
    const float *base, *scale;
    void *split;        /* real [rows][24 or 4] */
    float *split_f32;   /* [rows][24 or 4] copy for a trace; may be NULL */
    float *x; int64_t x_stride;
    int rows, dim, sinkhorn_iters;
    double rms_eps, hc_eps;
    bool head, round;
} kern_hc_pre;

/* h[k] = post[k]·y + Σ_j comb[j][k]·h[j], in place. */
typedef struct kern_hc_post {
    float *h; int64_t h_stride;
    const float *y; int64_t y_stride;
    const void *split;  /* real [rows][24] */
    int rows, dim;
    bool round;
} kern_hc_post;

/* Query heads of one row: RMS scaling per head without weight (in bf16 arithmetic when rounding), then rope. */
typedef struct kern_qhead {
    float *q;               /* [heads][512], in place */
    int heads;
    const float *cos, *sin; /* [32] at the row's position */
    double eps;
    bool round;
} kern_qhead;

/* Rotates (or with `inverse` rotates back) the last 64 of every dim-long vector, in place. */
typedef struct kern_rope {
    float *x;               /* [count][dim] */
    int count, dim;
    const float *cos, *sin; /* [32] */
    bool inverse, round;
} kern_rope;

/* Window row: rmsnorm by weight, rope, pack.  x [512] is scratch afterwards. */
typedef struct kern_kv_row {
    float *x;
    const uint16_t *weight; /* bf16 [512] */
    const float *cos, *sin;
    double eps;
    bool round;             /* true: 584-byte row; false: f32 row */
    void *row;
} kern_kv_row;

/* Pooling of compressed entries as a sequential fold in token order.  Per channel an accumulator holds the
 * running maximum, the sum and the weighted sum: real [3][dim] (max, sum, weighted).  With two lanes token t
 * feeds `next` with lane A (dims [0,dim)) and `own` with lane B; with one lane only `own`.  After t mod m = m−1 the
 * entry's pooled vector is written, own ← next (or empty) and next ← empty. */
typedef struct kern_fold {
    const float *k; float *s; /* [rows][lanes·dim]; ape[t mod m] is added to s in place, in float */
    int64_t stride;
    const float *ape;         /* [m][lanes·dim] */
    int rows, lanes, dim, m;
    int64_t t0;               /* position of row 0 */
    void *own, *next;         /* real [3][dim]; next unused with one lane */
    void *pooled;             /* real [entries finished here][dim] */
    int c_begin, c_end;       /* channels of this call, multiples of 16 */
} kern_fold;
/* Entry: pooled → bf16, rmsnorm, rope; dim 512: packed as a row; dim 128: Hadamard and FP4, packed as a key. */
typedef struct kern_entry {
    const void *pooled;     /* real [dim] */
    const uint16_t *weight; /* bf16 [dim] */
    int dim;
    const float *cos, *sin; /* at position m·j */
    double eps;
    bool round;             /* false: f32 row or key, no Hadamard */
    void *row;
} kern_entry;

/* Index queries of one row, in place: rope, Hadamard, FP4 (round) or rope only.  Then w ← bf16(bf16(w)·c). */
typedef struct kern_index_query {
    float *q;               /* [heads][128] */
    float *w;               /* [heads]: weights_proj·x */
    int heads;
    const float *cos, *sin;
    float c;                /* (128·heads)^−1/2 */
    bool round;
} kern_index_query;

/* score[j] = Σ_h w_h·relu(q_h·key_j), j in [begin, end); rounded after each of the three operations. */
typedef struct kern_index_score {
    const float *q, *w;       /* of one row */
    int heads;
    const void *const *seg;   /* key j is row j mod seg_keys of seg[j / seg_keys] */
    int seg_keys;
    int64_t begin, end;
    float *score;             /* addressed by j */
    bool round;               /* true: 68-byte keys; false: f32 keys */
    void *work;
} kern_index_score;

/* The k largest of n scores, lowest index first among equals (−0 = +0), ascending.  k <= n. */
typedef struct kern_topk {
    const float *score; int64_t n;
    int k;
    int32_t *sel;    /* [k] */
    float *margin;   /* k-th minus (k+1)-th, +inf when k = n; may be NULL */
} kern_topk;

/* One row, a group of heads, over keys that are also the values.  The first keys_f32 of `key` are f32 rows, the
 * others 584-byte rows.  The sink takes part in the denominator only. */
typedef struct kern_attention {
    const float *q;          /* [heads][512] */
    float *o;                /* [heads][512]; may be q */
    const float *sink;       /* [heads] */
    int heads;
    const void *const *key;  /* [keys] */
    int keys, keys_f32;
    bool round;
    void *work;
} kern_attention;
/* 584-byte rows to f32 rows. */
typedef struct kern_unpack { const void *const *row; float *x; int64_t x_stride; int rows; } kern_unpack;

/* Router of one row: s = sqrt(softplus(logit)); the k largest s + bias (ties: lowest id), or the given ids;
 * ascending ids; weights s/Σs·scale. */
typedef struct kern_route {
    const void *logit;       /* real [experts] */
    const float *bias;       /* [experts], or NULL: ids come from `fixed` */
    const int64_t *fixed;    /* [k] */
    int experts, k;
    double scale;
    int32_t *id;             /* [k] */
    void *weight;            /* real [k] */
    float *weight_f32;       /* [k] copy for a trace; may be NULL */
    float *margin;           /* may be NULL; untouched with fixed ids; +inf when k = experts */
    void *work;              /* real [experts] */
} kern_route;

/* a = silu(min(g, limit))·clamp(u, ±limit)·weight; with `round` rounded, and then FP8-quantised unless `unquantised`.
 * limit may be infinite. */
typedef struct kern_swiglu {
    const float *g, *u; int64_t stride;
    float *a; int64_t a_stride;  /* may be g */
    const void *weight;          /* real, one; NULL: 1 */
    int dim;
    double limit;
    bool round, unquantised;
} kern_swiglu;

/* y = Σ_i part[i], in order, from +0; one rounding. */
typedef struct kern_sum { const float *const *part; int parts; float *y; int dim; bool round; } kern_sum;

/* ---- a backend ------------------------------------------------------------------------------------ */

typedef enum kern_op { KERN_LINEAR, KERN_INDEX_SCORE, KERN_ATTENTION, KERN_ROUTE } kern_op; /* those with `work` */

typedef struct dm_kernels {
    const char *isa;  /* "scalar", "avx2", "avx512", "amx" */
    int real_bytes;   /* 8: the exact backend */
    bool (*supports)(kern_op op, const void *params);
    size_t (*workspace_bytes)(kern_op op, const void *params); /* from shapes alone; pointers are not read */

    void (*linear)(const kern_linear *p);
    void (*rmsnorm)(const kern_rmsnorm *p);
    void (*quant)(const kern_quant *p);
    void (*hc_pre)(const kern_hc_pre *p);
    void (*hc_post)(const kern_hc_post *p);
    void (*qhead)(const kern_qhead *p);
    void (*rope)(const kern_rope *p);
    void (*kv_row)(const kern_kv_row *p);
    void (*fold_reset)(void *acc, int dim); /* an empty accumulator */
    void (*fold)(const kern_fold *p);
    void (*entry)(const kern_entry *p);
    void (*index_query)(const kern_index_query *p);
    void (*index_score)(const kern_index_score *p);
    void (*topk)(const kern_topk *p);
    void (*attention)(const kern_attention *p);
    void (*unpack)(const kern_unpack *p);
    void (*route)(const kern_route *p);
    void (*swiglu)(const kern_swiglu *p);
    void (*sum)(const kern_sum *p);
} dm_kernels;

/* The double-precision reference: defines the values of the exact path. */
DM_API const dm_kernels *dm_kernels_exact(void);
/* A float32 backend by name; NULL: the best that this processor runs.  Returns NULL if this build or this
 * processor has none of that name.  "scalar" is always there. */
DM_API const dm_kernels *dm_kernels_get(const char *isa);
/* Names for dm_kernels_get, best first, NULL-terminated. */
DM_API const char *const *dm_kernels_isas(void);

/* ---- small shared numerics (also what the tables of every backend are checked against) ----------------- */

/* Rotary frequencies of the 32 pairs.  factor > 0 applies YaRN.  Every float operation is rounded by itself. */
typedef struct kern_yarn { double factor, beta_fast, beta_slow; int64_t original_max; } kern_yarn;
DM_API void dm_rope_freqs(float out[KERN_ROPE_DIM / 2], double theta, const kern_yarn *yarn); /* yarn NULL: none */
/* cos and sin of the float32 product t·f. */
DM_API void dm_rope_angles(const float freq[KERN_ROPE_DIM / 2], int64_t t, float cos_out[KERN_ROPE_DIM / 2], float sin_out[KERN_ROPE_DIM / 2]);

DM_API float dm_bf16_round(float x);                /* nearest, ties to even */
DM_API float dm_e4m3_value(uint8_t code);
DM_API uint8_t dm_e4m3_code(float x);               /* nearest, ties to even, saturating; keeps the sign of zero */
DM_API float dm_e2m1_value(uint8_t code);           /* low nibble */
DM_API uint8_t dm_e2m1_code(float x);
DM_API int dm_fp8_scale_exp(float amax);            /* n of s = 2^n: ⌈log2(max(amax, 1e-4)/448)⌉ by the float's bits */
DM_API int dm_fp4_scale_exp(float amax);            /* the same with 6 and the floor 6·2^−126 */

#ifdef __cplusplus
}
#endif
#endif
