/* kill -9 at every named point of the write path, and at random moments: the store opens at once, every entry is whole or absent,
 * and what a flush acknowledged is there.  K2, K06, K19, K25; incidents 8, 9. */
#include "kvtest.h"

#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>

static dm_kv_opts crash_opts(const char *dir)
{
    dm_kv_opts o = kt_opts(dir);
    o.disk_bytes_max = 3 << 19; /* so that the workload evicts */
    o.sync_ms = 1;
    return o;
}

#define SEQS 40
static size_t state_bytes(uint64_t seed) { return 200 + seed * 7919 % 30000; }

/* What the child has been told is durable: it writes a byte per flushed sequence into a pipe. */
static void workload(const char *dir, const char *fault, uint64_t from, int out)
{
    dm_kv_opts o = crash_opts(dir);
    dm_kv *kv;
    dm_err e;
    if (dm_kv_open(&kv, &o, &e)) _exit(10);
    if (dm_fault_arm(fault, &e)) _exit(11);
    for (uint64_t i = from;; i++) {
        uint8_t name = (uint8_t)(i % SEQS);
        int32_t *ids = kt_ids(name, 900);
        dm_kv_hit hit;
        if (dm_kv_find(kv, ids, 900, 900, &hit, &e)) _exit(12);
        dm_kv_hit_end(kv, &hit);
        for (int b = 0; b < 3; b++)
            if (kt_put_block(kv, ids, b, &e)) _exit(13);
        if (kt_put_state(kv, ids, 768 + name, state_bytes(name), &e)) _exit(14);
        if (i % 5 == 4) {
            dm_hash last;
            kt_chain(&last, ids, 3);
            dm_kv_drop_state(kv, &last, ids + 768, name, &e);
        }
        if (dm_kv_flush(kv, 20000, &e)) _exit(15);
        if (write(out, &name, 1) != 1) _exit(16);
        free(ids);
    }
}

/* Runs the child until it is killed; returns the last sequence acknowledged, or -1. */
static int run_and_kill(const char *dir, const char *fault, uint64_t from, int kill_after_us)
{
    int pipe_fd[2];
    assert_int_equal(pipe(pipe_fd), 0);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        close(pipe_fd[0]);
        workload(dir, fault, from, pipe_fd[1]);
    }
    close(pipe_fd[1]);
    if (kill_after_us) {
        usleep((useconds_t)kill_after_us);
        kill(pid, SIGKILL);
    }
    int last = -1, status;
    uint8_t name;
    while (read(pipe_fd[0], &name, 1) == 1) last = name;
    close(pipe_fd[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) fail_msg("%s: the child ended with %x", fault ? fault : "random", status);
    return last;
}

/* The directory holds the two files of LMDB, the payloads, and nothing else. */
static void no_leftovers(const char *dir)
{
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *de; (de = readdir(d));)
        if (de->d_name[0] != '.' && strcmp(de->d_name, "data.mdb") != 0 && strcmp(de->d_name, "lock.mdb") != 0 && strcmp(de->d_name, "slots.dat") != 0) fail_msg("left over: %s", de->d_name);
    closedir(d);
}

static int64_t reopen_and_check(const char *dir, int acknowledged)
{
    dm_kv_opts o = crash_opts(dir);
    dm_kv *kv = kt_open(&o);
    kt_verify(kv);
    int64_t found = 0;
    for (uint64_t i = 0; i < SEQS; i++) {
        int32_t *ids = kt_ids(i, 900);
        int64_t at = kt_found(kv, ids, 900), whole = kt_restore(kv, ids, 900, 900);
        assert_int_equal(at, whole); /* what is offered is there */
        assert_true(at == 0 || at == 768 + (int64_t)i);
        if ((int)i == acknowledged && i % 5 != 4 && at != 768 + acknowledged) fail_msg("%d was acknowledged, %lld found; blocks %lld", acknowledged, (long long)at, (long long)kt_blocks(kv, ids, 900));
        found += at != 0;
        free(ids);
    }
    assert_int_equal(kt_stat(kv).bad_entries, 0);
    assert_in_range(kt_stat(kv).disk_bytes_live, 0, o.disk_bytes_max);
    dm_kv_close(kv);
    no_leftovers(dir);
    return found;
}

