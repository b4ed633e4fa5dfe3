/* Inside of the parser of model output.
 *
 *   parser.c       input, states, end of input, the public functions
 *   parser_tag.c   is there a tag at this place?
 *   parser_call.c  one call: parameters to JSON, schema, wrappers
 *   parser_out.c   events, and taking them back
 *
 * Input is made valid UTF-8 first; added tokens that matter become one byte each that no UTF-8 holds (SYM_…), so
 * markup made of tokens and the same characters made of text never mix.  With markers_in_text there are no such
 * bytes and the spelling decides.
 *
 *             </think>            opener                invoke            parameter
 *   REASON -------------> TEXT -----------> BLOCK <--------------> INVOKE <---------> VALUE
 *      |                   ^  \                |  closer              |  {
 *      |  opener           |   `- bare invoke  v                      v
 *      `-> (on trial) BLOCK…       (on trial)  AFTER                 BODY
 *                 \-> WAIT
 *
 * On trial: a block inside open thinking, or an invoke without its block, counts only if nothing but blanks,
 * closers, </think> and the end follows.  Until then its events are queued and its text is kept; when something
 * else follows, the text is what it looked like: text.
 *
 * Work is linear in the input: a byte is looked at once as text, and a place where a tag may begin is looked at
 * with at most TAG_BYTES_MAX bytes of view. */
#ifndef DM_ENGINE_PARSER_INT_H
#define DM_ENGINE_PARSER_INT_H

#include "engine/engine.h"
#include "engine/pyjson_int.h"

#define TAG_BYTES_MAX 512
#define LOOKAHEAD_BLANKS_MAX 16

enum { SYM_DSML = 0xF8, SYM_THINK_END = 0xF9, SYM_EOS = 0xFA };

/* ---- tags ---- */

typedef enum lex { LEX_NO, LEX_MORE, LEX_YES } lex;
typedef enum tag_kind { TAG_CALLS, TAG_INVOKE, TAG_PARAM } tag_kind;
typedef enum tag_string { STRING_ABSENT, STRING_TRUE, STRING_FALSE, STRING_ODD } tag_string;

enum { DIALECT_PLAIN = 0x100 }; /* no DSML mark at all */

typedef struct tag {
    tag_kind kind;
    bool close, self_closed, has_name;
    bool near_word; /* the word is misspelt */
    bool odd;       /* in any way not the trained spelling */
    int dialect;    /* how the bars are written; canonical or DIALECT_PLAIN or another */
    tag_string string;
    size_t name, name_n; /* place in the view */
    size_t len;
} tag;

typedef struct tag_view {
    const uint8_t *p;
    size_t n;
    bool final;   /* no more input will come */
    bool in_text; /* markers are spelt in the text */
    bool plain;   /* tags without the DSML mark count here */
} tag_view;

/* p[0] is '<'.  The answer for a longer view of the same bytes is the same, unless this one is LEX_MORE. */
lex tag_lex(const tag_view *v, tag *out);
/* Does a literal stand here? */
lex tag_literal(const tag_view *v, const char *text);
int tag_canonical(bool in_text);

/* ---- calls ---- */

typedef struct psr_tool {
    char *name;    /* owned */
    pj_doc schema;
    bool has_schema;
    const pj_val *props, *required; /* inside schema, or NULL */
} psr_tool;

typedef struct psr_key { size_t at, n; } psr_key;

typedef enum param_type { PARAM_STRING, PARAM_JSON, PARAM_GUESS } param_type;

typedef struct psr_param {
    param_type type;
    int dialect;
    dm_buf key;
    dm_buf value;   /* JSON, GUESS: text so far */
    bool visible;   /* some of it is not blank */
} psr_param;

/* Keys already given, and the JSON text they went to: the call's, or that of a nested object. */
typedef struct psr_object {
    dm_buf json;
    dm_buf keys;
    psr_key *list; /* owned */
    size_t n, cap;
} psr_object;

typedef struct psr_call {
    bool open;
    bool begun;    /* its CALL event is out */
    bool bad;      /* refused: what follows in it is skipped */
    bool held;     /* its arguments may be unwrapped at the end, so none are sent yet */
    bool junk;     /* text between its tags */
    bool has_body; /* JSON body instead of parameters */
    bool in_string, escaped; /* BODY: inside a JSON string */
    int index;
    size_t bytes;  /* of its text so far */
    const psr_tool *tool; /* NULL: bad */
    psr_object args;
    size_t sent;          /* bytes of args.json that went out */
    psr_param param;      /* the one being read */
    bool nested;          /* `outer` holds parameters instead of a value */
    psr_param outer;
    psr_object inner;
    dm_buf body;
} psr_call;

