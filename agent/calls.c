/* calls.c — the calls of one reply: decided, run, and their results journaled.
 *
 *   proposed ──args wrong, tool unknown──────────────────────────────> failed
 *       ├──policy asks──> waiting ──no──> denied
 *       │                    └──yes──┐
 *       └──policy allows─────────> approved ──> started ──> finished | cancelled
 *                                     │            └──the runtime died──> unknown | approved again (rule retry)
 *                                     └──interrupted──> cancelled
 *
 * Invariants
 *   A1  `started` is on disk before the process is created, `finished` with its text before the model or a client
 *       sees it (C4).
 *   A2  Results are journaled in the order of the calls.  A read that ends early waits for its turn; if the
 *       runtime dies meanwhile it is a call without a result, and reads may be run again.
 *   A3  Reads run side by side with reads.  Anything else runs alone and in order, so that two writes to one path
 *       never overlap and a read behind a write sees it.
 *   A4  Every call gets exactly one text, whatever happens (A09). */
#include "agent/session_int.h"

#include <string.h>

#define TEXT_DENIED "error: the user did not allow this call"
#define TEXT_INTERRUPTED "error: no result: the call was interrupted by the user"
#define TEXT_NOT_ANSWERED "error: no result: the call was not approved; the user sent a message instead"
#define TEXT_UNKNOWN                                                                                                    \
    "error: the outcome of this call is unknown. The runtime was stopped while the tool ran: it may or may not have " \
    "taken effect. Check before you do it again."

static int no_memory(dm_err *e) { return dm_err_set(e, DM_ENOMEM, "session", "out of memory"); }

static bool tool_info(const dm_session *s, const char *name, dm_tool_info *info)
{
    int i = dm_tools_find(s->tools, name);
    return i >= 0 && dm_tools_info(s->tools, (size_t)i, info) == 0;
}

static void tell_approval(dm_session *s, const ledger_call *c)
{
    session_emit(s, DM_EV_APPROVAL, c->id, strlen(c->id), stream_call("approval", c));
}

int calls_begin(dm_session *s, dm_err *e)
{
    calls_end(s);
    s->runs = dm_calloc(s->led.ncalls ? s->led.ncalls : 1, sizeof *s->runs);
    if (!s->runs) return no_memory(e);
    s->nruns = s->led.ncalls;
    for (size_t i = 0; i < s->nruns; i++) s->runs[i].s = s;
    for (size_t i = 0; i < s->nruns; i++) /* asked in an earlier run, and still open */
        if (s->led.calls[i].state == CALL_WAITING && !s->o.yes) tell_approval(s, &s->led.calls[i]);
    return 0;
}

void calls_end(dm_session *s)
{
    for (size_t i = 0; i < s->nruns; i++) {
        json_decref(s->runs[i].args);
        dm_tool_result_free(&s->runs[i].result);
    }
    dm_free(s->runs);
    s->runs = NULL;
    s->nruns = 0;
}

/* ---- recording ------------------------------------------------------------------------------------ */

/* One transition that needs nothing else. */
static int record_one(dm_session *s, json_t *ev, dm_err *e) { return session_record(s, &ev, 1, e); }

/* What the client is told of a call that has its text. */
static void tell_result(dm_session *s, const ledger_call *c, int64_t wall_ms)
{
    json_array_append_new(s->calls_done, json_pack("{s:s, s:s, s:o, s:b, s:I, s:s}", "call_id", c->id, "name", c->name, "args",
                                                   stream_args(c->args), "is_error", (int)c->is_error, "wall_ms", (json_int_t)wall_ms,
                                                   "state", call_state_name(c->state)));
    session_emit(s, DM_EV_TOOL_RESULT, c->text, strlen(c->text), stream_tool_result(c, wall_ms));
}

static int resolve(dm_session *s, size_t i, call_state st, const char *text, dm_err *e)
{
    int rc = record_one(s, event_call_text(s->led.calls[i].id, st, text, true), e);
    if (rc == 0) tell_result(s, &s->led.calls[i], 0);
    return rc;
}

