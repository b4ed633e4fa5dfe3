/* The parser's input and states; see parser_int.h for the whole. */
#include <stdlib.h>
#include <string.h>

#include "engine/chat_texts_int.h"
#include "engine/parser_int.h"

/* A step looks at in[pos..n), takes what it understands and says whether another step may go on. */
typedef enum step { STEP_WAIT, STEP_ON } step;

#define CALL_BYTES_DEFAULT ((size_t)1 << 20)

/* ---- what stands at a place ---- */

typedef enum marker { MARKER_NONE, MARKER_MORE, MARKER_THINK_END, MARKER_EOS, MARKER_TAG } marker;

static tag_view view_at(const dm_parser *p, size_t i, bool plain)
{
    return (tag_view){.p = p->in.p + i, .n = p->in.n - i, .final = p->final, .in_text = p->in_text, .plain = plain};
}

/* in[i] is '<' or a symbol.  The tag's length is set for the other markers too. */
static marker marker_at(const dm_parser *p, size_t i, bool plain, tag *t)
{
    uint8_t c = p->in.p[i];
    memset(t, 0, sizeof *t);
    t->len = 1;
    if (c == SYM_THINK_END) return MARKER_THINK_END;
    if (c == SYM_EOS) return MARKER_EOS;
    if (c != '<') return MARKER_NONE;
    tag_view v = view_at(p, i, plain);
    lex end = p->in_text ? tag_literal(&v, MARK_THINK_END) : LEX_NO;
    lex eos = p->in_text ? tag_literal(&v, MARK_EOS) : LEX_NO;
    if (end == LEX_YES) return t->len = strlen(MARK_THINK_END), MARKER_THINK_END;
    if (eos == LEX_YES) return t->len = strlen(MARK_EOS), MARKER_EOS;
    lex l = tag_lex(&v, t);
    if (l == LEX_YES) return MARKER_TAG;
    return l == LEX_MORE || end == LEX_MORE || eos == LEX_MORE ? MARKER_MORE : MARKER_NONE;
}

static bool may_mark(uint8_t c) { return c == '<' || c >= SYM_DSML; }

/* First byte from pos on that is not blank; remembers how far it looked. */
static size_t skip_blanks(dm_parser *p)
{
    size_t i = p->pos + p->scan;
    while (i < p->in.n && psr_is_blank(p->in.p[i])) i++;
    p->scan = i - p->pos;
    return i;
}

/* Input holds whole characters only. */
static size_t behind_character(const dm_parser *p, size_t i)
{
    do i++;
    while (i < p->in.n && (p->in.p[i] & 0xC0) == 0x80);
    return i;
}

/* ---- taking input ---- */

/* Takes everything before `to`; in a block its text is kept while the block may turn out to be text. */
static void take(dm_parser *p, size_t to)
{
    size_t n = to - p->pos;
    if (p->keep_raw && p->rc == 0 && dm_buf_append(&p->raw, p->in.p + p->pos, n) < 0) psr_fail(p);
    if (p->call.open) p->call.bytes += n;
    p->pos = to;
    p->scan = 0;
}

/* The end of output: nothing behind it is read. */
static step end_here(dm_parser *p, size_t at)
{
    p->in.n = at;
    p->final = true;
    return STEP_ON;
}

static void tell_odd(dm_parser *p, const tag *t, size_t at)
{
    if (!t->odd) return;
    dm_buf_clear(&p->tmp);
    psr_spell(p, &p->tmp, p->in.p + at, t->len);
    if (p->rc == 0) psr_repair(p, "a tag was read in spite of its spelling: %.*s", (int)p->tmp.n, dm_buf_cstr(&p->tmp));
}

/* ---- blocks ---- */

static void block_begin(dm_parser *p)
{
    dm_buf_clear(&p->raw);
    p->keep_raw = true;
    p->invokes = p->begun = p->whole = 0;
    p->junk_told = false;
    p->state = ST_BLOCK;
}

/* The block turned out to be text, or gave nothing: its text is content. */
static void block_to_text(dm_parser *p)
{
    p->keep_raw = false;
    p->of_block = true;
    psr_emit_text(p, ST_TEXT, p->raw.p, p->raw.n);
    p->of_block = false;
    dm_buf_clear(&p->raw);
    p->state = ST_TEXT;
    p->scan = 0;
}

