/* check_int.h — the checklist of a new deployment: what `dormouse model verify DIR` does without vectors. */
#ifndef DM_CHECK_INT_H
#define DM_CHECK_INT_H

#include "agent/agent_int.h"

typedef enum check_result { CHECK_OK, CHECK_FAILED, CHECK_SKIPPED } check_result;
/* One line of the list; `data` are figures for a report (owned by the report). */
typedef struct check_row {
    char name[32];
    check_result result;
    double seconds;
    char detail[512];
} check_row;

typedef struct check_opts {
    const char *dir;       /* the model's */
    const char *cache_dir; /* where fingerprints are kept, or NULL */
    dm_numerics numerics;
    const char *isa;
    int threads, rows;
    int64_t mem_bytes;     /* 0: the machine's */
    int64_t context;       /* the ladder's end; 0: 2048, or the model's if that is less */
    unsigned switches;
    dm_progress progress;  /* may be NULL */
    void (*row)(void *ctx, const check_row *row); /* as each is done */
    void *ctx;
} check_opts;

/* 0 when the list was gone through, whatever came out: *failed rows did not pass.  *report (owned by the caller) is an object with
 * one entry per row.  DM_ECANCELED, DM_ENOMEM. */
int check_model(const check_opts *o, json_t **report, int *failed, dm_err *e);

/* The same as a command: a table on standard output, the report to a file (NULL: none).  Returns the exit status: 0 all passed,
 * 1 something did not. */
int cmd_check(const check_opts *o, const char *report_file);

#endif
