/* base: options, errors, files, faults. */
#include "tests/lib/testlib.h"

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

typedef struct opts {
    bool verbose;
    int64_t turns, bytes;
    double temperature;
    const char *model, *format;
    dm_opt_strs stop;
} opts;

static const dm_opt table[] = {
    {"verbose", 'v', DM_OPT_FLAG, offsetof(opts, verbose), "false", .help = "say more"},
    {"max-turns", 0, DM_OPT_INT, offsetof(opts, turns), "50", 1, 1000, .help = "turns at most"},
    {"kv-bytes", 0, DM_OPT_BYTES, offsetof(opts, bytes), "1G", .env = "DM_TEST_KV_BYTES", .help = "quota"},
    {"temperature", 't', DM_OPT_NUMBER, offsetof(opts, temperature), "0", 0, 2, .help = "sampling"},
    {"model", 'm', DM_OPT_STR, offsetof(opts, model), .metavar = "DIR", .help = "model directory"},
    {"output-format", 0, DM_OPT_ENUM, offsetof(opts, format), "text", .choices = "text|json|stream-json", .help = "shape of the output"},
    {"stop", 0, DM_OPT_STRS, offsetof(opts, stop), .help = "again and again"},
    {"help", 'h', DM_OPT_HELP, 0, .help = "this text"},
};

static int parse(opts *o, dm_opt_result *r, dm_err *e, int argc, const char **argv)
{
    return dm_opt_parse(table, DM_COUNT(table), o, argc, (char **)argv, r, e);
}
#define PARSE(o, r, e, ...) parse(o, r, e, (int)DM_COUNT(((const char *[]){__VA_ARGS__})), (const char *[]){__VA_ARGS__})

static void options_and_arguments_are_taken_apart(void **state)
{
    (void)state;
    opts o = {0};
    dm_opt_result r;
    dm_err e;
    assert_ok_e(PARSE(&o, &r, &e, "-v", "--max-turns=7", "hello", "--kv-bytes", "4G", "-t", "0.5", "--", "--not-an-option", "-"), e);
    assert_true(o.verbose);
    assert_int_equal(o.turns, 7);
    assert_int_equal(o.bytes, 4ll << 30);
    assert_true(o.temperature == 0.5);
    assert_string_equal(o.format, "text");
    assert_int_equal(r.nargs, 3);
    assert_string_equal(r.args[1], "--not-an-option");
    assert_string_equal(r.args[2], "-");
    dm_free(r.args);
    assert_ok_e(PARSE(&o, &r, &e, "--verbose", "--no-verbose", "-h"), e);
    assert_false(o.verbose);
    assert_true(r.help);
    dm_free(r.args);
}

static void one_that_may_be_repeated_keeps_the_order_up_to_a_bound(void **state)
{
    (void)state;
    opts o = {0};
    dm_opt_result r;
    dm_err e;
    assert_ok_e(PARSE(&o, &r, &e, "--stop", "a", "--stop=", "x", "--stop", "--stop"), e);
    assert_int_equal(o.stop.n, 3);
    assert_string_equal(o.stop.v[0], "a");
    assert_string_equal(o.stop.v[1], "");
    assert_string_equal(o.stop.v[2], "--stop");
    assert_int_equal(r.nargs, 1);
    dm_free(r.args);
    char *many[DM_OPT_STRS_MAX + 1];
    for (size_t i = 0; i < DM_COUNT(many); i++) many[i] = (char *)"--stop=b";
    o = (opts){0};
    assert_ok_e(dm_opt_parse(table, DM_COUNT(table), &o, DM_OPT_STRS_MAX, many, &r, &e), e);
    dm_free(r.args);
    o = (opts){0};
    assert_err(DM_EUSAGE, dm_opt_parse(table, DM_COUNT(table), &o, DM_OPT_STRS_MAX + 1, many, &r, &e));
    assert_non_null(strstr(e.text, "--stop may be given 16 times"));
}

static void wrong_options_are_refused_in_words(void **state)
{
    (void)state;
    static const struct { const char *args[3]; const char *says; } bad[] = {
        {{"--max-turn", "3"}, "did you mean --max-turns?"}, {{"--max-turns", "x"}, "--max-turns wants a whole number from 1 to 1000"},
        {{"--max-turns", "0"}, "from 1 to 1000"},           {{"--max-turns"}, "wants a value"},
        {{"--kv-bytes", "99999999T"}, "--kv-bytes wants"},  {{"--kv-bytes", "-1"}, "--kv-bytes wants"},
        {{"--output-format", "xml"}, "text|json|stream-json"}, {{"-x"}, "unknown option -x"},
        {{"--temperature", "nan"}, "--temperature wants"},  {{"--verbose=maybe"}, "true or false"},
    };
    for (size_t i = 0; i < DM_COUNT(bad); i++) {
        opts o = {0};
        dm_opt_result r;
        dm_err e = {0};
        int n = 0;
        while (n < 3 && bad[i].args[n]) n++;
        assert_err(DM_EUSAGE, parse(&o, &r, &e, n, (const char **)bad[i].args));
        if (!strstr(e.text, bad[i].says)) fail_msg("'%s' does not say '%s'", e.text, bad[i].says);
    }
}

