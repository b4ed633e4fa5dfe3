/* list.c — what is on the disk, entry by entry. */
#include <string.h>

#include "kvstore/kv_int.h"

/* ---- a prompt ----------------------------------------------------------------------------------- */

/* Keys H(0 .. *count-1) of the whole blocks of ids that are on the disk without a gap. */
static int durable_chain(dm_kv *kv, MDB_txn *txn, const int32_t *ids, int64_t blocks, dm_hash *chain, int64_t *count)
{
    dm_hash h = kv->opts.root;
    kv_index ix;
    for (*count = 0; *count < blocks; ++*count) {
        dm_kv_chain(&h, &h, ids + *count * DM_KV_BLOCK);
        kv_key k = kv_key_block(&h);
        int rc = kv_index_get(kv, txn, &k, &ix);
        if (rc) return rc == MDB_NOTFOUND ? 0 : DM_EIO;
        chain[*count] = h;
    }
    return 0;
}

int dm_kv_durable(dm_kv *kv, const int32_t *ids, int64_t n, int64_t *pos, dm_err *e)
{
    *pos = 0;
    if (n < 0 || (n && !ids)) return dm_err_set(e, DM_EINVAL, "kv.durable", "bad length %lld", (long long)n);
    dm_hash *chain = dm_calloc((size_t)(n / DM_KV_BLOCK) + 1, sizeof *chain);
    MDB_txn *txn = NULL;
    MDB_cursor *cur = NULL;
    int64_t count = 0;
    int rc = chain ? 0 : DM_ENOMEM;
    if (!rc && kv_txn_begin(kv, false, &txn) != 0) rc = DM_EIO;
    if (!rc) rc = durable_chain(kv, txn, ids, n / DM_KV_BLOCK, chain, &count);
    if (!rc && mdb_cursor_open(txn, kv->db[KV_DB_STATES], &cur) != 0) rc = DM_EIO;
    for (int64_t b = count; !rc && !*pos && b >= 0; b--) {
        int64_t room = n - b * DM_KV_BLOCK;
        kv_key best;
        if (kv_disk_state(kv, cur, b ? &chain[b - 1] : &kv->opts.root, ids + b * DM_KV_BLOCK, room < DM_KV_BLOCK ? (int)room : DM_KV_BLOCK - 1, &best))
            *pos = b * DM_KV_BLOCK + best.tail_count;
    }
    if (cur) mdb_cursor_close(cur);
    if (txn) kv_txn_end(kv, txn);
    dm_free(chain);
    return rc ? dm_err_set(e, rc, "kv.durable", "%s: %s", kv->dir, dm_err_text(rc)) : 0;
}
