/* linear.c's items on matrix tiles: the whole inner dimension in registers, 32 rows by 2 tiles, or up to 16 rows by 4.

   The weight is B, and x is A.  If rows are few a weight of 4 bits is A, because it is widened faster with an output's inputs side by side,
   and x, turned once by each thread, is B.  An instruction's sum is the same either way. */
#include "linear.h"

#include "gemm.h"
#include "matrix_tiles.h"
#include "quantized.h"

#if MATRIX_TILES

#define AHEAD 8192 /* bytes; where rows are few, the weight comes from memory and must be asked for early */

INLINE void fetch_tile(const char *p) { UNROLL for (int line = 0; line < 16; line++) FETCH(p + 64 * line); }

/* to[j][i] = from[i][j], 16 by 16 of 32 bits; rows of `from` and `to` are that many bytes apart. */
INLINE void turn(const void *from, long from_row, void *to, long to_row) {
#if VBYTES == 64 && defined(__AVX512F__)
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    __m512i r[16], zipped[16];
    UNROLL for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512((const char *)from + i * from_row);
    UNROLL for (int time = 0; time < 4; time++) { /* each turns the 8 bits of row and lane by one */
        UNROLL for (int i = 0; i < 8; i++) {
            zipped[2 * i] = _mm512_permutex2var_epi32(r[i], low, r[i + 8]);
            zipped[2 * i + 1] = _mm512_permutex2var_epi32(r[i], high, r[i + 8]);
        }
        UNROLL for (int i = 0; i < 16; i++) r[i] = zipped[i];
    }
    UNROLL for (int i = 0; i < 16; i++) _mm512_storeu_si512((char *)to + i * to_row, r[i]);
#else
    for (long i = 0; i < 16; i++)
        for (long j = 0; j < 16; j++) memcpy((char *)to + j * to_row + 4 * i, (const char *)from + i * from_row + 4 * j, 4);
#endif
}

void linear_turn(const struct linear *l, bf16 *turned) {
    for (long row = 0; row < l->M; row += TILE_ROWS)
        for (long k = 0; k < l->K; k += GROUP, turned += TILE_ROWS * GROUP) {
            const bf16 *x = (const bf16 *)l->x + row * l->ldx + k;
            if (row + TILE_ROWS <= l->M) {
                turn(x, l->ldx * 2, turned, 64);
                continue;
            }
            bf16 padded[TILE_ROWS][GROUP];
            for (long m = 0; m < TILE_ROWS; m++) memcpy(padded[m], x + (row + m < l->M ? m : 0) * l->ldx, sizeof *padded);
            turn(padded, 64, turned, 64);
        }
}

/* Up to RT times 16 rows and a weight of 4 bits, which is A in 4; x is B in 5 and 6.  C registers 0 .. 3, one for each tile (and 16 rows), are
   turned on their way to c.  A group is widened while the one before is multiplied, its numbers are loaded one earlier. */
INLINE void few_rows_turned(int NT, int RT, const bf16 *x, const char *const *w, long ahead, long depth, float *c) {
    bf16 widened[2][GROUP_WIDE] __attribute__((aligned(64)));
    float numbers[2][2 * TILE] __attribute__((aligned(64))), sums[TILE][TILE_ROWS] __attribute__((aligned(64)));
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
#define AT(n) (w[(n) % NT] + (g + (n) / NT) * group_bytes(4)) /* the group n steps after tile 0's of g */
    long g = 0, step = 0, groups = depth / GROUP, steps = groups * NT;
    load_numbers(AT(0), numbers[0]);
    widen_rows(AT(0), numbers[0], widened[0]);
    if (steps > 1) load_numbers(AT(1), numbers[1]);
#define STEP(n, below)                                                                                                            \
    if (NT > n) {                                                                                                                 \
        if (step + 2 < steps) load_numbers(AT(n + 2), numbers[step % 2]);                                                         \
        if (step + 1 < steps) {                                                                                                   \
            fetch_group(4, AT(n + 1) + ahead);                                                                                    \
            widen_rows(AT(n + 1), numbers[(step + 1) % 2], widened[(step + 1) % 2]);                                              \
        }                                                                                                                         \
        tile_load(4, widened[step % 2], 64);                                                                                      \
        tile_multiply(n, 4, 5);                                                                                                   \
        if (RT > 1) tile_multiply(below, 4, 6);                                                                                   \
        step++;                                                                                                                   \
    }
    for (; g < groups; g++) {
        tile_load(5, x + g * TILE_ROWS * GROUP, 64);
        if (RT > 1) tile_load(6, x + (groups + g) * TILE_ROWS * GROUP, 64);
        STEP(0, 2) STEP(1, 3) STEP(2, 2) STEP(3, 3)
    }
#undef STEP
#undef AT
#define PUT(t, row, n) { tile_store(t, sums, 64); turn(sums, 64, c + (row) * NT * TILE + (n) * TILE, NT * TILE * 4); }
    PUT(0, 0, 0)
    if (NT > 1) PUT(1, 0, 1)
    if (NT > 2) { PUT(2, 0, 2) PUT(3, 0, 3) }
    if (RT > 1) PUT(2, TILE_ROWS, 0)
    if (RT > 1 && NT > 1) PUT(3, TILE_ROWS, 1)
#undef PUT
}

