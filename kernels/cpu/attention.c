/* Paged attention: packed queries, causal, grouped-query, through block tables.

   Keys are taken in chunks of CHUNK tokens at absolute positions.  For each query row a chunk gives a partial result (its largest score,
   the sum of exponentials, and the values summed with those weights), computed the same way whichever rows stand beside it; partial
   results are merged in order of position (FlashAttention's online softmax, over fixed chunks as in Flash-Decoding).  So a row's bits
   depend on its own tokens only: not on the batch, on how prefill was cut, on the block size, on what is shared, or on the number of
   threads.

   Rows of sequences that share a part of a chunk pass over it together, one row panel after the other, while its K and V are in cache
   (the idea of ChunkAttention, Ye et al. 2024, and Hydragen, Juravsky et al. 2024, for any number of levels). */
#include "attention.h"

#include "attention_tiles.h"
#include "gemm.h"
#include "matrix_tiles.h"
#include "operations.h"
#include "parallel.h"
#include "softmax.h"
#include "upcoming.h"

#include <math.h>
#include <stdlib.h>

/* Both products are of bfloat16 pairs where the CPU has them (then queries stay as they come, and weights are rounded as on a GPU);
   elsewhere bfloat16 keys and values are widened to the float32 of queries and weights. */
#define NARROW(half) ((half) && DOT_PAIRS)

/* Of some chunks: values[row][dim], largest[row] and sum[row]; those of the next head are `rows` rows further. */
struct result {
    float *values, *largest, *sum;
    long rows;
};

struct work { /* one thread's scratch: for all rows of an item, and for the rows of one head */
    void *q;
    struct result total, chunk;
    float *scores, *old_factor, *new_factor;
    void *weights; /* [rows][CHUNK]: the scores' own memory, or bfloat16 */
    void *gathered;
    bf16 *padded; /* a tile of v: see tile_values */
    struct upcoming *upcoming;
    long *queries_of; /* [KV head]: the call, plus the tile, whose queries are in q */
};

static size_t work_layout(struct work *w, char *base, const struct attention *a) {
    long rows = a->max_rows, dim = a->layout.dim, padded = rows + a->layout.heads * VL; /* statistics are taken a register at a time */
    int half = a->layout.half;
    size_t used = 0;
#define TAKE(p, bytes) (p = (void *)(base + used), used += ((bytes) + 63) / 64 * 64)
    TAKE(w->q, a->tile_rows * a->layout.heads * dim * (NARROW(half) ? 2 : 4));
    for (struct result *r = &w->total; r <= &w->chunk; r++) {
        TAKE(r->values, padded * dim * 4);
        TAKE(r->largest, padded * 4);
        TAKE(r->sum, padded * 4);
    }
    TAKE(w->scores, rows * CHUNK * 4);
    TAKE(w->old_factor, padded * 4);
    TAKE(w->new_factor, padded * 4);
    if (NARROW(half)) { TAKE(w->weights, rows * CHUNK * 2); }
    else w->weights = w->scores;
    TAKE(w->gathered, CHUNK * dim * (half ? 2 : 4));
    if (a->on_tiles) { TAKE(w->padded, TILE * dim * 2); }
    TAKE(w->upcoming, sizeof *w->upcoming);
    TAKE(w->queries_of, a->layout.heads * sizeof *w->queries_of);
#undef TAKE
    return used;
}

/* Queries first .. end - 1 of a tile read tokens from .. to - 1 of a chunk in the same blocks. */
struct piece {
    long first, end, from, to;
};

/* Whether any of its rows are among begin .. end - 1. */
static int meets(const struct piece *p, long group, long begin, long end) { return p->first * group < end && p->end * group > begin; }

/* Cuts what queries i .. j - 1 see of tokens from .. to - 1 into pieces; for each query they come in order of position.  Fewer than 2 (j - i)
   of them, as each one that leads to others is where queries part. */
