/* Products with weights in blocks of small integers, as GGUF files hold them, for matmul.c. Several variants
 * share this file.
 *
 * A weight is scale * q + least, with a scale and a least of its block of 32 or 16 neighbouring inputs.
 * Inputs are rounded to eight bits in blocks of 32, row by row. Sums of products of integers are exact;
 * a block's share of a result is fma(sum, weights' scale * inputs' scale, share of the blocks before),
 * then fma(least, sum of the inputs, that), in the order of blocks. So a row's result depends on that row
 * alone, and every variant computes the same bits.
 *
 * A panel holds 16 outputs: the scales of all blocks and then the integers of all blocks, each part
 * from a multiple of 64 bytes on. A line of 64 bytes has 4 inputs of each output, one output after the
 * other: [16][4]. With four bits, it has 8: the low halves of its bytes are the first 4 inputs. */

#include <stdlib.h>

#include "model.h"
#include "products.h"

struct quant_kind {
    int bits;  /* of an integer: 4, unsigned, or 8, signed */
    int block; /* inputs */
    int wide;  /* whether scales are float32; else float16 */
    int least; /* whether there are any */
};

/* In the order of enum packing, from NIBBLES on. */
#define NIBBLE_KIND ((struct quant_kind){4, 32, 0, 1})
#define OCTET_KIND ((struct quant_kind){8, 32, 0, 0})
#define WIDE_NIBBLE_KIND ((struct quant_kind){4, 32, 1, 1})
#define WIDE_OCTET_KIND ((struct quant_kind){8, 16, 1, 1})

#define QUANT_INPUTS 32 /* that are rounded together */

/* A block of inputs: scale * q. */
struct quant_inputs {
    int8_t q[QUANT_INPUTS];
    float scale;
    float sum, half_sums[2]; /* of the block, and of its halves */
    int32_t shifts[2];       /* 128 times the sum of q of each half */
} __attribute__((aligned(64)));

/* Rows whose sums the registers hold. */
#if W == 16
#define QUANT_ROWS 8
#elif HAS_FMA
#define QUANT_ROWS 4
#else
#define QUANT_ROWS 1
#endif
/* Few weights are wide: more rows would gain less than their code costs. */
#define QUANT_MOST(kind) ((kind).wide && QUANT_ROWS > 4 ? 4 : QUANT_ROWS)

ALWAYS_INLINE size_t quant_header(const struct quant_kind kind) /* bytes for one block of a panel */
{
    return WIDTH * (kind.wide ? 4 : 2) * (kind.least ? 2 : 1);
}

ALWAYS_INLINE size_t quant_headers(const struct quant_kind kind, int k)
{
    return (k / kind.block * quant_header(kind) + 63) & ~(size_t)63;
}

ALWAYS_INLINE size_t quant_panel(const struct quant_kind kind, int k)
{
    return quant_headers(kind, k) + (size_t)k * WIDTH * kind.bits / 8;
}

/* 16 numbers in float16; no infinities. */
ALWAYS_INLINE vec float16_(const uint16_t *x)
{
    vec out;
#if W == 16
    out.n[0] = (nat)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
#elif W == 8 && defined(__F16C__)
    UNROLL for (int i = 0; i < NATS; i++)
        out.n[i] = (nat)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i * W)));
#elif defined(__aarch64__)
    UNROLL for (int i = 0; i < NATS; i++)
        out.n[i] = (nat)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + i * W)));
#else
    UNROLL for (int i = 0; i < NATS; i++) {
        const nat_bits bits = __builtin_convertvector(*(const half_at *)(x + i * W), nat_bits);
        const nat size = (nat)((bits & 0x7fff) << 13) * nat_set(0x1p112f);
        out.n[i] = (nat)((nat_bits)size | (bits & 0x8000) << 16);
    }
#endif
    return out;
}

/* Four inputs, broadcast from memory in one instruction. As a float: with an integer, compilers take another
 * register on the way. */
#if W >= 8
typedef float four_inputs __attribute__((aligned(4), may_alias));
#else
typedef int32_t four_inputs __attribute__((aligned(4), may_alias));
#endif

/* Sums of products for 16 outputs: a line of eight bits, or the low or high halves of a line, times 4 inputs.
 * For each instruction set: a native vector's part of a line, its halves, and the inputs to multiply with. */
