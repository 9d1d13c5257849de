/* Scores of a chunk into weights: exponentials relative to the largest. */
#pragma once
#include "attention.h"
#include "matrix_tiles.h"
#include "upcoming.h"

#include <math.h>

#define SOFTMAX_ROWS 4 /* at a time */

/* Where products are on matrix tiles the exponentials are the largest part of the work, and rounded to 8 bits as soon as they are there. */
#if MATRIX_TILES && VBYTES == 64 && defined(__AVX512VBMI__)
#define EXP2_OF_16_BITS 1

/* 2^x, rounded to bfloat16, for 32 x <= 0: scale * scores + offset is 256 (x + 127).  As an integer that has exponent and fraction f side by
   side as the result has exponent and mantissa, which is 2^f - 1 (Schraudolph 1999, "A Fast, Compact Approximation of the Exponential
   Function"); the difference is looked up for each 64th, and a last bit rounded off.  The error is 0.196 % (root mean square; 0.166 if 2^x
   were exact) and at most 0.59 % (0.39); from x = 0 comes 1, from x < -127 comes 0, and from NaN, too. */
INLINE __m512i exp2_of_16_bits(const float *scores, vf scale, vf offset) {
    /* f - (2^f - 1) in 256ths: for each 64th of f the number with the least mean square error of the result. */
    static const uint8_t differences[64] __attribute__((aligned(64))) = {
        1,  2,  3,  5,  5,  7,  8,  9,  10, 11, 11, 13, 13, 14, 15, 16, 16, 17, 18, 18, 19, 19, 20, 20, 21, 21, 21, 22, 22, 22, 22, 22,
        22, 23, 23, 22, 22, 22, 22, 22, 22, 21, 21, 20, 20, 20, 19, 18, 18, 17, 16, 16, 14, 14, 13, 12, 10, 10, 8,  7,  6,  4,  3,  2};
    const __m512i table = _mm512_load_si512(differences), order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    __m512i first = _mm512_cvtps_epi32((__m512)vfma(vload(scores), scale, offset));
    __m512i second = _mm512_cvtps_epi32((__m512)vfma(vload(scores + VL), scale, offset));
    __m512i x = _mm512_permutexvar_epi64(order, _mm512_packus_epi32(first, second)); /* what is negative becomes 0 */
    __m512i difference = _mm512_maskz_permutexvar_epi8(0x5555555555555555, _mm512_srli_epi16(x, 2), table);
    return _mm512_avg_epu16(_mm512_subs_epu16(x, difference), _mm512_setzero_si512());
}

/* Weights of R rows; to sum[r] their sum, as rounded. */
INLINE void exponentials(int R, const float *scores, bf16 *weights, float scale, const vf *top, long end, vf *sum, struct upcoming *upcoming) {
    vf offset[SOFTMAX_ROWS], odd[SOFTMAX_ROWS];
    UNROLL for (int r = 0; r < R; r++) offset[r] = vset(127 * 256) + top[r] * vset(256), odd[r] = vset(0);
    for (long t = 0; t < end; t += 2 * VL) {
        if (t / (2 * VL) % 2) fetch_upcoming(upcoming);
        UNROLL for (int r = 0; r < R; r++) {
            __m512i p = exp2_of_16_bits(scores + r * CHUNK + t, vset(scale * 256), offset[r]);
            _mm512_storeu_si512(weights + r * CHUNK + t, p);
            sum[r] += (vf)_mm512_slli_epi32(p, 16);
            odd[r] += (vf)_mm512_and_si512(p, _mm512_set1_epi32((int)0xffff0000));
        }
    }
    UNROLL for (int r = 0; r < R; r++) sum[r] += odd[r];
}
#else
#define EXP2_OF_16_BITS 0
INLINE void exponentials(int R, const float *scores, bf16 *weights, float scale, const vf *top, long end, vf *sum, struct upcoming *upcoming) {
    (void)R, (void)scores, (void)weights, (void)scale, (void)top, (void)end, (void)sum, (void)upcoming;
}
#endif

/* Turns the first limits[r] scores of each row, times `scale`, into weights, all CHUNK of them where `limits` is 0; those after them up to
   `used`, a multiple of TILE, get weight 0.  Several rows at a time, because each one's sum and maximum are chains of operations that wait
   for one another. */
INLINE void softmax_rows(int R, int narrow, float *scores, void *weights, float scale, const long *limits, long used, float *largest, float *sum,
                         struct upcoming *upcoming) {
    vf most[SOFTMAX_ROWS], other[SOFTMAX_ROWS], total[SOFTMAX_ROWS], top[SOFTMAX_ROWS];
    long end = limits ? 0 : CHUNK;
    if (limits) UNROLL for (int r = 0; r < R; r++) end = limits[r] > end ? limits[r] : end;
    end = (end + 2 * VL - 1) / (2 * VL) * (2 * VL);
    UNROLL for (int r = 0; r < R; r++) {
        most[r] = other[r] = vset(-INFINITY), total[r] = vset(0);
        if (limits) for (long t = limits[r]; t < end; t++) scores[r * CHUNK + t] = -INFINITY; /* they may hold anything */
    }
    for (long t = 0; t < end; t += 2 * VL)
        UNROLL for (int r = 0; r < R; r++) {
            most[r] = vmax(most[r], vload(scores + r * CHUNK + t));
            other[r] = vmax(other[r], vload(scores + r * CHUNK + t + VL));
        }
    UNROLL for (int r = 0; r < R; r++) {
        largest[r] = vmax_lanes(vmax(most[r], other[r])) * scale;
        top[r] = vset(-largest[r]);
    }
    if (narrow && EXP2_OF_16_BITS) exponentials(R, scores, weights, scale, top, end, total, upcoming);
    else for (long t = 0; t < end; t += 2 * VL) {
        if (t / (2 * VL) % 2) fetch_upcoming(upcoming);
        UNROLL for (int r = 0; r < R; r++) {
            vf p = vexp2_of(vfma(vload(scores + r * CHUNK + t), vset(scale), top[r]), narrow);
            vf next = vexp2_of(vfma(vload(scores + r * CHUNK + t + VL), vset(scale), top[r]), narrow);
            if (narrow) vstore_bf16_pair((bf16 *)weights + r * CHUNK + t, p, next);
            else vstore((float *)weights + r * CHUNK + t, p), vstore((float *)weights + r * CHUNK + t + VL, next);
            total[r] += p;
            total[r] += next;
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        for (long t = end; t < used; t += VL) store_from_float(weights, r * CHUNK + t, vset(0), narrow);
        sum[r] = vsum(total[r]);
    }
}

/* The same for 1 to SOFTMAX_ROWS rows. */
INLINE void softmax_few(long rows, int narrow, float *scores, void *weights, float scale, const long *limits, long used, float *largest,
                        float *sum, struct upcoming *upcoming) {
    switch (rows) {
    case 1: softmax_rows(1, narrow, scores, weights, scale, limits, used, largest, sum, upcoming); break;
    case 2: softmax_rows(2, narrow, scores, weights, scale, limits, used, largest, sum, upcoming); break;
    case 3: softmax_rows(3, narrow, scores, weights, scale, limits, used, largest, sum, upcoming); break;
    case SOFTMAX_ROWS: softmax_rows(SOFTMAX_ROWS, narrow, scores, weights, scale, limits, used, largest, sum, upcoming);
    }
}
