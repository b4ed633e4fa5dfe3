/* An exported session.  What the reader accepts is what the writer writes of it, byte for byte, and its events fold or are refused in a
 * sentence.  The first byte of an input says whether the checksums are put right before it is read, since no mutation would guess
 * one. */
#include <fcntl.h>
#include <unistd.h>

#include "agent/transfer.h"
#include "tests/fuzz/lib.h"

static uint64_t get64(const uint8_t *p)
{
    uint64_t v = 0;
    for (int i = 7; i >= 0; i--) v = v << 8 | p[i];
    return v;
}

/* Header and records as far as their lengths lead; the digest of an end record, too. */
static void mend(uint8_t *p, size_t n)
{
    dm_blake2b digest;
    if (n < XFER_HEAD_BYTES) return;
    dm_xxh3_128(p + 304, p, 304);
    dm_blake2b_init(&digest);
    dm_blake2b_add(&digest, p, XFER_HEAD_BYTES);
    for (size_t at = XFER_HEAD_BYTES; n - at >= XFER_RECORD_BYTES;) {
        uint64_t len = get64(p + at + 16);
        uint8_t both[40], *payload = p + at + XFER_RECORD_BYTES;
        if (len > n - at - XFER_RECORD_BYTES) return;
        if (p[at] == XFER_END && len == sizeof(dm_hash)) {
            dm_blake2b all = digest;
            dm_hash whole;
            dm_blake2b_end(&all, &whole);
            memcpy(payload, whole.b, sizeof whole.b);
        }
        memcpy(both, p + at, 24);
        dm_xxh3_128(both + 24, payload, len);
        dm_xxh3_128(p + at + 24, both, sizeof both);
        dm_blake2b_add(&digest, p + at, XFER_RECORD_BYTES + len);
        at += XFER_RECORD_BYTES + len;
    }
}

static int64_t read_bytes(void *ctx, void *p, size_t n, dm_err *e)
{
    fuzz_bytes *in = ctx;
    size_t got = n < in->n ? n : in->n;
    (void)e;
    if (got) memcpy(p, in->p, got);
    in->p += got;
    in->n -= got;
    return (int64_t)got;
}

static int keep_bytes(void *ctx, const void *p, size_t n, dm_err *e)
{
    (void)e;
    return dm_buf_append(ctx, p, n);
}

/* The number of bytes that make an export, or 0. */
static size_t read_all(const uint8_t *p, size_t n, xfer_head *head)
{
    fuzz_bytes in = { p, n };
    xfer_reader r;
    xfer_writer w;
    dm_buf again = { 0 };
    dm_err e = { 0 };
    uint64_t records = 0;
    int rc = xfer_reader_begin(&r, read_bytes, &in, &e);
    if (rc == 0) {
        FUZZ_OK(xfer_write_head(&w, keep_bytes, &again, &r.head, &e));
        *head = r.head;
        FUZZ_CHECK(strlen(r.head.session) == DM_SESSION_ID_CHARS);
    }
    while (rc == 0 && (rc = xfer_reader_next(&r, &e)) == 1) {
        rc = 0;
        FUZZ_CHECK(r.payload.n <= n && ++records <= n / XFER_RECORD_BYTES);
        FUZZ_CHECK(r.kind != XFER_BLOCK || r.payload.n == r.head.block_bytes);
        FUZZ_CHECK(r.kind != XFER_STATE || (r.index <= r.head.tokens && r.index / DM_KV_BLOCK <= r.blocks));
        FUZZ_OK(xfer_write_record(&w, r.kind, r.index, r.payload.p, r.payload.n, &e));
    }
    size_t used = 0;
    if (rc < 0) {
        fuzz_told(rc, &e);
    } else {
        FUZZ_OK(xfer_write_end(&w, &e));
        used = n - in.n;
        FUZZ_CHECK(again.n == used && memcmp(again.p, p, used) == 0 && r.events == r.head.events);
        FUZZ_CHECK(xfer_reader_next(&r, &e) == 0);
    }
    dm_buf_free(&again);
    xfer_reader_free(&r);
    return used;
}

/* The same as a session: of a model that it fits. */
static void check_session(const uint8_t *p, size_t n, const xfer_head *h, size_t used)
{
    transfer_in o = { .weights = h->weights, .tokenizer = h->tokenizer, .root = h->root, .numerics = "fuzz", .model = "fuzz", .vocab = 129280 };
    transfer_report rep;
    dm_err e = { 0 };
    int fd = open(fuzz_file(0, p, n, 0), O_RDONLY | O_CLOEXEC);
    FUZZ_CHECK(fd >= 0);
    int rc = transfer_check(&o, fd, &rep, &e);
    close(fd);
    if (rc < 0) fuzz_told(rc, &e);
    else FUZZ_CHECK(used == n && (uint64_t)rep.events == h->events && (uint64_t)rep.tokens == h->tokens);
}

int FUZZ_ENTRY(const uint8_t *data, size_t n)
{
    fuzz_bytes in = { data, n };
    uint8_t how = fuzz_byte(&in), *copy = malloc(in.n + 1);
    xfer_head head = { 0 };
    FUZZ_CHECK(copy != NULL);
    memcpy(copy, in.p, in.n);
    if (how & 1) mend(copy, in.n);
    size_t used = read_all(copy, in.n, &head);
    if (head.session[0]) check_session(copy, in.n, &head, used);
    free(copy);
    return 0;
}
