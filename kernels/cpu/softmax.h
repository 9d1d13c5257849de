/* Scores of a chunk into weights: exponentials relative to the largest. */
#pragma once
#include "attention.h"
#include "upcoming.h"

#include <math.h>

#define SOFTMAX_ROWS 4 /* at a time */

/* Turns the first limits[r] scores of each row, times `scale`, into weights, all CHUNK of them where `limits` is 0; those after them up to
   `used`, a multiple of TILE, get weight 0.  Several rows at a time, because each one's sum and maximum are chains of operations that wait
   for one another. */
INLINE void softmax_rows(int R, int narrow, float *scores, void *weights, float scale, const long *limits, long used, float *largest, float *sum,
                         struct upcoming *upcoming) {
    vf most[SOFTMAX_ROWS], other[SOFTMAX_ROWS], total[SOFTMAX_ROWS], top[SOFTMAX_ROWS];
    long end = limits ? 0 : CHUNK;
    if (limits) UNROLL for (int r = 0; r < R; r++) end = limits[r] > end ? limits[r] : end;
    end = (end + 2 * VL - 1) / (2 * VL) * (2 * VL);
    UNROLL for (int r = 0; r < R; r++) {
        most[r] = other[r] = vset(-INFINITY), total[r] = vset(0);
        if (limits) for (long t = limits[r]; t < end; t++) scores[r * CHUNK + t] = -INFINITY; /* they may hold anything */
    }
    for (long t = 0; t < end; t += 2 * VL)
        UNROLL for (int r = 0; r < R; r++) {
            most[r] = vmax(most[r], vload(scores + r * CHUNK + t));
            other[r] = vmax(other[r], vload(scores + r * CHUNK + t + VL));
        }
    UNROLL for (int r = 0; r < R; r++) {
        largest[r] = vmax_lanes(vmax(most[r], other[r])) * scale;
        top[r] = vset(-largest[r]);
    }
    for (long t = 0; t < end; t += 2 * VL) {
        fetch_upcoming(upcoming);
        UNROLL for (int r = 0; r < R; r++) {
            vf p = vexp2_of(vfma(vload(scores + r * CHUNK + t), vset(scale), top[r]), narrow);
            vf next = vexp2_of(vfma(vload(scores + r * CHUNK + t + VL), vset(scale), top[r]), narrow);
            if (narrow) vstore_bf16_pair((bf16 *)weights + r * CHUNK + t, p, next);
            else vstore((float *)weights + r * CHUNK + t, p), vstore((float *)weights + r * CHUNK + t + VL, next);
            total[r] += p;
            total[r] += next;
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        for (long t = end; t < used; t += VL) store_from_float(weights, r * CHUNK + t, vset(0), narrow);
        sum[r] = vsum(total[r]);
    }
}

/* The same for 1 to SOFTMAX_ROWS rows. */
INLINE void softmax_few(long rows, int narrow, float *scores, void *weights, float scale, const long *limits, long used, float *largest,
                        float *sum, struct upcoming *upcoming) {
    switch (rows) {
    case 1: softmax_rows(1, narrow, scores, weights, scale, limits, used, largest, sum, upcoming); break;
    case 2: softmax_rows(2, narrow, scores, weights, scale, limits, used, largest, sum, upcoming); break;
    case 3: softmax_rows(3, narrow, scores, weights, scale, limits, used, largest, sum, upcoming); break;
    case SOFTMAX_ROWS: softmax_rows(SOFTMAX_ROWS, narrow, scores, weights, scale, limits, used, largest, sum, upcoming);
    }
}
