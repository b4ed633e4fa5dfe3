/* format.c — the bytes of the store.  All integers are little endian unless said otherwise.
 *
 * LMDB databases in data.mdb
 *   "blocks", "states"  entry key -> index record.  Small pages; every lookup goes through them.
 *   "order"             priority, ~seq (both u64 big endian) -> entry key.  The first record is the next victim.
 *   "parts"             entry key, part (u32 big endian) -> part record: the slot where its extent lies
 *   "free"              slot (u64 big endian) -> free record
 *   "meta"              "store" -> meta record (written once), "clock" -> clock record; days.c has the rest
 *
 * slots.dat is slot after slot, each one extent.  It has no header and says nothing by itself: which slots count is in data.mdb,
 * and an extent names the entry that it belongs to.
 *
 * Entry key
 *   block   'b' H(i)[32]                                                      33 bytes
 *   state   's' H(last)[32] tail_count (u16 big endian) hash of tail ids[32]  67 bytes
 *   The tail's count stands before its hash, so the states behind one block are sorted by position.
 *
 * Extent: n whole pages, the same for all of a store, so that any free slot fits any part and the disk can read and write it O_DIRECT.
 *   offset  size  meaning
 *        0    16  XXH3-128 over bytes 16 .. 128+payload length
 *       16     4  "DMKX"
 *       20     2  version (2)
 *       22     1  kind: 1 block, 2 state
 *       23     1  zero
 *       24     4  part
 *       28     4  parts
 *       32     4  payload length in this extent
 *       36     4  tail count (state)
 *       40     8  payload length of the entry, all parts
 *       48    32  H(i), or H(last)
 *       80    32  hash of the tail's ids, or zero
 *      112     8  sequence number of the writing, as in the index record
 *      120     8  zero
 *      128        payload, then zeroes
 *
 * Index record (64 bytes)
 *        0    16  XXH3-128 over the entry key and bytes 16 .. 64: a record is good only under its own key
 *       16     4  parts            20  4  hits (saturating)
 *       24     8  payload length   32  8  priority
 *       40     8  sequence number  48  8  store clock of the last use
 *       56     8  store clock of writing
 *
 * Meta record (96 bytes); the place of magic and version never changes
 *        0     4  "DMKV"            4  4  format version
 *        8     4  LMDB page size   12  4  zero
 *       16     8  block_bytes      24  8  extent bytes
 *       32    32  root             64 16  XXH3-128 over bytes 0 .. 64    80 16  zero
 *
 * Part record (24 bytes)
 *        0    16  XXH3-128 over the part's key and bytes 16 .. 24    16  8  slot
 *
 * Free record (32 bytes)
 *        0    16  XXH3-128 over the slot's key and bytes 16 .. 32
 *       16     8  LMDB's number of the transaction that freed it    24  8  1: a hole in the file, else 0
 *
 * Clock record (48 bytes)
 *        0     8  bytes written so far    8  8  sequence numbers given so far   16  8  slots   24  8  holes   32  16  XXH3-128 over 0 .. 32 */
#include <endian.h>
#include <string.h>

#include "kvstore/kv_int.h"

#define EXTENT_MAGIC "DMKX"
#define EXTENT_VERSION 2
#define META_MAGIC "DMKV"

static void put16(uint8_t *p, uint16_t v) { v = htole16(v), memcpy(p, &v, 2); }
static void put32(uint8_t *p, uint32_t v) { v = htole32(v), memcpy(p, &v, 4); }
static void put64(uint8_t *p, uint64_t v) { v = htole64(v), memcpy(p, &v, 8); }
static uint16_t get16(const uint8_t *p) { uint16_t v; memcpy(&v, p, 2); return le16toh(v); }
static uint32_t get32(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return le32toh(v); }
static uint64_t get64(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return le64toh(v); }

/* ---- chain and keys -------------------------------------------------------------------- */

/* int32 little endian, whatever the machine. */
static void add_ids(dm_blake2b *h, const int32_t *ids, size_t n)
{
    int32_t le[DM_KV_BLOCK];
    for (size_t i = 0; i < n; i++) le[i] = (int32_t)htole32((uint32_t)ids[i]);
    dm_blake2b_add(h, le, n * sizeof le[0]);
}

