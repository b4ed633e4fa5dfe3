/* bench.c — the store against what the machine can do with the same bytes, in one run.
 *
 *   durable_spill         a session's blocks and state put and flushed      / as many bytes written O_DIRECT to a new file, fdatasync
 *   cold_restore          find and read of a session that is on disk only   / as many bytes read O_DIRECT, as many reads in flight
 *   ram_restore           find and read of a session that is in RAM         / memcpy of as many bytes in pieces of a block
 *   churn_last_over_first bytes per second at the quota, the last tenth     / the first tenth
 *   churn_file_over_live  bytes of the store's files after it               / bytes of live extents in them
 *
 * A round measures both sides one after the other; medians over the rounds.  Sessions are put as the pager does: a lookup, blocks
 * behind their predecessors, a state.  A session that is restored cold was never in RAM or in the page cache of this
 * store: it was opened anew and the cache dropped.  What comes back is compared at its beginning with what was put. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvstore/kv_int.h"

#define PIECE ((size_t)1 << 20) /* of the disk probes */
#define ROUNDS_MAX 64

typedef struct bench {
    dm_kv_bench_opts o;
    char *dir, *store_dir, *probe_path; /* owned */
    int64_t blocks;                     /* of a session */
    size_t session_bytes, probe_bytes;
    uint8_t *block, *state;             /* owned; what is put, but for a stamp */
    uint8_t *pieces;                    /* owned; KV_AHEAD_READERS pieces, page-aligned */
    uint8_t *from, *to;                 /* owned; session_bytes each, for memory */
    dm_kv *kv;
    dm_buf got;
    dm_kv_progress fn;
    void *ctx;
    int64_t done, total;
} bench;

static int step(bench *b, dm_err *e)
{
    b->done++;
    if (b->fn && !b->fn(b->ctx, b->done, b->total)) return dm_err_set(e, DM_ECANCELED, "kv.bench", "stopped");
    return 0;
}

static double per_second(size_t bytes, uint64_t ns) { return (double)bytes / 1e6 / ((double)(ns ? ns : 1) / 1e9); }

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

/* ---- sessions --------------------------------------------------------------------------------------- */

typedef struct sample { double value[ROUNDS_MAX], probe[ROUNDS_MAX], ratio[ROUNDS_MAX]; int n; } sample;

static void sample_add(sample *s, double value, double probe)
{
    s->value[s->n] = value, s->probe[s->n] = probe;
    s->ratio[s->n++] = value / probe;
}

static dm_kv_bench_row sample_row(sample *s, const char *name, double limit)
{
    return (dm_kv_bench_row){ .name = name, .unit = "MB/s", .value = median(s->value, s->n), .probe = median(s->probe, s->n),
        .ratio = median(s->ratio, s->n), .limit = limit };
}

static int32_t *make_ids(const bench *b, uint64_t seed)
{
    size_t n = (size_t)b->blocks * DM_KV_BLOCK + 1;
    int32_t *ids = dm_calloc(n, sizeof *ids);
    for (size_t i = 0; ids && i < n; i++) ids[i] = (int32_t)(dm_splitmix64(&seed) & 0xffff);
    return ids;
}

static void stamp(uint8_t *p, size_t n, const dm_hash *h) { memcpy(p, h->b, n < sizeof h->b ? n : sizeof h->b); }
static bool stamped(const uint8_t *p, size_t n, const dm_hash *h) { return memcmp(p, h->b, n < sizeof h->b ? n : sizeof h->b) == 0; }

static dm_hash bench_root(void)
{
    dm_hash h;
    memset(&h, 0xbe, sizeof h);
    return h;
}

static int open_store(bench *b, dm_err *e)
{
    dm_kv_opts o = { .dir = b->store_dir, .root = bench_root(), .block_bytes = b->o.block_bytes, .disk_bytes_max = b->o.quota_bytes,
        .ram_bytes_max = (int64_t)b->session_bytes * 3 + ((int64_t)8 << 20), .queue_bytes_max = (int64_t)b->session_bytes * 2 + ((int64_t)4 << 20) };
    return dm_kv_open(&b->kv, &o, e);
}

