/* session_open.c — a session's beginning and end: made new, or loaded from its journal; closed.
 *
 * A session carries its own system text, tools, mode and sampling, as they were when it was created: they are in its
 * tokens already.  What must agree with the program at hand are the weights and the tokenizer. */
#include "agent/session_int.h"

#include <stdlib.h>
#include <string.h>

static void session_free(dm_session *s)
{
    if (s->claimed) dm_journal_release(s->h->o.journal, s->id);
    session_seq_drop(s);
    calls_end(s);
    ledger_free(&s->led);
    if (s->parser_tools) {
        for (size_t i = 0; i < dm_tools_count(s->tools); i++) dm_free((void *)s->parser_tools[i].parameters_json);
        dm_free(s->parser_tools);
    }
    dm_tools_destroy(s->tools);
    pager_free(&s->pager);
    gen_free(&s->gen);
    dm_buf_free(&s->content);
    dm_buf_free(&s->reasoning);
    json_decref(s->turns);
    json_decref(s->calls_done);
    dm_free(s->workspace);
    s->h->sessions--;
    dm_free(s);
}

static void handle_closed(uv_handle_t *hd)
{
    dm_session *s = hd->data;
    if (--s->handles == 0) session_free(s);
}

void dm_session_close(dm_session *s)
{
    if (!s) return;
    DM_ASSERT(s->state == S_IDLE);
    s->state = S_CLOSED;
    s->wake.data = s->retry.data = s;
    int open = s->handles;
    if (s->async_open) uv_close((uv_handle_t *)&s->wake, handle_closed);
    if (s->timer_open) uv_close((uv_handle_t *)&s->retry, handle_closed);
    if (open == 0) session_free(s);
}

static int open_handles(dm_session *s, dm_err *e)
{
    if (uv_async_init(s->h->o.loop, &s->wake, session_on_wake) != 0) return dm_err_set(e, DM_ENOMEM, "session", "no async handle");
    s->wake.data = s;
    s->async_open = true;
    s->handles++;
    uv_unref((uv_handle_t *)&s->wake); /* an idle session does not keep the loop alive */
    if (uv_timer_init(s->h->o.loop, &s->retry) != 0) return dm_err_set(e, DM_ENOMEM, "session", "no timer");
    s->retry.data = s;
    s->timer_open = true;
    s->handles++;
    int rc = gen_init(&s->gen, s->h->o.tok, &s->wake, s->h->banned, e);
    return rc < 0 ? rc : gen_use_stops(&s->gen, s->o.stop, s->o.nstop, e);
}

static int session_new(dm_host *h, const dm_session_opts *o, dm_session **out, dm_err *e)
{
    dm_session *s = dm_calloc(1, sizeof *s);
    if (!s) return dm_err_set(e, DM_ENOMEM, "session", "out of memory");
    s->h = h;
    h->sessions++;
    s->o = *o;
    s->turns = json_array();
    s->calls_done = json_array();
    s->out = (outcome){ .subtype = "success", .stop_reason = "end_turn" };
    pager_init(&s->pager, h->o.kv, h->o.engine, &h->o.kv_root, h->o.forward->block_bytes);
    int rc = s->turns && s->calls_done ? open_handles(s, e) : dm_err_set(e, DM_ENOMEM, "session", "out of memory");
    if (rc < 0) {
        dm_session_close(s);
        return rc;
    }
    *out = s;
    return 0;
}

static int set_workspace(dm_session *s, const char *dir, dm_err *e)
{
    char *real = realpath(dir && *dir ? dir : ".", NULL);
    if (!real) return dm_err_set(e, DM_ENOENT, "workspace", "no such directory: %s", dir);
    if (!dm_utf8_valid(real, strlen(real))) { /* the journal is JSON */
        free(real);
        return dm_err_set(e, DM_EUSAGE, "workspace", "the name of the workspace is not UTF-8; rename it");
    }
    s->workspace = dm_strdup(real);
    free(real);
    return s->workspace ? 0 : dm_err_set(e, DM_ENOMEM, "session", "out of memory");
}

