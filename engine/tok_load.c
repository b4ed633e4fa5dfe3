/* tokenizer.json into tables.  The file is input from outside: every id, text and type is checked, and what this
 * tokenizer does not do (a normalizer, other splits, byte fallback, dropout, …) is refused rather than ignored,
 * because ignoring it would give other ids without a word. */
#include <stdlib.h>
#include <string.h>

#include "engine/pyjson_int.h"
#include "engine/tok_int.h"

#define WHERE "tokenizer"

/* Texts of base tokens to ids while merges are read; open addressing, at most half full. */
typedef struct text_index {
    int32_t *slots; /* id, or -1 */
    uint32_t mask;
} text_index;

typedef struct loader {
    dm_tok *t;
    const pj_val *root, *model;
    size_t entries_cap;
    text_index index;
    int16_t alphabet[0x144]; /* code point -> byte, or -1 */
    dm_err *err;
} loader;

static int no_memory(loader *l) { return dm_err_set(l->err, DM_ENOMEM, WHERE, "out of memory"); }

#define REFUSE(l, code, ...) dm_err_set((l)->err, code, WHERE, __VA_ARGS__)

/* ---- the byte alphabet: printable Latin-1 stands for itself, the other 68 bytes for U+0100 and up ---- */

static void make_alphabet(loader *l)
{
    memset(l->alphabet, -1, sizeof l->alphabet);
    int next = 0x100;
    for (int b = 0; b < 256; b++) {
        bool self = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        l->alphabet[self ? b : next++] = (int16_t)b;
    }
}

/* Token text of the file to bytes; returns their number, or -1 if a character is not in the alphabet. */
static int to_bytes(const loader *l, const char *s, size_t n, uint8_t out[TOK_TOKEN_BYTES_MAX])
{
    const uint8_t *p = (const uint8_t *)s, *end = p + n;
    int len = 0;
    while (p < end) {
        uint32_t cp;
        size_t k = dm_utf8_next(p, (size_t)(end - p), &cp);
        if (!k || cp >= DM_COUNT(l->alphabet) || l->alphabet[cp] < 0 || len == TOK_TOKEN_BYTES_MAX) return -1;
        out[len++] = (uint8_t)l->alphabet[cp];
        p += k;
    }
    return len;
}

/* ---- entries ---- */

static int read_id(loader *l, const pj_val *v, const char *what)
{
    if (!v || v->kind != PJ_INT || v->n > 9) return REFUSE(l, DM_EFORMAT, "%s has an id that is %s, not a small integer", what, pj_kind_name(v));
    long id = strtol(v->s, NULL, 10);
    if (id < 0 || id >= TOK_IDS_MAX) return REFUSE(l, DM_EFORMAT, "%s has the id %ld; ids go from 0 to %d", what, id, TOK_IDS_MAX - 1);
    return (int)id;
}

static int entry_add(loader *l, int32_t id, const void *bytes, size_t n, bool special)
{
    dm_tok *t = l->t;
    if ((size_t)id >= l->entries_cap) {
        size_t cap = l->entries_cap ? l->entries_cap : 4096;
        while (cap <= (size_t)id) cap *= 2;
        tok_entry *p = dm_realloc(t->entries, cap * sizeof *p);
        if (!p) return no_memory(l);
        memset(p + l->entries_cap, 0, (cap - l->entries_cap) * sizeof *p);
        t->entries = p, l->entries_cap = cap;
    }
    if (t->entries[id].n) return REFUSE(l, DM_EFORMAT, "id %d is given to two tokens", (int)id);
    t->entries[id] = (tok_entry){.at = (uint32_t)t->bytes.n, .n = (uint32_t)n, .special = special};
    if (dm_buf_append(&t->bytes, bytes, n) < 0) return no_memory(l);
    if (id >= t->vocab) t->vocab = id + 1;
    return 0;
}

/* ---- added tokens ---- */

static int trie_child(dm_tok *t, int32_t parent, uint8_t byte)
{
    for (int32_t c = parent < 0 ? -1 : t->nodes[parent].child; c >= 0; c = t->nodes[c].sibling)
        if (t->nodes[c].byte == byte) return c;
    if (t->nnodes == t->nodes_cap) {
        size_t cap = t->nodes_cap ? t->nodes_cap * 2 : 1024;
        if (cap > INT32_MAX) return DM_ENOMEM;
        tok_node *p = dm_realloc(t->nodes, cap * sizeof *p);
        if (!p) return DM_ENOMEM;
        t->nodes = p, t->nodes_cap = cap;
    }
    int32_t c = (int32_t)t->nnodes++;
    t->nodes[c] = (tok_node){.child = -1, .sibling = parent < 0 ? -1 : t->nodes[parent].child, .id = -1, .byte = byte};
    if (parent >= 0) t->nodes[parent].child = c;
    return c;
}

