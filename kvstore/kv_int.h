/* kv_int.h — what the files of the store share.  kvstore.h is the contract.
 *
 * Who does what
 *   format.c   the bytes on disk: keys, extent header, index record, meta record
 *   keymap.c   hash map from an entry's key to a number or pointer
 *   env.c      the LMDB environment: opening, refusing, transactions, foreign codes
 *   pages.c    checks LMDB's own pages before they are trusted
 *   slots.c    the file of payloads: which slots are free, writing a batch of them
 *   ram.c      RAM tier: entries, LRU, the queue of unwritten ones, pins
 *   load.c     disk -> RAM: O_DIRECT reads with verification
 *   ahead.c    several of these in flight, ahead of who reads a hit in order
 *   find.c     the deepest usable cut of a prompt; reading a hit
 *   totals.c   what was done over all processes, and the write budget
 *   passed.c   states that a hit passed by: kept young, or let go first
 *   evict.c    what leaves the disk tier, and removal
 *   lease.c    what sleeping sessions keep from leaving
 *   ghost.c    what eviction cost
 *   writer.c   the one thread that owns the write transaction
 *   store.c    open, close, put, flush, stat
 *   verify.c   verify and inspect
 *   list.c     what is on the disk, entry by entry; taking it from there
 *   days.c     which day a time on the store clock was; the quota that the store last had
 *
 * Locks, in the order in which they are taken
 *   kv->map     (rwlock) shared while any transaction of this process is open; exclusive to move the map
 *   kv->lock    (mutex)  everything in memory: RAM tier, queue, pins, doomed keys, counters.  Held for
 *               pointer work only, never over a disk access or a copy of a payload. */
#ifndef DM_KV_INT_H
#define DM_KV_INT_H

#include <lmdb.h>
#include <pthread.h>
#include <sys/stat.h>

#include "kvstore/kvstore.h"

/* ---- format (format.c) --------------------------------------------------------------- */

#define KV_BLOCK 1
#define KV_STATE 2
#define KV_LAST 3 /* not stored: key of the list of states in RAM behind one last block */

#define KV_HEADER_BYTES 128 /* of an extent */
#define KV_KEY_MAX 72       /* encoded entry key plus part number */
#define KV_INDEX_BYTES 64
#define KV_META_BYTES 96
#define KV_CLOCK_BYTES 48
#define KV_ORDER_BYTES 16
#define KV_PART_BYTES 24
#define KV_FREE_BYTES 32

/* Name of an entry.  Zero-initialise before filling: it is compared as bytes. */
typedef struct kv_key {
    uint8_t kind;
    uint8_t pad;
    uint16_t tail_count; /* states: ids behind the last whole block */
    dm_hash hash;        /* block: H(i); state: H(last whole block) */
    dm_hash tail;        /* state: hash of the tail's ids; block: zero */
} kv_key;

typedef struct kv_index {
    uint32_t parts;     /* extents */
    uint32_t uses;      /* hits, saturating */
    uint64_t total;     /* payload bytes of the entry */
    uint64_t priority;  /* place in the eviction order */
    uint64_t seq;       /* order of writing; breaks ties */
    uint64_t last_used; /* store clock */
    uint64_t written;   /* store clock */
} kv_index;

typedef struct kv_meta {
    uint32_t version, page_bytes;
    uint64_t block_bytes, extent_bytes;
    dm_hash root;
} kv_meta;

/* Advances with every byte written, so ages are measured in turnover of the store, not in hours. */
typedef struct kv_clock {
    uint64_t bytes, seq;
    uint64_t slots; /* of the slot file: all below have been used once */
    uint64_t holes; /* of these: free ones whose room was given back to the file system */
} kv_clock;

/* A slot that holds nothing. */
typedef struct kv_free {
    uint64_t slot;
    uint64_t since; /* LMDB's number of the transaction that freed it */
    bool hole;
} kv_free;

