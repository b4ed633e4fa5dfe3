/* agent.h — the host: sessions on an event loop, their journal, and the commands.
 *
 * Nouns
 *   host      one loop with an engine, a store, tools and a sandbox behind it
 *   session   a journal of events plus a sequence that may be awake or asleep.  One state, one function that
 *             changes it (agent/session.c has the diagram)
 *   event     what happened, appended to the journal before anything acts on it (C3)
 *   call      one tool invocation: proposed -> approved -> started -> finished|failed|cancelled|unknown (C4)
 *   turn      one generation of the model and the calls that it ended with
 *
 * Threads: a host belongs to the thread that runs its loop; the engine's and the store's threads post to it.
 * Nothing here blocks the loop but the journal's commit (a few rows, synced). */
#ifndef DM_AGENT_H
#define DM_AGENT_H

#include <jansson.h>
#include <uv.h>

#include "base/base.h"
#include "engine/engine.h"
#include "kvstore/kvstore.h"
#include "sandbox/sandbox.h"
#include "tools/tools.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DM_JOURNAL_FORMAT_VERSION 1
#define DM_SESSION_ID_CHARS 26 /* 48-bit time + 80 random bits, Crockford base32: sorts by age */

/* ---- journal ---------------------------------------------------------------------- */

/* One LMDB environment for all sessions of a state directory (dir/journal; locks in dir/locks).  An append
 * returns when it is on disk: events and the session's head row change in one synced transaction.  A journal
 * belongs to one thread; several processes may have the same directory open. */
typedef struct dm_journal dm_journal;
/* DM_EVERSION: newer format, untouched. DM_ESTORE: not a journal, or cut short. DM_ENOENT: read_only and none there.
 * DM_EBUSY: open in this process already, under whatever spelling. */
DM_API int dm_journal_open(dm_journal **out, const char *dir, bool read_only, dm_err *e);
DM_API void dm_journal_close(dm_journal *j);
/* Appends events (JSON objects with "type") to a session in one transaction; *seq: number of the last one. */
DM_API int dm_journal_append(dm_journal *j, const char *session, json_t *const *events, size_t n, int64_t *seq, dm_err *e);
typedef int (*dm_journal_fn)(void *ctx, int64_t seq, const json_t *event); /* nonzero stops and is returned */
/* DM_ENOENT: no such session. A record that cannot be read is DM_ECORRUPT and names it. */
DM_API int dm_journal_read(dm_journal *j, const char *session, dm_journal_fn fn, void *ctx, dm_err *e);
/* Lists sessions, oldest first: fn gets the head row {id, created_ms, updated_ms, state, title, turns, tokens, model}. */
typedef int (*dm_journal_list_fn)(void *ctx, const json_t *head);
DM_API int dm_journal_list(dm_journal *j, dm_journal_list_fn fn, void *ctx, dm_err *e);
/* Full id from a unique prefix (at least 4 characters) or "last", the one changed last.  DM_ENOENT; DM_EINVAL when
 * several match or the text is too short. */
DM_API int dm_journal_resolve(dm_journal *j, const char *prefix, char out[DM_SESSION_ID_CHARS + 1], dm_err *e);
/* DM_EBUSY while somebody runs it. */
DM_API int dm_journal_remove(dm_journal *j, const char *session, dm_err *e);
/* One runner per session: taken before a session is run, held by this process (an OS lock: gone when it dies).
 * DM_EBUSY names the holder's pid. */
DM_API int dm_journal_claim(dm_journal *j, const char *session, dm_err *e);
DM_API void dm_journal_release(dm_journal *j, const char *session);
DM_API bool dm_journal_claimed(dm_journal *j, const char *session); /* somebody, perhaps another process, runs it */
DM_API void dm_session_id_new(char out[DM_SESSION_ID_CHARS + 1]);
/* A new session (its id in out) that has the past of another up to the end of a turn (0: the last one), with the results of that turn's
 * calls and without what was said behind it.  Its first turn costs its new tokens, as long as the store has the cut.  One transaction.
 * DM_EBUSY: it runs; DM_EINVAL: no such turn, or one whose calls have no result yet (they would run twice); DM_ENOENT. */
DM_API int dm_session_fork(dm_journal *j, const char *session, int64_t turn, char out[DM_SESSION_ID_CHARS + 1], dm_err *e);

/* ---- host ---------------------------------------------------------------------------- */

typedef struct dm_host dm_host;
typedef struct dm_session dm_session;

