"""What a length controller is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidArgument
from paceline.exact_math import weights64
from paceline.types import (
    Budget,
    DraftStep,
    FloatArray,
    Load,
    Need,
    Outcome,
    RoundCosts,
    StopRule,
)

if TYPE_CHECKING:
    import torch

    from paceline.view import SessionView

T = TypeVar("T")


class ConfidenceStop:
    """Ends the draft when the drafter's highest probability is below ``threshold``.

    Kernels that draft whole chains know this rule.

    Attributes:
        shortest: depth before which no draft ends.
        threshold: may change from round to round; 0 never ends a draft.
    """

    wants_hidden = False

    def __init__(self, shortest: int, threshold: float) -> None:
        self.shortest = shortest
        self.threshold = threshold

    def stop_after(self, step: DraftStep) -> bool:
        return step.depth >= self.shortest and top_probability(step.scores) < self.threshold


class LengthController(Protocol):
    """Decides how much to draft. One instance for each session; a depth of 0 is legal.

    Attributes:
        stop_rule: ends a draft of an expanding drafter early, on the machine that drafts; None
            where the length is known before drafting begins.
    """

    stop_rule: StopRule | None

    @property
    def needs(self) -> frozenset[Need]:
        """What it wants from the target's next forward, beside what the drafter wants."""
        ...

    def budget(self, session: SessionView, load: Load) -> Budget:
        """Depth and nodes for the next round of ``session``."""
        ...

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        """Learn from a round: what became of the draft, and what it cost.

        Args:
            draft_seconds: until the draft was there, wherever it was made; 0 where that was so as
                soon as it was wanted.
            verify_seconds: the forward that verified it, together with its batch mates' drafts.
        """
        ...


def depth_ahead(controller: LengthController, usual: int) -> int:
    """Depth of a draft that is made before the answer to the one before has come.

    Args:
        usual: for controllers that do not have ``ahead``, which tells it.
    """
    return int(getattr(controller, "ahead", usual))


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """Between which depths a controller chooses.

    Attributes:
        start: ``num_speculative_tokens``: where a controller that moves step by step begins.
        shortest, longest: depths that it may choose, 0 <= shortest <= longest.
        nodes: node budget of the row; chains take as many nodes as they are deep.
        is_tree: whether drafts may have more nodes than levels.
    """

    start: int
    shortest: int
    longest: int
    nodes: int
    is_tree: bool = False

    def clip(self, depth: float) -> int:
        """The nearest depth within the bounds."""
        return max(self.shortest, min(self.longest, int(depth)))

    def budget(self, depth: int) -> Budget:
        """A budget of this depth; a tree may use all of its nodes at any depth."""
        return Budget(depth, self.nodes if self.is_tree else depth)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Node budgets that a controller may choose from, the largest first; chains have one."""
        if not self.is_tree:
            return (self.nodes,)
        least = min(2, self.nodes)
        return tuple(dict.fromkeys(max(least, self.nodes >> i) for i in range(4)))


@dataclass(frozen=True, slots=True, eq=False)
class LengthContext:
    """What an engine tells the length controllers of its sessions.

    Attributes:
        profile: measured costs of this machine, where there are any.
        measure: finds or measures them when a controller first asks; None where there are none.
        heads: folder with the trained heads of this pair of models; None: the demo pair's.
        vocab_size: of the target; 0 where it is not known.
        target_hidden_size, drafter_hidden_size: width of the models; 0 where it is not known.
        num_layers: of the target; 0 where its layers cannot be had one by one.
        head_layers: weight of its output layer, in layers.
        shadow_share: what part of the time that a shadow draft of a session takes its round waits
            for: 1 where drafts are made on the spot, 0 elsewhere; None: there are no such drafts.
        exit_logits: what the target's norm and head make of the states after a layer.
            # [num_rows, hidden_size] -> [num_rows, vocab_size]
    """

    profile: RoundCosts | None = None
    measure: Callable[[], RoundCosts | None] = lambda: None
    heads: Path | None = None
    vocab_size: int = 0
    target_hidden_size: int = 0
    drafter_hidden_size: int = 0
    num_layers: int = 0
    head_layers: float = 0.0
    shadow_share: Callable[[SessionView], float | None] = lambda session: None
    exit_logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    _shared: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict, init=False, repr=False)

    @property
    def costs(self) -> RoundCosts | None:
        """What forwards and drafts cost here; the first to ask may wait until it is measured."""
        return self.profile or self.measure()

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value that all controllers of this engine with an equal ``key`` share.

        The least recently wanted of more than ``MAX_SHARED`` values is forgotten: sessions that
        hold it go on with it, later ones start anew.
        """
        if key not in self._shared:
            self._shared[key] = make()
            if len(self._shared) > MAX_SHARED:
                self._shared.popitem(last=False)
        self._shared.move_to_end(key)
        value: T = self._shared[key]
        return value


