/* evict.c — what leaves the disk tier, and how entries are deleted.
 *
 * Order of eviction.  Ages are measured on the store clock: bytes written so far.  An entry's priority is
 *
 *     clock at its last use + quota * min(hits, 8) / 4
 *
 * and the lowest goes first: an entry found again and again (an anchor shared by many sessions) stays through as many
 * bytes of one-shot writes as its hits are worth, and a once-hot one leaves when they are used up.  Among equals the later written goes first: a
 * block is written after its predecessor, and everything used by one hit has one age (the states that it passed by, too), so
 * chains lose their deep end before the beginning that the rest hangs on.
 *
 * Never evicted: what this transaction wrote, and what a hit has pinned.  Spared as long as there is anything else: what was
 * written, and after that what was used, within the last eighth of a quota.  So a store full of old favourites leaves room
 * for a new session, whose first blocks have no hits yet. */
#include <errno.h>
#include <string.h>

#include "kvstore/kv_int.h"

#define USES_MAX 8        /* hits that count */
#define TOUCHED_MAX 65536 /* keys with uses that wait for the writer */

uint64_t kv_priority(const dm_kv *kv, uint64_t clock, uint32_t uses)
{
    uint64_t quota = (uint64_t)kv->quota_pages * kv->page_bytes;
    return clock + quota / 4 * (uses < USES_MAX ? uses : USES_MAX);
}

/* Pages that extents may still take. */
int64_t kv_room_pages(const kv_write *w)
{
    const dm_kv *kv = w->kv;
    return kv->quota_pages - kv->reserve_pages - KV_SLACK_PAGES - w->pages_index - w->pages_live;
}

/* ---- deleting -------------------------------------------------------------------------------- */

/* LMDB frees as many pages as the run's own header says, so a damaged header would free somebody else's.  The header is compared with
 * what it must be: { u64 page number, u16, u16 flags, u32 pages }, flags 4 = overflow. */
static int check_run(const kv_write *w, const MDB_val *val)
{
    dm_kv *kv = w->kv;
    uintptr_t base = w->map_base, p = (uintptr_t)val->mv_data;
    if (p < base || p - base >= w->map_bytes) return 0; /* written in this transaction: still in memory */
    uint64_t page;
    uint16_t flags;
    uint32_t pages;
    const uint8_t *h = (const uint8_t *)val->mv_data - KV_PAGE_HEADER;
    memcpy(&page, h, 8), memcpy(&flags, h + 10, 2), memcpy(&pages, h + 12, 4);
    bool good = val->mv_size == kv->extent_bytes && page == (p - base) / kv->page_bytes && (flags & 4) && pages == kv->extent_pages;
    return good ? 0 : MDB_CORRUPTED;
}

static int delete_extent(kv_write *w, MDB_cursor *cur, const MDB_val *val)
{
    int rc = check_run(w, val);
    if (!rc) rc = mdb_cursor_del(cur, 0);
    if (!rc) w->pages_live -= (int64_t)w->kv->extent_pages;
    return rc;
}

static int delete_parts(kv_write *w, const kv_key *k)
{
    uint8_t buf[KV_KEY_MAX];
    size_t prefix = kv_key_encode_part(buf, k, 0) - 4;
    MDB_cursor *cur;
    int rc = mdb_cursor_open(w->txn, w->kv->db[KV_DB_EXTENTS], &cur);
    if (rc) return rc;
    MDB_val key = { prefix + 4, buf }, val;
    for (rc = mdb_cursor_get(cur, &key, &val, MDB_SET_RANGE); !rc; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT)) {
        if (key.mv_size != prefix + 4 || memcmp(key.mv_data, buf, prefix) != 0) break;
        rc = delete_extent(w, cur, &val);
        if (rc) break;
    }
    mdb_cursor_close(cur);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

