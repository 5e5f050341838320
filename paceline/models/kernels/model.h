/* The structures of a model, for decode.c, matmul.c and the self-test in variant.c. */

#include <stdint.h>

/* Calls a function whose loops threads share ("omp for"): on several threads, or at once where work is small.
 * To begin a parallel region takes 0.4 us even with one thread, as long as a product of 10,000 weights. */
#define PRAGMA(text) _Pragma(#text)
#define ON_THREADS(threads, share, call)                                                          \
    do {                                                                                          \
        if ((share) && (threads) > 1) {                                                           \
            PRAGMA(omp parallel num_threads(threads))                                             \
            call;                                                                                 \
        } else {                                                                                  \
            call;                                                                                 \
        }                                                                                         \
    } while (0)

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
    const int32_t *adapters;        /* [count], which of the model's, -1 for none; or NULL */
};

/* The table of a layer's positions. */
enum rope { GLOBAL, LOCAL, NO_ROPE };

/* Of the gate; CLAMPED is gpt-oss's. */
enum activation { SILU, GELU, CLAMPED };

struct model {
    int32_t hidden, ffn, heads, kv_heads, dim, num_slots;
    int32_t threads; /* at most; small work takes one */
    float eps, scale;
    const float *cos_sin; /* [positions, rotary] */
    /* Differences from Llama; its own values are in brackets. */
    const float *local_cos_sin; /* of layers that say so, like cos_sin */
    int32_t rotary;             /* numbers of a head that positions rotate (dim) */
    int32_t activation;         /* enum activation (SILU); GELU is its approximation by tanh */
    int32_t wide_norms;         /* norms of queries and keys are over all heads together (0) */
    float residual_scale;       /* of what attention and the MLP add (1) */
    float attention_cap;        /* scores become cap * tanh(score / cap) (0: as they are) */
    float logit_divisor;        /* of logits, before their cap (1) */
    float logit_cap;            /* (0) */
    float gate_slope, gate_limit; /* of a clamped activation */
    int32_t chunked;              /* windows do not slide: they begin where their size divides a position (0) */
    int32_t turned_norms;         /* queries and keys are normed after they are turned, where they are (0) */
    int32_t scaled_inputs;        /* an expert's share is a sigmoid, and of what it reads, not gives (0) */
    const float *temperatures;    /* [positions], of queries that nothing turns, or NULL */
    const struct adapted *const *adapters; /* [adapters], each of [layers], or NULL */
};

struct weight {
    const void *packed;
    int64_t packing; /* see matmul.c */
};

/* What an adapter adds to `outputs` of a product's outputs, from the first one on: b * inner. */
struct low_part {
    struct weight b;
    int64_t rank, first, outputs;
};

/* What an adapter adds to a product with x. All parts' inner numbers are a * x, part after part. */
struct low_rank {
    struct weight a;
    int64_t rank, num_parts; /* no parts: nothing */
    struct low_part parts[3];
};

/* What an adapter adds to the products of a layer. */
struct adapted {
    struct low_rank qkv, out, gate_up, down;
};

/* How tokens choose among a layer's experts: `top` of `count`, of inner width `size`. */
struct experts {
    int32_t count, top, size;
    int32_t normed; /* the chosen ones' shares are divided by their sum */
    struct weight router;
    const struct weight *gate_up, *down; /* [count] */
    const void *router_bias, *const *gate_up_bias, *const *down_bias; /* [count], or NULL */
    struct weight shared_gate_up, shared_down; /* of an expert that all rows take, or nothing */
};

/* Which logits are worth their full products: rows * (encode * x) is near them. */
struct shortlist {
    struct weight encode, rows; /* [rank, hidden], [vocab, rank] */
    const uint16_t *exact;      /* the output layer, [vocab, hidden], bfloat16 */
    int32_t rank;
    float margin; /* computed in full: those that look less than this below the best one */
};

struct layer {
    const void *input_norm; /* or NULL */
    struct weight qkv;
    const void *qkv_bias, *q_norm, *k_norm;
    struct weight out;
    const void *out_bias, *post_norm; /* or NULL */
    struct weight gate_up;
    const void *gate_up_bias;
    struct weight down;
    const void *down_bias;
    int64_t window; /* 0: full attention */
    /* Differences from Llama. */
    const void *attention_norm, *mlp_norm; /* of what they add to the residual stream, or NULL */
    int64_t rope;                          /* enum rope: cos_sin, local_cos_sin or none */
    const void *sinks;                     /* [heads], further scores of each softmax, or NULL */
    const struct experts *experts;         /* in place of gate_up and down, or NULL */
};

/* matmul.c */
int linear_f32(const float *x, const void *packed, int packing, const float *bias, float *out, int rows,
               int k, int outputs, int threads);
int linear_bf16(const uint16_t *x, const void *packed, int packing, const uint16_t *bias, uint16_t *out,
                int rows, int k, int outputs, int threads);
