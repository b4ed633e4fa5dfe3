/* env.c — the LMDB environment: opening and refusing, transactions, LMDB's codes.
 *
 * Flags: NOTLS (a read transaction belongs to its object, threads are many and short); NOMETASYNC (a crash of the
 * machine may lose the last commit, never the integrity; dm_kv_flush syncs).  Not WRITEMAP (disk full would be a bus
 * error and a stray pointer could damage the file), not NOSYNC (may corrupt), not NORDAHEAD (35 times slower when
 * cold).
 *
 * The map is as large as data.mdb may become: a sixth of the quota and a little, more than an index takes.  So LMDB itself refuses
 * (MDB_MAP_FULL) to let it eat the quota while a reader elsewhere keeps old pages from being reused.  It is set once, at open; when another
 * process with a larger quota has grown the file (MDB_MAP_RESIZED) the map is moved with no transaction open here.
 *
 * A directory is opened at most once in a process: LMDB's locks are fcntl locks, which vanish when any descriptor of the
 * lock file is closed.  The registry below compares device and inode, so a symlink or another spelling is the same. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "kvstore/kv_int.h"

const char *const kv_db_names[KV_DB_COUNT] = { "blocks", "states", "order", "parts", "free", "meta" };

/* ---- foreign codes ------------------------------------------------------------------------ */

int kv_err(dm_kv *kv, dm_err *e, int rc, const char *where, const char *what)
{
    const char *dir = kv ? kv->dir : "store";
    switch (rc) {
    case MDB_NOTFOUND:
        return dm_err_set(e, DM_EMISS, where, "%s: %s: not there", dir, what);
    case MDB_MAP_FULL:
        return dm_err_set(e, DM_ENOSPC, where, "%s: %s: the quota is full and nothing could be evicted", dir, what);
    case MDB_READERS_FULL:
        return dm_err_set(e, DM_EBUSY, where, "%s: %s: too many readers at once", dir, what);
    case MDB_VERSION_MISMATCH:
        return dm_err_set(e, DM_ESTORE, where, "%s: data.mdb has another LMDB format; delete the directory, it is a cache", dir);
    case MDB_CORRUPTED: case MDB_PAGE_NOTFOUND: case MDB_INVALID: case MDB_PANIC: case MDB_CURSOR_FULL:
    case MDB_INCOMPATIBLE: case MDB_BAD_TXN: case MDB_BAD_DBI: case MDB_BAD_VALSIZE: case MDB_BAD_RSLOT: case MDB_MAP_RESIZED:
    case MDB_TXN_FULL: case MDB_PAGE_FULL: case MDB_TLS_FULL: case MDB_DBS_FULL: case MDB_KEYEXIST:
        return dm_err_set(e, DM_ESTORE, where, "%s: %s: %s; delete the directory, it is a cache", dir, what, mdb_strerror(rc));
    default:
        return dm_err_sys(e, rc > 0 ? rc : EIO, where, "%s: %s", dir, what);
    }
}

/* ---- one process opens a directory once -------------------------------------------------------- */

typedef struct claim {
    struct claim *next;
    dm_kv *kv;
    dev_t dev;
    ino_t ino;
    pid_t pid; /* a forked child inherits the list but not the stores */
} claim;
static pthread_mutex_t claims_lock = PTHREAD_MUTEX_INITIALIZER;
static claim *claims;

static claim *find_claim(const struct stat *st)
{
    pid_t pid = getpid();
    for (claim *c = claims; c; c = c->next)
        if (c->dev == st->st_dev && c->ino == st->st_ino && c->pid == pid) return c;
    return NULL;
}

int kv_dir_claim(const char *dir, dm_kv *kv, dm_err *e)
{
    struct stat st;
    if (stat(dir, &st) != 0) return dm_err_sys(e, errno, "kv.open", "%s", dir);
    claim *c = dm_calloc(1, sizeof *c);
    if (!c) return dm_err_set(e, DM_ENOMEM, "kv.open", "out of memory");
    *c = (claim){ .kv = kv, .dev = st.st_dev, .ino = st.st_ino, .pid = getpid() };
    pthread_mutex_lock(&claims_lock);
    bool taken = find_claim(&st) != NULL;
    if (!taken) c->next = claims, claims = c;
    pthread_mutex_unlock(&claims_lock);
    if (!taken) return 0;
    dm_free(c);
    return dm_err_set(e, DM_EBUSY, "kv.open", "%s: this process has the store open already", dir);
}

void kv_dir_release(dm_kv *kv)
{
    pthread_mutex_lock(&claims_lock);
    for (claim **p = &claims; *p; p = &(*p)->next) {
        if ((*p)->kv != kv) continue;
        claim *c = *p;
        *p = c->next;
        dm_free(c);
        break;
    }
    pthread_mutex_unlock(&claims_lock);
}

