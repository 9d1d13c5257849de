/* The CPU kernels against the same sums in double: a program of its own, so that it runs wherever a compiler and an emulator for another
   kind of CPU are.  Prints the largest error of each kernel, as a share of what rounding allows; exits with 1 where that is above 1. */
#include "operations.h"
#include "vec.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

void radixkv_pack_weight(const void *weight, void *packed, long N, long K, int half);
void radixkv_pack_quantized(const uint16_t *scales, const uint16_t *offsets, const uint8_t *codes, char *packed, long N, long K, int bits);

static int failed;

static double draw(void) { return rand() / (double)RAND_MAX * 2 - 1; }

/* Random values that the type holds exactly. */
static double *fill(void *to, long count, int half) {
    double *exact = malloc(count * sizeof *exact);
    for (long i = 0; i < count; i++) {
        put_float(to, i, (float)draw(), half);
        exact[i] = get_float(to, i, half);
    }
    return exact;
}

static void report(const char *name, int half, double worst) {
    printf("%s %s %.3f\n", name, half ? "bfloat16" : "float32", worst);
    failed |= !(worst <= 1);
}

static void check_linear(int half) {
    enum { M = 23, N = 96, K = 70, DEPTH = 96 };
    char x[M * K * 4], w[N * K * 4], out[M * N * 4], gated[M * N * 4], *packed = aligned_alloc(64, N * DEPTH * 4);
    float bias[N];
    double *dx = fill(x, M * K, half), *dw = fill(w, N * K, half), worst = 0, worst_gated = 0, unit = half ? 0x1p-8 : 0x1p-20;
    for (long n = 0; n < N; n++) bias[n] = (float)draw();
    radixkv_pack_weight(w, packed, N, K, half);
    for (int threads = 1; threads <= 3; threads++) {
        radixkv_linear(x, K, packed, bias, out, M, N, K, half, 0, threads);
        radixkv_gated_linear(x, K, packed, bias, gated, M, N / 2, K, half, 0, threads);
        for (long m = 0; m < M; m++)
            for (long n = 0; n < N; n++) {
                double sum = bias[n], other = bias[(n + N / 2) % N];
                for (long k = 0; k < K; k++) sum += dx[m * K + k] * dw[n * K + k], other += dx[m * K + k] * dw[(n + N / 2) % N * K + k];
                worst = fmax(worst, fabs(get_float(out, m * N + n, half) - sum) / (unit * (1 + fabs(sum))));
                if (n >= N / 2) continue;
                double expected = sum / (1 + exp(-sum)) * other, got = get_float(gated, m * N / 2 + n, half);
                worst_gated = fmax(worst_gated, fabs(got - expected) / (4 * unit * (1 + fabs(sum)) * (1 + fabs(other))));
            }
    }
    report("linear", half, worst);
    report("gated linear", half, worst_gated);
}

/* float16 with an exponent of its own for each index; denormal for the first. */
static double half_number(long i, uint16_t *bits) {
    int exponent = i % 16, mantissa = rand() % 1024, negative = rand() % 2;
    *bits = (uint16_t)(negative << 15 | exponent << 10 | mantissa);
    double size = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
    return negative ? -size : size;
}

