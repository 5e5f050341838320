"""All versions of the fast path: the C kernels, those without tiles, and plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.models.llama import LlamaRunner
from paceline.models.native_ops import NativeOps
from paceline.models.packing import Packing
from paceline.models.torch_ops import TorchOps


def load_runner(folder: Path, **options: Any) -> LlamaRunner:
    """A runner with the C kernels; fails where they cannot be built."""
    runner = LlamaRunner(folder, **options)
    assert isinstance(runner._ops, NativeOps)
    return runner


def load_runner_without_tiles(folder: Path, **options: Any) -> LlamaRunner:
    """A runner as a processor without matrix tiles has it."""
    runner = load_runner(folder, numerics="portable", **options)
    assert runner.packed_lm_head.packing in (Packing.FLOATS, Packing.HALVES)
    return runner


def load_runner_without_kernels(folder: Path, **options: Any) -> LlamaRunner:
    """A runner as a machine without a C compiler has it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_KERNELS", "off")
        with pytest.warns(UserWarning, match="without the C kernels"):
            runner = LlamaRunner(folder, **options)
    assert isinstance(runner._ops, TorchOps)
    return runner
