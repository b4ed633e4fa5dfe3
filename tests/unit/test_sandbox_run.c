/* One command: what comes back, which limits hold, how it ends. */
#include "tests/unit/sandbox_run.h"

static dm_sandbox *s;
static const char *ws;

static int setup(void **state) {
    (void)state;
    s = sandbox_up(DM_SANDBOX_FULL, NULL);
    ws = fresh_dir("ws");
    return 0;
}

static int teardown(void **state) {
    (void)state;
    dm_sandbox_stop(s);
    return 0;
}

static void the_level_is_reported_in_one_line(void **state) {
    (void)state;
    assert_int_equal(dm_sandbox_level_of(s), DM_SANDBOX_FULL);
    assert_memory_equal(dm_sandbox_report(s), "full: ", 6);
    assert_null(strchr(dm_sandbox_report(s), '\n'));
}

static void output_error_and_status_come_apart(void **state) {
    (void)state;
    ran r;
    run_sh(s, ws, "echo out; echo err >&2; exit 7", &r);
    assert_string_equal(r.out, "out\n");
    assert_string_equal(r.err, "err\n");
    assert_int_equal(r.x.exit_code, 7);
    assert_int_equal(r.x.signal, 0);
    assert_false(r.x.setup_failed || r.x.timed_out || r.x.killed || r.x.memory);
    ran_free(&r);
}

static void a_signal_is_not_an_exit_code(void **state) {
    (void)state;
    ran r;
    run_sh(s, ws, "kill -SEGV $$", &r);
    assert_int_equal(r.x.exit_code, -1);
    assert_int_equal(r.x.signal, SIGSEGV);
    ran_free(&r);
    run_sh(s, ws, "exit 139", &r);
    assert_int_equal(r.x.exit_code, 139);
    assert_int_equal(r.x.signal, 0);
    ran_free(&r);
}

static void s4_a_missing_program_is_told_apart_from_a_failing_one(void **state) {
    (void)state;
    ran r;
    const char *const argv[] = {"no-such-program", NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws}, &r);
    assert_true(r.x.setup_failed);
    assert_string_equal(r.x.text, "no-such-program cannot be run: no such file or directory");
    assert_string_equal(r.err, "");
    ran_free(&r);
    run_sh(s, ws, "exit 127", &r);
    assert_false(r.x.setup_failed);
    assert_int_equal(r.x.exit_code, 127);
    ran_free(&r);
}

static void input_is_given_and_otherwise_empty(void **state) {
    (void)state;
    ran r;
    const char *const argv[] = {"cat", NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws}, &r);
    assert_string_equal(r.out, "");
    ran_free(&r);
    char *big = malloc(1 << 20);
    memset(big, 'i', 1 << 20);
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .input = big, .input_bytes = 1 << 20}, &r);
    assert_int_equal(strlen(r.out), 1 << 20);
    ran_free(&r);
    dm_sandbox_proc p;
    assert_err(DM_ELIMIT, dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .input = big, .input_bytes = (1 << 20) + 1}, &p, NULL));
    free(big);
}

static void the_working_directory_is_the_workspace_or_as_said(void **state) {
    (void)state;
    ran r;
    char want[700], sub[650];
    snprintf(want, sizeof want, "%s\n", ws);
    expect_sh(s, ws, "pwd", want);
    snprintf(sub, sizeof sub, "%s/sub", ws);
    assert_int_equal(mkdir(sub, 0755), 0);
    snprintf(want, sizeof want, "%s\n", sub);
    const char *const argv[] = {"pwd", NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .cwd = sub}, &r);
    assert_string_equal(r.out, want);
    ran_free(&r);
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .cwd = "/nowhere/at/all"}, &r);
    assert_true(r.x.setup_failed);
    assert_non_null(strstr(r.x.text, "/nowhere/at/all"));
    ran_free(&r);
}

static void files_made_inside_are_there_outside_and_ours(void **state) {
    (void)state;
    struct stat st;
    char path[700];
    expect_sh(s, ws, "echo made > f; mkdir d; echo x > d/y; cat f", "made\n");
    snprintf(path, sizeof path, "%s/d/y", ws);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_uid, geteuid());
}

