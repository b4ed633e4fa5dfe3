/* The write budget of a day, and figures over all processes.  Idea 10 of others' troubles with worn disks. */
#include "kvstore/kv_int.h"
#include "kvtest.h"

enum { BLOCK = 100000, BLOCKS = 8 };

static dm_kv_opts opts(const char *name, int64_t per_day)
{
    dm_kv_opts o = kt_opts(kt_dir(name));
    o.block_bytes = BLOCK;
    o.disk_bytes_max = 64 << 20;
    o.write_bytes_day = per_day;
    return o;
}

static void put(dm_kv *kv, const int32_t *ids, int from, int to)
{
    static uint8_t bytes[BLOCK];
    size_t n = kt_stat(kv).block_bytes;
    dm_hash h = kt_root(), prev;
    dm_err e;
    for (int i = 0; i < to; i++) {
        prev = h;
        dm_kv_chain(&h, &prev, ids + i * DM_KV_BLOCK);
        kt_fill(bytes, n, &h, NULL, -1);
        if (i >= from) assert_ok_e(dm_kv_put_block_after(kv, &prev, &h, bytes, n, &e), e);
    }
    assert_ok_e(dm_kv_put_state(kv, &h, NULL, 0, bytes, 1000, &e), e);
    assert_ok_e(dm_kv_flush(kv, 60000, &e), e); /* nobody waits for what is kept back */
}

static int64_t found(dm_kv *kv, const int32_t *ids)
{
    dm_kv_hit hit;
    dm_err e;
    assert_ok_e(dm_kv_find(kv, ids, BLOCKS * DM_KV_BLOCK, BLOCKS * DM_KV_BLOCK, &hit, &e), e);
    int64_t n = hit.blocks_present;
    dm_kv_hit_end(kv, &hit);
    return n;
}

static void nothing_is_written_beyond_it_and_the_next_day_goes_on(void **s)
{
    (void)s;
    dm_kv_stat st;
    dm_kv_opts o = opts("day", 0);
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(1, BLOCKS * DM_KV_BLOCK);
    st = kt_stat(kv);
    int64_t extent = (int64_t)st.extent_bytes;
    dm_kv_close(kv);

    o.write_bytes_day = 3 * extent + extent / 2;
    kv = kt_open(&o);
    put(kv, ids, 0, 6);
    st = kt_stat(kv);
    assert_int_equal(st.blocks, 3);
    assert_int_equal(st.states, 0); /* it hangs on what is not there */
    assert_int_equal(st.total.day_bytes, 3 * extent);
    assert_int_equal(st.total.held_bytes, 4 * extent); /* three blocks and the state */
    assert_true(st.over_budget);
    assert_int_equal(found(kv, ids), 6);              /* the others are in RAM */
    dm_kv_close(kv);

    kv = kt_open(&o); /* the budget is the day's, not the process's */
    assert_int_equal(found(kv, ids), 3);
    put(kv, ids, 3, 6);
    st = kt_stat(kv);
    assert_int_equal(st.blocks, 3);
    assert_int_equal(st.total.day_bytes, 3 * extent);

    kv_days_shift(1); /* what hangs on what was kept back takes it along */
    put(kv, ids, 6, 7);
    st = kt_stat(kv);
    assert_int_equal(st.blocks, 6);
    assert_int_equal(st.total.day, kv_today());
    assert_int_equal(st.total.day_bytes, 3 * extent);
    kv_days_shift(2);
    put(kv, ids, 6, 8);
    st = kt_stat(kv);
    assert_int_equal(st.blocks, 8);
    assert_false(st.over_budget);
    assert_int_equal(st.states, 1);
    dm_kv_close(kv);
    o.write_bytes_day = 0;
    kv = kt_open(&o);
    assert_int_equal(found(kv, ids), BLOCKS);
    dm_kv_close(kv);
    o.write_bytes_day = -1;
    dm_err e;
    assert_err(DM_EINVAL, dm_kv_open(&kv, &o, &e));
    free(ids);
}

/* At its quota a store cuts a batch short where slots may not be written yet, and takes the rest again: what was kept back from the rest
 * is counted once all the same. */
static void what_is_kept_back_is_counted_once_in_a_store_at_its_quota(void **s)
{
    (void)s;
    enum { CHAIN = 900, ROUNDS = 10, STEP = 3 }; /* the quota has room for about half of the chain; a batch is eight */
    dm_kv_opts o = opts("full", 0);
    o.block_bytes = 3000;
    o.disk_bytes_max = 2 << 20;
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(3, CHAIN * DM_KV_BLOCK);
    int64_t extent = (int64_t)kt_stat(kv).extent_bytes;
    put(kv, ids, 0, CHAIN);
    dm_kv_close(kv);
    free(ids);
    for (int i = 1; i <= ROUNDS; i++) {
        ids = kt_ids(3 + (uint64_t)i, CHAIN * DM_KV_BLOCK);
        kv_days_shift(10 + i);
        o.write_bytes_day = i * STEP * extent;
        kv = kt_open(&o);
        dm_kv_stat before = kt_stat(kv);
        put(kv, ids, 0, CHAIN);
        dm_kv_stat after = kt_stat(kv);
        dm_kv_close(kv);
        assert_true(after.total.day_bytes <= o.write_bytes_day);
        /* At most all of them, and the state. */
        int64_t held = after.total.held_bytes - before.total.held_bytes, wrote = after.bytes_written;
        if (held + wrote > (CHAIN + 1) * extent)
            fail_msg("budget %d extents: %lld written and %lld held of %d", i * STEP, (long long)(wrote / extent), (long long)(held / extent), CHAIN + 1);
        free(ids);
    }
}

static void figures_add_up_over_processes(void **s)
{
    (void)s;
    dm_kv_opts o = opts("totals", 0), seen;
    int32_t *ids = kt_ids(2, BLOCKS * DM_KV_BLOCK);
    dm_kv_stat st;
    dm_err e;
    int64_t written = 0;
    for (int i = 1; i <= 4; i++) {
        dm_kv *kv = kt_open(&o);
        found(kv, ids);
        put(kv, ids, (i - 1) * 2, i * 2);
        st = kt_stat(kv);
        written += st.bytes_written;
        assert_int_equal(st.put_blocks, 2);
        assert_int_equal(st.total.put_blocks, 2 * i);
        assert_int_equal(st.total.put_states, i);
        assert_int_equal(st.total.bytes_written, written);
        assert_int_equal(st.total.hits + st.total.misses, i);
        assert_int_equal(st.total.misses, 1);
        dm_kv_close(kv);
    }
    dm_kv_stat cold = { 0 };
    assert_ok_e(dm_kv_inspect(o.dir, &seen, &cold, &e), e); /* without opening it */
    assert_memory_equal(&cold.total, &st.total, sizeof cold.total);
    assert_int_equal(cold.disk_bytes_max, o.disk_bytes_max);
    free(ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(nothing_is_written_beyond_it_and_the_next_day_goes_on),
        cmocka_unit_test(what_is_kept_back_is_counted_once_in_a_store_at_its_quota),
        cmocka_unit_test(figures_add_up_over_processes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
