/* Far positions, up to 1,048,576: angles, best entries, rings after many turns, and a sequence that stands there.
 *
 * Nobody waits for a million tokens here.  Blocks are only bytes, and a state says at which position it stands, so a sequence
 * is put at a far position from copies of real blocks and a state whose position was rewritten.  What it computes from there on
 * is compared, byte for byte on the exact path, with scalar arithmetic on the rows that a trace shows. */
#include "tests/lib/engine_files.h"

#include <math.h>

#include "engine/forward_int.h"

#define FAR 1048576
#define STEP 160 /* rows run at the far place: the last one's window is all theirs */

/* ---- angles and selection by themselves ----------------------------------------------------------------- */

static void angles_are_the_float_product_up_to_the_end(void **s)
{
    (void)s;
    static const struct { int64_t t; int pair; double cosine, sine; } known[] = { /* the spec's figures, seven digits */
        {1000000, 1, 0.6446286, -0.7644959}, {1000000, 16, -0.8594023, -0.5113}};
    static const int64_t at[] = {0, 1, 65535, 65536, 131071, 524287, 999999, 1000000, FAR - 1, FAR};
    float f[2][32], c[32], n[32];
    dm_rope_freqs(f[0], 10000, NULL);
    dm_rope_freqs(f[1], 160000, &(kern_yarn){.factor = 16, .beta_fast = 32, .beta_slow = 1, .original_max = 65536});
    int visible = 0;
    for (int table = 0; table < 2; table++)
        for (size_t i = 0; i < DM_COUNT(at); i++) {
            dm_rope_angles(f[table], at[i], c, n);
            for (int p = 0; p < 32; p++) {
                double exact = (double)at[i] * (double)f[table][p]; /* fits: 21 bits times 24 */
                float angle = (float)exact;
                assert_true(c[p] == (float)cos((double)angle) && n[p] == (float)sin((double)angle));
                visible += fabs(cos(exact) - (double)c[p]) > 1e-3; /* the product's rounding is no small thing out there */
            }
        }
    assert_true(visible > 5);
    for (size_t i = 0; i < DM_COUNT(known); i++) {
        dm_rope_angles(f[1], known[i].t, c, n);
        assert_true(fabs((double)c[known[i].pair] - known[i].cosine) < 1e-6 && fabs((double)n[known[i].pair] - known[i].sine) < 1e-4);
    }
}

static const float *by_score;
static int best_first(const void *a, const void *b)
{
    int32_t i = *(const int32_t *)a, j = *(const int32_t *)b;
    if (by_score[i] != by_score[j]) return by_score[i] > by_score[j] ? -1 : 1;
    return i < j ? -1 : 1;
}
static int by_number(const void *a, const void *b) { return *(const int32_t *)a - *(const int32_t *)b; }

/* The k best by sorting, ascending. */
static int32_t *best_of(const float *score, int64_t n, int k)
{
    int32_t *id = malloc((size_t)n * sizeof *id);
    for (int32_t i = 0; i < n; i++) id[i] = i;
    by_score = score;
    qsort(id, (size_t)n, sizeof *id, best_first);
    qsort(id, (size_t)k, sizeof *id, by_number);
    return id;
}

static void the_best_of_all_entries_of_a_long_context(void **s)
{
    (void)s;
    enum { N = FAR / 4 };
    static const int ks[] = {1, 512, 1024};
    float *score = malloc(N * sizeof *score);
    int32_t *sel = malloc(1024 * sizeof *sel);
    uint64_t rng = test_seed();
    for (int kind = 0; kind < 4; kind++) {
        for (int i = 0; i < N; i++) {
            double u = (double)(dm_splitmix64(&rng) >> 11) * 0x1p-53;
            score[i] = dm_bf16_round((float)(kind == 0 ? u - 0.5 : kind == 1 ? -u * 1e-3 : kind == 2 ? floor(4 * u) : u < 0.999 ? (u < 0.5 ? 0.0 : -0.0) : u));
        }
        for (size_t k = 0; k < DM_COUNT(ks); k++) {
            int32_t *want = best_of(score, N, ks[k]);
            for (const char *const *isa = dm_forward_isas(); *isa; isa++) {
                float margin = -1;
                dm_kernels_get(*isa)->topk(&(kern_topk){.score = score, .n = N, .k = ks[k], .sel = sel, .margin = &margin});
                assert_memory_equal(sel, want, (size_t)ks[k] * sizeof *sel);
                assert_true(margin >= 0);
            }
            dm_kernels_exact()->topk(&(kern_topk){.score = score, .n = N, .k = ks[k], .sel = sel});
            assert_memory_equal(sel, want, (size_t)ks[k] * sizeof *sel);
            free(want);
        }
    }
    free(score), free(sel);
}

