/* Forks: what a new session takes over, what it costs, and what cannot be forked.  Incident 49. */
#include "tests/lib/agent_rig.h"

enum { FAN = 8 };

static void fork_of(rig *r, const char *id, int64_t turn, char out[DM_SESSION_ID_CHARS + 1])
{
    dm_err e = { 0 };
    assert_ok_e(dm_session_fork(r->j, id, turn, out, &e), e);
}

static void ids_of(rig *r, const char *id, dm_ids *out)
{
    json_t *list = rig_journal(r, id);
    journal_ids(list, out);
    json_decref(list);
}

/* Three messages, the second of which makes a call: turns 1, 2+3, 4. */
static void talk(rig *r, char id[DM_SESSION_ID_CHARS + 1])
{
    put_file(r, "a.txt", "alpha");
    rig_create(r, NULL);
    memcpy(id, dm_session_id(r->s), DM_SESSION_ID_CHARS + 1);
    rig_says(r, "First.");
    rig_send(r, "One, please, and a long message so that there is something to be stored. 0123456789 0123456789");
    rig_says(r, CALLS(INVOKE("read", STR("path", "a.txt")) BASH("echo once >> ran")));
    rig_says(r, "Second.");
    rig_send(r, "Two.");
    rig_says(r, "Third.");
    rig_send(r, "Three.");
    rig_close_session(r);
    assert_int_equal(lines_of(r, "ran"), 1);
}

static void eight_forks_cost_their_new_tokens_and_leave_the_parent_alone(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1], fork[FAN][DM_SESSION_ID_CHARS + 1];
    dm_ids parent = { 0 }, after = { 0 };
    rig_open(&r, "fan", NULL);
    talk(&r, id);
    ids_of(&r, id, &parent);
    for (int i = 0; i < FAN; i++) fork_of(&r, id, 0, fork[i]);
    dm_kv_stat before, st;
    dm_err e = { 0 };
    assert_ok_e(dm_kv_flush(r.kv, 30000, &e), e);
    dm_kv_stat_get(r.kv, &before);
    for (int i = 0; i < FAN; i++) {
        char said[40], asked[40];
        dm_ids ids = { 0 };
        rig_resume(&r, fork[i], NULL);
        snprintf(said, sizeof said, "Branch %d.", i);
        snprintf(asked, sizeof asked, "Go your way, %d.", i);
        scripted_cut(r.f, 4);
        rig_says(&r, said);
        const json_t *res = rig_send(&r, asked);
        assert_string_equal(str_of(res, "result"), said);
        json_t *t = turn_of(res, 0);
        assert_int_equal(int_of(t, "restored_tokens"), parent.n);
        assert_int_equal(int_of(t, "prefilled_tokens"), int_of(t, "new_tokens"));
        rig_close_session(&r);
        ids_of(&r, fork[i], &ids);
        assert_memory_equal(ids.p, parent.p, parent.n * sizeof *parent.p);
        dm_ids_free(&ids);
    }
    /* What they add are their own cuts: two states each, and no block again. */
    assert_ok_e(dm_kv_flush(r.kv, 30000, &e), e);
    dm_kv_stat_get(r.kv, &st);
    assert_int_equal(st.blocks, before.blocks);
    assert_in_range(st.states - before.states, FAN, 2 * FAN);
    ids_of(&r, id, &after);
    assert_int_equal(after.n, parent.n);
    dm_ids_free(&parent);
    dm_ids_free(&after);
    rig_close(&r);
}

static void a_fork_at_a_turn_has_its_results_and_nothing_behind_them(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1], fork[DM_SESSION_ID_CHARS + 1];
    rig_open(&r, "at", NULL);
    talk(&r, id);
    static const int order[] = { 4, 3, 2, 1 }; /* what a fork says replaces its parent's script from there on */
    for (size_t k = 0; k < DM_COUNT(order); k++) {
        int turn = order[k];
        fork_of(&r, id, turn, fork);
        json_t *list = rig_journal(&r, fork);
        const json_t *created = json_array_get(list, 0), *last = json_array_get(list, json_array_size(list) - 1);
        assert_string_equal(str_of(created, "forked_from"), id);
        assert_string_equal(str_of(created, "id"), fork);
        assert_int_equal(int_of(created, "forked_at"), turn);
        assert_string_equal(str_of(last, "type"), "result");
        assert_int_equal(count_events(list, "tokens", "what", "reply"), turn);
        assert_int_equal(count_events(list, "message", NULL, NULL), turn == 1 ? 1 : turn < 4 ? 2 : 3);
        assert_int_equal(count_events(list, "call", "state", "finished"), turn == 1 ? 0 : 2);
        json_decref(list);
        /* It goes on, and what the calls did is not done again. */
        rig_resume(&r, fork, NULL);
        const json_t *res;
        if (turn == 2) { /* told the same as its parent was, it says the same, and its whole prompt is there */
            res = rig_send(&r, NULL);
            assert_string_equal(str_of(res, "result"), "Second.");
            assert_int_equal(int_of(turn_of(res, 0), "prefilled_tokens"), 0);
        } else {
            scripted_cut(r.f, (size_t)turn);
            rig_says(&r, "Another end.");
            res = rig_send(&r, "And now?");
            assert_string_equal(str_of(res, "result"), "Another end.");
            assert_int_equal(int_of(turn_of(res, 0), "prefilled_tokens"), int_of(turn_of(res, 0), "new_tokens"));
        }
        assert_subtype(res, "success");
        rig_close_session(&r);
        assert_int_equal(lines_of(&r, "ran"), 1);
    }
    rig_close(&r);
}

static void what_cannot_be_forked_is_said_and_makes_no_session(void **state)
{
    (void)state;
    rig r;
    dm_err e = { 0 };
    char id[DM_SESSION_ID_CHARS + 1], fork[DM_SESSION_ID_CHARS + 1];
    rig_open(&r, "cannot", NULL);
    talk(&r, id);
    assert_err(DM_EINVAL, dm_session_fork(r.j, id, 5, fork, &e));
    assert_non_null(strstr(e.text, "has 4 turns"));
    assert_err(DM_EINVAL, dm_session_fork(r.j, id, -1, fork, &e));
    assert_err(DM_ENOENT, dm_session_fork(r.j, "00000000000000000000000000", 0, fork, &e));
    rig_resume(&r, id, NULL); /* open: it has a runner */
    assert_err(DM_EBUSY, dm_session_fork(r.j, id, 1, fork, &e));
    rig_close_session(&r);
    /* A call that waits for a person would run in both. */
    dm_session_opts so = rig_session_opts(&r);
    so.ask = true;
    rig_create(&r, &so);
    memcpy(id, dm_session_id(r.s), sizeof id);
    scripted_cut(r.f, 0);
    rig_says(&r, CALLS(BASH("echo twice >> ran")));
    assert_subtype(rig_send(&r, "Write."), "paused");
    rig_close_session(&r);
    assert_err(DM_EINVAL, dm_session_fork(r.j, id, 0, fork, &e));
    assert_non_null(strstr(e.text, "no result"));
    assert_int_equal(lines_of(&r, "ran"), 1);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(eight_forks_cost_their_new_tokens_and_leave_the_parent_alone),
        cmocka_unit_test(a_fork_at_a_turn_has_its_results_and_nothing_behind_them),
        cmocka_unit_test(what_cannot_be_forked_is_said_and_makes_no_session),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
