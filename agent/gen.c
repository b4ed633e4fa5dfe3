/* gen.c — a job on the engine, seen from the loop.
 *
 * The engine thread runs the parser on each token, so that it can stop the job when the call block is closed
 * without a round trip, and leaves text, progress and the end here; the loop takes them when woken.  The wake-up
 * is sent under the lock: once the loop has taken END, the engine thread has finished with this struct. */
#include "agent/agent_int.h"

#include <math.h>
#include <string.h>

#define GEN_PERIODS 32         /* the repetition guard looks for periods of 1..32 tokens */
#define GEN_REPEATED_MAX 1024  /* ... that went on for so many tokens */

int gen_init(gen *g, const dm_tok *tok, uv_async_t *wake, const uint8_t *banned, dm_err *e)
{
    *g = (gen){ .tok = tok, .wake = wake, .banned = banned };
    g->runs = dm_calloc(GEN_PERIODS + 1, sizeof *g->runs);
    if (!g->runs) return dm_err_set(e, DM_ENOMEM, "session", "out of memory");
    if (uv_mutex_init(&g->lock) != 0) {
        dm_free(g->runs);
        g->runs = NULL;
        return dm_err_set(e, DM_ENOMEM, "session", "no mutex");
    }
    return 0;
}

int gen_use_grammar(gen *g, const dm_vocab *v, const dm_parser_opts *tools, dm_err *e)
{
    dm_grammar_opts o = { .thinking = tools->thinking, .tools = tools->tools, .ntools = tools->ntools };
    return dm_grammar_create(&g->grammar, v, &o, e);
}

int gen_use_stops(gen *g, const char *const *texts, size_t n, dm_err *e) { return n ? dm_stop_create(&g->stop, texts, n, e) : 0; }

void gen_items_free(gen_item *it)
{
    while (it) {
        gen_item *next = it->next;
        dm_buf_free(&it->text);
        dm_free(it);
        it = next;
    }
}

void gen_free(gen *g)
{
    if (!g->runs) return;
    dm_parser_destroy(g->parser);
    dm_grammar_destroy(g->grammar);
    dm_stop_destroy(g->stop);
    dm_buf_free(&g->shown);
    dm_ids_free(&g->reply);
    dm_free(g->runs);
    gen_items_free(g->head);
    uv_mutex_destroy(&g->lock);
    memset(g, 0, sizeof *g);
}

/* ---- engine thread ------------------------------------------------------------------------------ */

/* Joins to the last item when it is of the same kind. */
static void push_text(gen *g, gen_item_kind kind, const char *p, size_t n)
{
    uv_mutex_lock(&g->lock);
    gen_item *it = g->tail;
    if (!it || it->kind != kind || kind == GEN_NOTE || kind == GEN_TOKEN) {
        it = dm_calloc(1, sizeof *it);
        if (it) {
            it->kind = kind;
            if (g->tail) g->tail->next = it;
            else g->head = it;
            g->tail = it;
        }
    }
    if (!it || dm_buf_append(&it->text, p, n) < 0) g->lost = true;
    uv_async_send(g->wake);
    uv_mutex_unlock(&g->lock);
}

static void lose(gen *g)
{
    uv_mutex_lock(&g->lock);
    g->lost = true;
    uv_mutex_unlock(&g->lock);
}

/* What may be shown of the text, with ev; without, what was held back for a stop string that did not come after all. */
static void push_content(gen *g, const dm_parse_event *ev)
{
    dm_buf_clear(&g->shown);
    int rc = ev ? dm_stop_feed(g->stop, ev->p, ev->n, &g->shown) : dm_stop_border(g->stop, &g->shown);
    if (rc < 0) lose(g);
    if (g->shown.n) push_text(g, GEN_CONTENT, dm_buf_cstr(&g->shown), g->shown.n);
}

static void on_parse(void *ctx, const dm_parse_event *ev)
{
    gen *g = ctx;
    if (g->stop && ev->kind == DM_PARSE_CONTENT && ev->index >= 0) {
        push_content(g, ev);
        return;
    }
    if (g->stop && dm_stop_found(g->stop)) return; /* behind it, in the same token */
    if (g->stop && ev->kind != DM_PARSE_REPAIR) push_content(g, NULL);
    switch (ev->kind) {
    case DM_PARSE_REASONING: push_text(g, GEN_REASONING, ev->p, ev->n); break;
    case DM_PARSE_CONTENT: push_text(g, GEN_CONTENT, ev->p, ev->n); break;
    case DM_PARSE_REPAIR: push_text(g, GEN_NOTE, ev->p, ev->n); break;
    case DM_PARSE_CALL: case DM_PARSE_ARGS: case DM_PARSE_CALL_END: case DM_PARSE_ERROR: break; /* asked for at the end */
    }
}

