/* session.c — one session: its states and every move between them.
 *
 *                 send                 build_prompt             restore_done
 *      ┌── IDLE ────────> PREPARE ───────────────> WAKE ────────────────────> GENERATE
 *      │    ^                ^                       ^  still awake: at once     │
 *      │    │                │                       └── a bad restore (K17) ────┤
 *   close   │ RESULT         │ every call has its text                           │ reply journaled
 *      │    │                │                                                   v
 *      │  SETTLE <───────────┼──────────────────── answer, limit, error ──────── │
 *      v    ^                └──────────────────── CALLS <────── calls ──────────┘
 *   CLOSED  └── approval needed, loop, interruption ─┘
 *
 * session_set_state() makes every move and traces it; session_step() runs the state's `enter` once and its `poll`
 * whenever something was reported.  Callbacks store what they got and step; nothing else.
 *
 * Order (C3): a prompt is journaled before it is fed, a reply with its calls before a call is decided, a result
 * before the model or the client sees it.  Text is streamed while it is generated and durable with its reply; a
 * crash in between repeats the generation from the same sampler state, so it gives the same tokens.
 *
 * SETTLE waits until the tools have ended and the store has the turn's state on disk (bounded), so a client that
 * saw RESULT can be killed and resumed without a prefill. */
#include "agent/session_int.h"

#include <stdlib.h>
#include <string.h>

#define MAX_TURNS_DEFAULT 50
#define MAX_TOKENS_DEFAULT 4096
#define MALFORMED_MAX 3        /* replies in a row that are only malformed calls (T27) */
#define RETRY_MS 50            /* the engine's queue was full */
#define FLUSH_TIMEOUT_MS 10000
#define PROGRESS_NS 250000000u
#define ANCHOR_TOKENS_MIN 64   /* a shorter system text is not worth a state of its own */

typedef struct state_def { const char *name; void (*enter)(dm_session *s), (*poll)(dm_session *s); } state_def;
static const state_def state_defs[S_COUNT];

static void session_set_state(dm_session *s, session_state st)
{
    dm_log(DM_LOG_DEBUG, "session %s: %s -> %s", s->id, state_defs[s->state].name, state_defs[st].name);
    s->state = st;
    s->moved = true;
}

void session_step(dm_session *s)
{
    s->again = true;
    if (s->stepping) return; /* from inside a state: the loop below sees `again` */
    s->stepping = true;
    while (s->moved || s->again) {
        bool entered = s->moved;
        s->moved = s->again = false;
        const state_def *d = &state_defs[s->state];
        if (entered) d->enter(s);
        else d->poll(s);
    }
    s->stepping = false;
}

static void idle(dm_session *s) { (void)s; }

/* ---- journal and client ----------------------------------------------------------------------------- */

/* The journal took what memory could not: only a replay knows the truth. */
static int torn_error(const dm_session *s, dm_err *e)
{
    return dm_err_set(e, DM_ESTATE, "session", "session %s ran out of memory behind a commit; close it and resume it", s->id);
}

int session_record(dm_session *s, json_t **events, size_t n, dm_err *e)
{
    int rc = 0;
    for (size_t i = 0; i < n; i++)
        if (!events[i]) rc = dm_err_set(e, DM_ENOMEM, "session", "an event could not be made: out of memory or text that is not UTF-8");
    if (rc == 0 && s->torn) rc = torn_error(s, e);
    if (rc == 0) rc = dm_journal_append(s->h->o.journal, s->id, events, n, NULL, e);
    bool durable = rc == 0;
    for (size_t i = 0; i < n; i++) {
        if (rc == 0) rc = ledger_apply(&s->led, events[i], e);
        json_decref(events[i]);
    }
    if (durable && rc < 0) s->torn = true;
    return rc;
}

