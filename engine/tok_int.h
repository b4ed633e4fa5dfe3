/* Inside of the tokenizer: byte-level BPE.
 *
 *   text --cut at added tokens--> runs --three splits--> pieces --merges by rank--> ids
 *
 *   tok_load.c   tokenizer.json, checked, into the tables below
 *   tok_split.c  the three splits (PCRE2)
 *   tok_bpe.c    merges of one piece
 *   tok.c        the public functions
 *
 * A tokenizer is immutable once opened; everything that changes while encoding lies in a tok_work. */
#ifndef DM_ENGINE_TOK_INT_H
#define DM_ENGINE_TOK_INT_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "engine/engine.h"

#define TOK_FILE_BYTES_MAX ((size_t)64 << 20)
#define TOK_IDS_MAX (1 << 20)            /* ids are below this */
#define TOK_TOKEN_BYTES_MAX 4096         /* longest token */
#define TOK_TEXT_BYTES_MAX ((size_t)1 << 28) /* longest text of one encode: node indices are 32 bits, 24 bytes each */
#define TOK_SPLITS 3

typedef struct tok_entry { /* one id */
    uint32_t at, n; /* its bytes in dm_tok.bytes; n = 0: no such token */
    bool special;   /* an added token */
} tok_entry;

/* Pair of ids -> rank and id of the merged token.  Open addressing, a power of two, at most half full. */
typedef struct tok_merge { int32_t left, right, rank, id; } tok_merge; /* left < 0: empty */
typedef struct tok_merges { tok_merge *slots; uint32_t mask; } tok_merges;

/* Trie of the added tokens' texts; node 0 is the root. */
typedef struct tok_node {
    int32_t child, sibling; /* -1: none */
    int32_t id;             /* token that ends here, or -1 */
    uint8_t byte;
} tok_node;

struct dm_tok {
    dm_hash hash;
    int vocab; /* highest id + 1 */
    tok_entry *entries; /* [vocab] owned */
    dm_buf bytes;
    int32_t byte_id[256];
    tok_merges merges;
    tok_node *nodes; /* owned */
    size_t nnodes, nodes_cap;
    pcre2_code *split[TOK_SPLITS]; /* owned */
};

/* Scratch of one encode; zeroed is a valid start, tok_work_free ends it. */
typedef struct tok_work {
    const dm_tok *t;
    dm_ids *out;
    dm_err *err;
    pcre2_match_data *match;
    pcre2_match_context *context; /* only after the small JIT stack did not do */
    pcre2_jit_stack *stack;
    struct bpe_node *nodes;
    size_t nodes_cap;
    uint64_t *heap;
    size_t heap_n, heap_cap;
} tok_work;

uint32_t tok_pair_hash(int32_t left, int32_t right);
const tok_merge *tok_merge_find(const tok_merges *m, int32_t left, int32_t right); /* NULL: they do not merge */

int tok_split_compile(dm_tok *t, dm_err *e);
const char *tok_split_pattern(int i); /* as tokenizer.json spells it */
int tok_split_run(tok_work *w, const uint8_t *p, size_t n); /* valid UTF-8, no added tokens */
int tok_bpe_piece(tok_work *w, const uint8_t *p, size_t n);
void tok_work_free(tok_work *w);

int tok_load(dm_tok *t, const char *path, dm_err *e);
int tok_trie_add(dm_tok *t, const uint8_t *p, size_t n, int32_t id);
/* Longest added token at the start of p; its length, 0 if there is none. */
size_t tok_trie_match(const dm_tok *t, const uint8_t *p, size_t n, int32_t *id);

#endif
