/* Sessions over the scripted forward, with the real engine thread, store, journal, tools and sandbox. */
#include "tests/lib/agent_rig.h"

/* ---- what a turn costs (C5, K01) -------------------------------------------------------------------- */

static void check_turns(const json_t *result, size_t from, const char *restored_from)
{
    json_t *turns = json_object_get(result, "turns");
    for (size_t i = from; i < json_array_size(turns); i++) {
        const json_t *t = json_array_get(turns, i);
        assert_int_equal(int_of(t, "prefilled_tokens"), int_of(t, "new_tokens"));
        assert_true(int_of(t, "prefilled_tokens") < 120);
        assert_string_equal(str_of(t, "restored_from"), restored_from);
        if (strcmp(restored_from, "awake"))
            assert_int_equal(int_of(t, "restored_tokens"), int_of(t, "context_tokens") - int_of(t, "new_tokens"));
    }
}

static void long_run(rig *r, int calls)
{
    char path[64], call[400];
    for (int i = 0; i < calls; i++) {
        snprintf(path, sizeof path, "f%d.txt", i);
        put_file(r, path, "a line of text that is as long as a result in a test should be, about fifty tokens\n");
        snprintf(call, sizeof call, "I read the next one." CALLS(READ("f%d.txt")), i);
        rig_says(r, call);
    }
    rig_says(r, "All read.");
}

static void a_turn_costs_its_new_tokens_whatever_the_history(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "k01", NULL);
    long_run(&r, 19);
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Read all files.");
    assert_subtype(res, "success");
    assert_string_equal(str_of(res, "result"), "All read.");
    assert_int_equal(json_array_size(json_object_get(res, "turns")), 20);
    check_turns(res, 1, "ram");
    const json_t *u = json_object_get(res, "usage");
    assert_int_equal(int_of(u, "input_tokens"), int_of(u, "prefilled_tokens") + int_of(u, "cached_tokens"));
    assert_int_equal(int_of(u, "restored_tokens"), int_of(u, "cached_tokens"));
    scripted_counts c = scripted_count(r.f);
    assert_int_equal(c.refused, 0);
    assert_int_equal(c.state_loads, 19);
    assert_int_equal(c.rows, int_of(u, "prefilled_tokens") + int_of(u, "output_tokens"));
    rig_close(&r);
}

static void an_awake_session_needs_no_restore(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "awake", &(rig_opts){ .keep_awake = true });
    long_run(&r, 5);
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Read all files.");
    assert_subtype(res, "success");
    check_turns(res, 1, "awake");
    assert_int_equal(scripted_count(r.f).state_loads, 0);
    rig_close(&r);
}

static void without_a_store_a_wake_is_a_prefill_and_says_so(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "nokv", &(rig_opts){ .no_kv = true });
    long_run(&r, 2);
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Read all files.");
    assert_subtype(res, "success");
    const json_t *t = turn_of(res, 2);
    assert_int_equal(int_of(t, "prefilled_tokens"), int_of(t, "context_tokens"));
    assert_string_equal(str_of(t, "miss"), "no store");
    rig_close(&r);
}

static void asleep_or_awake_gives_the_same_timeline(void **state)
{
    (void)state;
    dm_ids ids[2] = { 0 };
    for (int k = 0; k < 2; k++) {
        rig r;
        rig_open(&r, k ? "same1" : "same0", &(rig_opts){ .keep_awake = k });
        long_run(&r, 4);
        rig_create(&r, NULL);
        assert_subtype(rig_send(&r, "Read all files."), "success");
        json_t *list = rig_journal(&r, dm_session_id(r.s));
        journal_ids(list, &ids[k]);
        json_decref(list);
        rig_close(&r);
    }
    assert_int_equal(ids[0].n, ids[1].n);
    assert_memory_equal(ids[0].p, ids[1].p, ids[0].n * sizeof(int32_t));
    dm_ids_free(&ids[0]);
    dm_ids_free(&ids[1]);
}

static void a_second_session_finds_the_system_block(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "anchor", NULL);
    rig_says(&r, "Hello.");
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Good morning to you.");
    int64_t first = int_of(turn_of(res, 0), "prefilled_tokens");
    assert_string_equal(str_of(turn_of(res, 0), "restored_from"), "none");
    rig_close_session(&r);
    rig_create(&r, NULL);
    res = rig_send(&r, "Quite another request!");
    const json_t *t = turn_of(res, 0);
    assert_string_equal(str_of(t, "restored_from"), "ram");
    assert_true(int_of(t, "prefilled_tokens") < 40);
    assert_true(int_of(t, "restored_tokens") > first - 40);
    assert_int_equal(scripted_count(r.f).refused, 0);
    rig_close(&r);
}

static void a_prompt_that_is_stored_whole_is_sampled_at_once(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "k15", NULL);
    rig_says(&r, "The same answer.");
    rig_create(&r, NULL);
    rig_send(&r, "The same question.");
    rig_close_session(&r);
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "The same question.");
    assert_string_equal(str_of(res, "result"), "The same answer.");
    assert_int_equal(int_of(turn_of(res, 0), "prefilled_tokens"), 0);
    assert_int_equal(int_of(turn_of(res, 0), "restored_tokens"), int_of(turn_of(res, 0), "context_tokens"));
    rig_close(&r);
}

/* ---- the conversation ------------------------------------------------------------------------------------ */

