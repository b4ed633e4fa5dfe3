/* config.json: what the published models say is read, anything else is refused in words. */
#include "tests/lib/engine_files.h"

static json_t *flash(void)
{
    json_t *o = json_load_file(test_data("engine/flash.config.json"), 0, NULL);
    assert_non_null(o);
    return o;
}

static int read_json(json_t *o, dm_config *c, dm_err *e)
{
    const char *path = scratch("config.json");
    assert_int_equal(json_dump_file(o, path, 0), 0);
    json_decref(o);
    return dm_config_read(c, path, e);
}

/* Sets key (dotted once for a nested one) to a value given as JSON text; NULL removes it. */
static json_t *with(const char *key, const char *value)
{
    json_t *o = flash(), *at = o;
    const char *dot = strchr(key, '.');
    char outer[64];
    if (dot) {
        snprintf(outer, sizeof outer, "%.*s", (int)(dot - key), key);
        at = json_object_get(o, outer);
        key = dot + 1;
    }
    if (value) json_object_set_new(at, key, json_loads(value, JSON_DECODE_ANY, NULL));
    else json_object_del(at, key);
    return o;
}

static void refused(const char *key, const char *value, const char *word)
{
    dm_config c;
    dm_err e;
    int rc = read_json(with(key, value), &c, &e);
    if (rc != DM_EMODEL) fail_msg("%s = %s gave %s", key, value ? value : "(absent)", dm_err_name(rc));
    assert_text(e.text, word);
    assert_null(strchr(e.text, '\n'));
}

static void accepted(const char *key, const char *value, dm_config *c)
{
    dm_err e;
    assert_ok_e(read_json(with(key, value), c, &e), e);
}

static void published_configurations_are_read_in_full(void **s)
{
    (void)s;
    dm_config c;
    dm_err e;
    assert_ok_e(dm_config_read(&c, test_data("engine/pro.config.json"), &e), e);
    assert_int_equal(c.num_hidden_layers, 61);
    assert_int_equal(c.hidden_size, 7168);
    assert_int_equal(c.num_attention_heads, 128);
    assert_int_equal(c.q_lora_rank, 1536);
    assert_int_equal(c.o_groups, 16);
    assert_int_equal(c.index_topk, 1024);
    assert_int_equal(c.n_routed_experts, 384);
    assert_int_equal(c.num_hash_layers, 3);
    assert_int_equal(c.vocab_size, 129280);
    assert_int_equal(c.max_position_embeddings, 1048576);
    assert_int_equal(c.rope_original_max, 65536);
    assert_int_equal(c.num_nextn_predict_layers, 1);
    assert_int_equal(c.compress_ratio_count, 62);
    assert_int_equal(c.compress_ratio[0], 128);
    assert_int_equal(c.compress_ratio[2], 4);
    assert_int_equal(c.compress_ratio[61], 0);
    assert_true(c.routed_scaling_factor == 2.5 && c.swiglu_limit == 10 && c.hc_eps == 1e-6 && c.rms_norm_eps == 1e-6);
    assert_true(c.rope_theta == 10000 && c.compress_rope_theta == 160000 && c.rope_factor == 16);
    assert_true(c.rope_beta_fast == 32 && c.rope_beta_slow == 1);
    assert_true(c.expert_fp4);
}

static void a_directory_stands_for_its_config(void **s)
{
    (void)s;
    dm_config c;
    dm_err e;
    json_t *o = flash();
    assert_int_equal(json_dump_file(o, scratch("config.json"), 0), 0);
    json_decref(o);
    assert_ok_e(dm_config_read(&c, test_dir(), &e), e);
    assert_int_equal(c.num_hidden_layers, 43);
    assert_err(DM_ENOENT, dm_config_read(&c, scratch("nowhere"), &e));
}

static void other_networks_are_refused_by_name(void **s)
{
    (void)s;
    refused("model_type", "\"deepseek_v41\"", "V4.1 is another network");
    refused("model_type", "\"deepseek_v3\"", "deepseek_v3");
    refused("model_type", "7", "model_type");
    refused("model_type", NULL, "model_type");
    refused("scoring_func", "\"softmax\"", "scoring_func");
    refused("topk_method", "\"greedy\"", "topk_method");
    refused("norm_topk_prob", "false", "norm_topk_prob");
    refused("tie_word_embeddings", "true", "tie_word_embeddings");
    refused("num_key_value_heads", "8", "num_key_value_heads");
    refused("rope_scaling.type", "\"linear\"", "rope_scaling");
    refused("quantization_config.fmt", "\"e5m2\"", "quantization_config.fmt");
    refused("quantization_config.weight_block_size", "[64, 64]", "weight_block_size");
    refused("expert_dtype", "\"int4\"", "expert_dtype");
}

