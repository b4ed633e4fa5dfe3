/* The journal: what was appended is there, in one piece, and what is not a journal is left alone. */
#include "testlib.h"

#include <fcntl.h>
#include <lmdb.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "agent/agent.h"

static const char *fresh(void)
{
    static int k;
    static char path[600];
    snprintf(path, sizeof path, "%s/j%d", test_dir(), k++);
    return path;
}

static void append(dm_journal *j, const char *id, json_t *ev)
{
    dm_err e = { 0 };
    assert_non_null(ev);
    assert_ok_e(dm_journal_append(j, id, &ev, 1, NULL, &e), e);
    json_decref(ev);
}

typedef struct seen { int n; char last[64]; int64_t seq; } seen;
static int look(void *ctx, int64_t seq, const json_t *ev)
{
    seen *s = ctx;
    s->n++;
    assert_int_equal(seq, s->seq + 1);
    s->seq = seq;
    snprintf(s->last, sizeof s->last, "%s", json_string_value(json_object_get(ev, "type")));
    return 0;
}

static char id_a[DM_SESSION_ID_CHARS + 1], id_b[DM_SESSION_ID_CHARS + 1];

static dm_journal *filled(const char *dir)
{
    dm_journal *j;
    dm_err e = { 0 };
    assert_ok_e(dm_journal_open(&j, dir, false, &e), e);
    dm_session_id_new(id_a);
    dm_session_id_new(id_b);
    append(j, id_a, json_pack("{s:s,s:s,s:s}", "type", "created", "model", "m", "workspace", "/w"));
    append(j, id_a, json_pack("{s:s,s:s}", "type", "message", "text", "hello there\nsecond line"));
    append(j, id_b, json_pack("{s:s,s:s,s:s}", "type", "created", "model", "m", "workspace", "/w"));
    for (int64_t t = dm_wall_ms(); dm_wall_ms() == t;) usleep(200); /* "last" goes by the millisecond */
    append(j, id_a, json_pack("{s:s,s:s,s:[iii]}", "type", "tokens", "what", "reply", "ids", 1, 2, 3));
    return j;
}

static void events_come_back_in_order_after_a_reopen(void **state)
{
    (void)state;
    const char *dir = fresh();
    dm_journal *j = filled(dir);
    dm_journal_close(j);
    dm_err e = { 0 };
    assert_ok_e(dm_journal_open(&j, dir, true, &e), e);
    seen s = { 0 };
    assert_ok_e(dm_journal_read(j, id_a, look, &s, &e), e);
    assert_int_equal(s.n, 3);
    assert_string_equal(s.last, "tokens");
    s = (seen){ 0 };
    assert_ok_e(dm_journal_read(j, id_b, look, &s, &e), e);
    assert_int_equal(s.n, 1);
    assert_err(DM_ENOENT, dm_journal_read(j, "00000000000000000000000000", look, &s, &e));
    dm_journal_close(j);
}

static int check_head(void *ctx, const json_t *h)
{
    int *n = ctx;
    if (strcmp(json_string_value(json_object_get(h, "id")), id_a) == 0) {
        assert_string_equal(json_string_value(json_object_get(h, "title")), "hello there");
        assert_int_equal(json_integer_value(json_object_get(h, "tokens")), 3);
        assert_int_equal(json_integer_value(json_object_get(h, "turns")), 1);
        assert_string_equal(json_string_value(json_object_get(h, "model")), "m");
    }
    ++*n;
    return 0;
}

static void the_head_row_follows_the_events(void **state)
{
    (void)state;
    dm_journal *j = filled(fresh());
    int n = 0;
    dm_err e = { 0 };
    assert_ok_e(dm_journal_list(j, check_head, &n, &e), e);
    assert_int_equal(n, 2);
    dm_journal_close(j);
}

