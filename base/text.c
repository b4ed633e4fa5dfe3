/* UTF-8, hexadecimal and small text helpers. */
#include "base.h"

#include <limits.h>
#include <string.h>

/* Length that the lead byte announces; 0 for a byte that cannot lead. */
static size_t lead_length(uint8_t c)
{
    if (c < 0x80) return 1;
    if (c >= 0xC2 && c <= 0xDF) return 2;
    if (c >= 0xE0 && c <= 0xEF) return 3;
    if (c >= 0xF0 && c <= 0xF4) return 4;
    return 0;
}

/* May c be the second byte behind this lead?  Shuts out overlong forms, surrogates and > U+10FFFF. */
static bool second_ok(uint8_t lead, uint8_t c)
{
    switch (lead) {
    case 0xE0: return c >= 0xA0 && c <= 0xBF;
    case 0xED: return c >= 0x80 && c <= 0x9F;
    case 0xF0: return c >= 0x90 && c <= 0xBF;
    case 0xF4: return c >= 0x80 && c <= 0x8F;
    default: return c >= 0x80 && c <= 0xBF;
    }
}

/* Bytes at p that form a valid character or the start of one: *want is its full length (0: bad lead). */
static size_t scan(const uint8_t *p, size_t n, size_t *want)
{
    *want = n ? lead_length(p[0]) : 0;
    if (!*want) return 0;
    size_t i = 1;
    while (i < *want && i < n && (i == 1 ? second_ok(p[0], p[1]) : (p[i] & 0xC0) == 0x80)) i++;
    return i;
}

size_t dm_utf8_next(const uint8_t *p, size_t n, uint32_t *cp)
{
    size_t want, got = scan(p, n, &want);
    if (!want || got < want) return 0;
    uint32_t c = want == 1 ? p[0] : p[0] & (0xFFu >> (want + 1));
    for (size_t i = 1; i < want; i++) c = c << 6 | (p[i] & 0x3F);
    *cp = c;
    return want;
}

bool dm_utf8_valid(const void *p, size_t n)
{
    const uint8_t *s = p;
    while (n) {
        uint32_t cp;
        size_t k = *s < 0x80 ? 1 : dm_utf8_next(s, n, &cp);
        if (!k) return false;
        s += k;
        n -= k;
    }
    return true;
}

int64_t dm_utf8_clean(dm_buf *out, const void *p, size_t n)
{
    const uint8_t *s = p;
    int64_t bad = 0;
    size_t start = out->n, from = 0, i = 0;
    int rc = 0;
    while (i < n && rc == 0) {
        size_t want, got = scan(s + i, n - i, &want);
        if (want && got == want) {
            i += got;
            continue;
        }
        rc = dm_buf_append(out, s + from, i - from);
        if (rc == 0) rc = dm_buf_append(out, "\xEF\xBF\xBD", 3);
        i += got ? got : 1; /* the maximal invalid part counts once */
        from = i;
        bad++;
    }
    if (rc == 0) rc = dm_buf_append(out, s + from, n - from);
    if (rc < 0) {
        out->n = start; /* as it was */
        if (out->p) out->p[start] = 0;
        return rc;
    }
    return bad;
}

size_t dm_utf8_whole(const void *p, size_t n)
{
    const uint8_t *s = p;
    /* Look at the last lead byte within three bytes of the end. */
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        if ((s[n - back] & 0xC0) == 0x80) continue;
        size_t want, got = scan(s + n - back, back, &want);
        return want && got == back && got < want ? n - back : n;
    }
    return n;
}

int dm_utf8_put(dm_buf *out, uint32_t cp)
{
    uint8_t b[4];
    size_t n;
    if (cp > 0x10FFFF || (cp >= 0xD800 && cp <= 0xDFFF)) cp = 0xFFFD;
    if (cp < 0x80) b[0] = (uint8_t)cp, n = 1;
    else if (cp < 0x800) b[0] = (uint8_t)(0xC0 | cp >> 6), b[1] = (uint8_t)(0x80 | (cp & 63)), n = 2;
    else if (cp < 0x10000) {
        b[0] = (uint8_t)(0xE0 | cp >> 12), b[1] = (uint8_t)(0x80 | (cp >> 6 & 63)), b[2] = (uint8_t)(0x80 | (cp & 63));
        n = 3;
    } else {
        b[0] = (uint8_t)(0xF0 | cp >> 18), b[1] = (uint8_t)(0x80 | (cp >> 12 & 63));
        b[2] = (uint8_t)(0x80 | (cp >> 6 & 63)), b[3] = (uint8_t)(0x80 | (cp & 63));
        n = 4;
    }
    return dm_buf_append(out, b, n);
}

void dm_hex(char *out, const void *p, size_t n)
{
    static const char digit[] = "0123456789abcdef";
    const uint8_t *s = p;
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = digit[s[i] >> 4];
        out[2 * i + 1] = digit[s[i] & 15];
    }
    out[2 * n] = 0;
}

static int nibble(char c)
{
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

bool dm_unhex(void *out, const char *hex, size_t n)
{
    uint8_t *d = out;
    for (size_t i = 0; i < n; i++) {
        int hi = nibble(hex[2 * i]), lo = hi < 0 ? -1 : nibble(hex[2 * i + 1]);
        if (lo < 0) return false;
        d[i] = (uint8_t)(hi << 4 | lo);
    }
    return true;
}

bool dm_str_prefix(const char *s, const char *prefix) { return strncmp(s, prefix, strlen(prefix)) == 0; }

char *dm_bytes_text(char *out, size_t cap, uint64_t bytes)
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes;
    size_t u = 0;
    while (v >= 1024 && u + 1 < DM_COUNT(unit)) v /= 1024, u++;
    snprintf(out, cap, v < 10 && u ? "%.1f %s" : "%.0f %s", v, unit[u]);
    return out;
}

int dm_text_distance(const char *a, size_t na, const char *b, size_t nb)
{
    int row[DM_TEXT_WORD + 1];
    if (na > DM_TEXT_WORD || nb > DM_TEXT_WORD) return INT_MAX;
    for (size_t j = 0; j <= nb; j++) row[j] = (int)j;
    for (size_t i = 1; i <= na; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= nb; j++) {
            int up = row[j], best = diagonal + (a[i - 1] != b[j - 1]);
            if (up + 1 < best) best = up + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            row[j] = best;
            diagonal = up;
        }
    }
    return row[nb];
}
