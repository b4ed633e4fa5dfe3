/* The registry: what is offered, what arguments are good, and the life of a call.
 *
 *   dm_tools_start -> QUEUED --turn--> WORKING (pool or sandbox) --> run_finish -> done(), freed
 *                        \--cancel-----------------------------------^
 *
 * A call's turn comes when no exclusive call is before it, or, if it is exclusive, when it is the first of all.  Nothing
 * is called back from within dm_tools_start or dm_tools_cancel: the call's timer brings it to the loop first. */
#include <ftw.h>
#include <string.h>
#include <unistd.h>

#include "tools/tools_int.h"

enum { RESULT_BYTES = 16 << 10, RESULT_BYTES_LEAST = 1 << 10, RESULT_BYTES_MOST = 64 << 20, ARGS_BYTES_MAX = 32 << 20 };

/* ---- the list --------------------------------------------------------------------------------------------------------- */

int dm_tools_create(dm_tools **out, const dm_tools_opts *o, dm_err *e) {
    *out = NULL;
    dm_tools *t = dm_calloc(1, sizeof *t);
    if (!t) return dm_err_set(e, DM_ENOMEM, "tools", "out of memory");
    t->o = *o;
    t->queue_end = &t->queue;
    if (t->o.result_bytes_max == 0) t->o.result_bytes_max = RESULT_BYTES;
    if (t->o.result_bytes_max < RESULT_BYTES_LEAST) t->o.result_bytes_max = RESULT_BYTES_LEAST;
    if (t->o.result_bytes_max > RESULT_BYTES_MOST) t->o.result_bytes_max = RESULT_BYTES_MOST;
    if (t->o.output_bytes_max == 0) t->o.output_bytes_max = 64 << 20;
    int rc = workspace_open(&t->ws, o->workspace, o->hide, e);
    if (rc == 0 && o->spill_dir && !(t->spill_dir = dm_strdup(o->spill_dir))) rc = dm_err_set(e, DM_ENOMEM, "tools", "out of memory");
    t->o.workspace = t->ws.canonical;
    t->o.spill_dir = t->spill_dir;
    t->o.hide = NULL; /* held open in ws */
    if (rc < 0) {
        dm_tools_destroy(t);
        return rc;
    }
    *out = t;
    return 0;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at) {
    (void)st, (void)type, (void)at;
    (void)remove(path); /* what cannot go stays */
    return 0;
}

static void tool_free(tool *t) {
    dm_free(t->name);
    dm_free(t->description);
    json_decref(t->parameters);
}

void dm_tools_destroy(dm_tools *t) {
    if (!t) return;
    DM_ASSERT(t->active == 0);
    bash_forget(t);
    if (t->tmp[0]) (void)nftw(t->tmp, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
    for (size_t i = 0; i < t->count; i++) tool_free(&t->list[i]);
    dm_free(t->list);
    workspace_close(&t->ws);
    dm_free(t->spill_dir);
    dm_free(t);
}

static const builtin *builtin_find(const char *name) {
    for (size_t i = 0; i < builtins_count; i++)
        if (strcmp(builtins[i]->name, name) == 0) return builtins[i];
    return NULL;
}

int dm_tools_add_builtin(dm_tools *t, const char *name, const char *description, const json_t *parameters, dm_err *e) {
    const builtin *kind = builtin_find(name);
    if (!kind) return dm_err_set(e, DM_ENOENT, "tools", "there is no built-in tool \"%.64s\"", name);
    if (dm_tools_find(t, name) >= 0) return dm_err_set(e, DM_EEXIST, "tools", "the tool \"%s\" is there already", name);
    tool *list = dm_realloc(t->list, (t->count + 1) * sizeof *list);
    if (!list) return dm_err_set(e, DM_ENOMEM, "tools", "out of memory");
    t->list = list;
    tool made = {.name = dm_strdup(name), .description = dm_strdup(description ? description : kind->description), .kind = kind};
    made.parameters = parameters ? json_deep_copy(parameters) : json_loads(kind->schema, JSON_REJECT_DUPLICATES, NULL);
    int rc = made.name && made.description && made.parameters ? 0 : dm_err_set(e, DM_ENOMEM, "tools", "out of memory");
    if (rc == 0) rc = schema_check(made.parameters, e);
    if (rc < 0) {
        tool_free(&made);
        return dm_err_prefix(e, "tool %s", name), rc;
    }
    t->list[t->count++] = made;
    return 0;
}

int dm_tools_add_defaults(dm_tools *t, dm_err *e) {
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < builtins_count; i++) rc = dm_tools_add_builtin(t, builtins[i]->name, NULL, NULL, e);
    return rc;
}

