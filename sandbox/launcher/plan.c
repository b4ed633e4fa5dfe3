/* What a command sees of the file system, as a list of mounts.
 *
 *   /                 the machine's own, read-only
 *   /dev /proc        new ones
 *   /tmp /var/tmp     empty and writable (or the given directory as /tmp); /run empty: no docker.sock, no D-Bus
 *   home              new and writable, with the real entries read-only in it, without those that hold secrets; so
 *                     language tools find themselves and can cache, and nothing written there is obeyed later
 *   workspace, write  writable, with protected names read-only in it (protect.c)
 *   hide              empty
 *
 * Every path is canonical.  Sorting by path puts each mount after the one that it lies in; of two on one path the
 * higher rank stays.  bubblewrap makes missing mount points only inside the new empty directories, so nothing is
 * ever created on the machine's own file system. */
#include <dirent.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sandbox/launcher/launcher_int.h"

enum { OPS_MAX = 2048, HOME_ENTRIES_MAX = 200 };

/* Beneath the home directory: keys, tokens, histories, browser profiles. */
static const char *const secrets[] = {
    ".ssh", ".gnupg", ".aws", ".azure", ".netrc", ".docker", ".kube", ".git-credentials", ".npmrc", ".pypirc", ".password-store",
    ".mozilla", ".thunderbird", ".pki", ".bash_history", ".zsh_history", ".python_history", ".psql_history", ".mysql_history",
    ".vault-token", ".terraform.d", ".config/gh", ".config/hub", ".config/gcloud", ".config/git/credentials", ".config/google-chrome",
    ".config/chromium", ".config/op", ".config/rclone", ".config/containers", ".local/share/keyrings", ".local/share/containers",
    ".cargo/credentials", ".cargo/credentials.toml", ".gem/credentials", ".config/pip", ".config/github-copilot",
    ".claude", ".codex", ".cache",
};

/* A root sandbox owns these files, so the mode alone does not hide them. */
static const char *const secret_files[] = {"/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-", "/etc/sudoers"};

/* Other people's files and the machine's diaries: nothing that a build needs. */
static const char *const private_dirs[] = {"/home", "/root", "/var/log", "/var/mail", "/var/spool", "/var/backups"};

int plan_add(plan *p, op_kind kind, int rank, const char *path, const char *from) {
    if (p->n >= OPS_MAX) return DM_ELIMIT;
    if (p->n == p->cap) {
        size_t cap = p->cap ? 2 * p->cap : 64;
        op *ops = dm_realloc(p->ops, cap * sizeof *ops);
        if (!ops) return DM_ENOMEM;
        p->ops = ops;
        p->cap = cap;
    }
    op o = {.path = dm_strdup(path), .from = from ? dm_strdup(from) : NULL, .kind = kind, .rank = rank};
    if (!o.path || (from && !o.from)) {
        dm_free(o.path);
        dm_free(o.from);
        return DM_ENOMEM;
    }
    p->ops[p->n++] = o;
    return 0;
}

void plan_free(plan *p) {
    for (size_t i = 0; i < p->n; i++) {
        dm_free(p->ops[i].path);
        dm_free(p->ops[i].from);
    }
    dm_free(p->ops);
    dm_buf_free(&p->ghosts);
    *p = (plan){0};
}

/* path is dir or lies beneath it. */
static bool beneath(const char *path, const char *dir) {
    const size_t n = strlen(dir);
    if (n == 1 && dir[0] == '/') return true;
    return strncmp(path, dir, n) == 0 && (path[n] == 0 || path[n] == '/');
}

static bool is_secret(const char *relative) {
    for (size_t i = 0; i < DM_COUNT(secrets); i++)
        if (strcmp(relative, secrets[i]) == 0) return true;
    return false;
}

static bool holds_secret(const char *relative) {
    const size_t n = strlen(relative);
    for (size_t i = 0; i < DM_COUNT(secrets); i++)
        if (strncmp(relative, secrets[i], n) == 0 && secrets[i][n] == '/') return true;
    return false;
}

/* ---- home --------------------------------------------------------------------------------------------------- */

typedef int (*home_fn)(void *ctx, const char *path, const struct stat *st);

/* Calls fn for each entry of home that may be seen, going into those that hold secrets further down.
 * DM_ELIMIT when there are too many to mount one by one. */
