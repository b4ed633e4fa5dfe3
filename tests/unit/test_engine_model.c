/* Opening a model directory: good ones in several shapes, bad ones with a sentence that names what is wrong. */
#include "tests/lib/engine_files.h"

#include "engine/model_int.h"

#define SHARD3 "model-00003-of-00009.safetensors" /* layer 1 */
#define INDEX "model.safetensors.index.json"

static dm_model *opened(const char *dir)
{
    dm_model *m;
    dm_err e;
    assert_ok_e(dm_model_open(&m, dir, &e), e);
    return m;
}

static void refused(const char *dir, const char *word, const char *word2)
{
    dm_model *m = (dm_model *)1;
    dm_err e;
    assert_err(DM_EMODEL, dm_model_open(&m, dir, &e));
    assert_null(m);
    assert_text(e.text, word);
    assert_text(e.text, word2);
    assert_null(strchr(e.text, '\n'));
}

static void a_whole_checkpoint_opens_and_every_weight_has_its_place(void **s)
{
    (void)s;
    dm_model *m = opened(synthetic("tiny"));
    const model_weights *w = model_weights_of(m);
    const dm_config *c = dm_model_config(m);
    assert_string_equal(dm_model_dir(m), synthetic("tiny"));
    assert_int_equal(c->num_hidden_layers, 6);
    assert_non_null(w->mtp);
    for (int i = 0; i < 6; i++) {
        const model_block *b = &w->layer[i];
        assert_int_equal(b->ratio, c->compress_ratio[i]);
        assert_int_equal(b->tid2eid != NULL, i < c->num_hash_layers);
        assert_int_equal(b->gate_bias == NULL, i < c->num_hash_layers);
        assert_int_equal(b->compressor.ape != NULL, b->ratio != 0);
        assert_int_equal(b->indexer.weights_proj != NULL, b->ratio == 4);
        for (int x = 0; x < c->n_routed_experts; x++) assert_non_null(b->expert[x].w2.scale);
        assert_true(b->expert[0].w1.fp4 && !b->shared.w1.fp4);
        assert_int_equal(b->wq_b.out, 4 * 512);
        assert_int_equal(b->wq_b.in, 128);
    }
    const model_tensor *t = model_find(m, "layers.2.attn.compressor.ape");
    assert_ptr_equal(t->data, w->layer[2].compressor.ape);
    assert_null(model_find(m, "layers.2.attn.compressor"));
    assert_null(model_find(m, ""));
    dm_model_close(m);
    dm_model_close(NULL);
}

static void directories_without_a_model_are_refused(void **s)
{
    (void)s;
    refused(scratch("nowhere"), "nowhere", "no such file");
    const char *dir = tiny_copy("noconfig");
    unlink(in_dir(dir, "config.json"));
    refused(dir, "config.json", "no such file");
    dir = tiny_copy("noindex");
    unlink(in_dir(dir, INDEX));
    refused(dir, "noindex", "neither");
}

static void a_missing_shard_is_named(void **s)
{
    (void)s;
    const char *dir = tiny_copy("missing");
    unlink(in_dir(dir, SHARD3));
    refused(dir, SHARD3, "is missing");
}

static void a_truncated_shard_is_named(void **s)
{
    (void)s;
    const char *dir = tiny_copy("short");
    struct stat st;
    assert_int_equal(stat(in_dir(dir, SHARD3), &st), 0);
    for (int64_t keep = st.st_size - 1; keep > 0; keep = keep * 2 / 3) {
        assert_int_equal(truncate(in_dir(dir, SHARD3), keep), 0);
        refused(dir, SHARD3, keep > 8 ? "cut short" : "not a safetensors file");
    }
    assert_int_equal(truncate(in_dir(dir, SHARD3), 0), 0);
    refused(dir, SHARD3, "empty");
}