static void the_timeline_is_what_the_template_would_write(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "template", NULL);
    put_file(&r, "a.txt", "alpha");
    rig_says(&r, "Look." CALLS(READ("a.txt")));
    rig_says(&r, "It says alpha.");
    rig_says(&r, "Bye.");
    rig_create(&r, NULL);
    assert_string_equal(str_of(rig_send(&r, "What is in a.txt?"), "result"), "It says alpha.");
    assert_string_equal(str_of(rig_send(&r, "Thanks."), "result"), "Bye.");
    json_t *list = rig_journal(&r, dm_session_id(r.s));
    char *text = journal_text(&r, list);
    const char *want = "<｜User｜>What is in a.txt?<｜Assistant｜></think>Look." CALLS(READ("a.txt")) "<｜end▁of▁sentence｜>"
                       "<｜User｜><tool_result>alpha</tool_result><｜Assistant｜></think>It says alpha.<｜end▁of▁sentence｜>"
                       "<｜User｜>Thanks.<｜Assistant｜></think>Bye.<｜end▁of▁sentence｜>";
    const char *from = strstr(text, "<｜User｜>");
    assert_non_null(from);
    assert_string_equal(from, want);
    dm_free(text);
    json_decref(list);
    rig_close(&r);
}

/* The embedded model was trained on one system block: agent.json must reach it unchanged, three blocks of 256. */
static void the_embedded_model_gets_its_768_tokens(void **state)
{
    (void)state;
    json_error_t err;
    json_t *agent = json_load_file(DM_SOURCE_DIR "/examples/models/tiny/agent.json", 0, &err);
    assert_non_null(agent);
    rig r;
    rig_open(&r, "tiny", &(rig_opts){ .system = str_of(agent, "system"), .tools = json_object_get(agent, "tools") });
    rig_says(&r, "Fine.");
    rig_create(&r, NULL);
    assert_subtype(rig_send(&r, "Hello."), "success");
    json_t *list = rig_journal(&r, dm_session_id(r.s));
    dm_ids ids = { 0 };
    journal_ids(list, &ids);
    size_t at = 0;
    while (at < ids.n && ids.p[at] != dm_tok_special(r.tok, "<｜User｜>")) at++;
    assert_int_equal(at, 768);
    dm_ids_free(&ids);
    json_decref(list);
    rig_close(&r);
    json_decref(agent);
}

static void a_session_goes_on_in_another_process_life(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1];
    rig_open(&r, "again", NULL);
    put_file(&r, "a.txt", "alpha");
    rig_says(&r, "Look." CALLS(READ("a.txt")));
    rig_says(&r, "It says alpha.");
    rig_create(&r, NULL);
    rig_send(&r, "What is in a.txt?");
    memcpy(id, dm_session_id(r.s), sizeof id);
    rig_close(&r);

    rig_open_at(&r, NULL);
    rig_says(&r, "?");
    rig_says(&r, "?");
    rig_says(&r, "Alpha, as I said.");
    rig_resume(&r, id, NULL);
    const json_t *res = rig_send(&r, "Once more?");
    assert_string_equal(str_of(res, "result"), "Alpha, as I said.");
    const json_t *t = turn_of(res, 0);
    assert_string_equal(str_of(t, "restored_from"), "disk");
    assert_int_equal(int_of(t, "prefilled_tokens"), int_of(t, "new_tokens"));
    assert_true(int_of(t, "new_tokens") < 30);
    assert_int_equal(scripted_count(r.f).refused, 0);
    rig_close(&r);
}

static void a_deleted_store_costs_a_prefill_only(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1], data[900];
    rig_open(&r, "gone", NULL);
    rig_says(&r, "One.");
    rig_create(&r, NULL);
    rig_send(&r, "Say one.");
    memcpy(id, dm_session_id(r.s), sizeof id);
    rig_close(&r);
    snprintf(data, sizeof data, "%s/kv-0-0/data.mdb", r.state);
    assert_int_equal(unlink(data), 0);
    rig_open_at(&r, NULL);
    rig_says(&r, "?");
    rig_says(&r, "Two.");
    rig_resume(&r, id, NULL);
    const json_t *res = rig_send(&r, "Say two.");
    assert_string_equal(str_of(res, "result"), "Two.");
    const json_t *t = turn_of(res, 0);
    assert_int_equal(int_of(t, "prefilled_tokens"), int_of(t, "context_tokens"));
    assert_string_equal(str_of(t, "miss"), "nothing stored");
    rig_close(&r);
}

/* ---- restores that do not work ------------------------------------------------------------------------------- */

static void a_refused_state_is_dropped_and_computed_again(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "refused", NULL);
    rig_says(&r, "One.");
    rig_says(&r, "Two.");
    rig_says(&r, "Three.");
    rig_create(&r, NULL);
    rig_send(&r, "Say one.");
    scripted_refuse_states(r.f, 1);
    const json_t *res = rig_send(&r, "Say two.");
    assert_string_equal(str_of(res, "result"), "Two.");
    assert_int_equal(int_of(turn_of(res, 0), "bad_restores"), 1);
    assert_true(int_of(turn_of(res, 0), "prefilled_tokens") > int_of(turn_of(res, 0), "new_tokens"));
    res = rig_send(&r, "Say three."); /* and it is not met again */
    assert_int_equal(int_of(turn_of(res, 0), "bad_restores"), 0);
    assert_int_equal(int_of(turn_of(res, 0), "prefilled_tokens"), int_of(turn_of(res, 0), "new_tokens"));
    rig_close(&r);
}

