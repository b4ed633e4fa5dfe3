/* Random logits through the grammar always give calls that the parser reads and whose arguments fit; and no call that
 * our renderer writes from fitting arguments is ever in the way of the grammar.  DM_TEST_FULL: more of both. */
#include "test_engine_grammar_kit.h"

/* Under a sanitizer a mask takes ten times as long: fewer of them. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLOWER 8
#else
#define SLOWER 1
#endif
#define COUNT(full, quick) (test_full() ? (full) : ((quick) + SLOWER - 1) / SLOWER)

typedef struct rig {
    dm_tok *tok;
    dm_vocab *v;
    int vocab, dsml, eos, open; /* open: the token "<" */
    float *noise;  /* [2*vocab] */
    float *logits; /* [vocab] */
    int32_t *steer; /* tokens that make progress in markup and JSON */
    size_t nsteer;
    uint64_t ns, ns_max; /* in masks */
    int64_t masks;
} rig;

static bool all_of(const char *p, size_t n, const char *set)
{
    for (size_t i = 0; i < n; i++)
        if (!strchr(set, p[i])) return false;
    return n > 0;
}

static void rig_open(rig *r, const char *path)
{
    dm_err e = { 0 };
    *r = (rig){ 0 };
    assert_ok_e(dm_tok_open(&r->tok, path, &e), e);
    uint64_t before = dm_now_ns();
    assert_ok_e(dm_vocab_create(&r->v, r->tok, &e), e);
    printf("# vocabulary of %d tokens: %.1f ms\n", dm_tok_vocab(r->tok), (double)(dm_now_ns() - before) / 1e6);
    r->vocab = dm_tok_vocab(r->tok);
    r->dsml = dm_tok_special(r->tok, DSML);
    r->eos = dm_tok_special(r->tok, EOS);
    dm_ids ids = { 0 };
    assert_ok(dm_tok_encode(r->tok, "<", 1, false, &ids, &e));
    assert_int_equal(ids.n, 1);
    r->open = ids.p[0];
    dm_ids_free(&ids);
    r->noise = malloc(2 * (size_t)r->vocab * sizeof *r->noise);
    r->logits = malloc((size_t)r->vocab * sizeof *r->logits);
    r->steer = malloc((size_t)r->vocab * sizeof *r->steer);
    assert_true(r->noise && r->logits && r->steer);
    for (int i = 0; i < 2 * r->vocab; i++) r->noise[i] = (float)below(1 << 20) / (1 << 20);
    for (int32_t i = 0; i < r->vocab; i++) {
        size_t n;
        const char *p = dm_tok_bytes(r->tok, i, &n);
        if (n == 1 || all_of(p, n, "</>\"{}[],:0123456789. \n")) r->steer[r->nsteer++] = i;
    }
}

static void rig_close(rig *r)
{
    printf("# %lld masks, %.1f us each, the slowest %.1f us\n", (long long)r->masks, (double)r->ns / 1e3 / (double)(r->masks ? r->masks : 1), (double)r->ns_max / 1e3);
    free(r->noise);
    free(r->logits);
    free(r->steer);
    dm_vocab_destroy(r->v);
    dm_tok_close(r->tok);
}

static bool ends(const char *p, size_t n, const char *tail) { return n >= strlen(tail) && !memcmp(p + n - strlen(tail), tail, strlen(tail)); }

/* How much a token is wanted towards the end of the block; p: behind `last`. */
static float wanted(const char *p, size_t n, const char *last, size_t nlast)
{
    if (ends(p, n, "</") && n == 2) return ends(last, nlast, "<") ? 0 : 2;
    if (n != 1) return 0;
    if (*p == '/') return ends(last, nlast, "<") ? 4 : 0;
    if (*p == '<') return ends(last, nlast, "<") ? 0 : 1;
    if (*p == 'p') return ends(last, nlast, DSML) ? 4 : 0;
    return strchr("\"}]", *p) ? (float)below(4) : 0;
}

static void mask(rig *r, dm_grammar *g)
{
    uint64_t before = dm_now_ns();
    dm_grammar_mask(g, r->logits, r->vocab);
    uint64_t ns = dm_now_ns() - before;
    r->ns += ns;
    if (ns > r->ns_max) r->ns_max = ns;
    r->masks++;
}

