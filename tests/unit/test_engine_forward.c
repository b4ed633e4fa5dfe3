/* The forward pass through its public table: what it refuses, what it hands out, what does not depend on what. */
#include <pthread.h>
#include <stdatomic.h>

#include "forward_test.h"

static dm_model *model; /* the embedded one */

static int group_setup(void **state) {
    (void)state;
    model = forward_test_embedded();
    return 0;
}
static int group_teardown(void **state) {
    (void)state;
    dm_model_close(model);
    return 0;
}
static dm_forward *forward(int threads, int rows) { return forward_test_create(model, (dm_forward_opts){.threads = threads, .rows_max = rows}); }

static void logits_do_not_depend_on_chunks_threads_or_neighbours(void **state) {
    (void)state;
    enum { N = 333 };
    dm_forward *f = forward(1, 512), *g = forward(3, 64);
    int32_t *ids = forward_test_ids(f, 1), *other = forward_test_ids(f, 9);
    size_t bytes = (size_t)f->vocab * sizeof(float);
    float *want = malloc(bytes), *got = malloc(bytes);
    assert_true(want && got);
    assert_string_equal(f->numerics_id, g->numerics_id);
    dm_fseq *s = forward_test_seq(f);
    forward_test_feed(f, s, ids, N, N, want);
    f->ops->seq_destroy(f, s);
    static const int chunks[] = {1, 3, 17, 64};
    for (size_t i = 0; i < DM_COUNT(chunks); i++) {
        s = forward_test_seq(g);
        memset(got, 0xff, bytes);
        forward_test_feed(g, s, ids, N, chunks[i], got);
        assert_memory_equal(got, want, bytes);
        assert_memory_equal(g->ops->seq_logits(s), want, bytes);
        g->ops->seq_destroy(g, s);
    }
    /* Five sequences in one batch, of different ages, all of the same text or of another. */
    dm_fseq *seq[5];
    for (int i = 0; i < 5; i++) {
        seq[i] = forward_test_seq(g);
        if (i % 2 == 0) forward_test_feed(g, seq[i], ids, N - 1 - i, 50, NULL);
        else forward_test_feed(g, seq[i], other, 20 * i, 64, NULL);
        assert_null(g->ops->seq_logits(seq[i]));
    }
    dm_run runs[5];
    for (int i = 0; i < 5; i++)
        runs[i] = i % 2 == 0 ? (dm_run){seq[i], ids + N - 1 - i, i + 1, NULL} : (dm_run){seq[i], other + 20 * i, 5 * i, NULL};
    float *each[5];
    for (int i = 0; i < 5; i += 2) each[i] = malloc(bytes), assert_non_null(each[i]), runs[i].logits = each[i];
    dm_err e = {0};
    assert_ok_e(g->ops->step(g, runs, 5, &e), e);
    for (int i = 0; i < 5; i += 2) {
        assert_memory_equal(each[i], want, bytes);
        assert_int_equal(g->ops->seq_pos(seq[i]), N);
        free(each[i]);
    }
    assert_null(g->ops->seq_logits(seq[1]));
    for (int i = 0; i < 5; i++) g->ops->seq_destroy(g, seq[i]);
    free(want), free(got), free(ids), free(other);
    dm_forward_destroy(f), dm_forward_destroy(g);
}

