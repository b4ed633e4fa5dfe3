/* forward_draft.c — the MTP layer drafts tokens, and rows that were run on a guess are taken back.
 *
 * Drafting.  The MTP layer's row at position t takes the trunk's streams of token t and the id of token t+1, and
 * its logits are a guess at token t+2.  Its attention is a window over its own rows, and a row of that window is made from the
 * layer's input alone.  So the window is kept up while steps run, at the cost of two projections for a row and not of a layer:
 *
 *   - the streams of positions whose next id is not certain yet are held: of the last row of a run and of its tentative rows;
 *   - all others of a step become window rows behind it (draft_after_step), the last 127 at most;
 *   - held ones become rows as soon as the next ids are known: as whole rows of the layer when somebody asks for a
 *     draft, whose first guess is the last one's; else as window rows when the next step begins (draft_before_step).
 *
 * Deeper guesses take the layer's own streams for those of the trunk, which are not known yet; their window rows are overwritten
 * when the true ones come.  Behind a restore the window begins empty at the cut (mtp_from) and fills up: guesses are poorer for
 * some tokens, and nothing else changes.
 *
 * Taking back.  A step whose run ends with tentative rows at positions Q … Q+k−1 leaves, for each part of a sequence:
 *
 *   window rings       have DM_DRAFT_MAX slots more than the window, so that a row at Q+k−1 overwrites none that the query
 *                      at Q still reads; a rejected row is overwritten when its position comes again
 *   accumulators       are snapped before each tentative row, by the fold itself; taking back copies one snapshot
 *   entries, keys      their number follows from the position: one that a rejected row completed is above it, is neither read nor
 *                      saved, and is written again when its position comes again
 *   blocks             that only rejected rows needed go back to the pool; nobody was told of them, since a block is whole
 *                      when the position says so
 *   logits             of the row that is now the last come from the caller, who has them
 *   MTP rows           the held streams of rejected rows are forgotten
 *
 * Grammar, parser and sampler need none of this: the engine shows them a token only when it is sampled. */
#include <string.h>

#include "engine/forward_int.h"

static size_t stream_floats(const fwd *f) { return KERN_HC * (size_t)f->c->hidden_size; }
static float *held_at(const dm_fseq *s, int i) { return s->held + (size_t)i * stream_floats(s->f); }

/* A row of the MTP layer: streams of position pos, and the id behind it. */
static void add_row(fwd *f, dm_fseq *s, int run, int64_t pos, int32_t next_id, const float *streams) {
    memcpy(f->mtp_g + (size_t)f->rows * stream_floats(f), streams, stream_floats(f) * sizeof *streams);
    f->row[f->rows++] = (fwd_row){.seq = s, .pos = pos, .id = next_id, .run = run};
}

/* The rows that were added become window rows.  A trace is not shown what the layer does here. */
static void warm(fwd *f) {
    bool tracing = f->tracing;
    if (!f->rows) return;
    f->tracing = false;
    fwd_angles(f);
    fwd_mtp_mix(f, f->mtp_g, f->mtp_g, f->mtp_e);
    fwd_hc_pre(f, &f->layer[f->layers], true);
    fwd_window_rows(f, &f->layer[f->layers]);
    f->rows = 0;
    f->tracing = tracing;
}

static void add_held(fwd *f, dm_fseq *s, int run, int32_t next_id) {
    for (int i = 0; i < s->held_n; i++) add_row(f, s, run, s->pos - s->held_n + i, i + 1 < s->held_n ? s->held_id[i + 1] : next_id, held_at(s, i));
    s->held_n = 0;
    s->mtp_pos = s->pos;
}

void draft_before_step(fwd *f, const dm_run *runs, int nruns) {
    f->rows = 0;
    for (int i = 0; i < nruns; i++) {
        dm_fseq *s = runs[i].seq;
        if (s->held_n > f->base.rows_max) { /* steps of very few rows: rather no draft than another kind of batch */
            s->held_n = 0;
            s->mtp_from = s->mtp_pos = s->pos;
        }
        if (f->rows + s->held_n > f->base.rows_max) warm(f);
        add_held(f, s, i, runs[i].ids[0]);
    }
    warm(f);
}

void draft_after_step(fwd *f, const dm_run *runs, int nruns) {
    size_t width = stream_floats(f);
    int row0 = 0;
    f->rows = 0;
    for (int i = 0; i < nruns; row0 += runs[i++].n) {
        dm_fseq *s = runs[i].seq;
        int hold = 1 + runs[i].tentative, known = runs[i].n - hold, first = known > FWD_WINDOW - 1 ? known - (FWD_WINDOW - 1) : 0;
        for (int r = first; r < known; r++) add_row(f, s, i, s->pos + r, runs[i].ids[r + 1], f->h + (size_t)(row0 + r) * width);
        for (int h = 0; h < hold; h++) {
            memcpy(held_at(s, h), f->h + (size_t)(row0 + known + h) * width, width * sizeof(float));
            s->held_id[h] = runs[i].ids[known + h];
        }
        s->held_n = hold;
        s->mtp_pos = s->pos + known;
        if (first) s->mtp_from = s->pos + first;
    }
    warm(f);
}