/* Noise, sometimes with a push towards markup, later with one towards the end. */
static int32_t sample(rig *r, dm_grammar *g, bool finish, int32_t last)
{
    size_t n, nlast;
    const char *plast = dm_tok_bytes(r->tok, last, &nlast);
    memcpy(r->logits, r->noise + below((uint64_t)r->vocab), (size_t)r->vocab * sizeof *r->logits);
    if (finish || below(2)) {
        for (size_t i = 0; i < r->nsteer; i++) {
            const char *p = dm_tok_bytes(r->tok, r->steer[i], &n);
            r->logits[r->steer[i]] += finish ? 1 + wanted(p, n, plast, nlast) : 1;
        }
        r->logits[r->dsml] += finish && ends(plast, nlast, "/") ? 9 : 1;
    }
    mask(r, g);
    int32_t best = 0;
    for (int32_t i = 1; i < r->vocab; i++)
        if (r->logits[i] > r->logits[best]) best = i;
    return best;
}

static void note(void *ctx, const dm_parse_event *ev)
{
    dm_buf *log = ctx;
    if (ev->kind == DM_PARSE_ERROR || ev->kind == DM_PARSE_REPAIR) assert_ok(dm_buf_printf(log, "%.*s\n", (int)ev->n, ev->p));
}

static void feed(rig *r, dm_parser *p, dm_grammar *g, dm_ids *ids, int32_t id)
{
    size_t n;
    const char *bytes = dm_tok_bytes(r->tok, id, &n);
    assert_ok(dm_ids_push(ids, id));
    assert_ok(dm_grammar_accept(g, id));
    if (id != r->eos) assert_ok(dm_parser_feed(p, bytes, n, dm_tok_is_special(r->tok, id)));
}

static void say(const rig *r, const dm_ids *ids, const kit_set *k, const char *what, const char *detail)
{
    dm_buf text = { 0 };
    assert_ok(dm_tok_decode(r->tok, ids->p, ids->n, &text));
    for (size_t i = 0; i < KIT_TOOLS; i++) printf("# tool %s %s\n", k->tools[i].name, k->texts[i]);
    fail_msg("%s: %s\n%s", what, detail, dm_buf_cstr(&text));
}

static void check_calls(const rig *r, const dm_parser *p, const dm_ids *ids, const kit_set *k)
{
    if (!dm_parser_calls(p)) say(r, ids, k, "no call", "");
    for (int i = 0; i < dm_parser_calls(p); i++) {
        const char *args = dm_parser_call_args(p, i);
        json_error_t je;
        json_t *v = json_loads(args, JSON_REJECT_DUPLICATES, &je);
        const json_t *schema = kit_schema(k, dm_parser_call_name(p, i));
        if (!v) say(r, ids, k, je.text, args);
        if (!fits(schema, schema, v)) say(r, ids, k, "does not fit", args);
        json_decref(v);
    }
}

/* One turn from the opener on.  False: it did not end within its tokens. */
static bool one_block(rig *r, const kit_set *k)
{
    dm_grammar *g;
    dm_parser *p;
    dm_err e = { 0 };
    dm_buf log = { 0 };
    dm_ids ids = { 0 };
    dm_grammar_opts go = { .tools = k->tools, .ntools = KIT_TOOLS };
    dm_parser_opts po = { .tools = k->tools, .ntools = KIT_TOOLS };
    assert_ok_e(dm_grammar_create(&g, r->v, &go, &e), e);
    assert_ok_e(dm_parser_create(&p, &po, note, &log, &e), e);
    feed(r, p, g, &ids, r->open);
    feed(r, p, g, &ids, r->dsml);
    bool in = dm_grammar_in_call(g);
    if (!in) goto out; /* none of the tools can be called */
    size_t soft = 10 + below(120);
    while (ids.n < 1500 && !dm_parser_block_closed(p)) {
        feed(r, p, g, &ids, sample(r, g, ids.n > soft, ids.p[ids.n - 1]));
        if (dm_grammar_gave_up(g)) say(r, &ids, k, "gave up", dm_grammar_gave_up(g));
        if (log.n) say(r, &ids, k, "the parser complains", dm_buf_cstr(&log));
    }
    if (dm_parser_block_closed(p)) {
        if (sample(r, g, false, ids.p[ids.n - 1]) != r->eos) say(r, &ids, k, "something follows the block", "");
        assert_ok(dm_parser_finish(p, false));
        check_calls(r, p, &ids, k);
    }
out:;
    bool closed = !in || dm_parser_block_closed(p);
    dm_parser_destroy(p);
    dm_grammar_destroy(g);
    dm_ids_free(&ids);
    dm_buf_free(&log);
    return closed;
}

