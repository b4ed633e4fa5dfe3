/* What tests of the forward pass share: models made on the spot, forwards, token sequences. */
#ifndef DM_FORWARD_TEST_H
#define DM_FORWARD_TEST_H

#include <stdio.h>

#include "engine/engine.h"
#include "testlib.h"

#define FORWARD_TEST_TOKENS 1501

/* A synthetic checkpoint of tests/data/vectors/<name>.config.json, written once per test program. */
static inline dm_model *forward_test_model(const char *name, uint64_t seed) {
    char config[600], dir[600];
    dm_err e = {0};
    dm_model *m = NULL;
    snprintf(config, sizeof config, "%s/vectors/%s.config.json", DM_TEST_DATA, name);
    snprintf(dir, sizeof dir, "%s/%s", test_dir(), name);
    if (!dm_path_exists(dir)) assert_ok_e(dm_model_synth(config, dir, seed, 0, NULL, NULL, &e), e);
    assert_ok_e(dm_model_open(&m, dir, &e), e);
    return m;
}
static inline dm_model *forward_test_embedded(void) {
    dm_err e = {0};
    dm_model *m = NULL;
    assert_ok_e(dm_model_open(&m, DM_SOURCE_DIR "/examples/models/tiny", &e), e);
    return m;
}
static inline dm_forward *forward_test_create(const dm_model *m, dm_forward_opts o) {
    dm_err e = {0};
    dm_forward *f = NULL;
    assert_ok_e(dm_forward_create(&f, m, &o, &e), e);
    return f;
}
static inline dm_fseq *forward_test_seq(dm_forward *f) {
    dm_err e = {0};
    dm_fseq *s = NULL;
    assert_ok_e(f->ops->seq_create(f, &s, &e), e);
    return s;
}
/* FORWARD_TEST_TOKENS ids; caller frees. */
static inline int32_t *forward_test_ids(const dm_forward *f, uint64_t seed) {
    dm_err e = {0};
    int32_t *ids = malloc(FORWARD_TEST_TOKENS * sizeof *ids);
    assert_non_null(ids);
    assert_ok_e(dm_synth_tokens(ids, FORWARD_TEST_TOKENS, seed, f->vocab, &e), e);
    return ids;
}
/* Feeds ids[0..n) in chunks; logits (may be NULL) of the last row. */
static inline void forward_test_feed(dm_forward *f, dm_fseq *s, const int32_t *ids, int n, int chunk, float *logits) {
    dm_err e = {0};
    for (int i = 0; i < n; i += chunk) {
        int k = n - i < chunk ? n - i : chunk;
        dm_run r = {.seq = s, .ids = ids + i, .n = k, .logits = i + k == n ? logits : NULL};
        assert_ok_e(f->ops->step(f, &r, 1, &e), e);
    }
}

#endif
