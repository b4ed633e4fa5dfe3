/* Random output: the parser must say the same for every way of cutting it, whatever it is; and what our own
 * renderer writes must come back as it was.  DM_TEST_FULL: a million rounds. */
#include "test_engine_parser_kit.h"

static uint64_t rng;
static uint64_t below(uint64_t n) { return dm_splitmix64(&rng) % n; }
static const char *pick(const char *const *list, size_t n) { return list[below(n)]; }
#define PICK(list) pick(list, DM_COUNT(list))

static int rounds(int quick) { return test_full() ? 1000000 : quick; }

/* ---- cuts ---- */

static const char *const scraps[] = {
    TC, TC_, INV_, P_, INV("bash"), INV("now"), INV("nosuch"), PS("command"), PS("path"), PJ("limit"), PS("arguments"), PJ("input"),
    "<" DSML "parameter name=\"edits\">", "<" DSML "invoke>", "<" DSML "tool_calls", "<" DSML "toolcalls>", "</" DSML "paramter>",
    "<｜" DSML "｜tool_calls>", "<|DSML|invoke name=\"now\">", "</|DSML|invoke>", "<invoke name=\"bash\">", "<parameter name=\"command\">",
    "</parameter>", "</invoke>", "</think>", "<think>", EOS, "<", "</", "<｜", "｜", "|", DSML, "DSML", ">", "\"", "'", "“", "=", "/", "\n",
    "\n\n", " ", "\t", "a", "ls -la", "é", "日本", "😀", "\\", "{", "}", "{\"command\": \"x\"}", "{\"arguments\": {\"command\": \"x\"}}", "[1, 2",
    "5", "true", "\xff", "\xe6\x97", "\xf0\x9f", "name", "string=\"true\"", "&lt;", "text about ", INV("bash") "\n" PS("command") "ls" P_ "\n" INV_,
    C1, TC "\n" INV("now") "\n\n" INV_ "\n" TC_,
};

static void random_output(dm_buf *out)
{
    size_t n = 1 + below(24);
    dm_buf_clear(out);
    for (size_t i = 0; i < n; i++) assert_ok(dm_buf_str(out, PICK(scraps)));
}

/* Pieces of random length; as tokens: markers whole and special where they stand. */
static void feed_random(kit *k, const dm_parser_opts *o, const dm_buf *in, bool cut)
{
    dm_parser *p = kit_start(k, o);
    const char *s = dm_buf_cstr(in);
    for (size_t i = 0; i < in->n;) {
        const char *mark = o->markers_in_text ? NULL : kit_mark(s + i);
        size_t n = mark ? strlen(mark) : 1 + below(9);
        if (n > in->n - i) n = in->n - i;
        for (size_t j = 1; !o->markers_in_text && !mark && j < n; j++)
            if (kit_mark(s + i + j)) n = j;
        assert_ok(dm_parser_feed(p, s + i, n, mark != NULL));
        i += n;
    }
    kit_end(k, p, cut);
}

static void whole_is_bytes_is_any_cut(void **state)
{
    (void)state;
    dm_buf in = {0};
    int n = rounds(20000);
    for (int i = 0; i < n; i++) {
        uint64_t seed = rng;
        dm_parser_opts o = {.thinking = below(2), .markers_in_text = true, .tools = kit_tools, .ntools = below(8) ? DM_COUNT(kit_tools) : 0,
                            .call_bytes_max = below(4) ? 0 : 20 + below(200)};
        bool cut = below(3) == 0;
        kit a, b;
        random_output(&in);
        kit_pieces(&a, &o, dm_buf_cstr(&in), in.n, in.n, in.n, cut);
        if (below(2)) feed_random(&b, &o, &in, cut);
        else kit_bytes(&b, &o, dm_buf_cstr(&in), in.n, cut);
        if (a.broken || b.broken || strcmp(dm_buf_cstr(&a.log), dm_buf_cstr(&b.log)) || a.closed != b.closed)
            printf("# round %d, seed %llu, thinking %d, cut %d, limit %zu: %s\n", i, (unsigned long long)seed, o.thinking, cut, o.call_bytes_max,
                   dm_buf_cstr(&in));
        kit_same(&a, &b, "round", (size_t)i);
        kit_free(&a);
        kit_free(&b);
        o.markers_in_text = false;
        feed_random(&a, &o, &in, cut);
        kit_tokens(&b, &o, dm_buf_cstr(&in), in.n, cut);
        kit_same(&a, &b, "tokens, round", (size_t)i);
        kit_free(&a);
        kit_free(&b);
    }
    dm_buf_free(&in);
}

