/* Logging: one line at a time to the sink that main set. */
#include "base.h"

static dm_log_fn sink;
static void *sink_ctx;
static dm_log_level sink_level;

void dm_log_set(dm_log_fn fn, void *ctx, dm_log_level max_level)
{
    sink = fn;
    sink_ctx = ctx;
    sink_level = max_level;
}

void dm_log(dm_log_level level, const char *fmt, ...)
{
    if (!sink || level > sink_level) return;
    char line[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    line[dm_utf8_whole(line, __builtin_strlen(line))] = 0;
    for (char *p = line; *p; p++)
        if (*p == '\n' || *p == '\r') *p = ' ';
    sink(sink_ctx, level, line);
}
