/* event.c — the events of a session.  Every event has "type" and "t" (milliseconds since 1970).
 *
 *   created   format id model weights tokenizer numerics system tools mode sampling{} rng workspace
 *             + in a fork: forked_from forked_at (the turn)
 *   message   text                                  what the user said; no prompt holds it yet
 *   tokens    what: "prompt"|"reply"  ids  rng  [end]
 *             ids exactly as fed or sampled.  A prompt takes in all messages and results before it.  rng is the
 *             sampler's state behind the ids (16 hex digits).  end (of a reply): stop, calls, length, context,
 *             cancel, repeat
 *   call      id state  + at "proposed": name args (text as the model wrote it)
 *                       + at "approved": by ("policy"|"user")
 *                       + with a result: text is_error, and exit_code wall_ms output_bytes cut spill_path timed_out
 *                         digest repeats where they apply
 *                       + at "unknown" without text: rule "retry", the call is approved again
 *   turn      new_tokens prefilled_tokens restored_tokens restored_from decoded_tokens spilled_bytes
 *             prefill_ms decode_ms restore_ms miss root numerics [why]
 *   result    subtype stop_reason is_error         why the session came to rest
 *
 * A proposed call is journaled in the same transaction as the reply that holds it. */
#include "agent/agent_int.h"

#include <string.h>

static const char *const state_names[] = {
    [CALL_PROPOSED] = "proposed", [CALL_WAITING] = "waiting", [CALL_APPROVED] = "approved", [CALL_STARTED] = "started",
    [CALL_FINISHED] = "finished", [CALL_FAILED] = "failed", [CALL_DENIED] = "denied", [CALL_CANCELLED] = "cancelled",
    [CALL_UNKNOWN] = "unknown",
};

const char *call_state_name(call_state st) { return state_names[st]; }

int call_state_of(const char *name)
{
    for (size_t i = 0; i < DM_COUNT(state_names); i++)
        if (strcmp(state_names[i], name) == 0) return (int)i;
    return DM_EFORMAT;
}

json_t *event_stamp(json_t *ev)
{
    if (ev && json_object_set_new(ev, "t", json_integer(dm_wall_ms())) != 0) {
        json_decref(ev);
        return NULL;
    }
    return ev;
}

json_t *event_message(const char *text) { return event_stamp(json_pack("{s:s, s:s}", "type", "message", "text", text)); }

static json_t *id_array(const int32_t *ids, size_t n)
{
    json_t *a = json_array();
    for (size_t i = 0; a && i < n; i++)
        if (json_array_append_new(a, json_integer(ids[i])) != 0) {
            json_decref(a);
            return NULL;
        }
    return a;
}

json_t *event_tokens(const char *what, const int32_t *ids, size_t n, uint64_t rng, const char *end)
{
    char hex[17];
    snprintf(hex, sizeof hex, "%016llx", (unsigned long long)rng);
    json_t *a = id_array(ids, n);
    if (!a) return NULL;
    return event_stamp(json_pack("{s:s, s:s, s:s, s:s*, s:o}", "type", "tokens", "what", what, "rng", hex, "end", end, "ids", a));
}

json_t *event_call_new(const char *id, const char *name, const char *args)
{
    return event_stamp(json_pack("{s:s, s:s, s:s, s:s, s:s}", "type", "call", "id", id, "state", "proposed", "name", name, "args", args));
}

json_t *event_call(const char *id, call_state st)
{
    return event_stamp(json_pack("{s:s, s:s, s:s}", "type", "call", "id", id, "state", call_state_name(st)));
}

json_t *event_call_text(const char *id, call_state st, const char *text, bool is_error)
{
    return event_stamp(json_pack("{s:s, s:s, s:s, s:s, s:b}", "type", "call", "id", id, "state", call_state_name(st), "text", text,
                                 "is_error", (int)is_error));
}

/* Unique over all sessions: 80 random bits. */
void call_id_new(char out[32])
{
    uint8_t r[10];
    dm_random(r, sizeof r);
    memcpy(out, "call_", 5);
    dm_hex(out + 5, r, sizeof r);
}
