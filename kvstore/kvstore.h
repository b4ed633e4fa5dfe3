/* kvstore.h — KV by content: blocks and states in RAM and LMDB.
 *
 * Nouns
 *   block   the cache of DM_KV_BLOCK (256) consecutive positions, one run of block_bytes bytes
 *   state   what a cut at position P needs beyond whole blocks; any length; at any P
 *   chain   H(-1) = root; H(i) = BLAKE2b-256(H(i-1) ‖ the 256 ids of block i, int32 LE).
 *           root = BLAKE2b-256 over everything that must agree for bytes to be usable
 *           (weights' bytes, tokenizer, layout version, numerics id, tenant salt): the caller makes it.
 *   entry   a stored block (key H(i)) or state (key H(last whole block), tail length, hash of tail ids)
 *
 * The store knows ids, keys and bytes.  It never learns what a session or a model is.
 *
 * Promises
 *   K1  A value is returned only if its stored key equals the asked one and its checksum holds.
 *       A bad one is a miss: removed, counted, logged; never an error of the reader.
 *   K2  kill -9 at any point leaves a store that opens at once, with every entry whole or absent.
 *   K3  put never waits for the disk: it copies into the RAM tier and queues.  When the queue is full
 *       (queue_bytes_max) the oldest unwritten entry of least value is given up (counted), never the caller.
 *   K4  disk_bytes_max is never exceeded by more than one extent; nothing just written, pinned, leased (dm_kv_pin)
 *       or being read is evicted; an entry larger than the quota is refused (DM_ELIMIT) and nothing is evicted for it.
 *   K5  A full disk, or one of which only the last eighth (64 MiB at most) is left, stops spilling with one
 *       warning; it goes on serving, and starts again by itself.
 *   K6  A hit is the minimum over its parts: a state counts only if all blocks before it are there.
 *
 * Threads: one dm_kv may be used from any threads at once.  find/read/put are short; read may block on
 * the disk (call it from a store reader, not from the loop).  One writer thread inside owns the only
 * LMDB write transaction.  An environment must not be used after fork; descriptors are O_CLOEXEC.
 * One process opens a directory once (a second open gives the same DM_EBUSY whatever its spelling);
 * several processes may share it. */
#ifndef DM_KVSTORE_H
#define DM_KVSTORE_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DM_KV_BLOCK 256        /* positions in a block */
/* Of the files.  A newer one is refused with DM_EVERSION, untouched; one of format 1 (payloads inside data.mdb) is a cache of former days:
 * it is deleted and begun anew, with a line in the log. */
#define DM_KV_FORMAT_VERSION 2

typedef struct dm_kv dm_kv;

typedef struct dm_kv_opts {
    const char *dir;         /* created if missing; holds data.mdb, lock.mdb, slots.dat */
    dm_hash root;            /* H(-1); a directory made under another root is DM_EFOREIGN */
    size_t block_bytes;      /* of every block; decides the extent size; differs from the file's: DM_EFOREIGN */
    int64_t disk_bytes_max;  /* quota of the disk tier, index and payloads together; 0: 16 GiB */
    int64_t ram_bytes_max;   /* quota of the RAM tier;  0: 1 GiB */
    int64_t queue_bytes_max; /* unwritten bytes at most; 0: 512 MiB */
    int sync_ms;             /* group commit at least this often; 0: 200 */
    bool read_only;          /* verify, stat */
    bool trim;               /* free room goes back to the file system at once, not only what is above the quota (gc) */
    /* Bytes written in a day (UTC), over all processes of the store; 0: no bound.  When it is used up nothing more is written until the
     * day is over: what is put stays in RAM as long as there is room, is counted (held_bytes) and said once a day.  For disks that wear out. */
    int64_t write_bytes_day;
} dm_kv_opts;

/* DM_ESTORE: the files are not a usable store (truncated, not LMDB); nothing is changed and the text
 * says what to delete.  A cache may be deleted at any time. */
DM_API int dm_kv_open(dm_kv **out, const dm_kv_opts *opts, dm_err *e);
/* Writes what is queued (waits at most 30 s), joins the threads.  NULL is fine. */
DM_API void dm_kv_close(dm_kv *kv);

