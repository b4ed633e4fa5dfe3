/* transfer_format.c — the bytes of an export (transfer.h has the table).  The reader believes nothing: no length moves memory that the
 * source has not filled, no number is used before it was compared. */
#include "agent/transfer.h"

#include <string.h>

#define STEP ((size_t)1 << 20) /* memory grows by this at most ahead of what was read */

static const char magic[8] = { 'D', 'M', 'S', 'E', 'S', 'S', '\r', '\n' };

static void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++) p[i] = (uint8_t)(v >> (8 * i));
}

static void put64(uint8_t *p, uint64_t v)
{
    for (int i = 0; i < 8; i++) p[i] = (uint8_t)(v >> (8 * i));
}

static uint32_t get32(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24; }
static uint64_t get64(const uint8_t *p) { return get32(p) | (uint64_t)get32(p + 4) << 32; }

static bool all_zero(const uint8_t *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i]) return false;
    return true;
}

/* The sum of a record takes in its payload, which may be large: two sums, the second over the first. */
static void record_sum(uint8_t out[16], const uint8_t head[24], const void *p, size_t n)
{
    uint8_t both[24 + 16];
    memcpy(both, head, 24);
    dm_xxh3_128(both + 24, p ? p : "", n);
    dm_xxh3_128(out, both, sizeof both);
}

static uint64_t bytes_max(xfer_kind kind, uint64_t block_bytes)
{
    switch (kind) {
    case XFER_EVENT: return XFER_EVENT_BYTES_MAX;
    case XFER_BLOCK: return block_bytes;
    case XFER_STATE: return XFER_STATE_BYTES_MAX;
    default: return sizeof(dm_hash);
    }
}

/* ---- writing -------------------------------------------------------------------------------------------- */

static int emit(xfer_writer *w, const void *p, size_t n, dm_err *e)
{
    dm_blake2b_add(&w->digest, p, n);
    return n ? w->fn(w->ctx, p, n, e) : 0;
}

int xfer_write_head(xfer_writer *w, xfer_write_fn fn, void *ctx, const xfer_head *h, dm_err *e)
{
    uint8_t b[XFER_HEAD_BYTES] = { 0 };
    w->fn = fn;
    w->ctx = ctx;
    dm_blake2b_init(&w->digest);
    memcpy(b, magic, 8);
    put32(b + 8, XFER_VERSION);
    put32(b + 12, XFER_HEAD_BYTES);
    memcpy(b + 16, h->root.b, 32);
    memcpy(b + 48, h->weights.b, 32);
    memcpy(b + 80, h->tokenizer.b, 32);
    put64(b + 112, h->block_bytes);
    put32(b + 120, DM_KV_BLOCK);
    put64(b + 128, h->events);
    put64(b + 136, h->tokens);
    memcpy(b + 144, h->session, DM_SESSION_ID_CHARS);
    memcpy(b + 176, h->numerics, strnlen(h->numerics, sizeof h->numerics - 1));
    dm_xxh3_128(b + 304, b, 304);
    return emit(w, b, sizeof b, e);
}

int xfer_write_record(xfer_writer *w, xfer_kind kind, uint64_t index, const void *p, size_t n, dm_err *e)
{
    uint8_t head[XFER_RECORD_BYTES] = { 0 };
    if (n > bytes_max(kind, n))
        return dm_err_set(e, DM_ELIMIT, "export", "%s %llu has %zu bytes, which no importer would take", kind == XFER_EVENT ? "event" : "the state at token",
                          (unsigned long long)index, n);
    put32(head, kind);
    put64(head + 8, index);
    put64(head + 16, n);
    record_sum(head + 24, head, p, n);
    int rc = emit(w, head, sizeof head, e);
    return rc < 0 ? rc : emit(w, p, n, e);
}

int xfer_write_end(xfer_writer *w, dm_err *e)
{
    dm_blake2b all = w->digest; /* over everything before this record */
    dm_hash whole;
    dm_blake2b_end(&all, &whole);
    return xfer_write_record(w, XFER_END, 0, whole.b, sizeof whole.b, e);
}

/* ---- reading --------------------------------------------------------------------------------------------- */

static int cut_short(dm_err *e) { return dm_err_set(e, DM_ECORRUPT, "import", "the export is cut short; make or send it again"); }

static int changed(dm_err *e, const char *what)
{
    return dm_err_set(e, DM_ECORRUPT, "import", "the export was changed on its way (%s); make or send it again", what);
}

static int take(xfer_reader *r, void *p, size_t n, dm_err *e)
{
    int64_t got = r->fn(r->ctx, p, n, e);
    if (got < 0) return (int)got;
    return (size_t)got == n ? 0 : cut_short(e);
}

static int not_one(dm_err *e) { return dm_err_set(e, DM_EFORMAT, "import", "this is not an exported session"); }

