/* Paged attention: packed queries, causal, grouped-query, through block tables.

   Keys are taken in chunks of CHUNK tokens at absolute positions.  For each query row a chunk gives a partial result (its largest score,
   the sum of exponentials, and the values summed with those weights), computed the same way whichever rows stand beside it; partial
   results are merged in order of position (FlashAttention's online softmax, over fixed chunks as in Flash-Decoding).  So a row's bits
   depend on its own tokens only: not on the batch, on how prefill was cut, or on the block size.

   Work is cut into tiles of up to ROWS rows that read the same keys: neighbouring tokens of a prefill with all heads of a group,
   or short queries of several sequences whose block tables begin alike, which then read the shared chunks once. */
#include "gemm.h"
#include "kv.h"
#include "parallel.h"

#include <math.h>
#include <stdlib.h>

#define CHUNK 64
#define ROWS 48
#define CHUNK_TILES (CHUNK / TILE)

struct query { /* one token's queries, a row for each head of the group */
    int32_t sequence, token; /* token: its row in q and out */
    long limit; /* it sees positions 0 .. limit - 1 */
};

struct tile { /* queries first .. first + count - 1, sorted by block table, those of a sequence in order of position */
    long first, count, chunks;
    long partial; /* partial rows of the tiles before this one */
};

struct attention {
    const void *q, *k_cache, *v_cache;
    void *out;
    const int32_t *tables;
    long table_stride, q_row, group;
    struct kv_layout layout;
    float scale;
    const struct query *queries;
    const struct tile *tiles;
    long tile_count, max_rows;
    char *thread_scratch;
    size_t thread_bytes;
    /* With few tiles, a tile's chunks are cut into spans of `span`, whose partial results are kept for each chunk and merged after. */
    long span, spans, partial_rows;
    float *partial_values, *partial_stats; /* [KV head][partial row][dim] and [..][2]: largest score, sum */
};

/* Scores are kept times log2(e), so that exponentials are powers of two. */
#define LOG2E 0x1.715476p+0f

struct work { /* one thread's scratch */
    float *q, *values, *total, *scores, *largest, *sum, *total_largest, *total_sum;
    void *gathered_k, *gathered_v;
};

static size_t work_layout(struct work *w, char *base, long rows, long dim, int half) {
    size_t used = 0;
#define TAKE(p, bytes) (p = (void *)(base + used), used += ((bytes) + 63) / 64 * 64)
    TAKE(w->q, rows * dim * 4);
    TAKE(w->values, rows * dim * 4);
    TAKE(w->total, rows * dim * 4);
    TAKE(w->scores, rows * CHUNK * 4);
    TAKE(w->largest, rows * 4);
    TAKE(w->sum, rows * 4);
    TAKE(w->total_largest, rows * 4);
    TAKE(w->total_sum, rows * 4);
    TAKE(w->gathered_k, CHUNK * dim * (half ? 2 : 4));
    TAKE(w->gathered_v, CHUNK * dim * (half ? 2 : 4));
#undef TAKE
    return used;
}

/* Keys and values of one chunk as tiles of 16 tokens, of which the first `valid` tokens count. */
struct chunk {
    const void *k[CHUNK_TILES], *v[CHUNK_TILES];
    long valid;
};

static void find_chunk(const struct attention *a, const struct work *w, const int32_t *table, long head, long start, struct chunk *c) {
    const struct kv_layout *l = &a->layout;
    long size = l->half ? 2 : 4;
    if (l->tile == TILE) {
        for (long i = 0; i * TILE < c->valid; i++) {
            long position = start + i * TILE;
            long at = kv_tile(l, table[position / l->block_size], head, position % l->block_size);
            c->k[i] = element(a->k_cache, at, l->half);
            c->v[i] = element(a->v_cache, at, l->half);
        }
        return;
    }
    /* Small blocks: gather them into tiles of 16. */
    struct kv_layout wide = *l;
    wide.tile = TILE;
    for (long t = 0; t < c->valid; t += l->tile) {
        long from = kv_tile(l, table[(start + t) / l->block_size], head, 0), to = t / TILE * TILE * l->dim;
        for (long u = 0; u < l->tile && t + u < c->valid; u++)
            for (long d = 0; d < l->dim; d++) {
                long k = from + k_index(l, u, d), v = from + v_index(l, u, d);
                memcpy(element(w->gathered_k, to + k_index(&wide, t % TILE + u, d), l->half), element(a->k_cache, k, l->half), size);
                memcpy(element(w->gathered_v, to + v_index(&wide, t % TILE + u, d), l->half), element(a->v_cache, v, l->half), size);
            }
    }
    for (long i = 0; i < CHUNK_TILES; i++) {
        c->k[i] = element(w->gathered_k, i * TILE * l->dim, l->half);
        c->v[i] = element(w->gathered_v, i * TILE * l->dim, l->half);
    }
}

