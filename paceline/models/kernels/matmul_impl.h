/* Included once for each element type; ELEM, PIECES, WORD, LOADED, LOAD(x), STORE(f),
 * VSTORE(to, v), STEP and NAME(f) are set by matmul.c. */

/* Sums, [rows][panels], plus the bias; `width` of the panels' outputs are real. */
ALWAYS_INLINE void NAME(store)(const vec *sums, const ELEM *bias, ELEM *out, int rows, int outputs,
                               int width, const int panels)
{
    for (int r = 0; r < rows; r++) {
        const float *sum = (const float *)(sums + r * panels);
        ELEM *o = out + (size_t)r * outputs;
        if (width == panels * WIDTH) /* a number that the compiler knows */
            for (int i = 0; i < panels * WIDTH; i++)
                o[i] = STORE(sum[i] + LOAD(bias[i]));
        else
            for (int i = 0; i < width; i++)
                o[i] = STORE(sum[i] + LOAD(bias[i]));
    }
}


/* Steps [from, to) of k for a block of rows and panels, whose sums so far, [rows][panels], are in
 * memory. Each of `turns` such blocks fetches a share of the chunk that comes next, spread over its
 * own steps, so that memory and arithmetic are busy at the same time. */
ALWAYS_INLINE void NAME(block)(const WORD *x, const WORD *weight, const WORD *next, vec *sums,
                               int steps, int from, int to, int turn, const int turns,
                               const int rows, const int panels)
{
    vec acc[MAX_ROWS][MAX_PANELS];
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            acc[r][p] = from ? sums[r * panels + p] : (vec){0};
    const size_t panel = (size_t)steps * WIDTH;
    for (int k = from; k < to; k++) {
        LOADED w[MAX_PANELS];
        for (int p = 0; p < panels; p++)
            w[p] = *(const LOADED *)(weight + p * panel + (size_t)k * WIDTH);
        if (turns == 1 || turn-- == 0) {
            turn = turns - 1;
            for (int p = 0; p < panels; p++)
                __builtin_prefetch(next + p * panel + (size_t)(k - from) * WIDTH, 0, 2);
        }
        for (int r = 0; r < rows; r++) {
            WORD value;
            memcpy(&value, x + (size_t)r * steps + k, sizeof value);
            for (int p = 0; p < panels; p++)
                acc[r][p] = STEP(acc[r][p], w[p], value);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int p = 0; p < panels; p++)
            sums[r * panels + p] = acc[r][p];
}

#define ROWS(n) NAME(block)(x, weight, next, sums, steps, from, to, turn, turns, n, panels)

ALWAYS_INLINE void NAME(rows)(const WORD *x, const WORD *weight, const WORD *next, vec *sums,
                              int steps, int from, int to, int turn, const int turns, int rows,
                              const int panels)
{
    BY_ROWS(rows)
}

#undef ROWS

/* Up to four neighbouring panels for at most SPAN rows, chunk after chunk. `after` is what comes next
 * and is fetched during the last chunk; `width` of the panels' outputs are real. */
ALWAYS_INLINE void NAME(group)(const WORD *x, const WORD *weight, const WORD *after,
                               const ELEM *bias, ELEM *out, int rows, int steps, int outputs,
                               int width, const int panels)
{
    _Alignas(64) vec sums[SPAN * MAX_PANELS];
    const int blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    /* Few rows are shared out evenly: 7 as 4 + 3 cost less than as 6 + 1. */
    const int even = rows <= 4 * MAX_ROWS;
    const int chunks = (steps + CHUNK - 1) / CHUNK;
    if (blocks == 1)
        NAME(rows)(x, weight, after, sums, steps, 0, steps, 0, 1, rows, panels);
    for (int c = 0; c < chunks && blocks > 1; c++) {
        const int from = (int)((int64_t)steps * c / chunks);
        const int to = (int)((int64_t)steps * (c + 1) / chunks);
        const WORD *next = c + 1 < chunks ? weight + (size_t)to * WIDTH : after;
        for (int b = 0; b < blocks; b++) {
            const int r = even ? rows * b / blocks : b * MAX_ROWS;
            const int end = even ? rows * (b + 1) / blocks : r + MAX_ROWS;
            NAME(rows)(x + (size_t)r * steps, weight, next, sums + r * panels, steps, from, to, b,
                       blocks, (end < rows ? end : rows) - r, panels);
        }
    }
    NAME(store)(sums, bias, out, rows, outputs, width, panels);
}

#if HAS_TILES

#define PANELS(n)                                                                                 \
    if (straight) {                                                                               \
        tile_block(in, piece, PIECES, w, (float *)o, outputs, inputs, n);                         \
    } else {                                                                                      \
        tile_block(in, piece, PIECES, w, (float *)sums, n * WIDTH, inputs, n);                    \
        NAME(store)(sums, add, o, count, outputs, width, n);                                      \
    }

/* The product with tiles: weights are bfloat16. Returns non-zero when memory runs out. */
static int NAME(tiled)(const ELEM *x, const uint32_t *weight, const ELEM *bias, ELEM *out, int rows,
                       int k, int outputs, int threads, int share)
{
    const int inputs = (k + TILE_STEPS - 1) / TILE_STEPS * TILE_STEPS;
    const int all = (outputs + WIDTH - 1) / WIDTH, groups = (all + MAX_PANELS - 1) / MAX_PANELS;
    const size_t panel = (size_t)inputs * (WIDTH / 2), piece = (size_t)rows * inputs;
    const int count = rows < TILE_ROWS ? rows : TILE_ROWS;
    const int spans = rows < TILE_SPAN ? 1 : rows / TILE_SPAN; /* the last one takes what is left over */
    static const ELEM none[MAX_PANELS * WIDTH];
    const uint16_t *pieces = (const void *)x;
    uint16_t *memory = NULL;
    if (PIECES > 1 || inputs != k) {
        const size_t bytes = PIECES * (size_t)rows * inputs * sizeof *memory;
        pieces = memory = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
        if (!memory)
            return 1;
    }
#pragma omp parallel num_threads(threads) if (share)
    {
        _Alignas(64) vec sums[TILE_ROWS * MAX_PANELS];
        configure_tiles(count);
        if (memory) {
#pragma omp for schedule(static)
            for (int r = 0; r < rows; r++)
                NAME(pieces)(x + (size_t)r * k, memory + (size_t)r * inputs, piece, k, inputs);
        }
#pragma omp for schedule(static)
        for (int item = 0; item < groups * spans; item++) {
            const int span = item / groups, p = item % groups * MAX_PANELS, first = p * WIDTH;
            const int end = span + 1 < spans ? (span + 1) * TILE_SPAN : rows;
            const int panels = all - p < MAX_PANELS ? all - p : MAX_PANELS;
            const int width = outputs - first < panels * WIDTH ? outputs - first : panels * WIDTH;
            const int straight = PIECES == 3 && !bias && width == panels * WIDTH;
            const uint32_t *w = weight + p * panel;
            const ELEM *add = bias ? bias + first : none;
            for (int block = span * TILE_SPAN; block < end; block += TILE_ROWS) {
                /* The last block takes rows of the one before again: tiles keep their shape. */
                const int r = block + TILE_ROWS <= rows ? block : rows - count;
                const uint16_t *in = pieces + (size_t)r * inputs;
                ELEM *o = out + (size_t)r * outputs + first;
                BY_PANELS(panels)
            }
        }
        _tile_release();
    }
    free(memory);
    return 0;
}

#undef PANELS

#endif

#if HAS_BYTES

/* Rows as multiples of a number of their own, shifted by 128; zeros behind k. */
static void NAME(to_bytes)(const ELEM *x, uint8_t *out, float *scales, int rows, int k, int inputs)
{
    for (int r = 0; r < rows; r++) {
        __m512 top = _mm512_setzero_ps();
        for (int i = 0; i < k; i += WIDTH)
            top = _mm512_max_ps(top, _mm512_abs_ps(NAME(load)(x + (size_t)r * k + i,
                                                              k - i < WIDTH ? k - i : WIDTH)));
        scales[r] = _mm512_reduce_max_ps(top) / 127.0f;
        const float factor = scales[r] > 0.0f ? 1.0f / scales[r] : 0.0f;
        for (int i = 0; i < inputs; i += WIDTH) {
            const int real = k - i < 0 ? 0 : k - i < WIDTH ? k - i : WIDTH;
            const int count = inputs - i < WIDTH ? inputs - i : WIDTH;
            const __m512 value = NAME(load)(x + (size_t)r * k + i, real) * factor;
            const __m512i whole = _mm512_add_epi32(_mm512_cvtps_epi32(value), _mm512_set1_epi32(128));
            _mm_mask_storeu_epi8(out + (size_t)r * inputs + i, (__mmask16)((1u << count) - 1),
                                 _mm512_cvtepi32_epi8(whole));
        }
    }
}

/* int32 sums, [rows][panels], as numbers. */
ALWAYS_INLINE void NAME(store_bytes)(const __m512i *sums, const float *scales, const char *panel,
                                     size_t bytes, const ELEM *bias, ELEM *out, int rows, int outputs,
                                     int first, const int panels)
{
    for (int p = 0; p < panels; p++, first += WIDTH) {
        const struct byte_panel *header = (const void *)(panel + p * bytes);
        for (int r = 0; r < rows; r++) {
            const __m512i whole =
                _mm512_sub_epi32(sums[r * panels + p], _mm512_loadu_si512(header->shift));
            const vec sum = (vec)_mm512_cvtepi32_ps(whole) * *(const vec *)header->scale * scales[r];
            ELEM *o = out + (size_t)r * outputs + first;
            if (!bias && first + WIDTH <= outputs)
                VSTORE(o, sum);
            else
                for (int j = 0; j < WIDTH && first + j < outputs; j++)
                    o[j] = STORE(sum[j] + (bias ? LOAD(bias[first + j]) : 0.0f));
        }
    }
}

/* Up to four neighbouring panels for a block of rows: at most MAX_ROWS, with tiles as many as those are
 * configured for. */
ALWAYS_INLINE void NAME(byte_group)(const uint8_t *x, const float *scales, int inputs,
                                    const char *panel, size_t bytes, const ELEM *bias, ELEM *out,
                                    int rows, int outputs, int first, int tiles, const int panels)
{
    __m512i sums[TILE_ROWS * MAX_PANELS];
#if HAS_BYTE_TILES
    if (tiles)
        byte_tile_block(x, inputs, panel, bytes, sums, panels);
    else
#endif
        byte_rows(x, inputs, panel, bytes, sums, rows, panels);
    NAME(store_bytes)(sums, scales, panel, bytes, bias, out, rows, outputs, first, panels);
}

#define PANELS(n)                                                                                 \
    NAME(byte_group)(in + (size_t)r * inputs, scales + r, inputs, w, panel, bias,                 \
                     out + (size_t)r * outputs, count, outputs, p * WIDTH, tiles, n)

/* The product with int8 weights. Returns non-zero when memory runs out. */
static int NAME(bytes)(const ELEM *x, const char *weight, const ELEM *bias, ELEM *out, int rows, int k,
                       int outputs, int threads, int share, int tiles)
{
    const int inputs = (k + 3) / 4 * 4;
    const int all = (outputs + WIDTH - 1) / WIDTH, groups = (all + MAX_PANELS - 1) / MAX_PANELS;
    const size_t panel = sizeof(struct byte_panel) + (size_t)inputs * WIDTH;
    const size_t bytes = rows * (sizeof(float) + (size_t)inputs);
    const int most = tiles ? TILE_ROWS : MAX_ROWS;
    float *scales = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!scales)
        return 1;
    uint8_t *in = (uint8_t *)(scales + rows);
    NAME(to_bytes)(x, in, scales, rows, k, inputs);
#pragma omp parallel num_threads(threads) if (share)
    {
#if HAS_BYTE_TILES
        if (tiles)
            configure_byte_tiles(rows < most ? rows : most, inputs);
#endif
#pragma omp for schedule(static)
        for (int g = 0; g < groups; g++) {
            const int p = g * MAX_PANELS, panels = all - p < MAX_PANELS ? all - p : MAX_PANELS;
            const char *w = weight + p * panel;
            for (int block = 0; block < rows; block += most) {
                /* With tiles the last block takes rows of the one before again: they keep their shape. */
                const int r = tiles && block && block + most > rows ? rows - most : block;
                const int count = rows - r < most ? rows - r : most;
                BY_PANELS(panels)
            }
        }
#if HAS_BYTE_TILES
        if (tiles)
            _tile_release();
#endif
    }
    free(scales);
    return 0;
}

