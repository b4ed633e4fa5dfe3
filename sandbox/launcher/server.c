/* The launcher's loop: the host's socket, the host's life, and every running command.
 *
 * A command's life
 *     starting --SUP_STARTED--> running --SUP_ENDED, process gone--> reported
 *         \--SUP_FAILED or no word at all-----------------------> reported as setup_failed
 * A bound that is passed, a kill or the end of the host moves it to `ending`: SIGTERM, so that tools can drop their
 * locks, and GRACE_MS later SIGKILL to the first process of the pid namespace, which takes all the others with it.
 * bubblewrap's monitor ends only after the namespace is empty, so its end is the proof that nothing is left.  Unless it is
 * killed in its first moments: then a half-made namespace can outlive it, waiting for ever with the command's pipes in
 * hand.  We are the subreaper, so that orphan becomes our child and is known by being nobody's monitor. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sandbox/launcher/launcher_int.h"

enum { COMMANDS_MAX = 256, GRACE_MS = 300, WATCH_MS = 20, DIAG_MAX = 2048, SHUT_DOWN_MS = 15000 /* less than the host waits */ };

typedef struct command {
    bool used;
    int32_t id;
    child c;
    pid_t init;     /* first process inside, as seen from here; 0: not known (yet) */
    int init_pidfd; /* -1 with it */
    uint64_t start_ns, deadline_ns, kill_ns; /* kill_ns: SIGKILL is due; 0: not ending */
    uint64_t watch_ns;                       /* next look at the tree; 0: never */
    int64_t memory_max, memory_peak, pids_max;
    uint32_t flags; /* SB_X_… */
    bool started, ended, failed, gone;
    siginfo_t wait;
    sup_record last; /* ENDED or FAILED */
    char diag[DIAG_MAX];
    size_t diag_bytes;
} command;

size_t server_commands_bytes(void) { return COMMANDS_MAX * sizeof(command); }

static uint64_t ms(int64_t n) { return (uint64_t)n * 1000000u; }

static command *command_slot(launcher *l) {
    for (int i = 0; i < COMMANDS_MAX; i++)
        if (!l->commands[i].used) return &l->commands[i];
    return NULL;
}

static void close_if(int *fd) {
    if (*fd >= 0) close(*fd);
    *fd = -1;
}

/* ---- ending ------------------------------------------------------------------------------------------------- */

static void signal_pidfd(int pidfd, int sig) { (void)syscall(SYS_pidfd_send_signal, pidfd, sig, NULL, 0); }

/* The supervisor passes SIGTERM on; before it is known, only the wrapper is there to end. */
static void command_end(command *c, uint32_t why, uint64_t now) {
    if (c->kill_ns || c->gone) return;
    c->flags |= why;
    c->kill_ns = now + ms(GRACE_MS);
    if (why & (SB_X_MEMORY | SB_X_PIDS)) c->kill_ns = now; /* it is doing harm right now */
    else if (c->init_pidfd >= 0) signal_pidfd(c->init_pidfd, SIGTERM);
    else if (c->c.pid > 0 && c->started) signal_pidfd(c->c.pidfd, SIGTERM);
    else c->kill_ns = now;
}

static void command_kill(command *c, uint64_t now, mode m) {
    c->kill_ns = now + ms(100); /* again, should one have slipped through */
    if (c->init_pidfd >= 0) {
        signal_pidfd(c->init_pidfd, SIGKILL);
    } else {
        if (m < MODE_BWRAP_HOST_PROC) watch_kill_tree(c->c.pid, SIGKILL);
        signal_pidfd(c->c.pidfd, SIGKILL);
    }
}

/* ---- reading what it says ----------------------------------------------------------------------------------- */

static void read_status(command *c) {
    sup_record r;
    ssize_t n;
    while (c->c.status_fd >= 0 && (n = read(c->c.status_fd, &r, sizeof r)) != -1) {
        if (n != (ssize_t)sizeof r) { /* the end, or a torn record, which a pipe does not make */
            close_if(&c->c.status_fd);
            return;
        }
        r.text[sizeof r.text - 1] = 0;
        if (r.kind == SUP_STARTED) c->started = true;
        else if (r.kind == SUP_FAILED) c->failed = true, c->last = r;
        else if (r.kind == SUP_ENDED) c->ended = true, c->last = r;
    }
    if (errno != EAGAIN && errno != EINTR) close_if(&c->c.status_fd);
}

static void read_diag(command *c) {
    char drop[512];
    while (c->c.diag_fd >= 0) {
        const size_t room = sizeof c->diag - 1 - c->diag_bytes;
        ssize_t n = room ? read(c->c.diag_fd, c->diag + c->diag_bytes, room) : read(c->c.diag_fd, drop, sizeof drop);
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n <= 0) {
            close_if(&c->c.diag_fd);
            return;
        }
        if (room) c->diag_bytes += (size_t)n;
    }
}

