/* journal_head.c — the row by which a session is listed, as a fold over its events.
 *
 *   id created_ms updated_ms state title turns tokens model workspace
 *
 * state: "new", "running" (or cut off there by a crash), "paused" (a call waits for an answer), "done",
 * "stopped" (a budget, a limit, an interruption), "error". */
#include "agent/agent_int.h"

#include <string.h>

#define TITLE_BYTES_MAX 72

static int set_new(json_t *o, const char *key, json_t *v) { return json_object_set_new(o, key, v) == 0 ? 0 : DM_ENOMEM; }

static json_t *title_of(const char *text)
{
    char t[TITLE_BYTES_MAX + 1];
    size_t n = strcspn(text, "\n");
    bool cut = n > TITLE_BYTES_MAX;
    if (cut) n = dm_utf8_whole(text, TITLE_BYTES_MAX - 3);
    for (size_t i = 0; i < n; i++) t[i] = (unsigned char)text[i] < 32 || text[i] == 127 ? ' ' : text[i]; /* it is shown on terminals */
    snprintf(t + n, sizeof t - n, "%s", cut ? "..." : "");
    return json_string(t);
}

static const char *state_after(const json_t *event)
{
    const char *type = json_str(event, "type");
    if (strcmp(type, "created") == 0) return "new";
    if (strcmp(type, "message") == 0 || strcmp(type, "tokens") == 0) return "running";
    if (strcmp(type, "result") != 0) return NULL;
    const char *subtype = json_str(event, "subtype");
    if (strcmp(subtype, "success") == 0) return "done";
    if (strcmp(subtype, "paused") == 0) return "paused";
    return strcmp(subtype, "error") == 0 && strcmp(json_str(event, "stop_reason"), "error") == 0 ? "error" : "stopped";
}

int head_apply(json_t *head, const char *session, const json_t *event)
{
    const char *type = json_str(event, "type");
    int64_t t = json_int(event, "t", dm_wall_ms());
    int rc = set_new(head, "id", json_string(session));
    if (rc == 0 && !json_object_get(head, "created_ms")) rc = set_new(head, "created_ms", json_integer(t));
    if (rc == 0) rc = set_new(head, "updated_ms", json_integer(t));
    const char *state = state_after(event);
    if (rc == 0 && state) rc = set_new(head, "state", json_string(state));
    if (rc == 0 && strcmp(type, "created") == 0) {
        rc = set_new(head, "model", json_string(json_str(event, "model")));
        if (rc == 0) rc = set_new(head, "workspace", json_string(json_str(event, "workspace")));
    }
    if (rc == 0 && strcmp(type, "message") == 0 && !json_object_get(head, "title"))
        rc = set_new(head, "title", title_of(json_str(event, "text")));
    if (rc == 0 && strcmp(type, "tokens") == 0) {
        bool reply = strcmp(json_str(event, "what"), "reply") == 0;
        int64_t n = (int64_t)json_array_size(json_object_get(event, "ids"));
        rc = set_new(head, "tokens", json_integer(json_int(head, "tokens", 0) + n));
        if (rc == 0 && reply) rc = set_new(head, "turns", json_integer(json_int(head, "turns", 0) + 1));
    }
    return rc;
}
