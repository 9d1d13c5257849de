/* Cuts a batch into tiles of query rows that read the same keys, and tiles into items for the threads.

   A tile is neighbouring tokens of one prefill with all heads of a group, or short queries of sequences whose block tables begin
   alike: as long as they do, each chunk of K/V is read once for all of them (as in cascade or Hydragen attention). */
#include "attention.h"

#include <stdlib.h>
#include <string.h>

struct sequence {
    const int32_t *table;
    int32_t index, start, queries, length, full_blocks;
};

/* Lexicographic order of full blocks, so that sequences that begin alike are neighbours. */
static int by_table(const void *x, const void *y) {
    const struct sequence *a = x, *b = y;
    int32_t shared = a->full_blocks < b->full_blocks ? a->full_blocks : b->full_blocks;
    int order = memcmp(a->table, b->table, shared * sizeof(int32_t));
    return order ? order : a->full_blocks != b->full_blocks ? a->full_blocks - b->full_blocks : a->index - b->index;
}

int attention_same_blocks(const struct attention *a, const struct query *x, const struct query *y, long start) {
    long size = a->layout.block_size, first = start / size, last = (start + CHUNK - 1) / size;
    return x->limit >= start + CHUNK && y->limit >= start + CHUNK &&
           !memcmp(a->tables + x->sequence * a->table_stride + first, a->tables + y->sequence * a->table_stride + first,
                   (last - first + 1) * sizeof(int32_t));
}

static void cut_tiles(struct attention *a, struct sequence *sequences, const int32_t *starts, const int32_t *lengths, long count) {
    long short_count = 0, n = 0, per_tile = ROWS / a->group ? ROWS / a->group : 1;
    for (int is_long = 0; is_long < 2; is_long++) {
        for (long s = 0; s < count; s++) {
            int32_t queries = starts[s + 1] - starts[s];
            if (queries <= 0 || lengths[s] <= 0 || (queries > 1 && queries > per_tile / 2) != is_long) continue;
            sequences[n++] = (struct sequence){a->tables + s * a->table_stride, (int32_t)s, starts[s], queries, lengths[s],
                                               (int32_t)(lengths[s] / a->layout.block_size)};
        }
        if (!is_long) short_count = n;
    }
    qsort(sequences, short_count, sizeof *sequences, by_table);
    struct tile *tile = 0;
    for (long s = 0; s < n; s++)
        for (int32_t i = 0; i < sequences[s].queries; i++) {
            struct query *query = a->queries + a->query_count;
            *query = (struct query){sequences[s].index, sequences[s].start + i, (long)sequences[s].length - sequences[s].queries + i + 1};
            int joins = tile && tile->count + (i ? 1 : sequences[s].queries) <= per_tile &&
                        (i || (s < short_count && attention_same_blocks(a, query - 1, query, 0)));
            if (!joins) {
                tile = a->tiles + a->tile_count++;
                *tile = (struct tile){.first = a->query_count, .single = s < short_count, .partial = -1};
            }
            long chunks = (query->limit + CHUNK - 1) / CHUNK;
            tile->count++;
            tile->chunks = chunks > tile->chunks ? chunks : tile->chunks;
            a->query_count++;
        }
}

/* With items == 0 only counts. A tile too large a share of the work is split into spans of chunks, merged afterwards. */
static long cut_items(struct attention *a, long target, struct item *items) {
    long count = 0, heads = a->layout.heads;
    for (long reversed = 0; reversed < a->tile_count; reversed++) { /* the last tile of a prefill is its longest: first */
        long t = a->tile_count - 1 - reversed;
        struct tile *tile = a->tiles + t;
        long rows = tile->count * a->group, per_item = tile->single ? heads : 1, work = rows * tile->chunks * per_item, span = tile->chunks;
        if (work > 2 * target) {
            span = target / (rows * per_item);
            if (span < 1) span = 1;
        }
        for (long head = 0; head < heads; head += per_item)
            for (long chunk = 0; chunk < tile->chunks; chunk += span, count++)
                if (items) items[count] = (struct item){t, head, per_item, chunk, chunk + span < tile->chunks ? chunk + span : tile->chunks};
        if (items && span < tile->chunks) {
            tile->partial = a->partial_rows;
            a->partial_rows += rows * tile->chunks * heads;
        }
        a->max_rows = rows * per_item > a->max_rows ? rows * per_item : a->max_rows;
    }
    return count;
}

void attention_plan(struct attention *a, const int32_t *starts, const int32_t *lengths, long sequences, long tokens, int threads) {
    a->queries = malloc(tokens * (sizeof(struct query) + sizeof(struct tile)) + sequences * sizeof(struct sequence) + 1);
    if (!a->queries) abort();
    a->tiles = (struct tile *)(a->queries + tokens);
    cut_tiles(a, (struct sequence *)(a->tiles + tokens), starts, lengths, sequences);
    long work = 0;
    for (long t = 0; t < a->tile_count; t++) work += a->tiles[t].count * a->group * a->tiles[t].chunks * a->layout.heads;
    long target = threads == 1 ? work : work / (8L * threads);
    a->items = malloc((cut_items(a, target, 0) + 1) * sizeof(struct item));
    if (!a->items) abort();
    a->item_count = cut_items(a, target, a->items);
}
