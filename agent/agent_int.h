/* agent_int.h — what the files of the agent share and nobody else sees. */
#ifndef DM_AGENT_INT_H
#define DM_AGENT_INT_H

#include <stdatomic.h>

#include "agent/agent.h"

/* ---- journal_claim.c: one runner per session -------------------------------------------- */

/* Locks dir/ID; *fd keeps the lock.  DM_EBUSY names the holder. */
int claim_take(const char *dir, const char *session, int *fd, dm_err *e);
void claim_drop(int fd);
bool claim_held(const char *dir, const char *session);

/* ---- journal.c: a session from elsewhere --------------------------------------------------- */

/* The events of a whole session as JSON text, asked for in rising order, perhaps again from the first one on; text is valid until the next
 * call, its end is a NUL. */
typedef struct dm_journal_rows {
    int64_t n, bytes; /* bytes: of all texts */
    int (*row)(void *ctx, int64_t seq, const char **text, size_t *bytes, dm_err *e);
    void *ctx;
} dm_journal_rows;
/* Makes a session's events these, in one transaction, as dm_journal_append does.  Those that are there must be the first of them, text
 * for text: else DM_EEXIST and nothing is changed.  only_check: nothing is written.  *added: events that were (would be) new.
 * Whoever writes has the claim. */
int dm_journal_adopt(dm_journal *j, const char *session, const dm_journal_rows *rows, bool only_check, int64_t *added, dm_err *e);

/* ---- journal_head.c: the row that lists a session ----------------------------------------- */

/* Changes head (an object, maybe empty) by one event. */
int head_apply(json_t *head, const char *session, const json_t *event);

/* ---- event.c: what is written to the journal --------------------------------------------------- */

typedef enum call_state {
    CALL_PROPOSED,  /* the model wrote it */
    CALL_WAITING,   /* policy asks a person */
    CALL_APPROVED,
    CALL_STARTED,   /* durable before its process exists (C4) */
    CALL_FINISHED,  /* has its result, as all below */
    CALL_FAILED,    /* was refused before it started: unknown tool, wrong arguments, malformed block */
    CALL_DENIED,
    CALL_CANCELLED,
    CALL_UNKNOWN,   /* started, and the runtime was stopped: the model is told so */
} call_state;
const char *call_state_name(call_state st);
int call_state_of(const char *name); /* or DM_EFORMAT */
static inline bool call_resolved(call_state st) { return st >= CALL_FINISHED; }

/* Each returns a new object or NULL when out of memory. */
json_t *event_message(const char *text);
json_t *event_tokens(const char *what, const int32_t *ids, size_t n, uint64_t rng, const char *end);
json_t *event_call_new(const char *id, const char *name, const char *args);
json_t *event_call(const char *id, call_state st);
/* ... with the text that the model sees. */
json_t *event_call_text(const char *id, call_state st, const char *text, bool is_error);
json_t *event_stamp(json_t *ev); /* adds the time; passes NULL through */
void call_id_new(char out[32]);

/* ---- ledger.c: what a session's events amount to ------------------------------------------------- */

typedef struct ledger_call {
    char *id, *name, *args; /* owned; args as the model wrote them; name "" for a malformed block */
    call_state state;
    char *text;             /* owned; what the model sees, once resolved */
    bool is_error, approved_by_user;
} ledger_call;

/* The fold of a session's events.  The running session changes it in the same way as a replay: by applying the
 * event that was just made durable. */
typedef struct ledger {
    json_t *created;        /* owned: the first event */
    dm_ids ids;             /* the token timeline, exactly as fed and sampled */
    size_t reply_at;        /* where the last reply begins */
    bool reply_open;        /* the last tokens are a prompt: a reply is due */
    bool reply_cut;         /* the last reply was stopped before its end: by a person, by its limit, by a fault */
    size_t prompt_n;        /* tokens of the last prompt */
    char root[17], numerics[48]; /* what the last turn was run with; "": not known */
    uint64_t rng;           /* sampler at the end of ids */
    char **messages;        /* owned: user texts that no prompt holds yet */
    size_t nmessages;
    ledger_call *calls;     /* of the last reply, until a prompt holds their results */
    size_t ncalls;
    int64_t turns, events;
    int malformed;          /* replies in a row that were only malformed calls */
    char digest[33];        /* of the last finished call and its result */
    int repeats;            /* how often in a row */
} ledger;

