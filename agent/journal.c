/* journal.c — sessions as append-only rows in one LMDB environment.
 *
 * Databases
 *   meta    "format" -> decimal text.  Read before anything is written: a newer number is refused, untouched.
 *   events  session id (26 bytes) ‖ sequence number (8 bytes, big endian) -> XXH3-128 of the text (16) ‖ JSON text
 *   heads   session id -> JSON text of the head row (journal_head.c)
 *
 * Invariants
 *   J1  An append is one transaction: all its events and the head row, or nothing (Q33).
 *   J2  It is synced when the append returns: no NOSYNC, no NOMETASYNC, no WRITEMAP (C3).
 *   J3  The file is never shorter than the pages that its newest meta page counts.  LMDB maps the file, so a
 *       read behind the end of a cut file is a SIGBUS; it also may leave unwritten pages at the end of a good
 *       one.  We therefore lengthen the file (a hole) before each write, and a short file is refused at open.
 *   J4  Sequence numbers of a session run from 1 without a gap. */
#include "agent/agent_int.h"

#include <dirent.h>
#include <errno.h>
#include <lmdb.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#define MAP_BYTES_FIRST ((size_t)16 << 20) /* address space; doubled when it is full, so that path is a common one */
#define GROW_BYTES ((off_t)1 << 20)       /* the file's length moves in steps of this (J3) */
#define DISK_FULL_BYTES (256u << 10)      /* less than this left: a failed write is a full disk */
#define EVENT_SUM_BYTES 16
#define EVENT_KEY_BYTES (DM_SESSION_ID_CHARS + 8)
#define CLAIMS_MAX 64

typedef struct claim { char id[DM_SESSION_ID_CHARS + 1]; int fd; } claim;

struct dm_journal {
    MDB_env *env;
    MDB_dbi meta, events, heads;
    bool read_only, have_dbs;
    char *dir, *env_dir, *lock_dir; /* owned */
    dev_t dev; ino_t ino;           /* of the data file: identity for open_list */
    claim claims[CLAIMS_MAX];
    int nclaims;
    struct dm_journal *next;        /* open_list */
};

/* LMDB's locks are per process: a second environment on one file would drop the locks of the first when it is
 * closed.  So we know what is open.  Guarded by open_lock. */
static pthread_mutex_t open_lock = PTHREAD_MUTEX_INITIALIZER;
static dm_journal *open_list;

/* ---- LMDB's codes stop here -------------------------------------------------------------------- */

/* A short write of LMDB comes as EIO; what is left of the disk tells the cause. */
static bool disk_is_full(const dm_journal *j)
{
    struct statvfs fs;
    return statvfs(j->env_dir, &fs) == 0 && (uint64_t)fs.f_bavail * fs.f_frsize < DISK_FULL_BYTES;
}

static int from_mdb(dm_err *e, int rc, const dm_journal *j, const char *doing)
{
    switch (rc) {
    case 0: return 0;
    case MDB_INVALID: case MDB_VERSION_MISMATCH: case MDB_CORRUPTED: case MDB_PAGE_NOTFOUND: case MDB_PANIC:
    case MDB_INCOMPATIBLE: case MDB_BAD_DBI:
        return dm_err_set(e, DM_ESTORE, "journal", "%s is not a usable journal (%s: %s); move it away to start an empty one",
                          j->env_dir, doing, mdb_strerror(rc));
    case MDB_READERS_FULL:
        return dm_err_set(e, DM_EAGAIN, "journal", "too many processes read %s at once", j->env_dir);
    case ENOMEM: return dm_err_set(e, DM_ENOMEM, "journal", "out of memory while %s", doing);
    default:
        if (rc < 0) return dm_err_set(e, DM_ESTORE, "journal", "%s: %s: %s", j->env_dir, doing, mdb_strerror(rc));
        if (rc == ENOSPC || rc == EDQUOT || (rc == EIO && disk_is_full(j)))
            return dm_err_set(e, DM_ENOSPC, "journal", "%s: %s: no space left on the disk; make room (kv/ beside it is a cache and may be deleted)",
                              j->env_dir, doing);
        return dm_err_sys(e, rc, "journal", "%s: %s", j->env_dir, doing);
    }
}