static void a_tensor_of_another_shape_or_type_is_named(void **s)
{
    (void)s;
    const char *dir = tiny_copy("shape");
    edit_header(in_dir(dir, SHARD3), "\"layers.1.attn.wq_a.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[128,256]",
                "\"layers.1.attn.wq_a.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[256,128]");
    refused(dir, "layers.1.attn.wq_a.weight", "[256, 128]");
    dir = tiny_copy("dtype");
    edit_header(in_dir(dir, SHARD3), "\"layers.1.attn_norm.weight\":{\"dtype\":\"BF16\"", "\"layers.1.attn_norm.weight\":{\"dtype\":\"F16\"");
    refused(dir, "layers.1.attn_norm.weight", "F16");
    dir = tiny_copy("unknown");
    edit_header(in_dir(dir, SHARD3), "\"layers.1.attn_norm.weight\":{\"dtype\":\"BF16\"", "\"layers.1.attn_norm.weight\":{\"dtype\":\"Q8\"");
    refused(dir, "layers.1.attn_norm.weight", "unknown dtype Q8");
    dir = tiny_copy("rank");
    edit_header(in_dir(dir, SHARD3), "\"layers.1.attn_norm.weight\":{\"dtype\":\"BF16\",\"shape\":[256]",
                "\"layers.1.attn_norm.weight\":{\"dtype\":\"BF16\",\"shape\":[1,256]");
    refused(dir, "layers.1.attn_norm.weight", "[1, 256]");
}

static void a_hostile_header_length_is_refused(void **s)
{
    (void)s;
    static const uint64_t lengths[] = {0, 7, 1u << 27, INT64_MAX, UINT64_MAX};
    const char *dir = tiny_copy("header");
    dm_buf b = slurp(in_dir(dir, SHARD3));
    for (size_t i = 0; i < DM_COUNT(lengths); i++) {
        for (int k = 0; k < 8; k++) b.p[k] = (uint8_t)(lengths[i] >> 8 * k);
        spit(in_dir(dir, SHARD3), b.p, b.n);
        refused(dir, SHARD3, "header");
    }
    dm_buf_free(&b);
}

static void an_index_that_lies_is_refused(void **s)
{
    (void)s;
    const char *dir = tiny_copy("index");
    edit_file(in_dir(dir, INDEX), "\"layers.1.attn.attn_sink\": \"" SHARD3 "\"", "\"layers.1.attn.attn_sink\": \"model-00004-of-00009.safetensors\"");
    refused(dir, "layers.1.attn.attn_sink", "model-00004-of-00009.safetensors");
    dir = tiny_copy("lost");
    edit_file(in_dir(dir, INDEX), "\"layers.1.attn.attn_sink\"", "\"layers.1.attn.sunk\"");
    refused(dir, "layers.1.attn.sunk", "not in");
    static const char *const names[] = {"\"../config.json\"", "\"/etc/passwd\"", "\"\"", "\"..\"", "7", "null"};
    for (size_t i = 0; i < DM_COUNT(names); i++) {
        char entry[128];
        dir = tiny_copy("escape");
        snprintf(entry, sizeof entry, "\"layers.1.attn.attn_sink\": %s", names[i]);
        edit_file(in_dir(dir, INDEX), "\"layers.1.attn.attn_sink\": \"" SHARD3 "\"", entry);
        refused(dir, INDEX, "layers.1.attn.attn_sink");
    }
    static const char *const texts[] = {"", "{}", "[]", "{\"weight_map\": []}", "{\"weight_map\": {}}", "{\"weight_map\": {\"a\""};
    for (size_t i = 0; i < DM_COUNT(texts); i++) {
        spit(in_dir(dir, INDEX), texts[i], strlen(texts[i]));
        refused(dir, "model.safetensors.index.json", "");
    }
}

