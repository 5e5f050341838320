/* Included once for each element type; ELEM, LOAD(x), STORE(f), the same for vectors, VLOAD(from) and
 * VSTORE(to, v), and NAME(f) are set by decode.c. */

/* x += delta (when given), out = weight * normalised x. */
static void NAME(add_rmsnorm)(ELEM *x, const ELEM *delta, const ELEM *weight, ELEM *out,
                              int rows, int dim, float eps, int threads)
{
#pragma omp parallel for num_threads(threads) if ((double)rows * dim > SHARED_NUMBERS)
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
static void NAME(rope_store)(ELEM *qkv, const float *cos_sin, ELEM *keys, ELEM *values, int heads,
                             int kv_heads, int dim, const struct rows *rows, const ELEM *q_norm,
                             const ELEM *k_norm, float eps, int threads)
{
    const int stride = (heads + 2 * kv_heads) * dim;
#pragma omp parallel for num_threads(threads) if ((double)rows->count * stride > SHARED_NUMBERS)
    for (int r = 0; r < rows->count; r++) {
        ELEM *row = qkv + (size_t)r * stride;
        const float *cosine = cos_sin + (size_t)rows->positions[r] * dim;
        for (int h = 0; h < heads + kv_heads; h++) {
            ELEM *x = row + h * dim;
            const ELEM *norm = h < heads ? q_norm : k_norm;
            if (norm)
                NAME(head_norm)(x, norm, dim, eps);
            NAME(rotate)(x, cosine, cosine + dim / 2, dim / 2);
        }
        const size_t width = (size_t)kv_heads * dim;
        memcpy(keys + rows->slots[r] * width, row + heads * dim, width * sizeof(ELEM));
        memcpy(values + rows->slots[r] * width, row + (heads + kv_heads) * dim,
               width * sizeof(ELEM));
    }
}

/* One head's keys, or values, of some slots as float32.  # [count][dim] */
ALWAYS_INLINE void NAME(gather)(const ELEM *entries, const int32_t *slots, int count, size_t width,
                                float *out, const int dim)
{
    for (int i = 0; i < count; i++)
        for (int d = 0; d < dim; d += WIDTH)
            *(vec *)(out + i * dim + d) = VLOAD(entries + slots[i] * width + d);
}

/* One query head of several rows over their contexts, for head dimensions that are a multiple of 16.
 * Neighbouring rows have most of a context in common: all take a few slots before the next ones, which
 * are read once then. What a row computes does not depend on the others.
 * query, out: of the first row, the others follow after a stride; scores: [rows][padded]; shared: slots
 * that a context begins with, as the last row's does. */
ALWAYS_INLINE void NAME(attend_head)(const ELEM *query, size_t stride, const ELEM *keys,
                                     const ELEM *values, ELEM *out, size_t out_stride,
                                     const int32_t *const *contexts, const int *lengths,
                                     const int *shared, size_t padded, int rows, size_t width, float scale,
                                     float *scores, const int dim)
{
    float queries[BLOCK_ROWS][MAX_HEAD_DIM], sums[BLOCK_ROWS][SUMS * MAX_HEAD_DIM];
    float totals[BLOCK_ROWS], entries[SHARED_FLOATS] __attribute__((aligned(64)));
    const int last = rows - 1, most = SHARED_FLOATS / dim;
    int longest = 0;
    for (int r = 0; r < rows; r++) {
        longest = lengths[r] > longest ? lengths[r] : longest;
        for (int d = 0; d < dim; d += WIDTH)
            *(vec *)(queries[r] + d) = VLOAD(query + r * stride + d) * scale;
        for (int d = 0; d < SUMS * dim; d += WIDTH) /* memset takes half as wide stores */
            *(vec *)(sums[r] + d) = (vec){0};
    }
    for (int j = 0; j < longest; j += WIDTH) {
        int held = 0; /* whether the last row's entries are gathered */
        for (int r = last; r >= 0; r--) {
            const int count = lengths[r] - j < WIDTH ? lengths[r] - j : WIDTH;
            if (count <= 0)
                continue;
            if (!held || j + count > shared[r])
                NAME(gather)(keys, contexts[r] + j, count, width, entries, dim);
            held = r == last || (held && j + count <= shared[r]);
            *(vec *)(scores + r * padded + j) = score(queries[r], entries, dim);
        }
    }
    for (int r = 0; r < rows; r++)
        totals[r] = weigh(scores + r * padded, lengths[r]);
    for (int j = 0; j < longest; j += most) {
        int held = 0;
        for (int r = last; r >= 0; r--) {
            const int count = lengths[r] - j < most ? lengths[r] - j : most;
            const float *weights = scores + r * padded + j;
            if (count <= 0)
                continue;
            if (held && r && j + most <= shared[r] && j + most <= shared[r - 1]) {
                r--; /* two rows use a value while it is in a register */
                add_values(weights - padded, padded, entries, most, sums[r], SUMS * MAX_HEAD_DIM, 2,
                           dim);
                continue;
            }
            if (!held || j + count > shared[r])
                NAME(gather)(values, contexts[r] + j, count, width, entries, dim);
            held = r == last || (held && j + count <= shared[r]);
            add_values(weights, padded, entries, count, sums[r], SUMS * MAX_HEAD_DIM, 1, dim);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int d = 0; d < dim; d += WIDTH) {
            const float *s = sums[r] + d;
            const vec even = *(const vec *)s + *(const vec *)(s + dim);
            const vec odd = *(const vec *)(s + 2 * dim) + *(const vec *)(s + 3 * dim);
            VSTORE(out + r * out_stride + d, (even + odd) / totals[r]);
        }
}

/* The same for any head dimension. */
static void NAME(attend_any)(const ELEM *query, const ELEM *keys, const ELEM *values, ELEM *out,
                             const int32_t *context, int length, size_t width, float scale,
                             float *scores, int dim)
{
    float top = -INFINITY;
    for (int j = 0; j < length; j++) {
        const ELEM *key = keys + context[j] * width;
        float dot = 0.0f;
        for (int d = 0; d < dim; d++)
            dot += LOAD(query[d]) * LOAD(key[d]);
        scores[j] = dot * scale;
        top = scores[j] > top ? scores[j] : top;
    }
    float total = 0.0f, acc[MAX_HEAD_DIM] = {0};
    for (int j = 0; j < length; j++) {
        const ELEM *value = values + context[j] * width;
        const float weight = exp_one(scores[j] - top);
        total += weight;
        for (int d = 0; d < dim; d++)
            acc[d] += weight * LOAD(value[d]);
    }
    for (int d = 0; d < dim; d++)
        out[d] = STORE(acc[d] / total);
}

/* Attention of each row over the last `window` slots of its own context (all of them for window
 * 0): the first prefix_length[r] slots of prefix[r] and then path_length[r] slots of path[r].
 * Everything a row computes depends on that list alone, so the result is the same in any batch,
 * tree or chunk. */
static int NAME(attention)(const ELEM *qkv, const ELEM *keys, const ELEM *values, ELEM *out,
                           int heads, int kv_heads, int dim, const struct rows *rows,
                           const int32_t *blocks, int num_blocks, int window, float scale,
                           int threads)
{
    const size_t width = (size_t)kv_heads * dim, out_stride = (size_t)heads * dim;
    const size_t stride = (size_t)(heads + 2 * kv_heads) * dim;
    const int group = heads / kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(threads) if ((double)rows->count * rows->longest * heads > 10000)
    {
        const size_t padded = ((size_t)rows->longest + WIDTH - 1) / WIDTH * WIDTH;
        const int most = rows->count < BLOCK_ROWS ? rows->count : BLOCK_ROWS;
        float *scores = aligned_alloc(64, most * padded * (sizeof(float) + sizeof(int32_t)));
        int32_t *memory = (int32_t *)(scores + most * padded);
        if (!scores)
            failed = 1;
#pragma omp for schedule(dynamic)
        for (int item = 0; item < num_blocks * kv_heads; item++) {
            const int block = item / kv_heads, g = item % kv_heads;
            const int from = blocks[block], count = scores ? blocks[block + 1] - from : 0;
            const int32_t *contexts[BLOCK_ROWS];
            int lengths[BLOCK_ROWS], shared[BLOCK_ROWS], last_prefix = 0, last_hidden = 0;
            for (int r = count - 1; r >= 0; r--) {
                const int prefix = rows->prefix_length[from + r], path = rows->path_length[from + r];
                const int hidden = window && prefix + path > window ? prefix + path - window : 0;
                const int skipped = hidden < prefix ? hidden : prefix;
                contexts[r] = rows->prefix[from + r] + skipped;
                if (path) { /* two places become one */
                    int32_t *context = memory + r * padded;
                    memcpy(context, contexts[r], (prefix - skipped) * sizeof *context);
                    memcpy(context + prefix - skipped, rows->path[from + r] + (hidden - skipped),
                           (path - (hidden - skipped)) * sizeof *context);
                    contexts[r] = context;
                }
                lengths[r] = prefix + path - hidden;
                if (r == count - 1) {
                    last_prefix = prefix;
                    last_hidden = hidden;
                }
                const int common = prefix < last_prefix ? prefix : last_prefix;
                shared[r] = hidden == last_hidden ? common - hidden : 0;
            }
            const ELEM *k = keys + g * dim, *v = values + g * dim;
            for (int h = g * group; h < (g + 1) * group; h++) {
                const ELEM *query = qkv + from * stride + h * dim;
                ELEM *o = out + from * out_stride + h * dim;
#define ATTEND(d)                                                                                  \
    NAME(attend_head)(query, stride, k, v, o, out_stride, contexts, lengths, shared, padded, count,   \
                      width, scale, scores, d)
                if (dim == 32)
                    ATTEND(32);
                else if (dim == 64)
                    ATTEND(64);
                else if (dim == 128)
                    ATTEND(128);
                else
                    for (int r = 0; r < count; r++)
                        NAME(attend_any)(query + r * stride, k, v, o + r * out_stride,
                                         contexts[r], lengths[r], width, scale, scores,
                                         dim);
#undef ATTEND
            }
        }
        free(scores);
    }
    return failed;
}

/* out = silu(gate) * up, from the fused [rows, 2 * dim] projection. */
static void NAME(silu_mul)(const ELEM *gate_up, ELEM *out, int rows, int dim, int threads)
{
#pragma omp parallel for num_threads(threads) if ((double)rows * dim > SHARED_NUMBERS)
    for (int r = 0; r < rows; r++) {
        const ELEM *gate = gate_up + (size_t)r * 2 * dim, *up = gate + dim;
        ELEM *o = out + (size_t)r * dim;
        int i = 0;
        for (; i + WIDTH <= dim; i += WIDTH) {
            const vec g = VLOAD(gate + i);
            ELEM rounded[WIDTH];
            VSTORE(rounded, g / (1.0f + exp_each(-g)));
            VSTORE(o + i, VLOAD(rounded) * VLOAD(up + i));
        }
        for (; i < dim; i++) {
            const float g = LOAD(gate[i]);
            o[i] = STORE(LOAD(STORE(g / (1.0f + exp_one(-g)))) * LOAD(up[i]));
        }
    }
}

#define MULTIPLY(x, name, out, inputs, outputs)                                                    \
    NAME(linear)(x, l->name.packed, (int)l->name.packing, l->name##_bias, out, count, inputs, outputs, \
                 m->threads)

/* Layers [first, last) on x: [rows, hidden], in place, without the final norm: x is the residual
 * stream afterwards. states: what it was after each of these layers, [last - first, rows, hidden],
 * or NULL. Returns non-zero when memory runs out. */
EXPORT int NAME(run_layers)(const struct model *m, const struct layer *layers, int first, int last,
                            ELEM *x, ELEM *keys, ELEM *values, const struct rows *rows,
                            ELEM *states)
{
    const size_t state_size = (size_t)rows->count * m->hidden;
    const int count = rows->count, qkv_width = (m->heads + 2 * m->kv_heads) * m->dim;
    const int attended_width = m->heads * m->dim;
    const size_t layer_size = (size_t)m->num_slots * m->kv_heads * m->dim;
    const size_t widest = (size_t)m->hidden * 2 + qkv_width + attended_width + 3 * (size_t)m->ffn;
    const size_t bytes = count * widest * sizeof(ELEM) + (count + 1) * sizeof(int32_t);
    ELEM *memory = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!memory)
        return 1;
    ELEM *normed = memory, *delta = normed + (size_t)count * m->hidden;
    ELEM *qkv = delta + (size_t)count * m->hidden, *attended = qkv + (size_t)count * qkv_width;
    ELEM *gate_up = attended + (size_t)count * attended_width;
    ELEM *inner = gate_up + (size_t)count * 2 * m->ffn;
    int32_t *blocks = (int32_t *)(inner + (size_t)count * m->ffn), num_blocks = 0;
    for (int r = 0; r < count; r++)
        if (r == 0 || rows->prefix[r] != rows->prefix[r - 1] || r - blocks[num_blocks - 1] == BLOCK_ROWS)
            blocks[num_blocks++] = r;
    blocks[num_blocks] = count;
    const ELEM *pending = NULL;
    int failed = 0;
    for (int i = first; i < last && !failed; i++) {
        const struct layer *l = layers + i;
        ELEM *k = keys + i * layer_size, *v = values + i * layer_size;
        NAME(add_rmsnorm)(x, pending, l->input_norm, normed, count, m->hidden, m->eps, m->threads);
        if (states && i > first)
            memcpy(states + (i - first - 1) * state_size, x, state_size * sizeof(ELEM));
        failed = MULTIPLY(normed, qkv, qkv, m->hidden, qkv_width);
        NAME(rope_store)(qkv, m->cos_sin, k, v, m->heads, m->kv_heads, m->dim, rows, l->q_norm,
                         l->k_norm, m->eps, m->threads);
        failed |= NAME(attention)(qkv, k, v, attended, m->heads, m->kv_heads, m->dim, rows, blocks,
                                  num_blocks, l->window, m->scale, m->threads);
        failed |= MULTIPLY(attended, out, delta, attended_width, m->hidden);
        NAME(add_rmsnorm)(x, delta, l->post_norm, normed, count, m->hidden, m->eps, m->threads);
        failed |= MULTIPLY(normed, gate_up, gate_up, m->hidden, 2 * m->ffn);
        NAME(silu_mul)(gate_up, inner, count, m->ffn, m->threads);
        failed |= MULTIPLY(inner, down, delta, m->ffn, m->hidden);
        pending = delta;
    }
    if (pending)
        for (size_t i = 0; i < (size_t)count * m->hidden; i++)
            x[i] = STORE(LOAD(x[i]) + LOAD(pending[i]));
    if (states && last > first)
        memcpy(states + (last - first - 1) * state_size, x, state_size * sizeof(ELEM));
    free(memory);
    return failed;
}

#undef MULTIPLY

static float NAME(highest)(const ELEM *x, int size)
{
    vec tops = (vec){0} - INFINITY;
    int i = 0;
    for (; i + WIDTH <= size; i += WIDTH)
        tops = larger(tops, VLOAD(x + i));
    float top = largest(tops);
    for (; i < size; i++)
        top = LOAD(x[i]) > top ? LOAD(x[i]) : top;
    return top;
}

/* The sum of exp(x - top). */
static float NAME(sum_exp)(const ELEM *x, int size, float top)
{
    vec sums = {0};
    int i = 0;
    for (; i + WIDTH <= size; i += WIDTH)
        sums += exp_each(VLOAD(x + i) - top);
    float sum = 0.0f;
    for (int j = 0; j < WIDTH; j++)
        sum += sums[j];
    for (; i < size; i++)
        sum += exp_one(LOAD(x[i]) - top);
    return sum;
}

/* Gives `count` sequences tokens that they have not seen, and continues them by `steps` tokens each:
 * every token is the argmax after the one before. One call instead of one for each token, because a
 * small model takes less time than the code around it.
 * given: [num_given], sequence after sequence, at least one for each; ends: [count], the place of each
 * sequence's last one. tokens: filled, [steps, count]. rows: of the given tokens, then those of each
 * further step, one step after the other.
 * final_norm: NULL where logits come from the last state as it is.
 * states: the residual stream after each layer, [steps, num_layers, count, hidden], or NULL; with them,
 * and with fuse, a sequence is given one token.
 * fuse: with it a layer's input is fuse * [embedding of the token, feature], where the feature is
 * the state of the step before, and features ([count, hidden], given) that of the first step.
 * stop_below: [steps, count] or NULL. With it a sequence ends after a token whose probability is
 * less, and lengths ([count], given as `steps`) is how many tokens it got.
 * Returns non-zero when memory runs out. */
EXPORT int NAME(greedy_chain)(const struct model *m, const struct layer *layers, int num_layers,
                              const ELEM *embedding, const ELEM *final_norm,
                              const struct weight *head, int vocab, ELEM *keys, ELEM *values,
                              const struct rows *rows, const int64_t *given, int num_given,
                              const int32_t *ends, int count, int steps, int64_t *tokens,
                              ELEM *states, const struct weight *fuse, const ELEM *fuse_bias,
                              const ELEM *features, const float *stop_below, int32_t *lengths)
{
    const size_t hidden = m->hidden, bytes = hidden * sizeof(ELEM);
    const size_t size = num_given * bytes + count * (3 * bytes + vocab * sizeof(ELEM));
    ELEM *x = aligned_alloc(64, (size + 63) & ~(size_t)63);
    if (!x)
        return 1;
    ELEM *normed = x + num_given * hidden, *both = normed + count * hidden;
    ELEM *logits = both + count * 2 * hidden;
    int failed = 0, left = count, at = 0;
    for (int s = 0; s < steps && left && !failed; s++) {
        const int num_rows = s ? count : num_given;
        const int64_t *in = s ? tokens + (s - 1) * count : given;
        const struct rows step = {
            num_rows, rows->longest, rows->positions + at, rows->slots + at,
            rows->prefix_length + at, rows->path_length + at, rows->prefix + at, rows->path + at,
        };
        for (int r = 0; r < num_rows; r++) {
            const ELEM *token = embedding + in[r] * hidden;
            if (fuse) {
                ELEM *pair = both + r * 2 * hidden;
                memcpy(pair, token, bytes);
                memcpy(pair + hidden, (s ? x : features) + r * hidden, bytes);
            } else
                memcpy(x + r * hidden, token, bytes);
        }
        if (fuse)
            failed = NAME(linear)(both, fuse->packed, (int)fuse->packing, fuse_bias, x, count,
                                  2 * m->hidden, m->hidden, m->threads);
        failed |= NAME(run_layers)(m, layers, 0, num_layers, x, keys, values, &step,
                                   states ? states + at * hidden * num_layers : NULL);
        if (num_rows > count)
            for (int r = 0; r < count; r++)
                memmove(x + r * hidden, x + ends[r] * hidden, bytes);
        if (final_norm)
            NAME(add_rmsnorm)(x, NULL, final_norm, normed, count, m->hidden, m->eps, 1);
        failed |= NAME(linear)(final_norm ? normed : x, head->packed, (int)head->packing, NULL, logits,
                               count, m->hidden, vocab, m->threads);
        for (int r = 0; r < count; r++) {
            const ELEM *row = logits + (size_t)r * vocab;
            const float best = NAME(highest)(row, vocab);
            int first = 0;
            while (first < vocab - 1 && LOAD(row[first]) != best)
                first++;
            tokens[s * count + r] = first;
            if (stop_below && lengths[r] == steps &&
                1.0f / NAME(sum_exp)(row, vocab, best) < stop_below[s * count + r]) {
                lengths[r] = s + 1;
                left--;
            }
        }
        at += num_rows;
    }
    free(x);
    return failed;
}

/* out = weight * normalised x, row by row. */
EXPORT void NAME(rmsnorm)(const ELEM *x, const ELEM *weight, ELEM *out, int rows, int dim, float eps)
{
    NAME(add_rmsnorm)((ELEM *)x, NULL, weight, out, rows, dim, eps, 1);
}
