/* Reading a hit in order: what follows is loaded ahead by other threads.  The caller sees the same bytes, tiers and misses as without. */
#include "kvtest.h"

#include <pthread.h>

enum { BLOCKS = 40, TOKENS = BLOCKS * DM_KV_BLOCK + 44 };

/* A store in which the sequence is on the disk only. */
static dm_kv *stored(const dm_kv_opts *o, const int32_t *ids)
{
    dm_kv_opts roomy = *o;
    roomy.ram_bytes_max = roomy.queue_bytes_max = 16 << 20;
    dm_kv *kv = kt_open(&roomy);
    kt_put(kv, ids, TOKENS, 30000);
    dm_kv_close(kv);
    return kt_open(o);
}

static void every_part_comes_from_the_disk_once_and_from_ram_then(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("tiers"));
    int32_t *ids = kt_ids(1, TOKENS);
    dm_kv *kv = stored(&o, ids);
    dm_err e;
    for (int round = 0; round < 2; round++) {
        dm_kv_hit hit;
        dm_kv_tier tier, want = round ? DM_KV_RAM : DM_KV_DISK;
        assert_ok_e(dm_kv_find(kv, ids, TOKENS, TOKENS, &hit, &e), e);
        assert_int_equal(hit.pos, TOKENS);
        for (int64_t i = 0; i < BLOCKS; i++) {
            assert_int_equal(kt_read_block(kv, &hit, ids, i, &tier), 1);
            assert_int_equal(tier, want);
        }
        assert_int_equal(kt_read_state(kv, &hit, ids, &tier), 1);
        assert_int_equal(tier, want);
        dm_kv_hit_end(kv, &hit);
    }
    dm_kv_close(kv);
    free(ids);
}

static void any_order_and_any_end_are_fine(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("order"));
    o.ram_bytes_max = 256 << 10; /* holds a few blocks only */
    o.queue_bytes_max = 128 << 10;
    int32_t *ids = kt_ids(2, TOKENS);
    dm_kv *kv = stored(&o, ids);
    dm_err e;
    uint64_t rnd = test_seed();
    for (int round = 0; round < 60; round++) {
        dm_kv_hit hit;
        assert_ok_e(dm_kv_find(kv, ids, TOKENS, TOKENS, &hit, &e), e);
        int64_t i = (int64_t)(dm_splitmix64(&rnd) % BLOCKS), count = (int64_t)(dm_splitmix64(&rnd) % 12);
        for (int64_t k = 0; k < count; k++) { /* runs in order, leaps between, and left in the middle */
            assert_int_equal(kt_read_block(kv, &hit, ids, i, NULL), 1);
            i = dm_splitmix64(&rnd) % 5 ? (i + 1) % BLOCKS : (int64_t)(dm_splitmix64(&rnd) % BLOCKS);
        }
        if (round % 3 == 0) assert_int_equal(kt_read_state(kv, &hit, ids, NULL), 1);
        dm_kv_hit_end(kv, &hit);
        assert_in_range(kt_stat(kv).ram_bytes, 0, o.ram_bytes_max);
        if (round % 10 == 9) { /* with loads in flight */
            assert_ok_e(dm_kv_find(kv, ids, TOKENS, TOKENS, &hit, &e), e);
            for (int64_t k = 0; k < 2; k++) assert_int_equal(kt_read_block(kv, &hit, ids, k, NULL), 1);
            dm_kv_hit_end(kv, &hit);
            dm_kv_close(kv);
            kv = kt_open(&o);
        }
    }
    assert_int_equal(kt_stat(kv).bad_entries, 0);
    dm_kv_close(kv);
    free(ids);
}

/* Whoever's read it was that failed, the caller is right or told. */
static void errors_of_loads_ahead_are_met_by_the_caller(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("errors"));
    int32_t *ids = kt_ids(3, TOKENS);
    dm_err e;
    for (int k = 1; k < 30; k += 4) {
        dm_kv *kv = stored(&o, ids);
        char spec[64];
        snprintf(spec, sizeof spec, "kv.read:%d+=fail", k);
        assert_ok(dm_fault_arm(spec, &e));
        assert_int_equal(kt_restore(kv, ids, TOKENS, TOKENS), 0);
        assert_ok(dm_fault_arm(NULL, &e));
        assert_int_equal(kt_stat(kv).bad_entries, 1);
        dm_kv_close(kv);
    }
    free(ids);
}

typedef struct reader { pthread_t thread; dm_kv *kv; const int32_t *ids; int64_t whole; } reader;
static void *read_all(void *arg)
{
    reader *r = arg;
    for (int i = 0; i < 6; i++) r->whole += kt_restore(r->kv, r->ids, TOKENS, TOKENS) == TOKENS;
    return NULL;
}

static void several_callers_restore_at_once(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("callers"));
    o.ram_bytes_max = 400 << 10;
    o.queue_bytes_max = 128 << 10;
    int32_t *ids = kt_ids(4, TOKENS);
    dm_kv *kv = stored(&o, ids);
    reader r[4];
    for (int i = 0; i < 4; i++) {
        r[i] = (reader){ .kv = kv, .ids = ids };
        assert_int_equal(pthread_create(&r[i].thread, NULL, read_all, &r[i]), 0);
    }
    for (int i = 0; i < 4; i++) {
        pthread_join(r[i].thread, NULL);
        assert_int_equal(r[i].whole, 6);
    }
    dm_kv_close(kv);
    free(ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_part_comes_from_the_disk_once_and_from_ram_then),
        cmocka_unit_test(any_order_and_any_end_are_fine),
        cmocka_unit_test(errors_of_loads_ahead_are_met_by_the_caller),
        cmocka_unit_test(several_callers_restore_at_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
