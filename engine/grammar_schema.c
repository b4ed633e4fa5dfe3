/* Tools and their schemas, compiled for the automaton.
 *
 * Every schema becomes a gr_schema with what it says itself (own) and the schemas it refers to.  When all are read,
 * each is flattened into leaves: own merged with every allOf and $ref, once for each alternative of anyOf and oneOf.
 * A schema may hold itself below a property or an item, as trees do; what holds itself without one says nothing.
 *
 * A schema that cannot be followed is widened, never narrowed: the grammar may then allow what the check of the
 * arguments refuses, but it does not forbid what is right. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "engine/grammar_int.h"

struct gr_chunk {
    gr_chunk *next;
    _Alignas(16) uint8_t bytes[];
};

static void *take(gr_rules *r, size_t n)
{
    gr_chunk *c = dm_calloc(1, sizeof *c + n);
    if (!c) return NULL;
    c->next = r->chunks;
    r->chunks = c;
    return c->bytes;
}

void gr_rules_free(gr_rules *r)
{
    while (r->chunks) {
        gr_chunk *next = r->chunks->next;
        dm_free(r->chunks);
        r->chunks = next;
    }
    for (size_t i = 0; i < r->ndocs; i++) pj_free(&r->docs[i]);
    dm_free(r->docs);
    dm_free(r->schemas);
    memset(r, 0, sizeof *r);
}

/* ---- texts in order ---- */

static int text_order(const void *a, const void *b)
{
    const gr_text *x = a, *y = b;
    int c = memcmp(x->p, y->p, x->n < y->n ? x->n : y->n);
    return c ? c : (x->n > y->n) - (x->n < y->n);
}

/* First of [lo,hi) whose byte at `at` is at least c; a text that ended counts as less than every byte. */
static uint32_t first_from(const gr_texts *t, uint32_t lo, uint32_t hi, uint32_t at, int c)
{
    while (lo < hi) {
        uint32_t mid = lo + (hi - lo) / 2;
        if (t->v[mid].n > at && t->v[mid].p[at] >= c) hi = mid;
        else lo = mid + 1;
    }
    return lo;
}

bool gr_texts_next(const gr_texts *t, uint32_t *lo, uint32_t *hi, uint32_t at, int c)
{
    uint32_t from = first_from(t, *lo, *hi, at, c);
    *hi = first_from(t, from, *hi, at, c + 1);
    *lo = from;
    return from < *hi;
}

/* Appends text + tail, kept in the arena. */
static int texts_add(gr_rules *r, gr_texts *t, const void *p, size_t n, const char *tail, int32_t what)
{
    size_t m = strlen(tail);
    uint8_t *copy = take(r, n + m + 1);
    if (!copy) return DM_ENOMEM;
    memcpy(copy, p, n);
    memcpy(copy + n, tail, m);
    t->v[t->n++] = (gr_text){ copy, (uint32_t)(n + m), what };
    return 0;
}

static int texts_make(gr_rules *r, gr_texts *t, size_t cap)
{
    t->n = 0;
    t->v = take(r, (cap ? cap : 1) * sizeof *t->v);
    return t->v ? 0 : DM_ENOMEM;
}

static void texts_sort(gr_texts *t)
{
    if (t->n > 1) qsort(t->v, t->n, sizeof *t->v, text_order);
}

/* ---- schemas: reading ---- */

static const gr_leaf leaf_any = { .types = T_ALL, .int_min = INT64_MIN, .int_max = INT64_MAX, .items_max = UINT32_MAX };

static int32_t schema_new(gr_rules *r, const pj_val *from)
{
    if (r->nschemas == r->schemas_cap) {
        size_t cap = r->schemas_cap ? r->schemas_cap * 2 : 64;
        gr_schema *p = dm_realloc(r->schemas, cap * sizeof *p);
        if (!p) return DM_ENOMEM;
        r->schemas = p;
        r->schemas_cap = cap;
    }
    r->schemas[r->nschemas] = (gr_schema){ .from = from, .own = leaf_any };
    return (int32_t)r->nschemas++;
}

