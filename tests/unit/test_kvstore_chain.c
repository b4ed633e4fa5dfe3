/* Blocks put with their predecessor: whatever leaves, and whatever does not fit, a prompt keeps its beginning. */
#include "kvtest.h"
#include "kvstore/kv_int.h"

enum { QUOTA_BLOCKS = 200 }; /* of three pages each */
static dm_kv_opts chain_opts(const char *name)
{
    dm_kv_opts o = kt_opts(kt_dir(name));
    o.disk_bytes_max = QUOTA_BLOCKS * 3 * 4096;
    o.sync_ms = 5;
    return o;
}

static int put_after(dm_kv *kv, const int32_t *ids, int64_t i, dm_err *e)
{
    uint8_t bytes[KT_BLOCK_BYTES];
    dm_hash prev, h;
    kt_chain(&prev, ids, i);
    kt_chain(&h, ids, i + 1);
    kt_fill(bytes, sizeof bytes, &h, NULL, -1);
    return dm_kv_put_block_after(kv, &prev, &h, bytes, sizeof bytes, e);
}

static void put_blocks(dm_kv *kv, const int32_t *ids, int64_t from, int64_t to)
{
    dm_err e;
    for (int64_t i = from; i < to; i++) {
        assert_ok_e(put_after(kv, ids, i, &e), e);
        if (i % 5 == 4) kt_flush(kv);
    }
    kt_flush(kv);
}

/* One-shot prompts of one block, each after a lookup as a session does. */
static void flood(dm_kv *kv, uint64_t from, uint64_t to)
{
    dm_err e;
    for (uint64_t i = from; i < to; i++) {
        int32_t *ids = kt_ids(i, 256);
        (void)kt_found(kv, ids, 256);
        assert_ok_e(put_after(kv, ids, 0, &e), e);
        if (i % 4 == 3) kt_flush(kv);
        free(ids);
    }
    kt_flush(kv);
}

static int64_t flood_left(dm_kv *kv, uint64_t from, uint64_t to)
{
    int64_t n = 0;
    for (uint64_t i = from; i < to; i++) {
        int32_t *ids = kt_ids(i, 256);
        n += kt_blocks(kv, ids, 256);
        free(ids);
    }
    return n;
}

static dm_kv *reopen(dm_kv *kv, const dm_kv_opts *o)
{
    dm_kv_close(kv);
    return kt_open(o);
}

static void of_a_prompt_larger_than_the_quota_the_end_is_left_out(void **s)
{
    (void)s;
    dm_kv_opts o = chain_opts("larger");
    dm_kv *kv = kt_open(&o);
    dm_err e;
    enum { N = 3 * QUOTA_BLOCKS };
    int32_t *ids = kt_ids(1, N * DM_KV_BLOCK);
    for (int64_t i = 0; i < N; i += 20) { /* with states on the way */
        put_blocks(kv, ids, i, i + 20);
        assert_ok_e(kt_put_state(kv, ids, (i + 20) * DM_KV_BLOCK, 3000, &e), e);
    }
    kt_flush(kv);
    assert_true(kt_stat(kv).put_dropped > QUOTA_BLOCKS);
    kv = reopen(kv, &o);
    int64_t left = kt_blocks(kv, ids, N * DM_KV_BLOCK);
    assert_in_range(left, QUOTA_BLOCKS / 2, QUOTA_BLOCKS);
    assert_int_equal(kt_stat(kv).blocks, left); /* nothing that hangs in the air */
    assert_int_equal(kt_stat(kv).states, left / 20);
    int64_t pos = kt_restore(kv, ids, N * DM_KV_BLOCK, N * DM_KV_BLOCK);
    assert_int_equal(pos, left / 20 * 20 * DM_KV_BLOCK);

    put_blocks(kv, ids, pos / DM_KV_BLOCK, N); /* the next turn: what it hangs on is not evicted for it */
    kv = reopen(kv, &o);
    assert_int_equal(kt_restore(kv, ids, N * DM_KV_BLOCK, N * DM_KV_BLOCK), pos);
    assert_true(kt_blocks(kv, ids, N * DM_KV_BLOCK) >= left);
    kt_verify(kv);
    dm_kv_close(kv);
    free(ids);
}

