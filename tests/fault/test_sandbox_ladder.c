/* When things are missing, broken or hostile: the ladder of levels, false wrappers, false launchers, a host that dies. */
#include <grp.h>
#include <sched.h>
#include <seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include "sandbox/wire_int.h"
#include "tests/unit/sandbox_run.h"

static const char *script_file(const char *name, const char *text) {
    static char path[800];
    const char *dir = fresh_dir("bin");
    put_file(dir, name, text);
    snprintf(path, sizeof path, "%s/%s", dir, name);
    assert_int_equal(chmod(path, 0755), 0);
    return path;
}

static void expect_refused(const char *bwrap, dm_sandbox_level level, const char *const *words) {
    dm_sandbox *s = (dm_sandbox *)1;
    dm_err e = {0};
    const dm_sandbox_opts o = {.launcher = test_launcher(), .bwrap = bwrap, .level = level};
    assert_err(DM_ESANDBOX, dm_sandbox_start(&s, &o, &e));
    assert_null(s);
    assert_null(strchr(e.text, '\n'));
    for (; *words; words++)
        if (!strstr(e.text, *words)) fail_msg("\"%s\" does not say \"%s\"", e.text, *words);
}

/* ---- wrappers -------------------------------------------------------------------------------------------------------- */

static void q72_a_wrapper_that_fails_is_refused_in_words(void **state) {
    (void)state;
    const char *bwrap = script_file("bwrap", "#!/bin/sh\necho 'bwrap: setting up uid map: Permission denied' >&2\nexit 1\n");
    expect_refused(bwrap, DM_SANDBOX_FULL, (const char *const[]){"level full cannot be had", "setting up uid map: Permission denied", NULL});
}

static void a_missing_wrapper_is_told_with_the_way_out(void **state) {
    (void)state;
    expect_refused("/no/such/bwrap", DM_SANDBOX_FULL, (const char *const[]){"/no/such/bwrap is not a program", "install the package bubblewrap", NULL});
    dm_sandbox *s;
    dm_err e = {0};
    char *path = strdup(getenv("PATH"));
    setenv("PATH", "/nowhere", 1);
    const dm_sandbox_opts o = {.launcher = test_launcher(), .level = DM_SANDBOX_FULL};
    const int rc = dm_sandbox_start(&s, &o, &e);
    setenv("PATH", path, 1);
    free(path);
    assert_int_equal(rc, DM_ESANDBOX);
    assert_non_null(strstr(e.text, "bubblewrap (bwrap) is not installed; install the package bubblewrap"));
}

/* The wrapper's promise is checked from inside, not taken. */
static void a_wrapper_that_runs_the_command_bare_is_found_out(void **state) {
    (void)state;
    char text[2000];
    snprintf(text, sizeof text, "#!/bin/sh\nwhile [ \"$1\" != -- ]; do shift; done\nshift 2\nexec %s \"$@\"\n", test_launcher());
    expect_refused(script_file("bwrap", text), DM_SANDBOX_FULL, (const char *const[]){"no pid namespace of its own", NULL});
}

static void a_wrapper_that_pretends_success_is_found_out(void **state) {
    (void)state;
    expect_refused(script_file("bwrap", "#!/bin/sh\nexit 0\n"), DM_SANDBOX_FULL, (const char *const[]){"ended with status 0 before the command started", NULL});
}

static void a_wrapper_that_hangs_is_given_up(void **state) {
    (void)state;
    if (!test_full()) test_skip("waits for a time-out of 10 s; run with DM_TEST_FULL");
    expect_refused(script_file("bwrap", "#!/bin/sh\nexec sleep 431.5\n"), DM_SANDBOX_FULL, (const char *const[]){"did not end within 10 s", NULL});
    assert_int_equal(processes_with("431.5"), 0);
}

/* ---- partial and none ------------------------------------------------------------------------------------------------- */

