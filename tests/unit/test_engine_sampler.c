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

static void logits_that_are_not_numbers_are_an_error_and_no_token(void **state)
{
    (void)state;
    float l[V];
    dm_sampler greedy = make(0, 0, 1, 0, 1), warm = make(1, 0, 1, 0, 1);
    uint64_t rng = warm.rng;
    void *scratch = NULL;
    for (int i = 0; i < V; i++) l[i] = -INFINITY;
    assert_err(DM_EFORMAT, dm_sampler_pick(&greedy, l, V, NULL));
    assert_err(DM_EFORMAT, dm_sampler_pick(&warm, l, V, &scratch));
    assert_int_equal(dm_logits_nan(l, V), -1);
    for (int i = 0; i < V; i++) { /* wherever it is, and whatever the others are */
        l[i] = NAN, l[(i + 3) % V] = i & 1 ? 5 : INFINITY;
        assert_int_equal(dm_logits_nan(l, V), i);
        assert_err(DM_EFORMAT, dm_sampler_pick(&greedy, l, V, NULL));
        assert_err(DM_EFORMAT, dm_sampler_pick(&warm, l, V, &scratch));
        l[i] = l[(i + 3) % V] = -INFINITY;
    }
    assert_true(warm.rng == rng);
    dm_free(scratch);
}

static void infinities_are_ordered_like_other_logits(void **state)
{
    (void)state;
    float l[V];
    dm_sampler greedy = make(0, 0, 1, 0, 1), warm = make(1, 0, 1, 0, 1);
    void *scratch = NULL;
    for (int i = 0; i < V; i++) l[i] = -INFINITY;
    l[11] = -5;
    assert_int_equal(dm_sampler_pick(&greedy, l, V, NULL), 11);
    for (int i = 0; i < 50; i++) assert_int_equal(dm_sampler_pick(&warm, l, V, &scratch), 11);
    l[3] = l[12] = INFINITY;
    assert_int_equal(dm_sampler_pick(&greedy, l, V, NULL), 3);
    for (int i = 0; i < 50; i++) assert_int_equal(dm_sampler_pick(&warm, l, V, &scratch), 3);
    dm_free(scratch);
}

/* The same rules told again, slowly: sort all, filter the list, draw. */
typedef struct ref { double w; int id; } ref;
static int ref_order(const void *a, const void *b)
{
    const ref *x = a, *y = b;
    return x->w > y->w ? -1 : x->w < y->w ? 1 : x->id - y->id;
}
/* The candidates that are left, most probable first. */
static int ref_filter(const float *l, int n, const dm_sample_params *p, ref *r)
{
    double max = -INFINITY, mass = 0, sum = 0;
    int count = 0, kept = 0;
    for (int i = 0; i < n; i++)
        if ((double)l[i] > max) max = (double)l[i];
    for (int i = 0; i < n; i++)
        if (l[i] > -INFINITY) r[count++] = (ref){exp(((double)l[i] - max) / p->temperature), i};
    qsort(r, (size_t)count, sizeof *r, ref_order);
    if (p->top_k > 0 && count > p->top_k) count = p->top_k;
    for (int i = 0; i < count; i++) mass += r[i].w;
    for (; kept < count && (kept == 0 || sum < p->top_p * mass); kept++) sum += r[kept].w;
    if (p->top_p >= 1) kept = count;
    for (count = kept, kept = 0; kept < count && (kept == 0 || r[kept].w >= p->min_p); kept++) {}
    return kept;
}

/* Against the plain rules, with many ties and infinities: nothing that they leave out is ever drawn, and what they leave is drawn as often
 * as it should be. */
static void draws_are_those_of_the_plain_rules(void **state)
{
    (void)state;
    enum { N = 40, CASES = 400, DRAWS = 400 };
    uint64_t rng = test_seed();
    void *scratch = NULL;
    double worst = 0;
    for (int k = 0; k < CASES; k++) {
        float l[N];
        ref r[N];
        int c[N] = {0};
        uint64_t z = dm_splitmix64(&rng);
        for (int i = 0; i < N; i++) {
            uint64_t y = dm_splitmix64(&rng);
            l[i] = (y & 15) == 0 ? -INFINITY : (float)((int)(y >> 8 & 15) - 8) * 0.5f; /* of 16 values: ties */
        }
        l[z % N] = 1; /* one at least is finite */
        dm_sample_params p = {.temperature = 0.3 + 0.1 * (double)(z >> 8 & 15), .top_p = z >> 12 & 1 ? 0.05 + 0.06 * (double)(z >> 16 & 15) : 1,
                              .top_k = z >> 13 & 1 ? 1 + (int)(z >> 20 & 15) : 0, .min_p = z >> 14 & 1 ? 0.02 * (double)(z >> 24 & 15) : 0, .seed = z};
        dm_sampler s;
        dm_sampler_init(&s, &p);
        int left = ref_filter(l, N, &p, r);
        double total = 0, chi2 = 0;
        for (int i = 0; i < DRAWS; i++) c[dm_sampler_pick(&s, l, N, &scratch)]++;
        for (int i = 0; i < left; i++) total += r[i].w;
        int seen = 0, cells = 0;
        for (int i = 0; i < left; i++) {
            double want = DRAWS * r[i].w / total;
            seen += c[r[i].id];
            if (want >= 5) chi2 += (c[r[i].id] - want) * (c[r[i].id] - want) / want, cells++;
        }
        if (seen != DRAWS) fail_msg("case %d: a token was drawn that top-k %d, top-p %g, min-p %g leave out", k, p.top_k, p.top_p, p.min_p);
        /* Six standard deviations of chi-square with so many cells; the seed is printed. */
        double bound = cells + 6 * sqrt(2.0 * cells) + 12;
        if (chi2 / bound > worst) worst = chi2 / bound;
        if (chi2 > bound) fail_msg("case %d: chi-square %g over %d cells", k, chi2, cells);
    }
    printf("# largest chi-square: %.2f of the bound\n", worst);
    dm_free(scratch);
}

