/* Framing between host and launcher: see wire_int.h for the format. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sandbox/wire_int.h"

/* ---- payload out ------------------------------------------------------------------------------------------ */

static int put(dm_buf *b, uint32_t tag, const void *p, size_t n) {
    static const char pad[4];
    if (n > SB_PAYLOAD_MAX) return DM_ELIMIT;
    const uint32_t head[2] = {tag, (uint32_t)n};
    int rc = dm_buf_append(b, head, sizeof head);
    if (rc == 0) rc = dm_buf_append(b, p, n);
    if (rc == 0 && n % 4) rc = dm_buf_append(b, pad, 4 - n % 4);
    if (rc == 0 && b->n > SB_PAYLOAD_MAX) rc = DM_ELIMIT;
    return rc;
}

int sb_put_text(dm_buf *b, enum sb_tag tag, const char *text) { return text ? put(b, tag, text, strlen(text) + 1) : 0; }

int sb_put_list(dm_buf *b, enum sb_tag tag, const char *const *list) {
    int rc = 0;
    for (size_t i = 0; rc == 0 && list && list[i]; i++) rc = i < SB_LIST_MAX ? sb_put_text(b, tag, list[i]) : DM_ELIMIT;
    return rc;
}

int sb_put_int(dm_buf *b, enum sb_tag tag, int64_t value) { return put(b, tag, &value, sizeof value); }

int sb_seal(const void *p, size_t n) {
    int fd = memfd_create("dormouse", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return -errno;
    const char *at = p;
    for (size_t done = 0; done < n;) {
        ssize_t w = pwrite(fd, at + done, n - done, (off_t)done);
        if (w < 0 && errno == EINTR) continue;
        if (w <= 0) {
            int err = w < 0 ? -errno : DM_EIO;
            close(fd);
            return err;
        }
        done += (size_t)w;
    }
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE) != 0) {
        int err = -errno;
        close(fd);
        return err;
    }
    return fd;
}

/* ---- payload in ------------------------------------------------------------------------------------------- */

static int list_add(sb_list *l, const char *s) {
    if (l->n >= SB_LIST_MAX) return DM_ELIMIT;
    if (l->n + 2 > l->cap) {
        size_t cap = l->cap ? 2 * l->cap : 16;
        const char **p = dm_realloc(l->p, cap * sizeof *p);
        if (!p) return DM_ENOMEM;
        l->p = p;
        l->cap = cap;
    }
    l->p[l->n++] = s;
    l->p[l->n] = NULL;
    return 0;
}

static sb_list *list_of(sb_request *r, uint32_t tag) {
    switch (tag) {
    case SB_T_ARGV: return &r->argv;
    case SB_T_ENV: return &r->env;
    case SB_T_WRITE: return &r->write;
    case SB_T_READ: return &r->read;
    case SB_T_HIDE: return &r->hide;
    case SB_T_VERIFY: return &r->verify;
    default: return NULL;
    }
}

static const char **text_of(sb_request *r, uint32_t tag) {
    switch (tag) {
    case SB_T_WORKSPACE: return &r->workspace;
    case SB_T_CWD: return &r->cwd;
    case SB_T_TMP: return &r->tmp;
    case SB_T_HOME: return &r->home;
    case SB_T_BWRAP: return &r->bwrap;
    case SB_T_SELF: return &r->self;
    default: return NULL;
    }
}

static int64_t *number_of(sb_request *r, uint32_t tag) {
    switch (tag) {
    case SB_T_READONLY: return &r->readonly;
    case SB_T_NETWORK: return &r->network;
    case SB_T_TIMEOUT_MS: return &r->timeout_ms;
    case SB_T_MEMORY: return &r->memory;
    case SB_T_FSIZE: return &r->fsize;
    case SB_T_PIDS: return &r->pids;
    case SB_T_CPU_S: return &r->cpu_s;
    case SB_T_LEVEL: return &r->level;
    case SB_T_INSIDE: return &r->inside;
    default: return NULL;
    }
}

static int take(sb_request *r, uint32_t tag, const uint8_t *p, uint32_t n) {
    int64_t *number = number_of(r, tag);
    if (number) {
        if (n != sizeof *number) return DM_EFORMAT;
        memcpy(number, p, sizeof *number);
        return *number < 0 ? DM_EFORMAT : 0;
    }
    if (n == 0 || p[n - 1] != 0 || strlen((const char *)p) != n - 1) return DM_EFORMAT;
    sb_list *list = list_of(r, tag);
    if (list) return list_add(list, (const char *)p);
    const char **text = text_of(r, tag);
    if (!text || *text) return DM_EFORMAT;
    *text = (const char *)p;
    return 0;
}

