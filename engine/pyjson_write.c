/* The writer: json.dumps(x, ensure_ascii=False). */
#include "engine/pyjson_int.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/engine.h"

/* A number as `digits` with a decimal point in front, times 10^point. */
typedef struct decimal {
    char digits[24];
    int n, point;
} decimal;

/* m · 10^e10 as a decimal without trailing zeros; true if it reads back as f. */
static bool try_decimal(decimal *d, uint64_t m, int e10, double f)
{
    char text[48];
    d->n = snprintf(d->digits, sizeof d->digits, "%llu", (unsigned long long)m);
    d->point = d->n + e10;
    while (d->n > 1 && d->digits[d->n - 1] == '0') d->n--;
    snprintf(text, sizeof text, "%llue%d", (unsigned long long)m, e10);
    return strtod(text, NULL) == f;
}

/* Fewest digits that read back as f > 0.  The nearest decimal of that length usually does it; at powers of two,
 * where the gap below is half the gap above, the next one up can read back although the nearest does not. */
static void shortest(decimal *d, double f)
{
    for (int digits = 1; digits <= 17; digits++) {
        char text[40];
        snprintf(text, sizeof text, "%.*e", digits - 1, f);
        uint64_t m = 0;
        const char *p = text;
        for (; *p != 'e'; p++) /* skips the decimal point, whatever the locale calls it */
            if (*p >= '0' && *p <= '9') m = m * 10 + (uint64_t)(*p - '0');
        int e10 = (int)strtol(p + 1, NULL, 10) - (digits - 1);
        if (try_decimal(d, m, e10, f)) return;
        if (digits < 17 && try_decimal(d, m + 1, e10, f)) return;
    }
}

static int write_exponent(const decimal *d, dm_buf *out)
{
    int rc = dm_buf_byte(out, (uint8_t)d->digits[0]);
    if (rc == 0 && d->n > 1) rc = dm_buf_printf(out, ".%.*s", d->n - 1, d->digits + 1);
    int e10 = d->point - 1;
    return rc < 0 ? rc : dm_buf_printf(out, "e%c%02d", e10 < 0 ? '-' : '+', abs(e10));
}

static int write_fixed(const decimal *d, dm_buf *out)
{
    if (d->point <= 0) return dm_buf_printf(out, "0.%.*s%.*s", -d->point, "000000", d->n, d->digits);
    if (d->point >= d->n) return dm_buf_printf(out, "%.*s%.*s.0", d->n, d->digits, d->point - d->n, "0000000000000000");
    return dm_buf_printf(out, "%.*s.%.*s", d->point, d->digits, d->n - d->point, d->digits + d->point);
}

static int write_float(double f, dm_buf *out)
{
    if (isnan(f)) return dm_buf_str(out, "NaN");
    if (signbit(f)) {
        int rc = dm_buf_byte(out, '-');
        if (rc < 0) return rc;
        f = -f;
    }
    if (isinf(f)) return dm_buf_str(out, "Infinity");
    if (f == 0) return dm_buf_str(out, "0.0");
    decimal d = {.n = 0};
    shortest(&d, f);
    return d.point > 16 || d.point < -3 ? write_exponent(&d, out) : write_fixed(&d, out);
}

static int write_escape(uint8_t c, dm_buf *out)
{
    switch (c) {
    case '"': return dm_buf_str(out, "\\\"");
    case '\\': return dm_buf_str(out, "\\\\");
    case '\n': return dm_buf_str(out, "\\n");
    case '\r': return dm_buf_str(out, "\\r");
    case '\t': return dm_buf_str(out, "\\t");
    case '\b': return dm_buf_str(out, "\\b");
    case '\f': return dm_buf_str(out, "\\f");
    default: return dm_buf_printf(out, "\\u%04x", c);
    }
}

