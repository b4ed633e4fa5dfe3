/* Arguments as models write them: what is repaired, what is refused, and the sentence that the model gets. */
#include "tests/unit/tools_run.h"

static rig g;

static int setup(void **state) {
    (void)state;
    rig_open(&g, -1, NULL);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    rig_close(&g);
    return 0;
}

/* A registry whose "read" has the given schema. */
static dm_tools *with_schema(const char *schema) {
    dm_tools *t;
    dm_err e = {0};
    const dm_tools_opts o = {.loop = &g.loop, .workspace = g.ws};
    json_error_t je;
    json_t *s = json_loads(schema, 0, &je);
    if (!s) fail_msg("%s: %s", schema, je.text);
    assert_ok_e(dm_tools_create(&t, &o, &e), e);
    assert_ok_e(dm_tools_add_builtin(t, "read", NULL, s, &e), e);
    json_decref(s);
    return t;
}

/* want: the coerced arguments, or the sentence when it begins with "error:". */
static void check(const dm_tools *t, const char *name, const char *args, const char *want) {
    json_t *got = NULL;
    char *text = NULL;
    const int rc = dm_tools_check(t, name, args, &got, &text, NULL);
    if (strncmp(want, "error:", 6) == 0) {
        assert_int_equal(rc, DM_ETOOL);
        assert_null(got);
        assert_string_equal(text, want);
        dm_free(text);
        return;
    }
    if (rc < 0) fail_msg("%s: %s", args, text ? text : "?");
    assert_null(text);
    char *dumped = json_dumps(got, JSON_COMPACT);
    assert_string_equal(dumped, want);
    free(dumped);
    json_decref(got);
}

static void one(const char *property, const char *value, const char *want) {
    char schema[512], args[512], whole[600];
    snprintf(schema, sizeof schema, "{\"type\":\"object\",\"properties\":{\"v\":%s}}", property);
    snprintf(args, sizeof args, "{\"v\":%s}", value);
    dm_tools *t = with_schema(schema);
    json_t *got = NULL;
    char *text = NULL;
    const int rc = dm_tools_check(t, "read", args, &got, &text, NULL);
    snprintf(whole, sizeof whole, "{\"v\":%s}", want ? want : "");
    char *dumped = rc == 0 ? json_dumps(got, JSON_COMPACT) : NULL;
    if (want && !dumped) fail_msg("%s for %s: %s", value, property, text);
    if (want) assert_string_equal(dumped, whole);
    else if (rc != DM_ETOOL) fail_msg("%s for %s gave %s", value, property, dumped);
    free(dumped);
    dm_free(text);
    json_decref(got);
    dm_tools_destroy(t);
}

static void a12_an_unknown_tool_is_told_the_known_ones(void **state) {
    (void)state;
    check(g.tools, "nosuch", "{}", "error: there is no tool \"nosuch\"; the tools are: read, write, edit, glob, grep, bash");
    check(g.tools, "re\nad\x1b[31m", "{}", "error: there is no tool \"re\nad\"; the tools are: read, write, edit, glob, grep, bash");
}

static void a12_wrong_arguments_are_named(void **state) {
    (void)state;
    const char *p = "; its parameters are: path (string, required), offset (integer), limit (integer)";
    char want[300];
    snprintf(want, sizeof want, "error: read: the parameter \"limit\" must be an integer, but is \"ten\"%s", p);
    check(g.tools, "read", "{\"path\":\"a\",\"limit\":\"ten\"}", want);
    snprintf(want, sizeof want, "error: read: the arguments lack the parameter \"path\"%s", p);
    check(g.tools, "read", "{\"file\":\"a\"}", want);
    check(g.tools, "read", "", want);
    snprintf(want, sizeof want, "error: read: the arguments must be one JSON object%s", p);
    check(g.tools, "read", "[1]", want);
    snprintf(want, sizeof want, "error: read: the arguments are not valid JSON: '}' expected near end of file (line 1, column 11)%s", p);
    check(g.tools, "read", "{\"path\":\"a\"", want);
    snprintf(want, sizeof want, "error: read: the arguments are not valid JSON: duplicate object key near '\"path\"' (line 1, column 18)%s", p);
    check(g.tools, "read", "{\"path\":\"a\",\"path\":\"b\"}", want);
    snprintf(want, sizeof want, "error: read: the parameter \"limit\" must be at least 1, but is 0%s", p);
    check(g.tools, "read", "{\"path\":\"a\",\"limit\":0}", want);
}

