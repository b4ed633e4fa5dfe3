/* cmd_why.c — `dormouse kv why`: what each turn of a session computed again, why, and what that cost.  Reads the journal only. */
#include "agent/cmd_int.h"

#include <string.h>

typedef struct why_opts { const char *state_dir; bool json; } why_opts;

static const dm_opt options[] = {
    { "state-dir", 0, DM_OPT_STR, offsetof(why_opts, state_dir), .env = "DORMOUSE_STATE_DIR", .metavar = "DIR", .help = "where sessions are; default: ~/.local/state/dormouse" },
    { "json", 0, DM_OPT_FLAG, offsetof(why_opts, json), .def = "0", .help = "JSON on standard output" },
    { "help", 'h', DM_OPT_HELP, 0, .help = "this text" },
};

typedef struct telling {
    bool json;
    json_t *turns;
    int64_t computed, again;
    double seconds;
} telling;

/* Text that a model or a tool wrote, on one line and in quotes. */
static void quoted(const char *name, const json_t *text)
{
    char *s = json_dumps(text, JSON_ENCODE_ANY);
    if (s) {
        out_text(name);
        out_untrusted(s, strlen(s));
    }
    dm_free(s);
}

static void print_turn(const json_t *ev)
{
    const json_t *w = json_object_get(ev, "why");
    const char *miss = json_str(ev, "miss");
    out_printf("turn %lld  new %lld  computed %lld  restored %lld (%s)%s%s\n", json_num(ev, "turn"), json_num(ev, "new_tokens"), json_num(ev, "prefilled_tokens"),
               json_num(ev, "restored_tokens"), json_str(ev, "restored_from"), !w && *miss ? "  " : "", w ? "" : miss);
    if (!w) return;
    out_printf("  again %lld tokens, %.2f s: %s\n  from token %lld", json_num(w, "tokens"), json_number_value(json_object_get(w, "seconds")), json_str(w, "text"), json_num(w, "position"));
    quoted(": ", json_object_get(w, "before"));
    quoted(" then ", json_object_get(w, "token"));
    quoted(" ", json_object_get(w, "after"));
    out_text("\n");
}

static int tell(void *ctx, int64_t seq, const json_t *ev)
{
    static const char *const fields[] = { "turn", "new_tokens", "context_tokens", "prefilled_tokens", "restored_tokens", "replayed_tokens", "restored_from", "miss", "why" };
    telling *t = ctx;
    const json_t *w = json_object_get(ev, "why");
    (void)seq;
    if (strcmp(json_str(ev, "type"), "turn") != 0) return 0;
    t->computed += json_num(ev, "prefilled_tokens");
    t->again += json_num(w, "tokens");
    t->seconds += json_number_value(json_object_get(w, "seconds"));
    if (!t->json) {
        print_turn(ev);
        return 0;
    }
    json_t *v = json_object();
    for (size_t i = 0; i < DM_COUNT(fields); i++)
        if (json_object_get(ev, fields[i])) json_object_set(v, fields[i], json_object_get(ev, fields[i]));
    return json_array_append_new(t->turns, v) == 0 ? 0 : DM_ENOMEM;
}

int kv_why(int argc, char **argv)
{
    static const char usage[] = "kv why [OPTIONS] SESSION";
    why_opts o = { 0 };
    dm_opt_result res;
    dm_err e = { 0 };
    dm_journal *j = NULL;
    telling t = { 0 };
    char id[DM_SESSION_ID_CHARS + 1];
    int rc = cmd_parse(usage, "Says for each turn of a session what was computed again, from which token on, why, and what it cost.\nSESSION may be a unique beginning of its id, or \"last\".",
                       options, DM_COUNT(options), &o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    const char *arg = res.nargs == 1 ? res.args[0] : NULL;
    dm_free(res.args);
    if (!arg) return cmd_usage(usage, "why wants one session");
    char *dir = setup_state_dir(o.state_dir);
    t.json = o.json;
    t.turns = json_array();
    rc = dir && t.turns ? dm_journal_open(&j, dir, true, &e) : dm_err_set(&e, DM_ENOMEM, "kv", "out of memory");
    if (rc == 0) rc = dm_journal_resolve(j, arg, id, &e);
    if (rc == 0) rc = dm_journal_read(j, id, tell, &t, &e);
    if (rc == 0 && o.json) {
        json_t *v = json_pack("{s:s, s:O, s:I, s:I, s:f}", "session_id", id, "turns", t.turns, "computed_tokens", (json_int_t)t.computed, "again_tokens", (json_int_t)t.again, "again_seconds", t.seconds);
        if (v) out_json(v);
        json_decref(v);
    } else if (rc == 0) out_printf("%lld tokens computed, %lld of them again (%.2f s)\n", (long long)t.computed, (long long)t.again, t.seconds);
    dm_journal_close(j);
    json_decref(t.turns);
    dm_free(dir);
    return rc < 0 ? cmd_fail(rc == DM_EINVAL ? DM_EUSAGE : rc, &e) : 0;
}
