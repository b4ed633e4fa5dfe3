/* slots.c — the file of payloads.
 *
 * slots.dat is a row of slots of one size, an extent each.  LMDB would copy every payload through its own dirty pages and the page cache;
 * here a batch goes to the disk as it lies in memory, O_DIRECT where the file system has it and several writes at a time.
 *
 * Order of one transaction: slots are taken, their extents written, slots.dat synced, and only then is the transaction committed
 * that names them (in data.mdb).  So
 *   S1  a slot that some state of data.mdb names has been on the disk, whole, before that state could be
 *   S2  a slot is written only if no state that could come back names it.  NOMETASYNC may lose the last commit: what transaction T
 *       freed may be written from T+2 on (the commit of T+1 has synced T's root), or once a sync has followed T
 *   S3  slots are taken and written only while LMDB's write transaction is held, which is one at a time over all processes
 *   S4  slots.dat never takes more room than the quota leaves beside data.mdb: free slots above that are made holes
 * A reader of another process may see its slot overwritten; the extent names its entry and carries a checksum (load.c). */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "kvstore/kv_int.h"

#define WRITERS 4                    /* writes in flight */
#define SYNC_BYTES (8 << 20)         /* of a batch: so often its sync is begun while more is written */
#define GROW_SLOTS 16                /* the file grows by so many at most, so that the disk sees long runs */
#define SLOTS_MAX ((uint64_t)1 << 40)
#define DISK_KEEP_BYTES (64 << 20)

/* ---- the file ---------------------------------------------------------------------------------- */

int kv_slots_open(dm_kv *kv, dm_err *e)
{
    bool ro = kv->opts.read_only;
    char *path = dm_path_join(kv->dir, "slots.dat");
    if (!path) return dm_err_set(e, DM_ENOMEM, "kv.open", "out of memory");
    int rc = 0, flags = (ro ? O_RDONLY : O_RDWR | O_CREAT) | O_CLOEXEC | O_NONBLOCK;
    struct stat st;
    kv->slots_fd = open(path, flags, 0600);
    if (kv->slots_fd < 0 && !(ro && errno == ENOENT)) rc = dm_err_sys(e, errno, "kv.open", "%s", path);
    if (!rc && kv->slots_fd >= 0 && (fstat(kv->slots_fd, &st) != 0 || !S_ISREG(st.st_mode)))
        rc = dm_err_set(e, DM_ESTORE, "kv.open", "%s: slots.dat is not a regular file", kv->dir);
    if (!rc) kv->slots_direct = open(path, flags | O_DIRECT, 0600); /* refused by tmpfs and others: then through the page cache */
    dm_free(path);
    return rc;
}

void kv_slots_close(dm_kv *kv)
{
    if (kv->slots_fd >= 0) close(kv->slots_fd);
    if (kv->slots_direct >= 0) close(kv->slots_direct);
    kv->slots_fd = kv->slots_direct = -1;
}

off_t kv_slot_offset(const dm_kv *kv, uint64_t slot) { return (off_t)(slot * kv->extent_bytes); }

int64_t kv_slots_bytes(const dm_kv *kv)
{
    struct stat st;
    return kv->slots_fd >= 0 && fstat(kv->slots_fd, &st) == 0 ? (int64_t)st.st_blocks * 512 : 0;
}

static bool use_direct(dm_kv *kv)
{
    pthread_mutex_lock(&kv->lock);
    bool direct = kv->slots_direct >= 0 && !kv->direct_refused;
    pthread_mutex_unlock(&kv->lock);
    return direct;
}

/* Some file systems open with O_DIRECT and then refuse to read or write. */
static void refuse_direct(dm_kv *kv)
{
    pthread_mutex_lock(&kv->lock);
    kv->direct_refused = true;
    pthread_mutex_unlock(&kv->lock);
}

/* 0; 1: the file ends before; an errno, negative. */
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