static void q7_text_for_numbers_is_repaired_when_it_is_exactly_that(void **state) {
    (void)state;
    const char *integer = "{\"type\":\"integer\"}", *number = "{\"type\":\"number\"}", *boolean = "{\"type\":\"boolean\"}";
    one(integer, "5", "5");
    one(integer, "\"42\"", "42");
    one(integer, "\"-7\"", "-7");
    one(integer, "5.0", "5");
    one(integer, "\"5.0\"", "5");
    one(integer, "\" 42 \"", "42");
    one(integer, "\"3.5\"", NULL);
    one(integer, "3.5", NULL);
    one(integer, "\"0x10\"", NULL);
    one(integer, "\"\"", NULL);
    one(integer, "\"42abc\"", NULL);
    one(integer, "\"99999999999999999999\"", NULL);
    one(integer, "1e300", NULL);
    one(integer, "true", NULL);
    one(integer, "[5]", NULL);
    one(number, "\"3.5\"", "3.5");
    one(number, "\"1e3\"", "1000.0");
    one(number, "\"NaN\"", NULL);
    one(number, "\"Infinity\"", NULL);
    one(number, "\"1e999\"", NULL);
    one(boolean, "\"true\"", "true");
    one(boolean, "\"False\"", "false");
    one(boolean, "1", NULL);
    one(boolean, "\"yes\"", NULL);
}

static void q8_structures_in_text_are_unpacked(void **state) {
    (void)state;
    one("{\"type\":\"array\",\"items\":{\"type\":\"integer\"}}", "\"[1,\\\"2\\\"]\"", "[1,2]");
    one("{\"type\":\"object\"}", "\"{\\\"a\\\":1}\"", "{\"a\":1}");
    one("{\"type\":\"array\"}", "\"{}\"", NULL);
    one("{\"type\":\"array\"}", "\"[1\"", NULL);
    check(g.tools, "read", "\"{\\\"path\\\":\\\"a\\\",\\\"limit\\\":\\\"3\\\"}\"", "{\"path\":\"a\",\"limit\":3}");
}

static void t23_text_stays_text(void **state) {
    (void)state;
    one("{\"type\":\"string\"}", "\"123\"", "\"123\"");
    one("{\"type\":\"string\"}", "123", "\"123\"");
    one("{\"type\":\"string\"}", "true", "\"true\"");
    one("{\"type\":\"string\"}", "{\"a\":[1]}", "\"{\\\"a\\\":[1]}\"");
    one("{\"type\":\"string\"}", "\"null\"", "\"null\"");
    one("{}", "\"5\"", "\"5\"");
}

static void of_several_types_the_first_that_fits_wins(void **state) {
    (void)state;
    one("{\"type\":[\"integer\",\"string\"]}", "\"5\"", "\"5\""); /* it fits as it stands */
    one("{\"type\":[\"integer\",\"boolean\"]}", "\"5\"", "5");
    one("{\"type\":[\"boolean\",\"integer\"]}", "\"5\"", "5");
    one("{\"type\":[\"integer\",\"null\"]}", "null", "null");
    one("{\"type\":[\"integer\",\"null\"]}", "\"null\"", "null");
    one("{\"type\":[\"integer\",\"null\"]}", "\"x\"", NULL);
    one("{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"array\",\"items\":{\"type\":\"integer\"}}]}", "[\"1\"]", "[1]");
    one("{\"anyOf\":[{\"type\":\"integer\"},{\"type\":\"boolean\"}]}", "{}", NULL);
    one("{\"oneOf\":[{\"type\":\"integer\",\"minimum\":5},{\"type\":\"integer\",\"maximum\":9}]}", "7", NULL);
    one("{\"oneOf\":[{\"type\":\"integer\",\"minimum\":5},{\"type\":\"integer\",\"maximum\":9}]}", "3", "3");
    one("{\"allOf\":[{\"type\":\"integer\"},{\"minimum\":2}]}", "\"1\"", NULL);
    one("{\"allOf\":[{\"type\":\"integer\"},{\"minimum\":2}]}", "\"2\"", "2");
}

