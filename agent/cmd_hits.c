/* cmd_hits.c — `dormouse bench hits [TRACE]`: how much of what a cache without bounds would reuse, ours reuses at a budget.
 *
 * Both sides are the store itself, fed with the same turns: once with the budget, once with room for everything (the oracle).  Sizes are scaled
 * down, the policy is the real one.  A trace is a file in the format of Mooncake's published ones (JSON lines: timestamp, input_length,
 * output_length, hash_ids of 512 tokens each); without one, sessions of coding agents are made up. */
#include "agent/cmd_int.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TRACE_BLOCK = 512, BLOCK_BYTES = 16000, STATE_BLOCKS = 4, EXTENT = 16384 };

/* ---- made-up agents --------------------------------------------------------------------------------- */

/* Shapes of a published measurement of agent sessions: a context from 12K to 80K tokens over 33 turns, +2,242 a turn at the median, pauses
 * of a tool of 5 s at the median and 81 s at the 99th percentile.  Ten in a hundred sessions go back and take another way. */
enum { TURNS = 33, FIRST = 12000, PER_TURN = 2242, OUTPUT = 400, SHARED = 9000, PROJECTS = 8 };

typedef struct agent {
    double at;       /* of its next turn, seconds */
    uint64_t seed;   /* its tokens */
    int turn;
    int64_t n;       /* tokens so far, with the output of the last turn */
    int64_t forked;  /* from here on its tokens are of another seed; 0: none */
} agent;

typedef struct made {
    uint64_t seed, rng;
    int sessions, live; /* in all; at one time */
    int begun;
    agent *agents;      /* owned; `live` of them, turn < 0: ended */
    dm_ids ids;
} made;

static double uniform(uint64_t *rng) { return (double)(dm_splitmix64(rng) >> 11) * 0x1p-53; }

/* Log-normal pause: median 5 s, 99th percentile 81 s.  The sum of twelve uniform numbers less six is a normal one, near enough. */
static double pause_s(uint64_t *rng)
{
    double z = -6;
    for (int i = 0; i < 12; i++) z += uniform(rng);
    double x = z * 1.197, e = 1, term = 1; /* ln(81/5) / 2.326 */
    bool negative = x < 0;
    if (negative) x = -x;
    for (int i = 1; i < 60; i++) e += term *= x / i;
    return 5 * (negative ? 1 / e : e);
}

static void agent_begin(made *m, agent *a, double now)
{
    *a = (agent){ .at = now + pause_s(&m->rng), .seed = m->seed * 1000003 + (uint64_t)m->begun++, .n = 0 };
}

static int made_begin(made *m)
{
    m->rng = m->seed;
    m->begun = 0;
    dm_free(m->agents);
    m->agents = dm_calloc((size_t)m->live, sizeof *m->agents);
    if (!m->agents) return DM_ENOMEM;
    for (int i = 0; i < m->live; i++) {
        agent_begin(m, &m->agents[i], 0);
        m->agents[i].at += 60.0 * i; /* they do not all begin at once */
    }
    return 0;
}

/* The same position of the same session is always the same token; the first SHARED are those of its project. */
static int32_t token(const agent *a, int64_t pos)
{
    uint64_t s = pos < SHARED ? a->seed % PROJECTS + 7 : a->seed + (a->forked && pos >= a->forked ? 77777777 : 0);
    uint64_t z = s * 0x9E3779B97F4A7C15u + (uint64_t)pos;
    return (int32_t)(dm_splitmix64(&z) % 129280);
}

static int next_made(void *ctx, dm_kv_turn *out, dm_err *e)
{
    made *m = ctx;
    agent *a = NULL;
    for (int i = 0; i < m->live; i++)
        if (m->agents[i].turn >= 0 && (!a || m->agents[i].at < a->at)) a = &m->agents[i];
    if (!a) return 0;
    if (a->turn == 0) a->n = FIRST;
    else if (!a->forked && uniform(&m->rng) < 0.1 / TURNS) a->forked = a->n -= a->n / 3; /* an earlier turn is done again */
    else a->n += PER_TURN / 2 + (int64_t)(dm_splitmix64(&m->rng) % PER_TURN) - OUTPUT;
    int64_t prompt = a->n;
    a->n += OUTPUT;
    m->ids.n = 0;
    for (int64_t i = 0; i < a->n; i++)
        if (dm_ids_push(&m->ids, token(a, i)) < 0) return dm_err_set(e, DM_ENOMEM, "bench", "out of memory");
    *out = (dm_kv_turn){ .ids = m->ids.p, .prompt = prompt, .n = a->n };
    double now = a->at;
    a->at += pause_s(&m->rng) + 10;
    if (++a->turn < TURNS) return 1;
    if (m->begun < m->sessions) agent_begin(m, a, now);
    else a->turn = -1;
    return 1;
}

/* ---- a trace --------------------------------------------------------------------------------------------- */

typedef struct trace {
    const char *path;
    FILE *f;
    char *line; /* owned by getline */
    size_t cap;
    int64_t number; /* of the line */
    dm_ids ids;
} trace;