/* Removes the files of a store that nobody has open, and the directory when nothing else is in it. */
DM_API void dm_kv_remove(const char *dir);

/* ---- chain ------------------------------------------------------------------------ */

/* next = H(i) from prev = H(i-1) and the 256 ids of block i. */
DM_API void dm_kv_chain(dm_hash *next, const dm_hash *prev, const int32_t ids[DM_KV_BLOCK]);

/* ---- put (asynchronous) ------------------------------------------------------------- */

/* Block i of the sequence ids[0 .. 256*(i+1)) is `key` = H(i).  `bytes` is copied before return.
 * Already present (in any tier): 0, nothing is written.  0 also when the entry was accepted.
 * DM_ELIMIT: larger than a quota (K4); DM_ENOMEM; DM_ESTATE: the store is read-only.  Put blocks in the order of the chain: among
 * entries of one age the later written is evicted first. */
DM_API int dm_kv_put_block(dm_kv *kv, const dm_hash *key, const void *bytes, size_t n, dm_err *e);
/* The same with prev = H(i-1) (the root for block 0): the way for a session.  Then the order of eviction keeps to the chain whatever
 * the length of the prompt and whatever others write meanwhile: a block never outlives its predecessor, is not written (counted as
 * dropped) when that is not in the store, and of a prompt that does not fit the end is left out, never the beginning. */
DM_API int dm_kv_put_block_after(dm_kv *kv, const dm_hash *prev, const dm_hash *key, const void *bytes, size_t n, dm_err *e);
/* State at position 256*b + tail_count, where last = H(b-1) and tail holds the ids behind it
 * (tail_count < 256). */
DM_API int dm_kv_put_state(dm_kv *kv, const dm_hash *last, const int32_t *tail, int tail_count, const void *bytes, size_t n, dm_err *e);
/* Waits until everything put before is committed and synced, or timeout_ms (DM_ETIMEDOUT).  DM_ENOSPC: a write was
 * tried meanwhile and failed (K5); what was put stays queued. */
DM_API int dm_kv_flush(dm_kv *kv, int timeout_ms, dm_err *e);
/* Bytes accepted by put and not yet synced. */
DM_API int64_t dm_kv_queued_bytes(dm_kv *kv);

/* ---- find and read ------------------------------------------------------------------- */

/* The deepest usable cut of a prompt: pos = 256*blocks + tail.  Its entries are pinned (never evicted)
 * until dm_kv_hit_end. */
typedef struct dm_kv_hit {
    int64_t pos;        /* tokens that need no prefill; 0: nothing usable */
    int64_t blocks;     /* whole blocks before pos */
    size_t state_bytes; /* 0 when pos = 0 */
    int64_t blocks_present; /* blocks of the prompt in the store, whether or not a state makes them usable */
    int64_t evicted;    /* tokens by which it would be deeper, had this process not evicted (of what it remembers) */
    void *pin;          /* internal */
} dm_kv_hit;

/* Deepest stored state at a position <= limit (<= n) whose blocks are all present.  Returns 0, also for
 * no hit (pos = 0).  limit lets the caller keep the last token for itself. */
DM_API int dm_kv_find(dm_kv *kv, const int32_t *ids, int64_t n, int64_t limit, dm_kv_hit *hit, dm_err *e);
typedef enum dm_kv_tier { DM_KV_RAM = 1, DM_KV_DISK = 2 } dm_kv_tier;
/* read_state replaces what is in *out.
 * Copies block i of the hit to dst (block_bytes); *tier says where it came from.  DM_EMISS: it was bad
 * or went away; find again (the hit will be shorter). */
