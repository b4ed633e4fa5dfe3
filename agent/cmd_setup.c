/* cmd_setup.c — finds and opens what a session needs.
 *
 * Order: the sandbox's launcher first, while this process is small and has one thread; then weights, tokenizer,
 * the numeric path and its threads; then the store and the journal; the host last.  Closing is the reverse. */
#include "agent/cmd_int.h"

#include <errno.h>
#include <pwd.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define LAYOUT_VERSION 1 /* of blocks and states: part of the store's root */
#define AGENT_FORMAT 1

static const char product_system[] =
    "You are Dormouse, a coding agent. Use the tools to work on the files in the workspace. Paths are relative to the workspace. "
    "Look before you change things, and say briefly what you did.";

/* ---- where things are ------------------------------------------------------------------------------- */

char *setup_state_dir(const char *option)
{
    if (option && *option) return dm_strdup(option);
    const char *xdg = getenv("XDG_STATE_HOME"), *home = getenv("HOME");
    if (xdg && *xdg == '/') return dm_path_join(xdg, "dormouse");
    const struct passwd *me = home && *home == '/' ? NULL : getpwuid(getuid());
    if (me) home = me->pw_dir; /* not a place in /tmp, which others could have made */
    return dm_path_join(home && *home == '/' ? home : "/", ".local/state/dormouse");
}

static bool is_model(const char *dir)
{
    char *file = dm_path_join(dir, "config.json");
    bool there = file && dm_path_exists(file);
    dm_free(file);
    return there;
}

/* dir/tail if there is a model, else NULL. */
static char *model_at(const char *dir, const char *tail)
{
    char *path = dm_path_join(dir, tail);
    if (path && is_model(path)) return path;
    dm_free(path);
    return NULL;
}

int setup_model_dir(const char *option, char **out, dm_err *e)
{
    if (option && *option) {
        *out = dm_strdup(option);
        return *out ? 0 : dm_err_set(e, DM_ENOMEM, "model", "out of memory");
    }
    char exe[4096];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
    *out = NULL;
    exe[n > 0 ? n : 0] = 0;
    char *slash = strrchr(exe, '/');
    if (slash) {
        *slash = 0;
        *out = model_at(exe, "../share/dormouse/models/tiny");
    }
    while (!*out && (slash = strrchr(exe, '/')) != NULL) { /* a build folder inside a source tree */
        *out = model_at(exe, "examples/models/tiny");
        *slash = 0;
    }
    return *out ? 0 : dm_err_set(e, DM_EMODEL, "model", "no model found; give one with --model DIR or DORMOUSE_MODEL");
}

static int real_dir(const char *path, char **out, dm_err *e)
{
    char *real = realpath(path, NULL);
    struct stat st;
    if (!real || stat(real, &st) != 0 || !S_ISDIR(st.st_mode)) {
        free(real);
        return dm_err_set(e, DM_ENOENT, "workspace", "no such directory: %s", path);
    }
    *out = dm_strdup(real);
    free(real);
    return *out ? 0 : dm_err_set(e, DM_ENOMEM, "workspace", "out of memory");
}

static int find_dirs(setup *s, dm_err *e)
{
    char *state = setup_state_dir(s->o->state_dir);
    int rc = state ? dm_mkdirs(state, 0700, e) : dm_err_set(e, DM_ENOMEM, "state", "out of memory");
    if (rc == 0) rc = real_dir(state, &s->state_dir, e); /* absolute: the sandbox hides it by this name */
    dm_free(state);
    if (rc == 0) rc = setup_model_dir(s->o->model, &s->model_dir, e);
    if (rc == 0 && s->o->workspace) rc = real_dir(s->o->workspace, &s->workspace, e);
    return rc;
}

/* ---- agent.json ------------------------------------------------------------------------------------------ */

