/* glob and grep.  On libuv's pool.
 *
 * The tree is walked by descriptors without following links, in the byte order of whole paths ("a-b" before "a/b"), so a
 * result is sorted as it grows and a long one can stop early.  Version-control directories are never entered; names with
 * a leading dot only when the pattern names one (glob) or always (grep). */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pcre2.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/tools_int.h"

enum { PATH_BYTES = 4096, WALK_DEPTH_MAX = 64, WALK_ENTRIES_MAX = 1 << 20, DIR_ENTRIES_MAX = 1 << 18 };
enum { LINE_SHOWN_MAX = 500, LINE_SEARCHED_MAX = 1 << 16, BLOCK = 256 << 10, MATCHES_MAX = 2000 };

/* ---- the walk ------------------------------------------------------------------------------------------------------------- */

typedef struct entry {
    char *name; /* owned; directories end with a slash */
} entry;

typedef struct walker walker;
struct walker {
    dm_tool_run *r;
    bool hidden; /* enter and show names with a leading dot */
    int (*file)(walker *w, int dir, const char *name, const char *path); /* 1: enough */
    void *ctx;
    char path[PATH_BYTES];
    int64_t entries;
    bool incomplete; /* a bound was reached */
};

static int entry_order(const void *a, const void *b) { return strcmp(((const entry *)a)->name, ((const entry *)b)->name); }

static bool version_control(const char *name) {
    return strcmp(name, ".git") == 0 || strcmp(name, ".hg") == 0 || strcmp(name, ".svn") == 0 || strcmp(name, ".jj") == 0;
}

static bool is_dir(int dir, const struct dirent *it) {
    struct stat st;
    if (it->d_type != DT_UNKNOWN) return it->d_type == DT_DIR;
    return fstatat(dir, it->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 && S_ISDIR(st.st_mode);
}

static int entry_add(entry **list, size_t *n, size_t *cap, const char *name, bool dir) {
    if (*n == *cap) {
        const size_t more = *cap ? 2 * *cap : 64;
        entry *p = dm_realloc(*list, more * sizeof *p);
        if (!p) return DM_ENOMEM;
        *list = p;
        *cap = more;
    }
    const size_t len = strlen(name);
    char *copy = dm_malloc(len + 2);
    if (!copy) return DM_ENOMEM;
    memcpy(copy, name, len + 1);
    if (dir) memcpy(copy + len, "/", 2);
    (*list)[(*n)++].name = copy;
    return 0;
}

/* All names of a directory, sorted.  Takes the descriptor. */
static int entries_read(walker *w, int fd, entry **list, size_t *n) {
    size_t cap = 0;
    int rc = 0;
    DIR *d = fdopendir(fd);
    if (!d) {
        close(fd);
        return 0;
    }
    for (struct dirent *it; rc == 0 && (it = readdir(d));) {
        const char *name = it->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0 || version_control(name)) continue;
        if (name[0] == '.' && !w->hidden) continue;
        if (*n >= DIR_ENTRIES_MAX || ++w->entries > WALK_ENTRIES_MAX) {
            w->incomplete = true;
            break;
        }
        rc = entry_add(list, n, &cap, name, is_dir(dirfd(d), it));
    }
    closedir(d);
    if (*n > 1) qsort(*list, *n, sizeof **list, entry_order);
    return rc;
}

