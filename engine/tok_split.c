/* The three splits, applied one after another; every match and everything between matches is a piece, and each
 * split sees its piece as a whole text.  The patterns are the file's, with \p{…}, \s and \S spelt out as ranges of
 * Unicode 16.0 (see unicode_int.h). */
#include <string.h>

#include "engine/tok_int.h"
#include "engine/unicode_int.h"

static const char *const patterns[TOK_SPLITS] = {
    "\\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+",
};

const char *tok_split_pattern(int i) { return patterns[i]; }

/* What our patterns are made of: @N, @L (letters and marks), @P (punctuation and symbols), @S (spaces) stand for
 * ranges inside a bracket.  In the second alternative of the third split marks may join the class that the first
 * character must not be in: a mark there begins the run itself, and the match is the same. */
static const char *const recipes[TOK_SPLITS] = {
    "[@N]{1,3}",
    "[\\x{4e00}-\\x{9fa5}\\x{3040}-\\x{309f}\\x{30a0}-\\x{30ff}]+",
    "[!\"#$%&'()*+,\\-./:;<=>?\\@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\\r\\n@L@P]?[@L]+"
    "| ?[@P]+[\\r\\n]*|[@S]*[\\r\\n]+|[@S]+(?![^@S])|[@S]+",
};

static int append_set(dm_buf *out, const unicode_set *set)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < set->count; i++)
        rc = dm_buf_printf(out, "\\x{%x}-\\x{%x}", (unsigned)set->ranges[i].first, (unsigned)set->ranges[i].last);
    return rc;
}

static int expand(dm_buf *out, const char *recipe)
{
    for (const char *p = recipe; *p; p++) {
        int rc;
        if (p[0] == '\\' && p[1] == '@') rc = dm_buf_byte(out, (uint8_t)*++p);
        else if (p[0] == '@') {
            p++;
            rc = append_set(out, *p == 'N' ? &unicode_number : *p == 'L' ? &unicode_letter_mark
                                : *p == 'P' ? &unicode_punct_symbol : &unicode_space);
        } else rc = dm_buf_byte(out, (uint8_t)*p);
        if (rc < 0) return rc;
    }
    return 0;
}

/* PCRE2 allocates through us, so that running out of memory can be tested. */
static void *pcre_malloc(size_t n, void *ctx) { return (void)ctx, dm_malloc(n); }
static void pcre_free(void *p, void *ctx) { (void)ctx, dm_free(p); }

static int compile_one(pcre2_compile_context *c, const char *recipe, pcre2_code **out, dm_err *e)
{
    dm_buf pattern = {0};
    int rc = expand(&pattern, recipe);
    if (rc < 0) {
        dm_buf_free(&pattern);
        return dm_err_set(e, rc, "tokenizer", "out of memory");
    }
    int code;
    PCRE2_SIZE at;
    *out = pcre2_compile(pattern.p, pattern.n, PCRE2_UTF | PCRE2_NO_UTF_CHECK, &code, &at, c);
    dm_buf_free(&pattern);
    if (!*out && code == PCRE2_ERROR_HEAP_FAILED) return dm_err_set(e, DM_ENOMEM, "tokenizer", "out of memory");
    if (!*out) return dm_err_set(e, DM_ENOTSUP, "tokenizer", "PCRE2 refuses a split pattern at %zu (error %d)", (size_t)at, code);
    pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE); /* where there is no JIT the interpreter does it */
    return 0;
}

int tok_split_compile(dm_tok *t, dm_err *e)
{
    int rc = 0;
    pcre2_general_context *g = pcre2_general_context_create(pcre_malloc, pcre_free, NULL);
    pcre2_compile_context *c = g ? pcre2_compile_context_create(g) : NULL;
    if (!c) rc = dm_err_set(e, DM_ENOMEM, "tokenizer", "out of memory");
    for (int i = 0; rc == 0 && i < TOK_SPLITS; i++) rc = compile_one(c, recipes[i], &t->split[i], e);
    pcre2_compile_context_free(c);
    pcre2_general_context_free(g);
    return rc;
}

/* ---- running ---- */

/* A stack for patterns that outgrow the 32 KB that JIT code has by itself. */
static int grow_jit_stack(tok_work *w)
{
    w->stack = pcre2_jit_stack_create(64 * 1024, (size_t)64 << 20, NULL);
    w->context = w->stack ? pcre2_match_context_create(NULL) : NULL;
    if (!w->context) return dm_err_set(w->err, DM_ENOMEM, "tokenizer", "out of memory");
    pcre2_jit_stack_assign(w->context, NULL, w->stack);
    return 0;
}

static int match_failed(tok_work *w, int code)
{
    PCRE2_UCHAR why[128];
    if (code == PCRE2_ERROR_NOMEMORY) return dm_err_set(w->err, DM_ENOMEM, "tokenizer", "out of memory");
    pcre2_get_error_message(code, why, sizeof why);
    return dm_err_set(w->err, DM_ELIMIT, "tokenizer",
                      "the text cannot be split (PCRE2: %s); a run of many million spaces does this", (const char *)why);
}

/* Next match at or behind `at`: 1 with its place, 0 if there is none. */
static int next_match(tok_work *w, int level, const uint8_t *p, size_t n, size_t at, size_t *from, size_t *to)
{
    const pcre2_code *code = w->t->split[level];
    if (!w->match && !(w->match = pcre2_match_data_create_from_pattern(code, NULL)))
        return dm_err_set(w->err, DM_ENOMEM, "tokenizer", "out of memory");
    int rc = pcre2_match(code, p, n, at, PCRE2_NO_UTF_CHECK, w->match, w->context);
    if (rc == PCRE2_ERROR_JIT_STACKLIMIT && !w->context) {
        if ((rc = grow_jit_stack(w)) < 0) return rc;
        rc = pcre2_match(code, p, n, at, PCRE2_NO_UTF_CHECK, w->match, w->context);
    }
    if (rc == PCRE2_ERROR_NOMATCH) return 0;
    if (rc < 0) return match_failed(w, rc);
    const PCRE2_SIZE *v = pcre2_get_ovector_pointer(w->match);
    *from = v[0], *to = v[1];
    return 1;
}

static int split(tok_work *w, int level, const uint8_t *p, size_t n)
{
    if (level == TOK_SPLITS) return tok_bpe_piece(w, p, n);
    size_t at = 0, from = 0, to = 0;
    while (at < n) {
        int rc = next_match(w, level, p, n, at, &from, &to);
        if (rc < 0) return rc;
        if (rc == 0) return split(w, level + 1, p + at, n - at);
        if (from > at && (rc = split(w, level + 1, p + at, from - at)) < 0) return rc;
        if ((rc = split(w, level + 1, p + from, to - from)) < 0) return rc;
        at = to;
    }
    return 0;
}

int tok_split_run(tok_work *w, const uint8_t *p, size_t n) { return split(w, 0, p, n); }

void tok_work_free(tok_work *w)
{
    pcre2_match_data_free(w->match);
    pcre2_match_context_free(w->context);
    pcre2_jit_stack_free(w->stack);
    dm_free(w->nodes);
    dm_free(w->heap);
}
