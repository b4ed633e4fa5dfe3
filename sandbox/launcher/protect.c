/* Persistence: names in a workspace that something trusted reads or runs later are read-only inside, though the rest of
 * the workspace is writable.
 *
 *   .git/hooks .git/config .git/config.worktree .git/commondir   git runs hooks; config names programs (fsmonitor,
 *                                                                filters, hooksPath); commondir points to another config
 *   the directory of core.hooksPath                              when it lies in the workspace
 *   the same in nested repositories and in .git/modules          what is there now
 *   .mcp.json .vscode .idea .dormouse                            servers and tasks that editors and agents start
 *
 * Rules
 *   - .git itself is bound onto itself: a mount point cannot be renamed away and replaced by a fresh one.
 *   - A name that is missing gets a placeholder to mount on: an empty directory, which git never shows, whichever kind
 *     the name usually is.  It is removed when the last command that needs it has ended, and only while still empty.
 *     One left by a crash is taken over the next time.  Only .git/commondir is read by git wherever it is there, so its
 *     placeholder is a file that says what is true anyway: ".".
 *   - .git as a file (a worktree): the real directories lie outside; they are bound writable, hooks and config
 *     read-only, but only if the git directory points back at this very file.  The file itself could have been
 *     written by an earlier command, so it alone proves nothing.
 *   - A missing .git stays possible to make (git init, git clone).
 *   - A symbolic link cannot be mounted on: what it points to inside the workspace is protected, its name is not.  What
 *     it points to outside is left alone: mounting it would show what is hidden there.
 *   - A command that runs beside us may swap a directory for a link at any moment, and bubblewrap follows links.  So
 *     everything is looked at without following any, its inode is noted, and the supervisor compares (plan_verify). */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sandbox/launcher/launcher_int.h"

enum { GHOSTS_MAX = 1024, NESTED_DIRS_MAX = 512, NESTED_DEPTH_MAX = 3, REPOSITORIES_MAX = 64 };

static const char *const names[] = {".mcp.json", ".vscode", ".idea", ".dormouse"};

/* ---- looking without following -------------------------------------------------------------------------------------- */

int open_plain(const char *path, int flags) {
    const struct open_how how = {.flags = (uint64_t)(unsigned)(flags | O_CLOEXEC), .resolve = RESOLVE_NO_SYMLINKS};
    int fd = (int)syscall(SYS_openat2, AT_FDCWD, path, &how, sizeof how);
    return fd < 0 ? -errno : fd;
}

/* plan_add for a path that commands can reach. */
static int add(plan *p, op_kind kind, const char *path) {
    struct stat st;
    int fd = open_plain(path, O_PATH);
    if (fd < 0) return fd == -ELOOP || fd == -ENOENT || fd == -ENOTDIR ? DM_EAGAIN : fd;
    int rc = fstat(fd, &st) == 0 ? plan_add(p, kind, RANK_PROTECT, path, NULL) : -errno;
    close(fd);
    if (rc < 0) return rc;
    op *o = &p->ops[p->n - 1];
    o->verify = true;
    o->dev = st.st_dev;
    o->ino = st.st_ino;
    return 0;
}

/* Splits into the parent, opened without following, and the last name. */
static int parent_open(const char *path, const char **name) {
    char dir[4096];
    const char *slash = strrchr(path, '/');
    if (!slash || slash == path || (size_t)(slash - path) >= sizeof dir) return -EINVAL;
    memcpy(dir, path, (size_t)(slash - path));
    dir[slash - path] = 0;
    *name = slash + 1;
    return open_plain(dir, O_RDONLY | O_DIRECTORY);
}

/* ---- placeholders --------------------------------------------------------------------------------------------- */

/* The launcher is one process with one set of mounts to answer for, so the counts are its own. */
static struct ghost {
    char *path; /* owned; NULL: free */
    int users;
    bool commondir; /* the file, not a directory */
} ghosts[GHOSTS_MAX];

static struct ghost *ghost_find(const char *path) {
    for (size_t i = 0; i < GHOSTS_MAX; i++)
        if (ghosts[i].path && strcmp(ghosts[i].path, path) == 0) return &ghosts[i];
    return NULL;
}

