/* JSON in, JSON out, exactly as Python's json.dumps(json.loads(text), ensure_ascii=False). */
#include "engine/engine.h"
#include "engine/pyjson_int.h"
#include "testlib.h"

static void same(const char *in, size_t n, const char *want)
{
    dm_buf out = {0};
    dm_err e = {0};
    assert_ok_e(dm_json_python(in, n, &out, &e), e);
    assert_string_equal(dm_buf_cstr(&out), want);
    dm_buf_free(&out);
}

#define SAME(in, want) same(in, strlen(in), want)

static void refused(const char *in, size_t n, int code)
{
    dm_buf out = {0};
    dm_err e = {0};
    int rc = dm_json_python(in, n, &out, &e);
    if (rc != code) fail_msg("%s: %s, want %s; gave %s", in, dm_err_name(rc), dm_err_name(code), dm_buf_cstr(&out));
    assert_true(strlen(e.text) > 5);
    assert_int_equal(out.n, 0);
    dm_buf_free(&out);
}

static void separators_and_key_order_are_pythons(void **state)
{
    (void)state;
    SAME(" {\"b\" :1,\n\t\"a\":[ 1,2 ,{} ,[ ],\"\"],\"c\":null}\r\n", "{\"b\": 1, \"a\": [1, 2, {}, [], \"\"], \"c\": null}");
    SAME("[true,false,null]", "[true, false, null]");
    SAME("\"x\"", "\"x\"");
}

static void of_equal_keys_the_last_value_stays_at_the_first_place(void **state)
{
    (void)state;
    SAME("{\"x\": 1, \"y\": 2, \"x\": 3}", "{\"x\": 3, \"y\": 2}");
    SAME("{\"a\":1,\"a\":2,\"a\":3,\"b\":{\"k\":1,\"k\":[]},\"\":0,\"\":1}", "{\"a\": 3, \"b\": {\"k\": []}, \"\": 1}");
    SAME("{\"\\u0061\":1,\"a\":2,\"a\\u0000\":3}", "{\"a\": 2, \"a\\u0000\": 3}");
}

static void integers_keep_their_digits(void **state)
{
    (void)state;
    SAME("[0,-0,-1,123456789012345678901234567890,-99999999999999999999]", "[0, 0, -1, 123456789012345678901234567890, -99999999999999999999]");
    dm_buf big = {0};
    for (int i = 0; i < 6000; i++) assert_ok(dm_buf_byte(&big, (uint8_t)('1' + i % 9)));
    same(dm_buf_cstr(&big), big.n, dm_buf_cstr(&big));
    dm_buf_free(&big);
}

static void other_numbers_are_the_shortest_that_read_back(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {"1.0", "1.0"}, {"100.0", "100.0"}, {"-0.0", "-0.0"}, {"0e5", "0.0"}, {"1E5", "100000.0"}, {"1e-4", "0.0001"}, {"1e-5", "1e-05"},
        {"0.00012345", "0.00012345"}, {"1e-7", "1e-07"}, {"1e15", "1000000000000000.0"}, {"1e16", "1e+16"}, {"9999999999999998.0", "9999999999999998.0"},
        {"12345678901234567.0", "1.2345678901234568e+16"}, {"1e22", "1e+22"}, {"1e100", "1e+100"}, {"0.1", "0.1"}, {"0.30000000000000004", "0.30000000000000004"},
        {"3.141592653589793238", "3.141592653589793"}, {"27181048385437.832", "27181048385437.832"}, {"123e-2", "1.23"}, {"2.50", "2.5"},
        {"1e400", "Infinity"}, {"-1e400", "-Infinity"}, {"1e-400", "0.0"}, {"1e99999999999999999999", "Infinity"}, {"1e-99999999999999999999", "0.0"},
        {"0.0000000000000000000000000001e28", "1.0"}, {"5e-324", "5e-324"}, {"2.2250738585072014e-308", "2.2250738585072014e-308"},
        {"1.7976931348623157e308", "1.7976931348623157e+308"}, {"NaN", "NaN"}, {"Infinity", "Infinity"}, {"-Infinity", "-Infinity"},
        /* powers of two: the nearest decimal of 16 digits does not read back, its neighbour does */
        {"5.6843418860808015e-14", "5.684341886080802e-14"}, {"5.9604644775390625e-08", "5.960464477539063e-08"},
        {"7.1202363472230444e-307", "7.120236347223045e-307"}, {"6.1897001964269014e+26", "6.189700196426902e+26"},
        {"5.8908e-5", "5.8908e-05"}, {"9007199254740993.0", "9007199254740992.0"}, {"1234.5e1", "12345.0"},
    };
    for (size_t i = 0; i < DM_COUNT(pairs); i++) SAME(pairs[i][0], pairs[i][1]);
}