static uint8_t type_bit(const pj_val *name)
{
    static const struct { const char *name; uint8_t bits; } types[] = {
        { "string", T_STRING }, { "integer", T_INTEGER }, { "number", T_INTEGER | T_NUMBER }, { "boolean", T_BOOLEAN },
        { "null", T_NULL }, { "array", T_ARRAY }, { "object", T_OBJECT },
    };
    for (size_t i = 0; i < DM_COUNT(types); i++)
        if (pj_is(name, types[i].name)) return types[i].bits;
    return T_ALL; /* unknown: says nothing */
}

static uint8_t types_of(const pj_val *v)
{
    if (v->kind != PJ_LIST) return type_bit(v);
    uint8_t bits = 0;
    for (uint32_t i = 0; i < v->n; i++) bits |= type_bit(&v->items[i]);
    return bits;
}

static uint32_t count_of(const pj_val *v, uint32_t otherwise)
{
    long long n = v && v->kind == PJ_INT ? strtoll(v->s, NULL, 10) : v && v->kind == PJ_FLOAT && v->f >= 0 && v->f < 1e9 ? (long long)v->f : -1;
    return n < 0 ? otherwise : n > UINT32_MAX ? UINT32_MAX : (uint32_t)n;
}

/* A bound of integers: the largest (up) or smallest integer that keeps it, held within 64 bits. */
static int64_t bound_of(const pj_val *v, bool up, bool exclusive)
{
    double f = v->kind == PJ_FLOAT ? v->f : 0;
    if (v->kind == PJ_INT) {
        long long n = strtoll(v->s, NULL, 10); /* saturates */
        if (!exclusive) return n;
        return up ? (n == INT64_MIN ? n : n - 1) : (n == INT64_MAX ? n : n + 1);
    }
    double whole = up ? floor(f) : ceil(f);
    if (exclusive && whole == f) whole += up ? -1 : 1;
    if (!(whole > -9.2e18)) return INT64_MIN;
    return whole < 9.2e18 ? (int64_t)whole : INT64_MAX;
}

static void read_bounds(gr_leaf *l, const pj_val *s)
{
    static const struct { const char *key; bool up, exclusive; } bounds[] = {
        { "minimum", false, false }, { "exclusiveMinimum", false, true }, { "maximum", true, false }, { "exclusiveMaximum", true, true },
    };
    for (size_t i = 0; i < DM_COUNT(bounds); i++) {
        const pj_val *v = pj_get(s, bounds[i].key);
        if (!v || (v->kind != PJ_INT && v->kind != PJ_FLOAT)) continue;
        if (v->kind == PJ_FLOAT && isnan(v->f)) continue;
        int64_t b = bound_of(v, bounds[i].up, bounds[i].exclusive);
        if (bounds[i].up && b < l->int_max) l->int_max = b;
        if (!bounds[i].up && b > l->int_min) l->int_min = b;
        l->constrained = true;
    }
    l->no_minus = l->int_min >= 0;
    l->chars_min = count_of(pj_get(s, "minLength"), 0);
    l->items_min = count_of(pj_get(s, "minItems"), 0);
    l->items_max = count_of(pj_get(s, "maxItems"), UINT32_MAX);
    l->constrained |= l->chars_min || l->items_min || l->items_max != UINT32_MAX;
}

static int32_t schema_of(gr_rules *r, const pj_val *s, int depth);

static int prop_add(gr_leaf *l, const pj_val *name, int32_t schema, bool declared)
{
    if (schema < 0) return schema;
    for (uint32_t i = 0; i < l->nprops; i++) {
        gr_prop *p = &l->props[i];
        if (p->n != name->n || memcmp(p->name, name->s, p->n) != 0) continue;
        if (!declared) p->required = true;
        return 0;
    }
    l->props[l->nprops++] = (gr_prop){ .name = name->s, .n = name->n, .schema = schema, .declared = declared, .required = !declared };
    return 0;
}