static void a_failed_commit_leaves_neither_event_nor_head(void **state)
{
    (void)state;
    dm_journal *j = filled(fresh());
    dm_err e = { 0 };
    assert_ok_e(dm_fault_arm("journal.commit=fail", &e), e);
    json_t *ev = json_pack("{s:s,s:s,s:[i]}", "type", "tokens", "what", "reply", "ids", 9);
    assert_err(DM_EIO, dm_journal_append(j, id_a, &ev, 1, NULL, &e));
    dm_fault_arm(NULL, NULL);
    seen s = { 0 };
    assert_ok_e(dm_journal_read(j, id_a, look, &s, &e), e);
    assert_int_equal(s.n, 3);
    int n = 0;
    assert_ok_e(dm_journal_list(j, check_head, &n, &e), e); /* still 3 tokens */
    int64_t seq = 0;
    assert_ok_e(dm_journal_append(j, id_a, &ev, 1, &seq, &e), e);
    assert_int_equal(seq, 4);
    json_decref(ev);
    dm_journal_close(j);
}

static void a_prefix_names_one_session_or_none(void **state)
{
    (void)state;
    dm_journal *j = filled(fresh());
    dm_err e = { 0 };
    char out[DM_SESSION_ID_CHARS + 1];
    assert_ok_e(dm_journal_resolve(j, id_a, out, &e), e);
    assert_string_equal(out, id_a);
    char part[DM_SESSION_ID_CHARS + 1];
    memcpy(part, id_b, sizeof part);
    part[DM_SESSION_ID_CHARS - 1] = 0;
    for (char *p = part; *p; p++) *p = (char)(*p >= 'A' ? *p + 32 : *p);
    assert_ok_e(dm_journal_resolve(j, part, out, &e), e);
    assert_string_equal(out, id_b);
    part[4] = 0; /* both were made within the hour, so the first characters agree */
    assert_err(DM_EINVAL, dm_journal_resolve(j, part, out, &e));
    assert_err(DM_EINVAL, dm_journal_resolve(j, "01", out, &e));
    assert_err(DM_ENOENT, dm_journal_resolve(j, "ZZZZZ", out, &e));
    assert_ok_e(dm_journal_resolve(j, "last", out, &e), e);
    assert_string_equal(out, id_a);
    dm_journal_close(j);
}

static void one_session_has_one_runner(void **state)
{
    (void)state;
    const char *dir = fresh();
    dm_journal *j = filled(dir);
    dm_err e = { 0 };
    assert_ok_e(dm_journal_claim(j, id_a, &e), e);
    assert_err(DM_EBUSY, dm_journal_claim(j, id_a, &e));
    char pid[24];
    snprintf(pid, sizeof pid, "%ld", (long)getpid());
    assert_non_null(strstr(e.text, pid));
    assert_true(dm_journal_claimed(j, id_a));
    assert_false(dm_journal_claimed(j, id_b));
    assert_err(DM_EBUSY, dm_journal_remove(j, id_a, &e));
    dm_journal_release(j, id_a);
    assert_false(dm_journal_claimed(j, id_a));
    assert_ok_e(dm_journal_claim(j, id_a, &e), e);
    dm_journal_close(j);
}

static void a_claim_dies_with_its_process(void **state)
{
    (void)state;
    const char *dir = fresh();
    dm_journal *j = filled(dir);
    dm_journal_close(j);
    int ready[2];
    assert_int_equal(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        dm_journal *mine;
        if (dm_journal_open(&mine, dir, false, NULL) < 0 || dm_journal_claim(mine, id_a, NULL) < 0) _exit(1);
        if (write(ready[1], "x", 1) != 1) _exit(1);
        pause();
        _exit(0);
    }
    char c;
    close(ready[1]);
    assert_int_equal(read(ready[0], &c, 1), 1);
    close(ready[0]);
    dm_err e = { 0 };
    assert_ok_e(dm_journal_open(&j, dir, false, &e), e); /* two processes share the journal */
    assert_err(DM_EBUSY, dm_journal_claim(j, id_a, &e));
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    assert_ok_e(dm_journal_claim(j, id_a, &e), e);
    dm_journal_close(j);
}

