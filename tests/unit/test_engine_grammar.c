/* The call grammar, place by place: what may come where, the mask against trying every token, giving up, memory. */
#include "test_engine_grammar_kit.h"

#define TC "<" DSML "tool_calls>\n"
#define TC_ "</" DSML "tool_calls>"
#define INV(n) "<" DSML "invoke name=\"" n "\">\n"
#define INV_ "</" DSML "invoke>\n"
#define PS(k) "<" DSML "parameter name=\"" k "\" string=\"true\">"
#define PJ(k) "<" DSML "parameter name=\"" k "\" string=\"false\">"
#define P_ "</" DSML "parameter>\n"

static const dm_parser_tool tools[] = {
    { "bash", "{\"type\":\"object\",\"properties\":{\"command\":{\"type\":\"string\",\"minLength\":1},\"timeout\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":3600}},"
              "\"required\":[\"command\"]}" },
    { "read", "{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\"},\"offset\":{\"type\":\"integer\"},\"limit\":{\"type\":[\"integer\",\"null\"]}},"
              "\"required\":[\"path\"]}" },
    { "now", "{\"type\":\"object\",\"properties\":{}}" },
    { "free", NULL },
    { "unit", "{\"type\":\"object\",\"properties\":{\"unit\":{\"enum\":[\"c\",\"cm\",1,12]},\"kind\":{\"type\":\"string\",\"const\":\"x\"}}}" },
    { "deep", "{\"type\":\"object\",\"properties\":{\"edits\":{\"type\":\"array\",\"minItems\":1,\"maxItems\":2,\"items\":{\"type\":\"object\",\"properties\":"
              "{\"old\":{\"type\":\"string\"},\"new\":{\"type\":\"string\"}},\"required\":[\"old\",\"new\"],\"additionalProperties\":false}},"
              "\"either\":{\"anyOf\":[{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"integer\"}},\"required\":[\"a\"]},"
              "{\"type\":\"object\",\"properties\":{\"a\":{\"type\":\"boolean\"},\"b\":{\"type\":\"null\"}},\"required\":[\"b\"]}]},"
              "\"rate\":{\"type\":\"number\"},\"on\":{\"type\":\"boolean\"}}}" },
    { "mixed", "{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\"},\"a\\\"b\":{\"type\":\"integer\"}},\"additionalProperties\":true}" },
    { "never", "{\"type\":\"object\",\"properties\":{\"x\":false},\"required\":[\"x\"]}" },
};

static dm_tok *tok;
static dm_vocab *vocab;

static dm_grammar *grammar(bool thinking, size_t ntools)
{
    dm_grammar *g;
    dm_err e = { 0 };
    dm_grammar_opts o = { .thinking = thinking, .tools = tools, .ntools = ntools };
    assert_ok_e(dm_grammar_create(&g, vocab, &o, &e), e);
    return g;
}

/* Marks as added tokens, all else byte by byte, so that no way of cutting hides a fault. */
static void ids_of(const char *s, dm_ids *out)
{
    static const char *const marks[] = { DSML, "</think>", EOS };
    char byte[2] = { 0 };
    dm_err e = { 0 };
    while (*s) {
        size_t n = 1;
        for (size_t i = 0; i < DM_COUNT(marks); i++)
            if (dm_str_prefix(s, marks[i])) n = strlen(marks[i]);
        byte[0] = *s;
        if (n > 1) {
            char mark[64];
            snprintf(mark, sizeof mark, "%.*s", (int)n, s);
            assert_ok(dm_ids_push(out, dm_tok_special(tok, mark)));
        } else if ((unsigned char)*s < 128) {
            assert_ok_e(dm_tok_encode(tok, byte, 1, false, out, &e), e);
        } else {
            n = dm_utf8_next((const uint8_t *)s, strlen(s), &(uint32_t){ 0 });
            assert_ok_e(dm_tok_encode(tok, s, n, false, out, &e), e);
        }
        s += n;
    }
}

static bool allowed(dm_grammar *g, int32_t id)
{
    int n = dm_tok_vocab(tok);
    float *logits = calloc((size_t)n, sizeof *logits);
    assert_non_null(logits);
    dm_grammar_mask(g, logits, n);
    bool yes = logits[id] == 0;
    free(logits);
    return yes;
}

