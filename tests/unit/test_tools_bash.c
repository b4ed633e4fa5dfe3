/* bash through the sandbox: output, endings, order, bounds.  Case numbers are those of the field cases. */
#include <dirent.h>
#include <signal.h>
#include <sys/wait.h>

#include "tests/unit/tools_run.h"

static rig g;

static int setup(void **state) {
    (void)state;
    rig_open(&g, DM_SANDBOX_FULL, NULL);
    return 0;
}

static int teardown(void **state) {
    (void)state;
    rig_close(&g);
    return 0;
}

/* Processes anywhere on the machine whose command line holds the marker. */
static int processes_with(const char *mark) {
    const char *marker = test_marked(mark);
    int count = 0;
    DIR *d = opendir("/proc");
    for (struct dirent *it; (it = readdir(d));) {
        char path[300], text[4096];
        if (it->d_name[0] < '0' || it->d_name[0] > '9') continue;
        snprintf(path, sizeof path, "/proc/%s/cmdline", it->d_name);
        FILE *f = fopen(path, "r");
        size_t n = f ? fread(text, 1, sizeof text, f) : 0;
        if (f) fclose(f);
        count += n > 0 && memmem(text, n, marker, strlen(marker)) != NULL;
    }
    closedir(d);
    return count;
}

/* Our only child. */
static pid_t launcher_pid(void) {
    char path[64];
    int pid = 0;
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE *f = fopen(path, "r");
    assert_int_equal(fscanf(f, "%d", &pid), 1);
    fclose(f);
    return pid;
}

static int open_fds(void) {
    int count = 0;
    DIR *d = opendir("/proc/self/fd");
    while (readdir(d)) count++;
    closedir(d);
    return count;
}

/* ---- output and endings ---------------------------------------------------------------------------------------------- */

static void output_comes_without_its_last_newline(void **state) {
    (void)state;
    expect_bash(&g, "echo hi", "hi");
    expect_bash(&g, "printf 'a\\n\\n'", "a\n");
    expect_bash(&g, "true", "");
    expect_bash(&g, "echo out; echo err >&2; echo more", "out\nerr\nmore");
    expect_bash(&g, "echo out; exit 3", "out\nexit code 3");
    char want[600];
    snprintf(want, sizeof want, "%s\n1", g.ws);
    expect_bash(&g, "pwd; echo 1 > made; cat made", want);
    snprintf(want, sizeof want, "%s/made", g.ws);
    assert_true(dm_path_exists(want));
}

static void a03_no_output_returns_at_once(void **state) {
    (void)state;
    call c;
    bash_run_text(&g, &c, "false");
    assert_string_equal(c.r.text, "exit code 1");
    assert_int_equal(c.r.exit_code, 1);
    call_free(&c);
}

static void q15_a04_input_is_empty(void **state) {
    (void)state;
    expect_bash(&g, "cat", "");
    expect_bash(&g, "read x", "exit code 1");
    expect_bash(&g, "bash -c 'read -p name: x; echo \"[$x]\"'", "[]");
    expect_bash(&g, "tty", "not a tty\nexit code 1");
    expect_bash(&g, ": < /dev/tty", "bash: line 1: /dev/tty: No such device or address\nexit code 1");
}

static void a01_q14_background_processes_end_and_the_result_says_so(void **state) {
    (void)state;
    expect_bash(&g, "sleep 301.5 & echo ok", "ok\n[1 background process was ended with the command]");
    expect_bash(&g, "setsid sleep 301.5 & setsid sleep 301.5 & echo ok", "ok\n[2 background processes were ended with the command]");
    expect_bash(&g, "(sleep 0.05; echo late) & echo ok", "ok\nlate"); /* what ends by itself in a moment is waited for */
    assert_int_equal(processes_with("301.5"), 0);
}

