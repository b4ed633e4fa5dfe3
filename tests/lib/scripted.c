#include "scripted.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#define MAGIC 0x6d726f6673637264ull
#define WINDOW 128

typedef struct script { int32_t *ids; size_t n; } script;

typedef struct scripted {
    dm_forward f;
    scripted_opts o;
    pthread_mutex_t lock; /* scripts and pick */
    script *scripts;
    size_t nscripts;
    size_t (*pick)(void *, const int32_t *, int64_t, size_t);
    void *pick_ctx;
    _Atomic int sleep_us, refuse, fail;
    _Atomic int64_t steps, rows, block_loads, state_loads, refused;
} scripted;

struct dm_fseq {
    dm_ids ids;
    dm_hash *chain; /* H over the ids up to block i */
    size_t nchain;
    void **blocks;  /* bytes of whole blocks, made or loaded */
    size_t nblocks;
    bool has_logits, restored, poisoned;
    float *logits;
};

typedef struct block_head { uint64_t magic; int64_t index; dm_hash chain; int32_t ids[DM_BLOCK_TOKENS]; } block_head;
typedef struct state_head {
    uint64_t magic;
    int64_t pos;
    dm_hash chain;  /* of the whole blocks before pos */
    dm_hash window; /* over the last WINDOW ids: what a block does not hold */
    int32_t tail, has_logits, next;
} state_head;

static const dm_hash zero_hash;

static void hash_block(dm_hash *out, const dm_hash *prev, const int32_t *ids)
{
    dm_blake2b h;
    dm_blake2b_init(&h);
    dm_blake2b_add(&h, prev->b, 32);
    dm_blake2b_add(&h, ids, DM_BLOCK_TOKENS * sizeof *ids);
    dm_blake2b_end(&h, out);
}

static void hash_window(dm_hash *out, const dm_fseq *s)
{
    size_t n = s->ids.n < WINDOW ? s->ids.n : WINDOW;
    dm_blake2b h;
    dm_blake2b_init(&h);
    dm_blake2b_add(&h, &s->ids.n, sizeof s->ids.n);
    if (n) dm_blake2b_add(&h, s->ids.p + s->ids.n - n, n * sizeof(int32_t));
    dm_blake2b_end(&h, out);
}

static const dm_hash *chain_last(const dm_fseq *s) { return s->nchain ? &s->chain[s->nchain - 1] : &zero_hash; }

/* ---- sequences ------------------------------------------------------------------------------------ */

static int seq_create(dm_forward *f, dm_fseq **out, dm_err *e)
{
    dm_fseq *s = dm_calloc(1, sizeof *s);
    if (s && !(s->logits = dm_calloc((size_t)f->vocab, sizeof(float)))) {
        dm_free(s);
        s = NULL;
    }
    if (!s) return dm_err_set(e, DM_ENOMEM, "scripted", "out of memory");
    *out = s;
    return 0;
}

static void seq_destroy(dm_forward *f, dm_fseq *s)
{
    (void)f;
    if (!s) return;
    for (size_t i = 0; i < s->nblocks; i++) dm_free(s->blocks[i]);
    dm_free(s->blocks);
    dm_free(s->chain);
    dm_free(s->logits);
    dm_ids_free(&s->ids);
    dm_free(s);
}

static int64_t seq_pos(const dm_fseq *s) { return (int64_t)s->ids.n; }

/* Takes bytes, also when it fails. */
static int keep_block(dm_fseq *s, void *bytes, const dm_hash *chain)
{
    void **blocks = dm_realloc(s->blocks, (s->nblocks + 1) * sizeof *blocks);
    if (blocks) s->blocks = blocks;
    dm_hash *grown = dm_realloc(s->chain, (s->nchain + 1) * sizeof *grown);
    if (grown) s->chain = grown;
    if (!blocks || !grown) {
        dm_free(bytes);
        return DM_ENOMEM;
    }
    s->blocks[s->nblocks++] = bytes;
    s->chain[s->nchain++] = *chain;
    return 0;
}