#if W == 16
typedef __m512i quant_part;
#define QUANT_PARTS 1
#define PART_LOAD(from) _mm512_loadu_si512(from)
#define PART_INPUTS(q) _mm512_castps_si512(_mm512_set1_ps(*(const four_inputs *)(q)))
#define PART_LOW(line) _mm512_and_si512(line, _mm512_set1_epi8(15))
#define PART_HIGH(line) _mm512_and_si512(_mm512_srli_epi16(line, 4), _mm512_set1_epi8(15))
#elif W == 8
typedef __m256i quant_part;
#define QUANT_PARTS 2
#define PART_LOAD(from) _mm256_loadu_si256((const __m256i *)(from))
#define PART_INPUTS(q) _mm256_castps_si256(_mm256_broadcast_ss((const four_inputs *)(q)))
#define PART_LOW(line) _mm256_and_si256(line, _mm256_set1_epi8(15))
#define PART_HIGH(line) _mm256_and_si256(_mm256_srli_epi16(line, 4), _mm256_set1_epi8(15))
#elif defined(__aarch64__)
typedef int8x16_t quant_part;
#define QUANT_PARTS 4
#define PART_LOAD(from) vld1q_s8((const int8_t *)(from))
#define PART_INPUTS(q) vreinterpretq_s8_s32(vdupq_n_s32(*(const four_inputs *)(q)))
#define PART_LOW(line) vandq_s8(line, vdupq_n_s8(15))
#define PART_HIGH(line) vreinterpretq_s8_u8(vshrq_n_u8(vreinterpretq_u8_s8(line), 4))
#else
typedef struct {
    int8_t b[4 * W];
} quant_part;
#define QUANT_PARTS NATS

ALWAYS_INLINE quant_part part_load(const void *from)
{
    quant_part out;
    memcpy(&out, from, sizeof out);
    return out;
}

ALWAYS_INLINE quant_part part_inputs(const int8_t *q)
{
    quant_part out;
    for (int i = 0; i < W; i++)
        memcpy(out.b + 4 * i, q, 4);
    return out;
}

ALWAYS_INLINE quant_part part_half(quant_part line, int shift)
{
    quant_part out;
    for (int i = 0; i < 4 * W; i++)
        out.b[i] = (int8_t)((uint8_t)line.b[i] >> shift & 15);
    return out;
}

#define PART_LOAD(from) part_load(from)
#define PART_INPUTS(q) part_inputs(q)
#define PART_LOW(line) part_half(line, 0)
#define PART_HIGH(line) part_half(line, 4)
#endif

_Static_assert(QUANT_PARTS == NATS, "a part has as many outputs as a native vector has numbers");

/* sums + w * x, four products for each output. */
#if (W == 16 && defined(__AVX512VNNI__)) || (W == 8 && defined(__AVXVNNI__))
#define QUANT_SHIFTS 1 /* signed weights count as 128 more */
#define QUANT_NARROW 0
ALWAYS_INLINE nat_int quant_step(nat_int sums, quant_part w, quant_part x, int bits)
{
#if W == 16
    const quant_part from = bits == 4 ? w : _mm512_xor_si512(w, _mm512_set1_epi8(-128));
    return (nat_int)_mm512_dpbusd_epi32((__m512i)sums, from, x);
#else
    const quant_part from = bits == 4 ? w : _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    return (nat_int)_mm256_dpbusd_avx_epi32((__m256i)sums, from, x);
#endif
}

ALWAYS_INLINE nat_int quant_finish(nat_int sums, int bits)
{
    (void)bits;
    return sums;
}
#elif W >= 8
#define QUANT_SHIFTS 0
/* The 16 bits of a sum of pairs hold a whole block of four bits: 16 * 15 * 127 = 30,480. Of eight bits, they
 * hold two products: 2 * 128 * 127 = 32,512. */
ALWAYS_INLINE nat_int quant_step(nat_int sums, quant_part w, quant_part x, int bits)
{
#if W == 16
    if (bits == 4)
        return (nat_int)_mm512_add_epi16((__m512i)sums, _mm512_maddubs_epi16(w, x));
    const __m512i turned = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_abs_epi8(w), turned);
    return sums + (nat_int)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#else
    if (bits == 4)
        return (nat_int)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16(w, x));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return sums + (nat_int)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#endif
}

