/* engine.h — a DeepSeek-V4 model: its files, its text, its forward pass, its thread.
 *
 * Nouns
 *   model      weights mapped read-only and the configuration; immutable, shared by any threads
 *   tokenizer  tokenizer.json; immutable, shared
 *   prompt     rendered text plus the places where added tokens stand in it
 *   parser     turns generated tokens into reasoning, content and calls, incrementally
 *   forward    a model made runnable on a device with one numeric path: sequences, steps, blocks, states.
 *              A small table of functions, so that a scripted one can stand in for tests.
 *   sequence   one inference timeline inside a forward: position, window rows, folds, blocks
 *   engine     a thread over a forward: takes jobs, forms ragged steps, samples, reports
 *   block      the growing cache of 256 consecutive positions, all layers, one contiguous run of bytes
 *   state      what a cut at position P needs beyond whole blocks
 *
 * C1 (exact resume): for every P, loading the blocks before P and the state at P into a fresh sequence and
 * feeding the rest gives the same logits, byte for byte, as a run that never stopped, for every chunking,
 * batch mate and thread count, on the same numerics id (forward.numerics_id names path and instruction set).
 *
 * What goes out (blocks, states) goes to a dm_sink that this header declares and others implement. */
#ifndef DM_ENGINE_H
#define DM_ENGINE_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

#define DM_BLOCK_TOKENS 256 /* positions per block: lcm(4,128)·2 (v4 spec 7.3) */

/* ==== configuration and model files ================================================== */

#define DM_LAYERS_MAX 128
/* Everything that config.json says and the code uses; names are the file's.  Filled by dm_config_read,
 * which refuses what this program cannot run (unknown model_type, V4.1, odd dims) in words. */
typedef struct dm_config {
    int num_hidden_layers, hidden_size, num_attention_heads, head_dim, qk_rope_head_dim, q_lora_rank;
    int o_groups, o_lora_rank, sliding_window, index_n_heads, index_head_dim, index_topk;
    int n_routed_experts, num_experts_per_tok, n_shared_experts, moe_intermediate_size, num_hash_layers;
    int hc_mult, hc_sinkhorn_iters, num_nextn_predict_layers, vocab_size;
    int64_t max_position_embeddings;
    int bos_token_id, eos_token_id;
    double routed_scaling_factor, swiglu_limit, hc_eps, rms_norm_eps, rope_theta, compress_rope_theta;
    double rope_factor, rope_beta_fast, rope_beta_slow;   /* YaRN, compressed layers only */
    int64_t rope_original_max;
    int compress_ratio[DM_LAYERS_MAX + 8]; /* 0, 4 or 128 per layer; index num_hidden_layers: the MTP layer */
    int compress_ratio_count;
    /* How matrices are stored; tensors decide when they exist (each by its own dtype). */
    bool weights_bf16;          /* no quantization_config: bf16, used without quantising activations; else FP8 */
    bool expert_fp4, expert_bf16; /* expert_dtype: "fp4", "bf16", neither: "fp8" */
} dm_config;

DM_API int dm_config_read(dm_config *out, const char *path_or_dir, dm_err *e);

typedef struct dm_model dm_model;

/* Maps every shard and checks every tensor's name, dtype and shape against the configuration; DM_EMODEL with
 * the tensor's name otherwise.  Weights are read lazily by the kernel.  Missing tokenizer is not an error here. */
DM_API int dm_model_open(dm_model **out, const char *dir, dm_err *e);
DM_API void dm_model_close(dm_model *m); /* NULL is fine; no forward may use it any more */
DM_API const dm_config *dm_model_config(const dm_model *m);
DM_API const char *dm_model_dir(const dm_model *m);

typedef bool (*dm_progress)(void *ctx, const char *what, int64_t done, int64_t total); /* false: stop */

/* BLAKE2b-256 over every tensor's name, dtype, shape and bytes, in bytewise order of names: the identity
 * of the weights.  Kept in cache_dir (may be NULL) with the shards' device, inode, size and mtime, and
 * recomputed when any of these differs. */
DM_API int dm_model_fingerprint(const dm_model *m, const char *cache_dir, dm_hash *out, dm_progress fn, void *ctx, dm_err *e);

/* One line per tensor kind or, with all=true, per tensor; text or JSON. */
DM_API int dm_model_inspect(const dm_model *m, bool all, bool json, dm_buf *out, dm_err *e);

