/* tools_int.h — private to tools/. */
#ifndef DM_TOOLS_INT_H
#define DM_TOOLS_INT_H

#include <stdatomic.h>
#include <sys/stat.h>

#include "tools/tools.h"

/* ---- shape.c: bytes of any kind -> text for a model, as a stream ------------------------------------------------ */

enum { SHAPE_LINE_MAX = 8192, SHAPE_ESCAPE_MAX = 4096 };
typedef enum shape_escape { ESC_NONE, ESC_START, ESC_CSI, ESC_STRING, ESC_STRING_ESC, ESC_INTERMEDIATE } shape_escape;

/* Bounded memory however much is fed: the head, a ring for the tail and one unfinished line. */
typedef struct shaper {
    size_t max;      /* bytes of the result */
    bool terminal;   /* CR and BS act as on a terminal; otherwise CR LF and CR are line ends */
    dm_buf line;     /* current line, not settled: a CR may still replace it */
    dm_buf head;     /* settled text, at most max bytes */
    uint8_t *ring;   /* the last max/2 bytes of what did not fit in head; made when needed */
    size_t ring_n, ring_at;
    uint64_t total;  /* settled bytes */
    uint64_t fed;
    shape_escape escape;
    size_t escape_n;
    bool cr;         /* a CR was the last byte */
} shaper;

void shaper_init(shaper *s, size_t max, bool terminal);
int shaper_feed(shaper *s, const void *p, size_t n);
/* Appends the result.  whole: where the whole output lies, named in the note; may be NULL. */
int shaper_end(shaper *s, dm_buf *out, bool *cut, const char *whole);
void shaper_free(shaper *s);

/* ---- schema.c ----------------------------------------------------------------------------------------------------- */

/* Refuses what the validator would have to ignore: remote references, hopeless depth, broken patterns. */
int schema_check(const json_t *schema, dm_err *e);
/* A validated and coerced copy in *out, or DM_ETOOL with the fault in words (no "error:" before it) in *fault. */
int schema_apply(const json_t *schema, const json_t *value, json_t **out, dm_buf *fault);
/* "path (string, required), offset (integer)" */
int schema_summary(const json_t *schema, dm_buf *out);

/* ---- path.c: names beneath the workspace -------------------------------------------------------------------------- */

typedef struct workspace {
    int fd;          /* O_PATH directory */
    char *given;     /* owned; as the caller wrote it */
    char *canonical; /* owned */
    int hidden;      /* O_PATH directory that nothing is opened in, or -1 */
} workspace;

int workspace_open(workspace *w, const char *path, const char *hide, dm_err *e);
void workspace_close(workspace *w);
/* Is it the hidden directory, or something in it? */
bool workspace_hides(const workspace *w, int fd);
/* Opens a name as the model wrote it; flags get O_CLOEXEC|O_NOCTTY|O_NONBLOCK.  A descriptor or -errno; -EACCES also for what is hidden; -EXDEV: it
 * lies outside. */
int workspace_at(const workspace *w, const char *name, int flags);
/* The same for a directory that is made, with its parents, when missing; DM_EFOREIGN: the name is protected. */
int workspace_dir_make(const workspace *w, const char *name);
/* Where an open descriptor really lies, relative to the workspace ("" for itself); -EXDEV when outside. */
int workspace_where(const workspace *w, int fd, char *out, size_t cap);
/* A relative real path that nothing but its own program may write (DM_EFOREIGN from what would). */
bool path_protected(const char *relative);

/* ---- runs ---------------------------------------------------------------------------------------------------------- */

typedef struct tool tool;
typedef struct builtin {
    const char *name, *description, *schema;
    dm_effects effects;
    dm_on_unknown on_unknown;
    int timeout_ms;
    bool exclusive; /* waits for every call before it, and those after it wait */
    /* On the pool; fills the run's text.  NULL: `start` runs it on the loop. */
    void (*work)(dm_tool_run *r);
    void (*start)(dm_tool_run *r);
    void (*stop)(dm_tool_run *r); /* of `start`: cancel or time-out; run_finish follows in time */
} builtin;

struct tool {
    char *name, *description; /* owned */
    json_t *parameters;       /* owned */
    const builtin *kind;      /* borrowed, static */
};

typedef enum run_state { RUN_QUEUED, RUN_WORKING, RUN_DONE } run_state;

struct dm_tool_run {
    dm_tools *tools;   /* borrowed */
    const tool *tool;  /* borrowed */
    json_t *args;      /* owned */
    dm_tool_done done;
    void *ctx;
    run_state state;
    bool in_pool;       /* uv work outstanding */
    atomic_bool stop;   /* asked to end: cancel or time-out */
    bool cancelled, timed_out;
    dm_tool_run *next;  /* in the registry's queue */
    uv_work_t work;
    uv_timer_t *timer;  /* owned until closed; NULL for none */
    uint64_t start_ns;
    /* the result so far; written by the worker or by start's callbacks */
    dm_buf text;
    bool is_error, cut;
    char *spill_path;
    int exit_code;
    int64_t output_bytes;
    void *own; /* of the kind (bash) */
};

struct dm_tools {
    dm_tools_opts o;
    char *spill_dir; /* owned */
    workspace ws;
    tool *list;
    size_t count;
    dm_tool_run *queue, **queue_end; /* waiting and working, in order of start */
    int active;
    char tmp[4096]; /* shown to commands as /tmp; "" until the first */
};

enum { RUN_MARGIN_MS = 10000 }; /* between asking for an end and giving up on it */
/* When the run is asked to end (again). */
void run_deadline(dm_tool_run *r, uint64_t ms);
/* Ends a run whose `start` owns the loop side; calls done().  On the loop. */
void run_finish(dm_tool_run *r);
/* The same from within `start`: the text is there, done() comes from the loop. */
void run_finish_later(dm_tool_run *r);
bool run_stopped(const dm_tool_run *r);
/* Replaces the text by "error: …". */
void run_error(dm_tool_run *r, const char *fmt, ...) DM_PRINTF(2, 3);
const char *run_text(const dm_tool_run *r, const char *key); /* string argument or NULL */
int64_t run_int(const dm_tool_run *r, const char *key, int64_t missing);
/* workspace_at for reading, and besides it the whole outputs that results point to: their names cannot be guessed. */
int run_open(const dm_tool_run *r, const char *name, int flags);
/* The sentence for a path that cannot be opened. */
void run_path_error(dm_tool_run *r, const char *name, int negative_errno);

/* ---- the built-ins -------------------------------------------------------------------------------------------------- */

extern const builtin *const builtins[];
extern const size_t builtins_count;
void files_read(dm_tool_run *r);
void files_write(dm_tool_run *r);
void files_edit(dm_tool_run *r);
void search_glob(dm_tool_run *r);
void search_grep(dm_tool_run *r);
void bash_start(dm_tool_run *r);
void bash_stop(dm_tool_run *r);
/* Takes this registry off the sandbox's dispatcher. */
void bash_forget(dm_tools *t);

#endif
