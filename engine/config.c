/* config.c — config.json of a DeepSeek-V4 checkpoint, checked so tightly that no later product of its
 * numbers can overflow and no shape can be one that the forward pass does not know.
 *
 * One table per kind of value: what the key is called, where it goes, what is allowed.  What the tables cannot
 * say (sums, divisibility, the ratio list) follows in check_shapes() and read_ratios(). */
#include "engine/engine.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <math.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/model_int.h"

#define WHERE "config"
#define CONFIG_BYTES_MAX (1 << 20)

typedef struct int_key {
    const char *name;
    size_t offset;
    int min, max;
    int otherwise; /* value when the key is absent; REQUIRED: must be there */
} int_key;
#define REQUIRED INT32_MIN
#define FIELD(f) offsetof(dm_config, f)

/* Upper bounds are far above any published model and low enough that every product of two or three of
 * them (times 512 or 8) fits in int64, and G·ro, H·512 and Hi·128 fit in int. */
static const int_key int_keys[] = {
    {"num_hidden_layers", FIELD(num_hidden_layers), 1, DM_LAYERS_MAX, REQUIRED},
    {"hidden_size", FIELD(hidden_size), 128, 65536, REQUIRED},
    {"num_attention_heads", FIELD(num_attention_heads), 1, 1024, REQUIRED},
    {"head_dim", FIELD(head_dim), 512, 512, REQUIRED},
    {"qk_rope_head_dim", FIELD(qk_rope_head_dim), 64, 64, REQUIRED},
    {"q_lora_rank", FIELD(q_lora_rank), 128, 65536, REQUIRED},
    {"o_groups", FIELD(o_groups), 1, 1024, REQUIRED},
    {"o_lora_rank", FIELD(o_lora_rank), 1, 65536, REQUIRED},
    {"sliding_window", FIELD(sliding_window), 128, 128, REQUIRED},
    {"index_n_heads", FIELD(index_n_heads), 1, 1024, REQUIRED},
    {"index_head_dim", FIELD(index_head_dim), 128, 128, REQUIRED},
    {"index_topk", FIELD(index_topk), 1, 1 << 20, REQUIRED},
    {"n_routed_experts", FIELD(n_routed_experts), 1, 4096, REQUIRED},
    {"num_experts_per_tok", FIELD(num_experts_per_tok), 1, MODEL_TOPK_MAX, REQUIRED},
    {"n_shared_experts", FIELD(n_shared_experts), 1, 1, 1},
    {"moe_intermediate_size", FIELD(moe_intermediate_size), 128, 65536, REQUIRED},
    {"num_hash_layers", FIELD(num_hash_layers), 0, DM_LAYERS_MAX, REQUIRED},
    {"hc_mult", FIELD(hc_mult), 4, 4, REQUIRED},
    {"hc_sinkhorn_iters", FIELD(hc_sinkhorn_iters), 1, 1000, REQUIRED},
    {"num_nextn_predict_layers", FIELD(num_nextn_predict_layers), 0, DM_LAYERS_MAX, 0},
    {"vocab_size", FIELD(vocab_size), 2, 1 << 24, REQUIRED},
    {"bos_token_id", FIELD(bos_token_id), 0, 1 << 24, REQUIRED},
    {"eos_token_id", FIELD(eos_token_id), 0, 1 << 24, REQUIRED},
};

typedef struct real_key {
    const char *name;
    size_t offset;
    double min, max; /* exclusive, inclusive */
} real_key;

static const real_key real_keys[] = {
    {"routed_scaling_factor", FIELD(routed_scaling_factor), 0, 1e6},
    {"swiglu_limit", FIELD(swiglu_limit), 0, 1e6},
    {"hc_eps", FIELD(hc_eps), 0, 1},
    {"rms_norm_eps", FIELD(rms_norm_eps), 0, 1},
    {"rope_theta", FIELD(rope_theta), 1, 1e12},
    {"compress_rope_theta", FIELD(compress_rope_theta), 1, 1e12},
};