/* Puts session `seed`; durable when it returns. */
static int spill(bench *b, const int32_t *ids, dm_err *e)
{
    dm_kv_hit hit;
    dm_hash h = bench_root(), prev;
    int rc = dm_kv_find(b->kv, ids, b->blocks * DM_KV_BLOCK + 1, b->blocks * DM_KV_BLOCK, &hit, e);
    dm_kv_hit_end(b->kv, &hit);
    for (int64_t i = 0; i < b->blocks && !rc; i++) {
        prev = h;
        dm_kv_chain(&h, &prev, ids + i * DM_KV_BLOCK);
        stamp(b->block, b->o.block_bytes, &h);
        rc = dm_kv_put_block_after(b->kv, &prev, &h, b->block, b->o.block_bytes, e);
    }
    stamp(b->state, b->o.state_bytes, &h);
    if (!rc) rc = dm_kv_put_state(b->kv, &h, NULL, 0, b->state, b->o.state_bytes, e);
    return rc ? rc : dm_kv_flush(b->kv, 600000, e);
}

/* Reads a session into b->to as a pool would take it. */
static int restore(bench *b, const int32_t *ids, dm_kv_tier want, dm_err *e)
{
    dm_kv_hit hit;
    dm_kv_tier tier = want;
    int64_t other = 0;
    dm_hash h = bench_root();
    int rc = dm_kv_find(b->kv, ids, b->blocks * DM_KV_BLOCK + 1, b->blocks * DM_KV_BLOCK, &hit, e);
    if (!rc && hit.blocks != b->blocks) rc = dm_err_set(e, DM_EMISS, "kv.bench", "a session that was just stored is not found");
    for (int64_t i = 0; i < hit.blocks && !rc; i++) {
        uint8_t *dst = b->to + (size_t)i * b->o.block_bytes;
        rc = dm_kv_read_block(b->kv, &hit, i, dst, &tier, e);
        dm_kv_chain(&h, &h, ids + i * DM_KV_BLOCK);
        if (!rc && !stamped(dst, b->o.block_bytes, &h)) rc = dm_err_set(e, DM_EMISMATCH, "kv.bench", "block %lld came back wrong", (long long)i);
        other += tier != want;
    }
    if (!rc) rc = dm_kv_read_state(b->kv, &hit, &b->got, &tier, e);
    if (!rc && !stamped(b->got.p, b->got.n, &h)) rc = dm_err_set(e, DM_EMISMATCH, "kv.bench", "a state came back wrong");
    if (!rc && other + (tier != want)) rc = dm_err_set(e, DM_EMISMATCH, "kv.bench", "a session came from another tier than meant");
    dm_kv_hit_end(b->kv, &hit);
    return rc;
}

/* ---- probes ------------------------------------------------------------------------------------------ */

/* O_DIRECT where there is such a thing. */
static int open_probe(const bench *b, int flags, dm_err *e)
{
    int fd = open(b->probe_path, flags | O_CLOEXEC | O_DIRECT, 0600);
    if (fd < 0 && errno == EINVAL) fd = open(b->probe_path, flags | O_CLOEXEC, 0600);
    return fd < 0 ? dm_err_sys(e, errno, "kv.bench", "%s", b->probe_path) : fd;
}

static int probe_write(bench *b, uint64_t *ns, dm_err *e)
{
    unlink(b->probe_path);
    int fd = open_probe(b, O_WRONLY | O_CREAT | O_EXCL, e), rc = 0;
    if (fd < 0) return fd;
    uint64_t start = dm_now_ns();
    for (size_t at = 0; at < b->probe_bytes && !rc; at += PIECE)
        if (pwrite(fd, b->pieces, PIECE, (off_t)at) != (ssize_t)PIECE) rc = dm_err_sys(e, errno ? errno : ENOSPC, "kv.bench", "%s", b->probe_path);
    if (!rc && fdatasync(fd) != 0) rc = dm_err_sys(e, errno, "kv.bench", "%s", b->probe_path);
    *ns = dm_now_ns() - start;
    close(fd);
    return rc;
}

