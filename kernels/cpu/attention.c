/* Paged attention: packed queries, causal, grouped-query, through block tables.

   Keys are taken in chunks of CHUNK tokens at absolute positions.  For each query row a chunk gives a partial result (its largest score,
   the sum of exponentials, and the values summed with those weights), computed the same way whichever rows stand beside it; partial
   results are merged in order of position (FlashAttention's online softmax, over fixed chunks as in Flash-Decoding).  So a row's bits
   depend on its own tokens only: not on the batch, on how prefill was cut, on the block size, or on the number of threads. */
#include "attention.h"

#include "gemm.h"
#include "parallel.h"

#include <math.h>
#include <stdlib.h>

#define CHUNK_TILES (CHUNK / TILE)
/* Both products are of bfloat16 pairs where the CPU has them (then queries stay as they come, and weights are rounded as on a GPU);
   elsewhere bfloat16 keys and values are widened to the float32 of queries and weights. */
#define NARROW(half) ((half) && DOT_PAIRS)

struct work { /* one thread's scratch: for all rows of an item, and for the rows of one head */
    void *q;
    float *total, *total_largest, *total_sum;
    float *values, *scores, *largest, *sum, *old_factor, *new_factor;
    void *weights; /* [rows][CHUNK]: the scores' own memory, or bfloat16 */
    void *gathered_k, *gathered_v;
};

