/* The numbers that decide bytes: codes, scale exponents, rotary tables, hyper-connection splits, router scores. */
#include <math.h>

#include "kernels/kernels.h"
#include "testlib.h"

static float float_of(uint32_t u) { float x; memcpy(&x, &u, 4); return x; }
static uint32_t bits_of(float x) { uint32_t u; memcpy(&u, &x, 4); return u; }

static void bf16_rounds_to_nearest_even(void **state) {
    (void)state;
    assert_int_equal(bits_of(dm_bf16_round(float_of(0x3f808000))), 0x3f800000); /* tie, even below */
    assert_int_equal(bits_of(dm_bf16_round(float_of(0x3f818000))), 0x3f820000); /* tie, even above */
    assert_int_equal(bits_of(dm_bf16_round(float_of(0x3f808001))), 0x3f810000);
    assert_int_equal(bits_of(dm_bf16_round(float_of(0xbf807fff))), 0xbf800000);
    assert_int_equal(bits_of(dm_bf16_round(float_of(0x7f7fffff))), 0x7f800000); /* overflow to infinity */
    assert_int_equal(bits_of(dm_bf16_round(-0.0f)), 0x80000000);
    assert_true(isnan(dm_bf16_round(float_of(0x7fffffff)))); /* a carry must not turn NaN into a number */
    assert_true(isnan(dm_bf16_round(float_of(0x7f800001))));
}

/* Nearest grid value by search, ties to the even code. */
static uint8_t nearest(float (*value)(uint8_t), int codes, float x) {
    int best = 0;
    double a = fabs((double)x);
    for (int c = 1; c < codes; c++) {
        double d = fabs(value((uint8_t)c) - a), b = fabs(value((uint8_t)best) - a);
        if (d < b || (d == b && c % 2 == 0)) best = c;
    }
    return (uint8_t)(best | (signbit(x) ? codes == 8 ? 8 : 0x80 : 0));
}

static void e4m3_codes_are_the_nearest_with_ties_to_even(void **state) {
    (void)state;
    assert_true(dm_e4m3_value(0x7e) == 448.0f && dm_e4m3_value(0x01) == 0x1p-9f && dm_e4m3_value(0x08) == 0x1p-6f);
    assert_true(isnan(dm_e4m3_value(0x7f)) && isnan(dm_e4m3_value(0xff)));
    for (int c = 0; c < 256; c++)
        if ((c & 0x7f) != 0x7f) assert_int_equal(dm_e4m3_code(dm_e4m3_value((uint8_t)c)), c);
    for (int c = 0; c < 0x7e; c++) { /* around every midpoint */
        float lo = dm_e4m3_value((uint8_t)c), hi = dm_e4m3_value((uint8_t)(c + 1)), mid = (lo + hi) / 2;
        float probe[3] = {mid, nextafterf(mid, 0), nextafterf(mid, 1e9f)};
        for (int i = 0; i < 3; i++) {
            assert_int_equal(dm_e4m3_code(probe[i]), nearest(dm_e4m3_value, 0x7f, probe[i]));
            assert_int_equal(dm_e4m3_code(-probe[i]), nearest(dm_e4m3_value, 0x7f, -probe[i]));
        }
    }
    assert_int_equal(dm_e4m3_code(1e30f), 0x7e);
    assert_int_equal(dm_e4m3_code(-0.0f), 0x80);
    assert_int_equal(dm_e4m3_code(-1e-9f), 0x80); /* rounds to zero, keeps the sign */
}

static void e2m1_ties_go_to_the_even_code(void **state) {
    (void)state;
    static const float tie[][2] = {{0.25f, 0}, {0.75f, 1}, {1.25f, 1}, {1.75f, 2}, {2.5f, 2}, {3.5f, 4}, {5, 4}};
    for (size_t i = 0; i < DM_COUNT(tie); i++) {
        assert_true(dm_e2m1_value(dm_e2m1_code(tie[i][0])) == tie[i][1]);
        assert_true(dm_e2m1_value(dm_e2m1_code(-tie[i][0])) == -tie[i][1]);
        assert_int_equal(dm_e2m1_code(-tie[i][0]) & 8, 8);
    }
    for (uint8_t c = 0; c < 16; c++) assert_int_equal(dm_e2m1_code(dm_e2m1_value(c)), c);
    for (float x = -7; x < 7; x += 0.0625f) assert_int_equal(dm_e2m1_code(x), nearest(dm_e2m1_value, 8, x));
}

