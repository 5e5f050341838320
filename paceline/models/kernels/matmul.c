/* Matrix products whose rows do not know of each other, for CPU.
 *
 * out[r][o] = sum over k of x[r][k] * weight[o][k], every sum taken in the order of k by one chain
 * of fused multiply-adds, however many rows, outputs or threads there are. Libraries promise no
 * such thing: they pick algorithms by the number of rows. Compiled without -ffast-math, so that
 * the compiler may not reorder the sums either.
 *
 * Weights are packed in panels of 16 outputs: [panels][k][16] for float32, [panels][k / 2][16][2]
 * for bfloat16 (two neighbouring k in 32 bits, as the dot-product instructions want them).
 *
 * Where the processor has matrix tiles (AMX), one instruction takes 16 rows, 16 outputs and 32 steps
 * of k, and few rows cost hardly more than one. It multiplies bfloat16 only. Float32 inputs go
 * through it as the sum of three bfloat16 numbers, which is exact, if the weights are bfloat16
 * numbers themselves, as those of a checkpoint in bfloat16 are: every product is exact, sums are
 * float32, and half as many bytes of weights are read.
 *
 * Weights may also be int8, each output with a scale, for models whose results need not be exact, as
 * drafts: inputs are then rounded to eight bits, row by row. */

#include <stdlib.h>
#include <string.h>

#include "common.h"
#if defined(__AVX512BF16__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_TILES 0
#endif
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define HAS_BYTES 1
#else
#define HAS_BYTES 0
#endif
#if HAS_TILES && HAS_BYTES && defined(__AMX_INT8__)
#define HAS_BYTE_TILES 1
#else
#define HAS_BYTE_TILES 0
#endif
#if HAS_TILES && HAS_BYTES && defined(__AMX_INT8__)
#define HAS_BYTE_TILES 1
#else
#define HAS_BYTE_TILES 0
#endif

#define MAX_ROWS 6 /* rows and panels of a block: their accumulators fill the vector registers */
#define MAX_PANELS 4
/* Steps of k that all rows take before the next ones: four panels of them and of the chunk that is
 * fetched meanwhile stay in a core's own cache. Sums wait in memory between two chunks, which
 * changes no bit of them. */
#define CHUNK 512
#define SPAN 96 /* rows whose sums wait at the same time */

/* One step of k for float32, one pair of k for bfloat16. */
ALWAYS_INLINE vec step_f32(vec acc, vec w, float x)
{
    return acc + w * x;
}

ALWAYS_INLINE vec step_bf16(vec acc, vec_bits w, uint32_t pair)
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

enum packing { PLAIN, TILES, BYTES, TILE_BYTES }; /* of weights; as in ops.py */

/* Sharing pays from here on: multiplications for the meeting of threads that are awake (whether they are
 * is ops.py's choice), or weights that one core's cache does not keep until the next forward. */
static const double SHARED_WORK[] = {[PLAIN] = 1e6, [TILES] = 2e6, [BYTES] = 2e6, [TILE_BYTES] = 2e6};
#define SHARED_BYTES 1.5e6

/* ROWS(n), or PANELS(n), with a number that the compiler knows. */
#define BY_ROWS(rows)                                                                             \
    switch (rows) {                                                                               \
    case 1: ROWS(1); break;                                                                       \
    case 2: ROWS(2); break;                                                                       \
    case 3: ROWS(3); break;                                                                       \
    case 4: ROWS(4); break;                                                                       \
    case 5: ROWS(5); break;                                                                       \
    default: ROWS(6);                                                                             \
    }
#define BY_PANELS(panels)                                                                         \
    switch (panels) {                                                                             \
    case 1: PANELS(1); break;                                                                     \
    case 2: PANELS(2); break;                                                                     \
    case 3: PANELS(3); break;                                                                     \
    default: PANELS(4);                                                                           \
    }

#define TILE_ROWS 16
#define TILE_SPAN 64 /* rows that one thread takes */
#define TILE_STEPS 32 /* k is padded to a multiple of this in weights for tiles */

/* Whether the processor has tiles and the system lets this process use them, which it does only for
 * those that ask. */
EXPORT int allow_tiles(void)
{
#if HAS_TILES
    const int request_permission = 0x1023, tile_data = 18;
    return syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
#else
    return 0;
#endif
}

#if HAS_TILES

/* The compilers' own functions for these do not say that they touch memory. */
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((long)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((long)(stride)) : "memory")

