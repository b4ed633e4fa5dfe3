/* The one error vocabulary and the value that carries a failure to a person. */
#include "base.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

const char *dm_err_name(int code)
{
    switch (code) {
    case 0: return "DM_OK";
#define X(name, num, text) case num: return #name;
        DM_ERR_MAP(X)
#undef X
    default: return "DM_E?";
    }
}

const char *dm_err_text(int code)
{
    switch (code) {
    case 0: return "no error";
#define X(name, num, text) case num: return text;
        DM_ERR_MAP(X)
#undef X
    default: return code > -4096 && code < 0 ? strerrordesc_np(-code) : "unknown error";
    }
}

/* One line of text for a person and for JSON: control characters become blanks.  What is quoted may be no text, and a
 * quotation may be cut inside a character: such bytes become '?'. */
static void one_line(char *s)
{
    for (size_t n = strlen(s), len; n; s += len, n -= len) {
        uint32_t cp;
        len = dm_utf8_next((const uint8_t *)s, n, &cp);
        if (!len) *s = '?', len = 1;
        else if (cp < 0x20 || cp == 0x7f) *s = ' ';
    }
}

static void fill(dm_err *e, int code, const char *where, const char *fmt, va_list ap, const char *tail)
{
    if (!e) return;
    e->code = code;
    snprintf(e->where, sizeof e->where, "%s", where ? where : "");
    int n = vsnprintf(e->text, sizeof e->text, fmt, ap);
    if (tail && n >= 0 && (size_t)n < sizeof e->text) snprintf(e->text + n, sizeof e->text - (size_t)n, ": %s", tail);
    /* A cut may fall inside a character: drop the incomplete end. */
    size_t len = dm_utf8_whole(e->text, strlen(e->text));
    e->text[len] = 0;
    one_line(e->text);
}

int dm_err_set(dm_err *e, int code, const char *where, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fill(e, code, where, fmt, ap, NULL);
    va_end(ap);
    return code;
}

int dm_err_sys(dm_err *e, int errno_value, const char *where, const char *fmt, ...)
{
    int code = errno_value > 0 ? -errno_value : DM_EIO;
    va_list ap;
    va_start(ap, fmt);
    fill(e, code, where, fmt, ap, dm_err_text(code));
    va_end(ap);
    return code;
}

int dm_err_prefix(dm_err *e, const char *fmt, ...)
{
    if (!e) return 0;
    dm_err old = *e;
    va_list ap;
    va_start(ap, fmt);
    fill(e, old.code, old.where, fmt, ap, old.text);
    va_end(ap);
    return old.code;
}

_Noreturn void dm_assert_fail(const char *file, int line, const char *what)
{
    dm_log(DM_LOG_ERROR, "%s:%d: broken invariant: %s", file, line, what);
    /* The one place besides main that may write: the process ends here and the sink may be unset. */
    char msg[512];
    int n = snprintf(msg, sizeof msg, "dormouse: %s:%d: broken invariant: %s\n", file, line, what);
    if (n > 0) {
        ssize_t ignored = write(STDERR_FILENO, msg, (size_t)n < sizeof msg ? (size_t)n : sizeof msg - 1);
        (void)ignored;
    }
    abort();
}
