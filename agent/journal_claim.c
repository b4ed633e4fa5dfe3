/* journal_claim.c — one runner per session: a lock file per session, held by flock.
 *
 * The lock belongs to an open file description, so two opens in one process exclude each other too, and it goes
 * with the process however that ends.  The file holds the pid of the holder, for the message only; it stays
 * behind when the lock is dropped and is removed with the session, by somebody who holds it.  So after locking
 * we look whether the name still leads to the file that we locked. */
#include "agent/agent_int.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

static long holder_pid(int fd)
{
    char text[24] = { 0 };
    return pread(fd, text, sizeof text - 1, 0) > 0 ? strtol(text, NULL, 10) : 0;
}

static int open_locked(const char *path, int *fd, long *pid)
{
    for (;;) {
        int f = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
        if (f < 0) return errno;
        if (flock(f, LOCK_EX | LOCK_NB) != 0) {
            int err = errno;
            *pid = holder_pid(f);
            close(f);
            return err;
        }
        struct stat mine, named;
        if (fstat(f, &mine) == 0 && stat(path, &named) == 0 && mine.st_dev == named.st_dev && mine.st_ino == named.st_ino) {
            *fd = f;
            return 0;
        }
        close(f); /* unlinked between open and lock */
    }
}

int claim_take(const char *dir, const char *session, int *fd, dm_err *e)
{
    char *path = dm_path_join(dir, session);
    if (!path) return dm_err_set(e, DM_ENOMEM, "session", "out of memory");
    long pid = 0;
    int err = open_locked(path, fd, &pid);
    dm_free(path);
    if (err == EWOULDBLOCK) {
        if (pid > 0) return dm_err_set(e, DM_EBUSY, "session", "session %s is being run by process %ld", session, pid);
        return dm_err_set(e, DM_EBUSY, "session", "session %s is being run by another process", session);
    }
    if (err) return dm_err_sys(e, err, "session", "cannot lock session %s", session);
    char text[24];
    int n = snprintf(text, sizeof text, "%ld\n", (long)getpid());
    if (ftruncate(*fd, 0) != 0 || pwrite(*fd, text, (size_t)n, 0) != n) {
        err = errno ? errno : EIO;
        claim_drop(*fd);
        if (err == ENOSPC || err == EDQUOT)
            return dm_err_set(e, DM_ENOSPC, "session", "no space left on the disk of %s; make room (kv/ beside it is a cache and may be deleted)", dir);
        return dm_err_sys(e, err, "session", "cannot write the lock of session %s", session);
    }
    return 0;
}

void claim_drop(int fd) { close(fd); }

bool claim_held(const char *dir, const char *session)
{
    char *path = dm_path_join(dir, session);
    if (!path) return false;
    int f = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    dm_free(path);
    if (f < 0) return false;
    bool held = flock(f, LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    close(f);
    return held;
}
