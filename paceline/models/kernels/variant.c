/* What every variant's library tells about itself: whether it runs here, and whether its results are
 * right. Unlike the rest of the library, this is compiled for the lowest instruction set: it runs before
 * the processor is known. */

#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

#define EXPORT __attribute__((visibility("default")))

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

int allow_tiles(void); /* tiles.h */

enum features { FMA = 1, AVX512 = 2, AVX_VNNI = 4, AVX512_VNNI = 8, AVX512_BF16 = 16, AMX = 32 };
enum arm_features { DOTPROD = 1, ARM_BF16 = 2 };

/* What the processor has. FEATURES is what the build uses: without one of those bits it does not run. */
static int features(void)
{
    int found = 0;
#if defined(__x86_64__)
    unsigned a, b, c, d;
    __builtin_cpu_init(); /* also asks whether the system saves the registers */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
        found |= FMA;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512cd"))
        found |= AVX512;
    if (__get_cpuid_count(7, 1, &a, &b, &c, &d)) {
        if (found & FMA && a & 1 << 4)
            found |= AVX_VNNI;
        if (found & AVX512 && a & 1 << 5)
            found |= AVX512_BF16;
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        if (found & AVX512 && c & 1 << 11)
            found |= AVX512_VNNI;
        if (d & 1 << 22 && d & 1 << 24 && d & 1 << 25)
            found |= AMX;
    }
#elif defined(__aarch64__) && defined(__linux__)
    if (getauxval(AT_HWCAP) & 1 << 20)
        found |= DOTPROD;
    if (getauxval(AT_HWCAP2) & 1 << 14)
        found |= ARM_BF16;
#endif
    return found;
}

/* 0 if this library does not run here; the library with the highest score is the best. */
EXPORT int score(void)
{
    if ((features() & (FEATURES)) != (FEATURES))
        return 0;
#if defined(__x86_64__)
    if ((FEATURES) & AMX && !allow_tiles())
        return 0;
#endif
    return RANK;
}

/* --- self-test -------------------------------------------------------------------------------- */

/* decode.c */
int run_layers_f32(const struct model *, const struct layer *, int, int, float *, float *, float *,
                   const struct rows *, float *);
int run_layers_bf16(const struct model *, const struct layer *, int, int, uint16_t *, uint16_t *,
                    uint16_t *, const struct rows *, uint16_t *);
void finish_logits_f32(const struct model *, float *, size_t);
void finish_logits_bf16(const struct model *, uint16_t *, size_t);

/* The same numbers everywhere, in [-0.5, 0.5). */
static float next(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(int32_t)(*state >> 8) * 5.9604644775390625e-8f - 0.5f;
}

static void fill(void *out, size_t count, int narrow, uint32_t *state)
{
    for (size_t i = 0; i < count; i++) {
        const float x = next(state);
        uint32_t bits;
        memcpy(&bits, &x, sizeof bits);
        if (narrow)
            ((uint16_t *)out)[i] = (uint16_t)(bits >> 16);
        else
            memcpy((float *)out + i, &x, sizeof x);
    }
}

static uint64_t mix(uint64_t hash, const void *data, size_t bytes)
{
    const uint8_t *at = data;
    for (size_t i = 0; i < bytes; i++)
        hash = (hash ^ at[i]) * 0x100000001b3u; /* FNV-1a */
    return hash;
}

enum kind { PLAIN, DIFFERENT, CHUNKED };
enum { HIDDEN = 40, FFN = 54, HEADS = 4, KV_HEADS = 2, DIM = 20, SLOTS = 64, ROWS = 19, LAYERS = 2,
       EXPERTS = 3 };
#define QKV ((HEADS + 2 * KV_HEADS) * DIM)
#define PANELS(outputs) (((outputs) + 15) / 16 * 16)
#define NUMBERS 60000

/* A small model of odd sizes computes a prompt, then one token; one that is DIFFERENT or CHUNKED computes
 * what Llama does not. 0 if memory runs out. */