/* The filler behind the header follows from the chain, so every byte of a block can be checked. */
static void fill(uint8_t *p, size_t n, const dm_hash *chain)
{
    uint64_t x;
    memcpy(&x, chain->b, sizeof x);
    for (size_t i = 0; i < n; i++) p[i] = (uint8_t)dm_splitmix64(&x);
}

static int make_block(scripted *c, dm_fseq *s)
{
    const int32_t *ids = s->ids.p + s->nblocks * DM_BLOCK_TOKENS;
    block_head h = { .magic = MAGIC, .index = (int64_t)s->nblocks };
    uint8_t *bytes = dm_malloc(c->f.block_bytes);
    if (!bytes) return DM_ENOMEM;
    hash_block(&h.chain, chain_last(s), ids);
    memcpy(h.ids, ids, sizeof h.ids);
    memcpy(bytes, &h, sizeof h);
    fill(bytes + sizeof h, c->f.block_bytes - sizeof h, &h.chain);
    return keep_block(s, bytes, &h.chain);
}

/* ---- what comes next --------------------------------------------------------------------------------- */

static int32_t next_id(scripted *c, const dm_fseq *s)
{
    int64_t markers = 0, last = -1, n = (int64_t)s->ids.n;
    for (int64_t i = 0; i < n; i++)
        if (s->ids.p[i] == c->o.assistant) markers++, last = i;
    if (last < 0) return c->o.eos;
    size_t k = (size_t)(markers - 1);
    int64_t at = n - (last + 2);
    int32_t id = c->o.eos;
    pthread_mutex_lock(&c->lock);
    if (c->pick) k = c->pick(c->pick_ctx, s->ids.p, n, k);
    if (k < c->nscripts && at >= 0 && at < (int64_t)c->scripts[k].n) id = c->scripts[k].ids[at];
    pthread_mutex_unlock(&c->lock);
    return id;
}

static void set_logits(scripted *c, dm_fseq *s, int32_t id)
{
    memset(s->logits, 0, (size_t)c->f.vocab * sizeof(float));
    s->logits[id] = 1;
    s->has_logits = true;
}

static void sleep_rows(scripted *c, int rows)
{
    int us = atomic_load(&c->sleep_us) * rows;
    if (us > 0) nanosleep(&(struct timespec){ us / 1000000, us % 1000000 * 1000L }, NULL);
}

static int run_one(scripted *c, const dm_run *r, dm_err *e)
{
    dm_fseq *s = r->seq;
    if (s->poisoned) return dm_err_set(e, DM_ESTATE, "scripted", "the sequence is poisoned");
    if (s->restored && atomic_load(&c->fail) > 0) {
        atomic_fetch_sub(&c->fail, 1);
        s->poisoned = true;
        return dm_err_set(e, DM_EIO, "scripted", "fails behind a restore, as asked");
    }
    s->restored = false;
    if (dm_ids_append(&s->ids, r->ids, (size_t)r->n) < 0) return dm_err_set(e, DM_ENOMEM, "scripted", "out of memory");
    while (s->nblocks < s->ids.n / DM_BLOCK_TOKENS)
        if (make_block(c, s) < 0) return dm_err_set(e, DM_ENOMEM, "scripted", "out of memory");
    s->has_logits = false;
    if (r->logits) {
        set_logits(c, s, next_id(c, s));
        memcpy(r->logits, s->logits, (size_t)c->f.vocab * sizeof(float));
    }
    atomic_fetch_add(&c->rows, r->n);
    sleep_rows(c, r->n);
    return 0;
}

static int step(dm_forward *f, const dm_run *runs, int nruns, dm_err *e)
{
    scripted *c = (scripted *)f;
    atomic_fetch_add(&c->steps, 1);
    for (int i = 0; i < nruns; i++) {
        int rc = run_one(c, &runs[i], e);
        if (rc < 0) {
            for (int k = 0; k < nruns; k++) runs[k].seq->poisoned = true;
            return rc;
        }
    }
    return 0;
}

static const float *seq_logits(const dm_fseq *s) { return s->has_logits ? s->logits : NULL; }