kv_key kv_key_block(const dm_hash *h);
kv_key kv_key_state(const dm_hash *last, const int32_t *tail, int tail_count);
bool kv_key_equal(const kv_key *a, const kv_key *b);
size_t kv_key_encode(uint8_t out[KV_KEY_MAX], const kv_key *k);
size_t kv_key_encode_part(uint8_t out[KV_KEY_MAX], const kv_key *k, uint32_t part);
bool kv_key_decode(kv_key *k, const void *p, size_t n);
bool kv_key_decode_part(kv_key *k, uint32_t *part, const void *p, size_t n);
void kv_key_text(char out[96], const kv_key *k);

uint64_t kv_extent_size(size_t block_bytes, size_t page_bytes);
/* What an extent says it is. */
typedef struct kv_part {
    const kv_key *key;
    uint32_t part, parts;
    uint64_t total; /* payload bytes of the entry */
    uint64_t seq;   /* of the writing: of two writings of one entry only that in the index counts */
} kv_part;
/* Makes an extent of a buffer that has the payload at KV_HEADER_BYTES: header and zeroes. */
void kv_extent_seal(uint8_t *extent, size_t extent_bytes, const kv_part *p, size_t n);
/* Fills a whole extent: header, payload, zeroes. */
void kv_extent_write(uint8_t *extent, size_t extent_bytes, const kv_part *p, const uint8_t *payload, size_t n);
/* Payload of a good extent, or NULL: any difference in key, part, count, length, writing or checksum. */
const uint8_t *kv_extent_check(const uint8_t *extent, size_t extent_bytes, const kv_part *p, size_t *n);
void kv_index_encode(uint8_t out[KV_INDEX_BYTES], const kv_key *k, const kv_index *ix);
bool kv_index_decode(kv_index *ix, const kv_key *k, const void *p, size_t n, size_t extent_bytes);
void kv_order_encode(uint8_t out[KV_ORDER_BYTES], const kv_index *ix);
/* Where a part lies.  key: as encoded, with the part's number; a record is good only under its own key. */
void kv_part_encode(uint8_t out[KV_PART_BYTES], const void *key, size_t key_bytes, uint64_t slot);
bool kv_part_decode(uint64_t *slot, const void *key, size_t key_bytes, const void *p, size_t n);
/* A free slot: the key is its number, big endian. */
void kv_free_encode(uint8_t key[8], uint8_t out[KV_FREE_BYTES], const kv_free *f);
bool kv_free_decode(kv_free *f, const void *key, size_t key_bytes, const void *p, size_t n);
void kv_meta_encode(uint8_t out[KV_META_BYTES], const kv_meta *m);
/* 0, DM_EVERSION (newer), DM_ENOTSUP (older) or DM_ESTORE. */
int kv_meta_decode(kv_meta *m, const void *p, size_t n);
void kv_clock_encode(uint8_t out[KV_CLOCK_BYTES], const kv_clock *c);
bool kv_clock_decode(kv_clock *c, const void *p, size_t n);

/* A state is hit when a prompt goes on from it, passed by when one goes on from a deeper state of the same chain.  Passing by keeps it
 * as young as the blocks around it, but counts as a use only up to PASS_USES: the middle of a long session is worth
 * less than an anchor that many go on from. */
#define KV_PASS ((int64_t)1 << 32)
#define KV_AGAIN ((int64_t)1 << 48) /* it was put again: as good as just written */
#define KV_PASS_USES 1
/* A state that its session hardly needs (passed.c): plus the tokens that it would save, as its priority, hence the first to go.  Ages are
 * larger: the store clock begins at KV_THIN_MAX.  Not a sum: one other use is worth more. */
#define KV_THIN ((int64_t)1 << 60)
#define KV_THIN_MAX ((int64_t)1 << 20)
uint32_t kv_uses_after(uint32_t uses, int64_t more);
void kv_note_use(dm_kv *kv, const kv_key *k, int64_t use); /* with kv->lock: for the writer to apply */

/* ---- key map (keymap.c) ---------------------------------------------------------------- */