/* ---- drafting ------------------------------------------------------------------------------------------- */

typedef struct guess {
    dm_draft *d;
    int last; /* its last row in the pass at hand */
} guess;

static int32_t argmax(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
}

static void begin_run(fwd *f, dm_fseq *s, int64_t pos0, int n) {
    f->runs[f->nruns++] = (fwd_run){.seq = s, .row0 = f->rows, .n = n, .pos0 = pos0, .wide_at = -1, .entries_at = -1};
}

/* One pass of the layer over the rows that were added: a guess behind the last row of each sequence. */
static void pass(fwd *f, const guess *g, int n) {
    int32_t rows[FWD_LOGIT_ROWS];
    fwd_angles(f);
    fwd_mtp_mix(f, f->mtp_g, f->mtp_g, f->mtp_e);
    fwd_block(f, &f->layer[f->layers]);
    for (int i = 0; i < n; i++) rows[i] = g[i].last;
    fwd_head(f, &f->w->mtp->hc_head, f->w->mtp->norm, rows, n);
    for (int i = 0; i < n; i++) g[i].d->ids[g[i].d->got++] = argmax(f->logits + (size_t)i * (size_t)f->base.vocab, f->base.vocab);
}

/* Those that want more: the layer's streams of their last rows, with the guess behind them.  The list shrinks in place. */
static int go_deeper(fwd *f, guess *g, int n) {
    int left = 0;
    f->rows = f->nruns = 0;
    for (int i = 0; i < n; i++) {
        dm_draft *d = g[i].d;
        int64_t pos = d->seq->pos - 1 + d->got;
        if (d->got >= d->want || pos + 1 >= f->base.ctx_tokens_max) continue;
        begin_run(f, d->seq, pos, 1);
        add_row(f, d->seq, f->nruns - 1, pos, d->ids[d->got - 1], f->h + (size_t)g[i].last * stream_floats(f));
        g[left++] = (guess){.d = d, .last = f->rows - 1};
    }
    return left;
}

/* As many of the drafts as one pass has room for, from *at on. */
static int first_rows(fwd *f, dm_draft *d, int n, int *at, guess *g) {
    int count = 0;
    f->rows = f->nruns = 0;
    for (; *at < n && count < FWD_LOGIT_ROWS; ++*at) {
        dm_draft *x = &d[*at];
        dm_fseq *s = x->seq;
        bool settled = s->firm == s->pos; /* else nobody knows yet which rows stay */
        if (x->want < 1 || s->held_n < 1 || s->held_n > f->base.rows_max || s->loaded || !settled) continue;
        if (f->rows + s->held_n > f->base.rows_max) break;
        begin_run(f, s, s->pos - s->held_n, s->held_n);
        add_held(f, s, f->nruns - 1, x->id);
        g[count++] = (guess){.d = x, .last = f->rows - 1};
    }
    return count;
}

int forward_draft(dm_forward *df, dm_draft *d, int n, dm_err *e) {
    fwd *f = fwd_of(df);
    guess g[FWD_LOGIT_ROWS];
    if (!f->draft) return dm_err_set(e, DM_ENOTSUP, "forward.draft", "this forward was not made for drafting, or the model has no MTP layer");
    for (int i = 0; i < n; i++) {
        d[i].got = 0;
        if (d[i].id < 0 || d[i].id >= f->base.vocab || d[i].want < 0 || d[i].want > DM_DRAFT_MAX)
            return dm_err_set(e, DM_EINVAL, "forward.draft", "draft %d: token id %d or %d wanted", i, d[i].id, d[i].want);
    }
    pthread_mutex_lock(&f->step_lock);
    bool tracing = f->tracing;
    f->tracing = false;
    for (int at = 0; at < n;)
        for (int count = first_rows(f, d, n, &at, g); count; count = go_deeper(f, g, count)) pass(f, g, count);
    f->tracing = tracing;
    pthread_mutex_unlock(&f->step_lock);
    return 0;
}

/* ---- taking back ---------------------------------------------------------------------------------------- */

int forward_retreat(dm_forward *df, dm_fseq *s, int64_t pos, const float *logits, dm_err *e) {
    fwd *f = fwd_of(df);
    if (s->loaded || pos < s->firm || pos > s->pos)
        return dm_err_set(e, DM_EINVAL, "forward.retreat", "position %lld is not among the tentative rows, %lld to %lld", (long long)pos,
                          (long long)s->firm, (long long)s->pos);
    if (logits && !s->logits) return dm_err_set(e, DM_EINVAL, "forward.retreat", "logits for a sequence that never gave any");
    if (pos < s->pos) memcpy(s->fold, seq_snap(s, (int)(pos - s->firm)), f->fold_bytes);
    s->held_n -= (int)(s->pos - pos);
    s->pos = s->firm = pos;
    seq_trim(s);
    s->has_logits = logits != NULL;
    if (logits) memcpy(s->logits, logits, (size_t)f->base.vocab * sizeof *logits);
    return 0;
}
