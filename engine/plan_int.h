/* plan_int.h — sizes in the cache that more than one file counts with. */
#ifndef DM_PLAN_INT_H
#define DM_PLAN_INT_H

#include "engine/engine.h"

#define PLAN_ENTRY_BYTES 584 /* 448 e4m3 + 64 bf16 + 7 ue8m0 + 1 */
#define PLAN_INDEX_BYTES 68  /* 128 e2m1 packed + 4 ue8m0 */
#define PLAN_STATE_HEADER 80
/* One step of the forward pass: rows unless asked otherwise, index scores held at once, widened cache entries, rows
 * of the head at once. */
#define PLAN_ROWS 256
#define PLAN_SCORES ((int64_t)4 << 20)
#define PLAN_WIDE_MAX 4096
#define PLAN_LOGIT_ROWS 32

/* Packed bytes of the entries that `tokens` positions complete in one layer of that ratio. */
int64_t plan_entry_bytes(int ratio, int64_t tokens);

#endif
