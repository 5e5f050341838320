"""Measure the kernels against the processor's limits: products beside a roofline.

The roofline of a product is the lower of two numbers measured beside it: the processor's
multiply-adds in registers, and the rate at which it reads an array that no cache holds (Williams,
Waterman, Patterson 2009). The calls take so many copies of a model's layers in turn that no cache
holds them, because in a forward each layer finds the caches full of the others' weights.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from paceline.models import kernels
from paceline.models.native_ops import NativeOps
from paceline.models.packing import Packing
from paceline.models.quants import quantise

ROWS = (1, 2, 4, 8, 16, 32)
FOOTPRINT = 192e6  # bytes of weights read in turn: more than the caches hold


@dataclass(frozen=True, slots=True)
class Shapes:
    """The products of a model: ``layers`` times those of a layer, and the output layer."""

    name: str
    layers: int
    hidden: int
    qkv: int
    attended: int
    ffn: int
    vocab: int

    @property
    def layer(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of each product of a layer."""
        hidden, ffn = self.hidden, self.ffn
        return (hidden, self.qkv), (self.attended, hidden), (hidden, 2 * ffn), (ffn, hidden)


MODELS = (
    Shapes("demo", 20, 160, 480, 160, 416, 4096),
    Shapes("135M", 30, 576, 960, 576, 1536, 49152),
    Shapes("0.3B", 24, 1024, 3072, 1024, 2752, 32000),
)
DTYPES = "float32", "float32/2", "bfloat16", "int8", "Q8_0", "Q4_1"
"""``float32/2``: float32 inputs, and weights that bfloat16 can hold; Q8_0, Q4_1: GGUF's blocks."""
QUANTISED = "Q8_0", "Q4_1"


@dataclass(frozen=True, slots=True)
class ProductTiming:
    """One measurement.

    Attributes:
        seconds: time for all products of a forward.
        flops: two for each weight and row, a second.
        bytes: of weights, a second.
        roofline: seconds that arithmetic or memory, the slower one, takes at its best.
    """

    variant: str
    model: str
    dtype: str
    packing: str
    rows: int
    seconds: float
    flops: float
    bytes: float
    roofline: float

    @property
    def share(self) -> float:
        """Share of the roofline, 1 at best."""
        return self.roofline / self.seconds


class _Product(ctypes.Structure):
    """``struct product`` of kernels/roofline.h."""

    _fields_ = [
        ("packed", ctypes.c_void_p),
        ("packing", ctypes.c_int64),
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    ]


@contextmanager
def forced(variant: str) -> Iterator[ctypes.CDLL]:
    """Set PACELINE_KERNELS to ``variant`` inside this context."""
    before = os.environ.get("PACELINE_KERNELS")
    os.environ["PACELINE_KERNELS"] = variant
    try:
        yield kernels.load()
    finally:
        if before is None:
            del os.environ["PACELINE_KERNELS"]
        else:
            os.environ["PACELINE_KERNELS"] = before


def fastest(call: Callable[[], object], seconds: float, least: int = 3) -> float:
    """Seconds of the fastest call among those that fit: the speed of an otherwise idle machine."""
    best, begun, count = float("inf"), time.perf_counter(), 0
    while count < least or time.perf_counter() - begun < seconds:
        started = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - started)
        count += 1
    return best


def read_speed(library: ctypes.CDLL, threads: int, seconds: float = 0.5) -> float:
    """Bytes per second read from an array of 256 MB."""
    library.read_all.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
    library.read_all.restype = ctypes.c_float
    array = torch.zeros(64 * 2**20)
    call = partial(library.read_all, array.data_ptr(), array.numel(), threads)
    return array.numel() * 4 / fastest(call, seconds)


def peak_speed(library: ctypes.CDLL, packing: Packing, threads: int, seconds: float = 0.2) -> float:
    """Multiply-adds per second, in registers."""
    library.peak.argtypes = [ctypes.c_int, ctypes.c_long, ctypes.c_int]
    library.peak.restype = ctypes.c_double
    rounds = 1000
    while fastest(partial(library.peak, packing, rounds, threads), 0, 1) < 0.005:
        rounds *= 2
    done: float = library.peak(packing, rounds, threads)
    return done / fastest(partial(library.peak, packing, rounds, threads), seconds)


