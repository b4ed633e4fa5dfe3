/* seq_state.c — the state at a position P: what is needed beyond whole blocks to go on.
 *
 *   offset  size  content
 *        0     8  magic "DMSTATE\n"
 *        8     4  version (1)
 *       12     4  flags: bit 0, logits follow
 *       16     8  P
 *       24    16  XXH3-128 of the numerics id
 *       40    16  XXH3-128 of the geometry (see below)
 *       56     8  bytes behind the header
 *       64    16  XXH3-128 of: header bytes 0…63, XXH3-128 of the bytes behind the header
 *       80        window rows max(0, P−127) … P−1, layer by layer
 *                 accumulators of all compressors, as in memory
 *                 layer by layer: entries, then index keys, of the unfinished block
 *                 with bit 0: logits, f32 [V]
 *
 * Numbers are little-endian, and so are the machines that this runs on (accumulators are copied as they are).
 * A load checks everything before it writes anything, so a refused state leaves the sequence as it was. */
#include <string.h>

#include "engine/forward_int.h"

#define MAGIC "DMSTATE\n"
#define VERSION 1u
#define HEADER 80
#define CHECKED 64
#define HAS_LOGITS 1u

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "states are written in memory order");

typedef struct header {
    char magic[8];
    uint32_t version, flags;
    uint64_t pos;
    uint8_t numerics[16], geometry[16];
    uint64_t payload;
    uint8_t check[16];
} header;
_Static_assert(sizeof(header) == HEADER, "no padding in a state header");

/* All that decides the meaning of the bytes. */
static void geometry_hash(const fwd *f, uint8_t out[16]) {
    int32_t g[DM_LAYERS_MAX + 16] = {f->layers, f->c->hidden_size, f->c->vocab_size, (int32_t)f->row_bytes, (int32_t)f->key_bytes,
                                     f->k->real_bytes, FWD_WINDOW, DM_BLOCK_TOKENS};
    for (int l = 0; l < f->layers; l++) g[8 + l] = f->layer[l].ratio;
    dm_xxh3_128(out, g, (size_t)(8 + f->layers) * sizeof *g);
}

static void check_hash(const header *h, const uint8_t *payload, size_t n, uint8_t out[16]) {
    uint8_t both[CHECKED + 16];
    memcpy(both, h, CHECKED);
    dm_xxh3_128(both + CHECKED, payload, n);
    dm_xxh3_128(out, both, sizeof both);
}

static int64_t window_rows(int64_t pos) { return pos < FWD_WINDOW - 1 ? pos : FWD_WINDOW - 1; }
static int64_t tail_entries(const fwd_layer *l, int64_t pos) { return l->ratio ? pos % DM_BLOCK_TOKENS / l->ratio : 0; }

static size_t payload_bytes(const fwd *f, int64_t pos, bool logits) {
    size_t n = (size_t)f->layers * (size_t)window_rows(pos) * f->row_bytes + f->fold_bytes;
    for (int l = 0; l < f->layers; l++)
        n += (size_t)tail_entries(&f->layer[l], pos) * (f->row_bytes + (f->layer[l].ratio == 4 ? f->key_bytes : 0));
    return n + (logits ? (size_t)f->base.vocab * sizeof(float) : 0);
}

/* The one walk over a payload, for saving (to: copies out of the sequence) and loading. */
typedef struct walk { uint8_t *at; bool save; } walk;
static void copy_part(walk *w, void *mem, size_t n) {
    if (n == 0) return;
    if (w->save) memcpy(w->at, mem, n);
    else memcpy(mem, w->at, n);
    w->at += n;
}
static void copy_payload(const dm_fseq *s, int64_t pos, bool logits, walk *w) {
    const fwd *f = s->f;
    for (int i = 0; i < f->layers; i++)
        for (int64_t t = pos - window_rows(pos); t < pos; t++) copy_part(w, seq_window_row(s, &f->layer[i], t), f->row_bytes);
    copy_part(w, s->fold, f->fold_bytes);
    for (int i = 0; i < f->layers; i++) {
        const fwd_layer *l = &f->layer[i];
        int64_t n = tail_entries(l, pos), j0 = pos / DM_BLOCK_TOKENS * l->per_block;
        if (!n) continue;
        copy_part(w, seq_entry(s, l, j0), (size_t)n * f->row_bytes);
        if (l->ratio == 4) copy_part(w, seq_key(s, l, j0), (size_t)n * f->key_bytes);
    }
    if (logits) copy_part(w, s->logits, (size_t)f->base.vocab * sizeof(float));
}

