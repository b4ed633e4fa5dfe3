/* The plan against the published figures and against the engine itself. */
#include "tests/lib/engine_files.h"

#include "engine/memory_int.h"

static dm_plan plan_with(const char *config, dm_plan_opts o)
{
    dm_config c;
    dm_plan p;
    dm_err e;
    assert_ok_e(dm_config_read(&c, config, &e), e);
    assert_ok_e(dm_model_plan(&c, &o, &p, &e), e);
    assert_int_equal(p.weight_bytes_expert + p.weight_bytes_shared + p.weight_bytes_attn + p.weight_bytes_index + p.weight_bytes_router + p.weight_bytes_embed +
                         p.weight_bytes_head + p.weight_bytes_mtp, p.weight_bytes);
    assert_int_equal(p.weight_bytes_resident + p.table_bytes + p.scratch_bytes + p.worker_bytes + p.sequence_bytes + p.kv_bytes + p.other_bytes, p.need_bytes);
    return p;
}
static dm_plan plan_of(const char *config, int64_t mem) { return plan_with(config, (dm_plan_opts){.mem_bytes = mem}); }

static void flash_takes_what_its_index_says(void **s)
{
    (void)s;
    dm_plan p = plan_of(test_data("engine/flash.config.json"), 0);
    assert_int_equal(p.weight_bytes, 159609485896);
    assert_int_equal(p.weight_tensors, 69187);
    assert_int_equal(p.weight_bytes_expert, 43ll * 256 * 13369344); /* 3 · 4096 · 2048 · (1/2 + 1/32) */
    assert_int_equal(p.weight_bytes_embed, 129280ll * 4096 * 2);
    assert_int_equal(p.weight_bytes_head, 129280ll * 4096 * 2 + 4096 * 2 + (4 * 4 * 4096 + 4 + 1) * 4);
    assert_int_equal(p.weight_bytes_resident, p.weight_bytes - p.weight_bytes_mtp); /* the context is longer than the vocabulary */
    assert_int_equal(p.block_bytes, 899648);
    assert_int_equal(p.kv_bytes_bf16_at_max, 7219838976);
    assert_int_equal(p.kv_bytes_at_max, 899648ll * 4096);
    assert_int_equal(p.window_bytes, 3214336);
    assert_true(p.kv_bytes_per_token == 3514.25);
    assert_int_equal(p.ctx_tokens_fit, -1);
    dm_plan drafting = plan_with(test_data("engine/flash.config.json"), (dm_plan_opts){.forward.draft = true});
    assert_int_equal(drafting.weight_bytes_resident, p.weight_bytes);
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
    assert_int_equal(plan_of(flash, 1).ctx_tokens_fit, 0);
    assert_int_equal(plan_of(flash, INT64_MAX).ctx_tokens_fit, 1048576);
    static const int64_t contexts[] = {256, 512, 5120, 65536, 524288, 1048576};
    for (size_t i = 0; i < DM_COUNT(contexts); i++) { /* exactly what is needed is enough, a byte less is not */
        dm_plan_opts o = {.forward.ctx_tokens_max = contexts[i]};
        o.mem_bytes = plan_with(flash, o).need_bytes;
        dm_plan p = plan_with(flash, o);
        dm_err e = {0};
        assert_int_equal(p.ctx_tokens_fit, contexts[i]);
        assert_ok_e(dm_plan_check(&p, &e), e);
        o.mem_bytes--;
        p = plan_with(flash, o);
        assert_int_equal(p.ctx_tokens_fit, contexts[i] - 256);
        assert_err(DM_ELIMIT, dm_plan_check(&p, &e));
    }
}

static void what_does_not_fit_is_refused_with_the_ways_out(void **s)
{
    (void)s;
    const char *flash = test_data("engine/flash.config.json");
    dm_err e = {0};
    dm_plan p = plan_of(flash, (int64_t)24 << 30);
    assert_err(DM_ELIMIT, dm_plan_check(&p, &e));
    assert_text(e.text, "the model needs 149 GiB (weights 145 GiB, KV of 1048576 tokens 3.4 GiB");
    assert_text(e.text, "24 GiB may be used");
    assert_text(e.text, "the weights alone do not fit");
    assert_text(e.text, "--memory SIZE");
    p = plan_with(flash, (dm_plan_opts){.forward.ctx_tokens_max = 1048576, .mem_bytes = (int64_t)147 << 30});
    assert_err(DM_ELIMIT, dm_plan_check(&p, &e));
    assert_text(e.text, "tokens would fit (--context)");
    assert_text(e.text, "--rows");
    p = plan_of(flash, (int64_t)147 << 30); /* nobody asked for all of it, so it is cut */
    assert_ok_e(dm_plan_check(&p, &e), e);
    assert_true(p.ctx_tokens >= 4096 && p.ctx_tokens < 1048576 && p.ctx_tokens == p.ctx_tokens_fit);
    p = plan_with(flash, (dm_plan_opts){.forward.ctx_tokens_max = 256, .mem_bytes = p.weight_bytes_resident - p.weight_bytes_embed + ((int64_t)64 << 20)});
    assert_err(DM_ELIMIT, dm_plan_check(&p, &e));
    assert_text(e.text, "not even a context of 256 tokens fits");
    p = plan_with(flash, (dm_plan_opts){.mem_bytes = (int64_t)152 << 30, .other_bytes = (int64_t)8 << 30, .forward.ctx_tokens_max = 1 << 20});
    assert_err(DM_ELIMIT, dm_plan_check(&p, &e)); /* what the caller needs beside counts too */
}