dm_kv *kv_dir_holder(const char *dir)
{
    struct stat st;
    if (stat(dir, &st) != 0) return NULL;
    pthread_mutex_lock(&claims_lock);
    claim *c = find_claim(&st);
    dm_kv *kv = c ? c->kv : NULL;
    pthread_mutex_unlock(&claims_lock);
    return kv;
}

/* ---- transactions -------------------------------------------------------------------------------- */

static int move_map(dm_kv *kv)
{
    pthread_rwlock_wrlock(&kv->map); /* no transaction of ours is open */
    int rc = mdb_env_set_mapsize(kv->env, 0); /* 0: as large as the file says */
    pthread_rwlock_unlock(&kv->map);
    return rc;
}

int kv_txn_begin(dm_kv *kv, bool write, MDB_txn **txn)
{
    int rc = 0;
    for (int attempt = 0; attempt < 4; attempt++) {
        pthread_rwlock_rdlock(&kv->map);
        rc = mdb_txn_begin(kv->env, NULL, write ? 0 : MDB_RDONLY, txn);
        if (!rc) return 0;
        pthread_rwlock_unlock(&kv->map);
        int dead = 0;
        if (rc == MDB_MAP_RESIZED) rc = move_map(kv);
        else if (rc == MDB_READERS_FULL) rc = mdb_reader_check(kv->env, &dead);
        else break;
        if (rc) break;
        rc = MDB_READERS_FULL; /* should the attempts run out */
    }
    return rc;
}

void kv_txn_end(dm_kv *kv, MDB_txn *txn)
{
    mdb_txn_abort(txn);
    pthread_rwlock_unlock(&kv->map);
}

int kv_txn_commit(dm_kv *kv, MDB_txn *txn)
{
    int rc = mdb_txn_commit(txn);
    pthread_rwlock_unlock(&kv->map);
    return rc;
}

MDB_dbi kv_index_db(const dm_kv *kv, const kv_key *k) { return kv->db[k->kind == KV_BLOCK ? KV_DB_BLOCKS : KV_DB_STATES]; }

int kv_index_look(dm_kv *kv, MDB_txn *txn, const kv_key *k, kv_index *ix)
{
    uint8_t buf[KV_KEY_MAX];
    MDB_val key = { kv_key_encode(buf, k), buf }, val;
    int rc = mdb_get(txn, kv_index_db(kv, k), &key, &val);
    if (rc) return rc;
    return kv_index_decode(ix, k, val.mv_data, val.mv_size, kv->extent_bytes) ? 0 : MDB_BAD_VALSIZE;
}

int kv_index_get(dm_kv *kv, MDB_txn *txn, const kv_key *k, kv_index *ix)
{
    int rc = kv_index_look(kv, txn, k, ix);
    return rc == MDB_BAD_VALSIZE ? MDB_NOTFOUND : rc;
}

/* ---- opening ---------------------------------------------------------------------------------------- */

/* The environment without databases.  dir must exist. */
int kv_env_create(const char *dir, MDB_env **out, int64_t map_bytes, bool read_only, dm_err *e)
{
    dm_kv named = { .dir = (char *)dir };
    MDB_env *env;
    int rc = mdb_env_create(&env);
    if (rc) return kv_err(&named, e, rc, "kv.open", "mdb_env_create");
    if (!rc) rc = mdb_env_set_maxdbs(env, KV_DB_COUNT);
    if (!rc) rc = mdb_env_set_maxreaders(env, 510);
    if (!rc && map_bytes > 0) rc = mdb_env_set_mapsize(env, (size_t)map_bytes);
    if (!rc) rc = mdb_env_open(env, dir, MDB_NOTLS | MDB_NOMETASYNC | (read_only ? MDB_RDONLY : 0), 0600);
    int dead, fd;
    if (!rc) rc = mdb_env_get_fd(env, &fd);
    if (!rc && fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) rc = errno; /* LMDB 0.9.24 sets it on its other descriptors only */
    if (!rc) rc = mdb_reader_check(env, &dead);
    if (rc) {
        mdb_env_close(env);
        return kv_err(&named, e, rc, "kv.open", "cannot open data.mdb");
    }
    *out = env;
    return 0;
}

int kv_env_meta(MDB_env *env, MDB_txn *txn, MDB_dbi dbi, kv_meta *m)
{
    MDB_val key = { 5, (void *)"store" }, val;
    MDB_stat st;
    if (mdb_get(txn, dbi, &key, &val) != 0 || mdb_env_stat(env, &st) != 0) return DM_ESTORE;
    int rc = kv_meta_decode(m, val.mv_data, val.mv_size);
    return !rc && m->page_bytes != st.ms_psize ? DM_ESTORE : rc;
}