void session_emit(dm_session *s, dm_host_event_kind kind, const char *text, size_t n, json_t *json)
{
    dm_host_event ev = { .kind = kind, .text = text, .n = n, .json = json };
    if (json && kind == DM_EV_PREFILL) {
        ev.done = json_int(json, "done", 0);
        ev.total = json_int(json, "total", 0);
    }
    if (s->o.fn) s->o.fn(s->o.ctx, s, &ev);
    json_decref(json);
}

void session_notice(dm_session *s, const char *text)
{
    dm_log(DM_LOG_INFO, "session %s: %s", s->id, text);
    session_emit(s, DM_EV_NOTICE, text, strlen(text), stream_note("notice", text));
}

static void settle(dm_session *s, int code, const char *subtype, const char *reason, const char *text)
{
    s->out = (outcome){ .code = code, .subtype = subtype, .stop_reason = reason };
    snprintf(s->out.text, sizeof s->out.text, "%s", text ? text : "");
    session_set_state(s, S_SETTLE);
}

static void settle_error(dm_session *s, int code, const dm_err *e)
{
    settle(s, code, "error", "error", e->text[0] ? e->text : dm_err_text(code));
}

static void settle_interrupted(dm_session *s) { settle(s, DM_ECANCELED, "error", "interrupted", "interrupted"); }

/* ---- sleep: the sequence goes, its blocks and state are the store's --------------------------------------- */

void session_seq_drop(dm_session *s)
{
    dm_seq_destroy(s->h->o.engine, s->seq);
    s->seq = NULL;
}

static void flush_work(uv_work_t *w)
{
    dm_session *s = w->data;
    dm_err err = { 0 };
    int rc = dm_kv_flush(s->pager.kv, FLUSH_TIMEOUT_MS, &err);
    /* A full disk was said by the store already, once. */
    if (rc < 0) dm_log(rc == DM_ENOSPC ? DM_LOG_INFO : DM_LOG_WARN, "session %s: the store was not synced: %s", s->id, err.text);
}

static void flush_done(uv_work_t *w, int status)
{
    (void)status;
    dm_session *s = w->data;
    s->flush_busy = false;
    session_emit(s, DM_EV_SPILLED, NULL, 0, stream_spilled(s->flush_bytes));
    session_step(s);
}

/* What was spilled becomes durable while the tools run.  One at a time: what comes meanwhile is due again. */
static void flush_start(dm_session *s)
{
    if (!s->pager.kv || s->flush_busy || !s->flush_due) return;
    s->flush_due = false;
    s->flush_bytes = s->pager.spilled_bytes;
    s->flush_req.data = s;
    s->flush_busy = uv_queue_work(s->h->o.loop, &s->flush_req, flush_work, flush_done) == 0;
}

static void go_to_sleep(dm_session *s)
{
    s->flush_due = true;
    if (!s->h->o.keep_awake) session_seq_drop(s);
    flush_start(s);
}

/* ---- PREPARE: the new part of the conversation ---------------------------------------------------------------- */

static int64_t max_turns(const dm_session *s) { return s->o.max_turns > 0 ? s->o.max_turns : MAX_TURNS_DEFAULT; }
static int64_t max_tokens(const dm_session *s) { return s->o.max_tokens > 0 ? s->o.max_tokens : MAX_TOKENS_DEFAULT; }

/* Where the system block ends: a state there serves every session that begins with the same text and tools. */
int64_t session_find_anchor(const dm_session *s)
{
    for (size_t i = ANCHOR_TOKENS_MIN; i < s->led.ids.n; i++)
        if (s->led.ids.p[i] == s->h->user) return (int64_t)i;
    return 0;
}

