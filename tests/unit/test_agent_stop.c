/* Stop strings and logprobs, as a client sees them: the scripted model behind the whole host. */
#include "tests/lib/agent_rig.h"

#include <math.h>

static const char *const stops[] = { "STOP", "\xE2\x88\x9E halt" };

static void start(rig *r, const char *name, const rig_opts *o, int logprobs)
{
    rig_open(r, name, o);
    dm_session_opts so = rig_session_opts(r);
    so.stop = stops;
    so.nstop = DM_COUNT(stops);
    so.logprobs = logprobs >= 0;
    so.top_logprobs = logprobs > 0 ? logprobs : 0;
    rig_create(r, &so);
}

static const char *const after[] = { "STOP and more", "STOP", "ST\xE2\x88\x9E halt!" };
static const char *const shown[] = { "One, two, ", "One, two, ", "One, two, ST" };
static const char *const found[] = { "STOP", "STOP", "\xE2\x88\x9E halt" };

static void a_reply_ends_before_the_string_and_the_result_names_it(void **state)
{
    (void)state;
    for (size_t i = 0; i < DM_COUNT(after); i++) {
        rig r;
        char name[16], text[100];
        snprintf(name, sizeof name, "stop%zu", i);
        start(&r, name, NULL, -1);
        snprintf(text, sizeof text, "One, two, %s", after[i]);
        rig_says(&r, text);
        const json_t *res = rig_send(&r, "Count.");
        assert_subtype(res, "success");
        assert_string_equal(str_of(res, "result"), shown[i]);
        assert_string_equal(str_of(res, "stop_reason"), "stop_sequence");
        assert_string_equal(str_of(res, "stop_sequence"), found[i]);
        assert_string_equal(str_of(turn_of(res, 0), "end"), "stop_sequence");
        /* The session goes on as behind any reply, without a token computed twice. */
        rig_says(&r, "Three.");
        res = rig_send(&r, "And?");
        assert_string_equal(str_of(res, "result"), "Three.");
        assert_string_equal(str_of(res, "stop_reason"), "end_turn");
        assert_null(json_object_get(res, "stop_sequence"));
        assert_int_equal(int_of(turn_of(res, 0), "prefilled_tokens"), int_of(turn_of(res, 0), "new_tokens"));
        rig_close(&r);
    }
}

static void the_beginning_of_a_string_is_shown_when_nothing_comes_of_it(void **state)
{
    (void)state;
    rig r;
    start(&r, "half", NULL, -1);
    rig_says(&r, "Do not STO");
    const json_t *res = rig_send(&r, "Go.");
    assert_string_equal(str_of(res, "result"), "Do not STO");
    assert_string_equal(str_of(res, "stop_reason"), "end_turn");
    rig_close(&r);
}

static void reasoning_and_arguments_are_not_looked_at(void **state)
{
    (void)state;
    rig r;
    start(&r, "data", &(rig_opts){ .mode = DM_THINKING }, -1);
    rig_says(&r, "I may STOP here.</think>ST" CALLS(BASH("echo STOP")));
    rig_says(&r, "No STOP yet.</think>Done.STOP now.");
    const json_t *res = rig_send(&r, "Go.");
    assert_subtype(res, "success");
    assert_int_equal(count_results(&r), 1);
    assert_non_null(strstr(result_text(&r, 0), "STOP"));
    assert_string_equal(str_of(res, "result"), "Done.");
    assert_string_equal(str_of(res, "stop_reason"), "stop_sequence");
    rig_close(&r);
}

static void a_call_behind_the_string_is_never_made(void **state)
{
    (void)state;
    rig r;
    start(&r, "call", NULL, -1);
    rig_says(&r, "Wait. STOP" CALLS(BASH("echo no > made")));
    const json_t *res = rig_send(&r, "Go.");
    assert_string_equal(str_of(res, "result"), "Wait. ");
    assert_string_equal(str_of(res, "stop_reason"), "stop_sequence");
    assert_int_equal(count_results(&r), 0);
    assert_int_equal(lines_of(&r, "made"), 0);
    rig_close(&r);
}

static void a_bad_string_is_refused_before_anything_is_journaled(void **state)
{
    (void)state;
    rig r;
    dm_err e = { 0 };
    static const char *const bad[] = { "fine", "" };
    rig_open(&r, "bad", NULL);
    dm_session_opts so = rig_session_opts(&r);
    so.stop = bad;
    so.nstop = 2;
    assert_err(DM_EINVAL, dm_session_create(r.h, &so, &r.s, &e));
    assert_non_null(strstr(e.text, "stop string 2"));
    rig_close(&r);
}

static void each_token_is_told_with_its_logarithm(void **state)
{
    (void)state;
    enum { TOP = 3 };
    rig r;
    start(&r, "logprobs", NULL, TOP);
    rig_says(&r, "Gr\xC3\xBC\xC3\x9F dich! \xF0\x9F\x90\xAD");
    const json_t *res = rig_send(&r, "Greet.");
    dm_buf text = { 0 };
    size_t k, tokens = 0;
    json_t *ev;
    json_array_foreach(r.events, k, ev)
    {
        if (strcmp(str_of(ev, "type"), "token")) continue;
        tokens++;
        size_t i;
        json_t *b, *top = json_object_get(ev, "top_logprobs");
        bool eos = int_of(ev, "id") == dm_tok_special(r.tok, "<｜end▁of▁sentence｜>");
        if (!eos)
            json_array_foreach(json_object_get(ev, "bytes"), i, b) dm_buf_byte(&text, (uint8_t)json_integer_value(b));
        assert_true(json_real_value(json_object_get(ev, "logprob")) <= 0);
        assert_int_equal(json_array_size(top), TOP);
        /* The scripted model is sure of what it says. */
        assert_int_equal(int_of(json_array_get(top, 0), "id"), int_of(ev, "id"));
        for (int t = 1; t < TOP; t++) {
            json_t *a = json_object_get(json_array_get(top, (size_t)t - 1), "logprob"), *c = json_object_get(json_array_get(top, (size_t)t), "logprob");
            assert_true(json_is_null(c) || json_real_value(a) >= json_real_value(c));
        }
    }
    assert_int_equal(tokens, int_of(turn_of(res, 0), "decoded_tokens"));
    assert_string_equal(dm_buf_cstr(&text), str_of(res, "result"));
    dm_buf_free(&text);
    rig_close(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_reply_ends_before_the_string_and_the_result_names_it),
        cmocka_unit_test(the_beginning_of_a_string_is_shown_when_nothing_comes_of_it),
        cmocka_unit_test(reasoning_and_arguments_are_not_looked_at),
        cmocka_unit_test(a_call_behind_the_string_is_never_made),
        cmocka_unit_test(a_bad_string_is_refused_before_anything_is_journaled),
        cmocka_unit_test(each_token_is_told_with_its_logarithm),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