/* Bytes of text that are allowed one after the other, from the start of the turn; all: the whole text. */
static size_t reads(dm_grammar *g, bool thinking, const char *text)
{
    dm_ids ids = { 0 };
    size_t bytes = 0;
    dm_grammar_reset(g, thinking);
    ids_of(text, &ids);
    for (size_t i = 0; i < ids.n && allowed(g, ids.p[i]); i++) {
        size_t n;
        dm_tok_bytes(tok, ids.p[i], &n);
        assert_ok(dm_grammar_accept(g, ids.p[i]));
        assert_null(dm_grammar_gave_up(g));
        bytes += n;
    }
    dm_ids_free(&ids);
    return bytes;
}

typedef struct text_case { const char *text, *stop; } text_case; /* stop: where it must stop, or NULL: read whole */

static void check(const text_case *cases, size_t n, bool thinking, size_t ntools)
{
    dm_grammar *g = grammar(thinking, ntools);
    for (size_t i = 0; i < n; i++) {
        const text_case *c = &cases[i];
        size_t got = reads(g, thinking, c->text), want = strlen(c->text);
        if (c->stop) {
            const char *at = strstr(c->text, c->stop);
            for (const char *p = at; p && (p = strstr(p + 1, c->stop)) != NULL;) at = p; /* the last one */
            assert_non_null(at);
            want = (size_t)(at - c->text);
        }
        if (got != want) fail_msg("%s\nstops at byte %zu of %zu, wanted %zu: %s", c->text, got, strlen(c->text), want, c->text + got);
    }
    dm_grammar_destroy(g);
}

/* ---- where a call may begin ---- */

static void the_marker_comes_only_behind_a_bracket_in_content(void **state)
{
    (void)state;
    static const text_case cases[] = {
        { "Looking.\n\n" TC, NULL }, { TC, NULL }, { "Looking." TC, NULL }, { "a\n \n" TC, NULL }, { "a </think>\n\n" TC, NULL },
        { "a " DSML, DSML }, { "a </" DSML, DSML }, { "a <b" DSML, DSML }, { "as in `" TC, DSML }, { "as in \"" TC, DSML },
        { "any <b> text </b> \xC2\xA0 {\"x\": 1}", NULL }, { "over" EOS, NULL },
    };
    check(cases, DM_COUNT(cases), false, DM_COUNT(tools));
}

static void there_is_no_call_in_thinking_or_without_tools(void **state)
{
    (void)state;
    static const text_case thinking[] = { { "I could\n\n" TC, DSML }, { "I could.</think>\n\n" TC, NULL }, { "x" EOS, NULL } };
    static const text_case none[] = { { "\n\n" TC, DSML }, { "text" EOS, NULL } };
    check(thinking, DM_COUNT(thinking), true, DM_COUNT(tools));
    check(none, DM_COUNT(none), false, 0);
}

/* ---- the block ---- */

#define LS TC INV("bash") PS("command") "ls" P_ INV_

static void only_whole_blocks_of_declared_tools_are_read(void **state)
{
    (void)state;
    static const text_case cases[] = {
        { LS TC_ EOS, NULL }, { LS INV("now") "\n" INV_ TC_, NULL }, { LS INV("now") INV_ TC_, NULL },
        { LS TC_ "\n", "\n" }, { LS EOS, EOS }, { LS "text", "text" }, { LS TC_ TC_, TC_ },
        { TC TC_, "/" DSML "tool_calls>" }, { TC "\n", "\n" }, { "<" DSML "toolcalls>", "calls>" }, { "<" DSML "invoke", "invoke" },
        { TC INV("nosuch"), "such" }, { TC INV("never"), "ever" }, { TC INV("bas"), "\">" }, { TC INV("bash") "\n", "\n" },
        { TC INV("bash") INV_, "/" DSML "invoke" }, { TC INV("bash") "\n" INV_, "\n<" }, { TC INV("now") PS("x"), DSML "parameter" },
    };
    check(cases, DM_COUNT(cases), false, DM_COUNT(tools));
}

