/* cmd_kv.c — `dormouse kv …`: the table, and stat and verify, which look at stores without a model. */
#include "agent/cmd_int.h"

#include <dirent.h>
#include <stdlib.h>
#include <string.h>

typedef struct kv_opts { const char *state_dir; bool json; } kv_opts;

static const dm_opt options[] = {
    { "state-dir", 0, DM_OPT_STR, offsetof(kv_opts, state_dir), .env = "DORMOUSE_STATE_DIR", .metavar = "DIR", .help = "where stores are; default: ~/.local/state/dormouse" },
    { "json", 0, DM_OPT_FLAG, offsetof(kv_opts, json), .def = "0", .help = "JSON on standard output" },
    { "help", 'h', DM_OPT_HELP, 0, .help = "this text" },
};

typedef int (*store_fn)(const kv_opts *o, const char *dir, dm_err *e);

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

int kv_store_dirs(const char *state_dir, char ***out, size_t *n, dm_err *e)
{
    char *state = setup_state_dir(state_dir), *all = state ? dm_path_join(state, "kv") : NULL;
    dm_free(state);
    *out = NULL;
    *n = 0;
    if (!all) return dm_err_set(e, DM_ENOMEM, "kv", "out of memory");
    DIR *d = opendir(all);
    int rc = 0;
    for (struct dirent *de; d && rc == 0 && (de = readdir(d));) {
        if (de->d_name[0] == '.') continue;
        char **grown = dm_realloc(*out, (*n + 1) * sizeof *grown);
        if (grown) *out = grown;
        if (!grown || !(grown[*n] = dm_path_join(all, de->d_name))) rc = dm_err_set(e, DM_ENOMEM, "kv", "out of memory");
        else ++*n;
    }
    if (d) closedir(d);
    if (*n) qsort(*out, *n, sizeof **out, by_name);
    dm_free(all);
    return rc;
}

void kv_store_dirs_free(char **dirs, size_t n)
{
    for (size_t i = 0; i < n; i++) dm_free(dirs[i]);
    dm_free(dirs);
}

