/* plan_int.h — sizes in the cache that more than one file counts with. */
#ifndef DM_PLAN_INT_H
#define DM_PLAN_INT_H

#include "engine/engine.h"

#define PLAN_ENTRY_BYTES 584 /* 448 e4m3 + 64 bf16 + 7 ue8m0 + 1 */
#define PLAN_INDEX_BYTES 68  /* 128 e2m1 packed + 4 ue8m0 */
#define PLAN_ROWS 256        /* rows of a step unless asked otherwise */

/* Packed bytes of the entries that `tokens` positions complete in one layer of that ratio. */
int64_t plan_entry_bytes(int ratio, int64_t tokens);

#endif
