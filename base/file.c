/* Clocks and whole-file helpers. */
#include "base.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

uint64_t dm_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int64_t dm_wall_ms(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

int dm_file_read(const char *path, size_t max_bytes, dm_buf *out, dm_err *e)
{
    /* O_NONBLOCK: opening a FIFO must not wait for a writer. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (fd < 0) return dm_err_sys(e, errno, "file", "%s", path);
    struct stat st;
    int rc = 0;
    size_t start = out->n;
    if (fstat(fd, &st) < 0) rc = dm_err_sys(e, errno, "file", "%s", path);
    else if (!S_ISREG(st.st_mode)) rc = dm_err_set(e, DM_EINVAL, "file", "%s is not a regular file", path);
    else if ((uint64_t)st.st_size > max_bytes)
        rc = dm_err_set(e, DM_ELIMIT, "file", "%s has %lld bytes, more than the %zu allowed here", path, (long long)st.st_size, max_bytes);
    else if (dm_buf_reserve(out, (size_t)st.st_size) < 0) rc = dm_err_set(e, DM_ENOMEM, "file", "no memory to read %s", path);
    while (rc == 0) {
        /* The file may grow while it is read: the bound holds all the same. */
        size_t room = max_bytes - (out->n - start);
        if (dm_buf_reserve(out, room < 65536 ? room : 65536) < 0) rc = dm_err_set(e, DM_ENOMEM, "file", "no memory to read %s", path);
        else {
            size_t ask = out->cap - 1 - out->n;
            ssize_t n = read(fd, out->p + out->n, ask < room ? ask : room);
            if (n == 0) break;
            if (n < 0 && errno == EINTR) continue;
            if (n < 0) rc = dm_err_sys(e, errno, "file", "reading %s", path);
            else out->n += (size_t)n;
        }
    }
    close(fd);
    if (rc < 0) out->n = start;
    if (out->p) out->p[out->n] = 0;
    return rc;
}

static int write_all(int fd, const void *p, size_t n)
{
    const char *s = p;
    while (n) {
        ssize_t k = dm_fault("file.write") ? (errno = ENOSPC, -1) : write(fd, s, n);
        if (k < 0 && errno == EINTR) continue;
        if (k < 0) return -errno;
        s += k;
        n -= (size_t)k;
    }
    return 0;
}

static int sync_dir_of(const char *path)
{
    char *dir = dm_strdup(path);
    if (!dir) return DM_ENOMEM;
    char *slash = strrchr(dir, '/');
    if (slash) slash[slash == dir] = 0;
    int fd = open(slash ? dir : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    dm_free(dir);
    if (fd < 0) return -errno;
    int rc = fsync(fd) < 0 && errno != EINVAL ? -errno : 0; /* some file systems cannot sync a directory */
    close(fd);
    return rc;
}

int dm_file_write_atomic(const char *path, const void *p, size_t n, mode_t mode, dm_err *e)
{
    char tmp[4096];
    if (snprintf(tmp, sizeof tmp, "%s.XXXXXX", path) >= (int)sizeof tmp) return dm_err_set(e, DM_ELIMIT, "file", "path too long: %s", path);
    int fd = mkostemp(tmp, O_CLOEXEC);
    if (fd < 0) return dm_err_sys(e, errno, "file", "cannot create a file beside %s", path);
    int rc = write_all(fd, p, n);
    if (rc == 0 && fchmod(fd, mode) < 0) rc = -errno;
    if (rc == 0 && (dm_fault("file.sync") ? (errno = EIO, -1) : fsync(fd)) < 0) rc = -errno;
    if (close(fd) < 0 && rc == 0) rc = -errno;
    if (rc == 0 && rename(tmp, path) < 0) rc = -errno;
    if (rc < 0) {
        unlink(tmp);
        return dm_err_sys(e, -rc, "file", "cannot write %s", path);
    }
    rc = sync_dir_of(path);
    return rc < 0 ? dm_err_sys(e, -rc, "file", "cannot sync the directory of %s", path) : 0;
}

int dm_mkdirs(const char *path, mode_t mode, dm_err *e)
{
    char *s = dm_strdup(path);
    if (!s) return dm_err_set(e, DM_ENOMEM, "file", "out of memory");
    int rc = 0;
    for (char *p = s + 1; rc == 0; p++) {
        if (*p != '/' && *p) continue;
        char c = *p;
        *p = 0;
        if (mkdir(s, mode) < 0 && errno != EEXIST) rc = dm_err_sys(e, errno, "file", "cannot create directory %s", s);
        *p = c;
        if (!c) break;
    }
    struct stat st;
    if (rc == 0 && (stat(s, &st) < 0 || !S_ISDIR(st.st_mode))) rc = dm_err_set(e, DM_EINVAL, "file", "%s is not a directory", path);
    dm_free(s);
    return rc;
}

char *dm_path_join(const char *a, const char *b)
{
    size_t na = strlen(a), nb = strlen(b);
    bool slash = na && a[na - 1] != '/';
    char *p = dm_malloc(na + nb + 2);
    if (!p) return NULL;
    memcpy(p, a, na);
    if (slash) p[na++] = '/';
    memcpy(p + na, b, nb + 1);
    return p;
}

bool dm_path_exists(const char *path) { return access(path, F_OK) == 0; }
