/* One call: its parameters become the text of a JSON object, piece by piece, so that string values can be passed
 * on while they are still being written. */
#include <stdlib.h>
#include <string.h>

#include "engine/parser_int.h"

/* ---- tools ---- */

static int tool_read(psr_tool *t, const dm_parser_tool *from, dm_err *e)
{
    t->name = dm_strdup(from->name);
    if (!t->name) return dm_err_set(e, DM_ENOMEM, "parser", "out of memory");
    if (!from->parameters_json || !from->parameters_json[0]) return 0;
    int rc = pj_read(&t->schema, from->parameters_json, strlen(from->parameters_json), e);
    if (rc < 0) return dm_err_prefix(e, "the parameters of tool %s", t->name), rc;
    if (t->schema.root.kind != PJ_DICT) {
        return dm_err_set(e, DM_EFORMAT, "parser", "the parameters of tool %s are %s, not an object", t->name,
                          pj_kind_name(&t->schema.root));
    }
    t->has_schema = true;
    t->props = pj_get(&t->schema.root, "properties");
    t->required = pj_get(&t->schema.root, "required");
    if (t->required && t->required->kind != PJ_LIST) t->required = NULL;
    return 0;
}

int psr_tools_read(dm_parser *p, const dm_parser_opts *o, dm_err *e)
{
    p->tools = dm_calloc(o->ntools ? o->ntools : 1, sizeof *p->tools);
    if (!p->tools) return dm_err_set(e, DM_ENOMEM, "parser", "out of memory");
    for (size_t i = 0; i < o->ntools; i++) {
        p->ntools++;
        int rc = tool_read(&p->tools[i], &o->tools[i], e);
        if (rc < 0) return rc;
    }
    return 0;
}

const psr_tool *psr_tool_find(const dm_parser *p, const uint8_t *name, size_t n)
{
    for (size_t i = 0; i < p->ntools; i++)
        if (strlen(p->tools[i].name) == n && memcmp(p->tools[i].name, name, n) == 0) return &p->tools[i];
    return NULL;
}

static const pj_val *find_prop(const psr_tool *t, const char *name, size_t n)
{
    if (!t->props || t->props->kind != PJ_DICT) return NULL;
    for (uint32_t i = 0; i < t->props->n; i++)
        if (t->props->pairs[i].key.n == n && memcmp(t->props->pairs[i].key.s, name, n) == 0) return &t->props->pairs[i].val;
    return NULL;
}

static bool is_string_prop(const pj_val *prop) { return prop && pj_is(pj_get(prop, "type"), "string"); }

/* ---- objects under construction ---- */

static void put(dm_parser *p, dm_buf *b, const void *s, size_t n)
{
    if (p->rc == 0 && dm_buf_append(b, s, n) < 0) psr_fail(p);
}

static void object_reset(psr_object *o)
{
    dm_buf_clear(&o->json);
    dm_buf_clear(&o->keys);
    o->n = 0;
}

static bool object_has(const psr_object *o, const void *key, size_t n)
{
    for (size_t i = 0; i < o->n; i++)
        if (o->list[i].n == n && (!n || memcmp(o->keys.p + o->list[i].at, key, n) == 0)) return true;
    return false;
}

/* `{"key": ` or `, "key": `. */
static void object_key(dm_parser *p, psr_object *o, const dm_buf *key)
{
    if (p->rc < 0) return;
    if (o->n == o->cap) {
        size_t cap = o->cap ? o->cap * 2 : 8;
        psr_key *list = dm_realloc(o->list, cap * sizeof *list);
        if (!list) {
            psr_fail(p);
            return;
        }
        o->list = list, o->cap = cap;
    }
    psr_key k = {o->keys.n, key->n};
    put(p, &o->keys, key->p, key->n);
    put(p, &o->json, o->n ? ", " : "{", o->n ? 2 : 1);
    if (p->rc == 0 && pj_write_str(dm_buf_cstr(key), key->n, &o->json) < 0) psr_fail(p);
    put(p, &o->json, ": ", 2);
    o->list[o->n++] = k;
}

/* For messages: at most 64 bytes, and no half character. */
static int clip(const void *s, size_t n) { return (int)dm_utf8_whole(s, n < 64 ? n : 64); }

/* ---- begin and end of a call ---- */

