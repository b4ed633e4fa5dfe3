/* cmd_check.c — the checklist of a deployment as a command: a table for a person, a report for a program. */
#include "agent/check_int.h"
#include "agent/cmd_int.h"

#include <stdlib.h>
#include <string.h>

static void print_row(void *ctx, const check_row *row)
{
    static const char *const words[] = { "ok", "FAILED", "skipped" };
    (void)ctx;
    if (err_is_terminal()) err_printf("\r\033[K");
    out_printf("%-8s %-22s %8.2f s  %s\n", words[row->result], row->name, row->seconds, row->detail);
}

static int write_report(const json_t *report, const char *file, dm_err *e)
{
    char *text = json_dumps(report, JSON_INDENT(2));
    dm_buf b = { 0 };
    int rc = text && dm_buf_str(&b, text) >= 0 && dm_buf_byte(&b, '\n') >= 0 ? 0 : dm_err_set(e, DM_ENOMEM, "verify", "out of memory");
    if (rc == 0) rc = dm_file_write_atomic(file, b.p, b.n, 0644, e);
    dm_buf_free(&b);
    free(text);
    return rc;
}

int cmd_check(const check_opts *o, const char *report_file)
{
    check_opts with_rows = *o;
    json_t *report;
    int failed;
    dm_err e = { 0 };
    with_rows.row = print_row;
    int rc = check_model(&with_rows, &report, &failed, &e);
    if (rc == 0) out_printf("%s\n", failed ? "not all checks passed" : "all checks passed");
    if (rc == 0 && report_file) rc = write_report(report, report_file, &e);
    json_decref(report);
    return rc < 0 ? cmd_fail(rc, &e) : failed ? 1 : 0;
}