static void parameters_are_declared_and_given_once_and_all_that_are_required(void **state)
{
    (void)state;
    static const text_case cases[] = {
        { TC INV("read") PJ("limit") "5" P_ PS("path") "a" P_ INV_ TC_, NULL },
        { TC INV("read") PJ("limit") "5" P_ INV_, "/" DSML "invoke" },
        { TC INV("read") PS("path") "a" P_ PS("path"), "path\"" },
        { TC INV("read") PS("paths"), "s\" string" },
        { TC INV("read") PJ("path"), "false" }, { TC INV("read") PS("limit"), "true" },
        { TC INV("read") PJ("limit") "null" P_, NULL }, { TC INV("read") PJ("offset") "null" P_, "null" },
        { TC INV("read") PJ("limit") " 5\n" P_, NULL }, { TC INV("read") PJ("limit") "5.0", ".0" }, { TC INV("read") PJ("limit") "-0", NULL },
        { TC INV("read") PJ("limit") "007", "07" }, { TC INV("read") PJ("limit") "9223372036854775807" P_, NULL },
        { TC INV("read") PJ("limit") "-9223372036854775808" P_, NULL }, { TC INV("read") PJ("limit") "9223372036854775808", "8" },
        { TC INV("read") PJ("limit") "1" PS("path"), DSML "parameter name=\"path" },
        { TC INV("bash") PJ("timeout") "3600" P_, NULL }, { TC INV("bash") PJ("timeout") "3601", "1" }, { TC INV("bash") PJ("timeout") "0", "0" },
        { TC INV("bash") PJ("timeout") "-1", "-1" }, { TC INV("bash") PS("command") P_, "parameter>" },
        { TC INV("bash") PS("command") "l" P_ PJ("timeout") "12" P_ INV_ INV("bash") PS("command") "x" P_ INV_ TC_ EOS, NULL },
        { TC INV("unit") PS("unit") "c" P_ INV_ TC_, NULL }, { TC INV("unit") PS("unit") "cm" P_, NULL }, { TC INV("unit") PS("unit") "cmm", "m" },
        { TC INV("unit") PJ("unit") "1" P_, NULL }, { TC INV("unit") PJ("unit") "12" P_, NULL }, { TC INV("unit") PJ("unit") "13", "3" },
        { TC INV("unit") PJ("unit") "\"c\"", "\"c\"" }, { TC INV("unit") PS("kind") "x" P_, NULL }, { TC INV("unit") PS("kind") "y", "y" },
    };
    check(cases, DM_COUNT(cases), false, DM_COUNT(tools));
}

static void a_tool_without_a_schema_takes_any_parameters_once(void **state)
{
    (void)state;
    static const text_case cases[] = {
        { TC INV("free") "\n" INV_ TC_, NULL }, { TC INV("free") PS("a") "x" P_ PJ("ab") "{\"k\": [1, {}]}" P_ PJ("b") "1.5e-07" P_ INV_, NULL },
        { TC INV("free") PS("a") "x" P_ PS("ab") "x" P_ PS("a"), "\" string" }, { TC INV("free") PS(""), "\" string" },
        { TC INV("free") PS("a") "x" P_ INV_ INV("free") PS("a") "x" P_ INV_ TC_, NULL }, { TC INV("free") PS("a<"), "<\"" },
        { TC INV("mixed") PS("pa") "x" P_ PS("pat") "x" P_ PS("path") "x" P_ PS("a") "x" P_ PJ("a\"b") "1" P_ INV_ TC_, NULL },
        { TC INV("mixed") PS("pa") "x" P_ PS("pa"), "\" string" }, { TC INV("mixed") PS("a") "x" P_ PS("a"), " string" },
        { TC INV("mixed") PJ("path"), "false" }, { TC INV("mixed") PJ("a\"b") "1" P_ PJ("a\"b"), "b\" string" },
        { TC INV("free") PJ("a") "\"text\"", "\"text\"" }, { TC INV("free") PJ("a") "1e307", NULL }, { TC INV("free") PJ("a") "10e307", "7" },
    };
    check(cases, DM_COUNT(cases), false, DM_COUNT(tools));
}

