/* x @ weight.T + bias with the weight packed once, for one row to thousands, each row's bits the same in any batch.

   Blocking as in GotoBLAS/BLIS: MC x KC of x stay in L2 while tiles of KC x 16 of the weight pass through L1; partial sums pass through
   float32 memory, which changes no bit.  The next tile is fetched from memory while a tile is multiplied, evenly over its panels:
   for 4 to 100 rows that decides the speed. */
#include "linear.h"

#include "gemm.h"
#include "matrix_tiles.h"
#include "operations.h"
#include "parallel.h"
#include "quantized.h"
#include "silu.h"

#define KC 576 /* even */
#define MC 144
#define AHEAD 8192 /* bytes */
#define MC_TILES 256 /* rows of an item on matrix tiles */
#define TURNED_ROWS 64 /* at most: each 32 widen the weight for themselves */
#define STREAM_DEPTH 64 /* of a quantized weight that few rows pass by: it is used once, from L1 */

static long packed_depth(long K, int half) { return half ? (K + TILE_DEPTH - 1) / TILE_DEPTH * TILE_DEPTH : K; }

/* Weight [N, K] to [N/16][K][16] float32 or [N/16][depth/2][16][2] bfloat16, depth K up to a multiple of 32; zero where N or K is padded. */
void radixkv_pack_weight(const void *weight, void *packed, long N, long K, int half) {
    long tiles = (N + TILE - 1) / TILE, depth = packed_depth(K, half);
    for (long t = 0; t < tiles; t++)
        for (long k = 0; k < depth; k++)
            for (long j = 0; j < TILE; j++) {
                long n = t * TILE + j;
                int real = n < N && k < K;
                if (half) ((bf16 *)packed)[(t * depth + k / 2 * 2) * TILE + j * 2 + k % 2] = real ? ((const bf16 *)weight)[n * K + k] : 0;
                else ((float *)packed)[(t * depth + k) * TILE + j] = real ? ((const float *)weight)[n * K + k] : 0;
            }
}

/* Scales [N, K / GROUP] in float16, offsets as many (none at 8 bits), codes [N, K] of a byte each to groups (quantized.h); K a multiple of
   GROUP; zero where N is padded. */
void radixkv_pack_quantized(const uint16_t *scales, const uint16_t *offsets, const uint8_t *codes, char *packed, long N, long K, int bits) {
    long groups = K / GROUP, tiles = (N + TILE - 1) / TILE;
    memset(packed, 0, tiles * groups * group_bytes(bits));
    for (long n = 0; n < N; n++)
        for (long g = 0; g < groups; g++) {
            char *group = packed + (n / TILE * groups + g) * group_bytes(bits), *words = group + (bits == 4 ? 4 : 2) * TILE;
            long column = n % TILE;
            ((uint16_t *)group)[column] = scales[n * groups + g];
            if (bits == 4) ((uint16_t *)group)[TILE + column] = offsets[n * groups + g];
            for (long k = 0; k < GROUP; k++) {
                uint32_t code = codes[n * K + g * GROUP + k], *word = (uint32_t *)words;
                if (bits == 4) word[word_of_code(column, k)] |= code << bit_of_code(column, k);
                else word[k / 8 * PAIR_ROW + 2 * column + k % 2] |= code << k / 2 % 4 * 8;
            }
        }
}

/* Up to this many rows read several tiles side by side, which the CPU prefetches well unasked; fewer streams it doesn't. */
#define MANY_STREAMS 3

/* C[MR][NT * 16] = start + A * B, where start is the bias in the first block of K and C itself in later ones. */
INLINE void kernel(int MR, int NT, int half, const void *a, long lda, const char *b, long tile_bytes, long k, const float *bias, float *c,
                   long ldc, const char *ahead, long step) {
    vf acc[MAX_MR * MAX_NT * TV];
    const void *tile[MAX_NT];
    const char *later[MAX_NT];
    UNROLL for (int n = 0; n < NT; n++) tile[n] = b + n * tile_bytes, later[n] = ahead + n * tile_bytes;
    UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NT * TV; n++)
        acc[m * NT * TV + n] = vload(bias ? bias + n * VL : c + m * ldc + n * VL);
    if (half && DOT_PAIRS) accumulate_pairs(MR, NT, MR > MANY_STREAMS, acc, a, lda, tile, TILE, k, later, step);
    else accumulate(MR, NT, half, MR > MANY_STREAMS, acc, a, lda, tile, TILE, k, later, step);
    UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NT * TV; n++) vstore(c + m * ldc + n * VL, acc[m * NT * TV + n]);
}

