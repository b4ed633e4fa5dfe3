/* verify_ref.c — reading a file of vectors: hashes or golden values of one run. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "engine/verify_int.h"

#define WHERE "verify"
#define TOKENS_MAX (1 << 20)

static int no_memory(dm_err *e) { return dm_err_set(e, DM_ENOMEM, WHERE, "out of memory"); }

/* ---- names ---------------------------------------------------------------------------------------- */

static const char *const tag_names[FT_COUNT] = {
#define X(tag, name) name,
    FORWARD_TRACE_MAP(X)
#undef X
};

static bool tag_of(const char *s, forward_tag *out) {
    for (int i = 0; i < FT_COUNT; i++)
        if (strcmp(s, tag_names[i]) == 0) return *out = (forward_tag)i, true;
    return false;
}

/* "layers.N." or "mtp.0." in front of s */
static const char *layer_of(const dm_config *c, const char *s, vname *out) {
    if (dm_str_prefix(s, "mtp.0.")) {
        out->layer = c->num_hidden_layers, out->mtp = true;
        return c->num_nextn_predict_layers ? s + 6 : NULL;
    }
    if (!dm_str_prefix(s, "layers.")) return NULL;
    char *end;
    long n = strtol(s + 7, &end, 10);
    if (end == s + 7 || *end != '.' || n < 0 || n >= c->num_hidden_layers) return NULL;
    out->layer = (int)n;
    return end + 1;
}

/* "attn.compressor.prevK" and its like */
static bool cut_of(const char *s, vname *out) {
    static const struct { const char *tail; bool prev, value; } tails[] = {{"prevK", true, false}, {"prevS", true, true}, {"curK", false, false}, {"curS", false, true}};
    bool index = dm_str_prefix(s, "attn.indexer.compressor.");
    if (!index && !dm_str_prefix(s, "attn.compressor.")) return false;
    s += strlen(index ? "attn.indexer.compressor." : "attn.compressor.");
    for (size_t i = 0; i < DM_COUNT(tails); i++)
        if (strcmp(s, tails[i].tail) == 0) {
            out->prev = tails[i].prev;
            out->tag = index ? (tails[i].value ? FT_INDEX_COMP_S : FT_INDEX_COMP_K) : (tails[i].value ? FT_COMP_S : FT_COMP_K);
            return true;
        }
    return false;
}

static bool cut_name(const dm_config *c, const char *name, vname *out) {
    char *end;
    out->kind = VN_CUT;
    out->cut = strtol(name + 3, &end, 10);
    const char *s = *end == '.' && out->cut > 0 ? layer_of(c, end + 1, out) : NULL;
    return s && cut_of(s, out);
}

bool vname_parse(const dm_config *c, const char *name, vname *out) {
    *out = (vname){.kind = VN_ROWS, .layer = -1};
    if (strcmp(name, "tokens") == 0) return out->kind = VN_TOKENS, true;
    if (strcmp(name, "pos") == 0) return out->kind = VN_POS, true;
    if (strcmp(name, "logits") == 0) return out->tag = FT_LOGITS, true;
    if (strcmp(name, "head.x") == 0) return out->tag = FT_HEAD_X, true;
    if (strcmp(name, "mtp.logits") == 0) {
        out->tag = FT_LOGITS, out->layer = c->num_hidden_layers, out->mtp = true;
        return c->num_nextn_predict_layers > 0;
    }
    if (strncmp(name, "cut", 3) == 0) return cut_name(c, name, out);
    const char *s = layer_of(c, name, out);
    return s && tag_of(s, &out->tag);
}

int vname_order(const vname *v) {
    if (v->kind == VN_TOKENS || v->kind == VN_POS) return -1;
    /* the trunk's head comes behind all layers, then the MTP layer */
    int layer = v->layer < 0 ? DM_LAYERS_MAX : v->mtp ? DM_LAYERS_MAX + 1 : v->layer;
    return layer * FT_COUNT + (int)v->tag;
}

void vname_text(const dm_config *c, forward_tag tag, int layer, char out[96]) {
    if (layer < 0) snprintf(out, 96, "%s", tag_names[tag]);
    else if (layer < c->num_hidden_layers) snprintf(out, 96, "layers.%d.%s", layer, tag_names[tag]);
    else snprintf(out, 96, tag == FT_LOGITS ? "mtp.%s" : "mtp.0.%s", tag_names[tag]);
}

