/* model_tensors_int.h — the list of tensors that a configuration calls for, in one place: opening a model
 * checks it, the plan sums it, synth writes it. */
#ifndef DM_MODEL_TENSORS_INT_H
#define DM_MODEL_TENSORS_INT_H

#include "engine/model_int.h"

/* What a tensor is for, for the account of a model's size. */
typedef enum model_part {
    MODEL_PART_EXPERT, /* routed experts */
    MODEL_PART_SHARED, /* shared experts */
    MODEL_PART_ATTN,   /* query, key, output projections, sinks */
    MODEL_PART_INDEX,  /* compressors and indexers */
    MODEL_PART_ROUTER, /* routers, hyper-connections, norms */
    MODEL_PART_EMBED,
    MODEL_PART_HEAD,
    MODEL_PARTS,
} model_part;

/* Which shard of a synthetic checkpoint holds it: 0 the embedding, 1 … L the layers, L+1 norm, head and
 * hc_head, L+2 the MTP layer. */
typedef struct model_want {
    const char *name; /* borrowed for the call */
    model_dtype dtype;
    int ndim;
    int64_t dim[2];   /* as stored: FP4 counts bytes */
    int shard;
    model_part part;
    const void **slot; /* where the typed table keeps the pointer */
    /* For the weight of a quantised matrix, its .scale follows as the next tensor. */
    bool quantised, fp4;
    bool mtp;          /* of the MTP layer */
    /* The weight of a matrix that may be stored in several ways, else NULL: who sees another kind than the configuration's
     * says so with model_want_kind(), and the walk goes on with it. */
    model_mat *mat;
} model_want;

typedef int (*model_want_fn)(void *ctx, model_want *w); /* negative: stop with it */

/* Owns the blocks behind a model_weights. */
typedef struct model_table {
    model_weights w;
    model_block *layer;   /* [L] */
    model_mtp *mtp;       /* [1] or NULL */
    model_expert *expert; /* [(L + 1)·E] */
} model_table;

/* Room for the table and every shape in it; pointers are still NULL. */
int model_table_init(model_table *t, const dm_config *c, dm_err *e);
void model_table_free(model_table *t);
/* Calls fn for every tensor of the configuration, filling out/in/fp4 of matrices on the way. */
int model_table_walk(model_table *t, const dm_config *c, model_want_fn fn, void *ctx);

void model_want_kind(model_want *w, bool fp4, bool bf16);

static inline int64_t model_want_count(const model_want *w) { return w->dim[0] * (w->ndim > 1 ? w->dim[1] : 1); }
static inline int64_t model_want_bytes(const model_want *w) { return model_want_count(w) * model_dtype_size(w->dtype); }

#endif
