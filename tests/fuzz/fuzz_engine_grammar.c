/* Any schema, any wish of what to write: under the mask the model writes calls that the parser reads without a word.  An
 * input is a tool's parameters and, behind a FUZZ_PART, the text that the model would like to write; where the mask is
 * against it, one byte of the wish chooses among what is allowed. */
#include <jansson.h>
#include <math.h>

#include "engine/engine.h"
#include "tests/fuzz/lib.h"

#define DSML "｜DSML｜"

enum { TOKENS_MAX = 1200, VOCAB_MAX = 4096 };

static struct { dm_tok *tok; dm_vocab *v; int vocab; int32_t open, dsml, eos; } m;

static void open_once(void)
{
    dm_err e = {0};
    dm_ids ids = {0};
    if (m.tok) return;
    FUZZ_OK(dm_tok_open(&m.tok, DM_SOURCE_DIR "/examples/models/tiny/tokenizer.json", &e));
    FUZZ_OK(dm_vocab_create(&m.v, m.tok, &e));
    m.vocab = dm_tok_vocab(m.tok);
    m.dsml = dm_tok_special(m.tok, DSML);
    m.eos = dm_tok_special(m.tok, "<｜end▁of▁sentence｜>");
    FUZZ_OK(dm_tok_encode(m.tok, "<", 1, false, &ids, &e));
    FUZZ_CHECK(ids.n == 1 && m.vocab <= VOCAB_MAX && m.dsml >= 0 && m.eos >= 0);
    m.open = ids.p[0];
    dm_ids_free(&ids);
}

static void complains(void *ctx, const dm_parse_event *ev)
{
    (void)ctx;
    if (ev->kind == DM_PARSE_ERROR || ev->kind == DM_PARSE_REPAIR) FUZZ_FAIL("the parser says: %.*s", (int)ev->n, ev->p);
}

static void feed(dm_grammar *g, dm_parser *p, int32_t id)
{
    size_t n;
    const char *bytes = dm_tok_bytes(m.tok, id, &n);
    FUZZ_OK(dm_grammar_accept(g, id));
    if (id != m.eos) FUZZ_OK(dm_parser_feed(p, bytes, n, dm_tok_is_special(m.tok, id)));
}

/* The longest allowed token that the wish begins with, else one that its first byte chooses. */
static int32_t choose(const float *logits, fuzz_bytes *wish)
{
    int32_t allowed[VOCAB_MAX], best = -1;
    size_t n = 0, most = 0;
    for (int32_t i = 0; i < m.vocab; i++) {
        size_t len;
        if (logits[i] == -INFINITY) continue;
        allowed[n++] = i;
        const char *bytes = dm_tok_bytes(m.tok, i, &len);
        if (len > most && len <= wish->n && memcmp(bytes, wish->p, len) == 0) best = i, most = len;
    }
    FUZZ_CHECK(n > 0);
    if (best < 0) return allowed[fuzz_byte(wish) % n];
    wish->p += most;
    wish->n -= most;
    return best;
}

static void check_calls(dm_parser *p)
{
    FUZZ_OK(dm_parser_finish(p, false));
    FUZZ_CHECK(dm_parser_calls(p) > 0);
    for (int i = 0; i < dm_parser_calls(p); i++) {
        const char *name = dm_parser_call_name(p, i), *args = dm_parser_call_args(p, i);
        json_error_t why;
        json_t *v = json_loads(args, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &why);
        if (strcmp(name, "f") != 0 && strcmp(name, "read") != 0) FUZZ_FAIL("a call of %s", name);
        if (!json_is_object(v)) FUZZ_FAIL("%s: %s", args, why.text);
        json_decref(v);
    }
}

static void write_calls(dm_grammar *g, dm_parser *p, fuzz_bytes wish)
{
    static float logits[VOCAB_MAX];
    feed(g, p, m.open);
    feed(g, p, m.dsml);
    FUZZ_CHECK(dm_grammar_in_call(g)); /* `read` can always be called */
    for (int i = 0; i < TOKENS_MAX && wish.n && !dm_parser_block_closed(p); i++) {
        memset(logits, 0, sizeof logits);
        dm_grammar_mask(g, logits, m.vocab);
        int32_t id = choose(logits, &wish);
        if (dm_grammar_gave_up(g)) return; /* said in words: nothing is promised any more */
        feed(g, p, id);
    }
    if (!dm_parser_block_closed(p)) return;
    memset(logits, 0, sizeof logits);
    dm_grammar_mask(g, logits, m.vocab);
    for (int32_t i = 0; i < m.vocab; i++) FUZZ_CHECK((logits[i] == -INFINITY) == (i != m.eos));
    check_calls(p);
}

int FUZZ_ENTRY(const uint8_t *data, size_t n)
{
    fuzz_bytes in = {data, n}, schema = fuzz_part(&in);
    dm_grammar *g = NULL;
    dm_parser *p = NULL;
    dm_err e = {0};
    dm_buf text = {0};
    open_once();
    if (memchr(schema.p, 0, schema.n)) return 0;
    FUZZ_OK(dm_buf_append(&text, schema.p, schema.n));
    const dm_parser_tool tools[] = {{"f", dm_buf_cstr(&text)}, {"read", "{\"type\": \"object\", \"properties\": {\"path\": {\"type\": \"string\"}}}"}};
    const dm_grammar_opts go = {.tools = tools, .ntools = DM_COUNT(tools)};
    const dm_parser_opts po = {.tools = tools, .ntools = DM_COUNT(tools)};
    int rc = dm_grammar_create(&g, m.v, &go, &e);
    if (rc < 0) fuzz_told(rc, &e);
    FUZZ_CHECK(rc == dm_parser_create(&p, &po, complains, NULL, &e));
    if (rc == 0) write_calls(g, p, in);
    dm_grammar_destroy(g);
    dm_parser_destroy(p);
    dm_buf_free(&text);
    return 0;
}
