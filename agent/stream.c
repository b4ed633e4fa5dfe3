/* stream.c — the event stream: one JSON object per line, in this order.
 *
 *   {"type":"system","subtype":"init", session_id, model, cwd, tools:[name…], numerics, version}      first, always
 *   {"type":"system","subtype":"restored", tokens, from:"ram|disk|ram+disk", ms}
 *   {"type":"system","subtype":"prefill", done, total}                       while a prompt is read, at most 4 a second
 *   {"type":"assistant","message":{"role":"assistant","content":[
 *        {"type":"thinking",thinking} {"type":"text",text} {"type":"tool_use",id,name,input} …]}}     once per turn
 *   {"type":"system","subtype":"turn", turn, new_tokens, context_tokens, prefilled_tokens, restored_tokens,
 *        replayed_tokens, restored_from, decoded_tokens, drafted_tokens, accepted_tokens, spilled_bytes, restore_ms, prefill_ms,
 *        decode_ms, miss, end,                                                                                      once per turn
 *        [why:{class, text, position, before, token, after, tokens, seconds}]}   when something was computed again (agent/why.c)
 *   {"type":"system","subtype":"spilled", bytes, durable}                     the state of the turn is on disk
 *   {"type":"system","subtype":"approval", call_id, name, args}               a call waits for an answer
 *   {"type":"system","subtype":"tool_start", call_id, name, args}
 *   {"type":"user", name, wall_ms, "message":{"role":"user","content":[{"type":"tool_result",tool_use_id,content,is_error}]}}
 *   {"type":"system","subtype":"notice", text}                                repairs, bad restores, another numeric path
 *   {"type":"delta", kind:"text|thinking", text}                              only with --partial; before it is durable
 *   {"type":"token", id, token, bytes:[…], logprob, top_logprobs:[{id,token,bytes,logprob} …]}   only with --logprobs; each token
 *        as it is sampled; logarithms are of the model's own distribution (dm_logprobs), null for a probability of 0
 *   {"type":"result", …}                                                      last, always
 *
 * result: subtype success|error_max_turns|error_budget|paused|error, is_error, result (the answer, or what went
 * wrong), stop_reason end_turn|stop_sequence|max_turns|max_tokens|context|loop|repeat|malformed|interrupted|approval|error,
 * session_id, num_turns, duration_ms, [stop_sequence,] usage, turns:[as above], tools:[{call_id,name,args,is_error,wall_ms}],
 * pending:[{call_id,name,args}].
 *
 * usage: input_tokens is the sum over the turns of all that the model had before it, output_tokens what it wrote;
 * prefilled_tokens were computed, cached_tokens were not (restored_tokens of them came out of the store, the
 * others were still awake).  input = prefilled + cached. */
#include "agent/session_int.h"

#include <math.h>
#include <string.h>

static int64_t ms(uint64_t ns) { return (int64_t)(ns / 1000000); }

json_t *stream_args(const char *args)
{
    json_t *v = json_loads(args, JSON_DECODE_ANY, NULL);
    return v ? v : json_string(args);
}

json_t *stream_init(const dm_session *s)
{
    json_t *names = json_array();
    dm_tool_info info;
    for (size_t i = 0; s->tools && i < dm_tools_count(s->tools); i++)
        if (dm_tools_info(s->tools, i, &info) == 0) json_array_append_new(names, json_string(info.name));
    return json_pack("{s:s, s:s, s:s, s:s, s:s, s:o, s:s, s:s}", "type", "system", "subtype", "init", "session_id", s->id, "model",
                     s->h->o.model_name, "cwd", s->workspace, "tools", names, "numerics", s->h->o.forward->numerics_id, "version", DM_VERSION);
}

json_t *stream_note(const char *subtype, const char *text)
{
    return json_pack("{s:s, s:s, s:s}", "type", "system", "subtype", subtype, "text", text);
}

json_t *stream_progress(int64_t done, int64_t total)
{
    return json_pack("{s:s, s:s, s:I, s:I}", "type", "system", "subtype", "prefill", "done", (json_int_t)done, "total", (json_int_t)total);
}

json_t *stream_restored(const dm_session *s)
{
    return json_pack("{s:s, s:s, s:I, s:s, s:I}", "type", "system", "subtype", "restored", "tokens", (json_int_t)s->fig.restored, "from",
                     s->fig.from, "ms", (json_int_t)ms(s->fig.restore_ns));
}

/* The members of a token: its bytes, also as text, where what is not UTF-8 is replaced; null for the logarithm of 0. */
static json_t *token_members(const dm_session *s, int32_t id, float logprob)
{
    size_t n = 0;
    const char *p = dm_tok_bytes(s->h->o.tok, id, &n);
    dm_buf text = { 0 };
    json_t *bytes = json_array(), *v = NULL;
    for (size_t i = 0; bytes && i < n; i++) json_array_append_new(bytes, json_integer((uint8_t)p[i]));
    if (dm_utf8_clean(&text, p, n) >= 0)
        v = json_pack("{s:i, s:s%, s:o?, s:o}", "id", (int)id, "token", dm_buf_cstr(&text), text.n, "bytes", bytes, "logprob",
                      isfinite(logprob) ? json_real((double)logprob) : json_null());
    dm_buf_free(&text);
    return v;
}

json_t *stream_token(const dm_session *s, const gen_token *t)
{
    json_t *v = token_members(s, t->id, t->logprob), *top = json_array();
    for (int i = 0; i < t->ntop; i++) json_array_append_new(top, token_members(s, t->top[i].id, t->top[i].logprob));
    if (v) {
        json_object_set_new(v, "type", json_string("token"));
        json_object_set_new(v, "top_logprobs", top);
    } else json_decref(top);
    return v;
}