/* Begins a transaction; another process may have made the map larger meanwhile. */
static int txn_begin(dm_journal *j, bool write, MDB_txn **txn)
{
    int rc = mdb_txn_begin(j->env, NULL, write ? 0 : MDB_RDONLY, txn);
    if (rc == MDB_MAP_RESIZED) {
        rc = mdb_env_set_mapsize(j->env, 0);
        if (rc == 0) rc = mdb_txn_begin(j->env, NULL, write ? 0 : MDB_RDONLY, txn);
    }
    return rc;
}

/* J3: room in the file for everything that the next transaction may allocate.  Called inside the write
 * transaction, so no other process grows the file meanwhile. */
static int reserve_file(dm_journal *j, size_t payload_bytes)
{
    MDB_envinfo info;
    mdb_filehandle_t fd;
    struct stat st;
    int rc = mdb_env_info(j->env, &info);
    if (rc == 0) rc = mdb_env_get_fd(j->env, &fd);
    if (rc) return rc;
    if (fstat(fd, &st) != 0) return errno;
    off_t page = (off_t)sysconf(_SC_PAGESIZE);
    /* Copy on write touches each tree's path: far under GROW_BYTES beside the payload. */
    off_t need = ((off_t)info.me_last_pgno + 1) * page + 3 * (off_t)payload_bytes + GROW_BYTES;
    need = (need + GROW_BYTES - 1) / GROW_BYTES * GROW_BYTES;
    if (st.st_size < need && ftruncate(fd, need) != 0) return errno;
    return 0;
}

/* ---- open ---------------------------------------------------------------------------------------- */

static int check_length(dm_journal *j, dm_err *e)
{
    MDB_envinfo info;
    mdb_filehandle_t fd;
    struct stat st;
    int rc = mdb_env_info(j->env, &info);
    if (rc == 0) rc = mdb_env_get_fd(j->env, &fd);
    if (rc) return from_mdb(e, rc, j, "looking at the file");
    if (fstat(fd, &st) != 0) return dm_err_sys(e, errno, "journal", "%s", j->env_dir);
    uint64_t need = ((uint64_t)info.me_last_pgno + 1) * (uint64_t)sysconf(_SC_PAGESIZE);
    if ((uint64_t)st.st_size < need)
        return dm_err_set(e, DM_ESTORE, "journal", "%s/data.mdb is cut short (%lld of %llu bytes); restore it from a backup or move it away",
                          j->env_dir, (long long)st.st_size, (unsigned long long)need);
    return 0;
}

/* The format number, 0 when the environment is empty, or an error. */
static int read_format(dm_journal *j, long *format, dm_err *e)
{
    MDB_txn *txn;
    MDB_dbi meta;
    *format = 0;
    int rc = txn_begin(j, false, &txn);
    if (rc) return from_mdb(e, rc, j, "reading the format");
    MDB_stat root;
    MDB_dbi main_dbi;
    rc = mdb_dbi_open(txn, NULL, 0, &main_dbi);
    if (rc == 0) rc = mdb_stat(txn, main_dbi, &root);
    bool empty = rc == 0 && root.ms_entries == 0;
    if (rc == 0 && !empty) {
        MDB_val k = { 6, (void *)"format" }, v;
        rc = mdb_dbi_open(txn, "meta", 0, &meta);
        if (rc == 0) rc = mdb_get(txn, meta, &k, &v);
        if (rc == 0 && v.mv_size > 0 && v.mv_size < 12) {
            char text[12] = { 0 };
            memcpy(text, v.mv_data, v.mv_size);
            *format = strtol(text, NULL, 10);
        }
        if (rc == MDB_NOTFOUND) rc = 0;
    }
    mdb_txn_abort(txn);
    if (rc) return from_mdb(e, rc, j, "reading the format");
    if (!empty && *format <= 0)
        return dm_err_set(e, DM_ESTORE, "journal", "%s holds something else than a journal; choose another state directory", j->env_dir);
    if (*format > DM_JOURNAL_FORMAT_VERSION)
        return dm_err_set(e, DM_EVERSION, "journal", "%s has format %ld and this program knows %d; use the newer program",
                          j->env_dir, *format, DM_JOURNAL_FORMAT_VERSION);
    return 0;
}

