/* Starts one command: canonical paths, plan, descriptors, fork, exec.  The launcher is small and single-threaded, so
 * fork is cheap and the code between fork and exec may be ordinary. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sandbox/launcher/launcher_int.h"

/* ---- paths ------------------------------------------------------------------------------------------------ */

/* *path becomes its canonical form, kept in `keep`. */
static int canonical(const char **path, dm_buf *keep, const char *what, dm_err *e) {
    char real[4096];
    struct stat st;
    if (!*path) return 0;
    if ((*path)[0] != '/') return dm_err_set(e, DM_EINVAL, "sandbox", "the %s %.200s is not absolute", what, *path);
    if (!realpath(*path, real)) return dm_err_sys(e, errno, "sandbox", "the %s %.200s cannot be used", what, *path);
    if (stat(real, &st) != 0 || !S_ISDIR(st.st_mode)) return dm_err_set(e, DM_EINVAL, "sandbox", "the %s %.200s is not a directory", what, real);
    if (dm_buf_append(keep, real, strlen(real) + 1) < 0) return dm_err_set(e, DM_ENOMEM, "sandbox", "out of memory");
    *path = (const char *)keep->p + keep->n - strlen(real) - 1;
    return 0;
}

static bool reserved(const char *path) {
    static const char *const whole[] = {"/", "/etc", "/usr", "/bin", "/lib", "/var", "/run", "/home"};
    static const char *const under[] = {"/proc", "/sys", "/dev", "/boot"};
    for (size_t i = 0; i < DM_COUNT(whole); i++)
        if (strcmp(path, whole[i]) == 0) return true;
    for (size_t i = 0; i < DM_COUNT(under); i++)
        if (dm_str_prefix(path, under[i]) && (path[strlen(under[i])] == '/' || path[strlen(under[i])] == 0)) return true;
    return false;
}

/* All paths of a request canonical, none that would give the machine away.  keep must not move: reserved first. */
static int paths_check(sb_request *r, dm_buf *keep, dm_err *e) {
    if (r->write.n > 64) return dm_err_set(e, DM_ELIMIT, "sandbox", "more than 64 writable directories");
    if (dm_buf_reserve(keep, (r->write.n + 4) * 4096) < 0) return dm_err_set(e, DM_ENOMEM, "sandbox", "out of memory");
    int rc = canonical(&r->workspace, keep, "workspace", e);
    if (rc == 0) rc = canonical(&r->cwd, keep, "working directory", e);
    if (rc == 0) rc = canonical(&r->tmp, keep, "temporary directory", e);
    for (size_t i = 0; rc == 0 && i < r->write.n; i++) rc = canonical(&r->write.p[i], keep, "writable directory", e);
    if (rc < 0) return rc;
    if (r->workspace && reserved(r->workspace))
        return dm_err_set(e, DM_EINVAL, "sandbox", "%s cannot be a workspace: choose a directory of your own", r->workspace);
    for (size_t i = 0; i < r->write.n; i++)
        if (reserved(r->write.p[i])) return dm_err_set(e, DM_EINVAL, "sandbox", "%s cannot be made writable", r->write.p[i]);
    if (!r->cwd) r->cwd = r->workspace;
    return 0;
}

/* ---- what the supervisor is told -------------------------------------------------------------------------- */

static size_t key_bytes(const char *entry) { return strcspn(entry, "="); }

static bool overridden(const sb_list *by, const char *entry) {
    const size_t n = key_bytes(entry);
    for (size_t i = 0; i < by->n; i++)
        if (key_bytes(by->p[i]) == n && strncmp(by->p[i], entry, n) == 0) return true;
    return false;
}