class Products:
    """A model's products with weights of a kind, for the variant that is loaded now.

    Args:
        dtype: one of ``DTYPES``.
        footprint: bytes of weights that the calls take in turn.
    """

    def __init__(self, shapes: Shapes, dtype: str, footprint: float = FOOTPRINT) -> None:
        self._library = kernels.load()
        narrow = dtype == "bfloat16"
        ops = NativeOps(torch.bfloat16 if narrow else torch.float32, int8=dtype == "int8")
        self._narrow = int(narrow)
        size = {"float32": 4, "int8": 1, "Q8_0": 34 / 32, "Q4_1": 20 / 32}.get(dtype, 2)
        layer = sum(i * o for i, o in shapes.layer)
        copies = max(1, round(footprint / (size * layer * shapes.layers)))
        self._kept: list[torch.Tensor] = []
        generator = torch.Generator().manual_seed(1)

        def pack(inputs: int, outputs: int) -> tuple[int, Packing, int]:
            """Pack a matrix; returns its address, packing and bytes. The others are copies."""
            weight = torch.randn(outputs, inputs, generator=generator)
            if dtype in QUANTISED:
                packed = ops.packer.pack_quantised(quantise(weight.numpy(), dtype))
                self._kept.append(packed.data)
                return packed.data.data_ptr(), packed.packing, packed.data.nbytes
            weight = weight if dtype == "float32" else weight.bfloat16()
            packed = ops.pack(weight.to(torch.bfloat16 if narrow else torch.float32))
            self._kept.append(packed.data)
            return packed.data.data_ptr(), packed.packing, packed.data.nbytes

        # Every layer has its own weights, as in a model, though their values are the same.
        firsts = [pack(*each) for each in shapes.layer]
        per_layer = sum(first[2] for first in firsts)
        store = torch.empty(copies * shapes.layers * per_layer + 64, dtype=torch.uint8)
        self._kept.append(store)
        address = store.data_ptr() + -store.data_ptr() % 64
        self._turns: list[ctypes.Array[_Product]] = []
        head = pack(shapes.hidden, shapes.vocab)
        self.packing, self.weights, self.bytes = firsts[0][1], 0, 0
        for _ in range(copies):
            products = []
            for _ in range(shapes.layers):
                for (inputs, outputs), (at, packing, nbytes) in zip(
                    shapes.layer, firsts, strict=True
                ):
                    ctypes.memmove(address, at, nbytes)
                    products.append(_Product(address, packing, inputs, outputs))
                    address += nbytes
            products.append(_Product(head[0], head[1], shapes.hidden, shapes.vocab))
            self._turns.append((_Product * len(products))(*products))
        self.weights = shapes.layers * layer + shapes.hidden * shapes.vocab
        self.bytes = shapes.layers * per_layer + head[2]
        widest = max(shapes.hidden, shapes.ffn, shapes.attended)
        most = max(shapes.vocab, 2 * shapes.ffn, shapes.qkv)
        dtype_ = torch.bfloat16 if narrow else torch.float32
        self._x = torch.randn(max(ROWS), widest, generator=generator).to(dtype_)
        self._out = torch.empty(max(ROWS), most, dtype=dtype_)
        self._turn = 0

    def timed(self, rows: int, threads: int) -> float:
        """Seconds of the products of one forward."""
        turn = self._turns[self._turn]
        self._turn = (self._turn + 1) % len(self._turns)
        started = time.perf_counter()
        self._library.multiply_all(
            ctypes.byref(turn), len(turn), ctypes.c_void_p(self._x.data_ptr()),
            ctypes.c_void_p(self._out.data_ptr()), rows, threads, self._narrow,
        )  # fmt: skip
        return time.perf_counter() - started


@dataclass(frozen=True, slots=True)
class Speeds:
    """The two limits of a roofline: multiply-adds and bytes per second."""

    peak: float
    memory: float

    @staticmethod
    def of(library: ctypes.CDLL, packing: Packing, threads: int, seconds: float = 0.3) -> Speeds:
        return Speeds(
            peak_speed(library, packing, threads, seconds), read_speed(library, threads, seconds)
        )


def measure(
    variants: Sequence[str],
    models: Sequence[Shapes] = MODELS,
    dtypes: Sequence[str] = DTYPES,
    rows: Sequence[int] = ROWS,
    threads: int = 1,
    seconds: float = 0.3,
    progress: Callable[[ProductTiming], None] = lambda cell: None,
) -> list[ProductTiming]:
    """Time the products of each variant, model, dtype and number of rows, beside their roofline.

    The numbers of rows take turns, and the fastest turn of each counts. The roofline is measured
    before and after, and the faster one counts: on a shared machine that lowers the shares, and
    never raises them.

    Args:
        seconds: time for each cell.
    """
    cells = []
    for variant in variants:
        with forced(variant) as library:
            for shapes in models:
                for dtype in dtypes:
                    products = Products(shapes, dtype)
                    before = Speeds.of(library, products.packing, threads)
                    found = dict.fromkeys(rows, float("inf"))
                    began, turns = time.perf_counter(), 0
                    while turns < 3 or time.perf_counter() - began < seconds * len(rows):
                        for count in rows:
                            found[count] = min(found[count], products.timed(count, threads))
                        turns += 1
                    after = Speeds.of(library, products.packing, threads)
                    peak = max(before.peak, after.peak)
                    memory = max(before.memory, after.memory)
                    for count, took in found.items():
                        best = max(products.weights * count / peak, products.bytes / memory)
                        flops = 2 * products.weights * count / took
                        name = products.packing.name.lower()
                        cell = ProductTiming(
                            variant, shapes.name, dtype, name, count, took, flops,
                            products.bytes / took, best,
                        )  # fmt: skip
                        cells.append(cell)
                        progress(cell)
    return cells


@dataclass(frozen=True, slots=True)
class Glance:
    """What `paceline doctor` shows of the kernels.

    Attributes:
        classes: numerics classes of float32 and of bfloat16 targets.
        one_row, eight_rows: shares of the roofline, products of the demo target, on one thread.
        memory, peak: bytes and multiply-adds a second.
    """

    classes: str
    one_row: float
    eight_rows: float
    memory: float
    peak: float


def glance() -> Glance:
    """Measure for about a second."""
    classes = []
    for dtype in (torch.float32, torch.bfloat16):
        ops = NativeOps(dtype)
        ops.pack(torch.ones(16, 32, dtype=dtype))
        classes.append(f"{ops.numerics_class} ({str(dtype).removeprefix('torch.')})")
    library = kernels.load()
    products = Products(MODELS[0], "float32/2")
    speeds = Speeds.of(library, products.packing, 1, 0.1)
    found = dict.fromkeys((1, 8), float("inf"))
    began, turns = time.perf_counter(), 0
    while turns < 3 or (turns < 50 and time.perf_counter() - began < 0.5):
        for rows in found:
            found[rows] = min(found[rows], products.timed(rows, 1))
        turns += 1
    shares = {
        rows: max(products.weights * rows / speeds.peak, products.bytes / speeds.memory) / took
        for rows, took in found.items()
    }
    return Glance(", ".join(classes), shares[1], shares[8], speeds.memory, speeds.peak)
