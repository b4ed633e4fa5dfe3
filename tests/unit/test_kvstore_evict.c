/* Quotas and what leaves: K07-K10, K20; incidents 32-35, 37, 39-42, 53, 55. */
#include "kvtest.h"

/* 1,000 KB of blocks of 100 KB. */
enum { BIG_BLOCK = 100000 };
static dm_kv_opts small_store(const char *name, int64_t quota)
{
    dm_kv_opts o = kt_opts(kt_dir(name));
    o.block_bytes = BIG_BLOCK;
    o.disk_bytes_max = quota;
    o.ram_bytes_max = 64 << 20;
    o.queue_bytes_max = 64 << 20;
    return o;
}

static uint8_t *big_bytes(uint64_t seed)
{
    uint8_t *p = malloc(BIG_BLOCK);
    for (size_t i = 0; i < BIG_BLOCK / 8; i++) {
        uint64_t w = dm_splitmix64(&seed);
        memcpy(p + 8 * i, &w, 8);
    }
    return p;
}

/* Sequence `seed`: `blocks` blocks of random bytes, and states of state_bytes at the given positions. */
static void put_blocks(dm_kv *kv, const int32_t *ids, int64_t from, int64_t to)
{
    dm_hash h;
    dm_err e;
    kt_chain(&h, ids, from);
    for (int64_t i = from; i < to; i++) {
        dm_kv_chain(&h, &h, ids + i * DM_KV_BLOCK);
        uint64_t seed;
        memcpy(&seed, h.b, 8);
        uint8_t *p = big_bytes(seed);
        assert_ok_e(dm_kv_put_block(kv, &h, p, BIG_BLOCK, &e), e);
        free(p);
    }
}

/* Empties RAM, so that what is found is on the disk. */
static dm_kv *reopen(dm_kv *kv, const dm_kv_opts *o)
{
    dm_kv_close(kv);
    return kt_open(o);
}

static void within_quota(dm_kv *kv, const dm_kv_opts *o)
{
    dm_kv_stat st = kt_stat(kv);
    int64_t bound = o->disk_bytes_max + (int64_t)st.extent_bytes;
    assert_in_range(st.disk_bytes_live, 0, o->disk_bytes_max);
    assert_in_range(kt_file_bytes(o->dir), 0, bound);
    assert_in_range(kt_file_du(o->dir), 0, bound + 4096); /* a page of the filesystem's own */
}

static void the_entry_just_written_stays_and_one_over_the_quota_evicts_nothing(void **s)
{
    (void)s;
    dm_kv_opts o = small_store("k08", 1000000);
    dm_kv *kv = kt_open(&o);
    dm_err e;
    for (uint64_t i = 0; i < 12; i++) { /* old ones, over the brim */
        int32_t *ids = kt_ids(i, 256);
        put_blocks(kv, ids, 0, 1);
        kt_flush(kv);
        free(ids);
    }
    within_quota(kv, &o);
    assert_true(kt_stat(kv).evicted_entries > 0);
    int32_t *ids = kt_ids(50, 300);
    assert_ok_e(kt_put_state(kv, ids, 5, 300000, &e), e);
    kt_flush(kv);
    kv = reopen(kv, &o);
    assert_int_equal(kt_restore(kv, ids, 300, 300), 5);
    dm_kv_stat before = kt_stat(kv);
    assert_err(DM_ELIMIT, kt_put_state(kv, ids, 6, 1000001, &e));
    assert_true(strlen(e.text) > 10);
    kt_flush(kv);
    dm_kv_stat after = kt_stat(kv);
    assert_int_equal(before.blocks, after.blocks);
    assert_int_equal(before.states, after.states);
    assert_int_equal(after.evicted_entries, 0);
    within_quota(kv, &o);
    kt_verify(kv);
    dm_kv_close(kv);
    free(ids);
}

