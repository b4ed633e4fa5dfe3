/* Merges of one piece: the pair of lowest rank first, the leftmost of equal ones.  The symbols form a linked list,
 * the candidate pairs a heap, so a piece of n bytes costs n log n however long it is. */
#include <string.h>

#include "engine/tok_int.h"

typedef struct bpe_node {
    int32_t id;
    int32_t rank; /* of the pair (this, next); NO_PAIR: they do not merge, or this symbol is gone */
    int32_t merged; /* id of that pair */
    int32_t prev, next; /* -1: none */
} bpe_node;

#define NO_PAIR INT32_MAX
#define SCAN_MAX 24 /* up to here looking through all pairs beats keeping a heap */

uint32_t tok_pair_hash(int32_t left, int32_t right)
{
    uint64_t x = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(x >> 32);
}

const tok_merge *tok_merge_find(const tok_merges *m, int32_t left, int32_t right)
{
    for (uint32_t i = tok_pair_hash(left, right) & m->mask;; i = (i + 1) & m->mask) {
        const tok_merge *s = &m->slots[i];
        if (s->left == left && s->right == right) return s;
        if (s->left < 0) return NULL;
    }
}

static void set_pair(const tok_work *w, bpe_node *v, int32_t i)
{
    const tok_merge *m = v[i].next < 0 ? NULL : tok_merge_find(&w->t->merges, v[i].id, v[v[i].next].id);
    v[i].rank = m ? m->rank : NO_PAIR;
    v[i].merged = m ? m->id : -1;
}

/* Joins symbol i with the next one; the pairs (prev, i) and (i, next) are new then. */
static void join(const tok_work *w, bpe_node *v, int32_t i)
{
    int32_t gone = v[i].next;
    v[i].id = v[i].merged;
    v[i].next = v[gone].next;
    if (v[i].next >= 0) v[v[i].next].prev = i;
    v[gone].rank = NO_PAIR;
    set_pair(w, v, i);
    if (v[i].prev >= 0) set_pair(w, v, v[i].prev);
}

static void merge_by_scan(const tok_work *w, bpe_node *v)
{
    for (;;) {
        int32_t best = 0;
        for (int32_t i = 0; i >= 0; i = v[i].next)
            if (v[i].rank < v[best].rank) best = i;
        if (v[best].rank == NO_PAIR) return;
        join(w, v, best);
    }
}

/* ---- heap of rank << 32 | index, smallest on top ---- */

static void sift_down(uint64_t *h, size_t n, size_t i)
{
    uint64_t x = h[i];
    for (size_t c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && h[c + 1] < h[c]) c++;
        if (h[c] >= x) break;
        h[i] = h[c];
    }
    h[i] = x;
}

static void heap_push(tok_work *w, const bpe_node *v, int32_t at)
{
    if (at < 0 || v[at].rank == NO_PAIR) return;
    uint64_t x = (uint64_t)v[at].rank << 32 | (uint32_t)at;
    size_t i = w->heap_n++;
    for (; i && w->heap[(i - 1) / 2] > x; i = (i - 1) / 2) w->heap[i] = w->heap[(i - 1) / 2];
    w->heap[i] = x;
}

/* An entry is stale when the pair at its index has another rank by now. */
static void merge_by_heap(tok_work *w, bpe_node *v, size_t n)
{
    w->heap_n = 0;
    for (size_t i = 0; i < n; i++)
        if (v[i].rank != NO_PAIR) w->heap[w->heap_n++] = (uint64_t)v[i].rank << 32 | i;
    for (size_t i = w->heap_n / 2; i-- > 0;) sift_down(w->heap, w->heap_n, i);
    while (w->heap_n) {
        uint64_t top = w->heap[0];
        int32_t i = (int32_t)(uint32_t)top;
        w->heap[0] = w->heap[--w->heap_n];
        sift_down(w->heap, w->heap_n, 0);
        if (v[i].rank != (int32_t)(top >> 32)) continue;
        join(w, v, i);
        heap_push(w, v, i);
        heap_push(w, v, v[i].prev);
    }
}

/* Room for n symbols and every heap entry there can be: n at first, two more for each of n - 1 merges, one less
 * for each that is taken out. */
static int reserve(tok_work *w, size_t n)
{
    if (w->nodes_cap < n) {
        size_t cap = n < 256 ? 256 : n;
        bpe_node *p = dm_realloc(w->nodes, cap * sizeof *p);
        if (!p) return DM_ENOMEM;
        w->nodes = p, w->nodes_cap = cap;
    }
    if (n > SCAN_MAX && w->heap_cap < 2 * n) {
        uint64_t *p = dm_realloc(w->heap, 2 * n * sizeof *p);
        if (!p) return DM_ENOMEM;
        w->heap = p, w->heap_cap = 2 * n;
    }
    return 0;
}

int tok_bpe_piece(tok_work *w, const uint8_t *p, size_t n)
{
    int rc = n == 1 ? dm_ids_push(w->out, w->t->byte_id[p[0]]) : reserve(w, n);
    if (rc < 0) return dm_err_set(w->err, rc, "tokenizer", "out of memory");
    if (n == 1) return 0;
    bpe_node *v = w->nodes;
    for (size_t i = 0; i < n; i++)
        v[i] = (bpe_node){.id = w->t->byte_id[p[i]], .prev = (int32_t)i - 1, .next = i + 1 < n ? (int32_t)i + 1 : -1};
    for (size_t i = 0; i < n; i++) set_pair(w, v, (int32_t)i);
    if (n <= SCAN_MAX) merge_by_scan(w, v);
    else merge_by_heap(w, v, n);
    for (int32_t i = 0; i >= 0; i = v[i].next)
        if ((rc = dm_ids_push(w->out, v[i].id)) < 0) return dm_err_set(w->err, rc, "tokenizer", "out of memory");
    return 0;
}
