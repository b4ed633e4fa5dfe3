/* Synthetic checkpoints and test sequences: the same bytes everywhere, whole or not there. */
#include "tests/lib/engine_files.h"

#include "engine/synth_int.h"

static int entries(const char *dir, const char *part)
{
    DIR *d = opendir(dir);
    int n = 0;
    assert_non_null(d);
    for (struct dirent *x; (x = readdir(d));) n += x->d_name[0] != '.' && strstr(x->d_name, part);
    closedir(d);
    return n;
}

static void the_test_sequence_is_the_vectors(void **s)
{
    (void)s;
    static const int32_t first[] = {301, 324, 267, 147, 169, 102};
    int32_t ids[600], prefix[300];
    dm_err e;
    assert_ok_e(dm_synth_tokens(ids, 600, 1, 512, &e), e);
    assert_memory_equal(ids, first, sizeof first);
    assert_ok_e(dm_synth_tokens(prefix, 300, 1, 512, &e), e);
    assert_memory_equal(ids, prefix, sizeof prefix); /* shorter ones are prefixes */
    int repeats = 0;
    for (int i = 0; i < 600; i++) assert_true(ids[i] >= 0 && ids[i] < 512);
    for (int i = 1; i < 600; i++)
        for (int k = i > 200 ? i - 200 : 0; k < i; k++)
            if (ids[k] == ids[i]) {
                repeats++;
                break;
            }
    assert_true(repeats > 150);
    assert_ok_e(dm_synth_tokens(ids, 0, 1, 512, &e), e);
    assert_err(DM_EINVAL, dm_synth_tokens(ids, -1, 1, 512, &e));
    assert_err(DM_EINVAL, dm_synth_tokens(ids, 5, 1, 0, &e));
}

/* Any rows of a tensor can be made without the others. */
static void pieces_of_a_tensor_are_the_whole(void **s)
{
    (void)s;
    dm_config c;
    dm_err e;
    assert_ok_e(dm_config_read(&c, test_data("vectors/tiny2.config.json"), &e), e);
    static const struct { const char *name; model_dtype dtype; int64_t out, in; bool quantised, fp4; int step; } cases[] = {
        {"layers.1.attn.wq_b.weight", MODEL_F8_E4M3, 384, 256, true, false, 128},
        {"layers.1.ffn.experts.3.w2.weight", MODEL_I8, 64, 128, true, true, 7},
        {"layers.0.ffn.gate.tid2eid", MODEL_I64, 50, 3, false, false, 3},
        {"head.weight", MODEL_BF16, 33, 384, false, false, 5},
        {"layers.2.attn.compressor.ape", MODEL_F32, 4, 1024, false, false, 1},
    };
    for (size_t i = 0; i < DM_COUNT(cases); i++) {
        const void *slot;
        model_want w = {cases[i].name, cases[i].dtype, 2, {cases[i].out, cases[i].in}, 0, MODEL_PART_ATTN, &slot, cases[i].quantised, cases[i].fp4, false, NULL};
        synth_tensor t;
        synth_tensor_init(&t, &w, &c, 2);
        size_t bytes = (size_t)(t.out * synth_row_bytes(&t)), scales = (size_t)synth_scale_bytes(&t, t.out);
        uint8_t *whole = calloc(1, bytes), *parts = calloc(1, bytes), *s1 = calloc(1, scales + 1), *s2 = calloc(1, scales + 1);
        synth_rows(&t, 0, t.out, whole, s1);
        for (int64_t r = 0; r < t.out; r += cases[i].step) {
            int64_t r1 = r + cases[i].step < t.out ? r + cases[i].step : t.out;
            synth_rows(&t, r, r1, parts + r * synth_row_bytes(&t), s2 + synth_scale_bytes(&t, r));
        }
        assert_memory_equal(whole, parts, bytes);
        assert_memory_equal(s1, s2, scales + 1);
        free(whole), free(parts), free(s1), free(s2);
    }
}

static void a_checkpoint_has_a_shard_per_layer_and_three_more(void **s)
{
    (void)s;
    const char *dir = synthetic("tiny");
    assert_int_equal(entries(dir, ".safetensors"), 9 + 1); /* and the index */
    assert_int_equal(entries(dir, ""), 11);
    dm_buf a = slurp(in_dir(dir, "config.json")), b = slurp(test_data("vectors/tiny.config.json"));
    assert_int_equal(a.n, b.n);
    assert_memory_equal(a.p, b.p, a.n);
    dm_buf_free(&a);
    dm_buf_free(&b);
    b = slurp(in_dir(dir, "model-00004-of-00009.safetensors"));
    assert_int_equal((8 + header_length(&b)) % 8, 0);
    dm_buf_free(&b);
}

static void fewer_layers_keep_the_tensors_of_those_that_stay(void **s)
{
    (void)s;
    dm_err e;
    dm_model *m, *all;
    const char *dir = scratch("cut");
    assert_ok_e(dm_model_synth(test_data("vectors/tiny.config.json"), dir, 1, 3, NULL, NULL, &e), e);
    assert_ok_e(dm_model_open(&m, dir, &e), e);
    assert_ok_e(dm_model_open(&all, synthetic("tiny"), &e), e);
    const dm_config *c = dm_model_config(m);
    assert_int_equal(c->num_hidden_layers, 3);
    assert_int_equal(c->num_nextn_predict_layers, 1);
    assert_int_equal(c->compress_ratio_count, 4);
    assert_int_equal(c->compress_ratio[2], 4);
    assert_int_equal(c->compress_ratio[3], 0); /* the MTP layer's */
    static const char *const same[] = {"layers.2.attn.wq_a.weight", "mtp.0.ffn.experts.1.w2.weight", "head.weight"};
    for (size_t i = 0; i < DM_COUNT(same); i++) {
        const model_tensor *x = model_find(m, same[i]), *y = model_find(all, same[i]);
        assert_int_equal(x->bytes, y->bytes);
        assert_memory_equal(x->data, y->data, (size_t)x->bytes);
    }
    assert_null(model_find(m, "layers.3.attn_norm.weight"));
    dm_model_close(m);
    dm_model_close(all);
    assert_err(DM_EINVAL, dm_model_synth(test_data("vectors/tiny.config.json"), scratch("more"), 1, 7, NULL, NULL, &e));
    assert_err(DM_EINVAL, dm_model_synth(test_data("vectors/tiny.config.json"), scratch("more"), 1, -1, NULL, NULL, &e));
}

