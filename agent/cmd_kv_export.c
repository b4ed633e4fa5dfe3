/* cmd_kv_export.c — `dormouse kv export`: a session into a file, or to a receiver (`kv import --listen`).
 *
 * A file appears under its name when it is whole and on the disk; until then it is NAME.part.  A session has arrived when the
 * receiver says so, and he says so when it is in his journal; everything before that is tried again, a few times, from the start. */
#include "agent/cmd_int.h"
#include "agent/transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define BUFFER_BYTES ((size_t)256 << 10)
#define BACKOFF_MS 200
#define BACKOFF_MS_MAX 5000

typedef struct export_opts { const char *state_dir, *to; int64_t timeout, retries; bool insecure, json; } export_opts;

static const dm_opt options[] = {
    { "state-dir", 0, DM_OPT_STR, offsetof(export_opts, state_dir), .env = "DORMOUSE_STATE_DIR", .metavar = "DIR", .help = "where sessions are; default: ~/.local/state/dormouse" },
    { "to", 0, DM_OPT_STR, offsetof(export_opts, to), .metavar = "ADDRESS", .help = "HOST:PORT or unix:PATH where `kv import --listen` waits" },
    { "timeout", 0, DM_OPT_INT, offsetof(export_opts, timeout), .def = "60", .min = 1, .max = 86400, .help = "seconds that the other side may be still" },
    { "retries", 0, DM_OPT_INT, offsetof(export_opts, retries), .def = "5", .min = 0, .max = 1000, .help = "further tries when it cannot be reached or the connection breaks" },
    { "insecure-remote", 0, DM_OPT_FLAG, offsetof(export_opts, insecure), .def = "0", .help = "let it be another machine: a transfer is neither encrypted nor authenticated" },
    { "json", 0, DM_OPT_FLAG, offsetof(export_opts, json), .def = "0", .help = "JSON on standard output" },
    { "help", 'h', DM_OPT_HELP, 0, .help = "this text" },
};

typedef struct sender {
    const export_opts *o;
    transfer_out out;
    transfer_report rep;
    dm_buf buffer;  /* owned; small records travel together */
    int fd;         /* a file, or -1 */
    net net;
    uint64_t shown_ns;
} sender;

static bool interrupted(void) { return signals_caught() != 0; }

static bool progress(void *ctx, int64_t bytes)
{
    sender *s = ctx;
    uint64_t now = dm_now_ns();
    if (err_is_terminal() && now - s->shown_ns > 200000000u) {
        char text[24];
        err_printf("\r%s\033[K", dm_bytes_text(text, sizeof text, (uint64_t)bytes));
        s->shown_ns = now;
    }
    return !interrupted();
}

static void progress_end(const sender *s)
{
    if (err_is_terminal() && s->shown_ns) err_printf("\r\033[K");
}

/* ---- bytes out ------------------------------------------------------------------------------------------------ */

static int fd_write(int fd, const uint8_t *p, size_t n, dm_err *e)
{
    while (n) {
        ssize_t k = write(fd, p, n);
        if (k < 0 && errno == EINTR && !interrupted()) continue;
        if (k < 0 && errno == EINTR) return dm_err_set(e, DM_ECANCELED, "export", "interrupted");
        if (k < 0) return dm_err_sys(e, errno, "export", "writing the export");
        p += k;
        n -= (size_t)k;
    }
    return 0;
}

static int send_off(sender *s, const void *p, size_t n, dm_err *e) { return s->fd >= 0 ? fd_write(s->fd, p, n, e) : net_write(&s->net, p, n, e); }

static int send_buffer(sender *s, dm_err *e)
{
    int rc = s->buffer.n ? send_off(s, s->buffer.p, s->buffer.n, e) : 0;
    dm_buf_clear(&s->buffer);
    return rc;
}

static int collect(void *ctx, const void *p, size_t n, dm_err *e)
{
    sender *s = ctx;
    if (s->buffer.n + n > BUFFER_BYTES) {
        int rc = send_buffer(s, e);
        if (rc < 0) return rc;
        if (n > BUFFER_BYTES) return send_off(s, p, n, e);
    }
    return dm_buf_append(&s->buffer, p, n) < 0 ? dm_err_set(e, DM_ENOMEM, "export", "out of memory") : 0;
}

static int send_all(sender *s, dm_err *e)
{
    dm_buf_clear(&s->buffer);
    int rc = transfer_export(&s->out, collect, s, &s->rep, e);
    return rc == 0 ? send_buffer(s, e) : rc;
}

