/* dormouse-sandbox: started by the host before the engine touches memory; see launcher_int.h for its two roles. */
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sandbox/launcher/launcher_int.h"

enum { SOCKET = 3, HELLO_WAIT_MS = 30000 };

static int hello_receive(launcher *l, dm_err *e) {
    sb_head h;
    int fd = -1, fd_count = 1;
    struct pollfd pf = {SOCKET, POLLIN, 0};
    if (poll(&pf, 1, HELLO_WAIT_MS) != 1) return dm_err_set(e, DM_ETIMEDOUT, "sandbox", "the host says nothing");
    int got = sb_recv(SOCKET, &h, sizeof h, &fd, &fd_count);
    if (got != (int)sizeof h || h.magic != SB_MAGIC || h.type != SB_HELLO || fd_count != 1) {
        if (fd_count == 1) close(fd);
        return dm_err_set(e, DM_EFORMAT, "sandbox", "the host speaks another version of the protocol");
    }
    int rc = sb_request_read(&l->hello, fd, e);
    close(fd);
    return rc;
}

/* Home must be canonical for the plan; a missing one is none. */
static void home_settle(launcher *l) {
    static char real[4096];
    struct stat st;
    const char *home = l->hello.home;
    l->hello.home = home && realpath(home, real) && stat(real, &st) == 0 && S_ISDIR(st.st_mode) ? real : NULL;
}

static int remove_one(const char *path, const struct stat *st, int type, struct FTW *at) {
    (void)st, (void)type, (void)at;
    (void)remove(path); /* what cannot go stays, and so does the directory above it */
    return 0;
}

static int setup(launcher *l, sb_ready *ready) {
    dm_err e = {0};
    ssize_t n = readlink("/proc/self/exe", l->self, sizeof l->self - 1);
    l->self[n > 0 ? n : 0] = 0;
    l->commands = dm_calloc(1, server_commands_bytes());
    int rc = l->commands ? hello_receive(l, &e) : dm_err_set(&e, DM_ENOMEM, "sandbox", "out of memory");
    if (rc == 0) rc = l->filter[0] = filter_build(false, &e);
    if (rc >= 0) rc = l->filter[1] = filter_build(true, &e);
    if (rc >= 0) {
        home_settle(l);
        rc = ladder_probe(l, (dm_sandbox_level)(l->hello.level > DM_SANDBOX_FULL ? DM_SANDBOX_FULL : l->hello.level), ready);
    } else {
        ready->code = rc;
        snprintf(ready->text, sizeof ready->text, "%s", e.text);
    }
    return rc;
}

static int serve(void) {
    launcher l = {.sock = SOCKET, .filter = {-1, -1}};
    sb_ready ready = {.head = {SB_MAGIC, SB_READY, 0, 0}};
    signal(SIGPIPE, SIG_IGN);
    (void)fcntl(SOCKET, F_SETFD, FD_CLOEXEC);
    int rc = setup(&l, &ready);
    if (sb_send(SOCKET, &ready, sizeof ready, NULL, 0, 5000) == 0 && rc >= 0) rc = server_run(&l);
    if (l.scratch[0]) (void)nftw(l.scratch, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
    for (size_t at = 0; at < l.tmps.n; at += strlen((char *)l.tmps.p + at) + 1)
        (void)nftw((char *)l.tmps.p + at, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
    dm_buf_free(&l.tmps);
    sb_request_free(&l.hello);
    dm_free(l.commands);
    return rc < 0;
}

int main(int argc, char **argv) {
    if (argc == 2 && strcmp(argv[1], "serve") == 0 && fcntl(SOCKET, F_GETFD) >= 0) return serve();
    if (argc == 2 && strcmp(argv[1], "supervise") == 0 && fcntl(FD_CONFIG, F_GETFD) >= 0)
        _exit(supervise_main()); /* no exit handlers: it is not dumpable, and leak checkers need that */
    fprintf(stderr, "dormouse-sandbox is started by dormouse; it has no use by itself\n");
    return 64;
}
