/* verify_cmp.c — a run of the exact or the plain path against a file of vectors. */
#include <math.h>
#include <string.h>

#include "engine/verify_int.h"

#define WHERE "verify"
#define PLAIN_LOGIT_MAX 5e-4 /* largest difference of a logit, end to end */

void vfirst_offer(vfirst *f, int order, int64_t pos, const char *fmt, ...) {
    if (f->text[0] && (f->order < order || (f->order == order && f->pos <= pos))) return;
    va_list ap;
    f->order = order, f->pos = pos;
    va_start(ap, fmt);
    vsnprintf(f->text, sizeof f->text, fmt, ap);
    va_end(ap);
}

static const char *position_word(const vname *v) {
    if (v->kind == VN_CUT) return "cut";
    return v->kind == VN_ROWS && (v->tag == FT_ENT || v->tag == FT_INDEX_ENT) ? "entry" : "position";
}

/* ---- numbers for a person -------------------------------------------------------------------------- */

static float bf16_value(const uint8_t *p) {
    uint32_t u = (uint32_t)p[0] << 16 | (uint32_t)p[1] << 24;
    float x;
    memcpy(&x, &u, 4);
    return x;
}

static void value_text(char out[40], model_dtype t, const uint8_t *p) {
    float x;
    int32_t n;
    if (t == MODEL_BF16) snprintf(out, 40, "%.9g", (double)bf16_value(p));
    else if (t == MODEL_F32) memcpy(&x, p, 4), snprintf(out, 40, "%.9g", (double)x);
    else if (t == MODEL_I32) memcpy(&n, p, 4), snprintf(out, 40, "%d", n);
    else snprintf(out, 40, "0x%02x", p[0]);
}

/* Says where in a golden tensor the first difference lies. */
static void offer_place(const vref *f, const vref_tensor *t, const vname *v, const dm_buf *mine, size_t at, vfirst *first) {
    size_t size = (size_t)model_dtype_size(t->dtype), element = at / size;
    size_t per_row = t->ndim > 0 && t->dim[0] > 0 ? (size_t)(t->bytes / t->dim[0]) / size : 1;
    int64_t row = (int64_t)(element / (per_row ? per_row : 1)), pos = vrec_row_pos(f, v, row);
    char have[40], want[40];
    value_text(have, t->dtype, mine->p + element * size);
    value_text(want, t->dtype, t->data + element * size);
    vfirst_offer(first, vname_order(v), pos, "%.120s, %s %lld, element %zu: %s instead of %s", t->name, position_word(v), (long long)pos,
                 element - (size_t)row * per_row, have, want);
}

/* ---- exact ---------------------------------------------------------------------------------------------- */

static bool same_hash(const dm_buf *b, const dm_hash *want) {
    dm_sha256 h;
    dm_hash have;
    dm_sha256_init(&h);
    dm_sha256_add(&h, b->p, b->n);
    dm_sha256_end(&h, &have);
    return dm_hash_equal(&have, want);
}

typedef struct comparison {
    const vref *f;
    dm_verify_report *out;
    vfirst *first;
    double worst_logit; /* plain */
} comparison;
typedef void (*compare_fn)(comparison *k, const vref_tensor *t, const vname *v, const dm_buf *mine);

static void compare_bytes(comparison *k, const vref_tensor *t, const vname *v, const dm_buf *mine) {
    if (!t->data) {
        if (same_hash(mine, &t->sha256)) return;
        vfirst_offer(k->first, vname_order(v), v->kind == VN_CUT ? v->cut : 0, "%.120s: its bytes have another SHA-256", t->name);
    } else {
        size_t at = 0;
        while (at < mine->n && mine->p[at] == t->data[at]) at++;
        if (at == mine->n) return;
        offer_place(k->f, t, v, mine, at, k->first);
    }
    k->out->differ++;
}

/* Puts every tensor of the file together and compares it. */
static int compare_all(comparison *k, const vrec *r, compare_fn fn, dm_err *e) {
    const vref *f = k->f;
    dm_buf mine = {0};
    int rc = 0;
    for (size_t i = 0; i < f->count && rc == 0; i++) {
        const vref_tensor *t = &f->tensor[i];
        vname v;
        dm_err why;
        if (!vname_parse(r->c, t->name, &v)) {
            rc = dm_err_set(e, DM_EFORMAT, WHERE, "tensor %.120s: this configuration has nothing of that name", t->name);
            break;
        }
        k->out->compared++;
        rc = vrec_tensor(r, f, t, &v, &mine, &why);
        if (rc == DM_EMISMATCH) {
            vfirst_offer(k->first, vname_order(&v), 0, "%.250s", why.text);
            k->out->differ++;
            rc = 0;
        } else if (rc == 0) fn(k, t, &v, &mine);
        else if (e) *e = why;
    }
    dm_buf_free(&mine);
    return rc;
}

int verify_exact(const vrec *r, const vref *f, dm_verify_report *out, vfirst *first, dm_err *e) {
    comparison k = {.f = f, .out = out, .first = first};
    return compare_all(&k, r, compare_bytes, e);
}

/* ---- plain ------------------------------------------------------------------------------------------------- */

static bool judged_float(const vname *v) { return v->kind == VN_ROWS && v->tag == FT_LOGITS; }
static bool judged_int(const vname *v) { return v->kind != VN_ROWS || v->tag == FT_ROUTE_ID || v->tag == FT_INDEX_SEL; }

/* Logits within the bound, ids equal.  Other tensors only help to name where a difference begins. */
static void compare_plain(comparison *k, const vref_tensor *t, const vname *v, const dm_buf *mine) {
    if (t->dtype != MODEL_F32) {
        if (judged_int(v)) compare_bytes(k, t, v, mine);
        return;
    }
    double sum = 0, worst = 0;
    size_t n = mine->n / 4, worst_at = 0;
    for (size_t i = 0; i < n; i++) {
        float a, b;
        memcpy(&a, mine->p + 4 * i, 4);
        memcpy(&b, t->data + 4 * i, 4);
        double d = a == b ? 0 : fabs((double)a - (double)b);
        if (isfinite(b)) sum += (double)b * (double)b;
        if (!(d <= worst)) worst = d, worst_at = i;
    }
    double bound = judged_float(v) ? PLAIN_LOGIT_MAX : 1e-3 * sqrt(sum / (double)(n ? n : 1)) + 1e-6;
    if (judged_float(v) && !(worst <= k->worst_logit)) k->worst_logit = worst;
    if (worst <= bound) return;
    if (judged_float(v)) k->out->differ++;
    offer_place(k->f, t, v, mine, worst_at * 4, k->first);
}

int verify_plain(const vrec *r, const vref *f, dm_verify_report *out, vfirst *first, dm_err *e) {
    comparison k = {.f = f, .out = out, .first = first};
    int rc = compare_all(&k, r, compare_plain, e);
    snprintf(out->summary, sizeof out->summary, "largest difference of a logit %.2g (bound %.0e), routes and selections %s", k.worst_logit, PLAIN_LOGIT_MAX,
             out->differ ? "or logits differ" : "equal");
    return rc;
}