static int build_prompt(dm_session *s, dm_err *e)
{
    dm_ids ids = { 0 };
    prompt_ctx ctx = { .tok = s->h->o.tok, .mode = s->mode, .system = json_str(s->led.created, "system"),
                       .tools = json_object_get(s->led.created, "tools"), .eos = s->h->eos, .think_end = s->h->think_end };
    int rc = prompt_build(&ctx, &s->led, &ids, e);
    int64_t total = (int64_t)(s->led.ids.n + ids.n), most = s->h->o.forward->ctx_tokens_max;
    if (rc == 0 && total + 1 > most)
        rc = dm_err_set(e, DM_ECONTEXT, "session", "the context is full: the conversation needs %lld tokens and the model has %lld",
                        (long long)total + 1, (long long)most);
    if (rc == 0) {
        bool first = s->led.ids.n == 0;
        json_t *ev = event_tokens("prompt", ids.p, ids.n, s->led.rng, NULL);
        rc = session_record(s, &ev, 1, e);
        if (rc == 0 && first) s->anchor = session_find_anchor(s);
    }
    dm_ids_free(&ids);
    return rc;
}

static void prepare_enter(dm_session *s)
{
    dm_err err = { 0 };
    if (s->interrupted) {
        settle_interrupted(s);
        return;
    }
    if (s->run_turns >= max_turns(s)) {
        char text[96];
        snprintf(text, sizeof text, "stopped after %lld turn%s", (long long)s->run_turns, s->run_turns == 1 ? "" : "s");
        settle(s, DM_EBUDGET, "error_max_turns", "max_turns", text);
        return;
    }
    memset(&s->fig, 0, sizeof s->fig);
    s->fig.from = "none";
    if (s->pager.kv) dm_hex(s->fig.root, s->pager.root.b, 8);
    s->restores_failed = 0;
    pager_begin_turn(&s->pager);
    /* An open prompt was journaled by a runtime that died: it is answered as it stands. */
    int rc = s->led.reply_open ? 0 : build_prompt(s, &err);
    s->fig.new_tokens = (int64_t)s->led.prompt_n;
    dm_fault("turn.prompt");
    if (rc == DM_ECONTEXT) settle(s, rc, "error", "context", err.text);
    else if (rc < 0) settle_error(s, rc, &err);
    else {
        s->limit = (int64_t)s->led.ids.n;
        session_set_state(s, S_WAKE);
    }
}

/* ---- WAKE: a sequence that holds as much of the timeline as can be had ------------------------------------------- */

static bool seq_fits(const dm_session *s)
{
    int64_t pos = s->seq ? dm_seq_pos(s->seq) : -1;
    return pos > 0 && pos <= s->limit && memcmp(dm_seq_ids(s->seq), s->led.ids.p, (size_t)pos * sizeof(int32_t)) == 0;
}

static void restore_work(uv_work_t *w)
{
    dm_session *s = w->data;
    s->restore_rc = pager_restore(&s->pager, s->led.ids.p, (int64_t)s->led.ids.n, s->limit, &s->restore_stop, &s->seq, &s->restored, &s->restore_err);
}

static void restore_done(uv_work_t *w, int status)
{
    dm_session *s = w->data;
    if (status < 0) s->restore_rc = dm_err_set(&s->restore_err, DM_ECANCELED, "restore", "cancelled");
    s->restore_busy = false;
    session_step(s);
}

static void wake_enter(dm_session *s)
{
    dm_err err = { 0 };
    if (seq_fits(s)) {
        s->fig.from = "awake";
        session_set_state(s, S_GENERATE);
        return;
    }
    session_seq_drop(s);
    if (!s->pager.kv || s->restores_failed > 1) {
        s->fig.miss = s->pager.kv ? WHY_RESTORES_FAILED : WHY_NO_STORE;
        int rc = dm_seq_create(s->h->o.engine, &s->seq, &err);
        if (rc < 0) settle_error(s, rc, &err);
        else session_set_state(s, S_GENERATE);
        return;
    }
    atomic_store(&s->restore_stop, false);
    s->restore_req.data = s;
    s->restore_busy = uv_queue_work(s->h->o.loop, &s->restore_req, restore_work, restore_done) == 0;
    if (!s->restore_busy) settle(s, DM_EAGAIN, "error", "error", "the restore could not be queued");
}

static const char *tier_text(const restore_report *r)
{
    if (r->pos == 0) return "none";
    if (r->from_ram && r->from_disk) return "ram+disk";
    return r->from_ram ? "ram" : "disk";
}