void dm_kv_chain(dm_hash *next, const dm_hash *prev, const int32_t ids[DM_KV_BLOCK])
{
    dm_blake2b h;
    dm_blake2b_init(&h);
    dm_blake2b_add(&h, prev->b, sizeof prev->b);
    add_ids(&h, ids, DM_KV_BLOCK);
    dm_blake2b_end(&h, next);
}

kv_key kv_key_block(const dm_hash *h)
{
    kv_key k;
    memset(&k, 0, sizeof k);
    k.kind = KV_BLOCK;
    k.hash = *h;
    return k;
}

kv_key kv_key_state(const dm_hash *last, const int32_t *tail, int tail_count)
{
    kv_key k;
    memset(&k, 0, sizeof k);
    k.kind = KV_STATE;
    k.tail_count = (uint16_t)tail_count;
    k.hash = *last;
    dm_blake2b h;
    dm_blake2b_init(&h);
    add_ids(&h, tail, (size_t)tail_count);
    dm_blake2b_end(&h, &k.tail);
    return k;
}

bool kv_key_equal(const kv_key *a, const kv_key *b) { return memcmp(a, b, sizeof *a) == 0; }

size_t kv_key_encode(uint8_t out[KV_KEY_MAX], const kv_key *k)
{
    out[0] = k->kind == KV_BLOCK ? 'b' : 's';
    memcpy(out + 1, k->hash.b, 32);
    if (k->kind == KV_BLOCK) return 33;
    out[33] = (uint8_t)(k->tail_count >> 8);
    out[34] = (uint8_t)k->tail_count;
    memcpy(out + 35, k->tail.b, 32);
    return 67;
}

size_t kv_key_encode_part(uint8_t out[KV_KEY_MAX], const kv_key *k, uint32_t part)
{
    size_t n = kv_key_encode(out, k);
    uint32_t be = htobe32(part);
    memcpy(out + n, &be, 4);
    return n + 4;
}

bool kv_key_decode(kv_key *k, const void *p, size_t n)
{
    const uint8_t *b = p;
    memset(k, 0, sizeof *k);
    if (n == 33 && b[0] == 'b') {
        k->kind = KV_BLOCK;
    } else if (n == 67 && b[0] == 's') {
        k->kind = KV_STATE;
        k->tail_count = (uint16_t)(b[33] << 8 | b[34]);
        memcpy(k->tail.b, b + 35, 32);
        if (k->tail_count >= DM_KV_BLOCK) return false;
    } else {
        return false;
    }
    memcpy(k->hash.b, b + 1, 32);
    return true;
}

bool kv_key_decode_part(kv_key *k, uint32_t *part, const void *p, size_t n)
{
    if (n < 4 || !kv_key_decode(k, p, n - 4)) return false;
    memcpy(part, (const uint8_t *)p + n - 4, 4);
    *part = be32toh(*part);
    return true;
}

void kv_key_text(char out[96], const kv_key *k)
{
    char hex[17], tail[17];
    dm_hex(hex, k->hash.b, 8);
    if (k->kind == KV_BLOCK) {
        snprintf(out, 96, "block %s", hex);
    } else {
        dm_hex(tail, k->tail.b, 8);
        snprintf(out, 96, "state %s+%u:%s", hex, k->tail_count, tail);
    }
}

/* ---- extent --------------------------------------------------------------------------------- */

uint64_t kv_extent_size(size_t block_bytes, size_t page_bytes)
{
    return ((uint64_t)block_bytes + KV_HEADER_BYTES + page_bytes - 1) / page_bytes * page_bytes;
}

void kv_extent_write(uint8_t *x, size_t extent_bytes, const kv_part *p, const uint8_t *payload, size_t n)
{
    if (n) memcpy(x + KV_HEADER_BYTES, payload, n);
    kv_extent_seal(x, extent_bytes, p, n);
}

