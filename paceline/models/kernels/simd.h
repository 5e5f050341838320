/* Vectors of 16 floats on every instruction set, and what decode.c and matmul.c share.
 *
 * A `vec` is 16 floats in as many of the processor's own vectors (`nat`, W floats) as that takes. Sums
 * run along lanes, lanes are added in one fixed order, and only fma_() fuses a product and a sum (compiled
 * with -ffp-contract=off). So the width of a vector changes no bit of a result. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define NOINLINE static __attribute__((noinline))
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define WIDTH 16 /* floats in a vec */
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__)
#include <immintrin.h>
#define W 16
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
#define W 8
#elif defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#define W 4
#else
#if defined(__SSE2__)
#include <emmintrin.h>
#endif
#define W 4
#endif
#define NATS (WIDTH / W)
#if W > 4 || defined(__aarch64__)
#define HAS_FMA 1
#else
#define HAS_FMA 0
#endif

/* About how much slower a core is than one with the widest vectors: threads share so much smaller work. */
#if W == 16
#define SLOWER 1
#elif HAS_FMA
#define SLOWER 4
#else
#define SLOWER 40
#endif

typedef float nat __attribute__((vector_size(4 * W)));
typedef int32_t nat_int __attribute__((vector_size(4 * W)));
typedef uint32_t nat_bits __attribute__((vector_size(4 * W)));
/* The same at any address. */
typedef nat nat_at __attribute__((aligned(4), may_alias));
typedef nat_bits nat_bits_at __attribute__((aligned(4), may_alias));
typedef uint16_t half_at __attribute__((vector_size(2 * W), aligned(2), may_alias));

typedef struct {
    nat n[NATS];
} vec;

/* --- one of the processor's vectors ----------------------------------------------------------- */

ALWAYS_INLINE nat nat_set(float x)
{
#if W == 16
    return (nat){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
#elif W == 8
    return (nat){x, x, x, x, x, x, x, x};
#else
    return (nat){x, x, x, x};
#endif
}

ALWAYS_INLINE nat nat_load(const float *x)
{
    return *(const nat_at *)x;
}

ALWAYS_INLINE void nat_store(float *x, nat v)
{
    *(nat_at *)x = v;
}

#if W == 16

ALWAYS_INLINE nat nat_fma(nat a, nat b, nat c)
{
    return (nat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}

ALWAYS_INLINE nat nat_max(nat a, nat b)
{
    return (nat)_mm512_max_ps((__m512)a, (__m512)b);
}

ALWAYS_INLINE nat nat_min(nat a, nat b)
{
    return (nat)_mm512_min_ps((__m512)a, (__m512)b);
}

ALWAYS_INLINE nat nat_widen(const uint16_t *x) /* bfloat16 */
{
    return (nat)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
}

ALWAYS_INLINE void nat_narrow(uint16_t *out, nat_bits bits)
{
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16((__m512i)bits));
}

#elif W == 8

ALWAYS_INLINE nat nat_fma(nat a, nat b, nat c)
{
    return (nat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}

ALWAYS_INLINE nat nat_max(nat a, nat b)
{
    return (nat)_mm256_max_ps((__m256)a, (__m256)b);
}

ALWAYS_INLINE nat nat_min(nat a, nat b)
{
    return (nat)_mm256_min_ps((__m256)a, (__m256)b);
}

ALWAYS_INLINE nat nat_widen(const uint16_t *x)
{
    return (nat)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x)), 16);
}

ALWAYS_INLINE void nat_narrow(uint16_t *out, nat_bits bits)
{
    const __m256i packed = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);
    _mm_storeu_si128((__m128i *)out,
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08)));
}

#else

#if defined(__ARM_NEON) && defined(__aarch64__)

ALWAYS_INLINE nat nat_fma(nat a, nat b, nat c)
{
    return (nat)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}

#else

typedef double pair __attribute__((vector_size(16)));
typedef int64_t pair_bits __attribute__((vector_size(16)));
typedef float two __attribute__((vector_size(8)));

/* Two fused multiply-adds for a processor without any: products are exact in double precision, and sums are
 * rounded to odd, so that the second rounding, to float, is right (Boldo, Melquiond 2008, Emulation of a FMA
 * and correctly rounded sums). */
ALWAYS_INLINE two fma_two(two a, two b, two c)
{
    const pair product = __builtin_convertvector(a, pair) * __builtin_convertvector(b, pair);
    const pair addend = __builtin_convertvector(c, pair);
    const pair sum = product + addend, back = sum - product;
    const pair error = (product - (sum - back)) + (addend - back);
    const pair_bits bits = (pair_bits)sum;
    /* If inexact and even: one step towards the error, away from zero if the signs agree. */
    const pair_bits inexact = (pair_bits)((error < 0.0) | (error > 0.0)); /* not for NaN */
    const pair_bits even = (bits & 1) - 1; /* all ones if so */
    const pair_bits apart = (pair_bits)((error < 0.0) ^ (sum < 0.0)); /* all ones if signs differ */
    const pair_bits step = (apart | 1) & inexact & even; /* -1 or 1 */
    return __builtin_convertvector((pair)(bits + step), two);
}

