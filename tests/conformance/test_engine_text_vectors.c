/* The tokenizer and the chat encoding against the published ones: every line of tokenizer.jsonl and chat.jsonl, in
 * text and in ids. */
#include "engine/engine.h"
#include "engine/pyjson_int.h"
#include "testlib.h"

static dm_tok *tok;

static int open_tokenizer(void **state)
{
    (void)state;
    dm_err e = {0};
    if (dm_tok_open(&tok, DM_TEST_BUILD_DATA, &e) < 0) fail_msg("%s", e.text);
    return 0;
}

static int close_tokenizer(void **state)
{
    (void)state;
    dm_tok_close(tok);
    return 0;
}

typedef struct line { const char *p; size_t n; pj_doc doc; } line;

static void read_file(dm_buf *out, const char *name)
{
    dm_err e = {0};
    assert_ok_e(dm_file_read(name, (size_t)64 << 20, out, &e), e);
}

/* Calls fn for each line of the file; returns how many. */
static int each_line(const char *name, void (*fn)(const line *l))
{
    dm_buf file = {0};
    int count = 0;
    read_file(&file, name);
    for (const char *p = dm_buf_cstr(&file); *p;) {
        dm_err e = {0};
        line l = {.p = p, .n = strcspn(p, "\n")};
        assert_ok_e(pj_read(&l.doc, l.p, l.n, &e), e);
        fn(&l);
        pj_free(&l.doc);
        count++;
        p += l.n + (p[l.n] == '\n');
    }
    dm_buf_free(&file);
    return count;
}

static const pj_val *get(const line *l, const char *key)
{
    const pj_val *v = pj_get(&l->doc.root, key);
    if (!v) fail_msg("a line has no %s", key);
    return v;
}

static void same_ids(const line *l, const dm_ids *got)
{
    const pj_val *want = get(l, "ids");
    for (size_t i = 0; i < got->n && i < want->n; i++)
        if (got->p[i] != atoi(want->items[i].s)) fail_msg("%s: id %zu is %d, not %s", get(l, "name")->s, i, got->p[i], want->items[i].s);
    if (got->n != want->n) fail_msg("%s: %zu ids, not %u", get(l, "name")->s, got->n, want->n);
}

static void one_text(const line *l)
{
    dm_err e = {0};
    dm_ids ids = {0};
    dm_buf back = {0};
    const pj_val *text = get(l, "text");
    assert_ok_e(dm_tok_encode(tok, text->s, text->n, get(l, "special")->kind == PJ_TRUE, &ids, &e), e);
    same_ids(l, &ids);
    assert_ok(dm_tok_decode(tok, ids.p, ids.n, &back));
    assert_int_equal(back.n, text->n);
    if (text->n) assert_memory_equal(back.p, text->s, text->n);
    dm_buf_free(&back);
    dm_ids_free(&ids);
}

static void every_text_gives_the_published_ids_and_decodes_to_itself(void **state)
{
    (void)state;
    assert_int_equal(each_line(DM_TEST_BUILD_DATA "/tokenizer.jsonl", one_text), 688);
}

/* The messages as they stand in the line, so that our own writer has no part in it. */
static void messages_of(const line *l, const char **p, size_t *n)
{
    static const char from[] = "\"messages\": ", to[] = "], \"text\": \"";
    const char *start = strstr(l->p, from), *end = NULL;
    for (const char *q = start; q && (q = strstr(q, to)) && q < l->p + l->n; q++) end = q;
    assert_non_null(end);
    *p = start + strlen(from);
    *n = (size_t)(end + 1 - *p);
}

static void one_talk(const line *l)
{
    dm_err e = {0};
    dm_prompt prompt = {0};
    dm_ids ids = {0};
    const pj_val *effort = get(l, "effort"), *text = get(l, "text");
    dm_chat_opts o = {.mode = pj_is(get(l, "mode"), "thinking") ? DM_THINKING : DM_CHAT,
                      .drop_thinking = get(l, "drop_thinking")->kind == PJ_TRUE,
                      .effort = pj_is(effort, "max") ? DM_EFFORT_MAX : pj_is(effort, "high") ? DM_EFFORT_HIGH : DM_EFFORT_NONE,
                      .revision = DM_REV_APRIL};
    const char *messages;
    size_t n;
    messages_of(l, &messages, &n);
    assert_ok_e(dm_chat_render(messages, n, &o, &prompt, &e), e);
    size_t same = 0;
    while (same < prompt.text.n && same < text->n && prompt.text.p[same] == (uint8_t)text->s[same]) same++;
    if (same < prompt.text.n || same < text->n)
        fail_msg("%s differs at byte %zu:\n got %.60s\nwant %.60s", get(l, "name")->s, same, dm_buf_cstr(&prompt.text) + same, text->s + same);
    assert_ok_e(dm_prompt_encode(tok, &prompt, &ids, &e), e);
    same_ids(l, &ids);
    dm_ids_free(&ids);
    dm_prompt_free(&prompt);
}

static void every_talk_gives_the_published_prompt_and_ids(void **state)
{
    (void)state;
    assert_int_equal(each_line(DM_TEST_BUILD_DATA "/chat.jsonl", one_talk), 240);
}

