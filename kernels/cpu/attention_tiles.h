/* attention.c's two products on matrix tiles, for panels of up to 16 rows.  `dim` is a multiple of 16, all is bfloat16 but the results.
   Meanwhile `upcoming` is fetched. */
#pragma once
#include "attention.h"
#include "upcoming.h"

#define CHUNK_TILES (CHUNK / TILE)

/* scores[rows][..] = q k for `count` tiles of 16 tokens; rows of scores are `stride` apart. */
void tile_scores(long rows, const bf16 *q, long dim, const void *const *k, long count, float *scores, long stride, struct upcoming *upcoming);

/* values[rows][dim] = p v, or += unless it is the beginning, over `valid` tokens; rows of p are `stride` apart, and 0 from `valid` to the
   end of its tile.  `padded` is scratch for a tile of v. */
void tile_values(long rows, int begin, const bf16 *p, long stride, const void *const *v, long valid, long dim, bf16 *padded, float *values,
                 struct upcoming *upcoming);

/* A chunk that all rows see whole. */
struct whole_chunk {
    long rows, dim;
    const bf16 *q; /* [rows][dim] */
    const char *tiles[2 * CHUNK_TILES]; /* of keys, then of values */
    float scale, *scores;          /* scratch [16][CHUNK] */
    bf16 *weights;                 /* the same */
    float *values, *largest, *sum; /* the partial results: [rows][dim]; [rows] */
};

static inline int whole_chunks_of(long dim) { return dim == 32 || dim == 64 || dim == 96 || dim == 128; } /* whether there is code for it */
void tile_whole_chunk(const struct whole_chunk *c, struct upcoming *upcoming);