static void every_double_reads_back(void **state)
{
    (void)state;
    uint64_t rng = test_seed();
    for (int i = 0; i < (test_full() ? 1000000 : 20000); i++) {
        union { uint64_t u; double f; } x = {.u = dm_splitmix64(&rng)};
        if (i < 2046) x.u = (uint64_t)(i + 1) << 52; /* all powers of two */
        char in[40];
        dm_buf out = {0};
        if (!(x.f - x.f == 0)) continue;
        snprintf(in, sizeof in, "%.17e", x.f);
        assert_ok(dm_json_python(in, strlen(in), &out, NULL));
        if (strtod(dm_buf_cstr(&out), NULL) != x.f) fail_msg("%s became %s", in, dm_buf_cstr(&out));
        dm_buf_free(&out);
    }
}

static void strings_escape_what_python_escapes(void **state)
{
    (void)state;
    SAME("\"\\u0000\\u001f\\u007f\\/\\\\\\\"\\b\\f\\n\\r\\t\"", "\"\\u0000\\u001f\x7f/\\\\\\\"\\b\\f\\n\\r\\t\"");
    SAME("\"\\u00e9\\u2028\\u2029 é 😀 \\ud83d\\ude00\"", "\"é\u2028\u2029 é 😀 😀\"");
    SAME("\"a\\u000Bz\\u0080\"", "\"a\\u000bz\xc2\x80\"");
}

static void lone_surrogates_become_replacement_characters(void **state)
{
    (void)state;
    SAME("\"\\ud800\"", "\"\uFFFD\"");
    SAME("\"\\udc00\\ud83dx\\ud83d\\ud83d\\ude00\\ud800\\u0041\"", "\"\uFFFD\uFFFDx\uFFFD😀\uFFFDA\"");
    SAME("{\"\\ud800\": 1, \"\\udbff\": 2, \"\\ud800\": [\"\\udfff\"]}", "{\"\uFFFD\": [\"\uFFFD\"], \"\uFFFD\": 2}");
}

static void what_python_refuses_is_refused(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "", " ", "{", "[", "[1", "[1,", "[1,]", "[,1]", "{\"a\"", "{\"a\":", "{\"a\":1", "{\"a\":1,", "{\"a\":1,}", "{a:1}", "{1:1}", "{'a':1}",
        "\"", "\"a", "\"\\", "\"\\x\"", "\"\\u12\"", "\"\\u12g4\"", "\"\\u 123\"", "\"a\nb\"", "\"\t\"", "\"\x01\"", "nul", "tru", "True", "nan", "inf",
        "-", "+1", "01", "-01", "1.", ".5", "1e", "1e+", "-Inf", "--1", "0x1", "1 2", "{} x", "[] ]", "\xEF\xBB\xBF{}", "\"\xff\"", "\"\xed\xa0\x80\"",
        "[1;2]", "{\"a\" 1}", "// x", "[1]//", "-NaN", "1_0",
    };
    for (size_t i = 0; i < DM_COUNT(bad); i++) refused(bad[i], strlen(bad[i]), DM_EFORMAT);
    refused("\"a\0b\"", 5, DM_EFORMAT);
    refused("1\0", 2, DM_EFORMAT);
}

static void nesting_has_a_limit_and_long_lists_do_not(void **state)
{
    (void)state;
    dm_buf in = {0};
    for (int depth = PJ_DEPTH_MAX; depth <= PJ_DEPTH_MAX + 1; depth++) {
        dm_buf_clear(&in);
        for (int i = 0; i < depth; i++) assert_ok(dm_buf_str(&in, i % 2 ? "{\"a\":" : "["));
        assert_ok(dm_buf_str(&in, "1"));
        for (int i = depth; i-- > 0;) assert_ok(dm_buf_str(&in, i % 2 ? "}" : "]"));
        pj_doc d;
        assert_err(depth > PJ_DEPTH_MAX ? DM_ELIMIT : 0, pj_read(&d, dm_buf_cstr(&in), in.n, NULL));
        pj_free(&d);
    }
    dm_buf_clear(&in);
    for (int i = 0; i < 1000000; i++) assert_ok(dm_buf_byte(&in, '['));
    refused(dm_buf_cstr(&in), in.n, DM_ELIMIT);
    dm_buf_clear(&in);
    assert_ok(dm_buf_str(&in, "{"));
    for (int i = 0; i < 200000; i++) assert_ok(dm_buf_printf(&in, "%s\"k%d\": %d", i ? ", " : "", i % 1000, i));
    assert_ok(dm_buf_str(&in, "}"));
    pj_doc d;
    assert_ok(pj_read(&d, dm_buf_cstr(&in), in.n, NULL));
    assert_int_equal(d.root.n, 1000);
    assert_string_equal(d.root.pairs[0].key.s, "k0");
    assert_string_equal(d.root.pairs[0].val.s, "199000");
    pj_free(&d);
    dm_buf_free(&in);
}

