/* What a command cannot see, reach or leave behind.  System calls are tried by this very program, copied into the
 * workspace and run inside with the argument "probe". */
#include <linux/netlink.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>

#include "tests/unit/sandbox_run.h"

/* ---- inside ----------------------------------------------------------------------------------------------------------- */

static void told(const char *what, long rc) { printf("%s %s\n", what, rc >= 0 ? "allowed" : errno == EPERM ? "EPERM" : errno == ENOSYS ? "ENOSYS" : "refused"); }

#ifdef __x86_64__
static long call32(long nr) {
    long rc;
    __asm__ volatile("int $0x80" : "=a"(rc) : "a"(nr) : "memory", "r8", "r9", "r10", "r11");
    if (rc < 0 && rc > -4096) errno = (int)-rc, rc = -1;
    return rc;
}
#endif

static int probe(void) {
    char args[256] = {0};
    told("ptrace", ptrace(PTRACE_TRACEME, 0, NULL, NULL));
    told("process_vm_readv", syscall(SYS_process_vm_readv, 1, NULL, 0, NULL, 0, 0));
    told("kcmp", syscall(SYS_kcmp, getpid(), getpid(), 0, 0, 0));
    told("bpf", syscall(SYS_bpf, 0, args, sizeof args));
    told("perf_event_open", syscall(SYS_perf_event_open, args, 0, -1, -1, 0));
    told("userfaultfd", syscall(SYS_userfaultfd, 0));
    told("io_uring_setup", syscall(SYS_io_uring_setup, 4, args));
    told("mount", mount("none", "/tmp", "tmpfs", 0, NULL));
    told("umount", umount2("/tmp", MNT_DETACH));
    told("remount", mount(NULL, "/", NULL, MS_REMOUNT | MS_BIND, NULL));
    told("pivot_root", syscall(SYS_pivot_root, "/", "/"));
    told("chroot", chroot("/tmp"));
    told("unshare user", unshare(CLONE_NEWUSER));
    told("unshare net", unshare(CLONE_NEWNET));
    told("unshare time", unshare(0x80));
    told("unshare files", unshare(CLONE_FILES));
    told("setns", setns(0, 0));
    told("clone3", syscall(SYS_clone3, NULL, 0));
    told("clone user", syscall(SYS_clone, CLONE_NEWUSER | SIGCHLD, NULL, NULL, NULL, NULL));
    told("keyctl", syscall(SYS_keyctl, 0, -3, 0, 0, 0));
    told("add_key", syscall(SYS_add_key, "user", "x", "y", 1, -3));
    told("kexec", syscall(SYS_kexec_load, 0, 0, NULL, 0));
    told("reboot", syscall(SYS_reboot, 0, 0, 0, NULL));
    told("sethostname", sethostname("evil", 4));
    told("TIOCSTI", ioctl(0, TIOCSTI, "x"));
    told("TIOCSTI with high bits", syscall(SYS_ioctl, 0, 0xdead00000000ul | TIOCSTI, "x"));
    told("TIOCLINUX", ioctl(0, 0x541C, args));
    told("socket unix", socket(AF_UNIX, SOCK_STREAM, 0));
    told("socket inet", socket(AF_INET, SOCK_STREAM, 0));
    told("socket inet6", socket(AF_INET6, SOCK_DGRAM, 0));
    told("socket netlink route", socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE));
    told("socket netlink audit", socket(AF_NETLINK, SOCK_RAW, NETLINK_AUDIT));
    told("socket packet", socket(AF_PACKET, SOCK_RAW, 0));
    told("socket vsock", socket(AF_VSOCK, SOCK_STREAM, 0));
    told("socket alg", socket(AF_ALG, SOCK_SEQPACKET, 0));
    told("socket with high bits", syscall(SYS_socket, 0x100000000ul | AF_PACKET, SOCK_RAW, 0));
    told("personality query", personality(0xffffffff));
    told("personality set", personality(ADDR_NO_RANDOMIZE));
    told("personality 0", personality(0));
#ifdef __x86_64__
    told("x32 getpid", syscall(0x40000000 | SYS_getpid));
    told("32-bit getpid", call32(20));
