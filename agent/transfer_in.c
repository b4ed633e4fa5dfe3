/* transfer_in.c — takes a session in, all or nothing.
 *
 *   1  the whole export is read and checked, its events are folded as a resume would fold them; nothing is written
 *   2  the journal is asked whether the session may come; it is claimed
 *   3  blocks and states are put, at most QUEUE_BYTES ahead of the disk, and flushed
 *   4  the events, in one transaction
 * A process that dies in 1 to 3 leaves no session, and at most cache under keys that follow from the ids; a repeat goes the same
 * way and finds it there.  The store may hold less than was sent (a small quota): then the first turn computes the rest. */
#include "agent/transfer.h"

#include <errno.h>
#include <string.h>
#include <unistd.h>

#define QUEUE_BYTES ((int64_t)64 << 20)
#define FLUSH_MS 600000 /* a slow disk and a long queue; a full one says so at once */
#define SLICE_MS 1000

typedef struct in {
    const transfer_in *o;
    int fd;
    transfer_report *rep;
    ledger led;
    dm_hash whole;      /* of the first reading */
    int64_t text_bytes; /* of all events */
    xfer_reader rows;   /* over the events, for the journal */
    bool rows_open;
} in;

/* ---- a regular file as a source ------------------------------------------------------------------------------ */

static int64_t file_read(void *ctx, void *p, size_t n, dm_err *e)
{
    in *x = ctx;
    size_t got = 0;
    if (x->o->progress && !x->o->progress(x->o->ctx, x->rep->bytes)) return dm_err_set(e, DM_ECANCELED, "import", "interrupted");
    while (got < n) {
        ssize_t k = read(x->fd, (uint8_t *)p + got, n - got);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return dm_err_sys(e, errno, "import", "reading the export");
        if (k == 0) break;
        got += (size_t)k;
    }
    return (int64_t)got;
}

static int rewind_to_start(in *x, dm_err *e)
{
    return lseek(x->fd, 0, SEEK_SET) == 0 ? 0 : dm_err_sys(e, errno, "import", "reading the export again");
}

/* ---- 1: check ---------------------------------------------------------------------------------------------------- */

static const dm_hash none; /* the root of an export without KV */

static int foreign(dm_err *e, const xfer_head *h, const char *what)
{
    return dm_err_set(e, DM_EFOREIGN, "import", "session %s belongs to %s; nothing was changed", h->session, what);
}

int transfer_fits(const transfer_in *o, const xfer_head *h, dm_err *e)
{
    char what[200];
    if (!dm_hash_equal(&h->weights, &o->weights)) return foreign(e, h, "another model (other weights); import it with --model of those");
    if (!dm_hash_equal(&h->tokenizer, &o->tokenizer)) return foreign(e, h, "another model (another tokenizer.json)");
    if (!o->kv || dm_hash_equal(&h->root, &none) || dm_hash_equal(&h->root, &o->root)) return 0;
    snprintf(what, sizeof what, "KV that was computed %s%s%s; with --no-kv the journal alone comes", strcmp(h->numerics, o->numerics) ? "on the numeric path " : "under another layout or salt",
             strcmp(h->numerics, o->numerics) ? h->numerics : "", strcmp(h->numerics, o->numerics) ? ", which is not the one here" : "");
    return foreign(e, h, what);
}

static int fold_event(in *x, const xfer_reader *r, dm_err *e)
{
    json_t *event = json_loadb((const char *)r->payload.p, r->payload.n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, NULL);
    const char *type = json_str(event, "type");
    char weights[65], tokenizer[65];
    dm_hex(weights, r->head.weights.b, 32);
    dm_hex(tokenizer, r->head.tokenizer.b, 32);
    int rc = 0;
    if (!event || !*type || memchr(r->payload.p, 0, r->payload.n)) rc = dm_err_set(e, DM_EFORMAT, "import", "event %llu of the export is no event", (unsigned long long)r->index);
    else if ((r->index == 1) != (strcmp(type, "created") == 0)) rc = dm_err_set(e, DM_EFORMAT, "import", "the events of the export do not begin where a session begins");
    if (rc == 0 && r->index == 1) {
        if (json_int(event, "format", 0) > DM_JOURNAL_FORMAT_VERSION)
            rc = dm_err_set(e, DM_EVERSION, "import", "session %s was written by a newer program (format %lld, this one knows %d)", r->head.session,
                            (long long)json_int(event, "format", 0), DM_JOURNAL_FORMAT_VERSION);
        else if (strcmp(json_str(event, "id"), r->head.session) || strcmp(json_str(event, "weights"), weights) || strcmp(json_str(event, "tokenizer"), tokenizer))
            rc = dm_err_set(e, DM_EFORMAT, "import", "the header of the export speaks of another session than its events");
    }
    if (rc == 0) rc = ledger_apply(&x->led, event, e);
    json_decref(event);
    x->text_bytes += (int64_t)r->payload.n;
    return rc;
}