/* Writes a random checkpoint in the official layout (shared/spec: integer random numbers, so the same bytes
 * everywhere) for a config.json: L+3 shards, index, a copy of config.json.  layers > 0 keeps only that many. */
DM_API int dm_model_synth(const char *config_path, const char *out_dir, uint64_t seed, int layers, dm_progress fn, void *ctx, dm_err *e);
/* ids of a test sequence: length n, seed s, vocabulary V (numerics: "Token sequences for tests"). */
DM_API int dm_synth_tokens(int32_t *out, int64_t n, uint64_t seed, int vocab, dm_err *e);

/* ==== tokenizer ======================================================================== */

typedef struct dm_tok dm_tok;
DM_API int dm_tok_open(dm_tok **out, const char *dir_or_file, dm_err *e);
DM_API void dm_tok_close(dm_tok *t);
DM_API int dm_tok_vocab(const dm_tok *t);
DM_API void dm_tok_hash(const dm_tok *t, dm_hash *out); /* identity of the tokenizer: BLAKE2b of the file */
/* Added token by its text; DM_ENOENT if the file has none such. */
DM_API int dm_tok_special(const dm_tok *t, const char *text);
DM_API bool dm_tok_is_special(const dm_tok *t, int32_t id);
/* Bytes of a token (borrowed, as long as t lives); an added token gives its text.  Unknown id: n = 0. */
DM_API const char *dm_tok_bytes(const dm_tok *t, int32_t id, size_t *n);
/* Text to ids.  special: added tokens in the text are recognised (only for text that we wrote ourselves).
 * Invalid UTF-8 becomes U+FFFD.  Appends to out. */
DM_API int dm_tok_encode(const dm_tok *t, const char *text, size_t n, bool special, dm_ids *out, dm_err *e);
DM_API int dm_tok_decode(const dm_tok *t, const int32_t *ids, size_t n, dm_buf *out);

/* ==== chat encoding ====================================================================== */

typedef enum dm_chat_mode { DM_CHAT, DM_THINKING } dm_chat_mode;
typedef enum dm_effort { DM_EFFORT_NONE, DM_EFFORT_LOW, DM_EFFORT_HIGH, DM_EFFORT_MAX } dm_effort;
typedef enum dm_revision { DM_REV_APRIL, DM_REV_0731 } dm_revision;

typedef struct dm_chat_opts {
    dm_chat_mode mode;
    bool drop_thinking; /* the encoder's default is true; tools anywhere turn it off */
    dm_effort effort;
    dm_revision revision;
    /* The messages follow an assistant turn that ended with EOS: no BOS, no effort prefix.  Tool results must then
     * come in the order of the calls, and drop_thinking be what it is for the whole talk (false: it has tools). */
    bool continues;
} dm_chat_opts;

/* Rendered text.  spans mark where the template wrote an added token; the same characters elsewhere are data. */
typedef struct dm_span { size_t at, len; } dm_span;
typedef struct dm_prompt {
    dm_buf text;
    dm_span *spans; /* owned */
    size_t nspans, spans_cap;
} dm_prompt;
DM_API void dm_prompt_free(dm_prompt *p);

/* messages: JSON array text as in the OpenAI shape (v4 spec 6.3).  DM_EFORMAT names the message at fault. */
DM_API int dm_chat_render(const char *messages_json, size_t n, const dm_chat_opts *o, dm_prompt *out, dm_err *e);
DM_API int dm_prompt_encode(const dm_tok *t, const dm_prompt *p, dm_ids *out, dm_err *e);
/* Python's json.dumps(json.loads(text), ensure_ascii=False), byte for byte; DM_EFORMAT if loads would fail. */
DM_API int dm_json_python(const char *text, size_t n, dm_buf *out, dm_err *e);

/* ==== parser of model output =============================================================== */

typedef struct dm_parser dm_parser;
typedef struct dm_parser_tool { const char *name, *parameters_json; } dm_parser_tool; /* borrowed during create */
typedef struct dm_parser_opts {
    bool thinking;             /* output starts inside <think> */
    bool markers_in_text;      /* feed() text spells the added tokens (tests, text-only engines) */
    const dm_parser_tool *tools;
    size_t ntools;             /* 0: nothing is ever a call */
    size_t call_bytes_max;     /* one call longer than this is an error; 0: 1 MiB */
} dm_parser_opts;

