/* The field cases of tool-call parsing, T01 to T34.  Each is fed whole, byte by byte and in every two-way cut, and
 * where its markup is spelt as trained also as tokens; all must say the same. */
#include "test_engine_parser_kit.h"

typedef struct expect {
    const char *reasoning, *content, *calls;
    int errors;
    bool repaired; /* at least one repair is reported; none otherwise */
} expect;

enum { THINKING = 1, CUT = 2, NO_TOOLS = 4, NOT_AS_TOKENS = 8 };

static void compare(const kit *k, const expect *x, const char *how)
{
    const char *got[] = {dm_buf_cstr(&k->reasoning), dm_buf_cstr(&k->content), dm_buf_cstr(&k->calls)};
    const char *want[] = {x->reasoning ? x->reasoning : "", x->content ? x->content : "", x->calls ? x->calls : ""};
    for (int i = 0; i < 3; i++)
        if (strcmp(got[i], want[i]) != 0)
            fail_msg("%s, %s:\n got: %s\nwant: %s\nevents:%s", how, (const char *[]){"reasoning", "content", "calls"}[i], got[i],
                     want[i], dm_buf_cstr(&k->log));
    if (k->errors != x->errors) fail_msg("%s: %d errors, want %d; events:%s", how, k->errors, x->errors, dm_buf_cstr(&k->log));
    if ((k->repairs > 0) != x->repaired) fail_msg("%s: %d repairs; events:%s", how, k->repairs, dm_buf_cstr(&k->log));
    assert_false(k->broken);
}

static void check(const char *in, int flags, expect x)
{
    dm_parser_opts o = {.thinking = flags & THINKING, .markers_in_text = true, .tools = kit_tools,
                        .ntools = flags & NO_TOOLS ? 0 : DM_COUNT(kit_tools)};
    bool cut = flags & CUT;
    size_t n = strlen(in);
    kit whole, k;
    kit_pieces(&whole, &o, in, n, n, n, cut);
    compare(&whole, &x, "whole");
    kit_bytes(&k, &o, in, n, cut);
    kit_same(&whole, &k, "bytes", 0);
    kit_free(&k);
    for (size_t i = 1; i < n; i++) {
        kit_pieces(&k, &o, in, n, i, i, cut);
        kit_same(&whole, &k, "cut at", i);
        kit_free(&k);
    }
    if (!(flags & NOT_AS_TOKENS)) {
        kit_tokens(&k, &o, in, n, cut);
        compare(&k, &x, "tokens");
        kit_free(&k);
    }
    kit_free(&whole);
}

#define CASE(name) static void name(void **state)
#define CHECK(in, flags, ...) ((void)state, check(in, flags, (expect){__VA_ARGS__}))

CASE(t01_half_a_closing_tag_does_not_leak_into_arguments)
{
    CHECK(TC "\n" INV("bash") "\n" PS("command") "make 2>&1" P_ "\n" INV_ "\n" TC_, 0, .calls = "bash {\"command\": \"make 2>&1\"}\n");
}

CASE(t02_a_piece_may_end_on_the_lone_angle_bracket_of_a_closer)
{
    CHECK(TC "\n" INV("bash") "\n" PS("command") "if (a < b) x<" P_ "\n" INV_ "\n" TC_, 0,
          .calls = "bash {\"command\": \"if (a < b) x<\"}\n");
    CHECK(TC "\n" INV("bash") "\n" PS("command") "if (a < b) x" P_ "\n" INV_ "\n" TC_, 0,
          .calls = "bash {\"command\": \"if (a < b) x\"}\n");
}

CASE(t03_unknown_bytes_between_tags_are_skipped)
{
    CHECK(TC "\n" INV("bash") "\n?? " PS("command") "ls" P_ "\n" INV_ "\n" TC_, 0, .calls = "bash {\"command\": \"ls\"}\n", .repaired = true);
    CHECK(TC "\n" INV("bash") "\n" PS("command") "ls" P_ "\n" INV_ "\né<" INV("now") "\n\n" INV_ "\n" TC_, 0,
          .calls = "bash {\"command\": \"ls\"}\nnow {}\n", .repaired = true);
}

CASE(t04_a_call_without_arguments_has_an_empty_object)
{
    CHECK(TC "\n" INV("now") "\n\n" INV_ "\n" TC_, 0, .calls = "now {}\n");
    CHECK(TC "\n" INV("now") "\n" INV_ "\n" TC_, 0, .calls = "now {}\n");
    CHECK(TC INV("now") INV_ TC_, 0, .calls = "now {}\n");
    CHECK(TC "\n<" DSML "invoke name=\"now\"/>\n" TC_, 0, .calls = "now {}\n", .repaired = true);
}

