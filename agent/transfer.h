/* transfer.h — a session on its way to another state directory: the file, and who writes and reads it.
 *
 * Nouns
 *   export   one stream of bytes: header, the session's events, the blocks of its chain, its states, an end record
 *   source   where an export comes from: a file, a pipe, a socket
 *
 * The order is fixed, so a reader needs one record in memory at a time and never seeks; a writer neither.  The bytes of blocks
 * and states carry no keys: whoever imports makes them from the events and its own root, so they cannot be put under others.
 *
 * Format (integers little endian)
 *   header, 320 bytes
 *        0     8  "DMSESS\r\n" (a transfer as text changes it)
 *        8     4  version (1)             12  4  header bytes (320)
 *       16    32  root of the store       48 32  weights       80 32  tokenizer
 *      112     8  bytes of a block       120  4  positions of a block (256)   124  4  zero
 *      128     8  events                 136  8  tokens of the timeline
 *      144    32  session id, zero padded
 *      176    64  numerics id, zero padded
 *      240    64  zero
 *      304    16  XXH3-128 over bytes 0 .. 304
 *   record, 40 bytes and payload
 *        0     4  kind: 1 event, 2 block, 3 state, 4 end      4  4  zero
 *        8     8  event: its number, from 1; block: its index, from 0; state: its position; end: 0
 *       16     8  payload bytes
 *       24    16  XXH3-128 over bytes 0 .. 24, and the payload behind them
 *   payload
 *        event    JSON text, as in the journal          block, state   as in the store
 *        end      BLAKE2b-256 over everything before this record
 * Events first, 1 … events; then blocks from 0 on without a gap; then states, each deeper than the one before, each behind a block
 * that came.  Nothing follows the end. */
#ifndef DM_TRANSFER_H
#define DM_TRANSFER_H

#include "agent/agent_int.h"

#define XFER_VERSION 1
#define XFER_HEAD_BYTES 320
#define XFER_RECORD_BYTES 40
#define XFER_EVENT_BYTES_MAX ((uint64_t)64 << 20)
#define XFER_STATE_BYTES_MAX ((uint64_t)1 << 30)
#define XFER_EVENTS_MAX ((uint64_t)1 << 32)

typedef struct xfer_head {
    dm_hash root, weights, tokenizer; /* root: all zero when no block and no state follows */
    uint64_t block_bytes, events, tokens;
    char session[DM_SESSION_ID_CHARS + 1], numerics[48];
} xfer_head;

typedef enum xfer_kind { XFER_EVENT = 1, XFER_BLOCK, XFER_STATE, XFER_END } xfer_kind;

/* ---- transfer_format.c: bytes ------------------------------------------------------------------------ */

/* All n bytes, or an error. */
typedef int (*xfer_write_fn)(void *ctx, const void *p, size_t n, dm_err *e);
/* Bytes read: fewer than n only at the end; or an error. */
typedef int64_t (*xfer_read_fn)(void *ctx, void *p, size_t n, dm_err *e);

typedef struct xfer_writer {
    xfer_write_fn fn;
    void *ctx;
    dm_blake2b digest;
} xfer_writer;
int xfer_write_head(xfer_writer *w, xfer_write_fn fn, void *ctx, const xfer_head *h, dm_err *e);
/* DM_ELIMIT: a payload that no reader takes. */
int xfer_write_record(xfer_writer *w, xfer_kind kind, uint64_t index, const void *p, size_t n, dm_err *e);
int xfer_write_end(xfer_writer *w, dm_err *e);

typedef struct xfer_reader {
    xfer_read_fn fn;
    void *ctx;
    dm_blake2b digest;
    xfer_head head;
    xfer_kind kind;     /* of the record read last */
    uint64_t index;
    dm_buf payload;     /* owned */
    uint64_t events, blocks, states, state_pos; /* so far */
    dm_hash whole;      /* the digest, once the end was read */
} xfer_reader;
/* Starts a reader and reads the header.  DM_EFORMAT: not an export.  DM_EVERSION: of a newer program.  DM_ECORRUPT: cut short, or changed
 * on its way.  xfer_reader_free also after an error. */
int xfer_reader_begin(xfer_reader *r, xfer_read_fn fn, void *ctx, dm_err *e);
/* 1: a record is in kind, index and payload; 0: the end, and everything was as it was written.  Errors as above; DM_ENOMEM. */
int xfer_reader_next(xfer_reader *r, dm_err *e);
void xfer_reader_free(xfer_reader *r);

