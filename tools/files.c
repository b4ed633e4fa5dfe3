/* read, write, edit.  On libuv's pool. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "tools/tools_int.h"

enum { BLOCK = 64 << 10, PATH_MAX_BYTES = 4096 };
static const int64_t edit_bytes_max = 16 << 20;

/* ---- faults in words ------------------------------------------------------------------------------------------------------ */

void run_path_error(dm_tool_run *r, const char *name, int err) {
    switch (-err) {
    case -DM_EFOREIGN: run_error(r, "%s is protected and cannot be changed by tools", name); return;
    case ENOENT: run_error(r, "no such file: %s", name); return;
    case EXDEV: run_error(r, "%s is outside the workspace", name); return;
    case EROFS: run_error(r, "%s is on a read-only file system", name); return;
    case ENOTDIR: run_error(r, "no such file: %s (a part of the path is not a directory)", name); return;
    case EISDIR: run_error(r, "%s is a directory", name); return;
    case ELOOP: run_error(r, "%s goes through too many symbolic links", name); return;
    case ENXIO: run_error(r, "%s is not a regular file", name); return;
    default: run_error(r, "%s cannot be opened: %s", name, dm_err_text(err)); return;
    }
}

int run_open(const dm_tool_run *r, const char *name, int flags) {
    const char *spill = r->tools->spill_dir;
    int fd = workspace_at(&r->tools->ws, name, flags);
    const size_t n = spill ? strlen(spill) : 0;
    if ((fd != -EXDEV && fd != -EACCES) || n == 0 || strncmp(name, spill, n) != 0 || strncmp(name + n, "/output-", 8) != 0 || strchr(name + n + 1, '/')) return fd;
    fd = open(name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    return fd < 0 ? -errno : fd;
}

static const char *kind_of(mode_t mode) {
    if (S_ISDIR(mode)) return "a directory";
    if (S_ISFIFO(mode)) return "a FIFO";
    if (S_ISSOCK(mode)) return "a socket";
    return "a device";
}

/* Opens a regular file for reading and nothing else; the fault is told.  Never hangs: a FIFO opens at once. */
static int regular_open(dm_tool_run *r, const char *name, struct stat *st) {
    int fd = run_open(r, name, O_RDONLY);
    if (fd < 0) {
        run_path_error(r, name, fd);
        return -1;
    }
    if (fstat(fd, st) == 0 && S_ISREG(st->st_mode)) return fd;
    run_error(r, "%s is %s, not a file", name, kind_of(st->st_mode));
    close(fd);
    return -1;
}

static ssize_t read_some(int fd, void *p, size_t n) {
    ssize_t got;
    do got = read(fd, p, n);
    while (got < 0 && errno == EINTR);
    return got < 0 ? -errno : got;
}

/* ---- read -------------------------------------------------------------------------------------------------------------------- */

typedef struct lines {
    int64_t first, end; /* wanted: [first, end), from 0; end < 0: to the last */
    int64_t at;         /* line of the next byte */
    size_t room;        /* bytes that still fit */
    bool full;
    bool partial;       /* the byte before was not a newline */
} lines;

/* Takes the wanted part of one block into the text. */
static int lines_take(lines *l, const char *p, size_t n, dm_buf *out) {
    while (n > 0) {
        const char *nl = memchr(p, '\n', n);
        const size_t part = nl ? (size_t)(nl - p) + 1 : n;
        if (l->at >= l->first && (l->end < 0 || l->at < l->end) && !l->full) {
            const size_t take = part < l->room ? part : l->room;
            int rc = dm_buf_append(out, p, take);
            if (rc < 0) return rc;
            l->room -= take;
            l->full = take < part;
        }
        l->at += nl != NULL;
        l->partial = !nl;
        p += part, n -= part;
    }
    return 0;
}

/* What was left out, and how to go on.  The text ends with a whole line, unless one line alone is too long. */
static void read_note(dm_tool_run *r, const lines *l) {
    dm_buf *t = &r->text;
    const int64_t total = l->at + l->partial;
    size_t n = t->n;
    while (n > 0 && t->p[n - 1] != '\n') n--;
    int64_t shown = 0;
    for (size_t i = 0; i < n; i++) shown += t->p[i] == '\n';
    r->cut = true;
    if (n == 0) {
        t->n = dm_utf8_whole(t->p, t->n);
        (void)dm_buf_printf(t, "\n[line %lld is longer than can be shown; the file has %lld lines]", (long long)l->first + 1, (long long)total);
        return;
    }
    t->n = n;
    (void)dm_buf_printf(t, "[lines %lld to %lld of %lld; go on with offset %lld]", (long long)l->first + 1, (long long)(l->first + shown),
                        (long long)total, (long long)(l->first + shown + 1));
}

static int read_lines(dm_tool_run *r, int fd, lines *l) {
    char *block = dm_malloc(BLOCK);
    bool begun = false;
    int rc = block ? 0 : DM_ENOMEM;
    while (rc == 0 && !run_stopped(r)) {
        ssize_t got = read_some(fd, block, BLOCK);
        if (got <= 0) {
            rc = (int)got;
            break;
        }
        if (!begun && memchr(block, 0, got < 8192 ? (size_t)got : 8192)) rc = DM_EFORMAT;
        begun = true;
        if (rc == 0) rc = lines_take(l, block, (size_t)got, &r->text);
    }
    dm_free(block);
    return rc;
}

static void newline_drop(dm_buf *t) {
    if (t->n == 0 || t->p[t->n - 1] != '\n') return;
    t->n -= t->n > 1 && t->p[t->n - 2] == '\r' ? 2 : 1;
    t->p[t->n] = 0;
}

void files_read(dm_tool_run *r) {
    const char *name = run_text(r, "path");
    const int64_t offset = run_int(r, "offset", 1), limit = run_int(r, "limit", -1);
    struct stat st;
    if (!name) {
        run_error(r, "read needs a path");
        return;
    }
    int fd = regular_open(r, name, &st);
    if (fd < 0) return;
    lines l = {.first = offset > 1 ? offset - 1 : 0, .end = -1, .room = r->tools->o.result_bytes_max - 256};
    if (limit >= 0) l.end = limit < INT64_MAX - l.first ? l.first + limit : -1;
    int rc = read_lines(r, fd, &l);
    close(fd);
    r->output_bytes = (int64_t)r->text.n;
    /* The lines, not the file: the newline behind the last one shown is left out, as bash does with its output (the
     * embedded model was trained so, and repeats itself on the other form). */
    if (rc == 0 && !l.full) newline_drop(&r->text);
    if (rc == DM_EFORMAT) run_error(r, "%s is a binary file of %lld bytes", name, (long long)st.st_size);
    else if (rc < 0) run_error(r, "%s cannot be read: %s", name, dm_err_text(rc));
    else if (l.full) read_note(r, &l);
    else if (r->text.n == 0 && l.first > 0 && l.first >= l.at + l.partial)
        run_error(r, "%s has only %lld lines", name, (long long)(l.at + l.partial));
}

/* ---- writing --------------------------------------------------------------------------------------------------------------- */

/* Where a write really goes: the directory by descriptor and the last name, all links followed. */
typedef struct target {
    int dir;
    char name[256];
    bool exists;
    struct stat st;
} target;

static int target_split(const char *path, char *dir, size_t cap, char *last, size_t last_cap) {
    const char *slash = strrchr(path, '/');
    const char *name = slash ? slash + 1 : path;
    const size_t n = slash ? (size_t)(slash - path) : 0;
    if (!name[0] || strcmp(name, ".") == 0 || strcmp(name, "..") == 0) return -EISDIR;
    if (strlen(name) >= last_cap || n + 2 > cap) return -ENAMETOOLONG;
    memcpy(last, name, strlen(name) + 1);
    memcpy(dir, path, n);
    dir[n] = 0;
    if (slash && n == 0) memcpy(dir, "/", 2);
    return 0;
}

/* An existing file, perhaps behind links: the write goes to the real one, so that a link stays a link. */
static int target_existing(const workspace *w, const char *path, target *t) {
    char real[PATH_MAX_BYTES], dir[PATH_MAX_BYTES];
    int fd = workspace_at(w, path, O_PATH);
    if (fd < 0) return fd;
    int rc = fstat(fd, &t->st) == 0 ? workspace_where(w, fd, real, sizeof real) : -errno;
    close(fd);
    if (rc == 0 && S_ISDIR(t->st.st_mode)) rc = -EISDIR;
    if (rc == 0 && !S_ISREG(t->st.st_mode)) rc = -ENXIO;
    if (rc == 0 && path_protected(real)) rc = DM_EFOREIGN;
    if (rc == 0) rc = target_split(real, dir, sizeof dir, t->name, sizeof t->name);
    if (rc < 0) return rc;
    t->exists = true;
    t->dir = workspace_at(w, dir[0] ? dir : ".", O_RDONLY | O_DIRECTORY);
    return t->dir < 0 ? t->dir : 0;
}

static int target_new(const workspace *w, const char *path, target *t) {
    char real[PATH_MAX_BYTES], dir[PATH_MAX_BYTES], full[PATH_MAX_BYTES + 260];
    struct stat st;
    int rc = target_split(path, dir, sizeof dir, t->name, sizeof t->name);
    if (rc < 0) return rc;
    int fd = workspace_dir_make(w, dir[0] ? dir : ".");
    if (fd < 0) return fd;
    rc = workspace_where(w, fd, real, sizeof real);
    if (rc == 0) {
        snprintf(full, sizeof full, "%s%s%s", real, real[0] ? "/" : "", t->name);
        if (path_protected(full)) rc = DM_EFOREIGN;
        /* It did not open, yet the name is there: a link to nothing, perhaps to nothing outside. */
        else if (fstatat(fd, t->name, &st, AT_SYMLINK_NOFOLLOW) == 0) rc = S_ISLNK(st.st_mode) ? -ENXIO : -EAGAIN;
    }
    if (rc == 0) t->dir = openat(fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (rc == 0 && t->dir < 0) rc = -errno;
    close(fd);
    return rc;
}

static int target_open(const workspace *w, const char *path, target *t) {
    *t = (target){.dir = -1};
    int rc = -EAGAIN;
    for (int i = 0; rc == -EAGAIN && i < 8; i++) {
        rc = target_existing(w, path, t);
        if (rc == -ENOENT) rc = target_new(w, path, t);
    }
    return rc;
}

static int write_all(int fd, const char *p, size_t n) {
    while (n > 0) {
        ssize_t w = write(fd, p, n);
        if (w < 0 && errno == EINTR) continue;
        if (w < 0) return -errno;
        p += w, n -= (size_t)w;
    }
    return 0;
}

/* A new file takes the umask's mode, a replaced one keeps its own and, where we may, its owner. */
static int temp_fill(int fd, const target *t, const char *p, size_t n) {
    int rc = write_all(fd, p, n);
    if (rc == 0 && t->exists) {
        if ((t->st.st_uid != geteuid() || t->st.st_gid != getegid()) && fchown(fd, t->st.st_uid, t->st.st_gid) != 0) rc = 0;
        if (fchmod(fd, t->st.st_mode & 07777) != 0) rc = -errno;
    }
    if (rc == 0 && fsync(fd) != 0) rc = -errno;
    return rc;
}

/* Temporary file, sync, rename, sync of the directory: after a crash the old or the new content is there, whole.  Other
 * hard links to the old content keep it: nothing outside is changed through them. */
static int target_write(const target *t, const char *p, size_t n) {
    char temp[64];
    uint64_t id;
    dm_random(&id, sizeof id);
    snprintf(temp, sizeof temp, ".dm-%016llx.tmp", (unsigned long long)id);
    int fd = openat(t->dir, temp, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, t->exists ? 0600 : 0666);
    if (fd < 0) return -errno;
    int rc = temp_fill(fd, t, p, n);
    if (close(fd) != 0 && rc == 0) rc = -errno;
    if (rc == 0 && dm_fault("tools.rename")) rc = DM_EIO;
    if (rc == 0 && renameat(t->dir, temp, t->dir, t->name) != 0) rc = -errno;
    if (rc < 0) (void)unlinkat(t->dir, temp, 0);
    else if (fsync(t->dir) != 0 && errno != EINVAL) rc = -errno;
    return rc;
}

static void write_error(dm_tool_run *r, const char *name, int rc) {
    if (rc == -ENXIO) run_error(r, "%s is a link to nothing or no regular file; it is left alone", name);
    else if (rc == -EISDIR || rc == -EXDEV || rc == -EROFS || rc == DM_EFOREIGN || rc == -ELOOP) run_path_error(r, name, rc);
    else run_error(r, "%s cannot be written: %s", name, dm_err_text(rc));
}

void files_write(dm_tool_run *r) {
    const char *name = run_text(r, "path"), *content = run_text(r, "content");
    target t;
    if (!name || !content) {
        run_error(r, "write needs a path and the content");
        return;
    }
    const size_t n = json_string_length(json_object_get(r->args, "content"));
    int rc = target_open(&r->tools->ws, name, &t);
    if (rc == 0) rc = target_write(&t, content, n);
    if (t.dir >= 0) close(t.dir);
    if (rc < 0) write_error(r, name, rc);
    else (void)dm_buf_printf(&r->text, "Wrote %zu bytes to %s", n, name);
}

/* ---- edit -------------------------------------------------------------------------------------------------------------------- */

static int file_load(dm_tool_run *r, const char *name, dm_buf *out) {
    struct stat st;
    int fd = regular_open(r, name, &st);
    if (fd < 0) return DM_ETOOL;
    int rc = st.st_size <= edit_bytes_max ? dm_buf_reserve(out, (size_t)st.st_size + 1) : DM_ELIMIT;
    while (rc == 0 && !run_stopped(r)) {
        rc = dm_buf_reserve(out, BLOCK);
        ssize_t got = rc == 0 ? read_some(fd, out->p + out->n, BLOCK) : 0;
        if (got <= 0) {
            if (got < 0) rc = (int)got;
            break;
        }
        out->n += (size_t)got;
        if ((int64_t)out->n > edit_bytes_max) rc = DM_ELIMIT;
    }
    close(fd);
    if (rc == DM_ELIMIT) run_error(r, "%s is larger than 16 MiB; change it with a command", name);
    else if (rc < 0) run_error(r, "%s cannot be read: %s", name, dm_err_text(rc));
    return rc;
}

typedef struct span { const char *p; size_t n; } span;

static size_t count_of(const dm_buf *in, span what) {
    size_t count = 0;
    const uint8_t *at = in->p, *end = in->p + in->n;
    while (at < end && (at = memmem(at, (size_t)(end - at), what.p, what.n))) count++, at += what.n;
    return count;
}

static int replace(const dm_buf *in, span old, span new, dm_buf *out) {
    const uint8_t *at = in->p, *end = in->p + in->n;
    int rc = 0;
    for (const uint8_t *hit; rc == 0 && at < end && (hit = memmem(at, (size_t)(end - at), old.p, old.n)); at = hit + old.n) {
        rc = dm_buf_append(out, at, (size_t)(hit - at));
        if (rc == 0) rc = dm_buf_append(out, new.p, new.n);
    }
    return rc == 0 ? dm_buf_append(out, at, (size_t)(end - at)) : rc;
}

/* In a file with CR LF the model sees and writes LF; both texts are tried again in the file's own way. */
static int with_crlf(span in, dm_buf *out) {
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < in.n; i++) {
        if (in.p[i] == '\n' && (i == 0 || in.p[i - 1] != '\r')) rc = dm_buf_byte(out, '\r');
        if (rc == 0) rc = dm_buf_byte(out, (uint8_t)in.p[i]);
    }
    return rc;
}

static void edit_apply(dm_tool_run *r, const char *name, const dm_buf *in, span old, span new) {
    const bool all = json_is_true(json_object_get(r->args, "all"));
    const size_t count = count_of(in, old);
    dm_buf out = {0};
    target t = {.dir = -1};
    if (count == 0) {
        run_error(r, "text not found in %s", name);
        return;
    }
    if (count > 1 && !all) {
        run_error(r, "the text occurs %zu times in %s; give more of the text around it so that it is unique", count, name);
        return;
    }
    int rc = replace(in, old, new, &out);
    if (rc == 0) rc = target_open(&r->tools->ws, name, &t);
    if (rc == 0) rc = target_write(&t, (const char *)out.p, out.n);
    if (t.dir >= 0) close(t.dir);
    dm_buf_free(&out);
    if (rc < 0) write_error(r, name, rc);
    else (void)dm_buf_printf(&r->text, "Edited %s: %zu replacement%s", name, count, count == 1 ? "" : "s");
}

void files_edit(dm_tool_run *r) {
    const char *name = run_text(r, "path");
    const span old = {run_text(r, "old"), json_string_length(json_object_get(r->args, "old"))};
    const span new = {run_text(r, "new"), json_string_length(json_object_get(r->args, "new"))};
    dm_buf in = {0}, old_crlf = {0}, new_crlf = {0};
    if (!name || !old.p || !new.p) run_error(r, "edit needs a path, old and new");
    else if (old.n == 0) run_error(r, "old is empty; to fill a file use write");
    else if (old.n == new.n && memcmp(old.p, new.p, old.n) == 0) run_error(r, "old and new are the same");
    else if (file_load(r, name, &in) == 0) {
        const bool crlf = count_of(&in, old) == 0 && memchr(old.p, '\n', old.n) && in.n && memmem(in.p, in.n, "\r\n", 2);
        if (!crlf) edit_apply(r, name, &in, old, new);
        else if (with_crlf(old, &old_crlf) == 0 && with_crlf(new, &new_crlf) == 0)
            edit_apply(r, name, &in, (span){(char *)old_crlf.p, old_crlf.n}, (span){dm_buf_cstr(&new_crlf), new_crlf.n});
        else run_error(r, "out of memory");
    }
    dm_buf_free(&in);
    dm_buf_free(&old_crlf);
    dm_buf_free(&new_crlf);
}