/* Keys that say how the network works.  Absent is fine; another value is another network. */
typedef struct word_key { const char *name, *value; } word_key;
static const word_key word_keys[] = {
    {"scoring_func", "sqrtsoftplus"},
    {"topk_method", "noaux_tc"},
    {"hidden_act", "silu"},
};
typedef struct flag_key { const char *name; bool value; } flag_key;
static const flag_key flag_keys[] = {
    {"norm_topk_prob", true},
    {"tie_word_embeddings", false},
    {"attention_bias", false},
};

/* ---- single values ---------------------------------------------------------------------------- */

static int read_int(const json_t *o, const char *name, int64_t min, int64_t max, int64_t otherwise, int64_t *out, dm_err *e) {
    const json_t *v = json_object_get(o, name);
    if (!v) {
        if (otherwise == REQUIRED) return dm_err_set(e, DM_EMODEL, WHERE, "%s is missing", name);
        *out = otherwise;
        return 0;
    }
    if (!json_is_integer(v)) return dm_err_set(e, DM_EMODEL, WHERE, "%s must be a whole number", name);
    int64_t n = json_integer_value(v);
    if (n < min || n > max) {
        if (min == max)
            return dm_err_set(e, DM_EMODEL, WHERE, "%s is %lld, but only %lld is supported", name, (long long)n, (long long)min);
        return dm_err_set(e, DM_EMODEL, WHERE, "%s is %lld, outside %lld to %lld", name, (long long)n, (long long)min, (long long)max);
    }
    *out = n;
    return 0;
}

static int read_real(const json_t *o, const char *name, double above, double max, double *out, dm_err *e) {
    const json_t *v = json_object_get(o, name);
    if (!v) return dm_err_set(e, DM_EMODEL, WHERE, "%s is missing", name);
    if (!json_is_number(v)) return dm_err_set(e, DM_EMODEL, WHERE, "%s must be a number", name);
    double x = json_number_value(v);
    if (!(x > above && x <= max)) return dm_err_set(e, DM_EMODEL, WHERE, "%s is %g, but must be above %g and at most %g", name, x, above, max);
    *out = x;
    return 0;
}

static int read_tables(dm_config *c, const json_t *o, dm_err *e) {
    for (size_t i = 0; i < DM_COUNT(int_keys); i++) {
        const int_key *k = &int_keys[i];
        int64_t n;
        int rc = read_int(o, k->name, k->min, k->max, k->otherwise, &n, e);
        if (rc < 0) return rc;
        *(int *)((char *)c + k->offset) = (int)n;
    }
    for (size_t i = 0; i < DM_COUNT(real_keys); i++) {
        const real_key *k = &real_keys[i];
        int rc = read_real(o, k->name, k->min, k->max, (double *)((char *)c + k->offset), e);
        if (rc < 0) return rc;
    }
    return read_int(o, "max_position_embeddings", 1, 1 << 30, REQUIRED, &c->max_position_embeddings, e);
}

/* ---- the kind of network ------------------------------------------------------------------------ */

static int check_type(const json_t *o, dm_err *e) {
    const char *type = json_string_value(json_object_get(o, "model_type"));
    if (!type) type = json_string_value(json_object_get(json_object_get(o, "text_config"), "model_type")); /* with a vision tower */
    if (!type) return dm_err_set(e, DM_EMODEL, WHERE, "model_type is missing: this is not a model's config.json");
    if (dm_str_prefix(type, "deepseek_v41") || dm_str_prefix(type, "deepseek_v4_1"))
        return dm_err_set(e, DM_EMODEL, WHERE,
                          "model_type %.40s: V4.1 is another network (other compression, n-gram embeddings); use a DeepSeek-V4 checkpoint", type);
    if (strcmp(type, "deepseek_v4") != 0)
        return dm_err_set(e, DM_EMODEL, WHERE, "model_type is %.40s, but only deepseek_v4 is supported", type);
    return 0;
}

