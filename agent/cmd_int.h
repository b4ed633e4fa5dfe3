/* cmd_int.h — what the commands share: the table, output, opening everything. */
#ifndef DM_CMD_INT_H
#define DM_CMD_INT_H

#include <signal.h>

#include "agent/agent_int.h"

/* ---- cmd.c ------------------------------------------------------------------------------------------ */

typedef struct cmd {
    const char *name, *args, *what; /* "run", "[PROMPT|-]", one line */
    int (*fn)(int argc, char **argv); /* arguments behind the name; returns the exit status */
} cmd;
/* Runs the command that argv[0] names; prefix is what was typed before it, for messages. */
int cmd_dispatch(const cmd *table, size_t n, const char *prefix, int argc, char **argv);
/* Parses a command's options.  0: go on, res->args is to be freed; 1: help was printed, exit with 0; <0: a message
 * was printed, exit with 2. */
int cmd_parse(const char *usage, const char *what, const dm_opt *table, size_t n, void *dst, int argc, char **argv, dm_opt_result *res);
/* Prints the error and gives the exit status for it. */
int cmd_fail(int rc, const dm_err *e);
int cmd_usage(const char *usage, const char *fmt, ...) DM_PRINTF(2, 3);

int cmd_run(int argc, char **argv);
int cmd_chat(int argc, char **argv);
int cmd_sessions(int argc, char **argv);
int cmd_kv(int argc, char **argv);
/* cmd_kv.c: the stores of a state directory (NULL: the default one), sorted. */
int kv_store_dirs(const char *state_dir, char ***out, size_t *n, dm_err *e);
void kv_store_dirs_free(char **dirs, size_t n);
int kv_ls(int argc, char **argv);     /* cmd_kv_list.c, as gc */
int kv_gc(int argc, char **argv);
int kv_export(int argc, char **argv); /* cmd_kv_export.c */
int kv_import(int argc, char **argv); /* cmd_kv_import.c */
int cmd_bench(int argc, char **argv);
int bench_hits(int argc, char **argv); /* cmd_hits.c */
int kv_why(int argc, char **argv);     /* cmd_why.c */
int kv_metrics(int argc, char **argv); /* metrics.c */
/* metrics.c: figures of n stores in Prometheus' text format. */
int metrics_text(dm_buf *out, const char *const *dirs, const dm_kv_stat *st, size_t n);

#define BENCH_ROUNDS_MAX 64
typedef struct bench_decode_opts {
    const char *dir, *model;
    size_t block_bytes, state_bytes;
    int64_t quota_bytes;
    int rounds, threads;     /* at most BENCH_ROUNDS_MAX; threads 0: one per core */
} bench_decode_opts;
/* cmd_bench_decode.c: decode_with_spill and ready_delay_steps. */
int bench_decode(const bench_decode_opts *o, dm_kv_bench_row rows[2], dm_err *e);
int cmd_model(int argc, char **argv);

/* An integer member for printf. */
static inline long long json_num(const json_t *o, const char *key) { return (long long)json_int(o, key, 0); }

/* ---- cmd_out.c ---------------------------------------------------------------------------------------- */

/* Writes all of it, whatever kind of file standard output is; DM_EPIPE when the reader has gone (then and later). */
int out_write(const void *p, size_t n);
int out_text(const char *s);
int out_printf(const char *fmt, ...) DM_PRINTF(1, 2);
int out_json(const json_t *v); /* one line */
/* Text that a model or a tool wrote: on a terminal without the control characters that would steer it. */
int out_untrusted(const char *p, size_t n);
void err_printf(const char *fmt, ...) DM_PRINTF(1, 2);
bool err_is_terminal(void);
/* Warnings and errors (verbose: everything) of the libraries go to standard error. */
void out_log_to_stderr(bool verbose);
int read_stdin(size_t max_bytes, dm_buf *out, dm_err *e);

/* Signals before the loop runs: remembered, so that long preparations can stop. */
void signals_catch(void);
int signals_caught(void); /* the number, or 0 */
void signals_clear(void);

/* ---- cmd_setup.c ------------------------------------------------------------------------------------------ */

typedef struct setup_opts {
    const char *model, *state_dir, *workspace, *numerics, *isa, *sleep, *sandbox, *kv_salt, *switches, *speculate;
    dm_opt_strs stop;
    const char *resume; /* a session that must exist: said before anything big is opened */
    int64_t threads, ctx_tokens, rows, memory, kv_bytes, kv_write_day, ram_bytes, max_turns, max_tokens;
    bool kv, yes, ask, verbose, grammar;
} setup_opts;

#define CMD_ISAS "scalar|avx2|avx512|amx" /* all that any build has; what this processor lacks is refused when it is asked for */