static int home_each(const char *home, const char *relative, home_fn fn, void *ctx, int *left) {
    char dir[4096], path[8192], rel[4096];
    snprintf(dir, sizeof dir, "%s%s%s", home, *relative ? "/" : "", relative);
    DIR *d = opendir(dir);
    if (!d) return 0;
    int rc = 0;
    for (struct dirent *it; rc == 0 && (it = readdir(d));) {
        struct stat st;
        if (strcmp(it->d_name, ".") == 0 || strcmp(it->d_name, "..") == 0) continue;
        if (snprintf(rel, sizeof rel, "%s%s%s", relative, *relative ? "/" : "", it->d_name) >= (int)sizeof rel) continue;
        if (is_secret(rel)) continue;
        snprintf(path, sizeof path, "%s/%s", home, rel);
        if (lstat(path, &st) != 0) continue;
        if (S_ISDIR(st.st_mode) && holds_secret(rel)) rc = home_each(home, rel, fn, ctx, left);
        else if (--*left < 0) rc = DM_ELIMIT;
        else rc = fn(ctx, path, &st);
    }
    closedir(d);
    return rc;
}

static int home_mount(void *ctx, const char *path, const struct stat *st) {
    char target[4096];
    if (S_ISLNK(st->st_mode)) {
        ssize_t n = readlink(path, target, sizeof target - 1);
        if (n <= 0) return 0;
        target[n] = 0;
        return plan_add(ctx, OP_LINK, RANK_HOME, path, target);
    }
    if (!S_ISDIR(st->st_mode) && !S_ISREG(st->st_mode)) return 0; /* sockets, pipes: agents and daemons */
    if (access(path, R_OK) != 0) return 0;
    return plan_add(ctx, OP_READ, RANK_HOME, path, NULL);
}

/* The real home stays visible where it is (too many entries, or it is the workspace); its secrets are covered. */
static int home_mask(plan *p, const char *home) {
    char path[8192], real[4096];
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < DM_COUNT(secrets); i++) {
        struct stat st;
        snprintf(path, sizeof path, "%s/%s", home, secrets[i]);
        if (!realpath(path, real) || stat(real, &st) != 0) continue;
        rc = plan_add(p, S_ISDIR(st.st_mode) ? OP_TMPFS : OP_MASK, RANK_PROTECT, real, NULL);
    }
    return rc;
}

static void plan_cut(plan *p, size_t n) {
    while (p->n > n) {
        dm_free(p->ops[--p->n].path);
        dm_free(p->ops[p->n].from);
    }
}

static int home_plan(plan *p, const char *home, const char *workspace) {
    struct stat st;
    if (!home || strcmp(home, "/") == 0) return 0;
    if (stat(home, &st) != 0 || !S_ISDIR(st.st_mode)) return 0;
    if (workspace && beneath(home, workspace)) return home_mask(p, home);
    const size_t before = p->n;
    int left = HOME_ENTRIES_MAX;
    int rc = plan_add(p, OP_TMPFS, RANK_HOME, home, NULL);
    if (rc == 0) rc = home_each(home, "", home_mount, p, &left);
    if (rc != DM_ELIMIT) return rc;
    plan_cut(p, before);
    return home_mask(p, home);
}

/* ---- the whole -------------------------------------------------------------------------------------------- */

static int base_plan(plan *p, const sb_request *r) {
    char real[4096];
    int rc = r->tmp ? plan_add(p, OP_WRITE, RANK_HOME, "/tmp", r->tmp) : plan_add(p, OP_TMP, RANK_BASE, "/tmp", NULL);
    if (rc == 0 && realpath("/var/tmp", real)) rc = plan_add(p, OP_TMP, RANK_BASE, real, NULL);
    if (rc == 0) rc = plan_add(p, OP_TMP, RANK_BASE, "/dev/shm", NULL); /* bubblewrap's own has no bound on its size */
    if (rc == 0) rc = plan_add(p, OP_TMPFS, RANK_BASE, "/run", NULL);
    if (rc == 0 && realpath("/var/run", real) && strcmp(real, "/run") != 0) rc = plan_add(p, OP_TMPFS, RANK_BASE, real, NULL);
    for (size_t i = 0; rc == 0 && i < DM_COUNT(private_dirs); i++)
        if (realpath(private_dirs[i], real) && (!r->workspace || !beneath(real, r->workspace))) rc = plan_add(p, OP_HIDE, RANK_BASE, real, NULL);
    /* Names are resolved by a file that often lies in /run. */
    if (rc == 0 && r->network && realpath("/etc/resolv.conf", real) && beneath(real, "/run")) rc = plan_add(p, OP_READ, RANK_BASE, real, NULL);
    for (size_t i = 0; rc == 0 && geteuid() == 0 && i < DM_COUNT(secret_files); i++)
        if (access(secret_files[i], F_OK) == 0 && realpath(secret_files[i], real)) rc = plan_add(p, OP_MASK, RANK_BASE, real, NULL);
    return rc;
}

