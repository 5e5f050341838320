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

/* out = weight * normalised x; out may be x. weight: NULL for ones. */
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
        WRITE(out, i, weight ? mul_(READ(weight, i, dim - i), v) : v, dim - i);
    }
}

static void NAME(add_to)(ELEM *x, const ELEM *delta, int dim)
{
    for (int i = 0; i < dim; i += WIDTH)
        WRITE(x, i, add_(READ(x, i, dim - i), READ(delta, i, dim - i)), dim - i);
}

static void NAME(multiply_by)(ELEM *x, float factor, int dim)
{
    for (int i = 0; i < dim; i += WIDTH)
        WRITE(x, i, mul_(READ(x, i, dim - i), set_(factor)), dim - i);
}

/* How what a block computes joins the residual stream. */
struct NAME(joint) {
    const ELEM *norm; /* of the delta, or NULL */
    float scale, eps;
};

/* x += delta, which changes where a model norms or scales it first. */
ALWAYS_INLINE void NAME(join)(ELEM *x, ELEM *delta, struct NAME(joint) joint, int dim)
{
    if (joint.norm)
        NAME(normalise)(delta, joint.norm, delta, dim, joint.eps);
    if (joint.scale != 1.0f)
        NAME(multiply_by)(delta, joint.scale, dim);
    NAME(add_to)(x, delta, dim);
}

