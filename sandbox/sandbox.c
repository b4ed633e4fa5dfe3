/* The host's side: starts the launcher, hands commands over, takes exits back.  Contract: sandbox.h. */
#include "sandbox/sandbox.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "sandbox/wire_int.h"

enum { RUNNING_MAX = 256, READY_WAIT_MS = 20000, STOP_WAIT_MS = 20000, SEND_WAIT_MS = 1000 };

struct dm_sandbox {
    int sock; /* owned */
    pid_t pid;
    dm_sandbox_level level;
    char report[512];
    int next_id;
    int running[RUNNING_MAX]; /* ids whose exit has not been taken yet */
    int running_count;
    bool dead;
    void *slot; /* of the one who drains us; borrowed */
};

/* ---- finding and starting the launcher --------------------------------------------------------------------- */

static bool executable(const char *path) { return access(path, X_OK) == 0; }

/* Beside this program, then in PATH.  out holds at least 4096 bytes. */
static bool launcher_find(char *out, size_t cap) {
    static const char name[] = "dormouse-sandbox";
    ssize_t n = readlink("/proc/self/exe", out, cap - sizeof name - 1);
    for (int up = 0; n > 0 && up < 2; up++) { /* its folder, then the one above (tests live one level down) */
        out[n] = 0;
        char *slash = strrchr(out, '/');
        if (!slash) break;
        memcpy(slash + 1, name, sizeof name);
        if (executable(out)) return true;
        *slash = 0;
        n = slash - out;
    }
    const char *path = NULL;
    for (char **v = environ; v && *v; v++)
        if (strncmp(*v, "PATH=", 5) == 0) path = *v + 5;
    while (path && *path) {
        const size_t len = strcspn(path, ":");
        if (len > 0 && len + sizeof name + 1 < cap) {
            memcpy(out, path, len);
            out[len] = '/';
            memcpy(out + len + 1, name, sizeof name);
            if (executable(out)) return true;
        }
        path += len + (path[len] == ':');
    }
    return false;
}

/* closefrom and setsid make this safe beside any engine: no descriptor and no terminal reach the launcher, and
 * posix_spawn never copies page tables, however much is mapped. */
static int launcher_spawn(dm_sandbox *s, const char *path, int sock, const char *const *env, dm_err *e) {
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t attr;
    sigset_t none, all;
    sigemptyset(&none);
    sigfillset(&all);
    if (posix_spawn_file_actions_init(&fa) != 0) return dm_err_set(e, DM_ENOMEM, "sandbox", "out of memory");
    if (posix_spawnattr_init(&attr) != 0) {
        posix_spawn_file_actions_destroy(&fa);
        return dm_err_set(e, DM_ENOMEM, "sandbox", "out of memory");
    }
    posix_spawn_file_actions_addopen(&fa, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&fa, 1, "/dev/null", O_WRONLY, 0);
    posix_spawn_file_actions_adddup2(&fa, sock, 3);
    posix_spawn_file_actions_addclosefrom_np(&fa, 4);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setsigdefault(&attr, &all);
    char *const argv[] = {(char *)(uintptr_t) "dormouse-sandbox", (char *)(uintptr_t) "serve", NULL};
    int err = posix_spawn(&s->pid, path, &fa, &attr, argv, (char *const *)(uintptr_t)env);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&fa);
    if (err) return dm_err_set(e, DM_ESANDBOX, "sandbox", "%s cannot be started: %s", path, strerror(err));
    return 0;
}

static const char *home_of(const sb_list *env) {
    for (size_t i = 0; i < env->n; i++)
        if (dm_str_prefix(env->p[i], "HOME=")) return env->p[i] + 5;
    return NULL;
}

static int hello_send(dm_sandbox *s, const dm_sandbox_opts *o, const sb_list *env, dm_err *e) {
    dm_buf b = {0};
    int rc = sb_put_int(&b, SB_T_LEVEL, o->level);
    if (rc == 0) rc = sb_put_text(&b, SB_T_BWRAP, o->bwrap);
    if (rc == 0) rc = sb_put_text(&b, SB_T_HOME, home_of(env));
    if (rc == 0) rc = sb_put_list(&b, SB_T_HIDE, o->hide);
    if (rc == 0) rc = sb_put_list(&b, SB_T_ENV, env->p);
    int fd = rc == 0 ? sb_seal(b.p, b.n) : rc;
    dm_buf_free(&b);
    if (fd < 0) return dm_err_set(e, fd, "sandbox", "the launcher's options cannot be handed over: %s", dm_err_text(fd));
    const sb_head head = {SB_MAGIC, SB_HELLO, 0, 0};
    rc = sb_send(s->sock, &head, sizeof head, &fd, 1, SEND_WAIT_MS);
    close(fd);
    return rc < 0 ? dm_err_set(e, DM_ESANDBOX, "sandbox", "the launcher does not take its options: %s", dm_err_text(rc)) : 0;
}

