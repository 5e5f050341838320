/* Products with int8 weights, for models whose results need not be exact; part of matmul.c.
 *
 * Inputs are rounded to eight bits, row by row. Sums are integers, so every variant computes the same
 * numbers: with VNNI four products at once, elsewhere pairs of 16-bit integers. Those cannot overflow;
 * maddubs could, which adds 255 * 127 * 2 in 16 bits. */

/* 16 outputs: after the header [k / 4][16][4], k padded, which is also the layout for tiles. */
struct byte_panel {
    float scale[WIDTH];   /* of an output's weights */
    int32_t shift[WIDTH]; /* 128 * their sum: what the shift of inputs by 128, to unsigned ones, adds */
    int8_t weights[];
};

/* For each instruction set: the type of inputs and what is added to them; the SUMS of a panel, each a native
 * vector of int32; the panels and rows whose sums the registers hold. step adds four k of 16 outputs, finish
 * turns them into 16 sums. */
#if W == 16 && defined(__AVX512VNNI__)
typedef uint8_t byte_in;
#define BYTE_SHIFT 128
#define SUMS 1
#define BYTE_ROWS 6
#define BYTE_PANELS(rows) ((rows) <= 3 ? 8 : 4)

ALWAYS_INLINE void byte_step(nat_int *sums, const int8_t *w, const byte_in *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    sums[0] = (nat_int)_mm512_dpbusd_epi32((__m512i)sums[0], _mm512_set1_epi32(four),
                                           _mm512_loadu_si512(w));
}

ALWAYS_INLINE void byte_finish(const nat_int *sums, int32_t *out)
{
    memcpy(out, sums, 64);
}

#elif W == 16
typedef int16_t byte_in;
#define BYTE_SHIFT 0
#define SUMS 2
#define BYTE_ROWS 6
#define BYTE_PANELS(rows) ((rows) == 1 ? 1 : 2)

ALWAYS_INLINE void byte_step(nat_int *sums, const int8_t *w, const byte_in *x)
{
    int64_t four;
    memcpy(&four, x, sizeof four);
    UNROLL for (int i = 0; i < 2; i++)
    {
        const __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(w + 32 * i)));
        sums[i] += (nat_int)_mm512_madd_epi16(wide, _mm512_set1_epi64(four));
    }
}

