/* The engine thread: takes jobs, forms ragged steps, samples, hands out blocks and states, reports.
 *
 * A job's life (field `phase`; job_after_step makes every move):
 *
 *     PREFILL ──last chunk──> sample ──> DECODE ──stop/length/cancel──> TAIL ──> END
 *        │                      │           └── one row a step, sample again
 *        └──cancel, error──> END└──max_new = 0 / context full──> END
 *
 * TAIL feeds the last sampled token without sampling again, so that at END the sequence holds every token that
 * was reported (invariant E1), and the next turn costs only its own tokens.
 *
 * Speculation: the run of a job that decodes may go on with drafted tokens, as tentative rows.  after_decode looks at the rows in
 * order, each as plain decode would behind a step of one row; a token that was sampled and is what had been drafted has its row
 * already, and that is the only difference.  Whatever rows are left over are taken back before anything else sees the sequence
 * (E4).
 *
 * A step takes one row of every job that decodes, then prefill rows up to the budget: a long prefill slows
 * decoding down by one chunk at most and never stops it (E2).  Jobs that prefill share what is left in turn.
 *
 * Order at the end of an input or an output: blocks, then the state, then the event (E3): whoever sees the event
 * knows that the sink has everything before it. */
#include "engine/spec_int.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

enum { JOBS_MAX_DEFAULT = 64, STATE_INTERVAL_DEFAULT = 4096 };

typedef enum phase { PREFILL, DECODE, TAIL } phase;

struct dm_seq {
    dm_fseq *fs;      /* owned */
    dm_ids ids;       /* every token processed: ids.n == seq_pos(fs) */
    int64_t exported; /* whole blocks that a sink has, or that came from one */
    struct job *job;  /* under engine.lock; NULL: the caller owns the sequence */
};

typedef struct job {
    struct job *next;
    dm_seq *seq;
    phase phase;
    dm_ids feed; /* new tokens; feed.p[fed..] are still to be run */
    size_t fed;
    int64_t max_new;
    int32_t *stop;
    size_t nstop;
    dm_sampler sampler;
    dm_sink sink;
    void *ctx;
    void (*event)(void *, const dm_gen_event *);
    bool (*hook)(void *, int32_t);
    void (*mask)(void *, float *, int);
    _Atomic bool cancel;
    int32_t row_id[1 + DM_DRAFT_MAX]; /* DECODE, TAIL: the sampled token that is not yet run, then drafts */
    int drafts;       /* of the step at hand */
    dm_gen_end end;   /* TAIL: what to report behind it */
    bool logprobs;
    int top_logprobs;
    float *logits;    /* [1 + depth][vocab] of the step's rows, as the model gave them */
    float *masked;    /* [vocab] what is sampled from under a mask, or NULL */
    void *scratch;    /* the sampler's */
    int rows;         /* of this job in the step at hand */
    int64_t prefilled, decoded, drafted, accepted;
    uint64_t start_ns, prefill_ns;
} job;

struct dm_engine {
    dm_forward *f; /* borrowed */
    int chunk;
    int64_t state_interval;
    int jobs_max;
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t wake;
    job *queue_head, *queue_tail; /* under lock: submitted, not yet taken */
    int jobs;                     /* under lock: submitted and not ended */
    bool stopping;                /* under lock */
    dm_engine_stat stat;          /* under lock */
    job **active, **in_step;      /* [jobs_max], the engine thread's */
    int nactive;
    int turn; /* which prefilling job is served first */
    dm_run *runs;
    dm_draft *drafts; /* [jobs_max] */
    spec spec;
    int64_t sampled;  /* tokens, in the step at hand */
};

/* ---- ending and reporting ------------------------------------------------------------------------- */

static void job_free(job *j)
{
    if (!j) return;
    dm_ids_free(&j->feed);
    dm_free(j->stop);
    dm_free(j->logits);
    dm_free(j->masked);
    dm_free(j->scratch);
    dm_free(j);
}