typedef enum dm_parse_kind {
    DM_PARSE_REASONING, /* p,n: more reasoning text; whole characters only */
    DM_PARSE_CONTENT,   /* p,n: more content text.  index -1: it stood in a call block that gave no call; else 0 */
    DM_PARSE_CALL,      /* call `index` begins; p,n: its name */
    DM_PARSE_ARGS,      /* p,n: more of the arguments' JSON text of call `index` */
    DM_PARSE_CALL_END,  /* p,n: the whole arguments JSON of call `index` */
    DM_PARSE_ERROR,     /* a malformed call; p,n: one sentence for the model.  index: the call, begun or not */
    DM_PARSE_REPAIR,    /* something was read in spite of its spelling; p,n: what.  index: -1 */
} dm_parse_kind;
/* index counts the calls that began, so a call that was refused on the way (ERROR, no CALL_END) leaves a gap;
 * dm_parser_call_name(i) and dm_parser_call_args(i) count whole calls only.
 * A block that gave no whole call comes out as content too, so that its text is not lost (unless it was cut).
 * p is valid during the callback; texts are whole characters, and the ARGS of a call joined are its CALL_END. */
typedef struct dm_parse_event { dm_parse_kind kind; int index; const char *p; size_t n; } dm_parse_event;
typedef void (*dm_parse_fn)(void *ctx, const dm_parse_event *ev);

DM_API int dm_parser_create(dm_parser **out, const dm_parser_opts *o, dm_parse_fn fn, void *ctx, dm_err *e);
DM_API void dm_parser_destroy(dm_parser *p);
/* One token's bytes; special: it is an added token (then the bytes are its text).  Only DM_ENOMEM fails. */
DM_API int dm_parser_feed(dm_parser *p, const char *bytes, size_t n, bool special);
/* No more: flushes what was held back.  cut: ended by a limit, so an open call is no call (T24). */
DM_API int dm_parser_finish(dm_parser *p, bool cut);
/* The turn is over: the call block is closed, or a call grew over call_bytes_max (then with an ERROR). */
DM_API bool dm_parser_block_closed(const dm_parser *p);
DM_API int dm_parser_calls(const dm_parser *p);         /* whole calls so far */
DM_API const char *dm_parser_call_name(const dm_parser *p, int i);
DM_API const char *dm_parser_call_args(const dm_parser *p, int i); /* JSON object text */
DM_API int dm_parser_errors(const dm_parser *p);
DM_API const char *dm_parser_error(const dm_parser *p, int i);

/* ---- call grammar: which tokens can continue to a valid call ------------------------------------------------------ */

/* A tokenizer's tokens in the order in which the grammar looks at them; made once, immutable, shared by any threads. */
typedef struct dm_vocab dm_vocab;
DM_API int dm_vocab_create(dm_vocab **out, const dm_tok *t, dm_err *e); /* borrows t */
DM_API void dm_vocab_destroy(dm_vocab *v); /* NULL is fine; no grammar may use it any more */

/* Follows one turn, token by token.  Outside of calls and inside string bodies everything may come, except the call
 * marker where no call can begin: in thinking, without tools, not behind a '<'.  From the marker of the opener on only
 * what leads to calls that the parser reads, of declared tools, with declared parameters of the types that their
 * schemas state and with all that are required (engine/grammar_int.h lists what is and is not enforced); behind the
 * block only the end token.  One thread at a time. */
typedef struct dm_grammar dm_grammar;
typedef struct dm_grammar_opts {
    bool thinking;                        /* output starts inside <think> */
    const dm_parser_tool *tools; size_t ntools; /* borrowed during create */
} dm_grammar_opts;
/* DM_EFORMAT: a tool's parameters are not a JSON object (as dm_parser_create). */
DM_API int dm_grammar_create(dm_grammar **out, const dm_vocab *v, const dm_grammar_opts *o, dm_err *e); /* borrows v */
DM_API void dm_grammar_destroy(dm_grammar *g);
DM_API void dm_grammar_reset(dm_grammar *g, bool thinking); /* a new turn with the same tools */
/* The token that was sampled.  DM_ENOMEM: nothing is masked from here on. */
DM_API int dm_grammar_accept(dm_grammar *g, int32_t id);
/* Sets the logits of tokens that may not come next to -inf; never all of them: when no token is left, the logits stay
 * as they are and so they do until the next reset. */
DM_API void dm_grammar_mask(dm_grammar *g, float *logits, int vocab);
DM_API bool dm_grammar_in_call(const dm_grammar *g); /* the last accepted token belongs to a call block */
DM_API const char *dm_grammar_gave_up(const dm_grammar *g); /* why nothing is masked any more, for a person; or NULL */

