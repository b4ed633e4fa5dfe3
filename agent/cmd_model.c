/* cmd_model.c — `dormouse model …`: model directories, looked at and checked. */
#include "agent/check_int.h"
#include "agent/cmd_int.h"

#include <stdlib.h>
#include <string.h>

typedef struct model_opts {
    bool all, json, special, ids, keep_thinking, draft;
    int64_t mem, context, rows, layers, chunk, threads, seed;
    const char *numerics, *isa, *mode, *effort, *revision, *vectors, *switches, *report, *state_dir;
    unsigned on; /* switches */
} model_opts;

#define HELP { "help", 'h', DM_OPT_HELP, 0, .help = "this text" }
#define JSON { "json", 0, DM_OPT_FLAG, offsetof(model_opts, json), .def = "0", .help = "JSON on standard output" }

#define CONTEXT { "context", 0, DM_OPT_INT, offsetof(model_opts, context), .def = "0", .min = 0, .max = 1 << 24, .help = "tokens; 0: the model's, or what fits" }

static bool progress(void *ctx, const char *what, int64_t done, int64_t total)
{
    (void)ctx;
    if (err_is_terminal() && total > 0) err_printf("\r%s: %lld%%\033[K%s", what, (long long)(done * 100 / total), done >= total ? "\r\033[K" : "");
    return signals_caught() == 0;
}

/* Parses; prints usage when the number of arguments is wrong.  0: go on and free res->args. */
static int parse(const char *usage, const char *what, const dm_opt *t, size_t n, model_opts *o, int argc, char **argv, dm_opt_result *res, int min_args, int max_args, int *status)
{
    *o = (model_opts){ 0 };
    int rc = cmd_parse(usage, what, t, n, o, argc, argv, res);
    *status = rc < 0 ? dm_exit_code(rc) : 0;
    if (rc != 0) return rc;
    if (res->nargs >= min_args && res->nargs <= max_args) return 0;
    *status = cmd_usage(usage, "%s", res->nargs < min_args ? "an argument is missing" : "too many arguments");
    dm_free(res->args);
    return DM_EUSAGE;
}

static dm_numerics numerics_of(const char *s) { return !strcmp(s, "exact") ? DM_NUM_EXACT : !strcmp(s, "plain") ? DM_NUM_PLAIN : DM_NUM_FAST; }

/* ---- inspect, plan ------------------------------------------------------------------------------------------ */

static int model_inspect(int argc, char **argv)
{
    static const dm_opt t[] = { { "all", 'a', DM_OPT_FLAG, offsetof(model_opts, all), .def = "0", .help = "one line per tensor" }, JSON, HELP };
    model_opts o;
    dm_opt_result res;
    int status;
    if (parse("model inspect [OPTIONS] DIR", "Checks a model directory against its configuration and lists its tensors.", t, DM_COUNT(t), &o, argc, argv, &res, 1, 1, &status)) return status;
    dm_model *m = NULL;
    dm_buf b = { 0 };
    dm_err e = { 0 };
    int rc = dm_model_open(&m, res.args[0], &e);
    if (rc == 0) rc = dm_model_inspect(m, o.all, o.json, &b, &e);
    if (rc == 0) out_write(b.p, b.n);
    dm_buf_free(&b);
    dm_model_close(m);
    dm_free(res.args);
    return rc < 0 ? cmd_fail(rc, &e) : 0;
}

/* One line: what, how much, a remark. */
static void plan_line(const char *what, int64_t bytes, const char *fmt, ...) DM_PRINTF(3, 4);
static void plan_line(const char *what, int64_t bytes, const char *fmt, ...)
{
    char size[24], remark[200];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(remark, sizeof remark, fmt, ap);
    va_end(ap);
    out_printf("%-22s %10s  %s\n", what, dm_bytes_text(size, sizeof size, (uint64_t)bytes), remark);
}