static int open_tools(dm_session *s, const json_t *list, dm_err *e)
{
    dm_tools_opts o = { .loop = s->h->o.loop, .sandbox = s->h->o.sandbox, .workspace = s->workspace, .hide = s->h->o.state_dir };
    char *spill = s->h->o.state_dir ? dm_path_join(s->h->o.state_dir, "outputs") : NULL;
    o.spill_dir = spill;
    int rc = spill ? dm_mkdirs(spill, 0700, e) : 0;
    if (rc == 0) rc = dm_tools_create(&s->tools, &o, e);
    dm_free(spill);
    if (rc == 0 && !list) rc = dm_tools_add_defaults(s->tools, e);
    size_t i;
    json_t *t;
    json_array_foreach((json_t *)list, i, t)
    {
        const char *name = json_str(t, "name"), *text = json_string_value(json_object_get(t, "description"));
        if (rc == 0) rc = dm_tools_add_builtin(s->tools, name, text, json_object_get(t, "parameters"), e);
    }
    return rc < 0 ? rc : 0;
}

static int parser_tools(dm_session *s, dm_err *e)
{
    size_t n = dm_tools_count(s->tools);
    dm_tool_info info;
    s->parser_tools = dm_calloc(n ? n : 1, sizeof *s->parser_tools);
    if (!s->parser_tools) return dm_err_set(e, DM_ENOMEM, "session", "out of memory");
    for (size_t i = 0; i < n; i++) {
        dm_tools_info(s->tools, i, &info);
        s->parser_tools[i].name = info.name;
        s->parser_tools[i].parameters_json = info.parameters ? json_line(info.parameters) : dm_strdup("{}");
        if (!s->parser_tools[i].parameters_json) return dm_err_set(e, DM_ENOMEM, "session", "out of memory");
    }
    if (!s->h->o.vocab) return 0;
    return gen_use_grammar(&s->gen, s->h->o.vocab, &(dm_parser_opts){ .tools = s->parser_tools, .ntools = n }, e);
}

/* The tools as the prompt will show them: the model directory's own objects, byte for byte, where they say all. */
static json_t *tools_shown(const dm_session *s)
{
    json_t *list = json_array();
    dm_tool_info info;
    for (size_t i = 0; list && i < dm_tools_count(s->tools); i++) {
        dm_tools_info(s->tools, i, &info);
        json_t *given = s->h->tools ? json_deep_copy(json_array_get(s->h->tools, i)) : json_pack("{s:s}", "name", info.name);
        if (given && !json_object_get(given, "description")) json_object_set_new(given, "description", json_string(info.description));
        if (given && !json_object_get(given, "parameters")) json_object_set(given, "parameters", (json_t *)info.parameters);
        if (!given || json_array_append_new(list, given) != 0) {
            json_decref(list);
            return NULL;
        }
    }
    return list;
}

static json_t *created_event(dm_session *s)
{
    const dm_host_opts *o = &s->h->o;
    char weights[65], tokenizer[65], rng[17];
    dm_hex(weights, o->weights.b, 32);
    dm_hex(tokenizer, s->h->tokenizer.b, 32);
    dm_sampler start;
    dm_sampler_init(&start, &o->sampling);
    snprintf(rng, sizeof rng, "%016llx", (unsigned long long)start.rng);
    json_t *tools = tools_shown(s);
    if (!tools) return NULL;
    return event_stamp(json_pack("{s:s, s:i, s:s, s:s, s:s, s:s, s:s, s:s, s:o, s:s, s:{s:f, s:f, s:f, s:i, s:I}, s:s, s:s}", "type", "created", "format",
                                 DM_JOURNAL_FORMAT_VERSION, "id", s->id, "model", o->model_name, "weights", weights, "tokenizer", tokenizer,
                                 "numerics", o->forward->numerics_id, "system", o->system ? o->system : "", "tools", tools, "mode",
                                 o->mode == DM_THINKING ? "thinking" : "chat", "sampling", "temperature", o->sampling.temperature, "top_p",
                                 o->sampling.top_p, "min_p", o->sampling.min_p, "top_k", o->sampling.top_k, "seed",
                                 (json_int_t)o->sampling.seed, "rng", rng, "workspace", s->workspace));
}

static void take_sampling(dm_session *s)
{
    const json_t *p = json_object_get(s->led.created, "sampling");
    s->sampler.params = (dm_sample_params){ .temperature = json_number_value(json_object_get(p, "temperature")),
                                            .top_p = json_number_value(json_object_get(p, "top_p")),
                                            .min_p = json_number_value(json_object_get(p, "min_p")),
                                            .top_k = (int)json_int(p, "top_k", 0), .seed = (uint64_t)json_int(p, "seed", 0) };
    s->mode = strcmp(json_str(s->led.created, "mode"), "thinking") == 0 ? DM_THINKING : DM_CHAT;
}