/* Real confinement without namespaces, by Landlock and seccomp. */
static void check_partial(dm_sandbox *s) {
    ran r;
    const char *ws = fresh_dir("ws"), *outside = fresh_dir("outside");
    char script[1600];
    put_file(outside, "f", "SECRET\n");
    snprintf(script, sizeof script,
             "echo made > f; cat f; cat %s/f; echo x > %s/new; echo x > /etc/dm-proof; echo $TMPDIR > $TMPDIR/t && cat $TMPDIR/t | cut -c1-14;"
             "unshare -U true; bash -c ': <>/dev/tcp/127.0.0.1/1'; env | grep -c KEY=; exit 5",
             outside, outside);
    run_sh(s, ws, script, &r);
    if (r.x.setup_failed) fail_msg("%s", r.x.text);
    assert_string_equal(r.out, "made\n/tmp/dormouse-\n0\n");
    assert_int_equal(r.x.exit_code, 5);
    ran_free(&r);
    snprintf(script, sizeof script, "%s/new", outside);
    assert_false(dm_path_exists(script) || dm_path_exists("/etc/dm-proof"));
    run_sh(s, ws, "setsid sleep 432.5 & sleep 432.5 & echo hi", &r);
    assert_string_equal(r.out, "hi\n");
    assert_int_equal(r.x.background, 2);
    ran_free(&r);
    assert_int_equal(processes_with("432.5"), 0);
    const char *const argv[] = {"sh", "-c", test_marked("trap '' TERM; (setsid sleep 433.5 &) ; sleep 433.5; sleep 433.5"), NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .timeout_ms = 300}, &r);
    assert_true(r.x.timed_out);
    ran_free(&r);
    wait_processes("433.5", 0);
}

static void q72_partial_is_had_only_when_it_is_accepted(void **state) {
    (void)state;
    dm_sandbox *s;
    dm_err e = {0};
    const char *bwrap = script_file("bwrap", "#!/bin/sh\nexit 1\n");
    const dm_sandbox_opts o = {.launcher = test_launcher(), .bwrap = bwrap, .level = DM_SANDBOX_PARTIAL};
    char *home = strdup(getenv("HOME") ? getenv("HOME") : "/");
    setenv("SOME_KEY", "x", 1);
    setenv("HOME", fresh_dir("home"), 1); /* whose entries may be read: not the place of this test's files */
    const int rc = dm_sandbox_start(&s, &o, &e);
    unsetenv("SOME_KEY");
    setenv("HOME", home, 1);
    free(home);
    if (rc == DM_ESANDBOX && strstr(e.text, "Landlock")) test_skip("this kernel has no Landlock");
    assert_ok_e(rc, e);
    assert_int_equal(dm_sandbox_level_of(s), DM_SANDBOX_PARTIAL);
    assert_memory_equal(dm_sandbox_report(s), "partial: ", 9);
    assert_non_null(strstr(dm_sandbox_report(s), "missing: namespaces"));
    check_partial(s);
    dm_sandbox_stop(s);
}

