/* forward_int.h — the CPU forward pass: its structs and the calls between its files.
 *
 *   forward.c        creation, the step
 *   forward_size.c   sizes of everything, from configuration and options
 *   forward_phase.c  a phase: groups of equal tasks, run on the workers
 *   forward_attn.c   attention sublayer: projections, compressors, indexer, attention, output
 *   forward_ffn.c    router, experts, shared expert
 *   forward_head.c   hyper-connection sites and the output head
 *   forward_mtp.c    the MTP layer over rows
 *   forward_draft.c  the MTP layer drafts; rows that are taken back
 *   forward_trace.c  trace and teacher forcing
 *   seq.c            sequences and their blocks        seq_state.c  states
 *
 * A step works on rows: (sequence, position, token id), all rows of all runs through one layer after the other.
 * Numbers live in kernels; this code moves pointers and shapes.  Names of dimensions as in model_int.h, and
 *   R rows of this step      rows_max the most of them      k experts per token      W window (128) */
#ifndef DM_ENGINE_FORWARD_INT_H
#define DM_ENGINE_FORWARD_INT_H

#include <pthread.h>

#include "engine/engine.h"
#include "engine/model_int.h"
#include "engine/pool_int.h"
#include "engine/trace_int.h"
#include "engine/workers_int.h"
#include "kernels/kernels.h"

#define FWD_WINDOW 128        /* the query at t reads t−127 … t */
#define FWD_HELD (1 + DM_DRAFT_MAX) /* rows whose streams a sequence keeps for the MTP layer */
#define FWD_PAIRS (KERN_ROPE_DIM / 2)
#define FWD_HEADS_TASK 16     /* heads of one attention task */
#define FWD_WIDEN_ROWS 16     /* runs at least this long get their keys widened once for all rows … */
#define FWD_WIDEN_RUNS 8       /* … if no more than so many runs of a step are that long; further ones do without */
#define FWD_WIDEN_ENTRIES 4096 /* … compressed ones as long as all runs of a step together have no more than this */
#define FWD_LOGIT_ROWS 32     /* head rows computed at once */

typedef struct fwd fwd;

/* Where a layer keeps its things; offsets in bytes. */
typedef struct fwd_layer {
    const model_block *w;
    int number;          /* num_hidden_layers: the MTP layer */
    int ratio;           /* 0, 4, 128 */
    int per_block;       /* entries in a block: 256 / ratio; 0 without compressor */
    size_t entry_off;    /* in a block: per_block rows */
    size_t key_off;      /* in a block: per_block index keys (ratio 4) */
    size_t fold_off;     /* in the fold memory: own, next (ratio 4), then the indexer's own, next */
    const float (*cos)[FWD_PAIRS], (*sin)[FWD_PAIRS]; /* [rows_max] angles of this step's rows in its table */
    int table;           /* 0: base, 1: compressed */
} fwd_layer;

struct dm_fseq {
    fwd *f;
    int64_t pos;          /* tokens processed */
    int64_t loaded;       /* blocks loaded while the state is missing; 0 afterwards */
    bool in_step;         /* mark of the step that is being checked */
    uint8_t *window;      /* [L][ring][row_bytes], slot = position mod ring */
    uint8_t *fold;        /* fold_bytes: accumulators of all compressors */
    uint8_t **block;      /* [blocks], each from the pool */
    int64_t blocks, blocks_cap; /* got, perhaps ahead of pos; table size */
    float *logits;        /* [V] of the last row, or NULL until asked for once */
    bool has_logits;
    uint8_t *mtp_window;  /* [ring][row_bytes], NULL until forward_mtp or, where the forward drafts, always there */
    int64_t mtp_from;     /* the MTP window has rows [mtp_from, mtp_pos); those before are not known and not attended to */
    int64_t mtp_pos;
    bool mtp_off;         /* restored: forward_mtp has no rows to go on from */
    /* Only where the forward drafts (forward_draft.c). */
    float *held;          /* [FWD_HELD][4·D] streams of the last held_n positions, whose next ids were not certain */
    int32_t held_id[FWD_HELD]; /* the ids at these positions */
    int held_n;
    int64_t firm;         /* retreat goes back to here at most */
    uint8_t *snap;        /* [snaps][fold_bytes]: accumulators before tentative row i */
    int snaps;
};

