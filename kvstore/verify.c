/* verify.c — reading and checking every entry, and looking at a directory without knowing its root. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvstore/kv_int.h"

#define STEP 64 /* keys listed per transaction, so that none lasts */

/* ---- stat ------------------------------------------------------------------------------------ */

static int stat_txn(MDB_txn *txn, const MDB_dbi db[KV_DB_COUNT], size_t extent_bytes, dm_kv_stat *st)
{
    MDB_stat blocks, states, extents;
    int rc = mdb_stat(txn, db[KV_DB_BLOCKS], &blocks);
    if (!rc) rc = mdb_stat(txn, db[KV_DB_STATES], &states);
    if (!rc) rc = mdb_stat(txn, db[KV_DB_PARTS], &extents);
    if (rc) return rc;
    st->blocks = (int64_t)blocks.ms_entries;
    st->states = (int64_t)states.ms_entries;
    st->disk_bytes_live = (int64_t)(extents.ms_entries * extent_bytes);
    kv_totals_read(txn, db[KV_DB_META], &st->total);
    return 0;
}

void kv_stat_disk(dm_kv *kv, dm_kv_stat *st)
{
    MDB_txn *txn;
    if (kv_txn_begin(kv, false, &txn) == 0) {
        stat_txn(txn, kv->db, kv->extent_bytes, st);
        kv_txn_end(kv, txn);
    }
    struct stat s;
    if (fstat(kv->fd, &s) == 0) st->disk_bytes_file = s.st_size + kv_slots_bytes(kv);
}

/* ---- verify -------------------------------------------------------------------------------------- */

typedef struct verify {
    dm_kv *kv;
    dm_kv_check *out;
    dm_kv_progress fn;
    void *ctx;
    int64_t done, total;
} verify;

static void note_bad(verify *v, const kv_key *k, const char *what)
{
    char name[96] = "a record";
    if (k) kv_key_text(name, k);
    if (!v->out->bad++) snprintf(v->out->first_bad, sizeof v->out->first_bad, "%s: %s", name, what);
}

static bool still_listed(dm_kv *kv, const kv_key *k)
{
    MDB_txn *txn;
    kv_index ix;
    if (kv_txn_begin(kv, false, &txn) != 0) return true;
    bool there = kv_index_get(kv, txn, k, &ix) == 0;
    kv_txn_end(kv, txn);
    return there;
}

static int check_entry(verify *v, const kv_key *k)
{
    kv_entry *en = NULL;
    int rc = kv_load(v->kv, k, &en);
    if (rc == DM_ENOMEM) return rc;
    if (rc == 0) {
        v->out->entries++;
        v->out->bytes += (int64_t)en->n;
    } else if (rc != DM_EMISS && still_listed(v->kv, k)) { /* else it was evicted while we looked */
        v->out->entries++;
        note_bad(v, k, rc == DM_EIO ? "cannot be read" : "key, checksum or a part is wrong");
    }
    kv_entry_release(v->kv, en);
    v->done++;
    return v->fn && !v->fn(v->ctx, v->done, v->total) ? DM_ECANCELED : 0;
}

/* Position of a listing between transactions: the last raw key. */
typedef struct place {
    uint8_t key[KV_KEY_MAX];
    size_t n;
    bool started;
} place;

static int to_next(MDB_cursor *cur, const place *at, MDB_val *key, MDB_val *val)
{
    if (!at->started) return mdb_cursor_get(cur, key, val, MDB_FIRST);
    *key = (MDB_val){ at->n, (void *)at->key };
    int rc = mdb_cursor_get(cur, key, val, MDB_SET_RANGE);
    if (!rc && key->mv_size == at->n && memcmp(key->mv_data, at->key, at->n) == 0) rc = mdb_cursor_get(cur, key, val, MDB_NEXT);
    return rc;
}

static void keep_place(place *at, const MDB_val *key)
{
    at->started = true;
    at->n = key->mv_size < sizeof at->key ? key->mv_size : sizeof at->key;
    memcpy(at->key, key->mv_data, at->n);
}