void kv_extent_seal(uint8_t *x, size_t extent_bytes, const kv_part *p, size_t n)
{
    const kv_key *k = p->key;
    memset(x, 0, KV_HEADER_BYTES);
    memcpy(x + 16, EXTENT_MAGIC, 4);
    put16(x + 20, EXTENT_VERSION);
    x[22] = k->kind;
    put32(x + 24, p->part);
    put32(x + 28, p->parts);
    put32(x + 32, (uint32_t)n);
    put32(x + 36, k->tail_count);
    put64(x + 40, p->total);
    memcpy(x + 48, k->hash.b, 32);
    memcpy(x + 80, k->tail.b, 32);
    put64(x + 112, p->seq);
    dm_xxh3_128(x, x + 16, KV_HEADER_BYTES - 16 + n);
    memset(x + KV_HEADER_BYTES + n, 0, extent_bytes - KV_HEADER_BYTES - n);
}

const uint8_t *kv_extent_check(const uint8_t *x, size_t extent_bytes, const kv_part *p, size_t *n)
{
    const kv_key *k = p->key;
    size_t len = get32(x + 32);
    if (memcmp(x + 16, EXTENT_MAGIC, 4) != 0 || get16(x + 20) != EXTENT_VERSION || x[22] != k->kind || x[23] != 0) return NULL;
    if (get32(x + 24) != p->part || get32(x + 28) != p->parts || get32(x + 36) != k->tail_count || get64(x + 40) != p->total) return NULL;
    if (memcmp(x + 48, k->hash.b, 32) != 0 || memcmp(x + 80, k->tail.b, 32) != 0 || get64(x + 112) != p->seq || get64(x + 120) != 0) return NULL;
    size_t room = extent_bytes - KV_HEADER_BYTES;
    uint64_t before = (uint64_t)p->part * room, left = before < p->total ? p->total - before : 0;
    if (p->part >= p->parts || len != (left < room ? left : room)) return NULL;
    uint8_t sum[16];
    dm_xxh3_128(sum, x + 16, KV_HEADER_BYTES - 16 + len);
    if (memcmp(sum, x, 16) != 0) return NULL;
    *n = len;
    return x + KV_HEADER_BYTES;
}

/* ---- small records ----------------------------------------------------------------------------- */

static void index_sum(uint8_t sum[16], const kv_key *k, const uint8_t *rec)
{
    uint8_t buf[KV_KEY_MAX + KV_INDEX_BYTES];
    size_t n = kv_key_encode(buf, k);
    memcpy(buf + n, rec + 16, KV_INDEX_BYTES - 16);
    dm_xxh3_128(sum, buf, n + KV_INDEX_BYTES - 16);
}

void kv_index_encode(uint8_t out[KV_INDEX_BYTES], const kv_key *k, const kv_index *ix)
{
    memset(out, 0, KV_INDEX_BYTES);
    put32(out + 16, ix->parts);
    put32(out + 20, ix->uses);
    put64(out + 24, ix->total);
    put64(out + 32, ix->priority);
    put64(out + 40, ix->seq);
    put64(out + 48, ix->last_used);
    put64(out + 56, ix->written);
    index_sum(out, k, out);
}

bool kv_index_decode(kv_index *ix, const kv_key *k, const void *p, size_t n, size_t extent_bytes)
{
    const uint8_t *b = p;
    uint8_t sum[16];
    if (n != KV_INDEX_BYTES) return false;
    index_sum(sum, k, b);
    if (memcmp(sum, b, 16) != 0) return false;
    *ix = (kv_index){ .parts = get32(b + 16), .uses = get32(b + 20), .total = get64(b + 24), .priority = get64(b + 32),
        .seq = get64(b + 40), .last_used = get64(b + 48), .written = get64(b + 56) };
    /* A good checksum does not make a sane number: the file may have been made by somebody else. */
    uint64_t room = extent_bytes - KV_HEADER_BYTES;
    return ix->parts > 0 && ix->total <= (uint64_t)ix->parts * room && (ix->parts == 1 || ix->total > (uint64_t)(ix->parts - 1) * room);
}

/* Big endian, so that LMDB's byte order is the numeric one; later writes first among equals. */
void kv_order_encode(uint8_t out[KV_ORDER_BYTES], const kv_index *ix)
{
    uint64_t a = htobe64(ix->priority), b = htobe64(~ix->seq);
    memcpy(out, &a, 8);
    memcpy(out + 8, &b, 8);
}

