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

#define BLOCK(SUFFIX, ELEM, LOADED, WORD, STORE)                                                 \
    ALWAYS_INLINE void block_##SUFFIX(const ELEM *x, const WORD *weight, const ELEM *bias,       \
                                      ELEM *out, int steps, int outputs, int first,              \
                                      const int rows, const int panels)                          \
    {                                                                                            \
        vec acc[MAX_ROWS][MAX_PANELS];                                                           \
        for (int r = 0; r < rows; r++)                                                           \
            for (int p = 0; p < panels; p++)                                                     \
                acc[r][p] = (vec){0};                                                            \
        const size_t panel = (size_t)steps * WIDTH;                                              \
        for (int k = 0; k < steps; k++) {                                                        \
            LOADED w[MAX_PANELS];                                                                \
            for (int p = 0; p < panels; p++) {                                                   \
                const WORD *place = weight + p * panel + (size_t)k * WIDTH;                      \
                w[p] = *(const LOADED *)place;                                                   \
                /* The next block's weights; the processor's own prefetch ends at each page. */  \
                __builtin_prefetch(place + panels * panel, 0, 2);                                \
            }                                                                                    \
            for (int r = 0; r < rows; r++) {                                                     \
                WORD value;                                                                      \
                memcpy(&value, (const WORD *)x + (size_t)r * steps + k, sizeof value);           \
                for (int p = 0; p < panels; p++)                                                 \
                    acc[r][p] = step_##SUFFIX(acc[r][p], w[p], value);                           \
            }                                                                                    \
        }                                                                                        \
        for (int r = 0; r < rows; r++)                                                           \
            for (int p = 0; p < panels; p++)                                                     \
                for (int i = 0; i < WIDTH; i++) {                                                \
                    const int o = first + p * WIDTH + i;                                         \
                    if (o < outputs)                                                             \
                        out[(size_t)r * outputs + o] =                                           \
                            STORE(acc[r][p][i] + (bias ? LOAD_##SUFFIX(bias[o]) : 0.0f));        \
                }                                                                                \
    }                                                                                            \
                                                                                                 \
    ALWAYS_INLINE void rows_##SUFFIX(const ELEM *x, const WORD *weight, const ELEM *bias,        \
                                     ELEM *out, int steps, int outputs, int first, int rows,     \
                                     const int panels)                                           \
    {                                                                                            \
        switch (rows) {                                                                          \
        case 1: block_##SUFFIX(x, weight, bias, out, steps, outputs, first, 1, panels); break;   \
        case 2: block_##SUFFIX(x, weight, bias, out, steps, outputs, first, 2, panels); break;   \
        case 3: block_##SUFFIX(x, weight, bias, out, steps, outputs, first, 3, panels); break;   \
        case 4: block_##SUFFIX(x, weight, bias, out, steps, outputs, first, 4, panels); break;   \
        case 5: block_##SUFFIX(x, weight, bias, out, steps, outputs, first, 5, panels); break;   \
        default: block_##SUFFIX(x, weight, bias, out, steps, outputs, first, 6, panels);         \
        }                                                                                        \
    }                                                                                            \
                                                                                                 \
    /* x: [rows, k], out: [rows, outputs]; steps is k, or k / 2 for bfloat16; threads: at most. */\
    EXPORT void linear_##SUFFIX(const ELEM *x, const WORD *weight, const ELEM *bias, ELEM *out,  \
                                int rows, int steps, int outputs, int threads)                   \
    {                                                                                            \
        const int panels = (outputs + WIDTH - 1) / WIDTH;                                        \
        const int groups = (panels + MAX_PANELS - 1) / MAX_PANELS;                               \
        /* Few rows are shared out evenly: 7 as 4 + 3 cost less than as 6 + 1. */                \
        const int blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;                                     \
        /* Waking a thread pays for prompts, and for weights that do not fit a core's cache. */  \
        const double weights = (double)steps * outputs, work = weights * rows;                   \
        const int share = (rows >= 32 && work > 4e6) || weights > 2e6;                           \
        _Pragma("omp parallel for schedule(static) num_threads(threads) if (share)")             \
        for (int g = 0; g < groups; g++) {                                                       \
            const int p = g * MAX_PANELS;                                                        \
            const int width = panels - p < MAX_PANELS ? panels - p : MAX_PANELS;                 \
            const WORD *w = weight + (size_t)p * steps * WIDTH;                                  \
            for (int b = 0; b < blocks; b++) {                                                   \
                const int even = rows <= 4 * MAX_ROWS;                                           \
                const int r = even ? rows * b / blocks : b * MAX_ROWS;                           \
                const int end = even ? rows * (b + 1) / blocks : r + MAX_ROWS;                   \
                const int count = (end < rows ? end : rows) - r;                                 \
                const ELEM *in = (const ELEM *)((const WORD *)x + (size_t)r * steps);            \
                ELEM *o = out + (size_t)r * outputs;                                             \
                switch (width) {                                                                 \
                case 1: rows_##SUFFIX(in, w, bias, o, steps, outputs, p * WIDTH, count, 1);      \
                    break;                                                                       \
                case 2: rows_##SUFFIX(in, w, bias, o, steps, outputs, p * WIDTH, count, 2);      \
                    break;                                                                       \
                case 3: rows_##SUFFIX(in, w, bias, o, steps, outputs, p * WIDTH, count, 3);      \
                    break;                                                                       \
                default: rows_##SUFFIX(in, w, bias, o, steps, outputs, p * WIDTH, count, 4);     \
                }                                                                                \
            }                                                                                    \
        }                                                                                        \
    }

#define LOAD_f32(x) (x)
#define LOAD_bf16(x) bf16_load(x)
#define KEEP(f) (f)

BLOCK(f32, float, vec, float, KEEP)
BLOCK(bf16, uint16_t, bits, uint32_t, bf16_store)
