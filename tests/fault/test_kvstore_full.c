/* No room: disk full (injected, by file size limit, on a real small tmpfs), a map blocked by a long reader, errors of the
 * disk.  Requests go on, one warning, and spilling comes back by itself.  K5, K20, K21, K24; incidents 8, 37. */
#include "kvtest.h"

#include <errno.h>
#include <lmdb.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

static int warnings, infos;
static void count_log(void *ctx, dm_log_level level, const char *line)
{
    (void)ctx, (void)line;
    if (level <= DM_LOG_WARN) __atomic_add_fetch(&warnings, 1, __ATOMIC_RELAXED);
    else __atomic_add_fetch(&infos, 1, __ATOMIC_RELAXED);
}

static int warned(void) { return __atomic_load_n(&warnings, __ATOMIC_RELAXED); }

static void put_many(dm_kv *kv, uint64_t from, uint64_t to)
{
    for (uint64_t i = from; i < to; i++) {
        int32_t *ids = kt_ids(i, 600);
        kt_put(kv, ids, 600, 15000);
        assert_int_equal(kt_restore(kv, ids, 600, 600), 600); /* from RAM at least */
        free(ids);
    }
}

static void wait_for_full(dm_kv *kv)
{
    /* A retry may have succeeded meanwhile, with what little room there is: then it was told, and that is what counts. */
    for (int ms = 0; !kt_stat(kv).disk_full && !warned(); ms += 5) {
        if (ms > 120000) fail_msg("the store never said that the disk is full; %lld bytes are queued", (long long)kt_stat(kv).queued_bytes);
        poll(NULL, 0, 5);
    }
}

static void each_failing_step_of_a_write_is_warned_of_once_and_overcome(void **s)
{
    (void)s;
    static const char *const points[] = { "kv.begin", "kv.write", "kv.commit.before", "kv.sync" };
    for (size_t p = 0; p < DM_COUNT(points); p++) {
        dm_kv_opts o = kt_opts(kt_dir("inject"));
        dm_kv *kv = kt_open(&o);
        dm_err e;
        char spec[64];
        snprintf(spec, sizeof spec, "%s:1+=fail", points[p]);
        __atomic_store_n(&warnings, 0, __ATOMIC_RELAXED);
        assert_ok(dm_fault_arm(spec, &e));
        put_many(kv, 0, 4);
        int rc = dm_kv_flush(kv, 400, &e); /* may fail while the disk does */
        assert_true(rc == 0 || rc == DM_ENOSPC || rc == DM_ETIMEDOUT);
        put_many(kv, 4, 8);
        assert_ok(dm_fault_arm(NULL, &e));
        kt_flush(kv);
        assert_true(warned() <= 1);
        assert_false(kt_stat(kv).disk_full);
        assert_int_equal(kt_stat(kv).put_dropped, 0);
        dm_kv_close(kv);
        kv = kt_open(&o);
        for (uint64_t i = 0; i < 8; i++) {
            int32_t *ids = kt_ids(i, 600);
            assert_int_equal(kt_restore(kv, ids, 600, 600), 600);
            free(ids);
        }
        kt_verify(kv);
        dm_kv_close(kv);
    }
}

