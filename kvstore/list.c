/* list.c — what is on the disk, entry by entry. */
#include <string.h>

#include "kvstore/kv_int.h"

/* ---- a prompt ----------------------------------------------------------------------------------- */

/* Keys H(0 .. *count-1) of the whole blocks of ids that are on the disk without a gap. */
static int durable_chain(dm_kv *kv, MDB_txn *txn, const int32_t *ids, int64_t blocks, dm_hash *chain, int64_t *count)
{
    dm_hash h = kv->opts.root;
    kv_index ix;
    for (*count = 0; *count < blocks; ++*count) {
        dm_kv_chain(&h, &h, ids + *count * DM_KV_BLOCK);
        kv_key k = kv_key_block(&h);
        int rc = kv_index_get(kv, txn, &k, &ix);
        if (rc) return rc == MDB_NOTFOUND ? 0 : DM_EIO;
        chain[*count] = h;
    }
    return 0;
}

int dm_kv_durable(dm_kv *kv, const int32_t *ids, int64_t n, int64_t *pos, dm_err *e)
{
    *pos = 0;
    if (n < 0 || (n && !ids)) return dm_err_set(e, DM_EINVAL, "kv.durable", "bad length %lld", (long long)n);
    dm_hash *chain = dm_calloc((size_t)(n / DM_KV_BLOCK) + 1, sizeof *chain);
    MDB_txn *txn = NULL;
    MDB_cursor *cur = NULL;
    int64_t count = 0;
    int rc = chain ? 0 : DM_ENOMEM;
    if (!rc && kv_txn_begin(kv, false, &txn) != 0) rc = DM_EIO;
    if (!rc) rc = durable_chain(kv, txn, ids, n / DM_KV_BLOCK, chain, &count);
    if (!rc && mdb_cursor_open(txn, kv->db[KV_DB_STATES], &cur) != 0) rc = DM_EIO;
    for (int64_t b = count; !rc && !*pos && b >= 0; b--) {
        int64_t room = n - b * DM_KV_BLOCK;
        kv_key best;
        if (kv_disk_state(kv, cur, b ? &chain[b - 1] : &kv->opts.root, ids + b * DM_KV_BLOCK, room < DM_KV_BLOCK ? (int)room : DM_KV_BLOCK - 1, &best))
            *pos = b * DM_KV_BLOCK + best.tail_count;
    }
    if (cur) mdb_cursor_close(cur);
    if (txn) kv_txn_end(kv, txn);
    dm_free(chain);
    return rc ? dm_err_set(e, rc, "kv.durable", "%s: %s", kv->dir, dm_err_text(rc)) : 0;
}

/* ---- all of it ------------------------------------------------------------------------------------ */

#define STEP 256 /* entries looked at per transaction, so that none lasts */

typedef struct found {
    kv_key key;
    kv_index ix;
} found;

/* A walk through "order", from one transaction to the next. */
typedef struct walk {
    dm_kv *kv;
    kv_days days;
    uint8_t at[KV_ORDER_BYTES]; /* the last record looked at */
    bool started, over;
    found *found;               /* owned; STEP of them */
    int count;
} walk;

static int walk_next(MDB_cursor *cur, walk *w, MDB_val *key, MDB_val *val)
{
    if (!w->started) return mdb_cursor_get(cur, key, val, MDB_FIRST);
    *key = (MDB_val){ sizeof w->at, w->at };
    int rc = mdb_cursor_get(cur, key, val, MDB_SET_RANGE);
    return !rc && key->mv_size == sizeof w->at && memcmp(key->mv_data, w->at, sizeof w->at) == 0 ? mdb_cursor_get(cur, key, val, MDB_NEXT) : rc;
}