/* ---- a small model that can stand anywhere ------------------------------------------------------------------ */

static const char *small_model(void)
{
    static const struct { const char *key; int value; } set[] = {
        {"hidden_size", 128}, {"num_attention_heads", 2}, {"o_groups", 1}, {"o_lora_rank", 128}, {"q_lora_rank", 128}, {"index_n_heads", 1}, {"index_topk", 48},
        {"moe_intermediate_size", 128}, {"n_routed_experts", 4}, {"num_experts_per_tok", 2}, {"num_hidden_layers", 2}, {"num_hash_layers", 1}, {"vocab_size", 256},
        {"num_nextn_predict_layers", 0}};
    static char dir[512];
    dm_err e;
    if (dir[0]) return dir;
    snprintf(dir, sizeof dir, "%s", scratch("small"));
    json_t *o = json_load_file(test_data("vectors/tiny2.config.json"), 0, NULL);
    for (size_t i = 0; i < DM_COUNT(set); i++) json_object_set_new(o, set[i].key, json_integer(set[i].value));
    json_object_set_new(o, "compress_ratios", json_pack("[i,i]", 4, 128));
    json_dump_file(o, scratch("small.json"), JSON_INDENT(1));
    json_decref(o);
    assert_ok_e(dm_model_synth(scratch("small.json"), dir, 7, 0, NULL, NULL, &e), e);
    return dir;
}

/* ---- what the trace shows of the rows at the far place --------------------------------------------------------- */

typedef struct far_rows {
    int64_t at;                                   /* position of row 0 */
    float x[2][STEP][128], k4[STEP][1024], s4[STEP][1024];
    float q[2][1024], o[2][1024];                 /* of the last row */
    uint8_t kv[2][STEP][584], ent[2][STEP][584], key[STEP][68]; /* entries by number − at / ratio */
    float iq[128], iw[1], *score;                 /* of the last row */
    int32_t sel[64];
    size_t scores, selected;
} far_rows;

static void see(void *ctx, forward_tag tag, int layer, int64_t pos, const void *data, size_t n)
{
    far_rows *r = ctx;
    int64_t i = pos - r->at;
    if (layer < 0 || layer > 1) return;
    if (tag == FT_ENT || tag == FT_INDEX_ENT) {
        i = pos - r->at / (layer ? 128 : 4);
        if (tag == FT_ENT) memcpy(r->ent[layer][i], data, 584);
        else memcpy(r->key[i], data, 68);
        return;
    }
    switch (tag) {
    case FT_ATTN_X: memcpy(r->x[layer][i], data, n); break;
    case FT_ATTN_KV: memcpy(r->kv[layer][i], data, n); break;
    case FT_COMP_K: if (layer == 0) memcpy(r->k4[i], data, n); break;
    case FT_COMP_S: if (layer == 0) memcpy(r->s4[i], data, n); break;
    default: break;
    }
    if (i != STEP - 1) return;
    switch (tag) {
    case FT_ATTN_Q: memcpy(r->q[layer], data, n); break;
    case FT_ATTN_O: memcpy(r->o[layer], data, n); break;
    case FT_INDEX_Q: memcpy(r->iq, data, n); break;
    case FT_INDEX_W: memcpy(r->iw, data, n); break;
    case FT_INDEX_SCORE: r->score = malloc(n), memcpy(r->score, data, n), r->scores = n / 4; break;
    case FT_INDEX_SEL: memcpy(r->sel, data, n), r->selected = n / 4; break;
    default: break;
    }
}

/* ---- scalar arithmetic -------------------------------------------------------------------------------------------- */

