/* base: UTF-8, hexadecimal, buffers, hashes. */
#include "tests/lib/testlib.h"

#include <limits.h>

static void valid_utf8_is_told_from_invalid(void **state)
{
    (void)state;
    assert_true(dm_utf8_valid("aé日😀", strlen("aé日😀")));
    static const char *const bad[] = {"\x80", "\xC0\x80", "\xC1\xBF", "\xE0\x80\x80", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF", "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xE6\x97", "a\xFF"};
    for (size_t i = 0; i < DM_COUNT(bad); i++) assert_false(dm_utf8_valid(bad[i], strlen(bad[i])));
    assert_true(dm_utf8_valid("a\0b", 3));
}

static void clean(const char *in, size_t n, const char *want, int64_t replaced)
{
    dm_buf b = {0};
    assert_int_equal(dm_utf8_clean(&b, in, n), replaced);
    assert_string_equal(dm_buf_cstr(&b), want);
    dm_buf_free(&b);
}

static void every_maximal_invalid_part_becomes_one_replacement_character(void **state)
{
    (void)state;
    clean("ok", 2, "ok", 0);
    clean("a\xFF" "b", 3, "a\xEF\xBF\xBD" "b", 1);
    clean("\xE6\x97", 2, "\xEF\xBF\xBD", 1);             /* a cut character: one */
    clean("\xED\xA0\x80", 3, "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD", 3); /* a surrogate: each byte */
    clean("\xF0\x9F\x98\xF0\x9F\x98\x80", 7, "\xEF\xBF\xBD\xF0\x9F\x98\x80", 1);
}

static void cleaning_random_bytes_gives_valid_utf8_and_streaming_agrees(void **state)
{
    (void)state;
    uint64_t s = test_seed();
    for (int round = 0; round < 2000; round++) {
        uint8_t in[64];
        size_t n = dm_splitmix64(&s) % sizeof in;
        for (size_t i = 0; i < n; i++) {
            uint64_t r = dm_splitmix64(&s);
            in[i] = r & 1 ? (uint8_t)(r >> 8) : (uint8_t)(0x80 | (r >> 8 & 0x7F));
        }
        dm_buf whole = {0}, parts = {0};
        assert_true(dm_utf8_clean(&whole, in, n) >= 0);
        assert_true(dm_utf8_valid(whole.p, whole.n));
        size_t from = 0;
        for (size_t to = 1; to <= n; to++) { /* byte by byte, keeping what is not whole */
            size_t k = dm_utf8_whole(in + from, to - from);
            assert_true(to - from - k <= 3);
            assert_true(dm_utf8_clean(&parts, in + from, k) >= 0);
            from += k;
        }
        assert_true(dm_utf8_clean(&parts, in + from, n - from) >= 0);
        assert_int_equal(whole.n, parts.n);
        if (whole.n) assert_memory_equal(whole.p, parts.p, whole.n);
        dm_buf_free(&whole);
        dm_buf_free(&parts);
    }
}

static void code_points_round_trip(void **state)
{
    (void)state;
    for (uint32_t cp = 0; cp <= 0x10FFFF; cp += cp < 0x3000 ? 1 : 37) {
        if (cp >= 0xD800 && cp <= 0xDFFF) continue;
        dm_buf b = {0};
        uint32_t back = ~cp;
        assert_ok(dm_utf8_put(&b, cp));
        assert_int_equal(dm_utf8_next(b.p, b.n, &back), b.n);
        assert_int_equal(back, cp);
        dm_buf_free(&b);
    }
}

static void hexadecimal_round_trips_and_refuses_other_digits(void **state)
{
    (void)state;
    uint8_t in[3] = {0, 0xab, 0xff}, back[3];
    char hex[7];
    dm_hex(hex, in, 3);
    assert_string_equal(hex, "00abff");
    assert_true(dm_unhex(back, "00ABff", 3));
    assert_memory_equal(in, back, 3);
    assert_false(dm_unhex(back, "0g", 1));
}

static void hashes_equal_published_vectors(void **state)
{
    (void)state;
    char hex[65];
    dm_hash h;
    dm_sha256 sha;
    dm_sha256_init(&sha);
    dm_sha256_add(&sha, "ab", 2);
    dm_sha256_add(&sha, "c", 1);
    dm_sha256_end(&sha, &h);
    dm_hex(hex, h.b, 32);
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    dm_blake2b b;
    dm_blake2b_init(&b);
    dm_blake2b_add(&b, "abc", 3);
    dm_blake2b_end(&b, &h);
    dm_hex(hex, h.b, 32);
    assert_string_equal(hex, "bddd813c634239723171ef3fee98579b94964e3bb1cb3e427262c8c068d52319");
    uint64_t s = 0; /* splitmix64's first output from state 0 */
    assert_true(dm_splitmix64(&s) == 0xE220A8397B1DCDAFu);
}

static void a_failed_append_leaves_the_buffer_as_it_was(void **state)
{
    (void)state;
    dm_buf b = {0};
    assert_ok(dm_buf_str(&b, "keep"));
    char big[4096];
    memset(big, 'x', sizeof big);
    dm_fault_alloc_after(1);
    assert_err(DM_ENOMEM, dm_buf_append(&b, big, sizeof big));
    dm_fault_alloc_after(-1);
    assert_string_equal(dm_buf_cstr(&b), "keep");
    assert_err(DM_ENOMEM, dm_buf_reserve(&b, SIZE_MAX - 2));
    dm_buf_consume(&b, 2);
    assert_string_equal(dm_buf_cstr(&b), "ep");
    dm_buf_free(&b);
}

static void sizes_are_written_for_people(void **state)
{
    (void)state;
    char t[16];
    assert_string_equal(dm_bytes_text(t, sizeof t, 12), "12 B");
    assert_string_equal(dm_bytes_text(t, sizeof t, 1536), "1.5 KiB");
    assert_string_equal(dm_bytes_text(t, sizeof t, 938u * 1024), "938 KiB");
}

static int distance(const char *a, const char *b) { return dm_text_distance(a, strlen(a), b, strlen(b)); }

static void distance_counts_letters_in_out_or_other(void **state)
{
    (void)state;
    assert_int_equal(distance("", ""), 0);
    assert_int_equal(distance("", "abc"), 3);
    assert_int_equal(distance("kitten", "sitting"), 3);
    assert_int_equal(distance("sitting", "kitten"), 3);
    char word[DM_TEXT_WORD + 2];
    memset(word, 'a', sizeof word);
    assert_int_equal(dm_text_distance(word, DM_TEXT_WORD, word, DM_TEXT_WORD), 0);
    assert_int_equal(dm_text_distance(word, DM_TEXT_WORD, "", 0), DM_TEXT_WORD);
    assert_int_equal(dm_text_distance(word, DM_TEXT_WORD + 1, "a", 1), INT_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(valid_utf8_is_told_from_invalid),
        cmocka_unit_test(every_maximal_invalid_part_becomes_one_replacement_character),
        cmocka_unit_test(cleaning_random_bytes_gives_valid_utf8_and_streaming_agrees),
        cmocka_unit_test(code_points_round_trip),
        cmocka_unit_test(hexadecimal_round_trips_and_refuses_other_digits),
        cmocka_unit_test(hashes_equal_published_vectors),
        cmocka_unit_test(a_failed_append_leaves_the_buffer_as_it_was),
        cmocka_unit_test(sizes_are_written_for_people),
        cmocka_unit_test(distance_counts_letters_in_out_or_other),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
