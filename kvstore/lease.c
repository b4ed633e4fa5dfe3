/* lease.c — what a session that sleeps will want again is kept on the disk until it wakes, or its time is up.
 *
 * A lease names the blocks before a position and the state there by their keys, whether they are written yet or not, and belongs to an
 * owner who has one at a time.  evict.c asks kv->leases before it takes anything.  It is not asked by the RAM tier: what is on the
 * disk may leave RAM, and an entry that the disk did not get must not keep RAM full.
 *
 * A lease holds a chain from its beginning, like a hit, so it breaks no rule of evict.c (E1–E3).  All leases together hold half of the quota
 * at most: the rest is for those who are awake.  Expired ones are dropped when the writer takes work and with every call here. */
#include <string.h>

#include "kvstore/kv_int.h"

#define TTL_MS_MAX ((int64_t)366 * 24 * 3600 * 1000)

struct kv_lease {
    kv_lease *next;
    uint64_t owner, until_ns;
    size_t count;
    kv_key keys[];
};

/* kv->leases: key -> how many leases hold it, and above that how many extents it takes. */
#define ONE ((int64_t)1)
#define EXTENTS ((int64_t)1 << 32)

static int64_t extents_of(const kv_slot *s) { return s->v.count / EXTENTS; }

static void let_go(dm_kv *kv, const kv_lease *l, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        kv_slot *s = kv_map_find(&kv->leases, &l->keys[i]);
        DM_ASSERT(s);
        if ((s->v.count -= ONE) % EXTENTS) continue;
        kv->leased -= extents_of(s);
        kv_map_del(&kv->leases, s);
    }
}

/* false: out of memory, and nothing was taken. */
static bool take(dm_kv *kv, const kv_lease *l, int64_t state_extents)
{
    for (size_t i = 0; i < l->count; i++) {
        kv_slot *s = kv_map_put(&kv->leases, &l->keys[i]);
        if (!s) {
            let_go(kv, l, i);
            return false;
        }
        if (!s->v.count) {
            s->v.count = (l->keys[i].kind == KV_STATE ? state_extents : 1) * EXTENTS;
            kv->leased += extents_of(s);
        }
        s->v.count += ONE;
    }
    return true;
}

/* Unlinks and frees those that are over, and that of the owner if he is not 0. */
static void drop(dm_kv *kv, uint64_t now, uint64_t owner)
{
    for (kv_lease **p = &kv->lease_list; *p;) {
        kv_lease *l = *p;
        if (l->until_ns > now && l->owner != owner) {
            p = &l->next;
            continue;
        }
        *p = l->next;
        let_go(kv, l, l->count);
        dm_free(l);
    }
}

void kv_leases_expire(dm_kv *kv, uint64_t now) { drop(kv, now, 0); }

void kv_leases_free(dm_kv *kv)
{
    drop(kv, UINT64_MAX, 0);
    kv_map_free(&kv->leases);
}

static kv_lease *make(const dm_kv *kv, uint64_t owner, const int32_t *ids, int64_t n)
{
    size_t blocks = (size_t)(n / DM_KV_BLOCK);
    kv_lease *l = dm_calloc(1, sizeof *l + (blocks + 1) * sizeof l->keys[0]);
    if (!l) return NULL;
    dm_hash chain = kv->opts.root;
    for (size_t i = 0; i < blocks; i++) {
        dm_kv_chain(&chain, &chain, ids + i * DM_KV_BLOCK);
        l->keys[i] = kv_key_block(&chain);
    }
    l->keys[blocks] = kv_key_state(&chain, ids + blocks * DM_KV_BLOCK, (int)(n % DM_KV_BLOCK));
    l->count = blocks + 1;
    l->owner = owner;
    return l;
}

/* Extents of the state; one that is not there yet counts as one. */
static int64_t state_extents(dm_kv *kv, const kv_key *k)
{
    pthread_mutex_lock(&kv->lock);
    const kv_entry *en = kv_ram_get(kv, k);
    int64_t parts = en ? kv_parts(kv, en->n) : 0;
    pthread_mutex_unlock(&kv->lock);
    MDB_txn *txn;
    kv_index ix;
    if (parts || kv_txn_begin(kv, false, &txn) != 0) return parts ? parts : 1;
    parts = kv_index_get(kv, txn, k, &ix) == 0 ? ix.parts : 1;
    kv_txn_end(kv, txn);
    return parts;
}

/* Extents that the owner's lease alone holds. */
static int64_t held_alone(dm_kv *kv, uint64_t owner)
{
    int64_t extents = 0;
    for (const kv_lease *l = kv->lease_list; l; l = l->next) {
        for (size_t i = 0; l->owner == owner && i < l->count; i++) {
            const kv_slot *s = kv_map_find(&kv->leases, &l->keys[i]);
            if (s->v.count % EXTENTS == ONE) extents += extents_of(s);
        }
    }
    return extents;
}

/* The owner's last one goes only when the new one fits without it. */
static int replace(dm_kv *kv, kv_lease *l, int64_t extents)
{
    int64_t most = kv->quota_pages / (int64_t)kv->extent_pages / 2;
    if (!take(kv, l, extents)) return DM_ENOMEM;
    if (kv->leased - held_alone(kv, l->owner) > most) {
        let_go(kv, l, l->count);
        return DM_ELIMIT;
    }
    drop(kv, 0, l->owner);
    l->next = kv->lease_list;
    kv->lease_list = l;
    return 0;
}

int dm_kv_pin(dm_kv *kv, uint64_t owner, const int32_t *ids, int64_t n, int64_t ttl_ms, dm_err *e)
{
    if (!owner || n < 0 || ttl_ms < 0 || (n && !ids)) return dm_err_set(e, DM_EINVAL, "kv.pin", "an owner, ids and a time are wanted");
    bool keep = n > 0 && ttl_ms > 0 && !kv->opts.read_only;
    kv_lease *l = keep ? make(kv, owner, ids, n) : NULL;
    if (keep && !l) return dm_err_set(e, DM_ENOMEM, "kv.pin", "out of memory");
    int64_t extents = keep ? state_extents(kv, &l->keys[l->count - 1]) : 0;
    uint64_t now = dm_now_ns();
    if (keep) l->until_ns = now + (uint64_t)(ttl_ms < TTL_MS_MAX ? ttl_ms : TTL_MS_MAX) * 1000000u;
    pthread_mutex_lock(&kv->lock);
    drop(kv, now, keep ? 0 : owner);
    int rc = keep ? replace(kv, l, extents) : 0;
    int64_t leased = kv->leased;
    pthread_mutex_unlock(&kv->lock);
    if (!rc) return 0;
    dm_free(l);
    return rc == DM_ENOMEM ? dm_err_set(e, rc, "kv.pin", "out of memory")
        : dm_err_set(e, rc, "kv.pin", "%s: leases hold %lld bytes; with this one it would be more than half of the quota", kv->dir, (long long)leased * (long long)kv->extent_bytes);
}
