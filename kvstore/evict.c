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
 * Never evicted: what this transaction wrote, and what a hit or a lease has pinned.  Spared as long as there is anything else: what was
 * written, and after that what was used, within the last eighth of a quota, or has hits that are not used up.  So a store full of old favourites leaves room
 * for a new session, whose first blocks have no hits yet.
 *
 * First of all go the states that a session hardly needs (passed.c), the one that saves fewest tokens before others: their priority is
 * that number, which is below every age.
 *
 * Runs.  A block put with its predecessor (and a state, whose last block is its predecessor) must never outlive what it hangs on, however
 * long the prompt is and whatever else is written meanwhile.  So
 *   E1  it is never of higher priority than its predecessor, nor used later
 *   E2  it has the age and the time of writing of its predecessor when that has not been used since it was written: one prompt is
 *       one run, spared as a whole as long as it grows (kv_run)
 *   E3  nothing is evicted for it that it may hang on: neither of its run, nor of a priority from the run's floor up; nor for others,
 *       as long as the run is spared or in the transaction that writes it
 *   E4  it is not written when its predecessor is not there
 * E3 holds because every predecessor, near or far, of an entry in a run is in the run too or has at least the run's floor as its priority.
 * With E3, what does not fit of a prompt larger than the quota is its end. */
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

/* A part whose place is damaged leaves its slot to the sweep. */
static int delete_part(kv_write *w, MDB_cursor *cur, const MDB_val *key, const MDB_val *val)
{
    uint64_t slot;
    int rc = kv_part_decode(&slot, key->mv_data, key->mv_size, val->mv_data, val->mv_size) && slot < w->clock.slots ? kv_slot_free(w, slot) : 0;
    if (!rc) rc = mdb_cursor_del(cur, 0);
    if (!rc) w->pages_live -= (int64_t)w->kv->extent_pages;
    return rc;
}

