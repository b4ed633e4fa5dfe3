/* The reader: recursive descent over valid UTF-8.  Finished values wait on one stack until the bracket around
 * them closes and then move into the document, so a list costs no more than its items. */
#include "engine/pyjson_int.h"

#include <stdlib.h>
#include <string.h>

struct pj_chunk {
    pj_chunk *next;
    size_t used, cap;
    _Alignas(16) uint8_t bytes[];
};

typedef struct reader {
    pj_doc *doc;
    const uint8_t *text, *p, *end;
    pj_val *stack; /* values of the open brackets */
    size_t top, cap;
    dm_buf scratch; /* the string or number being read */
    int depth;
    bool lone;      /* an open string or dict holds a lone surrogate, still as three bytes ED xx xx */
    dm_err *err;
} reader;

static int read_value(reader *r);

/* ---- memory ---- */

static void *take(pj_doc *d, size_t n)
{
    n = (n + 15) & ~(size_t)15;
    pj_chunk *c = d->chunks;
    if (!c || c->cap - c->used < n) {
        size_t cap = c ? (c->cap < (1u << 20) ? c->cap * 2 : c->cap) : 1024;
        if (cap < n) cap = n;
        c = dm_malloc(sizeof *c + cap);
        if (!c) return NULL;
        c->next = d->chunks, c->used = 0, c->cap = cap;
        d->chunks = c;
    }
    void *p = c->bytes + c->used;
    c->used += n;
    return p;
}

void pj_free(pj_doc *d)
{
    while (d->chunks) {
        pj_chunk *next = d->chunks->next;
        dm_free(d->chunks);
        d->chunks = next;
    }
    memset(d, 0, sizeof *d);
}

static int push(reader *r, pj_val v)
{
    if (r->top == r->cap) {
        size_t cap = r->cap ? r->cap * 2 : 64;
        pj_val *p = dm_realloc(r->stack, cap * sizeof *p);
        if (!p) return DM_ENOMEM;
        r->stack = p, r->cap = cap;
    }
    r->stack[r->top++] = v;
    return 0;
}

static int push_text(reader *r, pj_kind kind)
{
    size_t n = r->scratch.n;
    char *s = take(r->doc, n + 1);
    if (!s) return DM_ENOMEM;
    if (n) memcpy(s, r->scratch.p, n);
    s[n] = 0;
    return push(r, (pj_val){.kind = kind, .n = (uint32_t)n, .s = s});
}

static int wrong(reader *r, const char *what)
{
    return dm_err_set(r->err, DM_EFORMAT, "json", "%s at byte %zu", what, (size_t)(r->p - r->text));
}

/* ---- strings ---- */

static int hex4(const uint8_t *p, const uint8_t *end)
{
    if (end - p < 4) return -1;
    int v = 0;
    for (int i = 0; i < 4; i++) {
        int c = p[i], d = c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
        if (d < 0) return -1;
        v = v * 16 + d;
    }
    return v;
}

/* p is behind "\u".  A lone surrogate is kept as its three bytes: two different ones in keys are different keys. */
static int read_unicode(reader *r)
{
    int hi = hex4(r->p, r->end);
    if (hi < 0) return wrong(r, "\\u without four hexadecimal digits");
    r->p += 4;
    if (hi < 0xD800 || hi > 0xDFFF) return dm_utf8_put(&r->scratch, (uint32_t)hi);
    if (hi < 0xDC00 && r->end - r->p >= 6 && r->p[0] == '\\' && r->p[1] == 'u') {
        int lo = hex4(r->p + 2, r->end);
        if (lo >= 0xDC00 && lo <= 0xDFFF) {
            r->p += 6;
            return dm_utf8_put(&r->scratch, 0x10000u + (((uint32_t)hi - 0xD800u) << 10) + ((uint32_t)lo - 0xDC00u));
        }
    }
    r->lone = true;
    uint8_t raw[3] = {0xED, (uint8_t)(0x80 | ((hi >> 6) & 63)), (uint8_t)(0x80 | (hi & 63))};
    return dm_buf_append(&r->scratch, raw, 3);
}