/* ---- transfer_out.c, transfer_in.c: sessions ------------------------------------------------------------- */

typedef struct transfer_report {
    char session[DM_SESSION_ID_CHARS + 1];
    int64_t events, blocks, states, tokens;
    int64_t pos;        /* tokens that need no prefill: in the export; when imported, as the store has it */
    int64_t bytes;      /* of the export */
    int64_t events_new; /* imported: of these, the journal did not have */
    int64_t pos_sent;   /* imported: what pos was in the export */
} transfer_report;

/* Called now and then; false: stop with DM_ECANCELED. */
typedef bool (*transfer_progress)(void *ctx, int64_t bytes);

typedef struct transfer_out {
    dm_journal *journal;
    char *const *stores; /* directories of stores; the one that knows the session best is taken */
    size_t nstores;
    const char *session; /* full id */
    transfer_progress progress;
    void *ctx;
} transfer_out;
/* Writes a session.  Holds its claim meanwhile: DM_EBUSY while somebody runs it.  What the stores lack or lose meanwhile is left out: a
 * cache that is missing costs time only. */
int transfer_export(const transfer_out *o, xfer_write_fn fn, void *fn_ctx, transfer_report *rep, dm_err *e);

typedef struct transfer_in {
    dm_journal *journal;
    dm_kv *kv;           /* NULL: the journal alone is taken */
    dm_hash root, weights, tokenizer;
    const char *numerics, *model;
    int32_t vocab;       /* ids are below it */
    transfer_progress progress;
    void *ctx;
} transfer_in;
/* Whether an export with this header is for us.  DM_EFOREIGN says what differs. */
int transfer_fits(const transfer_in *o, const xfer_head *h, dm_err *e);
/* Reads a regular file to its end and checks all of it, as transfer_import does first. */
int transfer_check(const transfer_in *o, int fd, transfer_report *rep, dm_err *e);
/* Imports from a regular file, all or nothing: it is read to its end and checked first; then blocks and states are put and made
 * durable; the events come last, in one transaction.  What is left behind when it stops before that is cache, under its right keys.
 * DM_EFOREIGN, DM_EVERSION, DM_EFORMAT, DM_ECORRUPT; DM_EEXIST: the session is here and has gone another way; DM_EBUSY: somebody runs
 * it; DM_ENOSPC.  Doing it again is fine, and so is bringing a session forward. */
int transfer_import(const transfer_in *o, int fd, transfer_report *rep, dm_err *e);

/* ---- transfer_net.c: sockets ---------------------------------------------------------------------------------- */

typedef struct net_addr {
    char text[300];              /* as given, for messages */
    char path[108];              /* unix:PATH; "" otherwise */
    char host[256], port[8];
} net_addr;
/* "unix:PATH", "HOST:PORT", "[v6]:PORT", ":PORT" (this machine).  DM_EUSAGE. */
int net_parse(net_addr *out, const char *text, dm_err *e);

typedef struct net {
    int fd;
    int timeout_ms;              /* without a byte moving */
    bool (*stopped)(void);       /* asked several times a second: DM_ECANCELED */
} net;
/* Both refuse addresses that are not this machine's with DM_EUSAGE unless insecure. */
int net_connect(net *n, const net_addr *a, bool insecure, dm_err *e);
/* The name to connect to (with the port that was chosen for 0) goes to name. */
int net_listen(net *n, const net_addr *a, bool insecure, char name[320], dm_err *e);
int net_accept(const net *listener, int wait_ms, net *out, dm_err *e); /* DM_ETIMEDOUT */
void net_close(net *n);
void net_done_writing(const net *n); /* the other side reads an end */
void net_unlisten(net *n, const net_addr *a);
/* DM_EPIPE, DM_ETIMEDOUT, DM_ECANCELED.  A write stops with DM_ESTATE when the other side has answered already. */
int net_write(const net *n, const void *p, size_t len, dm_err *e);
int net_read(const net *n, void *p, size_t len, dm_err *e); /* all len bytes */
/* The answer to an export: dots while the receiver works, then "+\n", or "-CODE TEXT\n".  net_answered: 0, the receiver's code with
 * its sentence, or an error of the connection (then *broken). */
int net_answer(const net *n, int rc, const dm_err *why);
void net_working(const net *n);
int net_answered(const net *n, bool *broken, dm_err *e);

#endif