static double bf16(double x) { return (double)dm_bf16_round((float)x); }
static double bf16_of(uint16_t h)
{
    uint32_t u = (uint32_t)h << 16;
    float x;
    memcpy(&x, &u, 4);
    return (double)x;
}

static void rms_norm(double *x, int n, const uint16_t *w)
{
    double sum = 0;
    for (int i = 0; i < n; i++) sum += x[i] * x[i];
    double r = 1 / sqrt(sum / n + 1e-6);
    for (int i = 0; i < n; i++) x[i] = bf16(x[i] * r * bf16_of(w[i]));
}
static void rotate(double *x, int64_t t, bool back)
{
    float f[32];
    dm_rope_freqs(f, 160000, &(kern_yarn){.factor = 16, .beta_fast = 32, .beta_slow = 1, .original_max = 65536});
    for (int p = 0; p < 32; p++) {
        float angle = (float)((double)t * (double)f[p]);
        double c = (double)(float)cos((double)angle), s = (double)(float)sin((double)angle), a = x[448 + 2 * p], b = x[449 + 2 * p];
        if (back) s = -s;
        x[448 + 2 * p] = bf16(a * c - b * s), x[449 + 2 * p] = bf16(a * s + b * c);
    }
}
static void pack(const double *x, uint8_t out[584])
{
    memset(out, 0, 584);
    for (int b = 0; b < 7; b++) {
        double top = 0;
        for (int i = 0; i < 64; i++) top = fmax(top, fabs(x[64 * b + i]));
        int e = dm_fp8_scale_exp((float)top);
        for (int i = 0; i < 64; i++) out[64 * b + i] = dm_e4m3_code((float)ldexp(x[64 * b + i], -e));
        out[576 + b] = (uint8_t)(e + 127);
    }
    for (int i = 0; i < 64; i++) {
        float v = (float)x[448 + i];
        uint32_t u;
        memcpy(&u, &v, 4);
        out[448 + 2 * i] = (uint8_t)(u >> 16), out[449 + 2 * i] = (uint8_t)(u >> 24);
    }
}
static void unpack(const uint8_t *row, double *x)
{
    for (int i = 0; i < 448; i++) x[i] = ldexp((double)dm_e4m3_value(row[i]), row[576 + i / 64] - 127);
    for (int i = 0; i < 64; i++) x[448 + i] = bf16_of((uint16_t)(row[448 + 2 * i] | row[449 + 2 * i] << 8));
}

/* The window row of x at position t. */
static void window_row(const model_block *b, const float *x, int64_t t, uint8_t out[584])
{
    double in[128], y[512];
    for (int k = 0; k < 128; k++) in[k] = (double)x[k];
    double top = 0;
    for (int k = 0; k < 128; k++) top = fmax(top, fabs(in[k]));
    int e = dm_fp8_scale_exp((float)top);
    for (int k = 0; k < 128; k++) in[k] = ldexp((double)dm_e4m3_value(dm_e4m3_code((float)ldexp(in[k], -e))), e);
    for (int o = 0; o < 512; o++) {
        double sum = 0;
        for (int k = 0; k < 128; k++) sum += (double)dm_e4m3_value(b->wkv.w[o * 128 + k]) * ldexp(1, b->wkv.scale[o / 128] - 127) * in[k];
        y[o] = bf16(sum);
    }
    rms_norm(y, 512, b->kv_norm);
    rotate(y, t, false);
    pack(y, out);
}

/* Entry j of the c4 layer from the K and S rows of its eight tokens. */
static void entry_row(const model_block *b, const far_rows *r, int64_t j, uint8_t out[584])
{
    double y[512];
    for (int c = 0; c < 512; c++) {
        double max = -INFINITY, sum = 0, weighted = 0;
        for (int pass = 0; pass < 2; pass++)
            for (int i = 0; i < 8; i++) {
                int64_t row = 4 * j - 4 + i - r->at;
                int at = i < 4 ? c : 512 + c; /* the window before with lane A, its own with lane B */
                double sc = (double)r->s4[row][at];
                if (pass == 0) max = fmax(max, sc);
                else sum += exp(sc - max), weighted += exp(sc - max) * (double)r->k4[row][at];
            }
        y[c] = bf16(weighted / sum);
    }
    rms_norm(y, 512, b->compressor.norm);
    rotate(y, 4 * j, false);
    pack(y, out);
}

