/* Hashes and random numbers: libsodium (BLAKE2b, SHA-256, random) and xxHash (XXH3) behind our types, so
 * that no other module includes their headers. */
#include "base.h"

#include <pthread.h>
#include <sodium.h>
#include <string.h>
#include <xxhash.h>

_Static_assert(sizeof(crypto_generichash_state) <= sizeof(dm_blake2b), "dm_blake2b is too small");
_Static_assert(sizeof(crypto_hash_sha256_state) <= sizeof(dm_sha256), "dm_sha256 is too small");

static crypto_generichash_state *blake(dm_blake2b *h) { return (crypto_generichash_state *)(void *)h->opaque; }
static crypto_hash_sha256_state *sha(dm_sha256 *h) { return (crypto_hash_sha256_state *)(void *)h->opaque; }

/* Lets libsodium choose its fastest implementation; without it the portable one runs.  (It cannot fail in a way that
 * matters here: it says -1 only when no randomness is to be had, and then randombytes ends the process itself.) */
static void sodium_ready(void) { (void)!sodium_init(); }
static pthread_once_t sodium_once = PTHREAD_ONCE_INIT;

void dm_blake2b_init(dm_blake2b *h)
{
    pthread_once(&sodium_once, sodium_ready);
    crypto_generichash_init(blake(h), NULL, 0, 32);
}
void dm_blake2b_add(dm_blake2b *h, const void *p, size_t n) { crypto_generichash_update(blake(h), p, n); }
void dm_blake2b_end(dm_blake2b *h, dm_hash *out) { crypto_generichash_final(blake(h), out->b, 32); }

void dm_sha256_init(dm_sha256 *h) { crypto_hash_sha256_init(sha(h)); }
void dm_sha256_add(dm_sha256 *h, const void *p, size_t n) { crypto_hash_sha256_update(sha(h), p, n); }
void dm_sha256_end(dm_sha256 *h, dm_hash *out) { crypto_hash_sha256_final(sha(h), out->b); }

void dm_xxh3_128(uint8_t out[16], const void *p, size_t n)
{
    XXH128_canonical_t c;
    XXH128_canonicalFromHash(&c, XXH3_128bits(p, n));
    memcpy(out, c.digest, 16);
}

void dm_random(void *p, size_t n) { randombytes_buf(p, n); }

uint64_t dm_splitmix64(uint64_t *state)
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}
