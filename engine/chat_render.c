/* Messages to text.  The writer keeps the first failure and does nothing after it, so that the templates below
 * read like the text they make. */
#include <string.h>

#include "engine/chat_int.h"
#include "engine/chat_texts_int.h"

typedef struct writer {
    dm_prompt *p;
    const chat_talk *t;
    const dm_chat_opts *o;
    dm_err *err;
    int rc;
} writer;

static void put_bytes(writer *w, const void *s, size_t n)
{
    if (w->rc == 0) w->rc = dm_buf_append(&w->p->text, s, n);
}

static void put(writer *w, const char *s) { put_bytes(w, s, strlen(s)); }
static void put_string(writer *w, const pj_val *v) { put_bytes(w, v->s, v->n); }

static void put_json(writer *w, const pj_val *v)
{
    if (w->rc == 0) w->rc = pj_write(v, &w->p->text);
}

/* An added token: its place is remembered, so that the same characters elsewhere stay data. */
static void put_mark_bytes(writer *w, const char *s, size_t n)
{
    dm_prompt *p = w->p;
    if (w->rc == 0 && p->nspans == p->spans_cap) {
        size_t cap = p->spans_cap ? p->spans_cap * 2 : 32;
        dm_span *spans = dm_realloc(p->spans, cap * sizeof *spans);
        if (spans) p->spans = spans, p->spans_cap = cap;
        else w->rc = DM_ENOMEM;
    }
    if (w->rc == 0) p->spans[p->nspans++] = (dm_span){p->text.n, n};
    put_bytes(w, s, n);
}

static void put_mark(writer *w, const char *s) { put_mark_bytes(w, s, strlen(s)); }

/* Fixed text of ours, in which these three are added tokens wherever they stand. */
static void put_template(writer *w, const char *s)
{
    static const char *const marks[] = {MARK_DSML, MARK_THINK, MARK_THINK_END};
    const char *from = s;
    while (*s) {
        size_t n = 0;
        for (size_t i = 0; i < DM_COUNT(marks) && !n; i++)
            if (dm_str_prefix(s, marks[i])) n = strlen(marks[i]);
        if (!n) {
            s++;
            continue;
        }
        put_bytes(w, from, (size_t)(s - from));
        put_mark_bytes(w, s, n);
        from = s += n;
    }
    put_bytes(w, from, (size_t)(s - from));
}

/* ---- contents ---- */

static void put_part(writer *w, const pj_val *part)
{
    const pj_val *type = pj_get(part, "type");
    if (pj_is(type, "text")) {
        put_string(w, pj_get(part, "text"));
        return;
    }
    put(w, "[Unsupported ");
    put_string(w, type);
    put(w, "]");
}

static void put_content(writer *w, const pj_val *v)
{
    if (!v) return;
    if (v->kind == PJ_STR) {
        put_string(w, v);
        return;
    }
    for (uint32_t i = 0; i < v->n; i++) {
        if (i) put(w, "\n\n");
        put_part(w, &v->items[i]);
    }
}

static bool content_is_empty(const pj_val *v) { return !v || v->n == 0; }

/* Tools block and response format, behind the text of a system or developer message. */
static void put_extras(writer *w, const chat_msg *m)
{
    if (m->tools) {
        put(w, "\n\n");
        put_template(w, chat_tools_head);
        for (uint32_t i = 0; i < m->tools->n; i++) {
            put_json(w, pj_get(&m->tools->items[i], "function"));
            put(w, "\n");
        }
        put_template(w, chat_tools_tail);
    }
    if (m->response_format) {
        put(w, chat_response_format);
        put_json(w, m->response_format);
    }
}

/* ---- calls ---- */

static void put_param(writer *w, const char *key, size_t nkey, const pj_val *v)
{
    bool text = v->kind == PJ_STR;
    put_template(w, "<｜DSML｜parameter name=\"");
    put_bytes(w, key, nkey);
    put(w, text ? "\" string=\"true\">" : "\" string=\"false\">");
    if (text) put_string(w, v);
    else put_json(w, v);
    put_template(w, "</｜DSML｜parameter>");
}

