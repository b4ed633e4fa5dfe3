/* The store's records.  What a reader accepts is written back as the same bytes and holds numbers that can be computed
 * with.  The first byte of an input chooses the record and whether its checksum is put right before it is read, since
 * no mutation would guess one; an extent's second byte is how much longer it is than the input. */
#include "kvstore/kv_int.h"
#include "tests/fuzz/lib.h"

enum { MEND = 0x80 };

static uint32_t get32(const uint8_t *p) { return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24; }
static uint64_t get64(const uint8_t *p) { return get32(p) | (uint64_t)get32(p + 4) << 32; }

static void read_key(const uint8_t *p, size_t n)
{
    kv_key k;
    uint8_t out[KV_KEY_MAX];
    char text[96];
    uint32_t part;
    if (kv_key_decode(&k, p, n)) {
        FUZZ_CHECK(kv_key_encode(out, &k) == n && memcmp(out, p, n) == 0 && k.tail_count < DM_KV_BLOCK);
        kv_key_text(text, &k);
        FUZZ_CHECK(strlen(text) > 8);
    }
    if (kv_key_decode_part(&k, &part, p, n)) FUZZ_CHECK(kv_key_encode_part(out, &k, part) == n && memcmp(out, p, n) == 0);
}

static void read_meta(uint8_t *p, size_t n, bool mend)
{
    kv_meta m;
    uint8_t out[KV_META_BYTES];
    if (mend && n == KV_META_BYTES) dm_xxh3_128(p + 64, p, 64);
    int rc = kv_meta_decode(&m, p, n);
    FUZZ_CHECK(rc == 0 || rc == DM_ESTORE || rc == DM_EVERSION);
    if (rc < 0) return;
    FUZZ_CHECK(m.extent_bytes >= m.block_bytes + KV_HEADER_BYTES && m.extent_bytes % m.page_bytes == 0);
    kv_meta_encode(out, &m);
    FUZZ_CHECK(memcmp(out, p, 12) == 0 && memcmp(out + 16, p + 16, 48) == 0);
}

static void read_clock(uint8_t *p, size_t n, bool mend)
{
    kv_clock c;
    uint8_t out[KV_CLOCK_BYTES];
    if (mend && n == KV_CLOCK_BYTES) dm_xxh3_128(p + 16, p, 16);
    if (!kv_clock_decode(&c, p, n)) return;
    kv_clock_encode(out, &c);
    FUZZ_CHECK(memcmp(out, p, n) == 0);
}

/* The key comes first, as it is in the database. */
static void read_index(uint8_t *p, size_t n, bool mend, size_t extent_bytes)
{
    kv_key k;
    kv_index ix;
    size_t len = n && p[0] == 'b' ? 33 : 67;
    uint8_t sum[KV_KEY_MAX + KV_INDEX_BYTES], out[KV_INDEX_BYTES];
    if (n < len || !kv_key_decode(&k, p, len)) return;
    uint8_t *rec = p + len;
    if (mend && n - len == KV_INDEX_BYTES) {
        memcpy(sum, p, len);
        memcpy(sum + len, rec + 16, KV_INDEX_BYTES - 16);
        dm_xxh3_128(rec, sum, len + KV_INDEX_BYTES - 16);
    }
    if (!kv_index_decode(&ix, &k, rec, n - len, extent_bytes)) return;
    FUZZ_CHECK(ix.parts > 0 && (ix.total + extent_bytes) / (extent_bytes - KV_HEADER_BYTES + 1) <= (uint64_t)ix.parts + 1);
    kv_index_encode(out, &k, &ix);
    FUZZ_CHECK(memcmp(out, rec, sizeof out) == 0);
}

/* Read under the key that it claims, and under another one. */
static void read_extent(const uint8_t *p, size_t n, bool mend, size_t more)
{
    size_t bytes = (n < KV_HEADER_BYTES ? KV_HEADER_BYTES : n) + more, len = 0;
    uint8_t *x = calloc(1, bytes), *again = malloc(bytes);
    kv_key k;
    FUZZ_CHECK(x && again);
    memcpy(x, p, n);
    memset(&k, 0, sizeof k);
    k.kind = x[22], k.tail_count = (uint16_t)get32(x + 36);
    memcpy(k.hash.b, x + 48, 32);
    memcpy(k.tail.b, x + 80, 32);
    uint32_t part = get32(x + 24), parts = get32(x + 28), claimed = get32(x + 32);
    if (mend && claimed <= bytes - KV_HEADER_BYTES) dm_xxh3_128(x, x + 16, KV_HEADER_BYTES - 16 + claimed);
    const kv_part name = { &k, part, parts, get64(x + 40), get64(x + 112) };
    const uint8_t *payload = kv_extent_check(x, bytes, &name, &len);
    if (payload) {
        FUZZ_CHECK(payload == x + KV_HEADER_BYTES && len <= bytes - KV_HEADER_BYTES && len == claimed && part < parts);
        kv_extent_write(again, bytes, &name, payload, len);
        FUZZ_CHECK(memcmp(again, x, KV_HEADER_BYTES + len) == 0);
    }
    k.hash.b[0] ^= 1;
    FUZZ_CHECK(!kv_extent_check(x, bytes, &name, &len));
    free(x);
    free(again);
}

int FUZZ_ENTRY(const uint8_t *data, size_t n)
{
    fuzz_bytes in = {data, n};
    uint8_t how = fuzz_byte(&in), *copy = malloc(in.n + 1);
    FUZZ_CHECK(copy != NULL);
    memcpy(copy, in.p, in.n);
    switch (how & 7) {
    case 0: read_key(copy, in.n); break;
    case 1: read_meta(copy, in.n, how & MEND); break;
    case 2: read_clock(copy, in.n, how & MEND); break;
    case 3: read_index(copy, in.n, how & MEND, KV_HEADER_BYTES + 1 + (how >> 3 & 15) * 100u); break;
    default:
        if (in.n) read_extent(copy + 1, in.n - 1, how & MEND, copy[0]);
    }
    free(copy);
    return 0;
}