typedef struct probe_reader {
    const bench *b;
    int fd, index, rc;
    pthread_t thread;
} probe_reader;

static void *read_share(void *arg)
{
    probe_reader *r = arg;
    uint8_t *buf = r->b->pieces + (size_t)r->index * PIECE;
    for (size_t at = (size_t)r->index * PIECE; at < r->b->probe_bytes && !r->rc; at += KV_AHEAD_READERS * PIECE)
        if (pread(r->fd, buf, PIECE, (off_t)at) != (ssize_t)PIECE) r->rc = DM_EIO;
    return NULL;
}

static int probe_read(bench *b, uint64_t *ns, dm_err *e)
{
    int fd = open_probe(b, O_RDONLY, e), rc = 0, started = 0;
    if (fd < 0) return fd;
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    probe_reader r[KV_AHEAD_READERS];
    uint64_t start = dm_now_ns();
    for (; started < KV_AHEAD_READERS; started++) {
        r[started] = (probe_reader){ .b = b, .fd = fd, .index = started };
        if (pthread_create(&r[started].thread, NULL, read_share, &r[started]) != 0) break;
    }
    for (int i = 0; i < started; i++) {
        pthread_join(r[i].thread, NULL);
        rc = r[i].rc ? r[i].rc : rc;
    }
    *ns = dm_now_ns() - start;
    close(fd);
    return rc || started < KV_AHEAD_READERS ? dm_err_set(e, DM_EIO, "kv.bench", "%s: cannot be read back", b->probe_path) : 0;
}

static uint64_t probe_copy(bench *b)
{
    uint64_t start = dm_now_ns();
    for (size_t at = 0; at < b->session_bytes; at += b->o.block_bytes) {
        size_t n = b->session_bytes - at < b->o.block_bytes ? b->session_bytes - at : b->o.block_bytes;
        memcpy(b->to + at, b->from + at, n);
        __asm__ volatile("" : : "r"(b->to) : "memory"); /* the copy is wanted for itself */
    }
    return dm_now_ns() - start;
}

/* ---- measurements ---------------------------------------------------------------------------------------- */

static int measure_spill(bench *b, dm_kv_bench_row *row, dm_err *e)
{
    sample s = { 0 };
    int rc = open_store(b, e);
    for (int i = 0; i < b->o.rounds && !rc; i++) {
        uint64_t probe;
        rc = probe_write(b, &probe, e);
        int32_t *ids = make_ids(b, (uint64_t)i);
        if (!rc && !ids) rc = dm_err_set(e, DM_ENOMEM, "kv.bench", "out of memory");
        uint64_t start = dm_now_ns();
        if (!rc) rc = spill(b, ids, e);
        if (!rc) sample_add(&s, per_second(b->session_bytes, dm_now_ns() - start), per_second(b->probe_bytes, probe));
        dm_free(ids);
        if (!rc) rc = step(b, e);
    }
    dm_kv_close(b->kv);
    b->kv = NULL;
    if (!rc) *row = sample_row(&s, "durable_spill", 0.9);
    return rc;
}

static void drop_cache(const bench *b, const char *name)
{
    char *path = dm_path_join(b->store_dir, name);
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd >= 0) {
        posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
        close(fd);
    }
    dm_free(path);
}