/* bubblewrap's first words: { "child-pid": N, … }.  A number is believed only while it is the wrapper's child. */
static void read_info(command *c) {
    char text[512], path[64], stat[512];
    long pid = 0, parent = 0;
    ssize_t n = read(c->c.info_fd, text, sizeof text - 1);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    text[n > 0 ? n : 0] = 0;
    const char *at = strstr(text, "\"child-pid\":");
    if (n <= 0) close_if(&c->c.info_fd);
    if (!at || c->init || sscanf(at + 12, "%ld", &pid) != 1 || pid <= 1) return;
    int fd = (int)syscall(SYS_pidfd_open, (pid_t)pid, 0);
    snprintf(path, sizeof path, "/proc/%ld/stat", pid);
    int sf = open(path, O_RDONLY | O_CLOEXEC);
    n = sf >= 0 ? read(sf, stat, sizeof stat - 1) : 0;
    if (sf >= 0) close(sf);
    stat[n > 0 ? n : 0] = 0;
    const char *after = strrchr(stat, ')');
    if (fd >= 0 && after && sscanf(after + 1, " %*c %ld", &parent) == 1 && parent == c->c.pid) {
        c->init = (pid_t)pid;
        c->init_pidfd = fd;
    } else if (fd >= 0) {
        close(fd);
    }
}

static void read_end(command *c) {
    siginfo_t si = {0};
    if (waitid(P_PIDFD, (id_t)c->c.pidfd, &si, WEXITED | WNOHANG) != 0 || si.si_pid == 0) return;
    c->wait = si;
    c->gone = true;
}

/* ---- the report --------------------------------------------------------------------------------------------- */

/* The last line of what the wrapper complained about. */
static void setup_text(const command *c, char *out, size_t cap) {
    char diag[DIAG_MAX];
    memcpy(diag, c->diag, c->diag_bytes);
    diag[c->diag_bytes] = 0;
    size_t n = c->diag_bytes;
    while (n > 0 && (diag[n - 1] == '\n' || diag[n - 1] == '\r')) diag[--n] = 0;
    const char *line = strrchr(diag, '\n');
    line = line ? line + 1 : diag;
    if (c->failed) snprintf(out, cap, "%s", c->last.text);
    else if (*line) snprintf(out, cap, "%.250s", line);
    else if (c->wait.si_code == CLD_EXITED) snprintf(out, cap, "the wrapper ended with status %d before the command started", c->wait.si_status);
    else snprintf(out, cap, "the wrapper was ended by signal %d before the command started", c->wait.si_status);
    for (char *at = out; *at; at++)
        if ((unsigned char)*at < 32) *at = ' ';
}

static void exit_fill(const command *c, sb_exit *x) {
    *x = (sb_exit){.head = {SB_MAGIC, SB_EXIT, c->id, 0}, .exit_code = -1, .flags = c->flags};
    x->wall_ms = (int64_t)((dm_now_ns() - c->start_ns) / 1000000u);
    x->memory_bytes_peak = c->memory_peak;
    if (c->ended) {
        const int status = c->last.status;
        if (WIFEXITED(status)) x->exit_code = WEXITSTATUS(status);
        if (WIFSIGNALED(status)) x->signal = WTERMSIG(status);
        x->background = c->last.background;
        x->cpu_ms = c->last.cpu_ms;
        if (c->last.rss_bytes_max > x->memory_bytes_peak) x->memory_bytes_peak = c->last.rss_bytes_max;
        return;
    }
    if (c->failed || (!c->started && c->flags == 0)) {
        x->flags |= SB_X_SETUP;
        setup_text(c, x->text, sizeof x->text);
        return;
    }
    x->signal = SIGKILL;
    if (c->flags == 0) snprintf(x->text, sizeof x->text, "the command was ended from outside, perhaps because memory ran out");
}

static void command_close(command *c) {
    close_if(&c->c.status_fd), close_if(&c->c.diag_fd), close_if(&c->c.info_fd), close_if(&c->c.pidfd), close_if(&c->init_pidfd);
    protect_release(&c->c.plan);
    plan_free(&c->c.plan);
    *c = (command){0};
}

/* ---- starting ----------------------------------------------------------------------------------------------- */

static int command_start(launcher *l, command *c, int32_t id, sb_request *r, const int *fds, dm_err *e) {
    *c = (command){.id = id, .init_pidfd = -1};
    int null = fds[2] >= 0 ? -1 : open("/dev/null", O_RDONLY | O_CLOEXEC);
    int rc = spawn_start(l, r, fds[2] >= 0 ? fds[2] : null, fds[0], fds[1], &c->c, e);
    close_if(&null);
    if (rc < 0) return rc;
    c->used = true;
    c->start_ns = dm_now_ns();
    c->deadline_ns = c->start_ns + ms(r->timeout_ms > 0 ? r->timeout_ms : 120000);
    c->memory_max = r->memory;
    c->pids_max = r->pids;
    if (r->memory > 0 || r->pids > 0) c->watch_ns = c->start_ns + ms(WATCH_MS);
    l->count++;
    return 0;
}