json_t *stream_assistant(const dm_session *s)
{
    json_t *content = json_array();
    if (s->reasoning.n)
        json_array_append_new(content, json_pack("{s:s, s:s%}", "type", "thinking", "thinking", s->reasoning.p, s->reasoning.n));
    if (s->content.n) json_array_append_new(content, json_pack("{s:s, s:s%}", "type", "text", "text", s->content.p, s->content.n));
    for (size_t i = 0; i < s->led.ncalls; i++)
        json_array_append_new(content, json_pack("{s:s, s:s, s:s, s:o}", "type", "tool_use", "id", s->led.calls[i].id, "name",
                                                 s->led.calls[i].name, "input", stream_args(s->led.calls[i].args)));
    return json_pack("{s:s, s:s, s:{s:s, s:o}}", "type", "assistant", "session_id", s->id, "message", "role", "assistant", "content", content);
}

json_t *stream_call(const char *subtype, const ledger_call *c)
{
    return json_pack("{s:s, s:s, s:s, s:s, s:o}", "type", "system", "subtype", subtype, "call_id", c->id, "name", c->name, "args",
                     stream_args(c->args));
}

json_t *stream_tool_result(const ledger_call *c, int64_t wall_ms)
{
    return json_pack("{s:s, s:s, s:I, s:{s:s, s:[{s:s, s:s, s:s, s:b}]}}", "type", "user", "name", c->name, "wall_ms", (json_int_t)wall_ms, "message",
                     "role", "user", "content", "type", "tool_result", "tool_use_id", c->id, "content", c->text, "is_error", (int)c->is_error);
}

json_t *stream_spilled(int64_t bytes)
{
    return json_pack("{s:s, s:s, s:I, s:b}", "type", "system", "subtype", "spilled", "bytes", (json_int_t)bytes, "durable", 1);
}

/* What was computed although it had been there before: all but the turn's new tokens. */
static int64_t replayed(const turn_figures *f) { return f->prefilled > f->new_tokens ? f->prefilled - f->new_tokens : 0; }

static int add_why(const dm_session *s, json_t *turn)
{
    const turn_figures *f = &s->fig;
    int64_t again = replayed(f);
    if (!again) return 0;
    double seconds = (double)f->prefill_ns / 1e9 * (double)again / (double)f->prefilled;
    return json_object_set_new(turn, "why", why_told(f->miss, s->h->o.tok, &s->led.ids, f->restored, again, seconds));
}

/* The fields are those of the journal's `turn` event. */
json_t *stream_turn(const dm_session *s, const char *end)
{
    const turn_figures *f = &s->fig;
    json_t *v = json_pack("{s:s, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:s, s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:s?, s:I, s:s}", "type", "system", "subtype", "turn",
                          "turn", (json_int_t)s->led.turns, "new_tokens", (json_int_t)f->new_tokens, "context_tokens", (json_int_t)f->context_tokens,
                          "prefilled_tokens", (json_int_t)f->prefilled, "restored_tokens", (json_int_t)f->restored, "replayed_tokens", (json_int_t)replayed(f),
                          "restored_from", f->from, "decoded_tokens", (json_int_t)f->decoded, "drafted_tokens", (json_int_t)f->drafted, "accepted_tokens",
                          (json_int_t)f->accepted, "spilled_bytes", (json_int_t)s->pager.spilled_bytes, "restore_ms", (json_int_t)ms(f->restore_ns), "prefill_ms",
                          (json_int_t)ms(f->prefill_ns), "decode_ms", (json_int_t)ms(f->decode_ns), "miss", f->miss == WHY_NOT ? NULL : why_text(f->miss),
                          "bad_restores", (json_int_t)f->bad_restores, "end", end);
    if (v && add_why(s, v) == 0) return v;
    json_decref(v);
    return NULL;
}

static json_t *pending_calls(const dm_session *s)
{
    json_t *list = json_array();
    for (size_t i = 0; i < s->led.ncalls; i++) {
        const ledger_call *c = &s->led.calls[i];
        if (call_resolved(c->state)) continue;
        json_array_append_new(list, json_pack("{s:s, s:s, s:o, s:s}", "call_id", c->id, "name", c->name, "args", stream_args(c->args), "state",
                                              call_state_name(c->state)));
    }
    return list;
}

static json_t *usage(const dm_session *s)
{
    int64_t in = s->sum_input, pre = s->sum_prefilled;
    return json_pack("{s:I, s:I, s:I, s:I, s:I}", "input_tokens", (json_int_t)in, "output_tokens", (json_int_t)s->sum_output,
                     "prefilled_tokens", (json_int_t)pre, "cached_tokens", (json_int_t)(in > pre ? in - pre : 0), "restored_tokens",
                     (json_int_t)s->sum_restored);
}

json_t *stream_result(const dm_session *s)
{
    const outcome *o = &s->out;
    bool failed = o->code != 0 && o->code != DM_EPAUSED; /* waiting is not failing */
    json_t *text = o->text[0] ? json_string(o->text) : json_stringn(dm_buf_cstr(&s->content), s->content.n);
    json_t *v = json_pack("{s:s, s:s, s:b, s:o, s:s, s:s, s:I, s:I, s:o, s:O, s:O, s:o}", "type", "result", "subtype", o->subtype, "is_error",
                     (int)failed, "result", text, "stop_reason", o->stop_reason, "session_id", s->id, "num_turns", (json_int_t)s->run_turns,
                     "duration_ms", (json_int_t)ms(dm_now_ns() - s->started_ns), "usage", usage(s), "turns", s->turns, "tools", s->calls_done,
                     "pending", pending_calls(s));
    if (v && !strcmp(o->stop_reason, "stop_sequence")) json_object_set_new(v, "stop_sequence", json_string(dm_stop_found(s->gen.stop)));
    return v;
}