static void wrong_steps_are_refused_and_leave_the_sequence_as_it_was(void **state) {
    (void)state;
    dm_forward *f = forward_test_create(model, (dm_forward_opts){.threads = 1, .rows_max = 8, .ctx_tokens_max = 20}), *g = forward(1, 8);
    const dm_forward_ops *o = f->ops;
    dm_fseq *s = forward_test_seq(f), *foreign = forward_test_seq(g);
    dm_err e = {0};
    int32_t ids[16] = {1, 2, 3}, bad[2] = {1, f->vocab}, negative[1] = {-1};
    assert_err(DM_EINVAL, o->step(f, &(dm_run){s, bad, 2, NULL}, 1, &e));
    assert_non_null(strstr(e.text, "vocabulary"));
    assert_err(DM_EINVAL, o->step(f, &(dm_run){s, negative, 1, NULL}, 1, &e));
    assert_err(DM_EINVAL, o->step(f, &(dm_run){s, ids, 0, NULL}, 1, &e));
    assert_err(DM_EINVAL, o->step(f, &(dm_run){s, ids, 9, NULL}, 1, &e));
    assert_err(DM_EINVAL, o->step(f, &(dm_run){foreign, ids, 1, NULL}, 1, &e));
    assert_err(DM_EINVAL, o->step(f, (dm_run[]){{s, ids, 1, NULL}, {s, ids, 1, NULL}}, 2, &e));
    assert_ok_e(o->step(f, NULL, 0, &e), e);
    forward_test_feed(f, s, ids, 16, 8, NULL);
    assert_err(DM_ECONTEXT, o->step(f, &(dm_run){s, ids, 5, NULL}, 1, &e));
    assert_int_equal(o->seq_pos(s), 16);
    forward_test_feed(f, s, ids, 4, 4, NULL); /* up to the last position */
    assert_err(DM_ECONTEXT, o->step(f, &(dm_run){s, ids, 1, NULL}, 1, &e));
    assert_int_equal(o->seq_pos(s), 20);
    o->seq_destroy(f, s);
    o->seq_destroy(g, foreign);
    o->seq_destroy(f, NULL);
    dm_forward_destroy(f), dm_forward_destroy(g);
}

static void options_that_cannot_work_are_refused_in_words(void **state) {
    (void)state;
    dm_forward *f = NULL;
    dm_err e = {0};
    assert_err(DM_ENOTSUP, dm_forward_create(&f, model, &(dm_forward_opts){.isa = "mmx"}, &e));
    assert_non_null(strstr(e.text, "scalar"));
    assert_null(f);
    assert_err(DM_EINVAL, dm_forward_create(&f, model, &(dm_forward_opts){.rows_max = -1}, &e));
    assert_err(DM_EINVAL, dm_forward_create(&f, model, &(dm_forward_opts){.threads = 100000}, &e));
    assert_err(DM_EINVAL, dm_forward_create(&f, model, &(dm_forward_opts){.ctx_tokens_max = (int64_t)1 << 40}, &e));
    assert_err(DM_EINVAL, dm_forward_create(&f, model, &(dm_forward_opts){.numerics = (dm_numerics)7}, &e));
    assert_err(DM_EINVAL, dm_forward_create(&f, NULL, NULL, &e));
    int n = 0;
    const char *last = NULL;
    for (const char *const *isa = dm_forward_isas(); *isa; isa++, n++) last = *isa;
    assert_true(n >= 1);
    assert_string_equal(last, "scalar");
}

static void blocks_are_whole_or_refused_and_bounded_by_the_pool(void **state) {
    (void)state;
    dm_forward *f = forward(1, 256);
    size_t block = f->block_bytes;
    assert_int_equal(block, 64 * 584 + 64 * 68 + 2 * 584); /* one c4 and one c128 layer */
    dm_forward_destroy(f);
    f = forward_test_create(model, (dm_forward_opts){.threads = 1, .pool_bytes_max = (int64_t)(2 * block)});
    dm_fseq *s = forward_test_seq(f), *t = forward_test_seq(f);
    int32_t *ids = forward_test_ids(f, 1);
    const void *p = NULL;
    dm_err e = {0};
    forward_test_feed(f, s, ids, 255, 255, NULL);
    assert_err(DM_EINVAL, f->ops->block(f, s, 0, &p, &e));
    forward_test_feed(f, s, ids + 255, 2, 1, NULL);
    assert_ok_e(f->ops->block(f, s, 0, &p, &e), e);
    assert_non_null(p);
    assert_err(DM_EINVAL, f->ops->block(f, s, 1, &p, &e));
    assert_err(DM_EINVAL, f->ops->block(f, s, -1, &p, &e));
    assert_err(DM_ELIMIT, f->ops->step(f, &(dm_run){t, ids, 1, NULL}, 1, &e)); /* both blocks are in use */
    f->ops->seq_destroy(f, s);
    forward_test_feed(f, t, ids, 1, 1, NULL); /* the same sequence goes on when there is room */
    f->ops->seq_destroy(f, t);
    free(ids);
    dm_forward_destroy(f);
}