/* Hands out the whole blocks that the sequence gained, and the state where it stands.  A failing export costs a
 * later prefill, never this turn. */
static void export_blocks(dm_engine *g, job *j)
{
    dm_seq *s = j->seq;
    int64_t whole = (int64_t)s->ids.n / DM_BLOCK_TOKENS;
    for (; s->exported < whole; s->exported++) {
        const void *bytes;
        if (!j->sink.block) continue;
        int rc = g->f->ops->block(g->f, s->fs, s->exported, &bytes, NULL);
        if (rc < 0) {
            dm_log(DM_LOG_WARN, "engine: block %lld cannot be handed out: %s", (long long)s->exported, dm_err_text(rc));
            return;
        }
        j->sink.block(j->sink.ctx, s->exported, s->ids.p + s->exported * DM_BLOCK_TOKENS, bytes, g->f->block_bytes);
    }
}

static void export_state(dm_engine *g, job *j)
{
    dm_seq *s = j->seq;
    if (!j->sink.state || s->ids.n == 0) return;
    export_blocks(g, j);
    dm_buf blob = {0};
    int rc = g->f->ops->state_save(g->f, s->fs, &blob, NULL);
    if (rc < 0) dm_log(DM_LOG_WARN, "engine: state at %zu cannot be saved: %s", s->ids.n, dm_err_text(rc));
    else j->sink.state(j->sink.ctx, (int64_t)s->ids.n, s->ids.p + s->ids.n / DM_BLOCK_TOKENS * DM_BLOCK_TOKENS, blob.p, blob.n);
    dm_buf_free(&blob);
}

static void finish(dm_engine *g, job *j, dm_gen_end end, const dm_err *err)
{
    uint64_t now = dm_now_ns();
    if (j->phase == PREFILL) j->prefill_ns = now - j->start_ns;
    if (end != DM_END_ERROR && !(end == DM_END_CANCEL && j->fed == 0 && j->decoded == 0)) export_state(g, j);
    dm_gen_event ev = {.kind = DM_GEN_END, .end = end, .prefilled = j->prefilled, .decoded = j->decoded, .done = j->prefilled,
                       .total = (int64_t)j->feed.n, .drafted = j->drafted, .accepted = j->accepted, .prefill_ns = j->prefill_ns, .decode_ns = now - j->start_ns - j->prefill_ns, .sampler = j->sampler};
    if (err) ev.err = *err;
    for (int i = 0; i < g->nactive; i++) {
        if (g->active[i] != j) continue;
        memmove(&g->active[i], &g->active[i + 1], sizeof(job *) * (size_t)(g->nactive - i - 1));
        g->nactive--;
        break;
    }
    pthread_mutex_lock(&g->lock);
    j->seq->job = NULL; /* before the event: its receiver may use the sequence at once */
    g->jobs--;
    pthread_mutex_unlock(&g->lock);
    j->event(j->ctx, &ev);
    job_free(j);
}

/* ---- sampling ------------------------------------------------------------------------------------------ */

static bool is_stop(const job *j, int32_t id)
{
    for (size_t i = 0; i < j->nstop; i++)
        if (j->stop[i] == id) return true;
    return false;
}

static void report_token(dm_engine *g, job *j, const float *logits, int id)
{
    dm_logprob top[DM_LOGPROBS_MAX];
    dm_gen_event ev = {.kind = DM_GEN_TOKEN, .id = id, .decoded = j->decoded, .prefilled = j->prefilled};
    if (j->logprobs) {
        ev.ntop = j->top_logprobs < g->f->vocab ? j->top_logprobs : g->f->vocab;
        ev.logprob = dm_logprobs(logits, g->f->vocab, id, top, ev.ntop);
        ev.top = top;
    }
    j->event(j->ctx, &ev);
}