static int hide_plan(plan *p, const sb_request *r, const sb_request *hello, dm_err *e) {
    char real[4096];
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < hello->hide.n; i++) {
        struct stat st;
        if (!realpath(hello->hide.p[i], real) || stat(real, &st) != 0) continue; /* nothing there to hide */
        if (r->workspace && strcmp(real, r->workspace) == 0)
            return dm_err_set(e, DM_EINVAL, "sandbox", "the workspace %s is a directory that must stay hidden", real);
        rc = plan_add(p, S_ISDIR(st.st_mode) ? OP_HIDE : OP_MASK, RANK_HIDE, real, NULL);
    }
    return rc;
}

static int op_order(const void *a, const void *b) {
    const op *x = a, *y = b;
    const int by_path = strcmp(x->path, y->path);
    return by_path ? by_path : y->rank - x->rank;
}

/* strcmp puts "/a-b" between "/a" and "/a/c"; that is harmless, for a parent still comes before its children. */
static void plan_sort(plan *p) {
    qsort(p->ops, p->n, sizeof p->ops[0], op_order);
    size_t kept = 0;
    for (size_t i = 0; i < p->n; i++) {
        if (kept > 0 && strcmp(p->ops[kept - 1].path, p->ops[i].path) == 0) {
            dm_free(p->ops[i].path);
            dm_free(p->ops[i].from);
        } else {
            p->ops[kept++] = p->ops[i];
        }
    }
    p->n = kept;
}

int plan_make(plan *p, const sb_request *r, const sb_request *hello, dm_err *e) {
    int rc = base_plan(p, r);
    if (rc == 0) rc = home_plan(p, hello->home, r->workspace);
    if (rc == 0 && r->workspace) rc = plan_add(p, r->readonly ? OP_READ : OP_WRITE, RANK_WRITE, r->workspace, NULL);
    for (size_t i = 0; rc == 0 && i < r->write.n; i++) rc = plan_add(p, OP_WRITE, RANK_WRITE, r->write.p[i], NULL);
    if (rc == 0) rc = hide_plan(p, r, hello, e);
    if (rc == 0 && r->workspace && !r->readonly) rc = protect_plan(p, r->workspace, e);
    if (rc < 0 && (!e || e->code == 0)) dm_err_set(e, rc, "sandbox", "the mounts of the command cannot be planned: %s", dm_err_text(rc));
    if (rc == 0) plan_sort(p);
    return rc;
}

/* ---- as bubblewrap's arguments ------------------------------------------------------------------------------ */

static int arg(dm_buf *b, const char *s) { return dm_buf_append(b, s, strlen(s) + 1); }

static int args(dm_buf *b, const char *s, const char *t, const char *u) {
    int rc = arg(b, s);
    if (rc == 0 && t) rc = arg(b, t);
    if (rc == 0 && u) rc = arg(b, u);
    return rc;
}

static int op_args(const op *o, const char *tmp_bytes, dm_buf *b) {
    const char *from = o->from ? o->from : o->path;
    int rc = 0;
    switch (o->kind) {
    case OP_TMP: /* as /tmp is on every machine: anyone's, sticky */
        rc = args(b, "--size", tmp_bytes, NULL);
        if (rc == 0) rc = args(b, "--perms", "1777", NULL);
        return rc == 0 ? args(b, "--tmpfs", o->path, NULL) : rc;
    case OP_TMPFS:
        rc = args(b, "--size", tmp_bytes, NULL);
        return rc == 0 ? args(b, "--tmpfs", o->path, NULL) : rc;
    case OP_HIDE:
        rc = args(b, "--size", "65536", NULL);
        return rc == 0 ? args(b, "--tmpfs", o->path, NULL) : rc;
    case OP_READ: return args(b, "--ro-bind", from, o->path);
    case OP_WRITE: return args(b, "--bind", from, o->path);
    case OP_MASK: return args(b, "--ro-bind", "/dev/null", o->path); /* a device on a nodev mount: cannot be opened */
    case OP_LINK: return args(b, "--symlink", from, o->path);
    }
    return DM_EINVAL;
}