/* fd: the directory, borrowed; w->path holds its name with a slash, or nothing.  0, 1 (enough) or an error. */
static int walk(walker *w, int fd, int depth) {
    entry *list = NULL;
    size_t n = 0;
    const size_t base = strlen(w->path);
    int again = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    int rc = again < 0 ? 0 : entries_read(w, again, &list, &n);
    for (size_t i = 0; rc == 0 && i < n && !run_stopped(w->r); i++) {
        const size_t len = strlen(list[i].name);
        const bool dir = list[i].name[len - 1] == '/';
        if (base + len >= sizeof w->path || (dir && depth == 0)) {
            w->incomplete = true;
            continue;
        }
        memcpy(w->path + base, list[i].name, len + 1);
        if (dir) {
            int sub = openat(fd, list[i].name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
            if (sub >= 0 && !workspace_hides(&w->r->tools->ws, sub)) rc = walk(w, sub, depth - 1);
            if (sub >= 0) close(sub);
        } else {
            rc = w->file(w, fd, list[i].name, w->path);
        }
        w->path[base] = 0;
    }
    for (size_t i = 0; i < n; i++) dm_free(list[i].name);
    dm_free(list);
    return rc;
}

/* Opens what `path` names (NULL: the workspace) and puts its shown form into w->path: as it was written, tidied; a directory
 * with a slash.  The descriptor, or -1 with the fault told. */
static int walk_open(walker *w, const char *path, bool *dir) {
    const workspace *ws = &w->r->tools->ws;
    char shown[PATH_BYTES];
    struct stat st;
    if (!path || !path[0]) path = ".";
    int fd = run_open(w->r, path, O_RDONLY);
    int rc = fd < 0 ? fd : fstat(fd, &st) == 0 ? 0 : -errno;
    if (rc != 0 || path[0] != '/' || workspace_where(ws, fd, shown, sizeof shown) != 0) snprintf(shown, sizeof shown, "%s", path);
    if (rc == 0 && !S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) rc = -ENXIO;
    if (rc < 0) {
        run_path_error(w->r, path, rc);
        if (fd >= 0) close(fd);
        return -1;
    }
    const char *at = shown;
    while (at[0] == '.' && at[1] == '/') at += 1 + strspn(at + 1, "/");
    size_t n = strlen(at);
    while (n > 0 && at[n - 1] == '/') n--;
    if (n == 1 && at[0] == '.') n = 0;
    *dir = S_ISDIR(st.st_mode);
    if (n + 2 > sizeof w->path) n = 0;
    memcpy(w->path, at, n);
    w->path[n] = 0;
    if (*dir && n > 0) memcpy(w->path + n, "/", 2);
    return fd;
}

static bool text_full(const dm_tool_run *r, size_t more) { return r->text.n + more + 200 > r->tools->o.result_bytes_max; }

/* ---- patterns ---------------------------------------------------------------------------------------------------------------- */

static int class_translate(const char **at, dm_buf *re) {
    const char *p = *at + 1;
    int rc = dm_buf_str(re, "(?!/)[");
    if (rc == 0 && (*p == '!' || *p == '^')) rc = dm_buf_byte(re, '^'), p++;
    const char *const first = p;
    for (; rc == 0 && *p && (*p != ']' || p == first); p++) {
        if (*p == '\\' || *p == '[' || *p == ']') rc = dm_buf_byte(re, '\\');
        if (rc == 0) rc = dm_buf_byte(re, (uint8_t)*p);
    }
    if (*p != ']') return DM_EINVAL;
    *at = p;
    return rc == 0 ? dm_buf_byte(re, ']') : rc;
}

/* Two stars as a whole name: any directories, none included; at the end anything beneath. */
static int stars_translate(const char **at, dm_buf *re) {
    const char *p = *at;
    while (*p == '*') p++;
    if (*p == '/') {
        *at = p;
        return dm_buf_str(re, "(?:(?!\\.)[^/]+/)*");
    }
    *at = p - 1;
    return dm_buf_str(re, "(?:(?!\\.)[^/]+/)*(?!\\.)[^/]+");
}

/* A regular expression for a path.  Wildcards do not match a leading dot. */
static int glob_translate(const char *glob, dm_buf *re) {
    int rc = dm_buf_str(re, strchr(glob, '/') ? "\\A" : "\\A(?:(?!\\.)[^/]+/)*"), braces = 0;
    bool start = true; /* of a name */
    for (const char *p = glob; rc == 0 && *p; p++) {
        const bool at_start = start;
        start = *p == '/';
        if (*p == '*' && p[1] == '*' && at_start) rc = stars_translate(&p, re), start = *p == '/';
        else if (*p == '*') rc = dm_buf_str(re, at_start ? "(?!\\.)[^/]*" : "[^/]*");
        else if (*p == '?') rc = dm_buf_str(re, at_start ? "(?!\\.)[^/]" : "[^/]");
        else if (*p == '[') rc = class_translate(&p, re);
        else if (*p == '{') rc = dm_buf_str(re, "(?:"), braces++, start = at_start;
        else if (*p == '}' && braces) rc = dm_buf_byte(re, ')'), braces--;
        else if (*p == ',' && braces) rc = dm_buf_byte(re, '|');
        else {
            if (*p == '\\' && p[1]) p++;
            if (strchr("\\^$.|()+?*[]{}#", *p)) rc = dm_buf_byte(re, '\\');
            if (rc == 0) rc = dm_buf_byte(re, (uint8_t)*p);
        }
    }
    if (rc == 0 && braces) rc = DM_EINVAL;
    return rc == 0 ? dm_buf_str(re, "\\z") : rc;
}

typedef struct matcher {
    pcre2_code *code;
    pcre2_match_data *data;
    pcre2_match_context *limits;
    int64_t too_complex; /* subjects on which it gave up */
} matcher;

static void matcher_free(matcher *m) {
    pcre2_match_data_free(m->data);
    pcre2_match_context_free(m->limits);
    pcre2_code_free(m->code);
    *m = (matcher){0};
}

/* `shown` is the pattern as the model wrote it, for the fault. */
static int matcher_make(dm_tool_run *r, matcher *m, const char *re, const char *shown, uint32_t flags) {
    int code;
    PCRE2_SIZE at;
    m->code = pcre2_compile((PCRE2_SPTR)re, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_MATCH_INVALID_UTF | PCRE2_NEVER_BACKSLASH_C | flags, &code, &at, NULL);
    if (!m->code) {
        char why[128] = "";
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, sizeof why);
        run_error(r, "\"%s\" is not a valid pattern: %s at offset %zu", shown, why, (size_t)at);
        return DM_ETOOL;
    }
    (void)pcre2_jit_compile(m->code, PCRE2_JIT_COMPLETE); /* without it the interpreter does the same */
    m->data = pcre2_match_data_create(1, NULL);
    m->limits = pcre2_match_context_create(NULL);
    if (!m->data || !m->limits) {
        run_error(r, "out of memory");
        return DM_ETOOL;
    }
    pcre2_set_match_limit(m->limits, 500000); /* a pattern that explodes costs milliseconds for a line, not hours */
    pcre2_set_depth_limit(m->limits, 5000);
    pcre2_set_heap_limit(m->limits, 16384);
    return 0;
}