static void a_restore_that_fails_in_the_engine_is_not_tried_for_ever(void **state)
{
    (void)state;
    for (int failures = 1; failures <= 3; failures++) {
        rig r;
        char name[16];
        snprintf(name, sizeof name, "k17-%d", failures);
        rig_open(&r, name, NULL);
        rig_says(&r, "One.");
        rig_says(&r, "Two.");
        rig_create(&r, NULL);
        rig_send(&r, "Say one.");
        scripted_fail_restored(r.f, failures);
        const json_t *res = rig_send(&r, "Say two.");
        assert_subtype(res, "success");
        assert_string_equal(str_of(res, "result"), "Two.");
        assert_int_equal(int_of(turn_of(res, 0), "bad_restores"), failures < 2 ? failures : 2);
        rig_close(&r);
    }
}

/* ---- calls ---------------------------------------------------------------------------------------------------- */

static void wrong_calls_are_told_to_the_model(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "a12", NULL);
    put_file(&r, "a.txt", "alpha");
    rig_says(&r, CALLS(INVOKE("bash", STR("cmd", "ls")) INVOKE("read", STR("path", "a.txt") JSON("limit", "\"ten\"")) READ("a.txt")));
    rig_says(&r, "Done.");
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Go.");
    assert_subtype(res, "success");
    assert_int_equal(json_array_size(json_object_get(res, "tools")), 3);
    assert_true(json_is_true(json_object_get(tool_of(res, 0), "is_error")));
    assert_true(json_is_true(json_object_get(tool_of(res, 1), "is_error")));
    assert_false(json_is_true(json_object_get(tool_of(res, 2), "is_error")));
    assert_non_null(strstr(result_text(&r, 0), "command"));
    assert_non_null(strstr(result_text(&r, 1), "limit"));
    assert_string_equal(result_text(&r, 2), "alpha");
    rig_close(&r);
}

static void an_unknown_tool_is_told_to_the_model(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "unknown", NULL);
    rig_says(&r, CALLS(INVOKE("nosuch", STR("x", "1"))));
    rig_says(&r, "Then not.");
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Go.");
    assert_subtype(res, "success");
    if (json_array_size(json_object_get(res, "tools"))) { /* the parser may take it for text (T07) or hand it on */
        assert_non_null(strstr(result_text(&r, 0), "nosuch"));
        assert_string_equal(str_of(res, "result"), "Then not.");
    }
    rig_close(&r);
}

static void a_good_call_passes_the_grammar_unchanged(void **state)
{
    (void)state;
    for (int thinking = 0; thinking < 2; thinking++) {
        rig r;
        rig_open(&r, thinking ? "gram1" : "gram0", &(rig_opts){ .grammar = true, .mode = thinking ? DM_THINKING : DM_CHAT });
        put_file(&r, "a.txt", "alpha");
        dm_buf b = { 0 };
        dm_buf_printf(&b, "%sLook." CALLS(INVOKE("read", STR("path", "a.txt") JSON("limit", "5")) BASH("echo '<｜DSML｜' \\< 'x'")), thinking ? "Well.</think>" : "");
        rig_says(&r, dm_buf_cstr(&b));
        dm_buf_free(&b);
        rig_says(&r, thinking ? "So.</think>Alpha." : "Alpha.");
        rig_create(&r, NULL);
        const json_t *res = rig_send(&r, "Go.");
        assert_subtype(res, "success");
        assert_string_equal(str_of(res, "result"), "Alpha.");
        assert_int_equal(count_results(&r), 2);
        assert_string_equal(result_text(&r, 0), "alpha");
        rig_close(&r);
    }
}

static void the_grammar_lets_no_wrong_call_through(void **state)
{
    (void)state;
    static const char *const wrong[] = { CALLS(INVOKE("nosuch", STR("x", "1"))), CALLS(INVOKE("bash", STR("cmd", "ls"))),
                                         CALLS(INVOKE("read", STR("path", "a.txt") JSON("limit", "\"ten\""))), CALLS(INVOKE("bash", "")) };
    for (size_t i = 0; i < DM_COUNT(wrong); i++) {
        rig r;
        char name[24];
        snprintf(name, sizeof name, "gramw%zu", i);
        rig_open(&r, name, &(rig_opts){ .grammar = true });
        rig_says(&r, wrong[i]);
        dm_session_opts so = rig_session_opts(&r);
        so.max_tokens = 150;
        so.max_turns = 1;
        rig_create(&r, &so);
        rig_send(&r, "Go.");
        json_t *list = rig_journal(&r, dm_session_id(r.s));
        assert_int_equal(count_events(list, "call", "state", "failed"), 0);
        json_decref(list);
        rig_close(&r);
    }
}

static void two_writes_to_one_path_come_one_after_the_other(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "q52", NULL);
    rig_says(&r, CALLS(WRITE("n.txt", "one") INVOKE("edit", STR("path", "n.txt") STR("old", "one") STR("new", "two")) READ("n.txt")));
    rig_says(&r, "Done.");
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Go.");
    assert_subtype(res, "success");
    assert_string_equal(result_text(&r, 2), "two");
    rig_close(&r);
}

