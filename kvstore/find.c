/* find.c — the deepest usable cut of a prompt, and reading it.
 *
 * A pin works because of the order of steps.  The writer, under kv->lock, dooms a key before it deletes the entry and only if it is
 * not pinned.  find, under kv->lock, pins a key only if it is not doomed, and looks at the disk in a transaction that it
 * begins *after* that.  So what it then sees cannot be evicted by this process until the pin is gone.  (Another process
 * may still evict it: then the read is a miss.) */
#include <string.h>

#include "kvstore/kv_int.h"

#define CHAIN_STEP 64 /* blocks looked up per transaction */

typedef struct hit_pin {
    kv_key *blocks; /* owned; blocks_count keys, all pinned */
    size_t blocks_count, blocks_cap;
    kv_key state; /* pinned unless kind is 0 */
    size_t state_bytes;
    uint32_t state_uses; /* hits of it before this one */
    int64_t last;  /* block read last, -1: none; under kv->lock */
    int64_t ahead; /* parts before this one were asked for ahead; under kv->lock */
} hit_pin;

/* ---- presence ------------------------------------------------------------------------------- */

typedef enum where_is { NOWHERE, MAYBE_DISK, IN_RAM } where_is;

/* Pins k unless it is surely not there.  *oom is set when the pin could not be kept. */
static where_is pin_key(dm_kv *kv, const kv_key *k, bool *oom)
{
    bool ram = kv_ram_get(kv, k) != NULL;
    if (!ram && kv_map_count(&kv->doomed, k)) return NOWHERE;
    if (!kv_map_add(&kv->pins, k, 1)) {
        *oom = true;
        return NOWHERE;
    }
    return ram ? IN_RAM : MAYBE_DISK;
}

static void unpin_key(dm_kv *kv, const kv_key *k) { kv_map_add(&kv->pins, k, -1); }

static bool on_disk(dm_kv *kv, MDB_txn *txn, const kv_key *k)
{
    kv_index ix;
    int rc = kv_index_look(kv, txn, k, &ix);
    if (rc == MDB_BAD_VALSIZE) kv_bad_entry(kv, k, "its index record is damaged");
    return rc == 0;
}

bool kv_pin_if_there(dm_kv *kv, const kv_key *k)
{
    bool oom = false;
    MDB_txn *txn = NULL;
    pthread_mutex_lock(&kv->lock);
    where_is where = pin_key(kv, k, &oom);
    pthread_mutex_unlock(&kv->lock);
    if (where == NOWHERE) return false;
    bool there = where == MAYBE_DISK && kv_txn_begin(kv, false, &txn) == 0 && on_disk(kv, txn, k);
    if (txn) kv_txn_end(kv, txn);
    if (there) return true;
    pthread_mutex_lock(&kv->lock);
    unpin_key(kv, k);
    pthread_mutex_unlock(&kv->lock);
    return false;
}

static bool grow_blocks(hit_pin *p, size_t want)
{
    if (want <= p->blocks_cap) return true;
    size_t cap = p->blocks_cap ? p->blocks_cap * 2 : CHAIN_STEP;
    while (cap < want) cap *= 2;
    kv_key *more = dm_realloc(p->blocks, cap * sizeof *more);
    if (!more) return false;
    p->blocks = more;
    p->blocks_cap = cap;
    return true;
}

