/* Sampling: the noise of coupled sampling, exp and log, with the same bits on every processor.

   The IEEE 754 operations are those of paceline/exact_math.py, in the same order; the constants' source is
   named there. Each element is computed by itself, so the compiler may use vectors of any width. It must
   neither fuse a product and a sum (-ffp-contract=off) nor reorder (-ffast-math). Loops go over blocks that
   stay in the first-level cache. */

#include <stddef.h>
#include <stdint.h>

#include "simd.h" /* EXPORT */

#if defined(__FAST_MATH__)
#error "noise.c must be compiled without -ffast-math"
#endif

enum { BLOCK = 128, LANES = 16 };

static inline double as_double(uint64_t bits)
{
    union { uint64_t i; double d; } u = {bits};
    return u.d;
}

static inline uint64_t as_bits(double value)
{
    union { double d; uint64_t i; } u = {value};
    return u.i;
}

/* With masks: compilers do not vectorise a condition on doubles that might trap. */
static inline double choose(int condition, double yes, double no)
{
    const uint64_t mask = -(uint64_t)condition;
    return as_double((as_bits(yes) & mask) | (as_bits(no) & ~mask));
}

#define TWO52 0x1p52
#define BITS52 0x4330000000000000u /* of TWO52, whose last places take an integer below 2^52 */
#define ROUNDER 0x1.8p52           /* x + ROUNDER - ROUNDER is x rounded to an integer */
#define INFINITE 0x7ff0000000000000u
#define NOT_A_NUMBER 0x7ff8000000000000u

/* --- log and exp ------------------------------------------------------------------------------ */

/* Natural logarithm of a positive normal number; scaling is added to its exponent. */
static inline double log_of_normal(double x, double scaling)
{
    const uint64_t bits = as_bits(x) + 0x00095f6200000000u; /* 1.0 - sqrt(0.5), in bits */
    const double k = as_double((bits >> 52) | BITS52) - (TWO52 + 1023.0) + scaling;
    const double f = as_double((bits & 0x000fffffffffffffu) + 0x3fe6a09e00000000u) - 1.0;
    const double s = f / (f + 2.0);
    const double z = s * s, w = z * z;
    const double t1 = w * (0x1.999999997fa04p-2 + w * (0x1.c71c51d8e78afp-3 + w * 0x1.39a09d078c69fp-3));
    const double t2 = z * (0x1.5555555555593p-1 + w * (0x1.2492494229359p-2 +
                      w * (0x1.7466496cb03dep-3 + w * 0x1.2f112df3e5244p-3)));
    const double half = f * f * 0.5;
    return k * 0x1.62e42feep-1 - ((half - (s * (half + (t1 + t2)) + k * 0x1.a39ef35793c76p-33)) - f);
}

static inline double log_of(double x)
{
    const double small = choose(x < 0x1p-1022, 1.0, 0.0); /* subnormal, zero or negative */
    double result = log_of_normal(x * (small * 0x1p54 + (1.0 - small)), small * -54.0);
    result = choose(x == as_double(INFINITE), x, result);
    result = choose(x == 0.0, -as_double(INFINITE), result);
    return choose(x >= 0.0, result, as_double(NOT_A_NUMBER));
}

static inline double exp_of(double x)
{
    double y = choose(x > -746.0, x, -746.0); /* also in place of NaN */
    y = choose(y < 710.0, y, 710.0);
    const double k = (y * 0x1.71547652b82fep0 + ROUNDER) - ROUNDER;
    const double high = y - k * 0x1.62e42feep-1, low = k * 0x1.a39ef35793c76p-33;
    const double r = high - low, t = r * r;
    const double c = r - t * (0x1.555555555553ep-3 + t * (-0x1.6c16c16bebd93p-9 +
                     t * (0x1.1566aaf25de2cp-14 + t * (-0x1.bbd41c5d26bf1p-20 + t * 0x1.6376972bea4d0p-25))));
    const double e = 1.0 - ((low - (r * c) / (2.0 - c)) - high);
    /* Times 2^k in two steps: each factor is a normal number, 2^k need not be. */
    const double half = (k * 0.5 + ROUNDER) - ROUNDER;
    const double first = as_double(as_bits(half + (TWO52 + 1023.0)) << 52);
    const double second = as_double(as_bits((k - half) + (TWO52 + 1023.0)) << 52);
    const double result = e * first * second;
    return choose(x == x, result, as_double(NOT_A_NUMBER));
}

EXPORT void exact_log(const double *x, double *out, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = log_of(x[i]);
}

EXPORT void exact_exp(const double *x, double *out, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = exp_of(x[i]);
}

/* Adds the second half to the first until one number is left. scratch: (count + 1) / 2. */
EXPORT double exact_sum(const double *x, double *scratch, int64_t count)
{
    if (count < 2)
        return count ? x[0] : 0.0;
    int64_t half = (count + 1) / 2;
    for (int64_t i = 0; i < count - half; i++)
        scratch[i] = x[i] + x[half + i];
    if (count & 1)
        scratch[half - 1] = x[half - 1];
    for (count = half; count > 1; count = half) {
        half = (count + 1) / 2;
        for (int64_t i = 0; i < count - half; i++)
            scratch[i] += scratch[half + i];
    }
    return scratch[0];
}

/* exp of scores - highest, and its sum. */
EXPORT double exact_weights(const double *scores, double highest, double *out, double *scratch,
                            int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        out[i] = exp_of(scores[i] - highest);
    return exact_sum(out, scratch, count);
}

/* --- noise ------------------------------------------------------------------------------------ */

#define GOLDEN 0x9e3779b97f4a7c15u

