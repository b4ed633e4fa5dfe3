/* The list of what is on the disk, and taking from it: by size, by age; what is pinned stays; room is given back. */
#include "kvtest.h"
#include "kvstore/kv_int.h"

#define STATE_BYTES 25000 /* three extents */

/* Blocks [from, to) behind their predecessors, and the state at `to` blocks and `tail` ids. */
static void put_chain(dm_kv *kv, const int32_t *ids, int64_t from, int64_t to, int tail, size_t state_bytes)
{
    dm_hash prev, key;
    dm_err e;
    uint8_t bytes[KT_BLOCK_BYTES];
    kt_chain(&prev, ids, from);
    for (int64_t i = from; i < to; i++, prev = key) {
        dm_kv_chain(&key, &prev, ids + i * DM_KV_BLOCK);
        kt_fill(bytes, sizeof bytes, &key, NULL, -1);
        assert_ok_e(dm_kv_put_block_after(kv, &prev, &key, bytes, sizeof bytes, &e), e);
    }
    assert_ok_e(kt_put_state(kv, ids, to * DM_KV_BLOCK + tail, state_bytes, &e), e);
}

typedef struct seen { int64_t blocks, states, bytes, disk_bytes, oldest; dm_kv_item first; } seen;

static int count(void *ctx, const dm_kv_item *it)
{
    seen *s = ctx;
    if (!s->blocks && !s->states) s->first = *it;
    *(it->state ? &s->states : &s->blocks) += 1;
    s->bytes += it->bytes;
    s->disk_bytes += it->disk_bytes;
    if (it->age_days > s->oldest) s->oldest = it->age_days;
    return 0;
}

static seen look(dm_kv *kv)
{
    seen s = { 0 };
    dm_err e;
    assert_ok_e(dm_kv_list(kv, count, &s, &e), e);
    return s;
}

static dm_kv_gc_report collect(dm_kv *kv, int64_t bytes_max, int64_t older, bool dry)
{
    dm_kv_gc_report r;
    dm_err e;
    assert_ok_e(dm_kv_gc(kv, &(dm_kv_gc_opts){ .bytes_max = bytes_max, .older_days = older, .dry_run = dry }, &r, NULL, NULL, &e), e);
    return r;
}

static void every_entry_is_listed_the_next_victim_first(void **state)
{
    (void)state;
    const char *dir = kt_dir("list");
    dm_kv_opts o = kt_opts(dir);
    dm_kv *kv = kt_open(&o);
    assert_int_equal(look(kv).blocks + look(kv).states, 0);
    int32_t *ids = kt_ids(1, 700 * DM_KV_BLOCK);
    put_chain(kv, ids, 0, 699, 9, STATE_BYTES); /* more than a step of the walk */
    kt_flush(kv);
    seen s = look(kv);
    assert_int_equal(s.blocks, 699);
    assert_int_equal(s.states, 1);
    assert_int_equal(s.bytes, 699 * KT_BLOCK_BYTES + STATE_BYTES);
    assert_int_equal(s.disk_bytes, kt_stat(kv).disk_bytes_live);
    assert_true(s.first.state && s.first.tail_count == 9);
    dm_kv_close(kv);
    free(ids);
}

static int stop_at_once(void *ctx, const dm_kv_item *it)
{
    (void)it;
    return ++*(int *)ctx == 3 ? 42 : 0;
}

static void a_list_can_be_left(void **state)
{
    (void)state;
    dm_kv_opts o = kt_opts(kt_dir("left"));
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(2, 10 * DM_KV_BLOCK);
    int n = 0;
    dm_err e;
    kt_put(kv, ids, 10 * DM_KV_BLOCK, 100);
    kt_flush(kv);
    assert_int_equal(dm_kv_list(kv, stop_at_once, &n, &e), 42);
    assert_int_equal(n, 3);
    dm_kv_close(kv);
    free(ids);
}

