/* The tokenizer on the embedded model's file: merges against a simple implementation of the test's own, hostile
 * files, odd texts, many threads, failing allocations.  Published ids: conformance/test_engine_text_vectors.c. */
#include <jansson.h>
#include <pthread.h>

#include "engine/engine.h"
#include "testlib.h"

static dm_tok *tok;

static int open_tokenizer(void **state)
{
    (void)state;
    dm_err e = {0};
    if (dm_tok_open(&tok, DM_SOURCE_DIR "/examples/models/tiny", &e) < 0) fail_msg("%s", e.text);
    return 0;
}

static int close_tokenizer(void **state)
{
    (void)state;
    dm_tok_close(tok);
    dm_tok_close(NULL);
    return 0;
}

static void encode(const void *text, size_t n, bool special, dm_ids *out)
{
    dm_err e = {0};
    memset(out, 0, sizeof *out);
    assert_ok_e(dm_tok_encode(tok, text, n, special, out, &e), e);
}

/* ---- against a simple implementation ---- */

typedef struct simple { json_t *root, *merges; } simple;

/* Joins the pair of the lowest rank, the leftmost of equal ones, until none is left: over texts, quadratic. */
static size_t simple_bpe(const simple *s, const char *word, char parts[][520])
{
    size_t n = strlen(word);
    for (size_t i = 0; i < n; i++) parts[i][0] = word[i], parts[i][1] = 0;
    for (;;) {
        size_t best = 0;
        json_int_t rank = -1;
        for (size_t i = 0; i + 1 < n; i++) {
            char key[1100];
            snprintf(key, sizeof key, "%.519s %.519s", parts[i], parts[i + 1]);
            json_t *r = json_object_get(s->merges, key);
            if (r && (rank < 0 || json_integer_value(r) < rank)) rank = json_integer_value(r), best = i;
        }
        if (rank < 0) return n;
        size_t left = strlen(parts[best]);
        memmove(parts[best] + left, parts[best + 1], strlen(parts[best + 1]) + 1);
        memmove(parts + best + 1, parts + best + 2, (n - best - 2) * sizeof *parts);
        n--;
    }
}

static void simple_open(simple *s)
{
    json_error_t err;
    s->root = json_load_file(DM_SOURCE_DIR "/examples/models/tiny/tokenizer.json", 0, &err);
    if (!s->root) fail_msg("%s", err.text);
    json_t *list = json_object_get(json_object_get(s->root, "model"), "merges");
    s->merges = json_object();
    for (size_t i = 0; i < json_array_size(list); i++)
        json_object_set_new(s->merges, json_string_value(json_array_get(list, i)), json_integer((json_int_t)i));
}

static void merges_equal_those_of_a_simple_implementation(void **state)
{
    (void)state;
    static char parts[512][520];
    simple s;
    simple_open(&s);
    uint64_t rng = test_seed();
    for (int i = 0; i < (test_full() ? 20000 : 400); i++) {
        /* letters only: one piece; short ones, and long ones that use the heap */
        size_t n = 1 + dm_splitmix64(&rng) % (i % 10 ? 40 : 500);
        char word[512];
        for (size_t k = 0; k < n; k++) word[k] = "etaoinshrdluabcf"[dm_splitmix64(&rng) % (i % 3 ? 16 : 5)];
        word[n] = 0;
        dm_ids ids;
        encode(word, n, false, &ids);
        size_t want = simple_bpe(&s, word, parts);
        assert_int_equal(ids.n, want);
        for (size_t k = 0; k < want; k++) {
            size_t len;
            const char *bytes = dm_tok_bytes(tok, ids.p[k], &len);
            assert_int_equal(len, strlen(parts[k]));
            assert_memory_equal(bytes, parts[k], len);
        }
        dm_ids_free(&ids);
    }
    json_decref(s.merges);
    json_decref(s.root);
}

/* ---- texts ---- */

