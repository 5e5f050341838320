/* Matrix products on a CPU whose rows do not depend on each other.
 *
 * out[r][o] = sum over k of x[r][k] * weight[o][k]. Each sum is one chain of fused multiply-adds in the
 * order of k, for any number of rows, outputs and threads and any width of the processor's vectors.
 * Libraries do not promise that: they choose algorithms by the number of rows.
 *
 * Weights are packed in panels of 16 outputs: [panels][k][16] for float32, [panels][k / 2][16][2] for
 * bfloat16 (two neighbouring k in 32 bits, as the dot-product instructions want them). Weights that
 * bfloat16 can hold are packed this way for float32 inputs, too: the product is the same, and half as
 * many bytes are read.
 *
 * Two instruction sets sum in another order, and are numerics classes of their own: AVX512_BF16 adds two
 * neighbouring products of bfloat16 inputs at once (DOTS), AMX adds 32 (TILES, see tiles.h).
 *
 * Weights may also be int8 (bytes.h), for models whose results need not be exact: draft models. */

#include <stdlib.h>

#include "model.h"
#include "products.h"

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_DOTS 1
#else
#define HAS_DOTS 0
#endif

/* Threads share a product with more multiplications than this, which outweigh the meeting of threads that
 * are awake (native_ops.py decides how many are), or with more bytes of weights than one core's cache
 * keeps until the next forward. */
static const double SHARED_WORK[] = {[FLOATS] = 1e6 / SLOWER, [HALVES] = 1e6 / SLOWER, [DOTS] = 1e6,
                                     [TILES] = 2e6, [BYTES] = 2e6 / SLOWER, [TILE_BYTES] = 2e6,
                                     [NIBBLES] = 2e6 / SLOWER, [OCTETS] = 2e6 / SLOWER,
                                     [WIDE_NIBBLES] = 2e6 / SLOWER, [WIDE_OCTETS] = 2e6 / SLOWER};
#define SHARED_BYTES 1.5e6