static int read_props(gr_rules *r, gr_leaf *l, const pj_val *s, int depth)
{
    const pj_val *props = pj_get(s, "properties"), *required = pj_get(s, "required"), *extra = pj_get(s, "additionalProperties");
    if (props && props->kind != PJ_DICT) props = NULL;
    if (required && required->kind != PJ_LIST) required = NULL;
    l->constrained |= props || required || extra;
    l->closed = extra ? extra->kind == PJ_FALSE : props != NULL;
    l->extra = extra ? schema_of(r, extra, depth) : SCHEMA_ANY;
    if (l->extra < 0) return l->extra;
    size_t cap = (props ? props->n : 0) + (required ? required->n : 0);
    if (!cap) return 0;
    l->props = take(r, cap * sizeof *l->props);
    if (!l->props) return DM_ENOMEM;
    int rc = 0;
    for (uint32_t i = 0; props && rc == 0 && i < props->n; i++)
        rc = prop_add(l, &props->pairs[i].key, schema_of(r, &props->pairs[i].val, depth), true);
    for (uint32_t i = 0; required && rc == 0 && i < required->n; i++)
        if (required->items[i].kind == PJ_STR) rc = prop_add(l, &required->items[i], SCHEMA_ANY, false);
    return rc;
}

static int read_items(gr_rules *r, gr_leaf *l, const pj_val *s, int depth)
{
    const pj_val *items = pj_get(s, "items"), *prefix = pj_get(s, "prefixItems");
    l->constrained |= items || prefix;
    if (items && (l->items = schema_of(r, items, depth)) < 0) return l->items;
    if (!prefix || prefix->kind != PJ_LIST || !prefix->n) return 0;
    l->prefix = take(r, prefix->n * sizeof *l->prefix);
    if (!l->prefix) return DM_ENOMEM;
    for (uint32_t i = 0; i < prefix->n; i++)
        if ((l->prefix[l->nprefix++] = schema_of(r, &prefix->items[i], depth)) < 0) return DM_ENOMEM;
    return 0;
}

/* enum and const: the types that occur, and the values themselves. */
static void read_values(gr_leaf *l, const pj_val *s)
{
    const pj_val *list = pj_get(s, "enum"), *only = pj_get(s, "const");
    if (only) l->values_of = only, l->one_value = true;
    else if (list && list->kind == PJ_LIST) l->values_of = list;
    l->constrained |= l->values_of != NULL;
}

/* "#/$defs/x" below the tool's own schema; NULL if it is not there. */
static const pj_val *reference(const gr_rules *r, const pj_val *ref)
{
    const pj_val *at = r->root;
    char key[256];
    if (ref->kind != PJ_STR || ref->s[0] != '#') return NULL;
    for (const char *p = ref->s + 1; at && *p;) {
        if (*p++ != '/') return NULL;
        size_t n = strcspn(p, "/");
        if (n >= sizeof key) return NULL;
        memcpy(key, p, n);
        key[n] = 0;
        p += n;
        if (at->kind != PJ_LIST) at = pj_get(at, key);
        else {
            unsigned long i = strtoul(key, NULL, 10);
            at = i < at->n ? &at->items[i] : NULL;
        }
    }
    return at;
}

typedef struct links { int32_t all[64], any[64]; uint32_t nall, nany; } links;

/* What does not fit is left out: one rule less. */
static int link_list(gr_rules *r, const pj_val *list, int32_t *to, uint32_t *n, bool group, int depth)
{
    if (!list || list->kind != PJ_LIST || !list->n || *n + list->n + 1 > 64) return 0;
    for (uint32_t i = 0; i < list->n; i++) {
        int32_t id = schema_of(r, &list->items[i], depth);
        if (id < 0) return id;
        to[(*n)++] = id;
    }
    if (group) to[(*n)++] = -1;
    return 0;
}