/* The outer closer came. */
static void block_end(dm_parser *p)
{
    if (p->trial.on && p->trial.home == ST_TEXT) psr_trial_commit(p);
    if (p->trial.on) {
        if (p->whole) p->state = ST_WAIT;
        else psr_trial_abort(p);
        return;
    }
    if (!p->begun) {
        block_to_text(p); /* its errors wait for what follows */
        return;
    }
    if (!p->whole) block_to_text(p);
    p->keep_raw = false;
    dm_buf_clear(&p->raw);
    p->closed = true;
    p->state = ST_AFTER;
}

/* The call is closed: it counts, and if it stands on trial for want of a block, only with all it needs. */
static void invoke_end(dm_parser *p)
{
    bool complete = psr_call_has_required(p);
    psr_call_end(p);
    if (p->trial.on && p->trial.bare) {
        if (p->call.bad || !complete) psr_trial_abort(p);
        else p->state = ST_WAIT;
        return;
    }
    if (p->whole && !p->trial.on && p->keep_raw) { /* a real block: it cannot turn out to be text any more */
        p->keep_raw = false;
        dm_buf_clear(&p->raw);
    }
    p->state = ST_BLOCK;
}

/* ---- REASON, TEXT, AFTER: running text ---- */

static bool at_line_start(const dm_parser *p, size_t blank, size_t i)
{
    return (!p->any_text && blank == p->pos) || memchr(p->in.p + blank, '\n', i - blank);
}

/* Does a block or an invoke on its own begin with this tag?  blank: start of the blanks before it. */
static bool opens(const dm_parser *p, const tag *t, size_t blank, size_t i)
{
    if (t->close || !p->ntools) return false;
    if (t->kind == TAG_CALLS) return true;
    if (t->kind != TAG_INVOKE || !t->has_name || !psr_tool_find(p, p->in.p + i + t->name, t->name_n)) return false;
    return t->dialect != DIALECT_PLAIN || at_line_start(p, blank, i);
}

static void open_block(dm_parser *p, const tag *t, size_t i)
{
    psr_state home = p->state == ST_REASON ? ST_REASON : ST_TEXT;
    bool bare = t->kind == TAG_INVOKE;
    size_t len = t->len, at = i;
    block_begin(p);
    if (home == ST_REASON || bare) psr_trial_begin(p, home, bare);
    tell_odd(p, t, i);
    if (bare) psr_repair(p, "an invoke stands without its tool_calls block");
    if (home == ST_REASON) psr_repair(p, "a call stands inside thinking that was not closed");
    if (bare) {
        take(p, at); /* the blanks; the tag belongs to the call */
        psr_call_begin(p, t, p->in.p + at);
        p->state = ST_INVOKE;
    }
    take(p, at + len);
    if (bare && t->self_closed) invoke_end(p);
}

static void text_out(dm_parser *p, size_t to)
{
    bool visible = false;
    for (size_t i = p->pos; !visible && i < to; i++) visible = !psr_is_blank(p->in.p[i]);
    if (visible) psr_pending_drop(p); /* text goes on, so the block before it was text too */
    psr_emit_text(p, p->state, p->in.p + p->pos, to - p->pos);
    take(p, to);
}

/* A marker in running text.  False: it is text itself. */
static bool text_marker(dm_parser *p, marker k, const tag *t, size_t blank, size_t i)
{
    if (k == MARKER_THINK_END) {
        if (p->state == ST_TEXT && p->in_text) return false;
        if (p->state != ST_AFTER) text_out(p, i);
        if (p->state == ST_TEXT) psr_repair(p, "a </think> without thinking was dropped");
        if (p->state == ST_REASON) p->state = ST_TEXT;
        take(p, i + t->len);
        return true;
    }
    if (p->state == ST_AFTER && t->close) {
        psr_repair(p, "a closing tag behind the block was dropped");
        take(p, i + t->len);
        return true;
    }
    if (!opens(p, t, blank, i)) return false;
    if (p->state != ST_AFTER) text_out(p, blank);
    open_block(p, t, i);
    return true;
}