struct tile_shapes {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16];
    uint8_t rows[16];
};

/* For this thread: tiles 0 to 3 are sums of up to four panels, 4 weights, 5 to 7 inputs. */
static void configure_tiles(int rows)
{
    struct tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.bytes[i] = 64;
        shapes.rows[i] = (uint8_t)(i == 4 ? TILE_ROWS : rows);
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

#define PANEL(tile)                                                                               \
    if (panels > tile) {                                                                          \
        const uint32_t *w = weight + tile * panel + (size_t)k * (WIDTH / 2);                      \
        TILE_LOAD(4, w, 64);                                                                      \
        _tile_dpbf16ps(tile, 5, 4);                                                               \
        if (pieces == 3) {                                                                        \
            _tile_dpbf16ps(tile, 6, 4);                                                           \
            _tile_dpbf16ps(tile, 7, 4);                                                           \
        }                                                                                         \
    }

/* A block of at most TILE_ROWS rows and up to four panels.
 * x: [pieces][...][inputs], a piece `piece` numbers behind the one before; width: of a row of sums. */
ALWAYS_INLINE void tile_block(const uint16_t *x, size_t piece, const int pieces,
                              const uint32_t *weight, float *sums, size_t width, int inputs,
                              const int panels)
{
    const size_t panel = (size_t)inputs * (WIDTH / 2), stride = (size_t)inputs * sizeof *x;
    _tile_zero(0);
    if (panels > 1)
        _tile_zero(1);
    if (panels > 2)
        _tile_zero(2);
    if (panels > 3)
        _tile_zero(3);
    for (int k = 0; k < inputs; k += TILE_STEPS) {
        TILE_LOAD(5, x + k, stride);
        if (pieces == 3) {
            TILE_LOAD(6, x + piece + k, stride);
            TILE_LOAD(7, x + 2 * piece + k, stride);
        }
        PANEL(0)
        PANEL(1)
        PANEL(2)
        PANEL(3)
    }
    TILE_STORE(0, sums, width * sizeof *sums);
    if (panels > 1)
        TILE_STORE(1, sums + WIDTH, width * sizeof *sums);
    if (panels > 2)
        TILE_STORE(2, sums + 2 * WIDTH, width * sizeof *sums);
    if (panels > 3)
        TILE_STORE(3, sums + 3 * WIDTH, width * sizeof *sums);
}

#undef PANEL

/* A row of inputs as bfloat16 numbers that add up to it, a piece `piece` numbers behind the one before;
 * zeros behind k. */
static void pieces_f32(const float *x, uint16_t *out, size_t piece, int k, int inputs)
{
    for (int i = 0; i < inputs; i += WIDTH) {
        const int left = k - i < 0 ? 0 : k - i < WIDTH ? k - i : WIDTH;
        __m512 rest = _mm512_maskz_loadu_ps((__mmask16)((1u << left) - 1), x + i);
        for (int p = 0; p < 3; p++) {
            const __m256i half = (__m256i)_mm512_cvtneps_pbh(rest);
            _mm256_storeu_si256((__m256i *)(out + p * piece + i), half);
            rest -= (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
        }
    }
}

static void pieces_bf16(const uint16_t *x, uint16_t *out, size_t piece, int k, int inputs)
{
    (void)piece; /* one is enough */
    memcpy(out, x, k * sizeof *x);
    memset(out + k, 0, (inputs - k) * sizeof *x);
}

#endif

/* Whether linear takes int8 weights. */
EXPORT int takes_bytes(void)
{
    return HAS_BYTES;
}

#if HAS_BYTES

/* 16 outputs with int8 weights, [k / 4][16][4] behind the header, k padded: also as tiles want them. */
struct byte_panel {
    float scale[WIDTH];  /* of an output's weights */
    int32_t shift[WIDTH]; /* 128 * their sum: inputs are shifted by 128, since they have no sign */
    int8_t weights[];
};

ALWAYS_INLINE __m512 load_f32(const float *x, int count)
{
    return _mm512_maskz_loadu_ps((__mmask16)((1u << count) - 1), x);
}

ALWAYS_INLINE __m512 load_bf16(const uint16_t *x, int count)
{
    const __m256i half = _mm256_maskz_loadu_epi16((__mmask16)((1u << count) - 1), x);
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
}

#if HAS_BYTE_TILES

#define BYTE_STEPS 64 /* of k in one tile */

/* As configure_tiles; 6 and 7 are the weights and inputs that are left when k is no multiple of 64. */
static void configure_byte_tiles(int rows, int inputs)
{
    const int rest = inputs % BYTE_STEPS ? inputs % BYTE_STEPS : BYTE_STEPS;
    struct tile_shapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.bytes[i] = 64;
        shapes.rows[i] = (uint8_t)rows;
    }
    shapes.rows[4] = BYTE_STEPS / 4;
    shapes.rows[6] = (uint8_t)(rest / 4);
    shapes.bytes[7] = (uint16_t)rest;
    __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
}

#define PANEL(tile, weights, in)                                                                  \
    if (panels > tile) {                                                                          \
        const char *w = panel + tile * bytes + sizeof(struct byte_panel) + (size_t)k * WIDTH;     \
        TILE_LOAD(weights, w, 64);                                                                \
        _tile_dpbusd(tile, in, weights);                                                          \
    }

/* As byte_block, for the rows that the tiles are configured for. */
ALWAYS_INLINE void byte_tile_block(const uint8_t *x, int inputs, const char *panel, size_t bytes,
                                   __m512i *sums, const int panels)
{
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int k = 0;
    for (; k + BYTE_STEPS <= inputs; k += BYTE_STEPS) {
        TILE_LOAD(5, x + k, inputs);
        PANEL(0, 4, 5)
        PANEL(1, 4, 5)
        PANEL(2, 4, 5)
        PANEL(3, 4, 5)
    }
    if (k < inputs) {
        TILE_LOAD(7, x + k, inputs);
        PANEL(0, 6, 7)
        PANEL(1, 6, 7)
        PANEL(2, 6, 7)
        PANEL(3, 6, 7)
    }
    TILE_STORE(0, sums, panels * sizeof *sums);
    if (panels > 1)
        TILE_STORE(1, sums + 1, panels * sizeof *sums);
    if (panels > 2)
        TILE_STORE(2, sums + 2, panels * sizeof *sums);
    if (panels > 3)
        TILE_STORE(3, sums + 3, panels * sizeof *sums);
}

#undef PANEL

#endif

/* Sums of a block of rows and panels, [rows][panels]. */
ALWAYS_INLINE void byte_block(const uint8_t *x, int inputs, const char *panel, size_t bytes,
                              __m512i *sums, const int rows, const int panels)
{
    __m512i acc[MAX_ROWS][MAX_PANELS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            acc[r][p] = _mm512_setzero_si512();
    for (int k = 0; k < inputs; k += 4) {
        __m512i w[MAX_PANELS];
        for (int p = 0; p < panels; p++)
            w[p] = _mm512_loadu_si512(((const struct byte_panel *)(panel + p * bytes))->weights +
                                      (size_t)k * WIDTH);
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, x + (size_t)r * inputs + k, sizeof four);
            for (int p = 0; p < panels; p++)
                acc[r][p] = _mm512_dpbusd_epi32(acc[r][p], _mm512_set1_epi32(four), w[p]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            sums[r * panels + p] = acc[r][p];
}

#define ROWS(n) byte_block(x, inputs, panel, bytes, sums, n, panels)

ALWAYS_INLINE void byte_rows(const uint8_t *x, int inputs, const char *panel, size_t bytes,
                             __m512i *sums, int rows, const int panels)
{
    BY_ROWS(rows)
}

#undef ROWS

#endif

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

#define ELEM float
#define PIECES 3 /* bfloat16 numbers that make one */
#define WORD float
#define LOADED vec
#define LOAD(x) (x)
#define STORE(f) (f)
#define VSTORE(p, v) (*(vec *)(p) = (v))
#define STEP step_f32
#define NAME(f) JOIN(f, f32)
#include "matmul_impl.h"
#undef ELEM
#undef PIECES
#undef WORD
#undef LOADED
#undef LOAD
#undef STORE
#undef VSTORE
#undef STEP
#undef NAME

#define ELEM uint16_t
#define PIECES 1 /* bfloat16 numbers that make one */
#define WORD uint32_t
#define LOADED vec_bits
#define LOAD(x) bf16_load(x)
#define STORE(f) bf16_store(f)
#define VSTORE(p, v) bf16_store_each(p, v)
#define STEP step_bf16
#define NAME(f) JOIN(f, bf16)
#include "matmul_impl.h"
