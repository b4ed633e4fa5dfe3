/* kernels.c — which backends there are, and the scalar numerics that others may ask for. */
#include "kernels/kernels.h"

#define KERN_REAL float
#define KERN_EXACT 0
#include "kernels/cpu/ops/numeric.h"

extern const dm_kernels kern_table_f64, kern_table_f32;
#if defined(__x86_64__)
extern const dm_kernels kern_table_avx2, kern_table_avx512;

static bool runs_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
static bool runs_avx512(void) {
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
#endif
static bool runs_always(void) { return true; }

static const struct backend {
    const dm_kernels *table;
    bool (*runs)(void);
} backends[] = { /* best first */
#if defined(__x86_64__)
    {&kern_table_avx512, runs_avx512},
    {&kern_table_avx2, runs_avx2},
#endif
    {&kern_table_f32, runs_always},
};

const dm_kernels *dm_kernels_exact(void) { return &kern_table_f64; }

const dm_kernels *dm_kernels_get(const char *isa) {
    for (size_t i = 0; i < DM_COUNT(backends); i++)
        if (backends[i].runs() && (!isa || strcmp(isa, backends[i].table->isa) == 0)) return backends[i].table;
    return NULL;
}

/* The list for the processor is one of the suffixes or subsets below; with three backends each is spelled once. */
const char *const *dm_kernels_isas(void) {
    static const char *const all[] = {"avx512", "avx2", "scalar", NULL}, *const two[] = {"avx2", "scalar", NULL},
                      *const one[] = {"scalar", NULL};
    return dm_kernels_get("avx512") ? all : dm_kernels_get("avx2") ? two : one;
}

float dm_bf16_round(float x) { return bf16_round(x); }
float dm_e4m3_value(uint8_t code) { return e4m3_float(code); }
uint8_t dm_e4m3_code(float x) { return e4m3_pack(e4m3_round(x)); }
float dm_e2m1_value(uint8_t code) { return e2m1_float(code); }
uint8_t dm_e2m1_code(float x) { return e2m1_pack(e2m1_round(x)); }
int dm_fp8_scale_exp(float amax) { return fp8_exp(amax); }
int dm_fp4_scale_exp(float amax) { return fp4_exp(amax); }