#endif
    told("init's memory", open("/proc/1/mem", O_RDWR));
    told("init's status descriptor", open("/proc/1/fd/4", O_WRONLY));
    (void)kill(1, SIGKILL);
    usleep(20000);
    puts("init lives");
    return 0;
}

static const char probe_want[] =
    "ptrace EPERM\nprocess_vm_readv EPERM\nkcmp EPERM\nbpf EPERM\nperf_event_open EPERM\nuserfaultfd EPERM\nio_uring_setup EPERM\n"
    "mount EPERM\numount EPERM\nremount EPERM\npivot_root EPERM\nchroot EPERM\nunshare user EPERM\nunshare net EPERM\nunshare time EPERM\n"
    "unshare files allowed\nsetns EPERM\nclone3 ENOSYS\nclone user EPERM\nkeyctl EPERM\nadd_key EPERM\nkexec EPERM\nreboot EPERM\n"
    "sethostname EPERM\nTIOCSTI EPERM\nTIOCSTI with high bits EPERM\nTIOCLINUX EPERM\nsocket unix allowed\nsocket inet allowed\n"
    "socket inet6 allowed\nsocket netlink route allowed\nsocket netlink audit EPERM\nsocket packet EPERM\nsocket vsock EPERM\nsocket alg EPERM\n"
    "socket with high bits EPERM\npersonality query allowed\npersonality set EPERM\npersonality 0 allowed\n"
#ifdef __x86_64__
    "x32 getpid ENOSYS\n32-bit getpid ENOSYS\n"
#endif
    "init's memory refused\ninit's status descriptor refused\ninit lives\n";

/* ---- outside ---------------------------------------------------------------------------------------------------------- */

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

static void copy_self(const char *to_dir) {
    char cmd[900];
    snprintf(cmd, sizeof cmd, "cp /proc/%d/exe '%s/probe'", (int)getpid(), to_dir);
    assert_int_equal(system(cmd), 0);
}

static void system_calls_that_reach_out_are_refused(void **state) {
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    test_skip("a sanitizer's runtime does not start under the filter");
#endif
    ran r;
    copy_self(ws);
    run_sh(s, ws, "./probe probe", &r);
    assert_string_equal(r.out, probe_want);
    ran_free(&r);
}

static void no_capability_is_left_and_none_comes_back(void **state) {
    (void)state;
    expect_sh(s, ws, "grep -E '^(CapPrm|CapEff|CapBnd|CapAmb|NoNewPrivs|Seccomp):' /proc/self/status | tr -d '\\t'",
              "CapPrm:0000000000000000\nCapEff:0000000000000000\nCapBnd:0000000000000000\nCapAmb:0000000000000000\nNoNewPrivs:1\nSeccomp:2\n");
}

static void s04_nothing_of_our_environment_but_the_allowlist(void **state) {
    (void)state;
    ran r;
    dm_sandbox_stop(s);
    setenv("API_KEY", "zzz-secret", 1);
    setenv("DATABASE_URL", "zzz-url", 1);
    setenv("LD_PRELOAD_X", "zzz", 1);
    setenv("LC_TIME", "C", 1);
    s = sandbox_up(DM_SANDBOX_FULL, NULL);
    run_sh(s, ws, "env; cat /proc/self/environ /proc/1/environ /proc/*/environ | tr '\\0' '\\n'", &r);
    assert_null(strstr(r.out, "zzz"));
    assert_non_null(strstr(r.out, "LC_TIME=C"));
    assert_non_null(strstr(r.out, "PATH="));
    ran_free(&r);
    const char *const env[] = {"EXTRA=1", "PATH=/usr/bin:/bin", NULL};
    const char *const argv[] = {"env", NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .env = env}, &r);
    static const char *const names[] = {"PATH", "HOME", "LANG", "TZ", "USER", "SHELL", "TERM", "TMPDIR", "PAGER", "GIT_PAGER", "GIT_TERMINAL_PROMPT",
                                        "GIT_OPTIONAL_LOCKS", "NO_COLOR", "CI", "PYTHONUNBUFFERED", "DEBIAN_FRONTEND", "EXTRA"};
    int paths = 0;
    for (char *line = strtok(r.out, "\n"); line; line = strtok(NULL, "\n")) {
        bool known = dm_str_prefix(line, "LC_");
        for (size_t i = 0; i < DM_COUNT(names); i++) known |= dm_str_prefix(line, names[i]) && line[strlen(names[i])] == '=';
        if (!known) fail_msg("%s is in the environment", line);
        paths += dm_str_prefix(line, "PATH=");
        if (dm_str_prefix(line, "PATH=")) assert_string_equal(line, "PATH=/usr/bin:/bin");
    }
    assert_int_equal(paths, 1);
    ran_free(&r);
    unsetenv("API_KEY");
    unsetenv("DATABASE_URL");
    unsetenv("LD_PRELOAD_X");
    unsetenv("LC_TIME");
}