typedef struct kv_slot {
    kv_key key; /* kind 0: free */
    union {
        int64_t count;
        void *ptr;
    } v;
} kv_slot;
typedef struct kv_map {
    kv_slot *slots; /* owned; capacity is a power of two */
    size_t cap, used;
} kv_map;
kv_slot *kv_map_find(const kv_map *m, const kv_key *k);
kv_slot *kv_map_put(kv_map *m, const kv_key *k); /* found or new with v = 0; NULL: out of memory */
void kv_map_del(kv_map *m, kv_slot *s);          /* slots move: pointers to others are void after it */
bool kv_map_add(kv_map *m, const kv_key *k, int64_t by); /* count += by, removed at 0; false: out of memory */
int64_t kv_map_count(const kv_map *m, const kv_key *k);
void kv_map_clear(kv_map *m); /* forgets all keys, keeps the memory */
void kv_map_free(kv_map *m);

/* ---- RAM tier (ram.c) -------------------------------------------------------------------- */

typedef enum kv_where { KV_CLEAN, KV_QUEUED, KV_WRITING } kv_where;
typedef struct kv_entry {
    kv_key key;
    size_t n;
    uint8_t *bytes; /* owned: an allocation of its own, or behind the header in `extent` */
    uint8_t *extent; /* page-aligned, a whole extent; of entries that fill one, so that the disk reads and writes it in place.  Or NULL */
    int refs;       /* the table's one, the writer's, one per reader that copies */
    kv_where where; /* CLEAN entries are in the LRU list, QUEUED in the queue, WRITING in the writer's batch */
    bool on_disk, in_table;
    bool ahead;                    /* loaded ahead and not asked for yet */
    bool held;                     /* the write budget kept it from the disk; counted */
    bool again;                    /* was on the disk when it was queued: to be made young, not written */
    bool chained;                  /* behind is known: block i-1, or the root */
    bool denied;                   /* the disk had no room for it, or not its predecessor: what hangs on it is not written either */
    dm_hash behind;                /* key of the predecessor */
    uint32_t uses;
    uint64_t ticket;               /* QUEUED, WRITING: number of the put */
    struct kv_entry *prev, *next;  /* LRU list or queue */
    struct kv_entry *state_next;   /* other states behind the same last block */
} kv_entry;
typedef struct kv_list {
    kv_entry *head, *tail; /* LRU: head is the most recent; queue: head is the oldest */
} kv_list;

/* ---- the store ------------------------------------------------------------------------------ */

enum { KV_DB_BLOCKS, KV_DB_STATES, KV_DB_ORDER, KV_DB_PARTS, KV_DB_FREE, KV_DB_META, KV_DB_COUNT };
extern const char *const kv_db_names[KV_DB_COUNT];

/* What one prompt puts, block after block: all its entries carry `start` as their time of writing and have one age. */
typedef struct kv_run {
    uint64_t start;  /* store clock, unique */
    uint64_t latest; /* store clock of its newest entry */
    uint64_t floor;  /* every entry that the run hangs on has at least this priority */
    uint64_t no;     /* of the transaction that wrote to it last */
} kv_run;
#define KV_RUNS 64

/* Loads ahead of the reader (ahead.c). */
#define KV_AHEAD_READERS 4
#define KV_AHEAD_BLOCKS 8
#define KV_AHEAD_JOBS 64
typedef struct kv_job {
    enum { KV_JOB_FREE, KV_JOB_WAITS, KV_JOB_RUNS } state;
    kv_key key;
    const void *owner; /* compared only */
    int64_t bytes;
    uint64_t no;
} kv_job;
typedef struct kv_ahead {
    kv_job jobs[KV_AHEAD_JOBS];
    int64_t bytes; /* of the jobs that are not free */
    uint64_t no;
    bool started, stop;
    pthread_cond_t work, done;
    pthread_t threads[KV_AHEAD_READERS];
    int threads_count;
} kv_ahead;

typedef struct kv_lease kv_lease;