/* ---- deciding ---------------------------------------------------------------------------------------- */

/* Arguments are checked again when a call is taken up after a restart: only the text is in the journal. */
static int check_args(dm_session *s, size_t i, bool *refused, dm_err *e)
{
    ledger_call *c = &s->led.calls[i];
    char *text = NULL;
    *refused = false;
    if (s->runs[i].args) return 0;
    int rc = dm_tools_check(s->tools, c->name, c->args, &s->runs[i].args, &text, e);
    if (rc == DM_ETOOL && text) {
        *refused = true;
        rc = resolve(s, i, CALL_FAILED, text, e);
    }
    dm_free(text);
    return rc < 0 ? rc : 0;
}

static int approve(dm_session *s, size_t i, const char *by, dm_err *e)
{
    json_t *ev = event_call(s->led.calls[i].id, CALL_APPROVED);
    if (ev && json_object_set_new(ev, "by", json_string(by)) != 0) {
        json_decref(ev);
        ev = NULL;
    }
    int rc = record_one(s, ev, e);
    dm_fault("call.approved");
    return rc;
}

static int decide_one(dm_session *s, size_t i, dm_err *e)
{
    ledger_call *c = &s->led.calls[i];
    dm_tool_info info = { 0 };
    bool refused;
    if (c->state == CALL_STARTED || call_resolved(c->state)) return 0;
    int rc = check_args(s, i, &refused, e);
    if (rc < 0 || refused) return rc;
    if (tool_info(s, c->name, &info)) s->runs[i].reads = info.effects == DM_FX_NONE || info.effects == DM_FX_READ;
    if (c->state == CALL_WAITING && s->o.yes) return approve(s, i, "user", e);
    if (c->state != CALL_PROPOSED) return 0;
    dm_sandbox_level level = s->h->o.sandbox ? dm_sandbox_level_of(s->h->o.sandbox) : DM_SANDBOX_NONE;
    if (policy_for(&s->o, level, info.effects) == POLICY_ALLOW) return approve(s, i, s->o.yes ? "user" : "policy", e);
    rc = record_one(s, event_call(c->id, CALL_WAITING), e);
    if (rc == 0) tell_approval(s, c);
    return rc;
}

/* ---- running --------------------------------------------------------------------------------------------- */

static void call_start_done(void *ctx, dm_tool_result *r)
{
    call_run *run = ctx;
    run->result = *r; /* its strings are ours now */
    memset(r, 0, sizeof *r);
    run->run = NULL;
    run->done = true;
    session_step(run->s);
}

static int start_one(dm_session *s, size_t i, dm_err *e)
{
    ledger_call *c = &s->led.calls[i];
    call_run *run = &s->runs[i];
    int rc = record_one(s, event_call(c->id, CALL_STARTED), e); /* A1 */
    if (rc < 0) return rc;
    dm_fault("call.started");
    run->started = true;
    session_emit(s, DM_EV_TOOL_START, c->name, strlen(c->name), stream_call("tool_start", c));
    dm_err err = { 0 };
    rc = dm_tools_start(s->tools, c->name, run->args, call_start_done, run, &run->run, &err);
    dm_fault("call.running");
    if (rc < 0) {
        dm_buf text = { 0 };
        dm_buf_printf(&text, "error: the tool could not be started: %s", err.text[0] ? err.text : dm_err_text(rc));
        rc = resolve(s, i, CALL_FINISHED, dm_buf_cstr(&text), e);
        run->done = false;
        dm_buf_free(&text);
    } else if (run->done) {
        run->run = NULL; /* it ended before start returned */
    }
    return rc;
}

/* A3 */
static bool may_start(const dm_session *s, size_t i)
{
    if (s->led.calls[i].state != CALL_APPROVED) return false;
    for (size_t k = 0; k < i; k++)
        if (!call_resolved(s->led.calls[k].state) && !(s->runs[k].reads && s->runs[i].reads)) return false;
    return true;
}