static void check_quantized(int bits) {
    enum { M = 23, N = 40, K = 96, GROUPS = K / 32, TILES = 3 };
    char x[M * K * 2], out[M * N * 2], *packed = aligned_alloc(64, TILES * GROUPS * 576);
    uint16_t scales[N * GROUPS], offsets[N * GROUPS];
    uint8_t codes[N * K];
    float bias[TILES * 16] = {0};
    double *dx = fill(x, M * K, 1), dw[N * K], worst = 0;
    for (long i = 0; i < N * GROUPS; i++) {
        double scale = half_number(i, scales + i), offset = half_number(i / 3, offsets + i);
        for (long k = i * 32; k < i * 32 + 32; k++) {
            codes[k] = (uint8_t)(bits == 4 ? rand() % 16 : rand() % 256);
            dw[k] = bf16_to_float(bf16_from_float((float)(bits == 4 ? scale * codes[k] + offset : scale * (int8_t)codes[k])));
        }
    }
    radixkv_pack_quantized(scales, bits == 4 ? offsets : 0, codes, packed, N, K, bits);
    for (int threads = 1; threads <= 3; threads++)
        for (long rows = 1; rows <= M; rows += 11) {
            radixkv_linear(x, K, packed, bias, out, rows, N, K, 1, bits, threads);
            for (long m = 0; m < rows; m++)
                for (long n = 0; n < N; n++) {
                    double sum = 0, size = 0;
                    for (long k = 0; k < K; k++) sum += dx[m * K + k] * dw[n * K + k], size += fabs(dx[m * K + k] * dw[n * K + k]);
                    worst = fmax(worst, fabs(get_float(out, m * N + n, 1) - sum) / (0x1p-8 * fabs(sum) + 0x1p-18 * size));
                }
        }
    printf("%d bits: ", bits);
    report("quantized linear", 1, worst);
}

static void check_attention(int half, long block) {
    enum { G = 2, H = 6, D = 64, A = 300, B = 37, TOKENS = A + B, QUERIES = 1 + B };
    long blocks = (A + block - 1) / block + (B + block - 1) / block, width = (A + block - 1) / block, size = half ? 2 : 4;
    char *k = malloc(TOKENS * G * D * size), *v = malloc(TOKENS * G * D * size), *q = malloc(QUERIES * H * D * size),
         *out = malloc(QUERIES * H * D * size), *k_cache = aligned_alloc(64, blocks * block * G * D * size),
         *v_cache = aligned_alloc(64, blocks * block * G * D * size);
    memset(k_cache, 0, blocks * block * G * D * size), memset(v_cache, 0, blocks * block * G * D * size);
    double *dk = fill(k, TOKENS * G * D, half), *dv = fill(v, TOKENS * G * D, half), *dq = fill(q, QUERIES * H * D, half), worst = 0;
    int32_t *tables = calloc(2 * width, sizeof *tables), starts[] = {0, 1, QUERIES}, lengths[] = {A, B};
    for (long i = 0; i < width; i++) tables[i] = (int32_t)(blocks - 1 - i);
    for (long i = 0; i < (B + block - 1) / block; i++) tables[width + i] = (int32_t)i;
    int64_t slots[TOKENS];
    for (long t = 0; t < TOKENS; t++) {
        long s = t >= A, at = t - s * A;
        slots[t] = tables[s * width + at / block] * block + at % block;
    }
    radixkv_write_kv(k, G * D, v, G * D, k_cache, v_cache, slots, TOKENS, G, D, block, half, 2);
    for (int threads = 1; threads <= 3; threads++) {
        radixkv_paged_attention(q, H * D, k_cache, v_cache, out, starts, lengths, tables, width, 2, QUERIES, G, H / G, D, block, 0, 0, 0.125f,
                                half, threads);
        for (long i = 0; i < QUERIES; i++)
            for (long h = 0; h < H; h++) {
                long first = i ? A : 0, limit = i ? i : A;
                double weights[A], total = 0;
                for (long t = 0; t < limit; t++) {
                    double score = 0;
                    for (long d = 0; d < D; d++) score += dq[(i * H + h) * D + d] * dk[((first + t) * G + h / (H / G)) * D + d];
                    total += weights[t] = exp(score * 0.125);
                }
                for (long d = 0; d < D; d++) {
                    double expected = 0;
                    for (long t = 0; t < limit; t++) expected += weights[t] / total * dv[((first + t) * G + h / (H / G)) * D + d];
                    worst = fmax(worst, fabs(get_float(out, (i * H + h) * D + d, half) - expected) / (half ? 3 * 0x1p-8 : 0x1p-18));
                }
            }
    }
    printf("blocks of %ld: ", block);
    report("attention", half, worst);
}

int main(void) {
    for (int half = 0; half < 2; half++) {
        check_linear(half);
        for (long block = 4; block <= 32; block *= 2) check_attention(half, block);
    }
    check_quantized(4);
    check_quantized(8);
    return failed;
}
