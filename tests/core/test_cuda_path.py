"""The path for CUDA devices: what goes to the device, graphs, and what happens where they fail.

All of it but the kernels runs here on a CPU: :class:`HostOps` reads what the kernels would read
and computes it in plain torch, and a "graph" calls the function that it has recorded. The kernels
are in test_triton_kernels.py. What is marked ``gpu`` needs a device.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine
from paceline.models.base import Segment
from paceline.models.cuda_graphs import ForwardGraphs
from paceline.models.cuda_ops import (
    HEADER,
    CudaOps,
    DeviceRows,
    KernelsDiffer,
    check,
    flatten,
    fused_ops,
)
from paceline.models.kv_cache import KVPool, PooledSequence
from paceline.models.llama import LlamaRunner
from paceline.models.ops import Stack
from paceline.models.rows import Rows, append_rows
from paceline.models.torch_ops import TorchOps
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.types import IndexArray, Need
from tests.core.runners import load_runner_without_kernels
from tests.core.test_batch_invariance import Case, cases, free, token_by_token, verify
from tests.modelzoo import make_model

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

Tensor = torch.Tensor


def read(data: IndexArray, num_rows: int) -> tuple[Rows, IndexArray, IndexArray]:
    """The rows of a flat array, their tokens, and which rows are padding."""
    header = dict(zip(HEADER, data[: len(HEADER) * num_rows].reshape(-1, num_rows), strict=True))
    tables = [data[start:] for start in header["table_start"]]
    addresses = np.array([table.ctypes.data for table in tables], np.int64)
    rows = Rows(
        header["position"], header["slot"], header["prefix_length"], header["path_length"],
        tables, addresses, data, header["path_start"],
    )  # fmt: skip
    return rows, header["token"], header["slot"] < 0


class HostOps(CudaOps):
    """Plain torch over what the kernels read; padding is left as it is."""

    def __init__(self, by_row: bool) -> None:
        TorchOps.__init__(self, by_row)

    rmsnorm = TorchOps.rmsnorm

    def run_on_device(
        self, stack: Stack, first: int, last: int, x: Tensor, keys: Tensor, values: Tensor,
        rows: DeviceRows, states: Tensor | None = None,
    ) -> None:  # fmt: skip
        unpacked, _, padding = read(rows.data.numpy().copy(), rows.num_rows)
        real = np.flatnonzero(~padding)
        part = x[real]
        some = None if states is None else part.new_empty(last - first, *part.shape)
        TorchOps.run_layers(self, stack, first, last, part, keys, values, unpacked.take(real), some)
        x[real] = part
        if states is not None:
            states[:, real] = some


def host_runner(folder: Path, **options: object) -> tuple[LlamaRunner, list[int]]:
    """A runner as on a CUDA device, and how often each of its graphs ran."""
    runner = load_runner_without_kernels(folder, **options)
    runner._ops = HostOps(runner.batch_invariant)
    runs: list[int] = []

    def capture(step: Callable[[], object]) -> Callable[[], object]:
        number = len(runs)
        runs.append(0)

        def replay() -> None:
            runs[number] += 1
            step()

        return replay

    runner._use_graphs(capture)
    return runner, runs


# --- what goes to the device ---------------------------------------------------------------------


@settings(max_examples=60)
@given(st.data())
def test_rows_on_the_device_are_those_of_the_host(data: st.DataObject) -> None:
    pool = KVPool(1, 500, 1, 2, torch.float32, torch.device("cpu"))
    parts: list[tuple[PooledSequence, tuple[int, ...], list[int]]] = []
    for _ in range(data.draw(st.integers(1, 4))):
        sequence = PooledSequence(200)
        prefix = data.draw(st.integers(0, 40))
        pool.append(sequence, range(-1, prefix - 1))
        pool.commit(sequence, range(prefix))
        size = data.draw(st.integers(1, 9))
        parents = [data.draw(st.integers(-1, node - 1)) for node in range(size)]
        parts.append((sequence, (), parents))
    rows = append_rows(pool, parts, 200)
    count = len(rows.slots)
    num_rows = count + data.draw(st.integers(0, 5))
    tokens = np.arange(100, 100 + count)
    flat = flatten(rows, num_rows, tokens)
    assert flat.dtype == np.int32
    again, token_ids, padding = read(flat, num_rows)
    assert padding.tolist() == [False] * count + [True] * (num_rows - count)
    assert token_ids[:count].tolist() == tokens.tolist()
    assert again.positions[:count].tolist() == rows.positions.tolist()
    assert again.slots[:count].tolist() == rows.slots.tolist()
    for row in range(count):
        assert again.context(row).tolist() == rows.context(row).tolist()
    for row in range(count, num_rows):
        assert len(again.context(row)) == 0
    # Each sequence's table is there once.
    longest: dict[int, int] = {}
    for address, length in zip(rows.table_addresses.tolist(), rows.prefix_length, strict=True):
        longest[address] = max(int(length), longest.get(address, 0))
    assert len(flat) == len(HEADER) * num_rows + len(rows.paths) + sum(longest.values())


@pytest.mark.parametrize("kind", ["llama_gqa", "qwen3", "mistral_sliding"])
def test_a_forward_reads_nothing_else(kind: str, zoo: Path) -> None:
    """Trees, chains and prompts of the whole suite's generator, bit for bit as in plain torch."""
    folder = make_model(kind, zoo)
    plain = load_runner_without_kernels(folder, batch_invariant=True, kv_tokens=2000)
    runner, runs = host_runner(folder, batch_invariant=True, kv_tokens=2000)

    @settings(max_examples=8)
    @given(cases())
    def same(case: Case) -> None:
        results = []
        for each in (plain, runner):
            sequence, mates, logits = verify(each, case)
            each.commit(sequence, [0])
            results.append((logits, *each.keys_and_values(sequence)))
            free(each, [sequence, *mates])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)

    same()
    assert sum(runs) > len(runs), "no graph was used twice"
    # Slot 0 stands for masked places: padding must not have written there.
    assert not runner._pool.keys[:, 0].any()
    assert not runner._pool.values[:, 0].any()