void psr_call_reset(dm_parser *p)
{
    psr_call *c = &p->call;
    c->open = c->begun = c->bad = c->held = c->junk = c->has_body = c->in_string = c->escaped = c->nested = false;
    c->bytes = c->sent = 0;
    c->tool = NULL;
    object_reset(&c->args);
    object_reset(&c->inner);
    dm_buf_clear(&c->body);
}

void psr_call_free(psr_call *c)
{
    psr_object *objects[] = {&c->args, &c->inner};
    for (size_t i = 0; i < DM_COUNT(objects); i++) {
        dm_buf_free(&objects[i]->json);
        dm_buf_free(&objects[i]->keys);
        dm_free(objects[i]->list);
    }
    dm_buf_free(&c->param.key);
    dm_buf_free(&c->param.value);
    dm_buf_free(&c->outer.key);
    dm_buf_free(&c->outer.value);
    dm_buf_free(&c->body);
}

static void tool_names(const dm_parser *p, char *out, size_t cap)
{
    size_t n = 0;
    out[0] = 0;
    for (size_t i = 0; i < p->ntools && n < cap - 1; i++) {
        int k = snprintf(out + n, cap - n, "%s%s", i ? ", " : "", p->tools[i].name);
        if (k < 0) return;
        n += (size_t)k;
    }
    out[dm_utf8_whole(out, strlen(out))] = 0;
}

/* From here on what is read does not count; a call that was announced must not end as whole. */
static void refuse(dm_parser *p, const char *why)
{
    psr_call *c = &p->call;
    if (c->bad) return;
    c->bad = true;
    if (c->begun) psr_error(p, c->index, "The call to %s was refused: %s. Nothing was run.", c->tool->name, why);
    else psr_error_later(p, "A call was refused: %s. Nothing was run.", why);
}

void psr_call_begin(dm_parser *p, const tag *t, const uint8_t *view)
{
    psr_call *c = &p->call;
    psr_call_reset(p);
    c->open = true;
    p->invokes++;
    if (t->kind != TAG_INVOKE || !t->has_name) {
        refuse(p, t->kind != TAG_INVOKE ? "a parameter stands outside of an invoke" : "its invoke tag has no name=\"…\"");
        return;
    }
    c->tool = psr_tool_find(p, view + t->name, t->name_n);
    if (!c->tool) {
        char names[256];
        c->bad = true;
        tool_names(p, names, sizeof names);
        dm_buf_clear(&p->tmp);
        psr_spell(p, &p->tmp, view + t->name, t->name_n); /* there may be a symbol in it */
        psr_error_later(p, "There is no tool named '%.*s'. The tools are: %s.", clip(p->tmp.p, p->tmp.n), dm_buf_cstr(&p->tmp), names);
        return;
    }
    psr_pending_emit(p);
    c->index = p->next_index++;
    c->begun = true;
    p->begun++;
    psr_emit(p, DM_PARSE_CALL, c->index, c->tool->name, strlen(c->tool->name));
}

void psr_args_flush(dm_parser *p)
{
    psr_call *c = &p->call;
    if (!c->open || !c->begun || c->bad || c->held || c->sent == c->args.json.n) return;
    psr_emit(p, DM_PARSE_ARGS, c->index, c->args.json.p + c->sent, c->args.json.n - c->sent);
    c->sent = c->args.json.n;
}

/* ---- wrappers: {"arguments": {…}} for a tool that has no such parameter ---- */

static bool is_wrapper(const psr_tool *t, const char *key, size_t n)
{
    bool wrapper = (n == 9 && memcmp(key, "arguments", 9) == 0) || (n == 5 && memcmp(key, "input", 5) == 0);
    return wrapper && t->has_schema && !find_prop(t, key, n);
}

bool psr_call_has_required(const dm_parser *p)
{
    const psr_call *c = &p->call;
    const pj_val *req = c->tool ? c->tool->required : NULL;
    if (c->has_body || (c->args.n == 1 && is_wrapper(c->tool, (char *)c->args.keys.p, c->args.keys.n))) return true;
    for (uint32_t i = 0; req && i < req->n; i++)
        if (req->items[i].kind == PJ_STR && !object_has(&c->args, req->items[i].s, req->items[i].n)) return false;
    return true;
}