int ledger_apply(ledger *l, const json_t *event, dm_err *e);
void ledger_free(ledger *l);
ledger_call *ledger_find(ledger *l, const char *call_id);
bool ledger_calls_open(const ledger *l);  /* some call has no result yet */
bool ledger_has_input(const ledger *l);   /* something for the model to read */

/* ---- prompt.c: the new part of the conversation, as tokens ----------------------------------------- */

typedef struct prompt_ctx {
    const dm_tok *tok;
    dm_chat_mode mode;
    const char *system;
    const json_t *tools; /* [{name, description, parameters}] */
    int32_t eos, think_end;
} prompt_ctx;
/* Appends to out what the model has not read yet: everything at the beginning; later the closing tokens that the
 * last reply lacks, the results in the order of the calls, and the messages. */
int prompt_build(const prompt_ctx *c, const ledger *l, dm_ids *out, dm_err *e);

/* ---- pager.c: between a sequence and the store -------------------------------------------------------- */

/* One per session.  Used by one thread at a time: a pool thread while it restores, the engine thread while a job
 * runs (as the job's sink), the loop otherwise. */
typedef struct pager {
    dm_kv *kv;        /* borrowed; NULL: nothing is kept */
    dm_engine *engine;
    dm_hash root;
    size_t block_bytes;
    dm_hash *chain;   /* owned: H(0..chain_n-1) of the session's timeline, which only grows */
    size_t chain_n, chain_cap;
    int64_t spilled_bytes, spilled_blocks, spilled_states; /* handed to the store since pager_begin_turn */
    bool store_failed;
} pager;

/* ---- why.c: why something was computed again ------------------------------------------------------------ */

typedef enum why_class {
    WHY_NOT, WHY_NO_STORE, WHY_NOTHING_STORED, WHY_DISK_FULL, WHY_OVER_BUDGET, WHY_EVICTED, WHY_NO_STATE, WHY_NOT_DEEPER, WHY_STORE_FAILED, WHY_REFUSED, WHY_GONE,
    WHY_RESTORES_FAILED, WHY_OTHER_NUMERICS, WHY_OTHER_ROOT, WHY_COUNT
} why_class;
const char *why_name(why_class w); /* for programs */
const char *why_text(why_class w); /* for people; static, as the name is */
typedef struct why_find { int64_t pos, wanted, blocks, blocks_present, evicted; bool disk_full, over_budget; } why_find; /* a dm_kv_hit's figures */
why_class why_of_find(const why_find *f);
/* The same, knowing what the turn before was run with and what is used now (roots in hex; "": not known). */
why_class why_of_turn(why_class found, const char *was_root, const char *root, const char *was_numerics, const char *numerics);
/* {class, text, position, before, token, after, tokens, seconds} for a journal and an event stream; ids: the timeline, pos: first token
 * that was computed again.  NULL: out of memory. */
json_t *why_told(why_class w, const dm_tok *tok, const dm_ids *ids, int64_t pos, int64_t tokens, double seconds);

typedef struct restore_report {
    int64_t pos;              /* tokens that need no prefill */
    int64_t from_ram, from_disk; /* parts (blocks and the state) by tier */
    int64_t bad;              /* restores that were given up and dropped */
    why_class miss;                 /* why pos is not deeper */
    uint64_t ns;
    bool tried_all;           /* gave up after too many bad ones */
} restore_report;

