/* RMSNorm, SwiGLU and rotary embedding.  One row is one thread's work and is done the same way wherever it stands.

   In bfloat16, values are rounded where Hugging Face's Llama rounds them. */
#include "gemm.h"
#include "operations.h"
#include "parallel.h"
#include "silu.h"

#include <math.h>

#define ROWS_PER_ITEM 4
#define PARALLEL_ABOVE 4096 /* elements: smaller calls take less time than waking a thread */

struct rows {
    const void *x, *weight;
    void *residual, *out;
    long rows, dim;
    float eps;
    int half;
};

static void for_rows(struct rows *r, item_fn fn, int threads) {
    parallel_for((r->rows + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, r->rows * r->dim < PARALLEL_ABOVE ? 1 : threads, fn, r);
}
#define EACH_ROW(r, i) \
    for (long i = item * ROWS_PER_ITEM, end_ = i + ROWS_PER_ITEM < (r)->rows ? i + ROWS_PER_ITEM : (r)->rows; i < end_; i++)

INLINE void norm_row(const void *x, const void *weight, void *out, long dim, float eps, int half) {
    vf sums[4] = {};
    long i = 0;
    for (; i + 4 * VL <= dim; i += 4 * VL)
        UNROLL for (int j = 0; j < 4; j++) { vf v = load_as_float(x, i + j * VL, half); sums[j] = vfma(v, v, sums[j]); }
    for (; i + VL <= dim; i += VL) { vf v = load_as_float(x, i, half); sums[0] = vfma(v, v, sums[0]); }
    float sum = vsum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < dim; i++) sum += get_float(x, i, half) * get_float(x, i, half);
    float scale = 1.0f / sqrtf(sum / (float)dim + eps);
    for (i = 0; i + VL <= dim; i += VL) {
        vf v = load_as_float(x, i, half) * vset(scale);
        if (half) v = vround_bf16(v);
        store_from_float(out, i, v * load_as_float(weight, i, half), half);
    }
    for (; i < dim; i++) {
        float v = get_float(x, i, half) * scale;
        put_float(out, i, (half ? bf16_to_float(bf16_from_float(v)) : v) * get_float(weight, i, half), half);
    }
}

INLINE void add_row(const void *x, void *residual, long dim, int half) {
    long i = 0;
    for (; i + VL <= dim; i += VL) store_from_float(residual, i, load_as_float(residual, i, half) + load_as_float(x, i, half), half);
    for (; i < dim; i++) put_float(residual, i, get_float(residual, i, half) + get_float(x, i, half), half);
}

static void norm_item(void *context, long item, int thread) {
    (void)thread;
    struct rows *r = context;
    EACH_ROW(r, i) {
        const char *x = element(r->x, i * r->dim, r->half);
        char *out = element(r->out, i * r->dim, r->half);
        if (r->residual) {
            char *residual = element(r->residual, i * r->dim, r->half);
            if (r->half) add_row(x, residual, r->dim, 1);
            else add_row(x, residual, r->dim, 0);
            x = residual;
        }
        if (r->half) norm_row(x, r->weight, out, r->dim, r->eps, 1);
        else norm_row(x, r->weight, out, r->dim, r->eps, 0);
    }
}

/* out = RMSNorm(x) * weight; with a residual, residual += x first and the norm is taken of that. */
void radixkv_rms_norm(const void *x, void *residual, const void *weight, void *out, long rows, long dim, float eps, int half,
                      int threads) {
    struct rows r = {.x = x, .weight = weight, .residual = residual, .out = out, .rows = rows, .dim = dim, .eps = eps, .half = half};
    for_rows(&r, norm_item, threads);
}

struct heads {
    void *x;
    const void *weight;
    long row, tokens, heads, dim;
    float eps;
    int half;
};

static void head_norm_item(void *context, long item, int thread) {
    (void)thread;
    struct heads *r = context;
    for (long i = item * ROWS_PER_ITEM; i < r->tokens && i < (item + 1) * ROWS_PER_ITEM; i++)
        for (long h = 0; h < r->heads; h++) {
            char *x = element(r->x, i * r->row + h * r->dim, r->half);
            if (r->half) norm_row(x, r->weight, x, r->dim, r->eps, 1);
            else norm_row(x, r->weight, x, r->dim, r->eps, 0);
        }
}