static int read_agent(setup *s, dm_err *e)
{
    char *path = dm_path_join(s->model_dir, "agent.json");
    if (!path) return dm_err_set(e, DM_ENOMEM, "model", "out of memory");
    dm_buf text = { 0 };
    int rc = dm_path_exists(path) ? dm_file_read(path, 1 << 20, &text, e) : DM_ENOENT;
    if (rc == 0) {
        json_error_t err;
        s->agent = json_loadb((const char *)text.p, text.n, JSON_REJECT_DUPLICATES, &err);
        if (!json_is_object(s->agent)) rc = dm_err_set(e, DM_EMODEL, "model", "%s is not a JSON object (line %d: %s)", path, err.line, err.text);
        else if (!json_is_integer(json_object_get(s->agent, "format")) || json_integer_value(json_object_get(s->agent, "format")) > AGENT_FORMAT)
            rc = dm_err_set(e, DM_EVERSION, "model", "%s has another format than %d", path, AGENT_FORMAT);
        else if (json_object_get(s->agent, "tools") && !json_is_array(json_object_get(s->agent, "tools")))
            rc = dm_err_set(e, DM_EMODEL, "model", "%s: \"tools\" is not an array", path);
    }
    if (rc == DM_ENOENT) rc = 0; /* the product's own text and all built-ins */
    dm_buf_free(&text);
    dm_free(path);
    return rc;
}

static dm_sample_params sampling(const json_t *agent)
{
    const json_t *o = json_object_get(agent, "sampling"), *v;
    dm_sample_params p = { .temperature = agent ? 0 : 1.0, .top_p = 1 };
    if ((v = json_object_get(o, "temperature"))) p.temperature = json_number_value(v);
    if ((v = json_object_get(o, "top_p"))) p.top_p = json_number_value(v);
    if ((v = json_object_get(o, "min_p"))) p.min_p = json_number_value(v);
    if ((v = json_object_get(o, "top_k"))) p.top_k = (int)json_integer_value(v);
    if ((v = json_object_get(o, "seed"))) p.seed = (uint64_t)json_integer_value(v);
    else dm_random(&p.seed, sizeof p.seed), p.seed >>= 1; /* journaled as a signed number */
    return p;
}

/* ---- opening ------------------------------------------------------------------------------------------------ */

static bool loading(void *ctx, const char *what, int64_t done, int64_t total)
{
    (void)ctx;
    if (err_is_terminal() && total > ((int64_t)1 << 30)) err_printf("\r%s: %lld%%%s", what, (long long)(done * 100 / total), done >= total ? "\n" : "");
    return signals_caught() == 0;
}

static int open_sandbox(setup *s, dm_err *e)
{
    const char *hide[] = { s->state_dir, NULL };
    dm_sandbox_opts o = { .hide = hide };
    o.level = !strcmp(s->o->sandbox, "none") ? DM_SANDBOX_NONE : !strcmp(s->o->sandbox, "partial") ? DM_SANDBOX_PARTIAL : DM_SANDBOX_FULL;
    return dm_sandbox_start(&s->sandbox, &o, e);
}

#define TOKENIZER_TIMES 5 /* while it is read a tokenizer takes about that many times its file, and less with its grammar later */

static int read_speculate(setup *s, dm_err *e)
{
    const char *text = s->o->speculate;
    char *end;
    long n = strtol(text, &end, 10);
    if (!strcmp(text, "auto")) s->speculate = DM_SPECULATE_AUTO;
    else if (!strcmp(text, "off")) s->speculate = 0;
    else if (end != text && !*end && n >= 0 && n <= DM_DRAFT_MAX) s->speculate = (int)n;
    else return dm_err_set(e, DM_EUSAGE, "options", "--speculate wants auto, off or a number from 0 to %d, not '%s'", DM_DRAFT_MAX, text);
    return 0;
}

static int check_stops(const setup *s, dm_err *e)
{
    dm_stop *stop = NULL;
    int rc = dm_stop_create(&stop, s->o->stop.v, (size_t)s->o->stop.n, e);
    dm_stop_destroy(stop);
    if (rc == DM_EINVAL) rc = e->code = DM_EUSAGE;
    return rc;
}

