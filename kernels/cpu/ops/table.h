/* table.h — the table of this backend. */
#ifndef KERN_TABLE_H
#define KERN_TABLE_H

static bool op_supports(kern_op op, const void *params) {
    switch (op) {
    case KERN_LINEAR: {
        const kern_linear *p = params;
        return p->w.in > 0 && p->w.in % 32 == 0 && p->w.out > 0;
    }
    case KERN_INDEX_SCORE: return ((const kern_index_score *)params)->heads > 0;
    case KERN_ATTENTION: {
        const kern_attention *p = params;
        return p->heads > 0 && p->heads <= 64;
    }
    case KERN_ROUTE: {
        const kern_route *p = params;
        return p->experts > 0 && p->k > 0 && p->k <= p->experts;
    }
    }
    return false;
}
static size_t op_workspace(kern_op op, const void *params) {
    switch (op) {
    case KERN_LINEAR: return linear_work(params);
    case KERN_INDEX_SCORE: return index_work(params);
    case KERN_ATTENTION: return attention_work(params);
    case KERN_ROUTE: return route_work(params);
    }
    return 0;
}

extern const dm_kernels KERN_TABLE;
const dm_kernels KERN_TABLE = {
    .isa = KERN_ISA,
    .real_bytes = sizeof(real),
    .supports = op_supports,
    .workspace_bytes = op_workspace,
    .linear = op_linear,
    .rmsnorm = op_rmsnorm,
    .quant = op_quant,
    .hc_pre = op_hc_pre,
    .hc_post = op_hc_post,
    .qhead = op_qhead,
    .rope = op_rope,
    .kv_row = op_kv_row,
    .fold_reset = op_fold_reset,
    .fold = op_fold,
    .entry = op_entry,
    .index_query = op_index_query,
    .index_score = op_index_score,
    .topk = op_topk,
    .attention = op_attention,
    .unpack = op_unpack,
    .route = op_route,
    .swiglu = op_swiglu,
    .sum = op_sum,
};

#endif
