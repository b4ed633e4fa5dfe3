/* days.c — which day a time on the store clock was, and the quota that the store last had: for `kv ls`, `kv gc` and `kv stat`.
 *
 * The store clock counts bytes, not hours.  So the first transaction of a day leaves a mark in "meta": where the clock stood.  An age on
 * the clock is of the last day whose mark is not above it.  Ages that are noted for a use are rounded down to a step of the clock
 * (evict.c), and would fall below the mark of their own day; so a day begins with a step.  That ages the store by a 64th of a turnover a day.
 *
 *   "day" ‖ days since 1970 (u32 big endian)   XXH3-128 over the key and what follows; store clock (u64)
 *   "quota"                                    the same; bytes (u64) */
#include <endian.h>
#include <stdatomic.h>
#include <string.h>

#include "kvstore/kv_int.h"

#define DAY_MS 86400000
#define DAY_KEY_BYTES 7
#define NUMBER_BYTES 24

static _Atomic int64_t day_shift;

void kv_days_shift(int64_t days) { atomic_store(&day_shift, days); }

int64_t kv_today(void) { return dm_wall_ms() / DAY_MS + atomic_load(&day_shift); }

static MDB_val day_key(uint8_t out[DAY_KEY_BYTES], int64_t day)
{
    uint32_t be = htobe32((uint32_t)day);
    memcpy(out, "day", 3);
    memcpy(out + 3, &be, 4);
    return (MDB_val){ DAY_KEY_BYTES, out };
}

static void number_sum(uint8_t sum[16], const MDB_val *key, const uint8_t number[8])
{
    uint8_t all[16] = { 0 };
    size_t n = key->mv_size < 8 ? key->mv_size : 8;
    memcpy(all, key->mv_data, n);
    memcpy(all + 8, number, 8);
    dm_xxh3_128(sum, all, sizeof all);
}

static int number_put(MDB_txn *txn, MDB_dbi meta, MDB_val *key, uint64_t number)
{
    uint8_t rec[NUMBER_BYTES];
    uint64_t le = htole64(number);
    memcpy(rec + 16, &le, 8);
    number_sum(rec, key, rec + 16);
    MDB_val val = { sizeof rec, rec };
    return mdb_put(txn, meta, key, &val, 0);
}

static bool number_decode(uint64_t *number, const MDB_val *key, const MDB_val *val)
{
    uint8_t sum[16];
    if (val->mv_size != NUMBER_BYTES) return false;
    number_sum(sum, key, (const uint8_t *)val->mv_data + 16);
    if (memcmp(sum, val->mv_data, 16) != 0) return false;
    memcpy(number, (const uint8_t *)val->mv_data + 16, 8);
    *number = le64toh(*number);
    return true;
}

/* ---- reading ------------------------------------------------------------------------------------- */

int64_t kv_quota_of(MDB_txn *txn, MDB_dbi meta)
{
    MDB_val key = { 5, (void *)"quota" }, val;
    uint64_t n;
    return mdb_get(txn, meta, &key, &val) == 0 && number_decode(&n, &key, &val) && n <= INT64_MAX ? (int64_t)n : 0;
}

int kv_days_load(MDB_txn *txn, MDB_dbi meta, kv_days *d)
{
    uint8_t k[DAY_KEY_BYTES];
    MDB_cursor *cur;
    *d = (kv_days){ .today = kv_today() };
    int rc = mdb_cursor_open(txn, meta, &cur);
    if (rc) return rc;
    MDB_val key = day_key(k, 0), val;
    for (rc = mdb_cursor_get(cur, &key, &val, MDB_SET_RANGE); !rc && d->count < KV_DAYS; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT)) {
        uint32_t be;
        uint64_t clock;
        if (key.mv_size != DAY_KEY_BYTES || memcmp(key.mv_data, "day", 3) != 0) break;
        if (!number_decode(&clock, &key, &val)) continue;
        memcpy(&be, (const uint8_t *)key.mv_data + 3, 4);
        d->day[d->count] = be32toh(be);
        d->clock[d->count++] = clock;
    }
    mdb_cursor_close(cur);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

/* Of what is older than the first mark nobody knows more than that. */
int64_t kv_days_age(const kv_days *d, const kv_index *ix)
{
    uint64_t at = ix->last_used > ix->written ? ix->last_used : ix->written;
    int64_t day = d->count ? d->day[0] : d->today;
    for (int i = 0; i < d->count; i++)
        if (d->clock[i] <= at) day = d->day[i];
    return d->today > day ? d->today - day : 0;
}

/* ---- marking -------------------------------------------------------------------------------------- */

static int mark(kv_write *w, int64_t day)
{
    dm_kv *kv = w->kv;
    MDB_dbi meta = kv->db[KV_DB_META];
    uint8_t k[DAY_KEY_BYTES];
    kv_days d;
    int rc = kv_days_load(w->txn, meta, &d);
    if (rc || (d.count && d.day[d.count - 1] >= day)) return rc; /* another process was first, or the clock of the machine went back */
    uint64_t step = (uint64_t)kv->quota_pages * kv->page_bytes / 64;
    w->clock.bytes = (w->clock.bytes + step - 1) / step * step;
    MDB_val key = day_key(k, day);
    rc = number_put(w->txn, meta, &key, w->clock.bytes);
    if (rc || d.count < KV_DAYS) return rc;
    key = day_key(k, d.day[0]);
    return mdb_del(w->txn, meta, &key, NULL);
}

int kv_days_mark(kv_write *w)
{
    dm_kv *kv = w->kv;
    int64_t today = kv_today();
    if (kv->marked_day == today || today < 0 || today > UINT32_MAX) return 0;
    MDB_val key = { 5, (void *)"quota" };
    bool known = kv->opts.trim || kv_quota_of(w->txn, kv->db[KV_DB_META]) == kv->opts.disk_bytes_max; /* who cleans up has no quota of his own */
    int rc = known ? 0 : number_put(w->txn, kv->db[KV_DB_META], &key, (uint64_t)kv->opts.disk_bytes_max);
    if (!rc) rc = mark(w, today);
    if (!rc) w->day = today;
    return rc;
}