/* ---- stop strings -------------------------------------------------------------------------------------------------- */

#define DM_STOP_MAX 16         /* strings */
#define DM_STOP_BYTES_MAX 1024 /* of one */

/* Finds the first of some strings in a text that comes piece by piece, wherever the pieces are cut, and lets out what comes
 * before it.  Texts are whole characters (as a parser's are), and so is what is let out: the beginning of a string is
 * held back until it is known whether the rest follows.  The string that is complete first counts; of several that end at the
 * same place the longest.  Only content is to be shown to it (DM_PARSE_CONTENT with index 0): neither reasoning nor calls
 * are looked at, and no string reaches across one (dm_stop_border).
 *
 * What stays in the sequence: every token that was sampled, those of the string included, and also what the last of them says behind
 * it.  Only the text that is shown ends before the string.  A next turn follows as it does behind a reply without EOS.
 * One thread at a time. */
typedef struct dm_stop dm_stop;
/* DM_EINVAL names a string that is empty, too long or not UTF-8, or says that there are too many. */
DM_API int dm_stop_create(dm_stop **out, const char *const *texts, size_t n, dm_err *e);
DM_API void dm_stop_destroy(dm_stop *s); /* NULL is fine */
DM_API void dm_stop_reset(dm_stop *s);   /* a new turn */
/* Appends what may be shown.  1: a string was found, and nothing is let out any more until a reset; 0: not yet; DM_ENOMEM. */
DM_API int dm_stop_feed(dm_stop *s, const char *p, size_t n, dm_buf *out);
/* The text ends, or something else comes: appends what was held back.  0 or DM_ENOMEM. */
DM_API int dm_stop_border(dm_stop *s, dm_buf *out);
DM_API const char *dm_stop_found(const dm_stop *s); /* the string, or NULL */

/* ==== sampler ================================================================================ */

typedef struct dm_sample_params {
    double temperature; /* 0: greedy (first of the largest) */
    double top_p;       /* 1: off */
    double min_p;       /* 0: off */
    int top_k;          /* 0: off */
    uint64_t seed;
} dm_sample_params;
/* Plain data, so that a boundary can keep it: 8 bytes of state. */
typedef struct dm_sampler { dm_sample_params params; uint64_t rng; } dm_sampler;
DM_API void dm_sampler_init(dm_sampler *s, const dm_sample_params *p);
/* A token id.  DM_EFORMAT: a logit is not a number, or all are -inf.  Of +inf logits the first is taken.
 *
 * Order of the filters: temperature, top-k, top-p over what top-k left, min-p.  Equal logits are ordered by id.  rng goes
 * one step for each token that is sampled and none when greedy or when +inf decides, whatever the logits and filters: so the k-th
 * token of a turn is drawn from the same random number in every run with the seed, speculation or not.
 *
 * *scratch starts as NULL, is grown here and is the caller's to dm_free at the end; scratch itself may be NULL when
 * greedy. */
DM_API int dm_sampler_pick(dm_sampler *s, const float *logits, int vocab, void **scratch);
/* First logit that is not a number; -1: none. */
DM_API int dm_logits_nan(const float *logits, int vocab);

#define DM_LOGPROBS_MAX 20
typedef struct dm_logprob { int32_t id; float logprob; } dm_logprob;
/* Natural logarithms of probabilities under the softmax of the logits as the model gave them: no temperature, no filter, no mask.
 * So a token that the sampler took at temperature 0 has its own probability here, not 1, and a token that a mask forbade may
 * be among the top.  (This is how the chat APIs of the model's makers and others tell logprobs.)  Returns that of id; fills
 * top[n] (n <= DM_LOGPROBS_MAX) with the most probable tokens, equal ones by id.  -inf for a probability of 0.  Logits must have
 * no NaN; if some are +inf, these share the whole. */
DM_API float dm_logprobs(const float *logits, int vocab, int32_t id, dm_logprob *top, int n);

/* ==== forward ================================================================================ */

typedef enum dm_numerics { DM_NUM_FAST, DM_NUM_EXACT, DM_NUM_PLAIN } dm_numerics;

typedef struct dm_forward dm_forward;
typedef struct dm_fseq dm_fseq; /* a sequence of that forward */

typedef struct dm_run { /* consecutive rows of one sequence in a step */
    dm_fseq *seq;
    const int32_t *ids;
    int n;
    float *logits; /* [nlogits][vocab] of the last rows in order, or NULL */
    int nlogits;   /* 0: 1 */
    /* The last rows of the run that may be taken back (retreat); fewer than n, at most DM_DRAFT_MAX, and none when
     * the forward cannot draft (DM_ENOTSUP).  Their logits are those of rows that were certain from the start. */
    int tentative;
} dm_run;