size_t dm_tools_count(const dm_tools *t) { return t->count; }

int dm_tools_info(const dm_tools *t, size_t i, dm_tool_info *out) {
    if (i >= t->count) return DM_ENOENT;
    const tool *x = &t->list[i];
    *out = (dm_tool_info){x->name, x->description, x->parameters, x->kind->effects, x->kind->on_unknown, x->kind->timeout_ms};
    return 0;
}

int dm_tools_find(const dm_tools *t, const char *name) {
    for (size_t i = 0; i < t->count; i++)
        if (strcmp(t->list[i].name, name) == 0) return (int)i;
    return DM_ENOENT;
}

/* ---- arguments ------------------------------------------------------------------------------------------------------------ */

static int unknown_tool(const dm_tools *t, const char *name, dm_buf *out) {
    int rc = dm_buf_printf(out, "error: there is no tool \"%.80s\"; the tools are:", name);
    for (size_t i = 0; rc == 0 && i < t->count; i++) rc = dm_buf_printf(out, "%s %s", i ? "," : "", t->list[i].name);
    return rc;
}

/* Some models put everything into one parameter that the tool does not have. */
static json_t *unwrapped(const json_t *schema, json_t *args) {
    static const char *const wrappers[] = {"arguments", "input"};
    const json_t *required = json_object_get(schema, "required");
    for (size_t i = 0; i < DM_COUNT(wrappers); i++) {
        json_t *inner = json_object_get(args, wrappers[i]);
        if (!inner || json_object_size(args) != 1 || json_object_get(json_object_get(schema, "properties"), wrappers[i])) continue;
        if (json_is_object(inner)) return json_incref(inner);
        if (!json_is_string(inner)) continue;
        json_t *parsed = json_loads(json_string_value(inner), JSON_REJECT_DUPLICATES, NULL);
        if (json_is_object(parsed)) return parsed;
        json_decref(parsed);
        if (json_array_size(required) == 1) return json_pack("{s:O}", json_string_value(json_array_get(required, 0)), inner);
    }
    return json_incref(args);
}

/* The object that was meant, or NULL with the fault in words. */
static json_t *args_parse(const char *text, dm_buf *fault) {
    json_error_t je;
    if (strlen(text) > ARGS_BYTES_MAX) return dm_buf_str(fault, "the arguments are larger than 32 MiB"), NULL;
    if (text[strspn(text, " \t\r\n")] == 0) return json_object();
    json_t *v = json_loads(text, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, &je);
    if (!v) return dm_buf_printf(fault, "the arguments are not valid JSON: %s (line %d, column %d)", je.text, je.line, je.column), NULL;
    if (json_is_string(v)) { /* encoded twice */
        json_t *again = json_loads(json_string_value(v), JSON_REJECT_DUPLICATES, NULL);
        json_decref(v);
        v = again;
    }
    if (json_is_null(v)) return json_decref(v), json_object();
    if (json_is_object(v)) return v;
    json_decref(v);
    return dm_buf_str(fault, "the arguments must be one JSON object"), NULL;
}

static int args_check(const tool *x, const char *text, json_t **out, dm_buf *fault) {
    json_t *parsed = args_parse(text, fault);
    if (!parsed) return DM_ETOOL;
    json_t *args = unwrapped(x->parameters, parsed);
    json_decref(parsed);
    if (!args) return DM_ENOMEM;
    int rc = schema_apply(x->parameters, args, out, fault);
    json_decref(args);
    return rc;
}

int dm_tools_check(const dm_tools *t, const char *name, const char *args_json, json_t **args, char **text, dm_err *e) {
    dm_buf told = {0}, fault = {0}, clean = {0};
    *args = NULL;
    *text = NULL;
    const int at = dm_tools_find(t, name);
    int rc = at < 0 ? DM_ETOOL : args_check(&t->list[at], args_json ? args_json : "", args, &fault);
    if (rc == 0) goto out;
    int words = 0;
    if (at < 0) {
        words = unknown_tool(t, name, &told);
    } else if (rc == DM_ETOOL) {
        words = dm_buf_printf(&told, "error: %s: %s; its parameters are: ", name, dm_buf_cstr(&fault));
        if (words == 0) words = schema_summary(t->list[at].parameters, &told);
    }
    if (words == 0) words = dm_tool_shape(told.p, told.n, 4096, &clean, NULL);
    if (rc != DM_ETOOL || words < 0) {
        rc = dm_err_set(e, rc != DM_ETOOL ? rc : words, "tools", "the arguments of %.64s cannot be checked", name);
        goto out;
    }
    dm_err_set(e, DM_ETOOL, "tools", "%.500s", dm_buf_cstr(&clean));
    *text = (char *)clean.p;
    clean = (dm_buf){0};
out:
    dm_buf_free(&told);
    dm_buf_free(&fault);
    dm_buf_free(&clean);
    return rc;
}