/* bwrap that cannot mount a new /proc, as inside some containers (bubblewrap#505). */
static void without_a_proc_of_its_own_the_level_is_partial(void **state) {
    (void)state;
    dm_sandbox *s;
    dm_err e = {0};
    char real[4096];
    if (system("command -v bwrap >/dev/null") != 0) test_skip("bubblewrap is not installed");
    FILE *f = popen("command -v bwrap", "r");
    assert_non_null(fgets(real, sizeof real, f));
    pclose(f);
    real[strcspn(real, "\n")] = 0;
    char text[5000];
    snprintf(text, sizeof text,
             "#!/bin/sh\nif tr '\\0' '\\n' < /proc/self/fd/7 | grep -qx -- --proc; then echo \"bwrap: Can't mount proc on /newroot/proc: Operation not permitted\" >&2; exit 1; fi\n"
             "exec %s \"$@\"\n", real);
    const char *bwrap = script_file("bwrap", text);
    const dm_sandbox_opts o = {.launcher = test_launcher(), .bwrap = bwrap, .level = DM_SANDBOX_PARTIAL};
    assert_ok_e(dm_sandbox_start(&s, &o, &e), e);
    assert_int_equal(dm_sandbox_level_of(s), DM_SANDBOX_PARTIAL);
    assert_non_null(strstr(dm_sandbox_report(s), "/proc is the machine's own"));
    ran r;
    const char *ws = fresh_dir("ws");
    char script[200];
    setenv("PROOF_KEY", "zzz", 1);
    snprintf(script, sizeof script, "echo in; cat /proc/%d/environ /proc/self/environ; ls /proc/%d/root/", (int)getpid(), (int)getpid());
    run_sh(s, ws, script, &r);
    unsetenv("PROOF_KEY");
    assert_null(strstr(r.out, "zzz"));
    assert_null(strstr(r.out, "usr")); /* the host's root through /proc stays shut */
    ran_free(&r);
    dm_sandbox_stop(s);
    expect_refused(bwrap, DM_SANDBOX_FULL, (const char *const[]){"mount proc", "unmasked /proc", "the level partial would work", NULL});
}

static void none_runs_bare_only_by_name_and_says_so(void **state) {
    (void)state;
    dm_sandbox *s;
    dm_err e = {0};
    const char *ws = fresh_dir("ws");
    const dm_sandbox_opts o = {.launcher = test_launcher(), .bwrap = "/no/such/bwrap", .level = DM_SANDBOX_NONE};
    assert_ok_e(dm_sandbox_start(&s, &o, &e), e);
    assert_int_equal(dm_sandbox_level_of(s), DM_SANDBOX_NONE);
    assert_memory_equal(dm_sandbox_report(s), "none: ", 6);
    expect_sh(s, ws, "echo hi; ulimit -c", "hi\n0\n");
    ran r;
    run_sh(s, ws, "setsid sleep 434.5 & (setsid sh -c 'sleep 434.5; sleep 434.5' &) ; echo hi", &r);
    assert_string_equal(r.out, "hi\n");
    assert_true(r.x.background >= 2);
    ran_free(&r);
    assert_int_equal(processes_with("434.5"), 0);
    dm_sandbox_stop(s);
}

/* ---- S01: a machine without user namespaces ------------------------------------------------------------------------------ */

/* Runs fn in a child and gives its exit status. */
static int in_child(void (*fn)(void *), void *arg) {
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        fn(arg);
        _exit(0);
    }
    int status;
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static void deny_user_namespaces(void) {
    scmp_filter_ctx f = seccomp_init(SCMP_ACT_ALLOW);
    seccomp_rule_add(f, SCMP_ACT_ERRNO(EPERM), SCMP_SYS(unshare), 1, SCMP_A0(SCMP_CMP_MASKED_EQ, CLONE_NEWUSER, CLONE_NEWUSER));
    seccomp_rule_add(f, SCMP_ACT_ERRNO(EPERM), SCMP_SYS(clone), 1, SCMP_A0(SCMP_CMP_MASKED_EQ, CLONE_NEWUSER, CLONE_NEWUSER));
    seccomp_rule_add(f, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3), 0);
    if (seccomp_load(f) != 0) _exit(100);
    seccomp_release(f);
}

static void s01_child(void *arg) {
    dm_sandbox *s;
    dm_err e = {0};
    (void)arg;
    deny_user_namespaces();
    dm_sandbox_opts o = {.launcher = test_launcher(), .level = DM_SANDBOX_FULL};
    if (dm_sandbox_start(&s, &o, &e) != DM_ESANDBOX) _exit(101);
    if (!strstr(e.text, "level full cannot be had") || !strstr(e.text, "allow")) {
        fprintf(stderr, "%s\n", e.text);
        _exit(102);
    }
    o.level = DM_SANDBOX_PARTIAL;
    const int rc = dm_sandbox_start(&s, &o, &e);
    if (rc == DM_ESANDBOX) _exit(77); /* no Landlock either: refused, never bare */
    if (rc < 0 || dm_sandbox_level_of(s) != DM_SANDBOX_PARTIAL) _exit(103);
    dm_sandbox_stop(s);
}