static int check_meta(dm_kv *kv, MDB_txn *txn, dm_err *e)
{
    kv_meta m;
    int rc = kv_env_meta(kv->env, txn, kv->db[KV_DB_META], &m);
    if (rc == DM_EVERSION)
        return dm_err_set(e, rc, "kv.open", "%s: the store has format %u, this program knows up to %d; update it, or delete the "
            "directory, it is a cache", kv->dir, m.version, DM_KV_FORMAT_VERSION);
    if (rc) return dm_err_set(e, rc, "kv.open", "%s: the store's description is damaged; delete the directory, it is a cache", kv->dir);
    if (m.page_bytes != kv->page_bytes)
        return dm_err_set(e, DM_EFOREIGN, "kv.open", "%s: made on a machine with pages of %u bytes, not %zu; delete the directory, it is "
            "a cache", kv->dir, m.page_bytes, kv->page_bytes);
    if (!dm_hash_equal(&m.root, &kv->opts.root))
        return dm_err_set(e, DM_EFOREIGN, "kv.open", "%s: made for another model, tokenizer or tenant; use another directory, or "
            "delete this one, it is a cache", kv->dir);
    if (m.block_bytes != kv->opts.block_bytes)
        return dm_err_set(e, DM_EFOREIGN, "kv.open", "%s: made for blocks of %llu bytes, not %zu; use another directory, or delete "
            "this one, it is a cache", kv->dir, (unsigned long long)m.block_bytes, kv->opts.block_bytes);
    return 0;
}

/* DM_ENOTSUP: it has an older format, hence other databases. */
static int check_age(dm_kv *kv, MDB_txn *txn, dm_err *e)
{
    kv_meta m;
    MDB_dbi meta;
    if (mdb_dbi_open(txn, kv_db_names[KV_DB_META], 0, &meta) != 0 || kv_env_meta(kv->env, txn, meta, &m) != DM_ENOTSUP) return 0;
    return dm_err_set(e, DM_ENOTSUP, "kv.open", "%s: a cache of format %u; delete the directory, or run once and it is replaced", kv->dir, m.version);
}

static int open_databases(dm_kv *kv, MDB_txn *txn, unsigned flags, dm_err *e)
{
    for (int i = 0; i < KV_DB_COUNT; i++) {
        int rc = mdb_dbi_open(txn, kv_db_names[i], flags, &kv->db[i]);
        if (rc == MDB_NOTFOUND || rc == MDB_INCOMPATIBLE)
            return dm_err_set(e, DM_ESTORE, "kv.open", "%s: data.mdb is an LMDB file but not a KV store (no \"%s\"); give another "
                "directory, or delete this one if it is not needed", kv->dir, kv_db_names[i]);
        if (rc) return kv_err(kv, e, rc, "kv.open", kv_db_names[i]);
    }
    return 0;
}

static int create_databases(dm_kv *kv, MDB_txn *txn, dm_err *e)
{
    int rc = open_databases(kv, txn, MDB_CREATE, e);
    if (rc) return rc;
    kv_meta m = { .version = DM_KV_FORMAT_VERSION, .page_bytes = (uint32_t)kv->page_bytes, .block_bytes = kv->opts.block_bytes,
        .extent_bytes = kv->extent_bytes, .root = kv->opts.root };
    uint8_t rec[KV_META_BYTES];
    kv_meta_encode(rec, &m);
    MDB_val key = { 5, (void *)"store" }, val = { sizeof rec, rec };
    rc = mdb_put(txn, kv->db[KV_DB_META], &key, &val, 0);
    if (rc) return kv_err(kv, e, rc, "kv.open", "writing the description");
    /* Nothing of a slot file of former days is known any more. */
    return ftruncate(kv->slots_fd, 0) == 0 ? 0 : dm_err_sys(e, errno, "kv.open", "%s: slots.dat", kv->dir);
}

static bool env_is_empty(MDB_txn *txn)
{
    MDB_dbi main_db;
    MDB_stat st;
    return mdb_dbi_open(txn, NULL, 0, &main_db) == 0 && mdb_stat(txn, main_db, &st) == 0 && st.ms_entries == 0;
}

/* A read transaction whose snapshot is structurally sound.  The transaction keeps its pages from being reused meanwhile. */
static int begin_checked(dm_kv *kv, MDB_txn **txn, dm_err *e)
{
    int rc = DM_EAGAIN;
    for (int i = 0; i < 100 && rc == DM_EAGAIN; i++) {
        rc = kv_txn_begin(kv, false, txn);
        if (rc) return kv_err(kv, e, rc, "kv.open", "first transaction");
        rc = kv_pages_check(kv->fd, kv->env, mdb_txn_id(*txn), kv->dir, e);
        if (rc) kv_txn_end(kv, *txn);
    }
    if (rc == DM_EAGAIN) return dm_err_set(e, DM_EBUSY, "kv.open", "%s: another process writes too fast to look at data.mdb", kv->dir);
    return rc;
}