/* A large batch is synced while it is written: what that sync says is the batch's fate, as much as what the last one says. */
static void a_failing_sync_inside_a_batch_fails_the_batch(void **s)
{
    (void)s;
    enum { BLOCKS = 24, BLOCK = 1 << 20 };
    dm_kv_opts o = kt_opts(kt_dir("ahead"));
    o.block_bytes = BLOCK;
    o.disk_bytes_max = (int64_t)4 << 30; /* batches of all that is queued */
    o.ram_bytes_max = o.queue_bytes_max = 256 << 20;
    o.sync_ms = 60000;
    dm_kv *kv = kt_open(&o);
    dm_err e;
    dm_hash h = kt_root(), prev;
    int32_t *ids = kt_ids(1, BLOCKS * 256 + 1);
    uint8_t *bytes = malloc(BLOCK);
    __atomic_store_n(&warnings, 0, __ATOMIC_RELAXED);
    assert_ok(dm_fault_arm("kv.slots.ahead:1=fail", &e));
    for (int i = 0; i < BLOCKS; i++) {
        prev = h;
        dm_kv_chain(&h, &prev, ids + i * 256);
        kt_fill(bytes, BLOCK, &h, NULL, -1);
        assert_ok_e(dm_kv_put_block_after(kv, &prev, &h, bytes, BLOCK, &e), e);
    }
    assert_ok_e(dm_kv_put_state(kv, &h, NULL, 0, bytes, 1000, &e), e);
    assert_err(DM_ENOSPC, dm_kv_flush(kv, 60000, &e));
    assert_int_equal(warned(), 1);
    assert_int_equal(kt_stat(kv).blocks, 0); /* nothing of it */
    assert_ok(dm_fault_arm(NULL, &e));
    kt_flush(kv);
    assert_int_equal(kt_stat(kv).blocks, BLOCKS);
    kt_verify(kv);
    dm_kv_close(kv);
    kv = kt_open(&o);
    dm_kv_hit hit;
    assert_ok_e(dm_kv_find(kv, ids, BLOCKS * 256 + 1, BLOCKS * 256, &hit, &e), e);
    assert_int_equal(hit.pos, BLOCKS * 256);
    dm_kv_hit_end(kv, &hit);
    dm_kv_close(kv);
    free(bytes);
    free(ids);
}

/* Every third write fails, for good: a key whose write failed is never half there. */
static void every_kth_write_failing_leaves_whole_entries_only(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("kth"));
    dm_err e;
    for (int k = 1; k < 12; k++) {
        dm_kv *kv = kt_open(&o);
        char spec[64];
        snprintf(spec, sizeof spec, "kv.write:%d=fail", k);
        assert_ok(dm_fault_arm(spec, &e));
        for (uint64_t i = 0; i < 6; i++) {
            int32_t *ids = kt_ids((uint64_t)k * 10 + i, 600);
            kt_put(kv, ids, 600, 15000);
            free(ids);
        }
        (void)dm_kv_flush(kv, 50, &e);
        dm_kv_close(kv); /* what could not be written is given up */
        assert_ok(dm_fault_arm(NULL, &e));
        kv = kt_open(&o);
        kt_verify(kv);
        for (uint64_t i = 0; i < 6; i++) {
            int32_t *ids = kt_ids((uint64_t)k * 10 + i, 600);
            int64_t pos = kt_found(kv, ids, 600);
            assert_int_equal(kt_restore(kv, ids, 600, 600), pos);
            free(ids);
        }
        dm_kv_close(kv);
    }
}

static void a_read_error_is_a_miss_and_the_entry_goes(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("eio"));
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(1, 600);
    kt_put(kv, ids, 600, 1000);
    dm_kv_close(kv);
    kv = kt_open(&o);
    dm_err e;
    assert_ok(dm_fault_arm("kv.read=fail", &e));
    assert_int_equal(kt_restore(kv, ids, 600, 600), 0);
    assert_ok(dm_fault_arm(NULL, &e));
    assert_int_equal(kt_stat(kv).bad_entries, 1);
    assert_int_equal(kt_restore(kv, ids, 600, 600), 0);
    kt_put(kv, ids, 600, 1000);
    kt_flush(kv);
    assert_int_equal(kt_restore(kv, ids, 600, 600), 600);
    dm_kv_close(kv);
    free(ids);
}

/* The kernel refuses to let the files grow: real LMDB, real failed writes. */
static void file_limit_child(const char *dir)
{
    signal(SIGXFSZ, SIG_IGN);
    dm_kv_opts o = kt_opts(dir);
    dm_kv *kv = kt_open(&o);
    put_many(kv, 0, 5);
    kt_flush(kv);
    struct rlimit limit = { 2 << 20, RLIM_INFINITY };
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    put_many(kv, 5, 80);
    wait_for_full(kv);
    put_many(kv, 80, 100);
    assert_int_equal(warned(), 1);
    struct stat index, slots;
    assert_int_equal(stat(kt_data_file(dir), &index) | stat(kt_slots_file(dir), &slots), 0);
    assert_true(index.st_size <= 2 << 20 && slots.st_size <= 2 << 20);
    limit.rlim_cur = RLIM_INFINITY;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
    kt_flush(kv);
    assert_false(kt_stat(kv).disk_full);
    kt_verify(kv);
    dm_kv_close(kv);
}

