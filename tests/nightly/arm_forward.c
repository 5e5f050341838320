/* Computes once more, with one library, what test_arm.py has recorded on another processor.
 *
 *     arm_forward LIBRARY              prints its score, has_dots() and, where it runs, its self_test()
 *     arm_forward LIBRARY RECORD OUT   computes the record and writes its memory to OUT
 *
 * A record is the memory that the kernels were called with, in which a pointer is the distance from the
 * memory's beginning, and the calls in their order. */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum function { RUN_LAYERS, RMSNORM, LINEAR };

struct call {
    int64_t function, narrow; /* narrow: bfloat16 */
    int64_t a[9];             /* as the function wants them */
};

static char *memory;

static void *at(int64_t offset)
{
    return offset ? memory + offset : NULL;
}

static void *from(void *library, const char *name, int narrow)
{
    char full[64];
    snprintf(full, sizeof full, "%s_%s", name, narrow ? "bf16" : "f32");
    void *found = dlsym(library, full);
    if (!found) {
        fprintf(stderr, "no %s\n", full);
        exit(2);
    }
    return found;
}

static int run(void *library, const struct call *call)
{
    const int64_t *a = call->a;
    const int narrow = (int)call->narrow;
    float eps;
    switch ((enum function)call->function) {
    case RUN_LAYERS: {
        int (*f)(void *, void *, int, int, void *, void *, void *, void *, void *) =
            from(library, "run_layers", narrow);
        return f(at(a[0]), at(a[1]), (int)a[2], (int)a[3], at(a[4]), at(a[5]), at(a[6]), at(a[7]), NULL);
    }
    case RMSNORM: {
        void (*f)(void *, void *, void *, int, int, float) = from(library, "rmsnorm", narrow);
        memcpy(&eps, a + 5, sizeof eps);
        f(at(a[0]), at(a[1]), at(a[2]), (int)a[3], (int)a[4], eps);
        return 0;
    }
    case LINEAR: {
        int (*f)(void *, void *, int, void *, void *, int, int, int, int) = from(library, "linear", narrow);
        return f(at(a[0]), at(a[1]), (int)a[2], at(a[3]), at(a[4]), (int)a[5], (int)a[6], (int)a[7], 1);
    }
    }
    return 1;
}

static void get(void *into, size_t size, size_t count, FILE *file)
{
    if (fread(into, size, count, file) != count) {
        fprintf(stderr, "the record is too short\n");
        exit(2);
    }
}

int main(int argc, char **argv)
{
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW) : NULL;
    if (!library) {
        fprintf(stderr, "%s\n", argc > 1 ? dlerror() : "which library?");
        return 2;
    }
    if (argc < 4) {
        const int score = ((int (*)(void))dlsym(library, "score"))();
        const int dots = ((int (*)(void))dlsym(library, "has_dots"))();
        const uint64_t digest = score ? ((uint64_t(*)(void))dlsym(library, "self_test"))() : 0;
        printf("%d %d %#llx\n", score, dots, (unsigned long long)digest);
        return 0;
    }
    FILE *file = fopen(argv[2], "rb");
    int64_t counts[3]; /* pointers, calls, bytes of memory: a multiple of 64 */
    if (!file)
        return 2;
    get(counts, sizeof *counts, 3, file);
    int64_t *pointers = malloc(counts[0] * sizeof *pointers);
    struct call *calls = malloc(counts[1] * sizeof *calls);
    memory = aligned_alloc(64, counts[2]);
    if (!pointers || !calls || !memory)
        return 2;
    get(pointers, sizeof *pointers, counts[0], file);
    get(calls, sizeof *calls, counts[1], file);
    get(memory, 1, counts[2], file);
    fclose(file);
    for (int64_t i = 0; i < counts[0]; i++) {
        int64_t offset;
        memcpy(&offset, memory + pointers[i], sizeof offset);
        void *pointer = at(offset);
        memcpy(memory + pointers[i], &pointer, sizeof pointer);
    }
    for (int64_t i = 0; i < counts[1]; i++)
        if (run(library, calls + i)) {
            fprintf(stderr, "call %lld failed\n", (long long)i);
            return 1;
        }
    file = fopen(argv[3], "wb");
    return !file || fwrite(memory, 1, counts[2], file) != (size_t)counts[2] || fclose(file);
}