static int measure_restore(bench *b, dm_kv_bench_row *cold_row, dm_kv_bench_row *ram_row, dm_err *e)
{
    sample cold = { 0 }, ram = { 0 };
    drop_cache(b, "data.mdb");
    drop_cache(b, "slots.dat");
    int rc = open_store(b, e);
    for (int i = 0; i < b->o.rounds && !rc; i++) {
        uint64_t probe = 0, start;
        int32_t *ids = make_ids(b, (uint64_t)i);
        if (!ids) rc = dm_err_set(e, DM_ENOMEM, "kv.bench", "out of memory");
        if (!rc) rc = probe_read(b, &probe, e);
        start = dm_now_ns();
        if (!rc) rc = restore(b, ids, DM_KV_DISK, e);
        if (!rc) sample_add(&cold, per_second(b->session_bytes, dm_now_ns() - start), per_second(b->probe_bytes, probe));
        if (!rc) rc = step(b, e);
        if (!rc) probe = probe_copy(b);
        start = dm_now_ns();
        if (!rc) rc = restore(b, ids, DM_KV_RAM, e);
        if (!rc) sample_add(&ram, per_second(b->session_bytes, dm_now_ns() - start), per_second(b->session_bytes, probe));
        if (!rc) rc = step(b, e);
        dm_free(ids);
    }
    dm_kv_close(b->kv);
    b->kv = NULL;
    if (rc) return rc;
    *cold_row = sample_row(&cold, "cold_restore", 0.9);
    *ram_row = sample_row(&ram, "ram_restore", 0.9);
    return 0;
}

/* Sessions that nobody asks for again, until churn times the quota is written: the store evicts all the time after the first. */
static int measure_churn(bench *b, dm_kv_bench_row *speed, dm_kv_bench_row *space, dm_err *e)
{
    int64_t tenth = b->total - b->done;
    tenth = tenth / 10 ? tenth / 10 : 1;
    uint64_t first = 0, last = 0;
    int rc = open_store(b, e);
    for (int64_t i = 0; i < tenth * 10 && !rc; i++) {
        int32_t *ids = make_ids(b, 1000000 + (uint64_t)i);
        if (!ids) rc = dm_err_set(e, DM_ENOMEM, "kv.bench", "out of memory");
        uint64_t start = dm_now_ns();
        if (!rc) rc = spill(b, ids, e);
        uint64_t ns = dm_now_ns() - start;
        dm_free(ids);
        if (i < tenth) first += ns;
        if (i >= tenth * 9) last += ns;
        if (!rc) rc = step(b, e);
    }
    dm_kv_stat st = { 0 };
    if (!rc) dm_kv_stat_get(b->kv, &st);
    if (!rc && st.put_dropped) rc = dm_err_set(e, DM_EMISMATCH, "kv.bench", "%lld entries were given up: the figures mean nothing", (long long)st.put_dropped);
    if (rc) return rc;
    double was = per_second(b->session_bytes * (size_t)tenth, first), is = per_second(b->session_bytes * (size_t)tenth, last);
    *speed = (dm_kv_bench_row){ .name = "churn_last_over_first", .unit = "MB/s", .value = is, .probe = was, .ratio = is / was, .limit = 0.8 };
    *space = (dm_kv_bench_row){ .name = "churn_file_over_live", .unit = "bytes", .value = (double)st.disk_bytes_file, .probe = (double)st.disk_bytes_live,
        .ratio = (double)st.disk_bytes_file / (double)st.disk_bytes_live, .limit = 1.05, .at_most = true };
    return 0;
}

/* ---- all of it ------------------------------------------------------------------------------------------------ */

