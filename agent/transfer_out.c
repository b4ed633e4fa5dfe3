/* transfer_out.c — writes a session: its events, and what a store has of its timeline.
 *
 * No model is needed: the root and the size of blocks are in the store, and the chain follows from the ids in the events.  A
 * state directory may have several stores (other numerics, other salts); the one in which the timeline reaches deepest is taken. */
#include "agent/transfer.h"

#include <string.h>

#define STATES_MAX 4096                  /* a session has a few dozen; thinned as it grows */
#define EXPORT_RAM_BYTES ((int64_t)64 << 20)

typedef struct out {
    const transfer_out *o;
    xfer_writer w;
    xfer_write_fn fn;
    void *fn_ctx;
    ledger led;
    transfer_report *rep;
    dm_kv *kv;                           /* owned; NULL: no store knows the session */
    size_t block_bytes;
    int64_t *states;                     /* owned; positions, deepest first */
    size_t nstates;
    dm_err *e;
} out;

static int out_bytes(void *ctx, const void *p, size_t n, dm_err *e)
{
    out *x = ctx;
    if (dm_fault("transfer.send")) return dm_err_set(e, DM_EPIPE, "export", "the connection broke");
    if (x->o->progress && !x->o->progress(x->o->ctx, x->rep->bytes)) return dm_err_set(e, DM_ECANCELED, "export", "interrupted");
    x->rep->bytes += (int64_t)n;
    return x->fn(x->fn_ctx, p, n, e);
}

/* ---- the store that knows it best ------------------------------------------------------------------------ */

static int64_t deepest(dm_kv *kv, const ledger *l)
{
    dm_kv_hit hit;
    dm_err err = { 0 };
    if (dm_kv_find(kv, l->ids.p, (int64_t)l->ids.n, (int64_t)l->ids.n, &hit, &err) < 0) return 0;
    int64_t pos = hit.pos;
    dm_kv_hit_end(kv, &hit);
    return pos;
}

static void choose_store(out *x, xfer_head *h)
{
    int64_t best = 0;
    for (size_t i = 0; i < x->o->nstores; i++) {
        dm_kv_opts ko;
        dm_kv_stat st;
        dm_kv *kv = NULL;
        dm_err err = { 0 };
        int rc = dm_kv_inspect(x->o->stores[i], &ko, &st, &err);
        ko.read_only = true;
        ko.ram_bytes_max = EXPORT_RAM_BYTES;
        if (rc == 0) rc = dm_kv_open(&kv, &ko, &err);
        if (rc < 0) {
            dm_log(DM_LOG_WARN, "export: a store is left out: %s", err.text);
            continue;
        }
        int64_t pos = deepest(kv, &x->led);
        if (pos > best) {
            dm_kv_close(x->kv);
            x->kv = kv;
            best = pos;
            h->root = ko.root;
            h->block_bytes = x->block_bytes = ko.block_bytes;
        } else {
            dm_kv_close(kv);
        }
    }
    x->rep->pos = best;
}

/* ---- events -------------------------------------------------------------------------------------------------- */

static int fold_event(void *ctx, int64_t seq, const json_t *event)
{
    out *x = ctx;
    x->rep->events = seq;
    return ledger_apply(&x->led, event, x->e);
}

static int write_event(void *ctx, int64_t seq, const json_t *event)
{
    out *x = ctx;
    if (seq > x->rep->events) return 0;
    char *text = json_line(event);
    if (!text) return dm_err_set(x->e, DM_ENOMEM, "export", "out of memory");
    int rc = xfer_write_record(&x->w, XFER_EVENT, (uint64_t)seq, text, strlen(text), x->e);
    dm_free(text);
    return rc;
}

/* ---- blocks and states ---------------------------------------------------------------------------------------- */

static int write_blocks(out *x, dm_err *e)
{
    dm_kv_hit hit;
    dm_kv_tier tier;
    dm_err err = { 0 };
    void *block = dm_malloc(x->block_bytes);
    int rc = block ? dm_kv_find(x->kv, x->led.ids.p, (int64_t)x->led.ids.n, (int64_t)x->led.ids.n, &hit, e) : dm_err_set(e, DM_ENOMEM, "export", "out of memory");
    if (rc < 0) {
        dm_free(block);
        return rc;
    }
    for (int64_t i = 0; i < hit.blocks && rc == 0; i++) {
        if (dm_kv_read_block(x->kv, &hit, i, block, &tier, &err) < 0) break; /* evicted meanwhile: what hangs on it is left out, too */
        rc = xfer_write_record(&x->w, XFER_BLOCK, (uint64_t)i, block, x->block_bytes, e);
        if (rc == 0) x->rep->blocks++;
    }
    dm_kv_hit_end(x->kv, &hit);
    dm_free(block);
    return rc;
}