/* `tiles` tiles for a panel of `rows` rows. */
static void panel(int half, long rows, const void *a, long lda, const char *b, long tile_bytes, long tiles, long k, const float *bias,
                  float *c, long ldc, const char *ahead, long step) {
#define WIDTH(MR, NT)                                                                                                             \
    for (; tiles >= NT; tiles -= NT, b += NT * tile_bytes, ahead += NT * tile_bytes, c += NT * TILE, bias += bias ? NT * TILE : 0) \
        half ? kernel(MR, NT, 1, a, lda, b, tile_bytes, k, bias, c, ldc, ahead, step)                                             \
             : kernel(MR, NT, 0, a, lda, b, tile_bytes, k, bias, c, ldc, ahead, step);
#define ROWS(MR)                                                                                                                  \
    WIDTH(MR, WIDE(MR))                                                                                                           \
    WIDTH(MR, 1)
    FOR_ROWS(rows, ROWS)
#undef ROWS
#undef WIDTH
}

INLINE void put(const struct linear *l, const float *c, const float *bias, const float *up, long ldc, long row, long rows, long first,
                long columns, int half, int gated, int wide) {
    for (long m = 0; m < rows; m++, c += ldc, up += ldc) {
        long to = (row + m) * l->N + first, j = 0;
        for (; j < columns; j += VL) { /* c goes on to the end of its tile */
            vf v = vload(c + j);
            if (bias) v += vload(bias + j);
            if (gated) {
                vf u = vload(up + j);
                if (bias) u += vload(bias + l->N + j);
                v = silu_mul(half ? vround_bf16(v) : v, half ? vround_bf16(u) : u, half);
            }
            if (wide) v = vround_bf16(v);
            if (j + VL <= columns) store_from_float(l->out, to + j, v, half && !wide);
            else for (long i = 0; j + i < columns; i++) put_float(l->out, to + j + i, v[i], half && !wide);
        }
    }
}

void linear_put(const struct linear *l, const float *c, const float *bias, const float *up, long ldc, long row, long rows, long tile, long tiles) {
    long first = tile * TILE, columns = first + tiles * TILE < l->N ? tiles * TILE : l->N - first;
#define PUT(half, gated, wide) put(l, c, bias, up, ldc, row, rows, first, columns, half, gated, wide)
    if (l->gated) l->half ? PUT(1, 1, 0) : PUT(0, 1, 0);
    else if (l->wide) PUT(1, 0, 1);
    else l->half ? PUT(1, 0, 0) : PUT(0, 0, 0);
#undef PUT
}

/* multiply() for a quantized weight, a few tiles widened at a time. */
static void multiply_quantized(const struct linear *l, float *c, bf16 *widened, long row, long rows, long tile, long tiles) {
    long step = WIDE(MAX_MR), depth = rows > MAX_MR ? KC : STREAM_DEPTH, ldc = tiles * TILE, panels = panel_count(rows, MAX_MR);
    const char *w = (const char *)l->w + tile * l->tile_bytes;
    const float *bias = l->bias + tile * TILE;
    for (long k = 0; k < l->K; k += depth) {
        long kc = l->K - k < depth ? l->K - k : depth, pitch = depth * TILE * sizeof *widened;
        for (long t = 0; t < tiles; t += step) {
            long count = tiles - t < step ? tiles - t : step;
            for (long n = 0; n < count; n++)
                widen_groups(l->bits, w + (t + n) * l->tile_bytes + k / GROUP * group_bytes(l->bits), kc / GROUP, count * l->tile_bytes, element(widened, n * depth * TILE, 1));
            for (long p = 0; p < panels; p++) {
                long m = panel_start(rows, panels, p), height = panel_start(rows, panels, p + 1) - m;
                panel(1, height, element(l->a, (row + m) * l->lda + k, DOT_PAIRS), l->lda, (char *)widened, pitch, count, kc,
                      k ? 0 : bias + t * TILE, c + m * ldc + t * TILE, ldc, (char *)widened, 0);
            }
        }
    }
}

