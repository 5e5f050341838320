/* The decoder layers of a Llama-type model on a CPU.
 *
 * One call runs all layers, and no function's result for a row depends on other rows. So verification has
 * the bits of AR decoding. torch_ops.py computes the same in plain torch. */

#include <math.h>
#include <stdlib.h>

#include "model.h"
#include "simd.h"

#define MAX_HEAD_DIM 256
#define BLOCK_ROWS 16 /* rows of a sequence, times heads, for which attention reads keys and values once */
#define SHARED_FLOATS 2048 /* of keys or values that all rows of a block take before the next ones */
#define AHEAD 64 /* slots between the one in use and the one that is asked for */
#define SUMS 4 /* of a row's weighted values: they hide the latency of additions */
#define SHARED_NUMBERS (1e4 / SLOWER) /* with more numbers, threads share work done row by row */
#define EACH_ROW(rows, numbers, call) ON_THREADS(m->threads, (double)(rows) * (numbers) > SHARED_NUMBERS, call)
/* Vectors of a row's weighted values that stay in registers, for one row and for two. */
#if W == 16
#define VALUES_ONE 4
#define VALUES_TWO 2
#else
#define VALUES_ONE 1
#define VALUES_TWO 1
#endif

_Static_assert(SHARED_FLOATS <= WIDTH * MAX_HEAD_DIM, "attend_heads holds as many");

/* A head dimension, rounded up to whole vectors. */
#define PADDED(dim) (((dim) + WIDTH - 1) / WIDTH * WIDTH)

/* Scores of a query for WIDTH keys, [WIDTH][dim]. */
ALWAYS_INLINE vec score(const float *query, const float *keys, const int dim)
{
    vec out;
    UNROLL for (int part = 0; part < NATS; part++)
    {
        nat sums[W];
        UNROLL for (int i = 0; i < W; i++)
        {
            const float *key = keys + (part * W + i) * dim;
            vec products = mul_(load_(query), load_(key));
            for (int d = WIDTH; d < dim; d += WIDTH)
                products = fma_(load_(query + d), load_(key + d), products);
            sums[i] = fold(products);
        }
        out.n[part] = sum_lanes(sums);
    }
    return out;
}

/* cap * tanh(x / cap) of whole vectors. */
ALWAYS_INLINE vec soft_cap(vec x, float cap)
{
    return mul_(set_(cap), tanh_(div_(x, set_(cap))));
}

/* Turns scores into weights, not yet divided by their sum; returns the sum. sink: a further score without a
 * value, or -INFINITY. */
static float weigh(float *scores, int length, float sink)
{
    for (int j = length; j % WIDTH; j++)
        scores[j] = -INFINITY;
    vec tops = load_(scores), totals = set_(0.0f);
    for (int j = WIDTH; j < length; j += WIDTH)
        tops = max_(tops, load_(scores + j));
    const float highest = largest(tops) > sink ? largest(tops) : sink;
    const vec top = set_(highest);
    for (int j = 0; j < length; j += WIDTH) {
        const vec weights = exp_(sub_(load_(scores + j), top));
        store_(scores + j, weights);
        totals = add_(totals, weights);
    }
    if (sink == -INFINITY)
        return sum_of(totals);
    float of_sink[W];
    nat_store(of_sink, nat_exp(nat_set(sink - highest)));
    return sum_of(totals) + of_sink[0];
}

/* Adds weighted values, [count][dim], to the sums, [SUMS][dim], of one row, or of two that lie a stride
 * apart: `vectors` of them from d on. A value's position alone decides to which of the SUMS it goes. */
ALWAYS_INLINE void add_some(const float *weights, size_t stride, const float *values, int count,
                            float *sums, size_t sums_stride, int d, const int rows, const int vectors,
                            const int dim)
{
    vec acc[2][SUMS][VALUES_ONE];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < SUMS; i++)
            UNROLL for (int v = 0; v < vectors; v++)
                acc[r][i][v] = load_(sums + r * sums_stride + i * dim + d + v * WIDTH);
    int j = 0;
    for (; j + SUMS <= count; j += SUMS)
        UNROLL for (int i = 0; i < SUMS; i++)
            UNROLL for (int v = 0; v < vectors; v++)
            {
                const vec value = load_(values + (j + i) * dim + d + v * WIDTH);
                UNROLL for (int r = 0; r < rows; r++)
                    acc[r][i][v] = fma_(set_(weights[r * stride + j + i]), value, acc[r][i][v]);
            }
    for (; j < count; j++)
        UNROLL for (int v = 0; v < vectors; v++)
        {
            const vec value = load_(values + j * dim + d + v * WIDTH);
            UNROLL for (int r = 0; r < rows; r++)
                acc[r][0][v] = fma_(set_(weights[r * stride + j]), value, acc[r][0][v]);
        }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < SUMS; i++)
            UNROLL for (int v = 0; v < vectors; v++)
                store_(sums + r * sums_stride + i * dim + d + v * WIDTH, acc[r][i][v]);
}

