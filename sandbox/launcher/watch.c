/* Sums memory and processes of one command's tree, by the kernel's lists of children: the bound on memory where no
 * cgroup is ours to set it.  Shared pages count once for each process, so the sum errs on the strict side. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sandbox/launcher/launcher_int.h"

enum { TREE_MAX = 16384 };

static ssize_t read_small(const char *path, char *text, size_t cap) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    size_t n = 0;
    for (ssize_t got; n < cap - 1 && (got = read(fd, text + n, cap - 1 - n)) > 0;) n += (size_t)got;
    close(fd);
    text[n] = 0;
    return (ssize_t)n;
}

/* A line of /proc/PID/status in kB, or 0. */
static int64_t status_kb(const char *text, const char *key) {
    const char *at = strstr(text, key);
    return at ? strtoll(at + strlen(key), NULL, 10) : 0;
}

/* Resident memory that is the process's own or shared, but not that of mapped files. */
static int64_t rss_of(pid_t pid) {
    char path[64], text[4096];
    snprintf(path, sizeof path, "/proc/%d/status", (int)pid);
    if (read_small(path, text, sizeof text) <= 0) return 0;
    return (status_kb(text, "\nRssAnon:") + status_kb(text, "\nRssShmem:")) * 1024;
}

typedef struct tree {
    pid_t *pids;
    int n, cap;
} tree;

static void tree_add(tree *t, pid_t pid) {
    if (t->n >= TREE_MAX) return;
    if (t->n == t->cap) {
        const int cap = t->cap ? 2 * t->cap : 64;
        pid_t *p = dm_realloc(t->pids, (size_t)cap * sizeof *p);
        if (!p) return;
        t->pids = p;
        t->cap = cap;
    }
    t->pids[t->n++] = pid;
}

/* Any thread of a process may have made a child. */
static void children_add(tree *t, pid_t pid) {
    char path[96];
    static char text[65536];
    snprintf(path, sizeof path, "/proc/%d/task", (int)pid);
    DIR *d = opendir(path);
    if (!d) return;
    for (struct dirent *it; (it = readdir(d));) {
        if (it->d_name[0] < '0' || it->d_name[0] > '9') continue;
        snprintf(path, sizeof path, "/proc/%d/task/%.20s/children", (int)pid, it->d_name);
        if (read_small(path, text, sizeof text) <= 0) continue;
        for (char *at = text, *end;; at = end) {
            const long pid_in = strtol(at, &end, 10);
            if (end == at) break;
            if (pid_in > 1) tree_add(t, (pid_t)pid_in);
        }
    }
    closedir(d);
}

static tree tree_of(pid_t root) {
    tree t = {0};
    tree_add(&t, root);
    for (int i = 0; i < t.n; i++) children_add(&t, t.pids[i]);
    return t;
}

int watch_children(pid_t parent, pid_t *out, int cap) {
    tree t = {0};
    children_add(&t, parent);
    const int n = t.n < cap ? t.n : cap;
    if (n > 0) memcpy(out, t.pids, (size_t)n * sizeof *out);
    dm_free(t.pids);
    return n;
}

usage watch_tree(pid_t root) {
    tree t = tree_of(root);
    usage u = {0, t.n};
    for (int i = 0; i < t.n; i++) u.rss_bytes += rss_of(t.pids[i]);
    dm_free(t.pids);
    return u;
}

void watch_kill_tree(pid_t root, int sig) {
    tree t = tree_of(root);
    for (int i = t.n; i-- > 0;) kill(t.pids[i], sig);
    dm_free(t.pids);
}