static step step_text(dm_parser *p)
{
    size_t blank = p->pos, i = p->pos + p->scan;
    tag t;
    while (i < p->in.n) {
        uint8_t c = p->in.p[i];
        if (psr_is_blank(c)) {
            i++;
            continue;
        }
        marker k = may_mark(c) ? marker_at(p, i, p->in_text || p->state == ST_AFTER, &t) : MARKER_NONE;
        if (k == MARKER_MORE) break;
        if (k == MARKER_EOS) return end_here(p, i);
        if (k != MARKER_NONE && text_marker(p, k, &t, blank, i)) return STEP_ON;
        if (p->state == ST_AFTER) p->state = ST_TEXT;
        blank = ++i;
    }
    if (p->final && p->state == ST_AFTER) blank = p->pos; /* blanks behind a block are nothing */
    else if (p->final) blank = i;
    text_out(p, blank);
    p->scan = i - p->pos;
    return STEP_WAIT;
}

/* ---- BLOCK: between invokes ---- */

static void begin_invoke(dm_parser *p, const tag *t, size_t i)
{
    take(p, i);
    tell_odd(p, t, i);
    psr_call_begin(p, t, p->in.p + i);
    p->state = ST_INVOKE;
    if (t->kind == TAG_PARAM) return; /* INVOKE reads it again */
    take(p, i + t->len);
    if (t->self_closed) invoke_end(p);
}

static step block_tag(dm_parser *p, const tag *t, size_t i)
{
    if (!t->close && t->kind != TAG_CALLS) {
        begin_invoke(p, t, i);
        return STEP_ON;
    }
    take(p, i + t->len);
    if (t->close && t->kind == TAG_CALLS) {
        tell_odd(p, t, p->pos - t->len);
        block_end(p);
    } else {
        psr_repair(p, "a stray tag between calls was skipped");
    }
    return STEP_ON;
}

/* Text between invokes is skipped; before the first one it shows that this is no block. */
static step block_junk(dm_parser *p, size_t i)
{
    if (!p->invokes) {
        if (p->trial.on) psr_trial_abort(p);
        else block_to_text(p);
        return STEP_ON;
    }
    if (!p->junk_told) psr_repair(p, "text between calls was skipped");
    p->junk_told = true;
    take(p, behind_character(p, i));
    return STEP_ON;
}

/* </think> where only tags may stand.  In thinking on trial it ends the thinking, so the block was talk. */
static step stray_think_end(dm_parser *p, size_t to)
{
    if (p->trial.on && p->trial.home == ST_REASON) {
        psr_trial_abort(p);
        return STEP_ON;
    }
    psr_repair(p, "a </think> inside the block was dropped");
    take(p, to);
    return STEP_ON;
}

static step step_block(dm_parser *p)
{
    size_t i = skip_blanks(p);
    tag t;
    if (i == p->in.n) return STEP_WAIT;
    marker k = may_mark(p->in.p[i]) ? marker_at(p, i, true, &t) : MARKER_NONE;
    switch (k) {
    case MARKER_MORE: return STEP_WAIT;
    case MARKER_EOS: return end_here(p, i);
    case MARKER_THINK_END: return stray_think_end(p, i + t.len);
    case MARKER_TAG: return block_tag(p, &t, i);
    case MARKER_NONE: break;
    }
    return block_junk(p, i);
}

/* ---- INVOKE: between parameters ---- */

/* In a nested value the outer parameter ends first, then the tag is looked at again. */
static step invoke_tag(dm_parser *p, const tag *t, size_t i)
{
    psr_call *c = &p->call;
    bool param = t->kind == TAG_PARAM;
    if (c->nested && (!param || t->close)) {
        if (param) take(p, i + t->len);
        psr_nest_end(p);
        return STEP_ON;
    }
    if (param && !t->close) {
        take(p, i);
        tell_odd(p, t, i);
        psr_param_begin(p, t, p->in.p + i);
        take(p, i + t->len);
        p->state = ST_VALUE;
        if (t->self_closed) {
            psr_param_end(p);
            p->state = ST_INVOKE;
        }
        return STEP_ON;
    }
    if (param || (t->kind == TAG_CALLS && !t->close)) {
        psr_repair(p, "a stray tag between parameters was skipped");
        take(p, i + t->len);
        return STEP_ON;
    }
    take(p, i); /* an invoke's closer, or what can only come behind one */
    if (t->kind == TAG_INVOKE && t->close) {
        tell_odd(p, t, i);
        take(p, i + t->len);
    } else {
        psr_repair(p, "the closing tag of an invoke is missing");
    }
    invoke_end(p);
    return STEP_ON;
}

