/* The float32 backend for AVX2, FMA and F16C. */
#define KERN_REAL float
#define KERN_EXACT 0
#define KERN_AVX2 1
#define KERN_ISA "avx2"
#define KERN_TABLE kern_table_avx2
#include "kernels/cpu/ops/all.h"