int tok_trie_add(dm_tok *t, const uint8_t *p, size_t n, int32_t id)
{
    int32_t at = 0;
    for (size_t i = 0; i < n; i++)
        if ((at = trie_child(t, at, p[i])) < 0) return at;
    if (t->nodes[at].id >= 0) return DM_EEXIST;
    t->nodes[at].id = id;
    return 0;
}

/* Flags that change where an added token matches; none of the model's tokens has one. */
static int check_flags(loader *l, const pj_val *v, int id)
{
    static const char *const flags[] = {"single_word", "lstrip", "rstrip"};
    for (size_t i = 0; i < DM_COUNT(flags); i++) {
        const pj_val *f = pj_get(v, flags[i]);
        if (f && f->kind != PJ_FALSE) return REFUSE(l, DM_ENOTSUP, "added token %d has %s set, which is not supported", id, flags[i]);
    }
    return 0;
}

static int load_added_one(loader *l, const pj_val *v)
{
    int id = read_id(l, pj_get(v, "id"), "an added token");
    if (id < 0) return id;
    const pj_val *text = pj_get(v, "content");
    if (!text || text->kind != PJ_STR || text->n == 0 || text->n > TOK_TOKEN_BYTES_MAX)
        return REFUSE(l, DM_EFORMAT, "added token %d needs a content of 1 to %d bytes", id, TOK_TOKEN_BYTES_MAX);
    int rc = check_flags(l, v, id);
    if (rc == 0) rc = entry_add(l, id, text->s, text->n, true);
    if (rc < 0) return rc;
    rc = tok_trie_add(l->t, (const uint8_t *)text->s, text->n, id);
    if (rc == DM_EEXIST) return REFUSE(l, DM_EFORMAT, "added token %d has the text of another one", id);
    return rc < 0 ? no_memory(l) : 0;
}

static int load_added(loader *l)
{
    if (trie_child(l->t, -1, 0) < 0) return no_memory(l);
    const pj_val *list = pj_get(l->root, "added_tokens");
    if (!list || list->kind == PJ_NULL) return 0;
    if (list->kind != PJ_LIST) return REFUSE(l, DM_EFORMAT, "added_tokens is %s, not a list", pj_kind_name(list));
    for (uint32_t i = 0; i < list->n; i++) {
        int rc = load_added_one(l, &list->items[i]);
        if (rc < 0) return rc;
    }
    return 0;
}

/* ---- vocabulary ---- */

static uint32_t text_hash(const void *p, size_t n)
{
    uint8_t h[16];
    uint32_t v;
    dm_xxh3_128(h, p, n);
    memcpy(&v, h, sizeof v);
    return v;
}

/* Slot of the base token with these bytes, or the free slot where it belongs. */
static int32_t *index_slot(const loader *l, const uint8_t *p, size_t n)
{
    const dm_tok *t = l->t;
    for (uint32_t i = text_hash(p, n) & l->index.mask;; i = (i + 1) & l->index.mask) {
        int32_t id = l->index.slots[i];
        if (id < 0 || (t->entries[id].n == n && memcmp(t->bytes.p + t->entries[id].at, p, n) == 0)) return &l->index.slots[i];
    }
}

static uint32_t power_above(uint32_t n)
{
    uint32_t p = 16;
    while (p < n * 2) p *= 2;
    return p;
}

static int load_vocab_one(loader *l, const pj_pair *pair)
{
    const pj_val *key = &pair->key;
    char what[64];
    snprintf(what, sizeof what, "the token '%.*s'", key->n > 32 ? 0 : (int)key->n, key->s);
    int id = read_id(l, &pair->val, what);
    if (id < 0) return id;
    const dm_tok *t = l->t;
    if (dm_tok_is_special(t, id)) { /* listed in both places: the literal text */
        const tok_entry *x = &t->entries[id];
        if (x->n == key->n && memcmp(t->bytes.p + x->at, key->s, x->n) == 0) return 0;
        return REFUSE(l, DM_EFORMAT, "id %d is given to two tokens", id);
    }
    uint8_t bytes[TOK_TOKEN_BYTES_MAX];
    int n = to_bytes(l, key->s, key->n, bytes);
    if (n <= 0) return REFUSE(l, DM_EFORMAT, "token %d is empty, longer than %d bytes or not in the byte alphabet", id, TOK_TOKEN_BYTES_MAX);
    int rc = entry_add(l, id, bytes, (size_t)n, false);
    if (rc < 0) return rc;
    *index_slot(l, bytes, (size_t)n) = id;
    if (n == 1) l->t->byte_id[bytes[0]] = id;
    return 0;
}