static int env_put(const launcher *l, const sb_request *r, dm_buf *b) {
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < l->hello.env.n; i++) {
        const char *entry = l->hello.env.p[i];
        if (overridden(&r->env, entry)) continue;
        if (l->mode <= MODE_LANDLOCK && r->tmp && dm_str_prefix(entry, "TMPDIR=")) continue;
        rc = sb_put_text(b, SB_T_ENV, entry);
    }
    if (rc == 0) rc = sb_put_list(b, SB_T_ENV, r->env.p);
    if (rc == 0 && l->mode <= MODE_LANDLOCK && r->tmp) { /* no mount makes it /tmp here */
        char text[4200];
        snprintf(text, sizeof text, "TMPDIR=%s", r->tmp);
        rc = sb_put_text(b, SB_T_ENV, text);
    }
    return rc;
}

static int inside_of(const launcher *l) {
    switch (l->mode) {
    case MODE_NONE: return 0;
    case MODE_LANDLOCK: return IN_LANDLOCK | IN_SECCOMP;
    default: return IN_PIDNS | IN_SECCOMP | IN_NPROC | (l->landlock_abi > 0 ? IN_LANDLOCK : 0);
    }
}

static int config_make(const launcher *l, const sb_request *r, const plan *p, dm_err *e) {
    dm_buf b = {0};
    int rc = sb_put_list(&b, SB_T_ARGV, r->argv.p);
    if (rc == 0) rc = env_put(l, r, &b);
    if (rc == 0) rc = sb_put_text(&b, SB_T_CWD, r->cwd ? r->cwd : "/");
    if (rc == 0) rc = sb_put_int(&b, SB_T_INSIDE, inside_of(l));
    if (rc == 0) rc = sb_put_int(&b, SB_T_FSIZE, r->fsize);
    if (rc == 0) rc = sb_put_int(&b, SB_T_PIDS, r->pids);
    if (rc == 0) rc = sb_put_int(&b, SB_T_CPU_S, r->cpu_s);
    if (rc == 0 && l->mode >= MODE_BWRAP_HOST_PROC) rc = plan_landlock(p, &b);
    if (rc == 0 && l->mode >= MODE_BWRAP_HOST_PROC) rc = plan_verify(p, &b);
    if (rc == 0 && l->mode == MODE_LANDLOCK) rc = plan_landlock_alone(r, &l->hello, &b);
    if (rc == 0) rc = sb_seal(b.p, b.n);
    dm_buf_free(&b);
    return rc < 0 ? dm_err_set(e, rc, "sandbox", "the command cannot be handed on: %s", dm_err_text(rc)) : rc;
}

static int args_make(const launcher *l, const sb_request *r, const plan *p, dm_err *e) {
    dm_buf b = {0};
    int rc = plan_args(p, r, l->mode, l->self, &b);
    if (rc == 0) rc = sb_seal(b.p, b.n);
    dm_buf_free(&b);
    return rc < 0 ? dm_err_set(e, rc, "sandbox", "the wrapper's arguments cannot be handed on: %s", dm_err_text(rc)) : rc;
}

/* ---- fork and exec ------------------------------------------------------------------------------------------ */

/* The order is that of the FD_… numbers; -1 stays closed. */
static void descriptors_place(const int *from) {
    int high[FD_COUNT];
    for (int i = 0; i < FD_COUNT; i++) high[i] = from[i] >= 0 ? fcntl(from[i], F_DUPFD_CLOEXEC, 64) : -1;
    for (int i = 0; i < FD_COUNT; i++) {
        close(i);
        if (high[i] >= 0) dup2(high[i], i); /* dup2 clears close-on-exec: exactly these pass */
    }
    if (close_range(FD_COUNT, ~0u, 0) != 0)
        for (int fd = FD_COUNT; fd < 4096; fd++) close(fd);
}

/* When memory runs out, the system takes a tool and not the engine. */
static void oom_first(void) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (fd < 0) return;
    if (write(fd, "1000", 4) != 4) (void)errno; /* a wish, not a promise */
    close(fd);
}

_Noreturn static void child_exec(const launcher *l, const int *fds) {
    setsid();
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0); /* a bare supervisor asks for SIGUSR1 instead */
    oom_first();
    descriptors_place(fds);
    const char *const bare[] = {l->self, "supervise", NULL};
    const char *const wrapped[] = {l->bwrap, "--args", "7", "--", "/run/dormouse/supervisor", "supervise", NULL};
    const char *const *argv = l->mode >= MODE_BWRAP_HOST_PROC ? wrapped : bare;
    execv(argv[0], (char *const *)(uintptr_t)argv);
    dprintf(FD_DIAG, "%s cannot be run: %s\n", argv[0], strerror(errno));
    _exit(127);
}