/* The attention output of one head, inverse rotation included. */
static void attend(const float *q, const uint8_t *const *key, int keys, float sink, int64_t t, double *out)
{
    double *score = malloc(sizeof *score * (size_t)keys), max = -INFINITY, z = 0, k[512];
    const double scale = (double)(float)(1 / sqrt(512.0));
    for (int i = 0; i < keys; i++) {
        double dot = 0;
        unpack(key[i], k);
        for (int d = 0; d < 512; d++) dot += (double)q[d] * k[d];
        score[i] = dot * scale;
        max = fmax(max, score[i]);
    }
    memset(out, 0, 512 * sizeof *out);
    for (int i = 0; i < keys; i++) {
        double p = exp(score[i] - max), rounded = bf16(p);
        z += p;
        unpack(key[i], k);
        for (int d = 0; d < 512; d++) out[d] += rounded * k[d];
    }
    z += exp((double)sink - max);
    for (int d = 0; d < 512; d++) out[d] = bf16(out[d] / z);
    rotate(out, t, true);
    free(score);
}

/* ---- at the far place ----------------------------------------------------------------------------------------------- */

/* Moves a state of a multiple of 256 to another one (seq_state.c has the layout). */
static void move_state(dm_buf *b, int64_t to)
{
    uint8_t both[80], payload[16];
    uint64_t pos = (uint64_t)to;
    memcpy(b->p + 16, &pos, 8);
    dm_xxh3_128(payload, b->p + 80, b->n - 80);
    memcpy(both, b->p, 64);
    memcpy(both + 64, payload, 16);
    dm_xxh3_128(b->p + 64, both, 80);
}

#define NEAR_BLOCKS 4
#define BLOCK0_ENTRY 0                  /* layer 0: 64 entries, 64 keys; layer 1: 2 entries */
#define BLOCK0_KEY (64 * 584)
#define BLOCK1_ENTRY (64 * 584 + 64 * 68)

typedef struct place {
    dm_forward *f;
    dm_fseq *s;
    uint8_t *block[NEAR_BLOCKS]; /* block i of the far sequence is a copy of block[i % NEAR_BLOCKS] */
} place;

static void go_far(place *p, const dm_model *m, dm_numerics numerics, const char *isa, int64_t at)
{
    dm_err e;
    dm_fseq *near_seq;
    int32_t ids[NEAR_BLOCKS * 256];
    dm_buf state = {0};
    assert_ok_e(dm_synth_tokens(ids, NEAR_BLOCKS * 256, 3, 256, &e), e);
    assert_ok_e(dm_forward_create(&p->f, m, &(dm_forward_opts){.numerics = numerics, .isa = isa, .threads = 2, .rows_max = 256}, &e), e);
    assert_int_equal(p->f->ctx_tokens_max, FAR);
    assert_int_equal(p->f->block_bytes, BLOCK1_ENTRY + 2 * 584);
    assert_ok_e(p->f->ops->seq_create(p->f, &near_seq, &e), e);
    for (int i = 0; i < NEAR_BLOCKS; i++) assert_ok_e(p->f->ops->step(p->f, &(dm_run){near_seq, ids + 256 * i, 256, NULL}, 1, &e), e);
    assert_ok_e(p->f->ops->state_save(p->f, near_seq, &state, &e), e);
    for (int i = 0; i < NEAR_BLOCKS; i++) {
        const void *bytes;
        assert_ok_e(p->f->ops->block(p->f, near_seq, i, &bytes, &e), e);
        p->block[i] = malloc(p->f->block_bytes);
        memcpy(p->block[i], bytes, p->f->block_bytes);
    }
    p->f->ops->seq_destroy(p->f, near_seq);
    move_state(&state, at);
    assert_ok_e(p->f->ops->seq_create(p->f, &p->s, &e), e);
    for (int64_t i = 0; i < at / 256; i++) assert_ok_e(p->f->ops->block_load(p->f, p->s, i, p->block[i % NEAR_BLOCKS], &e), e);
    assert_ok_e(p->f->ops->state_load(p->f, p->s, state.p, state.n, &e), e);
    assert_int_equal(p->f->ops->seq_pos(p->s), at);
    dm_buf_free(&state);
}
static void come_back(place *p)
{
    p->f->ops->seq_destroy(p->f, p->s);
    dm_forward_destroy(p->f);
    for (int i = 0; i < NEAR_BLOCKS; i++) free(p->block[i]);
}

