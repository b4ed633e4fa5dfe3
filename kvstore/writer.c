/* writer.c — the one thread that owns the write transaction.
 *
 * It wakes when there is a batch's worth of unwritten bytes, when the oldest put has waited sync_ms, or at once for a flush, a removal or
 * the end.  One transaction: removals, ages, evictions, places of entries; then their extents are written and synced (slots.c); one
 * commit.  An entry is in the store when the commit is; whatever stops the process before leaves the state of the commit before (K2).
 *
 * What a transaction evicts makes room in the account at once, but its slots may be written only when the eviction itself is sure to be
 * on the disk.  A store at its quota keeps one batch of slots free for that; when they do not suffice (KV_LATER), the batch ends there,
 * is committed and synced, and the rest comes next.
 *
 * When the index is tight (MDB_MAP_FULL): room is made in a transaction of its own, a second one turns the page, and the entry is tried
 * again.  For these the map is raised by a few pages, since deleting needs pages too.
 *
 * Disk full, quota blocked by a reader elsewhere, I/O errors (K5): the batch goes back to the queue, one warning is
 * logged, and it is tried again every RETRY_NS.  The queue is bounded, so nothing else has to happen meanwhile. */
#include <errno.h>
#include <string.h>
#include <time.h>

#include "kvstore/kv_int.h"

#define BATCH_ENTRIES 1024
#define ROOMY_BYTES ((int64_t)64 << 20) /* of a batch as long as the store is not at its quota: each costs two syncs */
#define RETRY_NS 1000000000ull
#define READERS_NS 30000000000ull /* stale readers are looked for this often */
#define TOUCH_NS 5000000000ull    /* ages may wait this long for a transaction that is needed anyway */
#define TOUCH_KEYS 4096
#define SQUEEZE_MAX 12

typedef enum fate { FATE_WRITTEN, FATE_THERE, FATE_NO_ROOM, FATE_HELD, FATE_LATER } fate; /* HELD: the write budget is used up */
typedef struct batch {
    kv_entry *entries[BATCH_ENTRIES]; /* a reference each */
    uint32_t uses[BATCH_ENTRIES];     /* hits so far; the entry's own count is under kv->lock */
    fate fates[BATCH_ENTRIES];
    size_t count;
    kv_key *removals; /* owned */
    size_t removals_count;
    uint64_t removal_no;
    kv_map touched; /* owned */
} batch;

/* ---- one transaction --------------------------------------------------------------------------- */

static int64_t tree_pages(const MDB_stat *st) { return (int64_t)(st->ms_branch_pages + st->ms_leaf_pages); }

/* entries: that it may write; each may touch a few pages of the index. */
static int write_begin(dm_kv *kv, kv_write *w, size_t entries)
{
    *w = (kv_write){ .kv = kv, .held = UINT64_MAX, .no = ++kv->write_no, .ahead = kv->clock_ahead };
    int rc = dm_fault("kv.begin") ? ENOSPC : kv_txn_begin(kv, true, &w->txn);
    if (rc) return rc;
    MDB_val key = { 5, (void *)"clock" }, val;
    MDB_envinfo info;
    w->id = mdb_txn_id(w->txn);
    rc = mdb_env_info(kv->env, &info);
    if (!rc) rc = mdb_get(w->txn, kv->db[KV_DB_META], &key, &val);
    /* A lost clock starts again: ages are wrong for a while, and the slots are counted anew. */
    bool lost = rc == MDB_NOTFOUND || (!rc && !kv_clock_decode(&w->clock, val.mv_data, val.mv_size));
    if (lost) w->clock = (kv_clock){ .bytes = KV_THIN_MAX };
    if (rc == MDB_NOTFOUND) rc = 0;
    w->seq_first = w->clock.seq;
    MDB_stat st;
    int64_t tree = 0, more = 8 * (int64_t)entries;
    for (int i = 0; !rc && i < KV_DB_COUNT; i++) {
        rc = mdb_stat(w->txn, kv->db[i], &st);
        tree += tree_pages(&st);
        if (i == KV_DB_PARTS) w->pages_live = (int64_t)(st.ms_entries * kv->extent_pages);
    }
    w->pages_index = (int64_t)info.me_last_pgno + 1 + (more < tree ? more : tree);
    if (!rc && lost) rc = kv_slots_sweep(w);
    if (!rc) kv_totals_begin(w);
    if (rc) kv_txn_end(kv, w->txn);
    return rc;
}