int plan_args(const plan *p, const sb_request *r, mode m, const char *self, dm_buf *out) {
    static const char *const head[] = {
        "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session",
        "--as-pid-1", "--cap-drop", "ALL", "--hostname", "sandbox", "--ro-bind", "/", "/", "--dev", "/dev",
    };
    char tmp_bytes[32];
    snprintf(tmp_bytes, sizeof tmp_bytes, "%lld", (long long)(r->memory > 0 ? r->memory : (int64_t)2 << 30));
    int rc = r->network ? 0 : arg(out, "--unshare-net");
    for (size_t i = 0; rc == 0 && i < DM_COUNT(head); i++) rc = arg(out, head[i]);
    if (rc == 0) rc = m == MODE_BWRAP ? args(out, "--proc", "/proc", NULL) : args(out, "--ro-bind", "/proc", "/proc");
    for (size_t i = 0; rc == 0 && i < p->n; i++) rc = op_args(&p->ops[i], tmp_bytes, out);
    for (size_t i = 0; rc == 0 && i < p->n; i++) /* only now: mount points may have been made in them */
        if (p->ops[i].kind == OP_HIDE) rc = args(out, "--remount-ro", p->ops[i].path, NULL);
    if (rc == 0) rc = args(out, "--ro-bind", self, "/run/dormouse/supervisor");
    if (rc == 0) rc = args(out, "--json-status-fd", "8", NULL);
    return rc == 0 ? args(out, "--chdir", "/", NULL) : rc;
}

int plan_verify(const plan *p, dm_buf *out) {
    char line[4200];
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < p->n; i++) {
        const op *o = &p->ops[i];
        if (!o->verify) continue;
        snprintf(line, sizeof line, "%llu %llu %c %s", (unsigned long long)o->dev, (unsigned long long)o->ino, o->kind == OP_READ ? 'r' : 'w', o->path);
        rc = sb_put_text(out, SB_T_VERIFY, line);
    }
    return rc;
}

int plan_landlock(const plan *p, dm_buf *out) {
    static const char *const always[] = {"/dev", "/proc"};
    int rc = sb_put_text(out, SB_T_READ, "/");
    for (size_t i = 0; rc == 0 && i < DM_COUNT(always); i++) rc = sb_put_text(out, SB_T_WRITE, always[i]);
    for (size_t i = 0; rc == 0 && i < p->n; i++) {
        const op *o = &p->ops[i];
        if (o->kind == OP_WRITE || o->kind == OP_TMP || o->kind == OP_TMPFS) rc = sb_put_text(out, SB_T_WRITE, o->path);
    }
    return rc;
}

/* ---- Landlock alone ------------------------------------------------------------------------------------------ */

struct alone {
    dm_buf *out;
    const sb_request *hello;
};

static bool hidden(const sb_request *hello, const char *path) {
    char real[4096];
    for (size_t i = 0; i < hello->hide.n; i++)
        if (realpath(hello->hide.p[i], real) && (beneath(path, real) || beneath(real, path))) return true;
    return false;
}

static int home_allow(void *ctx, const char *path, const struct stat *st) {
    struct alone *a = ctx;
    if ((!S_ISDIR(st->st_mode) && !S_ISREG(st->st_mode)) || hidden(a->hello, path)) return 0;
    return sb_put_text(a->out, SB_T_READ, path);
}

int plan_landlock_alone(const sb_request *r, const sb_request *hello, dm_buf *out) {
    static const char *const system_read[] = {"/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix",
                                              "/proc", "/sys", "/dev", "/var/lib/dpkg", "/var/cache/fontconfig"};
    static const char *const device_write[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty", "/dev/shm"};
    struct alone a = {out, hello};
    int rc = 0, left = 4 * HOME_ENTRIES_MAX;
    for (size_t i = 0; rc == 0 && i < DM_COUNT(system_read); i++) rc = sb_put_text(out, SB_T_READ, system_read[i]);
    for (size_t i = 0; rc == 0 && i < DM_COUNT(device_write); i++) rc = sb_put_text(out, SB_T_WRITE, device_write[i]);
    if (rc == 0 && hello->home && strcmp(hello->home, "/") != 0) rc = home_each(hello->home, "", home_allow, &a, &left);
    if (rc == DM_ELIMIT) rc = 0; /* the rest of a huge home is simply not readable */
    if (rc == 0 && r->workspace) rc = sb_put_text(out, r->readonly ? SB_T_READ : SB_T_WRITE, r->workspace);
    for (size_t i = 0; rc == 0 && i < r->write.n; i++) rc = sb_put_text(out, SB_T_WRITE, r->write.p[i]);
    if (rc == 0) rc = sb_put_text(out, SB_T_WRITE, r->tmp);
    return rc;
}