static void scale_exponents_come_from_the_float_product(void **state) {
    (void)state;
    static const struct { float amax; int n; } fp8[] = {{0, -22}, {1e-4f, -22}, {0.875f, -9}, {1, -8}, {3.5f, -7}, {7, -6}, {448, 0}, {449, 1}};
    static const struct { float amax; int n; } fp4[] = {{0, -126}, {0.75f, -3}, {1, -2}, {3, -1}, {6, 0}, {6.1f, 1}};
    for (size_t i = 0; i < DM_COUNT(fp8); i++) assert_int_equal(dm_fp8_scale_exp(fp8[i].amax), fp8[i].n);
    for (size_t i = 0; i < DM_COUNT(fp4); i++) assert_int_equal(dm_fp4_scale_exp(fp4[i].amax), fp4[i].n);
    for (int k = -13; k < 100; k++) assert_int_equal(dm_fp8_scale_exp(ldexpf(448, k)), k);
    for (int k = -126; k < 120; k++) assert_int_equal(dm_fp4_scale_exp(ldexpf(6, k)), k);
}

static void table_hash(const float f[32], char hex[65]) {
    dm_sha256 h;
    dm_hash out;
    dm_sha256_init(&h);
    dm_sha256_add(&h, f, 32 * sizeof *f);
    dm_sha256_end(&h, &out);
    dm_hex(hex, out.b, 32);
}
static const kern_yarn yarn = {.factor = 16, .beta_fast = 32, .beta_slow = 1, .original_max = 65536};

static void rotary_tables_have_the_known_bytes(void **state) {
    (void)state;
    float f[32];
    char hex[65];
    dm_rope_freqs(f, 10000, NULL);
    table_hash(f, hex);
    assert_string_equal(hex, "734f9e6b629f7baccc4de81b7e8d2982035ee1b81f73f158e7d33a4dcf13fa0e");
    dm_rope_freqs(f, 160000, &yarn);
    table_hash(f, hex);
    assert_string_equal(hex, "1f132e9c03f43671d62cb9f1a6ce7cd2941717a7be0676b93aa5a049ca0991b8");
}

static void angles_are_one_float_product_far_out_too(void **state) {
    (void)state;
    float f[32], c[32], s[32];
    dm_rope_freqs(f, 160000, &yarn);
    dm_rope_angles(f, 1000000, c, s);
    assert_true((float)1000000 * f[1] == 687656.062f && (float)1000000 * f[16] == 2265.625f);
    assert_float_equal(c[1], 0.6446286f, 1e-6f);
    assert_float_equal(s[1], -0.7644959f, 1e-6f);
    assert_float_equal(c[16], -0.8594023f, 1e-6f);
    assert_float_equal(s[16], -0.5113f, 1e-4f);
    dm_rope_angles(f, 0, c, s);
    for (int i = 0; i < 32; i++) assert_true(c[i] == 1 && s[i] == 0);
}

/* One row through hc_pre of the exact backend with given mix, scale 1, base 0 and unit RMS. */
static void split_of(const double mix[24], double split[24]) {
    enum { DIM = 128 };
    float h[4 * DIM], x[DIM], base[24] = {0}, scale[3] = {1, 1, 1};
    for (int i = 0; i < 4 * DIM; i++) h[i] = 1; /* mean square 1: r = 1/sqrt(1 + 1e-6) */
    double m[24];
    for (int i = 0; i < 24; i++) m[i] = mix[i] * sqrt(1 + 1e-6);
    dm_kernels_exact()->hc_pre(&(kern_hc_pre){.h = h, .h_stride = 4 * DIM, .mix = m, .base = base, .scale = scale, .split = split, .x = x,
                                              .x_stride = DIM, .rows = 1, .dim = DIM, .sinkhorn_iters = 20, .rms_eps = 1e-6, .hc_eps = 1e-6});
}

static void hyper_connection_split_has_the_known_values(void **state) {
    (void)state;
    static const double pre[4] = {0.2314762, 0.2497409, 0.2689424, 0.2890515}, post[4] = {0.620051, 0.6636245, 0.7086874, 0.7550813};
    double mix[24], split[24];
    for (int i = 0; i < 24; i++) mix[i] = (i - 12) / 10.0;
    split_of(mix, split);
    for (int i = 0; i < 4; i++) {
        assert_true(fabs(split[i] - pre[i]) < 2e-7);
        assert_true(fabs(split[4 + i] - post[i]) < 2e-7);
    }
    for (int i = 8; i < 24; i++) assert_true(fabs(split[i] - 0.25) < 1e-6);
}