/* 53 random bits of the element whose counter is token_id * GOLDEN: SplitMix64. */
static inline uint64_t bits_of(uint64_t key)
{
    key ^= key >> 30;
    key *= 0xbf58476d1ce4e5b9u;
    key ^= key >> 27;
    key *= 0x94d049bb133111ebu;
    key ^= key >> 31;
    return key >> 11;
}

static inline double gumbel_of(uint64_t bits)
{
    /* To double in two halves: not every processor converts 64-bit integers in vectors. */
    const double high = as_double((bits >> 32) | 0x4530000000000000u) - (0x1p84 + 0x1p52);
    double u = high + as_double((bits & 0xffffffffu) | BITS52);
    u = (u + 0.5) * 0x1p-53;
    u = choose(u < 1.0, u, 0x1.fffffffffffffp-1); /* the last half rounds up to 1 */
    return -log_of_normal(-log_of_normal(u, 0.0), 0.0);
}

/* A loop for integers and one for doubles: NEON has no products of 64-bit integers. */

EXPORT void gumbel(uint64_t stream, int64_t count, double *out)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        uint64_t bits[BLOCK];
        const int64_t size = count - start < BLOCK ? count - start : BLOCK;
        for (int64_t i = 0; i < BLOCK; i++)
            bits[i] = bits_of(stream + (uint64_t)(start + i) * GOLDEN);
        for (int64_t i = 0; i < size; i++)
            out[start + i] = gumbel_of(bits[i]);
    }
}

EXPORT void gumbel_at(uint64_t stream, const int64_t *token_ids, int64_t count, double *out)
{
    for (int64_t start = 0; start < count; start += BLOCK) {
        uint64_t bits[BLOCK];
        const int64_t size = count - start < BLOCK ? count - start : BLOCK;
        for (int64_t i = 0; i < size; i++)
            bits[i] = bits_of(stream + (uint64_t)token_ids[start + i] * GOLDEN);
        for (int64_t i = 0; i < size; i++)
            out[start + i] = gumbel_of(bits[i]);
    }
}

/* --- the best token --------------------------------------------------------------------------- */

/* The highest number, -inf if there is none but NaN; *has_nan: whether there is a NaN. */
static inline double highest_of(const double x[BLOCK], int *has_nan)
{
    double highest[LANES], nan[LANES];
    for (int j = 0; j < LANES; j++) {
        highest[j] = -as_double(INFINITE);
        nan[j] = 0.0;
    }
    for (int64_t i = 0; i < BLOCK; i += LANES)
        for (int j = 0; j < LANES; j++) {
            highest[j] = choose(x[i + j] > highest[j], x[i + j], highest[j]);
            nan[j] = choose(x[i + j] == x[i + j], nan[j], 1.0);
        }
    for (int j = 1; j < LANES; j++) {
        highest[0] = choose(highest[j] > highest[0], highest[j], highest[0]);
        nan[0] += nan[j];
    }
    *has_nan = nan[0] != 0.0;
    return highest[0];
}

typedef struct {
    double value;
    int64_t index;
} best_t;

/* Looks at BLOCK scores from token `start` on. Returns whether to stop: as in NumPy, the first NaN is the
   highest. */
static inline int add_noise_and_compare(best_t *best, double score[BLOCK], int64_t start,
                                        uint64_t stream)
{
    uint64_t bits[BLOCK], most[LANES] = {0};
    for (int64_t i = 0; i < BLOCK; i += LANES)
        for (int j = 0; j < LANES; j++) {
            bits[i + j] = bits_of(stream + (uint64_t)(start + i + j) * GOLDEN);
            most[j] = bits[i + j] > most[j] ? bits[i + j] : most[j];
        }
    for (int j = 1; j < LANES; j++)
        most[0] = most[j] > most[0] ? most[j] : most[0];
    int has_nan;
    double highest = highest_of(score, &has_nan);
    /* In most blocks even the highest score with the strongest noise would not win. Noise grows with
       the bits, but for rounding, which is far below 1e-9. */
    if (!has_nan && highest + (gumbel_of(most[0]) + 1e-9) <= best->value)
        return 0;
    for (int64_t i = 0; i < BLOCK; i++)
        score[i] += gumbel_of(bits[i]);
    highest = highest_of(score, &has_nan);
    if (!has_nan && !(highest > best->value))
        return 0;
    int64_t i = 0;
    while (has_nan ? score[i] == score[i] : score[i] != highest)
        i++;
    *best = (best_t){highest, start + i};
    return has_nan;
}

/* argmax of logits / temperature + noise; of equal ones the lowest index. */
EXPORT int64_t sample_logits(const float *logits, int64_t count, double temperature, uint64_t stream)
{
    best_t best = {-as_double(INFINITE), 0};
    for (int64_t start = 0; start < count; start += BLOCK) {
        double score[BLOCK];
        const int64_t size = count - start < BLOCK ? count - start : BLOCK;
        for (int64_t i = 0; i < size; i++)
            score[i] = (double)logits[start + i] / temperature;
        for (int64_t i = size; i < BLOCK; i++)
            score[i] = -as_double(INFINITE);
        if (add_noise_and_compare(&best, score, start, stream))
            break;
    }
    return best.index;
}

/* argmax of scores + noise. */
EXPORT int64_t sample_scores(const double *scores, int64_t count, uint64_t stream)
{
    best_t best = {-as_double(INFINITE), 0};
    for (int64_t start = 0; start < count; start += BLOCK) {
        double score[BLOCK];
        const int64_t size = count - start < BLOCK ? count - start : BLOCK;
        for (int64_t i = 0; i < size; i++)
            score[i] = scores[start + i];
        for (int64_t i = size; i < BLOCK; i++)
            score[i] = -as_double(INFINITE);
        if (add_noise_and_compare(&best, score, start, stream))
            break;
    }
    return best.index;
}