/* The next token from these logits, or an error told in words.  They stay as they are: a mask works on a copy. */
static int pick(dm_engine *g, job *j, const float *logits, dm_err *e)
{
    int vocab = g->f->vocab, nan = dm_logits_nan(logits, vocab);
    if (nan >= 0)
        return dm_err_set(e, DM_EFORMAT, "engine", "the model gave no usable logits behind position %lld: that of token %d is not a number",
                          (long long)j->seq->ids.n - 1, nan);
    if (j->mask) {
        memcpy(j->masked, logits, sizeof(float) * (size_t)vocab);
        j->mask(j->ctx, j->masked, vocab);
    }
    int id = dm_sampler_pick(&j->sampler, j->mask ? j->masked : logits, vocab, &j->scratch);
    if (id == DM_ENOMEM) return dm_err_set(e, id, "engine", "out of memory while sampling");
    if (id < 0) return dm_err_set(e, id, "engine", "the model gave no usable logits behind position %lld: all that may be sampled are -inf", (long long)j->seq->ids.n - 1);
    return id;
}

typedef enum sampled { SAMPLED, OVER, FAILED } sampled;

/* Samples the next token into row_id[0] and decides how the job goes on: phase is then DECODE or TAIL.  OVER: nothing is sampled,
 * and the job ends with j->end.  FAILED: *e says why. */
static sampled sample(dm_engine *g, job *j, const float *logits, dm_err *e)
{
    if (j->decoded == 0) j->prefill_ns = dm_now_ns() - j->start_ns;
    j->end = j->max_new == 0 ? DM_END_STOP : DM_END_CONTEXT; /* full: no room for the token that would be sampled (E1) */
    if (j->max_new == 0 || (int64_t)j->seq->ids.n >= g->f->ctx_tokens_max) return OVER;
    int id = pick(g, j, logits, e);
    if (id < 0) return FAILED;
    j->row_id[0] = id;
    j->decoded++;
    g->sampled++;
    report_token(g, j, logits, id);
    j->phase = TAIL;
    if (is_stop(j, id) || (j->hook && j->hook(j->ctx, id))) j->end = DM_END_STOP;
    else if (j->decoded >= j->max_new) j->end = DM_END_LENGTH;
    else if (atomic_load(&j->cancel)) j->end = DM_END_CANCEL;
    else j->phase = DECODE;
    return SAMPLED;
}

/* The first token of a job: nothing is tentative. */
static void sample_first(dm_engine *g, job *j)
{
    dm_err err = {0};
    switch (sample(g, j, j->logits, &err)) {
    case SAMPLED: return;
    case OVER: finish(g, j, j->end, NULL); return;
    case FAILED: finish(g, j, DM_END_ERROR, &err); return;
    }
}

/* ---- one step --------------------------------------------------------------------------------------------- */

/* Prefill rows for a job: up to the budget, and never across a position where a state is due, so that states
 * stand at multiples of the interval whatever the chunking. */
static int prefill_rows(const dm_engine *g, const job *j, int budget)
{
    int64_t left = (int64_t)(j->feed.n - j->fed), pos = (int64_t)j->seq->ids.n;
    int64_t to_state = g->state_interval - pos % g->state_interval;
    int64_t n = left < budget ? left : budget;
    return (int)(n < to_state ? n : to_state);
}

/* Logits of the last nlogits rows; 0: of none. */
static void add_run(dm_engine *g, job *j, int *nruns, const int32_t *ids, int n, int nlogits)
{
    g->runs[*nruns] = (dm_run){.seq = j->seq->fs, .ids = ids, .n = n, .logits = nlogits ? j->logits : NULL, .nlogits = nlogits, .tentative = j->drafts};
    j->rows = n;
    (*nruns)++;
}

/* Drafts worth running: each is one more token at most, and the last token of a turn may be one. */
static int drafts_wanted(const dm_engine *g, const job *j, int depth)
{
    int64_t room = g->f->ctx_tokens_max - (int64_t)j->seq->ids.n - 1, left = j->max_new - j->decoded;
    int64_t n = left < room ? left : room;
    return n < depth ? (int)n : depth;
}