static void random_blocks(const char *path, int blocks)
{
    rig r;
    int open = 0;
    rig_open(&r, path);
    for (int i = 0; i < blocks; i++) {
        kit_set k;
        kit_set_make(&k);
        open += !one_block(&r, &k);
        kit_set_free(&k);
    }
    printf("# %d of %d blocks did not end\n", open, blocks);
    if (blocks >= 20) assert_true(open * 4 < blocks); /* trees of required trees, mostly; of fewer one says nothing */
    rig_close(&r);
}

static void random_logits_give_valid_calls_on_the_embedded_tokenizer(void **state)
{
    (void)state;
    random_blocks(TINY, COUNT(6000, 700));
}

static void random_logits_give_valid_calls_on_the_published_tokenizer(void **state)
{
    (void)state;
    random_blocks(PUBLISHED, COUNT(400, 25));
}

/* ---- rendered calls ---- */

/* An assistant's turn with random calls; false: nothing fits these schemas. */
static bool render(const kit_set *k, dm_prompt *out)
{
    json_t *calls = json_array();
    for (size_t n = 1 + below(3); n; n--) {
        size_t i = below(KIT_TOOLS);
        json_t *args = random_value(k->schemas[i], k->schemas[i], 0);
        if (args && !fits(k->schemas[i], k->schemas[i], args)) fail_msg("the test's own value does not fit");
        char *text = args ? json_dumps(args, JSON_REAL_PRECISION(17)) : NULL;
        if (text) json_array_append_new(calls, json_pack("{s:{s:s, s:s}}", "function", "name", k->tools[i].name, "arguments", text));
        free(text);
        json_decref(args);
    }
    bool any = json_array_size(calls) > 0;
    json_t *messages = json_pack("[{s:s, s:s, s:o}]", "role", "assistant", "content", below(2) ? "Looking." : "", "tool_calls", calls);
    char *text = json_dumps(messages, 0);
    dm_chat_opts o = { .mode = DM_CHAT, .continues = true };
    dm_err e = { 0 };
    if (any) assert_ok_e(dm_chat_render(text, strlen(text), &o, out, &e), e);
    free(text);
    json_decref(messages);
    return any;
}

static void check_accepted(rig *r, const kit_set *k, const dm_ids *ids)
{
    dm_grammar *g;
    dm_err e = { 0 };
    dm_grammar_opts go = { .tools = k->tools, .ntools = KIT_TOOLS };
    bool called = false;
    assert_ok_e(dm_grammar_create(&g, r->v, &go, &e), e);
    for (size_t i = 0; i < ids->n; i++) {
        for (int j = 0; j < r->vocab; j++) r->logits[j] = 0;
        mask(r, g);
        dm_ids until = { .p = ids->p, .n = i + 1 };
        if (r->logits[ids->p[i]] < 0) say(r, &until, k, "the last token is masked", "");
        assert_ok(dm_grammar_accept(g, ids->p[i]));
        if (dm_grammar_gave_up(g)) say(r, &until, k, "gave up", dm_grammar_gave_up(g));
        called |= dm_grammar_in_call(g);
    }
    assert_true(called);
    dm_grammar_destroy(g);
}

static void rendered_calls(const char *path, int turns)
{
    rig r;
    dm_err e = { 0 };
    rig_open(&r, path);
    for (int i = 0; i < turns; i++) {
        kit_set k;
        dm_prompt prompt = { 0 };
        dm_ids ids = { 0 };
        kit_set_make(&k);
        if (render(&k, &prompt)) {
            assert_ok_e(dm_prompt_encode(r.tok, &prompt, &ids, &e), e);
            check_accepted(&r, &k, &ids);
        }
        dm_ids_free(&ids);
        dm_prompt_free(&prompt);
        kit_set_free(&k);
    }
    rig_close(&r);
}

static void no_rendered_call_is_masked_on_the_embedded_tokenizer(void **state)
{
    (void)state;
    rendered_calls(TINY, COUNT(10000, 700));
}

static void no_rendered_call_is_masked_on_the_published_tokenizer(void **state)
{
    (void)state;
    rendered_calls(PUBLISHED, COUNT(400, 25));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(random_logits_give_valid_calls_on_the_embedded_tokenizer),
        cmocka_unit_test(random_logits_give_valid_calls_on_the_published_tokenizer),
        cmocka_unit_test(no_rendered_call_is_masked_on_the_embedded_tokenizer),
        cmocka_unit_test(no_rendered_call_is_masked_on_the_published_tokenizer),
    };
    rng = test_seed();
    return cmocka_run_group_tests(tests, NULL, NULL);
}
