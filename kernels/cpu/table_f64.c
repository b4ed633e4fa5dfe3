/* The exact backend: double between rounding points. */
#define KERN_REAL double
#define KERN_EXACT 1
#define KERN_ISA "scalar"
#define KERN_TABLE kern_table_f64
#include "kernels/cpu/ops/all.h"
