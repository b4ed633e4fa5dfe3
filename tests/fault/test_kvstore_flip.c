/* Damage to data.mdb and slots.dat: one flipped bit anywhere, cuts anywhere.  Right: refused at open with a sentence, or a miss, or the correct
 * value; never another value, never a crash.  K11, K12, K18; incidents 13, 45. */
#include "kvtest.h"

#include <fcntl.h>
#include <lmdb.h>
#include <sys/wait.h>

#define SEQUENCES 6
#define TOKENS 900
static int32_t *seq[SEQUENCES];
static const int64_t cut_at[SEQUENCES] = { 300, 512, 700, 256, 10, 800 };
static uint8_t *image; /* a good data.mdb */
static size_t image_bytes;
static uint8_t *slots; /* and its slots.dat */
static size_t slots_bytes;
#define EXTENT_BYTES 12288
static const char *dir;

static void read_image(void)
{
    dm_buf b = { 0 };
    dm_err e;
    assert_ok_e(dm_file_read(kt_data_file(dir), 64 << 20, &b, &e), e);
    image = b.p;
    image_bytes = b.n;
    b = (dm_buf){ 0 };
    assert_ok_e(dm_file_read(kt_slots_file(dir), 64 << 20, &b, &e), e);
    slots = b.p;
    slots_bytes = b.n;
    assert_int_equal(slots_bytes % EXTENT_BYTES, 0);
}

/* Small extents keep the file small; some churn leaves a free list behind. */
static int make_store(void **s)
{
    (void)s;
    dir = kt_dir("flip");
    dm_kv_opts o = kt_opts(dir);
    o.disk_bytes_max = 4 << 20;
    dm_kv *kv = kt_open(&o);
    int32_t *gone = kt_ids(99, 600);
    kt_put(kv, gone, 300, 60000);
    kt_flush(kv);
    for (int i = 0; i < SEQUENCES; i++) {
        seq[i] = kt_ids(100 + (uint64_t)i, TOKENS);
        kt_put(kv, seq[i], cut_at[i], i % 2 ? 400 : 22000);
        kt_flush(kv);
    }
    dm_hash last;
    dm_err e;
    kt_chain(&last, gone, 1);
    assert_ok_e(dm_kv_drop_state(kv, &last, gone + 256, 44, &e), e);
    kt_flush(kv);
    free(gone);
    dm_kv_close(kv);
    read_image();
    return 0;
}

static int free_store(void **s)
{
    (void)s;
    for (int i = 0; i < SEQUENCES; i++) free(seq[i]);
    dm_free(image);
    dm_free(slots);
    return 0;
}

static void write_to(const char *path, const uint8_t *p, size_t n)
{
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    for (size_t done = 0; done < n;) {
        ssize_t got = write(fd, p + done, n - done);
        assert_true(got > 0);
        done += (size_t)got;
    }
    close(fd);
}

/* The store as it was, but with these bytes as data.mdb. */
static void write_file(const uint8_t *p, size_t n)
{
    write_to(kt_data_file(dir), p, n);
    write_to(kt_slots_file(dir), slots, slots_bytes);
}

static void poke_in(const char *path, size_t at, uint8_t byte)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    assert_int_equal(pwrite(fd, &byte, 1, (off_t)at), 1);
    close(fd);
}

static void poke(size_t at, uint8_t byte) { poke_in(kt_data_file(dir), at, byte); }
static void poke_slots(size_t at, uint8_t byte) { poke_in(kt_slots_file(dir), at, byte); }

typedef struct tally { int refused, missed, right; } tally;