/* A prompt of half a quota while others look up and write all the time, then a flood: its blocks hang together to the last. */
static void a_long_prompt_among_others_loses_its_deep_end_first(void **s)
{
    (void)s;
    dm_kv_opts o = chain_opts("among");
    dm_kv *kv = kt_open(&o);
    enum { N = QUOTA_BLOCKS / 2, STEP = 4 };
    int32_t *ids = kt_ids(2, N * DM_KV_BLOCK);
    uint64_t other = 1000;
    for (int64_t i = 0; i < N; i += STEP, other += 2) {
        put_blocks(kv, ids, i, i + STEP);
        flood(kv, other, other + 2);
    }
    int64_t partial = 0;
    for (int round = 0; round < 40; round++, other += 10) {
        flood(kv, other, other + 10);
        int64_t left = kt_blocks(kv, ids, N * DM_KV_BLOCK), all = kt_stat(kv).blocks;
        assert_int_equal(all - flood_left(kv, 1000, other + 10), left); /* no block of it behind a hole */
        partial += left > 0 && left < N;
        kv = reopen(kv, &o);
    }
    assert_true(partial > 0);
    assert_int_equal(kt_blocks(kv, ids, N * DM_KV_BLOCK), 0); /* in the end it goes like anything old */
    dm_kv_close(kv);
    free(ids);
}

static void old_favourites_leave_room_for_a_long_prompt(void **s)
{
    (void)s;
    dm_kv_opts o = chain_opts("favourites");
    dm_kv *kv = kt_open(&o);
    dm_err e;
    enum { FAVOURITES = QUOTA_BLOCKS, N = QUOTA_BLOCKS / 2 };
    for (uint64_t i = 0; i < FAVOURITES; i++) {
        int32_t *ids = kt_ids(3000 + i, 300);
        assert_ok_e(put_after(kv, ids, 0, &e), e);
        assert_ok_e(kt_put_state(kv, ids, 260, 500, &e), e);
        kt_flush(kv); /* a state that is written after its block was used begins a run of its own, which holds the block */
        for (int k = 0; k < 9; k++) assert_int_equal(kt_found(kv, ids, 300), 260);
        free(ids);
    }
    int32_t *ids = kt_ids(3, N * DM_KV_BLOCK);
    assert_int_equal(kt_found(kv, ids, N * DM_KV_BLOCK), 0);
    put_blocks(kv, ids, 0, N);
    kv = reopen(kv, &o);
    assert_int_equal(kt_blocks(kv, ids, N * DM_KV_BLOCK), N);
    dm_kv_close(kv);
    free(ids);
}

static void a_block_whose_predecessor_is_not_there_is_not_written(void **s)
{
    (void)s;
    dm_kv_opts o = chain_opts("orphan");
    dm_kv *kv = kt_open(&o);
    dm_err e;
    int32_t *ids = kt_ids(4, 1024);
    assert_ok_e(put_after(kv, ids, 1, &e), e);
    assert_ok_e(kt_put_state(kv, ids, 600, 500, &e), e); /* behind a block that was refused */
    kt_flush(kv);
    assert_int_equal(kt_stat(kv).blocks, 0);
    assert_int_equal(kt_stat(kv).states, 0);
    assert_int_equal(kt_stat(kv).put_dropped, 2);
    put_blocks(kv, ids, 0, 3); /* once it is, they are taken */
    assert_ok_e(kt_put_state(kv, ids, 600, 500, &e), e);
    kv = reopen(kv, &o);
    assert_int_equal(kt_restore(kv, ids, 1024, 1024), 600);
    assert_int_equal(kt_stat(kv).blocks, 3);
    dm_kv_close(kv);
    free(ids);
}

static void a_full_queue_gives_up_the_end_of_a_prompt(void **s)
{
    (void)s;
    dm_kv_opts o = chain_opts("queue");
    enum { ROOM = 10, N = 30 };
    o.queue_bytes_max = ROOM * KT_BLOCK_BYTES;
    o.sync_ms = 600000;
    dm_err e;
    assert_ok(dm_fault_arm("kv.begin:1+=fail", &e));
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(5, N * DM_KV_BLOCK);
    for (int64_t i = 0; i < N; i++) assert_ok_e(put_after(kv, ids, i, &e), e);
    assert_in_range(dm_kv_queued_bytes(kv), 1, o.queue_bytes_max);
    assert_in_range(kt_stat(kv).put_dropped, N - ROOM, N - ROOM + 1);
    assert_ok(dm_fault_arm(NULL, &e));
    kt_flush(kv);
    kv = reopen(kv, &o);
    assert_in_range(kt_blocks(kv, ids, N * DM_KV_BLOCK), ROOM - 1, ROOM);
    dm_kv_close(kv);
    free(ids);
}