static step step_invoke(dm_parser *p)
{
    psr_call *c = &p->call;
    size_t i = skip_blanks(p);
    tag t;
    if (i == p->in.n) return STEP_WAIT;
    marker k = may_mark(p->in.p[i]) ? marker_at(p, i, true, &t) : MARKER_NONE;
    switch (k) {
    case MARKER_MORE: return STEP_WAIT;
    case MARKER_EOS: return end_here(p, i);
    case MARKER_THINK_END: return stray_think_end(p, i + t.len);
    case MARKER_TAG: return invoke_tag(p, &t, i);
    case MARKER_NONE: break;
    }
    take(p, i);
    if (p->in.p[i] == '{' && !c->args.n && !c->nested && !c->junk) {
        c->has_body = c->held = true; /* the whole object is looked at before it goes out */
        p->state = ST_BODY;
        return STEP_ON;
    }
    c->junk = true;
    take(p, behind_character(p, i));
    return STEP_ON;
}

/* ---- VALUE: everything up to the parameter's own closer is data ---- */

/* A misspelt closer counts only if a tag follows it. */
static lex followed_by_tag(const dm_parser *p, size_t i)
{
    size_t from = i;
    tag t;
    while (i < p->in.n && psr_is_blank(p->in.p[i]) && i - from <= LOOKAHEAD_BLANKS_MAX) i++;
    if (i - from > LOOKAHEAD_BLANKS_MAX) return LEX_NO;
    if (i == p->in.n) return p->final ? LEX_NO : LEX_MORE;
    if (p->in.p[i] != '<') return LEX_NO;
    tag_view v = view_at(p, i, false);
    return tag_lex(&v, &t);
}

/* Is this the closer of the open parameter?  Bars must be written as in its opener, or as they should be. */
static lex value_closer(const dm_parser *p, const tag *t, size_t i)
{
    const psr_param *m = &p->call.param;
    if (!t->close || t->kind != TAG_PARAM) return LEX_NO;
    if (t->dialect != m->dialect && t->dialect != tag_canonical(p->in_text)) return LEX_NO;
    return t->near_word ? followed_by_tag(p, i + t->len) : LEX_YES;
}

/* How far data up to `to` may be taken: one call holds only so much, and no half character is taken. */
static size_t within_limit(const dm_parser *p, size_t to)
{
    size_t room = p->call_bytes_max > p->call.bytes ? p->call_bytes_max - p->call.bytes : 0;
    if (to - p->pos <= room) return to;
    size_t i = p->pos + room;
    while (i > p->pos && (p->in.p[i] & 0xC0) == 0x80) i--;
    return i;
}

/* Data in[pos..to) goes to the parameter or the body.  False: the call is over its limit, and run() ends it. */
static bool data_out(dm_parser *p, size_t to)
{
    size_t stop = within_limit(p, to);
    if (p->state == ST_VALUE) psr_param_text(p, p->in.p + p->pos, stop - p->pos);
    else if (!p->call.bad) psr_spell(p, &p->call.body, p->in.p + p->pos, stop - p->pos);
    take(p, stop);
    if (stop == to) return true;
    p->call.bytes = p->call_bytes_max + 1;
    return false;
}

typedef enum value_mark { VALUE_DATA, VALUE_MORE, VALUE_END, VALUE_NEST, VALUE_TALK, VALUE_EOS } value_mark;

static value_mark value_mark_at(const dm_parser *p, size_t i, tag *t)
{
    marker k = marker_at(p, i, p->call.param.dialect == DIALECT_PLAIN, t);
    bool talk = p->trial.on && p->trial.home == ST_REASON;
    if (k == MARKER_MORE) return VALUE_MORE;
    if (k == MARKER_THINK_END) return talk ? VALUE_TALK : VALUE_DATA;
    if (k == MARKER_EOS) return p->in_text ? VALUE_DATA : VALUE_EOS;
    if (k != MARKER_TAG) return VALUE_DATA;
    lex l = value_closer(p, t, i);
    if (l != LEX_NO) return l == LEX_YES ? VALUE_END : VALUE_MORE;
    return t->kind == TAG_PARAM && !t->close && i == p->pos && psr_param_blank(p) ? VALUE_NEST : VALUE_DATA;
}

