/* Sizes of blocks, and what products.c, quants.c and matmul.c share. */

#include "simd.h"

#define LINE 64 /* bytes of a panel for one step of k, or two */
#define SPAN 96 /* rows whose sums wait at the same time */

/* The most panels that a thread takes together, and the rows and panels of a block: their sums fill the
 * registers and hide the latency of additions. */
#if W == 16
#define GROUP 8
#define MAX_ROWS 6
#define PANELS(rows) ((rows) <= 3 ? 8 : 4)
#elif HAS_FMA
#define GROUP 8
#define MAX_ROWS (SUBSTEPS == 1 ? 6 : 5) /* halves need registers for themselves */
#define PANELS(rows) ((rows) == 1 ? 4 : (rows) + SUBSTEPS <= 4 ? 2 : 1)
#else /* a multiply-add is many instructions: nothing is gained by several rows */
#define GROUP 4
#define MAX_ROWS 1
#define PANELS(rows) 1
#endif

/* Panels that a thread takes together for `rows` rows. Without wide vectors, only one row of halves has time
 * for eight streams of weights. */
ALWAYS_INLINE int group_size(int rows, int halves)
{
    return rows <= (W == 16 ? 3 : halves) ? GROUP : 4;
}

/* The first panel of a thread's share. Shares differ by one panel at most: whole groups would leave a thread
 * of two with a fifth of a product of ten panels. */
ALWAYS_INLINE int first_panel(int panels, int share, int shares)
{
    return (int)((int64_t)panels * share / shares);
}

/* Steps of k that all rows take before the next ones: a core's own cache holds a group's panels for them, and
 * for the chunk that is fetched meanwhile. Where the registers hold the sums of half a group, both halves are
 * read side by side in short turns, unless panels are short themselves. Sums wait in memory between two
 * chunks, which changes no bit. */
ALWAYS_INLINE int chunk_size(int group, int steps)
{
    return W < 16 && group > 4 && steps > 256 ? 16 : 2048 / group;
}

/* Blocks fetch what comes next, into the cache that a core keeps its panels in: what goes to the first level
 * instead waits in the few places that loads need, too, and memory and arithmetic take their time one after
 * the other. */
#define FETCH(from) __builtin_prefetch(from, 0, 2)

/* The lines that come next: one of each of `streams` neighbouring panels, and then the next one of each. */
struct ahead {
    const char *from;
    int stream, streams;
};

/* Fetches `count` of them. A block that computes one panel still fetches from all: memory with a long latency
 * gives four streams nearly twice what it gives one. */
ALWAYS_INLINE void fetch_ahead(struct ahead *ahead, size_t panel, const int count)
{
    UNROLL for (int i = 0; i < count; i++) FETCH(ahead->from + i * panel);
    ahead->from += count * panel;
    ahead->stream += count;
    if (ahead->stream >= ahead->streams) {
        ahead->from += LINE - (ptrdiff_t)(ahead->stream * panel);
        ahead->stream = 0;
    }
}

#define SHORT_PANEL (W == 16 ? 256 : 320) /* steps, for one row */

/* Whether one row takes one panel after the other: memory is read best in one stream, and short panels begin
 * before the sums of the last one are done. In long ones each sum waits for the one before it, unless there are
 * those of other panels. */
ALWAYS_INLINE int one_by_one(int rows, int lines)
{
    return rows == 1 && lines <= SHORT_PANEL;
}

/* Which share of the next panels a block fetches; -1: none. A few rows with all streams of weights at once
 * are read faster by the processor itself, unless panels end before it has seen that they go on. */
ALWAYS_INLINE int fetch_turn(int block, int rows, int lines, int all_streams)
{
    return rows > (all_streams ? 4 : 1) || lines <= (rows == 1 ? SHORT_PANEL : 320) ? block : -1;
}

/* Where results go; panels may have more outputs than these. */
struct target {
    const void *bias; /* or NULL */
    void *out;        /* [rows][outputs], as the bias float32 or, if narrow, bfloat16 */
    size_t outputs;
    int narrow;
};

/* One row's sums for a panel whose first output is `first`. */
ALWAYS_INLINE void put(const struct target *t, int row, int first, vec sum)
{
    const int left = (int)t->outputs - first;
    if (t->bias)
        sum = add_(sum, read_(t->bias, first, left, t->narrow));
    write_(t->out, row * t->outputs + first, sum, left, t->narrow);
}