static void the_environment_stands_between_default_and_command_line(void **state)
{
    (void)state;
    opts o = {0};
    dm_opt_result r;
    dm_err e = {0};
    setenv("DM_TEST_KV_BYTES", "2M", 1);
    assert_ok_e(PARSE(&o, &r, &e, "-v"), e);
    assert_int_equal(o.bytes, 2 << 20);
    dm_free(r.args);
    assert_ok_e(PARSE(&o, &r, &e, "--kv-bytes=3M"), e);
    assert_int_equal(o.bytes, 3 << 20);
    dm_free(r.args);
    setenv("DM_TEST_KV_BYTES", "many", 1);
    assert_err(DM_EUSAGE, PARSE(&o, &r, &e, "-v"));
    assert_non_null(strstr(e.text, "DM_TEST_KV_BYTES"));
    unsetenv("DM_TEST_KV_BYTES");
}

static void help_lists_every_option_with_its_default(void **state)
{
    (void)state;
    dm_buf b = {0};
    assert_ok(dm_opt_help(table, DM_COUNT(table), &b));
    assert_non_null(strstr(dm_buf_cstr(&b), "-m, --model DIR"));
    assert_non_null(strstr(dm_buf_cstr(&b), "turns at most (default 50)"));
    assert_non_null(strstr(dm_buf_cstr(&b), "[DM_TEST_KV_BYTES]"));
    dm_buf_free(&b);
}

static void an_error_is_one_line_and_keeps_its_code(void **state)
{
    (void)state;
    dm_err e;
    assert_int_equal(dm_err_set(&e, DM_EFORMAT, "x", "a\nb %d", 7), DM_EFORMAT);
    assert_string_equal(e.text, "a b 7");
    dm_err_prefix(&e, "file %s", "f");
    assert_string_equal(e.text, "file f: a b 7");
    dm_err_set(&e, DM_EFORMAT, "x", "a quotation cut or broken: %.2s, %s.", "a\u00e9", "\xff\xe9");
    assert_string_equal(e.text, "a quotation cut or broken: a?, ??.");
    assert_int_equal(dm_err_sys(&e, 2, "x", "opening %s", "/q"), DM_ENOENT);
    assert_string_equal(e.text, "opening /q: no such file or directory");
    assert_string_equal(dm_err_name(DM_EMISS), "DM_EMISS");
    char big[2000];
    memset(big, 'y', sizeof big - 1);
    big[sizeof big - 1] = 0;
    dm_err_set(&e, DM_EIO, "x", "%s", big);
    assert_int_equal(strlen(e.text), sizeof e.text - 1);
}

static void a_file_is_replaced_whole_or_not_at_all(void **state)
{
    (void)state;
    dm_err e;
    char *path = dm_path_join(test_dir(), "f");
    dm_buf b = {0};
    assert_ok_e(dm_file_write_atomic(path, "old", 3, 0600, &e), e);
    static const char *const point[] = {"file.write=fail", "file.sync=fail"};
    for (size_t i = 0; i < DM_COUNT(point); i++) {
        assert_ok(dm_fault_arm(point[i], &e));
        assert_true(dm_file_write_atomic(path, "new", 3, 0600, &e) < 0);
        assert_ok(dm_fault_arm(NULL, &e));
        dm_buf_clear(&b);
        assert_ok_e(dm_file_read(path, 100, &b, &e), e);
        assert_string_equal(dm_buf_cstr(&b), "old");
    }
    assert_err(DM_ELIMIT, dm_file_read(path, 2, &b, &e));
    assert_err(DM_EINVAL, dm_file_read(test_dir(), 100, &b, &e));
    assert_err(DM_ENOENT, dm_file_read("/nonexistent/x", 100, &b, &e));
    char *fifo = dm_path_join(test_dir(), "fifo");
    assert_int_equal(mkfifo(fifo, 0600), 0);
    assert_err(DM_EINVAL, dm_file_read(fifo, 100, &b, &e));
    char *deep = dm_path_join(test_dir(), "a/b/c");
    assert_ok_e(dm_mkdirs(deep, 0700, &e), e);
    assert_ok_e(dm_mkdirs(deep, 0700, &e), e);
    assert_true(dm_mkdirs(path, 0700, &e) < 0);
    dm_buf_free(&b);
    dm_free(path), dm_free(fifo), dm_free(deep);
}

static void fault_points_act_on_the_pass_that_was_asked(void **state)
{
    (void)state;
    dm_err e;
    assert_ok(dm_fault_arm("a:2=fail,b:2+=fail", &e));
    bool a[4], b[4];
    for (int i = 0; i < 4; i++) a[i] = dm_fault("a"), b[i] = dm_fault("b");
    assert_true(!a[0] && a[1] && !a[2] && !a[3]);
    assert_true(!b[0] && b[1] && b[2] && b[3]);
    assert_ok(dm_fault_arm("", &e));
    assert_false(dm_fault("b"));
    assert_err(DM_EUSAGE, dm_fault_arm("a=explode", &e));
    pid_t child = fork();
    if (child == 0) {
        dm_fault_arm("x=kill", NULL);
        dm_fault("x");
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(options_and_arguments_are_taken_apart),
        cmocka_unit_test(one_that_may_be_repeated_keeps_the_order_up_to_a_bound),
        cmocka_unit_test(wrong_options_are_refused_in_words),
        cmocka_unit_test(the_environment_stands_between_default_and_command_line),
        cmocka_unit_test(help_lists_every_option_with_its_default),
        cmocka_unit_test(an_error_is_one_line_and_keeps_its_code),
        cmocka_unit_test(a_file_is_replaced_whole_or_not_at_all),
        cmocka_unit_test(fault_points_act_on_the_pass_that_was_asked),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