/* ---- what is on the disk at any time ---- */

enum { SESSIONS = 8, LENGTH = 60, FORK = 30 }; /* two of a kind part in the middle */
typedef struct sessions {
    int32_t *ids[SESSIONS];
    dm_hash keys[SESSIONS][LENGTH];
    int64_t at[SESSIONS];
} sessions;

static void sessions_make(sessions *t)
{
    *t = (sessions){ 0 };
    for (int k = 0; k < SESSIONS; k++) {
        t->ids[k] = kt_ids(40 + (uint64_t)k / 2, LENGTH * DM_KV_BLOCK);
        if (k % 2) t->ids[k][FORK * DM_KV_BLOCK] ^= 1;
        for (int64_t i = 0; i < LENGTH; i++) kt_chain(&t->keys[k][i], t->ids[k], i + 1);
    }
}

static void sessions_free(sessions *t)
{
    for (int k = 0; k < SESSIONS; k++) free(t->ids[k]);
}

/* Of whatever is committed now: each stored block has its predecessor, and is not to be evicted after it (E1 of evict.c).  Returns
 * the blocks that the sessions reach. */
static int64_t check_chains(dm_kv *kv, const sessions *t)
{
    MDB_txn *txn;
    int64_t reached = 0;
    assert_int_equal(kv_txn_begin(kv, false, &txn), 0);
    for (int k = 0; k < SESSIONS; k++) {
        kv_index ix, before = { .priority = UINT64_MAX };
        bool there = true;
        for (int i = 0; i < LENGTH; i++) {
            kv_key key = kv_key_block(&t->keys[k][i]);
            bool here = kv_index_get(kv, txn, &key, &ix) == 0;
            if (here && !there) fail_msg("session %d: block %d is there, its predecessor is not", k, i);
            if (here && ix.priority > before.priority) fail_msg("session %d: block %d is to stay longer than its predecessor", k, i);
            if (here) before = ix;
            there = here;
            reached += here && (k % 2 == 0 || i >= FORK);
        }
    }
    kv_txn_end(kv, txn);
    return reached;
}

static void random_step(dm_kv *kv, sessions *t, uint64_t *rnd)
{
    dm_err e;
    uint64_t k = dm_splitmix64(rnd) % SESSIONS;
    if (dm_splitmix64(rnd) % 4) t->at[k] = kt_found(kv, t->ids[k], LENGTH * DM_KV_BLOCK) / DM_KV_BLOCK; /* else it is awake */
    int64_t to = t->at[k] + 1 + (int64_t)(dm_splitmix64(rnd) % 20);
    if (to > LENGTH) to = LENGTH;
    for (int64_t i = t->at[k]; i < to; i++) {
        assert_ok_e(put_after(kv, t->ids[k], i, &e), e);
        if (i % 3 == 0) check_chains(kv, t);
    }
    assert_ok_e(kt_put_state(kv, t->ids[k], to * DM_KV_BLOCK, 20000, &e), e);
    t->at[k] = to < LENGTH ? to : 0;
}

/* Random sessions that grow, fork and go on, in a store that is always full. */
static void no_block_is_ever_stored_without_its_predecessor(void **s)
{
    (void)s;
    static sessions t;
    dm_kv_opts o = chain_opts("random");
    o.ram_bytes_max = 1 << 20;
    o.queue_bytes_max = 1 << 19;
    dm_kv *kv = kt_open(&o);
    uint64_t rnd = test_seed();
    sessions_make(&t);
    for (int step = 0; step < (test_full() ? 3000 : 150); step++) {
        random_step(kv, &t, &rnd);
        if (step % 10 != 9) continue;
        kt_flush(kv);
        kv = reopen(kv, &o);
        assert_int_equal(kt_stat(kv).blocks, check_chains(kv, &t));
    }
    kt_verify(kv);
    dm_kv_close(kv);
    sessions_free(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(of_a_prompt_larger_than_the_quota_the_end_is_left_out),
        cmocka_unit_test(a_long_prompt_among_others_loses_its_deep_end_first),
        cmocka_unit_test(old_favourites_leave_room_for_a_long_prompt),
        cmocka_unit_test(a_block_whose_predecessor_is_not_there_is_not_written),
        cmocka_unit_test(a_full_queue_gives_up_the_end_of_a_prompt),
        cmocka_unit_test(no_block_is_ever_stored_without_its_predecessor),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
