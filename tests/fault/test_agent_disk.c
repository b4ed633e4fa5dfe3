/* The journal's disk fails at the N-th commit, for every N: the run ends with a result, nothing is told to a client that
 * is not on disk, no effect is doubled, and the session goes on when the disk is back. */
#include "tests/lib/agent_rig.h"

static size_t starts(rig *r, const char *id)
{
    json_t *list = rig_journal(r, id);
    size_t n = count_events(list, "call", "state", "started");
    json_decref(list);
    return n;
}

static void a_failing_commit_ends_the_run_and_nothing_else(void **state)
{
    (void)state;
    int failed = 0;
    for (int n = 1; n < 60; n++) {
        rig r;
        dm_err e = { 0 };
        char name[32], fault[48], id[DM_SESSION_ID_CHARS + 1];
        snprintf(name, sizeof name, "disk%d", n);
        snprintf(fault, sizeof fault, "journal.commit:%d=fail", n);
        rig_open(&r, name, NULL);
        rig_says(&r, CALLS(BASH("echo 1 >> effects; echo one") READ("effects")));
        rig_says(&r, CALLS(BASH("echo 2 >> effects; echo two")));
        for (int k = 0; k < 4; k++) rig_says(&r, "Done.");
        rig_create(&r, NULL);
        memcpy(id, dm_session_id(r.s), sizeof id);
        assert_ok_e(dm_fault_arm(fault, &e), e);
        r.finished = false;
        int rc = dm_session_send(r.s, "Do it.", &e);
        bool clean = false;
        if (rc == 0) clean = !strcmp(str_of(rig_wait(&r), "subtype"), "success");
        else assert_int_equal(rc, DM_EIO);
        assert_ok(dm_fault_arm(NULL, NULL));
        failed += !clean;
        size_t told = count_results(&r);
        json_t *list = rig_journal(&r, id);
        size_t texts = 0, k;
        json_t *ev;
        json_array_foreach(list, k, ev) texts += !strcmp(str_of(ev, "type"), "call") && json_object_get(ev, "text") != NULL;
        assert_int_equal(told, texts); /* durable before visible */
        json_decref(list);
        assert_subtype(rig_send(&r, "And now?"), "success");
        assert_true(lines_of(&r, "effects") <= (int)starts(&r, id));
        rig_close(&r);
        if (clean) break;
    }
    assert_true(failed >= 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = { cmocka_unit_test(a_failing_commit_ends_the_run_and_nothing_else) };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
