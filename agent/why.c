/* why.c — why a turn computed again what had been computed before, and what that cost.
 *
 * A session's timeline only grows (L1), so a turn should compute its new tokens and nothing else.  When it computed more, the first
 * token that was computed again stands where the restore ended, and the reason is one of a few, told from what the restore saw and
 * from what the turn before was run with.  (A history that was rewritten cannot be among them: nothing rewrites it.) */
#include "agent/agent_int.h"

#include <string.h>

#define AROUND 8 /* tokens shown before and behind */

typedef struct reason { const char *name, *text; } reason;
static const reason reasons[WHY_COUNT] = {
    [WHY_NOT] = { "none", "nothing was missed" },
    [WHY_NO_STORE] = { "no_store", "no store" },
    [WHY_NOTHING_STORED] = { "nothing_stored", "nothing stored" },
    [WHY_DISK_FULL] = { "disk_full", "nothing stored: the disk was full" },
    [WHY_OVER_BUDGET] = { "write_budget", "nothing stored: the write budget of the day was used up" },
    [WHY_EVICTED] = { "evicted", "evicted for want of room" },
    [WHY_NO_STATE] = { "no_state", "blocks without a state" },
    [WHY_NOT_DEEPER] = { "no_state_near", "no state deeper" },
    [WHY_STORE_FAILED] = { "store_failed", "store failed" },
    [WHY_REFUSED] = { "state_refused", "stored state refused" },
    [WHY_GONE] = { "part_gone", "stored part gone" },
    [WHY_RESTORES_FAILED] = { "restores_failed", "restores failed" },
    [WHY_OTHER_NUMERICS] = { "other_numerics", "stored under another numeric path" },
    [WHY_OTHER_ROOT] = { "other_root", "stored under another salt, tokenizer or layout" },
};

const char *why_name(why_class w) { return reasons[w].name; }
const char *why_text(why_class w) { return reasons[w].text; }

why_class why_of_find(const why_find *f)
{
    if (f->pos == f->wanted) return WHY_NOT;
    if (f->evicted) return WHY_EVICTED;
    if (f->pos == 0 && f->blocks_present) return WHY_NO_STATE;
    if (f->pos == 0) return f->disk_full ? WHY_DISK_FULL : f->over_budget ? WHY_OVER_BUDGET : WHY_NOTHING_STORED;
    return f->blocks_present > f->blocks ? WHY_NOT_DEEPER : WHY_NOT;
}

why_class why_of_turn(why_class found, const char *was_root, const char *root, const char *was_numerics, const char *numerics)
{
    if (found != WHY_NOTHING_STORED && found != WHY_DISK_FULL && found != WHY_OVER_BUDGET) return found;
    if (*was_numerics && strcmp(was_numerics, numerics) != 0) return WHY_OTHER_NUMERICS;
    return *was_root && strcmp(was_root, root) != 0 ? WHY_OTHER_ROOT : found;
}

/* Tokens [from, to) as text. */
static json_t *text_of(const dm_tok *tok, const dm_ids *ids, int64_t from, int64_t to)
{
    dm_buf raw = { 0 }, clean = { 0 };
    json_t *v = NULL;
    int rc = 0;
    if (from < 0) from = 0;
    if (to > (int64_t)ids->n) to = (int64_t)ids->n;
    for (int64_t i = from; i < to && rc == 0; i++) {
        size_t n = 0;
        const char *p = dm_tok_bytes(tok, ids->p[i], &n);
        rc = dm_buf_append(&raw, p, n);
    }
    if (rc == 0 && dm_utf8_clean(&clean, raw.p, raw.n) >= 0) v = json_stringn(dm_buf_cstr(&clean), clean.n);
    dm_buf_free(&raw);
    dm_buf_free(&clean);
    return v;
}

json_t *why_told(why_class w, const dm_tok *tok, const dm_ids *ids, int64_t pos, int64_t tokens, double seconds)
{
    return json_pack("{s:s, s:s, s:I, s:o, s:o, s:o, s:I, s:f}", "class", why_name(w), "text", why_text(w), "position", (json_int_t)pos, "before",
                     text_of(tok, ids, pos - AROUND, pos), "token", text_of(tok, ids, pos, pos + 1), "after", text_of(tok, ids, pos + 1, pos + 1 + AROUND),
                     "tokens", (json_int_t)tokens, "seconds", seconds);
}
