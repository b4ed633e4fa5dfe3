/* host.c — what all sessions of a loop share. */
#include "agent/session_int.h"

#include <string.h>

/* Added tokens that a model may write: the end, the thinking marks, the call marker.  The others are the
 * template's (roles) or nobody's (placeholders), and ids behind the tokenizer's are no tokens at all. */
static int ban_tokens(dm_host *h, dm_err *e)
{
    int vocab = h->o.forward->vocab;
    h->banned = dm_calloc((size_t)vocab, 1);
    if (!h->banned) return dm_err_set(e, DM_ENOMEM, "host", "out of memory");
    int known = dm_tok_vocab(h->o.tok);
    for (int id = 0; id < vocab; id++) h->banned[id] = id >= known || dm_tok_is_special(h->o.tok, id);
    static const char *const allowed[] = { "<｜end▁of▁sentence｜>", "<think>", "</think>", "｜DSML｜" };
    for (size_t i = 0; i < DM_COUNT(allowed); i++) {
        int id = dm_tok_special(h->o.tok, allowed[i]);
        if (id >= 0 && id < vocab) h->banned[id] = 0;
    }
    return 0;
}

static int find_tokens(dm_host *h, dm_err *e)
{
    h->eos = dm_tok_special(h->o.tok, "<｜end▁of▁sentence｜>");
    h->think_end = dm_tok_special(h->o.tok, "</think>");
    h->user = dm_tok_special(h->o.tok, "<｜User｜>");
    if (h->eos < 0 || h->think_end < 0 || h->user < 0)
        return dm_err_set(e, DM_EMODEL, "host", "the tokenizer lacks <｜end▁of▁sentence｜>, <｜User｜> or </think>; it is not one of this family");
    dm_tok_hash(h->o.tok, &h->tokenizer);
    return 0;
}

static int copy_texts(dm_host *h, const dm_host_opts *o, dm_err *e)
{
    h->o.model_name = dm_strdup(o->model_name ? o->model_name : "model");
    h->o.state_dir = o->state_dir ? dm_strdup(o->state_dir) : NULL;
    h->o.system = dm_strdup(o->system ? o->system : "");
    h->tools = o->tools ? json_deep_copy(o->tools) : NULL;
    h->o.tools = NULL;
    bool ok = h->o.model_name && h->o.system && (h->o.state_dir || !o->state_dir) && (h->tools || !o->tools);
    return ok ? 0 : dm_err_set(e, DM_ENOMEM, "host", "out of memory");
}

int dm_host_create(dm_host **out, const dm_host_opts *o, dm_err *e)
{
    *out = NULL;
    if (!o->loop || !o->engine || !o->forward || !o->tok || !o->journal) return dm_err_set(e, DM_EINVAL, "host", "loop, engine, forward, tokenizer and journal are needed");
    dm_host *h = dm_calloc(1, sizeof *h);
    if (!h) return dm_err_set(e, DM_ENOMEM, "host", "out of memory");
    h->o = *o;
    int rc = copy_texts(h, o, e);
    if (rc == 0) rc = find_tokens(h, e);
    if (rc == 0) rc = ban_tokens(h, e);
    if (rc < 0) {
        dm_host_destroy(h);
        return rc;
    }
    *out = h;
    return 0;
}

void dm_host_destroy(dm_host *h)
{
    if (!h) return;
    DM_ASSERT(h->sessions == 0);
    dm_free((void *)h->o.model_name);
    dm_free((void *)h->o.state_dir);
    dm_free((void *)h->o.system);
    json_decref(h->tools);
    dm_free(h->banned);
    dm_free(h);
}