/* Opens, restores every sequence, puts everything again, restores again.  Wrong bytes fail inside. */
static void live_with_it(tally *t, bool write)
{
    dm_kv_opts o = kt_opts(dir);
    o.disk_bytes_max = 4 << 20;
    o.read_only = !write;
    dm_kv *kv;
    dm_err e;
    int rc = dm_kv_open(&kv, &o, &e);
    if (rc) {
        if (rc != DM_ESTORE && rc != DM_EVERSION && rc != DM_EFOREIGN) fail_msg("open: %s: %s", dm_err_name(rc), e.text);
        assert_non_null(strstr(e.text, dir));
        assert_non_null(strstr(e.text, "delete"));
        t->refused++;
        return;
    }
    bool all = true;
    for (int i = 0; i < SEQUENCES; i++) {
        int64_t pos = kt_restore(kv, seq[i], TOKENS, TOKENS);
        assert_true(pos == 0 || pos == cut_at[i]);
        all &= pos == cut_at[i];
    }
    *(all ? &t->right : &t->missed) += 1;
    if (write) {
        for (int i = 0; i < SEQUENCES; i++) kt_put(kv, seq[i], cut_at[i], i % 2 ? 400 : 22000);
        (void)dm_kv_flush(kv, 30000, &e);
        for (int i = 0; i < SEQUENCES; i++) {
            int64_t pos = kt_restore(kv, seq[i], TOKENS, TOKENS);
            assert_true(pos == 0 || pos == cut_at[i]);
        }
    }
    dm_kv_close(kv);
}

static void an_undamaged_image_is_right(void **s)
{
    (void)s;
    tally t = { 0 };
    write_file(image, image_bytes);
    live_with_it(&t, false);
    live_with_it(&t, true);
    assert_int_equal(t.right, 2);
}

/* The case list asks for 200; here every region of the file gets its share. */
static void one_flipped_bit_is_refused_or_missed_or_harmless_but_never_another_value(void **s)
{
    (void)s;
    uint64_t rnd = test_seed();
    tally t = { 0 };
    int count = test_full() ? 20000 : 300;
    write_file(image, image_bytes);
    for (int i = 0; i < count; i++) {
        size_t at = dm_splitmix64(&rnd) % (image_bytes + slots_bytes);
        uint8_t flip = (uint8_t)(1u << dm_splitmix64(&rnd) % 8);
        bool index = at < image_bytes;
        if (!index) at -= image_bytes;
        index ? poke(at, image[at] ^ flip) : poke_slots(at, slots[at] ^ flip);
        live_with_it(&t, i % 8 == 0);
        if (i % 8 == 0) write_file(image, image_bytes);
        else index ? poke(at, image[at]) : poke_slots(at, slots[at]);
    }
    print_message("# %d flips: %d refused at open, %d missed, %d harmless\n", count, t.refused, t.missed, t.right);
    assert_true(t.missed > 0);
}

/* Pages that are not extents: LMDB's own and the small records.  They are few, so they are hit on purpose. */
static void flips_in_the_index_and_in_lmdb_own_pages_are_caught(void **s)
{
    (void)s;
    uint64_t rnd = test_seed() + 1;
    tally t = { 0 };
    int count = test_full() ? 60000 : 800, done = 0;
    size_t pages = image_bytes / 4096, *tree = malloc(pages * sizeof *tree), n = 0;
    for (size_t i = 0; i < pages; i++) {
        const uint8_t *p = image + i * 4096;
        uint64_t number;
        memcpy(&number, p, 8);
        if (number == i && (p[10] & 0x0b)) tree[n++] = i; /* branch, leaf, meta */
    }
    assert_true(n >= 8);
    write_file(image, image_bytes);
    while (done < count) {
        /* Half of the flips where bytes are in use: the header and the end of the page, where the nodes are. */
        size_t in_page = dm_splitmix64(&rnd) % 2 ? dm_splitmix64(&rnd) % 200 : 4096 - 1 - dm_splitmix64(&rnd) % 1200;
        size_t at = tree[dm_splitmix64(&rnd) % n] * 4096 + in_page;
        poke(at, image[at] ^ (uint8_t)(1u << dm_splitmix64(&rnd) % 8));
        live_with_it(&t, done % 8 == 0);
        if (done % 8 == 0) write_file(image, image_bytes);
        else poke(at, image[at]);
        done++;
    }
    print_message("# %d flips in %zu tree pages: %d refused at open, %d missed, %d harmless\n", count, n, t.refused, t.missed, t.right);
    assert_true(t.refused > 0);
    free(tree);
}