/* A model that goes round in circles is stopped before the token limit (T26). */
static bool goes_in_circles(gen *g)
{
    size_t n = g->reply.n;
    for (int period = 1; period <= GEN_PERIODS; period++) {
        bool same = n > (size_t)period && g->reply.p[n - 1] == g->reply.p[n - 1 - (size_t)period];
        g->runs[period] = same ? g->runs[period] + 1 : 0;
        if (g->runs[period] >= GEN_REPEATED_MAX) return true;
    }
    return false;
}

static void push_token(gen *g, const dm_gen_event *ev)
{
    gen_token t = { .id = ev->id, .logprob = ev->logprob, .ntop = ev->ntop };
    if (ev->ntop) memcpy(t.top, ev->top, (size_t)ev->ntop * sizeof *t.top);
    push_text(g, GEN_TOKEN, (const char *)&t, sizeof t);
}

static void on_event(void *ctx, const dm_gen_event *ev)
{
    gen *g = ctx;
    if (ev->kind == DM_GEN_TOKEN) {
        if (dm_ids_push(&g->reply, ev->id) < 0) lose(g);
        if (g->logprobs) push_token(g, ev);
        return;
    }
    uv_mutex_lock(&g->lock);
    if (ev->kind == DM_GEN_PROGRESS) {
        g->progress = true;
        g->done = ev->done;
        g->total = ev->total;
    } else {
        g->end = *ev;
        g->ended = true;
    }
    uv_async_send(g->wake);
    uv_mutex_unlock(&g->lock);
}

/* A grammar that gave up masks nothing any more; a person is told, once in a session. */
static void follow_grammar(gen *g, int32_t id)
{
    if (!g->grammar) return;
    (void)dm_grammar_accept(g->grammar, id); /* out of memory: it has given up */
    const char *why = dm_grammar_gave_up(g->grammar);
    if (!why || g->grammar_told) return;
    g->grammar_told = true;
    push_text(g, GEN_NOTE, why, strlen(why));
}

/* After each sampled token that is not a stop id. */
static bool on_token(void *ctx, int32_t id)
{
    gen *g = ctx;
    size_t n = 0;
    const char *bytes = dm_tok_bytes(g->tok, id, &n);
    if (!g->parser || dm_parser_feed(g->parser, bytes, n, dm_tok_is_special(g->tok, id)) < 0) return true;
    if (dm_parser_block_closed(g->parser) || (g->stop && dm_stop_found(g->stop))) return true;
    follow_grammar(g, id);
    return g->repeated = goes_in_circles(g);
}

/* Tokens that only the template may write: role markers, placeholders.  Sampling one would forge a turn. */
static void on_mask(void *ctx, float *logits, int vocab)
{
    const gen *g = ctx;
    for (int i = 0; i < vocab; i++)
        if (g->banned[i]) logits[i] = -INFINITY;
    if (g->grammar && g->parser) dm_grammar_mask(g->grammar, logits, vocab);
}

/* ---- loop ------------------------------------------------------------------------------------------ */

static int make_parser(gen *g, const gen_job *j, dm_err *e)
{
    dm_parser_destroy(g->parser);
    g->parser = NULL;
    return j->parse ? dm_parser_create(&g->parser, j->parse, on_parse, g, e) : 0;
}

int gen_start(gen *g, const gen_job *j, dm_err *e)
{
    int rc = make_parser(g, j, e);
    if (rc < 0) return rc;
    gen_items_free(g->head);
    g->head = g->tail = NULL;
    g->reply.n = 0;
    if (g->grammar && j->parse) dm_grammar_reset(g->grammar, j->parse->thinking);
    if (g->stop) dm_stop_reset(g->stop);
    g->logprobs = j->logprobs;
    memset(g->runs, 0, (GEN_PERIODS + 1) * sizeof *g->runs);
    g->repeated = g->progress = g->ended = g->lost = false;
    dm_gen job = { .ids = j->ids, .n = j->n, .max_new = j->max_new, .stop = &j->eos, .nstop = 1, .sampler = j->sampler, .sink = j->sink, .logprobs = j->logprobs, .top_logprobs = j->top_logprobs,
                   .ctx = g, .event = on_event, .hook = on_token, .mask = g->banned ? on_mask : NULL };
    return dm_engine_submit(j->engine, j->seq, &job, e);
}

gen_item *gen_take(gen *g, bool *progress, int64_t *done, int64_t *total, bool *ended)
{
    uv_mutex_lock(&g->lock);
    gen_item *list = g->head;
    g->head = g->tail = NULL;
    *progress = g->progress;
    *done = g->done;
    *total = g->total;
    *ended = g->ended;
    g->progress = g->ended = false;
    uv_mutex_unlock(&g->lock);
    return list;
}

void gen_finish_parse(gen *g, bool cut)
{
    if (g->parser && dm_parser_finish(g->parser, cut) < 0) g->lost = true;
    if (g->parser && g->stop) push_content(g, NULL);
}