static void a_forward_that_does_not_fit_is_not_made(void **s)
{
    (void)s;
    dm_model *m;
    dm_forward *f;
    dm_err e;
    assert_ok_e(dm_model_open(&m, synthetic("tiny2"), &e), e);
    dm_plan p;
    dm_forward_opts o = {.threads = 2, .rows_max = 64};
    assert_ok_e(dm_model_plan(dm_model_config(m), &(dm_plan_opts){.forward = o}, &p, &e), e);
    o.mem_bytes_max = p.need_bytes;
    assert_ok_e(dm_forward_create(&f, m, &o, &e), e);
    assert_int_equal(f->ctx_tokens_max, 1048576);
    dm_forward_destroy(f);
    o.mem_bytes_max = p.need_bytes - p.kv_bytes / 2;
    assert_ok_e(dm_forward_create(&f, m, &o, &e), e); /* with half of the context, about */
    assert_true(f->ctx_tokens_max > 400000 && f->ctx_tokens_max < 700000);
    dm_forward_destroy(f);
    o.ctx_tokens_max = 1048576;
    assert_err(DM_ELIMIT, dm_forward_create(&f, m, &o, &e));
    assert_text(e.text, "tokens would fit (--context)");
    o.mem_bytes_max = 1 << 20;
    assert_err(DM_ELIMIT, dm_forward_create(&f, m, &o, &e));
    assert_text(e.text, "weights alone do not fit");
    o.mem_bytes_max = -1;
    assert_ok_e(dm_forward_create(&f, m, &o, &e), e); /* nothing is asked */
    dm_forward_destroy(f);
    dm_model_close(m);
}

/* Both hierarchies of control groups, nested, with and without a bound. */
static void a_control_group_bounds_memory(void **s)
{
    (void)s;
    const char *mount = scratch("cgroup"), *list = scratch("cgroup.list");
    int64_t machine = dm_memory_limit_at(scratch("nothing"), mount);
    assert_true(machine > (int64_t)64 << 20 && machine < (int64_t)1 << 50);
    test_put(mount, "a/b/memory.max", "max\n");
    test_put(mount, "a/memory.max", "33554432\n");
    test_put(mount, "memory/x/memory.limit_in_bytes", "16777216\n");
    test_put(mount, "memory/y/memory.limit_in_bytes", "9223372036854771712\n"); /* how the older kind says none */
    static const struct { const char *list; int64_t bound; } cases[] = {
        {"0::/a/b\n", 33554432}, {"0::/a\n", 33554432}, {"0::/\n", 0}, {"0::/c\n", 0}, {"4:memory:/x\n0::/\n", 16777216}, {"4:memory:/y\n0::/a/b\n", 33554432},
        {"9:name=systemd:/a\n", 0}, {"", 0}, {"nonsense\n:\n::\n", 0}};
    for (size_t i = 0; i < DM_COUNT(cases); i++) {
        spit(list, cases[i].list, strlen(cases[i].list));
        int64_t got = dm_memory_limit_at(list, mount);
        if (got != (cases[i].bound ? cases[i].bound : machine)) fail_msg("case %zu: %lld", i, (long long)got);
    }
    assert_true(dm_memory_limit() <= machine);
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
        int rc = dm_model_plan(&c, NULL, &p, &e);
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
        cmocka_unit_test(what_does_not_fit_is_refused_with_the_ways_out),
        cmocka_unit_test(a_forward_that_does_not_fit_is_not_made),
        cmocka_unit_test(a_control_group_bounds_memory),
        cmocka_unit_test(a_window_only_model_needs_no_blocks),
        cmocka_unit_test(the_plan_agrees_with_the_files_and_with_the_engine),
        cmocka_unit_test(a_failed_allocation_is_reported),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
