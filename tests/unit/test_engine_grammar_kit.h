/* Random tool schemas, random values that fit them, and a check of values by schema that is the tests' own. */
#ifndef TEST_ENGINE_GRAMMAR_KIT_H
#define TEST_ENGINE_GRAMMAR_KIT_H

#include <jansson.h>
#include <math.h>

#include "engine/engine.h"
#include "testlib.h"

#define DSML "｜DSML｜"
#define EOS "<｜end▁of▁sentence｜>"
#define TINY DM_SOURCE_DIR "/examples/models/tiny"
#define PUBLISHED DM_TEST_BUILD_DATA "/tokenizer.json"

static uint64_t rng;
static inline uint64_t below(uint64_t n) { return dm_splitmix64(&rng) % n; }

/* ---- does a value fit? ---- */

static bool fits(const json_t *root, const json_t *schema, const json_t *v);

static inline bool fits_type(const char *type, const json_t *v)
{
    if (!strcmp(type, "string")) return json_is_string(v);
    if (!strcmp(type, "integer")) return json_is_integer(v);
    if (!strcmp(type, "number")) return json_is_number(v);
    if (!strcmp(type, "boolean")) return json_is_boolean(v);
    if (!strcmp(type, "array")) return json_is_array(v);
    if (!strcmp(type, "object")) return json_is_object(v);
    return json_is_null(v);
}

static inline bool fits_types(const json_t *types, const json_t *v)
{
    size_t i;
    json_t *one;
    if (json_is_string(types)) return fits_type(json_string_value(types), v);
    json_array_foreach(types, i, one) if (fits_type(json_string_value(one), v)) return true;
    return false;
}

static inline bool fits_object(const json_t *root, const json_t *s, json_t *v)
{
    const json_t *props = json_object_get(s, "properties"), *extra = json_object_get(s, "additionalProperties");
    const char *key;
    json_t *one;
    size_t i;
    json_array_foreach(json_object_get(s, "required"), i, one) if (!json_object_get(v, json_string_value(one))) return false;
    json_object_foreach(v, key, one)
    {
        const json_t *known = json_object_get(props, key);
        if (known ? !fits(root, known, one) : extra ? !fits(root, extra, one) : props != NULL) return false;
    }
    return true;
}

static inline size_t characters(const char *s)
{
    size_t n = 0;
    for (; *s; s++) n += ((unsigned char)*s & 0xC0) != 0x80;
    return n;
}

static inline bool fits_rest(const json_t *root, const json_t *s, const json_t *v)
{
    const json_t *k;
    json_t *one;
    size_t i;
    if ((k = json_object_get(s, "minLength")) && json_is_string(v) && characters(json_string_value(v)) < (size_t)json_integer_value(k)) return false;
    if ((k = json_object_get(s, "minimum")) && json_is_integer(v) && json_integer_value(v) < json_integer_value(k)) return false;
    if ((k = json_object_get(s, "maximum")) && json_is_integer(v) && json_integer_value(v) > json_integer_value(k)) return false;
    if (!json_is_array(v)) return true;
    if ((k = json_object_get(s, "minItems")) && json_array_size(v) < (size_t)json_integer_value(k)) return false;
    if ((k = json_object_get(s, "maxItems")) && json_array_size(v) > (size_t)json_integer_value(k)) return false;
    json_array_foreach(v, i, one)
    {
        const json_t *item = json_array_get(json_object_get(s, "prefixItems"), i);
        if (!item) item = json_object_get(s, "items");
        if (item && !fits(root, item, one)) return false;
    }
    return true;
}

static bool fits(const json_t *root, const json_t *s, const json_t *v)
{
    const json_t *k;
    json_t *one;
    size_t i;
    if (!json_is_object(s)) return !json_is_false(s);
    if (json_object_get(s, "$ref")) return fits(root, json_object_get(json_object_get(root, "$defs"), "tree"), v);
    if ((k = json_object_get(s, "type")) && !fits_types(k, v)) return false;
    if ((k = json_object_get(s, "const")) && !json_equal(k, v)) return false;
    if ((k = json_object_get(s, "enum"))) {
        bool found = false;
        json_array_foreach(k, i, one) found |= json_equal(one, v) == 1;
        if (!found) return false;
    }
    if ((k = json_object_get(s, "anyOf"))) {
        bool found = false;
        json_array_foreach(k, i, one) found |= fits(root, one, v);
        if (!found) return false;
    }
    json_array_foreach(json_object_get(s, "allOf"), i, one) if (!fits(root, one, v)) return false;
    if (json_is_object(v) && !fits_object(root, s, (json_t *)(uintptr_t)v)) return false;
    return fits_rest(root, s, v);
}

/* ---- random schemas ---- */