/* Appends up to CHAIN_STEP pinned blocks to p; returns how many, or DM_E…. */
static int pin_step(dm_kv *kv, hit_pin *p, dm_hash *chain, const int32_t *ids, size_t count)
{
    where_is where[CHAIN_STEP];
    kv_key *k = p->blocks + p->blocks_count;
    bool oom = false;
    for (size_t i = 0; i < count; i++) {
        dm_kv_chain(chain, chain, ids + i * DM_KV_BLOCK);
        k[i] = kv_key_block(chain);
    }
    size_t pinned = 0, present = 0;
    pthread_mutex_lock(&kv->lock);
    while (pinned < count && (where[pinned] = pin_key(kv, &k[pinned], &oom)) != NOWHERE) pinned++;
    pthread_mutex_unlock(&kv->lock);

    MDB_txn *txn = NULL;
    for (; present < pinned; present++) {
        if (where[present] == IN_RAM) continue;
        if (!txn && kv_txn_begin(kv, false, &txn) != 0) break;
        if (!on_disk(kv, txn, &k[present])) break;
    }
    if (txn) kv_txn_end(kv, txn);

    pthread_mutex_lock(&kv->lock);
    for (size_t i = present; i < pinned; i++) unpin_key(kv, &k[i]);
    pthread_mutex_unlock(&kv->lock);
    p->blocks_count += present;
    return oom ? DM_ENOMEM : (int)present;
}

static int pin_chain(dm_kv *kv, hit_pin *p, const int32_t *ids, int64_t blocks)
{
    dm_hash chain = kv->opts.root;
    for (int64_t i = 0; i < blocks;) {
        size_t count = blocks - i < CHAIN_STEP ? (size_t)(blocks - i) : CHAIN_STEP;
        if (!grow_blocks(p, p->blocks_count + count)) return DM_ENOMEM;
        int got = pin_step(kv, p, &chain, ids + i * DM_KV_BLOCK, count);
        if (got < 0) return got;
        i += got;
        if ((size_t)got < count) break;
    }
    return 0;
}

/* ---- states ------------------------------------------------------------------------------------- */

/* Deepest state on disk behind `last` with a tail of at most tail_max ids that is a prefix of tail.  Keys are sorted by tail
 * length, so each step looks at the longest length not above `want`: at most 256 steps, however many states there are. */
bool kv_disk_state(dm_kv *kv, MDB_cursor *cur, const dm_hash *last, const int32_t *tail, int tail_max, kv_key *best)
{
    uint8_t buf[KV_KEY_MAX];
    for (int want = tail_max; want >= 0;) {
        kv_key probe = { .kind = KV_STATE, .tail_count = (uint16_t)want, .hash = *last };
        memset(probe.tail.b, 0xff, sizeof probe.tail.b);
        MDB_val key = { kv_key_encode(buf, &probe), buf }, val;
        int rc = mdb_cursor_get(cur, &key, &val, MDB_SET_RANGE); /* first key not below: usually just behind what we look for */
        bool exact = !rc && key.mv_size == 67 && memcmp(key.mv_data, buf, 67) == 0;
        if (!exact) rc = mdb_cursor_get(cur, &key, &val, rc ? MDB_LAST : MDB_PREV);
        kv_key found;
        if (rc || !kv_key_decode(&found, key.mv_data, key.mv_size) || !dm_hash_equal(&found.hash, last) || found.tail_count > want) return false;
        kv_key ours = kv_key_state(last, tail, found.tail_count);
        key = (MDB_val){ kv_key_encode(buf, &ours), buf };
        pthread_mutex_lock(&kv->lock);
        bool doomed = kv_map_count(&kv->doomed, &ours) != 0;
        pthread_mutex_unlock(&kv->lock);
        if (!doomed && mdb_cursor_get(cur, &key, &val, MDB_SET_KEY) == 0) {
            kv_index ix;
            if (kv_index_decode(&ix, &ours, val.mv_data, val.mv_size, kv->extent_bytes)) {
                *best = ours;
                return true;
            }
            kv_bad_entry(kv, &ours, "its index record is damaged");
        }
        want = (int)found.tail_count - 1;
    }
    return false;
}

/* Deepest state behind block *b with a tail of at most *tail_max ids, else behind an earlier block; both are left where it was
 * found.  Nothing deeper than limit. */
