/* Put, find, read, flush, restart: the promises in the plain case. */
#include "kvtest.h"

#include <fcntl.h>

static void chain_is_blake2b_of_previous_hash_and_little_endian_ids(void **s)
{
    (void)s;
    int32_t *ids = kt_ids(1, DM_KV_BLOCK);
    dm_hash root = kt_root(), a, b;
    dm_kv_chain(&a, &root, ids);
    uint8_t bytes[32 + 4 * DM_KV_BLOCK];
    memcpy(bytes, root.b, 32);
    for (int i = 0; i < DM_KV_BLOCK; i++)
        for (int k = 0; k < 4; k++) bytes[32 + 4 * i + k] = (uint8_t)((uint32_t)ids[i] >> (8 * k));
    dm_blake2b h;
    dm_blake2b_init(&h);
    dm_blake2b_add(&h, bytes, sizeof bytes);
    dm_blake2b_end(&h, &b);
    assert_true(dm_hash_equal(&a, &b));
    dm_kv_chain(&root, &root, ids); /* next may be prev */
    assert_true(dm_hash_equal(&a, &root));
    free(ids);
}

static void what_was_put_is_found_before_and_after_it_is_written(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("plain"));
    o.sync_ms = 60000;
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(2, 3000);
    kt_put(kv, ids, 1000, 25000);
    assert_int_equal(kt_restore(kv, ids, 3000, 3000), 1000); /* nothing is on disk yet */
    assert_int_equal(kt_stat(kv).blocks, 0);
    assert_int_equal(dm_kv_queued_bytes(kv), 3 * KT_BLOCK_BYTES + 25000);
    kt_flush(kv);
    assert_int_equal(dm_kv_queued_bytes(kv), 0);
    assert_int_equal(kt_restore(kv, ids, 3000, 3000), 1000);
    dm_kv_stat st = kt_stat(kv);
    assert_int_equal(st.blocks, 3);
    assert_int_equal(st.states, 1);
    assert_int_equal(st.put_blocks, 3);
    assert_int_equal(st.put_states, 1);
    assert_int_equal(st.hits, 2);
    kt_verify(kv);
    dm_kv_close(kv);
    free(ids);
}

static void a_restart_finds_everything_on_the_disk_then_in_ram(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("restart"));
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(3, 2000);
    kt_put(kv, ids, 1537, 70000); /* six blocks and a tail of one; the state takes six extents */
    dm_kv_close(kv);              /* writes what is queued */

    kv = kt_open(&o);
    dm_kv_hit hit;
    dm_err e;
    dm_kv_tier tier;
    assert_ok_e(dm_kv_find(kv, ids, 2000, 2000, &hit, &e), e);
    assert_int_equal(hit.pos, 1537);
    assert_int_equal(hit.blocks, 6);
    assert_int_equal(hit.state_bytes, 70000);
    assert_int_equal(hit.blocks_present, 6);
    for (int tries = 0; tries < 2; tries++) {
        for (int i = 0; i < 6; i++) {
            assert_int_equal(kt_read_block(kv, &hit, ids, i, &tier), 1);
            assert_int_equal(tier, tries ? DM_KV_RAM : DM_KV_DISK);
        }
        assert_int_equal(kt_read_state(kv, &hit, ids, &tier), 1);
        assert_int_equal(tier, tries ? DM_KV_RAM : DM_KV_DISK);
    }
    dm_kv_hit_end(kv, &hit);
    dm_kv_hit_end(kv, &hit);
    dm_kv_close(kv);
    free(ids);
}

static void every_tail_length_is_its_own_state_and_the_deepest_within_the_limit_wins(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("tails"));
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(4, 800);
    static const int64_t at[] = { 7, 255, 256, 257, 300, 511, 512, 513, 700 };
    kt_put(kv, ids, 768, 100);
    for (size_t i = 0; i < DM_COUNT(at); i++) kt_put(kv, ids, at[i], 100 + i);
    for (int reopened = 0; reopened < 2; reopened++) {
        for (int64_t limit = 0; limit <= 800; limit++) {
            int64_t want = limit >= 768 ? 768 : 0;
            for (size_t i = 0; i < DM_COUNT(at); i++)
                if (at[i] <= limit && at[i] > want) want = at[i];
            dm_kv_hit hit;
            dm_err e;
            assert_ok_e(dm_kv_find(kv, ids, 800, limit, &hit, &e), e);
            assert_int_equal(hit.pos, want);
            assert_int_equal(hit.blocks, want / DM_KV_BLOCK);
            assert_int_equal(hit.blocks_present, 3);
            dm_kv_hit_end(kv, &hit);
        }
        /* A prompt that leaves the sequence inside a tail: only states before the difference count. */
        int32_t was = ids[280];
        ids[280]++;
        assert_int_equal(kt_restore(kv, ids, 800, 800), 257);
        ids[280] = was;
        dm_kv_close(kv);
        kv = kt_open(&o);
    }
    dm_kv_close(kv);
    free(ids);
}

