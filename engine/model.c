/* model.c — opening a model directory: index, shards, and every tensor against the configuration. */
#include <errno.h>
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "engine/model_obj_int.h"

#define WHERE "model"
#define INDEX_NAME "model.safetensors.index.json"
#define SINGLE_NAME "model.safetensors"
#define INDEX_BYTES_MAX ((size_t)256 << 20)
#define SHARDS_MAX 65536

static int no_memory(dm_err *e) { return dm_err_set(e, DM_ENOMEM, WHERE, "out of memory"); }

/* ---- lookup ---------------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b) { return strcmp(((const model_tensor *)a)->name, ((const model_tensor *)b)->name); }

const model_tensor *model_find(const dm_model *m, const char *name) {
    const model_tensor key = {.name = name};
    return m->ntensors ? bsearch(&key, m->tensor, m->ntensors, sizeof key, by_name) : NULL;
}

/* ---- shards ------------------------------------------------------------------------------------ */

/* The index comes from outside: a shard is a plain file name inside the directory. */
static bool plain_name(const char *s) { return s[0] && s[0] != '.' && !strchr(s, '/') && strlen(s) < 256; }

static int open_shard(dm_model *m, const char *name, dm_err *e) {
    char *path = dm_path_join(m->dir, name);
    m->shard_name[m->nshards] = dm_strdup(name);
    if (!path || !m->shard_name[m->nshards]) {
        dm_free(path);
        dm_free(m->shard_name[m->nshards]);
        return no_memory(e);
    }
    int rc = st_open(&m->shard[m->nshards], path, e);
    dm_free(path);
    if (rc == DM_ENOENT) rc = dm_err_set(e, DM_EMODEL, WHERE, "shard %.120s is missing: download it again or repair the index", name);
    else if (rc < 0) dm_err_prefix(e, "%.120s", name);
    if (rc < 0) dm_free(m->shard_name[m->nshards]);
    else m->nshards++;
    return rc;
}

static int room_for_shards(dm_model *m, size_t n, dm_err *e) {
    m->shard = dm_calloc(n, sizeof *m->shard);
    m->shard_name = dm_calloc(n, sizeof *m->shard_name);
    return m->shard && m->shard_name ? 0 : no_memory(e);
}

/* files: {name: number}, filled in order of first appearance */
static int open_indexed_shards(dm_model *m, json_t *map, json_t *files, dm_err *e) {
    const char *tensor;
    json_t *value;
    json_object_foreach(map, tensor, value) {
        const char *name = json_string_value(value);
        if (!name || !plain_name(name)) return dm_err_set(e, DM_EMODEL, WHERE, "%s: the shard of tensor %.120s is not a file name", INDEX_NAME, tensor);
        if (json_object_get(files, name)) continue;
        if (json_object_set_new(files, name, json_integer((json_int_t)json_object_size(files))) < 0) return no_memory(e);
    }
    size_t n = json_object_size(files);
    if (n == 0 || n > SHARDS_MAX) return dm_err_set(e, DM_EMODEL, WHERE, "%s: names %zu shards", INDEX_NAME, n);
    int rc = room_for_shards(m, n, e);
    json_object_foreach(files, tensor, value)
        if (rc == 0) rc = open_shard(m, tensor, e);
    return rc;
}

static int take_indexed_tensors(dm_model *m, json_t *map, json_t *files, dm_err *e) {
    const char *name;
    json_t *value;
    m->tensor = dm_calloc(json_object_size(map), sizeof *m->tensor);
    if (!m->tensor) return no_memory(e);
    json_object_foreach(map, name, value) {
        int shard = (int)json_integer_value(json_object_get(files, json_string_value(value)));
        const model_tensor *t = st_find(&m->shard[shard], name);
        if (!t)
            return dm_err_set(e, DM_EMODEL, WHERE, "tensor %.120s is not in %.120s, where the index puts it", name, m->shard_name[shard]);
        m->tensor[m->ntensors] = *t;
        m->tensor[m->ntensors++].shard = shard;
    }
    return 0;
}

