/* Power loss: what a disk may make of the writes that were not synced.  K2, C2; incident 45.
 *
 * How.  This program defines pwrite, pwritev, write, fdatasync, fsync and open itself; the dynamic linker takes these before the C
 * library's, for LMDB too.  Writes to data.mdb and slots.dat through a plain descriptor are logged with their bytes until a sync of that
 * file; writes through a synchronous descriptor (LMDB's for its meta pages, when it uses one) count as synced at once.  A child runs a
 * workload; at a chosen write or sync it ends, and the parent makes images of the files as they could be after the loss of power.
 *
 * Fault model
 *   F1  everything written to a file before its last completed sync is there
 *   F2  of the writes behind it each 512-byte sector is, independently, new or old; where several writes hit a sector, any one of them
 *       may be the last to arrive (so writes may be kept, dropped, torn at sectors, and reordered)
 *   F3  a file's length may be any that it had since that sync; what was never written reads as zeroes
 *   F4  the disk does not lie about syncs, and does not damage what it does not write
 *
 * Right: the store opens, or refuses with a sentence (DM_ESTORE); every value that it gives is the one that was put; what
 * a flush acknowledged before the last sync is there.  The controls break F1: they must be found out. */
#include "kvtest.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define SECTOR 512
#define LOG_MAX 4000
#define FILE_MAX (4 << 20)
#define META_BYTES (2 * (int64_t)sysconf(_SC_PAGESIZE)) /* the roots */

/* Shared with the child: what the parent makes images from. */
enum { INDEX, SLOTS, FILES };
typedef struct logged { int64_t at; uint32_t n, from; int file; } logged; /* bytes at pool + from */
typedef struct state {
    uint8_t synced[FILE_MAX]; /* the file as of the last sync */
    uint8_t before[FILE_MAX]; /* and before the last sync that had more to it than roots */
    int64_t synced_bytes, bytes;
} state;
typedef struct recording {
    state files[FILES];
    logged log[LOG_MAX];
    int count;
    uint8_t pool[32 << 20];
    uint32_t pool_used;
    int events, stop_at;
    int acknowledged;      /* sequences flushed */
    int acknowledged_sync; /* of these, before the last sync */
    bool overflow;
} recording;
static recording *rec; /* NULL: not recording */
static int fds[FILES][2] = { { -1, -1 }, { -1, -1 } }, data_sync_fd = -1;
static pthread_mutex_t rec_lock = PTHREAD_MUTEX_INITIALIZER;

/* ---- the calls, in front of the C library's ------------------------------------------------------------ */

static void *real(const char *name)
{
    void *p = dlsym(RTLD_NEXT, name);
    if (!p) abort();
    return p;
}

/* F1 from here on, for this file. */
static void settle(int file)
{
    state *f = &rec->files[file];
    bool pages = file == SLOTS;
    int kept = 0;
    for (int i = 0; i < rec->count; i++) pages |= rec->log[i].file == file && rec->log[i].at >= META_BYTES;
    if (pages) memcpy(f->before, f->synced, FILE_MAX);
    for (int i = 0; i < rec->count; i++) {
        const logged w = rec->log[i];
        if (w.file == file) memcpy(f->synced + w.at, rec->pool + w.from, w.n);
        else rec->log[kept++] = w;
    }
    f->synced_bytes = f->bytes;
    rec->count = kept;
    if (!kept) rec->pool_used = 0;
    rec->acknowledged_sync = rec->acknowledged;
}

static void note_write(int file, const struct iovec *v, int count, int64_t at, bool synced)
{
    state *f = &rec->files[file];
    for (int i = 0; i < count; i++) {
        size_t n = v[i].iov_len;
        if (at + (int64_t)n > FILE_MAX || rec->count == LOG_MAX || rec->pool_used + n > sizeof rec->pool) {
            rec->overflow = true;
            return;
        }
        if (synced) {
            memcpy(f->synced + at, v[i].iov_base, n);
        } else {
            memcpy(rec->pool + rec->pool_used, v[i].iov_base, n);
            rec->log[rec->count++] = (logged){ .at = at, .n = (uint32_t)n, .from = rec->pool_used, .file = file };
            rec->pool_used += (uint32_t)n;
        }
        at += (int64_t)n;
        if (at > f->bytes) f->bytes = at;
        if (synced && at > f->synced_bytes) f->synced_bytes = at;
    }
}

