/* ram.c — the RAM tier: every put lands here, every disk read is promoted into it.
 *
 * An entry's life (kv_where), all moves under kv->lock
 *
 *   put ------------> QUEUED --(writer takes it)--> WRITING --(committed)--> CLEAN, on_disk
 *                      |  ^                           |
 *      (kv_ram_give_up)|  |(put again)                |(transaction aborted)
 *                      v  |                           v
 *   disk read ------> CLEAN                         QUEUED, at the front
 *
 * Invariants
 *   R1  CLEAN entries are in the LRU list, QUEUED ones in the queue; WRITING ones belong to the writer.
 *   R2  ram_bytes is the cost of all entries in the table; queued_bytes the payload of QUEUED and WRITING ones but those put `again`.
 *   R3  An entry leaves the table only when CLEAN, and not while it is pinned and the only copy.
 *   R4  The memory lives as long as somebody holds a reference, in the table or not. */
#include <string.h>

#include "kvstore/kv_int.h"

size_t kv_entry_cost(const kv_entry *en)
{
    return en->n + sizeof *en + 2 * sizeof(kv_slot); /* a map at 3/4 load, doubled at most, is about two slots an entry */
}

kv_entry *kv_entry_new(const dm_kv *kv, const kv_key *k, size_t n, dm_err *e)
{
    kv_entry *en = dm_calloc(1, sizeof *en);
    bool fills = n <= kv->payload_bytes && kv->payload_bytes - n < kv->page_bytes;
    if (en && fills) en->extent = dm_aligned(kv->page_bytes, kv->extent_bytes);
    uint8_t *bytes = !en ? NULL : en->extent ? en->extent + KV_HEADER_BYTES : fills ? NULL : dm_malloc(n ? n : 1);
    if (!bytes) {
        dm_free(en);
        dm_err_set(e, DM_ENOMEM, "kv.ram", "no memory for an entry of %zu bytes", n);
        return NULL;
    }
    en->key = *k;
    en->n = n;
    en->bytes = bytes;
    en->refs = 1;
    return en;
}

void kv_entry_unref(dm_kv *kv, kv_entry *en)
{
    (void)kv;
    DM_ASSERT(en->refs > 0);
    if (--en->refs) return;
    DM_ASSERT(!en->in_table);
    dm_free(en->extent ? en->extent : en->bytes);
    dm_free(en);
}

void kv_entry_release(dm_kv *kv, kv_entry *en)
{
    if (!en) return;
    pthread_mutex_lock(&kv->lock);
    kv_entry_unref(kv, en);
    pthread_mutex_unlock(&kv->lock);
}

/* ---- lists --------------------------------------------------------------------------- */

static void push_head(kv_list *l, kv_entry *en)
{
    en->prev = NULL;
    en->next = l->head;
    *(l->head ? &l->head->prev : &l->tail) = en;
    l->head = en;
}

static void push_tail(kv_list *l, kv_entry *en)
{
    en->next = NULL;
    en->prev = l->tail;
    *(l->tail ? &l->tail->next : &l->head) = en;
    l->tail = en;
}

static void unlink_entry(kv_list *l, kv_entry *en)
{
    *(en->prev ? &en->prev->next : &l->head) = en->next;
    *(en->next ? &en->next->prev : &l->tail) = en->prev;
    en->prev = en->next = NULL;
}

/* ---- states behind one last block ------------------------------------------------------------ */

static kv_key last_key(const dm_hash *last)
{
    kv_key k = kv_key_block(last);
    k.kind = KV_LAST;
    return k;
}

static bool link_state(dm_kv *kv, kv_entry *en)
{
    kv_key k = last_key(&en->key.hash);
    kv_slot *s = kv_map_put(&kv->by_last, &k);
    if (!s) return false;
    en->state_next = s->v.ptr;
    s->v.ptr = en;
    return true;
}

static void unlink_state(dm_kv *kv, kv_entry *en)
{
    kv_key k = last_key(&en->key.hash);
    kv_slot *s = kv_map_find(&kv->by_last, &k);
    DM_ASSERT(s);
    kv_entry *head = s->v.ptr, **p = &head;
    while (*p != en) p = &(*p)->state_next;
    *p = en->state_next;
    if (head) s->v.ptr = head;
    else kv_map_del(&kv->by_last, s);
}