#define DM_DRAFT_MAX 8 /* tokens drafted at once, at most */

typedef struct dm_draft {
    dm_fseq *seq;   /* a sequence at most once in a call */
    int32_t id;     /* the token that comes next, at seq_pos; not yet run */
    int want;       /* tokens to guess behind it, 0 … DM_DRAFT_MAX */
    int32_t *ids;   /* [want] out */
    int got;        /* out: how many there are; 0 when the sequence knows nothing to draft from */
} dm_draft;

typedef struct dm_forward_ops {
    void (*destroy)(dm_forward *f);
    int (*seq_create)(dm_forward *f, dm_fseq **out, dm_err *e);
    void (*seq_destroy)(dm_forward *f, dm_fseq *s);
    int64_t (*seq_pos)(const dm_fseq *s); /* tokens processed */
    /* All rows of all runs in one ragged batch; sum of n <= rows_max; a sequence at most once.  DM_EINVAL (a wrong id
     * too), DM_ECONTEXT, DM_ELIMIT (pool_bytes_max), DM_ENOMEM and DM_ESTATE are found before a row is touched: the
     * sequences are as before.  After any other error (a device) every sequence of the step is poisoned: DM_ESTATE
     * from then on, since its rows may be half written.  The CPU forward has no such error. */
    int (*step)(dm_forward *f, const dm_run *runs, int nruns, dm_err *e);
    /* Whole block i (i < pos/256), borrowed until the sequence is destroyed. */
    int (*block)(dm_forward *f, const dm_fseq *s, int64_t i, const void **bytes, dm_err *e);
    /* Fresh sequence: blocks 0..b-1 in order, then the state at P (P/256 == b).  The state is checked against
     * version (DM_EVERSION), length and shape (DM_EFORMAT), checksum (DM_ECORRUPT), numerics and geometry (DM_EFOREIGN),
     * the context (DM_ECONTEXT) and the blocks loaded so far (DM_ESTATE); a refused one leaves the sequence fresh.
     * Between the first block_load and state_load the sequence can do nothing else (DM_ESTATE). */
    int (*block_load)(dm_forward *f, dm_fseq *s, int64_t i, const void *bytes, dm_err *e);
    int (*state_save)(dm_forward *f, const dm_fseq *s, dm_buf *out, dm_err *e);
    int (*state_load)(dm_forward *f, dm_fseq *s, const void *bytes, size_t n, dm_err *e);
    /* Logits of the last processed row (saved with a state, so that a restored prompt can be sampled at once);
     * NULL when none are kept. Borrowed until the next step on s. */
    const float *(*seq_logits)(const dm_fseq *s);

    /* Speculation (engine/forward_draft.c says how it is done); both NULL where draft_max is 0.
     *
     * draft guesses the tokens behind the next one.  A guess is free to be wrong and depends on what was drafted before, so
     * nothing but speed may depend on it.  Once between two steps of a sequence; a second time, behind a restore or
     * when the room of a step is used up, got is 0.  DM_EINVAL: a wrong id. */
    int (*draft)(dm_forward *f, dm_draft *d, int n, dm_err *e);
    /* Takes tentative rows of the sequence's last step back: it is then at pos as if they had never been run, and its
     * blocks, states and all later logits are those of a sequence that never ran them, byte for byte.  logits ([vocab] of
     * row pos-1, copied; NULL: none) are what seq_logits gives from here on.  To be called, with the position as it is, also
     * when all rows stay.  DM_EINVAL: pos is not among the tentative rows. */
    int (*retreat)(dm_forward *f, dm_fseq *s, int64_t pos, const float *logits, dm_err *e);
} dm_forward_ops;

/* First member of every implementation. */
struct dm_forward {
    const dm_forward_ops *ops;
    int vocab;
    int rows_max;           /* rows in one step */
    size_t block_bytes;
    int64_t ctx_tokens_max;
    char numerics_id[48];   /* "fast/avx512", "exact", …: equal ids give equal bytes */
    int draft_max;          /* tokens that draft gives at most; 0: it cannot */
};

/* For finding out what a difference comes from; never needed otherwise.  numerics_id names those that are on, so nothing
 * that is stored under one is used under another. */