static void null_for_an_optional_parameter_is_dropped(void **state) {
    (void)state;
    check(g.tools, "read", "{\"path\":\"a\",\"limit\":null}", "{\"path\":\"a\"}");
    check(g.tools, "read", "null", "error: read: the arguments lack the parameter \"path\"; its parameters are: path (string, required), offset (integer), limit (integer)");
}

static void t22_a_wrapper_parameter_is_taken_off(void **state) {
    (void)state;
    check(g.tools, "bash", "{\"arguments\":{\"command\":\"ls\"}}", "{\"command\":\"ls\"}");
    check(g.tools, "bash", "{\"input\":{\"command\":\"ls\"}}", "{\"command\":\"ls\"}");
    check(g.tools, "bash", "{\"arguments\":\"{\\\"command\\\":\\\"ls\\\"}\"}", "{\"command\":\"ls\"}");
    check(g.tools, "bash", "{\"arguments\":\"ls\"}", "{\"command\":\"ls\"}");
    dm_tools *t = with_schema("{\"type\":\"object\",\"properties\":{\"arguments\":{\"type\":\"object\"}}}");
    check(t, "read", "{\"arguments\":{\"command\":\"ls\"}}", "{\"arguments\":{\"command\":\"ls\"}}");
    dm_tools_destroy(t);
}

static void bounds_and_forms_are_checked(void **state) {
    (void)state;
    one("{\"enum\":[\"a\",5]}", "\"5\"", "5");
    one("{\"enum\":[\"a\",5]}", "\"b\"", NULL);
    one("{\"type\":\"string\",\"enum\":[\"a\"]}", "\"a\"", "\"a\"");
    one("{\"const\":3}", "4", NULL);
    one("{\"type\":\"string\",\"minLength\":2}", "\"\\u00e9\"", NULL); /* characters, not bytes */
    one("{\"type\":\"string\",\"maxLength\":1}", "\"\\u00e9\"", "\"é\"");
    one("{\"type\":\"string\",\"pattern\":\"^[a-z]+$\"}", "\"ab\"", "\"ab\"");
    one("{\"type\":\"string\",\"pattern\":\"^[a-z]+$\"}", "\"a1\"", NULL);
    one("{\"type\":\"integer\",\"exclusiveMaximum\":3}", "3", NULL);
    one("{\"type\":\"number\",\"multipleOf\":0.5}", "1.25", NULL);
    one("{\"type\":\"array\",\"minItems\":1}", "[]", NULL);
    one("{\"type\":\"array\",\"uniqueItems\":true}", "[1,1.0]", NULL);
    one("{\"type\":\"object\",\"properties\":{\"k\":{\"type\":\"integer\"}},\"required\":[\"k\"],\"additionalProperties\":false}", "{\"k\":\"1\"}", "{\"k\":1}");
    one("{\"type\":\"object\",\"additionalProperties\":false}", "{\"k\":1}", NULL);
    one("{\"type\":\"object\",\"additionalProperties\":{\"type\":\"integer\"}}", "{\"k\":\"1\"}", "{\"k\":1}");
}

static void faults_deep_down_say_where(void **state) {
    (void)state;
    dm_tools *t = with_schema("{\"type\":\"object\",\"properties\":{\"edits\":{\"type\":\"array\",\"items\":{\"type\":\"object\",\"properties\":"
                              "{\"old\":{\"type\":\"string\"},\"n\":{\"type\":\"integer\"}},\"required\":[\"old\"]}}}}");
    check(t, "read", "{\"edits\":[{\"old\":\"a\",\"n\":1},{\"old\":\"b\",\"n\":\"x\"}]}",
          "error: read: the parameter \"edits[1].n\" must be an integer, but is \"x\"; its parameters are: edits (array)");
    check(t, "read", "{\"edits\":[{}]}", "error: read: the parameter \"edits[0]\" needs the member \"old\"; its parameters are: edits (array)");
    dm_tools_destroy(t);
}

