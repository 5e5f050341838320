"""Scaling laws of drafters, and which drafter to train for a target.

Scylla (Yan et al. 2025, arXiv 2505.07858) finds three log-linear laws: acceptance grows with the
logarithm of a drafter's size and with that of the tokens that it was trained on, and decoding slows
with the logarithm of the batch size. Here the first two are one fit over measured drafters,
acceptance = a + b log(params) + c log(tokens), and the third one is fitted to what measured costs
(:mod:`paceline.profile`) and the predicted acceptance say.

A plan asks for each size what a training budget would make of it, and what the result would bring
on this machine. Training nothing, that is AR, is always a choice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from paceline.errors import InvalidArgument
from paceline.lengths.goodput import best_length, expected_tokens
from paceline.profile import CostProfile
from paceline.types import Load

VERSION = 1
LEAST_SIZES, LEAST_TOKENS = 4, 2
"""Different sizes and numbers of tokens that a law needs."""
DRAWS = 2000
Measure = Literal["acceptance", "agreement"]
_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, order=True)
class DrafterSize:
    """The shape of a drafter's layers; all else is the target's."""

    layers: int
    intermediate: int

    def __post_init__(self) -> None:
        if self.layers < 1 or self.intermediate < 1:
            raise InvalidArgument("size", str(self), "LAYERSxINTERMEDIATE, such as 2x416")

    def __str__(self) -> str:
        return f"{self.layers}x{self.intermediate}"

    @staticmethod
    def parse(text: str) -> DrafterSize:
        """The size that :meth:`__str__` writes.

        Raises:
            InvalidArgument: it is not of the form LAYERSxINTERMEDIATE.
        """
        layers, _, intermediate = text.partition("x")
        if not (layers.isdecimal() and intermediate.isdecimal()):
            raise InvalidArgument("size", text, "LAYERSxINTERMEDIATE, such as 2x416")
        return DrafterSize(int(layers), int(intermediate))


@dataclass(frozen=True, slots=True)
class DrafterPoint:
    """A drafter that was trained and measured.

    Attributes:
        params: of its own layers, without what it shares with the target.
        tokens: that it was trained on.
        acceptance, agreement: shares of its tokens that are kept, by rejection sampling at
            temperature 1, and at temperature 0.
        core_seconds: processor time of its training; 0: not known.
    """

    layers: int
    intermediate: int
    params: int
    tokens: int
    acceptance: float
    agreement: float
    core_seconds: float

    @property
    def size(self) -> DrafterSize:
        return DrafterSize(self.layers, self.intermediate)


@dataclass(frozen=True, slots=True)
class DrafterPoints:
    """The measured drafters of one target, trained in one way.

    Attributes:
        target: fingerprint of the target's folder.
        text: digest of the rows of text.
        processor: that ``core_seconds`` are of.
        settings: of the training, beside size and tokens.
    """

    target: str
    text: str
    processor: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    points: tuple[DrafterPoint, ...] = ()

    def plus(self, point: DrafterPoint) -> DrafterPoints:
        return replace(self, points=(*self.points, point))

    def save(self, file: Path) -> None:
        """Write the JSON document, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".tmp")
        part.write_text(json.dumps({"version": VERSION, **asdict(self)}, indent=1) + "\n")
        part.replace(file)

    @staticmethod
    def load(file: Path) -> DrafterPoints:
        """Read what :meth:`save` wrote.

        Raises:
            InvalidArgument: the file is missing, damaged or of another version.
        """
        try:
            raw: dict[str, Any] = json.loads(file.read_text())
            if raw.pop("version") != VERSION:
                raise ValueError(f"not of version {VERSION}")
            points = tuple(DrafterPoint(**point) for point in raw.pop("points"))
            return DrafterPoints(**raw, points=points)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidArgument("points", str(file), f"points of drafters ({error})") from error


# --- the laws -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class DrafterLaw:
    """acceptance = a + b log(params) + c log(tokens); natural logarithms.

    Attributes:
        coefficients: a, b, c.  # float64 [3]
        covariance: of the coefficients.  # float64 [3, 3]
        spread: standard deviation of the residuals, by degrees of freedom.
        r2: share of the variance that the law explains.
        params, tokens: the least and the greatest that were measured.
    """

    coefficients: _Floats
    covariance: _Floats
    spread: float
    r2: float
    params: tuple[int, int]
    tokens: tuple[int, int]

    def predict(self, params: int, tokens: int) -> float:
        """Acceptance, kept in [0, 1], which a straight line would leave."""
        return float(np.clip(_features(params, tokens) @ self.coefficients, 0.0, 1.0))

    def error(self, params: int, tokens: int) -> float:
        """Standard error of a prediction for one new drafter, noise of its training included."""
        x = _features(params, tokens)
        return math.sqrt(self.spread**2 + float(x @ self.covariance @ x))

    def covers(self, params: int, tokens: int) -> bool:
        """Whether a prediction is between the measured points, not beyond them."""
        return (
            self.params[0] <= params <= self.params[1]
            and self.tokens[0] <= tokens <= self.tokens[1]
        )