/* The file that a descriptor is of, or -1. */
static int file_of(int fd)
{
    if (!rec || fd < 0) return -1;
    if (fd == data_sync_fd) return INDEX;
    for (int i = 0; i < FILES; i++)
        if (fd == fds[i][0] || fd == fds[i][1]) return i;
    return -1;
}

/* A write or a sync is about to happen; at the chosen one the power fails, with the write in the log. */
static void event(void)
{
    if (++rec->events == rec->stop_at) _exit(0);
}

static void on_write(int fd, const struct iovec *v, int count, int64_t at)
{
    int file = file_of(fd);
    if (file < 0) return;
    pthread_mutex_lock(&rec_lock);
    note_write(file, v, count, at, fd == data_sync_fd);
    event();
    pthread_mutex_unlock(&rec_lock);
}

DM_API ssize_t pwrite(int fd, const void *p, size_t n, off_t at)
{
    static ssize_t (*next)(int, const void *, size_t, off_t);
    if (!next) next = (ssize_t (*)(int, const void *, size_t, off_t))real("pwrite");
    on_write(fd, &(struct iovec){ (void *)p, n }, 1, at);
    return next(fd, p, n, at);
}

DM_API ssize_t pwrite64(int fd, const void *p, size_t n, off64_t at) { return pwrite(fd, p, n, at); }

DM_API ssize_t pwritev(int fd, const struct iovec *v, int count, off_t at)
{
    static ssize_t (*next)(int, const struct iovec *, int, off_t);
    if (!next) next = (ssize_t (*)(int, const struct iovec *, int, off_t))real("pwritev");
    on_write(fd, v, count, at);
    return next(fd, v, count, at);
}

DM_API ssize_t write(int fd, const void *p, size_t n)
{
    static ssize_t (*next)(int, const void *, size_t);
    if (!next) next = (ssize_t (*)(int, const void *, size_t))real("write");
    if (file_of(fd) >= 0) on_write(fd, &(struct iovec){ (void *)p, n }, 1, lseek(fd, 0, SEEK_CUR));
    return next(fd, p, n);
}

DM_API ssize_t writev(int fd, const struct iovec *v, int count)
{
    static ssize_t (*next)(int, const struct iovec *, int);
    if (!next) next = (ssize_t (*)(int, const struct iovec *, int))real("writev");
    if (file_of(fd) >= 0) on_write(fd, v, count, lseek(fd, 0, SEEK_CUR));
    return next(fd, v, count);
}

static int on_sync(int fd, const char *name)
{
    int (*next)(int) = (int (*)(int))real(name);
    int rc = next(fd), file = file_of(fd);
    if (rc == 0 && file >= 0) {
        pthread_mutex_lock(&rec_lock);
        event();
        settle(file);
        pthread_mutex_unlock(&rec_lock);
    }
    return rc;
}

DM_API int fdatasync(int fd) { return on_sync(fd, "fdatasync"); }
DM_API int fsync(int fd) { return on_sync(fd, "fsync"); }

/* ---- workload: the child -------------------------------------------------------------------------------- */

#define SEQS 24 /* more than fit: what is put again was evicted meanwhile */
static dm_kv_opts power_opts(const char *dir)
{
    dm_kv_opts o = kt_opts(dir);
    o.disk_bytes_max = 1 << 20; /* so that it evicts and reuses pages */
    o.sync_ms = 1;
    return o;
}

static int64_t seq_pos(int name) { return 512 + name * 11; }

static const char *path_of(int file, const char *dir) { return file == INDEX ? kt_data_file(dir) : kt_slots_file(dir); }

/* The descriptors through which the store and LMDB write. */
static void find_fds(const char *dir)
{
    struct stat want, st;
    for (int file = 0; file < FILES; file++) {
        int n = 0;
        if (stat(path_of(file, dir), &want) != 0) _exit(20);
        for (int fd = 3; fd < 200; fd++) {
            int flags = fcntl(fd, F_GETFL);
            if (flags < 0 || (flags & O_ACCMODE) == O_RDONLY || fstat(fd, &st) != 0 || st.st_ino != want.st_ino || st.st_dev != want.st_dev) continue;
            if (flags & O_DSYNC) data_sync_fd = fd;
            else if (n == 2) _exit(21);
            else fds[file][n++] = fd;
        }
        if (n == 0) _exit(27);
    }
}