static void a_readonly_workspace_cannot_be_written(void **state) {
    (void)state;
    ran r;
    const char *const argv[] = {"sh", "-c", "cat f; echo x > g", NULL};
    put_file(ws, "f", "text\n");
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .workspace_readonly = true}, &r);
    assert_string_equal(r.out, "text\n");
    assert_int_equal(r.x.exit_code, 2);
    assert_non_null(strstr(r.err, "Read-only file system"));
    ran_free(&r);
}

static void more_directories_can_be_made_writable(void **state) {
    (void)state;
    ran r;
    const char *more = fresh_dir("more");
    const char *const write[] = {more, NULL};
    char script[700], path[700];
    snprintf(script, sizeof script, "echo x > %s/made", more);
    const char *const argv[] = {"sh", "-c", script, NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .write = write}, &r);
    assert_int_equal(r.x.exit_code, 0);
    ran_free(&r);
    snprintf(path, sizeof path, "%s/made", more);
    assert_true(dm_path_exists(path));
}

static void whole_system_directories_are_no_workspace(void **state) {
    (void)state;
    static const char *const no[] = {"/", "/etc", "/usr", "/proc/self", "/dev/shm", "/sys"};
    const char *const argv[] = {"true", NULL};
    for (size_t i = 0; i < DM_COUNT(no); i++) {
        ran r;
        run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = no[i]}, &r);
        assert_true(r.x.setup_failed);
        assert_non_null(strstr(r.x.text, "cannot be a workspace"));
        ran_free(&r);
    }
    dm_sandbox_proc p;
    assert_err(DM_EINVAL, dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv, .workspace = "relative"}, &p, NULL));
    assert_err(DM_EINVAL, dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv}, &p, NULL));
    const char *const none[] = {NULL};
    assert_err(DM_EINVAL, dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = none, .workspace = ws}, &p, NULL));
}

/* ---- limits --------------------------------------------------------------------------------------------------------- */

static void a_time_out_ends_every_process(void **state) {
    (void)state;
    ran r;
    const char *const argv[] = {"sh", "-c", test_marked("echo before; sleep 411.5 & (setsid sleep 411.5 &) ; sleep 411.5"), NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .timeout_ms = 300}, &r);
    assert_true(r.x.timed_out);
    assert_string_equal(r.out, "before\n");
    ran_free(&r);
    assert_int_equal(processes_with("411.5"), 0);
}

static void a_kill_ends_every_process_and_is_told(void **state) {
    (void)state;
    ran r;
    dm_sandbox_proc p;
    put_file(ws, "job", "trap '' TERM; sleep 412.5 & setsid sleep 412.5 & wait; wait");
    const char *const argv[] = {"sh", "job", NULL};
    assert_ok(dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws}, &p, NULL));
    wait_processes("412.5", 2);
    assert_ok(dm_sandbox_kill(s, p.id));
    assert_ok(dm_sandbox_kill(s, p.id));
    collect(s, &p, &r);
    assert_true(r.x.killed && !r.x.timed_out);
    ran_free(&r);
    assert_int_equal(processes_with("412.5"), 0);
    assert_err(DM_ENOENT, dm_sandbox_kill(s, p.id));
    assert_err(DM_ENOENT, dm_sandbox_kill(s, 99));
}

static void background_processes_end_with_the_command_and_are_counted(void **state) {
    (void)state;
    ran r;
    run_sh(s, ws, "sleep 413.5 & setsid sleep 413.5 & echo hi", &r);
    assert_string_equal(r.out, "hi\n");
    assert_int_equal(r.x.background, 2);
    ran_free(&r);
    assert_int_equal(processes_with("413.5"), 0);
    run_sh(s, ws, "(sleep 0.03; echo later) & echo hi", &r);
    assert_string_equal(r.out, "hi\nlater\n");
    assert_int_equal(r.x.background, 0);
    ran_free(&r);
}

