/* Many threads on one store, and another process that evicts under their reads: each value whole and its own, or a miss. */
#include "kvtest.h"

#include <pthread.h>
#include <sys/wait.h>

#define NAMES 50
typedef struct worker {
    pthread_t thread;
    dm_kv *kv;
    uint64_t seed;
    int rounds;
    int64_t hits, whole;
} worker;

static void one_round(worker *w)
{
    uint64_t name = dm_splitmix64(&w->seed) % NAMES, what = dm_splitmix64(&w->seed) % 16;
    int32_t *ids = kt_ids(name, 700);
    dm_err e;
    dm_hash last;
    if (what < 6) {
        for (int i = 0; i < 2; i++) assert_ok_e(kt_put_block(w->kv, ids, i, &e), e);
        assert_ok_e(kt_put_state(w->kv, ids, 600, 3000 + name * 400, &e), e);
    } else if (what == 6) {
        kt_chain(&last, ids, 2);
        assert_ok_e(dm_kv_drop_state(w->kv, &last, ids + 512, 88, &e), e);
    } else if (what == 7) {
        (void)dm_kv_flush(w->kv, 5, &e);
        (void)dm_kv_queued_bytes(w->kv);
        int rc = dm_kv_pin(w->kv, 1 + name % 3, ids, 600, (int64_t)(dm_splitmix64(&w->seed) % 20), &e);
        assert_true(rc == 0 || rc == DM_ELIMIT);
        (void)kt_stat(w->kv);
    } else {
        int64_t at = kt_restore(w->kv, ids, 700, 700); /* compares what it reads */
        w->whole += at == 600;
        w->hits++;
    }
    free(ids);
}

static void *work(void *arg)
{
    worker *w = arg;
    for (int i = 0; i < w->rounds; i++) one_round(w);
    return NULL;
}

static dm_kv_opts tight_opts(const char *dir)
{
    dm_kv_opts o = kt_opts(dir);
    o.disk_bytes_max = 3 << 19;
    o.ram_bytes_max = 200 << 10;
    o.queue_bytes_max = 100 << 10;
    o.sync_ms = 1;
    return o;
}

static int64_t run_threads(dm_kv *kv, int rounds)
{
    worker w[4];
    int64_t whole = 0;
    for (int i = 0; i < 4; i++) {
        w[i] = (worker){ .kv = kv, .seed = test_seed() + (uint64_t)i, .rounds = rounds };
        assert_int_equal(pthread_create(&w[i].thread, NULL, work, &w[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(w[i].thread, NULL);
        whole += w[i].whole;
    }
    return whole;
}

static void threads_share_one_store(void **s)
{
    (void)s;
    dm_kv_opts o = tight_opts(kt_dir("threads"));
    dm_kv *kv = kt_open(&o);
    assert_true(run_threads(kv, test_full() ? 5000 : 400) > 0);
    dm_err e;
    (void)dm_kv_flush(kv, 20000, &e);
    kt_verify(kv);
    dm_kv_stat st = kt_stat(kv);
    assert_int_equal(st.bad_entries, 0);
    assert_in_range(st.ram_bytes, 0, o.ram_bytes_max);
    assert_int_equal(st.queued_bytes, 0);
    dm_kv_close(kv);
}

static void another_process_evicts_under_our_reads(void **s)
{
    (void)s;
    dm_kv_opts o = tight_opts(kt_dir("procs"));
    int go[2];
    assert_int_equal(pipe(go), 0);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        char c;
        close(go[1]);
        dm_kv *kv = kt_open(&o);
        worker w = { .kv = kv, .seed = 4242, .rounds = 50 };
        while (read(go[0], &c, 1) == 1) work(&w);
        dm_kv_close(kv);
        _exit(0);
    }
    close(go[0]);
    dm_kv *kv = kt_open(&o);
    int64_t whole = 0;
    for (int i = 0; i < (test_full() ? 60 : 8); i++) {
        assert_int_equal(write(go[1], "x", 1), 1);
        whole += run_threads(kv, 50);
    }
    close(go[1]);
    int status;
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
    assert_true(whole > 0);
    assert_int_equal(kt_stat(kv).bad_entries, 0); /* an eviction elsewhere is a miss, not damage */
    kt_verify(kv);
    dm_kv_close(kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(another_process_evicts_under_our_reads),
        cmocka_unit_test(threads_share_one_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
