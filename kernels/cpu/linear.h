/* A product x @ weight.T + bias, and how it is cut into items of work. */
#pragma once
#include "vec.h"

struct linear {
    const void *x; /* [M, ldx] */
    const void *a; /* the same as the kernels take it, row stride lda: float32, or bfloat16 if DOT_PAIRS or on matrix tiles */
    const void *w; /* [tiles][depth][TILE], in bfloat16 [tiles][depth / 2][TILE][2], or [tiles][depth / GROUP] groups of quantized.h; if gated
                      twice as many, those of gates first */
    const float *bias;
    void *out;    /* [M, N] */
    long M, N, K; /* N columns of the output: if gated, of the activation */
    long depth, ldx, lda, rows_per_item, tiles, tiles_per_item, tile_items;
    long tile_bytes; /* of w */
    int half, bits, on_tiles, gated, wide; /* bits of a weight if it is quantized, else 0; wide: bfloat16 is widened again on its way out */
    int turned; /* the weight is A on matrix tiles, and x B */
    float *scratch; /* for each thread C, or on matrix tiles whether x is turned, and a quantized weight's part in bfloat16 or x turned; then,
                       once, a if it isn't x */
    long c_floats, scratch_floats;
};

/* x for a product on matrix tiles that is `turned`: for each 16 rows [depth / 2][16][2]. */
void linear_turn(const struct linear *l, bf16 *turned);

/* An item of bfloat16 on matrix tiles: `rows` rows from `row`, `tiles` tiles of the output from `tile`; `scratch` holds x if that is turned,
   else it has room for two tiles. */
void linear_on_matrix_tiles(const struct linear *l, bf16 *scratch, long row, long rows, long tile, long tiles);

/* Rounds sums c [rows][tiles * TILE], rows ldc apart, plus a bias (unless that is null: then they have it already) into the output; if gated
   silu(c) * up, where up is another such array whose bias follows at `bias + N`. */
void linear_put(const struct linear *l, const float *c, const float *bias, const float *up, long ldc, long row, long rows, long tile, long tiles);