static void s05_descriptors_0_1_2_only(void **state) {
    (void)state;
    int leak = open("/etc/passwd", O_RDONLY); /* without close-on-exec, before the launcher starts */
    dm_sandbox_stop(s);
    s = sandbox_up(DM_SANDBOX_FULL, NULL);
    expect_sh(s, ws, "for f in /proc/self/fd/*; do [ -e $f ] && echo ${f##*/}; done; readlink /proc/self/fd/0", "0\n1\n2\n/dev/null\n");
    close(leak);
}

static void writes_stay_in_the_workspace(void **state) {
    (void)state;
    ran r;
    const char *outside = fresh_dir("outside");
    char script[2048], path[700];
    put_file(outside, "f", "old");
    snprintf(script, sizeof script,
             "echo x > %s/f; echo x > %s/new; echo x > /etc/dm-proof; echo x > /usr/dm-proof; mkdir /dm-proof; ln -s %s/f link; echo x > link;"
             "mv ../ws ../moved; rm -rf %s; chmod 777 /etc/passwd; touch /boot/x /sys/x /proc/sys/kernel/hostname; echo done",
             outside, outside, outside, outside);
    run_sh(s, ws, script, &r);
    assert_string_equal(r.out, "done\n");
    ran_free(&r);
    dm_buf b = {0};
    snprintf(path, sizeof path, "%s/f", outside);
    assert_ok(dm_file_read(path, 100, &b, NULL));
    assert_string_equal(dm_buf_cstr(&b), "old");
    dm_buf_free(&b);
    snprintf(path, sizeof path, "%s/new", outside);
    assert_false(dm_path_exists(path) || dm_path_exists("/etc/dm-proof") || dm_path_exists("/usr/dm-proof") || dm_path_exists("/dm-proof"));
}

static void hard_links_to_the_outside_cannot_be_made(void **state) {
    (void)state;
    ran r;
    run_sh(s, ws, "ln /etc/passwd hard && echo made", &r);
    assert_string_equal(r.out, "");
    ran_free(&r);
}

static void there_is_no_network_but_loopback(void **state) {
    (void)state;
    ran r;
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_in in = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t n = sizeof in;
    assert_int_equal(bind(listener, (struct sockaddr *)&in, sizeof in), 0);
    assert_int_equal(listen(listener, 1), 0);
    assert_int_equal(getsockname(listener, (struct sockaddr *)&in, &n), 0);
    char script[256];
    snprintf(script, sizeof script, "bash -c 'exec 3<>/dev/tcp/127.0.0.1/%d' && echo connected; bash -c 'exec 3<>/dev/tcp/1.1.1.1/80'", ntohs(in.sin_port));
    run_sh(s, ws, script, &r);
    assert_string_equal(r.out, "");
    assert_non_null(strstr(r.err, "Connection refused"));      /* its own loopback, where nobody listens */
    assert_non_null(strstr(r.err, "Network is unreachable"));
    ran_free(&r);
    const char *const argv[] = {"bash", "-c", script, NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws, .network = true}, &r);
    assert_non_null(strstr(r.out, "connected")); /* asked for, so it is the machine's */
    ran_free(&r);
    close(listener);
}

