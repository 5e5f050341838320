/* Products with weights in float32 or bfloat16 by fused multiply-adds, for matmul.c. Several variants share
 * this file. */

#include "products.h"

ALWAYS_INLINE vec half_of(const char *pairs, int high)
{
    vec out;
    UNROLL for (int i = 0; i < NATS; i++) {
        const nat_bits both = *(const nat_bits_at *)(pairs + i * W * 4);
        out.n[i] = (nat)(high ? both & 0xffff0000u : both << 16);
    }
    return out;
}

#define NAME(f) f##_floats
#define X float
#define SUBSTEPS 1
#define VALUE(x) set_(x)
#define WEIGHTS(from, s) load_((const float *)(from))
#define STEP(acc, w, value) fma_(w, value, acc)
#include "products_impl.h"

#define NAME(f) f##_halves
#define X float
#define SUBSTEPS 2
#define VALUE(x) set_(x)
#define WEIGHTS(from, s) half_of(from, s)
#define STEP(acc, w, value) fma_(w, value, acc)
#include "products_impl.h"