static int read_index(dm_model *m, const dm_buf *text, dm_err *e) {
    json_error_t at;
    json_t *o = json_loadb(dm_buf_cstr(text), text->n, JSON_REJECT_DUPLICATES, &at);
    if (!o && json_error_code(&at) == json_error_out_of_memory) return no_memory(e);
    if (!o) return dm_err_set(e, DM_EMODEL, WHERE, "%s is not JSON: line %d: %.200s", INDEX_NAME, at.line, at.text);
    json_t *map = json_object_get(o, "weight_map"), *files = json_object();
    int rc = 0;
    if (!json_is_object(map)) rc = dm_err_set(e, DM_EMODEL, WHERE, "%s has no weight_map", INDEX_NAME);
    else if (!files) rc = no_memory(e);
    if (rc == 0) rc = open_indexed_shards(m, map, files, e);
    if (rc == 0) rc = take_indexed_tensors(m, map, files, e);
    json_decref(files);
    json_decref(o);
    return rc;
}

static int open_single(dm_model *m, dm_err *e) {
    int rc = room_for_shards(m, 1, e);
    if (rc == 0) rc = open_shard(m, SINGLE_NAME, e);
    if (rc < 0) return rc;
    const st_file *f = &m->shard[0];
    m->tensor = dm_calloc(f->count + 1, sizeof *m->tensor);
    if (!m->tensor) return no_memory(e);
    if (f->count) memcpy(m->tensor, f->tensor, f->count * sizeof *m->tensor);
    m->ntensors = f->count;
    return 0;
}

static int open_files(dm_model *m, dm_err *e) {
    char *path = dm_path_join(m->dir, INDEX_NAME), *single = dm_path_join(m->dir, SINGLE_NAME);
    dm_buf text = {0};
    int rc;
    if (!path || !single) rc = no_memory(e);
    else if (dm_path_exists(path)) {
        rc = dm_file_read(path, INDEX_BYTES_MAX, &text, e);
        if (rc >= 0) rc = read_index(m, &text, e);
    } else if (dm_path_exists(single)) rc = open_single(m, e);
    else rc = dm_err_set(e, DM_EMODEL, WHERE, "has neither %s nor %s", INDEX_NAME, SINGLE_NAME);
    dm_buf_free(&text);
    dm_free(path);
    dm_free(single);
    if (rc < 0) return rc;
    if (m->ntensors) qsort(m->tensor, m->ntensors, sizeof *m->tensor, by_name);
    m->used = dm_calloc(m->ntensors + 1, sizeof *m->used);
    return m->used ? 0 : no_memory(e);
}

/* ---- tensors against the configuration ------------------------------------------------------------ */

static void shape_text(char *out, size_t cap, int ndim, const int64_t *dim) {
    size_t n = (size_t)snprintf(out, cap, "[");
    for (int i = 0; i < ndim && n < cap; i++) n += (size_t)snprintf(out + n, cap - n, i ? ", %lld" : "%lld", (long long)dim[i]);
    if (n < cap) snprintf(out + n, cap - n, "]");
}

/* Raw bytes travel under several names: packed FP4 as I8 or U8, ue8m0 scales also as U8. */
static bool dtype_fits(model_dtype want, model_dtype have) {
    return want == have || (have == MODEL_U8 && (want == MODEL_I8 || want == MODEL_F8_E8M0));
}

static int check_tensor(const dm_model *m, const model_want *w, const model_tensor *t, dm_err *e) {
    char want[64], have[64];
    bool same = t->ndim == w->ndim;
    for (int i = 0; same && i < w->ndim; i++) same = t->dim[i] == w->dim[i];
    if (same && dtype_fits(w->dtype, t->dtype)) return 0;
    shape_text(want, sizeof want, w->ndim, w->dim);
    shape_text(have, sizeof have, t->ndim, t->dim);
    return dm_err_set(e, DM_EMODEL, WHERE, "tensor %.120s in %.80s is %s %s, but the configuration wants %s %s", w->name, m->shard_name[t->shard],
                      model_dtype_name(t->dtype), have, model_dtype_name(w->dtype), want);
}

static int align_tensor(dm_model *m, model_tensor *t, dm_err *e) {
    if ((uintptr_t)t->data % (uintptr_t)model_dtype_size(t->dtype) == 0) return 0;
    model_copy *c = dm_aligned(64, (sizeof *c + (size_t)t->bytes + 63) / 64 * 64);
    if (!c) return no_memory(e);
    c->next = m->copies;
    m->copies = c;
    memcpy(c->data, t->data, (size_t)t->bytes);
    t->data = c->data;
    return 0;
}

typedef struct placing { dm_model *m; dm_err *e; } placing;

