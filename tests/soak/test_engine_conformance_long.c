/* The long runs of the vectors: 700 and 1500 tokens, where compressed entries and the indexer decide most. */
#include "tests/lib/engine_verify.h"

static const int lengths[] = {700, 1500};

static void the_exact_path_gives_the_vectors_bytes_in_long_runs(void **s)
{
    (void)s;
    for (size_t i = 0; i < DM_COUNT(configs); i++)
        for (size_t k = 0; k < DM_COUNT(lengths); k++) agrees(configs[i], hash_file(configs[i], lengths[k]), (dm_verify_opts){.numerics = DM_NUM_EXACT, .chunk = 100});
}

static void the_exact_path_gives_the_remaining_lengths(void **s)
{
    (void)s;
    static const int rest[] = {127, 255, 256};
    for (size_t k = 0; k < DM_COUNT(rest); k++) agrees("tiny2", hash_file("tiny2", rest[k]), (dm_verify_opts){.numerics = DM_NUM_EXACT});
}

static void the_exact_path_gives_them_token_by_token(void **s)
{
    (void)s;
    for (size_t i = 0; i < DM_COUNT(configs); i++) agrees(configs[i], hash_file(configs[i], 257), (dm_verify_opts){.numerics = DM_NUM_EXACT, .chunk = 1});
}

static void the_fast_path_keeps_every_tolerance_in_long_runs(void **s)
{
    (void)s;
    for (size_t i = 0; i < DM_COUNT(configs); i++)
        for (size_t k = 0; k < DM_COUNT(lengths); k++) agrees(configs[i], hash_file(configs[i], lengths[k]), (dm_verify_opts){.numerics = DM_NUM_FAST});
    for (const char *const *isa = dm_forward_isas(); *isa; isa++) agrees("tiny2", hash_file("tiny2", 257), (dm_verify_opts){.numerics = DM_NUM_FAST, .isa = *isa, .chunk = 64});
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_exact_path_gives_the_vectors_bytes_in_long_runs),
        cmocka_unit_test(the_exact_path_gives_the_remaining_lengths),
        cmocka_unit_test(the_exact_path_gives_them_token_by_token),
        cmocka_unit_test(the_fast_path_keeps_every_tolerance_in_long_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