static void the_plan_tells_the_size_of_blocks_and_states(void **state) {
    (void)state;
    dm_plan plan;
    dm_err e = {0};
    assert_ok_e(dm_model_plan(dm_model_config(model), NULL, &plan, &e), e);
    dm_forward *f = forward(1, 256);
    assert_int_equal(f->block_bytes, plan.block_bytes);
    dm_fseq *s = forward_test_seq(f);
    int32_t *ids = forward_test_ids(f, 1);
    int64_t largest = 0;
    for (int pos = 0; pos < 512; pos += 51) { /* 255 and 510 are among them */
        dm_buf b = {0};
        assert_ok_e(f->ops->state_save(f, s, &b, &e), e);
        largest = (int64_t)b.n > largest ? (int64_t)b.n : largest;
        dm_buf_free(&b);
        forward_test_feed(f, s, ids + pos, 51, 51, NULL);
    }
    assert_int_equal(largest, plan.state_bytes_max);
    f->ops->seq_destroy(f, s);
    free(ids);
    dm_forward_destroy(f);
}

static void loading_out_of_order_is_refused(void **state) {
    (void)state;
    dm_forward *f = forward(1, 256);
    const dm_forward_ops *o = f->ops;
    int32_t *ids = forward_test_ids(f, 1);
    dm_fseq *s = forward_test_seq(f), *t = forward_test_seq(f);
    dm_err e = {0};
    dm_buf state_bytes = {0}, none = {0};
    const void *block;
    forward_test_feed(f, s, ids, 300, 256, NULL);
    assert_ok_e(o->state_save(f, s, &state_bytes, &e), e);
    assert_ok_e(o->block(f, s, 0, &block, &e), e);
    assert_err(DM_EINVAL, o->block_load(f, t, 1, block, &e));
    assert_err(DM_ESTATE, o->state_load(f, t, state_bytes.p, state_bytes.n, &e)); /* block 0 is missing */
    assert_ok_e(o->block_load(f, t, 0, block, &e), e);
    assert_err(DM_ESTATE, o->step(f, &(dm_run){t, ids, 1, NULL}, 1, &e)); /* the state is missing */
    assert_err(DM_ESTATE, o->state_save(f, t, &none, &e));
    assert_int_equal(o->seq_pos(t), 0);
    assert_ok_e(o->state_load(f, t, state_bytes.p, state_bytes.n, &e), e);
    assert_int_equal(o->seq_pos(t), 300);
    assert_null(o->seq_logits(t)); /* none were asked for */
    assert_err(DM_ESTATE, o->state_load(f, t, state_bytes.p, state_bytes.n, &e));
    assert_err(DM_ESTATE, o->block_load(f, t, 1, block, &e));
    o->seq_destroy(f, s), o->seq_destroy(f, t);
    dm_buf_free(&state_bytes), dm_buf_free(&none);
    free(ids);
    dm_forward_destroy(f);
}

/* ---- every allocation fails once ---------------------------------------------------------------------- */

typedef struct past { const void *block; dm_buf state; float *logits; } past; /* of a sequence at 270 */

