/* One safetensors file: whatever its header says, every tensor that is accepted lies inside the file, is as long as its
 * shape, and overlaps none.
 *
 * An input that begins with '{' is a header: its length goes in front and DATA_BYTES of data behind.  Any other is the
 * file itself. */
#include "engine/safetensors_int.h"
#include "tests/fuzz/lib.h"

enum { DATA_BYTES = 4096 };

static void check_tensor(const st_file *f, const model_tensor *t)
{
    static volatile uint8_t sink;
    int64_t bytes = model_dtype_size(t->dtype);
    FUZZ_CHECK(t->ndim >= 0 && t->ndim <= MODEL_DIMS_MAX);
    for (int i = 0; i < t->ndim; i++) {
        FUZZ_CHECK(t->dim[i] >= 0);
        bytes = t->dim[i] && bytes ? bytes * t->dim[i] : 0;
    }
    FUZZ_CHECK(t->bytes == bytes);
    FUZZ_CHECK(t->data >= f->map + f->data_at && (size_t)(t->data - f->map) <= f->size && (size_t)bytes <= f->size - (size_t)(t->data - f->map));
    if (bytes) sink = t->data[0], sink = t->data[bytes - 1];
    (void)sink;
    FUZZ_CHECK(st_find(f, t->name) == t);
}

static bool apart(const model_tensor *a, const model_tensor *b)
{
    return a->bytes == 0 || b->bytes == 0 || a->data + a->bytes <= b->data || b->data + b->bytes <= a->data;
}

static void check_file(const st_file *f)
{
    for (size_t i = 0; i < f->count; i++) {
        check_tensor(f, &f->tensor[i]);
        if (i) FUZZ_CHECK(strcmp(f->tensor[i - 1].name, f->tensor[i].name) < 0);
        for (size_t j = 0; j < i && i < 64; j++) FUZZ_CHECK(apart(&f->tensor[i], &f->tensor[j]));
    }
    FUZZ_CHECK(st_find(f, "no such name, since this one has a \x01") == NULL);
}

static const char *write_header(const uint8_t *data, size_t n)
{
    dm_buf b = {0};
    uint8_t len[8];
    for (int i = 0; i < 8; i++) len[i] = (uint8_t)((uint64_t)n >> 8 * i);
    FUZZ_OK(dm_buf_append(&b, len, 8));
    FUZZ_OK(dm_buf_append(&b, data, n));
    const char *path = fuzz_file(0, b.p, b.n, DATA_BYTES);
    dm_buf_free(&b);
    return path;
}

int FUZZ_ENTRY(const uint8_t *data, size_t n)
{
    st_file f;
    dm_err e = {0};
    int rc = st_open(&f, n && data[0] == '{' ? write_header(data, n) : fuzz_file(0, data, n, 0), &e);
    if (rc < 0) fuzz_told(rc, &e);
    else check_file(&f);
    st_close(&f);
    return 0;
}
