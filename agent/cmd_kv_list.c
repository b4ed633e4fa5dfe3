/* cmd_kv_list.c — `dormouse kv ls|gc`: what the stores hold, entry by entry, and making them smaller.  No model is needed.
 *
 * A store knows keys and no positions.  Which block stands where is known of the sessions that the journal has: their chains are made
 * from their tokens, under the root of the store that is listed. */
#include "agent/cmd_int.h"

#include <stdlib.h>
#include <string.h>

/* ---- where blocks stand ------------------------------------------------------------------------------------- */

typedef struct place { dm_hash key; int64_t tokens; } place; /* tokens up to and with the block */
typedef struct places {
    place *v;      /* owned; sorted */
    size_t n, cap;
    dm_hash root;
    dm_journal *journal;
    ledger led;    /* of the session that is read */
} places;

static int by_key(const void *a, const void *b) { return memcmp(((const place *)a)->key.b, ((const place *)b)->key.b, sizeof(dm_hash)); }

static int places_add(places *p, const dm_hash *key, int64_t tokens)
{
    if (p->n == p->cap) {
        size_t cap = p->cap ? p->cap * 2 : 256;
        place *grown = dm_realloc(p->v, cap * sizeof *grown);
        if (!grown) return DM_ENOMEM;
        p->v = grown;
        p->cap = cap;
    }
    p->v[p->n++] = (place){ *key, tokens };
    return 0;
}

static int fold(void *ctx, int64_t seq, const json_t *event)
{
    places *p = ctx;
    (void)seq;
    return ledger_apply(&p->led, event, NULL);
}

/* A session that cannot be read has blocks of unknown position. */
static int add_session(void *ctx, const json_t *head)
{
    places *p = ctx;
    dm_hash h = p->root;
    int rc = 0;
    if (dm_journal_read(p->journal, json_str(head, "id"), fold, p, NULL) == 0)
        for (size_t i = 0; i < p->led.ids.n / DM_KV_BLOCK && rc == 0; i++) {
            dm_kv_chain(&h, &h, p->led.ids.p + i * DM_KV_BLOCK);
            rc = places_add(p, &h, (int64_t)(i + 1) * DM_KV_BLOCK);
        }
    ledger_free(&p->led);
    p->led = (ledger){ 0 };
    return rc;
}

static int places_load(places *p, dm_err *e)
{
    int rc = p->journal ? dm_journal_list(p->journal, add_session, p, e) : 0;
    if (p->n) qsort(p->v, p->n, sizeof *p->v, by_key);
    return rc == DM_ENOMEM ? dm_err_set(e, rc, "kv", "out of memory") : rc;
}

/* -1: not known. */
static int64_t places_find(const places *p, const dm_hash *key)
{
    const place want = { .key = *key }, *at = p->n ? bsearch(&want, p->v, p->n, sizeof *p->v, by_key) : NULL;
    return at ? at->tokens : dm_hash_equal(key, &p->root) ? 0 : -1;
}

/* ---- ls -------------------------------------------------------------------------------------------------------- */

typedef struct list_opts { const char *state_dir; bool json, dry_run; int64_t max_bytes, older; } list_opts;

static const dm_opt ls_options[] = {
    { "state-dir", 0, DM_OPT_STR, offsetof(list_opts, state_dir), .env = "DORMOUSE_STATE_DIR", .metavar = "DIR", .help = "where stores are; default: ~/.local/state/dormouse" },
    { "json", 0, DM_OPT_FLAG, offsetof(list_opts, json), .def = "0", .help = "an object a line on standard output" },
    { "help", 'h', DM_OPT_HELP, 0, .help = "this text" },
};

typedef struct ls { const list_opts *o; const char *dir; places where; } ls;

