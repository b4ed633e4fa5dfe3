/* sandbox.h — runs one command under stated limits, or refuses.
 *
 * Nouns
 *   launcher  a small process (dormouse-sandbox) started before the engine touches memory; it alone spawns.
 *             Its death kills everything that it spawned.
 *   level     what confinement was really obtained: full, partial or none (shared/spec: fallback ladder)
 *   command   argv + limits + rights; becomes one bubblewrap process tree with its own pid, net, ipc, uts,
 *             mount and user namespaces, seccomp filter, rlimits and environment
 *
 * Promises
 *   S1  Asked level not available: DM_ESANDBOX, nothing runs, and the text says what is missing and how to get it.
 *   S2  Inside: writes only under `write` paths, no network unless asked, none of the caller's environment but
 *       the allowlist, descriptors 0 1 2 only, no controlling terminal, stdin is empty.
 *       /tmp and the home are private and writable (the real home's entries are in it, read-only, without secrets);
 *       .git/hooks, .git/config, .mcp.json, .vscode, .idea, .dormouse of the workspace are read-only, missing ones
 *       cannot be made (launcher/protect.c).  The rest of the system can be read.
 *   S3  When the command ends, times out, is killed, or the host dies, no process of it is left (pid namespace).
 *       An end that we choose is SIGTERM, then SIGKILL 300 ms later; a bound on memory or processes is SIGKILL at once.
 *   S4  The wrapper's failure is never mistaken for the command's: status travels on its own descriptor.
 *
 * Threads: one dm_sandbox belongs to one thread (the loop).  dm_sandbox_start blocks (< 1 s); all else does not. */
#ifndef DM_SANDBOX_H
#define DM_SANDBOX_H

#include "base/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dm_sandbox_level { DM_SANDBOX_NONE, DM_SANDBOX_PARTIAL, DM_SANDBOX_FULL } dm_sandbox_level;

typedef struct dm_sandbox dm_sandbox;
typedef struct dm_sandbox_opts {
    const char *launcher;      /* path of dormouse-sandbox; NULL: beside this program, then PATH */
    const char *bwrap;         /* NULL: "bwrap" from PATH */
    dm_sandbox_level level;    /* the least that will do; default FULL (set it!) */
    const char *const *hide;   /* directories shown empty inside (session store, keys); NULL-terminated, may be NULL */
} dm_sandbox_opts;

/* Starts the launcher and probes by really running `true` inside.  Call before big memory or threads exist. */
DM_API int dm_sandbox_start(dm_sandbox **out, const dm_sandbox_opts *o, dm_err *e);
DM_API void dm_sandbox_stop(dm_sandbox *s); /* kills what runs; NULL is fine */
DM_API dm_sandbox_level dm_sandbox_level_of(const dm_sandbox *s);
DM_API const char *dm_sandbox_report(const dm_sandbox *s); /* one line: level and what is missing, if anything */

typedef struct dm_sandbox_cmd {
    const char *const *argv;       /* NULL-terminated; argv[0] looked up in PATH inside */
    const char *workspace;         /* absolute; bound read-write; also the working directory */
    const char *cwd;               /* NULL: workspace */
    bool workspace_readonly;
    const char *const *write;      /* more writable directories, NULL-terminated, may be NULL */
    const char *const *env;        /* "K=V" added to the allowlisted environment; NULL-terminated, may be NULL */
    bool network;
    const void *input; size_t input_bytes; /* stdin, at most 1 MiB; then EOF */
    int timeout_ms;                /* wall clock; 0: 120000 */
    int64_t memory_bytes_max;      /* 0: no bound */
    int64_t file_bytes_max;        /* largest file it may write; 0: 1 GiB */
    int pids_max;                  /* 0: 256 */
    int cpu_s_max;                 /* 0: no bound */
    const char *tmp;               /* directory shown as /tmp (kept between commands); NULL: an empty one, gone afterwards */
} dm_sandbox_cmd;

typedef struct dm_sandbox_proc {
    int id;      /* of this launcher, > 0 */
    int out_fd;  /* read end of stdout, O_CLOEXEC|O_NONBLOCK; the caller closes it */
    int err_fd;  /* read end of stderr (same rules) */
} dm_sandbox_proc;

/* Everything is copied before return. */
DM_API int dm_sandbox_spawn(dm_sandbox *s, const dm_sandbox_cmd *c, dm_sandbox_proc *out, dm_err *e);
DM_API int dm_sandbox_kill(dm_sandbox *s, int id); /* its exit is still reported */

typedef struct dm_sandbox_exit {
    int id;
    int exit_code;      /* 0..255, or -1 */
    int signal;         /* that ended it, or 0 */
    bool timed_out;
    bool memory;        /* ended by the memory bound */
    bool killed;        /* by dm_sandbox_kill */
    bool setup_failed;  /* the sandbox could not be built for this command; text says why (S4) */
    bool pids;          /* ended by the bound on processes */
    int background;     /* processes that it left running and that were ended with it */
    int64_t wall_ms, cpu_ms, memory_bytes_peak;
    char text[256];
} dm_sandbox_exit;

/* Readable when dm_sandbox_next has something, or when the launcher died. */
DM_API int dm_sandbox_fd(const dm_sandbox *s);
/* One pointer for whoever drains dm_sandbox_next on behalf of several users (tools keeps its dispatcher there); NULL at
 * first, never touched here. */
DM_API void **dm_sandbox_slot(dm_sandbox *s);
/* 1: *out filled; 0: nothing now; DM_EPIPE: the launcher is gone (every running id is lost). */
DM_API int dm_sandbox_next(dm_sandbox *s, dm_sandbox_exit *out, dm_err *e);

#ifdef __cplusplus
}
#endif
#endif