ALWAYS_INLINE void add_values(const float *weights, size_t stride, const float *values, int count,
                              float *sums, size_t sums_stride, const int rows, const int dim)
{
    const int vectors = rows == 1 ? VALUES_ONE : VALUES_TWO;
    int d = 0;
    for (; d + vectors * WIDTH <= dim; d += vectors * WIDTH)
        add_some(weights, stride, values, count, sums, sums_stride, d, rows, vectors, dim);
    for (; vectors > 1 && d < dim; d += WIDTH)
        add_some(weights, stride, values, count, sums, sums_stride, d, rows, 1, dim);
}

/* One head's keys, or values, of some slots as float32, padded with zeros.  # [count][PADDED(dim)] */
ALWAYS_INLINE void gather(const void *entries, const int32_t *slots, int count, size_t width, float *out,
                          const int dim, int narrow)
{
    for (int i = 0; i < count; i++)
        for (int d = 0; d < dim; d += WIDTH)
            store_(out + i * PADDED(dim) + d, read_(entries, slots[i] * width + d, dim - d, narrow));
}

/* Asks for one head's entries of slots [from, until) of a context, as far as it goes. The processor's own
 * prefetching misses them: each slot's are a few lines, a stride apart, or anywhere. */
ALWAYS_INLINE void prefetch(const void *entries, const int32_t *slots, int from, int until, int length,
                            size_t width, const int dim, int narrow)
{
    const size_t bytes = narrow ? 2 : 4;
    until = until < length ? until : length;
    for (int i = from; i < until; i++) {
        const char *entry = (const char *)entries + slots[i] * width * bytes;
        for (size_t at = 0; at < dim * bytes; at += 64)
            __builtin_prefetch(entry + at, 0, 2);
    }
}

/* Reads the entries of slots, all heads of each, in their order: the processor reads ahead then. Attention takes one
 * head after the other, and memory gives its part of each slot at a quarter of the speed, asked for or not. */
static void bring(const char *entries, const int32_t *slots, int count, size_t bytes)
{
    uint32_t sum = 0;
    for (int i = 0; i < count; i++)
        for (size_t at = 0; at < bytes; at += 64) {
            uint32_t number;
            memcpy(&number, entries + slots[i] * bytes + at, sizeof number);
            sum += number;
        }
    __asm__ volatile("" ::"r"(sum)); /* or compilers leave it out */
}

/* Neighbouring query heads of several rows over their contexts. Heads of a group read the same keys and
 * values, and neighbouring rows have most of a context in common. So all take the same few slots before the
 * next ones, and each slot is read once; `rows` counts each head of each row. The results of one do not
 * depend on the others.
 * query, out: of the first row, the others follow after a stride; scores: [rows][padded]; shared: how many
 * slots a context has in common with the last row's, from the first on; first: whether no earlier head has
 * read these keys and values; cap: of scores, 0 for none; sinks: as of weigh, of each head. */
