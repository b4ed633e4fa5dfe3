/* The seccomp filter.  With namespaces in place it is about the kernel's attack surface and about the few calls that
 * reach around them (keys, terminals, foreign sockets), not about the network: connect, bind and friends stay allowed,
 * or asyncio, test servers and language tools break.  Denied calls get EPERM, so programs see an error and go on. */
#include <errno.h>
#include <sched.h>
#include <seccomp.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "sandbox/launcher/launcher_int.h"

static const char *const denied[] = {
    /* into other processes */
    "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "process_madvise",
    /* large young interfaces */
    "bpf", "perf_event_open", "userfaultfd", "io_uring_setup", "io_uring_enter", "io_uring_register", "fanotify_init",
    "open_by_handle_at",
    /* the view of the file system */
    "mount", "umount", "umount2", "pivot_root", "chroot", "move_mount", "open_tree", "fsopen", "fsmount", "fsconfig", "fspick",
    "mount_setattr", "setns",
    /* keys outlive the sandbox */
    "keyctl", "add_key", "request_key",
    /* the machine */
    "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "create_module", "query_module", "reboot",
    "swapon", "swapoff", "sethostname", "setdomainname", "settimeofday", "clock_settime", "stime", "acct", "quotactl",
    "quotactl_fd", "syslog", "iopl", "ioperm", "vhangup", "nfsservctl", "lookup_dcookie", "uselib", "ustat", "sysfs", "vm86",
    "vm86old", "modify_ldt",
};

#ifndef CLONE_NEWTIME
#define CLONE_NEWTIME 0x00000080
#endif

static int deny(scmp_filter_ctx f, const char *name, unsigned n, const struct scmp_arg_cmp *cmp) {
    const int nr = seccomp_syscall_resolve_name(name);
    if (nr == __NR_SCMP_ERROR) return 0; /* younger than this libseccomp: nothing to name */
    const int rc = seccomp_rule_add_array(f, SCMP_ACT_ERRNO(EPERM), nr, n, cmp);
    return rc == -EDOM || rc == -EINVAL ? 0 : rc; /* not a call of this architecture */
}

static int deny_arg(scmp_filter_ctx f, const char *name, struct scmp_arg_cmp cmp) { return deny(f, name, 1, &cmp); }

/* New namespaces give a fresh set of capabilities and with it most kernel bugs of recent years. */
static int deny_namespaces(scmp_filter_ctx f) {
    static const uint64_t flags[] = {CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWIPC, CLONE_NEWUTS, CLONE_NEWCGROUP};
    int rc = deny_arg(f, "unshare", SCMP_A0(SCMP_CMP_MASKED_EQ, CLONE_NEWTIME, CLONE_NEWTIME));
    for (size_t i = 0; rc == 0 && i < DM_COUNT(flags); i++) {
        rc = deny_arg(f, "unshare", SCMP_A0(SCMP_CMP_MASKED_EQ, flags[i], flags[i]));
        if (rc == 0) rc = deny_arg(f, "clone", SCMP_A0(SCMP_CMP_MASKED_EQ, flags[i], flags[i]));
    }
    /* Its flags lie in memory where a filter cannot look; ENOSYS makes libc fall back to clone. */
    if (rc == 0) rc = seccomp_rule_add(f, SCMP_ACT_ERRNO(ENOSYS), SCMP_SYS(clone3), 0);
    return rc;
}

/* The kernel looks at 32 bits of an ioctl number, a filter at 64: compare the lower half only. */
static int deny_terminal(scmp_filter_ctx f) {
    int rc = deny_arg(f, "ioctl", SCMP_A1(SCMP_CMP_MASKED_EQ, 0xffffffff, TIOCSTI));
    return rc == 0 ? deny_arg(f, "ioctl", SCMP_A1(SCMP_CMP_MASKED_EQ, 0xffffffff, TIOCLINUX)) : rc;
}

/* Families are small numbers; anything with high bits set is above the last one allowed and so denied too. */
static int deny_sockets(scmp_filter_ctx f, bool deny_inet) {
    int rc = deny_arg(f, "socket", SCMP_A0(SCMP_CMP_GT, AF_NETLINK));
    for (uint64_t family = 0; rc == 0 && family <= AF_NETLINK; family++) {
        const bool inet = family == AF_INET || family == AF_INET6 || family == AF_NETLINK;
        if (family == AF_UNIX || (inet && !deny_inet)) continue;
        rc = deny_arg(f, "socket", SCMP_A0(SCMP_CMP_EQ, family));
    }
    const struct scmp_arg_cmp netlink_not_route[] = {SCMP_A0(SCMP_CMP_EQ, AF_NETLINK), SCMP_A2(SCMP_CMP_NE, 0)};
    if (rc == 0 && !deny_inet) rc = deny(f, "socket", 2, netlink_not_route);
    return rc;
}

/* Other personalities weaken address randomisation; asking (all ones) is harmless.  One comparison cannot say
 * "neither 0 nor all ones", so: some bit is set while bit 31 is not, or some bit is not while bit 31 is. */
static int deny_personality(scmp_filter_ctx f) {
    const uint64_t top = 0x80000000u;
    int rc = 0;
    for (int bit = 0; rc == 0 && bit < 31; bit++) {
        const uint64_t one = 1u << bit, mask = top | one;
        rc = deny_arg(f, "personality", SCMP_A0(SCMP_CMP_MASKED_EQ, mask, one));
        if (rc == 0) rc = deny_arg(f, "personality", SCMP_A0(SCMP_CMP_MASKED_EQ, mask, top));
    }
    return rc;
}

int filter_build(bool deny_inet, dm_err *e) {
    scmp_filter_ctx f = seccomp_init(SCMP_ACT_ALLOW);
    if (!f) return dm_err_set(e, DM_ENOMEM, "seccomp", "out of memory");
    /* 32-bit and x32 calls would pass by other numbers: there are none. */
    int rc = seccomp_attr_set(f, SCMP_FLTATR_ACT_BADARCH, SCMP_ACT_ERRNO(ENOSYS));
    for (size_t i = 0; rc == 0 && i < DM_COUNT(denied); i++) rc = deny(f, denied[i], 0, NULL);
    if (rc == 0) rc = deny_namespaces(f);
    if (rc == 0) rc = deny_terminal(f);
    if (rc == 0) rc = deny_sockets(f, deny_inet);
    if (rc == 0) rc = deny_personality(f);
    int fd = rc == 0 ? memfd_create("dormouse-filter", MFD_CLOEXEC) : -1;
    if (rc == 0 && fd < 0) rc = -errno;
    if (rc == 0) rc = seccomp_export_bpf(f, fd);
    seccomp_release(f);
    if (rc == 0) return fd;
    if (fd >= 0) close(fd);
    return dm_err_sys(e, -rc, "seccomp", "the filter cannot be built");
}
