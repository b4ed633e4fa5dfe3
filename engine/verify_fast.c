/* verify_fast.c — a float32 path judged sublayer by sublayer.
 *
 * The activations are quantised to FP8 before nearly every matrix, so one flipped code changes the output visibly
 * and errors saturate within two layers: end to end a good float32 program and a wrong one look alike.  So each
 * sublayer is fed the input that the exact path had (teacher forcing), and what it makes of it is compared:
 *
 *   attention output    rms error / rms <= 0.012, worst row <= 0.06
 *   MoE output          rms error / rms <= 0.001, worst row <= 0.02
 *   K, S rows           within 1e-6 of Σ|w·x|
 *   window rows         98 % byte-equal; c4 entries 95 %; index keys 99 %; all others within one code step
 *   rows and keys that a debug switch keeps in bf16 or float: within a bf16 step, or 1e-4 of the row's rms
 *   router set          equal unless the margin is below 1e-5
 *   top-k set           equal unless the margin is within one bf16 step of 0
 *
 * One flipped FP8 or FP4 code on the way to an index query moves all scores of that row, so a row whose query or
 * head weights are not the exact path's may select otherwise too; at least 99 % of these rows must be equal.
 * A row whose set was allowed to differ is left out of the outputs' errors.  Every sublayer must have shown every row.
 *
 * An ffn.y of exactly 0 is no gap: with the input forced, codes times codes under powers of two mostly add up without
 * any rounding in float32, so a short run of a small model often gives the exact path's bytes. */
#include <math.h>
#include <string.h>

#include "engine/verify_int.h"

#define WHERE "verify"
#define ATTN_RMS_MAX 0.012
#define ATTN_ROW_MAX 0.06
#define FFN_RMS_MAX 0.001
#define FFN_ROW_MAX 0.02
#define FOLD_MAX 1e-6
#define WINDOW_EQUAL_MIN 0.98
#define ENTRY_EQUAL_MIN 0.95
#define INDEX_EQUAL_MIN 0.99
#define QUERY_EQUAL_MIN 0.99
#define ROUTE_MARGIN 1e-5
#define LOGITS_SMOKE_MAX 0.4 /* end to end, rms Δ / std */
#define SMOKE_ROWS_MIN 8     /* fewer chosen positions say nothing */

typedef struct output_error { double err, ref, worst; int64_t worst_pos, rows, excused; } output_error; /* sums of squares */
typedef struct equal_count { int64_t rows, equal; } equal_count;

#define EXCUSED_SELECT 1 /* its selection differs, and may */
#define EXCUSED_ROUTE 2
#define OTHER_QUERY 4    /* its index query or head weights differ */

typedef struct judge {
    const vrec *exact;
    const model_weights *w;
    const dm_config *c;
    dm_verify_report *out;
    vfirst *first;
    output_error *attn, *ffn;        /* [layers + 1] */
    uint8_t *excused;                /* [layers + 1][n]: EXCUSED_… */
    equal_count window, entry4, entry128, index, query;
    bool float_keys; /* index queries are rounded nowhere */
    double fold_worst;
    int64_t route_ties, select_ties, select_drift;
    double logit_err, logit_sum, logit_sum2; /* smoke */
    int64_t logits, logit_rows;
    int rc;
} judge;

static uint8_t *flags(judge *j, int layer, int64_t pos) { return &j->excused[(int64_t)layer * j->exact->n + pos]; }

/* ---- what went wrong ---------------------------------------------------------------------------- */

static void blame(judge *j, forward_tag tag, int layer, int64_t pos, const char *fmt, ...) DM_PRINTF(5, 6);
static void blame(judge *j, forward_tag tag, int layer, int64_t pos, const char *fmt, ...) {
    vname v = {.kind = VN_ROWS, .tag = tag, .layer = layer, .mtp = layer == j->c->num_hidden_layers};
    char name[96], what[150];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(what, sizeof what, fmt, ap);
    va_end(ap);
    vname_text(j->c, tag, layer, name);
    bool entry = tag == FT_ENT || tag == FT_INDEX_ENT;
    if (pos < 0) vfirst_offer(j->first, vname_order(&v), pos, "%s: %s", name, what);
    else vfirst_offer(j->first, vname_order(&v), pos, "%s, %s %lld: %s", name, entry ? "entry" : "position", (long long)pos, what);
    j->out->differ++;
}