MAX_SHARED = 64

COST_MEMORY = 0.9  # of seconds, for each step
TRY_SHARE = 0.02  # of the time, which tries may take while drafting does not pay


def rounds_for_a_try(lost: float, ar: float, share: float = TRY_SHARE) -> float:
    """Rounds without a draft that pay for a try which loses ``lost`` seconds; ``ar``: of each."""
    return max(0.0, lost) / ar / share


class Line:
    """A straight line through recent points ``(depth, seconds)``, older ones counting less."""

    def __init__(self) -> None:
        self.weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, depth: float, seconds: float) -> None:
        """Learn a point.

        One far above the line (another process had the machine) counts as twice the line; one far
        below says that the points so far were disturbed, and outweighs them.
        """
        memory = COST_MEMORY
        if self.weight:
            expected = self.at(depth)
            memory = 0.1 if seconds < 0.5 * expected else memory
            seconds = min(seconds, 2.0 * expected)
        self.weight = memory * self.weight + 1.0
        self._x = memory * self._x + depth
        self._y = memory * self._y + seconds
        self._xx = memory * self._xx + depth * depth
        self._xy = memory * self._xy + depth * seconds

    def at(self, depth: float, origin: float | None = None) -> float:
        """Seconds at ``depth``; see :meth:`fit`."""
        first, slope = self.fit(origin)
        return first + slope * depth

    def fit(self, origin: float | None = None, least_spread: float = 0.0) -> tuple[float, float]:
        """Seconds at depth 0 and for each token.

        While only one depth is known, the line starts at ``origin`` seconds, or else at half of
        the known ones: a hopeful guess about deeper drafts, which the first of them puts right.

        Args:
            least_spread: of the known depths (their standard deviation); the less there is of it,
                the more of the slope is that guess.
        """
        x, y = self._x / self.weight, self._y / self.weight
        if x == 0:
            return y, 0.0
        variance = self._xx / self.weight - x * x
        guess = (y - (0.5 * y if origin is None else origin)) / x
        known = least_spread**2 + variance
        if known > 1e-3:
            slope = (self._xy / self.weight - x * y + least_spread**2 * guess) / known
        else:
            slope = guess
        slope = min(max(slope, 0.0), y / x)
        return y - slope * x, slope


def top_probability(scores: npt.NDArray[np.floating[Any]]) -> float:
    """Highest probability of a softmax over ``scores``."""
    return 1.0 / weights64(scores.astype(np.float64))[1]


def sigmoid(x: Any) -> Any:
    """Logistic function, elementwise, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def load_head(context: LengthContext, kind: str) -> dict[str, FloatArray]:
    """The weights of a trained controller, by name.

    Raises:
        InvalidArgument: there are none for this pair, or they were trained for another one.
    """
    from paceline.demo import HEADS_DIR

    file = (context.heads or HEADS_DIR) / f"{kind}.safetensors"
    weights, metadata = _read_head(file, kind)
    for size in ("vocab_size", "target_hidden_size", "drafter_hidden_size"):
        here, trained = getattr(context, size), int(metadata[size])
        if here and here != trained:
            raise InvalidArgument(
                "length",
                f"{kind}, whose weights in {file} are for a pair with {size} {trained}",
                f"weights for the pair that is loaded, with {size} {here}",
            )
    return weights


@lru_cache(16)
def _read_head(file: Path, kind: str) -> tuple[dict[str, FloatArray], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    mend = f"a trained head: `paceline train length-head --kind {kind}` makes one"
    if not file.is_file():
        raise InvalidArgument("length", f"{kind}, but there is no {file}", mend)
    try:
        with safe_open(str(file), "np") as opened:
            metadata = opened.metadata() or {}
            weights = {name: opened.get_tensor(name).astype(np.float32) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InvalidArgument("length", f"{kind}, but {file} is damaged ({error})", mend) from None
    if metadata.get("kind") != kind:
        raise InvalidArgument("length", f"{kind}, but {file} holds {metadata.get('kind')}", mend)
    return weights, metadata
