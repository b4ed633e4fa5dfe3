/* Opening: what is refused and how it is said; two names, two processes, two stores.  K13, K22, K23; incidents 29, 37, 46, 47. */
#include "kvtest.h"

#include <lmdb.h>
#include <sys/wait.h>

static void same_bytes(const char *path, const dm_buf *want)
{
    dm_buf now = { 0 };
    dm_err e;
    assert_ok_e(dm_file_read(path, 64 << 20, &now, &e), e);
    assert_int_equal(now.n, want->n);
    assert_memory_equal(now.p, want->p, now.n);
    dm_buf_free(&now);
}

/* The refusal names the directory and the way out, and the file keeps its bytes. */
static void refused(const dm_kv_opts *o, int code)
{
    dm_buf was = { 0 };
    dm_err e = { 0 };
    dm_kv *kv;
    assert_ok_e(dm_file_read(kt_data_file(o->dir), 64 << 20, &was, &e), e);
    assert_err(code, dm_kv_open(&kv, o, &e));
    assert_null(kv);
    assert_int_equal(e.code, code);
    assert_non_null(strstr(e.text, o->dir));
    assert_true(strstr(e.text, "delete") || strstr(e.text, "another directory"));
    assert_null(strchr(e.text, '\n'));
    same_bytes(kt_data_file(o->dir), &was);
    dm_buf_free(&was);
}

static void filled(const dm_kv_opts *o)
{
    dm_kv *kv = kt_open(o);
    int32_t *ids = kt_ids(1, 600);
    kt_put(kv, ids, 600, 3000);
    dm_kv_close(kv);
    free(ids);
}

static void another_root_or_block_size_is_refused_untouched(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("foreign")), other = o;
    filled(&o);
    other.root.b[31] ^= 1;
    refused(&other, DM_EFOREIGN);
    other = o;
    other.block_bytes++;
    refused(&other, DM_EFOREIGN);
    other.read_only = true;
    refused(&other, DM_EFOREIGN);
    dm_kv *kv = kt_open(&o);
    int32_t *ids = kt_ids(1, 600);
    assert_int_equal(kt_restore(kv, ids, 600, 600), 600);
    dm_kv_close(kv);
    free(ids);
}

static void the_same_prompt_under_two_roots_never_crosses(void **s)
{
    (void)s;
    dm_kv_opts a = kt_opts(kt_dir("a")), b = kt_opts(kt_dir("b"));
    b.root.b[0] ^= 0x80;
    filled(&a);
    dm_kv *ka = kt_open(&a), *kb = kt_open(&b);
    int32_t *ids = kt_ids(1, 600);
    assert_int_equal(kt_found(ka, ids, 600), 600);
    assert_int_equal(kt_found(kb, ids, 600), 0);
    dm_kv_close(ka);
    dm_kv_close(kb);
    free(ids);
}

typedef void (*edit_fn)(MDB_txn *txn, MDB_dbi meta);
static void edit_meta(const char *dir, edit_fn fn)
{
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi meta;
    assert_int_equal(mdb_env_create(&env), 0);
    mdb_env_set_maxdbs(env, 8);
    assert_int_equal(mdb_env_open(env, dir, 0, 0600), 0);
    assert_int_equal(mdb_txn_begin(env, NULL, 0, &txn), 0);
    assert_int_equal(mdb_dbi_open(txn, "meta", 0, &meta), 0);
    fn(txn, meta);
    assert_int_equal(mdb_txn_commit(txn), 0);
    mdb_env_close(env);
}

static void make_newer(MDB_txn *txn, MDB_dbi meta)
{
    uint8_t rec[200] = "DMKV";
    rec[4] = DM_KV_FORMAT_VERSION + 1; /* all else may be different in a format of the future */
    MDB_val key = { 5, (void *)(uintptr_t)"store" }, val = { sizeof rec, rec };
    assert_int_equal(mdb_put(txn, meta, &key, &val, 0), 0);
}

static void lose_meta(MDB_txn *txn, MDB_dbi meta)
{
    MDB_val key = { 5, (void *)(uintptr_t)"store" };
    assert_int_equal(mdb_del(txn, meta, &key, NULL), 0);
}

static void add_foreign_db(MDB_txn *txn, MDB_dbi meta)
{
    MDB_dbi dbi;
    MDB_val key = { 1, (void *)(uintptr_t)"k" }, val = { 1, (void *)(uintptr_t)"v" };
    (void)meta;
    assert_int_equal(mdb_dbi_open(txn, "dups", MDB_CREATE | MDB_DUPSORT, &dbi), 0);
    assert_int_equal(mdb_put(txn, dbi, &key, &val, 0), 0);
}