INLINE void score_tiles(int MR, int NT, int half, const float *q, long dim, const void *const *k, float *scores) {
    vf acc[MAX_MR * MAX_NT * TV];
    UNROLL for (int i = 0; i < MR * NT * TV; i++) acc[i] = vset(0);
    accumulate(MR, NT, half, acc, q, dim, k, TILE, dim);
    UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NT * TV; n++) vstore(scores + m * CHUNK + n * VL, acc[m * NT * TV + n]);
}

INLINE void value_tiles(int MR, int NT, int half, const float *p, const void *const *v, long valid, long d, long dim, float *values) {
    vf acc[MAX_MR * MAX_NT * TV];
    UNROLL for (int i = 0; i < MR * NT * TV; i++) acc[i] = vset(0);
    for (long t = 0; t < valid; t += TILE) {
        const void *b[MAX_NT];
        UNROLL for (int n = 0; n < NT; n++) b[n] = element(v[t / TILE], (d + n * TILE) * (half ? 2 : 1), half);
        accumulate(MR, NT, half, acc, p + t, CHUNK, b, dim, valid - t < TILE ? valid - t : TILE);
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < NT * TV; n++) vstore(values + m * dim + d + n * VL, acc[m * NT * TV + n]);
}

/* scores[rows][CHUNK] = q k for tiles [tile, tile + count). */
static void score_panel(int half, long rows, const float *q, long dim, const void *const *k, long count, float *scores) {
#define WIDTH(MR, NT)                                                                                                             \
    for (; i + NT <= count; i += NT) {                                                                                            \
        if (half) score_tiles(MR, NT, 1, q, dim, k + i, scores + i * TILE);                                                       \
        else score_tiles(MR, NT, 0, q, dim, k + i, scores + i * TILE);                                                            \
    }
#define CASE(MR)                                                                                                                  \
    if (WIDE(MR) <= CHUNK_TILES) WIDTH(MR, (WIDE(MR) <= CHUNK_TILES ? WIDE(MR) : CHUNK_TILES))                                    \
    WIDTH(MR, 1)
    long i = 0;
    FOR_ROWS(rows, CASE)
#undef CASE
#undef WIDTH
}

/* values[rows][d ..] = p v for as many tiles of 16 columns as fit from column d on; the last tile may overlap the one before. */
static void value_panel(int half, long rows, const float *p, const struct chunk *c, long valid, long first, long last, long dim, float *values) {
#define WIDTH(MR, NT)                                                                                                             \
    for (; d + NT * TILE <= last; d += NT * TILE) {                                                                               \
        if (half) value_tiles(MR, NT, 1, p, c->v, valid, d, dim, values);                                                         \
        else value_tiles(MR, NT, 0, p, c->v, valid, d, dim, values);                                                              \
    }
#define CASE(MR)                                                                                                                  \
    WIDTH(MR, WIDE(MR))                                                                                                           \
    WIDTH(MR, 1)                                                                                                                  \
    if (d < last) {                                                                                                               \
        d = last - TILE;                                                                                                          \
        WIDTH(MR, 1)                                                                                                              \
    }
    long d = first;
    FOR_ROWS(rows, CASE)
#undef CASE
#undef WIDTH
}

/* Turns a row of scores into weights; tokens from `limit` on get weight 0. */
static void softmax_row(float *scores, long limit, float *largest, float *sum) {
    vf s[CHUNK / VL], most = vset(-INFINITY), total = vset(0);
    if (limit < CHUNK) for (long t = limit; t < CHUNK; t++) scores[t] = -INFINITY; /* they may hold anything */
    UNROLL for (int i = 0; i < CHUNK / VL; i++) { s[i] = vload(scores + i * VL); most = vmax(most, s[i]); }
    float top = vmax_lanes(most);
    UNROLL for (int i = 0; i < CHUNK / VL; i++) {
        vf p = vexp2(s[i] - vset(top));
        vstore(scores + i * VL, p);
        total += p;
    }
    *largest = top;
    *sum = vsum(total);
}

