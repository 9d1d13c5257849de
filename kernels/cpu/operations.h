/* The operations that Python calls, as decoder.c calls them.  Each is described where it is defined. */
#pragma once
#include <stdint.h>

void radixkv_linear(const void *x, long ldx, const void *w, const float *bias, void *out, long M, long N, long K, int half,
                    int bits, int threads);
void radixkv_gated_linear(const void *x, long ldx, const void *w, const float *bias, void *out, long M, long N, long K, int half,
                          int bits, int threads);
void radixkv_rms_norm(const void *x, void *residual, const void *weight, void *out, long rows, long dim, float eps, int half, int threads);
void radixkv_head_norm(void *x, long row, const void *weight, long tokens, long heads, long dim, float eps, int half, int threads);
void radixkv_silu_mul(const void *gate_up, void *out, long rows, long dim, int half, int threads);
void radixkv_rope(void *q, long q_row, void *k, long k_row, const int64_t *positions, const float *cos_sin, long tokens, long q_heads,
                  long k_heads, long dim, int half, int threads);
void radixkv_write_kv(const void *k, long k_row, const void *v, long v_row, void *k_cache, void *v_cache, const int64_t *slots, long tokens,
                      long heads, long dim, long block_size, int half, int threads);
void radixkv_paged_attention(const void *q, long q_row, const void *k_cache, const void *v_cache, void *out, const int32_t *starts,
                             const int32_t *lengths, const int32_t *tables, long table_stride, long sequences, long tokens, long kv_heads,
                             long group, long dim, long block_size, const int32_t *segments, long segment_count, float scale, int half,
                             int threads);
