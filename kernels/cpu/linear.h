/* A product x @ weight.T + bias, and how it is cut into items of work. */
#pragma once
#include "vec.h"

struct linear {
    const void *x; /* [M, ldx] */
    const void *a; /* the same as the kernels take it, row stride lda: float32, or bfloat16 if DOT_PAIRS or on matrix tiles */
    const void *w; /* [tiles][depth][TILE], in bfloat16 [tiles][depth / 2][TILE][2] */
    const float *bias; /* [tiles * TILE] */
    void *out; /* [M, N] */
    long M, N, K, depth, ldx, lda, rows_per_item, tiles, tiles_per_item, tile_items;
    int half, on_tiles;
    float *scratch; /* a block of C for each thread, then a if it isn't x */
    long scratch_floats;
};

/* An item of bfloat16 on matrix tiles: `rows` rows from `row`, `tiles` tiles from `tile`. */
void linear_on_matrix_tiles(const struct linear *l, long row, long rows, long tile, long tiles);
