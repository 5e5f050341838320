"""The interface of length controllers, and what several of them share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidArgument
from paceline.exact_math import weights64
from paceline.knobs import MAX_DEPTH, Knob, Knobs
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


class ConfidenceStop(StopRule):
    """Ends the draft when the drafter is not confident of its token.

    Its confidence is its own estimate of the acceptance (DSpark's confidence head), or else its
    highest probability. Kernels that draft whole chains implement this rule, too.

    Attributes:
        shortest: least depth at which a draft may end.
        threshold: may change between rounds; 0 never ends a draft.
    """

    def __init__(self, shortest: int, threshold: float) -> None:
        self.shortest = shortest
        self.threshold = threshold

    def stop_after(self, step: DraftStep) -> bool:
        if step.depth < self.shortest:
            return False
        known = step.acceptance
        return (top_probability(step.scores) if known is None else known) < self.threshold


class LengthController(Protocol):
    """Decides how much to draft. One instance for each session; a depth of 0 is legal.

    Attributes:
        stop_rule: ends an expanding drafter's draft early, on the machine that drafts; None if the
            length is known before drafting begins.
    """

    stop_rule: StopRule | None

    @property
    def needs(self) -> frozenset[Need]:
        """What the controller needs from the target's next forward, beyond the drafter's needs."""
        ...

    def budget(self, session: SessionView, load: Load) -> Budget:
        """Depth and nodes for the next round of ``session``."""
        ...

    def observe(self, outcome: Outcome, draft_seconds: float, verify_seconds: float) -> None:
        """Learn from a round: what became of the draft, and what it cost.

        Args:
            draft_seconds: how long the session waited for the draft, wherever it was made; 0 if it
                had arrived before it was needed.
            verify_seconds: the forward that verified it, together with the batch's other drafts.
        """
        ...


def depth_ahead(controller: LengthController, usual: int) -> int:
    """Depth of a draft that is made ahead, before the answer to the last draft has come.

    Args:
        usual: the depth for controllers without an attribute ``ahead``.
    """
    return int(getattr(controller, "ahead", usual))


LENGTH_MIN = Knob[int](
    "length_min", int, 0, "Shortest draft that a controller may choose.", ge=0, le=MAX_DEPTH
)
# None: the method's ``num_speculative_tokens``.
LENGTH_MAX = Knob[int | None](
    "length_max", int, None, "Longest draft that a controller may choose.", ge=0, le=MAX_DEPTH
)
STOP_THRESHOLD = Knob[float](
    "stop_threshold", float, 0.0,
    "A controller ends a draft when acceptance is less likely than this (`confidence`, `disco`) or "
    "a rejection is likelier than this (`specdecpp`); default of those that are trained: what was "
    "best on held-out text in their training.",
    ge=0.0, le=1.0, search=(0.2, 0.4, 0.6, 0.8),
)  # fmt: skip
TRAINED_THRESHOLD: Knob[float | None] = replace(STOP_THRESHOLD, default=None)  # type: ignore[arg-type, assignment]


@dataclass(frozen=True, slots=True)
class LengthBounds:
    """The depths between which a controller chooses.

    Attributes:
        start: ``num_speculative_tokens``: first depth of a controller that moves step by step.
        shortest, longest: bounds of the depth, 0 <= shortest <= longest.
        nodes: the method's node budget; chains take as many nodes as they are deep.
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
        """The budget for this depth; a tree may use all of its nodes at any depth."""
        return Budget(depth, self.nodes if self.is_tree else depth)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The node budgets that a controller chooses from, the largest first; chains have one."""
        if not self.is_tree:
            return (self.nodes,)
        least = min(2, self.nodes)
        return tuple(dict.fromkeys(max(least, self.nodes >> i) for i in range(4)))


def length_bounds(knobs: Knobs) -> LengthBounds:
    """The depths between which the controller of a method with these knobs chooses."""
    start, nodes = knobs.num_speculative_tokens or 0, knobs.node_budget or 0
    given = knobs[LENGTH_MAX]
    longest = start if given is None else given
    return LengthBounds(
        start=start,
        shortest=knobs[LENGTH_MIN],
        longest=longest,
        nodes=nodes,
        is_tree=knobs.shape not in (None, "chain") or nodes > max(start, longest),
    )


@dataclass(frozen=True, slots=True, eq=False)
class LengthContext:
    """What an engine tells the length controllers of its sessions.

    Attributes:
        profile: measured costs of this machine, if known.
        measure: finds or measures the costs when a controller first asks; returns None if it
            cannot.
        heads: folder with the trained heads of this pair of models; None: the demo pair's.
        vocab_size: the target's; 0: unknown.
        target_hidden_size, drafter_hidden_size: widths of the models; 0: unknown.
        num_layers: the target's layers; 0 if its layers cannot run one by one.
        head_layers: size of the target's output layer, counted in layers.
        shadow_share: the share of a shadow draft's time for which its session's round waits: 1 if
            this process makes drafts, 0 if another one does; None: no shadow drafts are possible.
        exit_logits: the target's norm and head, applied to the states after a layer.
            # [num_rows, hidden_size] -> [num_rows, vocab_size]
        head_of: the kind of draft head that a method has; None: it has none.
        weights_of: tells the weights of a drafter, given its name, from others; "": unknown, none.
        num_sessions: how many sessions will run beside a new one.
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
    head_of: Callable[[str], str | None] = lambda method: None
    weights_of: Callable[[str], str] = lambda drafter: ""
    num_sessions: Callable[[], int] = lambda: 0
    _shared: OrderedDict[Hashable, Any] = field(default_factory=OrderedDict, init=False, repr=False)

    @property
    def costs(self) -> RoundCosts | None:
        """What forwards and drafts cost here; the first call may wait for the measurement."""
        return self.profile or self.measure()

    def shared(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value that all controllers of this engine with an equal ``key`` share.

        Beyond ``MAX_SHARED`` values, the least recently used one is forgotten: sessions that hold
        it keep it, later ones start anew.
        """
        if key not in self._shared:
            self._shared[key] = make()
            if len(self._shared) > MAX_SHARED:
                self._shared.popitem(last=False)
        self._shared.move_to_end(key)
        value: T = self._shared[key]
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthPart:
    """A length controller as the catalogue lists it.

    Attributes:
        make: a controller for one session, from the knobs of its method.
        knobs: those that the controller reads, with its defaults.
        decides: knobs of the drafter that the controller sets in their place.
        drafters: the drafters that it works with; None: all.
        why: the reason why it works with no other, as the end of a sentence.
        guarded: where the controller is a method's default and not the request's choice, it is
            asked only while drafts give more tokens per second than AR. False for controllers that
            stop drafting by themselves, and for fixed lengths.
        replayable: its choices follow from the costs of drafts and how many of their tokens are
            accepted, so a simulation can repeat them from a recording.
    """

    make: Callable[[Knobs, LengthContext], LengthController]
    knobs: tuple[Knob[Any], ...] = ()
    decides: tuple[Knob[Any], ...] = ()
    drafters: frozenset[str] | None = None
    why: str = ""
    guarded: bool = True
    replayable: bool = False


MAX_SHARED = 64

COST_MEMORY = 0.9  # factor by which the weight of older seconds shrinks at each step
TRY_SHARE = 0.02  # share of the time that tries may take while drafting does not pay


def rounds_for_a_try(lost: float, ar: float, share: float = TRY_SHARE) -> float:
    """Number of AR rounds, of ``ar`` seconds each, that pay for a try that loses ``lost`` seconds.

    Tries may take the ``share`` of the time.
    """
    return max(0.0, lost) / ar / share


class Line:
    """A straight line through recent points ``(depth, seconds)``; older ones count less."""

    def __init__(self) -> None:
        self.weight = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, depth: float, seconds: float) -> None:
        """Learn a point.

        A point far above the line (another process had the machine) counts as twice the line; one
        far below shows that the points so far were disturbed, and outweighs them.
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

    @property
    def mean(self) -> tuple[float, float]:
        """The middle of the points."""
        return self._x / self.weight, self._y / self.weight

    def at(self, depth: float, origin: float | None = None) -> float:
        """Seconds at ``depth``; see :meth:`fit`."""
        first, slope = self.fit(origin)
        return first + slope * depth

    def fit(self, origin: float | None = None, least_spread: float = 0.0) -> tuple[float, float]:
        """Seconds at depth 0, and seconds for each token.

        While only one depth is known, the line starts at ``origin`` seconds, or else at half of the
        known seconds: an optimistic guess about deeper drafts, which the first of them corrects.

        Args:
            least_spread: standard deviation of the known depths that would make them reliable; the
                further they are below it, the more that guess decides the slope.
        """
        x, y = self.mean
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
    """The highest probability of a softmax over ``scores``."""
    return 1.0 / weights64(scores.astype(np.float64))[1]


def sigmoid(x: Any) -> Any:
    """The logistic function, elementwise, without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def load_head(
    context: LengthContext, kind: str, draft_head: str | None = None, field: str = "length"
) -> dict[str, FloatArray]:
    """The weights of a trained controller, or of a trained acceptance rule, by name.

    Args:
        draft_head: kind of the draft head whose drafts it controls, in whose folder it lies; None:
            the draft model's.
        field: the knob that chose it, for messages.

    Raises:
        InvalidArgument: this pair of models has none, or they were trained for another pair.
    """
    from paceline.demo import HEADS_DIR

    folder = context.heads or HEADS_DIR
    file = (folder / draft_head if draft_head else folder) / f"{kind}.safetensors"
    command = "judge" if kind == "judge" else f"length-head --kind {kind}"
    command += f" --head {draft_head}" if draft_head else ""
    weights, metadata = _read_head(file, kind, command, field)
    for size in ("vocab_size", "target_hidden_size", "drafter_hidden_size"):
        here, trained = getattr(context, size), int(metadata[size])
        if here and trained and here != trained:
            raise InvalidArgument(
                field,
                f"{kind}, whose weights in {file} are for a pair with {size} {trained}",
                f"weights for the pair that is loaded, with {size} {here}",
            )
    return weights


def trained_threshold(weights: dict[str, FloatArray], otherwise: float) -> float:
    """The threshold that a controller's training chose."""
    return float(weights["threshold"][0]) if "threshold" in weights else otherwise


@lru_cache(16)
def _read_head(
    file: Path, kind: str, command: str, field: str
) -> tuple[dict[str, FloatArray], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    mend = f"a trained head: `paceline train {command}` makes one"
    if not file.is_file():
        raise InvalidArgument(field, f"{kind}, but there is no {file}", mend)
    try:
        with safe_open(str(file), "np") as opened:
            metadata = opened.metadata() or {}
            weights = {name: opened.get_tensor(name).astype(np.float32) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InvalidArgument(field, f"{kind}, but {file} is damaged ({error})", mend) from None
    if metadata.get("kind") != kind:
        raise InvalidArgument(field, f"{kind}, but {file} holds {metadata.get('kind')}", mend)
    return weights, metadata