# --- graphs --------------------------------------------------------------------------------------


def test_each_forward_takes_the_smallest_graph_that_holds_it(tiny_folder: Path) -> None:
    runner, runs = host_runner(tiny_folder, batch_invariant=True)
    plain = load_runner_without_kernels(tiny_folder, batch_invariant=True)
    sizes: list[int] = []
    for count in (1, 1, 2, 3, 4, 9, 16, 20, 65, 97, 128, 129, 200, 5):
        before = len(runs)
        ids = np.arange(count) % 250
        both = []
        for each in (runner, plain):
            sequence = each.new_sequence()
            both.append(each.forward([Segment(sequence, ids)]).logits)
            each.free(sequence)
        assert torch.equal(*both)
        assert both[0].dtype is torch.float32
        if len(runs) > before:
            sizes.append(count)
    # Others found a graph that was there already, and those above the largest take none.
    assert sizes == [1, 2, 3, 9, 20, 65, 97, 5]
    assert list(runner._graphs._replays) == [1, 2, 4, 16, 24, 96, 128, 8]  # type: ignore[union-attr]


def test_logits_outlive_the_next_replay(tiny_folder: Path) -> None:
    runner, _ = host_runner(tiny_folder)
    sequence = runner.new_sequence()
    first = runner.forward([Segment(sequence, np.array([65]))]).logits
    kept = first.clone()
    runner.forward([Segment(sequence, np.array([66]))])
    assert torch.equal(first, kept)


def test_wanted_rows_and_what_takes_no_graph(tiny_folder: Path) -> None:
    runner, runs = host_runner(tiny_folder, batch_invariant=True)
    plain = load_runner_without_kernels(tiny_folder, batch_invariant=True)
    ids = np.arange(60, 66)
    results = []
    for each in (runner, plain):
        a, b = each.new_sequence(), each.new_sequence()
        some = each.forward([Segment(a, ids, logits="last"), Segment(b, ids[:2], logits="all")])
        assert some.row_offsets == (0, 1, 3)
        used = len(runs)
        each.forward([Segment(a, ids, logits="none")])
        hidden = each.forward([Segment(a, ids)], frozenset({Need.HIDDEN_STATES}))
        fewer = each.forward([Segment(b, ids, layers=(0,), resumable=True)])
        resumed = each.forward([Segment(b, ids[:1], np.array([1], np.int32), resume=(2, 3))])
        assert len(runs) == used
        results.append((some, hidden, fewer, resumed))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours.logits, theirs.logits)
    extras = [result[1].extras[Need.HIDDEN_STATES] for result in results]
    assert torch.equal(*extras)