CASE(t04_empty_arguments_are_sent_once)
{
    (void)state;
    const char *in = TC "\n" INV("now") "\n\n" INV_ "\n" TC_;
    dm_parser_opts o = {.markers_in_text = true, .tools = kit_tools, .ntools = DM_COUNT(kit_tools)};
    kit k;
    kit_bytes(&k, &o, in, strlen(in), false);
    assert_string_equal(dm_buf_cstr(&k.log), "\n[call 0] now\n[args 0] {}\n[end 0] {}");
    kit_free(&k);
}

CASE(t05_a_call_after_an_empty_call_keeps_its_arguments)
{
    CHECK(TC "\n" INV("now") "\n\n" INV_ "\n" INV("bash") "\n" PS("command") "ls" P_ "\n" INV_ "\n" TC_, 0,
          .calls = "now {}\nbash {\"command\": \"ls\"}\n");
}

#define READ(x) INV("read") "\n" PS("path") x P_ "\n" INV_ "\n"
CASE(t06_parallel_calls_have_their_own_index)
{
    const char *in = "Look.\n\n" TC "\n" READ("a") READ("b") READ("c") TC_;
    CHECK(in, 0, .content = "Look.", .calls = "read {\"path\": \"a\"}\nread {\"path\": \"b\"}\nread {\"path\": \"c\"}\n");
    dm_parser_opts o = {.markers_in_text = true, .tools = kit_tools, .ntools = DM_COUNT(kit_tools)};
    kit k;
    kit_bytes(&k, &o, in, strlen(in), false);
    assert_string_equal(dm_buf_cstr(&k.log), "\n[content 0] Look.\n[call 0] read\n[args 0] {\"path\": \"a\"}\n[end 0] {\"path\": \"a\"}"
                                             "\n[call 1] read\n[args 1] {\"path\": \"b\"}\n[end 1] {\"path\": \"b\"}"
                                             "\n[call 2] read\n[args 2] {\"path\": \"c\"}\n[end 2] {\"path\": \"c\"}");
    assert_true(k.closed);
    kit_free(&k);
}

CASE(t07_an_invoke_without_its_block_is_a_call_if_the_tool_is_known)
{
    CHECK("I'll look.\n\n" INV("bash") "\n" PS("command") "ls" P_ "\n" INV_ EOS, 0, .content = "I'll look.",
          .calls = "bash {\"command\": \"ls\"}\n", .repaired = true);
    CHECK("I'll look.\n\n" INV("nosuch") "\n" PS("command") "ls" P_ "\n" INV_ EOS, 0,
          .content = "I'll look.\n\n" INV("nosuch") "\n" PS("command") "ls" P_ "\n" INV_);
    CHECK(INV("bash") "\n" PS("command") "ls" P_ "\n" INV_ "\n" TC_ EOS, 0, .calls = "bash {\"command\": \"ls\"}\n", .repaired = true);
    CHECK(READ("a") READ("b") EOS, 0, .calls = "read {\"path\": \"a\"}\nread {\"path\": \"b\"}\n", .repaired = true);
}

CASE(t07_without_a_block_required_parameters_and_the_end_are_asked_for)
{
    CHECK("x\n" INV("write") "\n" PS("path") "a" P_ "\n" INV_ EOS, 0, .content = "x\n" INV("write") "\n" PS("path") "a" P_ "\n" INV_);
    CHECK(INV("bash") "\n" PS("command") "ls" P_ "\n" INV_ "\nis how it is written.", 0,
          .content = INV("bash") "\n" PS("command") "ls" P_ "\n" INV_ "\nis how it is written.");
}

CASE(t08_the_wrapper_may_be_misspelt)
{
    CHECK("<" DSML "toolcalls>\n" INV("bash") "\n" PS("command") "ls -la" P_ "\n" INV_ "\n</" DSML "toolcalls>", 0, .calls = C1_CALL,
          .repaired = true);
    CHECK("<" DSML "tool_calls\n" INV("bash") "\n" PS("command") "ls -la" P_ "\n" INV_ "\n</" DSML "tool_cals>", 0, .calls = C1_CALL,
          .repaired = true);
    CHECK("<" DSML "function_calls>\n" INV("bash") "\n" PS("command") "ls -la" P_ "\n" INV_ "\n</" DSML "function_calls>", 0,
          .calls = C1_CALL, .repaired = true);
}

