/* linear_amx.h — y = W x on matrix tiles, for weights and activations that bf16 holds exactly.
 *
 * FP8, FP4 and bf16 weights and rounded activations are bf16 values, so their products are exact and only the order
 * of the float32 additions differs from linear.h.  That order is k, two at a time, whatever rows and outputs share a
 * tile: rows stay independent of their neighbours.
 *
 * Shapes (dwords are pairs of bf16 along k):
 *   A  16 outputs x 32 k   weights, widened into `work` tile by tile
 *   B  16 dwords  x 16 rows  activations, transposed in registers
 *   C  16 outputs x 16 rows  float32; four of them share one A
 * Schedule: 64 rows of x are packed once; then every 16 outputs are widened once for them.  Bound: widening and
 * packing when rows or outputs are few, tile multiplications (512 multiply-adds a cycle) when both are many. */
#ifndef KERN_LINEAR_AMX_H
#define KERN_LINEAR_AMX_H

#define AMX_ROWS 64   /* rows packed at once: four C tiles */
#define AMX_TILE 1024 /* bytes */

static size_t amx_work(int in) { return (size_t)(in / 32) * AMX_TILE * (1 + AMX_ROWS / 16) + AMX_TILE + 64; }
static bool amx_fits(const kern_linear *p) { return p->x_bf16 && p->w.type != KERN_W_F32; }

/* Tiles 0–3: C, 4: A, 5: B; all 16 rows of 64 bytes.  With a single row of x, B and C are one dword wide: then B is
 * the packed row as it lies, and nothing needs to be transposed. */
static void amx_configure(bool single) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes_per_row[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    for (int t = 0; t < 6; t++) config.bytes_per_row[t] = single && t != 4 ? 4 : 64, config.rows[t] = 16;
    _tile_loadconfig(&config);
}

/* Two vectors of floats that are bf16 values to 32 bf16. */
INLINE __m512i amx_pack(vec a, vec b) {
    __m256i lo = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(a), 16));
    __m256i hi = _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(b), 16));
    return _mm512_inserti64x4(_mm512_castsi256_si512(lo), hi, 1);
}

/* v[r] dword c → v[c] dword r: pairs of rows, of pairs, then 128-bit quarters twice. */
INLINE void amx_transpose(__m512i v[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) { /* v[i + c]: quarter q holds dword 4q + c of rows i … i+3 */
            v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
            v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
        }
    for (int c = 0; c < 4; c++) {
        __m512i a = _mm512_shuffle_i32x4(v[c], v[c + 4], 0x88), b = _mm512_shuffle_i32x4(v[c], v[c + 4], 0xdd);
        __m512i d = _mm512_shuffle_i32x4(v[c + 8], v[c + 12], 0x88), e = _mm512_shuffle_i32x4(v[c + 8], v[c + 12], 0xdd);
        t[c] = _mm512_shuffle_i32x4(a, d, 0x88);
        t[c + 8] = _mm512_shuffle_i32x4(a, d, 0xdd);
        t[c + 4] = _mm512_shuffle_i32x4(b, e, 0x88);
        t[c + 12] = _mm512_shuffle_i32x4(b, e, 0xdd);
    }
    for (int i = 0; i < 16; i++) v[i] = t[i];
}

/* Rows [r0, r0 + 16) of x, missing ones as zeros, to B tiles that lie `stride` bytes apart. */
static void amx_pack_rows(const kern_linear *p, int r0, uint8_t *to, size_t stride) {
    const float *x[16];
    int n = p->rows - r0 < 16 ? p->rows - r0 : 16;
    for (int i = 0; i < n; i++) x[i] = linear_row(p, r0 + i);
    for (int k = 0; k < p->w.in; k += 32, to += stride) {
        __m512i v[16];
        for (int i = 0; i < 16; i++) v[i] = i < n ? amx_pack(vec_load(x[i] + k), vec_load(x[i] + k + 16)) : _mm512_setzero_si512();
        amx_transpose(v);
        for (int i = 0; i < 16; i++) _mm512_store_si512(to + 64 * i, v[i]);
    }
}

