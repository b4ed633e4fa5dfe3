/* The field cases about files and formats, by their ids: what went wrong elsewhere, tried here.
 *
 *   F01  hostile file: huge counts, lengths past the end, unknown types, offsets past the file, overflowing shapes
 *   F02  a tensor of an unknown type
 *   F03  a layer that is counted and not there
 *
 * GGUF files themselves are refused by their first bytes, so nothing in them can be believed; the same attacks on what is read
 * here, safetensors, are refused in words too.  (Every byte of headers and indexes is flipped in test_engine_safetensors and
 * test_engine_model.) */
#include "tests/lib/engine_files.h"

#include "engine/model_int.h"

#define SHARD3 "model-00003-of-00009.safetensors"

/* Refused in words, without taking memory for what the file claims. */
static void refused(const char *path, const char *word)
{
    dm_model *m;
    dm_err e;
    dm_memory_use before, after;
    dm_memory_use_get(&before);
    assert_err(DM_EMODEL, dm_model_open(&m, path, &e));
    dm_memory_use_get(&after);
    assert_null(m);
    assert_text(e.text, word);
    assert_true(after.anon_bytes - before.anon_bytes < (int64_t)64 << 20);
}

/* ---- F01 ------------------------------------------------------------------------------------------------ */

typedef struct bytes { uint8_t p[256]; size_t n; } bytes;
static void put(bytes *b, uint64_t v, int n)
{
    for (int i = 0; i < n; i++) b->p[b->n++] = (uint8_t)(v >> 8 * i);
}
static void put_text(bytes *b, uint64_t length, const char *s)
{
    put(b, length, 8);
    memcpy(b->p + b->n, s, strlen(s));
    b->n += strlen(s);
}
/* "GGUF", version, number of tensors, number of keys */
static bytes gguf(uint64_t tensors, uint64_t keys)
{
    bytes b = {.p = "GGUF", .n = 4};
    put(&b, 3, 4), put(&b, tensors, 8), put(&b, keys, 8);
    return b;
}
/* One tensor: name, dimensions, type, offset */
static void put_tensor(bytes *b, uint64_t d0, uint64_t d1, uint32_t type, uint64_t offset)
{
    put_text(b, 24, "blk.0.ffn_gate_exps.weig");
    put(b, 2, 4), put(b, d0, 8), put(b, d1, 8), put(b, type, 4), put(b, offset, 8);
}

static void f01_hostile_gguf_is_refused_at_once(void **s)
{
    (void)s;
    bytes cases[6];
    cases[0] = gguf((uint64_t)1 << 60, (uint64_t)1 << 60);
    cases[1] = gguf(0, 1), put_text(&cases[1], (uint64_t)1 << 62, "general.name"); /* a string past the end */
    cases[2] = gguf(0, 1), put_text(&cases[2], 1, "a"), put(&cases[2], 9, 4), put(&cases[2], 77, 4), put(&cases[2], 5, 8); /* an array of an unknown type */
    cases[3] = gguf(1, 0), put_tensor(&cases[3], 64, 64, 0, (uint64_t)1 << 40);
    cases[4] = gguf(1, 0), put_tensor(&cases[4], (uint64_t)1 << 33, (uint64_t)1 << 33, 0, 0); /* ne[0]·ne[1] overflows */
    cases[5] = (bytes){.p = "GGUF", .n = 4};
    mkdir(scratch("gguf"), 0755);
    for (size_t i = 0; i < DM_COUNT(cases); i++) {
        const char *file = in_dir(scratch("gguf"), "model.gguf");
        dm_config c;
        dm_err e;
        spit(file, cases[i].p, cases[i].n);
        refused(file, "GGUF");
        refused(scratch("gguf"), "model.gguf is a GGUF file; only checkpoints in the official safetensors layout");
        assert_err(DM_EMODEL, dm_config_read(&c, file, &e));
    }
}