static size_t work_layout(struct work *w, char *base, const struct attention *a) {
    long rows = a->max_rows, dim = a->layout.dim, padded = rows + a->layout.heads * VL; /* statistics are taken a register at a time */
    int half = a->layout.half;
    size_t used = 0;
#define TAKE(p, bytes) (p = (void *)(base + used), used += ((bytes) + 63) / 64 * 64)
    TAKE(w->q, rows * dim * (NARROW(half) ? 2 : 4));
    TAKE(w->total, rows * dim * 4);
    TAKE(w->total_largest, padded * 4);
    TAKE(w->total_sum, padded * 4);
    TAKE(w->values, rows * dim * 4);
    TAKE(w->scores, rows * CHUNK * 4);
    TAKE(w->largest, padded * 4);
    TAKE(w->sum, padded * 4);
    TAKE(w->old_factor, padded * 4);
    TAKE(w->new_factor, padded * 4);
    if (NARROW(half)) TAKE(w->weights, rows * CHUNK * 2);
    else w->weights = w->scores;
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

INLINE void score_tiles(int MR, int NT, int half, const void *q, long dim, const void *const *k, const void *const *next, float *scores) {
    vf acc[MAX_MR * MAX_NT * TV];
    UNROLL for (int i = 0; i < MR * NT * TV; i++) acc[i] = vset(0);
    if (NARROW(half)) accumulate_pairs(MR, NT, 1, acc, q, dim, k, TILE, dim, (const char *const *)next, TILE * 2);
    else accumulate(MR, NT, half, 1, acc, q, dim, k, TILE, dim, (const char *const *)next, half ? TILE * 2 : TILE * 4);
    UNROLL for (int m = 0; m < MR; m++) UNROLL for (int n = 0; n < NT * TV; n++) vstore(scores + m * CHUNK + n * VL, acc[m * NT * TV + n]);
}

INLINE void value_tiles(int MR, int NT, int half, const void *p, const void *const *v, const void *const *next, long valid, long d, long dim,
                        float *values) {
    vf acc[MAX_MR * MAX_NT * TV];
    UNROLL for (int i = 0; i < MR * NT * TV; i++) acc[i] = vset(0);
    for (long t = 0; t < valid; t += TILE) {
        const void *b[MAX_NT];
        const char *later[MAX_NT];
        UNROLL for (int n = 0; n < NT; n++) {
            b[n] = element(v[t / TILE], (d + n * TILE) * (half ? 2 : 1), half);
            later[n] = element(next[t / TILE], (d + n * TILE) * (half ? 2 : 1), half);
        }
        long count = valid - t < TILE ? valid - t : TILE;
        if (NARROW(half)) accumulate_pairs(MR, NT, 1, acc, (const bf16 *)p + t, CHUNK, b, dim, count, later, dim * 2);
        else accumulate(MR, NT, half, 1, acc, (const float *)p + t, CHUNK, b, dim, count, later, half ? dim * 2 : dim * 4);
    }
    UNROLL for (int m = 0; m < MR; m++)
        UNROLL for (int n = 0; n < NT * TV; n++) vstore(values + m * dim + d + n * VL, acc[m * NT * TV + n]);
}

/* scores[rows][CHUNK] = q k for `count` tiles from the first. */
static void score_panel(int half, long rows, const void *q, long dim, const struct chunk *c, const struct chunk *next, long first,
                        long count, float *scores) {
#define WIDTH(MR, NT)                                                                                                             \
    for (; t + NT <= first + count; t += NT)                                                                                      \
        half ? score_tiles(MR, NT, 1, q, dim, c->k + t, next->k + t, scores + t * TILE)                                           \
             : score_tiles(MR, NT, 0, q, dim, c->k + t, next->k + t, scores + t * TILE);
#define CASE(MR)                                                                                                                  \
    WIDTH(MR, (WIDE(MR) < CHUNK_TILES ? WIDE(MR) : CHUNK_TILES))                                                                  \
    WIDTH(MR, 1)
    long t = first;
    FOR_ROWS(rows, CASE)
#undef CASE
#undef WIDTH
}

/* values[rows][first .. last - 1] = p v in tiles of 16 columns, of which the last may overlap the one before. */
static void value_panel(int half, long rows, const void *p, const struct chunk *c, const struct chunk *next, long valid, long first,
                        long last, long dim, float *values) {
#define TILES(MR, NT, d)                                                                                                          \
    half ? value_tiles(MR, NT, 1, p, c->v, next->v, valid, d, dim, values) : value_tiles(MR, NT, 0, p, c->v, next->v, valid, d, dim, values)
#define CASE(MR)                                                                                                                  \
    for (; d + WIDE(MR) * TILE <= last; d += WIDE(MR) * TILE) TILES(MR, WIDE(MR), d);                                             \
    for (; d < last; d += TILE) TILES(MR, 1, (d + TILE <= last ? d : last - TILE));
    long d = first;
    FOR_ROWS(rows, CASE)
#undef CASE
#undef TILES
}

/* Turns a row of scores, each times `scale`, into weights; tokens from `limit` on get weight 0. */
INLINE void softmax_row(int narrow, float *scores, void *weights, float scale, long limit, float *largest, float *sum) {
    vf s[CHUNK / VL], most = vset(-INFINITY), total = vset(0);
    if (limit < CHUNK) for (long t = limit; t < CHUNK; t++) scores[t] = -INFINITY; /* they may hold anything */
    UNROLL for (int i = 0; i < CHUNK / VL; i++) { s[i] = vload(scores + i * VL) * vset(scale); most = vmax(most, s[i]); }
    float top = vmax_lanes(most);
    UNROLL for (int i = 0; i < CHUNK / VL; i++) {
        vf p = vexp2_of(s[i] - vset(top), narrow);
        store_from_float(weights, i * VL, p, narrow);
        total += p;
    }
    *largest = top;
    *sum = vsum(total);
}

/* total[rows][dim] += values, both scaled to the larger of a row's largest scores.  Rows whose `largest` is -INFINITY stay as they are. */
static void merge_rows(const struct work *w, long rows, float *total, float *total_largest, float *total_sum, const float *values,
                       const float *largest, const float *sum, long dim) {
    for (long row = 0; row < rows; row += VL) { /* all of a register, of which the last may reach beyond the rows into padding */
        vf old = vload(total_largest + row), new = vload(largest + row), both = vmax(old, new);
        vi none = both == vset(-INFINITY);
        old = vexp2(vselect(none, vset(-INFINITY), old - both)), new = vexp2(vselect(none, vset(-INFINITY), new - both));
        vstore(total_largest + row, both);
        vstore(total_sum + row, vfma(vload(total_sum + row), old, vload(sum + row) * new));
        vstore(w->old_factor + row, old);
        vstore(w->new_factor + row, new);
    }
    for (long row = 0; row < rows; row++, total += dim, values += dim) {
        if (largest[row] == -INFINITY) continue;
        vf old = vset(w->old_factor[row]), new = vset(w->new_factor[row]);
        long d = 0;
        for (; d + VL <= dim; d += VL) vstore(total + d, vfma(vload(total + d), old, vload(values + d) * new));
        for (; d < dim; d++) total[d] = vfma(vset(total[d]), old, vset(values[d]) * new)[0];
    }
}

static void finish_row(const struct attention *a, long head, const struct tile *tile, long row, const float *total, float sum) {
    long token = a->queries[tile->first + row / a->group].token, dim = a->layout.dim, d = 0;
    long to = ((token * a->layout.heads + head) * a->group + row % a->group) * dim;
    vf inverse = vset(sum == 0 ? 0 : 1.0f / sum);
    for (; d + VL <= dim; d += VL) store_from_float(a->out, to + d, vload(total + d) * inverse, a->layout.half);
    for (; d < dim; d++) put_float(a->out, to + d, total[d] * inverse[0], a->layout.half);
}

/* Partial results of queries [i, j) of a tile for a chunk that starts at `start`; all of them read the same blocks. */
static void compute_chunk(const struct attention *a, const struct work *w, const struct query *queries, const void *q, const struct item *item,
                          long head, long start, long i, long j, float *values) {
    long dim = a->layout.dim, first = i * a->group, rows = (j - i) * a->group, panels = panel_count(rows);
    int half = a->layout.half, narrow = NARROW(half);
    float scale = narrow ? a->scale * LOG2E : 1; /* wide queries are scaled already */
    const int32_t *table = a->tables + queries[i].sequence * a->table_stride;
    long remaining = queries[j - 1].limit - start;
    struct chunk c = {.valid = remaining < CHUNK ? remaining : CHUNK};
    find_chunk(a, w, table, head, start, &c);
    /* What this item reads next is fetched from memory meanwhile: the same chunk of the next head, or the next chunk. */
    struct chunk next = c;
    int same_chunk = head + 1 < item->first_head + item->heads;
    long later = same_chunk ? start : start + CHUNK, left = same_chunk ? remaining : remaining - CHUNK;
    if (left > 0 && a->layout.tile == TILE) {
        next.valid = left < CHUNK ? left : CHUNK;
        find_chunk(a, w, table, same_chunk ? head + 1 : item->first_head, later, &next);
    }
    long tiles = (c.valid + TILE - 1) / TILE;
    /* One panel streams through all of K and V; with several, a few tiles stay in L1 while the panels pass over them. */
    long tile_step = panels == 1 ? tiles : WIDE(MAX_MR), dim_step = panels == 1 ? dim : WIDE(MAX_MR) * TILE;
#define PANELS                                                                                                                    \
    for (long p = 0, row, end; row = first + panel_start(rows, panels, p), end = first + panel_start(rows, panels, p + 1), p < panels; p++)
#define VISIBLE(row) (queries[(row) / a->group].limit - start)
    for (long t = 0; t < tiles; t += tile_step)
        PANELS if (t * TILE < VISIBLE(end - 1))
            score_panel(half, end - row, element(q, row * dim, narrow), dim, &c, &next, t, tiles - t < tile_step ? tiles - t : tile_step,
                        w->scores + row * CHUNK);
    for (long row = first; row < first + rows; row++) {
        float *scores = w->scores + row * CHUNK;
        void *weights = element(w->weights, row * CHUNK, narrow);
        narrow ? softmax_row(1, scores, weights, scale, VISIBLE(row), w->largest + row, w->sum + row)
               : softmax_row(0, scores, weights, scale, VISIBLE(row), w->largest + row, w->sum + row);
    }
    for (long d = 0; d < dim; d += dim_step)
        PANELS value_panel(half, end - row, element(w->weights, row * CHUNK, narrow), &c, &next, VISIBLE(end - 1) < c.valid ? VISIBLE(end - 1) : c.valid, d,
                           dim - d < dim_step ? dim : d + dim_step, dim, values + row * dim);
#undef PANELS
#undef VISIBLE
}

static void load_queries(const struct attention *a, const struct tile *tile, long head, void *to) {
    long dim = a->layout.dim;
    float *q = to;
    vf scale = vset(a->scale * LOG2E); /* so that exponentials are powers of two */
    for (long row = 0; row < tile->count * a->group; row++) {
        long from = a->queries[tile->first + row / a->group].token * a->q_row + (head * a->group + row % a->group) * dim, d = 0;
        if (NARROW(a->layout.half)) {
            memcpy((bf16 *)to + row * dim, (const bf16 *)a->q + from, dim * sizeof(bf16));
            continue;
        }
        for (; d + VL <= dim; d += VL) vstore(q + row * dim + d, load_as_float(a->q, from + d, a->layout.half) * scale);
        for (; d < dim; d++) q[row * dim + d] = get_float(a->q, from + d, a->layout.half) * scale[0];
    }
}

static void attention_item(void *context, long index, int thread) {
    const struct attention *a = context;
    const struct item *item = a->items + index;
    const struct tile *tile = a->tiles + item->tile;
    const struct query *queries = a->queries + tile->first;
    long dim = a->layout.dim, rows = tile->count * a->group, stride = (rows + VL - 1) / VL * VL; /* of a head's statistics */
    struct work w;
    work_layout(&w, a->thread_scratch + thread * a->thread_bytes, a);
    int narrow = NARROW(a->layout.half);
    for (long h = 0; h < item->heads; h++) load_queries(a, tile, item->first_head + h, element(w.q, h * rows * dim, narrow));
    memset(w.total, 0, item->heads * rows * dim * sizeof(float));
    for (long i = 0; i < item->heads * stride; i++) w.total_largest[i] = -INFINITY, w.total_sum[i] = 0;
    for (long chunk = item->first_chunk; chunk < item->end_chunk; chunk++)
        for (long h = 0; h < item->heads; h++) {
            long start = chunk * CHUNK, head = item->first_head + h;
            long partial = tile->partial + (head * tile->chunks + chunk) * rows;
            float *values = tile->partial < 0 ? w.values : a->partial_values + partial * dim;
            for (long row = 0; row < rows; row++) w.largest[row] = -INFINITY; /* of rows that don't reach this chunk */
            for (long i = 0, j; i < tile->count; i = j) {
                j = i + 1;
                if (queries[i].limit <= start) continue;
                while (j < tile->count && (queries[j].sequence == queries[i].sequence ||
                                           attention_same_blocks(a, queries + j - 1, queries + j, start)))
                    j++;
                compute_chunk(a, &w, queries, element(w.q, h * rows * dim, narrow), item, head, start, i, j, values);
            }
            if (tile->partial >= 0) {
                memcpy(a->partial_largest + partial, w.largest, rows * sizeof(float));
                memcpy(a->partial_sum + partial, w.sum, rows * sizeof(float));
            } else
                merge_rows(&w, rows, w.total + h * rows * dim, w.total_largest + h * stride, w.total_sum + h * stride, values, w.largest, w.sum,
                           dim);
        }
    if (tile->partial < 0)
        for (long h = 0; h < item->heads; h++)
            for (long row = 0; row < rows; row++)
                finish_row(a, item->first_head + h, tile, row, w.total + (h * rows + row) * dim, w.total_sum[h * stride + row]);
}

static void merge_item(void *context, long index, int thread) {
    const struct attention *a = context;
    const struct tile *tile = a->tiles + index / a->layout.heads;
    if (tile->partial < 0) return;
    long head = index % a->layout.heads, dim = a->layout.dim, rows = tile->count * a->group;
    struct work w;
    work_layout(&w, a->thread_scratch + thread * a->thread_bytes, a);
    memset(w.total, 0, rows * dim * sizeof(float));
    for (long row = 0; row < rows; row++) w.total_largest[row] = -INFINITY, w.total_sum[row] = 0;
    for (long chunk = 0; chunk < tile->chunks; chunk++) {
        long at = tile->partial + (head * tile->chunks + chunk) * rows;
        merge_rows(&w, rows, w.total, w.total_largest, w.total_sum, a->partial_values + at * dim, a->partial_largest + at, a->partial_sum + at,
                   dim);
    }
    for (long row = 0; row < rows; row++) finish_row(a, head, tile, row, w.total + row * dim, w.total_sum[row]);
}

/* q [tokens, heads, dim] with rows q_row apart; out the same, contiguous; heads = kv_heads * group.  starts [sequences + 1],
   lengths [sequences], tables [sequences, table_stride].  dim at least 16, even if half. */
void radixkv_paged_attention(const void *q, long q_row, const void *k_cache, const void *v_cache, void *out, const int32_t *starts,
                             const int32_t *lengths, const int32_t *tables, long table_stride, long sequences, long tokens, long kv_heads,
                             long group, long dim, long block_size, float scale, int half, int threads) {
    struct attention a = {.q = q, .k_cache = k_cache, .v_cache = v_cache, .out = out, .tables = tables, .table_stride = table_stride,
                          .q_row = q_row, .group = group, .layout = kv_layout(kv_heads, dim, block_size, half), .scale = scale};
    attention_plan(&a, starts, lengths, sequences, tokens, threads);
    if (a.query_count < tokens) memset(out, 0, tokens * kv_heads * group * dim * (half ? 2 : 4)); /* rows that no sequence owns */
    struct work w;
    a.thread_bytes = work_layout(&w, 0, &a);
    a.thread_scratch = scratch(a.thread_bytes * threads + (a.partial_rows * (dim + 2) + 2 * VL) * sizeof(float));
    a.partial_values = (float *)(a.thread_scratch + a.thread_bytes * threads);
    a.partial_largest = a.partial_values + a.partial_rows * dim;
    a.partial_sum = a.partial_largest + a.partial_rows + VL;
    parallel_for(a.item_count, threads, attention_item, &a);
    if (a.partial_rows) parallel_for(a.tile_count * kv_heads, threads, merge_item, &a);
    free(a.items);
    free(a.queries);
}