/* A record of "order" counts when the entry that it names has that place. */
static bool in_place(walk *w, MDB_txn *txn, const MDB_val *key, const MDB_val *val, found *f)
{
    uint8_t want[KV_ORDER_BYTES];
    if (!kv_key_decode(&f->key, val->mv_data, val->mv_size) || kv_index_get(w->kv, txn, &f->key, &f->ix) != 0) return false;
    kv_order_encode(want, &f->ix);
    return key->mv_size == sizeof want && memcmp(key->mv_data, want, sizeof want) == 0;
}

/* The next entries, or none. */
static int walk_step(walk *w)
{
    MDB_txn *txn;
    MDB_cursor *cur;
    MDB_val key, val;
    w->count = 0;
    if (w->over) return 0;
    if (kv_txn_begin(w->kv, false, &txn) != 0) return DM_EIO;
    int rc = w->started ? 0 : kv_days_load(txn, w->kv->db[KV_DB_META], &w->days);
    if (!rc) rc = mdb_cursor_open(txn, w->kv->db[KV_DB_ORDER], &cur);
    if (rc) {
        kv_txn_end(w->kv, txn);
        return DM_EIO;
    }
    rc = walk_next(cur, w, &key, &val);
    for (int looked = 0; !rc && looked < STEP; looked++) {
        if (in_place(w, txn, &key, &val, &w->found[w->count])) w->count++;
        w->started = true;
        memset(w->at, 0, sizeof w->at);
        memcpy(w->at, key.mv_data, key.mv_size < sizeof w->at ? key.mv_size : sizeof w->at);
        rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT);
    }
    mdb_cursor_close(cur);
    kv_txn_end(w->kv, txn);
    w->over = rc == MDB_NOTFOUND;
    return rc && !w->over ? DM_EIO : 0;
}

static int walk_begin(walk *w, dm_kv *kv)
{
    w->kv = kv;
    w->found = dm_calloc(STEP, sizeof *w->found);
    return w->found ? 0 : DM_ENOMEM;
}

static dm_kv_item item_of(const walk *w, const found *f)
{
    return (dm_kv_item){ .state = f->key.kind == KV_STATE, .key = f->key.hash, .tail_count = f->key.tail_count, .bytes = (int64_t)f->ix.total,
        .disk_bytes = (int64_t)f->ix.parts * (int64_t)w->kv->extent_bytes, .hits = f->ix.uses, .age_days = kv_days_age(&w->days, &f->ix) };
}

static int listed(dm_kv *kv, int rc, dm_err *e)
{
    return rc == DM_EIO || rc == DM_ENOMEM ? dm_err_set(e, rc, "kv.list", "%s: %s", kv->dir, dm_err_text(rc)) : rc;
}

int dm_kv_list(dm_kv *kv, dm_kv_item_fn fn, void *ctx, dm_err *e)
{
    walk *w = dm_calloc(1, sizeof *w);
    int rc = w ? walk_begin(w, kv) : DM_ENOMEM;
    while (!rc && !w->over) {
        rc = walk_step(w);
        for (int i = 0; !rc && i < w->count; i++) {
            dm_kv_item it = item_of(w, &w->found[i]);
            rc = fn(ctx, &it);
        }
    }
    if (w) dm_free(w->found);
    dm_free(w);
    return listed(kv, rc, e);
}

/* ---- taking from it -------------------------------------------------------------------------------- */

#define FLUSH_MS 60000
#define INDEX_SLACK_PAGES 16 /* deleting copies a few pages of the index */

typedef struct gc {
    walk w;
    const dm_kv_gc_opts *o;
    dm_kv_gc_report *out;
    int64_t over;        /* bytes that have to go still */
    int64_t done, total;
    bool removed;        /* something */
} gc;

/* With kv->lock. */
static bool held(const dm_kv *kv, const kv_key *k) { return kv_map_count(&kv->pins, k) || kv_map_count(&kv->leases, k); }

static bool must_go(const gc *g, const found *f)
{
    if (g->o->bytes_max >= 0 && g->over > 0) return true;
    return g->o->older_days >= 0 && kv_days_age(&g->w.days, &f->ix) >= g->o->older_days;
}