ALWAYS_INLINE void attend_heads(const void *query, size_t stride, const void *keys, const void *values,
                                void *out, size_t out_stride, const int32_t *const *contexts,
                                const int *lengths, const int *shared, size_t padded, int rows, int heads,
                                size_t width, float scale, float cap, const float *sinks, float *scores,
                                int first, int narrow, const int dim)
{
    float queries[BLOCK_ROWS][MAX_HEAD_DIM], sums[BLOCK_ROWS][SUMS * MAX_HEAD_DIM];
    float totals[BLOCK_ROWS], entries[WIDTH * MAX_HEAD_DIM] __attribute__((aligned(64)));
    const int last = rows - 1, wide = PADDED(dim), most = SHARED_FLOATS / wide / SUMS * SUMS;
    int longest = 0;
    for (int r = 0; r < rows; r++) {
        longest = lengths[r] > longest ? lengths[r] : longest;
        for (int d = 0; d < dim; d += WIDTH)
            store_(queries[r] + d,
                   mul_(read_(query, r / heads * stride + r % heads * dim + d, dim - d, narrow), set_(scale)));
        for (int d = 0; d < SUMS * wide; d += WIDTH) /* memset takes half as wide stores */
            store_(sums[r] + d, set_(0.0f));
    }
#define PREFETCH(entries, from, until) \
    if (first) \
        prefetch(entries, contexts[last], from, until, lengths[last], width, dim, narrow)
    PREFETCH(keys, 0, AHEAD);
    for (int j = 0; j < longest; j += WIDTH) {
        int held = 0; /* whether the last row's entries are gathered */
        PREFETCH(keys, j + AHEAD, j + AHEAD + WIDTH);
        for (int r = last; r >= 0; r--) {
            const int count = lengths[r] - j < WIDTH ? lengths[r] - j : WIDTH;
            if (count <= 0)
                continue;
            if (!held || j + count > shared[r])
                gather(keys, contexts[r] + j, count, width, entries, dim, narrow);
            held = r == last || (held && j + count <= shared[r]);
            store_(scores + r * padded + j, score(queries[r], entries, wide));
        }
    }
    PREFETCH(values, 0, AHEAD);
    for (int r = 0; cap != 0.0f && r < rows; r++)
        for (int j = 0; j < lengths[r]; j += WIDTH)
            store_(scores + r * padded + j, soft_cap(load_(scores + r * padded + j), cap));
    for (int r = 0; r < rows; r++)
        totals[r] = weigh(scores + r * padded, lengths[r], sinks[r % heads]);
    for (int j = 0; j < longest; j += most) {
        int held = 0;
        PREFETCH(values, j + AHEAD, j + AHEAD + most);
        for (int r = last; r >= 0; r--) {
            const int count = lengths[r] - j < most ? lengths[r] - j : most;
            const float *weights = scores + r * padded + j;
            if (count <= 0)
                continue;
            if (held && r && j + most <= shared[r] && j + most <= shared[r - 1]) {
                r--; /* two rows use a value while it is in a register */
                add_values(weights - padded, padded, entries, most, sums[r], SUMS * MAX_HEAD_DIM, 2,
                           wide);
                continue;
            }
            if (!held || j + count > shared[r])
                gather(values, contexts[r] + j, count, width, entries, dim, narrow);
            held = r == last || (held && j + count <= shared[r]);
            add_values(weights, padded, entries, count, sums[r], SUMS * MAX_HEAD_DIM, 1, wide);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim; d += WIDTH) {
            const float *s = sums[r] + d;
            const vec even = add_(load_(s), load_(s + wide));
            const vec odd = add_(load_(s + 2 * wide), load_(s + 3 * wide));
            write_(out, r / heads * out_stride + r % heads * dim + d,
                   div_(add_(even, odd), set_(totals[r])), dim - d, narrow);
        }
#undef PREFETCH
}

/* As attend_heads; the compiler gets common head dimensions as constants. */
static void attend(const void *query, size_t stride, const void *keys, const void *values, void *out,
                   size_t out_stride, const int32_t *const *contexts, const int *lengths,
                   const int *shared, size_t padded, int rows, int heads, size_t width, float scale,
                   float cap, const float *sinks, float *scores, int first, int narrow, int dim)
{
#define ATTEND(d)                                                                                 \
    attend_heads(query, stride, keys, values, out, out_stride, contexts, lengths, shared, padded, rows, \
                 heads, width, scale, cap, sinks, scores, first, narrow, d)
#if HAS_FMA
    if (dim == 32)
        ATTEND(32);
    else if (dim == 64)
        ATTEND(64);
    else if (dim == 128)
        ATTEND(128);
    else
#endif
        ATTEND(dim);
#undef ATTEND
}

/* How many of the first slots of a context, the last of which is the row's own, a window hides. */
static inline int hidden_by(int window, int chunked, int length)
{
    if (!window)
        return 0;
    if (chunked)
        return (length - 1) / window * window;
    return length > window ? length - window : 0;
}

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#define ELEM float
#define LOAD(x) (x)
#define NAME(f) JOIN(f, f32)
#include "decode_impl.h"
#undef ELEM
#undef LOAD
#undef NAME

#define ELEM uint16_t
#define LOAD(x) bf16_load(x)
#define NAME(f) JOIN(f, bf16)
#include "decode_impl.h"

/* Bytes of the structures in native_structs.py, in the order of its STRUCTS; 0 for no such structure. */
EXPORT int struct_size(int which)
{
    const size_t sizes[] = {sizeof(struct rows), sizeof(struct model), sizeof(struct weight),
                            sizeof(struct layer), sizeof(struct experts), sizeof(struct low_part), sizeof(struct low_rank),
                            sizeof(struct adapted), sizeof(struct shortlist)};
    return which >= 0 && which < (int)(sizeof sizes / sizeof *sizes) ? (int)sizes[which] : 0;
}