/* Positions of the states on the chain, from the deepest on upwards. */
static int list_states(out *x, dm_err *e)
{
    x->states = dm_calloc(STATES_MAX, sizeof *x->states);
    if (!x->states) return dm_err_set(e, DM_ENOMEM, "export", "out of memory");
    for (int64_t limit = (int64_t)x->led.ids.n; limit > 0 && x->nstates < STATES_MAX;) {
        dm_kv_hit hit;
        int rc = dm_kv_find(x->kv, x->led.ids.p, limit, limit, &hit, e);
        if (rc < 0) return rc;
        limit = hit.pos - 1;
        if (hit.pos > 0 && hit.blocks <= x->rep->blocks) x->states[x->nstates++] = hit.pos;
        dm_kv_hit_end(x->kv, &hit);
    }
    return 0;
}

static int write_state(out *x, int64_t pos, dm_buf *bytes, dm_err *e)
{
    dm_kv_hit hit;
    dm_kv_tier tier;
    dm_err err = { 0 };
    int rc = dm_kv_find(x->kv, x->led.ids.p, pos, pos, &hit, e);
    if (rc < 0) return rc;
    if (hit.pos == pos && hit.state_bytes <= XFER_STATE_BYTES_MAX && dm_kv_read_state(x->kv, &hit, bytes, &tier, &err) == 0) {
        rc = xfer_write_record(&x->w, XFER_STATE, (uint64_t)pos, bytes->p, bytes->n, e);
        if (rc == 0) {
            x->rep->states++;
            x->rep->pos = pos;
        }
    }
    dm_kv_hit_end(x->kv, &hit);
    return rc;
}

static int write_states(out *x, dm_err *e)
{
    dm_buf bytes = { 0 };
    x->rep->pos = 0;
    int rc = list_states(x, e);
    for (size_t i = x->nstates; i-- > 0 && rc == 0;) rc = write_state(x, x->states[i], &bytes, e);
    dm_buf_free(&bytes);
    return rc;
}

/* ---- all ---------------------------------------------------------------------------------------------------------- */

static int head_of(const out *x, xfer_head *h, dm_err *e)
{
    const json_t *c = x->led.created;
    const char *weights = json_str(c, "weights"), *tokenizer = json_str(c, "tokenizer");
    if (!c || strlen(weights) != 64 || strlen(tokenizer) != 64 || !dm_unhex(h->weights.b, weights, 32) || !dm_unhex(h->tokenizer.b, tokenizer, 32))
        return dm_err_set(e, DM_EFORMAT, "export", "session %s does not say which model it belongs to; it cannot be exported", x->o->session);
    memcpy(h->session, x->o->session, sizeof h->session);
    snprintf(h->numerics, sizeof h->numerics, "%s", json_str(c, "numerics"));
    h->events = (uint64_t)x->rep->events;
    h->tokens = x->led.ids.n;
    return 0;
}

static int export_claimed(out *x, dm_err *e)
{
    xfer_head h = { 0 };
    int rc = dm_journal_read(x->o->journal, x->o->session, fold_event, x, e);
    if (rc == 0) rc = head_of(x, &h, e);
    if (rc < 0) return rc;
    x->rep->tokens = (int64_t)x->led.ids.n;
    choose_store(x, &h);
    rc = xfer_write_head(&x->w, out_bytes, x, &h, e);
    if (rc == 0) rc = dm_journal_read(x->o->journal, x->o->session, write_event, x, e);
    if (rc == 0 && x->kv) rc = write_blocks(x, e);
    if (rc == 0 && x->kv) rc = write_states(x, e);
    return rc == 0 ? xfer_write_end(&x->w, e) : rc;
}

int transfer_export(const transfer_out *o, xfer_write_fn fn, void *fn_ctx, transfer_report *rep, dm_err *e)
{
    *rep = (transfer_report){ 0 };
    snprintf(rep->session, sizeof rep->session, "%s", o->session);
    int rc = dm_journal_claim(o->journal, o->session, e); /* it must not go on here while it leaves */
    if (rc < 0) return rc;
    out x = { .o = o, .fn = fn, .fn_ctx = fn_ctx, .rep = rep, .e = e };
    rc = export_claimed(&x, e);
    dm_kv_close(x.kv);
    ledger_free(&x.led);
    dm_free(x.states);
    dm_journal_release(o->journal, o->session);
    return rc;
}