static struct ghost *ghost_new(const char *path, bool commondir) {
    for (size_t i = 0; i < GHOSTS_MAX; i++) {
        if (ghosts[i].path) continue;
        ghosts[i].path = dm_strdup(path);
        ghosts[i].users = 0;
        ghosts[i].commondir = commondir;
        return ghosts[i].path ? &ghosts[i] : NULL;
    }
    return NULL;
}

static int ghost_use(plan *p, struct ghost *g) {
    int rc = dm_buf_append(&p->ghosts, g->path, strlen(g->path) + 1);
    if (rc < 0) return rc;
    g->users++;
    return add(p, OP_READ, g->path);
}

enum place { PLACE_NOTHING, PLACE_DIRECTORY, PLACE_COMMONDIR };

static int commondir_make(int dir, const char *name) {
    int fd = openat(dir, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0644);
    if (fd < 0) return -1;
    const bool written = write(fd, ".\n", 2) == 2;
    close(fd);
    if (!written) (void)unlinkat(dir, name, 0);
    return written ? 0 : -1;
}

static bool commondir_is_ours(const char *path) {
    char text[8];
    int fd = open_plain(path, O_RDONLY | O_NONBLOCK);
    ssize_t n = fd >= 0 ? read(fd, text, sizeof text) : -1;
    if (fd >= 0) close(fd);
    return n == 2 && memcmp(text, ".\n", 2) == 0;
}

/* Fails when somebody outside has begun to use it: then it is theirs. */
static void ghost_remove(const char *path, bool commondir) {
    const char *name;
    int dir = parent_open(path, &name);
    if (dir < 0) return;
    if (!commondir) (void)unlinkat(dir, name, AT_REMOVEDIR);
    else if (commondir_is_ours(path)) (void)unlinkat(dir, name, 0);
    close(dir);
}

/* Makes `path` impossible to create.  Where we may not create anything, neither may the command. */
static int ghost_place(plan *p, const char *path, enum place place) {
    const bool commondir = place == PLACE_COMMONDIR;
    struct ghost *g = ghost_find(path);
    if (g) return ghost_use(p, g);
    const char *name;
    int dir = parent_open(path, &name);
    if (dir < 0) return dir == -ELOOP || dir == -ENOENT ? DM_EAGAIN : dir;
    const int made = commondir ? commondir_make(dir, name) : mkdirat(dir, name, 0755), err = errno;
    close(dir);
    if (made != 0) return err == EACCES || err == EROFS || err == EPERM ? 0 : err == EEXIST ? DM_EAGAIN : -err;
    g = ghost_new(path, commondir);
    if (!g) {
        ghost_remove(path, commondir);
        return DM_ENOMEM;
    }
    return ghost_use(p, g);
}

void protect_release(plan *p) {
    for (size_t at = 0; at < p->ghosts.n; at += strlen((char *)p->ghosts.p + at) + 1) {
        struct ghost *g = ghost_find((char *)p->ghosts.p + at);
        if (!g || --g->users > 0) continue;
        ghost_remove(g->path, g->commondir);
        dm_free(g->path);
        g->path = NULL;
    }
    dm_buf_clear(&p->ghosts);
}

/* ---- one name --------------------------------------------------------------------------------------------------- */

static bool beneath(const char *path, const char *dir) {
    const size_t n = strlen(dir);
    return strncmp(path, dir, n) == 0 && path[n] == '/';
}

static bool empty_dir(const char *path) {
    DIR *d = opendir(path);
    if (!d) return false;
    int entries = 0;
    while (readdir(d)) entries++;
    closedir(d);
    return entries == 2;
}

/* usually_file: an empty directory of this name can only be a placeholder that a crash left behind. */
static int protect_name(plan *p, const char *workspace, const char *dir, const char *name, bool usually_file, enum place place) {
    char path[4096], real[4096];
    struct stat st;
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path) return 0;
    if (lstat(path, &st) != 0) return place ? ghost_place(p, path, place) : 0;
    struct ghost *g = ghost_find(path);
    if (!g && usually_file && S_ISDIR(st.st_mode) && empty_dir(path)) g = ghost_new(path, false);
    if (!g && place == PLACE_COMMONDIR && S_ISREG(st.st_mode) && commondir_is_ours(path)) g = ghost_new(path, true);
    if (g) return ghost_use(p, g);
    if (!S_ISLNK(st.st_mode)) return add(p, OP_READ, path);
    return realpath(path, real) && beneath(real, workspace) ? add(p, OP_READ, real) : 0;
}