static void plan_text(const dm_plan *p)
{
    char a[24], b[24];
    plan_line("weights", p->weight_bytes, "in %lld tensors", (long long)p->weight_tensors);
    plan_line("  routed experts", p->weight_bytes_expert, "%s", "");
    plan_line("  shared experts", p->weight_bytes_shared, "%s", "");
    plan_line("  attention", p->weight_bytes_attn, "%s", "");
    plan_line("  compressors, index", p->weight_bytes_index, "%s", "");
    plan_line("  routers, mixing", p->weight_bytes_router, "and norms");
    plan_line("  embedding", p->weight_bytes_embed, "%s", "");
    plan_line("  head", p->weight_bytes_head, "%s", "");
    plan_line("  MTP layer", p->weight_bytes_mtp, "%s", "");
    plan_line("KV of a block", p->block_bytes, "%d tokens, %.1f bytes each", DM_BLOCK_TOKENS, p->kv_bytes_per_token);
    plan_line("KV at most", p->kv_bytes_at_max, "at the model's longest context (%s as bf16)", dm_bytes_text(a, sizeof a, (uint64_t)p->kv_bytes_bf16_at_max));
    plan_line("stored state at most", p->state_bytes_max, "beside whole blocks, without logits");
    out_printf("\nin memory with a context of %lld tokens, %d rows per step, %d threads:\n", (long long)p->ctx_tokens, p->rows, p->threads);
    plan_line("  weights", p->weight_bytes_resident, "%s", "all that a step can reach; of the embedding the rows that such a context can name");
    plan_line("  tensor tables", p->table_bytes, "%s", "");
    plan_line("  a step's arrays", p->scratch_bytes, "%s", "");
    plan_line("  threads", p->worker_bytes, "%s", "");
    plan_line("  a sequence", p->sequence_bytes, "window, folds and logits");
    plan_line("  its KV blocks", p->kv_bytes, "%s", "");
    plan_line("  together", p->need_bytes, "%s", "");
    if (p->ctx_tokens_fit < 0) return;
    out_printf("\n%s may be used; ", dm_bytes_text(b, sizeof b, (uint64_t)p->mem_bytes));
    if (p->ctx_tokens_fit) out_printf("%lld tokens of context fit\n", (long long)p->ctx_tokens_fit);
    else out_printf("the model does not fit\n");
}

static void plan_json(const dm_plan *p)
{
    const struct { const char *name; int64_t n; } numbers[] = {
        { "weight_bytes", p->weight_bytes }, { "weight_tensors", p->weight_tensors }, { "weight_bytes_expert", p->weight_bytes_expert },
        { "weight_bytes_shared", p->weight_bytes_shared }, { "weight_bytes_attn", p->weight_bytes_attn }, { "weight_bytes_index", p->weight_bytes_index },
        { "weight_bytes_router", p->weight_bytes_router }, { "weight_bytes_embed", p->weight_bytes_embed }, { "weight_bytes_head", p->weight_bytes_head },
        { "weight_bytes_mtp", p->weight_bytes_mtp }, { "block_bytes", p->block_bytes }, { "kv_bytes_at_max", p->kv_bytes_at_max },
        { "kv_bytes_bf16_at_max", p->kv_bytes_bf16_at_max }, { "state_bytes_max", p->state_bytes_max }, { "window_bytes", p->window_bytes },
        { "ctx_tokens", p->ctx_tokens }, { "rows", p->rows }, { "threads", p->threads }, { "weight_bytes_resident", p->weight_bytes_resident },
        { "table_bytes", p->table_bytes }, { "scratch_bytes", p->scratch_bytes }, { "worker_bytes", p->worker_bytes }, { "sequence_bytes", p->sequence_bytes },
        { "kv_bytes", p->kv_bytes }, { "need_bytes", p->need_bytes }, { "mem_bytes", p->mem_bytes }, { "ctx_tokens_fit", p->ctx_tokens_fit },
    };
    json_t *v = json_pack("{s:f}", "kv_bytes_per_token", p->kv_bytes_per_token);
    for (size_t i = 0; i < DM_COUNT(numbers) && v; i++) json_object_set_new(v, numbers[i].name, json_integer(numbers[i].n));
    if (v) out_json(v);
    json_decref(v);
}