static int delete_parts(kv_write *w, const kv_key *k)
{
    uint8_t buf[KV_KEY_MAX];
    size_t prefix = kv_key_encode_part(buf, k, 0) - 4;
    MDB_cursor *cur;
    int rc = mdb_cursor_open(w->txn, w->kv->db[KV_DB_PARTS], &cur);
    if (rc) return rc;
    MDB_val key = { prefix + 4, buf }, val;
    for (rc = mdb_cursor_get(cur, &key, &val, MDB_SET_RANGE); !rc; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT)) {
        if (key.mv_size != prefix + 4 || memcmp(key.mv_data, buf, prefix) != 0) break;
        rc = delete_part(w, cur, &key, &val);
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

static bool is_run(uint64_t written) { return written % 16 == 1; }

/* NULL: not a run, or one that is not known (any more). */
static kv_run *find_run(dm_kv *kv, uint64_t start)
{
    for (int i = 0; i < KV_RUNS && is_run(start); i++)
        if (kv->runs[i].start == start) return &kv->runs[i];
    return NULL;
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
    if (!s) return;
    if (use >= KV_THIN && s->v.count && s->v.count < KV_THIN) return;
    if (use >= KV_THIN || s->v.count >= KV_THIN) s->v.count = 0;
    s->v.count += use;
}

/* Ages step, so that a use soon after another does not rewrite pages; and all of a path steps at once (E1). */
static uint64_t age_now(const kv_write *w)
{
    uint64_t step = (uint64_t)w->kv->quota_pages * w->kv->page_bytes / 64;
    return w->clock.bytes - w->clock.bytes % step;
}

static int put_index(kv_write *w, const kv_key *k, const kv_index *ix)
{
    uint8_t buf[KV_KEY_MAX], rec[KV_INDEX_BYTES], order[KV_ORDER_BYTES];
    MDB_val key = { kv_key_encode(buf, k), buf }, val = { sizeof rec, rec }, okey = { sizeof order, order };
    kv_index_encode(rec, k, ix);
    kv_order_encode(order, ix);
    int rc = mdb_put(w->txn, kv_index_db(w->kv, k), &key, &val, 0);
    return rc ? rc : mdb_put(w->txn, w->kv->db[KV_DB_ORDER], &okey, &key, 0);
}

static bool is_thin(const kv_key *k, const kv_index *ix) { return k->kind == KV_STATE && ix->priority < KV_THIN_MAX; }

/* One that many go on from is no middle of a session. */
static int make_thin(kv_write *w, const kv_key *k, kv_index *ix, uint64_t saves)
{
    if (k->kind != KV_STATE || ix->uses > KV_PASS_USES || ix->priority == saves) return 0;
    int rc = delete_order(w, ix);
    ix->priority = saves;
    return rc ? rc : put_index(w, k, ix);
}

int kv_touch(kv_write *w, const kv_key *k, int64_t uses, const kv_rank *r)
{
    kv_index ix;
    dm_kv *kv = w->kv;
    int rc = kv_index_get(kv, w->txn, k, &ix);
    if (rc) return rc == MDB_NOTFOUND ? 0 : rc;
    if (uses >= KV_THIN) return make_thin(w, k, &ix, (uint64_t)(uses - KV_THIN));
    if (!r && is_run(ix.written)) uses %= KV_AGAIN; /* only its rank tells how young it may be (E1) */
    uint32_t sum = kv_uses_after(ix.uses, uses);
    uint64_t age = r ? r->age : age_now(w), written = uses < KV_AGAIN ? ix.written : r ? r->written : w->clock.bytes;
    kv_run *run = uses < KV_AGAIN ? NULL : find_run(kv, ix.written);
    if (run) { /* it stays in its run, which grew young with it: others of the run may hang on it (E3) */
        run->latest = w->clock.bytes;
        written = ix.written;
    }
    if (age < ix.last_used) age = ix.last_used;
    uint64_t priority = kv_priority(kv, age, sum), step = (uint64_t)kv->quota_pages * kv->page_bytes / 64;
    if (r && priority > r->most) priority = r->most;
    if (priority <= ix.priority && written <= ix.written + step) return 0;
    rc = delete_order(w, &ix);
    if (rc) return rc;
    ix.uses = sum;
    ix.priority = priority > ix.priority ? priority : ix.priority;
    ix.last_used = age;
    ix.written = written;
    return put_index(w, k, &ix);
}

/* ---- runs ------------------------------------------------------------------------------------------ */

/* In the place of the one that has been idle longest. */
static kv_run *add_run(dm_kv *kv, uint64_t start, uint64_t floor)
{
    kv_run *at = &kv->runs[0];
    for (int i = 1; i < KV_RUNS; i++)
        if (kv->runs[i].latest < at->latest) at = &kv->runs[i];
    *at = (kv_run){ .start = start, .floor = floor };
    return at;
}

/* The clock is a multiple of 16, and was advanced by all that this transaction writes, at least a page an entry: so this is unique, and
 * unlike the time of writing of an entry that was put alone. */
static uint64_t run_start(kv_write *w)
{
    uint64_t start;
    do start = w->clock.bytes - 16 * w->runs_begun++ - 15;
    while (find_run(w->kv, start));
    return start;
}

kv_rank kv_rank_alone(const kv_write *w)
{
    return (kv_rank){ .age = w->age, .written = w->clock.bytes, .most = UINT64_MAX, .uses_most = UINT32_MAX, .floor = UINT64_MAX, .own = UINT64_MAX };
}

int kv_rank_behind(kv_write *w, const dm_hash *prev, bool state, kv_rank *r)
{
    dm_kv *kv = w->kv;
    kv_key k = kv_key_block(prev);
    kv_index ix;
    bool first = dm_hash_equal(prev, &kv->opts.root), goes_on = false;
    *r = kv_rank_alone(w);
    r->age = age_now(w);
    if (!first) {
        int rc = kv_index_get(kv, w->txn, &k, &ix);
        if (rc || (state && !is_run(ix.written))) {
            *r = kv_rank_alone(w); /* behind a block that was put alone */
            return rc;
        }
        r->most = ix.priority;
        r->uses_most = ix.uses;
        goes_on = ix.last_used <= ix.written; /* not used since */
        if (r->age > ix.last_used || goes_on) r->age = ix.last_used;
    }
    /* A run that is forgotten is not taken up again: not all that hangs on its entries hangs on something above this floor. */
    kv_run *run = goes_on ? find_run(kv, ix.written) : NULL;
    r->own = kv_priority(kv, r->age, 0);
    if (!run && state) { /* of a block that was used before: it holds that block for this transaction only, as one state is not worth a floor for all */
        r->floor = r->most;
        if (r->floor < w->held) w->held = r->floor;
        return 0;
    }
    if (!run) run = add_run(kv, run_start(w), r->most);
    r->written = run->start;
    run->latest = w->clock.bytes;
    run->no = w->no;
    if (run->floor < w->held) w->held = run->floor;
    r->floor = run->floor;
    return 0;
}

/* Store clock of what was last written of the run that the entry is part of.  A run that is not known (any more) is not spared: neither
 * would be what it hangs on. */
static uint64_t last_written(const kv_write *w, const kv_index *ix)
{
    if (!is_run(ix->written)) return ix->written;
    const kv_run *run = find_run(w->kv, ix->written);
    return run ? run->latest : 0;
}

/* Runs that are spared hang on what has at least this priority. */
static uint64_t least_floor(const kv_write *w, uint64_t recent)
{
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < KV_RUNS; i++) {
        const kv_run *run = &w->kv->runs[i];
        if (run->latest && run->latest + recent > w->clock.bytes && run->floor < least) least = run->floor;
    }
    return least;
}

