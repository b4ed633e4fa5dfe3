/* store.c — the handle: open, close, put, flush, stat. */
#include <errno.h>
#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "kvstore/kv_int.h"

#define MIB (int64_t)1048576
#define QUOTA_PAGES_MIN 128   /* LMDB's own pages take some forty of them */
#define BATCH_BYTES_MAX (32 * MIB)
#define CLOSE_MS 30000

int64_t kv_parts(const dm_kv *kv, uint64_t total)
{
    return total ? (int64_t)((total + kv->payload_bytes - 1) / kv->payload_bytes) : 1;
}

int64_t kv_entry_pages_max(const dm_kv *kv)
{
    return kv->quota_pages - kv->reserve_pages - KV_SLACK_PAGES - 16; /* the 16: index pages of an almost empty store */
}

/* ---- opening ----------------------------------------------------------------------------- */

/* A batch is what one transaction writes.  The slots that it frees come back with the next one, so a store at its quota keeps a batch of
 * room; a very small one does without and pays with extra transactions when it is full. */
static int set_sizes(dm_kv *kv, dm_err *e)
{
    dm_kv_opts *o = &kv->opts;
    if (!o->block_bytes || o->block_bytes > (1u << 30)) return dm_err_set(e, DM_EINVAL, "kv.open", "block_bytes %zu is not between 1 and 2^30", o->block_bytes);
    if (o->disk_bytes_max < 0 || o->ram_bytes_max < 0 || o->queue_bytes_max < 0 || o->sync_ms < 0 || o->write_bytes_day < 0)
        return dm_err_set(e, DM_EINVAL, "kv.open", "a limit of the store is negative");
    if (!o->disk_bytes_max) o->disk_bytes_max = 16 * 1024 * MIB;
    if (!o->ram_bytes_max) o->ram_bytes_max = 1024 * MIB;
    if (!o->queue_bytes_max) o->queue_bytes_max = 512 * MIB;
    if (!o->sync_ms) o->sync_ms = 200;
    kv->page_bytes = (size_t)sysconf(_SC_PAGESIZE);
    kv->extent_bytes = (size_t)kv_extent_size(o->block_bytes, kv->page_bytes);
    kv->extent_pages = kv->extent_bytes / kv->page_bytes;
    kv->payload_bytes = kv->extent_bytes - KV_HEADER_BYTES;
    kv->quota_pages = o->disk_bytes_max / (int64_t)kv->page_bytes;
    if (kv->quota_pages < QUOTA_PAGES_MIN)
        return dm_err_set(e, DM_EINVAL, "kv.open", "a disk quota of %lld bytes is less than the smallest of %lld", (long long)o->disk_bytes_max,
            (long long)QUOTA_PAGES_MIN * (long long)kv->page_bytes);
    int64_t extent = (int64_t)(kv->extent_pages * kv->page_bytes), batch = o->disk_bytes_max / 64;
    if (batch > BATCH_BYTES_MAX) batch = BATCH_BYTES_MAX;
    if (batch >= extent) kv->reserve_pages = batch / extent * (int64_t)kv->extent_pages;
    kv->batch_bytes = batch >= extent ? batch / extent * extent : extent;
    return 0;
}

static int init_locks(dm_kv *kv)
{
    pthread_condattr_t attr;
    int rc = pthread_rwlock_init(&kv->map, NULL);
    if (rc) return rc;
    pthread_mutex_init(&kv->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&kv->work, &attr);
    pthread_cond_init(&kv->done, &attr);
    pthread_condattr_destroy(&attr);
    return kv_ahead_init(kv);
}

/* Signals are for the program's threads, not for ours. */
static int start_writer(dm_kv *kv, dm_err *e)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&kv->thread, NULL, kv_writer_main, kv);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    kv->have_thread = rc == 0;
    return rc ? dm_err_sys(e, rc, "kv.open", "%s: cannot start the writer", kv->dir) : 0;
}

static int open_dir(dm_kv *kv, dm_err *e)
{
    int rc = 0;
    if (!kv->opts.read_only) rc = dm_mkdirs(kv->dir, 0700, e);
    else if (access(kv->dir, X_OK) != 0) rc = dm_err_sys(e, errno, "kv.open", "%s", kv->dir);
    if (rc) return rc;
    rc = kv_dir_claim(kv->dir, kv, e);
    if (rc) return rc;
    return kv_env_open(kv, e);
}