static int read_escape(reader *r)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (r->p == r->end) return wrong(r, "unfinished string");
    uint8_t c = *r->p;
    if (c == 'u') {
        r->p++;
        return read_unicode(r);
    }
    const char *at = c ? strchr(from, c) : NULL;
    if (!at) return wrong(r, "unknown escape");
    r->p++;
    return dm_buf_byte(&r->scratch, (uint8_t)to[at - from]);
}

static int read_string(reader *r)
{
    r->p++;
    dm_buf_clear(&r->scratch);
    for (;;) {
        const uint8_t *s = r->p;
        while (r->p < r->end && *r->p != '"' && *r->p != '\\' && *r->p >= 0x20) r->p++;
        int rc = dm_buf_append(&r->scratch, s, (size_t)(r->p - s));
        if (rc < 0) return rc;
        if (r->p == r->end) return wrong(r, "unfinished string");
        if (*r->p == '"') break;
        if (*r->p < 0x20) return wrong(r, "control character inside a string");
        r->p++;
        if ((rc = read_escape(r)) < 0) return rc;
    }
    r->p++;
    return push_text(r, PJ_STR);
}

/* Lone surrogates to U+FFFD, in place: both are three bytes. */
static void mend(const pj_val *v)
{
    char *s = (char *)(uintptr_t)v->s; /* the document's own bytes */
    for (uint32_t i = 0; i + 2 < v->n; i++)
        if ((uint8_t)s[i] == 0xED && (uint8_t)s[i + 1] >= 0xA0) memcpy(s + i, "\xEF\xBF\xBD", 3);
}

/* ---- numbers ---- */

static const uint8_t *digits(const uint8_t *p, const uint8_t *end)
{
    while (p < end && *p >= '0' && *p <= '9') p++;
    return p;
}

/* The digits of [whole, frac) and [frac, exp) as one integer and an adjusted exponent: no decimal point is
 * involved, whatever the locale calls it. */
static int push_float(reader *r, const uint8_t *start, const uint8_t *dot, const uint8_t *exp, const uint8_t *end)
{
    long long e10 = 0;
    bool minus = false;
    const uint8_t *p = exp;
    if (p < end) {
        p++;
        if (*p == '+' || *p == '-') minus = *p++ == '-';
        for (; p < end; p++)
            if (e10 < 1000000000000000LL) e10 = e10 * 10 + (*p - '0');
    }
    if (minus) e10 = -e10;
    dm_buf_clear(&r->scratch);
    int rc = dm_buf_append(&r->scratch, start, (size_t)(dot - start));
    if (rc == 0 && dot < exp) {
        rc = dm_buf_append(&r->scratch, dot + 1, (size_t)(exp - dot - 1));
        e10 -= exp - dot - 1;
    }
    if (rc == 0) rc = dm_buf_printf(&r->scratch, "e%lld", e10);
    if (rc < 0) return rc;
    return push(r, (pj_val){.kind = PJ_FLOAT, .f = strtod(dm_buf_cstr(&r->scratch), NULL)});
}

static int read_number(reader *r)
{
    const uint8_t *start = r->p, *p = r->p, *end = r->end;
    if (*p == '-') p++;
    if (p == end || *p < '0' || *p > '9') return wrong(r, "expected a value");
    p = *p == '0' ? p + 1 : digits(p, end);
    const uint8_t *dot = p, *exp;
    if (end - p >= 2 && *p == '.' && digits(p + 1, end) > p + 1) p = digits(p + 1, end);
    exp = p;
    if (p < end && (*p == 'e' || *p == 'E')) {
        const uint8_t *q = p + 1;
        if (q < end && (*q == '+' || *q == '-')) q++;
        if (digits(q, end) > q) p = digits(q, end);
    }
    r->p = p;
    if (p != dot) return push_float(r, start, dot, exp, p);
    if (p - start == 2 && start[0] == '-' && start[1] == '0') start++;
    dm_buf_clear(&r->scratch);
    int rc = dm_buf_append(&r->scratch, start, (size_t)(p - start));
    return rc < 0 ? rc : push_text(r, PJ_INT);
}

