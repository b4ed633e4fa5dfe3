/* The first process of one command's sandbox.  As the init of its pid namespace it reaps orphans, sees the command's
 * true wait status, ends what the command left behind, and reports on FD_STATUS.  It is not dumpable, so the command
 * (same user) can reach neither its memory nor its descriptors; signals from inside do not reach an init at all.
 *
 * Without a pid namespace (partial, none) it is a subreaper instead and ends its descendants one by one. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sandbox/launcher/launcher_int.h"

/* A shell does not wait for >(filter) and the like: what ends this soon after its command is part of it. */
enum { LINGER_MS = 150 };

/* Taken one by one with sigwaitinfo, so nothing runs in the middle of something else. */
static sigset_t watched(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGCHLD);
    sigaddset(&set, SIGTERM); /* the launcher asks for an end: passed on */
    sigaddset(&set, SIGUSR1); /* the launcher is gone (PR_SET_PDEATHSIG): no more asking */
    return set;
}

static int report(const sup_record *r) {
    ssize_t n;
    (void)signal(SIGPIPE, SIG_IGN);
    do n = write(FD_STATUS, r, sizeof *r); /* one packet: shorter than PIPE_BUF */
    while (n < 0 && errno == EINTR);
    return n == (ssize_t)sizeof *r ? 0 : 1;
}

static int report_failure(const char *text) {
    sup_record r = {.kind = SUP_FAILED};
    strncpy(r.text, text, sizeof r.text - 1);
    (void)report(&r);
    return 1;
}

/* ---- the command's own process, up to exec ------------------------------------------------------------------ */

static void signals_reset(void) {
    sigset_t none;
    const struct sigaction def = {.sa_handler = SIG_DFL};
    for (int s = 1; s < NSIG; s++) (void)sigaction(s, &def, NULL);
    sigemptyset(&none);
    (void)sigprocmask(SIG_SETMASK, &none, NULL);
}

static int confine(const sb_request *r, dm_err *e) {
    int rc = confine_limits(r, e);
    if (rc == 0) rc = confine_privileges(e);
    if (rc == 0 && (r->inside & IN_LANDLOCK)) rc = confine_landlock(r, e);
    if (rc == 0 && (r->inside & IN_SECCOMP)) rc = confine_filter(FD_FILTER, e);
    return rc;
}

/* Never returns; what goes wrong before exec is told through `tell`, which exec closes. */
_Noreturn static void command_exec(const sb_request *r, int tell) {
    dm_err e = {0};
    setsid();
    signals_reset();
    int rc = 0;
    if (r->cwd && chdir(r->cwd) != 0) rc = dm_err_sys(&e, errno, "sandbox", "%s cannot be entered", r->cwd);
    if (rc == 0) rc = confine(r, &e);
    if (rc == 0) {
        dup2(FD_ERR, 2);
        environ = (char **)(uintptr_t)r->env.p;
        execvp(r->argv.p[0], (char *const *)(uintptr_t)r->argv.p);
        dm_err_sys(&e, errno, "sandbox", "%.100s cannot be run", r->argv.p[0]);
    }
    ssize_t n = write(tell, e.text, strnlen(e.text, sizeof e.text));
    _exit(n < 0 ? 126 : 127);
}

/* ---- after it --------------------------------------------------------------------------------------------- */

/* Our children by the kernel's own list. */
static int children(pid_t *out, int cap) {
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    int count = 0;
    for (char *at = text, *end; count < cap; at = end) {
        const long pid = strtol(at, &end, 10);
        if (end == at || pid <= 0) break;
        out[count++] = (pid_t)pid;
    }
    return count;
}

/* In our own pid namespace every process but us is the command's. */
static int processes_here(void) {
    int count = 0;
    DIR *d = opendir("/proc");
    for (struct dirent *it; d && (it = readdir(d));) count += it->d_name[0] >= '0' && it->d_name[0] <= '9';
    if (d) closedir(d);
    return count > 1 ? count - 1 : 1;
}

static void reap_all(void) {
    while (waitpid(-1, NULL, 0) > 0 || errno == EINTR) continue;
}

/* Waits a moment for what is about to end anyway; true when nothing is left. */
static bool linger(void) {
    for (int ms = 0;; ms += 5) {
        pid_t got;
        while ((got = waitpid(-1, NULL, WNOHANG)) > 0) continue;
        if (got < 0 && errno == ECHILD) return true;
        if (ms >= LINGER_MS) return false;
        (void)poll(NULL, 0, 5);
    }
}

/* Ends whatever the command left running; returns how many processes that were. */
static int background_end(bool pidns, pid_t group) {
    if (linger()) return 0;
    if (pidns) {
        const int count = processes_here();
        kill(-1, SIGKILL);
        reap_all();
        return count;
    }
    int count = 0;
    pid_t list[256];
    kill(-group, SIGKILL);
    for (int n; (n = children(list, 256)) > 0;) { /* orphans come to us, so each round takes one generation */
        for (int i = 0; i < n; i++) kill(list[i], SIGKILL);
        for (int i = 0; i < n; i++)
            if (waitpid(list[i], NULL, 0) > 0) count++;
    }
    return count;
}