static void wake_poll(dm_session *s)
{
    if (s->restore_busy) {
        if (s->interrupted) atomic_store(&s->restore_stop, true);
        return;
    }
    if (s->interrupted) {
        settle_interrupted(s);
        return;
    }
    if (s->restore_rc < 0) {
        settle_error(s, s->restore_rc, &s->restore_err);
        return;
    }
    s->fig.restored = s->restored.pos;
    s->fig.restore_ns += s->restored.ns;
    s->fig.from = tier_text(&s->restored);
    s->fig.miss = why_of_turn(s->restored.miss, s->led.root, s->fig.root, s->led.numerics, s->h->o.forward->numerics_id);
    s->fig.bad_restores += s->restored.bad;
    if (s->restored.bad) session_notice(s, "what was stored for this session could not be used; it is computed again");
    if (s->restored.pos) session_emit(s, DM_EV_RESTORED, NULL, 0, stream_restored(s));
    session_set_state(s, S_GENERATE);
}

/* ---- GENERATE: prefill, decode ---------------------------------------------------------------------------------------- */

static void retry_fire(uv_timer_t *t)
{
    dm_session *s = t->data;
    if (s->state == S_GENERATE && !s->gen_busy) s->moved = true;
    session_step(s);
}

static bool thinking_mode(const dm_session *s) { return s->mode == DM_THINKING; }

static void generate_enter(dm_session *s)
{
    dm_err err = { 0 };
    if (s->interrupted) {
        settle_interrupted(s);
        return;
    }
    int64_t pos = dm_seq_pos(s->seq), n = (int64_t)s->led.ids.n;
    s->gen_anchor = s->pager.kv && s->anchor > pos && s->anchor < n;
    int64_t to = s->gen_anchor ? s->anchor : n;
    dm_parser_opts parse = { .thinking = thinking_mode(s), .tools = s->parser_tools, .ntools = dm_tools_count(s->tools) };
    s->sampler.rng = s->led.rng;
    gen_job job = { .engine = s->h->o.engine, .seq = s->seq, .ids = s->led.ids.p + pos, .n = (size_t)(to - pos),
                    .max_new = s->gen_anchor ? 0 : max_tokens(s), .eos = s->h->eos, .sampler = s->sampler,
                    .sink = pager_sink(&s->pager), .parse = s->gen_anchor ? NULL : &parse,
                    .logprobs = s->o.logprobs && !s->gen_anchor, .top_logprobs = s->o.top_logprobs };
    if (s->fig.prefilled == 0) s->feed_from = pos;
    s->job_from = pos;
    dm_buf_clear(&s->content);
    dm_buf_clear(&s->reasoning);
    int rc = gen_start(&s->gen, &job, &err);
    s->gen_busy = rc == 0;
    if (rc == DM_EBUSY) {
        s->retry.data = s;
        uv_timer_start(&s->retry, retry_fire, RETRY_MS, 0);
    } else if (rc == DM_ECONTEXT) settle(s, rc, "error", "context", err.text);
    else if (rc < 0) settle_error(s, rc, &err);
}

static void take_items(dm_session *s, gen_item *list)
{
    for (gen_item *it = list; it; it = it->next) {
        const char *p = dm_buf_cstr(&it->text);
        size_t n = it->text.n;
        if (it->kind == GEN_NOTE) {
            session_notice(s, p);
            continue;
        }
        if (it->kind == GEN_TOKEN) {
            session_emit(s, DM_EV_TOKEN, NULL, 0, stream_token(s, (const gen_token *)it->text.p));
            continue;
        }
        bool content = it->kind == GEN_CONTENT;
        if (dm_buf_append(content ? &s->content : &s->reasoning, p, n) < 0) s->gen.lost = true;
        session_emit(s, content ? DM_EV_CONTENT : DM_EV_REASONING, p, n, NULL);
    }
    gen_items_free(list);
}