/* Keys of what was evicted (ghost.c). */
typedef struct kv_ghosts {
    kv_map map;   /* key -> place in the ring, from 1; KV_LAST key -> tail of the state, from 1 */
    kv_key *ring; /* owned; cap of them, NULL before the first */
    size_t cap, next;
} kv_ghosts;

#define KV_BUFS 8
struct dm_kv {
    /* fixed at open */
    char *dir; /* owned */
    dm_kv_opts opts;
    size_t extent_bytes, page_bytes, extent_pages, payload_bytes; /* payload: per extent */
    uint64_t stalls; /* writes that failed for want of room or by the disk, since open */
    int64_t quota_pages, batch_bytes, reserve_pages;
    MDB_env *env;
    MDB_dbi db[KV_DB_COUNT];
    int fd;        /* data.mdb, for plain reads of its pages */
    int slots_fd;     /* the slot file, through the page cache */
    int slots_direct; /* the same with O_DIRECT, or -1 */
    pthread_rwlock_t map;

    pthread_mutex_t lock;
    /* all below: under lock */
    pthread_cond_t work; /* for the writer */
    pthread_cond_t done; /* for flush and close */
    kv_map table;        /* entry key -> kv_entry */
    kv_map by_last;      /* KV_LAST key -> first kv_entry of its states */
    kv_list lru, queue;
    kv_map pins;    /* key -> number of hits that hold it */
    kv_map leases;  /* key -> leases that hold it (lease.c) */
    kv_lease *lease_list; /* owned */
    int64_t leased; /* extents of all keys in leases */
    kv_ghosts ghosts;
    kv_map doomed;  /* keys whose disk copy is going away: not offered, not pinned */
    kv_map touched; /* key -> uses since the writer last looked: hits, plus KV_PASS for each hit that passed by it,
                       plus KV_AGAIN for each put of what was there */
    kv_map removals;     /* keys to delete from the disk */
    uint64_t removal_no, removal_done;
    uint64_t ticket;     /* of the newest put */
    uint64_t synced;     /* every put up to this one is durable, or was given up */
    int flush_waiters;
    uint64_t queue_since_ns; /* when the queue stopped being empty */
    int64_t queued_again;    /* entries in the queue with `again` */
    bool stop, abandon, writer_exited;
    bool epoch_new;          /* a prompt was looked up: what is put from now on is of another age */
    bool unsynced;           /* a commit's root is not on the disk for sure */
    int squeeze;             /* times in a row that the map was full */
    bool direct_refused;
    uint8_t *bufs[KV_BUFS]; /* free page-aligned read buffers, owned */
    int bufs_count;
    kv_ahead ahead;
    dm_kv_stat st; /* counters since open; the rest is filled by stat_get */

    bool damaged;         /* LMDB's structure is broken: no more writes in this process */
    uint64_t retry_ns;    /* disk full: not before */
    uint64_t readers_ns;  /* stale readers last cleared */
    uint64_t wrote_ns;    /* last transaction */
    uint64_t epoch;       /* writer only: age of what is put now, store clock */
    bool swept;           /* writer only: orphans were looked for */
    kv_run runs[KV_RUNS]; /* writer only: the last ones */
    uint64_t write_no;    /* writer only */
    uint64_t committed_txn; /* writer only: LMDB's number of the last transaction of this process */
    uint64_t synced_txn;  /* writer only: LMDB's number of a transaction that is on the disk with its root */
    dm_kv_totals told;    /* writer only: counters of this process that the totals have */
    int64_t held_day;     /* writer only: the day on which it was said that the budget is used up */
    uint64_t clock_ahead; /* writer only: by so much the clock was advanced for what is still to be written */
    int64_t marked_day;   /* writer only: today, once it has its mark (days.c) */
    bool slots_late;      /* writer only: the last batch was cut short for want of slots that may be written */
    bool slots_no_holes;  /* writer only: the file system cannot give room back */
    bool roomy;           /* writer only: the next batch may be ROOMY_BYTES without an eviction */

