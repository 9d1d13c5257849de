/* Matrix tiles (Intel AMX): one instruction multiplies up to 16 rows of A, 32 bfloat16 each, with a tile of B of 16 columns, and adds to as
   many float32 sums.  B is as in gemm.h: a tile's rows are pairs k, k+1 of 16 columns, so the packed weight and the KV cache serve as
   they are.

   An instruction sums its own products first and then adds them to C, so an output's bits depend on where the inner dimension is cut:
   always at multiples of the same depth, counted from the same place.  They don't depend on the other rows.

   Tests define EMULATE_TILES to run this code where the instructions are missing. */
#pragma once
#include "vec.h"

#ifndef MATRIX_TILES
#if defined(EMULATE_TILES) || defined(__AMX_BF16__) && defined(__linux__)
#define MATRIX_TILES 1
#else
#define MATRIX_TILES 0
#endif
#endif

#define TILE_ROWS 16
#define TILE_DEPTH 32

/* Whether this process may use them: the kernel wants to be asked, because they make a thread's state larger. */
int matrix_tiles(void);

/* What this thread's registers are configured for, a number that stands for the shapes; 0 if for nothing.  They stay so from one item of a
   loop to the next, and are given back at its end: a thread with tiles has 8 KB more to be saved whenever another takes its place. */
extern __thread long tiles_configured;
#define TILES_FOR_ATTENTION(rows) (1 + (rows))
#define TILES_FOR_LINEAR(rows) (100 + (rows))

/* For each of the 8 registers its rows, and bytes in a row. */
struct tile_shapes {
    uint8_t palette, start_row, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

#if MATRIX_TILES && !defined(EMULATE_TILES)
/* The compiler doesn't know that these read memory. */
#define READS(p) __asm__ volatile("" ::"r"(p) : "memory")
#define tile_configure(shapes) do { READS(shapes); _tile_loadconfig(shapes); } while (0)
#define tile_release() _tile_release()
#define tile_zero(t) _tile_zero(t)
#define tile_load(t, p, stride) do { READS(p); _tile_loadd(t, p, stride); } while (0)
/* tile_load of what need not stay in L1 */
#define tile_stream(t, p, stride) do { READS(p); _tile_stream_loadd(t, p, stride); } while (0)
#define tile_store(t, p, stride) do { _tile_stored(t, p, stride); READS(p); } while (0)
#define tile_multiply(c, a, b) _tile_dpbf16ps(c, a, b)
#elif MATRIX_TILES
static __thread struct {
    struct tile_shapes shapes;
    char tile[8][16][64];
} emulated;

static inline void tile_configure(const struct tile_shapes *shapes) { memset(&emulated, 0, sizeof emulated), emulated.shapes = *shapes; }
static inline void tile_release(void) { memset(&emulated, 0, sizeof emulated); }
static inline void tile_zero(int t) { memset(emulated.tile[t], 0, sizeof emulated.tile[t]); }
static inline void tile_load(int t, const void *p, long stride) {
    tile_zero(t);
    for (long row = 0; row < emulated.shapes.rows[t]; row++) memcpy(emulated.tile[t][row], (const char *)p + row * stride, emulated.shapes.bytes[t]);
}
#define tile_stream tile_load
static inline void tile_store(int t, void *p, long stride) {
    for (long row = 0; row < emulated.shapes.rows[t]; row++) memcpy((char *)p + row * stride, emulated.tile[t][row], emulated.shapes.bytes[t]);
}
static inline void tile_multiply(int c, int a, int b) {
    for (long m = 0; m < emulated.shapes.rows[c]; m++)
        for (long n = 0; n < emulated.shapes.bytes[c] / 4; n++) {
            float even = 0, odd = 0, sum;
            for (long k = 0; k < emulated.shapes.bytes[a] / 4; k++) {
                bf16 x[2], w[2];
                memcpy(x, emulated.tile[a][m] + 4 * k, 4);
                memcpy(w, emulated.tile[b][k] + 4 * n, 4);
                even += bf16_to_float(x[0]) * bf16_to_float(w[0]);
                odd += bf16_to_float(x[1]) * bf16_to_float(w[1]);
            }
            memcpy(&sum, emulated.tile[c][m] + 4 * n, 4);
            sum += even + odd;
            memcpy(emulated.tile[c][m] + 4 * n, &sum, 4);
        }
}
#endif