/* Undoes what eviction announced, or makes it final. */
static void write_settle(kv_write *w, bool committed)
{
    dm_kv *kv = w->kv;
    pthread_mutex_lock(&kv->lock);
    for (size_t i = 0; i < w->gone_count; i++) {
        kv_map_add(&kv->doomed, &w->gone[i], -1);
        if (committed) kv_ghost_add(kv, &w->gone[i]);
        kv_entry *en = committed ? NULL : kv_ram_get(kv, &w->gone[i]);
        if (en) en->on_disk = true;
    }
    if (committed) {
        kv->st.evicted_entries += w->evicted;
        kv->st.bytes_written += w->written_bytes;
        kv->st.put_blocks += w->written[KV_BLOCK];
        kv->st.put_states += w->written[KV_STATE];
    }
    pthread_mutex_unlock(&kv->lock);
    dm_free(w->gone);
    w->gone = NULL;
    kv_map_free(&w->spared);
    dm_free(w->puts);
    w->puts = NULL;
}

static int write_commit(kv_write *w)
{
    dm_kv *kv = w->kv;
    uint8_t rec[KV_CLOCK_BYTES];
    kv_clock_encode(rec, &w->clock);
    MDB_val key = { 5, (void *)"clock" }, val = { sizeof rec, rec };
    int rc = mdb_put(w->txn, kv->db[KV_DB_META], &key, &val, 0);
    if (!rc) rc = kv_slots_write(w);
    if (!rc) rc = kv_totals_write(w);
    if (!rc && dm_fault("kv.commit.before")) rc = ENOSPC;
    if (rc) kv_txn_end(kv, w->txn);
    else rc = kv_txn_commit(kv, w->txn);
    if (!rc) dm_fault("kv.commit.after");
    if (!rc) kv->committed_txn = w->id, kv->clock_ahead = w->ahead, kv->told = w->now;
    if (!rc && w->day) kv->marked_day = w->day;
    kv->roomy = rc == 0 && kv_room_pages(w) * (int64_t)kv->page_bytes > 2 * ROOMY_BYTES;
    kv->swept |= rc == 0 && w->order_swept;
    write_settle(w, rc == 0);
    return rc;
}

static int write_abort(kv_write *w, int rc)
{
    kv_txn_end(w->kv, w->txn);
    write_settle(w, false);
    return rc;
}

static bool puts_room(kv_write *w, uint32_t parts)
{
    if (w->puts_count + parts <= w->puts_cap) return true;
    size_t cap = w->puts_cap ? w->puts_cap * 2 : 64;
    while (cap < w->puts_count + parts) cap *= 2;
    kv_put *more = dm_realloc(w->puts, cap * sizeof *more);
    if (!more) return false;
    w->puts = more;
    w->puts_cap = cap;
    return true;
}

