/* Products with matrix tiles (AMX); part of matmul.c.
 *
 * One instruction takes 16 rows, 16 outputs and 32 steps of k, so a few rows cost hardly more than one. It
 * multiplies bfloat16 only. A float32 input is the exact sum of three bfloat16 numbers; if the weights are
 * bfloat16 numbers, too, every product is exact. Sums are float32. */

#define TILE_SPAN 64  /* rows that one thread takes */
#define TILE_PANELS 4 /* that a block of tiles takes */
#define TILE_STEPS 32 /* k is padded to a multiple of this in weights for tiles */

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__linux__)
#define HAS_TILES 1
#include <sys/syscall.h>
#include <unistd.h>
#else
#define HAS_TILES 0
#endif

/* Asks the system to let this process use tiles; whether it does. */
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

#ifndef TILE_LOAD /* a test brings its own */
/* The compilers' own functions do not say that they touch memory. */
#define TILE_LOAD(tile, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((long)(stride)) : "memory")
#define TILE_STORE(tile, to, stride) \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((long)(stride)) : "memory")
#define TILE_SHAPES(shapes) __asm__ volatile("ldtilecfg %0" ::"m"(shapes))
#endif

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
    TILE_SHAPES(shapes);
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
 * x: [pieces][...][inputs], each piece `piece` numbers after the one before; width: of a row of sums. */
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

/* A row of inputs as bfloat16 numbers that add up to it, each piece `piece` numbers after the one before;
 * zeros after k. */
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

static void pieces_bf16(const uint16_t *x, uint16_t *out, int k, int inputs)
{
    memcpy(out, x, k * sizeof *x); /* one is enough */
    memset(out + k, 0, (inputs - k) * sizeof *x);
}

#define BLOCK(n)                                                                                  \
    if (t->narrow)                                                                                \
        tile_block(in, piece, 1, w, to, width, inputs, n);                                        \
    else                                                                                          \
        tile_block(in, piece, 3, w, to, width, inputs, n);                                        \
    break

/* A product with tiles. pieces: [num_pieces][rows][inputs], of x; to be filled unless they are x itself. */
struct product_of_tiles {
    const void *x;
    uint16_t *memory;
    const uint16_t *pieces;
    const uint32_t *weight;
    int rows, k, inputs;
    const struct target *target;
};

/* A thread's share of it. */
NOINLINE void multiply_tiles(const struct product_of_tiles *m)
{
    _Alignas(64) float sums[TILE_ROWS * GROUP * WIDTH];
    const struct target *t = m->target;
    const int rows = m->rows, k = m->k, inputs = m->inputs;
    const int all = (int)(t->outputs + WIDTH - 1) / WIDTH;
    const int groups = (all + TILE_PANELS - 1) / TILE_PANELS;
    const size_t panel = (size_t)inputs * (WIDTH / 2), piece = (size_t)rows * inputs;
    const int count = rows < TILE_ROWS ? rows : TILE_ROWS;
    const int spans = rows < TILE_SPAN ? 1 : rows / TILE_SPAN; /* the last one takes what is left over */
    configure_tiles(count);
    if (m->memory) {
#pragma omp for schedule(static)
        for (int r = 0; r < rows; r++) {
            uint16_t *to = m->memory + (size_t)r * inputs;
            if (t->narrow)
                pieces_bf16((const uint16_t *)m->x + (size_t)r * k, to, k, inputs);
            else
                pieces_f32((const float *)m->x + (size_t)r * k, to, piece, k, inputs);
        }
    }
#pragma omp for schedule(static)
    for (int item = 0; item < groups * spans; item++) {
        const int span = item / groups, p = item % groups * TILE_PANELS, first = p * WIDTH;
        const int end = span + 1 < spans ? (span + 1) * TILE_SPAN : rows;
        const int panels = all - p < TILE_PANELS ? all - p : TILE_PANELS;
        const int straight = !t->narrow && !t->bias && first + panels * WIDTH <= (int)t->outputs;
        const uint32_t *w = m->weight + p * panel;
        for (int block = span * TILE_SPAN; block < end; block += TILE_ROWS) {
            /* The last block repeats rows of the one before: tiles keep their shape. */
            const int r = block + TILE_ROWS <= rows ? block : rows - count;
            const uint16_t *in = m->pieces + (size_t)r * inputs;
            float *to = straight ? (float *)t->out + r * t->outputs + first : sums;
            const size_t width = straight ? t->outputs : GROUP * WIDTH;
            switch (panels) {
            case 1: BLOCK(1);
            case 2: BLOCK(2);
            case 3: BLOCK(3);
            default: BLOCK(4);
            }
            if (!straight)
                put_group(t, r, first, sums, count, panels);
        }
    }
    _tile_release();
}

