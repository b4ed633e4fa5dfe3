/* The scalar float32 backend: what every faster one is compared with. */
#define KERN_REAL float
#define KERN_EXACT 0
#define KERN_ISA "scalar"
#define KERN_TABLE kern_table_f32
#include "kernels/cpu/ops/all.h"