static int64_t cpu_ms(const struct rusage *u) {
    return (int64_t)(u->ru_utime.tv_sec + u->ru_stime.tv_sec) * 1000 + (u->ru_utime.tv_usec + u->ru_stime.tv_usec) / 1000;
}

/* Reaps whatever has ended; true when the command is among it. */
static bool command_ended(pid_t command, int *status) {
    int one;
    for (pid_t got; (got = waitpid(-1, &one, WNOHANG)) > 0;) {
        if (got != command) continue;
        *status = one;
        return true;
    }
    return false;
}

static int command_wait(pid_t command, bool pidns) {
    sup_record r = {.kind = SUP_ENDED};
    const sigset_t set = watched();
    const pid_t all = pidns ? -1 : -command; /* its session is its own, so its group is too */
    while (!command_ended(command, &r.status)) {
        const int sig = sigwaitinfo(&set, NULL);
        if (sig == SIGTERM) kill(all, SIGTERM);
        if (sig == SIGUSR1) kill(all, SIGKILL); /* what has left the group is found when the command has ended */
    }
    r.background = background_end(pidns, command);
    struct rusage u;
    getrusage(RUSAGE_CHILDREN, &u);
    r.cpu_ms = cpu_ms(&u);
    r.rss_bytes_max = u.ru_maxrss * 1024;
    return report(&r);
}

/* ---- main ------------------------------------------------------------------------------------------------- */

static void close_above(unsigned first) {
    if (close_range(first, ~0u, 0) != 0)
        for (int fd = (int)first; fd < 4096; fd++) close(fd);
}

/* One line of plan_verify: is the mount really on that inode? */
static bool verified(const char *line) {
    unsigned long long dev, ino;
    char how;
    int at = 0;
    struct stat st;
    struct statvfs vfs;
    struct statx sx;
    if (sscanf(line, "%llu %llu %c %n", &dev, &ino, &how, &at) != 3 || at == 0) return false;
    int fd = open_plain(line + at, O_PATH);
    if (fd < 0) return false;
    bool good = fstat(fd, &st) == 0 && st.st_dev == dev && st.st_ino == ino;
    if (good && how == 'r') good = fstatvfs(fd, &vfs) == 0 && (vfs.f_flag & ST_RDONLY);
    if (good && how == 'w' && statx(fd, "", AT_EMPTY_PATH, STATX_INO, &sx) == 0 && (sx.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT))
        good = sx.stx_attributes & STATX_ATTR_MOUNT_ROOT;
    close(fd);
    return good;
}

static int prepare(sb_request *r, bool *pidns) {
    dm_err e = {0};
    for (int fd = FD_ERR; fd <= FD_FILTER; fd++) (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    close_above(FD_FILTER + 1);
    prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    if (sb_request_read(r, FD_CONFIG, &e) < 0) return report_failure(e.text);
    if (r->argv.n == 0) return report_failure("there is no command to supervise");
    *pidns = r->inside & IN_PIDNS;
    if (*pidns && getpid() != 1)
        return report_failure("the wrapper made no pid namespace of its own; is this really bubblewrap?");
    for (size_t i = 0; i < r->verify.n; i++)
        if (!verified(r->verify.p[i])) return report_failure("protected names of the workspace were changed while the sandbox was built; try again");
    if (!*pidns) {
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
        prctl(PR_SET_PDEATHSIG, SIGUSR1, 0, 0, 0);
        struct pollfd reader = {FD_STATUS, 0, 0}; /* it may have gone before we asked to be told */
        if (poll(&reader, 1, 0) == 1) return 1;
    }
    return 0;
}

int supervise_main(void) {
    sb_request r = {0};
    bool pidns = false;
    int tell[2];
    const sigset_t set = watched();
    (void)sigprocmask(SIG_BLOCK, &set, NULL); /* before anything can send one; an init would drop it otherwise */
    if (prepare(&r, &pidns) != 0) return 1;
    if (pipe2(tell, O_CLOEXEC) != 0) return report_failure("no pipe for the supervisor");
    pid_t command = fork();
    if (command < 0) return report_failure("the command's process cannot be made");
    if (command == 0) command_exec(&r, tell[1]);
    /* The command's descriptors are the command's alone: when it closes its output the reader sees the end. */
    close(FD_IN), close(FD_OUT), close(FD_ERR), close(FD_CONFIG), close(FD_FILTER), close(tell[1]);
    char text[192] = "";
    ssize_t n;
    do n = read(tell[0], text, sizeof text - 1);
    while (n < 0 && errno == EINTR);
    close(tell[0]);
    if (n > 0) {
        reap_all();
        return report_failure(text);
    }
    const sup_record started = {.kind = SUP_STARTED};
    if (report(&started) != 0 && !pidns) kill(-command, SIGKILL);
    const int rc = command_wait(command, pidns);
    sb_request_free(&r);
    return rc;
}