static void a_removed_session_is_gone_and_the_others_stay(void **state)
{
    (void)state;
    dm_journal *j = filled(fresh());
    dm_err e = { 0 };
    assert_ok_e(dm_journal_remove(j, id_a, &e), e);
    seen s = { 0 };
    assert_err(DM_ENOENT, dm_journal_read(j, id_a, look, &s, &e));
    assert_err(DM_ENOENT, dm_journal_remove(j, id_a, &e));
    assert_ok_e(dm_journal_read(j, id_b, look, &s, &e), e);
    assert_int_equal(s.n, 1);
    assert_ok_e(dm_journal_remove(j, id_b, &e), e);
    int n = 0;
    assert_ok_e(dm_journal_list(j, check_head, &n, &e), e);
    assert_int_equal(n, 0);
    dm_journal_close(j);
}

static void one_process_opens_a_journal_once(void **state)
{
    (void)state;
    const char *dir = fresh();
    dm_journal *j = filled(dir), *other;
    char link[700];
    dm_err e = { 0 };
    snprintf(link, sizeof link, "%s-link", dir);
    assert_int_equal(symlink(dir, link), 0);
    assert_err(DM_EBUSY, dm_journal_open(&other, dir, false, &e));
    assert_err(DM_EBUSY, dm_journal_open(&other, link, true, &e));
    dm_journal_close(j);
    assert_ok_e(dm_journal_open(&other, link, false, &e), e);
    dm_journal_close(other);
}

static void a_journal_outgrows_its_first_map(void **state)
{
    (void)state;
    const char *dir = fresh();
    dm_journal *j = filled(dir);
    char *big = dm_malloc((1 << 20) + 1);
    memset(big, 'b', 1 << 20);
    big[1 << 20] = 0;
    for (int i = 0; i < 40; i++) append(j, id_b, json_pack("{s:s,s:s}", "type", "message", "text", big));
    dm_free(big);
    seen s = { 0 };
    dm_err e = { 0 };
    assert_ok_e(dm_journal_read(j, id_b, look, &s, &e), e);
    assert_int_equal(s.n, 41);
    dm_journal_close(j);
    assert_ok_e(dm_journal_open(&j, dir, true, &e), e);
    s = (seen){ 0 };
    assert_ok_e(dm_journal_read(j, id_b, look, &s, &e), e);
    assert_int_equal(s.n, 41);
    dm_journal_close(j);
}

/* ---- what is not ours ------------------------------------------------------------------------- */

static void data_path(char *out, size_t cap, const char *dir) { snprintf(out, cap, "%s/journal/data.mdb", dir); }

static void bytes_of(const char *path, dm_buf *out)
{
    dm_err e = { 0 };
    assert_ok_e(dm_file_read(path, 1 << 28, out, &e), e);
}

static void a_newer_journal_is_refused_and_left_alone(void **state)
{
    (void)state;
    const char *dir = fresh();
    dm_journal *j = filled(dir);
    dm_journal_close(j);
    char env_dir[700], data[800];
    snprintf(env_dir, sizeof env_dir, "%s/journal", dir);
    data_path(data, sizeof data, dir);
    MDB_env *env;
    MDB_txn *txn;
    MDB_dbi meta;
    MDB_val k = { 6, (void *)"format" }, v = { 1, (void *)"2" };
    assert_int_equal(mdb_env_create(&env), 0);
    mdb_env_set_maxdbs(env, 4);
    assert_int_equal(mdb_env_open(env, env_dir, 0, 0600), 0);
    assert_int_equal(mdb_txn_begin(env, NULL, 0, &txn), 0);
    assert_int_equal(mdb_dbi_open(txn, "meta", 0, &meta), 0);
    assert_int_equal(mdb_put(txn, meta, &k, &v, 0), 0);
    assert_int_equal(mdb_txn_commit(txn), 0);
    mdb_env_close(env);

    dm_buf before = { 0 }, after = { 0 };
    bytes_of(data, &before);
    dm_err e = { 0 };
    assert_err(DM_EVERSION, dm_journal_open(&j, dir, false, &e));
    assert_err(DM_EVERSION, dm_journal_open(&j, dir, true, &e));
    bytes_of(data, &after);
    assert_int_equal(before.n, after.n);
    assert_memory_equal(before.p, after.p, before.n);
    dm_buf_free(&before);
    dm_buf_free(&after);
}