static int read_links(gr_rules *r, int32_t id, const pj_val *s, int depth)
{
    links k = { .nall = 0 };
    const pj_val *ref = pj_get(s, "$ref"), *target = ref ? reference(r, ref) : NULL;
    if (target) {
        int32_t to = schema_of(r, target, depth);
        if (to < 0) return to;
        k.all[k.nall++] = to;
    }
    int rc = link_list(r, pj_get(s, "allOf"), k.all, &k.nall, false, depth);
    if (rc == 0) rc = link_list(r, pj_get(s, "anyOf"), k.any, &k.nany, true, depth);
    if (rc == 0) rc = link_list(r, pj_get(s, "oneOf"), k.any, &k.nany, true, depth);
    if (rc < 0 || (!k.nall && !k.nany)) return rc;
    int32_t *all = take(r, (k.nall + k.nany) * sizeof *all);
    if (!all) return DM_ENOMEM;
    memcpy(all, k.all, k.nall * sizeof *all);
    memcpy(all + k.nall, k.any, k.nany * sizeof *all);
    gr_schema *g = &r->schemas[id];
    g->all = all, g->nall = k.nall;
    g->any = all + k.nall, g->nany = k.nany;
    return 0;
}

static int read_own(gr_rules *r, gr_leaf *l, const pj_val *s, int depth)
{
    const pj_val *type = pj_get(s, "type");
    if (type) l->types = types_of(type);
    l->constrained = l->types != T_ALL;
    read_bounds(l, s);
    read_values(l, s);
    int rc = read_props(r, l, s, depth);
    return rc < 0 ? rc : read_items(r, l, s, depth);
}

/* The schema's number; schemas that are met again are the same. */
static int32_t schema_of(gr_rules *r, const pj_val *s, int depth)
{
    if (s->kind == PJ_FALSE) return SCHEMA_NONE;
    if (s->kind != PJ_DICT || !s->n || depth > PJ_DEPTH_MAX) return SCHEMA_ANY;
    for (size_t i = 2; i < r->nschemas; i++)
        if (r->schemas[i].from == s) return (int32_t)i;
    if (r->nschemas >= GR_NODES_MAX) return SCHEMA_ANY;
    int32_t id = schema_new(r, s);
    if (id < 0) return id;
    gr_leaf own = leaf_any; /* the list may move while it is read */
    int rc = read_own(r, &own, s, depth + 1);
    if (rc == 0) rc = read_links(r, id, s, depth + 1);
    r->schemas[id].own = own;
    return rc < 0 ? rc : id;
}

/* ---- leaves: merging ---- */

/* Both hold.  Of two schemas for the same thing the first that says something counts. */
static int32_t both(int32_t a, int32_t b) { return a == SCHEMA_NONE || b == SCHEMA_NONE ? SCHEMA_NONE : a == SCHEMA_ANY ? b : a; }

static int merge_props(gr_rules *r, gr_leaf *to, const gr_leaf *b)
{
    if (!b->nprops) return 0;
    gr_prop *props = take(r, (to->nprops + b->nprops) * sizeof *props);
    if (!props) return DM_ENOMEM;
    if (to->nprops) memcpy(props, to->props, to->nprops * sizeof *props);
    uint32_t n = to->nprops;
    for (uint32_t i = 0; i < b->nprops; i++) {
        const gr_prop *p = &b->props[i];
        uint32_t j = 0;
        while (j < n && (props[j].n != p->n || memcmp(props[j].name, p->name, p->n) != 0)) j++;
        if (j == n) {
            props[n++] = *p;
            continue;
        }
        props[j].schema = both(props[j].schema, p->schema);
        props[j].required |= p->required;
        props[j].declared |= p->declared;
    }
    to->props = props;
    to->nprops = n;
    return 0;
}

