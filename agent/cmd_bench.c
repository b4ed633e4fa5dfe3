/* cmd_bench.c — `dormouse bench store`: the store against what the disk and the memory can do, in one run. */
#include "agent/cmd_int.h"

#include <string.h>

typedef struct bench_opts {
    const char *state_dir, *dir, *model;
    int64_t block_bytes, state_bytes, quota_bytes, rounds, churn, threads;
    bool json, decode;
} bench_opts;

static const dm_opt options[] = {
    { "dir", 0, DM_OPT_STR, offsetof(bench_opts, dir), .metavar = "DIR", .help = "where to measure, on the disk in question; default: the state directory" },
    { "state-dir", 0, DM_OPT_STR, offsetof(bench_opts, state_dir), .env = "DORMOUSE_STATE_DIR", .metavar = "DIR", .help = "default: ~/.local/state/dormouse" },
    { "block-bytes", 0, DM_OPT_BYTES, offsetof(bench_opts, block_bytes), .def = "985664", .min = 1, .max = 1 << 28, .help = "of a block; default: DeepSeek-V4-Flash's" },
    { "state-bytes", 0, DM_OPT_BYTES, offsetof(bench_opts, state_bytes), .def = "3600000", .min = 1, .max = 1 << 28, .help = "of a state" },
    { "quota", 0, DM_OPT_BYTES, offsetof(bench_opts, quota_bytes), .def = "2G", .min = 1, .max = 1e15, .help = "of the store; it writes over ten times as much" },
    { "rounds", 0, DM_OPT_INT, offsetof(bench_opts, rounds), .def = "7", .min = 1, .max = BENCH_ROUNDS_MAX, .help = "of each comparison; medians are given" },
    { "churn", 0, DM_OPT_INT, offsetof(bench_opts, churn), .def = "10", .min = 1, .max = 1000, .help = "quotas that are written to the full store" },
    { "model", 'm', DM_OPT_STR, offsetof(bench_opts, model), .env = "DORMOUSE_MODEL", .metavar = "DIR", .help = "that decodes; default: the embedded one" },
    { "threads", 0, DM_OPT_INT, offsetof(bench_opts, threads), .def = "0", .min = 0, .max = 1024, .help = "of the model; 0: one per core" },
    { "decode", 0, DM_OPT_FLAG, offsetof(bench_opts, decode), .def = "1", .help = "measure decoding too (--no-decode: do not)" },
    { "json", 0, DM_OPT_FLAG, offsetof(bench_opts, json), .def = "0", .help = "JSON on standard output" },
    { "help", 'h', DM_OPT_HELP, 0, .help = "this text" },
};

static bool progress(void *ctx, int64_t done, int64_t total)
{
    (void)ctx;
    if (err_is_terminal()) err_printf("\rstep %lld of %lld\033[K%s", (long long)done, (long long)total, done == total ? "\r\033[K" : "");
    return signals_caught() == 0;
}

static int print_json(const dm_kv_bench_row *rows, size_t n, dm_err *e)
{
    json_t *list = json_array();
    for (size_t i = 0; list && i < n; i++) {
        const dm_kv_bench_row *r = &rows[i];
        json_t *row = json_pack("{s:s, s:f, s:s, s:f, s:f}", "name", r->name, "value", r->value, "unit", r->unit, "probe", r->probe, "ratio", r->ratio);
        if (!row || json_array_append_new(list, row) != 0) {
            json_decref(list);
            list = NULL;
        }
    }
    json_t *all = list ? json_pack("{s:o}", "rows", list) : NULL;
    if (!all) return dm_err_set(e, DM_ENOMEM, "bench", "out of memory");
    int rc = out_json(all);
    json_decref(all);
    return rc;
}

static void cell(char out[32], double v, const char *unit)
{
    char bytes[24];
    if (strcmp(unit, "bytes") == 0) snprintf(out, 32, "%s", dm_bytes_text(bytes, sizeof bytes, (uint64_t)v));
    else snprintf(out, 32, v < 100 ? "%.2f %s" : "%.0f %s", v, unit);
}

