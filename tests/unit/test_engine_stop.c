/* Stop strings: found at every cut of the text, nothing of them leaks, nothing else is lost. */
#include "engine/engine.h"
#include "testlib.h"

static dm_stop *make(const char *const *texts, size_t n)
{
    dm_stop *s = NULL;
    dm_err e = {0};
    assert_ok_e(dm_stop_create(&s, texts, n, &e), e);
    return s;
}

/* What the plain rule says: the string that is complete first, of those that end there the longest.  Returns the bytes before it. */
static size_t plain(const char *text, size_t n, const char *const *texts, size_t count, const char **found)
{
    *found = NULL;
    for (size_t end = 1; end <= n; end++)
        for (size_t i = 0; i < count; i++) {
            size_t len = strlen(texts[i]);
            bool here = len <= end && memcmp(text + end - len, texts[i], len) == 0;
            if (here && (!*found || len > strlen(*found))) *found = texts[i];
            if (i + 1 == count && *found) return end - strlen(*found);
        }
    return n;
}

/* Feeds text in pieces that end at the given cuts; each piece that comes out is whole characters. */
static void feed(dm_stop *s, const char *text, size_t n, const size_t *cut, size_t cuts, dm_buf *out, bool *found)
{
    *found = false;
    for (size_t i = 0, from = 0; i <= cuts; i++) {
        size_t to = i < cuts ? cut[i] : n, had = out->n;
        int rc = dm_stop_feed(s, text + from, to - from, out);
        assert_true(rc == 0 || rc == 1);
        assert_true(!*found || rc == 1); /* once found, always */
        *found = rc == 1;
        assert_true(dm_utf8_valid(out->p + had, out->n - had));
        from = to;
    }
    if (!*found) assert_ok(dm_stop_border(s, out));
}

static void expect(dm_stop *s, const char *text, size_t n, const size_t *cut, size_t cuts, const char *const *texts, size_t count)
{
    const char *want;
    dm_buf out = {0};
    bool found;
    size_t keep = plain(text, n, texts, count, &want);
    dm_stop_reset(s);
    feed(s, text, n, cut, cuts, &out, &found);
    if (found != (want != NULL) || out.n != keep || (keep && memcmp(out.p, text, keep) != 0))
        fail_msg("\"%.*s\": \"%s\" came out, %s was found; want %zu bytes", (int)n, text, dm_buf_cstr(&out), found ? dm_stop_found(s) : "nothing", keep);
    if (want) assert_string_equal(dm_stop_found(s), want);
    else assert_null(dm_stop_found(s));
    dm_buf_free(&out);
}

static void a_string_is_found_at_every_cut(void **state)
{
    (void)state;
    static const char *const texts[] = {"END", "größe", "</s>", "ababac", "\n\n", "終わり"};
    static const char *const samples[] = {"helEND", "EENDx", "no stop here", "die größe ist", "grö größe", "abababacab", "a\n\nb", "ここで終わりです", "終終わり", "EN", "END",
                                          "</s", "</</s>", "x</s>END", ""};
    dm_stop *s = make(texts, DM_COUNT(texts));
    for (size_t k = 0; k < DM_COUNT(samples); k++) {
        const char *t = samples[k];
        size_t n = strlen(t), at[64], places = 0;
        for (size_t i = 0; i <= n; i++)
            if (i == n || ((uint8_t)t[i] & 0xC0) != 0x80) at[places++] = i; /* between characters */
        for (size_t i = 0; i < places; i++)
            for (size_t j = i; j < places; j++) {
                size_t cut[] = {at[i], at[j]};
                expect(s, t, n, cut, 2, texts, DM_COUNT(texts));
            }
        size_t each = places ? places - 1 : 0;
        expect(s, t, n, at, each, texts, DM_COUNT(texts)); /* character by character */
    }
    dm_stop_destroy(s);
}

static void random_texts_are_cut_where_the_plain_rule_says(void **state)
{
    (void)state;
    uint64_t rng = test_seed();
    for (int k = 0; k < 20000; k++) {
        char text[40], store[4][8];
        const char *texts[4];
        size_t n = dm_splitmix64(&rng) % sizeof text, count = 1 + dm_splitmix64(&rng) % 4, cut[sizeof text], cuts = 0;
        for (size_t i = 0; i < n; i++) text[i] = (char)('a' + dm_splitmix64(&rng) % 2); /* two letters: much overlaps */
        for (size_t i = 0; i < count; i++) {
            size_t len = 1 + dm_splitmix64(&rng) % 6;
            for (size_t c = 0; c < len; c++) store[i][c] = (char)('a' + dm_splitmix64(&rng) % 2);
            store[i][len] = 0;
            texts[i] = store[i];
        }
        for (size_t i = 0; i < n; i++)
            if (dm_splitmix64(&rng) & 1) cut[cuts++] = i;
        dm_stop *s = make(texts, count);
        expect(s, text, n, cut, cuts, texts, count);
        dm_stop_destroy(s);
    }
}