static int merge(gr_rules *r, gr_leaf *to, const gr_leaf *b)
{
    if (!b->constrained) return 0;
    if (!to->constrained) {
        *to = *b;
        return 0;
    }
    to->types &= b->types;
    to->closed |= b->closed;
    to->extra = both(to->extra, b->extra);
    to->items = both(to->items, b->items);
    if (b->int_min > to->int_min) to->int_min = b->int_min;
    if (b->int_max < to->int_max) to->int_max = b->int_max;
    to->no_minus |= b->no_minus;
    if (b->chars_min > to->chars_min) to->chars_min = b->chars_min;
    if (b->items_min > to->items_min) to->items_min = b->items_min;
    if (b->items_max < to->items_max) to->items_max = b->items_max;
    if (!to->values_of) to->values_of = b->values_of, to->one_value = b->one_value;
    if (!to->nprefix) to->prefix = b->prefix, to->nprefix = b->nprefix;
    return merge_props(r, to, b);
}

/* ---- leaves: flattening ---- */

typedef struct leaves { gr_leaf v[GR_THREADS_MAX]; uint32_t n; } leaves;

static int flatten(gr_rules *r, int32_t id, int depth);

/* Every leaf of `to` with every leaf of schema id.  Too many: as it was, which is wider. */
static int times(gr_rules *r, leaves *to, gr_leaf *const *list, uint32_t n)
{
    leaves out = { .n = 0 };
    if (to->n * n > GR_THREADS_MAX) return 0;
    for (uint32_t i = 0; i < to->n; i++) {
        for (uint32_t j = 0; j < n; j++) {
            out.v[out.n] = to->v[i];
            int rc = merge(r, &out.v[out.n], list[j]);
            if (rc < 0) return rc;
            if (out.v[out.n].types) out.n++;
        }
    }
    *to = out;
    return 0;
}

/* The leaves of one group of alternatives; *n = UINT32_MAX: too many to follow. */
static int group_leaves(gr_rules *r, const int32_t *ids, uint32_t count, gr_leaf **list, uint32_t *n, int depth)
{
    for (uint32_t i = 0; i < count; i++) {
        int rc = flatten(r, ids[i], depth);
        if (rc < 0) return rc;
        const gr_schema *s = &r->schemas[ids[i]];
        if (!s->flat || *n + s->nleaves > GR_THREADS_MAX) {
            *n = UINT32_MAX;
            return 0;
        }
        for (uint32_t j = 0; j < s->nleaves; j++) list[(*n)++] = s->leaves[j];
    }
    return 0;
}

/* Alternatives that are too many: what they have in common is only that their types are these. */
static int widen(gr_rules *r, const int32_t *ids, uint32_t count, leaves *to, int depth)
{
    gr_leaf wide = leaf_any, *one = &wide;
    wide.types = 0;
    for (uint32_t i = 0; i < count; i++) {
        int rc = flatten(r, ids[i], depth);
        if (rc < 0) return rc;
        const gr_schema *s = &r->schemas[ids[i]];
        if (!s->flat) wide.types = T_ALL;
        for (uint32_t j = 0; j < s->nleaves; j++) wide.types |= s->leaves[j]->types;
    }
    wide.constrained = wide.types != T_ALL;
    return times(r, to, &one, 1);
}

static int flatten_groups(gr_rules *r, const gr_schema *s, leaves *to, int depth)
{
    int rc = 0;
    for (uint32_t from = 0, end; rc == 0 && from < s->nany; from = end + 1) {
        for (end = from; s->any[end] >= 0;) end++;
        gr_leaf *list[GR_THREADS_MAX];
        uint32_t n = 0;
        rc = group_leaves(r, s->any + from, end - from, list, &n, depth);
        if (rc < 0) break;
        if (n != UINT32_MAX) rc = times(r, to, list, n);
        else rc = widen(r, s->any + from, end - from, to, depth);
    }
    return rc;
}