CASE(t09_a_whole_invoke_counts_though_the_wrapper_is_never_closed)
{
    CHECK(TC "\n" INV("bash") "\n" PS("command") "ls" P_ "\n" INV_ "\n" EOS, 0, .calls = "bash {\"command\": \"ls\"}\n");
    CHECK(TC "\n" INV("bash") "\n" PS("command") "ls" P_ "\n" INV_, 0, .calls = "bash {\"command\": \"ls\"}\n");
}

CASE(t10_one_bad_sibling_does_not_sink_the_others)
{
    CHECK(TC "\n" INV("bash") "\n" PS("command") "ls" P_ "\n" INV_ "\n<" DSML "invoke>\n" PS("path") "a" P_ "\n" INV_ "\n" TC_, 0,
          .calls = "bash {\"command\": \"ls\"}\n", .errors = 1);
    CHECK(TC "\n" READ("a") INV("nosuch") "\n" PS("x") "1" P_ "\n" INV_ "\n" READ("b") TC_, 0,
          .calls = "read {\"path\": \"a\"}\nread {\"path\": \"b\"}\n", .errors = 1);
    CHECK(TC "\n" INV("nosuch") "\n" PS("x") "1" P_ "\n" INV_ "\n" READ("b") TC_, 0, .calls = "read {\"path\": \"b\"}\n", .errors = 1);
}

CASE(t11_a_second_closer_is_not_shown)
{
    CHECK("R</think>" C1 TC_ "</think>Done." EOS, THINKING, .reasoning = "R", .content = "Done.", .calls = C1_CALL, .repaired = true);
    CHECK(C1 INV_ TC_ INV_ TC_ EOS, 0, .calls = C1_CALL, .repaired = true);
    CHECK(C1 "</invoke>" TC_ "</invoke>" TC_, 0, .calls = C1_CALL, .repaired = true);
}

CASE(t12_closers_without_an_opener_end_nothing)
{
    CHECK("text\n" P_ "\n" INV_ "\n" TC_ "\nmore\n\n" C1, 0, .content = "text\n" P_ "\n" INV_ "\n" TC_ "\nmore", .calls = C1_CALL);
}

CASE(t13_doubled_bars_and_curly_quotes)
{
    CHECK("<｜" DSML "｜tool_calls>\n<｜" DSML "｜invoke name=“read”>\n<｜" DSML "｜parameter name=“path” string=“true”>a.txt</｜" DSML
          "｜parameter>\n</｜" DSML "｜invoke>\n</｜" DSML "｜tool_calls>",
          0, .calls = "read {\"path\": \"a.txt\"}\n", .repaired = true);
}

CASE(t14_ascii_bars)
{
    CHECK("<|DSML|tool_calls>\n<|DSML|invoke name=\"bash\">\n<|DSML|parameter name=\"command\" string=\"true\">ls -la</|DSML|parameter>\n"
          "</|DSML|invoke>\n</|DSML|tool_calls>",
          NOT_AS_TOKENS, .calls = C1_CALL, .repaired = true);
    CHECK("an answer with <|x|> and <|DSML|x>", 0, .content = "an answer with <|x|> and <|DSML|x>");
}

CASE(t15_a_misspelt_closer_ends_its_value)
{
    CHECK(TC "\n" INV("write") "\n" PS("path") "a.txt</" DSML "paramter>\n" PS("content") "<east> & Osaka" P_ "\n" INV_ "\n" TC_, 0,
          .calls = "write {\"path\": \"a.txt\", \"content\": \"<east> & Osaka\"}\n", .repaired = true);
    CHECK(TC "\n" INV("bash") "\n" PS("command") "echo </" DSML "paramter> is data here" P_ "\n" INV_ "\n" TC_, 0,
          .calls = "bash {\"command\": \"echo </" DSML "paramter> is data here\"}\n");
}