/* C registers 0 .. 3, one for each tile; A in 4, B in 5.  Of a weight of 8 bits a group is widened while the one before is multiplied. */
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
    if (tiles_configured == TILES_FOR_LINEAR(rows)) return;
    tiles_configured = TILES_FOR_LINEAR(rows);
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
static void compute(const struct linear *l, const char *const *b, const bf16 *turned, long row, long rows, long tile, long tiles) {
    long lda = l->lda * 2, ahead = tiles * l->tile_bytes, count = l->gated ? 2 * tiles : tiles;
    const char *a = (const char *)l->a + row * lda;
    float c[2 * TILE_ROWS * 2 * TILE] __attribute__((aligned(64)));
#define FEW(bits)                                                                                                                 \
    if (count == 4) few_rows(4, bits, a, lda, b, ahead, l->depth, c);                                                                    \
    else if (count == 2) few_rows(2, bits, a, lda, b, ahead, l->depth, c);                                                               \
    else few_rows(1, bits, a, lda, b, ahead, l->depth, c);
#define TURNED(NT, RT) few_rows_turned(NT, RT, turned, b, ahead, l->depth, c)
    if (l->turned && rows > TILE_ROWS) count == 2 ? TURNED(2, 2) : TURNED(1, 2);
    else if (l->turned) count == 4 ? TURNED(4, 1) : count == 2 ? TURNED(2, 1) : TURNED(1, 1);
    else if (rows > TILE_ROWS) count == 2 ? many_rows(2, a, lda, b, l->depth, c) : many_rows(1, a, lda, b, l->depth, c);
    else if (l->bits == 8) { FEW(8) }
    else { FEW(0) }
#undef TURNED
#undef FEW
    linear_put(l, c, l->bias + tile * TILE, c + tiles * TILE, count * TILE, row, rows, tile, tiles);
}

void linear_on_matrix_tiles(const struct linear *l, bf16 *scratch, long row, long rows, long tile, long tiles) {
    long end = tile + tiles, block;
    for (long whole = rows / (2 * TILE_ROWS) * (2 * TILE_ROWS); rows > 0; row += whole, rows -= whole, whole = rows) {
        if (!whole) continue;
        block = whole < 2 * TILE_ROWS ? whole : 2 * TILE_ROWS;
        configure(l->turned ? 2 * TILE_ROWS : block);
        int widen = l->bits && !l->turned && (l->bits == 4 || block > TILE_ROWS);
        long most = (widen || block > TILE_ROWS ? 2 : 4) / (l->gated ? 2 : 1);
        for (long t = tile, n; t < end; t += n) { /* these tiles of the weight stay in cache while all rows pass */
            n = end - t >= most ? most : end - t == 3 ? 2 : end - t;
            const char *b[4];
            for (long i = 0; i < (l->gated ? 2 * n : n); i++) {
                b[i] = (const char *)l->w + (t + i % n + (i < n ? 0 : l->tiles)) * l->tile_bytes; /* gates, then ups */
                if (!widen) continue;
                bf16 *to = scratch + i * l->depth * TILE;
                widen_groups(l->bits, b[i], l->depth / GROUP, n * l->tile_bytes, to);
                b[i] = (const char *)to;
            }
            for (long m = 0; m < whole; m += block) compute(l, b, scratch + (row + m) * l->depth, row + m, block, t, n);
        }
    }
}

#else

void linear_turn(const struct linear *l, bf16 *turned) { (void)l, (void)turned; }

void linear_on_matrix_tiles(const struct linear *l, bf16 *scratch, long row, long rows, long tile, long tiles) {
    (void)l, (void)scratch, (void)row, (void)rows, (void)tile, (void)tiles;
}

#endif