typedef struct fwd_row {
    dm_fseq *seq;
    int64_t pos;
    int32_t id;
    int run;              /* index into fwd.runs */
} fwd_row;

typedef struct fwd_run {
    dm_fseq *seq;
    int row0, n;          /* rows [row0, row0 + n) */
    int64_t pos0;         /* position of row0 */
    float *logits;        /* [nlogits][V] of the last rows, or NULL */
    int nlogits, tentative;
    int64_t wide_pos0;    /* first position of the widened window keys; wide_at < 0: not widened */
    int64_t wide_at;      /* row in fwd.wide */
    int64_t entries_at;   /* row in fwd.wide of entry 0 of this layer; < 0: not widened */
} fwd_run;

/* ---- phases -------------------------------------------------------------------------------------- */

typedef void (*fwd_fn)(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch);
typedef struct fwd_group {
    fwd_fn fn;
    const void *arg;
    int64_t items, grain;  /* task i of the group: items [i·grain, min((i+1)·grain, items)) */
    int64_t task0;         /* number of its first task in the phase */
} fwd_group;

/* A finished entry of this layer in this step. */
typedef struct fwd_entry {
    dm_fseq *seq;
    int64_t j;
    const void *pooled;    /* real [dim] */
    bool index;            /* the indexer's */
} fwd_entry;
/* One compressor of one run: what the fold needs. */
typedef struct fwd_fold {
    const fwd_run *run;
    const fwd_layer *layer;
    bool index;
    void *pooled;          /* real [entries finished by this run][dim] */
} fwd_fold;
typedef struct fwd_widen { const fwd_run *run; const fwd_layer *layer; } fwd_widen; /* keys of a run in a layer */
typedef struct fwd_scores { const fwd_layer *layer; int row; float *score; } fwd_scores; /* [visible entries] */

struct fwd {
    dm_forward base;       /* first member: what callers hold */
    const dm_model *model; /* borrowed */
    const dm_config *c;
    const model_weights *w;
    const dm_kernels *k;
    dm_numerics numerics;
    int threads;           /* of a step, the caller's included */
    bool round;            /* reference rounding: fast and exact */
    bool row_fp8;          /* cache rows are the 584-byte kind; else 512 floats */
    bool key_fp4;          /* index keys are the 68-byte kind, queries likewise; else 128 floats */
    bool shared_clamp;     /* the shared expert is clamped like the others */
    kern_out kind;         /* rounding of a linear's output */
    size_t row_bytes, key_bytes;
    size_t fold_bytes, window_bytes; /* per sequence */
    int ring;              /* slots of a window ring: the window, and as many as rows may be taken back */
    bool draft;            /* the MTP layer drafts */
    int layers;            /* L; layer[L] is the MTP layer if there is one */
    fwd_layer *layer;
    float freq[2][FWD_PAIRS];
    int topk_max;          /* most selected entries of a row */
    int keys_max;          /* most keys of a row */
    int in_max;            /* largest input of a linear */
    float index_c;         /* (128·Hi)^−1/2 */
    size_t key_list_bytes, seg_bytes; /* pointer lists at the start of a worker's scratch */
    workers *workers;
    pool *pool;
    pthread_mutex_t step_lock; /* one step at a time */
    forward_trace trace;
    bool tracing;