static void a_newer_format_is_refused_untouched(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("newer")), seen;
    dm_kv_stat st;
    dm_err e;
    filled(&o);
    edit_meta(o.dir, make_newer);
    refused(&o, DM_EVERSION);
    assert_err(DM_EVERSION, dm_kv_inspect(o.dir, &seen, &st, &e));
}

/* The description as format 1 wrote it: the same fields, the number alone differs. */
static void make_older(MDB_txn *txn, MDB_dbi meta)
{
    MDB_val key = { 5, (void *)(uintptr_t)"store" }, val;
    uint8_t rec[96];
    assert_int_equal(mdb_get(txn, meta, &key, &val), 0);
    assert_int_equal(val.mv_size, sizeof rec);
    memcpy(rec, val.mv_data, sizeof rec);
    rec[4] = 1;
    dm_xxh3_128(rec + 64, rec, 64);
    val = (MDB_val){ sizeof rec, rec };
    assert_int_equal(mdb_put(txn, meta, &key, &val, 0), 0);
}

static void an_older_format_is_replaced_by_an_empty_store(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("older")), seen;
    dm_kv_stat st;
    dm_kv *kv;
    dm_err e;
    filled(&o);
    edit_meta(o.dir, make_older);
    assert_err(DM_ESTORE, dm_kv_inspect(o.dir, &seen, &st, &e));
    o.read_only = true; /* who may not write does not delete */
    assert_err(DM_ESTORE, dm_kv_open(&kv, &o, &e));
    assert_non_null(strstr(e.text, "format 1"));
    o.read_only = false;
    kv = kt_open(&o);
    assert_int_equal(kt_stat(kv).blocks + kt_stat(kv).states, 0);
    int32_t *ids = kt_ids(1, 600);
    kt_put(kv, ids, 600, 9000);
    dm_kv_close(kv);
    kv = kt_open(&o);
    assert_int_equal(kt_restore(kv, ids, 600, 600), 600);
    dm_kv_close(kv);
    free(ids);
}

static void a_store_without_its_description_is_refused(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("nometa"));
    filled(&o);
    edit_meta(o.dir, lose_meta);
    refused(&o, DM_ESTORE);
}

static void a_foreign_database_beside_ours_does_no_harm(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("beside"));
    filled(&o);
    edit_meta(o.dir, add_foreign_db);
    dm_kv *kv = kt_open(&o);
    kt_verify(kv);
    dm_kv_close(kv);
}

static void other_files_are_refused_untouched(void **s)
{
    (void)s;
    dm_err e;
    dm_kv_opts o = kt_opts(kt_dir("text"));
    assert_ok(dm_mkdirs(o.dir, 0700, &e));
    char text[20000];
    memset(text, 'x', sizeof text);
    assert_ok(dm_file_write_atomic(kt_data_file(o.dir), text, sizeof text, 0600, &e));
    refused(&o, DM_ESTORE);
    assert_ok(dm_file_write_atomic(kt_data_file(o.dir), text, 10, 0600, &e));
    refused(&o, DM_ESTORE);

    o = kt_opts(kt_dir("otherlmdb")); /* LMDB, but somebody else's */
    assert_ok(dm_mkdirs(o.dir, 0700, &e));
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi dbi;
    assert_int_equal(mdb_env_create(&env), 0);
    assert_int_equal(mdb_env_open(env, o.dir, 0, 0600), 0);
    assert_int_equal(mdb_txn_begin(env, NULL, 0, &txn), 0);
    assert_int_equal(mdb_dbi_open(txn, NULL, 0, &dbi), 0);
    MDB_val key = { 3, (void *)(uintptr_t)"abc" }, val = { 3, (void *)(uintptr_t)"def" };
    assert_int_equal(mdb_put(txn, dbi, &key, &val, 0), 0);
    assert_int_equal(mdb_txn_commit(txn), 0);
    mdb_env_close(env);
    refused(&o, DM_ESTORE);

    dm_kv *kv;
    o = kt_opts(kt_dir("dirfile")); /* data.mdb is a directory; a FIFO must not hang */
    assert_ok(dm_mkdirs(kt_data_file(o.dir), 0700, &e));
    assert_err(DM_ESTORE, dm_kv_open(&kv, &o, &e));
    o = kt_opts(kt_dir("fifo"));
    assert_ok(dm_mkdirs(o.dir, 0700, &e));
    assert_int_equal(mkfifo(kt_data_file(o.dir), 0600), 0);
    assert_err(DM_ESTORE, dm_kv_open(&kv, &o, &e));
    o = kt_opts(kt_dir("plainfile")); /* the directory is a file */
    assert_ok(dm_file_write_atomic(o.dir, "x", 1, 0600, &e));
    assert_true(dm_kv_open(&kv, &o, &e) < 0);
    assert_non_null(strstr(e.text, o.dir));
}