/* The state with the longest tail of at most tail_max ids that is a prefix of tail. */
bool kv_ram_state(dm_kv *kv, const dm_hash *last, const int32_t *tail, int tail_max, kv_key *best)
{
    kv_key k = last_key(last), want;
    kv_slot *s = kv_map_find(&kv->by_last, &k);
    int best_count = -1, want_count = -1;
    for (kv_entry *en = s ? s->v.ptr : NULL; en; en = en->state_next) {
        int count = en->key.tail_count;
        if (count > tail_max || count <= best_count) continue;
        if (count != want_count) want = kv_key_state(last, tail, count), want_count = count;
        if (!kv_key_equal(&want, &en->key)) continue;
        *best = want;
        best_count = count;
    }
    return best_count >= 0;
}

/* ---- table --------------------------------------------------------------------------------- */

kv_entry *kv_ram_get(dm_kv *kv, const kv_key *k)
{
    kv_slot *s = kv_map_find(&kv->table, k);
    return s ? s->v.ptr : NULL;
}

/* The key must not be in the table.  The entry becomes CLEAN and most recently used. */
int kv_ram_insert(dm_kv *kv, kv_entry *en)
{
    kv_slot *s = kv_map_put(&kv->table, &en->key);
    if (!s) return DM_ENOMEM;
    DM_ASSERT(!s->v.ptr);
    if (en->key.kind == KV_STATE && !link_state(kv, en)) {
        kv_map_del(&kv->table, s);
        return DM_ENOMEM;
    }
    s->v.ptr = en;
    en->refs++;
    en->in_table = true;
    en->where = KV_CLEAN;
    push_head(&kv->lru, en);
    kv->st.ram_entries++;
    kv->st.ram_bytes += (int64_t)kv_entry_cost(en);
    return 0;
}

/* From any place but the writer's batch; the writer drops what it holds when it sees in_table false. */
void kv_ram_remove(dm_kv *kv, kv_entry *en)
{
    DM_ASSERT(en->in_table);
    if (en->where == KV_QUEUED) kv_ram_unqueue(kv, en, KV_CLEAN);
    if (en->where == KV_CLEAN) unlink_entry(&kv->lru, en);
    kv_map_del(&kv->table, kv_map_find(&kv->table, &en->key));
    if (en->key.kind == KV_STATE) unlink_state(kv, en);
    en->in_table = false;
    kv->st.ram_entries--;
    kv->st.ram_bytes -= (int64_t)kv_entry_cost(en);
    kv_entry_unref(kv, en);
}

void kv_ram_use(dm_kv *kv, kv_entry *en)
{
    if (en->where != KV_CLEAN || !en->in_table) return;
    unlink_entry(&kv->lru, en);
    push_head(&kv->lru, en);
}

/* ---- queue ----------------------------------------------------------------------------------- */

/* Of an entry in the queue or with the writer.  What is on the disk and only to be made young takes no room from what is new, also not
 * while the writer has it. */
static int64_t unwritten(const kv_entry *en) { return en->again ? 0 : (int64_t)en->n; }

void kv_ram_queue(dm_kv *kv, kv_entry *en)
{
    DM_ASSERT(en->where == KV_CLEAN && en->in_table);
    unlink_entry(&kv->lru, en);
    if (!kv->queue.head) kv->queue_since_ns = dm_now_ns();
    push_tail(&kv->queue, en);
    en->where = KV_QUEUED;
    en->ticket = ++kv->ticket;
    en->again = en->on_disk;
    kv->queued_again += en->again;
    kv->st.queued_bytes += unwritten(en);
}

/* QUEUED -> CLEAN (given up, at the old end of the LRU list) or WRITING (taken by the writer). */
void kv_ram_unqueue(dm_kv *kv, kv_entry *en, kv_where where)
{
    DM_ASSERT(en->where == KV_QUEUED);
    unlink_entry(&kv->queue, en);
    en->where = where;
    kv->queued_again -= en->again;
    if (where == KV_WRITING) return;
    kv->st.queued_bytes -= unwritten(en);
    push_tail(&kv->lru, en);
}

void kv_ram_requeue_front(dm_kv *kv, kv_entry *en)
{
    DM_ASSERT(en->where == KV_WRITING);
    if (!en->in_table) { /* dropped meanwhile */
        kv->st.queued_bytes -= unwritten(en);
        return;
    }
    push_head(&kv->queue, en);
    en->where = KV_QUEUED;
    kv->queued_again += en->again;
}

