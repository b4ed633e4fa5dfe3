/* The engine against the vectors of an independent implementation.
 *
 * exact: every tensor of every run has the vectors' bytes.  plain: logits within 5e-4, routes and selections equal.
 * fast: every sublayer within its tolerance, fed with the exact path's inputs, on every instruction set that this
 * processor has.  Long runs are in soak/test_engine_conformance_long.c. */
#include "tests/lib/engine_verify.h"

/* Sanitizers are after the code's manners, which a few lengths show as well as all; the second configuration leaves
 * the longer lengths to the long runs. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SANITIZED = 1, SECOND_LENGTHS = 2 };
static const int lengths[] = {1, 4, 129};
#else
enum { SANITIZED = 0, SECOND_LENGTHS = 7 };
static const int lengths[] = {1, 3, 4, 5, 128, 129, 257, 127, 255, 256};
#endif
static size_t length_count(size_t config) { return config == 0 ? DM_COUNT(lengths) : SECOND_LENGTHS; }

static void synthetic_checkpoints_have_the_vectors_bytes(void **s)
{
    (void)s;
    for (size_t i = 0; i < DM_COUNT(configs); i++) {
        char name[64];
        snprintf(name, sizeof name, "vectors/hash/%s.checkpoint.txt", configs[i]);
        agrees(configs[i], test_data(name), (dm_verify_opts){0});
    }
}

static void the_exact_path_gives_the_vectors_bytes_at_every_length(void **s)
{
    (void)s;
    for (size_t i = 0; i < DM_COUNT(configs); i++)
        for (size_t k = 0; k < length_count(i); k++) agrees(configs[i], hash_file(configs[i], lengths[k]), (dm_verify_opts){.numerics = DM_NUM_EXACT});
}

static void the_exact_path_gives_the_same_bytes_for_every_chunk_and_thread_count(void **s)
{
    (void)s;
    static const struct { int chunk, threads; } ways[] = {{1, 1}, {7, 2}, {64, 3}, {100, 1}};
    for (size_t i = 0; i < DM_COUNT(configs); i++)
        for (size_t k = 0; k < DM_COUNT(ways); k++) {
            int n = ways[k].chunk == 1 ? 5 : 129;
            if (i > 0 && (ways[k].chunk != 64 || SANITIZED)) continue;
            agrees(configs[i], hash_file(configs[i], n), (dm_verify_opts){.numerics = DM_NUM_EXACT, .chunk = ways[k].chunk, .threads = ways[k].threads});
        }
}

static void the_plain_path_agrees_end_to_end(void **s)
{
    (void)s;
    for (size_t i = 0; i < DM_COUNT(configs); i++) {
        char name[64];
        snprintf(name, sizeof name, "vectors/%s-plain-n257.safetensors", configs[i]);
        for (const char *const *isa = dm_forward_isas(); *isa && !SANITIZED; isa++) agrees(configs[i], test_data(name), (dm_verify_opts){.numerics = DM_NUM_PLAIN, .isa = *isa});
        agrees(configs[i], test_data(name), (dm_verify_opts){.numerics = DM_NUM_PLAIN, .chunk = 7});
    }
}

static void the_fast_path_keeps_every_tolerance_on_every_instruction_set(void **s)
{
    (void)s;
    for (size_t i = 0; i < DM_COUNT(configs); i++) {
        int n = i == 0 ? 129 : 5;
        for (const char *const *isa = dm_forward_isas(); *isa; isa++) agrees(configs[i], hash_file(configs[i], n), (dm_verify_opts){.numerics = DM_NUM_FAST, .isa = *isa});
        for (size_t k = 0; k < length_count(i); k++)
            if (lengths[k] <= 5 || lengths[k] == 129)
                agrees(configs[i], hash_file(configs[i], lengths[k]), (dm_verify_opts){.numerics = DM_NUM_FAST});
    }
}

static void the_fast_path_keeps_them_in_chunks_too(void **s)
{
    (void)s;
    agrees("tiny", hash_file("tiny", 129), (dm_verify_opts){.numerics = DM_NUM_FAST, .chunk = 7, .threads = 2});
    agrees("tiny", hash_file("tiny", 129), (dm_verify_opts){.numerics = DM_NUM_FAST, .chunk = 64, .threads = 1});
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(synthetic_checkpoints_have_the_vectors_bytes),
        cmocka_unit_test(the_exact_path_gives_the_vectors_bytes_at_every_length),
        cmocka_unit_test(the_exact_path_gives_the_same_bytes_for_every_chunk_and_thread_count),
        cmocka_unit_test(the_plain_path_agrees_end_to_end),
        cmocka_unit_test(the_fast_path_keeps_every_tolerance_on_every_instruction_set),
        cmocka_unit_test(the_fast_path_keeps_them_in_chunks_too),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