ALWAYS_INLINE void byte_finish(const nat_int *sums, int32_t *out)
{
    const nat_int even = SHUFFLE(sums[0], sums[1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const nat_int odd = SHUFFLE(sums[0], sums[1], 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    const nat_int all = even + odd;
    memcpy(out, &all, 64);
}

#elif W == 8 && defined(__AVXVNNI__)
typedef uint8_t byte_in;
#define BYTE_SHIFT 128
#define SUMS 2
#define BYTE_ROWS 6
#define BYTE_PANELS(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)

ALWAYS_INLINE void byte_step(nat_int *sums, const int8_t *w, const byte_in *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    UNROLL for (int i = 0; i < 2; i++)
        sums[i] = (nat_int)_mm256_dpbusd_avx_epi32((__m256i)sums[i], _mm256_set1_epi32(four),
                                                   _mm256_loadu_si256((const __m256i *)(w + 32 * i)));
}

ALWAYS_INLINE void byte_finish(const nat_int *sums, int32_t *out)
{
    memcpy(out, sums, 64);
}

#elif W == 8
typedef int16_t byte_in;
#define BYTE_SHIFT 0
#define SUMS 4
#define BYTE_ROWS 3
#define BYTE_PANELS(rows) 1

ALWAYS_INLINE void byte_step(nat_int *sums, const int8_t *w, const byte_in *x)
{
    int64_t four;
    memcpy(&four, x, sizeof four);
    UNROLL for (int i = 0; i < 4; i++)
    {
        const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(w + 16 * i)));
        sums[i] += (nat_int)_mm256_madd_epi16(wide, _mm256_set1_epi64x(four));
    }
}

ALWAYS_INLINE void byte_finish(const nat_int *sums, int32_t *out)
{
    for (int i = 0; i < 2; i++) {
        const nat_int all = SHUFFLE(sums[2 * i], sums[2 * i + 1], 0, 2, 4, 6, 8, 10, 12, 14) +
                            SHUFFLE(sums[2 * i], sums[2 * i + 1], 1, 3, 5, 7, 9, 11, 13, 15);
        memcpy(out + 8 * i, &all, 32);
    }
}

#elif defined(__aarch64__)
typedef int8_t byte_in;
#define BYTE_SHIFT 0
#if defined(__ARM_FEATURE_DOTPROD)
#define SUMS 4
#define BYTE_ROWS 6
#define BYTE_PANELS(rows) ((rows) <= 2 ? 2 : 1)
#else
#define SUMS 8
#define BYTE_ROWS 2
#define BYTE_PANELS(rows) 1
#endif

ALWAYS_INLINE void byte_step(nat_int *sums, const int8_t *w, const byte_in *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    const int8x16_t in = vreinterpretq_s8_s32(vdupq_n_s32(four));
    UNROLL for (int i = 0; i < 4; i++)
    {
        const int8x16_t weights = vld1q_s8(w + 16 * i);
#if defined(__ARM_FEATURE_DOTPROD)
        sums[i] = (nat_int)vdotq_s32((int32x4_t)sums[i], weights, in);
#else
        const int16x8_t low = vmull_s8(vget_low_s8(weights), vget_low_s8(in));
        const int16x8_t high = vmull_s8(vget_high_s8(weights), vget_low_s8(in));
        sums[2 * i] = (nat_int)vpadalq_s16((int32x4_t)sums[2 * i], low);
        sums[2 * i + 1] = (nat_int)vpadalq_s16((int32x4_t)sums[2 * i + 1], high);
#endif
    }
}

ALWAYS_INLINE void byte_finish(const nat_int *sums, int32_t *out)
{
    for (int i = 0; i < 4; i++) {
#if defined(__ARM_FEATURE_DOTPROD)
        const nat_int all = sums[i];
#else
        const nat_int all = (nat_int)vpaddq_s32((int32x4_t)sums[2 * i], (int32x4_t)sums[2 * i + 1]);
#endif
        memcpy(out + 4 * i, &all, 16);
    }
}

#else /* one number after the other */
typedef int8_t byte_in;
#define BYTE_SHIFT 0
#define SUMS 4
#define BYTE_ROWS 1
#define BYTE_PANELS(rows) 1

ALWAYS_INLINE void byte_step(nat_int *sums, const int8_t *w, const byte_in *x)
{
    int32_t *all = (int32_t *)sums;
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < 4; j++)
            all[i] += w[4 * i + j] * x[j];
}

ALWAYS_INLINE void byte_finish(const nat_int *sums, int32_t *out)
{
    memcpy(out, sums, 64);
}

#endif

/* Small integers as inputs. */
ALWAYS_INLINE void shorten(byte_in *out, nat_int whole)
{
#if W == 16 && BYTE_SHIFT
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8((__m512i)whole));
#elif W == 16
    _mm256_storeu_si256((__m256i *)out, _mm512_cvtepi32_epi16((__m512i)whole));
#elif W == 8 && BYTE_SHIFT
    const __m256i pairs = _mm256_packus_epi32((__m256i)whole, (__m256i)whole);
    const __m256i lanes = _mm256_packus_epi16(pairs, pairs);
    const __m256i all = _mm256_permutevar8x32_epi32(lanes, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
    _mm_storel_epi64((__m128i *)out, _mm256_castsi256_si128(all));
#elif W == 8
    const __m256i pairs = _mm256_packs_epi32((__m256i)whole, (__m256i)whole);
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(_mm256_permute4x64_epi64(pairs, 0x08)));
#else
    for (int i = 0; i < W; i++)
        out[i] = (byte_in)whole[i];
#endif
}

/* A row as integers times a scale of its own; zeros after k. */
static void to_bytes(const void *x, size_t at, byte_in *out, float *scale, int k, int inputs, int narrow)
{
    vec top = set_(0.0f);
    for (int i = 0; i < k; i += WIDTH) {
        const vec v = read_(x, at + i, k - i, narrow);
        top = max_(top, max_(v, sub_(set_(0.0f), v)));
    }
    *scale = largest(top) / 127.0f;
    const vec factor = set_(*scale > 0.0f ? 1.0f / *scale : 0.0f);
    for (int i = 0; i < inputs; i += WIDTH) {
        const vec v = mul_(read_(x, at + i, k - i, narrow), factor);
        const nat round = nat_set(12582912.0f); /* 1.5 * 2^23: to the nearest, ties to even */
        byte_in whole[WIDTH];
        UNROLL for (int n = 0; n < NATS; n++)
            shorten(whole + n * W,
                    __builtin_convertvector((v.n[n] + round) - round, nat_int) + BYTE_SHIFT);
        if (inputs - i >= WIDTH)
            memcpy(out + i, whole, sizeof whole);
        else
            memcpy(out + i, whole, (inputs - i) * sizeof *whole);
    }
}