/* The next keys of an index database; records that are damaged themselves are counted here. */
static int list_index(verify *v, MDB_dbi db, place *at, kv_key keys[STEP], int *count)
{
    dm_kv *kv = v->kv;
    MDB_txn *txn;
    MDB_cursor *cur;
    MDB_val key, val;
    *count = 0;
    int rc = kv_txn_begin(kv, false, &txn);
    if (rc) return rc;
    rc = mdb_cursor_open(txn, db, &cur);
    if (!rc) {
        for (rc = to_next(cur, at, &key, &val); !rc && *count < STEP; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT)) {
            kv_key k;
            kv_index ix;
            keep_place(at, &key);
            bool named = kv_key_decode(&k, key.mv_data, key.mv_size);
            if (!named || !kv_index_decode(&ix, &k, val.mv_data, val.mv_size, kv->extent_bytes)) note_bad(v, named ? &k : NULL, "index record is damaged");
            else keys[(*count)++] = k;
        }
        mdb_cursor_close(cur);
    }
    kv_txn_end(kv, txn);
    return rc;
}

static int verify_index(verify *v, MDB_dbi db)
{
    kv_key keys[STEP];
    place at = { 0 };
    for (;;) {
        int count, rc = list_index(v, db, &at, keys, &count);
        if (rc && rc != MDB_NOTFOUND) return DM_EIO;
        for (int i = 0; i < count; i++) {
            int bad = check_entry(v, &keys[i]);
            if (bad) return bad;
        }
        if (rc == MDB_NOTFOUND) return 0;
    }
}

/* Parts that no index record speaks of. */
static int verify_orphans(verify *v)
{
    dm_kv *kv = v->kv;
    place at = { 0 };
    for (int rc = 0; !rc;) {
        MDB_txn *txn;
        MDB_cursor *cur;
        MDB_val key, val;
        if (kv_txn_begin(kv, false, &txn) != 0) return DM_EIO;
        rc = mdb_cursor_open(txn, kv->db[KV_DB_PARTS], &cur);
        if (!rc) {
            rc = to_next(cur, &at, &key, &val);
            for (int i = 0; !rc && i < STEP * 16; i++, rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT)) {
                kv_key k;
                kv_index ix;
                uint32_t part;
                keep_place(&at, &key);
                bool named = kv_key_decode_part(&k, &part, key.mv_data, key.mv_size);
                if (!named || kv_index_get(kv, txn, &k, &ix) != 0 || part >= ix.parts) note_bad(v, named ? &k : NULL, "a part without an entry");
            }
            mdb_cursor_close(cur);
        }
        kv_txn_end(kv, txn);
        if (rc && rc != MDB_NOTFOUND) return DM_EIO;
    }
    return 0;
}

int dm_kv_verify(dm_kv *kv, dm_kv_check *out, dm_kv_progress fn, void *ctx, dm_err *e)
{
    *out = (dm_kv_check){ 0 };
    dm_kv_stat st = { 0 };
    kv_stat_disk(kv, &st);
    verify v = { .kv = kv, .out = out, .fn = fn, .ctx = ctx, .total = st.blocks + st.states };
    int rc = verify_index(&v, kv->db[KV_DB_BLOCKS]);
    if (!rc) rc = verify_index(&v, kv->db[KV_DB_STATES]);
    if (!rc) rc = verify_orphans(&v);
    if (rc == DM_ECANCELED) return dm_err_set(e, rc, "kv.verify", "stopped after %lld of %lld entries", (long long)v.done, (long long)v.total);
    if (rc) return dm_err_set(e, rc, "kv.verify", "%s: %s", kv->dir, dm_err_text(rc));
    return 0;
}

/* ---- inspect ------------------------------------------------------------------------------------------ */