static void s01_without_user_namespaces_it_refuses_or_confines_otherwise(void **state) {
    (void)state;
    const int rc = in_child(s01_child, NULL);
    assert_true(rc == 0 || rc == 77);
}

/* ---- a plain user ---------------------------------------------------------------------------------------------------------- */

static void plain_user_child(void *arg) {
    const char *ws = arg;
    dm_sandbox *s;
    dm_err e = {0};
    if (setgroups(0, NULL) != 0 || setgid(65534) != 0 || setuid(65534) != 0) _exit(100);
    prctl(PR_SET_DUMPABLE, 1, 0, 0, 0);
    setenv("HOME", "/nonexistent", 1);
    const dm_sandbox_opts o = {.launcher = test_launcher(), .level = DM_SANDBOX_FULL};
    if (dm_sandbox_start(&s, &o, &e) < 0) {
        fprintf(stderr, "%s\n", e.text);
        _exit(101);
    }
    const char *const argv[] = {"sh", "-c", test_marked("id -u; echo x > f && cat f; echo x > /etc/x; setsid sleep 435.5 & exit 4"), NULL};
    dm_sandbox_proc p;
    ran r = {0};
    if (dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws}, &p, &e) < 0) _exit(102);
    collect(s, &p, &r);
    if (r.x.exit_code != 4 || strcmp(r.out, "65534\nx\n") != 0 || r.x.background != 1) {
        fprintf(stderr, "%d %s %s %s\n", r.x.exit_code, r.out, r.err, r.x.text);
        _exit(103);
    }
    ran_free(&r);
    const char *const many[] = {"sh", "-c", test_marked("i=0; while [ $i -lt 300 ]; do sleep 436.5 & i=$((i+1)); done; wait"), NULL};
    if (dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = many, .workspace = ws, .pids_max = 30}, &p, &e) < 0) _exit(104);
    collect(s, &p, &r);
    if (r.x.exit_code == 0 && !r.x.pids) _exit(105);
    ran_free(&r);
    dm_sandbox_stop(s);
}

static void it_works_for_a_plain_user_too(void **state) {
    (void)state;
    if (geteuid() != 0) test_skip("only root can become another user; the other tests run as a plain user then");
    const char *ws = fresh_dir("ws");
    char cmd[700];
    snprintf(cmd, sizeof cmd, "chmod 755 '%s' '%s/..' && chown 65534:65534 '%s'", test_dir(), ws, ws);
    assert_int_equal(system(cmd), 0);
    if (system("su -s /bin/sh nobody -c 'test -x " DM_BUILD_DIR "/dormouse-sandbox' 2>/dev/null") != 0) test_skip("the build folder is not readable for others");
    assert_int_equal(in_child(plain_user_child, (void *)(uintptr_t)ws), 0);
    assert_int_equal(processes_with("435.5") + processes_with("436.5"), 0);
}

/* ---- Q18: the host dies ------------------------------------------------------------------------------------------------------ */

typedef struct host_arg { const char *ws; dm_sandbox_level level; } host_arg;

static void host_child(void *arg) {
    const host_arg *a = arg;
    dm_sandbox *s;
    dm_sandbox_proc p;
    const dm_sandbox_opts o = {.launcher = test_launcher(), .level = a->level};
    const char *const argv[] = {"sh", "job", NULL};
    if (dm_sandbox_start(&s, &o, NULL) < 0 || dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv, .workspace = a->ws}, &p, NULL) < 0) _exit(100);
    pause();
}