ALWAYS_INLINE nat_int quant_finish(nat_int sums, int bits)
{
#if W == 16
    return bits == 4 ? (nat_int)_mm512_madd_epi16((__m512i)sums, _mm512_set1_epi16(1)) : sums;
#else
    return bits == 4 ? (nat_int)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1)) : sums;
#endif
}
#else
#define QUANT_SHIFTS 0
ALWAYS_INLINE nat_int quant_step(nat_int sums, quant_part w, quant_part x, int bits)
{
    (void)bits;
#if defined(__ARM_FEATURE_DOTPROD)
    return (nat_int)vdotq_s32((int32x4_t)sums, w, x);
#elif defined(__aarch64__)
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
    const int16x8_t high = vmull_s8(vget_high_s8(w), vget_high_s8(x));
    return sums + (nat_int)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#else
    for (int i = 0; i < W; i++)
        for (int j = 0; j < 4; j++)
            sums[i] += w.b[4 * i + j] * x.b[4 * i + j];
    return sums;
#endif
}

ALWAYS_INLINE nat_int quant_finish(nat_int sums, int bits)
{
    (void)bits;
    return sums;
}
#endif

/* A row of inputs, rounded; zeros after k. */
static void quant_round(const void *x, size_t at, struct quant_inputs *out, int k, int narrow)
{
    for (int b = 0; b * QUANT_INPUTS < k; b++, out++) {
        vec parts[QUANT_INPUTS / WIDTH], top = set_(0.0f);
        int32_t sums[2] = {0, 0};
        for (int i = 0; i < QUANT_INPUTS / WIDTH; i++) {
            const int from = b * QUANT_INPUTS + i * WIDTH;
            parts[i] = read_(x, at + from, k - from, narrow);
            top = max_(top, max_(parts[i], sub_(set_(0.0f), parts[i])));
        }
        const float largest_input = largest(top);
        out->scale = largest_input > 1e-30f ? largest_input / 127.0f : 0.0f;
        const vec factor = set_(out->scale > 0.0f ? 1.0f / out->scale : 0.0f);
        for (int i = 0; i < QUANT_INPUTS / WIDTH; i++) {
            const nat round = nat_set(12582912.0f); /* 1.5 * 2^23: to the nearest, ties to even */
            int32_t whole[WIDTH];
            UNROLL for (int n = 0; n < NATS; n++) {
                const nat v = mul_(parts[i], factor).n[n];
                const nat_int rounded = __builtin_convertvector((v + round) - round, nat_int);
                memcpy(whole + n * W, &rounded, sizeof rounded);
            }
            for (int j = 0; j < WIDTH; j++) {
                out->q[i * WIDTH + j] = (int8_t)whole[j];
                sums[i] += whole[j];
            }
        }
        out->sum = out->scale * (float)(sums[0] + sums[1]);
        for (int i = 0; i < 2; i++) {
            out->half_sums[i] = out->scale * (float)sums[i];
            out->shifts[i] = 128 * sums[i];
        }
    }
}

/* Panels that a block of rows takes together. Several streams are read faster than one, and sums that do not
 * wait for each other hide the latency of additions; with more panels, registers run out: each has sums of
 * all rows and, with four bits, weights of both halves. */
#if W == 16
#define QUANT_PANELS(rows, bits) ((rows) == 1 ? (bits) : (bits) == 8 && (rows) <= 6 ? 4 : 2)
#else
#define QUANT_PANELS(rows, bits) ((rows) == 1 ? 4 : 2)
#endif
#define MOST_PANELS QUANT_PANELS(1, 8)

/* Up to QUANT_ROWS rows and some neighbouring panels of `size` bytes each. Each of `turns` such calls fetches
 * a share of the next panels, spread over its own blocks. */