int sb_request_parse(sb_request *r, dm_err *e) {
    const uint8_t *p = r->bytes.p;
    size_t left = r->bytes.n;
    while (left > 0) {
        uint32_t head[2];
        if (left < sizeof head) return dm_err_set(e, DM_EFORMAT, "sandbox", "a payload ends inside a record");
        memcpy(head, p, sizeof head);
        p += sizeof head, left -= sizeof head;
        size_t padded = ((size_t)head[1] + 3) & ~(size_t)3;
        if (padded > left) return dm_err_set(e, DM_EFORMAT, "sandbox", "a payload record is longer than the payload");
        int rc = take(r, head[0], p, head[1]);
        if (rc < 0) return dm_err_set(e, rc, "sandbox", "payload record %u is malformed", head[0]);
        p += padded, left -= padded;
    }
    return 0;
}

int sb_request_read(sb_request *r, int fd, dm_err *e) {
    const int want = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS);
    if (seals < 0 || (seals & want) != want || fstat(fd, &st) != 0)
        return dm_err_set(e, DM_EFORMAT, "sandbox", "a payload is not a sealed memory file");
    if (st.st_size > SB_PAYLOAD_MAX) return dm_err_set(e, DM_ELIMIT, "sandbox", "a payload is larger than 4 MiB");
    const size_t n = (size_t)st.st_size;
    if (dm_buf_reserve(&r->bytes, n + 1) < 0) return dm_err_set(e, DM_ENOMEM, "sandbox", "out of memory");
    for (size_t done = 0; done < n;) {
        ssize_t got = pread(fd, r->bytes.p + done, n - done, (off_t)done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return dm_err_set(e, DM_EIO, "sandbox", "a payload cannot be read");
        done += (size_t)got;
    }
    r->bytes.n = n;
    r->bytes.p[n] = 0;
    return sb_request_parse(r, e);
}

void sb_request_free(sb_request *r) {
    sb_list *lists[] = {&r->argv, &r->env, &r->write, &r->read, &r->hide, &r->verify};
    for (size_t i = 0; i < DM_COUNT(lists); i++) dm_free(lists[i]->p);
    dm_buf_free(&r->bytes);
    *r = (sb_request){0};
}

/* ---- packets ---------------------------------------------------------------------------------------------- */

int sb_send(int sock, const void *msg, size_t n, const int *fds, int fd_count, int wait_ms) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(SB_FDS_MAX * sizeof(int))];
    } control = {0};
    struct iovec iov = {(void *)(uintptr_t)msg, n};
    struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1};
    if (fd_count > SB_FDS_MAX) return DM_EINVAL;
    if (fd_count > 0) {
        mh.msg_control = control.bytes;
        mh.msg_controllen = CMSG_SPACE((size_t)fd_count * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&mh);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN((size_t)fd_count * sizeof(int));
        memcpy(CMSG_DATA(c), fds, (size_t)fd_count * sizeof(int));
    }
    const uint64_t end = dm_now_ns() + (uint64_t)wait_ms * 1000000u;
    for (;;) {
        ssize_t sent = sendmsg(sock, &mh, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent == (ssize_t)n) return 0;
        if (sent >= 0) return DM_EIO; /* a packet is sent whole or not at all */
        if (errno == EINTR) continue;
        if (errno == ECONNRESET) return DM_EPIPE;
        if (errno != EAGAIN) return -errno;
        const uint64_t now = dm_now_ns();
        if (now >= end) return DM_EAGAIN;
        struct pollfd pf = {sock, POLLOUT, 0};
        if (poll(&pf, 1, (int)((end - now) / 1000000u) + 1) < 0 && errno != EINTR) return -errno;
    }
}

static int take_fds(struct msghdr *mh, int *fds, int *fd_count) {
    int rc = 0, count = 0;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(mh); c; c = CMSG_NXTHDR(mh, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
        const int n = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (int i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + (size_t)i * sizeof fd, sizeof fd);
            if (count < *fd_count) fds[count++] = fd;
            else close(fd), rc = DM_EFORMAT;
        }
    }
    if (mh->msg_flags & (MSG_TRUNC | MSG_CTRUNC)) rc = DM_EFORMAT;
    while (rc < 0 && count > 0) close(fds[--count]);
    *fd_count = count;
    return rc;
}

int sb_recv(int sock, void *msg, size_t cap, int *fds, int *fd_count) {
    union {
        struct cmsghdr align;
        char bytes[CMSG_SPACE(2 * SB_FDS_MAX * sizeof(int))];
    } control;
    struct iovec iov = {msg, cap};
    struct msghdr mh = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.bytes, .msg_controllen = sizeof control};
    ssize_t got;
    do got = recvmsg(sock, &mh, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    while (got < 0 && errno == EINTR);
    if (got < 0) {
        *fd_count = 0;
        if (errno == EAGAIN) return 0;
        return errno == ECONNRESET ? DM_EPIPE : -errno;
    }
    int rc = take_fds(&mh, fds, fd_count);
    if (rc < 0) return rc;
    return got == 0 ? DM_EPIPE : (int)got;
}