static void a_cut_journal_is_an_error_at_every_length(void **state)
{
    (void)state;
    const char *dir = fresh();
    dm_journal *j = filled(dir);
    dm_err e = { 0 };
    json_t *ids = json_array();
    for (int i = 0; i < 20000; i++) json_array_append_new(ids, json_integer(i));
    for (int i = 0; i < 20; i++) append(j, id_a, json_pack("{s:s,s:s,s:O}", "type", "tokens", "what", "prompt", "ids", ids));
    json_decref(ids);
    dm_journal_close(j);
    char data[800];
    data_path(data, sizeof data, dir);
    dm_buf whole = { 0 };
    bytes_of(data, &whole);
    /* The last page in use; what is behind it is only reserved. */
    size_t used = whole.n;
    while (used > 0 && whole.p[used - 1] == 0) used--;
    static const int parts[] = { 1, 10, 25, 50, 75, 99 };
    for (size_t i = 0; i < DM_COUNT(parts); i++) {
        assert_int_equal(truncate(data, (off_t)(used / 100 * (size_t)parts[i])), 0);
        int rc = dm_journal_open(&j, dir, i % 2 == 0, &e);
        assert_int_equal(rc, DM_ESTORE);
        int fd = open(data, O_WRONLY);
        assert_int_equal(pwrite(fd, whole.p, whole.n, 0), (ssize_t)whole.n);
        close(fd);
    }
    assert_ok_e(dm_journal_open(&j, dir, false, &e), e); /* and whole again it is good */
    dm_journal_close(j);
    dm_buf_free(&whole);
}

static void a_foreign_file_is_an_error_and_left_alone(void **state)
{
    (void)state;
    const char *dir = fresh();
    char env_dir[700], data[800];
    dm_err e = { 0 };
    snprintf(env_dir, sizeof env_dir, "%s/journal", dir);
    assert_ok_e(dm_mkdirs(env_dir, 0700, &e), e);
    data_path(data, sizeof data, dir);
    char junk[8192];
    memset(junk, 'x', sizeof junk);
    assert_ok_e(dm_file_write_atomic(data, junk, sizeof junk, 0600, &e), e);
    dm_journal *j;
    assert_err(DM_ESTORE, dm_journal_open(&j, dir, false, &e));
    dm_buf after = { 0 };
    bytes_of(data, &after);
    assert_int_equal(after.n, sizeof junk);
    assert_memory_equal(after.p, junk, sizeof junk);
    dm_buf_free(&after);
    assert_err(DM_ENOENT, dm_journal_open(&j, fresh(), true, &e));
}

static void a_flipped_byte_in_an_event_is_named(void **state)
{
    (void)state;
    const char *dir = fresh();
    dm_journal *j = filled(dir);
    append(j, id_a, json_pack("{s:s,s:s}", "type", "message", "text", "findmeplease"));
    dm_journal_close(j);
    char data[800];
    data_path(data, sizeof data, dir);
    dm_buf b = { 0 };
    bytes_of(data, &b);
    int flipped = 0;
    for (size_t i = 0; i + 12 <= b.n; i++)
        if (memcmp(b.p + i, "findmeplease", 12) == 0) b.p[i] ^= 1, flipped++;
    assert_true(flipped > 0);
    int fd = open(data, O_WRONLY);
    assert_int_equal(pwrite(fd, b.p, b.n, 0), (ssize_t)b.n);
    close(fd);
    dm_buf_free(&b);
    dm_err e = { 0 };
    assert_ok_e(dm_journal_open(&j, dir, false, &e), e);
    seen s = { 0 };
    assert_err(DM_ECORRUPT, dm_journal_read(j, id_a, look, &s, &e));
    assert_non_null(strstr(e.text, "event 4"));
    assert_int_equal(s.n, 3);
    dm_journal_close(j);
}

/* ---- kill -9 in the middle of appends ------------------------------------------------------------ */

