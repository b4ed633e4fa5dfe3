/* widen.h — stored weights and cache rows to float.  Every result is exact: a code times a power of two. */
#ifndef KERN_WIDEN_H
#define KERN_WIDEN_H

INLINE float ue8m0_float(uint8_t b) { return pow2f((int)b - 127); }

#ifdef VEC
/* 16 e4m3 codes as floats divided by 2^8: the code's bits, moved up, are a half with a smaller exponent.  Halves
 * widen at full speed also when subnormal. */
INLINE __m256i e4m3_halves(__m128i codes) {
    __m256i c = _mm256_cvtepu8_epi16(codes);
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(c, _mm256_set1_epi16(0x80)), 8);
    __m256i mag = _mm256_slli_epi16(_mm256_and_si256(c, _mm256_set1_epi16(0x7f)), 7);
    return _mm256_or_si256(sign, mag);
}
INLINE void widen_e4m3(const uint8_t *code, float scale, float *out, int n) {
    vec s = vec_set(scale * 256.0f);
    for (int i = 0; i < n; i += 16) {
        __m256i h = e4m3_halves(_mm_loadu_si128((const __m128i *)(code + i)));
#if VEC == 16
        vec_store(out + i, _mm512_mul_ps(_mm512_cvtph_ps(h), s));
#else
        vec_store(out + i, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(h)), s));
        vec_store(out + i + 8, _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(h, 1)), s));
#endif
    }
}
/* 32 e2m1 codes (16 bytes): a byte shuffle looks twice the value up. */
INLINE void widen_e2m1_32(const uint8_t *code, float scale, float *out) {
    const __m128i twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    vec s = vec_set(scale * 0.5f);
    __m128i b = _mm_loadu_si128((const __m128i *)code);
    __m128i lo = _mm_shuffle_epi8(twice, _mm_and_si128(b, _mm_set1_epi8(15)));
    __m128i hi = _mm_shuffle_epi8(twice, _mm_and_si128(_mm_srli_epi16(b, 4), _mm_set1_epi8(15)));
    __m128i first = _mm_unpacklo_epi8(lo, hi), second = _mm_unpackhi_epi8(lo, hi);
#if VEC == 16
    vec_store(out, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(first)), s));
    vec_store(out + 16, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(second)), s));
#else
    vec_store(out, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(first)), s));
    vec_store(out + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(first, 8))), s));
    vec_store(out + 16, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(second)), s));
    vec_store(out + 24, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(second, 8))), s));
#endif
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