static const char *const kit_keys[] = { "path", "pattern", "p", "command", "limit", "old", "old_text", "a b", "größe", "k'q", "a\"b", "x=y", "<k>", "名", "n.1", "files" };
static const char *const kit_texts[] = { "", "a", "ab", "abc", "celsius", "fahrenheit", "</x", "é\n", "a\"b", "日本", "1", "true", "</" DSML "parameter>" };

static inline json_t *kit_text(void) { return json_string(kit_texts[below(DM_COUNT(kit_texts))]); }

static json_t *random_schema(int depth);

static inline json_t *random_object_schema(int depth, size_t props_max)
{
    json_t *props = json_object(), *required = json_array(), *s = json_pack("{s:s, s:o}", "type", "object", "properties", props);
    for (size_t n = below(props_max + 1); n; n--) {
        const char *key = kit_keys[below(DM_COUNT(kit_keys))];
        if (json_object_get(props, key)) continue;
        json_object_set_new(props, key, random_schema(depth + 1));
        if (below(2)) json_array_append_new(required, json_string(key));
    }
    if (json_array_size(required)) json_object_set(s, "required", required);
    json_decref(required);
    if (below(4) == 0) json_object_set_new(s, "additionalProperties", below(2) ? json_true() : json_false());
    return s;
}

static inline json_t *random_enum(void)
{
    static const char *const values[] = { "1", "12", "-3", "2.5", "null", "true", "[1, \"a\"]", "{\"k\": [null]}" };
    json_t *list = json_array();
    for (size_t n = 1 + below(4); n; n--)
        json_array_append_new(list, below(2) ? kit_text() : json_loads(values[below(DM_COUNT(values))], JSON_DECODE_ANY, NULL));
    return json_pack("{s:o}", "enum", list);
}

static inline json_t *random_array_schema(int depth)
{
    json_t *s = json_pack("{s:s}", "type", "array");
    if (below(4)) json_object_set_new(s, "items", random_schema(depth + 1));
    if (below(3) == 0) json_object_set_new(s, "minItems", json_integer((json_int_t)below(3)));
    if (below(3) == 0) json_object_set_new(s, "maxItems", json_integer((json_int_t)(2 + below(3))));
    if (below(6) == 0) json_object_set_new(s, "prefixItems", json_pack("[o]", random_schema(depth + 1)));
    return s;
}

static json_t *random_schema(int depth)
{
    static const char *const scalars[] = { "string", "string", "integer", "number", "boolean", "null" };
    switch (depth > 3 ? below(5) : below(16)) {
    case 5: return json_pack("{s:s, s:i}", "type", "string", "minLength", (int)below(4));
    case 6: return json_pack("{s:s, s:i, s:i}", "type", "integer", "minimum", -(int)below(200), "maximum", (int)below(5000));
    case 7: return random_enum();
    case 8: return json_pack("{s:[s,s]}", "type", scalars[below(6)], scalars[below(6)]);
    case 9: return json_pack("{s:[o,o]}", "anyOf", random_schema(depth + 1), random_schema(depth + 1));
    case 10: return json_object();
    case 11: return json_pack("{s:o}", "const", below(2) ? kit_text() : json_integer(7));
    case 12: return json_pack("{s:s}", "$ref", "#/$defs/tree");
    case 13: case 14: return random_object_schema(depth, 4);
    case 15: return random_array_schema(depth);
    default: return json_pack("{s:s}", "type", scalars[below(6)]);
    }
}

/* A tool's parameters; $defs/tree holds itself. */
static inline json_t *random_parameters(void)
{
    json_t *s = random_object_schema(0, 5);
    json_object_set_new(s, "$defs", json_loads("{\"tree\": {\"type\": \"object\", \"properties\": {\"name\": {\"type\": \"string\"}, \"children\": {\"type\": "
        "\"array\", \"items\": {\"$ref\": \"#/$defs/tree\"}}, \"next\": {\"anyOf\": [{\"$ref\": \"#/$defs/tree\"}, {\"type\": \"null\"}]}}, \"required\": [\"name\"]}}", 0, NULL));
    return s;
}

/* ---- random values that fit; NULL: none was found ---- */

static json_t *random_value(const json_t *root, const json_t *s, int depth);

static inline json_t *random_text(const json_t *s)
{
    dm_buf b = { 0 };
    size_t min = (size_t)json_integer_value(json_object_get(s, "minLength"));
    for (size_t n = below(4); n || characters(dm_buf_cstr(&b)) < min; n -= n > 0) assert_ok(dm_buf_str(&b, kit_texts[1 + below(DM_COUNT(kit_texts) - 1)]));
    json_t *v = json_string(dm_buf_cstr(&b));
    dm_buf_free(&b);
    return v;
}

static inline json_t *random_integer(const json_t *s)
{
    const json_t *lo = json_object_get(s, "minimum"), *hi = json_object_get(s, "maximum");
    static const json_int_t some[] = { 0, 1, -1, 7, 10, 99, 120, 4096, -2147483648LL, INT64_MAX, INT64_MIN };
    if (!lo) return json_integer(some[below(DM_COUNT(some))]);
    json_int_t from = json_integer_value(lo), to = json_integer_value(hi);
    return json_integer(from + (json_int_t)below((uint64_t)(to - from) + 1));
}