/* Drafts for the first n of the jobs that decode, in the order of their turn, with `spare` rows for them. */
static void draft(dm_engine *g, int n, int depth, int spare)
{
    int count = 0;
    for (int k = 0; k < g->nactive && n > 0 && spare > 0; k++) {
        job *j = g->active[(g->turn + k) % g->nactive];
        if (j->phase == PREFILL) continue;
        n--;
        int want = j->phase == DECODE ? drafts_wanted(g, j, depth < spare ? depth : spare) : 0;
        if (want < 1) continue;
        g->drafts[count] = (dm_draft){.seq = j->seq->fs, .id = j->row_id[0], .want = want, .ids = j->row_id + 1};
        g->in_step[count++] = j;
        spare -= want;
    }
    if (!count || g->f->ops->draft(g->f, g->drafts, count, NULL) < 0) return;
    for (int i = 0; i < count; i++) g->in_step[i]->drafts = g->drafts[i].got;
}

static int form_step(dm_engine *g)
{
    int nruns = 0, budget = g->chunk, decoding = 0, waiting = 0;
    for (int i = 0; i < g->nactive; i++) {
        job *j = g->active[i];
        j->rows = j->drafts = 0;
        if (j->phase == PREFILL) waiting++;
        else decoding++;
    }
    int keep = waiting && budget > 1; /* one row at least for who prefills, however many decode */
    if (decoding > budget - keep) decoding = budget - keep;
    int depth = decoding ? spec_depth(&g->spec, decoding) : 0;
    if (depth) draft(g, decoding, depth, budget - keep - decoding);
    for (int k = 0; k < g->nactive && decoding > 0; k++) {
        job *j = g->active[(g->turn + k) % g->nactive];
        if (j->phase == PREFILL) continue;
        /* Behind a stop token nobody samples: its logits are not worth the head. */
        bool want = j->phase == DECODE || j->end != DM_END_STOP;
        add_run(g, j, &nruns, j->row_id, 1 + j->drafts, want ? 1 + j->drafts : 0);
        budget -= j->rows;
        decoding--;
    }
    for (int k = 0; k < g->nactive && budget > 0; k++) {
        job *j = g->active[(g->turn + k) % g->nactive];
        if (j->phase != PREFILL || j->rows) continue;
        int n = prefill_rows(g, j, budget);
        bool last = j->fed + (size_t)n == j->feed.n;
        add_run(g, j, &nruns, j->feed.p + j->fed, n, last ? 1 : 0);
        budget -= n;
    }
    g->turn = g->nactive ? (g->turn + 1) % g->nactive : 0;
    return nruns;
}

static bool append_ids(job *j, const int32_t *ids, int n, dm_err *e)
{
    if (dm_ids_append(&j->seq->ids, ids, (size_t)n) == 0) return true;
    dm_err_set(e, DM_ENOMEM, "engine", "out of memory");
    return false;
}

/* E4: of the step's rows the first `keep` stay; logits are of the last of them. */
static void settle(dm_engine *g, job *j, int keep, const float *logits)
{
    if (!j->drafts) return;
    dm_err err = {0};
    int64_t pos = g->f->ops->seq_pos(j->seq->fs) - (1 + j->drafts) + keep;
    int rc = g->f->ops->retreat(g->f, j->seq->fs, pos, logits, &err);
    if (rc < 0) dm_log(DM_LOG_ERROR, "engine: %s", err.text);
    DM_ASSERT(rc == 0); /* the position lies among the rows that were run */
}

static void count_drafts(dm_engine *g, int drafted, int64_t accepted)
{
    if (!drafted) return;
    pthread_mutex_lock(&g->lock);
    g->stat.drafted += drafted;
    g->stat.accepted += accepted;
    pthread_mutex_unlock(&g->lock);
}