static void q74_memory_is_bounded_and_only_the_tool_dies(void **state) {
    (void)state;
    ran r;
    const char *const argv[] = {"sh", "-c", "x=aaaaaaaaaaaaaaaa; while :; do x=$x$x; done", NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .memory_bytes_max = 64 << 20, .timeout_ms = 60000}, &r);
    assert_true(r.x.memory);
    assert_true(r.x.memory_bytes_peak > 64 << 20);
    ran_free(&r);
    expect_sh(s, ws, "echo alive", "alive\n");
}

static void memory_files_count_too(void **state) {
    (void)state;
    ran r;
    const char *const argv[] = {"sh", "-c", "for d in /tmp /dev/shm /run /var/tmp; do head -c 100000000 /dev/zero > $d/f && echo $d; done", NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .memory_bytes_max = 64 << 20}, &r);
    assert_string_equal(r.out, "");
    ran_free(&r);
}

static void the_number_of_processes_is_bounded(void **state) {
    (void)state;
    ran r;
    const char *const argv[] = {"sh", "-c", test_marked("i=0; while [ $i -lt 500 ]; do sleep 414.5 & i=$((i+1)); done; wait"), NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .pids_max = 40, .timeout_ms = 60000}, &r);
    /* As root by watching; as a plain user the kernel refuses the fork, and the shell gives up. */
    assert_true(r.x.pids || r.x.exit_code != 0);
    ran_free(&r);
    assert_int_equal(processes_with("414.5"), 0);
}

static void the_size_of_a_file_is_bounded(void **state) {
    (void)state;
    ran r;
    struct stat st;
    char path[700];
    const char *const argv[] = {"sh", "-c", "head -c 3000000 /dev/zero > big", NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .file_bytes_max = 1 << 20}, &r);
    assert_int_not_equal(r.x.exit_code, 0);
    snprintf(path, sizeof path, "%s/big", ws);
    assert_int_equal(stat(path, &st), 0);
    assert_int_equal(st.st_size, 1 << 20);
    ran_free(&r);
}

static void processor_time_is_bounded(void **state) {
    (void)state;
    ran r;
    const char *const argv[] = {"sh", "-c", "while :; do :; done", NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .cpu_s_max = 1, .timeout_ms = 120000}, &r);
    assert_true(r.x.signal == SIGXCPU || r.x.signal == SIGKILL);
    assert_true(r.x.cpu_ms > 0); /* the limit counts in ticks, the report in time really run: on a shared processor they part */
    assert_false(r.x.timed_out);
    ran_free(&r);
}

static void arguments_pass_unchanged(void **state) {
    (void)state;
    ran r;
    const char *const argv[] = {"printf", "%s|", "a b", "", "'; touch pwn; '", "$HOME", "--", "\xc3\xa9\n", NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws}, &r);
    assert_string_equal(r.out, "a b||'; touch pwn; '|$HOME|--|\xc3\xa9\n|");
    ran_free(&r);
    char *big = malloc(131073);
    memset(big, 'x', 131072);
    big[131072] = 0;
    const char *const too_big[] = {"echo", big, NULL};
    dm_sandbox_proc p;
    assert_err(DM_ELIMIT, dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = too_big, .workspace = ws}, &p, NULL));
    big[131071] = 0;
    const char *const fits[] = {"printf", "%s", big, NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = fits, .workspace = ws}, &r);
    assert_int_equal(strlen(r.out), 131071);
    ran_free(&r);
    free(big);
}

/* ---- many ------------------------------------------------------------------------------------------------------------- */

