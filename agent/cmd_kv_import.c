/* cmd_kv_import.c — `dormouse kv import`: takes a session in from a file, a pipe or a sender (`kv export --to`).
 *
 * What cannot be read twice is first written to a file without a name in the state directory; it is gone with the process.  A
 * sender is told of success when the journal has the session.  One transfer: it ends with the first session that was taken in or
 * refused; a connection that breaks does not count, since the sender tries again. */
#include "agent/cmd_int.h"
#include "agent/transfer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

typedef struct import_opts {
    setup_opts setup;
    const char *listen;
    int64_t timeout, wait, retries;
    bool insecure, json;
} import_opts;

#define S(member) offsetof(import_opts, setup.member)
static const dm_opt options[] = {
    { "listen", 0, DM_OPT_STR, offsetof(import_opts, listen), .metavar = "ADDRESS", .help = "HOST:PORT or unix:PATH where `kv export --to` will come; port 0: any" },
    { "timeout", 0, DM_OPT_INT, offsetof(import_opts, timeout), .def = "60", .min = 1, .max = 86400, .help = "seconds that the other side may be still" },
    { "wait", 0, DM_OPT_INT, offsetof(import_opts, wait), .def = "3600", .min = 1, .max = 86400, .help = "seconds until somebody comes" },
    { "retries", 0, DM_OPT_INT, offsetof(import_opts, retries), .def = "20", .min = 0, .max = 1000, .help = "broken connections that are borne" },
    { "insecure-remote", 0, DM_OPT_FLAG, offsetof(import_opts, insecure), .def = "0", .help = "listen for other machines: a transfer is neither encrypted nor authenticated" },
    { "model", 'm', DM_OPT_STR, S(model), .env = "DORMOUSE_MODEL", .metavar = "DIR", .help = "model directory that the session will be run with; default: the embedded one" },
    { "state-dir", 0, DM_OPT_STR, S(state_dir), .env = "DORMOUSE_STATE_DIR", .metavar = "DIR", .help = "where it goes; default: ~/.local/state/dormouse" },
    { "numerics", 0, DM_OPT_ENUM, S(numerics), .def = "fast", .choices = "fast|exact|plain", .help = "numeric path that it will be run on" },
    { "isa", 0, DM_OPT_ENUM, S(isa), .choices = CMD_ISAS, .help = "instruction set; default: the best there is" },
    { "context", 0, DM_OPT_INT, S(ctx_tokens), .def = "0", .min = 0, .max = 1 << 24, .help = "tokens at most; 0: the model's, or what fits" },
    { "rows", 0, DM_OPT_INT, S(rows), .def = "0", .min = 0, .max = 65536, .help = "rows of a step at most; 0: 256" },
    { "memory", 0, DM_OPT_BYTES, S(memory), .def = "0", .help = "for the model; 0: the machine's, or its control group's bound" },
    { "debug-switch", 0, DM_OPT_STR, S(switches), .def = "", .metavar = "NAME,…", .help = "as with run" },
    { "kv", 0, DM_OPT_FLAG, S(kv), .def = "1", .help = "take the KV, too (--no-kv: the journal alone)" },
    { "kv-bytes", 0, DM_OPT_BYTES, S(kv_bytes), .def = "16G", .help = "disk for stored KV at most" },
    { "ram-bytes", 0, DM_OPT_BYTES, S(ram_bytes), .def = "256M", .help = "memory for stored KV at most" },
    { "kv-salt", 0, DM_OPT_STR, S(kv_salt), .def = "", .help = "as with run" },
    { "json", 0, DM_OPT_FLAG, offsetof(import_opts, json), .def = "0", .help = "JSON on standard output" },
    { "help", 'h', DM_OPT_HELP, 0, .help = "this text" },
};
#undef S

typedef struct receiver {
    const import_opts *o;
    setup setup;
    transfer_in in;
    transfer_report rep;
    net net;            /* the connection, or fd -1 */
    int source;         /* a pipe, or -1 */
    int spool;          /* owned; a file without a name, or -1 */
    int64_t spooled;
    uint64_t shown_ns, dot_ns;
} receiver;

static bool interrupted(void) { return signals_caught() != 0; }

static bool progress(void *ctx, int64_t bytes)
{
    receiver *r = ctx;
    uint64_t now = dm_now_ns();
    if (err_is_terminal() && now - r->shown_ns > 200000000u) {
        char text[24];
        err_printf("\r%s\033[K", dm_bytes_text(text, sizeof text, (uint64_t)bytes));
        r->shown_ns = now;
    }
    if (r->net.fd >= 0 && now - r->dot_ns > 500000000u) {
        net_working(&r->net);
        r->dot_ns = now;
    }
    return !interrupted();
}