static void a_pinned_hit_survives_any_flood(void **s)
{
    (void)s;
    dm_kv_opts o = small_store("k09", 3 << 20);
    dm_kv *kv = kt_open(&o);
    dm_err e;
    int32_t *ids = kt_ids(1, 1000);
    put_blocks(kv, ids, 0, 3);
    assert_ok_e(kt_put_state(kv, ids, 800, 5000, &e), e);
    kv = reopen(kv, &o);
    dm_kv_hit hit;
    assert_ok_e(dm_kv_find(kv, ids, 1000, 1000, &hit, &e), e);
    assert_int_equal(hit.pos, 800);
    for (uint64_t i = 10; i < 80; i++) { /* the outgoing session is spilled before the incoming one is loaded */
        int32_t *other = kt_ids(i, 256);
        put_blocks(kv, other, 0, 1);
        if (i % 5 == 0) kt_flush(kv);
        free(other);
    }
    kt_flush(kv);
    dm_kv_tier tier;
    uint8_t *buf = malloc(BIG_BLOCK), *want;
    for (int64_t i = 0; i < 3; i++) {
        assert_ok_e(dm_kv_read_block(kv, &hit, i, buf, &tier, &e), e);
        assert_int_equal(tier, DM_KV_DISK);
        dm_hash h;
        kt_chain(&h, ids, i + 1);
        uint64_t seed;
        memcpy(&seed, h.b, 8);
        want = big_bytes(seed);
        assert_memory_equal(buf, want, BIG_BLOCK);
        free(want);
    }
    assert_int_equal(kt_read_state(kv, &hit, ids, NULL), 1);
    dm_kv_hit_end(kv, &hit);
    within_quota(kv, &o);
    free(buf);
    free(ids);
    dm_kv_close(kv);
}

static void deep_entries_are_not_used_up(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("k07"));
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(2, 40000);
    kt_put(kv, ids, 40000, 9000);
    for (int i = 0; i < 5; i++) {
        kv = reopen(kv, &o);
        assert_int_equal(kt_restore(kv, ids, 40000, 40000), 40000);
    }
    dm_kv_close(kv);
    free(ids);
}

/* One anchor of 4 blocks that ten sessions start with; then one long session that writes ten checkpoints over the quota. */
static void a_shared_anchor_outlives_the_middle_of_a_long_session(void **s)
{
    (void)s;
    dm_kv_opts o = small_store("k10", 6 << 20);
    dm_kv *kv = kt_open(&o);
    dm_err e;
    int32_t *anchor = kt_ids(3, 1100);
    put_blocks(kv, anchor, 0, 4);
    assert_ok_e(kt_put_state(kv, anchor, 1024, 4000, &e), e);
    kt_flush(kv);
    for (int i = 0; i < 10; i++) {
        anchor[1050] = i;
        assert_int_equal(kt_found(kv, anchor, 1100), 1024);
    }
    int32_t *one = kt_ids(4, 60000);
    enum { STEP = 8 };
    for (int i = 0; i < 10; i++) { /* 80 blocks: 8 MB in a store of 6; each turn goes on from the one before */
        (void)kt_found(kv, one, 60000);
        put_blocks(kv, one, i * STEP, (i + 1) * STEP);
        assert_ok_e(kt_put_state(kv, one, (i + 1) * STEP * DM_KV_BLOCK, 4000, &e), e);
        kt_flush(kv);
    }
    kv = reopen(kv, &o);
    assert_int_equal(kt_found(kv, anchor, 1100), 1024);
    assert_true(kt_blocks(kv, one, 60000) < 80);
    within_quota(kv, &o);
    dm_kv_close(kv);
    free(anchor);
    free(one);
}

