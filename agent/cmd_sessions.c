/* cmd_sessions.c — `dormouse sessions ls|show|fork|rm`: reads the journal, copies sessions in it, and takes them out. */
#include "agent/cmd_int.h"

#include <string.h>
#include <time.h>

typedef struct sessions_opts { const char *state_dir; bool json; int64_t at; } sessions_opts;

static const dm_opt options[] = {
    { "state-dir", 0, DM_OPT_STR, offsetof(sessions_opts, state_dir), .env = "DORMOUSE_STATE_DIR", .metavar = "DIR", .help = "where sessions are; default: ~/.local/state/dormouse" },
    { "json", 0, DM_OPT_FLAG, offsetof(sessions_opts, json), .def = "0", .help = "JSON on standard output" },
    { "help", 'h', DM_OPT_HELP, 0, .help = "this text" },
};

typedef struct sessions { sessions_opts o; dm_journal *journal; json_t *list; } sessions;


static int open_journal(sessions *s, bool read_only, dm_err *e)
{
    char *dir = setup_state_dir(s->o.state_dir);
    if (!dir) return dm_err_set(e, DM_ENOMEM, "state", "out of memory");
    int rc = dm_journal_open(&s->journal, dir, read_only, e);
    dm_free(dir);
    return rc;
}

/* ---- ls ------------------------------------------------------------------------------------------------ */

/* A session that says that it runs and that nobody has is one that was cut off. */
static int add_head(void *ctx, const json_t *head)
{
    sessions *s = ctx;
    json_t *h = json_deep_copy(head);
    if (!h) return DM_ENOMEM;
    if (!strcmp(json_str(h, "state"), "running") && !dm_journal_claimed(s->journal, json_str(h, "id"))) json_object_set_new(h, "state", json_string("interrupted"));
    return json_array_append_new(s->list, h) == 0 ? 0 : DM_ENOMEM;
}

static void print_head(const json_t *h)
{
    char when[24] = "";
    time_t t = (time_t)(json_num(h, "updated_ms") / 1000);
    struct tm tm;
    if (localtime_r(&t, &tm)) strftime(when, sizeof when, "%Y-%m-%d %H:%M", &tm);
    out_printf("%-26s  %-11s  %5lld  %8lld  %-16s  %s\n", json_str(h, "id"), json_str(h, "state"), json_num(h, "turns"), json_num(h, "tokens"), when, json_str(h, "title"));
}

