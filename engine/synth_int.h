/* synth_int.h — the numbers of synthetic checkpoints, apart from the files that hold them.
 *
 * A tensor NAME under a SEED has the key k = first 8 bytes (little-endian) of SHA-256("SEED:NAME"); its n-th number,
 * n from 1, is splitmix64's output for state k + n·golden.  So any element can be made without those before it,
 * and pieces of a tensor can be made by different threads.  All arithmetic is in float, one rounding per operation. */
#ifndef DM_SYNTH_INT_H
#define DM_SYNTH_INT_H

#include "engine/model_tensors_int.h"

#define SYNTH_GOLDEN 0x9E3779B97F4A7C15ull

/* value = mul·(add + coef·r), r the element's normal number; matrix: then its block factor and codes */
typedef struct synth_rule {
    float coef, add, mul;
    bool mix_base; /* hc base of length 24: its 4×4 part gets one more addition */
    bool top_k;    /* tid2eid */
} synth_rule;

/* Everything needed to make any part of one tensor (a quantised weight brings its scale along). */
typedef struct synth_tensor {
    synth_rule rule;
    model_dtype dtype;
    bool fp4, quantised;
    int64_t out, in;          /* rows and unpacked columns; a vector has one row */
    int experts, top_k;       /* tid2eid: numbers per token, kept per token */
    uint64_t key, block_key;
} synth_tensor;

uint64_t synth_key(uint64_t seed, const char *name, const char *suffix);
static inline uint64_t synth_number(uint64_t key, uint64_t n) {
    uint64_t z = key + n * SYNTH_GOLDEN;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

void synth_tensor_init(synth_tensor *t, const model_want *w, const dm_config *c, uint64_t seed);

/* Rows [r0, r1) as the file stores them into out; for a quantised tensor their scales into scale (both hold
 * exactly those rows; r0 is then a multiple of 128 in FP8). */
void synth_rows(const synth_tensor *t, int64_t r0, int64_t r1, uint8_t *out, uint8_t *scale);
int64_t synth_row_bytes(const synth_tensor *t);       /* of one row in the file */
int64_t synth_scale_bytes(const synth_tensor *t, int64_t rows); /* scales that go with that many rows */

#endif