static long find_pieces(const struct query *q, long i, long j, long from, long to, struct piece *pieces, long n) {
    for (long k; i < j; i = k) {
        long end = to, limit = q[i].limit;
        for (k = i + 1; k < j && q[k].shared > from; k++) {
            end = q[k].shared < end ? q[k].shared : end;
            limit = q[k].limit > limit ? q[k].limit : limit;
        }
        if (limit <= from) continue;
        pieces[n++] = (struct piece){i, k, from, limit < end ? limit : end};
        if (end < to && end < limit) n = find_pieces(q, i, k, end, to, pieces, n);
    }
    return n;
}

/* A tile of a small block to tokens first .. of one of 16. */
static void gather_tile(const struct kv_layout *l, int of_values, const char *from, char *to, long first) {
    long T = l->tile, lanes = l->half ? 2 : 1; /* elements in 4 bytes */
    if (of_values && (T > 1 || !l->half)) { /* whole rows */
        memcpy(to + first * l->dim * 4 / lanes, from, T * l->dim * 4 / lanes);
        return;
    }
    if (of_values) { /* every other element of a row of pairs */
        for (long d = 0; d < l->dim; d++) ((bf16 *)to)[(first / 2 * l->dim + d) * 2 + first % 2] = ((const bf16 *)from)[d];
        return;
    }
#define ROWS_OF(bytes) for (long row = 0; row < l->dim / lanes; row++) memcpy(to + (row * TILE + first) * 4, from + row * (bytes), bytes)
    switch (T) {
    case 1: ROWS_OF(4); break;
    case 2: ROWS_OF(8); break;
    case 4: ROWS_OF(16); break;
    case 8: ROWS_OF(32); break;
    }
#undef ROWS_OF
}

/* Keys or values of a piece as tiles of 16 tokens; the last may hold less.  Small blocks are gathered. */
static void find_tiles(const struct attention *a, const struct work *w, const struct query *queries, const struct piece *p, long head,
                       int of_values, const void **tiles) {
    const struct kv_layout *l = &a->layout;
    const struct query *query = queries + p->first;
    const int32_t *table = a->tables + query->sequence * a->table_stride;
    const void *cache = of_values ? a->v_cache : a->k_cache;
    if (l->tile == TILE) {
        long block = p->from / l->block_size, offset = p->from - block * l->block_size, count = (p->to - p->from + TILE - 1) / TILE;
        const char *first = element(cache, kv_tile(l, 0, head, 0), l->half);
        long block_bytes = (kv_tile(l, 1, 0, 0) - kv_tile(l, 0, 0, 0)) * (l->half ? 2 : 4);
        for (long i = 0; i < count; i++) {
            tiles[i] = element(first + table[block] * block_bytes, offset * l->dim, l->half);
            if ((offset += TILE) == l->block_size) block++, offset = 0;
        }
        return;
    }
    long length = p->to - p->from;
    for (long t = 0; t < length; t += l->tile)
        gather_tile(l, of_values, element(cache, kv_tile(l, table[(p->from + t) / l->block_size], head, 0), l->half),
                    element(w->gathered, t / TILE * TILE * l->dim, l->half), t % TILE);
    for (long t = 0; t < length; t += TILE) *tiles++ = element(w->gathered, t * l->dim, l->half);
}

INLINE void score_tiles(int MR, int NT, int half, const void *q, long dim, const void *const *k, const void *const *ahead, float *scores) {
    vf acc[MAX_MR * MAX_NT * TV];
    UNROLL for (int i = 0; i < MR * NT * TV; i++) acc[i] = vset(0);
    if (NARROW(half)) accumulate_pairs(MR, NT, 1, acc, q, dim, k, TILE, dim, (const char *const *)ahead, TILE * 2);
    else accumulate(MR, NT, half, 1, acc, q, dim, k, TILE, dim, (const char *const *)ahead, half ? TILE * 2 : TILE * 4);
    UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NT * TV; n++) vstore(scores + m * CHUNK + n * VL, acc[m * NT * TV + n]);
}

