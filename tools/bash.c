/* bash: one command through the sandbox.
 *
 *   bash_start -> spawn -> output read by uv_poll -> end of both pipes and the exit, in any order -> run_finish
 *
 * Output goes through a shaper of fixed size, so gigabytes cost no memory.  When it becomes longer than a result may be and
 * the registry has a spill directory, all of it is also written there, block by block on the pool; meanwhile the pipes are
 * not read, which holds the command back instead of growing a queue.  More than output_bytes_max stops the command.
 *
 * Several registries share one sandbox, and an exit belongs to whoever started the command: the hub, kept in the sandbox's
 * slot, watches its descriptor for all of them. */
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "tools/tools_int.h"

enum { READ_BYTES = 64 << 10, SUFFIX_ROOM = 512, PIDS_MAX = 512 };
static const int64_t memory_bytes_max = (int64_t)4 << 30;

typedef struct bash_run bash_run;

typedef struct hub {
    dm_sandbox *sandbox;
    uv_poll_t *poll;  /* owned until closed */
    dm_tools *users[64];
    int user_count;
    bash_run *runs;
    bool inside; /* its callback is at work and frees it at the end */
} hub;

struct bash_run {
    dm_tool_run *r;
    hub *hub;
    bash_run *next;
    dm_sandbox_proc proc;
    uv_poll_t *polls[2]; /* stdout, stderr; NULL: not open any more */
    shaper shaper;
    dm_buf kept;      /* output from the start until it has to be spilled, then the block on its way */
    int spill_fd;
    bool spill_busy;  /* a block is being written */
    bool spill_lost;  /* writing failed: the result stands without it */
    uv_work_t spill;
    dm_sandbox_exit exit;
    bool exited, lost; /* lost: with the launcher */
    bool too_much, no_memory, stopping;
};

static void progress(bash_run *b);

/* ---- the hub ------------------------------------------------------------------------------------------------------------------ */

static void handle_closed(uv_handle_t *h) { dm_free(h); }

static bash_run *run_of(hub *h, int id) {
    for (bash_run *b = h->runs; b; b = b->next)
        if (b->proc.id == id) return b;
    return NULL;
}

/* A receiver may destroy its registry, and the last registry takes the sandbox from us. */
static bool hub_gone(const hub *h) { return h->user_count == 0; }

/* The launcher is gone and all its commands with it. */
static void hub_lost(hub *h) {
    uv_poll_stop(h->poll);
    for (bash_run *b = h->runs; b; b = b->next) b->exited = b->lost = true;
    for (bool found = true; found && !hub_gone(h);) { /* progress takes runs off the list, so start anew each time */
        found = false;
        for (bash_run *b = h->runs; b && !found; b = b->next)
            if (!b->polls[0] && !b->polls[1] && !b->spill_busy) found = true, progress(b);
    }
}

/* false: nothing more to take. */
static bool hub_take(hub *h) {
    dm_sandbox_exit x;
    const int rc = dm_sandbox_next(h->sandbox, &x, NULL);
    if (rc < 0) hub_lost(h);
    bash_run *b = rc > 0 ? run_of(h, x.id) : NULL;
    if (b) {
        b->exit = x;
        b->exited = true;
        progress(b);
    }
    return rc > 0;
}

static void hub_cb(uv_poll_t *poll, int status, int events) {
    hub *h = poll->data;
    (void)status, (void)events;
    h->inside = true;
    while (!hub_gone(h) && hub_take(h)) continue;
    h->inside = false;
    if (hub_gone(h)) dm_free(h);
}

static hub *hub_new(dm_sandbox *s, uv_loop_t *loop) {
    hub *h = dm_calloc(1, sizeof *h);
    if (!h) return NULL;
    h->poll = dm_calloc(1, sizeof *h->poll);
    if (!h->poll || uv_poll_init(loop, h->poll, dm_sandbox_fd(s)) != 0) {
        dm_free(h->poll);
        dm_free(h);
        return NULL;
    }
    h->sandbox = s;
    h->poll->data = h;
    return h;
}

static hub *hub_join(dm_tools *t) {
    void **slot = dm_sandbox_slot(t->o.sandbox);
    hub *h = *slot;
    if (!h) h = *slot = hub_new(t->o.sandbox, t->o.loop);
    if (!h) return NULL;
    for (int i = 0; i < h->user_count; i++)
        if (h->users[i] == t) return h;
    if (h->user_count == (int)DM_COUNT(h->users)) return NULL;
    h->users[h->user_count++] = t;
    return h;
}