void kv_ram_clean(dm_kv *kv, kv_entry *en)
{
    DM_ASSERT(en->where == KV_WRITING);
    kv->st.queued_bytes -= unwritten(en);
    en->where = KV_CLEAN;
    if (en->in_table) push_head(&kv->lru, en);
}

/* The deepest queued entry that hangs on en, or en itself: without en it could not be used. */
static kv_entry *deepest(dm_kv *kv, kv_entry *en)
{
    for (kv_entry *next = en->next; next && en->key.kind == KV_BLOCK; next = next->next) {
        const dm_hash *prev = next->key.kind == KV_STATE ? &next->key.hash : next->chained ? &next->behind : NULL;
        if (prev && dm_hash_equal(prev, &en->key.hash) && !kv_map_count(&kv->pins, &next->key)) en = next;
    }
    return en;
}

/* The oldest one that is on the disk and only put again: giving it up costs nothing but its being young. */
static kv_entry *queued_again(dm_kv *kv, const kv_entry *spare)
{
    for (kv_entry *en = kv->queued_again ? kv->queue.head : NULL; en; en = en->next)
        if (en->again && en->on_disk && en != spare) return en;
    return NULL;
}

/* Gives up the oldest unwritten entry of least value (never found and not pinned, else found and not pinned), or the end of what hangs
 * on it.  It stays readable in RAM as long as there is room.  Before any, what is on the disk already. */
bool kv_ram_give_up(dm_kv *kv, const kv_entry *spare)
{
    kv_entry *best = queued_again(kv, spare);
    if (best) {
        kv_ram_unqueue(kv, best, KV_CLEAN);
        return true;
    }
    for (kv_entry *en = kv->queue.head; en; en = en->next) {
        if (en == spare || kv_map_count(&kv->pins, &en->key)) continue;
        if (!best) best = en;
        if (en->uses) continue;
        best = en;
        break;
    }
    if (!best) return false;
    if (best->chained) best = deepest(kv, best);
    kv_ram_unqueue(kv, best, KV_CLEAN);
    if (best->chained) kv_ram_use(kv, best); /* stays in RAM as long as may be, for kv_ram_mend */
    kv->st.put_dropped += !best->on_disk;
    return true;
}

#define MEND_MAX 256

/* Is the predecessor on its way to the disk, or there?  One that was given up is queued again if there is ample room by now, after all
 * that it hangs on. */
bool kv_ram_mend(dm_kv *kv, const dm_hash *prev)
{
    kv_entry *up[MEND_MAX];
    int count = 0;
    int64_t bytes = 0;
    for (;;) {
        kv_key k = kv_key_block(prev);
        kv_entry *en = kv_ram_get(kv, &k);
        if (!en || !en->chained || en->on_disk || en->where != KV_CLEAN) break;
        bytes += (int64_t)en->n;
        if (en->denied || count == MEND_MAX || kv->st.queued_bytes + bytes > kv->opts.queue_bytes_max / 2) return false;
        up[count++] = en;
        prev = &en->behind;
    }
    while (count) kv_ram_queue(kv, up[--count]);
    return true;
}

/* ---- quotas ------------------------------------------------------------------------------------ */

static bool evict_clean(dm_kv *kv, const kv_entry *spare)
{
    for (kv_entry *en = kv->lru.tail; en; en = en->prev) {
        if (en == spare || (!en->on_disk && kv_map_count(&kv->pins, &en->key))) continue; /* R3 */
        kv_ram_remove(kv, en);
        return true;
    }
    return false;
}

void kv_ram_fit(dm_kv *kv, const kv_entry *spare)
{
    while (kv->st.queued_bytes > kv->opts.queue_bytes_max && kv_ram_give_up(kv, spare)) {}
    while (kv->st.ram_bytes > kv->opts.ram_bytes_max)
        if (!evict_clean(kv, spare) && !kv_ram_give_up(kv, spare)) break;
}

void kv_ram_free(dm_kv *kv)
{
    while (kv->queue.head) kv_ram_unqueue(kv, kv->queue.head, KV_CLEAN);
    while (kv->lru.head) kv_ram_remove(kv, kv->lru.head);
    kv_map_free(&kv->table);
    kv_map_free(&kv->by_last);
    kv_map_free(&kv->pins);
    kv_map_free(&kv->doomed);
    kv_map_free(&kv->touched);
    kv_map_free(&kv->removals);
}
