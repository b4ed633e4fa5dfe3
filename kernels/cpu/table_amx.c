/* The float32 backend for AVX-512 with AMX tiles for linears. */
#define KERN_REAL float
#define KERN_EXACT 0
#define KERN_AVX512 1
#define KERN_AMX 1
#define KERN_ISA "amx"
#define KERN_TABLE kern_table_amx
#include "kernels/cpu/ops/all.h"