void pager_init(pager *p, dm_kv *kv, dm_engine *g, const dm_hash *root, size_t block_bytes);
void pager_free(pager *p);
void pager_begin_turn(pager *p);
dm_sink pager_sink(pager *p);
/* Makes a sequence that holds as much of ids[0..limit) as the store has; an empty one when it has nothing.  Fails
 * only when no sequence can be made.  Runs on a pool thread; *stop ends it early with what is there. */
int pager_restore(pager *p, const int32_t *ids, int64_t n, int64_t limit, const _Atomic bool *stop, dm_seq **seq, restore_report *r, dm_err *e);
/* The state at pos does not work: never again (K17). */
void pager_drop(pager *p, const int32_t *ids, int64_t pos);

/* ---- gen.c: one job on the engine ------------------------------------------------------------------------ */

typedef enum gen_item_kind { GEN_REASONING, GEN_CONTENT, GEN_NOTE, GEN_TOKEN } gen_item_kind;
typedef struct gen_token { /* what a GEN_TOKEN item holds */
    int32_t id;
    float logprob;
    int ntop;
    dm_logprob top[DM_LOGPROBS_MAX];
} gen_token;
typedef struct gen_item {
    struct gen_item *next;
    gen_item_kind kind;
    dm_buf text;
} gen_item;

/* The engine thread fills it, the loop empties it when `wake` fires.  Bounded by what one turn can generate:
 * neighbouring pieces of text are joined, only the latest progress is kept. */
typedef struct gen {
    const dm_tok *tok;
    uv_async_t *wake;
    const uint8_t *banned; /* [vocab] 1: may not be sampled */
    dm_grammar *grammar;   /* owned; what may come next in a call; NULL: anything */
    bool grammar_told;     /* that it gave up */
    dm_stop *stop;         /* owned; strings that end a reply; NULL: none */
    /* engine thread; the loop's again once `ended` was taken */
    dm_parser *parser;     /* NULL: prefill only */
    dm_ids reply;
    int *runs;             /* [GEN_PERIODS] how many tokens the reply has repeated with that period */
    bool repeated;         /* ended by the repetition guard */
    dm_buf shown;          /* scratch of the stop strings */
    bool logprobs;
    /* under lock */
    uv_mutex_t lock;
    gen_item *head, *tail;
    int64_t done, total;
    bool progress, ended, lost; /* lost: out of memory, something is missing */
    dm_gen_event end;
} gen;

typedef struct gen_job {
    dm_engine *engine;
    dm_seq *seq;
    const int32_t *ids; size_t n;
    int64_t max_new;
    int32_t eos;
    dm_sampler sampler;
    dm_sink sink;
    const dm_parser_opts *parse; /* NULL with max_new 0 */
    bool logprobs; int top_logprobs; /* each token becomes an item */
} gen_job;

int gen_init(gen *g, const dm_tok *tok, uv_async_t *wake, const uint8_t *banned, dm_err *e);
/* From here on calls follow the tools' schemas. */
int gen_use_grammar(gen *g, const dm_vocab *v, const dm_parser_opts *tools, dm_err *e);
/* From here on a reply ends at one of these in its text; DM_EINVAL names a bad one. */
int gen_use_stops(gen *g, const char *const *texts, size_t n, dm_err *e);
void gen_free(gen *g); /* no job may run */
int gen_start(gen *g, const gen_job *j, dm_err *e);
/* Takes what is there: the caller owns the list (gen_items_free).  *ended: END came; the job is over. */
gen_item *gen_take(gen *g, bool *progress, int64_t *done, int64_t *total, bool *ended);
void gen_items_free(gen_item *it);
/* After END: lets the parser finish (more items may come of it).  cut: ended by a limit. */
void gen_finish_parse(gen *g, bool cut);

/* ---- small things -------------------------------------------------------------------------- */

/* s or "" of a string member; the number or def of an integer member. */
const char *json_str(const json_t *o, const char *key);
int64_t json_int(const json_t *o, const char *key, int64_t def);
/* Compact text of a value, key order kept; NULL when out of memory; free with dm_free. */
char *json_line(const json_t *v);

#endif
