/* forward_phase.c — a phase is a list of groups; a group is one function over a range of items, cut into tasks. */
#include "engine/forward_int.h"

#define COST_ALONE 300e3 /* below this many multiply-adds (some 50 µs) waking others costs more than it brings */
#define TASKS_EACH 4     /* tasks per worker and group, so that uneven ones even out */

kern_mat fwd_mat(const model_mat *m) {
    return (kern_mat){.type = m->bf16 ? KERN_W_BF16 : m->fp4 ? KERN_W_FP4 : KERN_W_FP8, .w = m->w, .scale = m->scale, .out = m->out, .in = m->in};
}
kern_mat fwd_bf16(const uint16_t *w, int out, int in) { return (kern_mat){.type = KERN_W_BF16, .w = w, .out = out, .in = in}; }
kern_mat fwd_f32(const float *w, int out, int in) { return (kern_mat){.type = KERN_W_F32, .w = w, .out = out, .in = in}; }

void phase_add(fwd *f, fwd_fn fn, const void *arg, int64_t items, int64_t grain, double cost) {
    if (items <= 0) return;
    DM_ASSERT(f->groups < f->groups_cap);
    if (grain <= 0) {
        int64_t tasks = (int64_t)workers_count(f->workers) * TASKS_EACH;
        grain = (items + tasks - 1) / tasks;
    }
    f->group[f->groups++] = (fwd_group){.fn = fn, .arg = arg, .items = items, .grain = grain};
    f->cost += cost;
}

/* Items of a linear are tiles of four outputs. */
static void linear_tiles(fwd *f, const void *arg, int64_t begin, int64_t end, void *scratch) {
    kern_linear p = *(const kern_linear *)arg;
    int out_end = p.out_end;
    p.out_begin += (int)(begin * 4);
    p.out_end = p.out_begin + (int)((end - begin) * 4);
    if (p.out_end > out_end) p.out_end = out_end;
    p.work = scratch;
    f->k->linear(&p);
}

void phase_linear(fwd *f, const kern_linear *p) {
    int outs = p->out_end - p->out_begin;
    if (p->rows <= 0 || outs <= 0) return;
    DM_ASSERT(f->linears < f->groups_cap);
    kern_linear *copy = &f->linear[f->linears++];
    *copy = *p;
    copy->x_bf16 = f->round; /* every input of a linear was rounded */
    phase_add(f, linear_tiles, copy, (outs + 3) / 4, 0, (double)outs * p->w.in * (p->rows + 2));
}

static void run_task(void *ctx, int64_t task, void *scratch) {
    fwd *f = ctx;
    int lo = 0, hi = f->groups - 1;
    while (lo < hi) { /* last group whose first task is not above `task` */
        int mid = (lo + hi + 1) / 2;
        if (f->group[mid].task0 <= task) lo = mid;
        else hi = mid - 1;
    }
    const fwd_group *g = &f->group[lo];
    int64_t begin = (task - g->task0) * g->grain, end = begin + g->grain;
    g->fn(f, g->arg, begin, end < g->items ? end : g->items, scratch);
}

void phase_run(fwd *f) {
    int64_t tasks = 0;
    for (int i = 0; i < f->groups; i++) {
        fwd_group *g = &f->group[i];
        g->task0 = tasks;
        tasks += (g->items + g->grain - 1) / g->grain;
    }
    if (f->cost < COST_ALONE) workers_run_here(f->workers, tasks, run_task, f);
    else workers_run(f->workers, tasks, run_task, f);
    f->groups = f->linears = 0;
    f->cost = 0;
}