static void references_stay_at_home_and_end(void **state) {
    (void)state;
    dm_tools *t = with_schema("{\"type\":\"object\",\"properties\":{\"v\":{\"$ref\":\"#/$defs/tree\"}},\"$defs\":{\"tree\":{\"type\":\"object\","
                              "\"properties\":{\"n\":{\"type\":\"integer\"},\"sub\":{\"$ref\":\"#/$defs/tree\"}}}}}");
    check(t, "read", "{\"v\":{\"n\":\"1\",\"sub\":{\"n\":\"2\"}}}", "{\"v\":{\"n\":1,\"sub\":{\"n\":2}}}");
    dm_tools_destroy(t);
    t = with_schema("{\"type\":\"object\",\"properties\":{\"v\":{\"$ref\":\"#/properties/v\"}}}"); /* a circle of its own */
    check(t, "read", "{\"v\":1}", "error: read: the parameter \"v\" is nested too deeply; its parameters are: v (any)");
    dm_tools_destroy(t);
}

static void bad_schemas_are_refused_when_they_are_offered(void **state) {
    (void)state;
    static const char *const bad[] = {
        "[]",
        "{\"type\":\"string\"}",
        "{\"type\":\"object\",\"properties\":{\"v\":{\"$ref\":\"https://example.com/x\"}}}",
        "{\"type\":\"object\",\"properties\":{\"v\":{\"$ref\":\"#/$defs/missing\"}}}",
        "{\"type\":\"object\",\"properties\":{\"v\":{\"type\":\"string\",\"pattern\":\"(\"}}}",
    };
    dm_tools *t;
    const dm_tools_opts o = {.loop = &g.loop, .workspace = g.ws};
    assert_ok(dm_tools_create(&t, &o, NULL));
    for (size_t i = 0; i < DM_COUNT(bad); i++) {
        json_t *s = json_loads(bad[i], 0, NULL);
        dm_err e = {0};
        assert_true(dm_tools_add_builtin(t, "read", NULL, s, &e) < 0);
        assert_true(e.text[0] != 0);
        json_decref(s);
    }
    assert_err(DM_ENOENT, dm_tools_add_builtin(t, "nosuch", NULL, NULL, NULL));
    assert_int_equal(dm_tools_count(t), 0);
    dm_tools_destroy(t);
}

static void deep_arguments_do_not_break_it(void **state) {
    (void)state;
    dm_buf b = {0};
    assert_ok(dm_buf_str(&b, "{\"path\":"));
    for (int i = 0; i < 1500; i++) assert_ok(dm_buf_byte(&b, '['));
    for (int i = 0; i < 1500; i++) assert_ok(dm_buf_byte(&b, ']'));
    assert_ok(dm_buf_byte(&b, '}'));
    json_t *got = NULL;
    char *text = NULL;
    const int rc = dm_tools_check(g.tools, "read", dm_buf_cstr(&b), &got, &text, NULL);
    assert_true(rc == 0 || rc == DM_ETOOL);
    json_decref(got);
    dm_free(text);
    dm_buf_clear(&b);
    for (int i = 0; i < 100000; i++) assert_ok(dm_buf_str(&b, "[{\"a\":"));
    assert_err(DM_ETOOL, dm_tools_check(g.tools, "read", dm_buf_cstr(&b), &got, &text, NULL));
    dm_free(text);
    dm_buf_free(&b);
}

