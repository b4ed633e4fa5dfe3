/* Saved states as hostile input: cut short, padded, bits turned over, from elsewhere.  All are refused with an error
 * that says which, and the sequence stays fresh: the true state loads afterwards. */
#include "forward_test.h"

typedef struct saved {
    dm_model *m;
    dm_forward *f;
    dm_buf state;   /* at position 270, with logits */
    uint8_t *block;
    dm_fseq *s;     /* fresh, block 0 loaded */
} saved;

static saved setup(void) {
    saved v = {0};
    dm_err e = {0};
    v.m = forward_test_embedded();
    v.f = forward_test_create(v.m, (dm_forward_opts){.threads = 1});
    int32_t *ids = forward_test_ids(v.f, 1);
    float *logits = malloc((size_t)v.f->vocab * sizeof *logits);
    dm_fseq *s = forward_test_seq(v.f);
    const void *block;
    forward_test_feed(v.f, s, ids, 270, 256, logits);
    assert_ok_e(v.f->ops->state_save(v.f, s, &v.state, &e), e);
    assert_ok_e(v.f->ops->block(v.f, s, 0, &block, &e), e);
    v.block = malloc(v.f->block_bytes);
    assert_non_null(v.block);
    memcpy(v.block, block, v.f->block_bytes);
    v.f->ops->seq_destroy(v.f, s);
    v.s = forward_test_seq(v.f);
    assert_ok_e(v.f->ops->block_load(v.f, v.s, 0, v.block, &e), e);
    free(ids), free(logits);
    return v;
}
/* The sequence must still take the true state. */
static void finish(saved *v) {
    dm_err e = {0};
    assert_ok_e(v->f->ops->state_load(v->f, v->s, v->state.p, v->state.n, &e), e);
    assert_int_equal(v->f->ops->seq_pos(v->s), 270);
    v->f->ops->seq_destroy(v->f, v->s);
    free(v->block);
    dm_buf_free(&v->state);
    dm_forward_destroy(v->f);
    dm_model_close(v->m);
}
static int load(saved *v, const void *p, size_t n) {
    dm_err e = {0};
    int rc = v->f->ops->state_load(v->f, v->s, p, n, &e);
    if (rc < 0) assert_true(e.code == rc && e.text[0]);
    assert_int_equal(v->f->ops->seq_pos(v->s), 0);
    return rc;
}
/* A copy in memory of exactly n bytes, so that a sanitizer sees any read behind it. */
static int load_copy(saved *v, size_t n, size_t flip_bit, bool flip) {
    uint8_t *p = malloc(n ? n : 1);
    assert_non_null(p);
    memcpy(p, v->state.p, n < v->state.n ? n : v->state.n);
    if (n > v->state.n) memset(p + v->state.n, 0, n - v->state.n);
    if (flip) p[flip_bit / 8] ^= (uint8_t)(1u << flip_bit % 8);
    int rc = load(v, p, n);
    free(p);
    return rc;
}

static void a_state_cut_short_or_padded_is_refused(void **state) {
    (void)state;
    saved v = setup();
    uint64_t rng = test_seed();
    for (size_t n = 0; n < 200; n++) assert_err(DM_EFORMAT, load_copy(&v, n, 0, false));
    for (int i = 0; i < 100; i++) assert_err(DM_EFORMAT, load_copy(&v, dm_splitmix64(&rng) % v.state.n, 0, false));
    for (size_t n = 1; n < 20; n++) {
        assert_err(DM_EFORMAT, load_copy(&v, v.state.n - n, 0, false));
        assert_err(DM_EFORMAT, load_copy(&v, v.state.n + n, 0, false));
    }
    finish(&v);
}
static void any_bit_turned_over_is_noticed(void **state) {
    (void)state;
    saved v = setup();
    uint64_t rng = test_seed();
    for (size_t bit = 0; bit < 80 * 8; bit++) assert_true(load_copy(&v, v.state.n, bit, true) < 0);
    for (int i = 0; i < 400; i++) assert_err(DM_ECORRUPT, load_copy(&v, v.state.n, 640 + dm_splitmix64(&rng) % ((v.state.n - 80) * 8), true));
    finish(&v);
}

