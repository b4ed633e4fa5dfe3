/* oracle.h — a forward around a CPU forward whose drafts come from a table: how often they are right is the test's choice.
 *
 * The model's own layer drafts too, so that what it keeps goes through the same motions; then its guesses are overwritten.  With
 * random weights they would be right about never. */
#ifndef DM_TEST_ORACLE_H
#define DM_TEST_ORACLE_H

#include "engine/engine.h"
#include "testlib.h"

typedef struct oracle {
    dm_forward f; /* first member */
    dm_forward *in; /* borrowed */
    int percent;  /* of guesses that are right, each by itself; < 0: those of the layer */
    uint64_t rng;
    /* The token at position pos of the text that s will turn out to be; -1: unknown. */
    int32_t (*truth)(void *ctx, const dm_fseq *s, int64_t pos);
    void *ctx;
    int fail_tentative; /* that many steps with tentative rows are refused with DM_ELIMIT first */
} oracle;

static inline dm_forward *oracle_in(dm_forward *f) { return ((oracle *)f)->in; }
static inline void oracle_destroy(dm_forward *f) { (void)f; }
static inline int oracle_create_seq(dm_forward *f, dm_fseq **out, dm_err *e) { return oracle_in(f)->ops->seq_create(oracle_in(f), out, e); }
static inline void oracle_destroy_seq(dm_forward *f, dm_fseq *s) { oracle_in(f)->ops->seq_destroy(oracle_in(f), s); }
static inline int oracle_step(dm_forward *f, const dm_run *runs, int n, dm_err *e)
{
    oracle *o = (oracle *)f;
    bool tentative = false;
    for (int i = 0; i < n; i++) tentative |= runs[i].tentative > 0;
    if (tentative && o->fail_tentative > 0 && o->fail_tentative--) return dm_err_set(e, DM_ELIMIT, "oracle", "no room");
    return o->in->ops->step(o->in, runs, n, e);
}
static inline int oracle_block(dm_forward *f, const dm_fseq *s, int64_t i, const void **p, dm_err *e) { return oracle_in(f)->ops->block(oracle_in(f), s, i, p, e); }
static inline int oracle_block_load(dm_forward *f, dm_fseq *s, int64_t i, const void *p, dm_err *e) { return oracle_in(f)->ops->block_load(oracle_in(f), s, i, p, e); }
static inline int oracle_state_save(dm_forward *f, const dm_fseq *s, dm_buf *out, dm_err *e) { return oracle_in(f)->ops->state_save(oracle_in(f), s, out, e); }
static inline int oracle_state_load(dm_forward *f, dm_fseq *s, const void *p, size_t n, dm_err *e) { return oracle_in(f)->ops->state_load(oracle_in(f), s, p, n, e); }
static inline int oracle_retreat(dm_forward *f, dm_fseq *s, int64_t pos, const float *logits, dm_err *e)
{
    return oracle_in(f)->ops->retreat(oracle_in(f), s, pos, logits, e);
}
static inline int oracle_draft(dm_forward *f, dm_draft *d, int n, dm_err *e)
{
    oracle *o = (oracle *)f;
    int rc = o->in->ops->draft(o->in, d, n, e);
    for (int i = 0; i < n && rc == 0 && o->percent >= 0; i++)
        for (int k = 0; k < d[i].got; k++) {
            int32_t t = o->truth(o->ctx, d[i].seq, o->in->ops->seq_pos(d[i].seq) + 1 + k);
            uint64_t z = dm_splitmix64(&o->rng);
            bool right = (int)(z % 100) < o->percent && t >= 0;
            d[i].ids[k] = right ? t : (int32_t)((z >> 32) % (uint64_t)f->vocab);
        }
    return rc;
}

static inline void oracle_init(oracle *o, dm_forward *in)
{
    static dm_forward_ops ops;
    ops = (dm_forward_ops){.destroy = oracle_destroy, .seq_create = oracle_create_seq, .seq_destroy = oracle_destroy_seq, .seq_pos = in->ops->seq_pos,
                           .step = oracle_step, .block = oracle_block, .block_load = oracle_block_load, .state_save = oracle_state_save,
                           .state_load = oracle_state_load, .seq_logits = in->ops->seq_logits, .draft = oracle_draft, .retreat = oracle_retreat};
    *o = (oracle){.f = *in, .in = in, .percent = -1};
    o->f.ops = &ops;
}

#endif