/* ---- lists and dicts ---- */

static void skip_space(reader *r)
{
    while (r->p < r->end && (*r->p == ' ' || *r->p == '\n' || *r->p == '\t' || *r->p == '\r')) r->p++;
}

/* Moves the values from stack[base] on into the document. */
static int move_down(reader *r, size_t base, const pj_val **out)
{
    size_t n = r->top - base;
    *out = NULL;
    if (n) {
        pj_val *v = take(r->doc, n * sizeof *v);
        if (!v) return DM_ENOMEM;
        memcpy(v, r->stack + base, n * sizeof *v);
        *out = v;
    }
    r->top = base;
    return 0;
}

static int read_list(reader *r)
{
    size_t base = r->top;
    r->p++;
    skip_space(r);
    if (r->p < r->end && *r->p == ']') {
        r->p++;
        return push(r, (pj_val){.kind = PJ_LIST});
    }
    for (;;) {
        int rc = read_value(r);
        if (rc < 0) return rc;
        skip_space(r);
        if (r->p == r->end) return wrong(r, "unfinished list");
        uint8_t c = *r->p;
        if (c != ',' && c != ']') return wrong(r, "expected ',' or ']'");
        r->p++;
        if (c == ']') break;
    }
    pj_val list = {.kind = PJ_LIST, .n = (uint32_t)(r->top - base)};
    int rc = move_down(r, base, &list.items);
    return rc < 0 ? rc : push(r, list);
}

static int key_order(const pj_val *a, const pj_val *b)
{
    int c = memcmp(a->s, b->s, a->n < b->n ? a->n : b->n);
    return c ? c : (a->n > b->n) - (a->n < b->n);
}

static int key_index_order(const void *a, const void *b, void *ctx)
{
    const pj_pair *pairs = ctx;
    uint32_t i = *(const uint32_t *)a, j = *(const uint32_t *)b;
    int c = key_order(&pairs[i].key, &pairs[j].key);
    return c ? c : (i > j) - (i < j);
}

/* Of equal keys the last value moves to the first place; returns how many pairs are left.  Sorting an index keeps
 * this at n log n for a dict made to hurt. */
static int64_t merge_equal_keys(pj_pair *pairs, size_t n)
{
    if (n < 2) return (int64_t)n;
    uint32_t *order = dm_malloc(n * sizeof *order);
    if (!order) return DM_ENOMEM;
    for (uint32_t i = 0; i < n; i++) order[i] = i;
    qsort_r(order, n, sizeof *order, key_index_order, pairs);
    bool found = false;
    for (size_t i = 0, j; i < n; i = j) {
        for (j = i + 1; j < n && key_order(&pairs[order[i]].key, &pairs[order[j]].key) == 0; j++) {
            pairs[order[i]].val = pairs[order[j]].val;
            pairs[order[j]].key.s = NULL;
            found = true;
        }
    }
    dm_free(order);
    if (!found) return (int64_t)n;
    size_t kept = 0;
    for (size_t i = 0; i < n; i++)
        if (pairs[i].key.s) pairs[kept++] = pairs[i];
    return (int64_t)kept;
}

static int read_pair(reader *r)
{
    skip_space(r);
    if (r->p == r->end || *r->p != '"') return wrong(r, "expected a key in double quotes");
    int rc = read_string(r);
    if (rc < 0) return rc;
    skip_space(r);
    if (r->p == r->end || *r->p != ':') return wrong(r, "expected ':'");
    r->p++;
    return read_value(r);
}