static bool matches(matcher *m, const char *p, size_t n) {
    const int rc = pcre2_match(m->code, (PCRE2_SPTR)p, n, 0, 0, m->data, m->limits);
    if (rc < 0 && rc != PCRE2_ERROR_NOMATCH) m->too_complex++;
    return rc >= 0;
}

static int glob_matcher(dm_tool_run *r, matcher *m, const char *pattern) {
    dm_buf re = {0};
    int rc = glob_translate(pattern, &re);
    if (rc == DM_EINVAL) run_error(r, "\"%s\" is not a valid pattern: a bracket is not closed", pattern);
    else if (rc < 0) run_error(r, "out of memory");
    else rc = matcher_make(r, m, dm_buf_cstr(&re), pattern, 0);
    dm_buf_free(&re);
    return rc;
}

/* The pattern relative to the workspace; NULL when it leads out. */
static const char *pattern_inside(const workspace *ws, const char *pattern) {
    const char *const roots[] = {ws->canonical, ws->given};
    for (size_t i = 0; pattern[0] == '/' && i < DM_COUNT(roots); i++) {
        const size_t n = strlen(roots[i]);
        if (strncmp(pattern, roots[i], n) == 0 && pattern[n] == '/') {
            pattern += n + 1;
            break;
        }
    }
    while (pattern[0] == '.' && pattern[1] == '/') pattern += 2;
    for (const char *at = pattern; at; at = strchr(at, '/')) {
        at += *at == '/' && at != pattern;
        if (at[0] == '.' && at[1] == '.' && (at[2] == '/' || at[2] == 0)) return NULL;
    }
    return pattern[0] == '/' ? NULL : pattern;
}

/* ---- glob ------------------------------------------------------------------------------------------------------------------------ */

typedef struct glob_ctx {
    matcher m;
    size_t skip; /* of the path: the pattern is relative to where the walk began */
} glob_ctx;

static int glob_file(walker *w, int dir, const char *name, const char *path) {
    glob_ctx *g = w->ctx;
    const size_t n = strlen(path);
    (void)dir, (void)name;
    if (!matches(&g->m, path + g->skip, n - g->skip)) return 0;
    if (text_full(w->r, n)) {
        w->incomplete = true;
        return 1;
    }
    return dm_buf_printf(&w->r->text, "%s%s", w->r->text.n ? "\n" : "", path);
}

void search_glob(dm_tool_run *r) {
    glob_ctx g = {0};
    walker w = {.r = r, .file = glob_file, .ctx = &g};
    const char *given = run_text(r, "pattern");
    const char *pattern = given ? pattern_inside(&r->tools->ws, given) : NULL;
    bool dir = false;
    if (!pattern) {
        run_error(r, "%s is outside the workspace", given ? given : "the pattern");
        return;
    }
    w.hidden = pattern[0] == '.' || strstr(pattern, "/.") || strstr(pattern, "{.") || strstr(pattern, ",.");
    if (glob_matcher(r, &g.m, pattern) == 0) {
        int fd = walk_open(&w, run_text(r, "path"), &dir);
        g.skip = strlen(w.path);
        if (fd >= 0 && !dir) run_error(r, "%s is not a directory", w.path);
        int rc = fd >= 0 && dir ? walk(&w, fd, WALK_DEPTH_MAX) : 0;
        if (fd >= 0) close(fd);
        if (rc < 0) run_error(r, "out of memory");
        else if (!r->is_error && r->text.n == 0) (void)dm_buf_str(&r->text, "No files found");
        if (rc >= 0 && w.incomplete && !r->is_error) {
            r->cut = true;
            (void)dm_buf_str(&r->text, "\n[not all files are listed; use a narrower pattern]");
        }
    }
    matcher_free(&g.m);
}

