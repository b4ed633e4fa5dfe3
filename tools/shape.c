/* Any bytes -> text that can be shown to a model: valid UTF-8, no NUL, no escape codes, at most so many bytes with the
 * head and the tail kept.  The same input gives the same text however it was split.
 *
 *   bytes -> escape sequences removed -> lines settled (CR, BS) -> UTF-8 mended -> head + ring for the tail
 *
 * A progress bar rewrites its line by CR: only the last version is kept, as a person would see it. */
#include <stdlib.h>
#include <string.h>

#include "tools/tools_int.h"

enum { NOTE_ROOM = 160 }; /* for the sentence between head and tail, without the path */

void shaper_init(shaper *s, size_t max, bool terminal) { *s = (shaper){.max = max < 2 * NOTE_ROOM ? 2 * NOTE_ROOM : max, .terminal = terminal}; }

void shaper_free(shaper *s) {
    dm_buf_free(&s->line);
    dm_buf_free(&s->head);
    dm_free(s->ring);
    *s = (shaper){0};
}

/* ---- settled text ------------------------------------------------------------------------------------------------ */

static size_t tail_cap(const shaper *s) { return s->max / 2; }

static int ring_add(shaper *s, const uint8_t *p, size_t n) {
    const size_t cap = tail_cap(s);
    if (!s->ring && !(s->ring = dm_malloc(cap))) return DM_ENOMEM;
    if (n > cap) p += n - cap, n = cap;
    while (n > 0) {
        const size_t part = n < cap - s->ring_at ? n : cap - s->ring_at;
        memcpy(s->ring + s->ring_at, p, part);
        s->ring_at = (s->ring_at + part) % cap;
        s->ring_n = s->ring_n + part < cap ? s->ring_n + part : cap;
        p += part, n -= part;
    }
    return 0;
}

static int settle_text(shaper *s, const uint8_t *p, size_t n) {
    s->total += n;
    const size_t room = s->max - s->head.n, part = n < room ? n : room;
    int rc = part ? dm_buf_append(&s->head, p, part) : 0;
    return rc == 0 && n > part ? ring_add(s, p + part, n - part) : rc;
}

static bool ascii(const uint8_t *p, size_t n) {
    uint8_t any = 0;
    for (size_t i = 0; i < n; i++) any |= p[i];
    return any < 0x80;
}

/* Moves the first n bytes of the line out, mended. */
static int settle(shaper *s, size_t n) {
    dm_buf clean = {0};
    int64_t rc = 0;
    if (ascii(s->line.p, n)) {
        rc = settle_text(s, s->line.p, n);
    } else {
        rc = dm_utf8_clean(&clean, s->line.p, n);
        if (rc >= 0) rc = settle_text(s, clean.p, clean.n);
    }
    dm_buf_free(&clean);
    dm_buf_consume(&s->line, n);
    return rc < 0 ? (int)rc : 0;
}

/* ---- one byte ------------------------------------------------------------------------------------------------------ */

/* A terminal overstrikes: "a BS a" is a bold a, "_ BS a" an underlined one. */
static void backspace(shaper *s) {
    while (s->line.n > 0 && (s->line.p[s->line.n - 1] & 0xc0) == 0x80) s->line.n--;
    if (s->line.n > 0) s->line.n--;
}

static int newline(shaper *s) {
    s->cr = false;
    int rc = dm_buf_byte(&s->line, '\n');
    return rc < 0 ? rc : settle(s, s->line.n);
}

static int plain(shaper *s, uint8_t c) {
    if (c == '\n') return newline(s);
    if (c == '\r') {
        int rc = s->cr && !s->terminal ? newline(s) : 0;
        s->cr = true;
        return rc;
    }
    if (c == '\b' && s->terminal) {
        backspace(s);
        return 0;
    }
    if ((c < 0x20 && c != '\t') || c == 0x7f) return 0;
    if (s->cr && s->terminal) dm_buf_clear(&s->line);
    if (s->cr && !s->terminal) {
        int rc = newline(s);
        if (rc < 0) return rc;
    }
    s->cr = false;
    int rc = dm_buf_byte(&s->line, c);
    /* C1 controls are two bytes in UTF-8; one of them opens a sequence as ESC [ does. */
    if (rc == 0 && s->line.n >= 2 && s->line.p[s->line.n - 2] == 0xc2 && c >= 0x80 && c < 0xa0) {
        s->line.n -= 2;
        s->escape = c == 0x9b ? ESC_CSI : c == 0x9d || c == 0x90 ? ESC_STRING : ESC_NONE;
        s->escape_n = 0;
    }
    if (rc == 0 && s->line.n >= SHAPE_LINE_MAX) rc = settle(s, dm_utf8_whole(s->line.p, s->line.n));
    return rc;
}

/* A sequence that is broken or without end must not swallow the text after it. */
static int escaped(shaper *s, uint8_t c) {
    if (++s->escape_n > SHAPE_ESCAPE_MAX || c == '\n') {
        s->escape = ESC_NONE;
        return plain(s, c);
    }
    switch (s->escape) {
    case ESC_START:
        if (c == '[') s->escape = ESC_CSI;
        else if (c == ']' || c == 'P' || c == 'X' || c == '^' || c == '_') s->escape = ESC_STRING;
        else if (c >= 0x20 && c < 0x30) s->escape = ESC_INTERMEDIATE;
        else if (c == 0x1b) s->escape = ESC_START;
        else s->escape = ESC_NONE;
        return c < 0x80 ? 0 : plain(s, c);
    case ESC_INTERMEDIATE:
        if (c < 0x20 || c >= 0x30) s->escape = ESC_NONE;
        return 0;
    case ESC_CSI:
        if (c >= 0x40 && c < 0x7f) s->escape = ESC_NONE;
        else if (c == 0x1b) s->escape = ESC_START;
        else if (c < 0x20 || c > 0x7f || s->escape_n > 64) {
            s->escape = ESC_NONE;
            return plain(s, c);
        }
        return 0;
    case ESC_STRING:
        if (c == 0x07) s->escape = ESC_NONE;
        else if (c == 0x1b) s->escape = ESC_STRING_ESC;
        return 0;
    default: /* ESC_STRING_ESC: ESC \ ends the string, any other is a new sequence */
        s->escape = ESC_START;
        if (c == '\\') s->escape = ESC_NONE;
        return c == '\\' ? 0 : escaped(s, c);
    }
}