static void a02_both_streams_full(void **state) {
    (void)state;
    call c;
    bash_run_text(&g, &c, "head -c 400000 /dev/zero | tr '\\0' e >&2; head -c 400000 /dev/zero | tr '\\0' o");
    assert_int_equal(c.r.output_bytes, 800000);
    assert_true(c.r.cut);
    assert_int_equal(c.r.text[0], 'e');
    assert_int_equal(c.r.text[c.r.text_bytes - 1], 'o');
    call_free(&c);
}

static void a05_q12_a_time_out_ends_the_whole_family(void **state) {
    (void)state;
    call c;
    call_run(&g, &c, "bash", "{\"command\":\"mkfifo f; sleep 302.5 & (sleep 302.5 &) ; cat f & echo before; sleep 302.5\",\"timeout\":1}");
    assert_string_equal(c.r.text, "before\n[timed out: the command was stopped after 1 s]");
    assert_true(c.r.timed_out && c.r.is_error);
    call_free(&c);
    assert_int_equal(processes_with("302.5"), 0);
}

static void a_command_that_ignores_signals_is_killed(void **state) {
    (void)state;
    call c;
    call_run(&g, &c, "bash", "{\"command\":\"trap '' TERM INT HUP; while :; do sleep 303.5; done\",\"timeout\":1}");
    assert_true(c.r.timed_out);
    call_free(&c);
    assert_int_equal(processes_with("303.5"), 0);
}

static void a_command_may_tidy_up_when_it_times_out(void **state) {
    (void)state;
    call c;
    call_run(&g, &c, "bash", "{\"command\":\"trap 'echo tidy; exit' TERM; sleep 304.5 & wait\",\"timeout\":1}");
    assert_non_null(strstr(c.r.text, "tidy"));
    assert_true(c.r.timed_out);
    call_free(&c);
}

static void a06_q27_binary_output_becomes_text(void **state) {
    (void)state;
    expect_bash(&g, "printf 'a\\0b\\033[31mred\\033[0m\\377c'", "abred\xef\xbf\xbd" "c");
    call c;
    bash_run_text(&g, &c, "for i in $(seq 0 255); do printf \"\\\\x$(printf %x $i)\"; done");
    for (size_t i = 0; i < c.r.text_bytes; i++) assert_true((unsigned char)c.r.text[i] >= 32 || c.r.text[i] == '\n' || c.r.text[i] == '\t');
    call_free(&c);
}

static void a07_q24_huge_output_keeps_head_and_tail_in_bounded_memory(void **state) {
    (void)state;
    call c;
    bash_run_text(&g, &c, "yes 0123456789 | head -c 50000000; echo LAST; exit 3");
    assert_int_equal(c.r.output_bytes, 50000005);
    assert_true(c.r.cut && c.r.text_bytes <= 16384);
    assert_memory_equal(c.r.text, "0123456789\n", 11);
    assert_string_equal(c.r.text + c.r.text_bytes - strlen("LAST\nexit code 3"), "LAST\nexit code 3");
    assert_non_null(strstr(c.r.text, " bytes left out here; the whole output is in "));
    assert_non_null(c.r.spill_path);
    struct stat st;
    assert_int_equal(stat(c.r.spill_path, &st), 0);
    assert_int_equal(st.st_size, 50000005);
    assert_int_equal(st.st_mode & 0777, 0600);
    call_free(&c);
}

static void q25_the_whole_output_can_be_read_by_the_model(void **state) {
    (void)state;
    call c;
    char args[1300];
    bash_run_text(&g, &c, "seq 100000");
    assert_non_null(c.r.spill_path);
    snprintf(args, sizeof args, "{\"path\":\"%s\",\"offset\":54321,\"limit\":2}", c.r.spill_path);
    expect(&g, "read", args, "54321\n54322");
    snprintf(args, sizeof args, "{\"path\":\"%s\",\"pattern\":\"^7654.$\",\"limit\":2}", c.r.spill_path);
    call d;
    call_run(&g, &d, "grep", args);
    assert_non_null(strstr(d.r.text, ".txt:76540:76540\n"));
    call_free(&d);
    /* To be read, nothing else; and nothing else beside it. */
    snprintf(args, sizeof args, "{\"path\":\"%s\",\"content\":\"x\"}", c.r.spill_path);
    call_run(&g, &d, "write", args);
    assert_true(d.r.is_error);
    call_free(&d);
    test_put(g.spill, "journal", "SECRET\n");
    snprintf(args, sizeof args, "{\"path\":\"%s/journal\"}", g.spill);
    call_run(&g, &d, "read", args);
    assert_true(d.r.is_error);
    call_free(&d);
    snprintf(args, sizeof args, "{\"path\":\"%s/output-/../journal\"}", g.spill);
    call_run(&g, &d, "read", args);
    assert_true(d.r.is_error);
    call_free(&d);
    call_free(&c);
}