int kv_slot_read(dm_kv *kv, uint64_t slot, uint8_t *buf)
{
    off_t at = kv_slot_offset(kv, slot);
    if (dm_fault("kv.read")) return DM_EIO;
    if (kv->slots_fd < 0) return 1;
    if (use_direct(kv)) {
        int rc = read_fully(kv->slots_direct, buf, kv->extent_bytes, at);
        if (rc != -EINVAL) return rc < 0 ? DM_EIO : rc;
        refuse_direct(kv);
    }
    int rc = read_fully(kv->slots_fd, buf, kv->extent_bytes, at);
    return rc < 0 ? DM_EIO : rc;
}

static int write_fully(int fd, const uint8_t *p, size_t n, off_t at)
{
    while (n) {
        ssize_t put = pwrite(fd, p, n, at);
        if (put < 0 && errno == EINTR) continue;
        if (put <= 0) return put < 0 ? errno : ENOSPC;
        p += put, at += put, n -= (size_t)put;
    }
    return 0;
}

static int slot_write(dm_kv *kv, uint64_t slot, const uint8_t *x)
{
    off_t at = kv_slot_offset(kv, slot);
    if (dm_fault("kv.write")) return ENOSPC;
    if (use_direct(kv)) {
        int rc = write_fully(kv->slots_direct, x, kv->extent_bytes, at);
        if (rc != EINVAL) return rc;
        refuse_direct(kv);
    }
    return write_fully(kv->slots_fd, x, kv->extent_bytes, at);
}

/* ---- writing a batch ------------------------------------------------------------------------------ */

typedef struct burst {
    kv_write *w;
    atomic_size_t next, unsynced;
    atomic_bool syncing;
    atomic_int error;
} burst;

static int put_one(dm_kv *kv, const kv_put *p, uint8_t **stage)
{
    const kv_entry *en = p->en;
    const kv_part name = { &en->key, p->part, p->parts, en->n, p->seq };
    size_t room = kv->payload_bytes, at = p->part * room, n = en->n - at < room ? en->n - at : room;
    if (en->extent) { /* its header belongs to the writer, readers look behind it */
        kv_extent_seal(en->extent, kv->extent_bytes, &name, en->n);
        return slot_write(kv, p->slot, en->extent);
    }
    if (!*stage) *stage = dm_aligned(kv->page_bytes, kv->extent_bytes);
    if (!*stage) return ENOMEM;
    kv_extent_write(*stage, kv->extent_bytes, &name, en->bytes + at, n);
    return slot_write(kv, p->slot, *stage);
}

/* A disk with a cache takes as long to sync a batch as to be given it; so one of the threads sees to it that what is there is on its way,
 * while the others go on.  What counts is the sync at the end (S1); but an error is told to one caller only, so it is kept. */
static int sync_ahead(burst *b)
{
    dm_kv *kv = b->w->kv;
    if (atomic_fetch_add(&b->unsynced, kv->extent_bytes) + kv->extent_bytes < SYNC_BYTES || atomic_exchange(&b->syncing, true)) return 0;
    atomic_store(&b->unsynced, 0);
    int rc = dm_fault("kv.slots.ahead") ? EIO : fdatasync(kv->slots_fd) == 0 ? 0 : errno;
    atomic_store(&b->syncing, false);
    return rc;
}

static void *burst_main(void *arg)
{
    burst *b = arg;
    uint8_t *stage = NULL;
    for (size_t i; !atomic_load(&b->error) && (i = atomic_fetch_add(&b->next, 1)) < b->w->puts_count;) {
        int rc = put_one(b->w->kv, &b->w->puts[i], &stage);
        if (!rc) rc = sync_ahead(b);
        if (rc) atomic_store(&b->error, rc);
    }
    dm_free(stage);
    return NULL;
}

int kv_slots_write(kv_write *w)
{
    dm_kv *kv = w->kv;
    burst b = { .w = w };
    pthread_t threads[WRITERS - 1];
    size_t started = 0;
    if (!w->puts_count) return 0;
    /* Threads of one batch: starting them costs nothing beside its writes, and signals are blocked as in their starter. */
    while (started < WRITERS - 1 && started + 1 < w->puts_count && pthread_create(&threads[started], NULL, burst_main, &b) == 0) started++;
    burst_main(&b);
    for (size_t i = 0; i < started; i++) pthread_join(threads[i], NULL);
    int rc = atomic_load(&b.error);
    if (!rc && dm_fault("kv.slots.written")) rc = EIO;
    if (!rc && fdatasync(kv->slots_fd) != 0) rc = errno;
    if (!rc && dm_fault("kv.slots.synced")) rc = EIO;
    return rc;
}

