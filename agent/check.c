/* check.c — the checklist of a new deployment (check_int.h): from the files to a restored prefix, in an order in which each step
 * needs only what passed before it.
 *
 *   files        every tensor's name, dtype and shape; which revision it is
 *   fingerprint  of the weights' bytes
 *   tokenizer    belongs to the weights; a text survives it
 *   memory       the account before loading
 *   smoke        greedy decoding of a fixed prompt: finite logits, and the same again when asked again
 *   chunks       one row at a time gives the bytes of a whole prompt
 *   ladder       longer and longer contexts, with the speed of each
 *   resident     memory used at the end of the ladder, against the account
 *   restore      a prefix through a real store gives the bytes of the run that never stopped
 *   ablations    one rounding or clamp at a time switched off: how far the logits move
 *   mtp          how often the MTP layer's draft is the trunk's token; with drafts the reply and the state behind it are the same
 */
#include "agent/check_int.h"

#include <errno.h>
#include <ftw.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CONTEXT_DEFAULT 2048
#define RUNG_FIRST 128
#define RUNG_DECODE 8    /* tokens decoded on each rung */
#define SMOKE_TOKENS 16
#define SMOKE_IDS 24     /* of the prompt when there is no tokenizer */
#define ABLATION_ROWS 16 /* logits compared */
#define SEED 1           /* of the test sequence */
#define RESIDENT_OVER 0.03

static const char smoke_text[] = "The dormouse sleeps through the winter. In spring it wakes, and the first thing that it does is";

typedef struct checker {
    const check_opts *o;
    dm_model *m;
    const dm_config *c;
    dm_tok *tok;
    dm_forward *f;
    dm_forward_opts fo;
    dm_hash weights;
    dm_plan plan;
    dm_memory_use before;
    int32_t *ids;      /* [context] test sequence */
    int64_t context;
    int64_t used_ctx;  /* where the ladder ended */
    json_t *rows, *data;
    int failed;
} checker;

/* ---- small things ------------------------------------------------------------------------------------- */

static int no_memory(dm_err *e) { return dm_err_set(e, DM_ENOMEM, "verify", "out of memory"); }
static double since(uint64_t start_ns) { return (double)(dm_now_ns() - start_ns) * 1e-9; }
static void note(checker *k, const char *key, json_t *v) { json_object_set_new(k->data, key, v); }

static int go_on(const checker *k, const char *what, int64_t done, int64_t total, dm_err *e)
{
    if (!k->o->progress || k->o->progress(k->o->ctx, what, done, total)) return 0;
    return dm_err_set(e, DM_ECANCELED, "verify", "cancelled");
}

/* A check that did not pass, as opposed to one that could not be made. */
static int wrong(dm_err *e, const char *fmt, ...) DM_PRINTF(2, 3);
static int wrong(dm_err *e, const char *fmt, ...)
{
    char text[300];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    return dm_err_set(e, DM_EMISMATCH, "verify", "%s", text);
}

static int feed(checker *k, dm_forward *f, dm_fseq *s, const int32_t *ids, int64_t n, int64_t chunk, float *logits, dm_err *e)
{
    for (int64_t at = 0; at < n;) {
        int64_t rows = n - at < chunk ? n - at : chunk;
        int rc = go_on(k, "prefilling", at, n, e);
        if (rc == 0) rc = f->ops->step(f, &(dm_run){ .seq = s, .ids = ids + at, .n = (int)rows, .logits = at + rows == n ? logits : NULL }, 1, e);
        if (rc < 0) return rc;
        at += rows;
    }
    return 0;
}

static int check_logits(const float *logits, int vocab, int64_t pos, dm_err *e)
{
    bool flat = true;
    for (int i = 0; i < vocab; i++) {
        if (!isfinite(logits[i])) return wrong(e, "the logit of token %d at position %lld is %g", i, (long long)pos, (double)logits[i]);
        flat = flat && logits[i] == logits[0];
    }
    return flat ? wrong(e, "all logits at position %lld are equal", (long long)pos) : 0;
}