DM_API int dm_kv_read_block(dm_kv *kv, const dm_kv_hit *hit, int64_t i, void *dst, dm_kv_tier *tier, dm_err *e);
DM_API int dm_kv_read_state(dm_kv *kv, const dm_kv_hit *hit, dm_buf *out, dm_kv_tier *tier, dm_err *e);
DM_API void dm_kv_hit_end(dm_kv *kv, dm_kv_hit *hit); /* unpins; zeroes *hit; fine on a zeroed hit */
/* Keeps the whole blocks of ids[0 .. n) and the state at n from leaving the disk for ttl_ms from now: for a session that waits for a tool.
 * They need not be written yet.  owner (not 0) has one such lease at a time: a new one replaces it, n or ttl_ms of 0 ends it.  Leases
 * are of this process and in memory; another process may evict.  DM_ELIMIT: all leases together would hold more than half of the
 * quota (the owner's last one stays); DM_ENOMEM. */
DM_API int dm_kv_pin(dm_kv *kv, uint64_t owner, const int32_t *ids, int64_t n, int64_t ttl_ms, dm_err *e);
/* The caller found that what it restored does not work (K17): drop the state and never offer it again. */
DM_API int dm_kv_drop_state(dm_kv *kv, const dm_hash *last, const int32_t *tail, int tail_count, dm_err *e);

/* Like the deepest cut that find gives, but only of what is on the disk now, whatever RAM has, and nobody's use: what another process
 * would find.  DM_EIO. */
DM_API int dm_kv_durable(dm_kv *kv, const int32_t *ids, int64_t n, int64_t *pos, dm_err *e);

/* ---- operations ------------------------------------------------------------------------ */

/* Since the store was made, over all processes; what happened without a commit behind it may be missing. */
typedef struct dm_kv_totals {
    int64_t bytes_written, put_blocks, put_states, evicted_entries, bad_entries, hits, misses, ghost_hits, ghost_tokens;
    int64_t held_bytes;      /* not written, for the write budget */
    int64_t day, day_bytes;  /* days since 1970, and bytes written in that one */
} dm_kv_totals;

typedef struct dm_kv_stat {
    dm_kv_totals total;
    int64_t blocks, states;                 /* on disk */
    int64_t disk_bytes_live, disk_bytes_file, disk_bytes_max;
    int64_t leased_bytes;                   /* kept by dm_kv_pin, at most half of the quota */
    int64_t ram_entries, ram_bytes, ram_bytes_max;
    int64_t queued_bytes;
    int64_t put_blocks, put_states, put_duplicates, put_dropped; /* since open */
    int64_t bytes_written;                  /* since open */
    int64_t hits, misses, bad_entries, evicted_entries;
    int64_t ghost_hits, ghost_tokens;       /* lookups that eviction made shorter, and by how many tokens in all: the price of the policy */
    bool disk_full;                         /* spilling is off for now (K5) */
    bool over_budget;                       /* the write budget of the day kept back what was put last */
    size_t block_bytes, extent_bytes;
} dm_kv_stat;
DM_API void dm_kv_stat_get(dm_kv *kv, dm_kv_stat *out);

typedef struct dm_kv_check {
    int64_t entries, bytes, bad; /* bad: checksum, key, part missing, or an orphan part */
    char first_bad[160];         /* names the first one */
} dm_kv_check;
typedef bool (*dm_kv_progress)(void *ctx, int64_t done, int64_t total); /* false: stop (DM_ECANCELED) */
/* Reads and checks every entry.  0 also when some are bad: look at out->bad. */
DM_API int dm_kv_verify(dm_kv *kv, dm_kv_check *out, dm_kv_progress fn, void *ctx, dm_err *e);

/* An entry on the disk. */
typedef struct dm_kv_item {
    bool state;
    dm_hash key;       /* H(i); of a state: H(last) */
    int tail_count;    /* of a state */
    int64_t bytes, disk_bytes;
    int64_t hits, age_days; /* since it was written or used; of what is older than the store's first mark of a day: at least */
} dm_kv_item;
typedef int (*dm_kv_item_fn)(void *ctx, const dm_kv_item *item); /* not 0: stops and is returned */
/* All of them, the next one to be evicted first.  What comes and goes meanwhile may be missed or told twice. */
DM_API int dm_kv_list(dm_kv *kv, dm_kv_item_fn fn, void *ctx, dm_err *e);