static void put_one(dm_kv *kv, int name)
{
    int32_t *ids = kt_ids((uint64_t)name, 900);
    dm_err e;
    for (int i = 0; i < 2; i++)
        if (kt_put_block(kv, ids, i, &e)) _exit(22);
    if (kt_put_state(kv, ids, seq_pos(name), 3000 + (size_t)name * 1500, &e)) _exit(23);
    if (dm_kv_flush(kv, 20000, &e)) _exit(24);
    free(ids);
}

static void workload(const char *dir, recording *shared, int from)
{
    dm_kv_opts o = power_opts(dir);
    dm_kv *kv;
    dm_err e;
    if (dm_kv_open(&kv, &o, &e)) _exit(25);
    for (int i = from + 1; i <= from + SEQS; i++) put_one(kv, i % SEQS); /* full, so that slots and pages are used again */
    for (int file = 0; file < FILES; file++) {
        state *f = &shared->files[file];
        dm_buf b = { 0 };
        if (dm_file_read(path_of(file, dir), FILE_MAX, &b, &e)) _exit(26);
        memcpy(f->synced, b.p, b.n);
        memcpy(f->before, b.p, b.n);
        f->synced_bytes = f->bytes = (int64_t)b.n;
        dm_free(b.p);
    }
    find_fds(dir);
    shared->acknowledged = shared->acknowledged_sync = -1;
    __atomic_store_n(&rec, shared, __ATOMIC_SEQ_CST); /* the writer is idle: everything was flushed */
    for (int i = from + 1;; i++) {
        put_one(kv, i % SEQS);
        pthread_mutex_lock(&rec_lock);
        shared->acknowledged = i % SEQS;
        pthread_mutex_unlock(&rec_lock);
    }
}

static recording *record(const char *dir, int from, int stop_at)
{
    recording *r = mmap(NULL, sizeof *r, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_ptr_not_equal(r, MAP_FAILED);
    r->stop_at = stop_at;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) workload(dir, r, from);
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (status) fail_msg("the child ended with %x", status);
    assert_false(r->overflow);
    return r;
}

/* ---- images: the parent ------------------------------------------------------------------------------------ */

typedef struct image { uint8_t bytes[FILES][FILE_MAX]; int64_t n[FILES]; } image;

/* F2 and F3; how: 0 nothing arrived, 1 everything did, 2 of one file only, else at random. */
static void make_image(image *m, const recording *r, int how, uint64_t *rnd)
{
    int order[LOG_MAX], only = (int)(dm_splitmix64(rnd) % FILES);
    for (int file = 0; file < FILES; file++) {
        memcpy(m->bytes[file], r->files[file].synced, FILE_MAX);
        m->n[file] = r->files[file].synced_bytes;
    }
    for (int i = 0; i < r->count; i++) order[i] = i;
    for (int i = r->count - 1; how > 2 && i > 0; i--) {
        int k = (int)(dm_splitmix64(rnd) % (uint64_t)(i + 1)), t = order[i];
        order[i] = order[k], order[k] = t;
    }
    uint64_t most = dm_splitmix64(rnd) % 5; /* of four sectors, or writes */
    bool torn = dm_splitmix64(rnd) % 2;
    for (int i = 0; i < r->count; i++) {
        const logged *w = &r->log[order[i]];
        bool whole = dm_splitmix64(rnd) % 4 < most;
        for (uint32_t at = 0; at < w->n; at += SECTOR) {
            uint32_t n = w->n - at < SECTOR ? w->n - at : SECTOR;
            bool keep = how == 0 ? false : how == 1 ? true : how == 2 ? w->file == only : torn ? dm_splitmix64(rnd) % 4 < most : whole;
            if (!keep) continue;
            memcpy(m->bytes[w->file] + w->at + at, r->pool + w->from + at, n);
            if (w->at + at + n > m->n[w->file]) m->n[w->file] = w->at + at + n;
        }
    }
    for (int file = 0; file < FILES; file++)
        if (how > 2 && dm_splitmix64(rnd) % 2) m->n[file] = r->files[file].bytes;
}

