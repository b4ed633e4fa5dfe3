/* safetensors_int.h — one safetensors file, mapped read-only and checked: 8 bytes header length (little-endian),
 * that many bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}}, then the data.
 *
 * After st_open every tensor lies inside the file, its bytes are shape × size, and no two overlap.  Data may be
 * misaligned for its type, since the format lets the header have any length; the model level copies what is. */
#ifndef DM_SAFETENSORS_INT_H
#define DM_SAFETENSORS_INT_H

#include "engine/model_int.h"

/* A header is at most this long, as in the format's own reader. */
#define ST_HEADER_BYTES_MAX 100000000

typedef struct st_file {
    const uint8_t *map; /* whole file; NULL when closed */
    size_t size;
    size_t data_at;     /* offset of the data */
    model_tensor *tensor; /* [count], in bytewise order of names */
    size_t count;
    void *names;        /* owned text behind the names */
    int64_t dev, ino, mtime_ns; /* identity of the file, for the fingerprint's cache */
} st_file;

/* Errors name the tensor at fault; the caller puts the file's name before them.  DM_EMODEL unless the system
 * said otherwise (DM_ENOENT, DM_EACCES, DM_ENOMEM). */
int st_open(st_file *f, const char *path, dm_err *e);
void st_close(st_file *f); /* zeroed or closed is fine */
/* NULL when there is none. */
const model_tensor *st_find(const st_file *f, const char *name);

#endif