static int open_dbs(dm_journal *j, long format, dm_err *e)
{
    if (j->read_only && format == 0) return 0; /* empty: nothing to open, nothing to list */
    unsigned flags = j->read_only ? 0 : MDB_CREATE;
    MDB_txn *txn;
    int rc = txn_begin(j, !j->read_only, &txn);
    if (rc) return from_mdb(e, rc, j, "opening the tables");
    if (!j->read_only) rc = reserve_file(j, 0);
    if (rc == 0) rc = mdb_dbi_open(txn, "meta", flags, &j->meta);
    if (rc == 0) rc = mdb_dbi_open(txn, "events", flags, &j->events);
    if (rc == 0) rc = mdb_dbi_open(txn, "heads", flags, &j->heads);
    if (rc == 0 && format == 0) {
        char text[12];
        MDB_val k = { 6, (void *)"format" }, v = { (size_t)snprintf(text, sizeof text, "%d", DM_JOURNAL_FORMAT_VERSION), text };
        rc = mdb_put(txn, j->meta, &k, &v, 0);
    }
    if (rc == 0) rc = mdb_txn_commit(txn);
    else mdb_txn_abort(txn);
    j->have_dbs = rc == 0;
    return from_mdb(e, rc, j, "opening the tables");
}

/* Registers the data file as open in this process. */
static int list_enter(dm_journal *j, dm_err *e)
{
    struct stat st;
    char *file = dm_path_join(j->env_dir, "data.mdb");
    if (!file) return dm_err_set(e, DM_ENOMEM, "journal", "out of memory");
    int rc = stat(file, &st);
    int err = errno;
    dm_free(file);
    if (rc != 0) {
        if (err == ENOENT) return 0; /* is about to be made */
        return dm_err_sys(e, err, "journal", "%s", j->env_dir);
    }
    pthread_mutex_lock(&open_lock);
    for (dm_journal *o = open_list; o; o = o->next)
        if (o->dev == st.st_dev && o->ino == st.st_ino) {
            pthread_mutex_unlock(&open_lock);
            return dm_err_set(e, DM_EBUSY, "journal", "%s is open in this process already", j->env_dir);
        }
    j->dev = st.st_dev;
    j->ino = st.st_ino;
    j->next = open_list;
    open_list = j;
    pthread_mutex_unlock(&open_lock);
    return 0;
}

static void list_leave(dm_journal *j)
{
    pthread_mutex_lock(&open_lock);
    for (dm_journal **p = &open_list; *p; p = &(*p)->next)
        if (*p == j) { *p = j->next; break; }
    pthread_mutex_unlock(&open_lock);
}

static int make_paths(dm_journal *j, const char *dir, dm_err *e)
{
    j->dir = dm_strdup(dir);
    j->env_dir = dm_path_join(dir, "journal");
    j->lock_dir = dm_path_join(dir, "locks");
    if (!j->dir || !j->env_dir || !j->lock_dir) return dm_err_set(e, DM_ENOMEM, "journal", "out of memory");
    if (j->read_only) {
        char *file = dm_path_join(j->env_dir, "data.mdb");
        if (!file) return dm_err_set(e, DM_ENOMEM, "journal", "out of memory");
        bool there = dm_path_exists(file);
        dm_free(file);
        return there ? 0 : dm_err_set(e, DM_ENOENT, "journal", "no journal in %s", dir);
    }
    int rc = dm_mkdirs(j->env_dir, 0700, e);
    return rc < 0 ? rc : dm_mkdirs(j->lock_dir, 0700, e);
}

/* Sessions leave lock files.  Where those are and the journal is not, it was lost: an empty file is refused, since it was
 * not made by us (a fresh one has no sessions beside it); a missing one is made anew, and said. */
static int check_lost(const dm_journal *j, dm_err *e)
{
    struct stat st;
    char *path = dm_path_join(j->env_dir, "data.mdb");
    if (!path) return dm_err_set(e, DM_ENOMEM, "journal", "out of memory");
    bool there = stat(path, &st) == 0, sessions = false;
    dm_free(path);
    if (there && st.st_size > 0) return 0;
    DIR *d = opendir(j->lock_dir);
    for (struct dirent *f; d && !sessions && (f = readdir(d));) sessions = f->d_name[0] != '.';
    if (d) closedir(d);
    if (!sessions) return 0;
    if (there)
        return dm_err_set(e, DM_ESTORE, "journal", "%s/data.mdb is empty although sessions were run here; restore it from a backup or move it away", j->env_dir);
    dm_log(DM_LOG_WARN, "journal: %s/data.mdb is gone although sessions were run here; an empty one is begun", j->env_dir);
    return 0;
}