static long rss_kb(void) {
    long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    assert_int_equal(fscanf(f, "%*d %ld", &pages), 1);
    fclose(f);
    return pages * 4;
}

static void q26_endless_output_is_stopped_at_its_cap(void **state) {
    (void)state;
    rig small;
    call c;
    const dm_tools_opts o = {.output_bytes_max = 20 << 20};
    rig_open(&small, DM_SANDBOX_FULL, &o);
    bash_run_text(&small, &c, "echo warm");
    call_free(&c);
    const long before = rss_kb();
    bash_run_text(&small, &c, "yes");
#ifndef __SANITIZE_ADDRESS__
    assert_true(rss_kb() - before < 10000);
#else
    (void)before;
#endif
    assert_non_null(strstr(c.r.text, "[the command was stopped: more than 20 MiB of output]"));
    assert_true(c.r.is_error);
    struct stat st;
    assert_int_equal(stat(c.r.spill_path, &st), 0);
    assert_int_equal(st.st_size, 20 << 20);
    call_free(&c);
    rig_close(&small);
}

static void short_output_leaves_no_spill_file(void **state) {
    (void)state;
    call c;
    bash_run_text(&g, &c, "seq 100");
    assert_null(c.r.spill_path);
    assert_false(c.r.cut);
    call_free(&c);
    DIR *d = opendir(g.spill);
    int entries = 0;
    while (readdir(d)) entries++;
    closedir(d);
    assert_int_equal(entries, 2);
}

static void progress_lines_collapse(void **state) {
    (void)state;
    expect_bash(&g, "for i in $(seq 100); do printf '\\r%d%%' $i; done; echo; echo done", "100%\ndone");
}

static void a_signal_is_named(void **state) {
    (void)state;
    expect_bash(&g, "kill -SEGV $$", "[ended by signal 11]");
    expect_bash(&g, "(bash -c 'kill -SEGV $$'; echo $?) 2>/dev/null", "139");
}

static void errors_name_the_right_line(void **state) {
    (void)state;
    expect_bash(&g, "true\nnosuchprogram", "bash: line 2: nosuchprogram: command not found\nexit code 127");
    expect_bash(&g, "cat <<X\nhere\nX\n", "here");
    expect_bash(&g, "# only a comment", "");
    expect_bash(&g, "echo 'quo\"ted' \"$((1+1))\" `echo x`", "quo\"ted 2 x");
}

/* ---- memory and processes --------------------------------------------------------------------------------------------- */

static void q16_a_fifo_without_a_writer_times_out(void **state) {
    (void)state;
    call c;
    call_run(&g, &c, "bash", "{\"command\":\"mkfifo pipe; cat pipe\",\"timeout\":1}");
    assert_true(c.r.timed_out);
    call_free(&c);
}

/* ---- several at once ---------------------------------------------------------------------------------------------------- */

static void q51_calls_run_side_by_side(void **state) {
    (void)state;
    call c[3];
    const char *const sleeps[] = {"{\"command\":\"sleep 0.9; echo a\"}", "{\"command\":\"sleep 0.6; echo b\"}", "{\"command\":\"sleep 0.3; echo c\"}"};
    for (int i = 0; i < 3; i++) call_start(&g, &c[i], "bash", sleeps[i]);
    for (int i = 0; i < 3; i++) call_wait(&g, &c[i]);
    assert_true(c[2].order < c[1].order && c[1].order < c[0].order); /* side by side: the short one ends first */
    assert_string_equal(c[0].r.text, "a");
    assert_string_equal(c[1].r.text, "b");
    assert_string_equal(c[2].r.text, "c");
    for (int i = 0; i < 3; i++) call_free(&c[i]);
}