/* total += values, both scaled to the larger of their largest scores. */
static void merge_row(float *total, float *total_largest, float *total_sum, const float *values, float largest, float sum, long dim) {
    float both = *total_largest > largest ? *total_largest : largest;
    vf powers = vset(0);
    powers[0] = *total_largest - both;
    powers[1] = largest - both;
    powers = vexp2(powers);
    vf old = vset(powers[0]), new = vset(powers[1]);
    *total_largest = both;
    *total_sum = vfma(vset(*total_sum), old, vset(sum) * new)[0];
    long d = 0;
    for (; d + VL <= dim; d += VL) vstore(total + d, vfma(vload(total + d), old, vload(values + d) * new));
    for (; d < dim; d++) total[d] = vfma(vset(total[d]), old, vset(values[d]) * new)[0];
}

static void finish_row(const struct attention *a, long head, const struct tile *tile, long row, const float *total, float sum) {
    long token = a->queries[tile->first + row / a->group].token, dim = a->layout.dim, d = 0;
    long to = ((token * a->layout.heads + head) * a->group + row % a->group) * dim;
    vf inverse = vset(sum == 0 ? 0 : 1.0f / sum);
    for (; d + VL <= dim; d += VL) store_from_float(a->out, to + d, vload(total + d) * inverse, a->layout.half);
    for (; d < dim; d++) put_float(a->out, to + d, total[d] * inverse[0], a->layout.half);
}

static int same_blocks(const struct attention *a, const struct query *x, const struct query *y, long start) {
    long size = a->layout.block_size, first = start / size, last = (start + CHUNK - 1) / size;
    return x->limit >= start + CHUNK && y->limit >= start + CHUNK &&
           !memcmp(a->tables + x->sequence * a->table_stride + first, a->tables + y->sequence * a->table_stride + first,
                   (last - first + 1) * sizeof(int32_t));
}

/* Partial results of queries [i, j) of a tile for a chunk that starts at `start`; all of them read the same blocks. */
static void compute_chunk(const struct attention *a, const struct work *w, const struct query *queries, long head, long start, long i, long j,
                          float *values, float *largest, float *sum) {
    long dim = a->layout.dim, first = i * a->group, rows = (j - i) * a->group, panels = panel_count(rows);
    int half = a->layout.half;
    struct chunk c;
    c.valid = queries[j - 1].limit - start < CHUNK ? queries[j - 1].limit - start : CHUNK;
    find_chunk(a, w, a->tables + queries[i].sequence * a->table_stride, head, start, &c);
    long tiles = (c.valid + TILE - 1) / TILE;
    /* One panel streams through all of K and V; with several, a few tiles stay in L1 while the panels pass over them. */
    long tile_step = panels == 1 ? tiles : WIDE(MAX_MR), dim_step = panels == 1 ? dim : WIDE(MAX_MR) * TILE;
#define PANELS                                                                                                                    \
    for (long p = 0, row, end; row = first + panel_start(rows, panels, p), end = first + panel_start(rows, panels, p + 1), p < panels; p++)
#define VISIBLE(row) (queries[(row) / a->group].limit - start)
    for (long t = 0; t < tiles; t += tile_step)
        PANELS if (t * TILE < VISIBLE(end - 1))
            score_panel(half, end - row, w->q + row * dim, dim, c.k + t, tiles - t < tile_step ? tiles - t : tile_step,
                        w->scores + row * CHUNK + t * TILE);
    for (long row = first; row < first + rows; row++) softmax_row(w->scores + row * CHUNK, VISIBLE(row), largest + row, sum + row);
    for (long d = 0; d < dim; d += dim_step)
        PANELS value_panel(half, end - row, w->scores + row * CHUNK, &c, VISIBLE(end - 1) < c.valid ? VISIBLE(end - 1) : c.valid, d,
                           dim - d < dim_step ? dim : d + dim_step, dim, values + row * dim);
#undef PANELS
#undef VISIBLE
}

static void load_queries(const struct attention *a, const struct tile *tile, long head, float *q) {
    long dim = a->layout.dim;
    vf scale = vset(a->scale * LOG2E);
    for (long row = 0; row < tile->count * a->group; row++) {
        long from = a->queries[tile->first + row / a->group].token * a->q_row + (head * a->group + row % a->group) * dim, d = 0;
        for (; d + VL <= dim; d += VL) vstore(q + row * dim + d, load_as_float(a->q, from + d, a->layout.half) * scale);
        for (; d < dim; d++) q[row * dim + d] = get_float(a->q, from + d, a->layout.half) * scale[0];
    }
}