/* ---- to a file ------------------------------------------------------------------------------------------------- */

static int sync_dir(const char *path, dm_err *e)
{
    const char *slash = strrchr(path, '/');
    char *dir = slash ? dm_strndup(path, slash == path ? 1 : (size_t)(slash - path)) : dm_strdup(".");
    if (!dir) return dm_err_set(e, DM_ENOMEM, "export", "out of memory");
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC), rc = fd < 0 || fsync(fd) != 0 ? errno : 0;
    if (fd >= 0) close(fd);
    dm_free(dir);
    return rc && rc != EINVAL ? dm_err_sys(e, rc, "export", "%s", path) : 0;
}

static int open_part(sender *s, const char *part, dm_err *e)
{
    s->fd = open(part, O_WRONLY | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (s->fd < 0) return dm_err_sys(e, errno, "export", "%s", part);
    if (flock(s->fd, LOCK_EX | LOCK_NB) != 0) return dm_err_set(e, DM_EBUSY, "export", "another process is writing %s", part);
    return ftruncate(s->fd, 0) == 0 ? 0 : dm_err_sys(e, errno, "export", "%s", part);
}

static int to_new_file(sender *s, const char *path, dm_err *e)
{
    char *part = dm_malloc(strlen(path) + 6);
    if (!part) return dm_err_set(e, DM_ENOMEM, "export", "out of memory");
    snprintf(part, strlen(path) + 6, "%s.part", path);
    int rc = open_part(s, part, e);
    bool ours = rc == 0;
    if (rc == 0) rc = send_all(s, e);
    if (rc == 0 && fsync(s->fd) != 0) rc = dm_err_sys(e, errno, "export", "%s", part);
    if (rc == 0 && rename(part, path) != 0) rc = dm_err_sys(e, errno, "export", "%s", path);
    if (rc < 0 && ours) unlink(part);
    if (s->fd >= 0) close(s->fd);
    if (rc == 0) rc = sync_dir(path, e);
    dm_free(part);
    return rc;
}

static int to_file(sender *s, const char *path, dm_err *e)
{
    struct stat st;
    if (strcmp(path, "-") == 0) {
        s->fd = STDOUT_FILENO;
        if (isatty(s->fd)) return dm_err_set(e, DM_EUSAGE, "export", "an export is not for a terminal; give a file or a pipe");
        return send_all(s, e);
    }
    if (stat(path, &st) != 0 || S_ISREG(st.st_mode)) return to_new_file(s, path, e);
    if (S_ISDIR(st.st_mode)) return dm_err_set(e, DM_EUSAGE, "export", "%s is a directory; give the name of a file", path);
    s->fd = open(path, O_WRONLY | O_CLOEXEC);
    if (s->fd < 0) return dm_err_sys(e, errno, "export", "%s", path);
    int rc = send_all(s, e);
    close(s->fd);
    return rc;
}

/* ---- to a receiver ---------------------------------------------------------------------------------------------- */

/* *again: it may work another time. */
static int send_once(sender *s, const net_addr *a, bool *again, dm_err *e)
{
    int rc = net_connect(&s->net, a, s->o->insecure, e);
    *again = rc != DM_EUSAGE && rc != DM_ECANCELED && rc != DM_ENOMEM;
    if (rc < 0) return rc;
    rc = send_all(s, e);
    bool lost = rc == DM_EPIPE || rc == DM_ETIMEDOUT;
    if (rc == 0) dm_fault("transfer.sent");
    if (rc == 0 || rc == DM_ESTATE) {
        rc = net_answered(&s->net, &lost, e);
    } else if (rc == DM_EPIPE) { /* perhaps he refused, and hung up */
        bool silent;
        dm_err said = { 0 };
        net_done_writing(&s->net);
        int answer = net_answered(&s->net, &silent, &said);
        if (!silent && answer < 0) {
            rc = answer;
            lost = false;
            *e = said;
        }
    }
    lost |= rc == DM_ECORRUPT || rc == DM_EPIPE || rc == DM_ETIMEDOUT; /* it got lost or changed on its way, and he noticed */
    net_close(&s->net);
    *again = lost && rc != DM_ECANCELED;
    return rc;
}

static void pause_ms(int ms)
{
    uint64_t until = dm_now_ns() + (uint64_t)ms * 1000000u;
    while (!interrupted() && dm_now_ns() < until) nanosleep(&(struct timespec){ .tv_nsec = 20000000 }, NULL);
}

static int to_receiver(sender *s, dm_err *e)
{
    net_addr a;
    int rc = net_parse(&a, s->o->to, e), wait = BACKOFF_MS;
    bool again = false;
    if (rc < 0) return rc;
    s->net = (net){ .fd = -1, .timeout_ms = (int)s->o->timeout * 1000, .stopped = interrupted };
    for (int64_t left = s->o->retries;; left--) {
        rc = send_once(s, &a, &again, e);
        progress_end(s);
        if (rc == 0 || !again || left <= 0) return rc;
        err_printf("dormouse: %s; again in %d.%d s, %lld tries left\n", e->text, wait / 1000, wait % 1000 / 100, (long long)left);
        pause_ms(wait);
        if (interrupted()) return dm_err_set(e, DM_ECANCELED, "export", "interrupted");
        wait = wait * 2 < BACKOFF_MS_MAX ? wait * 2 : BACKOFF_MS_MAX;
    }
}

/* ---- command ------------------------------------------------------------------------------------------------------ */

static void tell(const sender *s, const char *where, bool to_stderr)
{
    const transfer_report *r = &s->rep;
    char bytes[24];
    if (s->o->json && !to_stderr) {
        json_t *v = json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I}", "session", r->session, "to", where, "events", (json_int_t)r->events, "tokens", (json_int_t)r->tokens,
                              "blocks", (json_int_t)r->blocks, "states", (json_int_t)r->states, "restorable_tokens", (json_int_t)r->pos, "bytes", (json_int_t)r->bytes);
        if (v) out_json(v);
        json_decref(v);
        return;
    }
    dm_buf line = { 0 };
    if (dm_buf_printf(&line, "%s: %lld events, %lld tokens with KV for %lld of them, %s to %s\n", r->session, (long long)r->events, (long long)r->tokens, (long long)r->pos,
                      dm_bytes_text(bytes, sizeof bytes, (uint64_t)r->bytes), where) == 0) {
        if (to_stderr) err_printf("%s", dm_buf_cstr(&line));
        else out_write(line.p, line.n);
    }
    dm_buf_free(&line);
}

