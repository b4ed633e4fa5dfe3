/* wire_int.h — what host and launcher say to each other.
 *
 * One SOCK_SEQPACKET pair.  Every message is one packet of a fixed size; whatever has no fixed size (a command, the
 * options) travels beside it as a sealed memfd, which the receiver checks (seals, size) and copies before it looks at
 * a byte.  So no length in a packet is ever trusted and neither side can change a payload under the other.
 *
 *   host -> launcher   HELLO  + payload                    once, first
 *                      SPAWN  + payload, out, err [, in]   id chosen by the host
 *                      KILL
 *   launcher -> host   READY                               answer to HELLO
 *                      EXIT                                one for each SPAWN, always
 *
 * Payload: records of u32 tag, u32 length, bytes, padded to 4.  Text includes its NUL and holds no other one;
 * numbers are 8 bytes.  An unknown tag is an error: both ends are of one build. */
#ifndef DM_SANDBOX_WIRE_INT_H
#define DM_SANDBOX_WIRE_INT_H

#include "sandbox/sandbox.h"

enum {
    SB_PAYLOAD_MAX = 4 << 20,
    SB_INPUT_MAX = 1 << 20,
    SB_LIST_MAX = 16384, /* strings in one list */
    SB_FDS_MAX = 4,
};

enum sb_type { SB_HELLO = 1, SB_SPAWN, SB_KILL, SB_READY = 16, SB_EXIT };

typedef struct sb_head {
    uint32_t magic, type;
    int32_t id;
    uint32_t zero;
} sb_head;

typedef struct sb_ready {
    sb_head head;
    int32_t code, level;
    char report[512]; /* level and what is missing */
    char text[512];   /* code < 0: the sentence for the user */
} sb_ready;

enum { SB_X_TIMED_OUT = 1, SB_X_MEMORY = 2, SB_X_KILLED = 4, SB_X_SETUP = 8, SB_X_PIDS = 16 };
typedef struct sb_exit {
    sb_head head;
    int32_t exit_code, signal;
    uint32_t flags;
    int32_t background;
    int64_t wall_ms, cpu_ms, memory_bytes_peak;
    char text[256];
} sb_exit;

/* Everything that a payload may say; the same record goes on to the supervisor inside the sandbox. */
enum sb_tag {
    SB_T_ARGV = 1, SB_T_ENV, SB_T_WRITE, SB_T_READ, SB_T_HIDE, SB_T_VERIFY, /* lists: one record for each string */
    SB_T_WORKSPACE, SB_T_CWD, SB_T_TMP, SB_T_HOME, SB_T_BWRAP, SB_T_SELF, /* strings */
    SB_T_READONLY, SB_T_NETWORK, SB_T_TIMEOUT_MS, SB_T_MEMORY, SB_T_FSIZE, SB_T_PIDS, SB_T_CPU_S, /* numbers */
    SB_T_LEVEL, SB_T_INSIDE, SB_T_LAST = SB_T_INSIDE,
};

/* "DMB1", moved by what may differ between two builds: a launcher of another build is refused at the first packet
 * instead of being half understood. */
#define SB_MAGIC (0x31424d44u + SB_T_LAST * 0x1000000u + (uint32_t)sizeof(sb_ready) * 0x1000u + (uint32_t)sizeof(sb_exit))

typedef struct sb_list {
    const char **p; /* NULL-terminated; strings borrowed from the request's bytes */
    size_t n, cap;
} sb_list;

typedef struct sb_request {
    dm_buf bytes;
    sb_list argv, env, write, read, hide, verify;
    const char *workspace, *cwd, *tmp, *home, *bwrap, *self; /* NULL when not said */
    int64_t readonly, network, timeout_ms, memory, fsize, pids, cpu_s, level, inside;
} sb_request;

int sb_put_text(dm_buf *b, enum sb_tag tag, const char *text); /* NULL: nothing is put */
int sb_put_list(dm_buf *b, enum sb_tag tag, const char *const *list);
int sb_put_int(dm_buf *b, enum sb_tag tag, int64_t value);

/* A sealed, close-on-exec memfd with these bytes, or -errno. */
int sb_seal(const void *p, size_t n);
/* Checks and copies a payload descriptor into *r and parses it.  The descriptor stays the caller's. */
int sb_request_read(sb_request *r, int fd, dm_err *e);
int sb_request_parse(sb_request *r, dm_err *e); /* r->bytes is filled already */
void sb_request_free(sb_request *r);

/* One packet with up to SB_FDS_MAX descriptors.  Waits at most wait_ms for room.  0, DM_EAGAIN, DM_EPIPE … */
int sb_send(int sock, const void *msg, size_t n, const int *fds, int fd_count, int wait_ms);
/* Bytes received, 0 when nothing is there now, DM_EPIPE at the end.  Descriptors are close-on-exec; those that do
 * not fit are closed by the kernel or here, and the packet is refused with DM_EFORMAT. */
int sb_recv(int sock, void *msg, size_t cap, int *fds, int *fd_count);

/* The environment that a command may see, out of `from` (NULL-terminated): allowlist plus fixed settings. */
int sb_environ(dm_buf *out, const char *const *from);

#endif