static int model_plan(int argc, char **argv)
{
    static const dm_opt t[] = {
        { "memory", 0, DM_OPT_BYTES, offsetof(model_opts, mem), .def = "0", .help = "what may be used; default: the machine's, or its control group's bound" },
        { "mem", 0, DM_OPT_BYTES, offsetof(model_opts, mem) }, /* its old name */
        CONTEXT,
        { "rows", 0, DM_OPT_INT, offsetof(model_opts, rows), .def = "0", .min = 0, .max = 65536, .help = "rows per step; 0: 256" },
        { "threads", 0, DM_OPT_INT, offsetof(model_opts, threads), .def = "0", .min = 0, .max = 1024, .help = "0: one per core" },
        { "numerics", 0, DM_OPT_ENUM, offsetof(model_opts, numerics), .def = "fast", .choices = "fast|exact|plain", .help = "numeric path" },
        { "draft", 0, DM_OPT_FLAG, offsetof(model_opts, draft), .def = "0", .help = "count the MTP layer as used" }, JSON, HELP };
    model_opts o;
    dm_opt_result res;
    int status;
    if (parse("model plan [OPTIONS] DIR|config.json", "Says what a model needs, from its config.json alone, and whether it fits; exit status 1 when it does not.", t, DM_COUNT(t), &o, argc, argv, &res, 1, 1, &status)) return status;
    dm_config c;
    dm_plan p;
    dm_err e = { 0 };
    dm_plan_opts po = { .forward = { .numerics = numerics_of(o.numerics), .threads = (int)o.threads, .rows_max = (int)o.rows, .ctx_tokens_max = o.context, .draft = o.draft },
                        .mem_bytes = o.mem ? o.mem : dm_memory_limit() };
    int rc = dm_config_read(&c, res.args[0], &e);
    if (rc == 0) rc = dm_model_plan(&c, &po, &p, &e);
    if (rc == 0 && o.json) plan_json(&p);
    else if (rc == 0) plan_text(&p);
    if (rc == 0) rc = dm_plan_check(&p, &e);
    dm_free(res.args);
    return rc < 0 ? cmd_fail(rc, &e) : 0;
}

/* ---- verify -------------------------------------------------------------------------------------------------- */

static int verify_file(const char *dir, const char *file, const dm_verify_opts *vo)
{
    dm_verify_report r = { 0 };
    dm_err e = { 0 };
    int rc = dm_model_verify(dir, file, vo, &r, progress, NULL, &e);
    if (rc == 0) out_printf("same    %s  %s\n", file, r.summary);
    else if (rc == DM_EMISMATCH) out_printf("DIFFER  %s  %s  first: %s\n", file, r.summary, r.first);
    else out_printf("ERROR   %s  %s\n", file, e.text[0] ? e.text : dm_err_text(rc));
    return rc;
}

/* The checklist: no vectors, the deployment as it will run. */
static int verify_deployment(const char *dir, const model_opts *o)
{
    char *state = setup_state_dir(o->state_dir), *cache = state ? dm_path_join(state, "models") : NULL;
    check_opts co = { .dir = dir, .cache_dir = cache, .numerics = numerics_of(o->numerics ? o->numerics : "fast"), .isa = o->isa, .threads = (int)o->threads,
                      .rows = (int)o->rows, .mem_bytes = o->mem, .context = o->context, .switches = o->on, .progress = progress };
    int status = cmd_check(&co, o->report);
    dm_free(cache);
    dm_free(state);
    return status;
}

static int verify_files(const char *dir, const model_opts *o, const dm_opt_result *res)
{
    dm_verify_opts vo = { .numerics = numerics_of(o->numerics ? o->numerics : "exact"), .threads = (int)o->threads, .isa = o->isa, .chunk = (int)o->chunk, .switches = o->on };
    int worst = o->vectors ? verify_file(dir, o->vectors, &vo) : 0;
    for (int i = 1; i < res->nargs && worst != DM_ECANCELED; i++) {
        int rc = verify_file(dir, res->args[i], &vo);
        if (rc < 0) worst = rc;
    }
    return worst == DM_ECANCELED ? dm_exit_code(worst) : worst < 0 ? 1 : 0;
}