static int check_words(const json_t *o, dm_err *e) {
    for (size_t i = 0; i < DM_COUNT(word_keys); i++) {
        const json_t *v = json_object_get(o, word_keys[i].name);
        if (v && (!json_is_string(v) || strcmp(json_string_value(v), word_keys[i].value) != 0))
            return dm_err_set(e, DM_EMODEL, WHERE, "%s must be \"%s\"", word_keys[i].name, word_keys[i].value);
    }
    for (size_t i = 0; i < DM_COUNT(flag_keys); i++) {
        const json_t *v = json_object_get(o, flag_keys[i].name);
        if (v && (!json_is_boolean(v) || json_is_true(v) != flag_keys[i].value))
            return dm_err_set(e, DM_EMODEL, WHERE, "%s must be %s", flag_keys[i].name, flag_keys[i].value ? "true" : "false");
    }
    int64_t heads;
    return read_int(o, "num_key_value_heads", 1, 1, 1, &heads, e);
}

/* Without a quantization_config the matrices are plain bf16; if there, it must be the known scheme. */
static int check_quantization(dm_config *c, const json_t *o, dm_err *e) {
    static const word_key keys[] = {{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"scale_fmt", "ue8m0"}};
    const json_t *q = json_object_get(o, "quantization_config");
    c->weights_bf16 = !q || json_is_null(q);
    if (c->weights_bf16) return 0;
    if (!json_is_object(q)) return dm_err_set(e, DM_EMODEL, WHERE, "quantization_config must be an object");
    for (size_t i = 0; i < DM_COUNT(keys); i++) {
        const json_t *v = json_object_get(q, keys[i].name);
        if (v && (!json_is_string(v) || strcmp(json_string_value(v), keys[i].value) != 0))
            return dm_err_set(e, DM_EMODEL, WHERE, "quantization_config.%s must be \"%s\"", keys[i].name, keys[i].value);
    }
    const json_t *b = json_object_get(q, "weight_block_size");
    if (b && (json_array_size(b) != 2 || json_integer_value(json_array_get(b, 0)) != 128 || json_integer_value(json_array_get(b, 1)) != 128))
        return dm_err_set(e, DM_EMODEL, WHERE, "quantization_config.weight_block_size must be [128, 128]");
    return 0;
}

static int read_expert_dtype(dm_config *c, const json_t *o, dm_err *e) {
    const json_t *v = json_object_get(o, "expert_dtype");
    const char *s = json_string_value(v);
    if (!v || json_is_null(v)) s = c->weights_bf16 ? "bf16" : "fp4"; /* the first upload had FP4 experts and no such key */
    if (!s || (strcmp(s, "fp4") != 0 && strcmp(s, "fp8") != 0 && strcmp(s, "bf16") != 0))
        return dm_err_set(e, DM_EMODEL, WHERE, "expert_dtype must be \"fp4\", \"fp8\" or \"bf16\"");
    c->expert_fp4 = strcmp(s, "fp4") == 0;
    c->expert_bf16 = strcmp(s, "bf16") == 0;
    return 0;
}

/* ---- positions ------------------------------------------------------------------------------------ */

static int read_rope(dm_config *c, const json_t *o, dm_err *e) {
    const json_t *r = json_object_get(o, "rope_scaling");
    if (!json_is_object(r)) return dm_err_set(e, DM_EMODEL, WHERE, "rope_scaling is missing or not an object");
    const json_t *t = json_object_get(r, "type");
    if (!t) t = json_object_get(r, "rope_type");
    if (!json_is_string(t) || strcmp(json_string_value(t), "yarn") != 0)
        return dm_err_set(e, DM_EMODEL, WHERE, "rope_scaling.type must be \"yarn\"");
    int rc;
    if ((rc = read_real(r, "factor", 0, 1e6, &c->rope_factor, e)) < 0 || (rc = read_real(r, "beta_fast", 0, 1e6, &c->rope_beta_fast, e)) < 0 ||
        (rc = read_real(r, "beta_slow", 0, 1e6, &c->rope_beta_slow, e)) < 0 ||
        (rc = read_int(r, "original_max_position_embeddings", 1, 1 << 30, REQUIRED, &c->rope_original_max, e)) < 0) {
        dm_err_prefix(e, "rope_scaling");
        return rc;
    }
    if (c->rope_factor < 1) return dm_err_set(e, DM_EMODEL, WHERE, "rope_scaling.factor is %g, below 1", c->rope_factor);
    if (c->rope_beta_fast <= c->rope_beta_slow)
        return dm_err_set(e, DM_EMODEL, WHERE, "rope_scaling.beta_fast must be above beta_slow");
    return 0;
}