static void f01_a_hostile_shard_is_refused_at_once(void **s)
{
    (void)s;
    static const struct { const char *old, *new_text, *word; } cases[] = {
        {"\"shape\":[4]", "\"shape\":[4611686018427387904,4]", "too large"},
        {"\"shape\":[4]", "\"shape\":[1152921504606846976]", "cut short"},
        {"\"dtype\":\"F32\",\"shape\":[4]", "\"dtype\":\"I4\",\"shape\":[4]", "unknown dtype I4"},
    };
    const char *dir = tiny_copy("hostile");
    for (size_t i = 0; i < DM_COUNT(cases); i++) {
        dm_buf b = slurp(in_dir(synthetic("tiny"), SHARD3));
        spit(in_dir(dir, SHARD3), b.p, b.n);
        dm_buf_free(&b);
        edit_header(in_dir(dir, SHARD3), cases[i].old, cases[i].new_text);
        refused(dir, cases[i].word);
    }
    uint8_t length[8] = {0, 0, 0, 0, 0, 0, 0, 0x10}; /* a header of 2^60 bytes */
    dm_buf b = slurp(in_dir(synthetic("tiny"), SHARD3));
    memcpy(b.p, length, 8);
    spit(in_dir(dir, SHARD3), b.p, b.n);
    dm_buf_free(&b);
    refused(dir, "claims a header of 1152921504606846976 bytes");
}

/* ---- F02 ------------------------------------------------------------------------------------------------- */

static void f02_a_tensor_of_an_unknown_type_is_named_with_it(void **s)
{
    (void)s;
    bytes b = gguf(1, 0); /* routed experts of type 39 */
    put_tensor(&b, 64, 64, 39, 0);
    spit(scratch("type39.gguf"), b.p, b.n);
    refused(scratch("type39.gguf"), "GGUF");
    const char *dir = tiny_copy("mxfp4");
    edit_header(in_dir(dir, SHARD3), "\"layers.1.ffn.experts.3.w1.weight\":{\"dtype\":\"I8\"", "\"layers.1.ffn.experts.3.w1.weight\":{\"dtype\":\"MXFP4\"");
    refused(dir, "tensor layers.1.ffn.experts.3.w1.weight: unknown dtype MXFP4");
    dir = tiny_copy("known"); /* a known type in the wrong place */
    edit_header(in_dir(dir, SHARD3), "\"layers.1.ffn.experts.3.w1.weight\":{\"dtype\":\"I8\"", "\"layers.1.ffn.experts.3.w1.weight\":{\"dtype\":\"BOOL\"");
    refused(dir, "layers.1.ffn.experts.3.w1.weight");
}

/* ---- F03 --------------------------------------------------------------------------------------------------- */

static void edit_count(const char *dir, const char *key, int n, int ratios)
{
    json_t *o = json_load_file(in_dir(dir, "config.json"), 0, NULL);
    json_object_set_new(o, key, json_integer(n));
    while ((int)json_array_size(json_object_get(o, "compress_ratios")) < ratios) json_array_append_new(json_object_get(o, "compress_ratios"), json_integer(0));
    json_dump_file(o, in_dir(dir, "config.json"), 0);
    json_decref(o);
}

static void f03_a_counted_layer_that_is_not_there_is_refused_in_words(void **s)
{
    (void)s;
    dm_model *m;
    dm_err e;
    const char *dir = tiny_copy("counted");
    edit_count(dir, "num_hidden_layers", 7, 8);
    refused(dir, "tensor layers.6.");
    edit_count(dir, "num_hidden_layers", 6, 8);
    /* the next-token layer: counted, and all of its tensors gone from the index */
    json_t *index = json_load_file(in_dir(dir, "model.safetensors.index.json"), 0, NULL), *map = json_object_get(index, "weight_map");
    const char *key;
    void *next;
    json_t *value;
    json_object_foreach_safe(map, next, key, value) if (strncmp(key, "mtp.", 4) == 0) json_object_del(map, key);
    json_dump_file(index, in_dir(dir, "model.safetensors.index.json"), 0);
    json_decref(index);
    refused(dir, "(to run without the MTP layer set num_nextn_predict_layers to 0)");
    edit_count(dir, "num_nextn_predict_layers", 0, 8);
    assert_ok_e(dm_model_open(&m, dir, &e), e); /* the way out that was named is one */
    assert_null(model_weights_of(m)->mtp);
    dm_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(f01_hostile_gguf_is_refused_at_once),
        cmocka_unit_test(f01_a_hostile_shard_is_refused_at_once),
        cmocka_unit_test(f02_a_tensor_of_an_unknown_type_is_named_with_it),
        cmocka_unit_test(f03_a_counted_layer_that_is_not_there_is_refused_in_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
