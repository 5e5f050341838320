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

struct weight {
    const void *packed;
    int64_t packing; /* see matmul.c */
};

struct layer {
    const void *input_norm;
    struct weight qkv;
    const void *qkv_bias, *q_norm, *k_norm;
    struct weight out;
    const void *out_bias, *post_norm;
    struct weight gate_up;
    const void *gate_up_bias;
    struct weight down;
    const void *down_bias;
    int64_t window; /* 0: full attention */
};

/* matmul.c */
int linear_f32(const float *x, const void *packed, int packing, const float *bias, float *out, int rows,
               int k, int outputs, int threads);
int linear_bf16(const uint16_t *x, const void *packed, int packing, const uint16_t *bias, uint16_t *out,
                int rows, int k, int outputs, int threads);

#define MAX_HEAD_DIM 256
#define BLOCK_ROWS 16 /* neighbouring rows of a sequence for which attention reads keys and values once */
#define SHARED_FLOATS 2048 /* of keys or values that all rows of a block take before the next ones */
#define SUMS 4 /* of a row's weighted values: they hide the latency of additions */
#define SHARED_NUMBERS 1e4 /* from here on, row by row work is shared by threads */

typedef int32_t vec_int __attribute__((vector_size(4 * WIDTH), aligned(4)));

/* The larger, or smaller, of two vectors' elements. */
ALWAYS_INLINE vec larger(vec a, vec b)
{
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    const vec_int mask = a > b;
    return (vec)((mask & (vec_int)a) | (~mask & (vec_int)b));
#endif
}

ALWAYS_INLINE vec smaller(vec a, vec b)
{
#if defined(__AVX512F__)
    return (vec)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return -larger(-a, -b);
#endif
}

ALWAYS_INLINE float largest(vec v)
{
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float top = v[0];
    for (int i = 1; i < WIDTH; i++)
        top = v[i] > top ? v[i] : top;
    return top;
#endif
}

/* exp(x) for float32, within 2 units in the last place for x <= 0 down to underflow; polynomial:
 * Cephes expf. On whole vectors, because compilers do not make vector code of the same for a number. */
ALWAYS_INLINE vec exp_each(vec x)
{
    x = smaller(larger(x, (vec){0} - 87.0f), (vec){0} + 88.0f);
    /* Towards zero, which is downwards here. */
    const vec_int n = __builtin_convertvector(x * 1.44269504f + 128.5f, vec_int) - 128;
    const vec whole = __builtin_convertvector(n, vec);
    const vec r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (vec)((n + 127) << 23);
}

ALWAYS_INLINE float exp_one(float x)
{
    return exp_each((vec){0} + x)[0];
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

/* Scores of a query for WIDTH keys, [WIDTH][dim]. */
ALWAYS_INLINE vec score(const float *query, const float *keys, const int dim)
{
    vec products[WIDTH];
    for (int i = 0; i < WIDTH; i++) {
        products[i] = *(const vec *)query * *(const vec *)(keys + i * dim);
        for (int d = WIDTH; d < dim; d += WIDTH)
            products[i] += *(const vec *)(query + d) * *(const vec *)(keys + i * dim + d);
    }
    return sum_each(products);
}

/* Scores become weights, not yet divided by their sum, which is returned. */
static float weigh(float *scores, int length)
{
    for (int j = length; j % WIDTH; j++)
        scores[j] = -INFINITY;
    vec tops = *(const vec *)scores, totals = {0};
    for (int j = WIDTH; j < length; j += WIDTH)
        tops = larger(tops, *(const vec *)(scores + j));
    const float top = largest(tops);
    float total = 0.0f;
    for (int j = 0; j < length; j += WIDTH) {
        const vec weights = exp_each(*(const vec *)(scores + j) - top);
        *(vec *)(scores + j) = weights;
        totals += weights;
    }
    for (int i = 0; i < WIDTH; i++)
        total += totals[i];
    return total;
}

/* Adds weighted values, [count][dim], to the sums of one row or of two that follow after a stride,
 * [SUMS][dim]; which of them a position goes to depends on the position alone. */
ALWAYS_INLINE void add_values(const float *weights, size_t stride, const float *values, int count,
                              float *sums, size_t sums_stride, const int rows, const int dim)
{
    vec acc[2][SUMS][MAX_HEAD_DIM / WIDTH];
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < SUMS; i++)
            for (int d = 0; d < dim / WIDTH; d++)
                acc[r][i][d] = *(vec *)(sums + r * sums_stride + i * dim + d * WIDTH);
    int j = 0;
    for (; j + SUMS <= count; j += SUMS)
        for (int i = 0; i < SUMS; i++)
            for (int d = 0; d < dim / WIDTH; d++) {
                const vec value = *(const vec *)(values + (j + i) * dim + d * WIDTH);
                for (int r = 0; r < rows; r++)
                    acc[r][i][d] += weights[r * stride + j + i] * value;
            }
    for (; j < count; j++)
        for (int d = 0; d < dim / WIDTH; d++) {
            const vec value = *(const vec *)(values + j * dim + d * WIDTH);
            for (int r = 0; r < rows; r++)
                acc[r][0][d] += weights[r * stride + j] * value;
        }
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < SUMS; i++)
            for (int d = 0; d < dim / WIDTH; d++)
                *(vec *)(sums + r * sums_stride + i * dim + d * WIDTH) = acc[r][i][d];
}

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#define ELEM float
#define LOAD(x) (x)
#define VLOAD(p) (*(const vec *)(p))
#define VSTORE(p, v) (*(vec *)(p) = (v))
#define STORE(f) (f)
#define NAME(f) JOIN(f, f32)
#include "decode_impl.h"
#undef ELEM
#undef LOAD
#undef VLOAD
#undef VSTORE
#undef STORE
#undef NAME

#define ELEM uint16_t
#define LOAD(x) bf16_load(x)
#define VLOAD(p) bf16_load_each(p)
#define VSTORE(p, v) bf16_store_each(p, v)
#define STORE(f) bf16_store(f)
#define NAME(f) JOIN(f, bf16)
#include "decode_impl.h"
