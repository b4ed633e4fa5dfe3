/* passed.c — states that a hit passed by.
 *
 * A session writes a state at every turn, and each weighs as much as some blocks; yet it goes on from its last one.  An older one is
 * wanted when the session goes back, when another forks off there, or when the end of the chain was evicted.  So of the states before
 * a hit at position P
 *   - the last one (with the hit itself: the last two of the session) is kept as young as the blocks around it, and
 *   - so is every one that bounds what going back costs: between two of them that are kept, the upper at K, lie at most (P-K)/2 tokens.
 *     Who goes back by D tokens computes at most about D/2 again, and a chain that loses its deep end keeps a cut near there
 *   - all others are let go first when room is needed (KV_THIN), before any block; those that save fewest tokens before others.
 * The kept ones of a session grow with the logarithm of its length.  A state that several went on from (an anchor) is not let go: the
 * writer knows its hits (make_thin in evict.c).  As long as there is room, nothing goes.
 *
 * The store does not know sessions.  One whose end another goes on from is one session with it. */
#include <string.h>

#include "kvstore/kv_int.h"

typedef struct cut {
    kv_key key;
    int64_t pos;
} cut;
typedef struct cuts {
    cut *p; /* owned; by falling position */
    size_t n, cap;
} cuts;

static bool add_cut(cuts *c, const kv_key *k, int64_t pos)
{
    if (c->n == c->cap) {
        size_t cap = c->cap ? c->cap * 2 : 64;
        cut *more = dm_realloc(c->p, cap * sizeof *more);
        if (!more) return false;
        c->p = more;
        c->cap = cap;
    }
    c->p[c->n++] = (cut){ *k, pos };
    return true;
}

/* All states behind one block whose tails are prefixes of tail, the longest first. */
static bool list_behind(dm_kv *kv, MDB_cursor *cur, const dm_hash *last, const int32_t *tail, int tail_max, int64_t at, cuts *c)
{
    while (tail_max >= 0) {
        kv_key ram, disk;
        bool on = kv_disk_state(kv, cur, last, tail, tail_max, &disk);
        pthread_mutex_lock(&kv->lock);
        bool in = kv_ram_state(kv, last, tail, tail_max, &ram);
        pthread_mutex_unlock(&kv->lock);
        if (!in && !on) break;
        const kv_key *k = in && (!on || ram.tail_count >= disk.tail_count) ? &ram : &disk;
        if (!add_cut(c, k, at + k->tail_count)) return false;
        tail_max = (int)k->tail_count - 1;
    }
    return true;
}

static bool list(dm_kv *kv, const kv_key *blocks, size_t blocks_count, const int32_t *ids, int64_t pos, cuts *c)
{
    MDB_txn *txn;
    MDB_cursor *cur;
    if (kv_txn_begin(kv, false, &txn) != 0) return false;
    bool good = mdb_cursor_open(txn, kv->db[KV_DB_STATES], &cur) == 0;
    if (!good) {
        kv_txn_end(kv, txn);
        return false;
    }
    for (size_t b = blocks_count + 1; b-- > 0 && good;) {
        int64_t at = (int64_t)b * DM_KV_BLOCK;
        int below = pos - at < DM_KV_BLOCK ? (int)(pos - at) - 1 : DM_KV_BLOCK - 1; /* the hit's own is not passed by */
        good = list_behind(kv, cur, b ? &blocks[b - 1].hash : &kv->opts.root, ids + at, below, at, c);
    }
    mdb_cursor_close(cur);
    kv_txn_end(kv, txn);
    return good;
}

/* Tokens that each saves, or 0: kept. */
static int64_t saves(const cuts *c, size_t i, int64_t kept, int64_t end)
{
    int64_t below = i + 1 < c->n ? c->p[i + 1].pos : 0;
    if (i == 0 || 2 * (kept - below) > end - kept) return 0;
    int64_t tokens = c->p[i].pos - below;
    return tokens < KV_THIN_MAX ? tokens : KV_THIN_MAX - 1;
}

void kv_note_passed(dm_kv *kv, const kv_key *blocks, size_t blocks_count, const int32_t *ids, int64_t pos)
{
    cuts c = { 0 };
    if (list(kv, blocks, blocks_count, ids, pos, &c)) { /* else out of memory, or the like: ages that are not noted do no harm */
        int64_t kept = pos;
        pthread_mutex_lock(&kv->lock);
        for (size_t i = 0; i < c.n; i++) {
            int64_t tokens = saves(&c, i, kept, pos);
            if (tokens) {
                kv_note_use(kv, &c.p[i].key, KV_THIN + tokens);
            } else {
                kv_note_key(kv, &c.p[i].key, KV_PASS);
                kept = c.p[i].pos;
            }
        }
        pthread_mutex_unlock(&kv->lock);
    }
    dm_free(c.p);
}
