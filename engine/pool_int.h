/* pool_int.h — block memory of all sequences of a forward: equal blocks, a bound, and a short list of free ones.
 * Any thread may call. */
#ifndef DM_ENGINE_POOL_INT_H
#define DM_ENGINE_POOL_INT_H

#include "base/base.h"

typedef struct pool pool;

int pool_create(pool **out, size_t block_bytes, int64_t bytes_max, dm_err *e); /* bytes_max 0: no bound */
void pool_destroy(pool *p); /* all blocks are back; NULL is fine */
/* Zeroed block; DM_ELIMIT at the bound, DM_ENOMEM. */
int pool_get(pool *p, uint8_t **out, dm_err *e);
void pool_put(pool *p, uint8_t *block); /* NULL is fine */
int64_t pool_bytes(const pool *p);      /* handed out now */

#endif
