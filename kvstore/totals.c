/* totals.c — what a store has done since it was made, over all processes: the record "totals" of the meta table.
 *
 *   0   8 each   bytes_written put_blocks put_states evicted_entries bad_entries hits misses ghost_hits ghost_tokens held_bytes
 *       day day_bytes                                                                                  (little endian)
 *    96  16      XXH3-128 of what stands before
 *
 * It is read and written inside the write transaction, so processes add to one another's.  What a process counts without writing
 * (hits and such) is added with its next commit; what it counted last is lost when nothing follows.  A record that is missing or damaged
 * begins at zero: it is figures, nothing hangs on it but the write budget of the day. */
#include <endian.h>
#include <string.h>

#include "kvstore/kv_int.h"

#define FIELDS 12

static int64_t *field(dm_kv_totals *t, int i)
{
    int64_t *const f[FIELDS] = { &t->bytes_written, &t->put_blocks, &t->put_states, &t->evicted_entries, &t->bad_entries, &t->hits, &t->misses, &t->ghost_hits,
        &t->ghost_tokens, &t->held_bytes, &t->day, &t->day_bytes };
    return f[i];
}

static MDB_val name(void) { return (MDB_val){ 6, (void *)"totals" }; }

void kv_totals_read(MDB_txn *txn, MDB_dbi meta, dm_kv_totals *t)
{
    MDB_val key = name(), val;
    uint8_t sum[16];
    *t = (dm_kv_totals){ 0 };
    if (mdb_get(txn, meta, &key, &val) != 0 || val.mv_size != FIELDS * 8 + 16) return;
    const uint8_t *p = val.mv_data;
    dm_xxh3_128(sum, p, FIELDS * 8);
    if (memcmp(sum, p + FIELDS * 8, 16) != 0) return;
    for (int i = 0; i < FIELDS; i++) {
        uint64_t v;
        memcpy(&v, p + 8 * i, 8);
        *field(t, i) = (int64_t)le64toh(v);
    }
}

/* Days are those of UTC. */
static void begin_day(kv_write *w)
{
    int64_t day = kv_today();
    if (day == w->totals.day) return;
    w->totals.day = day;
    w->totals.day_bytes = 0;
}

void kv_totals_begin(kv_write *w)
{
    kv_totals_read(w->txn, w->kv->db[KV_DB_META], &w->totals);
    begin_day(w);
}

int64_t kv_budget_left(const kv_write *w)
{
    int64_t most = w->kv->opts.write_bytes_day;
    if (!most) return INT64_MAX;
    return most > w->totals.day_bytes ? most - w->totals.day_bytes : 0;
}

int kv_totals_write(kv_write *w)
{
    dm_kv *kv = w->kv;
    uint8_t rec[FIELDS * 8 + 16];
    pthread_mutex_lock(&kv->lock);
    const dm_kv_stat *st = &kv->st;
    w->now = (dm_kv_totals){ .bad_entries = st->bad_entries, .hits = st->hits, .misses = st->misses, .ghost_hits = st->ghost_hits, .ghost_tokens = st->ghost_tokens };
    pthread_mutex_unlock(&kv->lock);
    dm_kv_totals *t = &w->totals, add = { .bytes_written = w->written_bytes, .put_blocks = w->written[KV_BLOCK], .put_states = w->written[KV_STATE],
        .evicted_entries = w->evicted, .bad_entries = w->now.bad_entries - kv->told.bad_entries, .hits = w->now.hits - kv->told.hits,
        .misses = w->now.misses - kv->told.misses, .ghost_hits = w->now.ghost_hits - kv->told.ghost_hits,
        .ghost_tokens = w->now.ghost_tokens - kv->told.ghost_tokens, .held_bytes = w->held_bytes, .day_bytes = w->written_bytes };
    for (int i = 0; i < FIELDS; i++) *field(t, i) += *field(&add, i);
    for (int i = 0; i < FIELDS; i++) {
        uint64_t v = htole64((uint64_t)*field(t, i));
        memcpy(rec + 8 * i, &v, 8);
    }
    dm_xxh3_128(rec + FIELDS * 8, rec, FIELDS * 8);
    MDB_val key = name(), val = { sizeof rec, rec };
    return mdb_put(w->txn, kv->db[KV_DB_META], &key, &val, 0);
}