static int ready_wait(dm_sandbox *s, dm_err *e) {
    sb_ready r;
    const uint64_t end = dm_now_ns() + READY_WAIT_MS * 1000000ull;
    for (;;) {
        int fds[1], fd_count = 0;
        int got = sb_recv(s->sock, &r, sizeof r, fds, &fd_count);
        if (got == (int)sizeof r && r.head.magic == SB_MAGIC && r.head.type == SB_READY) break;
        if (got == DM_EPIPE)
            return dm_err_set(e, DM_ESANDBOX, "sandbox", "the launcher ended before it was ready; is dormouse-sandbox of this build?");
        if (got != 0) return dm_err_set(e, DM_ESANDBOX, "sandbox", "the launcher answers in another version of the protocol");
        const uint64_t now = dm_now_ns();
        if (now >= end) return dm_err_set(e, DM_ESANDBOX, "sandbox", "the launcher is not ready after %d s", READY_WAIT_MS / 1000);
        struct pollfd pf = {s->sock, POLLIN, 0};
        (void)poll(&pf, 1, (int)((end - now) / 1000000u) + 1);
    }
    r.report[sizeof r.report - 1] = r.text[sizeof r.text - 1] = 0;
    if (r.code < 0) return dm_err_set(e, DM_ESANDBOX, "sandbox", "%s", r.text);
    if (r.level < DM_SANDBOX_NONE || r.level > DM_SANDBOX_FULL)
        return dm_err_set(e, DM_ESANDBOX, "sandbox", "the launcher answers in another version of the protocol");
    s->level = (dm_sandbox_level)r.level;
    memcpy(s->report, r.report, sizeof r.report);
    return 0;
}