static void a_missing_tensor_is_named_with_the_way_out(void **s)
{
    (void)s;
    const char *dir = tiny_copy("without");
    edit_file(in_dir(dir, INDEX), "    \"layers.1.attn.attn_sink\": \"" SHARD3 "\",\n", "");
    refused(dir, "layers.1.attn.attn_sink", "is missing");
    dir = tiny_copy("withoutmtp");
    edit_file(in_dir(dir, INDEX), "    \"mtp.0.enorm.weight\": \"model-00009-of-00009.safetensors\",\n", "");
    refused(dir, "mtp.0.enorm.weight", "num_nextn_predict_layers");
    edit_file(in_dir(dir, "config.json"), "\"num_nextn_predict_layers\": 1", "\"num_nextn_predict_layers\": 0");
    dm_model *m = opened(dir);
    assert_null(model_weights_of(m)->mtp);
    dm_model_close(m);
}

static void experts_that_do_not_exist_are_refused_in_the_hash_table(void **s)
{
    (void)s;
    static const int64_t bad[] = {-1, 8, INT64_MAX, INT64_MIN};
    const char *dir = tiny_copy("hash");
    const char *shard = "model-00002-of-00009.safetensors";
    dm_buf b = slurp(in_dir(dir, shard));
    size_t at = 8 + (size_t)header_length(&b) + 100 * 2 * 8; /* the table comes first; row of token 100 */
    for (size_t i = 0; i < DM_COUNT(bad); i++) {
        memcpy(b.p + at, &bad[i], 8);
        spit(in_dir(dir, shard), b.p, b.n);
        refused(dir, "layers.0.ffn.gate.tid2eid", "token 100 names an expert that does not exist");
    }
    memcpy(b.p + at, b.p + at + 8, 8);
    spit(in_dir(dir, shard), b.p, b.n);
    refused(dir, "layers.0.ffn.gate.tid2eid", "token 100 names an expert twice");
    dm_buf_free(&b);
}

/* The format lets a header have any length, so data may lie at odd addresses. */
static void misaligned_data_is_read_as_well(void **s)
{
    (void)s;
    const char *dir = tiny_copy("odd");
    edit_header(in_dir(dir, SHARD3), "{\"__metadata__\":{\"format\":\"pt\"}", "{\"__metadata__\":{\"format\":\"p\"}");
    edit_header(in_dir(dir, "model-00002-of-00009.safetensors"), "{\"__metadata__\":{\"format\":\"pt\"}", "{\"__metadata__\":{\"format\":\"p\"}");
    dm_model *m = opened(dir), *good = opened(synthetic("tiny"));
    const model_weights *w = model_weights_of(m), *v = model_weights_of(good);
    assert_int_equal((uintptr_t)w->layer[1].attn_sink % 4, 0);
    assert_int_equal((uintptr_t)w->layer[0].tid2eid % 8, 0);
    assert_memory_equal(w->layer[1].attn_sink, v->layer[1].attn_sink, 4 * 4);
    assert_memory_equal(w->layer[0].tid2eid, v->layer[0].tid2eid, 512 * 2 * 8);
    assert_memory_equal(w->layer[1].attn_norm, v->layer[1].attn_norm, 256 * 2);
    dm_model_close(m);
    dm_model_close(good);
}

static void a_single_file_needs_no_index(void **s)
{
    (void)s;
    const char *from = synthetic("tiny"), *dir = scratch("single");
    json_t *all = json_object();
    dm_buf data = {0};
    assert_int_equal(mkdir(dir, 0755), 0);
    for (int i = 1; i <= 9; i++) {
        char name[64];
        const char *key;
        json_t *value;
        snprintf(name, sizeof name, "model-0000%d-of-00009.safetensors", i);
        dm_buf b = slurp(in_dir(from, name));
        size_t n = (size_t)header_length(&b);
        json_t *h = json_loadb((char *)b.p + 8, n, 0, NULL);
        json_object_del(h, "__metadata__");
        json_object_foreach(h, key, value) {
            json_t *at = json_object_get(value, "data_offsets");
            for (size_t k = 0; k < 2; k++) json_array_set_new(at, k, json_integer(json_integer_value(json_array_get(at, k)) + (json_int_t)data.n));
        }
        json_object_update(all, h);
        json_decref(h);
        assert_ok(dm_buf_append(&data, b.p + 8 + n, b.n - 8 - n));
        dm_buf_free(&b);
    }
    char *text = json_dumps(all, 0);
    write_safetensors(in_dir(dir, "model.safetensors"), text, strlen(text), data.p, data.n);
    free(text);
    json_decref(all);
    dm_buf_free(&data);
    dm_buf config = slurp(in_dir(from, "config.json"));
    spit(in_dir(dir, "config.json"), config.p, config.n);
    dm_buf_free(&config);
    dm_model *m = opened(dir);
    assert_non_null(model_weights_of(m)->mtp);
    dm_model_close(m);
}