static void sinkhorn_ends_on_columns_with_sources_in_rows(void **state) {
    (void)state;
    static const double logits[16] = {2, 0, -1, .5, 0, 1, 0, -2, 1, 1, 3, 0, -.5, .25, 0, 1};
    static const double want[16] = {.623407, .096316, .027023, .253253, .191564, .594455, .166779, .047202,
                                    .108174, .123491, .695881, .072453, .076854, .185737, .110317, .62709};
    double mix[24] = {0}, split[24];
    memcpy(mix + 8, logits, sizeof logits);
    split_of(mix, split);
    for (int i = 0; i < 16; i++) assert_true(fabs(split[8 + i] - want[i]) < 1e-6);
    for (int k = 0; k < 4; k++) {
        double row = 0, column = 0;
        for (int j = 0; j < 4; j++) row += split[8 + 4 * k + j], column += split[8 + 4 * j + k];
        assert_true(fabs(row - 0.999999) < 1e-6 && fabs(column - 0.999999) < 1e-6);
    }
}

static void router_scores_are_the_root_of_softplus(void **state) {
    (void)state;
    static const double in[5] = {-5, 0, 1, 5, 25}, want[5] = {0.0819472, 0.8325546, 1.1459763, 2.2375691, 5};
    float bias[5] = {0};
    double weight[5], work[5];
    int32_t id[5];
    dm_kernels_exact()->route(&(kern_route){.logit = in, .bias = bias, .experts = 5, .k = 5, .scale = 1, .id = id, .weight = weight, .work = work});
    double sum = 0;
    for (int i = 0; i < 5; i++) sum += want[i];
    for (int i = 0; i < 5; i++) {
        assert_int_equal(id[i], i);
        assert_true(fabs(weight[i] * sum - want[i]) < 1e-6);
    }
}

static void router_prefers_the_lowest_id_and_biases_only_the_choice(void **state) {
    (void)state;
    double logit[6] = {1, 1, 1, 1, 1, -3}, weight[3], work[6];
    float bias[6] = {0, 0, 0, 0, 0, 5}, margin;
    int32_t id[3];
    dm_kernels_exact()->route(&(kern_route){.logit = logit, .bias = bias, .experts = 6, .k = 3, .scale = 2.5, .id = id, .weight = weight, .margin = &margin, .work = work});
    assert_int_equal(id[0], 0);
    assert_int_equal(id[1], 1);
    assert_int_equal(id[2], 5);
    assert_true(margin == 0.0f);
    assert_true(weight[0] == weight[1] && weight[2] < weight[0]); /* 5's own score is small */
    assert_true(fabs(weight[0] + weight[1] + weight[2] - 2.5) < 1e-12);
}

static void hash_layers_take_the_given_experts_in_ascending_order(void **state) {
    (void)state;
    double logit[4] = {0, 1, 2, 3}, weight[2], work[4];
    int64_t fixed[2] = {3, 1};
    float margin = 7;
    int32_t id[2];
    dm_kernels_exact()->route(&(kern_route){.logit = logit, .fixed = fixed, .experts = 4, .k = 2, .scale = 1, .id = id, .weight = weight, .margin = &margin, .work = work});
    assert_true(id[0] == 1 && id[1] == 3 && weight[1] > weight[0] && margin == 7);
}

static void route_weights_stay_in_double(void **state) {
    (void)state;
    double logit[3] = {0.3, -1.7, 2.2}, weight[2], work[3], s[3], sum = 0;
    float bias[3] = {0};
    int32_t id[2];
    for (int e = 0; e < 3; e++) s[e] = sqrt(log1p(exp(logit[e])));
    dm_kernels_exact()->route(&(kern_route){.logit = logit, .bias = bias, .experts = 3, .k = 2, .scale = 2.5, .id = id, .weight = weight, .work = work});
    assert_true(id[0] == 0 && id[1] == 2);
    sum = s[0] + s[2];
    assert_true(fabs(weight[0] - s[0] / sum * 2.5) < 1e-15 && fabs(weight[1] - s[2] / sum * 2.5) < 1e-15);
    assert_true((double)(float)weight[0] != weight[0]);
}

static void norms_have_their_epsilon_inside_the_root(void **state) {
    (void)state;
    enum { DIM = 128 };
    float x[DIM], y[DIM];
    uint16_t one[DIM];
    for (int i = 0; i < DIM; i++) x[i] = 0x1p-10f, one[i] = 0x3f80; /* mean square 2^-20, as large as the epsilon */
    dm_kernels_exact()->rmsnorm(&(kern_rmsnorm){.x = x, .x_stride = DIM, .weight = one, .y = y, .y_stride = DIM, .rows = 1, .dim = DIM, .eps = 1e-6});
    assert_float_equal(y[0], 0x1p-10 / sqrt(0x1p-20 + 1e-6), 1e-7);
}

