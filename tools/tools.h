/* tools.h — one registry of tools: what the model is told, what is validated, what runs.
 *
 * Nouns
 *   registry  the tools of one session, in the order in which the prompt lists them
 *   tool      name, description, JSON Schema, effects, on_unknown, limits; a built-in function or (later) a
 *             script, native or MCP tool.  Prompt text, validation, approval and sandbox profile come from it
 *   call      one invocation with validated arguments
 *   result    the exact text that the model will see: valid UTF-8, no NUL, no escape codes, head and tail
 *             kept when cut.  It never changes afterwards
 *
 * Built in: read write edit glob grep bash.  Their result texts are a contract (the embedded model was trained
 * on them; see the table in tools/builtin.c).  File tools resolve every path beneath the workspace's descriptor
 * (openat2 RESOLVE_BENEATH; symlinks that stay inside work), refuse FIFOs and devices, and write atomically.
 *
 * Threads: a registry belongs to one uv loop; done() is called on it.  Work that can block runs on libuv's
 * pool or in the sandbox. */
#ifndef DM_TOOLS_H
#define DM_TOOLS_H

#include <jansson.h>
#include <uv.h>

#include "base/base.h"
#include "sandbox/sandbox.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum dm_effects { DM_FX_NONE, DM_FX_READ, DM_FX_WRITE, DM_FX_EXTERNAL } dm_effects;
/* What to do with a call that was started before a crash and has no result (C4). */
typedef enum dm_on_unknown { DM_UNKNOWN_RETRY, DM_UNKNOWN_PROBE, DM_UNKNOWN_ASK, DM_UNKNOWN_NEVER } dm_on_unknown;

typedef struct dm_tool_info { /* borrowed, as long as the registry lives */
    const char *name, *description;
    const json_t *parameters; /* JSON Schema */
    dm_effects effects;
    dm_on_unknown on_unknown;
    int timeout_ms;
} dm_tool_info;

typedef struct dm_tools dm_tools;
typedef struct dm_tools_opts {
    uv_loop_t *loop;
    dm_sandbox *sandbox;         /* borrowed; NULL: bash is refused with a clear error */
    const char *workspace;       /* directory; its descriptor is held open */
    size_t result_bytes_max;     /* what the model sees of one result; 0: 16 KiB */
    size_t output_bytes_max;     /* bytes kept of one command's output before it is stopped; 0: 64 MiB */
    const char *spill_dir;       /* whole outputs that were cut are kept here; NULL: not kept */
    const char *hide;            /* an existing directory of which tools see and change nothing, also when it lies in the workspace (sessions, the
                                    store); commands are kept from it by dm_sandbox_opts.hide.  NULL: none */
} dm_tools_opts;

DM_API int dm_tools_create(dm_tools **out, const dm_tools_opts *o, dm_err *e);
DM_API void dm_tools_destroy(dm_tools *t); /* no call may be running */

/* Offers a built-in under its name.  description/parameters override the built-in's own when not NULL (a model
 * directory may state the schemas that it was trained on).  DM_ENOENT: no such built-in. */
DM_API int dm_tools_add_builtin(dm_tools *t, const char *name, const char *description, const json_t *parameters, dm_err *e);
DM_API int dm_tools_add_defaults(dm_tools *t, dm_err *e); /* all built-ins with the product's own texts */
DM_API size_t dm_tools_count(const dm_tools *t);
DM_API int dm_tools_info(const dm_tools *t, size_t i, dm_tool_info *out);
DM_API int dm_tools_find(const dm_tools *t, const char *name); /* index or DM_ENOENT */

/* Arguments as the model wrote them -> validated, coerced copy ("5" for an integer is 5, JSON text for an array
 * is the array).  DM_ETOOL: *text (dm_free) is the sentence for the model, which names the fault and the known
 * tools or parameters. */
DM_API int dm_tools_check(const dm_tools *t, const char *name, const char *args_json, json_t **args, char **text, dm_err *e);

typedef struct dm_tool_result {
    char *text;             /* owned by the receiver of done(): dm_free; never NULL, NUL-terminated */
    size_t text_bytes;
    bool is_error;
    bool cut;               /* head and tail only; spill_path (or NULL) has the whole */
    char *spill_path;       /* owned: dm_free */
    int exit_code;          /* bash; -1 otherwise */
    bool timed_out, cancelled;
    int64_t output_bytes;   /* before cutting */
    int64_t wall_ms;
} dm_tool_result;

typedef struct dm_tool_run dm_tool_run;
typedef void (*dm_tool_done)(void *ctx, dm_tool_result *r);
/* Starts a call with arguments from dm_tools_check.  done() is called once, on the loop, always.  A fault of
 * the tool is a result with is_error, not an error of this function. */
DM_API int dm_tools_start(dm_tools *t, const char *name, const json_t *args, dm_tool_done done, void *ctx, dm_tool_run **out, dm_err *e);
DM_API void dm_tools_cancel(dm_tool_run *r); /* done() follows, with cancelled set */
DM_API void dm_tool_result_free(dm_tool_result *r);

/* Makes any bytes fit to be shown to a model: valid UTF-8, no NUL, no terminal escapes, CR handled; at most
 * max_bytes with a note of what was left out between head and tail. */
DM_API int dm_tool_shape(const void *p, size_t n, size_t max_bytes, dm_buf *out, bool *cut);

#ifdef __cplusplus
}
#endif
#endif