static int keep_leaves(gr_rules *r, gr_schema *s, const leaves *l)
{
    s->leaves = take(r, (l->n ? l->n : 1) * sizeof *s->leaves);
    gr_leaf *copy = take(r, (l->n ? l->n : 1) * sizeof *copy);
    if (!s->leaves || !copy) return DM_ENOMEM;
    for (uint32_t i = 0; i < l->n; i++) {
        copy[i] = l->v[i];
        s->leaves[s->nleaves++] = &copy[i];
    }
    return 0;
}

/* No schema is made here, so the list stays where it is.  A schema that is reached while it is flattened itself
 * adds nothing. */
static int flatten(gr_rules *r, int32_t id, int depth)
{
    gr_schema *s = &r->schemas[id];
    if (s->flat || s->busy || depth > PJ_DEPTH_MAX) return 0;
    s->busy = true;
    leaves l = { .v = { s->own }, .n = s->own.types ? 1 : 0 };
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < s->nall; i++) {
        rc = flatten(r, s->all[i], depth + 1);
        const gr_schema *t = &r->schemas[s->all[i]];
        if (rc == 0 && t->flat) rc = times(r, &l, t->leaves, t->nleaves);
    }
    if (rc == 0) rc = flatten_groups(r, s, &l, depth + 1);
    if (rc == 0) rc = keep_leaves(r, s, &l);
    s->busy = false;
    s->flat = rc == 0;
    return rc;
}

/* ---- leaves: sealing ---- */

static uint8_t kind_type(const pj_val *v)
{
    switch (v->kind) {
    case PJ_NULL: return T_NULL;
    case PJ_FALSE: case PJ_TRUE: return T_BOOLEAN;
    case PJ_INT: return T_INTEGER;
    case PJ_FLOAT: return T_NUMBER;
    case PJ_STR: return T_STRING;
    case PJ_LIST: return T_ARRAY;
    case PJ_DICT: break;
    }
    return T_OBJECT;
}

static int seal_value(gr_rules *r, gr_leaf *l, const pj_val *v)
{
    dm_buf text = { 0 };
    if (!(kind_type(v) & l->types) || !pj_finite(v)) return 0;
    if (v->kind == PJ_STR && memchr(v->s, 0, v->n)) return 0;
    int rc = pj_write(v, &text);
    if (rc == 0) rc = texts_add(r, &l->values, text.p, text.n, "", 0);
    if (rc == 0 && v->kind == PJ_STR) rc = texts_add(r, &l->raw, v->s, v->n, "</", 0);
    dm_buf_free(&text);
    return rc;
}

static int seal_values(gr_rules *r, gr_leaf *l)
{
    const pj_val *v = l->values_of;
    bool list = !l->one_value;
    size_t n = list ? v->n : 1;
    int rc = texts_make(r, &l->values, n);
    if (rc == 0) rc = texts_make(r, &l->raw, n);
    for (size_t i = 0; rc == 0 && i < n; i++) rc = seal_value(r, l, list ? &v->items[i] : v);
    if (rc < 0) return rc;
    l->nstrings = l->raw.n;
    l->types &= (uint8_t)((l->nstrings ? T_STRING : 0) | (l->values.n > l->nstrings ? T_ALL & ~T_STRING : 0));
    texts_sort(&l->values); /* '"' is before every other byte that a value begins with */
    texts_sort(&l->raw);
    return 0;
}

static int seal_keys(gr_rules *r, gr_leaf *l)
{
    dm_buf text = { 0 };
    if (l->nprops > GR_PROPS_MAX) { /* too many to follow: any object */
        l->nprops = 0;
        l->closed = false;
        l->extra = SCHEMA_ANY;
    }
    int rc = texts_make(r, &l->keys, l->nprops);
    for (uint32_t i = 0; rc == 0 && i < l->nprops; i++) {
        dm_buf_clear(&text);
        rc = pj_escape(l->props[i].name, l->props[i].n, &text);
        if (rc == 0) rc = texts_add(r, &l->keys, dm_buf_cstr(&text), text.n, "\"", (int32_t)i);
    }
    texts_sort(&l->keys);
    dm_buf_free(&text);
    return rc;
}