/* ---- free slots ------------------------------------------------------------------------------------ */

/* S2. */
static bool may_write(const kv_write *w, uint64_t since) { return since + 2 <= w->id || since <= w->kv->synced_txn; }

static int free_put(kv_write *w, const kv_free *f)
{
    uint8_t k[8], rec[KV_FREE_BYTES];
    kv_free_encode(k, rec, f);
    MDB_val key = { sizeof k, k }, val = { sizeof rec, rec };
    return mdb_put(w->txn, w->kv->db[KV_DB_FREE], &key, &val, 0);
}

static int free_del(kv_write *w, uint64_t slot)
{
    uint8_t k[8], rec[KV_FREE_BYTES];
    kv_free_encode(k, rec, &(kv_free){ .slot = slot });
    MDB_val key = { sizeof k, k };
    return mdb_del(w->txn, w->kv->db[KV_DB_FREE], &key, NULL);
}

int kv_slot_free(kv_write *w, uint64_t slot) { return free_put(w, &(kv_free){ .slot = slot, .since = w->id }); }

/* Slots that the file may take beside data.mdb. */
static int64_t slots_limit(const kv_write *w)
{
    int64_t pages = w->kv->quota_pages - KV_SLACK_PAGES - w->pages_index;
    return pages > 0 ? pages / (int64_t)w->kv->extent_pages : 0;
}

static int64_t slots_more(const kv_write *w) { return slots_limit(w) - (int64_t)(w->clock.slots - w->clock.holes); }

/* Up to n free slots, holes or not holes, that may be written now, from slot `from` on.  *late: there are others. */
static int free_find(kv_write *w, bool holes, uint64_t from, uint32_t n, uint64_t *slots, uint32_t *count, bool *late)
{
    uint8_t k[8], rec[KV_FREE_BYTES];
    MDB_cursor *cur;
    int rc = mdb_cursor_open(w->txn, w->kv->db[KV_DB_FREE], &cur);
    if (rc) return rc;
    kv_free_encode(k, rec, &(kv_free){ .slot = from });
    MDB_val key = { sizeof k, k }, val;
    for (rc = mdb_cursor_get(cur, &key, &val, MDB_SET_RANGE); !rc && *count < n; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT)) {
        kv_free f;
        if (!kv_free_decode(&f, key.mv_data, key.mv_size, val.mv_data, val.mv_size) || f.slot >= w->clock.slots) continue; /* the sweep mends it */
        if (f.hole != holes) continue;
        if (may_write(w, f.since)) slots[(*count)++] = f.slot;
        else *late = true;
    }
    mdb_cursor_close(cur);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

/* A cache does not take the last of a disk that others need, the journal of sessions among them: where the file would have to grow
 * into the reserve, it does not. */
bool kv_disk_short(const dm_kv *kv, int64_t bytes)
{
    struct statvfs fs;
    if (statvfs(kv->dir, &fs) != 0) return false;
    uint64_t unit = fs.f_frsize ? fs.f_frsize : fs.f_bsize, keep = (uint64_t)fs.f_blocks * unit / 8;
    if (keep > DISK_KEEP_BYTES) keep = DISK_KEEP_BYTES;
    return (uint64_t)fs.f_bavail * unit < keep + (uint64_t)bytes;
}

