/* The float32 backend for AVX-512 (F, BW, VL, DQ). */
#define KERN_REAL float
#define KERN_EXACT 0
#define KERN_AVX512 1
#define KERN_ISA "avx512"
#define KERN_TABLE kern_table_avx512
#include "kernels/cpu/ops/all.h"
