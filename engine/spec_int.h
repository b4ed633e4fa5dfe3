/* spec_int.h — how many tokens to draft before a decode step: the number that was asked for, or the one that pays.
 *
 * What pays depends on the model, the text, the machine and on how many sequences decode together, since every row of a step reads
 * experts of its own.  None of that is guessed: time and tokens of steps are counted, for each number of jobs apart, and the depth
 * in use is compared with its neighbours by nanoseconds for a token:
 *
 *   HOLD   `wait` steps at the depth in use, at least TRIAL of them, so that its rate is known; then a neighbour, deeper or shallower
 *          in turn, is tried
 *   TRIAL  TRIAL steps at the neighbour.  Better by MARGIN: it is the depth in use, and the next trial comes soon.  Else the
 *          wait for the next one doubles, up to WAIT_MAX
 *
 * It begins with no drafts, so a model whose drafts do not pay loses TRIAL steps of every WAIT_MAX to trying.  Only steps without
 * prefill rows count.  Nothing but speed depends on what comes out.  The engine thread's. */
#ifndef DM_ENGINE_SPEC_INT_H
#define DM_ENGINE_SPEC_INT_H

#include "engine/engine.h"

#define SPEC_AUTO_MAX 4 /* deepest trial: each deeper draft is right less often */
#define SPEC_LOADS 8    /* numbers of jobs told apart; more count as this many */
#define SPEC_TRIAL 16
#define SPEC_WAIT_MAX 4096

typedef struct spec_count { int64_t steps, tokens; uint64_t ns; } spec_count;
typedef struct spec_load {
    int depth;          /* in use */
    int trial;          /* being tried; equal to depth: none */
    bool shallower;     /* the next trial is that of depth - 1 */
    int64_t wait, held; /* steps of this hold; those that are over */
    spec_count in_use, tried; /* in_use is aged, so that it is that of lately */
} spec_load;
typedef struct spec {
    int fixed; /* 0 … DM_DRAFT_MAX; DM_SPECULATE_AUTO */
    int max;   /* of depths that can be */
    spec_load load[SPEC_LOADS];
} spec;

/* speculate as in dm_engine_opts; draft_max: the forward's. */
void spec_init(spec *s, int speculate, int draft_max);
int spec_deepest(const spec *s); /* that spec_depth ever gives */
/* Depth for a step in which so many jobs decode (at least one). */
int spec_depth(const spec *s, int jobs);
/* A step at the depth that was asked for is over: tokens sampled by all its jobs, and the time with drafting. */
void spec_note(spec *s, int jobs, int64_t tokens, uint64_t ns);

#endif