static void any_text_decodes_to_itself(void **state)
{
    (void)state;
    static const char *const scraps[] = {" ", "  ", "\n", "\r\n", "\t", "a", "word", "Über", "日本", "かな", "12", "1234567", "²", ".", "!!!", "<think>",
                                         "｜DSML｜", "😀", "e\u0301", "\u00a0", "\u200b", "\u3000", "한국", "\0", "\x01", "$x_1"};
    uint64_t rng = test_seed();
    for (int i = 0; i < (test_full() ? 200000 : 5000); i++) {
        dm_buf in = {0}, back = {0};
        for (size_t k = dm_splitmix64(&rng) % 12; k-- > 0;) {
            if (dm_splitmix64(&rng) % 6 == 0) {
                uint32_t cp = (uint32_t)(dm_splitmix64(&rng) % 0x110000);
                if (cp < 0xD800 || cp > 0xDFFF) assert_ok(dm_utf8_put(&in, cp));
            } else {
                const char *s = scraps[dm_splitmix64(&rng) % DM_COUNT(scraps)];
                assert_ok(dm_buf_append(&in, s, *s ? strlen(s) : 1));
            }
        }
        for (int special = 0; special < 2; special++) {
            dm_ids ids;
            dm_buf_clear(&back);
            encode(dm_buf_cstr(&in), in.n, special, &ids);
            assert_ok(dm_tok_decode(tok, ids.p, ids.n, &back));
            assert_int_equal(back.n, in.n);
            if (in.n) assert_memory_equal(back.p, in.p, in.n);
            for (size_t k = 0; !special && k < ids.n; k++) assert_false(dm_tok_is_special(tok, ids.p[k]));
            dm_ids_free(&ids);
        }
        dm_buf_free(&in);
        dm_buf_free(&back);
    }
}

static void invalid_utf8_is_encoded_as_replacement_characters(void **state)
{
    (void)state;
    dm_ids a, b;
    encode("a\xff" "b\xed\xa0\x80\xc3", 7, false, &a);
    dm_buf clean = {0};
    assert_true(dm_utf8_clean(&clean, "a\xff" "b\xed\xa0\x80\xc3", 7) > 0);
    encode(clean.p, clean.n, false, &b);
    assert_int_equal(a.n, b.n);
    assert_memory_equal(a.p, b.p, a.n * sizeof *a.p);
    dm_ids_free(&a);
    dm_ids_free(&b);
    dm_buf_free(&clean);
}

static void added_tokens_are_recognised_only_when_asked_for(void **state)
{
    (void)state;
    const char *text = "<｜User｜>hi<think><think>｜DSML｜<｜User";
    dm_ids ids;
    int special = 0;
    encode(text, strlen(text), true, &ids);
    for (size_t i = 0; i < ids.n; i++) special += dm_tok_is_special(tok, ids.p[i]);
    assert_int_equal(special, 4);
    assert_int_equal(ids.p[0], dm_tok_special(tok, "<｜User｜>"));
    dm_ids_free(&ids);
    encode(text, strlen(text), false, &ids);
    for (size_t i = 0; i < ids.n; i++) assert_false(dm_tok_is_special(tok, ids.p[i]));
    dm_ids_free(&ids);
}

static void ids_are_appended_and_taken_back_on_failure(void **state)
{
    (void)state;
    dm_ids ids = {0};
    assert_ok(dm_ids_push(&ids, 7));
    assert_ok(dm_tok_encode(tok, "x", 1, false, &ids, NULL));
    assert_int_equal(ids.n, 2);
    assert_int_equal(ids.p[0], 7);
    assert_ok(dm_tok_encode(tok, "", 0, false, &ids, NULL));
    assert_int_equal(ids.n, 2);
    dm_fault_alloc_after(1);
    assert_err(DM_ENOMEM, dm_tok_encode(tok, "some words", 10, false, &ids, NULL));
    dm_fault_alloc_after(-1);
    assert_int_equal(ids.n, 2);
    dm_ids_free(&ids);
}

static void unknown_ids_have_no_bytes(void **state)
{
    (void)state;
    size_t n = 9;
    static const int32_t bad[] = {-1, INT32_MIN, INT32_MAX, 2048};
    dm_buf out = {0};
    assert_int_equal(dm_tok_vocab(tok), 2048);
    for (size_t i = 0; i < DM_COUNT(bad); i++) {
        assert_non_null(dm_tok_bytes(tok, bad[i], &n));
        assert_int_equal(n, 0);
        assert_false(dm_tok_is_special(tok, bad[i]));
    }
    assert_ok(dm_tok_decode(tok, bad, DM_COUNT(bad), &out));
    assert_int_equal(out.n, 0);
    dm_buf_free(&out);
}

