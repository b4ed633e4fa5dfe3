/* dm_kv_pin: what a sleeping session keeps on the disk, for how long, and how much at most.  Incidents 24, 35, 48. */
#include "kvtest.h"

enum { QUOTA = 4 << 20, TOKENS = 2600, STATE = 20000 };
static const int64_t hour_ms = 3600000;

static dm_kv_opts lease_opts(const char *name)
{
    dm_kv_opts o = kt_opts(kt_dir(name));
    o.disk_bytes_max = QUOTA;
    o.ram_bytes_max = 1 << 20; /* what is found is on the disk */
    o.queue_bytes_max = 1 << 19;
    return o;
}

/* Three quotas of other sessions, each seen once. */
static void flood(dm_kv *kv, uint64_t from)
{
    int64_t each = (TOKENS / DM_KV_BLOCK + 2) * 12288;
    for (uint64_t i = 0; i < (uint64_t)(3 * QUOTA / each); i++) {
        int32_t *ids = kt_ids(from + i, TOKENS);
        kt_put(kv, ids, TOKENS, STATE);
        kt_flush(kv);
        free(ids);
    }
}

static void a_leased_session_survives_a_flood_and_another_does_not(void **s)
{
    (void)s;
    dm_kv_opts o = lease_opts("flood");
    dm_kv *kv = kt_open(&o);
    dm_err e;
    int32_t *mine = kt_ids(1, TOKENS), *other = kt_ids(2, TOKENS);
    assert_ok_e(dm_kv_pin(kv, 7, mine, TOKENS, hour_ms, &e), e); /* before it is written */
    kt_put(kv, other, TOKENS, STATE);
    kt_put(kv, mine, TOKENS, STATE);
    kt_flush(kv);
    assert_true(kt_stat(kv).leased_bytes >= TOKENS / DM_KV_BLOCK * 12288);
    flood(kv, 100);
    assert_true(kt_stat(kv).evicted_entries > 0);
    assert_int_equal(kt_restore(kv, mine, TOKENS, TOKENS), TOKENS);
    assert_int_equal(kt_restore(kv, other, TOKENS, TOKENS), 0);
    assert_ok_e(dm_kv_pin(kv, 7, NULL, 0, 0, &e), e); /* let go: it goes like any other */
    assert_int_equal(kt_stat(kv).leased_bytes, 0);
    flood(kv, 200);
    flood(kv, 300);
    assert_int_equal(kt_restore(kv, mine, TOKENS, TOKENS), 0);
    kt_verify(kv);
    dm_kv_close(kv);
    free(mine), free(other);
}

static void a_lease_ends_with_its_time(void **s)
{
    (void)s;
    dm_kv_opts o = lease_opts("time");
    dm_kv *kv = kt_open(&o);
    dm_err e;
    int32_t *mine = kt_ids(1, TOKENS);
    kt_put(kv, mine, TOKENS, STATE);
    kt_flush(kv);
    assert_ok_e(dm_kv_pin(kv, 7, mine, TOKENS, 1, &e), e);
    usleep(3000);
    assert_int_equal(kt_stat(kv).leased_bytes, 0);
    flood(kv, 100);
    assert_int_equal(kt_restore(kv, mine, TOKENS, TOKENS), 0);
    dm_kv_close(kv);
    free(mine);
}

static void what_two_sessions_share_stays_until_both_let_go(void **s)
{
    (void)s;
    dm_kv_opts o = lease_opts("share");
    dm_kv *kv = kt_open(&o);
    dm_err e;
    int32_t *a = kt_ids(1, TOKENS), *b = kt_ids(2, TOKENS);
    memcpy(b, a, 1024 * sizeof *b); /* four blocks */
    kt_put(kv, a, 1024, STATE);
    kt_put(kv, a, TOKENS, STATE);
    kt_put(kv, b, TOKENS, STATE);
    kt_flush(kv);
    int64_t extent = (int64_t)kt_stat(kv).extent_bytes, whole = (TOKENS / DM_KV_BLOCK + 2) * extent;
    assert_ok_e(dm_kv_pin(kv, 1, a, TOKENS, hour_ms, &e), e);
    assert_int_equal(kt_stat(kv).leased_bytes, whole);
    assert_ok_e(dm_kv_pin(kv, 2, b, TOKENS, hour_ms, &e), e);
    assert_int_equal(kt_stat(kv).leased_bytes, 2 * whole - 4 * extent);
    assert_ok_e(dm_kv_pin(kv, 1, a, 1024, hour_ms, &e), e); /* replaced by a shorter one */
    assert_int_equal(kt_stat(kv).leased_bytes, whole + 2 * extent);
    assert_ok_e(dm_kv_pin(kv, 1, a, 1024, 0, &e), e);
    assert_int_equal(kt_stat(kv).leased_bytes, whole);
    flood(kv, 100);
    assert_int_equal(kt_restore(kv, b, TOKENS, TOKENS), TOKENS);
    assert_int_equal(kt_blocks(kv, a, TOKENS), 4);
    dm_kv_close(kv);
    free(a), free(b);
}

