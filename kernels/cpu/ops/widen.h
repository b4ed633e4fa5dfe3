/* widen.h — stored weights and cache rows to float.  Every result is exact: a code times a power of two. */
#ifndef KERN_WIDEN_H
#define KERN_WIDEN_H

INLINE float ue8m0_float(uint8_t b) { return pow2f((int)b - 127); }

#ifdef VEC
#define UNIT 32               /* weights that are widened at once */
#define UNIT_VECS (UNIT / VEC)

/* 32 e4m3 codes. A code's bits, sign-extended and moved up, are a half whose exponent is smaller by 8: so the
 * scale carries 2^8.  Halves widen at full speed also when subnormal. */
INLINE void unit_e4m3(const uint8_t *code, vec scale256, vec out[UNIT_VECS]) {
#if VEC == 16
    __m512i c = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)code));
    __m512i h = _mm512_and_si512(_mm512_slli_epi16(c, 7), _mm512_set1_epi16((short)0xbfff));
    out[0] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(h)), scale256);
    out[1] = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1)), scale256);
#else
    for (int i = 0; i < 2; i++) {
        __m256i c = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(code + 16 * i)));
        __m256i h = _mm256_and_si256(_mm256_slli_epi16(c, 7), _mm256_set1_epi16((short)0xbfff));
        out[2 * i] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), scale256);
        out[2 * i + 1] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)), scale256);
    }
#endif
}
/* 32 e2m1 codes in 16 bytes. */
INLINE void unit_e2m1(const uint8_t *code, vec scale, vec out[UNIT_VECS]) {
    __m128i b = _mm_loadu_si128((const __m128i *)code), low = _mm_set1_epi8(15);
    __m128i even = _mm_and_si128(b, low), odd = _mm_and_si128(_mm_srli_epi16(b, 4), low);
#if VEC == 16
    const __m512 grid = _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
    __m512 scaled = _mm512_mul_ps(grid, scale); /* the table of this block */
    out[0] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_unpacklo_epi8(even, odd)), scaled);
    out[1] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_unpackhi_epi8(even, odd)), scaled);
#else
    const __m128i twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    __m128i v[2] = {_mm_shuffle_epi8(twice, _mm_unpacklo_epi8(even, odd)), _mm_shuffle_epi8(twice, _mm_unpackhi_epi8(even, odd))};
    vec half = _mm256_mul_ps(scale, vec_set(0.5f));
    for (int i = 0; i < 2; i++) {
        out[2 * i] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v[i])), half);
        out[2 * i + 1] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v[i], 8))), half);
    }
#endif
}
INLINE void unit_bf16(const uint16_t *w, vec out[UNIT_VECS]) {
#if VEC == 16
    for (int i = 0; i < UNIT_VECS; i++)
        out[i] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(w + i * VEC))), 16));
#else
    for (int i = 0; i < UNIT_VECS; i++)
        out[i] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(w + i * VEC))), 16));
#endif
}
INLINE void unit_store(float *out, const vec v[UNIT_VECS]) {
    for (int i = 0; i < UNIT_VECS; i++) vec_store(out + i * VEC, v[i]);
}

INLINE void widen_e4m3(const uint8_t *code, float scale, float *out, int n) {
    vec s = vec_set(scale * 256.0f), v[UNIT_VECS];
    for (int i = 0; i < n; i += UNIT) {
        unit_e4m3(code + i, s, v);
        unit_store(out + i, v);
    }
}
INLINE void widen_e2m1_32(const uint8_t *code, float scale, float *out) {
    vec v[UNIT_VECS];
    unit_e2m1(code, vec_set(scale), v);
    unit_store(out, v);
}
#else
INLINE void widen_e4m3(const uint8_t *code, float scale, float *out, int n) {
    for (int i = 0; i < n; i++) out[i] = e4m3_float(code[i]) * scale;
}
INLINE void widen_e2m1_32(const uint8_t *code, float scale, float *out) {
    for (int i = 0; i < 16; i++) {
        out[2 * i] = e2m1_float(code[i] & 15) * scale;
        out[2 * i + 1] = e2m1_float(code[i] >> 4) * scale;
    }
}
#endif

INLINE void widen_bf16(const uint16_t *w, float *out, int n) {
    for (int i = 0; i < n; i++) out[i] = bf16_float(w[i]);
}

/* Row o of a matrix; the stored row itself when it is float already. */
static const float *widen_row(const kern_mat *m, int o, float *buf) {
    int in = m->in;
    switch (m->type) {
    case KERN_W_F32: return (const float *)m->w + (size_t)o * (size_t)in;
    case KERN_W_BF16: widen_bf16((const uint16_t *)m->w + (size_t)o * (size_t)in, buf, in); break;
    case KERN_W_FP8: {
        const uint8_t *w = (const uint8_t *)m->w + (size_t)o * (size_t)in;
        const uint8_t *scale = m->scale + (size_t)(o / 128) * (size_t)((in + 127) / 128);
        for (int k = 0; k < in; k += 128) widen_e4m3(w + k, ue8m0_float(scale[k / 128]), buf + k, in - k < 128 ? in - k : 128);
        break;
    }
    case KERN_W_FP4: {
        const uint8_t *w = (const uint8_t *)m->w + (size_t)o * (size_t)(in / 2);
        const uint8_t *scale = m->scale + (size_t)o * (size_t)(in / 32);
        for (int k = 0; k < in; k += 32) widen_e2m1_32(w + k / 2, ue8m0_float(scale[k / 32]), buf + k);
        break;
    }
    }
    return buf;
}

/* 584-byte row to 512 floats. */
static void unpack_row(const uint8_t *row, float *out) {
    for (int b = 0; b < KERN_NOPE_DIM / 64; b++) widen_e4m3(row + 64 * b, ue8m0_float(row[576 + b]), out + 64 * b, 64);
    uint16_t rope[KERN_ROPE_DIM];
    memcpy(rope, row + KERN_NOPE_DIM, sizeof rope);
    widen_bf16(rope, out + KERN_NOPE_DIM, KERN_ROPE_DIM);
}
static void op_unpack(const kern_unpack *p) {
    for (int r = 0; r < p->rows; r++) unpack_row(p->row[r], p->x + r * p->x_stride);
}
/* 68-byte key to 128 floats. */
static void unpack_key(const uint8_t *key, float *out) {
    for (int b = 0; b < KERN_INDEX_DIM / 32; b++) widen_e2m1_32(key + 16 * b, ue8m0_float(key[64 + b]), out + 32 * b);
}

#endif