int dm_journal_open(dm_journal **out, const char *dir, bool read_only, dm_err *e)
{
    *out = NULL;
    dm_journal *j = dm_calloc(1, sizeof *j);
    if (!j) return dm_err_set(e, DM_ENOMEM, "journal", "out of memory");
    j->read_only = read_only;
    long format = 0;
    int rc = make_paths(j, dir, e);
    if (rc == 0) rc = list_enter(j, e);
    if (rc == 0) rc = check_lost(j, e);
    if (rc == 0) rc = from_mdb(e, mdb_env_create(&j->env), j, "creating the environment");
    if (rc == 0) rc = from_mdb(e, mdb_env_set_maxdbs(j->env, 4), j, "creating the environment");
    if (rc == 0) rc = from_mdb(e, mdb_env_set_mapsize(j->env, MAP_BYTES_FIRST), j, "reserving address space");
    if (rc == 0) rc = from_mdb(e, mdb_env_open(j->env, j->env_dir, MDB_NOTLS | (read_only ? MDB_RDONLY : 0), 0600), j, "opening");
    if (rc == 0) rc = check_length(j, e);
    int dead = 0;
    if (rc == 0) rc = from_mdb(e, mdb_reader_check(j->env, &dead), j, "clearing stale readers");
    if (rc == 0) rc = read_format(j, &format, e);
    if (rc == 0) rc = open_dbs(j, format, e);
    if (rc == 0 && !j->ino) rc = list_enter(j, e);
    if (rc < 0) {
        dm_journal_close(j);
        return rc;
    }
    *out = j;
    return 0;
}

void dm_journal_close(dm_journal *j)
{
    if (!j) return;
    for (int i = 0; i < j->nclaims; i++) claim_drop(j->claims[i].fd);
    if (j->env) mdb_env_close(j->env);
    list_leave(j);
    dm_free(j->dir);
    dm_free(j->env_dir);
    dm_free(j->lock_dir);
    dm_free(j);
}

/* ---- keys and records -------------------------------------------------------------------------------- */

static bool id_ok(const char *id)
{
    if (strlen(id) != DM_SESSION_ID_CHARS) return false;
    for (const char *p = id; *p; p++)
        if (!((*p >= '0' && *p <= '9') || (*p >= 'A' && *p <= 'Z'))) return false;
    return true;
}

static int id_check(const char *id, dm_err *e)
{
    return id_ok(id) ? 0 : dm_err_set(e, DM_EINVAL, "journal", "\"%s\" is not a session id (%d letters and digits)", id, DM_SESSION_ID_CHARS);
}

static void event_key(uint8_t key[EVENT_KEY_BYTES], const char *session, uint64_t seq)
{
    memcpy(key, session, DM_SESSION_ID_CHARS);
    for (int i = 0; i < 8; i++) key[DM_SESSION_ID_CHARS + i] = (uint8_t)(seq >> (56 - 8 * i));
}

static uint64_t event_seq(const MDB_val *k)
{
    uint64_t seq = 0;
    const uint8_t *p = (const uint8_t *)k->mv_data + DM_SESSION_ID_CHARS;
    for (int i = 0; i < 8; i++) seq = seq << 8 | p[i];
    return seq;
}

static bool key_of_session(const MDB_val *k, const char *session)
{
    return k->mv_size == EVENT_KEY_BYTES && memcmp(k->mv_data, session, DM_SESSION_ID_CHARS) == 0;
}

/* Number of the last event, 0 when there is none: the key before the first one that is greater than any of the
 * session's. */