/* scores[rows][..] = q k for `count` tiles. */
static void score_panel(int half, long rows, const void *q, long dim, const void *const *k, const void *const *ahead, long count, float *scores) {
#define WIDTH(MR, NT)                                                                                                             \
    for (; t + NT <= count; t += NT)                                                                                              \
        half ? score_tiles(MR, NT, 1, q, dim, k + t, ahead + t, scores + t * TILE)                                                \
             : score_tiles(MR, NT, 0, q, dim, k + t, ahead + t, scores + t * TILE);
#define CASE(MR)                                                                                                                  \
    WIDTH(MR, WIDE(MR))                                                                                                           \
    WIDTH(MR, 1)
    long t = 0;
    FOR_ROWS(rows, CASE)
#undef CASE
#undef WIDTH
}

INLINE void value_tiles(int MR, int NT, int half, int begin, const void *p, const void *const *v, const void *const *ahead, long valid, long d,
                        long dim, float *values) {
    vf acc[MAX_MR * MAX_NT * TV];
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < NT * TV; n++) acc[m * NT * TV + n] = begin ? vset(0) : vload(values + m * dim + d + n * VL);
    for (long t = 0; t < valid; t += TILE) {
        const void *b[MAX_NT];
        const char *later[MAX_NT];
        UNROLL for (int n = 0; n < NT; n++) {
            b[n] = element(v[t / TILE], (d + n * TILE) * (half ? 2 : 1), half);
            later[n] = element(ahead[t / TILE], (d + n * TILE) * (half ? 2 : 1), half);
        }
        long count = valid - t < TILE ? valid - t : TILE;
        if (NARROW(half)) accumulate_pairs(MR, NT, 1, acc, (const bf16 *)p + t, CHUNK, b, dim, count, later, dim * 2);
        else accumulate(MR, NT, half, 1, acc, (const float *)p + t, CHUNK, b, dim, count, later, half ? dim * 2 : dim * 4);
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < NT * TV; n++) vstore(values + m * dim + d + n * VL, acc[m * NT * TV + n]);
}

/* values[rows][dim] = p v, or += unless it is the beginning, in tiles of 16 columns, of which the last may overlap the one before (then a
   chunk is never cut: see attention_plan). */
static void value_panel(int half, long rows, int begin, const void *p, const void *const *v, const void *const *ahead, long valid, long dim,
                        float *values) {
#define TILES(MR, NT, d)                                                                                                          \
    half ? value_tiles(MR, NT, 1, begin, p, v, ahead, valid, d, dim, values) : value_tiles(MR, NT, 0, begin, p, v, ahead, valid, d, dim, values)
#define CASE(MR)                                                                                                                  \
    for (; d + WIDE(MR) * TILE <= dim; d += WIDE(MR) * TILE) TILES(MR, WIDE(MR), d);                                              \
    for (; d < dim; d += TILE) TILES(MR, 1, (d + TILE <= dim ? d : dim - TILE));
    long d = 0;
    FOR_ROWS(rows, CASE)
#undef CASE
#undef TILES
}

static struct result from_row(struct result r, long row, long dim) {
    return (struct result){r.values + row * dim, r.largest + row, r.sum + row, r.rows};
}

/* Adds `more` to `total`, both scaled to the larger of a row's largest scores.  Rows of which more's is -INFINITY stay as they are. */
static void merge_rows(const struct work *w, long rows, struct result total, struct result more, long dim) {
    for (long row = 0; row < rows; row += VL) { /* all of a register, of which the last may reach beyond the rows into padding */
        vf old = vload(total.largest + row), new = vload(more.largest + row), both = vmax(old, new);
        vi none = both == vset(-INFINITY);
        old = vexp2(vselect(none, vset(-INFINITY), old - both)), new = vexp2(vselect(none, vset(-INFINITY), new - both));
        vstore(total.largest + row, both);
        vstore(total.sum + row, vfma(vload(total.sum + row), old, vload(more.sum + row) * new));
        vstore(w->old_factor + row, old);
        vstore(w->new_factor + row, new);
    }
    for (long row = 0; row < rows; row++, total.values += dim, more.values += dim) {
        if (more.largest[row] == -INFINITY) continue;
        vf old = vset(w->old_factor[row]), new = vset(w->new_factor[row]);
        long d = 0;
        for (; d + VL <= dim; d += VL) vstore(total.values + d, vfma(vload(total.values + d), old, vload(more.values + d) * new));
        for (; d < dim; d++) total.values[d] = vfma(vset(total.values[d]), old, vset(more.values[d]) * new)[0];
    }
}

