/* What every test program includes: cmocka, a scratch directory, seeds, and the folder of the test data. */
#ifndef DM_TESTLIB_H
#define DM_TESTLIB_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/base.h"

/* A fresh directory under TMPDIR, removed with all that is in it at exit of the program. */
const char *test_dir(void);
/* The seed of this run: DM_TEST_SEED or a fixed number; printed once as a TAP comment. */
uint64_t test_seed(void);
/* DM_TEST_FULL is set: long lengths and soaks. */
bool test_full(void);
/* A loud, counted skip: prints "# SKIP <why>" and skips the test; with DM_TEST_NO_SKIP set it fails instead. */
void test_skip(const char *why);
/* path under tests/data; the result is static storage, four deep. */
const char *test_data(const char *name);

/* The launcher of this build. */
const char *test_launcher(void);
/* Writes text to dir/name, with the folders that it needs. */
void test_put(const char *dir, const char *name, const char *text);
/* "sleep 438.5" -> "sleep 438.<pid>5": a mark by which processes of this run alone are found, when others run beside it.  A child
 * made by fork keeps the mark of the program.  Static storage of the thread, sixteen deep. */
const char *test_marked(const char *text);

#define assert_ok(expr)                                                                             \
    do {                                                                                            \
        int rc_ = (expr);                                                                           \
        if (rc_ < 0) fail_msg("%s: %s (%d)", #expr, dm_err_name(rc_), rc_);                         \
    } while (0)
/* The same with the caller's dm_err e in the message. */
#define assert_ok_e(expr, e)                                                                        \
    do {                                                                                            \
        int rc_ = (expr);                                                                           \
        if (rc_ < 0) fail_msg("%s: %s: %s: %s", #expr, dm_err_name(rc_), (e).where, (e).text);      \
    } while (0)
#define assert_err(code, expr)                                                                      \
    do {                                                                                            \
        int rc_ = (expr);                                                                           \
        if (rc_ != (code)) fail_msg("%s: got %s (%d), want %s", #expr, dm_err_name(rc_), rc_, dm_err_name(code)); \
    } while (0)

#endif