static int export_session(sender *s, const char *arg, const char *file, dm_err *e)
{
    char id[DM_SESSION_ID_CHARS + 1], **stores = NULL, *state = setup_state_dir(s->o->state_dir);
    if (!state) return dm_err_set(e, DM_ENOMEM, "state", "out of memory");
    int rc = dm_journal_open(&s->out.journal, state, true, e);
    if (rc == 0) rc = dm_journal_resolve(s->out.journal, arg, id, e);
    if (rc == DM_EINVAL) rc = DM_EUSAGE;
    if (rc == 0) rc = kv_store_dirs(s->o->state_dir, &stores, &s->out.nstores, e);
    s->out.stores = stores;
    s->out.session = id;
    s->out.progress = progress;
    s->out.ctx = s;
    if (rc == 0) rc = file ? to_file(s, file, e) : to_receiver(s, e);
    progress_end(s);
    dm_journal_close(s->out.journal);
    kv_store_dirs_free(stores, s->out.nstores);
    dm_buf_free(&s->buffer);
    dm_free(state);
    return rc;
}

int kv_export(int argc, char **argv)
{
    static const char usage[] = "kv export [OPTIONS] SESSION FILE|- | kv export [OPTIONS] SESSION --to ADDRESS";
    export_opts o = { 0 };
    dm_opt_result res;
    dm_err e = { 0 };
    int rc = cmd_parse(usage, "Writes a session with what is stored of its KV, for `dormouse kv import` elsewhere.  It stays here as it is.\n"
                              "SESSION may be a unique beginning, or \"last\".", options, DM_COUNT(options), &o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    const char *session = res.nargs > 0 ? res.args[0] : NULL, *file = res.nargs > 1 ? res.args[1] : NULL;
    int nargs = res.nargs;
    dm_free(res.args);
    if (nargs != (o.to ? 1 : 2)) return cmd_usage(usage, o.to ? "export --to wants one session and no file" : "export wants a session, and a file or --to ADDRESS");
    signals_catch();
    out_log_to_stderr(false);
    sender s = { .o = &o, .fd = -1 };
    rc = export_session(&s, session, file, &e);
    if (rc < 0) return cmd_fail(rc, &e);
    tell(&s, file ? file : o.to, file && strcmp(file, "-") == 0);
    return 0;
}