/* Behind a step that ran row_id[0] and perhaps drafts: see the top of the file. */
static void after_decode(dm_engine *g, job *j)
{
    dm_err err = {0};
    int32_t run[1 + DM_DRAFT_MAX];
    int drafts = j->drafts, keep = 1;
    int64_t accepted = j->accepted;
    const float *logits = j->logits;
    sampled s;
    memcpy(run, j->row_id, sizeof run);
    j->drafted += drafts;
    for (;; keep++, logits += g->f->vocab) {
        s = append_ids(j, &run[keep - 1], 1, &err) ? SAMPLED : FAILED;
        if (s == FAILED) break;
        if (j->phase == TAIL) { /* the last token, and its row has been run */
            s = OVER;
            if (j->end == DM_END_STOP) logits = NULL; /* as plain decode leaves it */
            break;
        }
        export_blocks(g, j);
        s = sample(g, j, logits, &err);
        if (s != SAMPLED || keep > drafts || j->row_id[0] != run[keep]) break;
        j->accepted++;
    }
    settle(g, j, keep, logits);
    count_drafts(g, drafts, j->accepted - accepted);
    if (s == OVER) finish(g, j, j->end, NULL);
    else if (s == FAILED) finish(g, j, DM_END_ERROR, &err);
}

static void job_after_step(dm_engine *g, job *j)
{
    dm_seq *s = j->seq;
    dm_err err = {0};
    if (j->phase == DECODE) {
        after_decode(g, j);
        return;
    }
    if (!append_ids(j, j->phase == PREFILL ? j->feed.p + j->fed : j->row_id, j->rows, &err)) {
        finish(g, j, DM_END_ERROR, &err);
        return;
    }
    if (j->phase == TAIL) {
        finish(g, j, j->end, NULL);
        return;
    }
    j->fed += (size_t)j->rows;
    j->prefilled += j->rows;
    export_blocks(g, j);
    j->event(j->ctx, &(dm_gen_event){.kind = DM_GEN_PROGRESS, .done = (int64_t)j->fed, .total = (int64_t)j->feed.n, .prefilled = j->prefilled});
    if (j->fed < j->feed.n) {
        if ((int64_t)s->ids.n % g->state_interval == 0) export_state(g, j);
        return;
    }
    if (j->max_new) export_state(g, j); /* with max_new = 0 the end of the input is the end: finish() does it */
    sample_first(g, j);
}

/* What a step with drafts has no room for may have room without. */
static int step(dm_engine *g, int nruns, dm_err *e)
{
    bool drafts = false;
    for (int i = 0; i < nruns; i++) drafts |= g->runs[i].tentative > 0;
    int rc = g->f->ops->step(g->f, g->runs, nruns, e);
    if (!drafts || (rc != DM_ELIMIT && rc != DM_ENOMEM)) return rc;
    for (int i = 0; i < g->nactive; i++) {
        g->active[i]->rows -= g->active[i]->drafts;
        g->active[i]->drafts = 0;
    }
    for (int i = 0; i < nruns; i++) {
        dm_run *r = &g->runs[i];
        if (r->tentative) r->n = r->nlogits = 1, r->tentative = 0;
    }
    if (e) *e = (dm_err){0};
    return g->f->ops->step(g->f, g->runs, nruns, e);
}

static void run_step(dm_engine *g)
{
    uint64_t began = dm_now_ns();
    int nruns = form_step(g);
    if (!nruns) return;
    dm_err err = {0};
    int rc = step(g, nruns, &err);
    int n = 0, decoding = 0;
    int64_t rows_prefill = 0, rows_decode = 0;
    for (int i = 0; i < g->nactive; i++) {
        job *j = g->active[i];
        if (!j->rows) continue;
        *(j->phase == PREFILL ? &rows_prefill : &rows_decode) += j->rows;
        decoding += j->phase != PREFILL;
        g->in_step[n++] = j;
    }
    pthread_mutex_lock(&g->lock);
    g->stat.steps++;
    g->stat.rows_prefill += rows_prefill;
    g->stat.rows_decode += rows_decode;
    pthread_mutex_unlock(&g->lock);
    g->sampled = 0;
    for (int i = 0; i < n; i++) {
        if (rc < 0) finish(g, g->in_step[i], DM_END_ERROR, &err);
        else job_after_step(g, g->in_step[i]);
    }
    if (rc == 0 && decoding && !rows_prefill) spec_note(&g->spec, decoding, g->sampled, dm_now_ns() - began);
}

