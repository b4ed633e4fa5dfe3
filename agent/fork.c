/* fork.c — a new session that has the past of another up to the end of a turn.
 *
 * Only the journal is copied: blocks and states are found by what they say, so the store has them for both, and the first turn of a
 * fork restores what the old session would have restored.  A fork owes nothing: it is taken behind a reply, with the
 * results of its calls, and without what a person said afterwards.  A reply whose calls have no result cannot be forked: the call
 * would run once for each. */
#include "agent/agent_int.h"

#include <string.h>

typedef struct taking {
    json_t *events;  /* what is taken, as copies */
    int64_t at;      /* behind this turn; 0: behind all */
    int64_t turns;   /* replies so far */
    bool behind;     /* the wanted reply is taken; only its calls follow */
    bool over;
    ledger led;      /* of what is taken */
    dm_err err;
} taking;

static int keep(taking *t, const json_t *ev)
{
    json_t *copy = json_deep_copy(ev);
    if (!copy || json_array_append_new(t->events, copy) != 0) return dm_err_set(&t->err, DM_ENOMEM, "fork", "out of memory");
    return ledger_apply(&t->led, ev, &t->err);
}

static int take(void *ctx, int64_t seq, const json_t *ev)
{
    taking *t = ctx;
    (void)seq;
    const char *type = json_str(ev, "type");
    bool tokens = !strcmp(type, "tokens"), prompt = tokens && !strcmp(json_str(ev, "what"), "prompt");
    if (tokens && !prompt) t->turns++;
    if (t->behind && prompt) t->over = true; /* what comes is another turn; it is read on for the number of turns */
    if (t->over || (t->behind && strcmp(type, "call") != 0 && strcmp(type, "turn") != 0)) return 0;
    int rc = keep(t, ev);
    if (rc == 0 && tokens && !prompt && t->turns == t->at) t->behind = true;
    return rc;
}

static int check(const taking *t, const char *session, dm_err *e)
{
    if (t->at > t->turns) return dm_err_set(e, DM_EINVAL, "fork", "session %s has %lld turns, no turn %lld", session, (long long)t->turns, (long long)t->at);
    if (t->led.reply_open) return dm_err_set(e, DM_EINVAL, "fork", "session %s stopped before its last reply; go on with it first, or fork it at an earlier turn", session);
    if (ledger_calls_open(&t->led))
        return dm_err_set(e, DM_EINVAL, "fork", "a call of turn %lld has no result, and would run in both sessions; fork at an earlier turn", (long long)t->led.turns);
    return 0;
}

/* The first event names the new session, and a last one says that it rests. */
static int finish(taking *t, const char *session, const char *id, dm_err *e)
{
    json_t *first = json_array_get(t->events, 0);
    json_t *rest = event_stamp(json_pack("{s:s, s:s, s:s, s:b, s:s}", "type", "result", "subtype", "success", "stop_reason", "fork", "is_error", 0, "text", ""));
    bool ok = first && rest && json_object_set_new(first, "id", json_string(id)) == 0 && json_object_set_new(first, "t", json_integer(dm_wall_ms())) == 0 &&
              json_object_set_new(first, "forked_from", json_string(session)) == 0 && json_object_set_new(first, "forked_at", json_integer(t->led.turns)) == 0;
    if (!ok || json_array_append(t->events, rest) != 0) {
        json_decref(rest);
        return dm_err_set(e, DM_ENOMEM, "fork", "out of memory");
    }
    json_decref(rest);
    return 0;
}

static int store(dm_journal *j, const taking *t, const char *id, dm_err *e)
{
    size_t n = json_array_size(t->events);
    json_t **list = dm_calloc(n, sizeof *list);
    int64_t seq;
    if (!list) return dm_err_set(e, DM_ENOMEM, "fork", "out of memory");
    for (size_t i = 0; i < n; i++) list[i] = json_array_get(t->events, i);
    int rc = dm_journal_append(j, id, list, n, &seq, e);
    dm_free(list);
    return rc;
}

int dm_session_fork(dm_journal *j, const char *session, int64_t turn, char out[DM_SESSION_ID_CHARS + 1], dm_err *e)
{
    taking t = { .at = turn, .events = json_array() };
    char id[DM_SESSION_ID_CHARS + 1];
    int rc = turn < 0 ? dm_err_set(e, DM_EINVAL, "fork", "there is no turn %lld", (long long)turn) : t.events ? 0 : dm_err_set(e, DM_ENOMEM, "fork", "out of memory");
    if (rc == 0) rc = dm_journal_claim(j, session, e); /* whoever runs it would change it under us */
    bool claimed = rc == 0;
    if (rc == 0 && (rc = dm_journal_read(j, session, take, &t, e)) < 0 && t.err.text[0]) *e = t.err;
    if (rc == 0) rc = check(&t, session, e);
    dm_session_id_new(id);
    if (rc == 0) rc = finish(&t, session, id, e);
    if (rc == 0) rc = store(j, &t, id, e);
    if (rc == 0) memcpy(out, id, sizeof id);
    if (claimed) dm_journal_release(j, session);
    ledger_free(&t.led);
    json_decref(t.events);
    return rc;
}
