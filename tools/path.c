/* Names beneath the workspace.  The kernel is the wall: openat2 with RESOLVE_BENEATH refuses whatever leaves, however it
 * is spelt and whoever swaps a link meanwhile.  It also refuses absolute links that point back inside (virtual
 * environments and node_modules have them); those are followed by hand, and the final open then allows no link at all. */
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "tools/tools_int.h"

enum { NAME_BYTES_MAX = 4096, LINKS_MAX = 40, RACE_RETRIES = 16, DEPTH_MAX = 128 };

/* ---- the workspace ------------------------------------------------------------------------------------------------- */

static int fd_path(int fd, char *out, size_t cap) {
    char proc[64];
    snprintf(proc, sizeof proc, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(proc, out, cap - 1);
    if (n < 0) return -errno;
    if ((size_t)n >= cap - 1) return -ENAMETOOLONG;
    out[n] = 0;
    return 0;
}

int workspace_open(workspace *w, const char *path, const char *hide, dm_err *e) {
    char real[NAME_BYTES_MAX], given[2 * NAME_BYTES_MAX];
    *w = (workspace){.fd = -1, .hidden = -1};
    int fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return dm_err_sys(e, errno, "tools", "the workspace %.200s cannot be opened", path);
    int rc = fd_path(fd, real, sizeof real);
    if (rc == 0 && path[0] == '/') snprintf(given, sizeof given, "%s", path);
    else snprintf(given, sizeof given, "%s", real);
    for (size_t n = strlen(given); n > 1 && given[n - 1] == '/'; n--) given[n - 1] = 0;
    w->fd = fd;
    if (hide && (w->hidden = open(hide, O_PATH | O_DIRECTORY | O_CLOEXEC)) < 0 && rc == 0) rc = -errno;
    w->canonical = dm_strdup(real);
    w->given = dm_strdup(given);
    if (rc == 0 && w->canonical && w->given) return 0;
    workspace_close(w);
    return rc < 0 ? dm_err_sys(e, -rc, "tools", "the workspace %.200s has no usable path", path) : dm_err_set(e, DM_ENOMEM, "tools", "out of memory");
}

void workspace_close(workspace *w) {
    if (w->fd >= 0) close(w->fd);
    if (w->hidden >= 0) close(w->hidden);
    dm_free(w->given);
    dm_free(w->canonical);
    *w = (workspace){.fd = -1, .hidden = -1};
}

/* ---- opening ---------------------------------------------------------------------------------------------------------- */

static int open_beneath(int dir, const char *path, int flags, uint64_t resolve) {
    struct open_how how = {
        .flags = (uint64_t)(unsigned)(flags | O_CLOEXEC | (flags & O_PATH ? 0 : O_NOCTTY | O_NONBLOCK)),
        .resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS | resolve,
    };
    for (int i = 0;; i++) {
        int fd = (int)syscall(SYS_openat2, dir, path, &how, sizeof how);
        if (fd >= 0) return fd;
        if (errno != EAGAIN && errno != EINTR) return -errno; /* EAGAIN: a rename nearby made the answer unsure */
        if (i == RACE_RETRIES) return -EAGAIN;
    }
}

/* The part of an absolute path behind the workspace's own, or NULL. */
static const char *inside(const workspace *w, const char *path) {
    const char *const roots[] = {w->canonical, w->given};
    for (size_t i = 0; i < DM_COUNT(roots); i++) {
        const size_t n = strlen(roots[i]);
        if (strncmp(path, roots[i], n) == 0 && (path[n] == '/' || path[n] == 0)) return path + n;
    }
    return NULL;
}

typedef struct walk {
    char done[NAME_BYTES_MAX]; /* proven: no link in it, no dot-dot */
    char rest[NAME_BYTES_MAX];
    int links;
} walk;

/* rest = target + "/" + what follows; an absolute target starts again at the workspace. */
static int walk_link(const workspace *w, walk *k, const char *target, const char *after) {
    char joined[2 * NAME_BYTES_MAX];
    if (++k->links > LINKS_MAX) return -ELOOP;
    if (target[0] == '/') {
        target = inside(w, target);
        if (!target) return -EXDEV;
        k->done[0] = 0;
    }
    if (snprintf(joined, sizeof joined, "%s/%s", target, after) >= NAME_BYTES_MAX) return -ENAMETOOLONG;
    memcpy(k->rest, joined, strlen(joined) + 1);
    return 0;
}

static int walk_up(walk *k) {
    char *slash = strrchr(k->done, '/');
    if (!k->done[0]) return -EXDEV;
    if (slash) *slash = 0;
    else k->done[0] = 0;
    return 0;
}

/* Takes one name off the rest and follows it. */
static int walk_step(const workspace *w, walk *k) {
    char name[NAME_BYTES_MAX], next[2 * NAME_BYTES_MAX], target[NAME_BYTES_MAX];
    char *at = k->rest + strspn(k->rest, "/");
    const size_t n = strcspn(at, "/");
    memcpy(name, at, n);
    name[n] = 0;
    memmove(k->rest, at + n, strlen(at + n) + 1);
    if (n == 0 || strcmp(name, ".") == 0) return 0;
    if (strcmp(name, "..") == 0) return walk_up(k);
    if (snprintf(next, sizeof next, "%s%s%s", k->done, k->done[0] ? "/" : "", name) >= NAME_BYTES_MAX) return -ENAMETOOLONG;
    int fd = open_beneath(w->fd, next, O_PATH | O_NOFOLLOW, 0);
    if (fd == -ENOENT && !k->rest[strspn(k->rest, "/")]) { /* the last name may be missing: the final open says so */
        memcpy(k->done, next, strlen(next) + 1);
        return 0;
    }
    if (fd < 0) return fd;
    ssize_t got = readlinkat(fd, "", target, sizeof target - 1);
    close(fd);
    if (got >= 0) {
        target[got] = 0;
        char after[NAME_BYTES_MAX];
        memcpy(after, k->rest, strlen(k->rest) + 1);
        return walk_link(w, k, target, after);
    }
    memcpy(k->done, next, strlen(next) + 1);
    return 0;
}

static int open_by_hand(const workspace *w, const char *name, int flags) {
    walk *k = dm_calloc(1, sizeof *k);
    if (!k) return -ENOMEM;
    int rc = 0;
    for (int race = 0; race < RACE_RETRIES; race++) {
        k->done[0] = 0;
        k->links = 0;
        memcpy(k->rest, name, strlen(name) + 1);
        for (rc = 0; rc == 0 && k->rest[strspn(k->rest, "/")];) rc = walk_step(w, k);
        if (rc == 0) rc = open_beneath(w->fd, k->done[0] ? k->done : ".", flags, RESOLVE_NO_SYMLINKS);
        if (rc != -ELOOP || k->links > LINKS_MAX) break; /* ELOOP: a link came in between */
    }
    dm_free(k);
    return rc;
}

/* Absolute names are welcome when they lie inside. */
static int name_check(const workspace *w, const char **name) {
    if (strlen(*name) >= NAME_BYTES_MAX) return -ENAMETOOLONG;
    if ((*name)[0] == '/') {
        *name = inside(w, *name);
        if (!*name) return -EXDEV;
        *name += strspn(*name, "/");
    }
    if (!(*name)[0]) *name = ".";
    return 0;
}

/* By where both really are, so that no other spelling and no link leads in. */
bool workspace_hides(const workspace *w, int fd) {
    char hidden[NAME_BYTES_MAX], path[NAME_BYTES_MAX];
    if (w->hidden < 0) return false;
    if (fd_path(w->hidden, hidden, sizeof hidden) < 0 || fd_path(fd, path, sizeof path) < 0) return true;
    const size_t n = strlen(hidden);
    return strncmp(path, hidden, n) == 0 && (path[n] == '/' || path[n] == 0);
}

int workspace_at(const workspace *w, const char *name, int flags) {
    int rc = name_check(w, &name);
    if (rc < 0) return rc;
    rc = open_beneath(w->fd, name, flags, 0);
    if (rc == -EXDEV) rc = open_by_hand(w, name, flags);
    if (rc < 0 || !workspace_hides(w, rc)) return rc;
    close(rc);
    return -EACCES;
}

/* ---- directories that may be missing ------------------------------------------------------------------------------------ */

static int dir_make(const workspace *w, char *name, int depth) {
    int fd = workspace_at(w, name, O_PATH | O_DIRECTORY);
    if (fd != -ENOENT || depth == 0) return fd;
    char *slash = strrchr(name, '/');
    const char *last = slash ? slash + 1 : name;
    if (!last[0] || strcmp(last, "..") == 0 || strcmp(last, ".") == 0) return -ENOENT;
    if (slash) *slash = 0;
    int parent = slash ? dir_make(w, name, depth - 1) : workspace_at(w, ".", O_PATH | O_DIRECTORY);
    if (slash) *slash = '/';
    if (parent < 0) return parent;
    char real[NAME_BYTES_MAX];
    int rc = workspace_where(w, parent, real, sizeof real);
    if (rc == 0 && strlen(real) + strlen(last) + 2 < sizeof real) {
        const size_t n = strlen(real);
        snprintf(real + n, sizeof real - n, "%s%s", n ? "/" : "", last);
        if (path_protected(real)) rc = DM_EFOREIGN;
    }
    if (rc == 0 && mkdirat(parent, last, 0777) != 0 && errno != EEXIST) rc = -errno;
    if (rc == 0) rc = open_beneath(parent, last, O_PATH | O_DIRECTORY | O_NOFOLLOW, 0);
    close(parent);
    return rc;
}

int workspace_dir_make(const workspace *w, const char *name) {
    char copy[NAME_BYTES_MAX];
    int rc = name_check(w, &name);
    if (rc < 0) return rc;
    size_t n = strlen(name);
    memcpy(copy, name, n + 1);
    while (n > 1 && copy[n - 1] == '/') copy[--n] = 0;
    return dir_make(w, copy, DEPTH_MAX);
}

/* ---- where it really is ------------------------------------------------------------------------------------------------------ */

int workspace_where(const workspace *w, int fd, char *out, size_t cap) {
    char root[NAME_BYTES_MAX], path[NAME_BYTES_MAX];
    int rc = fd_path(w->fd, root, sizeof root); /* asked anew: the workspace may have been moved */
    if (rc == 0) rc = fd_path(fd, path, sizeof path);
    if (rc < 0) return rc;
    const size_t n = strcmp(root, "/") == 0 ? 0 : strlen(root);
    if (strncmp(path, root, n) != 0 || (path[n] != '/' && path[n] != 0)) return -EXDEV;
    const char *relative = path + n + (path[n] == '/');
    if (strlen(relative) >= cap) return -ENAMETOOLONG;
    memcpy(out, relative, strlen(relative) + 1);
    return 0;
}

/* The file tools know no reason to write what git, editors and agents obey; commands are held by the sandbox.  Letter
 * case is ignored, since some file systems do. */
bool path_protected(const char *relative) {
    static const char *const top[] = {".mcp.json", ".vscode", ".idea", ".dormouse"};
    for (size_t i = 0; i < DM_COUNT(top); i++) {
        const size_t n = strlen(top[i]);
        if (strncasecmp(relative, top[i], n) == 0 && (relative[n] == '/' || relative[n] == 0)) return true;
    }
    for (const char *at = relative; at; at = strchr(at, '/')) {
        at += *at == '/';
        if (strncasecmp(at, ".git", 4) == 0 && (at[4] == '/' || at[4] == 0)) return true;
    }
    return false;
}