static int inspect_txn(MDB_env *env, MDB_txn *txn, const char *dir, dm_kv_opts *o, dm_kv_stat *st, dm_err *e)
{
    MDB_dbi db[KV_DB_COUNT];
    kv_meta m;
    if (mdb_dbi_open(txn, kv_db_names[KV_DB_META], 0, &db[KV_DB_META]) == 0 && kv_env_meta(env, txn, db[KV_DB_META], &m) == DM_ENOTSUP)
        return dm_err_set(e, DM_ESTORE, "kv.inspect", "%s: a cache of format %u; delete the directory, or run once and it is replaced", dir, m.version);
    for (int i = 0; i < KV_DB_COUNT; i++)
        if (mdb_dbi_open(txn, kv_db_names[i], 0, &db[i]) != 0)
            return dm_err_set(e, DM_ESTORE, "kv.inspect", "%s: not a KV store (no \"%s\" in data.mdb)", dir, kv_db_names[i]);
    int rc = kv_env_meta(env, txn, db[KV_DB_META], &m);
    if (rc == DM_EVERSION) return dm_err_set(e, rc, "kv.inspect", "%s: the store has format %u, this program knows up to %d", dir, m.version, DM_KV_FORMAT_VERSION);
    if (rc) return dm_err_set(e, rc, "kv.inspect", "%s: the store's description is damaged; delete the directory, it is a cache", dir);
    o->root = m.root;
    o->block_bytes = (size_t)m.block_bytes;
    st->block_bytes = (size_t)m.block_bytes;
    st->extent_bytes = (size_t)m.extent_bytes;
    st->disk_bytes_max = kv_quota_of(txn, db[KV_DB_META]);
    return stat_txn(txn, db, st->extent_bytes, st) ? dm_err_set(e, DM_ESTORE, "kv.inspect", "%s: data.mdb cannot be read", dir) : 0;
}

static int64_t slots_bytes(const char *dir)
{
    struct stat s;
    char *path = dm_path_join(dir, "slots.dat");
    int64_t n = path && stat(path, &s) == 0 ? (int64_t)s.st_blocks * 512 : 0;
    dm_free(path);
    return n;
}

static int inspect_file(const char *dir, const char *path, dm_kv_opts *o, dm_kv_stat *st, dm_err *e)
{
    struct stat s;
    bool fresh;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 || fstat(fd, &s) != 0) {
        int err = errno;
        if (fd >= 0) close(fd);
        return dm_err_sys(e, err, "kv.inspect", "%s", path);
    }
    st->disk_bytes_file = s.st_size + slots_bytes(dir);
    int rc = kv_pages_precheck(fd, dir, &fresh, e);
    if (!rc && fresh) rc = dm_err_set(e, DM_ESTORE, "kv.inspect", "%s: the store is empty", dir);
    MDB_env *env = NULL;
    MDB_txn *txn = NULL;
    if (!rc) rc = kv_env_create(dir, &env, s.st_size + (64 << 20), true, e);
    if (!rc && mdb_txn_begin(env, NULL, MDB_RDONLY, &txn) != 0) rc = dm_err_set(e, DM_ESTORE, "kv.inspect", "%s: data.mdb cannot be read", dir);
    if (!rc) rc = kv_pages_check(fd, env, mdb_txn_id(txn), dir, e);
    if (!rc) rc = inspect_txn(env, txn, dir, o, st, e);
    if (txn) mdb_txn_abort(txn);
    if (env) mdb_env_close(env);
    close(fd);
    return rc;
}

int dm_kv_inspect(const char *dir, dm_kv_opts *opts_out, dm_kv_stat *stat_out, dm_err *e)
{
    *opts_out = (dm_kv_opts){ .dir = dir, .read_only = true };
    *stat_out = (dm_kv_stat){ 0 };
    dm_kv *open_here = kv_dir_holder(dir);
    if (open_here) { /* a second environment in this process would undo the locks of the first */
        *opts_out = open_here->opts;
        opts_out->dir = dir;
        dm_kv_stat_get(open_here, stat_out);
        return 0;
    }
    char *path = dm_path_join(dir, "data.mdb");
    if (!path) return dm_err_set(e, DM_ENOMEM, "kv.inspect", "out of memory");
    int rc = inspect_file(dir, path, opts_out, stat_out, e);
    dm_free(path);
    return rc;
}