/* Once hot is not hot for ever: after some turnovers of the store without a hit it is gone. */
static void a_stale_favourite_leaves_in_the_end(void **s)
{
    (void)s;
    dm_kv_opts o = small_store("stale", 4 << 20);
    dm_kv *kv = kt_open(&o);
    dm_err e;
    int32_t *hot = kt_ids(5, 600);
    put_blocks(kv, hot, 0, 2);
    assert_ok_e(kt_put_state(kv, hot, 520, 4000, &e), e);
    kt_flush(kv);
    for (int i = 0; i < 50; i++) assert_int_equal(kt_found(kv, hot, 600), 520);
    for (uint64_t i = 0; i < 40 * 8; i++) {
        int32_t *other = kt_ids(1000 + i, 256);
        put_blocks(kv, other, 0, 1);
        if (i % 4 == 3) kt_flush(kv);
        free(other);
    }
    kv = reopen(kv, &o);
    assert_int_equal(kt_found(kv, hot, 600), 0);
    dm_kv_close(kv);
    free(hot);
}

/* Of a chain the deep end goes first: what is left of it is a beginning that can be used. */
static void a_chain_loses_its_deep_end_first(void **s)
{
    (void)s;
    dm_kv_opts o = small_store("deep", 8 << 20);
    dm_kv *kv = kt_open(&o);
    dm_err e;
    int32_t *a = kt_ids(6, 12000);
    for (int i = 0; i < 40; i += 8) { /* five turns, each going on from the one before */
        assert_int_equal(kt_found(kv, a, 12000), i * DM_KV_BLOCK);
        put_blocks(kv, a, i, i + 8);
        assert_ok_e(kt_put_state(kv, a, (i + 8) * DM_KV_BLOCK, 3000, &e), e);
        kt_flush(kv);
    }
    for (uint64_t i = 0; i < 60; i++) {
        int32_t *other = kt_ids(2000 + i, 256);
        put_blocks(kv, other, 0, 1);
        if (i % 4 == 3) kt_flush(kv);
        free(other);
    }
    kv = reopen(kv, &o);
    int64_t left = kt_blocks(kv, a, 12000);
    int64_t on_disk = kt_stat(kv).blocks;
    assert_in_range(left, 1, 39);
    assert_int_equal(kt_found(kv, a, 12000), left / 8 * 8 * DM_KV_BLOCK);
    assert_true(on_disk - left <= 60); /* all of what is left of it hangs together */
    dm_kv_close(kv);
    free(a);
}

/* Interleaved sessions at a full quota: what the next turn needs was not evicted by this turn's spill. */
static void interleaved_sessions_at_a_full_quota_do_not_evict_each_other(void **s)
{
    (void)s;
    enum { SESSIONS = 4, TURNS = 10 };
    dm_kv_opts o = small_store("inter", 12 << 20);
    dm_kv *kv = kt_open(&o);
    dm_err e;
    for (uint64_t i = 0; i < 120; i++) { /* full of old one-shot blocks */
        int32_t *other = kt_ids(3000 + i, 256);
        put_blocks(kv, other, 0, 1);
        free(other);
    }
    kt_flush(kv);
    int32_t *ids[SESSIONS];
    for (int k = 0; k < SESSIONS; k++) ids[k] = kt_ids(70 + (uint64_t)k, (2 * TURNS + 1) * DM_KV_BLOCK);
    for (int t = 0; t < TURNS; t++)
        for (int k = 0; k < SESSIONS; k++) {
            int64_t had = (int64_t)t * 2 * DM_KV_BLOCK, has = had + 2 * DM_KV_BLOCK;
            kv = reopen(kv, &o);
            assert_int_equal(kt_found(kv, ids[k], has), had);
            put_blocks(kv, ids[k], 2 * t, 2 * t + 2);
            assert_ok_e(kt_put_state(kv, ids[k], has, 20000, &e), e);
            kt_flush(kv);
            within_quota(kv, &o);
        }
    for (int k = 0; k < SESSIONS; k++) free(ids[k]);
    dm_kv_close(kv);
}