/* Options that every command with a model has; first member of its struct must be setup_opts. */
#define SETUP_OPTIONS                                                                                                                   \
    { "workspace", 'C', DM_OPT_STR, offsetof(setup_opts, workspace), .metavar = "DIR", .help = "directory that the tools work in; default: the current one" },  \
    { "model", 'm', DM_OPT_STR, offsetof(setup_opts, model), .env = "DORMOUSE_MODEL", .metavar = "DIR", .help = "model directory; default: the embedded one" },  \
    { "state-dir", 0, DM_OPT_STR, offsetof(setup_opts, state_dir), .env = "DORMOUSE_STATE_DIR", .metavar = "DIR", .help = "sessions and stored KV; default: ~/.local/state/dormouse" }, \
    { "max-turns", 0, DM_OPT_INT, offsetof(setup_opts, max_turns), .def = "50", .min = 1, .max = 100000, .help = "model turns at most" },  \
    { "max-tokens", 0, DM_OPT_INT, offsetof(setup_opts, max_tokens), .def = "4096", .min = 1, .max = 1048576, .help = "generated tokens per turn at most" }, \
    { "stop", 0, DM_OPT_STRS, offsetof(setup_opts, stop), .metavar = "TEXT", .help = "end a reply where its text has this; may be repeated" },  \
    { "yes", 'y', DM_OPT_FLAG, offsetof(setup_opts, yes), .def = "0", .help = "approve every call that would ask" },                      \
    { "ask", 0, DM_OPT_FLAG, offsetof(setup_opts, ask), .def = "0", .help = "calls that write ask first" },                                \
    { "sandbox", 0, DM_OPT_ENUM, offsetof(setup_opts, sandbox), .def = "full", .choices = "full|partial|none", .help = "least confinement of commands" },  \
    { "numerics", 0, DM_OPT_ENUM, offsetof(setup_opts, numerics), .def = "fast", .choices = "fast|exact|plain", .help = "numeric path" }, \
    { "threads", 0, DM_OPT_INT, offsetof(setup_opts, threads), .def = "0", .min = 0, .max = 1024, .help = "of the model; 0: one per core" },   \
    { "isa", 0, DM_OPT_ENUM, offsetof(setup_opts, isa), .choices = CMD_ISAS, .help = "instruction set; default: the best there is" },       \
    { "context", 0, DM_OPT_INT, offsetof(setup_opts, ctx_tokens), .def = "0", .min = 0, .max = 1 << 24, .help = "tokens at most; 0: the model's, or what fits" }, \
    { "ctx-tokens", 0, DM_OPT_INT, offsetof(setup_opts, ctx_tokens), .min = 0, .max = 1 << 24 }, /* its old name */                      \
    { "rows", 0, DM_OPT_INT, offsetof(setup_opts, rows), .def = "0", .min = 0, .max = 65536, .help = "rows of a step at most; 0: 256" },    \
    { "memory", 0, DM_OPT_BYTES, offsetof(setup_opts, memory), .def = "0", .help = "for the model; 0: the machine's, or its control group's bound" }, \
    { "speculate", 0, DM_OPT_STR, offsetof(setup_opts, speculate), .def = "auto", .metavar = "auto|off|N", .help = "tokens that the MTP layer drafts ahead; no output depends on it" }, \
    { "debug-switch", 0, DM_OPT_STR, offsetof(setup_opts, switches), .def = "", .metavar = "NAME,…", .help = "shared-unclamped, kv-bf16, index-f32: for finding a difference" }, \
    { "kv", 0, DM_OPT_FLAG, offsetof(setup_opts, kv), .def = "1", .help = "keep KV blocks in RAM and on disk (--no-kv: do not)" },         \
    { "kv-bytes", 0, DM_OPT_BYTES, offsetof(setup_opts, kv_bytes), .def = "16G", .help = "disk for stored KV at most" },                    \
    { "kv-write-budget", 0, DM_OPT_BYTES, offsetof(setup_opts, kv_write_day), .def = "0", .help = "stored KV written in a day (UTC) at most; 0: no bound" }, \
    { "ram-bytes", 0, DM_OPT_BYTES, offsetof(setup_opts, ram_bytes), .def = "1G", .help = "memory for stored KV at most" },                 \
    { "kv-salt", 0, DM_OPT_STR, offsetof(setup_opts, kv_salt), .def = "", .help = "stored KV is shared only under equal salts" },            \
    { "grammar", 0, DM_OPT_FLAG, offsetof(setup_opts, grammar), .def = "1", .help = "hold calls to the tools' schemas (--no-grammar: do not)" }, \
    { "sleep", 0, DM_OPT_ENUM, offsetof(setup_opts, sleep), .def = "always", .choices = "always|never", .help = "give memory up at a tool call" }, \
    { "verbose", 'v', DM_OPT_FLAG, offsetof(setup_opts, verbose), .def = "0", .help = "say more on standard error" },                    \
    { "help", 'h', DM_OPT_HELP, 0, .help = "this text" }

typedef struct setup {
    const setup_opts *o; /* borrowed */
    uv_loop_t loop;
    bool loop_open;
    char *state_dir, *model_dir, *workspace; /* owned */
    dm_sandbox *sandbox;
    dm_model *model;
    dm_tok *tok;
    dm_vocab *vocab;
    dm_forward_opts fo;  /* what fits of what was asked for */
    int speculate;       /* as in dm_engine_opts */
    dm_forward *forward;
    dm_engine *engine;
    dm_kv *kv;
    dm_journal *journal;
    dm_host *host;
    json_t *agent;       /* agent.json; NULL: none */
    dm_hash weights, root;
} setup;

/* Opens everything in the order that the sandbox needs: launcher, then weights, then threads. */
int setup_open(setup *s, const setup_opts *o, dm_err *e);
/* Only what says which model it is, the store and the journal: no sandbox, no engine, no loop, no host. */
int setup_open_store(setup *s, const setup_opts *o, dm_err *e);
/* Runs the loop dry and closes everything; fine on a half opened one. */
void setup_close(setup *s);
/* Where state lives: the option, else XDG_STATE_HOME, else ~/.local/state/dormouse. NULL: out of memory. */
char *setup_state_dir(const char *option);
/* The option, else the embedded model beside the program or above it in a source tree.  DM_EMODEL. */
int setup_model_dir(const char *option, char **out, dm_err *e);
void setup_session_opts(const setup *s, dm_session_opts *out);

/* ---- cmd_phases.c ----------------------------------------------------------------------------------------------- */

/* One line per phase of a turn on standard error. */
void phases_event(const dm_host_event *ev);
/* A line that is rewritten while a long prompt is read; only on a terminal. */
void progress_event(const dm_host_event *ev);

#endif