static void print_table(const dm_kv_bench_row *rows, size_t n)
{
    out_printf("%-24s %14s %14s %7s  %s\n", "", "store", "probe", "ratio", "target");
    for (size_t i = 0; i < n; i++) {
        const dm_kv_bench_row *r = &rows[i];
        char value[32], probe[32];
        cell(value, r->value, r->unit);
        cell(probe, r->probe, r->unit);
        bool good = r->at_most ? r->ratio <= r->limit : r->ratio >= r->limit;
        out_printf("%-24s %14s %14s %7.3f  %s %.2f%s\n", r->name, value, probe, r->ratio, r->at_most ? "<=" : ">=", r->limit, good ? "" : "  missed");
    }
}

static int bench_store(int argc, char **argv)
{
    static const char usage[] = "bench store [OPTIONS]";
    static const char what[] =
        "Measures the store beside the disk and the memory that it stands on, in one run:\n"
        "  durable_spill          a session put and flushed, to O_DIRECT writes and fdatasync\n"
        "  cold_restore           a session read from disk, to O_DIRECT reads\n"
        "  ram_restore            a session read from the RAM tier, to memcpy\n"
        "  churn_last_over_first  a full store written over and over: the last tenth to the first\n"
        "  churn_file_over_live   the file after that, to what lives in it\n"
        "  decode_with_spill      decoding with blocks spilled as they become whole, to the same without\n"
        "  ready_delay_steps      from the last token to the end of the turn, with less without, in decode steps\n"
        "The last two decode with a model; its blocks and states are replaced by ones of the given sizes.\n"
        "Small models are the hard case: against a step of a millisecond such a spill is much, against one of a big model nothing.";
    bench_opts o = { 0 };
    dm_opt_result res;
    dm_err e = { 0 };
    int rc = cmd_parse(usage, what, options, DM_COUNT(options), &o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    int extra = res.nargs;
    dm_free(res.args);
    if (extra) return cmd_usage(usage, "bench store takes no arguments");
    char *state = o.dir ? NULL : setup_state_dir(o.state_dir);
    if (!o.dir && !state) return cmd_fail(DM_ENOMEM, NULL);
    dm_kv_bench_opts bo = { .dir = o.dir ? o.dir : state, .block_bytes = (size_t)o.block_bytes, .state_bytes = (size_t)o.state_bytes,
        .quota_bytes = o.quota_bytes, .rounds = (int)o.rounds, .churn = (int)o.churn };
    bench_decode_opts bd = { .dir = bo.dir, .model = o.model, .block_bytes = bo.block_bytes, .state_bytes = bo.state_bytes, .quota_bytes = bo.quota_bytes,
        .rounds = bo.rounds, .threads = (int)o.threads };
    dm_kv_bench_row rows[DM_KV_BENCH_ROWS + 2];
    size_t n = DM_KV_BENCH_ROWS + (o.decode ? 2 : 0);
    out_log_to_stderr(false);
    signals_catch();
    char *model = NULL;
    rc = o.decode ? setup_model_dir(o.model, &model, &e) : 0; /* said before minutes have gone */
    bd.model = model;
    if (rc == 0) rc = dm_kv_bench(&bo, rows, progress, NULL, &e);
    if (rc == 0 && o.decode) rc = bench_decode(&bd, rows + DM_KV_BENCH_ROWS, &e);
    dm_free(state);
    dm_free(model);
    if (rc < 0 && err_is_terminal()) err_printf("\r\033[K");
    if (rc == 0 && o.json) rc = print_json(rows, n, &e);
    else if (rc == 0) print_table(rows, n);
    return rc < 0 ? cmd_fail(rc, &e) : 0;
}

int cmd_bench(int argc, char **argv)
{
    static const cmd table[] = {
        { "store", "", "the store beside the disk and the memory it stands on", bench_store },
        { "hits", "[TRACE]", "tokens found again at a budget, beside a cache without bounds", bench_hits },
    };
    return cmd_dispatch(table, DM_COUNT(table), "bench", argc, argv);
}
