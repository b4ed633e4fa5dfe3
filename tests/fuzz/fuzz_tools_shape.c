/* Output of tools to text for a model: for any bytes, fed in any pieces, the same valid text within its bound, without
 * control characters.  Bytes of an input: terminal or not, the bound, a seed for the pieces, then the output. */
#include "tests/fuzz/lib.h"
#include "tools/tools_int.h"

typedef struct shaped { dm_buf text; bool cut; } shaped;

static shaped shape(fuzz_bytes in, size_t max, bool terminal, const char *whole, uint64_t seed)
{
    shaper s;
    shaped r = {0};
    shaper_init(&s, max, terminal);
    while (in.n) {
        size_t n = seed ? 1 + dm_splitmix64(&seed) % 5 : in.n;
        if (n > in.n) n = in.n;
        FUZZ_OK(shaper_feed(&s, in.p, n));
        in.p += n, in.n -= n;
    }
    FUZZ_OK(shaper_end(&s, &r.text, &r.cut, whole));
    FUZZ_CHECK(r.text.n <= s.max);
    shaper_free(&s);
    return r;
}

static void check_text(const dm_buf *b)
{
    FUZZ_CHECK(dm_utf8_valid(b->p, b->n));
    for (size_t i = 0; i < b->n;) {
        uint32_t c;
        i += dm_utf8_next(b->p + i, b->n - i, &c);
        if ((c < 0x20 && c != '\n' && c != '\t') || (c >= 0x7F && c < 0xA0)) FUZZ_FAIL("control character U+%04X", c);
    }
}

int FUZZ_ENTRY(const uint8_t *data, size_t n)
{
    fuzz_bytes in = {data, n};
    uint8_t how = fuzz_byte(&in), bound = fuzz_byte(&in), seed = fuzz_byte(&in);
    const char *whole = how & 2 ? "/tmp/output.txt" : NULL;
    shaped a = shape(in, bound * 8u, how & 1, whole, 0), b = shape(in, bound * 8u, how & 1, whole, seed + 1u);
    check_text(&a.text);
    FUZZ_CHECK(a.cut == b.cut && a.text.n == b.text.n && (a.text.n == 0 || memcmp(a.text.p, b.text.p, a.text.n) == 0));
    dm_buf_free(&a.text);
    dm_buf_free(&b.text);
    return 0;
}