/* ---- weights to bf16 ------------------------------------------------------------------------------------
 * In 16-bit lanes: a code's value as bf16 plus the scale's exponent, added where it belongs (bit 7 up).  Zero has no
 * exponent, and e4m3 subnormals are looked up. */

INLINE __m512i amx_e4m3(const uint8_t *code, short exponent) {
    const __m512i subnormal = _mm512_zextsi128_si512(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    __m512i shift = _mm512_set1_epi16((short)(exponent * 128)), c = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)code));
    __m512i table = _mm512_mask_add_epi16(subnormal, 0xfe, subnormal, shift), mag = _mm512_and_si512(c, _mm512_set1_epi16(0x7f));
    __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(mag, 4), _mm512_add_epi16(shift, _mm512_set1_epi16(120 << 7)));
    __m512i v = _mm512_mask_permutexvar_epi16(normal, _mm512_cmplt_epu16_mask(mag, _mm512_set1_epi16(8)), mag, table);
    return _mm512_or_si512(v, _mm512_slli_epi16(_mm512_and_si512(c, _mm512_set1_epi16(0x80)), 8));
}
INLINE __m512i amx_e2m1(const uint8_t *code, short exponent) {
    const __m256i grid = _mm256_setr_epi16(0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0, (short)0x8000, (short)0xbf00,
                                           (short)0xbf80, (short)0xbfc0, (short)0xc000, (short)0xc040, (short)0xc080, (short)0xc0c0);
    __m256i table = _mm256_mask_add_epi16(grid, 0xfefe, grid, _mm256_set1_epi16((short)(exponent * 128)));
    __m128i b = _mm_loadu_si128((const __m128i *)code), low = _mm_set1_epi8(15);
    __m128i even = _mm_and_si128(b, low), odd = _mm_and_si128(_mm_srli_epi16(b, 4), low);
    __m256i index = _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(even, odd)), _mm_unpackhi_epi8(even, odd), 1);
    return _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16(index), _mm512_castsi256_si512(table));
}
/* 32 weights of row o from column k.  Scales so far out that a product would leave bf16's exponents go the long way. */
INLINE __m512i amx_unit(const kern_mat *m, int o, int k) {
    size_t at = (size_t)o * (size_t)m->in + (size_t)k;
    const uint8_t *w = m->w;
    if (m->type == KERN_W_BF16) return _mm512_loadu_si512(w + 2 * at);
    int scale = m->type == KERN_W_FP4 ? m->scale[at / 32] : m->scale[(size_t)(o / 128) * (size_t)((m->in + 127) / 128) + (size_t)(k / 128)];
    if (scale < 16 || scale > 240) {
        vec v[UNIT_VECS];
        unit_load(m, o, k, v);
        return amx_pack(v[0], v[1]);
    }
    return m->type == KERN_W_FP4 ? amx_e2m1(w + at / 2, (short)(scale - 127)) : amx_e4m3(w + at, (short)(scale - 127));
}
INLINE void amx_widen(const kern_mat *m, kern_wtype type, int o, int n, uint8_t *to) {
    kern_mat typed = *m;
    typed.type = type;
    for (int k = 0; k < m->in; k += 32, to += AMX_TILE)
        for (int j = 0; j < n; j++) _mm512_store_si512(to + 64 * j, amx_unit(&typed, o + j, k));
}
static void amx_widen_type(const kern_mat *m, int o, int n, uint8_t *to) {
    switch (m->type) {
    case KERN_W_BF16: amx_widen(m, KERN_W_BF16, o, n, to); break;
    case KERN_W_FP8: amx_widen(m, KERN_W_FP8, o, n, to); break;
    case KERN_W_FP4: amx_widen(m, KERN_W_FP4, o, n, to); break;
    case KERN_W_F32: break;
    }
}

/* ---- products ------------------------------------------------------------------------------------------- */