/* The one required parameter, if it is the only one and a string. */
static const pj_val *only_string(const psr_tool *t)
{
    if (!t->required || t->required->n != 1 || t->required->items[0].kind != PJ_STR) return NULL;
    const pj_val *name = &t->required->items[0];
    return is_string_prop(find_prop(t, name->s, name->n)) ? name : NULL;
}

static void set_args(dm_parser *p, const pj_val *v)
{
    dm_buf_clear(&p->call.args.json);
    if (p->rc == 0 && pj_write(v, &p->call.args.json) < 0) psr_fail(p);
}

/* What the wrapper holds becomes the arguments: an object, the text of one, or the one string that is required. */
static bool unwrap_value(dm_parser *p, const pj_val *v)
{
    const psr_tool *t = p->call.tool;
    if (v->kind == PJ_DICT && pj_finite(v)) {
        set_args(p, v);
        return true;
    }
    if (v->kind != PJ_STR) return false;
    pj_doc doc;
    int rc = pj_read(&doc, v->s, v->n, NULL);
    if (rc == DM_ENOMEM) psr_fail(p);
    bool object = rc == 0 && doc.root.kind == PJ_DICT && pj_finite(&doc.root);
    if (object) set_args(p, &doc.root);
    if (rc == 0) pj_free(&doc);
    const pj_val *name = object ? NULL : only_string(t);
    if (name) {
        pj_pair pair = {.key = *name, .val = *v};
        set_args(p, &(pj_val){.kind = PJ_DICT, .n = 1, .pairs = &pair});
    }
    return object || name;
}

static void unwrap(dm_parser *p)
{
    psr_call *c = &p->call;
    pj_doc doc;
    int rc = p->rc < 0 ? p->rc : pj_read(&doc, dm_buf_cstr(&c->args.json), c->args.json.n, NULL);
    if (rc == DM_ENOMEM) psr_fail(p);
    if (rc < 0) return;
    const pj_val *d = &doc.root;
    if (d->kind == PJ_DICT && d->n == 1 && is_wrapper(c->tool, d->pairs[0].key.s, d->pairs[0].key.n) &&
        unwrap_value(p, &d->pairs[0].val))
        psr_repair(p, "the arguments of %s were taken out of a parameter named %s", c->tool->name, d->pairs[0].key.s);
    pj_free(&doc);
}

/* ---- the end ---- */

static void read_body(dm_parser *p)
{
    psr_call *c = &p->call;
    pj_doc doc;
    int rc = pj_read(&doc, dm_buf_cstr(&c->body), c->body.n, NULL);
    if (rc == DM_ENOMEM) psr_fail(p);
    bool object = rc == 0 && doc.root.kind == PJ_DICT && pj_finite(&doc.root);
    if (object) set_args(p, &doc.root);
    if (rc == 0) pj_free(&doc);
    if (!object) refuse(p, "what stands in place of its parameters is not a JSON object");
    else psr_repair(p, "the call to %s has a JSON object in place of parameters", c->tool->name);
}

void psr_call_end(dm_parser *p)
{
    psr_call *c = &p->call;
    if (!c->bad && c->has_body) read_body(p);
    else if (!c->bad && c->junk && !c->args.n) refuse(p, "it has text where its parameters should be");
    else if (!c->bad) put(p, &c->args.json, c->args.n ? "}" : "{}", c->args.n ? 1 : 2);
    if (!c->bad) {
        if (c->held) unwrap(p);
        if (c->junk) psr_repair(p, "text between the parameters of %s was skipped", c->tool->name);
        c->held = false;
        psr_args_flush(p);
        psr_call_push(p, c->tool->name, &c->args.json);
        psr_emit(p, DM_PARSE_CALL_END, c->index, c->args.json.p, c->args.json.n);
        p->whole++;
    }
    c->open = false;
}

/* ---- parameters ---- */

static psr_object *target(psr_call *c) { return c->nested ? &c->inner : &c->args; }

static param_type type_of(const dm_parser *p, const tag *t, const uint8_t *key, size_t n)
{
    if (t->string == STRING_TRUE) return PARAM_STRING;
    if (t->string == STRING_FALSE) return PARAM_JSON;
    const psr_call *c = &p->call;
    const pj_val *prop = c->tool && !c->nested ? find_prop(c->tool, (const char *)key, n) : NULL;
    return is_string_prop(prop) ? PARAM_STRING : PARAM_GUESS;
}