CASE(t16_nested_parameters_become_an_object)
{
    const char *want = "edit {\"path\": \"/t.c\", \"edits\": {\"old\": \"a\", \"new\": \"b\"}}\n";
#define OPEN(k) "<" DSML "parameter name=\"" k "\">"
    CHECK(TC "\n" INV("edit") "\n" OPEN("path") "/t.c" P_ "\n" OPEN("edits") "\n" PS("old") "a" P_ "\n" PS("new") "b" P_ "\n" INV_ "\n" TC_, 0,
          .calls = want, .repaired = true);
    CHECK(TC "\n" INV("edit") "\n" OPEN("path") "/t.c" P_ "\n" OPEN("edits") "\n" PS("old") "a" P_ "\n" PS("new") "b" P_ "\n" P_ "\n" INV_
             "\n" TC_,
          0, .calls = want, .repaired = true);
    CHECK(TC "\n" INV("edit") "\n" OPEN("path") "12" P_ "\n" OPEN("edits") "[1, 2]" P_ "\n" INV_ "\n" TC_, 0,
          .calls = "edit {\"path\": \"12\", \"edits\": [1, 2]}\n", .repaired = true);
}

CASE(t17_entities_are_text)
{
    CHECK(TC "\n" INV("bash") "\n" PS("command") "a &amp;&amp; b &lt; c" P_ "\n" INV_ "\n" TC_, 0,
          .calls = "bash {\"command\": \"a &amp;&amp; b &lt; c\"}\n");
}

#define RM TC "\n" INV("bash") "\n" PS("command") "rm -rf build" P_ "\n" INV_ "\n" TC_
CASE(t18_a_call_that_is_only_talked_about_in_thinking_is_not_run)
{
    CHECK("I could run " RM " but no.</think>\n\n" C1 EOS, THINKING, .reasoning = "I could run " RM " but no.", .calls = C1_CALL);
    CHECK("I could run " RM "</think>\n\n" C1 EOS, THINKING, .reasoning = "I could run " RM, .calls = C1_CALL);
    CHECK("I could run " RM "</think>No.", THINKING, .reasoning = "I could run " RM, .content = "No.");
    CHECK("Like " TC "\n" INV("bash") "\n" PS("command") "rm</think>No.", THINKING,
          .reasoning = "Like " TC "\n" INV("bash") "\n" PS("command") "rm", .content = "No.");
}

CASE(t19_a_call_at_the_end_of_open_thinking_counts)
{
    CHECK("Let me check.\n\n" C1 EOS, THINKING, .reasoning = "Let me check.", .calls = C1_CALL, .repaired = true);
    CHECK("Let me check.\n\n" C1 "\n</think>" EOS, THINKING, .reasoning = "Let me check.", .calls = C1_CALL, .repaired = true);
    CHECK("Let me check.\n\n" C1, THINKING | CUT, .reasoning = "Let me check.\n\n" C1); /* who knows what would follow */
}

CASE(t20_markup_that_is_quoted_stays_text)
{
    CHECK(TC "\n" INV("x") "\n", NO_TOOLS, .content = TC "\n" INV("x") "\n");
    CHECK(TC "\n<" DSML "invoke name=\"record {\nk: v" EOS, 0, .content = TC "\n<" DSML "invoke name=\"record {\nk: v");
    CHECK("Use " TC " to open and " TC_ " to close; " INV("NAME") " names a tool.", 0,
          .content = "Use " TC " to open and " TC_ " to close; " INV("NAME") " names a tool.");
}

CASE(t21_text_held_back_comes_out_at_the_end)
{
    CHECK("2 <" EOS, 0, .content = "2 <");
    CHECK("2 <", CUT, .content = "2 <");
    CHECK("2 <｜DS" EOS, 0, .content = "2 <｜DS");
    CHECK("2 <｜DS", CUT, .content = "2 <｜DS");
    CHECK("a \n", 0, .content = "a \n");
    CHECK("</thin", THINKING, .reasoning = "</thin");
}

#define BASH(body) TC "\n" INV("bash") "\n" body "\n" INV_ "\n" TC_
CASE(t22_arguments_are_taken_out_of_a_wrapper)
{
    const char *want = "bash {\"command\": \"ls\"}\n";
    CHECK(BASH(PJ("arguments") "{\"command\":\"ls\"}" P_), 0, .calls = want, .repaired = true);
    CHECK(BASH("{\"arguments\":{\"command\":\"ls\"}}"), 0, .calls = want, .repaired = true);
    CHECK(BASH(PJ("input") "{\"command\":\"ls\"}" P_), 0, .calls = want, .repaired = true);
    CHECK(BASH(PS("arguments") "ls" P_), 0, .calls = want, .repaired = true);
    CHECK(BASH(PS("arguments") "{\"command\":\"ls\"}" P_), 0, .calls = want, .repaired = true);
    CHECK(BASH("{\"command\":\"ls\"}"), 0, .calls = want, .repaired = true);
    CHECK(TC "\n" INV("own") "\n" PJ("arguments") "{\"a\": 1}" P_ "\n" INV_ "\n" TC_, 0, .calls = "own {\"arguments\": {\"a\": 1}}\n");
    CHECK(TC "\n" INV("read") "\n" PS("input") "x" P_ "\n" PS("path") "a" P_ "\n" INV_ "\n" TC_, 0,
          .calls = "read {\"input\": \"x\", \"path\": \"a\"}\n");
    CHECK(TC "\n" INV("free") "\n" PJ("input") "{\"a\": 1}" P_ "\n" INV_ "\n" TC_, 0, .calls = "free {\"input\": {\"a\": 1}}\n");
}

