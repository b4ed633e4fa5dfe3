/* session_int.h — the session struct, shared by session.c (states), calls.c (tools) and stream.c (what is told). */
#ifndef DM_SESSION_INT_H
#define DM_SESSION_INT_H

#include "agent/agent_int.h"

struct dm_host {
    dm_host_opts o;          /* text members owned */
    json_t *tools;           /* owned: what new sessions offer; NULL: all built-ins */
    dm_hash tokenizer;
    int32_t eos, think_end, user; /* ids of added tokens; user may be DM_ENOENT */
    uint8_t *banned;         /* owned, [vocab] */
    int sessions;            /* open ones */
};

typedef enum session_state { S_IDLE, S_PREPARE, S_WAKE, S_GENERATE, S_CALLS, S_SETTLE, S_CLOSED, S_COUNT } session_state;

/* A call while it runs; what must last is in the ledger. */
typedef struct call_run {
    dm_session *s;           /* borrowed */
    json_t *args;            /* owned: validated copy */
    dm_tool_run *run;        /* borrowed; set while it runs */
    dm_tool_result result;   /* owned once done */
    bool started, done, cancel_sent, reads;
} call_run;

typedef struct turn_figures {
    int64_t new_tokens, context_tokens, prefilled, restored, decoded;
    int64_t drafted, accepted; /* tokens guessed by the MTP layer, and those of them that were then sampled */
    uint64_t restore_ns, prefill_ns, decode_ns;
    char root[17];           /* of the store that was asked; "": none */
    const char *from;        /* "none", "awake", "ram", "disk", "ram+disk" */
    why_class miss;
    int64_t bad_restores;
} turn_figures;

typedef struct outcome {
    int code;                /* 0 or DM_E… (dm_exit_code) */
    const char *subtype, *stop_reason; /* static text */
    char text[600];          /* what went wrong; "" : the answer is the text */
} outcome;

struct dm_session {
    dm_host *h;
    dm_session_opts o;
    char *workspace;         /* owned */
    char id[DM_SESSION_ID_CHARS + 1];

    session_state state;
    bool moved, again, stepping;
    bool interrupted;
    outcome out;

    ledger led;
    bool torn;               /* the journal is ahead of led: nothing is recorded any more */
    dm_chat_mode mode;
    dm_sampler sampler;      /* rng is the ledger's */
    dm_tools *tools;
    dm_parser_tool *parser_tools; /* owned, with their schemas */
    bool claimed;

    dm_seq *seq;             /* NULL: asleep */
    pager pager;
    gen gen;
    bool gen_busy, gen_anchor; /* a job runs; it is the one that ends at the anchor */
    int64_t anchor;          /* end of the system block in the first prompt; 0: none */
    int64_t limit;           /* deepest cut to restore */
    int64_t feed_from, job_from; /* where the turn's prefill began, and that of the job at hand */
    int restores_failed;     /* jobs that failed right behind a restore in this turn (K17) */
    restore_report restored;
    dm_err restore_err;
    int restore_rc;
    _Atomic bool restore_stop;

    call_run *runs;          /* [led.ncalls] in S_CALLS */
    size_t nruns;

    dm_buf content, reasoning; /* of the reply at hand, then of the last one */
    turn_figures fig;
    int64_t run_turns;       /* since the last message */
    uint64_t started_ns;
    uint64_t progress_ns;    /* when progress was last told */
    int64_t sum_input, sum_output, sum_prefilled, sum_restored; /* sums of this run */
    json_t *turns, *calls_done; /* of this run, for the result */

    uv_async_t wake;         /* the engine thread's */
    uv_timer_t retry;        /* the engine's queue was full */
    uv_work_t restore_req, flush_req;
    bool restore_busy, flush_busy, flush_due;
    int64_t flush_bytes;     /* what the flush under way makes durable */
    bool async_open, timer_open;
    int handles;             /* not yet closed */
};

/* ---- session.c ---- */
void session_step(dm_session *s);
/* Journals the events in one transaction and applies them; takes them over (also when it fails).  A NULL among
 * them is DM_ENOMEM. */
int session_record(dm_session *s, json_t **events, size_t n, dm_err *e);
void session_emit(dm_session *s, dm_host_event_kind kind, const char *text, size_t n, json_t *json); /* takes json */
void session_notice(dm_session *s, const char *text);
void session_seq_drop(dm_session *s);               /* the sequence goes; what it held is in the store or computed again */
int64_t session_find_anchor(const dm_session *s);
void session_on_wake(uv_async_t *a);                /* the engine thread left something in s->gen */

/* ---- calls.c ---- */
typedef enum calls_state { CALLS_RUNNING, CALLS_DONE, CALLS_ASK } calls_state;
#define LOOP_NOTICE_AT 3 /* equal calls with equal results in a row: the model is told */
#define LOOP_STOP_AT 6   /* ... the run stops */
int calls_begin(dm_session *s, dm_err *e);
/* Does all that can be done now. */
int calls_step(dm_session *s, calls_state *out, dm_err *e);
void calls_end(dm_session *s);
void calls_cancel_runs(dm_session *s); /* what runs is told to end */
/* A message came instead of an answer: what waits for approval is given up. */
int calls_give_up_waiting(dm_session *s, dm_err *e);
/* After a crash: what was started becomes unknown. */
int calls_settle_unknown(dm_session *s, dm_err *e);
void calls_tell_unknown(dm_session *s);

/* ---- policy.c ---- */
typedef enum policy { POLICY_ALLOW, POLICY_ASK } policy;
policy policy_for(const dm_session_opts *o, dm_sandbox_level level, dm_effects effects);

/* ---- stream.c ---- */
json_t *stream_init(const dm_session *s);
json_t *stream_note(const char *subtype, const char *text);
json_t *stream_progress(int64_t done, int64_t total);
json_t *stream_restored(const dm_session *s);
json_t *stream_token(const dm_session *s, const gen_token *t);
json_t *stream_assistant(const dm_session *s);
json_t *stream_call(const char *subtype, const ledger_call *c);
json_t *stream_tool_result(const ledger_call *c, int64_t wall_ms);
json_t *stream_spilled(int64_t bytes);
json_t *stream_turn(const dm_session *s, const char *end);
json_t *stream_result(const dm_session *s);
json_t *stream_args(const char *args); /* parsed, or the text */

#endif