/* Drafting is left out where its memory is what does not fit, unless somebody asked for it. */
static int plan_drafts(setup *s, dm_plan_opts *po, const dm_config *c, dm_plan *p, dm_err *e)
{
    po->forward.draft = s->fo.draft = s->speculate != 0 && c->num_nextn_predict_layers > 0;
    if (s->speculate > 0 && !s->fo.draft) return dm_err_set(e, DM_EUSAGE, "options", "--speculate %d: the model has no MTP layer to draft with", s->speculate);
    int rc = dm_model_plan(c, po, p, e);
    if (rc < 0 || !s->fo.draft || s->speculate > 0 || dm_plan_check(p, e) == 0) return rc;
    po->forward.draft = s->fo.draft = false;
    *e = (dm_err){ 0 };
    return dm_model_plan(c, po, p, e);
}

/* Whether the model fits beside what else is kept in memory, before gigabytes are read.  The store's RAM tier counts as far as one
 * session can fill it. */
static int plan_forward(setup *s, dm_err *e)
{
    const setup_opts *o = s->o;
    const dm_config *c = dm_model_config(s->model);
    struct stat st;
    char *tokenizer = dm_path_join(s->model_dir, "tokenizer.json");
    dm_plan p;
    s->fo = (dm_forward_opts){ .threads = (int)o->threads, .isa = o->isa, .ctx_tokens_max = o->ctx_tokens, .rows_max = (int)o->rows };
    s->fo.numerics = !strcmp(o->numerics, "exact") ? DM_NUM_EXACT : !strcmp(o->numerics, "plain") ? DM_NUM_PLAIN : DM_NUM_FAST;
    dm_plan_opts po = { .mem_bytes = o->memory ? o->memory : dm_memory_limit() };
    int rc = dm_switch_parse(o->switches, &s->fo.switches, e);
    po.forward = s->fo;
    if (rc == 0 && o->kv) rc = dm_model_plan(c, &po, &p, e);
    if (rc == 0 && o->kv) po.other_bytes = p.kv_bytes + p.state_bytes_max < o->ram_bytes ? p.kv_bytes + p.state_bytes_max : o->ram_bytes;
    if (tokenizer && stat(tokenizer, &st) == 0) po.other_bytes += (int64_t)st.st_size * TOKENIZER_TIMES;
    dm_free(tokenizer);
    if (rc == 0) rc = plan_drafts(s, &po, c, &p, e);
    if (rc == 0) rc = dm_plan_check(&p, e);
    if (rc < 0) return rc;
    if (!o->ctx_tokens && p.ctx_tokens < c->max_position_embeddings)
        err_printf("dormouse: the context is %lld tokens, which is what fits in memory; the model could have %lld\n", (long long)p.ctx_tokens, (long long)c->max_position_embeddings);
    s->fo.ctx_tokens_max = p.ctx_tokens;
    s->fo.pool_bytes_max = p.mem_bytes - (p.need_bytes - p.kv_bytes); /* several sequences share what is left: an error beats being killed */
    s->fo.mem_bytes_max = -1;
    return 0;
}

static int open_model(setup *s, dm_err *e)
{
    char *cache = dm_path_join(s->state_dir, "models");
    if (!cache) return dm_err_set(e, DM_ENOMEM, "model", "out of memory");
    int rc = dm_mkdirs(cache, 0700, e);
    if (rc == 0) rc = dm_model_open(&s->model, s->model_dir, e);
    if (rc == 0) rc = plan_forward(s, e);
    if (rc == 0) {
        rc = dm_tok_open(&s->tok, s->model_dir, e);
        if (rc == DM_ENOENT) rc = e->code = DM_EMODEL; /* the directory is there; it is incomplete */
    }
    if (rc == 0 && dm_tok_vocab(s->tok) > dm_model_config(s->model)->vocab_size)
        rc = dm_err_set(e, DM_EMODEL, "model", "%s: tokenizer.json has ids up to %d but the weights know only %d; it belongs to another model", s->model_dir,
                        dm_tok_vocab(s->tok) - 1, dm_model_config(s->model)->vocab_size);
    if (rc == 0 && s->o->grammar) rc = dm_vocab_create(&s->vocab, s->tok, e);
    if (rc == 0) rc = dm_model_fingerprint(s->model, cache, &s->weights, loading, NULL, e);
    dm_free(cache);
    return rc;
}