typedef void (*child_fn)(const char *dir);
static void run_child(child_fn fn, const char *dir)
{
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(300); /* a check that fails in a child goes on with the next test there, and may wait for somebody who is not */
        warnings = 0;
        fn(dir);
        _exit(0);
    }
    int status;
    waitpid(pid, &status, 0);
    if (status) fail_msg("the child ended with %x", status);
}

static void a_file_that_may_not_grow_stops_spilling_until_it_may(void **s)
{
    (void)s;
    run_child(file_limit_child, kt_dir("fsize"));
}

static void tmpfs_child(const char *dir)
{
    dm_kv_opts o = kt_opts(dir);
    o.block_bytes = 1 << 20;
    dm_kv *kv = kt_open(&o); /* 64 MiB of quota on 8 MiB of disk; O_DIRECT is refused there */
    dm_err e;
    uint8_t *big = malloc(1 << 20);
    int32_t *ids = kt_ids(1, 256 * 20);
    dm_hash h = kt_root();
    for (int i = 0; i < 20; i++) {
        dm_kv_chain(&h, &h, ids + i * 256);
        memset(big, i, 1 << 20);
        memcpy(big, h.b, 32);
        assert_ok_e(dm_kv_put_block(kv, &h, big, 1 << 20, &e), e);
        if (i == 2) kt_flush(kv);
    }
    wait_for_full(kv);
    assert_int_equal(warned(), 1);
    char filler[1200];
    snprintf(filler, sizeof filler, "mount -o remount,size=80m %s", dir); /* room returns */
    assert_int_equal(mount("none", dir, NULL, MS_REMOUNT, "size=80m"), 0);
    kt_flush(kv);
    assert_int_equal(kt_stat(kv).blocks, 20 - kt_stat(kv).put_dropped);
    assert_int_equal(warned(), 1);
    kt_verify(kv);
    dm_kv_close(kv);
    kv = kt_open(&o);
    assert_ok_e(kt_put_state(kv, ids, 256, 100, &e), e); /* something that makes the blocks a hit */
    dm_kv_hit hit;
    assert_ok_e(dm_kv_find(kv, ids, 300, 300, &hit, &e), e);
    if (hit.pos) {
        kt_chain(&h, ids, 1);
        assert_ok_e(dm_kv_read_block(kv, &hit, 0, big, NULL, &e), e);
        assert_memory_equal(big, h.b, 32);
        assert_int_equal(big[1000], 0);
    }
    dm_kv_hit_end(kv, &hit);
    dm_kv_close(kv);
    free(big);
    free(ids);
}

static void a_full_tmpfs_neither_crashes_nor_blocks(void **s)
{
    (void)s;
    const char *dir = kt_dir("tmpfs");
    dm_err e;
    assert_ok(dm_mkdirs(dir, 0700, &e));
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        if (getuid() != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) _exit(77);
        if (getuid() == 0 && unshare(CLONE_NEWNS) != 0 && unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) _exit(77);
        mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL);
        if (mount("tmpfs", dir, "tmpfs", 0, "size=8m") != 0) _exit(77);
        alarm(300);
        warnings = 0;
        tmpfs_child(dir);
        _exit(0);
    }
    int status;
    waitpid(pid, &status, 0);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) test_skip("a tmpfs cannot be mounted here");
    if (status) fail_msg("the child ended with %x", status);
}