typedef struct dm_host_opts {
    uv_loop_t *loop;
    dm_engine *engine;       /* borrowed, as all below */
    dm_forward *forward;
    const dm_tok *tok;
    dm_kv *kv;               /* NULL: nothing is spilled; every wake is a prefill */
    dm_hash kv_root;
    dm_journal *journal;
    dm_sandbox *sandbox;
    const char *model_name, *state_dir;
    dm_hash weights;
    const char *system;      /* system text */
    const json_t *tools;     /* [{name, description?, parameters?}] in order; NULL: all built-ins */
    dm_chat_mode mode;
    dm_sample_params sampling;
    bool keep_awake;         /* do not put the sequence to sleep at a tool call */
    const dm_vocab *vocab;   /* calls are held to the tools' schemas while they are sampled; NULL: they are not */
} dm_host_opts;
DM_API int dm_host_create(dm_host **out, const dm_host_opts *o, dm_err *e);
DM_API void dm_host_destroy(dm_host *h); /* after the loop has run dry */

/* What a client sees, in order, on the loop.  Text is borrowed for the call.  `json` is the line of the event
 * stream (agent/stream.c has the table), the rest is for terminals.  REASONING and CONTENT are streamed before
 * they are durable, and so is TOKEN (only if asked for: logprobs); everything else is in the journal when it is told. */
typedef enum dm_host_event_kind {
    DM_EV_INIT, DM_EV_PREFILL, DM_EV_RESTORED, DM_EV_TOKEN, DM_EV_REASONING, DM_EV_CONTENT, DM_EV_CALL, DM_EV_APPROVAL,
    DM_EV_TOOL_START, DM_EV_TOOL_RESULT, DM_EV_SPILLED, DM_EV_TURN, DM_EV_ASSISTANT, DM_EV_NOTICE, DM_EV_RESULT,
} dm_host_event_kind;
typedef struct dm_host_event {
    dm_host_event_kind kind;
    const char *text; size_t n;
    int64_t done, total;
    const json_t *json;      /* borrowed; may be NULL for deltas */
} dm_host_event;
typedef void (*dm_host_fn)(void *ctx, dm_session *s, const dm_host_event *ev);

typedef struct dm_session_opts {
    const char *workspace;
    int64_t max_turns;       /* 0: 50 */
    int64_t max_tokens;      /* generated, per turn; 0: 4096 */
    bool yes;                /* approve every call that would ask */
    bool ask;                /* calls that write ask; default: only those that the sandbox does not confine */
    bool interactive;        /* a person can answer approvals (dm_session_answer) */
    /* A reply ends where its text has one of these (dm_stop; borrowed while the session is open).  The text that is told ends before
     * it, the result names it; reasoning and calls are not looked at. */
    const char *const *stop; size_t nstop;
    bool logprobs; int top_logprobs; /* DM_EV_TOKEN tells each token's logprob and so many others', 0 … DM_LOGPROBS_MAX */
    dm_host_fn fn; void *ctx;
} dm_session_opts;

DM_API int dm_session_create(dm_host *h, const dm_session_opts *o, dm_session **out, dm_err *e);
/* Loads the journal; calls that were started and never finished become `unknown` and are settled by their
 * on_unknown rule before anything else.  DM_ENOENT, DM_EBUSY, DM_EVERSION (a newer session, untouched), DM_EFOREIGN
 * (other weights, another tokenizer, a tool that is not there). */
DM_API int dm_session_resume(dm_host *h, const char *id, const dm_session_opts *o, dm_session **out, dm_err *e);
DM_API const char *dm_session_id(const dm_session *s);
/* Gives it a user message (NULL: go on with what is pending) and starts it.  DM_EV_RESULT comes last, always.
 * While it runs, a message is journaled and read in the next turn.  NULL behind a reply that was cut off (interrupted, out of tokens, a
 * fault) asks the model to go on.  DM_EINVAL: NULL and nothing is pending.
 * DM_ESTATE: memory ran out behind a commit; close the session and resume it. */
DM_API int dm_session_send(dm_session *s, const char *text, dm_err *e);
/* Answers DM_EV_APPROVAL.  DM_ENOENT: no such call; DM_ESTATE: it was answered already. */
DM_API int dm_session_answer(dm_session *s, const char *call_id, bool allow, dm_err *e);
DM_API void dm_session_interrupt(dm_session *s); /* ends the generation or the running tools; RESULT follows */
DM_API void dm_session_close(dm_session *s);     /* not while it runs; its memory goes when the loop has run */
DM_API bool dm_session_running(const dm_session *s);
DM_API int dm_session_outcome(const dm_session *s); /* of the last run: 0 or the DM_E… for dm_exit_code */

/* ---- program --------------------------------------------------------------------------- */

/* Exit codes: 0 done · 1 agent or model error · 2 usage · 3 not found · 4 paused · 5 budget · 6 sandbox ·
 * 7 context full · 130/143 signals. */
DM_API int dm_exit_code(int err);
/* The whole command line program; returns its exit status. */
DM_API int dm_main(int argc, char **argv);

#ifdef __cplusplus
}
#endif
#endif
