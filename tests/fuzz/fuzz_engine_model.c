/* A model directory: index and headers of its shards against a configuration that stays the same (the smallest there
 * is).  What opens must have every tensor of the configuration, and its description must be good.
 *
 * Parts of an input: the index, or nothing for a directory without one; the header of shard "a" (or of the only file);
 * the header of shard "b".  In them, E being the list of the tensors that the configuration wants:
 *   \x01     E whole               \x02 k   E without number k
 *   \x03 k   the name of number k  \x04 k   what stands behind it
 * where an entry is "name":{dtype, shape, data_offsets} in a header and "name":"a" in the index. */
#include <jansson.h>

#include "engine/model_obj_int.h"
#include "tests/fuzz/lib.h"

enum { WANTS_MAX = 256 };
typedef struct want { char name[96], body[160]; } want;
static struct { want list[WANTS_MAX]; size_t n; int64_t bytes; } wants;

static int collect(void *ctx, model_want *w)
{
    (void)ctx;
    FUZZ_CHECK(wants.n < WANTS_MAX);
    want *x = &wants.list[wants.n++];
    int64_t end = wants.bytes + model_want_bytes(w);
    char shape[48];
    if (w->ndim == 1) snprintf(shape, sizeof shape, "%lld", (long long)w->dim[0]);
    else snprintf(shape, sizeof shape, "%lld,%lld", (long long)w->dim[0], (long long)w->dim[1]);
    snprintf(x->name, sizeof x->name, "\"%s\"", w->name);
    snprintf(x->body, sizeof x->body, "{\"dtype\":\"%s\",\"shape\":[%s],\"data_offsets\":[%lld,%lld]}", model_dtype_name(w->dtype), shape,
             (long long)wants.bytes, (long long)end);
    wants.bytes = end;
    return 0;
}

static void collect_wants(void)
{
    dm_config c;
    dm_err e = {0};
    model_table t;
    const char *text = fuzz_config(1);
    FUZZ_OK(dm_config_read(&c, fuzz_file(0, text, strlen(text), 0), &e));
    FUZZ_OK(model_table_init(&t, &c, &e));
    FUZZ_OK(model_table_walk(&t, &c, collect, NULL));
    model_table_free(&t);
    fuzz_dir_file("config.json", text, strlen(text), 0);
}

static const char *body_of(size_t k, bool index) { return index ? "\"a\"" : wants.list[k].body; }

static void put_all(dm_buf *out, bool index, size_t without)
{
    bool first = true;
    for (size_t k = 0; k < wants.n; k++) {
        if (k == without) continue;
        FUZZ_OK(dm_buf_printf(out, "%s%s:%s", first ? "" : ",", wants.list[k].name, body_of(k, index)));
        first = false;
    }
}

static void expand(dm_buf *out, fuzz_bytes in, bool index)
{
    while (in.n) {
        uint8_t c = fuzz_byte(&in);
        size_t k = c >= 2 && c <= 4 ? fuzz_byte(&in) % wants.n : wants.n;
        if (c == 1 || c == 2) put_all(out, index, k);
        else if (c == 3) FUZZ_OK(dm_buf_str(out, wants.list[k].name));
        else if (c == 4) FUZZ_OK(dm_buf_str(out, body_of(k, index)));
        else FUZZ_OK(dm_buf_byte(out, c));
    }
}

static void write_shard(const char *name, fuzz_bytes part)
{
    dm_buf b = {0};
    FUZZ_OK(dm_buf_append(&b, "\0\0\0\0\0\0\0", 8));
    expand(&b, part, false);
    for (int i = 0; i < 8; i++) b.p[i] = (uint8_t)((uint64_t)(b.n - 8) >> 8 * i);
    fuzz_dir_file(name, b.p, b.n, (size_t)wants.bytes);
    dm_buf_free(&b);
}

static void write_files(fuzz_bytes in)
{
    dm_buf index = {0};
    fuzz_bytes part = fuzz_part(&in);
    expand(&index, part, true);
    fuzz_dir_file("model.safetensors.index.json", index.n ? index.p : NULL, index.n, 0);
    write_shard(index.n ? "a" : "model.safetensors", fuzz_part(&in));
    if (index.n) write_shard("b", fuzz_part(&in));
    dm_buf_free(&index);
}

static int check_want(void *ctx, model_want *w)
{
    const model_tensor *t = model_find(ctx, w->name);
    FUZZ_CHECK(t != NULL && t->bytes == model_want_bytes(w) && (uintptr_t)t->data % (uintptr_t)model_dtype_size(t->dtype) == 0);
    return 0;
}

static void check_model(const dm_model *m)
{
    dm_err e = {0};
    model_table t;
    dm_hash h;
    FUZZ_OK(model_table_init(&t, dm_model_config(m), &e));
    FUZZ_OK(model_table_walk(&t, dm_model_config(m), check_want, (void *)(uintptr_t)m));
    model_table_free(&t);
    for (int way = 0; way < 4; way++) {
        dm_buf out = {0};
        FUZZ_OK(dm_model_inspect(m, way & 1, way & 2, &out, &e));
        json_t *o = way & 2 ? json_loadb(dm_buf_cstr(&out), out.n, JSON_REJECT_DUPLICATES, NULL) : NULL;
        if (way & 2 ? !o : !dm_utf8_valid(out.p, out.n)) FUZZ_FAIL("inspect: %s", dm_buf_cstr(&out));
        json_decref(o);
        dm_buf_free(&out);
    }
    FUZZ_OK(dm_model_fingerprint(m, NULL, &h, NULL, NULL, &e));
}

int FUZZ_ENTRY(const uint8_t *data, size_t n)
{
    dm_model *m;
    dm_err e = {0};
    if (!wants.n) collect_wants();
    write_files((fuzz_bytes){data, n});
    int rc = dm_model_open(&m, fuzz_dir(), &e);
    if (rc < 0) fuzz_told(rc, &e);
    else check_model(m);
    dm_model_close(m);
    return 0;
}