/* Of a run that this transaction writes to. */
static bool in_hand(const kv_write *w, const kv_index *ix)
{
    const kv_run *run = find_run(w->kv, ix->written);
    return run && run->no == w->no;
}

/* ---- choosing -------------------------------------------------------------------------------------- */

/* What a scan leaves alone. */
typedef enum spare { SPARE_NONE, SPARE_WRITTEN, SPARE_USED } spare;

enum { SPARED_PIN = 1, SPARED_USE = 2 };

static bool spare_all(kv_map *spared, const kv_map *keys, int64_t why)
{
    for (size_t i = 0; i < keys->cap; i++) {
        kv_slot *s = keys->slots[i].key.kind ? kv_map_put(spared, &keys->slots[i].key) : NULL;
        if (s) s->v.count |= why;
        else if (keys->slots[i].key.kind) return false;
    }
    return true;
}

/* Is k pinned or leased, or put again or found while this transaction runs (its new age is not in the index yet, and its caller may count on it)?
 * Pins and uses hold a chain from its beginning, but they come and go while a scan walks from its end: so what once stood in the way
 * does so to the end of the transaction, with all that was held beside it.  Else the end of a hit between two looks would let a
 * block go that the spared ones hang on.  kv->lock held; 1, 0, or ENOMEM. */
static int spared(kv_write *w, const kv_key *k, spare what)
{
    dm_kv *kv = w->kv;
    const int64_t why = SPARED_PIN | (what == SPARE_NONE ? 0 : SPARED_USE);
    const kv_slot *s = kv_map_find(&w->spared, k);
    if (s && s->v.count & why) return 1;
    bool held = kv_map_count(&kv->pins, k) || kv_map_count(&kv->leases, k) || (what != SPARE_NONE && kv_map_find(&kv->touched, k));
    if (!held) return 0;
    return spare_all(&w->spared, &kv->pins, SPARED_PIN) && spare_all(&w->spared, &kv->leases, SPARED_PIN) && spare_all(&w->spared, &kv->touched, SPARED_USE) ? 1 : ENOMEM;
}

/* Dooms k (find does not offer it any more) unless it is spared.  0: doomed; EBUSY; ENOMEM. */
static int doom(kv_write *w, const kv_key *k, spare what)
{
    dm_kv *kv = w->kv;
    if (w->gone_count == w->gone_cap) {
        size_t cap = w->gone_cap ? w->gone_cap * 2 : 64;
        kv_key *more = dm_realloc(w->gone, cap * sizeof *more);
        if (!more) return ENOMEM;
        w->gone = more;
        w->gone_cap = cap;
    }
    pthread_mutex_lock(&kv->lock);
    int rc = spared(w, k, what);
    if (rc == 1) rc = EBUSY;
    if (rc == 0 && !kv_map_add(&kv->doomed, k, 1)) rc = ENOMEM;
    kv_entry *en = rc == 0 ? kv_ram_get(kv, k) : NULL;
    if (en) en->on_disk = false; /* now the only copy; put back if the transaction fails */
    pthread_mutex_unlock(&kv->lock);
    if (rc == 0) w->gone[w->gone_count++] = *k;
    return rc;
}

