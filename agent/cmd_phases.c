/* cmd_phases.c — what a person is told on standard error while a turn goes on. */
#include "agent/cmd_int.h"

#include <string.h>

static long long number(const json_t *o, const char *key) { return (long long)json_integer_value(json_object_get(o, key)); }
static const char *text(const json_t *o, const char *key)
{
    const char *s = json_string_value(json_object_get(o, key));
    return s ? s : "";
}

static void restore_line(const json_t *t)
{
    long long turn = number(t, "turn"), n = number(t, "restored_tokens");
    const char *from = text(t, "restored_from"), *miss = text(t, "miss");
    if (!strcmp(from, "awake")) err_printf("turn %lld  restore  %8d tokens  still awake\n", turn, 0);
    else if (!n) err_printf("turn %lld  restore  %8d tokens  cold%s%s\n", turn, 0, *miss ? ": " : "", miss);
    else err_printf("turn %lld  restore  %8lld tokens  %s from %s  %lld ms\n", turn, n, turn == 1 || strcmp(from, "ram") ? "warm" : "woken", from, number(t, "restore_ms"));
}

static void turn_lines(const json_t *t)
{
    long long turn = number(t, "turn");
    restore_line(t);
    err_printf("turn %lld  prefill  %8lld tokens  %lld ms\n", turn, number(t, "prefilled_tokens"), number(t, "prefill_ms"));
    err_printf("turn %lld  decode   %8lld tokens  %lld ms\n", turn, number(t, "decoded_tokens"), number(t, "decode_ms"));
    err_printf("turn %lld  spill    %8lld bytes\n", turn, number(t, "spilled_bytes"));
}

static void tool_line(const json_t *v)
{
    char *args = json_dumps(json_object_get(v, "args"), JSON_COMPACT | JSON_ENCODE_ANY);
    err_printf("        tool     %s %.120s\n", text(v, "name"), args ? args : "");
    dm_free(args);
}

static void tool_result_line(const json_t *v)
{
    const json_t *part = json_array_get(json_object_get(json_object_get(v, "message"), "content"), 0);
    err_printf("        tool     %8zu bytes   %lld ms%s\n", strlen(text(part, "content")), number(v, "wall_ms"), json_is_true(json_object_get(part, "is_error")) ? "  (error)" : "");
}

static void result_line(const json_t *r)
{
    const json_t *u = json_object_get(r, "usage");
    err_printf("session %s: %s start; %lld tokens prefilled, %lld restored, %lld decoded, %lld ms\n", text(r, "session_id"),
               number(json_array_get(json_object_get(r, "turns"), 0), "restored_tokens") ? "warm" : "cold", number(u, "prefilled_tokens"),
               number(u, "restored_tokens"), number(u, "output_tokens"), number(r, "duration_ms"));
}

void phases_event(const dm_host_event *ev)
{
    if (!ev->json) return;
    switch (ev->kind) {
    case DM_EV_TURN: turn_lines(ev->json); break;
    case DM_EV_TOOL_START: tool_line(ev->json); break;
    case DM_EV_TOOL_RESULT: tool_result_line(ev->json); break;
    case DM_EV_NOTICE: err_printf("        notice   %s\n", text(ev->json, "text")); break;
    case DM_EV_SPILLED: err_printf("        asleep   %8lld bytes   on disk\n", number(ev->json, "bytes")); break;
    case DM_EV_RESULT: result_line(ev->json); break;
    default: break;
    }
}

#define PROGRESS_TOKENS_MIN 1024 /* shorter prompts are read before anybody looks */

void progress_event(const dm_host_event *ev)
{
    if (ev->kind != DM_EV_PREFILL || ev->total < PROGRESS_TOKENS_MIN || !err_is_terminal()) return;
    if (ev->done >= ev->total) err_printf("\r\033[K");
    else err_printf("\rreading %lld of %lld tokens\033[K", (long long)ev->done, (long long)ev->total);
}
