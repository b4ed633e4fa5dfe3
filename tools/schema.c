/* JSON Schema as tool schemas use it (a part of 2020-12), with the repairs that models need.
 *
 *   checked    type (one or several), properties, required, additionalProperties, items, prefixItems, minItems, maxItems,
 *              uniqueItems, enum, const, minimum, maximum, exclusiveMinimum, exclusiveMaximum, multipleOf, minLength,
 *              maxLength, pattern, anyOf, oneOf, allOf, $ref to "#/…" of the same schema
 *   repaired   text for a number, boolean, null, array or object, when it is exactly that in JSON ("5" -> 5, "[1]" -> [1];
 *              "3.5" is no integer and "NaN" is nothing); 5.0 for an integer; a scalar or structure for a string becomes
 *              its JSON text; null for an optional property is dropped
 *
 * Of several types the first one listed that fits as it stands wins, then the first that can be repaired to.  Results are
 * copies: the caller's value stays. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include <errno.h>
#include <math.h>
#include <pcre2.h>
#include <string.h>

#include "tools/tools_int.h"

enum { DEPTH_MAX = 64, FAULT_VALUE_MAX = 60 };

typedef struct ctx {
    const json_t *root;
    dm_buf *fault; /* NULL while trying alternatives */
    char where[256];
    int depth;
} ctx;

static int apply(ctx *c, const json_t *schema, const json_t *value, json_t **out);

/* ---- words ---------------------------------------------------------------------------------------------------------- */

static void quote(char *out, size_t cap, const json_t *value) {
    char *text = json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT);
    const size_t n = text ? strlen(text) : 0;
    size_t keep = n < FAULT_VALUE_MAX ? n : dm_utf8_whole(text, FAULT_VALUE_MAX);
    snprintf(out, cap, "%.*s%s", (int)keep, text ? text : "?", keep < n ? "…" : "");
    free(text);
}

DM_PRINTF(2, 3)
static int fault(ctx *c, const char *fmt, ...) {
    if (!c->fault) return DM_ETOOL;
    va_list ap;
    dm_buf_clear(c->fault);
    int rc = c->where[0] ? dm_buf_printf(c->fault, "the parameter \"%s\" ", c->where) : dm_buf_str(c->fault, "the arguments ");
    va_start(ap, fmt);
    if (rc == 0) rc = dm_buf_vprintf(c->fault, fmt, ap);
    va_end(ap);
    return rc < 0 ? rc : DM_ETOOL;
}

static int fault_got(ctx *c, const char *must, const json_t *value) {
    char got[160];
    if (!c->fault) return DM_ETOOL;
    quote(got, sizeof got, value);
    return fault(c, "must be %s, but is %s", must, got);
}

/* where grows by one step and shrinks back to `n` by where_back. */
static size_t where_in(ctx *c, const char *key, size_t index) {
    const size_t n = strlen(c->where);
    if (key) snprintf(c->where + n, sizeof c->where - n, "%s%s", n ? "." : "", key);
    else snprintf(c->where + n, sizeof c->where - n, "[%zu]", index);
    return n;
}
static void where_back(ctx *c, size_t n) { c->where[n] = 0; }

/* ---- types ----------------------------------------------------------------------------------------------------------- */

static bool whole_number(const json_t *v) {
    if (json_is_integer(v)) return true;
    const double d = json_real_value(v);
    return json_is_real(v) && isfinite(d) && d == floor(d) && fabs(d) < 9007199254740992.0;
}

static bool type_is(const char *type, const json_t *v) {
    if (strcmp(type, "string") == 0) return json_is_string(v);
    if (strcmp(type, "integer") == 0) return whole_number(v);
    if (strcmp(type, "number") == 0) return json_is_number(v);
    if (strcmp(type, "boolean") == 0) return json_is_boolean(v);
    if (strcmp(type, "array") == 0) return json_is_array(v);
    if (strcmp(type, "object") == 0) return json_is_object(v);
    return strcmp(type, "null") == 0 && json_is_null(v);
}

static const char *article(const char *type) {
    if (strcmp(type, "integer") == 0) return "an integer";
    if (strcmp(type, "array") == 0) return "an array";
    if (strcmp(type, "object") == 0) return "an object";
    if (strcmp(type, "null") == 0) return "null";
    if (strcmp(type, "string") == 0) return "a string";
    if (strcmp(type, "boolean") == 0) return "true or false";
    return "a number";
}