/* Can no value at all be given for it? */
static bool impossible(const gr_rules *r, int32_t schema)
{
    const gr_schema *s = &r->schemas[schema];
    for (uint32_t i = 0; i < s->nleaves; i++)
        if (s->leaves[i]->types) return false;
    return true;
}

/* Keys that nothing can be given for are gone; an object that needs one is impossible. */
static int seal_props(gr_rules *r, gr_leaf *l)
{
    uint32_t n = l->nprops;
    gr_prop *kept = take(r, (n ? n : 1) * sizeof *kept); /* the list may be shared with other leaves */
    if (!kept) return DM_ENOMEM;
    l->nprops = 0;
    for (uint32_t i = 0; i < n; i++) {
        bool dead = impossible(r, l->props[i].schema);
        if (dead && l->props[i].required) l->types &= (uint8_t)~T_OBJECT;
        if (!dead) kept[l->nprops++] = l->props[i];
    }
    l->props = kept;
    if (impossible(r, l->extra)) l->closed = true;
    return seal_keys(r, l);
}

static int seal_leaf(gr_rules *r, gr_leaf *l)
{
    if (l->types == T_INTEGER && l->int_min > l->int_max) l->types = 0;
    if (l->items_min > l->items_max) l->types &= (uint8_t)~T_ARRAY;
    return l->values_of ? seal_values(r, l) : 0;
}

static int each_leaf(gr_rules *r, int (*fn)(gr_rules *, gr_leaf *))
{
    for (size_t i = 0; i < r->nschemas; i++) {
        for (uint32_t j = 0; j < r->schemas[i].nleaves; j++) {
            int rc = fn(r, r->schemas[i].leaves[j]);
            if (rc < 0) return rc;
        }
    }
    return 0;
}

static int seal_all(gr_rules *r)
{
    int rc = 0;
    for (size_t i = 0; rc == 0 && i < r->nschemas; i++) rc = flatten(r, (int32_t)i, 0);
    if (rc == 0) rc = each_leaf(r, seal_leaf);
    return rc < 0 ? rc : each_leaf(r, seal_props);
}

/* ---- tools ---- */

/* Can the parser read the name back from a tag?  A quote inside it must not look like the end. */
static bool name_fits(const char *p, size_t n)
{
    if (!n || n > GR_NAME_BYTES_MAX || memchr(p, '\n', n) || memchr(p, '\r', n) || memchr(p, 0, n)) return false;
    for (size_t i = 0; i < n; i++) {
        if (p[i] != '"') continue;
        size_t j = i + 1;
        while (j < n && (p[j] == ' ' || p[j] == '\t')) j++;
        if (j == n || p[j] == '>' || p[j] == '/' || j > i + 1) return false;
    }
    return true;
}

/* What the parameters schema says of itself, with allOf and $ref; alternatives at the top are left to the check. */
static int top_leaf(gr_rules *r, int32_t id, gr_leaf *out)
{
    *out = r->schemas[id].own;
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < r->schemas[id].nall; i++) {
        const gr_schema *t = &r->schemas[r->schemas[id].all[i]];
        if (t->nleaves) rc = merge(r, out, t->leaves[0]);
    }
    return rc;
}