static void put_params(writer *w, const pj_val *dict)
{
    for (uint32_t i = 0; i < dict->n; i++) {
        const pj_pair *pair = &dict->pairs[i];
        if (i) put(w, "\n");
        put_param(w, pair->key.s, pair->key.n, &pair->val);
    }
}

/* What is no object cannot be parameters; the model sees it as one text named `arguments`. */
static void put_raw_arguments(writer *w, const char *s, size_t n)
{
    pj_val text = {.kind = PJ_STR, .n = (uint32_t)n, .s = s};
    put_param(w, "arguments", strlen("arguments"), &text);
}

static void put_arguments_text(writer *w, const pj_val *text)
{
    pj_doc doc;
    int rc = pj_read(&doc, text->s, text->n, NULL);
    if (rc == DM_ENOMEM) w->rc = rc;
    else if (rc == 0 && doc.root.kind == PJ_DICT) put_params(w, &doc.root);
    else put_raw_arguments(w, text->s, text->n);
    if (rc == 0) pj_free(&doc);
}

static void put_arguments(writer *w, const pj_val *v)
{
    if (!v || v->kind == PJ_NULL || w->rc < 0) return;
    if (v->kind == PJ_STR) {
        put_arguments_text(w, v);
    } else if (v->kind == PJ_DICT) {
        put_params(w, v);
    } else {
        dm_buf json = {0};
        w->rc = pj_write(v, &json);
        if (w->rc == 0) put_raw_arguments(w, dm_buf_cstr(&json), json.n);
        dm_buf_free(&json);
    }
}

static void put_calls(writer *w, const pj_val *calls)
{
    put_template(w, "\n\n<｜DSML｜tool_calls>\n");
    for (uint32_t i = 0; i < calls->n; i++) {
        const pj_val *f = pj_get(&calls->items[i], "function");
        if (i) put(w, "\n");
        put_template(w, "<｜DSML｜invoke name=\"");
        put_string(w, pj_get(f, "name"));
        put(w, "\">\n");
        put_arguments(w, pj_get(f, "arguments"));
        put_template(w, "\n</｜DSML｜invoke>");
    }
    put_template(w, "\n</｜DSML｜tool_calls>");
}

/* ---- messages ---- */

static void put_user(writer *w, const chat_msg *m)
{
    put_mark(w, MARK_USER);
    for (size_t i = 0; i < m->nblocks; i++) {
        const chat_block *b = &w->t->blocks[m->first_block + i];
        if (i) put(w, "\n\n");
        if (b->result) put(w, "<tool_result>");
        put_content(w, b->content);
        if (b->result) put(w, "</tool_result>");
    }
}

static void put_developer(writer *w, const chat_msg *m)
{
    if (content_is_empty(m->content) && w->rc == 0)
        w->rc = dm_err_set(w->err, DM_EFORMAT, "chat", "message %u: content of a developer message is empty", m->number);
    put_mark(w, MARK_USER);
    put_content(w, m->content);
    put_extras(w, m);
}

static void put_assistant(writer *w, size_t i)
{
    const chat_msg *m = &w->t->msgs[i];
    bool after_task = i && w->t->msgs[i - 1].task;
    if (w->o->mode == DM_THINKING && !after_task && (!w->t->drop_thinking || (int64_t)i > w->t->last)) {
        if (m->reasoning) put_string(w, m->reasoning);
        put_mark(w, MARK_THINK_END);
    }
    put_content(w, m->content);
    if (m->calls) put_calls(w, m->calls);
    if (!m->wo_eos) put_mark(w, MARK_EOS);
}