ALWAYS_INLINE void quant_block(const struct quant_inputs *x, int k, const char *panel, size_t size,
                               int turn, int turns, const struct target *t, int row, int first,
                               const int rows, const int panels, const struct quant_kind kind)
{
    const int blocks = k / kind.block, inputs = k / QUANT_INPUTS, step = kind.bits == 4 ? 8 : 4;
    const size_t to_lines = quant_headers(kind, k), to_next = panels * size;
    vec acc[QUANT_ROWS][MOST_PANELS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) acc[r][p] = set_(0.0f);
    for (int b = 0; b < blocks; b++) {
        const int half = kind.block == QUANT_INPUTS ? 0 : b & 1;
        const struct quant_inputs *in = x + (kind.block == QUANT_INPUTS ? b : b / 2);
        const int fetches = turn-- == 0;
        if (fetches)
            turn = turns - 1;
        const char *headers = panel + b * quant_header(kind);
        if (fetches) /* scales are a stream of their own */
            UNROLL for (int p = 0; p < panels; p++) FETCH(headers + to_next + p * size);
        const char *lines = panel + to_lines + b * (kind.block * WIDTH * kind.bits / 8);
        vec whole[QUANT_ROWS][MOST_PANELS];
        UNROLL for (int n = 0; n < NATS; n++) {
            nat_int sums[QUANT_ROWS][MOST_PANELS];
            UNROLL for (int r = 0; r < rows; r++) {
                nat_int start = {0};
                if (QUANT_SHIFTS && kind.bits == 8) {
                    const int32_t *shifts = in[r * inputs].shifts;
                    start -= kind.block == 16 ? shifts[half] : shifts[0] + shifts[1];
                }
                UNROLL for (int p = 0; p < panels; p++) sums[r][p] = start;
            }
            /* Unrolled, compilers add up late and run out of registers. */
            _Pragma("GCC unroll 1") for (int i = 0; i < kind.block / step; i++) {
                const char *line = lines + i * LINE + n * (LINE / NATS);
                const int at = half * 16 + i * step;
                if (fetches && n == 0)
                    UNROLL for (int p = 0; p < panels; p++) FETCH(line + to_next + p * size);
                /* Row after row: its inputs leave the registers to sums and weights. */
                quant_part low[MOST_PANELS], high[MOST_PANELS];
                UNROLL for (int p = 0; p < panels; p++) {
                    const quant_part w = PART_LOAD(line + p * size);
                    low[p] = kind.bits == 4 ? PART_LOW(w) : w;
                    if (kind.bits == 4)
                        high[p] = PART_HIGH(w);
                }
                UNROLL for (int r = 0; r < rows; r++) {
                    const int8_t *q = in[r * inputs].q + at;
                    UNROLL for (int p = 0; p < panels; p++)
                        sums[r][p] = quant_step(sums[r][p], low[p], PART_INPUTS(q), kind.bits);
                    if (kind.bits == 4)
                        UNROLL for (int p = 0; p < panels; p++)
                            sums[r][p] = quant_step(sums[r][p], high[p], PART_INPUTS(q + 4), 4);
                }
            }
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int p = 0; p < panels; p++)
                    whole[r][p].n[n] = __builtin_convertvector(quant_finish(sums[r][p], kind.bits), nat);
        }
        UNROLL for (int p = 0; p < panels; p++) {
            const char *header = headers + p * size;
            const vec scale = kind.wide ? load_((const float *)header)
                                        : float16_((const uint16_t *)header);
            UNROLL for (int r = 0; r < rows; r++) {
                const struct quant_inputs *from = in + r * inputs;
                acc[r][p] = fma_(whole[r][p], mul_(scale, set_(from->scale)), acc[r][p]);
                if (kind.least) {
                    const float *leasts = (const float *)header + WIDTH;
                    const vec least = kind.wide ? load_(leasts)
                                                : float16_((const uint16_t *)header + WIDTH);
                    const float sum = kind.block == 16 ? from->half_sums[half] : from->sum;
                    acc[r][p] = fma_(least, set_(sum), acc[r][p]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) put(t, row + r, first + p * WIDTH, acc[r][p]);
}

#define BLOCK(r, rows, count)                                                                     \
    quant_block(x + (size_t)(r) * (k / QUANT_INPUTS), k, panel + p * size, size, turn, turns, t,   \
                row + (r), first + p * WIDTH, rows, count, kind)
#define CASE(rows)                                                                                \
    case rows:                                                                                    \
        if ((rows) > QUANT_MOST(kind)) /* which takes no code */                                  \
            break;                                                                                \
        for (; p + QUANT_PANELS(rows, kind.bits) <= panels; p += QUANT_PANELS(rows, kind.bits))   \
            BLOCK(0, rows, QUANT_PANELS(rows, kind.bits));                                        \
        if (QUANT_PANELS(rows, kind.bits) > 4 && p + 4 <= panels) {                               \
            BLOCK(0, rows, 4);                                                                    \
            p += 4;                                                                               \
        }                                                                                         \
        break;

ALWAYS_INLINE void quant_rows(const struct quant_inputs *x, int k, const char *panel, size_t size,
                              int turn, int turns, const struct target *t, int row, int first, int rows,
                              int panels, const struct quant_kind kind)
{
    int p = 0;
    switch (rows) {
        CASE(1)
#if QUANT_ROWS > 1
        CASE(2)
        CASE(3)
        CASE(4)
#endif
#if QUANT_ROWS > 4
        CASE(5)
        CASE(6)
        CASE(7)
        CASE(8)
#endif
    }
    for (; p < panels; p++) /* few matrices have any left: code for all numbers of rows is not worth it */
        for (int r = 0; r < rows; r++)
            BLOCK(r, 1, 1);
}

#undef CASE
#undef BLOCK

#define QUANT_PANEL(name, kind)                                                                   \
    static void name##_panels(const struct quant_inputs *x, int k, const char *weight, int first, \
                              int panels, const struct target *t, int rows)                       \
    {                                                                                             \
        const size_t size = quant_panel(kind, k);                                                 \
        const char *from = weight + first * size;                                                 \
        const int most = QUANT_MOST(kind), blocks = (rows + most - 1) / most;                     \
        for (int b = 0; b < blocks; b++) {                                                        \
            const int r = rows * b / blocks, end = rows * (b + 1) / blocks;                       \
            quant_rows(x + (size_t)r * (k / QUANT_INPUTS), k, from, size, b, blocks, t, r,        \
                       first * WIDTH, end - r, panels, kind);                                     \
        }                                                                                         \
    }

QUANT_PANEL(nibble, NIBBLE_KIND)
QUANT_PANEL(octet, OCTET_KIND)
QUANT_PANEL(wide_nibble, WIDE_NIBBLE_KIND)
QUANT_PANEL(wide_octet, WIDE_OCTET_KIND)

/* A product with weights in blocks of integers. */
struct product_of_quants {
    const void *x;
    struct quant_inputs *in; /* [rows][k / QUANT_INPUTS] */
    const char *weight;
    int packing, rows, k, shares;
    const struct target *target;
};

/* A thread's share of it. */
NOINLINE void multiply_quants(const struct product_of_quants *m)
{
    const struct target *t = m->target;
    const int packing = m->packing, rows = m->rows, k = m->k;
    const int panels = (int)(t->outputs + WIDTH - 1) / WIDTH;
    const int most = packing <= OCTETS ? QUANT_ROWS : QUANT_MOST(WIDE_OCTET_KIND);
    const int blocks = (rows + most - 1) / most;
    const int bits = packing == OCTETS || packing == WIDE_OCTETS ? 8 : 4;
    const int together = QUANT_PANELS(rows / blocks, bits);
#pragma omp for schedule(static)
    for (int r = 0; r < rows; r++)
        quant_round(m->x, (size_t)r * k, m->in + (size_t)r * (k / QUANT_INPUTS), k, t->narrow);
#pragma omp for schedule(static)
    for (int i = 0; i < m->shares; i++) {
        /* Whole blocks: code for fewer panels is slow. */
        const int end = i + 1 < m->shares ? first_panel(panels / together, i + 1, m->shares) * together : panels;
        const int first = first_panel(panels / together, i, m->shares) * together;
        for (int p = first, count; p < end; p += count) {
            count = end - p < together ? end - p : together;
            if (packing == NIBBLES)
                nibble_panels(m->in, k, m->weight, p, count, t, rows);
            else if (packing == OCTETS)
                octet_panels(m->in, k, m->weight, p, count, t, rows);
            else if (packing == WIDE_NIBBLES)
                wide_nibble_panels(m->in, k, m->weight, p, count, t, rows);
            else
                wide_octet_panels(m->in, k, m->weight, p, count, t, rows);
        }
    }
}

/* The product; k is a multiple of 32. Returns non-zero if memory runs out. */
int quant_product(const void *x, const char *weight, int packing, int rows, int k, int threads, int share,
                  const struct target *t)
{
    struct quant_inputs *in = aligned_alloc(64, (size_t)rows * (k / QUANT_INPUTS) * sizeof *in);
    if (!in)
        return 1;
    const struct product_of_quants product = {x, in, weight, packing, rows, k, share ? threads : 1, t};
    ON_THREADS(threads, share, multiply_quants(&product));
    free(in);
    return 0;
}
