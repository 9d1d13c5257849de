/* One SIMD vocabulary for every CPU: GCC/Clang vector extensions, VL floats wide, with intrinsics only for fused multiply-add.

   bfloat16 arrays are read in pairs of 32 bits: the element of even index is the low half, so that widening a pair to two
   float32 vectors costs a shift and a mask. */
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 24")

#ifndef VBYTES /* width of a vector register; tests compile every width, the compiler splits what the CPU hasn't got */
#if defined(__AVX512F__)
#define VBYTES 64
#elif defined(__AVX2__)
#define VBYTES 32
#else
#define VBYTES 16
#endif
#endif
#define VL (VBYTES / 4)

typedef float vf __attribute__((vector_size(VBYTES)));
typedef int32_t vi __attribute__((vector_size(VBYTES)));
typedef uint32_t vu __attribute__((vector_size(VBYTES)));
typedef uint16_t vh __attribute__((vector_size(VBYTES / 2)));
typedef uint16_t bf16;

INLINE vf vload(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void vstore(float *p, vf v) { memcpy(p, &v, sizeof v); }
#define FOUR(x) x, x, x, x
#if VL == 16
#define LANES(x) FOUR(x), FOUR(x), FOUR(x), FOUR(x)
#elif VL == 8
#define LANES(x) FOUR(x), FOUR(x)
#else
#define LANES(x) FOUR(x)
#endif
INLINE vf vset(float x) { return (vf){LANES(x)}; }
INLINE vf vselect(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
/* a > b ? a : b, so b where either is NaN */
INLINE vf vmax(vf a, vf b) {
#if VBYTES == 64 && defined(__AVX512F__)
    return (vf)_mm512_max_ps((__m512)a, (__m512)b);
#elif VBYTES == 32 && defined(__AVX__)
    return (vf)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vselect(a > b, a, b);
#endif
}

/* a * b + c, rounded once.  Contraction is off (see build.py), so only what is written as a fused operation is one, and a
   row's bits don't depend on which instance of a loop computed it. */
INLINE vf vfma(vf a, vf b, vf c) {
#if VBYTES == 64 && defined(__AVX512F__)
    return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif VBYTES == 32 && defined(__FMA__)
    return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif VBYTES == 16 && defined(__FMA__)
    return (vf)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif VBYTES == 16 && defined(__ARM_NEON) && defined(__aarch64__)
    return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE float as_float(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE float bf16_to_float(bf16 x) { return as_float((uint32_t)x << 16); }

INLINE vf vload_bf16(const bf16 *p) { vh h; memcpy(&h, p, sizeof h); return (vf)(__builtin_convertvector(h, vu) << 16); }

/* Round to bfloat16's precision, to nearest even; a NaN stays one. */
#if VBYTES == 64 && defined(__AVX512BF16__) /* one instruction; it takes denormals for 0 */
INLINE vf vround_bf16(vf v) { return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16); }
INLINE void vstore_bf16(bf16 *p, vf v) { __m256bh h = _mm512_cvtneps_pbh((__m512)v); memcpy(p, &h, sizeof h); }
INLINE void vstore_bf16_pair(bf16 *p, vf v, vf next) { __m512bh h = _mm512_cvtne2ps_pbh((__m512)next, (__m512)v); memcpy(p, &h, sizeof h); }
#else
INLINE vf vround_bf16(vf v) {
    vu u = (vu)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
    return vselect((vi)(v != v), vset(__builtin_nanf("")), (vf)rounded);
}
INLINE void vstore_bf16(bf16 *p, vf v) { vh h = __builtin_convertvector((vu)vround_bf16(v) >> 16, vh); memcpy(p, &h, sizeof h); }
INLINE void vstore_bf16_pair(bf16 *p, vf v, vf next) { vstore_bf16(p, v); vstore_bf16(p + VL, next); }
#endif

INLINE bf16 bf16_from_float(float x) {
    uint32_t u;
    memcpy(&u, &x, 4);
    return x != x ? 0x7fc0 : (bf16)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

/* Activations are float32 or bfloat16; `half` says which. */
INLINE vf load_as_float(const void *p, long i, int half) { return half ? vload_bf16((const bf16 *)p + i) : vload((const float *)p + i); }
INLINE void store_from_float(void *p, long i, vf v, int half) { half ? vstore_bf16((bf16 *)p + i, v) : vstore((float *)p + i, v); }
INLINE float get_float(const void *p, long i, int half) { return half ? bf16_to_float(((const bf16 *)p)[i]) : ((const float *)p)[i]; }
INLINE void put_float(void *p, long i, float x, int half) {
    if (half) ((bf16 *)p)[i] = bf16_from_float(x);
    else ((float *)p)[i] = x;
}
INLINE char *element(const void *p, long i, int half) { return (char *)p + i * (half ? 2 : 4); }

/* The lanes in another order: lane i takes that of i + by, modulo VL. */
#ifdef __clang__
#define LANE(i, by) (((i) + (by)) % VL)
#define FOUR_LANES(i, by) LANE(i, by), LANE(i + 1, by), LANE(i + 2, by), LANE(i + 3, by)
#if VL == 16
#define ROTATE(v, by) __builtin_shufflevector(v, v, FOUR_LANES(0, by), FOUR_LANES(4, by), FOUR_LANES(8, by), FOUR_LANES(12, by))
#elif VL == 8
#define ROTATE(v, by) __builtin_shufflevector(v, v, FOUR_LANES(0, by), FOUR_LANES(4, by))
#else
#define ROTATE(v, by) __builtin_shufflevector(v, v, FOUR_LANES(0, by))
#endif
#else
#if VL == 16
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15
#elif VL == 8
#define LANE_NUMBERS 0, 1, 2, 3, 4, 5, 6, 7
#else
#define LANE_NUMBERS 0, 1, 2, 3
#endif
#define ROTATE(v, by) __builtin_shuffle(v, (vi){LANE_NUMBERS} + (by))
#endif

/* A tree over the lanes: the same order for every row. */
INLINE float vsum(vf v) {
#if VL == 16
    v += ROTATE(v, 8);
#endif
#if VL >= 8
    v += ROTATE(v, 4);
#endif
    v += ROTATE(v, 2);
    v += ROTATE(v, 1);
    return v[0];
}
INLINE float vmax_lanes(vf v) {
#if VL == 16
    v = vmax(v, ROTATE(v, 8));
#endif
#if VL >= 8
    v = vmax(v, ROTATE(v, 4));
#endif
    v = vmax(v, ROTATE(v, 2));
    v = vmax(v, ROTATE(v, 1));
    return v[0];
}

/* 2^f for |f| <= 1/2 by a minimax polynomial of degree 6 (relative error 2^-29 before rounding); if `coarse` of degree 3 (2^-13). */
INLINE vf vexp2_fraction(vf f, int coarse) {
    if (coarse) {
        vf p = vset(0x1.c3f760p-5f);
        p = vfma(p, f, vset(0x1.f0de1cp-3f));
        p = vfma(p, f, vset(0x1.62f31ap-1f));
        return vfma(p, f, vset(0x1.fff692p-1f));
    }
    vf p = vset(0x1.41d334p-13f);
    p = vfma(p, f, vset(0x1.5f456ap-10f));
    p = vfma(p, f, vset(0x1.3b2dbcp-7f));
    p = vfma(p, f, vset(0x1.c6aed4p-5f));
    p = vfma(p, f, vset(0x1.ebfbdap-3f));
    p = vfma(p, f, vset(0x1.62e430p-1f));
    return vfma(p, f, vset(1.0f));
}

#define SHIFT 12582912.0f /* 1.5 * 2^23: adding it rounds to an integer */
#define LOG2E 0x1.715476p+0f
#define LOG2E_REST 0x1.4ae0c0p-26f

/* 2^x for x <= 127, within 1 ulp, or 2^-13 of it if `coarse`; 0 well below 2^-126; NaN stays NaN. */
INLINE vf vexp2_of(vf x, int coarse) {
#if VBYTES == 64 && defined(__AVX512F__)
    if (coarse) { /* x - floor(x) is one instruction, 0 for -infinity; a minimax polynomial of degree 3 for 2^f, 0 <= f < 1 (2^-13.7) */
        vf f = (vf)_mm512_reduce_ps((__m512)x, 1);
        vf p = vset(0x1.3f96a2p-4f);
        p = vfma(p, f, vset(0x1.cefc4ep-3f));
        p = vfma(p, f, vset(0x1.64444cp-1f));
        p = vfma(p, f, vset(0x1.fff632p-1f));
        return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);
    }
    x = vmax(vset(-1000), x);
    vf n = (x + vset(SHIFT)) - vset(SHIFT);
    return (vf)_mm512_scalef_ps((__m512)vexp2_fraction(x - n, coarse), (__m512)n);
#else
    vi tiny = x < -126.0f;
    x = vselect(tiny, vset(-126.0f), x);
    vf shifted = x + vset(SHIFT); /* its low bits hold the integer */
    return (vf)(((vi)vexp2_fraction(x - (shifted - vset(SHIFT)), coarse) + ((vi)shifted << 23)) & ~tiny);
#endif
}
INLINE vf vexp2(vf x) { return vexp2_of(x, 0); }

/* e^x for |x| <= 87, within 2 ulp. */
INLINE vf vexp(vf x) {
    vf shifted = vfma(x, vset(LOG2E), vset(SHIFT));
    vf f = vfma(x, vset(LOG2E), vset(SHIFT) - shifted);
    return (vf)((vi)vexp2_fraction(vfma(x, vset(LOG2E_REST), f), 0) + ((vi)shifted << 23));
}