void kv_meta_encode(uint8_t out[KV_META_BYTES], const kv_meta *m)
{
    memset(out, 0, KV_META_BYTES);
    memcpy(out, META_MAGIC, 4);
    put32(out + 4, m->version);
    put32(out + 8, m->page_bytes);
    put64(out + 16, m->block_bytes);
    put64(out + 24, m->extent_bytes);
    memcpy(out + 32, m->root.b, 32);
    dm_xxh3_128(out + 64, out, 64);
}

int kv_meta_decode(kv_meta *m, const void *p, size_t n)
{
    const uint8_t *b = p;
    uint8_t sum[16];
    if (n < 8 || memcmp(b, META_MAGIC, 4) != 0) return DM_ESTORE;
    m->version = get32(b + 4);
    if (m->version > DM_KV_FORMAT_VERSION) return DM_EVERSION;
    if (n != KV_META_BYTES || m->version == 0) return DM_ESTORE;
    dm_xxh3_128(sum, b, 64);
    if (memcmp(sum, b + 64, 16) != 0) return DM_ESTORE;
    if (m->version < DM_KV_FORMAT_VERSION) return DM_ENOTSUP;
    m->page_bytes = get32(b + 8);
    m->block_bytes = get64(b + 16);
    m->extent_bytes = get64(b + 24);
    memcpy(m->root.b, b + 32, 32);
    bool sane = m->page_bytes >= 512 && m->page_bytes <= 65536 && m->block_bytes > 0 && m->block_bytes < (1u << 31)
        && m->extent_bytes == kv_extent_size((size_t)m->block_bytes, m->page_bytes);
    return sane ? 0 : DM_ESTORE;
}

void kv_clock_encode(uint8_t out[KV_CLOCK_BYTES], const kv_clock *c)
{
    put64(out, c->bytes);
    put64(out + 8, c->seq);
    put64(out + 16, c->slots);
    put64(out + 24, c->holes);
    dm_xxh3_128(out + 32, out, 32);
}

bool kv_clock_decode(kv_clock *c, const void *p, size_t n)
{
    uint8_t sum[16];
    if (n != KV_CLOCK_BYTES) return false;
    dm_xxh3_128(sum, p, 32);
    if (memcmp(sum, (const uint8_t *)p + 32, 16) != 0) return false;
    c->bytes = get64(p);
    c->seq = get64((const uint8_t *)p + 8);
    c->slots = get64((const uint8_t *)p + 16);
    c->holes = get64((const uint8_t *)p + 24);
    return true;
}

static void place_sum(uint8_t sum[16], const void *key, size_t key_bytes, const uint8_t *rec, size_t n)
{
    uint8_t buf[KV_KEY_MAX + KV_FREE_BYTES];
    memcpy(buf, key, key_bytes);
    memcpy(buf + key_bytes, rec + 16, n - 16);
    dm_xxh3_128(sum, buf, key_bytes + n - 16);
}

void kv_part_encode(uint8_t out[KV_PART_BYTES], const void *key, size_t key_bytes, uint64_t slot)
{
    put64(out + 16, slot);
    place_sum(out, key, key_bytes, out, KV_PART_BYTES);
}

bool kv_part_decode(uint64_t *slot, const void *key, size_t key_bytes, const void *p, size_t n)
{
    uint8_t sum[16];
    if (n != KV_PART_BYTES || key_bytes > KV_KEY_MAX) return false;
    place_sum(sum, key, key_bytes, p, n);
    *slot = get64((const uint8_t *)p + 16);
    return memcmp(sum, p, 16) == 0;
}

void kv_free_encode(uint8_t key[8], uint8_t out[KV_FREE_BYTES], const kv_free *f)
{
    uint64_t be = htobe64(f->slot);
    memcpy(key, &be, 8);
    put64(out + 16, f->since);
    put64(out + 24, f->hole);
    place_sum(out, key, 8, out, KV_FREE_BYTES);
}

bool kv_free_decode(kv_free *f, const void *key, size_t key_bytes, const void *p, size_t n)
{
    uint8_t sum[16];
    uint64_t be;
    if (n != KV_FREE_BYTES || key_bytes != 8) return false;
    place_sum(sum, key, key_bytes, p, n);
    memcpy(&be, key, 8);
    *f = (kv_free){ .slot = be64toh(be), .since = get64((const uint8_t *)p + 16), .hole = get64((const uint8_t *)p + 24) != 0 };
    return memcmp(sum, p, 16) == 0;
}