/* x [tokens, heads, dim], rows `row` elements apart: each head = RMSNorm(head) * weight, in place. */
void radixkv_head_norm(void *x, long row, const void *weight, long tokens, long heads, long dim, float eps, int half, int threads) {
    struct heads r = {x, weight, row, tokens, heads, dim, eps, half};
    parallel_for((tokens + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, tokens * heads * dim < PARALLEL_ABOVE ? 1 : threads, head_norm_item, &r);
}

INLINE void silu_mul_row(const void *gate, const void *up, void *out, long dim, int half) {
    long i = 0;
    for (; i + VL <= dim; i += VL) store_from_float(out, i, silu_mul(load_as_float(gate, i, half), load_as_float(up, i, half), half), half);
    for (; i < dim; i++) put_float(out, i, silu_mul(vset(get_float(gate, i, half)), vset(get_float(up, i, half)), half)[0], half);
}

static void silu_mul_item(void *context, long item, int thread) {
    (void)thread;
    struct rows *r = context;
    EACH_ROW(r, i) {
        const char *gate = element(r->x, i * 2 * r->dim, r->half), *up = element(gate, r->dim, r->half);
        char *out = element(r->out, i * r->dim, r->half);
        if (r->half) silu_mul_row(gate, up, out, r->dim, 1);
        else silu_mul_row(gate, up, out, r->dim, 0);
    }
}

/* out [rows, dim] = silu(gate) * up for rows of gate then up. */
void radixkv_silu_mul(const void *gate_up, void *out, long rows, long dim, int half, int threads) {
    struct rows r = {.x = gate_up, .out = out, .rows = rows, .dim = dim, .half = half};
    for_rows(&r, silu_mul_item, threads);
}

struct rope {
    void *q, *k;
    long q_row, k_row, q_heads, k_heads, dim, tokens;
    const int64_t *positions;
    const float *cos_sin;
    int half;
};

INLINE void rotate(void *x, const float *cos, const float *sin, long half_dim, int half) {
    long i = 0;
    for (; i + VL <= half_dim; i += VL) {
        vf first = load_as_float(x, i, half), second = load_as_float(x, half_dim + i, half), c = vload(cos + i), s = vload(sin + i);
        store_from_float(x, i, first * c - second * s, half);
        store_from_float(x, half_dim + i, second * c + first * s, half);
    }
    for (; i < half_dim; i++) {
        float first = get_float(x, i, half), second = get_float(x, half_dim + i, half);
        put_float(x, i, first * cos[i] - second * sin[i], half);
        put_float(x, half_dim + i, second * cos[i] + first * sin[i], half);
    }
}

static void rope_item(void *context, long item, int thread) {
    (void)thread;
    struct rope *r = context;
    for (long i = item * ROWS_PER_ITEM; i < r->tokens && i < (item + 1) * ROWS_PER_ITEM; i++) {
        const float *cos = r->cos_sin + r->positions[i] * r->dim, *sin = cos + r->dim / 2;
        for (long h = 0; h < r->q_heads + r->k_heads; h++) {
            char *x = h < r->q_heads ? element(r->q, i * r->q_row + h * r->dim, r->half)
                                     : element(r->k, i * r->k_row + (h - r->q_heads) * r->dim, r->half);
            if (r->half) rotate(x, cos, sin, r->dim / 2, 1);
            else rotate(x, cos, sin, r->dim / 2, 0);
        }
    }
}

/* Rotates q [tokens, q_heads, dim] and k [tokens, k_heads, dim] in place; rows q_row and k_row elements apart. */
void radixkv_rope(void *q, long q_row, void *k, long k_row, const int64_t *positions, const float *cos_sin, long tokens, long q_heads,
                  long k_heads, long dim, int half, int threads) {
    struct rope r = {q, k, q_row, k_row, q_heads, k_heads, dim, tokens, positions, cos_sin, half};
    parallel_for((tokens + ROWS_PER_ITEM - 1) / ROWS_PER_ITEM, tokens * (q_heads + k_heads) * dim < PARALLEL_ABOVE ? 1 : threads, rope_item, &r);
}