/* False in *callable: something that it needs cannot be given. */
static int tool_seal(gr_rules *r, gr_tool *t, int32_t id, bool *callable)
{
    gr_leaf l;
    *callable = true;
    int rc = top_leaf(r, id, &l);
    if (rc < 0) return rc;
    t->extra = l.closed || impossible(r, l.extra) ? -1 : l.extra;
    t->props = take(r, (l.nprops ? l.nprops : 1) * sizeof *t->props);
    if (!t->props) return DM_ENOMEM;
    rc = texts_make(r, &t->names, l.nprops);
    for (uint32_t i = 0; rc == 0 && i < l.nprops; i++) {
        const gr_prop *p = &l.props[i];
        bool can = name_fits(p->name, p->n) && !impossible(r, p->schema);
        if (!can && p->required) *callable = false;
        if (!can) continue;
        t->props[t->nprops] = *p;
        rc = texts_add(r, &t->names, p->name, p->n, "\" string=\"", (int32_t)t->nprops++);
    }
    texts_sort(&t->names);
    return rc;
}

static int tool_read(gr_rules *r, const dm_parser_tool *from, int32_t *schema, dm_err *e)
{
    *schema = SCHEMA_ANY;
    if (!from->parameters_json || !from->parameters_json[0]) return 0;
    pj_doc *d = &r->docs[r->ndocs];
    int rc = pj_read(d, from->parameters_json, strlen(from->parameters_json), e);
    if (rc < 0) return dm_err_prefix(e, "the parameters of tool %s", from->name), rc;
    r->ndocs++;
    r->root = &d->root;
    if (d->root.kind != PJ_DICT)
        return dm_err_set(e, DM_EFORMAT, "grammar", "the parameters of tool %s are %s, not an object", from->name, pj_kind_name(&d->root));
    *schema = schema_of(r, &d->root, 0);
    return *schema < 0 ? *schema : 0;
}

static int tool_add(gr_rules *r, const char *name, int32_t schema)
{
    bool callable;
    gr_tool *t = &r->tools[r->ntools];
    int rc = tool_seal(r, t, schema, &callable);
    if (rc < 0 || !callable || !name_fits(name, strlen(name))) return rc;
    for (uint32_t i = 0; i < r->names.n; i++) /* of two with one name the parser takes the first */
        if (r->names.v[i].n == strlen(name) + 3 && memcmp(r->names.v[i].p, name, strlen(name)) == 0) return 0;
    if (t->nprops > r->props_max) r->props_max = t->nprops;
    return texts_add(r, &r->names, name, strlen(name), "\">\n", (int32_t)r->ntools++);
}

static int rules_read(gr_rules *r, const dm_parser_tool *tools, size_t ntools, int32_t *ids, dm_err *e)
{
    int rc = schema_new(r, NULL) < 0 || schema_new(r, NULL) < 0 ? DM_ENOMEM : 0;
    if (rc < 0) return rc;
    r->schemas[SCHEMA_NONE].own.types = 0;
    r->schemas[SCHEMA_NONE].own.constrained = true;
    for (size_t i = 0; rc == 0 && i < ntools; i++) rc = tool_read(r, &tools[i], &ids[i], e);
    if (rc == 0) rc = seal_all(r);
    if (rc == 0) rc = texts_make(r, &r->names, ntools);
    for (size_t i = 0; rc == 0 && i < ntools; i++) rc = tool_add(r, tools[i].name, ids[i]);
    texts_sort(&r->names);
    return rc;
}

int gr_rules_read(gr_rules *r, const dm_parser_tool *tools, size_t ntools, dm_err *e)
{
    memset(r, 0, sizeof *r);
    int32_t *ids = dm_calloc(ntools ? ntools : 1, sizeof *ids);
    r->docs = dm_calloc(ntools ? ntools : 1, sizeof *r->docs);
    r->tools = take(r, (ntools ? ntools : 1) * sizeof *r->tools);
    int rc = ids && r->docs && r->tools ? rules_read(r, tools, ntools, ids, e) : DM_ENOMEM;
    dm_free(ids);
    if (rc == DM_ENOMEM) dm_err_set(e, rc, "grammar", "out of memory");
    if (rc < 0) gr_rules_free(r);
    return rc;
}