/* Without tools nothing is a call and nothing is lost. */
static void without_tools_all_is_text(void **state)
{
    (void)state;
    dm_buf in = {0}, clean = {0};
    int n = rounds(5000) / 4;
    for (int i = 0; i < n; i++) {
        dm_parser_opts o = {.markers_in_text = true};
        kit k;
        random_output(&in);
        kit_bytes(&k, &o, dm_buf_cstr(&in), in.n, false);
        char *end = strstr(dm_buf_cstr(&in), EOS);
        dm_buf_clear(&clean);
        assert_true(dm_utf8_clean(&clean, in.p, end ? (size_t)(end - (char *)in.p) : in.n) >= 0);
        assert_string_equal(dm_buf_cstr(&k.content), dm_buf_cstr(&clean));
        assert_int_equal(k.begun + k.errors + k.repairs, 0);
        kit_free(&k);
    }
    dm_buf_free(&in);
    dm_buf_free(&clean);
}

/* ---- render, then parse ---- */

/* Near misses of the closer are left out: they are read as the closer by intention. */
static const char *const value_parts[] = {
    "<", ">", "/", "</", "｜", "|", DSML, "DSML", "&", "&lt;", "\n", "\r\n", "\t", " ", "\"", "\\", "{", "}", "2>&1", "é", "日本", "😀", "\x01",
    TC, TC_, INV("bash"), INV_, PS("path"), "<" DSML "parameter", "</" DSML, "</｜DS", "</think>", "</parameter>", "</|DSML|parameter>",
    "</｜" DSML "｜parameter>", "word", "if (a < b) x<", "name=\"",
};
static const char *const closer_parts[] = {P_, "</" DSML "paramter>\n" PS("path"), EOS};
static const char *const json_values[] = {
    "1", "-5", "123456789012345678901234567890", "1.5", "1e-07", "true", "false", "null", "[]", "{}", "[1, \"a\", {\"b\": null}]",
    "{\"k\": \"</x> \\n \\\" | ｜\"}", "[[[\"<\"]]]", "0.1", "-0.0",
};
static const char *const keys[] = {"path", "content", "command", "limit", "a b", "ключ", "k'q", "a\"b", "x=y", "<k>", "k\nl", "名", "n.1"};

static void random_value(dm_buf *out, bool closers)
{
    size_t n = below(12);
    for (size_t i = 0; i < n; i++) assert_ok(dm_buf_str(out, closers && !below(4) ? PICK(closer_parts) : PICK(value_parts)));
}

/* Arguments in Python's spelling, so that what comes back can be compared as text. */
static void random_args(dm_buf *out, bool closers)
{
    dm_buf raw = {0}, value = {0};
    bool used[DM_COUNT(keys)] = {0};
    size_t n = below(4);
    dm_buf_str(&raw, "{");
    for (size_t i = 0, given = 0; i < n; i++) {
        size_t key = below(DM_COUNT(keys));
        if (used[key]) continue;
        used[key] = true;
        if (given++) dm_buf_str(&raw, ",");
        dm_buf_clear(&value);
        if (below(3)) random_value(&value, closers);
        /* keys and string values go through a JSON writer of the test's own, which escapes more than it must */
        for (int part = 0; part < 2; part++) {
            const char *s = part ? dm_buf_cstr(&value) : keys[key];
            bool text = !part || below(2) || value.n;
            if (!text) dm_buf_str(&raw, PICK(json_values));
            if (text) dm_buf_str(&raw, "\"");
            for (; text && *s; s++) {
                if ((unsigned char)*s < 0x20 || *s == '"' || *s == '\\' || *s == '/') dm_buf_printf(&raw, "\\u%04x", *s);
                else dm_buf_byte(&raw, (uint8_t)*s);
            }
            if (text) dm_buf_str(&raw, "\"");
            if (!part) dm_buf_str(&raw, ": ");
        }
    }
    assert_ok(dm_buf_str(&raw, "}"));
    assert_ok(dm_json_python(dm_buf_cstr(&raw), raw.n, out, NULL));
    dm_buf_free(&raw);
    dm_buf_free(&value);
}

