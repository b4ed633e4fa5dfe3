/* spec.c — see spec_int.h. */
#include "engine/spec_int.h"

#define MARGIN 0.95     /* a neighbour must need no more than that share of the time */
#define WAIT_FIRST 64   /* steps before a second trial */
#define COUNTED_MAX 256 /* steps that the rate in use is an average of, roughly */

void spec_init(spec *s, int speculate, int draft_max)
{
    *s = (spec){.fixed = speculate, .max = draft_max};
    if (speculate > draft_max) s->fixed = draft_max;
    if (draft_max <= 0) s->fixed = s->max = 0;
    if (s->max > SPEC_AUTO_MAX && s->fixed == DM_SPECULATE_AUTO) s->max = SPEC_AUTO_MAX;
    for (int i = 0; i < SPEC_LOADS; i++) s->load[i].wait = SPEC_TRIAL;
}

int spec_deepest(const spec *s) { return s->fixed >= 0 ? s->fixed : s->max; }

static int load_of(int jobs) { return jobs < SPEC_LOADS ? jobs - 1 : SPEC_LOADS - 1; }

int spec_depth(const spec *s, int jobs) { return s->fixed >= 0 ? s->fixed : s->load[load_of(jobs)].trial; }

static void count(spec_count *c, int64_t tokens, uint64_t ns)
{
    c->steps++;
    c->tokens += tokens;
    c->ns += ns;
}

static double ns_per_token(const spec_count *c) { return c->tokens ? (double)c->ns / (double)c->tokens : 0; }

/* The neighbour whose turn it is, or the other one at an end. */
static int neighbour(spec_load *l, int max)
{
    int n = l->shallower ? l->depth - 1 : l->depth + 1;
    if (n < 0) n = l->depth + 1;
    if (n > max) n = l->depth - 1;
    l->shallower = !l->shallower;
    return n;
}

static void end_trial(spec_load *l)
{
    bool better = ns_per_token(&l->tried) < MARGIN * ns_per_token(&l->in_use);
    if (better) {
        l->shallower = l->trial < l->depth; /* further on the same way */
        l->depth = l->trial;
        l->in_use = l->tried;
        l->wait = SPEC_TRIAL;
    } else {
        l->trial = l->depth;
        l->wait = l->wait < WAIT_FIRST ? WAIT_FIRST : l->wait * 2 < SPEC_WAIT_MAX ? l->wait * 2 : SPEC_WAIT_MAX;
    }
    l->held = 0;
}

void spec_note(spec *s, int jobs, int64_t tokens, uint64_t ns)
{
    spec_load *l = &s->load[load_of(jobs)];
    if (s->fixed >= 0 || s->max == 0) return;
    if (l->trial != l->depth) {
        count(&l->tried, tokens, ns);
        if (l->tried.steps >= SPEC_TRIAL) end_trial(l);
        return;
    }
    if (l->in_use.steps >= COUNTED_MAX) l->in_use = (spec_count){l->in_use.steps / 2, l->in_use.tokens / 2, l->in_use.ns / 2};
    count(&l->in_use, tokens, ns);
    if (++l->held < l->wait) return;
    l->trial = neighbour(l, s->max);
    l->tried = (spec_count){0};
}