static void leases_hold_half_of_the_quota_at_most(void **s)
{
    (void)s;
    dm_kv_opts o = lease_opts("half");
    dm_kv *kv = kt_open(&o);
    dm_err e = { 0 };
    int64_t n = 40 * DM_KV_BLOCK + 9; /* a third of half of it */
    uint64_t taken = 0;
    int rc = 0;
    for (; taken < 20 && !rc; taken += !rc) {
        int32_t *ids = kt_ids(50 + taken, n);
        rc = dm_kv_pin(kv, taken + 1, ids, n, hour_ms, &e);
        if (!rc) {
            kt_put(kv, ids, n, 100);
            kt_flush(kv);
        }
        free(ids);
    }
    assert_int_equal(rc, DM_ELIMIT);
    assert_true(strlen(e.text) > 10);
    assert_true(taken >= 2);
    assert_in_range(kt_stat(kv).leased_bytes, QUOTA / 4, QUOTA / 2);
    int64_t before = kt_stat(kv).leased_bytes;
    int32_t *big = kt_ids(900, 300 * DM_KV_BLOCK);
    assert_err(DM_ELIMIT, dm_kv_pin(kv, 1, big, 300 * DM_KV_BLOCK, hour_ms, &e)); /* and the owner's last one stays */
    assert_int_equal(kt_stat(kv).leased_bytes, before);
    flood(kv, 1000); /* others still find room */
    assert_int_equal(kt_stat(kv).put_dropped, 0);
    for (uint64_t i = 0; i < taken; i++) {
        int32_t *ids = kt_ids(50 + i, n);
        assert_int_equal(kt_restore(kv, ids, n, n), n);
        free(ids);
    }
    assert_in_range(kt_file_bytes(o.dir), 0, o.disk_bytes_max + (int64_t)kt_stat(kv).extent_bytes);
    dm_kv_close(kv);
    free(big);
}

static void bad_arguments_are_refused(void **s)
{
    (void)s;
    dm_kv_opts o = lease_opts("bad");
    dm_kv *kv = kt_open(&o);
    dm_err e;
    int32_t *ids = kt_ids(1, 300);
    assert_err(DM_EINVAL, dm_kv_pin(kv, 0, ids, 300, 1, &e));
    assert_err(DM_EINVAL, dm_kv_pin(kv, 1, ids, -1, 1, &e));
    assert_err(DM_EINVAL, dm_kv_pin(kv, 1, ids, 300, -1, &e));
    assert_err(DM_EINVAL, dm_kv_pin(kv, 1, NULL, 300, 1, &e));
    assert_ok_e(dm_kv_pin(kv, 1, ids, 300, INT64_MAX, &e), e);
    assert_int_equal(kt_stat(kv).leased_bytes, 2 * 12288);
    for (int i = 0;; i++) { /* every allocation may fail, and leaves what was */
        dm_fault_alloc_after(i);
        int rc = dm_kv_pin(kv, 1, ids, 290, hour_ms, &e);
        dm_fault_alloc_after(-1);
        if (!rc) break;
        assert_int_equal(rc, DM_ENOMEM);
        assert_int_equal(kt_stat(kv).leased_bytes, 2 * 12288);
    }
    dm_kv_close(kv);
    free(ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_leased_session_survives_a_flood_and_another_does_not),
        cmocka_unit_test(a_lease_ends_with_its_time),
        cmocka_unit_test(what_two_sessions_share_stays_until_both_let_go),
        cmocka_unit_test(leases_hold_half_of_the_quota_at_most),
        cmocka_unit_test(bad_arguments_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