static void a_second_open_in_the_process_is_busy_under_any_name(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("twice")), other = o;
    dm_kv *kv = kt_open(&o), *second;
    char link_name[1200], dotted[1200];
    dm_err e;
    snprintf(link_name, sizeof link_name, "%s.link", o.dir);
    snprintf(dotted, sizeof dotted, "%s/../%s/.", o.dir, strrchr(o.dir, '/') + 1);
    assert_int_equal(symlink(o.dir, link_name), 0);
    const char *names[] = { o.dir, link_name, dotted };
    for (size_t i = 0; i < DM_COUNT(names); i++) {
        other.dir = names[i];
        for (int ro = 0; ro < 2; ro++) {
            other.read_only = ro;
            assert_err(DM_EBUSY, dm_kv_open(&second, &other, &e));
            assert_non_null(strstr(e.text, names[i]));
        }
    }
    /* The first is undisturbed, and the name is free after its end. */
    int32_t *ids = kt_ids(5, 300);
    kt_put(kv, ids, 300, 100);
    kt_flush(kv);
    dm_kv_close(kv);
    other.read_only = false;
    kv = kt_open(&other);
    assert_int_equal(kt_restore(kv, ids, 300, 300), 300);
    dm_kv_close(kv);
    free(ids);
}

/* In a child that was forked before this process had any store open. */
static pid_t in_child(void (*fn)(const char *), const char *dir)
{
    pid_t pid = fork();
    if (pid == 0) {
        fn(dir);
        _exit(0);
    }
    return pid;
}

static void join_child(pid_t pid)
{
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    assert_int_equal(status, 0);
}

static void child_writes_its_part(const char *dir)
{
    dm_kv_opts o = kt_opts(dir);
    dm_kv *kv;
    dm_err e;
    if (dm_kv_open(&kv, &o, &e)) _exit(1);
    for (uint64_t i = 100; i < 130; i++) {
        int32_t *ids = kt_ids(i, 600);
        for (int b = 0; b < 2; b++)
            if (kt_put_block(kv, ids, b, &e)) _exit(2);
        if (kt_put_state(kv, ids, 600, 5000, &e)) _exit(3);
        if (i % 7 == 0 && dm_kv_flush(kv, 20000, &e)) _exit(4);
        free(ids);
    }
    dm_kv_close(kv);
}

static void two_processes_share_a_store(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("shared"));
    pid_t a = in_child(child_writes_its_part, o.dir), b = in_child(child_writes_its_part, o.dir);
    dm_kv *kv = kt_open(&o); /* while they are at it */
    for (uint64_t i = 0; i < 30; i++) {
        int32_t *ids = kt_ids(i, 600);
        kt_put(kv, ids, 600, 5000);
        free(ids);
    }
    kt_flush(kv);
    join_child(a);
    join_child(b);
    for (uint64_t i = 0; i < 130; i++) {
        int32_t *ids = kt_ids(i, 600);
        assert_int_equal(kt_restore(kv, ids, 600, 600), i < 30 || i >= 100 ? 600 : 0); /* also what another process wrote */
        free(ids);
    }
    assert_int_equal(kt_stat(kv).states, 60);
    assert_int_equal(kt_stat(kv).blocks, 120);
    kt_verify(kv);
    dm_kv_close(kv);
}

static void inspect_tells_what_is_there_without_the_root(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("inspect")), seen;
    dm_kv_stat st;
    dm_err e;
    assert_err(DM_ENOENT, dm_kv_inspect(o.dir, &seen, &st, &e));
    filled(&o);
    assert_ok_e(dm_kv_inspect(o.dir, &seen, &st, &e), e);
    assert_true(dm_hash_equal(&seen.root, &o.root));
    assert_int_equal(seen.block_bytes, o.block_bytes);
    assert_int_equal(st.blocks, 2);
    assert_int_equal(st.states, 1);
    assert_int_equal(st.extent_bytes, 3 * 4096);
    assert_int_equal(st.disk_bytes_live, 3 * 3 * 4096);
    assert_int_equal(st.disk_bytes_file, kt_file_bytes(o.dir));
    dm_kv *kv = kt_open(&o); /* the same while it is open here */
    assert_ok_e(dm_kv_inspect(o.dir, &seen, &st, &e), e);
    assert_int_equal(st.blocks, 2);
    int32_t *ids = kt_ids(1, 600);
    assert_int_equal(kt_restore(kv, ids, 600, 600), 600);
    free(ids);
    dm_kv_close(kv);
    seen = o, seen.block_bytes = st.block_bytes;
    kv = kt_open(&seen); /* what inspect reports suffices to open it */
    dm_kv_close(kv);
}

