/* trace_int.h — watching and forcing single rows of a CPU forward.
 *
 * Conformance needs to see every intermediate row of a run and, for the fast path, to replace the input of
 * a sublayer by a known one ("teacher forcing").  A forward with a trace attached calls back from the thread
 * that is in step, once per row, in ascending position within one tag and layer; the data is borrowed for the call.
 * Row values never depend on whether a trace is attached.
 *
 * Values that the model keeps in bf16 are handed out as the float that holds them, so every floating row is
 * float32; cache rows are handed out as the bytes that the cache holds:
 *   fast, exact   584 bytes (448 e4m3, 64 bf16, 7 ue8m0, 0) and 68 bytes (64 packed e2m1, 4 ue8m0)
 *   plain         512 and 128 float32 */
#ifndef DM_ENGINE_TRACE_INT_H
#define DM_ENGINE_TRACE_INT_H

#include "engine/engine.h"

/* tag, name in the vectors (behind "layers.N." or "mtp.0."), shape of one row */
#define FORWARD_TRACE_MAP(X)                                                                            \
    X(FT_HIN, "hin")                             /* f32 [hc_mult][D] streams entering the block */          \
    X(FT_HC_ATTN, "hc_attn_split")               /* f32 [24] pre 4, post 4, comb 16 [source][destination] */ \
    X(FT_ATTN_X, "attn.x")                       /* f32 [D] after hc_pre and attn_norm */                   \
    X(FT_ATTN_Q, "attn.q")                       /* f32 [H][512] after rope */                              \
    X(FT_ATTN_KV, "attn.kv")                     /* cache row of this position */                           \
    X(FT_COMP_K, "attn.compressor.K")            /* f32 [coff·512] */                                       \
    X(FT_COMP_S, "attn.compressor.S")            /* f32 [coff·512], ape included */                         \
    X(FT_ENT, "attn.compressor.ent")             /* cache row; pos is the entry number, not a position */   \
    X(FT_INDEX_COMP_K, "attn.indexer.compressor.K") /* f32 [2·128] */                                       \
    X(FT_INDEX_COMP_S, "attn.indexer.compressor.S") /* f32 [2·128], ape included */                         \
    X(FT_INDEX_ENT, "attn.indexer.compressor.ent") /* index key; pos is the entry number */                 \
    X(FT_INDEX_Q, "attn.indexer.q")              /* f32 [Hi][128] after FP4 */                              \
    X(FT_INDEX_W, "attn.indexer.w")              /* f32 [Hi] with the constant */                           \
    X(FT_INDEX_SCORE, "attn.indexer.score")      /* f32 [visible entries], always computed under trace; may be empty */ \
    X(FT_INDEX_SEL, "attn.indexer.sel")          /* i32 [min(topk, visible)] ascending; may be empty */     \
    X(FT_INDEX_MARGIN, "attn.indexer.margin")    /* f32 [1] k-th minus (k+1)-th score, +inf: all selected */ \
    X(FT_ATTN_O, "attn.o")                       /* f32 [H][512] after inverse rope */                      \
    X(FT_ATTN_Y, "attn.y")                       /* f32 [D] */                                              \
    X(FT_HC_FFN, "hc_ffn_split")                 /* f32 [24] */                                             \
    X(FT_FFN_X, "ffn.x")                         /* f32 [D] after hc_pre and ffn_norm */                    \
    X(FT_ROUTE_ID, "ffn.route.id")               /* i32 [k] ascending */                                    \
    X(FT_ROUTE_W, "ffn.route.w")                 /* f32 [k] in that order */                                \
    X(FT_FFN_MARGIN, "ffn.margin")               /* f32 [1] k-th minus (k+1)-th of score + bias; not in hash layers */ \
    X(FT_FFN_Y, "ffn.y")                         /* f32 [D] */                                              \
    X(FT_H, "h")                                 /* f32 [hc_mult][D] streams leaving the block */           \
    X(FT_HEAD_X, "head.x")                       /* f32 [D] after hc_head and final norm; layer: see below */ \
    X(FT_LOGITS, "logits")                       /* f32 [V] */

typedef enum forward_tag {
#define X(tag, name) tag,
    FORWARD_TRACE_MAP(X)
#undef X
    FT_COUNT
} forward_tag;

/* layer: 0 … num_hidden_layers−1; num_hidden_layers stands for mtp.0.  FT_HEAD_X and FT_LOGITS of the trunk come
 * with layer −1 (names "head.x", "logits"), those of the MTP layer with num_hidden_layers ("mtp.0.head.x",
 * "mtp.logits").  Under a trace with all_logits set, the trunk's head runs for every row, not only the last. */
typedef struct forward_trace {
    void *ctx;
    void (*row)(void *ctx, forward_tag tag, int layer, int64_t pos, const void *data, size_t nbytes); /* may be NULL */
    /* FT_ATTN_X and FT_FFN_X: may overwrite the row [D] before it is used (and before `row` sees it). May be NULL. */
    void (*force)(void *ctx, forward_tag tag, int layer, int64_t pos, float *row);
    bool all_logits;
} forward_trace;

/* f must come from dm_forward_create.  Copies *t; NULL takes the trace off.  Not while f is in step. */
void forward_set_trace(dm_forward *f, const forward_trace *t);

/* Runs the MTP layer (layer number num_hidden_layers) over the next n rows of s.  Row i continues the MTP
 * position m of s (m starts at 0): streams[i] are the trunk's streams [hc_mult·D] of token m+i before hc_head
 * (the rows that FT_H gives for the last trunk layer), next_ids[i] is the id of token m+i+1.  logits: [n][V] or NULL.
 * Any number of rows: cut into chunks of at most f->rows_max inside.  The embedding at position 0 is not zeroed.
 * DM_ENOTSUP if the model has no MTP layer.  The MTP rows are not part of a sequence's state: a restored sequence
 * starts with none (DM_ESTATE then). */
int forward_mtp(dm_forward *f, dm_fseq *s, const float *streams, const int32_t *next_ids, int n, float *logits, dm_err *e);

const char *forward_tag_name(forward_tag tag);

#endif
