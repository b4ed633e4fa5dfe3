/* The call grammar's public functions; see grammar_int.h for the whole. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/grammar_int.h"

/* ---- giving up ---- */

/* A mask that forbids everything would be worse than none: from here on there is none, and it is said why. */
static void give_up(dm_grammar *g, const char *why)
{
    if (g->mode == MODE_OFF) return;
    g->mode = MODE_OFF;
    snprintf(g->gave_up, sizeof g->gave_up, "%s", why);
}

/* ---- creating ---- */

static int make(dm_grammar *g, const dm_grammar_opts *o, dm_err *e)
{
    const dm_vocab *v = g->v;
    int rc = gr_rules_read(&g->rules, o->tools, o->ntools, e);
    if (rc < 0) return rc;
    g->used = dm_calloc(g->rules.props_max ? g->rules.props_max : 1, sizeof *g->used);
    g->allowed = dm_calloc((size_t)v->vocab / 8 + 1, 1);
    g->walk = dm_malloc(((size_t)v->depth_max + 1) * sizeof *g->walk);
    if (!g->used || !g->allowed || !g->walk) return dm_err_set(e, DM_ENOMEM, "grammar", "out of memory");
    dm_grammar_reset(g, o->thinking);
    return 0;
}

int dm_grammar_create(dm_grammar **out, const dm_vocab *v, const dm_grammar_opts *o, dm_err *e)
{
    *out = NULL;
    dm_grammar *g = dm_calloc(1, sizeof *g);
    if (!g) return dm_err_set(e, DM_ENOMEM, "grammar", "out of memory");
    g->v = v;
    int rc = make(g, o, e);
    if (rc < 0) dm_grammar_destroy(g);
    else *out = g;
    return rc;
}

void dm_grammar_destroy(dm_grammar *g)
{
    if (!g) return;
    gr_rules_free(&g->rules);
    dm_buf_free(&g->key);
    dm_buf_free(&g->keys_text);
    dm_free(g->keys.v);
    dm_free(g->used);
    dm_free(g->allowed);
    dm_free(g->walk);
    dm_free(g);
}

static void call_begins(dm_grammar *g)
{
    memset(g->used, 0, g->rules.props_max * sizeof *g->used);
    g->keys.n = 0;
    dm_buf_clear(&g->keys_text);
}

void dm_grammar_reset(dm_grammar *g, bool thinking)
{
    g->mode = thinking ? MODE_REASON : MODE_CONTENT;
    g->last[0] = g->last[1] = 0;
    g->gave_up[0] = 0;
    g->now.n = 0;
    call_begins(g);
    dm_buf_clear(&g->key);
    if (g->v->dsml < 0) give_up(g, "the tokenizer has no token for the call marker, so calls cannot be guided");
}

/* ---- following tokens ---- */

static int key_order(const void *a, const void *b)
{
    const gr_text *x = a, *y = b;
    int c = memcmp(x->p, y->p, x->n < y->n ? x->n : y->n);
    return c ? c : (x->n > y->n) - (x->n < y->n);
}

/* The free key just read counts as given.  Texts lie one behind the other in a buffer that may move; what: where. */
static int keep_key(dm_grammar *g)
{
    if (g->keys.n == g->keys_cap) {
        uint32_t cap = g->keys_cap ? g->keys_cap * 2 : 8;
        gr_text *v = dm_realloc(g->keys.v, cap * sizeof *v);
        if (!v) return DM_ENOMEM;
        g->keys.v = v;
        g->keys_cap = cap;
    }
    g->keys.v[g->keys.n] = (gr_text){ NULL, (uint32_t)g->key.n, (int32_t)g->keys_text.n };
    int rc = dm_buf_append(&g->keys_text, g->key.p, g->key.n);
    if (rc < 0) return rc;
    g->keys.n++;
    for (uint32_t i = 0; i < g->keys.n; i++) g->keys.v[i].p = g->keys_text.p + g->keys.v[i].what;
    qsort(g->keys.v, g->keys.n, sizeof *g->keys.v, key_order);
    return 0;
}

static const gr_state *find_at(const gr_set *s, gr_at at)
{
    for (int i = 0; i < s->n; i++)
        if (s->s[i].at == at) return &s->s[i];
    return NULL;
}

/* What one unit settled: a call ended, a parameter got its name.  These change only between two marks, each a token
 * of its own, so no token is judged by them before they are known. */
static int settle(dm_grammar *g, const gr_set *before, const gr_set *now, int unit)
{
    if (find_at(now, AT_BLOCK)) call_begins(g);
    const gr_state *named = find_at(now, AT_BOOL), *key = find_at(now, AT_FREE);
    if (key && !key->pos) dm_buf_clear(&g->key);
    if (key && key->pos && !key->num) return dm_buf_byte(&g->key, (uint8_t)unit);
    if (!named || find_at(before, AT_BOOL)) return 0;
    if (named->param >= 0) g->used[named->param] = true;
    return named->param == PARAM_FREE ? keep_key(g) : 0;
}

static int block_unit(dm_grammar *g, int unit)
{
    gr_set next;
    if (unit == U_EOS && find_at(&g->now, AT_DONE)) return 0;
    gr_step_set(g, &g->now, unit, &next);
    if (!next.n) {
        give_up(g, "a token was taken that does not fit the call's structure; the rest of the turn is not guided");
        return 0;
    }
    int rc = settle(g, &g->now, &next, unit);
    g->now.n = 0;
    for (int i = 0; i < next.n; i++) gr_push(&g->now, &next.s[i]);
    return rc;
}

/* May a call begin here?  Behind any '<', since models leave out the empty line before it, but not where markup is
 * quoted. */
