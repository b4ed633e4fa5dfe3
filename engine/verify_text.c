/* verify_text.c — tokenizer and chat vectors, one JSON object per line, and the hashes of a checkpoint's tensors. */
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/verify_int.h"

#define WHERE "verify"

static int no_memory(dm_err *e) { return dm_err_set(e, DM_ENOMEM, WHERE, "out of memory"); }

/* ---- one line ------------------------------------------------------------------------------------- */

typedef struct slice { const char *p; size_t n; } slice;

static const char *skip_space(const char *p, const char *end) {
    while (p < end && (*p == ' ' || *p == '\t' || *p == '\r' || *p == '\n')) p++;
    return p;
}

static const char *skip_string(const char *p, const char *end) {
    for (p++; p < end && *p != '"'; p++)
        if (*p == '\\') p++;
    return p < end ? p + 1 : end;
}

/* Past one value; the line is known to be JSON. */
static const char *skip_value(const char *p, const char *end) {
    int depth = 0;
    do {
        if (*p == '"') p = skip_string(p, end);
        else {
            if (*p == '{' || *p == '[') depth++;
            if (*p == '}' || *p == ']') depth--;
            p++;
        }
        if (depth == 0 && p < end && (p[-1] == '}' || p[-1] == ']' || p[-1] == '"')) return p;
    } while (p < end && (depth > 0 || (*p != ',' && *p != '}')));
    return p;
}

/* The text of a member of the outermost object, as it stands: numbers keep their spelling, keys their order. */
static slice member_text(slice line, const char *key) {
    const char *end = line.p + line.n, *p = skip_space(line.p, end) + 1;
    size_t key_len = strlen(key);
    while (p < end) {
        p = skip_space(p, end);
        const char *name = p;
        p = skip_string(p, end);
        bool hit = (size_t)(p - name) == key_len + 2 && memcmp(name + 1, key, key_len) == 0;
        p = skip_space(p, end) + 1; /* ':' */
        const char *value = skip_space(p, end);
        if (value >= end) break;
        p = skip_value(value, end);
        if (hit) return (slice){value, (size_t)(p - value)};
        p = skip_space(p, end) + 1; /* ',' or the last '}' */
    }
    return (slice){NULL, 0};
}

static bool ids_of(const json_t *o, dm_ids *out, int *rc) {
    const json_t *a = json_object_get(o, "ids");
    if (!json_is_array(a)) return false;
    out->n = 0;
    for (size_t i = 0; i < json_array_size(a); i++) {
        const json_t *v = json_array_get(a, i);
        if (!json_is_integer(v)) return false;
        if ((*rc = dm_ids_push(out, (int32_t)json_integer_value(v))) < 0) return true;
    }
    return true;
}

static void offer_ids(vfirst *first, int64_t line, const char *name, const dm_ids *have, const dm_ids *want) {
    size_t i = 0;
    while (i < have->n && i < want->n && have->p[i] == want->p[i]) i++;
    vfirst_offer(first, 0, line, "line %lld (%.60s): id %zu of %zu is %d instead of %d", (long long)line, name, i, want->n, i < have->n ? have->p[i] : -1,
                 i < want->n ? want->p[i] : -1);
}

static bool same_ids(const dm_ids *a, const dm_ids *b) { return a->n == b->n && (a->n == 0 || memcmp(a->p, b->p, a->n * sizeof *a->p) == 0); }

/* ---- all lines ---------------------------------------------------------------------------------------- */

typedef struct lines {
    const dm_tok *tok;
    dm_verify_report *out;
    vfirst *first;
    int64_t number;
    dm_ids want, have;
} lines;
/* true: as it should be */
typedef int (*line_fn)(lines *k, slice line, const json_t *o, const char *name, bool *same, dm_err *e);

static int one_line(lines *k, slice line, line_fn fn, dm_err *e) {
    json_error_t at;
    json_t *o = json_loadb(line.p, line.n, JSON_ALLOW_NUL, &at);
    if (!o && json_error_code(&at) == json_error_out_of_memory) return no_memory(e);
    const char *name = json_string_value(json_object_get(o, "name"));
    bool same = false;
    int rc = 0;
    if (!json_is_object(o) || !ids_of(o, &k->want, &rc) || !json_is_string(json_object_get(o, "text")))
        rc = dm_err_set(e, DM_EFORMAT, WHERE, "line %lld is not a vector with text and ids", (long long)k->number);
    else if (rc < 0) rc = no_memory(e);
    else rc = fn(k, line, o, name ? name : "unnamed", &same, e);
    json_decref(o);
    if (rc < 0) return rc;
    k->out->compared++;
    if (!same) k->out->differ++;
    return 0;
}

