/* decode.c includes this once for each element type, with ELEM, LOAD(x) and NAME(f) set. */

#define READ(x, at, left) read_(x, at, left, sizeof(ELEM) == 2)
#define WRITE(out, at, v, left) write_(out, at, v, left, sizeof(ELEM) == 2)

/* Rounded to this type, in float32. */
ALWAYS_INLINE vec NAME(rounded)(vec v)
{
    ELEM all[WIDTH];
    WRITE(all, 0, v, WIDTH);
    return READ(all, 0, WIDTH);
}

/* out = weight * normalised x; out may be x. */
ALWAYS_INLINE void NAME(normalise)(const ELEM *x, const ELEM *weight, ELEM *out, int dim, float eps)
{
    vec squares = set_(0.0f);
    for (int i = 0; i < dim; i += WIDTH) {
        const vec v = READ(x, i, dim - i);
        squares = fma_(v, v, squares);
    }
    const vec scale = set_(1.0f / sqrtf(sum_of(squares) / dim + eps));
    for (int i = 0; i < dim; i += WIDTH) {
        const vec v = NAME(rounded)(mul_(READ(x, i, dim - i), scale));
        WRITE(out, i, mul_(READ(weight, i, dim - i), v), dim - i);
    }
}

static void NAME(add_to)(ELEM *x, const ELEM *delta, int dim)
{
    for (int i = 0; i < dim; i += WIDTH)
        WRITE(x, i, add_(READ(x, i, dim - i), READ(delta, i, dim - i)), dim - i);
}

/* x += delta (when given), out = weight * normalised x. */
static void NAME(add_rmsnorm)(ELEM *x, const ELEM *delta, const ELEM *weight, ELEM *out,
                              int rows, int dim, float eps, int threads)
{
#pragma omp parallel for num_threads(threads) if ((double)rows * dim > SHARED_NUMBERS)
    for (int r = 0; r < rows; r++) {
        ELEM *xr = x + (size_t)r * dim;
        if (delta)
            NAME(add_to)(xr, delta + (size_t)r * dim, dim);
        NAME(normalise)(xr, weight, out + (size_t)r * dim, dim, eps);
    }
}

static inline void NAME(rotate)(ELEM *x, const float *cosine, const float *sine, int half)
{
    for (int i = 0; i < half; i += WIDTH) {
        const int left = half - i;
        const vec c = read_(cosine, i, left, 0), s = read_(sine, i, left, 0);
        const vec a = READ(x, i, left), b = READ(x, half + i, left);
        const vec turned = fma_(a, c, sub_(set_(0.0f), mul_(b, s)));
        WRITE(x, i, turned, left);
        WRITE(x, half + i, fma_(b, c, mul_(a, s)), left);
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
                NAME(normalise)(x, norm, x, dim, eps);
            NAME(rotate)(x, cosine, cosine + dim / 2, dim / 2);
        }
        const size_t width = (size_t)kv_heads * dim;
        memcpy(keys + rows->slots[r] * width, row + heads * dim, width * sizeof(ELEM));
        memcpy(values + rows->slots[r] * width, row + (heads + kv_heads) * dim,
               width * sizeof(ELEM));
    }
}

/* Attention of each row over the last `window` slots of its own context (all of them for window 0): the
 * first prefix_length[r] slots of prefix[r], then path_length[r] slots of path[r]. A row's result depends
 * on this list alone, so it is the same in any batch, tree or chunk. */
static int NAME(attention)(const ELEM *qkv, const ELEM *keys, const ELEM *values, ELEM *out,
                           int heads, int kv_heads, int dim, const struct rows *rows,
                           const int32_t *blocks, int num_blocks, int window, float scale,
                           int threads)
{
    const size_t width = (size_t)kv_heads * dim, out_stride = (size_t)heads * dim;
    const size_t stride = (size_t)(heads + 2 * kv_heads) * dim;
    const int group = heads / kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(threads) if ((double)rows->count * rows->longest * heads > 1e4 / SLOWER)
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
                attend(query, stride, k, v, o, out_stride, contexts, lengths, shared, padded, count, width,
                       scale, scores, h == g * group, sizeof(ELEM) == 2, dim);
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
        for (int i = 0; i < dim; i += WIDTH) {
            const vec g = READ(gate, i, dim - i);
            const vec smaller = exp_(sub_(set_(0.0f), g));
            const vec activated = NAME(rounded)(div_(g, add_(set_(1.0f), smaller)));
            WRITE(o, i, mul_(activated, READ(up, i, dim - i)), dim - i);
        }
    }
}

