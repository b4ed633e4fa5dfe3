/* inspect.c — what a model directory holds, as a table or as JSON: one line per kind of tensor (numbers in the
 * name replaced by N) or per tensor. */
#include <ctype.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model_obj_int.h"

#define WHERE "model"

typedef struct row {
    char *name;           /* pattern or full name; owned */
    const model_tensor *t; /* the first of its kind */
    int64_t count, bytes;
    bool used;
} row;

typedef struct table { row *row; size_t n; } table;

/* ---- rows ---------------------------------------------------------------------------------------- */

/* "layers.12.ffn.experts.3.w1.scale" → "layers.N.ffn.experts.N.w1.scale"; only whole components. */
static char *pattern_of(const char *name) {
    char *out = dm_strdup(name), *w = out;
    if (!out) return NULL;
    for (const char *p = name; *p;) {
        size_t n = strcspn(p, "."), digits = strspn(p, "0123456789");
        if (n > 0 && digits == n) *w++ = 'N';
        else memmove(w, p, n), w += n;
        p += n;
        if (*p) *w++ = *p++;
    }
    *w = '\0';
    return out;
}

static int by_kind(const void *a, const void *b) {
    const row *x = a, *y = b;
    int c = strcmp(x->name, y->name);
    if (c) return c;
    if (x->used != y->used) return x->used ? -1 : 1;
    if (x->t->dtype != y->t->dtype) return x->t->dtype < y->t->dtype ? -1 : 1;
    if (x->t->ndim != y->t->ndim) return x->t->ndim - y->t->ndim;
    for (int i = 0; i < x->t->ndim; i++)
        if (x->t->dim[i] != y->t->dim[i]) return x->t->dim[i] < y->t->dim[i] ? -1 : 1;
    return 0;
}

static void free_table(table *t) {
    for (size_t i = 0; i < t->n; i++) dm_free(t->row[i].name);
    dm_free(t->row);
}

static int make_table(const dm_model *m, bool all, table *out) {
    out->row = dm_calloc(m->ntensors + 1, sizeof *out->row);
    if (!out->row) return DM_ENOMEM;
    for (size_t i = 0; i < m->ntensors; i++) {
        const model_tensor *t = &m->tensor[i];
        char *name = all ? dm_strdup(t->name) : pattern_of(t->name);
        if (!name) return DM_ENOMEM;
        out->row[out->n++] = (row){name, t, 1, t->bytes, m->used[i]};
    }
    if (all || out->n == 0) return 0;
    qsort(out->row, out->n, sizeof *out->row, by_kind);
    size_t kept = 0;
    for (size_t i = 1; i < out->n; i++) {
        row *last = &out->row[kept], *r = &out->row[i];
        if (by_kind(last, r) == 0) {
            last->count++, last->bytes += r->bytes;
            dm_free(r->name);
        } else out->row[++kept] = *r;
    }
    out->n = kept + 1;
    return 0;
}

/* ---- text ------------------------------------------------------------------------------------------ */

/* Names come from a file; a terminal gets printable characters only. */
static void printable(char out[128], const char *s) {
    size_t n = 0;
    for (; *s && n < 127; s++) out[n++] = isprint((unsigned char)*s) ? *s : '?';
    out[n] = '\0';
}

static int text_row(dm_buf *out, const row *r, bool all) {
    char shape[128] = "", name[128], size[24];
    size_t n = 0;
    for (int i = 0; i < r->t->ndim && n < sizeof shape; i++)
        n += (size_t)snprintf(shape + n, sizeof shape - n, i ? "x%lld" : "%lld", (long long)r->t->dim[i]);
    printable(name, r->name);
    int rc = dm_buf_printf(out, "%-52s %-8s %-16s", name, model_dtype_name(r->t->dtype), shape);
    if (rc >= 0 && !all) rc = dm_buf_printf(out, " %8lld", (long long)r->count);
    return rc < 0 ? rc : dm_buf_printf(out, " %12s%s\n", dm_bytes_text(size, sizeof size, (uint64_t)r->bytes), r->used ? "" : "  ignored");
}

