/* Prints a digest of each function of noise.c, for processors on which no Python runs. */

#include <stdio.h>

#include "../../paceline/models/kernels/noise.c"

enum { COUNT = 49152 };
static double numbers[COUNT], results[COUNT], scratch[COUNT];
static float logits[COUNT];

static void show(const char *name)
{
    uint64_t digest = 0xcbf29ce484222325u; /* FNV-1a, of words */
    for (int i = 0; i < COUNT; i++)
        digest = (digest ^ as_bits(results[i])) * 0x100000001b3u;
    printf("%s %016llx\n", name, (unsigned long long)digest);
}

int main(void)
{
    static int64_t ids[COUNT];
    uint64_t state = 1;
    for (int i = 0; i < COUNT; i++) { /* any bits: NaN, infinite and subnormal numbers, too */
        state = state * 6364136223846793005u + 1442695040888963407u;
        numbers[i] = as_double(state ^ (state >> 29) << 11);
        ids[i] = (int64_t)(state >> 45);
    }
    exact_log(numbers, results, COUNT), show("log of anything");
    exact_exp(numbers, results, COUNT), show("exp of anything");
    gumbel(5, COUNT, results), show("gumbel");
    gumbel_at(6, ids, COUNT, results), show("gumbel_at");
    for (int i = 0; i < COUNT; i++)
        numbers[i] = 30.0 * results[i];
    exact_exp(numbers, results, COUNT), show("exp");
    exact_log(results, results, COUNT), show("log");
    results[0] = exact_weights(numbers, 20.0, results, scratch, COUNT - 1), show("weights");
    for (int i = 0; i < COUNT; i++)
        logits[i] = (float)numbers[i];
    for (int i = 0; i < COUNT; i++)
        results[i] = 0.0;
    for (int i = 1; i < 64; i++) {
        results[2 * i] = (double)sample_logits(logits, 700 * i, 0.7, (uint64_t)i);
        results[2 * i + 1] = (double)sample_scores(numbers, 700 * i, (uint64_t)i);
    }
    show("samples");
    return 0;
}