static void abstract_sockets_of_the_machine_are_out_of_reach(void **state) {
    (void)state;
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    test_skip("a sanitizer's runtime does not start under the filter");
#endif
    ran r;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    struct sockaddr_un un = {.sun_family = AF_UNIX, .sun_path = "\0dm-abstract"};
    assert_int_equal(bind(fd, (struct sockaddr *)&un, sizeof un), 0);
    assert_int_equal(listen(fd, 1), 0);
    copy_self(ws);
    run_sh(s, ws, "./probe abstract", &r);
    assert_string_equal(r.out, "refused\n");
    ran_free(&r);
    close(fd);
}

static void other_processes_are_not_there(void **state) {
    (void)state;
    expect_sh(s, ws, "cat /proc/[0-9]*/comm | grep -c test_sandbox; cat /proc/1/cmdline | tr '\\0' ' '; echo", "0\n/run/dormouse/supervisor supervise \n");
}

static void run_tmp_and_other_homes_are_empty(void **state) {
    (void)state;
    expect_sh(s, ws, "ls /run; ls -A /dev/shm /var/log; stat -c %a /tmp /var/tmp", "dormouse\n/dev/shm:\n\n/var/log:\n1777\n1777\n");
}

/* A home of our own making, so that nobody's real secrets are needed. */
static void secrets_of_the_home_are_hidden_and_the_rest_is_readable(void **state) {
    (void)state;
    const char *home = fresh_dir("home");
    char *old = strdup(getenv("HOME") ? getenv("HOME") : "/");
    static const char *const secret[] = {".ssh/id_ed25519", ".gnupg/k", ".aws/credentials", ".config/gh/hosts.yml", ".netrc", ".docker/config.json",
                                         ".kube/config", ".git-credentials", ".cargo/credentials.toml", ".bash_history", ".npmrc"};
    static const char *const open_files[] = {".gitconfig", ".cargo/bin/tool", ".config/git/ignore", "projects/readme"};
    for (size_t i = 0; i < DM_COUNT(secret); i++) put_file(home, secret[i], "SECRET\n");
    for (size_t i = 0; i < DM_COUNT(open_files); i++) put_file(home, open_files[i], "open\n");
    setenv("HOME", home, 1);
    dm_sandbox_stop(s);
    s = sandbox_up(DM_SANDBOX_FULL, NULL);
    setenv("HOME", old, 1);
    free(old);
    expect_sh(s, ws, "cat ~/.gitconfig ~/.cargo/bin/tool ~/.config/git/ignore ~/projects/readme; grep -rs SECRET ~ && echo leaked; echo end",
              "open\nopen\nopen\nopen\nend\n");
    /* It can be written, for caches, but nothing of it stays and nothing real changes. */
    expect_sh(s, ws, "mkdir -p ~/.cache/x && echo c > ~/.cache/x/y && echo n > ~/.profile && cat ~/.cache/x/y; echo e >> ~/.gitconfig || echo kept", "c\nkept\n");
    char path[800];
    snprintf(path, sizeof path, "%s/.profile", home);
    assert_false(dm_path_exists(path));
    snprintf(path, sizeof path, "%s/.cache", home);
    assert_false(dm_path_exists(path));
    /* The same when the workspace lies in the home, or is the home. */
    char sub[800];
    snprintf(sub, sizeof sub, "%s/projects", home);
    expect_sh(s, sub, "echo mine > f; cat f; grep -rs SECRET ~ && echo leaked; echo end", "mine\nend\n");
    expect_sh(s, home, "echo mine > g; cat g .gitconfig; grep -rs SECRET . && echo leaked; echo end", "mine\nopen\nend\n");
}