static int read_ratios(dm_config *c, const json_t *o, dm_err *e) {
    const json_t *a = json_object_get(o, "compress_ratios");
    if (!json_is_array(a)) return dm_err_set(e, DM_EMODEL, WHERE, "compress_ratios is missing or not an array");
    size_t n = json_array_size(a), want = (size_t)c->num_hidden_layers + (c->num_nextn_predict_layers > 0);
    if (n < want)
        return dm_err_set(e, DM_EMODEL, WHERE, "compress_ratios has %zu entries, but %d layers%s need %zu", n, c->num_hidden_layers,
                          c->num_nextn_predict_layers ? " and the MTP layer" : "", want);
    if (n > DM_COUNT(c->compress_ratio))
        return dm_err_set(e, DM_EMODEL, WHERE, "compress_ratios has %zu entries, more than %zu", n, DM_COUNT(c->compress_ratio));
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(a, i);
        int64_t m = json_is_integer(v) ? json_integer_value(v) : -1;
        if (m != 0 && m != 4 && m != 128)
            return dm_err_set(e, DM_EMODEL, WHERE, "compress_ratios[%zu] must be 0, 4 or 128", i);
        c->compress_ratio[i] = (int)m;
    }
    c->compress_ratio_count = (int)n;
    if (c->num_nextn_predict_layers && c->compress_ratio[c->num_hidden_layers] != 0)
        return dm_err_set(e, DM_EMODEL, WHERE, "compress_ratios[%d], the MTP layer's, must be 0", c->num_hidden_layers);
    return 0;
}

/* ---- sums and divisions ----------------------------------------------------------------------------- */

static int check_multiple(const char *name, int64_t n, int of, dm_err *e) {
    if (n % of == 0) return 0;
    return dm_err_set(e, DM_EMODEL, WHERE, "%s is %lld, not a multiple of %d", name, (long long)n, of);
}

static int check_shapes(const dm_config *c, dm_err *e) {
    int rc;
    /* Activations are quantised in blocks of 128 along the inputs of every FP8 and FP4 matrix. */
    if ((rc = check_multiple("hidden_size", c->hidden_size, 128, e)) < 0 || (rc = check_multiple("q_lora_rank", c->q_lora_rank, 128, e)) < 0 ||
        (rc = check_multiple("moe_intermediate_size", c->moe_intermediate_size, 128, e)) < 0 ||
        (rc = check_multiple("o_groups times o_lora_rank", (int64_t)c->o_groups * c->o_lora_rank, 128, e)) < 0)
        return rc;
    if (c->num_attention_heads % c->o_groups)
        return dm_err_set(e, DM_EMODEL, WHERE, "num_attention_heads %d does not divide by o_groups %d", c->num_attention_heads, c->o_groups);
    if (c->num_experts_per_tok > c->n_routed_experts)
        return dm_err_set(e, DM_EMODEL, WHERE, "num_experts_per_tok %d is above n_routed_experts %d", c->num_experts_per_tok, c->n_routed_experts);
    if (c->num_hash_layers > c->num_hidden_layers)
        return dm_err_set(e, DM_EMODEL, WHERE, "num_hash_layers %d is above num_hidden_layers %d", c->num_hash_layers, c->num_hidden_layers);
    if (c->num_nextn_predict_layers > 1)
        return dm_err_set(e, DM_EMODEL, WHERE, "num_nextn_predict_layers is %d, but only 0 and 1 are supported", c->num_nextn_predict_layers);
    if (c->bos_token_id >= c->vocab_size || c->eos_token_id >= c->vocab_size)
        return dm_err_set(e, DM_EMODEL, WHERE, "bos_token_id %d or eos_token_id %d is outside the vocabulary of %d", c->bos_token_id,
                          c->eos_token_id, c->vocab_size);
    return 0;
}

