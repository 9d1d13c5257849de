/* linear.c's items on matrix tiles: the whole inner dimension in registers, 32 rows by 2 tiles, or up to 16 rows by 4. */
#include "linear.h"

#include "gemm.h"
#include "matrix_tiles.h"
#include "quantized.h"

#if MATRIX_TILES

#define AHEAD 8192 /* bytes; where rows are few, the weight comes from memory and must be asked for early */

INLINE void fetch_tile(const char *p) { UNROLL for (int line = 0; line < 16; line++) FETCH(p + 64 * line); }

/* C registers 0 .. 3, one for each tile; A in 4, B in 5.  Of a quantized weight a group is widened while the one before is multiplied. */
INLINE void few_rows(int NT, int bits, const char *a, long lda, const char *const *b, long ahead, long depth, float *c) {
    bf16 widened[2][GROUP_WIDE] __attribute__((aligned(64)));
    tile_zero(0);
    if (NT > 1) tile_zero(1);
    if (NT > 2) { tile_zero(2); tile_zero(3); }
    if (bits) widen_groups(bits, b[0], 1, ahead, widened[0]);
#define WIDEN(n, g) widen_groups(bits, b[n] + (g) * group_bytes(bits), 1, ahead, widened[((g) * NT + (n)) % 2])
#define STEP(n)                                                                                                                   \
    if (NT > n) {                                                                                                                 \
        if (!bits) fetch_tile(b[n] + g * GROUP_WIDE * 2 + AHEAD);                                                                 \
        else if (NT > n + 1) WIDEN(n + 1, g);                                                                                     \
        else if (g + 1 < groups) WIDEN(0, g + 1);                                                                                 \
        tile_load(5, bits ? (const char *)widened[(g * NT + n) % 2] : b[n] + g * GROUP_WIDE * 2, 64);                             \
        tile_multiply(n, 4, 5);                                                                                                   \
    }
    for (long g = 0, groups = depth / GROUP; g < groups; g++) {
        tile_load(4, a + g * GROUP * 2, lda);
        STEP(0) STEP(1) STEP(2) STEP(3)
    }
#undef STEP
#undef WIDEN
    tile_store(0, c, NT * TILE * 4);
    if (NT > 1) tile_store(1, c + TILE, NT * TILE * 4);
    if (NT > 2) { tile_store(2, c + 2 * TILE, NT * TILE * 4); tile_store(3, c + 3 * TILE, NT * TILE * 4); }
}

/* C registers 0, 1 for rows 0 .. 15 and 2, 3 for the others; A in 4 and 5, B in 6 and 7.  A passes by while B stays in L1. */
INLINE void many_rows(int NT, const char *a, long lda, const char *const *b, long depth, float *c) {
    const char *lower = a + TILE_ROWS * lda;
    tile_zero(0);
    tile_zero(2);
    if (NT > 1) { tile_zero(1); tile_zero(3); }
    for (long k = 0; k < depth; k += TILE_DEPTH) {
        tile_load(6, b[0] + k * TILE * 2, 64);
        tile_stream(4, a + k * 2, lda);
        tile_multiply(0, 4, 6);
        tile_stream(5, lower + k * 2, lda);
        tile_multiply(2, 5, 6);
        if (NT > 1) {
            tile_load(7, b[1] + k * TILE * 2, 64);
            tile_multiply(1, 4, 7);
            tile_multiply(3, 5, 7);
        }
    }
    tile_store(0, c, NT * TILE * 4);
    tile_store(2, c + TILE_ROWS * NT * TILE, NT * TILE * 4);
    if (NT > 1) { tile_store(1, c + TILE, NT * TILE * 4); tile_store(3, c + TILE_ROWS * NT * TILE + TILE, NT * TILE * 4); }
}

static void configure(long rows) {
    long upper = rows < TILE_ROWS ? rows : TILE_ROWS, lower = rows - upper;
    struct tile_shapes s = {.palette = 1};
    for (int t = 0; t < 8; t++) s.bytes[t] = 64;
    s.rows[0] = s.rows[1] = s.rows[4] = upper;
    s.rows[2] = s.rows[3] = lower ? lower : upper;
    s.rows[5] = lower ? lower : TILE_ROWS;
    s.rows[6] = s.rows[7] = TILE_ROWS;
    tile_configure(&s);
}

/* `tiles` tiles of the output, whose weights are at b, for rows that the registers are configured for. */
static void compute(const struct linear *l, const char *const *b, long row, long rows, long tile, long tiles) {
    long lda = l->lda * 2, ahead = tiles * l->tile_bytes, count = l->gated ? 2 * tiles : tiles;
    const char *a = (const char *)l->a + row * lda;
    float c[2 * TILE_ROWS * 2 * TILE] __attribute__((aligned(64)));
#define FEW(bits)                                                                                                                 \
    if (count == 4) few_rows(4, bits, a, lda, b, ahead, l->depth, c);                                                                    \
    else if (count == 2) few_rows(2, bits, a, lda, b, ahead, l->depth, c);                                                               \
    else few_rows(1, bits, a, lda, b, ahead, l->depth, c);
    if (rows > TILE_ROWS) count == 2 ? many_rows(2, a, lda, b, l->depth, c) : many_rows(1, a, lda, b, l->depth, c);
    else if (l->bits == 4) { FEW(4) }
    else if (l->bits == 8) { FEW(8) }
    else { FEW(0) }
#undef FEW
    linear_put(l, c, l->bias + tile * TILE, c + tiles * TILE, count * TILE, row, rows, tile, tiles);
}

void linear_on_matrix_tiles(const struct linear *l, bf16 *widened, long row, long rows, long tile, long tiles) {
    long end = tile + tiles, block;
    for (long whole = rows / (2 * TILE_ROWS) * (2 * TILE_ROWS); rows > 0; row += whole, rows -= whole, whole = rows) {
        if (!whole) continue;
        block = whole < 2 * TILE_ROWS ? whole : 2 * TILE_ROWS;
        configure(block);
        long most = (block > TILE_ROWS ? 2 : 4) / (l->gated ? 2 : 1);
        for (long t = tile, n; t < end; t += n) { /* these tiles of the weight stay in cache while all rows pass */
            n = end - t >= most ? most : end - t == 3 ? 2 : end - t;
            const char *b[4];
            for (long i = 0; i < (l->gated ? 2 * n : n); i++) {
                b[i] = (const char *)l->w + (t + i % n + (i < n ? 0 : l->tiles)) * l->tile_bytes; /* gates, then ups */
                if (!l->bits || block <= TILE_ROWS) continue;
                bf16 *to = widened + i * l->depth * TILE;
                widen_groups(l->bits, b[i], l->depth / GROUP, n * l->tile_bytes, to);
                b[i] = (const char *)to;
            }
            for (long m = 0; m < whole; m += block) compute(l, b, row + m, block, t, n);
        }
    }
    tile_release();
}

#else

void linear_on_matrix_tiles(const struct linear *l, bf16 *widened, long row, long rows, long tile, long tiles) {
    (void)l, (void)widened, (void)row, (void)rows, (void)tile, (void)tiles;
}

#endif
