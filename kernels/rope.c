/* rope.c — rotary frequencies and angles.  These floats decide bytes, so each operation is rounded by itself:
 * frequency 1/(float)theta^(i/32); YaRN ramp between the pairs whose wavelengths turn beta_fast and beta_slow times
 * in the original context; angle one float32 product, cos and sin of it in double, rounded once. */
#include <math.h>

#include "kernels/kernels.h"

#define PAIRS (KERN_ROPE_DIM / 2)

/* The (fractional) pair that makes `turns` turns over the original context. */
static double yarn_pair(double turns, double theta, int64_t original) {
    return KERN_ROPE_DIM * log((double)original / (turns * 2.0 * M_PI)) / (2.0 * log(theta));
}

static void yarn_apply(float f[PAIRS], double theta, const kern_yarn *y) {
    double low = floor(yarn_pair(y->beta_fast, theta, y->original_max));
    double high = ceil(yarn_pair(y->beta_slow, theta, y->original_max));
    if (low < 0) low = 0;
    if (high > KERN_ROPE_DIM - 1) high = KERN_ROPE_DIM - 1;
    if (high <= low) high = low + 0.001;
    for (int i = 0; i < PAIRS; i++) {
        float ramp = (float)(i - low) / (float)(high - low);
        ramp = ramp < 0.0f ? 0.0f : ramp > 1.0f ? 1.0f : ramp;
        float s = 1.0f - ramp;
        float scaled = f[i] / (float)y->factor;
        f[i] = scaled * (1.0f - s) + f[i] * s;
    }
}

void dm_rope_freqs(float out[PAIRS], double theta, const kern_yarn *yarn) {
    for (int i = 0; i < PAIRS; i++) out[i] = 1.0f / (float)pow(theta, i / (double)PAIRS);
    if (yarn && yarn->factor > 0 && yarn->original_max > 0) yarn_apply(out, theta, yarn);
}

void dm_rope_angles(const float freq[PAIRS], int64_t t, float cos_out[PAIRS], float sin_out[PAIRS]) {
    for (int i = 0; i < PAIRS; i++) {
        float angle = (float)t * freq[i];
        cos_out[i] = (float)cos((double)angle);
        sin_out[i] = (float)sin((double)angle);
    }
}