/* ---- for the kinds ----------------------------------------------------------------------------------------------------------- */

bool run_stopped(const dm_tool_run *r) { return atomic_load_explicit(&r->stop, memory_order_relaxed); }

void run_error(dm_tool_run *r, const char *fmt, ...) {
    va_list ap;
    r->is_error = true;
    dm_buf_clear(&r->text);
    va_start(ap, fmt);
    if (dm_buf_str(&r->text, "error: ") < 0 || dm_buf_vprintf(&r->text, fmt, ap) < 0) dm_buf_clear(&r->text);
    va_end(ap);
}

const char *run_text(const dm_tool_run *r, const char *key) { return json_string_value(json_object_get(r->args, key)); }

int64_t run_int(const dm_tool_run *r, const char *key, int64_t missing) {
    const json_t *v = json_object_get(r->args, key);
    return json_is_integer(v) ? json_integer_value(v) : missing;
}

/* ---- the end of a call ------------------------------------------------------------------------------------------------------- */

static void timer_closed(uv_handle_t *h) { dm_free(h); }

static void queue_remove(dm_tool_run *r) {
    dm_tools *t = r->tools;
    dm_tool_run **at = &t->queue;
    while (*at && *at != r) at = &(*at)->next;
    if (!*at) return;
    *at = r->next;
    if (t->queue_end == &r->next) t->queue_end = at;
}

static void queue_step(dm_tools *t);

/* The words for an end that the tool did not choose. */
static void ended_text(dm_tool_run *r) {
    if (r->cancelled) run_error(r, "cancelled before it was done");
    else if (r->timed_out) run_error(r, "timed out after %d s", r->tool->kind->timeout_ms / 1000);
    else if (!r->text.p) run_error(r, "out of memory");
}

void run_finish(dm_tool_run *r) {
    DM_ASSERT(r->state != RUN_DONE);
    r->state = RUN_DONE;
    queue_remove(r);
    r->tools->active--;
    uv_timer_stop(r->timer);
    uv_close((uv_handle_t *)r->timer, timer_closed);
    if (!r->text.p && dm_buf_reserve(&r->text, 1) == 0) r->text.p[0] = 0;
    dm_tool_result out = {
        .text = (char *)r->text.p, .text_bytes = r->text.n, .is_error = r->is_error, .cut = r->cut, .spill_path = r->spill_path,
        .exit_code = r->exit_code, .timed_out = r->timed_out, .cancelled = r->cancelled, .output_bytes = r->output_bytes,
        .wall_ms = (int64_t)((dm_now_ns() - r->start_ns) / 1000000u),
    };
    if (!out.text && (out.text = dm_calloc(1, 1)) == NULL) DM_ASSERT(!"memory for one byte");
    dm_tool_done done = r->done;
    void *ctx = r->ctx;
    queue_step(r->tools);
    json_decref(r->args);
    dm_free(r);
    done(ctx, &out); /* last: the receiver may destroy the registry */
}

static void finish_later_cb(uv_timer_t *timer) {
    dm_tool_run *r = timer->data;
    ended_text(r);
    run_finish(r);
}

void run_finish_later(dm_tool_run *r) { uv_timer_start(r->timer, finish_later_cb, 0, 0); }

/* ---- its beginning --------------------------------------------------------------------------------------------------------------- */

/* Everything that a worker made passes through the shaper once more: names and contents of files can hold anything. */
static void work_cb(uv_work_t *w) {
    dm_tool_run *r = w->data;
    dm_buf clean = {0};
    bool cut = false;
    if (run_stopped(r)) return;
    r->tool->kind->work(r);
    if (r->output_bytes == 0) r->output_bytes = (int64_t)r->text.n;
    shaper s;
    shaper_init(&s, r->tools->o.result_bytes_max, false);
    int rc = shaper_feed(&s, r->text.p, r->text.n);
    if (rc == 0) rc = shaper_end(&s, &clean, &cut, NULL);
    shaper_free(&s);
    dm_buf_free(&r->text);
    r->text = clean;
    r->cut |= cut;
    if (rc < 0) run_error(r, "out of memory");
}