/* The value of a text that is exactly one JSON value of this type, or NULL. */
static json_t *from_text(const char *type, const char *text) {
    json_t *v = json_loads(text, JSON_DECODE_ANY | JSON_REJECT_DUPLICATES, NULL);
    if (v && type_is(type, v)) return v;
    json_decref(v);
    if (strcmp(type, "boolean") == 0 && (strcmp(text, "True") == 0 || strcmp(text, "False") == 0)) return json_boolean(text[0] == 'T');
    return NULL;
}

/* A new value of the type, or NULL. */
static json_t *convert(const char *type, const json_t *v) {
    if (strcmp(type, "string") == 0 && !json_is_string(v) && !json_is_null(v)) {
        char *text = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT);
        json_t *s = text ? json_string(text) : NULL;
        free(text);
        return s;
    }
    return strcmp(type, "string") != 0 && json_is_string(v) ? from_text(type, json_string_value(v)) : NULL;
}

/* A whole real is handed on as the integer that was meant. */
static json_t *as_type(const char *type, const json_t *v) {
    if (strcmp(type, "integer") == 0 && json_is_real(v)) return json_integer((json_int_t)json_real_value(v));
    return json_deep_copy(v);
}

static int apply_type(ctx *c, const json_t *types, const json_t *value, json_t **out) {
    const json_t *one;
    size_t i;
    char must[128] = "";
    if (json_is_string(types)) {
        const char *type = json_string_value(types);
        if (type_is(type, value)) return (*out = as_type(type, value)) ? 0 : DM_ENOMEM;
        json_t *made = convert(type, value);
        if (made && type_is(type, made)) {
            *out = as_type(type, made);
            json_decref(made);
            return *out ? 0 : DM_ENOMEM;
        }
        json_decref(made);
        return fault_got(c, article(type), value);
    }
    json_array_foreach(types, i, one) if (json_is_string(one) && type_is(json_string_value(one), value))
        return (*out = as_type(json_string_value(one), value)) ? 0 : DM_ENOMEM;
    json_array_foreach(types, i, one) {
        if (!json_is_string(one)) continue;
        json_t *made = convert(json_string_value(one), value);
        if (made) {
            *out = as_type(json_string_value(one), made);
            json_decref(made);
            return *out ? 0 : DM_ENOMEM;
        }
        const size_t n = strlen(must);
        snprintf(must + n, sizeof must - n, "%s%s", i ? " or " : "", article(json_string_value(one)));
    }
    return fault_got(c, must, value);
}

/* ---- values ------------------------------------------------------------------------------------------------------------ */

static bool same(const json_t *a, const json_t *b) {
    if (json_is_number(a) && json_is_number(b)) return json_number_value(a) == json_number_value(b);
    return json_equal(a, b) == 1;
}

/* "5" for the 5 of an enumeration and the like: compared by text when nothing is equal as it stands. */
static int apply_enum(ctx *c, const json_t *list, json_t **value) {
    const json_t *one;
    size_t i;
    json_array_foreach(list, i, one) if (same(one, *value)) return 0;
    json_array_foreach(list, i, one) {
        char *text = json_is_string(one) ? NULL : json_dumps(one, JSON_ENCODE_ANY | JSON_COMPACT);
        const bool equal = text && json_is_string(*value) && strcmp(text, json_string_value(*value)) == 0;
        free(text);
        if (!equal) continue;
        json_decref(*value);
        return (*value = json_deep_copy(one)) ? 0 : DM_ENOMEM;
    }
    char *known = json_dumps(list, JSON_COMPACT);
    char must[300];
    snprintf(must, sizeof must, "one of %.250s", known ? known : "the listed values");
    free(known);
    return fault_got(c, must, *value);
}

static int check_number(ctx *c, const json_t *schema, const json_t *value) {
    const double v = json_number_value(value);
    const json_t *k;
    char must[96] = "";
    if ((k = json_object_get(schema, "minimum")) && v < json_number_value(k)) snprintf(must, sizeof must, "at least %g", json_number_value(k));
    else if ((k = json_object_get(schema, "maximum")) && v > json_number_value(k)) snprintf(must, sizeof must, "at most %g", json_number_value(k));
    else if ((k = json_object_get(schema, "exclusiveMinimum")) && v <= json_number_value(k)) snprintf(must, sizeof must, "more than %g", json_number_value(k));
    else if ((k = json_object_get(schema, "exclusiveMaximum")) && v >= json_number_value(k)) snprintf(must, sizeof must, "less than %g", json_number_value(k));
    else if ((k = json_object_get(schema, "multipleOf")) && json_number_value(k) > 0 && fmod(v, json_number_value(k)) != 0)
        snprintf(must, sizeof must, "a multiple of %g", json_number_value(k));
    return must[0] ? fault_got(c, must, value) : 0;
}