/* Mixed sizes, random choice, many turnovers: the capacity stays what it was, and du stays under the quota. */
static void capacity_after_many_turnovers_equals_nominal(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("cycle"));
    o.disk_bytes_max = 4 << 20;
    o.ram_bytes_max = 1 << 20;
    o.queue_bytes_max = 1 << 20;
    dm_kv *kv = kt_open(&o);
    uint64_t rnd = test_seed();
    int64_t nominal = 0;
    int rounds = test_full() ? 10000 : 500;
    for (int i = 0; i < rounds; i++) {
        int32_t *ids = kt_ids(dm_splitmix64(&rnd) % 4000, 600);
        kt_put(kv, ids, 300 + (int64_t)(dm_splitmix64(&rnd) % 200), 100 + dm_splitmix64(&rnd) % 60000);
        if (i % 4 == 3) kt_flush(kv);
        if (i % 16 == 7) (void)kt_restore(kv, ids, 600, 600);
        free(ids);
        if (i % 100 == 99) within_quota(kv, &o);
        if (i == 300) nominal = kt_stat(kv).disk_bytes_live;
    }
    kt_flush(kv);
    dm_kv_stat st = kt_stat(kv);
    assert_int_equal(st.put_dropped, 0);
    assert_in_range(st.disk_bytes_live, nominal * 9 / 10, nominal * 11 / 10);
    assert_in_range(st.disk_bytes_live, o.disk_bytes_max * 3 / 4, o.disk_bytes_max);
    kt_verify(kv);
    dm_kv_close(kv);
}

/* Less than what is stored: the room is given back to the file system, in holes, and taken again when the quota grows. */
static void a_lowered_quota_gives_room_back(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("lowered"));
    static const int64_t quotas[] = { 8 << 20, 2 << 20, 6 << 20, 3 << 20 };
    for (size_t q = 0; q < DM_COUNT(quotas); q++) {
        o.disk_bytes_max = quotas[q];
        dm_kv *kv = kt_open(&o);
        for (uint64_t i = 0; i < 300; i++) {
            int32_t *ids = kt_ids(5000 * q + i, 600);
            kt_put(kv, ids, 600, 9000);
            if (i % 8 == 7) kt_flush(kv);
            free(ids);
        }
        kt_flush(kv);
        within_quota(kv, &o);
        dm_kv_stat st = kt_stat(kv); /* LMDB's own file does not shrink: it is in the account */
        assert_in_range(st.disk_bytes_file, quotas[q] * 3 / 4, quotas[q] + (int64_t)st.extent_bytes);
        kt_verify(kv);
        dm_kv_close(kv);
    }
}

static void ram_stays_in_its_budget_and_every_byte_is_accounted(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("ram"));
    o.ram_bytes_max = 1 << 20;
    o.queue_bytes_max = 512 << 10;
    dm_kv *kv = kt_open(&o);
    for (uint64_t i = 0; i < 60; i++) {
        int32_t *ids = kt_ids(i, 600);
        kt_put(kv, ids, 600, 30000);
        dm_kv_stat st = kt_stat(kv);
        assert_in_range(st.ram_bytes, 0, o.ram_bytes_max);
        assert_in_range(st.queued_bytes, 0, o.queue_bytes_max);
        kt_flush(kv);
        free(ids);
    }
    assert_int_equal(kt_stat(kv).put_dropped, 0);
    for (uint64_t i = 0; i < 60; i++) {
        int32_t *ids = kt_ids(i, 600);
        assert_int_equal(kt_restore(kv, ids, 600, 600), 600);
        assert_in_range(kt_stat(kv).ram_bytes, o.ram_bytes_max / 2, o.ram_bytes_max);
        free(ids);
    }
    dm_kv_close(kv);
}