/* Takes slots for all parts and notes them; the extents are written before the commit, under the sequence number that comes next. */
static int place_parts(kv_write *w, const kv_entry *en, uint32_t parts)
{
    dm_kv *kv = w->kv;
    uint64_t few[8], *slots = parts <= DM_COUNT(few) ? few : dm_calloc(parts, sizeof *slots);
    int rc = slots && puts_room(w, parts) ? kv_slots_take(w, parts, slots) : ENOMEM;
    for (uint32_t i = 0; i < parts && !rc; i++) {
        uint8_t buf[KV_KEY_MAX], rec[KV_PART_BYTES];
        MDB_val key = { kv_key_encode_part(buf, &en->key, i), buf }, val = { sizeof rec, rec };
        kv_part_encode(rec, buf, key.mv_size, slots[i]);
        rc = mdb_put(w->txn, kv->db[KV_DB_PARTS], &key, &val, MDB_NOOVERWRITE);
        w->puts[w->puts_count++] = (kv_put){ .en = en, .part = i, .parts = parts, .slot = slots[i], .seq = w->clock.seq };
        w->pages_live += (int64_t)kv->extent_pages;
        w->written_bytes += (int64_t)kv->extent_bytes;
    }
    if (slots != few) dm_free(slots);
    return rc;
}

/* The last block was not written, or is gone: then its states are of no use either. */
static bool hangs_on_denied(dm_kv *kv, const kv_entry *state)
{
    kv_key k = kv_key_block(&state->key.hash);
    pthread_mutex_lock(&kv->lock);
    const kv_entry *last = kv_ram_get(kv, &k);
    bool denied = last && (last->denied || (last->where == KV_CLEAN && !last->on_disk));
    pthread_mutex_unlock(&kv->lock);
    return denied;
}

/* MDB_NOTFOUND: what the entry hangs on is not there, so nobody could use it (E4). */
static int rank_entry(kv_write *w, const kv_entry *en, kv_rank *r)
{
    bool state = en->key.kind == KV_STATE;
    *r = kv_rank_alone(w);
    if (!state && !en->chained) return 0;
    int rc = kv_rank_behind(w, state ? &en->key.hash : &en->behind, state, r);
    /* A block that was put alone may come after its states. */
    return rc == MDB_NOTFOUND && state && !hangs_on_denied(w->kv, en) ? 0 : rc;
}

/* MDB_KEYEXIST: it is there, and young again; MDB_NOTFOUND: no room and nothing may be evicted for it; KV_LATER: nothing was written,
 * try it in the next transaction. */
static int put_entry(kv_write *w, const kv_entry *en, uint32_t uses)
{
    dm_kv *kv = w->kv;
    kv_index ix;
    kv_rank rank;
    int behind = rank_entry(w, en, &rank);
    if (behind && behind != MDB_NOTFOUND) return behind;
    int rc = kv_index_get(kv, w->txn, &en->key, &ix);
    if (!rc) {
        rc = behind ? 0 : kv_touch(w, &en->key, KV_AGAIN, &rank);
        return rc ? rc : MDB_KEYEXIST;
    }
    if (rc != MDB_NOTFOUND) return rc;
    rc = kv_entry_delete(w, &en->key); /* remains of a damaged one */
    if (!rc && behind) rc = behind;
    if (rc) return rc;
    uint32_t parts = (uint32_t)kv_parts(kv, en->n);
    rc = kv_evict_room(w, (int64_t)parts * (int64_t)kv->extent_pages, &rank);
    if (rc) return rc;
    rc = place_parts(w, en, parts);
    if (rc) return rc;
    ix = (kv_index){ .parts = parts, .uses = uses < rank.uses_most ? uses : rank.uses_most, .total = en->n, .seq = w->clock.seq++,
        .last_used = rank.age, .written = rank.written };
    ix.priority = kv_priority(kv, ix.last_used, ix.uses);
    if (ix.priority > rank.most) ix.priority = rank.most;
    uint8_t buf[KV_KEY_MAX], rec[KV_INDEX_BYTES], order[KV_ORDER_BYTES];
    MDB_val key = { kv_key_encode(buf, &en->key), buf }, val = { sizeof rec, rec }, okey = { sizeof order, order };
    kv_index_encode(rec, &en->key, &ix);
    kv_order_encode(order, &ix);
    rc = mdb_put(w->txn, kv_index_db(kv, &en->key), &key, &val, 0);
    if (!rc) rc = mdb_put(w->txn, kv->db[KV_DB_ORDER], &okey, &key, 0);
    if (!rc) w->written[en->key.kind]++;
    return rc;
}