static int model_verify(int argc, char **argv)
{
    static const dm_opt t[] = {
        { "vectors", 0, DM_OPT_STR, offsetof(model_opts, vectors), .metavar = "FILE", .help = "a file of vectors; more may follow as arguments" },
        { "numerics", 0, DM_OPT_ENUM, offsetof(model_opts, numerics), .choices = "exact|plain|fast", .help = "numeric path; default: exact with vectors, fast without" },
        { "chunk", 0, DM_OPT_INT, offsetof(model_opts, chunk), .def = "0", .min = 0, .max = 1 << 20, .help = "with vectors: rows per step; 0: whole" },
        { "threads", 0, DM_OPT_INT, offsetof(model_opts, threads), .def = "0", .min = 0, .max = 1024, .help = "0: one per core" },
        { "isa", 0, DM_OPT_ENUM, offsetof(model_opts, isa), .choices = CMD_ISAS, .help = "instruction set; default: the best there is" },
        { "debug-switch", 0, DM_OPT_STR, offsetof(model_opts, switches), .def = "", .metavar = "NAME,…", .help = "shared-unclamped, kv-bf16, index-f32" },
        { "context", 0, DM_OPT_INT, offsetof(model_opts, context), .def = "0", .min = 0, .max = 1 << 24, .help = "without vectors: longest context tried; 0: 2048" },
        { "rows", 0, DM_OPT_INT, offsetof(model_opts, rows), .def = "0", .min = 0, .max = 65536, .help = "without vectors: rows per step; 0: 256" },
        { "memory", 0, DM_OPT_BYTES, offsetof(model_opts, mem), .def = "0", .help = "without vectors: what may be used; 0: the machine's" },
        { "report", 0, DM_OPT_STR, offsetof(model_opts, report), .metavar = "FILE", .help = "without vectors: what came out, as JSON" },
        { "state-dir", 0, DM_OPT_STR, offsetof(model_opts, state_dir), .env = "DORMOUSE_STATE_DIR", .metavar = "DIR", .help = "where fingerprints are kept" }, HELP };
    static const char usage[] = "model verify [OPTIONS] DIR [--vectors FILE…]";
    static const char what[] = "Compares a model directory with recorded vectors, a line per file.  Without vectors: goes through the checklist of a\n"
                               "new deployment (files, fingerprint, decoding, longer and longer contexts, a prefix through the store, what each\n"
                               "rounding does).  Exit status 1 when something differs or fails.";
    model_opts o;
    dm_opt_result res;
    dm_err e = { 0 };
    int status;
    if (parse(usage, what, t, DM_COUNT(t), &o, argc, argv, &res, 1, 1 << 20, &status)) return status;
    if (dm_switch_parse(o.switches, &o.on, &e) < 0) {
        dm_free(res.args);
        return cmd_usage(usage, "%s", e.text);
    }
    signals_catch();
    status = !o.vectors && res.nargs < 2 ? verify_deployment(res.args[0], &o) : verify_files(res.args[0], &o, &res);
    dm_free(res.args);
    return status;
}

/* ---- synth ------------------------------------------------------------------------------------------------------- */

static int model_synth(int argc, char **argv)
{
    static const dm_opt t[] = { { "seed", 0, DM_OPT_INT, offsetof(model_opts, seed), .def = "1", .help = "seed of the numbers" },
                                { "layers", 0, DM_OPT_INT, offsetof(model_opts, layers), .def = "0", .min = 0, .max = DM_LAYERS_MAX, .help = "only so many layers; 0: all" }, HELP };
    model_opts o;
    dm_opt_result res;
    int status;
    if (parse("model synth [OPTIONS] CONFIG OUT", "Writes a random checkpoint for a config.json into the directory OUT.", t, DM_COUNT(t), &o, argc, argv, &res, 2, 2, &status)) return status;
    dm_err e = { 0 };
    signals_catch();
    int rc = dm_model_synth(res.args[0], res.args[1], (uint64_t)o.seed, (int)o.layers, progress, NULL, &e);
    dm_free(res.args);
    return rc < 0 ? cmd_fail(rc, &e) : 0;
}

/* ---- tokenize, render ----------------------------------------------------------------------------------------------- */

static int print_ids(const dm_ids *ids)
{
    dm_buf b = { 0 };
    int rc = 0;
    for (size_t i = 0; i < ids->n && rc == 0; i++) rc = dm_buf_printf(&b, "%s%d", i ? " " : "", ids->p[i]);
    if (rc == 0) rc = dm_buf_byte(&b, '\n');
    if (rc == 0) rc = out_write(b.p, b.n);
    dm_buf_free(&b);
    return rc;
}

/* A file, or standard input for "-". */
static int read_input(const char *arg, dm_buf *out, dm_err *e)
{
    return !strcmp(arg, "-") ? read_stdin((size_t)1 << 30, out, e) : dm_file_read(arg, (size_t)1 << 30, out, e);
}