static step value_end(dm_parser *p, const tag *t)
{
    tell_odd(p, t, p->pos);
    take(p, p->pos + t->len);
    psr_param_end(p);
    p->state = ST_INVOKE;
    return STEP_ON;
}

static step step_value(dm_parser *p)
{
    size_t i = p->pos;
    value_mark m = VALUE_DATA;
    tag t;
    for (; i < p->in.n; i++) {
        if (!may_mark(p->in.p[i])) continue;
        if (i > p->pos && psr_param_blank(p)) break; /* so that a nested tag is seen at pos */
        if ((m = value_mark_at(p, i, &t)) != VALUE_DATA) break;
    }
    bool again = i < p->in.n;
    if (!data_out(p, i)) return STEP_ON;
    switch (m) {
    case VALUE_DATA: return again ? STEP_ON : STEP_WAIT;
    case VALUE_MORE: return STEP_WAIT;
    case VALUE_EOS: return end_here(p, i);
    case VALUE_TALK: psr_trial_abort(p); return STEP_ON;
    case VALUE_END: return value_end(p, &t);
    case VALUE_NEST:
        psr_nest_begin(p);
        p->state = ST_INVOKE;
        return STEP_ON;
    }
    return STEP_WAIT;
}

/* ---- BODY: a JSON object in place of parameters; tags inside its strings are data ---- */

static bool body_ends(const tag *t) { return t->close ? t->kind != TAG_PARAM : t->kind == TAG_INVOKE; }

/* True if b belongs to a JSON string; follows quotes and escapes. */
static bool in_json_string(psr_call *c, uint8_t b)
{
    if (!c->in_string) {
        c->in_string = b == '"';
        return c->in_string;
    }
    if (c->escaped) c->escaped = false;
    else if (b == '\\') c->escaped = true;
    else if (b == '"') c->in_string = false;
    return true;
}

static step step_body(dm_parser *p)
{
    bool talk = p->trial.on && p->trial.home == ST_REASON;
    size_t i = p->pos;
    tag t;
    for (; i < p->in.n; i++) {
        uint8_t b = p->in.p[i];
        bool over = b == SYM_EOS || (b == SYM_THINK_END && talk); /* nothing outlives these */
        if ((!over && in_json_string(&p->call, b)) || !may_mark(b)) continue;
        marker k = marker_at(p, i, false, &t);
        if (k == MARKER_NONE || (k == MARKER_TAG && !body_ends(&t))) continue;
        if (!data_out(p, i)) return STEP_ON;
        if (k == MARKER_MORE) return STEP_WAIT;
        if (k == MARKER_EOS) return end_here(p, i);
        if (k == MARKER_THINK_END) return stray_think_end(p, i + t.len);
        return invoke_tag(p, &t, i);
    }
    data_out(p, i);
    return STEP_WAIT;
}

/* ---- WAIT: a block on trial is over; does anything follow? ---- */

static step wait_tag(dm_parser *p, const tag *t, size_t i)
{
    if (t->close) {
        take(p, i + t->len);
        if (t->kind == TAG_CALLS && p->trial.home == ST_TEXT) block_end(p);
        return STEP_ON;
    }
    if (p->trial.thinking_over || !opens(p, t, p->pos, i)) {
        psr_trial_abort(p);
        return STEP_ON;
    }
    if (t->kind == TAG_INVOKE) {
        begin_invoke(p, t, i);
    } else {
        take(p, i + t->len);
        p->trial.bare = false;
        p->state = ST_BLOCK;
    }
    return STEP_ON;
}

static step step_wait(dm_parser *p)
{
    size_t i = skip_blanks(p);
    tag t;
    if (i == p->in.n) return STEP_WAIT;
    marker k = may_mark(p->in.p[i]) ? marker_at(p, i, true, &t) : MARKER_NONE;
    if (k == MARKER_MORE) return STEP_WAIT;
    if (k == MARKER_EOS) return end_here(p, i);
    if (k == MARKER_TAG) return wait_tag(p, &t, i);
    if (k == MARKER_THINK_END && !p->trial.thinking_over) {
        take(p, i);
        p->trial.think_at = p->raw.n;
        p->trial.thinking_over = p->trial.home == ST_REASON;
        p->pos += t.len; /* the mark itself is never text */
        return STEP_ON;
    }
    psr_trial_abort(p);
    return STEP_ON;
}