static void finish_row(const struct attention *a, long head, const struct tile *tile, long row, struct result total) {
    long token = a->queries[tile->first + row / a->group].token, dim = a->layout.dim, d = 0;
    long to = ((token * a->layout.heads + head) * a->group + row % a->group) * dim;
    vf inverse = vset(*total.sum == 0 ? 0 : 1.0f / *total.sum);
    for (; d + VL <= dim; d += VL) store_from_float(a->out, to + d, vload(total.values + d) * inverse, a->layout.half);
    for (; d < dim; d++) put_float(a->out, to + d, total.values[d] * inverse[0], a->layout.half);
}

/* The largest limit of the queries that rows row .. end - 1 belong to. */
static long visible(const struct attention *a, const struct query *queries, long row, long end) {
    long most = 0;
    for (long i = row / a->group; i <= (end - 1) / a->group; i++) most = queries[i].limit > most ? queries[i].limit : most;
    return most;
}

/* Tiles of bfloat16 that are read next. */
static void fetch_tiles(const void *const *tiles, long count, long dim) {
    for (long n = 0; n < count; n++) for (long byte = 0; byte < TILE * dim * 2; byte += 64) FETCH((const char *)tiles[n] + byte);
}

/* Whether a tile's keys and values come from there.  The tiles of one prefill read the same ones after each other: those are in cache. */
static int from_memory(const struct attention *a, const struct tile *tile) {
    return a->on_tiles && (tile->count == 1 || a->queries[tile->first].sequence != a->queries[tile->first + tile->count - 1].sequence);
}

/* A chunk's place in a split tile; the first one's takes what is merged at once, too. */
static struct result partial_results(const struct attention *a, const struct tile *tile, long head, long chunk) {
    long rows = padded_rows(a, tile), at = tile->partial + (head * tile->chunks + chunk) * rows;
    return (struct result){a->partial_values + at * a->layout.dim, a->partial_largest + at, a->partial_sum + at, tile->chunks * rows};
}

