/* cmd.c — the program's commands: the table, help, and what exit statuses mean. */
#include "agent/cmd_int.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* 0 done · 1 agent or model error · 2 usage · 3 not found · 4 paused · 5 budget · 6 sandbox · 7 context full */
int dm_exit_code(int err)
{
    switch (err) {
    case DM_EUSAGE: return 2;
    case DM_ENOENT: return 3;
    case DM_EPAUSED: return 4;
    case DM_EBUDGET: return 5;
    case DM_ESANDBOX: return 6;
    case DM_ECONTEXT: return 7;
    case DM_ECANCELED: return signals_caught() == SIGTERM ? 143 : 130;
    default: return err < 0 ? 1 : 0;
    }
}

int cmd_fail(int rc, const dm_err *e)
{
    const char *text = e && e->text[0] ? e->text : dm_err_text(rc);
    err_printf("dormouse: %s\n", text);
    return dm_exit_code(rc);
}

int cmd_usage(const char *usage, const char *fmt, ...)
{
    char text[400];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    err_printf("dormouse: %s\nUsage: dormouse %s\n", text, usage);
    return dm_exit_code(DM_EUSAGE);
}

int cmd_parse(const char *usage, const char *what, const dm_opt *table, size_t n, void *dst, int argc, char **argv, dm_opt_result *res)
{
    dm_err e = { 0 };
    int rc = dm_opt_parse(table, n, dst, argc, argv, res, &e);
    if (rc < 0) {
        cmd_fail(rc, &e);
        return rc;
    }
    if (!res->help) return 0;
    dm_buf b = { 0 };
    if (dm_buf_printf(&b, "Usage: dormouse %s\n\n%s\n\nOptions:\n", usage, what) == 0 && dm_opt_help(table, n, &b) == 0) out_write(b.p, b.n);
    dm_buf_free(&b);
    dm_free(res->args);
    return 1;
}

/* ---- dispatch --------------------------------------------------------------------------------------------- */

static void print_commands(const cmd *table, size_t n, const char *prefix)
{
    out_printf("Usage: dormouse %s%sCOMMAND …\n\nCommands:\n", prefix, *prefix ? " " : "");
    for (size_t i = 0; i < n; i++) {
        char left[80];
        snprintf(left, sizeof left, "%s %s", table[i].name, table[i].args);
        if (strlen(left) > 30) out_printf("  %s\n  %-30s  %s\n", left, "", table[i].what);
        else out_printf("  %-30s  %s\n", left, table[i].what);
    }
    out_printf("\n`dormouse %s%sCOMMAND --help` tells more.\n", prefix, *prefix ? " " : "");
}

static int unknown(const cmd *table, size_t n, const char *prefix, const char *word)
{
    const cmd *near = NULL;
    int best = 3;
    for (size_t i = 0; i < n; i++) {
        int d = dm_text_distance(word, strlen(word), table[i].name, strlen(table[i].name));
        if (d < best) best = d, near = &table[i];
    }
    const char *gap = *prefix ? " " : "";
    if (near) err_printf("dormouse: no command \"%s%s%s\"; did you mean \"%s%s%s\"?\n", prefix, gap, word, prefix, gap, near->name);
    else err_printf("dormouse: no command \"%s%s%s\"; `dormouse %s%s--help` lists them\n", prefix, gap, word, prefix, gap);
    return dm_exit_code(DM_EUSAGE);
}

int cmd_dispatch(const cmd *table, size_t n, const char *prefix, int argc, char **argv)
{
    if (argc < 1) {
        print_commands(table, n, prefix);
        return dm_exit_code(DM_EUSAGE);
    }
    if (!strcmp(argv[0], "--help") || !strcmp(argv[0], "-h") || !strcmp(argv[0], "help")) {
        print_commands(table, n, prefix);
        return 0;
    }
    for (size_t i = 0; i < n; i++)
        if (!strcmp(argv[0], table[i].name)) return table[i].fn(argc - 1, argv + 1);
    return unknown(table, n, prefix, argv[0]);
}

static int cmd_version(int argc, char **argv)
{
    (void)argc, (void)argv;
    out_printf("dormouse %s\n", DM_VERSION);
    return 0;
}

static const cmd commands[] = {
    { "run", "[PROMPT|-]", "one request: the model works with its tools until it answers", cmd_run },
    { "chat", "", "talk to it, line by line", cmd_chat },
    { "sessions", "ls|show|fork|rm", "list, read, fork and remove sessions", cmd_sessions },
    { "kv", "stat|ls|gc|metrics|why|verify|export|import", "the stored KV: what there is, what it did, whether it is sound; sessions out and in", cmd_kv },
    { "bench", "store|hits", "measure: the store beside the disk under it, and beside a cache without bounds", cmd_bench },
    { "model", "inspect|plan|verify|synth|tokenize|render", "look at model directories and check them", cmd_model },
    { "version", "", "print the version", cmd_version },
};

/* Descriptors 0 to 2 that the caller closed would be given to the first files that we open, and a stray write would
 * land in one of those.  /dev/null stands in, for reading: then a write to a closed standard output still fails. */
static void hold_standard_descriptors(void)
{
    int fd;
    do fd = open("/dev/null", O_RDONLY);
    while (fd >= 0 && fd <= 2);
    if (fd > 2) close(fd);
}

int dm_main(int argc, char **argv)
{
    dm_err e = { 0 };
    hold_standard_descriptors();
    signal(SIGPIPE, SIG_IGN); /* a reader that has gone is an error of the write */
    const char *fault = getenv("DORMOUSE_FAULT");
    if (fault && dm_fault_arm(fault, &e) < 0) return cmd_fail(DM_EUSAGE, &e);
    if (argc > 1 && (!strcmp(argv[1], "--version") || !strcmp(argv[1], "-V"))) return cmd_version(0, NULL);
    int status = cmd_dispatch(commands, DM_COUNT(commands), "", argc - 1, argv + 1);
    /* Everything was written without buffering; a full disk or a gone reader shows here. */
    int rc = out_write("", 0);
    if (rc < 0 && rc != DM_EPIPE) err_printf("dormouse: cannot write to standard output: %s\n", dm_err_text(rc));
    return status == 0 && rc < 0 ? 1 : status;
}
