/* Cuts a batch into tiles of query rows that read the same keys, and tiles into items for the threads.

   A tile is neighbouring tokens of one prefill with all heads of a group, or short queries of neighbouring sequences that share the
   beginning of their block tables: what they share is read once for all of them. */
#include "attention.h"

#include "gemm.h"

#include <limits.h>
#include <stdlib.h>

#define WORTH_SHARING (4 * TILE) /* tokens; for fewer, sequences had better be spread over the threads */

/* shared[s]: tokens that sequence s has in the same blocks as the one before it. */
static void find_shared(long *shared, long sequences, const int32_t *segments, long count) {
    for (long s = 0; s < sequences; s++) shared[s] = 0;
    for (const int32_t *segment = segments; segment < segments + 4 * count; segment += 4)
        for (long s = segment[0] + 1; s < segment[0] + segment[1]; s++) shared[s] = segment[3] > shared[s] ? segment[3] : shared[s];
}

static void cut_tiles(struct attention *a, const int32_t *starts, const int32_t *lengths, const long *shared, long count, long per_tile) {
    a->query_count = a->tile_count = 0;
    /* Where the last columns of a value are computed twice, a chunk can't be cut. */
    long whole = a->layout.dim % TILE ? CHUNK : TILE;
    for (int is_long = 0; is_long < 2; is_long++) {
        struct tile *tile = 0;
        long common = 0; /* tokens that the sequence shares with the last one of these */
        for (long s = 0; s < count; s++) {
            int32_t queries = starts[s + 1] - starts[s];
            common = at_most(common, shared[s]);
            if (queries <= 0 || lengths[s] <= 0 || (queries > 1 && queries > per_tile / 2) != is_long) continue;
            for (int32_t i = 0; i < queries; i++) {
                struct query *query = a->queries + a->query_count;
                *query = (struct query){(int32_t)s, starts[s] + i, (long)lengths[s] - queries + i + 1, LONG_MAX};
                if (!i) query->shared = tile ? at_most(common, at_most(query[-1].limit, query->limit)) / whole * whole : 0;
                if (!tile || tile->count + (i ? 1 : queries) > per_tile || query->shared < WORTH_SHARING) {
                    tile = a->tiles + a->tile_count++;
                    *tile = (struct tile){.first = a->query_count, .whole = LONG_MAX, .single = !is_long, .partial = -1};
                } else if (!i) tile->single = 0;
                long chunks = (query->limit + CHUNK - 1) / CHUNK;
                tile->whole = at_most(tile->whole, tile->count ? at_most(query->limit, query->shared) : query->limit);
                tile->count++;
                tile->chunks = chunks > tile->chunks ? chunks : tile->chunks;
                a->query_count++;
            }
            common = LONG_MAX;
        }
    }
}

/* With items == 0 only counts. A tile too large a share of the work is split into spans of chunks, merged afterwards. */
static long cut_items(struct attention *a, long target, int threads, struct item *items) {
    long count = 0, heads = a->layout.heads;
    for (long reversed = 0; reversed < a->tile_count; reversed++) { /* the last tile of a prefill is its longest: first */
        long t = a->tile_count - 1 - reversed;
        struct tile *tile = a->tiles + t;
        long rows = tile->count * a->group, per_item = tile->single && a->layout.tile == TILE ? heads : 1, work = rows * tile->chunks * per_item, span = tile->chunks;
        if (work > 2 * target) {
            span = target / (rows * per_item);
            if (span < 1) span = 1;
        }
        /* The first thread's share from the beginning, to be merged as it goes.  Of the others what sequences don't share, which comes last
           and costs most, first. */
        long spans = (tile->chunks + span - 1) / span, in_order = spans > 1 && per_item == 1 ? spans / threads : 0;
        for (long i = 0; i < spans; i++) {
            long first = (i < in_order ? i : spans - 1 - (i - in_order)) * span;
            for (long head = 0; head < heads; head += per_item, count++)
                if (items) items[count] = (struct item){t, head, per_item, first, at_most(first + span, tile->chunks), i < in_order};
        }
        if (items && span < tile->chunks) {
            tile->partial = a->partial_rows;
            a->partial_rows += padded_rows(a, tile) * tile->chunks * heads;
        }
        a->tile_rows = at_least(a->tile_rows, rows);
        a->max_rows = at_least(a->max_rows, rows * per_item);
    }
    return count;
}

void attention_plan(struct attention *a, const int32_t *starts, const int32_t *lengths, long sequences, long tokens, const int32_t *segments,
                    long segment_count, int threads) {
    a->queries = malloc(tokens * (sizeof(struct query) + sizeof(struct tile)) + sequences * sizeof(long) + 1);
    if (!a->queries) abort();
    a->tiles = (struct tile *)(a->queries + tokens);
    long *shared = (long *)(a->tiles + tokens);
    find_shared(shared, sequences, segments, segment_count);
    long work, units, per_tile = ROWS / a->group ? ROWS / a->group : 1;
    for (;; per_tile /= 2) { /* enough for every thread, if need be at the price of reading what is shared twice */
        cut_tiles(a, starts, lengths, shared, sequences, per_tile);
        work = units = 0;
        for (long t = 0; t < a->tile_count; t++) {
            work += a->tiles[t].count * a->group * a->tiles[t].chunks * a->layout.heads;
            units += a->tiles[t].single ? 1 : a->tiles[t].chunks * a->layout.heads;
        }
        if (units >= 3L * threads || per_tile < 8 || threads == 1) break;
    }
    long target = threads == 1 ? work : work / (8L * threads);
    a->items = malloc((cut_items(a, target, threads, 0) + 1) * sizeof(struct item));
    if (!a->items) abort();
    a->item_count = cut_items(a, target, threads, a->items);
}