/* ---- running ---- */

/* A call that grew too long ends the turn, or, on trial, was text. */
static void overflow(dm_parser *p)
{
    psr_call *c = &p->call;
    if (p->trial.on) {
        psr_trial_abort(p);
        return;
    }
    if (c->begun && !c->bad)
        psr_error(p, c->index, "The call to %s is longer than %zu bytes and was stopped; nothing was run. Send less in one call.",
                  c->tool->name, p->call_bytes_max);
    else if (!c->begun)
        psr_error_later(p, "A call is longer than %zu bytes and was stopped; nothing was run.", p->call_bytes_max);
    psr_pending_emit(p);
    c->open = false;
    p->keep_raw = false;
    dm_buf_clear(&p->raw);
    p->closed = true;
    p->state = ST_DEAD;
}

static step one_step(dm_parser *p)
{
    switch (p->state) {
    case ST_REASON:
    case ST_TEXT:
    case ST_AFTER: return step_text(p);
    case ST_BLOCK: return step_block(p);
    case ST_INVOKE: return step_invoke(p);
    case ST_VALUE: return step_value(p);
    case ST_BODY: return step_body(p);
    case ST_WAIT: return step_wait(p);
    case ST_DEAD: break;
    }
    take(p, p->in.n);
    return STEP_WAIT;
}

static void run(dm_parser *p)
{
    step s = STEP_ON;
    while (p->rc == 0 && s == STEP_ON) {
        s = one_step(p);
        if (p->call.open && p->call.bytes > p->call_bytes_max) {
            overflow(p);
            s = STEP_ON;
        }
    }
    psr_args_flush(p);
    if (p->pos) dm_buf_consume(&p->in, p->pos);
    p->pos = 0;
}

/* ---- the end ---- */

/* A call is open: it is none. */
static void open_call_ends(dm_parser *p, bool cut)
{
    psr_call *c = &p->call;
    if (c->begun && !c->bad && cut)
        psr_error(p, c->index, "The call to %s was cut off by the token limit before it was complete; nothing was run.", c->tool->name);
    else if (c->begun && !c->bad)
        psr_error(p, c->index, "The call to %s was not closed before the end of the turn; nothing was run. Send the whole call again.",
                  c->tool->name);
    c->open = false;
}

static void block_ends_open(dm_parser *p, bool cut)
{
    take(p, p->in.n);
    if (p->trial.on) {
        bool counts = !cut && p->state == ST_BLOCK && p->whole;
        if (counts) psr_trial_commit(p);
        else psr_trial_abort(p);
        return;
    }
    if (p->call.open) open_call_ends(p, cut);
    if (!p->whole && !cut) block_to_text(p);
}

static void end_of_input(dm_parser *p, bool cut)
{
    p->ended = true;
    switch (p->state) {
    case ST_REASON:
    case ST_TEXT:
    case ST_AFTER:
    case ST_DEAD: break;
    case ST_BLOCK:
    case ST_INVOKE:
    case ST_VALUE:
    case ST_BODY: block_ends_open(p, cut); break;
    case ST_WAIT:
        if (cut) psr_trial_abort(p);
        else psr_trial_commit(p);
        if (cut && p->in.n) psr_emit_text(p, p->state, p->in.p, p->in.n);
        break;
    }
    if (!cut) psr_pending_emit(p);
    else psr_pending_drop(p);
}

/* ---- input ---- */

static void put_text(dm_parser *p, const char *bytes, size_t n)
{
    while (p->rc == 0 && n && p->ncarry) { /* finish the begun character first */
        p->carry[p->ncarry++] = (uint8_t)*bytes++;
        n--;
        size_t whole = dm_utf8_whole(p->carry, p->ncarry);
        if (!whole) continue;
        if (dm_utf8_clean(&p->in, p->carry, whole) < 0) psr_fail(p);
        memmove(p->carry, p->carry + whole, p->ncarry - whole);
        p->ncarry -= whole;
    }
    if (p->rc < 0 || !n) return;
    size_t whole = dm_utf8_whole(bytes, n);
    if (dm_utf8_clean(&p->in, bytes, whole) < 0) psr_fail(p);
    memcpy(p->carry, bytes + whole, n - whole);
    p->ncarry = n - whole;
}