static int check_ids(const in *x, const xfer_reader *r, dm_err *e)
{
    if (x->led.ids.n != r->head.tokens) return dm_err_set(e, DM_EFORMAT, "import", "the header of the export speaks of other tokens than its events");
    for (size_t i = 0; i < x->led.ids.n; i++)
        if (x->led.ids.p[i] >= x->o->vocab) return dm_err_set(e, DM_EFORMAT, "import", "token id %d is not in the model's vocabulary", x->led.ids.p[i]);
    return 0;
}

static int check_all(in *x, xfer_reader *r, dm_err *e)
{
    uint8_t more;
    int rc = transfer_fits(x->o, &r->head, e), got = rc;
    snprintf(x->rep->session, sizeof x->rep->session, "%s", r->head.session);
    while (got == 0 && (got = xfer_reader_next(r, e)) == 1) {
        x->rep->bytes += (int64_t)r->payload.n;
        if (r->kind != XFER_EVENT && dm_hash_equal(&r->head.root, &none)) return dm_err_set(e, DM_EFORMAT, "import", "the export has KV of no store");
        got = r->kind == XFER_EVENT ? fold_event(x, r, e) : 0;
        if (got == 0 && r->kind == XFER_STATE) x->rep->pos_sent = (int64_t)r->index;
        if (got == 0 && r->kind == XFER_EVENT && r->events == r->head.events) got = check_ids(x, r, e);
    }
    if (got < 0) return got;
    int64_t extra = file_read(x, &more, 1, e);
    if (extra < 0) return (int)extra;
    if (extra) return dm_err_set(e, DM_ECORRUPT, "import", "there is more behind the end of the export; make or send it again");
    x->whole = r->whole;
    x->rep->events = (int64_t)r->events;
    x->rep->tokens = (int64_t)x->led.ids.n;
    return 0;
}

/* ---- 2 and 4: the journal ------------------------------------------------------------------------------------------ */

static int row(void *ctx, int64_t seq, const char **text, size_t *bytes, dm_err *e)
{
    in *x = ctx;
    int rc = 0;
    if (!x->rows_open || (int64_t)x->rows.events >= seq) {
        if (x->rows_open) xfer_reader_free(&x->rows);
        rc = rewind_to_start(x, e);
        if (rc == 0) rc = xfer_reader_begin(&x->rows, file_read, x, e), x->rows_open = true;
    }
    while (rc == 0 && (int64_t)x->rows.events < seq) {
        int got = xfer_reader_next(&x->rows, e);
        rc = got == 1 ? 0 : got < 0 ? got : dm_err_set(e, DM_ECORRUPT, "import", "the export has changed while it was read");
    }
    if (rc < 0) return rc;
    *text = (const char *)x->rows.payload.p;
    *bytes = x->rows.payload.n;
    return 0;
}

static int adopt(in *x, bool only_check, dm_err *e)
{
    const dm_journal_rows rows = { .n = x->rep->events, .bytes = x->text_bytes, .row = row, .ctx = x };
    return dm_journal_adopt(x->o->journal, x->rep->session, &rows, only_check, &x->rep->events_new, e);
}

/* ---- 3: the store ---------------------------------------------------------------------------------------------------- */

static int flush(in *x, dm_err *e)
{
    int rc = DM_ETIMEDOUT;
    for (int waited = 0; waited < FLUSH_MS && rc == DM_ETIMEDOUT; waited += SLICE_MS) {
        if (x->o->progress && !x->o->progress(x->o->ctx, x->rep->bytes)) return dm_err_set(e, DM_ECANCELED, "import", "interrupted");
        rc = dm_kv_flush(x->o->kv, SLICE_MS, e);
    }
    if (rc == DM_ENOSPC) dm_err_prefix(e, "the disk is full; nothing of the session was taken in");
    return rc;
}