def test_contexts_that_do_not_fit_take_no_graph(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ForwardGraphs, "MAX_ENTRIES", 30)
    monkeypatch.setattr(ForwardGraphs, "SIZES", (1, 4))
    runner, runs = host_runner(tiny_folder)
    sequence = runner.new_sequence()
    for _ in range(70):
        runner.forward([Segment(sequence, np.array([65]))])
        runner.commit(sequence, [0])
    # 4 rows * 7 fields + 30 entries are the array; one row and its table fill it.
    assert runs == [4 * len(HEADER) + 30 - len(HEADER)]


@pytest.mark.parametrize("fault", ["recording", "other logits"])
def test_without_graphs_where_they_do_not_work(fault: str, tiny_folder: Path) -> None:
    def capture(step: Callable[[], object]) -> Callable[[], object]:
        if fault == "recording":
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: None  # replays nothing

    runner, _ = host_runner(tiny_folder, batch_invariant=True)
    runner._use_graphs(capture)
    plain = load_runner_without_kernels(tiny_folder, batch_invariant=True)
    both = []
    for each in (runner, plain):
        sequence, rows = each.new_sequence(), []
        for token in (65, 66, 67):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                rows.append(each.forward([Segment(sequence, np.array([token]))]).logits)
            reason = "not permitted" if fault == "recording" else "other logits than the forward"
            expected = each is runner and token == 65
            assert [reason in str(w.message) for w in caught] == [True] * expected
        both.append(torch.cat(rows))
    assert torch.equal(*both)


# --- whether to trust the kernels ----------------------------------------------------------------


@pytest.fixture
def stack(tiny_folder: Path) -> Stack:
    return load_runner_without_kernels(tiny_folder)._weights.stack


@pytest.mark.parametrize("by_row", [True, False])
def test_ops_that_compute_the_same_pass(by_row: bool, stack: Stack) -> None:
    check(HostOps(by_row), stack)


class Wrong(HostOps):
    """Ops with one fault."""

    fault = ""

    def run_on_device(
        self, stack: Stack, first: int, last: int, x: Tensor, keys: Tensor, values: Tensor,
        rows: DeviceRows, states: Tensor | None = None,
    ) -> None:  # fmt: skip
        if self.fault == "ignores windows":
            layers = tuple(replace(layer, window=None) for layer in stack.layers)
            stack = replace(stack, layers=layers)
        if self.fault == "misses the path":
            data = rows.data.clone()
            header = data[: len(HEADER) * rows.num_rows].view(-1, rows.num_rows)
            of_tree = header[HEADER.index("path_length")]
            of_tree[of_tree > 2] = 2
            rows = DeviceRows(data, rows.num_rows)
        super().run_on_device(stack, first, last, x, keys, values, rows, states)
        if self.fault == "depends on neighbours":
            x += 1e-6 * len(x)
        if self.fault == "gives no numbers":
            x[0, 0] = float("nan")
        if self.fault == "stores other keys":
            keys *= 1.01


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("ignores windows", "with a sliding window, states differ"),
        ("misses the path", "states differ"),
        ("depends on neighbours", "depends on its neighbours"),
        ("gives no numbers", "states differ"),
        ("stores other keys", "keys differ"),
    ],
)
def test_a_wrong_kernel_is_found(fault: str, told: str, stack: Stack) -> None:
    ops = Wrong(by_row=True)
    ops.fault = fault
    with pytest.raises(KernelsDiffer, match=told):
        check(ops, stack)


