"""Which masked positions a step of the denoise loop commits: one class a schedule.

A schedule sees the predictions of one state of the open block (:class:`View`) and chooses rows.
The loop commits the predicted tokens there. They stay, but with a schedule that says which of them
to mask again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from paceline.errors import InvalidArgument

Tensor = torch.Tensor


def perturbed(logits: Tensor, temperature: float, noise: Tensor | None) -> Tensor:
    """Scores whose argmax is the token drawn at a temperature; the logits where it is 0."""
    return logits if noise is None else logits / temperature + noise


@dataclass(frozen=True, slots=True)
class View:
    """The predictions of one state of a block."""

    logits: Tensor  # [rows, vocab_size]
    tokens: Tensor  # the predicted ones; of committed rows those that stand there [rows]
    confidence: Tensor  # their probabilities [rows]
    masked: Tensor  # bool [rows]
    open: Tensor  # masked, and in the first sub-block that is not done: bool [rows]
    text: Sequence[int] = ()
    """All tokens in front of the first masked row."""
    temperature: float = 0.0
    noise: Tensor | None = None
    """Above temperature 0: what is added to logits over temperature.  # [rows, vocab_size]"""
    known: int = 0
    """First rows, those of the prompt."""
    step: int = 0
    """Forwards that the block has had before this one."""
    sureness: Tensor | None = None
    """How probable each committed row's token was when it was committed.  # [rows]"""

    @property
    def progress(self) -> float:
        """Share of the block's rows that are committed."""
        return 1 - self.masked.float().mean().item()

    def entropy(self) -> Tensor:
        """Of each row's distribution, in nats.  # [rows]"""
        each: Tensor = torch.special.entr(self.logits.softmax(-1))
        return each.sum(-1)

    def margins(self) -> Tensor:
        """First minus second logit.  # [rows]"""
        first, second = self.logits.topk(2, -1).values.unbind(-1)
        return first - second

    def most_confident(self, count: int) -> Tensor:
        """The ``count`` most confident open rows, the earlier one first among equals."""
        return _highest(self.confidence, self.open, count)


@dataclass(frozen=True, slots=True)
class Schedule:
    """``tokens_per_step`` most confident positions in each step, as LLaDA does."""

    tokens_per_step: int = 1
    """Positions a step commits."""

    name: ClassVar[str] = "static"
    paper: ClassVar[str] = "2502.09992"
    lossless: ClassVar[bool] = True
    """The text is the static schedule's with the same ``tokens_per_step``."""
    paths: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Knobs that may name a file or a folder, with the values that name none."""

    def __post_init__(self) -> None:
        _at_least("tokens_per_step", self.tokens_per_step, 1)

    def choose(self, view: View) -> Tensor:
        """Rows to commit, at least one.  # bool [rows]"""
        return view.most_confident(self.tokens_per_step)

    @property
    def num_drafts(self) -> int:
        """States of later steps that a forward evaluates beside the next one."""
        return 0

    @property
    def truncates(self) -> bool:
        """Whether rows behind a committed end of the text are computed no more."""
        return False

    @property
    def remasks(self) -> bool:
        """Whether committed rows may be masked again."""
        return False

    def remask(self, view: View) -> Tensor:
        """Committed rows to mask again.  # bool [rows]"""
        return torch.zeros_like(view.masked)


@dataclass(frozen=True, slots=True)
class ConfidenceSchedule(Schedule):
    """All positions more probable than ``threshold`` (Dimple, SGLang's LowConfidence)."""

    threshold: float = 0.9
    """Probability above which a position is committed; 1: `static`."""

    name: ClassVar[str] = "confidence"
    paper: ClassVar[str] = "2505.16990"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        _between("threshold", self.threshold, 0.0, 1.0)

    def choose(self, view: View) -> Tensor:
        sure = view.open & (view.confidence > self.threshold)
        return sure | view.most_confident(self.tokens_per_step)


@dataclass(frozen=True, slots=True)
class FreeDave(Schedule):
    """The static schedule, several of its steps in one forward.

    The loop drafts the states of the next steps from one forward's predictions; the next forward
    evaluates them all and keeps those that the static schedule reaches.
    """

    draft_steps: int = 8
    """States that a forward evaluates; 1: `static`."""

    name: ClassVar[str] = "freedave"
    paper: ClassVar[str] = "2510.00294"

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        _at_least("draft_steps", self.draft_steps, 1)

    @property
    def num_drafts(self) -> int:
        return self.draft_steps - 1


