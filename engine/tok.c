/* The tokenizer's public functions; see tok_int.h for the way of a text to ids. */
#include <string.h>
#include <sys/stat.h>

#include "engine/tok_int.h"

int dm_tok_open(dm_tok **out, const char *dir_or_file, dm_err *e)
{
    struct stat st;
    *out = NULL;
    bool dir = stat(dir_or_file, &st) == 0 && S_ISDIR(st.st_mode);
    char *path = dir ? dm_path_join(dir_or_file, "tokenizer.json") : dm_strdup(dir_or_file);
    dm_tok *t = path ? dm_calloc(1, sizeof *t) : NULL;
    if (!t) {
        dm_free(path);
        return dm_err_set(e, DM_ENOMEM, "tokenizer", "out of memory");
    }
    int rc = tok_load(t, path, e);
    if (rc == 0) rc = tok_split_compile(t, e);
    dm_free(path);
    if (rc < 0) dm_tok_close(t);
    else *out = t;
    return rc;
}

void dm_tok_close(dm_tok *t)
{
    if (!t) return;
    for (int i = 0; i < TOK_SPLITS; i++) pcre2_code_free(t->split[i]);
    dm_free(t->entries);
    dm_free(t->merges.slots);
    dm_free(t->nodes);
    dm_buf_free(&t->bytes);
    dm_free(t);
}

int dm_tok_vocab(const dm_tok *t) { return t->vocab; }
void dm_tok_hash(const dm_tok *t, dm_hash *out) { *out = t->hash; }

bool dm_tok_is_special(const dm_tok *t, int32_t id) { return id >= 0 && id < t->vocab && t->entries[id].special; }

const char *dm_tok_bytes(const dm_tok *t, int32_t id, size_t *n)
{
    bool known = id >= 0 && id < t->vocab && t->entries[id].n;
    *n = known ? t->entries[id].n : 0;
    return known ? (const char *)t->bytes.p + t->entries[id].at : "";
}

int dm_tok_special(const dm_tok *t, const char *text)
{
    int32_t id = -1;
    size_t n = strlen(text);
    return tok_trie_match(t, (const uint8_t *)text, n, &id) == n && n ? id : DM_ENOENT;
}

int dm_tok_decode(const dm_tok *t, const int32_t *ids, size_t n, dm_buf *out)
{
    size_t before = out->n;
    for (size_t i = 0; i < n; i++) {
        size_t len;
        const char *p = dm_tok_bytes(t, ids[i], &len);
        int rc = dm_buf_append(out, p, len);
        if (rc < 0) {
            out->n = before;
            return rc;
        }
    }
    return 0;
}

/* ---- added tokens ---- */

size_t tok_trie_match(const dm_tok *t, const uint8_t *p, size_t n, int32_t *id)
{
    size_t best = 0;
    int32_t at = 0;
    for (size_t i = 0; i < n; i++) {
        int32_t c = t->nodes[at].child;
        while (c >= 0 && t->nodes[c].byte != p[i]) c = t->nodes[c].sibling;
        if (c < 0) break;
        at = c;
        if (t->nodes[c].id >= 0) best = i + 1, *id = t->nodes[c].id;
    }
    return best;
}

static int encode_run(tok_work *w, const uint8_t *p, size_t n) { return n ? tok_split_run(w, p, n) : 0; }

/* Cuts at added tokens from the left; what lies between is encoded run by run. */
static int encode_special(tok_work *w, const uint8_t *p, size_t n)
{
    size_t from = 0, i = 0;
    while (i < n) {
        int32_t id;
        size_t len = tok_trie_match(w->t, p + i, n - i, &id);
        if (!len) {
            i++;
            continue;
        }
        int rc = encode_run(w, p + from, i - from);
        if (rc < 0) return rc;
        if ((rc = dm_ids_push(w->out, id)) < 0) return dm_err_set(w->err, rc, "tokenizer", "out of memory");
        from = i += len;
    }
    return encode_run(w, p + from, n - from);
}

int dm_tok_encode(const dm_tok *t, const char *text, size_t n, bool special, dm_ids *out, dm_err *e)
{
    if (n > TOK_TEXT_BYTES_MAX)
        return dm_err_set(e, DM_ELIMIT, "tokenizer", "a text of %zu bytes is longer than %zu", n, TOK_TEXT_BYTES_MAX);
    size_t before = out->n;
    dm_buf clean = {0};
    if (!dm_utf8_valid(text, n)) {
        int64_t replaced = dm_utf8_clean(&clean, text, n);
        if (replaced < 0) {
            dm_buf_free(&clean);
            return dm_err_set(e, (int)replaced, "tokenizer", "out of memory");
        }
        dm_log(DM_LOG_DEBUG, "tokenizer: %lld invalid byte sequences became U+FFFD", (long long)replaced);
        text = dm_buf_cstr(&clean), n = clean.n;
    }
    tok_work w = {.t = t, .out = out, .err = e};
    const uint8_t *p = (const uint8_t *)text;
    int rc = special ? encode_special(&w, p, n) : encode_run(&w, p, n);
    if (rc < 0) out->n = before;
    tok_work_free(&w);
    dm_buf_free(&clean);
    return rc;
}
