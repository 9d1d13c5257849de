/* How a batch's attention is cut into pieces of work. */
#pragma once
#include "kv.h"
#include "vec.h"

#include <stddef.h>
#include <stdint.h>

#define CHUNK 256 /* tokens; part of what a result's bits depend on */
#define ROWS 48  /* query rows that share a pass over keys, enough to make it worth its memory traffic */

struct query { /* one token's queries: a row for each head of the group */
    int32_t sequence, token; /* token: its row in q and out */
    long limit;              /* it sees positions 0 .. limit - 1 */
    long shared;             /* of those, the first that the query before it in the tile reads in the same blocks; whole tiles of tokens */
};

struct tile { /* queries first .. first + count - 1, in the order of the batch; those of a sequence in order of position */
    long first, count, chunks;
    long whole;   /* so many tokens all of them see, in the same blocks */
    int single;   /* the few queries of one sequence: an item takes all KV heads, which lie side by side in memory */
    long partial; /* where its partial results begin, or -1 if an item merges all its chunks on the spot */
};

struct item { /* a tile's chunks first .. end - 1 for some KV heads */
    long tile, first_head, heads, first_chunk, end_chunk;
    int in_order; /* of one head's chunks in a split tile, one of the first, which are handed out in order of position */
};

struct attention {
    const void *q, *k_cache, *v_cache;
    void *out;
    const int32_t *tables;
    long table_stride, q_row, group;
    struct kv_layout layout;
    float scale;
    int on_tiles; /* products on matrix tiles: see attention_tiles.h */
    struct query *queries;
    struct tile *tiles;
    struct item *items;
    long call;                                                      /* a number that no other one has, nor call + 1 .. call + tile_count - 1 */
    long query_count, tile_count, item_count, tile_rows, max_rows; /* tile_rows: of a tile, max_rows: of an item, times its heads; at most */
    long merge_panels; /* of a tile's rows, at most, a register each */
    char *thread_scratch;
    size_t thread_bytes;
    long partial_rows; /* of all split tiles: [KV head][chunk][row], rows padded to whole registers */
    float *partial_values, *partial_largest, *partial_sum; /* [partial row][dim], and of its scores the largest, and the sum of exponentials */
    struct merged {
        long chunks; /* the first so many are merged in the first one's place */
        char apart[64 - sizeof(long)];
    } *merged; /* [tile][KV head] */
};

static inline long at_most(long x, long y) { return x < y ? x : y; }
static inline long at_least(long x, long y) { return x > y ? x : y; }

/* A tile's rows with room for whole registers of their statistics. */
static inline long padded_rows(const struct attention *a, const struct tile *tile) { return (tile->count * a->group + VL - 1) / VL * VL; }

/* Fills queries, tiles and items, in memory that the caller frees through `queries`. */
void attention_plan(struct attention *a, const int32_t *starts, const int32_t *lengths, long sequences, long tokens, const int32_t *segments,
                    long segment_count, int threads);