static void killed_at_every_point_of_the_write_path(void **s)
{
    (void)s;
    static const char *const points[] = { "kv.write", "kv.slots.written", "kv.slots.synced", "kv.commit.before", "kv.commit.after", "kv.evict", "kv.remove", "kv.sync", "kv.put", "kv.begin" };
    const char *dir = kt_dir("points");
    int64_t found = 0;
    uint64_t from = 0;
    for (size_t i = 0; i < DM_COUNT(points); i++)
        for (int pass = 1; pass <= (test_full() ? 12 : 4); pass++) {
            char fault[64];
            snprintf(fault, sizeof fault, "%s:%d=kill", points[i], pass * pass);
            int acknowledged = run_and_kill(dir, fault, from, 0);
            print_message("# %s from %d: %d\n", fault, (int)from, acknowledged);
            found += reopen_and_check(dir, acknowledged);
            from += 7;
        }
    assert_true(found > 0);
}

static void killed_at_random_moments(void **s)
{
    (void)s;
    const char *dir = kt_dir("random");
    uint64_t rnd = test_seed();
    int64_t found = 0;
    int rounds = test_full() ? 1000 : 15;
    for (int i = 0; i < rounds; i++) {
        int us = 2000 + (int)(dm_splitmix64(&rnd) % 80000);
        found += reopen_and_check(dir, run_and_kill(dir, NULL, dm_splitmix64(&rnd) % SEQS, us));
    }
    assert_true(found > 0);
}

static void killed_while_the_store_is_made(void **s)
{
    (void)s;
    uint64_t rnd = test_seed() + 1;
    for (int i = 0; i < 20; i++) {
        const char *dir = kt_dir("making");
        (void)run_and_kill(dir, NULL, 0, 1 + (int)(dm_splitmix64(&rnd) % 6000));
        dm_kv_opts o = crash_opts(dir);
        dm_kv *kv = kt_open(&o);
        int32_t *ids = kt_ids(1, 300);
        kt_put(kv, ids, 300, 100);
        kt_flush(kv);
        assert_int_equal(kt_restore(kv, ids, 300, 300), 300);
        dm_kv_close(kv);
        free(ids);
    }
}

/* A kill that leaves a reader's slot behind, 300 times: the table does not fill up, and pages are reused. */
static void readers_left_behind_are_cleared(void **s)
{
    (void)s;
    dm_kv_opts o = crash_opts(kt_dir("readers"));
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(1, 300);
    kt_put(kv, ids, 300, 100);
    dm_kv_close(kv);
    int rounds = test_full() ? 600 : 300;
    for (int i = 0; i < rounds; i++) {
        pid_t pid = fork();
        if (pid == 0) {
            dm_kv_opts ro = o;
            dm_err e;
            ro.read_only = i % 2;
            if (dm_kv_open(&kv, &ro, &e)) _exit(1);
            dm_kv_hit hit;
            dm_fault_arm("kv.read=kill", &e); /* in the second attempt the transaction is open; the first has just ended */
            if (dm_kv_find(kv, ids, 300, 300, &hit, &e) || hit.pos != 300) _exit(2);
            uint8_t buf[KT_BLOCK_BYTES];
            (void)dm_kv_read_block(kv, &hit, 0, buf, NULL, &e);
            _exit(3);
        }
        int status;
        waitpid(pid, &status, 0);
        assert_true(WIFSIGNALED(status));
    }
    kv = kt_open(&o);
    for (uint64_t i = 0; i < 200; i++) {
        int32_t *other = kt_ids(10 + i % 100, 600);
        kt_put(kv, other, 600, 9000);
        if (i % 10 == 9) kt_flush(kv);
        free(other);
    }
    kt_flush(kv);
    assert_in_range(kt_file_bytes(o.dir), 0, o.disk_bytes_max + 3 * 4096);
    assert_int_equal(kt_stat(kv).put_dropped, 0);
    dm_kv_close(kv);
    free(ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(killed_at_every_point_of_the_write_path),
        cmocka_unit_test(killed_at_random_moments),
        cmocka_unit_test(killed_while_the_store_is_made),
        cmocka_unit_test(readers_left_behind_are_cleared),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
