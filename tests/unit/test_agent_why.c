/* What a turn says when it computed something again: the class, the first token, the price. */
#include "agent/agent_int.h"
#include "tests/lib/agent_rig.h"

static void each_class_comes_of_its_facts(void **state)
{
    (void)state;
    static const struct { why_find f; why_class w; } cases[] = {
        { { .pos = 700, .wanted = 700, .blocks = 2, .blocks_present = 2 }, WHY_NOT },
        { { .pos = 600, .wanted = 700, .blocks = 2, .blocks_present = 2 }, WHY_NOT }, /* new tokens: nothing was missed */
        { { .pos = 600, .wanted = 1700, .blocks = 2, .blocks_present = 6 }, WHY_NOT_DEEPER },
        { { .pos = 600, .wanted = 1700, .blocks = 2, .blocks_present = 2, .evicted = 1000 }, WHY_EVICTED },
        { { .pos = 0, .wanted = 1700, .blocks_present = 6 }, WHY_NO_STATE },
        { { .pos = 0, .wanted = 1700 }, WHY_NOTHING_STORED },
        { { .pos = 0, .wanted = 1700, .disk_full = true }, WHY_DISK_FULL },
        { { .pos = 0, .wanted = 1700, .over_budget = true }, WHY_OVER_BUDGET },
        { { .pos = 0, .wanted = 1700, .evicted = 1700, .disk_full = true }, WHY_EVICTED },
    };
    for (size_t i = 0; i < DM_COUNT(cases); i++)
        if (why_of_find(&cases[i].f) != cases[i].w) fail_msg("case %zu is %s, not %s", i, why_name(why_of_find(&cases[i].f)), why_name(cases[i].w));
    assert_int_equal(why_of_turn(WHY_NOTHING_STORED, "aa", "bb", "fast", "fast"), WHY_OTHER_ROOT);
    assert_int_equal(why_of_turn(WHY_NOTHING_STORED, "aa", "bb", "fast", "exact"), WHY_OTHER_NUMERICS);
    assert_int_equal(why_of_turn(WHY_NOTHING_STORED, "aa", "aa", "fast", "fast"), WHY_NOTHING_STORED);
    assert_int_equal(why_of_turn(WHY_NOTHING_STORED, "", "aa", "", "fast"), WHY_NOTHING_STORED); /* an old journal */
    assert_int_equal(why_of_turn(WHY_EVICTED, "aa", "bb", "fast", "exact"), WHY_EVICTED);
    for (int w = 0; w < WHY_COUNT; w++) {
        assert_true(strlen(why_name((why_class)w)) > 2 && strlen(why_text((why_class)w)) > 2);
        for (int v = 0; v < w; v++) assert_string_not_equal(why_name((why_class)w), why_name((why_class)v));
    }
}

static void one_turn(rig *r, char id[DM_SESSION_ID_CHARS + 1])
{
    rig_says(r, "One.");
    rig_create(r, NULL);
    const json_t *res = rig_send(r, "Say one.");
    assert_null(json_object_get(turn_of(res, 0), "why")); /* its whole prompt was new */
    memcpy(id, dm_session_id(r->s), DM_SESSION_ID_CHARS + 1);
}

/* All that was there is computed again, and the turn says so in its event, in the journal and to the client. */
static void check_again(rig *r, const char *id, const char *class)
{
    rig_says(r, "?");
    rig_says(r, "Two.");
    rig_resume(r, id, NULL);
    const json_t *t = turn_of(rig_send(r, "Say two."), 0), *w = json_object_get(t, "why");
    assert_string_equal(str_of(w, "class"), class);
    assert_int_equal(int_of(t, "replayed_tokens"), int_of(t, "prefilled_tokens") - int_of(t, "new_tokens"));
    assert_int_equal(int_of(w, "tokens"), int_of(t, "replayed_tokens"));
    assert_int_equal(int_of(w, "position"), 0);
    assert_string_equal(str_of(w, "before"), "");
    assert_string_equal(str_of(w, "token"), "<｜begin▁of▁sentence｜>");
    assert_non_null(strstr(str_of(w, "after"), "You"));
    assert_true(json_real_value(json_object_get(w, "seconds")) > 0);
    json_t *list = rig_journal(r, id), *ev;
    size_t k, found = 0;
    json_array_foreach(list, k, ev)
        if (!strcmp(str_of(ev, "type"), "turn") && json_object_get(ev, "why")) found += !strcmp(str_of(json_object_get(ev, "why"), "class"), class);
    assert_int_equal(found, 1);
    json_decref(list);
}

static void a_store_that_is_gone(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1], path[900];
    rig_open(&r, "gone", NULL);
    one_turn(&r, id);
    rig_close(&r);
    snprintf(path, sizeof path, "%s/kv-0-0", r.state);
    dm_kv_remove(path);
    rig_open_at(&r, NULL);
    check_again(&r, id, "nothing_stored");
    rig_close(&r);
}

static void no_store_at_all(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1];
    rig_open(&r, "none", NULL);
    one_turn(&r, id);
    rig_close(&r);
    rig_open_at(&r, &(rig_opts){ .no_kv = true });
    check_again(&r, id, "no_store");
    rig_close(&r);
}

static void another_numeric_path(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1];
    rig_open(&r, "numerics", NULL);
    one_turn(&r, id);
    rig_close(&r);
    rig_open_at(&r, &(rig_opts){ .numerics_id = "other" });
    check_again(&r, id, "other_numerics");
    rig_close(&r);
}

static void a_state_that_the_engine_refuses(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1];
    rig_open(&r, "refused", NULL);
    one_turn(&r, id);
    rig_close(&r);
    rig_open_at(&r, NULL);
    scripted_refuse_states(r.f, 8);
    check_again(&r, id, "state_refused");
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(each_class_comes_of_its_facts), cmocka_unit_test(a_store_that_is_gone),
        cmocka_unit_test(no_store_at_all),               cmocka_unit_test(another_numeric_path),
        cmocka_unit_test(a_state_that_the_engine_refuses),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
