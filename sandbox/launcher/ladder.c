/* What confinement this machine gives, found by doing it: `true` is run in each mode, best first, on the same path that
 * every later command takes.  Nothing is concluded from versions or settings; those only explain a failure. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "sandbox/launcher/launcher_int.h"

/* ---- bubblewrap ------------------------------------------------------------------------------------------------ */

/* Fills l->bwrap with an absolute path; false if there is none. */
static bool bwrap_find(launcher *l) {
    const char *name = l->hello.bwrap ? l->hello.bwrap : "bwrap";
    if (strchr(name, '/')) {
        if (realpath(name, l->bwrap) && access(l->bwrap, X_OK) == 0) return true;
        l->bwrap[0] = 0;
        return false;
    }
    const char *path = "/usr/bin:/bin";
    for (size_t i = 0; i < l->hello.env.n; i++)
        if (dm_str_prefix(l->hello.env.p[i], "PATH=")) path = l->hello.env.p[i] + 5;
    while (*path) {
        const int len = (int)strcspn(path, ":");
        if (len > 0 && path[0] == '/' && snprintf(l->bwrap, sizeof l->bwrap, "%.*s/%s", len, path, name) < (int)sizeof l->bwrap &&
            access(l->bwrap, X_OK) == 0)
            return true;
        path += len + (path[len] == ':');
    }
    l->bwrap[0] = 0;
    return false;
}

/* ---- why not ---------------------------------------------------------------------------------------------------- */

/* A small number in /proc/sys, or -1. */
static long setting(const char *path) {
    char text[32];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0) return -1;
    text[n] = 0;
    return strtol(text, NULL, 10);
}

/* The way out, as one clause. */
static const char *remedy(const launcher *l, const char *why) {
    if (!l->bwrap[0]) return l->hello.bwrap ? "name an existing one, or install the package bubblewrap" : "install the package bubblewrap";
    if (setting("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == 1)
        return "AppArmor forbids user namespaces: allow them for bwrap with a profile, or set kernel.apparmor_restrict_unprivileged_userns=0";
    if (setting("/proc/sys/kernel/unprivileged_userns_clone") == 0) return "user namespaces are switched off: set kernel.unprivileged_userns_clone=1";
    if (setting("/proc/sys/user/max_user_namespaces") == 0) return "user namespaces are switched off: set user.max_user_namespaces to a number above 0";
    if (strstr(why, "mount proc")) return "the container around us covers parts of /proc: run it with an unmasked /proc, or accept the level partial";
    if (strstr(why, "o permissions to creat") || strstr(why, "ermission denied") || strstr(why, "not permitted"))
        return "the container around us forbids namespaces: let it allow unshare and mount, or accept the level partial";
    return "try `bwrap --unshare-all --ro-bind / / true` by hand to see why";
}

/* ---- trying ------------------------------------------------------------------------------------------------------ */

/* Landlock alone cannot show an empty /tmp, so commands get a directory of their own by TMPDIR; main removes it. */
static void scratch_make(launcher *l) {
    snprintf(l->scratch, sizeof l->scratch, "/tmp/dormouse-XXXXXX");
    if (!mkdtemp(l->scratch)) l->scratch[0] = 0;
}

static int try_mode(launcher *l, mode m, char *why, size_t cap) {
    static const char *argv[] = {"true", NULL};
    sb_exit x;
    sb_request r = {.argv = {argv, 1, 0}, .timeout_ms = 10000};
    l->mode = m;
    if (m == MODE_LANDLOCK) scratch_make(l);
    int rc = server_run_one(l, &r, &x);
    if (rc == 0 && x.exit_code == 0 && x.flags == 0) return 0;
    if (x.text[0]) snprintf(why, cap, "%s", x.text);
    else if (x.flags & SB_X_TIMED_OUT) snprintf(why, cap, "`true` did not end within 10 s inside");
    else snprintf(why, cap, "`true` ended with status %d inside", x.exit_code);
    return DM_ESANDBOX;
}

static void report_full(const launcher *l, bool host_proc, char *out, size_t cap) {
    char landlock[64];
    if (l->landlock_abi > 0) snprintf(landlock, sizeof landlock, "Landlock (ABI %d)", l->landlock_abi);
    else snprintf(landlock, sizeof landlock, "no Landlock in this kernel");
    snprintf(out, cap, "%s: bubblewrap with user, mount, pid, net, ipc and uts namespaces; %s; seccomp; rlimits; memory bounded by watching, without cgroup%s",
             host_proc ? "partial" : "full", landlock, host_proc ? "; /proc is the machine's own, so its processes can be listed" : "");
}

static void report_landlock(const launcher *l, const char *why, char *out, size_t cap) {
    snprintf(out, cap,
             "partial: Landlock (ABI %d)%s, seccomp without internet sockets, rlimits, process-tree kill; missing: namespaces (%s), private /tmp and "
             "/proc, protection of .git/hooks and other trusted names, UNIX sockets of the machine stay reachable",
             l->landlock_abi, l->landlock_abi < 3 ? " without truncate" : "", why);
}

/* ---- the ladder -------------------------------------------------------------------------------------------------- */

static int ladder_climb(launcher *l, dm_sandbox_level least, sb_ready *out) {
    char why[256] = "bubblewrap (bwrap) is not installed", why_lower[256] = "";
    if (l->hello.bwrap) snprintf(why, sizeof why, "%.200s is not a program that can be run", l->hello.bwrap);
    const bool wrapper = bwrap_find(l);
    if (wrapper && try_mode(l, MODE_BWRAP, why, sizeof why) == 0) {
        report_full(l, false, out->report, sizeof out->report);
        return DM_SANDBOX_FULL;
    }
    if (wrapper && try_mode(l, MODE_BWRAP_HOST_PROC, why_lower, sizeof why_lower) == 0) {
        report_full(l, true, out->report, sizeof out->report);
        if (least <= DM_SANDBOX_PARTIAL) return DM_SANDBOX_PARTIAL;
    } else if (l->landlock_abi > 0 && try_mode(l, MODE_LANDLOCK, why_lower, sizeof why_lower) == 0) {
        report_landlock(l, why, out->report, sizeof out->report);
        if (least <= DM_SANDBOX_PARTIAL) return DM_SANDBOX_PARTIAL;
    }
    out->code = DM_ESANDBOX;
    snprintf(out->text, sizeof out->text, "the sandbox level %s cannot be had: %s; %s%s", least == DM_SANDBOX_FULL ? "full" : "partial", why,
             remedy(l, why), out->report[0] ? " (the level partial would work)" : "");
    return DM_ESANDBOX;
}

int ladder_probe(launcher *l, dm_sandbox_level least, sb_ready *out) {
    char why[256] = "";
    l->landlock_abi = confine_landlock_abi();
    if (least > DM_SANDBOX_NONE) return out->level = ladder_climb(l, least, out);
    /* Asked for by name, so nothing better is tried: a result must not depend on the machine. */
    if (try_mode(l, MODE_NONE, why, sizeof why) < 0) {
        out->code = DM_ESANDBOX;
        snprintf(out->text, sizeof out->text, "even without a sandbox `true` cannot be run: %s", why);
        return DM_ESANDBOX;
    }
    snprintf(out->report, sizeof out->report,
             "none: commands run with this user's rights, files and network; only rlimits, a clean environment and process-tree kill");
    return out->level = DM_SANDBOX_NONE;
}