def _features(params: float, tokens: float) -> _Floats:
    return np.array([1.0, math.log(params), math.log(tokens)])


def fit_law(
    points: Sequence[DrafterPoint],
    measure: Measure = "acceptance",
    least_sizes: int = LEAST_SIZES,
) -> DrafterLaw:
    """Fit the law by least squares.

    Raises:
        InvalidArgument: fewer than ``least_sizes`` sizes or 2 numbers of tokens, or an unknown
            measure.
    """
    if measure not in get_args(Measure):
        raise InvalidArgument("measure", measure, f"one of {', '.join(get_args(Measure))}")
    sizes, counts = {p.params for p in points}, {p.tokens for p in points}
    if len(sizes) < least_sizes or len(counts) < LEAST_TOKENS:
        raise InvalidArgument(
            "points",
            f"{len(sizes)} sizes and {len(counts)} numbers of tokens",
            f"at least {least_sizes} sizes and {LEAST_TOKENS} numbers of tokens",
        )
    x = np.stack([_features(p.params, p.tokens) for p in points])
    y = np.array([getattr(p, measure) for p in points])
    coefficients, *_ = np.linalg.lstsq(x, y)
    residuals = y - x @ coefficients
    variance = float(residuals @ residuals) / max(1, len(y) - x.shape[1])
    total = float(((y - y.mean()) ** 2).sum())
    return DrafterLaw(
        coefficients,
        variance * np.linalg.inv(x.T @ x),
        math.sqrt(variance),
        1.0 - float(residuals @ residuals) / total if total else 1.0,
        (min(sizes), max(sizes)),
        (min(counts), max(counts)),
    )


@dataclass(frozen=True, slots=True)
class HeldOutSize:
    """What a law that has not seen a size says about it.

    Attributes:
        errors: predicted minus measured, for each of its points.
        beyond: whether the size is the smallest or the largest, so that the law had to reach out.
    """

    size: DrafterSize
    params: int
    errors: tuple[float, ...]
    beyond: bool


def hold_out_sizes(
    points: Sequence[DrafterPoint], measure: Measure = "acceptance"
) -> list[HeldOutSize]:
    """Fit the law once for each size, without that size, and predict its points.

    Raises:
        InvalidArgument: what is left is too little for a law.
    """
    least = LEAST_SIZES - 1
    held: list[HeldOutSize] = []
    sizes = sorted({p.params for p in points})
    for params in sizes:
        law = fit_law([p for p in points if p.params != params], measure, least)
        own = [p for p in points if p.params == params]
        errors = tuple(law.predict(params, p.tokens) - getattr(p, measure) for p in own)
        held.append(HeldOutSize(own[0].size, params, errors, params in (sizes[0], sizes[-1])))
    return held


@dataclass(frozen=True, slots=True)
class BatchLaw:
    """Tokens per second of each session = intercept + slope log(batch)."""

    intercept: float
    slope: float
    r2: float


def fit_batch_law(batches: Sequence[int], speeds: Sequence[float]) -> BatchLaw:
    """Fit the law of decode batches by least squares.

    Args:
        speeds: tokens per second of one session, for each batch size.

    Raises:
        InvalidArgument: fewer than three batch sizes.
    """
    if len(set(batches)) < 3:
        raise InvalidArgument("batches", list(batches), "at least three batch sizes")
    x, y = np.log(np.array(batches, np.float64)), np.array(speeds)
    slope, intercept = np.polyfit(x, y, 1)
    total = float(((y - y.mean()) ** 2).sum())
    left = float(((y - intercept - slope * x) ** 2).sum())
    return BatchLaw(float(intercept), float(slope), 1.0 - left / total if total else 1.0)


@dataclass(frozen=True, slots=True)
class TrainingCost:
    """Core seconds of a training = tokens * (each + of_param * params).

    ``each`` is what all sizes pay: embedding, output layer and loss.
    """

    each: float
    of_param: float

    def tokens(self, params: int, core_seconds: float) -> int:
        """Tokens that a budget pays for."""
        return int(core_seconds / (self.each + self.of_param * params))


def fit_training_cost(points: Sequence[DrafterPoint]) -> TrainingCost:
    """Fit the cost of training, neither part below zero, by least squares of seconds per token.

    Raises:
        InvalidArgument: no point has a time.
    """
    timed = [p for p in points if p.core_seconds > 0]
    if not timed:
        raise InvalidArgument("points", "no core_seconds", "points with times")
    rates = np.array([p.core_seconds / p.tokens for p in timed])
    x = np.stack([np.ones(len(timed)), [float(p.params) for p in timed]], 1)
    (each, of_param), *_ = np.linalg.lstsq(x, rates)
    if of_param < 0:
        return TrainingCost(float(rates.mean()), 0.0)
    if each < 0:
        return TrainingCost(0.0, float((rates / x[:, 1]).mean()))
    return TrainingCost(float(each), float(of_param))


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DrafterCosts:
    """A size that may be trained, and what it costs to serve here.

    Attributes:
        profile: the target's forwards and the drafts of a drafter of this size, in seconds.
    """

    size: DrafterSize
    params: int
    profile: CostProfile

    def speed(self, acceptance: float, batch: int) -> tuple[float, int]:
        """Tokens per second of each session with the best depth, and that depth; 0 is AR."""

        def seconds(depth: int, load: Load) -> float:
            draft = self.profile.draft(depth, load.num_running)
            return draft + self.profile.verify(1 + depth, load.num_running)

        load = Load(batch, 0)
        depth = best_length([acceptance], seconds, load)
        return expected_tokens([acceptance], depth) / seconds(depth, load), depth