void bash_forget(dm_tools *t) {
    void **slot = t->o.sandbox ? dm_sandbox_slot(t->o.sandbox) : NULL;
    hub *h = slot ? *slot : NULL;
    for (int i = 0; h && i < h->user_count; i++)
        if (h->users[i] == t) h->users[i--] = h->users[--h->user_count];
    if (!h || h->user_count > 0) return;
    *slot = NULL;
    uv_close((uv_handle_t *)h->poll, handle_closed);
    if (!h->inside) dm_free(h);
}

/* The loop stays alive for the sandbox only while something runs in it. */
static void hub_add(hub *h, bash_run *b) {
    b->hub = h;
    b->next = h->runs;
    h->runs = b;
    uv_poll_start(h->poll, UV_READABLE, hub_cb);
}

static void hub_remove(bash_run *b) {
    bash_run **at = &b->hub->runs;
    while (*at && *at != b) at = &(*at)->next;
    if (*at) *at = b->next;
    if (!b->hub->runs) uv_poll_stop(b->hub->poll);
}

/* ---- output -------------------------------------------------------------------------------------------------------------------- */

static void poll_close(bash_run *b, int i) {
    uv_poll_t *p = b->polls[i];
    if (!p) return;
    int fd = -1;
    uv_fileno((uv_handle_t *)p, &fd);
    uv_close((uv_handle_t *)p, handle_closed);
    if (fd >= 0) close(fd); /* after uv_close, which has taken it off the loop */
    b->polls[i] = NULL;
}

static void output_cb(uv_poll_t *poll, int status, int events);

static void polls_pause(bash_run *b, bool pause) {
    for (int i = 0; i < 2; i++) {
        if (!b->polls[i]) continue;
        if (pause) uv_poll_stop(b->polls[i]);
        else uv_poll_start(b->polls[i], UV_READABLE | UV_DISCONNECT, output_cb);
    }
}

static void spill_open(bash_run *b) {
    char path[PATH_MAX];
    uint64_t id[2];
    dm_random(id, sizeof id);
    snprintf(path, sizeof path, "%s/output-%016llx%016llx.txt", b->r->tools->spill_dir, (unsigned long long)id[0], (unsigned long long)id[1]);
    b->spill_fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600);
    b->r->spill_path = b->spill_fd >= 0 ? dm_strdup(path) : NULL;
    b->spill_lost = !b->r->spill_path;
}

static void spill_work(uv_work_t *w) {
    bash_run *b = w->data;
    for (size_t at = 0; at < b->kept.n && !b->spill_lost;) {
        ssize_t n = write(b->spill_fd, b->kept.p + at, b->kept.n - at);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) b->spill_lost = true;
        else at += (size_t)n;
    }
}

static void spill_done(uv_work_t *w, int status) {
    bash_run *b = w->data;
    if (status != 0) b->spill_lost = true;
    b->spill_busy = false;
    dm_buf_clear(&b->kept);
    polls_pause(b, false);
    progress(b);
}

/* Hands the kept bytes to the pool once they are worth it. */
static void spill_step(bash_run *b, bool last) {
    const size_t worth = last ? 1 : 4 * READ_BYTES;
    if (b->spill_fd < 0 && !b->spill_lost && b->shaper.fed > b->r->tools->o.result_bytes_max) {
        if (b->r->tools->spill_dir) spill_open(b);
        else b->spill_lost = true;
    }
    if (b->spill_lost) dm_buf_free(&b->kept);
    if (b->spill_fd < 0 || b->spill_lost || b->spill_busy || b->kept.n < worth) return;
    b->spill.data = b;
    if (uv_queue_work(b->r->tools->o.loop, &b->spill, spill_work, spill_done) != 0) {
        b->spill_lost = true;
        return;
    }
    b->spill_busy = true;
    polls_pause(b, true);
}