/* Of the turn, not of the job: the system block and the rest are two. */
static void tell_progress(dm_session *s, int64_t done)
{
    int64_t total = (int64_t)s->led.ids.n - s->feed_from;
    done += s->job_from - s->feed_from;
    uint64_t now = dm_now_ns();
    if (done < total && now - s->progress_ns < PROGRESS_NS) return;
    s->progress_ns = now;
    session_emit(s, DM_EV_PREFILL, NULL, 0, stream_progress(done, total));
}

void session_on_wake(uv_async_t *a)
{
    dm_session *s = a->data;
    if (s->gen_busy) session_step(s);
}

/* A job that failed right behind a restore, before it gave anything: the stored state is to blame until shown
 * otherwise.  It is dropped and the turn goes on with less, in the end without any. */
static bool failed_behind_restore(dm_session *s, const dm_gen_event *end)
{
    if (end->end != DM_END_ERROR || s->gen.reply.n || s->fig.restored == 0) return false;
    bool no_logits = end->err.code == DM_ESTATE && s->fig.restored == (int64_t)s->led.ids.n;
    if (no_logits) {
        s->limit = s->fig.restored - 1; /* the state is good; it only cannot be sampled from */
    } else {
        pager_drop(&s->pager, s->led.ids.p, s->fig.restored);
        s->restores_failed++;
        s->fig.bad_restores++;
        session_notice(s, "a restored state did not work and was dropped; it is computed again");
    }
    s->fig.restored = 0;
    session_seq_drop(s);
    session_set_state(s, S_WAKE);
    return true;
}

static const char *stopped_at(const dm_session *s) { return s->gen.stop ? dm_stop_found(s->gen.stop) : NULL; }

static const char *end_name(const dm_session *s, const dm_gen_event *end)
{
    switch (end->end) {
    case DM_END_LENGTH: return "length";
    case DM_END_CONTEXT: return "context";
    case DM_END_CANCEL: return "cancel";
    case DM_END_ERROR: return "error";
    case DM_END_STOP: break;
    }
    if (s->gen.repeated) return "repeat";
    if (stopped_at(s)) return "stop_sequence";
    return s->gen.parser && dm_parser_block_closed(s->gen.parser) ? "calls" : "stop";
}

static bool was_cut(const char *end) { return strcmp(end, "stop") != 0 && strcmp(end, "calls") != 0; } /* calls in it do not count */

/* Malformed calls come behind the good ones, as calls that have failed already, so that the model is told (T10). */
static size_t call_events(dm_session *s, json_t **ev, bool cut)
{
    size_t n = 0;
    const dm_parser *p = s->gen.parser;
    char id[32];
    for (int i = 0; !cut && i < dm_parser_calls(p); i++) {
        call_id_new(id);
        ev[n++] = event_call_new(id, dm_parser_call_name(p, i), dm_parser_call_args(p, i));
    }
    for (int i = 0; !cut && i < dm_parser_errors(p); i++) {
        dm_buf text = { 0 };
        call_id_new(id);
        dm_buf_printf(&text, "error: %s", dm_parser_error(p, i));
        ev[n++] = event_call_new(id, "", "");
        ev[n++] = event_call_text(id, CALL_FAILED, dm_buf_cstr(&text), true);
        dm_buf_free(&text);
    }
    return n;
}

static json_t *turn_event(const dm_session *s, const char *end, bool malformed)
{
    json_t *ev = stream_turn(s, end);
    if (!ev || json_object_set_new(ev, "type", json_string("turn")) || json_object_set_new(ev, "malformed", json_boolean(malformed))) {
        json_decref(ev);
        return NULL;
    }
    json_object_del(ev, "subtype");
    json_object_set_new(ev, "turn", json_integer(s->led.turns + 1));
    json_object_set_new(ev, "root", json_string(s->fig.root));
    json_object_set_new(ev, "numerics", json_string(s->h->o.forward->numerics_id));
    return event_stamp(ev);
}