static void host_dies(dm_sandbox_level level) {
    const char *ws = fresh_dir("ws");
    host_arg a = {ws, level};
    put_file(ws, "job", "trap '' TERM HUP; setsid sleep 437.5 & sleep 437.5 & while :; do date > beat; sleep 437.5; done");
    char *before = listing(ws);
    fflush(NULL);
    const pid_t host = fork();
    if (host == 0) {
        host_child(&a);
        _exit(0);
    }
    wait_processes("437.5", 3);
    const pid_t launcher = child_of(host);
    assert_int_equal(kill(host, SIGKILL), 0);
    assert_int_equal(waitpid(host, NULL, 0), host);
    wait_processes("437.5", 0);
    for (int i = 0; i < 3000 && kill(launcher, 0) == 0; i++) usleep(10000);
    assert_int_equal(kill(launcher, 0), -1);
    char path[700];
    snprintf(path, sizeof path, "%s/beat", ws);
    unlink(path);
    char *after = listing(ws);
    assert_string_equal(after, before); /* placeholders are gone too */
    free(before);
    free(after);
}

static void q18_nothing_outlives_a_host_that_is_killed(void **state) {
    (void)state;
    host_dies(DM_SANDBOX_FULL);
}

static void q18_nothing_outlives_the_host_without_a_sandbox_either(void **state) {
    (void)state;
    host_dies(DM_SANDBOX_NONE);
}

static void nothing_outlives_a_launcher_that_is_killed(void **state) {
    (void)state;
    static const dm_sandbox_level levels[] = {DM_SANDBOX_FULL, DM_SANDBOX_NONE};
    for (size_t i = 0; i < DM_COUNT(levels); i++) {
        dm_sandbox *s = sandbox_up(levels[i], NULL);
        const char *ws = fresh_dir("ws");
        dm_sandbox_proc p;
        dm_sandbox_exit x;
        put_file(ws, "job", "trap '' TERM; setsid sleep 438.5 & sleep 438.5 & wait; wait");
        const char *const argv[] = {"sh", "job", NULL};
        assert_ok(dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws}, &p, NULL));
        wait_processes("438.5", 2);
        assert_int_equal(kill(only_child(), SIGKILL), 0);
        wait_processes("438.5", 0);
        struct pollfd pf = {dm_sandbox_fd(s), POLLIN, 0};
        assert_int_equal(poll(&pf, 1, -1), 1);
        assert_err(DM_EPIPE, dm_sandbox_next(s, &x, NULL));
        assert_err(DM_EPIPE, dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws}, &p, NULL));
        close(p.out_fd >= 0 ? p.out_fd : -1);
        dm_sandbox_stop(s);
    }
}

/* ---- false launchers: this program plays one ------------------------------------------------------------------------------------ */

static const char *false_launcher(const char *role) {
    char text[4096], self[3000];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    self[n] = 0;
    snprintf(text, sizeof text, "#!/bin/sh\nexec %s launcher %s\n", self, role);
    return script_file("false-launcher", text);
}

static int play_launcher(const char *role) {
    char junk[4096];
    int fds[SB_FDS_MAX], n = SB_FDS_MAX;
    sb_ready ready = {.head = {SB_MAGIC, SB_READY, 0, 0}, .level = DM_SANDBOX_FULL};
    sb_exit x = {.head = {SB_MAGIC, SB_EXIT, 1, 0}, .exit_code = 70000, .signal = -5, .flags = ~0u};
    memset(junk, 'j', sizeof junk);
    memset(ready.report, 'r', sizeof ready.report);
    memset(x.text, 't', sizeof x.text);
    if (strcmp(role, "gone") == 0) return 0;
    struct pollfd pf = {3, POLLIN, 0};
    poll(&pf, 1, 10000);
    (void)sb_recv(3, junk, sizeof junk, fds, &n);
    if (strcmp(role, "junk") == 0) return send(3, junk, sizeof junk, 0) < 0;
    if (strcmp(role, "short") == 0) return send(3, &ready, 12, 0) < 0;
    if (strcmp(role, "level") == 0) ready.level = 99;
    if (strcmp(role, "refuses") == 0) ready.code = -1, memset(ready.text, 'T', sizeof ready.text);
    (void)!send(3, &ready, sizeof ready, 0);
    poll(&pf, 1, 10000);
    n = SB_FDS_MAX;
    (void)sb_recv(3, junk, sizeof junk, fds, &n);
    if (strcmp(role, "exit") == 0) (void)!send(3, &x, sizeof x, 0), (void)!send(3, &x, sizeof x, 0);
    if (strcmp(role, "stranger") == 0) x.head.id = 77, (void)!send(3, &x, sizeof x, 0);
    if (strcmp(role, "torn") == 0) (void)!send(3, &x, sizeof x - 1, 0);
    if (strcmp(role, "fds") == 0) (void)sb_send(3, &x, sizeof x, (int[]){0, 1}, 2, 1000);
    poll(&pf, 1, 10000);
    return 0;
}

