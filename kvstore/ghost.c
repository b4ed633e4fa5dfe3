/* ghost.c — what eviction cost.
 *
 * The keys of entries that this process evicted, or turned away for want of room, are remembered for a while.  When a lookup comes to an
 * end, one asks how deep it would have come with them: that many tokens have to be computed again, and are charged to the quota and
 * its policy (dm_kv_stat.ghost_tokens, dm_kv_hit.evicted).
 *
 * A ring of keys with a map over it, both of a fixed size: at most two turnovers of the store, at most GHOSTS_MAX (some five
 * megabytes).  The oldest are forgotten first; so the charge is a lower bound.  A map entry tells its place in the ring, so that a key
 * which came back and left again is not forgotten for its first time.  Beside each state its last block is noted with the
 * length of the tail, one state behind each block: the one evicted last.
 *
 * All of kv->ghosts is under kv->lock. */
#include <string.h>

#include "kvstore/kv_int.h"

#define GHOSTS_MAX 16384
#define GHOSTS_MIN 64

static kv_key last_of(const kv_key *state)
{
    kv_key k = kv_key_block(&state->hash);
    k.kind = KV_LAST;
    return k;
}

static bool start(dm_kv *kv)
{
    kv_ghosts *g = &kv->ghosts;
    int64_t cap = 2 * kv->quota_pages / (int64_t)kv->extent_pages;
    if (g->ring) return true;
    cap = cap < GHOSTS_MIN ? GHOSTS_MIN : cap < GHOSTS_MAX ? cap : GHOSTS_MAX;
    g->ring = dm_calloc((size_t)cap, sizeof *g->ring);
    g->cap = g->ring ? (size_t)cap : 0;
    return g->ring != NULL;
}

static void forget(kv_ghosts *g, const kv_key *k)
{
    kv_slot *s = kv_map_find(&g->map, k);
    if (!s) return;
    kv_map_del(&g->map, s);
    if (k->kind != KV_STATE) return;
    kv_key last = last_of(k);
    s = kv_map_find(&g->map, &last);
    if (s && s->v.count == k->tail_count + 1) kv_map_del(&g->map, s);
}

void kv_ghost_forget(dm_kv *kv, const kv_key *k) { forget(&kv->ghosts, k); }

/* Out of memory: then it is not remembered. */
void kv_ghost_add(dm_kv *kv, const kv_key *k)
{
    kv_ghosts *g = &kv->ghosts;
    if (!start(kv)) return;
    const kv_key *old = &g->ring[g->next];
    if (old->kind && kv_map_count(&g->map, old) == (int64_t)g->next + 1) forget(g, old);
    kv_slot *s = kv_map_put(&g->map, k);
    if (!s) return;
    s->v.count = (int64_t)g->next + 1;
    g->ring[g->next] = *k;
    g->next = (g->next + 1) % g->cap;
    if (k->kind != KV_STATE) return;
    kv_key last = last_of(k);
    s = kv_map_put(&g->map, &last);
    if (s) s->v.count = k->tail_count + 1;
}

void kv_ghosts_free(dm_kv *kv)
{
    dm_free(kv->ghosts.ring);
    kv_map_free(&kv->ghosts.map);
    kv->ghosts = (kv_ghosts){ 0 };
}

static bool known(dm_kv *kv, const kv_key *k, int64_t *count)
{
    pthread_mutex_lock(&kv->lock);
    *count = kv_map_count(&kv->ghosts.map, k);
    pthread_mutex_unlock(&kv->lock);
    return *count != 0;
}

/* Position of the state that was evicted behind this block, if it fits the prompt; 0: none. */
static int64_t state_at(dm_kv *kv, const dm_hash *last, const int32_t *ids, int64_t block, int64_t limit)
{
    int64_t tail;
    kv_key k = kv_key_block(last);
    k.kind = KV_LAST;
    if (!known(kv, &k, &tail) || block * DM_KV_BLOCK + --tail > limit) return 0;
    k = kv_key_state(last, ids + block * DM_KV_BLOCK, (int)tail);
    int64_t count;
    return known(kv, &k, &count) ? block * DM_KV_BLOCK + tail : 0;
}

int64_t kv_ghost_charge(dm_kv *kv, const kv_key *blocks, size_t present, const int32_t *ids, int64_t limit, int64_t pos)
{
    pthread_mutex_lock(&kv->lock);
    bool any = kv->ghosts.map.used != 0;
    pthread_mutex_unlock(&kv->lock);
    dm_hash chain = kv->opts.root;
    int64_t deepest = pos, b = pos / DM_KV_BLOCK, count;
    if (!any) return 0;
    if (b) chain = blocks[b - 1].hash;
    for (;; b++) { /* chain = H(b-1) */
        int64_t at = state_at(kv, &chain, ids, b, limit);
        if (at > deepest) deepest = at;
        if ((b + 1) * DM_KV_BLOCK > limit) break;
        if (b < (int64_t)present) {
            chain = blocks[b].hash;
            continue;
        }
        dm_kv_chain(&chain, &chain, ids + b * DM_KV_BLOCK);
        kv_key k = kv_key_block(&chain);
        if (!known(kv, &k, &count)) break;
    }
    if (deepest == pos) return 0;
    pthread_mutex_lock(&kv->lock);
    kv->st.ghost_hits++;
    kv->st.ghost_tokens += deepest - pos;
    pthread_mutex_unlock(&kv->lock);
    return deepest - pos;
}
