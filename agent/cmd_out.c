/* cmd_out.c — standard output and error of the program, and signals before the loop runs. */
#include "agent/cmd_int.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <unistd.h>

static int out_failed; /* the first error of standard output, kept: what was lost must show in the exit status */

static int write_all(int fd, const char *p, size_t n)
{
    while (n) {
        ssize_t k = write(fd, p, n);
        if (k >= 0) {
            p += k;
            n -= (size_t)k;
        } else if (errno == EAGAIN) { /* somebody made the pipe non-blocking */
            struct pollfd w = { .fd = fd, .events = POLLOUT };
            poll(&w, 1, -1);
        } else if (errno != EINTR) {
            return -errno;
        }
    }
    return 0;
}

int out_write(const void *p, size_t n)
{
    if (!out_failed) out_failed = write_all(STDOUT_FILENO, p, n);
    return out_failed;
}

int out_text(const char *s) { return out_write(s, strlen(s)); }

int out_printf(const char *fmt, ...)
{
    dm_buf b = { 0 };
    va_list ap;
    va_start(ap, fmt);
    int rc = dm_buf_vprintf(&b, fmt, ap);
    va_end(ap);
    if (rc == 0) rc = out_write(b.p, b.n);
    dm_buf_free(&b);
    return rc;
}

int out_untrusted(const char *p, size_t n)
{
    if (!isatty(STDOUT_FILENO)) return out_write(p, n);
    dm_buf b = { 0 };
    int rc = 0;
    for (size_t i = 0; i < n && rc == 0; i++) {
        unsigned char c = (unsigned char)p[i], next = i + 1 < n ? (unsigned char)p[i + 1] : 0;
        if (c == 0xC2 && next >= 0x80 && next < 0xA0) i++; /* U+0080..U+009F */
        else if ((c >= 32 && c != 127) || c == '\n' || c == '\t') rc = dm_buf_byte(&b, c);
    }
    if (rc == 0) rc = out_write(b.p, b.n);
    dm_buf_free(&b);
    return rc;
}

int out_json(const json_t *v)
{
    char *text = json_line(v);
    int rc = text ? out_printf("%s\n", text) : DM_ENOMEM; /* one write: a line is never cut by another */
    dm_free(text);
    return rc;
}

void err_printf(const char *fmt, ...)
{
    dm_buf b = { 0 };
    va_list ap;
    va_start(ap, fmt);
    if (dm_buf_vprintf(&b, fmt, ap) == 0) (void)write_all(STDERR_FILENO, (const char *)b.p, b.n);
    va_end(ap);
    dm_buf_free(&b);
}

bool err_is_terminal(void) { return isatty(STDERR_FILENO); }

static void log_line(void *ctx, dm_log_level level, const char *line)
{
    static const char *const names[] = { "error", "warning", "info", "debug" };
    (void)ctx;
    err_printf("dormouse: %s: %s\n", names[level], line);
}

void out_log_to_stderr(bool verbose) { dm_log_set(log_line, NULL, verbose ? DM_LOG_DEBUG : DM_LOG_WARN); }

int read_stdin(size_t max_bytes, dm_buf *out, dm_err *e)
{
    for (;;) {
        char part[16384];
        ssize_t k = read(STDIN_FILENO, part, sizeof part);
        if (k == 0) return 0;
        if (k < 0 && errno == EINTR && signals_caught()) return dm_err_set(e, DM_ECANCELED, "stdin", "interrupted");
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return dm_err_sys(e, errno, "stdin", "standard input");
        if (out->n + (size_t)k > max_bytes) return dm_err_set(e, DM_ELIMIT, "stdin", "standard input is longer than %zu bytes", max_bytes);
        if (dm_buf_append(out, part, (size_t)k) < 0) return dm_err_set(e, DM_ENOMEM, "stdin", "out of memory");
    }
}

/* ---- signals ------------------------------------------------------------------------------------------ */

static volatile sig_atomic_t caught;

static void on_signal(int number) { caught = number; }

void signals_catch(void)
{
    struct sigaction a = { .sa_handler = on_signal }; /* no SA_RESTART: a blocking read ends */
    sigemptyset(&a.sa_mask);
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
    sigaction(SIGHUP, &a, NULL);
}

int signals_caught(void) { return caught; }

void signals_clear(void) { caught = 0; }
