/* verify.c — comparing a model directory with one file of vectors: what kind of file it is, and who compares. */
#include <jansson.h>
#include <string.h>

#include "engine/verify_int.h"

#define WHERE "verify"
#define FILE_BYTES_MAX ((size_t)1 << 30)

/* ---- kinds ------------------------------------------------------------------------------------------ */

typedef enum kind { KIND_UNKNOWN, KIND_HASH, KIND_CHECKPOINT, KIND_GOLDEN, KIND_TOKENIZER, KIND_CHAT } kind;

static bool ends(const char *s, const char *tail) {
    size_t n = strlen(s), k = strlen(tail);
    return n >= k && strcmp(s + n - k, tail) == 0;
}

/* The first line of a .jsonl file tells what it holds. */
static kind lines_kind(const dm_buf *text) {
    const char *p = dm_buf_cstr(text), *end = memchr(p, '\n', text->n);
    json_t *o = json_loadb(p, end ? (size_t)(end - p) : text->n, JSON_ALLOW_NUL, NULL);
    kind k = KIND_UNKNOWN;
    if (json_object_get(o, "ids") && json_object_get(o, "text")) k = json_object_get(o, "messages") ? KIND_CHAT : KIND_TOKENIZER;
    json_decref(o);
    return k;
}

static kind text_kind(const dm_buf *text) {
    unsigned long long seed;
    char name[64];
    if (text->n == 0) return KIND_UNKNOWN;
    if (text->p[0] == '{') return lines_kind(text);
    if (text->p[0] != '#') return KIND_UNKNOWN;
    return sscanf((const char *)text->p, "# %63s seed %llu", name, &seed) == 2 ? KIND_CHECKPOINT : KIND_HASH;
}

/* A golden run is three files; any of them stands for all.  NULL: out of memory; "": not one of them. */
static char *golden_path(const char *file) {
    static const char *const tails[] = {".safetensors", ".json", ".txt"};
    for (size_t i = 0; i < DM_COUNT(tails); i++) {
        if (!ends(file, tails[i])) continue;
        dm_buf b = {0};
        if (dm_buf_append(&b, file, strlen(file) - strlen(tails[i])) < 0 || dm_buf_str(&b, ".safetensors") < 0) {
            dm_buf_free(&b);
            return NULL;
        }
        if (i == 0 || dm_path_exists(dm_buf_cstr(&b))) return (char *)b.p;
        dm_buf_free(&b);
    }
    return dm_strdup("");
}

/* ---- runs of the model --------------------------------------------------------------------------------- */

static int check_path(const vref *f, dm_numerics numerics, dm_err *e) {
    if (f->plain && numerics != DM_NUM_PLAIN)
        return dm_err_set(e, DM_EINVAL, WHERE, "the file was made without rounding and judges the plain path only: use --numerics plain");
    if (!f->plain && numerics == DM_NUM_PLAIN)
        return dm_err_set(e, DM_EINVAL, WHERE, "the file was made with rounding, which the plain path leaves out: use a plain file, or --numerics exact or fast");
    if (f->plain && !f->golden) return dm_err_set(e, DM_EINVAL, WHERE, "hashes cannot judge the plain path, which is compared within a tolerance");
    return 0;
}

/* The rows of the run that the file describes: the exact path's, or the plain one's for a plain file. */
static int record(vrun *v, vrec *rec, dm_err *e) {
    forward_trace trace = {.ctx = rec, .row = vrec_row, .all_logits = true};
    bool fast = v->o->numerics == DM_NUM_FAST;
    v->numerics = fast ? DM_NUM_EXACT : v->o->numerics;
    v->isa = fast ? NULL : v->o->isa;
    v->what = v->numerics == DM_NUM_PLAIN ? "plain path" : "exact path";
    v->streams = rec;
    v->trace = &trace;
    return vrun_go(v, e);
}

static int judge_run(vrun *v, vrec *rec, dm_verify_report *out, vfirst *first, dm_err *e) {
    int rc = record(v, rec, e);
    if (rc < 0) return rc;
    if (v->o->numerics == DM_NUM_PLAIN) return verify_plain(rec, v->f, out, first, e);
    rc = verify_exact(rec, v->f, out, first, e);
    snprintf(out->summary, sizeof out->summary, "%s on %lld tokens: %lld of %lld tensors equal", v->numerics_id, (long long)v->f->n,
             (long long)(out->compared - out->differ), (long long)out->compared);
    if (rc < 0 || v->o->numerics != DM_NUM_FAST || out->differ) return rc;
    v->numerics = DM_NUM_FAST;
    v->isa = v->o->isa;
    return verify_fast(v, rec, out, first, e);
}