/* What is put without its predecessor, over however many transactions, has one age from one lookup to the next, so that a chain
 * keeps its beginning longest; without a lookup, an eighth of a turnover is taken for one prompt.  (With it, evict.c knows better.) */
static void set_age(kv_write *w)
{
    dm_kv *kv = w->kv;
    uint64_t eighth = (uint64_t)kv->quota_pages * kv->page_bytes / 8;
    pthread_mutex_lock(&kv->lock);
    if (kv->epoch_new || kv->epoch > w->clock.bytes || kv->epoch + eighth < w->clock.bytes) kv->epoch = w->clock.bytes;
    kv->epoch_new = false;
    w->age = kv->epoch;
    pthread_mutex_unlock(&kv->lock);
}

static void set_denied(dm_kv *kv, kv_entry *en, bool denied)
{
    pthread_mutex_lock(&kv->lock);
    en->denied = denied;
    pthread_mutex_unlock(&kv->lock);
}

static uint64_t entry_bytes(const dm_kv *kv, const kv_entry *en) { return (uint64_t)kv_parts(kv, en->n) * kv->extent_bytes; }

/* The rest of the batch, from i on, is for the next transaction: what was done for it beforehand is not done twice. */
static void put_later(kv_write *w, batch *b, size_t i)
{
    for (; i < b->count; i++) {
        uint64_t bytes = entry_bytes(w->kv, b->entries[i]);
        if (b->fates[i] == FATE_WRITTEN) w->ahead += bytes;
        if (b->fates[i] == FATE_HELD && !b->entries[i]->held) w->held_bytes -= (int64_t)bytes;
        b->fates[i] = FATE_LATER;
    }
}

static int put_all(kv_write *w, batch *b)
{
    /* The clock is first advanced by all that this transaction is going to write, but for what was advanced in vain before (KV_LATER). */
    uint64_t advance = 0;
    int64_t left = kv_budget_left(w);
    for (size_t i = 0; i < b->count; i++) {
        kv_index ix;
        b->fates[i] = FATE_THERE;
        if (kv_index_get(w->kv, w->txn, &b->entries[i]->key, &ix) == 0) continue;
        b->fates[i] = FATE_WRITTEN;
        int64_t bytes = (int64_t)entry_bytes(w->kv, b->entries[i]);
        if (bytes > left) {
            b->fates[i] = FATE_HELD;
            if (!b->entries[i]->held) w->held_bytes += bytes;
            continue;
        }
        left -= bytes;
        advance += (uint64_t)bytes;
    }
    uint64_t had = w->ahead < advance ? w->ahead : advance;
    w->clock.bytes += advance - had;
    w->ahead -= had;
    set_age(w);
    if (w->held_bytes && w->kv->held_day != w->totals.day) {
        w->kv->held_day = w->totals.day;
        dm_log(DM_LOG_WARN, "kv: %s: %lld bytes were written today, and what is new does not fit into the budget: until tomorrow it stays in memory only", w->kv->dir, (long long)w->totals.day_bytes);
    }
    for (size_t i = 0; i < b->count; i++) {
        if (b->fates[i] == FATE_HELD) {
            set_denied(w->kv, b->entries[i], true); /* for what hangs on it in this batch */
            continue;
        }
        int rc = put_entry(w, b->entries[i], b->uses[i]);
        if (rc == KV_LATER) {
            put_later(w, b, i);
            w->kv->slots_late = true;
            break;
        }
        b->fates[i] = rc == MDB_KEYEXIST ? FATE_THERE : rc == MDB_NOTFOUND ? FATE_NO_ROOM : FATE_WRITTEN;
        set_denied(w->kv, b->entries[i], rc == MDB_NOTFOUND);
        if (rc && rc != MDB_NOTFOUND && rc != MDB_KEYEXIST) return rc;
    }
    return 0;
}

