/* safetensors.c — reading one safetensors file; nothing in it is believed before it is checked. */
#include "engine/safetensors_int.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define WHERE "model"

/* ---- dtypes -------------------------------------------------------------------------------------- */

static const struct { const char *name; int size; } dtypes[MODEL_DTYPES] = {
    [MODEL_BF16] = {"BF16", 2},       [MODEL_F16] = {"F16", 2},         [MODEL_F32] = {"F32", 4},         [MODEL_F64] = {"F64", 8},
    [MODEL_F8_E4M3] = {"F8_E4M3", 1}, [MODEL_F8_E5M2] = {"F8_E5M2", 1}, [MODEL_F8_E8M0] = {"F8_E8M0", 1}, [MODEL_I8] = {"I8", 1},
    [MODEL_U8] = {"U8", 1},           [MODEL_I16] = {"I16", 2},         [MODEL_U16] = {"U16", 2},         [MODEL_I32] = {"I32", 4},
    [MODEL_U32] = {"U32", 4},         [MODEL_I64] = {"I64", 8},         [MODEL_U64] = {"U64", 8},         [MODEL_BOOL] = {"BOOL", 1},
};

const char *model_dtype_name(model_dtype t) { return dtypes[t].name; }
int model_dtype_size(model_dtype t) { return dtypes[t].size; }

bool model_dtype_parse(const char *s, model_dtype *out) {
    for (int i = 0; i < MODEL_DTYPES; i++)
        if (strcmp(s, dtypes[i].name) == 0) return *out = (model_dtype)i, true;
    return false;
}

/* ---- one entry of the header ------------------------------------------------------------------------ */

static int bad(dm_err *e, const char *name, const char *what) {
    return dm_err_set(e, DM_EMODEL, WHERE, "tensor %.120s: %s", name, what);
}

/* shape × element size, refused when it passes `limit` (the data's length), so that nothing overflows. */
static int read_shape(model_tensor *t, const json_t *shape, int64_t limit, dm_err *e) {
    if (!json_is_array(shape)) return bad(e, t->name, "shape is missing or not an array");
    size_t n = json_array_size(shape);
    if (n > MODEL_DIMS_MAX) return bad(e, t->name, "has too many dimensions");
    int64_t bytes = model_dtype_size(t->dtype);
    bool empty = false;
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(shape, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0) return bad(e, t->name, "shape must hold whole numbers from 0 up");
        t->dim[i] = json_integer_value(v);
        if (t->dim[i] == 0) empty = true;
        else if (__builtin_mul_overflow(bytes, t->dim[i], &bytes)) return bad(e, t->name, "shape is too large");
    }
    t->ndim = (int)n;
    t->bytes = empty ? 0 : bytes;
    if (t->bytes > limit)
        return dm_err_set(e, DM_EMODEL, WHERE, "tensor %.120s: its shape needs %lld bytes, but the file has %lld: the file is cut short or damaged",
                          t->name, (long long)t->bytes, (long long)limit);
    return 0;
}

static int read_offsets(model_tensor *t, const st_file *f, const json_t *pair, dm_err *e) {
    int64_t length = (int64_t)(f->size - f->data_at);
    const json_t *a = json_array_get(pair, 0), *b = json_array_get(pair, 1);
    if (json_array_size(pair) != 2 || !json_is_integer(a) || !json_is_integer(b)) return bad(e, t->name, "data_offsets must be two whole numbers");
    int64_t begin = json_integer_value(a), end = json_integer_value(b);
    if (begin < 0 || end < begin) return bad(e, t->name, "data_offsets run backwards");
    if (end > length)
        return dm_err_set(e, DM_EMODEL, WHERE, "tensor %.120s: ends at byte %lld of the data, but the file has %lld: the file is cut short", t->name,
                          (long long)end, (long long)length);
    if (end - begin != t->bytes)
        return dm_err_set(e, DM_EMODEL, WHERE, "tensor %.120s: data_offsets span %lld bytes, but its shape needs %lld", t->name,
                          (long long)(end - begin), (long long)t->bytes);
    t->data = f->map + f->data_at + begin;
    return 0;
}

static int read_tensor(model_tensor *t, const st_file *f, const json_t *o, dm_err *e) {
    if (!json_is_object(o)) return bad(e, t->name, "its entry is not an object");
    const char *dtype = json_string_value(json_object_get(o, "dtype"));
    if (!dtype) return bad(e, t->name, "dtype is missing");
    if (!model_dtype_parse(dtype, &t->dtype)) return dm_err_set(e, DM_EMODEL, WHERE, "tensor %.120s: unknown dtype %.40s", t->name, dtype);
    int rc = read_shape(t, json_object_get(o, "shape"), (int64_t)(f->size - f->data_at), e);
    return rc < 0 ? rc : read_offsets(t, f, json_object_get(o, "data_offsets"), e);
}

/* ---- the header ------------------------------------------------------------------------------------- */

static int by_name(const void *a, const void *b) { return strcmp(((const model_tensor *)a)->name, ((const model_tensor *)b)->name); }

