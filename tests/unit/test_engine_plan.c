/* The plan against the published figures and against the engine itself. */
#include "tests/lib/engine_files.h"

static dm_plan plan_of(const char *config, int64_t mem)
{
    dm_config c;
    dm_plan p;
    dm_err e;
    assert_ok_e(dm_config_read(&c, config, &e), e);
    assert_ok_e(dm_model_plan(&c, mem, &p, &e), e);
    return p;
}

static void flash_takes_what_its_index_says(void **s)
{
    (void)s;
    dm_plan p = plan_of(test_data("engine/flash.config.json"), 0);
    assert_int_equal(p.weight_bytes, 159609485896);
    assert_int_equal(p.weight_tensors, 69187);
    assert_int_equal(p.weight_bytes_expert + p.weight_bytes_attn + p.weight_bytes_other, p.weight_bytes);
    assert_int_equal(p.block_bytes, 899648);
    assert_int_equal(p.kv_bytes_bf16_at_max, 7219838976);
    assert_int_equal(p.kv_bytes_at_max, 899648ll * 4096);
    assert_int_equal(p.window_bytes, 3214336);
    assert_true(p.kv_bytes_per_token == 3514.25);
    assert_int_equal(p.ctx_tokens_fit, -1);
}

static void pro_takes_what_its_index_says(void **s)
{
    (void)s;
    dm_plan p = plan_of(test_data("engine/pro.config.json"), 0);
    assert_int_equal(p.weight_bytes, 864704792696);
    assert_int_equal(p.weight_tensors, 145116);
    assert_int_equal(p.block_bytes, 1288048);
    assert_int_equal(p.kv_bytes_bf16_at_max, 10334371840);
    assert_int_equal(p.window_bytes, 4559872);
    assert_true(p.kv_bytes_per_token == 5031.4375);
}

static void context_grows_with_memory_up_to_the_models_own(void **s)
{
    (void)s;
    const char *flash = test_data("engine/flash.config.json");
    dm_plan p = plan_of(flash, 0);
    int64_t fixed = p.weight_bytes + p.scratch_bytes + p.window_bytes + p.state_bytes_max;
    assert_int_equal(plan_of(flash, 1).ctx_tokens_fit, 0);
    assert_int_equal(plan_of(flash, fixed - 1).ctx_tokens_fit, 0);
    assert_int_equal(plan_of(flash, fixed + p.block_bytes).ctx_tokens_fit, 256);
    assert_int_equal(plan_of(flash, fixed + 10 * p.block_bytes - 1).ctx_tokens_fit, 9 * 256);
    assert_int_equal(plan_of(flash, INT64_MAX).ctx_tokens_fit, 1048576);
}

/* A config without any compressed layer has no growing cache; its context is the model's. */
static void a_window_only_model_needs_no_blocks(void **s)
{
    (void)s;
    json_t *o = json_load_file(test_data("vectors/tiny.config.json"), 0, NULL), *r = json_object_get(o, "compress_ratios");
    for (size_t i = 0; i < json_array_size(r); i++) json_array_set_new(r, i, json_integer(0));
    json_dump_file(o, scratch("window.json"), 0);
    json_decref(o);
    dm_plan p = plan_of(scratch("window.json"), (int64_t)1 << 40);
    assert_int_equal(p.block_bytes, 0);
    assert_int_equal(p.kv_bytes_at_max, 0);
    assert_int_equal(p.ctx_tokens_fit, 1048576);
}

static void the_plan_agrees_with_the_files_and_with_the_engine(void **s)
{
    (void)s;
    static const char *const names[] = {"tiny", "tiny2"};
    for (int i = 0; i < 2; i++) {
        const char *dir = synthetic(names[i]);
        dm_model *m;
        dm_forward *f;
        dm_fseq *q;
        dm_err e;
        dm_plan p = plan_of(dir, 0);
        json_t *index = json_load_file(in_dir(dir, "model.safetensors.index.json"), 0, NULL);
        assert_int_equal(json_object_size(json_object_get(index, "weight_map")), p.weight_tensors);
        assert_int_equal(json_integer_value(json_object_get(json_object_get(index, "metadata"), "total_size")), p.weight_bytes);
        json_decref(index);
        assert_ok_e(dm_model_open(&m, dir, &e), e);
        dm_forward_opts o = {.numerics = DM_NUM_FAST, .threads = 1, .rows_max = 64, .ctx_tokens_max = 1024};
        assert_ok_e(dm_forward_create(&f, m, &o, &e), e);
        assert_int_equal(f->block_bytes, p.block_bytes);
        assert_ok_e(f->ops->seq_create(f, &q, &e), e);
        int32_t ids[255];
        assert_ok_e(dm_synth_tokens(ids, 255, 1, f->vocab, &e), e);
        for (int at = 0; at < 255; at += 51) {
            dm_run run = {.seq = q, .ids = ids + at, .n = 51};
            assert_ok_e(f->ops->step(f, &run, 1, &e), e);
        }
        dm_buf state = {0};
        assert_ok_e(f->ops->state_save(f, q, &state, &e), e);
        size_t logits = f->ops->seq_logits(q) ? (size_t)f->vocab * sizeof(float) : 0;
        assert_int_equal(state.n - logits, p.state_bytes_max); /* 255 = one token before the block is whole */
        dm_buf_free(&state);
        f->ops->seq_destroy(f, q);
        dm_forward_destroy(f);
        dm_model_close(m);
    }
}

static void a_failed_allocation_is_reported(void **s)
{
    (void)s;
    dm_config c;
    dm_plan p;
    dm_err e;
    assert_ok_e(dm_config_read(&c, test_data("engine/flash.config.json"), &e), e);
    for (int64_t n = 1; n < 10; n++) {
        dm_fault_alloc_after(n);
        int rc = dm_model_plan(&c, 0, &p, &e);
        dm_fault_alloc_after(-1);
        if (rc == 0) return;
        assert_int_equal(rc, DM_ENOMEM);
    }
    fail();
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(flash_takes_what_its_index_says),
        cmocka_unit_test(pro_takes_what_its_index_says),
        cmocka_unit_test(context_grows_with_memory_up_to_the_models_own),
        cmocka_unit_test(a_window_only_model_needs_no_blocks),
        cmocka_unit_test(the_plan_agrees_with_the_files_and_with_the_engine),
        cmocka_unit_test(a_failed_allocation_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
