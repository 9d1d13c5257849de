/* Tiles of memory that a thread reads soon, asked for a few lines at a time while it computes with others.

   A core can wait for few lines at once; asked for all together they hold up those that it needs now. */
#pragma once
#include "gemm.h"

#define UPCOMING_TILES 256 /* at most; a chunk that all rows share has 32 */
#define SIDE_BY_SIDE 8     /* tiles fetched by turns: requests into one page had better be some time apart */

struct upcoming {
    long count, next, byte, bytes; /* tiles, a multiple of SIDE_BY_SIDE; those before `next` are fetched, of those from it on `byte` of `bytes` */
    const char *tiles[UPCOMING_TILES];
    long call, item, chunk; /* whose they are */
};

/* `count` tiles after those announced before, as many as there is room for. */
INLINE void announce(struct upcoming *u, const void *const *tiles, long count) {
    for (long i = 0; i < count && u->count < UPCOMING_TILES; i++) u->tiles[u->count++] = tiles[i];
}
/* After the last of them. */
INLINE void announced(struct upcoming *u) {
    for (; u->count % SIDE_BY_SIDE; u->count++) u->tiles[u->count] = u->tiles[u->count - 1];
}

/* The next line of each of SIDE_BY_SIDE tiles. */
INLINE void fetch_upcoming(struct upcoming *u) {
    if (u->next >= u->count) return;
    long byte = u->byte;
    UNROLL for (long i = 0; i < SIDE_BY_SIDE; i++) FETCH(u->tiles[u->next + i] + byte);
    u->byte = byte + 64;
    if (u->byte >= u->bytes) u->byte = 0, u->next += SIDE_BY_SIDE;
}