typedef struct turn {
    dm_buf json;  /* messages: one assistant turn */
    dm_buf calls; /* what the parser should give */
    dm_prompt prompt;
} turn;

static void turn_make(turn *t, bool closers)
{
    dm_err e = {0};
    size_t n = 1 + below(3);
    dm_buf args = {0};
    dm_buf_clear(&t->json);
    dm_buf_clear(&t->calls);
    dm_buf_str(&t->json, "[{\"role\": \"assistant\", \"content\": \"Text <b>.\", \"reasoning_content\": \"why\", \"tool_calls\": [");
    for (size_t i = 0; i < n; i++) {
        dm_buf_clear(&args);
        random_args(&args, closers);
        dm_buf_printf(&t->json, "%s{\"function\": {\"name\": \"free\", \"arguments\": %s}}", i ? ", " : "", dm_buf_cstr(&args));
        dm_buf_printf(&t->calls, "free %s\n", dm_buf_cstr(&args));
    }
    assert_ok(dm_buf_str(&t->json, "]}]"));
    dm_chat_opts o = {.mode = DM_THINKING, .continues = true};
    assert_ok_e(dm_chat_render(dm_buf_cstr(&t->json), t->json.n, &o, &t->prompt, &e), e);
    dm_buf_free(&args);
}

static void turn_free(turn *t)
{
    dm_buf_free(&t->json);
    dm_buf_free(&t->calls);
    dm_prompt_free(&t->prompt);
}

static void turn_compare(const turn *t, kit *k, const char *how)
{
    if (strcmp(dm_buf_cstr(&k->calls), dm_buf_cstr(&t->calls)) || k->errors || k->repairs || k->broken)
        fail_msg("%s:\nrendered: %s\n     got: %s\n    want: %s\nevents:%s", how, dm_buf_cstr(&t->prompt.text), dm_buf_cstr(&k->calls),
                 dm_buf_cstr(&t->calls), dm_buf_cstr(&k->log));
    assert_string_equal(dm_buf_cstr(&k->reasoning), "why");
    assert_string_equal(dm_buf_cstr(&k->content), "Text <b>.");
    kit_free(k);
}

static void what_is_rendered_comes_back_from_text(void **state)
{
    (void)state;
    turn t = {0};
    int n = rounds(4000) / 4;
    dm_parser_opts o = {.thinking = true, .markers_in_text = true, .tools = kit_tools, .ntools = DM_COUNT(kit_tools)};
    for (int i = 0; i < n; i++) {
        kit k;
        turn_make(&t, false);
        feed_random(&k, &o, &t.prompt.text, false);
        turn_compare(&t, &k, "text");
    }
    turn_free(&t);
}

static void what_is_rendered_comes_back_from_tokens_even_with_closers_in_it(void **state)
{
    (void)state;
    dm_tok *tok;
    dm_err e = {0};
    turn t = {0};
    int n = rounds(4000) / 4;
    assert_ok_e(dm_tok_open(&tok, DM_SOURCE_DIR "/examples/models/tiny", &e), e);
    dm_parser_opts o = {.thinking = true, .tools = kit_tools, .ntools = DM_COUNT(kit_tools)};
    for (int i = 0; i < n; i++) {
        kit k;
        dm_ids ids = {0};
        turn_make(&t, true);
        assert_ok_e(dm_prompt_encode(tok, &t.prompt, &ids, &e), e);
        dm_parser *p = kit_start(&k, &o);
        for (size_t j = 0; j < ids.n; j++) {
            size_t len;
            const char *s = dm_tok_bytes(tok, ids.p[j], &len);
            assert_ok(dm_parser_feed(p, s, len, dm_tok_is_special(tok, ids.p[j])));
        }
        kit_end(&k, p, false);
        turn_compare(&t, &k, "tokens");
        dm_ids_free(&ids);
    }
    turn_free(&t);
    dm_tok_close(tok);
}

