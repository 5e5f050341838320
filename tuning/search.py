"""Choose the point to measure next, and the trials to end early."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import optuna
from ray import tune
from ray.tune.search import Searcher
from ray.tune.search.optuna import OptunaSearch

from paceline.errors import InvalidArgument
from paceline.tuning.results import OBJECTIVES, Point, TrialRecord
from paceline.tuning.space import Choice, Space

# How often to ask TPE for a point that is new; a small space may have none left.
_MAX_ASKS = 8
# A point whose prediction is below this share of the best measurement gets no trial.
_HOPELESS = 0.8


class PointSearch(Searcher):
    """Suggests given points first, then those of Optuna's TPE; no point twice.

    TPE: Bergstra, Bardenet, Bengio, Kegl 2011; with several objectives, Ozaki et al. 2022.

    Args:
        first: the points to measure first, in this order.
        records: of earlier runs of the same sweep; their points are not measured again.
        refused: keys of points that the target cannot run.
        predicted: the simulator's goodput ratios by key.
        suggest: go on with TPE after ``first``; False ends there.
    """

    def __init__(
        self,
        space: Space,
        first: Sequence[Point],
        *,
        records: Iterable[TrialRecord] = (),
        refused: Iterable[str] = (),
        predicted: Mapping[str, float] | None = None,
        suggest: bool = True,
    ) -> None:
        fields = [OBJECTIVES[name] for name in space.objectives]
        several = len(fields) > 1
        super().__init__(
            metric=fields if several else fields[0],
            mode=["max"] * len(fields) if several else "max",
        )
        self._space = space
        self._fields = fields
        self._points = {point.key: point for point in space.points}
        self._predicted = dict(predicted or {})
        self._refused = set(refused)
        self._known = {
            record.key: {field: getattr(record.metrics, field).value for field in fields}
            for record in records
            if record.metrics is not None
        }
        self._seen = set(self._known) | self._refused
        self._first = [point for point in first if point.key not in self._seen]
        self._number = 1 + max((record.number for record in records), default=-1)
        self._asked: dict[str, str] = {}  # trial -> its name in TPE
        self._running: dict[str, str] = {}  # trial -> key of its point
        self._rng = random.Random(space.document.search.seed)
        self._told: set[str] = set()  # keys of points whose value TPE has learnt
        self._num_given = 0  # points that TPE was given before it suggests its own
        self._tpe = (
            self._new_tpe([*self._known, *(p.key for p in self._first)]) if suggest else None
        )

    def _new_tpe(self, keys: Iterable[str]) -> OptunaSearch:
        """A TPE that starts with these points and learns from them as from its own."""
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        within = [self._points[key] for key in keys if key in self._points]
        points = [self._encode(point) for point in within if not point.is_ar]
        self._num_given = len(points)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.TPESampler(
                seed=self._space.document.search.seed,
                multivariate=True,
                group=True,  # points of different methods have different fields
                n_startup_trials=5,
            )
        return OptunaSearch(
            space=self._define,
            metric=self.metric,
            mode=self.mode,
            points_to_evaluate=points,
            sampler=sampler,
        )

    def _define(self, trial: Any) -> dict[str, Any]:
        return {"values": self._space.walk(lambda choice: _suggest(trial, choice))}

    def _encode(self, point: Point) -> dict[str, Any]:
        values = self._space.values_of(point)
        choices = {choice.name: choice for choice in self._space.choices}
        return {
            name: value if choices[name].numeric else _text(value) for name, value in values.items()
        }

    # --- Searcher ---------------------------------------------------------------------------------

    def suggest(self, trial_id: str) -> Any:
        point = self._next(trial_id)
        if point is None:
            return Searcher.FINISHED
        self._seen.add(point.key)
        self._running[trial_id] = point.key
        number, self._number = self._number, self._number + 1
        return {"point": point.model_dump_json(exclude_defaults=True), "number": number}

    def _next(self, trial_id: str) -> Point | None:
        while self._first:
            point = self._first.pop(0)
            if point.key not in self._seen:
                return point
        if self._tpe is None or len(self._seen) >= len(self._points.keys() | self._seen):
            return None
        number = asks = 0
        while asks < _MAX_ASKS:
            name, number = f"{trial_id}-{number}", number + 1
            asks += self._num_given <= 0
            self._num_given -= 1
            values = self._tpe.suggest(name)["values"]
            try:
                point = self._space.point(values)
            except InvalidArgument:
                self._tpe.on_trial_complete(name, None, error=True)
                continue
            if point.key not in self._seen and not self._is_hopeless(point.key):
                self._asked[trial_id] = name
                return point
            self._report_result(name, point.key)
        left = [key for key in self._points if key not in self._seen]
        if not left:
            return None
        best = max(self._predicted.get(key, 0.0) for key in left)
        likely = [key for key in left if self._predicted.get(key, 0.0) == best]
        return self._points[self._rng.choice(likely)]

    def _is_hopeless(self, key: str) -> bool:
        best = max((values[self._fields[0]] for values in self._known.values()), default=0.0)
        return (
            self._fields == [OBJECTIVES["goodput"]]
            and self._predicted.get(key, best) < _HOPELESS * best
        )

    def _report_result(self, name: str, key: str) -> None:
        """Report to TPE what is known of a point that needs no trial."""
        assert self._tpe is not None
        known = self._known.get(key) if key not in self._told else None
        if known is None and self._is_hopeless(key) and key not in self._told:
            known = {self._fields[0]: self._predicted[key]}
        self._told.add(key)
        self._tpe.on_trial_complete(name, known, error=known is None)

    def on_trial_result(self, trial_id: str, result: dict[str, Any]) -> None:
        """Nothing: TPE learns when a trial ends."""

    def on_trial_complete(
        self, trial_id: str, result: dict[str, Any] | None = None, error: bool = False
    ) -> None:
        key, name = self._running.pop(trial_id, None), self._asked.pop(trial_id, None)
        if result and not error and key is not None and self._fields[0] in result:
            self._known[key] = {field: result[field] for field in self._fields}
        if self._tpe is not None and name is not None:
            self._tpe.on_trial_complete(name, result, error=error)

    def save(self, checkpoint_path: str) -> None:
        """Nothing: a sweep goes on from its records."""
        with open(checkpoint_path, "w", encoding="utf-8") as file:
            json.dump(sorted(self._seen), file)

    def restore(self, checkpoint_path: str) -> None:
        raise NotImplementedError("a sweep goes on from its records")


def _text(value: Any) -> str:
    return json.dumps(value)


def _suggest(trial: Any, choice: Choice) -> Any:
    values = choice.values
    if not choice.numeric:
        texts = [_text(value) for value in values]
        return values[texts.index(trial.suggest_categorical(choice.name, texts))]
    low, high, step = values[0], values[-1], values[1] - values[0]
    if all(isinstance(value, int) for value in values):
        return trial.suggest_int(choice.name, low, high, step=step)
    return trial.suggest_float(choice.name, low, high, step=step)


class CannotWin(tune.Stopper):
    """Ends a trial whose interval lies below that of another one on the same prompts.

    With several objectives, a trial goes on while it can still win in one of them.
    """

    def __init__(self, objectives: Iterable[str]) -> None:
        self._fields = [OBJECTIVES[name] for name in objectives]
        self._best: dict[tuple[str, int], float] = {}  # (objective, prompts) -> highest lower bound
        self.stopped: dict[str, str] = {}

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        rung = int(result["num_prompts"])
        hopeless = True
        for field in self._fields:
            best = self._best.get((field, rung), 0.0)
            if result[f"{field}_high"] >= best:
                hopeless = False
            self._best[field, rung] = max(best, result[f"{field}_low"])
        if hopeless and not result["complete"]:
            best = self._best[self._fields[0], rung]
            self.stopped[trial_id] = (
                f"after {rung} prompts at most {result[self._fields[0] + '_high']:.2f}x, where "
                f"another one is at least {best:.2f}x"
            )
            return True
        return False

    def stop_all(self) -> bool:
        return False


def first_points(
    space: Space, refused: Iterable[str], predicted: Mapping[str, float], limit: int
) -> list[Point]:
    """The points to measure first: AR, then the chosen ones, ``limit`` in all.

    With TPE these are the points that simulate best, and one of each method that cannot be
    simulated, because nothing is known of it. Without TPE they are all points.

    Args:
        refused: keys of points that the target cannot run.
        predicted: simulated goodput ratios, by the keys of points.
    """
    search, left_out = space.document.search, set(refused)
    able = [p for p in space.points if p.key not in left_out and not p.is_ar]
    if search.algorithm == "optuna":
        simulated = [p for p in able if p.key in predicted]
        simulated.sort(key=lambda p: -predicted[p.key])
        chosen = _spread(simulated, search.simulated_first)
        known = {p.speculation.method for p in simulated}
        for point in able:
            if point.speculation.method not in known:
                known.add(point.speculation.method)
                chosen.append(point)
    elif search.algorithm == "random":
        chosen = random.Random(search.seed).sample(able, len(able))
    else:
        chosen = able
    return [space.ar, *chosen][:limit]


def _spread(ranked: Sequence[Point], count: int) -> list[Point]:
    """The first points of a ranking, of each method a quarter at most while others are left.

    Neighbours of the best point simulate nearly as well as it does. Where a prediction is wrong for
    a whole method, that method alone would fill the list.
    """
    chosen: list[Point] = []
    share = max(2, count // 4)
    taken: dict[str, int] = {}
    for point in ranked:
        if taken.get(point.speculation.method, 0) < share:
            taken[point.speculation.method] = taken.get(point.speculation.method, 0) + 1
            chosen.append(point)
    rest = [point for point in ranked if point not in chosen]
    return [*chosen, *rest][:count]
