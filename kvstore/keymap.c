/* keymap.c — open-addressing hash map over entry keys (linear probing, deletion by shifting back). */
#include <string.h>

#include "kvstore/kv_int.h"

/* Both hashes in the key are BLAKE2b output, so any eight bytes of them are spread already. */
static size_t home(const kv_map *m, const kv_key *k)
{
    uint64_t a, b;
    memcpy(&a, k->hash.b, 8);
    memcpy(&b, k->tail.b, 8);
    return (size_t)(a ^ (b * 0x9E3779B97F4A7C15u) ^ k->kind) & (m->cap - 1);
}

static size_t probe(const kv_map *m, const kv_key *k)
{
    size_t i = home(m, k);
    while (m->slots[i].key.kind && !kv_key_equal(&m->slots[i].key, k)) i = (i + 1) & (m->cap - 1);
    return i;
}

kv_slot *kv_map_find(const kv_map *m, const kv_key *k)
{
    if (!m->cap) return NULL;
    kv_slot *s = &m->slots[probe(m, k)];
    return s->key.kind ? s : NULL;
}

static bool grow(kv_map *m)
{
    kv_map bigger = { .cap = m->cap ? m->cap * 2 : 64, .used = m->used };
    bigger.slots = dm_calloc(bigger.cap, sizeof *bigger.slots);
    if (!bigger.slots) return false;
    for (size_t i = 0; i < m->cap; i++)
        if (m->slots[i].key.kind) bigger.slots[probe(&bigger, &m->slots[i].key)] = m->slots[i];
    dm_free(m->slots);
    *m = bigger;
    return true;
}

kv_slot *kv_map_put(kv_map *m, const kv_key *k)
{
    kv_slot *s = kv_map_find(m, k);
    if (s) return s;
    if (m->used * 4 >= m->cap * 3 && !grow(m)) return NULL;
    s = &m->slots[probe(m, k)];
    memset(s, 0, sizeof *s);
    s->key = *k;
    m->used++;
    return s;
}

void kv_map_del(kv_map *m, kv_slot *s)
{
    size_t hole = (size_t)(s - m->slots), mask = m->cap - 1;
    for (size_t i = (hole + 1) & mask; m->slots[i].key.kind; i = (i + 1) & mask) {
        /* An element may fill the hole unless its home lies cyclically in (hole, i]. */
        size_t h = home(m, &m->slots[i].key);
        if (((i - h) & mask) >= ((i - hole) & mask)) {
            m->slots[hole] = m->slots[i];
            hole = i;
        }
    }
    memset(&m->slots[hole], 0, sizeof m->slots[hole]);
    m->used--;
}

bool kv_map_add(kv_map *m, const kv_key *k, int64_t by)
{
    kv_slot *s = kv_map_put(m, k);
    if (!s) return false;
    s->v.count += by;
    if (s->v.count == 0) kv_map_del(m, s);
    return true;
}

int64_t kv_map_count(const kv_map *m, const kv_key *k)
{
    const kv_slot *s = kv_map_find(m, k);
    return s ? s->v.count : 0;
}

void kv_map_clear(kv_map *m)
{
    if (m->used) memset(m->slots, 0, m->cap * sizeof *m->slots);
    m->used = 0;
}

void kv_map_free(kv_map *m)
{
    dm_free(m->slots);
    *m = (kv_map){ 0 };
}