/* A config of FP8 experts gives a checkpoint of them, and the tensors decide, whatever the config says. */
static void fp8_experts_are_told_by_their_tensors(void **s)
{
    (void)s;
    dm_err e;
    dm_buf b = slurp(test_data("vectors/tiny.config.json"));
    replace_in(&b, "\"expert_dtype\": \"fp4\"", "\"expert_dtype\": \"fp8\"");
    spit(scratch("fp8.json"), b.p, b.n);
    dm_buf_free(&b);
    const char *dir = scratch("fp8");
    assert_ok_e(dm_model_synth(scratch("fp8.json"), dir, 3, 2, NULL, NULL, &e), e);
    edit_file(in_dir(dir, "config.json"), "\"expert_dtype\": \"fp8\"", "\"expert_dtype\": \"fp4\"");
    dm_model *m = opened(dir);
    assert_false(dm_model_config(m)->expert_fp4);
    assert_false(model_weights_of(m)->layer[0].expert[0].w1.fp4);
    assert_int_equal(model_find(m, "layers.0.ffn.experts.0.w1.weight")->dim[1], 256);
    assert_int_equal(model_find(m, "layers.0.ffn.experts.0.w1.scale")->dim[1], 2);
    dm_model_close(m);
}

static void unknown_tensors_are_ignored_and_listed(void **s)
{
    (void)s;
    dm_err e;
    const char *dir = tiny_copy("extra");
    edit_header(in_dir(dir, SHARD3), "\"layers.1.attn.attn_sink\":", "\"extra.weight\":{\"dtype\":\"I8\",\"shape\":[0],\"data_offsets\":[0,0]},\"layers.1.attn.attn_sink\":");
    edit_file(in_dir(dir, INDEX), "\"weight_map\": {", "\"weight_map\": {\"extra.weight\": \"" SHARD3 "\",");
    dm_model *m = opened(dir);
    dm_buf out = {0};
    assert_ok_e(dm_model_inspect(m, false, true, &out, &e), e);
    json_t *o = json_loads(dm_buf_cstr(&out), 0, NULL);
    assert_int_equal(json_integer_value(json_object_get(o, "ignored")), 1);
    assert_int_equal(json_integer_value(json_object_get(o, "tensor_count")), 586);
    json_decref(o);
    dm_buf_clear(&out);
    assert_ok_e(dm_model_inspect(m, true, false, &out, &e), e);
    assert_text(dm_buf_cstr(&out), "ignored");
    assert_text(dm_buf_cstr(&out), "extra.weight");
    dm_buf_free(&out);
    dm_model_close(m);
}

