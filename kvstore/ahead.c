/* ahead.c — several reads of the disk in flight.
 *
 * When a hit is read in order (block i+1 after block i), the blocks behind it and at last its state are loaded into the RAM tier by
 * a few threads, ahead of the caller.  A caller that comes to a block in flight waits for it.  A load that fails is forgotten: the caller
 * then loads the entry itself, and what is wrong is found and reported there.
 *
 * Bounds: KV_AHEAD_READERS reads at once; a hit asks for KV_AHEAD_BLOCKS blocks at most before the caller comes to them, all hits together
 * for window_bytes that are not loaded yet: at most a quarter of the RAM tier, so that little is pushed out before it is used.
 * The threads start with the first hit that is read in order, and end in dm_kv_close.
 *
 * All of kv->ahead is under kv->lock. */
#include <pthread.h>
#include <signal.h>
#include <string.h>

#include "kvstore/kv_int.h"

#define WINDOW_BYTES ((int64_t)16 << 20)

static int64_t window_bytes(const dm_kv *kv)
{
    return kv->opts.ram_bytes_max / 4 < WINDOW_BYTES ? kv->opts.ram_bytes_max / 4 : WINDOW_BYTES;
}

/* ---- jobs ------------------------------------------------------------------------------------- */

static kv_job *find_job(dm_kv *kv, const kv_key *k)
{
    for (int i = 0; i < KV_AHEAD_JOBS; i++)
        if (kv->ahead.jobs[i].state != KV_JOB_FREE && kv_key_equal(&kv->ahead.jobs[i].key, k)) return &kv->ahead.jobs[i];
    return NULL;
}

static kv_job *free_job(dm_kv *kv)
{
    for (int i = 0; i < KV_AHEAD_JOBS; i++)
        if (kv->ahead.jobs[i].state == KV_JOB_FREE) return &kv->ahead.jobs[i];
    return NULL;
}

/* The oldest that waits. */
static kv_job *next_job(dm_kv *kv)
{
    kv_job *best = NULL;
    for (int i = 0; i < KV_AHEAD_JOBS; i++) {
        kv_job *j = &kv->ahead.jobs[i];
        if (j->state == KV_JOB_WAITS && (!best || j->no < best->no)) best = j;
    }
    return best;
}

static void job_done(dm_kv *kv, kv_job *j)
{
    kv->ahead.bytes -= j->bytes;
    j->state = KV_JOB_FREE;
    pthread_cond_broadcast(&kv->ahead.done);
}

/* With kv->lock; returns with it. */
static void run_job(dm_kv *kv, kv_job *j)
{
    kv_key k = j->key;
    kv_entry *en = NULL;
    j->state = KV_JOB_RUNS;
    pthread_mutex_unlock(&kv->lock);
    int rc = kv_load(kv, &k, &en);
    pthread_mutex_lock(&kv->lock);
    if (rc == 0) {
        bool wanted = !kv_ram_get(kv, &k) && kv_map_count(&kv->doomed, &k) == 0 && kv_ram_insert(kv, en) == 0;
        en->ahead = wanted;
        if (wanted) kv_ram_fit(kv, en);
        kv_entry_unref(kv, en);
    }
    job_done(kv, j);
}

static void *reader_main(void *arg)
{
    dm_kv *kv = arg;
    pthread_mutex_lock(&kv->lock);
    while (!kv->ahead.stop) {
        kv_job *j = next_job(kv);
        if (j) run_job(kv, j);
        else pthread_cond_wait(&kv->ahead.work, &kv->lock);
    }
    pthread_mutex_unlock(&kv->lock);
    return NULL;
}

/* Fewer threads than wanted, even none, are fine. */
static void start_readers(dm_kv *kv)
{
    sigset_t all, old;
    if (kv->ahead.started) return;
    kv->ahead.started = true;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    while (kv->ahead.threads_count < KV_AHEAD_READERS
        && pthread_create(&kv->ahead.threads[kv->ahead.threads_count], NULL, reader_main, kv) == 0)
        kv->ahead.threads_count++;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
}

/* ---- for find.c ------------------------------------------------------------------------------------ */

int kv_ahead_init(dm_kv *kv)
{
    int rc = pthread_cond_init(&kv->ahead.work, NULL);
    return rc ? rc : pthread_cond_init(&kv->ahead.done, NULL);
}

bool kv_ahead_want(dm_kv *kv, const void *owner, const kv_key *k, size_t bytes)
{
    if (kv_ram_get(kv, k) || find_job(kv, k)) return true;
    start_readers(kv);
    kv_job *j = free_job(kv);
    if (!kv->ahead.threads_count || !j || kv->ahead.bytes + (int64_t)bytes > window_bytes(kv)) return false;
    *j = (kv_job){ .key = *k, .owner = owner, .bytes = (int64_t)bytes, .no = ++kv->ahead.no, .state = KV_JOB_WAITS };
    kv->ahead.bytes += j->bytes;
    pthread_cond_signal(&kv->ahead.work);
    return true;
}

void kv_ahead_wait(dm_kv *kv, const kv_key *k)
{
    for (kv_job *j; (j = find_job(kv, k));) {
        if (j->state == KV_JOB_WAITS) { /* the caller is as good a reader */
            job_done(kv, j);
            return;
        }
        pthread_cond_wait(&kv->ahead.done, &kv->lock);
    }
}

void kv_ahead_cancel(dm_kv *kv, const void *owner)
{
    for (int i = 0; i < KV_AHEAD_JOBS; i++) {
        kv_job *j = &kv->ahead.jobs[i];
        if (j->state == KV_JOB_WAITS && j->owner == owner) job_done(kv, j);
    }
}

void kv_ahead_stop(dm_kv *kv)
{
    pthread_mutex_lock(&kv->lock);
    kv->ahead.stop = true;
    pthread_cond_broadcast(&kv->ahead.work);
    pthread_mutex_unlock(&kv->lock);
    while (kv->ahead.threads_count) pthread_join(kv->ahead.threads[--kv->ahead.threads_count], NULL);
}

void kv_ahead_free(dm_kv *kv)
{
    pthread_cond_destroy(&kv->ahead.work);
    pthread_cond_destroy(&kv->ahead.done);
}
