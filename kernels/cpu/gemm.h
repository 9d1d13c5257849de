/* The one inner loop of all products: MR rows of A times NT tiles of 16 columns of B, one float32 accumulator an output, the inner
   dimension in order.  So an output's bits depend on its own row and column only, never on what is computed beside it.

   A is row-major float32.  A tile of B holds, for each k, 16 columns side by side (`ldb` elements from one k to the next); in
   bfloat16, for each pair k, k+1, 16 pairs (2 ldb elements from one pair to the next). */
#pragma once
#include "vec.h"

#define TILE 16
#define TV (TILE / VL) /* vectors in a tile's row */
#define MAX_MR 6
/* Tiles that a kernel of MR rows covers: enough independent accumulators to hide the latency of fused multiply-add, few enough
   to stay in registers (32 of a tile's width with AVX-512). */
#if TV == 1
#define WIDE(MR) (MR == 1 ? 8 : 4)
#else
#define WIDE(MR) (MR == 1 ? 4 : MR <= 3 ? 2 : 1)
#endif
#define MAX_NT 8

/* Into L2: what is on its way into L1 occupies one of few miss buffers, which bounds a core's share of the memory's speed. */
#define FETCH(p) __builtin_prefetch(p, 0, 2)
/* Into L1, from whoever wrote it last: to be written. */
#define CLAIM(p) __builtin_prefetch(p, 1, 3)

INLINE void load_tile_row(vf *w, const float *b) { UNROLL for (int v = 0; v < TV; v++) w[v] = vload(b + v * VL); }
INLINE void load_tile_row_low(vf *w, const bf16 *b) {
    UNROLL for (int v = 0; v < TV; v++) { vu pair; memcpy(&pair, b + v * 2 * VL, sizeof pair); w[v] = (vf)(pair << 16); }
}
INLINE void load_tile_row_high(vf *w, const bf16 *b) {
    UNROLL for (int v = 0; v < TV; v++) { vu pair; memcpy(&pair, b + v * 2 * VL, sizeof pair); w[v] = (vf)(pair & 0xffff0000u); }
}

INLINE void multiply_row(int MR, int NT, vf *acc, const float *a, long lda, const vf *w) {
    UNROLL for (int m = 0; m < MR; m++) {
        vf x = vset(a[m * lda]);
        UNROLL for (int n = 0; n < NT * TV; n++) acc[m * NT * TV + n] = vfma(x, w[n], acc[m * NT * TV + n]);
    }
}

/* acc[MR][NT * TV] += A[MR][k] * B[k][NT tiles]; tile n starts at b[n].  Meanwhile memory is fetched into a cache for later: from each
   of ahead[NT], `step` bytes further for each k (from nowhere if `fetch` is 0). */
INLINE void accumulate(int MR, int NT, int half, int fetch, vf *acc, const float *a, long lda, const void *const *b, long ldb, long k,
                       const char *const *ahead, long step) {
    vf w[MAX_NT * TV];
    if (!half) {
        for (long i = 0; i < k; i++) {
            UNROLL for (int n = 0; n < NT; n++) {
                if (fetch) FETCH(ahead[n] + i * step);
                load_tile_row(w + n * TV, (const float *)b[n] + i * ldb);
            }
            multiply_row(MR, NT, acc, a + i, lda, w);
        }
        return;
    }
    long i = 0;
    for (; i + 1 < k; i += 2) {
        UNROLL for (int n = 0; n < NT; n++) {
            if (fetch) FETCH(ahead[n] + i * step);
            load_tile_row_low(w + n * TV, (const bf16 *)b[n] + i * ldb);
        }
        multiply_row(MR, NT, acc, a + i, lda, w);
        UNROLL for (int n = 0; n < NT; n++) load_tile_row_high(w + n * TV, (const bf16 *)b[n] + i * ldb);
        multiply_row(MR, NT, acc, a + i + 1, lda, w);
    }
    if (i < k) { /* the second of the last pair isn't part of the product: it may be padding, or a row nobody wrote */
        UNROLL for (int n = 0; n < NT; n++) load_tile_row_low(w + n * TV, (const bf16 *)b[n] + i * ldb);
        multiply_row(MR, NT, acc, a + i, lda, w);
    }
}

/* DOT_PAIRS: whether this CPU multiplies pairs of bfloat16 and adds both products to a float32, twice the work of a multiply-add.
   Tests define it to run this code where the instruction is missing. */
#if VBYTES == 64 && defined(__AVX512BF16__)
#define DOT_PAIRS 1
INLINE vf vdot(vf acc, vu x, vu w) { return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)x, (__m512bh)w); }
#else
#ifndef DOT_PAIRS
#define DOT_PAIRS 0
#endif
INLINE vf vdot(vf acc, vu x, vu w) {
    return vfma((vf)(x << 16), (vf)(w << 16), vfma((vf)(x & 0xffff0000u), (vf)(w & 0xffff0000u), acc));
}
#endif

/* accumulate() for bfloat16 on both sides: A is row-major bfloat16. */
INLINE void accumulate_pairs(int MR, int NT, int fetch, vf *acc, const bf16 *a, long lda, const void *const *b, long ldb, long k,
                             const char *const *ahead, long step) {
    vu w[MAX_NT * TV];
    long i = 0;
    for (; i + 1 < k; i += 2) {
        UNROLL for (int n = 0; n < NT; n++) {
            if (fetch) FETCH(ahead[n] + i * step);
            memcpy(w + n * TV, (const bf16 *)b[n] + i * ldb, TV * sizeof(vu));
        }
        UNROLL for (int m = 0; m < MR; m++) {
            uint32_t pair;
            memcpy(&pair, a + m * lda + i, 4);
            vu x = (vu){LANES(pair)};
            UNROLL for (int n = 0; n < NT * TV; n++) acc[m * NT * TV + n] = vdot(acc[m * NT * TV + n], x, w[n]);
        }
    }
    if (i < k) { /* as in accumulate(), what stands beside the last isn't part of the product */
        UNROLL for (int n = 0; n < NT; n++) {
            memcpy(w + n * TV, (const bf16 *)b[n] + i * ldb, TV * sizeof(vu));
            UNROLL for (int v = 0; v < TV; v++) w[n * TV + v] &= 0xffff;
        }
        UNROLL for (int m = 0; m < MR; m++) {
            vu x = (vu){LANES((uint32_t)a[m * lda + i])};
            UNROLL for (int n = 0; n < NT * TV; n++) acc[m * NT * TV + n] = vdot(acc[m * NT * TV + n], x, w[n]);
        }
    }
}

/* Rows are cut into panels of at most so many, as even as can be, because small panels use the registers badly. */
INLINE long panel_count(long rows, long most) { return (rows + most - 1) / most; }
INLINE long panel_start(long rows, long panels, long p) { return rows / panels * p + (p < rows % panels ? p : rows % panels); }

/* Calls CASE(1) .. CASE(6) by the value of rows, so that each instance has constant bounds. */
#define FOR_ROWS(rows, CASE)                                                                                                      \
    switch (rows) {                                                                                                               \
    case 1: CASE(1); break;                                                                                                       \
    case 2: CASE(2); break;                                                                                                       \
    case 3: CASE(3); break;                                                                                                       \
    case 4: CASE(4); break;                                                                                                       \
    case 5: CASE(5); break;                                                                                                       \
    default: CASE(6); break;                                                                                                      \
    }