#undef PANELS

#endif

#define PANELS(n) NAME(group)(in, w, after, add, o, count, steps, outputs, width, n)

/* x: [rows, k], out: [rows, outputs]; packing: of the weights; threads: at most. Returns non-zero when
 * memory runs out. */
EXPORT int NAME(linear)(const ELEM *x, const void *packed, int packing, const ELEM *bias, ELEM *out,
                        int rows, int k, int outputs, int threads)
{
    const double size = (double)k * outputs;
    const int bytes = packing >= BYTES ? 1 : packing == TILES ? 2 : sizeof(ELEM);
    const int share = size * rows > SHARED_WORK[packing] || size * bytes > SHARED_BYTES;
    if (!rows)
        return 0;
#if HAS_TILES
    if (packing == TILES)
        return NAME(tiled)(x, packed, bias, out, rows, k, outputs, threads, share);
#endif
#if HAS_BYTES
    if (packing == BYTES || packing == TILE_BYTES)
        return NAME(bytes)(x, packed, bias, out, rows, k, outputs, threads, share,
                           packing == TILE_BYTES && rows > MAX_ROWS);
#endif
    const WORD *weight = packed;
    const int steps = k * sizeof(ELEM) / sizeof(WORD);
    const int all = (outputs + WIDTH - 1) / WIDTH, groups = (all + MAX_PANELS - 1) / MAX_PANELS;
    static const ELEM none[MAX_PANELS * WIDTH];
#pragma omp parallel for schedule(static) num_threads(threads) if (share)
    for (int g = 0; g < groups; g++) {
        const int p = g * MAX_PANELS, first = p * WIDTH;
        const int panels = all - p < MAX_PANELS ? all - p : MAX_PANELS;
        const int width = outputs - first < panels * WIDTH ? outputs - first : panels * WIDTH;
        const WORD *w = weight + (size_t)p * steps * WIDTH;
        const ELEM *add = bias ? bias + first : none;
        for (int r = 0; r < rows; r += SPAN) {
            const int count = rows - r < SPAN ? rows - r : SPAN;
            const WORD *in = (const WORD *)x + (size_t)r * steps;
            const WORD *after = w + (r + SPAN < rows ? 0 : (size_t)panels * steps * WIDTH);
            ELEM *o = out + (size_t)r * outputs + first;
            BY_PANELS(panels)
        }
    }
    return 0;
}

#undef PANELS