static int by_data(const void *a, const void *b) {
    const model_tensor *x = *(const model_tensor *const *)a, *y = *(const model_tensor *const *)b;
    if (x->data != y->data) return x->data < y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

static int check_overlap(const st_file *f, dm_err *e) {
    if (f->count < 2) return 0;
    const model_tensor **order = dm_malloc(f->count * sizeof *order);
    if (!order) return dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    for (size_t i = 0; i < f->count; i++) order[i] = &f->tensor[i];
    qsort(order, f->count, sizeof *order, by_data);
    int rc = 0;
    for (size_t i = 1; i < f->count && rc == 0; i++)
        if (order[i - 1]->data + order[i - 1]->bytes > order[i]->data)
            rc = dm_err_set(e, DM_EMODEL, WHERE, "tensor %.120s overlaps tensor %.120s", order[i - 1]->name, order[i]->name);
    dm_free(order);
    return rc;
}

/* Names are copied out of the JSON tree into one run of text. */
static int copy_names(st_file *f, json_t *header, size_t *count, dm_err *e) {
    const char *key;
    json_t *value;
    size_t text = 0, n = 0;
    json_object_foreach(header, key, value) text += strlen(key) + 1, n++;
    f->tensor = dm_calloc(n + 1, sizeof *f->tensor);
    char *p = f->names = dm_malloc(text + 1);
    if (!f->tensor || !p) return dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    *count = 0;
    json_object_foreach(header, key, value) {
        if (strcmp(key, "__metadata__") == 0) continue;
        size_t len = strlen(key) + 1;
        memcpy(p, key, len);
        f->tensor[(*count)++].name = p;
        p += len;
    }
    return 0;
}

static int read_header(st_file *f, json_t *header, dm_err *e) {
    if (!json_is_object(header)) return dm_err_set(e, DM_EMODEL, WHERE, "the header is not a JSON object");
    int rc = copy_names(f, header, &f->count, e);
    for (size_t i = 0; i < f->count && rc == 0; i++) rc = read_tensor(&f->tensor[i], f, json_object_get(header, f->tensor[i].name), e);
    if (rc < 0) return rc;
    qsort(f->tensor, f->count, sizeof *f->tensor, by_name);
    return check_overlap(f, e);
}

static int parse(st_file *f, dm_err *e) {
    if (f->size < 8) return dm_err_set(e, DM_EMODEL, WHERE, "is only %zu bytes long: not a safetensors file", f->size);
    uint64_t len = 0;
    for (int i = 7; i >= 0; i--) len = len << 8 | f->map[i];
    if (len > ST_HEADER_BYTES_MAX) return dm_err_set(e, DM_EMODEL, WHERE, "claims a header of %llu bytes: not a safetensors file", (unsigned long long)len);
    if (len > f->size - 8)
        return dm_err_set(e, DM_EMODEL, WHERE, "claims a header of %llu bytes, but has only %zu: the file is cut short", (unsigned long long)len, f->size - 8);
    f->data_at = 8 + (size_t)len;
    json_error_t at;
    json_t *header = json_loadb((const char *)f->map + 8, (size_t)len, JSON_REJECT_DUPLICATES, &at);
    if (!header && json_error_code(&at) == json_error_out_of_memory) return dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    if (!header) return dm_err_set(e, DM_EMODEL, WHERE, "the header is not JSON: %.200s", at.text);
    int rc = read_header(f, header, e);
    json_decref(header);
    return rc;
}

/* ---- the file ----------------------------------------------------------------------------------------- */

static int map_file(st_file *f, int fd, dm_err *e) {
    struct stat st;
    if (fstat(fd, &st) < 0) return dm_err_sys(e, errno, WHERE, "cannot stat");
    if (!S_ISREG(st.st_mode)) return dm_err_set(e, DM_EMODEL, WHERE, "is not a regular file");
    if (st.st_size == 0) return dm_err_set(e, DM_EMODEL, WHERE, "is empty");
    f->size = (size_t)st.st_size;
    f->dev = (int64_t)st.st_dev, f->ino = (int64_t)st.st_ino;
    f->mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
    void *p = mmap(NULL, f->size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (p == MAP_FAILED) return dm_err_sys(e, errno, WHERE, "cannot map");
    f->map = p;
    return 0;
}

int st_open(st_file *f, const char *path, dm_err *e) {
    memset(f, 0, sizeof *f);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hang us */
    if (fd < 0) return dm_err_sys(e, errno, WHERE, "cannot open");
    int rc = map_file(f, fd, e);
    close(fd);
    if (rc == 0) rc = parse(f, e);
    if (rc < 0) st_close(f);
    return rc;
}

void st_close(st_file *f) {
    if (f->map) munmap((void *)(uintptr_t)f->map, f->size);
    dm_free(f->tensor);
    dm_free(f->names);
    memset(f, 0, sizeof *f);
}

const model_tensor *st_find(const st_file *f, const char *name) {
    size_t lo = 0, hi = f->count;
    while (lo < hi) {
        size_t mid = lo + (hi - lo) / 2;
        int c = strcmp(name, f->tensor[mid].name);
        if (c == 0) return &f->tensor[mid];
        if (c < 0) hi = mid;
        else lo = mid + 1;
    }
    return NULL;
}