static void attention_item(void *context, long item, int thread) {
    const struct attention *a = context;
    long span = item % a->spans, head = item / a->spans / a->tile_count, rows;
    const struct tile *tile = a->tiles + a->tile_count - 1 - item / a->spans % a->tile_count; /* a prefill's last tile is its longest */
    const struct query *queries = a->queries + tile->first;
    long dim = a->layout.dim, first_chunk = span * a->span, end_chunk = first_chunk + a->span < tile->chunks ? first_chunk + a->span : tile->chunks;
    if (first_chunk >= end_chunk) return;
    struct work w;
    work_layout(&w, a->thread_scratch + thread * a->thread_bytes, a->max_rows, dim, a->layout.half);
    rows = tile->count * a->group;
    load_queries(a, tile, head, w.q);
    memset(w.total, 0, rows * dim * sizeof(float));
    for (long row = 0; row < rows; row++) w.total_largest[row] = -INFINITY, w.total_sum[row] = 0;
    for (long chunk = first_chunk; chunk < end_chunk; chunk++) {
        long start = chunk * CHUNK;
        float *values = w.values, *stats = 0;
        if (a->spans > 1) {
            long at = head * a->partial_rows + tile->partial + chunk * rows;
            values = a->partial_values + at * dim;
            stats = a->partial_stats + at * 2;
        }
        for (long row = 0; row < rows; row++) w.largest[row] = -INFINITY; /* of rows that don't reach this chunk */
        for (long i = 0, j; i < tile->count; i = j) {
            j = i + 1;
            if (queries[i].limit <= start) continue;
            while (j < tile->count && (queries[j].sequence == queries[i].sequence || same_blocks(a, queries + j - 1, queries + j, start))) j++;
            compute_chunk(a, &w, queries, head, start, i, j, values, w.largest, w.sum);
        }
        for (long row = 0; row < rows; row++)
            if (stats) stats[2 * row] = w.largest[row], stats[2 * row + 1] = w.sum[row];
            else if (w.largest[row] != -INFINITY)
                merge_row(w.total + row * dim, w.total_largest + row, w.total_sum + row, values + row * dim, w.largest[row], w.sum[row], dim);
    }
    if (a->spans == 1)
        for (long row = 0; row < rows; row++) finish_row(a, head, tile, row, w.total + row * dim, w.total_sum[row]);
}

static void merge_item(void *context, long item, int thread) {
    const struct attention *a = context;
    long head = item / a->tile_count, dim = a->layout.dim;
    const struct tile *tile = a->tiles + item % a->tile_count;
    struct work w;
    work_layout(&w, a->thread_scratch + thread * a->thread_bytes, a->max_rows, dim, a->layout.half);
    long rows = tile->count * a->group;
    for (long row = 0; row < rows; row++) {
        float largest = -INFINITY, sum = 0;
        memset(w.total, 0, dim * sizeof(float));
        for (long chunk = 0; chunk < tile->chunks; chunk++) {
            long at = head * a->partial_rows + tile->partial + chunk * rows + row;
            const float *stats = a->partial_stats + at * 2;
            if (stats[0] != -INFINITY) merge_row(w.total, &largest, &sum, a->partial_values + at * dim, stats[0], stats[1], dim);
        }
        finish_row(a, head, tile, row, w.total, sum);
    }
}

struct sequence {
    const int32_t *table;
    int32_t index, start, queries, length, full_blocks;
};

/* Short queries first, in lexicographic order of their full blocks, so that those that begin alike are neighbours. */
static int by_table(const void *x, const void *y) {
    const struct sequence *a = x, *b = y;
    int32_t shared = a->full_blocks < b->full_blocks ? a->full_blocks : b->full_blocks;
    int order = memcmp(a->table, b->table, shared * sizeof(int32_t));
    return order ? order : a->full_blocks != b->full_blocks ? a->full_blocks - b->full_blocks : a->index - b->index;
}