static int as_text(const dm_model *m, const table *t, bool all, int64_t bytes, dm_buf *out) {
    const dm_config *c = &m->config;
    char size[24];
    int rc = dm_buf_printf(out, "DeepSeek-V4, %d layers%s, hidden %d, %d heads, %d experts of which %d per token (%s), vocabulary %d\n",
                           c->num_hidden_layers, c->num_nextn_predict_layers ? " and MTP" : "", c->hidden_size, c->num_attention_heads, c->n_routed_experts,
                           c->num_experts_per_tok, c->expert_fp4 ? "fp4" : c->expert_bf16 ? "bf16" : "fp8", c->vocab_size);
    if (rc >= 0)
        rc = dm_buf_printf(out, "%zu tensors in %d %s, %s (%lld bytes)", m->ntensors, m->nshards, m->nshards == 1 ? "file" : "files", dm_bytes_text(size, sizeof size, (uint64_t)bytes),
                           (long long)bytes);
    if (rc >= 0 && m->nused < m->ntensors) rc = dm_buf_printf(out, "; %zu ignored", m->ntensors - m->nused);
    if (rc >= 0) rc = dm_buf_printf(out, "\n%-52s %-8s %-16s%s %12s\n", "tensor", "dtype", "shape", all ? "" : "    count", "size");
    for (size_t i = 0; i < t->n && rc >= 0; i++) rc = text_row(out, &t->row[i], all);
    return rc;
}

/* ---- JSON ------------------------------------------------------------------------------------------- */

static json_t *json_row(const dm_model *m, const row *r, bool all) {
    json_t *shape = json_array();
    for (int i = 0; i < r->t->ndim; i++)
        if (json_array_append_new(shape, json_integer(r->t->dim[i])) < 0) {
            json_decref(shape);
            return NULL;
        }
    json_t *o = json_pack("{s:s, s:s, s:o, s:I, s:b}", "name", r->name, "dtype", model_dtype_name(r->t->dtype), "shape", shape, "bytes",
                          (json_int_t)r->bytes, "used", (int)r->used);
    if (!o) return NULL;
    int rc = all ? json_object_set_new(o, "file", json_string(m->shard_name[r->t->shard])) : json_object_set_new(o, "count", json_integer(r->count));
    if (rc == 0) return o;
    json_decref(o);
    return NULL;
}

static int as_json(const dm_model *m, const table *t, bool all, int64_t bytes, dm_buf *out) {
    json_t *rows = json_array();
    int rc = rows ? 0 : DM_ENOMEM;
    for (size_t i = 0; i < t->n && rc == 0; i++)
        if (json_array_append_new(rows, json_row(m, &t->row[i], all)) < 0) rc = DM_ENOMEM;
    json_t *o = rc == 0 ? json_pack("{s:i, s:I, s:I, s:I, s:I, s:O}", "version", 1, "files", (json_int_t)m->nshards, "tensor_count", (json_int_t)m->ntensors,
                                    "ignored", (json_int_t)(m->ntensors - m->nused), "bytes", (json_int_t)bytes, "tensors", rows)
                        : NULL;
    char *text = o ? json_dumps(o, JSON_INDENT(2)) : NULL;
    rc = text ? dm_buf_str(out, text) : DM_ENOMEM;
    if (rc >= 0) rc = dm_buf_byte(out, '\n');
    free(text);
    json_decref(o);
    json_decref(rows);
    return rc;
}

int dm_model_inspect(const dm_model *m, bool all, bool json, dm_buf *out, dm_err *e) {
    table t = {0};
    int64_t bytes = 0;
    int rc = make_table(m, all, &t);
    for (size_t i = 0; i < m->ntensors; i++) bytes += m->tensor[i].bytes;
    if (rc >= 0) rc = json ? as_json(m, &t, all, bytes, out) : as_text(m, &t, all, bytes, out);
    free_table(&t);
    return rc < 0 ? dm_err_set(e, DM_ENOMEM, WHERE, "out of memory") : 0;
}
