/* load.c — from disk to RAM, verified.
 *
 * A read transaction is kept only as long as it takes to look the pointers up; file offset = pointer - map base.  The pages are then
 * read with pread, O_DIRECT where the filesystem has it: reading the map itself faults page by page and is up to 35 times
 * slower when cold.  Once the transaction has ended the pages may be reused by another process (by this one not: the
 * key is pinned).  The extent's own key and checksum tell; on a mismatch the entry is looked up once more and read with
 * the transaction held, and only a second mismatch makes it bad. */
#include <errno.h>
#include <string.h>
#include <unistd.h>

#include "kvstore/kv_int.h"

/* ---- page-aligned buffers of extent_pages pages ------------------------------------------- */

static uint8_t *buf_take(dm_kv *kv)
{
    uint8_t *b = NULL;
    pthread_mutex_lock(&kv->lock);
    if (kv->bufs_count) b = kv->bufs[--kv->bufs_count];
    pthread_mutex_unlock(&kv->lock);
    return b ? b : dm_aligned(kv->page_bytes, kv->extent_pages * kv->page_bytes);
}

static void buf_give(dm_kv *kv, uint8_t *b)
{
    pthread_mutex_lock(&kv->lock);
    if (kv->bufs_count < KV_BUFS) kv->bufs[kv->bufs_count++] = b, b = NULL;
    pthread_mutex_unlock(&kv->lock);
    dm_free(b);
}

/* ---- reading the pages ------------------------------------------------------------------------ */

/* 0; 1: the file ends before; DM_EIO. */
static int read_fully(int fd, uint8_t *dst, size_t n, off_t at)
{
    while (n) {
        ssize_t got = pread(fd, dst, n, at);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return -errno;
        if (got == 0) return 1;
        dst += got, at += got, n -= (size_t)got;
    }
    return 0;
}

static int read_extent(dm_kv *kv, uint8_t *buf, off_t at)
{
    size_t n = kv->extent_pages * kv->page_bytes;
    if (dm_fault("kv.read")) return DM_EIO;
    pthread_mutex_lock(&kv->lock);
    bool direct = kv->fd_direct >= 0 && !kv->direct_refused;
    pthread_mutex_unlock(&kv->lock);
    if (direct) {
        int rc = read_fully(kv->fd_direct, buf, n, at);
        if (rc != -EINVAL) return rc < 0 ? DM_EIO : rc;
        pthread_mutex_lock(&kv->lock); /* some filesystems open with O_DIRECT and refuse to read */
        kv->direct_refused = true;
        pthread_mutex_unlock(&kv->lock);
    }
    int rc = read_fully(kv->fd, buf, n, at);
    return rc < 0 ? DM_EIO : rc;
}

/* ---- looking up -------------------------------------------------------------------------------- */

/* Offset of the first page of a part in data.mdb; MDB_NOTFOUND also for a value that cannot be an extent. */
static int locate(dm_kv *kv, MDB_txn *txn, const kv_key *k, uint32_t part, uintptr_t base, off_t *at)
{
    uint8_t buf[KV_KEY_MAX];
    MDB_val key = { kv_key_encode_part(buf, k, part), buf }, val;
    int rc = mdb_get(txn, kv->db[KV_DB_EXTENTS], &key, &val);
    if (rc) return rc;
    uintptr_t p = (uintptr_t)val.mv_data;
    if (val.mv_size != kv->extent_bytes || p < base + KV_PAGE_HEADER || (p - base - KV_PAGE_HEADER) % kv->page_bytes) return MDB_NOTFOUND;
    *at = (off_t)(p - base - KV_PAGE_HEADER);
    return 0;
}

typedef struct plan {
    kv_index ix;
    off_t *at;        /* owned or `few`; one per part */
    off_t few[8];
} plan;

static void plan_free(plan *p)
{
    if (p->at != p->few) dm_free(p->at);
    p->at = NULL;
}