static void output_take(bash_run *b, const char *p, size_t n) {
    const size_t max = b->r->tools->o.output_bytes_max;
    if (b->too_much || b->no_memory) return;
    if (n > max - b->shaper.fed) {
        n = max - b->shaper.fed;
        b->too_much = true;
        (void)dm_sandbox_kill(b->hub->sandbox, b->proc.id);
    }
    if (shaper_feed(&b->shaper, p, n) < 0) {
        b->no_memory = true;
        (void)dm_sandbox_kill(b->hub->sandbox, b->proc.id);
        return;
    }
    if (!b->spill_lost && dm_buf_append(&b->kept, p, n) < 0) b->spill_lost = true;
    spill_step(b, false);
}

static void output_cb(uv_poll_t *poll, int status, int events) {
    bash_run *b = poll->data;
    const int i = b->polls[1] == poll;
    static _Thread_local char block[READ_BYTES];
    int fd = -1;
    (void)status, (void)events;
    uv_fileno((uv_handle_t *)poll, &fd);
    ssize_t n = read(fd, block, sizeof block);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (n > 0) {
        output_take(b, block, (size_t)n);
        return;
    }
    poll_close(b, i);
    progress(b);
}

/* ---- the result ------------------------------------------------------------------------------------------------------------------ */

DM_PRINTF(2, 3)
static void line(dm_buf *t, const char *fmt, ...) {
    va_list ap;
    va_start(ap, fmt);
    if (t->n == 0 || dm_buf_byte(t, '\n') == 0) (void)dm_buf_vprintf(t, fmt, ap);
    va_end(ap);
}

/* How it ended, if not with 0: each fact on a line of its own behind the output. */
static void ending(bash_run *b) {
    dm_tool_run *r = b->r;
    const dm_sandbox_exit *x = &b->exit;
    char size[32];
    r->is_error = b->no_memory || b->lost || b->too_much || x->setup_failed || x->memory || x->pids || x->timed_out || r->timed_out || r->cancelled;
    if (b->no_memory) return;
    if (b->lost) line(&r->text, "error: the sandbox's launcher is gone; the command was ended with it");
    else if (x->setup_failed) line(&r->text, "error: the command could not be started: %s", x->text);
    else if (b->too_much) line(&r->text, "[the command was stopped: more than %s of output]", dm_bytes_text(size, sizeof size, r->tools->o.output_bytes_max));
    else if (x->memory) line(&r->text, "[the command was stopped: memory limit of %s]", dm_bytes_text(size, sizeof size, (uint64_t)x->memory_bytes_peak));
    else if (x->pids) line(&r->text, "[the command was stopped: too many processes]");
    else if (r->cancelled) line(&r->text, "[cancelled: the command was stopped]");
    else if (x->timed_out || r->timed_out) line(&r->text, "[timed out: the command was stopped after %lld s]", (long long)(x->wall_ms + 500) / 1000);
    else if (x->signal) line(&r->text, "[ended by signal %d]%s%s", x->signal, x->text[0] ? " " : "", x->text);
    else if (x->exit_code != 0) line(&r->text, "exit code %d", x->exit_code);
    if (x->background > 0) line(&r->text, "[%d background process%s ended with the command]", x->background, x->background == 1 ? " was" : "es were");
}

static void bash_end(bash_run *b) {
    dm_tool_run *r = b->r;
    const bool spilled = b->spill_fd >= 0 && !b->spill_lost;
    if (b->spill_fd >= 0) close(b->spill_fd);
    r->output_bytes = (int64_t)b->shaper.fed;
    dm_buf_clear(&r->text);
    int rc = shaper_end(&b->shaper, &r->text, &r->cut, spilled ? r->spill_path : NULL);
    if (r->text.n > 0 && r->text.p[r->text.n - 1] == '\n') r->text.p[--r->text.n] = 0;
    if (rc < 0 || b->no_memory) run_error(r, "out of memory");
    r->timed_out |= b->exit.timed_out;
    r->exit_code = b->exit.setup_failed || b->lost ? -1 : b->exit.exit_code;
    ending(b);
    if (r->spill_path && (!spilled || !r->cut)) { /* nothing was left out after all, or it is not whole */
        (void)unlink(r->spill_path);
        dm_free(r->spill_path);
        r->spill_path = NULL;
    }
    hub_remove(b);
    shaper_free(&b->shaper);
    dm_buf_free(&b->kept);
    dm_free(b);
    run_finish(r);
}

/* After every event: is all in? */
static void progress(bash_run *b) {
    if (b->spill_busy || b->polls[0] || b->polls[1]) return;
    if (!b->exited) return;
    spill_step(b, true);
    if (!b->spill_busy) bash_end(b);
}

