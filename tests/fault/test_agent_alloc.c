/* The N-th allocation of a run fails, for many N: the run ends with a result or an error, the next one works, and
 * nothing is left behind (the sanitizer looks). */
#include "tests/lib/agent_rig.h"

static int try_send(rig *r, dm_err *e)
{
    r->finished = false;
    return dm_session_send(r->s, "And now?", e);
}

static bool run_with_failure(int64_t n)
{
    rig r;
    dm_err e = { 0 };
    char name[32];
    snprintf(name, sizeof name, "alloc%lld", (long long)n);
    rig_open(&r, name, &(rig_opts){ .no_sandbox = true });
    put_file(&r, "a.txt", "alpha");
    rig_says(&r, "I look." CALLS(READ("a.txt") READ("b.txt")));
    for (int k = 0; k < 6; k++) rig_says(&r, "Done.");
    dm_session_opts so = rig_session_opts(&r);
    int64_t before = dm_fault_alloc_count();
    dm_fault_alloc_after(n);
    int rc = dm_session_create(r.h, &so, &r.s, &e);
    if (rc == 0) {
        r.finished = false;
        rc = dm_session_send(r.s, "Do it.", &e);
        if (rc == 0) rig_wait(&r);
    }
    bool reached = dm_fault_alloc_count() - before >= n;
    dm_fault_alloc_after(-1);
    if (rc < 0) assert_int_equal(rc, DM_ENOMEM);
    if (!r.s) rig_create(&r, NULL);
    rc = try_send(&r, &e);
    if (rc == DM_ESTATE) { /* the journal is ahead of what memory could hold: it is read again */
        char id[DM_SESSION_ID_CHARS + 1];
        memcpy(id, dm_session_id(r.s), sizeof id);
        rig_close_session(&r);
        rig_resume(&r, id, NULL);
        rc = try_send(&r, &e);
    }
    assert_ok_e(rc, e);
    if (strcmp(str_of(rig_wait(&r), "subtype"), "success")) fail_msg("allocation %lld: afterwards: %s", (long long)n, str_of(r.result, "result"));
    rig_close(&r);
    return reached;
}

static void a_failed_allocation_ends_the_run_and_nothing_else(void **state)
{
    (void)state;
    /* Every one of the first, then ever fewer: the same places come again and again. */
    int64_t runs = 0;
    for (int64_t n = 1; run_with_failure(n); n += test_full() || n < 60 ? 1 : 1 + n / 12) runs++;
    assert_true(runs > 60);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(a_failed_allocation_ends_the_run_and_nothing_else) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
