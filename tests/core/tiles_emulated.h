/* Matrix tiles (AMX) in plain C, for test_tiles.py: what tiles.h does around the instructions is tested
 * on processors that do not have them. */

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

static __thread struct {
    uint8_t data[8][16][64];
    int rows[8], bytes[8];
} tiles;

static inline void tile_shapes_(const void *shapes)
{
    const uint8_t *at = shapes; /* palette, start, 14 unused, 16 x bytes (16 bits), 16 x rows */
    for (int i = 0; i < 8; i++) {
        tiles.bytes[i] = at[16 + 2 * i] | at[17 + 2 * i] << 8;
        tiles.rows[i] = at[48 + i];
    }
    memset(tiles.data, 0, sizeof tiles.data);
}

static inline void tile_load_(int tile, const void *from, long stride)
{
    memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
    for (int r = 0; r < tiles.rows[tile]; r++)
        memcpy(tiles.data[tile][r], (const char *)from + r * stride, tiles.bytes[tile]);
}

static inline void tile_store_(int tile, void *to, long stride)
{
    for (int r = 0; r < tiles.rows[tile]; r++)
        memcpy((char *)to + r * stride, tiles.data[tile][r], tiles.bytes[tile]);
}

static inline float tile_bf16_(const uint8_t *at)
{
    const uint32_t bits = (uint32_t)(at[0] | at[1] << 8) << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static inline void tile_bf16ps_(int sum, int a, int b)
{
    for (int m = 0; m < tiles.rows[sum]; m++)
        for (int k = 0; k < tiles.bytes[a] / 4; k++)
            for (int n = 0; n < tiles.bytes[sum] / 4; n++) {
                float *to = (float *)tiles.data[sum][m] + n;
                for (int i = 0; i < 2; i++)
                    *to += tile_bf16_(tiles.data[a][m] + 4 * k + 2 * i) *
                           tile_bf16_(tiles.data[b][k] + 4 * n + 2 * i);
            }
}

static inline void tile_busd_(int sum, int a, int b)
{
    for (int m = 0; m < tiles.rows[sum]; m++)
        for (int k = 0; k < tiles.bytes[a] / 4; k++)
            for (int n = 0; n < tiles.bytes[sum] / 4; n++) {
                int32_t *to = (int32_t *)tiles.data[sum][m] + n;
                for (int i = 0; i < 4; i++)
                    *to += tiles.data[a][m][4 * k + i] * (int8_t)tiles.data[b][k][4 * n + i];
            }
}

#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_zero(tile) memset(tiles.data[tile], 0, sizeof tiles.data[tile])
#define _tile_dpbf16ps(sum, a, b) tile_bf16ps_(sum, a, b)
#define _tile_dpbusd(sum, a, b) tile_busd_(sum, a, b)
#define _tile_release() ((void)0)
#define TILE_LOAD(tile, from, stride) tile_load_(tile, from, stride)
#define TILE_STORE(tile, to, stride) tile_store_(tile, to, stride)
#define TILE_SHAPES(shapes) tile_shapes_(&(shapes))
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