static void json_follows_the_schema(void **state)
{
    (void)state;
#define D TC INV("deep")
    static const text_case cases[] = {
        { D PJ("edits") "[{\"old\": \"a\", \"new\": \"\\u00e9\\n\"}]" P_, NULL },
        { D PJ("edits") "[\n  {\n    \"new\": \"a\",\n    \"old\": \"\"\n  }\n]\n" P_, NULL }, { D PJ("edits") "[]", "]" },
        { D PJ("edits") "[{\"old\": \"a\"}]", "}]" }, { D PJ("edits") "[{\"old\": 1", "1" }, { D PJ("edits") "[{\"odd", "dd" },
        { D PJ("edits") "[{\"old\": \"a\", \"old", "old" }, { D PJ("edits") "[{\"old\": \"a\", \"new\": \"\", ", ", " },
        { D PJ("edits") "[{\"old\": \"a\",}", "}" }, { D PJ("edits") "[{\"old\": \"a\nb", "\nb" }, { D PJ("edits") "[{\"old\": \"\\x", "x" },
        { D PJ("edits") "[{\"old\": \"\\u0000", "0" }, { D PJ("edits") "[1", "1" }, { D PJ("edits") "{", "{" },
        { D PJ("edits") "[{\"old\": \"\", \"new\": \"\"}, {\"old\": \"\", \"new\": \"\"}, ", ", " },
        { D PJ("either") "{\"a\": 5}" P_, NULL }, { D PJ("either") "{\"a\": true, \"b\": null}" P_, NULL }, { D PJ("either") "{\"b\": null}" P_, NULL },
        { D PJ("either") "{\"a\": 5, \"b", ", \"b" }, { D PJ("either") "{\"a\": true}", "}" }, { D PJ("either") "{}", "}" },
        { D PJ("rate") "-1.5E+10" P_, NULL }, { D PJ("rate") "1." P_, "</" }, { D PJ("rate") "NaN", "NaN" }, { D PJ("rate") ".5", ".5" },
        { D PJ("on") "true" P_ PJ("rate") "0" P_ INV_ TC_, NULL }, { D PJ("on") "True", "True" }, { D PJ("on") "truee", "e" },
    };
    check(cases, DM_COUNT(cases), false, DM_COUNT(tools));
}

static void string_bodies_are_free_up_to_their_closer(void **state)
{
    (void)state;
#define B TC INV("bash") PS("command")
    static const text_case cases[] = {
        { B "if (a < b) </x> 2>&1 \"'{}[]\\ \t\n日本 </｜ </DSML| <|DSML|" P_ INV_ TC_ EOS, NULL },
        { B "s = \"" TC "\"; t = \"" "</" DSML "invoke></" DSML "tool_calls>\"; " INV("x") P_ INV_ TC_, NULL },
        { B "</think> " DSML " <" P_ INV_, NULL }, { B "a</" DSML "paramter>", "ter>" }, { B "a</" DSML "x", "x" }, { B "a</" DSML "invok>", ">" }, { B EOS, EOS },
        { TC INV("free") PJ("a") "[\"<" DSML "invoke> </" DSML "invoke> </think>\"]" P_, NULL }, { TC INV("free") PJ("a") "[\"</" DSML "parameter>", "parameter>" },
    };
    check(cases, DM_COUNT(cases), false, DM_COUNT(tools));
}

static void blanks_between_json_tokens_end(void **state)
{
    (void)state;
    dm_grammar *g = grammar(false, DM_COUNT(tools));
    static const char head[] = TC INV("free") PJ("a") "[";
    char text[sizeof head + 100];
    memset(text, '\n', sizeof text);
    memcpy(text, head, sizeof head - 1);
    text[sizeof text - 1] = 0;
    size_t got = reads(g, false, text);
    assert_in_range(got, sizeof head - 1 + 32, sizeof head - 1 + 99);
    dm_grammar_destroy(g);
}

/* ---- the mask against trying every token ---- */

static bool tries(dm_grammar *g, const dm_ids *before, int32_t id)
{
    dm_grammar_reset(g, false);
    for (size_t i = 0; i < before->n; i++) assert_ok(dm_grammar_accept(g, before->p[i]));
    assert_null(dm_grammar_gave_up(g));
    assert_ok(dm_grammar_accept(g, id));
    return !dm_grammar_gave_up(g);
}