/* What malformed weights produce must stay in memory that is ours: indices in range, distinct, ascending. */
static void not_a_number_in_leads_to_valid_indices(void **state) {
    (void)state;
    enum { N = 40, K = 9 };
    static const float odd[4] = {NAN, INFINITY, -INFINITY, 0};
    const dm_kernels *tables[5] = {dm_kernels_exact()};
    int n = 1;
    for (const char *const *isa = dm_kernels_isas(); *isa; isa++) tables[n++] = dm_kernels_get(*isa);
    for (int t = 0; t < n; t++)
        for (int kind = 0; kind < 16; kind++) {
            float score[N], bias[N] = {0}, x[512], one[32] = {0}, margin;
            double logit[N], work[N], weight[K]; /* large enough for either real */
            int32_t sel[K], id[K];
            uint16_t norm[512] = {0x3f80};
            uint8_t row[KERN_ROW_FP8_BYTES];
            for (int i = 0; i < N; i++) score[i] = odd[(kind >> (i % 2 * 2)) % 4];
            memset(logit, 0, sizeof logit);
            for (int i = 0; i < N; i++) {
                double d = (double)score[i];
                memcpy((char *)logit + i * tables[t]->real_bytes, tables[t]->real_bytes == 8 ? (void *)&d : (void *)&score[i], (size_t)tables[t]->real_bytes);
            }
            tables[t]->topk(&(kern_topk){.score = score, .n = N, .k = K, .sel = sel, .margin = &margin});
            tables[t]->route(&(kern_route){.logit = logit, .bias = bias, .experts = N, .k = K, .scale = 1, .id = id, .weight = weight, .margin = &margin, .work = work});
            for (int i = 0; i < K; i++) {
                assert_in_range(sel[i], i ? sel[i - 1] + 1 : 0, N - 1);
                assert_in_range(id[i], i ? id[i - 1] + 1 : 0, N - 1);
            }
            for (int i = 0; i < 512; i++) x[i] = odd[(kind >> (i % 2 * 2)) % 4];
            tables[t]->quant(&(kern_quant){.x = x, .x_stride = 512, .y = x, .y_stride = 512, .rows = 1, .dim = 512});
            tables[t]->kv_row(&(kern_kv_row){.x = x, .weight = norm, .cos = one, .sin = one, .eps = 1e-6, .round = true, .row = row});
            assert_int_equal(row[583], 0);
        }
}

static void fp8_activations_keep_a_floor_and_the_sign_of_zero(void **state) {
    (void)state;
    float x[256] = {0}, y[256];
    x[1] = -0.0f, x[2] = 1e-9f;            /* block amax below the floor: scale 2^-22 */
    x[128] = 448, x[129] = -0.1f, x[130] = 17; /* scale 1 */
    dm_kernels_exact()->quant(&(kern_quant){.x = x, .x_stride = 256, .y = y, .y_stride = 256, .rows = 1, .dim = 256});
    assert_int_equal(bits_of(y[1]), 0x80000000);
    assert_true(y[2] == (float)(round(1e-9 / 0x1p-31) * 0x1p-31)); /* a subnormal code */
    assert_true(y[128] == 448 && y[129] == -0.1015625f && y[130] == 16); /* 17 lies between 16 and 18: even */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bf16_rounds_to_nearest_even),
        cmocka_unit_test(e4m3_codes_are_the_nearest_with_ties_to_even),
        cmocka_unit_test(e2m1_ties_go_to_the_even_code),
        cmocka_unit_test(scale_exponents_come_from_the_float_product),
        cmocka_unit_test(rotary_tables_have_the_known_bytes),
        cmocka_unit_test(angles_are_one_float_product_far_out_too),
        cmocka_unit_test(hyper_connection_split_has_the_known_values),
        cmocka_unit_test(sinkhorn_ends_on_columns_with_sources_in_rows),
        cmocka_unit_test(router_scores_are_the_root_of_softplus),
        cmocka_unit_test(router_prefers_the_lowest_id_and_biases_only_the_choice),
        cmocka_unit_test(hash_layers_take_the_given_experts_in_ascending_order),
        cmocka_unit_test(route_weights_stay_in_double),
        cmocka_unit_test(norms_have_their_epsilon_inside_the_root),
        cmocka_unit_test(not_a_number_in_leads_to_valid_indices),
        cmocka_unit_test(fp8_activations_keep_a_floor_and_the_sign_of_zero),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
