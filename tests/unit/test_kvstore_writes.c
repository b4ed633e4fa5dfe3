/* What goes to the disk is what is new, once: incidents 32, 36, 44.  Bytes are those that the process gave to write calls, LMDB's pages
 * and all, as the kernel counts them. */
#include "kvtest.h"

#include <stdio.h>

enum { BLOCK = 400000, STATE = 1200000, TURNS = 10, TURN = 1100, SESSIONS = 4 };

static int64_t bytes_given_to_writes(void)
{
    long long n = -1;
    char line[128];
    FILE *f = fopen("/proc/self/io", "re");
    while (f && n < 0 && fgets(line, sizeof line, f)) sscanf(line, "wchar: %lld", &n);
    if (f) fclose(f);
    if (n < 0) test_skip("/proc/self/io is not there");
    return n;
}

static dm_kv_opts write_opts(const char *name, int64_t quota)
{
    dm_kv_opts o = kt_opts(kt_dir(name));
    o.block_bytes = BLOCK;
    o.disk_bytes_max = quota;
    o.ram_bytes_max = 16 << 20;
    o.queue_bytes_max = 8 << 20;
    return o;
}

/* One turn from wherever the session is found; a sink that does not know gives all blocks again (`again`).  Bytes that were not there. */
static int64_t turn(dm_kv *kv, const int32_t *ids, int64_t pos, bool again)
{
    static uint8_t bytes[STATE];
    dm_kv_hit hit;
    dm_hash h = kt_root(), prev;
    dm_err e;
    assert_ok_e(dm_kv_find(kv, ids, pos, pos - 1, &hit, &e), e);
    for (int64_t i = 0; i < pos / DM_KV_BLOCK; i++) {
        prev = h;
        dm_kv_chain(&h, &prev, ids + i * DM_KV_BLOCK);
        kt_fill(bytes, 64, &h, NULL, -1);
        if (again || i >= hit.blocks) assert_ok_e(dm_kv_put_block_after(kv, &prev, &h, bytes, BLOCK, &e), e);
    }
    int64_t fresh = (pos / DM_KV_BLOCK - hit.blocks_present) * BLOCK + STATE;
    dm_kv_hit_end(kv, &hit);
    assert_ok_e(dm_kv_put_state(kv, &h, ids + pos / DM_KV_BLOCK * DM_KV_BLOCK, (int)(pos % DM_KV_BLOCK), bytes, STATE, &e), e);
    kt_flush(kv);
    return fresh;
}

static void within(const char *what, int64_t written, int64_t fresh)
{
    print_message("# %s: %lld bytes written for %lld new ones (%.3f)\n", what, (long long)written, (long long)fresh, (double)written / (double)fresh);
    assert_true(written >= fresh);
    assert_in_range(written, 0, fresh * 6 / 5);
}

static void a_session_costs_its_new_blocks_and_states_whether_or_not_they_are_put_again(void **s)
{
    (void)s;
    for (int again = 0; again < 2; again++) {
        dm_kv_opts o = write_opts("one", 256 << 20);
        dm_kv *kv = kt_open(&o);
        int32_t *ids = kt_ids(1, TURNS * TURN);
        int64_t fresh = 0, before = bytes_given_to_writes();
        for (int i = 1; i <= TURNS; i++) fresh += turn(kv, ids, i * TURN, again);
        dm_kv_stat st = kt_stat(kv);
        assert_int_equal(fresh, (int64_t)(TURNS * TURN / DM_KV_BLOCK) * BLOCK + TURNS * STATE);
        within(again ? "put again" : "new only", st.bytes_written, fresh);
        dm_kv_close(kv);
        within("with the index", bytes_given_to_writes() - before, fresh);
        free(ids);
    }
}

/* Sessions in turns at a quota that holds a third of them: what was evicted is new when it is computed again, and nothing else is. */
static void at_a_full_quota_nothing_is_written_twice(void **s)
{
    (void)s;
    dm_kv_opts o = write_opts("full", 48 << 20);
    dm_kv *kv = kt_open(&o);
    int32_t *ids[SESSIONS];
    int64_t fresh = 0, before = bytes_given_to_writes();
    for (int i = 0; i < SESSIONS; i++) ids[i] = kt_ids(10 + (uint64_t)i, TURNS * TURN);
    for (int t = 1; t <= TURNS; t++)
        for (int i = 0; i < SESSIONS; i++) fresh += turn(kv, ids[i], t * TURN, i % 2);
    dm_kv_stat st = kt_stat(kv);
    assert_true(st.evicted_entries > 0);
    /* Of what was new, the store may turn something away; never may it write more. */
    assert_in_range(st.put_blocks * BLOCK + st.put_states * STATE, 0, fresh);
    within("at the quota", st.bytes_written, st.put_blocks * BLOCK + st.put_states * STATE);
    dm_kv_close(kv);
    within("with the index", bytes_given_to_writes() - before, st.put_blocks * BLOCK + st.put_states * STATE);
    for (int i = 0; i < SESSIONS; i++) free(ids[i]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_session_costs_its_new_blocks_and_states_whether_or_not_they_are_put_again),
        cmocka_unit_test(at_a_full_quota_nothing_is_written_twice),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
