/* The decoder layers of a Llama-type model, for CPU.
 *
 * One call runs all layers, and every function treats a row without looking at the others: that is
 * what makes verification bit-identical to AR decoding. Built at first use by kernels/__init__.py;
 * ops.py holds the same computation in plain torch. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

/* Mirrored field by field in ops.py. */
struct rows {
    int32_t count, longest;         /* rows; slots in the longest context */
    const int32_t *positions;       /* [count] */
    const int32_t *slots;           /* [count] */
    const int32_t *prefix_length;   /* [count] */
    const int32_t *path_length;     /* [count] */
    const int32_t *const *prefix;   /* [count] */
    const int32_t *const *path;     /* [count] */
};

struct model {
    int32_t hidden, ffn, heads, kv_heads, dim, num_slots;
    int32_t threads; /* at most, and only where there is work for more than one */
    float eps, scale;
    const float *cos_sin; /* [positions, dim] */
};

struct layer {
    const void *input_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *out, *out_bias, *post_norm;
    const void *gate_up, *gate_up_bias, *down, *down_bias;
    int64_t window; /* 0: full attention */
};

/* matmul.c */
void linear_f32(const float *x, const float *weight, const float *bias, float *out, int rows,
                int steps, int outputs, int threads);
void linear_bf16(const uint16_t *x, const uint32_t *weight, const uint16_t *bias, uint16_t *out,
                 int rows, int steps, int outputs, int threads);

#define MAX_HEAD_DIM 256
#define MANY_ROWS 32 /* from here on, row by row work is shared by threads */

typedef uint32_t vec_bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t vec_half __attribute__((vector_size(2 * WIDTH), aligned(2)));

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

#define HALVES(v, low, high) v = __builtin_shufflevector low + __builtin_shufflevector high

/* The sum of the 16 elements of each of 16 vectors: four rounds that add the halves of what is
 * left of two vectors. Every sum is taken in the same order. */
ALWAYS_INLINE vec sum_each(const vec *v)
{
    vec a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)
        HALVES(a[i], (v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
               (v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    for (int i = 0; i < 4; i++)
        HALVES(b[i], (a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
               (a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
    for (int i = 0; i < 2; i++)
        HALVES(c[i], (b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
               (b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    vec sums;
    HALVES(sums, (c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
           (c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
    return sums;
}

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#define PAIR 1
#define ELEM float
#define LOAD(x) (x)
#define VLOAD(p) (*(const vec *)(p))
#define STORE(f) (f)
#define NAME(f) JOIN(f, f32)
#include "decode_impl.h"
#undef ELEM
#undef LOAD
#undef VLOAD
#undef STORE
#undef NAME

#undef PAIR
#define PAIR 2
#define ELEM uint16_t
#define LOAD(x) bf16_load(x)
#define VLOAD(p) ((vec)(__builtin_convertvector(*(const vec_half *)(p), vec_bits) << 16))
#define STORE(f) bf16_store(f)
#define NAME(f) JOIN(f, bf16)
#include "decode_impl.h"
