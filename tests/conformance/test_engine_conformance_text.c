/* Tokenizer and chat encoding against the vectors of the published tokenizer and the authors' encoder. */
#include "tests/lib/engine_files.h"

static void agrees(const char *file, int64_t lines)
{
    dm_verify_opts o = {0};
    dm_verify_report r;
    dm_err e;
    int rc = dm_model_verify(DM_TEST_BUILD_DATA, in_dir(DM_TEST_BUILD_DATA, file), &o, &r, NULL, NULL, &e);
    if (rc < 0) fail_msg("%s: %s", file, e.text);
    assert_int_equal(r.compared, lines);
    assert_int_equal(r.differ, 0);
}

static void every_tokenizer_vector_agrees(void **s)
{
    (void)s;
    agrees("tokenizer.jsonl", 688);
}

static void every_chat_vector_agrees(void **s)
{
    (void)s;
    agrees("chat.jsonl", 240);
}

static void a_wrong_id_is_found_and_its_line_named(void **s)
{
    (void)s;
    dm_verify_opts o = {0};
    dm_verify_report r;
    dm_err e;
    static const char lines[] = "{\"name\": \"good\", \"special\": true, \"text\": \"hello world\", \"ids\": [33310, 2058]}\n"
                                "{\"name\": \"bad\", \"special\": true, \"text\": \"hello world\", \"ids\": [33310, 2059]}\n";
    spit(scratch("lines.jsonl"), lines, sizeof lines - 1);
    assert_err(DM_EMISMATCH, dm_model_verify(DM_TEST_BUILD_DATA, scratch("lines.jsonl"), &o, &r, NULL, NULL, &e));
    assert_string_equal(r.kind, "tokenizer");
    assert_int_equal(r.compared, 2);
    assert_int_equal(r.differ, 1);
    assert_text(r.first, "line 2 (bad)");
    assert_text(r.first, "2058 instead of 2059");
}

static void a_wrong_prompt_is_found_and_its_byte_named(void **s)
{
    (void)s;
    dm_verify_opts o = {0};
    dm_verify_report r;
    dm_err e;
    dm_buf b = slurp(in_dir(DM_TEST_BUILD_DATA, "chat.jsonl"));
    char *second = memchr(b.p, '\n', b.n);
    assert_non_null(second);
    *++second = '\0';
    b.n = (size_t)(second - (char *)b.p);
    replace_in(&b, "\"text\": \"<", "\"text\": \"[");
    spit(scratch("chat.jsonl"), b.p, b.n);
    dm_buf_free(&b);
    assert_err(DM_EMISMATCH, dm_model_verify(DM_TEST_BUILD_DATA, scratch("chat.jsonl"), &o, &r, NULL, NULL, &e));
    assert_string_equal(r.kind, "chat");
    assert_text(r.first, "line 1 (chat-0): the text differs from byte 0");
}

static void lines_of_another_kind_are_refused_in_words(void **s)
{
    (void)s;
    dm_verify_opts o = {0};
    dm_verify_report r;
    dm_err e;
    static const char *const texts[] = {"{\"a\": 1}\n", "{\"name\": \"x\", \"text\": \"y\", \"ids\": [1]}\n{\"name\": \"x\", \"text\": 1, \"ids\": [1]}\n",
                                        "{\"name\": \"x\", \"text\": \"y\", \"ids\": [1]}\n{broken\n", "{\"name\": \"x\", \"text\": \"y\", \"ids\": [1.5]}\n"};
    for (size_t i = 0; i < DM_COUNT(texts); i++) {
        spit(scratch("lines.jsonl"), texts[i], strlen(texts[i]));
        assert_err(DM_EFORMAT, dm_model_verify(DM_TEST_BUILD_DATA, scratch("lines.jsonl"), &o, &r, NULL, NULL, &e));
        assert_text(e.text, "lines.jsonl");
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_tokenizer_vector_agrees),
        cmocka_unit_test(every_chat_vector_agrees),
        cmocka_unit_test(a_wrong_id_is_found_and_its_line_named),
        cmocka_unit_test(a_wrong_prompt_is_found_and_its_byte_named),
        cmocka_unit_test(lines_of_another_kind_are_refused_in_words),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
