/* What the tests of the store share: sequences of ids whose blocks and states have known bytes, so that any value that comes
 * back can be checked without remembering it.  A value is made from its key and nothing else; a wrong one cannot pass. */
#ifndef DM_KVTEST_H
#define DM_KVTEST_H

#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvstore/kvstore.h"
#include "testlib.h"

#define KT_BLOCK_BYTES 10000 /* three pages with its header, not a multiple of anything */

static inline dm_hash kt_root(void)
{
    dm_hash h;
    memset(&h, 0x5a, sizeof h);
    return h;
}

static inline dm_kv_opts kt_opts(const char *dir)
{
    return (dm_kv_opts){ .dir = dir, .root = kt_root(), .block_bytes = KT_BLOCK_BYTES, .disk_bytes_max = 64 << 20, .ram_bytes_max = 32 << 20,
        .queue_bytes_max = 16 << 20, .sync_ms = 20 };
}

/* A fresh directory name under the program's scratch directory; static storage, eight deep. */
static inline const char *kt_dir(const char *name)
{
    static char buf[8][1024];
    static int k, serial;
    k = (k + 1) & 7;
    snprintf(buf[k], sizeof buf[k], "%s/%s.%d", test_dir(), name, serial++);
    return buf[k];
}

static inline const char *kt_data_file(const char *dir)
{
    static char buf[4][1100];
    static int k;
    k = (k + 1) & 3;
    snprintf(buf[k], sizeof buf[k], "%s/data.mdb", dir);
    return buf[k];
}

static inline dm_kv *kt_open(const dm_kv_opts *o)
{
    dm_kv *kv;
    dm_err e;
    assert_ok_e(dm_kv_open(&kv, o, &e), e);
    return kv;
}

/* ids of the sequence with this seed; sequences with different seeds share nothing. */
static inline int32_t *kt_ids(uint64_t seed, int64_t n)
{
    int32_t *ids = malloc((size_t)(n ? n : 1) * sizeof *ids);
    uint64_t s = seed * 0x9E3779B97F4A7C15u + 1;
    for (int64_t i = 0; i < n; i++) ids[i] = (int32_t)(dm_splitmix64(&s) % 129280);
    return ids;
}

static inline void kt_chain(dm_hash *h, const int32_t *ids, int64_t blocks)
{
    *h = kt_root();
    for (int64_t i = 0; i < blocks; i++) dm_kv_chain(h, h, ids + i * DM_KV_BLOCK);
}

/* Bytes of the value for a name: the chain hash and the number of tail ids. */
static inline void kt_fill(uint8_t *p, size_t n, const dm_hash *name, const int32_t *tail, int tail_count)
{
    uint64_t s, word = 0;
    memcpy(&s, name->b, 8);
    for (int i = 0; i < tail_count; i++) s = s * 31 + (uint64_t)(uint32_t)tail[i];
    s ^= (uint64_t)(tail_count + 1) << 40;
    for (size_t i = 0; i < n; i++) {
        if (i % 8 == 0) word = dm_splitmix64(&s);
        p[i] = (uint8_t)(word >> (i % 8 * 8));
    }
}

static inline int kt_put_block(dm_kv *kv, const int32_t *ids, int64_t i, dm_err *e)
{
    uint8_t bytes[KT_BLOCK_BYTES];
    dm_hash h;
    kt_chain(&h, ids, i + 1);
    kt_fill(bytes, sizeof bytes, &h, NULL, -1);
    return dm_kv_put_block(kv, &h, bytes, sizeof bytes, e);
}

/* State at position pos of the sequence, n bytes. */
static inline int kt_put_state(dm_kv *kv, const int32_t *ids, int64_t pos, size_t n, dm_err *e)
{
    dm_hash last;
    kt_chain(&last, ids, pos / DM_KV_BLOCK);
    const int32_t *tail = ids + pos / DM_KV_BLOCK * DM_KV_BLOCK;
    int tail_count = (int)(pos % DM_KV_BLOCK);
    uint8_t *bytes = malloc(n ? n : 1);
    kt_fill(bytes, n, &last, tail, tail_count);
    int rc = dm_kv_put_state(kv, &last, tail, tail_count, bytes, n, e);
    free(bytes);
    return rc;
}

/* All whole blocks of pos tokens and the state there. */
static inline void kt_put(dm_kv *kv, const int32_t *ids, int64_t pos, size_t state_bytes)
{
    dm_err e;
    for (int64_t i = 0; i < pos / DM_KV_BLOCK; i++) assert_ok_e(kt_put_block(kv, ids, i, &e), e);
    assert_ok_e(kt_put_state(kv, ids, pos, state_bytes, &e), e);
}

static inline void kt_flush(dm_kv *kv)
{
    dm_err e;
    assert_ok_e(dm_kv_flush(kv, 60000, &e), e);
}