static void q52_writes_are_taken_in_order(void **state) {
    (void)state;
    call c[6];
    call_start(&g, &c[0], "bash", "{\"command\":\"sleep 0.3; echo one > f; echo shell\"}");
    call_start(&g, &c[1], "edit", "{\"path\":\"f\",\"old\":\"one\",\"new\":\"two\"}");
    call_start(&g, &c[2], "edit", "{\"path\":\"f\",\"old\":\"two\",\"new\":\"three\"}");
    call_start(&g, &c[3], "read", "{\"path\":\"f\"}");
    call_start(&g, &c[4], "write", "{\"path\":\"f\",\"content\":\"four\"}");
    call_start(&g, &c[5], "bash", "{\"command\":\"cat f\"}");
    for (int i = 0; i < 6; i++) call_wait(&g, &c[i]);
    assert_string_equal(c[1].r.text, "Edited f: 1 replacement");
    assert_string_equal(c[2].r.text, "Edited f: 1 replacement");
    assert_string_equal(c[3].r.text, "three");
    assert_string_equal(c[5].r.text, "four");
    for (int i = 0; i < 6; i++) call_free(&c[i]);
}

static void q23_q53_a_batch_gives_each_its_own_result(void **state) {
    (void)state;
    enum { N = 20 };
    call c[N];
    test_put(g.ws, "f", "text\n");
    for (int i = 0; i < N; i++) {
        char args[64];
        snprintf(args, sizeof args, "{\"command\":\"echo %d; exit %d\"}", i, i % 2);
        if (i % 4 == 0) call_start(&g, &c[i], "read", i % 8 ? "{\"path\":\"f\"}" : "{\"path\":\"missing\"}");
        else if (i % 4 == 1) call_start(&g, &c[i], "grep", "{\"pattern\":\"text\",\"path\":\"f\"}");
        else call_start(&g, &c[i], "bash", args);
    }
    for (int i = 0; i < N; i++) {
        char want[64];
        call_wait(&g, &c[i]);
        if (i % 4 >= 2) {
            snprintf(want, sizeof want, i % 2 ? "%d\nexit code 1" : "%d", i);
            assert_string_equal(c[i].r.text, want);
        } else {
            assert_string_equal(c[i].r.text, i % 4 == 1 ? "f:1:text" : i % 8 ? "text" : "error: no such file: missing");
        }
        call_free(&c[i]);
    }
}

static void cancel_ends_one_call_and_not_the_others(void **state) {
    (void)state;
    call c[3];
    call_start(&g, &c[0], "bash", "{\"command\":\"echo begun; sleep 305.5\"}");
    call_start(&g, &c[1], "bash", "{\"command\":\"sleep 0.5; echo b\"}");
    call_start(&g, &c[2], "write", "{\"path\":\"never\",\"content\":\"x\"}"); /* waits for both */
    for (int i = 0; i < 30; i++) uv_run(&g.loop, UV_RUN_NOWAIT);
    dm_tools_cancel(c[2].run);
    dm_tools_cancel(c[0].run);
    dm_tools_cancel(c[0].run); /* twice is once */
    for (int i = 0; i < 3; i++) call_wait(&g, &c[i]);
    assert_true(c[0].r.cancelled && c[2].r.cancelled && !c[1].r.cancelled);
    assert_non_null(strstr(c[0].r.text, "[cancelled: the command was stopped]"));
    assert_string_equal(c[1].r.text, "b");
    assert_string_equal(c[2].r.text, "error: cancelled before it was done");
    for (int i = 0; i < 3; i++) call_free(&c[i]);
    assert_false(dm_path_exists("never"));
    assert_int_equal(processes_with("305.5"), 0);
}

