/* cmd_chat.c — `dormouse chat`: a person and a session, line by line.
 *
 * While the session runs, the loop has the signals: Ctrl-C ends the turn.  While a line is read, nothing else goes
 * on, and Ctrl-C (twice at an empty prompt) or the end of input leaves. */
#include "agent/cmd_int.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

typedef struct chat_opts {
    setup_opts s; /* first */
} chat_opts;

static const dm_opt options[] = {
    { "resume", 'r', DM_OPT_STR, offsetof(setup_opts, resume), .metavar = "ID", .help = "go on with a session (a unique beginning of its id, or \"last\")" },
    SETUP_OPTIONS,
};

typedef struct chat {
    chat_opts o;
    setup s;
    dm_session *session;
    uv_signal_t interrupt, terminate;
    bool finished, leaving, terminated, text_open;
    dm_buf asks;   /* ids of the calls that wait for an answer, each with its NUL */
    dm_buf line;   /* of input, what is read and not used */
    bool input_ended;
} chat;

/* ---- input ------------------------------------------------------------------------------------------------ */

typedef enum line_end { LINE_OK, LINE_EOF, LINE_SIGNAL } line_end;

/* One line without its end; reads no further than the descriptor gives, so no line is lost between prompts. */
static line_end read_line(chat *c, const char *prompt, dm_buf *out)
{
    dm_buf_clear(out);
    out_text(prompt);
    for (;;) {
        char *nl = c->line.n ? memchr(c->line.p, '\n', c->line.n) : NULL;
        if (nl || (c->input_ended && c->line.n)) {
            size_t n = nl ? (size_t)(nl - (char *)c->line.p) : c->line.n;
            if (dm_buf_append(out, c->line.p, n) < 0) return LINE_EOF;
            dm_buf_consume(&c->line, nl ? n + 1 : n);
            return LINE_OK;
        }
        if (c->input_ended) return LINE_EOF;
        char part[4096];
        ssize_t k = read(STDIN_FILENO, part, sizeof part);
        if (k < 0 && errno == EINTR && signals_caught()) return LINE_SIGNAL;
        if (k < 0 && errno == EINTR) continue;
        if (k <= 0) c->input_ended = true;
        else if (dm_buf_append(&c->line, part, (size_t)k) < 0) return LINE_EOF;
    }
}

/* ---- output ----------------------------------------------------------------------------------------------------- */

static void end_text(chat *c)
{
    if (c->text_open) out_text("\n");
    c->text_open = false;
}

static void show_call(chat *c, const json_t *v, const char *mark)
{
    char *args = json_dumps(json_object_get(v, "args"), JSON_COMPACT | JSON_ENCODE_ANY);
    end_text(c);
    out_printf("%s %s %.200s\n", mark, json_str(v, "name"), args ? args : "");
    dm_free(args);
}

static void show_result(chat *c, const json_t *v)
{
    end_text(c);
    if (json_is_true(json_object_get(v, "is_error"))) out_printf("(%s)\n", json_str(v, "result"));
    c->finished = true;
    uv_stop(&c->s.loop);
}

static void on_event(void *ctx, dm_session *s, const dm_host_event *ev)
{
    chat *c = ctx;
    (void)s;
    progress_event(ev);
    switch (ev->kind) {
    case DM_EV_CONTENT:
        out_untrusted(ev->text, ev->n);
        c->text_open = true;
        break;
    case DM_EV_TOOL_START: show_call(c, ev->json, "*"); break;
    case DM_EV_NOTICE:
        end_text(c);
        out_printf("(%.*s)\n", (int)ev->n, ev->text);
        break;
    case DM_EV_APPROVAL:
        show_call(c, ev->json, "?");
        dm_buf_append(&c->asks, json_str(ev->json, "call_id"), strlen(json_str(ev->json, "call_id")) + 1);
        uv_stop(&c->s.loop); /* asked outside of the callback */
        break;
    case DM_EV_RESULT: show_result(c, ev->json); break;
    default: break;
    }
}

/* ---- turns ------------------------------------------------------------------------------------------------------- */

static void on_interrupt(uv_signal_t *h, int number)
{
    chat *c = h->data;
    if (number == SIGTERM) c->leaving = c->terminated = true;
    dm_session_interrupt(c->session);
}

static void watch(chat *c)
{
    uv_signal_start(&c->interrupt, on_interrupt, SIGINT);
    uv_signal_start(&c->terminate, on_interrupt, SIGTERM);
    uv_unref((uv_handle_t *)&c->interrupt);
    uv_unref((uv_handle_t *)&c->terminate);
}