    /* The step; all arrays hold rows_max rows unless noted. */
    int rows, nruns;
    fwd_row *row;
    fwd_run *runs;
    void *arena;           /* owned; everything below points into it */
    float (*cos[2])[FWD_PAIRS], (*sin[2])[FWD_PAIRS];
    float *h;              /* [4][D] streams */
    void *mix, *split;     /* real [24] */
    float *split_f32;      /* [24], for a trace */
    float *x, *xq;         /* [D]; xq quantised (= x without rounding) */
    float *qr, *qrq;       /* [rq] */
    float *q;              /* [H][512]; attention puts its result in the same place */
    float *kv;             /* [512] */
    uint8_t *kv_row;       /* row_bytes */
    float *ck, *cs;        /* [2·512] compressor rows */
    float *ik, *is;        /* [2·128] */
    float *iq, *iw;        /* [Hi][128], [Hi] */
    void *pooled, *pooled_index; /* real [512], [128]: a row finishes at most one entry */
    int32_t *sel, *nsel;   /* [topk_max], one */
    float *score;          /* score_cap floats */
    int64_t score_cap;
    float *z, *y;          /* [G·ro], [D] */
    float *wide;           /* widened keys: wide_cap rows of 512 for windows, then entries_cap for entries */
    int64_t wide_cap, entries_cap;
    void *router;          /* real [E] */
    int32_t *route_id;     /* [k] ascending */
    void *route_w;         /* real [k] */
    float *route_w_f32, *route_margin;
    int32_t *slot;         /* [k] row of the expert buffers */
    int32_t *expert_row, *expert_at; /* [rows_max·k] rows by expert; [E+1] where an expert begins */
    int32_t *slot_route;   /* [rows_max·k] row·k + i of a slot */
    float *eg, *eu, *ey;   /* [rows_max·(k+1)] x [I], [I], [D]; the shared expert's rows come last */
    float *head_h, *head_x, *logits; /* FWD_LOGIT_ROWS rows: [4][D], [D], [V] */
    float *sel_margin;     /* one, for a trace */
    float *mtp_g, *mtp_e;  /* [4][D], [D]: the MTP layer's inputs; only where it drafts */

    fwd_group *group;      /* the phase being built */
    int groups, groups_cap;
    double cost;
    kern_linear *linear;   /* arguments of the phase's linears */
    int linears;
    fwd_fold *fold;        /* [2·rows_max] */
    int folds;
    fwd_entry *entry;      /* [2·rows_max] */
    int entries;
    fwd_widen *widen;      /* [rows_max], by run */
    fwd_scores *scores;
};

static inline fwd *fwd_of(dm_forward *f) { return (fwd *)f; }
static inline void *real_at(const fwd *f, const void *base, int64_t i) { return (char *)base + i * f->k->real_bytes; }

/* Items are independent; cost is in multiply-adds for all of them.  grain 0: chosen for the number of workers. */
void phase_add(fwd *f, fwd_fn fn, const void *arg, int64_t items, int64_t grain, double cost);
/* y = W x over all outputs [begin, end); the struct is copied, `work` is filled in. */
void phase_linear(fwd *f, const kern_linear *p);
void phase_run(fwd *f); /* runs what was added and empties the list */

kern_mat fwd_mat(const model_mat *m);
/* The input that a matrix takes: quantised activations, but as they are when it is bf16 or nothing is rounded. */
static inline const float *fwd_input(const fwd *f, const model_mat *m, const float *x, const float *quantised) {
    return f->round && !m->bf16 ? quantised : x;
}
kern_mat fwd_bf16(const uint16_t *w, int out, int in);
kern_mat fwd_f32(const float *w, int out, int in);

/* ---- sublayers: rows of f->row, streams in f->h ------------------------------------------------------ */

void fwd_hc_pre(fwd *f, const fwd_layer *l, bool attn); /* → f->x (normed, maybe forced), f->xq, f->split */
void fwd_attn(fwd *f, const fwd_layer *l);              /* f->x → f->y */
void fwd_ffn(fwd *f, const fwd_layer *l);               /* f->x → f->y */
void fwd_hc_post_rows(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch);
void fwd_block(fwd *f, const fwd_layer *l);             /* a whole layer */
/* Rows of f->row to final norm and logits: n rows whose numbers are in `rows` (ascending), at most FWD_LOGIT_ROWS;
 * leaves f->head_x and f->logits. */