int seq_state_save(dm_forward *df, const dm_fseq *s, dm_buf *out, dm_err *e) {
    const fwd *f = fwd_of(df);
    if (s->loaded) return dm_err_set(e, DM_ESTATE, "forward.state_save", "the sequence has blocks but no state yet");
    header h = {.magic = MAGIC, .version = VERSION, .flags = s->has_logits ? HAS_LOGITS : 0, .pos = (uint64_t)s->pos};
    h.payload = payload_bytes(f, s->pos, s->has_logits);
    dm_xxh3_128(h.numerics, f->base.numerics_id, strlen(f->base.numerics_id));
    geometry_hash(f, h.geometry);
    int rc = dm_buf_reserve(out, HEADER + h.payload);
    if (rc < 0) return dm_err_set(e, rc, "forward.state_save", "out of memory for a state of %llu bytes", (unsigned long long)(HEADER + h.payload));
    uint8_t *to = out->p + out->n;
    walk w = {.at = to + HEADER, .save = true};
    copy_payload(s, s->pos, s->has_logits, &w);
    check_hash(&h, to + HEADER, h.payload, h.check);
    memcpy(to, &h, HEADER);
    out->n += HEADER + h.payload;
    if (out->n < out->cap) out->p[out->n] = 0;
    return 0;
}

/* Is this a whole state of this forward?  In the order in which the answers make sense to a person. */
static int check_state(const fwd *f, const dm_fseq *s, const header *h, const uint8_t *payload, size_t n, dm_err *e) {
    static const char where[] = "forward.state_load";
    uint8_t hash[16];
    if (memcmp(h->magic, MAGIC, sizeof h->magic) != 0) return dm_err_set(e, DM_EFORMAT, where, "this is not a saved state");
    if (h->version != VERSION) {
        int code = h->version > VERSION ? DM_EVERSION : DM_EFORMAT;
        return dm_err_set(e, code, where, "the state has format version %u; this program reads %u", h->version, VERSION);
    }
    if (h->payload != n)
        return dm_err_set(e, DM_EFORMAT, where, "the state is cut short or padded: %zu bytes instead of %llu", n, (unsigned long long)h->payload);
    check_hash(h, payload, n, hash);
    if (memcmp(hash, h->check, sizeof hash) != 0) return dm_err_set(e, DM_ECORRUPT, where, "the state's checksum does not match");
    dm_xxh3_128(hash, f->base.numerics_id, strlen(f->base.numerics_id));
    if (memcmp(hash, h->numerics, sizeof hash) != 0)
        return dm_err_set(e, DM_EFOREIGN, where, "the state was made with other numerics than %s", f->base.numerics_id);
    geometry_hash(f, hash);
    if (memcmp(hash, h->geometry, sizeof hash) != 0) return dm_err_set(e, DM_EFOREIGN, where, "the state belongs to a model of another shape");
    if (h->flags & ~HAS_LOGITS) return dm_err_set(e, DM_EFORMAT, where, "the state has unknown flags %#x", h->flags);
    if (h->pos > (uint64_t)f->base.ctx_tokens_max)
        return dm_err_set(e, DM_ECONTEXT, where, "the state is at position %llu, behind the context of %lld tokens", (unsigned long long)h->pos,
                          (long long)f->base.ctx_tokens_max);
    if (n != payload_bytes(f, (int64_t)h->pos, h->flags & HAS_LOGITS))
        return dm_err_set(e, DM_EFORMAT, where, "the state has the wrong size for its position");
    if (s->pos) return dm_err_set(e, DM_ESTATE, where, "a state can be loaded into a fresh sequence only");
    if (s->loaded != (int64_t)h->pos / DM_BLOCK_TOKENS)
        return dm_err_set(e, DM_ESTATE, where, "the state at position %llu needs %llu blocks; %lld are loaded", (unsigned long long)h->pos,
                          (unsigned long long)h->pos / DM_BLOCK_TOKENS, (long long)s->loaded);
    return 0;
}

int seq_state_load(dm_forward *df, dm_fseq *s, const void *bytes, size_t n, dm_err *e) {
    const fwd *f = fwd_of(df);
    header h;
    if (n < HEADER) return dm_err_set(e, DM_EFORMAT, "forward.state_load", "a state has at least %d bytes, this one %zu", HEADER, n);
    memcpy(&h, bytes, HEADER);
    uint8_t *payload = (uint8_t *)bytes + HEADER; /* only read */
    int rc = check_state(f, s, &h, payload, n - HEADER, e);
    bool logits = h.flags & HAS_LOGITS;
    if (rc == 0) rc = seq_reserve(s, (int64_t)h.pos, logits, e);
    if (rc < 0) return rc;
    walk w = {.at = payload};
    copy_payload(s, (int64_t)h.pos, logits, &w);
    s->pos = (int64_t)h.pos;
    s->has_logits = logits;
    s->loaded = 0;
    s->mtp_off = s->pos > 0;
    s->mtp_from = s->mtp_pos = s->firm = s->pos;
    return 0;
}
