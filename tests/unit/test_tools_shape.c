/* Any bytes become text for a model (A06, A07, Q24, Q27, Q29, Q31). */
#include "tests/lib/testlib.h"
#include "tools/tools.h"
#include "tools/tools_int.h"

static void shaped(const char *in, size_t n, const char *want) {
    dm_buf out = {0};
    bool cut = true;
    assert_ok(dm_tool_shape(in, n, 4096, &out, &cut));
    assert_string_equal(dm_buf_cstr(&out), want);
    assert_false(cut);
    dm_buf_free(&out);
}
#define SHAPED(in, want) shaped(in, sizeof(in) - 1, want)

static void plain_text_passes_unchanged(void **state) {
    (void)state;
    SHAPED("", "");
    SHAPED("hello\tworld\n", "hello\tworld\n");
    SHAPED("h\xc3\xa9 \xe6\x97\xa5 \xf0\x9f\x98\x80", "h\xc3\xa9 \xe6\x97\xa5 \xf0\x9f\x98\x80");
    SHAPED("a\xe2\x80\xa8" "b", "a\xe2\x80\xa8" "b"); /* U+2028 is text */
}

static void escape_sequences_are_removed(void **state) {
    (void)state;
    SHAPED("a\033[31mred\033[0m b", "ared b");
    SHAPED("\033[1;38;5;200mx\033[K", "x");
    SHAPED("\033]0;title\007text", "text");
    SHAPED("\033]8;;http://x\033\\link\033]8;;\033\\", "link");
    SHAPED("\033P+q\033\\x\033(By", "xy");
    SHAPED("\xc2\x9b" "31mx", "x"); /* C1 form of ESC [ */
    SHAPED("a\033", "a");
    SHAPED("a\033[", "a");
    SHAPED("a\033]no end\nnext", "a\nnext"); /* what never ends swallows no more than its line */
    SHAPED("\033[31\nx", "\nx");
    SHAPED("\033\033[1mx", "x");
}

static void controls_are_removed(void **state) {
    (void)state;
    SHAPED("a\0b\001c\177d", "abcd");
    SHAPED("bo\bob_\bu", "bobu");
    SHAPED("\b\b", "");
}

static void carriage_returns_act_as_on_a_terminal(void **state) {
    (void)state;
    SHAPED("one\r\ntwo\r\n", "one\ntwo\n");
    SHAPED("10%\r20%\r100%\ndone", "100%\ndone");
    SHAPED("x\r\r\ny", "x\ny");
    SHAPED("last\r", "last");
}

static void broken_utf8_is_replaced(void **state) {
    (void)state;
    SHAPED("a\377c", "a\xef\xbf\xbd" "c");
    SHAPED("\xc3", "\xef\xbf\xbd");
    SHAPED("\xed\xa0\xbd\xed\xb8\x80", "\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbd"); /* CESU surrogates */
    SHAPED("\xc0\x80", "\xef\xbf\xbd\xef\xbf\xbd");
}

/* The result must not depend on how the bytes were split. */
static void any_split_gives_the_same(void **state) {
    (void)state;
    static const char in[] = "a\033[31mr\xc3\xa9" "d\033[0m\r\nb\b\xff\xf0\x9f\x98\x80\033]0;t\033\\x\r10%\r20%\n\0\xe2\x82z\xc2\x9b" "1m.";
    dm_buf whole = {0};
    bool cut;
    assert_ok(dm_tool_shape(in, sizeof in - 1, 4096, &whole, &cut));
    for (size_t i = 0; i < sizeof in; i++)
        for (size_t j = i; j < sizeof in; j++) {
            dm_buf out = {0};
            shaper s;
            shaper_init(&s, 4096, true);
            assert_ok(shaper_feed(&s, in, i));
            assert_ok(shaper_feed(&s, in + i, j - i));
            assert_ok(shaper_feed(&s, in + j, sizeof in - 1 - j));
            assert_ok(shaper_end(&s, &out, &cut, NULL));
            assert_string_equal(dm_buf_cstr(&out), dm_buf_cstr(&whole));
            shaper_free(&s);
            dm_buf_free(&out);
        }
    dm_buf_free(&whole);
}

static void q29_a_cut_never_splits_a_character(void **state) {
    (void)state;
    for (size_t max = 400; max < 440; max++)
        for (size_t shift = 0; shift < 4; shift++) {
            dm_buf in = {0}, out = {0};
            bool cut = false;
            for (size_t i = 0; i < shift; i++) assert_ok(dm_buf_byte(&in, 'a'));
            for (int i = 0; i < 500; i++) assert_ok(dm_buf_str(&in, i % 2 ? "\xf0\x9f\x98\x80" : "\xe6\x97\xa5"));
            assert_ok(dm_tool_shape(in.p, in.n, max, &out, &cut));
            assert_true(cut && out.n <= max);
            assert_true(dm_utf8_valid(out.p, out.n));
            assert_null(strstr(dm_buf_cstr(&out), "\xef\xbf\xbd"));
            dm_buf_free(&in);
            dm_buf_free(&out);
        }
}