static const void *exact_row(judge *j, forward_tag tag, int layer, int64_t pos, size_t want) {
    size_t n = 0;
    const void *p = vrec_get(j->exact, tag, layer, pos, &n);
    if (p && n == want) return p;
    if (j->rc == 0) blame(j, tag, layer, pos, "the two paths show rows of different size");
    return NULL;
}

/* ---- outputs of sublayers -------------------------------------------------------------------------- */

static void judge_output(judge *j, forward_tag tag, int layer, int64_t pos, const float *have, const float *want) {
    bool attn = tag == FT_ATTN_Y;
    output_error *o = &(attn ? j->attn : j->ffn)[layer];
    double err = 0, ref = 0;
    o->rows++;
    if (*flags(j, layer, pos) & (attn ? EXCUSED_SELECT : EXCUSED_ROUTE)) {
        o->excused++;
        return;
    }
    for (int i = 0; i < j->c->hidden_size; i++) {
        double d = (double)have[i] - (double)want[i];
        err += d * d;
        ref += (double)want[i] * (double)want[i];
    }
    o->err += err, o->ref += ref;
    double row = err == 0 ? 0 : sqrt(err / ref), bound = attn ? ATTN_ROW_MAX : FFN_ROW_MAX;
    if (!(row <= o->worst)) o->worst = row, o->worst_pos = pos;
    if (!(row <= bound)) blame(j, tag, layer, pos, "rms error / rms %.3g, above %g", row, bound);
}

/* ---- compressor rows ----------------------------------------------------------------------------------- */

static double bf16(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, 4);
    return (double)x;
}

/* Σ|w·x| over row r of w, the size of what was summed */
static double magnitude(const uint16_t *w, const float *x, int n) {
    double s = 0;
    for (int i = 0; i < n; i++) s += fabs(bf16(w[i]) * (double)x[i]);
    return s;
}

static void judge_fold(judge *j, forward_tag tag, int layer, int64_t pos, const float *have, const float *want) {
    bool index = tag == FT_INDEX_COMP_K || tag == FT_INDEX_COMP_S, score = tag == FT_COMP_S || tag == FT_INDEX_COMP_S;
    const model_block *b = &j->w->layer[layer];
    const model_compressor *k = index ? &b->indexer.compressor : &b->compressor;
    int D = j->c->hidden_size, wide = k->lanes * k->dim;
    const float *x = exact_row(j, FT_ATTN_X, layer, pos, (size_t)D * sizeof *x), *ape = score ? k->ape + pos % k->ratio * wide : NULL;
    for (int i = 0; i < wide && x; i++) {
        double d = fabs((double)have[i] - (double)want[i]);
        /* |dot| is a lower bound of Σ|w·x|, and nearly always enough */
        if (d <= 1e-7 * fabs((double)want[i] - (ape ? (double)ape[i] : 0))) continue;
        double sum = magnitude((score ? k->wgate : k->wkv) + (int64_t)i * D, x, D) + (ape ? fabs((double)ape[i]) : 0);
        double ratio = d == 0 ? 0 : d / sum;
        if (!(ratio <= j->fold_worst)) j->fold_worst = ratio;
        if (!(ratio <= FOLD_MAX)) {
            blame(j, tag, layer, pos, "channel %d is off by %.3g of the sum of its terms", i, ratio);
            return;
        }
    }
}

/* ---- cache rows --------------------------------------------------------------------------------------------- */

