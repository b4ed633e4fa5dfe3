/* pager.c — blocks and states between a session's sequence and the store.
 *
 * Out: as a job's sink, on the engine thread.  The chain key of block i follows from that of block i-1 and the
 * block's ids, so keys are made as blocks come, and kept: the timeline of a session only grows (L1).
 *
 * In: on a pool thread.  What the store has is a hint: a part that went away or does not load costs a shorter
 * restore, or a prefill, never the turn.  A state that the engine refuses is dropped, so that it is not offered
 * again. */
#include "agent/agent_int.h"

#include <string.h>

#define RESTORE_TRIES_MAX 8 /* bad entries in one restore before we stop believing in the store */

void pager_init(pager *p, dm_kv *kv, dm_engine *g, const dm_hash *root, size_t block_bytes)
{
    *p = (pager){ .kv = kv, .engine = g, .root = *root, .block_bytes = block_bytes };
}

void pager_free(pager *p)
{
    dm_free(p->chain);
    p->chain = NULL;
    p->chain_n = p->chain_cap = 0;
}

void pager_begin_turn(pager *p) { p->spilled_bytes = p->spilled_blocks = p->spilled_states = 0; }

/* ---- chain ------------------------------------------------------------------------------------- */

static const dm_hash *chain_before(const pager *p, int64_t block) { return block == 0 ? &p->root : &p->chain[block - 1]; }

static int chain_push(pager *p, const int32_t *block_ids)
{
    if (p->chain_n == p->chain_cap) {
        size_t cap = p->chain_cap ? p->chain_cap * 2 : 64;
        dm_hash *grown = dm_realloc(p->chain, cap * sizeof *grown);
        if (!grown) return DM_ENOMEM;
        p->chain = grown;
        p->chain_cap = cap;
    }
    dm_kv_chain(&p->chain[p->chain_n], chain_before(p, (int64_t)p->chain_n), block_ids);
    p->chain_n++;
    return 0;
}

static int chain_to(pager *p, const int32_t *ids, int64_t blocks)
{
    while ((int64_t)p->chain_n < blocks) {
        int rc = chain_push(p, ids + p->chain_n * DM_KV_BLOCK);
        if (rc < 0) return rc;
    }
    return 0;
}

/* ---- out ------------------------------------------------------------------------------------------ */

static void put_failed(pager *p, int rc, const dm_err *err)
{
    if (!p->store_failed) dm_log(DM_LOG_WARN, "pager: the store took no more: %s", err->text[0] ? err->text : dm_err_text(rc));
    p->store_failed = true;
}

static void sink_block(void *ctx, int64_t index, const int32_t *ids, const void *bytes, size_t n)
{
    pager *p = ctx;
    if (index > (int64_t)p->chain_n) return; /* a gap: an earlier block could not be taken */
    if (index == (int64_t)p->chain_n && chain_push(p, ids) < 0) return;
    dm_err err = { 0 };
    int rc = dm_kv_put_block_after(p->kv, chain_before(p, index), &p->chain[index], bytes, n, &err);
    if (rc < 0) {
        put_failed(p, rc, &err);
        return;
    }
    p->spilled_bytes += (int64_t)n;
    p->spilled_blocks++;
}

static void sink_state(void *ctx, int64_t pos, const int32_t *tail, const void *bytes, size_t n)
{
    pager *p = ctx;
    int64_t blocks = pos / DM_KV_BLOCK;
    if (blocks > (int64_t)p->chain_n) return;
    dm_err err = { 0 };
    int rc = dm_kv_put_state(p->kv, chain_before(p, blocks), tail, (int)(pos % DM_KV_BLOCK), bytes, n, &err);
    if (rc < 0) {
        put_failed(p, rc, &err);
        return;
    }
    p->spilled_bytes += (int64_t)n;
    p->spilled_states++;
}

dm_sink pager_sink(pager *p)
{
    return p->kv ? (dm_sink){ .ctx = p, .block = sink_block, .state = sink_state } : (dm_sink){ 0 };
}

/* ---- in ----------------------------------------------------------------------------------------------- */

static void count_tier(restore_report *r, dm_kv_tier tier)
{
    if (tier == DM_KV_RAM) r->from_ram++;
    else r->from_disk++;
}