static inline json_t *random_real(void)
{
    static const double some[] = { 0.0, -0.0, 1.5, -2.25, 1e-7, 1e22, 3.141592653589793, 1e300, 123456789012345.6, 5e-324, 0.1 };
    return json_real(some[below(DM_COUNT(some))]);
}

static inline json_t *random_object(const json_t *root, const json_t *s, int depth)
{
    json_t *o = json_object(), *one, *props = json_object_get(s, "properties");
    const json_t *extra = json_object_get(s, "additionalProperties");
    const char *key;
    size_t i;
    json_object_foreach(props, key, one)
    {
        bool needed = false;
        json_t *r, *v;
        json_array_foreach(json_object_get(s, "required"), i, r) needed |= !strcmp(json_string_value(r), key);
        if (!needed && (depth > 5 || below(2))) continue;
        if ((v = random_value(root, one, depth + 1))) json_object_set_new(o, key, v);
        else if (needed) {
            json_decref(o);
            return NULL;
        }
    }
    if ((extra ? json_is_true(extra) : !props) && below(2)) json_object_set_new(o, below(2) ? "free" : "other key", random_integer(NULL));
    return o;
}

static inline json_t *random_array(const json_t *root, const json_t *s, int depth)
{
    json_t *a = json_array();
    const json_t *max = json_object_get(s, "maxItems");
    size_t n = (size_t)json_integer_value(json_object_get(s, "minItems")), more = depth > 5 ? 0 : below(3);
    n += more;
    if (max && n > (size_t)json_integer_value(max)) n = (size_t)json_integer_value(max);
    for (size_t i = 0; i < n; i++) {
        const json_t *item = json_array_get(json_object_get(s, "prefixItems"), i);
        if (!item) item = json_object_get(s, "items");
        json_t *v = item ? random_value(root, item, depth + 1) : random_integer(NULL);
        if (!v) {
            json_decref(a);
            return NULL;
        }
        json_array_append_new(a, v);
    }
    return a;
}

static inline json_t *random_of_type(const json_t *root, const char *type, const json_t *s, int depth)
{
    if (!strcmp(type, "string")) return random_text(s);
    if (!strcmp(type, "integer")) return random_integer(s);
    if (!strcmp(type, "number")) return below(2) ? random_real() : random_integer(NULL);
    if (!strcmp(type, "boolean")) return json_boolean((int)below(2));
    if (!strcmp(type, "array")) return random_array(root, s, depth);
    if (!strcmp(type, "object")) return random_object(root, s, depth);
    return json_null();
}

static json_t *random_value(const json_t *root, const json_t *s, int depth)
{
    static const char *const any[] = { "string", "integer", "number", "boolean", "null", "array", "object" };
    const json_t *k;
    if (depth > 15) return NULL;
    if (json_object_get(s, "$ref")) return random_value(root, json_object_get(json_object_get(root, "$defs"), "tree"), depth);
    if ((k = json_object_get(s, "const"))) return json_deep_copy(k);
    if ((k = json_object_get(s, "enum"))) return json_deep_copy(json_array_get(k, below(json_array_size(k))));
    if ((k = json_object_get(s, "anyOf"))) return random_value(root, json_array_get(k, below(json_array_size(k))), depth);
    if (!(k = json_object_get(s, "type"))) return random_of_type(root, any[below(depth > 5 ? 5 : 7)], s, depth);
    return random_of_type(root, json_string_value(json_is_string(k) ? k : json_array_get(k, below(json_array_size(k)))), s, depth);
}

/* ---- tools ---- */

#define KIT_TOOLS 4

typedef struct kit_set {
    json_t *schemas[KIT_TOOLS];
    char *texts[KIT_TOOLS];
    dm_parser_tool tools[KIT_TOOLS];
} kit_set;

static inline void kit_set_make(kit_set *k)
{
    static const char *const names[KIT_TOOLS] = { "read", "read_file", "mcp__x-1", "öffne" };
    for (size_t i = 0; i < KIT_TOOLS; i++) {
        k->schemas[i] = random_parameters();
        k->texts[i] = json_dumps(k->schemas[i], 0);
        assert_non_null(k->texts[i]);
        k->tools[i] = (dm_parser_tool){ names[i], k->texts[i] };
    }
}

static inline void kit_set_free(kit_set *k)
{
    for (size_t i = 0; i < KIT_TOOLS; i++) {
        json_decref(k->schemas[i]);
        free(k->texts[i]);
    }
}

static inline const json_t *kit_schema(const kit_set *k, const char *name)
{
    for (size_t i = 0; i < KIT_TOOLS; i++)
        if (!strcmp(k->tools[i].name, name)) return k->schemas[i];
    return NULL;
}

#endif