/* Cancelled jobs that hold no unreported token end before the step; one that decodes runs its token first. */
static void handle_cancels(dm_engine *g)
{
    for (int i = g->nactive - 1; i >= 0; i--) {
        job *j = g->active[i];
        if (!atomic_load(&j->cancel)) continue;
        if (j->phase == PREFILL) finish(g, j, DM_END_CANCEL, NULL);
        else if (j->phase == DECODE) j->phase = TAIL, j->end = DM_END_CANCEL;
    }
}

/* A job without new tokens samples from the logits that the sequence kept. */
static void start_job(dm_engine *g, job *j)
{
    j->start_ns = dm_now_ns();
    g->active[g->nactive++] = j;
    if (j->feed.n) return;
    const float *kept = g->f->ops->seq_logits(j->seq->fs);
    if (!kept && j->max_new) {
        dm_err err;
        dm_err_set(&err, DM_ESTATE, "engine", "nothing to go on from: no new tokens and no stored logits");
        finish(g, j, DM_END_ERROR, &err);
        return;
    }
    if (kept) memcpy(j->logits, kept, sizeof(float) * (size_t)g->f->vocab);
    sample_first(g, j);
}

static void *engine_main(void *arg)
{
    dm_engine *g = arg;
    for (;;) {
        pthread_mutex_lock(&g->lock);
        while (!g->queue_head && !g->nactive && !g->stopping) pthread_cond_wait(&g->wake, &g->lock);
        job *fresh = g->queue_head;
        g->queue_head = g->queue_tail = NULL;
        bool stopping = g->stopping;
        pthread_mutex_unlock(&g->lock);
        while (fresh) {
            job *j = fresh;
            fresh = j->next;
            if (stopping) atomic_store(&j->cancel, true);
            start_job(g, j);
        }
        if (stopping)
            for (int i = 0; i < g->nactive; i++) atomic_store(&g->active[i]->cancel, true);
        handle_cancels(g);
        run_step(g);
        if (stopping && !g->nactive) return NULL;
    }
}

/* ---- public ---------------------------------------------------------------------------------------------------- */

int dm_engine_create(dm_engine **out, dm_forward *f, const dm_engine_opts *o, dm_err *e)
{
    *out = NULL;
    if (o && (o->speculate < DM_SPECULATE_AUTO || o->speculate > DM_DRAFT_MAX))
        return dm_err_set(e, DM_EINVAL, "engine", "%d drafted tokens; 0 to %d are possible, or %d", o->speculate, DM_DRAFT_MAX, DM_SPECULATE_AUTO);
    dm_engine *g = dm_calloc(1, sizeof *g);
    if (!g) return dm_err_set(e, DM_ENOMEM, "engine", "out of memory");
    g->f = f;
    g->chunk = o && o->chunk_tokens > 0 && o->chunk_tokens < f->rows_max ? o->chunk_tokens : f->rows_max;
    g->state_interval = o && o->state_interval > 0 ? o->state_interval : STATE_INTERVAL_DEFAULT;
    g->jobs_max = o && o->jobs_max > 0 ? o->jobs_max : JOBS_MAX_DEFAULT;
    spec_init(&g->spec, o ? o->speculate : 0, f->ops->draft && f->ops->retreat ? f->draft_max : 0);
    pthread_mutex_init(&g->lock, NULL);
    pthread_cond_init(&g->wake, NULL);
    g->active = dm_calloc((size_t)g->jobs_max, sizeof *g->active);
    g->in_step = dm_calloc((size_t)g->jobs_max, sizeof *g->in_step);
    g->runs = dm_calloc((size_t)g->jobs_max, sizeof *g->runs);
    g->drafts = dm_calloc((size_t)g->jobs_max, sizeof *g->drafts);
    int rc = g->active && g->in_step && g->runs && g->drafts ? 0 : dm_err_set(e, DM_ENOMEM, "engine", "out of memory");
    if (rc == 0 && (rc = -pthread_create(&g->thread, NULL, engine_main, g)) < 0) dm_err_sys(e, -rc, "engine", "cannot start the engine thread");
    if (rc < 0) {
        dm_free(g->active);
        dm_free(g->in_step);
        dm_free(g->runs);
        dm_free(g->drafts);
        dm_free(g);
        return rc;
    }
    *out = g;
    return 0;
}