static int remove_one(gc *g, const kv_key *k)
{
    dm_kv *kv = g->w.kv;
    kv_remove_later(kv, k);
    if (!kv_map_find(&kv->removals, k)) return DM_ENOMEM;
    kv_entry *en = kv_ram_get(kv, k);
    if (en && en->where == KV_CLEAN) kv_ram_remove(kv, en);
    g->removed = true;
    return 0;
}

static int gc_step(gc *g)
{
    dm_kv *kv = g->w.kv;
    int rc = walk_step(&g->w);
    pthread_mutex_lock(&kv->lock);
    for (int i = 0; !rc && i < g->w.count; i++) {
        const found *f = &g->w.found[i];
        int64_t bytes = (int64_t)f->ix.parts * (int64_t)kv->extent_bytes;
        bool goes = must_go(g, f) && !held(kv, &f->key);
        if (goes && !g->o->dry_run) rc = remove_one(g, &f->key);
        if (rc) break;
        g->done++;
        *(!goes ? &g->out->entries_left : f->key.kind == KV_STATE ? &g->out->states : &g->out->blocks) += 1;
        *(goes ? &g->out->bytes : &g->out->bytes_left) += bytes;
        if (goes) g->over -= bytes;
    }
    pthread_mutex_unlock(&kv->lock);
    return rc;
}

/* One transaction, on the disk when this returns.  Before the walk: uses that wait to be noted would move entries while it goes on.  Behind
 * it: slots that a transaction freed may be given back by one that begins when the first is on the disk. */
static int turn_page(gc *g, dm_err *e)
{
    dm_kv *kv = g->w.kv;
    const kv_key nobody = kv_key_block(&(dm_hash){ 0 }); /* asks for a transaction, and is not there */
    pthread_mutex_lock(&kv->lock);
    int rc = remove_one(g, &nobody);
    pthread_mutex_unlock(&kv->lock);
    return rc ? rc : dm_kv_flush(kv, FLUSH_MS, e);
}

static int64_t index_bytes(const dm_kv *kv)
{
    struct stat st;
    return fstat(kv->fd, &st) == 0 ? (int64_t)st.st_size + (int64_t)(INDEX_SLACK_PAGES * kv->page_bytes) : 0;
}

int dm_kv_gc(dm_kv *kv, const dm_kv_gc_opts *o, dm_kv_gc_report *out, dm_kv_progress fn, void *ctx, dm_err *e)
{
    *out = (dm_kv_gc_report){ 0 };
    if (kv->opts.read_only && !o->dry_run) return dm_err_set(e, DM_ESTATE, "kv.gc", "%s: the store is open for reading only", kv->dir);
    gc *g = dm_calloc(1, sizeof *g);
    dm_kv_stat st = { 0 };
    kv_stat_disk(kv, &st);
    int rc = g ? walk_begin(&g->w, kv) : DM_ENOMEM;
    if (!rc) {
        g->o = o;
        g->out = out;
        g->total = st.blocks + st.states;
        g->over = st.disk_bytes_live + index_bytes(kv) - o->bytes_max;
    }
    if (!rc && !o->dry_run) rc = turn_page(g, e);
    while (!rc && !g->w.over) {
        rc = gc_step(g);
        if (!rc && g->removed) rc = dm_kv_flush(kv, FLUSH_MS, e);
        if (!rc && fn && !fn(ctx, g->done, g->total)) rc = dm_err_set(e, DM_ECANCELED, "kv.gc", "stopped after %lld of %lld entries", (long long)g->done, (long long)g->total);
    }
    for (int i = 0; i < 2 && !rc && !o->dry_run && kv->opts.trim; i++) rc = turn_page(g, e);
    if (g) dm_free(g->w.found);
    dm_free(g);
    return listed(kv, rc, e);
}