static uint64_t model_hash(uint64_t hash, int narrow, enum kind kind)
{
    static const int sizes[][2] = {
        {HIDDEN, QKV}, {HEADS * DIM, HIDDEN}, {HIDDEN, 2 * FFN}, {FFN, HIDDEN}};
    const size_t size = narrow ? 2 : 4;
    uint32_t state = 7;
    char *memory = aligned_alloc(64, NUMBERS * sizeof(float)), *free_from = memory;
    if (!memory)
        return 0;
    struct layer layers[LAYERS] = {{0}};
#define TAKE(count) (free_from += (size_t)(count)*4, free_from - (size_t)(count)*4)
    for (int i = 0; i < LAYERS; i++) {
        struct weight *weights[] = {&layers[i].qkv, &layers[i].out, &layers[i].gate_up, &layers[i].down};
        for (int w = 0; w < 4; w++) {
            const size_t count = (size_t)sizes[w][0] * PANELS(sizes[w][1]);
            char *packed = TAKE(count);
            fill(packed, count, narrow, &state);
            *weights[w] = (struct weight){packed, narrow ? HALVES : FLOATS};
        }
        char *input_norm = TAKE(HIDDEN), *post_norm = TAKE(HIDDEN), *k_norm = TAKE(DIM);
        fill(input_norm, HIDDEN, narrow, &state);
        fill(post_norm, HIDDEN, narrow, &state);
        fill(k_norm, DIM, narrow, &state);
        layers[i].input_norm = input_norm;
        layers[i].post_norm = post_norm;
        layers[i].k_norm = k_norm;
        layers[i].window = i ? 11 : 0;
        if (kind == DIFFERENT) {
            char *out_norm = TAKE(HIDDEN), *wide_norm = TAKE(HEADS * DIM);
            fill(out_norm, HIDDEN, narrow, &state);
            fill(wide_norm, HEADS * DIM, narrow, &state);
            layers[i].attention_norm = layers[i].mlp_norm = out_norm;
            layers[i].q_norm = layers[i].k_norm = wide_norm;
            layers[i].input_norm = i ? input_norm : NULL;
            layers[i].rope = i + 1;
            layers[i].sinks = i ? wide_norm : NULL;
        }
        if (kind == CHUNKED)
            layers[i].rope = i ? NO_ROPE : GLOBAL;
    }
    struct weight router = layers[0].gate_up, gate_up[EXPERTS], down[EXPERTS];
    for (int e = 0; e < EXPERTS; e++) {
        gate_up[e] = layers[e % LAYERS].gate_up;
        down[e] = layers[e % LAYERS].down;
    }
    struct experts experts = {EXPERTS, 2, FFN, kind == DIFFERENT, router, gate_up, down};
    if (kind == CHUNKED) {
        experts.shared_gate_up = layers[1].gate_up;
        experts.shared_down = layers[1].down;
    }
    if (kind != PLAIN)
        layers[1].experts = &experts;
    float *cos_sin = (float *)TAKE(SLOTS * DIM);
    fill(cos_sin, SLOTS * DIM, 0, &state);
    char *x = TAKE(ROWS * HIDDEN), *keys = TAKE(LAYERS * SLOTS * KV_HEADS * DIM);
    char *values = TAKE(LAYERS * SLOTS * KV_HEADS * DIM);
    fill(x, ROWS * HIDDEN, narrow, &state);
    struct model model = {.hidden = HIDDEN, .ffn = FFN, .heads = HEADS, .kv_heads = KV_HEADS,
                          .dim = DIM, .num_slots = SLOTS, .threads = 1, .eps = 1e-5f,
                          .scale = 0.25f, .cos_sin = cos_sin, .rotary = DIM,
                          .residual_scale = 1.0f, .logit_divisor = 1.0f};
    if (kind == DIFFERENT) {
        model.local_cos_sin = cos_sin;
        model.rotary = DIM / 2;
        model.activation = narrow ? GELU : CLAMPED;
        model.gate_slope = 1.7f;
        model.gate_limit = 0.4f;
        model.wide_norms = 1;
        model.residual_scale = 0.7f;
        model.attention_cap = 0.9f;
        model.logit_divisor = 3.0f;
        model.logit_cap = 1.5f;
    }
    if (kind == CHUNKED) {
        model.chunked = model.turned_norms = model.scaled_inputs = 1;
        model.temperatures = cos_sin;
        layers[0].window = 7;
    }
    int32_t numbers[ROWS], lengths[ROWS], zeros[ROWS] = {0}, slots[ROWS];
    const int32_t *prefix[ROWS], *path[ROWS] = {0};
    for (int r = 0; r < ROWS; r++) {
        numbers[r] = r;
        lengths[r] = r + 1;
        slots[r] = (r * 7 + 3) % SLOTS;
        prefix[r] = slots;
    }
    int failed = 0;
    const int counts[] = {ROWS - 1, 1};
    for (int part = 0, at = 0; part < 2; at += counts[part++]) {
        const struct rows rows = {counts[part], ROWS, numbers + at, slots + at, lengths + at, zeros,
                                  prefix + at, path};
        char *from = x + at * HIDDEN * size;
        failed |= narrow ? run_layers_bf16(&model, layers, 0, LAYERS, (void *)from, (void *)keys,
                                           (void *)values, &rows, NULL)
                         : run_layers_f32(&model, layers, 0, LAYERS, (void *)from, (void *)keys,
                                          (void *)values, &rows, NULL);
    }
    if (kind == DIFFERENT && narrow)
        finish_logits_bf16(&model, (void *)x, ROWS * HIDDEN);
    else if (kind == DIFFERENT)
        finish_logits_f32(&model, (void *)x, ROWS * HIDDEN);
    if (free_from > memory + NUMBERS * sizeof(float))
        abort(); /* the numbers above do not fit together */
    hash = mix(hash, x, ROWS * HIDDEN * size);
    free(memory);
    return failed ? 0 : hash;
}