/* ---- grep -------------------------------------------------------------------------------------------------------------------------- */

typedef struct grep_ctx {
    matcher m, only; /* only.code NULL: every file */
    size_t skip;     /* of the path for `only` */
    char *block;
    int count;
} grep_ctx;

static int line_show(walker *w, const char *path, int64_t line, const char *p, size_t n) {
    grep_ctx *g = w->ctx;
    const bool longer = n > LINE_SHOWN_MAX;
    if (longer) n = dm_utf8_whole(p, LINE_SHOWN_MAX);
    if (g->count == MATCHES_MAX || text_full(w->r, strlen(path) + n)) {
        w->incomplete = true;
        return 1;
    }
    g->count++;
    int rc = dm_buf_printf(&w->r->text, "%s%s:%lld:", w->r->text.n ? "\n" : "", path, (long long)line);
    if (rc == 0) rc = dm_buf_append(&w->r->text, p, n);
    return rc == 0 && longer ? dm_buf_str(&w->r->text, " […]") : rc;
}

static int line_search(walker *w, const char *path, int64_t line, const char *p, size_t n) {
    grep_ctx *g = w->ctx;
    if (n > 0 && p[n - 1] == '\r') n--;
    return matches(&g->m, p, n < LINE_SEARCHED_MAX ? n : LINE_SEARCHED_MAX) ? line_show(w, path, line, p, n) : 0;
}

/* Block by block; a line longer than a block counts as one line, of which the beginning is searched. */
static int file_search(walker *w, int fd, const char *path) {
    grep_ctx *g = w->ctx;
    size_t have = 0;
    int64_t line = 1;
    bool skip = false, first = true;
    int rc = 0;
    while (rc == 0 && !run_stopped(w->r)) {
        ssize_t got = read(fd, g->block + have, BLOCK - have);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break;
        if (first && memchr(g->block, 0, got < 8192 ? (size_t)got : 8192)) return 0; /* binary */
        first = false;
        have += (size_t)got;
        size_t at = 0;
        for (const char *nl; rc == 0 && (nl = memchr(g->block + at, '\n', have - at)); line++) {
            const size_t n = (size_t)(nl - g->block) - at;
            if (!skip) rc = line_search(w, path, line, g->block + at, n);
            skip = false;
            at += n + 1;
        }
        memmove(g->block, g->block + at, have - at);
        have -= at;
        if (have < BLOCK) continue;
        if (rc == 0 && !skip) rc = line_search(w, path, line, g->block, have);
        skip = true;
        have = 0;
    }
    return rc == 0 && have > 0 && !skip ? line_search(w, path, line, g->block, have) : rc;
}

static int grep_file(walker *w, int dir, const char *name, const char *path) {
    grep_ctx *g = w->ctx;
    struct stat st;
    if (g->only.code && !matches(&g->only, path + g->skip, strlen(path) - g->skip)) return 0;
    int fd = openat(dir, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0) return 0; /* a link, or not ours to read */
    int rc = fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? file_search(w, fd, path) : 0;
    close(fd);
    return rc;
}

static void grep_notes(dm_tool_run *r, const walker *w, const grep_ctx *g) {
    if (r->text.n == 0) (void)dm_buf_str(&r->text, "No matches found");
    if (w->incomplete) {
        r->cut = true;
        (void)dm_buf_str(&r->text, "\n[not all matches are shown; use a narrower pattern or path]");
    }
    if (g->m.too_complex) (void)dm_buf_printf(&r->text, "\n[the pattern was too complex for %lld lines]", (long long)g->m.too_complex);
}

void search_grep(dm_tool_run *r) {
    const char *pattern = run_text(r, "pattern"), *only = run_text(r, "glob");
    const uint32_t flags = json_is_true(json_object_get(r->args, "ignore_case")) ? PCRE2_CASELESS : 0;
    grep_ctx g = {.block = dm_malloc(BLOCK)};
    walker w = {.r = r, .hidden = true, .file = grep_file, .ctx = &g};
    bool dir = false;
    if (!pattern || !g.block) run_error(r, pattern ? "out of memory" : "grep needs a pattern");
    else if (matcher_make(r, &g.m, pattern, pattern, flags) == 0 && (!only || glob_matcher(r, &g.only, only) == 0)) {
        int fd = walk_open(&w, run_text(r, "path"), &dir), rc = 0;
        g.skip = strlen(w.path);
        if (fd >= 0 && dir) rc = walk(&w, fd, WALK_DEPTH_MAX);
        else if (fd >= 0) rc = file_search(&w, fd, w.path);
        if (fd >= 0) close(fd);
        if (rc < 0) run_error(r, "out of memory");
        else if (fd >= 0) grep_notes(r, &w, &g);
    }
    dm_free(g.block);
    matcher_free(&g.m);
    matcher_free(&g.only);
}