static int open_engine(setup *s, dm_err *e)
{
    int rc = dm_forward_create(&s->forward, s->model, &s->fo, e);
    dm_engine_opts eo = { .speculate = s->speculate };
    return rc < 0 ? rc : dm_engine_create(&s->engine, s->forward, &eo, e);
}

/* Everything that must agree for stored bytes to be usable (C2). */
static void make_root(setup *s)
{
    dm_hash tokenizer;
    int64_t numbers[3] = { LAYOUT_VERSION, DM_BLOCK_TOKENS, (int64_t)s->forward->block_bytes };
    dm_blake2b h;
    dm_tok_hash(s->tok, &tokenizer);
    dm_blake2b_init(&h);
    dm_blake2b_add(&h, s->weights.b, sizeof s->weights.b);
    dm_blake2b_add(&h, tokenizer.b, sizeof tokenizer.b);
    dm_blake2b_add(&h, numbers, sizeof numbers);
    dm_blake2b_add(&h, s->forward->numerics_id, strlen(s->forward->numerics_id) + 1);
    dm_blake2b_add(&h, s->o->kv_salt, strlen(s->o->kv_salt));
    dm_blake2b_end(&h, &s->root);
}

/* A store that cannot be used is set aside: it is a cache, and what was in it is computed again. */
static void set_aside(const char *dir)
{
    static const char *const files[] = { "data.mdb", "lock.mdb" };
    for (size_t i = 0; i < DM_COUNT(files); i++) {
        char *from = dm_path_join(dir, files[i]), *to = from ? dm_malloc(strlen(from) + 5) : NULL;
        if (to) {
            snprintf(to, strlen(from) + 5, "%s.bad", from);
            rename(from, to);
        }
        dm_free(from);
        dm_free(to);
    }
}

static int open_kv(setup *s, dm_err *e)
{
    char name[17], *all = dm_path_join(s->state_dir, "kv"), *dir = NULL;
    make_root(s);
    if (!s->o->kv) {
        dm_free(all);
        return 0;
    }
    dm_hex(name, s->root.b, 8);
    if (!all || !(dir = dm_path_join(all, name))) {
        dm_free(all);
        return dm_err_set(e, DM_ENOMEM, "kv", "out of memory");
    }
    dm_kv_opts o = { .dir = dir, .root = s->root, .block_bytes = s->forward->block_bytes, .disk_bytes_max = s->o->kv_bytes, .write_bytes_day = s->o->kv_write_day, .ram_bytes_max = s->o->ram_bytes };
    dm_err err = { 0 };
    int rc = dm_mkdirs(dir, 0700, &err);
    if (rc == 0) rc = dm_kv_open(&s->kv, &o, &err);
    if (rc == DM_ESTORE || rc == DM_ECORRUPT || rc == DM_EFOREIGN) {
        dm_log(DM_LOG_WARN, "the stored KV is set aside, and what is needed is computed again: %s", err.text);
        set_aside(dir);
        memset(&err, 0, sizeof err);
        rc = dm_kv_open(&s->kv, &o, &err);
    }
    if (rc < 0) {
        dm_log(DM_LOG_WARN, "going on without stored KV: %s", err.text[0] ? err.text : dm_err_text(rc));
        s->kv = NULL;
    }
    dm_free(dir);
    dm_free(all);
    return 0; /* a cache that is missing costs time only */
}