/* ---- positions and cuts ------------------------------------------------------------------------------- */

/* The chosen positions of a run of n tokens. */
static int choose_positions(vref *r, dm_err *e) {
    static const int32_t fixed[] = {0, 1, 2, 3, 4, 5, 7, 63, 64, 67, 68, 126, 127, 128, 129, 130, 254, 255, 256, 257, 511, 512, 1023, 1024};
    r->pos = dm_malloc((DM_COUNT(fixed) + 2) * sizeof *r->pos);
    if (!r->pos) return no_memory(e);
    int32_t n = (int32_t)r->n;
    for (size_t i = 0; i < DM_COUNT(fixed); i++)
        if (fixed[i] < n - 2) r->pos[r->npos++] = fixed[i];
    if (n >= 2) r->pos[r->npos++] = n - 2;
    r->pos[r->npos++] = n - 1;
    return 0;
}

static int compare_i32(const void *a, const void *b) {
    int32_t x = *(const int32_t *)a, y = *(const int32_t *)b;
    return (x > y) - (x < y);
}

/* Cuts are those that the file names. */
static int find_cuts(vref *r, dm_err *e) {
    r->cut = dm_malloc((r->count + 1) * sizeof *r->cut);
    if (!r->cut) return no_memory(e);
    for (size_t i = 0; i < r->count; i++) {
        if (strncmp(r->tensor[i].name, "cut", 3) != 0) continue;
        char *end;
        long p = strtol(r->tensor[i].name + 3, &end, 10);
        if (*end != '.' || p < 1 || p > r->n) return dm_err_set(e, DM_EFORMAT, WHERE, "tensor %.100s: a cut outside 1 to %lld", r->tensor[i].name, (long long)r->n);
        r->cut[r->ncut++] = (int32_t)p;
    }
    qsort(r->cut, (size_t)r->ncut, sizeof *r->cut, compare_i32);
    int64_t kept = 0;
    for (int64_t i = 0; i < r->ncut; i++)
        if (i == 0 || r->cut[i] != r->cut[kept - 1]) r->cut[kept++] = r->cut[i];
    r->ncut = kept;
    return 0;
}

/* ---- hash files ------------------------------------------------------------------------------------------- */

bool vref_parse_line(char *line, vref_tensor *out) {
    char *save, *name = strtok_r(line, " ", &save), *dtype = strtok_r(NULL, " ", &save), *ndim = strtok_r(NULL, " ", &save);
    memset(out, 0, sizeof *out);
    if (!name || !dtype || !ndim || !model_dtype_parse(dtype, &out->dtype)) return false;
    out->name = name;
    char *end;
    long n = strtol(ndim, &end, 10);
    if (*end || n < 0 || n > MODEL_DIMS_MAX) return false;
    out->ndim = (int)n;
    out->bytes = model_dtype_size(out->dtype);
    for (long i = 0; i < n; i++) {
        char *d = strtok_r(NULL, " ", &save);
        out->dim[i] = d ? strtoll(d, &end, 10) : -1;
        if (out->dim[i] < 0 || *end || __builtin_mul_overflow(out->bytes, out->dim[i], &out->bytes)) return false;
    }
    char *hash = strtok_r(NULL, " ", &save);
    return hash && strlen(hash) == 64 && dm_unhex(out->sha256.b, hash, sizeof out->sha256.b) && !strtok_r(NULL, " ", &save);
}