/* Partial results of rows begin .. stop - 1 of a tile for `heads` heads from `head` on and the chunk at `start`. */
static void compute_rows(const struct attention *a, const struct work *w, const struct tile *tile, long begin, long stop, long head, long heads,
                         long start, const struct piece *pieces, long count, const struct result *result) {
    const struct query *queries = a->queries + tile->first;
    long dim = a->layout.dim, all_rows = tile->count * a->group, used = 0;
    int half = a->layout.half, narrow = NARROW(half);
    float scale = narrow ? a->scale * LOG2E : 1; /* wide queries are scaled already */
    const void *k[CHUNK_TILES], *v[CHUNK_TILES], *tiles_of_head[CHUNK_TILES], *ahead[CHUNK_TILES];
    long head_elements = a->layout.block_size * dim; /* from one head's tile to the next one's; only one head if tiles are gathered */
    int direct = a->layout.tile == TILE;
    long most = a->on_tiles ? TILE_ROWS : MAX_MR; /* rows in a panel */
    long wide = a->on_tiles && heads == 1 ? CHUNK_TILES : WIDE(MAX_MR); /* tiles of keys at a time */
    int unread = from_memory(a, tile);
    /* Several panels pass over a few tiles at a time, which stay in L1 meanwhile, one over all; several heads, too, as theirs lie side by side and memory
       is read fastest in order.  What is needed next is fetched: more of K by the first panel, and at its end V's beginning, V by the others. */
#define PANELS(p)                                                                                                                 \
    for (long first = at_least(p->first * a->group, begin), rows = at_most(p->end * a->group, stop) - first,                      \
              panels = panel_count(rows, most), i = 0, row, end;                                                                  \
         row = first + panel_start(rows, panels, i), end = first + panel_start(rows, panels, i + 1), i < panels; i++)
    for (const struct piece *p = pieces; p < pieces + count; p++) {
        if (!meets(p, a->group, begin, stop)) continue;
        long tiles = (p->to - p->from + TILE - 1) / TILE;
        int fetch = unread && p->first * a->group >= begin; /* not what an earlier panel has read */
        find_tiles(a, w, queries, p, head, 0, k);
        if (direct) find_tiles(a, w, queries, p, head, 1, v);
        for (long t = 0; t < tiles; t += wide) {
            long step = tiles - t < wide ? tiles - t : wide;
            for (long h = 0; h < heads; h++) {
                for (long n = 0; n < step; n++) tiles_of_head[n] = element(k[t + n], h * head_elements, half);
                PANELS(p) {
                    if (p->from + t * TILE >= visible(a, queries, row, end)) continue;
                    for (long n = 0; n < step; n++)
                        ahead[n] = !i && t + step + n < tiles ? element(k[t + step + n], h * head_elements, half)
                                   : direct                  ? element(v[i ? t + n : n], h * head_elements, half)
                                                             : tiles_of_head[n];
                    long at = h * all_rows + row;
                    float *scores = w->scores + (at - begin) * CHUNK + p->from - start + t * TILE;
                    if (fetch && i < 2) fetch_tiles(ahead, step, dim);
                    if (a->on_tiles) tile_scores(end - row, (const bf16 *)w->q + at * dim, dim, tiles_of_head, step, scores, CHUNK, w->upcoming);
                    else score_panel(half, end - row, element(w->q, at * dim, narrow), dim, tiles_of_head, ahead, step, scores);
                }
            }
        }
        used = p->to - start > used ? p->to - start : used;
    }
    used = (used + TILE - 1) / TILE * TILE;
    for (long h = 0; h < heads; h++)
        for (long row = begin, n; row < stop; row += n) {
            long at = h * all_rows + row, limits[SOFTMAX_ROWS];
            float *scores = w->scores + (at - begin) * CHUNK, *largest = result->largest + h * result->rows + row, *sum = result->sum + h * result->rows + row;
            void *weights = element(w->weights, (at - begin) * CHUNK, narrow);
            for (n = 0; n < SOFTMAX_ROWS && row + n < stop; n++) {
                long limit = queries[(row + n) / a->group].limit - start;
                if (limit <= 0) break;
                limits[n] = limit < CHUNK ? limit : CHUNK;
            }
            if (n) {
                if (narrow) softmax_few(n, 1, scores, weights, scale, limits, used, largest, sum, w->upcoming);
                else softmax_few(n, 0, scores, weights, scale, limits, used, largest, sum, w->upcoming);
                continue;
            }
            *largest = -INFINITY; /* it sees nothing of this chunk */
            *sum = 0;
            for (long t = 0; t < used; t += VL) store_from_float(weights, t, vset(0), narrow);
            n = 1;
        }
    for (const struct piece *p = pieces; p < pieces + count; p++) {
        if (!meets(p, a->group, begin, stop)) continue;
        find_tiles(a, w, queries, p, head, 1, v);
        int fetch = unread && p->first * a->group >= begin; /* not what an earlier panel has read */
        long length = p->to - p->from, step = heads > 1 && dim % TILE == 0 ? WIDE(MAX_MR) * TILE : CHUNK; /* tokens; see value_panel */
        for (long t = 0; t < length; t += step)
            for (long h = 0; h < heads; h++) {
                for (long n = 0; n < step && t + n < length; n += TILE) tiles_of_head[n / TILE] = element(v[(t + n) / TILE], h * head_elements, half);
                for (long n = 0; n < step && t + n < length; n += TILE)
                    ahead[n / TILE] = t + n + step < length ? element(v[(t + n + step) / TILE], h * head_elements, half) : tiles_of_head[0];
                PANELS(p) {
                    long to = visible(a, queries, row, end), from = p->from + t, at = h * all_rows + row;
                    to = to < p->to ? to : p->to;
                    to = to < from + step ? to : from + step;
                    if (to <= from && from > start) continue;
                    long valid = to > from ? to - from : 0;
                    const void *weights = element(w->weights, (at - begin) * CHUNK + from - start, narrow);
                    float *to_values = result->values + (h * result->rows + row) * dim;
                    if (fetch && !i && t + step < length) fetch_tiles(ahead, panel_count(at_most(step, length - t - step), TILE), dim);
                    if (a->on_tiles) tile_values(end - row, from == start, weights, CHUNK, tiles_of_head, valid, dim, w->padded, to_values, w->upcoming);
                    else value_panel(half, end - row, from == start, weights, tiles_of_head, ahead, valid, dim, to_values);
                }
            }
    }
#undef PANELS
}

