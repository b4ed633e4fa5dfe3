/* scripted.h — a forward that plays scripts instead of computing a model.
 *
 * What it "generates" is a function of the token ids alone: the k-th reply (counted by the assistant markers in the
 * history) is script k, then EOS.  Its blocks and states carry the ids and hashes over them, so a restore that mixes
 * up anything is refused by block_load or state_load, or plays the wrong script.  It counts what it is asked to do. */
#ifndef DM_TEST_SCRIPTED_H
#define DM_TEST_SCRIPTED_H

#include "engine/engine.h"

typedef struct scripted_opts {
    int vocab;
    int rows_max;            /* 0: 64 */
    int64_t ctx_tokens_max;  /* 0: 65536 */
    size_t block_bytes;      /* 0: 4096; at least 1,200 */
    int32_t assistant, eos;  /* ids; a reply begins two tokens behind the marker (marker, think mark, reply) */
    const char *numerics_id; /* NULL: "scripted" */
} scripted_opts;

typedef struct scripted_counts {
    int64_t steps, rows;        /* all rows of all steps */
    int64_t block_loads, state_loads, refused;
} scripted_counts;

dm_forward *scripted_create(const scripted_opts *o);
/* Adds the next reply (copied). */
void scripted_reply(dm_forward *f, const int32_t *ids, size_t n);
/* The replies from `at` on are forgotten. */
void scripted_cut(dm_forward *f, size_t at);
/* Which script a history plays: k = number of assistant markers - 1 unless this says otherwise. */
void scripted_pick(dm_forward *f, size_t (*pick)(void *ctx, const int32_t *ids, int64_t n, size_t k), void *ctx);
void scripted_sleep_us(dm_forward *f, int us_per_row);
void scripted_refuse_states(dm_forward *f, int n);         /* the next n state_loads are refused */
void scripted_fail_restored(dm_forward *f, int n);         /* the next n first steps behind a state_load fail */
scripted_counts scripted_count(dm_forward *f);

#endif