static void unwatch(chat *c)
{
    uv_signal_stop(&c->interrupt);
    uv_signal_stop(&c->terminate);
    signals_catch();
}

/* The next call that waits, or false. */
static bool next_question(chat *c, dm_buf *line)
{
    dm_err e = { 0 };
    char id[64];
    if (!c->asks.n) return false;
    snprintf(id, sizeof id, "%s", (const char *)c->asks.p);
    dm_buf_consume(&c->asks, strlen((const char *)c->asks.p) + 1);
    unwatch(c);
    line_end end = read_line(c, "allow? [y/N] ", line);
    watch(c);
    if (end != LINE_OK) {
        c->leaving = true;
        dm_session_interrupt(c->session);
        return true;
    }
    bool yes = line->n && (line->p[0] == 'y' || line->p[0] == 'Y');
    if (dm_session_answer(c->session, id, yes, &e) < 0) out_printf("(%s)\n", e.text);
    return true;
}

static int one_turn(chat *c, const char *text, dm_buf *line, dm_err *e)
{
    c->finished = false;
    dm_buf_clear(&c->asks);
    watch(c);
    int rc = dm_session_send(c->session, text, e);
    while (rc == 0 && !c->finished) {
        if (next_question(c, line)) continue;
        if (!uv_run(&c->s.loop, UV_RUN_DEFAULT) && !c->finished && !c->asks.n) rc = dm_err_set(e, DM_EIO, "chat", "the session stopped without a result");
    }
    unwatch(c);
    return rc;
}

static int talk(chat *c, dm_err *e)
{
    dm_buf line = { 0 }, spare = { 0 };
    int rc = 0, signals = 0;
    const char *prompt = isatty(STDIN_FILENO) ? "> " : "";
    while (rc == 0 && !c->leaving) {
        line_end end = read_line(c, prompt, &line);
        if (end == LINE_EOF) break;
        if (end == LINE_SIGNAL) {
            if (signals_caught() != SIGINT || ++signals > 1) break;
            out_text("\n(once more to leave)\n");
            signals_clear();
            continue;
        }
        signals = 0;
        if (strspn(dm_buf_cstr(&line), " \t\r") == line.n) continue;
        if (!strcmp(dm_buf_cstr(&line), "/quit") || !strcmp(dm_buf_cstr(&line), "/exit")) break;
        rc = one_turn(c, dm_buf_cstr(&line), &spare, e);
    }
    dm_buf_free(&line);
    dm_buf_free(&spare);
    return rc;
}

static int open_session(chat *c, dm_err *e)
{
    dm_session_opts so;
    setup_session_opts(&c->s, &so);
    so.interactive = true;
    so.fn = on_event;
    so.ctx = c;
    int rc = c->o.s.resume ? dm_session_resume(c->s.host, c->o.s.resume, &so, &c->session, e) : dm_session_create(c->s.host, &so, &c->session, e);
    return rc == DM_EINVAL ? DM_EUSAGE : rc;
}

int cmd_chat(int argc, char **argv)
{
    chat c = { 0 };
    dm_opt_result res;
    int rc = cmd_parse("chat [OPTIONS]", "A conversation, one line at a time.  Ctrl-C ends a turn; /quit, Ctrl-D, or Ctrl-C twice leave.", options, DM_COUNT(options), &c.o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    int extra = res.nargs;
    dm_free(res.args);
    if (extra) return cmd_usage("chat [OPTIONS]", "chat takes no arguments; `dormouse run` does");
    dm_err e = { 0 };
    signals_catch();
    out_log_to_stderr(c.o.s.verbose);
    rc = setup_open(&c.s, &c.o.s, &e);
    if (rc == 0) rc = open_session(&c, &e);
    if (rc == 0) {
        uv_signal_init(&c.s.loop, &c.interrupt);
        uv_signal_init(&c.s.loop, &c.terminate);
        c.interrupt.data = c.terminate.data = &c;
        err_printf("session %s\n", dm_session_id(c.session));
        rc = talk(&c, &e);
        if (!dm_session_running(c.session)) dm_session_close(c.session);
        uv_close((uv_handle_t *)&c.interrupt, NULL);
        uv_close((uv_handle_t *)&c.terminate, NULL);
    }
    int status = rc < 0 ? cmd_fail(rc, &e) : signals_caught() == SIGTERM || c.terminated ? 143 : 0;
    setup_close(&c.s);
    dm_buf_free(&c.line);
    dm_buf_free(&c.asks);
    return status;
}
