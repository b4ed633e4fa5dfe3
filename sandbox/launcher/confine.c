/* What a process can give up for itself and all its children: files (Landlock), resources, capabilities, system calls.
 * The headers of older systems know Landlock only in part, so its numbers are stated here. */
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sandbox/launcher/launcher_int.h"

/* ---- Landlock --------------------------------------------------------------------------------------------- */

enum { LL_CREATE = 444, LL_ADD = 445, LL_RESTRICT = 446, LL_VERSION = 1, LL_PATH_BENEATH = 1 };
enum { LL_EXECUTE = 1 << 0, LL_WRITE_FILE = 1 << 1, LL_READ_FILE = 1 << 2, LL_READ_DIR = 1 << 3, LL_REFER = 1 << 13,
       LL_TRUNCATE = 1 << 14, LL_IOCTL_DEV = 1 << 15 };
enum { LL_SCOPE_ABSTRACT_UNIX = 1, LL_SCOPE_SIGNAL = 2 };

struct ll_ruleset { uint64_t fs, net, scoped; };
struct ll_beneath { uint64_t allowed; int32_t parent_fd; } __attribute__((packed));

int confine_landlock_abi(void) {
    long v = syscall(LL_CREATE, NULL, 0, LL_VERSION);
    return v < 0 ? 0 : (int)v;
}

/* All file rights that this ABI knows: 13 at first, then REFER (2), TRUNCATE (3), IOCTL_DEV (5). */
static uint64_t fs_rights(int abi) {
    uint64_t rights = (1u << 13) - 1;
    if (abi >= 2) rights |= LL_REFER;
    if (abi >= 3) rights |= LL_TRUNCATE;
    if (abi >= 5) rights |= LL_IOCTL_DEV;
    return rights;
}

/* A rule for a file may only hold rights that make sense for files. */
static int rule_add(int ruleset, const char *path, uint64_t rights) {
    struct stat st;
    int fd = open(path, O_PATH | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT || errno == EACCES ? 0 : -errno; /* nothing there: nothing to allow */
    int rc = fstat(fd, &st) == 0 ? 0 : -errno;
    if (rc == 0 && !S_ISDIR(st.st_mode)) rights &= LL_EXECUTE | LL_WRITE_FILE | LL_READ_FILE | LL_TRUNCATE | LL_IOCTL_DEV;
    const struct ll_beneath rule = {rights, fd};
    if (rc == 0 && syscall(LL_ADD, ruleset, LL_PATH_BENEATH, &rule, 0) != 0) rc = -errno;
    close(fd);
    return rc;
}

int confine_landlock(const sb_request *r, dm_err *e) {
    const int abi = confine_landlock_abi();
    if (abi == 0) return dm_err_set(e, DM_ENOTSUP, "landlock", "the kernel has no Landlock");
    const uint64_t all = fs_rights(abi), read = LL_EXECUTE | LL_READ_FILE | LL_READ_DIR;
    const struct ll_ruleset attr = {.fs = all, .scoped = abi >= 6 ? LL_SCOPE_ABSTRACT_UNIX | LL_SCOPE_SIGNAL : 0};
    /* The size tells an old kernel where its fields end. */
    const size_t size = abi >= 6 ? sizeof attr : abi >= 4 ? 16 : 8;
    int ruleset = (int)syscall(LL_CREATE, &attr, size, 0);
    if (ruleset < 0) return dm_err_sys(e, errno, "landlock", "a ruleset cannot be made");
    int rc = 0;
    const char *path = "";
    for (size_t i = 0; rc == 0 && i < r->read.n; i++) rc = rule_add(ruleset, path = r->read.p[i], read & all);
    for (size_t i = 0; rc == 0 && i < r->write.n; i++) rc = rule_add(ruleset, path = r->write.p[i], all);
    if (rc < 0) dm_err_sys(e, -rc, "landlock", "no rule for %s", path);
    else if (syscall(LL_RESTRICT, ruleset, 0) != 0) rc = dm_err_sys(e, errno, "landlock", "the ruleset is refused");
    close(ruleset);
    return rc;
}

/* ---- resources -------------------------------------------------------------------------------------------- */

/* Sets both limits; a hard limit that is lower already stays. */
static int limit(int what, uint64_t soft, uint64_t hard) {
    struct rlimit now;
    if (getrlimit((__rlimit_resource_t)what, &now) != 0) return -errno;
    if (now.rlim_max < hard) hard = now.rlim_max;
    if (soft > hard) soft = hard;
    const struct rlimit want = {soft, hard};
    return setrlimit((__rlimit_resource_t)what, &want) == 0 ? 0 : -errno;
}

/* No RLIMIT_AS: Go, Java, Node and sanitizers reserve far more than they use.  Memory is watched instead. */
int confine_limits(const sb_request *r, dm_err *e) {
    int rc = limit(RLIMIT_CORE, 0, 0);
    if (rc == 0) rc = limit(RLIMIT_NOFILE, 1024, 65536);
    if (rc == 0) rc = limit(RLIMIT_MEMLOCK, 8 << 20, 8 << 20);
    if (rc == 0 && r->fsize > 0) rc = limit(RLIMIT_FSIZE, (uint64_t)r->fsize, (uint64_t)r->fsize);
    if (rc == 0 && r->cpu_s > 0) rc = limit(RLIMIT_CPU, (uint64_t)r->cpu_s, (uint64_t)r->cpu_s + 1);
    if (rc == 0 && (r->inside & IN_NPROC) && r->pids > 0) rc = limit(RLIMIT_NPROC, (uint64_t)r->pids, (uint64_t)r->pids);
    return rc < 0 ? dm_err_sys(e, -rc, "rlimit", "a limit cannot be set") : 0;
}

/* ---- capabilities ----------------------------------------------------------------------------------------- */

/* bubblewrap started by root leaves every capability of the new namespace in place, enough to undo its mounts. */
int confine_privileges(dm_err *e) {
    for (int cap = 0; cap < 64; cap++) {
        if (prctl(PR_CAPBSET_READ, cap, 0, 0, 0) != 1) continue;
        if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) != 0 && errno != EPERM) return dm_err_sys(e, errno, "capabilities", "one cannot be dropped");
    }
    prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
    struct __user_cap_header_struct head = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {0};
    if (syscall(SYS_capset, &head, data) != 0) return dm_err_sys(e, errno, "capabilities", "they cannot be given up");
    /* With this no exec gives any back, not even to root. */
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) return dm_err_sys(e, errno, "capabilities", "no_new_privs is refused");
    return 0;
}

/* ---- system calls ----------------------------------------------------------------------------------------- */

int confine_filter(int fd, dm_err *e) {
    static struct sock_filter program[4096];
    struct stat st;
    if (fstat(fd, &st) != 0 || st.st_size <= 0 || st.st_size > (off_t)sizeof program || st.st_size % (off_t)sizeof program[0])
        return dm_err_set(e, DM_EFORMAT, "seccomp", "the filter has no sensible size");
    if (pread(fd, program, (size_t)st.st_size, 0) != st.st_size) return dm_err_set(e, DM_EIO, "seccomp", "the filter cannot be read");
    const struct sock_fprog prog = {(unsigned short)((size_t)st.st_size / sizeof program[0]), program};
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog, 0, 0) != 0) return dm_err_sys(e, errno, "seccomp", "the filter is refused");
    return 0;
}