/* A row's 16 results from their int32 sums. */
ALWAYS_INLINE vec scaled(const int32_t *sums, float scale, const struct byte_panel *panel, int shift)
{
    vec out;
    UNROLL for (int i = 0; i < NATS; i++)
    {
        nat_int whole, off;
        memcpy(&whole, sums + i * W, sizeof whole);
        memcpy(&off, panel->shift + i * W, sizeof off);
        if (shift)
            whole -= off;
        out.n[i] = __builtin_convertvector(whole, nat) * nat_load(panel->scale + i * W) * nat_set(scale);
    }
    return out;
}

ALWAYS_INLINE void put_bytes(const struct target *t, int row, int first, const int32_t *sums,
                             float scale, const struct byte_panel *panel, int shift)
{
    put(t, row, first, scaled(sums, scale, panel, shift));
}

/* Each of `turns` blocks fetches a share of what is ahead, spread over its own steps. */
ALWAYS_INLINE void byte_block(const byte_in *x, int inputs, const char *panel, size_t bytes,
                              const float *scales, const struct target *t, int row, int first,
                              struct ahead *ahead, int turn, int turns, const int rows, const int panels)
{
    nat_int acc[BYTE_ROWS][GROUP][SUMS];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            UNROLL for (int i = 0; i < SUMS; i++) acc[r][p][i] = (nat_int){0};
    const int8_t *w = ((const struct byte_panel *)panel)->weights;
    struct ahead next = *ahead; /* in registers */
    if (turn == 0) /* scales and shifts are two lines more */
        UNROLL for (int i = 0; i < 2; i++) fetch_ahead(&next, bytes, panels);
    for (int k = 0; k < inputs; k += 4) {
        if (turn-- == 0) {
            turn = turns - 1;
            fetch_ahead(&next, bytes, panels);
        }
        UNROLL for (int r = 0; r < rows; r++)
            UNROLL for (int p = 0; p < panels; p++)
                byte_step(acc[r][p], w + p * bytes + (size_t)k * WIDTH, x + (size_t)r * inputs + k);
    }
    *ahead = next;
    /* Without branches, and unrolled, the sums never leave their registers. */
    if (!t->bias && !t->narrow && first + panels * WIDTH <= (int)t->outputs) {
        UNROLL for (int p = 0; p < panels; p++)
        {
            const struct byte_panel *of = (const struct byte_panel *)(panel + p * bytes);
            float *out = (float *)t->out + row * t->outputs + first + p * WIDTH;
            UNROLL for (int r = 0; r < rows; r++)
            {
                int32_t sums[WIDTH];
                byte_finish(acc[r][p], sums);
                store_(out + r * t->outputs, scaled(sums, scales[r], of, BYTE_SHIFT));
            }
        }
        return;
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++) {
            int32_t sums[WIDTH];
            byte_finish(acc[r][p], sums);
            put_bytes(t, row + r, first + p * WIDTH, sums, scales[r],
                      (const struct byte_panel *)(panel + p * bytes), BYTE_SHIFT);
        }
}

#define BLOCK(rows, count)                                                                        \
    byte_block(x, inputs, panel + p * bytes, bytes, scales, t, row, first + p * WIDTH, ahead, turn,  \
               turns, rows, count)
#define CASE(rows)                                                                                \
    case rows:                                                                                    \
        for (; p + BYTE_PANELS(rows) <= panels; p += BYTE_PANELS(rows))                           \
            BLOCK(rows, BYTE_PANELS(rows));                                                       \
        if (BYTE_PANELS(rows) > 4 && p + 4 <= panels) {                                           \
            BLOCK(rows, 4);                                                                       \
            p += 4;                                                                               \
        }                                                                                         \
        if (BYTE_PANELS(rows) > 2 && p + 2 <= panels) {                                           \
            BLOCK(rows, 2);                                                                       \
            p += 2;                                                                               \
        }                                                                                         \
        if (BYTE_PANELS(rows) > 1 && p < panels)                                                  \
            BLOCK(rows, 1);                                                                       \
        break;