static int write_batch(dm_kv *kv, batch *b)
{
    kv_write w;
    /* Where even the index could not grow, nothing is begun: LMDB would take the last of the disk and then fail in the middle. */
    if (b->count && kv_disk_short(kv, KV_SLACK_PAGES * (int64_t)kv->page_bytes)) return ENOSPC;
    int rc = write_begin(kv, &w, b->count);
    if (rc) return rc;
    rc = kv_days_mark(&w);
    for (size_t i = 0; !rc && i < b->removals_count; i++) rc = kv_entry_delete(&w, &b->removals[i]);
    if (!rc && b->removals_count && dm_fault("kv.remove")) rc = ENOSPC;
    for (size_t i = 0; !rc && i < b->touched.cap; i++) {
        const kv_slot *s = &b->touched.slots[i];
        if (s->key.kind) rc = kv_touch(&w, &s->key, s->v.count, NULL);
    }
    if (!rc) rc = put_all(&w, b);
    if (!rc) rc = kv_slots_give_back(&w);
    return rc ? write_abort(&w, rc) : write_commit(&w);
}

/* ---- tight quota ------------------------------------------------------------------------------------ */

static void set_map(dm_kv *kv, bool emergency)
{
    MDB_envinfo info;
    pthread_rwlock_wrlock(&kv->map);
    /* Never below what another process with a larger quota has set. */
    if (mdb_env_info(kv->env, &info) == 0 && (int64_t)info.me_mapsize <= kv_map_limit(kv, true))
        mdb_env_set_mapsize(kv->env, (size_t)kv_map_limit(kv, emergency));
    pthread_rwlock_unlock(&kv->map);
}

static int oldest_reader(const char *line, void *ctx)
{
    struct { size_t txn; int pid; } *old = ctx;
    int pid;
    size_t thread, txn;
    if (sscanf(line, "%d %zx %zu", &pid, &thread, &txn) == 3 && txn < old->txn) old->txn = txn, old->pid = pid;
    return 0;
}

/* Pid of a reader that has kept its snapshot over several commits, or 0. */
static int blocking_reader(dm_kv *kv)
{
    MDB_envinfo info;
    int dead;
    mdb_reader_check(kv->env, &dead);
    if (mdb_env_info(kv->env, &info) != 0) return 0;
    struct { size_t txn; int pid; } old = { info.me_last_txnid, 0 };
    mdb_reader_list(kv->env, oldest_reader, &old);
    return old.txn + 3 < info.me_last_txnid ? old.pid : 0;
}

/* Evicts `pages` worth of entries, then commits twice more so that the pages of the index that they took become usable. */
static int make_room(dm_kv *kv, int64_t pages)
{
    kv_write w;
    set_map(kv, true);
    int rc = write_begin(kv, &w, 0);
    if (!rc) {
        kv_rank any = kv_rank_alone(&w);
        int64_t room = kv_room_pages(&w);
        rc = kv_evict_room(&w, (room > 0 ? room : 0) + pages, &any);
        rc = rc && rc != MDB_NOTFOUND ? write_abort(&w, rc) : write_commit(&w);
    }
    for (int i = 0; i < 2 && !rc; i++) {
        rc = write_begin(kv, &w, 0);
        if (!rc) rc = write_commit(&w);
    }
    set_map(kv, false);
    return rc;
}

/* ---- outcome of a batch; kv->lock held ------------------------------------------------------------------ */

static void forget_removals(dm_kv *kv, batch *b)
{
    for (size_t i = 0; i < b->removals_count; i++) {
        kv_map_add(&kv->removals, &b->removals[i], -1);
        kv_map_add(&kv->doomed, &b->removals[i], -1);
        kv_entry *en = kv_ram_get(kv, &b->removals[i]);
        if (en && en->where == KV_CLEAN) en->on_disk = false;
    }
    kv->removal_done = b->removal_no;
}

