/* Matrix products whose rows do not know of each other, for CPU.
 *
 * out[r][o] = sum over k of x[r][k] * weight[o][k], every sum taken in the order of k by one chain
 * of fused multiply-adds, however many rows, outputs or threads there are. Libraries promise no
 * such thing: they pick algorithms by the number of rows. Compiled without -ffast-math, so that
 * the compiler may not reorder the sums either.
 *
 * Weights are packed in panels of 16 outputs: [panels][k][16] for float32, [panels][k / 2][16][2]
 * for bfloat16 (two neighbouring k in 32 bits, as the dot-product instruction wants them). */

#include <string.h>

#include "common.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

#define MAX_ROWS 6 /* rows and panels of a block: their accumulators fill the vector registers */
#define MAX_PANELS 4
/* Steps of k that all rows take before the next ones: four panels of them and of the chunk that is
 * fetched meanwhile stay in a core's own cache. Sums wait in memory between two chunks, which
 * changes no bit of them. */
#define CHUNK 512
#define SPAN 96 /* rows whose sums wait at the same time */
/* Sharing pays from here on: work for two wake-ups of a thread, or weights that one core's cache does
 * not keep until the next forward. */
#define SHARED_WORK 1e6
#define SHARED_BYTES 1.5e6

typedef uint32_t bits __attribute__((vector_size(4 * WIDTH), aligned(4)));

/* One step of k for float32, one pair of k for bfloat16. */
ALWAYS_INLINE vec step_f32(vec acc, vec w, float x)
{
    return acc + w * x;
}

ALWAYS_INLINE vec step_bf16(vec acc, bits w, uint32_t pair)
{
#if defined(__AVX512BF16__)
    return (vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)w,
                                 (__m512bh)_mm512_set1_epi32((int)pair));
#else
    const float low = bf16_load((uint16_t)pair), high = bf16_load((uint16_t)(pair >> 16));
    acc += (vec)(w << 16) * low;
    return acc + (vec)(w & 0xffff0000u) * high;
#endif
}

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#define ELEM float
#define WORD float
#define LOADED vec
#define LOAD(x) (x)
#define STORE(f) (f)
#define STEP step_f32
#define NAME(f) JOIN(f, f32)
#include "matmul_impl.h"
#undef ELEM
#undef WORD
#undef LOADED
#undef LOAD
#undef STORE
#undef STEP
#undef NAME

#define ELEM uint16_t
#define WORD uint32_t
#define LOADED bits
#define LOAD(x) bf16_load(x)
#define STORE(f) bf16_store(f)
#define STEP step_bf16
#define NAME(f) JOIN(f, bf16)
#include "matmul_impl.h"