/* One long piece (letters), and a run of spaces: neither may cost its square. */
static void a_long_piece_is_encoded(void **state)
{
    (void)state;
    enum { N = 2000000 };
    char *text = malloc(N + 1);
    dm_ids ids;
    dm_buf back = {0};
    memset(text, 'a', N);
    encode(text, N, false, &ids);
    assert_ok(dm_tok_decode(tok, ids.p, ids.n, &back));
    assert_int_equal(back.n, N);
    dm_ids_free(&ids);
    memset(text, ' ', N);
    text[N] = 'x';
    encode(text, N + 1, false, &ids);
    dm_buf_clear(&back);
    assert_ok(dm_tok_decode(tok, ids.p, ids.n, &back));
    assert_int_equal(back.n, N + 1);
    dm_ids_free(&ids);
    dm_buf_free(&back);
    free(text);
}

static void a_text_that_cannot_be_split_is_an_error_and_not_other_ids(void **state)
{
    (void)state;
    enum { N = 24000000 };
    char *text = malloc(N);
    dm_ids ids = {0};
    dm_err e = {0};
    memset(text, ' ', N);
    text[N - 1] = 'x';
    assert_err(DM_ELIMIT, dm_tok_encode(tok, text, N, false, &ids, &e));
    assert_non_null(strstr(e.text, "PCRE2"));
    assert_int_equal(ids.n, 0);
    assert_ok(dm_tok_encode(tok, "x", 1, false, &ids, &e));
    dm_ids_free(&ids);
    free(text);
}

/* ---- threads ---- */

static void *encode_many(void *arg)
{
    dm_ids *ids = arg;
    const char *text = "One tokenizer, many threads: 日本語 12345\n\n    return x;\n";
    for (int i = 0; i < 200; i++) {
        ids->n = 0;
        if (dm_tok_encode(tok, text, strlen(text), i % 2, ids, NULL) < 0) return ids;
    }
    return NULL;
}

static void many_threads_share_a_tokenizer(void **state)
{
    (void)state;
    pthread_t t[4];
    dm_ids ids[4] = {0};
    for (int i = 0; i < 4; i++) assert_int_equal(pthread_create(&t[i], NULL, encode_many, &ids[i]), 0);
    for (int i = 0; i < 4; i++) {
        void *failed;
        pthread_join(t[i], &failed);
        assert_null(failed);
        assert_int_equal(ids[i].n, ids[0].n);
        assert_memory_equal(ids[i].p, ids[0].p, ids[0].n * sizeof(int32_t));
    }
    for (int i = 0; i < 4; i++) dm_ids_free(&ids[i]);
}

/* ---- files ---- */

#define SPLITS \
    "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\p{N}{1,3}\"},\"behavior\":\"Isolated\",\"invert\":false}," \
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[一-龥぀-ゟ゠-ヿ]+\"},\"behavior\":\"Isolated\",\"invert\":false}," \
    "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[!\\\"#$%&'()*+,\\\\-./:;<=>?@\\\\[\\\\\\\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\\\p{L}\\\\p{P}\\\\p{S}]?[\\\\p{L}\\\\p{M}]+" \
    "| ?[\\\\p{P}\\\\p{S}]+[\\r\\n]*|\\\\s*[\\r\\n]+|\\\\s+(?!\\\\S)|\\\\s+\"},\"behavior\":\"Isolated\",\"invert\":false}," \
    "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":false}]}"

/* A small tokenizer file; each field can be given another text, and "" leaves it out. */
typedef struct tokfile {
    const char *added, *vocab, *merges, *model, *splits, *normalizer;
    int without_byte; /* 0: all bytes are there */
} tokfile;

static void put_byte_tokens(dm_buf *b, int without)
{
    int next = 0x100;
    for (int i = 0; i < 256; i++) {
        bool self = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174;
        int cp = self ? i : next++;
        if (i == without && without) continue;
        assert_ok(dm_buf_printf(b, "%s\"", i ? "," : ""));
        if (cp == '"' || cp == '\\') assert_ok(dm_buf_byte(b, '\\'));
        assert_ok(dm_utf8_put(b, (uint32_t)cp));
        assert_ok(dm_buf_printf(b, "\":%d", 10 + i));
    }
}