static int trace_begin(trace *t, dm_err *e)
{
    if (!t->f) t->f = fopen(t->path, "re");
    if (!t->f) return dm_err_sys(e, errno, "bench", "%s", t->path);
    rewind(t->f);
    t->number = 0;
    return 0;
}

static int64_t number_of(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    return json_is_integer(v) ? json_integer_value(v) : -1;
}

/* Tokens of a line: 512 for each hash, made from it, as many as the input is long. */
static int trace_ids(trace *t, const json_t *o, dm_kv_turn *out, dm_err *e)
{
    const json_t *hashes = json_object_get(o, "hash_ids");
    int64_t input = number_of(o, "input_length"), output = number_of(o, "output_length"), have = (int64_t)json_array_size(hashes) * TRACE_BLOCK;
    if (!json_is_array(hashes) || input < 1 || output < 0 || input > have || input > 1 << 24)
        return dm_err_set(e, DM_EFORMAT, "bench", "%s, line %lld: wants input_length, output_length, and a hash for every %d tokens", t->path, (long long)t->number, TRACE_BLOCK);
    t->ids.n = 0;
    for (int64_t i = 0; i < input; i++) {
        const json_t *h = json_array_get(hashes, (size_t)(i / TRACE_BLOCK));
        if (!json_is_integer(h)) return dm_err_set(e, DM_EFORMAT, "bench", "%s, line %lld: a hash is no whole number", t->path, (long long)t->number);
        uint64_t z = (uint64_t)json_integer_value(h) * 0x9E3779B97F4A7C15u + (uint64_t)(i % TRACE_BLOCK);
        if (dm_ids_push(&t->ids, (int32_t)(dm_splitmix64(&z) % 129280)) < 0) return dm_err_set(e, DM_ENOMEM, "bench", "out of memory");
    }
    /* What the model wrote is not in the file: the state is at the end of the input. */
    *out = (dm_kv_turn){ .ids = t->ids.p, .prompt = input, .n = input };
    return 1;
}

static int next_line(void *ctx, dm_kv_turn *out, dm_err *e)
{
    trace *t = ctx;
    for (;;) {
        ssize_t n = getline(&t->line, &t->cap, t->f);
        if (n < 0) return ferror(t->f) ? dm_err_sys(e, errno, "bench", "%s", t->path) : 0;
        t->number++;
        if (strspn(t->line, " \t\r\n") == (size_t)n) continue;
        json_error_t why;
        json_t *o = json_loadb(t->line, (size_t)n, JSON_REJECT_DUPLICATES, &why);
        if (!o) return dm_err_set(e, DM_EFORMAT, "bench", "%s, line %lld: %s", t->path, (long long)t->number, why.text);
        int rc = trace_ids(t, o, out, e);
        json_decref(o);
        return rc;
    }
}

/* ---- the command ------------------------------------------------------------------------------------------ */

typedef struct hits_opts {
    const char *dir;
    int64_t sessions, live, seed, budget;
    double share;
    bool json;
} hits_opts;

static const dm_opt options[] = {
    { "dir", 0, DM_OPT_STR, offsetof(hits_opts, dir), .metavar = "DIR", .help = "where the two stores are made for a while; default: TMPDIR or /tmp" },
    { "sessions", 0, DM_OPT_INT, offsetof(hits_opts, sessions), .def = "64", .min = 1, .max = 1e6, .help = "of the made-up agents" },
    { "live", 0, DM_OPT_INT, offsetof(hits_opts, live), .def = "8", .min = 1, .max = 1e4, .help = "of these at one time" },
    { "seed", 0, DM_OPT_INT, offsetof(hits_opts, seed), .def = "1", .min = 0, .max = 1e15, .help = "of the made-up agents" },
    { "budget", 0, DM_OPT_INT, offsetof(hits_opts, budget), .def = "0", .min = 0, .max = 1e9, .metavar = "BLOCKS", .help = "of the store, in blocks of 256 tokens; default: --share" },
    { "share", 0, DM_OPT_NUMBER, offsetof(hits_opts, share), .def = "0", .min = 0, .max = 1, .help = "budget as a share of all that the trace stores; default: for agents what the live ones hold, for a trace 0.5" },
    { "json", 0, DM_OPT_FLAG, offsetof(hits_opts, json), .def = "0", .help = "JSON on standard output" },
    { "help", 'h', DM_OPT_HELP, 0, .help = "this text" },
};

static bool progress(void *ctx, int64_t done, int64_t total)
{
    (void)total;
    if (err_is_terminal() && done % 16 == 0) err_printf("\r%s: turn %lld\033[K", (const char *)ctx, (long long)done);
    return signals_caught() == 0;
}

typedef struct side { dm_kv_replay oracle, ours; int64_t budget_bytes; } side;

static int begin(made *m, trace *t, dm_err *e) { return t->path ? trace_begin(t, e) : made_begin(m) < 0 ? dm_err_set(e, DM_ENOMEM, "bench", "out of memory") : 0; }