static void write_image(const char *dir, const image *m)
{
    dm_err e;
    assert_ok_e(dm_mkdirs(dir, 0700, &e), e);
    for (int file = 0; file < FILES; file++) {
        int fd = open(path_of(file, dir), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
        assert_true(fd >= 0);
        for (int64_t at = 0; at < m->n[file];) {
            ssize_t got = pwrite(fd, m->bytes[file] + at, (size_t)(m->n[file] - at), at);
            assert_true(got > 0);
            at += got;
        }
        close(fd);
    }
}

typedef struct outcome { int refused, bad, found; bool acknowledged_there; } outcome;

/* Wrong bytes fail inside kt_restore. */
static outcome look(const char *dir, int acknowledged)
{
    dm_kv_opts o = power_opts(dir);
    outcome out = { 0 };
    dm_kv *kv;
    dm_err e;
    int rc = dm_kv_open(&kv, &o, &e);
    if (rc) {
        if (rc != DM_ESTORE) fail_msg("open: %s: %s", dm_err_name(rc), e.text);
        out.refused = 1;
        return out;
    }
    dm_kv_check c;
    assert_ok_e(dm_kv_verify(kv, &c, NULL, NULL, &e), e);
    out.bad = (int)c.bad;
    for (int name = 0; name < SEQS; name++) {
        int32_t *ids = kt_ids((uint64_t)name, 900);
        int64_t pos = kt_restore(kv, ids, 900, 900);
        assert_true(pos == 0 || pos == seq_pos(name));
        out.found += pos != 0;
        if (name == acknowledged) out.acknowledged_there = pos != 0;
        free(ids);
    }
    put_one(kv, 3); /* and it goes on */
    dm_kv_close(kv);
    return out;
}

static void any_subset_of_unsynced_writes_leaves_the_old_or_the_new_state(void **s)
{
    (void)s;
    uint64_t rnd = test_seed();
    image *m = malloc(sizeof *m);
    int rounds = test_full() ? 200 : 24, images = test_full() ? 30 : 8, pending = 0;
    const char *dir = kt_dir("made");
    for (int i = 0; i < rounds; i++) {
        int stop_at = 1 + (int)(dm_splitmix64(&rnd) % 60);
        recording *r = record(kt_dir("power"), i, stop_at);
        pending += r->count > 0;
        for (int k = 0; k < images; k++) {
            make_image(m, r, k, &rnd);
            write_image(dir, m);
            outcome out = look(dir, r->acknowledged_sync);
            if (out.refused || out.bad) fail_msg("round %d image %d: refused %d, bad entries %d", i, k, out.refused, out.bad);
            if (r->acknowledged_sync >= 0 && !out.acknowledged_there) fail_msg("round %d image %d: sequence %d was acknowledged", i, k, r->acknowledged_sync);
        }
        munmap(r, sizeof *r);
    }
    assert_true(pending > rounds / 4); /* the power failed with writes under way */
    free(m);
}

/* The disk lied about one sync of a file: pages that the root leads to, or payloads that it names, are old.  Never a wrong value; and the check above would have failed. */
static void a_synced_write_that_is_lost_is_found_out(void **s)
{
    (void)s;
    uint64_t rnd = test_seed() + 1;
    image *m = malloc(sizeof *m);
    const char *dir = kt_dir("lied");
    int noticed[FILES] = { 0 };
    for (int i = 0; i < 16; i++) {
        recording *r = record(kt_dir("control"), i, 30 + (int)(dm_splitmix64(&rnd) % 20));
        int file = i % FILES;
        int64_t roots = file == INDEX ? META_BYTES : 0; /* all of that sync but the roots is lost */
        make_image(m, r, 1, &rnd);
        memcpy(m->bytes[file] + roots, r->files[file].before + roots, (size_t)(FILE_MAX - roots));
        write_image(dir, m);
        outcome out = look(dir, r->acknowledged_sync);
        noticed[file] += out.refused || out.bad || !out.acknowledged_there;
        munmap(r, sizeof *r);
    }
    assert_true(noticed[INDEX] > 0 && noticed[SLOTS] > 0);
    free(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_subset_of_unsynced_writes_leaves_the_old_or_the_new_state),
        cmocka_unit_test(a_synced_write_that_is_lost_is_found_out),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
