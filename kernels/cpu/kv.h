/* Where a token's key and value lie.

   A block holds, for each KV head, tiles of T = min(block_size, 16) tokens.  A tile of K is [D][T]: the token varies fastest, so that a
   register holds the same element of several keys, and a tile is one of gemm.h's (in bfloat16 [D/2][T][2]).  A tile of V is [T][D]
   (in bfloat16 [T/2][D][2], or [1][D] if T is 1).  Both have T * D elements, so one formula finds them. */
#pragma once

struct kv_layout {
    long heads, dim, block_size, tile; /* tile = T */
    int half;
};

static inline struct kv_layout kv_layout(long heads, long dim, long block_size, int half) {
    return (struct kv_layout){heads, dim, block_size, block_size < 16 ? block_size : 16, half};
}

/* Element index of the tile of `head` that holds token `offset` of `block`. */
static inline long kv_tile(const struct kv_layout *l, long block, long head, long offset) {
    return ((block * l->heads + head) * l->block_size + offset / l->tile * l->tile) * l->dim;
}

static inline long k_index(const struct kv_layout *l, long t, long d) { /* in a tile: token t, element d */
    return l->half ? (d / 2 * l->tile + t) * 2 + d % 2 : d * l->tile + t;
}

static inline long v_index(const struct kv_layout *l, long t, long d) {
    return l->half && l->tile > 1 ? (t / 2 * l->dim + d) * 2 + t % 2 : t * l->dim + d;
}