static int set_up(bench *b, dm_err *e)
{
    dm_kv_bench_opts *o = &b->o;
    if (!o->block_bytes) o->block_bytes = 985664;
    if (!o->state_bytes) o->state_bytes = 3600000;
    if (!o->quota_bytes) o->quota_bytes = (int64_t)2 << 30;
    if (!o->rounds) o->rounds = 7;
    if (!o->churn) o->churn = 10;
    if (!o->dir || o->block_bytes > ((size_t)1 << 28) || o->state_bytes > ((size_t)1 << 28) || o->rounds < 1 || o->rounds > ROUNDS_MAX || o->churn < 1
        || o->quota_bytes < 0) return dm_err_set(e, DM_EINVAL, "kv.bench", "a size or count is out of range");
    /* All sessions of the rounds fit beside each other; they are not evicted before they are restored. */
    int64_t share = o->quota_bytes / (o->rounds * 2 + 2);
    b->blocks = (share - (int64_t)o->state_bytes) / (int64_t)o->block_bytes;
    if (b->blocks > 128) b->blocks = 128;
    if (b->blocks < 2) return dm_err_set(e, DM_EINVAL, "kv.bench", "a quota of %lld bytes is too small for %d sessions of two blocks and a state",
        (long long)o->quota_bytes, o->rounds * 2 + 2);
    b->session_bytes = (size_t)b->blocks * o->block_bytes + o->state_bytes;
    b->probe_bytes = (b->session_bytes + PIECE - 1) / PIECE * PIECE;
    b->total = o->rounds * 3 + o->quota_bytes / (int64_t)b->session_bytes * o->churn;
    b->block = dm_malloc(o->block_bytes);
    b->state = dm_malloc(o->state_bytes);
    b->pieces = dm_aligned(4096, KV_AHEAD_READERS * PIECE);
    b->from = dm_malloc(b->session_bytes);
    b->to = dm_malloc(b->session_bytes);
    if (!b->block || !b->state || !b->pieces || !b->from || !b->to) return dm_err_set(e, DM_ENOMEM, "kv.bench", "no memory for a session of %zu bytes", b->session_bytes);
    uint64_t seed = 1;
    for (size_t i = 0; i < KV_AHEAD_READERS * PIECE; i += 8) { /* nothing that a disk could compress */
        uint64_t w = dm_splitmix64(&seed);
        memcpy(b->pieces + i, &w, 8);
    }
    for (size_t i = 0; i < o->block_bytes; i++) b->block[i] = b->pieces[i % (KV_AHEAD_READERS * PIECE)];
    for (size_t i = 0; i < o->state_bytes; i++) b->state[i] = b->pieces[(i + 77) % (KV_AHEAD_READERS * PIECE)];
    memset(b->from, 1, b->session_bytes);
    memset(b->to, 2, b->session_bytes);
    int rc = dm_mkdirs(o->dir, 0700, e);
    if (rc) return rc;
    b->dir = dm_path_join(o->dir, "bench.XXXXXX");
    if (!b->dir) return dm_err_set(e, DM_ENOMEM, "kv.bench", "out of memory");
    if (!mkdtemp(b->dir)) {
        rc = dm_err_sys(e, errno, "kv.bench", "%s", o->dir);
        dm_free(b->dir);
        b->dir = NULL;
        return rc;
    }
    b->store_dir = dm_path_join(b->dir, "kv");
    b->probe_path = dm_path_join(b->dir, "probe");
    return b->store_dir && b->probe_path ? 0 : dm_err_set(e, DM_ENOMEM, "kv.bench", "out of memory");
}

static void clean_store(bench *b)
{
    dm_kv_close(b->kv);
    b->kv = NULL;
    if (b->store_dir) dm_kv_remove(b->store_dir);
}

static void clean_up(bench *b)
{
    clean_store(b);
    if (b->probe_path) unlink(b->probe_path);
    if (b->dir) rmdir(b->dir);
    dm_buf_free(&b->got);
    void *const owned[] = { b->dir, b->store_dir, b->probe_path, b->block, b->state, b->pieces, b->from, b->to };
    for (size_t i = 0; i < DM_COUNT(owned); i++) dm_free(owned[i]);
}

int dm_kv_bench(const dm_kv_bench_opts *opts, dm_kv_bench_row rows[DM_KV_BENCH_ROWS], dm_kv_progress fn, void *ctx, dm_err *e)
{
    bench b = { .o = *opts, .fn = fn, .ctx = ctx };
    memset(rows, 0, DM_KV_BENCH_ROWS * sizeof *rows);
    int rc = set_up(&b, e);
    if (!rc) rc = measure_spill(&b, &rows[0], e);
    if (!rc) rc = measure_restore(&b, &rows[1], &rows[2], e);
    if (!rc) clean_store(&b); /* the churn begins with an empty store */
    if (!rc) rc = measure_churn(&b, &rows[3], &rows[4], e);
    clean_up(&b);
    return rc;
}