/* Reply, calls and figures in one transaction. */
static int record_reply(dm_session *s, const dm_gen_event *ge, const char *end, dm_err *e)
{
    bool cut = was_cut(end);
    size_t calls = cut ? 0 : (size_t)dm_parser_calls(s->gen.parser), errors = cut ? 0 : (size_t)dm_parser_errors(s->gen.parser);
    json_t **ev = dm_calloc(2 + calls + 2 * errors, sizeof *ev);
    if (!ev) return dm_err_set(e, DM_ENOMEM, "session", "out of memory");
    size_t n = 0;
    ev[n++] = event_tokens("reply", s->gen.reply.p, s->gen.reply.n, ge->sampler.rng, end);
    n += call_events(s, ev + n, cut);
    ev[n++] = turn_event(s, end, errors > 0 && calls == 0);
    dm_fault("turn.reply");
    int rc = session_record(s, ev, n, e);
    dm_free(ev);
    dm_fault("call.proposed");
    return rc;
}

static void count_turn(dm_session *s, const char *end)
{
    s->run_turns++;
    s->sum_input += s->fig.context_tokens;
    s->sum_output += s->fig.decoded;
    s->sum_prefilled += s->fig.prefilled;
    s->sum_restored += s->fig.restored;
    json_t *t = stream_turn(s, end), *short_form = json_copy(t);
    if (short_form) { /* in the result its place says what it is */
        json_object_del(short_form, "type");
        json_object_del(short_form, "subtype");
        json_array_append_new(s->turns, short_form);
    }
    session_emit(s, DM_EV_TURN, NULL, 0, t);
}

static void tell_reply(dm_session *s, const char *end)
{
    session_emit(s, DM_EV_ASSISTANT, NULL, 0, stream_assistant(s));
    for (size_t i = 0; i < s->led.ncalls; i++)
        if (!call_resolved(s->led.calls[i].state))
            session_emit(s, DM_EV_CALL, s->led.calls[i].name, strlen(s->led.calls[i].name), stream_call("call", &s->led.calls[i]));
    count_turn(s, end);
}

/* Where the turn leads. */
static void after_reply(dm_session *s, const char *end)
{
    char text[128];
    if (strcmp(end, "cancel") == 0) settle_interrupted(s);
    else if (strcmp(end, "context") == 0) {
        snprintf(text, sizeof text, "the context is full (%lld tokens)", (long long)s->h->o.forward->ctx_tokens_max);
        settle(s, DM_ECONTEXT, "error", "context", text);
    } else if (strcmp(end, "length") == 0) {
        snprintf(text, sizeof text, "the reply was stopped after %lld tokens; ask to go on, or allow more", (long long)s->fig.decoded);
        settle(s, DM_EBUDGET, "error_budget", "max_tokens", text);
    } else if (strcmp(end, "repeat") == 0) settle(s, DM_EBUDGET, "error_budget", "repeat", "the model repeated itself and was stopped");
    else if (s->led.malformed >= MALFORMED_MAX) settle(s, DM_ETOOL, "error", "malformed", "the model wrote malformed calls again and again");
    else if (s->led.ncalls) session_set_state(s, S_CALLS);
    else if (s->led.nmessages) session_set_state(s, S_PREPARE); /* it came while the model wrote */
    else settle(s, 0, "success", stopped_at(s) ? "stop_sequence" : "end_turn", NULL);
}