/* ---- blocks and states ---------------------------------------------------------------------------------- */

static int block(dm_forward *f, const dm_fseq *s, int64_t i, const void **bytes, dm_err *e)
{
    (void)f;
    if (i < 0 || i >= (int64_t)s->nblocks) return dm_err_set(e, DM_EINVAL, "scripted", "no block %lld", (long long)i);
    *bytes = s->blocks[i];
    return 0;
}

static int refuse(scripted *c, dm_err *e, const char *what)
{
    atomic_fetch_add(&c->refused, 1);
    return dm_err_set(e, DM_EFORMAT, "scripted", "%s", what);
}

static int block_load(dm_forward *f, dm_fseq *s, int64_t i, const void *bytes, dm_err *e)
{
    scripted *c = (scripted *)f;
    block_head h;
    dm_hash want;
    memcpy(&h, bytes, sizeof h);
    hash_block(&want, chain_last(s), h.ids);
    if (h.magic != MAGIC || h.index != i || i != (int64_t)s->nblocks || !dm_hash_equal(&want, &h.chain)) return refuse(c, e, "a wrong block");
    size_t rest = c->f.block_bytes - sizeof h;
    uint8_t *copy = dm_malloc(c->f.block_bytes), *filler = dm_malloc(rest);
    if (!copy || !filler) {
        dm_free(copy);
        dm_free(filler);
        return dm_err_set(e, DM_ENOMEM, "scripted", "out of memory");
    }
    memcpy(copy, bytes, c->f.block_bytes);
    fill(filler, rest, &h.chain);
    bool same = memcmp(filler, copy + sizeof h, rest) == 0;
    dm_free(filler);
    if (!same) {
        dm_free(copy);
        return refuse(c, e, "a block with wrong bytes");
    }
    atomic_fetch_add(&c->block_loads, 1);
    if (keep_block(s, copy, &h.chain) < 0 || dm_ids_append(&s->ids, h.ids, DM_BLOCK_TOKENS) < 0) return dm_err_set(e, DM_ENOMEM, "scripted", "out of memory");
    return 0;
}

static int state_save(dm_forward *f, const dm_fseq *s, dm_buf *out, dm_err *e)
{
    (void)f;
    state_head h = { .magic = MAGIC, .pos = (int64_t)s->ids.n, .chain = *chain_last(s), .tail = (int32_t)(s->ids.n % DM_BLOCK_TOKENS) };
    hash_window(&h.window, s);
    if (s->has_logits) {
        h.has_logits = 1;
        while (s->logits[h.next] != 1) h.next++;
    }
    const int32_t *tail = s->ids.p + s->ids.n - (size_t)h.tail;
    if (dm_buf_append(out, &h, sizeof h) < 0 || dm_buf_append(out, tail, (size_t)h.tail * sizeof *tail) < 0)
        return dm_err_set(e, DM_ENOMEM, "scripted", "out of memory");
    return 0;
}

static int state_load(dm_forward *f, dm_fseq *s, const void *bytes, size_t n, dm_err *e)
{
    scripted *c = (scripted *)f;
    state_head h;
    if (atomic_load(&c->refuse) > 0) {
        atomic_fetch_sub(&c->refuse, 1);
        return refuse(c, e, "refused, as asked");
    }
    if (n < sizeof h) return refuse(c, e, "a short state");
    memcpy(&h, bytes, sizeof h);
    if (h.magic != MAGIC || h.tail < 0 || h.tail >= DM_BLOCK_TOKENS || n != sizeof h + (size_t)h.tail * sizeof(int32_t)) return refuse(c, e, "not a state");
    if (h.pos != (int64_t)s->nblocks * DM_BLOCK_TOKENS + h.tail || !dm_hash_equal(&h.chain, chain_last(s))) return refuse(c, e, "a state of other blocks");
    if (h.next < 0 || h.next >= c->f.vocab) return refuse(c, e, "a wild id");
    const int32_t *tail = (const int32_t *)((const uint8_t *)bytes + sizeof h);
    for (int32_t i = 0; i < h.tail; i++) {
        int32_t id;
        memcpy(&id, tail + i, sizeof id);
        if (dm_ids_push(&s->ids, id) < 0) return dm_err_set(e, DM_ENOMEM, "scripted", "out of memory");
    }
    dm_hash window;
    hash_window(&window, s);
    if (!dm_hash_equal(&window, &h.window)) return refuse(c, e, "another window");
    if (h.has_logits) set_logits(c, s, h.next);
    s->restored = true;
    atomic_fetch_add(&c->state_loads, 1);
    return 0;
}

