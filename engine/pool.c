/* pool.c — see pool_int.h.  A freed block holds the pointer to the next free one in its first bytes. */
#include <pthread.h>
#include <string.h>

#include "engine/pool_int.h"

#define KEEP_BLOCKS 64 /* free blocks kept; more than a turn needs, little enough to forget about */

struct pool {
    pthread_mutex_t lock;
    size_t block_bytes; /* at least a pointer */
    int64_t bytes_max;
    int64_t used;       /* blocks out; under lock */
    int kept;           /* under lock */
    void *free_list;    /* under lock */
};

int pool_create(pool **out, size_t block_bytes, int64_t bytes_max, dm_err *e) {
    pool *p = dm_calloc(1, sizeof *p);
    *out = p;
    if (!p) return dm_err_set(e, DM_ENOMEM, "pool", "out of memory for the block pool");
    pthread_mutex_init(&p->lock, NULL);
    p->block_bytes = block_bytes < sizeof(void *) ? sizeof(void *) : block_bytes;
    p->bytes_max = bytes_max;
    return 0;
}

void pool_destroy(pool *p) {
    if (!p) return;
    while (p->free_list) {
        void *next;
        memcpy(&next, p->free_list, sizeof next);
        dm_free(p->free_list);
        p->free_list = next;
    }
    pthread_mutex_destroy(&p->lock);
    dm_free(p);
}

static bool reserve(pool *p, void **block) {
    bool room;
    pthread_mutex_lock(&p->lock);
    room = p->bytes_max <= 0 || (p->used + 1) * (int64_t)p->block_bytes <= p->bytes_max;
    if (room) {
        p->used++;
        *block = p->free_list;
        if (p->free_list) memcpy(&p->free_list, p->free_list, sizeof p->free_list), p->kept--;
    }
    pthread_mutex_unlock(&p->lock);
    return room;
}

int pool_get(pool *p, uint8_t **out, dm_err *e) {
    void *block = NULL;
    *out = NULL;
    if (!reserve(p, &block))
        return dm_err_set(e, DM_ELIMIT, "pool", "block memory is used up: %lld bytes allowed; put sequences to sleep or raise the bound",
                          (long long)p->bytes_max);
    if (!block) block = dm_malloc(p->block_bytes);
    if (!block) {
        pthread_mutex_lock(&p->lock);
        p->used--;
        pthread_mutex_unlock(&p->lock);
        return dm_err_set(e, DM_ENOMEM, "pool", "out of memory for a cache block of %zu bytes", p->block_bytes);
    }
    memset(block, 0, p->block_bytes);
    *out = block;
    return 0;
}

void pool_put(pool *p, uint8_t *block) {
    if (!block) return;
    pthread_mutex_lock(&p->lock);
    p->used--;
    if (p->kept < KEEP_BLOCKS) {
        memcpy(block, &p->free_list, sizeof p->free_list);
        p->free_list = block;
        p->kept++;
        block = NULL;
    }
    pthread_mutex_unlock(&p->lock);
    dm_free(block);
}

int64_t pool_bytes(const pool *p) {
    pool *q = (pool *)p;
    pthread_mutex_lock(&q->lock);
    int64_t n = q->used * (int64_t)q->block_bytes;
    pthread_mutex_unlock(&q->lock);
    return n;
}