static void progress_end(const receiver *r)
{
    if (err_is_terminal() && r->shown_ns) err_printf("\r\033[K");
}

/* ---- what can be read only once -------------------------------------------------------------------------------- */

static int spool_open(receiver *r, dm_err *e)
{
    const char *dir = r->setup.state_dir;
    if (r->spool >= 0) return ftruncate(r->spool, 0) == 0 && lseek(r->spool, 0, SEEK_SET) == 0 ? 0 : dm_err_sys(e, errno, "import", "%s", dir);
    r->spool = open(dir, O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    if (r->spool >= 0) return 0;
    char *path = dm_path_join(dir, "import.XXXXXX"); /* a file system that cannot do that */
    if (!path) return dm_err_set(e, DM_ENOMEM, "import", "out of memory");
    r->spool = mkstemp(path);
    int err = errno;
    if (r->spool >= 0) unlink(path);
    dm_free(path);
    return r->spool >= 0 ? 0 : dm_err_sys(e, err, "import", "a temporary file in %s", dir);
}

static int spool_write(receiver *r, const uint8_t *p, size_t n, dm_err *e)
{
    while (n) {
        ssize_t k = write(r->spool, p, n);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return dm_err_sys(e, errno, "import", "a temporary file in %s", r->setup.state_dir);
        p += k;
        n -= (size_t)k;
        r->spooled += k;
    }
    return 0;
}

static int64_t pipe_read(const receiver *r, uint8_t *p, size_t n, dm_err *e)
{
    size_t got = 0;
    while (got < n) {
        ssize_t k = read(r->source, p + got, n - got);
        if (k < 0 && errno == EINTR && !interrupted()) continue;
        if (interrupted()) return dm_err_set(e, DM_ECANCELED, "import", "interrupted");
        if (k < 0) return dm_err_sys(e, errno, "import", "reading the export");
        if (k == 0) break;
        got += (size_t)k;
    }
    return (int64_t)got;
}

/* Reads from the connection or the pipe, and keeps what was read. */
static int64_t read_once(void *ctx, void *p, size_t n, dm_err *e)
{
    receiver *r = ctx;
    int64_t got = (int64_t)n;
    if (dm_fault("transfer.receive")) return dm_err_set(e, DM_EPIPE, "import", "the connection broke");
    if (!r->net.stopped) got = pipe_read(r, p, n, e);
    else {
        int rc = net_read(&r->net, p, n, e);
        if (rc < 0) return rc;
    }
    if (err_is_terminal()) {
        uint64_t dots = r->dot_ns;
        r->dot_ns = UINT64_MAX; /* nobody is answered before he has ended */
        progress(r, r->spooled);
        r->dot_ns = dots;
    }
    if (got <= 0) return got;
    int rc = spool_write(r, p, (size_t)got, e);
    return rc < 0 ? rc : got;
}

/* Everything is checked as it comes, so that what is not for us is refused before it is all there. */
static int spool_all(receiver *r, dm_err *e)
{
    xfer_reader x = { 0 };
    r->spooled = 0;
    int rc = spool_open(r, e);
    if (rc < 0) return rc;
    rc = xfer_reader_begin(&x, read_once, r, e);
    if (rc == 0) rc = transfer_fits(&r->in, &x.head, e);
    while (rc == 0 && (rc = xfer_reader_next(&x, e)) == 1) rc = 0;
    uint8_t more;
    if (rc == 0 && r->source >= 0) rc = (int)read_once(r, &more, 1, e); /* a pipe that goes on: the import will say so */
    if (rc > 0) rc = 0;
    xfer_reader_free(&x);
    return rc;
}

/* ---- from a file ------------------------------------------------------------------------------------------------- */

static int from_file(receiver *r, const char *path, dm_err *e)
{
    struct stat st;
    int fd = strcmp(path, "-") ? open(path, O_RDONLY | O_CLOEXEC) : STDIN_FILENO;
    if (fd < 0) return dm_err_sys(e, errno, "import", "%s", path);
    int rc = fstat(fd, &st) == 0 ? 0 : dm_err_sys(e, errno, "import", "%s", path);
    if (rc == 0 && S_ISDIR(st.st_mode)) rc = dm_err_set(e, DM_EUSAGE, "import", "%s is a directory; give the file that export wrote", path);
    if (rc == 0 && S_ISREG(st.st_mode)) {
        rc = transfer_import(&r->in, fd, &r->rep, e);
    } else if (rc == 0) {
        r->source = fd;
        rc = spool_all(r, e);
        if (rc == 0) rc = transfer_import(&r->in, r->spool, &r->rep, e);
    }
    if (fd != STDIN_FILENO) close(fd);
    return rc;
}

/* ---- from a sender --------------------------------------------------------------------------------------------------- */

static int take_one(receiver *r, bool *again, dm_err *e)
{
    r->dot_ns = dm_now_ns();
    int rc = spool_all(r, e);
    *again = rc == DM_EPIPE || rc == DM_ETIMEDOUT || rc == DM_ECORRUPT;
    if (rc == 0) rc = transfer_import(&r->in, r->spool, &r->rep, e);
    if (rc != DM_EPIPE) net_answer(&r->net, rc, e);
    if (rc == 0) dm_fault("transfer.answered");
    net_close(&r->net);
    return rc;
}

static int from_sender(receiver *r, dm_err *e)
{
    const import_opts *o = r->o;
    char name[320];
    net_addr a;
    net listener = { .fd = -1, .timeout_ms = (int)o->timeout * 1000, .stopped = interrupted };
    int rc = net_parse(&a, o->listen, e);
    if (rc == 0) rc = net_listen(&listener, &a, o->insecure, name, e);
    if (rc < 0) return rc;
    err_printf("dormouse: listening on %s\n", name);
    bool again = true;
    for (int64_t left = o->retries; again; left--) {
        again = false;
        rc = net_accept(&listener, (int)o->wait * 1000, &r->net, e);
        if (rc == DM_ETIMEDOUT) dm_err_set(e, rc, "import", "nobody came in %lld seconds", (long long)o->wait);
        if (rc == 0) rc = take_one(r, &again, e);
        progress_end(r);
        again = again && left > 0;
        if (again) err_printf("dormouse: %s; waiting for another try\n", e->text);
    }
    net_unlisten(&listener, &a);
    return rc;
}

/* ---- command ------------------------------------------------------------------------------------------------------------ */

static void tell(const receiver *r)
{
    const transfer_report *p = &r->rep;
    if (r->o->json) {
        json_t *v = json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "session", p->session, "events", (json_int_t)p->events, "new_events", (json_int_t)p->events_new, "tokens",
                              (json_int_t)p->tokens, "blocks", (json_int_t)p->blocks, "states", (json_int_t)p->states, "restorable_tokens", (json_int_t)p->pos, "sent_tokens", (json_int_t)p->pos_sent);
        if (v) out_json(v);
        json_decref(v);
    } else {
        out_printf("%s: %lld events, %lld of them new, %lld tokens with KV for %lld of them\n", p->session, (long long)p->events, (long long)p->events_new, (long long)p->tokens, (long long)p->pos);
    }
    if (p->pos < p->pos_sent)
        err_printf("dormouse: KV for %lld tokens came and for %lld it is kept (%s); the first turn computes the rest\n", (long long)p->pos_sent, (long long)p->pos,
                   r->setup.kv ? "no room under --kv-bytes" : "no store");
}