/* C tiles of one A panel and `tiles` B panels: for every k block one A and `tiles` Bs. */
static void amx_multiply(const uint8_t *a, const uint8_t *b, int blocks, int tiles) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int i = 0; i < blocks; i++, a += AMX_TILE, b += 4 * AMX_TILE) {
        _tile_loadd(4, a, 64);
        _tile_loadd(5, b, 64);
        _tile_dpbf16ps(0, 4, 5);
        if (tiles < 2) continue;
        _tile_loadd(5, b + AMX_TILE, 64);
        _tile_dpbf16ps(1, 4, 5);
        if (tiles < 3) continue;
        _tile_loadd(5, b + 2 * AMX_TILE, 64);
        _tile_dpbf16ps(2, 4, 5);
        if (tiles < 4) continue;
        _tile_loadd(5, b + 3 * AMX_TILE, 64);
        _tile_dpbf16ps(3, 4, 5);
    }
}
static void amx_read(int tile, float *c) {
    switch (tile) {
    case 0: _tile_stored(0, c, 64); break;
    case 1: _tile_stored(1, c, 64); break;
    case 2: _tile_stored(2, c, 64); break;
    default: _tile_stored(3, c, 64); break;
    }
}

static void amx_single(const kern_linear *p, uint8_t *a, uint8_t *b, float *c) {
    const float *x = linear_row(p, 0);
    for (int k = 0; k < p->w.in; k += 32) _mm512_store_si512(b + 2 * k, amx_pack(vec_load(x + k), vec_load(x + k + 16)));
    for (int o = p->out_begin; o < p->out_end; o += 16) {
        int no = p->out_end - o < 16 ? p->out_end - o : 16;
        amx_widen_type(&p->w, o, no, a);
        _tile_zero(0);
        for (int i = 0; i < p->w.in / 32; i++) {
            _tile_loadd(4, a + (size_t)i * AMX_TILE, 64);
            _tile_loadd(5, b + (size_t)i * 64, 4);
            _tile_dpbf16ps(0, 4, 5);
        }
        _tile_stored(0, c, 4);
        for (int j = 0; j < no; j++) linear_store(p, 0, o + j, c[j]);
    }
}
static void amx_many(const kern_linear *p, uint8_t *a, uint8_t *b, float *c) {
    int blocks = p->w.in / 32;
    for (int r0 = 0; r0 < p->rows; r0 += AMX_ROWS) {
        int nr = p->rows - r0 < AMX_ROWS ? p->rows - r0 : AMX_ROWS, tiles = (nr + 15) / 16;
        for (int t = 0; t < tiles; t++) amx_pack_rows(p, r0 + 16 * t, b + (size_t)t * AMX_TILE, 4 * AMX_TILE);
        for (int o = p->out_begin; o < p->out_end; o += 16) {
            int no = p->out_end - o < 16 ? p->out_end - o : 16;
            amx_widen_type(&p->w, o, no, a);
            amx_multiply(a, b, blocks, tiles);
            for (int t = 0; t < tiles; t++) {
                amx_read(t, c);
                for (int r = 16 * t; r < nr && r < 16 * (t + 1); r++)
                    for (int j = 0; j < no; j++) linear_store(p, r0 + r, o + j, c[16 * j + r - 16 * t]);
            }
        }
    }
}
static void amx_linear(const kern_linear *p) {
    if (p->rows < 1) return;
    size_t blocks = (size_t)p->w.in / 32;
    uint8_t *a = (uint8_t *)(((uintptr_t)p->work + 63) & ~(uintptr_t)63), *b = a + blocks * AMX_TILE;
    float *c = (float *)(b + blocks * 4 * AMX_TILE);
    if ((p->out_end - p->out_begin) % 16) memset(a, 0, blocks * AMX_TILE); /* outputs that the last panel lacks */
    amx_configure(p->rows == 1);
    if (p->rows == 1) amx_single(p, a, b, c);
    else amx_many(p, a, b, c);
    _tile_release();
}

#endif
