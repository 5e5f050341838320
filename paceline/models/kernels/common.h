/* What decode.c and matmul.c share. */

#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define WIDTH 16 /* floats in a vector */

/* Also for arrays of floats, wherever they begin. */
typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));

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