ALWAYS_INLINE void put_group(const struct target *t, int row, int first, const float *sums, int rows,
                             int panels)
{
    if (!t->narrow && !t->bias && first + panels * WIDTH <= (int)t->outputs) {
        for (int r = 0; r < rows; r++)
            memcpy((float *)t->out + (row + r) * t->outputs + first, sums + r * GROUP * WIDTH,
                   panels * WIDTH * sizeof *sums);
        return;
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            put(t, row + r, first + p * WIDTH, load_(sums + (r * GROUP + p) * WIDTH));
}

/* products.c */
void group_floats(const float *x, size_t stride, const char *weight, size_t panel, const char *after,
                  float *sums, int rows, int steps, int panels);
void group_halves(const float *x, size_t stride, const char *weight, size_t panel, const char *after,
                  float *sums, int rows, int steps, int panels);
/* quants.c */
int quant_product(const void *x, const char *weight, int packing, int rows, int k, int threads, int share,
                  const struct target *t);

#if HAS_DOTS
/* value: two neighbouring inputs in the 32 bits of each float. */
ALWAYS_INLINE vec dot(vec acc, vec w, vec value)
{
#if W == 16
    return (vec){{(nat)_mm512_dpbf16_ps((__m512)acc.n[0], (__m512bh)w.n[0], (__m512bh)value.n[0])}};
#else /* two fused multiply-adds: the bits of HALVES */
    vec out;
    UNROLL for (int i = 0; i < NATS; i++)
    {
        const bfloat16x8_t a = vreinterpretq_bf16_f32((float32x4_t)w.n[i]);
        const bfloat16x8_t b = vreinterpretq_bf16_f32((float32x4_t)value.n[i]);
        out.n[i] = (nat)vbfmlaltq_f32(vbfmlalbq_f32((float32x4_t)acc.n[i], a, b), a, b);
    }
    return out;
#endif
}

#define NAME(f) f##_dots
#define X float
#define SUBSTEPS 1
#define VALUE(x) set_(x)
#define WEIGHTS(from, s) load_((const float *)(from))
#define STEP(acc, w, value) dot(acc, w, value)
#include "products_impl.h"
#endif

#include "bytes.h"
#include "tiles.h"

/* Whether this variant has DOTS: 0 no, 1 with other bits than HALVES, 2 with the same bits. */
EXPORT int has_dots(void)
{
    return !HAS_DOTS ? 0 : W == 16 ? 1 : 2;
}

/* A product with weights in panels of floats. */
struct product_of_floats {
    const void *x;
    float *wide; /* bfloat16 inputs as float32, or NULL */
    const char *weight;
    int packing, rows, k, shares;
    const struct target *target;
};

/* A thread's share of it. */
NOINLINE void multiply_floats(const struct product_of_floats *m)
{
    _Alignas(64) float sums[SPAN * GROUP * WIDTH];
    const struct target *t = m->target;
    const int pairs = m->packing != FLOATS, dots = m->packing == DOTS, rows = m->rows, k = m->k;
    const int steps = pairs ? k / 2 : k, all = (int)(t->outputs + WIDTH - 1) / WIDTH;
    const int group = group_size(rows, m->packing == HALVES);
    const size_t panel = (size_t)steps * LINE, stride = dots ? k / 2 : k;
    const float *in = m->wide ? m->wide : m->x;
    if (m->wide) {
#pragma omp for schedule(static)
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < k; i++)
                m->wide[(size_t)r * k + i] = bf16_load(((const uint16_t *)m->x)[(size_t)r * k + i]);
    }
#pragma omp for schedule(static)
    for (int i = 0; i < m->shares; i++) {
        const int end = first_panel(all, i + 1, m->shares);
        for (int p = first_panel(all, i, m->shares), panels; p < end; p += panels) {
            panels = end - p < group ? end - p : group;
            const char *w = m->weight + p * panel;
            for (int r = 0; r < rows; r += SPAN) {
                const int count = rows - r < SPAN ? rows - r : SPAN;
                const char *after = r + SPAN < rows ? w : w + panels * panel;
                const float *from = in + r * stride;
                if (!pairs)
                    group_floats(from, stride, w, panel, after, sums, count, steps, panels);
#if HAS_DOTS
                else if (dots)
                    group_dots(from, stride, w, panel, after, sums, count, steps, panels);
#endif
                else
                    group_halves(from, stride, w, panel, after, sums, count, steps, panels);
                put_group(t, r, p * WIDTH, sums, count, panels);
            }
        }
    }
}

static int linear(const void *x, const void *packed, int packing, int rows, int k, int threads,
                  const struct target *t)
{
    const double size = (double)k * t->outputs;
    const int bytes = packing >= BYTES ? 1 : packing == FLOATS ? 4 : 2;
    const int share = size * rows > SHARED_WORK[packing] || size * bytes > SHARED_BYTES;
    if (!rows)
        return 0;
    if (packing == TILES)
        return tiled(x, packed, rows, k, threads, share, t);
    if (packing >= NIBBLES)
        return quant_product(x, packed, packing, rows, k, threads, share, t);
    if (packing >= BYTES)
        return byte_product(x, packed, rows, k, threads, share, packing == TILE_BYTES, t);
    float *wide = NULL;
    if (t->narrow && packing != DOTS) {
        wide = aligned_alloc(64, (rows * (size_t)k * sizeof *wide + 127) & ~(size_t)63);
        if (!wide)
            return 1;
    }
    const struct product_of_floats product = {x, wide, packed, packing, rows, k, share ? threads : 1, t};
    ON_THREADS(threads, share, multiply_floats(&product));
    free(wide);
    return 0;
}

/* x: [rows, k], out: [rows, outputs]; packing: of the weights; threads: at most. Returns non-zero if memory
 * runs out. */
EXPORT int linear_f32(const float *x, const void *packed, int packing, const float *bias, float *out,
                      int rows, int k, int outputs, int threads)
{
    return linear(x, packed, packing, rows, k, threads, &(struct target){bias, out, outputs, 0});
}

EXPORT int linear_bf16(const uint16_t *x, const void *packed, int packing, const uint16_t *bias,
                       uint16_t *out, int rows, int k, int outputs, int threads)
{
    return linear(x, packed, packing, rows, k, threads, &(struct target){bias, out, outputs, 1});
}

#include "roofline.h"