static __attribute__((noinline, unused)) nat nat_fma(nat a, nat b, nat c)
{
    const two low = fma_two(__builtin_shufflevector(a, a, 0, 1), __builtin_shufflevector(b, b, 0, 1),
                            __builtin_shufflevector(c, c, 0, 1));
    const two high = fma_two(__builtin_shufflevector(a, a, 2, 3), __builtin_shufflevector(b, b, 2, 3),
                             __builtin_shufflevector(c, c, 2, 3));
    return __builtin_shufflevector(low, high, 0, 1, 2, 3);
}

#endif

ALWAYS_INLINE nat nat_max(nat a, nat b)
{
    const nat_int larger = a > b;
    return (nat)(((nat_int)a & larger) | ((nat_int)b & ~larger));
}

ALWAYS_INLINE nat nat_min(nat a, nat b)
{
    const nat_int smaller = a < b;
    return (nat)(((nat_int)a & smaller) | ((nat_int)b & ~smaller));
}

ALWAYS_INLINE nat nat_widen(const uint16_t *x)
{
    return (nat)(__builtin_convertvector(*(const half_at *)x, nat_bits) << 16);
}

ALWAYS_INLINE void nat_narrow(uint16_t *out, nat_bits bits)
{
    *(half_at *)out = __builtin_convertvector(bits, half_at);
}

#endif

/* --- 16 floats -------------------------------------------------------------------------------- */

#define EACH(expression)                                                                          \
    vec out;                                                                                      \
    UNROLL for (int i = 0; i < NATS; i++) out.n[i] = (expression);                                \
    return out

ALWAYS_INLINE vec set_(float x) { EACH(nat_set(x)); }
ALWAYS_INLINE vec load_(const float *x) { EACH(nat_load(x + i * W)); }
ALWAYS_INLINE vec add_(vec a, vec b) { EACH(a.n[i] + b.n[i]); }
ALWAYS_INLINE vec sub_(vec a, vec b) { EACH(a.n[i] - b.n[i]); }
ALWAYS_INLINE vec mul_(vec a, vec b) { EACH(a.n[i] * b.n[i]); }
ALWAYS_INLINE vec div_(vec a, vec b) { EACH(a.n[i] / b.n[i]); }
ALWAYS_INLINE vec max_(vec a, vec b) { EACH(nat_max(a.n[i], b.n[i])); }
ALWAYS_INLINE vec min_(vec a, vec b) { EACH(nat_min(a.n[i], b.n[i])); }
/* a * b + c, rounded once. */
ALWAYS_INLINE vec fma_(vec a, vec b, vec c) { EACH(nat_fma(a.n[i], b.n[i], c.n[i])); }
ALWAYS_INLINE vec widen_(const uint16_t *x) { EACH(nat_widen(x + i * W)); }

ALWAYS_INLINE void store_(float *out, vec v)
{
    UNROLL for (int i = 0; i < NATS; i++) nat_store(out + i * W, v.n[i]);
}

ALWAYS_INLINE float bf16_load(uint16_t x)
{
    union { uint32_t i; float f; } u = {(uint32_t)x << 16};
    return u.f;
}

