/* config.json: what is accepted must lie inside the bounds that the rest of the engine builds on, and its plan must add
 * up without overflow. */
#include "engine/engine.h"
#include "tests/fuzz/lib.h"

static bool within(int64_t x, int64_t min, int64_t max) { return x >= min && x <= max; }

static void check_config(const dm_config *c)
{
    FUZZ_CHECK(within(c->num_hidden_layers, 1, DM_LAYERS_MAX) && within(c->num_hash_layers, 0, c->num_hidden_layers));
    FUZZ_CHECK(within(c->hidden_size, 128, 65536) && c->hidden_size % 128 == 0 && c->head_dim == 512 && c->hc_mult == 4);
    FUZZ_CHECK(c->o_groups > 0 && c->num_attention_heads % c->o_groups == 0 && c->moe_intermediate_size % 128 == 0);
    FUZZ_CHECK(within(c->num_experts_per_tok, 1, c->n_routed_experts) && within(c->num_nextn_predict_layers, 0, 1));
    FUZZ_CHECK(within(c->bos_token_id, 0, c->vocab_size - 1) && within(c->eos_token_id, 0, c->vocab_size - 1));
    FUZZ_CHECK(within(c->compress_ratio_count, c->num_hidden_layers, (int64_t)DM_COUNT(c->compress_ratio)));
    for (int i = 0; i < c->compress_ratio_count; i++) FUZZ_CHECK(c->compress_ratio[i] == 0 || c->compress_ratio[i] == 4 || c->compress_ratio[i] == 128);
    if (c->num_nextn_predict_layers) FUZZ_CHECK(c->compress_ratio_count > c->num_hidden_layers && c->compress_ratio[c->num_hidden_layers] == 0);
    FUZZ_CHECK(c->rope_theta > 0 && c->compress_rope_theta > 0 && c->rope_factor > 0 && c->rms_norm_eps > 0 && c->swiglu_limit > 0);
    FUZZ_CHECK(c->max_position_embeddings > 0 && c->rope_original_max > 0);
}

static void check_plan(const dm_config *c)
{
    static const int64_t mem[] = {0, 1, (int64_t)1 << 40, INT64_MAX};
    dm_err e = {0};
    if ((int64_t)(c->num_hidden_layers + 1) * c->n_routed_experts > 4096) return; /* slow, and nothing new */
    for (size_t i = 0; i < DM_COUNT(mem); i++) {
        dm_plan p;
        int rc = dm_model_plan(c, &(dm_plan_opts){ .mem_bytes = mem[i] }, &p, &e);
        if (rc < 0) {
            fuzz_told(rc, &e);
            continue;
        }
        FUZZ_CHECK(p.weight_bytes > 0 && p.weight_bytes == p.weight_bytes_expert + p.weight_bytes_shared + p.weight_bytes_attn + p.weight_bytes_index +
                                                             p.weight_bytes_router + p.weight_bytes_embed + p.weight_bytes_head + p.weight_bytes_mtp);
        FUZZ_CHECK(p.need_bytes > p.weight_bytes_resident && (mem[i] == 0 || dm_plan_check(&p, &e) == (p.need_bytes > mem[i] ? DM_ELIMIT : 0)));
        FUZZ_CHECK(p.block_bytes >= 0 && p.kv_bytes_at_max >= 0 && p.state_bytes_max > 0 && p.scratch_bytes > 0 && p.window_bytes > 0);
        FUZZ_CHECK(within(p.ctx_tokens_fit, mem[i] ? 0 : -1, c->max_position_embeddings));
    }
}

int FUZZ_ENTRY(const uint8_t *data, size_t n)
{
    dm_config c;
    dm_err e = {0};
    int rc = dm_config_read(&c, fuzz_file(0, data, n, 0), &e);
    if (rc < 0) fuzz_told(rc, &e);
    else check_config(&c), check_plan(&c);
    return 0;
}