static int head_decode(xfer_head *h, const uint8_t *b, dm_err *e)
{
    uint8_t sum[16];
    dm_xxh3_128(sum, b, 304);
    if (memcmp(sum, b + 304, 16) != 0) return changed(e, "its header");
    memcpy(h->root.b, b + 16, 32);
    memcpy(h->weights.b, b + 48, 32);
    memcpy(h->tokenizer.b, b + 80, 32);
    h->block_bytes = get64(b + 112);
    h->events = get64(b + 128);
    h->tokens = get64(b + 136);
    memcpy(h->session, b + 144, DM_SESSION_ID_CHARS);
    memcpy(h->numerics, b + 176, sizeof h->numerics - 1);
    bool id = all_zero(b + 144 + DM_SESSION_ID_CHARS, 32 - DM_SESSION_ID_CHARS) && all_zero(b + 176 + sizeof h->numerics - 1, 64 - sizeof h->numerics + 1);
    for (int i = 0; i < DM_SESSION_ID_CHARS; i++) id &= (h->session[i] >= '0' && h->session[i] <= '9') || (h->session[i] >= 'A' && h->session[i] <= 'Z');
    for (const char *p = h->numerics; *p; p++) id &= *p > 32 && *p < 127;
    if (!id || !all_zero(b + 124, 4) || !all_zero(b + 240, 64) || get32(b + 120) != DM_KV_BLOCK || h->block_bytes > (uint64_t)1 << 30 || h->events == 0 ||
        h->events > XFER_EVENTS_MAX || h->tokens > INT32_MAX)
        return dm_err_set(e, DM_EFORMAT, "import", "the header of the export makes no sense; it was written by something else");
    return 0;
}

int xfer_reader_begin(xfer_reader *r, xfer_read_fn fn, void *ctx, dm_err *e)
{
    uint8_t b[XFER_HEAD_BYTES];
    *r = (xfer_reader){ .fn = fn, .ctx = ctx };
    dm_blake2b_init(&r->digest);
    int64_t got = fn(ctx, b, 16, e);
    if (got < 0) return (int)got;
    if (got < 16) return got >= 8 && memcmp(b, magic, 8) == 0 ? cut_short(e) : not_one(e);
    if (memcmp(b, magic, 8) != 0) return not_one(e);
    if (get32(b + 8) > XFER_VERSION)
        return dm_err_set(e, DM_EVERSION, "import", "the export has format %u and this program knows %d; use the newer program", get32(b + 8), XFER_VERSION);
    if (get32(b + 8) != XFER_VERSION || get32(b + 12) != XFER_HEAD_BYTES) return changed(e, "its header");
    int rc = take(r, b + 16, sizeof b - 16, e);
    if (rc == 0) rc = head_decode(&r->head, b, e);
    if (rc == 0) dm_blake2b_add(&r->digest, b, sizeof b);
    return rc;
}

/* May a record with this head come here? */
static bool in_order(const xfer_reader *r, xfer_kind kind, uint64_t index, uint64_t n)
{
    const xfer_head *h = &r->head;
    switch (kind) {
    case XFER_EVENT: return index == r->events + 1 && index <= h->events && n > 0;
    case XFER_BLOCK: return r->events == h->events && !r->states && index == r->blocks && index < h->tokens / DM_KV_BLOCK && n == h->block_bytes && n > 0;
    case XFER_STATE: return r->events == h->events && index > r->state_pos && index <= h->tokens && index / DM_KV_BLOCK <= r->blocks;
    case XFER_END: return r->events == h->events && index == 0 && n == sizeof(dm_hash);
    default: return false;
    }
}

static int take_payload(xfer_reader *r, uint64_t n, dm_err *e)
{
    dm_buf_clear(&r->payload);
    while (r->payload.n < n) {
        size_t some = n - r->payload.n < STEP ? (size_t)(n - r->payload.n) : STEP;
        if (dm_buf_reserve(&r->payload, some + 1) < 0) return dm_err_set(e, DM_ENOMEM, "import", "no memory for a record of %llu bytes", (unsigned long long)n);
        int rc = take(r, r->payload.p + r->payload.n, some, e);
        if (rc < 0) return rc;
        r->payload.n += some;
        r->payload.p[r->payload.n] = 0;
    }
    return 0;
}

static void count(xfer_reader *r)
{
    if (r->kind == XFER_EVENT) r->events++;
    if (r->kind == XFER_BLOCK) r->blocks++;
    if (r->kind == XFER_STATE) r->states++, r->state_pos = r->index;
}

int xfer_reader_next(xfer_reader *r, dm_err *e)
{
    uint8_t head[XFER_RECORD_BYTES], sum[16];
    dm_hash whole;
    if (r->kind == XFER_END) return 0;
    int rc = take(r, head, sizeof head, e);
    if (rc < 0) return rc;
    uint32_t kind = get32(head);
    uint64_t index = get64(head + 8), n = get64(head + 16);
    if (kind < XFER_EVENT || kind > XFER_END || get32(head + 4) || n > bytes_max((xfer_kind)kind, r->head.block_bytes) || !in_order(r, (xfer_kind)kind, index, n))
        return changed(e, "a record that cannot stand there");
    rc = take_payload(r, n, e);
    if (rc < 0) return rc;
    record_sum(sum, head, r->payload.p, r->payload.n);
    if (memcmp(sum, head + 24, 16) != 0) return changed(e, "a checksum");
    r->kind = (xfer_kind)kind;
    r->index = index;
    if (r->kind != XFER_END) {
        count(r);
        dm_blake2b_add(&r->digest, head, sizeof head);
        dm_blake2b_add(&r->digest, r->payload.p, r->payload.n);
        return 1;
    }
    dm_blake2b_end(&r->digest, &whole);
    if (memcmp(whole.b, r->payload.p, sizeof whole.b) != 0) return changed(e, "the digest of the whole");
    r->whole = whole;
    return 0;
}

void xfer_reader_free(xfer_reader *r) { dm_buf_free(&r->payload); }
