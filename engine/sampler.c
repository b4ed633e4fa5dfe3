/* Sampling one token from logits.
 *
 * Order of the filters: temperature, then top-k, then top-p over what top-k left, then min-p.  top-p keeps the
 * shortest run of most probable tokens whose probabilities reach it; min-p keeps what has at least that share of
 * the most probable one.  The token with the largest logit always stays.  Equal logits are ordered by id, so the
 * outcome depends on the logits and the 8 bytes of state alone.
 *
 * One draw is one step of splitmix64, whatever the filters; greedy takes none. */
#include <math.h>
#include <string.h>

#include "engine/engine.h"

/* Kept by the caller between calls as *scratch. */
typedef struct pick_scratch {
    int cap;
    float *weight; /* [cap] by id; lies behind id[] */
    int32_t id[];  /* [cap] candidates: a heap while they are selected */
} pick_scratch;

void dm_sampler_init(dm_sampler *s, const dm_sample_params *p)
{
    s->params = *p;
    s->rng = p->seed;
}

static pick_scratch *get_scratch(void **scratch, int vocab)
{
    pick_scratch *x = *scratch;
    if (x && x->cap >= vocab) return x;
    pick_scratch *y = dm_malloc(sizeof *y + (size_t)vocab * (sizeof *y->id + sizeof *y->weight));
    if (!y) return NULL;
    dm_free(x);
    y->cap = vocab;
    y->weight = (float *)(y->id + vocab);
    *scratch = y;
    return y;
}

/* First of the largest; -1 if every logit is -inf. */
static int largest(const float *logits, int vocab)
{
    int best = -1;
    for (int i = 0; i < vocab; i++)
        if (logits[i] > -INFINITY && (best < 0 || logits[i] > logits[best])) best = i;
    return best;
}

int dm_logits_nan(const float *logits, int vocab)
{
    for (int i = 0; i < vocab; i++)
        if (isnan(logits[i])) return i;
    return -1;
}

/* ---- candidates, most probable first ---- */

static bool before(const float *logits, int32_t a, int32_t b) { return logits[a] > logits[b] || (logits[a] == logits[b] && a < b); }

static void sift_down(const float *logits, int32_t *h, int n, int i)
{
    int32_t x = h[i];
    for (int c; (c = 2 * i + 1) < n; i = c) {
        if (c + 1 < n && before(logits, h[c + 1], h[c])) c++;
        if (!before(logits, h[c], x)) break;
        h[i] = h[c];
    }
    h[i] = x;
}

/* e^((logit - max) / temperature), 1 for the largest. */
static float weight_of(float logit, float max, double temperature)
{
    double x = ((double)logit - (double)max) / temperature;
    return x < -80 ? 0 : expf((float)x);
}

typedef struct pick {
    const float *logits;
    pick_scratch *x;
    int n;        /* candidates: tokens with a logit above -inf */
    double total; /* of their weights */
} pick;

static void collect(pick *k, int vocab, float max, double temperature)
{
    for (int i = 0; i < vocab; i++) {
        if (!(k->logits[i] > -INFINITY)) continue;
        k->x->id[k->n++] = i;
        k->x->weight[i] = weight_of(k->logits[i], max, temperature);
        k->total += (double)k->x->weight[i];
    }
}

/* Drops candidates so light that all of them together cannot be needed to reach top_p; half of that, so that
 * rounding does not matter.  Saves ordering the long tail. */
static void drop_tail(pick *k, double top_p)
{
    double light = (1 - top_p) * k->total / k->n / 2;
    int kept = 0;
    for (int i = 0; i < k->n; i++)
        if ((double)k->x->weight[k->x->id[i]] >= light) k->x->id[kept++] = k->x->id[i];
    k->n = kept;
}

/* Takes candidates in order, at most `limit`, until their weight reaches `enough`.  They end up at the back of
 * id[], most probable last.  Returns how many; *mass is their weight. */