static bool may_open(const dm_grammar *g)
{
    return g->mode == MODE_CONTENT && g->rules.names.n && g->last[0] == '<' && !(g->last[1] && strchr("\"'`", g->last[1]));
}

static int content_token(dm_grammar *g, int32_t id, const uint8_t *p, size_t n)
{
    if (id == g->v->dsml && may_open(g)) {
        gr_block_begin(&g->now);
        g->mode = MODE_BLOCK;
        return 0;
    }
    if (id == g->v->think_end) g->mode = MODE_CONTENT;
    for (size_t i = 0; i < n; i++) g->last[1] = g->last[0], g->last[0] = p[i];
    if (id == g->v->think_end) g->last[0] = g->last[1] = 0;
    return 0;
}

int dm_grammar_accept(dm_grammar *g, int32_t id)
{
    size_t n;
    int rc = 0;
    const uint8_t *p = (const uint8_t *)dm_tok_bytes(g->v->tok, id, &n);
    if (g->mode == MODE_OFF) return 0;
    if (g->mode != MODE_BLOCK) return content_token(g, id, p, n);
    if (id == g->v->dsml) rc = block_unit(g, U_DSML);
    else if (id == g->v->think_end) rc = block_unit(g, U_THINK_END);
    else if (id == g->v->eos) rc = block_unit(g, U_EOS);
    else if (!n) give_up(g, "an unknown token was taken inside a call; the rest of the turn is not guided");
    else
        for (size_t i = 0; rc == 0 && i < n && g->mode == MODE_BLOCK; i++) rc = block_unit(g, p[i]);
    if (rc < 0) give_up(g, "out of memory while following a call; the rest of the turn is not guided");
    return rc;
}

/* ---- masking ---- */

static void allow_chain(dm_grammar *g, int32_t id)
{
    for (; id >= 0; id = g->v->next[id]) gr_bit_set(g->allowed, id);
}

/* Marks every token of the trie whose bytes can be read. */
static void walk(dm_grammar *g, const gr_trie *t)
{
    g->walk[0].n = 0;
    for (int i = 0; i < g->now.n; i++) gr_push(&g->walk[0], &g->now.s[i]);
    for (uint32_t i = 0; i < t->n;) {
        const gr_node *node = &t->nodes[i];
        gr_step_set(g, &g->walk[node->depth - 1], node->byte, &g->walk[node->depth]);
        if (!g->walk[node->depth].n) {
            i = node->end;
            continue;
        }
        allow_chain(g, node->token);
        i++;
    }
}

static bool unit_fits(dm_grammar *g, int unit)
{
    gr_set *next = &g->walk[0];
    gr_step_set(g, &g->now, unit, next);
    return next->n > 0;
}

static const gr_state *in_string(const gr_set *s)
{
    for (int i = 0; i < s->n; i++)
        if (s->s[i].at == AT_STRING && !s->s[i].escape) return &s->s[i];
    return NULL;
}

/* The allowed tokens of the place in a block.  In text all but NUL and the end; in a JSON string the plain ones need
 * no look. */
static void find_allowed(dm_grammar *g)
{
    const dm_vocab *v = g->v;
    size_t bytes = (size_t)v->vocab / 8 + 1;
    if (find_at(&g->now, AT_RAW)) {
        memset(g->allowed, 0xFF, bytes);
        for (size_t i = 0; i < ((size_t)v->vocab + 7) / 8; i++) g->allowed[i] &= (uint8_t)~v->nul[i];
    } else if (in_string(&g->now)) {
        memcpy(g->allowed, v->plain, ((size_t)v->vocab + 7) / 8);
        walk(g, &v->quoted);
    } else {
        memset(g->allowed, 0, bytes);
        walk(g, &v->all);
    }
    const struct { int id, unit; } marks[] = { { v->dsml, U_DSML }, { v->think_end, U_THINK_END }, { v->eos, U_EOS } };
    for (size_t i = 0; i < DM_COUNT(marks); i++) {
        if (marks[i].id < 0) continue;
        bool fits = marks[i].unit == U_EOS ? find_at(&g->now, AT_DONE) != NULL : unit_fits(g, marks[i].unit);
        if (fits) gr_bit_set(g->allowed, marks[i].id);
        else g->allowed[marks[i].id >> 3] &= (uint8_t)~(1u << (marks[i].id & 7));
    }
}

/* Not if nothing else is left to sample. */
static void forbid_mark(const dm_grammar *g, float *logits, int vocab)
{
    for (int i = 0; i < vocab && g->v->dsml < vocab; i++) {
        if (i == g->v->dsml || !(logits[i] > -INFINITY)) continue;
        logits[g->v->dsml] = -INFINITY;
        return;
    }
}

void dm_grammar_mask(dm_grammar *g, float *logits, int vocab)
{
    bool any = false;
    if (g->mode == MODE_OFF) return;
    if (g->mode != MODE_BLOCK) {
        if (!may_open(g)) forbid_mark(g, logits, vocab);
        return;
    }
    find_allowed(g);
    int known = vocab < g->v->vocab ? vocab : g->v->vocab;
    for (int32_t i = 0; !any && i < known; i++) any = gr_bit(g->allowed, i) && logits[i] > -INFINITY;
    if (!any) {
        give_up(g, "no token of this tokenizer can continue the call; the rest of the turn is not guided");
        return;
    }
    for (int32_t i = 0; i < known; i++)
        if (!gr_bit(g->allowed, i)) logits[i] = -INFINITY;
    for (int32_t i = known; i < vocab; i++) logits[i] = -INFINITY;
}

bool dm_grammar_in_call(const dm_grammar *g) { return g->mode == MODE_BLOCK; }
const char *dm_grammar_gave_up(const dm_grammar *g) { return g->gave_up[0] ? g->gave_up : NULL; }
