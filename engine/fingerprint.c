/* fingerprint.c — the identity of the weights: BLAKE2b-256 over "dormouse weights 1\n" and then, for every tensor
 * in bytewise order of names: u32 length and name, u32 length and dtype, u32 dimensions, u64 each, u64 length and
 * bytes (all little-endian).
 *
 * Hashing a large checkpoint takes minutes, so the result is kept: one text file per model directory that lists
 * every shard with device, inode, size and mtime, the fingerprint, and a checksum of itself.  It is believed only if
 * it is, byte for byte, what would be written now.  A shard changed in the last two seconds is not cached: a further
 * change could leave the same mtime. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "engine/model_obj_int.h"

#define WHERE "model"
#define CHUNK ((int64_t)64 << 20)
#define SETTLED_NS ((int64_t)2000000000)

/* ---- the hash -------------------------------------------------------------------------------------- */

static void add_number(dm_blake2b *h, uint64_t n, int bytes) {
    uint8_t b[8];
    for (int i = 0; i < bytes; i++) b[i] = (uint8_t)(n >> 8 * i);
    dm_blake2b_add(h, b, (size_t)bytes);
}

static void add_text(dm_blake2b *h, const char *s) {
    add_number(h, strlen(s), 4);
    dm_blake2b_add(h, s, strlen(s));
}

static void add_head(dm_blake2b *h, const model_tensor *t) {
    add_text(h, t->name);
    add_text(h, model_dtype_name(t->dtype));
    add_number(h, (uint64_t)t->ndim, 4);
    for (int i = 0; i < t->ndim; i++) add_number(h, (uint64_t)t->dim[i], 8);
    add_number(h, (uint64_t)t->bytes, 8);
}

/* What is read here once may be nothing that a step reads (an embedding's other rows, draft stages), so the process does not keep
 * it: the pages stay in the system's cache.  Only for a mapped file; a tensor that was copied for its alignment stays. */
static void unmap_pages(const dm_model *m, const model_tensor *t, int64_t at, int64_t n) {
    const st_file *f = &m->shard[t->shard];
    uintptr_t map = (uintptr_t)f->map, from = (uintptr_t)t->data + (uintptr_t)at, page = 4096;
    if (from < map || from + (uintptr_t)n > map + f->size) return;
    from = from / page * page; /* a page at either end may belong to a neighbour too, which reads it again */
    (void)madvise((void *)from, (uintptr_t)t->data + (uintptr_t)(at + n) - from, MADV_DONTNEED);
}

static int hash_tensors(const dm_model *m, dm_hash *out, dm_progress fn, void *ctx, dm_err *e) {
    static const char domain[] = "dormouse weights 1\n";
    int64_t total = 0, done = 0;
    dm_blake2b h;
    for (size_t i = 0; i < m->ntensors; i++) total += m->tensor[i].bytes;
    dm_blake2b_init(&h);
    dm_blake2b_add(&h, domain, sizeof domain - 1);
    for (size_t i = 0; i < m->ntensors; i++) {
        const model_tensor *t = &m->tensor[i];
        add_head(&h, t);
        for (int64_t at = 0; at < t->bytes; at += CHUNK) {
            int64_t n = t->bytes - at < CHUNK ? t->bytes - at : CHUNK;
            if (fn && !fn(ctx, "hashing the weights", done, total)) return dm_err_set(e, DM_ECANCELED, WHERE, "hashing the weights was cancelled");
            dm_blake2b_add(&h, t->data + at, (size_t)n);
            unmap_pages(m, t, at, n);
            done += n;
        }
    }
    dm_blake2b_end(&h, out);
    if (fn) fn(ctx, "hashing the weights", total, total);
    return 0;
}

/* ---- the cache --------------------------------------------------------------------------------------- */

static int identity_text(const dm_model *m, dm_buf *out) {
    int rc = dm_buf_str(out, "dormouse weights 1\n");
    for (int i = 0; i < m->nshards && rc >= 0; i++) {
        const st_file *f = &m->shard[i];
        rc = dm_buf_printf(out, "%lld %lld %zu %lld %s\n", (long long)f->dev, (long long)f->ino, f->size, (long long)f->mtime_ns, m->shard_name[i]);
    }
    return rc;
}

/* Appends the fingerprint and the checksum of everything before it. */
static int seal(dm_buf *text, const dm_hash *weights) {
    char hex[65];
    dm_blake2b h;
    dm_hash check;
    dm_hex(hex, weights->b, sizeof weights->b);
    int rc = dm_buf_printf(text, "weights %s\n", hex);
    if (rc < 0) return rc;
    dm_blake2b_init(&h);
    dm_blake2b_add(&h, text->p, text->n);
    dm_blake2b_end(&h, &check);
    dm_hex(hex, check.b, sizeof check.b);
    return dm_buf_printf(text, "check %s\n", hex);
}

static char *cache_path(const dm_model *m, const char *cache_dir) {
    char hex[33], name[64];
    char *real = realpath(m->dir, NULL);
    const char *dir = real ? real : m->dir;
    uint8_t id[16];
    dm_xxh3_128(id, dir, strlen(dir));
    free(real);
    dm_hex(hex, id, sizeof id);
    snprintf(name, sizeof name, "weights-%s.txt", hex);
    return dm_path_join(cache_dir, name);
}

static bool read_cache(const char *path, const dm_buf *identity, dm_hash *out) {
    dm_buf file = {0}, want = {0};
    bool good = dm_file_read(path, (size_t)64 << 20, &file, NULL) >= 0 && file.n > identity->n + 72 && memcmp(file.p, identity->p, identity->n) == 0 &&
                memcmp(file.p + identity->n, "weights ", 8) == 0 && dm_unhex(out->b, (const char *)file.p + identity->n + 8, sizeof out->b) &&
                dm_buf_append(&want, identity->p, identity->n) >= 0 && seal(&want, out) >= 0 && want.n == file.n && memcmp(want.p, file.p, file.n) == 0;
    dm_buf_free(&file);
    dm_buf_free(&want);
    return good;
}

/* No shard was replaced, and none changed so lately that a further change could go unseen. */
static bool settled(const dm_model *m) {
    int64_t now = dm_wall_ms() * 1000000;
    for (int i = 0; i < m->nshards; i++) {
        const st_file *f = &m->shard[i];
        struct stat st;
        char *path = dm_path_join(m->dir, m->shard_name[i]);
        int rc = path ? stat(path, &st) : -1;
        dm_free(path);
        if (rc < 0 || (int64_t)st.st_dev != f->dev || (int64_t)st.st_ino != f->ino || (size_t)st.st_size != f->size) return false;
        int64_t mtime = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
        if (mtime != f->mtime_ns || mtime > now - SETTLED_NS) return false;
    }
    return true;
}

int dm_model_fingerprint(const dm_model *m, const char *cache_dir, dm_hash *out, dm_progress fn, void *ctx, dm_err *e) {
    dm_buf identity = {0};
    char *path = cache_dir ? cache_path(m, cache_dir) : NULL;
    int rc = 0;
    if (cache_dir && (!path || identity_text(m, &identity) < 0)) rc = dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    if (rc == 0 && !(path && settled(m) && read_cache(path, &identity, out))) {
        rc = hash_tensors(m, out, fn, ctx, e);
        /* A cache that cannot be written only costs the time again. */
        if (rc == 0 && path && settled(m) && dm_mkdirs(cache_dir, 0755, NULL) >= 0 && seal(&identity, out) >= 0)
            (void)dm_file_write_atomic(path, identity.p, identity.n, 0644, NULL);
    }
    dm_buf_free(&identity);
    dm_free(path);
    return rc;
}
