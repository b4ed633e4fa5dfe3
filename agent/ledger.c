/* ledger.c — folds a session's events into what is true now.
 *
 * Invariants
 *   L1  ids only grows: what was fed or sampled is never rewritten, so every later prompt has it as a prefix.
 *   L2  A prompt takes in every message and result before it; nothing is taken in twice.
 *   L3  A call's text is set once.
 * An event that breaks them is refused with DM_EFORMAT: the journal was written by something else. */
#include "agent/agent_int.h"

#include <stdlib.h>
#include <string.h>

static int bad(const ledger *l, dm_err *e, const char *what)
{
    return dm_err_set(e, DM_EFORMAT, "session", "event %lld of the journal makes no sense: %s", (long long)l->events, what);
}

static int no_memory(dm_err *e) { return dm_err_set(e, DM_ENOMEM, "session", "out of memory"); }

static int apply_created(ledger *l, const json_t *ev, dm_err *e)
{
    if (l->created) return bad(l, e, "created twice");
    const char *rng = json_str(ev, "rng");
    l->rng = strtoull(rng, NULL, 16);
    snprintf(l->numerics, sizeof l->numerics, "%s", json_str(ev, "numerics"));
    l->created = json_deep_copy(ev);
    return l->created ? 0 : no_memory(e);
}

static int apply_message(ledger *l, const json_t *ev, dm_err *e)
{
    char **grown = dm_realloc(l->messages, (l->nmessages + 1) * sizeof *grown);
    if (!grown) return no_memory(e);
    l->messages = grown;
    if (!(grown[l->nmessages] = dm_strdup(json_str(ev, "text")))) return no_memory(e);
    l->nmessages++;
    l->digest[0] = 0; /* a person spoke: what repeats from here on is a new loop */
    l->repeats = 0;
    return 0;
}

static void drop_input(ledger *l)
{
    for (size_t i = 0; i < l->nmessages; i++) dm_free(l->messages[i]);
    l->nmessages = 0;
    for (size_t i = 0; i < l->ncalls; i++) {
        dm_free(l->calls[i].id);
        dm_free(l->calls[i].name);
        dm_free(l->calls[i].args);
        dm_free(l->calls[i].text);
    }
    l->ncalls = 0;
}

static int apply_tokens(ledger *l, const json_t *ev, dm_err *e)
{
    const json_t *ids = json_object_get(ev, "ids");
    bool prompt = strcmp(json_str(ev, "what"), "prompt") == 0;
    if (!l->created || !json_is_array(ids)) return bad(l, e, "tokens without ids or before the beginning");
    if (prompt && (ledger_calls_open(l) || l->reply_open)) return bad(l, e, "a prompt where a reply or a result is due");
    if (!prompt && !l->reply_open) return bad(l, e, "a reply without a prompt");
    if (!prompt) l->reply_at = l->ids.n;
    for (size_t i = 0; i < json_array_size(ids); i++) {
        json_int_t id = json_integer_value(json_array_get(ids, i));
        if (id < 0 || id > INT32_MAX) return bad(l, e, "a token id out of range");
        if (dm_ids_push(&l->ids, (int32_t)id) < 0) return no_memory(e);
    }
    l->rng = strtoull(json_str(ev, "rng"), NULL, 16);
    l->reply_open = prompt;
    const char *end = json_str(ev, "end");
    l->reply_cut = !prompt && (!strcmp(end, "cancel") || !strcmp(end, "length") || !strcmp(end, "error"));
    if (prompt) l->prompt_n = json_array_size(ids);
    if (prompt) drop_input(l);
    else l->turns++;
    return 0;
}

static int call_add(ledger *l, const json_t *ev, dm_err *e)
{
    if (l->reply_open || !l->turns) return bad(l, e, "a call outside a reply");
    ledger_call *grown = dm_realloc(l->calls, (l->ncalls + 1) * sizeof *grown);
    if (!grown) return no_memory(e);
    l->calls = grown;
    ledger_call *c = &grown[l->ncalls];
    *c = (ledger_call){ .id = dm_strdup(json_str(ev, "id")), .name = dm_strdup(json_str(ev, "name")), .args = dm_strdup(json_str(ev, "args")) };
    l->ncalls++;
    return c->id && c->name && c->args ? 0 : no_memory(e);
}

static int apply_call(ledger *l, const json_t *ev, dm_err *e)
{
    int st = call_state_of(json_str(ev, "state"));
    if (st < 0) return bad(l, e, "an unknown call state");
    ledger_call *c = ledger_find(l, json_str(ev, "id"));
    if (st == CALL_PROPOSED) return c ? bad(l, e, "a call proposed twice") : call_add(l, ev, e);
    if (!c) return bad(l, e, "a call that was never proposed");
    if (call_resolved(c->state)) return bad(l, e, "a call that has its result already"); /* L3 */
    const char *text = json_string_value(json_object_get(ev, "text"));
    if (st == CALL_UNKNOWN && !text) {
        c->state = CALL_APPROVED; /* its rule is to run it again */
        return 0;
    }
    if (call_resolved((call_state)st)) {
        if (!text) return bad(l, e, "a result without text");
        if (!(c->text = dm_strdup(text))) return no_memory(e);
        c->is_error = json_is_true(json_object_get(ev, "is_error"));
    }
    c->state = (call_state)st;
    if (st == CALL_APPROVED) c->approved_by_user = strcmp(json_str(ev, "by"), "user") == 0;
    if (json_object_get(ev, "digest")) {
        snprintf(l->digest, sizeof l->digest, "%s", json_str(ev, "digest"));
        l->repeats = (int)json_int(ev, "repeats", 1);
    }
    return 0;
}

/* Malformed calls in a row are counted over whole replies: the last event of a turn says what it was. */
static void apply_turn(ledger *l, const json_t *ev)
{
    l->malformed = json_is_true(json_object_get(ev, "malformed")) ? l->malformed + 1 : 0;
    snprintf(l->root, sizeof l->root, "%s", json_str(ev, "root"));
    snprintf(l->numerics, sizeof l->numerics, "%s", json_str(ev, "numerics"));
}

int ledger_apply(ledger *l, const json_t *event, dm_err *e)
{
    const char *type = json_str(event, "type");
    l->events++;
    if (strcmp(type, "created") == 0) return apply_created(l, event, e);
    if (!l->created) return bad(l, e, "the session was never created");
    if (strcmp(type, "message") == 0) return apply_message(l, event, e);
    if (strcmp(type, "tokens") == 0) return apply_tokens(l, event, e);
    if (strcmp(type, "call") == 0) return apply_call(l, event, e);
    if (strcmp(type, "turn") == 0) apply_turn(l, event);
    return 0; /* figures, results and what later versions may add change nothing here */
}

void ledger_free(ledger *l)
{
    drop_input(l);
    dm_free(l->messages);
    dm_free(l->calls);
    dm_ids_free(&l->ids);
    json_decref(l->created);
    memset(l, 0, sizeof *l);
}

ledger_call *ledger_find(ledger *l, const char *call_id)
{
    for (size_t i = 0; i < l->ncalls; i++)
        if (strcmp(l->calls[i].id, call_id) == 0) return &l->calls[i];
    return NULL;
}

bool ledger_calls_open(const ledger *l)
{
    for (size_t i = 0; i < l->ncalls; i++)
        if (!call_resolved(l->calls[i].state)) return true;
    return false;
}

bool ledger_has_input(const ledger *l) { return l->ncalls > 0 || l->nmessages > 0; }
