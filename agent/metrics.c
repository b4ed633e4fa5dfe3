/* metrics.c — figures of stores in Prometheus' text format (version 0.0.4). */
#include "agent/cmd_int.h"

#include <string.h>

typedef struct metric {
    const char *name, *type, *help;
    size_t offset; /* of an int64_t in dm_kv_stat */
} metric;

#define S(x) offsetof(dm_kv_stat, x)
static const metric metrics[] = {
    { "dormouse_kv_blocks", "gauge", "Blocks on disk.", S(blocks) },
    { "dormouse_kv_states", "gauge", "States on disk.", S(states) },
    { "dormouse_kv_disk_live_bytes", "gauge", "Bytes of extents that hold something.", S(disk_bytes_live) },
    { "dormouse_kv_disk_file_bytes", "gauge", "Bytes that the files take on the disk.", S(disk_bytes_file) },
    { "dormouse_kv_disk_quota_bytes", "gauge", "Quota that the store was last opened with.", S(disk_bytes_max) },
    { "dormouse_kv_written_bytes_total", "counter", "Bytes of extents written.", S(total.bytes_written) },
    { "dormouse_kv_written_today_bytes", "gauge", "Bytes of extents written on the last day (UTC) on which anything was.", S(total.day_bytes) },
    { "dormouse_kv_held_bytes_total", "counter", "Bytes that the write budget kept from the disk.", S(total.held_bytes) },
    { "dormouse_kv_put_blocks_total", "counter", "Blocks written.", S(total.put_blocks) },
    { "dormouse_kv_put_states_total", "counter", "States written.", S(total.put_states) },
    { "dormouse_kv_evicted_entries_total", "counter", "Entries evicted.", S(total.evicted_entries) },
    { "dormouse_kv_bad_entries_total", "counter", "Entries that failed their check and went.", S(total.bad_entries) },
    { "dormouse_kv_hits_total", "counter", "Lookups that found a cut.", S(total.hits) },
    { "dormouse_kv_misses_total", "counter", "Lookups that found none.", S(total.misses) },
    { "dormouse_kv_shortened_lookups_total", "counter", "Lookups that eviction made shorter.", S(total.ghost_hits) },
    { "dormouse_kv_lost_tokens_total", "counter", "Tokens by which eviction made lookups shorter.", S(total.ghost_tokens) },
};

static int label(dm_buf *out, const char *text)
{
    int rc = 0;
    for (const char *p = text; *p && rc == 0; p++) rc = *p == '\\' || *p == '"' ? dm_buf_printf(out, "\\%c", *p) : *p == '\n' ? dm_buf_str(out, "\\n") : dm_buf_byte(out, (uint8_t)*p);
    return rc;
}

int metrics_text(dm_buf *out, const char *const *dirs, const dm_kv_stat *st, size_t n)
{
    int rc = 0;
    for (size_t m = 0; m < DM_COUNT(metrics) && rc == 0; m++) {
        rc = dm_buf_printf(out, "# HELP %s %s\n# TYPE %s %s\n", metrics[m].name, metrics[m].help, metrics[m].name, metrics[m].type);
        for (size_t i = 0; i < n && rc == 0; i++) {
            int64_t v;
            const char *slash = strrchr(dirs[i], '/');
            memcpy(&v, (const char *)&st[i] + metrics[m].offset, sizeof v);
            rc = dm_buf_printf(out, "%s{store=\"", metrics[m].name);
            if (rc == 0) rc = label(out, slash && slash[1] ? slash + 1 : dirs[i]);
            if (rc == 0) rc = dm_buf_printf(out, "\"} %lld\n", (long long)v);
        }
    }
    return rc;
}

/* ---- dormouse kv metrics ----------------------------------------------------------------------------------------- */

typedef struct metrics_opts { const char *state_dir; } metrics_opts;

static const dm_opt options[] = {
    { "state-dir", 0, DM_OPT_STR, offsetof(metrics_opts, state_dir), .env = "DORMOUSE_STATE_DIR", .metavar = "DIR", .help = "where stores are; default: ~/.local/state/dormouse" },
    { "help", 'h', DM_OPT_HELP, 0, .help = "this text" },
};

/* What can be read is told, and the first fault with it. */
static int print_stores(const char *const *dirs, size_t n, dm_err *e)
{
    dm_kv_stat *st = dm_calloc(n + 1, sizeof *st);
    const char **good = dm_calloc(n + 1, sizeof *good);
    dm_buf out = { 0 };
    size_t count = 0;
    int rc = st && good ? 0 : dm_err_set(e, DM_ENOMEM, "kv", "out of memory");
    for (size_t i = 0; st && good && i < n; i++) {
        dm_kv_opts ko;
        dm_err err;
        int bad = dm_kv_inspect(dirs[i], &ko, &st[count], &err);
        if (bad == 0) good[count++] = dirs[i];
        else if (rc == 0) *e = err, rc = bad;
    }
    if (st && good && metrics_text(&out, good, st, count) < 0) rc = dm_err_set(e, DM_ENOMEM, "kv", "out of memory");
    else if (out.n) out_write(out.p, out.n);
    dm_buf_free(&out);
    dm_free(good);
    dm_free(st);
    return rc;
}

int kv_metrics(int argc, char **argv)
{
    metrics_opts o = { 0 };
    dm_opt_result res;
    dm_err e = { 0 };
    char **dirs = NULL;
    size_t n = 0;
    int rc = cmd_parse("kv metrics [OPTIONS] [DIR…]", "Prints the figures of the stores for Prometheus, say for a node exporter's text file: all of the state directory, or those given.",
                       options, DM_COUNT(options), &o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    if (res.nargs) rc = print_stores((const char *const *)res.args, (size_t)res.nargs, &e);
    else if ((rc = kv_store_dirs(o.state_dir, &dirs, &n, &e)) == 0) rc = print_stores((const char *const *)dirs, n, &e);
    kv_store_dirs_free(dirs, n);
    dm_free(res.args);
    return rc < 0 ? cmd_fail(rc, &e) : 0;
}