CASE(t22_tags_inside_the_strings_of_a_json_body_are_data)
{
    CHECK(BASH("{\"command\": \"echo " INV_ " \\\" " TC_ "\"}"), 0, .calls = "bash {\"command\": \"echo " INV_ " \\\" " TC_ "\"}\n",
          .repaired = true);
    CHECK(BASH("{\"command\": ls}"), 0, .content = BASH("{\"command\": ls}"), .errors = 1);
}

CASE(t23_types_follow_the_attribute)
{
    CHECK(TC "\n" INV("read") "\n" PS("path") "123" P_ "\n" PJ("limit") "ten" P_ "\n" INV_ "\n" TC_, 0,
          .calls = "read {\"path\": \"123\", \"limit\": \"ten\"}\n", .repaired = true);
    CHECK(TC "\n" INV("read") "\n" PS("path") "true" P_ "\n" PJ("limit") " 5 " P_ "\n" INV_ "\n" TC_, 0,
          .calls = "read {\"path\": \"true\", \"limit\": 5}\n");
    CHECK(TC "\n" INV("read") "\n" PJ("limit") "NaN" P_ "\n" INV_ "\n" TC_, 0, .calls = "read {\"limit\": \"NaN\"}\n", .repaired = true);
    CHECK(TC "\n" INV("read") "\n" PJ("limit") "{\"a\": 1, \"a\": [1e400]}" P_ "\n" INV_ "\n" TC_, 0,
          .calls = "read {\"limit\": \"{\\\"a\\\": 1, \\\"a\\\": [1e400]}\"}\n", .repaired = true);
}

CASE(t24_a_call_cut_by_the_limit_is_no_call)
{
    CHECK(TC "\n" INV("write") "\n" PS("path") "a.md" P_ "\n" PS("content") "half", CUT, .errors = 1);
    CHECK(TC "\n" INV("write") "\n" PS("path") "a.md" P_ "\n", CUT, .errors = 1);
    CHECK(TC "\n" INV("now") "\n\n" INV_ "\n" INV("write") "\n" PS("path") "a.md" P_ "\n" PS("content") "half", CUT, .calls = "now {}\n",
          .errors = 1);
    CHECK("Text " TC "\n", CUT, .content = "Text");
}

/* T25 is T24 for the parser: the context's edge is a limit. */

static void feed_endless(const char *line, bool thinking)
{
    dm_parser_opts o = {.thinking = thinking, .markers_in_text = true, .tools = kit_tools, .ntools = DM_COUNT(kit_tools), .call_bytes_max = 4096};
    kit k;
    dm_parser *p = kit_start(&k, &o);
    const char *open = TC "\n" INV("bash") "\n" PS("command");
    assert_ok(dm_parser_feed(p, open, strlen(open), false));
    for (int i = 0; i < 4096 && !dm_parser_block_closed(p); i++) assert_ok(dm_parser_feed(p, line, strlen(line), false));
    if (thinking) { /* it was talk */
        assert_int_equal(k.errors, 0);
        assert_false(dm_parser_block_closed(p));
        assert_true(k.reasoning.n > 4096);
    } else {
        assert_int_equal(k.errors, 1);
        assert_non_null(strstr(dm_parser_error(p, 0), "4096 bytes"));
        assert_true(dm_parser_block_closed(p));
        assert_true(k.log.n < 6000);
    }
    kit_end(&k, p, true);
    assert_int_equal(k.content.n + k.calls.n, 0);
    kit_free(&k);
}

CASE(t26_a_block_that_never_ends_is_ended_by_its_budget)
{
    (void)state;
    feed_endless("a", false);
    feed_endless("twelve bytes", false);
    feed_endless("é<｜", false);
    feed_endless("a", true);
}

