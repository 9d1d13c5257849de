/* linear.c's items on matrix tiles: the whole inner dimension in registers, 32 rows by 2 tiles, or up to 16 rows by 4. */
#include "linear.h"

#include "gemm.h"
#include "matrix_tiles.h"

#if MATRIX_TILES

#define AHEAD 8192 /* bytes; where rows are few, the weight comes from memory and must be asked for early */

/* Adds the bias to C[rows][tiles * 16] and rounds it into `out`. */
static void put_rows(const struct linear *l, const float *c, long ldc, long row, long rows, long tile, long tiles) {
    long first = tile * TILE, columns = first + tiles * TILE < l->N ? tiles * TILE : l->N - first;
    const float *bias = l->bias + first;
    for (long m = 0; m < rows; m++, c += ldc) {
        bf16 *to = (bf16 *)l->out + (row + m) * l->N + first;
        long j = 0;
        for (; j + VL <= columns; j += VL) vstore_bf16(to + j, vload(c + j) + vload(bias + j));
        for (; j < columns; j++) to[j] = bf16_from_float(c[j] + bias[j]);
    }
}

INLINE void fetch_tile(const char *p) { UNROLL for (int line = 0; line < 16; line++) FETCH(p + 64 * line); }

/* C registers 0 .. 3, one for each tile; A in 4, B in 5. */
INLINE void few_rows(int NT, const char *a, long lda, const char *b, long tile_bytes, long depth, float *c) {
    tile_zero(0);
    if (NT > 1) tile_zero(1);
    if (NT > 2) tile_zero(2);
    if (NT > 3) tile_zero(3);
#define STEP(n) if (NT > n) { fetch_tile(b + n * tile_bytes + AHEAD); tile_load(5, b + n * tile_bytes, 64); tile_multiply(n, 4, 5); }
    for (long k = 0; k < depth; k += TILE_DEPTH, a += TILE_DEPTH * 2, b += TILE_DEPTH * TILE * 2) {
        tile_load(4, a, lda);
        STEP(0) STEP(1) STEP(2) STEP(3)
    }
#undef STEP
    tile_store(0, c, NT * TILE * 4);
    if (NT > 1) tile_store(1, c + TILE, NT * TILE * 4);
    if (NT > 2) tile_store(2, c + 2 * TILE, NT * TILE * 4);
    if (NT > 3) tile_store(3, c + 3 * TILE, NT * TILE * 4);
}

/* C registers 0, 1 for rows 0 .. 15 and 2, 3 for the others; A in 4 and 5, B in 6 and 7. */
INLINE void many_rows(int NT, const char *a, long lda, const char *b, long tile_bytes, long depth, float *c) {
    const char *lower = a + TILE_ROWS * lda;
    tile_zero(0);
    tile_zero(2);
    if (NT > 1) { tile_zero(1); tile_zero(3); }
    for (long k = 0; k < depth; k += TILE_DEPTH, b += TILE_DEPTH * TILE * 2) {
        tile_load(6, b, 64);
        tile_load(4, a + k * 2, lda);
        tile_multiply(0, 4, 6);
        tile_load(5, lower + k * 2, lda);
        tile_multiply(2, 5, 6);
        if (NT > 1) {
            tile_load(7, b + tile_bytes, 64);
            tile_multiply(1, 4, 7);
            tile_multiply(3, 5, 7);
        }
    }
    tile_store(0, c, NT * TILE * 4);
    tile_store(2, c + TILE_ROWS * NT * TILE, NT * TILE * 4);
    if (NT > 1) { tile_store(1, c + TILE, NT * TILE * 4); tile_store(3, c + TILE_ROWS * NT * TILE + TILE, NT * TILE * 4); }
}

static void configure(long upper, long lower) {
    struct tile_shapes s = {.palette = 1};
    for (int t = 0; t < 8; t++) s.bytes[t] = 64;
    if (lower) {
        s.rows[0] = s.rows[1] = s.rows[4] = upper;
        s.rows[2] = s.rows[3] = s.rows[5] = lower;
        s.rows[6] = s.rows[7] = TILE_ROWS;
    } else {
        s.rows[0] = s.rows[1] = s.rows[2] = s.rows[3] = s.rows[4] = upper;
        s.rows[5] = s.rows[6] = s.rows[7] = TILE_ROWS;
    }
    tile_configure(&s);
}

void linear_on_matrix_tiles(const struct linear *l, long row, long rows, long tile, long tiles) {
    long tile_bytes = l->depth * TILE * 2, lda = l->lda * 2, end = tile + tiles;
    const char *a = (const char *)l->a + row * lda, *w = (const char *)l->w;
    float c[2 * TILE_ROWS * 2 * TILE] __attribute__((aligned(64)));
    long whole = rows / (2 * TILE_ROWS) * (2 * TILE_ROWS), rest = rows - whole;
#define MANY(NT, first, count)                                                                                                    \
    many_rows(NT, a + (first) * lda, lda, w + t * tile_bytes, tile_bytes, l->depth, c),                                           \
        put_rows(l, c, NT * TILE, row + (first), count, t, NT)
#define FEW(NT)                                                                                                                   \
    few_rows(NT, a + whole * lda, lda, w + t * tile_bytes, tile_bytes, l->depth, c), put_rows(l, c, NT * TILE, row + whole, rest, t, NT)
    if (whole) { /* two tiles of the weight stay in cache while all rows pass */
        configure(TILE_ROWS, TILE_ROWS);
        long t = tile;
        for (; t + 2 <= end; t += 2) for (long m = 0; m < whole; m += 2 * TILE_ROWS) MANY(2, m, 2 * TILE_ROWS);
        for (; t < end; t++) for (long m = 0; m < whole; m += 2 * TILE_ROWS) MANY(1, m, 2 * TILE_ROWS);
    }
    long t = tile;
    if (rest > TILE_ROWS) {
        configure(TILE_ROWS, rest - TILE_ROWS);
        for (; t + 2 <= end; t += 2) MANY(2, whole, rest);
        for (; t < end; t++) MANY(1, whole, rest);
    } else if (rest) {
        configure(rest, 0);
        for (; t + 4 <= end; t += 4) FEW(4);
        if (end - t == 3) FEW(3);
        else if (end - t == 2) FEW(2);
        else if (end - t == 1) FEW(1);
    }
#undef FEW
#undef MANY
    tile_release();
}

#else

void linear_on_matrix_tiles(const struct linear *l, long row, long rows, long tile, long tiles) {
    (void)l, (void)row, (void)rows, (void)tile, (void)tiles;
}

#endif
