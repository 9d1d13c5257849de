/* Both of attention's products on matrix tiles, K and V read where they lie.  Values go 16 tokens at a time, half of what the registers
   hold: two tiles of tokens lie in different blocks, and pieces of a chunk are cut between tiles. */
#include "attention_tiles.h"

#include "gemm.h"
#include "matrix_tiles.h"
#include "softmax.h"

#if MATRIX_TILES

/* Registers: sums in 0 .. 3; A and B for a full depth in 4 and 5, for half of it in 6 and 7.  A of a full depth fits where sums do, too. */
static void configure(long rows) {
    if (tiles_configured == TILES_FOR_ATTENTION(rows)) return;
    tiles_configured = TILES_FOR_ATTENTION(rows);
    struct tile_shapes s = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 32, 64}, .rows = {rows, rows, rows, rows, rows, 16, rows, 8}};
    tile_configure(&s);
}

#define ZERO(n) if (NT > n) tile_zero(n);
#define STORE(n) if (NT > n) tile_store(n, c + n * TILE, stride * 4);

/* The queries of HELD steps stay in registers 1 .. 4 while all keys pass, which pass L1 by: the scores are to stay there. */
INLINE void score(int HELD, const bf16 *q, long dim, const void *const *k, long count, float *c, long stride, struct upcoming *upcoming) {
#define HOLD(n, a) if (HELD > n) tile_load(a, q + n * 32, dim * 2);
#define STEP(n, a) if (HELD > n) { tile_stream(5, (const bf16 *)k[t] + n * 32 * TILE, 64); tile_multiply(0, a, 5); }
    HOLD(0, 1) HOLD(1, 2) HOLD(2, 3) HOLD(3, 4)
    for (long t = 0; t < count; t++) {
        fetch_upcoming(upcoming);
        tile_zero(0);
        STEP(0, 1) STEP(1, 2) STEP(2, 3) STEP(3, 4)
        tile_store(0, c + t * TILE, stride * 4);
    }
#undef HOLD
#undef STEP
}

/* The same for more steps, or half ones. */
static void score_any(const bf16 *q, long dim, const void *const *k, long count, float *c, long stride, struct upcoming *upcoming) {
    for (long t = 0; t < count; t++) {
        const bf16 *b = k[t];
        fetch_upcoming(upcoming);
        tile_zero(0);
        if (dim % 32) for (long d = 0; d < dim; d += 16) { tile_load(6, q + d, dim * 2); tile_stream(7, b + d * TILE, 64); tile_multiply(0, 6, 7); }
        else for (long d = 0; d < dim; d += 32) { tile_load(4, q + d, dim * 2); tile_stream(5, b + d * TILE, 64); tile_multiply(0, 4, 5); }
        tile_store(0, c + t * TILE, stride * 4);
    }
}

void tile_scores(long rows, const bf16 *q, long dim, const void *const *k, long count, float *scores, long stride, struct upcoming *upcoming) {
    configure(rows);
    switch (dim) {
    case 32: score(1, q, dim, k, count, scores, stride, upcoming); break;
    case 64: score(2, q, dim, k, count, scores, stride, upcoming); break;
    case 96: score(3, q, dim, k, count, scores, stride, upcoming); break;
    case 128: score(4, q, dim, k, count, scores, stride, upcoming); break;
    default: score_any(q, dim, k, count, scores, stride, upcoming);
    }
}

/* Columns d .. of a row: NT tiles. */
INLINE void value(int NT, int begin, const bf16 *p, long stride, const void *const *v, const bf16 *last, long whole, long d, long dim, float *c,
                  struct upcoming *upcoming) {
#define LOAD(n) if (NT > n) tile_load(n, c + n * TILE, dim * 4);
    if (begin) { ZERO(0) ZERO(1) ZERO(2) ZERO(3) }
    else { LOAD(0) LOAD(1) LOAD(2) LOAD(3) }
#undef LOAD
#define STEP(n) if (NT > n) { tile_stream(7, b + n * 2 * TILE, dim * 4); tile_multiply(n, 6, 7); }
    for (long t = 0; t < whole + (last != 0); t++) {
        const bf16 *b = (t < whole ? (const bf16 *)v[t] : last) + 2 * d; /* a column's pairs lie side by side */
        fetch_upcoming(upcoming);
        tile_load(6, p + t * TILE, stride * 2);
        STEP(0) STEP(1) STEP(2) STEP(3)
    }
#undef STEP
    stride = dim;
    STORE(0) STORE(1) STORE(2) STORE(3)
}