/* All rows of the tile.  On matrix tiles those of a panel go all the way before the next ones: 16 KB of scores stay in L1.  Keys and values
   then come from L2 for each panel, nearly as fast as they are multiplied.  Elsewhere, and where a few rows of all heads advance
   together, it's all rows at once, as where small blocks are gathered, which is to be done once. */
static void compute_chunk(const struct attention *a, const struct work *w, const struct tile *tile, long head, long heads, long start,
                          const struct piece *pieces, long count, const struct result *result) {
    long rows = tile->count * a->group, step = a->on_tiles && heads == 1 && a->layout.tile == TILE ? TILE_ROWS : rows;
    for (long row = 0; row < rows; row += step)
        compute_rows(a, w, tile, row, at_most(row + step, rows), head, heads, start, pieces, count, result);
}

static void load_queries(const struct attention *a, const struct tile *tile, long head, void *to) {
    long dim = a->layout.dim;
    float *q = to;
    vf scale = vset(a->scale * LOG2E); /* so that exponentials are powers of two */
    for (long i = 0, row = 0; i < tile->count; i++)
        for (long r = 0; r < a->group; r++, row++) {
            long from = a->queries[tile->first + i].token * a->q_row + (head * a->group + r) * dim, d = 0;
            if (NARROW(a->layout.half)) {
                memcpy((bf16 *)to + row * dim, (const bf16 *)a->q + from, dim * sizeof(bf16));
                continue;
            }
            for (; d + VL <= dim; d += VL) vstore(q + row * dim + d, load_as_float(a->q, from + d, a->layout.half) * scale);
            for (; d < dim; d++) q[row * dim + d] = get_float(a->q, from + d, a->layout.half) * scale[0];
        }
}

/* Whether all rows of a tile see all of a chunk, in one head's tiles of keys and values as they lie, and there is code for that. */
static int is_whole(const struct attention *a, const struct item *item, long chunk) {
    return (chunk + 1) * CHUNK <= a->tiles[item->tile].whole && item->heads == 1 && a->layout.tile == TILE && a->on_tiles && whole_chunks_of(a->layout.dim);
}

/* Such a chunk's tiles of keys, then of values. */
static void find_whole(const struct attention *a, const struct tile *tile, long head, long chunk, const char **tiles) {
    const struct kv_layout *l = &a->layout;
    const int32_t *table = a->tables + a->queries[tile->first].sequence * a->table_stride;
    const char *keys = element(a->k_cache, kv_tile(l, 0, head, 0), 1), *values = element(a->v_cache, kv_tile(l, 0, head, 0), 1);
    long block = chunk * CHUNK / l->block_size, offset = chunk * CHUNK % l->block_size, block_bytes = kv_tile(l, 1, 0, 0) * 2;
    for (long i = 0; i < CHUNK_TILES; i++) {
        long at = table[block] * block_bytes + offset * l->dim * 2;
        tiles[i] = keys + at, tiles[CHUNK_TILES + i] = values + at;
        if ((offset += TILE) == l->block_size) block++, offset = 0;
    }
}

/* What the item after `chunk` of item `index` reads: its next chunk, or the first one of the next item, which this thread takes if no
   other is faster. */