static int select_top(pick *k, int limit, double enough, double *mass)
{
    int32_t *h = k->x->id;
    int n = k->n, taken = 0;
    for (int i = n / 2; i-- > 0;) sift_down(k->logits, h, n, i);
    for (*mass = 0; n && taken < limit && !(taken && *mass >= enough); taken++) {
        int32_t top = h[0];
        h[0] = h[--n];
        sift_down(k->logits, h, n, 0);
        h[n] = top;
        *mass += (double)k->x->weight[top];
    }
    return taken;
}

/* Draws from id[from..n) by weight; min-p leaves out what is too light beside the largest, whose weight is 1. */
static int draw(const pick *k, int from, double min_p, uint64_t *rng)
{
    double total = 0, u = (double)(dm_splitmix64(rng) >> 11) * 0x1p-53;
    int last = -1;
    for (int i = from; i < k->n; i++) {
        double w = (double)k->x->weight[k->x->id[i]];
        if (w >= min_p) total += w;
    }
    u *= total;
    for (int i = from; i < k->n; i++) {
        double w = (double)k->x->weight[k->x->id[i]];
        if (w < min_p || w <= 0) continue;
        last = k->x->id[i];
        u -= w;
        if (u < 0) break;
    }
    return last;
}

int dm_sampler_pick(dm_sampler *s, const float *logits, int vocab, void **scratch)
{
    const dm_sample_params *p = &s->params;
    int best = dm_logits_nan(logits, vocab) < 0 ? largest(logits, vocab) : -1;
    if (best < 0) return DM_EFORMAT;
    if (!(p->temperature > 0) || isinf(logits[best])) return best;
    if (!scratch) return DM_EINVAL;
    pick k = {.logits = logits, .x = get_scratch(scratch, vocab)};
    if (!k.x) return DM_ENOMEM;
    collect(&k, vocab, logits[best], p->temperature);
    int limit = p->top_k > 0 && p->top_k < k.n ? p->top_k : k.n, taken = k.n;
    double mass = k.total;
    if (p->top_p < 1 && limit < k.n) select_top(&k, limit, INFINITY, &mass); /* top-p is a share of what top-k leaves */
    if (p->top_p < 1 && limit == k.n) drop_tail(&k, p->top_p);
    if (p->top_p < 1) taken = select_top(&k, limit, p->top_p * mass, &mass);
    else if (limit < k.n) taken = select_top(&k, limit, INFINITY, &mass);
    int id = draw(&k, k.n - taken, p->min_p, &s->rng);
    return id < 0 ? best : id;
}

/* ---- logprobs ---- */

/* The n most probable tokens of all, in order.  One pass; n is small. */
static void top_ids(const float *logits, int vocab, dm_logprob *top, int n)
{
    int have = 0;
    for (int i = 0; i < vocab; i++) {
        if (have == n && !before(logits, i, top[n - 1].id)) continue;
        int at = have < n ? have++ : n - 1;
        for (; at > 0 && before(logits, i, top[at - 1].id); at--) top[at] = top[at - 1];
        top[at].id = i;
    }
}

/* The largest, and the log of the sum of e^logit; where +inf is the largest, of the number of those that share the whole. */
typedef struct softmax { double max, log_total; } softmax;

static softmax softmax_of(const float *logits, int vocab)
{
    softmax m = {.max = -INFINITY};
    double sum = 0;
    for (int i = 0; i < vocab; i++)
        if ((double)logits[i] > m.max) m.max = (double)logits[i];
    for (int i = 0; i < vocab; i++) sum += isinf(m.max) ? (double)logits[i] == m.max : exp((double)logits[i] - m.max);
    m.log_total = log(sum) + (isinf(m.max) ? 0 : m.max);
    return m;
}

static float logprob(const softmax *m, float logit)
{
    if (isinf(logit)) return logit > 0 ? (float)-m->log_total : -INFINITY;
    return isinf(m->max) ? -INFINITY : (float)((double)logit - m->log_total);
}

float dm_logprobs(const float *logits, int vocab, int32_t id, dm_logprob *top, int n)
{
    softmax m = softmax_of(logits, vocab);
    if (n > vocab) n = vocab;
    if (n > 0) top_ids(logits, vocab, top, n);
    for (int i = 0; i < n; i++) top[i].logprob = logprob(&m, logits[top[i].id]);
    return logprob(&m, logits[id]);
}