/* Everything but the thread. */
static void destroy(dm_kv *kv)
{
    kv_env_close(kv);
    kv_dir_release(kv);
    kv_ram_free(kv);
    kv_leases_free(kv);
    kv_ghosts_free(kv);
    while (kv->bufs_count) dm_free(kv->bufs[--kv->bufs_count]);
    kv_ahead_free(kv);
    pthread_cond_destroy(&kv->done);
    pthread_cond_destroy(&kv->work);
    pthread_mutex_destroy(&kv->lock);
    pthread_rwlock_destroy(&kv->map);
    dm_free(kv->dir);
    dm_free(kv);
}

int dm_kv_open(dm_kv **out, const dm_kv_opts *opts, dm_err *e)
{
    *out = NULL;
    if (!opts->dir || !opts->dir[0]) return dm_err_set(e, DM_EINVAL, "kv.open", "no directory given");
    dm_kv *kv = dm_calloc(1, sizeof *kv);
    if (!kv) return dm_err_set(e, DM_ENOMEM, "kv.open", "out of memory");
    kv->fd = kv->slots_fd = kv->slots_direct = -1;
    kv->opts = *opts;
    kv->dir = dm_strdup(opts->dir);
    if (!kv->dir || init_locks(kv) != 0) {
        dm_free(kv->dir);
        dm_free(kv);
        return dm_err_set(e, DM_ENOMEM, "kv.open", "out of memory");
    }
    kv->opts.dir = kv->dir;
    int rc = set_sizes(kv, e);
    if (!rc) rc = open_dir(kv, e);
    if (!rc && !kv->opts.read_only) rc = start_writer(kv, e);
    if (rc) {
        destroy(kv);
        return rc;
    }
    *out = kv;
    return 0;
}

/* ---- closing ------------------------------------------------------------------------------------ */

static struct timespec in_ms(int64_t ms)
{
    uint64_t at = dm_now_ns() + (uint64_t)ms * 1000000u;
    return (struct timespec){ .tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u) };
}

static bool wait_exit(dm_kv *kv, int ms)
{
    struct timespec until = in_ms(ms);
    while (!kv->writer_exited)
        if (pthread_cond_timedwait(&kv->done, &kv->lock, &until) == ETIMEDOUT) break;
    return kv->writer_exited;
}

void dm_kv_close(dm_kv *kv)
{
    if (!kv) return;
    kv_ahead_stop(kv);
    if (kv->have_thread) {
        pthread_mutex_lock(&kv->lock);
        kv->stop = true;
        pthread_cond_signal(&kv->work);
        bool exited = wait_exit(kv, CLOSE_MS);
        kv->abandon = true;
        pthread_cond_signal(&kv->work);
        if (!exited) exited = wait_exit(kv, 2000);
        pthread_mutex_unlock(&kv->lock);
        if (!exited) { /* stuck in the kernel, or behind a stopped process that holds LMDB's lock: nothing here may be freed */
            dm_log(DM_LOG_ERROR, "kv: %s: the writer does not end; the store is left open", kv->dir);
            pthread_detach(kv->thread);
            return;
        }
        pthread_join(kv->thread, NULL);
    }
    destroy(kv);
}

void dm_kv_remove(const char *dir)
{
    static const char *const names[] = { "data.mdb", "lock.mdb", "slots.dat" };
    for (size_t i = 0; i < DM_COUNT(names); i++) {
        char *path = dm_path_join(dir, names[i]);
        if (path) unlink(path);
        dm_free(path);
    }
    rmdir(dir);
}

/* ---- put --------------------------------------------------------------------------------------------- */

