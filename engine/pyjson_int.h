/* JSON as Python's json module reads and writes it.
 *
 * The model was trained on prompts whose JSON came out of json.dumps(x, ensure_ascii=False), so tool schemas and
 * call arguments must be read and written in exactly that way: the order of keys is kept, of equal keys the last
 * value stays at the first place, integers keep their digits at any size, other numbers are binary64 and printed
 * as the shortest text that reads back, NaN, Infinity and -Infinity are numbers.  A lone surrogate becomes U+FFFD,
 * because a prompt is UTF-8.  Raw control characters inside strings are errors, as are invalid UTF-8, anything
 * behind the value, and nesting deeper than PJ_DEPTH_MAX.
 *
 * A document owns all its values; they stay where they are until pj_free. */
#ifndef DM_ENGINE_PYJSON_INT_H
#define DM_ENGINE_PYJSON_INT_H

#include "base/base.h"

#define PJ_DEPTH_MAX 400
#define PJ_BYTES_MAX ((size_t)1 << 30) /* longest text: counts are 32 bits */

typedef enum pj_kind { PJ_NULL, PJ_FALSE, PJ_TRUE, PJ_INT, PJ_FLOAT, PJ_STR, PJ_LIST, PJ_DICT } pj_kind;

typedef struct pj_val pj_val;
typedef struct pj_pair pj_pair;
struct pj_val {
    pj_kind kind;
    uint32_t n; /* STR, INT: bytes; LIST: items; DICT: pairs */
    union {
        const char *s;       /* STR: UTF-8 text, INT: its digits; a NUL follows that does not count */
        double f;            /* FLOAT */
        const pj_val *items; /* LIST */
        const pj_pair *pairs; /* DICT, no two keys equal */
    };
};
struct pj_pair { pj_val key, val; };

typedef struct pj_chunk pj_chunk;
typedef struct pj_doc {
    pj_val root;
    pj_chunk *chunks; /* owned: all texts, lists and dicts */
} pj_doc;

/* On failure *d is empty: DM_EFORMAT with the byte at fault, DM_ELIMIT, DM_ENOMEM. */
int pj_read(pj_doc *d, const char *text, size_t n, dm_err *e);
void pj_free(pj_doc *d); /* a zeroed one is fine */

int pj_write(const pj_val *v, dm_buf *out);
int pj_write_str(const char *s, size_t n, dm_buf *out); /* with its quotes; s is valid UTF-8 */
int pj_escape(const char *s, size_t n, dm_buf *out);    /* the same without quotes, for texts that come in pieces */
/* True if v holds no NaN or infinity, so that what pj_write makes of it is JSON for everybody. */
bool pj_finite(const pj_val *v);

const pj_val *pj_get(const pj_val *dict, const char *key); /* NULL: no such key, or not a dict */
bool pj_is(const pj_val *v, const char *text);             /* v is that string; NULL is not */
const char *pj_kind_name(const pj_val *v);                 /* "a string", …; NULL: "missing" */

#endif