static void hidden_directories_are_empty_wherever_they_lie(void **state) {
    (void)state;
    char inner[700];
    const char *store = fresh_dir("store");
    put_file(store, "journal", "SECRET\n");
    snprintf(inner, sizeof inner, "%s/inner", ws);
    put_file(inner, "journal", "SECRET\n");
    const char *const hide[] = {store, inner, "/no/such/dir", NULL};
    dm_sandbox_stop(s);
    s = sandbox_up(DM_SANDBOX_FULL, hide);
    char script[1600];
    snprintf(script, sizeof script, "ls -A %s inner; cat %s/journal inner/journal; echo x > inner/y; echo x > %s/y; echo end", store, store, store);
    ran r;
    run_sh(s, ws, script, &r);
    assert_null(strstr(r.out, "journal"));
    assert_non_null(strstr(r.out, "end"));
    assert_null(strstr(r.out, "SECRET"));
    ran_free(&r);
    char path[800];
    snprintf(path, sizeof path, "%s/y", store);
    assert_false(dm_path_exists(path));
    snprintf(path, sizeof path, "%s/y", inner);
    assert_false(dm_path_exists(path));
    /* A workspace beneath a hidden directory is still its owner's. */
    snprintf(path, sizeof path, "%s/work", store);
    assert_int_equal(mkdir(path, 0755), 0);
    expect_sh(s, path, "echo w > f; cat f; ls -A ..", "w\nwork\n");
    const char *const argv[] = {"true", NULL};
    run_cmd(s, &(dm_sandbox_cmd){.argv = argv, .workspace = store}, &r);
    assert_true(r.x.setup_failed);
    ran_free(&r);
}

static void there_is_no_terminal(void **state) {
    (void)state;
    ran r;
    run_sh(s, ws, "tty; : < /dev/tty", &r);
    assert_string_equal(r.out, "not a tty\n");
    assert_non_null(strstr(r.err, "/dev/tty"));
    ran_free(&r);
}

/* A protected name that is a link must not make bubblewrap show what the plan hides. */
static void a_link_to_a_secret_does_not_uncover_it(void **state) {
    (void)state;
    char path[800], target[800];
    const char *home = fresh_dir("home");
    char *old = strdup(getenv("HOME") ? getenv("HOME") : "/");
    put_file(home, ".ssh/id", "SECRET\n");
    setenv("HOME", home, 1);
    dm_sandbox_stop(s);
    s = sandbox_up(DM_SANDBOX_FULL, NULL);
    setenv("HOME", old, 1);
    free(old);
    snprintf(target, sizeof target, "%s/.ssh", home);
    static const char *const names[] = {".vscode", ".mcp.json", ".git"};
    for (size_t i = 0; i < DM_COUNT(names); i++) {
        snprintf(path, sizeof path, "%s/%s", ws, names[i]);
        assert_int_equal(symlink(target, path), 0);
        expect_sh(s, ws, "cat .vscode/id .mcp.json/id .git/id ~/.ssh/id 2>/dev/null; echo end", "end\n");
        assert_int_equal(unlink(path), 0);
    }
    snprintf(path, sizeof path, "%s/.git", ws);
    assert_int_equal(mkdir(path, 0755), 0);
    snprintf(path, sizeof path, "%s/.git/hooks", ws);
    assert_int_equal(symlink(target, path), 0);
    expect_sh(s, ws, "cat .git/hooks/id ~/.ssh/id 2>/dev/null; echo end", "end\n");
}

static atomic_bool racing;

static void *racer(void *arg) {
    char a[800], b[800], secret[800];
    snprintf(a, sizeof a, "%s/.idea", ws);
    snprintf(b, sizeof b, "%s/real", ws);
    snprintf(secret, sizeof secret, "%s/.ssh", (const char *)arg);
    mkdir(b, 0755);
    while (atomic_load(&racing)) { /* a directory, a link, a directory … */
        if (rename(b, a) == 0) (void)rename(a, b);
        if (symlink(secret, a) == 0) unlink(a);
        (void)rmdir(a);
    }
    return NULL;
}

