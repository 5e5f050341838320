/* Products of rows with panels of weights. Included once for each kind of weights, with NAME(f), X (the type
 * of inputs), SUBSTEPS (inputs that 64 bytes of a panel hold), VALUE(x) (a vec of one input),
 * WEIGHTS(from, substep) and STEP(sums, weights, value) set. */

/* Steps [from, to) of k for a block of rows and panels; its sums so far, [rows][GROUP][WIDTH], are in
 * memory. Each of `turns` such blocks fetches a share of what is ahead, spread over its own steps, so that
 * memory and arithmetic are busy at the same time; turn -1 fetches nothing. */
ALWAYS_INLINE void NAME(block)(const X *x, size_t stride, const char *weight, size_t panel,
                               struct ahead *ahead, float *sums, int from, int to, int turn, int turns,
                               const int rows, const int panels)
{
    vec acc[MAX_ROWS][GROUP];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++)
            acc[r][p] = from ? load_(sums + (r * GROUP + p) * WIDTH) : set_(0.0f);
    weight += (size_t)from * LINE;
    x += (size_t)from * SUBSTEPS;
    struct ahead next = *ahead; /* in registers */
    for (int k = from; k < to; k++) {
        if (turn-- == 0) {
            turn = turns - 1;
            fetch_ahead(&next, panel, panels);
        }
        UNROLL for (int s = 0; s < SUBSTEPS; s++) {
            vec w[GROUP];
            UNROLL for (int p = 0; p < panels; p++) w[p] = WEIGHTS(weight + p * panel, s);
            UNROLL for (int r = 0; r < rows; r++) {
                const vec value = VALUE(x[r * stride + s]);
                UNROLL for (int p = 0; p < panels; p++) acc[r][p] = STEP(acc[r][p], w[p], value);
            }
        }
        weight += LINE;
        x += SUBSTEPS;
    }
    *ahead = next;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int p = 0; p < panels; p++) store_(sums + (r * GROUP + p) * WIDTH, acc[r][p]);
}

/* The same for any number of panels up to GROUP; at once, as many as the registers hold sums of. */
#define BLOCK(rows, count)                                                                        \
    NAME(block)(x, stride, weight + p * panel, panel, ahead, sums + p * WIDTH, from, to, turn, turns, \
                rows, count)
#define CASE(rows)                                                                                \
    case rows:                                                                                    \
        for (; p + PANELS(rows) <= panels; p += PANELS(rows))                                     \
            BLOCK(rows, PANELS(rows));                                                            \
        if (PANELS(rows) > 4 && p + 4 <= panels) {                                                \
            BLOCK(rows, 4);                                                                       \
            p += 4;                                                                               \
        }                                                                                         \
        if (PANELS(rows) > 2 && p + 2 <= panels) {                                                \
            BLOCK(rows, 2);                                                                       \
            p += 2;                                                                               \
        }                                                                                         \
        if (PANELS(rows) > 1 && p < panels)                                                       \
            BLOCK(rows, 1);                                                                       \
        break;

static void NAME(rows)(const X *x, size_t stride, const char *weight, size_t panel, struct ahead *ahead,
                       float *sums, int from, int to, int turn, int turns, int rows, int panels, int alone)
{
    int p = 0;
    for (; alone && p < panels; p++)
        BLOCK(1, 1);
    switch (rows) {
        CASE(1)
#if MAX_ROWS > 1
        CASE(2)
        CASE(3)
        CASE(4)
        CASE(5)
#endif
#if MAX_ROWS > 5
        CASE(6)
#endif
    }
}

#undef CASE
#undef BLOCK

/* Up to GROUP neighbouring panels for at most SPAN rows, chunk after chunk. The last chunk fetches `after`,
 * which comes next. sums: [rows][GROUP][WIDTH]. */
void NAME(group)(const X *x, size_t stride, const char *weight, size_t panel, const char *after,
                 float *sums, int rows, int steps, int panels)
{
    const int blocks = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const int size = chunk_size(group_size(rows, SUBSTEPS == 2), steps), chunks = (steps + size - 1) / size;
    for (int c = 0; c < chunks; c++) {
        const int from = (int)((int64_t)steps * c / chunks);
        const int to = (int)((int64_t)steps * (c + 1) / chunks);
        struct ahead ahead = {c + 1 < chunks ? weight + (size_t)to * LINE : after, 0, panels};
        for (int b = 0; b < blocks; b++) {
            /* Blocks of even size: 7 rows as 4 + 3 cost less than as 6 + 1. */
            const int r = rows * b / blocks, end = rows * (b + 1) / blocks;
            NAME(rows)(x + r * stride, stride, weight, panel, &ahead, sums + r * GROUP * WIDTH, from, to,
                       fetch_turn(b, rows, steps, W == 16 && SUBSTEPS == 1), blocks, end - r, panels,
                       one_by_one(rows, steps));
        }
    }
}

#undef NAME
#undef X
#undef SUBSTEPS
#undef VALUE
#undef WEIGHTS
#undef STEP