/* Every field of the header of an extent, one bit each. */
static void every_byte_of_an_extent_header_and_payload_edge_is_protected(void **s)
{
    (void)s;
    size_t checked = 0;
    for (size_t x = 0; x < slots_bytes && checked < 3; x += EXTENT_BYTES) {
        if (memcmp(slots + x + 16, "DMKX", 4) != 0) continue;
        checked++;
        for (size_t k = 0; k < 132; k++) {
            tally t = { 0 };
            write_file(image, image_bytes);
            poke_slots(x + k, slots[x + k] ^ 0x10);
            live_with_it(&t, false);
            assert_int_equal(t.refused, 0); /* damage to one value costs that value, not the store */
            if (k < 128) continue;
            assert_true(t.missed + t.right == 1);
        }
    }
    assert_int_equal(checked, 3);
}

static void a_bad_value_is_counted_removed_and_can_be_put_again(void **s)
{
    (void)s;
    write_file(image, image_bytes);
    for (size_t x = 0; x < slots_bytes; x += EXTENT_BYTES) /* all blocks */
        if (memcmp(slots + x + 16, "DMKX", 4) == 0 && slots[x + 22] == 1) poke_slots(x + 500, slots[x + 500] ^ 1);
    dm_kv_opts o = kt_opts(dir);
    o.disk_bytes_max = 4 << 20;
    dm_kv *kv = kt_open(&o);
    dm_kv_check c;
    dm_err e;
    assert_ok_e(dm_kv_verify(kv, &c, NULL, NULL, &e), e);
    int64_t blocks = kt_stat(kv).blocks;
    assert_int_equal(c.bad, blocks);
    assert_non_null(strstr(c.first_bad, "block"));
    assert_int_equal(kt_restore(kv, seq[1], TOKENS, TOKENS), 0);
    kt_flush(kv);
    assert_int_equal(kt_stat(kv).bad_entries, 1);
    assert_int_equal(kt_stat(kv).blocks, blocks - 1);
    assert_int_equal(kt_found(kv, seq[1], TOKENS), 0); /* found again: shorter, no loop */
    kt_put(kv, seq[1], cut_at[1], 400);
    assert_int_equal(kt_restore(kv, seq[1], TOKENS, TOKENS), cut_at[1]); /* from RAM */
    dm_kv_close(kv);

    /* A bad block is noticed when it is read, so each round of restore and put heals one block of a sequence. */
    for (int round = 0; round < 4; round++) {
        kv = kt_open(&o);
        for (int i = 0; i < SEQUENCES; i++) (void)kt_restore(kv, seq[i], TOKENS, TOKENS);
        for (int i = 0; i < SEQUENCES; i++) kt_put(kv, seq[i], cut_at[i], i % 2 ? 400 : 22000);
        kt_flush(kv);
        dm_kv_close(kv);
    }
    kv = kt_open(&o);
    for (int i = 0; i < SEQUENCES; i++) assert_int_equal(kt_restore(kv, seq[i], TOKENS, TOKENS), cut_at[i]);
    assert_ok_e(dm_kv_verify(kv, &c, NULL, NULL, &e), e);
    assert_int_equal(c.bad, 1); /* the block of the sequence that nobody asked for */
    dm_kv_close(kv);
}

static void a_cut_file_is_refused_with_a_way_out_and_left_as_it_is(void **s)
{
    (void)s;
    uint64_t rnd = test_seed() + 2;
    for (int i = 0; i < 60; i++) {
        size_t keep = i == 0 ? image_bytes / 4 : i == 1 ? image_bytes / 2 : i == 2 ? image_bytes * 99 / 100 : i == 3 ? 1 : i == 4 ? 4096
            : i == 5 ? 8192 : dm_splitmix64(&rnd) % image_bytes;
        write_file(image, keep);
        tally t = { 0 };
        struct stat before, after;
        assert_int_equal(stat(kt_data_file(dir), &before), 0);
        live_with_it(&t, false);
        assert_int_equal(stat(kt_data_file(dir), &after), 0);
        assert_int_equal(before.st_size, after.st_size);
        assert_int_equal(before.st_mtim.tv_nsec, after.st_mtim.tv_nsec);
        if (keep && keep <= image_bytes / 2) assert_int_equal(t.refused, 1);
        if (keep && !t.refused) live_with_it(&t, true); /* only free pages were cut off: it goes on */
    }
}

