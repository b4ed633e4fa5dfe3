/* Allocation with a fault counter in front, and growable bytes. */
#include "base.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* -1: off.  Otherwise the number of allocations left before the one that fails. */
static _Atomic int64_t fail_after = -1;
static _Atomic int64_t allocations;

static bool must_fail(void)
{
    atomic_fetch_add_explicit(&allocations, 1, memory_order_relaxed);
    if (atomic_load_explicit(&fail_after, memory_order_relaxed) < 0) return false;
    return atomic_fetch_sub(&fail_after, 1) == 0;
}

/* n = 0 fails nothing; n = 1 fails the next one. */
void dm_fault_alloc_after(int64_t n) { atomic_store(&fail_after, n - 1); }
int64_t dm_fault_alloc_count(void) { return atomic_load(&allocations); }

void *dm_malloc(size_t n) { return must_fail() ? NULL : malloc(n ? n : 1); }
void *dm_realloc(void *p, size_t n) { return must_fail() ? NULL : realloc(p, n ? n : 1); }
void dm_free(void *p) { free(p); }

void *dm_calloc(size_t count, size_t size)
{
    if (must_fail()) return NULL;
    return calloc(count ? count : 1, size ? size : 1); /* calloc checks the product */
}

void *dm_aligned(size_t align, size_t n)
{
    if (must_fail() || n > SIZE_MAX - align) return NULL;
    size_t rounded = (n + align - 1) / align * align; /* aligned_alloc wants a multiple */
    return aligned_alloc(align, rounded ? rounded : align);
}

char *dm_strndup(const char *s, size_t n)
{
    char *p = n == SIZE_MAX ? NULL : dm_malloc(n + 1);
    if (!p) return NULL;
    memcpy(p, s, n);
    p[n] = 0;
    return p;
}
char *dm_strdup(const char *s) { return dm_strndup(s, strlen(s)); }

/* ---- dm_buf ---- */

int dm_buf_reserve(dm_buf *b, size_t extra)
{
    if (extra > SIZE_MAX / 2 - b->n - 1) return DM_ENOMEM;
    size_t need = b->n + extra + 1; /* one more for the NUL */
    if (need <= b->cap) return 0;
    size_t cap = b->cap ? b->cap : 64;
    while (cap < need) cap += cap / 2 + 64;
    uint8_t *p = dm_realloc(b->p, cap);
    if (!p) return DM_ENOMEM;
    b->p = p;
    b->cap = cap;
    b->p[b->n] = 0;
    return 0;
}

int dm_buf_append(dm_buf *b, const void *p, size_t n)
{
    int rc = dm_buf_reserve(b, n);
    if (rc < 0) return rc;
    if (n) memcpy(b->p + b->n, p, n);
    b->n += n;
    b->p[b->n] = 0;
    return 0;
}

int dm_buf_str(dm_buf *b, const char *s) { return dm_buf_append(b, s, strlen(s)); }
int dm_buf_byte(dm_buf *b, uint8_t c) { return dm_buf_append(b, &c, 1); }

int dm_buf_vprintf(dm_buf *b, const char *fmt, va_list ap)
{
    va_list again;
    va_copy(again, ap);
    int n = vsnprintf(NULL, 0, fmt, ap);
    int rc = n < 0 ? DM_EINVAL : dm_buf_reserve(b, (size_t)n);
    if (rc == 0) {
        vsnprintf((char *)b->p + b->n, (size_t)n + 1, fmt, again);
        b->n += (size_t)n;
    }
    va_end(again);
    return rc;
}

int dm_buf_printf(dm_buf *b, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    int rc = dm_buf_vprintf(b, fmt, ap);
    va_end(ap);
    return rc;
}

void dm_buf_consume(dm_buf *b, size_t n)
{
    DM_ASSERT(n <= b->n);
    if (!n) return;
    memmove(b->p, b->p + n, b->n - n);
    b->n -= n;
    b->p[b->n] = 0;
}

void dm_buf_clear(dm_buf *b)
{
    b->n = 0;
    if (b->p) b->p[0] = 0;
}

void dm_buf_free(dm_buf *b)
{
    dm_free(b->p);
    *b = (dm_buf){0};
}

/* ---- dm_ids ---- */

int dm_ids_append(dm_ids *v, const int32_t *p, size_t n)
{
    if (n > SIZE_MAX / 8 - v->n) return DM_ENOMEM;
    if (v->n + n > v->cap) {
        size_t cap = v->cap ? v->cap : 64;
        while (cap < v->n + n) cap *= 2;
        int32_t *q = dm_realloc(v->p, cap * sizeof *q);
        if (!q) return DM_ENOMEM;
        v->p = q;
        v->cap = cap;
    }
    if (n) memcpy(v->p + v->n, p, n * sizeof *p);
    v->n += n;
    return 0;
}
int dm_ids_push(dm_ids *v, int32_t id) { return dm_ids_append(v, &id, 1); }

void dm_ids_free(dm_ids *v)
{
    dm_free(v->p);
    *v = (dm_ids){0};
}
