/* States of a long session are thinned by value when room is needed: design, "State key"; K10; incidents 25, 34, 36. */
#include "kvtest.h"

enum { TURNS = 40, TURN = 290, END = TURNS * TURN, STATE = 21000, QUOTA = 4 << 20, OTHERS = 16 };

static dm_kv_opts thin_opts(const char *name)
{
    dm_kv_opts o = kt_opts(kt_dir(name));
    o.disk_bytes_max = QUOTA;
    o.ram_bytes_max = 1 << 20; /* what is found is on the disk */
    o.queue_bytes_max = 1 << 19;
    return o;
}

/* The next turn of a session, as a pager does it. */
static void turn(dm_kv *kv, const int32_t *ids, int64_t from, int64_t pos)
{
    dm_kv_hit hit;
    dm_hash h, prev;
    dm_err e;
    uint8_t bytes[KT_BLOCK_BYTES];
    assert_ok_e(dm_kv_find(kv, ids, pos, pos - 1, &hit, &e), e);
    assert_int_equal(hit.pos, from);
    kt_chain(&h, ids, hit.blocks);
    for (int64_t i = hit.blocks; i < pos / DM_KV_BLOCK; i++) {
        prev = h;
        dm_kv_chain(&h, &prev, ids + i * DM_KV_BLOCK);
        kt_fill(bytes, sizeof bytes, &h, NULL, -1);
        assert_ok_e(dm_kv_put_block_after(kv, &prev, &h, bytes, sizeof bytes, &e), e);
    }
    dm_kv_hit_end(kv, &hit);
    assert_ok_e(kt_put_state(kv, ids, pos, STATE, &e), e);
    kt_flush(kv);
}

static void session(dm_kv *kv, const int32_t *ids, int from, int to)
{
    for (int i = from; i < to; i++) turn(kv, ids, (int64_t)i * TURN, (int64_t)(i + 1) * TURN);
}

/* Where a cut at `limit` lands; looking counts as a use, so only of a store that is looked at last. */
static int64_t cut(dm_kv *kv, const int32_t *ids, int64_t limit)
{
    dm_kv_hit hit;
    dm_err e;
    assert_ok_e(dm_kv_find(kv, ids, END, limit, &hit, &e), e);
    int64_t pos = hit.pos;
    dm_kv_hit_end(kv, &hit);
    return pos;
}

static void put_others(dm_kv *kv, uint64_t from, int count)
{
    for (int i = 0; i < count; i++) {
        int32_t *ids = kt_ids(from + (uint64_t)i, 600);
        turn(kv, ids, 0, 600);
        free(ids);
    }
}

static void as_long_as_there_is_room_every_state_stays(void **s)
{
    (void)s;
    dm_kv_opts o = thin_opts("room");
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(1, END + 300);
    session(kv, ids, 0, TURNS);
    assert_int_equal(kt_stat(kv).states, TURNS);
    for (int i = 1; i <= TURNS; i++) assert_int_equal(cut(kv, ids, i * TURN), i * TURN);
    dm_kv_close(kv);
    free(ids);
}

/* The others are older, so that age alone would take them. */
static void middle_states_go_before_anything_else_and_cuts_stay_near(void **s)
{
    (void)s;
    dm_kv_opts o = thin_opts("first");
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(1, END + 300);
    put_others(kv, 100, OTHERS);
    session(kv, ids, 0, TURNS);
    assert_int_equal(kt_stat(kv).evicted_entries, 0);
    int64_t blocks = kt_stat(kv).blocks, states = kt_stat(kv).states, more = 0;
    while (kt_stat(kv).evicted_entries < TURNS / 2) {
        put_others(kv, 500 + (uint64_t)more, 1);
        assert_true(++more < 200);
    }
    dm_kv_stat st = kt_stat(kv);
    assert_int_equal(st.blocks, blocks + 2 * more); /* only states went */
    assert_int_equal(st.states, states + more - st.evicted_entries);
    for (int i = 0; i < OTHERS; i++) {
        int32_t *other = kt_ids(100 + (uint64_t)i, 600);
        assert_int_equal(kt_restore(kv, other, 600, 600), 600);
        free(other);
    }
    assert_int_equal(kt_restore(kv, ids, END, END), END);
    int kept = 0;
    for (int i = TURNS; i >= 1; i--) {
        int64_t limit = (int64_t)i * TURN, at = cut(kv, ids, limit);
        int64_t most = (END - limit) / 2 > TURN ? (END - limit) / 2 : TURN;
        if (i >= TURNS - 1 && at != limit) fail_msg("one of the last two went: %lld", (long long)limit);
        if (limit - at > most) fail_msg("going back to %lld costs %lld tokens, more than %lld", (long long)limit, (long long)(limit - at), (long long)most);
        kept += at == limit;
    }
    assert_int_equal(kept, TURNS - st.evicted_entries);
    kt_verify(kv);
    dm_kv_close(kv);
    free(ids);
}