/* Cuts the batch into tiles; returns their number.  There is room for a tile for each query. */
static long plan(struct attention *a, struct sequence *sequences, long count, const int32_t *starts, const int32_t *lengths,
                 struct query *queries, struct tile *tiles) {
    long tile_count = 0, n = 0, short_count = 0, per_tile = ROWS / a->group ? ROWS / a->group : 1;
    for (int pass = 0; pass < 2; pass++) { /* short ones to the front */
        for (long s = 0; s < count; s++) {
            int32_t rows = starts[s + 1] - starts[s];
            if (rows <= 0 || lengths[s] <= 0 || (rows > per_tile / 2) != pass) continue;
            sequences[n++] = (struct sequence){a->tables + s * a->table_stride, (int32_t)s, starts[s], rows, lengths[s],
                                               (int32_t)(lengths[s] / a->layout.block_size)};
        }
        if (!pass) short_count = n;
    }
    qsort(sequences, short_count, sizeof *sequences, by_table);
    long sequence_count = n;
    n = 0;
    for (long s = 0; s < sequence_count; s++)
        for (int32_t i = 0; i < sequences[s].queries; i++, n++) {
            queries[n] = (struct query){sequences[s].index, sequences[s].start + i, (long)sequences[s].length - sequences[s].queries + i + 1};
            struct tile *tile = tiles + tile_count - 1;
            int fits = n > 0 && tile->count + (i ? 1 : sequences[s].queries) <= per_tile &&
                       (i || (s < short_count && same_blocks(a, queries + n - 1, queries + n, 0)));
            if (!fits) *(tile = tiles + tile_count++) = (struct tile){.first = n};
            long chunks = (queries[n].limit + CHUNK - 1) / CHUNK;
            tile->count++;
            if (chunks > tile->chunks) tile->chunks = chunks;
        }
    return tile_count;
}

/* q [tokens, heads, dim] with rows q_row apart; out the same, contiguous; heads = kv_heads * group.  starts [sequences + 1],
   lengths [sequences], tables [sequences, table_stride].  dim at least 16, even if half. */
void radixkv_paged_attention(const void *q, long q_row, const void *k_cache, const void *v_cache, void *out, const int32_t *starts,
                             const int32_t *lengths, const int32_t *tables, long table_stride, long sequences, long tokens, long kv_heads,
                             long group, long dim, long block_size, float scale, int half, int threads) {
    struct attention a = {.q = q, .k_cache = k_cache, .v_cache = v_cache, .out = out, .tables = tables, .table_stride = table_stride,
                          .q_row = q_row, .group = group, .layout = kv_layout(kv_heads, dim, block_size, half), .scale = scale};
    a.max_rows = group > ROWS ? group : ROWS;
    struct work w;
    a.thread_bytes = work_layout(&w, 0, a.max_rows, dim, half);
    size_t queries_bytes = tokens * sizeof(struct query), tiles_bytes = tokens * sizeof(struct tile);
    struct query *queries = malloc(queries_bytes + tiles_bytes + sequences * sizeof(struct sequence));
    if (!queries) abort();
    struct tile *tiles = (struct tile *)((char *)queries + queries_bytes);
    a.queries = queries;
    a.tiles = tiles;
    a.tile_count = plan(&a, (struct sequence *)((char *)tiles + tiles_bytes), sequences, starts, lengths, queries, tiles);

    long planned = 0, chunks = 0;
    for (long t = 0; t < a.tile_count; t++) {
        planned += tiles[t].count;
        tiles[t].partial = a.partial_rows;
        a.partial_rows += tiles[t].count * group * tiles[t].chunks;
        chunks = tiles[t].chunks > chunks ? tiles[t].chunks : chunks;
    }
    if (planned < tokens) memset(out, 0, tokens * kv_heads * group * dim * (half ? 2 : 4)); /* rows that no sequence owns */
    a.span = chunks;
    if (threads > 1 && a.tile_count * kv_heads < 4L * threads) {
        a.span = (chunks * a.tile_count * kv_heads + 8L * threads - 1) / (8L * threads);
        if (a.span < 2) a.span = 2;
    }
    a.spans = chunks > a.span ? (chunks + a.span - 1) / a.span : 1;
    size_t partial_bytes = a.spans > 1 ? a.partial_rows * kv_heads * (dim + 2) * sizeof(float) : 0;
    a.thread_scratch = scratch(a.thread_bytes * threads + partial_bytes);
    a.partial_values = (float *)(a.thread_scratch + a.thread_bytes * threads);
    a.partial_stats = a.partial_values + a.partial_rows * kv_heads * dim;
    parallel_for(a.tile_count * kv_heads * a.spans, threads, attention_item, &a);
    if (a.spans > 1) parallel_for(a.tile_count * kv_heads, threads, merge_item, &a);
    free(queries);
}