static void a_batch_of_twenty_gives_twenty_results_in_order(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "q53", NULL);
    dm_buf b = { 0 };
    char name[32], line[32];
    dm_buf_printf(&b, "\n\n" DSML("tool_calls") "\n");
    for (int i = 0; i < 20; i++) {
        snprintf(name, sizeof name, "f%d", i);
        snprintf(line, sizeof line, "content %d", i);
        put_file(&r, name, line);
        if (i % 3) dm_buf_printf(&b, READ("f%d"), i);
        else dm_buf_printf(&b, BASH("sleep 0.0%d; cat f%d"), 9 - i % 9, i);
    }
    dm_buf_printf(&b, END_DSML("tool_calls"));
    rig_says(&r, dm_buf_cstr(&b));
    rig_says(&r, "Done.");
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Go.");
    assert_subtype(res, "success");
    assert_int_equal(count_results(&r), 20);
    for (int i = 0; i < 20; i++) {
        snprintf(line, sizeof line, "content %d", i);
        assert_string_equal(result_text(&r, (size_t)i), line);
    }
    dm_buf_free(&b);
    rig_close(&r);
}

static void a_failing_call_leaves_its_siblings_alone(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "q23", NULL);
    put_file(&r, "a.txt", "alpha");
    rig_says(&r, CALLS(READ("a.txt") BASH("exit 3") BASH("echo fine")));
    rig_says(&r, "Done.");
    rig_create(&r, NULL);
    assert_subtype(rig_send(&r, "Go."), "success");
    assert_string_equal(result_text(&r, 0), "alpha");
    assert_string_equal(result_text(&r, 2), "fine");
    rig_close(&r);
}

static void binary_output_leaves_the_session_usable(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "a06", NULL);
    rig_says(&r, CALLS(BASH("printf 'a\\0b\\033[31mred\\033[0m\\377c'")));
    rig_says(&r, "Odd.");
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Go.");
    assert_subtype(res, "success");
    const char *text = result_text(&r, 0);
    assert_true(dm_utf8_valid(text, strlen(text)));
    assert_null(strchr(text, '\033'));
    assert_non_null(strstr(text, "red"));
    rig_close(&r);
}

static void the_same_call_again_and_again_is_noticed_and_stopped(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "a13", NULL);
    put_file(&r, "a.txt", "alpha");
    for (int i = 0; i < 8; i++) rig_says(&r, CALLS(READ("a.txt")));
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Go.");
    assert_subtype(res, "error");
    assert_string_equal(str_of(res, "stop_reason"), "loop");
    assert_int_equal(json_array_size(json_object_get(res, "tools")), 6);
    assert_null(strstr(result_text(&r, 1), "notice"));
    assert_non_null(strstr(result_text(&r, 2), "notice"));
    scripted_cut(r.f, 6);
    rig_says(&r, "I stop reading.");
    assert_string_equal(str_of(rig_send(&r, "Do something else."), "result"), "I stop reading."); /* Q41 */
    rig_close(&r);
}

/* ---- limits -------------------------------------------------------------------------------------------------------- */

static void a_reply_cut_by_the_limit_runs_nothing(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "t24", NULL);
    rig_says(&r, CALLS(WRITE("a.md", "half of a text that is longer than the limit allows, and goes on, and on, and on, and on, and on")));
    dm_session_opts so = rig_session_opts(&r);
    so.max_tokens = 40;
    rig_create(&r, &so);
    const json_t *res = rig_send(&r, "Go.");
    assert_subtype(res, "error_budget");
    assert_string_equal(str_of(res, "stop_reason"), "max_tokens");
    assert_int_equal(dm_session_outcome(r.s), DM_EBUDGET);
    assert_int_equal(json_array_size(json_object_get(res, "tools")), 0);
    char *text = get_file(&r, "a.md");
    assert_string_equal(text, "");
    dm_free(text);
    rig_says(&r, "Short now.");
    res = rig_send(&r, "Shorter, please.");
    assert_string_equal(str_of(res, "result"), "Short now.");
    rig_close(&r);
}

static void an_endless_block_is_stopped(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "t26", NULL);
    dm_buf b = { 0 };
    dm_buf_str(&b, "\n\n" DSML("tool_calls") "\n" DSML("invoke name=\"bash\"") "\n" DSML("parameter name=\"command\" string=\"true\""));
    for (int i = 0; i < 3000; i++) dm_buf_str(&b, "0123456789 \n");
    rig_says(&r, dm_buf_cstr(&b));
    dm_buf_free(&b);
    dm_session_opts so = rig_session_opts(&r);
    so.max_tokens = 20000;
    rig_create(&r, &so);
    const json_t *res = rig_send(&r, "Go.");
    assert_subtype(res, "error_budget");
    assert_string_equal(str_of(res, "stop_reason"), "repeat");
    assert_true(int_of(turn_of(res, 0), "decoded_tokens") < 2000);
    assert_int_equal(json_array_size(json_object_get(res, "tools")), 0);
    rig_close(&r);
}

static void a_block_that_ends_open_is_retried_a_few_times(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "t27", NULL);
    const char *open = "\n\n" DSML("tool_calls") "\n" DSML("invoke name=\"bash\"") "\n" DSML("parameter name=\"command\" string=\"true\"") "ls";
    rig_says(&r, open);
    rig_says(&r, "Sorry, no call.");
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Go.");
    assert_subtype(res, "success");
    assert_string_equal(str_of(res, "result"), "Sorry, no call.");
    assert_int_equal(json_array_size(json_object_get(res, "turns")), 2);
    scripted_cut(r.f, 2);
    for (int i = 0; i < 6; i++) rig_says(&r, open);
    res = rig_send(&r, "Again.");
    assert_subtype(res, "error");
    assert_string_equal(str_of(res, "stop_reason"), "malformed");
    assert_int_equal(json_array_size(json_object_get(res, "turns")), 3);
    rig_close(&r);
}

