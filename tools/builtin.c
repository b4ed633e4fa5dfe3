/* The built-in tools, one row each.  A model directory may bring its own descriptions and schemas; the result texts are
 * ours and a contract, since models are trained on them:
 *
 *   read   the file's lines as they are, without the last newline; with offset (first line, from 1) and limit only those
 *   write  Wrote N bytes to PATH
 *   edit   Edited PATH: 1 replacement                     else  error: text not found in PATH
 *   glob   one path per line, sorted by bytes             else  No files found
 *   grep   PATH:LINE:TEXT per line, sorted by path        else  No matches found
 *   bash   the output without its last newline; then, if the exit status N is not 0, `exit code N` on its own line
 *   a missing file                                              error: no such file: PATH
 *   any other fault                                             error: and a sentence that names the thing
 *
 * What is lost in a crash (on_unknown): reading may be done again.  Writing, editing and commands never: another call or
 * a person may have built on their effect, so the model is told that the outcome is unknown and can look.
 *
 * write and edit are exclusive: calls are taken in the order in which they were started, those before them end first,
 * those after them see what they wrote.  All others run side by side. */
#include "tools/tools_int.h"

static const builtin read_tool = {
    .name = "read",
    .description = "Read a text file of the workspace. Returns its lines as they are. For a long file give offset (the first line, "
                   "counted from 1) and limit (how many lines).",
    .schema = "{\"type\":\"object\",\"properties\":{"
              "\"path\":{\"type\":\"string\",\"description\":\"path relative to the workspace\"},"
              "\"offset\":{\"type\":\"integer\",\"minimum\":0,\"description\":\"first line, from 1\"},"
              "\"limit\":{\"type\":\"integer\",\"minimum\":1,\"description\":\"number of lines\"}},"
              "\"required\":[\"path\"]}",
    .effects = DM_FX_READ, .on_unknown = DM_UNKNOWN_RETRY, .timeout_ms = 30000, .work = files_read,
};

static const builtin write_tool = {
    .name = "write",
    .description = "Write a file of the workspace, whole. Makes missing directories and replaces what was there.",
    .schema = "{\"type\":\"object\",\"properties\":{"
              "\"path\":{\"type\":\"string\",\"description\":\"path relative to the workspace\"},"
              "\"content\":{\"type\":\"string\",\"description\":\"everything that the file shall hold\"}},"
              "\"required\":[\"path\",\"content\"]}",
    .effects = DM_FX_WRITE, .on_unknown = DM_UNKNOWN_NEVER, .timeout_ms = 30000, .exclusive = true, .work = files_write,
};

static const builtin edit_tool = {
    .name = "edit",
    .description = "Replace text in a file of the workspace. old must occur exactly once, with its indentation; give more of the text "
                   "around it to make it unique, or set all to replace every occurrence.",
    .schema = "{\"type\":\"object\",\"properties\":{"
              "\"path\":{\"type\":\"string\",\"description\":\"path relative to the workspace\"},"
              "\"old\":{\"type\":\"string\",\"minLength\":1,\"description\":\"the exact text to replace\"},"
              "\"new\":{\"type\":\"string\",\"description\":\"the text to put there\"},"
              "\"all\":{\"type\":\"boolean\",\"description\":\"replace every occurrence\"}},"
              "\"required\":[\"path\",\"old\",\"new\"]}",
    .effects = DM_FX_WRITE, .on_unknown = DM_UNKNOWN_NEVER, .timeout_ms = 30000, .exclusive = true, .work = files_edit,
};

static const builtin glob_tool = {
    .name = "glob",
    .description = "List the files of the workspace that match a pattern, sorted. * and ? match within a name, ** any directories, "
                   "{a,b} either. A pattern without / matches names in every directory.",
    .schema = "{\"type\":\"object\",\"properties\":{"
              "\"pattern\":{\"type\":\"string\",\"minLength\":1,\"description\":\"for example src/**/*.c or *.md\"},"
              "\"path\":{\"type\":\"string\",\"description\":\"directory to look in\"}},"
              "\"required\":[\"pattern\"]}",
    .effects = DM_FX_READ, .on_unknown = DM_UNKNOWN_RETRY, .timeout_ms = 60000, .work = search_glob,
};

static const builtin grep_tool = {
    .name = "grep",
    .description = "Search the files of the workspace, line by line, for a regular expression (Perl syntax). Returns path:line:text.",
    .schema = "{\"type\":\"object\",\"properties\":{"
              "\"pattern\":{\"type\":\"string\",\"minLength\":1,\"description\":\"regular expression\"},"
              "\"path\":{\"type\":\"string\",\"description\":\"file or directory to search\"},"
              "\"glob\":{\"type\":\"string\",\"description\":\"only files whose path matches, for example *.c\"},"
              "\"ignore_case\":{\"type\":\"boolean\"}},"
              "\"required\":[\"pattern\"]}",
    .effects = DM_FX_READ, .on_unknown = DM_UNKNOWN_RETRY, .timeout_ms = 60000, .work = search_grep,
};

static const builtin bash_tool = {
    .name = "bash",
    .description = "Run a shell command in the workspace, in a sandbox: files outside are read-only, there is no network and no "
                   "terminal, input is empty. Returns its output. Background processes end with the command.",
    .schema = "{\"type\":\"object\",\"properties\":{"
              "\"command\":{\"type\":\"string\",\"minLength\":1},"
              "\"timeout\":{\"type\":\"integer\",\"minimum\":1,\"maximum\":3600,\"description\":\"seconds; 120 if not given\"}},"
              "\"required\":[\"command\"]}",
    .effects = DM_FX_EXTERNAL, .on_unknown = DM_UNKNOWN_NEVER, .timeout_ms = 120000, .start = bash_start, .stop = bash_stop,
};

const builtin *const builtins[] = {&read_tool, &write_tool, &edit_tool, &glob_tool, &grep_tool, &bash_tool};
const size_t builtins_count = DM_COUNT(builtins);
