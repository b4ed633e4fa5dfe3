/* Inside of the call grammar: which tokens can continue to a valid call?
 *
 *   grammar_vocab.c   the vocabulary as a trie over its bytes, made once per tokenizer
 *   grammar_schema.c  tools and their schemas, compiled
 *   grammar_step.c    the automaton of a block: tags, names, string bodies
 *   grammar_json.c    the automaton of a JSON value under a schema
 *   grammar.c         the public functions: following tokens, masking
 *
 * The automaton reads units: the bytes 0..255 of ordinary tokens (added tokens that mean nothing to the parser count as
 * their text, as they do there) and one unit for each added token that does (U_…).  A token is allowed if its units
 * can be read from where the automaton stands.
 *
 * Where a schema offers alternatives (anyOf, a declared key beside free ones, an enumerated text that is the beginning
 * of another) the automaton stands at several places at once: a gr_set of threads, each with its own stack of open
 * brackets.  A thread that cannot read a unit ends; equal threads are one.
 *
 * What is enforced: the trained spelling of every tag; declared tools; declared parameters, each at most once, all
 * required ones; string="true" only for what may be a string; JSON with the schema's types, properties, required,
 * items, prefixItems, minItems, maxItems, enum, const, anyOf, oneOf, allOf, $ref; bounds of integers, the sign of
 * numbers, minLength; what no tool could read (NUL, integers beyond 64 bits, numbers from 1e308 on).  Not: pattern,
 * maxLength, multipleOf, uniqueItems, bounds of fractions, oneOf against overlap, anyOf at the top of a tool's
 * parameters.  What is not enforced is allowed, and left to the check of the arguments. */
#ifndef DM_ENGINE_GRAMMAR_INT_H
#define DM_ENGINE_GRAMMAR_INT_H

#include "engine/engine.h"
#include "engine/pyjson_int.h"

enum { U_DSML = 256, U_THINK_END, U_EOS };

#define GR_DEPTH_MAX 20         /* open brackets */
#define GR_THREADS_MAX 8
#define GR_PROPS_MAX 128        /* properties of a nested object that are followed; more: any object */
#define GR_NODES_MAX 4096       /* schemas of one tool set; more: any value */
#define GR_BLANKS_MAX 64        /* in a row, between JSON tokens */
#define GR_NAME_BYTES_MAX 256   /* of tools and parameters: a tag must fit the parser's view */
#define GR_FREE_KEY_BYTES_MAX 64
#define GR_TOKEN_BYTES_MAX 256  /* longer tokens are never allowed inside structure */

/* ---- vocabulary ---- */

/* Preorder: the subtree of node i is [i, end). */
typedef struct gr_node {
    uint32_t end;
    int32_t token;  /* first token that ends here, the others by dm_vocab.next; -1: none */
    uint16_t depth; /* bytes from the root, 1.. */
    uint8_t byte;
} gr_node;

typedef struct gr_trie { gr_node *nodes; uint32_t n; } gr_trie; /* owned */

struct dm_vocab {
    const dm_tok *tok; /* borrowed */
    int vocab;
    int depth_max;     /* bytes of the longest token in a trie */
    int dsml, think_end, eos; /* ids, or negative */
    int32_t *next;     /* [vocab] owned: the next token of the same bytes, or -1 */
    uint8_t *plain;    /* [(vocab+7)/8] owned: tokens that stay inside a JSON string wherever it is */
    uint8_t *nul;      /* the same: tokens with a NUL */
    gr_trie all;
    gr_trie quoted;    /* only those that are not plain */
};

static inline bool gr_bit(const uint8_t *bits, int32_t i) { return bits[i >> 3] >> (i & 7) & 1; }
static inline void gr_bit_set(uint8_t *bits, int32_t i) { bits[i >> 3] |= (uint8_t)(1u << (i & 7)); }

/* ---- schemas ---- */