static void settle_good(dm_kv *kv, batch *b)
{
    forget_removals(kv, b);
    for (size_t i = b->count; i-- > 0 && b->fates[i] == FATE_LATER; b->count--) {
        kv_ram_requeue_front(kv, b->entries[i]);
        kv_entry_unref(kv, b->entries[i]);
    }
    for (size_t i = 0; i < b->count; i++) {
        kv_entry *en = b->entries[i];
        en->on_disk = b->fates[i] == FATE_WRITTEN || b->fates[i] == FATE_THERE;
        if (en->on_disk) kv_ghost_forget(kv, &en->key);
        else if (b->fates[i] == FATE_NO_ROOM) kv_ghost_add(kv, &en->key);
        kv->st.over_budget = b->fates[i] == FATE_HELD;
        if (b->fates[i] == FATE_WRITTEN) en->held = false;
        if (b->fates[i] == FATE_HELD) en->held = true, en->denied = false; /* tomorrow it may be mended */
        kv->st.put_duplicates += b->fates[i] == FATE_THERE;
        kv->st.put_dropped += b->fates[i] == FATE_NO_ROOM || b->fates[i] == FATE_HELD;
        kv_ram_clean(kv, en);
        kv_entry_unref(kv, en);
    }
    kv_ram_fit(kv, NULL);
    if (kv->st.disk_full) {
        kv->st.disk_full = false;
        dm_log(DM_LOG_INFO, "kv: %s: there is room again; spilling goes on", kv->dir);
    }
}

static void settle_bad(dm_kv *kv, batch *b)
{
    for (size_t i = b->count; i-- > 0;) {
        kv_ram_requeue_front(kv, b->entries[i]);
        kv_entry_unref(kv, b->entries[i]);
    }
    kv_ram_fit(kv, NULL);
}

static void stall(dm_kv *kv, int rc, int reader)
{
    if (rc == ENOMEM) { /* the disk is not to blame: who waits for it goes on waiting */
        kv->retry_ns = dm_now_ns() + RETRY_NS / 10;
        dm_log(DM_LOG_WARN, "kv: %s: no memory to write a batch; it is tried again", kv->dir);
        return;
    }
    kv->retry_ns = dm_now_ns() + RETRY_NS;
    kv->stalls++;
    if (kv->st.disk_full) return;
    kv->st.disk_full = true;
    if (rc == MDB_MAP_FULL && reader)
        dm_log(DM_LOG_WARN, "kv: %s: process %d keeps an old snapshot open, so freed pages cannot be reused; spilling stops until it ends", kv->dir, reader);
    else
        dm_log(DM_LOG_WARN, "kv: %s: cannot write (%s); spilling stops until there is room, requests go on", kv->dir, mdb_strerror(rc));
}

static void broken(dm_kv *kv, int rc)
{
    kv->damaged = true;
    kv->st.disk_full = true;
    dm_log(DM_LOG_ERROR, "kv: %s: data.mdb is damaged (%s); nothing more is written to it; stop and delete the directory, it is a cache",
        kv->dir, mdb_strerror(rc));
}

static bool is_damage(int rc)
{
    return rc == MDB_CORRUPTED || rc == MDB_PAGE_NOTFOUND || rc == MDB_PANIC || rc == MDB_CURSOR_FULL || rc == MDB_INVALID
        || rc == MDB_VERSION_MISMATCH;
}

/* ---- taking work; kv->lock held --------------------------------------------------------------------------- */

static void take_entries(dm_kv *kv, batch *b, size_t max)
{
    int64_t bytes = 0;
    int64_t most = kv->roomy && kv->batch_bytes < ROOMY_BYTES ? ROOMY_BYTES : kv->batch_bytes;
    while (kv->queue.head && b->count < max && (!b->count || bytes < most)) {
        kv_entry *en = kv->queue.head;
        bytes += kv_parts(kv, en->n) * (int64_t)kv->extent_bytes;
        kv_ram_unqueue(kv, en, KV_WRITING);
        en->refs++;
        b->uses[b->count] = en->uses;
        b->entries[b->count++] = en;
    }
}