static void what_is_held_back_comes_when_it_turns_out_to_be_nothing(void **state)
{
    (void)state;
    static const char *const texts[] = {"STOP HERE"};
    dm_stop *s = make(texts, 1);
    dm_buf out = {0};
    assert_int_equal(dm_stop_feed(s, "abSTOP ", 7, &out), 0);
    assert_int_equal(out.n, 2); /* held back */
    assert_int_equal(dm_stop_feed(s, "X", 1, &out), 0);
    assert_string_equal(dm_buf_cstr(&out), "abSTOP X");
    assert_int_equal(dm_stop_feed(s, "STOP HE", 7, &out), 0);
    assert_string_equal(dm_buf_cstr(&out), "abSTOP X");
    assert_ok(dm_stop_border(s, &out)); /* something else comes: no string reaches across */
    assert_string_equal(dm_buf_cstr(&out), "abSTOP XSTOP HE");
    assert_int_equal(dm_stop_feed(s, "RE", 2, &out), 0);
    assert_string_equal(dm_buf_cstr(&out), "abSTOP XSTOP HERE");
    assert_int_equal(dm_stop_feed(s, "STOP HERE and more", 18, &out), 1);
    assert_int_equal(dm_stop_feed(s, "more", 4, &out), 1);
    assert_ok(dm_stop_border(s, &out));
    assert_string_equal(dm_buf_cstr(&out), "abSTOP XSTOP HERE");
    dm_stop_reset(s);
    assert_null(dm_stop_found(s));
    assert_int_equal(dm_stop_feed(s, "more", 4, &out), 0);
    assert_string_equal(dm_buf_cstr(&out), "abSTOP XSTOP HEREmore");
    dm_buf_free(&out);
    dm_stop_destroy(s);
}

static void bad_strings_are_refused_by_number(void **state)
{
    (void)state;
    dm_err e = {0};
    dm_stop *s;
    char longest[DM_STOP_BYTES_MAX + 2];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    const char *many[DM_STOP_MAX + 1], *bad[] = {"ok", NULL};
    for (size_t i = 0; i < DM_COUNT(many); i++) many[i] = "x";
    assert_err(DM_EINVAL, dm_stop_create(&s, many, DM_COUNT(many), &e));
    assert_null(s);
    const char *const wrong[] = {"", "\xC3", longest};
    for (size_t i = 0; i < DM_COUNT(wrong); i++) {
        bad[1] = wrong[i];
        assert_err(DM_EINVAL, dm_stop_create(&s, bad, 2, &e));
        assert_non_null(strstr(e.text, "stop string 2"));
    }
    longest[DM_STOP_BYTES_MAX] = 0;
    bad[1] = longest;
    s = make(bad, 2);
    dm_stop_destroy(s);
    s = make(NULL, 0); /* no strings: all goes through */
    dm_buf out = {0};
    assert_int_equal(dm_stop_feed(s, "abc", 3, &out), 0);
    assert_int_equal(out.n, 3);
    dm_buf_free(&out);
    dm_stop_destroy(s);
    dm_stop_destroy(NULL);
}

static void memory_that_runs_out_is_told(void **state)
{
    (void)state;
    static const char *const texts[] = {"one", "two"};
    for (int n = 1; n < 20; n++) {
        dm_stop *s = NULL;
        dm_fault_alloc_after(n);
        int rc = dm_stop_create(&s, texts, 2, NULL);
        dm_fault_alloc_after(-1);
        if (rc == 0) {
            dm_stop_destroy(s);
            assert_true(n > 3);
            return;
        }
        assert_int_equal(rc, DM_ENOMEM);
        assert_null(s);
    }
    fail_msg("it never succeeded");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_string_is_found_at_every_cut),
        cmocka_unit_test(random_texts_are_cut_where_the_plain_rule_says),
        cmocka_unit_test(what_is_held_back_comes_when_it_turns_out_to_be_nothing),
        cmocka_unit_test(bad_strings_are_refused_by_number),
        cmocka_unit_test(memory_that_runs_out_is_told),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