static void tmp_is_private_and_stays_between_calls(void **state) {
    (void)state;
    expect_bash(&g, "echo kept > /tmp/dm-proof; mktemp >/dev/null && echo made", "made");
    expect_bash(&g, "cat /tmp/dm-proof", "kept");
    assert_false(dm_path_exists("/tmp/dm-proof"));
}

/* The directory behind /tmp goes with the host, even with one that is killed: the launcher sees to it. */
static void tmp_is_removed_when_the_host_is_killed(void **state) {
    (void)state;
    int tell[2];
    char path[256] = "";
    assert_int_equal(pipe(tell), 0);
    fflush(NULL);
    const pid_t host = fork();
    if (host == 0) {
        rig other;
        call c;
        rig_open(&other, DM_SANDBOX_FULL, NULL);
        bash_run_text(&other, &c, "echo x > /tmp/f; grep ' /tmp ' /proc/self/mountinfo | grep -o '/dormouse-tmp-......'");
        if (write(tell[1], c.r.text, c.r.text_bytes) < 0) _exit(1);
        pause();
    }
    ssize_t n = read(tell[0], path + 4, sizeof path - 5);
    assert_true(n > 0);
    memcpy(path, "/tmp", 4);
    path[4 + n] = 0;
    assert_true(dm_path_exists(path));
    kill(host, SIGKILL);
    assert_int_equal(waitpid(host, NULL, 0), host);
    for (int i = 0; i < 3000 && dm_path_exists(path); i++) usleep(10000);
    assert_false(dm_path_exists(path));
    close(tell[0]);
    close(tell[1]);
}

static void spilled_outputs_are_hidden_from_commands(void **state) {
    (void)state;
    call c;
    bash_run_text(&g, &c, "seq 100000");
    assert_non_null(c.r.spill_path);
    char command[1300];
    snprintf(command, sizeof command, "cat %s", c.r.spill_path);
    call_free(&c);
    bash_run_text(&g, &c, command);
    assert_int_equal(c.r.exit_code, 1);
    call_free(&c);
}

/* ---- without a sandbox ---------------------------------------------------------------------------------------------------- */

static void c6_without_a_sandbox_commands_are_refused(void **state) {
    (void)state;
    rig none;
    rig_open(&none, -1, NULL);
    expect_bash(&none, "echo hi", "error: commands cannot be run here: there is no sandbox");
    rig_close(&none);
}

static void two_registries_share_one_sandbox(void **state) {
    (void)state;
    dm_tools *other;
    dm_err e = {0};
    const dm_tools_opts o = {.loop = &g.loop, .sandbox = g.sandbox, .workspace = g.outside};
    assert_ok_e(dm_tools_create(&other, &o, &e), e);
    assert_ok_e(dm_tools_add_defaults(other, &e), e);
    rig second = g;
    second.tools = other;
    call a, b;
    call_start(&g, &a, "bash", "{\"command\":\"sleep 0.2; basename $PWD\"}");
    call_start(&second, &b, "bash", "{\"command\":\"basename $PWD\"}");
    call_wait(&g, &a);
    call_wait(&g, &b);
    assert_string_equal(a.r.text, "proj");
    assert_string_equal(b.r.text, "proj-evil");
    call_free(&a);
    call_free(&b);
    dm_tools_destroy(other);
    expect_bash(&g, "echo still", "still");
}

static void the_launcher_may_die_and_the_call_ends(void **state) {
    (void)state;
    call c;
    call_start(&g, &c, "bash", "{\"command\":\"echo begun; sleep 306.5\"}");
    for (int i = 0; i < 20; i++) uv_run(&g.loop, UV_RUN_NOWAIT), usleep(10000);
    assert_int_equal(kill(launcher_pid(), SIGKILL), 0);
    call_wait(&g, &c);
    assert_string_equal(c.r.text, "begun\nerror: the sandbox's launcher is gone; the command was ended with it");
    call_free(&c);
    assert_int_equal(processes_with("306.5"), 0);
    call_run(&g, &c, "bash", "{\"command\":\"true\"}");
    assert_string_equal(c.r.text, "error: the command could not be started: the launcher is gone");
    call_free(&c);
}