static int read_lines(vref *r, char *p, dm_err *e) {
    size_t lines = 0, number = 1;
    for (const char *s = p; *s; s++) lines += *s == '\n';
    r->tensor = dm_calloc(lines + 2, sizeof *r->tensor);
    if (!r->tensor) return no_memory(e);
    char *save;
    for (char *line = strtok_r(p, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        number++;
        if (line[0] == '\0' || line[0] == '#') continue;
        if (!vref_parse_line(line, &r->tensor[r->count]))
            return dm_err_set(e, DM_EFORMAT, WHERE, "line %zu is not \"name dtype ndim dims sha256\"", number);
        r->count++;
    }
    return 0;
}

int vref_read_hashes(vref *r, dm_buf *text, const dm_config *c, dm_err *e) {
    char mode[16];
    long long n;
    unsigned long long seed;
    int full;
    memset(r, 0, sizeof *r);
    r->text = *text;
    *text = (dm_buf){0};
    char *p = (char *)r->text.p, *line_end = strchr(p, '\n');
    if (!line_end || sscanf(p, "# %*63s %15s n %lld seed %llu full %d", mode, &n, &seed, &full) != 4)
        return dm_err_set(e, DM_EFORMAT, WHERE, "the first line is not \"# NAME ref n N seed S full F\"");
    if (n < 1 || n > TOKENS_MAX) return dm_err_set(e, DM_EFORMAT, WHERE, "a run of %lld tokens", n);
    if (strcmp(mode, "ref") != 0 && strcmp(mode, "plain") != 0) return dm_err_set(e, DM_EFORMAT, WHERE, "unknown mode %s", mode);
    r->n = n, r->plain = mode[0] == 'p', r->full = full != 0;
    r->ids = dm_malloc((size_t)(n + 1) * sizeof *r->ids);
    if (!r->ids) return no_memory(e);
    int rc = dm_synth_tokens(r->ids, n + 1, seed, c->vocab_size, e);
    if (rc == 0) rc = choose_positions(r, e);
    if (rc == 0) rc = read_lines(r, line_end + 1, e);
    return rc < 0 ? rc : find_cuts(r, e);
}

/* ---- golden values ------------------------------------------------------------------------------------------ */

/* An I32 vector of the file, copied. */
static int take_i32(const st_file *f, const char *name, int32_t **out, int64_t *n, dm_err *e) {
    const model_tensor *t = st_find(f, name);
    if (!t || t->dtype != MODEL_I32 || t->ndim != 1 || t->dim[0] < 1 || t->dim[0] > TOKENS_MAX)
        return dm_err_set(e, DM_EFORMAT, WHERE, "has no tensor \"%s\" of 32-bit whole numbers", name);
    *n = t->dim[0];
    *out = dm_malloc((size_t)t->bytes);
    if (!*out) return no_memory(e);
    memcpy(*out, t->data, (size_t)t->bytes);
    return 0;
}

static int check_positions(const vref *r, dm_err *e) {
    for (int64_t i = 0; i < r->npos; i++)
        if (r->pos[i] < 0 || r->pos[i] >= r->n || (i > 0 && r->pos[i] <= r->pos[i - 1]))
            return dm_err_set(e, DM_EFORMAT, WHERE, "tensor pos is not an ascending list of positions below %lld", (long long)r->n);
    return 0;
}

int vref_read_golden(vref *r, const char *path, dm_err *e) {
    int64_t ids;
    memset(r, 0, sizeof *r);
    int rc = st_open(&r->file, path, e);
    if (rc < 0) {
        dm_err_prefix(e, "%.200s", path);
        return rc;
    }
    rc = take_i32(&r->file, "tokens", &r->ids, &ids, e);
    if (rc == 0) rc = take_i32(&r->file, "pos", &r->pos, &r->npos, e);
    if (rc < 0) return rc;
    r->golden = true;
    r->n = ids - 1;
    if (r->n < 1) return dm_err_set(e, DM_EFORMAT, WHERE, "tensor tokens must hold one id more than the run has tokens");
    r->tensor = dm_calloc(r->file.count + 1, sizeof *r->tensor);
    if (!r->tensor) return no_memory(e);
    r->plain = true;
    for (size_t i = 0; i < r->file.count; i++) {
        const model_tensor *t = &r->file.tensor[i];
        vref_tensor *v = &r->tensor[r->count++];
        *v = (vref_tensor){.name = t->name, .dtype = t->dtype, .ndim = t->ndim, .bytes = t->bytes, .data = t->data};
        memcpy(v->dim, t->dim, sizeof v->dim);
        if (t->dtype == MODEL_BF16 || t->dtype == MODEL_U8) r->plain = false; /* rounded values, packed rows */
        if (strcmp(t->name, "layers.0.attn.x") == 0) r->full = t->ndim > 0 && t->dim[0] == r->n && r->npos != r->n;
    }
    rc = check_positions(r, e);
    return rc < 0 ? rc : find_cuts(r, e);
}

void vref_free(vref *r) {
    dm_free(r->ids);
    dm_free(r->pos);
    dm_free(r->cut);
    dm_free(r->tensor);
    st_close(&r->file);
    dm_buf_free(&r->text);
    memset(r, 0, sizeof *r);
}
