/* Model directories for tests: a synthetic checkpoint made once per program, copies of it to damage, and edits of
 * safetensors headers and JSON files. */
#ifndef DM_TEST_ENGINE_FILES_H
#define DM_TEST_ENGINE_FILES_H

#include "tests/lib/testlib.h"

#include <dirent.h>
#include <jansson.h>
#include <sys/stat.h>
#include <unistd.h>

#include "engine/engine.h"

/* A path inside the test's directory; static storage, eight deep. */
static inline const char *scratch(const char *name)
{
    static char buf[8][512];
    static int k;
    k = (k + 1) & 7;
    snprintf(buf[k], sizeof buf[k], "%s/%s", test_dir(), name);
    return buf[k];
}

static inline const char *in_dir(const char *dir, const char *name)
{
    static char buf[8][1024];
    static int k;
    k = (k + 1) & 7;
    if (snprintf(buf[k], sizeof buf[k], "%s/%s", dir, name) >= (int)sizeof buf[k]) fail();
    return buf[k];
}

static inline dm_buf slurp(const char *path)
{
    dm_buf b = {0};
    dm_err e;
    assert_ok_e(dm_file_read(path, (size_t)1 << 28, &b, &e), e);
    return b;
}

static inline void spit(const char *path, const void *p, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(p, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static inline void copy_dir(const char *from, const char *to)
{
    DIR *d = opendir(from);
    assert_non_null(d);
    assert_int_equal(mkdir(to, 0755), 0);
    for (struct dirent *x; (x = readdir(d));) {
        if (x->d_name[0] == '.') continue;
        dm_buf b = slurp(in_dir(from, x->d_name));
        spit(in_dir(to, x->d_name), dm_buf_cstr(&b), b.n);
        dm_buf_free(&b);
    }
    closedir(d);
}

static inline void remove_dir(const char *dir)
{
    DIR *d = opendir(dir);
    if (!d) return;
    for (struct dirent *x; (x = readdir(d));)
        if (strcmp(x->d_name, ".") && strcmp(x->d_name, "..")) unlink(in_dir(dir, x->d_name));
    closedir(d);
    rmdir(dir);
}

/* The synthetic "tiny" (seed 1) or "tiny2" (seed 2) checkpoint, made on first use. */
static inline const char *synthetic(const char *name)
{
    static char path[2][512];
    int i = strcmp(name, "tiny") == 0 ? 0 : 1;
    dm_err e;
    char config[64];
    if (path[i][0]) return path[i];
    snprintf(path[i], sizeof path[i], "%s/%s", test_dir(), name);
    snprintf(config, sizeof config, "vectors/%s.config.json", name);
    assert_ok_e(dm_model_synth(test_data(config), path[i], (uint64_t)i + 1, 0, NULL, NULL, &e), e);
    return path[i];
}

/* A copy of "tiny" under a name of its own, to be damaged. */
static inline const char *tiny_copy(const char *name)
{
    const char *to = scratch(name);
    remove_dir(to);
    copy_dir(synthetic("tiny"), to);
    return to;
}

/* Replaces text in a file, once; the two may differ in length. */
static inline void replace_in(dm_buf *b, const char *old, const char *new_text)
{
    char *at = memmem(b->p, b->n, old, strlen(old));
    if (!at) fail_msg("no \"%s\" to replace", old);
    size_t before = (size_t)(at - (char *)b->p), after = b->n - before - strlen(old);
    dm_buf out = {0};
    assert_ok(dm_buf_append(&out, b->p, before));
    assert_ok(dm_buf_str(&out, new_text));
    if (after) assert_ok(dm_buf_append(&out, at + strlen(old), after));
    dm_buf_free(b);
    *b = out;
}

static inline void edit_file(const char *path, const char *old, const char *new_text)
{
    dm_buf b = slurp(path);
    replace_in(&b, old, new_text);
    spit(path, b.p, b.n);
    dm_buf_free(&b);
}

static inline uint64_t header_length(const dm_buf *b)
{
    uint64_t n = 0;
    for (int i = 7; i >= 0; i--) n = n << 8 | b->p[i];
    return n;
}

/* Writes a safetensors file from its header text and its data. */
static inline void write_safetensors(const char *path, const void *header, size_t n, const void *data, size_t bytes)
{
    dm_buf b = {0};
    uint8_t len[8];
    for (int i = 0; i < 8; i++) len[i] = (uint8_t)((uint64_t)n >> 8 * i);
    assert_ok(dm_buf_append(&b, len, 8));
    if (n) assert_ok(dm_buf_append(&b, header, n));
    if (bytes) assert_ok(dm_buf_append(&b, data, bytes));
    spit(path, b.p, b.n);
    dm_buf_free(&b);
}

/* Replaces text in the header of a safetensors file; the data stays as it is. */
static inline void edit_header(const char *path, const char *old, const char *new_text)
{
    dm_buf b = slurp(path), h = {0};
    size_t n = (size_t)header_length(&b);
    assert_ok(dm_buf_append(&h, b.p + 8, n));
    replace_in(&h, old, new_text);
    write_safetensors(path, h.p, h.n, b.p + 8 + n, b.n - 8 - n);
    dm_buf_free(&h);
    dm_buf_free(&b);
}

static inline void assert_text(const char *text, const char *part)
{
    if (!strstr(text, part)) fail_msg("\"%s\" does not mention \"%s\"", text, part);
}

/* jansson through the fault counter, for loops over failing allocations. */
static inline void count_json_memory(void) { json_set_alloc_funcs(dm_malloc, dm_free); }

#endif