static void a_false_launcher_is_not_believed_at_the_start(void **state) {
    (void)state;
    static const char *const roles[] = {"gone", "junk", "short", "level", "refuses"};
    for (size_t i = 0; i < DM_COUNT(roles); i++) {
        dm_sandbox *s;
        dm_err e = {0};
        const dm_sandbox_opts o = {.launcher = false_launcher(roles[i]), .level = DM_SANDBOX_FULL};
        assert_err(DM_ESANDBOX, dm_sandbox_start(&s, &o, &e));
        assert_true(e.text[0] != 0);
    }
    dm_sandbox *s;
    const dm_sandbox_opts none = {.launcher = "/no/such/launcher", .level = DM_SANDBOX_FULL};
    assert_err(DM_ESANDBOX, dm_sandbox_start(&s, &none, NULL));
}

static void a_false_launcher_is_not_believed_later(void **state) {
    (void)state;
    static const char *const roles[] = {"exit", "stranger", "torn", "fds"};
    const char *const argv[] = {"true", NULL};
    for (size_t i = 0; i < DM_COUNT(roles); i++) {
        dm_sandbox *s;
        dm_sandbox_proc p;
        dm_sandbox_exit x;
        dm_err e = {0};
        const dm_sandbox_opts o = {.launcher = false_launcher(roles[i]), .level = DM_SANDBOX_FULL};
        assert_ok_e(dm_sandbox_start(&s, &o, &e), e);
        assert_int_equal(strlen(dm_sandbox_report(s)), 511);
        assert_ok(dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv, .workspace = "/tmp"}, &p, NULL));
        struct pollfd pf = {dm_sandbox_fd(s), POLLIN, 0};
        assert_int_equal(poll(&pf, 1, -1), 1);
        int rc = dm_sandbox_next(s, &x, NULL);
        if (i == 0) { /* one exit is ours, within bounds; its repetition is not */
            assert_int_equal(rc, 1);
            assert_int_equal(x.exit_code, -1);
            assert_int_equal(x.signal, 0);
            assert_int_equal(strlen(x.text), 255);
            poll(&pf, 1, -1);
            rc = dm_sandbox_next(s, &x, NULL);
        }
        assert_int_equal(rc, DM_EPIPE);
        assert_err(DM_EPIPE, dm_sandbox_next(s, &x, NULL));
        close(p.out_fd);
        close(p.err_fd);
        dm_sandbox_stop(s);
    }
}

/* ---- a false host ------------------------------------------------------------------------------------------------------------------ */

typedef struct real_launcher { int sock; pid_t pid; } real_launcher;

static real_launcher launcher_alone(void) {
    int pair[2];
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair), 0);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        if (pair[1] == 3) fcntl(3, F_SETFD, 0);
        else dup2(pair[1], 3);
        execl(test_launcher(), "dormouse-sandbox", "serve", (char *)NULL);
        _exit(100);
    }
    close(pair[1]);
    return (real_launcher){pair[0], pid};
}

/* It must end by itself, with a status and not a signal. */
static void launcher_ends(real_launcher l) {
    int status;
    close(l.sock);
    assert_int_equal(waitpid(l.pid, &status, 0), l.pid);
    if (!WIFEXITED(status)) fail_msg("the launcher was ended by signal %d", WTERMSIG(status));
}