int pj_escape(const char *s, size_t n, dm_buf *out)
{
    const char *end = s + n;
    while (s < end) {
        const char *p = s;
        while (p < end && (uint8_t)*p >= 0x20 && *p != '"' && *p != '\\') p++;
        int rc = dm_buf_append(out, s, (size_t)(p - s));
        if (rc == 0 && p < end) rc = write_escape((uint8_t)*p++, out);
        if (rc < 0) return rc;
        s = p;
    }
    return 0;
}

int pj_write_str(const char *s, size_t n, dm_buf *out)
{
    int rc = dm_buf_byte(out, '"');
    if (rc == 0) rc = pj_escape(s, n, out);
    return rc < 0 ? rc : dm_buf_byte(out, '"');
}

static int write_dict(const pj_val *v, dm_buf *out)
{
    int rc = dm_buf_byte(out, '{');
    for (uint32_t i = 0; rc == 0 && i < v->n; i++) {
        if (i) rc = dm_buf_append(out, ", ", 2);
        if (rc == 0) rc = pj_write_str(v->pairs[i].key.s, v->pairs[i].key.n, out);
        if (rc == 0) rc = dm_buf_append(out, ": ", 2);
        if (rc == 0) rc = pj_write(&v->pairs[i].val, out);
    }
    return rc < 0 ? rc : dm_buf_byte(out, '}');
}

static int write_list(const pj_val *v, dm_buf *out)
{
    int rc = dm_buf_byte(out, '[');
    for (uint32_t i = 0; rc == 0 && i < v->n; i++) {
        if (i) rc = dm_buf_append(out, ", ", 2);
        if (rc == 0) rc = pj_write(&v->items[i], out);
    }
    return rc < 0 ? rc : dm_buf_byte(out, ']');
}

int pj_write(const pj_val *v, dm_buf *out)
{
    switch (v->kind) {
    case PJ_NULL: return dm_buf_str(out, "null");
    case PJ_FALSE: return dm_buf_str(out, "false");
    case PJ_TRUE: return dm_buf_str(out, "true");
    case PJ_INT: return dm_buf_append(out, v->s, v->n);
    case PJ_FLOAT: return write_float(v->f, out);
    case PJ_STR: return pj_write_str(v->s, v->n, out);
    case PJ_LIST: return write_list(v, out);
    case PJ_DICT: return write_dict(v, out);
    }
    return DM_EINVAL;
}

bool pj_finite(const pj_val *v)
{
    if (v->kind == PJ_FLOAT) return isfinite(v->f);
    if (v->kind == PJ_LIST)
        for (uint32_t i = 0; i < v->n; i++)
            if (!pj_finite(&v->items[i])) return false;
    if (v->kind == PJ_DICT)
        for (uint32_t i = 0; i < v->n; i++)
            if (!pj_finite(&v->pairs[i].val)) return false;
    return true;
}

/* ---- looking at values ---- */

const pj_val *pj_get(const pj_val *dict, const char *key)
{
    size_t n = strlen(key);
    if (dict->kind != PJ_DICT) return NULL;
    for (uint32_t i = 0; i < dict->n; i++)
        if (dict->pairs[i].key.n == n && memcmp(dict->pairs[i].key.s, key, n) == 0) return &dict->pairs[i].val;
    return NULL;
}

bool pj_is(const pj_val *v, const char *text)
{
    return v && v->kind == PJ_STR && v->n == strlen(text) && memcmp(v->s, text, v->n) == 0;
}

const char *pj_kind_name(const pj_val *v)
{
    static const char *const names[] = {"null", "false", "true", "an integer", "a number", "a string", "a list", "an object"};
    return v ? names[v->kind] : "missing";
}

int dm_json_python(const char *text, size_t n, dm_buf *out, dm_err *e)
{
    pj_doc d;
    int rc = pj_read(&d, text, n, e);
    if (rc < 0) return rc;
    size_t before = out->n;
    rc = pj_write(&d.root, out);
    pj_free(&d);
    if (rc < 0) {
        out->n = before;
        return dm_err_set(e, rc, "json", "out of memory");
    }
    return 0;
}