static void a_state_counts_only_if_all_blocks_before_it_are_there(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("min"));
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(5, 2000);
    dm_err e;
    for (int i = 0; i < 6; i++)
        if (i != 3) assert_ok_e(kt_put_block(kv, ids, i, &e), e);
    assert_ok_e(kt_put_state(kv, ids, 6 * 256 + 10, 500, &e), e);
    assert_ok_e(kt_put_state(kv, ids, 2 * 256 + 5, 500, &e), e);
    for (int i = 0; i < 2; i++) {
        dm_kv_hit hit;
        assert_ok_e(dm_kv_find(kv, ids, 2000, 2000, &hit, &e), e);
        assert_int_equal(hit.pos, 2 * 256 + 5);
        assert_int_equal(hit.blocks_present, 3);
        dm_kv_hit_end(kv, &hit);
        kt_flush(kv);
    }
    assert_ok_e(kt_put_block(kv, ids, 3, &e), e);
    assert_int_equal(kt_restore(kv, ids, 2000, 2000), 6 * 256 + 10);
    dm_kv_close(kv);
    free(ids);
}

static void blocks_without_a_state_are_counted_but_are_no_hit(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("nostate"));
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(6, 600);
    dm_err e;
    assert_ok_e(kt_put_block(kv, ids, 0, &e), e);
    assert_ok_e(kt_put_block(kv, ids, 1, &e), e);
    dm_kv_hit hit;
    uint8_t buf[KT_BLOCK_BYTES];
    dm_buf st = { 0 };
    assert_ok_e(dm_kv_find(kv, ids, 600, 600, &hit, &e), e);
    assert_int_equal(hit.pos, 0);
    assert_int_equal(hit.state_bytes, 0);
    assert_int_equal(hit.blocks_present, 2);
    assert_err(DM_EINVAL, dm_kv_read_block(kv, &hit, 0, buf, NULL, &e));
    assert_err(DM_EINVAL, dm_kv_read_state(kv, &hit, &st, NULL, &e));
    dm_kv_hit_end(kv, &hit);
    assert_int_equal(kt_stat(kv).misses, 1);
    dm_kv_close(kv);
    free(ids);
}

static void bad_arguments_are_refused_with_a_sentence(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("args"));
    dm_kv *kv = kt_open(&o);
    int32_t ids[300] = { 0 };
    uint8_t bytes[KT_BLOCK_BYTES + 1] = { 0 };
    dm_hash h = kt_root();
    dm_kv_hit hit;
    dm_err e = { 0 };
    assert_err(DM_EINVAL, dm_kv_put_block(kv, &h, bytes, KT_BLOCK_BYTES + 1, &e));
    assert_err(DM_EINVAL, dm_kv_put_block(kv, &h, bytes, 0, &e));
    assert_err(DM_EINVAL, dm_kv_put_state(kv, &h, ids, 256, bytes, 1, &e));
    assert_err(DM_EINVAL, dm_kv_put_state(kv, &h, ids, -1, bytes, 1, &e));
    assert_err(DM_EINVAL, dm_kv_find(kv, ids, -1, 0, &hit, &e));
    assert_err(DM_EINVAL, dm_kv_find(kv, ids, 10, -1, &hit, &e));
    assert_true(strlen(e.text) > 10);
    assert_ok_e(dm_kv_find(kv, NULL, 0, 0, &hit, &e), e);
    assert_int_equal(hit.pos, 0);
    dm_kv_close(kv);
    dm_kv_close(NULL);
    dm_kv_opts bad = o;
    bad.block_bytes = 0;
    assert_err(DM_EINVAL, dm_kv_open(&kv, &bad, &e));
    bad = o, bad.disk_bytes_max = 1000;
    assert_err(DM_EINVAL, dm_kv_open(&kv, &bad, &e));
    bad = o, bad.dir = NULL;
    assert_err(DM_EINVAL, dm_kv_open(&kv, &bad, &e));
    assert_null(kv);
}

static void the_same_value_is_written_once(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("dup"));
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(7, 600);
    for (int i = 0; i < 3; i++) kt_put(kv, ids, 600, 5000);
    kt_flush(kv);
    kt_put(kv, ids, 600, 5000);
    kt_flush(kv);
    dm_kv_stat st = kt_stat(kv);
    assert_int_equal(st.put_blocks, 2);
    assert_int_equal(st.put_states, 1);
    assert_int_equal(st.put_duplicates, 9);
    assert_int_equal(st.bytes_written, 3 * (int64_t)st.extent_bytes);
    dm_kv_close(kv);

    kv = kt_open(&o); /* and not again after a restart, when RAM does not know it */
    kt_put(kv, ids, 600, 5000);
    kt_flush(kv);
    st = kt_stat(kv);
    assert_int_equal(st.bytes_written, 0);
    assert_int_equal(st.put_duplicates, 3);
    assert_int_equal(st.blocks, 2);
    dm_kv_close(kv);
    free(ids);
}

