/* transfer_net.c — one connection between two programs, with plain sockets and poll.  Nothing is encrypted and nobody is asked who
 * he is, so other machines are reached only on request.
 *
 * Every wait has a bound (timeout_ms without a byte) and ends within SLICE_MS after `stopped`. */
#include "agent/transfer.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#define SLICE_MS 200
#define ANSWER_BYTES_MAX 1024

/* ---- addresses ------------------------------------------------------------------------------------------ */

static int bad_addr(const char *text, dm_err *e)
{
    return dm_err_set(e, DM_EUSAGE, "transfer", "\"%.200s\" is no address; give HOST:PORT or unix:PATH", text);
}

int net_parse(net_addr *out, const char *text, dm_err *e)
{
    *out = (net_addr){ 0 };
    if (snprintf(out->text, sizeof out->text, "%s", text) >= (int)sizeof out->text) return bad_addr(text, e);
    if (dm_str_prefix(text, "unix:")) {
        if (!text[5]) return bad_addr(text, e);
        if (snprintf(out->path, sizeof out->path, "%s", text + 5) >= (int)sizeof out->path)
            return dm_err_set(e, DM_EUSAGE, "transfer", "the name of a socket has %zu bytes at most: %s", sizeof out->path - 1, text + 5);
        return 0;
    }
    const char *colon = strrchr(text, ':'), *host = text;
    char *end;
    if (!colon || !colon[1]) return bad_addr(text, e);
    size_t n = (size_t)(colon - text);
    if (n >= 2 && host[0] == '[' && host[n - 1] == ']') host++, n -= 2;
    else if (memchr(host, ':', n)) return bad_addr(text, e);
    long port = strtol(colon + 1, &end, 10);
    if (*end || port < 0 || port > 65535 || colon[1] == '-' || colon[1] == '+' || n >= sizeof out->host) return bad_addr(text, e);
    snprintf(out->port, sizeof out->port, "%ld", port);
    snprintf(out->host, sizeof out->host, "%.*s", (int)n, n ? host : "");
    if (!n) snprintf(out->host, sizeof out->host, "127.0.0.1");
    return 0;
}

static bool is_loopback(const struct sockaddr *sa)
{
    if (sa->sa_family == AF_INET) return (ntohl(((const struct sockaddr_in *)sa)->sin_addr.s_addr) >> 24) == 127;
    return sa->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)sa)->sin6_addr);
}

static int resolve(const net_addr *a, bool insecure, bool listen, struct addrinfo **out, dm_err *e)
{
    struct addrinfo hints = { .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV | (listen ? AI_PASSIVE : 0) };
    int rc = getaddrinfo(a->host, a->port, &hints, out);
    if (rc != 0) return dm_err_set(e, rc == EAI_MEMORY ? DM_ENOMEM : DM_ENOENT, "transfer", "%s: %s", a->host, gai_strerror(rc));
    for (struct addrinfo *i = *out; i; i = i->ai_next)
        if (!insecure && !is_loopback(i->ai_addr)) {
            freeaddrinfo(*out);
            *out = NULL;
            return dm_err_set(e, DM_EUSAGE, "transfer", "%s is not this machine, and a transfer is neither encrypted nor authenticated; use a tunnel, or --insecure-remote", a->host);
        }
    return 0;
}

static struct sockaddr_un unix_addr(const net_addr *a)
{
    struct sockaddr_un un = { .sun_family = AF_UNIX };
    memcpy(un.sun_path, a->path, sizeof un.sun_path < sizeof a->path ? sizeof un.sun_path : sizeof a->path);
    return un;
}

/* ---- waiting ------------------------------------------------------------------------------------------------ */

static int cancelled(dm_err *e) { return dm_err_set(e, DM_ECANCELED, "transfer", "interrupted"); }

/* revents, or an error. */
static int wait_for(int fd, short events, int timeout_ms, bool (*stopped)(void), dm_err *e)
{
    uint64_t until = dm_now_ns() + (uint64_t)timeout_ms * 1000000u;
    for (;;) {
        struct pollfd p = { .fd = fd, .events = events };
        if (stopped && stopped()) return cancelled(e);
        int n = poll(&p, 1, SLICE_MS);
        if (n > 0) return p.revents;
        if (n < 0 && errno != EINTR) return dm_err_sys(e, errno, "transfer", "waiting for the other side");
        if (dm_now_ns() >= until) return dm_err_set(e, DM_ETIMEDOUT, "transfer", "the other side did not move for %d seconds", timeout_ms / 1000);
    }
}

static int broken(dm_err *e, int err)
{
    if (err == 0 || err == EPIPE || err == ECONNRESET) return dm_err_set(e, DM_EPIPE, "transfer", "the connection broke");
    return dm_err_sys(e, err, "transfer", "the connection broke");
}