/* However long the flood: of a chain that loses its deep end a state is left near there. */
static void what_is_not_thinned_is_as_young_as_its_blocks(void **s)
{
    (void)s;
    int partly = 0;
    for (int size = 80; size <= 260; size += 12) {
        dm_kv_opts o = thin_opts("young");
        dm_kv *kv = kt_open(&o);
        int32_t *ids = kt_ids(1, END + 300);
        session(kv, ids, 0, TURNS);
        for (uint64_t i = 0; kt_stat(kv).evicted_entries < size; i++) put_others(kv, 500 + i, 1);
        int64_t blocks = kt_blocks(kv, ids, END), at = kt_found(kv, ids, END);
        /* The highest cut that is left, behind a block that is left: at most half as far from there as that is from the end, or a turn. */
        int64_t edge = blocks * DM_KV_BLOCK, far = (END - edge) / 2 > TURN ? (END - edge) / 2 : TURN;
        if (at < edge - far - DM_KV_BLOCK) fail_msg("%lld blocks are left, and a state at %lld", (long long)blocks, (long long)at);
        partly += blocks > 0 && blocks < END / DM_KV_BLOCK;
        dm_kv_close(kv);
        free(ids);
    }
    print_message("# %d floods left a part of the session\n", partly);
    assert_true(partly > 0);
}

static void a_fork_point_of_several_is_not_thinned(void **s)
{
    (void)s;
    enum { AT = 13 };
    dm_kv_opts o = thin_opts("fork");
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(1, END + 300);
    session(kv, ids, 0, AT);
    for (uint64_t f = 0; f < 3; f++) { /* three others go on from there */
        int32_t *fork = kt_ids(50 + f, END);
        memcpy(fork, ids, AT * TURN * sizeof *fork);
        turn(kv, fork, AT * TURN, AT * TURN + 400);
        free(fork);
    }
    session(kv, ids, AT, TURNS);
    for (uint64_t i = 0; kt_stat(kv).evicted_entries < TURNS / 2; i++) put_others(kv, 500 + i, 1);
    assert_int_equal(cut(kv, ids, AT * TURN), AT * TURN);
    assert_int_equal(kt_restore(kv, ids, END, END), END);
    dm_kv_close(kv);
    free(ids);
}

/* A session that went back goes on in the middle: the states there are its last ones now. */
static void going_back_makes_states_worth_something_again(void **s)
{
    (void)s;
    dm_kv_opts o = thin_opts("back");
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(1, END + 300), *back = kt_ids(2, END + 300);
    enum { AT = 20 };
    session(kv, ids, 0, TURNS); /* by now 19 and 20 are in the middle */
    memcpy(back, ids, AT * TURN * sizeof *back);
    turn(kv, back, AT * TURN, (AT + 1) * TURN);
    for (uint64_t i = 0; kt_stat(kv).evicted_entries < TURNS / 3; i++) put_others(kv, 500 + i, 1);
    for (int i = AT - 1; i <= AT + 1; i++) assert_int_equal(cut(kv, back, i * TURN), i * TURN);
    dm_kv_close(kv);
    free(ids), free(back);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(as_long_as_there_is_room_every_state_stays),
        cmocka_unit_test(middle_states_go_before_anything_else_and_cuts_stay_near),
        cmocka_unit_test(what_is_not_thinned_is_as_young_as_its_blocks),
        cmocka_unit_test(a_fork_point_of_several_is_not_thinned),
        cmocka_unit_test(going_back_makes_states_worth_something_again),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