static int make_plan(dm_kv *kv, MDB_txn *txn, const kv_key *k, plan *p)
{
    uint8_t buf[KV_KEY_MAX];
    MDB_val key = { kv_key_encode(buf, k), buf }, val;
    p->at = NULL;
    int rc = mdb_get(txn, kv_index_db(kv, k), &key, &val);
    if (rc) return rc == MDB_NOTFOUND ? DM_EMISS : DM_EIO;
    if (!kv_index_decode(&p->ix, k, val.mv_data, val.mv_size, kv->extent_bytes)) return DM_ECORRUPT;
    uintptr_t base = kv_map_base(kv, &val);
    p->at = p->ix.parts <= DM_COUNT(p->few) ? p->few : dm_calloc(p->ix.parts, sizeof *p->at);
    if (!p->at) return DM_ENOMEM;
    for (uint32_t i = 0; i < p->ix.parts; i++) {
        rc = locate(kv, txn, k, i, base, &p->at[i]);
        if (rc == MDB_NOTFOUND || rc == MDB_CORRUPTED || rc == MDB_PAGE_NOTFOUND) return DM_ECORRUPT;
        if (rc) return DM_EIO;
    }
    return 0;
}

static int fill(dm_kv *kv, const kv_key *k, const plan *p, kv_entry *en, uint8_t *buf)
{
    size_t done = 0;
    for (uint32_t i = 0; i < p->ix.parts; i++) {
        int rc = read_extent(kv, buf, p->at[i]);
        if (rc < 0) return rc;
        size_t n;
        const uint8_t *payload = rc == 1 ? NULL
            : kv_extent_check(buf + KV_PAGE_HEADER, kv->extent_bytes, k, i, p->ix.parts, p->ix.total, &n);
        if (!payload) return DM_ECORRUPT;
        memcpy(en->bytes + done, payload, n);
        done += n;
    }
    return done == en->n ? 0 : DM_ECORRUPT;
}

/* held: the transaction stays open during the read, so that no process can reuse the pages. */
static int attempt(dm_kv *kv, const kv_key *k, bool held, uint8_t *buf, kv_entry **out)
{
    MDB_txn *txn;
    plan p;
    if (kv_txn_begin(kv, false, &txn) != 0) return DM_EIO;
    int rc = make_plan(kv, txn, k, &p);
    if (rc || !held) {
        kv_txn_end(kv, txn);
        txn = NULL;
    }
    kv_entry *en = NULL;
    if (!rc && k->kind == KV_BLOCK && p.ix.total != kv->opts.block_bytes) rc = DM_ECORRUPT;
    if (!rc) {
        en = kv_entry_new(k, (size_t)p.ix.total, NULL);
        rc = en ? fill(kv, k, &p, en, buf) : DM_ENOMEM;
    }
    if (txn) kv_txn_end(kv, txn);
    plan_free(&p);
    if (rc) {
        kv_entry_release(kv, en);
        return rc;
    }
    en->on_disk = true;
    *out = en;
    return 0;
}

int kv_load(dm_kv *kv, const kv_key *k, kv_entry **out)
{
    uint8_t *buf = buf_take(kv);
    if (!buf) return DM_ENOMEM;
    int rc = attempt(kv, k, false, buf, out);
    if (rc == DM_ECORRUPT) rc = attempt(kv, k, true, buf, out);
    buf_give(kv, buf);
    return rc;
}

/* ---- bad entries -------------------------------------------------------------------------------- */

/* The key is not offered from now on, and deleted by the writer. */
void kv_remove_later(dm_kv *kv, const kv_key *k)
{
    if (kv_map_find(&kv->removals, k)) return;
    if (!kv_map_add(&kv->doomed, k, 1)) return; /* out of memory: it will be found bad again */
    if (!kv_map_add(&kv->removals, k, 1)) {
        kv_map_add(&kv->doomed, k, -1);
        return;
    }
    kv->removal_no++;
    pthread_cond_signal(&kv->work);
}

void kv_bad_entry(dm_kv *kv, const kv_key *k, const char *why)
{
    char name[96];
    kv_key_text(name, k);
    pthread_mutex_lock(&kv->lock);
    kv->st.bad_entries++;
    kv_remove_later(kv, k);
    pthread_mutex_unlock(&kv->lock);
    dm_log(DM_LOG_WARN, "kv: %s: %s is bad (%s); it is removed and counts as a miss", kv->dir, name, why);
}