/* One product with int8 weights. */
static uint64_t bytes_hash(uint64_t hash)
{
    enum { INPUTS = 36, OUTPUTS = 32, PANEL = 128 + INPUTS * 16 };
    _Alignas(64) char packed[2 * PANEL];
    float x[7 * INPUTS], out[7 * OUTPUTS];
    uint32_t state = 11;
    fill(x, 7 * INPUTS, 0, &state);
    for (int p = 0; p < 2; p++) {
        char *panel = packed + p * PANEL;
        int32_t shift[16] = {0};
        fill(panel, 16, 0, &state);
        for (int i = 0; i < INPUTS * 16; i++) {
            const int8_t w = (int8_t)(next(&state) * 254.0f);
            panel[128 + i] = (char)w;
            shift[i / 4 % 16] += 128 * w;
        }
        memcpy(panel + 64, shift, sizeof shift);
    }
    if (linear_f32(x, packed, BYTES, NULL, out, 7, INPUTS, OUTPUTS, 1))
        return 0;
    return mix(hash, out, sizeof out);
}

/* Products with each kind of weights in blocks, for one row and for several. */
static uint64_t quants_hash(uint64_t hash)
{
    enum { INPUTS = 96, OUTPUTS = 76, COUNT = 5, MOST = 7 };
    static const struct {
        int packing, headers, wide, bits;
    } kinds[] = {{NIBBLES, 192, 0, 4}, {OCTETS, 128, 0, 8}, {WIDE_NIBBLES, 384, 1, 4},
                 {WIDE_OCTETS, 768, 1, 8}};
    _Alignas(64) char packed[COUNT * (768 + INPUTS * 16)];
    float x[MOST * INPUTS], out[MOST * OUTPUTS];
    uint32_t state = 5;
    fill(x, MOST * INPUTS, 0, &state);
    for (int i = 0; i < 4; i++) {
        const int lines = INPUTS * 16 * kinds[i].bits / 8, size = kinds[i].headers + lines;
        for (int p = 0; p < COUNT; p++) {
            char *panel = packed + p * size;
            if (kinds[i].wide)
                fill(panel, kinds[i].headers / 4, 0, &state);
            else
                for (int j = 0; j < kinds[i].headers / 2; j++) { /* float16, 0.25 to 0.5 in size */
                    const int bits = (int)(next(&state) * 2048.0f);
                    const uint16_t half = (uint16_t)(0x3400 | (bits & 0x83ff));
                    memcpy(panel + 2 * j, &half, sizeof half);
                }
            for (int j = 0; j < lines; j++)
                panel[kinds[i].headers + j] = (char)(int)(next(&state) * 255.9f);
        }
        for (int rows = 1; rows <= MOST; rows += MOST - 1) {
            if (linear_f32(x, packed, kinds[i].packing, NULL, out, rows, INPUTS, OUTPUTS, 1))
                return 0;
            hash = mix(hash, out, (size_t)rows * OUTPUTS * sizeof *out);
        }
    }
    return hash;
}

/* A digest of what the kernels compute from fixed numbers, in class portable; kernels/__init__.py has the
 * one that is right. 0 if memory runs out. */
EXPORT uint64_t self_test(void)
{
    uint64_t hash = model_hash(0xcbf29ce484222325u, 0, PLAIN);
    hash = hash ? model_hash(hash, 1, PLAIN) : 0;
    hash = hash ? bytes_hash(hash) : 0;
    hash = hash ? quants_hash(hash) : 0;
    hash = hash ? model_hash(hash, 0, DIFFERENT) : 0;
    hash = hash ? model_hash(hash, 1, DIFFERENT) : 0;
    hash = hash ? model_hash(hash, 0, CHUNKED) : 0;
    return hash ? model_hash(hash, 1, CHUNKED) : 0;
}