static int32_t best_of(const float *logits, int vocab)
{
    int best = 0;
    for (int i = 1; i < vocab; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* n greedy tokens behind logits, which are replaced by the last row's. */
static int decode(checker *k, dm_forward *f, dm_fseq *s, int n, float *logits, int32_t *out, dm_err *e)
{
    for (int i = 0; i < n; i++) {
        int64_t pos = f->ops->seq_pos(s);
        int rc = check_logits(logits, f->vocab, pos - 1, e);
        if (rc == 0) rc = go_on(k, "decoding", i, n, e);
        if (rc < 0) return rc;
        out[i] = best_of(logits, f->vocab);
        rc = f->ops->step(f, &(dm_run){ .seq = s, .ids = &out[i], .n = 1, .logits = logits }, 1, e);
        if (rc < 0) return rc;
    }
    return check_logits(logits, f->vocab, f->ops->seq_pos(s) - 1, e);
}

static json_t *ids_json(const int32_t *ids, int64_t n)
{
    json_t *a = json_array();
    for (int64_t i = 0; i < n && a; i++) json_array_append_new(a, json_integer(ids[i]));
    return a;
}

/* ---- files, fingerprint, tokenizer, memory --------------------------------------------------------------- */

static int check_files(checker *k, char *detail, size_t cap, dm_err *e)
{
    int rc = dm_model_open(&k->m, k->o->dir, e);
    if (rc < 0) return rc;
    const dm_config *c = k->c = dm_model_config(k->m);
    char *path = dm_path_join(k->o->dir, "config.json");
    dm_buf text = { 0 };
    rc = path ? dm_file_read(path, 1 << 20, &text, e) : no_memory(e);
    dm_free(path);
    if (rc < 0) return rc;
    json_t *config = json_loadb(dm_buf_cstr(&text), text.n, 0, NULL);
    bool drafts = json_object_get(config, "dspark_block_size") != NULL;
    dm_sha256 h;
    dm_hash digest;
    char hex[65];
    dm_sha256_init(&h);
    dm_sha256_add(&h, text.p, text.n);
    dm_sha256_end(&h, &digest);
    dm_hex(hex, digest.b, sizeof digest.b);
    const char *experts = c->expert_fp4 ? "fp4" : c->expert_bf16 ? "bf16" : "fp8", *matrices = c->weights_bf16 ? "bf16" : "fp8";
    note(k, "config_sha256", json_string(hex));
    note(k, "layers", json_integer(c->num_hidden_layers));
    note(k, "experts", json_string(experts));
    note(k, "matrices", json_string(matrices));
    note(k, "mtp", json_boolean(c->num_nextn_predict_layers > 0));
    note(k, "draft_stages_ignored", json_boolean(drafts));
    snprintf(detail, cap, "%d layers, hidden %d, %s matrices, %s experts%s%s; config.json %.12s", c->num_hidden_layers, c->hidden_size, matrices, experts,
             c->num_nextn_predict_layers ? ", MTP layer" : "", drafts ? ", draft stages of another kind (ignored)" : "", hex);
    json_decref(config);
    dm_buf_free(&text);
    return 0;
}

static int check_fingerprint(checker *k, char *detail, size_t cap, dm_err *e)
{
    char hex[65];
    int rc = dm_model_fingerprint(k->m, k->o->cache_dir, &k->weights, k->o->progress, k->o->ctx, e);
    if (rc < 0) return rc;
    dm_hex(hex, k->weights.b, sizeof k->weights.b);
    note(k, "weights", json_string(hex));
    snprintf(detail, cap, "%s", hex);
    return 0;
}

static int check_tokenizer(checker *k, char *detail, size_t cap, dm_err *e)
{
    dm_ids ids = { 0 };
    dm_buf back = { 0 };
    int rc = dm_tok_open(&k->tok, k->o->dir, e);
    if (rc == DM_ENOENT) {
        snprintf(detail, cap, "no tokenizer.json");
        return DM_EMISS;
    }
    if (rc == 0 && dm_tok_vocab(k->tok) > k->c->vocab_size)
        rc = wrong(e, "it has ids up to %d, the weights know %d: it belongs to another model", dm_tok_vocab(k->tok) - 1, k->c->vocab_size);
    if (rc == 0) rc = dm_tok_encode(k->tok, smoke_text, sizeof smoke_text - 1, false, &ids, e);
    if (rc >= 0) rc = dm_tok_decode(k->tok, ids.p, ids.n, &back);
    if (rc >= 0 && (back.n != sizeof smoke_text - 1 || memcmp(back.p, smoke_text, back.n) != 0)) rc = wrong(e, "a text came back as another");
    note(k, "vocabulary", json_integer(k->tok ? dm_tok_vocab(k->tok) : 0));
    if (rc >= 0) snprintf(detail, cap, "%d tokens; a text of %zu bytes is %zu of them and comes back", dm_tok_vocab(k->tok), sizeof smoke_text - 1, ids.n);
    dm_ids_free(&ids);
    dm_buf_free(&back);
    return rc < 0 ? rc : 0;
}

static int check_memory(checker *k, char *detail, size_t cap, dm_err *e)
{
    char a[24], b[24];
    k->fo.ctx_tokens_max = k->context;
    dm_plan_opts po = { .forward = k->fo, .mem_bytes = k->o->mem_bytes ? k->o->mem_bytes : dm_memory_limit() };
    int rc = dm_model_plan(k->c, &po, &k->plan, e);
    if (rc < 0) return rc;
    note(k, "need_bytes", json_integer(k->plan.need_bytes));
    note(k, "weight_bytes_resident", json_integer(k->plan.weight_bytes_resident));
    note(k, "mem_bytes", json_integer(k->plan.mem_bytes));
    note(k, "ctx_tokens_fit", json_integer(k->plan.ctx_tokens_fit));
    rc = dm_plan_check(&k->plan, e);
    if (rc < 0) return rc;
    k->fo.mem_bytes_max = -1;
    snprintf(detail, cap, "%s of %s with a context of %lld tokens; %lld would fit", dm_bytes_text(a, sizeof a, (uint64_t)k->plan.need_bytes),
             dm_bytes_text(b, sizeof b, (uint64_t)k->plan.mem_bytes), (long long)k->context, (long long)k->plan.ctx_tokens_fit);
    return dm_forward_create(&k->f, k->m, &k->fo, e);
}

/* ---- smoke, chunks ------------------------------------------------------------------------------------------ */

static int smoke_run(checker *k, const dm_ids *prompt, int32_t *out, float *logits, dm_err *e)
{
    dm_fseq *s;
    int rc = k->f->ops->seq_create(k->f, &s, e);
    if (rc < 0) return rc;
    rc = feed(k, k->f, s, prompt->p, (int64_t)prompt->n, k->f->rows_max, logits, e);
    if (rc == 0) rc = decode(k, k->f, s, SMOKE_TOKENS, logits, out, e);
    k->f->ops->seq_destroy(k->f, s);
    return rc;
}

static int smoke_prompt(const checker *k, dm_ids *prompt, dm_err *e)
{
    if (!k->tok) return dm_ids_append(prompt, k->ids, SMOKE_IDS) < 0 ? no_memory(e) : 0;
    if (dm_ids_push(prompt, k->c->bos_token_id) < 0) return no_memory(e);
    int rc = dm_tok_encode(k->tok, smoke_text, sizeof smoke_text - 1, false, prompt, e);
    return rc < 0 ? rc : 0;
}

static int check_smoke(checker *k, char *detail, size_t cap, dm_err *e)
{
    dm_ids prompt = { 0 };
    dm_buf text = { 0 };
    int32_t once[SMOKE_TOKENS], again[SMOKE_TOKENS];
    float *logits = dm_malloc((size_t)k->c->vocab_size * sizeof *logits);
    int rc = logits ? smoke_prompt(k, &prompt, e) : no_memory(e);
    if (rc == 0) rc = smoke_run(k, &prompt, once, logits, e);
    if (rc == 0) rc = smoke_run(k, &prompt, again, logits, e);
    if (rc == 0 && memcmp(once, again, sizeof once) != 0) rc = wrong(e, "the same prompt gave other tokens the second time");
    if (rc == 0) {
        note(k, "prompt_ids", ids_json(prompt.p, (int64_t)prompt.n));
        note(k, "ids", ids_json(once, SMOKE_TOKENS));
        if (k->tok && dm_tok_decode(k->tok, once, SMOKE_TOKENS, &text) >= 0) {
            size_t n = 0;
            char line[160];
            for (size_t i = 0; i < text.n && n + 1 < sizeof line; i++) line[n++] = text.p[i] >= ' ' && text.p[i] < 127 ? (char)text.p[i] : '.';
            line[n] = '\0';
            note(k, "text", json_stringn_nocheck(line, n));
            snprintf(detail, cap, "%d greedy tokens, twice the same: \"%s\"", SMOKE_TOKENS, line);
        } else snprintf(detail, cap, "%d greedy tokens, twice the same, from %d to %d", SMOKE_TOKENS, once[0], once[SMOKE_TOKENS - 1]);
    }
    dm_ids_free(&prompt);
    dm_buf_free(&text);
    dm_free(logits);
    return rc;
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int check_chunks(checker *k, char *detail, size_t cap, dm_err *e)
{
    int64_t n = least(k->context - 1, 96), chunks[] = { k->f->rows_max, 1, 7 };
    size_t bytes = (size_t)k->c->vocab_size * sizeof(float);
    float *first = dm_malloc(bytes), *logits = dm_malloc(bytes);
    int rc = first && logits ? 0 : no_memory(e);
    for (size_t i = 0; i < DM_COUNT(chunks) && rc == 0; i++) {
        dm_fseq *s;
        rc = k->f->ops->seq_create(k->f, &s, e);
        if (rc < 0) break;
        rc = feed(k, k->f, s, k->ids, n, least(chunks[i], k->f->rows_max), i ? logits : first, e);
        k->f->ops->seq_destroy(k->f, s);
        if (rc == 0 && i && memcmp(first, logits, bytes) != 0) rc = wrong(e, "%lld tokens in chunks of %lld give other logits than whole", (long long)n, (long long)chunks[i]);
    }
    snprintf(detail, cap, "%lld tokens whole, one by one and in sevens: the same logits", (long long)n);
    dm_free(first);
    dm_free(logits);
    return rc;
}

/* ---- ladder, resident ------------------------------------------------------------------------------------------ */

/* From where s stands up to `to` tokens, of which the last RUNG_DECODE are decoded. */
static int climb(checker *k, dm_fseq *s, int64_t to, float *logits, char *detail, size_t cap, dm_err *e)
{
    int32_t out[RUNG_DECODE];
    int64_t from = k->f->ops->seq_pos(s), prefill = to - RUNG_DECODE - from;
    uint64_t start = dm_now_ns();
    int rc = feed(k, k->f, s, k->ids + from, prefill, k->f->rows_max, logits, e);
    double prefill_s = since(start);
    start = dm_now_ns();
    if (rc == 0) rc = decode(k, k->f, s, RUNG_DECODE, logits, out, e);
    double decode_s = since(start);
    if (rc < 0) return rc;
    note(k, "tokens", json_integer(to));
    note(k, "prefill_tokens_per_second", json_real((double)prefill / prefill_s));
    note(k, "decode_tokens_per_second", json_real(RUNG_DECODE / decode_s));
    snprintf(detail, cap, "prefill %.1f tokens/s (%lld), decode %.2f tokens/s", (double)prefill / prefill_s, (long long)prefill, RUNG_DECODE / decode_s);
    return 0;
}

static int check_resident(checker *k, char *detail, size_t cap, dm_err *e)
{
    char a[24], b[24];
    dm_plan p;
    dm_memory_use now;
    dm_memory_use_get(&now);
    k->fo.ctx_tokens_max = k->used_ctx;
    int rc = dm_model_plan(k->c, &(dm_plan_opts){ .forward = k->fo }, &p, e);
    k->fo.ctx_tokens_max = k->context;
    if (rc < 0) return rc;
    int64_t took = now.anon_bytes + now.file_bytes - k->before.anon_bytes - k->before.file_bytes;
    double off = (double)(took - p.need_bytes) / (double)p.need_bytes;
    note(k, "planned_bytes", json_integer(p.need_bytes));
    note(k, "used_bytes", json_integer(took));
    note(k, "anon_bytes", json_integer(now.anon_bytes - k->before.anon_bytes));
    note(k, "file_bytes", json_integer(now.file_bytes - k->before.file_bytes));
    note(k, "peak_bytes", json_integer(now.peak_bytes));
    dm_bytes_text(a, sizeof a, (uint64_t)(took > 0 ? took : 0)), dm_bytes_text(b, sizeof b, (uint64_t)p.need_bytes);
    /* Small models are lost in what the program itself takes; the account is a bound that must hold for those that matter. */
    if (now.anon_bytes == 0) return snprintf(detail, cap, "the system does not tell"), DM_EMISS;
    if (off > RESIDENT_OVER && p.need_bytes > (int64_t)256 << 20) return wrong(e, "%s are used, the account said %s", a, b);
    snprintf(detail, cap, "%s used, %s planned (%+.1f %%)%s", a, b, 100 * off, off < -RESIDENT_OVER ? ": experts that no token chose are not read" : "");
    return 0;
}

/* ---- restore through a store -------------------------------------------------------------------------------------- */

/* What goes in, and what must come out. */
typedef struct cut {
    int64_t pos;
    int32_t out[SMOKE_TOKENS];
    float *logits; /* [vocab] behind the last of them */
    dm_buf state;  /* there */
} cut;

static int write_cut(checker *k, dm_kv *kv, const dm_hash *root, dm_fseq *s, const cut *c, dm_err *e)
{
    dm_hash prev = *root, key;
    dm_buf state = { 0 };
    int rc = 0;
    for (int64_t i = 0; i < c->pos / DM_KV_BLOCK && rc == 0; i++) {
        const void *bytes;
        dm_kv_chain(&key, &prev, k->ids + i * DM_KV_BLOCK);
        rc = k->f->ops->block(k->f, s, i, &bytes, e);
        if (rc == 0) rc = dm_kv_put_block_after(kv, &prev, &key, bytes, k->f->block_bytes, e);
        prev = key;
    }
    if (rc == 0) rc = k->f->ops->state_save(k->f, s, &state, e);
    if (rc == 0) rc = dm_kv_put_state(kv, &prev, k->ids + c->pos / DM_KV_BLOCK * DM_KV_BLOCK, (int)(c->pos % DM_KV_BLOCK), state.p, state.n, e);
    if (rc == 0) rc = dm_kv_flush(kv, 60000, e);
    dm_buf_free(&state);
    return rc;
}

static int read_cut(checker *k, dm_kv *kv, dm_fseq *s, const cut *c, dm_err *e)
{
    dm_kv_hit hit = { 0 };
    dm_kv_tier tier;
    dm_buf state = { 0 };
    void *block = dm_malloc(k->f->block_bytes + 1);
    int rc = block ? dm_kv_find(kv, k->ids, c->pos, c->pos, &hit, e) : no_memory(e);
    if (rc == 0 && hit.pos != c->pos) rc = wrong(e, "the store has a prefix of %lld tokens, not of %lld", (long long)hit.pos, (long long)c->pos);
    for (int64_t i = 0; i < hit.blocks && rc == 0; i++) {
        rc = dm_kv_read_block(kv, &hit, i, block, &tier, e);
        if (rc == 0) rc = k->f->ops->block_load(k->f, s, i, block, e);
    }
    if (rc == 0) rc = dm_kv_read_state(kv, &hit, &state, &tier, e);
    if (rc == 0 && tier != DM_KV_DISK) rc = wrong(e, "the state did not come from the disk");
    if (rc == 0) rc = k->f->ops->state_load(k->f, s, state.p, state.n, e);
    dm_kv_hit_end(kv, &hit);
    dm_buf_free(&state);
    dm_free(block);
    return rc;
}

/* The rest of the prompt and the answer, with what it leaves. */
static int go_from(checker *k, dm_fseq *s, int64_t pos, int64_t end, cut *c, dm_err *e)
{
    c->logits = dm_malloc((size_t)k->c->vocab_size * sizeof *c->logits);
    int rc = c->logits ? feed(k, k->f, s, k->ids + pos, end - pos, k->f->rows_max, c->logits, e) : no_memory(e);
    if (rc == 0) rc = decode(k, k->f, s, SMOKE_TOKENS, c->logits, c->out, e);
    return rc == 0 ? k->f->ops->state_save(k->f, s, &c->state, e) : rc;
}

static int same_end(const checker *k, const cut *cold, const cut *warm, dm_err *e)
{
    if (memcmp(cold->out, warm->out, sizeof cold->out) != 0) return wrong(e, "the restored prefix leads to other tokens");
    if (memcmp(cold->logits, warm->logits, (size_t)k->c->vocab_size * sizeof(float)) != 0) return wrong(e, "the restored prefix leads to other logits");
    if (cold->state.n != warm->state.n || memcmp(cold->state.p, warm->state.p, cold->state.n) != 0) return wrong(e, "the restored prefix leads to another state");
    return 0;
}

static int through_store(checker *k, const char *dir, int64_t pos, int64_t end, dm_err *e)
{
    dm_kv_opts ko = { .dir = dir, .root = k->weights, .block_bytes = k->f->block_bytes, .disk_bytes_max = (int64_t)1 << 30, .ram_bytes_max = (int64_t)256 << 20 };
    dm_fseq *a = NULL, *b = NULL;
    dm_kv *kv = NULL;
    cut cold = { .pos = pos }, warm = { .pos = pos };
    int rc = k->f->ops->seq_create(k->f, &a, e);
    if (rc == 0) rc = feed(k, k->f, a, k->ids, pos, k->f->rows_max, NULL, e);
    if (rc == 0) rc = dm_kv_open(&kv, &ko, e);
    if (rc == 0) rc = write_cut(k, kv, &ko.root, a, &cold, e);
    dm_kv_close(kv);
    kv = NULL;
    if (rc == 0) rc = go_from(k, a, pos, end, &cold, e);
    if (rc == 0) rc = k->f->ops->seq_create(k->f, &b, e);
    if (rc == 0) rc = dm_kv_open(&kv, &ko, e);
    if (rc == 0) rc = read_cut(k, kv, b, &warm, e);
    if (rc == 0) rc = go_from(k, b, pos, end, &warm, e);
    if (rc == 0) rc = same_end(k, &cold, &warm, e);
    dm_kv_close(kv);
    if (a) k->f->ops->seq_destroy(k->f, a);
    if (b) k->f->ops->seq_destroy(k->f, b);
    dm_free(cold.logits), dm_free(warm.logits);
    dm_buf_free(&cold.state), dm_buf_free(&warm.state);
    return rc;
}

static int remove_one(const char *path, const struct stat *st, int kind, struct FTW *at)
{
    (void)st, (void)kind, (void)at;
    (void)remove(path);
    return 0;
}

static int check_restore(checker *k, char *detail, size_t cap, dm_err *e)
{
    char dir[300];
    const char *tmp = getenv("TMPDIR");
    int64_t end = least(k->context - SMOKE_TOKENS, 3 * DM_KV_BLOCK + 40), pos = end - 23;
    if (k->f->block_bytes == 0) return snprintf(detail, cap, "no layer has a growing cache"), DM_EMISS;
    snprintf(dir, sizeof dir, "%.200s/dormouse-verify-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    if (!mkdtemp(dir)) return dm_err_sys(e, errno, "verify", "cannot make %s", dir);
    int rc = through_store(k, dir, pos, end, e);
    (void)nftw(dir, remove_one, 16, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
    note(k, "cut", json_integer(pos));
    snprintf(detail, cap, "cut at %lld, through the store on disk, %lld more and %d decoded: the same bytes as cold", (long long)pos, (long long)(end - pos), SMOKE_TOKENS);
    return rc;
}

/* ---- ablations, mtp --------------------------------------------------------------------------------------------------- */

/* Logits of the last ABLATION_ROWS of n tokens under some switches. */
static int last_logits(checker *k, unsigned switches, int64_t n, float *out, dm_err *e)
{
    dm_forward_opts fo = k->fo;
    dm_forward *f;
    dm_fseq *s;
    fo.switches = k->o->switches | switches;
    fo.ctx_tokens_max = n;
    fo.mem_bytes_max = k->o->mem_bytes; /* wider rows may not fit where the usual ones do */
    int rc = dm_forward_create(&f, k->m, &fo, e);
    if (rc < 0) return rc;
    rc = f->ops->seq_create(f, &s, e);
    if (rc == 0) {
        rc = feed(k, f, s, k->ids, n - ABLATION_ROWS, f->rows_max, NULL, e);
        for (int i = 0; i < ABLATION_ROWS && rc == 0; i++) {
            float *logits = out + (size_t)i * (size_t)f->vocab;
            rc = feed(k, f, s, k->ids + n - ABLATION_ROWS + i, 1, 1, logits, e);
            if (rc == 0) rc = check_logits(logits, f->vocab, n - ABLATION_ROWS + i, e);
        }
        f->ops->seq_destroy(f, s);
    }
    dm_forward_destroy(f);
    return rc;
}

typedef struct ablation { const char *name, *what; unsigned bit; } ablation;

static void compare_logits(checker *k, const float *base, const float *other, const char *what, char *detail, size_t cap)
{
    size_t n = (size_t)ABLATION_ROWS * (size_t)k->c->vocab_size;
    double err = 0, sum = 0, sum2 = 0, worst = 0;
    int changed = 0;
    for (size_t i = 0; i < n; i++) {
        double d = (double)other[i] - (double)base[i];
        err += d * d, sum += (double)base[i], sum2 += (double)base[i] * (double)base[i];
        if (fabs(d) > worst) worst = fabs(d);
    }
    for (int r = 0; r < ABLATION_ROWS; r++)
        changed += best_of(base + (size_t)r * (size_t)k->c->vocab_size, k->c->vocab_size) != best_of(other + (size_t)r * (size_t)k->c->vocab_size, k->c->vocab_size);
    double mean = sum / (double)n, std = sqrt(sum2 / (double)n - mean * mean), relative = std > 0 ? sqrt(err / (double)n) / std : 0;
    note(k, "rms_over_std", json_real(relative));
    note(k, "largest", json_real(worst));
    note(k, "rows", json_integer(ABLATION_ROWS));
    note(k, "top_changed", json_integer(changed));
    snprintf(detail, cap, "%s: logits move by %.3g of their deviation (largest %.3g); another first token in %d of %d rows", what, relative, worst, changed, ABLATION_ROWS);
}

#define MTP_DEPTH 3

static int check_mtp(checker *k, char *detail, size_t cap, dm_err *e)
{
    int64_t rows, agree;
    dm_forward_opts fo = k->fo;
    if (!k->c->num_nextn_predict_layers) return snprintf(detail, cap, "no MTP layer"), DM_EMISS;
    int rc = go_on(k, "drafting", 0, 1, e);
    if (rc == 0) rc = dm_model_mtp_agreement(k->m, &fo, k->ids, least(k->context, 256), &rows, &agree, e);
    if (rc < 0) return rc;
    note(k, "drafts", json_integer(rows));
    note(k, "agree", json_integer(agree));
    dm_speculation sp = { 0 };
    int64_t n = least(k->context, 256);
    if (rc == 0) rc = go_on(k, "decoding with drafts", 0, 1, e);
    if (rc == 0) rc = dm_model_speculation(k->m, &fo, k->ids, n / 2, n / 4 > 0 ? n / 4 : 1, MTP_DEPTH, &sp, e);
    if (rc < 0) return rc;
    note(k, "tokens", json_integer(sp.tokens));
    note(k, "drafted", json_integer(sp.drafted));
    note(k, "accepted", json_integer(sp.accepted));
    snprintf(detail, cap, "%lld of %lld greedy drafts are the trunk's token; %lld tokens decoded with drafts are those without, and so is the state behind them (%lld of %lld drafts used)",
             (long long)agree, (long long)rows, (long long)sp.tokens, (long long)sp.accepted, (long long)sp.drafted);
    return 0;
}

/* ---- the list ------------------------------------------------------------------------------------------------------------ */

/* Closes a row: rc of the check, DM_EMISS for one that does not apply. */
static int row_done(checker *k, check_row *row, uint64_t start, int rc, const dm_err *e)
{
    static const char *const words[] = { "ok", "failed", "skipped" };
    row->result = rc == 0 ? CHECK_OK : rc == DM_EMISS ? CHECK_SKIPPED : CHECK_FAILED;
    row->seconds = since(start);
    if (row->result == CHECK_FAILED) snprintf(row->detail, sizeof row->detail, "%s", e->text[0] ? e->text : dm_err_text(rc)), k->failed++;
    json_object_set_new(k->data, "name", json_string(row->name));
    json_object_set_new(k->data, "result", json_string(words[row->result]));
    json_object_set_new(k->data, "seconds", json_real(row->seconds));
    json_object_set_new(k->data, "detail", json_string(row->detail));
    json_array_append_new(k->rows, k->data);
    k->data = NULL;
    if (k->o->row) k->o->row(k->o->ctx, row);
    return rc == DM_ECANCELED || rc == DM_ENOMEM ? rc : 0;
}

typedef int (*check_fn)(checker *k, char *detail, size_t cap, dm_err *e);
typedef struct check { const char *name; check_fn fn; bool needs_all; } check; /* needs_all: what failed before makes it pointless */

static int run_check(checker *k, const char *name, check_fn fn, int *result, dm_err *e)
{
    check_row row = { 0 };
    uint64_t start = dm_now_ns();
    snprintf(row.name, sizeof row.name, "%s", name);
    k->data = json_object();
    if (!k->data) return no_memory(e);
    memset(e, 0, sizeof *e);
    *result = fn(k, row.detail, sizeof row.detail, e);
    return row_done(k, &row, start, *result, e);
}

static int run_ladder(checker *k, dm_err *e)
{
    dm_fseq *s = NULL;
    float *logits = dm_malloc((size_t)k->c->vocab_size * sizeof *logits);
    int rc = logits ? k->f->ops->seq_create(k->f, &s, e) : no_memory(e), passed = 0;
    for (int64_t to = least(RUNG_FIRST, k->context); rc == 0 && passed == 0; to = least(4 * to, k->context)) {
        check_row row = { 0 };
        uint64_t start = dm_now_ns();
        snprintf(row.name, sizeof row.name, "context %lld", (long long)to);
        if (!(k->data = json_object())) rc = no_memory(e);
        if (rc < 0) break;
        memset(e, 0, sizeof *e);
        passed = climb(k, s, to, logits, row.detail, sizeof row.detail, e);
        rc = row_done(k, &row, start, passed, e);
        if (passed == 0) k->used_ctx = to;
        if (to == k->context) break;
    }
    int result;
    if (rc == 0 && k->used_ctx) rc = run_check(k, "resident", check_resident, &result, e);
    if (s) k->f->ops->seq_destroy(k->f, s);
    dm_free(logits);
    return rc;
}

static int run_ablations(checker *k, dm_err *e)
{
    static const ablation list[] = {
        { "without FP4 index", "index keys and queries in float", DM_SWITCH_INDEX_F32 },
        { "without FP8 KV", "cache rows in bf16", DM_SWITCH_KV_BF16 },
        { "without shared clamp", "the shared expert unclamped", DM_SWITCH_SHARED_UNCLAMPED } };
    int64_t n = least(k->context, 4 * (int64_t)k->c->index_topk + 4 * DM_KV_BLOCK);
    size_t count = (size_t)ABLATION_ROWS * (size_t)k->c->vocab_size;
    float *base = dm_malloc(count * sizeof *base), *other = dm_malloc(count * sizeof *other);
    int rc = base && other ? last_logits(k, 0, n, base, e) : no_memory(e);
    for (size_t i = 0; i < DM_COUNT(list) && rc == 0; i++) {
        check_row row = { 0 };
        uint64_t start = dm_now_ns();
        snprintf(row.name, sizeof row.name, "%s", list[i].name);
        if (!(k->data = json_object())) rc = no_memory(e);
        if (rc < 0) break;
        memset(e, 0, sizeof *e);
        int result = k->o->numerics == DM_NUM_PLAIN && list[i].bit != DM_SWITCH_SHARED_UNCLAMPED ? DM_EMISS : last_logits(k, list[i].bit, n, other, e);
        if (result == DM_EMISS) snprintf(row.detail, sizeof row.detail, "the plain path does not round it");
        if (result == DM_ELIMIT) snprintf(row.detail, sizeof row.detail, "%.400s", e->text), result = DM_EMISS;
        if (result == 0) compare_logits(k, base, other, list[i].what, row.detail, sizeof row.detail);
        size_t used = strlen(row.detail);
        if (result == 0 && list[i].bit == DM_SWITCH_INDEX_F32 && n < 4 * ((int64_t)k->c->index_topk + 1))
            snprintf(row.detail + used, sizeof row.detail - used, " (below %d tokens every entry is chosen: a longer --context tells more)", 4 * (k->c->index_topk + 1));
        note(k, "tokens", json_integer(n));
        rc = row_done(k, &row, start, result, e);
    }
    dm_free(base);
    dm_free(other);
    return rc;
}

static int run_all(checker *k, dm_err *e)
{
    static const check first[] = { { "files", check_files, true }, { "fingerprint", check_fingerprint, true }, { "tokenizer", check_tokenizer, false },
                                   { "memory", check_memory, true }, { "smoke", check_smoke, true }, { "chunks", check_chunks, false } };
    int rc = 0, result;
    for (size_t i = 0; i < DM_COUNT(first) && rc == 0; i++) {
        rc = run_check(k, first[i].name, first[i].fn, &result, e);
        if (rc < 0 || (result < 0 && first[i].needs_all)) return rc;
        if (i > 0) continue;
        /* the configuration is known from here on */
        k->context = least(k->o->context ? k->o->context : CONTEXT_DEFAULT, k->c->max_position_embeddings);
        if (k->context < 2 * SMOKE_TOKENS + SMOKE_IDS) k->context = 2 * SMOKE_TOKENS + SMOKE_IDS;
        k->ids = dm_malloc((size_t)k->context * sizeof *k->ids);
        rc = k->ids ? dm_synth_tokens(k->ids, k->context, SEED, k->c->vocab_size, e) : no_memory(e);
    }
    if (rc == 0) rc = run_ladder(k, e);
    if (rc == 0) rc = run_check(k, "restore", check_restore, &result, e);
    if (rc == 0) rc = run_ablations(k, e);
    if (rc == 0) rc = run_check(k, "mtp", check_mtp, &result, e);
    return rc;
}

int check_model(const check_opts *o, json_t **report, int *failed, dm_err *e)
{
    checker k = { .o = o };
    *report = NULL;
    *failed = 0;
    k.fo = (dm_forward_opts){ .numerics = o->numerics, .threads = o->threads, .isa = o->isa, .rows_max = o->rows, .switches = o->switches };
    dm_memory_use_get(&k.before);
    k.rows = json_array();
    int rc = k.rows ? run_all(&k, e) : no_memory(e);
    if (rc == 0) {
        *report = json_pack("{s:i, s:s, s:s, s:s, s:I, s:b, s:O}", "version", 1, "program", DM_VERSION, "model", o->dir, "numerics", k.f ? k.f->numerics_id : "",
                            "context", (json_int_t)k.context, "ok", k.failed == 0, "checks", k.rows);
        if (!*report) rc = no_memory(e);
    }
    *failed = k.failed;
    dm_forward_destroy(k.f);
    dm_tok_close(k.tok);
    dm_model_close(k.m);
    json_decref(k.data);
    json_decref(k.rows);
    dm_free(k.ids);
    return rc;
}
