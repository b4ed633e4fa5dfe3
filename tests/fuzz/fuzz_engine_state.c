/* Saved states, damaged: whatever the bytes are, loading them either is refused and leaves the sequence fresh, or gives a
 * sequence that saves the same bytes and can go on.
 *
 * Bytes of an input: which state (a cut of a short run), how (below), then the edits: offset (2 bytes, little endian; from
 * the end with LAST) and the byte that goes there. */
#include "engine/engine.h"
#include "tests/fuzz/lib.h"

enum {
    MEND = 1,    /* the checksum is put right: no mutation would guess it */
    BARE = 2,    /* the blocks in front of the state are not loaded */
    SHORT = 4,   /* cut: the first edit is the number of bytes taken off the end */
    LAST = 8,    /* offsets count from the end */
    LENGTH = 16, /* the header's length is put right */
};
enum { HEADER = 80, CHECKED = 64, LENGTH_AT = 56 }; /* of the format in seq_state.c */

static const int cuts[] = {0, 1, 5, 127, 131, 256, 259};
static dm_forward *forward;
static dm_buf states[DM_COUNT(cuts)], block;

static dm_fseq *fresh(bool with_block)
{
    dm_fseq *s;
    dm_err e = {0};
    FUZZ_OK(forward->ops->seq_create(forward, &s, &e));
    if (with_block) FUZZ_OK(forward->ops->block_load(forward, s, 0, block.p, &e));
    return s;
}

static int feed(dm_fseq *s, int n, float *logits)
{
    int32_t ids[512];
    dm_err e = {0};
    for (int i = 0; i < n; i++) ids[i] = i * i % 3 % 2;
    dm_run r = {.seq = s, .ids = ids, .n = n, .logits = logits};
    return forward->ops->step(forward, &r, 1, &e);
}

static void prepare(void)
{
    dm_err e = {0};
    dm_model *m;
    const void *bytes;
    char dir[512];
    snprintf(dir, sizeof dir, "%s/state", fuzz_dir());
    FUZZ_OK(dm_model_synth(fuzz_file(0, fuzz_config(3), strlen(fuzz_config(3)), 0), dir, 7, 0, NULL, NULL, &e));
    FUZZ_OK(dm_model_open(&m, dir, &e)); /* kept for good */
    FUZZ_OK(dm_forward_create(&forward, m, &(dm_forward_opts){.threads = 1, .rows_max = 512}, &e));
    for (size_t i = 0; i < DM_COUNT(cuts); i++) {
        dm_fseq *s = fresh(false);
        if (cuts[i]) FUZZ_OK(feed(s, cuts[i], NULL));
        FUZZ_OK(forward->ops->state_save(forward, s, &states[i], &e));
        if (cuts[i] >= DM_BLOCK_TOKENS && !block.n) {
            FUZZ_OK(forward->ops->block(forward, s, 0, &bytes, &e));
            FUZZ_OK(dm_buf_append(&block, bytes, forward->block_bytes));
        }
        forward->ops->seq_destroy(forward, s);
    }
}

static size_t edit(uint8_t *p, size_t n, fuzz_bytes in, uint8_t how)
{
    if (how & SHORT && in.n >= 2) {
        size_t off = fuzz_byte(&in);
        off |= (size_t)fuzz_byte(&in) << 8;
        n -= off < n ? off : n;
    }
    while (in.n >= 3 && n) {
        size_t at = fuzz_byte(&in);
        at |= (size_t)fuzz_byte(&in) << 8;
        at %= n;
        p[how & LAST ? n - 1 - at : at] = fuzz_byte(&in);
    }
    return n;
}

static void mend(uint8_t *p, size_t n, uint8_t how)
{
    uint8_t both[CHECKED + 16];
    if (n < HEADER) return;
    uint64_t length = n - HEADER;
    if (how & LENGTH) memcpy(p + LENGTH_AT, &length, sizeof length);
    if (!(how & MEND)) return;
    memcpy(both, p, CHECKED);
    dm_xxh3_128(both + CHECKED, p + HEADER, n - HEADER);
    dm_xxh3_128(p + CHECKED, both, sizeof both);
}

static void check_loaded(dm_fseq *s, const uint8_t *p, size_t n)
{
    dm_buf again = {0};
    dm_err e = {0};
    float logits[2];
    FUZZ_OK(forward->ops->state_save(forward, s, &again, &e));
    FUZZ_CHECK(again.n == n && memcmp(again.p, p, n) == 0);
    FUZZ_OK(feed(s, 3, logits));
    dm_buf_free(&again);
}

/* As if nothing had been tried: the good state goes in. */
static void check_refused(dm_fseq *s, size_t which, int rc, const dm_err *told)
{
    dm_err e = {0};
    fuzz_told(rc, told);
    if (forward->ops->state_load(forward, s, states[which].p, states[which].n, &e) < 0) FUZZ_FAIL("no longer fresh: %s", e.text);
}

int FUZZ_ENTRY(const uint8_t *data, size_t n)
{
    fuzz_bytes in = {data, n};
    dm_err e = {0};
    if (!forward) prepare();
    size_t which = fuzz_byte(&in) % DM_COUNT(cuts);
    uint8_t how = fuzz_byte(&in);
    bool with_block = cuts[which] >= DM_BLOCK_TOKENS && !(how & BARE);
    uint8_t *p = malloc(states[which].n);
    FUZZ_CHECK(p != NULL);
    memcpy(p, states[which].p, states[which].n);
    size_t len = edit(p, states[which].n, in, how);
    mend(p, len, how);
    dm_fseq *s = fresh(with_block);
    int rc = forward->ops->state_load(forward, s, p, len, &e);
    if (rc == 0) check_loaded(s, p, len);
    else if (with_block == (cuts[which] >= DM_BLOCK_TOKENS)) check_refused(s, which, rc, &e);
    else fuzz_told(rc, &e);
    forward->ops->seq_destroy(forward, s);
    free(p);
    return 0;
}