typedef struct dm_kv_gc_opts {
    int64_t bytes_max;  /* of data.mdb and payloads; < 0: any size */
    int64_t older_days; /* entries of this age and above; < 0: any age.  Either criterion suffices */
    bool dry_run;
} dm_kv_gc_opts;
typedef struct dm_kv_gc_report {
    int64_t blocks, states, bytes;  /* that went (would go) */
    int64_t entries_left, bytes_left; /* payloads */
} dm_kv_gc_report;
/* Removes entries in the order of eviction, but for those that are pinned or leased in this process, and waits until that is on the
 * disk.  On a store opened with `trim` their room is given back before it returns.  DM_ECANCELED when fn said so: what is gone is gone.
 * DM_ESTATE: read-only (a dry run is fine). */
DM_API int dm_kv_gc(dm_kv *kv, const dm_kv_gc_opts *o, dm_kv_gc_report *out, dm_kv_progress fn, void *ctx, dm_err *e);

/* What is in a directory, without knowing its root (for `kv stat`): fills the parts known from the file; disk_bytes_max is what it
 * was last opened with, 0 when the file does not say. */
DM_API int dm_kv_inspect(const char *dir, dm_kv_opts *opts_out, dm_kv_stat *stat_out, dm_err *e);

/* ---- benchmark ---------------------------------------------------------------------------- */

/* Measures a store of its own in a directory that it makes under dir and removes again, also when it fails or is stopped. */
typedef struct dm_kv_bench_opts {
    const char *dir;      /* on the disk to be measured; created if missing */
    size_t block_bytes;   /* 0: 985,664 */
    size_t state_bytes;   /* 0: 3,600,000 */
    int64_t quota_bytes;  /* 0: 2 GiB; room needed on the disk: about 1.5 times as much */
    int rounds;           /* of each comparison, interleaved; the medians count; 0: 7 */
    int churn;            /* times the capacity that is written at the quota; 0: 10 */
} dm_kv_bench_opts;
typedef struct dm_kv_bench_row {
    const char *name, *unit; /* static */
    double value, probe;     /* probe: the same bytes without the store, in the same run */
    double ratio;            /* of one round, the median: value / probe */
    double limit;            /* what ratio should reach, or not exceed */
    bool at_most;
} dm_kv_bench_row;
#define DM_KV_BENCH_ROWS 5
/* Fills rows[0 .. DM_KV_BENCH_ROWS).  DM_ECANCELED when fn said so. */
DM_API int dm_kv_bench(const dm_kv_bench_opts *opts, dm_kv_bench_row rows[DM_KV_BENCH_ROWS], dm_kv_progress fn, void *ctx, dm_err *e);

/* ---- replay: how much of what could be reused is -------------------------------------------------- */

/* One turn of a trace: its prompt is looked up, and what follows is stored, blocks and a state at its end. */
typedef struct dm_kv_turn {
    const int32_t *ids; /* n of them; valid until the next call */
    int64_t prompt;     /* ids looked up; the last one is always computed.  0 < prompt <= n */
    int64_t n;          /* with what the model wrote */
} dm_kv_turn;
/* 1: a turn, 0: the end, or DM_E…. */
typedef int (*dm_kv_next)(void *ctx, dm_kv_turn *out, dm_err *e);
typedef struct dm_kv_replay_opts {
    const char *dir;                  /* the store is made in a directory of its own beneath it, and removed */
    size_t block_bytes, state_bytes;  /* small ones do: what is measured is what stays, not how fast */
    int64_t disk_bytes_max;           /* of the store */
} dm_kv_replay_opts;
typedef struct dm_kv_replay {
    int64_t turns, prompt_tokens, reused_tokens;
    int64_t bytes_written, live_bytes_max, evicted_entries;
} dm_kv_replay;
/* Replays a trace through a store of its own whose RAM tier is next to nothing, so that the disk tier's policy alone decides.  fn is
 * called after every turn with total 0; false: DM_ECANCELED. */
DM_API int dm_kv_replay_run(const dm_kv_replay_opts *o, dm_kv_next next, void *next_ctx, dm_kv_replay *out, dm_kv_progress fn, void *ctx, dm_err *e);

#ifdef __cplusplus
}
#endif
#endif