static void a_name_swapped_while_the_sandbox_is_built_uncovers_nothing(void **state) {
    (void)state;
    pthread_t thread;
    const char *home = fresh_dir("home");
    char *old = strdup(getenv("HOME") ? getenv("HOME") : "/");
    put_file(home, ".ssh/id", "SECRET\n");
    setenv("HOME", home, 1);
    dm_sandbox_stop(s);
    s = sandbox_up(DM_SANDBOX_FULL, NULL);
    setenv("HOME", old, 1);
    free(old);
    atomic_store(&racing, true);
    assert_int_equal(pthread_create(&thread, NULL, racer, (void *)(uintptr_t)home), 0);
    int ran_ok = 0, refused = 0;
    for (int i = 0; i < (test_full() ? 2000 : 150); i++) {
        ran r;
        run_sh(s, ws, "cat .idea/id ~/.ssh/id; echo end", &r);
        assert_null(strstr(r.out, "SECRET"));
        ran_ok += !r.x.setup_failed;
        refused += r.x.setup_failed;
        ran_free(&r);
    }
    atomic_store(&racing, false);
    pthread_join(thread, NULL);
    print_message("# %d ran, %d were refused\n", ran_ok, refused);
}

/* ---- persistence ----------------------------------------------------------------------------------------------------------- */

static void git(const char *dir, const char *args) {
    char cmd[1500];
    snprintf(cmd, sizeof cmd, "cd '%s' && git -c user.name=t -c user.email=t@t -c init.defaultBranch=main %s >/dev/null 2>&1", dir, args);
    assert_int_equal(system(cmd), 0);
}

static bool have_git(void) { return system("git --version >/dev/null 2>&1") == 0; }

static const char attack[] =
    "echo evil > .git/hooks/pre-commit; echo evil >> .git/config; echo evil > .git/config.worktree; echo ../evil > .git/commondir;"
    "mv .git .git2; mv .git/hooks .git/h2; mv .git/config .git/c2; rm -f .git/config; rm -rf .git/hooks;"
    "git config core.fsmonitor evil; ln -sf /tmp/x .git/config; cp /bin/true .git/hooks/post-checkout;"
    "echo evil > .mcp.json; mkdir -p .vscode .idea .dormouse; echo evil > .vscode/tasks.json; echo evil > .idea/x; echo evil > .dormouse/x;"
    "rmdir .vscode .mcp.json .idea; mv .vscode v2; echo done";

static void q75_names_that_others_obey_cannot_be_written(void **state) {
    (void)state;
    ran r;
    if (!have_git()) test_skip("git is not installed");
    git(ws, "init");
    put_file(ws, ".vscode/settings.json", "{}\n");
    put_file(ws, ".git/hooks/pre-push", "mine\n");
    char *before = listing(ws);
    run_sh(s, ws, attack, &r);
    assert_string_equal(r.out, "done\n");
    ran_free(&r);
    char *after = listing(ws);
    assert_string_equal(after, before);
    free(before);
    free(after);
    char cmd[900];
    snprintf(cmd, sizeof cmd, "grep -rlE 'evil' '%s'", ws);
    assert_int_not_equal(system(cmd), 0);
    expect_sh(s, ws, "echo hi > f && git add f && git -c user.name=t -c user.email=t@t commit -qm m && git log --format=%s && git status --porcelain", "m\n?? .vscode/\n");
}

/* claude-code#52525 and kin: odd kinds of protected names must not break every command, nor leave ghosts. */
static void odd_repositories_break_nothing_and_leave_no_ghost(void **state) {
    (void)state;
    char path[800], target[800], args[900];
    if (!have_git()) test_skip("git is not installed");
    for (int kind = 0; kind < 8; kind++) {
        const char *dir = fresh_dir("odd");
        snprintf(path, sizeof path, "%s/.git", dir);
        if (kind == 1) put_file(dir, ".git", "gitdir: /nowhere/at/all\n");
        if (kind == 2) put_file(dir, ".git", "rubbish");
        if (kind == 3) assert_int_equal(symlink("nothing", path), 0);
        if (kind == 4) {
            snprintf(target, sizeof target, "%s/real", dir);
            assert_int_equal(mkdir(target, 0755), 0);
            git(dir, "init --separate-git-dir=real/g");
            assert_int_equal(unlink(path), 0);
            assert_int_equal(symlink("real/g", path), 0);
        }
        if (kind == 5) assert_int_equal(mkdir(path, 0755), 0);
        if (kind == 6) assert_int_equal(mkfifo(path, 0600), 0);
        if (kind == 7) {
            const char *main_dir = fresh_dir("main");
            git(main_dir, "init");
            git(main_dir, "commit --allow-empty -m x");
            assert_int_equal(rmdir(dir), 0);
            snprintf(args, sizeof args, "worktree add '%s'", dir);
            git(main_dir, args);
        }
        snprintf(path, sizeof path, "%s/.vscode", dir);
        assert_int_equal(symlink(kind % 2 ? "/nowhere" : "elsewhere", path), 0);
        char *before = listing(dir);
        expect_sh(s, dir, "echo works", "works\n");
        char *after = listing(dir);
        assert_string_equal(after, before);
        free(before);
        free(after);
        if (kind == 4 || kind == 7)
            expect_sh(s, dir, "echo hi > f && git add f && git -c user.name=t -c user.email=t@t commit -qm m && git log -1 --format=%s", "m\n");
    }
}

