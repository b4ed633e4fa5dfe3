/* stop.c — finding stop strings in text that comes in pieces.
 *
 * For each string the length of its longest beginning that the text ends with is kept (Knuth, Morris, Pratt).  The longest of these
 * over all strings is what must be held back; all before it can be shown.  Strings are whole characters, so what is held back begins
 * with one, and what is let out ends with one. */
#include <string.h>

#include "engine/engine.h"

typedef struct needle {
    char *text; /* owned */
    int n;
    int *back;  /* [n] owned: back[i] = longest proper beginning of the first i + 1 bytes that is also their end */
    int at;     /* bytes of it that the text ends with */
} needle;

struct dm_stop {
    needle *s; /* [n] owned */
    size_t n;
    dm_buf held;
    const needle *found;
};

static int add(needle *x, const char *text, size_t i, dm_err *e)
{
    size_t n = strlen(text);
    if (n == 0 || n > DM_STOP_BYTES_MAX) return dm_err_set(e, DM_EINVAL, "stop", "stop string %zu has %zu bytes; 1 to %d are possible", i + 1, n, DM_STOP_BYTES_MAX);
    if (!dm_utf8_valid(text, n)) return dm_err_set(e, DM_EINVAL, "stop", "stop string %zu is not UTF-8", i + 1);
    x->text = dm_strdup(text);
    x->back = dm_calloc(n, sizeof *x->back);
    x->n = (int)n;
    if (!x->text || !x->back) return dm_err_set(e, DM_ENOMEM, "stop", "out of memory");
    for (int k = 1, at = 0; k < x->n; k++) {
        while (at && text[k] != text[at]) at = x->back[at - 1];
        if (text[k] == text[at]) at++;
        x->back[k] = at;
    }
    return 0;
}

int dm_stop_create(dm_stop **out, const char *const *texts, size_t n, dm_err *e)
{
    *out = NULL;
    if (n > DM_STOP_MAX) return dm_err_set(e, DM_EINVAL, "stop", "%zu stop strings; %d are possible", n, DM_STOP_MAX);
    dm_stop *s = dm_calloc(1, sizeof *s);
    if (s) s->s = dm_calloc(n + 1, sizeof *s->s);
    int rc = s && s->s ? 0 : dm_err_set(e, DM_ENOMEM, "stop", "out of memory");
    for (size_t i = 0; i < n && rc == 0; i++) {
        s->n++;
        rc = add(&s->s[i], texts[i], i, e);
    }
    if (rc < 0) {
        dm_stop_destroy(s);
        return rc;
    }
    *out = s;
    return 0;
}

void dm_stop_destroy(dm_stop *s)
{
    if (!s) return;
    for (size_t i = 0; i < s->n; i++) {
        dm_free(s->s[i].text);
        dm_free(s->s[i].back);
    }
    dm_free(s->s);
    dm_buf_free(&s->held);
    dm_free(s);
}

void dm_stop_reset(dm_stop *s)
{
    for (size_t i = 0; i < s->n; i++) s->s[i].at = 0;
    dm_buf_clear(&s->held);
    s->found = NULL;
}

static void step(needle *x, char c)
{
    while (x->at && x->text[x->at] != c) x->at = x->back[x->at - 1];
    if (x->text[x->at] == c) x->at++;
}

int dm_stop_feed(dm_stop *s, const char *p, size_t n, dm_buf *out)
{
    if (s->found) return 1;
    for (size_t i = 0; i < n; i++) {
        int keep = 0;
        for (size_t k = 0; k < s->n; k++) {
            needle *x = &s->s[k];
            step(x, p[i]);
            if (x->at > keep) keep = x->at;
            if (x->at == x->n && (!s->found || x->n > s->found->n)) s->found = x;
        }
        if (dm_buf_byte(&s->held, (uint8_t)p[i]) < 0) return DM_ENOMEM;
        if (s->found) keep = s->found->n;
        size_t show = s->held.n - (size_t)keep;
        if (show && dm_buf_append(out, s->held.p, show) < 0) return DM_ENOMEM;
        if (show) dm_buf_consume(&s->held, show);
        if (s->found) return 1;
    }
    return 0;
}

int dm_stop_border(dm_stop *s, dm_buf *out)
{
    if (s->found) return 0;
    if (s->held.n && dm_buf_append(out, s->held.p, s->held.n) < 0) return DM_ENOMEM;
    dm_stop_reset(s);
    return 0;
}

const char *dm_stop_found(const dm_stop *s) { return s->found ? s->found->text : NULL; }