static bool search_state(dm_kv *kv, const hit_pin *p, const int32_t *ids, int64_t limit, int64_t *b, int *tail_max, kv_key *best)
{
    MDB_txn *txn = NULL;
    MDB_cursor *cur = NULL;
    if (kv_txn_begin(kv, false, &txn) != 0) txn = NULL;
    if (txn && mdb_cursor_open(txn, kv->db[KV_DB_STATES], &cur) != 0) cur = NULL;
    bool found = false;
    while (*b >= 0) {
        const dm_hash *last = *b ? &p->blocks[*b - 1].hash : &kv->opts.root;
        const int32_t *tail = ids + *b * DM_KV_BLOCK;
        int64_t room = limit - *b * DM_KV_BLOCK;
        int max = room < *tail_max ? (int)room : *tail_max;
        kv_key disk;
        pthread_mutex_lock(&kv->lock);
        found = kv_ram_state(kv, last, tail, max, best);
        pthread_mutex_unlock(&kv->lock);
        if (cur && kv_disk_state(kv, cur, last, tail, max, &disk) && (!found || disk.tail_count > best->tail_count)) *best = disk, found = true;
        if (found) break;
        --*b;
        *tail_max = DM_KV_BLOCK - 1;
    }
    if (cur) mdb_cursor_close(cur);
    if (txn) kv_txn_end(kv, txn);
    return found;
}

/* Pins the state and looks again: 1 pinned (with its size and hits so far), 0 it went away meanwhile, DM_ENOMEM. */
static int pin_state(dm_kv *kv, const kv_key *k, size_t *bytes, uint32_t *uses)
{
    bool oom = false;
    pthread_mutex_lock(&kv->lock);
    where_is where = pin_key(kv, k, &oom);
    if (where == IN_RAM) *bytes = kv_ram_get(kv, k)->n, *uses = kv_ram_get(kv, k)->uses;
    pthread_mutex_unlock(&kv->lock);
    if (oom) return DM_ENOMEM;
    if (where != MAYBE_DISK) return where == IN_RAM;
    MDB_txn *txn;
    kv_index ix;
    bool there = kv_txn_begin(kv, false, &txn) == 0;
    if (there) {
        there = kv_index_get(kv, txn, k, &ix) == 0;
        kv_txn_end(kv, txn);
    }
    if (there) {
        *bytes = (size_t)ix.total;
        *uses = ix.uses;
        return 1;
    }
    pthread_mutex_lock(&kv->lock);
    unpin_key(kv, k);
    pthread_mutex_unlock(&kv->lock);
    return 0;
}

/* ---- find ------------------------------------------------------------------------------------------ */

/* Of the blocks behind the first `keep`, and of the state if there is one. */
static void release_pins(dm_kv *kv, hit_pin *p, size_t keep)
{
    pthread_mutex_lock(&kv->lock);
    for (size_t i = keep; i < p->blocks_count; i++) unpin_key(kv, &p->blocks[i]);
    if (p->state.kind) unpin_key(kv, &p->state);
    p->state.kind = 0;
    pthread_mutex_unlock(&kv->lock);
    if (p->blocks_count > keep) p->blocks_count = keep;
}

static void pin_free(hit_pin *p)
{
    if (!p) return;
    dm_free(p->blocks);
    dm_free(p);
}

void kv_note_key(dm_kv *kv, const kv_key *k, int64_t use)
{
    kv_entry *en = kv_ram_get(kv, k);
    if (en) en->uses = kv_uses_after(en->uses, use);
    if (en) kv_ram_use(kv, en);
    kv_note_use(kv, k, use);
}

/* One use of the state, and the same age for it and every block before it, so that shared beginnings never look older than what hangs
 * on them.  For the blocks it counts as a use only when the state was gone on from before: then others share it.  A session that
 * goes on turn after turn hits a new state each time; were that to count, its blocks would outlive those of sessions that
 * have just begun, long after it has ended. */