/* slots.dat cut, gone, or of other days: every value that it does not have is a miss, and the store goes on. */
static void a_slot_file_that_does_not_belong_costs_values_only(void **s)
{
    (void)s;
    uint64_t rnd = test_seed() + 3;
    for (int i = 0; i < 40; i++) {
        tally t = { 0 };
        write_file(image, image_bytes);
        if (i == 0) assert_int_equal(unlink(kt_slots_file(dir)), 0);
        else if (i == 1) write_to(kt_slots_file(dir), image, image_bytes);
        else if (i < 20) assert_int_equal(truncate(kt_slots_file(dir), (off_t)(dm_splitmix64(&rnd) % slots_bytes)), 0);
        else /* an extent where another one was */
            for (int k = 0; k < 3; k++) {
                size_t n = slots_bytes / EXTENT_BYTES, from = dm_splitmix64(&rnd) % n, to = dm_splitmix64(&rnd) % n;
                int fd = open(kt_slots_file(dir), O_WRONLY | O_CLOEXEC);
                assert_int_equal(pwrite(fd, slots + from * EXTENT_BYTES, EXTENT_BYTES, (off_t)(to * EXTENT_BYTES)), EXTENT_BYTES);
                close(fd);
            }
        live_with_it(&t, false);
        live_with_it(&t, true);
        live_with_it(&t, true);
        assert_int_equal(t.refused, 0);
        if (i < 2) assert_true(t.missed > 0);
    }
    write_file(image, image_bytes);
    assert_int_equal(unlink(kt_slots_file(dir)), 0);
    assert_int_equal(mkfifo(kt_slots_file(dir), 0600), 0); /* must not hang */
    dm_kv_opts o = kt_opts(dir);
    dm_kv *kv;
    dm_err e;
    assert_err(DM_ESTORE, dm_kv_open(&kv, &o, &e));
    assert_int_equal(unlink(kt_slots_file(dir)), 0);
}

static void put_version(dm_kv *kv, const int32_t *ids, uint8_t version)
{
    uint8_t bytes[400];
    dm_hash root = kt_root();
    dm_err e;
    memset(bytes, version, sizeof bytes);
    assert_ok_e(dm_kv_put_state(kv, &root, ids, 7, bytes, sizeof bytes, &e), e);
    kt_flush(kv);
}

/* A state that was dropped (it did not work) and put anew; then the disk gives back the slot of former days.  Key and checksum are right. */
static void an_extent_of_an_earlier_writing_is_not_taken_for_the_last(void **s)
{
    (void)s;
    const char *was = dir;
    dir = kt_dir("writings");
    dm_kv_opts o = kt_opts(dir);
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(9, 300);
    dm_hash root = kt_root();
    dm_kv_hit hit;
    dm_err e;
    dm_buf before = { 0 }, b = { 0 };
    put_version(kv, ids, 1);
    assert_ok_e(dm_file_read(kt_slots_file(dir), 1 << 20, &before, &e), e);
    assert_ok_e(dm_kv_drop_state(kv, &root, ids, 7, &e), e);
    kt_flush(kv);
    put_version(kv, ids, 2);
    dm_kv_close(kv);
    assert_ok_e(dm_file_read(kt_slots_file(dir), 1 << 20, &b, &e), e);
    int put_back = 0;
    for (size_t x = 0; x + EXTENT_BYTES <= b.n; x += EXTENT_BYTES)
        if (memcmp(b.p + x + 16, "DMKX", 4) == 0 && b.p[x + 128] == 2)
            for (size_t y = 0; y + EXTENT_BYTES <= before.n; y += EXTENT_BYTES)
                if (memcmp(before.p + y + 16, "DMKX", 4) == 0 && before.p[y + 128] == 1) memcpy(b.p + x, before.p + y, EXTENT_BYTES), put_back++;
    assert_int_equal(put_back, 1);
    write_to(kt_slots_file(dir), b.p, b.n);
    kv = kt_open(&o);
    assert_ok_e(dm_kv_find(kv, ids, 300, 300, &hit, &e), e);
    assert_int_equal(hit.pos, 7);
    dm_buf_clear(&b);
    assert_err(DM_EMISS, dm_kv_read_state(kv, &hit, &b, NULL, &e));
    dm_kv_hit_end(kv, &hit);
    assert_int_equal(kt_stat(kv).bad_entries, 1);
    dm_kv_close(kv);
    dm_buf_free(&b);
    dm_buf_free(&before);
    free(ids);
    dir = was;
}