/* x += delta (when given), out = weight * normalised x (when given). */
static void NAME(add_rmsnorm)(ELEM *x, ELEM *delta, struct NAME(joint) joint, const ELEM *weight,
                              ELEM *out, int rows, int dim, float eps)
{
#pragma omp for schedule(static)
    for (int r = 0; r < rows; r++) {
        ELEM *xr = x + (size_t)r * dim;
        if (delta)
            NAME(join)(xr, delta + (size_t)r * dim, joint, dim);
        if (weight)
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
 * qkv: [rows, (heads + 2 * kv_heads) * dim]; cos_sin: [positions, rotary], cosines then sines, or NULL. */
static void NAME(rope_store)(ELEM *qkv, const float *cos_sin, ELEM *keys, ELEM *values,
                             const struct model *m, const struct rows *rows, const ELEM *q_norm,
                             const ELEM *k_norm)
{
    const int heads = m->heads, kv_heads = m->kv_heads, dim = m->dim, rotary = m->rotary;
    const int stride = (heads + 2 * kv_heads) * dim;
#pragma omp for schedule(static)
    for (int r = 0; r < rows->count; r++) {
        ELEM *row = qkv + (size_t)r * stride;
        const float *cosine = cos_sin ? cos_sin + (size_t)rows->positions[r] * rotary : NULL;
        if (m->wide_norms) {
            NAME(normalise)(row, q_norm, row, heads * dim, m->eps);
            NAME(normalise)(row + heads * dim, k_norm, row + heads * dim, kv_heads * dim, m->eps);
        }
        for (int h = 0; h < heads + kv_heads; h++) {
            ELEM *x = row + h * dim;
            const ELEM *norm = h < heads ? q_norm : k_norm;
            if (norm && !m->wide_norms)
                NAME(normalise)(x, norm, x, dim, m->eps);
            if (cosine)
                NAME(rotate)(x, cosine, cosine + rotary / 2, rotary / 2);
            else if (m->temperatures && h < heads)
                NAME(multiply_by)(x, m->temperatures[rows->positions[r]], dim);
            if (cosine && m->turned_norms)
                NAME(normalise)(x, NULL, x, dim, m->eps);
        }
        const size_t width = (size_t)kv_heads * dim;
        memcpy(keys + rows->slots[r] * width, row + heads * dim, width * sizeof(ELEM));
        memcpy(values + rows->slots[r] * width, row + (heads + kv_heads) * dim,
               width * sizeof(ELEM));
    }
}

/* Attention of each row over the slots of its own context that the window leaves (all of them for window 0):
 * the first prefix_length[r] slots of prefix[r], then path_length[r] slots of path[r]. A row's result depends
 * on this list alone, so it is the same in any batch, tree or chunk. Sets *failed if memory runs out. */
static void NAME(attention)(const ELEM *qkv, const ELEM *keys, const ELEM *values, ELEM *out,
                            int heads, int kv_heads, int dim, const struct rows *rows,
                            const int32_t *blocks, int num_blocks, int window, int chunked, float scale,
                            float cap, const ELEM *sinks, int *failed)
{
    const size_t width = (size_t)kv_heads * dim, out_stride = (size_t)heads * dim;
    const size_t stride = (size_t)(heads + 2 * kv_heads) * dim;
    const int group = heads / kv_heads;
    const size_t padded = ((size_t)rows->longest + WIDTH - 1) / WIDTH * WIDTH;
    const int most = rows->count * group < BLOCK_ROWS ? rows->count * group : BLOCK_ROWS;
    float *scores = aligned_alloc(64, most * padded * (sizeof(float) + sizeof(int32_t)));
    int32_t *memory = (int32_t *)(scores + most * padded);
    if (!scores)
        *failed = 1;
#pragma omp for schedule(dynamic)
    for (int item = 0; item < num_blocks * kv_heads; item++) {
        const int block = item / kv_heads, g = item % kv_heads;
        const int from = blocks[block], count = scores ? blocks[block + 1] - from : 0;
        const int32_t *contexts[BLOCK_ROWS];
        int lengths[BLOCK_ROWS], shared[BLOCK_ROWS], last_prefix = 0, last_hidden = 0;
        const int together = count * group > BLOCK_ROWS ? BLOCK_ROWS / count : group;
        for (int r = count - 1; r >= 0; r--) {
            const int prefix = rows->prefix_length[from + r], path = rows->path_length[from + r];
            const int hidden = hidden_by(window, chunked, prefix + path);
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
        const int is_first = from == 0 || rows->prefix[from] != rows->prefix[from - 1]; /* of its context */
        if (g == 0 && count && is_first && last_hidden < last_prefix) {
            const int32_t *slots = rows->prefix[from] + last_hidden;
            bring((const char *)keys, slots, last_prefix - last_hidden, width * sizeof(ELEM));
            bring((const char *)values, slots, last_prefix - last_hidden, width * sizeof(ELEM));
        }
        const ELEM *k = keys + g * dim, *v = values + g * dim;
        const int end = (g + 1) * group;
        for (int h = g * group; h < end; h += together) {
            const int num = end - h < together ? end - h : together;
            const int32_t *contexts_of[BLOCK_ROWS];
            int lengths_of[BLOCK_ROWS], shared_of[BLOCK_ROWS];
            float sinks_of[BLOCK_ROWS];
            for (int i = 0; i < count * num; i++) {
                contexts_of[i] = contexts[i / num];
                lengths_of[i] = lengths[i / num];
                shared_of[i] = shared[i / num];
            }
            for (int i = 0; i < num && count; i++)
                sinks_of[i] = sinks ? LOAD(sinks[h + i]) : -INFINITY;
            attend(qkv + from * stride + h * dim, stride, k, v, out + from * out_stride + h * dim,
                   out_stride, contexts_of, lengths_of, shared_of, padded, count * num, num, width,
                   scale, cap, sinks_of, scores, h == g * group, sizeof(ELEM) == 2, dim);
        }
    }
    free(scores);
}

/* out = activation(gate) * up of one row, from the fused [2 * dim] projection. All activations are
 * x / (1 + exp(-inner)): silu's inner is x, that of GELU's approximation twice tanh's argument. */
ALWAYS_INLINE void NAME(activate_row)(const struct model *m, const ELEM *gate, const ELEM *up, ELEM *out,
                                      int dim, const enum activation activation)
{
    for (int i = 0; i < dim; i += WIDTH) {
        vec g = READ(gate, i, dim - i), u = READ(up, i, dim - i);
        if (activation == CLAMPED) {
            g = min_(g, set_(m->gate_limit));
            u = add_(max_(min_(u, set_(m->gate_limit)), set_(-m->gate_limit)), set_(1.0f));
        }
        vec inner = g;
        if (activation == GELU)
            inner = mul_(g, fma_(mul_(g, g), set_(0.0713548162726f), set_(1.5957691216f)));
        if (activation == CLAMPED)
            inner = mul_(g, set_(m->gate_slope));
        const vec smaller = exp_(sub_(set_(0.0f), inner));
        const vec activated = NAME(rounded)(div_(g, add_(set_(1.0f), smaller)));
        WRITE(out, i, mul_(activated, u), dim - i);
    }
}

/* The same for rows. */
static void NAME(activate)(const struct model *m, const ELEM *gate_up, ELEM *out, int rows, int dim)
{
#pragma omp for schedule(static)
    for (int r = 0; r < rows; r++) {
        const ELEM *gate = gate_up + (size_t)r * 2 * dim, *up = gate + dim;
        ELEM *o = out + (size_t)r * dim;
        switch (m->activation) {
        case SILU: NAME(activate_row)(m, gate, up, o, dim, SILU); break;
        case GELU: NAME(activate_row)(m, gate, up, o, dim, GELU); break;
        case CLAMPED: NAME(activate_row)(m, gate, up, o, dim, CLAMPED); break;
        }
    }
}

/* One row's experts, best first, and their shares: the softmax of all scores, or the sigmoid of each.
 * scores: [count], changed. */
static void NAME(choose)(const struct experts *e, int sigmoid, const ELEM *router, float *scores,
                         int32_t *chosen, float *shares)
{
    float top = -INFINITY, total = 0.0f, one[W];
    for (int i = 0; i < e->count; i++) {
        scores[i] = LOAD(router[i]);
        top = scores[i] > top ? scores[i] : top;
    }
    for (int i = 0; i < e->count && !sigmoid; i++) {
        nat_store(one, nat_exp(nat_set(scores[i] - top)));
        scores[i] = one[0];
        total += scores[i];
    }
    float of_chosen = 0.0f;
    for (int k = 0; k < e->top; k++) {
        int best = 0;
        for (int i = 1; i < e->count; i++)
            if (scores[i] > scores[best])
                best = i;
        chosen[k] = best;
        if (sigmoid)
            nat_store(one, nat_exp(nat_set(-scores[best])));
        shares[k] = sigmoid ? 1.0f / (1.0f + one[0]) : scores[best] / total;
        scores[best] = -INFINITY;
        of_chosen += shares[k];
    }
    for (int k = 0; k < e->top; k++) {
        const float share = e->normed ? shares[k] / of_chosen : shares[k];
        shares[k] = sizeof(ELEM) == 2 ? bf16_load(bf16_store(share)) : share; /* as activations are */
    }
}

/* out: [rows, hidden], the weighted results of each row's experts, added in the order of experts. A product's
 * result for a row does not depend on the others, so it does not matter which rows share an expert. */
static int NAME(mix)(const struct model *m, const struct experts *e, const ELEM *x, ELEM *out, int rows)
{
    const size_t hidden = m->hidden, size = e->size, taken = (size_t)rows * e->top;
    const size_t numbers = rows * ((size_t)e->count + 2 * hidden + 3 * size);
    const size_t bytes = numbers * sizeof(ELEM) + 64 + e->count * sizeof(float) + rows * sizeof(int32_t) +
                         taken * (sizeof(float) + sizeof(int32_t));
    float *shares = aligned_alloc(64, (bytes + 63) & ~(size_t)63);
    if (!shares)
        return 1;
    float *scores = shares + taken;
    int32_t *chosen = (int32_t *)(scores + e->count), *takes = chosen + taken;
    ELEM *router = (ELEM *)(takes + rows), *in = router + (size_t)rows * e->count;
    ELEM *result = in + rows * hidden, *gate_up = result + rows * hidden, *inner = gate_up + 2 * rows * size;
    int failed = NAME(linear)(x, e->router.packed, (int)e->router.packing, e->router_bias, router, rows, m->hidden,
                              e->count, m->threads);
    if (e->shared_gate_up.packed) {
        failed |= NAME(linear)(x, e->shared_gate_up.packed, (int)e->shared_gate_up.packing, NULL, gate_up, rows,
                               m->hidden, 2 * e->size, m->threads);
        EACH_ROW(rows, e->size, NAME(activate)(m, gate_up, inner, rows, e->size));
        failed |= NAME(linear)(inner, e->shared_down.packed, (int)e->shared_down.packing, NULL, out, rows, e->size,
                               m->hidden, m->threads);
    } else {
        memset(out, 0, rows * hidden * sizeof *out);
    }
    for (int r = 0; r < rows; r++)
        NAME(choose)(e, m->scaled_inputs, router + (size_t)r * e->count, scores, chosen + r * e->top,
                     shares + r * e->top);
    for (int i = 0; i < e->count && !failed; i++) {
        int count = 0;
        for (size_t t = 0; t < taken; t++)
            if (chosen[t] == i) {
                memcpy(in + count * hidden, x + t / e->top * hidden, hidden * sizeof *in);
                if (m->scaled_inputs)
                    NAME(multiply_by)(in + count * hidden, shares[t], m->hidden);
                takes[count++] = (int32_t)t;
            }
        if (!count)
            continue;
        failed = NAME(linear)(in, e->gate_up[i].packed, (int)e->gate_up[i].packing,
                              e->gate_up_bias ? e->gate_up_bias[i] : NULL, gate_up, count, m->hidden,
                              2 * e->size, m->threads);
        EACH_ROW(count, e->size, NAME(activate)(m, gate_up, inner, count, e->size));
        failed |= NAME(linear)(inner, e->down[i].packed, (int)e->down[i].packing,
                               e->down_bias ? e->down_bias[i] : NULL, result, count, e->size, m->hidden,
                               m->threads);
        for (int c = 0; c < count; c++) {
            if (!m->scaled_inputs)
                NAME(multiply_by)(result + c * hidden, shares[takes[c]], m->hidden);
            NAME(add_to)(out + takes[c] / e->top * hidden, result + c * hidden, m->hidden);
        }
    }
    free(shares);
    return failed;
}

/* out: [count, outputs], += what an adapter makes of x: [count, inputs]. */
static int NAME(add_low_rank)(const struct low_rank *low, const ELEM *x, ELEM *out, int count, int inputs,
                              int outputs, int threads)
{
    const size_t rank = low->rank, numbers = count * (2 * rank + outputs);
    ELEM *inner = aligned_alloc(64, (numbers * sizeof(ELEM) + 63) & ~(size_t)63);
    if (!inner)
        return 1;
    ELEM *own = inner + count * rank, *delta = own + count * rank;
    int failed = NAME(linear)(x, low->a.packed, (int)low->a.packing, NULL, inner, count, inputs, (int)rank, threads);
    size_t from = 0;
    for (int i = 0; i < low->num_parts && !failed; i++) {
        const struct low_part *part = low->parts + i;
        for (int r = 0; r < count; r++)
            memcpy(own + r * part->rank, inner + r * rank + from, part->rank * sizeof *own);
        failed = NAME(linear)(own, part->b.packed, (int)part->b.packing, NULL, delta, count, (int)part->rank,
                              (int)part->outputs, threads);
        for (int r = 0; r < count; r++)
            NAME(add_to)(out + (size_t)r * outputs + part->first, delta + (size_t)r * part->outputs,
                         (int)part->outputs);
        from += part->rank;
    }
    free(inner);
    return failed;
}

/* out += what each row's adapter makes of x, [rows, inputs], for neighbouring rows of one adapter at once.
 * which: place of the product in struct adapted. */
static int NAME(adapt)(const struct model *m, const struct rows *rows, int layer, size_t which, const ELEM *x,
                       ELEM *out, int inputs, int outputs)
{
    int failed = 0;
    if (!m->adapters || !rows->adapters)
        return 0;
    for (int r = 0, end; r < rows->count && !failed; r = end) {
        const int32_t adapter = rows->adapters[r];
        for (end = r + 1; end < rows->count && rows->adapters[end] == adapter;)
            end++;
        if (adapter < 0)
            continue;
        const struct low_rank *low = (const void *)((const char *)(m->adapters[adapter] + layer) + which);
        if (low->num_parts)
            failed = NAME(add_low_rank)(low, x + (size_t)r * inputs, out + (size_t)r * outputs, end - r, inputs,
                                        outputs, m->threads);
    }
    return failed;
}

#define MULTIPLY(x, name, out, inputs, outputs)                                                    \
    (NAME(linear)(x, l->name.packed, (int)l->name.packing, l->name##_bias, out, count, inputs, outputs, \
                  m->threads) ||                                                                   \
     NAME(adapt)(m, rows, i, offsetof(struct adapted, name), x, out, inputs, outputs))

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
    const float *const tables[] = {[GLOBAL] = m->cos_sin, [LOCAL] = m->local_cos_sin, [NO_ROPE] = NULL};
    ELEM *pending = NULL;
    struct NAME(joint) joint = {NULL, m->residual_scale, m->eps};
    int failed = 0;
    for (int i = first; i < last && !failed; i++) {
        const struct layer *l = layers + i;
        ELEM *k = keys + i * layer_size, *v = values + i * layer_size;
        EACH_ROW(count, m->hidden,
                 NAME(add_rmsnorm)(x, pending, joint, l->input_norm, normed, count, m->hidden, m->eps));
        if (states && i > first)
            memcpy(states + (i - first - 1) * state_size, x, state_size * sizeof(ELEM));
        failed = MULTIPLY(l->input_norm ? normed : x, qkv, qkv, m->hidden, qkv_width);
        EACH_ROW(count, qkv_width, NAME(rope_store)(qkv, tables[l->rope], k, v, m, rows, l->q_norm, l->k_norm));
        ON_THREADS(m->threads, (double)count * rows->longest * m->heads > 1e4 / SLOWER,
                   NAME(attention)(qkv, k, v, attended, m->heads, m->kv_heads, m->dim, rows, blocks, num_blocks,
                                   (int)l->window, m->chunked, m->scale, m->attention_cap, l->sinks, &failed));
        failed |= MULTIPLY(attended, out, delta, attended_width, m->hidden);
        joint.norm = l->attention_norm;
        EACH_ROW(count, m->hidden,
                 NAME(add_rmsnorm)(x, delta, joint, l->post_norm, normed, count, m->hidden, m->eps));
        const ELEM *in = l->post_norm ? normed : x;
        if (l->experts) {
            failed |= NAME(mix)(m, l->experts, in, delta, count);
        } else {
            failed |= MULTIPLY(in, gate_up, gate_up, m->hidden, 2 * m->ffn);
            EACH_ROW(count, m->ffn, NAME(activate)(m, gate_up, inner, count, m->ffn));
            failed |= MULTIPLY(inner, down, delta, m->ffn, m->hidden);
        }
        joint.norm = l->mlp_norm;
        pending = delta;
    }
    for (int r = 0; pending && r < count; r++)
        NAME(join)(x + (size_t)r * m->hidden, pending + (size_t)r * m->hidden, joint, m->hidden);
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

/* What the output layer's products become: divided, then capped. */
EXPORT void NAME(finish_logits)(const struct model *m, ELEM *logits, size_t count)
{
    if (m->logit_divisor == 1.0f && m->logit_cap == 0.0f)
        return;
    for (size_t i = 0; i < count; i += WIDTH) {
        const int left = count - i < WIDTH ? (int)(count - i) : WIDTH;
        vec v = div_(READ(logits, i, left), set_(m->logit_divisor));
        if (m->logit_cap != 0.0f)
            v = soft_cap(v, m->logit_cap);
        WRITE(logits, i, v, left);
    }
}

/* Replaces the likely ones of approximate logits by those of the output layer. */
static void NAME(look_again)(const struct shortlist *s, const ELEM *x, ELEM *logits, int hidden, int vocab)
{
    const float least = NAME(highest)(logits, vocab) - s->margin;
    for (int i = 0; i < vocab; i++) {
        if (LOAD(logits[i]) < least)
            continue;
        vec products = set_(0.0f);
        for (int d = 0; d < hidden; d += WIDTH)
            products = fma_(READ(x, d, hidden - d), read_(s->exact, (size_t)i * hidden + d, hidden - d, 1), products);
        WRITE(logits, i, set_(sum_of(products)), 1);
    }
}

/* Gives `count` sequences tokens that they have not seen, and continues each by `steps` tokens: every token
 * is the argmax after the one before. All steps in one call, because a small model takes less time than the
 * code around it.
 * given: [num_given], sequence after sequence, at least one for each; ends: [count], the place of each
 * sequence's last one. tokens: filled, [steps, count]. rows: of the given tokens, then those of each
 * further step, one step after the other.
 * final_norm: NULL if logits come from the last state as it is.
 * vocabulary: the token of each of the head's `vocab` logits, or NULL if they are all tokens.
 * shortlist: with it, only likely tokens get logits by the head; or NULL.
 * states: filled with the residual stream after each layer, [steps, num_layers, count, hidden], or NULL.
 * With states, each sequence is given one token.
 * fuse: with it, the input of layer fuse_at is fuse * [state before that layer, feature]; the layers before
 * it read the token alone. The feature is the state of the step before; for the first step, features
 * ([num_given, hidden]) has it. Afterwards its first `count` rows are that step's last states.
 * stop_below: [steps, count] or NULL. With it, a sequence ends after a token whose probability is less, and
 * lengths ([count], each `steps` at first) becomes the number of its tokens.
 * Returns non-zero if memory runs out. */
EXPORT int NAME(greedy_chain)(const struct model *m, const struct layer *layers, int num_layers,
                              const ELEM *embedding, const ELEM *final_norm,
                              const struct weight *head, int vocab, const int64_t *vocabulary,
                              const struct shortlist *shortlist,
                              ELEM *keys, ELEM *values, const struct rows *rows,
                              const int64_t *given, int num_given, const int32_t *ends,
                              int count, int steps, int64_t *tokens, ELEM *states, const struct weight *fuse, int fuse_at,
                              const ELEM *fuse_bias, ELEM *features, const float *stop_below, int32_t *lengths)
{
    const struct NAME(joint) none = {NULL, 1.0f, m->eps};
    const size_t hidden = m->hidden, bytes = hidden * sizeof(ELEM);
    const size_t pairs = fuse ? 2 * (size_t)num_given : 0;
    const size_t encoded = shortlist ? (size_t)count * shortlist->rank : 0;
    const size_t size = (num_given + count + pairs) * bytes + (count * vocab + encoded) * sizeof(ELEM);
    ELEM *x = aligned_alloc(64, (size + 63) & ~(size_t)63);
    if (!x)
        return 1;
    ELEM *normed = x + num_given * hidden, *both = normed + count * hidden;
    ELEM *logits = both + pairs * hidden, *inner = logits + (size_t)count * vocab;
    int failed = 0, left = count, at = 0;
    for (int s = 0; s < steps && left && !failed; s++) {
        const int num_rows = s ? count : num_given;
        const int64_t *in = s ? tokens + (s - 1) * count : given;
        const struct rows step = {
            num_rows, rows->longest, rows->positions + at, rows->slots + at,
            rows->prefix_length + at, rows->path_length + at, rows->prefix + at, rows->path + at,
            rows->adapters ? rows->adapters + at : NULL,
        };
        if (fuse)
            for (int r = 0; r < num_rows; r++)
                memcpy(both + (2 * r + 1) * hidden, (s ? x : features) + r * hidden, bytes);
        for (int r = 0; r < num_rows; r++)
            memcpy(x + r * hidden, embedding + in[r] * hidden, bytes);
        const int first = fuse ? fuse_at : 0;
        if (first)
            failed = NAME(run_layers)(m, layers, 0, first, x, keys, values, &step, NULL);
        if (fuse) {
            for (int r = 0; r < num_rows; r++)
                memcpy(both + 2 * r * hidden, x + r * hidden, bytes);
            failed |= NAME(linear)(both, fuse->packed, (int)fuse->packing, fuse_bias, x, num_rows,
                                   2 * m->hidden, m->hidden, m->threads);
        }
        failed |= NAME(run_layers)(m, layers, first, num_layers, x, keys, values, &step,
                                   states ? states + at * hidden * num_layers : NULL);
        if (num_rows > count)
            for (int r = 0; r < count; r++)
                memmove(x + r * hidden, x + ends[r] * hidden, bytes);
        if (fuse && s == 0)
            memcpy(features, x, count * bytes);
        if (final_norm)
            NAME(add_rmsnorm)(x, NULL, none, final_norm, normed, count, m->hidden, m->eps);
        const ELEM *out = final_norm ? normed : x;
        if (shortlist) {
            const struct weight *encode = &shortlist->encode, *all = &shortlist->rows;
            failed |= NAME(linear)(out, encode->packed, (int)encode->packing, NULL, inner, count, m->hidden,
                                   shortlist->rank, m->threads);
            failed |= NAME(linear)(inner, all->packed, (int)all->packing, NULL, logits, count, shortlist->rank,
                                   vocab, m->threads);
            for (int r = 0; r < count; r++)
                NAME(look_again)(shortlist, out + r * hidden, logits + (size_t)r * vocab, m->hidden, vocab);
        } else
            failed |= NAME(linear)(out, head->packed, (int)head->packing, NULL, logits, count, m->hidden, vocab,
                                   m->threads);
        NAME(finish_logits)(m, logits, (size_t)count * vocab);
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
    const struct NAME(joint) none = {NULL, 1.0f, eps};
    NAME(add_rmsnorm)((ELEM *)x, NULL, none, weight, out, rows, dim, eps);
}

#undef READ
#undef WRITE