/* ---- Q13: nothing is left ---------------------------------------------------------------------------------------------------- */

static void q13_many_calls_leave_no_descriptor_and_no_zombie(void **state) {
    (void)state;
    const int n = test_full() ? 1000 : 300;
    call c;
    bash_run_text(&g, &c, "true");
    call_free(&c);
    const int before = open_fds();
    for (int i = 0; i < n; i++) {
        call_start(&g, &c, "bash", i % 2 ? "{\"command\":\"sleep 307.5\"}" : "{\"command\":\"echo x\"}");
        for (int k = 0; i % 2 && k < 3; k++) uv_run(&g.loop, UV_RUN_NOWAIT);
        if (i % 2) dm_tools_cancel(c.run);
        call_wait(&g, &c);
        call_free(&c);
    }
    uv_run(&g.loop, UV_RUN_NOWAIT);
    assert_int_equal(open_fds(), before);
    assert_int_equal(waitpid(-1, NULL, WNOHANG), 0); /* the launcher alone, alive */
    assert_int_equal(processes_with("307.5"), 0);
    expect_bash(&g, "cat /proc/[0-9]*/status | grep -c '^State:.Z'", "0\nexit code 1");
}

static void the_nth_allocation_may_fail(void **state) {
    (void)state;
    int good = 0;
    for (int64_t n = 1; n < 80; n++) {
        call c = {0};
        json_t *args = json_pack("{s:s}", "command", "seq 3000; exit 2");
        dm_fault_alloc_after(n);
        const int rc = dm_tools_start(g.tools, "bash", args, call_done, &c, &c.run, NULL);
        if (rc == 0) {
            while (!c.done && uv_run(&g.loop, UV_RUN_ONCE)) continue;
            dm_fault_alloc_after(-1);
            assert_int_equal(c.done, 1);
            assert_non_null(c.r.text);
            good += c.r.exit_code == 2;
            call_free(&c);
        } else {
            assert_int_equal(rc, DM_ENOMEM);
        }
        dm_fault_alloc_after(-1);
        json_decref(args);
    }
    assert_true(good > 10);
}

int main(void) {
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(output_comes_without_its_last_newline),
        T(a03_no_output_returns_at_once),
        T(q15_a04_input_is_empty),
        T(a01_q14_background_processes_end_and_the_result_says_so),
        T(a02_both_streams_full),
        T(a05_q12_a_time_out_ends_the_whole_family),
        T(a_command_that_ignores_signals_is_killed),
        T(a_command_may_tidy_up_when_it_times_out),
        T(a06_q27_binary_output_becomes_text),
        T(a07_q24_huge_output_keeps_head_and_tail_in_bounded_memory),
        T(q25_the_whole_output_can_be_read_by_the_model),
        T(q26_endless_output_is_stopped_at_its_cap),
        T(short_output_leaves_no_spill_file),
        T(progress_lines_collapse),
        T(a_signal_is_named),
        T(errors_name_the_right_line),
        T(q16_a_fifo_without_a_writer_times_out),
        T(q51_calls_run_side_by_side),
        T(q52_writes_are_taken_in_order),
        T(q23_q53_a_batch_gives_each_its_own_result),
        T(cancel_ends_one_call_and_not_the_others),
        T(tmp_is_private_and_stays_between_calls),
        T(tmp_is_removed_when_the_host_is_killed),
        T(spilled_outputs_are_hidden_from_commands),
        T(c6_without_a_sandbox_commands_are_refused),
        T(two_registries_share_one_sandbox),
        T(the_launcher_may_die_and_the_call_ends),
        T(the_nth_allocation_may_fail),
        T(q13_many_calls_leave_no_descriptor_and_no_zombie),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