/* 1: block i is right; 0: a miss.  Wrong bytes fail the test. */
static inline int kt_read_block(dm_kv *kv, const dm_kv_hit *hit, const int32_t *ids, int64_t i, dm_kv_tier *tier)
{
    uint8_t got[KT_BLOCK_BYTES], want[KT_BLOCK_BYTES];
    dm_hash h;
    dm_err e;
    int rc = dm_kv_read_block(kv, hit, i, got, tier, &e);
    if (rc == DM_EMISS) return 0;
    assert_ok_e(rc, e);
    kt_chain(&h, ids, i + 1);
    kt_fill(want, sizeof want, &h, NULL, -1);
    assert_memory_equal(got, want, sizeof got);
    return 1;
}

static inline int kt_read_state(dm_kv *kv, const dm_kv_hit *hit, const int32_t *ids, dm_kv_tier *tier)
{
    dm_buf got = { 0 };
    dm_err e;
    int rc = dm_kv_read_state(kv, hit, &got, tier, &e);
    if (rc == DM_EMISS) {
        dm_buf_free(&got);
        return 0;
    }
    assert_ok_e(rc, e);
    assert_int_equal(got.n, hit->state_bytes);
    dm_hash last;
    kt_chain(&last, ids, hit->pos / DM_KV_BLOCK);
    uint8_t *want = malloc(got.n ? got.n : 1);
    kt_fill(want, got.n, &last, ids + hit->blocks * DM_KV_BLOCK, (int)(hit->pos % DM_KV_BLOCK));
    if (got.n) assert_memory_equal(got.p, want, got.n);
    free(want);
    dm_buf_free(&got);
    return 1;
}

/* Finds and reads all; returns the position whose every part came back right, 0 if something was a miss. */
static inline int64_t kt_restore(dm_kv *kv, const int32_t *ids, int64_t n, int64_t limit)
{
    dm_kv_hit hit;
    dm_err e;
    assert_ok_e(dm_kv_find(kv, ids, n, limit, &hit, &e), e);
    int64_t pos = hit.pos;
    bool whole = true;
    for (int64_t i = 0; i < hit.blocks && whole; i++) whole = kt_read_block(kv, &hit, ids, i, NULL) == 1;
    if (hit.pos && whole) whole = kt_read_state(kv, &hit, ids, NULL) == 1;
    dm_kv_hit_end(kv, &hit);
    return whole ? pos : 0;
}

static inline int64_t kt_found(dm_kv *kv, const int32_t *ids, int64_t n)
{
    dm_kv_hit hit;
    dm_err e;
    assert_ok_e(dm_kv_find(kv, ids, n, n, &hit, &e), e);
    int64_t pos = hit.pos;
    dm_kv_hit_end(kv, &hit);
    return pos;
}

/* Blocks of the prompt that are there, with or without a state. */
static inline int64_t kt_blocks(dm_kv *kv, const int32_t *ids, int64_t n)
{
    dm_kv_hit hit;
    dm_err e;
    assert_ok_e(dm_kv_find(kv, ids, n, n, &hit, &e), e);
    int64_t blocks = hit.blocks_present;
    dm_kv_hit_end(kv, &hit);
    return blocks;
}

static inline dm_kv_stat kt_stat(dm_kv *kv)
{
    dm_kv_stat st;
    dm_kv_stat_get(kv, &st);
    return st;
}

/* Everything on disk is whole. */
static inline void kt_verify(dm_kv *kv)
{
    dm_kv_check c;
    dm_err e;
    assert_ok_e(dm_kv_verify(kv, &c, NULL, NULL, &e), e);
    if (c.bad) fail_msg("verify: %lld bad, first: %s", (long long)c.bad, c.first_bad);
}

/* The file of payloads. */
static inline const char *kt_slots_file(const char *dir)
{
    static char buf[4][1100];
    static int k;
    k = (k + 1) & 3;
    snprintf(buf[k], sizeof buf[k], "%s/slots.dat", dir);
    return buf[k];
}

/* What du says; -1: there is no store. */
static inline int64_t kt_file_du(const char *dir)
{
    struct stat st;
    if (stat(kt_data_file(dir), &st) != 0) return -1;
    int64_t bytes = st.st_blocks * 512;
    return stat(kt_slots_file(dir), &st) == 0 ? bytes + st.st_blocks * 512 : bytes;
}

/* The same, with data.mdb as long as it says it is. */
static inline int64_t kt_file_bytes(const char *dir)
{
    struct stat st;
    if (stat(kt_data_file(dir), &st) != 0) return -1;
    int64_t bytes = st.st_size;
    return stat(kt_slots_file(dir), &st) == 0 ? bytes + st.st_blocks * 512 : bytes;
}

#endif