void dm_engine_destroy(dm_engine *g)
{
    if (!g) return;
    pthread_mutex_lock(&g->lock);
    g->stopping = true;
    pthread_cond_signal(&g->wake);
    pthread_mutex_unlock(&g->lock);
    pthread_join(g->thread, NULL);
    pthread_mutex_destroy(&g->lock);
    pthread_cond_destroy(&g->wake);
    dm_free(g->active);
    dm_free(g->in_step);
    dm_free(g->runs);
    dm_free(g->drafts);
    dm_free(g);
}

int dm_seq_create(dm_engine *g, dm_seq **out, dm_err *e)
{
    *out = NULL;
    dm_seq *s = dm_calloc(1, sizeof *s);
    if (!s) return dm_err_set(e, DM_ENOMEM, "engine", "out of memory");
    int rc = g->f->ops->seq_create(g->f, &s->fs, e);
    if (rc < 0) {
        dm_free(s);
        return rc;
    }
    *out = s;
    return 0;
}

void dm_seq_destroy(dm_engine *g, dm_seq *s)
{
    if (!s) return;
    pthread_mutex_lock(&g->lock);
    bool busy = s->job != NULL;
    pthread_mutex_unlock(&g->lock);
    DM_ASSERT(!busy);
    g->f->ops->seq_destroy(g->f, s->fs);
    dm_ids_free(&s->ids);
    dm_free(s);
}

int64_t dm_seq_pos(const dm_seq *s) { return (int64_t)s->ids.n; }
const int32_t *dm_seq_ids(const dm_seq *s) { return s->ids.p; }

int dm_seq_block_load(dm_engine *g, dm_seq *s, int64_t i, const int32_t *ids, const void *bytes, dm_err *e)
{
    if (i != s->exported || (int64_t)s->ids.n != i * DM_BLOCK_TOKENS)
        return dm_err_set(e, DM_ESTATE, "engine", "block %lld is not the next one of this sequence", (long long)i);
    int rc = dm_ids_append(&s->ids, ids, DM_BLOCK_TOKENS);
    if (rc < 0) return dm_err_set(e, rc, "engine", "out of memory");
    rc = g->f->ops->block_load(g->f, s->fs, i, bytes, e);
    if (rc < 0) s->ids.n -= DM_BLOCK_TOKENS;
    else s->exported++;
    return rc;
}

int dm_seq_state_load(dm_engine *g, dm_seq *s, int64_t pos, const int32_t *tail, const void *bytes, size_t n, dm_err *e)
{
    int64_t rest = pos - s->exported * DM_BLOCK_TOKENS;
    if (rest < 0 || rest >= DM_BLOCK_TOKENS || (int64_t)s->ids.n != s->exported * DM_BLOCK_TOKENS)
        return dm_err_set(e, DM_ESTATE, "engine", "a state at %lld does not follow %lld blocks", (long long)pos, (long long)s->exported);
    int rc = dm_ids_append(&s->ids, tail, (size_t)rest);
    if (rc < 0) return dm_err_set(e, rc, "engine", "out of memory");
    rc = g->f->ops->state_load(g->f, s->fs, bytes, n, e);
    if (rc == 0 && g->f->ops->seq_pos(s->fs) != pos)
        rc = dm_err_set(e, DM_EFORMAT, "engine", "the state says position %lld, its key says %lld", (long long)g->f->ops->seq_pos(s->fs), (long long)pos);
    if (rc < 0) s->ids.n -= (size_t)rest;
    return rc;
}