/* V4 architecture notes, 6.6 and 11. */
static void the_worked_examples_give_their_ids(void **state)
{
    (void)state;
    static const struct { const char *text; bool special; const char *ids; } examples[] = {
        {"Hello! 毕老师！1 + 1 = 2 ĠÑĤÐ²ÑĬÑĢ", true,
         "19923 3 223 5464 5008 1175 19 940 223 19 438 223 20 6113 257 76589 131 100 76032 1628 76589 131 108 76589 131 98"},
        {"<｜User｜>你好<｜Assistant｜><think>推理</think>答案<｜end▁of▁sentence｜>", true, "128803 30594 128804 128821 36101 128822 7624 1"},
        {"hello world", false, "33310 2058"},
        {"\n\n<", false, "271 30"},
        {"    int x;\n\n", false, "361 688 1527 1048"},
        {"int main(void) {\n    return 0;\n}\n", false, "650 1840 40374 11 875 361 1354 223 18 510 1778"},
        {"1234567 3.14159 2026-04-24", false, "6895 18009 25 223 21 16 9926 3318 223 939 24 15 3663 15 1173"},
        {"a  b   c\t\td\n\n  e", false, "67 223 291 262 274 200 51623 271 223 312"},
        {"don't 你好world 日本語テスト한국어 😀", false, "20385 1664 223 30594 29616 223 88768 109288 5634 17564 9227 53769 225"},
        {"<｜begin▁of▁sentence｜><｜User｜>What is the capital of France?<｜Assistant｜></think>", true,
         "0 128803 3085 344 270 6102 294 8760 33 128804 128822"},
        {"\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"location\" string=\"true\">Rome</｜DSML｜parameter>"
         "\n</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end▁of▁sentence｜>", true,
         "271 30 128825 72461 4941 12548 1018 30 128825 40148 5406 2329 1281 1133 65 50219 3816 30 128825 41523 2329 1281 33182 4 3418 1281 11476 3320 "
         "98455 1718 128825 41523 1018 1718 128825 40148 5406 1018 1718 128825 72461 4941 12548 32 1"},
    };
    for (size_t i = 0; i < DM_COUNT(examples); i++) {
        dm_err e = {0};
        dm_ids ids = {0};
        dm_buf got = {0};
        assert_ok_e(dm_tok_encode(tok, examples[i].text, strlen(examples[i].text), examples[i].special, &ids, &e), e);
        for (size_t k = 0; k < ids.n; k++) assert_ok(dm_buf_printf(&got, k ? " %d" : "%d", ids.p[k]));
        assert_string_equal(dm_buf_cstr(&got), examples[i].ids);
        dm_buf_free(&got);
        dm_ids_free(&ids);
    }
}

static void special_tokens_are_found_by_their_text(void **state)
{
    (void)state;
    static const struct { const char *text; int id; } known[] = {
        {"<｜begin▁of▁sentence｜>", 0}, {"<｜end▁of▁sentence｜>", 1}, {"<｜User｜>", 128803}, {"<｜Assistant｜>", 128804},
        {"<think>", 128821}, {"</think>", 128822}, {"｜DSML｜", 128825}, {"<｜latest_reminder｜>", 128828}, {"<｜title｜>", 128836},
        {"<think", DM_ENOENT}, {"<think>x", DM_ENOENT}, {"", DM_ENOENT}, {"Hello", DM_ENOENT},
    };
    int special = 0;
    for (size_t i = 0; i < DM_COUNT(known); i++) assert_int_equal(dm_tok_special(tok, known[i].text), known[i].id);
    assert_int_equal(dm_tok_vocab(tok), 129280);
    for (int id = 0; id < 129280; id++) {
        size_t n;
        assert_non_null(dm_tok_bytes(tok, id, &n));
        assert_true(n > 0);
        special += dm_tok_is_special(tok, id);
    }
    assert_int_equal(special, 1283);
}

/* Every added token, as data: none of its ids may come out. */
static void as_data_no_added_token_is_recognised(void **state)
{
    (void)state;
    for (int id = 0; id < dm_tok_vocab(tok); id++) {
        if (!dm_tok_is_special(tok, id)) continue;
        dm_ids ids = {0};
        dm_err e = {0};
        size_t n;
        const char *s = dm_tok_bytes(tok, id, &n);
        assert_ok_e(dm_tok_encode(tok, s, n, false, &ids, &e), e);
        for (size_t i = 0; i < ids.n; i++) assert_false(dm_tok_is_special(tok, ids.p[i]));
        ids.n = 0;
        assert_ok_e(dm_tok_encode(tok, s, n, true, &ids, &e), e);
        assert_int_equal(ids.n, 1);
        assert_int_equal(ids.p[0], id);
        dm_ids_free(&ids);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_text_gives_the_published_ids_and_decodes_to_itself),
        cmocka_unit_test(every_talk_gives_the_published_prompt_and_ids),
        cmocka_unit_test(the_worked_examples_give_their_ids),
        cmocka_unit_test(special_tokens_are_found_by_their_text),
        cmocka_unit_test(as_data_no_added_token_is_recognised),
    };
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