static void many_at_once_each_get_their_own_end(void **state) {
    (void)state;
    enum { N = 40 };
    dm_sandbox_proc p[N];
    bool seen[N] = {false};
    char script[N][64];
    for (int i = 0; i < N; i++) {
        snprintf(script[i], sizeof script[i], "echo %d; exit %d", i, i);
        const char *const argv[] = {"sh", "-c", script[i], NULL};
        assert_ok(dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws}, &p[i], NULL));
    }
    for (int got = 0; got < N;) {
        dm_sandbox_exit x;
        struct pollfd pf = {dm_sandbox_fd(s), POLLIN, 0};
        poll(&pf, 1, -1);
        const int rc = dm_sandbox_next(s, &x, NULL);
        assert_ok(rc);
        if (rc == 0) continue;
        got++;
        for (int i = 0; i < N; i++) {
            if (p[i].id != x.id) continue;
            assert_false(seen[i]);
            seen[i] = true;
            assert_int_equal(x.exit_code, i);
        }
    }
    for (int i = 0; i < N; i++) {
        char text[16], want[16];
        ssize_t n = read(p[i].out_fd, text, sizeof text - 1);
        text[n > 0 ? n : 0] = 0;
        snprintf(want, sizeof want, "%d\n", i);
        assert_string_equal(text, want);
        close(p[i].out_fd);
        close(p[i].err_fd);
    }
}

static int fds_of(pid_t pid) {
    char path[64];
    int count = 0;
    snprintf(path, sizeof path, "/proc/%d/fd", (int)pid);
    DIR *d = opendir(path);
    while (readdir(d)) count++;
    closedir(d);
    return count;
}

static void q13_the_launcher_keeps_nothing_after_300_commands(void **state) {
    (void)state;
    const int n = test_full() ? 1000 : 300;
    expect_sh(s, ws, "true", "");
    const pid_t launcher = only_child();
    const int before = fds_of(launcher), before_here = fds_of(getpid());
    for (int i = 0; i < n; i++) {
        ran r;
        dm_sandbox_proc p;
        const char *const argv[] = {"sh", "-c", i % 2 ? test_marked("sleep 415.5 & sleep 415.5") : "exit 3", NULL};
        assert_ok(dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws}, &p, NULL));
        if (i % 2) assert_ok(dm_sandbox_kill(s, p.id));
        collect(s, &p, &r);
        assert_true(i % 2 ? r.x.killed : r.x.exit_code == 3);
        ran_free(&r);
    }
    assert_int_equal(fds_of(launcher), before);
    assert_int_equal(fds_of(getpid()), before_here);
    assert_int_equal(processes_with("415.5"), 0);
    char path[64], text[256] = "";
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)launcher, (int)launcher);
    int fd = open(path, O_RDONLY);
    assert_true(read(fd, text, sizeof text) == 0); /* no child, so no zombie either */
    close(fd);
}

static void too_many_at_once_is_refused(void **state) {
    (void)state;
    dm_sandbox_proc p[257];
    int n = 0, rc = 0;
    const char *const argv[] = {"sleep", test_marked("416.5"), NULL};
    while (n < 257 && (rc = dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws}, &p[n], NULL)) == 0) n++;
    assert_int_equal(rc, DM_EBUSY);
    assert_int_equal(n, 256);
    for (int i = 0; i < n; i++) close(p[i].out_fd), close(p[i].err_fd);
    dm_sandbox_stop(s); /* kills them all */
    s = NULL;
    assert_int_equal(processes_with("416.5"), 0);
}

int main(void) {
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(the_level_is_reported_in_one_line),
        T(output_error_and_status_come_apart),
        T(a_signal_is_not_an_exit_code),
        T(s4_a_missing_program_is_told_apart_from_a_failing_one),
        T(input_is_given_and_otherwise_empty),
        T(the_working_directory_is_the_workspace_or_as_said),
        T(files_made_inside_are_there_outside_and_ours),
        T(a_readonly_workspace_cannot_be_written),
        T(more_directories_can_be_made_writable),
        T(whole_system_directories_are_no_workspace),
        T(a_time_out_ends_every_process),
        T(a_kill_ends_every_process_and_is_told),
        T(background_processes_end_with_the_command_and_are_counted),
        T(q74_memory_is_bounded_and_only_the_tool_dies),
        T(memory_files_count_too),
        T(the_number_of_processes_is_bounded),
        T(the_size_of_a_file_is_bounded),
        T(processor_time_is_bounded),
        T(arguments_pass_unchanged),
        T(many_at_once_each_get_their_own_end),
        T(q13_the_launcher_keeps_nothing_after_300_commands),
        T(too_many_at_once_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