int dm_sandbox_start(dm_sandbox **out, const dm_sandbox_opts *o, dm_err *e) {
    char path[4096];
    *out = NULL;
    if (o->launcher && strlen(o->launcher) >= sizeof path) return dm_err_set(e, DM_EINVAL, "sandbox", "the launcher's path is too long");
    if (o->launcher) memcpy(path, o->launcher, strlen(o->launcher) + 1);
    else if (!launcher_find(path, sizeof path))
        return dm_err_set(e, DM_ESANDBOX, "sandbox", "the launcher dormouse-sandbox is not beside this program and not in PATH; install it or name it");
    dm_sandbox *s = dm_calloc(1, sizeof *s);
    if (!s) return dm_err_set(e, DM_ENOMEM, "sandbox", "out of memory");
    s->sock = -1;
    s->next_id = 1;
    sb_request env = {0};
    int pair[2] = {-1, -1};
    int rc = sb_environ(&env.bytes, (const char *const *)(uintptr_t)environ);
    if (rc == 0) rc = sb_request_parse(&env, e);
    if (rc == 0 && socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
        rc = dm_err_sys(e, errno, "sandbox", "the launcher's socket cannot be made");
    if (rc == 0) {
        s->sock = pair[0];
        rc = launcher_spawn(s, path, pair[1], env.env.p, e);
        close(pair[1]);
    }
    if (rc == 0) rc = hello_send(s, o, &env.env, e);
    if (rc == 0) rc = ready_wait(s, e);
    sb_request_free(&env);
    if (rc < 0) {
        dm_sandbox_stop(s);
        return rc;
    }
    *out = s;
    return 0;
}

/* The launcher ends by itself at the end of its socket, after it has killed what runs; only a stuck one is killed. */
static void launcher_reap(pid_t pid) {
    const uint64_t end = dm_now_ns() + STOP_WAIT_MS * 1000000ull;
    bool killed = false;
    for (;;) {
        int status;
        pid_t got = waitpid(pid, &status, killed ? 0 : WNOHANG);
        if (got == pid || (got < 0 && errno != EINTR)) return;
        if (!killed && dm_now_ns() >= end) killed = kill(pid, SIGKILL) == 0;
        else if (!killed) (void)poll(NULL, 0, 2);
    }
}

void dm_sandbox_stop(dm_sandbox *s) {
    if (!s) return;
    if (s->sock >= 0) close(s->sock);
    if (s->pid > 0) launcher_reap(s->pid);
    dm_free(s);
}

dm_sandbox_level dm_sandbox_level_of(const dm_sandbox *s) { return s->level; }
const char *dm_sandbox_report(const dm_sandbox *s) { return s->report; }
int dm_sandbox_fd(const dm_sandbox *s) { return s->sock; }
void **dm_sandbox_slot(dm_sandbox *s) { return &s->slot; }

/* ---- commands ---------------------------------------------------------------------------------------------- */

static int running_index(const dm_sandbox *s, int id) {
    for (int i = 0; i < s->running_count; i++)
        if (s->running[i] == id) return i;
    return -1;
}

static int cmd_check(const dm_sandbox_cmd *c, dm_err *e) {
    if (!c->argv || !c->argv[0] || !c->argv[0][0]) return dm_err_set(e, DM_EINVAL, "sandbox", "a command needs a program");
    if (!c->workspace || c->workspace[0] != '/') return dm_err_set(e, DM_EINVAL, "sandbox", "a command needs an absolute workspace");
    if (c->input_bytes > SB_INPUT_MAX) return dm_err_set(e, DM_ELIMIT, "sandbox", "a command's input is larger than 1 MiB");
    if (c->timeout_ms < 0 || c->memory_bytes_max < 0 || c->file_bytes_max < 0 || c->pids_max < 0 || c->cpu_s_max < 0)
        return dm_err_set(e, DM_EINVAL, "sandbox", "a command's limit is negative");
    for (size_t i = 0; c->argv[i]; i++) /* the kernel's own bound on one argument, said before it says E2BIG */
        if (strlen(c->argv[i]) >= 131072) return dm_err_set(e, DM_ELIMIT, "sandbox", "an argument of the command is longer than 128 KiB");
    for (size_t i = 0; c->env && c->env[i]; i++)
        if (!strchr(c->env[i], '=') || c->env[i][0] == '=')
            return dm_err_set(e, DM_EINVAL, "sandbox", "\"%.80s\" is not an environment entry K=V", c->env[i]);
    return 0;
}

static int cmd_encode(const dm_sandbox_cmd *c, dm_buf *b) {
    int rc = sb_put_list(b, SB_T_ARGV, c->argv);
    if (rc == 0) rc = sb_put_text(b, SB_T_WORKSPACE, c->workspace);
    if (rc == 0) rc = sb_put_text(b, SB_T_CWD, c->cwd);
    if (rc == 0) rc = sb_put_text(b, SB_T_TMP, c->tmp);
    if (rc == 0) rc = sb_put_list(b, SB_T_WRITE, c->write);
    if (rc == 0) rc = sb_put_list(b, SB_T_ENV, c->env);
    if (rc == 0) rc = sb_put_int(b, SB_T_READONLY, c->workspace_readonly);
    if (rc == 0) rc = sb_put_int(b, SB_T_NETWORK, c->network);
    if (rc == 0) rc = sb_put_int(b, SB_T_TIMEOUT_MS, c->timeout_ms ? c->timeout_ms : 120000);
    if (rc == 0) rc = sb_put_int(b, SB_T_MEMORY, c->memory_bytes_max);
    if (rc == 0) rc = sb_put_int(b, SB_T_FSIZE, c->file_bytes_max ? c->file_bytes_max : (int64_t)1 << 30);
    if (rc == 0) rc = sb_put_int(b, SB_T_PIDS, c->pids_max ? c->pids_max : 256);
    if (rc == 0) rc = sb_put_int(b, SB_T_CPU_S, c->cpu_s_max);
    return rc;
}

/* fds: [payload, out write end, err write end, input]; closes none of them. */
static int spawn_send(dm_sandbox *s, const dm_sandbox_cmd *c, int id, int out_w, int err_w, dm_err *e) {
    dm_buf b = {0};
    int input = -1, fds[SB_FDS_MAX] = {-1, out_w, err_w, -1};
    int rc = cmd_encode(c, &b);
    if (rc == 0) rc = fds[0] = sb_seal(b.p, b.n);
    if (rc >= 0 && c->input_bytes) rc = fds[3] = input = sb_seal(c->input, c->input_bytes);
    dm_buf_free(&b);
    if (rc >= 0) {
        const sb_head head = {SB_MAGIC, SB_SPAWN, id, 0};
        rc = sb_send(s->sock, &head, sizeof head, fds, input >= 0 ? 4 : 3, SEND_WAIT_MS);
    }
    if (fds[0] >= 0) close(fds[0]);
    if (input >= 0) close(input);
    if (rc == DM_EPIPE) return dm_err_set(e, DM_EPIPE, "sandbox", "the launcher is gone");
    if (rc < 0) return dm_err_set(e, rc, "sandbox", "the command cannot be handed to the launcher: %s", dm_err_text(rc));
    return 0;
}

static int pipe_make(int out[2], dm_err *e) {
    if (pipe2(out, O_CLOEXEC) != 0) return dm_err_sys(e, errno, "sandbox", "a pipe cannot be made");
    (void)fcntl(out[0], F_SETFL, O_NONBLOCK); /* the reader's end only; the command's end blocks as programs expect */
    return 0;
}

int dm_sandbox_spawn(dm_sandbox *s, const dm_sandbox_cmd *c, dm_sandbox_proc *out, dm_err *e) {
    int po[2] = {-1, -1}, pe[2] = {-1, -1};
    *out = (dm_sandbox_proc){0, -1, -1};
    int rc = cmd_check(c, e);
    if (rc < 0) return rc;
    if (s->dead) return dm_err_set(e, DM_EPIPE, "sandbox", "the launcher is gone");
    if (s->running_count == RUNNING_MAX) return dm_err_set(e, DM_EBUSY, "sandbox", "%d commands run already", RUNNING_MAX);
    const int id = s->next_id;
    rc = pipe_make(po, e);
    if (rc == 0) rc = pipe_make(pe, e);
    if (rc == 0) rc = spawn_send(s, c, id, po[1], pe[1], e);
    if (po[1] >= 0) close(po[1]);
    if (pe[1] >= 0) close(pe[1]);
    if (rc < 0) {
        if (po[0] >= 0) close(po[0]);
        if (pe[0] >= 0) close(pe[0]);
        return rc;
    }
    s->next_id = s->next_id == INT32_MAX ? 1 : s->next_id + 1;
    s->running[s->running_count++] = id;
    *out = (dm_sandbox_proc){id, po[0], pe[0]};
    return 0;
}

int dm_sandbox_kill(dm_sandbox *s, int id) {
    if (running_index(s, id) < 0) return DM_ENOENT;
    const sb_head head = {SB_MAGIC, SB_KILL, id, 0};
    int rc = sb_send(s->sock, &head, sizeof head, NULL, 0, SEND_WAIT_MS);
    return rc < 0 ? rc : 0;
}

int dm_sandbox_next(dm_sandbox *s, dm_sandbox_exit *out, dm_err *e) {
    sb_exit x;
    int fds[1], fd_count = 0;
    if (s->dead) return dm_err_set(e, DM_EPIPE, "sandbox", "the launcher is gone");
    int got = sb_recv(s->sock, &x, sizeof x, fds, &fd_count);
    if (got == 0) return 0;
    const int at = got == (int)sizeof x && x.head.magic == SB_MAGIC && x.head.type == SB_EXIT ? running_index(s, x.head.id) : -1;
    if (at < 0) { /* the end, or words that are not ours: nothing from there is believed any more */
        s->dead = true;
        return dm_err_set(e, DM_EPIPE, "sandbox", "the launcher is gone%s", got == DM_EPIPE ? "" : " (it broke the protocol)");
    }
    s->running[at] = s->running[--s->running_count];
    *out = (dm_sandbox_exit){
        .id = x.head.id,
        .exit_code = x.exit_code >= 0 && x.exit_code <= 255 ? x.exit_code : -1,
        .signal = x.signal >= 0 && x.signal < 65 ? x.signal : 0,
        .timed_out = x.flags & SB_X_TIMED_OUT,
        .memory = x.flags & SB_X_MEMORY,
        .killed = x.flags & SB_X_KILLED,
        .setup_failed = x.flags & SB_X_SETUP,
        .pids = x.flags & SB_X_PIDS,
        .background = x.background > 0 ? x.background : 0,
        .wall_ms = x.wall_ms,
        .cpu_ms = x.cpu_ms,
        .memory_bytes_peak = x.memory_bytes_peak,
    };
    memcpy(out->text, x.text, sizeof out->text - 1);
    return 1;
}