static int last_seq(dm_journal *j, MDB_txn *txn, const char *session, uint64_t *seq)
{
    MDB_cursor *c;
    uint8_t key[EVENT_KEY_BYTES];
    *seq = 0;
    int rc = mdb_cursor_open(txn, j->events, &c);
    if (rc) return rc;
    event_key(key, session, UINT64_MAX);
    MDB_val k = { sizeof key, key }, v;
    rc = mdb_cursor_get(c, &k, &v, MDB_SET_RANGE);
    if (rc == 0) rc = mdb_cursor_get(c, &k, &v, MDB_PREV);
    else if (rc == MDB_NOTFOUND) rc = mdb_cursor_get(c, &k, &v, MDB_LAST);
    if (rc == 0 && key_of_session(&k, session)) *seq = event_seq(&k);
    mdb_cursor_close(c);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

static json_t *parse_text(const void *p, size_t n)
{
    return json_loadb(p, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
}

/* ---- append -------------------------------------------------------------------------------------------- */

typedef struct rows { char **text; size_t n, bytes; } rows; /* the events as text */

static void rows_free(rows *r)
{
    for (size_t i = 0; r->text && i < r->n; i++) dm_free(r->text[i]);
    dm_free(r->text);
}

static int rows_make(rows *r, json_t *const *events, size_t n, dm_err *e)
{
    r->text = dm_calloc(n ? n : 1, sizeof *r->text);
    r->n = n;
    if (!r->text) return dm_err_set(e, DM_ENOMEM, "journal", "out of memory");
    for (size_t i = 0; i < n; i++) {
        if (!json_is_object(events[i]) || !*json_str(events[i], "type"))
            return dm_err_set(e, DM_EINVAL, "journal", "event %zu has no type", i);
        if (!(r->text[i] = json_line(events[i]))) return dm_err_set(e, DM_ENOMEM, "journal", "out of memory");
        r->bytes += strlen(r->text[i]) + EVENT_SUM_BYTES + 64;
    }
    return 0;
}

static int put_event(dm_journal *j, MDB_txn *txn, const char *session, uint64_t seq, const char *text)
{
    uint8_t key[EVENT_KEY_BYTES];
    size_t n = strlen(text);
    event_key(key, session, seq);
    MDB_val k = { sizeof key, key }, v = { n + EVENT_SUM_BYTES, NULL };
    int rc = mdb_put(txn, j->events, &k, &v, MDB_RESERVE | MDB_NOOVERWRITE);
    if (rc) return rc;
    dm_xxh3_128(v.mv_data, text, n);
    memcpy((uint8_t *)v.mv_data + EVENT_SUM_BYTES, text, n);
    return 0;
}

static int put_head(dm_journal *j, MDB_txn *txn, const char *session, json_t *const *events, size_t n)
{
    MDB_val k = { DM_SESSION_ID_CHARS, (void *)session }, v;
    int rc = mdb_get(txn, j->heads, &k, &v);
    if (rc && rc != MDB_NOTFOUND) return rc;
    json_t *head = rc == 0 ? parse_text(v.mv_data, v.mv_size) : json_object();
    if (!head) head = json_object(); /* a broken head is made anew; the events are the truth */
    if (!head) return ENOMEM;
    rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++) rc = head_apply(head, session, events[i]) < 0 ? ENOMEM : 0;
    char *text = rc == 0 ? json_line(head) : NULL;
    json_decref(head);
    if (!text) return ENOMEM;
    v = (MDB_val){ strlen(text), text };
    rc = mdb_put(txn, j->heads, &k, &v, 0);
    dm_free(text);
    return rc;
}

static int append_once(dm_journal *j, const char *session, json_t *const *events, const rows *r, int64_t *seq)
{
    MDB_txn *txn;
    uint64_t last;
    int rc = txn_begin(j, true, &txn);
    if (rc) return rc;
    rc = reserve_file(j, r->bytes);
    if (rc == 0) rc = last_seq(j, txn, session, &last);
    for (size_t i = 0; i < r->n && rc == 0; i++) rc = put_event(j, txn, session, ++last, r->text[i]);
    if (rc == 0) rc = put_head(j, txn, session, events, r->n);
    if (rc == 0 && dm_fault("journal.commit")) rc = EIO;
    if (rc) {
        mdb_txn_abort(txn);
        return rc;
    }
    if (seq) *seq = (int64_t)last;
    return mdb_txn_commit(txn);
}

int dm_journal_append(dm_journal *j, const char *session, json_t *const *events, size_t n, int64_t *seq, dm_err *e)
{
    int rc = id_check(session, e);
    if (rc < 0) return rc;
    if (j->read_only) return dm_err_set(e, DM_ESTATE, "journal", "%s is open for reading only", j->env_dir);
    rows r = { 0 };
    rc = rows_make(&r, events, n, e);
    if (rc == 0) {
        int m = append_once(j, session, events, &r, seq);
        while (m == MDB_MAP_FULL) { /* only address space; no transaction is open now */
            MDB_envinfo info;
            m = mdb_env_info(j->env, &info);
            if (m == 0) m = mdb_env_set_mapsize(j->env, info.me_mapsize * 2);
            if (m == 0) m = append_once(j, session, events, &r, seq);
        }
        rc = from_mdb(e, m, j, "writing an event");
    }
    rows_free(&r);
    return rc;
}

/* ---- read ------------------------------------------------------------------------------------------------ */

static int bad_record(dm_err *e, const char *session, uint64_t seq)
{
    return dm_err_set(e, DM_ECORRUPT, "journal", "event %llu of session %s cannot be read; the session cannot be resumed",
                      (unsigned long long)seq, session);
}

static int read_row(const char *session, uint64_t want, const MDB_val *k, const MDB_val *v, dm_journal_fn fn, void *ctx, dm_err *e)
{
    uint64_t seq = event_seq(k);
    if (seq != want) return bad_record(e, session, want); /* J4 */
    if (v->mv_size < EVENT_SUM_BYTES) return bad_record(e, session, seq);
    const uint8_t *text = (const uint8_t *)v->mv_data + EVENT_SUM_BYTES;
    uint8_t sum[16];
    dm_xxh3_128(sum, text, v->mv_size - EVENT_SUM_BYTES);
    if (memcmp(sum, v->mv_data, sizeof sum) != 0) return bad_record(e, session, seq);
    json_t *event = parse_text(text, v->mv_size - EVENT_SUM_BYTES);
    if (!event || !*json_str(event, "type")) {
        json_decref(event);
        return bad_record(e, session, seq);
    }
    int rc = fn(ctx, (int64_t)seq, event);
    json_decref(event);
    return rc;
}

static int not_found(dm_journal *j, const char *session, dm_err *e)
{
    return dm_err_set(e, DM_ENOENT, "session", "no session \"%s\" in %s; `dormouse sessions ls` lists them", session, j->dir);
}

int dm_journal_read(dm_journal *j, const char *session, dm_journal_fn fn, void *ctx, dm_err *e)
{
    if (!j->have_dbs || !id_ok(session)) return not_found(j, session, e);
    MDB_txn *txn;
    MDB_cursor *c;
    int m = txn_begin(j, false, &txn);
    if (m) return from_mdb(e, m, j, "reading");
    m = mdb_cursor_open(txn, j->events, &c);
    if (m) {
        mdb_txn_abort(txn);
        return from_mdb(e, m, j, "reading");
    }
    uint8_t key[EVENT_KEY_BYTES];
    event_key(key, session, 0);
    MDB_val k = { sizeof key, key }, v;
    uint64_t want = 1;
    int rc = 0;
    m = mdb_cursor_get(c, &k, &v, MDB_SET_RANGE);
    while (m == 0 && rc == 0 && key_of_session(&k, session)) {
        rc = read_row(session, want++, &k, &v, fn, ctx, e);
        if (rc == 0) m = mdb_cursor_get(c, &k, &v, MDB_NEXT);
    }
    mdb_cursor_close(c);
    mdb_txn_abort(txn);
    if (m && m != MDB_NOTFOUND) return from_mdb(e, m, j, "reading");
    if (rc == 0 && want == 1) return not_found(j, session, e);
    return rc;
}

int dm_journal_list(dm_journal *j, dm_journal_list_fn fn, void *ctx, dm_err *e)
{
    if (!j->have_dbs) return 0;
    MDB_txn *txn;
    MDB_cursor *c;
    int m = txn_begin(j, false, &txn);
    if (m) return from_mdb(e, m, j, "listing");
    m = mdb_cursor_open(txn, j->heads, &c);
    if (m) {
        mdb_txn_abort(txn);
        return from_mdb(e, m, j, "listing");
    }
    MDB_val k, v;
    int rc = 0;
    while (rc == 0 && (m = mdb_cursor_get(c, &k, &v, MDB_NEXT)) == 0) {
        json_t *head = parse_text(v.mv_data, v.mv_size);
        if (!head) { /* one bad row hides no others */
            head = json_pack("{s:s%, s:s}", "id", (const char *)k.mv_data, k.mv_size, "state", "unreadable");
            if (!head) continue;
        }
        rc = fn(ctx, head);
        json_decref(head);
    }
    mdb_cursor_close(c);
    mdb_txn_abort(txn);
    if (m && m != MDB_NOTFOUND) return from_mdb(e, m, j, "listing");
    return rc;
}

/* ---- adopt ----------------------------------------------------------------------------------------------- */

static int gone_another_way(const char *session, int64_t here, int64_t n, bool equal, dm_err *e)
{
    if (equal)
        return dm_err_set(e, DM_EEXIST, "journal", "session %s is here already and has gone on: it has %lld events, and %lld are given; nothing was changed", session,
                          (long long)here, (long long)n);
    return dm_err_set(e, DM_EEXIST, "journal", "session %s is here already and has gone another way than the one that is given; nothing was changed", session);
}

/* Are the rows that are there the first ones of those that are given? */
static int compare_rows(dm_journal *j, MDB_txn *txn, const char *session, int64_t here, int64_t n, const dm_journal_rows *given, int *m, dm_err *e)
{
    int rc = 0;
    for (int64_t i = 1; i <= here && i <= n && rc == 0 && *m == 0; i++) {
        uint8_t key[EVENT_KEY_BYTES];
        const char *text;
        size_t bytes;
        event_key(key, session, (uint64_t)i);
        MDB_val k = { sizeof key, key }, v;
        rc = given->row(given->ctx, i, &text, &bytes, e);
        if (rc == 0) *m = mdb_get(txn, j->events, &k, &v);
        if (rc == 0 && *m == 0 && (v.mv_size != bytes + EVENT_SUM_BYTES || memcmp((uint8_t *)v.mv_data + EVENT_SUM_BYTES, text, bytes) != 0))
            rc = gone_another_way(session, here, n, false, e);
    }
    return rc == 0 && *m == 0 && here > n ? gone_another_way(session, here, n, true, e) : rc;
}

static int put_given(dm_journal *j, MDB_txn *txn, const char *session, int64_t i, const char *text, size_t bytes, int *m, dm_err *e)
{
    json_t *event = parse_text(text, bytes);
    if (!event || !*json_str(event, "type") || memchr(text, 0, bytes)) {
        json_decref(event);
        return dm_err_set(e, DM_EFORMAT, "journal", "event %lld is no event", (long long)i);
    }
    *m = put_event(j, txn, session, (uint64_t)i, text);
    if (*m == 0) *m = put_head(j, txn, session, &event, 1);
    json_decref(event);
    return 0;
}

/* Codes of LMDB in *m. */
static int adopt_once(dm_journal *j, const char *session, const dm_journal_rows *given, bool only_check, int64_t *added, int *m, dm_err *e)
{
    MDB_txn *txn;
    uint64_t here = 0;
    *m = txn_begin(j, !only_check, &txn);
    if (*m) return 0;
    if (!only_check) *m = reserve_file(j, (size_t)given->bytes);
    if (*m == 0) *m = last_seq(j, txn, session, &here);
    int rc = *m == 0 ? compare_rows(j, txn, session, (int64_t)here, given->n, given, m, e) : 0;
    *added = given->n - (int64_t)here;
    for (int64_t i = (int64_t)here + 1; i <= given->n && rc == 0 && *m == 0 && !only_check; i++) {
        const char *text;
        size_t bytes;
        rc = given->row(given->ctx, i, &text, &bytes, e);
        if (rc == 0) rc = put_given(j, txn, session, i, text, bytes, m, e);
    }
    if (rc == 0 && *m == 0 && !only_check && dm_fault("journal.commit")) *m = EIO;
    if (rc < 0 || *m || only_check || *added == 0) mdb_txn_abort(txn);
    else *m = mdb_txn_commit(txn);
    return rc;
}

int dm_journal_adopt(dm_journal *j, const char *session, const dm_journal_rows *given, bool only_check, int64_t *added, dm_err *e)
{
    int m, rc = id_check(session, e);
    *added = given->n;
    if (rc < 0) return rc;
    if (!j->have_dbs) return only_check ? 0 : dm_err_set(e, DM_ESTATE, "journal", "%s is open for reading only", j->env_dir);
    if (j->read_only && !only_check) return dm_err_set(e, DM_ESTATE, "journal", "%s is open for reading only", j->env_dir);
    rc = adopt_once(j, session, given, only_check, added, &m, e);
    while (rc == 0 && m == MDB_MAP_FULL) { /* only address space */
        MDB_envinfo info;
        m = mdb_env_info(j->env, &info);
        if (m == 0) m = mdb_env_set_mapsize(j->env, info.me_mapsize * 2);
        if (m == 0) rc = adopt_once(j, session, given, only_check, added, &m, e);
    }
    return rc < 0 ? rc : from_mdb(e, m, j, "taking in a session");
}

/* ---- resolve ------------------------------------------------------------------------------------------------ */

typedef struct resolve { const char *prefix; char *out; int matches; int64_t newest_ms; bool last; } resolve;

static int resolve_row(void *ctx, const json_t *head)
{
    resolve *r = ctx;
    const char *id = json_str(head, "id");
    if (!id_ok(id)) return 0;
    if (r->last) {
        int64_t ms = json_int(head, "updated_ms", 0);
        if (r->matches && ms < r->newest_ms) return 0;
        r->newest_ms = ms;
        r->matches = 1;
    } else {
        if (strncasecmp(id, r->prefix, strlen(r->prefix)) != 0) return 0;
        r->matches++;
    }
    memcpy(r->out, id, DM_SESSION_ID_CHARS + 1);
    return 0;
}

int dm_journal_resolve(dm_journal *j, const char *prefix, char out[DM_SESSION_ID_CHARS + 1], dm_err *e)
{
    resolve r = { .prefix = prefix, .out = out, .last = strcmp(prefix, "last") == 0 };
    if (!r.last && strlen(prefix) < 4)
        return dm_err_set(e, DM_EINVAL, "session", "\"%s\" is too short for a session; give at least 4 characters", prefix);
    int rc = dm_journal_list(j, resolve_row, &r, e);
    if (rc < 0) return rc;
    if (r.matches == 0) return not_found(j, prefix, e);
    if (r.matches > 1)
        return dm_err_set(e, DM_EINVAL, "session", "%d sessions begin with \"%s\"; give more of the id", r.matches, prefix);
    return 0;
}

/* ---- remove and claim ------------------------------------------------------------------------------------------ */

static int remove_rows(dm_journal *j, const char *session, bool *found)
{
    MDB_txn *txn;
    MDB_cursor *c;
    *found = false;
    int m = txn_begin(j, true, &txn);
    if (m) return m;
    m = reserve_file(j, 0);
    if (m == 0) m = mdb_cursor_open(txn, j->events, &c);
    if (m) {
        mdb_txn_abort(txn);
        return m;
    }
    uint8_t key[EVENT_KEY_BYTES];
    event_key(key, session, 0);
    MDB_val k = { sizeof key, key }, v;
    m = mdb_cursor_get(c, &k, &v, MDB_SET_RANGE);
    while (m == 0 && key_of_session(&k, session)) {
        *found = true;
        m = mdb_cursor_del(c, 0);
        if (m == 0) m = mdb_cursor_get(c, &k, &v, MDB_GET_CURRENT); /* the next one moved into its place */
        if (m == EINVAL) m = MDB_NOTFOUND;                          /* it was the last of the table */
    }
    mdb_cursor_close(c);
    if (m == 0 || m == MDB_NOTFOUND) {
        k = (MDB_val){ DM_SESSION_ID_CHARS, (void *)session };
        m = mdb_del(txn, j->heads, &k, NULL);
        if (m == 0) *found = true;
        if (m == MDB_NOTFOUND) m = 0;
    }
    if (m == 0) return mdb_txn_commit(txn);
    mdb_txn_abort(txn);
    return m;
}

int dm_journal_remove(dm_journal *j, const char *session, dm_err *e)
{
    if (!j->have_dbs || !id_ok(session)) return not_found(j, session, e);
    if (j->read_only) return dm_err_set(e, DM_ESTATE, "journal", "%s is open for reading only", j->env_dir);
    int rc = dm_journal_claim(j, session, e);
    if (rc < 0) return rc;
    bool found;
    rc = from_mdb(e, remove_rows(j, session, &found), j, "removing a session");
    if (rc == 0 && !found) rc = not_found(j, session, e);
    char *lock = dm_path_join(j->lock_dir, session);
    if (lock) unlink(lock); /* while we hold it: claim_take notices that its file was unlinked */
    dm_free(lock);
    dm_journal_release(j, session);
    return rc;
}

int dm_journal_claim(dm_journal *j, const char *session, dm_err *e)
{
    int rc = id_check(session, e);
    if (rc < 0) return rc;
    if (j->nclaims == CLAIMS_MAX) return dm_err_set(e, DM_ELIMIT, "session", "this process runs %d sessions already", CLAIMS_MAX);
    claim *c = &j->claims[j->nclaims];
    rc = claim_take(j->lock_dir, session, &c->fd, e);
    if (rc < 0) return rc;
    memcpy(c->id, session, sizeof c->id);
    j->nclaims++;
    return 0;
}

void dm_journal_release(dm_journal *j, const char *session)
{
    for (int i = 0; i < j->nclaims; i++)
        if (strcmp(j->claims[i].id, session) == 0) {
            claim_drop(j->claims[i].fd);
            j->claims[i] = j->claims[--j->nclaims];
            return;
        }
}

bool dm_journal_claimed(dm_journal *j, const char *session) { return id_ok(session) && claim_held(j->lock_dir, session); }