static void work_done_cb(uv_work_t *w, int status) {
    dm_tool_run *r = w->data;
    r->in_pool = false;
    if (status == UV_ECANCELED) r->cancelled = !r->timed_out;
    if (run_stopped(r)) ended_text(r);
    run_finish(r);
}

/* Comes again while the call does not end; a kind's `stop` then gives up on whatever does not answer. */
static void timeout_cb(uv_timer_t *timer) {
    dm_tool_run *r = timer->data;
    if (!r->cancelled) r->timed_out = true;
    atomic_store(&r->stop, true);
    run_deadline(r, RUN_MARGIN_MS);
    if (r->in_pool) uv_cancel((uv_req_t *)&r->work); /* works only while it waits for a thread */
    else if (r->tool->kind->stop) r->tool->kind->stop(r);
}

void run_deadline(dm_tool_run *r, uint64_t ms) { uv_timer_start(r->timer, timeout_cb, ms, 0); }

static void run_begin(dm_tool_run *r) {
    r->state = RUN_WORKING;
    run_deadline(r, (uint64_t)r->tool->kind->timeout_ms);
    if (r->tool->kind->start) {
        r->tool->kind->start(r);
        return;
    }
    r->work.data = r;
    int rc = uv_queue_work(r->tools->o.loop, &r->work, work_cb, work_done_cb);
    r->in_pool = rc == 0;
    if (rc == 0) return;
    run_error(r, "the call cannot be started: %s", uv_strerror(rc));
    run_finish_later(r);
}

static void queue_step(dm_tools *t) {
    bool first = true;
    for (dm_tool_run *r = t->queue, *next; r; r = next, first = false) {
        const bool exclusive = r->tool->kind->exclusive;
        next = r->next;
        if (exclusive && !first) return;
        if (r->state == RUN_QUEUED && !run_stopped(r)) run_begin(r);
        if (exclusive) return;
    }
}

static void kick_cb(uv_timer_t *timer) {
    dm_tool_run *r = timer->data;
    queue_step(r->tools);
}

static int run_make(dm_tools *t, const tool *x, const json_t *args, dm_tool_run **out) {
    dm_tool_run *r = dm_calloc(1, sizeof *r);
    if (!r) return DM_ENOMEM;
    r->args = json_deep_copy(args);
    r->timer = dm_calloc(1, sizeof *r->timer);
    if (!r->args || !r->timer || dm_buf_reserve(&r->text, 256) < 0) {
        json_decref(r->args);
        dm_free(r->timer);
        dm_buf_free(&r->text);
        dm_free(r);
        return DM_ENOMEM;
    }
    r->text.p[0] = 0;
    r->tools = t;
    r->tool = x;
    r->exit_code = -1;
    r->start_ns = dm_now_ns();
    *out = r;
    return 0;
}

int dm_tools_start(dm_tools *t, const char *name, const json_t *args, dm_tool_done done, void *ctx, dm_tool_run **out, dm_err *e) {
    dm_tool_run *r = NULL;
    if (out) *out = NULL;
    const int at = dm_tools_find(t, name);
    if (at < 0) return dm_err_set(e, DM_ENOENT, "tools", "there is no tool \"%.64s\"", name);
    if (!json_is_object(args)) return dm_err_set(e, DM_EINVAL, "tools", "the arguments of %s are not an object", name);
    int rc = run_make(t, &t->list[at], args, &r);
    if (rc < 0) return dm_err_set(e, rc, "tools", "out of memory");
    r->done = done;
    r->ctx = ctx;
    uv_timer_init(t->o.loop, r->timer);
    r->timer->data = r;
    uv_timer_start(r->timer, kick_cb, 0, 0);
    *t->queue_end = r;
    t->queue_end = &r->next;
    t->active++;
    if (out) *out = r;
    return 0;
}

void dm_tools_cancel(dm_tool_run *r) {
    if (r->state == RUN_DONE || run_stopped(r)) return;
    r->cancelled = true;
    atomic_store(&r->stop, true);
    if (r->state == RUN_QUEUED) run_finish_later(r);
    else if (r->in_pool) uv_cancel((uv_req_t *)&r->work);
    else if (r->tool->kind->stop) run_deadline(r, RUN_MARGIN_MS), r->tool->kind->stop(r);
}

void dm_tool_result_free(dm_tool_result *r) {
    dm_free(r->text);
    dm_free(r->spill_path);
    *r = (dm_tool_result){0};
}