CASE(t27_the_end_inside_an_open_call_runs_nothing_and_keeps_the_text)
{
    CHECK(TC "\n" INV("bash") "\n" PS("command") "ls" EOS, NOT_AS_TOKENS, .content = TC "\n" INV("bash") "\n" PS("command") "ls" EOS, .errors = 1);
    CHECK(TC "\n" INV("bash") "\n" PS("command") "ls", 0, .content = TC "\n" INV("bash") "\n" PS("command") "ls", .errors = 1);
    CHECK(TC "\n" INV("bash") "\n" PS("command") "ls" P_ "\n", 0, .content = TC "\n" INV("bash") "\n" PS("command") "ls" P_ "\n", .errors = 1);
}

CASE(t28_a_look_alike_attribute_is_not_the_name)
{
    const char *in = TC "\n<" DSML "invoke xname=\"bash\">\n<" DSML "parameter xname=\"command\" string=\"true\">pwd" P_ "\n" INV_ "\n" TC_;
    CHECK(in, 0, .content = in, .errors = 1, .repaired = true);
    CHECK(BASH("<" DSML "parameter xname=\"command\" string=\"true\">pwd" P_), 0,
          .content = BASH("<" DSML "parameter xname=\"command\" string=\"true\">pwd" P_), .errors = 1, .repaired = true);
}

CASE(t29_attributes_may_drift)
{
    CHECK(BASH("<" DSML "parameter string=\"true\"  name='command' >ls" P_), 0, .calls = "bash {\"command\": \"ls\"}\n", .repaired = true);
    CHECK(BASH("<" DSML "parameter name = command string=true>ls" P_), 0, .calls = "bash {\"command\": \"ls\"}\n", .repaired = true);
}

CASE(t30_a_parameter_given_twice_refuses_the_call)
{
    const char *in = TC "\n" INV("read") "\n" PS("path") "a" P_ "\n" PS("path") "b" P_ "\n" INV_ "\n" TC_;
    CHECK(in, 0, .content = in, .errors = 1);
    CHECK(TC "\n" READ("x") INV("read") "\n" PS("path") "a" P_ "\n" PS("path") "b" P_ "\n" INV_ "\n" READ("y") TC_, 0,
          .calls = "read {\"path\": \"x\"}\nread {\"path\": \"y\"}\n", .errors = 1);
}

CASE(t31_no_delta_holds_half_a_character)
{
    CHECK("é</think>ok 😀\n\n" TC "\n" INV("bash") "\n" PS("command") "echo 日本" P_ "\n" INV_ "\n" TC_, THINKING, .reasoning = "é",
          .content = "ok 😀", .calls = "bash {\"command\": \"echo 日本\"}\n");
}

CASE(t32_blanks_before_the_block_are_not_content)
{
    CHECK("Looking." C1, 0, .content = "Looking.", .calls = C1_CALL);
    CHECK("Looking.\n" C1, 0, .content = "Looking.", .calls = C1_CALL);
    CHECK("Looking.\n\n" C1, 0, .content = "Looking.", .calls = C1_CALL);
    CHECK("Looking.\n\n\n\n" C1, 0, .content = "Looking.", .calls = C1_CALL);
    CHECK("Looking.\n\n \n" C1, 0, .content = "Looking.", .calls = C1_CALL);
}

CASE(t33_the_spelling_of_v4_1_is_understood)
{
    CHECK("<" DSML " calls>\n<" DSML " invoke name=\"bash\">\n<" DSML " parameter name=\"command\" string=\"true\">ls</" DSML
          " parameter>\n</" DSML " invoke>\n</" DSML " calls>",
          0, .calls = "bash {\"command\": \"ls\"}\n", .repaired = true);
}

CASE(t34_markup_inside_a_value_is_data)
{
    CHECK(TC "\n" INV("write") "\n" PS("path") "p.c" P_ "\n" PS("content") "s = \"" TC "\"; t = \"" INV_ TC_ "\";" P_ "\n" INV_ "\n" TC_, 0,
          .calls = "write {\"path\": \"p.c\", \"content\": \"s = \\\"" TC "\\\"; t = \\\"" INV_ TC_ "\\\";\"}\n");
    CHECK(BASH(PS("command") "echo </think> " PS("x") " <|DSML|parameter name=\"a\"> </|DSML|parameter>" P_), 0,
          .calls = "bash {\"command\": \"echo </think> <" DSML "parameter name=\\\"x\\\" string=\\\"true\\\"> <|DSML|parameter name=\\\"a\\\"> "
                   "</|DSML|parameter>\"}\n");
}