static void look_ahead(const struct attention *a, const struct work *w, long index, long chunk) {
    const struct item *item = a->items + index;
    struct upcoming *u = w->upcoming;
    u->next = u->count = u->byte = 0;
    u->bytes = TILE * a->layout.dim * 2;
    if (++chunk == item->end_chunk) {
        if (++index == a->item_count) return;
        chunk = (++item)->first_chunk;
    }
    u->call = a->call, u->item = index, u->chunk = chunk;
    const struct tile *tile = a->tiles + item->tile;
    if (!from_memory(a, tile) || item->heads > 1 || a->layout.tile != TILE) return;
    if (is_whole(a, item, chunk)) {
        find_whole(a, tile, item->first_head, chunk, u->tiles);
        u->count = 2 * CHUNK_TILES;
        return;
    }
    const struct query *queries = a->queries + tile->first;
    struct piece pieces[2 * ROWS];
    long count = find_pieces(queries, 0, tile->count, chunk * CHUNK, (chunk + 1) * CHUNK, pieces, 0);
    for (int of_values = 0; of_values < 2; of_values++)
        for (const struct piece *p = pieces; p < pieces + count; p++) {
            const void *tiles[CHUNK_TILES];
            long n = (p->to - p->from + TILE - 1) / TILE;
            find_tiles(a, w, queries, p, item->first_head, of_values, tiles);
            announce(u, tiles, n);
        }
    announced(u);
}

/* A chunk as in most of a long prefix: nothing to look for, to mask or to pad. */
static void compute_whole(const struct attention *a, const struct work *w, long index, long chunk, const struct result *result) {
    const struct item *item = a->items + index;
    const struct tile *tile = a->tiles + item->tile;
    struct whole_chunk whole = {.rows = tile->count * a->group, .dim = a->layout.dim, .q = w->q, .scale = a->scale * LOG2E, .scores = w->scores,
                                .weights = w->weights, .values = result->values, .largest = result->largest, .sum = result->sum};
    const struct upcoming *u = w->upcoming;
    if (u->count && u->call == a->call && u->item == index && u->chunk == chunk) memcpy(whole.tiles, u->tiles, sizeof whole.tiles);
    else {
        find_whole(a, tile, item->first_head, chunk, whole.tiles);
        if (from_memory(a, tile)) fetch_tiles((const void *const *)whole.tiles + CHUNK_TILES, CHUNK_TILES, a->layout.dim);
    }
    look_ahead(a, w, index, chunk);
    tile_whole_chunk(&whole, w->upcoming);
}

static void attention_item(void *context, long index, int thread) {
    const struct attention *a = context;
    const struct item *item = a->items + index;
    const struct tile *tile = a->tiles + item->tile;
    long dim = a->layout.dim, rows = tile->count * a->group, stride = padded_rows(a, tile);
    int split = tile->partial >= 0;
    struct work w;
    work_layout(&w, a->thread_scratch + thread * a->thread_bytes, a);
    w.q = element(w.q, item->first_head * a->tile_rows * dim, NARROW(a->layout.half));
    for (long h = 0; h < item->heads; h++) {
        long *queries_of = w.queries_of + item->first_head + h;
        /* Those of all heads lie closer together, where another tile's item of one head may have written over them. */
        if (item->heads > 1 || *queries_of != a->call + item->tile) load_queries(a, tile, item->first_head + h, element(w.q, h * rows * dim, NARROW(a->layout.half)));
        *queries_of = a->call + item->tile;
    }
    w.total.rows = w.chunk.rows = stride;
    struct merged *merged = a->merged + item->tile * a->layout.heads + item->first_head;
    struct result total = split ? partial_results(a, tile, item->first_head, 0) : w.total;
    for (long chunk = item->first_chunk; chunk < item->end_chunk; chunk++) {
        int next = !split || item->in_order && __atomic_load_n(&merged->chunks, __ATOMIC_ACQUIRE) == chunk; /* it can be merged at once */
        struct result result = !chunk ? total : next ? w.chunk : partial_results(a, tile, item->first_head, chunk);
        if (is_whole(a, item, chunk)) compute_whole(a, &w, index, chunk, &result);
        else {
            look_ahead(a, &w, index, chunk);
            struct piece pieces[2 * ROWS];
            long start = chunk * CHUNK, count = find_pieces(a->queries + tile->first, 0, tile->count, start, start + CHUNK, pieces, 0);
            compute_chunk(a, &w, tile, item->first_head, item->heads, start, pieces, count, &result);
        }
        if (!next) continue;
        for (long h = 0; chunk && h < item->heads; h++) merge_rows(&w, rows, from_row(total, h * stride, dim), from_row(result, h * stride, dim), dim);
        if (split) __atomic_store_n(&merged->chunks, chunk + 1, __ATOMIC_RELEASE);
    }
    for (long h = 0; !split && h < item->heads; h++)
        for (long row = 0; row < rows; row++) finish_row(a, item->first_head + h, tile, row, from_row(total, h * stride + row, dim));
}

