"""The Triton kernels of :class:`paceline.models.cuda_ops.CudaOps`.

This file needs Triton, which comes with torch's builds for CUDA; only ``CudaOps`` imports it. With
``TRITON_INTERPRET=1`` in the environment the kernels run on a CPU, slowly, which is how they are
tested without a GPU.

Each program computes one row, or a part of one, with block sizes that depend on the model alone. So
a row's result does not depend on its neighbours. ``rows`` is
:attr:`paceline.models.cuda_ops.DeviceRows.data`; a row whose slot is negative is padding: it stores
no keys and values.

Only language features that Triton has had since 3.0 are used. Sums are in float32, and results are
rounded where :class:`paceline.models.torch_ops.TorchOps` rounds them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Places in the header of ``rows``, in the order of cuda_ops.HEADER.
POSITION = tl.constexpr(1)
SLOT = tl.constexpr(2)
PREFIX_LENGTH = tl.constexpr(3)
PATH_LENGTH = tl.constexpr(4)
PATH_START = tl.constexpr(5)
TABLE_START = tl.constexpr(6)


@triton.jit
def add_rmsnorm(
    x,  # [R, SIZE], changed in place where there is a delta
    delta,  # [R, SIZE]
    weight,  # [SIZE]
    out,  # [R, SIZE]
    eps,
    HAS_DELTA: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least SIZE
):
    """``x += delta``, then ``out = weight * x / rms(x)``. One program for each row."""
    at = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    dtype = out.dtype.element_ty
    value = tl.load(x + at + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_DELTA:
        value += tl.load(delta + at + column, mask=inside, other=0.0).to(tl.float32)
        value = value.to(dtype).to(tl.float32)
        tl.store(x + at + column, value.to(dtype), mask=inside)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + eps)
    normed = (value * scale).to(dtype).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at + column, (factor * normed).to(dtype), mask=inside)


@triton.jit
def silu_times(
    gate_up,  # [R, 2 * SIZE]
    out,  # [R, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``silu(gate) * up``. A program for each row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + column, (active * up).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def rope_store(
    heads,  # [R, H + 2G, D]: queries are changed in place
    keys,  # [N, G, D]
    values,  # [N, G, D]
    cos_sin,  # [positions, D] float32
    q_norm,  # [D]
    k_norm,  # [D]
    rows,
    num_rows,
    eps,
    HAS_NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # a power of two, at least DIM / 2
):
    """Norm and rotate a query or key, store a key or value. A program for each row and head."""
    row, head = tl.program_id(0), tl.program_id(1)
    position = tl.load(rows + POSITION * num_rows + row).to(tl.int64)
    slot = tl.load(rows + SLOT * num_rows + row).to(tl.int64)
    HALF: tl.constexpr = DIM // 2
    column = tl.arange(0, BLOCK)
    inside = column < HALF
    # Masks are made of blocks: the interpreter cannot combine them with a single truth value.
    heads_before = head + tl.full([BLOCK], 0, tl.int32)
    is_query = inside & (heads_before < HEADS)
    is_key = inside & (heads_before >= HEADS) & (heads_before < HEADS + KV_HEADS)
    is_value = inside & (heads_before >= HEADS + KV_HEADS)
    is_stored = slot + tl.full([BLOCK], 0, tl.int64) >= 0
    dtype = heads.dtype.element_ty
    at = heads + (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head) * DIM + column
    first = tl.load(at, mask=inside, other=0.0)
    second = tl.load(at + HALF, mask=inside, other=0.0)
    a, b = first.to(tl.float32), second.to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(a * a + b * b, axis=0) / DIM + eps)
        # The one that does not apply is read as zeros.
        a_weight = tl.load(q_norm + column, mask=is_query, other=0.0).to(tl.float32)
        a_weight += tl.load(k_norm + column, mask=is_key, other=0.0).to(tl.float32)
        b_weight = tl.load(q_norm + HALF + column, mask=is_query, other=0.0).to(tl.float32)
        b_weight += tl.load(k_norm + HALF + column, mask=is_key, other=0.0).to(tl.float32)
        a = (a_weight * (a * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
        b = (b_weight * (b * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    cosine = tl.load(cos_sin + position * DIM + column, mask=inside, other=0.0)
    sine = tl.load(cos_sin + position * DIM + HALF + column, mask=inside, other=0.0)
    a_rotated = (a * cosine - b * sine).to(dtype)
    b_rotated = (b * cosine + a * sine).to(dtype)
    tl.store(at, a_rotated, mask=is_query)
    tl.store(at + HALF, b_rotated, mask=is_query)
    place = (slot * KV_HEADS + (head - HEADS) % KV_HEADS) * DIM + column
    tl.store(keys + place, a_rotated, mask=is_stored & is_key)
    tl.store(keys + place + HALF, b_rotated, mask=is_stored & is_key)
    tl.store(values + place, first, mask=is_stored & is_value)
    tl.store(values + place + HALF, second, mask=is_stored & is_value)


@triton.jit(do_not_specialize=["num_rows"])
def tree_attention(
    heads,  # [R, H + 2G, D], of which the first H are queries
    keys,  # [N, G, D]
    values,  # [N, G, D]
    out,  # [R, H, D]
    rows,
    num_rows,
    scale,
    WINDOW: tl.constexpr,  # entries that a row sees, 0 for all
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,  # entries of the context that are read at once
    GROUP_BLOCK: tl.constexpr,  # a power of two, at least HEADS / KV_HEADS and 16
    DIM_BLOCK: tl.constexpr,  # a power of two, at least DIM and 16
    WIDEN: tl.constexpr,  # multiply in float32, for the interpreter
):
    """Softmax attention over a row's context. A program for each row and head of keys and values.

    The context is read block by block, in position order: slots of the sequence's table, then
    those of the path to the tree node. Each block rescales what was summed before (the streaming
    softmax of FlashAttention, arXiv 2205.14135). A chain and a path with the same entries are
    summed in the same order.
    """
    row, kv_head = tl.program_id(0), tl.program_id(1)
    prefix = tl.load(rows + PREFIX_LENGTH * num_rows + row)
    total = prefix + tl.load(rows + PATH_LENGTH * num_rows + row)
    table_start = tl.load(rows + TABLE_START * num_rows + row)
    path_start = tl.load(rows + PATH_START * num_rows + row)
    begin = tl.maximum(total - WINDOW, 0) if WINDOW > 0 else 0

    GROUP: tl.constexpr = HEADS // KV_HEADS
    member, column = tl.arange(0, GROUP_BLOCK), tl.arange(0, DIM_BLOCK)
    of_query = (member < GROUP)[:, None] & (column < DIM)[None, :]
    head = kv_head * GROUP + member
    query_at = (row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + head[:, None]) * DIM
    query = tl.load(heads + query_at + column[None, :], mask=of_query, other=0.0)
    if WIDEN:
        query = query.to(tl.float32)

    largest = tl.full([GROUP_BLOCK], float("-inf"), tl.float32)
    weight = tl.full([GROUP_BLOCK], 0.0, tl.float32)
    mixed = tl.full([GROUP_BLOCK, DIM_BLOCK], 0.0, tl.float32)
    for start in range(begin, total, BLOCK):
        entry = start + tl.arange(0, BLOCK)
        known = entry < total
        index = tl.where(entry < prefix, table_start + entry, path_start + entry - prefix)
        slot = tl.load(rows + index, mask=known, other=0).to(tl.int64)
        entry_at = (slot[:, None] * KV_HEADS + kv_head) * DIM + column[None, :]
        of_entry = known[:, None] & (column < DIM)[None, :]
        key = tl.load(keys + entry_at, mask=of_entry, other=0.0)
        value = tl.load(values + entry_at, mask=of_entry, other=0.0)
        dtype = value.dtype
        if WIDEN:
            key, value = key.to(tl.float32), value.to(tl.float32)
        score = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        score = tl.where(known[None, :], score, float("-inf"))
        # A block has at least one entry, so that this is finite.
        new_largest = tl.maximum(largest, tl.max(score, axis=1))
        share = tl.exp(score - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        weight = weight * shrink + tl.sum(share, axis=1)
        share = share.to(dtype).to(value.dtype)
        mixed = mixed * shrink[:, None] + tl.dot(share, value, input_precision="ieee")
        largest = new_largest
    # Padding has no context: its sum is 0.
    mixed = mixed / tl.where(weight > 0.0, weight, 1.0)[:, None]
    out_at = (row.to(tl.int64) * HEADS + head[:, None]) * DIM + column[None, :]
    tl.store(out + out_at, mixed.to(out.dtype.element_ty), mask=of_query)