static void a_worktree_cannot_touch_the_hooks_of_its_repository(void **state) {
    (void)state;
    ran r;
    char args[900], script[1800], dir[800];
    if (!have_git()) test_skip("git is not installed");
    const char *main_dir = fresh_dir("main");
    snprintf(dir, sizeof dir, "%s/wt", fresh_dir("wt"));
    git(main_dir, "init");
    git(main_dir, "commit --allow-empty -m x");
    snprintf(args, sizeof args, "worktree add '%s'", dir);
    git(main_dir, args);
    char *before = listing(main_dir);
    snprintf(script, sizeof script, "echo evil > %s/.git/hooks/x; echo evil >> %s/.git/config; echo evil > %s/f; echo 'gitdir: /etc' > .git; rm .git; echo done", main_dir,
             main_dir, main_dir);
    run_sh(s, dir, script, &r);
    assert_string_equal(r.out, "done\n");
    ran_free(&r);
    char *after = listing(main_dir);
    assert_string_equal(after, before);
    free(before);
    free(after);
}

/* A .git file that an earlier command wrote must not open another repository, or any directory, for writing. */
static void a_forged_git_file_opens_nothing(void **state) {
    (void)state;
    ran r;
    char text[900], script[900];
    if (!have_git()) test_skip("git is not installed");
    const char *other = fresh_dir("other");
    git(other, "init");
    put_file(other, ".git/gitdir", "/somewhere/else/.git\n");
    put_file(other, ".git/commondir", ".\n");
    char *before = listing(other);
    snprintf(text, sizeof text, "gitdir: %s/.git\n", other);
    put_file(ws, ".git", text);
    snprintf(script, sizeof script, "echo evil > %s/.git/evil; rm -f %s/.git/HEAD; echo done", other, other);
    run_sh(s, ws, script, &r);
    assert_string_equal(r.out, "done\n");
    ran_free(&r);
    char *after = listing(other);
    assert_string_equal(after, before);
    free(before);
    free(after);
}

static void nested_repositories_and_submodules_are_protected(void **state) {
    (void)state;
    ran r;
    if (!have_git()) test_skip("git is not installed");
    git(ws, "init");
    char sub[800];
    snprintf(sub, sizeof sub, "%s/lib/dep", ws);
    put_file(sub, "x", "x");
    git(sub, "init");
    put_file(ws, ".git/modules/a/b/HEAD", "ref: x\n");
    put_file(ws, ".git/modules/a/b/config", "[core]\n");
    put_file(ws, ".git/modules/a/b/hooks/h", "h\n");
    put_file(ws, "githooks/pre-commit", "mine\n");
    git(ws, "config core.hooksPath githooks");
    run_sh(s, ws, "for f in lib/dep/.git/hooks/x lib/dep/.git/config .git/modules/a/b/config .git/modules/a/b/hooks/h githooks/pre-commit; do echo evil >> $f; done;"
                  "mv lib/dep/.git lib/dep/g2; echo done", &r);
    assert_string_equal(r.out, "done\n");
    ran_free(&r);
    char cmd[900];
    snprintf(cmd, sizeof cmd, "grep -rl evil '%s'", ws);
    assert_int_not_equal(system(cmd), 0);
}

