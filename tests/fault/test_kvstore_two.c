/* Two processes, one store, all the time at its quota: no error to a caller, no wrong value, and what one has flushed the other finds
 * unless it was evicted.  Incidents 37, 53; K22.  Quick: 2,000 operations; with DM_TEST_FULL: 100,000. */
#include "kvtest.h"

#include <sys/wait.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { QUICK = 400 };
#else
enum { QUICK = 2000 };
#endif
enum { PROCESSES = 2, FULL = 100000, SESSIONS = 40, BLOCKS = 12 };

typedef struct tally { int64_t ops, found, restored, missed, written, bad; } tally;

static dm_kv_opts two_opts(const char *dir)
{
    dm_kv_opts o = kt_opts(dir);
    o.disk_bytes_max = 3 << 20; /* about a third of what the sessions hold */
    o.ram_bytes_max = 1 << 20;
    o.queue_bytes_max = 1 << 19;
    o.sync_ms = 5;
    return o;
}

/* One session goes on by some blocks, as a pager does it: lookup, restore, blocks behind it, a state. */
static int one_turn(dm_kv *kv, int32_t *const *ids, uint64_t z, tally *t, dm_err *e)
{
    const int32_t *my = ids[z % SESSIONS];
    dm_kv_hit hit;
    uint8_t bytes[KT_BLOCK_BYTES];
    int rc = dm_kv_find(kv, my, BLOCKS * DM_KV_BLOCK, BLOCKS * DM_KV_BLOCK, &hit, e);
    if (rc) return rc;
    int64_t at = hit.blocks;
    bool whole = true;
    t->found += hit.pos > 0;
    for (int64_t i = 0; i < hit.blocks; i++) whole &= kt_read_block(kv, &hit, my, i, NULL) == 1; /* wrong bytes fail there */
    if (hit.pos) whole &= kt_read_state(kv, &hit, my, NULL) == 1;
    *(whole ? &t->restored : &t->missed) += hit.pos > 0;
    dm_kv_hit_end(kv, &hit);
    int64_t to = at + 1 + (int64_t)(z >> 8) % 4;
    if (to > BLOCKS) to = BLOCKS;
    dm_hash prev, h;
    kt_chain(&h, my, at);
    for (int64_t i = at; i < to; i++) {
        prev = h;
        dm_kv_chain(&h, &prev, my + i * DM_KV_BLOCK);
        kt_fill(bytes, sizeof bytes, &h, NULL, -1);
        rc = dm_kv_put_block_after(kv, &prev, &h, bytes, sizeof bytes, e);
        if (rc) return rc;
    }
    rc = kt_put_state(kv, my, to * DM_KV_BLOCK, 3000 + (size_t)(z >> 16) % 20000, e);
    if (!rc && (z >> 40) % 16 == 0) rc = dm_kv_flush(kv, 60000, e);
    return rc;
}

static void work(const char *dir, int who, int ops, int out)
{
    int32_t *ids[SESSIONS];
    uint64_t rnd = test_seed() + (uint64_t)who;
    tally t = { 0 };
    dm_kv_opts o = two_opts(dir);
    dm_kv *kv;
    dm_err e = { 0 };
    for (int i = 0; i < SESSIONS; i++) ids[i] = kt_ids((uint64_t)i, BLOCKS * DM_KV_BLOCK);
    if (dm_kv_open(&kv, &o, &e)) _exit(2);
    for (; t.ops < ops; t.ops++) {
        int rc = one_turn(kv, ids, dm_splitmix64(&rnd), &t, &e);
        if (rc) {
            fprintf(stderr, "# process %d, operation %lld: %s: %s\n", who, (long long)t.ops, dm_err_name(rc), e.text);
            _exit(3);
        }
    }
    if (dm_kv_flush(kv, 60000, &e)) _exit(4);
    dm_kv_stat st = kt_stat(kv);
    t.written = st.put_blocks + st.put_states;
    t.bad = st.bad_entries;
    dm_kv_close(kv);
    for (int i = 0; i < SESSIONS; i++) free(ids[i]);
    _exit(write(out, &t, sizeof t) == sizeof t ? 0 : 5);
}

static void two_processes_work_on_one_store(void **s)
{
    (void)s;
    const char *dir = kt_dir("two");
    int fd[2], ops = (test_full() ? FULL : QUICK) / PROCESSES;
    pid_t pids[PROCESSES];
    assert_int_equal(pipe(fd), 0);
    fflush(NULL);
    for (int i = 0; i < PROCESSES; i++)
        if ((pids[i] = fork()) == 0) work(dir, i, ops, fd[1]);
    for (int i = 0; i < PROCESSES; i++) {
        int status;
        assert_int_equal(waitpid(pids[i], &status, 0), pids[i]);
        assert_int_equal(status, 0);
    }
    for (int i = 0; i < PROCESSES; i++) {
        tally t;
        assert_int_equal(read(fd[0], &t, sizeof t), sizeof t);
        printf("# %lld operations: %lld found, %lld restored whole, %lld of them gone meanwhile, %lld entries written, %lld bad\n", (long long)t.ops,
               (long long)t.found, (long long)t.restored, (long long)t.missed, (long long)t.written, (long long)t.bad);
        assert_true(t.found > 0 && t.restored > 0 && t.written > 0);
        assert_int_equal(t.bad, 0); /* evicted by the other is a miss, not damage */
    }
    close(fd[0]), close(fd[1]);
    dm_kv_opts o = two_opts(dir);
    dm_kv *kv = kt_open(&o);
    kt_verify(kv);
    assert_in_range(kt_file_bytes(dir), 0, o.disk_bytes_max + (int64_t)kt_stat(kv).extent_bytes);
    dm_kv_close(kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_processes_work_on_one_store),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