/* A packet that the host cannot take now is worth waiting for: it owes us nothing but reading. */
static int exit_send(launcher *l, const sb_exit *x) { return sb_send(l->sock, x, sizeof *x, NULL, 0, 60000); }

static int refuse(launcher *l, int32_t id, const char *text) {
    sb_exit x = {.head = {SB_MAGIC, SB_EXIT, id, 0}, .exit_code = -1, .flags = SB_X_SETUP};
    snprintf(x.text, sizeof x.text, "%.255s", text);
    return exit_send(l, &x);
}

/* Only directories of this form are ours to remove. */
static void tmp_remember(launcher *l, const char *tmp) {
    if (!tmp || !dm_str_prefix(tmp, "/tmp/dormouse-tmp-") || strchr(tmp + 5, '/') || l->tmps.n > 65536) return;
    for (size_t at = 0; at < l->tmps.n; at += strlen((char *)l->tmps.p + at) + 1)
        if (strcmp((char *)l->tmps.p + at, tmp) == 0) return;
    (void)dm_buf_append(&l->tmps, tmp, strlen(tmp) + 1);
}

static int on_spawn(launcher *l, int32_t id, const int *fds, int fd_count) {
    dm_err e = {0};
    sb_request r = {0};
    command *c = command_slot(l);
    int rc = fd_count >= 3 ? sb_request_read(&r, fds[0], &e) : dm_err_set(&e, DM_EFORMAT, "sandbox", "a command came without its descriptors");
    if (rc == 0 && (r.argv.n == 0 || !r.workspace)) rc = dm_err_set(&e, DM_EFORMAT, "sandbox", "a command came without program or workspace");
    if (rc == 0 && !c) rc = dm_err_set(&e, DM_ELIMIT, "sandbox", "%d commands run already", COMMANDS_MAX);
    if (rc == 0) {
        const int given[3] = {fds[1], fds[2], fd_count > 3 ? fds[3] : -1};
        tmp_remember(l, r.tmp);
        rc = command_start(l, c, id, &r, given, &e);
    }
    sb_request_free(&r);
    return rc < 0 ? refuse(l, id, e.text) : 0;
}

/* ---- the loop ----------------------------------------------------------------------------------------------- */

static int on_packet(launcher *l) {
    sb_head h;
    int fds[SB_FDS_MAX], fd_count = SB_FDS_MAX;
    int got = sb_recv(l->sock, &h, sizeof h, fds, &fd_count);
    if (got == 0) return 0;
    int rc = got == (int)sizeof h && h.magic == SB_MAGIC ? 0 : DM_EPIPE;
    if (rc == 0 && h.type == SB_SPAWN) rc = on_spawn(l, h.id, fds, fd_count);
    for (int i = 0; rc == 0 && h.type == SB_KILL && i < COMMANDS_MAX; i++)
        if (l->commands[i].used && l->commands[i].id == h.id) command_end(&l->commands[i], SB_X_KILLED, dm_now_ns());
    for (int i = 0; i < fd_count; i++) close(fds[i]);
    return rc;
}

/* The tree is looked at more rarely when looking is dear. */
static void command_watch(command *c, uint64_t now) {
    const usage u = watch_tree(c->init ? c->init : c->c.pid);
    const uint64_t cost = dm_now_ns() - now;
    if (u.rss_bytes > c->memory_peak) c->memory_peak = u.rss_bytes;
    if (c->memory_max > 0 && u.rss_bytes > c->memory_max) command_end(c, SB_X_MEMORY, now);
    else if (c->pids_max > 0 && u.processes > c->pids_max + 1) command_end(c, SB_X_PIDS, now);
    c->watch_ns = now + (cost * 10 > ms(WATCH_MS) ? cost * 10 : ms(WATCH_MS));
}

static void command_timers(command *c, uint64_t now, mode m) {
    if (now >= c->deadline_ns && !c->kill_ns) command_end(c, SB_X_TIMED_OUT, now);
    if (c->watch_ns && now >= c->watch_ns && !c->kill_ns) command_watch(c, now);
    if (c->kill_ns && now >= c->kill_ns) command_kill(c, now, m);
}

static uint64_t command_due(const command *c) {
    uint64_t due = c->kill_ns ? c->kill_ns : c->deadline_ns;
    if (!c->kill_ns && c->watch_ns && c->watch_ns < due) due = c->watch_ns;
    return due;
}