/* ---- git ---------------------------------------------------------------------------------------------------------- */

/* First line of a small file without its newline; false if there is none. */
static bool line_read(const char *path, char *out, size_t cap) {
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (fd < 0) return false;
    ssize_t n = read(fd, out, cap - 1);
    close(fd);
    if (n <= 0) return false;
    out[n] = 0;
    out[strcspn(out, "\r\n")] = 0;
    return out[0] != 0;
}

/* The value of a key of .git/config, found without its section: more is protected than need be, never less. */
static bool config_value(const char *config, const char *key, char *out, size_t cap) {
    char line[4096];
    int fd = open(config, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    FILE *f = fd >= 0 ? fdopen(fd, "r") : NULL;
    bool found = false;
    if (!f && fd >= 0) close(fd);
    while (f && !found && fgets(line, sizeof line, f)) {
        char *at = line + strspn(line, " \t");
        const size_t n = strlen(key);
        if (strncasecmp(at, key, n) != 0) continue;
        at += n + strspn(at + n, " \t");
        if (*at != '=') continue;
        at += 1 + strspn(at + 1, " \t\"");
        at[strcspn(at, "\"\r\n")] = 0;
        found = *at && snprintf(out, cap, "%s", at) < (int)cap;
    }
    if (f) fclose(f);
    return found;
}

/* The directory that core.hooksPath names, when it is a part of the workspace. */
static int protect_hooks_path(plan *p, const char *config, const char *worktree, const char *workspace) {
    char value[4096], path[8192], real[4096];
    if (!config_value(config, "hookspath", value, sizeof value)) return 0;
    snprintf(path, sizeof path, "%s%s%s", value[0] == '/' ? "" : worktree, value[0] == '/' ? "" : "/", value);
    if (!realpath(path, real) || !beneath(real, workspace)) return 0;
    return add(p, OP_READ, real);
}

/* .git/modules/a/b: repositories of submodules, told by their HEAD. */
static int protect_modules(plan *p, const char *workspace, const char *dir, int depth, int *left) {
    char path[4096];
    DIR *d = depth > 0 ? opendir(dir) : NULL;
    int rc = 0;
    for (struct dirent *it; d && rc == 0 && (it = readdir(d)) && *left > 0;) {
        struct stat st;
        if (it->d_name[0] == '.' || snprintf(path, sizeof path, "%s/%s", dir, it->d_name) >= (int)sizeof path) continue;
        if (lstat(path, &st) != 0 || !S_ISDIR(st.st_mode)) continue;
        char head[4200];
        snprintf(head, sizeof head, "%s/HEAD", path);
        if (access(head, F_OK) != 0) {
            rc = protect_modules(p, workspace, path, depth - 1, left);
            continue;
        }
        --*left;
        rc = protect_name(p, workspace, path, "hooks", false, PLACE_NOTHING);
        if (rc == 0) rc = protect_name(p, workspace, path, "config", false, PLACE_NOTHING);
    }
    if (d) closedir(d);
    return rc;
}

/* A git directory that commands may write: `main` makes also what is missing impossible to create. */
static int protect_gitdir(plan *p, const char *gitdir, const char *worktree, const char *workspace, bool main, int *left) {
    char path[4200], value[64];
    const enum place place = main ? PLACE_DIRECTORY : PLACE_NOTHING;
    --*left;
    int rc = add(p, OP_WRITE, gitdir);
    if (rc == 0) rc = protect_name(p, workspace, gitdir, "hooks", false, place);
    if (rc == 0) rc = protect_name(p, workspace, gitdir, "config", true, place);
    if (rc == 0) rc = protect_name(p, workspace, gitdir, "commondir", true, main ? PLACE_COMMONDIR : PLACE_NOTHING);
    snprintf(path, sizeof path, "%s/config", gitdir);
    /* git reads config.worktree only where its config says so, and then it must be readable: no placeholder. */
    const bool read_always = config_value(path, "worktreeconfig", value, sizeof value);
    if (rc == 0) rc = protect_name(p, workspace, gitdir, "config.worktree", true, read_always ? PLACE_NOTHING : place);
    if (rc == 0) rc = protect_hooks_path(p, path, worktree, workspace);
    snprintf(path, sizeof path, "%s/modules", gitdir);
    return rc == 0 ? protect_modules(p, workspace, path, NESTED_DEPTH_MAX, left) : rc;
}

/* dir + "/" + what + its first line, canonical; the line may be relative to dir. */
static bool pointer_follow(const char *dir, const char *what, const char *prefix, char *real) {
    char path[4200], line[4096], full[8400];
    snprintf(path, sizeof path, "%s/%s", dir, what);
    if (!line_read(path, line, sizeof line) || strncmp(line, prefix, strlen(prefix)) != 0) return false;
    const char *value = line + strlen(prefix);
    snprintf(full, sizeof full, "%s%s%s", value[0] == '/' ? "" : dir, value[0] == '/' ? "" : "/", value);
    return realpath(full, real) != NULL;
}

static int protect_worktree(plan *p, const char *workspace, int *left) {
    char gitdir[4096], back[4096], common[4096], self[4200];
    snprintf(self, sizeof self, "%s/.git", workspace);
    int rc = add(p, OP_READ, self);
    if (rc < 0 || !pointer_follow(workspace, ".git", "gitdir: ", gitdir)) return rc;
    if (beneath(gitdir, workspace)) return protect_gitdir(p, gitdir, workspace, workspace, true, left);
    if (!pointer_follow(gitdir, "gitdir", "", back) || strcmp(back, self) != 0) return 0;
    if (!pointer_follow(gitdir, "commondir", "", common) || !beneath(gitdir, common)) return 0;
    rc = protect_gitdir(p, common, workspace, workspace, true, left);
    if (rc == 0) rc = protect_name(p, workspace, gitdir, "commondir", true, PLACE_NOTHING);
    if (rc == 0) rc = protect_name(p, workspace, gitdir, "gitdir", true, PLACE_NOTHING);
    return rc == 0 ? protect_name(p, workspace, gitdir, "config.worktree", true, PLACE_NOTHING) : rc;
}

static int protect_git(plan *p, const char *workspace, const char *dir, bool main, int *left) {
    char path[4200], real[4096];
    struct stat st;
    snprintf(path, sizeof path, "%s/.git", dir);
    if (lstat(path, &st) != 0) return 0;
    if (S_ISDIR(st.st_mode)) return protect_gitdir(p, path, dir, workspace, main, left);
    if (S_ISREG(st.st_mode)) return main ? protect_worktree(p, workspace, left) : add(p, OP_READ, path);
    if (!S_ISLNK(st.st_mode) || !realpath(path, real) || !beneath(real, workspace)) return 0;
    if (stat(real, &st) != 0 || !S_ISDIR(st.st_mode)) return 0;
    return protect_gitdir(p, real, dir, workspace, main, left);
}

/* Repositories further down, as deep and as many as is cheap. */
static int protect_nested(plan *p, const char *workspace, const char *dir, int depth, int *left, int *dirs) {
    char path[4096];
    DIR *d = depth > 0 && --*dirs > 0 ? opendir(dir) : NULL;
    int rc = 0;
    for (struct dirent *it; d && rc == 0 && (it = readdir(d)) && *left > 0;) {
        if (it->d_name[0] == '.' || strcmp(it->d_name, "node_modules") == 0) continue;
        if (it->d_type != DT_DIR || snprintf(path, sizeof path, "%s/%s", dir, it->d_name) >= (int)sizeof path) continue;
        rc = protect_git(p, workspace, path, false, left);
        if (rc == 0) rc = protect_nested(p, workspace, path, depth - 1, left, dirs);
    }
    if (d) closedir(d);
    return rc;
}

int protect_plan(plan *p, const char *workspace, dm_err *e) {
    int left = REPOSITORIES_MAX, dirs = NESTED_DIRS_MAX;
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < DM_COUNT(names); i++) rc = protect_name(p, workspace, workspace, names[i], i == 0, PLACE_DIRECTORY);
    if (rc == 0) rc = protect_git(p, workspace, workspace, true, &left);
    if (rc == 0) rc = protect_nested(p, workspace, workspace, NESTED_DEPTH_MAX, &left, &dirs);
    if (rc == DM_EAGAIN) return dm_err_set(e, rc, "sandbox", "%s is being changed while its protected names are looked at; try again", workspace);
    return rc < 0 ? dm_err_set(e, rc, "sandbox", "%s cannot be protected: %s", workspace, dm_err_text(rc)) : 0;
}