static const uint8_t *entry_at(const place *p, const far_rows *r, int layer, int64_t j)
{
    int per = layer ? 2 : 64;
    int64_t block = j / per;
    if (block * 256 >= r->at) return r->ent[layer][j - r->at / (layer ? 128 : 4)];
    return p->block[block % NEAR_BLOCKS] + (layer ? BLOCK1_ENTRY : BLOCK0_ENTRY) + j % per * 584;
}
static const uint8_t *key_at(const place *p, const far_rows *r, int64_t j)
{
    int64_t block = j / 64;
    return block * 256 >= r->at ? r->key[j - r->at / 4] : p->block[block % NEAR_BLOCKS] + BLOCK0_KEY + j % 64 * 68;
}

/* The score of entry j for the last row, rounded as the exact path does. */
static float score_of(const far_rows *r, const uint8_t *key)
{
    double dot = 0;
    for (int d = 0; d < 128; d++) dot += (double)r->iq[d] * ldexp((double)dm_e2m1_value(key[d / 2] >> (d & 1) * 4 & 15), key[64 + d / 32] - 127);
    return (float)bf16(fmax(bf16(dot), 0) * (double)r->iw[0]);
}

/* How far attention is off in one layer: rms error / rms, and how many elements are not equal. */
static double attention_error(const place *p, const far_rows *r, const dm_model *m, int layer, int *unequal)
{
    int64_t t = r->at + STEP - 1, entries = (t + 1) / (layer ? 128 : 4);
    int n = 0, chosen = layer ? (int)entries : (int)r->selected;
    const uint8_t **key = malloc(sizeof *key * (size_t)(128 + chosen));
    for (int i = STEP - 128; i < STEP; i++) key[n++] = r->kv[layer][i];
    for (int i = 0; i < chosen; i++) key[n++] = entry_at(p, r, layer, layer ? i : r->sel[i]);
    double err = 0, ref = 0, o[512];
    for (int h = 0; h < 2; h++) {
        attend(r->q[layer] + 512 * h, key, n, model_weights_of(m)->layer[layer].attn_sink[h], t, o);
        for (int d = 0; d < 512; d++) {
            double e = o[d] - (double)r->o[layer][512 * h + d];
            *unequal += e != 0;
            err += e * e, ref += o[d] * o[d];
        }
    }
    free(key);
    return sqrt(err / ref);
}