    /* opener only */
    bool have_thread;
    pthread_t thread;
};

int64_t kv_parts(const dm_kv *kv, uint64_t total); /* extents of an entry */
int64_t kv_entry_pages_max(const dm_kv *kv);       /* of the largest entry that the quota can hold */

/* ram.c; all with kv->lock held unless said otherwise */
kv_entry *kv_entry_new(const dm_kv *kv, const kv_key *k, size_t n, dm_err *e); /* without lock; one reference, bytes not filled */
void kv_entry_unref(dm_kv *kv, kv_entry *en);
void kv_entry_release(dm_kv *kv, kv_entry *en);               /* takes the lock itself */
kv_entry *kv_ram_get(dm_kv *kv, const kv_key *k);             /* no new reference */
int kv_ram_insert(dm_kv *kv, kv_entry *en);                   /* takes a reference of its own */
void kv_ram_remove(dm_kv *kv, kv_entry *en);
void kv_ram_use(dm_kv *kv, kv_entry *en);
void kv_ram_queue(dm_kv *kv, kv_entry *en); /* CLEAN, in table -> QUEUED */
void kv_ram_unqueue(dm_kv *kv, kv_entry *en, kv_where where);
void kv_ram_requeue_front(dm_kv *kv, kv_entry *en);
void kv_ram_clean(dm_kv *kv, kv_entry *en); /* WRITING -> CLEAN */
bool kv_ram_give_up(dm_kv *kv, const kv_entry *spare);
bool kv_ram_mend(dm_kv *kv, const dm_hash *prev);
void kv_ram_fit(dm_kv *kv, const kv_entry *spare); /* down to the quotas */
void kv_ram_free(dm_kv *kv);
bool kv_ram_state(dm_kv *kv, const dm_hash *last, const int32_t *tail, int tail_max, kv_key *best);
size_t kv_entry_cost(const kv_entry *en);

/* env.c */
int kv_err(dm_kv *kv, dm_err *e, int rc, const char *where, const char *what);
int kv_env_open(dm_kv *kv, dm_err *e); /* everything up to usable databases */
void kv_env_close(dm_kv *kv);
int kv_env_create(const char *dir, MDB_env **env, int64_t map_bytes, bool read_only, dm_err *e);
int kv_env_meta(MDB_env *env, MDB_txn *txn, MDB_dbi dbi, kv_meta *m);
/* Size of the map = what data.mdb may grow to.  The last pages are kept for making room. */
int64_t kv_map_limit(const dm_kv *kv, bool emergency);
#define KV_EMERGENCY_PAGES 32
#define KV_SLACK_PAGES (KV_EMERGENCY_PAGES + 16) /* the 16: free list, main database, pages in flight */
int kv_txn_begin(dm_kv *kv, bool write, MDB_txn **txn); /* LMDB codes; takes kv->map */
void kv_txn_end(dm_kv *kv, MDB_txn *txn);               /* aborts; releases kv->map */
int kv_txn_commit(dm_kv *kv, MDB_txn *txn);             /* releases kv->map */
int kv_dir_claim(const char *dir, dm_kv *kv, dm_err *e); /* DM_EBUSY: this process has it open */
void kv_dir_release(dm_kv *kv);
dm_kv *kv_dir_holder(const char *dir);
/* Reads the index record of k: 0, MDB_NOTFOUND, MDB_BAD_VALSIZE for a damaged record, or another LMDB code. */
int kv_index_look(dm_kv *kv, MDB_txn *txn, const kv_key *k, kv_index *ix);
/* The same where a damaged record is as good as none. */
int kv_index_get(dm_kv *kv, MDB_txn *txn, const kv_key *k, kv_index *ix);
MDB_dbi kv_index_db(const dm_kv *kv, const kv_key *k);