typedef enum dm_switch {
    DM_SWITCH_SHARED_UNCLAMPED = 1, /* the first revision of the authors' code: no SwiGLU clamp in the shared expert (v4 spec 0a) */
    DM_SWITCH_KV_BF16 = 2,          /* … and cache rows rounded to bf16 only, not to FP8 (v4 spec 0b) */
    DM_SWITCH_INDEX_F32 = 4,        /* index keys, queries and scores in float, without Hadamard and FP4 (v4 spec 3.5) */
} dm_switch;
/* "shared-unclamped,kv-bf16,index-f32", any of them, or ""; DM_EUSAGE names an unknown one. */
DM_API int dm_switch_parse(const char *text, unsigned *out, dm_err *e);

typedef struct dm_forward_opts {
    dm_numerics numerics;
    int threads;            /* 0: one per core */
    const char *isa;        /* NULL: the best of this processor; "scalar", "avx2", "avx512", "amx" */
    int rows_max;           /* 0: 256 */
    int64_t ctx_tokens_max; /* 0: the model's, or what fits */
    int64_t pool_bytes_max; /* block memory of all sequences; 0: no bound */
    unsigned switches;      /* dm_switch bits */
    /* The MTP layer drafts, if there is one: its weights and what sequences keep for it count in the account below.
     * No byte of logits, blocks or states depends on this. */
    bool draft;
    /* What would not fit in so much memory is refused (dm_plan_check); 0: dm_memory_limit(); <0: nothing is asked.
     * A context that nobody asked for is cut to what fits, with a warning. */
    int64_t mem_bytes_max;
} dm_forward_opts;

/* A forward over a model on the CPU.  Sequences of one forward may be created, loaded, saved and destroyed
 * from any thread while another thread is in step, as long as no sequence is used by two at once. */
DM_API int dm_forward_create(dm_forward **out, const dm_model *m, const dm_forward_opts *o, dm_err *e);
static inline void dm_forward_destroy(dm_forward *f) { if (f) f->ops->destroy(f); }
/* Instruction sets that this build has and this processor can run, best first; NULL-terminated. */
DM_API const char *const *dm_forward_isas(void);

/* ---- the account before loading ------------------------------------------------------------------- */

/* What a forward over a model takes while it runs with one awake sequence, from the configuration alone.
 *
 * Weights are mapped read-only from their files; the system may throw their pages out and read them again, so they are
 * no demand on memory in its books.  In ours they are: one token reaches every layer, a few hundred reach every expert,
 * and a step that waits for the disk takes seconds.  So what counts as resident is every tensor that a step can reach
 * (experts, attention, router, head …) in full; of the embedding the rows of as many different tokens as the context
 * holds; of the MTP layer nothing unless it drafts.  Sizes of workspaces, blocks and sequences come from the functions
 * that allocate them. */
typedef struct dm_plan_opts {
    dm_forward_opts forward; /* as it would be created; its mem_bytes_max does not matter here */
    int64_t mem_bytes;       /* what may be used; 0: not asked */
    int64_t other_bytes;     /* what the caller needs beside the forward */
} dm_plan_opts;
typedef struct dm_plan {
    /* weights as stored in the checkpoint, by what they are for; they add up to weight_bytes */
    int64_t weight_bytes, weight_tensors;
    int64_t weight_bytes_expert, weight_bytes_shared;  /* routed and shared experts */
    int64_t weight_bytes_attn, weight_bytes_index;     /* attention; compressors and indexers */
    int64_t weight_bytes_router;                       /* routers, hyper-connections, norms */
    int64_t weight_bytes_embed, weight_bytes_head, weight_bytes_mtp;
    /* cache */
    int64_t block_bytes;                       /* of 256 tokens, as this path keeps it */
    double kv_bytes_per_token;
    int64_t kv_bytes_at_max;                   /* at max_position_embeddings */
    int64_t kv_bytes_bf16_at_max;              /* the published way of counting: bf16, window included (v4 spec 7.4) */
    int64_t state_bytes_max;                   /* largest boundary state, without logits */
    int64_t window_bytes;                      /* window rows of an awake sequence */
    /* in memory while it runs */
    int64_t ctx_tokens;                        /* the context that this is the account of */
    int rows, threads;                         /* of a step */
    int64_t weight_bytes_resident;
    int64_t table_bytes;                       /* names, shapes and pointers of the tensors */
    int64_t scratch_bytes;                     /* arrays of one step */
    int64_t worker_bytes;                      /* workspaces of the threads */
    int64_t sequence_bytes;                    /* an awake sequence beside its blocks: window, folds, logits */
    int64_t kv_bytes;                          /* its blocks at ctx_tokens, or pool_bytes_max */
    int64_t other_bytes;
    int64_t need_bytes;                        /* all of these */
    int64_t mem_bytes;                         /* as asked */
    int64_t ctx_tokens_fit;                    /* largest context, in whole blocks, whose need fits in mem_bytes; -1: not asked */
} dm_plan;
/* o NULL: defaults.  When no context is asked for and the model's does not fit, the account is that of the one that does,
 * down to 4096 tokens.  Errors are those of dm_forward_create for the same options. */