/* The k-th token that is drawn has the k-th random number, whatever the filters: so it does not matter what was drawn from before. */
static void each_draw_is_one_step_of_the_stream(void **state)
{
    (void)state;
    void *scratch = NULL;
    float flat[V] = {0}, sharp[V] = {0};
    sharp[3] = 50;
    dm_sampler a = make(1, 0, 1, 0, 77), b = make(0.7, 1, 0.3, 0.5, 77);
    for (int i = 0; i < 100; i++) {
        dm_sampler_pick(&a, flat, V, &scratch);
        dm_sampler_pick(&b, i & 1 ? sharp : flat, V, &scratch);
        assert_true(a.rng == b.rng);
    }
    dm_free(scratch);
}

/* ---- logprobs ---- */

static void logprobs_are_the_logs_of_the_raw_softmax(void **state)
{
    (void)state;
    enum { N = 700, CASES = 60 };
    uint64_t rng = test_seed() + 5;
    float l[N];
    double p[N];
    for (int k = 0; k < CASES; k++) {
        double z = 0;
        for (int i = 0; i < N; i++) {
            uint64_t y = dm_splitmix64(&rng);
            l[i] = (y & 7) == 0 ? -INFINITY : (float)((int)(y >> 8 & 255) - 128) * 0.15f + (k & 1 ? 300 : 0); /* no overflow far from 0 */
        }
        for (int i = 0; i < N; i++) z += p[i] = exp((double)l[i] - (k & 1 ? 300 : 0));
        int n = k % (DM_LOGPROBS_MAX + 1), id = (int)(dm_splitmix64(&rng) % N);
        dm_logprob top[DM_LOGPROBS_MAX + 1];
        memset(top, 0xEE, sizeof top);
        float got = dm_logprobs(l, N, id, top, n), want = (float)log(p[id] / z);
        if (isinf(want) ? got != want : fabsf(got - want) > 2e-4f) fail_msg("logprob of %d: %g, not %g", id, (double)got, (double)want);
        bool used[N] = {0};
        for (int i = 0; i < n; i++) { /* the next best each time, equal ones by id */
            int best = -1;
            for (int v = 0; v < N; v++)
                if (!used[v] && (best < 0 || l[v] > l[best])) best = v;
            used[best] = true;
            assert_int_equal(top[i].id, best);
            assert_true(fabsf(top[i].logprob - (float)log(p[best] / z)) <= 2e-4f);
        }
        assert_int_equal(top[n].id, (int32_t)0xEEEEEEEE); /* and no further */
    }
}

static void logprobs_of_infinities_and_small_vocabularies(void **state)
{
    (void)state;
    float l[3] = {INFINITY, 2, INFINITY}, none[3] = {-INFINITY, -INFINITY, -INFINITY};
    dm_logprob top[5];
    assert_true(fabsf(dm_logprobs(l, 3, 2, top, 5) - logf(0.5f)) < 1e-6f);
    assert_int_equal(top[0].id, 0);
    assert_int_equal(top[1].id, 2);
    assert_int_equal(top[2].id, 1);
    assert_true(isinf(top[2].logprob) && top[2].logprob < 0);
    assert_true(dm_logprobs(none, 3, 1, NULL, 0) == -INFINITY);
    l[0] = l[1] = l[2] = 7;
    assert_true(fabsf(dm_logprobs(l, 3, 1, NULL, 0) - logf(1.0f / 3)) < 1e-6f);
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
        cmocka_unit_test(logits_that_are_not_numbers_are_an_error_and_no_token),
        cmocka_unit_test(infinities_are_ordered_like_other_logits),
        cmocka_unit_test(draws_are_those_of_the_plain_rules),
        cmocka_unit_test(each_draw_is_one_step_of_the_stream),
        cmocka_unit_test(logprobs_are_the_logs_of_the_raw_softmax),
        cmocka_unit_test(logprobs_of_infinities_and_small_vocabularies),
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
