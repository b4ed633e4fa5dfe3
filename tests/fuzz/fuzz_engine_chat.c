/* Messages to a prompt, and JSON as Python writes it.  The first byte of an input chooses the options; the rest is the
 * messages.  What renders is valid text whose marks stand where the spans say; what Python's reader takes is written in
 * a form that reads back as the same, and is all that another JSON reader takes, and more. */
#include <jansson.h>

#include "engine/engine.h"
#include "engine/pyjson_int.h"
#include "tests/fuzz/lib.h"

static void check_prompt(const dm_prompt *p)
{
    const char *text = dm_buf_cstr(&p->text);
    size_t end = 0;
    FUZZ_CHECK(dm_utf8_valid(text, p->text.n));
    for (size_t i = 0; i < p->nspans; i++) {
        const dm_span s = p->spans[i];
        FUZZ_CHECK(s.at >= end && s.len > 2 && s.len < 64 && s.at <= p->text.n && s.len <= p->text.n - s.at);
        bool bars = s.len > 6 && memcmp(text + s.at + s.len - 4, "｜>", 4) == 0, think = text[s.at + s.len - 1] == '>';
        bool dsml = s.len == strlen("｜DSML｜") && memcmp(text + s.at, "｜DSML｜", s.len) == 0;
        if (!(text[s.at] == '<' && (bars || think)) && !dsml) FUZZ_FAIL("no mark: '%.*s'", (int)s.len, text + s.at);
        end = s.at + s.len;
    }
}

static void check_render(const char *text, size_t n, uint8_t how, bool json)
{
    const dm_chat_opts o = {.mode = how & 1 ? DM_THINKING : DM_CHAT, .drop_thinking = how & 2, .effort = (dm_effort)(how >> 2 & 3),
                            .revision = how & 16 ? DM_REV_0731 : DM_REV_APRIL, .continues = how & 32};
    dm_prompt p = {0};
    dm_err e = {0};
    int rc = dm_chat_render(text, n, &o, &p, &e);
    if (rc < 0) {
        fuzz_told(rc, &e);
        FUZZ_CHECK(p.text.n == 0 && p.nspans == 0);
    } else {
        FUZZ_CHECK(json);
        check_prompt(&p);
    }
    dm_prompt_free(&p);
}

static bool taken_by_others(const char *text, size_t n)
{
    if (memchr(text, 0, n)) return false; /* for jansson that ends the text */
    json_t *o = json_loadb(text, n, JSON_DECODE_ANY | JSON_ALLOW_NUL, NULL);
    json_decref(o);
    return o != NULL;
}

static void read_back(const dm_buf *from, dm_buf *to)
{
    dm_err e = {0};
    if (dm_json_python(dm_buf_cstr(from), from->n, to, &e) < 0) FUZZ_FAIL("what was written cannot be read: %s", e.text);
}

static bool check_python(const char *text, size_t n)
{
    dm_buf once = {0}, twice = {0};
    dm_err e = {0};
    int rc = dm_json_python(text, n, &once, &e);
    if (rc < 0) {
        fuzz_told(rc, &e);
        FUZZ_CHECK(once.n == 0);
        if (rc == DM_EFORMAT && taken_by_others(text, n)) FUZZ_FAIL("good JSON refused: %s", e.text);
        return false;
    }
    FUZZ_CHECK(dm_utf8_valid(once.p, once.n));
    /* Keys that differ in a lone surrogate are equal once that is U+FFFD, so it may take two rounds. */
    read_back(&once, &twice);
    if (memmem(once.p, once.n, "\xEF\xBF\xBD", 3)) {
        dm_buf_clear(&once);
        read_back(&twice, &once);
    }
    if (once.n != twice.n || memcmp(once.p, twice.p, once.n) != 0) FUZZ_FAIL("'%s' became '%s'", dm_buf_cstr(&once), dm_buf_cstr(&twice));
    dm_buf_free(&once);
    dm_buf_free(&twice);
    return true;
}

int FUZZ_ENTRY(const uint8_t *data, size_t n)
{
    fuzz_bytes in = {data, n};
    uint8_t how = fuzz_byte(&in);
    check_render((const char *)in.p, in.n, how, check_python((const char *)in.p, in.n));
    return 0;
}