/* A register of rows of a tile for a head. */
static void merge_item(void *context, long index, int thread) {
    const struct attention *a = context;
    const struct tile *tile = a->tiles + index / a->merge_panels / a->layout.heads;
    long head = index / a->merge_panels % a->layout.heads, first = index % a->merge_panels * VL, dim = a->layout.dim;
    long rows = at_most(tile->count * a->group - first, VL);
    if (tile->partial < 0 || rows <= 0) return;
    struct work w;
    work_layout(&w, a->thread_scratch + thread * a->thread_bytes, a);
    struct result total = from_row(partial_results(a, tile, head, 0), first, dim);
    for (long chunk = at_least(a->merged[index / a->merge_panels].chunks, 1); chunk < tile->chunks; chunk++)
        merge_rows(&w, rows, total, from_row(partial_results(a, tile, head, chunk), first, dim), dim);
    for (long row = 0; row < rows; row++) finish_row(a, head, tile, first + row, from_row(total, row, dim));
}

/* q [tokens, heads, dim] with rows q_row apart; out the same, contiguous; heads = kv_heads * group.  starts [sequences + 1],
   lengths [sequences], tables [sequences, table_stride], segments [segment_count, 4] as in AttentionMetadata.  dim at least 16, even
   if half. */
void radixkv_paged_attention(const void *q, long q_row, const void *k_cache, const void *v_cache, void *out, const int32_t *starts,
                             const int32_t *lengths, const int32_t *tables, long table_stride, long sequences, long tokens, long kv_heads,
                             long group, long dim, long block_size, const int32_t *segments, long segment_count, float scale, int half,
                             int threads) {
    struct attention a = {.q = q, .k_cache = k_cache, .v_cache = v_cache, .out = out, .tables = tables, .table_stride = table_stride,
                          .q_row = q_row, .group = group, .layout = kv_layout(kv_heads, dim, block_size, half), .scale = scale,
                          .on_tiles = NARROW(half) && dim % TILE == 0 && matrix_tiles()};
    attention_plan(&a, starts, lengths, sequences, tokens, segments, segment_count, threads);
    if (a.query_count < tokens) memset(out, 0, tokens * kv_heads * group * dim * (half ? 2 : 4)); /* rows that no sequence owns */
    static long calls = 1L << 40; /* such numbers are not in a scratch by chance */
    a.call = __atomic_fetch_add(&calls, a.tile_count, __ATOMIC_RELAXED);
    struct work w;
    a.thread_bytes = work_layout(&w, 0, &a);
    long merged_bytes = a.partial_rows ? a.tile_count * kv_heads * sizeof *a.merged : 0;
    a.thread_scratch = scratch(a.thread_bytes * threads + merged_bytes + a.partial_rows * (dim + 2) * sizeof(float));
    a.merged = memset(a.thread_scratch + a.thread_bytes * threads, 0, merged_bytes);
    a.partial_values = (float *)((char *)a.merged + merged_bytes);
    a.partial_largest = a.partial_values + a.partial_rows * dim;
    a.partial_sum = a.partial_largest + a.partial_rows;
    parallel_for(a.item_count, threads, attention_item, &a);
    a.merge_panels = (a.max_rows + VL - 1) / VL;
    if (a.partial_rows) parallel_for(a.tile_count * kv_heads * a.merge_panels, threads, merge_item, &a);
    free(a.items);
    free(a.queries);
}