/* An entry that RAM knows: nothing to copy.  1 done; 0 it is new. */
static int put_known(dm_kv *kv, const kv_key *k, const dm_hash *prev)
{
    kv_entry *en = kv_ram_get(kv, k);
    if (!en) return 0;
    /* Given up before: another try.  On the disk and put again behind its predecessor: the writer knows how young that makes it. */
    if (en->where == KV_CLEAN && (!en->on_disk || prev)) {
        en->chained = prev != NULL;
        if (prev) en->behind = *prev;
        if (prev && !kv_ram_mend(kv, prev)) return 1;
        kv_ram_queue(kv, en);
        kv_ram_fit(kv, en);
        pthread_cond_signal(&kv->work);
        return 1;
    }
    kv->st.put_duplicates++;
    kv_ram_use(kv, en);
    /* One behind a predecessor is in the queue or with the writer, who makes it as young as that allows (E1), not younger. */
    if (en->on_disk && !en->chained) kv_note_use(kv, k, KV_AGAIN);
    return 1;
}

static int put_new(dm_kv *kv, kv_entry *en)
{
    int rc = kv_ram_insert(kv, en);
    if (rc) return rc;
    if ((en->chained || en->key.kind == KV_STATE) && !kv_ram_mend(kv, en->chained ? &en->behind : &en->key.hash)) {
        kv->st.put_dropped++; /* what it hangs on was given up */
        kv_ram_fit(kv, NULL);
        return 0;
    }
    kv_ram_queue(kv, en);
    kv_ram_fit(kv, en);
    if (kv->st.queued_bytes > kv->opts.queue_bytes_max && en->where == KV_QUEUED) {
        kv_ram_unqueue(kv, en, KV_CLEAN); /* all others are pinned or being written */
        kv->st.put_dropped += !en->on_disk;
        kv_ram_fit(kv, NULL);
    }
    pthread_cond_signal(&kv->work);
    return 0;
}

static int put(dm_kv *kv, const kv_key *k, const dm_hash *prev, const void *bytes, size_t n, dm_err *e)
{
    if (kv->opts.read_only) return dm_err_set(e, DM_ESTATE, "kv.put", "%s: the store is open for reading only", kv->dir);
    if (n && !bytes) return dm_err_set(e, DM_EINVAL, "kv.put", "no bytes");
    int64_t pages = n <= (size_t)1 << 40 ? kv_parts(kv, n) * (int64_t)kv->extent_pages : INT64_MAX;
    if (pages > kv_entry_pages_max(kv) || (int64_t)n > kv->opts.queue_bytes_max || (int64_t)n + 1024 > kv->opts.ram_bytes_max) {
        dm_log(DM_LOG_WARN, "kv: %s: an entry of %zu bytes is larger than a quota of the store; it is not kept", kv->dir, n);
        return dm_err_set(e, DM_ELIMIT, "kv.put", "%s: an entry of %zu bytes is larger than the store may hold", kv->dir, n);
    }
    if (dm_fault("kv.put")) return dm_err_set(e, DM_ENOMEM, "kv.put", "out of memory");
    pthread_mutex_lock(&kv->lock);
    int known = put_known(kv, k, prev);
    pthread_mutex_unlock(&kv->lock);
    if (known) return 0;

    kv_entry *en = kv_entry_new(kv, k, n, e);
    if (!en) return DM_ENOMEM;
    if (n) memcpy(en->bytes, bytes, n);
    en->chained = prev != NULL;
    if (prev) en->behind = *prev;
    /* What is on the disk already must be known for that, or a session that gives all of its blocks again fills the queue with them and
     * its new ones are given up. */
    bool there = kv_pin_if_there(kv, k);
    pthread_mutex_lock(&kv->lock);
    en->on_disk = there;
    int rc = put_known(kv, k, prev) ? 0 : put_new(kv, en); /* another thread may have put it during the copy */
    if (there) kv_map_add(&kv->pins, k, -1);
    kv_entry_unref(kv, en);
    pthread_mutex_unlock(&kv->lock);
    return rc ? dm_err_set(e, rc, "kv.put", "out of memory") : 0;
}

static int put_block(dm_kv *kv, const dm_hash *prev, const dm_hash *key, const void *bytes, size_t n, dm_err *e)
{
    if (n != kv->opts.block_bytes) return dm_err_set(e, DM_EINVAL, "kv.put", "a block of %zu bytes in a store of blocks of %zu", n, kv->opts.block_bytes);
    kv_key k = kv_key_block(key);
    return put(kv, &k, prev, bytes, n, e);
}