static void note_use(dm_kv *kv, const hit_pin *p)
{
    pthread_mutex_lock(&kv->lock);
    for (size_t i = 0; i < p->blocks_count; i++) kv_note_key(kv, &p->blocks[i], p->state_uses ? 1 : KV_PASS);
    kv_note_key(kv, &p->state, 1);
    pthread_cond_signal(&kv->work);
    pthread_mutex_unlock(&kv->lock);
}

static void count_find(dm_kv *kv, bool hit)
{
    pthread_mutex_lock(&kv->lock);
    *(hit ? &kv->st.hits : &kv->st.misses) += 1;
    kv->epoch_new = true;
    pthread_mutex_unlock(&kv->lock);
}

int dm_kv_find(dm_kv *kv, const int32_t *ids, int64_t n, int64_t limit, dm_kv_hit *hit, dm_err *e)
{
    *hit = (dm_kv_hit){ 0 };
    if (n < 0 || limit < 0 || (n && !ids)) return dm_err_set(e, DM_EINVAL, "kv.find", "bad length %lld or limit %lld", (long long)n, (long long)limit);
    if (limit > n) limit = n;
    hit_pin *p = dm_calloc(1, sizeof *p);
    if (!p) return dm_err_set(e, DM_ENOMEM, "kv.find", "out of memory");
    int rc = pin_chain(kv, p, ids, n / DM_KV_BLOCK);
    hit->blocks_present = (int64_t)p->blocks_count;

    int64_t b = (int64_t)p->blocks_count < limit / DM_KV_BLOCK ? (int64_t)p->blocks_count : limit / DM_KV_BLOCK;
    int tail_max = DM_KV_BLOCK - 1, got = 0;
    kv_key best;
    while (!rc && !got && search_state(kv, p, ids, limit, &b, &tail_max, &best)) {
        got = b || best.tail_count ? pin_state(kv, &best, &hit->state_bytes, &p->state_uses) : 0;
        if (got < 0) rc = got;
        tail_max = (int)best.tail_count - 1; /* if it went away: go on below it */
    }
    if (!rc) hit->evicted = kv_ghost_charge(kv, p->blocks, p->blocks_count, ids, limit, got == 1 ? b * DM_KV_BLOCK + best.tail_count : 0);
    if (got == 1) {
        release_pins(kv, p, (size_t)b);
        p->state = best;
        p->state_bytes = hit->state_bytes;
        p->last = -1;
        hit->blocks = b;
        hit->pos = b * DM_KV_BLOCK + best.tail_count;
        hit->pin = p;
        note_use(kv, p);
        kv_note_passed(kv, p->blocks, p->blocks_count, ids, hit->pos);
    } else {
        release_pins(kv, p, 0);
        pin_free(p);
        hit->state_bytes = 0;
    }
    if (rc) {
        *hit = (dm_kv_hit){ 0 };
        return dm_err_set(e, rc, "kv.find", "out of memory");
    }
    count_find(kv, got == 1);
    return 0;
}

void dm_kv_hit_end(dm_kv *kv, dm_kv_hit *hit)
{
    if (!hit) return;
    if (hit->pin) {
        pthread_mutex_lock(&kv->lock);
        kv_ahead_cancel(kv, hit->pin);
        pthread_mutex_unlock(&kv->lock);
        release_pins(kv, hit->pin, 0);
        pin_free(hit->pin);
    }
    *hit = (dm_kv_hit){ 0 };
}

/* ---- read --------------------------------------------------------------------------------------------- */

static const char *why_bad(int rc)
{
    return rc == DM_ECORRUPT ? "key, length or checksum does not match" : "the disk could not be read";
}

/* The loaded entry joins the RAM tier unless a put was faster; returns the one to copy from, with a reference. */
static kv_entry *promote(dm_kv *kv, kv_entry *en)
{
    pthread_mutex_lock(&kv->lock);
    kv_entry *there = kv_ram_get(kv, &en->key);
    if (there) {
        there->refs++;
        kv_entry_unref(kv, en);
        en = there;
    } else if (kv_map_count(&kv->doomed, &en->key) == 0 && kv_ram_insert(kv, en) == 0) {
        kv_ram_fit(kv, NULL);
    }
    pthread_mutex_unlock(&kv->lock);
    return en;
}