static void what_was_acknowledged_survives_a_kill(void **state)
{
    (void)state;
    for (int round = 0; round < 5; round++) {
        const char *dir = fresh();
        int acks[2];
        assert_int_equal(pipe(acks), 0);
        dm_session_id_new(id_a);
        pid_t pid = fork();
        if (pid == 0) {
            dm_journal *j;
            close(acks[0]);
            if (dm_journal_open(&j, dir, false, NULL) < 0) _exit(1);
            for (int i = 0;; i++) {
                json_t *ev = json_pack("{s:s,s:i}", "type", "message", "i", i);
                if (dm_journal_append(j, id_a, &ev, 1, NULL, NULL) < 0) _exit(1);
                json_decref(ev);
                if (write(acks[1], "x", 1) != 1) _exit(1);
            }
        }
        close(acks[1]);
        char c;
        int acked = 0;
        while (acked < 3 + round * 5 && read(acks[0], &c, 1) == 1) acked++;
        kill(pid, SIGKILL);
        while (read(acks[0], &c, 1) == 1) acked++;
        close(acks[0]);
        waitpid(pid, NULL, 0);
        dm_journal *j;
        dm_err e = { 0 };
        assert_ok_e(dm_journal_open(&j, dir, false, &e), e);
        seen s = { 0 };
        assert_ok_e(dm_journal_read(j, id_a, look, &s, &e), e);
        assert_in_range(s.n, acked, acked + 1);
        dm_journal_close(j);
    }
}

static void two_processes_share_a_journal(void **state)
{
    (void)state;
    enum { EACH = 60 };
    const char *dir = fresh();
    dm_journal *j = filled(dir);
    dm_journal_close(j);
    pid_t pid[2];
    for (int k = 0; k < 2; k++) {
        pid[k] = fork();
        if (pid[k]) continue;
        dm_journal *mine;
        if (dm_journal_open(&mine, dir, false, NULL) < 0) _exit(1);
        char *text = dm_malloc(300001); /* together they outgrow the first map, so each meets the other's growth */
        memset(text, 'x', 300000);
        text[300000] = 0;
        for (int i = 0; i < EACH; i++) {
            json_t *ev = json_pack("{s:s,s:i,s:s}", "type", "message", "i", i, "text", text);
            if (!ev || dm_journal_append(mine, k ? id_a : id_b, &ev, 1, NULL, NULL) < 0) _exit(2);
            json_decref(ev);
        }
        dm_free(text);
        dm_journal_close(mine);
        _exit(0);
    }
    for (int k = 0; k < 2; k++) {
        int status;
        assert_int_equal(waitpid(pid[k], &status, 0), pid[k]);
        assert_int_equal(status, 0);
    }
    dm_err e = { 0 };
    assert_ok_e(dm_journal_open(&j, dir, false, &e), e);
    seen a = { 0 }, b = { 0 };
    assert_ok_e(dm_journal_read(j, id_a, look, &a, &e), e);
    assert_ok_e(dm_journal_read(j, id_b, look, &b, &e), e);
    assert_int_equal(a.n, 3 + EACH);
    assert_int_equal(b.n, 1 + EACH);
    dm_journal_close(j);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(events_come_back_in_order_after_a_reopen),
        cmocka_unit_test(the_head_row_follows_the_events),
        cmocka_unit_test(a_failed_commit_leaves_neither_event_nor_head),
        cmocka_unit_test(a_prefix_names_one_session_or_none),
        cmocka_unit_test(one_session_has_one_runner),
        cmocka_unit_test(a_claim_dies_with_its_process),
        cmocka_unit_test(a_removed_session_is_gone_and_the_others_stay),
        cmocka_unit_test(one_process_opens_a_journal_once),
        cmocka_unit_test(a_journal_outgrows_its_first_map),
        cmocka_unit_test(a_newer_journal_is_refused_and_left_alone),
        cmocka_unit_test(a_cut_journal_is_an_error_at_every_length),
        cmocka_unit_test(a_foreign_file_is_an_error_and_left_alone),
        cmocka_unit_test(a_flipped_byte_in_an_event_is_named),
        cmocka_unit_test(two_processes_share_a_journal),
        cmocka_unit_test(what_was_acknowledged_survives_a_kill),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