/* ---- finishing -------------------------------------------------------------------------------------------- */

static void call_digest(char hex[33], const ledger_call *c, const char *text)
{
    dm_blake2b h;
    dm_hash sum;
    dm_blake2b_init(&h);
    dm_blake2b_add(&h, c->name, strlen(c->name) + 1);
    dm_blake2b_add(&h, c->args, strlen(c->args) + 1);
    dm_blake2b_add(&h, text, strlen(text));
    dm_blake2b_end(&h, &sum);
    dm_hex(hex, sum.b, 16);
}

/* The event of a finished call.  From the third equal call on, the model is told that it repeats itself; the
 * notice becomes part of the text before that is written, and never changes afterwards. */
static json_t *finished_event(const dm_session *s, const ledger_call *c, const dm_tool_result *r)
{
    char digest[33];
    call_digest(digest, c, r->text);
    int repeats = strcmp(digest, s->led.digest) == 0 ? s->led.repeats + 1 : 1;
    dm_buf text = { 0 };
    int rc = dm_buf_append(&text, r->text, strlen(r->text));
    if (rc == 0 && repeats >= LOOP_NOTICE_AT)
        rc = dm_buf_printf(&text, "\n[notice: %d calls in a row had these arguments and this result. Do something else, or answer.]", repeats);
    json_t *ev = rc == 0 ? event_call_text(c->id, r->cancelled ? CALL_CANCELLED : CALL_FINISHED, dm_buf_cstr(&text), r->is_error) : NULL;
    dm_buf_free(&text);
    json_t *more = json_pack("{s:i, s:I, s:I, s:b, s:b, s:s*, s:s, s:i}", "exit_code", r->exit_code, "wall_ms", (json_int_t)r->wall_ms,
                             "output_bytes", (json_int_t)r->output_bytes, "cut", (int)r->cut, "timed_out", (int)r->timed_out, "spill_path",
                             r->spill_path, "digest", digest, "repeats", repeats);
    if (!ev || !more || json_object_update_missing(ev, more) != 0) {
        json_decref(ev);
        ev = NULL;
    }
    json_decref(more);
    return ev;
}

static int finish_one(dm_session *s, size_t i, dm_err *e)
{
    call_run *run = &s->runs[i];
    dm_fault("call.effect");
    int rc = record_one(s, finished_event(s, &s->led.calls[i], &run->result), e);
    if (rc < 0) return rc;
    dm_fault("call.finished");
    run->done = false;
    tell_result(s, &s->led.calls[i], run->result.wall_ms);
    return 0;
}

/* A2: in order, as far as results are there. */
static int finish_in_order(dm_session *s, dm_err *e)
{
    for (size_t i = 0; i < s->nruns; i++) {
        if (call_resolved(s->led.calls[i].state)) continue;
        if (!s->runs[i].done) return 0;
        int rc = finish_one(s, i, e);
        if (rc < 0) return rc;
    }
    return 0;
}

/* ---- interruption ------------------------------------------------------------------------------------------- */

void calls_cancel_runs(dm_session *s)
{
    for (size_t i = 0; i < s->nruns; i++) {
        call_run *run = &s->runs[i];
        if (!run->run || run->done || run->cancel_sent) continue;
        run->cancel_sent = true;
        dm_tools_cancel(run->run);
    }
}

static int cancel_all(dm_session *s, dm_err *e)
{
    calls_cancel_runs(s);
    for (size_t i = 0; i < s->nruns; i++) {
        ledger_call *c = &s->led.calls[i];
        if (call_resolved(c->state)) continue;
        if (s->runs[i].started) return 0; /* its own result comes first (A2) */
        int rc = resolve(s, i, CALL_CANCELLED, TEXT_INTERRUPTED, e);
        if (rc < 0) return rc;
    }
    return 0;
}

