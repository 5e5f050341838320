"""The Triton kernels compute what plain torch computes, each row by itself.

``make test-triton`` runs them on a CPU, in Triton's interpreter; with a CUDA device and without
``TRITON_INTERPRET`` they run on that. The interpreter cuts bfloat16 off where a device rounds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from paceline.models.base import Segment
from paceline.models.cuda_ops import CudaOps, DeviceRows, flatten, fused_ops
from paceline.models.kv_cache import KVPool, PooledSequence
from paceline.models.llama import LlamaRunner
from paceline.models.rows import Rows, append_rows
from paceline.models.torch_ops import TorchOps
from tests.core.random_layers import random_stack
from tests.core.runners import load_runner_without_kernels
from tests.modelzoo import make_model

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="no Triton here: `make test-triton` runs these tests"
    ),
    pytest.mark.skipif(
        not INTERPRETED and not torch.cuda.is_available(),
        reason="neither a CUDA device here nor TRITON_INTERPRET=1",
    ),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03}

Tensor = torch.Tensor


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest distance of two rows, relative to the length of the second one."""
    difference = (ours.double() - theirs.double()).flatten(1).norm(dim=1)
    return float((difference / theirs.double().flatten(1).norm(dim=1)).max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [2, 63, 64, 1030])
def test_norms_and_activation(width: int, dtype: str) -> None:
    generator, kind = torch.Generator().manual_seed(width), DTYPES[dtype]
    x, delta, both = (
        torch.randn(5, size, generator=generator).to(DEVICE, kind)
        for size in (width, width, 2 * width)
    )
    weight = torch.randn(width, generator=generator).to(DEVICE, kind)
    ops, plain = CudaOps(by_row=True), TorchOps(by_row=True)
    tolerance = TOLERANCES[kind]
    assert distance(ops.rmsnorm(x, weight, 1e-5), plain.rmsnorm(x, weight, 1e-5)) < tolerance
    total = x + delta
    normed = ops._add_rmsnorm(added := x.clone(), delta, weight, 1e-5)
    assert distance(added, total) < tolerance
    # In two steps the sum is the same bits, so it may be left to the next norm or not.
    if not (INTERPRETED and kind is torch.bfloat16):
        assert torch.equal(added, total)
        assert torch.equal(normed, ops.rmsnorm(total, weight, 1e-5))
    gate, up = both.chunk(2, dim=-1)
    assert distance(ops._silu_times(both), torch.nn.functional.silu(gate) * up) < tolerance
    # Whatever else is there, and wherever in memory: the third row is the third row.
    assert torch.equal(ops.rmsnorm(x[2:3], weight, 1e-5), ops.rmsnorm(x, weight, 1e-5)[2:3])