static void hello(real_launcher l) {
    dm_buf b = {0};
    sb_ready ready;
    int fds[1], n = 0;
    assert_ok(sb_put_int(&b, SB_T_LEVEL, DM_SANDBOX_NONE));
    assert_ok(sb_put_text(&b, SB_T_ENV, "PATH=/usr/bin:/bin"));
    int fd = sb_seal(b.p, b.n);
    const sb_head h = {SB_MAGIC, SB_HELLO, 0, 0};
    assert_ok(sb_send(l.sock, &h, sizeof h, &fd, 1, 1000));
    close(fd);
    dm_buf_free(&b);
    struct pollfd pf = {l.sock, POLLIN, 0};
    assert_int_equal(poll(&pf, 1, 30000), 1);
    assert_int_equal(sb_recv(l.sock, &ready, sizeof ready, fds, &n), sizeof ready);
    assert_int_equal(ready.code, 0);
}

static int answer(real_launcher l, sb_exit *x) {
    int fds[1], n = 0;
    struct pollfd pf = {l.sock, POLLIN, 0};
    poll(&pf, 1, 30000);
    return sb_recv(l.sock, x, sizeof *x, fds, &n);
}

static void the_launcher_survives_a_host_that_talks_rubbish(void **state) {
    (void)state;
    char junk[8192];
    memset(junk, 0xa5, sizeof junk);
    for (int kind = 0; kind < 6; kind++) {
        real_launcher l = launcher_alone();
        const sb_head spawn = {SB_MAGIC, SB_SPAWN, 1, 0}, first = {SB_MAGIC, SB_HELLO, 0, 0};
        int null = open("/dev/null", O_RDWR | O_CLOEXEC), many[4] = {null, null, null, null};
        if (kind >= 3) hello(l);
        if (kind == 0) send(l.sock, junk, sizeof junk, 0);
        if (kind == 1) sb_send(l.sock, &spawn, sizeof spawn, many, 3, 1000);
        if (kind == 2) sb_send(l.sock, &first, sizeof first, many, 4, 1000);
        if (kind == 3) send(l.sock, junk, sizeof junk, 0);
        if (kind == 4) send(l.sock, &spawn, 8, 0);
        if (kind == 5) {
            const sb_head odd = {SB_MAGIC, 99, 1, 0};
            sb_send(l.sock, &odd, sizeof odd, many, 4, 1000);
        }
        close(null);
        launcher_ends(l);
    }
}

