/* The most that the processor can do; paceline/bench/kernels.py compares products with it. Part of matmul.c. */

/* Multiply-adds of 16 floats in registers, in enough chains to hide their latency. Returns how many numbers
 * it multiplied; *sink keeps the compiler from leaving the loop out. */
#if W == 16
#define CHAINS 16
#elif HAS_FMA
#define CHAINS (W == 8 ? 6 : 5)
#else
#define CHAINS 1
#endif

static double peak_fma(long rounds, float *sink)
{
    vec acc[CHAINS], x = set_(1.0f + *sink * 1e-9f), y = set_(1e-9f);
    for (int c = 0; c < CHAINS; c++)
        acc[c] = set_((float)c);
    for (long i = 0; i < rounds; i++)
        UNROLL for (int c = 0; c < CHAINS; c++) acc[c] = fma_(acc[c], x, y);
    for (int c = 0; c < CHAINS; c++)
        *sink += sum_of(acc[c]);
    return (double)rounds * CHAINS * WIDTH;
}

/* The same for int8: steps of four k for 16 outputs. Weights and inputs come from the nearest cache, because
 * every product has to load them, and change from step to step, or the compiler would multiply only once. */
static double peak_bytes(long rounds, float *sink)
{
    enum { STEPS = 64 };
    int8_t weights[STEPS * LINE];
    byte_in x[BYTE_ROWS * STEPS * 4];
    for (int i = 0; i < STEPS * LINE; i++)
        weights[i] = (int8_t)(i + (int)*sink);
    for (int i = 0; i < BYTE_ROWS * STEPS * 4; i++)
        x[i] = (byte_in)(i % 100 + (int)*sink);
    for (long i = 0; i < rounds; i++) {
        nat_int acc[BYTE_ROWS][SUMS] = {{{0}}};
        for (int k = 0; k < STEPS; k++)
            UNROLL for (int r = 0; r < BYTE_ROWS; r++)
                byte_step(acc[r], weights + k * LINE, x + (r * STEPS + k) * 4);
        int32_t out[WIDTH];
        for (int r = 0; r < BYTE_ROWS; r++) {
            byte_finish(acc[r], out);
            *sink += (float)out[i % WIDTH];
        }
    }
    return (double)rounds * STEPS * BYTE_ROWS * LINE;
}

#if HAS_DOTS
static double peak_dots(long rounds, float *sink)
{
    vec acc[CHAINS], x = set_(1.0f + *sink * 1e-9f);
    for (int c = 0; c < CHAINS; c++)
        acc[c] = set_((float)c);
    for (long i = 0; i < rounds; i++)
        UNROLL for (int c = 0; c < CHAINS; c++) acc[c] = dot(acc[c], x, x);
    for (int c = 0; c < CHAINS; c++)
        *sink += sum_of(acc[c]);
    return (double)rounds * CHAINS * WIDTH * 2;
}
#endif

#if HAS_TILES
/* bfloat16: 16 rows, 16 outputs, 32 steps of k. */
static double peak_tiles(long rounds)
{
    configure_tiles(TILE_ROWS);
    for (long i = 0; i < rounds; i++) {
        _tile_dpbf16ps(0, 5, 4);
        _tile_dpbf16ps(1, 6, 4);
        _tile_dpbf16ps(2, 7, 4);
        _tile_dpbf16ps(3, 5, 4);
    }
    _tile_release();
    return (double)rounds * 4 * TILE_ROWS * WIDTH * TILE_STEPS;
}
#endif

/* Multiplies on each thread as fast as this build can for weights of this packing; returns how often. */
EXPORT double peak(int packing, long rounds, int threads)
{
    double done = 0.0;
#pragma omp parallel num_threads(threads) reduction(+ : done)
    {
        float sink = 0.0f;
        if (packing >= BYTES)
            done = peak_bytes(rounds / 64 + 1, &sink);
#if HAS_TILES
        else if (packing == TILES)
            done = peak_tiles(rounds);
#endif
#if HAS_DOTS
        else if (packing == DOTS)
            done = peak_dots(rounds, &sink);
#endif
        else
            done = peak_fma(rounds, &sink);
        if (sink == 1.25f) /* never: sums of other numbers */
            done = 0.0;
    }
    return done;
}

/* Reads an array, each thread its part of it as four streams. */
EXPORT float read_all(const float *x, long count, int threads)
{
    float sum = 0.0f;
#pragma omp parallel num_threads(threads) reduction(+ : sum)
    {
        const long lines = count / WIDTH / 4 / threads;
#pragma omp for schedule(static)
        for (int t = 0; t < threads; t++) {
            const float *from = x + t * lines * 4 * WIDTH;
            vec acc[4] = {set_(0.0f), set_(0.0f), set_(0.0f), set_(0.0f)};
            for (long i = 0; i < lines; i++)
                UNROLL for (int s = 0; s < 4; s++)
                    acc[s] = max_(acc[s], load_(from + (s * lines + i) * WIDTH));
            for (int s = 0; s < 4; s++)
                sum += largest(acc[s]);
        }
    }
    return sum;
}

struct product {
    const void *packed;
    int64_t packing, inputs, outputs;
};

/* Products of the same rows with one matrix after the other, as in a forward; x and out are large enough for
 * each. Returns non-zero if memory runs out. */
EXPORT int multiply_all(const struct product *products, int count, const void *x, void *out, int rows,
                        int threads, int narrow)
{
    int failed = 0;
    for (int i = 0; i < count; i++)
        failed |= linear(x, products[i].packed, (int)products[i].packing, rows, (int)products[i].inputs,
                         threads, &(struct target){NULL, out, products[i].outputs, narrow});
    return failed;
}
