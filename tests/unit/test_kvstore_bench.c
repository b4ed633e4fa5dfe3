/* The benchmark of the store, with tiny sizes: names and shape of its rows, and that it leaves nothing behind.  No figure is judged. */
#include "kvtest.h"

#include <dirent.h>

static int entries(const char *dir)
{
    int n = 0;
    DIR *d = opendir(dir);
    assert_non_null(d);
    for (struct dirent *de; (de = readdir(d));) n += de->d_name[0] != '.';
    closedir(d);
    return n;
}

static dm_kv_bench_opts tiny(const char *dir)
{
    return (dm_kv_bench_opts){ .dir = dir, .block_bytes = 20000, .state_bytes = 50000, .quota_bytes = 8 << 20, .rounds = 3, .churn = 2 };
}

static void rows_have_their_names_and_are_filled(void **s)
{
    (void)s;
    static const char *const names[] = { "durable_spill", "cold_restore", "ram_restore", "churn_last_over_first", "churn_file_over_live" };
    const char *dir = kt_dir("bench");
    dm_kv_bench_opts o = tiny(dir);
    dm_kv_bench_row rows[DM_KV_BENCH_ROWS];
    dm_err e;
    assert_ok_e(dm_kv_bench(&o, rows, NULL, NULL, &e), e);
    for (int i = 0; i < DM_KV_BENCH_ROWS; i++) {
        assert_string_equal(rows[i].name, names[i]);
        assert_string_equal(rows[i].unit, i == 4 ? "bytes" : "MB/s");
        assert_true(rows[i].value > 0 && rows[i].probe > 0 && rows[i].ratio > 0 && rows[i].limit > 0);
    }
    assert_true(rows[4].at_most);
    assert_true(rows[4].ratio >= 1); /* what lives in a file is not more than the file */
    assert_int_equal(entries(dir), 0);
}

static bool stop_at(void *ctx, int64_t done, int64_t total)
{
    assert_in_range(done, 1, total);
    return done < *(int *)ctx;
}

static void stopped_anywhere_it_cleans_up(void **s)
{
    (void)s;
    const char *dir = kt_dir("stopped");
    dm_kv_bench_opts o = tiny(dir);
    dm_kv_bench_row rows[DM_KV_BENCH_ROWS];
    dm_err e;
    for (int at = 1; at < 15; at += 3) {
        assert_err(DM_ECANCELED, dm_kv_bench(&o, rows, stop_at, &at, &e));
        assert_int_equal(entries(dir), 0);
    }
}

static void sizes_that_do_not_fit_are_refused(void **s)
{
    (void)s;
    dm_kv_bench_row rows[DM_KV_BENCH_ROWS];
    dm_err e;
    dm_kv_bench_opts o = tiny(kt_dir("small"));
    o.quota_bytes = 512 << 10;
    assert_err(DM_EINVAL, dm_kv_bench(&o, rows, NULL, NULL, &e));
    assert_non_null(strstr(e.text, "too small"));
    o = tiny(kt_dir("rounds"));
    o.rounds = 65;
    assert_err(DM_EINVAL, dm_kv_bench(&o, rows, NULL, NULL, &e));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rows_have_their_names_and_are_filled),
        cmocka_unit_test(stopped_anywhere_it_cleans_up),
        cmocka_unit_test(sizes_that_do_not_fit_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