static void a_sequence_far_out_computes_what_arithmetic_says(void **s)
{
    (void)s;
    static const int64_t at[] = {65536, FAR - 256}; /* where YaRN's original context ends; the last block there is */
    dm_model *m;
    dm_err e;
    far_rows *r = calloc(1, sizeof *r);
    float *logits = malloc(256 * sizeof *logits);
    int32_t ids[256];
    assert_ok_e(dm_model_open(&m, small_model(), &e), e);
    assert_ok_e(dm_synth_tokens(ids, 256, 11, 256, &e), e);
    for (size_t a = 0; a < DM_COUNT(at); a++)
        for (int path = 0; path < 2; path++) {
            place p;
            bool exact = path == 0;
            memset(r, 0, sizeof *r);
            r->at = at[a];
            go_far(&p, m, exact ? DM_NUM_EXACT : DM_NUM_FAST, NULL, at[a]);
            forward_trace trace = {.ctx = r, .row = see};
            forward_set_trace(p.f, &trace);
            assert_ok_e(p.f->ops->step(p.f, &(dm_run){p.s, ids, STEP, logits}, 1, &e), e);
            forward_set_trace(p.f, NULL);
            uint8_t want[584];
            int rows = 0, same = 0;
            for (int i = 0; i < STEP; i += 7)
                for (int l = 0; l < 2; l++, rows++) {
                    window_row(&model_weights_of(m)->layer[l], r->x[l][i], at[a] + i, want);
                    same += memcmp(want, r->kv[l][i], 584) == 0;
                }
            for (int64_t j = at[a] / 4 + 1; j < (at[a] + STEP) / 4; j += 3, rows++) {
                entry_row(&model_weights_of(m)->layer[0], r, j, want);
                same += memcmp(want, r->ent[0][j - at[a] / 4], 584) == 0;
            }
            if (exact) assert_int_equal(same, rows);
            else assert_true(same * 100 >= rows * 90);
            /* every entry that there is was scored, and the best were taken */
            int64_t n = (at[a] + STEP) / 4;
            assert_int_equal(r->scores, n);
            for (int64_t j = 0; j < n; j += j < n - 100 ? 37 : 1) {
                float want_score = score_of(r, key_at(&p, r, j));
                if (exact ? want_score != r->score[j] : fabsf(want_score - r->score[j]) > 0.02f * fabsf(want_score) + 1e-3f)
                    fail_msg("score of entry %lld at %lld: %g, not %g", (long long)j, (long long)at[a], (double)r->score[j], (double)want_score);
            }
            int32_t *best = best_of(r->score, n, 48);
            assert_int_equal(r->selected, 48);
            assert_memory_equal(best, r->sel, 48 * sizeof *best);
            free(best);
            for (int l = 0; l < 2; l++) {
                int unequal = 0;
                double error = attention_error(&p, r, m, l, &unequal);
                printf("# %s at %lld, layer %d: rows %d of %d equal, attention off by %.2g, %d of 1024 elements\n", p.f->numerics_id, (long long)at[a], l, same, rows, error, unequal);
                if (exact) assert_true(unequal <= 2); /* sums in another order may round otherwise */
                else assert_true(error <= 0.012);
            }
            /* the rest of the context, and not a token more */
            if (at[a] == FAR - 256) {
                assert_ok_e(p.f->ops->step(p.f, &(dm_run){p.s, ids + STEP, 256 - STEP, logits}, 1, &e), e);
                for (int i = 0; i < 256; i++) assert_true(isfinite(logits[i]));
                assert_err(DM_ECONTEXT, p.f->ops->step(p.f, &(dm_run){p.s, ids, 1, logits}, 1, &e));
            }
            free(r->score);
            come_back(&p);
        }
    free(r), free(logits);
    dm_model_close(m);
}

/* C1 far out: rows one by one, in chunks and after a cut give the same bytes. */
static void far_out_chunks_and_cuts_give_the_same_bytes(void **s)
{
    (void)s;
    enum { N = 48 };
    static const int chunks[] = {N, 1, 11};
    dm_model *m;
    dm_err e;
    int32_t ids[N];
    float first[256], logits[256];
    assert_ok_e(dm_model_open(&m, small_model(), &e), e);
    assert_ok_e(dm_synth_tokens(ids, N, 12, 256, &e), e);
    for (size_t c = 0; c < DM_COUNT(chunks); c++) {
        place p;
        go_far(&p, m, DM_NUM_FAST, NULL, FAR - 512);
        for (int i = 0; i < N; i += chunks[c]) {
            int n = N - i < chunks[c] ? N - i : chunks[c];
            assert_ok_e(p.f->ops->step(p.f, &(dm_run){p.s, ids + i, n, c ? logits : first}, 1, &e), e);
        }
        if (c) assert_memory_equal(first, logits, sizeof first);
        come_back(&p);
    }
    dm_model_close(m);
}

/* ---- on the way there ---------------------------------------------------------------------------------------------------- */