/* DM_EMISS: a part went away.  Another error: the engine refused a part (then *refused). */
static int load_hit(pager *p, const dm_kv_hit *hit, const int32_t *ids, const _Atomic bool *stop, dm_seq *seq, restore_report *r,
                    bool *refused, dm_err *e)
{
    dm_buf state = { 0 };
    dm_kv_tier tier = DM_KV_RAM;
    void *block = hit->blocks ? dm_malloc(p->block_bytes) : NULL;
    int rc = hit->blocks && !block ? dm_err_set(e, DM_ENOMEM, "restore", "out of memory") : 0;
    for (int64_t i = 0; i < hit->blocks && rc == 0; i++) {
        if (atomic_load(stop)) rc = DM_ECANCELED;
        if (rc == 0) rc = dm_kv_read_block(p->kv, hit, i, block, &tier, e);
        if (rc < 0) break;
        count_tier(r, tier);
        rc = dm_seq_block_load(p->engine, seq, i, ids + i * DM_KV_BLOCK, block, e);
        *refused = rc < 0;
    }
    if (rc == 0) rc = dm_kv_read_state(p->kv, hit, &state, &tier, e);
    if (rc == 0) {
        count_tier(r, tier);
        rc = dm_seq_state_load(p->engine, seq, hit->pos, ids + hit->blocks * DM_KV_BLOCK, state.p, state.n, e);
        *refused = rc < 0;
    }
    dm_buf_free(&state);
    dm_free(block);
    return rc;
}

static why_class why_missed(pager *p, const dm_kv_hit *hit, int64_t n)
{
    dm_kv_stat st;
    dm_kv_stat_get(p->kv, &st);
    return why_of_find(&(why_find){ .pos = hit->pos, .wanted = n, .blocks = hit->blocks, .blocks_present = hit->blocks_present, .evicted = hit->evicted, .disk_full = st.disk_full, .over_budget = st.over_budget });
}

static int restore_once(pager *p, const int32_t *ids, int64_t n, int64_t limit, const _Atomic bool *stop, dm_seq *seq, restore_report *r, bool *again)
{
    dm_kv_hit hit = { 0 };
    dm_err err = { 0 };
    bool refused = false;
    *again = false;
    int rc = dm_kv_find(p->kv, ids, n, limit, &hit, &err);
    if (rc < 0) {
        dm_log(DM_LOG_WARN, "pager: the store cannot be asked: %s", err.text);
        r->miss = WHY_STORE_FAILED;
        return 0;
    }
    if (!r->bad) r->miss = why_missed(p, &hit, limit);
    if (hit.pos > 0) {
        r->from_ram = r->from_disk = 0;
        rc = load_hit(p, &hit, ids, stop, seq, r, &refused, &err);
        if (rc == 0) r->pos = hit.pos;
    }
    int64_t pos = hit.pos;
    dm_kv_hit_end(p->kv, &hit);
    if (rc == 0 || rc == DM_ECANCELED) return rc;
    dm_log(DM_LOG_WARN, "pager: the restore at token %lld was given up: %s", (long long)pos, err.text[0] ? err.text : dm_err_text(rc));
    if (refused) pager_drop(p, ids, pos);
    r->bad++;
    r->miss = refused ? WHY_REFUSED : WHY_GONE;
    *again = true;
    return rc;
}

int pager_restore(pager *p, const int32_t *ids, int64_t n, int64_t limit, const _Atomic bool *stop, dm_seq **seq, restore_report *r, dm_err *e)
{
    uint64_t start = dm_now_ns();
    *r = (restore_report){ 0 };
    *seq = NULL;
    bool again = true;
    int rc = chain_to(p, ids, n / DM_KV_BLOCK);
    if (rc < 0) return dm_err_set(e, rc, "restore", "out of memory");
    while (again) {
        again = false;
        rc = dm_seq_create(p->engine, seq, e);
        if (rc < 0) return rc;
        if (limit <= 0 || atomic_load(stop)) break;
        if (r->bad >= RESTORE_TRIES_MAX) {
            r->tried_all = true;
            break;
        }
        rc = restore_once(p, ids, n, limit, stop, *seq, r, &again);
        if (rc < 0) { /* half filled */
            dm_seq_destroy(p->engine, *seq);
            *seq = NULL;
            r->pos = 0;
            if (!again) return dm_err_set(e, rc, "restore", "cancelled");
        }
    }
    if (r->pos == 0) r->from_ram = r->from_disk = 0;
    r->ns = dm_now_ns() - start;
    return 0;
}

void pager_drop(pager *p, const int32_t *ids, int64_t pos)
{
    dm_err err = { 0 };
    int64_t blocks = pos / DM_KV_BLOCK;
    if (!p->kv || pos <= 0 || chain_to(p, ids, blocks) < 0) return;
    int rc = dm_kv_drop_state(p->kv, chain_before(p, blocks), ids + blocks * DM_KV_BLOCK, (int)(pos % DM_KV_BLOCK), &err);
    if (rc < 0 && rc != DM_EMISS) dm_log(DM_LOG_WARN, "pager: a bad state could not be dropped: %s", err.text);
}