#define MULTIPLY(x, name, out, inputs, outputs)                                                    \
    NAME(linear)(x, l->name.packed, (int)l->name.packing, l->name##_bias, out, count, inputs, outputs, \
                 m->threads)

/* Layers [first, last) on x: [rows, hidden], in place, without the final norm: afterwards x is the residual
 * stream. states: filled with x after each of these layers, [last - first, rows, hidden], or NULL. Returns
 * non-zero if memory runs out. */
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
        NAME(add_to)(x, pending, count * m->hidden);
    if (states && last > first)
        memcpy(states + (last - first - 1) * state_size, x, state_size * sizeof(ELEM));
    free(memory);
    return failed;
}

#undef MULTIPLY

static float NAME(highest)(const ELEM *x, int size)
{
    vec tops = set_(-INFINITY);
    int i = 0;
    for (; i + WIDTH <= size; i += WIDTH)
        tops = max_(tops, READ(x, i, WIDTH));
    float top = largest(tops);
    for (; i < size; i++)
        top = LOAD(x[i]) > top ? LOAD(x[i]) : top;
    return top;
}

/* The sum of exp(x - top). */
static float NAME(sum_exp)(const ELEM *x, int size, float top)
{
    vec sums = set_(0.0f);
    int i = 0;
    for (; i + WIDTH <= size; i += WIDTH)
        sums = add_(sums, exp_(sub_(READ(x, i, WIDTH), set_(top))));
    float sum = sum_of(sums);
    for (; i < size; i++) {
        float one[W];
        nat_store(one, nat_exp(nat_set(LOAD(x[i]) - top)));
        sum += one[0];
    }
    return sum;
}

/* Gives `count` sequences tokens that they have not seen, and continues each by `steps` tokens: every token
 * is the argmax after the one before. All steps in one call, because a small model takes less time than the
 * code around it.
 * given: [num_given], sequence after sequence, at least one for each; ends: [count], the place of each
 * sequence's last one. tokens: filled, [steps, count]. rows: of the given tokens, then those of each
 * further step, one step after the other.
 * final_norm: NULL if logits come from the last state as it is.
 * vocabulary: the token of each of the head's `vocab` logits, or NULL if they are all tokens.
 * states: filled with the residual stream after each layer, [steps, num_layers, count, hidden], or NULL.
 * With states or fuse, each sequence is given one token.
 * fuse: with it, the input of layer fuse_at is fuse * [state before that layer, feature]; the layers before
 * it read the token alone. The feature is the state of the step before; for the first step, features
 * ([count, hidden]) has it.
 * stop_below: [steps, count] or NULL. With it, a sequence ends after a token whose probability is less, and
 * lengths ([count], each `steps` at first) becomes the number of its tokens.
 * Returns non-zero if memory runs out. */
EXPORT int NAME(greedy_chain)(const struct model *m, const struct layer *layers, int num_layers,
                              const ELEM *embedding, const ELEM *final_norm,
                              const struct weight *head, int vocab, const int64_t *vocabulary,
                              ELEM *keys, ELEM *values, const struct rows *rows,
                              const int64_t *given, int num_given, const int32_t *ends,
                              int count, int steps, int64_t *tokens, ELEM *states, const struct weight *fuse, int fuse_at,
                              const ELEM *fuse_bias, const ELEM *features, const float *stop_below, int32_t *lengths)
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
        if (fuse)
            for (int r = 0; r < count; r++)
                memcpy(both + (2 * r + 1) * hidden, (s ? x : features) + r * hidden, bytes);
        for (int r = 0; r < num_rows; r++)
            memcpy(x + r * hidden, embedding + in[r] * hidden, bytes);
        const int first = fuse ? fuse_at : 0;
        if (first)
            failed = NAME(run_layers)(m, layers, 0, first, x, keys, values, &step, NULL);
        if (fuse) {
            for (int r = 0; r < count; r++)
                memcpy(both + 2 * r * hidden, x + r * hidden, bytes);
            failed |= NAME(linear)(both, fuse->packed, (int)fuse->packing, fuse_bias, x, count,
                                   2 * m->hidden, m->hidden, m->threads);
        }
        failed |= NAME(run_layers)(m, layers, first, num_layers, x, keys, values, &step,
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
            int found = 0;
            while (found < vocab - 1 && LOAD(row[found]) != best)
                found++;
            tokens[s * count + r] = vocabulary ? vocabulary[found] : found;
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

#undef READ
#undef WRITE