static int import_session(receiver *r, const char *file, dm_err *e)
{
    int rc = setup_open_store(&r->setup, &r->o->setup, e);
    if (rc < 0) return rc;
    dm_tok_hash(r->setup.tok, &r->in.tokenizer);
    r->in.journal = r->setup.journal;
    r->in.kv = r->setup.kv;
    r->in.root = r->setup.root;
    r->in.weights = r->setup.weights;
    r->in.numerics = r->setup.forward->numerics_id;
    r->in.vocab = (int32_t)dm_model_config(r->setup.model)->vocab_size;
    r->in.progress = progress;
    r->in.ctx = r;
    rc = file ? from_file(r, file, e) : from_sender(r, e);
    progress_end(r);
    if (r->spool >= 0) close(r->spool);
    return rc;
}

int kv_import(int argc, char **argv)
{
    static const char usage[] = "kv import [OPTIONS] FILE|- | kv import [OPTIONS] --listen ADDRESS";
    import_opts o = { .setup = { .grammar = false, .threads = 1 } };
    dm_opt_result res;
    dm_err e = { 0 };
    int rc = cmd_parse(usage, "Takes in a session that `dormouse kv export` wrote or sends: all of it or nothing.  A session that is here already is brought\n"
                              "forward when it went no other way.  Take only what you trust: nobody can check KV but by computing it again.",
                       options, DM_COUNT(options), &o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    const char *file = res.nargs > 0 ? res.args[0] : NULL;
    int nargs = res.nargs;
    dm_free(res.args);
    if (nargs != (o.listen ? 0 : 1)) return cmd_usage(usage, o.listen ? "import --listen wants no file" : "import wants one file, or --listen ADDRESS");
    signals_catch();
    out_log_to_stderr(false);
    receiver r = { .o = &o, .source = -1, .spool = -1, .net = { .fd = -1 } };
    rc = import_session(&r, file, &e);
    if (rc == 0) tell(&r);
    setup_close(&r.setup);
    return rc < 0 ? cmd_fail(rc, &e) : 0;
}
