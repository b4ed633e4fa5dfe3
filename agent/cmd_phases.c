/* cmd_phases.c — what a person is told on standard error while a turn goes on. */
#include "agent/cmd_int.h"

#include <string.h>

static void restore_line(const json_t *t)
{
    long long turn = json_num(t, "turn"), n = json_num(t, "restored_tokens");
    const char *from = json_str(t, "restored_from"), *miss = json_str(t, "miss");
    if (!strcmp(from, "awake")) err_printf("turn %lld  restore  %8d tokens  still awake\n", turn, 0);
    else if (!n) err_printf("turn %lld  restore  %8d tokens  cold%s%s\n", turn, 0, *miss ? ": " : "", miss);
    else err_printf("turn %lld  restore  %8lld tokens  %s from %s  %lld ms\n", turn, n, turn == 1 || strcmp(from, "ram") ? "warm" : "woken", from, json_num(t, "restore_ms"));
}

static void turn_lines(const json_t *t)
{
    long long turn = json_num(t, "turn");
    restore_line(t);
    err_printf("turn %lld  prefill  %8lld tokens  %lld ms\n", turn, json_num(t, "prefilled_tokens"), json_num(t, "prefill_ms"));
    const json_t *why = json_object_get(t, "why");
    if (why) err_printf("turn %lld  again    %8lld tokens  %.2f s  %s\n", turn, json_num(why, "tokens"), json_number_value(json_object_get(why, "seconds")), json_str(why, "text"));
    err_printf("turn %lld  decode   %8lld tokens  %lld ms\n", turn, json_num(t, "decoded_tokens"), json_num(t, "decode_ms"));
    err_printf("turn %lld  spill    %8lld bytes\n", turn, json_num(t, "spilled_bytes"));
}

static void tool_line(const json_t *v)
{
    char *args = json_dumps(json_object_get(v, "args"), JSON_COMPACT | JSON_ENCODE_ANY);
    err_printf("        tool     %s %.120s\n", json_str(v, "name"), args ? args : "");
    dm_free(args);
}

static void tool_result_line(const json_t *v)
{
    const json_t *part = json_array_get(json_object_get(json_object_get(v, "message"), "content"), 0);
    err_printf("        tool     %8zu bytes   %lld ms%s\n", strlen(json_str(part, "content")), json_num(v, "wall_ms"), json_is_true(json_object_get(part, "is_error")) ? "  (error)" : "");
}

static void result_line(const json_t *r)
{
    const json_t *u = json_object_get(r, "usage");
    err_printf("session %s: %s start; %lld tokens prefilled, %lld restored, %lld decoded, %lld ms\n", json_str(r, "session_id"),
               json_num(json_array_get(json_object_get(r, "turns"), 0), "restored_tokens") ? "warm" : "cold", json_num(u, "prefilled_tokens"),
               json_num(u, "restored_tokens"), json_num(u, "output_tokens"), json_num(r, "duration_ms"));
}

void phases_event(const dm_host_event *ev)
{
    if (!ev->json) return;
    switch (ev->kind) {
    case DM_EV_TURN: turn_lines(ev->json); break;
    case DM_EV_TOOL_START: tool_line(ev->json); break;
    case DM_EV_TOOL_RESULT: tool_result_line(ev->json); break;
    case DM_EV_NOTICE: err_printf("        notice   %s\n", json_str(ev->json, "text")); break;
    case DM_EV_SPILLED: err_printf("        asleep   %8lld bytes   on disk\n", json_num(ev->json, "bytes")); break;
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