/* 1 it matches, 0 it does not, negative: the pattern is no pattern. */
static int pattern_match(const char *pattern, const char *text) {
    int code;
    PCRE2_SIZE at;
    pcre2_code *re = pcre2_compile((PCRE2_SPTR)pattern, PCRE2_ZERO_TERMINATED, PCRE2_UTF | PCRE2_UCP, &code, &at, NULL);
    pcre2_match_data *m = re ? pcre2_match_data_create_from_pattern(re, NULL) : NULL;
    pcre2_match_context *limits = m ? pcre2_match_context_create(NULL) : NULL;
    int rc = DM_EINVAL;
    if (limits) {
        pcre2_set_match_limit(limits, 1000000);
        pcre2_set_depth_limit(limits, 10000);
        rc = pcre2_match(re, (PCRE2_SPTR)text, strlen(text), 0, 0, m, limits) >= 0;
    }
    pcre2_match_context_free(limits);
    pcre2_match_data_free(m);
    pcre2_code_free(re);
    return rc;
}

static size_t characters(const char *s) {
    size_t n = 0;
    for (; *s; s++) n += ((unsigned char)*s & 0xc0) != 0x80;
    return n;
}

static int check_string(ctx *c, const json_t *schema, const json_t *value) {
    const char *s = json_string_value(value), *pattern = json_string_value(json_object_get(schema, "pattern"));
    const json_t *k;
    if ((k = json_object_get(schema, "minLength")) && characters(s) < (size_t)json_integer_value(k))
        return fault(c, "must have at least %lld characters", (long long)json_integer_value(k));
    if ((k = json_object_get(schema, "maxLength")) && characters(s) > (size_t)json_integer_value(k))
        return fault(c, "must have at most %lld characters", (long long)json_integer_value(k));
    if (!pattern || pattern_match(pattern, s) == 1) return 0;
    char must[200];
    snprintf(must, sizeof must, "a string that matches %.150s", pattern);
    return fault_got(c, must, value);
}

/* ---- structures ---------------------------------------------------------------------------------------------------------- */

static int apply_item(ctx *c, const json_t *schema, json_t *array, size_t i) {
    json_t *item = NULL;
    const size_t n = where_in(c, NULL, i);
    int rc = apply(c, schema, json_array_get(array, i), &item);
    where_back(c, n);
    return rc < 0 ? rc : json_array_set_new(array, i, item) == 0 ? 0 : DM_ENOMEM;
}

static int apply_array(ctx *c, const json_t *schema, json_t *array) {
    const json_t *prefix = json_object_get(schema, "prefixItems"), *items = json_object_get(schema, "items"), *k;
    const size_t n = json_array_size(array), fixed = json_array_size(prefix);
    int rc = 0;
    if ((k = json_object_get(schema, "minItems")) && n < (size_t)json_integer_value(k))
        return fault(c, "must have at least %lld items", (long long)json_integer_value(k));
    if ((k = json_object_get(schema, "maxItems")) && n > (size_t)json_integer_value(k))
        return fault(c, "must have at most %lld items", (long long)json_integer_value(k));
    for (size_t i = 0; rc == 0 && i < n; i++) {
        if (i < fixed) rc = apply_item(c, json_array_get(prefix, i), array, i);
        else if (items) rc = apply_item(c, items, array, i);
    }
    for (size_t i = 0; rc == 0 && json_is_true(json_object_get(schema, "uniqueItems")) && i < n && n <= 4096; i++)
        for (size_t j = 0; rc == 0 && j < i; j++)
            if (same(json_array_get(array, i), json_array_get(array, j))) rc = fault(c, "must not hold the same item twice");
    return rc;
}

static bool required_has(const json_t *schema, const char *key) {
    const json_t *one;
    size_t i;
    json_array_foreach(json_object_get(schema, "required"), i, one) if (json_is_string(one) && strcmp(json_string_value(one), key) == 0) return true;
    return false;
}