def test_plain_torch_takes_over(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "paceline.models.triton_kernels", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.warns(UserWarning, match=r"without the Triton kernels, slower: .*triton"):
        assert type(fused_ops(stack, by_row=True)) is TorchOps
    monkeypatch.setenv("PACELINE_KERNELS", "off")
    with pytest.warns(UserWarning, match="switched off by PACELINE_KERNELS=off"):
        assert type(fused_ops(stack, by_row=True)) is TorchOps
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing is wrong with the machine
        assert type(fused_ops(replace(stack, head_dim=258), by_row=True)) is TorchOps


# --- the engine ----------------------------------------------------------------------------------

METHODS = ("draft_model", "draft_model_tree", "layer_skip")
PROMPTS = [[65, 66, 67], [70] * 9, list(range(80, 120))]


def drafts_change_nothing(target: LlamaRunner, drafter: LlamaRunner) -> None:
    """With drafts, in a batch, the tokens are those of AR, alone."""
    engine = Engine(ModelTarget(target), {"draft_model": DraftModel(drafter)})
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=24, temperature=temperature, seed=3, ignore_eos=True)
        ar = SpeculationConfig(method="ar")
        expected = [engine.generate([p], params, ar)[0].output_ids for p in PROMPTS]
        for method in METHODS:
            config = SpeculationConfig(method=method, length="fixed")
            sessions = engine.generate(PROMPTS, params, config)
            assert [session.output_ids for session in sessions] == expected, method
            assert sum(session.stats.num_accepted for session in sessions) > 0, method
    assert target.num_free == target.kv_capacity


def test_drafts_change_nothing(tiny_folder: Path) -> None:
    (target, runs), (drafter, _) = (
        host_runner(tiny_folder, batch_invariant=True, kv_tokens=2000) for _ in range(2)
    )
    drafts_change_nothing(target, drafter)
    assert sum(runs) > 50


# --- on a device ---------------------------------------------------------------------------------

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@pytest.fixture(scope="module")
def device_runner(zoo: Path) -> Iterator[Callable[..., LlamaRunner]]:
    """Loads on a device; warns, and so fails, where it does not trust the kernels or graphs."""

    def load(kind: str, dtype: str = "float32", **options: object) -> LlamaRunner:
        folder = {"demo": TARGET_DIR, "drafter": DRAFTER_DIR}.get(kind) or make_model(kind, zoo)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            runner = LlamaRunner(
                folder, dtype=DTYPES[dtype], device="cuda", kv_tokens=3000, **options
            )
        assert isinstance(runner._ops, CudaOps)
        return runner

    yield load
    torch.cuda.empty_cache()


KINDS = ("demo", "llama_gqa", "llama_bias", "llama_head_dim", "qwen3", "mistral_sliding")


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_forwards_are_those_of_plain_torch(
    kind: str, dtype: str, device_runner: Callable[..., LlamaRunner]
) -> None:
    runner = device_runner(kind, dtype, batch_invariant=True)
    fused, graphs = runner._ops, runner._graphs
    tolerance = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.1}[dtype]

    @settings(max_examples=10)
    @given(cases())
    def same(case: Case) -> None:
        results = []
        for ops, recorded in ((fused, graphs), (fused, None), (TorchOps(by_row=True), None)):
            runner._ops, runner._graphs = ops, recorded
            sequence, mates, logits = verify(runner, case)
            free(runner, [sequence, *mates])
            results.append(logits)
        replayed, eager, plain = results
        assert torch.equal(replayed, eager)
        assert (eager - plain).norm() <= tolerance * plain.norm()

    same()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_cuda_is_batch_invariant(
    kind: str, dtype: str, device_runner: Callable[..., LlamaRunner]
) -> None:
    runner = device_runner(kind, dtype, batch_invariant=True)

    @settings(max_examples=10)
    @given(cases())
    def check_case(case: Case) -> None:
        sequence, mates, logits = verify(runner, case)
        alone = token_by_token(runner, case.prompt)
        assert torch.equal(logits[0], alone[-1])
        runner._graphs, graphs = None, runner._graphs
        assert torch.equal(token_by_token(runner, case.prompt), alone)
        runner._graphs = graphs
        free(runner, [sequence, *mates])

    check_case()


@pytest.mark.gpu
@needs_cuda
@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("dtype", DTYPES)
def test_cuda_drafts_change_nothing(dtype: str, device_runner: Callable[..., LlamaRunner]) -> None:
    target = device_runner("demo", dtype, batch_invariant=True)
    drafter = device_runner("drafter", dtype, batch_invariant=False)
    drafts_change_nothing(target, drafter)
