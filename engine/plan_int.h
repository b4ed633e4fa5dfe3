/* plan_int.h — sizes that the plan counts with and others must keep to. */
#ifndef DM_PLAN_INT_H
#define DM_PLAN_INT_H

#include "engine/engine.h"

#define PLAN_STATE_HEADER 80 /* of a boundary state (seq_state.c) */
#define PLAN_JSON_BYTES 600  /* of a shard's header per tensor while it is read; the allocator keeps it */

#endif