static void every_number_is_required_and_in_range(void **s)
{
    (void)s;
    static const char *const whole[] = {
        "num_hidden_layers", "hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "q_lora_rank", "o_groups", "o_lora_rank",
        "sliding_window", "index_n_heads", "index_head_dim", "index_topk", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size",
        "hc_mult", "hc_sinkhorn_iters", "vocab_size", "max_position_embeddings",
    };
    static const char *const bad[] = {"0", "-1", "-9223372036854775808", "9223372036854775807", "4294967297", "1.5", "\"8\"", "null", "[8]", "true"};
    for (size_t i = 0; i < DM_COUNT(whole); i++) {
        refused(whole[i], NULL, whole[i]);
        for (size_t j = 0; j < DM_COUNT(bad); j++) refused(whole[i], bad[j], whole[i]);
    }
    static const char *const real[] = {"routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps", "rope_theta", "compress_rope_theta",
                                       "rope_scaling.factor", "rope_scaling.beta_fast"};
    for (size_t i = 0; i < DM_COUNT(real); i++) {
        const char *leaf = strchr(real[i], '.') ? strchr(real[i], '.') + 1 : real[i];
        refused(real[i], NULL, leaf);
        refused(real[i], "0", leaf);
        refused(real[i], "-1", leaf);
        refused(real[i], "1e300", leaf);
        refused(real[i], "\"1\"", leaf);
    }
}

static void numbers_that_do_not_fit_together_are_refused(void **s)
{
    (void)s;
    refused("head_dim", "256", "head_dim");
    refused("hc_mult", "2", "hc_mult");
    refused("hidden_size", "4100", "hidden_size");
    refused("q_lora_rank", "1000", "q_lora_rank");
    refused("moe_intermediate_size", "2000", "moe_intermediate_size");
    refused("o_groups", "7", "o_groups");
    refused("o_lora_rank", "9", "o_lora_rank");
    refused("num_experts_per_tok", "7000", "num_experts_per_tok");
    refused("n_routed_experts", "4", "n_routed_experts");
    refused("num_hash_layers", "44", "num_hash_layers");
    refused("eos_token_id", "129280", "eos_token_id");
    refused("num_nextn_predict_layers", "2", "num_nextn_predict_layers");
    refused("rope_scaling.beta_slow", "32", "beta_slow");
}

static void the_ratio_list_is_checked_entry_by_entry(void **s)
{
    (void)s;
    dm_config c;
    refused("compress_ratios", NULL, "compress_ratios");
    refused("compress_ratios", "4", "compress_ratios");
    refused("compress_ratios", "[0, 0, 4]", "need 44");
    refused("compress_ratios", "[0,0,2,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0]", "compress_ratios[2]");
    refused("compress_ratios", "[0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,0,4]", "MTP");
    accepted("num_nextn_predict_layers", "0", &c);
    assert_int_equal(c.num_nextn_predict_layers, 0);
    /* without the MTP layer, one entry per layer is enough */
    json_t *o = with("num_nextn_predict_layers", "0");
    json_array_remove(json_object_get(o, "compress_ratios"), 43);
    dm_err e;
    assert_ok_e(read_json(o, &c, &e), e);
    /* and a list longer than any model's is refused */
    o = flash();
    for (int i = 0; i < 200; i++) json_array_append_new(json_object_get(o, "compress_ratios"), json_integer(0));
    assert_err(DM_EMODEL, read_json(o, &c, &e));
}

static void the_revision_with_draft_stages_runs_without_them(void **s)
{
    (void)s;
    dm_config c;
    dm_err e;
    json_t *o = with("dspark_block_size", "5");
    json_object_set_new(o, "num_nextn_predict_layers", json_integer(3));
    json_array_append_new(json_object_get(o, "compress_ratios"), json_integer(0));
    json_array_append_new(json_object_get(o, "compress_ratios"), json_integer(0));
    assert_ok_e(read_json(o, &c, &e), e);
    assert_int_equal(c.num_nextn_predict_layers, 0);
    assert_int_equal(c.compress_ratio_count, 46);
}

