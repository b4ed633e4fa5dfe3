/* Events of the parser, the lists that the caller may ask for afterwards, and trials: events that wait in a queue
 * until it is known whether the block that they came from counts. */
#include <stdlib.h>
#include <string.h>

#include "engine/chat_texts_int.h"
#include "engine/parser_int.h"

void psr_fail(dm_parser *p) { p->rc = DM_ENOMEM; }

static bool append(dm_parser *p, dm_buf *b, const void *s, size_t n)
{
    if (p->rc == 0 && dm_buf_append(b, s, n) < 0) psr_fail(p);
    return p->rc == 0;
}

static bool grow(dm_parser *p, void **list, size_t n, size_t *cap, size_t size)
{
    if (n < *cap) return true;
    size_t want = *cap ? *cap * 2 : 8;
    void *q = dm_realloc(*list, want * size);
    if (!q) {
        psr_fail(p);
        return false;
    }
    *list = q, *cap = want;
    return true;
}

/* ---- events ---- */

static void queue(dm_parser *p, dm_parse_kind kind, int index, const void *s, size_t n)
{
    psr_trial *t = &p->trial;
    psr_queued *last = t->n ? &t->queue[t->n - 1] : NULL;
    size_t at = t->text.n;
    if (!append(p, &t->text, s, n)) return;
    if (last && kind == DM_PARSE_ARGS && last->kind == kind && last->index == index && last->at + last->n == at) {
        last->n += n;
        return;
    }
    if (!grow(p, (void **)&t->queue, t->n, &t->cap, sizeof *t->queue)) return;
    t->queue[t->n++] = (psr_queued){.kind = kind, .index = index, .at = at, .n = n};
}

void psr_emit(dm_parser *p, dm_parse_kind kind, int index, const void *s, size_t n)
{
    if (kind == DM_PARSE_REPAIR || kind == DM_PARSE_ERROR) psr_args_flush(p); /* in the order of the text */
    if (p->rc < 0) return;
    if (p->trial.on) {
        queue(p, kind, index, s, n);
        return;
    }
    dm_parse_event ev = {.kind = kind, .index = index, .p = n ? s : "", .n = n};
    if (p->fn) p->fn(p->ctx, &ev);
}

void psr_spell(dm_parser *p, dm_buf *out, const uint8_t *s, size_t n)
{
    size_t from = 0;
    for (size_t i = 0; i < n; i++) {
        if (s[i] < SYM_DSML) continue;
        const char *mark = s[i] == SYM_DSML ? MARK_DSML : s[i] == SYM_THINK_END ? MARK_THINK_END : MARK_EOS;
        if (!append(p, out, s + from, i - from) || !append(p, out, mark, strlen(mark))) return;
        from = i + 1;
    }
    append(p, out, s + from, n - from);
}

void psr_emit_text(dm_parser *p, psr_state home, const uint8_t *s, size_t n)
{
    if (!n || p->rc < 0) return;
    dm_parse_kind kind = home == ST_REASON ? DM_PARSE_REASONING : DM_PARSE_CONTENT;
    bool plain = true;
    int index = p->of_block ? -1 : 0;
    for (size_t i = 0; plain && i < n; i++) plain = s[i] < SYM_DSML;
    if (plain) {
        psr_emit(p, kind, index, s, n);
    } else {
        dm_buf_clear(&p->tmp);
        psr_spell(p, &p->tmp, s, n);
        psr_emit(p, kind, index, p->tmp.p, p->tmp.n);
    }
    p->any_text = true;
}

void psr_repair(dm_parser *p, const char *fmt, ...)
{
    char text[512];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    size_t n = dm_utf8_whole(text, strlen(text)); /* a cut in the middle of a character */
    psr_emit(p, DM_PARSE_REPAIR, -1, text, n);
}

/* ---- errors ---- */

static char *format(dm_parser *p, const char *fmt, va_list ap)
{
    char text[512];
    vsnprintf(text, sizeof text, fmt, ap);
    char *s = p->rc < 0 ? NULL : dm_strndup(text, dm_utf8_whole(text, strlen(text)));
    if (!s) psr_fail(p);
    return s;
}

static void keep(dm_parser *p, char ***list, size_t *n, size_t *cap, char *s)
{
    if (!s) return;
    if (grow(p, (void **)list, *n, cap, sizeof **list)) (*list)[(*n)++] = s;
    else dm_free(s);
}

static void error_out(dm_parser *p, int index, char *s)
{
    if (!s) return;
    psr_emit(p, DM_PARSE_ERROR, index, s, strlen(s));
    keep(p, &p->errors, &p->nerrors, &p->errors_cap, s);
}

void psr_error(dm_parser *p, int index, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    error_out(p, index, format(p, fmt, ap));
    va_end(ap);
}

void psr_error_later(dm_parser *p, const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    char *s = format(p, fmt, ap);
    va_end(ap);
    if (p->begun || p->whole) error_out(p, p->next_index, s);
    else keep(p, &p->pending, &p->npending, &p->pending_cap, s);
}

void psr_pending_emit(dm_parser *p)
{
    for (size_t i = 0; i < p->npending; i++) error_out(p, p->next_index, p->pending[i]);
    p->npending = 0;
}

void psr_pending_drop(dm_parser *p)
{
    for (size_t i = 0; i < p->npending; i++) dm_free(p->pending[i]);
    p->npending = 0;
}

/* ---- calls ---- */

void psr_call_push(dm_parser *p, const char *name, const dm_buf *args)
{
    if (p->rc < 0 || !grow(p, (void **)&p->calls, p->ncalls, &p->calls_cap, sizeof *p->calls)) return;
    psr_result r = {dm_strdup(name), dm_strndup(dm_buf_cstr(args), args->n)};
    if (r.name && r.args) {
        p->calls[p->ncalls++] = r;
        return;
    }
    dm_free(r.name);
    dm_free(r.args);
    psr_fail(p);
}

/* ---- trials ---- */

void psr_trial_begin(dm_parser *p, psr_state home, bool bare)
{
    psr_trial *t = &p->trial;
    t->on = true, t->home = home, t->bare = bare, t->thinking_over = false;
    t->n = 0;
    dm_buf_clear(&t->text);
    t->ncalls = p->ncalls, t->nerrors = p->nerrors, t->next_index = p->next_index;
}

void psr_trial_commit(dm_parser *p)
{
    psr_trial *t = &p->trial;
    t->on = false;
    for (size_t i = 0; i < t->n; i++) psr_emit(p, t->queue[i].kind, t->queue[i].index, t->text.p + t->queue[i].at, t->queue[i].n);
    t->n = 0;
}

void psr_trial_abort(dm_parser *p)
{
    psr_trial *t = &p->trial;
    t->on = false;
    t->n = 0;
    while (p->ncalls > t->ncalls) {
        p->ncalls--;
        dm_free(p->calls[p->ncalls].name);
        dm_free(p->calls[p->ncalls].args);
    }
    while (p->nerrors > t->nerrors) dm_free(p->errors[--p->nerrors]);
    p->next_index = t->next_index;
    psr_pending_drop(p);
    psr_call_reset(p);
    size_t cut = t->thinking_over ? t->think_at : p->raw.n;
    p->of_block = true;
    psr_emit_text(p, t->home, p->raw.p, cut);
    psr_emit_text(p, ST_TEXT, p->raw.p + cut, p->raw.n - cut);
    p->of_block = false;
    dm_buf_clear(&p->raw);
    p->keep_raw = false;
    p->begun = p->whole = 0;
    p->state = t->thinking_over ? ST_TEXT : t->home;
    p->scan = 0;
}