typedef struct psr_result { char *name, *args; } psr_result;

/* ---- events on trial ---- */

typedef struct psr_queued { dm_parse_kind kind; int index; size_t at, n; } psr_queued;

typedef enum psr_state { ST_REASON, ST_TEXT, ST_BLOCK, ST_INVOKE, ST_VALUE, ST_BODY, ST_AFTER, ST_WAIT, ST_DEAD } psr_state;

typedef struct psr_trial {
    bool on;
    bool bare;          /* no block around the invoke */
    psr_state home;     /* ST_REASON or ST_TEXT: where its text belongs */
    bool thinking_over; /* </think> came behind it */
    size_t think_at;    /* then: bytes of raw before it */
    psr_queued *queue;  /* owned */
    size_t n, cap;
    dm_buf text;        /* of the queued events */
    size_t ncalls, nerrors; /* to go back to */
    int next_index;
} psr_trial;

struct dm_parser {
    bool in_text;
    size_t call_bytes_max;
    psr_tool *tools; /* owned */
    size_t ntools;
    dm_parse_fn fn;
    void *ctx;

    int rc;       /* sticky: after DM_ENOMEM nothing goes on */
    bool final;   /* no more input */
    bool ended;   /* end of input was handled */
    bool closed;  /* see dm_parser_block_closed */
    bool any_text; /* reasoning or content went out */
    bool of_block; /* what goes out as text stood in a call block */
    dm_buf in;    /* input not yet understood: [pos, n) */
    size_t pos;
    size_t scan;  /* known blanks from pos on */
    uint8_t carry[8]; /* begun character */
    size_t ncarry;
    dm_buf tmp;

    psr_state state;
    dm_buf raw;    /* text of the block so far, while it may turn out to be text */
    bool keep_raw;
    int invokes;   /* of the block */
    int begun, whole;
    bool junk_told;
    psr_call call;
    psr_trial trial;
    int next_index;

    psr_result *calls; /* owned */
    size_t ncalls, calls_cap;
    char **errors;     /* owned */
    size_t nerrors, errors_cap;
    char **pending;    /* errors of a block that may turn out to be text; owned */
    size_t npending, pending_cap;
};

/* parser_out.c: all do nothing once rc is set */
void psr_fail(dm_parser *p);
void psr_emit(dm_parser *p, dm_parse_kind kind, int index, const void *s, size_t n);
void psr_emit_text(dm_parser *p, psr_state home, const uint8_t *s, size_t n); /* symbols spelt out */
void psr_repair(dm_parser *p, const char *fmt, ...) DM_PRINTF(2, 3);
void psr_error(dm_parser *p, int index, const char *fmt, ...) DM_PRINTF(3, 4);   /* at once */
void psr_error_later(dm_parser *p, const char *fmt, ...) DM_PRINTF(2, 3);        /* if the block is one */
void psr_pending_emit(dm_parser *p);
void psr_pending_drop(dm_parser *p);
void psr_spell(dm_parser *p, dm_buf *out, const uint8_t *s, size_t n); /* appends with symbols spelt out */
void psr_call_push(dm_parser *p, const char *name, const dm_buf *args);
void psr_trial_begin(dm_parser *p, psr_state home, bool bare);
void psr_trial_commit(dm_parser *p);
void psr_trial_abort(dm_parser *p); /* its text goes out; state is home again */

/* parser_call.c */
int psr_tools_read(dm_parser *p, const dm_parser_opts *o, dm_err *e);
const psr_tool *psr_tool_find(const dm_parser *p, const uint8_t *name, size_t n);
void psr_call_begin(dm_parser *p, const tag *t, const uint8_t *view);
void psr_call_end(dm_parser *p);   /* closed: whole or refused */
void psr_call_reset(dm_parser *p);
void psr_call_free(psr_call *c);
void psr_args_flush(dm_parser *p);
void psr_param_begin(dm_parser *p, const tag *t, const uint8_t *view);
void psr_param_text(dm_parser *p, const uint8_t *s, size_t n);
void psr_param_end(dm_parser *p);
bool psr_param_blank(const dm_parser *p); /* no value so far, and it may be nested */
void psr_nest_begin(dm_parser *p);
void psr_nest_end(dm_parser *p);
bool psr_call_has_required(const dm_parser *p);

static inline bool psr_is_blank(uint8_t c) { return c == ' ' || c == '\n' || c == '\t' || c == '\r'; }

#endif