static int verify_model(const vref *f, const dm_verify_opts *o, dm_model *m, dm_verify_report *out, vfirst *first, dm_progress fn, void *ctx, dm_err *e) {
    vrec rec = {0};
    vrun v = {.m = m, .o = o, .f = f, .fn = fn, .ctx = ctx};
    int rc = check_path(f, o->numerics, e);
    if (rc == 0) rc = vrec_init(&rec, dm_model_config(m), f, o->numerics == DM_NUM_FAST, e);
    if (rc == 0) rc = judge_run(&v, &rec, out, first, e);
    vrec_free(&rec);
    return rc;
}

static int verify_vectors(const char *dir, const char *golden, dm_buf *text, const dm_verify_opts *o, dm_verify_report *out, vfirst *first, dm_progress fn,
                          void *ctx, dm_err *e) {
    dm_model *m;
    vref f = {0};
    int rc = dm_model_open(&m, dir, e);
    if (rc < 0) return rc;
    rc = golden ? vref_read_golden(&f, golden, e) : vref_read_hashes(&f, text, dm_model_config(m), e);
    if (rc == 0) rc = verify_model(&f, o, m, out, first, fn, ctx, e);
    vref_free(&f);
    dm_model_close(m);
    return rc;
}

/* ---- dispatch ---------------------------------------------------------------------------------------------- */

static int verify_text(const char *dir, dm_buf *text, const dm_verify_opts *o, dm_verify_report *out, vfirst *first, dm_progress fn, void *ctx, dm_err *e) {
    static const char *const names[] = {[KIND_HASH] = "hash", [KIND_CHECKPOINT] = "checkpoint", [KIND_TOKENIZER] = "tokenizer", [KIND_CHAT] = "chat"};
    kind k = text_kind(text);
    if (k != KIND_UNKNOWN) snprintf(out->kind, sizeof out->kind, "%s", names[k]);
    switch (k) {
    case KIND_HASH: return verify_vectors(dir, NULL, text, o, out, first, fn, ctx, e);
    case KIND_CHECKPOINT: return verify_checkpoint(dir, text, out, first, fn, ctx, e);
    case KIND_TOKENIZER: return verify_tokenizer(dir, text, out, first, fn, ctx, e);
    case KIND_CHAT: return verify_chat(dir, text, out, first, fn, ctx, e);
    default:
        return dm_err_set(e, DM_EFORMAT, WHERE, "is none of the known kinds of vectors: hashes of a run or of a checkpoint, a golden run, tokenizer or chat lines");
    }
}

static int verify_file(const char *dir, const char *file, const dm_verify_opts *o, dm_verify_report *out, vfirst *first, dm_progress fn, void *ctx, dm_err *e) {
    char *golden = golden_path(file);
    dm_buf text = {0};
    int rc;
    if (!golden) return dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    if (golden[0]) {
        snprintf(out->kind, sizeof out->kind, o->numerics == DM_NUM_PLAIN ? "plain" : "golden");
        rc = verify_vectors(dir, golden, NULL, o, out, first, fn, ctx, e);
    } else {
        rc = dm_file_read(file, FILE_BYTES_MAX, &text, e);
        if (rc >= 0) rc = verify_text(dir, &text, o, out, first, fn, ctx, e);
    }
    dm_buf_free(&text);
    dm_free(golden);
    return rc;
}

int dm_model_verify(const char *dir, const char *file, const dm_verify_opts *o, dm_verify_report *out, dm_progress fn, void *ctx, dm_err *e) {
    vfirst first = {0};
    memset(out, 0, sizeof *out);
    if (o->chunk < 0 || o->threads < 0) return dm_err_set(e, DM_EINVAL, WHERE, "chunk and threads must not be negative");
    int rc = verify_file(dir, file, o, out, &first, fn, ctx, e);
    if (rc == DM_EFORMAT || rc == DM_EINVAL) dm_err_prefix(e, "%.200s", file); /* other errors are not about this file */
    if (rc < 0) return rc;
    if (out->compared == 0) return dm_err_set(e, DM_EFORMAT, WHERE, "%.200s: nothing in it to compare", file);
    if (out->differ == 0) return 0;
    snprintf(out->first, sizeof out->first, "%s", first.text);
    return dm_err_set(e, DM_EMISMATCH, WHERE, "%lld of %lld differ; first: %.300s", (long long)out->differ, (long long)out->compared, first.text);
}