int dm_session_create(dm_host *h, const dm_session_opts *o, dm_session **out, dm_err *e)
{
    dm_session *s;
    *out = NULL;
    int rc = session_new(h, o, &s, e);
    if (rc < 0) return rc;
    dm_session_id_new(s->id);
    rc = set_workspace(s, o->workspace, e);
    if (rc == 0) rc = open_tools(s, h->tools, e);
    if (rc == 0) rc = parser_tools(s, e);
    if (rc == 0) rc = dm_journal_claim(h->o.journal, s->id, e);
    s->claimed = rc == 0;
    if (rc == 0) {
        json_t *ev = created_event(s);
        rc = session_record(s, &ev, 1, e);
    }
    if (rc < 0) {
        dm_session_close(s);
        return rc;
    }
    take_sampling(s);
    *out = s;
    return 0;
}

typedef struct load { ledger *led; dm_err *e; } load;

static int load_event(void *ctx, int64_t seq, const json_t *event)
{
    load *l = ctx;
    (void)seq;
    return ledger_apply(l->led, event, l->e);
}

/* The timeline is only good for the weights and the tokenizer that made it.  Another numeric path is another cache
 * root: it is computed again, and said. */
static int check_model(const dm_session *s, bool *other_numerics, dm_err *e)
{
    char weights[65], tokenizer[65];
    if (json_int(s->led.created, "format", 0) > DM_JOURNAL_FORMAT_VERSION)
        return dm_err_set(e, DM_EVERSION, "session", "session %s was written by a newer program (format %lld, this one knows %d)", s->id,
                          (long long)json_int(s->led.created, "format", 0), DM_JOURNAL_FORMAT_VERSION);
    dm_hex(weights, s->h->o.weights.b, 32);
    dm_hex(tokenizer, s->h->tokenizer.b, 32);
    if (strcmp(json_str(s->led.created, "weights"), weights) != 0)
        return dm_err_set(e, DM_EFOREIGN, "session", "session %s belongs to other weights (model %s); resume it with --model of those", s->id,
                          json_str(s->led.created, "model"));
    if (strcmp(json_str(s->led.created, "tokenizer"), tokenizer) != 0)
        return dm_err_set(e, DM_EFOREIGN, "session", "session %s was made with another tokenizer.json of model %s", s->id,
                          json_str(s->led.created, "model"));
    *other_numerics = strcmp(json_str(s->led.created, "numerics"), s->h->o.forward->numerics_id) != 0;
    return 0;
}

static int resume_tools(dm_session *s, dm_err *e)
{
    int rc = open_tools(s, json_object_get(s->led.created, "tools"), e);
    if (rc == DM_ENOENT) {
        dm_err_prefix(e, "session %s offers a tool that this program does not have", s->id);
        return e ? e->code = DM_EFOREIGN : DM_EFOREIGN;
    }
    return rc < 0 ? rc : parser_tools(s, e);
}

int dm_session_resume(dm_host *h, const char *id, const dm_session_opts *o, dm_session **out, dm_err *e)
{
    dm_session *s;
    char full[DM_SESSION_ID_CHARS + 1];
    *out = NULL;
    int rc = dm_journal_resolve(h->o.journal, id, full, e);
    if (rc == 0) rc = session_new(h, o, &s, e);
    if (rc < 0) return rc;
    memcpy(s->id, full, sizeof full);
    rc = dm_journal_claim(h->o.journal, full, e);
    s->claimed = rc == 0;
    load l = { &s->led, e };
    if (rc == 0) rc = dm_journal_read(h->o.journal, full, load_event, &l, e);
    bool other_numerics = false;
    if (rc == 0) rc = check_model(s, &other_numerics, e);
    if (rc == 0) rc = set_workspace(s, o->workspace ? o->workspace : json_str(s->led.created, "workspace"), e);
    if (rc == 0) rc = resume_tools(s, e);
    if (rc == 0) rc = calls_settle_unknown(s, e);
    if (rc < 0) {
        dm_session_close(s);
        return rc;
    }
    take_sampling(s);
    if (s->led.turns == 0 && s->led.ids.n) s->anchor = session_find_anchor(s);
    if (other_numerics) session_notice(s, "this session was run on another numeric path; what was stored for it is computed again");
    *out = s;
    return 0;
}