@dataclass(frozen=True, slots=True)
class Prophet(Schedule):
    """All positions at once, as soon as the margins are wide for how far the block is."""

    early: float = 7.5
    """Mean margin of logits that is enough before a third of the block is committed."""
    middle: float = 5.0
    """The same before two thirds."""
    late: float = 2.5
    """The same in the last third."""
    answer_rows: int = 5
    """Masked rows whose margins count: the block's last ones."""

    name: ClassVar[str] = "prophet"
    paper: ClassVar[str] = "2508.19982"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        _at_least("answer_rows", self.answer_rows, 1)

    def choose(self, view: View) -> Tensor:
        progress = view.progress
        enough = self.early if progress < 0.33 else self.middle if progress < 0.67 else self.late
        if view.margins()[view.masked][-self.answer_rows :].mean() >= enough:
            return view.masked.clone()
        return Schedule.choose(self, view)


SHAPES = ("linear", "cosine", "exp")


@dataclass(frozen=True, slots=True)
class SchED(Schedule):
    """All positions at once, when the whole span's mean margin reaches a bound that falls."""

    tau_high: float = 7.5
    """Bound at the beginning of a block."""
    tau_low: float = 0.0
    """Bound at its end."""
    shape: str = "linear"
    """How the bound falls: linear, cosine or exp."""
    rate: float = 4.0
    """How fast `exp` falls."""

    name: ClassVar[str] = "sched"
    paper: ClassVar[str] = "2512.02892"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        if self.shape not in SHAPES:
            raise InvalidArgument("shape", self.shape, f"one of {', '.join(SHAPES)}")
        if self.tau_low > self.tau_high:
            raise InvalidArgument("tau_low", self.tau_low, f"at most tau_high, {self.tau_high}")
        _at_least("rate", self.rate, 0)

    def tau(self, progress: float) -> float:
        """The bound when a share ``progress`` of the block is committed."""
        if math.isinf(self.tau_high):
            return self.tau_high
        left = {
            "linear": 1 - progress,
            "cosine": (1 + math.cos(math.pi * progress)) / 2,
            "exp": math.exp(-self.rate * progress),
        }[self.shape]
        return self.tau_low + (self.tau_high - self.tau_low) * left

    def choose(self, view: View) -> Tensor:
        if view.margins().mean() >= self.tau(view.progress):
            return view.masked.clone()
        return Schedule.choose(self, view)


@dataclass(frozen=True, slots=True)
class DParallel(Schedule):
    """All positions whose entropy is small (dParallel's decoding)."""

    entropy: float = 0.5
    """Nats below which a position is committed; 0: `static`."""

    name: ClassVar[str] = "dparallel"
    paper: ClassVar[str] = "2509.26488"
    lossless: ClassVar[bool] = False

    def choose(self, view: View) -> Tensor:
        sure = view.open & (view.entropy() < self.entropy)
        return sure | view.most_confident(self.tokens_per_step)


@dataclass(frozen=True, slots=True)
class SetBlock(Schedule):
    """Set Block Decoding's sampler: the surest positions while their entropies add up to little."""

    bound: float = 0.5
    """Nats that all but the most uncertain chosen position may add up to; 0: one position."""

    name: ClassVar[str] = "set_block"
    paper: ClassVar[str] = "2509.04185"
    lossless: ClassVar[bool] = False

    def choose(self, view: View) -> Tensor:
        entropy = torch.where(view.open, view.entropy(), torch.inf)
        order = torch.sort(entropy, stable=True).indices[: int(view.open.sum())]
        # The sum less its largest entropy bounds what the chosen positions tell of one another.
        count = 1 + int((entropy[order].cumsum(0)[:-1] < self.bound).sum())
        chosen = torch.zeros_like(view.open)
        chosen[order[:count]] = True
        return chosen