static int close_dict(reader *r, size_t base)
{
    pj_val dict = {.kind = PJ_DICT};
    /* Pairs lie on the stack as key, value, key, value: the layout of pj_pair. */
    _Static_assert(sizeof(pj_pair) == 2 * sizeof(pj_val), "a pair is two values");
    pj_pair *pairs = (pj_pair *)(r->stack + base);
    int64_t n = merge_equal_keys(pairs, (r->top - base) / 2);
    if (n < 0) return (int)n;
    for (int64_t i = 0; r->lone && i < n; i++) mend(&pairs[i].key);
    r->top = base + (size_t)n * 2;
    dict.n = (uint32_t)n;
    const pj_val *moved;
    int rc = move_down(r, base, &moved);
    if (rc < 0) return rc;
    dict.pairs = (const pj_pair *)moved;
    return push(r, dict);
}

static int read_dict(reader *r)
{
    size_t base = r->top;
    r->p++;
    skip_space(r);
    if (r->p < r->end && *r->p == '}') {
        r->p++;
        return push(r, (pj_val){.kind = PJ_DICT});
    }
    for (;;) {
        int rc = read_pair(r);
        if (rc < 0) return rc;
        skip_space(r);
        if (r->p == r->end) return wrong(r, "unfinished object");
        uint8_t c = *r->p;
        if (c != ',' && c != '}') return wrong(r, "expected ',' or '}'");
        r->p++;
        if (c == '}') return close_dict(r, base);
    }
}

/* ---- values ---- */

static bool word(reader *r, const char *w)
{
    size_t n = strlen(w);
    if ((size_t)(r->end - r->p) < n || memcmp(r->p, w, n) != 0) return false;
    r->p += n;
    return true;
}

static int read_word(reader *r)
{
    if (word(r, "null")) return push(r, (pj_val){.kind = PJ_NULL});
    if (word(r, "true")) return push(r, (pj_val){.kind = PJ_TRUE});
    if (word(r, "false")) return push(r, (pj_val){.kind = PJ_FALSE});
    if (word(r, "NaN")) return push(r, (pj_val){.kind = PJ_FLOAT, .f = __builtin_nan("")});
    if (word(r, "Infinity")) return push(r, (pj_val){.kind = PJ_FLOAT, .f = __builtin_inf()});
    if (word(r, "-Infinity")) return push(r, (pj_val){.kind = PJ_FLOAT, .f = -__builtin_inf()});
    return read_number(r);
}

static int read_value(reader *r)
{
    skip_space(r);
    if (r->p == r->end) return wrong(r, "expected a value");
    uint8_t c = *r->p;
    if (c == '"') {
        int rc = read_string(r);
        if (rc == 0 && r->lone) mend(&r->stack[r->top - 1]);
        return rc;
    }
    if (c != '[' && c != '{') return read_word(r);
    if (r->depth == PJ_DEPTH_MAX)
        return dm_err_set(r->err, DM_ELIMIT, "json", "nested deeper than %d at byte %zu", PJ_DEPTH_MAX, (size_t)(r->p - r->text));
    r->depth++;
    int rc = c == '[' ? read_list(r) : read_dict(r);
    r->depth--;
    return rc;
}

int pj_read(pj_doc *d, const char *text, size_t n, dm_err *e)
{
    memset(d, 0, sizeof *d);
    if (n > PJ_BYTES_MAX) return dm_err_set(e, DM_ELIMIT, "json", "a text of %zu bytes is longer than %zu", n, PJ_BYTES_MAX);
    if (!dm_utf8_valid(text, n)) return dm_err_set(e, DM_EFORMAT, "json", "the text is not valid UTF-8");
    reader r = {.doc = d, .text = (const uint8_t *)text, .p = (const uint8_t *)text, .end = (const uint8_t *)text + n, .err = e};
    int rc = read_value(&r);
    if (rc == 0) {
        skip_space(&r);
        if (r.p != r.end) rc = wrong(&r, "something follows the value");
    }
    if (rc == 0) d->root = r.stack[0];
    if (rc == DM_ENOMEM) dm_err_set(e, rc, "json", "out of memory");
    dm_free(r.stack);
    dm_buf_free(&r.scratch);
    if (rc < 0) pj_free(d);
    return rc;
}