void tile_values(long rows, int begin, const bf16 *p, long stride, const void *const *v, long valid, long dim, bf16 *padded, float *values,
                 struct upcoming *upcoming) {
    configure(rows);
    long whole = valid / TILE, rest = valid % TILE;
    if (rest) { /* what nobody wrote may be anything, and 0 times that is not 0 */
        long pairs = rest / 2 * 2 * dim;
        memcpy(padded, v[whole], pairs * sizeof *padded);
        memset(padded + pairs, 0, (TILE * dim - pairs) * sizeof *padded);
        if (rest % 2) for (long d = 0; d < dim; d++) padded[pairs + 2 * d] = ((const bf16 *)v[whole])[pairs + 2 * d];
    }
    const bf16 *last = rest ? padded : 0;
    long d = 0;
#define VALUE(NT) value(NT, begin, p, stride, v, last, whole, d, dim, values + d, upcoming)
    for (; d + 4 * TILE <= dim; d += 4 * TILE) VALUE(4);
    if (dim - d == 3 * TILE) VALUE(3);
    else if (dim - d == 2 * TILE) VALUE(2);
    else if (dim - d == TILE) VALUE(1);
#undef VALUE
}

INLINE void whole(int HELD, const struct whole_chunk *c, struct upcoming *upcoming) {
    const long dim = HELD * 32;
    const void *const *k = (const void *const *)c->tiles, *const *v = k + CHUNK_TILES;
    for (long row = 0; row < c->rows; row += TILE_ROWS) {
        long rows = at_most(c->rows - row, TILE_ROWS);
        configure(rows);
        score(HELD, c->q + row * dim, dim, k, CHUNK_TILES, c->scores, CHUNK, upcoming);
        for (long r = 0; r < rows; r += SOFTMAX_ROWS) {
            long count = at_most(rows - r, SOFTMAX_ROWS);
            float *values = c->values + (row + r) * dim;
            for (long i = 0; i < count * dim; i += 16) CLAIM(values + i); /* another thread may have read them last */
            softmax_few(count, 1, c->scores + r * CHUNK, c->weights + r * CHUNK, c->scale, 0, CHUNK, c->largest + row + r, c->sum + row + r, upcoming);
        }
        UNROLL for (long d = 0; d < dim; d += 4 * TILE)
            value(dim - d < 4 * TILE ? (dim - d) / TILE : 4, 1, c->weights, CHUNK, v, 0, CHUNK_TILES, d, dim, c->values + row * dim + d, upcoming);
    }
}

void tile_whole_chunk(const struct whole_chunk *c, struct upcoming *upcoming) {
    switch (c->dim) {
    case 32: whole(1, c, upcoming); break;
    case 64: whole(2, c, upcoming); break;
    case 96: whole(3, c, upcoming); break;
    case 128: whole(4, c, upcoming); break;
    }
}

#else

void tile_whole_chunk(const struct whole_chunk *c, struct upcoming *upcoming) { (void)c, (void)upcoming; }
void tile_scores(long rows, const bf16 *q, long dim, const void *const *k, long count, float *scores, long stride, struct upcoming *upcoming) {
    (void)rows, (void)q, (void)dim, (void)k, (void)count, (void)scores, (void)stride, (void)upcoming;
}
void tile_values(long rows, int begin, const bf16 *p, long stride, const void *const *v, long valid, long dim, bf16 *padded, float *values,
                 struct upcoming *upcoming) {
    (void)rows, (void)begin, (void)p, (void)stride, (void)v, (void)valid, (void)dim, (void)padded, (void)values, (void)upcoming;
}

#endif
