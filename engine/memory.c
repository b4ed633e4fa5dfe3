/* memory.c — how much memory this process may use, and how much it uses. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "engine/memory_int.h"

/* The beginning of a small file as text; false: there is none.  No allocation: what is asked for when memory is short. */
static bool read_text(const char *path, char *out, size_t cap) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t n = 0;
    if (fd < 0) return false;
    for (ssize_t got; n < cap - 1 && (got = read(fd, out + n, cap - 1 - n)) > 0;) n += (size_t)got;
    close(fd);
    out[n] = '\0';
    return true;
}

/* ---- the bound ------------------------------------------------------------------------------------ */

/* A number of bytes from a file of one line; "max" and a missing file are no bound (INT64_MAX). */
static int64_t bound_in(const char *dir, const char *name) {
    char path[1200], text[64], *end;
    if (snprintf(path, sizeof path, "%s/%s", dir, name) >= (int)sizeof path || !read_text(path, text, sizeof text)) return INT64_MAX;
    errno = 0;
    long long n = strtoll(text, &end, 10);
    return end != text && errno == 0 && n >= 0 ? n : INT64_MAX;
}

/* The smallest bound of a group and those above it; root is where the hierarchy is mounted. */
static int64_t bound_up(const char *root, const char *group, const char *name) {
    char dir[1024];
    int64_t least = INT64_MAX;
    size_t base = strlen(root);
    if (snprintf(dir, sizeof dir, "%s%s", root, group) >= (int)sizeof dir) return least;
    for (;;) {
        int64_t v = bound_in(dir, name);
        if (v < least) least = v;
        char *slash = strrchr(dir, '/');
        if (strlen(dir) <= base || !slash || slash < dir + base) return least;
        *slash = '\0';
    }
}

/* Lines "0::/group" (the unified hierarchy) and "4:memory:/group" (the older one). */
static int64_t bound_of_groups(const char *cgroups, const char *mount) {
    int64_t least = INT64_MAX;
    char text[8192], *save, root[512];
    if (!read_text(cgroups, text, sizeof text)) return least;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *first = strchr(line, ':'), *second = first ? strchr(first + 1, ':') : NULL;
        int64_t v = INT64_MAX;
        if (!second) continue;
        *second = '\0';
        if (first[1] == '\0') v = bound_up(mount, second + 1, "memory.max");
        else if (strcmp(first + 1, "memory") == 0) {
            snprintf(root, sizeof root, "%s/memory", mount);
            v = bound_up(root, second + 1, "memory.limit_in_bytes");
        }
        if (v < least) least = v;
    }
    return least;
}

int64_t dm_memory_limit_at(const char *cgroups, const char *mount) {
    long pages = sysconf(_SC_PHYS_PAGES), page = sysconf(_SC_PAGESIZE);
    int64_t machine = pages > 0 && page > 0 ? (int64_t)pages * page : INT64_MAX, groups = bound_of_groups(cgroups, mount);
    return groups < machine ? groups : machine;
}
int64_t dm_memory_limit(void) { return dm_memory_limit_at("/proc/self/cgroup", "/sys/fs/cgroup"); }

/* ---- the use ---------------------------------------------------------------------------------------- */

static int64_t kib_of(const char *text, const char *key) {
    const char *p = strstr(text, key);
    return p ? strtoll(p + strlen(key), NULL, 10) * 1024 : 0;
}

void dm_memory_use_get(dm_memory_use *out) {
    char s[8192];
    *out = (dm_memory_use){0};
    if (!read_text("/proc/self/status", s, sizeof s)) return;
    *out = (dm_memory_use){.anon_bytes = kib_of(s, "\nRssAnon:"), .file_bytes = kib_of(s, "\nRssFile:") + kib_of(s, "\nRssShmem:"), /* a file on tmpfs is shared memory */
                            .peak_bytes = kib_of(s, "\nVmHWM:")};
}
