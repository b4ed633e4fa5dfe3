/* workers.c — see workers_int.h.
 *
 * States of a helper: idle (spins a little on `generation`, then sleeps on `wake`) → joined (counted in `active`)
 * → idle.  A run opens the job, bumps `generation`, works, closes the job and waits for `active` to fall to 0; a
 * helper joins only while the job is open, both under `lock`, so a late one finds it closed and goes back to idle. */
#include <pthread.h>
#include <stdatomic.h>

#include "engine/workers_int.h"

#define SPINS 300 /* some 20 µs: longer than the gap between two phases of a step, shorter than a time slice */

typedef struct helper {
    workers *owner;
    void *scratch;
    pthread_t thread;
} helper;

struct workers {
    pthread_mutex_t lock;
    pthread_cond_t wake; /* generation changed or quit */
    pthread_cond_t done; /* active fell to 0 */
    int helpers;         /* threads started */
    int active;          /* helpers inside the job; under lock, read without it only as a hint */
    int sleeping;        /* under lock */
    bool open, quit;     /* under lock */
    atomic_uint generation;
    atomic_int active_hint;

    /* The job; written before `open` is set under lock. */
    workers_fn fn;
    void *ctx;
    int64_t tasks;
    _Atomic int64_t next;

    void *scratch; /* owned, all workers' */
    void *scratch0; /* of worker 0 */
    helper *helper;
};

static inline void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

static void take_tasks(workers *w, void *scratch) {
    for (;;) {
        int64_t i = atomic_fetch_add_explicit(&w->next, 1, memory_order_relaxed);
        if (i >= w->tasks) return;
        w->fn(w->ctx, i, scratch);
    }
}

static void *helper_main(void *arg) {
    helper *h = arg;
    workers *w = h->owner;
    unsigned seen = 0;
    for (;;) {
        for (int i = 0; i < SPINS && atomic_load_explicit(&w->generation, memory_order_relaxed) == seen; i++) relax();
        pthread_mutex_lock(&w->lock);
        while (!w->quit && atomic_load(&w->generation) == seen) {
            w->sleeping++;
            pthread_cond_wait(&w->wake, &w->lock);
            w->sleeping--;
        }
        if (w->quit) {
            pthread_mutex_unlock(&w->lock);
            return NULL;
        }
        seen = atomic_load(&w->generation);
        bool join = w->open;
        if (join) w->active++, atomic_store(&w->active_hint, w->active);
        pthread_mutex_unlock(&w->lock);
        if (!join) continue;
        take_tasks(w, h->scratch);
        pthread_mutex_lock(&w->lock);
        w->active--;
        atomic_store(&w->active_hint, w->active);
        if (w->active == 0) pthread_cond_signal(&w->done);
        pthread_mutex_unlock(&w->lock);
    }
}

int workers_count(const workers *w) { return w->helpers + 1; }

void workers_run_here(workers *w, int64_t tasks, workers_fn fn, void *ctx) {
    for (int64_t i = 0; i < tasks; i++) fn(ctx, i, w->scratch0);
}

void workers_run(workers *w, int64_t tasks, workers_fn fn, void *ctx) {
    if (w->helpers == 0 || tasks < 2) {
        workers_run_here(w, tasks, fn, ctx);
        return;
    }
    pthread_mutex_lock(&w->lock);
    w->fn = fn, w->ctx = ctx, w->tasks = tasks;
    atomic_store(&w->next, 0);
    w->open = true;
    atomic_fetch_add(&w->generation, 1);
    if (w->sleeping) pthread_cond_broadcast(&w->wake);
    pthread_mutex_unlock(&w->lock);

    take_tasks(w, w->scratch0);

    for (int i = 0; i < SPINS && atomic_load_explicit(&w->active_hint, memory_order_relaxed); i++) relax();
    pthread_mutex_lock(&w->lock);
    w->open = false;
    while (w->active) pthread_cond_wait(&w->done, &w->lock);
    pthread_mutex_unlock(&w->lock);
}

static void stop_helpers(workers *w) {
    pthread_mutex_lock(&w->lock);
    w->quit = true;
    pthread_cond_broadcast(&w->wake);
    pthread_mutex_unlock(&w->lock);
    for (int i = 0; i < w->helpers; i++) pthread_join(w->helper[i].thread, NULL);
}

void workers_destroy(workers *w) {
    if (!w) return;
    if (w->helpers) stop_helpers(w);
    pthread_cond_destroy(&w->done);
    pthread_cond_destroy(&w->wake);
    pthread_mutex_destroy(&w->lock);
    dm_free(w->helper);
    dm_free(w->scratch);
    dm_free(w);
}

static size_t one_scratch(size_t scratch_bytes) { return (scratch_bytes + 63) / 64 * 64 + 64; }
size_t workers_bytes(int threads, size_t scratch_bytes) { return one_scratch(scratch_bytes) * (size_t)threads; }

int workers_create(workers **out, int threads, size_t scratch_bytes, dm_err *e) {
    *out = NULL;
    size_t each = one_scratch(scratch_bytes);
    workers *w = dm_calloc(1, sizeof *w);
    if (!w) return dm_err_set(e, DM_ENOMEM, "workers", "out of memory for %d worker threads", threads);
    pthread_mutex_init(&w->lock, NULL);
    pthread_cond_init(&w->wake, NULL);
    pthread_cond_init(&w->done, NULL);
    w->helper = dm_calloc((size_t)threads, sizeof *w->helper);
    w->scratch = dm_aligned(64, workers_bytes(threads, scratch_bytes));
    if (!w->helper || !w->scratch) {
        workers_destroy(w);
        return dm_err_set(e, DM_ENOMEM, "workers", "out of memory for the workspace of %d worker threads", threads);
    }
    w->scratch0 = w->scratch;
    for (int i = 0; i < threads - 1; i++) {
        w->helper[i].owner = w;
        w->helper[i].scratch = (char *)w->scratch + each * (size_t)(i + 1);
        int rc = pthread_create(&w->helper[i].thread, NULL, helper_main, &w->helper[i]);
        if (rc) {
            workers_destroy(w);
            return dm_err_sys(e, rc, "workers", "cannot start worker thread %d of %d", i + 1, threads);
        }
        w->helpers = i + 1;
    }
    *out = w;
    return 0;
}