/* What can no longer become a character becomes U+FFFD. */
static void flush_carry(dm_parser *p)
{
    if (p->ncarry && p->rc == 0 && dm_utf8_clean(&p->in, p->carry, p->ncarry) < 0) psr_fail(p);
    p->ncarry = 0;
}

static uint8_t symbol_of(const char *s, size_t n)
{
    static const struct { const char *text; uint8_t symbol; } symbols[] = {
        {MARK_DSML, SYM_DSML}, {MARK_THINK_END, SYM_THINK_END}, {MARK_EOS, SYM_EOS},
    };
    for (size_t i = 0; i < DM_COUNT(symbols); i++)
        if (n == strlen(symbols[i].text) && memcmp(s, symbols[i].text, n) == 0) return symbols[i].symbol;
    return 0;
}

int dm_parser_feed(dm_parser *p, const char *bytes, size_t n, bool special)
{
    if (p->ended || p->rc < 0) return p->rc;
    uint8_t symbol = special && !p->in_text ? symbol_of(bytes, n) : 0;
    if (special) flush_carry(p);
    if (!symbol) put_text(p, bytes, n);
    else if (p->rc == 0 && dm_buf_byte(&p->in, symbol) < 0) psr_fail(p);
    run(p);
    if (p->final && p->rc == 0) end_of_input(p, false);
    return p->rc;
}

int dm_parser_finish(dm_parser *p, bool cut)
{
    if (p->ended || p->rc < 0) return p->rc;
    flush_carry(p);
    p->final = true;
    run(p);
    if (p->rc == 0) end_of_input(p, cut);
    return p->rc;
}

/* ---- creating, asking ---- */

int dm_parser_create(dm_parser **out, const dm_parser_opts *o, dm_parse_fn fn, void *ctx, dm_err *e)
{
    *out = NULL;
    dm_parser *p = dm_calloc(1, sizeof *p);
    if (!p) return dm_err_set(e, DM_ENOMEM, "parser", "out of memory");
    p->in_text = o->markers_in_text;
    p->call_bytes_max = o->call_bytes_max ? o->call_bytes_max : CALL_BYTES_DEFAULT;
    p->fn = fn;
    p->ctx = ctx;
    p->state = o->thinking ? ST_REASON : ST_TEXT;
    int rc = psr_tools_read(p, o, e);
    if (rc < 0) dm_parser_destroy(p);
    else *out = p;
    return rc;
}

void dm_parser_destroy(dm_parser *p)
{
    if (!p) return;
    for (size_t i = 0; i < p->ntools; i++) {
        dm_free(p->tools[i].name);
        pj_free(&p->tools[i].schema);
    }
    for (size_t i = 0; i < p->ncalls; i++) {
        dm_free(p->calls[i].name);
        dm_free(p->calls[i].args);
    }
    for (size_t i = 0; i < p->nerrors; i++) dm_free(p->errors[i]);
    psr_pending_drop(p);
    psr_call_free(&p->call);
    dm_free(p->tools);
    dm_free(p->calls);
    dm_free(p->errors);
    dm_free(p->pending);
    dm_free(p->trial.queue);
    dm_buf_free(&p->trial.text);
    dm_buf_free(&p->in);
    dm_buf_free(&p->tmp);
    dm_buf_free(&p->raw);
    dm_free(p);
}

bool dm_parser_block_closed(const dm_parser *p) { return p->closed; }
int dm_parser_calls(const dm_parser *p) { return (int)(p->trial.on ? p->trial.ncalls : p->ncalls); }
int dm_parser_errors(const dm_parser *p) { return (int)(p->trial.on ? p->trial.nerrors : p->nerrors); }

const char *dm_parser_call_name(const dm_parser *p, int i) { return i >= 0 && i < dm_parser_calls(p) ? p->calls[i].name : NULL; }
const char *dm_parser_call_args(const dm_parser *p, int i) { return i >= 0 && i < dm_parser_calls(p) ? p->calls[i].args : NULL; }
const char *dm_parser_error(const dm_parser *p, int i) { return i >= 0 && i < dm_parser_errors(p) ? p->errors[i] : NULL; }
