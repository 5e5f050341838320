"""What the ways to write several codebooks lose, exactly: Stack-and-Delay (arXiv 2309.08804).

    python -m benchmarks.codebooks [--codebooks 3] [--frames 6] [--sources 5]

A codec of audio turns each frame into K codes, each correcting the one before. A pattern says which
codes a step writes together, given all that earlier steps wrote. Fewer steps are faster, and codes
of one step do not know of one another. There is no model and no audio here: made sources of binary
codes whose every conditional is known. So the law of a pattern's texts, and what it loses against
the source's, are computed without sampling.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

Cell = tuple[int, int]
"""Codebook and frame."""
Pattern = list[list[Cell]]
"""The cells that each step writes."""
Floats = NDArray[np.float64]
EMPTY = -1


def flat(codebooks: int, frames: int) -> Pattern:
    """One code a step, frame by frame."""
    return [[(book, frame)] for frame in range(frames) for book in range(codebooks)]


def parallel(codebooks: int, frames: int) -> Pattern:
    """A whole frame a step."""
    return [[(book, frame) for book in range(codebooks)] for frame in range(frames)]


def delay(codebooks: int, frames: int) -> Pattern:
    """Each codebook a step behind the one that it corrects (MusicGen)."""
    return _delayed(codebooks, list(range(frames)))


def stack_delay(codebooks: int, frames: int) -> Pattern:
    """As `delay`, but with frames in an order that keeps neighbours apart.

    The frames are cut into as many runs as there are codebooks, and the runs take turns. So when a
    frame begins, the one before it is complete, as in `flat`.
    """
    length = -(-frames // codebooks)
    runs = [range(start, min(start + length, frames)) for start in range(0, frames, length)]
    turns = itertools.zip_longest(*runs)
    return _delayed(codebooks, [frame for turn in turns for frame in turn if frame is not None])


def _delayed(codebooks: int, order: Sequence[int]) -> Pattern:
    steps = range(len(order) + codebooks - 1)
    return [
        [(book, order[s - book]) for book in range(codebooks) if 0 <= s - book < len(order)]
        for s in steps
    ]


PATTERNS: dict[str, Callable[[int, int], Pattern]] = {
    "flat": flat, "stack-delay": stack_delay, "delay": delay, "parallel": parallel,
}  # fmt: skip


def lay_out(codes: NDArray[np.int64], pattern: Pattern) -> NDArray[np.int64]:
    """Codes as a model of several streams reads them, EMPTY where a step writes none.

    Args:
        codes: # [codebooks, frames]

    Returns:
        # [steps, codebooks]
    """
    rows = np.full((len(pattern), len(codes)), EMPTY)
    for step, cells in enumerate(pattern):
        for book, frame in cells:
            rows[step, book] = codes[book, frame]
    return rows


def collect(rows: NDArray[np.int64], pattern: Pattern, frames: int) -> NDArray[np.int64]:
    """The codes of :func:`lay_out`.  # [steps, codebooks] -> [codebooks, frames]"""
    codes = np.full((rows.shape[1], frames), EMPTY)
    for step, cells in enumerate(pattern):
        for book, frame in cells:
            codes[book, frame] = rows[step, book]
    return codes


class Source:
    """A chain of frames of binary codes: each code given those before it in its frame, and the last
    frame, with random probabilities.

    Args:
        strength: how far the probabilities' logits are from 0; 0: fair coins.
    """

    def __init__(self, codebooks: int, frames: int, seed: int, strength: float = 2.0) -> None:
        self.codebooks, self.frames = codebooks, frames
        rng = np.random.default_rng(seed)
        # Logits of a code being 1, by the last frame and by the codes before it in its own.
        logits = [rng.normal(0, strength, (2,) * (codebooks + book)) for book in range(codebooks)]
        joint = np.ones(())
        for frame, book in itertools.product(range(frames), range(codebooks)):
            last = () if frame else (0,) * codebooks  # before the first frame: silence
            ones = 1 / (1 + np.exp(-logits[book][last]))
            joint = joint[..., None] * np.stack([1 - ones, ones], -1)
        self.joint: Floats = joint
        """Of all codes, one axis each, frame by frame.  # [2, 2, ...]"""

    def axis(self, cell: Cell) -> int:
        book, frame = cell
        return frame * self.codebooks + book

    def marginal(self, cells: Sequence[Cell]) -> Floats:
        """Of some cells; the other axes have size 1.  # [1 or 2, ...]"""
        kept = {self.axis(cell) for cell in cells}
        others = tuple(axis for axis in range(self.joint.ndim) if axis not in kept)
        summed: Floats = self.joint.sum(others, keepdims=True)
        return summed

    def conditional(self, cell: Cell, known: Sequence[Cell]) -> Floats:
        """Of a cell given others, for all values of these; the other axes have size 1."""
        result: Floats = self.marginal([*known, cell]) / self.marginal(known)
        return result


def law(source: Source, pattern: Pattern) -> Floats:
    """How probable each text is when it is written by a pattern.  # as source.joint"""
    written, probability = list[Cell](), np.ones_like(source.joint)
    for cells in pattern:
        for cell in cells:
            probability = probability * source.conditional(cell, written)
        written += cells
    return probability


def lost(source: Source, pattern: Pattern) -> float:
    """Divergence of the source from the pattern's law, in nats: what its steps do not know."""
    divergence = (source.joint * np.log(source.joint / law(source, pattern))).sum()
    return max(0.0, float(divergence))  # rounding may leave less than nothing


def write(source: Source, pattern: Pattern, rng: np.random.Generator) -> NDArray[np.int64]:
    """One text, step by step: the decode loop with several codebooks.  # [codebooks, frames]"""
    codes = np.full((source.codebooks, source.frames), EMPTY)
    written = list[Cell]()
    for cells in pattern:
        place = [0] * source.joint.ndim  # in tables whose axes of unwritten cells have size 1
        for cell in written:
            place[source.axis(cell)] = codes[cell]
        for cell in cells:
            zeros = source.conditional(cell, written)[tuple(place)]
            codes[cell] = int(rng.random() >= zeros)
        written += cells
    return codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--codebooks", type=int, default=3)
    parser.add_argument("--frames", type=int, default=6)
    parser.add_argument("--sources", type=int, default=5)
    args = parser.parse_args()
    sources = [Source(args.codebooks, args.frames, seed) for seed in range(args.sources)]
    table = Table("pattern", "steps", "nats lost: median", "least", "most")
    for name, make in PATTERNS.items():
        pattern = make(args.codebooks, args.frames)
        values = sorted(lost(source, pattern) for source in sources)
        shown = (values[len(values) // 2], values[0], values[-1])
        table.add_row(name, str(len(pattern)), *(f"{value:.3f}" for value in shown))
    Console().print(table)


if __name__ == "__main__":
    main()
