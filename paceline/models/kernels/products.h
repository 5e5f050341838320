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

/* Whether chunks are short. Where registers hold the sums of one panel only, the panels of a group are then
 * read side by side all the same: memory gives several streams more than one. Many rows take longer to
 * compute than to read, and a few steps of k are read in no time. */
ALWAYS_INLINE int in_turns(int rows, int halves, int steps)
{
    return W == 8 && rows + halves > 1 && rows <= 16 && steps >= 256;
}

/* Steps of k that all rows take before the next ones: a core's own cache holds a group's panels for them, and
 * for the chunk that is fetched meanwhile. Sums wait in memory between two chunks, which changes no bit. */
ALWAYS_INLINE int chunk_size(int rows, int halves, int steps)
{
    return in_turns(rows, halves, steps) ? 16 : 2048 / group_size(rows, halves);
}

/* Blocks of several rows fetch what comes next, unless they read four panels or more and memory takes longer
 * than arithmetic: then the processor reads faster by itself, because instructions that fetch wait in the
 * same few places as loads. */
#define FETCH(from) __builtin_prefetch(from, 0, 3)
#define FETCH_TURN(block, fetches) ((fetches) ? (block) : -1) /* -1: never */
#define MANY_STREAMS(rows) (W == 16 ? (rows) : 2) /* from so many rows on, arithmetic takes longer than reading */

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