static void a_full_context_says_so_and_both_numbers(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "ctx", &(rig_opts){ .ctx_tokens_max = 1500 });
    rig_says(&r, "Fine.");
    rig_create(&r, NULL);
    dm_buf b = { 0 };
    for (int i = 0; i < 3000; i++) dm_buf_printf(&b, "word%d ", i);
    const json_t *res = rig_send(&r, dm_buf_cstr(&b));
    assert_subtype(res, "error");
    assert_string_equal(str_of(res, "stop_reason"), "context");
    assert_non_null(strstr(str_of(res, "result"), "1500"));
    assert_int_equal(dm_session_outcome(r.s), DM_ECONTEXT);
    dm_buf_free(&b);
    rig_close(&r);
}

static void the_turn_limit_stops_with_the_results_kept(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "turns", NULL);
    long_run(&r, 5);
    dm_session_opts so = rig_session_opts(&r);
    so.max_turns = 3;
    rig_create(&r, &so);
    const json_t *res = rig_send(&r, "Read all files.");
    assert_subtype(res, "error_max_turns");
    assert_int_equal(dm_session_outcome(r.s), DM_EBUDGET);
    assert_int_equal(int_of(res, "num_turns"), 3);
    assert_int_equal(count_results(&r), 3);
    res = rig_send(&r, NULL); /* three more turns are allowed, and the third is the answer */
    assert_int_equal(count_results(&r), 5);
    assert_subtype(res, "success");
    rig_close(&r);
}

static void on_first_content(rig *r, const dm_host_event *ev)
{
    if (ev->kind != DM_EV_CONTENT || r->ctx) return;
    r->ctx = r;
    dm_err e = { 0 };
    assert_ok_e(dm_session_send(r->s, "And this too.", &e), e);
}

static void a_message_that_comes_while_it_runs_is_read_next(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "q43", NULL);
    rig_says(&r, "First.");
    rig_says(&r, "Second.");
    r.on = on_first_content;
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Say first.");
    assert_string_equal(str_of(res, "result"), "Second.");
    assert_int_equal(int_of(res, "num_turns"), 2);
    rig_close(&r);
}

static void a_message_at_the_turn_limit_is_not_lost(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "q43b", NULL);
    rig_says(&r, "First.");
    rig_says(&r, "Second.");
    r.on = on_first_content;
    dm_session_opts so = rig_session_opts(&r);
    so.max_turns = 1;
    rig_create(&r, &so);
    assert_subtype(rig_send(&r, "Say first."), "error_max_turns");
    assert_string_equal(str_of(rig_send(&r, NULL), "result"), "Second.");
    rig_close(&r);
}

/* ---- interruption ---------------------------------------------------------------------------------------------------- */

static dm_host_event_kind stop_at;
static void interrupt_at(rig *r, const dm_host_event *ev)
{
    if (ev->kind == stop_at && !r->ctx) {
        r->ctx = r;
        dm_session_interrupt(r->s);
    }
}

static void an_interrupted_session_goes_on_from_everywhere(void **state)
{
    (void)state;
    static const dm_host_event_kind at[] = { DM_EV_INIT, DM_EV_PREFILL, DM_EV_REASONING, DM_EV_CONTENT, DM_EV_CALL, DM_EV_TOOL_START, DM_EV_TURN };
    for (size_t i = 0; i < DM_COUNT(at); i++) {
        rig r;
        char name[24];
        snprintf(name, sizeof name, "q39-%zu", i);
        rig_open(&r, name, &(rig_opts){ .mode = DM_THINKING });
        scripted_sleep_us(r.f, 100);
        rig_says(&r, "I think about it for quite a while, long enough to be stopped.</think>Now I look, and I also say a few words." CALLS(BASH("sleep 20")));
        rig_says(&r, "Good.</think>I go on.");
        stop_at = at[i];
        r.on = interrupt_at;
        rig_create(&r, NULL);
        const json_t *res = rig_send(&r, "Begin.");
        assert_string_equal(str_of(res, "stop_reason"), "interrupted");
        assert_int_equal(dm_session_outcome(r.s), DM_ECANCELED);
        assert_true(int_of(res, "duration_ms") < 10000); /* it did not wait for the tool */
        r.on = NULL;
        if (at[i] == DM_EV_INIT) scripted_cut(r.f, 0), rig_says(&r, "Good.</think>I go on.");
        res = rig_send(&r, "Go on.");
        assert_subtype(res, "success");
        assert_string_equal(str_of(res, "result"), "I go on.");
        assert_int_equal(scripted_count(r.f).refused, 0);
        rig_close(&r);
    }
}

/* ---- approvals -------------------------------------------------------------------------------------------------------- */