/* A matrix is what its tensor says: only the shape must be the configuration's. */
static void adopt_kind(model_want *w, const model_tensor *t) {
    bool packed = t->ndim == 2 && t->dim[0] == w->mat->out && t->dim[1] == w->mat->in / 2;
    if (t->dtype == MODEL_BF16) model_want_kind(w, false, true);
    else if (t->dtype == MODEL_F8_E4M3) model_want_kind(w, false, false);
    else if (w->part == MODEL_PART_EXPERT && packed && (t->dtype == MODEL_I8 || t->dtype == MODEL_U8)) model_want_kind(w, true, false);
}

static int place(void *ctx, model_want *w) {
    placing *p = ctx;
    dm_model *m = p->m;
    model_tensor *t = (model_tensor *)(uintptr_t)model_find(m, w->name);
    if (!t) {
        const char *way_out = dm_str_prefix(w->name, "mtp.") ? " (to run without the MTP layer set num_nextn_predict_layers to 0)" : "";
        return dm_err_set(p->e, DM_EMODEL, WHERE, "tensor %.120s is missing%s", w->name, way_out);
    }
    if (w->mat) adopt_kind(w, t);
    int rc = check_tensor(m, w, t, p->e);
    if (rc == 0) rc = align_tensor(m, t, p->e);
    if (rc < 0) return rc;
    m->used[t - m->tensor] = true;
    m->nused++;
    *w->slot = t->data;
    return 0;
}

/* The router trusts these: distinct experts, all of them existing. */
static int check_hash_table(const dm_config *c, int layer, const int64_t *ids, dm_err *e) {
    int k = c->num_experts_per_tok;
    for (int64_t v = 0; v < c->vocab_size; v++, ids += k)
        for (int i = 0; i < k; i++) {
            bool twice = false;
            for (int j = 0; j < i; j++) twice |= ids[j] == ids[i];
            if (ids[i] < 0 || ids[i] >= c->n_routed_experts || twice)
                return dm_err_set(e, DM_EMODEL, WHERE, "tensor layers.%d.ffn.gate.tid2eid: the row of token %lld %s", layer, (long long)v,
                                  twice ? "names an expert twice" : "names an expert that does not exist");
        }
    return 0;
}

static int place_all(dm_model *m, dm_err *e) {
    int rc = model_table_init(&m->table, &m->config, e);
    if (rc < 0) return rc;
    placing p = {m, e};
    rc = model_table_walk(&m->table, &m->config, place, &p);
    if (rc == 0) { /* from here on the configuration says what the files are */
        const model_block *b = &m->table.layer[0];
        m->config.weights_bf16 = b->wq_a.bf16;
        m->config.expert_fp4 = b->expert[0].w1.fp4, m->config.expert_bf16 = b->expert[0].w1.bf16;
    }
    for (int i = 0; i < m->config.num_hash_layers && rc == 0; i++) rc = check_hash_table(&m->config, i, m->table.layer[i].tid2eid, e);
    return rc;
}

/* ---- the object ------------------------------------------------------------------------------------ */

static int open_model(dm_model *m, const char *dir, dm_err *e) {
    int rc = dm_config_read(&m->config, dir, e);
    if (rc == DM_ENOENT) { /* "no such file" is about the model, not about the system */
        if (e) e->code = DM_EMODEL;
        return DM_EMODEL;
    }
    if (rc < 0) return rc;
    m->dir = dm_strdup(dir);
    if (!m->dir) return no_memory(e);
    rc = open_files(m, e);
    if (rc == 0) rc = place_all(m, e);
    if (rc < 0) dm_err_prefix(e, "%.200s", dir);
    return rc;
}

int dm_model_open(dm_model **out, const char *dir, dm_err *e) {
    *out = NULL;
    dm_model *m = dm_calloc(1, sizeof *m);
    if (!m) return no_memory(e);
    int rc = open_model(m, dir, e);
    if (rc < 0) dm_model_close(m);
    else *out = m;
    return rc;
}

void dm_model_close(dm_model *m) {
    if (!m) return;
    for (int i = 0; i < m->nshards; i++) {
        st_close(&m->shard[i]);
        dm_free(m->shard_name[i]);
    }
    while (m->copies) {
        model_copy *next = m->copies->next;
        dm_free(m->copies);
        m->copies = next;
    }
    model_table_free(&m->table);
    dm_free(m->shard);
    dm_free(m->shard_name);
    dm_free(m->tensor);
    dm_free(m->used);
    dm_free(m->dir);
    dm_free(m);
}

const dm_config *dm_model_config(const dm_model *m) { return &m->config; }
const char *dm_model_dir(const dm_model *m) { return m->dir; }
const model_weights *model_weights_of(const dm_model *m) { return &m->table.w; }