/* Another process keeps a snapshot open: no page can be reused.  The quota holds, readers see whole values, it says who it is. */
static void a_long_reader_elsewhere_does_not_make_the_file_outgrow_its_quota(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("reader"));
    o.disk_bytes_max = 4 << 20;
    int to_child[2], from_child[2];
    assert_int_equal(pipe(to_child) | pipe(from_child), 0);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        char c;
        if (read(to_child[0], &c, 1) != 1) _exit(1);
        MDB_env *env;
        MDB_txn *txn;
        if (mdb_env_create(&env) || mdb_env_open(env, o.dir, MDB_RDONLY, 0600) || mdb_txn_begin(env, NULL, MDB_RDONLY, &txn)) _exit(2);
        if (write(from_child[1], "r", 1) != 1) _exit(3);
        if (read(to_child[0], &c, 1) != 1) _exit(4);
        mdb_txn_abort(txn);
        mdb_env_close(env);
        _exit(0);
    }
    dm_kv *kv = kt_open(&o);
    char c;
    put_many(kv, 0, 60);
    kt_flush(kv);
    assert_int_equal(write(to_child[1], "g", 1), 1);
    assert_int_equal(read(from_child[0], &c, 1), 1);
    __atomic_store_n(&warnings, 0, __ATOMIC_RELAXED);
    int64_t live = kt_stat(kv).disk_bytes_live;
    put_many(kv, 100, 200);
    wait_for_full(kv);
    put_many(kv, 200, 220);
    assert_int_equal(warned(), 1);
    dm_kv_stat st = kt_stat(kv);
    assert_in_range(kt_file_bytes(o.dir), 0, o.disk_bytes_max + (int64_t)st.extent_bytes);
    assert_true(st.disk_bytes_live > live / 2); /* the rest was not thrown away for nothing */
    assert_int_equal(write(to_child[1], "e", 1), 1);
    int status;
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
    kt_flush(kv);
    assert_false(kt_stat(kv).disk_full);
    put_many(kv, 300, 320);
    kt_flush(kv);
    assert_in_range(kt_file_bytes(o.dir), 0, o.disk_bytes_max + (int64_t)st.extent_bytes);
    kt_verify(kv);
    dm_kv_close(kv);
    for (int i = 0; i < 2; i++) close(to_child[i]), close(from_child[i]);
}

/* Another process with a larger quota lets the file outgrow our map. */
static void a_file_grown_by_another_process_is_followed(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("grown"));
    o.disk_bytes_max = 1 << 20;
    int go[2], done[2];
    assert_int_equal(pipe(go) | pipe(done), 0);
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        char c;
        dm_kv_opts big = o;
        big.disk_bytes_max = 32 << 20;
        if (read(go[0], &c, 1) != 1) _exit(1);
        dm_kv *kv = kt_open(&big);
        put_many(kv, 0, 150);
        kt_flush(kv);
        if (write(done[1], "d", 1) != 1) _exit(2);
        if (read(go[0], &c, 1) != 1) _exit(3);
        dm_kv_close(kv);
        _exit(0);
    }
    dm_kv *kv = kt_open(&o);
    put_many(kv, 500, 505);
    kt_flush(kv);
    char c;
    assert_int_equal(write(go[1], "g", 1), 1);
    assert_int_equal(read(done[0], &c, 1), 1);
    int64_t seen = 0;
    for (uint64_t i = 0; i < 150; i++) {
        int32_t *ids = kt_ids(i, 600);
        seen += kt_restore(kv, ids, 600, 600) == 600;
        free(ids);
    }
    assert_int_equal(seen, 150);
    assert_int_equal(kt_stat(kv).bad_entries, 0);
    assert_int_equal(write(go[1], "e", 1), 1);
    int status;
    waitpid(pid, &status, 0);
    assert_int_equal(status, 0);
    put_many(kv, 600, 610); /* and our own quota is in force again */
    kt_flush(kv);
    assert_in_range(kt_stat(kv).disk_bytes_live, 0, o.disk_bytes_max);
    kt_verify(kv);
    dm_kv_close(kv);
    for (int i = 0; i < 2; i++) close(go[i]), close(done[i]);
}

static int set_up(void **s)
{
    (void)s;
    dm_log_set(count_log, NULL, DM_LOG_DEBUG);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_failing_step_of_a_write_is_warned_of_once_and_overcome),
        cmocka_unit_test(a_failing_sync_inside_a_batch_fails_the_batch),
        cmocka_unit_test(every_kth_write_failing_leaves_whole_entries_only),
        cmocka_unit_test(a_read_error_is_a_miss_and_the_entry_goes),
        cmocka_unit_test(a_file_that_may_not_grow_stops_spilling_until_it_may),
        cmocka_unit_test(a_full_tmpfs_neither_crashes_nor_blocks),
        cmocka_unit_test(a_long_reader_elsewhere_does_not_make_the_file_outgrow_its_quota),
        cmocka_unit_test(a_file_grown_by_another_process_is_followed),
    };
    return cmocka_run_group_tests(tests, set_up, NULL);
}