static void the_list_keeps_its_order_and_its_texts(void **state) {
    (void)state;
    static const char *const names[] = {"read", "write", "edit", "glob", "grep", "bash"};
    static const dm_on_unknown rules[] = {DM_UNKNOWN_RETRY, DM_UNKNOWN_NEVER, DM_UNKNOWN_NEVER, DM_UNKNOWN_RETRY, DM_UNKNOWN_RETRY, DM_UNKNOWN_NEVER};
    static const dm_effects effects[] = {DM_FX_READ, DM_FX_WRITE, DM_FX_WRITE, DM_FX_READ, DM_FX_READ, DM_FX_EXTERNAL};
    dm_tool_info info;
    assert_int_equal(dm_tools_count(g.tools), 6);
    for (size_t i = 0; i < 6; i++) {
        assert_ok(dm_tools_info(g.tools, i, &info));
        assert_string_equal(info.name, names[i]);
        assert_int_equal(info.on_unknown, rules[i]);
        assert_int_equal(info.effects, effects[i]);
        assert_true(strlen(info.description) > 20 && json_is_object(info.parameters));
        assert_int_equal(dm_tools_find(g.tools, names[i]), i);
    }
    assert_err(DM_ENOENT, dm_tools_info(g.tools, 6, &info));
    assert_err(DM_EEXIST, dm_tools_add_builtin(g.tools, "read", NULL, NULL, NULL));
    /* A model's own texts replace ours. */
    json_t *s = json_loads("{\"type\":\"object\",\"properties\":{\"path\":{\"type\":\"string\"}},\"required\":[\"path\"]}", 0, NULL);
    dm_tools *t;
    const dm_tools_opts o = {.loop = &g.loop, .workspace = g.ws};
    assert_ok(dm_tools_create(&t, &o, NULL));
    assert_ok(dm_tools_add_builtin(t, "read", "Read a file.", s, NULL));
    assert_ok(dm_tools_info(t, 0, &info));
    assert_string_equal(info.description, "Read a file.");
    assert_int_equal(json_equal((json_t *)(uintptr_t)info.parameters, s), 1);
    json_decref(s);
    dm_tools_destroy(t);
}

static void starting_what_does_not_exist_is_an_error(void **state) {
    (void)state;
    call c = {0};
    json_t *args = json_object(), *list = json_array();
    dm_tool_run *run;
    assert_err(DM_ENOENT, dm_tools_start(g.tools, "nosuch", args, call_done, &c, &run, NULL));
    assert_err(DM_EINVAL, dm_tools_start(g.tools, "read", list, call_done, &c, &run, NULL));
    /* Arguments that were never checked are a result with an error, not a crash. */
    for (int i = 0; i < 5; i++) {
        static const char *const names[] = {"read", "write", "edit", "glob", "grep"};
        assert_ok(dm_tools_start(g.tools, names[i], args, call_done, &c, &run, NULL));
        call_wait(&g, &c);
        assert_true(c.r.is_error);
        call_free(&c);
    }
    json_decref(args);
    json_decref(list);
}

static void the_nth_allocation_may_fail(void **state) {
    (void)state;
    for (int64_t n = 1; n < 200; n++) {
        json_t *got = NULL;
        char *text = NULL;
        dm_fault_alloc_after(n);
        int rc = dm_tools_check(g.tools, "nosuch", "{}", &got, &text, NULL);
        assert_true(rc == DM_ETOOL || rc == DM_ENOMEM);
        dm_free(text);
        text = NULL;
        dm_fault_alloc_after(n);
        rc = dm_tools_check(g.tools, "read", "{\"path\":1,\"limit\":\"x\"}", &got, &text, NULL);
        assert_true(rc == DM_ETOOL || rc == DM_ENOMEM);
        dm_free(text);
        json_t *args = json_pack("{s:s}", "path", "missing");
        call c = {0};
        dm_fault_alloc_after(n);
        rc = dm_tools_start(g.tools, "read", args, call_done, &c, &c.run, NULL);
        if (rc == 0) {
            call_wait(&g, &c);
            call_free(&c);
        } else {
            assert_int_equal(rc, DM_ENOMEM);
        }
        dm_fault_alloc_after(-1);
        json_decref(args);
    }
}

int main(void) {
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(a12_an_unknown_tool_is_told_the_known_ones),
        T(a12_wrong_arguments_are_named),
        T(q7_text_for_numbers_is_repaired_when_it_is_exactly_that),
        T(q8_structures_in_text_are_unpacked),
        T(t23_text_stays_text),
        T(of_several_types_the_first_that_fits_wins),
        T(null_for_an_optional_parameter_is_dropped),
        T(t22_a_wrapper_parameter_is_taken_off),
        T(bounds_and_forms_are_checked),
        T(faults_deep_down_say_where),
        T(references_stay_at_home_and_end),
        T(bad_schemas_are_refused_when_they_are_offered),
        T(deep_arguments_do_not_break_it),
        T(the_list_keeps_its_order_and_its_texts),
        T(starting_what_does_not_exist_is_an_error),
        T(the_nth_allocation_may_fail),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
