/* All decoder layers of a step in one call: a decode step has hundreds of operations of a few microseconds, and calling each from Python
   would take longer than some of them, while the other threads fall asleep.

   The same operations in the same order as model/llama.py's loop over them, which runs where there are no native kernels. */
#include "operations.h"
#include "vec.h"

struct product {
    const void *weight;
    const float *bias;
    long outputs, inputs, bits;
};

struct layer {
    struct product qkv, o, gate_up, down;
    const void *post_norm, *next_norm, *q_norm, *k_norm; /* the last two are null where the model has none */
    void *k_cache, *v_cache;
};

struct shape {
    long hidden, q_heads, kv_heads, head_dim, block_size;
    const float *cos_sin;
    float eps, scale;
    int half;
};

struct batch {
    long tokens, sequences, table_stride, segment_count, sampled;
    const int64_t *positions, *slots;
    const int32_t *starts, *lengths, *tables, *segments;
    const int64_t *sampled_rows;    /* after the last layer only these rows are wanted; null: all */
    const int32_t *sampled_starts;  /* `starts` of a batch of the sampled rows alone */
};

static void multiply(const struct product *p, const void *x, void *out, long rows, int half, int threads) {
    radixkv_linear(x, p->inputs, p->weight, p->bias, out, rows, p->outputs, p->inputs, half, p->bits, threads);
}

/* Rows `which` of x [.., width], rows `stride` apart, to the front of `to`, side by side; they may overlap, as which[i] >= i. */
static void gather(const void *x, long stride, void *to, long width, const int64_t *which, long count, int half) {
    for (long i = 0; i < count; i++) memmove(element(to, i * width, half), element(x, which[i] * stride, half), width * (half ? 2 : 4));
}

/* x [tokens, hidden]: the first layer's normed input, at last the last norm's output (its first `sampled` rows, if some are wanted only);
   residual the same shape.  scratch: tokens * (qkv outputs + q_heads * head_dim + hidden + gate_up outputs / 2) elements. */
void radixkv_decoder_layers(const struct layer *layers, long count, const struct shape *s, const struct batch *b, void *x, void *residual,
                            void *scratch, int threads) {
    int half = s->half;
    long rows = b->tokens, dim = s->head_dim, q_width = s->q_heads * dim, kv_width = s->kv_heads * dim, qkv_width = q_width + 2 * kv_width;
    const int32_t *starts = b->starts;
    long mlp = layers->gate_up.outputs / 2;
    char *qkv = scratch, *attended = element(qkv, rows * qkv_width, half), *y = element(attended, rows * q_width, half),
         *activated = element(y, rows * s->hidden, half);
    for (const struct layer *l = layers; l < layers + count; l++) {
        multiply(&l->qkv, x, qkv, rows, half, threads);
        char *q = qkv, *k = element(qkv, q_width, half), *v = element(k, kv_width, half);
        if (l->q_norm) radixkv_head_norm(q, qkv_width, l->q_norm, rows, s->q_heads, dim, s->eps, half, threads);
        if (l->k_norm) radixkv_head_norm(k, qkv_width, l->k_norm, rows, s->kv_heads, dim, s->eps, half, threads);
        radixkv_rope(q, qkv_width, k, qkv_width, b->positions, s->cos_sin, rows, s->q_heads, s->kv_heads, dim, half, threads);
        radixkv_write_kv(k, qkv_width, v, qkv_width, l->k_cache, l->v_cache, b->slots, rows, s->kv_heads, dim, s->block_size, half, threads);
        long q_row = qkv_width;
        if (l + 1 == layers + count && b->sampled_rows) { /* of the other rows nothing but K and V is wanted */
            gather(q, qkv_width, q, q_width, b->sampled_rows, b->sampled, half);
            gather(residual, s->hidden, residual, s->hidden, b->sampled_rows, b->sampled, half);
            q_row = q_width, rows = b->sampled, starts = b->sampled_starts;
        }
        radixkv_paged_attention(q, q_row, l->k_cache, l->v_cache, attended, starts, b->lengths, b->tables, b->table_stride, b->sequences, rows,
                                s->kv_heads, s->q_heads / s->kv_heads, dim, s->block_size, b->segments, b->segment_count, s->scale, half, threads);
        multiply(&l->o, attended, y, rows, half, threads);
        radixkv_rms_norm(y, residual, l->post_norm, x, rows, s->hidden, s->eps, half, threads);
        radixkv_gated_linear(x, s->hidden, l->gate_up.weight, l->gate_up.bias, activated, rows, mlp, s->hidden, half, l->gate_up.bits, threads);
        multiply(&l->down, activated, y, rows, half, threads);
        radixkv_rms_norm(y, residual, l->next_norm, x, rows, s->hidden, s->eps, half, threads);
    }
}
