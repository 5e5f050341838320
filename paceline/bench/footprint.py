"""What an object holds in memory: tensors, arrays and Python objects that only it reaches."""

from __future__ import annotations

import ctypes
import gc
import sys
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from paceline.models.kv_cache import KVPool

# Code has no owner, and what a closure or a method remembers is shared with its owner. KV
# pools are as large as they may ever become, and mostly untouched.
_SKIPPED = (
    type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType,
    types.CodeType, types.FrameType, ctypes.CDLL, KVPool,
)  # fmt: skip


def footprint(roots: Iterable[Any], besides: Iterable[Any] = ()) -> int:
    """Bytes that ``roots`` reach and ``besides`` do not.

    Weights that are mapped from a file count, whether they are resident or not.
    """
    seen: set[int] = set()
    _bytes(besides, seen)
    return _bytes(roots, seen)


def _bytes(roots: Iterable[Any], seen: set[int]) -> int:
    total, waiting = 0, list(roots)
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, _SKIPPED):
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            # Tensors share storages, and each look at one makes another object.
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                total += storage.nbytes()
        elif isinstance(value, np.ndarray):
            if value.base is None:
                total += value.nbytes
            else:
                waiting.append(value.base)
        elif isinstance(value, ctypes.Array | ctypes.Structure):
            total += ctypes.sizeof(value)
        else:
            total += sys.getsizeof(value)
            waiting += gc.get_referents(value)
    return total
