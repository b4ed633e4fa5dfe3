/* What happens to the list of messages before it is rendered. */
#include <stdlib.h>
#include <string.h>

#include "engine/chat_int.h"

/* ---- P2: results in the order of the calls ---- */

typedef struct call_id {
    const pj_val *id;
    int64_t index;
} call_id;

static int id_order(const pj_val *a, const pj_val *b)
{
    int c = memcmp(a->s, b->s, a->n < b->n ? a->n : b->n);
    return c ? c : (a->n > b->n) - (a->n < b->n);
}

static int call_order(const void *a, const void *b)
{
    const call_id *x = a, *y = b;
    int c = id_order(x->id, y->id);
    return c ? c : (x->index > y->index) - (x->index < y->index);
}

/* The calls' ids, sorted; of equal ids the later call comes last. */
static int64_t collect_ids(const pj_val *calls, call_id *ids)
{
    int64_t n = 0;
    for (uint32_t i = 0; i < calls->n; i++) {
        const pj_val *id = pj_get(&calls->items[i], "id");
        if (id && id->kind == PJ_STR && id->n) ids[n++] = (call_id){id, i};
    }
    qsort(ids, (size_t)n, sizeof *ids, call_order);
    return n;
}

/* Index of the call with this id: the last of equal ones; 0 if there is none. */
static int64_t index_of(const call_id *ids, int64_t n, const pj_val *id)
{
    int64_t lo = 0, hi = n;
    if (!id) return 0;
    while (lo < hi) { /* first entry above id */
        int64_t mid = lo + (hi - lo) / 2;
        if (id_order(ids[mid].id, id) <= 0) lo = mid + 1;
        else hi = mid;
    }
    return lo && id_order(ids[lo - 1].id, id) == 0 ? ids[lo - 1].index : 0;
}

static int block_order(const void *a, const void *b)
{
    const chat_block *const *x = a, *const *y = b;
    int c = ((*x)->order > (*y)->order) - ((*x)->order < (*y)->order);
    return c ? c : (*x > *y) - (*x < *y);
}

/* The results of one turn change places among themselves; its texts stay where they are. */
static int order_results(chat_block *blocks, size_t n, const pj_val *calls)
{
    int rc = DM_ENOMEM;
    call_id *ids = dm_malloc(calls->n * sizeof *ids);
    chat_block **sorted = dm_malloc(n * sizeof *sorted);
    chat_block *copy = dm_malloc(n * sizeof *copy);
    if (ids && sorted && copy) {
        int64_t nids = collect_ids(calls, ids);
        size_t results = 0, k = 0;
        memcpy(copy, blocks, n * sizeof *copy);
        for (size_t i = 0; i < n; i++) {
            if (!copy[i].result) continue;
            copy[i].order = index_of(ids, nids, copy[i].id);
            sorted[results++] = &copy[i];
        }
        qsort(sorted, results, sizeof *sorted, block_order);
        for (size_t i = 0; i < n; i++)
            if (blocks[i].result) blocks[i] = *sorted[k++];
        rc = 0;
    }
    dm_free(ids);
    dm_free(sorted);
    dm_free(copy);
    return rc;
}

static int order_all_results(chat_talk *t)
{
    const pj_val *calls = NULL;
    for (size_t i = 0; i < t->n; i++) {
        const chat_msg *m = &t->msgs[i];
        if (m->role == CHAT_ASSISTANT && m->calls) calls = m->calls;
        if (m->role != CHAT_USER || m->nblocks < 2 || !calls) continue;
        int rc = order_results(t->blocks + m->first_block, m->nblocks, calls);
        if (rc < 0) return rc;
    }
    return 0;
}

/* ---- P4: old reasoning and old developer messages ---- */

static int64_t last_asking(const chat_talk *t)
{
    for (size_t i = t->n; i-- > 0;)
        if (t->msgs[i].role == CHAT_USER || t->msgs[i].role == CHAT_DEVELOPER) return (int64_t)i;
    return -1;
}

static void drop_old(chat_talk *t)
{
    size_t kept = 0;
    for (size_t i = 0; i < t->n; i++) {
        bool old = (int64_t)i < t->last;
        if (old && t->msgs[i].role == CHAT_DEVELOPER) continue;
        t->msgs[kept] = t->msgs[i];
        if (old) t->msgs[kept].reasoning = NULL;
        kept++;
    }
    t->n = kept;
    t->last = last_asking(t);
}

int chat_prepare(chat_talk *t, const dm_chat_opts *o)
{
    int rc = order_all_results(t);
    if (rc < 0) return rc;
    t->drop_thinking = o->drop_thinking && !t->any_tools; /* P3 */
    t->last = last_asking(t);
    if (o->mode == DM_THINKING && t->drop_thinking) drop_old(t);
    return 0;
}