static void gc_to_a_size_keeps_beginnings_and_gives_room_back(void **state)
{
    (void)state;
    const char *dir = kt_dir("size");
    dm_kv_opts o = kt_opts(dir);
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(3, 300 * DM_KV_BLOCK);
    for (int64_t at = 50; at <= 300; at += 50) put_chain(kv, ids, at - 50, at, 0, STATE_BYTES);
    kt_flush(kv);
    dm_kv_close(kv);
    o.trim = true;
    kv = kt_open(&o);
    int64_t before = kt_file_bytes(dir), most = before / 2;
    dm_kv_gc_report dry = collect(kv, most, -1, true);
    assert_int_equal(look(kv).blocks, 300);
    dm_kv_gc_report r = collect(kv, most, -1, false);
    assert_memory_equal(&r, &dry, sizeof r);
    assert_true(r.blocks > 0 && r.states > 0 && r.blocks < 300);
    seen s = look(kv);
    assert_int_equal(s.blocks + s.states, r.entries_left);
    assert_int_equal(s.disk_bytes, r.bytes_left);
    assert_int_equal(kt_stat(kv).disk_bytes_live, r.bytes_left);
    assert_in_range(kt_file_bytes(dir), 1, most);
    kt_verify(kv);
    int64_t pos = kt_restore(kv, ids, 300 * DM_KV_BLOCK, 300 * DM_KV_BLOCK);
    assert_true(pos >= 50 * DM_KV_BLOCK && pos < 300 * DM_KV_BLOCK); /* the end went first */
    assert_int_equal(collect(kv, most, -1, false).blocks, 0);        /* it is small enough */
    put_chain(kv, ids, 0, 300, 0, STATE_BYTES); /* and takes again what it gave away */
    kt_flush(kv);
    kt_verify(kv);
    assert_int_equal(kt_restore(kv, ids, 300 * DM_KV_BLOCK, 300 * DM_KV_BLOCK), 300 * DM_KV_BLOCK);
    collect(kv, 0, -1, false);
    assert_int_equal(look(kv).blocks + look(kv).states, 0);
    assert_int_equal(kt_restore(kv, ids, 300 * DM_KV_BLOCK, 300 * DM_KV_BLOCK), 0);
    struct stat st;
    assert_int_equal(stat(kt_slots_file(dir), &st), 0);
    assert_true((int64_t)st.st_blocks * 512 < (int64_t)kt_stat(kv).extent_bytes); /* what the file system needs for itself */
    dm_kv_close(kv);
    kv = kt_open(&o);
    kt_verify(kv);
    dm_kv_close(kv);
    free(ids);
}

static void gc_by_age_takes_what_nobody_used(void **state)
{
    (void)state;
    const char *dir = kt_dir("age");
    dm_kv_opts o = kt_opts(dir);
    dm_kv *kv = kt_open(&o);
    int32_t *used = kt_ids(4, 20 * DM_KV_BLOCK), *idle = kt_ids(5, 20 * DM_KV_BLOCK), *fresh = kt_ids(6, 20 * DM_KV_BLOCK);
    kt_put(kv, used, 20 * DM_KV_BLOCK, STATE_BYTES);
    kt_put(kv, idle, 20 * DM_KV_BLOCK, STATE_BYTES);
    kt_flush(kv);
    assert_int_equal(look(kv).oldest, 0);
    kv_days_shift(20);
    assert_int_equal(kt_found(kv, used, 20 * DM_KV_BLOCK), 20 * DM_KV_BLOCK);
    kt_put(kv, fresh, 20 * DM_KV_BLOCK, STATE_BYTES); /* in its transaction the use is noted */
    kt_flush(kv);
    kv_days_shift(40);
    assert_int_equal(look(kv).oldest, 40);
    assert_int_equal(collect(kv, -1, 41, false).blocks, 0);
    assert_int_equal(collect(kv, -1, 21, true).blocks, 20);
    dm_kv_gc_report r = collect(kv, -1, 21, false);
    assert_int_equal(r.blocks, 20);
    assert_int_equal(r.states, 1);
    dm_kv_close(kv); /* marks are in the file */
    kv = kt_open(&o);
    assert_int_equal(look(kv).oldest, 20);
    assert_int_equal(kt_restore(kv, idle, 20 * DM_KV_BLOCK, 20 * DM_KV_BLOCK), 0);
    assert_int_equal(kt_restore(kv, used, 20 * DM_KV_BLOCK, 20 * DM_KV_BLOCK), 20 * DM_KV_BLOCK);
    assert_int_equal(kt_restore(kv, fresh, 20 * DM_KV_BLOCK, 20 * DM_KV_BLOCK), 20 * DM_KV_BLOCK);
    kv_days_shift(10); /* the machine's clock went back: nothing is of the future */
    assert_int_equal(look(kv).oldest, 0);
    int32_t *then = kt_ids(7, DM_KV_BLOCK);
    kt_put(kv, then, DM_KV_BLOCK, 10);
    kt_flush(kv);
    assert_int_equal(look(kv).oldest, 0);
    kv_days_shift(0);
    dm_kv_close(kv);
    free(then);
    free(used);
    free(idle);
    free(fresh);
}

/* More days than there are marks: the first ones are forgotten, and what is of them is at least as old as the first that is known. */
static void marks_of_days_are_bounded(void **state)
{
    (void)state;
    dm_kv_opts o = kt_opts(kt_dir("days"));
    dm_kv *kv = kt_open(&o);
    dm_err e;
    for (int day = 0; day < KV_DAYS + 3; day++) {
        kv_days_shift(day);
        int32_t *ids = kt_ids(100 + (uint64_t)day, 10);
        assert_ok_e(kt_put_state(kv, ids, 10, 10, &e), e);
        kt_flush(kv);
        free(ids);
    }
    assert_int_equal(look(kv).oldest, KV_DAYS - 1);
    assert_int_equal(collect(kv, -1, KV_DAYS - 1, true).states, 4);
    kv_days_shift(0);
    dm_kv_close(kv);
}

