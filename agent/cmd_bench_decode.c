/* cmd_bench_decode.c — what spilling costs the model: rows of `dormouse bench store` that need an engine.
 *
 *   decode_with_spill   tokens per second while blocks go to the store as they become whole / the same without a store
 *   ready_delay_steps   from the last token to the end of the job, with the store − without, in decode steps
 *
 * The model is whatever is given; the store is one of its own with blocks and states of the sizes asked for: what the engine hands out
 * is replaced by so many bytes, so that a small model shows what a big one's spills cost.  Both sides are one prompt and
 * one reply of the same tokens, one after the other in every round; the medians over the rounds count. */
#include "agent/cmd_int.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define WARM 4           /* rounds before those that count: the RAM tier is then at its bound, as it is in a process that has run for a while */
#define PROMPT_TOKENS 64
#define REPLY_TOKENS 512 /* two blocks become whole */

typedef struct side {
    dm_kv *kv;               /* borrowed; NULL: nothing is spilled */
    const dm_hash *root;
    dm_hash last;            /* of the chain so far */
    uint8_t *block, *state;  /* borrowed */
    size_t block_bytes, state_bytes;
    int failed;              /* DM_E… of a put */
    uint64_t token_ns, end_ns;
    dm_gen_event end;
    pthread_mutex_t lock;
    pthread_cond_t ended;
    bool over;
} side;

/* ---- engine thread ------------------------------------------------------------------------------------ */

static void put_block(void *ctx, int64_t index, const int32_t *ids, const void *bytes, size_t n)
{
    side *s = ctx;
    dm_err e;
    dm_hash prev = index ? s->last : *s->root;
    dm_kv_chain(&s->last, &prev, ids);
    memcpy(s->block, bytes, n < s->block_bytes ? n : s->block_bytes);
    int rc = dm_kv_put_block_after(s->kv, &prev, &s->last, s->block, s->block_bytes, &e);
    if (rc < 0) s->failed = rc;
}

static void put_state(void *ctx, int64_t pos, const int32_t *tail, const void *bytes, size_t n)
{
    side *s = ctx;
    dm_err e;
    memcpy(s->state, bytes, n < s->state_bytes ? n : s->state_bytes);
    int rc = dm_kv_put_state(s->kv, pos < DM_KV_BLOCK ? s->root : &s->last, tail, (int)(pos % DM_KV_BLOCK), s->state, s->state_bytes, &e);
    if (rc < 0) s->failed = rc;
}

static void on_event(void *ctx, const dm_gen_event *ev)
{
    side *s = ctx;
    if (ev->kind == DM_GEN_TOKEN) s->token_ns = dm_now_ns();
    if (ev->kind != DM_GEN_END) return;
    pthread_mutex_lock(&s->lock);
    s->end_ns = dm_now_ns();
    s->end = *ev;
    s->over = true;
    pthread_cond_signal(&s->ended);
    pthread_mutex_unlock(&s->lock);
}

/* ---- one side of a round -------------------------------------------------------------------------------- */

static int reply(dm_engine *g, side *s, const int32_t *prompt, dm_err *e)
{
    dm_seq *seq = NULL;
    s->over = false;
    s->failed = 0;
    int rc = dm_seq_create(g, &seq, e);
    dm_gen job = { .ids = prompt, .n = PROMPT_TOKENS, .max_new = REPLY_TOKENS, .ctx = s, .event = on_event };
    if (s->kv) job.sink = (dm_sink){ .ctx = s, .block = put_block, .state = put_state };
    dm_sampler_init(&job.sampler, &(dm_sample_params){ .top_p = 1 });
    if (rc == 0) rc = dm_engine_submit(g, seq, &job, e);
    if (rc == 0) {
        pthread_mutex_lock(&s->lock);
        while (!s->over) pthread_cond_wait(&s->ended, &s->lock);
        pthread_mutex_unlock(&s->lock);
        if (s->end.end == DM_END_ERROR) *e = s->end.err, rc = s->end.err.code;
        else if (s->failed) rc = dm_err_set(e, s->failed, "bench", "the store took no more: %s", dm_err_text(s->failed));
        else if (s->end.decoded != REPLY_TOKENS) rc = dm_err_set(e, DM_EMODEL, "bench", "the model's context has no room for %d tokens", PROMPT_TOKENS + REPLY_TOKENS);
    }
    dm_seq_destroy(g, seq);
    return rc;
}

typedef struct figure { double on[BENCH_ROUNDS_MAX], off[BENCH_ROUNDS_MAX], ratio[BENCH_ROUNDS_MAX]; } figure;

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return n % 2 ? v[n / 2] : (v[n / 2 - 1] + v[n / 2]) / 2;
}