static int life(const past *p) {
    static const int32_t ids[3] = {5, 6, 7};
    dm_forward *f = NULL;
    dm_fseq *s = NULL, *t = NULL;
    dm_buf b = {0};
    int rc = dm_forward_create(&f, model, &(dm_forward_opts){.threads = 2, .rows_max = 32}, NULL);
    if (rc == 0) rc = f->ops->seq_create(f, &s, NULL);
    if (rc == 0) rc = f->ops->step(f, &(dm_run){s, ids, 3, p->logits}, 1, NULL);
    if (rc == 0) rc = f->ops->state_save(f, s, &b, NULL);
    if (rc == 0) rc = f->ops->seq_create(f, &t, NULL);
    if (rc == 0) rc = f->ops->block_load(f, t, 0, p->block, NULL);
    if (rc == 0) rc = f->ops->state_load(f, t, p->state.p, p->state.n, NULL);
    if (rc == 0) rc = f->ops->step(f, &(dm_run){t, ids, 3, p->logits}, 1, NULL);
    if (t) f->ops->seq_destroy(f, t);
    if (s) f->ops->seq_destroy(f, s);
    dm_forward_destroy(f);
    dm_buf_free(&b);
    return rc;
}
static void every_failing_allocation_is_an_error_without_a_leak(void **state) {
    (void)state;
    dm_forward *f = forward(1, 256);
    dm_fseq *s = forward_test_seq(f);
    int32_t *ids = forward_test_ids(f, 1);
    past p = {.logits = malloc((size_t)f->vocab * sizeof(float))};
    dm_err e = {0};
    int failed = 0;
    forward_test_feed(f, s, ids, 270, 256, NULL);
    assert_ok_e(f->ops->state_save(f, s, &p.state, &e), e);
    assert_ok_e(f->ops->block(f, s, 0, &p.block, &e), e);
    for (int64_t n = 1;; n++) {
        dm_fault_alloc_after(n);
        int rc = life(&p);
        dm_fault_alloc_after(-1);
        if (rc == 0) break;
        assert_int_equal(rc, DM_ENOMEM);
        failed++;
    }
    assert_true(failed > 10);
    f->ops->seq_destroy(f, s);
    dm_forward_destroy(f);
    dm_buf_free(&p.state);
    free(p.logits), free(ids);
}

/* ---- other threads while one is in step ----------------------------------------------------------------- */

typedef struct shared {
    dm_forward *f;
    dm_buf state;
    const void *block;
    atomic_bool stop;
    atomic_int restored;
} shared;
static void *restore_and_save(void *arg) {
    shared *s = arg;
    const dm_forward_ops *o = s->f->ops;
    while (!atomic_load(&s->stop) || atomic_load(&s->restored) < 3) {
        dm_fseq *q = NULL;
        dm_buf again = {0};
        bool good = o->seq_create(s->f, &q, NULL) == 0 && o->block_load(s->f, q, 0, s->block, NULL) == 0
                 && o->state_load(s->f, q, s->state.p, s->state.n, NULL) == 0 && o->state_save(s->f, q, &again, NULL) == 0
                 && again.n == s->state.n && memcmp(again.p, s->state.p, again.n) == 0;
        o->seq_destroy(s->f, q);
        dm_buf_free(&again);
        if (!good) return arg;
        atomic_fetch_add(&s->restored, 1);
    }
    return NULL;
}
static void other_sequences_are_restored_and_saved_during_a_step(void **state) {
    (void)state;
    dm_forward *f = forward(2, 64);
    int32_t *ids = forward_test_ids(f, 1);
    dm_fseq *a = forward_test_seq(f), *b = forward_test_seq(f);
    dm_err e = {0};
    shared s = {.f = f};
    forward_test_feed(f, a, ids, 270, 64, NULL);
    assert_ok_e(f->ops->state_save(f, a, &s.state, &e), e);
    assert_ok_e(f->ops->block(f, a, 0, &s.block, &e), e);
    pthread_t thread[2];
    for (int i = 0; i < 2; i++) assert_int_equal(pthread_create(&thread[i], NULL, restore_and_save, &s), 0);
    forward_test_feed(f, b, ids, 200, 16, NULL);
    atomic_store(&s.stop, true);
    for (int i = 0; i < 2; i++) {
        void *bad = &s;
        pthread_join(thread[i], &bad);
        assert_null(bad);
    }
    f->ops->seq_destroy(f, a), f->ops->seq_destroy(f, b);
    dm_buf_free(&s.state);
    free(ids);
    dm_forward_destroy(f);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(logits_do_not_depend_on_chunks_threads_or_neighbours),
        cmocka_unit_test(wrong_steps_are_refused_and_leave_the_sequence_as_it_was),
        cmocka_unit_test(options_that_cannot_work_are_refused_in_words),
        cmocka_unit_test(blocks_are_whole_or_refused_and_bounded_by_the_pool),
        cmocka_unit_test(the_plan_tells_the_size_of_blocks_and_states),
        cmocka_unit_test(loading_out_of_order_is_refused),
        cmocka_unit_test(every_failing_allocation_is_an_error_without_a_leak),
        cmocka_unit_test(other_sequences_are_restored_and_saved_during_a_step),
    };
    return cmocka_run_group_tests(tests, group_setup, group_teardown);
}
