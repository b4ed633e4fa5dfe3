/* What eviction cost is known: lookups that fall short of what was there are charged, to the token.  Incidents 33, 34, 50. */
#include "kvtest.h"

enum { QUOTA = 4 << 20, STATE = 9000, SESSIONS = 24, BLOCKS_MAX = 40 };

static dm_kv_opts ghost_opts(const char *name)
{
    dm_kv_opts o = kt_opts(kt_dir(name));
    o.disk_bytes_max = QUOTA;
    o.ram_bytes_max = 1 << 20; /* what is found is on the disk */
    o.queue_bytes_max = 1 << 19;
    return o;
}

/* Blocks [from, to) behind their predecessors, and a state behind them. */
static void go_on(dm_kv *kv, const int32_t *ids, int64_t from, int64_t pos)
{
    dm_hash h, prev;
    dm_err e;
    uint8_t bytes[KT_BLOCK_BYTES];
    kt_chain(&h, ids, from);
    for (int64_t i = from; i < pos / DM_KV_BLOCK; i++) {
        prev = h;
        dm_kv_chain(&h, &prev, ids + i * DM_KV_BLOCK);
        kt_fill(bytes, sizeof bytes, &h, NULL, -1);
        assert_ok_e(dm_kv_put_block_after(kv, &prev, &h, bytes, sizeof bytes, &e), e);
    }
    assert_ok_e(kt_put_state(kv, ids, pos, STATE, &e), e);
    kt_flush(kv);
}

static dm_kv_hit look(dm_kv *kv, const int32_t *ids, int64_t n)
{
    dm_kv_hit hit;
    dm_err e;
    assert_ok_e(dm_kv_find(kv, ids, n, n, &hit, &e), e);
    return hit;
}

/* Sessions go on in a random order; the store holds a third of them.  A lookup would have come to where its session was left. */
static void every_token_lost_to_eviction_is_charged_and_no_other(void **s)
{
    (void)s;
    dm_kv_opts o = ghost_opts("random");
    dm_kv *kv = kt_open(&o);
    uint64_t rnd = test_seed();
    int32_t *ids[SESSIONS];
    int64_t left_at[SESSIONS] = { 0 }, charged = 0, lookups = 0, remembered = 2 * QUOTA / 12288;
    for (int i = 0; i < SESSIONS; i++) ids[i] = kt_ids((uint64_t)i, BLOCKS_MAX * DM_KV_BLOCK + DM_KV_BLOCK);
    while (kt_stat(kv).evicted_entries < remembered - 60) { /* nothing is forgotten yet */
        int i = (int)(dm_splitmix64(&rnd) % SESSIONS);
        int64_t more = 300 + (int64_t)(dm_splitmix64(&rnd) % 1500), pos = left_at[i] + more;
        if (pos > BLOCKS_MAX * DM_KV_BLOCK) continue;
        dm_kv_hit hit = look(kv, ids[i], pos);
        if (hit.pos + hit.evicted != left_at[i]) fail_msg("session %d left at %lld: found %lld, %lld evicted", i, (long long)left_at[i], (long long)hit.pos, (long long)hit.evicted);
        charged += hit.evicted;
        lookups += hit.evicted > 0;
        go_on(kv, ids[i], hit.blocks, pos);
        dm_kv_hit_end(kv, &hit);
        left_at[i] = pos;
    }
    dm_kv_stat st = kt_stat(kv);
    assert_int_equal(st.put_dropped, 0);
    assert_true(charged > 0);
    assert_int_equal(st.ghost_tokens, charged);
    assert_int_equal(st.ghost_hits, lookups);
    print_message("# %lld entries evicted; %lld lookups of %lld cost %lld tokens\n", (long long)st.evicted_entries, (long long)lookups, (long long)(st.hits + st.misses), (long long)charged);
    dm_kv_close(kv);
    for (int i = 0; i < SESSIONS; i++) free(ids[i]);
}

static void what_was_never_there_or_was_dropped_is_not_charged(void **s)
{
    (void)s;
    dm_kv_opts o = ghost_opts("never");
    dm_kv *kv = kt_open(&o);
    dm_err e;
    int32_t *ids = kt_ids(1, 1000), *other = kt_ids(2, 1000);
    go_on(kv, ids, 0, 900);
    dm_hash last;
    kt_chain(&last, ids, 3);
    assert_ok_e(dm_kv_drop_state(kv, &last, ids + 768, 132, &e), e);
    kt_flush(kv);
    dm_kv_hit hit = look(kv, ids, 1000);
    assert_int_equal(hit.pos, 0);
    assert_int_equal(hit.blocks_present, 3);
    assert_int_equal(hit.evicted, 0);
    hit = look(kv, other, 1000);
    assert_int_equal(hit.evicted, 0);
    assert_int_equal(kt_stat(kv).ghost_hits, 0);
    dm_kv_close(kv);
    free(ids), free(other);
}

static void what_is_put_again_is_no_ghost_and_old_ones_are_forgotten(void **s)
{
    (void)s;
    dm_kv_opts o = ghost_opts("again");
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(1, 1000);
    go_on(kv, ids, 0, 900);
    for (uint64_t i = 10; kt_stat(kv).evicted_entries < 100; i++) {
        int32_t *other = kt_ids(i, 1000);
        go_on(kv, other, 0, 900);
        free(other);
    }
    dm_kv_hit hit = look(kv, ids, 1000);
    assert_int_equal(hit.pos, 0);
    assert_int_equal(hit.evicted, 900);
    assert_int_equal(look(kv, ids, 700).evicted, 0); /* the state was deeper than this prompt */
    go_on(kv, ids, 0, 900);
    hit = look(kv, ids, 1000);
    assert_int_equal(hit.pos, 900);
    assert_int_equal(hit.evicted, 0);
    dm_kv_hit_end(kv, &hit);
    for (uint64_t i = 1000; kt_stat(kv).evicted_entries < 2000; i++) { /* several turnovers later nobody knows */
        int32_t *other = kt_ids(i, 1000);
        go_on(kv, other, 0, 900);
        free(other);
    }
    hit = look(kv, ids, 1000);
    assert_int_equal(hit.pos, 0);
    assert_int_equal(hit.evicted, 0);
    dm_kv_close(kv);
    free(ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_token_lost_to_eviction_is_charged_and_no_other),
        cmocka_unit_test(what_was_never_there_or_was_dropped_is_not_charged),
        cmocka_unit_test(what_is_put_again_is_no_ghost_and_old_ones_are_forgotten),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