static void generate_end(dm_session *s, const dm_gen_event *ge)
{
    dm_err err = { 0 };
    s->fig.prefilled += ge->prefilled;
    s->fig.decoded += ge->decoded;
    s->fig.prefill_ns += ge->prefill_ns;
    s->fig.decode_ns += ge->decode_ns;
    s->fig.drafted += ge->drafted;
    s->fig.accepted += ge->accepted;
    if (failed_behind_restore(s, ge)) return;
    if (ge->end == DM_END_ERROR || s->gen.lost) {
        session_seq_drop(s); /* its rows may be half written; the journal still has the prompt */
        if (ge->end != DM_END_ERROR) dm_err_set(&err, DM_ENOMEM, "session", "out of memory while the model wrote");
        settle_error(s, ge->end == DM_END_ERROR ? ge->err.code : DM_ENOMEM, ge->end == DM_END_ERROR ? &ge->err : &err);
        return;
    }
    if (s->gen_anchor && ge->end == DM_END_STOP) {
        session_set_state(s, S_GENERATE); /* the rest of the prompt */
        return;
    }
    const char *end = end_name(s, ge);
    s->fig.context_tokens = (int64_t)s->led.ids.n;
    gen_finish_parse(&s->gen, was_cut(end));
    bool progress, ended;
    int64_t done, total;
    take_items(s, gen_take(&s->gen, &progress, &done, &total, &ended));
    if (s->gen.lost) {
        dm_err_set(&err, DM_ENOMEM, "session", "out of memory");
        settle_error(s, DM_ENOMEM, &err);
        return;
    }
    int rc = record_reply(s, ge, end, &err);
    if (rc < 0) {
        settle_error(s, rc, &err);
        return;
    }
    tell_reply(s, end);
    go_to_sleep(s);
    after_reply(s, end);
}

static void generate_poll(dm_session *s)
{
    if (!s->gen_busy) {
        if (s->interrupted) settle_interrupted(s); /* while it waited for room in the engine's queue */
        return;
    }
    bool progress, ended;
    int64_t done, total;
    take_items(s, gen_take(&s->gen, &progress, &done, &total, &ended));
    if (progress) tell_progress(s, done);
    if (s->interrupted && !ended) dm_engine_cancel(s->h->o.engine, s->seq);
    if (!ended) return;
    s->gen_busy = false;
    dm_gen_event end = s->gen.end;
    generate_end(s, &end);
}

/* ---- CALLS ---------------------------------------------------------------------------------------------------------------- */

static void calls_poll(dm_session *s)
{
    dm_err err = { 0 };
    calls_state st;
    int rc = calls_step(s, &st, &err);
    if (rc < 0) {
        settle_error(s, rc, &err); /* SETTLE waits for what runs */
        return;
    }
    if (st == CALLS_RUNNING || (st == CALLS_ASK && s->o.interactive && !s->interrupted)) return;
    if (st == CALLS_ASK) {
        settle(s, DM_EPAUSED, "paused", "approval", "a call waits for approval");
        return;
    }
    calls_end(s);
    if (s->interrupted) settle_interrupted(s);
    else if (s->led.repeats >= LOOP_STOP_AT)
        settle(s, DM_ETOOL, "error", "loop", "the model made the same call with the same result again and again; a message lets it go on");
    else session_set_state(s, S_PREPARE);
}

static void calls_enter(dm_session *s)
{
    dm_err err = { 0 };
    int rc = calls_begin(s, &err);
    if (rc < 0) settle_error(s, rc, &err);
    else calls_poll(s);
}

/* ---- SETTLE: nothing runs any more, and what was spilled is on disk -------------------------------------------------------- */

static bool tools_running(const dm_session *s)
{
    for (size_t i = 0; i < s->nruns; i++)
        if (s->runs[i].run && !s->runs[i].done) return true;
    return false;
}

static int record_result(dm_session *s, dm_err *e)
{
    json_t *ev = event_stamp(json_pack("{s:s, s:s, s:s, s:b, s:s}", "type", "result", "subtype", s->out.subtype, "stop_reason", s->out.stop_reason,
                                       "is_error", (int)(s->out.code != 0), "text", s->out.text));
    return session_record(s, &ev, 1, e);
}