/* Removals stay in kv until they are committed; a copy is worked on. */
static bool take_rest(dm_kv *kv, batch *b)
{
    b->removal_no = kv->removal_no;
    if (kv->removals.used) {
        b->removals = dm_calloc(kv->removals.used, sizeof *b->removals);
        if (!b->removals) return false;
        for (size_t i = 0; i < kv->removals.cap; i++)
            if (kv->removals.slots[i].key.kind) b->removals[b->removals_count++] = kv->removals.slots[i].key;
    }
    b->touched = kv->touched;
    kv->touched = (kv_map){ 0 };
    return true;
}

/* The map was full: makes room and leaves it at that, so that the batch is tried again at once; or stalls.  Free pages may lie
 * scattered (small extents, a small quota), so each time in a row makes twice the room of the time before.  A reader
 * that holds old pages makes evictions useless: then nothing goes beyond what the quota asks for. */
static void tight(dm_kv *kv, int64_t pages)
{
    int squeeze = ++kv->squeeze;
    pthread_mutex_unlock(&kv->lock);
    int reader = blocking_reader(kv);
    int64_t want = reader ? pages : pages << (squeeze < 8 ? squeeze - 1 : 7), cap = kv->quota_pages / 4;
    int rc = make_room(kv, want <= cap ? want : cap > pages ? cap : pages);
    pthread_mutex_lock(&kv->lock);
    if (is_damage(rc)) broken(kv, rc);
    else if (rc || reader || squeeze >= SQUEEZE_MAX) stall(kv, rc ? rc : MDB_MAP_FULL, reader);
}

/* After a batch that was cut short: what it evicted may be written once it is on the disk. */
static int sync_for_slots(dm_kv *kv)
{
    if (!kv->slots_late) return 0;
    uint64_t upto = kv->committed_txn;
    pthread_mutex_unlock(&kv->lock);
    int rc = dm_fault("kv.sync") ? EIO : mdb_env_sync(kv->env, 1);
    pthread_mutex_lock(&kv->lock);
    if (rc) return rc;
    kv->slots_late = kv->unsynced = false;
    kv->synced_txn = upto;
    return 0;
}

/* Takes a batch, writes it without the lock, settles.  Returns with the lock held. */
static void work_once(dm_kv *kv, batch *b)
{
    b->count = b->removals_count = 0;
    b->removals = NULL;
    b->touched = (kv_map){ 0 };
    int64_t pages = 0;
    kv_leases_expire(kv, dm_now_ns());
    int rc = sync_for_slots(kv);
    if (rc) {
        stall(kv, rc, 0);
        return;
    }
    rc = ENOMEM;
    if (take_rest(kv, b)) {
        take_entries(kv, b, kv->squeeze ? 1 : BATCH_ENTRIES);
        if (b->count) pages = kv_parts(kv, b->entries[0]->n) * (int64_t)kv->extent_pages;
        pthread_mutex_unlock(&kv->lock);
        rc = write_batch(kv, b);
        pthread_mutex_lock(&kv->lock);
    }
    if (rc) settle_bad(kv, b);
    else settle_good(kv, b);
    dm_free(b->removals);
    kv_map_free(&b->touched);
    kv->wrote_ns = dm_now_ns();
    if (!rc) {
        kv->squeeze = 0;
        kv->unsynced = true;
    } else if (is_damage(rc)) {
        broken(kv, rc);
    } else if (rc == MDB_MAP_FULL) {
        tight(kv, pages);
    } else {
        stall(kv, rc, 0);
    }
}

/* ---- when ----------------------------------------------------------------------------------------------------- */