/* The product. Returns non-zero if memory runs out. */
static int tiled(const void *x, const uint32_t *weight, int rows, int k, int threads, int share,
                 const struct target *t)
{
    const int inputs = (k + TILE_STEPS - 1) / TILE_STEPS * TILE_STEPS, num_pieces = t->narrow ? 1 : 3;
    uint16_t *memory = NULL;
    if (num_pieces > 1 || inputs != k) {
        const size_t bytes = (size_t)num_pieces * rows * inputs * sizeof *memory;
        memory = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
        if (!memory)
            return 1;
    }
    const struct product_of_tiles product = {x, memory, memory ? memory : x, weight, rows, k, inputs, t};
    ON_THREADS(threads, share, multiply_tiles(&product));
    free(memory);
    return 0;
}

#undef BLOCK

#define BYTE_STEPS 64 /* of k in one tile */

/* As configure_tiles; 6 and 7 are the weights and inputs that remain if k is no multiple of 64. */
static void byte_tiles_begin(int rows, int inputs)
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
    TILE_SHAPES(shapes);
}

static void byte_tiles_end(void)
{
    _tile_release();
}

#define PANEL(tile, weights, in)                                                                  \
    if (panels > tile) {                                                                          \
        const char *w = panel + tile * bytes + sizeof(struct byte_panel) + (size_t)k * WIDTH;     \
        TILE_LOAD(weights, w, 64);                                                                \
        _tile_dpbusd(tile, in, weights);                                                          \
    }

/* As byte_rows, for the rows that the tiles are configured for. */
static void byte_tiles(const void *x, int inputs, const char *panel, size_t bytes, const float *scales,
                       const struct target *t, int row, int first, int rows, int panels)
{
    int32_t sums[TILE_ROWS * GROUP * WIDTH];
    const uint8_t *in = x;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    int k = 0;
    for (; k + BYTE_STEPS <= inputs; k += BYTE_STEPS) {
        TILE_LOAD(5, in + k, inputs);
        PANEL(0, 4, 5)
        PANEL(1, 4, 5)
        PANEL(2, 4, 5)
        PANEL(3, 4, 5)
    }
    if (k < inputs) {
        TILE_LOAD(7, in + k, inputs);
        PANEL(0, 6, 7)
        PANEL(1, 6, 7)
        PANEL(2, 6, 7)
        PANEL(3, 6, 7)
    }
    const size_t stride = GROUP * WIDTH * sizeof *sums;
    TILE_STORE(0, sums, stride);
    if (panels > 1)
        TILE_STORE(1, sums + WIDTH, stride);
    if (panels > 2)
        TILE_STORE(2, sums + 2 * WIDTH, stride);
    if (panels > 3)
        TILE_STORE(3, sums + 3 * WIDTH, stride);
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            put_bytes(t, row + r, first + p * WIDTH, sums + (r * GROUP + p) * WIDTH, scales[r],
                      (const struct byte_panel *)(panel + p * bytes), 1);
}

#undef PANEL

#else /* never called: packing.py packs weights for tiles only if allow_tiles() */

static int tiled(const void *x, const uint32_t *weight, int rows, int k, int threads, int share,
                 const struct target *t)
{
    (void)x, (void)weight, (void)rows, (void)k, (void)threads, (void)share, (void)t;
    return 1;
}

static void byte_tiles_begin(int rows, int inputs)
{
    (void)rows, (void)inputs;
}

static void byte_tiles_end(void)
{
}

static void byte_tiles(const void *x, int inputs, const char *panel, size_t bytes, const float *scales,
                       const struct target *t, int row, int first, int rows, int panels)
{
    (void)x, (void)inputs, (void)panel, (void)bytes, (void)scales, (void)t, (void)row, (void)first;
    (void)rows, (void)panels;
}

#endif
