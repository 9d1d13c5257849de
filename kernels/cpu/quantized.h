/* Weights of 4 or 8 bits, kept so in memory and widened to bfloat16 in a core's cache: a decode step waits for memory, and reads a third.

   A group is 32 inputs of a tile's 16 outputs: each output has a scale (and at 4 bits an offset) of its own for these inputs, as in GGUF's
   Q4_0, Q4_1 and Q8_0.  A group's bytes: 16 scales in float16, at 4 bits 16 offsets, then codes.  A weight is scale * code + offset, code
   unsigned, or scale * code, code signed; the product is exact, so fusing it with the sum changes no bit.

   Codes of 8 bits: 32-bit words, one for each of a tile's 32 columns-and-parities (as gemm.h has a tile, pairs of inputs side by side), with
   those of 4 successive pairs from its low bits up; 4 times.  Codes of 4 bits: for each 4 outputs eight 64-bit words, one for each 4 inputs;
   its low half has those of even inputs, its high half those of odd ones, each for one pair after the other the 4 outputs from the low bits
   up.  So a word can be broadcast to the columns-and-parities of its outputs, and eight words are all of an output's inputs in order. */
#pragma once
#include "gemm.h"

#define GROUP 32
#define GROUP_WIDE (GROUP * TILE) /* elements of a widened group */
#define PAIR_ROW (2 * TILE)       /* elements of a pair of inputs */

INLINE long group_bytes(int bits) { return bits == 4 ? 4 * TILE + GROUP * TILE / 2 : 2 * TILE + GROUP * TILE; }

/* Where the 4 bits of an output's code for an input are among a group's 32-bit words. */
INLINE long word_of_code(long output, long input) { return output / 4 * 16 + input / 4 * 2 + input % 2; }
INLINE long bit_of_code(long output, long input) { return input / 2 % 2 * 16 + output % 4 * 4; }

/* VL numbers in float16, no infinities or NaN. */
INLINE vf vload_half(const uint16_t *p) {
    vh h;
    memcpy(&h, p, sizeof h);
#if VBYTES == 64 && defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps((__m256i)h);
#elif VBYTES == 32 && defined(__F16C__)
    return (vf)_mm256_cvtph_ps((__m128i)h);
#else
    vu u = __builtin_convertvector(h, vu), magnitude = (u & 0x7fff) << 13;
    vf normal = (vf)(magnitude + (112 << 23)), denormal = (vf)(magnitude + (113 << 23)) - vset(0x1p-14f);
    return (vf)((vu)vselect((vi)magnitude < 1 << 23, denormal, normal) | (u & 0x8000) << 16);
#endif
}

typedef uint32_t half_vu __attribute__((vector_size(VBYTES / 2)));
typedef uint64_t long_vu __attribute__((vector_size(VBYTES)));

/* 16 numbers in float16 to the 32 lanes of a pair of inputs, each twice. */
INLINE void load_twice(const uint16_t *p, vf *out) {
    uint32_t once[TILE];
    UNROLL for (int v = 0; v < TV; v++) vstore((float *)once + v * VL, vload_half(p + v * VL));
    UNROLL for (int v = 0; v < 2 * TV; v++) {
        half_vu words;
        memcpy(&words, once + v * (VL / 2), sizeof words);
        long_vu wide = __builtin_convertvector(words, long_vu);
        out[v] = (vf)(wide | wide << 32);
    }
}

/* The low 4 bits of each lane. */
INLINE vf low_code(vu x) {
#if VBYTES == 64 && defined(__AVX512F__)
    const __m512 codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return (vf)_mm512_permutexvar_ps((__m512i)x, codes); /* looks at no other bits */
#else
    return __builtin_convertvector((vi)(x & 15), vf);
#endif
}

/* FAR + the i-th byte of each lane, signed: the byte with its sign turned over makes the last bits of a float's whole part, which takes two
   operations less than to convert it. */
#define FAR 32896.0f /* 2^15 + 2^7 */
INLINE vf near_code(vu codes, int i) {
    vu x = i == 0 ? codes << 8 : i == 1 ? codes : codes >> (8 * i - 8);
    return (vf)(((x ^ 0x8000) & 0xff00) | 0x47000000);
}

/* The low 4 bits of lane v * VL + i are a code of pair 2 * quad for that column-and-parity, and those 16 bits above of the next pair. */
INLINE vu load_codes(const char *codes, int quad, int v) {
    static const uint32_t shifts[16] = {0, 0, 4, 4, 8, 8, 12, 12, 0, 0, 4, 4, 8, 8, 12, 12};
    const char *word = codes + v * VL / 8 * 64 + quad * 8;
    vu shift;
    memcpy(&shift, shifts + v * VL % 8, sizeof shift);
#if VBYTES == 64 && defined(__AVX512F__)
    __m512i first = _mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)word));
    return (vu)_mm512_mask_broadcastq_epi64(first, 0xf0, _mm_loadl_epi64((const __m128i *)(word + 64))) >> shift;