/* Many turns of every ring: the state and the logits are those of a run in other chunks; memory grows by blocks and nothing else. */
static void memory_grows_by_blocks_only(void **s)
{
    (void)s;
    int64_t n = test_full() ? 40960 : 6144;
    dm_model *m;
    dm_err e;
    int32_t *ids = malloc((size_t)n * sizeof *ids);
    float logits[2][256];
    dm_buf state[2] = {{0}, {0}};
    assert_ok_e(dm_model_open(&m, small_model(), &e), e);
    assert_ok_e(dm_synth_tokens(ids, n, 13, 256, &e), e);
    for (int k = 0; k < 2; k++) {
        dm_forward *f;
        dm_fseq *q;
        int chunk = k ? 177 : 256;
        assert_ok_e(dm_forward_create(&f, m, &(dm_forward_opts){.threads = 2, .rows_max = 256}, &e), e);
        assert_ok_e(f->ops->seq_create(f, &q, &e), e);
        assert_ok_e(f->ops->step(f, &(dm_run){q, ids, 1, logits[k]}, 1, &e), e); /* logits of the sequence are there from now on */
        int64_t allocations = dm_fault_alloc_count(), tables = 0, cap = q->blocks_cap, blocks = q->blocks;
        for (int64_t at = 1; at < n; at += chunk) {
            int rows = (int)(n - at < chunk ? n - at : chunk);
            assert_ok_e(f->ops->step(f, &(dm_run){q, ids + at, rows, logits[k]}, 1, &e), e);
            if (q->blocks_cap != cap) cap = q->blocks_cap, tables++;
            assert_int_equal(q->blocks, (at + rows + 255) / 256);
            assert_int_equal(pool_bytes(fwd_of(f)->pool), q->blocks * (int64_t)f->block_bytes);
        }
        assert_int_equal(dm_fault_alloc_count() - allocations, q->blocks - blocks + tables);
        assert_ok_e(f->ops->state_save(f, q, &state[k], &e), e);
        f->ops->seq_destroy(f, q);
        assert_int_equal(pool_bytes(fwd_of(f)->pool), 0);
        dm_forward_destroy(f);
    }
    assert_memory_equal(logits[0], logits[1], sizeof logits[0]);
    assert_int_equal(state[0].n, state[1].n);
    assert_memory_equal(state[0].p, state[1].p, state[0].n);
    dm_buf_free(&state[0]), dm_buf_free(&state[1]);
    free(ids);
    dm_model_close(m);
}

/* More long runs in a step than get their keys widened: those that do without have the same bytes. */
static void many_long_runs_in_one_step_are_as_good_as_alone(void **s)
{
    (void)s;
    enum { RUNS = FWD_WIDEN_RUNS + 5, ROWS = 20, BEFORE = 150 };
    dm_model *m;
    dm_forward *f;
    dm_err e;
    dm_fseq *a[RUNS], *b[RUNS];
    dm_run run[RUNS];
    static int32_t ids[RUNS][BEFORE + ROWS];
    static float together[RUNS][256], alone[256];
    assert_ok_e(dm_model_open(&m, small_model(), &e), e);
    assert_ok_e(dm_forward_create(&f, m, &(dm_forward_opts){.threads = 2, .rows_max = RUNS * ROWS}, &e), e);
    for (int i = 0; i < RUNS; i++) {
        assert_ok_e(dm_synth_tokens(ids[i], BEFORE + ROWS, 20 + (uint64_t)i, 256, &e), e);
        assert_ok_e(f->ops->seq_create(f, &a[i], &e), e);
        assert_ok_e(f->ops->seq_create(f, &b[i], &e), e);
        assert_ok_e(f->ops->step(f, &(dm_run){a[i], ids[i], BEFORE, NULL}, 1, &e), e);
        assert_ok_e(f->ops->step(f, &(dm_run){b[i], ids[i], BEFORE, NULL}, 1, &e), e);
        run[i] = (dm_run){a[i], ids[i] + BEFORE, ROWS, together[i]};
    }
    assert_ok_e(f->ops->step(f, run, RUNS, &e), e);
    for (int i = 0; i < RUNS; i++) {
        assert_ok_e(f->ops->step(f, &(dm_run){b[i], ids[i] + BEFORE, ROWS, alone}, 1, &e), e);
        assert_memory_equal(together[i], alone, sizeof alone);
        f->ops->seq_destroy(f, a[i]);
        f->ops->seq_destroy(f, b[i]);
    }
    dm_forward_destroy(f);
    dm_model_close(m);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(angles_are_the_float_product_up_to_the_end),
        cmocka_unit_test(the_best_of_all_entries_of_a_long_context),
        cmocka_unit_test(a_sequence_far_out_computes_what_arithmetic_says),
        cmocka_unit_test(far_out_chunks_and_cuts_give_the_same_bytes),
        cmocka_unit_test(memory_grows_by_blocks_only),
        cmocka_unit_test(many_long_runs_in_one_step_are_as_good_as_alone),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