int dm_kv_put_block(dm_kv *kv, const dm_hash *key, const void *bytes, size_t n, dm_err *e) { return put_block(kv, NULL, key, bytes, n, e); }

int dm_kv_put_block_after(dm_kv *kv, const dm_hash *prev, const dm_hash *key, const void *bytes, size_t n, dm_err *e)
{
    return put_block(kv, prev, key, bytes, n, e);
}

int dm_kv_put_state(dm_kv *kv, const dm_hash *last, const int32_t *tail, int tail_count, const void *bytes, size_t n, dm_err *e)
{
    if (tail_count < 0 || tail_count >= DM_KV_BLOCK) return dm_err_set(e, DM_EINVAL, "kv.put", "a state's tail of %d ids is not below %d", tail_count, DM_KV_BLOCK);
    kv_key k = kv_key_state(last, tail, tail_count);
    return put(kv, &k, NULL, bytes, n, e);
}

int dm_kv_drop_state(dm_kv *kv, const dm_hash *last, const int32_t *tail, int tail_count, dm_err *e)
{
    if (tail_count < 0 || tail_count >= DM_KV_BLOCK) return dm_err_set(e, DM_EINVAL, "kv.drop", "a state's tail of %d ids is not below %d", tail_count, DM_KV_BLOCK);
    kv_key k = kv_key_state(last, tail, tail_count);
    pthread_mutex_lock(&kv->lock);
    kv_entry *en = kv_ram_get(kv, &k);
    if (en) kv_ram_remove(kv, en);
    kv_remove_later(kv, &k);
    bool kept = !kv_map_find(&kv->removals, &k);
    pthread_mutex_unlock(&kv->lock);
    return kept ? dm_err_set(e, DM_ENOMEM, "kv.drop", "out of memory") : 0;
}

int64_t dm_kv_queued_bytes(dm_kv *kv)
{
    pthread_mutex_lock(&kv->lock);
    int64_t n = kv->st.queued_bytes;
    pthread_mutex_unlock(&kv->lock);
    return n;
}

int dm_kv_flush(dm_kv *kv, int timeout_ms, dm_err *e)
{
    if (kv->opts.read_only) return 0;
    struct timespec until = in_ms(timeout_ms > 0 ? timeout_ms : 0);
    int rc = 0;
    pthread_mutex_lock(&kv->lock);
    uint64_t ticket = kv->ticket, removal = kv->removal_no, stalls = kv->stalls;
    kv->flush_waiters++;
    pthread_cond_signal(&kv->work);
    while (!rc && !kv->damaged && (kv->synced < ticket || kv->removal_done < removal)) {
        if (kv->stalls != stalls) rc = DM_ENOSPC; /* it was tried meanwhile: waiting longer does not make room */
        else if (pthread_cond_timedwait(&kv->done, &kv->lock, &until) == ETIMEDOUT) rc = DM_ETIMEDOUT;
    }
    kv->flush_waiters--;
    bool full = kv->st.disk_full, damaged = kv->damaged;
    int64_t left = kv->st.queued_bytes;
    pthread_mutex_unlock(&kv->lock);
    if (damaged) return dm_err_set(e, DM_ESTORE, "kv.flush", "%s: data.mdb is damaged; delete the directory, it is a cache", kv->dir);
    if (rc) return dm_err_set(e, rc, "kv.flush", "%s: %lld bytes are not written yet%s", kv->dir, (long long)left, full ? "; the disk is full" : "");
    return 0;
}

/* ---- stat --------------------------------------------------------------------------------------------------- */

void dm_kv_stat_get(dm_kv *kv, dm_kv_stat *out)
{
    pthread_mutex_lock(&kv->lock);
    *out = kv->st;
    kv_leases_expire(kv, dm_now_ns());
    int64_t leased = kv->leased;
    pthread_mutex_unlock(&kv->lock);
    out->disk_bytes_max = kv->opts.disk_bytes_max;
    out->ram_bytes_max = kv->opts.ram_bytes_max;
    out->block_bytes = kv->opts.block_bytes;
    out->extent_bytes = kv->extent_bytes;
    out->leased_bytes = leased * (int64_t)kv->extent_bytes;
    kv_stat_disk(kv, out);
}