/* ---- life -------------------------------------------------------------------------------------------------- */

static void destroy(dm_forward *f)
{
    scripted *c = (scripted *)f;
    for (size_t i = 0; i < c->nscripts; i++) dm_free(c->scripts[i].ids);
    dm_free(c->scripts);
    pthread_mutex_destroy(&c->lock);
    dm_free(c);
}

static const dm_forward_ops scripted_ops = {
    .destroy = destroy, .seq_create = seq_create, .seq_destroy = seq_destroy, .seq_pos = seq_pos, .step = step, .block = block,
    .block_load = block_load, .state_save = state_save, .state_load = state_load, .seq_logits = seq_logits,
};

dm_forward *scripted_create(const scripted_opts *o)
{
    scripted *c = dm_calloc(1, sizeof *c);
    if (!c) return NULL;
    c->o = *o;
    c->f = (dm_forward){ .ops = &scripted_ops, .vocab = o->vocab, .rows_max = o->rows_max ? o->rows_max : 64,
                         .block_bytes = o->block_bytes ? o->block_bytes : 4096, .ctx_tokens_max = o->ctx_tokens_max ? o->ctx_tokens_max : 65536 };
    DM_ASSERT(c->f.block_bytes > sizeof(block_head));
    snprintf(c->f.numerics_id, sizeof c->f.numerics_id, "%s", o->numerics_id ? o->numerics_id : "scripted");
    pthread_mutex_init(&c->lock, NULL);
    return &c->f;
}

void scripted_reply(dm_forward *f, const int32_t *ids, size_t n)
{
    scripted *c = (scripted *)f;
    pthread_mutex_lock(&c->lock);
    script *grown = dm_realloc(c->scripts, (c->nscripts + 1) * sizeof *grown);
    DM_ASSERT(grown);
    c->scripts = grown;
    grown[c->nscripts] = (script){ dm_malloc(n * sizeof *ids + 1), n };
    DM_ASSERT(grown[c->nscripts].ids);
    memcpy(grown[c->nscripts].ids, ids, n * sizeof *ids);
    c->nscripts++;
    pthread_mutex_unlock(&c->lock);
}

void scripted_cut(dm_forward *f, size_t at)
{
    scripted *c = (scripted *)f;
    pthread_mutex_lock(&c->lock);
    while (c->nscripts > at) dm_free(c->scripts[--c->nscripts].ids);
    pthread_mutex_unlock(&c->lock);
}

void scripted_pick(dm_forward *f, size_t (*pick)(void *, const int32_t *, int64_t, size_t), void *ctx)
{
    scripted *c = (scripted *)f;
    pthread_mutex_lock(&c->lock);
    c->pick = pick;
    c->pick_ctx = ctx;
    pthread_mutex_unlock(&c->lock);
}

void scripted_sleep_us(dm_forward *f, int us_per_row) { atomic_store(&((scripted *)f)->sleep_us, us_per_row); }
void scripted_refuse_states(dm_forward *f, int n) { atomic_store(&((scripted *)f)->refuse, n); }
void scripted_fail_restored(dm_forward *f, int n) { atomic_store(&((scripted *)f)->fail, n); }

scripted_counts scripted_count(dm_forward *f)
{
    scripted *c = (scripted *)f;
    return (scripted_counts){ atomic_load(&c->steps), atomic_load(&c->rows), atomic_load(&c->block_loads), atomic_load(&c->state_loads),
                              atomic_load(&c->refused) };
}