/* Puts the checksum of a changed header right: then only the checks of meaning are left. */
static void seal(uint8_t *p, size_t n) {
    uint8_t both[80];
    memcpy(both, p, 64);
    dm_xxh3_128(both + 64, p + 80, n - 80);
    dm_xxh3_128(p + 64, both, sizeof both);
}
static int load_changed(saved *v, size_t at, uint64_t value, size_t width, size_t n) {
    uint8_t *p = calloc(1, n);
    assert_non_null(p);
    memcpy(p, v->state.p, n < v->state.n ? n : v->state.n);
    memcpy(p + at, &value, width);
    uint64_t payload = n - 80;
    if (at != 56) memcpy(p + 56, &payload, 8);
    seal(p, n);
    int rc = load(v, p, n);
    free(p);
    return rc;
}
static void a_wrong_header_with_a_right_checksum_is_refused(void **state) {
    (void)state;
    saved v = setup();
    size_t n = v.state.n;
    assert_err(DM_EVERSION, load_changed(&v, 8, 2, 4, n));
    assert_err(DM_EFORMAT, load_changed(&v, 8, 0, 4, n));
    assert_err(DM_EFORMAT, load_changed(&v, 12, 2, 4, n));                    /* unknown flag */
    assert_err(DM_EFORMAT, load_changed(&v, 12, 0, 4, n));                    /* logits that are not announced */
    assert_err(DM_EFORMAT, load_changed(&v, 16, 269, 8, n - 584 * 4));        /* another position, another size */
    assert_err(DM_ECONTEXT, load_changed(&v, 16, UINT64_MAX, 8, n));
    assert_err(DM_ECONTEXT, load_changed(&v, 16, (uint64_t)1 << 62, 8, n));
    assert_err(DM_EFORMAT, load_changed(&v, 16, 60000, 8, n));
    assert_err(DM_ESTATE, load_changed(&v, 16, 270 + 256, 8, n));             /* the same size, but two blocks are needed */
    assert_err(DM_EFOREIGN, load_changed(&v, 24, 1, 8, n));
    assert_err(DM_EFOREIGN, load_changed(&v, 40, 1, 8, n));
    assert_err(DM_EFORMAT, load_changed(&v, 56, UINT64_MAX, 8, n));
    assert_err(DM_EFORMAT, load_changed(&v, 0, 0, 1, n));
    finish(&v);
}

static void a_state_of_other_numerics_or_another_model_is_foreign(void **state) {
    (void)state;
    saved v = setup();
    dm_model *other_model = forward_test_model("tiny", 1), *same_model = forward_test_embedded();
    dm_forward_opts scalar = {.threads = 1, .isa = "scalar"}, plain = {.threads = 1, .numerics = DM_NUM_PLAIN}, fast = {.threads = 1};
    struct { const dm_model *m; dm_forward_opts o; } other[] = {{same_model, scalar}, {same_model, plain}, {other_model, fast}};
    for (size_t i = 0; i < DM_COUNT(other); i++) {
        dm_err e = {0};
        dm_forward *f = forward_test_create(other[i].m, other[i].o);
        dm_fseq *s = forward_test_seq(f);
        dm_buf b = {0};
        int32_t ids[4] = {1, 2, 3, 4};
        forward_test_feed(f, s, ids, 4, 4, NULL);
        assert_ok_e(f->ops->state_save(f, s, &b, &e), e);
        if (strcmp(f->numerics_id, v.f->numerics_id) != 0 || other[i].m == other_model) assert_err(DM_EFOREIGN, load(&v, b.p, b.n));
        dm_buf_free(&b);
        f->ops->seq_destroy(f, s);
        dm_forward_destroy(f);
    }
    dm_model_close(other_model), dm_model_close(same_model);
    finish(&v);
}

static void saving_appends_to_what_the_buffer_holds(void **state) {
    (void)state;
    saved v = setup();
    dm_buf b = {0};
    dm_err e = {0};
    assert_ok(dm_buf_str(&b, "before"));
    dm_fseq *s = forward_test_seq(v.f);
    assert_ok_e(v.f->ops->state_save(v.f, s, &b, &e), e);
    assert_memory_equal(b.p, "before", 6);
    assert_ok_e(v.f->ops->state_load(v.f, s, b.p + 6, b.n - 6, &e), e); /* position 0 */
    dm_buf_free(&b);
    v.f->ops->seq_destroy(v.f, s);
    finish(&v);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_state_cut_short_or_padded_is_refused),
        cmocka_unit_test(any_bit_turned_over_is_noticed),
        cmocka_unit_test(a_wrong_header_with_a_right_checksum_is_refused),
        cmocka_unit_test(a_state_of_other_numerics_or_another_model_is_foreign),
        cmocka_unit_test(saving_appends_to_what_the_buffer_holds),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
