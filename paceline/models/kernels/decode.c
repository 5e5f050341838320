/* The parts of a decoder layer that are not matrix products, for CPU.
 *
 * One call replaces five to fifteen small tensor operations, and every function treats a row
 * without looking at the others: that is what makes verification bit-identical to AR decoding.
 * Built at first use by kernels/__init__.py; ops.py holds the same functions in plain torch. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define MAX_HEAD_DIM 256
/* exp(x) for float32, within 2 units in the last place for x <= 0 down to underflow. Written out
 * so that compilers turn the loops around it into vector code; polynomial: Cephes expf. */
ALWAYS_INLINE float fast_exp(float x)
{
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    const float n = floorf(x * 1.44269504f + 0.5f);
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } scale = {((int32_t)n + 127) << 23};
    return p * scale.f;
}

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#define ELEM float
#define LOAD(x) (x)
#define STORE(f) (f)
#define NAME(f) JOIN(f, f32)
#include "decode_impl.h"
#undef ELEM
#undef LOAD
#undef STORE
#undef NAME

static inline float bf16_load(uint16_t x)
{
    union { uint32_t i; float f; } u = {(uint32_t)x << 16};
    return u.f;
}

static inline uint16_t bf16_store(float f)
{
    union { float f; uint32_t i; } u = {f};
    return (uint16_t)((u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16); /* round to nearest even */
}

#define ELEM uint16_t
#define LOAD(x) bf16_load(x)
#define STORE(f) bf16_store(f)
#define NAME(f) JOIN(f, bf16)
#include "decode_impl.h"
