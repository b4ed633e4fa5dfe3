/* kernels.c — which backends there are, and the scalar numerics that others may ask for. */
#include "kernels/kernels.h"

#define KERN_REAL float
#define KERN_EXACT 0
#include "kernels/cpu/ops/numeric.h"

extern const dm_kernels kern_table_f64, kern_table_f32;
#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

extern const dm_kernels kern_table_avx2, kern_table_avx512, kern_table_amx;

static bool runs_avx2(void) {
    unsigned a, b, c, d; /* f16c: not every compiler's list of names has it */
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
static bool runs_avx512(void) {
    return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}
/* Tiles are there when the processor has them and the kernel lets this process use them (8 KB more to save at
 * every switch, so it wants to be asked; asking again is fine). */
static bool runs_amx(void) {
    enum { AMX_BF16 = 1 << 22, AMX_TILE = 1 << 24, REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!runs_avx512() || !__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & AMX_BF16) || !(d & AMX_TILE)) return false;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif
static bool runs_always(void) { return true; }

static const struct backend {
    const dm_kernels *table;
    bool (*runs)(void);
} backends[] = { /* best first */
#if defined(__x86_64__)
    {&kern_table_amx, runs_amx},
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

/* Each backend here needs all that the next one needs, so a processor's list is the end of the whole one. */
const char *const *dm_kernels_isas(void) {
    static const char *const all[] = {
#if defined(__x86_64__)
        "amx", "avx512", "avx2",
#endif
        "scalar", NULL};
    size_t first = 0;
    while (!backends[first].runs()) first++;
    return &all[first];
}

float dm_bf16_round(float x) { return bf16_round(x); }
float dm_e4m3_value(uint8_t code) { return e4m3_float(code); }
uint8_t dm_e4m3_code(float x) { return e4m3_pack(e4m3_round(x)); }
float dm_e2m1_value(uint8_t code) { return e2m1_float(code); }
uint8_t dm_e2m1_code(float x) { return e2m1_pack(e2m1_round(x)); }
int dm_fp8_scale_exp(float amax) { return fp8_exp(amax); }
int dm_fp4_scale_exp(float amax) { return fp4_exp(amax); }