/* K3: a full queue gives up what is oldest and was never asked for; the caller is never refused and never waits. */
static void a_full_queue_gives_up_the_oldest_of_least_value(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("queue"));
    o.queue_bytes_max = 10 * KT_BLOCK_BYTES;
    o.sync_ms = 600000;
    dm_err e;
    assert_ok(dm_fault_arm("kv.begin:1+=fail", &e)); /* no transaction works */
    dm_kv *kv = kt_open(&o);
    int32_t *first = kt_ids(1, 300);
    kt_put(kv, first, 300, 5000);
    assert_int_equal(kt_found(kv, first, 300), 300); /* asked for: worth more than the others */
    for (uint64_t i = 10; i < 40; i++) {
        int32_t *ids = kt_ids(i, 256);
        assert_ok_e(kt_put_block(kv, ids, 0, &e), e);
        free(ids);
        assert_in_range(dm_kv_queued_bytes(kv), 1, o.queue_bytes_max);
    }
    dm_kv_stat st = kt_stat(kv);
    assert_in_range(st.put_dropped, 20, 23);
    assert_ok(dm_fault_arm(NULL, &e));
    kt_flush(kv);
    kv = reopen(kv, &o);
    assert_int_equal(kt_restore(kv, first, 300, 300), 300);
    int32_t *oldest = kt_ids(10, 256), *newest = kt_ids(39, 256);
    assert_int_equal(kt_blocks(kv, oldest, 256), 0);
    assert_int_equal(kt_blocks(kv, newest, 256), 1);
    dm_kv_close(kv);
    free(first);
    free(oldest);
    free(newest);
}

static void what_was_given_up_is_written_when_it_is_put_again(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("again"));
    o.queue_bytes_max = 3 * KT_BLOCK_BYTES;
    o.sync_ms = 600000;
    dm_kv *kv = kt_open(&o);
    dm_err e;
    int32_t *ids = kt_ids(1, 256 * 3);
    o.queue_bytes_max = 3 * KT_BLOCK_BYTES;
    for (uint64_t i = 0; i < 3; i++) assert_ok_e(kt_put_block(kv, ids, (int64_t)i, &e), e);
    int32_t *more = kt_ids(2, 256);
    assert_ok_e(kt_put_block(kv, more, 0, &e), e); /* pushes block 0 out of the queue, not out of RAM */
    assert_int_equal(kt_blocks(kv, ids, 768), 3);
    kt_flush(kv);
    if (kt_stat(kv).put_dropped) assert_int_equal(kt_stat(kv).blocks, 3);
    assert_ok_e(kt_put_block(kv, ids, 0, &e), e);
    kt_flush(kv);
    assert_int_equal(kt_stat(kv).blocks, 4);
    dm_kv_close(kv);
    free(ids);
    free(more);
}

/* Each value is made from its key, so one that belongs to another session cannot pass (kt_restore compares). */
static void planted_secrets_never_cross_sessions_through_the_disk(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("secrets"));
    o.ram_bytes_max = 256 << 10;
    o.queue_bytes_max = 128 << 10;
    o.disk_bytes_max = 6 << 20;
    dm_kv *kv = kt_open(&o);
    int64_t hits = 0;
    for (uint64_t round = 0; round < 3; round++)
        for (uint64_t i = 0; i < 60; i++) {
            int32_t *ids = kt_ids(i, 600);
            hits += kt_restore(kv, ids, 600, 600) > 0;
            kt_put(kv, ids, 600, 20000);
            kt_flush(kv);
            free(ids);
        }
    assert_int_equal(hits, 120);
    assert_int_equal(kt_stat(kv).bad_entries, 0);
    dm_kv_close(kv);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_entry_just_written_stays_and_one_over_the_quota_evicts_nothing),
        cmocka_unit_test(a_pinned_hit_survives_any_flood),
        cmocka_unit_test(deep_entries_are_not_used_up),
        cmocka_unit_test(a_shared_anchor_outlives_the_middle_of_a_long_session),
        cmocka_unit_test(a_stale_favourite_leaves_in_the_end),
        cmocka_unit_test(a_chain_loses_its_deep_end_first),
        cmocka_unit_test(interleaved_sessions_at_a_full_quota_do_not_evict_each_other),
        cmocka_unit_test(capacity_after_many_turnovers_equals_nominal),
        cmocka_unit_test(ram_stays_in_its_budget_and_every_byte_is_accounted),
        cmocka_unit_test(a_full_queue_gives_up_the_oldest_of_least_value),
        cmocka_unit_test(a_lowered_quota_gives_room_back),
        cmocka_unit_test(what_was_given_up_is_written_when_it_is_put_again),
        cmocka_unit_test(planted_secrets_never_cross_sessions_through_the_disk),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
