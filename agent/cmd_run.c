/* cmd_run.c — `dormouse run`: one request, non-interactive.
 *
 * Whatever happens after the options were understood, the last line of standard output is the result: the answer as
 * text, or the result object (json, stream-json) also for a session that does not exist, a sandbox that cannot be
 * built, or a signal. */
#include "agent/cmd_int.h"

#include <string.h>
#include <unistd.h>

#define PROMPT_BYTES_MAX ((size_t)16 << 20)

typedef struct run_opts {
    setup_opts s; /* first */
    const char *format;
    bool phases, partial;
    int64_t logprobs;
} run_opts;

static const dm_opt options[] = {
    { "output-format", 'o', DM_OPT_ENUM, offsetof(run_opts, format), .def = "text", .choices = "text|json|stream-json", .help = "what standard output gets" },
    { "resume", 'r', DM_OPT_STR, offsetof(setup_opts, resume), .metavar = "ID", .help = "go on with a session (a unique beginning of its id, or \"last\")" },
    { "phases", 0, DM_OPT_FLAG, offsetof(run_opts, phases), .def = "0", .help = "one line per phase of each turn on standard error" },
    { "partial", 0, DM_OPT_FLAG, offsetof(run_opts, partial), .def = "0", .help = "stream-json: text while it is generated" },
    { "logprobs", 0, DM_OPT_INT, offsetof(run_opts, logprobs), .min = 0, .max = DM_LOGPROBS_MAX, .metavar = "N", .help = "stream-json: each token with its logprob and those of the N likeliest" },
    SETUP_OPTIONS,
};

typedef enum format { FORMAT_TEXT, FORMAT_JSON, FORMAT_STREAM } format;

typedef struct run {
    run_opts o;
    format format;
    setup s;
    dm_session *session;
    uv_signal_t signals[3];
    int nsignals, signal_number, signal_count;
    bool finished, told; /* told: the result line is out */
    char id[DM_SESSION_ID_CHARS + 1];
    uint64_t started_ns;
} run;

/* ---- output -------------------------------------------------------------------------------------------- */

static void text_result(run *r, const json_t *v)
{
    const char *subtype = json_str(v, "subtype");
    if (!strcmp(subtype, "success")) {
        out_untrusted(json_str(v, "result"), strlen(json_str(v, "result")));
        out_text("\n");
        return;
    }
    if (!strcmp(subtype, "paused")) {
        size_t i;
        json_t *c;
        json_array_foreach(json_object_get(v, "pending"), i, c)
        {
            char *args = json_dumps(json_object_get(c, "args"), JSON_COMPACT | JSON_ENCODE_ANY);
            err_printf("dormouse: waits for approval: %s %s\n", json_str(c, "name"), args ? args : "");
            dm_free(args);
        }
        err_printf("dormouse: approve with `dormouse run --resume %s --yes`\n", r->id);
        out_printf("%s\n", r->id);
        return;
    }
    err_printf("dormouse: %s\n", json_str(v, "result"));
    if (r->id[0]) err_printf("dormouse: go on with `dormouse run --resume %s \"…\"`\n", r->id);
}

static void tell_result(run *r, const json_t *v)
{
    if (r->told) return;
    r->told = true;
    if (r->format == FORMAT_TEXT) text_result(r, v);
    else out_json(v);
}

/* The result when there is no session to ask, or no time to. */
static void tell_failure(run *r, int code, const char *text)
{
    if (r->told) return;
    json_t *v = json_pack("{s:s, s:s, s:b, s:s, s:s, s:s*, s:i, s:I, s:s, s:{}, s:[], s:[], s:[]}", "type", "result", "subtype", "error", "is_error", 1, "result",
                          text, "stop_reason", code == DM_ECANCELED ? "interrupted" : "error", "session_id", r->id[0] ? r->id : NULL, "num_turns", 0, "duration_ms",
                          (json_int_t)((dm_now_ns() - r->started_ns) / 1000000), "error", dm_err_name(code), "usage", "turns", "tools", "pending");
    if (v) tell_result(r, v);
    json_decref(v);
}