static void inspection_sums_to_the_whole_in_both_forms(void **s)
{
    (void)s;
    dm_err e;
    dm_model *m = opened(synthetic("tiny"));
    for (int all = 0; all < 2; all++) {
        dm_buf out = {0};
        json_int_t tensors = 0, bytes = 0;
        size_t i;
        json_t *row;
        assert_ok_e(dm_model_inspect(m, all, true, &out, &e), e);
        json_t *o = json_loads(dm_buf_cstr(&out), 0, NULL);
        json_array_foreach(json_object_get(o, "tensors"), i, row) {
            tensors += all ? 1 : json_integer_value(json_object_get(row, "count"));
            bytes += json_integer_value(json_object_get(row, "bytes"));
            assert_true(json_is_true(json_object_get(row, "used")));
        }
        assert_int_equal(tensors, 585);
        assert_int_equal(bytes, 15385020);
        assert_int_equal(json_integer_value(json_object_get(o, "bytes")), bytes);
        json_decref(o);
        dm_buf_clear(&out);
        assert_ok_e(dm_model_inspect(m, all, false, &out, &e), e);
        assert_text(dm_buf_cstr(&out), all ? "layers.0.ffn.experts.3.w1.weight" : "layers.N.ffn.experts.N.w1.weight");
        assert_text(dm_buf_cstr(&out), "585 tensors in 9 files");
        dm_buf_free(&out);
    }
    dm_model_close(m);
}

static void flipped_index_bytes_are_refused_or_harmless(void **s)
{
    (void)s;
    uint64_t rng = test_seed();
    const char *dir = tiny_copy("flip");
    dm_buf b = slurp(in_dir(dir, INDEX));
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, INDEX);
    for (int i = 0; i < 400; i++) {
        size_t at = dm_splitmix64(&rng) % b.n;
        uint8_t was = b.p[at];
        dm_model *m;
        dm_err e;
        b.p[at] = (uint8_t)dm_splitmix64(&rng);
        spit(path, b.p, b.n);
        int rc = dm_model_open(&m, dir, &e);
        if (rc < 0) assert_int_equal(rc, DM_EMODEL);
        dm_model_close(m);
        b.p[at] = was;
    }
    dm_buf_free(&b);
}

static int open_and_inspect(const char *dir)
{
    dm_model *m;
    dm_err e;
    dm_buf out = {0};
    int rc = dm_model_open(&m, dir, &e);
    if (rc == 0) rc = dm_model_inspect(m, false, true, &out, &e);
    dm_buf_free(&out);
    dm_model_close(m);
    return rc;
}

static void a_failed_allocation_leaks_nothing(void **s)
{
    (void)s;
    const char *dir = synthetic("tiny");
    count_json_memory();
    int64_t before = dm_fault_alloc_count();
    assert_int_equal(open_and_inspect(dir), 0);
    int64_t total = dm_fault_alloc_count() - before;
    int failed = 0, tried = 0;
    for (int64_t n = 1; n <= total; n += 1 + n / 24, tried++) {
        dm_fault_alloc_after(n);
        int rc = open_and_inspect(dir);
        dm_fault_alloc_after(-1);
        /* jansson takes some of its own failures for bad text, and gets over others */
        assert_true(rc == 0 || rc == DM_ENOMEM || rc == DM_EMODEL);
        failed += rc < 0;
    }
    assert_true(total > 5000 && failed > tried / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_whole_checkpoint_opens_and_every_weight_has_its_place),
        cmocka_unit_test(directories_without_a_model_are_refused),
        cmocka_unit_test(a_missing_shard_is_named),
        cmocka_unit_test(a_truncated_shard_is_named),
        cmocka_unit_test(a_tensor_of_another_shape_or_type_is_named),
        cmocka_unit_test(a_hostile_header_length_is_refused),
        cmocka_unit_test(an_index_that_lies_is_refused),
        cmocka_unit_test(a_missing_tensor_is_named_with_the_way_out),
        cmocka_unit_test(experts_that_do_not_exist_are_refused_in_the_hash_table),
        cmocka_unit_test(misaligned_data_is_read_as_well),
        cmocka_unit_test(a_single_file_needs_no_index),
        cmocka_unit_test(fp8_experts_are_told_by_their_tensors),
        cmocka_unit_test(unknown_tensors_are_ignored_and_listed),
        cmocka_unit_test(inspection_sums_to_the_whole_in_both_forms),
        cmocka_unit_test(flipped_index_bytes_are_refused_or_harmless),
        cmocka_unit_test(a_failed_allocation_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