static void byte_rows(const byte_in *x, int inputs, const char *panel, size_t bytes,
                      const float *scales, const struct target *t, int row, int first, struct ahead *ahead,
                      int turn, int turns, int rows, int panels)
{
    int p = 0;
    switch (rows) {
        CASE(1)
#if BYTE_ROWS > 1
        CASE(2)
#endif
#if BYTE_ROWS > 2
        CASE(3)
#endif
#if BYTE_ROWS > 3
        CASE(4)
        CASE(5)
        CASE(6)
#endif
    }
}

#undef CASE
#undef BLOCK

/* tiles.h */
static void byte_tiles(const void *x, int inputs, const char *panel, size_t bytes, const float *scales,
                       const struct target *t, int row, int first, int rows, int panels);
static void byte_tiles_begin(int rows, int inputs);
static void byte_tiles_end(void);
#define TILE_ROWS 16

/* A product with int8 weights; tiles: whether its blocks of rows take tiles. */
struct product_of_bytes {
    const byte_in *in; /* [rows][inputs] */
    const float *scales;
    const char *weight;
    int rows, inputs, tiles, shares;
    const struct target *target;
};

/* A thread's share of it. */
NOINLINE void multiply_bytes(const struct product_of_bytes *m)
{
    const struct target *t = m->target;
    const int rows = m->rows, inputs = m->inputs, tiles = m->tiles;
    const int group = W == 8 ? GROUP : group_size(rows, 0);
    const int all = (int)(t->outputs + WIDTH - 1) / WIDTH;
    /* One row: with AVX-512 the processor reads ahead by itself, both one panel after the other, which is one
     * long stream, and all streams that are not short. Elsewhere one stream is not read fast enough. */
    const int itself = W == 16 && rows == 1 && (BYTE_PANELS(1) == 1 || inputs > 512);
    const int lines = itself ? INT32_MAX : BYTE_PANELS(1) == 1 ? 0 : inputs / 4;
    const size_t panel = sizeof(struct byte_panel) + (size_t)inputs * WIDTH;
    const int most = tiles ? TILE_ROWS : BYTE_ROWS;
    const int blocks = (rows + most - 1) / most, count = rows < most ? rows : most;
    if (tiles)
        byte_tiles_begin(count, inputs);
#pragma omp for schedule(static)
    for (int i = 0; i < m->shares; i++) {
        const int end = first_panel(all, i + 1, m->shares);
        for (int p = first_panel(all, i, m->shares), panels; p < end; p += panels) {
            panels = end - p < group ? end - p : group;
            const char *w = m->weight + p * panel;
            struct ahead ahead = {w + panels * panel, 0, panels};
            for (int b = 0; b < blocks; b++) {
                /* The last block of tiles repeats rows of the one before: tiles keep their shape. */
                const int r = !tiles ? rows * b / blocks : b + 1 == blocks ? rows - count : b * most;
                const byte_in *from = m->in + (size_t)r * inputs;
                if (tiles)
                    byte_tiles(from, inputs, w, panel, m->scales + r, t, r, p * WIDTH, count, panels);
                else
                    byte_rows(from, inputs, w, panel, m->scales + r, t, r, p * WIDTH, &ahead,
                              fetch_turn(b, rows, lines, BYTE_PANELS(4) == 4), blocks,
                              rows * (b + 1) / blocks - r, panels);
            }
        }
    }
    if (tiles)
        byte_tiles_end();
}

/* The product; tiles: whether many rows take tiles. Returns non-zero if memory runs out. */
static int byte_product(const void *x, const char *weight, int rows, int k, int threads, int share,
                        int tiles, const struct target *t)
{
    const int inputs = (k + 3) / 4 * 4;
    const size_t bytes = rows * (sizeof(float) + (size_t)inputs * sizeof(byte_in));
    float *scales = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!scales)
        return 1;
    byte_in *in = (byte_in *)(scales + rows);
    for (int r = 0; r < rows; r++)
        to_bytes(x, (size_t)r * k, in + (size_t)r * inputs, scales + r, k, inputs, t->narrow);
    const struct product_of_bytes product = {in, scales, weight, rows, inputs,
                                             tiles && rows > BYTE_ROWS, share ? threads : 1, t};
    ON_THREADS(threads, share, multiply_bytes(&product));
    free(scales);
    return 0;
}