/* A run of ordinary characters, as many as the line takes: nearly all output is that. */
static size_t plain_run(const shaper *s, const uint8_t *p, size_t n) {
    size_t i = 0;
    if (s->escape != ESC_NONE || s->cr || s->line.n >= SHAPE_LINE_MAX) return 0;
    if (n > SHAPE_LINE_MAX - 1 - s->line.n) n = SHAPE_LINE_MAX - 1 - s->line.n;
    while (i < n && p[i] >= 0x20 && p[i] < 0x7f) i++;
    return i;
}

int shaper_feed(shaper *s, const void *p, size_t n) {
    const uint8_t *b = p;
    int rc = 0;
    s->fed += n;
    for (size_t i = 0; rc == 0 && i < n; i++) {
        const size_t run = plain_run(s, b + i, n - i);
        if (run > 0) {
            rc = dm_buf_append(&s->line, b + i, run);
            i += run;
            if (rc < 0 || i == n) break;
        }
        if (s->escape != ESC_NONE) rc = escaped(s, b[i]);
        else if (b[i] == 0x1b) s->escape = ESC_START, s->escape_n = 0;
        else rc = plain(s, b[i]);
    }
    return rc;
}

/* ---- the result ------------------------------------------------------------------------------------------------------ */

/* How much of p[0..n) to keep so that it ends with a whole line if one ends near, else with a whole character. */
static size_t head_cut(const uint8_t *p, size_t n) {
    for (size_t i = n; i > 0 && n - i < 400; i--)
        if (p[i - 1] == '\n') return i;
    while (n > 0 && (p[n] & 0xc0) == 0x80) n--;
    return n;
}

/* How much of p[0..n) to skip, by the same rule. */
static size_t tail_cut(const uint8_t *p, size_t n) {
    for (size_t i = 0; i < n && i < 400; i++)
        if (p[i] == '\n' && i + 1 < n) return i + 1;
    size_t i = 0;
    while (i < n && (p[i] & 0xc0) == 0x80) i++;
    return i;
}

/* Everything after head[0..at), as far as it is still known: the rest of the head and the ring, in order. */
static int tail_text(const shaper *s, size_t keep, dm_buf *out) {
    const size_t cap = tail_cap(s);
    dm_buf all = {0};
    int rc = 0;
    if (s->ring_n < cap) rc = dm_buf_append(&all, s->head.p, s->head.n);
    if (rc == 0 && s->ring_n == cap) rc = dm_buf_append(&all, s->ring + s->ring_at, cap - s->ring_at);
    if (rc == 0) rc = dm_buf_append(&all, s->ring, s->ring_n == cap ? s->ring_at : s->ring_n);
    if (rc == 0) {
        const size_t skip = all.n > keep ? all.n - keep : 0;
        rc = dm_buf_append(out, all.p + skip, all.n - skip);
    }
    dm_buf_free(&all);
    return rc;
}

static int cut_result(shaper *s, dm_buf *out, const char *whole) {
    const size_t whole_n = whole ? strlen(whole) : 0;
    const size_t note = NOTE_ROOM + (whole_n < s->max / 4 ? whole_n : 0);
    const size_t half = (s->max - note) / 2;
    dm_buf tail = {0};
    int rc = tail_text(s, half, &tail);
    const size_t head = head_cut(s->head.p, half), skip = rc == 0 ? tail_cut(tail.p, tail.n) : 0;
    if (rc == 0) rc = dm_buf_append(out, s->head.p, head);
    const unsigned long long left_out = (unsigned long long)(s->total - head - (tail.n - skip));
    const char *lead = head > 0 && s->head.p[head - 1] == '\n' ? "" : "\n";
    if (rc == 0 && whole_n && whole_n < s->max / 4) rc = dm_buf_printf(out, "%s[%llu bytes left out here; the whole output is in %s]\n", lead, left_out, whole);
    else if (rc == 0) rc = dm_buf_printf(out, "%s[%llu bytes left out here]\n", lead, left_out);
    if (rc == 0) rc = dm_buf_append(out, tail.p + skip, tail.n - skip);
    dm_buf_free(&tail);
    return rc;
}

int shaper_end(shaper *s, dm_buf *out, bool *cut, const char *whole) {
    int rc = 0;
    if (s->cr && !s->terminal) rc = newline(s);
    if (rc == 0) rc = settle(s, s->line.n);
    *cut = s->total > s->max;
    if (rc < 0) return rc;
    return *cut ? cut_result(s, out, whole) : dm_buf_append(out, s->head.p, s->head.n);
}

int dm_tool_shape(const void *p, size_t n, size_t max_bytes, dm_buf *out, bool *cut) {
    shaper s;
    bool was_cut = false;
    shaper_init(&s, max_bytes, true);
    int rc = shaper_feed(&s, p, n);
    if (rc == 0) rc = shaper_end(&s, out, &was_cut, NULL);
    shaper_free(&s);
    if (cut) *cut = was_cut;
    return rc;
}