static const char *tokfile_write(const tokfile *f)
{
    static char path[600];
    dm_buf b = {0};
    dm_err e = {0};
    assert_ok(dm_buf_printf(&b, "{\"added_tokens\":%s,\"normalizer\":%s,\"pre_tokenizer\":%s,\"model\":{%s\"vocab\":{",
                            f->added ? f->added : "[{\"id\":0,\"content\":\"<s>\"}]", f->normalizer ? f->normalizer : "null",
                            f->splits ? f->splits : SPLITS, f->model ? f->model : "\"type\":\"BPE\","));
    put_byte_tokens(&b, f->without_byte);
    assert_ok(dm_buf_printf(&b, "%s},\"merges\":%s}}", f->vocab ? f->vocab : ",\"ab\":300,\"abc\":301", f->merges ? f->merges : "[\"a b\",[\"ab\",\"c\"]]"));
    snprintf(path, sizeof path, "%s/tokenizer.json", test_dir());
    assert_ok_e(dm_file_write_atomic(path, b.p, b.n, 0600, &e), e);
    dm_buf_free(&b);
    return path;
}

static void a_small_file_is_a_tokenizer(void **state)
{
    (void)state;
    dm_tok *t;
    dm_err e = {0};
    dm_ids ids = {0};
    dm_hash a, b;
    tokfile_write(&(tokfile){0});
    assert_ok_e(dm_tok_open(&t, test_dir(), &e), e); /* by its folder */
    assert_int_equal(dm_tok_vocab(t), 302);
    assert_ok_e(dm_tok_encode(t, "abcab<s>", 8, true, &ids, &e), e);
    assert_int_equal(ids.n, 3);
    assert_int_equal(ids.p[0], 301);
    assert_int_equal(ids.p[1], 300);
    assert_int_equal(ids.p[2], 0);
    dm_tok_hash(t, &a);
    dm_tok_close(t);
    assert_ok_e(dm_tok_open(&t, tokfile_write(&(tokfile){.merges = "[\"a b\"]"}), &e), e);
    dm_tok_hash(t, &b);
    assert_false(dm_hash_equal(&a, &b));
    dm_tok_close(t);
    dm_ids_free(&ids);
}

/* Overlapping added tokens: the leftmost, and of those the longest. */
static void the_longest_added_token_wins(void **state)
{
    (void)state;
    dm_tok *t;
    dm_err e = {0};
    dm_ids ids = {0};
    assert_ok_e(dm_tok_open(&t, tokfile_write(&(tokfile){.added = "[{\"id\":0,\"content\":\"<a\"},{\"id\":1,\"content\":\"<a>b\"},{\"id\":2,\"content\":\"a>\"}]"}), &e), e);
    assert_ok_e(dm_tok_encode(t, "<a>b<a>", 7, true, &ids, &e), e);
    static const int32_t want[] = {1, 0, 10 + '>'};
    assert_int_equal(ids.n, DM_COUNT(want));
    assert_memory_equal(ids.p, want, sizeof want);
    dm_ids_free(&ids);
    dm_tok_close(t);
}