static void the_mask_is_what_trying_every_token_says(void **state)
{
    (void)state;
    static const char *const places[] = {
        "<" DSML, TC, TC "<" DSML "invoke name=\"", TC "<" DSML "invoke name=\"b", TC INV("bash"), TC INV("now"), TC INV("bash") "<", TC INV("now") "<",
        TC INV("read") "<" DSML "parameter name=\"", TC INV("read") "<" DSML "parameter name=\"path", TC INV("read") PS("path") "a" P_, B "a", B, B "a<", B "a</",
        B "a</" DSML, TC INV("free") "<" DSML "parameter name=\"", TC INV("free") "<" DSML "parameter name=\"a", TC INV("free") PJ("a"), TC INV("free") PJ("a") "[",
        TC INV("free") PJ("a") "[\"", TC INV("free") PJ("a") "[\"\\", TC INV("free") PJ("a") "[\"\\u00", TC INV("free") PJ("a") "[\"</", TC INV("free") PJ("a") "{\"k",
        D PJ("edits") "[{", D PJ("edits") "[{\"", D PJ("edits") "[{\"old\":", D PJ("edits") "[{\"old\": \"x\"", D PJ("either") "{\"a\":", D PJ("rate") "1", D PJ("rate") "1e",
        TC INV("unit") PS("unit"), TC INV("unit") PJ("unit"), TC INV("unit") PJ("unit") "1", LS, LS "<", LS "</", LS TC_,
    };
    dm_grammar *g = grammar(false, DM_COUNT(tools)), *other = grammar(false, DM_COUNT(tools));
    int n = dm_tok_vocab(tok);
    float *logits = malloc((size_t)n * sizeof *logits);
    assert_non_null(logits);
    for (size_t i = 0; i < DM_COUNT(places); i++) {
        dm_ids ids = { 0 };
        int left = 0;
        ids_of(places[i], &ids);
        for (size_t j = 0; j < ids.n; j++) assert_ok(dm_grammar_accept(g, ids.p[j]));
        memset(logits, 0, (size_t)n * sizeof *logits);
        dm_grammar_mask(g, logits, n);
        for (int32_t id = 0; id < n; id++) {
            size_t bytes;
            const char *p = dm_tok_bytes(tok, id, &bytes);
            left += logits[id] == 0;
            if ((logits[id] == 0) != tries(other, &ids, id)) fail_msg("%s + \"%.*s\": the mask says %s", places[i], (int)bytes, p, logits[id] == 0 ? "yes" : "no");
        }
        assert_in_range(left, 1, n - 1);
        dm_grammar_reset(g, false);
        dm_ids_free(&ids);
    }
    free(logits);
    dm_grammar_destroy(g);
    dm_grammar_destroy(other);
}

/* ---- giving up ---- */

static void when_no_token_is_left_the_logits_stay_and_it_is_said(void **state)
{
    (void)state;
    dm_grammar *g = grammar(false, DM_COUNT(tools));
    dm_ids ids = { 0 };
    int n = dm_tok_vocab(tok);
    float *logits = malloc((size_t)n * sizeof *logits);
    assert_non_null(logits);
    ids_of(LS TC_, &ids);
    for (size_t i = 0; i < ids.n; i++) assert_ok(dm_grammar_accept(g, ids.p[i]));
    for (int i = 0; i < n; i++) logits[i] = i == dm_tok_special(tok, EOS) ? -INFINITY : (float)i;
    dm_grammar_mask(g, logits, n); /* only the end could come, and somebody else forbade it */
    for (int i = 0; i < n; i++) assert_true(i == dm_tok_special(tok, EOS) || logits[i] == (float)i);
    assert_non_null(dm_grammar_gave_up(g));
    assert_ok(dm_grammar_accept(g, 300));
    dm_grammar_mask(g, logits, n);
    assert_true(logits[300] == 300.0f);
    dm_grammar_reset(g, false);
    assert_null(dm_grammar_gave_up(g));
    assert_int_equal(reads(g, false, LS TC_ EOS), strlen(LS TC_ EOS));
    dm_grammar_reset(g, false);
    for (int i = 0; i < n; i++) logits[i] = i == dm_tok_special(tok, DSML) ? 1 : -INFINITY;
    dm_grammar_mask(g, logits, n); /* not even outside of calls */
    assert_true(logits[dm_tok_special(tok, DSML)] == 1.0f);
    free(logits);
    dm_ids_free(&ids);
    dm_grammar_destroy(g);
}

static void a_token_that_does_not_fit_ends_the_guiding(void **state)
{
    (void)state;
    dm_grammar *g = grammar(false, DM_COUNT(tools));
    dm_ids ids = { 0 };
    ids_of(TC "x", &ids);
    for (size_t i = 0; i < ids.n; i++) assert_ok(dm_grammar_accept(g, ids.p[i]));
    assert_non_null(dm_grammar_gave_up(g));
    assert_true(allowed(g, dm_tok_special(tok, EOS)));
    dm_ids_free(&ids);
    dm_grammar_destroy(g);
}

/* ---- schemas that are odd ---- */