static int apply_member(ctx *c, const json_t *schema, json_t *object, const char *key, const json_t *given) {
    const json_t *known = json_object_get(json_object_get(schema, "properties"), key), *rest = json_object_get(schema, "additionalProperties");
    json_t *made = NULL;
    if (!known && json_is_false(rest)) return fault(c, "may not have \"%.60s\"", key);
    if (!known && !json_is_object(rest)) return 0;
    const size_t n = where_in(c, key, 0);
    int rc = apply(c, known ? known : rest, given, &made);
    where_back(c, n);
    if (rc == DM_ETOOL && json_is_null(given) && !required_has(schema, key)) return json_object_del(object, key) == 0 ? 0 : DM_ENOMEM;
    return rc < 0 ? rc : json_object_set_new(object, key, made) == 0 ? 0 : DM_ENOMEM;
}

/* `given` is walked, `object` (its copy) is changed. */
static int apply_object(ctx *c, const json_t *schema, const json_t *given, json_t *object) {
    const char *key;
    const json_t *one;
    json_t *value;
    size_t i;
    json_array_foreach(json_object_get(schema, "required"), i, one) {
        if (!json_is_string(one) || json_object_get(object, json_string_value(one))) continue;
        return fault(c, "%s the %s \"%s\"", c->where[0] ? "needs" : "lack", c->where[0] ? "member" : "parameter", json_string_value(one));
    }
    json_object_foreach((json_t *)(uintptr_t)given, key, value) {
        int rc = apply_member(c, schema, object, key, value);
        if (rc < 0) return rc;
    }
    return 0;
}

/* ---- alternatives ---------------------------------------------------------------------------------------------------------- */

static int apply_alternatives(ctx *c, const json_t *list, bool exactly_one, json_t **value) {
    dm_buf *told = c->fault;
    json_t *first = NULL;
    const json_t *one;
    size_t i, fits = 0;
    c->fault = NULL;
    json_array_foreach(list, i, one) {
        json_t *made = NULL;
        if (apply(c, one, *value, &made) < 0) continue;
        /* After repairs several may fit; only what fits as it stands counts against "exactly one". */
        const bool more = exactly_one && same(made, *value);
        if (fits++ == 0) first = made;
        else json_decref(made);
        if (!more) break;
    }
    c->fault = told;
    if (fits == 0) return fault_got(c, "one of the forms that its schema allows", *value);
    json_decref(*value);
    *value = first;
    return exactly_one && fits > 1 ? fault_got(c, "of exactly one of the forms that its schema allows", *value) : 0;
}

static int apply_all(ctx *c, const json_t *list, json_t **value) {
    const json_t *one;
    size_t i;
    json_array_foreach(list, i, one) {
        json_t *made = NULL;
        int rc = apply(c, one, *value, &made);
        if (rc < 0) return rc;
        json_decref(*value);
        *value = made;
    }
    return 0;
}

/* "#/$defs/x": NULL if it is not there. */
static const json_t *reference(const json_t *root, const char *ref) {
    const json_t *at = root;
    char key[256];
    if (strcmp(ref, "#") == 0) return root;
    if (strncmp(ref, "#/", 2) != 0) return NULL;
    for (ref += 2; at; ref += *ref == '/') {
        const size_t n = strcspn(ref, "/");
        if (n >= sizeof key) return NULL;
        memcpy(key, ref, n);
        key[n] = 0;
        at = json_is_array(at) ? json_array_get(at, (size_t)strtoul(key, NULL, 10)) : json_object_get(at, key);
        ref += n;
        if (!*ref) return at;
    }
    return NULL;
}

static int apply_rules(ctx *c, const json_t *schema, const json_t *given, json_t **value) {
    const json_t *k;
    int rc = 0;
    if ((k = json_object_get(schema, "const")) && !same(k, *value)) {
        char must[160];
        quote(must, sizeof must, k);
        rc = fault_got(c, must, *value);
    }
    if (rc == 0 && json_is_array(k = json_object_get(schema, "enum"))) rc = apply_enum(c, k, value);
    if (rc == 0 && json_is_number(*value)) rc = check_number(c, schema, *value);
    if (rc == 0 && json_is_string(*value)) rc = check_string(c, schema, *value);
    if (rc == 0 && json_is_array(*value)) rc = apply_array(c, schema, *value);
    if (rc == 0 && json_is_object(*value)) rc = apply_object(c, schema, json_is_object(given) ? given : *value, *value);
    if (rc == 0 && json_is_array(k = json_object_get(schema, "allOf"))) rc = apply_all(c, k, value);
    if (rc == 0 && json_is_array(k = json_object_get(schema, "anyOf"))) rc = apply_alternatives(c, k, false, value);
    if (rc == 0 && json_is_array(k = json_object_get(schema, "oneOf"))) rc = apply_alternatives(c, k, true, value);
    return rc;
}