static int load_vocab(loader *l)
{
    const pj_val *vocab = pj_get(l->model, "vocab");
    if (!vocab || vocab->kind != PJ_DICT) return REFUSE(l, DM_EFORMAT, "model.vocab is %s, not an object", pj_kind_name(vocab));
    if (vocab->n > TOK_IDS_MAX) return REFUSE(l, DM_ELIMIT, "model.vocab has %u tokens; %d are allowed", vocab->n, TOK_IDS_MAX);
    uint32_t slots = power_above(vocab->n);
    l->index.slots = dm_malloc(slots * sizeof *l->index.slots);
    if (!l->index.slots) return no_memory(l);
    memset(l->index.slots, -1, slots * sizeof *l->index.slots);
    l->index.mask = slots - 1;
    memset(l->t->byte_id, -1, sizeof l->t->byte_id);
    for (uint32_t i = 0; i < vocab->n; i++) {
        int rc = load_vocab_one(l, &vocab->pairs[i]);
        if (rc < 0) return rc;
    }
    for (int b = 0; b < 256; b++)
        if (l->t->byte_id[b] < 0) return REFUSE(l, DM_EFORMAT, "no token stands for the byte 0x%02X", b);
    return 0;
}

/* ---- merges ---- */

/* "A B", or ["A", "B"] as newer files have it. */
static bool merge_sides(const pj_val *v, const char *side[2], size_t n[2])
{
    if (v->kind == PJ_LIST && v->n == 2 && v->items[0].kind == PJ_STR && v->items[1].kind == PJ_STR) {
        for (int i = 0; i < 2; i++) side[i] = v->items[i].s, n[i] = v->items[i].n;
        return true;
    }
    const char *space = v->kind == PJ_STR ? memchr(v->s, ' ', v->n) : NULL;
    if (!space) return false;
    side[0] = v->s, n[0] = (size_t)(space - v->s);
    side[1] = space + 1, n[1] = v->n - n[0] - 1;
    return true;
}

static int load_merge(loader *l, const pj_val *v, int32_t rank)
{
    const char *side[2];
    size_t side_n[2];
    uint8_t bytes[2 * TOK_TOKEN_BYTES_MAX];
    int32_t id[2];
    int n = 0;
    if (!merge_sides(v, side, side_n)) return REFUSE(l, DM_EFORMAT, "merge %d is not two tokens with a space between", (int)rank);
    for (int i = 0; i < 2; i++) {
        int k = to_bytes(l, side[i], side_n[i], bytes + n);
        id[i] = k > 0 ? *index_slot(l, bytes + n, (size_t)k) : -1;
        if (id[i] < 0) return REFUSE(l, DM_EFORMAT, "merge %d names a token that is not in the vocabulary", (int)rank);
        n += k;
    }
    int32_t to = *index_slot(l, bytes, (size_t)n);
    if (to < 0) return REFUSE(l, DM_EFORMAT, "merge %d gives a token that is not in the vocabulary", (int)rank);
    tok_merges *m = &l->t->merges;
    uint32_t i = tok_pair_hash(id[0], id[1]) & m->mask;
    for (; m->slots[i].left >= 0; i = (i + 1) & m->mask)
        if (m->slots[i].left == id[0] && m->slots[i].right == id[1])
            return REFUSE(l, DM_EFORMAT, "merge %d repeats merge %d", (int)rank, (int)m->slots[i].rank);
    m->slots[i] = (tok_merge){.left = id[0], .right = id[1], .rank = rank, .id = to};
    return 0;
}

static int load_merges(loader *l)
{
    const pj_val *list = pj_get(l->model, "merges");
    if (!list || list->kind != PJ_LIST) return REFUSE(l, DM_EFORMAT, "model.merges is %s, not a list", pj_kind_name(list));
    if (list->n > TOK_IDS_MAX) return REFUSE(l, DM_ELIMIT, "model.merges has %u entries; %d are allowed", list->n, TOK_IDS_MAX);
    tok_merges *m = &l->t->merges;
    uint32_t slots = power_above(list->n);
    m->slots = dm_malloc(slots * sizeof *m->slots);
    if (!m->slots) return no_memory(l);
    m->mask = slots - 1;
    for (uint32_t i = 0; i < slots; i++) m->slots[i] = (tok_merge){.left = -1};
    for (uint32_t i = 0; i < list->n; i++) {
        int rc = load_merge(l, &list->items[i], (int32_t)i);
        if (rc < 0) return rc;
    }
    return 0;
}

/* ---- what kind of tokenizer it is ---- */

static bool unset(const pj_val *v) { return !v || v->kind == PJ_NULL || v->kind == PJ_FALSE || (v->kind == PJ_STR && v->n == 0); }