static void put_message(writer *w, size_t i)
{
    const chat_msg *m = &w->t->msgs[i];
    switch (m->role) {
    case CHAT_SYSTEM:
        put_content(w, m->content);
        put_extras(w, m);
        break;
    case CHAT_DEVELOPER: put_developer(w, m); break;
    case CHAT_ASSISTANT: put_assistant(w, i); break;
    case CHAT_REMINDER:
        put_mark(w, MARK_REMINDER);
        put_content(w, m->content);
        break;
    case CHAT_USER:
    case CHAT_TOOL: put_user(w, m); break;
    }
}

/* ---- the turn goes to the assistant ---- */

static void put_task(writer *w, const char *task)
{
    char mark[40];
    snprintf(mark, sizeof mark, "<｜%s｜>", task);
    put_mark(w, mark);
}

static bool is_asking(const chat_msg *m) { return m->role == CHAT_USER || m->role == CHAT_DEVELOPER; }

/* System text in mid-talk must not swallow the assistant's marker: behind a user turn it stands in for that turn,
 * behind a finished assistant turn it asks by itself.  False: message i gives the turn to nobody. */
static bool gives_turn(const writer *w, size_t *i)
{
    const chat_msg *msgs = w->t->msgs;
    size_t k = *i;
    if (msgs[k].role != CHAT_SYSTEM) return is_asking(&msgs[k]);
    while (k && msgs[k].role == CHAT_SYSTEM) k--;
    if (is_asking(&msgs[k])) *i = k;
    if (msgs[k].role == CHAT_ASSISTANT) return !msgs[k].wo_eos;
    return is_asking(&msgs[k]) || (msgs[k].role == CHAT_SYSTEM && w->o->continues);
}

static void put_transition(writer *w, size_t i)
{
    const chat_talk *t = w->t;
    const bool thinking = w->o->mode == DM_THINKING;
    if (i + 1 < t->n && t->msgs[i + 1].role != CHAT_ASSISTANT && t->msgs[i + 1].role != CHAT_REMINDER) return;
    const bool turn = t->msgs[i].task || gives_turn(w, &i);
    const char *task = t->msgs[i].task;
    if (task && task != chat_tasks[0]) {
        put_task(w, task);
    } else if (task) {
        put_mark(w, MARK_ASSISTANT);
        put_mark(w, thinking ? MARK_THINK : MARK_THINK_END);
        put_task(w, task);
    } else if (turn) {
        put_mark(w, MARK_ASSISTANT);
        put_mark(w, thinking && (!t->drop_thinking || (int64_t)i >= t->last) ? MARK_THINK : MARK_THINK_END);
    }
}

/* The ladder of efforts belongs to the revision of the weights: what was max is now high. */
static const char *effort_text(const dm_chat_opts *o)
{
    if (o->mode != DM_THINKING) return "";
    if (o->revision == DM_REV_APRIL) return o->effort == DM_EFFORT_MAX ? chat_effort_absolute : "";
    return o->effort == DM_EFFORT_MAX ? chat_effort_beyond : o->effort == DM_EFFORT_HIGH ? chat_effort_absolute : "";
}

static int render(writer *w)
{
    if (!w->o->continues) {
        put_mark(w, MARK_BOS);
        if (w->t->n) put(w, effort_text(w->o));
    }
    for (size_t i = 0; i < w->t->n; i++) {
        put_message(w, i);
        put_transition(w, i);
    }
    return w->rc == DM_ENOMEM ? dm_err_set(w->err, w->rc, "chat", "out of memory") : w->rc;
}

int dm_chat_render(const char *messages_json, size_t n, const dm_chat_opts *o, dm_prompt *out, dm_err *e)
{
    chat_talk t;
    dm_buf_clear(&out->text);
    out->nspans = 0;
    int rc = chat_read(&t, messages_json, n, e);
    if (rc == 0 && (rc = chat_prepare(&t, o)) < 0) dm_err_set(e, rc, "chat", "out of memory");
    if (rc == 0) {
        writer w = {.p = out, .t = &t, .o = o, .err = e};
        rc = render(&w);
    }
    if (rc < 0) {
        dm_buf_clear(&out->text);
        out->nspans = 0;
    }
    chat_free(&t);
    return rc;
}