/* Pieces of JSON in any order: never a crash, and what is accepted is its own fixed point. */
static void random_text_is_refused_or_a_fixed_point(void **state)
{
    (void)state;
    static const char *const scraps[] = {"{", "}", "[", "]", ",", ":", "\"a\"", "\"b\"", "\"\"", "1", "-0", "1.5", "1e9", "null", "true", "NaN", "-Infinity",
                                         " ", "\n", "\\", "\"", "\\u12", "\"\\ud800\"", "\xc3", "é", "0", "e", "-", "{\"a\": 1}", "[1, 2]"};
    uint64_t rng = test_seed();
    int accepted = 0;
    for (int i = 0; i < (test_full() ? 1000000 : 50000); i++) {
        dm_buf in = {0}, once = {0}, twice = {0};
        size_t n = 1 + dm_splitmix64(&rng) % 7;
        for (size_t k = 0; k < n; k++) assert_ok(dm_buf_str(&in, scraps[dm_splitmix64(&rng) % DM_COUNT(scraps)]));
        if (dm_json_python(dm_buf_cstr(&in), in.n, &once, NULL) == 0) {
            accepted++;
            assert_ok(dm_json_python(dm_buf_cstr(&once), once.n, &twice, NULL));
            assert_string_equal(dm_buf_cstr(&once), dm_buf_cstr(&twice));
        }
        dm_buf_free(&in);
        dm_buf_free(&once);
        dm_buf_free(&twice);
    }
    assert_true(accepted > 1000);
}

static void output_is_appended_and_taken_back_on_failure(void **state)
{
    (void)state;
    dm_buf out = {0};
    assert_ok(dm_buf_str(&out, "x="));
    assert_ok(dm_json_python("[1]", 3, &out, NULL));
    assert_string_equal(dm_buf_cstr(&out), "x=[1]");
    assert_err(DM_EFORMAT, dm_json_python("[1", 2, &out, NULL));
    assert_string_equal(dm_buf_cstr(&out), "x=[1]");
    dm_buf_free(&out);
}

static void running_out_of_memory_is_told_at_every_allocation(void **state)
{
    (void)state;
    const char *in = "{\"a\": [1, 2.5, \"x\\n\", {\"k\": null, \"k\": true}], \"b\": {\"c\": []}, \"n\": -12}";
    int rc = DM_ENOMEM;
    for (int64_t n = 1; rc == DM_ENOMEM; n++) {
        dm_buf out = {0};
        assert_in_range(n, 1, 1000);
        dm_fault_alloc_after(n);
        rc = dm_json_python(in, strlen(in), &out, NULL);
        dm_fault_alloc_after(-1);
        if (rc == 0) assert_string_equal(dm_buf_cstr(&out), "{\"a\": [1, 2.5, \"x\\n\", {\"k\": true}], \"b\": {\"c\": []}, \"n\": -12}");
        else assert_int_equal(out.n, 0);
        dm_buf_free(&out);
    }
    assert_ok(rc);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(separators_and_key_order_are_pythons),
        cmocka_unit_test(of_equal_keys_the_last_value_stays_at_the_first_place),
        cmocka_unit_test(integers_keep_their_digits),
        cmocka_unit_test(other_numbers_are_the_shortest_that_read_back),
        cmocka_unit_test(every_double_reads_back),
        cmocka_unit_test(strings_escape_what_python_escapes),
        cmocka_unit_test(lone_surrogates_become_replacement_characters),
        cmocka_unit_test(what_python_refuses_is_refused),
        cmocka_unit_test(nesting_has_a_limit_and_long_lists_do_not),
        cmocka_unit_test(random_text_is_refused_or_a_fixed_point),
        cmocka_unit_test(output_is_appended_and_taken_back_on_failure),
        cmocka_unit_test(running_out_of_memory_is_told_at_every_allocation),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