/* C[rows][tiles * TILE] of rows from `row` and tiles from `tile` of the packed weight. */
static void multiply(const struct linear *l, float *c, long row, long rows, long tile, long tiles) {
    long tile_bytes = l->tile_bytes, row_bytes = TILE * (l->half ? 2 : 4), ldc = tiles * TILE;
    const char *w = (const char *)l->w + tile * tile_bytes;
    const float *bias = l->bias + tile * TILE;
    int narrow = l->half && DOT_PAIRS; /* element size of a */
    if (rows <= MAX_MR) {
        panel(l->half, rows, element(l->a, row * l->lda, narrow), l->lda, w, tile_bytes, tiles, l->K, bias, c, ldc, w + AHEAD, row_bytes);
        return;
    }
    long panels = panel_count(rows, MAX_MR), step = WIDE(MAX_MR);
    for (long k = 0; k < l->K; k += KC) {
        long kc = l->K - k < KC ? l->K - k : KC;
        for (long t = 0; t < tiles; t += step) {
            const char *b = w + t * tile_bytes + k * row_bytes;
            const char *next = t + step < tiles ? b + step * tile_bytes : k + KC < l->K ? w + (k + KC) * row_bytes : w + tiles * tile_bytes;
            for (long p = 0; p < panels; p++) {
                long m = panel_start(rows, panels, p), count = panel_start(rows, panels, p + 1) - m;
                panel(l->half, count, element(l->a, (row + m) * l->lda + k, narrow), l->lda, b, tile_bytes, tiles - t < step ? tiles - t : step, kc,
                      k ? 0 : bias + t * TILE, c + m * ldc + t * TILE, ldc, next + m * kc / rows * row_bytes, (row_bytes * count + rows - 1) / rows);
            }
        }
    }
}

/* The first tile of an item: on matrix tiles items are as even as pairs of tiles can be, so that the threads' shares are, too. */
static long item_start(const struct linear *l, long item) {
    long tile = l->on_tiles ? (l->tiles + 1) / 2 * item / l->tile_items * 2 : item * l->tiles_per_item;
    return tile < l->tiles ? tile : l->tiles;
}

static void linear_item(void *context, long item, int thread) {
    const struct linear *l = context;
    long column = item % l->tile_items, tile = item_start(l, column), tiles = item_start(l, column + 1) - tile;
    long row = item / l->tile_items * l->rows_per_item;
    long rows = l->M - row < l->rows_per_item ? l->M - row : l->rows_per_item;
    float *c = l->scratch + thread * l->scratch_floats, *up = c + rows * tiles * TILE;
    bf16 *widened = (bf16 *)(c + l->c_floats);
    int *turned = (int *)c;
    if (l->on_tiles) {
        if (l->turned && !*turned) *turned = 1, linear_turn(l, widened);
        linear_on_matrix_tiles(l, widened, row, rows, tile, tiles);
        return;
    }
    for (int part = 0; part <= l->gated; part++) {
        long first = part * l->tiles + tile;
        if (l->bits) multiply_quantized(l, part ? up : c, widened, row, rows, first, tiles);
        else multiply(l, part ? up : c, row, rows, first, tiles);
    }
    linear_put(l, c, 0, up, tiles * TILE, row, rows, tile, tiles);
}

static void widen_item(void *context, long item, int thread) {
    (void)thread;
    const struct linear *l = context;
    for (long m = item * 8; m < l->M && m < item * 8 + 8; m++) {
        const bf16 *from = (const bf16 *)l->x + m * l->ldx;
        float *to = (float *)l->a + m * l->lda;
        long k = 0;
        for (; k + VL <= l->K; k += VL) vstore(to + k, vload_bf16(from + k));
        for (; k < l->K; k++) to[k] = bf16_to_float(from[k]);
    }
}

