/* verify_spec.c — whether drafting changes anything on this checkpoint: one reply with it and one without, compared. */
#include <pthread.h>
#include <string.h>

#include "engine/verify_int.h"

#define WHERE "speculation"

typedef struct outcome {
    dm_ids ids;          /* sampled */
    uint8_t state[16];   /* hash of the last state */
    dm_gen_event end;
    bool lost, over;
    pthread_mutex_t lock;
    pthread_cond_t ended;
} outcome;

static void on_event(void *ctx, const dm_gen_event *ev) {
    outcome *o = ctx;
    if (ev->kind == DM_GEN_TOKEN && dm_ids_push(&o->ids, ev->id) < 0) o->lost = true;
    if (ev->kind != DM_GEN_END) return;
    pthread_mutex_lock(&o->lock);
    o->end = *ev;
    o->over = true;
    pthread_cond_signal(&o->ended);
    pthread_mutex_unlock(&o->lock);
}

static void on_state(void *ctx, int64_t pos, const int32_t *tail, const void *bytes, size_t n) {
    outcome *o = ctx;
    (void)pos, (void)tail;
    dm_xxh3_128(o->state, bytes, n);
}

static void on_block(void *ctx, int64_t i, const int32_t *ids, const void *bytes, size_t n) { (void)ctx, (void)i, (void)ids, (void)bytes, (void)n; }

static int reply(dm_engine *g, const int32_t *ids, int64_t n, int64_t max_new, outcome *o, dm_err *e) {
    dm_seq *s = NULL;
    dm_gen job = {.ids = ids, .n = (size_t)n, .max_new = max_new, .ctx = o, .event = on_event, .sink = {.ctx = o, .block = on_block, .state = on_state}};
    dm_sampler_init(&job.sampler, &(dm_sample_params){.top_p = 1});
    int rc = dm_seq_create(g, &s, e);
    if (rc == 0) rc = dm_engine_submit(g, s, &job, e);
    if (rc == 0) {
        pthread_mutex_lock(&o->lock);
        while (!o->over) pthread_cond_wait(&o->ended, &o->lock);
        pthread_mutex_unlock(&o->lock);
        if (o->end.end == DM_END_ERROR) rc = (*e = o->end.err).code;
        else if (o->lost) rc = dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    }
    dm_seq_destroy(g, s);
    return rc;
}

static int run(const dm_model *m, const dm_forward_opts *opts, int speculate, const int32_t *ids, int64_t n, int64_t max_new, outcome *o, dm_err *e) {
    dm_forward_opts fo = *opts;
    dm_forward *f = NULL;
    dm_engine *g = NULL;
    fo.draft = speculate > 0;
    int rc = dm_forward_create(&f, m, &fo, e);
    if (rc == 0) rc = dm_engine_create(&g, f, &(dm_engine_opts){.speculate = speculate}, e);
    if (rc == 0) rc = reply(g, ids, n, max_new, o, e);
    dm_engine_destroy(g);
    dm_forward_destroy(f);
    return rc;
}

int dm_model_speculation(const dm_model *m, const dm_forward_opts *opts, const int32_t *ids, int64_t n, int64_t max_new, int depth, dm_speculation *out, dm_err *e) {
    *out = (dm_speculation){0};
    if (!dm_model_config(m)->num_nextn_predict_layers) return dm_err_set(e, DM_ENOTSUP, WHERE, "the model has no MTP layer");
    outcome o[2] = {{.lost = false}, {.lost = false}};
    int rc = 0;
    for (int i = 0; i < 2; i++) {
        pthread_mutex_init(&o[i].lock, NULL);
        pthread_cond_init(&o[i].ended, NULL);
        if (rc == 0) rc = run(m, opts, i ? depth : 0, ids, n, max_new, &o[i], e);
    }
    if (rc == 0) {
        *out = (dm_speculation){.tokens = (int64_t)o[0].ids.n, .drafted = o[1].end.drafted, .accepted = o[1].end.accepted};
        size_t same = 0, both = o[0].ids.n < o[1].ids.n ? o[0].ids.n : o[1].ids.n;
        while (same < both && o[0].ids.p[same] == o[1].ids.p[same]) same++;
        bool equal = same == o[0].ids.n && same == o[1].ids.n;
        if (!equal) rc = dm_err_set(e, DM_EMISMATCH, WHERE, "with drafts the reply is another one from token %zu on", same);
        else if (memcmp(o[0].state, o[1].state, sizeof o[0].state) != 0) rc = dm_err_set(e, DM_EMISMATCH, WHERE, "with drafts the reply is the same, but the state behind it is not");
    }
    for (int i = 0; i < 2; i++) {
        dm_ids_free(&o[i].ids);
        pthread_mutex_destroy(&o[i].lock);
        pthread_cond_destroy(&o[i].ended);
    }
    return rc;
}