static void what_is_held_stays(void **state)
{
    (void)state;
    dm_kv_opts o = kt_opts(kt_dir("held"));
    dm_kv *kv = kt_open(&o);
    int32_t *hit_ids = kt_ids(8, 4 * DM_KV_BLOCK), *lease_ids = kt_ids(9, 4 * DM_KV_BLOCK), *other = kt_ids(10, 4 * DM_KV_BLOCK);
    kt_put(kv, hit_ids, 4 * DM_KV_BLOCK, STATE_BYTES);
    kt_put(kv, lease_ids, 4 * DM_KV_BLOCK, STATE_BYTES);
    kt_put(kv, other, 4 * DM_KV_BLOCK, STATE_BYTES);
    kt_flush(kv);
    dm_kv_hit hit;
    dm_err e;
    assert_ok_e(dm_kv_find(kv, hit_ids, 4 * DM_KV_BLOCK, 4 * DM_KV_BLOCK, &hit, &e), e);
    assert_ok_e(dm_kv_pin(kv, 1, lease_ids, 4 * DM_KV_BLOCK, 60000, &e), e);
    dm_kv_gc_report r = collect(kv, 0, -1, false);
    assert_int_equal(r.blocks, 4);
    assert_int_equal(r.states, 1);
    for (int i = 0; i < 4; i++) assert_int_equal(kt_read_block(kv, &hit, hit_ids, i, NULL), 1);
    dm_kv_hit_end(kv, &hit);
    assert_int_equal(kt_restore(kv, lease_ids, 4 * DM_KV_BLOCK, 4 * DM_KV_BLOCK), 4 * DM_KV_BLOCK);
    assert_int_equal(kt_restore(kv, other, 4 * DM_KV_BLOCK, 4 * DM_KV_BLOCK), 0);
    dm_kv_close(kv);
    free(hit_ids);
    free(lease_ids);
    free(other);
}

static bool never_on(void *ctx, int64_t done, int64_t total)
{
    (void)ctx, (void)done, (void)total;
    return false;
}

static void a_reader_may_only_ask(void **state)
{
    (void)state;
    dm_kv_opts o = kt_opts(kt_dir("reader")), seen_opts;
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(11, 4 * DM_KV_BLOCK);
    dm_kv_gc_report r;
    dm_kv_stat st;
    dm_err e;
    kt_put(kv, ids, 4 * DM_KV_BLOCK, STATE_BYTES);
    kt_flush(kv);
    dm_kv_gc_opts all = { .bytes_max = 0, .older_days = -1 };
    assert_err(DM_ECANCELED, dm_kv_gc(kv, &(dm_kv_gc_opts){ .bytes_max = -1, .older_days = -1 }, &r, never_on, NULL, &e));
    dm_kv_close(kv);
    assert_ok_e(dm_kv_inspect(o.dir, &seen_opts, &st, &e), e);
    assert_int_equal(st.disk_bytes_max, o.disk_bytes_max);
    o.read_only = true;
    kv = kt_open(&o);
    assert_err(DM_ESTATE, dm_kv_gc(kv, &all, &r, NULL, NULL, &e));
    assert_int_equal(collect(kv, 0, -1, true).blocks, 4);
    assert_int_equal(look(kv).blocks, 4);
    dm_kv_close(kv);
    free(ids);
}

/* What is in RAM and not on the disk is not durable. */
static void durable_is_what_the_disk_has(void **state)
{
    (void)state;
    dm_kv_opts o = kt_opts(kt_dir("durable"));
    o.disk_bytes_max = 2 << 20;
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(12, 400 * DM_KV_BLOCK);
    int64_t pos;
    dm_err e;
    for (int64_t at = 20; at <= 400; at += 20) put_chain(kv, ids, at - 20, at, 0, 1000);
    kt_flush(kv);
    assert_ok_e(dm_kv_durable(kv, ids, 400 * DM_KV_BLOCK, &pos, &e), e);
    assert_true(pos > 0 && pos < 400 * DM_KV_BLOCK);
    assert_int_equal(kt_found(kv, ids, 400 * DM_KV_BLOCK), 400 * DM_KV_BLOCK); /* RAM has it all */
    dm_kv_close(kv);
    kv = kt_open(&o);
    assert_int_equal(kt_found(kv, ids, 400 * DM_KV_BLOCK), pos);
    dm_kv_close(kv);
    free(ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_entry_is_listed_the_next_victim_first),
        cmocka_unit_test(a_list_can_be_left),
        cmocka_unit_test(gc_to_a_size_keeps_beginnings_and_gives_room_back),
        cmocka_unit_test(gc_by_age_takes_what_nobody_used),
        cmocka_unit_test(marks_of_days_are_bounded),
        cmocka_unit_test(what_is_held_stays),
        cmocka_unit_test(a_reader_may_only_ask),
        cmocka_unit_test(durable_is_what_the_disk_has),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
