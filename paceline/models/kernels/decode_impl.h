/* Included once for each element type; ELEM, LOAD(x), STORE(f) and NAME(f) are set by decode.c. */

/* x += delta (when given), out = weight * normalised x. */
EXPORT void NAME(add_rmsnorm)(ELEM *x, const ELEM *delta, const ELEM *weight, ELEM *out,
                              int rows, int dim, float eps)
{
    for (int r = 0; r < rows; r++) {
        ELEM *xr = x + (size_t)r * dim;
        ELEM *outr = out + (size_t)r * dim;
        if (delta) {
            const ELEM *dr = delta + (size_t)r * dim;
            for (int i = 0; i < dim; i++)
                xr[i] = STORE(LOAD(xr[i]) + LOAD(dr[i]));
        }
        float total = 0.0f;
        for (int i = 0; i < dim; i++)
            total += LOAD(xr[i]) * LOAD(xr[i]);
        const float scale = 1.0f / sqrtf(total / dim + eps);
        for (int i = 0; i < dim; i++)
            outr[i] = STORE(LOAD(weight[i]) * LOAD(STORE(LOAD(xr[i]) * scale)));
    }
}

static inline void NAME(head_norm)(ELEM *x, const ELEM *weight, int dim, float eps)
{
    float total = 0.0f;
    for (int i = 0; i < dim; i++)
        total += LOAD(x[i]) * LOAD(x[i]);
    const float scale = 1.0f / sqrtf(total / dim + eps);
    for (int i = 0; i < dim; i++)
        x[i] = STORE(LOAD(weight[i]) * LOAD(STORE(LOAD(x[i]) * scale)));
}

static inline void NAME(rotate)(ELEM *x, const float *cosine, const float *sine, int half)
{
    for (int i = 0; i < half; i++) {
        const float a = LOAD(x[i]), b = LOAD(x[i + half]);
        x[i] = STORE(a * cosine[i] - b * sine[i]);
        x[i + half] = STORE(b * cosine[i] + a * sine[i]);
    }
}

/* Rotates queries and keys in place and stores keys and values in their cache slots.
 * qkv: [rows, (heads + 2 * kv_heads) * dim]; cos_sin: [positions, dim], cosines then sines. */
EXPORT void NAME(rope_store)(ELEM *qkv, const float *cos_sin, const int32_t *positions,
                             const int32_t *slots, ELEM *keys, ELEM *values, int rows, int heads,
                             int kv_heads, int dim, const ELEM *q_norm, const ELEM *k_norm,
                             float eps)
{
    const int stride = (heads + 2 * kv_heads) * dim;
    for (int r = 0; r < rows; r++) {
        ELEM *row = qkv + (size_t)r * stride;
        const float *cosine = cos_sin + (size_t)positions[r] * dim;
        for (int h = 0; h < heads + kv_heads; h++) {
            ELEM *x = row + h * dim;
            const ELEM *norm = h < heads ? q_norm : k_norm;
            if (norm)
                NAME(head_norm)(x, norm, dim, eps);
            NAME(rotate)(x, cosine, cosine + dim / 2, dim / 2);
        }
        const size_t width = (size_t)kv_heads * dim;
        memcpy(keys + slots[r] * width, row + heads * dim, width * sizeof(ELEM));
        memcpy(values + slots[r] * width, row + (heads + kv_heads) * dim, width * sizeof(ELEM));
    }
}