@dataclass(frozen=True, slots=True)
class PlannedDrafter:
    """What training a size within the budget is predicted to give.

    Attributes:
        tokens: that the budget pays for.
        acceptance, error: predicted, with its standard error.
        extrapolated: whether size or tokens lie beyond what the law was fitted to.
        speed: tokens per second of each session at the planned batch size.
        low, high: the speed with an acceptance two standard errors below and above.
        depth: speculation length at that speed; 0: drafting would not pay.
        best_in: share of the laws that fit the points as well in which this size is the fastest.
        speeds: by batch size, at the predicted acceptance.
        by_batch: the law of decode batches that is fitted to them.
    """

    size: DrafterSize
    params: int
    tokens: int
    acceptance: float
    error: float
    extrapolated: bool
    speed: float
    low: float
    high: float
    depth: int
    best_in: float
    speeds: Mapping[int, float]
    by_batch: BatchLaw


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """Planned drafters, the fastest first.

    Attributes:
        ar_speed: tokens per second of each session without drafts.
    """

    drafters: tuple[PlannedDrafter, ...]
    ar_speed: float
    batch: int

    @property
    def chosen(self) -> PlannedDrafter | None:
        """The drafter to train; None: AR is as fast, so train none."""
        best = self.drafters[0]
        return best if best.speed > self.ar_speed * (1 + 1e-9) else None


def plan_drafter(
    law: DrafterLaw,
    cost: TrainingCost,
    candidates: Sequence[DrafterCosts],
    *,
    core_seconds: float,
    batch: int = 1,
    seed: int = 0,
) -> DrafterPlan:
    """Predict every candidate and rank them by tokens per second.

    Args:
        core_seconds: budget of the training of the one that is chosen.
        batch: sessions that decode together.

    Raises:
        InvalidArgument: there is no candidate, or a number is out of its range.
    """
    if not candidates:
        raise InvalidArgument("size", [], "at least one size")
    if batch < 1:
        raise InvalidArgument("batch", batch, "at least 1")
    budgets = [cost.tokens(each.params, core_seconds) for each in candidates]
    if min(budgets) < 1:
        raise InvalidArgument("core_seconds", core_seconds, "enough for a token of every size")
    # Laws that fit as well as this one: what is not known about the law, all sizes alike.
    drawn = np.random.default_rng(seed).multivariate_normal(
        law.coefficients, law.covariance, size=DRAWS
    )
    features = np.stack(
        [_features(c.params, t) for c, t in zip(candidates, budgets, strict=True)], 1
    )
    speeds = _speeds(candidates, np.clip(drawn @ features, 0.0, 1.0), batch)
    wins = np.bincount(speeds.argmax(1), minlength=len(candidates)) / DRAWS
    planned = []
    for each, tokens, best_in in zip(candidates, budgets, wins.tolist(), strict=True):
        acceptance, error = law.predict(each.params, tokens), law.error(each.params, tokens)
        speed, depth = each.speed(acceptance, batch)
        low, high = (
            each.speed(min(1.0, max(0.0, acceptance + side * error)), batch)[0] for side in (-2, 2)
        )
        by_batch = {size: each.speed(acceptance, size)[0] for size in each.profile.batches}
        batch_law = fit_batch_law(list(by_batch), list(by_batch.values()))
        outside = not law.covers(each.params, tokens)
        planned.append(
            PlannedDrafter(
                each.size, each.params, tokens, acceptance, error, outside,
                speed, low, high, depth, best_in, by_batch, batch_law,
            )
        )  # fmt: skip
    planned.sort(key=lambda drafter: (-drafter.speed, drafter.params))
    ar_speed = max(1.0 / each.profile.verify(1, batch) for each in candidates)
    return DrafterPlan(tuple(planned), ar_speed, batch)


def _speeds(candidates: Sequence[DrafterCosts], acceptance: _Floats, batch: int) -> _Floats:
    """Tokens per second of each candidate, of a table of its speeds.  # [draws, candidates]"""
    grid = np.linspace(0.0, 1.0, 201)
    found = []
    for place, each in enumerate(candidates):
        table = [each.speed(float(rate), batch)[0] for rate in grid]
        found.append(np.interp(acceptance[:, place], grid, table))
    return np.stack(found, 1)
