/* The structures of a model, for decode.c, matmul.c and the self-test in variant.c. */

#include <stdint.h>

/* Layouts of weights, as in packing.py. HALVES and DOTS are alike in memory; DOTS are for bfloat16 inputs.
 * quants.c describes those from NIBBLES on. */
enum packing { FLOATS, HALVES, DOTS, TILES, BYTES, TILE_BYTES, NIBBLES, OCTETS, WIDE_NIBBLES, WIDE_OCTETS };

/* native_structs.py repeats these structures field by field. */
struct rows {
    int32_t count, longest;         /* rows; slots in the longest context */
    const int32_t *positions;       /* [count] */
    const int32_t *slots;           /* [count] */
    const int32_t *prefix_length;   /* [count] */
    const int32_t *path_length;     /* [count] */
    const int32_t *const *prefix;   /* [count] */
    const int32_t *const *path;     /* [count] */
};

struct model {
    int32_t hidden, ffn, heads, kv_heads, dim, num_slots;
    int32_t threads; /* at most; small work takes one */
    float eps, scale;
    const float *cos_sin; /* [positions, dim] */
};

struct weight {
    const void *packed;
    int64_t packing; /* see matmul.c */
};

struct layer {
    const void *input_norm;
    struct weight qkv;
    const void *qkv_bias, *q_norm, *k_norm;
    struct weight out;
    const void *out_bias, *post_norm;
    struct weight gate_up;
    const void *gate_up_bias;
    struct weight down;
    const void *down_bias;
    int64_t window; /* 0: full attention */
};

/* matmul.c */
int linear_f32(const float *x, const void *packed, int packing, const float *bias, float *out, int rows,
               int k, int outputs, int threads);
int linear_bf16(const uint16_t *x, const void *packed, int packing, const uint16_t *bias, uint16_t *out,
                int rows, int k, int outputs, int threads);