static void a_write_that_asks_pauses_and_goes_on_when_allowed(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1];
    rig_open(&r, "ask", NULL);
    put_file(&r, "a.txt", "alpha");
    rig_says(&r, CALLS(READ("a.txt") WRITE("b.txt", "beta\n")));
    rig_says(&r, "Written.");
    dm_session_opts so = rig_session_opts(&r);
    so.ask = true;
    rig_create(&r, &so);
    memcpy(id, dm_session_id(r.s), sizeof id);
    const json_t *res = rig_send(&r, "Go.");
    assert_subtype(res, "paused");
    assert_int_equal(dm_session_outcome(r.s), DM_EPAUSED);
    json_t *pending = json_object_get(res, "pending");
    assert_int_equal(json_array_size(pending), 1);
    assert_string_equal(str_of(json_array_get(pending, 0), "name"), "write");
    assert_string_equal(str_of(json_object_get(json_array_get(pending, 0), "args"), "path"), "b.txt");
    assert_int_equal(lines_of(&r, "b.txt"), 0);
    rig_close(&r); /* days later, elsewhere */

    rig_open_at(&r, NULL);
    rig_says(&r, "?");
    rig_says(&r, "Written.");
    so = rig_session_opts(&r);
    so.ask = true;
    rig_resume(&r, id, &so);
    assert_subtype(rig_send(&r, NULL), "paused"); /* asked again, not forgotten */
    rig_close_session(&r);
    so.yes = true;
    rig_resume(&r, id, &so);
    res = rig_send(&r, NULL);
    assert_subtype(res, "success");
    assert_string_equal(str_of(res, "result"), "Written.");
    assert_int_equal(lines_of(&r, "b.txt"), 1);
    rig_close(&r);
}

static bool answer_with;
static void answer_it(rig *r, const dm_host_event *ev)
{
    if (ev->kind != DM_EV_APPROVAL) return;
    dm_err e = { 0 };
    const char *id = str_of(ev->json, "call_id");
    assert_ok_e(dm_session_answer(r->s, id, answer_with, &e), e);
    assert_err(DM_ESTATE, dm_session_answer(r->s, id, true, &e)); /* Q36: the second answer says so */
    assert_non_null(strstr(e.text, "already"));
    assert_err(DM_ENOENT, dm_session_answer(r->s, "call_none", true, &e));
}

static void a_person_allows_or_denies(void **state)
{
    (void)state;
    for (int k = 0; k < 2; k++) {
        rig r;
        rig_open(&r, k ? "allow" : "deny", NULL);
        rig_says(&r, CALLS(WRITE("b.txt", "beta\n")));
        rig_says(&r, "Understood.");
        answer_with = k;
        r.on = answer_it;
        dm_session_opts so = rig_session_opts(&r);
        so.ask = so.interactive = true;
        rig_create(&r, &so);
        const json_t *res = rig_send(&r, "Go.");
        assert_subtype(res, "success");
        assert_int_equal(lines_of(&r, "b.txt"), k);
        if (!k) assert_non_null(strstr(result_text(&r, 0), "did not allow"));
        rig_close(&r);
    }
}

static void a_message_instead_of_an_answer_gives_the_call_up(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "instead", NULL);
    rig_says(&r, CALLS(WRITE("b.txt", "beta\n")));
    rig_says(&r, "As you like.");
    dm_session_opts so = rig_session_opts(&r);
    so.ask = true;
    rig_create(&r, &so);
    assert_subtype(rig_send(&r, "Go."), "paused");
    const json_t *res = rig_send(&r, "No, leave it.");
    assert_subtype(res, "success");
    assert_string_equal(str_of(res, "result"), "As you like.");
    assert_int_equal(lines_of(&r, "b.txt"), 0);
    json_t *list = rig_journal(&r, dm_session_id(r.s));
    char *text = journal_text(&r, list);
    assert_non_null(strstr(text, "not approved")); /* the model knows why there is no result (A09) */
    dm_free(text);
    json_decref(list);
    rig_close(&r);
}

static void what_the_sandbox_does_not_hold_asks(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "nobox", &(rig_opts){ .no_sandbox = true });
    rig_says(&r, CALLS(WRITE("b.txt", "beta\n")));
    rig_create(&r, NULL);
    assert_subtype(rig_send(&r, "Go."), "paused");
    assert_int_equal(lines_of(&r, "b.txt"), 0);
    rig_close(&r);
}

/* ---- belonging ------------------------------------------------------------------------------------------------------------ */

static void a_session_belongs_to_its_weights(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1];
    rig_open(&r, "foreign", NULL);
    rig_says(&r, "One.");
    rig_create(&r, NULL);
    rig_send(&r, "Say one.");
    memcpy(id, dm_session_id(r.s), sizeof id);
    rig_close(&r);

    dm_err e = { 0 };
    rig_open_at(&r, &(rig_opts){ .weights = 7 });
    dm_session_opts so = rig_session_opts(&r);
    assert_err(DM_EFOREIGN, dm_session_resume(r.h, id, &so, &r.s, &e));
    assert_non_null(strstr(e.text, "weights"));
    rig_close(&r);

    rig_open_at(&r, &(rig_opts){ .numerics_id = "scripted/other" });
    rig_says(&r, "?");
    rig_says(&r, "Two.");
    rig_resume(&r, id, NULL);
    const json_t *res = rig_send(&r, "Say two.");
    assert_string_equal(str_of(res, "result"), "Two.");
    assert_int_equal(int_of(turn_of(res, 0), "restored_tokens"), 0);
    assert_int_equal(count_events(r.events, "system", "subtype", "notice"), 1);
    rig_close(&r);
}

static void a_newer_session_is_refused_and_left_alone(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "newer", NULL);
    char id[DM_SESSION_ID_CHARS + 1];
    dm_session_id_new(id);
    dm_err e = { 0 };
    json_t *ev = json_pack("{s:s, s:i, s:s}", "type", "created", "format", DM_JOURNAL_FORMAT_VERSION + 1, "id", id);
    assert_ok_e(dm_journal_append(r.j, id, &ev, 1, NULL, &e), e);
    json_decref(ev);
    dm_session_opts so = rig_session_opts(&r);
    assert_err(DM_EVERSION, dm_session_resume(r.h, id, &so, &r.s, &e));
    json_t *list = rig_journal(&r, id);
    assert_int_equal(json_array_size(list), 1);
    json_decref(list);
    rig_close(&r);
}

