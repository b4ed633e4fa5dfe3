/* prompt.c — renders only what the model has not read yet.
 *
 * The token timeline is never rendered again (K04, K16, Q45): a later prompt is the closing tokens that the last
 * reply lacks, then results and messages.  A reply that ended by itself ends with EOS.  One that was stopped (at
 * the end of a call block, by a limit, by a person) gets its EOS here, and its </think> before that if it was
 * still thinking, so that the timeline is what the template would have written. */
#include "agent/agent_int.h"

#include <string.h>

static int no_memory(dm_err *e) { return dm_err_set(e, DM_ENOMEM, "prompt", "out of memory"); }

static int push(json_t *list, json_t *m, dm_err *e) { return m && json_array_append_new(list, m) == 0 ? 0 : no_memory(e); }

static json_t *system_message(const prompt_ctx *c)
{
    json_t *m = json_pack("{s:s, s:s}", "role", "system", "content", c->system ? c->system : "");
    if (!m || json_array_size(c->tools) == 0) return m;
    json_t *tools = json_array();
    size_t i;
    json_t *t;
    json_array_foreach((json_t *)c->tools, i, t)
        json_array_append_new(tools, json_pack("{s:s, s:O}", "type", "function", "function", t));
    if (!tools || json_array_size(tools) != json_array_size(c->tools) || json_object_set_new(m, "tools", tools) != 0) {
        json_decref(m);
        return NULL;
    }
    return m;
}

static int collect(const prompt_ctx *c, const ledger *l, json_t *list, dm_err *e)
{
    int rc = l->ids.n == 0 ? push(list, system_message(c), e) : 0;
    for (size_t i = 0; i < l->ncalls && rc == 0; i++)
        rc = push(list, json_pack("{s:s, s:s, s:s}", "role", "tool", "tool_call_id", l->calls[i].id, "content", l->calls[i].text), e);
    for (size_t i = 0; i < l->nmessages && rc == 0; i++)
        rc = push(list, json_pack("{s:s, s:s}", "role", "user", "content", l->messages[i]), e);
    return rc;
}

static int close_reply(const prompt_ctx *c, const ledger *l, dm_ids *out, dm_err *e)
{
    if (l->ids.n == 0) return 0;
    bool empty = l->reply_at >= l->ids.n;
    if (!empty && l->ids.p[l->ids.n - 1] == c->eos) return 0;
    if (c->mode == DM_THINKING) {
        bool thinking = true;
        for (size_t i = l->reply_at; i < l->ids.n && thinking; i++) thinking = l->ids.p[i] != c->think_end;
        if (thinking && dm_ids_push(out, c->think_end) < 0) return no_memory(e);
    }
    return dm_ids_push(out, c->eos) < 0 ? no_memory(e) : 0;
}

int prompt_build(const prompt_ctx *c, const ledger *l, dm_ids *out, dm_err *e)
{
    json_t *list = json_array();
    char *text = NULL;
    dm_prompt prompt = { 0 };
    dm_chat_opts opts = { .mode = c->mode, .drop_thinking = false, .continues = l->ids.n > 0 };
    int rc = list ? collect(c, l, list, e) : no_memory(e);
    if (rc == 0 && !(text = json_line(list))) rc = no_memory(e);
    if (rc == 0) rc = dm_chat_render(text, strlen(text), &opts, &prompt, e);
    if (rc == 0) rc = close_reply(c, l, out, e);
    if (rc == 0) rc = dm_prompt_encode(c->tok, &prompt, out, e);
    dm_prompt_free(&prompt);
    dm_free(text);
    json_decref(list);
    return rc < 0 ? rc : 0;
}
