/* Messages from JSON.  A message whose shape cannot be used is an error that names its number and the field; what
 * clients send in more than one way (null content, lists of parts, arguments as an object) is taken as it comes. */
#include <string.h>

#include "engine/chat_int.h"

const char *const chat_tasks[] = {"action", "query", "authority", "domain", "title", "read_url", NULL};

static const char *const role_names[] = {"system", "user", "developer", "assistant", "tool", "latest_reminder"};

typedef struct reading {
    uint32_t number; /* of the message */
    const pj_val *msg;
    dm_err *err;
} reading;

#define BAD(r, ...) bad_shape((r), __VA_ARGS__)

DM_PRINTF(2, 3) static int bad_shape(const reading *r, const char *fmt, ...)
{
    char text[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return dm_err_set(r->err, DM_EFORMAT, "chat", "message %u: %s", r->number, text);
}

/* A field, with null as good as absent. */
static const pj_val *field(const pj_val *v, const char *name)
{
    const pj_val *f = pj_get(v, name);
    return f && f->kind == PJ_NULL ? NULL : f;
}

static int read_role(const reading *r, chat_role *out)
{
    const pj_val *v = pj_get(r->msg, "role");
    for (size_t i = 0; i < DM_COUNT(role_names); i++) {
        if (!pj_is(v, role_names[i])) continue;
        *out = (chat_role)i;
        return 0;
    }
    if (!v || v->kind != PJ_STR) return BAD(r, "role is %s, not a string", pj_kind_name(v));
    return BAD(r, "role '%.*s' is not supported", v->n > 40 ? 40 : (int)v->n, v->s);
}

static int check_part(const reading *r, const pj_val *part, uint32_t i)
{
    const pj_val *type = pj_get(part, "type"), *text = pj_get(part, "text");
    if (!type || type->kind != PJ_STR) return BAD(r, "content[%u].type is %s, not a string", i, pj_kind_name(type));
    if (pj_is(type, "text") && (!text || text->kind != PJ_STR)) return BAD(r, "content[%u].text is %s, not a string", i, pj_kind_name(text));
    return 0;
}

static int read_content(const reading *r, const pj_val **out)
{
    const pj_val *v = *out = field(r->msg, "content");
    if (!v || v->kind == PJ_STR) return 0;
    if (v->kind != PJ_LIST) return BAD(r, "content is %s, not a string, null or a list of parts", pj_kind_name(v));
    for (uint32_t i = 0; i < v->n; i++) {
        int rc = check_part(r, &v->items[i], i);
        if (rc < 0) return rc;
    }
    return 0;
}

static int read_tools(const reading *r, const pj_val **out)
{
    const pj_val *v = field(r->msg, "tools");
    *out = NULL;
    if (!v) return 0;
    if (v->kind != PJ_LIST) return BAD(r, "tools is %s, not a list", pj_kind_name(v));
    for (uint32_t i = 0; i < v->n; i++) {
        const pj_val *f = pj_get(&v->items[i], "function");
        if (!f || f->kind != PJ_DICT) return BAD(r, "tools[%u].function is %s, not an object", i, pj_kind_name(f));
    }
    if (v->n) *out = v;
    return 0;
}

static int read_calls(const reading *r, const pj_val **out)
{
    const pj_val *v = field(r->msg, "tool_calls");
    *out = NULL;
    if (!v) return 0;
    if (v->kind != PJ_LIST) return BAD(r, "tool_calls is %s, not a list", pj_kind_name(v));
    for (uint32_t i = 0; i < v->n; i++) {
        const pj_val *f = pj_get(&v->items[i], "function");
        const pj_val *name = f ? pj_get(f, "name") : NULL;
        if (!f || f->kind != PJ_DICT) return BAD(r, "tool_calls[%u].function is %s, not an object", i, pj_kind_name(f));
        if (!name || name->kind != PJ_STR || !name->n) return BAD(r, "tool_calls[%u].function.name is %s, not a name", i, pj_kind_name(name));
    }
    if (v->n) *out = v;
    return 0;
}

static int read_task(const reading *r, const char **out)
{
    const pj_val *v = field(r->msg, "task");
    *out = NULL;
    if (!v || pj_is(v, "")) return 0;
    for (int i = 0; chat_tasks[i]; i++)
        if (pj_is(v, chat_tasks[i])) *out = chat_tasks[i];
    if (*out) return 0;
    if (v->kind != PJ_STR) return BAD(r, "task is %s, not a string", pj_kind_name(v));
    return BAD(r, "task '%.*s' is not one of action, query, authority, domain, title, read_url", v->n > 40 ? 40 : (int)v->n, v->s);
}

static int read_string_field(const reading *r, const char *name, const pj_val **out)
{
    const pj_val *v = *out = field(r->msg, name);
    return !v || v->kind == PJ_STR ? 0 : BAD(r, "%s is %s, not a string", name, pj_kind_name(v));
}

/* {} and the like ask for nothing. */
static bool is_empty(const pj_val *v)
{
    return v->kind == PJ_FALSE || ((v->kind == PJ_STR || v->kind == PJ_LIST || v->kind == PJ_DICT) && v->n == 0);
}

static int read_message(const reading *r, chat_msg *m)
{
    int rc = r->msg->kind == PJ_DICT ? 0 : BAD(r, "%s, not an object", pj_kind_name(r->msg));
    m->number = r->number;
    if (rc == 0) rc = read_role(r, &m->role);
    if (rc == 0) rc = read_content(r, &m->content);
    if (rc == 0) rc = read_tools(r, &m->tools);
    if (rc == 0) rc = read_task(r, &m->task);
    if (rc < 0) return rc;
    const pj_val *format = field(r->msg, "response_format"), *eos = field(r->msg, "wo_eos");
    m->response_format = format && !is_empty(format) ? format : NULL;
    m->wo_eos = eos && eos->kind == PJ_TRUE;
    if (m->role == CHAT_ASSISTANT) {
        rc = read_calls(r, &m->calls);
        if (rc == 0) rc = read_string_field(r, "reasoning_content", &m->reasoning);
    }
    return rc;
}

/* P1.  A tool message is a block of a user turn, and neighbours become one turn, except that a user message does
 * not join a turn that carries a task.  The task of a message that joins another is lost. */
static int add_message(chat_talk *t, const reading *r, const chat_msg *m)
{
    chat_msg *prev = t->n ? &t->msgs[t->n - 1] : NULL;
    if (m->tools) t->any_tools = true;
    if (m->role != CHAT_USER && m->role != CHAT_TOOL) {
        t->msgs[t->n++] = *m;
        return 0;
    }
    chat_block b = {.result = m->role == CHAT_TOOL, .content = m->content};
    if (b.result) {
        int rc = read_string_field(r, "tool_call_id", &b.id);
        if (rc < 0) return rc;
    }
    t->blocks[t->nblocks++] = b;
    if (prev && prev->role == CHAT_USER && (b.result || !prev->task)) {
        prev->nblocks++;
        return 0;
    }
    t->msgs[t->n] = *m;
    t->msgs[t->n].role = CHAT_USER;
    if (b.result) t->msgs[t->n].task = NULL;
    t->msgs[t->n].first_block = t->nblocks - 1;
    t->msgs[t->n++].nblocks = 1;
    return 0;
}

int chat_read(chat_talk *t, const char *json, size_t n, dm_err *e)
{
    memset(t, 0, sizeof *t);
    int rc = pj_read(&t->doc, json, n, e);
    if (rc < 0) {
        dm_err_prefix(e, "the messages");
        return rc;
    }
    const pj_val *list = &t->doc.root;
    if (list->kind != PJ_LIST) return dm_err_set(e, DM_EFORMAT, "chat", "the messages are %s, not a list", pj_kind_name(list));
    t->msgs = dm_calloc((size_t)list->n + 1, sizeof *t->msgs);
    t->blocks = dm_calloc((size_t)list->n + 1, sizeof *t->blocks);
    if (!t->msgs || !t->blocks) return dm_err_set(e, DM_ENOMEM, "chat", "out of memory");
    for (uint32_t i = 0; i < list->n; i++) {
        reading r = {.number = i, .msg = &list->items[i], .err = e};
        chat_msg m = {0};
        rc = read_message(&r, &m);
        if (rc == 0) rc = add_message(t, &r, &m);
        if (rc < 0) return rc;
    }
    return 0;
}

void chat_free(chat_talk *t)
{
    dm_free(t->msgs);
    dm_free(t->blocks);
    pj_free(&t->doc);
    memset(t, 0, sizeof *t);
}