/* Room on the disk for slots up to `slots`.  Where the file system cannot say beforehand, the write will. */
static int grow_file(kv_write *w, uint64_t slots)
{
    dm_kv *kv = w->kv;
    struct stat st;
    off_t need = kv_slot_offset(kv, slots), more = GROW_SLOTS * (off_t)kv->extent_bytes, most = kv_slot_offset(kv, w->clock.holes + (uint64_t)slots_limit(w));
    if (fstat(kv->slots_fd, &st) != 0) return errno;
    if (st.st_size >= need) return 0;
    if (dm_fault("kv.grow")) return ENOSPC;
    off_t to = st.st_size + more > need ? st.st_size + more : need;
    if (to > most) to = most > need ? most : need;
    if (fallocate(kv->slots_fd, 0, st.st_size, to - st.st_size) == 0) return 0;
    if (errno == ENOSPC && fallocate(kv->slots_fd, 0, st.st_size, need - st.st_size) == 0) return 0;
    return errno == EOPNOTSUPP || errno == ENOSYS || errno == EINVAL ? 0 : errno;
}

/* Are there free slots that may be written later?  Some may be missing from the list, by damage. */
static int none_now(kv_write *w, uint32_t n, uint64_t *slots)
{
    uint32_t count = 0;
    bool late = false;
    int rc = free_find(w, false, 0, n, slots, &count, &late);
    if (rc || late) return rc ? rc : KV_LATER;
    uint64_t live = (uint64_t)w->pages_live / w->kv->extent_pages;
    if (w->clock.slots - w->clock.holes <= live + count || w->slots_swept) return MDB_NOTFOUND;
    w->slots_swept = true;
    rc = kv_slots_sweep(w);
    return rc ? rc : KV_LATER;
}

int kv_slots_take(kv_write *w, uint32_t n, uint64_t *slots)
{
    dm_kv *kv = w->kv;
    uint32_t count = 0, holes_from, grown_from;
    bool late = false, others = false;
    int rc = free_find(w, false, w->free_from, n, slots, &count, &late);
    if (rc) return rc;
    uint64_t from = count ? slots[count - 1] + 1 : w->free_from;
    holes_from = count;
    int64_t more = slots_more(w);
    uint32_t want = more >= (int64_t)(n - count) ? n : count; /* all or none */
    if (count < n && want == n) {
        if (kv_disk_short(kv, (int64_t)(n - count) * (int64_t)kv->extent_bytes)) return ENOSPC;
        if (w->clock.holes) rc = free_find(w, true, 0, n, slots, &count, &others);
        if (rc) return rc;
        grown_from = count;
        rc = grow_file(w, w->clock.slots + (n - count));
        if (rc) return rc;
        for (uint64_t next = w->clock.slots; count < n;) slots[count++] = next++;
    } else {
        grown_from = count;
    }
    if (count < n) return none_now(w, n, slots);
    for (uint32_t i = 0; i < grown_from && !rc; i++) rc = free_del(w, slots[i]);
    if (rc) return rc == MDB_NOTFOUND ? MDB_CORRUPTED : rc;
    w->free_from = from;
    w->clock.holes -= grown_from - holes_from;
    w->clock.slots += n - grown_from;
    return 0;
}

/* Slots that hold nothing and take room: above the quota, or all of them. */
static int64_t slots_over(const kv_write *w)
{
    int64_t used = (int64_t)(w->clock.slots - w->clock.holes);
    return w->kv->opts.trim ? used - w->pages_live / (int64_t)w->kv->extent_pages : used - slots_limit(w);
}

/* After the quota was lowered or data.mdb has grown, or to trim: free slots become holes. */
int kv_slots_give_back(kv_write *w)
{
    dm_kv *kv = w->kv;
    uint64_t slots[64];
    struct stat st;
    off_t end = kv_slot_offset(kv, w->clock.slots);
    for (uint64_t from = 0; slots_over(w) > 0 && !kv->slots_no_holes;) {
        int64_t over = slots_over(w);
        uint32_t n = over < (int64_t)DM_COUNT(slots) ? (uint32_t)over : (uint32_t)DM_COUNT(slots), count = 0;
        bool late = false;
        int rc = free_find(w, false, from, n, slots, &count, &late);
        if (rc) return rc;
        if (!count) break;
        for (uint32_t i = 0; i < count && !rc; i++) {
            if (fallocate(kv->slots_fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, kv_slot_offset(kv, slots[i]), (off_t)kv->extent_bytes) != 0) {
                kv->slots_no_holes = true; /* this file system keeps what it has; the slots stay free */
                return 0;
            }
            rc = free_put(w, &(kv_free){ .slot = slots[i], .since = 0, .hole = true });
            w->clock.holes++;
        }
        if (rc) return rc;
        from = slots[count - 1] + 1;
    }
    if (slots_over(w) >= 0 && fstat(kv->slots_fd, &st) == 0 && st.st_size > end && ftruncate(kv->slots_fd, end) != 0) return errno;
    return 0;
}

