/* What decode.c and matmul.c share. */

#include <stddef.h>
#include <stdint.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define WIDTH 16 /* floats in a vector */

/* Also for arrays of floats, wherever they begin. */
typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t vec_bits __attribute__((vector_size(4 * WIDTH), aligned(4)));

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

typedef uint16_t vec_half __attribute__((vector_size(2 * WIDTH), aligned(2)));

ALWAYS_INLINE vec bf16_load_each(const uint16_t *x)
{
#if defined(__AVX512F__) /* GCC 12 converts these one by one */
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)x)), 16);
#else
    return (vec)(__builtin_convertvector(*(const vec_half *)x, vec_bits) << 16);
#endif
}

ALWAYS_INLINE void bf16_store_each(uint16_t *out, vec x)
{
    const vec_bits bits = (vec_bits)x, rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16((__m512i)rounded));
#else
    *(vec_half *)out = __builtin_convertvector(rounded, vec_half);
#endif
}
