/* Included once for each element type; ELEM, PIECES, WORD, LOADED, LOAD(x), STORE(f), STEP and NAME(f)
 * are set by matmul.c. */

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
    switch (rows) {
    case 1: ROWS(1); break;
    case 2: ROWS(2); break;
    case 3: ROWS(3); break;
    case 4: ROWS(4); break;
    case 5: ROWS(5); break;
    default: ROWS(6);
    }
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
    tile_block(in, (size_t)rows * inputs, PIECES, w, sums, inputs, n);                            \
    NAME(store)(sums, add, o, count, outputs, width, n)

/* The product with tiles: weights are bfloat16. Returns non-zero when memory runs out. */
static int NAME(tiled)(const ELEM *x, const uint32_t *weight, const ELEM *bias, ELEM *out, int rows,
                       int k, int outputs, int threads, int share)
{
    const int inputs = (k + TILE_STEPS - 1) / TILE_STEPS * TILE_STEPS;
    const int all = (outputs + WIDTH - 1) / WIDTH, groups = (all + MAX_PANELS - 1) / MAX_PANELS;
    const size_t panel = (size_t)inputs * (WIDTH / 2);
    static const ELEM none[MAX_PANELS * WIDTH];
    const uint16_t *pieces = (const void *)x;
    uint16_t *memory = NULL;
    if (PIECES > 1 || inputs != k) {
        const size_t bytes = PIECES * (size_t)rows * inputs * sizeof *memory;
        pieces = memory = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
        if (!memory)
            return 1;
        NAME(pieces)(x, memory, rows, k, inputs);
    }
#pragma omp parallel num_threads(threads) if (share)
    {
        _Alignas(64) vec sums[TILE_ROWS * MAX_PANELS];
        int configured = 0;
#pragma omp for schedule(static)
        for (int g = 0; g < groups; g++) {
            const int p = g * MAX_PANELS, first = p * WIDTH;
            const int panels = all - p < MAX_PANELS ? all - p : MAX_PANELS;
            const int width = outputs - first < panels * WIDTH ? outputs - first : panels * WIDTH;
            const uint32_t *w = weight + p * panel;
            const ELEM *add = bias ? bias + first : none;
            for (int r = 0; r < rows; r += TILE_ROWS) {
                const int count = rows - r < TILE_ROWS ? rows - r : TILE_ROWS;
                if (count != configured)
                    configure_tiles(configured = count);
                const uint16_t *in = pieces + (size_t)r * inputs;
                ELEM *o = out + (size_t)r * outputs + first;
                switch (panels) {
                case 1: PANELS(1); break;
                case 2: PANELS(2); break;
                case 3: PANELS(3); break;
                default: PANELS(4);
                }
            }
        }
        if (configured)
            _tile_release();
    }
    free(memory);
    return 0;
}

#undef PANELS

#endif

#define PANELS(n) NAME(group)(in, w, after, add, o, count, steps, outputs, width, n)

/* x: [rows, k], out: [rows, outputs]; narrow: weights are bfloat16 and padded, for tiles; threads: at
 * most. Returns non-zero when memory runs out. */
EXPORT int NAME(linear)(const ELEM *x, const void *packed, int narrow, const ELEM *bias, ELEM *out,
                        int rows, int k, int outputs, int threads)
{
    const double words = (double)k * outputs * sizeof(ELEM) / (narrow ? 4 : sizeof(WORD));
    const int share = words * rows > SHARED_WORK || words * sizeof(WORD) > SHARED_BYTES;
#if HAS_TILES
    if (narrow)
        return NAME(tiled)(x, packed, bias, out, rows, k, outputs, threads, share);
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
            switch (panels) {
            case 1: PANELS(1); break;
            case 2: PANELS(2); break;
            case 3: PANELS(3); break;
            default: PANELS(4);
            }
        }
    }
    return 0;
}

#undef PANELS
