/* Weights of 4 or 8 bits, kept so in memory and widened to bfloat16 in a core's cache: a decode step waits for memory, and reads a third.

   A group is 32 inputs of a tile's 16 outputs, as gemm.h has a tile (pairs of inputs side by side): each output has a scale (and at 4 bits
   an offset) of its own for these inputs, as in GGUF's Q4_0, Q4_1 and Q8_0.  A group's bytes: 16 scales in float16, at 4 bits 16 offsets, then 32-bit words of codes, one for each of the tile's 32 columns-and-parities, with the codes of 8 (4) successive pairs from its
   low bits up; 2 (4) times.  A weight is scale * code + offset, code unsigned, or scale * code, code signed; the product is exact, so fusing
   it with the sum changes no bit. */
#pragma once
#include "gemm.h"

#define GROUP 32
#define GROUP_WIDE (GROUP * TILE) /* elements of a widened group */
#define PAIR_ROW (2 * TILE)       /* elements of a pair of inputs */

INLINE long group_bytes(int bits) { return bits == 4 ? 4 * TILE + GROUP * TILE / 2 : 2 * TILE + GROUP * TILE; }

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

/* A group's weights, [16 pairs][16 outputs][2]. */
INLINE void widen_group(int bits, const char *group, bf16 *out) {
    enum { VECTORS = PAIR_ROW / VL };
    vf scale[VECTORS], offset[VECTORS];
    vu codes[VECTORS];
    load_twice((const uint16_t *)group, scale);
    if (bits == 4) load_twice((const uint16_t *)group + TILE, offset);
    group += (bits == 4 ? 4 : 2) * TILE;
    for (int word = 0; word < bits / 2; word++, group += 4 * PAIR_ROW) {
        UNROLL for (int v = 0; v < VECTORS; v++) memcpy(codes + v, group + v * VBYTES, VBYTES);
        UNROLL for (int i = 0; i < 32 / bits; i++, out += PAIR_ROW) {
            vf w[VECTORS];
            UNROLL for (int v = 0; v < VECTORS; v++)
                w[v] = bits == 4 ? vfma(low_code(codes[v] >> 4 * i), scale[v], offset[v])
                                 : __builtin_convertvector((vi)(codes[v] << (24 - 8 * i)) >> 24, vf) * scale[v];
            UNROLL for (int v = 0; v < VECTORS; v += 2) vstore_bf16_pair(out + v * VL, w[v], w[v + 1]);
        }
    }
}

/* `count` groups one behind the other.  What lies `ahead` bytes further is fetched meanwhile. */
INLINE void widen_groups(int bits, const char *groups, long count, long ahead, void *out) {
    for (long g = 0; g < count; g++, groups += group_bytes(bits)) {
        for (long byte = 0; byte < group_bytes(bits); byte += 64) FETCH(groups + ahead + byte);
        bits == 4 ? widen_group(4, groups, (bf16 *)out + g * GROUP_WIDE) : widen_group(8, groups, (bf16 *)out + g * GROUP_WIDE);
    }
}