/* ---- sweep ------------------------------------------------------------------------------------------- */

typedef struct bits {
    uint8_t *used, *free; /* owned; a bit per slot */
    uint64_t count;
} bits;

static bool bit_get(const uint8_t *b, uint64_t i) { return b[i / 8] >> i % 8 & 1; }
static void bit_set(uint8_t *b, uint64_t i) { b[i / 8] |= (uint8_t)(1u << i % 8); }

/* Slots that the file has. */
static uint64_t slots_in_file(const dm_kv *kv)
{
    struct stat st;
    uint64_t n = fstat(kv->slots_fd, &st) == 0 ? ((uint64_t)st.st_size + kv->extent_bytes - 1) / kv->extent_bytes : 0;
    return n < SLOTS_MAX ? n : SLOTS_MAX;
}

/* Parts whose place is damaged, outside of the file, or another's are dropped: reading them would say the same. */
static int sweep_parts(kv_write *w, bits *b)
{
    MDB_cursor *cur;
    MDB_val key, val;
    int rc = mdb_cursor_open(w->txn, w->kv->db[KV_DB_PARTS], &cur);
    if (rc) return rc;
    w->pages_live = 0;
    for (rc = mdb_cursor_get(cur, &key, &val, MDB_FIRST); !rc; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT)) {
        uint64_t slot;
        bool good = kv_part_decode(&slot, key.mv_data, key.mv_size, val.mv_data, val.mv_size) && slot < b->count && !bit_get(b->used, slot);
        if (good) bit_set(b->used, slot), w->pages_live += (int64_t)w->kv->extent_pages;
        else rc = mdb_cursor_del(cur, 0);
        if (rc) break;
    }
    mdb_cursor_close(cur);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

static int sweep_free(kv_write *w, bits *b)
{
    MDB_cursor *cur;
    MDB_val key, val;
    int rc = mdb_cursor_open(w->txn, w->kv->db[KV_DB_FREE], &cur);
    if (rc) return rc;
    w->clock.holes = 0;
    for (rc = mdb_cursor_get(cur, &key, &val, MDB_FIRST); !rc; rc = mdb_cursor_get(cur, &key, &val, MDB_NEXT)) {
        kv_free f;
        bool good = kv_free_decode(&f, key.mv_data, key.mv_size, val.mv_data, val.mv_size) && f.slot < b->count && !bit_get(b->used, f.slot);
        if (good) bit_set(b->free, f.slot), w->clock.holes += f.hole;
        else rc = mdb_cursor_del(cur, 0);
        if (rc) break;
    }
    mdb_cursor_close(cur);
    return rc == MDB_NOTFOUND ? 0 : rc;
}

int kv_slots_sweep(kv_write *w)
{
    bits b = { .count = slots_in_file(w->kv) };
    b.used = dm_calloc(b.count / 8 + 1, 1);
    b.free = dm_calloc(b.count / 8 + 1, 1);
    int rc = b.used && b.free ? sweep_parts(w, &b) : ENOMEM;
    if (!rc) rc = sweep_free(w, &b);
    /* The file may have been made longer than was ever used. */
    if (w->clock.slots > b.count) w->clock.slots = b.count;
    for (uint64_t i = b.count; !rc && i > w->clock.slots; i--)
        if (bit_get(b.used, i - 1) || bit_get(b.free, i - 1)) w->clock.slots = i;
    for (uint64_t i = 0; !rc && i < w->clock.slots; i++)
        if (!bit_get(b.used, i) && !bit_get(b.free, i)) rc = kv_slot_free(w, i);
    dm_free(b.used);
    dm_free(b.free);
    w->free_from = 0;
    return rc;
}