static int each_line(lines *k, const dm_buf *file, line_fn fn, dm_progress progress, void *ctx, dm_err *e) {
    const char *p = dm_buf_cstr(file), *end = p + file->n;
    int rc = 0;
    while (p < end && rc == 0) {
        const char *stop = memchr(p, '\n', (size_t)(end - p));
        if (!stop) stop = end;
        k->number++;
        slice line = {p, (size_t)(stop - p)};
        if (progress && !progress(ctx, "comparing text", p - dm_buf_cstr(file), (int64_t)file->n)) rc = dm_err_set(e, DM_ECANCELED, WHERE, "cancelled");
        else if (skip_space(p, stop) < stop) rc = one_line(k, line, fn, e);
        p = stop + 1;
    }
    dm_ids_free(&k->want);
    dm_ids_free(&k->have);
    return rc;
}

static int tokenizer_line(lines *k, slice line, const json_t *o, const char *name, bool *same, dm_err *e) {
    const json_t *text = json_object_get(o, "text");
    const char *s = json_string_value(text);
    size_t n = json_string_length(text);
    dm_buf back = {0};
    (void)line;
    k->have.n = 0;
    int rc = dm_tok_encode(k->tok, s, n, json_is_true(json_object_get(o, "special")), &k->have, e);
    if (rc < 0) return rc;
    *same = same_ids(&k->have, &k->want);
    if (!*same) offer_ids(k->first, k->number, name, &k->have, &k->want);
    rc = dm_tok_decode(k->tok, k->want.p, k->want.n, &back);
    if (rc < 0) rc = no_memory(e);
    else if (*same && (back.n != n || (n && memcmp(back.p, s, n) != 0))) {
        *same = false;
        vfirst_offer(k->first, 1, k->number, "line %lld (%.60s): its ids decode to another text", (long long)k->number, name);
    }
    dm_buf_free(&back);
    return rc < 0 ? rc : 0;
}

/* null: none */
static int effort_of(const json_t *o, dm_effort *out) {
    static const char *const names[] = {[DM_EFFORT_NONE] = "none", [DM_EFFORT_LOW] = "low", [DM_EFFORT_HIGH] = "high", [DM_EFFORT_MAX] = "max"};
    const json_t *v = json_object_get(o, "effort");
    *out = DM_EFFORT_NONE;
    if (!v || json_is_null(v)) return 0;
    for (size_t i = 0; json_is_string(v) && i < DM_COUNT(names); i++)
        if (strcmp(json_string_value(v), names[i]) == 0) return *out = (dm_effort)i, 0;
    return DM_EFORMAT;
}

static int chat_options(const json_t *o, dm_chat_opts *out) {
    const char *mode = json_string_value(json_object_get(o, "mode"));
    if (!mode || (strcmp(mode, "chat") != 0 && strcmp(mode, "thinking") != 0)) return DM_EFORMAT;
    *out = (dm_chat_opts){.mode = strcmp(mode, "chat") == 0 ? DM_CHAT : DM_THINKING,
                          .drop_thinking = json_is_true(json_object_get(o, "drop_thinking")),
                          .revision = DM_REV_APRIL};
    return effort_of(o, &out->effort);
}

static bool same_text(lines *k, const char *name, const dm_buf *have, const json_t *text) {
    const char *want = json_string_value(text);
    size_t n = json_string_length(text), i = 0;
    while (i < n && i < have->n && have->p[i] == (uint8_t)want[i]) i++;
    if (i == n && i == have->n) return true;
    vfirst_offer(k->first, 0, k->number, "line %lld (%.60s): the text differs from byte %zu of %zu on", (long long)k->number, name, i, n);
    return false;
}