static void delta(const dm_host_event *ev)
{
    json_t *v = json_pack("{s:s, s:s, s:s%}", "type", "delta", "kind", ev->kind == DM_EV_CONTENT ? "text" : "thinking", "text", ev->text, ev->n);
    if (v) out_json(v);
    json_decref(v);
}

static void on_event(void *ctx, dm_session *s, const dm_host_event *ev)
{
    run *r = ctx;
    if (ev->kind == DM_EV_INIT) memcpy(r->id, dm_session_id(s), sizeof r->id);
    if (r->o.phases) phases_event(ev);
    else progress_event(ev);
    if (ev->kind == DM_EV_RESULT) {
        if (ev->json) tell_result(r, ev->json);
        r->finished = true;
        uv_stop(&r->s.loop);
        return;
    }
    if (r->format != FORMAT_STREAM) return;
    bool text = ev->kind == DM_EV_CONTENT || ev->kind == DM_EV_REASONING;
    if (text && r->o.partial) delta(ev);
    else if (ev->json && ev->kind != DM_EV_CALL) out_json(ev->json); /* the assistant line holds the calls */
    if (out_write("", 0) < 0) dm_session_interrupt(s);               /* nobody reads any more */
}

/* ---- signals --------------------------------------------------------------------------------------------- */

/* The first one ends the run in order; a second one does not wait for that. */
static void on_signal(uv_signal_t *h, int number)
{
    run *r = h->data;
    r->signal_number = number;
    if (++r->signal_count == 1) {
        dm_session_interrupt(r->session);
        return;
    }
    tell_failure(r, DM_ECANCELED, "interrupted");
    _exit(128 + number);
}

static void watch_signals(run *r)
{
    static const int numbers[] = { SIGINT, SIGTERM, SIGHUP };
    for (size_t i = 0; i < DM_COUNT(numbers); i++) {
        uv_signal_t *h = &r->signals[r->nsignals];
        if (uv_signal_init(&r->s.loop, h) != 0) continue;
        r->nsignals++;
        h->data = r;
        uv_signal_start(h, on_signal, numbers[i]);
        uv_unref((uv_handle_t *)h);
    }
}

static void unwatch_signals(run *r)
{
    for (int i = 0; i < r->nsignals; i++) uv_close((uv_handle_t *)&r->signals[i], NULL);
    r->nsignals = 0;
}

/* ---- the run -------------------------------------------------------------------------------------------------- */

static int open_session(run *r, dm_err *e)
{
    dm_session_opts so;
    setup_session_opts(&r->s, &so);
    so.fn = on_event;
    so.logprobs = r->o.logprobs >= 0;
    so.top_logprobs = so.logprobs ? (int)r->o.logprobs : 0;
    so.ctx = r;
    if (!r->o.s.resume) return dm_session_create(r->s.host, &so, &r->session, e);
    int rc = dm_session_resume(r->s.host, r->o.s.resume, &so, &r->session, e);
    if (rc == DM_EINVAL) rc = DM_EUSAGE; /* ambiguous or too short */
    return rc;
}

static int run_session(run *r, const char *prompt, dm_err *e)
{
    int rc = open_session(r, e);
    if (rc < 0) return rc;
    watch_signals(r);
    if (signals_caught()) rc = dm_err_set(e, DM_ECANCELED, "run", "interrupted");
    memcpy(r->id, dm_session_id(r->session), sizeof r->id);
    if (rc == 0) rc = dm_session_send(r->session, prompt, e);
    if (rc == DM_EINVAL) rc = DM_EUSAGE;
    while (rc == 0 && !r->finished && uv_run(&r->s.loop, UV_RUN_DEFAULT)) {}
    if (rc == 0) rc = r->finished ? dm_session_outcome(r->session) : dm_err_set(e, DM_EIO, "run", "the session stopped without a result");
    if (!dm_session_running(r->session)) dm_session_close(r->session);
    unwatch_signals(r);
    return rc;
}