static uint64_t min64(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* 0: there is something to do now; else the time to look again. */
static uint64_t due(dm_kv *kv, uint64_t now)
{
    uint64_t at = kv->readers_ns + READERS_NS;
    if (kv->damaged || (!kv->queue.head && !kv->removals.used && !kv->touched.used)) return at;
    if (kv->retry_ns > now) return min64(at, kv->retry_ns);
    if (kv->stop || kv->squeeze || kv->slots_late || kv->removals.used || kv->touched.used >= TOUCH_KEYS) return 0;
    if (kv->queue.head) {
        uint64_t sync_at = kv->queue_since_ns + (uint64_t)kv->opts.sync_ms * 1000000u;
        if (kv->flush_waiters || kv->st.queued_bytes >= kv->batch_bytes || now >= sync_at) return 0;
        return min64(at, sync_at);
    }
    if (kv->flush_waiters) return 0;
    uint64_t touch_at = kv->wrote_ns + TOUCH_NS;
    return now >= touch_at ? 0 : min64(at, touch_at);
}

static void sleep_until(dm_kv *kv, uint64_t at_ns)
{
    struct timespec ts = { .tv_sec = (time_t)(at_ns / 1000000000u), .tv_nsec = (long)(at_ns % 1000000000u) };
    pthread_cond_timedwait(&kv->work, &kv->lock, &ts);
}

/* Every put with a ticket up to this one is written or given up. */
static uint64_t settled_ticket(const dm_kv *kv)
{
    return kv->queue.head ? kv->queue.head->ticket - 1 : kv->ticket;
}

/* NOMETASYNC leaves the last commit's root unsynced; a flush asks for it. */
static void sync_for_flush(dm_kv *kv)
{
    uint64_t ticket = settled_ticket(kv), upto = kv->committed_txn;
    if (!kv->flush_waiters) return;
    int rc = 0;
    if (kv->unsynced) {
        pthread_mutex_unlock(&kv->lock);
        rc = dm_fault("kv.sync") ? EIO : mdb_env_sync(kv->env, 1);
        pthread_mutex_lock(&kv->lock);
        if (!rc) kv->synced_txn = upto;
    }
    if (rc) {
        stall(kv, rc, 0);
        return;
    }
    kv->unsynced = false;
    kv->synced = ticket;
}

static void clear_readers(dm_kv *kv, uint64_t now)
{
    if (now - kv->readers_ns < READERS_NS) return;
    kv->readers_ns = now;
    int dead = 0;
    pthread_mutex_unlock(&kv->lock);
    mdb_reader_check(kv->env, &dead);
    pthread_mutex_lock(&kv->lock);
    if (dead) dm_log(DM_LOG_INFO, "kv: %s: %d readers of ended processes cleared", kv->dir, dead);
}

/* At the end: what cannot be written now is given up. */
static bool finished(const dm_kv *kv)
{
    if (!kv->stop) return false;
    return kv->abandon || kv->damaged || kv->st.disk_full || (!kv->queue.head && !kv->removals.used && !kv->touched.used);
}

void *kv_writer_main(void *arg)
{
    dm_kv *kv = arg;
    batch b;
    pthread_mutex_lock(&kv->lock);
    kv->readers_ns = kv->wrote_ns = dm_now_ns();
    while (!finished(kv)) {
        uint64_t now = dm_now_ns(), at = due(kv, now);
        if (at == 0) work_once(kv, &b);
        sync_for_flush(kv);
        pthread_cond_broadcast(&kv->done);
        clear_readers(kv, dm_now_ns());
        if (at != 0 && !finished(kv)) sleep_until(kv, at);
    }
    pthread_mutex_unlock(&kv->lock);
    mdb_env_sync(kv->env, 1);
    pthread_mutex_lock(&kv->lock);
    kv->synced = settled_ticket(kv);
    kv->writer_exited = true;
    pthread_cond_broadcast(&kv->done);
    pthread_mutex_unlock(&kv->lock);
    return NULL;
}