void psr_param_begin(dm_parser *p, const tag *t, const uint8_t *view)
{
    psr_call *c = &p->call;
    psr_param *m = &c->param;
    m->visible = false;
    m->dialect = t->dialect;
    dm_buf_clear(&m->key);
    dm_buf_clear(&m->value);
    m->type = PARAM_STRING;
    if (!c->bad && !t->has_name) refuse(p, "a parameter tag has no name=\"…\"");
    if (c->bad) return;
    dm_buf_clear(&m->key);
    psr_spell(p, &m->key, view + t->name, t->name_n);
    m->type = type_of(p, t, m->key.p, m->key.n);
    if (object_has(target(c), m->key.p, m->key.n)) {
        char why[160];
        snprintf(why, sizeof why, "the parameter %.*s is given twice", clip(m->key.p, m->key.n), dm_buf_cstr(&m->key));
        refuse(p, why);
        return;
    }
    if (!c->nested) c->held = c->args.n == 0 && is_wrapper(c->tool, dm_buf_cstr(&m->key), m->key.n);
    if (m->type != PARAM_STRING) return;
    object_key(p, target(c), &m->key);
    put(p, &target(c)->json, "\"", 1);
}

bool psr_param_blank(const dm_parser *p)
{
    const psr_call *c = &p->call;
    return !c->nested && !c->bad && c->param.type != PARAM_STRING && !c->param.visible;
}

void psr_param_text(dm_parser *p, const uint8_t *s, size_t n)
{
    psr_call *c = &p->call;
    if (!n || c->bad || p->rc < 0) return;
    if (c->param.type != PARAM_STRING) {
        for (size_t i = 0; !c->param.visible && i < n; i++) c->param.visible = !psr_is_blank(s[i]);
        psr_spell(p, &c->param.value, s, n);
        return;
    }
    dm_buf_clear(&p->tmp);
    psr_spell(p, &p->tmp, s, n);
    if (p->rc == 0 && pj_escape(dm_buf_cstr(&p->tmp), p->tmp.n, &target(c)->json) < 0) psr_fail(p);
}

/* A value that should be JSON: as JSON if it is, else as a string, so that the arguments are JSON in any case. */
static void put_json_value(dm_parser *p, psr_object *o, const psr_param *m)
{
    pj_doc doc;
    int rc = pj_read(&doc, dm_buf_cstr(&m->value), m->value.n, NULL);
    if (rc == DM_ENOMEM) psr_fail(p);
    bool json = rc == 0 && pj_finite(&doc.root);
    if (json && pj_write(&doc.root, &o->json) < 0) psr_fail(p);
    if (rc == 0) pj_free(&doc);
    if (json || p->rc < 0) return;
    if (pj_write_str(dm_buf_cstr(&m->value), m->value.n, &o->json) < 0) psr_fail(p);
    if (m->type == PARAM_JSON)
        psr_repair(p, "the parameter %.*s is not the JSON that it says it is; it was read as a string",
                   clip(m->key.p, m->key.n), dm_buf_cstr(&m->key));
}

void psr_param_end(dm_parser *p)
{
    psr_call *c = &p->call;
    psr_param *m = &c->param;
    if (c->bad || p->rc < 0) return;
    psr_object *o = target(c);
    if (m->type == PARAM_STRING) {
        put(p, &o->json, "\"", 1);
    } else {
        object_key(p, o, &m->key);
        put_json_value(p, o, m);
    }
    if (!c->nested) psr_args_flush(p);
}

/* ---- a parameter whose value is parameters ---- */

void psr_nest_begin(dm_parser *p)
{
    psr_call *c = &p->call;
    psr_param swap = c->outer;
    c->outer = c->param;
    c->param = swap;
    c->nested = true;
    object_reset(&c->inner);
}

void psr_nest_end(dm_parser *p)
{
    psr_call *c = &p->call;
    c->nested = false;
    if (c->bad) return;
    object_key(p, &c->args, &c->outer.key);
    put(p, &c->inner.json, c->inner.n ? "}" : "{}", c->inner.n ? 1 : 2);
    put(p, &c->args.json, c->inner.json.p, c->inner.json.n);
    psr_repair(p, "the parameter %.*s holds parameters; it was read as an object", clip(c->outer.key.p, c->outer.key.n),
               dm_buf_cstr(&c->outer.key));
    psr_args_flush(p);
}