static void command_read(command *c) {
    if (c->c.info_fd >= 0) read_info(c);
    read_end(c); /* before the last look at the pipes, so that nothing written before the end is missed */
    read_status(c);
    read_diag(c);
}

/* Four descriptors for each command, then those of the caller. */
static int loop_wait(launcher *l, struct pollfd *extra, int extra_count, int most_ms) {
    struct pollfd pf[COMMANDS_MAX * 4 + 2];
    int n = 0;
    uint64_t now = dm_now_ns(), due = now + ms(most_ms);
    for (int i = 0; i < extra_count; i++) pf[n++] = extra[i];
    for (int i = 0; i < COMMANDS_MAX; i++) {
        const command *c = &l->commands[i];
        if (!c->used) continue;
        const int fds[4] = {c->c.pidfd, c->c.status_fd, c->c.diag_fd, c->c.info_fd};
        for (int k = 0; k < 4; k++) pf[n++] = (struct pollfd){fds[k], POLLIN, 0};
        if (command_due(c) < due) due = command_due(c);
    }
    const int wait = due > now ? (int)((due - now) / 1000000u) + 1 : 0;
    if (poll(pf, (nfds_t)n, wait) < 0 && errno != EINTR) return -errno;
    for (int i = 0; i < extra_count; i++) extra[i].revents = pf[i].revents;
    return 0;
}

/* True when some command has come to its end; *x tells of it. */
static bool loop_step(launcher *l, sb_exit *x) {
    const uint64_t now = dm_now_ns();
    for (int i = 0; i < COMMANDS_MAX; i++) {
        command *c = &l->commands[i];
        if (!c->used) continue;
        command_read(c);
        if (c->gone) {
            exit_fill(c, x);
            command_close(c);
            l->count--;
            return true;
        }
        command_timers(c, now, l->mode);
    }
    return false;
}

static bool is_monitor(const launcher *l, pid_t pid) {
    for (int i = 0; i < COMMANDS_MAX; i++)
        if (l->commands[i].used && l->commands[i].c.pid == pid) return true;
    return false;
}

/* Children of ours that are no command's monitor have lost the one who answered for them.  true: there were some. */
static bool orphans_kill(const launcher *l) {
    static pid_t list[4096];
    const int n = watch_children(getpid(), list, (int)DM_COUNT(list));
    bool found = false;
    for (int i = 0; i < n; i++) {
        if (is_monitor(l, list[i])) continue;
        found = true;
        kill(list[i], SIGKILL);
        (void)waitpid(list[i], NULL, WNOHANG);
    }
    return found;
}

static void shut_down(launcher *l) {
    sb_exit x;
    const uint64_t end = dm_now_ns() + ms(SHUT_DOWN_MS);
    for (int i = 0; i < COMMANDS_MAX; i++)
        if (l->commands[i].used) command_kill(&l->commands[i], dm_now_ns(), l->mode);
    while (l->count > 0 && dm_now_ns() < end) {
        (void)loop_wait(l, NULL, 0, 1000);
        while (loop_step(l, &x)) continue;
    }
    while (orphans_kill(l) && dm_now_ns() < end) (void)poll(NULL, 0, 1);
}

int server_run(launcher *l) {
    /* By pidfd and not by PR_SET_PDEATHSIG, which follows the thread that started us and not its process. */
    int host = (int)syscall(SYS_pidfd_open, getppid(), 0);
    sb_exit x;
    int rc = 0;
    bool orphans = false; /* there may be some to kill or to reap */
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0);
    while (rc == 0) {
        struct pollfd pf[2] = {{l->sock, POLLIN, 0}, {host, POLLIN, 0}};
        rc = loop_wait(l, pf, 2, orphans ? 5 : 60000);
        if (rc == 0 && pf[1].revents) rc = DM_EPIPE;
        if (rc == 0 && pf[0].revents) rc = on_packet(l);
        while (rc == 0 && loop_step(l, &x)) {
            orphans = true;
            rc = exit_send(l, &x);
        }
        if (orphans) orphans = orphans_kill(l);
    }
    shut_down(l);
    if (host >= 0) close(host);
    return 0;
}

int server_run_one(launcher *l, sb_request *r, sb_exit *x) {
    dm_err e = {0};
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    const int fds[3] = {null, null, -1};
    int rc = command_start(l, &l->commands[0], 0, r, fds, &e);
    close_if(&null);
    if (rc < 0) {
        *x = (sb_exit){.exit_code = -1, .flags = SB_X_SETUP};
        snprintf(x->text, sizeof x->text, "%.255s", e.text);
        return rc;
    }
    while (!loop_step(l, x))
        if (loop_wait(l, NULL, 0, 1000) < 0) return DM_EIO;
    return 0;
}
