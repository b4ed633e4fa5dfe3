/* The N-th allocation of an export or of an import fails, for every N: an export ends with an error or with less KV, an import is all or
 * nothing, the next one works, and the session goes on at the price of its new tokens. */
#include "tests/lib/agent_rig.h"

#include <fcntl.h>

#include "agent/transfer.h"

static char id[DM_SESSION_ID_CHARS + 1];

static int to_fd(void *ctx, const void *p, size_t n, dm_err *e)
{
    const int *fd = ctx;
    return write(*fd, p, n) == (ssize_t)n ? 0 : dm_err_set(e, DM_EIO, "test", "short write");
}

/* A session of some blocks, asleep. */
static void make_session(rig *r)
{
    rig_open(r, "sender", &(rig_opts){ .no_sandbox = true, .weights = 1 });
    dm_buf text = { 0 };
    for (int i = 0; i < 300; i++) assert_ok(dm_buf_printf(&text, "line %d of many; ", i));
    rig_says(r, "I have read it.");
    rig_create(r, NULL);
    rig_send(r, dm_buf_cstr(&text));
    memcpy(id, dm_session_id(r->s), sizeof id);
    dm_buf_free(&text);
    rig_close(r);
}

/* fail: which allocation; 0: none.  *reached: there were so many. */
static int export_to(const rig *r, int fd, int64_t fail, bool *reached, transfer_report *rep, dm_err *e)
{
    char kv[700], *stores[] = { kv };
    dm_journal *j;
    snprintf(kv, sizeof kv, "%s/kv-1-0", r->state);
    assert_ok_e(dm_journal_open(&j, r->state, true, e), *e);
    assert_int_equal(ftruncate(fd, 0), 0);
    assert_int_equal(lseek(fd, 0, SEEK_SET), 0);
    int64_t before = dm_fault_alloc_count();
    dm_fault_alloc_after(fail ? fail : -1);
    int rc = transfer_export(&(transfer_out){ .journal = j, .stores = stores, .nstores = 1, .session = id }, to_fd, &fd, rep, e);
    *reached = fail && dm_fault_alloc_count() - before >= fail;
    dm_fault_alloc_after(-1);
    dm_journal_close(j);
    return rc;
}

static int count(void *ctx, int64_t seq, const json_t *event)
{
    (void)event;
    *(int64_t *)ctx = seq;
    return 0;
}

static int64_t events_in(dm_journal *j)
{
    int64_t n = 0;
    dm_err e;
    int rc = dm_journal_read(j, id, count, &n, &e);
    if (rc != DM_ENOENT) assert_ok_e(rc, e);
    return n;
}

static int import_to(rig *r, int fd, int64_t fail, bool *reached, transfer_report *rep, dm_err *e)
{
    transfer_in in = { .journal = r->j, .kv = r->kv, .numerics = r->f->numerics_id, .model = "scripted", .vocab = dm_tok_vocab(r->tok) };
    in.weights.b[0] = in.root.b[0] = 1; /* as the rig has them */
    dm_tok_hash(r->tok, &in.tokenizer);
    int64_t before = dm_fault_alloc_count();
    dm_fault_alloc_after(fail ? fail : -1);
    int rc = transfer_import(&in, fd, rep, e);
    *reached = fail && dm_fault_alloc_count() - before >= fail;
    dm_fault_alloc_after(-1);
    return rc;
}

static void whatever_allocation_fails(void **state)
{
    (void)state;
    rig a, b;
    char path[700];
    dm_err e = { 0 };
    transfer_report rep, whole;
    bool reached = true;
    make_session(&a);
    snprintf(path, sizeof path, "%s/export", test_dir());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    assert_true(fd >= 0);
    int64_t tries = 0;
    assert_ok_e(export_to(&a, fd, 0, &(bool){ 0 }, &whole, &e), e);
    assert_true(whole.blocks > 2 && whole.states > 0 && whole.pos == whole.tokens);
    for (int64_t n = 1; reached; n++, tries++) {
        int rc = export_to(&a, fd, n, &reached, &rep, &e);
        if (rc < 0) assert_int_equal(rc, DM_ENOMEM);
        else assert_int_equal(rep.tokens, whole.tokens);
    }
    assert_true(tries > 20);
    assert_ok_e(export_to(&a, fd, 0, &(bool){ 0 }, &rep, &e), e);
    assert_memory_equal(&rep, &whole, sizeof rep);

    tries = 0;
    reached = true;
    for (int64_t n = 1; reached; n++, tries++) {
        char name[32];
        snprintf(name, sizeof name, "receiver%lld", (long long)n);
        rig_open(&b, name, &(rig_opts){ .no_sandbox = true, .weights = 1 });
        int rc = import_to(&b, fd, n, &reached, &rep, &e);
        if (rc < 0) {
            assert_int_equal(rc, DM_ENOMEM);
            assert_int_equal(events_in(b.j), 0);
            assert_ok_e(import_to(&b, fd, 0, &(bool){ 0 }, &rep, &e), e);
        }
        assert_int_equal(events_in(b.j), whole.events);
        rig_says(&b, "And on.");
        rig_resume(&b, id, NULL);
        const json_t *turn = json_array_get(json_object_get(rig_send(&b, "Go on."), "turns"), 0);
        if (rep.pos == whole.pos) assert_int_equal(json_integer_value(json_object_get(turn, "restored_tokens")), whole.tokens);
        rig_close(&b);
    }
    assert_true(tries > 20);
    close(fd);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(whatever_allocation_fails) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