/* Databases of a new store, or of an old one after its description was checked. */
static int set_up(dm_kv *kv, dm_err *e)
{
    MDB_txn *txn;
    int rc = begin_checked(kv, &txn, e);
    if (rc) return rc;
    bool empty = env_is_empty(txn);
    if (!empty) rc = check_age(kv, txn, e);
    if (!empty && !rc) rc = open_databases(kv, txn, 0, e);
    if (!rc && !empty) rc = check_meta(kv, txn, e);
    if (rc || empty) kv_txn_end(kv, txn);
    else if (kv_txn_commit(kv, txn) != 0) rc = DM_EIO; /* keeps the handles; cannot fail for a read transaction */
    if (rc || !empty) return rc;

    if (kv->opts.read_only) return dm_err_set(e, DM_ESTORE, "kv.open", "%s: the store is empty", kv->dir);
    rc = kv_txn_begin(kv, true, &txn);
    if (rc) return kv_err(kv, e, rc, "kv.open", "first transaction");
    if (!env_is_empty(txn)) { /* another process was faster */
        kv_txn_end(kv, txn);
        return set_up(kv, e);
    }
    rc = create_databases(kv, txn, e);
    if (rc) {
        kv_txn_end(kv, txn);
        return rc;
    }
    rc = kv_txn_commit(kv, txn);
    return rc ? kv_err(kv, e, rc, "kv.open", "creating the store") : 0;
}

/* The file is looked at with plain reads before LMDB maps it: reading a map behind the end of a cut file is a bus error. */
static int check_file(dm_kv *kv, const char *path, dm_err *e)
{
    bool fresh = true;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0 && errno != ENOENT) return dm_err_sys(e, errno, "kv.open", "%s", path);
    int rc = 0;
    if (fd >= 0) {
        rc = kv_pages_precheck(fd, kv->dir, &fresh, e);
        close(fd);
    }
    if (!rc && fresh && kv->opts.read_only) rc = dm_err_set(e, DM_ENOENT, "kv.open", "%s: there is no store", kv->dir);
    return rc;
}

/* One more: LMDB refuses the allocation that would fill the map. */
int64_t kv_map_limit(const dm_kv *kv, bool emergency)
{
    int64_t most = kv->quota_pages + (int64_t)kv->extent_pages, pages = 192 + kv->quota_pages / 6;
    return ((pages < most ? pages : most) + 1 - (emergency ? 0 : KV_EMERGENCY_PAGES)) * (int64_t)kv->page_bytes;
}

static int open_once(dm_kv *kv, dm_err *e)
{
    char *path = dm_path_join(kv->dir, "data.mdb");
    if (!path) return dm_err_set(e, DM_ENOMEM, "kv.open", "out of memory");
    int rc = check_file(kv, path, e);
    if (!rc) rc = kv_env_create(kv->dir, &kv->env, kv_map_limit(kv, false), kv->opts.read_only, e);
    if (!rc && (kv->fd = open(path, O_RDONLY | O_CLOEXEC)) < 0) rc = dm_err_sys(e, errno, "kv.open", "%s", path);
    if (!rc) rc = kv_slots_open(kv, e);
    if (!rc) rc = set_up(kv, e);
    dm_free(path);
    return rc;
}

/* Of a store of an older format; it is a cache. */
static int remove_files(const dm_kv *kv, dm_err *e)
{
    static const char *const names[] = { "data.mdb", "lock.mdb", "slots.dat" };
    for (size_t i = 0; i < DM_COUNT(names); i++) {
        char *path = dm_path_join(kv->dir, names[i]);
        if (!path) return dm_err_set(e, DM_ENOMEM, "kv.open", "out of memory");
        int rc = unlink(path) == 0 || errno == ENOENT ? 0 : dm_err_sys(e, errno, "kv.open", "%s", path);
        dm_free(path);
        if (rc) return rc;
    }
    return 0;
}

int kv_env_open(dm_kv *kv, dm_err *e)
{
    int rc = open_once(kv, e);
    if (rc != DM_ENOTSUP || kv->opts.read_only) return rc == DM_ENOTSUP ? DM_ESTORE : rc;
    kv_env_close(kv);
    rc = remove_files(kv, e);
    if (rc) return rc;
    dm_log(DM_LOG_INFO, "kv: %s: a cache of an older format is replaced by an empty one", kv->dir);
    return open_once(kv, e);
}

void kv_env_close(dm_kv *kv)
{
    if (kv->env) mdb_env_close(kv->env);
    if (kv->fd >= 0) close(kv->fd);
    kv_slots_close(kv);
    kv->env = NULL;
    kv->fd = -1;
}
