/* Sampling: filters, ties, bad logits, and a state that can be saved. */
#include <math.h>

#include "engine/engine.h"
#include "testlib.h"

enum { V = 16 };

static dm_sampler make(double temperature, int top_k, double top_p, double min_p, uint64_t seed)
{
    dm_sampler s;
    dm_sample_params p = {.temperature = temperature, .top_k = top_k, .top_p = top_p, .min_p = min_p, .seed = seed};
    dm_sampler_init(&s, &p);
    return s;
}

/* Counts of n draws. */
static void count(dm_sampler *s, const float *logits, int n, int counts[V])
{
    void *scratch = NULL;
    memset(counts, 0, V * sizeof *counts);
    for (int i = 0; i < n; i++) {
        int id = dm_sampler_pick(s, logits, V, &scratch);
        assert_in_range(id, 0, V - 1);
        counts[id]++;
    }
    dm_free(scratch);
}

static void greedy_takes_the_first_of_the_largest(void **state)
{
    (void)state;
    float l[V] = {0, 3, 7, 7, -1, 7};
    dm_sampler s = make(0, 0, 1, 0, 1);
    uint64_t rng = s.rng;
    assert_int_equal(dm_sampler_pick(&s, l, V, NULL), 2);
    assert_true(s.rng == rng); /* and draws nothing */
}

static void what_is_not_a_number_counts_as_minus_infinity(void **state)
{
    (void)state;
    float l[V];
    for (int i = 0; i < V; i++) l[i] = i % 2 ? NAN : -INFINITY;
    dm_sampler greedy = make(0, 0, 1, 0, 1), warm = make(1, 0, 1, 0, 1);
    void *scratch = NULL;
    assert_err(DM_EFORMAT, dm_sampler_pick(&greedy, l, V, NULL));
    assert_err(DM_EFORMAT, dm_sampler_pick(&warm, l, V, &scratch));
    l[11] = -5;
    assert_int_equal(dm_sampler_pick(&greedy, l, V, NULL), 11);
    for (int i = 0; i < 50; i++) assert_int_equal(dm_sampler_pick(&warm, l, V, &scratch), 11);
    l[3] = INFINITY;
    assert_int_equal(dm_sampler_pick(&warm, l, V, &scratch), 3);
    dm_free(scratch);
}

static void draws_follow_the_softmax(void **state)
{
    (void)state;
    enum { N = 60000 };
    float l[V];
    for (int i = 0; i < V; i++) l[i] = (float)(i % 5) * 0.7f - 1;
    for (int t = 0; t < 3; t++) {
        double temperature = (double[]){0.5, 1, 2.5}[t], z = 0, chi2 = 0;
        dm_sampler s = make(temperature, 0, 1, 0, 7 + (uint64_t)t);
        int c[V];
        count(&s, l, N, c);
        for (int i = 0; i < V; i++) z += exp((double)l[i] / temperature);
        for (int i = 0; i < V; i++) {
            double want = N * exp((double)l[i] / temperature) / z;
            chi2 += (c[i] - want) * (c[i] - want) / want;
        }
        /* 15 degrees of freedom: 99.9 % lie below 37.7.  The seed is fixed, so this never flickers. */
        if (chi2 > 37.7) fail_msg("temperature %g: chi-square %g", temperature, chi2);
    }
}

static void top_k_leaves_the_k_largest_and_ties_go_by_id(void **state)
{
    (void)state;
    float l[V] = {0};
    l[9] = 1;
    dm_sampler s = make(1, 3, 1, 0, 3);
    int c[V];
    count(&s, l, 3000, c);
    for (int i = 0; i < V; i++) assert_int_equal(c[i] > 0, i == 9 || i == 0 || i == 1);
    s = make(1, 1, 1, 0, 3);
    count(&s, l, 100, c);
    assert_int_equal(c[9], 100);
}

static void top_p_leaves_the_shortest_run_that_reaches_p(void **state)
{
    (void)state;
    float l[V];
    for (int i = 0; i < V; i++) l[i] = -30;
    l[4] = logf(0.5f), l[2] = logf(0.3f), l[7] = logf(0.15f), l[1] = logf(0.05f);
    int c[V];
    dm_sampler s = make(1, 0, 0.79, 0, 5);
    count(&s, l, 4000, c);
    assert_int_equal(c[4] + c[2], 4000);
    assert_true(c[2] > 0);
    s = make(1, 0, 0.81, 0, 5);
    count(&s, l, 4000, c);
    assert_int_equal(c[4] + c[2] + c[7], 4000);
    assert_true(c[7] > 0);
    s = make(1, 0, 0, 0, 5); /* the largest always stays */
    count(&s, l, 100, c);
    assert_int_equal(c[4], 100);
}