/* *out has a reference. */
static int get_entry(dm_kv *kv, const kv_key *k, kv_entry **out, dm_kv_tier *tier, dm_err *e)
{
    pthread_mutex_lock(&kv->lock);
    kv_ahead_wait(kv, k);
    kv_entry *en = kv_ram_get(kv, k);
    bool from_ram = en && !en->ahead;
    if (en) {
        en->refs++;
        en->ahead = false;
        kv_ram_use(kv, en);
    }
    bool doomed = !en && kv_map_count(&kv->doomed, k) != 0;
    pthread_mutex_unlock(&kv->lock);
    if (tier) *tier = from_ram ? DM_KV_RAM : DM_KV_DISK;
    if (en) {
        *out = en;
        return 0;
    }
    char name[96];
    kv_key_text(name, k);
    int rc = doomed ? DM_EMISS : kv_load(kv, k, &en);
    if (rc == DM_ENOMEM) return dm_err_set(e, rc, "kv.read", "no memory to read %s", name);
    if (rc == DM_ECORRUPT || rc == DM_EIO) kv_bad_entry(kv, k, why_bad(rc));
    if (rc) return dm_err_set(e, DM_EMISS, "kv.read", "%s: %s went away or was bad; find again", kv->dir, name);
    *out = promote(kv, en);
    return 0;
}

/* Block i is about to be read.  Read in order: what follows is asked for, the state behind the last block. */
static void look_ahead(dm_kv *kv, hit_pin *p, int64_t i)
{
    int64_t blocks = (int64_t)p->blocks_count;
    pthread_mutex_lock(&kv->lock);
    bool in_order = i > 0 && i == p->last + 1;
    p->last = i;
    if (p->ahead <= i) p->ahead = i + 1;
    while (in_order && p->ahead <= blocks && p->ahead <= i + KV_AHEAD_BLOCKS) {
        bool state = p->ahead == blocks;
        if (!kv_ahead_want(kv, p, state ? &p->state : &p->blocks[p->ahead], state ? p->state_bytes : kv->opts.block_bytes)) break;
        p->ahead++;
    }
    pthread_mutex_unlock(&kv->lock);
}

int dm_kv_read_block(dm_kv *kv, const dm_kv_hit *hit, int64_t i, void *dst, dm_kv_tier *tier, dm_err *e)
{
    hit_pin *p = hit->pin;
    if (!p || i < 0 || i >= hit->blocks) return dm_err_set(e, DM_EINVAL, "kv.read", "block %lld is not in a hit of %lld", (long long)i, (long long)hit->blocks);
    kv_entry *en;
    look_ahead(kv, p, i);
    int rc = get_entry(kv, &p->blocks[i], &en, tier, e);
    if (rc) return rc;
    memcpy(dst, en->bytes, en->n); /* block_bytes: put and load see to it */
    kv_entry_release(kv, en);
    return 0;
}

int dm_kv_read_state(dm_kv *kv, const dm_kv_hit *hit, dm_buf *out, dm_kv_tier *tier, dm_err *e)
{
    const hit_pin *p = hit->pin;
    if (!p) return dm_err_set(e, DM_EINVAL, "kv.read", "the hit is empty");
    dm_buf_clear(out);
    kv_entry *en;
    int rc = get_entry(kv, &p->state, &en, tier, e);
    if (rc) return rc;
    rc = dm_buf_append(out, en->bytes, en->n);
    kv_entry_release(kv, en);
    return rc < 0 ? dm_err_set(e, DM_ENOMEM, "kv.read", "no memory for a state of %zu bytes", out->n) : 0;
}