/* pages.c: structure of the file, as the snapshot of txn sees it.  0, DM_ESTORE, DM_EIO, DM_ENOMEM. */
int kv_pages_precheck(int fd, const char *dir, bool *fresh, dm_err *e);
int kv_pages_check(int fd, MDB_env *env, size_t txn_id, const char *dir, dm_err *e);

/* load.c */
/* Reads and checks an entry of the disk tier.  0, DM_EMISS (not there), DM_ECORRUPT (there and bad), DM_EIO, DM_ENOMEM. */
int kv_load(dm_kv *kv, const kv_key *k, kv_entry **out);
void kv_bad_entry(dm_kv *kv, const kv_key *k, const char *why);
void kv_remove_later(dm_kv *kv, const kv_key *k); /* with kv->lock */

/* ahead.c; with kv->lock unless said otherwise */
int kv_ahead_init(dm_kv *kv); /* without; an errno */
bool kv_ahead_want(dm_kv *kv, const void *owner, const kv_key *k, size_t bytes); /* false: no room, come again */
void kv_ahead_wait(dm_kv *kv, const kv_key *k); /* until k is not in flight */
void kv_ahead_cancel(dm_kv *kv, const void *owner);
void kv_ahead_stop(dm_kv *kv); /* without */
void kv_ahead_free(dm_kv *kv);

/* slots.c */
typedef struct kv_put { /* a part on its way to its slot */
    const kv_entry *en;
    uint32_t part, parts;
    uint64_t slot, seq;
} kv_put;
#define KV_LATER (-2) /* not an LMDB code: slots are free, but may not be written before the next transaction */
struct kv_write;
int kv_slots_open(dm_kv *kv, dm_err *e);
void kv_slots_close(dm_kv *kv);
off_t kv_slot_offset(const dm_kv *kv, uint64_t slot);
int64_t kv_slots_bytes(const dm_kv *kv); /* that the file takes on the disk */
bool kv_disk_short(const dm_kv *kv, int64_t bytes); /* fewer are left than these and the reserve of others */
/* n slots for what this transaction writes: 0, KV_LATER, ENOSPC or another code; all or none. */
int kv_slots_take(struct kv_write *w, uint32_t n, uint64_t *slots);
int kv_slot_free(struct kv_write *w, uint64_t slot);
/* Writes all of w->puts and waits until they are on the disk.  An errno. */
int kv_slots_write(struct kv_write *w);
int kv_slots_give_back(struct kv_write *w); /* to the file system, what is above the quota */
int kv_slots_sweep(struct kv_write *w);     /* makes the list of free slots anew */
/* Reads an extent into buf (page-aligned): 0; 1: the file ends before; DM_EIO. */
int kv_slot_read(dm_kv *kv, uint64_t slot, uint8_t *buf);

/* evict.c; with the write transaction */
typedef struct kv_write {
    dm_kv *kv;
    MDB_txn *txn;
    kv_clock clock;
    uint64_t id;         /* LMDB's number of it */
    uint64_t age;        /* of what this transaction writes */
    uint64_t ahead;      /* clock_ahead after it */
    uint64_t seq_first;  /* of this transaction: never evicted in it */
    int64_t pages_live;  /* of slots in use */
    int64_t pages_index; /* data.mdb as it is, and what this transaction may add to it */
    kv_put *puts;        /* owned; slots to be written before the commit */
    size_t puts_count, puts_cap;
    uint64_t free_from;  /* free slots below this one were looked at */
    bool slots_swept;
    kv_key *gone;        /* owned; keys doomed by this transaction */
    size_t gone_count, gone_cap;
    kv_map spared;       /* owned; keys that stood in the way of eviction, and why */
    int64_t written_bytes, evicted;
    dm_kv_totals totals, now; /* as they will be; what this process has counted so far */
    int64_t held_bytes;       /* entries that the write budget kept back */
    int64_t written[3];  /* entries by kind */
    uint64_t no;         /* of the transaction, in this process */
    int64_t day;         /* that it marks, or 0 */
    uint64_t runs_begun; /* in it */
    uint64_t held;       /* least floor of the runs that this transaction writes */
    bool order_swept;
} kv_write;
/* Where an entry stands in the order of eviction, and what may be evicted for it. */
typedef struct kv_rank {
    uint64_t age, written;
    uint64_t most;      /* its priority at most: that of its predecessor */
    uint32_t uses_most; /* and its uses */
    uint64_t floor; /* nothing of this priority or more; it could be what the entry hangs on */
    uint64_t own;   /* and of what was just written, nothing of this priority or more: then the entry itself is the next to go */
} kv_rank;
kv_rank kv_rank_alone(const kv_write *w);
/* The rank behind the predecessor with this hash.  MDB_NOTFOUND: it is not in the store. */
int kv_rank_behind(kv_write *w, const dm_hash *prev, bool state, kv_rank *r);
int kv_evict_room(kv_write *w, int64_t pages, const kv_rank *r); /* 0, MDB_NOTFOUND: nothing more may go, or an LMDB code */
int kv_entry_delete(kv_write *w, const kv_key *k);
int kv_touch(kv_write *w, const kv_key *k, int64_t uses, const kv_rank *r); /* uses as in touched; r: NULL, or the rank for KV_AGAIN */
uint64_t kv_priority(const dm_kv *kv, uint64_t clock, uint32_t uses);
int64_t kv_room_pages(const kv_write *w);

