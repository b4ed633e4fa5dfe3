/* The identity of the weights: what it depends on, and when its cache is believed. */
#include "tests/lib/engine_files.h"

#include <fcntl.h>

static int hashed; /* times the weights were read */
static bool count(void *ctx, const char *what, int64_t done, int64_t total)
{
    (void)ctx, (void)what;
    assert_true(done <= total);
    if (done == 0) hashed++;
    return true;
}
static bool stop(void *ctx, const char *what, int64_t done, int64_t total)
{
    (void)ctx, (void)what, (void)done, (void)total;
    return false;
}

static dm_hash fingerprint(const char *dir, const char *cache)
{
    dm_model *m;
    dm_hash h;
    dm_err e;
    hashed = 0;
    assert_ok_e(dm_model_open(&m, dir, &e), e);
    assert_ok_e(dm_model_fingerprint(m, cache, &h, count, NULL, &e), e);
    dm_model_close(m);
    return h;
}

/* Sets every file's mtime to some time ago, as of a model that was not just downloaded. */
static void age(const char *dir, int64_t seconds_ago)
{
    struct timespec t[2] = {{.tv_sec = dm_wall_ms() / 1000 - seconds_ago, .tv_nsec = 123456789}, {0}};
    DIR *d = opendir(dir);
    t[1] = t[0];
    for (struct dirent *x; (x = readdir(d));)
        if (x->d_name[0] != '.') assert_int_equal(utimensat(AT_FDCWD, in_dir(dir, x->d_name), t, 0), 0);
    closedir(d);
}

static const char *only_file(const char *dir)
{
    DIR *d = opendir(dir);
    const char *found = NULL;
    assert_non_null(d);
    for (struct dirent *x; (x = readdir(d));)
        if (x->d_name[0] != '.') {
            assert_null(found);
            found = in_dir(dir, x->d_name);
        }
    closedir(d);
    assert_non_null(found);
    return found;
}

static void it_covers_bytes_and_not_how_they_are_stored(void **s)
{
    (void)s;
    dm_hash a = fingerprint(synthetic("tiny"), NULL), b = fingerprint(synthetic("tiny2"), NULL);
    assert_false(dm_hash_equal(&a, &b));
    /* another header, the same tensors */
    const char *dir = tiny_copy("header");
    edit_header(in_dir(dir, "model-00003-of-00009.safetensors"), "{\"format\":\"pt\"}", "{\"format\":\"another\"}");
    b = fingerprint(dir, NULL);
    assert_true(dm_hash_equal(&a, &b));
    /* one bit of the last shard */
    dir = tiny_copy("bit");
    dm_buf f = slurp(in_dir(dir, "model-00009-of-00009.safetensors"));
    f.p[f.n - 1] ^= 1;
    spit(in_dir(dir, "model-00009-of-00009.safetensors"), f.p, f.n);
    dm_buf_free(&f);
    b = fingerprint(dir, NULL);
    assert_false(dm_hash_equal(&a, &b));
}

static void the_cache_saves_reading_the_weights_again(void **s)
{
    (void)s;
    const char *dir = tiny_copy("cached"), *cache = scratch("cache");
    age(dir, 100);
    dm_hash a = fingerprint(dir, cache);
    assert_int_equal(hashed, 1);
    dm_hash b = fingerprint(dir, cache);
    assert_int_equal(hashed, 0);
    assert_true(dm_hash_equal(&a, &b));
}

static void any_doubt_about_the_files_reads_them_again(void **s)
{
    (void)s;
    const char *dir = tiny_copy("doubt"), *cache = scratch("cache2"), *shard = in_dir(dir, "model-00005-of-00009.safetensors");
    char path[512];
    snprintf(path, sizeof path, "%s", shard);
    age(dir, 100);
    fingerprint(dir, cache);
    /* another time, the same bytes */
    age(dir, 50);
    fingerprint(dir, cache);
    assert_int_equal(hashed, 1);
    fingerprint(dir, cache);
    assert_int_equal(hashed, 0);
    /* another inode with the same size and time */
    dm_buf f = slurp(path);
    struct stat st;
    assert_int_equal(stat(path, &st), 0);
    char other[600];
    snprintf(other, sizeof other, "%s.new", path);
    f.p[f.n - 1] ^= 1;
    spit(other, f.p, f.n);
    struct timespec t[2] = {st.st_mtim, st.st_mtim};
    assert_int_equal(utimensat(AT_FDCWD, other, t, 0), 0);
    assert_int_equal(rename(other, path), 0);
    fingerprint(dir, cache);
    assert_int_equal(hashed, 1);
    dm_buf_free(&f);
}