/* ---- one step --------------------------------------------------------------------------------------------------- */

static calls_state state_now(const dm_session *s)
{
    bool open = false, busy = false;
    for (size_t i = 0; i < s->nruns; i++) {
        open |= !call_resolved(s->led.calls[i].state);
        busy |= s->runs[i].started && !call_resolved(s->led.calls[i].state);
    }
    if (!open) return CALLS_DONE;
    if (busy) return CALLS_RUNNING;
    for (size_t i = 0; i < s->nruns; i++)
        if (s->led.calls[i].state == CALL_WAITING) return CALLS_ASK;
    return CALLS_RUNNING;
}

int calls_step(dm_session *s, calls_state *out, dm_err *e)
{
    int rc = finish_in_order(s, e);
    if (rc == 0 && s->interrupted) rc = cancel_all(s, e);
    for (size_t i = 0; rc == 0 && !s->interrupted && i < s->nruns; i++) rc = decide_one(s, i, e);
    for (size_t i = 0; rc == 0 && !s->interrupted && i < s->nruns; i++) {
        if (!may_start(s, i)) continue;
        rc = start_one(s, i, e);
        if (rc == 0) rc = finish_in_order(s, e);
    }
    *out = state_now(s);
    return rc;
}

int calls_give_up_waiting(dm_session *s, dm_err *e)
{
    int rc = 0;
    for (size_t i = 0; i < s->led.ncalls && rc == 0; i++) {
        call_state st = s->led.calls[i].state;
        if ((st == CALL_WAITING || st == CALL_PROPOSED) && !s->o.yes)
            rc = record_one(s, event_call_text(s->led.calls[i].id, CALL_CANCELLED, TEXT_NOT_ANSWERED, true), e);
    }
    return rc;
}

int calls_settle_unknown(dm_session *s, dm_err *e)
{
    int rc = 0;
    for (size_t i = 0; i < s->led.ncalls && rc == 0; i++) {
        ledger_call *c = &s->led.calls[i];
        dm_tool_info info;
        if (c->state != CALL_STARTED) continue;
        if (!tool_info(s, c->name, &info) || info.on_unknown != DM_UNKNOWN_RETRY) {
            rc = record_one(s, event_call_text(c->id, CALL_UNKNOWN, TEXT_UNKNOWN, true), e);
            continue;
        }
        json_t *ev = event_call(c->id, CALL_UNKNOWN);
        if (ev && json_object_set_new(ev, "rule", json_string("retry")) != 0) {
            json_decref(ev);
            ev = NULL;
        }
        rc = record_one(s, ev, e);
    }
    return rc;
}

/* Settled before the client was there to hear it. */
void calls_tell_unknown(dm_session *s)
{
    for (size_t i = 0; i < s->led.ncalls; i++)
        if (s->led.calls[i].state == CALL_UNKNOWN) tell_result(s, &s->led.calls[i], 0);
}

/* ---- answers --------------------------------------------------------------------------------------------------------- */

int dm_session_answer(dm_session *s, const char *call_id, bool allow, dm_err *e)
{
    ledger_call *c = ledger_find(&s->led, call_id);
    if (!c) return dm_err_set(e, DM_ENOENT, "session", "no call \"%s\" is pending", call_id);
    if (c->state != CALL_WAITING)
        return dm_err_set(e, DM_ESTATE, "session", "call \"%s\" was already answered (it is %s)", call_id, call_state_name(c->state));
    int rc;
    if (allow) {
        json_t *ev = event_call(call_id, CALL_APPROVED);
        if (ev) json_object_set_new(ev, "by", json_string("user"));
        rc = record_one(s, ev, e);
    } else {
        rc = record_one(s, event_call_text(call_id, CALL_DENIED, TEXT_DENIED, true), e);
        if (rc == 0) tell_result(s, c, 0);
    }
    if (rc == 0 && s->state == S_CALLS) session_step(s);
    return rc;
}
