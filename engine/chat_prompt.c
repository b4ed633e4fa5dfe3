/* Rendered text to ids.  Marks become their tokens; everything between two marks, template and content alike, is
 * one text for the splits and merges, because that is how the model saw it. */
#include <string.h>

#include "engine/engine.h"

void dm_prompt_free(dm_prompt *p)
{
    dm_buf_free(&p->text);
    dm_free(p->spans);
    memset(p, 0, sizeof *p);
}

static int encode_mark(const dm_tok *t, const char *s, size_t n, dm_ids *out, dm_err *e)
{
    char text[64];
    DM_ASSERT(n < sizeof text); /* our own marks */
    memcpy(text, s, n);
    text[n] = 0;
    int id = dm_tok_special(t, text);
    if (id < 0) return dm_err_set(e, DM_ENOENT, "chat", "the tokenizer has no added token '%s'; it belongs to another kind of model", text);
    int rc = dm_ids_push(out, id);
    return rc < 0 ? dm_err_set(e, rc, "chat", "out of memory") : 0;
}

int dm_prompt_encode(const dm_tok *t, const dm_prompt *p, dm_ids *out, dm_err *e)
{
    const char *text = dm_buf_cstr(&p->text);
    size_t at = 0, before = out->n;
    int rc = 0;
    for (size_t i = 0; rc == 0 && i <= p->nspans; i++) {
        size_t stop = i < p->nspans ? p->spans[i].at : p->text.n;
        rc = dm_tok_encode(t, text + at, stop - at, false, out, e);
        if (rc == 0 && i < p->nspans) {
            rc = encode_mark(t, text + stop, p->spans[i].len, out, e);
            at = stop + p->spans[i].len;
        }
    }
    if (rc < 0) out->n = before;
    return rc;
}
