/* Runs commands in a sandbox to their end, for the tests of sandbox/. */
#ifndef TESTS_SANDBOX_RUN_H
#define TESTS_SANDBOX_RUN_H

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sandbox/sandbox.h"
#include "tests/lib/testlib.h"

/* A fresh directory beneath the scratch directory. */
static inline const char *fresh_dir(const char *name) {
    static char path[8][600];
    static int n;
    char *out = path[n % 8];
    dm_err e = {0};
    snprintf(out, sizeof path[0], "%s/%d/%s", test_dir(), n++, name);
    assert_ok_e(dm_mkdirs(out, 0755, &e), e);
    return out;
}

static inline dm_sandbox *sandbox_up(dm_sandbox_level level, const char *const *hide) {
    dm_sandbox *s = NULL;
    dm_err e = {0};
    const dm_sandbox_opts o = {.launcher = test_launcher(), .level = level, .hide = hide};
    assert_ok_e(dm_sandbox_start(&s, &o, &e), e);
    return s;
}

typedef struct ran {
    dm_sandbox_exit x;
    char *out, *err; /* owned */
} ran;

static inline void ran_free(ran *r) {
    free(r->out);
    free(r->err);
    *r = (ran){0};
}

/* Reads what is there; false at the end. */
static inline bool drain(int fd, dm_buf *b) {
    char block[65536];
    for (;;) {
        ssize_t n = read(fd, block, sizeof block);
        if (n < 0 && errno == EAGAIN) return true;
        if (n <= 0) return false;
        assert_ok(dm_buf_append(b, block, (size_t)n));
    }
}

/* To the end of both pipes and the exit. */
static inline void collect(dm_sandbox *s, const dm_sandbox_proc *p, ran *r) {
    dm_buf out[2] = {{0}, {0}};
    int fds[2] = {p->out_fd, p->err_fd};
    bool done = false;
    dm_err e = {0};
    while (!done || fds[0] >= 0 || fds[1] >= 0) {
        struct pollfd pf[3] = {{fds[0], POLLIN, 0}, {fds[1], POLLIN, 0}, {done ? -1 : dm_sandbox_fd(s), POLLIN, 0}};
        poll(pf, 3, -1);
        for (int i = 0; i < 2; i++)
            if (pf[i].revents && !drain(fds[i], &out[i])) close(fds[i]), fds[i] = -1;
        if (!pf[2].revents) continue;
        const int rc = dm_sandbox_next(s, &r->x, &e);
        assert_ok_e(rc, e);
        if (rc == 1) {
            assert_int_equal(r->x.id, p->id);
            done = true;
        }
    }
    for (int i = 0; i < 2; i++)
        if (!out[i].p) assert_ok(dm_buf_str(&out[i], ""));
    r->out = (char *)out[0].p;
    r->err = (char *)out[1].p;
}

static inline void run_cmd(dm_sandbox *s, const dm_sandbox_cmd *c, ran *r) {
    dm_sandbox_proc p;
    dm_err e = {0};
    assert_ok_e(dm_sandbox_spawn(s, c, &p, &e), e);
    collect(s, &p, r);
}

static inline void run_sh(dm_sandbox *s, const char *ws, const char *script, ran *r) {
    const char *const argv[] = {"sh", "-c", test_marked(script), NULL};
    const dm_sandbox_cmd c = {.argv = argv, .workspace = ws, .timeout_ms = 60000};
    run_cmd(s, &c, r);
}

/* The script's output must be exactly this, and its status 0. */
static inline void expect_sh(dm_sandbox *s, const char *ws, const char *script, const char *want) {
    ran r;
    run_sh(s, ws, script, &r);
    if (r.x.setup_failed) fail_msg("%s: %s", script, r.x.text);
    if (strcmp(r.out, want) != 0 || r.x.exit_code != 0)
        fail_msg("%s\n  gave status %d, signal %d\n  out: %s\n  err: %s\n  want: %s", script, r.x.exit_code, r.x.signal, r.out, r.err, want);
    ran_free(&r);
}

static inline void put_file(const char *dir, const char *name, const char *content) { test_put(dir, name, test_marked(content)); }

/* Every name beneath dir, sorted, one a line. */
static inline char *listing(const char *dir) {
    char cmd[800];
    dm_buf b = {0};
    char block[4096];
    snprintf(cmd, sizeof cmd, "cd '%s' && find . | LC_ALL=C sort", dir);
    FILE *f = popen(cmd, "r");
    assert_non_null(f);
    for (size_t n; (n = fread(block, 1, sizeof block, f)) > 0;) assert_ok(dm_buf_append(&b, block, n));
    pclose(f);
    return (char *)b.p;
}

/* Processes anywhere on the machine whose command line holds the marker. */
static inline int processes_with(const char *mark) {
    const char *marker = test_marked(mark);
    int count = 0;
    DIR *d = opendir("/proc");
    for (struct dirent *it; (it = readdir(d));) {
        char path[300], text[4096];
        if (it->d_name[0] < '0' || it->d_name[0] > '9' || atoi(it->d_name) == getpid()) continue;
        snprintf(path, sizeof path, "/proc/%s/cmdline", it->d_name);
        FILE *f = fopen(path, "r");
        size_t n = f ? fread(text, 1, sizeof text, f) : 0;
        if (f) fclose(f);
        count += n > 0 && memmem(text, n, marker, strlen(marker)) != NULL;
    }
    closedir(d);
    return count;
}

/* Waits until the count is reached; a machine that is busy gets its time, a leftover that stays fails. */
static inline void wait_processes(const char *marker, int want) {
    for (int i = 0; i < 3000 && processes_with(marker) != want; i++) usleep(10000);
    assert_int_equal(processes_with(marker), want);
}

/* Its first child. */
static inline pid_t child_of(pid_t parent) {
    char path[64];
    int pid = 0;
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)parent, (int)parent);
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    assert_int_equal(fscanf(f, "%d", &pid), 1);
    fclose(f);
    return pid;
}

static inline pid_t only_child(void) { return child_of(getpid()); }

#endif
