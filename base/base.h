/* base.h — the words every other module speaks: errors, memory, buffers, text,
 * hashing, time, files, logging, options, faults.  Nothing here knows a model, a
 * session or a store.
 *
 * Rules for the whole program
 *   - A function that can fail returns int: 0 or a count when it worked, a negative
 *     DM_E… code when it did not.  `bool` answers questions and never means success.
 *   - Foreign codes (libuv, LMDB, CURL, jansson, CUDA) stop at the module that called
 *     them; each module has one small translator into this list.
 *   - The caller may pass a dm_err to be told where and why; NULL is always allowed.
 *   - Libraries never print and never exit.  They log through dm_log, whose sink is set
 *     by main; without a sink nothing is written.
 *   - A broken invariant of ours is DM_ASSERT, which stays on in release builds.
 *
 * Threads: everything here may be called from any thread on objects that the caller
 * does not share; dm_log, dm_fault_* and the clocks may be called from all at once. */
#ifndef DM_BASE_H
#define DM_BASE_H

#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DM_API __attribute__((visibility("default")))
#define DM_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))
#define DM_MUST_USE __attribute__((warn_unused_result))
#define DM_COUNT(a) (sizeof(a) / sizeof((a)[0]))
#ifdef __cplusplus
#define DM_NORETURN [[noreturn]]
#define DM_ALIGNAS(n) alignas(n)
#else
#define DM_NORETURN _Noreturn
#define DM_ALIGNAS(n) _Alignas(n)
#endif

#define DM_VERSION "0.1.0"

/* ---- errors ------------------------------------------------------------------- */

/* code name, number, default text.  Numbers that the system also has are its negated errno,
 * so a system code passes through unchanged; ours start below -5000. */
#define DM_ERR_MAP(X)                                                                    \
    X(DM_ENOENT, -2, "no such file or directory")                                        \
    X(DM_EIO, -5, "input/output error")                                                  \
    X(DM_EAGAIN, -11, "try again")                                                       \
    X(DM_ENOMEM, -12, "out of memory")                                                   \
    X(DM_EACCES, -13, "permission denied")                                               \
    X(DM_EBUSY, -16, "in use by another process")                                        \
    X(DM_EEXIST, -17, "already exists")                                                  \
    X(DM_EINVAL, -22, "invalid argument")                                                \
    X(DM_ENOSPC, -28, "no space left on device")                                         \
    X(DM_EPIPE, -32, "broken pipe")                                                      \
    X(DM_ETIMEDOUT, -110, "timed out")                                                   \
    X(DM_ECANCELED, -125, "cancelled")                                                   \
    X(DM_EUSAGE, -5001, "usage error")                                                   \
    X(DM_EFORMAT, -5002, "malformed data")                                               \
    X(DM_ECORRUPT, -5003, "checksum mismatch")                                           \
    X(DM_EVERSION, -5004, "written by a newer version")                                  \
    X(DM_EFOREIGN, -5005, "belongs to something else")                                   \
    X(DM_ENOTSUP, -5006, "not supported")                                                \
    X(DM_ELIMIT, -5007, "limit exceeded")                                                \
    X(DM_ECONTEXT, -5008, "context is full")                                             \
    X(DM_EBUDGET, -5009, "budget is spent")                                              \
    X(DM_ESANDBOX, -5010, "sandbox cannot be built")                                     \
    X(DM_EMODEL, -5011, "bad model directory")                                           \
    X(DM_ESTORE, -5012, "bad store")                                                     \
    X(DM_EMISMATCH, -5013, "values differ")                                              \
    X(DM_EMISS, -5014, "not in the store")                                               \
    X(DM_ETOOL, -5015, "tool error")                                                     \
    X(DM_EPAUSED, -5016, "waiting for approval or input")                                \
    X(DM_ESTATE, -5017, "not possible in this state")

enum dm_errno {
#define X(name, num, text) name = num,
    DM_ERR_MAP(X)
#undef X
};

/* One failure, told to a person.  `text` is one sentence that names the thing at fault and, where
 * there is one, the way out; it is valid UTF-8 on one line.  Plain data, owned by the caller. */
typedef struct dm_err {
    int code;
    char where[64]; /* what was being done: "model", "kv.open", … */
    char text[512];
} dm_err;

DM_API const char *dm_err_name(int code); /* "DM_ENOENT"; "DM_E?" for an unknown code */
DM_API const char *dm_err_text(int code); /* default text; strerror for other system codes */
/* Fills *e (if not NULL) and returns code, so that `return dm_err_set(...)` reads well. */
DM_API int dm_err_set(dm_err *e, int code, const char *where, const char *fmt, ...) DM_PRINTF(4, 5);
/* The same for a failed system call: code is -errno, text gets ": <strerror>" behind it. */
DM_API int dm_err_sys(dm_err *e, int errno_value, const char *where, const char *fmt, ...) DM_PRINTF(4, 5);
/* Puts "<prefix>: " before the text that is already there (call on the way up). */
DM_API int dm_err_prefix(dm_err *e, const char *fmt, ...) DM_PRINTF(2, 3);