void fwd_head(fwd *f, const model_hc *hc, const uint16_t *norm, const int32_t *rows, int n);
void fwd_angles(fwd *f); /* cos and sin of all rows */
void fwd_window_rows(fwd *f, const fwd_layer *l); /* f->x → f->kv_row and the window rings, and nothing else */
/* The MTP layer's input: streams of all rows (each that of a token; overwritten) and the ids of f->row → f->h. */
void fwd_mtp_mix(fwd *f, const float *streams, float *g, float *e);

/* ---- drafting: forward_draft.c ------------------------------------------------------------------------ */

void draft_before_step(fwd *f, const dm_run *runs, int nruns); /* held rows whose next id is now known */
void draft_after_step(fwd *f, const dm_run *runs, int nruns);  /* f->h: streams of the step's rows; positions still old */
int forward_draft(dm_forward *f, dm_draft *d, int n, dm_err *e);
int forward_retreat(dm_forward *f, dm_fseq *s, int64_t pos, const float *logits, dm_err *e);

/* ---- sizes: forward_size.c ----------------------------------------------------------------------------- */

/* From f->c and the options: kernels, numerics id, limits, f->layer (owned; its weights are still unset) and all sizes. */
int fwd_shape(fwd *f, const dm_forward_opts *o, dm_err *e);
/* Points the arrays of a step into the arena and returns its bytes; NULL: only counts (the pointers are then no use). */
size_t fwd_lay_out(fwd *f, void *arena);
size_t fwd_scratch_bytes(fwd *f); /* of one worker */

/* Bytes of a sequence beside window and folds: what it keeps to draft from. */
size_t fwd_draft_bytes(const fwd *f);

uint8_t *seq_window_row(const dm_fseq *s, const fwd_layer *l, int64_t pos);
uint8_t *seq_entry(const dm_fseq *s, const fwd_layer *l, int64_t j);
uint8_t *seq_key(const dm_fseq *s, const fwd_layer *l, int64_t j);
uint8_t *seq_fold(const dm_fseq *s, const fwd_layer *l, bool index, bool next);
static inline uint8_t *seq_snap(const dm_fseq *s, int i) { return s->snap + (size_t)i * s->f->fold_bytes; }
size_t fold_acc_bytes(const fwd *f, int dim);

/* ---- sequences ---------------------------------------------------------------------------------------- */

int seq_create(dm_forward *f, dm_fseq **out, dm_err *e);
void seq_destroy(dm_forward *f, dm_fseq *s);
int seq_reserve(dm_fseq *s, int64_t pos_end, bool logits, dm_err *e); /* blocks (and logits) for positions below pos_end */
void seq_trim(dm_fseq *s); /* blocks that the position does not need go back to the pool */
int seq_reserve_snaps(dm_fseq *s, int n, dm_err *e); /* for so many tentative rows */
void seq_reset(dm_fseq *s); /* empty folds */
int seq_block(dm_forward *f, const dm_fseq *s, int64_t i, const void **bytes, dm_err *e);
int seq_block_load(dm_forward *f, dm_fseq *s, int64_t i, const void *bytes, dm_err *e);
int seq_state_save(dm_forward *f, const dm_fseq *s, dm_buf *out, dm_err *e);
int seq_state_load(dm_forward *f, dm_fseq *s, const void *bytes, size_t n, dm_err *e);

/* ---- trace -------------------------------------------------------------------------------------------- */

/* All rows of the step; no-ops without a trace. */
void trace_f32(const fwd *f, forward_tag tag, int layer, const float *base, int64_t stride, int64_t count);
void trace_i32(const fwd *f, forward_tag tag, int layer, const int32_t *base, int64_t stride, int64_t count);
void trace_bytes(const fwd *f, forward_tag tag, int layer, const uint8_t *base, int64_t stride, int64_t bytes);
void trace_one(const fwd *f, forward_tag tag, int layer, int64_t pos, const void *data, size_t bytes);
bool trace_forces(const fwd *f);
void trace_force(const fwd *f, forward_tag tag, int layer, float *base, int64_t stride);

#endif