static void a_dropped_state_is_not_offered_again_also_after_a_restart(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("drop"));
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(8, 700);
    kt_put(kv, ids, 300, 400);
    kt_put(kv, ids, 600, 400);
    for (int written = 0; written < 2; written++) {
        dm_hash last;
        dm_err e;
        kt_chain(&last, ids, 2);
        assert_int_equal(kt_found(kv, ids, 700), 600);
        assert_ok_e(dm_kv_drop_state(kv, &last, ids + 512, 88, &e), e);
        assert_int_equal(kt_found(kv, ids, 700), 300);
        kt_flush(kv);
        assert_int_equal(kt_found(kv, ids, 700), 300);
        dm_kv_close(kv);
        kv = kt_open(&o);
        assert_int_equal(kt_found(kv, ids, 700), 300);
        kt_put(kv, ids, 600, 400); /* a fresh one is welcome */
        assert_int_equal(kt_found(kv, ids, 700), 600);
        kt_flush(kv);
    }
    kt_verify(kv);
    dm_kv_close(kv);
    free(ids);
}

static void a_state_may_be_empty_or_larger_than_many_blocks(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("sizes"));
    dm_kv *kv = kt_open(&o);
    dm_kv_stat st = kt_stat(kv);
    size_t room = st.extent_bytes - 128;
    const size_t sizes[] = { 0, 1, room - 1, room, room + 1, 2 * room, 2 * room + 1, 300000 };
    int32_t *ids = kt_ids(9, 600);
    for (size_t i = 0; i < DM_COUNT(sizes); i++) kt_put(kv, ids, 513 + (int64_t)i, sizes[i]);
    dm_kv_close(kv);
    kv = kt_open(&o);
    for (size_t i = 0; i < DM_COUNT(sizes); i++) assert_int_equal(kt_restore(kv, ids, 600, 513 + (int64_t)i), 513 + i);
    kt_verify(kv);
    dm_kv_close(kv);
    free(ids);
}

static void a_read_only_store_reads_and_refuses_to_write(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("ro"));
    dm_kv_opts ro = o;
    ro.read_only = true;
    dm_kv *kv;
    dm_err e;
    assert_err(DM_ENOENT, dm_kv_open(&kv, &ro, &e));
    assert_false(dm_path_exists(o.dir));
    kv = kt_open(&o);
    int32_t *ids = kt_ids(10, 600);
    kt_put(kv, ids, 600, 100);
    dm_kv_close(kv);
    kv = kt_open(&ro);
    assert_int_equal(kt_restore(kv, ids, 600, 600), 600);
    assert_err(DM_ESTATE, kt_put_state(kv, ids, 500, 10, &e));
    assert_ok(dm_kv_flush(kv, 0, &e));
    kt_verify(kv);
    dm_kv_close(kv);
    free(ids);
}

/* An agent runtime spawns programs for every tool: none of them may inherit the store. */
static void no_descriptor_of_the_store_survives_exec(void **s)
{
    (void)s;
    bool before[256], any = false;
    for (int fd = 0; fd < 256; fd++) before[fd] = fcntl(fd, F_GETFD) >= 0;
    dm_kv_opts o = kt_opts(kt_dir("cloexec"));
    dm_kv *kv = kt_open(&o);
    for (int fd = 0; fd < 256; fd++) {
        int flags = fcntl(fd, F_GETFD);
        if (flags < 0 || before[fd]) continue;
        any = true;
        if (!(flags & FD_CLOEXEC)) fail_msg("descriptor %d is inherited", fd);
    }
    assert_true(any);
    dm_kv_close(kv);
    for (int fd = 0; fd < 256; fd++) assert_int_equal(fcntl(fd, F_GETFD) >= 0, before[fd]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(chain_is_blake2b_of_previous_hash_and_little_endian_ids),
        cmocka_unit_test(what_was_put_is_found_before_and_after_it_is_written),
        cmocka_unit_test(a_restart_finds_everything_on_the_disk_then_in_ram),
        cmocka_unit_test(every_tail_length_is_its_own_state_and_the_deepest_within_the_limit_wins),
        cmocka_unit_test(a_state_counts_only_if_all_blocks_before_it_are_there),
        cmocka_unit_test(blocks_without_a_state_are_counted_but_are_no_hit),
        cmocka_unit_test(bad_arguments_are_refused_with_a_sentence),
        cmocka_unit_test(the_same_value_is_written_once),
        cmocka_unit_test(a_dropped_state_is_not_offered_again_also_after_a_restart),
        cmocka_unit_test(a_state_may_be_empty_or_larger_than_many_blocks),
        cmocka_unit_test(a_read_only_store_reads_and_refuses_to_write),
        cmocka_unit_test(no_descriptor_of_the_store_survives_exec),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