ALWAYS_INLINE void NAME(attend_head)(const ELEM *query, const ELEM *keys, const ELEM *values,
                                     ELEM *out, const int32_t *context, int length, size_t width,
                                     float scale, float *scores, const int dim)
{
    float q[MAX_HEAD_DIM];
    for (int d = 0; d < dim; d++)
        q[d] = LOAD(query[d]) * scale;
    float top = -INFINITY;
    for (int j = 0; j < length; j++) {
        const ELEM *key = keys + context[j] * width;
        float dot = 0.0f;
        for (int d = 0; d < dim; d++)
            dot += q[d] * LOAD(key[d]);
        scores[j] = dot;
        top = dot > top ? dot : top;
    }
    float total = 0.0f;
    for (int j = 0; j < length; j++) {
        scores[j] = fast_exp(scores[j] - top);
        total += scores[j];
    }
    /* Four accumulators hide the latency of the additions; which one a position goes to depends
     * on the position alone. */
    float acc[4][MAX_HEAD_DIM];
    for (int d = 0; d < dim; d++)
        acc[0][d] = acc[1][d] = acc[2][d] = acc[3][d] = 0.0f;
    int j = 0;
    for (; j + 4 <= length; j += 4) {
        const ELEM *v0 = values + context[j] * width, *v1 = values + context[j + 1] * width;
        const ELEM *v2 = values + context[j + 2] * width, *v3 = values + context[j + 3] * width;
        for (int d = 0; d < dim; d++) {
            acc[0][d] += scores[j] * LOAD(v0[d]);
            acc[1][d] += scores[j + 1] * LOAD(v1[d]);
            acc[2][d] += scores[j + 2] * LOAD(v2[d]);
            acc[3][d] += scores[j + 3] * LOAD(v3[d]);
        }
    }
    for (; j < length; j++) {
        const ELEM *value = values + context[j] * width;
        for (int d = 0; d < dim; d++)
            acc[0][d] += scores[j] * LOAD(value[d]);
    }
    for (int d = 0; d < dim; d++)
        out[d] = STORE(((acc[0][d] + acc[1][d]) + (acc[2][d] + acc[3][d])) / total);
}

/* Attention of each row over its own context: the first prefix_length[r] slots of
 * prefix[r] and then path_length[r] slots of path[r]. Everything a row computes depends on that
 * list alone, so the result is the same in any batch, tree or chunk. */
EXPORT int NAME(attention)(const ELEM *qkv, const ELEM *keys, const ELEM *values, ELEM *out,
                           int rows, int heads, int kv_heads, int dim,
                           const int32_t *const *prefix, const int32_t *prefix_start,
                           const int32_t *prefix_length, const int32_t *const *path,
                           const int32_t *path_length, int max_length, float scale)
{
    const size_t width = (size_t)kv_heads * dim;
    const int group = heads / kv_heads, stride = (heads + 2 * kv_heads) * dim;
    int failed = 0;
#pragma omp parallel if (rows > 32)
    {
        const size_t padded = ((size_t)max_length + 15) & ~(size_t)15;
        float *scores = aligned_alloc(64, padded * (sizeof(float) + sizeof(int32_t)));
        int32_t *context = (int32_t *)(scores + padded);
        if (!scores)
            failed = 1;
#pragma omp for schedule(dynamic, 8)
        for (int r = 0; r < rows; r++) {
            if (!scores)
                continue;
            const int first = prefix_length[r] - prefix_start[r];
            const int length = first + path_length[r];
            memcpy(context, prefix[r] + prefix_start[r], first * sizeof(int32_t));
            memcpy(context + first, path[r], path_length[r] * sizeof(int32_t));
            for (int h = 0; h < heads; h++) {
                const ELEM *query = qkv + (size_t)r * stride + h * dim;
                const ELEM *k = keys + (h / group) * dim, *v = values + (h / group) * dim;
                ELEM *o = out + ((size_t)r * heads + h) * dim;
                switch (dim) {
                case 32:
                    NAME(attend_head)(query, k, v, o, context, length, width, scale, scores, 32);
                    break;
                case 64:
                    NAME(attend_head)(query, k, v, o, context, length, width, scale, scores, 64);
                    break;
                case 128:
                    NAME(attend_head)(query, k, v, o, context, length, width, scale, scores, 128);
                    break;
                default:
                    NAME(attend_head)(query, k, v, o, context, length, width, scale, scores, dim);
                }
            }
        }
        free(scores);
    }
    return failed;
}

/* out = silu(gate) * up, from the fused [rows, 2 * dim] projection. */
EXPORT void NAME(silu_mul)(const ELEM *gate_up, ELEM *out, int rows, int dim)
{
    for (int r = 0; r < rows; r++) {
        const ELEM *gate = gate_up + (size_t)r * 2 * dim, *up = gate + dim;
        ELEM *o = out + (size_t)r * dim;
        for (int i = 0; i < dim; i++) {
            const float g = LOAD(gate[i]);
            o[i] = STORE(LOAD(STORE(g / (1.0f + fast_exp(-g)))) * LOAD(up[i]));
        }
    }
}