#else
    uint64_t first, second;
    memcpy(&first, word, 8), memcpy(&second, word + 64 * (VL > 8), 8);
    long_vu words = (long_vu){0} + first;
    UNROLL for (int i = 4; i < VL / 2; i++) words[i] = second;
    return (vu)words >> shift;
#endif
}

/* A group's weights, [16 pairs][16 outputs][2]. */
INLINE void widen_group(int bits, const char *group, bf16 *out) {
    enum { VECTORS = PAIR_ROW / VL };
    vf scale[VECTORS], offset[VECTORS], w[VECTORS];
    vu codes[VECTORS];
    load_twice((const uint16_t *)group, scale);
    if (bits == 4) load_twice((const uint16_t *)group + TILE, offset);
    else UNROLL for (int v = 0; v < VECTORS; v++) offset[v] = vset(-FAR) * scale[v]; /* exact, like its sum with the product */
    group += (bits == 4 ? 4 : 2) * TILE;
    int pairs = bits == 4 ? 2 : 4; /* that one load serves */
    for (int pair = 0; pair < GROUP / 2; pair += pairs) {
        UNROLL for (int v = 0; v < VECTORS; v++) {
            if (bits == 4) codes[v] = load_codes(group, pair / 2, v);
            else memcpy(codes + v, group + pair * PAIR_ROW + v * VBYTES, VBYTES);
        }
        UNROLL for (int i = 0; i < pairs; i++, out += PAIR_ROW) {
            UNROLL for (int v = 0; v < VECTORS; v++)
                w[v] = bits == 4 ? vfma(low_code(codes[v] >> 16 * i), scale[v], offset[v])
                                 : vfma(near_code(codes[v], i), scale[v], offset[v]);
            UNROLL for (int v = 0; v < VECTORS; v += 2) vstore_bf16_pair(out + v * VL, w[v], w[v + 1]);
        }
    }
}

INLINE void fetch_group(int bits, const char *group) {
    for (long byte = 0; byte < group_bytes(bits); byte += 64) FETCH(group + byte);
}

/* `count` groups one behind the other.  What lies `ahead` bytes further is fetched meanwhile. */
INLINE void widen_groups(int bits, const char *groups, long count, long ahead, void *out) {
    for (long g = 0; g < count; g++, groups += group_bytes(bits)) {
        fetch_group(bits, groups + ahead);
        bits == 4 ? widen_group(4, groups, (bf16 *)out + g * GROUP_WIDE) : widen_group(8, groups, (bf16 *)out + g * GROUP_WIDE);
    }
}

/* The 16 scales and 16 offsets of a group of 4 bits, for widen_rows. */
INLINE void load_numbers(const char *group, float *numbers) {
    UNROLL for (int i = 0; i < 2 * TILE; i += VL) vstore(numbers + i, vload_half((const uint16_t *)group + i));
    __asm__ volatile("" ::"r"(numbers) : "memory"); /* else GCC broadcasts one of them by a permutation instead of a load */
}

/* A group of 4 bits as [16 outputs][32 inputs].  An output's weights in it are 16 different ones at most: computed once and looked up. */
INLINE void widen_rows(const char *group, const float *numbers, bf16 *out) {
    static const float code[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const char *codes = group + 4 * TILE;
    UNROLL for (int n = 0; n < TILE; n += 2) {
        bf16 table[32]; /* of output n and of the next */
#define ENTRIES(e) vfma(vload(code + (e) % 16), vset(numbers[n + (e) / 16]), vset(numbers[TILE + n + (e) / 16]))
        UNROLL for (int e = 0; e < 32; e += 2 * VL) vstore_bf16_pair(table + e, ENTRIES(e), ENTRIES(e + VL));
#undef ENTRIES
#if VBYTES == 64 && defined(__AVX512VBMI__)
        __m512i entries = _mm512_loadu_si512(table), words = _mm512_loadu_si512(codes + n / 4 * 64);
        UNROLL for (int i = 0; i < 2; i++) { /* a byte's place is 2 code + 1 if it is the upper one: the code is asked for at bit 1 */
            __m512i from = _mm512_set1_epi64(0x2f2f0f0f1f1f3f3f + (n % 4 + i) * 0x0404040404040404);
            __m512i code_twice = _mm512_multishift_epi64_epi8(from, words), rest = _mm512_set1_epi16(0x0100 + i * 0x2020);
            __m512i place = _mm512_ternarylogic_epi64(code_twice, _mm512_set1_epi16(0x1e1e), rest, 0xea); /* a & b | c */
            _mm512_storeu_si512(out + (n + i) * GROUP, _mm512_permutexvar_epi8(place, entries));
        }
#else
        for (int i = 0; i < 2 * GROUP; i++) {
            uint32_t word;
            memcpy(&word, codes + 4 * word_of_code(n + i / GROUP, i % GROUP), 4);
            out[n * GROUP + i] = table[i / GROUP * 16 + (word >> bit_of_code(n + i / GROUP, i % GROUP) & 15)];
        }
#endif
    }
}
