"""Forwards of a few rows as CUDA graphs: recorded once, replayed with one call.

The forward of a decoding step launches some ten kernels for each layer, and on a GPU the launches
take longer than the kernels themselves. A graph replays them all at once, on the memory that it was
recorded with. So rows are padded to one of a few numbers, and inputs and logits have fixed
addresses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

from paceline.models.cuda_ops import HEADER, DeviceRows, flatten, pinned
from paceline.models.rows import Rows
from paceline.types import IntArray

Tensor = torch.Tensor

# Records what a function launches; calling the result launches it again.
Capture = Callable[[Callable[[], object]], Callable[[], object]]


class ForwardGraphs:
    """Graphs of one model's forward, one for each padded number of rows.

    The first use of a graph records it and compares it with the forward that it records: if a bit
    differs, or recording fails, it logs a warning and :meth:`run` returns None from then on. That
    first forward takes several times as long as others.

    In ``batch_invariant`` mode a row has the same bits in every graph and outside of them: a kernel
    computes it by itself, and products use tiles of a fixed number of rows, independent of the
    padding.

    Args:
        forward: computes logits of rows on the device from nothing but ``rows.data``, without
            waiting for the host; tokens are in it.  # [num_rows, vocab_size]
        logits: gives the type, the device and the width of what it returns.
        capture: records a function (:class:`Capture`); tests may pass another.
    """

    SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
    # Entries of paths and tables in one forward. Longer contexts run without graphs: for them the
    # launches do not matter.
    MAX_ENTRIES = 1 << 20

    def __init__(
        self,
        forward: Callable[[DeviceRows], Tensor],
        vocab_size: int,
        dtype: torch.dtype,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self._forward = forward
        self._device = device
        self._capture = cuda_capture(device) if capture is None else capture
        size = len(HEADER) * self.SIZES[-1] + self.MAX_ENTRIES
        self._input = torch.zeros(size, dtype=torch.int32, device=device)
        self._logits = torch.zeros(self.SIZES[-1], vocab_size, dtype=dtype, device=device)
        self._replays: dict[int, Callable[[], object]] = {}
        self._works = True

    def run(self, tokens: IntArray, rows: Rows) -> Tensor | None:
        """Logits of all rows, or None if no graph fits them.

        # [num_rows] -> [num_rows, vocab_size] float32
        """
        count = len(tokens)
        if not self._works or count > self.SIZES[-1]:
            return None
        size = next(size for size in self.SIZES if size >= count)
        flat = flatten(rows, size, tokens)
        if len(flat) > len(self._input):
            return None
        self._input[: len(flat)].copy_(pinned(flat, self._device), non_blocking=True)
        if size in self._replays:
            self._replays[size]()
        elif not self._record(size):
            return None
        # A copy, because the next replay of any graph writes to the same memory.
        return self._logits[:count].to(torch.float32, copy=True)

    def _record(self, size: int) -> bool:
        rows = DeviceRows(self._input, size)
        out = self._logits[:size]

        def step() -> None:
            out.copy_(self._forward(rows))

        try:
            step()  # compiles kernels, which cannot be recorded
            expected = out.clone()
            replay = self._capture(step)
            out.zero_()
            replay()
            if not torch.equal(out, expected):
                raise RuntimeError("a replay gave other logits than the forward that it recorded")
        except Exception as error:  # without graphs the results are the same, only slower
            self._works = False
            self._replays.clear()
            reason = f"{type(error).__name__}: {error}"
            warnings.warn(f"running without CUDA graphs, slower: {reason}", stacklevel=4)
            return False
        self._replays[size] = replay
        return True


def cuda_capture(device: torch.device) -> Capture:
    """Records CUDA graphs, which share one pool of memory: only one runs at a time."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def capture(step: Callable[[], object]) -> Callable[[], object]:
        # Libraries set themselves up at their first call on a stream.
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate memory during the capture.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            step()
        return graph.replay

    return capture