/* totals.c */
void kv_totals_read(MDB_txn *txn, MDB_dbi meta, dm_kv_totals *t);
void kv_totals_begin(kv_write *w);
int kv_totals_write(kv_write *w);
int64_t kv_budget_left(const kv_write *w); /* at the beginning of the transaction */

/* find.c */
/* Deepest state on the disk behind `last` with a tail of at most tail_max ids that is a prefix of tail; cur: of the states. */
bool kv_disk_state(dm_kv *kv, MDB_cursor *cur, const dm_hash *last, const int32_t *tail, int tail_max, kv_key *best);
/* Is the entry on the disk only?  Then it is pinned, by one. */
bool kv_pin_if_there(dm_kv *kv, const kv_key *k);
void kv_note_key(dm_kv *kv, const kv_key *k, int64_t use); /* with kv->lock */

/* passed.c */
void kv_note_passed(dm_kv *kv, const kv_key *blocks, size_t blocks_count, const int32_t *ids, int64_t pos);

/* ghost.c; with kv->lock */
void kv_ghost_add(dm_kv *kv, const kv_key *k);
void kv_ghost_forget(dm_kv *kv, const kv_key *k);
void kv_ghosts_free(dm_kv *kv);
/* Without the lock.  A lookup ended at pos; `present` blocks of the prompt are there.  Counts and returns how many tokens deeper it would
 * have come, had nothing been evicted. */
int64_t kv_ghost_charge(dm_kv *kv, const kv_key *blocks, size_t present, const int32_t *ids, int64_t limit, int64_t pos);

/* lease.c; with kv->lock */
void kv_leases_expire(dm_kv *kv, uint64_t now);
void kv_leases_free(dm_kv *kv);

/* writer.c */
void *kv_writer_main(void *kv);

/* days.c */
#define KV_DAYS 400
typedef struct kv_days {
    int64_t today, day[KV_DAYS]; /* since 1970 */
    uint64_t clock[KV_DAYS];     /* where the store clock stood when they began */
    int count;
} kv_days;
int64_t kv_today(void);
void kv_days_shift(int64_t days); /* for tests: today is another day */
int kv_days_mark(kv_write *w);    /* today's mark, and the quota, where they are not there */
int kv_days_load(MDB_txn *txn, MDB_dbi meta, kv_days *d);
int64_t kv_days_age(const kv_days *d, const kv_index *ix); /* days since it was written or used; of old stores: at least */
int64_t kv_quota_of(MDB_txn *txn, MDB_dbi meta);           /* 0: not known */

/* verify.c */
void kv_stat_disk(dm_kv *kv, dm_kv_stat *st);

#endif