/* ---- start and stop ---------------------------------------------------------------------------------------------------------------- */

static int poll_open(bash_run *b, int i, int fd) {
    uv_poll_t *p = dm_calloc(1, sizeof *p);
    int rc = p ? uv_poll_init(b->r->tools->o.loop, p, fd) : UV_ENOMEM;
    if (rc != 0) {
        dm_free(p);
        close(fd);
        return DM_ENOMEM;
    }
    p->data = b;
    b->polls[i] = p;
    return uv_poll_start(p, UV_READABLE | UV_DISCONNECT, output_cb) == 0 ? 0 : DM_EIO;
}

/* One directory for all commands of the registry, shown to them as /tmp: what one writes there the next one finds. */
static const char *tmp_of(dm_tools *t) {
    if (!t->tmp[0]) {
        memcpy(t->tmp, "/tmp/dormouse-tmp-XXXXXX", sizeof "/tmp/dormouse-tmp-XXXXXX");
        if (!mkdtemp(t->tmp)) t->tmp[0] = 0;
    }
    return t->tmp[0] ? t->tmp : NULL;
}

static int spawn(bash_run *b, const char *command, dm_err *e) {
    dm_tools *t = b->r->tools;
    dm_buf script = {0};
    /* One stream in the order of writing; on the command's own first line, so that line numbers in messages stay right. */
    int rc = dm_buf_printf(&script, "exec 2>&1; %s", command);
    const char *const argv[] = {"bash", "-c", dm_buf_cstr(&script), NULL};
    const int64_t timeout_s = run_int(b->r, "timeout", 0);
    const int timeout_ms = timeout_s > 0 ? (int)(timeout_s < 3600 ? timeout_s : 3600) * 1000 : b->r->tool->kind->timeout_ms;
    const dm_sandbox_cmd c = {.argv = argv, .workspace = t->ws.canonical, .timeout_ms = timeout_ms, .tmp = tmp_of(t),
                              .memory_bytes_max = memory_bytes_max, .pids_max = PIDS_MAX};
    if (rc < 0) rc = dm_err_set(e, rc, "tools", "out of memory");
    else rc = dm_sandbox_spawn(t->o.sandbox, &c, &b->proc, e);
    dm_buf_free(&script);
    /* The sandbox keeps the time; the registry's timer is for a launcher that does not answer. */
    if (rc == 0) run_deadline(b->r, (uint64_t)timeout_ms + RUN_MARGIN_MS);
    return rc;
}

void bash_start(dm_tool_run *r) {
    dm_err e = {0};
    const char *command = run_text(r, "command");
    hub *h = r->tools->o.sandbox ? hub_join(r->tools) : NULL;
    bash_run *b = h ? dm_calloc(1, sizeof *b) : NULL;
    if (!r->tools->o.sandbox) run_error(r, "commands cannot be run here: there is no sandbox");
    else if (!command) run_error(r, "bash needs a command");
    else if (!b) run_error(r, "out of memory");
    if (r->is_error) goto fail;
    b->r = r;
    b->spill_fd = -1;
    shaper_init(&b->shaper, r->tools->o.result_bytes_max - SUFFIX_ROOM, true);
    int rc = spawn(b, command, &e);
    if (rc < 0) {
        run_error(r, "the command could not be started: %s", e.text);
        goto fail;
    }
    hub_add(h, b);
    r->own = b;
    rc = poll_open(b, 0, b->proc.out_fd);
    if (rc == 0) rc = poll_open(b, 1, b->proc.err_fd);
    else close(b->proc.err_fd);
    if (rc < 0) (void)dm_sandbox_kill(r->tools->o.sandbox, b->proc.id); /* its exit ends the call */
    return;
fail:
    dm_free(b);
    run_finish_later(r);
}

/* The first time the launcher is asked; a second time means that it did not answer, and it is not waited for any more. */
void bash_stop(dm_tool_run *r) {
    bash_run *b = r->own;
    if (!b) return;
    if (!b->stopping) {
        b->stopping = true;
        (void)dm_sandbox_kill(b->hub->sandbox, b->proc.id);
        return;
    }
    b->exited = b->lost = true;
    poll_close(b, 0);
    poll_close(b, 1);
    progress(b);
}