static void pad_item(void *context, long item, int thread) {
    (void)thread;
    const struct linear *l = context;
    for (long m = item * 8; m < l->M && m < item * 8 + 8; m++) {
        bf16 *to = (bf16 *)l->a + m * l->lda;
        memcpy(to, (const bf16 *)l->x + m * l->ldx, l->K * sizeof *to);
        memset(to + l->K, 0, (l->lda - l->K) * sizeof *to);
    }
}

static void run(struct linear l, int threads) {
    if (l.M == 0 || l.N == 0) return;
    l.a = l.x, l.lda = l.ldx;
    l.tiles = (l.N + TILE - 1) / TILE;
    l.depth = packed_depth(l.K, l.half);
    l.tile_bytes = l.bits ? l.depth / GROUP * group_bytes(l.bits) : l.depth * TILE * (l.half ? 2 : 4);
    l.on_tiles = l.half && matrix_tiles();
    long most_rows = l.on_tiles ? MC_TILES : MC, row_items = (l.M + most_rows - 1) / most_rows, multiple = l.on_tiles ? 2 * TILE_ROWS : MAX_MR;
    l.rows_per_item = ((l.M + row_items - 1) / row_items + multiple - 1) / multiple * multiple;
    long share = l.tiles * row_items / (threads * 6L);
    l.tiles_per_item = share < 4 ? 4 : share > 16 ? 16 : share / 4 * 4;
    if (threads == 1 || l.tiles_per_item > l.tiles) l.tiles_per_item = l.tiles < 16 ? l.tiles : 16;
    l.tile_items = (l.tiles + l.tiles_per_item - 1) / l.tiles_per_item;
    if (l.on_tiles && l.tile_items > 1 && row_items % threads) l.tile_items = (l.tile_items + threads - 1) / threads * threads;
    int widen = l.half && !DOT_PAIRS && !l.on_tiles, pad = l.on_tiles && l.depth > l.K;
    l.turned = l.on_tiles && l.bits == 4 && l.M <= TURNED_ROWS;
    l.c_floats = l.on_tiles ? 16 : l.rows_per_item * l.tiles_per_item * TILE * (l.gated ? 2 : 1);
    l.scratch_floats = l.c_floats + (!l.bits ? 0 : l.on_tiles ? (l.turned ? TURNED_ROWS : 2 * TILE) * l.depth / 2 : KC * WIDE(MAX_MR) * TILE / 2);
    l.scratch = scratch((l.scratch_floats * threads + (widen ? l.M * l.K : pad ? l.M * l.depth / 2 : 0)) * sizeof(float));
    if (widen || pad) {
        l.lda = widen ? l.K : l.depth;
        l.a = l.scratch + l.scratch_floats * threads;
        parallel_for((l.M + 7) / 8, l.M * l.K < 65536 ? 1 : threads, widen ? widen_item : pad_item, &l);
    }
    for (int t = 0; l.turned && t < threads; t++) *(int *)(l.scratch + t * l.scratch_floats) = 0;
    parallel_for(l.tile_items * row_items, threads, linear_item, &l);
}

/* out [M, N] = x [M, K] (row stride ldx) @ weight.T + bias; `bits` of a quantized weight, else 0. */
void radixkv_linear(const void *x, long ldx, const void *w, const float *bias, void *out, long M, long N, long K, int half, int bits, int threads) {
    run((struct linear){.x = x, .w = w, .bias = bias, .out = out, .M = M, .N = N, .K = K, .ldx = ldx, .half = half, .bits = bits}, threads);
}

/* The same, widened to float32 after it was rounded. */
void radixkv_wide_linear(const void *x, long ldx, const void *w, const float *bias, void *out, long M, long N, long K, int half, int bits, int threads) {
    run((struct linear){.x = x, .w = w, .bias = bias, .out = out, .M = M, .N = N, .K = K, .ldx = ldx, .half = half, .bits = bits, .wide = half}, threads);
}

/* out [M, N] = silu(gate) * up, where x @ weight.T + bias has gate [M, N] beside up [M, N]; N a multiple of TILE. */
void radixkv_gated_linear(const void *x, long ldx, const void *w, const float *bias, void *out, long M, long N, long K, int half, int bits, int threads) {
    run((struct linear){.x = x, .w = w, .bias = bias, .out = out, .M = M, .N = N, .K = K, .ldx = ldx, .half = half, .bits = bits, .gated = 1}, threads);
}