static void top_p_is_a_share_of_what_top_k_left(void **state)
{
    (void)state;
    float l[V];
    for (int i = 0; i < V; i++) l[i] = -30;
    l[4] = logf(0.4f), l[2] = logf(0.3f), l[7] = logf(0.2f), l[1] = logf(0.1f);
    int c[V];
    dm_sampler s = make(1, 2, 0.55, 0, 5); /* of 0.4 + 0.3 the first alone has 0.571 */
    count(&s, l, 1000, c);
    assert_int_equal(c[4], 1000);
}

static void min_p_is_relative_to_the_largest(void **state)
{
    (void)state;
    float l[V];
    for (int i = 0; i < V; i++) l[i] = -30;
    l[4] = logf(0.5f), l[2] = logf(0.26f), l[7] = logf(0.2f), l[1] = logf(0.04f);
    int c[V];
    dm_sampler s = make(1, 0, 1, 0.5, 5);
    count(&s, l, 4000, c);
    assert_int_equal(c[4] + c[2], 4000);
    assert_true(c[2] > 0);
    s = make(1, 0, 1, 1.5, 5); /* nothing would be left */
    count(&s, l, 100, c);
    assert_int_equal(c[4], 100);
}

static void a_saved_state_goes_on_with_the_same_tokens(void **state)
{
    (void)state;
    float l[V];
    for (int i = 0; i < V; i++) l[i] = (float)(i * 7 % 11) * 0.2f;
    dm_sampler a = make(0.9, 12, 0.95, 0.01, 99);
    void *scratch = NULL;
    for (int i = 0; i < 37; i++) dm_sampler_pick(&a, l, V, &scratch);
    uint64_t saved = a.rng;
    int want[64];
    for (int i = 0; i < 64; i++) want[i] = dm_sampler_pick(&a, l, V, &scratch);
    dm_sampler b = make(0.9, 12, 0.95, 0.01, 1);
    b.rng = saved;
    void *other = NULL;
    for (int i = 0; i < 64; i++) assert_int_equal(dm_sampler_pick(&b, l, V, &other), want[i]);
    dm_free(scratch);
    dm_free(other);
}

static void the_same_seed_gives_the_same_tokens_and_another_gives_others(void **state)
{
    (void)state;
    float l[V] = {0};
    int differ = 0;
    dm_sampler a = make(1, 0, 1, 0, 5), b = make(1, 0, 1, 0, 5), c = make(1, 0, 1, 0, 6);
    void *scratch = NULL;
    for (int i = 0; i < 200; i++) {
        int x = dm_sampler_pick(&a, l, V, &scratch);
        assert_int_equal(x, dm_sampler_pick(&b, l, V, &scratch));
        differ += x != dm_sampler_pick(&c, l, V, &scratch);
    }
    assert_in_range(differ, 100, 200);
    dm_free(scratch);
}

static void scratch_grows_with_the_vocabulary_and_failure_is_told(void **state)
{
    (void)state;
    float *l = calloc(5000, sizeof *l);
    dm_sampler s = make(1, 0, 1, 0, 5);
    void *scratch = NULL;
    assert_in_range(dm_sampler_pick(&s, l, 10, &scratch), 0, 9);
    dm_fault_alloc_after(1);
    assert_err(DM_ENOMEM, dm_sampler_pick(&s, l, 5000, &scratch));
    dm_fault_alloc_after(-1);
    assert_in_range(dm_sampler_pick(&s, l, 5000, &scratch), 0, 4999);
    assert_err(DM_EINVAL, dm_sampler_pick(&s, l, 10, NULL));
    dm_free(scratch);
    free(l);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(greedy_takes_the_first_of_the_largest),
        cmocka_unit_test(what_is_not_a_number_counts_as_minus_infinity),
        cmocka_unit_test(draws_follow_the_softmax),
        cmocka_unit_test(top_k_leaves_the_k_largest_and_ties_go_by_id),
        cmocka_unit_test(top_p_leaves_the_shortest_run_that_reaches_p),
        cmocka_unit_test(top_p_is_a_share_of_what_top_k_left),
        cmocka_unit_test(min_p_is_relative_to_the_largest),
        cmocka_unit_test(a_saved_state_goes_on_with_the_same_tokens),
        cmocka_unit_test(the_same_seed_gives_the_same_tokens_and_another_gives_others),
        cmocka_unit_test(scratch_grows_with_the_vocabulary_and_failure_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
