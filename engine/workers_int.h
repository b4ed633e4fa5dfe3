/* workers_int.h — a few threads that run one list of tasks at a time.
 *
 * The caller of workers_run is worker 0 and takes tasks too; the others take part if they are awake in time, and a
 * run never waits for one that has not started.  Which worker runs a task is left to chance, so tasks must not care. */
#ifndef DM_ENGINE_WORKERS_INT_H
#define DM_ENGINE_WORKERS_INT_H

#include "base/base.h"

typedef struct workers workers;
typedef void (*workers_fn)(void *ctx, int64_t task, void *scratch);

/* Memory for the scratch of that many workers. */
size_t workers_bytes(int threads, size_t scratch_bytes);
/* threads counts the caller, so 1 starts none.  Each worker owns scratch_bytes, aligned to 64. */
int workers_create(workers **out, int threads, size_t scratch_bytes, dm_err *e);
void workers_destroy(workers *w); /* NULL is fine; not during a run */
int workers_count(const workers *w);
/* Runs fn for 0 … tasks−1 and returns when all are done.  One run at a time. */
void workers_run(workers *w, int64_t tasks, workers_fn fn, void *ctx);
/* The same on the calling thread alone. */
void workers_run_here(workers *w, int64_t tasks, workers_fn fn, void *ctx);

#endif