static int pidfd_of(pid_t pid) { return (int)syscall(SYS_pidfd_open, pid, 0); }

static void close_if(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

static int pipe_for(int *reader, int *writer, dm_err *e) {
    int p[2];
    if (pipe2(p, O_CLOEXEC) != 0) return dm_err_sys(e, errno, "sandbox", "a pipe cannot be made");
    (void)fcntl(p[0], F_SETFL, O_NONBLOCK);
    *reader = p[0];
    *writer = p[1];
    return 0;
}

static int child_start(const launcher *l, child *c, int *fds, dm_err *e) {
    int rc = pipe_for(&c->status_fd, &fds[FD_STATUS], e);
    if (rc == 0) rc = pipe_for(&c->diag_fd, &fds[FD_DIAG], e);
    if (rc == 0) rc = pipe_for(&c->info_fd, &fds[FD_INFO], e);
    if (rc < 0) return rc;
    c->pid = fork();
    if (c->pid < 0) return dm_err_sys(e, errno, "sandbox", "a process cannot be made");
    if (c->pid == 0) child_exec(l, fds);
    c->pidfd = pidfd_of(c->pid);
    if (c->pidfd >= 0) return 0;
    rc = dm_err_sys(e, errno, "sandbox", "the kernel has no pidfd_open (Linux 5.3)");
    kill(c->pid, SIGKILL);
    return rc;
}

/* Another command may be at work in the same place: looked at again until it holds still for a moment. */
static int plan_settled(plan *p, const sb_request *r, const sb_request *hello, dm_err *e) {
    int rc = DM_EAGAIN;
    for (int i = 0; rc == DM_EAGAIN && i < 8; i++) {
        if (e) e->code = 0;
        protect_release(p);
        plan_free(p);
        rc = plan_make(p, r, hello, e);
    }
    return rc;
}

int spawn_start(launcher *l, sb_request *r, int in, int out, int err, child *c, dm_err *e) {
    int fds[FD_COUNT];
    dm_buf keep = {0};
    *c = (child){.pid = -1, .pidfd = -1, .status_fd = -1, .diag_fd = -1, .info_fd = -1};
    for (int i = 0; i < FD_COUNT; i++) fds[i] = -1;
    int rc = paths_check(r, &keep, e);
    if (rc == 0 && l->mode == MODE_LANDLOCK && !r->tmp) r->tmp = l->scratch;
    if (rc == 0 && l->mode >= MODE_BWRAP_HOST_PROC) rc = plan_settled(&c->plan, r, &l->hello, e);
    if (rc == 0 && l->mode >= MODE_BWRAP_HOST_PROC) rc = fds[FD_ARGS] = args_make(l, r, &c->plan, e);
    if (rc >= 0) rc = fds[FD_CONFIG] = config_make(l, r, &c->plan, e);
    if (rc >= 0) {
        const bool inet_open = r->network || l->mode >= MODE_BWRAP_HOST_PROC; /* a net namespace is the better wall */
        fds[FD_IN] = in, fds[FD_OUT] = out, fds[FD_ERR] = err, fds[FD_FILTER] = l->filter[inet_open ? 0 : 1];
        rc = child_start(l, c, fds, e);
    }
    close_if(&fds[FD_ARGS]), close_if(&fds[FD_CONFIG]), close_if(&fds[FD_STATUS]), close_if(&fds[FD_DIAG]), close_if(&fds[FD_INFO]);
    dm_buf_free(&keep);
    if (rc >= 0) return 0;
    close_if(&c->status_fd), close_if(&c->diag_fd), close_if(&c->info_fd), close_if(&c->pidfd);
    protect_release(&c->plan);
    plan_free(&c->plan);
    return rc;
}