static int exit_status(const run *r, int rc)
{
    int number = r->signal_number ? r->signal_number : signals_caught();
    if (rc != DM_ECANCELED) return dm_exit_code(rc);
    return number ? 128 + number : 1; /* without a signal it was the reader of standard output who left */
}

/* The prompt: the arguments joined, or standard input for `-` or when there is none and no session goes on. */
static int take_prompt(const run *r, const dm_opt_result *res, dm_buf *out, bool *have, dm_err *e)
{
    *have = true;
    if (res->nargs == 0 && r->o.s.resume) {
        *have = false;
        return 0;
    }
    if (res->nargs == 0 || (res->nargs == 1 && !strcmp(res->args[0], "-"))) return read_stdin(PROMPT_BYTES_MAX, out, e);
    for (int i = 0; i < res->nargs; i++)
        if ((i && dm_buf_byte(out, ' ') < 0) || dm_buf_str(out, res->args[i]) < 0) return dm_err_set(e, DM_ENOMEM, "run", "out of memory");
    return 0;
}

/* A NUL would end the text early: it is shown as what it is, a character that cannot be shown. */
static int without_nul(dm_buf *b)
{
    dm_buf clean = { 0 };
    int rc = 0;
    for (size_t i = 0; i < b->n && rc == 0; i++) rc = b->p[i] ? dm_buf_byte(&clean, b->p[i]) : dm_buf_str(&clean, "\xEF\xBF\xBD");
    dm_buf_free(b);
    *b = clean;
    return rc;
}

static bool blank(const dm_buf *b) { return b->n == 0 || strspn((const char *)b->p, " \t\r\n") == b->n; }

int cmd_run(int argc, char **argv)
{
    static const char usage[] = "run [OPTIONS] [PROMPT|-]";
    run r = { .started_ns = dm_now_ns(), .o.logprobs = -1 };
    dm_opt_result res;
    int rc = cmd_parse(usage, "Works on one request with tools until the model answers, prints the answer and ends.\nWithout PROMPT, or with -, the request is read from standard input.",
                       options, DM_COUNT(options), &r.o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    r.format = !strcmp(r.o.format, "json") ? FORMAT_JSON : !strcmp(r.o.format, "stream-json") ? FORMAT_STREAM : FORMAT_TEXT;
    dm_err e = { 0 };
    dm_buf prompt = { 0 };
    bool have;
    signals_catch();
    out_log_to_stderr(r.o.s.verbose);
    rc = take_prompt(&r, &res, &prompt, &have, &e);
    if (rc == 0 && r.o.logprobs >= 0 && r.format != FORMAT_STREAM) rc = dm_err_set(&e, DM_EUSAGE, "options", "--logprobs needs --output-format stream-json");
    dm_free(res.args);
    if (rc == 0 && have) rc = without_nul(&prompt);
    if (rc == 0 && have && !dm_utf8_valid(prompt.p, prompt.n)) err_printf("dormouse: the request is not UTF-8; the model sees U+FFFD for what is not text\n");
    if (rc == 0 && have && blank(&prompt)) rc = dm_err_set(&e, DM_EUSAGE, "run", "the request is empty; give it as an argument or on standard input");
    if (rc == 0) rc = setup_open(&r.s, &r.o.s, &e);
    if (rc == 0) rc = run_session(&r, have ? dm_buf_cstr(&prompt) : NULL, &e);
    if (rc < 0) tell_failure(&r, rc, e.text[0] ? e.text : dm_err_text(rc));
    int status = exit_status(&r, rc);
    setup_close(&r.s);
    dm_buf_free(&prompt);
    return status;
}