static void files_changed_just_now_are_not_cached(void **s)
{
    (void)s;
    const char *dir = tiny_copy("fresh"), *cache = scratch("cache3");
    age(dir, -3600); /* as long as the clock has not passed the change, another one could hide behind the same time */
    fingerprint(dir, cache);
    fingerprint(dir, cache);
    assert_int_equal(hashed, 1);
}

static void a_damaged_cache_is_ignored_and_replaced(void **s)
{
    (void)s;
    const char *dir = tiny_copy("damage"), *cache = scratch("cache4");
    char path[600];
    age(dir, 100);
    dm_hash good = fingerprint(dir, cache);
    snprintf(path, sizeof path, "%s", only_file(cache));
    dm_buf f = slurp(path);
    for (size_t at = 0; at < f.n; at += 1 + f.n / 40) {
        f.p[at] ^= 1;
        spit(path, f.p, f.n);
        f.p[at] ^= 1;
        dm_hash h = fingerprint(dir, cache);
        assert_int_equal(hashed, 1);
        assert_true(dm_hash_equal(&h, &good));
    }
    for (size_t n = 0; n < f.n; n += 1 + f.n / 10) {
        spit(path, f.p, n);
        fingerprint(dir, cache);
        assert_int_equal(hashed, 1);
    }
    fingerprint(dir, cache);
    assert_int_equal(hashed, 0);
    dm_buf_free(&f);
}

static void a_cache_that_cannot_be_written_only_costs_time(void **s)
{
    (void)s;
    const char *dir = tiny_copy("nocache");
    age(dir, 100);
    spit(scratch("notadir"), "x", 1);
    dm_hash a = fingerprint(dir, scratch("notadir")), b = fingerprint(dir, NULL);
    assert_true(dm_hash_equal(&a, &b));
}

static void it_can_be_cancelled(void **s)
{
    (void)s;
    dm_model *m;
    dm_hash h;
    dm_err e;
    assert_ok_e(dm_model_open(&m, synthetic("tiny"), &e), e);
    assert_err(DM_ECANCELED, dm_model_fingerprint(m, NULL, &h, stop, NULL, &e));
    dm_model_close(m);
}

static void a_failed_allocation_leaks_nothing(void **s)
{
    (void)s;
    dm_model *m;
    dm_hash good, h;
    dm_err e;
    const char *dir = tiny_copy("alloc"), *cache = scratch("cache5");
    age(dir, 100);
    assert_ok_e(dm_model_open(&m, dir, &e), e);
    assert_ok_e(dm_model_fingerprint(m, cache, &good, NULL, NULL, &e), e);
    int64_t start = dm_fault_alloc_count();
    assert_ok_e(dm_model_fingerprint(m, cache, &h, NULL, NULL, &e), e);
    int64_t total = dm_fault_alloc_count() - start;
    for (int64_t n = 1; n <= total; n++) {
        dm_fault_alloc_after(n);
        int rc = dm_model_fingerprint(m, cache, &h, NULL, NULL, &e);
        dm_fault_alloc_after(-1);
        if (rc < 0) assert_int_equal(rc, DM_ENOMEM);
        else assert_true(dm_hash_equal(&h, &good));
    }
    dm_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(it_covers_bytes_and_not_how_they_are_stored),
        cmocka_unit_test(the_cache_saves_reading_the_weights_again),
        cmocka_unit_test(any_doubt_about_the_files_reads_them_again),
        cmocka_unit_test(files_changed_just_now_are_not_cached),
        cmocka_unit_test(a_damaged_cache_is_ignored_and_replaced),
        cmocka_unit_test(a_cache_that_cannot_be_written_only_costs_time),
        cmocka_unit_test(it_can_be_cancelled),
        cmocka_unit_test(a_failed_allocation_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