/* The sampler's state is journaled at every boundary, so a reply that was lost is sampled again as it was. */
static void a_lost_reply_is_sampled_again_as_it_was(void **state)
{
    (void)state;
    dm_ids ids[2] = { 0 };
    for (int k = 0; k < 2; k++) {
        rig r;
        dm_err e = { 0 };
        rig_open(&r, k ? "rng1" : "rng0", &(rig_opts){ .sampling = { .temperature = 1, .top_p = 1, .seed = 42 } });
        dm_session_opts so = rig_session_opts(&r);
        so.max_tokens = 24;
        rig_create(&r, &so);
        rig_send(&r, "One.");
        if (k) assert_ok_e(dm_fault_arm("journal.commit:3=fail", &e), e); /* message, prompt, reply */
        assert_subtype(rig_send(&r, "Two."), k ? "error" : "error_budget");
        assert_ok(dm_fault_arm(NULL, NULL));
        if (k) assert_subtype(rig_send(&r, NULL), "error_budget");
        json_t *list = rig_journal(&r, dm_session_id(r.s));
        journal_ids(list, &ids[k]);
        json_decref(list);
        rig_close(&r);
    }
    assert_int_equal(ids[0].n, ids[1].n);
    assert_memory_equal(ids[0].p, ids[1].p, ids[0].n * sizeof(int32_t));
    dm_ids_free(&ids[0]);
    dm_ids_free(&ids[1]);
}

static void a_context_that_fills_up_in_a_block_runs_nothing(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "t25", &(rig_opts){ .ctx_tokens_max = 1500 });
    dm_buf b = { 0 };
    dm_buf_str(&b, "\n\n" DSML("tool_calls") "\n" DSML("invoke name=\"bash\"") "\n" DSML("parameter name=\"command\" string=\"true\""));
    for (int i = 0; i < 300; i++) dm_buf_printf(&b, "echo %d\n", i * 7919);
    rig_says(&r, dm_buf_cstr(&b));
    dm_buf_free(&b);
    rig_create(&r, NULL);
    const json_t *res = rig_send(&r, "Go.");
    assert_subtype(res, "error");
    assert_string_equal(str_of(res, "stop_reason"), "context");
    assert_non_null(strstr(str_of(res, "result"), "1500"));
    assert_int_equal(json_array_size(json_object_get(res, "tools")), 0);
    rig_close_session(&r);
    scripted_cut(r.f, 0);
    rig_says(&r, "Fine.");
    rig_create(&r, NULL); /* the engine serves others */
    assert_subtype(rig_send(&r, "Short."), "success");
    rig_close(&r);
}

static void a_session_keeps_its_own_system_text(void **state)
{
    (void)state;
    rig r;
    char id[DM_SESSION_ID_CHARS + 1];
    rig_open(&r, "pinned", NULL);
    rig_says(&r, "One.");
    rig_create(&r, NULL);
    rig_send(&r, "Say one.");
    memcpy(id, dm_session_id(r.s), sizeof id);
    rig_close(&r);
    rig_open_at(&r, &(rig_opts){ .system = "A new text in a new version." });
    rig_says(&r, "?");
    rig_says(&r, "Two.");
    rig_resume(&r, id, NULL);
    const json_t *res = rig_send(&r, "Say two.");
    assert_int_equal(int_of(turn_of(res, 0), "prefilled_tokens"), int_of(turn_of(res, 0), "new_tokens"));
    rig_close(&r);
}

static void a_session_that_runs_elsewhere_is_busy(void **state)
{
    (void)state;
    rig r;
    rig_open(&r, "busy", NULL);
    rig_create(&r, NULL);
    dm_err e = { 0 };
    dm_session *other = NULL;
    dm_session_opts so = rig_session_opts(&r);
    assert_err(DM_EBUSY, dm_session_resume(r.h, dm_session_id(r.s), &so, &other, &e));
    assert_err(DM_ENOENT, dm_session_resume(r.h, "0000000000000000000000ZZZZ", &so, &other, &e));
    assert_err(DM_EINVAL, dm_session_send(r.s, NULL, &e));
    rig_close(&r);
}

/* ---- several at once --------------------------------------------------------------------------------------------------------- */

static size_t by_name(void *ctx, const int32_t *ids, int64_t n, size_t k)
{
    /* Sessions say their number as the first token behind the first user marker. */
    int32_t *names = ctx;
    for (int64_t i = 0; i + 1 < n; i++)
        if (ids[i] == names[0]) return (ids[i + 1] == names[1] ? 0 : ids[i + 1] == names[2] ? 3 : 6) + k;
    return k;
}

typedef struct many { rig *r; int finished; json_t *results[3]; dm_session *s[3]; } many;
static void many_event(void *ctx, dm_session *s, const dm_host_event *ev)
{
    many *m = ctx;
    if (ev->kind != DM_EV_RESULT) return;
    for (int i = 0; i < 3; i++)
        if (m->s[i] == s) m->results[i] = json_deep_copy(ev->json);
    if (++m->finished == 3) uv_stop(&m->r->loop);
}