static void a_file_of_no_bytes_is_an_empty_store(void **s)
{
    (void)s;
    write_file(image, 0);
    dm_kv_opts o = kt_opts(dir);
    dm_kv *kv = kt_open(&o);
    assert_int_equal(kt_found(kv, seq[0], TOKENS), 0);
    kt_put(kv, seq[0], 300, 100);
    dm_kv_close(kv);
    kv = kt_open(&o);
    assert_int_equal(kt_restore(kv, seq[0], TOKENS, TOKENS), 300);
    dm_kv_close(kv);
}

/* The open files live on; later reads and writes go to a file without a name; a restart begins anew. */
static void files_deleted_behind_the_store_are_misses_at_worst(void **s)
{
    (void)s;
    write_file(image, image_bytes);
    dm_kv_opts o = kt_opts(dir);
    dm_kv *kv = kt_open(&o);
    dm_kv_hit hit;
    dm_err e;
    assert_ok_e(dm_kv_find(kv, seq[0], TOKENS, TOKENS, &hit, &e), e);
    assert_int_equal(hit.pos, cut_at[0]);
    assert_int_equal(unlink(kt_data_file(dir)), 0);
    (void)kt_read_block(kv, &hit, seq[0], 0, NULL);
    (void)kt_read_state(kv, &hit, seq[0], NULL);
    dm_kv_hit_end(kv, &hit);
    kt_put(kv, seq[0], 513, 900);
    assert_true(kt_found(kv, seq[0], TOKENS) == 513);
    dm_kv_close(kv);
    kv = kt_open(&o);
    assert_int_equal(kt_found(kv, seq[0], TOKENS), 0);
    dm_kv_close(kv);
}

static void raw_delete(const char *db_name, const uint8_t *prefix, size_t n)
{
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi dbi;
    MDB_cursor *cur;
    MDB_val key, val;
    assert_int_equal(mdb_env_create(&env), 0);
    mdb_env_set_maxdbs(env, 6);
    mdb_env_set_mapsize(env, 64 << 20);
    assert_int_equal(mdb_env_open(env, dir, 0, 0600), 0);
    assert_int_equal(mdb_txn_begin(env, NULL, 0, &txn), 0);
    assert_int_equal(mdb_dbi_open(txn, db_name, 0, &dbi), 0);
    assert_int_equal(mdb_cursor_open(txn, dbi, &cur), 0);
    for (int rc = mdb_cursor_get(cur, &key, &val, MDB_FIRST); !rc; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT))
        if (key.mv_size >= n && memcmp(key.mv_data, prefix, n) == 0) mdb_cursor_del(cur, 0);
    assert_int_equal(mdb_txn_commit(txn), 0);
    mdb_env_close(env);
}