@dataclass(frozen=True, slots=True)
class Learn2PD(Schedule):
    """The positions that a trained filter takes for final, and the most confident ones."""

    threshold: float = 0.96
    """Probability of being final above which a position is committed; 1: `static`."""
    filter: str = ""
    """File of a trained filter (:mod:`paceline.diffusion.filter`); default: the one that ships."""
    truncate: bool = True
    """Compute no more rows behind a committed end of the text."""

    name: ClassVar[str] = "learn2pd"
    paper: ClassVar[str] = "2509.25188"
    lossless: ClassVar[bool] = False
    paths: ClassVar[Mapping[str, tuple[str, ...]]] = {"filter": ("",)}

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        _between("threshold", self.threshold, 0.0, 1.0)

    def final(self, view: View) -> Tensor:
        """How likely each row's predicted token is the one that will stand there.  # [rows]"""
        from paceline.diffusion.filter import load_filter

        return load_filter(self.filter).probabilities(view.confidence, view.masked)

    def choose(self, view: View) -> Tensor:
        taken = view.masked & (self.final(view) > self.threshold)
        return taken | view.most_confident(self.tokens_per_step)

    @property
    def truncates(self) -> bool:
        return self.truncate


@dataclass(frozen=True, slots=True)
class APD(Schedule):
    """From left to right, as far as a small model that reads in order agrees.

    The masked model proposes the tokens of a window. They are accepted while each is still the best
    when ``weight`` of its logits and the rest of the judge's are added, under the same noise. The
    first ``tokens_per_step`` are not asked about.
    """

    weight: float = 0.7
    """Weight of the masked model against the judge (R); 1: the whole window."""
    window: int = 16
    """Most positions that a step proposes and commits (M)."""
    judge: str = "target"
    """The model that reads in order: `target` or `drafter` of the demo pair, or a folder."""

    name: ClassVar[str] = "apd"
    paper: ClassVar[str] = "2506.00413"
    lossless: ClassVar[bool] = False
    paths: ClassVar[Mapping[str, tuple[str, ...]]] = {"judge": ("target", "drafter")}

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        _between("weight", self.weight, 0.0, 1.0)
        _at_least("window", self.window, 1)

    def judge_logits(self, text: Sequence[int], proposed: Sequence[int]) -> Tensor:
        """The judge's logits of each proposed position, those before it being accepted.

        # [len(proposed), vocab_size]
        """
        from paceline.diffusion.judge import load_judge

        return load_judge(self.judge).logits(text, proposed)

    def choose(self, view: View) -> Tensor:
        first = int(view.masked.nonzero()[0])
        rows = slice(first, first + self.window)  # masks are all behind: a step commits a prefix
        proposed, own = view.tokens[rows], view.logits[rows]
        judged = self.judge_logits(view.text, proposed.tolist())
        if judged.shape != own.shape:
            allowed = f"a model with the masked model's vocabulary of {own.shape[1]} tokens"
            raise InvalidArgument("judge", self.judge, allowed)
        # Weight 0 would make 0 times the infinity of the mask token.
        mixed = torch.where(
            own.isinf(), own,
            self.weight * own.log_softmax(-1) + (1 - self.weight) * judged.log_softmax(-1),
        )  # fmt: skip
        noise = None if view.noise is None else view.noise[rows]
        agreed = perturbed(mixed, view.temperature, noise).argmax(-1) == proposed
        agreed[: self.tokens_per_step] = True
        count = int(agreed.long().cumprod(0).sum())
        chosen = torch.zeros_like(view.masked)
        chosen[first : first + count] = True
        return chosen


ORDERS = ("confidence", "margin", "left_to_right", "random")