/* Copies of everything that the caller may free after submit. */
static job *job_new(const dm_engine *g, dm_seq *s, const dm_gen *gen)
{
    job *j = dm_calloc(1, sizeof *j);
    if (!j) return NULL;
    *j = (job){.seq = s, .max_new = gen->max_new, .nstop = gen->nstop, .sampler = gen->sampler, .sink = gen->sink, .ctx = gen->ctx,
               .event = gen->event, .hook = gen->hook, .mask = gen->mask, .logprobs = gen->logprobs, .top_logprobs = gen->top_logprobs};
    j->stop = dm_malloc(sizeof(int32_t) * (gen->nstop + 1));
    size_t row = sizeof(float) * (size_t)g->f->vocab;
    j->logits = dm_malloc(row * (1 + (size_t)spec_deepest(&g->spec)));
    j->masked = gen->mask ? dm_malloc(row) : NULL;
    if (!j->stop || !j->logits || (gen->mask && !j->masked) || dm_ids_append(&j->feed, gen->ids, gen->n) < 0) {
        job_free(j);
        return NULL;
    }
    if (gen->nstop) memcpy(j->stop, gen->stop, sizeof(int32_t) * gen->nstop);
    return j;
}

int dm_engine_submit(dm_engine *g, dm_seq *s, const dm_gen *gen, dm_err *e)
{
    for (size_t i = 0; i < gen->n; i++)
        if (gen->ids[i] < 0 || gen->ids[i] >= g->f->vocab)
            return dm_err_set(e, DM_EINVAL, "engine", "token id %d at %zu is outside the vocabulary of %d", gen->ids[i], i, g->f->vocab);
    if (gen->top_logprobs < 0 || gen->top_logprobs > DM_LOGPROBS_MAX)
        return dm_err_set(e, DM_EINVAL, "engine", "logprobs of %d tokens; 0 to %d are possible", gen->top_logprobs, DM_LOGPROBS_MAX);
    job *j = job_new(g, s, gen);
    if (!j) return dm_err_set(e, DM_ENOMEM, "engine", "out of memory");
    int rc = 0;
    pthread_mutex_lock(&g->lock);
    if (s->job) rc = dm_err_set(e, DM_EBUSY, "engine", "this sequence already has a job");
    else if (g->jobs >= g->jobs_max) rc = dm_err_set(e, DM_EBUSY, "engine", "%d jobs are queued already; try again when one has ended", g->jobs);
    else if (g->stopping) rc = dm_err_set(e, DM_ECANCELED, "engine", "the engine is stopping");
    else if ((int64_t)(s->ids.n + gen->n) > g->f->ctx_tokens_max)
        rc = dm_err_set(e, DM_ECONTEXT, "engine", "context is full: %zu tokens are there and %zu more do not fit in %lld", s->ids.n, gen->n, (long long)g->f->ctx_tokens_max);
    if (rc == 0) {
        s->job = j;
        g->jobs++;
        g->stat.jobs++;
        if (g->queue_tail) g->queue_tail->next = j;
        else g->queue_head = j;
        g->queue_tail = j;
        pthread_cond_signal(&g->wake);
    }
    pthread_mutex_unlock(&g->lock);
    if (rc < 0) job_free(j);
    return rc;
}

void dm_engine_cancel(dm_engine *g, dm_seq *s)
{
    pthread_mutex_lock(&g->lock);
    if (s->job) atomic_store(&s->job->cancel, true);
    pthread_mutex_unlock(&g->lock);
}

void dm_engine_stat_get(dm_engine *g, dm_engine_stat *out)
{
    pthread_mutex_lock(&g->lock);
    *out = g->stat;
    pthread_mutex_unlock(&g->lock);
}
