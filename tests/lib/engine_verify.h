/* Verification of the synthetic checkpoints with the vectors in the tree. */
#ifndef DM_TEST_ENGINE_VERIFY_H
#define DM_TEST_ENGINE_VERIFY_H

#include "tests/lib/engine_files.h"

static const char *const configs[] = {"tiny", "tiny2"};

static inline const char *hash_file(const char *config, int n)
{
    char name[96];
    snprintf(name, sizeof name, "vectors/hash/%s-ref-n%d.txt", config, n);
    return test_data(name);
}

static inline void agrees(const char *config, const char *file, dm_verify_opts o)
{
    dm_verify_report r;
    dm_err e;
    int rc = dm_model_verify(synthetic(config), file, &o, &r, NULL, NULL, &e);
    if (rc < 0) fail_msg("%s, numerics %d, chunk %d, threads %d, isa %s: %s", file, (int)o.numerics, o.chunk, o.threads, o.isa ? o.isa : "best", e.text);
    assert_int_equal(r.differ, 0);
    assert_true(r.compared > 0);
    printf("# %s %s\n", config, r.summary);
}

#endif
