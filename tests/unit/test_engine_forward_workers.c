/* The worker threads and the block pool of the forward pass. */
#include <pthread.h>
#include <stdatomic.h>

#include "engine/pool_int.h"
#include "engine/workers_int.h"
#include "testlib.h"

enum { TASKS = 1000 };
typedef struct job { atomic_int done[TASKS]; size_t scratch_bytes; } job;

static void mark(void *ctx, int64_t task, void *scratch) {
    job *j = ctx;
    memset(scratch, (int)task, j->scratch_bytes); /* a workspace of its own: a sanitizer sees two in one */
    atomic_fetch_add(&j->done[task], 1);
}

static void every_task_runs_once_for_any_number_of_threads(void **state) {
    (void)state;
    static const int threads[] = {1, 2, 3, 8};
    for (size_t i = 0; i < DM_COUNT(threads); i++) {
        workers *w = NULL;
        dm_err e = {0};
        job *j = calloc(1, sizeof *j);
        assert_non_null(j);
        j->scratch_bytes = 100;
        assert_ok_e(workers_create(&w, threads[i], j->scratch_bytes, &e), e);
        assert_int_equal(workers_count(w), threads[i]);
        int runs = 0;
        for (int n = 0; n < TASKS; n += 1 + n / 3, runs++) { /* also 0 tasks and 1 task */
            for (int t = 0; t < TASKS; t++) atomic_store(&j->done[t], 0);
            workers_run(w, n, mark, j);
            for (int t = 0; t < TASKS; t++) assert_int_equal(atomic_load(&j->done[t]), t < n);
        }
        for (int r = 0; r < 2000; r++) workers_run(w, 5, mark, j); /* helpers that come late or not at all */
        workers_run_here(w, 7, mark, j);
        workers_destroy(w);
        free(j);
    }
    workers_destroy(NULL);
}

static void the_pool_keeps_its_bound_and_hands_out_zeroed_blocks(void **state) {
    (void)state;
    enum { SIZE = 1000, MAX = 3 };
    pool *p = NULL;
    uint8_t *b[MAX + 1] = {0};
    dm_err e = {0};
    assert_ok_e(pool_create(&p, SIZE, SIZE * MAX, &e), e);
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < MAX; i++) {
            assert_ok_e(pool_get(p, &b[i], &e), e);
            for (int k = 0; k < SIZE; k++) assert_int_equal(b[i][k], 0);
            memset(b[i], 0xff, SIZE);
        }
        assert_err(DM_ELIMIT, pool_get(p, &b[MAX], &e));
        assert_null(b[MAX]);
        assert_int_equal(pool_bytes(p), SIZE * MAX);
        for (int i = 0; i < MAX; i++) pool_put(p, b[i]);
        pool_put(p, NULL);
        assert_int_equal(pool_bytes(p), 0);
    }
    pool_destroy(p);
    pool_destroy(NULL);
}

static void *get_and_put(void *arg) {
    for (int i = 0; i < 300; i++) {
        uint8_t *b[3] = {0};
        for (int k = 0; k < 3; k++)
            if (pool_get(arg, &b[k], NULL) == 0) b[k][i % 64] = 1;
        for (int k = 0; k < 3; k++) pool_put(arg, b[k]);
    }
    return NULL;
}
static void the_pool_serves_many_threads(void **state) {
    (void)state;
    pool *p = NULL;
    pthread_t t[4];
    dm_err e = {0};
    assert_ok_e(pool_create(&p, 64, 64 * 7, &e), e);
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&t[i], NULL, get_and_put, p), 0);
    for (int i = 0; i < 4; i++) pthread_join(t[i], NULL);
    assert_int_equal(pool_bytes(p), 0);
    pool_destroy(p);
}

static void a_failed_allocation_is_no_block(void **state) {
    (void)state;
    pool *p = NULL;
    uint8_t *b = NULL;
    workers *w = NULL;
    dm_fault_alloc_after(1);
    assert_err(DM_ENOMEM, pool_create(&p, 64, 0, NULL));
    assert_int_equal(pool_create(&p, 64, 64, NULL), 0);
    dm_fault_alloc_after(1);
    assert_err(DM_ENOMEM, pool_get(p, &b, NULL));
    assert_int_equal(pool_bytes(p), 0);
    assert_int_equal(pool_get(p, &b, NULL), 0); /* the failed one does not count against the bound */
    pool_put(p, b);
    pool_destroy(p);
    for (int n = 1; n <= 3; n++) {
        dm_fault_alloc_after(n);
        assert_err(DM_ENOMEM, workers_create(&w, 4, 100, NULL));
        assert_null(w);
    }
    dm_fault_alloc_after(-1);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_task_runs_once_for_any_number_of_threads),
        cmocka_unit_test(the_pool_keeps_its_bound_and_hands_out_zeroed_blocks),
        cmocka_unit_test(the_pool_serves_many_threads),
        cmocka_unit_test(a_failed_allocation_is_no_block),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