static void commands_side_by_side_share_placeholders(void **state) {
    (void)state;
    ran a, b;
    dm_sandbox_proc p, q;
    char *before = listing(ws);
    put_file(ws, "job", "sleep 0.3; echo evil > .mcp.json; ls -A; sleep 0.2");
    const char *const slow[] = {"sh", "job", NULL}, *const quick[] = {"true", NULL};
    assert_ok(dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = slow, .workspace = ws}, &p, NULL));
    assert_ok(dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = quick, .workspace = ws}, &q, NULL));
    collect(s, &q, &b); /* the quick one ends first and must not take the placeholders with it */
    collect(s, &p, &a);
    assert_non_null(strstr(a.out, ".mcp.json"));
    ran_free(&a);
    ran_free(&b);
    char path[700];
    snprintf(path, sizeof path, "%s/job", ws);
    unlink(path);
    char *after = listing(ws);
    assert_string_equal(after, before);
    free(before);
    free(after);
}

static void placeholders_that_a_crash_left_are_taken_over(void **state) {
    (void)state;
    ran r;
    const char *const argv[] = {"sleep", test_marked("421.5"), NULL};
    dm_sandbox_proc p;
    char *before = listing(ws), path[700];
    assert_ok(dm_sandbox_spawn(s, &(dm_sandbox_cmd){.argv = argv, .workspace = ws}, &p, NULL));
    wait_processes("421.5", 1);
    assert_int_equal(kill(only_child(), SIGKILL), 0); /* the launcher cannot tidy up */
    wait_processes("421.5", 0);
    close(p.out_fd);
    close(p.err_fd);
    dm_sandbox_stop(s);
    snprintf(path, sizeof path, "%s/.mcp.json", ws);
    assert_true(dm_path_exists(path));
    s = sandbox_up(DM_SANDBOX_FULL, NULL);
    run_sh(s, ws, "true", &r);
    ran_free(&r);
    assert_false(dm_path_exists(path));
    /* What cannot be told from a directory of the user's stays, and is empty. */
    const char *const names[] = {".vscode", ".idea", ".dormouse"};
    for (size_t i = 0; i < DM_COUNT(names); i++) {
        snprintf(path, sizeof path, "%s/%s", ws, names[i]);
        assert_true(rmdir(path) == 0 || errno == ENOENT);
    }
    char *after = listing(ws);
    assert_string_equal(after, before);
    free(before);
    free(after);
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "probe") == 0) return probe();
    if (argc > 1 && strcmp(argv[1], "abstract") == 0) {
        struct sockaddr_un un = {.sun_family = AF_UNIX, .sun_path = "\0dm-abstract"};
        puts(connect(socket(AF_UNIX, SOCK_STREAM, 0), (struct sockaddr *)&un, sizeof un) == 0 ? "connected" : "refused");
        return 0;
    }
#define T(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
    const struct CMUnitTest tests[] = {
        T(system_calls_that_reach_out_are_refused),
        T(no_capability_is_left_and_none_comes_back),
        T(s04_nothing_of_our_environment_but_the_allowlist),
        T(s05_descriptors_0_1_2_only),
        T(writes_stay_in_the_workspace),
        T(hard_links_to_the_outside_cannot_be_made),
        T(there_is_no_network_but_loopback),
        T(abstract_sockets_of_the_machine_are_out_of_reach),
        T(other_processes_are_not_there),
        T(run_tmp_and_other_homes_are_empty),
        T(secrets_of_the_home_are_hidden_and_the_rest_is_readable),
        T(a_link_to_a_secret_does_not_uncover_it),
        T(a_name_swapped_while_the_sandbox_is_built_uncovers_nothing),
        T(hidden_directories_are_empty_wherever_they_lie),
        T(there_is_no_terminal),
        T(q75_names_that_others_obey_cannot_be_written),
        T(odd_repositories_break_nothing_and_leave_no_ghost),
        T(a_worktree_cannot_touch_the_hooks_of_its_repository),
        T(a_forged_git_file_opens_nothing),
        T(nested_repositories_and_submodules_are_protected),
        T(commands_side_by_side_share_placeholders),
        T(placeholders_that_a_crash_left_are_taken_over),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