DM_NORETURN DM_API void dm_assert_fail(const char *file, int line, const char *what);
#define DM_ASSERT(x) ((x) ? (void)0 : dm_assert_fail(__FILE__, __LINE__, #x))

/* ---- memory ------------------------------------------------------------------- */

/* malloc and kin, with the fault counter in front (dm_fault_alloc_after).  NULL on failure.
 * Memory from these is freed with dm_free or free; the two are the same. */
DM_API void *dm_malloc(size_t n);
DM_API void *dm_calloc(size_t count, size_t size); /* checks count*size for overflow */
DM_API void *dm_realloc(void *p, size_t n);
DM_API char *dm_strdup(const char *s);
DM_API char *dm_strndup(const char *s, size_t n);
DM_API void *dm_aligned(size_t align, size_t n); /* align: power of two; free with dm_free */
DM_API void dm_free(void *p);

/* ---- growable bytes ----------------------------------------------------------- */

/* Zero-initialised is a valid empty buffer.  After every append that worked, p[n] is a NUL that
 * does not count in n (so text can be printed).  A failed append leaves the buffer as it was. */
typedef struct dm_buf {
    uint8_t *p; /* owned */
    size_t n, cap;
} dm_buf;

DM_API int dm_buf_reserve(dm_buf *b, size_t extra);
DM_API int dm_buf_append(dm_buf *b, const void *p, size_t n);
DM_API int dm_buf_str(dm_buf *b, const char *s);
DM_API int dm_buf_byte(dm_buf *b, uint8_t c);
DM_API int dm_buf_printf(dm_buf *b, const char *fmt, ...) DM_PRINTF(2, 3);
DM_API int dm_buf_vprintf(dm_buf *b, const char *fmt, va_list ap);
DM_API void dm_buf_consume(dm_buf *b, size_t n); /* drops the first n bytes */
DM_API void dm_buf_clear(dm_buf *b);             /* n = 0, keeps the memory */
DM_API void dm_buf_free(dm_buf *b);
static inline const char *dm_buf_cstr(const dm_buf *b) { return b->p ? (const char *)b->p : ""; }

/* Growable token ids. */
typedef struct dm_ids {
    int32_t *p; /* owned */
    size_t n, cap;
} dm_ids;
DM_API int dm_ids_append(dm_ids *v, const int32_t *p, size_t n);
DM_API int dm_ids_push(dm_ids *v, int32_t id);
DM_API void dm_ids_free(dm_ids *v);

/* ---- text --------------------------------------------------------------------- */

DM_API bool dm_utf8_valid(const void *p, size_t n);
/* Appends text to out with every maximal invalid part (and encoded surrogates) replaced by U+FFFD;
 * returns the number of replacements, or DM_ENOMEM. */
DM_API int64_t dm_utf8_clean(dm_buf *out, const void *p, size_t n);
/* Length of the longest prefix that does not end inside a character that more bytes could still
 * complete.  A streaming decoder emits that prefix and keeps the rest (at most 3 bytes). */
DM_API size_t dm_utf8_whole(const void *p, size_t n);
/* Decodes one code point; returns its length 1..4, or 0 if the bytes there are not valid UTF-8. */
DM_API size_t dm_utf8_next(const uint8_t *p, size_t n, uint32_t *cp);
DM_API int dm_utf8_put(dm_buf *out, uint32_t cp);
/* Bytes to put in, take out or replace to make one word of the other, for "did you mean".  Words longer than
 * DM_TEXT_WORD are never near: INT_MAX. */
#define DM_TEXT_WORD 32
DM_API int dm_text_distance(const char *a, size_t na, const char *b, size_t nb);
DM_API void dm_hex(char *out, const void *p, size_t n); /* out: 2n+1 bytes, lower case */
DM_API bool dm_unhex(void *out, const char *hex, size_t n); /* reads exactly 2n digits */
DM_API bool dm_str_prefix(const char *s, const char *prefix);
/* "1.5 MiB", "938 KiB", "12 B" into a buffer of at least 16; returns out. */
DM_API char *dm_bytes_text(char *out, size_t cap, uint64_t bytes);

/* ---- hashing (libsodium and xxHash underneath) ---------------------------------- */

typedef struct dm_hash { uint8_t b[32]; } dm_hash;
typedef struct dm_blake2b { DM_ALIGNAS(64) uint8_t opaque[384]; } dm_blake2b;
typedef struct dm_sha256 { DM_ALIGNAS(16) uint8_t opaque[128]; } dm_sha256;
DM_API void dm_blake2b_init(dm_blake2b *h); /* BLAKE2b-256, no key */
DM_API void dm_blake2b_add(dm_blake2b *h, const void *p, size_t n);
DM_API void dm_blake2b_end(dm_blake2b *h, dm_hash *out);
DM_API void dm_sha256_init(dm_sha256 *h);
DM_API void dm_sha256_add(dm_sha256 *h, const void *p, size_t n);
DM_API void dm_sha256_end(dm_sha256 *h, dm_hash *out);
DM_API void dm_xxh3_128(uint8_t out[16], const void *p, size_t n);
static inline bool dm_hash_equal(const dm_hash *a, const dm_hash *b) { return __builtin_memcmp(a->b, b->b, 32) == 0; }
/* Random bytes of the system (ids, salts); never fails. */
DM_API void dm_random(void *p, size_t n);