/* Each is answered by an exit that says setup_failed, and the launcher goes on. */
static void bad_payloads_are_refused_one_by_one(void **state) {
    (void)state;
    real_launcher l = launcher_alone();
    hello(l);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), id = 0;
    static const struct { const char *bytes; size_t n; } bad[] = {
        {"", 0},
        {"\1\0\0", 3},
        {"\1\0\0\0\377\377\377\377", 8},
        {"\1\0\0\0\5\0\0\0true", 12},              /* shorter than it says */
        {"\1\0\0\0\4\0\0\0true", 12},              /* no NUL at its end */
        {"\1\0\0\0\4\0\0\0a\0b\0", 12},            /* two strings in one */
        {"\143\0\0\0\4\0\0\0abc\0", 12},           /* an unknown tag */
        {"\15\0\0\0\4\0\0\0\1\0\0\0", 12},         /* a number of 4 bytes */
        {"\1\0\0\0\5\0\0\0true\0\0\0\0", 16},      /* no workspace */
        {"\6\0\0\0\3\0\0\0/x\0\0\6\0\0\0\3\0\0\0/y\0\0", 24}, /* two workspaces */
    };
    for (size_t i = 0; i < DM_COUNT(bad) + 3; i++) {
        sb_exit x;
        int payload = i < DM_COUNT(bad) ? sb_seal(bad[i].bytes, bad[i].n) : -1;
        if (i == DM_COUNT(bad)) payload = open("/etc/passwd", O_RDONLY | O_CLOEXEC);
        if (i == DM_COUNT(bad) + 1) payload = (int)memfd_create("unsealed", MFD_CLOEXEC);
        if (i == DM_COUNT(bad) + 2) { /* sealed, but far too large */
            payload = (int)memfd_create("huge", MFD_CLOEXEC | MFD_ALLOW_SEALING);
            assert_int_equal(ftruncate(payload, 1l << 40), 0);
            assert_int_equal(fcntl(payload, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE), 0);
        }
        const sb_head h = {SB_MAGIC, SB_SPAWN, ++id, 0};
        assert_ok(sb_send(l.sock, &h, sizeof h, (int[]){payload, null, null}, 3, 1000));
        close(payload);
        assert_int_equal(answer(l, &x), sizeof x);
        assert_int_equal(x.head.id, id);
        assert_int_equal(x.flags, SB_X_SETUP);
        assert_true(x.text[0] != 0);
    }
    const sb_head kill_stranger = {SB_MAGIC, SB_KILL, 12345, 0}, no_fds = {SB_MAGIC, SB_SPAWN, ++id, 0};
    sb_exit x;
    assert_ok(sb_send(l.sock, &kill_stranger, sizeof kill_stranger, NULL, 0, 1000));
    assert_ok(sb_send(l.sock, &no_fds, sizeof no_fds, NULL, 0, 1000));
    assert_int_equal(answer(l, &x), sizeof x);
    assert_int_equal(x.flags, SB_X_SETUP);
    close(null);
    launcher_ends(l);
}

static void random_payloads_never_break_the_parser(void **state) {
    (void)state;
    uint64_t seed = test_seed();
    for (int round = 0; round < 20000; round++) {
        sb_request r = {0};
        uint8_t bytes[96];
        const size_t n = dm_splitmix64(&seed) % sizeof bytes;
        for (size_t i = 0; i < n; i++) {
            const uint64_t v = dm_splitmix64(&seed);
            bytes[i] = v % 3 ? (uint8_t)(v >> 8) % 24 : (v & 64) ? 0 : (uint8_t)(v >> 16);
        }
        if (n) assert_ok(dm_buf_append(&r.bytes, bytes, n));
        (void)sb_request_parse(&r, NULL);
        sb_request_free(&r);
    }
}

int main(int argc, char **argv) {
    if (argc > 2 && strcmp(argv[1], "launcher") == 0) return play_launcher(argv[2]);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(q72_a_wrapper_that_fails_is_refused_in_words),
        cmocka_unit_test(a_missing_wrapper_is_told_with_the_way_out),
        cmocka_unit_test(a_wrapper_that_runs_the_command_bare_is_found_out),
        cmocka_unit_test(a_wrapper_that_pretends_success_is_found_out),
        cmocka_unit_test(a_wrapper_that_hangs_is_given_up),
        cmocka_unit_test(q72_partial_is_had_only_when_it_is_accepted),
        cmocka_unit_test(without_a_proc_of_its_own_the_level_is_partial),
        cmocka_unit_test(none_runs_bare_only_by_name_and_says_so),
        cmocka_unit_test(s01_without_user_namespaces_it_refuses_or_confines_otherwise),
        cmocka_unit_test(it_works_for_a_plain_user_too),
        cmocka_unit_test(q18_nothing_outlives_a_host_that_is_killed),
        cmocka_unit_test(q18_nothing_outlives_the_host_without_a_sandbox_either),
        cmocka_unit_test(nothing_outlives_a_launcher_that_is_killed),
        cmocka_unit_test(a_false_launcher_is_not_believed_at_the_start),
        cmocka_unit_test(a_false_launcher_is_not_believed_later),
        cmocka_unit_test(the_launcher_survives_a_host_that_talks_rubbish),
        cmocka_unit_test(bad_payloads_are_refused_one_by_one),
        cmocka_unit_test(random_payloads_never_break_the_parser),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