static int both(const hits_opts *o, made *m, trace *t, side *s, dm_err *e)
{
    const char *tmp = getenv("TMPDIR");
    dm_kv_replay_opts ro = { .dir = o->dir ? o->dir : tmp && *tmp ? tmp : "/tmp", .block_bytes = BLOCK_BYTES, .state_bytes = STATE_BLOCKS * BLOCK_BYTES,
        .disk_bytes_max = (int64_t)1 << 40 };
    int rc = begin(m, t, e);
    if (!rc) rc = dm_kv_replay_run(&ro, t->path ? next_line : next_made, t->path ? (void *)t : m, &s->oracle, progress, (void *)(uintptr_t)"oracle", e);
    if (!rc && s->oracle.reused_tokens == 0) rc = dm_err_set(e, DM_EINVAL, "bench", "nothing in this trace could be reused");
    if (rc) return rc;
    /* What a live agent holds at its longest: its blocks, a state a turn; the projects' shared beginnings; and what is being written. */
    int64_t blocks = (FIRST + (int64_t)TURNS * PER_TURN) / 256 + TURNS * (STATE_BLOCKS + 1);
    s->budget_bytes = o->budget ? o->budget * EXTENT
        : o->share > 0 || t->path ? (int64_t)((double)s->oracle.live_bytes_max * (o->share > 0 ? o->share : 0.5)) : (int64_t)m->live * blocks * EXTENT;
    ro.disk_bytes_max = s->budget_bytes + s->budget_bytes / 10 + ((int64_t)1 << 20); /* the index beside small blocks weighs more than it does beside real ones */
    rc = begin(m, t, e);
    if (!rc) rc = dm_kv_replay_run(&ro, t->path ? next_line : next_made, t->path ? (void *)t : m, &s->ours, progress, (void *)(uintptr_t)"budget", e);
    return rc;
}

static int tell(const hits_opts *o, const side *s, dm_err *e)
{
    double ratio = (double)s->ours.reused_tokens / (double)s->oracle.reused_tokens;
    if (o->json) {
        json_t *all = json_pack("{s:[{s:s, s:f, s:s, s:f, s:f}], s:I, s:I, s:I, s:I, s:I, s:I}", "rows", "name", "hits", "value", (double)s->ours.reused_tokens, "unit", "tokens",
            "probe", (double)s->oracle.reused_tokens, "ratio", ratio, "turns", (json_int_t)s->ours.turns, "prompt_tokens", (json_int_t)s->ours.prompt_tokens,
            "budget_bytes", (json_int_t)s->budget_bytes, "live_bytes_max", (json_int_t)s->ours.live_bytes_max, "unbounded_bytes", (json_int_t)s->oracle.live_bytes_max,
            "evicted_entries", (json_int_t)s->ours.evicted_entries);
        if (!all) return dm_err_set(e, DM_ENOMEM, "bench", "out of memory");
        int rc = out_json(all);
        json_decref(all);
        return rc;
    }
    out_printf("%lld turns, %lld prompt tokens; budget %lld blocks (it held %lld at most), the trace stores %lld\n", (long long)s->ours.turns, (long long)s->ours.prompt_tokens,
        (long long)(s->budget_bytes / EXTENT), (long long)(s->ours.live_bytes_max / EXTENT), (long long)(s->oracle.live_bytes_max / EXTENT));
    out_printf("%-24s %14s %14s %7s  %s\n", "", "store", "oracle", "ratio", "target");
    out_printf("%-24s %14lld %14lld %7.4f  >= 0.99%s\n", "hits (tokens reused)", (long long)s->ours.reused_tokens, (long long)s->oracle.reused_tokens, ratio, ratio < 0.99 ? "  missed" : "");
    return 0;
}

int bench_hits(int argc, char **argv)
{
    static const char usage[] = "bench hits [OPTIONS] [TRACE]";
    static const char what[] =
        "Replays turns through the store with a budget, and through one without bounds (the oracle); counts the tokens that each\n"
        "found again.  TRACE: JSON lines with timestamp, input_length, output_length, hash_ids (512 tokens each).  Without it: made-up\n"
        "agents of 33 turns from 12K to 80K tokens, in projects that share their beginning.";
    hits_opts o = { 0 };
    dm_opt_result res;
    dm_err e = { 0 };
    int rc = cmd_parse(usage, what, options, DM_COUNT(options), &o, argc, argv, &res);
    if (rc != 0) return rc > 0 ? 0 : dm_exit_code(rc);
    trace t = { .path = res.nargs == 1 ? res.args[0] : NULL };
    int extra = res.nargs > 1;
    dm_free(res.args);
    if (extra) return cmd_usage(usage, "bench hits takes one trace");
    made m = { .seed = (uint64_t)o.seed, .sessions = (int)o.sessions, .live = (int)(o.live < o.sessions ? o.live : o.sessions) };
    side s = { 0 };
    out_log_to_stderr(false);
    signals_catch();
    rc = both(&o, &m, &t, &s, &e);
    if (err_is_terminal()) err_printf("\r\033[K");
    if (rc == 0) rc = tell(&o, &s, &e);
    if (t.f) fclose(t.f);
    free(t.line);
    dm_ids_free(&t.ids);
    dm_ids_free(&m.ids);
    dm_free(m.agents);
    return rc < 0 ? cmd_fail(rc, &e) : 0;
}