static void optional_keys_may_be_absent(void **s)
{
    (void)s;
    dm_config c;
    accepted("expert_dtype", NULL, &c);
    assert_true(c.expert_fp4);
    accepted("expert_dtype", "\"fp8\"", &c);
    assert_false(c.expert_fp4);
    accepted("quantization_config", NULL, &c);
    accepted("scoring_func", NULL, &c);
    accepted("num_key_value_heads", NULL, &c);
    accepted("n_shared_experts", NULL, &c);
    assert_int_equal(c.n_shared_experts, 1);
}

static void what_is_no_json_object_is_refused(void **s)
{
    (void)s;
    static const char *const texts[] = {"", "{", "[]", "null", "{\"model_type\": \"deepseek_v4\", \"model_type\": \"deepseek_v4\"}", "\xff\xfe", "{\"a\": 1e999}"};
    dm_config c;
    dm_err e;
    for (size_t i = 0; i < DM_COUNT(texts); i++) {
        spit(scratch("config.json"), texts[i], strlen(texts[i]));
        assert_err(DM_EMODEL, dm_config_read(&c, scratch("config.json"), &e));
        assert_text(e.text, "config.json");
    }
    assert_int_equal(mkfifo(scratch("fifo"), 0600), 0);
    assert_true(dm_config_read(&c, scratch("fifo"), &e) < 0); /* and does not hang */
}

static void flipped_bytes_never_pass_as_an_impossible_model(void **s)
{
    (void)s;
    uint64_t rng = test_seed();
    dm_buf b = slurp(test_data("vectors/tiny.config.json"));
    int good = 0;
    for (int i = 0; i < 3000; i++) {
        size_t at = dm_splitmix64(&rng) % b.n;
        uint8_t was = b.p[at];
        b.p[at] = (uint8_t)dm_splitmix64(&rng);
        spit(scratch("config.json"), b.p, b.n);
        dm_config c;
        dm_err e;
        int rc = dm_config_read(&c, scratch("config.json"), &e);
        if (rc < 0) assert_int_equal(rc, DM_EMODEL);
        else {
            dm_plan p;
            good++;
            assert_ok_e(dm_model_plan(&c, NULL, &p, &e), e);
            assert_true(p.weight_bytes > 0 && p.block_bytes >= 0 && p.weight_tensors > 0);
        }
        b.p[at] = was;
    }
    assert_true(good > 100); /* many bytes do not matter: the loop saw both sides */
    dm_buf_free(&b);
}

static void a_failed_allocation_is_reported_and_leaks_nothing(void **s)
{
    (void)s;
    dm_config c;
    dm_err e;
    count_json_memory();
    int64_t before = dm_fault_alloc_count();
    assert_ok_e(dm_config_read(&c, test_data("engine/flash.config.json"), &e), e);
    int64_t total = dm_fault_alloc_count() - before;
    for (int64_t n = 1; n <= total; n++) {
        dm_fault_alloc_after(n);
        int rc = dm_config_read(&c, test_data("engine/flash.config.json"), &e);
        dm_fault_alloc_after(-1);
        /* jansson takes some of its own failures for bad text, and gets over others */
        assert_true(rc == 0 || rc == DM_ENOMEM || rc == DM_EMODEL);
    }
    assert_true(total > 100);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(published_configurations_are_read_in_full),
        cmocka_unit_test(a_directory_stands_for_its_config),
        cmocka_unit_test(other_networks_are_refused_by_name),
        cmocka_unit_test(every_number_is_required_and_in_range),
        cmocka_unit_test(numbers_that_do_not_fit_together_are_refused),
        cmocka_unit_test(the_ratio_list_is_checked_entry_by_entry),
        cmocka_unit_test(the_revision_with_draft_stages_runs_without_them),
        cmocka_unit_test(optional_keys_may_be_absent),
        cmocka_unit_test(what_is_no_json_object_is_refused),
        cmocka_unit_test(flipped_bytes_never_pass_as_an_impossible_model),
        cmocka_unit_test(a_failed_allocation_is_reported_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
