/* Every allocation fails once, one after the other: an error of its own or a miss, nothing leaks, the store is whole after it. */
#include "kvtest.h"

static void allowed(int rc, const dm_err *e)
{
    if (rc != 0 && rc != DM_ENOMEM && rc != DM_EMISS && rc != DM_ETIMEDOUT) fail_msg("%s: %s", dm_err_name(rc), e->text);
}

/* What a session does; false when the store could not even be opened. */
static bool session(const dm_kv_opts *o, uint64_t seed)
{
    dm_kv *kv;
    dm_err e = { 0 };
    int rc = dm_kv_open(&kv, o, &e);
    allowed(rc, &e);
    if (rc) {
        assert_null(kv);
        return false;
    }
    int32_t *ids = kt_ids(seed, 600), *old = kt_ids(1, 600);
    for (int i = 0; i < 2; i++) allowed(kt_put_block(kv, ids, i, &e), &e);
    allowed(kt_put_state(kv, ids, 600, 30000, &e), &e);
    allowed(dm_kv_flush(kv, 30, &e), &e);
    const int32_t *prompts[] = { ids, old };
    for (int k = 0; k < 2; k++) {
        dm_kv_hit hit;
        allowed(dm_kv_find(kv, prompts[k], 600, 600, &hit, &e), &e);
        for (int64_t i = 0; i < hit.blocks; i++) {
            uint8_t buf[KT_BLOCK_BYTES];
            allowed(dm_kv_read_block(kv, &hit, i, buf, NULL, &e), &e);
        }
        dm_buf b = { 0 };
        if (hit.pos) allowed(dm_kv_read_state(kv, &hit, &b, NULL, &e), &e);
        dm_buf_free(&b);
        dm_kv_hit_end(kv, &hit);
    }
    dm_hash last;
    kt_chain(&last, ids, 2);
    allowed(dm_kv_drop_state(kv, &last, ids + 512, 1, &e), &e);
    dm_kv_check c;
    rc = dm_kv_verify(kv, &c, NULL, NULL, &e);
    allowed(rc, &e);
    if (rc == 0) assert_int_equal(c.bad, 0);
    dm_kv_close(kv);
    free(ids);
    free(old);
    return true;
}

static void every_allocation_may_fail(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("nomem"));
    o.disk_bytes_max = 1 << 20; /* evicts now and then */
    o.sync_ms = 1;
    dm_kv *kv = kt_open(&o);
    int32_t *old = kt_ids(1, 600);
    kt_put(kv, old, 600, 30000);
    dm_kv_close(kv);
    free(old);
    int64_t before = dm_fault_alloc_count();
    assert_true(session(&o, 2));
    int64_t count = dm_fault_alloc_count() - before;
    assert_true(count > 20);
    int opened = 0;
    for (int64_t n = 1; n <= count + 10; n++) {
        dm_fault_alloc_after(n);
        opened += session(&o, 10 + (uint64_t)n);
        dm_fault_alloc_after(-1);
        if (n % 16 == 0) {
            kv = kt_open(&o);
            kt_verify(kv);
            dm_kv_close(kv);
        }
    }
    assert_in_range(opened, 5, count + 9); /* some opens failed, others lived to the end */
    dm_kv_opts seen;
    dm_kv_stat st;
    dm_err e;
    for (int64_t n = 1; n < 8; n++) {
        dm_fault_alloc_after(n);
        allowed(dm_kv_inspect(o.dir, &seen, &st, &e), &e);
        dm_fault_alloc_after(-1);
    }
    kv = kt_open(&o);
    assert_int_equal(kt_stat(kv).bad_entries, 0);
    old = kt_ids(7777, 600);
    kt_put(kv, old, 600, 30000);
    kt_flush(kv);
    assert_int_equal(kt_restore(kv, old, 600, 600), 600);
    dm_kv_close(kv);
    free(old);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(every_allocation_may_fail) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