static void settle_poll(dm_session *s)
{
    dm_err err = { 0 };
    calls_cancel_runs(s); /* after an error; otherwise none runs */
    flush_start(s);
    if (tools_running(s) || s->flush_busy || s->restore_busy || s->gen_busy) return;
    calls_end(s);
    int rc = record_result(s, &err);
    if (rc < 0) {
        if (s->out.code != 0) dm_log(DM_LOG_ERROR, "session %s: the result could not be journaled: %s", s->id, err.text);
        else {
            s->out = (outcome){ .code = rc, .subtype = "error", .stop_reason = "error" };
            snprintf(s->out.text, sizeof s->out.text, "%s", err.text);
        }
    }
    session_set_state(s, S_IDLE);
    s->interrupted = false;
    uv_unref((uv_handle_t *)&s->wake);
    session_emit(s, DM_EV_RESULT, NULL, 0, stream_result(s));
}

static const state_def state_defs[S_COUNT] = {
    [S_IDLE] = { "idle", idle, idle },
    [S_PREPARE] = { "prepare", prepare_enter, idle },
    [S_WAKE] = { "wake", wake_enter, wake_poll },
    [S_GENERATE] = { "generate", generate_enter, generate_poll },
    [S_CALLS] = { "calls", calls_enter, calls_poll },
    [S_SETTLE] = { "settle", settle_poll, settle_poll },
    [S_CLOSED] = { "closed", idle, idle },
};

/* ---- public --------------------------------------------------------------------------------------------------------------------- */

const char *dm_session_id(const dm_session *s) { return s->id; }
bool dm_session_running(const dm_session *s) { return s->state != S_IDLE; }
int dm_session_outcome(const dm_session *s) { return s->out.code; }

static void begin_run(dm_session *s)
{
    s->run_turns = 0;
    s->started_ns = dm_now_ns();
    s->sum_input = s->sum_output = s->sum_prefilled = s->sum_restored = 0;
    json_array_clear(s->turns);
    json_array_clear(s->calls_done);
    dm_buf_clear(&s->content);
    uv_ref((uv_handle_t *)&s->wake); /* the engine's news keep the loop alive while the session runs */
    session_emit(s, DM_EV_INIT, s->id, strlen(s->id), stream_init(s));
    calls_tell_unknown(s);
}

/* Text of a person or a file, fit for JSON and for a model: valid UTF-8 without NUL. */
static int record_message(dm_session *s, const char *text, dm_err *e)
{
    dm_buf clean = { 0 };
    if (dm_utf8_clean(&clean, text, strlen(text)) < 0) return dm_err_set(e, DM_ENOMEM, "session", "out of memory");
    json_t *ev = event_message(dm_buf_cstr(&clean));
    dm_buf_free(&clean);
    return session_record(s, &ev, 1, e);
}

/* What a person would say to a reply that was cut off: the model reads its own words up to there, then this. */
#define GO_ON "Go on."

int dm_session_send(dm_session *s, const char *text, dm_err *e)
{
    bool idle_now = s->state == S_IDLE;
    if (s->state == S_CLOSED) return dm_err_set(e, DM_ESTATE, "session", "the session is closed");
    if (s->torn) return torn_error(s, e);
    if (!text && !idle_now) return dm_err_set(e, DM_ESTATE, "session", "the session runs already");
    if (!text && !ledger_has_input(&s->led) && s->led.reply_cut) text = GO_ON;
    if (!text && !ledger_has_input(&s->led) && !s->led.reply_open)
        return dm_err_set(e, DM_EINVAL, "session", "session %s has nothing to go on with; give it a message", s->id);
    int rc = idle_now ? calls_settle_unknown(s, e) : 0; /* a result that could not be journaled is lost */
    if (rc == 0 && text && idle_now) rc = calls_give_up_waiting(s, e);
    if (rc == 0 && text) rc = record_message(s, text, e);
    if (rc < 0 || !idle_now) return rc;
    session_set_state(s, ledger_calls_open(&s->led) ? S_CALLS : S_PREPARE);
    begin_run(s); /* tells INIT: who hears it may interrupt already */
    session_step(s);
    return 0;
}

void dm_session_interrupt(dm_session *s)
{
    if (s->state == S_IDLE || s->state == S_CLOSED) return;
    s->interrupted = true;
    session_step(s);
}