/* In another process, as a repair tool or a bug there would do it, between find and read. */
static void records_deleted_between_find_and_read_are_a_miss(void **s)
{
    (void)s;
    static const char *const dbs[] = { "parts", "states", "blocks" };
    for (size_t d = 0; d < 3; d++) {
        write_file(image, image_bytes);
        dm_kv_opts o = kt_opts(dir);
        dm_kv *kv = kt_open(&o);
        dm_kv_hit hit;
        dm_err e;
        assert_ok_e(dm_kv_find(kv, seq[2], TOKENS, TOKENS, &hit, &e), e);
        assert_int_equal(hit.pos, cut_at[2]);
        pid_t pid = fork();
        if (pid == 0) {
            raw_delete(dbs[d], (const uint8_t *)"", 0);
            _exit(0);
        }
        int status;
        waitpid(pid, &status, 0);
        assert_int_equal(status, 0);
        if (d != 1) assert_int_equal(kt_read_block(kv, &hit, seq[2], 1, NULL), 0);
        if (d != 2) assert_int_equal(kt_read_state(kv, &hit, seq[2], NULL), 0);
        dm_kv_hit_end(kv, &hit);
        assert_int_equal(kt_restore(kv, seq[2], TOKENS, TOKENS), 0);
        kt_put(kv, seq[2], cut_at[2], 22000);
        kt_flush(kv);
        while (kt_found(kv, seq[2], TOKENS) && !kt_restore(kv, seq[2], TOKENS, TOKENS)) {}
        kt_put(kv, seq[2], cut_at[2], 22000);
        assert_int_equal(kt_restore(kv, seq[2], TOKENS, TOKENS), cut_at[2]);
        dm_kv_close(kv);
    }
}

/* Extents that no index knows would take room for ever: when nothing else is left to evict they are swept. */
static void room_taken_by_orphans_comes_back(void **s)
{
    (void)s;
    static const char *const dbs[] = { "blocks", "states", "order", "free" };
    for (size_t d = 0; d < 4; d++) {
        const char *was = dir;
        dir = kt_dir("orphans");
        dm_kv_opts o = kt_opts(dir);
        o.disk_bytes_max = 2 << 20;
        fflush(stdout);
        pid_t pid = fork();
        if (pid == 0) { /* all of it in a child: LMDB must not open a directory twice in a process */
            dm_kv *kv = kt_open(&o);
            for (uint64_t i = 0; i < 60; i++) {
                int32_t *ids = kt_ids(i, 600);
                kt_put(kv, ids, 600, 9000);
                free(ids);
            }
            dm_kv_close(kv);
            raw_delete(dbs[d], (const uint8_t *)"", 0);
            _exit(0);
        }
        int status;
        waitpid(pid, &status, 0);
        assert_int_equal(status, 0);
        dm_kv *kv = kt_open(&o);
        dm_kv_check c;
        dm_err e;
        assert_ok_e(dm_kv_verify(kv, &c, NULL, NULL, &e), e);
        assert_true(d >= 2 ? c.bad == 0 : c.bad > 0);
        for (uint64_t i = 100; i < 160; i++) {
            int32_t *ids = kt_ids(i, 600);
            kt_put(kv, ids, 600, 9000);
            kt_flush(kv);
            free(ids);
        }
        dm_kv_stat st = kt_stat(kv);
        assert_int_equal(st.put_dropped, 0);
        assert_in_range(st.disk_bytes_live, 0, o.disk_bytes_max);
        assert_in_range(kt_file_bytes(dir), 0, o.disk_bytes_max + (int64_t)st.extent_bytes);
        kt_verify(kv); /* swept: no orphan is left */
        dm_kv_close(kv);
        dir = was;
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(an_undamaged_image_is_right),
        cmocka_unit_test(one_flipped_bit_is_refused_or_missed_or_harmless_but_never_another_value),
        cmocka_unit_test(flips_in_the_index_and_in_lmdb_own_pages_are_caught),
        cmocka_unit_test(every_byte_of_an_extent_header_and_payload_edge_is_protected),
        cmocka_unit_test(a_bad_value_is_counted_removed_and_can_be_put_again),
        cmocka_unit_test(a_cut_file_is_refused_with_a_way_out_and_left_as_it_is),
        cmocka_unit_test(a_slot_file_that_does_not_belong_costs_values_only),
        cmocka_unit_test(an_extent_of_an_earlier_writing_is_not_taken_for_the_last),
        cmocka_unit_test(a_file_of_no_bytes_is_an_empty_store),
        cmocka_unit_test(files_deleted_behind_the_store_are_misses_at_worst),
        cmocka_unit_test(records_deleted_between_find_and_read_are_a_miss),
        cmocka_unit_test(room_taken_by_orphans_comes_back),
    };
    return cmocka_run_group_tests(tests, make_store, free_store);
}