static int model_tokenize(int argc, char **argv)
{
    static const dm_opt t[] = { { "special", 0, DM_OPT_FLAG, offsetof(model_opts, special), .def = "1", .help = "recognise added tokens in the text (--no-special: do not)" }, HELP };
    model_opts o;
    dm_opt_result res;
    int status;
    if (parse("model tokenize [OPTIONS] DIR [TEXT|-]", "Prints the token ids of a text.", t, DM_COUNT(t), &o, argc, argv, &res, 1, 2, &status)) return status;
    dm_tok *tok = NULL;
    dm_buf text = { 0 };
    dm_ids ids = { 0 };
    dm_err e = { 0 };
    bool from_stdin = res.nargs == 1 || !strcmp(res.args[1], "-");
    int rc = dm_tok_open(&tok, res.args[0], &e);
    if (rc == 0) rc = from_stdin ? read_stdin((size_t)1 << 30, &text, &e) : dm_buf_str(&text, res.args[1]);
    if (rc == 0) rc = dm_tok_encode(tok, dm_buf_cstr(&text), text.n, o.special, &ids, &e);
    if (rc >= 0) rc = print_ids(&ids);
    dm_ids_free(&ids);
    dm_buf_free(&text);
    dm_tok_close(tok);
    dm_free(res.args);
    return rc < 0 ? cmd_fail(rc, &e) : 0;
}

static dm_effort effort_of(const char *s)
{
    return !strcmp(s, "max") ? DM_EFFORT_MAX : !strcmp(s, "high") ? DM_EFFORT_HIGH : !strcmp(s, "low") ? DM_EFFORT_LOW : DM_EFFORT_NONE;
}

static int render(const model_opts *o, const char *dir, const char *file, dm_err *e)
{
    dm_chat_opts co = { .mode = !strcmp(o->mode, "thinking") ? DM_THINKING : DM_CHAT, .drop_thinking = !o->keep_thinking, .effort = effort_of(o->effort),
                        .revision = !strcmp(o->revision, "0731") ? DM_REV_0731 : DM_REV_APRIL };
    dm_buf text = { 0 };
    dm_prompt p = { 0 };
    dm_tok *tok = NULL;
    dm_ids ids = { 0 };
    int rc = read_input(file, &text, e);
    if (rc == 0) rc = dm_chat_render(dm_buf_cstr(&text), text.n, &co, &p, e);
    if (rc == 0 && !o->ids) rc = out_write(p.text.p, p.text.n);
    if (rc == 0 && o->ids) {
        rc = dm_tok_open(&tok, dir, e);
        if (rc == 0) rc = dm_prompt_encode(tok, &p, &ids, e);
        if (rc >= 0) rc = print_ids(&ids);
    }
    dm_ids_free(&ids);
    dm_tok_close(tok);
    dm_prompt_free(&p);
    dm_buf_free(&text);
    return rc;
}

static int model_render(int argc, char **argv)
{
    static const dm_opt t[] = {
        { "mode", 0, DM_OPT_ENUM, offsetof(model_opts, mode), .def = "chat", .choices = "chat|thinking", .help = "how the reply begins" },
        { "effort", 0, DM_OPT_ENUM, offsetof(model_opts, effort), .def = "none", .choices = "none|low|high|max", .help = "reasoning effort" },
        { "keep-thinking", 0, DM_OPT_FLAG, offsetof(model_opts, keep_thinking), .def = "0", .help = "old reasoning stays" },
        { "revision", 0, DM_OPT_ENUM, offsetof(model_opts, revision), .def = "april", .choices = "april|0731", .help = "of the encoder's texts" },
        { "ids", 0, DM_OPT_FLAG, offsetof(model_opts, ids), .def = "0", .help = "token ids instead of text" }, HELP };
    model_opts o;
    dm_opt_result res;
    int status;
    if (parse("model render [OPTIONS] DIR FILE|-", "Prints the prompt of a JSON array of messages.", t, DM_COUNT(t), &o, argc, argv, &res, 2, 2, &status)) return status;
    dm_err e = { 0 };
    int rc = render(&o, res.args[0], res.args[1], &e);
    dm_free(res.args);
    return rc < 0 ? cmd_fail(rc, &e) : 0;
}

int cmd_model(int argc, char **argv)
{
    static const cmd table[] = {
        { "inspect", "DIR", "check a model directory and list its tensors", model_inspect },
        { "plan", "DIR|config.json", "what a model needs", model_plan },
        { "verify", "DIR [--vectors FILE…]", "check a deployment, or compare with recorded vectors", model_verify },
        { "synth", "CONFIG OUT", "write a random checkpoint", model_synth },
        { "tokenize", "DIR [TEXT|-]", "token ids of a text", model_tokenize },
        { "render", "DIR FILE|-", "the prompt of a list of messages", model_render },
    };
    return cmd_dispatch(table, DM_COUNT(table), "model", argc, argv);
}
