/* launcher_int.h — private to dormouse-sandbox.
 *
 * One program in two roles:
 *   serve      the launcher: one loop over the host's socket and the running commands (server.c).  It plans (plan.c,
 *              protect.c), starts (spawn.c), watches (watch.c) and reports.
 *   supervise  the first process of one command's sandbox (supervise.c): confines itself (confine.c), runs the
 *              command, and tells its true end on a descriptor that the command never has.
 *
 * bubblewrap stands between the two where user namespaces are to be had.  Descriptors at its start: */
#ifndef DM_LAUNCHER_INT_H
#define DM_LAUNCHER_INT_H

#include <sys/types.h>

#include "sandbox/wire_int.h"

enum {
    FD_IN = 0,
    FD_OUT = 1,
    FD_DIAG = 2,   /* what bubblewrap itself complains about; never the command's stderr */
    FD_ERR = 3,    /* the command's stderr */
    FD_STATUS = 4, /* sup_record, from the supervisor */
    FD_CONFIG = 5, /* sealed payload for the supervisor */
    FD_FILTER = 6, /* seccomp program */
    FD_ARGS = 7,   /* bubblewrap: --args */
    FD_INFO = 8,   /* bubblewrap: --json-status-fd */
    FD_COUNT = 9,
};

/* What the supervisor is to do (SB_T_INSIDE). */
enum { IN_PIDNS = 1, IN_LANDLOCK = 2, IN_SECCOMP = 4, IN_NPROC = 8 };

enum sup_kind { SUP_STARTED = 1, SUP_FAILED, SUP_ENDED };
typedef struct sup_record {
    int32_t kind;
    int32_t status; /* ENDED: as from waitpid */
    int32_t background;
    int32_t zero;
    int64_t cpu_ms, rss_bytes_max;
    char text[192]; /* FAILED */
} sup_record;

/* ---- confine.c ---- */
int confine_landlock_abi(void); /* 0: the kernel has none */
/* Read and execute beneath r->read, everything beneath r->write; nothing else of the file system. */
int confine_landlock(const sb_request *r, dm_err *e);
int confine_limits(const sb_request *r, dm_err *e);
int confine_privileges(dm_err *e); /* no capability, and none to come */
int confine_filter(int fd, dm_err *e);

/* ---- filter.c ---- */
/* The seccomp program as a memfd; sockets of the internet families are denied too when deny_inet. */
int filter_build(bool deny_inet, dm_err *e);

/* ---- supervise.c ---- */
int supervise_main(void);

/* ---- ladder: what this machine gives ---- */
typedef enum mode { MODE_NONE, MODE_LANDLOCK, MODE_BWRAP_HOST_PROC, MODE_BWRAP } mode;

/* ---- plan.c ---- */
typedef enum op_kind { OP_TMPFS, OP_TMP, OP_READ, OP_WRITE, OP_MASK, OP_HIDE, OP_LINK } op_kind;
typedef struct op {
    char *path; /* owned, canonical */
    char *from; /* owned; what is shown there; NULL: path itself */
    op_kind kind;
    int rank; /* of two operations on one path the higher one stays */
    bool verify; /* lies where commands can write: inside it must be this very inode, or somebody swapped it meanwhile */
    uint64_t dev, ino;
} op;
typedef struct plan {
    op *ops;
    size_t n, cap;
    dm_buf ghosts; /* NUL-separated placeholders made for missing names: see protect.c */
} plan;
enum { RANK_BASE, RANK_HOME, RANK_WRITE, RANK_PROTECT, RANK_HIDE };
int plan_add(plan *p, op_kind kind, int rank, const char *path, const char *from);
void plan_free(plan *p);
/* Canonical paths in *r are expected (spawn.c).  home may be NULL. */
int plan_make(plan *p, const sb_request *r, const sb_request *hello, dm_err *e);
/* bubblewrap's arguments, each with its NUL. */
int plan_args(const plan *p, const sb_request *r, mode m, const char *self, dm_buf *out);
/* What the supervisor must find: "DEV INO r|w PATH", r for a read-only mount, w for a mount point. */
int plan_verify(const plan *p, dm_buf *out);
/* The same rights as payload lists for Landlock inside bubblewrap. */
int plan_landlock(const plan *p, dm_buf *out);
/* Rights for Landlock alone: nothing hides what it does not name. */
int plan_landlock_alone(const sb_request *r, const sb_request *hello, dm_buf *out);

/* ---- protect.c ---- */
/* Opens a canonical path and follows no link at all: -ELOOP says that somebody put one there. */
int open_plain(const char *path, int flags);
/* Names in a workspace that something trusted obeys later (hooks, editor tasks, server lists). */
int protect_plan(plan *p, const char *workspace, dm_err *e);
void protect_release(plan *p); /* removes placeholders that no other command needs */

/* ---- watch.c ---- */
typedef struct usage { int64_t rss_bytes; int processes; } usage;
usage watch_tree(pid_t root);
int watch_children(pid_t parent, pid_t *out, int cap); /* how many were written */
void watch_kill_tree(pid_t root, int sig);

/* ---- spawn.c ---- */
typedef struct child {
    pid_t pid;
    int pidfd, status_fd, diag_fd, info_fd;
    plan plan;
} child;
typedef struct launcher {
    int sock;
    mode mode;
    sb_request hello;
    char bwrap[4096], self[4096], scratch[64];
    int filter[2]; /* [deny_inet] */
    int landlock_abi;
    struct command *commands;
    dm_buf tmps; /* NUL-separated: directories shown as /tmp, removed at the end should the host not live to do it */
    int count;
} launcher;
/* Owns none of the descriptors given. */
int spawn_start(launcher *l, sb_request *r, int in, int out, int err, child *c, dm_err *e);

/* ---- ladder.c ---- */
/* Finds the best mode by really running `true` in each, best first; fills the report. */
int ladder_probe(launcher *l, dm_sandbox_level least, sb_ready *out);

/* ---- server.c ---- */
size_t server_commands_bytes(void); /* of launcher.commands */
int server_run(launcher *l);
/* Runs one command to its end (the probe). */
int server_run_one(launcher *l, sb_request *r, sb_exit *x);

#endif