static int open_host(setup *s, dm_err *e)
{
    const char *name = strrchr(s->model_dir, '/');
    const char *system = json_string_value(json_object_get(s->agent, "system"));
    const char *mode = json_string_value(json_object_get(s->agent, "mode"));
    dm_host_opts o = {
        .loop = &s->loop, .engine = s->engine, .forward = s->forward, .tok = s->tok, .kv = s->kv, .kv_root = s->root, .journal = s->journal,
        .sandbox = s->sandbox, .model_name = name && name[1] ? name + 1 : s->model_dir, .state_dir = s->state_dir, .weights = s->weights,
        .system = system ? system : product_system, .tools = json_object_get(s->agent, "tools"),
        .mode = mode && !strcmp(mode, "chat") ? DM_CHAT : DM_THINKING, .sampling = sampling(s->agent), .keep_awake = !strcmp(s->o->sleep, "never"), .vocab = s->vocab,
    };
    return dm_host_create(&s->host, &o, e);
}

static int check_session(setup *s, dm_err *e)
{
    char id[DM_SESSION_ID_CHARS + 1];
    int rc = dm_journal_resolve(s->journal, s->o->resume, id, e);
    return rc == DM_EINVAL ? DM_EUSAGE : rc; /* ambiguous or too short */
}

static int stopped(dm_err *e) { return signals_caught() ? dm_err_set(e, DM_ECANCELED, "start", "interrupted") : 0; }

int setup_open(setup *s, const setup_opts *o, dm_err *e)
{
    *s = (setup){ .o = o };
    int rc = read_speculate(s, e);
    if (rc == 0) rc = check_stops(s, e);
    if (rc == 0) rc = find_dirs(s, e);
    if (rc == 0) rc = open_sandbox(s, e);
    if (rc == 0) rc = stopped(e);
    if (rc == 0) rc = dm_journal_open(&s->journal, s->state_dir, false, e);
    if (rc == 0 && o->resume) rc = check_session(s, e);
    if (rc == 0) rc = open_model(s, e);
    if (rc == 0) rc = read_agent(s, e);
    if (rc == 0) rc = stopped(e);
    if (rc == 0) rc = open_engine(s, e);
    if (rc == 0) rc = open_kv(s, e);
    if (rc == 0) rc = uv_loop_init(&s->loop) == 0 ? 0 : dm_err_set(e, DM_EIO, "loop", "the event loop cannot be made");
    s->loop_open = rc == 0;
    if (rc == 0) rc = open_host(s, e);
    if (rc == 0) rc = stopped(e);
    return rc;
}

int setup_open_store(setup *s, const setup_opts *o, dm_err *e)
{
    *s = (setup){ .o = o };
    int rc = find_dirs(s, e);
    if (rc == 0) rc = dm_journal_open(&s->journal, s->state_dir, false, e);
    if (rc == 0) rc = open_model(s, e);
    if (rc == 0) rc = dm_forward_create(&s->forward, s->model, &s->fo, e);
    if (rc == 0) rc = stopped(e);
    return rc == 0 ? open_kv(s, e) : rc;
}

void setup_close(setup *s)
{
    while (s->loop_open && uv_run(&s->loop, UV_RUN_DEFAULT)) {} /* a uv_stop may be left over */
    dm_host_destroy(s->host);
    if (s->loop_open) uv_loop_close(&s->loop);
    dm_engine_destroy(s->engine);
    dm_kv_close(s->kv);
    dm_forward_destroy(s->forward);
    dm_vocab_destroy(s->vocab);
    dm_tok_close(s->tok);
    dm_model_close(s->model);
    dm_journal_close(s->journal);
    dm_sandbox_stop(s->sandbox);
    json_decref(s->agent);
    dm_free(s->state_dir);
    dm_free(s->model_dir);
    dm_free(s->workspace);
    memset(s, 0, sizeof *s);
}

void setup_session_opts(const setup *s, dm_session_opts *out)
{
    *out = (dm_session_opts){ .workspace = s->workspace, .max_turns = s->o->max_turns, .max_tokens = s->o->max_tokens, .yes = s->o->yes, .ask = s->o->ask,
                               .stop = s->o->stop.v, .nstop = (size_t)s->o->stop.n };
}