static int set_up(int fd)
{
    int flags = fcntl(fd, F_GETFL), one = 1;
    if (flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) != 0 || fcntl(fd, F_SETFD, FD_CLOEXEC) != 0) return errno;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one); /* refused by a unix socket: it needs none */
    return 0;
}

/* ---- connecting ------------------------------------------------------------------------------------------------ */

static int connect_one(net *n, int family, const struct sockaddr *sa, socklen_t len, const char *name, dm_err *e)
{
    int err = 0;
    socklen_t size = sizeof err;
    n->fd = socket(family, SOCK_STREAM, 0);
    if (n->fd < 0) return dm_err_sys(e, errno, "transfer", "%s", name);
    int rc = set_up(n->fd);
    if (rc == 0 && connect(n->fd, sa, len) != 0) rc = errno;
    if (rc == EINPROGRESS) {
        int got = wait_for(n->fd, POLLOUT, n->timeout_ms, n->stopped, e);
        if (got < 0) {
            net_close(n);
            return got;
        }
        rc = getsockopt(n->fd, SOL_SOCKET, SO_ERROR, &err, &size) == 0 ? err : errno;
    }
    if (rc) {
        net_close(n);
        return dm_err_sys(e, rc, "transfer", "%s: nobody takes the session there", name);
    }
    return 0;
}

int net_connect(net *n, const net_addr *a, bool insecure, dm_err *e)
{
    n->fd = -1;
    if (*a->path) {
        struct sockaddr_un un = unix_addr(a);
        return connect_one(n, AF_UNIX, (struct sockaddr *)&un, sizeof un, a->text, e);
    }
    struct addrinfo *list = NULL;
    int rc = resolve(a, insecure, false, &list, e);
    if (rc < 0) return rc;
    rc = DM_ENOENT;
    for (struct addrinfo *i = list; i && rc != 0 && rc != DM_ECANCELED; i = i->ai_next) rc = connect_one(n, i->ai_family, i->ai_addr, i->ai_addrlen, a->text, e);
    freeaddrinfo(list);
    return rc;
}

void net_close(net *n)
{
    if (n->fd >= 0) close(n->fd);
    n->fd = -1;
}

/* ---- listening ---------------------------------------------------------------------------------------------------- */

static int bind_unix(net *n, const net_addr *a)
{
    struct sockaddr_un un = unix_addr(a);
    struct stat st;
    mode_t old = umask(0077);
    int rc = bind(n->fd, (struct sockaddr *)&un, sizeof un) == 0 ? 0 : errno;
    if (rc == EADDRINUSE && lstat(a->path, &st) == 0 && S_ISSOCK(st.st_mode)) { /* left behind, unless somebody answers */
        int probe = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
        bool dead = probe >= 0 && connect(probe, (struct sockaddr *)&un, sizeof un) != 0 && errno == ECONNREFUSED;
        if (probe >= 0) close(probe);
        if (dead && unlink(a->path) == 0) rc = bind(n->fd, (struct sockaddr *)&un, sizeof un) == 0 ? 0 : errno;
    }
    umask(old);
    return rc;
}