CASE(q2_prose_about_the_format_is_no_call)
{
    const char *in = "A block starts with `" TC "` on its own line, then `" INV("NAME") "`,\nthen `" PS("KEY") "value" P_ "`, `" INV_ "` and `" TC_
                     "`.\n\nPlain <invoke name=\"bash\"> is not used.";
    CHECK(in, 0, .content = in);
    CHECK(in, NO_TOOLS, .content = in);
}

CASE(q3_an_unknown_tool_in_a_whole_block_is_a_tool_error)
{
    const char *in = TC "\n" INV("nosuch") "\n" PS("x") "1" P_ "\n" INV_ "\n" TC_;
    CHECK(in, 0, .content = in, .errors = 1);
    /* but in an answer that goes on it was an example */
    CHECK("Like this:\n" TC "\n" INV("nosuch") "\n" PS("x") "1" P_ "\n" INV_ "\n" TC_ "\nSee?", 0,
          .content = "Like this:\n" TC "\n" INV("nosuch") "\n" PS("x") "1" P_ "\n" INV_ "\n" TC_ "\nSee?");
}

CASE(plain_invokes_count_in_text_at_the_end_only)
{
    const char *in = "<invoke name=\"bash\">\n<parameter name=\"command\">ls</parameter>\n</invoke>";
    CHECK(in, NOT_AS_TOKENS, .calls = "bash {\"command\": \"ls\"}\n", .repaired = true);
    dm_parser_opts o = {.tools = kit_tools, .ntools = DM_COUNT(kit_tools)};
    kit k;
    kit_tokens(&k, &o, in, strlen(in), false);
    assert_string_equal(dm_buf_cstr(&k.content), in); /* made of ordinary tokens it is text */
    assert_int_equal(k.begun, 0);
    kit_free(&k);
    CHECK("<invoke name=\"bash\">\n<parameter name=\"command\">ls</parameter>\n</invoke>\nruns ls.", 0,
          .content = "<invoke name=\"bash\">\n<parameter name=\"command\">ls</parameter>\n</invoke>\nruns ls.");
    CHECK("inline <invoke name=\"bash\"><parameter name=\"command\">ls</parameter></invoke>", 0,
          .content = "inline <invoke name=\"bash\"><parameter name=\"command\">ls</parameter></invoke>");
}

CASE(missing_closers_inside_a_block_are_repaired)
{
    CHECK(TC "\n" INV("bash") "\n" PS("command") "ls" P_ "\n" TC_, 0, .calls = "bash {\"command\": \"ls\"}\n", .repaired = true);
    CHECK(TC "\n" INV("bash") "\n" PS("command") "ls" P_ "\n" INV("now") "\n\n" INV_ "\n" TC_, 0, .calls = "bash {\"command\": \"ls\"}\nnow {}\n",
          .repaired = true);
    CHECK(TC "\n" INV("bash") "\n" PS("command") "ls" P_ "\n" INV_ "\n</" DSML "tool_calls", 0, .calls = "bash {\"command\": \"ls\"}\n",
          .repaired = true);
}

CASE(a_self_closed_parameter_is_empty)
{
    CHECK(TC "\n" INV("bash") "\n<" DSML "parameter name=\"command\" string=\"true\"/>\n" INV_ "\n" TC_, 0, .calls = "bash {\"command\": \"\"}\n",
          .repaired = true);
    CHECK(BASH("<" DSML "parameter name=‘command’ string=“true”>ls" P_), 0, .calls = "bash {\"command\": \"ls\"}\n", .repaired = true);
}

CASE(invalid_bytes_become_replacement_characters_everywhere)
{
    CHECK("a\xff\xc3</think>b\xe2\x82" C1, THINKING, .reasoning = "a\uFFFD\uFFFD", .content = "b\uFFFD", .calls = C1_CALL);
    CHECK(BASH(PS("command") "x\xf0\x9f" P_), 0, .calls = "bash {\"command\": \"x\uFFFD\"}\n");
}

CASE(the_same_characters_made_of_ordinary_tokens_are_text)
{
    (void)state;
    dm_parser_opts o = {.thinking = true, .tools = kit_tools, .ntools = DM_COUNT(kit_tools)};
    const char *in = "a</think>b\n\n" C1 EOS;
    kit k;
    kit_bytes(&k, &o, in, strlen(in), false);
    assert_string_equal(dm_buf_cstr(&k.reasoning), in);
    assert_int_equal(k.content.n + k.calls.n, 0);
    kit_free(&k);
}