SIZES = {
    "32, 4 of 1": {"heads": 4, "kv_heads": 1, "dim": 32},
    "64, each its own, norms": {"heads": 2, "kv_heads": 2, "dim": 64, "norms": True},
    "80, 3 of 2, window": {"heads": 6, "kv_heads": 2, "dim": 80, "window": 37},
    "128, 17 of 1, norms": {"heads": 17, "kv_heads": 1, "dim": 128, "norms": True},
    "2, window of 1": {"heads": 2, "kv_heads": 1, "dim": 2, "window": 1},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_layer(sizes: str, dtype: str) -> None:
    """Trees, chains and prompts of several sequences, of which one begins with another's slots."""
    kind: Any = DTYPES[dtype]
    stack = random_stack(kind, **SIZES[sizes], device=DEVICE)
    ops, plain = CudaOps(by_row=True), TorchOps(by_row=True)

    @settings(max_examples=4, phases=[Phase.generate])  # to shrink a failure takes long here
    @given(st.data())
    def check_rows(data: st.DataObject) -> None:
        pool = KVPool(1, 299, stack.num_kv_heads, stack.head_dim, kind, torch.device(DEVICE))
        parts: list[tuple[PooledSequence, tuple[int, ...], list[int]]] = []
        for i in range(data.draw(st.integers(1, 3))):
            sequence = PooledSequence(150)
            prefix = data.draw(st.sampled_from([0, 5, 31, 32, 33, 70]))
            pool.append(sequence, range(-1, prefix - 1))
            pool.commit(sequence, range(prefix))
            if i == 1:
                shared = min(prefix, parts[0][0].length)
                sequence.slots[:shared] = parts[0][0].slots[:shared]
            size = data.draw(st.integers(1, 5))
            parts.append(
                (sequence, (), [data.draw(st.integers(-1, node - 1)) for node in range(size)])
            )
        rows = append_rows(pool, parts, 150)
        seed = data.draw(st.integers(0, 2**32 - 1))
        check_batch(rows, pool, torch.Generator().manual_seed(seed))

    def check_batch(rows: Rows, pool: KVPool, generator: torch.Generator) -> None:
        count = len(rows.slots)
        keys, values = (
            torch.randn(pool.keys.shape, generator=generator).to(DEVICE, kind) for _ in range(2)
        )
        x = torch.randn(count, stack.hidden_size, generator=generator).to(DEVICE, kind)

        def run(some: TorchOps, rows: Rows, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            out, k, v = x.clone(), keys.clone(), values.clone()
            some.run_layers(stack, 0, 1, out, k, v, rows)
            return out, k, v

        out, k, v = run(ops, rows, x)
        for ours, theirs in zip((out, k[0], v[0]), run(plain, rows, x), strict=True):
            assert distance(ours, theirs if theirs.dim() == 2 else theirs[0]) < TOLERANCES[kind]
        # The same bits in another order, beside padding, which stores nothing,
        order = np.random.default_rng(count).permutation(count)
        index = torch.from_numpy(order).to(DEVICE)
        padded = torch.cat([x[index], x.new_ones(2, stack.hidden_size)])
        flat = torch.from_numpy(flatten(rows.take(order), count + 2)).to(DEVICE)
        ops.run_on_device(stack, 0, 1, padded, keys, values, DeviceRows(flat, count + 2))
        assert torch.equal(padded[:count], out[index])
        assert bool(torch.isfinite(padded).all())
        assert torch.equal(keys, k)
        assert torch.equal(values, v)
        # and alone, after its ancestors.
        alone = run(ops, rows.take(np.array([count - 1])), x[count - 1 :])
        assert torch.equal(alone[0], out[count - 1 :])

    check_rows()


def test_a_chain_and_a_path_have_the_same_bits() -> None:
    """AR's layout of a context is a table; a tree's is a table and a path."""
    stack = random_stack(torch.float32, heads=2, kv_heads=1, dim=32, device=DEVICE)
    ops, results = CudaOps(by_row=True), []
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(41, stack.hidden_size, generator=generator).to(DEVICE)
    for cut in (41, 30):
        pool = KVPool(1, 90, 1, 32, torch.float32, torch.device(DEVICE))
        sequence, rows = PooledSequence(90), []
        for first, end in ((0, cut), (cut, 41)):
            if first < end:
                # The last part is a tree whose second branch is of no interest.
                parents = [*range(-1, end - first - 1)] + ([-1] if first else [])
                part = torch.cat([x[first:end], x[: len(parents) - (end - first)]])
                laid_out = append_rows(pool, [(sequence, (), parents)], 90)
                ops.run_layers(stack, 0, 1, part, pool.keys, pool.values, laid_out)
                rows.append(part[: end - first])
                pool.commit(sequence, range(end - first))
        results.append(torch.cat(rows))
    assert torch.equal(*results)


@pytest.mark.parametrize("kind", ["llama_gqa", "qwen3", "mistral_sliding"])
def test_a_model(kind: str, zoo: Path) -> None:
    """A prompt without a graph, then a tree and a chain with one, against plain torch."""
    folder = make_model(kind, zoo, num_hidden_layers=2)
    plain, fused = load(folder), load(folder)
    fused._ops = CudaOps(by_row=True)
    fused._use_graphs((lambda step: step) if INTERPRETED else None)
    rng = np.random.default_rng(4)
    prompt, chain, drafted = (rng.integers(0, 256, size) for size in (18, 1, 3))
    parents = np.array([-1, 0, 0], np.int32)
    results = []
    for runner in (plain, fused):
        a, b = runner.new_sequence(), runner.new_sequence()
        runner.forward([Segment(a, prompt, logits="none")])
        runner.commit(a, range(18))
        result = runner.forward([Segment(b, chain), Segment(a, drafted, parents)])
        runner.commit(a, [0, 2])
        results.append((result.logits, *runner.keys_and_values(a)))
    for expected, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    assert fused._graphs is not None and list(fused._graphs._replays) == [4]


def load(folder: Path) -> LlamaRunner:
    if INTERPRETED:
        return load_runner_without_kernels(folder, batch_invariant=True, kv_tokens=60)
    runner = LlamaRunner(folder, device="cuda", batch_invariant=True, kv_tokens=60)
    runner._ops, runner._graphs = TorchOps(by_row=True), None
    return runner


def test_states_of_layers_change_nothing() -> None:
    """With states the sums are made at once, without them by the next norm."""
    stack = random_stack(torch.float32, heads=2, kv_heads=1, dim=32, device=DEVICE)
    pool = KVPool(1, 20, 1, 32, torch.float32, torch.device(DEVICE))
    sequence = PooledSequence(20)
    rows = append_rows(pool, [(sequence, (), [-1, 0, 0])], 20)
    x = torch.randn(3, stack.hidden_size, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    two = replace(stack, layers=stack.layers * 2)
    keys = pool.keys.expand(2, -1, -1, -1).clone()
    values, out, states = keys.clone(), x.clone(), x.new_empty(2, *x.shape)
    ops = CudaOps(by_row=True)
    ops.run_layers(two, 0, 2, out, keys, values, rows)
    ops.run_layers(two, 0, 2, x, keys, values, rows, states)
    assert torch.equal(out, x)
    assert torch.equal(states[1], x)


def test_the_check_at_load_passes() -> None:
    stack = random_stack(torch.float16, heads=4, kv_heads=2, dim=32, norms=True, device=DEVICE)
    ops = fused_ops(stack, by_row=True)
    assert isinstance(ops, CudaOps)


@pytest.mark.timeout(600)
def test_the_kernels_compile_for_devices(tmp_path: Path) -> None:
    """To machine code, for A100 and H100: the interpreter takes more than the compiler."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    result = subprocess.run(
        [sys.executable, "-m", "tests.core.compile_kernels", "80", "90"],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for kernel in ("add_rmsnorm", "silu_times", "rope_store", "tree_attention"):
        for arch in ("80", "90"):
            assert f"sm_{arch} Llama 3 8B: {kernel}" in result.stdout