static void name_of(const net *n, const net_addr *a, char name[320])
{
    struct sockaddr_storage ss;
    socklen_t len = sizeof ss;
    char host[INET6_ADDRSTRLEN + 1] = "", port[8] = "";
    snprintf(name, 320, "%s", a->text);
    if (*a->path || getsockname(n->fd, (struct sockaddr *)&ss, &len) != 0) return;
    if (getnameinfo((struct sockaddr *)&ss, len, host, sizeof host, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) return;
    snprintf(name, 320, strchr(host, ':') ? "[%s]:%s" : "%s:%s", host, port);
}

static int listen_on(net *n, const net_addr *a, const struct addrinfo *i, dm_err *e)
{
    int one = 1;
    n->fd = socket(i ? i->ai_family : AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (n->fd < 0) return dm_err_sys(e, errno, "transfer", "%s", a->text);
    int rc;
    if (i) {
        setsockopt(n->fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
        rc = bind(n->fd, i->ai_addr, i->ai_addrlen) == 0 ? 0 : errno;
    } else {
        rc = bind_unix(n, a);
    }
    if (rc == 0 && listen(n->fd, 1) != 0) rc = errno;
    if (rc == 0) return 0;
    net_close(n);
    return dm_err_sys(e, rc, "transfer", "cannot listen on %s", a->text);
}

int net_listen(net *n, const net_addr *a, bool insecure, char name[320], dm_err *e)
{
    struct addrinfo *list = NULL;
    n->fd = -1;
    int rc = *a->path ? 0 : resolve(a, insecure, true, &list, e);
    if (rc < 0) return rc;
    rc = listen_on(n, a, list, e);
    if (list) freeaddrinfo(list);
    if (rc == 0) name_of(n, a, name);
    return rc;
}

int net_accept(const net *listener, int wait_ms, net *out, dm_err *e)
{
    *out = *listener;
    out->fd = -1;
    for (;;) {
        int rc = wait_for(listener->fd, POLLIN, wait_ms, listener->stopped, e);
        if (rc < 0) return rc;
        int fd = accept(listener->fd, NULL, NULL);
        if (fd >= 0) {
            out->fd = fd;
            rc = set_up(fd);
            return rc ? dm_err_sys(e, rc, "transfer", "a connection") : 0;
        }
        if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) return dm_err_sys(e, errno, "transfer", "a connection");
    }
}

void net_done_writing(const net *n) { shutdown(n->fd, SHUT_WR); }

void net_unlisten(net *n, const net_addr *a)
{
    if (n->fd >= 0 && *a->path) unlink(a->path);
    net_close(n);
}

/* ---- bytes ------------------------------------------------------------------------------------------------------------ */

int net_write(const net *n, const void *p, size_t len, dm_err *e)
{
    const uint8_t *at = p;
    while (len) {
        int got = wait_for(n->fd, POLLOUT | POLLIN, n->timeout_ms, n->stopped, e);
        if (got < 0) return got;
        if (got & POLLIN) return dm_err_set(e, DM_ESTATE, "transfer", "the other side answered before the end");
        ssize_t k = send(n->fd, at, len, MSG_NOSIGNAL);
        if (k < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (k < 0) return broken(e, errno);
        at += k;
        len -= (size_t)k;
    }
    return 0;
}

int net_read(const net *n, void *p, size_t len, dm_err *e)
{
    uint8_t *at = p;
    while (len) {
        int got = wait_for(n->fd, POLLIN, n->timeout_ms, n->stopped, e);
        if (got < 0) return got;
        ssize_t k = recv(n->fd, at, len, 0);
        if (k < 0 && (errno == EAGAIN || errno == EINTR)) continue;
        if (k <= 0) return broken(e, k == 0 ? 0 : errno);
        at += k;
        len -= (size_t)k;
    }
    return 0;
}

/* ---- the answer ---------------------------------------------------------------------------------------------------------- */

void net_working(const net *n)
{
    if (send(n->fd, ".", 1, MSG_NOSIGNAL) < 0) return; /* whether the sender still waits changes nothing */
}

/* What the sender wrote meanwhile is read away: closing with bytes unread would take the answer back. */
static void drain(const net *n)
{
    char away[4096];
    uint64_t until = dm_now_ns() + (uint64_t)n->timeout_ms * 1000000u;
    shutdown(n->fd, SHUT_WR);
    while (dm_now_ns() < until && wait_for(n->fd, POLLIN, n->timeout_ms, n->stopped, NULL) > 0) {
        ssize_t k = recv(n->fd, away, sizeof away, 0);
        if (k == 0 || (k < 0 && errno != EAGAIN && errno != EINTR)) break;
    }
}

int net_answer(const net *n, int rc, const dm_err *why)
{
    char line[ANSWER_BYTES_MAX];
    int len = rc < 0 ? snprintf(line, sizeof line, "%d %s\n", rc, why && why->text[0] ? why->text : dm_err_text(rc)) : snprintf(line, sizeof line, "+\n");
    for (int at = 0; at < len;) {
        if (wait_for(n->fd, POLLOUT, n->timeout_ms, NULL, NULL) < 0) return DM_EPIPE;
        ssize_t k = send(n->fd, line + at, (size_t)(len - at), MSG_NOSIGNAL);
        if (k < 0 && errno != EAGAIN && errno != EINTR) return DM_EPIPE;
        if (k > 0) at += (int)k;
    }
    drain(n);
    return 0;
}

int net_answered(const net *n, bool *lost, dm_err *e)
{
    char line[ANSWER_BYTES_MAX], c = '.', *end;
    size_t len = 0;
    *lost = true;
    while (c == '.') {
        int rc = net_read(n, &c, 1, e);
        if (rc < 0) return rc;
    }
    while (c != '\n' && len < sizeof line - 1) {
        line[len++] = c;
        int rc = net_read(n, &c, 1, e);
        if (rc < 0) return rc;
    }
    line[len] = 0;
    if (strcmp(line, "+") == 0) {
        *lost = false;
        return 0;
    }
    long code = line[0] == '-' ? strtol(line, &end, 10) : 0;
    if (code >= 0 || code < -100000 || *end != ' ' || !dm_utf8_valid(line, len))
        return dm_err_set(e, DM_EFORMAT, "transfer", "what answers there is no dormouse");
    *lost = false;
    for (char *p = end; *p; p++)
        if ((unsigned char)*p < 32 || *p == 127) *p = ' '; /* it is shown on terminals */
    return dm_err_set(e, (int)code, "transfer", "the receiver refused: %s", end + 1);
}