static int show_item(void *ctx, const dm_kv_item *it)
{
    ls *l = ctx;
    int64_t at = places_find(&l->where, &it->key), tokens = at < 0 ? -1 : at + it->tail_count;
    const char *kind = it->state ? "state" : "block";
    char key[17], bytes[24], depth[24] = "-", tail[16] = "";
    dm_hex(key, it->key.b, 8);
    if (signals_caught()) return DM_ECANCELED;
    if (!l->o->json) {
        if (tokens >= 0) snprintf(depth, sizeof depth, "%lld", (long long)tokens);
        if (it->tail_count) snprintf(tail, sizeof tail, "+%d", it->tail_count);
        int shown = out_printf("  %-5s  %8s  %10s  %6lld  %6lld  %s%s\n", kind, depth, dm_bytes_text(bytes, sizeof bytes, (uint64_t)it->bytes), (long long)it->hits,
                               (long long)it->age_days, key, tail);
        return shown < 0 ? DM_EPIPE : 0;
    }
    json_t *v = json_pack("{s:s, s:s, s:o, s:I, s:I, s:I, s:I, s:s, s:i}", "dir", l->dir, "kind", kind, "tokens", tokens < 0 ? json_null() : json_integer(tokens), "bytes",
                          (json_int_t)it->bytes, "disk_bytes", (json_int_t)it->disk_bytes, "hits", (json_int_t)it->hits, "age_days", (json_int_t)it->age_days, "key", key, "tail",
                          it->tail_count);
    int rc = v ? out_json(v) : DM_ENOMEM;
    json_decref(v);
    return rc < 0 ? (rc == DM_ENOMEM ? rc : DM_EPIPE) : 0;
}

static int list_store(const list_opts *o, dm_journal *j, const char *dir, dm_err *e)
{
    dm_kv_opts ko;
    dm_kv_stat st;
    dm_kv *kv = NULL;
    int rc = dm_kv_inspect(dir, &ko, &st, e);
    ls l = { .o = o, .dir = dir, .where = { .root = ko.root, .journal = j } };
    ko.read_only = true;
    if (rc == 0) rc = dm_kv_open(&kv, &ko, e);
    if (rc == 0) rc = places_load(&l.where, e);
    if (rc == 0 && !o->json) out_printf("%s\n  %-5s  %8s  %10s  %6s  %6s  %s\n", dir, "KIND", "TOKENS", "BYTES", "HITS", "DAYS", "KEY");
    if (rc == 0) rc = dm_kv_list(kv, show_item, &l, e);
    dm_kv_close(kv);
    dm_free(l.where.v);
    return rc == DM_EPIPE ? 0 : rc; /* who reads has enough; main tells if it was the disk */
}

/* ---- gc ---------------------------------------------------------------------------------------------------------- */

static const dm_opt gc_options[] = {
    { "state-dir", 0, DM_OPT_STR, offsetof(list_opts, state_dir), .env = "DORMOUSE_STATE_DIR", .metavar = "DIR", .help = "where stores are; default: ~/.local/state/dormouse" },
    { "max-bytes", 0, DM_OPT_BYTES, offsetof(list_opts, max_bytes), .metavar = "SIZE", .help = "a store's files may have so much" },
    { "older-than", 0, DM_OPT_INT, offsetof(list_opts, older), .min = 0, .max = 100000, .metavar = "DAYS", .help = "what was not used for more days goes" },
    { "dry-run", 'n', DM_OPT_FLAG, offsetof(list_opts, dry_run), .def = "0", .help = "only say what would go" },
    { "json", 0, DM_OPT_FLAG, offsetof(list_opts, json), .def = "0", .help = "JSON on standard output" },
    { "help", 'h', DM_OPT_HELP, 0, .help = "this text" },
};

static bool gc_progress(void *ctx, int64_t done, int64_t total)
{
    (void)ctx;
    if (err_is_terminal() && total > 1000) err_printf("\r%lld of %lld entries\033[K%s", (long long)done, (long long)total, done >= total ? "\r\033[K" : "");
    return signals_caught() == 0;
}

static int tell_gc(const list_opts *o, const char *dir, const dm_kv_gc_report *r, const dm_kv_stat *before, const dm_kv_stat *after)
{
    if (o->json) {
        json_t *v = json_pack("{s:s, s:b, s:I, s:I, s:I, s:I, s:I, s:I, s:I}", "dir", dir, "dry_run", (int)o->dry_run, "blocks", (json_int_t)r->blocks, "states", (json_int_t)r->states,
                              "bytes", (json_int_t)r->bytes, "entries_left", (json_int_t)r->entries_left, "bytes_left", (json_int_t)r->bytes_left, "bytes_file_before",
                              (json_int_t)before->disk_bytes_file, "bytes_file", (json_int_t)after->disk_bytes_file);
        int rc = v ? out_json(v) : DM_ENOMEM;
        json_decref(v);
        return rc;
    }
    char gone[24], left[24], was[24], is[24];
    return out_printf("%s\n  %lld blocks and %lld states %s, %s; %lld entries of %s stay; the files had %s and have %s\n", dir, (long long)r->blocks, (long long)r->states,
                      o->dry_run ? "would go" : "are gone", dm_bytes_text(gone, sizeof gone, (uint64_t)r->bytes), (long long)r->entries_left,
                      dm_bytes_text(left, sizeof left, (uint64_t)r->bytes_left), dm_bytes_text(was, sizeof was, (uint64_t)before->disk_bytes_file),
                      dm_bytes_text(is, sizeof is, (uint64_t)after->disk_bytes_file));
}

