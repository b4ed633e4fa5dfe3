/* load.c — from disk to RAM, verified.
 *
 * A read transaction is kept only as long as it takes to look up where the parts lie; then the slots are read, in place where the
 * entry fills an extent.  By then another process may have evicted the entry and written to its slots (this one not: the key is
 * pinned).  The extent's own key and checksum tell.  On a mismatch the entry is looked up again: gone is a miss, another writing of it is
 * tried anew, and only one that is still the same is bad. */
#include <string.h>

#include "kvstore/kv_int.h"

/* ---- page-aligned buffers of an extent ------------------------------------------------------- */

static uint8_t *buf_take(dm_kv *kv)
{
    uint8_t *b = NULL;
    pthread_mutex_lock(&kv->lock);
    if (kv->bufs_count) b = kv->bufs[--kv->bufs_count];
    pthread_mutex_unlock(&kv->lock);
    return b ? b : dm_aligned(kv->page_bytes, kv->extent_bytes);
}

static void buf_give(dm_kv *kv, uint8_t *b)
{
    pthread_mutex_lock(&kv->lock);
    if (kv->bufs_count < KV_BUFS) kv->bufs[kv->bufs_count++] = b, b = NULL;
    pthread_mutex_unlock(&kv->lock);
    dm_free(b);
}

/* ---- looking up -------------------------------------------------------------------------------- */

typedef struct plan {
    kv_index ix;
    uint64_t *slots;  /* owned or `few`; one per part */
    uint64_t few[8];
} plan;

static void plan_free(plan *p)
{
    if (p->slots != p->few) dm_free(p->slots);
    p->slots = NULL;
}

static int locate(dm_kv *kv, MDB_txn *txn, const kv_key *k, uint32_t part, uint64_t *slot)
{
    uint8_t buf[KV_KEY_MAX];
    MDB_val key = { kv_key_encode_part(buf, k, part), buf }, val;
    int rc = mdb_get(txn, kv->db[KV_DB_PARTS], &key, &val);
    if (rc == MDB_NOTFOUND || rc == MDB_CORRUPTED || rc == MDB_PAGE_NOTFOUND) return DM_ECORRUPT;
    if (rc) return DM_EIO;
    return kv_part_decode(slot, buf, key.mv_size, val.mv_data, val.mv_size) && *slot < (uint64_t)1 << 40 ? 0 : DM_ECORRUPT;
}

static int make_plan(dm_kv *kv, MDB_txn *txn, const kv_key *k, plan *p)
{
    uint8_t buf[KV_KEY_MAX];
    MDB_val key = { kv_key_encode(buf, k), buf }, val;
    *p = (plan){ 0 };
    int rc = mdb_get(txn, kv_index_db(kv, k), &key, &val);
    if (rc) return rc == MDB_NOTFOUND ? DM_EMISS : DM_EIO;
    if (!kv_index_decode(&p->ix, k, val.mv_data, val.mv_size, kv->extent_bytes)) return DM_ECORRUPT;
    p->slots = p->ix.parts <= DM_COUNT(p->few) ? p->few : dm_calloc(p->ix.parts, sizeof *p->slots);
    if (!p->slots) return DM_ENOMEM;
    for (uint32_t i = 0; i < p->ix.parts; i++) {
        rc = locate(kv, txn, k, i, &p->slots[i]);
        if (rc) return rc;
    }
    return 0;
}

static int look_up(dm_kv *kv, const kv_key *k, plan *p)
{
    MDB_txn *txn;
    if (kv_txn_begin(kv, false, &txn) != 0) {
        *p = (plan){ 0 };
        return DM_EIO;
    }
    int rc = make_plan(kv, txn, k, p);
    kv_txn_end(kv, txn);
    return rc;
}

/* ---- reading --------------------------------------------------------------------------------------- */

static int fill(dm_kv *kv, const kv_key *k, const plan *p, kv_entry *en, uint8_t *buf)
{
    size_t done = 0;
    for (uint32_t i = 0; i < p->ix.parts; i++) {
        uint8_t *x = en->extent ? en->extent : buf;
        int rc = kv_slot_read(kv, p->slots[i], x);
        if (rc < 0) return rc;
        size_t n;
        const uint8_t *payload = rc == 1 ? NULL : kv_extent_check(x, kv->extent_bytes, &(kv_part){ k, i, p->ix.parts, p->ix.total, p->ix.seq }, &n);
        if (!payload) return DM_ECORRUPT;
        if (!en->extent) memcpy(en->bytes + done, payload, n);
        done += n;
    }
    return done == en->n ? 0 : DM_ECORRUPT;
}

static int attempt(dm_kv *kv, const kv_key *k, const plan *p, kv_entry **out)
{
    if (k->kind == KV_BLOCK && p->ix.total != kv->opts.block_bytes) return DM_ECORRUPT;
    kv_entry *en = kv_entry_new(kv, k, (size_t)p->ix.total, NULL);
    uint8_t *buf = en && !en->extent ? buf_take(kv) : NULL;
    int rc = en && (en->extent || buf) ? fill(kv, k, p, en, buf) : DM_ENOMEM;
    if (buf) buf_give(kv, buf);
    if (rc) {
        kv_entry_release(kv, en);
        return rc;
    }
    en->on_disk = true;
    en->uses = p->ix.uses;
    *out = en;
    return 0;
}

#define TRIES 4

int kv_load(dm_kv *kv, const kv_key *k, kv_entry **out)
{
    plan p;
    int rc = look_up(kv, k, &p);
    for (int i = 0; !rc && i < TRIES; i++) {
        rc = attempt(kv, k, &p, out);
        if (rc != DM_ECORRUPT) break;
        uint64_t seq = p.ix.seq, slot = p.slots[0];
        plan_free(&p);
        rc = look_up(kv, k, &p);
        if (!rc && p.ix.seq == seq && p.slots[0] == slot) rc = DM_ECORRUPT;
    }
    plan_free(&p);
    return rc;
}

/* ---- bad entries -------------------------------------------------------------------------------- */

/* The key is not offered from now on, and deleted by the writer. */
void kv_remove_later(dm_kv *kv, const kv_key *k)
{
    if (kv_map_find(&kv->removals, k)) return;
    if (!kv_map_add(&kv->doomed, k, 1)) return; /* out of memory: it will be found bad again */
    if (!kv_map_add(&kv->removals, k, 1)) {
        kv_map_add(&kv->doomed, k, -1);
        return;
    }
    kv->removal_no++;
    pthread_cond_signal(&kv->work);
}

void kv_bad_entry(dm_kv *kv, const kv_key *k, const char *why)
{
    char name[96];
    kv_key_text(name, k);
    pthread_mutex_lock(&kv->lock);
    kv->st.bad_entries++;
    kv_remove_later(kv, k);
    pthread_mutex_unlock(&kv->lock);
    dm_log(DM_LOG_WARN, "kv: %s: %s is bad (%s); it is removed and counts as a miss", kv->dir, name, why);
}