#define STOP (-1) /* not an LMDB code: all that follows has more priority than may be evicted */

/* Looks at one record of "order".  A stale one (of an entry that is gone, or has another place now) is dropped. */
static int consider(kv_write *w, MDB_cursor *cur, const MDB_val *okey, const MDB_val *oval, spare what, const kv_rank *r)
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

    uint64_t recent = (uint64_t)kv->quota_pages * kv->page_bytes / 8, written = last_written(w, &ix);
    if (ix.priority >= r->floor || ix.priority >= (what == SPARE_NONE ? w->held : least_floor(w, recent))) return STOP;
    if (what == SPARE_NONE && ix.priority >= r->own) return STOP;
    if (ix.seq >= w->seq_first || in_hand(w, &ix)) return 0;
    bool thin = is_thin(&k, &ix);
    if (what != SPARE_NONE && !thin && written + recent > w->clock.bytes) return 0;
    if (what == SPARE_USED && !thin && (ix.last_used + recent > w->clock.bytes || ix.priority > w->clock.bytes)) return 0;
    rc = doom(w, &k, what);
    if (rc) return rc == EBUSY ? 0 : STOP; /* out of memory: nobody knows what may go */
    rc = mdb_cursor_del(cur, 0);
    uint8_t buf[KV_KEY_MAX];
    MDB_val key = { kv_key_encode(buf, &k), buf };
    if (!rc) rc = mdb_del(w->txn, kv_index_db(kv, &k), &key, NULL);
    if (!rc) rc = delete_parts(w, &k);
    if (!rc) w->evicted++;
    if (!rc && dm_fault("kv.evict")) rc = ENOSPC;
    return rc;
}

static int scan(kv_write *w, int64_t pages, spare what, const kv_rank *r)
{
    MDB_cursor *cur;
    int rc = mdb_cursor_open(w->txn, w->kv->db[KV_DB_ORDER], &cur);
    if (rc) return rc;
    MDB_val key, val;
    for (rc = mdb_cursor_get(cur, &key, &val, MDB_FIRST); !rc && kv_room_pages(w) < pages; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT))
        if ((rc = consider(w, cur, &key, &val, what, r)) != 0) break;
    mdb_cursor_close(cur);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

/* ---- orphans --------------------------------------------------------------------------------------- */

/* Parts without a good index record take room that no order entry can free. */
static int sweep_parts(kv_write *w)
{
    dm_kv *kv = w->kv;
    MDB_cursor *cur;
    MDB_val key, val;
    kv_key k, before = { 0 };
    kv_index ix = { 0 };
    uint32_t part;
    int rc = mdb_cursor_open(w->txn, kv->db[KV_DB_PARTS], &cur), known = MDB_NOTFOUND;
    if (rc) return rc;
    for (rc = mdb_cursor_get(cur, &key, &val, MDB_FIRST); !rc; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT)) {
        bool named = kv_key_decode_part(&k, &part, key.mv_data, key.mv_size);
        if (named && !kv_key_equal(&k, &before)) known = kv_index_get(kv, w->txn, &k, &ix), before = k;
        if (named && known && known != MDB_NOTFOUND) rc = known;
        else if (!named || known || part >= ix.parts) rc = delete_part(w, cur, &key, &val);
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
    if (!rc) rc = sweep_parts(w);
    return rc ? rc : kv_slots_sweep(w);
}

int kv_evict_room(kv_write *w, int64_t pages, const kv_rank *r)
{
    if (kv_room_pages(w) >= pages) return 0;
    int rc = w->kv->swept ? 0 : sweep(w); /* once in a process: what damage of former days left behind goes before anything good */
    for (int what = SPARE_USED; what >= SPARE_NONE && !rc && kv_room_pages(w) < pages; what--) {
        rc = scan(w, pages, (spare)what, r);
        if (rc == STOP && what != SPARE_NONE) rc = 0;
    }
    /* Nothing left to evict although room is taken: by fresh damage that the order does not know of, or by pinned entries. */
    if (!rc && kv_room_pages(w) < pages) rc = sweep(w);
    if (!rc && kv_room_pages(w) < pages) rc = scan(w, pages, SPARE_NONE, r);
    if (rc && rc != STOP) return rc;
    return kv_room_pages(w) >= pages ? 0 : MDB_NOTFOUND;
}