DM_API int dm_model_plan(const dm_config *c, const dm_plan_opts *o, dm_plan *out, dm_err *e);
/* DM_ELIMIT with a sentence that names the parts and the ways out when the need is above mem_bytes. */
DM_API int dm_plan_check(const dm_plan *p, dm_err *e);

/* What this process may use: the machine's memory, or the bound of a control group when that is less. */
DM_API int64_t dm_memory_limit(void);
/* What it uses now (private memory; mapped files as far as they are in memory) and used at most, both together. */
typedef struct dm_memory_use { int64_t anon_bytes, file_bytes, peak_bytes; } dm_memory_use;
DM_API void dm_memory_use_get(dm_memory_use *out); /* zeros where the system does not tell */

/* ---- conformance --------------------------------------------------------------------------------- */

typedef struct dm_verify_opts {
    dm_numerics numerics;
    int threads;
    const char *isa;
    int chunk;              /* rows per step; 0: whole */
    unsigned switches;      /* dm_switch bits: does the file come from a program that worked so? */
} dm_verify_opts;
typedef struct dm_verify_report {
    char kind[16];          /* "hash", "golden", "plain", "tokenizer", "chat", "checkpoint" */
    int64_t compared, differ;
    char first[256];        /* names tensor, layer, position (or line) of the first difference */
    char summary[512];      /* one line for a person, with the figures */
} dm_verify_report;
/* Compares a model directory with one file of vectors; DM_EMISMATCH when anything differs. */
DM_API int dm_model_verify(const char *dir, const char *file, const dm_verify_opts *o, dm_verify_report *out, dm_progress fn, void *ctx, dm_err *e);

/* How often the MTP layer's greedy draft is what the trunk would choose, over the first 512 of ids at most; *rows drafts
 * were made.  DM_ENOTSUP without an MTP layer. */
DM_API int dm_model_mtp_agreement(const dm_model *m, const dm_forward_opts *o, const int32_t *ids, int64_t n, int64_t *rows, int64_t *agree, dm_err *e);

/* One greedy reply of max_new tokens without drafts and one with `depth` drafts before each step, both forwards made from o:
 * DM_EMISMATCH when a token or the state behind the reply differs.  DM_ENOTSUP without an MTP layer. */
typedef struct dm_speculation { int64_t tokens, drafted, accepted; } dm_speculation;
DM_API int dm_model_speculation(const dm_model *m, const dm_forward_opts *o, const int32_t *ids, int64_t n, int64_t max_new, int depth, dm_speculation *out, dm_err *e);

/* ==== engine =================================================================================== */

/* Where blocks and states go.  Called on the engine thread; must copy and return at once (never block).
 * ids: the block's 256 ids / the pos%256 ids behind the last whole block. */
typedef struct dm_sink {
    void *ctx;
    void (*block)(void *ctx, int64_t index, const int32_t *ids, const void *bytes, size_t n);
    void (*state)(void *ctx, int64_t pos, const int32_t *tail, const void *bytes, size_t n);
} dm_sink;

typedef struct dm_engine dm_engine;
typedef struct dm_seq dm_seq; /* sequence + its ids; owned by the caller, used by the engine while a job runs */

typedef struct dm_engine_opts {
    int chunk_tokens;           /* prefill rows per step; 0: forward's rows_max */
    int64_t state_interval;     /* a state inside a long prefill every so many tokens; 0: 4096 */
    int jobs_max;               /* bounded queue; 0: 64; full: DM_EBUSY */
    /* Tokens drafted before each decode step: 0 none, 1 … DM_DRAFT_MAX, or DM_SPECULATE_AUTO: as many as measurably bring
     * more tokens in a second, often none.  Nothing is drafted when the forward cannot (draft_max).
     *
     * Speculation changes no output.  Drafted tokens are run behind the sampled one in the same step; each of their rows is then
     * sampled as if it were a step of its own, by the same sampler from the same logits (row invariance) and with the same random
     * number, behind the same mask; it goes on while what was sampled is what had been drafted, and the rest is taken back.  So
     * tokens, events and their order, blocks, states and the sampler's state are those of a run without it, byte for
     * byte, greedy or not, whatever was drafted. */
    int speculate;
} dm_engine_opts;
#define DM_SPECULATE_AUTO (-1)