static void q24_head_and_tail_are_kept_and_the_gap_is_counted(void **state) {
    (void)state;
    dm_buf in = {0}, out = {0};
    bool cut = false;
    for (int i = 0; i < 100000; i++) assert_ok(dm_buf_printf(&in, "line %d\n", i));
    assert_ok(dm_buf_str(&in, "the error is here\n"));
    assert_ok(dm_tool_shape(in.p, in.n, 4096, &out, &cut));
    const char *text = dm_buf_cstr(&out), *note = strstr(text, "\n[");
    unsigned long long left_out = 0;
    assert_true(cut && out.n <= 4096);
    assert_memory_equal(text, "line 0\nline 1\n", 14);
    assert_string_equal(text + out.n - 18, "the error is here\n");
    assert_int_equal(sscanf(note, "\n[%llu bytes left out here]", &left_out), 1);
    const size_t note_n = strlen("[") + (size_t)snprintf(NULL, 0, "%llu", left_out) + strlen(" bytes left out here]\n");
    assert_int_equal(left_out, in.n - (out.n - note_n));
    /* Whole lines on both sides. */
    int head_last = 0, tail_first = 0;
    const char *before = note;
    while (before > text && before[-1] != '\n') before--;
    assert_int_equal(sscanf(before, "line %d\n", &head_last), 1);
    assert_int_equal(sscanf(strchr(note + 2, '\n') + 1, "line %d\n", &tail_first), 1);
    assert_true(head_last < tail_first);
    dm_buf_free(&in);
    dm_buf_free(&out);
}

static void every_size_near_the_limit_is_whole_or_cut_rightly(void **state) {
    (void)state;
    for (size_t n = 300; n < 1800; n += 7) {
        dm_buf in = {0}, out = {0};
        bool cut = false;
        for (size_t i = 0; i < n; i++) assert_ok(dm_buf_byte(&in, (uint8_t)('a' + i % 26)));
        assert_ok(dm_tool_shape(in.p, in.n, 800, &out, &cut));
        assert_int_equal(cut, n > 800);
        if (!cut) {
            assert_memory_equal(out.p, in.p, n);
        } else {
            const char *note = strstr(dm_buf_cstr(&out), "\n[");
            unsigned long long left_out = 0;
            int end = 0;
            assert_int_equal(sscanf(note, "\n[%llu bytes left out here]\n%n", &left_out, &end), 1);
            const size_t head = (size_t)((const uint8_t *)note - out.p), tail = out.n - head - (size_t)end;
            assert_int_equal(head + tail + left_out, n);
            assert_memory_equal(out.p, in.p, head);
            assert_memory_equal(note + end, in.p + n - tail, tail);
        }
        dm_buf_free(&in);
        dm_buf_free(&out);
    }
}

static void random_bytes_always_become_bounded_text(void **state) {
    (void)state;
    uint64_t seed = test_seed();
    static uint8_t in[20000];
    for (int round = 0; round < 200; round++) {
        const size_t n = dm_splitmix64(&seed) % sizeof in, max = 400 + dm_splitmix64(&seed) % 4000;
        const uint64_t kind = dm_splitmix64(&seed) % 3;
        for (size_t i = 0; i < n; i++) {
            const uint64_t x = dm_splitmix64(&seed);
            in[i] = kind == 0 ? (uint8_t)x : kind == 1 ? (uint8_t)"\033[]\r\n\b;m0a\\P\x9b\xc2\007"[x % 16] : (uint8_t)(x % 5 ? 0x80 | x : 'a');
        }
        dm_buf out = {0};
        bool cut;
        assert_ok(dm_tool_shape(in, n, max, &out, &cut));
        assert_true(out.n <= max);
        assert_true(dm_utf8_valid(out.p, out.n));
        for (size_t i = 0; i < out.n; i++) assert_true(out.p[i] >= 32 || out.p[i] == '\n' || out.p[i] == '\t');
        dm_buf_free(&out);
    }
}

static void one_line_without_end_is_bounded_memory(void **state) {
    (void)state;
    shaper s;
    dm_buf out = {0};
    bool cut;
    char block[4096];
    memset(block, 'x', sizeof block);
    shaper_init(&s, 10000, true);
    for (int i = 0; i < 5000; i++) {
        assert_ok(shaper_feed(&s, block, sizeof block));
        assert_true(s.line.cap <= 4 * SHAPE_LINE_MAX && s.head.n <= 10000 && s.head.cap <= 40000);
    }
    assert_ok(shaper_end(&s, &out, &cut, "/somewhere/whole.txt"));
    assert_true(cut && out.n <= 10000);
    assert_non_null(strstr(dm_buf_cstr(&out), "the whole output is in /somewhere/whole.txt]"));
    shaper_free(&s);
    dm_buf_free(&out);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(plain_text_passes_unchanged),
        cmocka_unit_test(escape_sequences_are_removed),
        cmocka_unit_test(controls_are_removed),
        cmocka_unit_test(carriage_returns_act_as_on_a_terminal),
        cmocka_unit_test(broken_utf8_is_replaced),
        cmocka_unit_test(any_split_gives_the_same),
        cmocka_unit_test(q29_a_cut_never_splits_a_character),
        cmocka_unit_test(q24_head_and_tail_are_kept_and_the_gap_is_counted),
        cmocka_unit_test(every_size_near_the_limit_is_whole_or_cut_rightly),
        cmocka_unit_test(random_bytes_always_become_bounded_text),
        cmocka_unit_test(one_line_without_end_is_bounded_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