/* Counter-free repeatable numbers for tests and synthetic data: splitmix64.  `state += golden`
 * happens inside, so n calls give outputs 1..n. */
DM_API uint64_t dm_splitmix64(uint64_t *state);

/* ---- time ---------------------------------------------------------------------- */

DM_API uint64_t dm_now_ns(void);  /* monotonic */
DM_API int64_t dm_wall_ms(void);  /* since 1970, UTC */

/* ---- files --------------------------------------------------------------------- */

/* Reads a whole regular file; DM_ELIMIT if it is longer than max_bytes; a FIFO or device is
 * refused (DM_EINVAL), so that this never hangs. */
DM_API int dm_file_read(const char *path, size_t max_bytes, dm_buf *out, dm_err *e);
/* Temp file in the same directory, write, fsync, rename, fsync of the directory. After a crash the
 * old or the new content is there, whole. */
DM_API int dm_file_write_atomic(const char *path, const void *p, size_t n, mode_t mode, dm_err *e);
DM_API int dm_mkdirs(const char *path, mode_t mode, dm_err *e); /* mkdir -p */
/* a + "/" + b into a new string (caller frees); NULL when out of memory. */
DM_API char *dm_path_join(const char *a, const char *b);
DM_API bool dm_path_exists(const char *path);

/* ---- logging ------------------------------------------------------------------- */

typedef enum dm_log_level { DM_LOG_ERROR, DM_LOG_WARN, DM_LOG_INFO, DM_LOG_DEBUG } dm_log_level;
/* Called with one finished line, no newline at its end; any thread. */
typedef void (*dm_log_fn)(void *ctx, dm_log_level level, const char *line);
DM_API void dm_log_set(dm_log_fn fn, void *ctx, dm_log_level max_level); /* before threads start */
DM_API void dm_log(dm_log_level level, const char *fmt, ...) DM_PRINTF(2, 3);

/* ---- options -------------------------------------------------------------------- */

/* One table per command is the single definition of its options: the parser, --help, the
 * environment names and the range checks all come from it. */
typedef enum dm_opt_type {
    DM_OPT_FLAG,   /* bool                       --name / --no-name */
    DM_OPT_INT,    /* int64_t, min..max          --name N            */
    DM_OPT_BYTES,  /* int64_t, suffixes K M G T  --name 4G           */
    DM_OPT_NUMBER, /* double, min..max                               */
    DM_OPT_STR,    /* const char * (borrowed from argv or environ)   */
    DM_OPT_STRS,   /* dm_opt_strs, given again and again             */
    DM_OPT_ENUM,   /* const char *, one of `choices` "a|b|c"         */
    DM_OPT_HELP,   /* sets result.help                               */
} dm_opt_type;

#define DM_OPT_STRS_MAX 16
typedef struct dm_opt_strs {
    const char *v[DM_OPT_STRS_MAX]; /* borrowed from argv */
    int n;
} dm_opt_strs;

typedef struct dm_opt {
    const char *name;    /* without dashes */
    char letter;         /* 0: none */
    dm_opt_type type;
    size_t offset;       /* of the field in the caller's struct */
    const char *def;     /* default as text; NULL: leave the field as it is */
    double min, max;     /* numbers: allowed range; both 0: any */
    const char *choices; /* DM_OPT_ENUM */
    const char *env;     /* environment variable that supplies it, or NULL */
    const char *metavar; /* "DIR"; NULL: from the type */
    const char *help;    /* one line; NULL hides the option from --help */
} dm_opt;

typedef struct dm_opt_result {
    bool help;
    int nargs;         /* what is left, in order; "--" ends the options */
    const char **args; /* owned: dm_free; the strings are borrowed from argv */
} dm_opt_result;

/* Defaults, then environment, then argv[0..argc).  DM_EUSAGE with a sentence for the user that
 * names the option (and a near spelling when there is one). */
DM_API int dm_opt_parse(const dm_opt *table, size_t count, void *dst, int argc, char **argv, dm_opt_result *out, dm_err *e);
DM_API int dm_opt_help(const dm_opt *table, size_t count, dm_buf *out); /* the "Options:" lines */

/* ---- faults ---------------------------------------------------------------------- */

/* For tests only, off unless armed; a disarmed point costs one relaxed load.
 * spec: "NAME=kill", "NAME:3=kill" (third pass), "NAME=fail"; several with commas.
 * main arms it from the environment (DORMOUSE_FAULT), tests call it directly. */
DM_API int dm_fault_arm(const char *spec, dm_err *e); /* NULL or "": disarm all */
/* true: this pass must fail (the caller returns its error).  "kill" never returns (SIGKILL). */
DM_API bool dm_fault(const char *name);
DM_API void dm_fault_alloc_after(int64_t n); /* the n-th dm_malloc from now fails, once; <0: off */
DM_API int64_t dm_fault_alloc_count(void);   /* allocations so far */

#ifdef __cplusplus
}
#endif
#endif
