/* tokenizer.json, and the text that goes through what was loaded: ids are in range, and decoding gives the text back.
 *
 * Parts of an input: the file; the text to encode.  In the file
 *   \x01  256 pairs for the bytes, ids 0 … 255     \x02  the pre_tokenizer that is expected
 *   \x03  the pattern of the first split           \x04  all of the model's kind up to its vocabulary */
#include <stdio.h>

#include "engine/pyjson_int.h"
#include "engine/tok_int.h"
#include "tests/fuzz/lib.h"

static dm_buf macros[5]; /* kept for good */
static dm_tok splits;    /* the compiled patterns, which cost more than all the rest */

static void put_pattern(dm_buf *out, int i) { FUZZ_OK(pj_write_str(tok_split_pattern(i), strlen(tok_split_pattern(i)), out)); }

static void put_bytes_of_the_alphabet(dm_buf *out)
{
    uint32_t next = 0x100;
    for (uint32_t b = 0; b < 256; b++) {
        bool self = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        dm_buf c = {0};
        FUZZ_OK(dm_utf8_put(&c, self ? b : next++));
        if (b) FUZZ_OK(dm_buf_byte(out, ','));
        FUZZ_OK(pj_write_str(dm_buf_cstr(&c), c.n, out));
        FUZZ_OK(dm_buf_printf(out, ":%u", b));
        dm_buf_free(&c);
    }
}

static void put_pre_tokenizer(dm_buf *out)
{
    FUZZ_OK(dm_buf_str(out, "{\"type\":\"Sequence\",\"pretokenizers\":["));
    for (int i = 0; i < TOK_SPLITS; i++) {
        FUZZ_OK(dm_buf_str(out, "{\"type\":\"Split\",\"behavior\":\"Isolated\",\"invert\":false,\"pattern\":{\"Regex\":"));
        put_pattern(out, i);
        FUZZ_OK(dm_buf_str(out, "}},"));
    }
    FUZZ_OK(dm_buf_str(out, "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"trim_offsets\":true,\"use_regex\":false}]}"));
}

static void prepare(void)
{
    dm_err e = {0};
    put_bytes_of_the_alphabet(&macros[1]);
    put_pre_tokenizer(&macros[2]);
    put_pattern(&macros[3], 0);
    FUZZ_OK(dm_buf_printf(&macros[4], "\"pre_tokenizer\":%s,\"model\":{\"type\":\"BPE\",\"vocab\":{%s", dm_buf_cstr(&macros[2]), dm_buf_cstr(&macros[1])));
    FUZZ_OK(tok_split_compile(&splits, &e));
}

static void expand(dm_buf *out, fuzz_bytes in)
{
    while (in.n) {
        uint8_t c = fuzz_byte(&in);
        if (c && c < DM_COUNT(macros)) FUZZ_OK(dm_buf_append(out, macros[c].p, macros[c].n));
        else FUZZ_OK(dm_buf_byte(out, c));
    }
}

static void check_round_trip(const dm_tok *t, fuzz_bytes text, bool special)
{
    dm_err e = {0};
    dm_ids ids = {0};
    dm_buf clean = {0}, back = {0};
    FUZZ_OK(dm_tok_encode(t, (const char *)text.p, text.n, special, &ids, &e));
    for (size_t i = 0; i < ids.n; i++) {
        FUZZ_CHECK(ids.p[i] >= 0 && ids.p[i] < dm_tok_vocab(t));
        FUZZ_CHECK(special || !dm_tok_is_special(t, ids.p[i]));
    }
    FUZZ_OK(dm_tok_decode(t, ids.p, ids.n, &back));
    FUZZ_CHECK(dm_utf8_clean(&clean, text.p, text.n) >= 0);
    if (clean.n != back.n || (clean.n && memcmp(clean.p, back.p, clean.n) != 0)) FUZZ_FAIL("'%s' came back as '%s'", dm_buf_cstr(&clean), dm_buf_cstr(&back));
    dm_ids_free(&ids);
    dm_buf_free(&clean);
    dm_buf_free(&back);
}

static void check_tokens(const dm_tok *t)
{
    FUZZ_CHECK(dm_tok_vocab(t) >= 256 && dm_tok_vocab(t) <= TOK_IDS_MAX);
    for (int id = -1; id <= dm_tok_vocab(t); id++) {
        size_t n;
        char text[TOK_TOKEN_BYTES_MAX + 1];
        const char *p = dm_tok_bytes(t, id, &n);
        FUZZ_CHECK(p && n <= TOK_TOKEN_BYTES_MAX && (id >= 0 || n == 0));
        if (!dm_tok_is_special(t, id) || memchr(p, 0, n)) continue;
        memcpy(text, p, n);
        text[n] = 0;
        FUZZ_CHECK(dm_tok_special(t, text) == id);
    }
}

int FUZZ_ENTRY(const uint8_t *data, size_t n)
{
    fuzz_bytes in = {data, n}, file = fuzz_part(&in), text = fuzz_part(&in);
    dm_buf json = {0};
    dm_tok *t = dm_calloc(1, sizeof *t);
    dm_err e = {0};
    FUZZ_CHECK(t != NULL);
    if (!splits.split[0]) prepare();
    expand(&json, file);
    int rc = tok_load(t, fuzz_file(0, json.p, json.n, 0), &e);
    if (rc < 0) {
        fuzz_told(rc, &e);
    } else {
        memcpy(t->split, splits.split, sizeof t->split);
        check_tokens(t);
        check_round_trip(t, text, false);
        check_round_trip(t, text, true);
    }
    memset(t->split, 0, sizeof t->split); /* ours */
    dm_tok_close(t);
    dm_buf_free(&json);
    return 0;
}