static int each_store(const char *usage, const char *what, int argc, char **argv, store_fn fn)
{
    kv_opts o = { 0 };
    dm_opt_result res;
    dm_err e = { 0 };
    int rc = cmd_parse(usage, what, options, DM_COUNT(options), &o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    int status = 0;
    char **dirs = NULL;
    size_t n = 0;
    if (res.nargs == 0) {
        rc = kv_store_dirs(o.state_dir, &dirs, &n, &e);
        if (rc < 0) status = cmd_fail(rc, &e);
        else if (n == 0 && !o.json) out_text("nothing is stored\n");
    }
    for (size_t i = 0; i < n; i++)
        if ((rc = fn(&o, dirs[i], &e)) < 0) status = cmd_fail(rc, &e);
    for (int i = 0; i < res.nargs; i++)
        if ((rc = fn(&o, res.args[i], &e)) < 0) status = cmd_fail(rc, &e);
    kv_store_dirs_free(dirs, n);
    dm_free(res.args);
    return status;
}

/* ---- stat --------------------------------------------------------------------------------------------------- */

static int stat_store(const kv_opts *o, const char *dir, dm_err *e)
{
    dm_kv_opts ko = { 0 };
    dm_kv_stat st = { 0 };
    int rc = dm_kv_inspect(dir, &ko, &st, e);
    if (rc < 0) return rc;
    if (o->json) {
        json_t *v = json_pack("{s:s, s:I, s:I, s:I, s:I, s:I, s:I}", "dir", dir, "blocks", (json_int_t)st.blocks, "states", (json_int_t)st.states, "bytes_live",
                              (json_int_t)st.disk_bytes_live, "bytes_file", (json_int_t)st.disk_bytes_file,
                              "block_bytes", (json_int_t)st.block_bytes, "extent_bytes", (json_int_t)st.extent_bytes);
        if (v && st.disk_bytes_max) json_object_set_new(v, "bytes_max", json_integer((json_int_t)st.disk_bytes_max)); /* as the store was last opened */
        if (v) out_json(v);
        json_decref(v);
        return 0;
    }
    char live[24], file[24], block[24], most[24] = "";
    if (st.disk_bytes_max) dm_bytes_text(most, sizeof most, (uint64_t)st.disk_bytes_max);
    out_printf("%s\n  %lld blocks of %s, %lld states; %s in use, the files have %s%s%s\n", dir, (long long)st.blocks, dm_bytes_text(block, sizeof block, st.block_bytes),
               (long long)st.states, dm_bytes_text(live, sizeof live, (uint64_t)st.disk_bytes_live), dm_bytes_text(file, sizeof file, (uint64_t)st.disk_bytes_file), *most ? " and may have " : "", most);
    return 0;
}

static int kv_stat(int argc, char **argv)
{
    return each_store("kv stat [OPTIONS] [DIR…]", "Says what the stores hold: all of the state directory, or those given.", argc, argv, stat_store);
}

/* ---- verify ---------------------------------------------------------------------------------------------------- */

static bool verify_progress(void *ctx, int64_t done, int64_t total)
{
    (void)ctx;
    if (err_is_terminal() && total > 1000 && done % 256 == 0) err_printf("\r%lld of %lld entries\033[K", (long long)done, (long long)total);
    return signals_caught() == 0;
}

static int verify_store(const kv_opts *o, const char *dir, dm_err *e)
{
    dm_kv_opts ko = { 0 };
    dm_kv_stat st = { 0 };
    dm_kv_check check = { 0 };
    dm_kv *kv = NULL;
    int rc = dm_kv_inspect(dir, &ko, &st, e);
    ko.dir = dir;
    ko.read_only = true;
    if (rc == 0) rc = dm_kv_open(&kv, &ko, e);
    if (rc == 0) rc = dm_kv_verify(kv, &check, verify_progress, NULL, e);
    dm_kv_close(kv);
    if (rc < 0) return rc;
    if (o->json) {
        json_t *v = json_pack("{s:s, s:I, s:I, s:I, s:s}", "dir", dir, "entries", (json_int_t)check.entries, "bytes", (json_int_t)check.bytes, "bad",
                              (json_int_t)check.bad, "first_bad", check.first_bad);
        if (v) out_json(v);
        json_decref(v);
    } else {
        char bytes[24];
        out_printf("%s\n  %lld entries, %s: %lld bad%s%s\n", dir, (long long)check.entries, dm_bytes_text(bytes, sizeof bytes, (uint64_t)check.bytes),
                   (long long)check.bad, check.bad ? ", first: " : "", check.first_bad);
    }
    if (check.bad) return dm_err_set(e, DM_ECORRUPT, "kv", "%s has %lld bad entries; they are misses and go when they are met", dir, (long long)check.bad);
    return 0;
}

static int kv_verify(int argc, char **argv)
{
    signals_catch();
    return each_store("kv verify [OPTIONS] [DIR…]", "Reads and checks every entry; exit status 1 when one is bad.", argc, argv, verify_store);
}

int cmd_kv(int argc, char **argv)
{
    static const cmd table[] = {
        { "stat", "[DIR…]", "what the stores hold", kv_stat },
        { "ls", "[DIR…]", "every entry, the next to be evicted first", kv_ls },
        { "gc", "[DIR…]", "make the stores smaller, or free of what is old", kv_gc },
        { "metrics", "[DIR…]", "the figures of the stores in Prometheus' text format", kv_metrics },
        { "why", "SESSION", "what was computed again, why, and what it cost", kv_why },
        { "verify", "[DIR…]", "read and check every entry", kv_verify },
        { "export", "SESSION FILE|--to ADDRESS", "a session with its KV into a file, or to another dormouse", kv_export },
        { "import", "FILE|--listen ADDRESS", "take in what export wrote or sends", kv_import },
    };
    return cmd_dispatch(table, DM_COUNT(table), "kv", argc, argv);
}
