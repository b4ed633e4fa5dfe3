/* replay.c — a trace of turns through a real store: what is found again of what was once there.
 *
 * Every turn does what a session does: it looks its prompt up, holds the hit while it would decode, puts the blocks behind it and a
 * state at the end.  Tokens are counted, not seconds; the order of the turns stands for the time.  Reading is left out, since the
 * policy does not see it. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kvstore/kv_int.h"

#define RAM_BYTES ((int64_t)4 << 20)
#define FLUSH_EVERY 8 /* turns; what waits in the queue can be found, and would be cache beyond the quota */

typedef struct replay {
    dm_kv *kv;
    uint8_t *bytes; /* owned; what every entry holds */
    const dm_kv_replay_opts *o;
    dm_kv_replay *out;
} replay;

static dm_hash replay_root(void)
{
    dm_hash h;
    memset(&h, 0xeb, sizeof h);
    return h;
}

static int put_turn(replay *r, const dm_kv_turn *t, int64_t from, dm_err *e)
{
    dm_hash h = replay_root(), prev;
    int64_t blocks = t->n / DM_KV_BLOCK;
    int rc = 0;
    for (int64_t i = 0; i < blocks && !rc; i++) {
        prev = h;
        dm_kv_chain(&h, &prev, t->ids + i * DM_KV_BLOCK);
        if (i >= from) rc = dm_kv_put_block_after(r->kv, &prev, &h, r->bytes, r->o->block_bytes, e);
    }
    return rc ? rc : dm_kv_put_state(r->kv, &h, t->ids + blocks * DM_KV_BLOCK, (int)(t->n % DM_KV_BLOCK), r->bytes, r->o->state_bytes, e);
}

static int one_turn(replay *r, const dm_kv_turn *t, dm_err *e)
{
    dm_kv_hit hit;
    if (t->prompt <= 0 || t->prompt > t->n) return dm_err_set(e, DM_EINVAL, "kv.replay", "a prompt of %lld in a turn of %lld tokens", (long long)t->prompt, (long long)t->n);
    int rc = dm_kv_find(r->kv, t->ids, t->prompt, t->prompt - 1, &hit, e);
    if (rc) return rc;
    r->out->turns++;
    r->out->prompt_tokens += t->prompt;
    r->out->reused_tokens += hit.pos;
    rc = put_turn(r, t, hit.blocks, e);
    dm_kv_hit_end(r->kv, &hit);
    if (rc || r->out->turns % FLUSH_EVERY) return rc;
    rc = dm_kv_flush(r->kv, 600000, e);
    dm_kv_stat st;
    dm_kv_stat_get(r->kv, &st);
    if (st.disk_bytes_live > r->out->live_bytes_max) r->out->live_bytes_max = st.disk_bytes_live;
    return rc;
}

static int run_in(replay *r, const char *dir, dm_kv_next next, void *next_ctx, dm_kv_progress fn, void *ctx, dm_err *e)
{
    dm_kv_opts ko = { .dir = dir, .root = replay_root(), .block_bytes = r->o->block_bytes, .disk_bytes_max = r->o->disk_bytes_max, .ram_bytes_max = RAM_BYTES,
        .queue_bytes_max = (int64_t)64 << 20 };
    if (ko.ram_bytes_max < (int64_t)(r->o->state_bytes + r->o->block_bytes) * 4) ko.ram_bytes_max = (int64_t)(r->o->state_bytes + r->o->block_bytes) * 4;
    dm_kv_turn t;
    int rc = dm_kv_open(&r->kv, &ko, e), more = 1;
    while (!rc && (more = next(next_ctx, &t, e)) > 0) {
        rc = one_turn(r, &t, e);
        if (!rc && fn && !fn(ctx, r->out->turns, 0)) rc = dm_err_set(e, DM_ECANCELED, "kv.replay", "stopped");
    }
    if (!rc && more < 0) rc = more;
    dm_kv_stat st = { 0 };
    if (r->kv) dm_kv_stat_get(r->kv, &st);
    r->out->bytes_written = st.bytes_written;
    r->out->evicted_entries = st.evicted_entries;
    if (!rc && st.put_dropped > r->out->turns) dm_log(DM_LOG_INFO, "kv.replay: %lld entries found no room", (long long)st.put_dropped);
    dm_kv_close(r->kv);
    return rc;
}

int dm_kv_replay_run(const dm_kv_replay_opts *o, dm_kv_next next, void *next_ctx, dm_kv_replay *out, dm_kv_progress fn, void *ctx, dm_err *e)
{
    *out = (dm_kv_replay){ 0 };
    replay r = { .o = o, .out = out };
    int rc = dm_mkdirs(o->dir, 0700, e);
    if (rc) return rc;
    char *dir = dm_path_join(o->dir, "replay.XXXXXX");
    r.bytes = dm_calloc(1, o->block_bytes > o->state_bytes ? o->block_bytes : o->state_bytes);
    if (!dir || !r.bytes) rc = dm_err_set(e, DM_ENOMEM, "kv.replay", "out of memory");
    else if (!mkdtemp(dir)) rc = dm_err_sys(e, errno, "kv.replay", "%s", o->dir);
    else {
        rc = run_in(&r, dir, next, next_ctx, fn, ctx, e);
        dm_kv_remove(dir);
    }
    dm_free(dir);
    dm_free(r.bytes);
    return rc;
}