/* An entry that is larger than the quota is one that the store does not have. */
static int put(in *x, const xfer_reader *r, dm_hash *chain, dm_err *e)
{
    const int32_t *ids = x->led.ids.p;
    dm_err err = { 0 };
    int rc;
    if (dm_fault("transfer.put")) return dm_err_set(e, DM_EIO, "import", "input/output error");
    if (r->kind == XFER_BLOCK) {
        dm_kv_chain(&chain[r->index + 1], &chain[r->index], ids + r->index * DM_KV_BLOCK);
        rc = dm_kv_put_block_after(x->o->kv, &chain[r->index], &chain[r->index + 1], r->payload.p, r->payload.n, &err);
    } else {
        uint64_t last = r->index / DM_KV_BLOCK;
        rc = dm_kv_put_state(x->o->kv, &chain[last], ids + last * DM_KV_BLOCK, (int)(r->index % DM_KV_BLOCK), r->payload.p, r->payload.n, &err);
    }
    if (rc < 0 && rc != DM_ELIMIT) {
        if (e) *e = err;
        return rc;
    }
    if (r->kind == XFER_BLOCK) x->rep->blocks++;
    else x->rep->states++;
    return dm_kv_queued_bytes(x->o->kv) > QUEUE_BYTES ? flush(x, e) : 0;
}

static int put_all(in *x, dm_err *e)
{
    xfer_reader r = { 0 };
    dm_hash *chain = dm_calloc(x->led.ids.n / DM_KV_BLOCK + 1, sizeof *chain);
    int rc = chain ? rewind_to_start(x, e) : dm_err_set(e, DM_ENOMEM, "import", "out of memory");
    if (rc == 0) rc = xfer_reader_begin(&r, file_read, x, e);
    if (rc == 0) chain[0] = r.head.root;
    while (rc == 0 && (rc = xfer_reader_next(&r, e)) == 1) {
        x->rep->bytes += (int64_t)r.payload.n;
        rc = r.kind == XFER_EVENT ? 0 : put(x, &r, chain, e);
    }
    if (rc == 0 && !dm_hash_equal(&r.whole, &x->whole)) rc = dm_err_set(e, DM_ECORRUPT, "import", "the export has changed while it was read");
    xfer_reader_free(&r);
    dm_free(chain);
    return rc == 0 ? flush(x, e) : rc;
}

/* ---- all ---------------------------------------------------------------------------------------------------------------- */

static int check(in *x, dm_err *e)
{
    xfer_reader r;
    int rc = rewind_to_start(x, e);
    if (rc < 0) return rc;
    rc = xfer_reader_begin(&r, file_read, x, e);
    if (rc == 0) rc = check_all(x, &r, e);
    xfer_reader_free(&r);
    return rc;
}

static int import_claimed(in *x, dm_err *e)
{
    int rc = adopt(x, true, e);
    x->rep->bytes = 0;
    if (rc == 0 && x->o->kv) rc = put_all(x, e);
    if (rc == 0 && dm_fault("transfer.flushed")) rc = dm_err_set(e, DM_EIO, "import", "input/output error");
    if (rc == 0 && x->o->kv) rc = dm_kv_durable(x->o->kv, x->led.ids.p, (int64_t)x->led.ids.n, &x->rep->pos, e);
    if (rc == 0) rc = adopt(x, false, e);
    if (rc == 0) dm_fault("transfer.committed");
    return rc;
}

int transfer_check(const transfer_in *o, int fd, transfer_report *rep, dm_err *e)
{
    in x = { .o = o, .fd = fd, .rep = rep };
    *rep = (transfer_report){ 0 };
    int rc = check(&x, e);
    ledger_free(&x.led);
    return rc;
}

int transfer_import(const transfer_in *o, int fd, transfer_report *rep, dm_err *e)
{
    in x = { .o = o, .fd = fd, .rep = rep };
    *rep = (transfer_report){ 0 };
    int rc = check(&x, e);
    if (rc == 0 && dm_fault("transfer.checked")) rc = dm_err_set(e, DM_EIO, "import", "input/output error");
    if (rc == 0) rc = dm_journal_claim(o->journal, rep->session, e);
    if (rc == 0) {
        rc = import_claimed(&x, e);
        dm_journal_release(o->journal, rep->session);
    }
    if (x.rows_open) xfer_reader_free(&x.rows);
    ledger_free(&x.led);
    return rc;
}