static int apply(ctx *c, const json_t *schema, const json_t *value, json_t **out) {
    *out = NULL;
    if (json_is_false(schema)) return fault(c, "is not allowed");
    if (!json_is_object(schema)) return (*out = json_deep_copy(value)) ? 0 : DM_ENOMEM;
    if (c->depth >= DEPTH_MAX) return fault(c, "is nested too deeply");
    c->depth++;
    const char *ref = json_string_value(json_object_get(schema, "$ref"));
    const json_t *types = json_object_get(schema, "type"), *target = ref ? reference(c->root, ref) : NULL;
    json_t *made = NULL;
    int rc;
    if (target) rc = apply(c, target, value, &made);
    else if (json_is_string(types) || json_is_array(types)) rc = apply_type(c, types, value, &made);
    else rc = (made = json_deep_copy(value)) ? 0 : DM_ENOMEM;
    if (rc == 0) {
        /* What came out of text is walked from a copy: members are replaced on the way. */
        json_t *walked = json_is_object(value) ? NULL : json_deep_copy(made);
        rc = apply_rules(c, schema, walked ? walked : value, &made);
        json_decref(walked);
    }
    c->depth--;
    if (rc == 0) *out = made;
    else json_decref(made);
    return rc;
}

int schema_apply(const json_t *schema, const json_t *value, json_t **out, dm_buf *told) {
    ctx c = {.root = schema, .fault = told};
    return apply(&c, schema, value, out);
}

/* ---- the schema itself ------------------------------------------------------------------------------------------------------ */

static int check_node(const json_t *root, const json_t *node, int depth, dm_err *e) {
    const char *key;
    json_t *value;
    size_t i;
    int rc = 0;
    if (depth > DEPTH_MAX) return dm_err_set(e, DM_ELIMIT, "tools", "the schema is nested more than %d deep", DEPTH_MAX);
    json_array_foreach(node, i, value) if ((rc = check_node(root, value, depth + 1, e)) < 0) return rc;
    if (!json_is_object(node)) return 0;
    const char *ref = json_string_value(json_object_get(node, "$ref")), *pattern = json_string_value(json_object_get(node, "pattern"));
    if (ref && !reference(root, ref)) return dm_err_set(e, DM_ENOTSUP, "tools", "the schema refers to \"%.80s\", which it does not hold", ref);
    if (pattern && pattern_match(pattern, "") < 0) return dm_err_set(e, DM_EINVAL, "tools", "the schema's pattern \"%.80s\" is not a regular expression", pattern);
    json_object_foreach((json_t *)(uintptr_t)node, key, value) if ((rc = check_node(root, value, depth + 1, e)) < 0) return rc;
    return 0;
}

int schema_check(const json_t *schema, dm_err *e) {
    const char *type = json_string_value(json_object_get(schema, "type"));
    if (!json_is_object(schema) || (type && strcmp(type, "object") != 0))
        return dm_err_set(e, DM_EINVAL, "tools", "a tool's parameters must be a JSON Schema of type object");
    return check_node(schema, schema, 0, e);
}

int schema_summary(const json_t *schema, dm_buf *out) {
    const char *key;
    json_t *value;
    int rc = 0;
    bool first = true;
    json_object_foreach(json_object_get(schema, "properties"), key, value) {
        const json_t *type = json_object_get(value, "type");
        if (json_is_array(type)) type = json_array_get(type, 0);
        const char *name = json_is_string(type) ? json_string_value(type) : "any";
        if (rc == 0) rc = dm_buf_printf(out, "%s%s (%s%s)", first ? "" : ", ", key, name, required_has(schema, key) ? ", required" : "");
        first = false;
    }
    return rc == 0 && first ? dm_buf_str(out, "none") : rc;
}