static bool stop_at_three(void *ctx, int64_t done, int64_t total)
{
    assert_int_equal(total, 3);
    *(int64_t *)ctx = done;
    return done < 2;
}

static void verify_counts_everything_and_can_be_stopped(void **s)
{
    (void)s;
    dm_kv_opts o = kt_opts(kt_dir("verify"));
    filled(&o);
    o.read_only = true;
    dm_kv *kv = kt_open(&o);
    dm_kv_check c;
    dm_err e;
    int64_t last = 0;
    assert_ok_e(dm_kv_verify(kv, &c, NULL, NULL, &e), e);
    assert_int_equal(c.entries, 3);
    assert_int_equal(c.bytes, 2 * KT_BLOCK_BYTES + 3000);
    assert_int_equal(c.bad, 0);
    assert_err(DM_ECANCELED, dm_kv_verify(kv, &c, stop_at_three, &last, &e));
    assert_int_equal(last, 2);
    dm_kv_close(kv);
}

/* 10,000 entries, or 100,000: the index is there at once, the first lookup opens a handful of pages.  The time is printed, for people. */
static void a_restart_with_many_entries_keeps_all_hits(void **s)
{
    (void)s;
    const int64_t N = test_full() ? 25000 : 2500;
    dm_kv_opts o = kt_opts(kt_dir("many"));
    o.block_bytes = 200;
    o.disk_bytes_max = N * 102400;
    o.queue_bytes_max = 512 << 20;
    o.ram_bytes_max = 1 << 30;
    dm_kv *kv = kt_open(&o);
    dm_err e;
    uint8_t bytes[200] = { 0 };
    int32_t *ids = kt_ids(77, N * DM_KV_BLOCK);
    dm_hash h = o.root;
    for (int64_t i = 0; i < N; i++) {
        dm_kv_chain(&h, &h, ids + i * DM_KV_BLOCK);
        memcpy(bytes, h.b, 32);
        assert_ok_e(dm_kv_put_block(kv, &h, bytes, sizeof bytes, &e), e);
        for (int t = 0; t < 3; t++) assert_ok_e(dm_kv_put_state(kv, &h, ids, t, bytes, 100, &e), e);
    }
    kt_flush(kv);
    dm_kv_close(kv);
    uint64_t began = dm_now_ns();
    kv = kt_open(&o);
    printf("# a store of %lld extents opens in %.1f ms\n", (long long)(4 * N), (double)(dm_now_ns() - began) / 1e6);
    assert_int_equal(kt_stat(kv).blocks + kt_stat(kv).states, 4 * N);
    dm_kv_hit hit;
    assert_ok_e(dm_kv_find(kv, ids, N * DM_KV_BLOCK, N * DM_KV_BLOCK, &hit, &e), e);
    assert_int_equal(hit.pos, N * DM_KV_BLOCK);
    assert_int_equal(hit.blocks_present, N);
    h = o.root;
    for (int64_t i = 0; i < N; i++) {
        uint8_t got[200];
        dm_kv_chain(&h, &h, ids + i * DM_KV_BLOCK);
        assert_ok_e(dm_kv_read_block(kv, &hit, i, got, NULL, &e), e);
        assert_memory_equal(got, h.b, 32);
    }
    dm_kv_hit_end(kv, &hit);
    dm_kv_close(kv);
    free(ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(two_processes_share_a_store),
        cmocka_unit_test(another_root_or_block_size_is_refused_untouched),
        cmocka_unit_test(the_same_prompt_under_two_roots_never_crosses),
        cmocka_unit_test(a_newer_format_is_refused_untouched),
        cmocka_unit_test(an_older_format_is_replaced_by_an_empty_store),
        cmocka_unit_test(a_store_without_its_description_is_refused),
        cmocka_unit_test(a_foreign_database_beside_ours_does_no_harm),
        cmocka_unit_test(other_files_are_refused_untouched),
        cmocka_unit_test(a_second_open_in_the_process_is_busy_under_any_name),
        cmocka_unit_test(inspect_tells_what_is_there_without_the_root),
        cmocka_unit_test(verify_counts_everything_and_can_be_stopped),
        cmocka_unit_test(a_restart_with_many_entries_keeps_all_hits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