static int check_model(loader *l)
{
    static const char *const off[] = {"dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix",
                                      "fuse_unk", "byte_fallback", "ignore_merges"};
    l->model = pj_get(l->root, "model");
    if (!l->model || l->model->kind != PJ_DICT) return REFUSE(l, DM_EFORMAT, "model is %s, not an object", pj_kind_name(l->model));
    const pj_val *type = pj_get(l->model, "type");
    if (type && !pj_is(type, "BPE")) return REFUSE(l, DM_ENOTSUP, "model.type is not BPE");
    for (size_t i = 0; i < DM_COUNT(off); i++)
        if (!unset(pj_get(l->model, off[i]))) return REFUSE(l, DM_ENOTSUP, "model.%s is set, which is not supported", off[i]);
    return 0;
}

static int check_normalizer(loader *l)
{
    const pj_val *v = pj_get(l->root, "normalizer");
    if (unset(v)) return 0;
    const pj_val *list = pj_get(v, "normalizers");
    if (pj_is(pj_get(v, "type"), "Sequence") && list && list->kind == PJ_LIST && list->n == 0) return 0;
    return REFUSE(l, DM_ENOTSUP, "the tokenizer has a normalizer, which is not supported");
}

/* Is the file's pattern ours?  Files spell line breaks as escapes or as themselves. */
static bool same_pattern(const pj_val *v, const char *want)
{
    if (!v || v->kind != PJ_STR) return false;
    size_t i = 0;
    for (const char *w = want; *w; w++, i++) {
        if (i == v->n) return false;
        if (v->s[i] == *w) continue;
        if (*w != '\\' || v->s[i] != (w[1] == 'r' ? '\r' : w[1] == 'n' ? '\n' : '\\')) return false;
        w++;
    }
    return i == v->n;
}

static bool is_split(const pj_val *v, int i)
{
    const pj_val *pattern = pj_get(v, "pattern"), *invert = pj_get(v, "invert");
    return pj_is(pj_get(v, "type"), "Split") && pj_is(pj_get(v, "behavior"), "Isolated") && unset(invert) && pattern &&
           same_pattern(pj_get(pattern, "Regex"), tok_split_pattern(i));
}

static int check_splits(loader *l)
{
    const pj_val *v = pj_get(l->root, "pre_tokenizer");
    const pj_val *list = v ? pj_get(v, "pretokenizers") : NULL;
    bool ok = v && pj_is(pj_get(v, "type"), "Sequence") && list && list->kind == PJ_LIST && list->n == TOK_SPLITS + 1;
    for (int i = 0; ok && i < TOK_SPLITS; i++) ok = is_split(&list->items[i], i);
    if (ok) {
        const pj_val *last = &list->items[TOK_SPLITS];
        const pj_val *regex = pj_get(last, "use_regex"), *prefix = pj_get(last, "add_prefix_space");
        ok = pj_is(pj_get(last, "type"), "ByteLevel") && regex && regex->kind == PJ_FALSE && prefix && prefix->kind == PJ_FALSE;
    }
    return ok ? 0 : REFUSE(l, DM_ENOTSUP, "pre_tokenizer is not the DeepSeek-V4 one (three splits, then bytes); this is another kind of tokenizer");
}

static int load_all(loader *l)
{
    int rc = l->root->kind == PJ_DICT ? 0 : REFUSE(l, DM_EFORMAT, "the file holds %s, not an object", pj_kind_name(l->root));
    if (rc == 0) rc = check_model(l);
    if (rc == 0) rc = check_normalizer(l);
    if (rc == 0) rc = check_splits(l);
    if (rc == 0) rc = load_added(l); /* before the vocabulary, whose entries may be some of them */
    if (rc == 0) rc = load_vocab(l);
    if (rc == 0) rc = load_merges(l);
    return rc;
}

int tok_load(dm_tok *t, const char *path, dm_err *e)
{
    dm_buf file = {0};
    pj_doc doc = {0};
    loader l = {.t = t, .root = &doc.root, .err = e};
    int rc = dm_file_read(path, TOK_FILE_BYTES_MAX, &file, e);
    if (rc < 0) goto out;
    dm_blake2b h;
    dm_blake2b_init(&h);
    dm_blake2b_add(&h, file.p, file.n);
    dm_blake2b_end(&h, &t->hash);
    make_alphabet(&l);
    rc = pj_read(&doc, dm_buf_cstr(&file), file.n, e);
    if (rc == 0) rc = load_all(&l);
    if (rc < 0) dm_err_prefix(e, "%s", path);
out:
    dm_free(l.index.slots);
    pj_free(&doc);
    dm_buf_free(&file);
    return rc;
}