static int gc_store(const list_opts *o, dm_journal *j, const char *dir, dm_err *e)
{
    dm_kv_opts ko, seen;
    dm_kv_stat before, after;
    dm_kv *kv = NULL;
    dm_kv_gc_report report;
    const dm_kv_gc_opts g = { .bytes_max = o->max_bytes, .older_days = o->older < 0 ? -1 : o->older + 1, .dry_run = o->dry_run };
    (void)j;
    int rc = dm_kv_inspect(dir, &ko, &before, e);
    ko.disk_bytes_max = before.disk_bytes_max; /* gc is no reason to have another quota */
    ko.read_only = o->dry_run;
    ko.trim = !o->dry_run;
    if (rc == 0) rc = dm_kv_open(&kv, &ko, e);
    if (rc == 0) rc = dm_kv_gc(kv, &g, &report, gc_progress, NULL, e);
    dm_kv_close(kv);
    if (rc == 0) rc = dm_kv_inspect(dir, &seen, &after, e);
    return rc == 0 ? tell_gc(o, dir, &report, &before, &after) : rc;
}

/* ---- both ---------------------------------------------------------------------------------------------------------- */

typedef int (*store_fn)(const list_opts *o, dm_journal *j, const char *dir, dm_err *e);

/* Without a journal (none yet, or one that cannot be read) nothing but positions is missing. */
static dm_journal *open_journal(const list_opts *o)
{
    dm_journal *j = NULL;
    dm_err err = { 0 };
    char *state = setup_state_dir(o->state_dir);
    if (state && dm_journal_open(&j, state, true, &err) < 0) j = NULL;
    dm_free(state);
    return j;
}

static int each_store(const list_opts *o, const dm_opt_result *res, bool journal, store_fn fn)
{
    dm_err e = { 0 };
    char **dirs = NULL;
    size_t n = 0;
    int rc = res->nargs ? 0 : kv_store_dirs(o->state_dir, &dirs, &n, &e), status = rc < 0 ? cmd_fail(rc, &e) : 0;
    dm_journal *j = journal ? open_journal(o) : NULL;
    if (rc == 0 && !res->nargs && !n && !o->json) out_text("nothing is stored\n");
    for (size_t i = 0; rc != DM_ECANCELED && i < (res->nargs ? (size_t)res->nargs : n); i++) {
        memset(&e, 0, sizeof e);
        if ((rc = fn(o, j, res->nargs ? res->args[i] : dirs[i], &e)) < 0) status = cmd_fail(rc, &e);
    }
    dm_journal_close(j);
    kv_store_dirs_free(dirs, n);
    dm_free(res->args);
    return status;
}

int kv_ls(int argc, char **argv)
{
    list_opts o = { 0 };
    dm_opt_result res;
    int rc = cmd_parse("kv ls [OPTIONS] [DIR…]", "Lists what the stores hold, the next to be evicted first: all of the state directory, or those given.", ls_options, DM_COUNT(ls_options), &o,
                       argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    signals_catch();
    return each_store(&o, &res, true, list_store);
}

int kv_gc(int argc, char **argv)
{
    static const char usage[] = "kv gc [OPTIONS] [DIR…]";
    list_opts o = { .max_bytes = -1, .older = -1 };
    dm_opt_result res;
    int rc = cmd_parse(usage, "Removes entries in the order in which the store would evict them, and gives their room back to the file system.", gc_options, DM_COUNT(gc_options), &o, argc,
                       argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    if (o.max_bytes < 0 && o.older < 0) {
        dm_free(res.args);
        return cmd_usage(usage, "gc wants --max-bytes SIZE or --older-than DAYS");
    }
    signals_catch();
    return each_store(&o, &res, false, gc_store);
}