static int read_object(dm_config *c, const json_t *o, dm_err *e) {
    int rc;
    if (!json_is_object(o)) return dm_err_set(e, DM_EMODEL, WHERE, "is not a JSON object");
    if ((rc = check_type(o, e)) < 0 || (rc = read_tables(c, o, e)) < 0 || (rc = check_words(o, e)) < 0) return rc;
    /* These revisions keep draft stages of another kind under mtp.*; without drafting they are ignored. */
    if (json_object_get(o, "dspark_block_size")) c->num_nextn_predict_layers = 0;
    if ((rc = check_quantization(c, o, e)) < 0 || (rc = read_expert_dtype(c, o, e)) < 0 || (rc = read_rope(c, o, e)) < 0 ||
        (rc = read_ratios(c, o, e)) < 0)
        return rc;
    return check_shapes(c, e);
}

static int refuse_gguf(const char *name, dm_err *e) {
    return dm_err_set(e, DM_EMODEL, WHERE, "%.200s is a GGUF file; only checkpoints in the official safetensors layout can be read", name);
}

/* Models of another format are common enough to be told apart from damaged ones.  By its first bytes, nothing else of it is read. */
static int check_not_gguf(const char *path, dm_err *e) {
    char magic[4] = {0};
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    bool gguf = fd >= 0 && read(fd, magic, sizeof magic) == sizeof magic && memcmp(magic, "GGUF", sizeof magic) == 0;
    if (fd >= 0) close(fd);
    return gguf ? refuse_gguf(path, e) : 0;
}

/* A directory without a config.json that holds such a file. */
static int check_no_gguf_in(const char *dir, dm_err *e) {
    DIR *d = opendir(dir);
    int rc = 0;
    for (struct dirent *x; d && rc == 0 && (x = readdir(d));) {
        size_t n = strlen(x->d_name);
        if (n > 5 && strcmp(x->d_name + n - 5, ".gguf") == 0) rc = refuse_gguf(x->d_name, e);
    }
    if (d) closedir(d);
    return rc;
}

static int config_path(const char *path, char **out, dm_err *e) {
    struct stat st;
    *out = NULL;
    if (stat(path, &st) < 0) return dm_err_sys(e, errno, WHERE, "cannot open %.200s", path);
    bool dir = S_ISDIR(st.st_mode);
    char *file = dir ? dm_path_join(path, "config.json") : dm_strdup(path);
    if (!file) return dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    int rc = dir && !dm_path_exists(file) ? check_no_gguf_in(path, e) : S_ISREG(st.st_mode) ? check_not_gguf(file, e) : 0;
    if (rc < 0) dm_free(file);
    else *out = file;
    return rc;
}

int dm_config_read(dm_config *out, const char *path_or_dir, dm_err *e) {
    char *path;
    int rc = config_path(path_or_dir, &path, e);
    if (rc < 0) return rc;
    dm_buf text = {0};
    rc = dm_file_read(path, CONFIG_BYTES_MAX, &text, e);
    if (rc >= 0) {
        json_error_t at;
        json_t *o = json_loadb(dm_buf_cstr(&text), text.n, JSON_REJECT_DUPLICATES, &at);
        dm_config c = {0};
        if (o) rc = read_object(&c, o, e);
        else if (json_error_code(&at) == json_error_out_of_memory) rc = dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
        else rc = dm_err_set(e, DM_EMODEL, WHERE, "is not JSON: line %d: %.200s", at.line, at.text);
        json_decref(o);
        if (rc < 0) dm_err_prefix(e, "%.200s", path);
        else *out = c, rc = 0;
    }
    dm_buf_free(&text);
    dm_free(path);
    return rc;
}
