/* The account before loading against what a process really takes: within three per cent, weights included. */
#include "tests/lib/engine_files.h"

#include <sys/wait.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED 1 /* shadow memory is not in the account */
#else
#define SANITIZED 0
#endif

typedef struct use { int64_t need, took; dm_plan plan; dm_memory_use after; int failed; } use;

static int go(const char *dir, const dm_forward_opts *o, int tokens, use *u)
{
    dm_model *m;
    dm_forward *f;
    dm_fseq *s;
    dm_err e;
    dm_memory_use before;
    dm_config c;
    int32_t *ids = malloc((size_t)tokens * sizeof *ids);
    if (!ids || dm_config_read(&c, dir, &e) < 0 || dm_synth_tokens(ids, tokens, 3, c.vocab_size, &e) < 0) return 1;
    float *logits = malloc((size_t)c.vocab_size * sizeof *logits);
    if (!logits || dm_model_plan(&c, &(dm_plan_opts){.forward = *o}, &u->plan, &e) < 0) return 2;
    dm_memory_use_get(&before);
    if (dm_model_open(&m, dir, &e) < 0 || dm_forward_create(&f, m, o, &e) < 0 || f->ops->seq_create(f, &s, &e) < 0) return 3;
    int prompt = tokens - 8;
    for (int at = 0; at < tokens;) {
        int n = at < prompt ? (prompt - at < f->rows_max ? prompt - at : f->rows_max) : 1;
        if (f->ops->step(f, &(dm_run){s, ids + at, n, at + n >= prompt ? logits : NULL}, 1, &e) < 0) return 4;
        at += n;
    }
    dm_memory_use_get(&u->after);
    u->need = u->plan.need_bytes;
    u->took = u->after.anon_bytes + u->after.file_bytes - before.anon_bytes - before.file_bytes;
    return 0;
}

/* In a process of its own, so that nothing of another test is in the figures. */
static void within_three_per_cent(const char *what, const char *dir, dm_forward_opts o, int tokens)
{
    int fd[2], status;
    use u = {0};
    assert_int_equal(pipe(fd), 0);
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        u.failed = go(dir, &o, tokens, &u);
        _exit(write(fd[1], &u, sizeof u) == sizeof u ? 0 : 1);
    }
    close(fd[1]);
    assert_int_equal(read(fd[0], &u, sizeof u), sizeof u);
    close(fd[0]);
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
    assert_int_equal(u.failed, 0);
    printf("# %s: planned %.1f MiB, took %.1f MiB (%+.2f %%); weights %.1f, arrays %.1f, blocks %.1f\n", what, (double)u.need / 1048576, (double)u.took / 1048576,
           100.0 * (double)(u.took - u.need) / (double)u.need, (double)u.plan.weight_bytes_resident / 1048576, (double)u.plan.scratch_bytes / 1048576,
           (double)u.plan.kv_bytes / 1048576);
    assert_true(u.took > 0);
    /* Three per cent, and a few MiB that a process has or has not whatever the model: of a real one they are nothing. */
    int64_t off = llabs(u.took - u.need), most = u.need / 100 * 3 + (6 << 20);
    if (off > most) fail_msg("%s: off by %lld bytes, more than %lld", what, (long long)off, (long long)most);
}

static void a_long_step_of_a_small_model(void **s)
{
    (void)s;
    if (SANITIZED) test_skip("a sanitizer has memory of its own");
    within_three_per_cent("tiny2", synthetic("tiny2"), (dm_forward_opts){.threads = 2, .rows_max = 4096, .ctx_tokens_max = 8192}, 8192);
}

/* 32 experts of 1024 × 1024 in four layers: most of it is weights, as in a real one. */
static void a_model_that_is_mostly_weights(void **s)
{
    (void)s;
    static const struct { const char *key; int value; } set[] = {
        {"hidden_size", 1024}, {"moe_intermediate_size", 1024}, {"n_routed_experts", 28}, {"num_hidden_layers", 4}, {"vocab_size", 8192}, {"num_attention_heads", 8},
        {"o_groups", 4}, {"q_lora_rank", 256}, {"num_nextn_predict_layers", 0}};
    dm_err e;
    if (SANITIZED) test_skip("a sanitizer has memory of its own");
    json_t *o = json_load_file(test_data("vectors/tiny2.config.json"), 0, NULL);
    for (size_t i = 0; i < DM_COUNT(set); i++) json_object_set_new(o, set[i].key, json_integer(set[i].value));
    json_dump_file(o, scratch("middle.json"), JSON_INDENT(1));
    json_decref(o);
    assert_ok_e(dm_model_synth(scratch("middle.json"), scratch("middle"), 1, 0, NULL, NULL, &e), e);
    within_three_per_cent("middle, fast", scratch("middle"), (dm_forward_opts){.threads = 2, .rows_max = 128, .ctx_tokens_max = 512}, 512);
    within_three_per_cent("middle, one thread, 64 rows", scratch("middle"), (dm_forward_opts){.threads = 1, .rows_max = 64, .ctx_tokens_max = 300}, 300);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_long_step_of_a_small_model),
        cmocka_unit_test(a_model_that_is_mostly_weights),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