DM_API int dm_engine_create(dm_engine **out, dm_forward *f, const dm_engine_opts *o, dm_err *e); /* borrows f */
DM_API void dm_engine_destroy(dm_engine *g); /* cancels jobs (each reports its end), joins the thread */

DM_API int dm_seq_create(dm_engine *g, dm_seq **out, dm_err *e);
DM_API void dm_seq_destroy(dm_engine *g, dm_seq *s); /* no job may be running on it; NULL is fine */
DM_API int64_t dm_seq_pos(const dm_seq *s);
DM_API const int32_t *dm_seq_ids(const dm_seq *s); /* [pos] */
/* Restore into a fresh sequence: blocks in order with their ids, then the state with the tail's ids. */
DM_API int dm_seq_block_load(dm_engine *g, dm_seq *s, int64_t i, const int32_t *ids, const void *bytes, dm_err *e);
DM_API int dm_seq_state_load(dm_engine *g, dm_seq *s, int64_t pos, const int32_t *tail, const void *bytes, size_t n, dm_err *e);

typedef enum dm_gen_end {
    DM_END_STOP,    /* a stop id or the hook ended it */
    DM_END_LENGTH,  /* max_new tokens */
    DM_END_CONTEXT, /* the context is full */
    DM_END_CANCEL,
    DM_END_ERROR,
} dm_gen_end;

typedef enum dm_gen_event_kind { DM_GEN_PROGRESS, DM_GEN_TOKEN, DM_GEN_END } dm_gen_event_kind;
typedef struct dm_gen_event {
    dm_gen_event_kind kind;
    int64_t done, total;    /* PROGRESS: prefilled tokens of this job */
    int32_t id;             /* TOKEN: just sampled */
    float logprob;          /* TOKEN, if asked for: of id (dm_logprobs) … */
    const dm_logprob *top;  /* … and of the most probable ones; valid during the call */
    int ntop;
    dm_gen_end end;         /* END */
    int64_t prefilled, decoded;
    int64_t drafted, accepted; /* END: tokens that were guessed, and those of them that were then sampled */
    uint64_t prefill_ns, decode_ns;
    dm_sampler sampler;     /* END: state to go on with */
    dm_err err;             /* END with DM_END_ERROR */
} dm_gen_event;

/* One job: feed `ids`, then sample until something ends it.  The stop token itself is run through the model
 * before END, so that at END the sequence holds every token of the turn and the next turn costs only its own. */
typedef struct dm_gen {
    const int32_t *ids; size_t n;     /* new tokens, copied; may be 0 if the sequence has logits */
    int64_t max_new;                  /* 0: prefill only */
    const int32_t *stop; size_t nstop; /* copied; usually EOS */
    dm_sampler sampler;
    bool logprobs; int top_logprobs;  /* TOKEN tells the token's and so many others' logprob (0 … DM_LOGPROBS_MAX) */
    dm_sink sink;                     /* states are handed over at the end of the input, at intervals, and at the end */
    /* All three are called on the engine thread with `ctx`; short, never blocking. */
    void *ctx;
    void (*event)(void *ctx, const dm_gen_event *ev);
    bool (*hook)(void *ctx, int32_t id);               /* after each sampled token; true: stop here.  May be NULL */
    void (*mask)(void *ctx, float *logits, int vocab); /* before sampling; may be NULL */
} dm_gen;

/* DM_EBUSY: queue full or the sequence has a job; DM_ECONTEXT: n does not fit; DM_EINVAL: an id or a number out of range. */
DM_API int dm_engine_submit(dm_engine *g, dm_seq *s, const dm_gen *gen, dm_err *e);
/* Ends the job within one step; its END says DM_END_CANCEL and the finished chunks stay. */
DM_API void dm_engine_cancel(dm_engine *g, dm_seq *s);

/* rows_decode counts drafted rows too. */
typedef struct dm_engine_stat { int64_t steps, rows_prefill, rows_decode, jobs, drafted, accepted; } dm_engine_stat;
DM_API void dm_engine_stat_get(dm_engine *g, dm_engine_stat *out);

#ifdef __cplusplus
}
#endif
#endif