ALWAYS_INLINE uint16_t bf16_store(float f)
{
    union { float f; uint32_t i; } u = {f};
    return (uint16_t)((u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16); /* round to nearest even */
}

ALWAYS_INLINE void narrow_(uint16_t *out, vec v)
{
    UNROLL for (int i = 0; i < NATS; i++) {
        const nat_bits bits = (nat_bits)v.n[i];
        nat_narrow(out + i * W, (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}

/* 16 numbers of an array of float32 or, if narrow, bfloat16; zeros if fewer are left. */
ALWAYS_INLINE vec read_(const void *x, size_t at, int left, int narrow)
{
    if (left >= WIDTH)
        return narrow ? widen_((const uint16_t *)x + at) : load_((const float *)x + at);
    float all[WIDTH] = {0};
    for (int i = 0; i < left; i++)
        all[i] = narrow ? bf16_load(((const uint16_t *)x)[at + i]) : ((const float *)x)[at + i];
    return load_(all);
}

/* The first `left` of 16 numbers. */
ALWAYS_INLINE void write_(void *out, size_t at, vec v, int left, int narrow)
{
    if (left >= WIDTH) {
        if (narrow)
            narrow_((uint16_t *)out + at, v);
        else
            store_((float *)out + at, v);
        return;
    }
    float all[WIDTH];
    store_(all, v);
    for (int i = 0; i < left; i++)
        if (narrow)
            ((uint16_t *)out)[at + i] = bf16_store(all[i]);
        else
            ((float *)out)[at + i] = all[i];
}

/* exp(x) within 2 units in the last place, for x <= 0 down to underflow. The polynomial is Cephes' expf. */
ALWAYS_INLINE nat nat_exp(nat x)
{
    x = nat_min(nat_max(x, nat_set(-87.0f)), nat_set(88.0f));
    /* The conversion rounds towards zero, which is downwards here. */
    const nat_int n =
        __builtin_convertvector(nat_fma(x, nat_set(1.44269504f), nat_set(128.5f)), nat_int) - 128;
    const nat whole = __builtin_convertvector(n, nat);
    const nat r = nat_fma(whole, nat_set(2.12194440e-4f), nat_fma(whole, nat_set(-0.693359375f), x));
    nat p = nat_fma(r, nat_set(1.9875691500e-4f), nat_set(1.3981999507e-3f));
    p = nat_fma(p, r, nat_set(8.3334519073e-3f));
    p = nat_fma(p, r, nat_set(4.1665795894e-2f));
    p = nat_fma(p, r, nat_set(1.6666665459e-1f));
    p = nat_fma(p, r, nat_set(5.0000001201e-1f));
    p = nat_fma(p, r * r, r) + 1.0f;
    return p * (nat)((n + 127) << 23);
}

/* tanh(x) within 3 units in the last place. The polynomial for small numbers is Cephes' tanhf. */
ALWAYS_INLINE nat nat_tanh(nat x)
{
    const nat_int sign = (nat_int)x & (int32_t)0x80000000;
    const nat size = (nat)((nat_int)x & 0x7fffffff), square = x * x;
    nat p = nat_fma(square, nat_set(-5.70498872745e-3f), nat_set(2.06390887954e-2f));
    p = nat_fma(p, square, nat_set(-5.37397155531e-2f));
    p = nat_fma(p, square, nat_set(1.33314422036e-1f));
    p = nat_fma(p, square, nat_set(-3.33332819422e-1f));
    const nat small = nat_fma(p * square, size, size);
    const nat e = nat_exp(size * -2.0f);
    const nat large = (1.0f - e) / (1.0f + e);
    const nat_int is_small = (nat_int)(size < nat_set(0.625f));
    return (nat)((((nat_int)small & is_small) | ((nat_int)large & ~is_small)) | sign);
}

ALWAYS_INLINE vec exp_(vec x) { EACH(nat_exp(x.n[i])); }
ALWAYS_INLINE vec tanh_(vec x) { EACH(nat_tanh(x.n[i])); }

#undef EACH

/* --- lanes together: always i with i + 8, then i + 4, i + 2, i + 1 ----------------------------- */

/* The levels that need no shuffle. */
ALWAYS_INLINE nat fold(vec v)
{
    for (int half = NATS / 2; half; half /= 2)
        UNROLL for (int i = 0; i < half; i++) v.n[i] = v.n[i] + v.n[i + half];
    return v.n[0];
}

#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

/* The sum of the W lanes of each of W vectors; each round adds the halves of two vectors. */
ALWAYS_INLINE nat sum_lanes(const nat *v)
{
#if W == 16
    nat a[8], b[4], c[2];
    UNROLL for (int i = 0; i < 8; i++)
        a[i] = SHUFFLE(v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    UNROLL for (int i = 0; i < 4; i++)
        b[i] = SHUFFLE(a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               SHUFFLE(a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    UNROLL for (int i = 0; i < 2; i++)
        c[i] = SHUFFLE(b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLE(c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLE(c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#elif W == 8
    nat a[4], b[2];
    UNROLL for (int i = 0; i < 4; i++)
        a[i] = SHUFFLE(v[i], v[i + 4], 0, 1, 2, 3, 8, 9, 10, 11) +
               SHUFFLE(v[i], v[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    UNROLL for (int i = 0; i < 2; i++)
        b[i] = SHUFFLE(a[i], a[i + 2], 0, 1, 8, 9, 4, 5, 12, 13) +
               SHUFFLE(a[i], a[i + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(b[0], b[1], 0, 8, 2, 10, 4, 12, 6, 14) +
           SHUFFLE(b[0], b[1], 1, 9, 3, 11, 5, 13, 7, 15);
#else
    nat a[2];
    UNROLL for (int i = 0; i < 2; i++)
        a[i] = SHUFFLE(v[i], v[i + 2], 0, 1, 4, 5) + SHUFFLE(v[i], v[i + 2], 2, 3, 6, 7);
    return SHUFFLE(a[0], a[1], 0, 4, 2, 6) + SHUFFLE(a[0], a[1], 1, 5, 3, 7);
#endif
}

ALWAYS_INLINE float sum_of(vec v)
{
    float lanes[W];
    nat_store(lanes, fold(v));
    for (int half = W / 2; half; half /= 2)
        for (int i = 0; i < half; i++)
            lanes[i] = lanes[i] + lanes[i + half];
    return lanes[0];
}

ALWAYS_INLINE float largest(vec v)
{
    nat all = v.n[0];
    UNROLL for (int i = 1; i < NATS; i++) all = nat_max(all, v.n[i]);
    float lanes[W];
    nat_store(lanes, all);
    float top = lanes[0];
    for (int i = 1; i < W; i++)
        top = lanes[i] > top ? lanes[i] : top;
    return top;
}
