/* Writing K and V into blocks, and copying the leading rows of a block. */
#include "kv.h"

#include "operations.h"
#include "parallel.h"
#include "vec.h"

struct write {
    const void *k, *v;
    void *k_cache, *v_cache;
    const int64_t *slots;
    long tokens, per_item, k_row, v_row;
    struct kv_layout layout;
};

/* Many, as neighbours share lines; few where they are one of each sequence, so that the threads' shares are even. */
#define TOKENS_PER_ITEM(tokens) ((tokens) > 64 ? 64 : 8)

static void write_item(void *context, long item, int thread) {
    (void)thread;
    const struct write *w = context;
    struct kv_layout l = w->layout;
    long head = item % l.heads, first = item / l.heads * w->per_item;
    for (long i = first; i < w->tokens && i < first + w->per_item; i++) {
        long slot = w->slots[i];
        if (slot < 0) continue;
        long offset = slot % l.block_size, tile = kv_tile(&l, slot / l.block_size, head, offset), t = offset % l.tile;
        long k_from = i * w->k_row + head * l.dim, v_from = i * w->v_row + head * l.dim;
        if (l.half) {
            const bf16 *k = (const bf16 *)w->k + k_from, *v = (const bf16 *)w->v + v_from;
            bf16 *k_to = (bf16 *)w->k_cache + tile, *v_to = (bf16 *)w->v_cache + tile;
            for (long d = 0; d < l.dim; d += 2) memcpy(k_to + k_index(&l, t, d), k + d, 4); /* a pair */
            long first = v_index(&l, t, 0), step = v_index(&l, t, 1) - first;
            for (long d = 0; d < l.dim; d++) v_to[first + d * step] = v[d];
        } else {
            const float *k = (const float *)w->k + k_from, *v = (const float *)w->v + v_from;
            float *k_to = (float *)w->k_cache + tile, *v_to = (float *)w->v_cache + tile;
            for (long d = 0; d < l.dim; d++) k_to[d * l.tile + t] = k[d];
            memcpy(v_to + t * l.dim, v, l.dim * sizeof *v);
        }
    }
}

/* k, v [tokens, heads, dim] with row strides k_row, v_row; slots [tokens], negative for a token that isn't written. */
void radixkv_write_kv(const void *k, long k_row, const void *v, long v_row, void *k_cache, void *v_cache, const int64_t *slots, long tokens,
                      long heads, long dim, long block_size, int half, int threads) {
    struct write w = {k, v, k_cache, v_cache, slots, tokens, TOKENS_PER_ITEM(tokens), k_row, v_row, kv_layout(heads, dim, block_size, half)};
    parallel_for((tokens + w.per_item - 1) / w.per_item * heads, tokens < 8 ? 1 : threads, write_item, &w);
}

/* copies [n][3]: source block, target block, number of leading token rows; in order. */
void radixkv_copy_blocks(void *k_cache, void *v_cache, const int64_t *copies, long n, long heads, long dim, long block_size, int half) {
    struct kv_layout l = kv_layout(heads, dim, block_size, half);
    long size = half ? 2 : 4;
    for (long c = 0; c < n; c++) {
        long source = copies[3 * c], target = copies[3 * c + 1], rows = copies[3 * c + 2];
        for (long head = 0; head < heads; head++)
            for (long offset = 0; offset < rows; offset += l.tile) {
                long from = kv_tile(&l, source, head, offset), to = kv_tile(&l, target, head, offset);
                if (rows - offset >= l.tile) {
                    memmove(element(k_cache, to, half), element(k_cache, from, half), l.tile * dim * size);
                    memmove(element(v_cache, to, half), element(v_cache, from, half), l.tile * dim * size);
                    continue;
                }
                for (long t = 0; t < rows - offset; t++)
                    for (long d = 0; d < dim; d++) {
                        memcpy(element(k_cache, to + k_index(&l, t, d), half), element(k_cache, from + k_index(&l, t, d), half), size);
                        memcpy(element(v_cache, to + v_index(&l, t, d), half), element(v_cache, from + v_index(&l, t, d), half), size);
                    }
            }
    }
}