static double e4m3(uint8_t c) {
    int e = c >> 3 & 15, m = c & 7;
    double v = e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return c & 0x80 ? -v : v;
}
static double e4m3_step(uint8_t c) {
    int e = c >> 3 & 15;
    return ldexp(1, (e ? e : 1) - 10);
}
static double e2m1(int c) {
    static const double v[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
    return c & 8 ? -v[c & 7] : v[c & 7];
}
static double e2m1_step(int c) { return (c & 7) < 4 ? 0.5 : (c & 7) < 6 ? 1 : 2; }
static double max2(double a, double b) { return a > b ? a : b; }

/* Two codes under their scales are at most one step apart, the wider of the two counting. */
static bool near_e4m3(uint8_t a, uint8_t sa, uint8_t b, uint8_t sb) {
    double x = ldexp(e4m3(a), sa - 127), y = ldexp(e4m3(b), sb - 127);
    return fabs(x - y) <= max2(ldexp(e4m3_step(a), sa - 127), ldexp(e4m3_step(b), sb - 127));
}
static bool near_e2m1(int a, uint8_t sa, int b, uint8_t sb) {
    double x = ldexp(e2m1(a), sa - 127), y = ldexp(e2m1(b), sb - 127);
    return fabs(x - y) <= max2(ldexp(e2m1_step(a), sa - 127), ldexp(e2m1_step(b), sb - 127));
}
static double bf16_step(double x) {
    int e;
    frexp(x, &e);
    return ldexp(1, e - 8);
}
/* A rotated pair: a step of one value before the rotation reaches both as up to a step at the pair's length, however
 * small they come out; then each is rounded by itself. */
static bool near_pair(const uint8_t *a, const uint8_t *b) {
    double x[2], y[2];
    for (int i = 0; i < 2; i++) x[i] = bf16((uint16_t)(a[2 * i] | a[2 * i + 1] << 8)), y[i] = bf16((uint16_t)(b[2 * i] | b[2 * i + 1] << 8));
    double length = bf16_step(max2(hypot(x[0], x[1]), hypot(y[0], y[1])));
    for (int i = 0; i < 2; i++)
        if (!(fabs(x[i] - y[i]) <= length + bf16_step(max2(fabs(x[i]), fabs(y[i]))))) return false;
    return true;
}

static bool near_row584(const uint8_t *a, const uint8_t *b, int *dim) {
    for (int i = 0; i < 448; i++)
        if (!near_e4m3(a[i], a[576 + i / 64], b[i], b[576 + i / 64])) return *dim = i, false;
    for (int i = 0; i < 64; i += 2)
        if (!near_pair(a + 448 + 2 * i, b + 448 + 2 * i)) return *dim = 448 + i, false;
    return true;
}
static bool near_row68(const uint8_t *a, const uint8_t *b, int *dim) {
    for (int i = 0; i < 128; i++)
        if (!near_e2m1(a[i / 2] >> (i % 2 * 4) & 15, a[64 + i / 32], b[i / 2] >> (i % 2 * 4) & 15, b[64 + i / 32])) return *dim = i, false;
    return true;
}

static bool near_bf16_row(const uint8_t *a, const uint8_t *b, int *dim) {
    float x[512], y[512];
    memcpy(x, a, sizeof x), memcpy(y, b, sizeof y);
    for (int i = 0; i < 512; i++) {
        double length = 0; /* of the rotated pair */
        if (i >= 448) length = max2(hypot((double)x[i & ~1], (double)x[i | 1]), hypot((double)y[i & ~1], (double)y[i | 1]));
        double step = bf16_step(max2(max2(fabs((double)x[i]), fabs((double)y[i])), length));
        if (!(fabs((double)x[i] - (double)y[i]) <= 2 * step)) return *dim = i, false;
    }
    return true;
}
#define FLOAT_KEY_MAX 1e-4
static bool near_floats(const uint8_t *a, const uint8_t *b, size_t n, int *dim) {
    double sum = 0, bound;
    float x, y;
    for (size_t i = 0; i < n; i += 4) memcpy(&y, b + i, 4), sum += (double)y * (double)y;
    bound = FLOAT_KEY_MAX * sqrt(sum / (double)(n / 4)) + 1e-30;
    for (size_t i = 0; i < n; i += 4) {
        memcpy(&x, a + i, 4), memcpy(&y, b + i, 4);
        if (!(fabs((double)x - (double)y) <= bound)) return *dim = (int)(i / 4), false;
    }
    return true;
}

/* By what the row is kept in; *equal: as good as the same bytes. */
static bool near_cache_row(const uint8_t *have, const uint8_t *want, size_t n, bool *equal, int *dim) {
    *equal = memcmp(have, want, n) == 0;
    switch (n) {
    case 584: return *equal || near_row584(have, want, dim);
    case 68: return *equal || near_row68(have, want, dim);
    case 512 * sizeof(float): return *equal = near_bf16_row(have, want, dim); /* finer than FP8, so more rows are a step off */
    default: return *equal = near_floats(have, want, n, dim); /* float keys are rounded nowhere */
    }
}

static void judge_cache(judge *j, forward_tag tag, int layer, int64_t pos, const uint8_t *have, const uint8_t *want, size_t n) {
    equal_count *k = tag == FT_ATTN_KV ? &j->window : tag == FT_INDEX_ENT ? &j->index : j->c->compress_ratio[layer] == 4 ? &j->entry4 : &j->entry128;
    int dim = 0;
    bool equal;
    k->rows++;
    if (!near_cache_row(have, want, n, &equal, &dim))
        blame(j, tag, layer, pos, "dimension %d is more than one code step off", dim);
    if (equal) k->equal++;
}

/* ---- sets -------------------------------------------------------------------------------------------------------- */

static void judge_route(judge *j, int layer, int64_t pos, const void *have, const void *want, size_t n) {
    size_t one;
    if (memcmp(have, want, n) == 0) return;
    const float *margin = vrec_get(j->exact, FT_FFN_MARGIN, layer, pos, &one);
    if (margin && fabs((double)margin[0]) < ROUTE_MARGIN) {
        j->route_ties++;
        *flags(j, layer, pos) |= EXCUSED_ROUTE;
    } else blame(j, FT_ROUTE_ID, layer, pos, "other experts, and the margin is %.3g", margin ? (double)margin[0] : -1.0);
}

/* Queries and head weights count as one row each. */
static void judge_query(judge *j, int layer, int64_t pos, const void *have, const void *want, size_t n) {
    int dim;
    j->query.rows++;
    if (memcmp(have, want, n) == 0 || (j->float_keys && near_floats(have, want, n, &dim))) j->query.equal++;
    else *flags(j, layer, pos) |= OTHER_QUERY;
}

/* The step of bf16 at the score that decides: the smallest selected one. */
static double boundary_step(judge *j, int layer, int64_t pos, const int32_t *sel, size_t count) {
    size_t n;
    const float *score = vrec_get(j->exact, FT_INDEX_SCORE, layer, pos, &n);
    double low = INFINITY;
    for (size_t i = 0; score && i < count; i++)
        if (sel[i] >= 0 && (size_t)sel[i] < n / 4 && (double)score[sel[i]] < low) low = (double)score[sel[i]];
    return isfinite(low) ? bf16_step(low) : 0;
}

static void judge_selection(judge *j, int layer, int64_t pos, const void *have, const void *want, size_t n) {
    size_t one;
    if (memcmp(have, want, n) == 0) return;
    const float *margin = vrec_get(j->exact, FT_INDEX_MARGIN, layer, pos, &one);
    bool tie = margin && (double)margin[0] <= boundary_step(j, layer, pos, want, n / 4);
    if (tie || *flags(j, layer, pos) & OTHER_QUERY) {
        *(tie ? &j->select_ties : &j->select_drift) += 1;
        *flags(j, layer, pos) |= EXCUSED_SELECT;
    } else blame(j, FT_INDEX_SEL, layer, pos, "other entries, and the margin is %.3g", margin ? (double)margin[0] : -1.0);
}

/* ---- the traced run ------------------------------------------------------------------------------------------------- */

static bool judged(forward_tag tag) {
    switch (tag) {
    case FT_ATTN_Y: case FT_FFN_Y: case FT_COMP_K: case FT_COMP_S: case FT_INDEX_COMP_K: case FT_INDEX_COMP_S:
    case FT_ATTN_KV: case FT_ENT: case FT_INDEX_ENT: case FT_INDEX_Q: case FT_INDEX_W: case FT_ROUTE_ID: case FT_INDEX_SEL: return true;
    default: return false;
    }
}

static void judge_row(void *ctx, forward_tag tag, int layer, int64_t pos, const void *data, size_t n) {
    judge *j = ctx;
    if (j->rc < 0 || layer < 0 || !judged(tag)) return;
    const void *want = exact_row(j, tag, layer, pos, n);
    if (!want || n == 0) return;
    j->out->compared++;
    switch (tag) {
    case FT_ATTN_Y:
    case FT_FFN_Y: judge_output(j, tag, layer, pos, data, want); break;
    case FT_ROUTE_ID: judge_route(j, layer, pos, data, want, n); break;
    case FT_INDEX_Q:
    case FT_INDEX_W: judge_query(j, layer, pos, data, want, n); break;
    case FT_INDEX_SEL: judge_selection(j, layer, pos, data, want, n); break;
    case FT_ATTN_KV:
    case FT_ENT:
    case FT_INDEX_ENT: judge_cache(j, tag, layer, pos, data, want, n); break;
    default: judge_fold(j, tag, layer, pos, data, want); break;
    }
}

static void force_row(void *ctx, forward_tag tag, int layer, int64_t pos, float *row) {
    judge *j = ctx;
    size_t n = (size_t)j->c->hidden_size * sizeof *row;
    const void *x = exact_row(j, tag, layer, pos, n);
    if (x) memcpy(row, x, n);
}

/* The end-to-end run only shows whether the parts are put together at all. */
static void smoke_row(void *ctx, forward_tag tag, int layer, int64_t pos, const void *data, size_t n) {
    judge *j = ctx;
    size_t m = 0;
    if (tag != FT_LOGITS || layer >= 0) return;
    const float *want = vrec_get(j->exact, tag, layer, pos, &m), *have = data;
    if (!want || m != n) return;
    for (size_t i = 0; i < n / 4; i++) {
        double d = (double)have[i] - (double)want[i];
        j->logit_err += d * d;
        j->logit_sum += (double)want[i];
        j->logit_sum2 += (double)want[i] * (double)want[i];
    }
    j->logits += (int64_t)(n / 4);
    j->logit_rows++;
}

/* ---- verdict ------------------------------------------------------------------------------------------------------------ */

static double rms(const output_error *o) { return o->err == 0 ? 0 : sqrt(o->err / o->ref); }

/* One rms for a kind of sublayer; figures over all layers, blame on the worst. */
static void judge_rms(judge *j, forward_tag tag, const output_error *o, double bound, double *total, double *worst_row, int64_t *rows) {
    output_error sum = {0};
    int worst = 0, layers = j->c->num_hidden_layers + (j->c->num_nextn_predict_layers > 0);
    for (int l = 0; l < layers; l++) {
        sum.err += o[l].err, sum.ref += o[l].ref, sum.rows += o[l].rows - o[l].excused;
        if (o[l].rows != j->exact->n) blame(j, tag, l, -1, "the run showed %lld rows of %lld", (long long)o[l].rows, (long long)j->exact->n);
        if (!(o[l].worst <= sum.worst)) sum.worst = o[l].worst;
        if (rms(&o[l]) > rms(&o[worst])) worst = l;
    }
    *total = rms(&sum);
    *worst_row = sum.worst;
    *rows = sum.rows;
    if (!(*total <= bound)) blame(j, tag, worst, -1, "rms error / rms %.3g over all layers, above %g", *total, bound);
}

/* At least `least` of the rows byte-equal; one row more may differ, so that short runs can be judged at all. */
static void judge_equal(judge *j, forward_tag tag, const equal_count *k, double least) {
    int64_t allowed = (int64_t)ceil((1 - least) * (double)k->rows);
    if (k->rows - k->equal > allowed)
        blame(j, tag, 0, -1, "%lld of %lld rows byte-equal, below %.0f %%", (long long)k->equal, (long long)k->rows, 100 * least);
}

static double percent(const equal_count *k) { return k->rows ? 100.0 * (double)k->equal / (double)k->rows : 100.0; }

static void verdict(judge *j, const vrun *v) {
    int64_t attn_rows, ffn_rows;
    double attn, attn_row, ffn, ffn_row, n = (double)(j->logits ? j->logits : 1), mean = j->logit_sum / n;
    double smoke = sqrt(j->logit_err / n) / sqrt(max2(j->logit_sum2 / n - mean * mean, 1e-30));
    judge_rms(j, FT_ATTN_Y, j->attn, ATTN_RMS_MAX, &attn, &attn_row, &attn_rows);
    judge_rms(j, FT_FFN_Y, j->ffn, FFN_RMS_MAX, &ffn, &ffn_row, &ffn_rows);
    judge_equal(j, FT_ATTN_KV, &j->window, WINDOW_EQUAL_MIN);
    judge_equal(j, FT_ENT, &j->entry4, ENTRY_EQUAL_MIN);
    judge_equal(j, FT_INDEX_ENT, &j->index, INDEX_EQUAL_MIN);
    judge_equal(j, FT_INDEX_Q, &j->query, QUERY_EQUAL_MIN);
    if (j->logit_rows >= SMOKE_ROWS_MIN && !(smoke <= LOGITS_SMOKE_MAX)) blame(j, FT_LOGITS, -1, -1, "end to end rms Δ / std %.3g, above %g", smoke, LOGITS_SMOKE_MAX);
    snprintf(j->out->summary, sizeof j->out->summary,
             "%s on %lld tokens: attn.y %.2g (worst of %lld rows %.2g), ffn.y %.2g (worst of %lld rows %.2g), K and S %.1g, equal rows: window %.1f %%, c4 %.1f %%, c128 %.1f %%, index keys %.1f %%, index queries %.1f %%; "
             "routes off at ties %lld, selections off at ties %lld and with other queries %lld; logits end to end %.2g",
             v->numerics_id, (long long)v->f->n, attn, (long long)attn_rows, attn_row, ffn, (long long)ffn_rows, ffn_row, j->fold_worst, percent(&j->window), percent(&j->entry4), percent(&j->entry128),
             percent(&j->index), percent(&j->query), (long long)j->route_ties, (long long)j->select_ties, (long long)j->select_drift, smoke);
}

int verify_fast(vrun *v, const vrec *exact, dm_verify_report *out, vfirst *first, dm_err *e) {
    judge j = {.exact = exact, .w = model_weights_of(v->m), .c = dm_model_config(v->m), .out = out, .first = first,
               .float_keys = (v->o->switches & DM_SWITCH_INDEX_F32) != 0};
    size_t layers = (size_t)j.c->num_hidden_layers + 1;
    j.attn = dm_calloc(layers, sizeof *j.attn);
    j.ffn = dm_calloc(layers, sizeof *j.ffn);
    j.excused = dm_calloc(layers * (size_t)v->f->n, 1);
    int rc = j.attn && j.ffn && j.excused ? 0 : dm_err_set(e, DM_ENOMEM, WHERE, "out of memory");
    forward_trace forced = {.ctx = &j, .row = judge_row, .force = force_row}, free_run = {.ctx = &j, .row = smoke_row, .all_logits = true};
    v->streams = exact;
    v->what = "sublayer by sublayer";
    v->trace = &forced;
    if (rc == 0) rc = vrun_go(v, e);
    v->what = "end to end";
    v->trace = &free_run;
    if (rc == 0) rc = vrun_go(v, e);
    if (rc == 0) verdict(&j, v);
    dm_free(j.attn);
    dm_free(j.ffn);
    dm_free(j.excused);
    return rc;
}