/* Texts in bytewise order; those with a common beginning are neighbours. */
typedef struct gr_text { const uint8_t *p; uint32_t n; int32_t what; } gr_text;
typedef struct gr_texts { gr_text *v; uint32_t n; } gr_texts;

enum { T_STRING = 1, T_INTEGER = 2, T_NUMBER = 4, T_BOOLEAN = 8, T_NULL = 16, T_ARRAY = 32, T_OBJECT = 64, T_ALL = 127 };

typedef struct gr_prop {
    const char *name; /* borrowed from the document */
    uint32_t n;
    int32_t schema;
    bool declared;    /* named by `properties`, not only by `required` */
    bool required;
} gr_prop;

/* One form that a value may have. */
typedef struct gr_leaf {
    uint8_t types;
    bool constrained;   /* says anything at all */
    bool closed;        /* no keys but props */
    bool no_minus;      /* NUMBER: not below 0 */
    bool one_value;     /* values_of is const's value, not enum's list */
    int64_t int_min, int_max;
    uint32_t chars_min, items_min, items_max;
    const pj_val *values_of; /* only these: enum's list or const's value; NULL: any */
    gr_prop *props;
    uint32_t nprops;
    int32_t extra;      /* schema of keys that are not declared */
    int32_t items;
    int32_t *prefix;
    uint32_t nprefix;
    /* once sealed: */
    gr_texts values;    /* JSON texts; strings first */
    uint32_t nstrings;
    gr_texts raw;       /* the strings among them, each with the "</" of its closer */
    gr_texts keys;      /* props as JSON, with the closing quote; what: index */
} gr_leaf;

/* A schema is its leaves: any of them may be it. */
typedef struct gr_schema {
    const pj_val *from;
    int32_t *all, *any;  /* to be merged with own; ends of groups in `any` are -1 */
    uint32_t nall, nany;
    gr_leaf own;
    gr_leaf **leaves;
    uint32_t nleaves;
    bool flat, busy;
} gr_schema;

typedef struct gr_tool {
    gr_prop *props; /* parameters that can be given */
    uint32_t nprops;
    gr_texts names; /* with the `" string="` behind them; what: index */
    int32_t extra;  /* schema of parameters that are not declared, or -1 */
} gr_tool;

typedef struct gr_chunk gr_chunk;
typedef struct gr_rules {
    gr_chunk *chunks;     /* owned: everything below */
    pj_doc *docs;         /* owned */
    size_t ndocs;
    gr_schema *schemas;   /* owned; 0 is "any value", 1 "none" */
    size_t nschemas, schemas_cap;
    const pj_val *root;   /* while one tool is compiled: for $ref */
    gr_tool *tools;
    uint32_t ntools;
    gr_texts names;       /* with the `">\n` behind them; what: index */
    uint32_t props_max;   /* of any tool */
} gr_rules;

enum { SCHEMA_ANY, SCHEMA_NONE };

int gr_rules_read(gr_rules *r, const dm_parser_tool *tools, size_t ntools, dm_err *e);
void gr_rules_free(gr_rules *r);

/* Narrows [*lo,*hi), which share their first `at` bytes, to those that go on with c.  False: none. */
bool gr_texts_next(const gr_texts *t, uint32_t *lo, uint32_t *hi, uint32_t at, int c);

/* ---- automaton ---- */

typedef enum gr_at {
    AT_LITERAL, AT_TOOL, AT_FIRST, AT_TAG, AT_PARAM, AT_FREE, AT_BOOL, AT_RAW, AT_RAW_MARK, AT_RAW_VALUE, AT_BLOCK, AT_DONE,
    AT_JSON, /* those from here on are grammar_json.c's */
    AT_VALUE = AT_JSON, AT_STRING, AT_STRING_MARK, AT_WORD, AT_ENUM, AT_NUMBER, AT_AFTER, AT_KEY_FIRST, AT_KEY, AT_NAME, AT_NAME_FREE, AT_COLON,
    AT_ITEM_FIRST,
} gr_at;

