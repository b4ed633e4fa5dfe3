/* Drafts of the forward: they are the MTP layer's own logits, however the sequence came to where it is; and rows that are
 * taken back leave nothing behind. */
#include "engine/trace_int.h"
#include "tests/lib/forward_test.h"

enum { N = 300 };

typedef struct seen { /* what the trunk gave for each position */
    int last_layer;
    size_t width;
    float *streams; /* [N][width] */
} seen;

static void see(void *ctx, forward_tag tag, int layer, int64_t pos, const void *data, size_t nbytes)
{
    seen *s = ctx;
    if (tag == FT_H && layer == s->last_layer && pos < N) memcpy(s->streams + (size_t)pos * s->width, data, nbytes);
}

static int32_t argmax(const float *x, int n)
{
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

/* guess[t]: the layer's greedy guess from row t, by the path that is compared with the vectors. */
static void guesses(const dm_model *m, const int32_t *ids, int32_t *guess)
{
    dm_err e = {0};
    const dm_config *c = dm_model_config(m);
    dm_forward *f = forward_test_create(m, (dm_forward_opts){.threads = 1});
    dm_fseq *s = forward_test_seq(f);
    seen w = {.last_layer = c->num_hidden_layers - 1, .width = (size_t)c->hc_mult * (size_t)c->hidden_size};
    w.streams = malloc(N * w.width * sizeof(float));
    float *logits = malloc((size_t)N * (size_t)f->vocab * sizeof(float));
    assert_non_null(w.streams);
    assert_non_null(logits);
    forward_set_trace(f, &(forward_trace){.ctx = &w, .row = see});
    forward_test_feed(f, s, ids, N, 64, NULL);
    forward_set_trace(f, NULL);
    assert_ok_e(forward_mtp(f, s, w.streams, ids + 1, N, logits, &e), e);
    for (int t = 0; t < N; t++) guess[t] = argmax(logits + (size_t)t * (size_t)f->vocab, f->vocab);
    f->ops->seq_destroy(f, s);
    dm_forward_destroy(f);
    free(logits);
    free(w.streams);
}

static int32_t one_draft(dm_forward *f, dm_fseq *s, int32_t id)
{
    dm_err e = {0};
    int32_t out = -1;
    dm_draft d = {.seq = s, .id = id, .want = 1, .ids = &out};
    assert_ok_e(f->ops->draft(f, &d, 1, &e), e);
    return d.got ? out : -1;
}

static void a_draft_is_the_mtp_layers_guess_however_the_prefix_was_fed(void **state)
{
    (void)state;
    dm_model *m = forward_test_model("tiny2", 2);
    dm_forward *f = forward_test_create(m, (dm_forward_opts){.threads = 2, .draft = true});
    int32_t *ids = forward_test_ids(f, 5), guess[N];
    uint64_t rng = test_seed();
    int asked = 0;
    assert_int_equal(f->draft_max, DM_DRAFT_MAX);
    guesses(m, ids, guess);
    for (int k = 0; k < 6; k++) {
        dm_fseq *s = forward_test_seq(f);
        for (int at = 0; at < N - 1;) {
            uint64_t z = dm_splitmix64(&rng);
            int n = z & 31 ? 1 + (int)((z >> 8) % 5) : 1 + (int)((z >> 8) % 200);
            if (n > N - 1 - at) n = N - 1 - at;
            forward_test_feed(f, s, ids + at, n, n, NULL);
            at += n;
            if (z >> 63) continue; /* not asked for: the rows are made all the same */
            int32_t got = one_draft(f, s, ids[at]);
            if (got != guess[at - 1]) fail_msg("behind position %d: token %d was drafted, the layer says %d", at - 1, got, guess[at - 1]);
            assert_int_equal(one_draft(f, s, ids[at]), -1); /* once between two steps */
            asked++;
        }
        f->ops->seq_destroy(f, s);
    }
    assert_true(asked > 50);
    free(ids);
    dm_forward_destroy(f);
    dm_model_close(m);
}

/* Behind a restore there are no rows to draft from until a step was made; what is drafted then may be anything. */
static void a_restored_sequence_drafts_from_its_first_step_on(void **state)
{
    (void)state;
    dm_err e = {0};
    dm_model *m = forward_test_model("tiny2", 2);
    dm_forward *f = forward_test_create(m, (dm_forward_opts){.threads = 1, .draft = true});
    int32_t *ids = forward_test_ids(f, 5);
    dm_fseq *s = forward_test_seq(f), *r = forward_test_seq(f);
    dm_buf st = {0};
    forward_test_feed(f, s, ids, 200, 64, NULL);
    assert_ok_e(f->ops->state_save(f, s, &st, &e), e);
    assert_ok_e(f->ops->state_load(f, r, st.p, st.n, &e), e);
    assert_int_equal(one_draft(f, r, ids[200]), -1);
    forward_test_feed(f, r, ids + 200, 1, 1, NULL);
    assert_in_range(one_draft(f, r, ids[201]), 0, f->vocab - 1);
    /* 128 positions later its window is whole again, and so are its drafts. */
    forward_test_feed(f, s, ids + 200, 130, 13, NULL);
    forward_test_feed(f, r, ids + 201, 129, 7, NULL);
    for (int at = 330; at < 350; at++) {
        assert_int_equal(one_draft(f, r, ids[at]), one_draft(f, s, ids[at]));
        forward_test_feed(f, s, ids + at, 1, 1, NULL);
        forward_test_feed(f, r, ids + at, 1, 1, NULL);
    }
    f->ops->seq_destroy(f, s);
    f->ops->seq_destroy(f, r);
    dm_buf_free(&st);
    free(ids);
    dm_forward_destroy(f);
    dm_model_close(m);
}

/* At every cut around a block's end and elsewhere: some certain rows, wrong ones behind them, and back. */
static void rows_that_were_taken_back_leave_nothing_behind(void **state)
{
    (void)state;
    dm_err e = {0};
    dm_model *m = forward_test_model("tiny2", 2);
    dm_forward *plain = forward_test_create(m, (dm_forward_opts){.threads = 1});
    dm_forward *f = forward_test_create(m, (dm_forward_opts){.threads = 2, .draft = true});
    size_t V = (size_t)f->vocab;
    int32_t *ids = forward_test_ids(f, 6), wrong[64];
    float *want = malloc(V * sizeof *want), *got = malloc((1 + DM_DRAFT_MAX) * V * sizeof *got);
    dm_fseq *a = forward_test_seq(plain), *b = forward_test_seq(f);
    dm_buf sa = {0}, sb = {0};
    uint64_t rng = test_seed() + 1;
    assert_string_equal(plain->numerics_id, f->numerics_id);
    for (int at = 0; at < 540;) {
        uint64_t z = dm_splitmix64(&rng);
        int firm = at < 100 ? 1 : 1 + (int)(z % 3), tentative = (int)((z >> 8) % (DM_DRAFT_MAX + 1)), keep = tentative ? (int)((z >> 16) % ((unsigned)tentative + 1)) : 0;
        for (int i = 0; i < firm + tentative; i++) wrong[i] = i < firm + keep ? ids[at + i] : (int32_t)(dm_splitmix64(&rng) % V);
        dm_run r = {.seq = b, .ids = wrong, .n = firm + tentative, .logits = got, .nlogits = 1 + tentative, .tentative = tentative};
        assert_ok_e(f->ops->step(f, &r, 1, &e), e);
        for (int i = 0; i <= keep; i++) { /* each row that stays has the logits of decoding alone */
            forward_test_feed(plain, a, ids + (i ? at + firm + i - 1 : at), i ? 1 : firm, 1, want);
            assert_memory_equal(want, got + (size_t)i * V, V * sizeof *want);
        }
        at += firm + keep;
        assert_err(DM_EINVAL, f->ops->retreat(f, b, at - keep - 1, NULL, NULL));
        assert_err(DM_EINVAL, f->ops->retreat(f, b, at - keep + tentative + 1, NULL, NULL));
        assert_ok_e(f->ops->retreat(f, b, at, got + (size_t)keep * V, &e), e);
        assert_int_equal(f->ops->seq_pos(b), at);
        dm_buf_clear(&sa), dm_buf_clear(&sb);
        assert_ok_e(plain->ops->state_save(plain, a, &sa, &e), e);
        assert_ok_e(f->ops->state_save(f, b, &sb, &e), e);
        assert_int_equal(sa.n, sb.n);
        if (memcmp(sa.p, sb.p, sa.n) != 0) fail_msg("the state at %d differs behind %d of %d tentative rows", at, keep, tentative);
        for (int64_t i = 0; i < at / DM_BLOCK_TOKENS; i++) {
            const void *x, *y;
            assert_ok_e(plain->ops->block(plain, a, i, &x, &e), e);
            assert_ok_e(f->ops->block(f, b, i, &y, &e), e);
            assert_memory_equal(x, y, f->block_bytes);
        }
    }
    plain->ops->seq_destroy(plain, a);
    f->ops->seq_destroy(f, b);
    dm_buf_free(&sa), dm_buf_free(&sb);
    free(ids), free(want), free(got);
    dm_forward_destroy(plain);
    dm_forward_destroy(f);
    dm_model_close(m);
}

static void what_cannot_be_tentative_is_refused_and_changes_nothing(void **state)
{
    (void)state;
    dm_err e = {0};
    dm_model *m = forward_test_model("tiny2", 2), *none = forward_test_embedded();
    dm_forward *plain = forward_test_create(m, (dm_forward_opts){.threads = 1}), *f = forward_test_create(m, (dm_forward_opts){.threads = 1, .draft = true});
    dm_forward *without = forward_test_create(none, (dm_forward_opts){.threads = 1, .draft = true}); /* no MTP layer: nothing to draft with */
    dm_fseq *p = forward_test_seq(plain), *s = forward_test_seq(f);
    int32_t ids[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}, out;
    assert_int_equal(plain->draft_max, 0);
    assert_int_equal(without->draft_max, 0);
    assert_err(DM_ENOTSUP, plain->ops->step(plain, &(dm_run){.seq = p, .ids = ids, .n = 3, .tentative = 1}, 1, &e));
    assert_err(DM_ENOTSUP, plain->ops->draft(plain, NULL, 0, &e));
    assert_err(DM_EINVAL, f->ops->step(f, &(dm_run){.seq = s, .ids = ids, .n = 3, .tentative = 3}, 1, &e));
    assert_err(DM_EINVAL, f->ops->step(f, &(dm_run){.seq = s, .ids = ids, .n = 12, .tentative = DM_DRAFT_MAX + 1}, 1, &e));
    assert_err(DM_EINVAL, f->ops->step(f, &(dm_run){.seq = s, .ids = ids, .n = 3, .nlogits = 2}, 1, &e));
    assert_err(DM_EINVAL, f->ops->draft(f, &(dm_draft){.seq = s, .id = f->vocab, .want = 1, .ids = &out}, 1, &e));
    assert_err(DM_EINVAL, f->ops->draft(f, &(dm_draft){.seq = s, .id = 0, .want = DM_DRAFT_MAX + 1, .ids = &out}, 1, &e));
    assert_err(DM_ESTATE, forward_mtp(f, s, NULL, ids, 0, NULL, &e));
    assert_int_equal(f->ops->seq_pos(s), 0);
    assert_int_equal(one_draft(f, s, 1), -1); /* nothing was run yet */
    /* Not settled: nobody knows yet what to draft behind. */
    assert_ok_e(f->ops->step(f, &(dm_run){.seq = s, .ids = ids, .n = 3, .tentative = 2}, 1, &e), e);
    assert_int_equal(one_draft(f, s, 1), -1);
    assert_ok_e(f->ops->retreat(f, s, 1, NULL, &e), e);
    assert_in_range(one_draft(f, s, 1), 0, f->vocab - 1);
    plain->ops->seq_destroy(plain, p);
    f->ops->seq_destroy(f, s);
    dm_forward_destroy(plain);
    dm_forward_destroy(f);
    dm_forward_destroy(without);
    dm_model_close(m);
    dm_model_close(none);
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_draft_is_the_mtp_layers_guess_however_the_prefix_was_fed),
        cmocka_unit_test(a_restored_sequence_drafts_from_its_first_step_on),
        cmocka_unit_test(rows_that_were_taken_back_leave_nothing_behind),
        cmocka_unit_test(what_cannot_be_tentative_is_refused_and_changes_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