static void hostile_files_are_refused_in_words(void **state)
{
    (void)state;
    static const struct { tokfile f; int code; const char *says; } bad[] = {
        {{.vocab = ",\"ab\":300,\"abc\":300"}, DM_EFORMAT, "id 300 is given to two tokens"},
        {{.vocab = ",\"ab\":0,\"abc\":301"}, DM_EFORMAT, "id 0 is given to two tokens"},
        {{.without_byte = 'z'}, DM_EFORMAT, "0x7A"},
        {{.vocab = ",\"ab\":-1"}, DM_EFORMAT, "id"},
        {{.vocab = ",\"ab\":1.5"}, DM_EFORMAT, "a number"},
        {{.vocab = ",\"ab\":\"7\""}, DM_EFORMAT, "a string"},
        {{.vocab = ",\"ab\":1048576"}, DM_EFORMAT, "ids go from 0"},
        {{.vocab = ",\"ab\":99999999999999999999"}, DM_EFORMAT, "small integer"},
        {{.vocab = ",\"\":300"}, DM_EFORMAT, "token 300 is empty"},
        {{.vocab = ",\"日\":300"}, DM_EFORMAT, "alphabet"},
        {{.vocab = ",\"ab\":300"}, DM_EFORMAT, "merge 1 gives a token"},
        {{.merges = "[\"a b\",\"a b\"]"}, DM_EFORMAT, "merge 1 repeats merge 0"},
        {{.merges = "[\"ab\"]"}, DM_EFORMAT, "merge 0"},
        {{.merges = "[\"a xx\"]"}, DM_EFORMAT, "not in the vocabulary"},
        {{.merges = "[\" b\"]"}, DM_EFORMAT, "not in the vocabulary"},
        {{.merges = "[7]"}, DM_EFORMAT, "merge 0"},
        {{.merges = "[[\"a\"]]"}, DM_EFORMAT, "merge 0"},
        {{.merges = "{}"}, DM_EFORMAT, "model.merges is an object"},
        {{.added = "{}"}, DM_EFORMAT, "added_tokens is an object"},
        {{.added = "[5]"}, DM_EFORMAT, "added token"},
        {{.added = "[{\"id\":0,\"content\":\"\"}]"}, DM_EFORMAT, "added token 0"},
        {{.added = "[{\"id\":0,\"content\":5}]"}, DM_EFORMAT, "added token 0"},
        {{.added = "[{\"id\":0,\"content\":\"x\"},{\"id\":1,\"content\":\"x\"}]"}, DM_EFORMAT, "text of another"},
        {{.added = "[{\"id\":0,\"content\":\"x\"},{\"id\":0,\"content\":\"y\"}]"}, DM_EFORMAT, "two tokens"},
        {{.added = "[{\"id\":0,\"content\":\"x\",\"lstrip\":true}]"}, DM_ENOTSUP, "lstrip"},
        {{.normalizer = "{\"type\":\"NFC\"}"}, DM_ENOTSUP, "normalizer"},
        {{.splits = "null"}, DM_ENOTSUP, "pre_tokenizer"},
        {{.splits = "{\"type\":\"ByteLevel\"}"}, DM_ENOTSUP, "pre_tokenizer"},
        {{.model = "\"type\":\"Unigram\","}, DM_ENOTSUP, "BPE"},
        {{.model = "\"byte_fallback\":true,"}, DM_ENOTSUP, "byte_fallback"},
        {{.model = "\"ignore_merges\":true,"}, DM_ENOTSUP, "ignore_merges"},
        {{.model = "\"dropout\":0.1,"}, DM_ENOTSUP, "dropout"},
        {{.model = "5:"}, DM_EFORMAT, "key"},
    };
    for (size_t i = 0; i < DM_COUNT(bad); i++) {
        dm_tok *t = (dm_tok *)1;
        dm_err e = {0};
        int rc = dm_tok_open(&t, tokfile_write(&bad[i].f), &e);
        if (rc != bad[i].code || !strstr(e.text, bad[i].says) || !strstr(e.text, "tokenizer.json"))
            fail_msg("file %zu: %s: %s; want %s with %s", i, dm_err_name(rc), e.text, dm_err_name(bad[i].code), bad[i].says);
        assert_null(t);
    }
}

static void what_is_no_tokenizer_file_is_refused(void **state)
{
    (void)state;
    static const struct { const char *text; int code; } bad[] = {
        {"", DM_EFORMAT}, {"[]", DM_EFORMAT}, {"{}", DM_EFORMAT}, {"{\"model\":{}}", DM_ENOTSUP}, {"\xff", DM_EFORMAT}, {"{\"model\":{\"vocab\":{}", DM_EFORMAT},
    };
    char path[600];
    dm_tok *t;
    dm_err e = {0};
    snprintf(path, sizeof path, "%s/tokenizer.json", test_dir());
    for (size_t i = 0; i < DM_COUNT(bad); i++) {
        assert_ok_e(dm_file_write_atomic(path, bad[i].text, strlen(bad[i].text), 0600, &e), e);
        assert_err(bad[i].code, dm_tok_open(&t, path, &e));
        assert_null(t);
    }
    assert_err(DM_ENOENT, dm_tok_open(&t, "/nonexistent", &e));
    assert_non_null(strstr(e.text, "/nonexistent"));
}