typedef enum gr_lit {
    LIT_OPEN, LIT_INVOKE, LIT_PARAM, LIT_TRUE, LIT_FALSE, LIT_PARAM_CLOSE, LIT_RAW_CLOSE, LIT_INVOKE_CLOSE, LIT_EMPTY_CLOSE, LIT_BLOCK_CLOSE,
    LIT_RAW_INVOKE, LIT_RAW_CALLS, LIT_STRING_INVOKE, LIT_STRING_CALLS,
} gr_lit;

typedef enum gr_num { NUM_MINUS, NUM_ZERO, NUM_INT, NUM_DOT, NUM_FRACTION, NUM_E, NUM_SIGN, NUM_EXP } gr_num;

typedef struct gr_frame { /* an open bracket */
    uint64_t used[GR_PROPS_MAX / 64];
    const gr_leaf *leaf;
    uint32_t count; /* items or pairs */
    uint32_t object; /* else an array */
} gr_frame;

typedef struct gr_state {
    uint8_t at, depth, lit;
    uint8_t tail;    /* text values: 1 behind '<', 2 behind "</" */
    uint8_t escape;  /* JSON strings: 1 behind '\', 2..5 in \uXXXX */
    uint8_t zeros;   /* hex digits of it that were all 0 */
    uint8_t blanks, num, negative, digits, fraction, exp_digits, exp_negative;
    uint8_t word;
    uint16_t exp;
    uint32_t pos;    /* in a literal or in [lo,hi) */
    uint32_t lo, hi, lo2, hi2;
    uint32_t chars;
    int32_t tool, param; /* param: of the tool's props; PARAM_… */
    int32_t schema;  /* of the value to come */
    const gr_leaf *leaf; /* of the value being read */
    uint64_t magnitude;
    gr_frame frames[GR_DEPTH_MAX];
} gr_state;

enum { PARAM_NONE = -1, PARAM_FREE = -2 };

typedef struct gr_set { int n; gr_state s[GR_THREADS_MAX]; } gr_set;

static inline size_t gr_state_bytes(const gr_state *s) { return offsetof(gr_state, frames) + s->depth * sizeof *s->frames; }

typedef enum gr_mode { MODE_REASON, MODE_CONTENT, MODE_BLOCK, MODE_OFF } gr_mode;

struct dm_grammar {
    const dm_vocab *v; /* borrowed */
    gr_rules rules;
    gr_mode mode;
    uint8_t last[2];   /* CONTENT: the last bytes, the newest first; 0: none */
    gr_set now;        /* BLOCK */
    bool *used;        /* [rules.props_max] owned: parameters of the open call */
    dm_buf key;        /* the free key being read */
    dm_buf keys_text;  /* free keys of the open call, one behind the other */
    gr_texts keys;     /* the same, in order; v is owned */
    uint32_t keys_cap;
    uint8_t *allowed;  /* [(vocab+7)/8] owned */
    gr_set *walk;      /* [depth_max+1] owned */
    char gave_up[160]; /* "" while it works */
};

void gr_push(gr_set *out, const gr_state *s);
/* A copy of `from` without what only its present place needs. */
void gr_moved(gr_state *to, const gr_state *from, gr_at at);
void gr_literal(gr_state *to, const gr_state *from, gr_lit lit);

/* Adds to out every place where `unit` leads from s. */
void gr_step(const dm_grammar *g, const gr_state *s, int unit, gr_set *out);
void gr_step_set(const dm_grammar *g, const gr_set *from, int unit, gr_set *out);
void gr_block_begin(gr_set *out); /* behind '<' and the mark */

void gr_json_step(const dm_grammar *g, const gr_state *s, int unit, gr_set *out);
/* Follows '<' "</" in text that is not to end by accident. */
uint8_t gr_tail(uint8_t tail, int unit);

#endif