static double speed(const side *s) { return (double)s->end.decoded / ((double)(s->end.decode_ns ? s->end.decode_ns : 1) / 1e9); }
static double delay_ms(const side *s) { return s->end_ns > s->token_ns ? (double)(s->end_ns - s->token_ns) / 1e6 : 0; }

static int rounds(dm_engine *g, const bench_decode_opts *o, side *on, side *off, int vocab, dm_kv_bench_row rows[2], dm_err *e)
{
    static figure fast, ready;
    int32_t prompt[PROMPT_TOKENS];
    int rc = 0;
    for (int r = -WARM; r < o->rounds && rc == 0; r++) {
        rc = dm_synth_tokens(prompt, PROMPT_TOKENS, (uint64_t)(r + WARM) + 1, vocab, e); /* a prompt of its own: nothing is there already */
        side *order[2] = { r & 1 ? on : off, r & 1 ? off : on };
        for (int i = 0; i < 2 && rc == 0; i++) {
            rc = reply(g, order[i], prompt, e);
            if (rc == 0 && signals_caught()) rc = dm_err_set(e, DM_ECANCELED, "bench", "stopped");
        }
        if (rc < 0 || r < 0) continue;
        double step_ms = 1e3 / speed(off);
        fast.on[r] = speed(on), fast.off[r] = speed(off), fast.ratio[r] = fast.on[r] / fast.off[r];
        ready.on[r] = delay_ms(on), ready.off[r] = delay_ms(off), ready.ratio[r] = (ready.on[r] - ready.off[r]) / step_ms;
        if (err_is_terminal()) err_printf("\rdecode, round %d of %d\033[K%s", r + 1, o->rounds, r + 1 == o->rounds ? "\r\033[K" : "");
    }
    rows[0] = (dm_kv_bench_row){ .name = "decode_with_spill", .unit = "tokens/s", .limit = 0.98 };
    rows[1] = (dm_kv_bench_row){ .name = "ready_delay_steps", .unit = "ms", .limit = 1, .at_most = true };
    figure *f[2] = { &fast, &ready };
    for (int i = 0; i < 2 && rc == 0; i++)
        rows[i].value = median(f[i]->on, o->rounds), rows[i].probe = median(f[i]->off, o->rounds), rows[i].ratio = median(f[i]->ratio, o->rounds);
    return rc;
}

static int with_store(dm_forward *f, const bench_decode_opts *o, const char *dir, dm_kv_bench_row rows[2], dm_err *e)
{
    dm_engine *g = NULL;
    dm_kv_opts ko = { .dir = dir, .block_bytes = o->block_bytes, .disk_bytes_max = o->quota_bytes,
                      .ram_bytes_max = 4 * (int64_t)(o->block_bytes + o->state_bytes) + (1 << 20) };
    side on = { .block_bytes = o->block_bytes, .state_bytes = o->state_bytes, .root = &ko.root }, off = { 0 };
    pthread_mutex_init(&on.lock, NULL), pthread_mutex_init(&off.lock, NULL);
    pthread_cond_init(&on.ended, NULL), pthread_cond_init(&off.ended, NULL);
    on.block = dm_calloc(1, o->block_bytes);
    on.state = dm_calloc(1, o->state_bytes);
    int rc = on.block && on.state ? dm_kv_open(&on.kv, &ko, e) : dm_err_set(e, DM_ENOMEM, "bench", "out of memory");
    if (rc == 0) rc = dm_engine_create(&g, f, &(dm_engine_opts){ 0 }, e);
    if (rc == 0) rc = rounds(g, o, &on, &off, f->vocab, rows, e);
    dm_engine_destroy(g);
    dm_kv_close(on.kv);
    dm_free(on.block);
    dm_free(on.state);
    return rc;
}

int bench_decode(const bench_decode_opts *o, dm_kv_bench_row rows[2], dm_err *e)
{
    char *dir = dm_path_join(o->dir, "bench-decode-XXXXXX");
    dm_model *m = NULL;
    dm_forward *f = NULL;
    int rc = dir ? dm_mkdirs(o->dir, 0700, e) : dm_err_set(e, DM_ENOMEM, "bench", "out of memory");
    bool made = rc == 0 && mkdtemp(dir) != NULL;
    if (rc == 0 && !made) rc = dm_err_set(e, DM_EIO, "bench", "no directory can be made in %s", o->dir);
    if (rc == 0) rc = dm_model_open(&m, o->model, e);
    if (rc == 0) rc = dm_forward_create(&f, m, &(dm_forward_opts){ .threads = o->threads, .ctx_tokens_max = PROMPT_TOKENS + REPLY_TOKENS + 1 }, e);
    if (rc == 0) rc = with_store(f, o, dir, rows, e);
    dm_forward_destroy(f);
    dm_model_close(m);
    if (made) dm_kv_remove(dir);
    dm_free(dir);
    return rc;
}