/* Cut anywhere and with bytes changed anywhere: an error or a tokenizer, never more. */
static void damaged_files_do_no_harm(void **state)
{
    (void)state;
    dm_buf good = {0};
    dm_err e = {0};
    char path[600];
    uint64_t rng = test_seed();
    assert_ok_e(dm_file_read(tokfile_write(&(tokfile){0}), 1 << 20, &good, &e), e);
    snprintf(path, sizeof path, "%s/damaged.json", test_dir());
    for (int i = 0; i < (test_full() ? 20000 : 300); i++) {
        dm_buf bad = {0};
        dm_tok *t;
        size_t n = i % 3 ? good.n : dm_splitmix64(&rng) % good.n;
        assert_ok(dm_buf_append(&bad, good.p, n));
        for (int k = 0; n && i % 3 && k < 1 + i % 4; k++) bad.p[dm_splitmix64(&rng) % n] = (uint8_t)" \"{}[],:0179ab\\\xc4\x80"[dm_splitmix64(&rng) % 17];
        FILE *f = fopen(path, "wb");
        assert_non_null(f);
        assert_int_equal(fwrite(bad.p ? (void *)bad.p : "", 1, n, f), n);
        fclose(f);
        if (dm_tok_open(&t, path, &e) == 0) {
            dm_ids ids = {0};
            assert_ok(dm_tok_encode(t, "abc <s> 日", 11, true, &ids, NULL));
            dm_ids_free(&ids);
            dm_tok_close(t);
        }
        dm_buf_free(&bad);
    }
    dm_buf_free(&good);
}

/* Without memory for a JIT the patterns are interpreted, so some failures leave a tokenizer that works. */
static void failing_allocations_are_told_or_do_no_harm(void **state)
{
    (void)state;
    const char *path = tokfile_write(&(tokfile){0});
    int64_t total = dm_fault_alloc_count(), failed = 0;
    dm_tok *t;
    dm_ids ids = {0};
    const char *text = "abc one 日本語, and a piece long enough for the heap: ababababababababababababababababab";
    assert_ok(dm_tok_open(&t, path, NULL));
    assert_ok(dm_tok_encode(t, text, strlen(text), false, &ids, NULL));
    dm_tok_close(t);
    total = dm_fault_alloc_count() - total;
    for (int64_t n = 1; n <= total; n++) {
        dm_ids again = {0};
        dm_fault_alloc_after(n);
        int rc = dm_tok_open(&t, path, NULL);
        if (rc == 0) rc = dm_tok_encode(t, text, strlen(text), false, &again, NULL);
        dm_fault_alloc_after(-1);
        if (rc == 0) {
            assert_int_equal(again.n, ids.n);
            assert_memory_equal(again.p, ids.p, ids.n * sizeof *ids.p);
        } else {
            assert_err(DM_ENOMEM, rc);
            failed++;
        }
        dm_tok_close(t);
        dm_ids_free(&again);
    }
    assert_true(failed > total / 2);
    dm_ids_free(&ids);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(merges_equal_those_of_a_simple_implementation),
        cmocka_unit_test(any_text_decodes_to_itself),
        cmocka_unit_test(invalid_utf8_is_encoded_as_replacement_characters),
        cmocka_unit_test(added_tokens_are_recognised_only_when_asked_for),
        cmocka_unit_test(ids_are_appended_and_taken_back_on_failure),
        cmocka_unit_test(unknown_ids_have_no_bytes),
        cmocka_unit_test(a_long_piece_is_encoded),
        cmocka_unit_test(a_text_that_cannot_be_split_is_an_error_and_not_other_ids),
        cmocka_unit_test(many_threads_share_a_tokenizer),
        cmocka_unit_test(a_small_file_is_a_tokenizer),
        cmocka_unit_test(the_longest_added_token_wins),
        cmocka_unit_test(hostile_files_are_refused_in_words),
        cmocka_unit_test(what_is_no_tokenizer_file_is_refused),
        cmocka_unit_test(damaged_files_do_no_harm),
        cmocka_unit_test(failing_allocations_are_told_or_do_no_harm),
    };
    return cmocka_run_group_tests(tests, open_tokenizer, close_tokenizer);
}