static int delete_order(kv_write *w, const kv_index *ix)
{
    uint8_t buf[KV_ORDER_BYTES];
    kv_order_encode(buf, ix);
    MDB_val key = { sizeof buf, buf };
    int rc = mdb_del(w->txn, w->kv->db[KV_DB_ORDER], &key, NULL);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

/* All there is of k, whether or not its index record is good.  Not being there is fine. */
int kv_entry_delete(kv_write *w, const kv_key *k)
{
    kv_index ix;
    uint8_t buf[KV_KEY_MAX];
    MDB_val key = { kv_key_encode(buf, k), buf };
    int rc = kv_index_get(w->kv, w->txn, k, &ix);
    if (!rc) rc = delete_order(w, &ix); /* of a damaged record the order entry goes stale; the scan below clears it */
    if (rc && rc != MDB_NOTFOUND) return rc;
    rc = mdb_del(w->txn, kv_index_db(w->kv, k), &key, NULL);
    if (rc && rc != MDB_NOTFOUND) return rc;
    return delete_parts(w, k);
}

/* ---- use ------------------------------------------------------------------------------------------- */

uint32_t kv_uses_after(uint32_t uses, int64_t more)
{
    int64_t hits = more % KV_PASS, passes = more % KV_AGAIN / KV_PASS;
    if (uses < KV_PASS_USES) uses = uses + passes < KV_PASS_USES ? uses + (uint32_t)passes : KV_PASS_USES;
    return uses + hits < UINT32_MAX ? uses + (uint32_t)hits : UINT32_MAX;
}

/* Out of memory, or too many while nothing can be written: an age that is not noted does no harm. */
void kv_note_use(dm_kv *kv, const kv_key *k, int64_t use)
{
    if (kv->opts.read_only || kv->touched.used >= TOUCHED_MAX) return;
    kv_slot *s = kv_map_put(&kv->touched, k);
    if (s) s->v.count += use;
}

int kv_touch(kv_write *w, const kv_key *k, int64_t uses)
{
    kv_index ix;
    dm_kv *kv = w->kv;
    int rc = kv_index_get(kv, w->txn, k, &ix);
    if (rc) return rc == MDB_NOTFOUND ? 0 : rc;
    uint32_t sum = kv_uses_after(ix.uses, uses);
    uint64_t priority = kv_priority(kv, w->clock.bytes, sum), quota = (uint64_t)kv->quota_pages * kv->page_bytes;
    bool again = uses >= KV_AGAIN && ix.written + quota / 64 < w->clock.bytes;
    if (priority <= ix.priority + quota / 64 && !again) return 0; /* hardly a change: not worth rewriting pages */
    rc = delete_order(w, &ix);
    if (rc) return rc;
    ix.uses = sum;
    ix.priority = priority;
    ix.last_used = w->clock.bytes;
    if (uses >= KV_AGAIN) ix.written = w->clock.bytes;
    uint8_t buf[KV_KEY_MAX], rec[KV_INDEX_BYTES], order[KV_ORDER_BYTES];
    MDB_val key = { kv_key_encode(buf, k), buf }, val = { sizeof rec, rec }, okey = { sizeof order, order };
    kv_index_encode(rec, k, &ix);
    kv_order_encode(order, &ix);
    rc = mdb_put(w->txn, kv_index_db(kv, k), &key, &val, 0);
    return rc ? rc : mdb_put(w->txn, kv->db[KV_DB_ORDER], &okey, &key, 0);
}

/* ---- choosing -------------------------------------------------------------------------------------- */

/* What a scan leaves alone. */
typedef enum spare { SPARE_NONE, SPARE_WRITTEN, SPARE_USED } spare;

/* Dooms k (find does not offer it any more) unless it is pinned, or was put again or found while this transaction runs: its new
 * age is not in the index yet, and its caller may count on it. */
static bool doom(kv_write *w, const kv_key *k, spare what)
{
    dm_kv *kv = w->kv;
    if (w->gone_count == w->gone_cap) {
        size_t cap = w->gone_cap ? w->gone_cap * 2 : 64;
        kv_key *more = dm_realloc(w->gone, cap * sizeof *more);
        if (!more) return false;
        w->gone = more;
        w->gone_cap = cap;
    }
    pthread_mutex_lock(&kv->lock);
    bool ok = !kv_map_count(&kv->pins, k) && !(what != SPARE_NONE && kv_map_find(&kv->touched, k)) && kv_map_add(&kv->doomed, k, 1);
    kv_entry *en = ok ? kv_ram_get(kv, k) : NULL;
    if (en) en->on_disk = false; /* now the only copy; put back if the transaction fails */
    pthread_mutex_unlock(&kv->lock);
    if (ok) w->gone[w->gone_count++] = *k;
    return ok;
}

/* Looks at one record of "order".  A stale one (of an entry that is gone, or has another place now) is dropped. */
static int consider(kv_write *w, MDB_cursor *cur, const MDB_val *okey, const MDB_val *oval, spare what)
{
    dm_kv *kv = w->kv;
    kv_key k;
    kv_index ix;
    uint8_t want[KV_ORDER_BYTES];
    bool valid = kv_key_decode(&k, oval->mv_data, oval->mv_size);
    int rc = valid ? kv_index_get(kv, w->txn, &k, &ix) : MDB_NOTFOUND;
    if (rc && rc != MDB_NOTFOUND) return rc;
    if (!rc) kv_order_encode(want, &ix);
    if (rc || okey->mv_size != sizeof want || memcmp(okey->mv_data, want, sizeof want) != 0) return mdb_cursor_del(cur, 0);

    uint64_t recent = (uint64_t)kv->quota_pages * kv->page_bytes / 8;
    if (ix.seq >= w->seq_first) return 0;
    if (what != SPARE_NONE && ix.written + recent > w->clock.bytes) return 0;
    if (what == SPARE_USED && ix.last_used + recent > w->clock.bytes) return 0;
    if (!doom(w, &k, what)) return 0;
    rc = mdb_cursor_del(cur, 0);
    uint8_t buf[KV_KEY_MAX];
    MDB_val key = { kv_key_encode(buf, &k), buf };
    if (!rc) rc = mdb_del(w->txn, kv_index_db(kv, &k), &key, NULL);
    if (!rc) rc = delete_parts(w, &k);
    if (!rc) w->evicted++;
    if (!rc && dm_fault("kv.evict")) rc = ENOSPC;
    return rc;
}

static int scan(kv_write *w, int64_t pages, spare what)
{
    MDB_cursor *cur;
    int rc = mdb_cursor_open(w->txn, w->kv->db[KV_DB_ORDER], &cur);
    if (rc) return rc;
    MDB_val key, val;
    for (rc = mdb_cursor_get(cur, &key, &val, MDB_FIRST); !rc && kv_room_pages(w) < pages; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT))
        if ((rc = consider(w, cur, &key, &val, what)) != 0) break;
    mdb_cursor_close(cur);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

/* ---- orphans --------------------------------------------------------------------------------------- */

/* Extents without a good index record take room that no order entry can free. */
static int sweep_extents(kv_write *w)
{
    dm_kv *kv = w->kv;
    MDB_cursor *cur;
    MDB_val key, val;
    kv_key k, before = { 0 };
    kv_index ix = { 0 };
    uint32_t part;
    int rc = mdb_cursor_open(w->txn, kv->db[KV_DB_EXTENTS], &cur), known = MDB_NOTFOUND;
    if (rc) return rc;
    for (rc = mdb_cursor_get(cur, &key, &val, MDB_FIRST); !rc; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT)) {
        bool named = kv_key_decode_part(&k, &part, key.mv_data, key.mv_size);
        if (named && !kv_key_equal(&k, &before)) known = kv_index_get(kv, w->txn, &k, &ix), before = k;
        if (named && known && known != MDB_NOTFOUND) rc = known;
        else if (!named || known || part >= ix.parts) rc = delete_extent(w, cur, &val);
        if (rc) break;
    }
    mdb_cursor_close(cur);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

/* Every good index record gets its place in the order back, every damaged one goes. */
static int sweep_index(kv_write *w, MDB_dbi db)
{
    dm_kv *kv = w->kv;
    MDB_cursor *cur;
    MDB_val key, val;
    int rc = mdb_cursor_open(w->txn, db, &cur);
    if (rc) return rc;
    for (rc = mdb_cursor_get(cur, &key, &val, MDB_FIRST); !rc; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT)) {
        kv_key k;
        kv_index ix;
        uint8_t order[KV_ORDER_BYTES];
        if (kv_key_decode(&k, key.mv_data, key.mv_size) && kv_index_decode(&ix, &k, val.mv_data, val.mv_size, kv->extent_bytes)) {
            kv_order_encode(order, &ix);
            MDB_val okey = { sizeof order, order };
            rc = mdb_put(w->txn, kv->db[KV_DB_ORDER], &okey, &key, 0);
        } else {
            rc = mdb_cursor_del(cur, 0);
        }
        if (rc) break;
    }
    mdb_cursor_close(cur);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

static int sweep(kv_write *w)
{
    if (w->order_swept) return 0;
    w->order_swept = true;
    int rc = sweep_index(w, w->kv->db[KV_DB_BLOCKS]);
    if (!rc) rc = sweep_index(w, w->kv->db[KV_DB_STATES]);
    return rc ? rc : sweep_extents(w);
}

int kv_evict_room(kv_write *w, int64_t pages)
{
    if (kv_room_pages(w) >= pages) return 0;
    int rc = w->kv->swept ? 0 : sweep(w); /* once in a process: what damage of former days left behind goes before anything good */
    for (int what = SPARE_USED; what >= SPARE_NONE && !rc && kv_room_pages(w) < pages; what--) rc = scan(w, pages, (spare)what);
    /* Nothing left to evict although room is taken: by fresh damage that the order does not know of, or by pinned entries. */
    if (!rc && kv_room_pages(w) < pages) rc = sweep(w);
    if (!rc && kv_room_pages(w) < pages) rc = scan(w, pages, SPARE_NONE);
    if (rc) return rc;
    return kv_room_pages(w) >= pages ? 0 : MDB_NOTFOUND;
}