static void run_three(const char *name, int jobs_max)
{
    rig r;
    rig_open(&r, name, &(rig_opts){ .jobs_max = jobs_max });
    scripted_sleep_us(r.f, 50);
    many m = { .r = &r };
    dm_err e = { 0 };
    int32_t names[4] = { dm_tok_special(r.tok, "<｜User｜>") };
    static const char *const words[] = { "A", "B", "C" };
    for (int i = 0; i < 3; i++) {
        dm_ids ids = { 0 };
        assert_ok_e(dm_tok_encode(r.tok, words[i], 1, false, &ids, &e), e);
        names[i + 1] = ids.p[0];
        dm_ids_free(&ids);
        char text[300];
        snprintf(text, sizeof text, CALLS(BASH("sleep 0.1; echo %s")), words[i]);
        rig_says(&r, text);
        snprintf(text, sizeof text, CALLS(WRITE("%s.txt", "x\n")), words[i]);
        rig_says(&r, text);
        snprintf(text, sizeof text, "I am %s.", words[i]);
        rig_says(&r, text);
    }
    scripted_pick(r.f, by_name, names);
    for (int i = 0; i < 3; i++) {
        dm_session_opts so = { .workspace = r.ws, .fn = many_event, .ctx = &m };
        assert_ok_e(dm_session_create(r.h, &so, &m.s[i], &e), e);
        assert_ok_e(dm_session_send(m.s[i], words[i], &e), e);
    }
    while (m.finished < 3) assert_true(uv_run(&r.loop, UV_RUN_DEFAULT) || m.finished == 3);
    for (int i = 0; i < 3; i++) {
        char want[32];
        snprintf(want, sizeof want, "I am %s.", words[i]);
        assert_subtype(m.results[i], "success");
        assert_string_equal(str_of(m.results[i], "result"), want);
        check_turns(m.results[i], 1, "ram");
        json_decref(m.results[i]);
        dm_session_close(m.s[i]);
    }
    assert_int_equal(scripted_count(r.f).refused, 0);
    rig_close(&r);
}

static void sessions_of_one_host_do_not_mix(void **state)
{
    (void)state;
    run_three("many", 0);
}

static void a_full_engine_queue_only_delays(void **state)
{
    (void)state;
    run_three("queue", 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_turn_costs_its_new_tokens_whatever_the_history),
        cmocka_unit_test(an_awake_session_needs_no_restore),
        cmocka_unit_test(without_a_store_a_wake_is_a_prefill_and_says_so),
        cmocka_unit_test(asleep_or_awake_gives_the_same_timeline),
        cmocka_unit_test(a_second_session_finds_the_system_block),
        cmocka_unit_test(a_prompt_that_is_stored_whole_is_sampled_at_once),
        cmocka_unit_test(the_timeline_is_what_the_template_would_write),
        cmocka_unit_test(the_embedded_model_gets_its_768_tokens),
        cmocka_unit_test(a_session_goes_on_in_another_process_life),
        cmocka_unit_test(a_deleted_store_costs_a_prefill_only),
        cmocka_unit_test(a_refused_state_is_dropped_and_computed_again),
        cmocka_unit_test(a_restore_that_fails_in_the_engine_is_not_tried_for_ever),
        cmocka_unit_test(wrong_calls_are_told_to_the_model),
        cmocka_unit_test(an_unknown_tool_is_told_to_the_model),
        cmocka_unit_test(a_good_call_passes_the_grammar_unchanged),
        cmocka_unit_test(the_grammar_lets_no_wrong_call_through),
        cmocka_unit_test(two_writes_to_one_path_come_one_after_the_other),
        cmocka_unit_test(a_batch_of_twenty_gives_twenty_results_in_order),
        cmocka_unit_test(a_failing_call_leaves_its_siblings_alone),
        cmocka_unit_test(binary_output_leaves_the_session_usable),
        cmocka_unit_test(the_same_call_again_and_again_is_noticed_and_stopped),
        cmocka_unit_test(a_reply_cut_by_the_limit_runs_nothing),
        cmocka_unit_test(an_endless_block_is_stopped),
        cmocka_unit_test(a_block_that_ends_open_is_retried_a_few_times),
        cmocka_unit_test(a_full_context_says_so_and_both_numbers),
        cmocka_unit_test(the_turn_limit_stops_with_the_results_kept),
        cmocka_unit_test(a_message_that_comes_while_it_runs_is_read_next),
        cmocka_unit_test(a_message_at_the_turn_limit_is_not_lost),
        cmocka_unit_test(an_interrupted_session_goes_on_from_everywhere),
        cmocka_unit_test(a_write_that_asks_pauses_and_goes_on_when_allowed),
        cmocka_unit_test(a_person_allows_or_denies),
        cmocka_unit_test(a_message_instead_of_an_answer_gives_the_call_up),
        cmocka_unit_test(what_the_sandbox_does_not_hold_asks),
        cmocka_unit_test(a_session_belongs_to_its_weights),
        cmocka_unit_test(a_newer_session_is_refused_and_left_alone),
        cmocka_unit_test(a_lost_reply_is_sampled_again_as_it_was),
        cmocka_unit_test(a_context_that_fills_up_in_a_block_runs_nothing),
        cmocka_unit_test(a_session_keeps_its_own_system_text),
        cmocka_unit_test(a_session_that_runs_elsewhere_is_busy),
        cmocka_unit_test(sessions_of_one_host_do_not_mix),
        cmocka_unit_test(a_full_engine_queue_only_delays),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
