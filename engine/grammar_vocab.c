/* The vocabulary as a trie over its bytes, so that a mask is one walk that leaves out whole branches. */
#include <stdlib.h>
#include <string.h>

#include "engine/chat_texts_int.h"
#include "engine/grammar_int.h"

typedef struct entry { const uint8_t *p; uint32_t n; int32_t id; } entry;

static int entry_order(const void *a, const void *b)
{
    const entry *x = a, *y = b;
    int c = memcmp(x->p, y->p, x->n < y->n ? x->n : y->n);
    if (c) return c;
    if (x->n != y->n) return x->n < y->n ? -1 : 1;
    return (x->id > y->id) - (x->id < y->id);
}

/* Closes the nodes on the path that are deeper than `depth`. */
static void close_path(gr_trie *t, const uint32_t *path, uint32_t *open, uint32_t depth)
{
    while (*open > depth) t->nodes[path[--*open]].end = t->n;
}

/* entries are in order; next chains tokens of equal bytes. */
static int build(gr_trie *t, const entry *v, size_t n, int32_t *next)
{
    size_t total = 0;
    uint32_t path[GR_TOKEN_BYTES_MAX], open = 0;
    for (size_t i = 0; i < n; i++) total += v[i].n;
    t->nodes = dm_malloc((total ? total : 1) * sizeof *t->nodes);
    if (!t->nodes) return DM_ENOMEM;
    for (size_t i = 0; i < n; i++) {
        uint32_t common = 0;
        while (i && common < v[i].n && common < v[i - 1].n && v[i].p[common] == v[i - 1].p[common]) common++;
        close_path(t, path, &open, common);
        for (uint32_t d = common; d < v[i].n; d++) {
            t->nodes[t->n] = (gr_node){ .token = -1, .depth = (uint16_t)(d + 1), .byte = v[i].p[d] };
            path[open++] = t->n++;
        }
        gr_node *leaf = &t->nodes[path[open - 1]];
        next[v[i].id] = leaf->token;
        leaf->token = v[i].id;
    }
    close_path(t, path, &open, 0);
    gr_node *fit = dm_realloc(t->nodes, (t->n ? t->n : 1) * sizeof *fit);
    if (fit) t->nodes = fit;
    return 0;
}

static bool is_plain(const entry *x)
{
    for (uint32_t i = 0; i < x->n; i++)
        if (x->p[i] < 0x20 || x->p[i] == '"' || x->p[i] == '\\') return false;
    return true;
}

/* Both tries from the tokens that fit; the added tokens that are units of their own are in neither. */
static int build_tries(dm_vocab *v, entry *list)
{
    size_t n = 0, quoted = 0;
    for (int32_t id = 0; id < v->vocab; id++) {
        size_t bytes;
        const char *p = dm_tok_bytes(v->tok, id, &bytes);
        if (!bytes || id == v->dsml || id == v->think_end || id == v->eos) continue;
        if (memchr(p, 0, bytes)) gr_bit_set(v->nul, id);
        if (bytes > GR_TOKEN_BYTES_MAX) continue;
        list[n++] = (entry){ (const uint8_t *)p, (uint32_t)bytes, id };
        if ((int)bytes > v->depth_max) v->depth_max = (int)bytes;
    }
    qsort(list, n, sizeof *list, entry_order);
    int rc = build(&v->all, list, n, v->next);
    for (size_t i = 0; i < n; i++) {
        if (is_plain(&list[i])) gr_bit_set(v->plain, list[i].id);
        else list[quoted++] = list[i];
    }
    /* Equal tokens are all plain or all not, so that the chains of both tries are the same. */
    return rc < 0 ? rc : build(&v->quoted, list, quoted, v->next);
}

int dm_vocab_create(dm_vocab **out, const dm_tok *tok, dm_err *e)
{
    int rc = DM_ENOMEM;
    *out = NULL;
    dm_vocab *v = dm_calloc(1, sizeof *v);
    if (!v) return dm_err_set(e, DM_ENOMEM, "grammar", "out of memory");
    v->tok = tok;
    v->vocab = dm_tok_vocab(tok);
    v->dsml = dm_tok_special(tok, MARK_DSML);
    v->think_end = dm_tok_special(tok, MARK_THINK_END);
    v->eos = dm_tok_special(tok, MARK_EOS);
    size_t n = v->vocab > 0 ? (size_t)v->vocab : 1;
    entry *list = dm_malloc(n * sizeof *list);
    v->next = dm_malloc(n * sizeof *v->next);
    v->plain = dm_calloc((n + 7) / 8, 1);
    v->nul = dm_calloc((n + 7) / 8, 1);
    if (list && v->next && v->plain && v->nul) rc = build_tries(v, list);
    dm_free(list);
    if (rc < 0) {
        dm_vocab_destroy(v);
        return dm_err_set(e, rc, "grammar", "out of memory");
    }
    *out = v;
    return 0;
}

void dm_vocab_destroy(dm_vocab *v)
{
    if (!v) return;
    dm_free(v->next);
    dm_free(v->plain);
    dm_free(v->nul);
    dm_free(v->all.nodes);
    dm_free(v->quoted.nodes);
    dm_free(v);
}