/* ---- work ---- */

/* Calls to the allocator are a fair measure of copying; bytes looked at are not countable from here, so the texts
 * are long enough that anything quadratic would run into the test's time limit. */
static void long_output_is_linear_work(void **state)
{
    (void)state;
    static const char *const fills[] = {"<", "\n", "a", "<｜DSML｜invoke name=\"", "</" DSML "paramter>", TC, "<｜", "{\"", PS("x"), "é"};
    dm_parser_opts o = {.markers_in_text = true, .tools = kit_tools, .ntools = DM_COUNT(kit_tools), .call_bytes_max = 1 << 24};
    static const char *const openings[] = {"", TC "\n" INV("bash") "\n" PS("command"), TC "\n" INV("read") "\n" PJ("limit"), TC "\n" INV("bash") "\n"};
    for (size_t i = 0; i < DM_COUNT(fills) * DM_COUNT(openings); i++) {
        const char *fill = fills[i % DM_COUNT(fills)], *open = openings[i / DM_COUNT(fills)];
        kit k;
        for (int thinking = 0; thinking < 2; thinking++) {
            o.thinking = thinking;
            dm_parser *p = kit_start(&k, &o);
            assert_ok(dm_parser_feed(p, open, strlen(open), false));
            for (size_t n = 0; n < 300000; n += strlen(fill)) assert_ok(dm_parser_feed(p, fill, strlen(fill), false));
            kit_end(&k, p, false);
            assert_false(k.broken);
            kit_free(&k);
        }
    }
}

/* ---- running out of memory ---- */

static void running_out_of_memory_is_told_at_every_allocation(void **state)
{
    (void)state;
    static const char *const inputs[] = {
        "R</think>text\n\n" TC "\n" INV("read") "\n" PS("path") "a" P_ "\n" PJ("limit") "5" P_ "\n" INV_ "\n" INV("nosuch") "\n" INV_ "\n" TC_,
        "Let me see.\n\n" C1 EOS,
        "talk " C1 " more</think>" TC "\n" INV("bash") "\n{\"arguments\": {\"command\": \"x\"}}\n" INV_ "\n" TC_,
        "</think>" TC "\n" INV("edit") "\n<" DSML "parameter name=\"edits\">\n" PS("old") "a" P_ "\n" INV_ "\n" TC_,
        "</think>" INV("bash") "\n" PS("arguments") "ls" P_ "\n" INV_ EOS,
    };
    for (size_t i = 0; i < DM_COUNT(inputs); i++) {
        int rc = DM_ENOMEM;
        for (int64_t n = 1; rc == DM_ENOMEM; n++) {
            assert_in_range(n, 1, 2000);
            dm_parser *p = NULL;
            dm_parser_opts o = {.thinking = true, .markers_in_text = true, .tools = kit_tools, .ntools = DM_COUNT(kit_tools)};
            dm_fault_alloc_after(n);
            rc = dm_parser_create(&p, &o, NULL, NULL, NULL);
            if (rc == 0) rc = dm_parser_feed(p, inputs[i], strlen(inputs[i]), false);
            if (rc == 0) rc = dm_parser_finish(p, false);
            dm_fault_alloc_after(-1);
            if (p && rc < 0) assert_err(DM_ENOMEM, dm_parser_finish(p, false)); /* for good */
            dm_parser_destroy(p);
        }
        assert_ok(rc);
    }
}

static int setup(void **state)
{
    (void)state;
    rng = test_seed();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup(whole_is_bytes_is_any_cut, setup),
        cmocka_unit_test_setup(without_tools_all_is_text, setup),
        cmocka_unit_test_setup(what_is_rendered_comes_back_from_text, setup),
        cmocka_unit_test_setup(what_is_rendered_comes_back_from_tokens_even_with_closers_in_it, setup),
        cmocka_unit_test_setup(long_output_is_linear_work, setup),
        cmocka_unit_test_setup(running_out_of_memory_is_told_at_every_allocation, setup),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