static int sessions_ls(int argc, char **argv)
{
    sessions s = { 0 };
    dm_opt_result res;
    dm_err e = { 0 };
    int rc = cmd_parse("sessions ls [OPTIONS]", "Lists sessions, oldest first.", options, DM_COUNT(options), &s.o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    dm_free(res.args);
    s.list = json_array();
    rc = open_journal(&s, true, &e);
    if (rc == DM_ENOENT) rc = 0; /* no journal yet: no sessions */
    else if (rc == 0) rc = dm_journal_list(s.journal, add_head, &s, &e);
    size_t i;
    json_t *h;
    if (rc == 0 && s.o.json) out_json(s.list);
    else if (rc == 0) {
        if (json_array_size(s.list)) out_printf("%-26s  %-11s  %5s  %8s  %-16s  %s\n", "ID", "STATE", "TURNS", "TOKENS", "CHANGED", "TITLE");
        json_array_foreach(s.list, i, h) print_head(h);
    }
    dm_journal_close(s.journal);
    json_decref(s.list);
    return rc < 0 ? cmd_fail(rc, &e) : 0;
}

/* ---- show ------------------------------------------------------------------------------------------------- */

static void show_tokens(int64_t seq, const json_t *ev)
{
    out_printf("%4lld  %s  %zu tokens%s%s\n", (long long)seq, json_str(ev, "what"), json_array_size(json_object_get(ev, "ids")), *json_str(ev, "end") ? "  " : "", json_str(ev, "end"));
}

static void show_turn(int64_t seq, const json_t *ev)
{
    out_printf("%4lld  turn  new %lld  prefilled %lld  restored %lld (%s)  decoded %lld  spilled %lld bytes%s%s\n", (long long)seq, json_num(ev, "new_tokens"),
               json_num(ev, "prefilled_tokens"), json_num(ev, "restored_tokens"), json_str(ev, "restored_from"), json_num(ev, "decoded_tokens"),
               json_num(ev, "spilled_bytes"), *json_str(ev, "miss") ? "  miss: " : "", json_str(ev, "miss"));
}

static int show_event(void *ctx, int64_t seq, const json_t *ev)
{
    const sessions *s = ctx;
    const char *type = json_str(ev, "type");
    if (s->o.json) return out_json(ev);
    if (!strcmp(type, "tokens")) show_tokens(seq, ev);
    else if (!strcmp(type, "turn")) show_turn(seq, ev);
    else if (!strcmp(type, "message")) out_printf("%4lld  user  %s\n", (long long)seq, json_str(ev, "text"));
    else if (!strcmp(type, "created")) out_printf("%4lld  created  model %s  numerics %s  workspace %s\n", (long long)seq, json_str(ev, "model"), json_str(ev, "numerics"), json_str(ev, "workspace"));
    else if (!strcmp(type, "call"))
        out_printf("%4lld  call  %s  %s  %s%s%s\n", (long long)seq, json_str(ev, "id"), json_str(ev, "state"), json_str(ev, "name"), *json_str(ev, "args") ? " " : json_str(ev, "text"), json_str(ev, "args"));
    else out_printf("%4lld  %s  %s  %s\n", (long long)seq, type, json_str(ev, "subtype"), json_str(ev, "text"));
    return 0;
}

static int sessions_show(int argc, char **argv)
{
    static const char usage[] = "sessions show [OPTIONS] ID";
    sessions s = { 0 };
    dm_opt_result res;
    dm_err e = { 0 };
    char id[DM_SESSION_ID_CHARS + 1];
    int rc = cmd_parse(usage, "Prints the events of a session.  ID may be a unique beginning, or \"last\".", options, DM_COUNT(options), &s.o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    const char *arg = res.nargs == 1 ? res.args[0] : NULL;
    dm_free(res.args);
    if (!arg) return cmd_usage(usage, "show wants one session");
    rc = open_journal(&s, true, &e);
    if (rc == 0) rc = dm_journal_resolve(s.journal, arg, id, &e);
    if (rc == 0) rc = dm_journal_read(s.journal, id, show_event, &s, &e);
    dm_journal_close(s.journal);
    return rc < 0 ? cmd_fail(rc == DM_EINVAL ? DM_EUSAGE : rc, &e) : 0;
}

/* ---- fork ---------------------------------------------------------------------------------------------------- */

static int sessions_fork(int argc, char **argv)
{
    static const char usage[] = "sessions fork [OPTIONS] ID";
    dm_opt table[DM_COUNT(options) + 1] = { { "at", 0, DM_OPT_INT, offsetof(sessions_opts, at), .def = "0", .min = 0, .max = 1e15, .metavar = "TURN", .help = "behind which turn; 0: the last one" } };
    memcpy(table + 1, options, sizeof options);
    sessions s = { 0 };
    dm_opt_result res;
    dm_err e = { 0 };
    char id[DM_SESSION_ID_CHARS + 1], fork[DM_SESSION_ID_CHARS + 1];
    int rc = cmd_parse(usage, "Makes a new session with the past of another, up to the end of a turn, and prints its id.\nBoth go on from there by themselves; what is stored serves both.",
                       table, DM_COUNT(table), &s.o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    const char *arg = res.nargs == 1 ? res.args[0] : NULL;
    dm_free(res.args);
    if (!arg) return cmd_usage(usage, "fork wants one session");
    rc = open_journal(&s, false, &e);
    if (rc == 0) rc = dm_journal_resolve(s.journal, arg, id, &e);
    if (rc == 0) rc = dm_session_fork(s.journal, id, s.o.at, fork, &e);
    dm_journal_close(s.journal);
    if (rc < 0) return cmd_fail(rc == DM_EINVAL ? DM_EUSAGE : rc, &e);
    json_t *v = s.o.json ? json_pack("{s:s, s:s}", "session_id", fork, "forked_from", id) : NULL;
    if (v) out_json(v);
    else out_printf("%s\n", fork);
    json_decref(v);
    return 0;
}

/* ---- rm ------------------------------------------------------------------------------------------------------ */

static int remove_one(sessions *s, const char *arg, dm_err *e)
{
    char id[DM_SESSION_ID_CHARS + 1];
    int rc = dm_journal_resolve(s->journal, arg, id, e);
    if (rc == 0) rc = dm_journal_remove(s->journal, id, e);
    return rc == DM_EINVAL ? DM_EUSAGE : rc;
}

static int sessions_rm(int argc, char **argv)
{
    static const char usage[] = "sessions rm [OPTIONS] ID…";
    sessions s = { 0 };
    dm_opt_result res;
    dm_err e = { 0 };
    int rc = cmd_parse(usage, "Removes sessions.  What the store keeps for them ages out by itself.", options, DM_COUNT(options), &s.o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    int status = 0;
    if (res.nargs == 0) status = cmd_usage(usage, "rm wants a session");
    else if ((rc = open_journal(&s, false, &e)) < 0) status = cmd_fail(rc, &e);
    for (int i = 0; status == 0 && i < res.nargs; i++)
        if ((rc = remove_one(&s, res.args[i], &e)) < 0) status = cmd_fail(rc, &e);
    dm_journal_close(s.journal);
    dm_free(res.args);
    return status;
}

int cmd_sessions(int argc, char **argv)
{
    static const cmd table[] = {
        { "ls", "[--json]", "list sessions", sessions_ls },
        { "show", "ID", "print a session's events", sessions_show },
        { "fork", "[--at TURN] ID", "a new session with the past of another", sessions_fork },
        { "rm", "ID…", "remove sessions", sessions_rm },
    };
    return cmd_dispatch(table, DM_COUNT(table), "sessions", argc, argv);
}