static void the_seed_decides_the_bytes(void **s)
{
    (void)s;
    assert_true(synth_key(1, "embed.weight", "") != synth_key(2, "embed.weight", ""));
    assert_true(synth_key(1, "a", ":block") == synth_key(1, "a:block", ""));
}

static void a_directory_in_use_is_left_alone(void **s)
{
    (void)s;
    dm_err e;
    const char *dir = scratch("used");
    assert_int_equal(mkdir(dir, 0755), 0);
    spit(in_dir(dir, "mine"), "x", 1);
    assert_err(DM_EEXIST, dm_model_synth(test_data("vectors/tiny.config.json"), dir, 1, 1, NULL, NULL, &e));
    assert_text(e.text, "used");
    assert_int_equal(entries(dir, ""), 1);
    spit(scratch("file"), "x", 1);
    assert_err(DM_EEXIST, dm_model_synth(test_data("vectors/tiny.config.json"), scratch("file"), 1, 1, NULL, NULL, &e));
    assert_err(DM_ENOENT, dm_model_synth(scratch("no.json"), scratch("new"), 1, 1, NULL, NULL, &e));
    /* an empty one, parents that do not exist, and a slash at the end are fine */
    assert_int_equal(mkdir(scratch("empty"), 0755), 0);
    assert_ok_e(dm_model_synth(test_data("vectors/tiny.config.json"), scratch("empty/"), 1, 1, NULL, NULL, &e), e);
    assert_ok_e(dm_model_synth(test_data("vectors/tiny.config.json"), scratch("a/b/c"), 1, 1, NULL, NULL, &e), e);
    assert_true(dm_path_exists(scratch("a/b/c/config.json")));
}

static void a_full_disk_leaves_nothing_behind(void **s)
{
    (void)s;
    dm_err e;
    for (int n = 1; n < 20; n += 3) {
        char spec[64];
        int before = entries(test_dir(), "");
        snprintf(spec, sizeof spec, "synth.write:%d=fail", n);
        assert_ok_e(dm_fault_arm(spec, &e), e);
        int rc = dm_model_synth(test_data("vectors/tiny.config.json"), scratch("full"), 1, 1, NULL, NULL, &e);
        dm_fault_arm(NULL, NULL);
        assert_err(DM_ENOSPC, rc);
        assert_text(e.text, "disk is full");
        assert_int_equal(entries(test_dir(), ""), before);
    }
}

static bool stop_after(void *ctx, const char *what, int64_t done, int64_t total)
{
    int *left = ctx;
    assert_non_null(what);
    assert_true(done >= 0 && done <= total);
    return --*left > 0;
}

static void a_cancelled_one_leaves_nothing_behind(void **s)
{
    (void)s;
    dm_err e;
    int left = 3, before = entries(test_dir(), "");
    assert_err(DM_ECANCELED, dm_model_synth(test_data("vectors/tiny.config.json"), scratch("cancelled"), 1, 0, stop_after, &left, &e));
    assert_int_equal(entries(test_dir(), ""), before);
    left = 1 << 30;
    assert_ok_e(dm_model_synth(test_data("vectors/tiny.config.json"), scratch("whole"), 1, 1, stop_after, &left, &e), e);
    assert_true(left < 1 << 30);
}

static void a_failed_allocation_leaves_nothing_behind(void **s)
{
    (void)s;
    dm_err e;
    count_json_memory();
    int before = entries(test_dir(), "");
    int64_t start = dm_fault_alloc_count();
    assert_ok_e(dm_model_synth(test_data("vectors/tiny.config.json"), scratch("memory"), 1, 1, NULL, NULL, &e), e);
    int64_t total = dm_fault_alloc_count() - start;
    for (int64_t n = 1; n <= total; n += 1 + n / 32) {
        remove_dir(scratch("memory"));
        dm_fault_alloc_after(n);
        int rc = dm_model_synth(test_data("vectors/tiny.config.json"), scratch("memory"), 1, 1, NULL, NULL, &e);
        dm_fault_alloc_after(-1);
        assert_true(rc == 0 || rc == DM_ENOMEM || rc == DM_EMODEL);
        assert_int_equal(entries(test_dir(), ""), before + (rc == 0));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_test_sequence_is_the_vectors),
        cmocka_unit_test(pieces_of_a_tensor_are_the_whole),
        cmocka_unit_test(a_checkpoint_has_a_shard_per_layer_and_three_more),
        cmocka_unit_test(fewer_layers_keep_the_tensors_of_those_that_stay),
        cmocka_unit_test(the_seed_decides_the_bytes),
        cmocka_unit_test(a_directory_in_use_is_left_alone),
        cmocka_unit_test(a_full_disk_leaves_nothing_behind),
        cmocka_unit_test(a_cancelled_one_leaves_nothing_behind),
        cmocka_unit_test(a_failed_allocation_leaves_nothing_behind),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