CASE(after_the_end_token_nothing_is_read)
{
    CHECK("a" EOS "b" C1, 0, .content = "a");
}

CASE(a_stray_end_of_thinking_token_is_dropped)
{
    (void)state;
    dm_parser_opts o = {.tools = kit_tools, .ntools = DM_COUNT(kit_tools)};
    kit k;
    kit_tokens(&k, &o, "a </think>b", strlen("a </think>b"), false);
    assert_string_equal(dm_buf_cstr(&k.content), "a b");
    assert_int_equal(k.repairs, 1);
    kit_free(&k);
}

CASE(a_bad_schema_is_refused_by_name)
{
    (void)state;
    dm_parser *p;
    dm_err e = {0};
    dm_parser_opts o = {.tools = (dm_parser_tool[]){{"good", "{}"}, {"odd", "[]"}}, .ntools = 2};
    assert_err(DM_EFORMAT, dm_parser_create(&p, &o, kit_event, NULL, &e));
    assert_non_null(strstr(e.text, "odd"));
    o.tools = (dm_parser_tool[]){{"good", "{}"}, {"bad", "{"}};
    assert_err(DM_EFORMAT, dm_parser_create(&p, &o, kit_event, NULL, &e));
    assert_non_null(strstr(e.text, "bad"));
    dm_parser_destroy(NULL);
}

int main(void)
{
#define T(x) cmocka_unit_test(x)
    const struct CMUnitTest tests[] = {
        T(t01_half_a_closing_tag_does_not_leak_into_arguments),
        T(t02_a_piece_may_end_on_the_lone_angle_bracket_of_a_closer),
        T(t03_unknown_bytes_between_tags_are_skipped),
        T(t04_a_call_without_arguments_has_an_empty_object),
        T(t04_empty_arguments_are_sent_once),
        T(t05_a_call_after_an_empty_call_keeps_its_arguments),
        T(t06_parallel_calls_have_their_own_index),
        T(t07_an_invoke_without_its_block_is_a_call_if_the_tool_is_known),
        T(t07_without_a_block_required_parameters_and_the_end_are_asked_for),
        T(t08_the_wrapper_may_be_misspelt),
        T(t09_a_whole_invoke_counts_though_the_wrapper_is_never_closed),
        T(t10_one_bad_sibling_does_not_sink_the_others),
        T(t11_a_second_closer_is_not_shown),
        T(t12_closers_without_an_opener_end_nothing),
        T(t13_doubled_bars_and_curly_quotes),
        T(t14_ascii_bars),
        T(t15_a_misspelt_closer_ends_its_value),
        T(t16_nested_parameters_become_an_object),
        T(t17_entities_are_text),
        T(t18_a_call_that_is_only_talked_about_in_thinking_is_not_run),
        T(t19_a_call_at_the_end_of_open_thinking_counts),
        T(t20_markup_that_is_quoted_stays_text),
        T(t21_text_held_back_comes_out_at_the_end),
        T(t22_arguments_are_taken_out_of_a_wrapper),
        T(t22_tags_inside_the_strings_of_a_json_body_are_data),
        T(t23_types_follow_the_attribute),
        T(t24_a_call_cut_by_the_limit_is_no_call),
        T(t26_a_block_that_never_ends_is_ended_by_its_budget),
        T(t27_the_end_inside_an_open_call_runs_nothing_and_keeps_the_text),
        T(t28_a_look_alike_attribute_is_not_the_name),
        T(t29_attributes_may_drift),
        T(t30_a_parameter_given_twice_refuses_the_call),
        T(t31_no_delta_holds_half_a_character),
        T(t32_blanks_before_the_block_are_not_content),
        T(t33_the_spelling_of_v4_1_is_understood),
        T(t34_markup_inside_a_value_is_data),
        T(q2_prose_about_the_format_is_no_call),
        T(q3_an_unknown_tool_in_a_whole_block_is_a_tool_error),
        T(plain_invokes_count_in_text_at_the_end_only),
        T(missing_closers_inside_a_block_are_repaired),
        T(a_self_closed_parameter_is_empty),
        T(invalid_bytes_become_replacement_characters_everywhere),
        T(the_same_characters_made_of_ordinary_tokens_are_text),
        T(after_the_end_token_nothing_is_read),
        T(a_stray_end_of_thinking_token_is_dropped),
        T(a_bad_schema_is_refused_by_name),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