@dataclass(frozen=True, slots=True)
class Remask(Schedule):
    """A fixed number of steps in an order by difficulty; committed tokens may be taken back.

    Discrete Diffusion VLA's decoding of action chunks. Step t of ``steps`` commits until the share
    cos(pi/2 t/steps) of the block is masked, and one token at least. It masks tokens again that
    have become improbable, the most improbable ones first and at most as many as it has left
    masked; the steps behind it make up for them, so they cost no forward. The last step takes
    nothing back.
    """

    steps: int = 12
    """Most forwards that write a whole block."""
    order: str = "confidence"
    """Which positions come first: the most probable ones (`confidence`), those with the largest gap
    between the two best probabilities (`margin`), `left_to_right` or `random`."""
    seed: int = 0
    """Of the random order."""
    least: float = 0.0
    """Probability below which a committed token is masked again, times the share of the block that
    is committed, so it rises from step to step; 0: never."""
    drop: float = 1.0
    """Fall of a committed token's probability since its commit that masks it again; 1: never."""

    name: ClassVar[str] = "remask"
    paper: ClassVar[str] = "2508.20072"
    lossless: ClassVar[bool] = False

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        _at_least("steps", self.steps, 1)
        _between("least", self.least, 0.0, 1.0)
        _between("drop", self.drop, 0.0, 1.0)
        _between("seed", self.seed, 0, 2**63 - 1)
        if self.order not in ORDERS:
            raise InvalidArgument("order", self.order, f"one of {', '.join(ORDERS)}")

    def masks_left(self, view: View) -> int:
        """Masked rows that this step leaves, but for those that it masks again."""
        rows, done = len(view.masked) - view.known, (view.step + 1) / self.steps
        planned = int(rows * math.cos(math.pi / 2 * done)) if done < 1 else 0
        return min(planned, int(view.masked.sum()) - 1)

    def scores(self, view: View) -> Tensor:
        """The higher, the earlier a row is committed.  # [rows]"""
        if self.order == "confidence":
            return view.confidence
        if self.order == "margin":
            first, second = view.logits.softmax(-1).topk(2, -1).values.unbind(-1)
            return first - second
        rows = len(view.masked)
        if self.order == "left_to_right":
            return -torch.arange(rows).float()
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(rows, generator=generator)

    def choose(self, view: View) -> Tensor:
        count = int(view.masked.sum()) - self.masks_left(view)
        return _highest(self.scores(view), view.masked, count)

    @property
    def remasks(self) -> bool:
        return self.least > 0 or self.drop < 1

    def remask(self, view: View) -> Tensor:
        assert view.sureness is not None
        committed = ~view.masked
        committed[: view.known] = False
        doubtful = view.confidence < self.least * committed.sum() / (len(committed) - view.known)
        if self.drop < 1:
            doubtful |= view.sureness - view.confidence >= self.drop
        return _highest(-view.confidence, committed & doubtful, self.masks_left(view))


def _highest(scores: Tensor, allowed: Tensor, count: int) -> Tensor:
    """The ``count`` allowed rows with the highest scores, the earlier one first among equals."""
    order = torch.sort(torch.where(allowed, scores, -torch.inf), descending=True, stable=True)
    chosen = torch.zeros_like(allowed)
    chosen[order.indices[: min(count, int(allowed.sum()))]] = True
    return chosen


SCHEDULES: dict[str, type[Schedule]] = {
    kind.name: kind
    for kind in (
        Schedule, ConfidenceSchedule, FreeDave, Prophet, SchED, DParallel, SetBlock, Learn2PD, APD,
        Remask,
    )
}  # fmt: skip
"""All schedules by name."""


def make_schedule(name: str, **knobs: Any) -> Schedule:
    """A schedule by name.

    Raises:
        InvalidArgument: no such schedule, no such knob, or a value out of its range.
    """
    if name not in SCHEDULES:
        raise InvalidArgument("schedule", name, f"one of {', '.join(SCHEDULES)}")
    kinds: dict[str, type[Any]] = {
        field.name: type(field.default) for field in fields(SCHEDULES[name])
    }
    values = {}
    for knob, value in knobs.items():
        if knob not in kinds:
            raise InvalidArgument(knob, value, f"a knob of schedule {name}: {', '.join(kinds)}")
        try:
            values[knob] = _boolean(value) if kinds[knob] is bool else kinds[knob](value)
        except ValueError as error:
            raise InvalidArgument(knob, value, f"a value of type {kinds[knob].__name__}") from error
    return SCHEDULES[name](**values)


def check_sub_block_cache(schedule: Schedule) -> None:
    """Raise InvalidArgument if a schedule needs more rows than those of the sub-block in work."""
    why = "whose drafts need whole forwards" if schedule.num_drafts else ""
    why = "which looks at all positions" if schedule.remasks else why
    if why:
        allowed = f"false with schedule {schedule.name}, {why}"
        raise InvalidArgument("sub_block_cache", True, allowed)


def read_knobs(settings: Iterable[str], field: str) -> dict[str, str]:
    """Knobs for :func:`make_schedule` from texts KNOB=VALUE.

    Raises:
        InvalidArgument: a text has no =; names ``field``.
    """
    knobs = {}
    for setting in settings:
        knob, equals, value = setting.partition("=")
        if not equals:
            raise InvalidArgument(field, setting, "KNOB=VALUE")
        knobs[knob] = value
    return knobs


def _boolean(value: Any) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise ValueError(value)
    return str(value).lower() == "true"


def _at_least(field: str, value: float, least: int) -> None:
    if value < least:
        raise InvalidArgument(field, value, f"at least {least}")


def _between(field: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise InvalidArgument(field, value, f"{low} to {high}")