static int chat_line(lines *k, slice line, const json_t *o, const char *name, bool *same, dm_err *e) {
    dm_chat_opts options;
    slice messages = member_text(line, "messages");
    if (chat_options(o, &options) < 0 || !messages.p) return dm_err_set(e, DM_EFORMAT, WHERE, "line %lld: unknown mode or effort, or no messages", (long long)k->number);
    dm_prompt prompt = {0};
    dm_err why = {0};
    int rc = dm_chat_render(messages.p, messages.n, &options, &prompt, &why);
    if (rc < 0) {
        vfirst_offer(k->first, 0, k->number, "line %lld (%.60s): %.150s", (long long)k->number, name, why.text);
        dm_prompt_free(&prompt);
        return rc == DM_ENOMEM ? no_memory(e) : 0;
    }
    *same = same_text(k, name, &prompt.text, json_object_get(o, "text"));
    k->have.n = 0;
    if (*same) {
        rc = dm_prompt_encode(k->tok, &prompt, &k->have, e);
        *same = rc >= 0 && same_ids(&k->have, &k->want);
        if (rc >= 0 && !*same) offer_ids(k->first, k->number, name, &k->have, &k->want);
    }
    dm_prompt_free(&prompt);
    return rc < 0 ? rc : 0;
}

static int run_lines(const char *dir, const dm_buf *file, line_fn fn, dm_verify_report *out, vfirst *first, dm_progress progress, void *ctx, dm_err *e) {
    dm_tok *tok;
    int rc = dm_tok_open(&tok, dir, e);
    if (rc < 0) return rc;
    lines k = {.tok = tok, .out = out, .first = first};
    rc = each_line(&k, file, fn, progress, ctx, e);
    snprintf(out->summary, sizeof out->summary, "%lld of %lld lines equal", (long long)(out->compared - out->differ), (long long)out->compared);
    dm_tok_close(tok);
    return rc;
}

int verify_tokenizer(const char *dir, const dm_buf *file, dm_verify_report *out, vfirst *first, dm_progress fn, void *ctx, dm_err *e) {
    return run_lines(dir, file, tokenizer_line, out, first, fn, ctx, e);
}

int verify_chat(const char *dir, const dm_buf *file, dm_verify_report *out, vfirst *first, dm_progress fn, void *ctx, dm_err *e) {
    return run_lines(dir, file, chat_line, out, first, fn, ctx, e);
}

/* ---- checkpoint ------------------------------------------------------------------------------------------- */

static void compare_tensor(const dm_model *m, const vref_tensor *want, int64_t line, dm_verify_report *out, vfirst *first) {
    const model_tensor *t = model_find(m, want->name);
    dm_sha256 h;
    dm_hash have;
    out->compared++;
    if (!t) {
        vfirst_offer(first, 0, line, "tensor %.120s is missing", want->name);
        out->differ++;
        return;
    }
    bool same = t->dtype == want->dtype && t->ndim == want->ndim && memcmp(t->dim, want->dim, (size_t)t->ndim * sizeof *t->dim) == 0;
    dm_sha256_init(&h);
    dm_sha256_add(&h, t->data, (size_t)t->bytes);
    dm_sha256_end(&h, &have);
    if (same && dm_hash_equal(&have, &want->sha256)) return;
    vfirst_offer(first, 0, line, "tensor %.120s has %s", want->name, same ? "other bytes" : "another dtype or shape");
    out->differ++;
}

int verify_checkpoint(const char *dir, dm_buf *file, dm_verify_report *out, vfirst *first, dm_progress fn, void *ctx, dm_err *e) {
    dm_model *m;
    int rc = dm_model_open(&m, dir, e);
    if (rc < 0) return rc;
    char *save;
    int64_t number = 1;
    for (char *line = strtok_r((char *)file->p, "\n", &save); line && rc == 0; line = strtok_r(NULL, "\n", &save), number++) {
        vref_tensor want;
        if (line[0] == '#') continue;
        if (fn && !fn(ctx, "hashing tensors", line - (char *)file->p, (int64_t)file->n)) rc = dm_err_set(e, DM_ECANCELED, WHERE, "cancelled");
        else if (!vref_parse_line(line, &want)) rc = dm_err_set(e, DM_EFORMAT, WHERE, "line %lld is not \"name dtype ndim dims sha256\"", (long long)number);
        else compare_tensor(m, &want, number, out, first);
    }
    if (rc == 0 && (size_t)out->compared < m->nused) {
        out->differ += (int64_t)m->nused - out->compared;
        vfirst_offer(first, 1, number, "the file names %lld tensors, the model has %zu", (long long)out->compared, m->nused);
    }
    snprintf(out->summary, sizeof out->summary, "%lld of %lld tensors equal", (long long)(out->compared - out->differ), (long long)out->compared);
    dm_model_close(m);
    return rc;
}