static void wrong_and_odd_schemas_are_refused_or_widened(void **state)
{
    (void)state;
    static const struct { const char *schema; int code; } cases[] = {
        { "{", DM_EFORMAT }, { "[]", DM_EFORMAT }, { "5", DM_EFORMAT }, { "", 0 }, { "{}", 0 },
        { "{\"type\":\"object\",\"properties\":5,\"required\":{},\"items\":[],\"enum\":3}", 0 },
        { "{\"properties\":{\"x\":{\"$ref\":\"#/properties/x\"}}}", 0 }, { "{\"properties\":{\"x\":{\"anyOf\":[{\"$ref\":\"#/properties/x\"}]}}}", 0 },
        { "{\"properties\":{\"x\":{\"$ref\":\"#\"}},\"allOf\":[{\"$ref\":\"#\"}]}", 0 }, { "{\"properties\":{\"x\":{\"$ref\":\"http://x/y\"},\"\":{},\"a\\nb\":{}}}", 0 },
        { "{\"properties\":{\"x\":{\"enum\":[]},\"y\":{\"type\":[]},\"z\":{\"minItems\":-1,\"maxItems\":1e99,\"minimum\":1e99,\"minLength\":\"a\"}}}", 0 },
    };
    for (size_t i = 0; i < DM_COUNT(cases); i++) {
        dm_grammar *g;
        dm_err e = { 0 };
        dm_parser_tool t = { "odd", cases[i].schema };
        dm_grammar_opts o = { .tools = &t, .ntools = 1 };
        int rc = dm_grammar_create(&g, vocab, &o, &e);
        if (rc != cases[i].code) fail_msg("%s: %d, %s", cases[i].schema, rc, e.text);
        if (rc < 0) assert_non_null(strstr(e.text, "odd"));
        if (rc == 0) assert_true(reads(g, false, TC INV("odd") "<" DSML) > strlen(TC INV("odd")) - 1);
        dm_grammar_destroy(g);
    }
}

/* ---- memory ---- */

static int whole_life(const dm_ids *ids)
{
    dm_vocab *v = NULL;
    dm_grammar *g = NULL;
    dm_err e = { 0 };
    dm_grammar_opts o = { .tools = tools, .ntools = DM_COUNT(tools) };
    int rc = dm_vocab_create(&v, tok, &e);
    if (rc == 0) rc = dm_grammar_create(&g, v, &o, &e);
    if (rc < 0) assert_int_equal(e.code, rc);
    for (size_t i = 0; rc == 0 && i < ids->n; i++) rc = dm_grammar_accept(g, ids->p[i]);
    if (rc < 0 && g) assert_non_null(dm_grammar_gave_up(g));
    dm_grammar_destroy(g);
    dm_vocab_destroy(v);
    return rc;
}

static void every_failed_allocation_is_an_error_and_leaks_nothing(void **state)
{
    (void)state;
    dm_ids ids = { 0 };
    ids_of(TC INV("free") PS("a") "x" P_ PS("long name of a parameter") "x" P_ PS("b") "x" P_ INV_ TC_, &ids);
    int64_t before = dm_fault_alloc_count(), failed = 0;
    assert_ok(whole_life(&ids));
    int64_t all = dm_fault_alloc_count() - before;
    for (int64_t n = 1; n <= all; n++) {
        dm_fault_alloc_after(n);
        int rc = whole_life(&ids);
        dm_fault_alloc_after(-1);
        if (rc < 0) assert_int_equal(rc, DM_ENOMEM);
        failed += rc < 0;
    }
    assert_in_range(failed, all - 3, all); /* giving spare memory back may fail unseen */
    assert_true(all > 50);
    dm_ids_free(&ids);
}

static int open_tokenizer(void **state)
{
    (void)state;
    dm_err e = { 0 };
    return dm_tok_open(&tok, TINY, &e) < 0 || dm_vocab_create(&vocab, tok, &e) < 0;
}

static int close_tokenizer(void **state)
{
    (void)state;
    dm_vocab_destroy(vocab);
    dm_tok_close(tok);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_marker_comes_only_behind_a_bracket_in_content),
        cmocka_unit_test(there_is_no_call_in_thinking_or_without_tools),
        cmocka_unit_test(only_whole_blocks_of_declared_tools_are_read),
        cmocka_unit_test(parameters_are_declared_and_given_once_and_all_that_are_required),
        cmocka_unit_test(a_tool_without_a_schema_takes_any_parameters_once),
        cmocka_unit_test(json_follows_the_schema),
        cmocka_unit_test(string_bodies_are_free_up_to_their_closer),
        cmocka_unit_test(blanks_between_json_tokens_end),
        cmocka_unit_test(the_mask_is_what_trying_every_token_says),
        cmocka_unit_test(when_no_token_is_left_the_logits_stay_and_it_is_said),
        cmocka_unit_test(a_token_that_does_not_fit_ends_the_guiding),
        cmocka_unit_test(wrong_and_odd_schemas_are_refused_or_widened),
        cmocka_unit_test(every_failed_allocation_is_an_error_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
