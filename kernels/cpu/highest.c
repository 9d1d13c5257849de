/* The highest of each row of logits.  They fill more than a core's caches, and were written by all threads just before: each looks through
   what it has written. */
#include "parallel.h"
#include "vec.h"

#include <math.h>

#define COLUMNS 1024 /* of an item */

struct search {
    const float *x;
    uint64_t *best; /* of each row the key of what is highest so far */
    long rows, columns;
};

/* Larger for higher values, of equals for those further ahead; NaN is highest of all. */
static uint64_t key_of(float value, long column) {
    uint32_t bits;
    value += 0.0f; /* -0 equals 0 */
    memcpy(&bits, &value, 4);
    bits = value != value ? UINT32_MAX : bits >> 31 ? ~bits : bits | 0x80000000u;
    return (uint64_t)bits << 32 | (UINT32_MAX - (uint32_t)column);
}

static void search_item(void *context, long item, int thread) {
    (void)thread;
    const struct search *s = context;
    long from = item * COLUMNS, to = from + COLUMNS < s->columns ? from + COLUMNS : s->columns;
    for (long row = 0; row < s->rows; row++) {
        const float *x = s->x + row * s->columns;
        vf most[4] = {vset(-INFINITY), vset(-INFINITY), vset(-INFINITY), vset(-INFINITY)};
        vi unordered = {0};
        long i = from;
        for (; i + 4 * VL <= to; i += 4 * VL)
            UNROLL for (int j = 0; j < 4; j++) {
                vf v = vload(x + i + j * VL);
                most[j] = vmax(v, most[j]);
                unordered |= (vi)(v != v);
            }
        float highest = vmax_lanes(vmax(vmax(most[0], most[1]), vmax(most[2], most[3])));
        int nan = 0;
        for (int lane = 0; lane < VL; lane++) nan |= unordered[lane];
        for (; i < to; i++) {
            highest = x[i] > highest ? x[i] : highest;
            nan |= x[i] != x[i];
        }
        if (nan) highest = NAN;
        uint64_t known = __atomic_load_n(s->best + row, __ATOMIC_RELAXED), key = key_of(highest, from);
        if (key <= known) continue; /* even if it were the first */
        for (i = from; i < to - 1 && !(nan ? x[i] != x[i] : x[i] == highest);) i++;
        key = key_of(highest, i);
        while (key > known && !__atomic_compare_exchange_n(s->best + row, &known, key, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    }
}

/* x [rows, columns], at least 1 column: of each row the column of the highest value, the first of equals, and that value; of a row that
   has NaN, the first of these. */
void radixkv_highest(const float *x, long rows, long columns, int64_t *at, float *values, int threads) {
    struct search s = {x, scratch(rows * sizeof(uint64_t)), rows, columns};
    memset(s.best, 0, rows * sizeof *s.best);
    parallel_for((columns + COLUMNS - 1) / COLUMNS, rows * columns < 65536 ? 1 : threads, search_item, &s);
    for (long row = 0; row < rows; row++) {
        at[row] = UINT32_MAX - (uint32_t)s.best[row];
        values[row] = x[row * columns + at[row]];
    }
}
