"""While trials run: write their records and show progress."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from ray import tune

from paceline.tuning.results import Metrics, Point, Results, TrialRecord, best_trial
from paceline.tuning.search import CannotWin
from paceline.tuning.space import Space, SweepError

_TABLE_EVERY_S = 60.0
_TABLE_LINES = 5


class SweepRecorder(tune.Callback):
    """Writes the record of each trial that ends, and shows a line about it.

    Attributes:
        error: why a record could not be written, which ends the sweep; else None.
    """

    def __init__(
        self,
        space: Space,
        results: Results,
        stopper: CannotWin | None,
        *,
        predicted: Mapping[str, float],
        done: int,
        total: int,
        best: TrialRecord | None,
        say: Callable[[str], None],
    ) -> None:
        self._space = space
        self._results = results
        self._stopper = stopper
        self._predicted = predicted
        self._done, self._total = done, done + total
        self._say = say
        self._best = best
        self._records: list[TrialRecord] = [] if best is None else [best]
        self._started: dict[str, float] = {}
        self._began = self._table_at = time.monotonic()
        self.error: SweepError | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Tune pickles callbacks to restore runs, but sweeps go on from their records."""
        return {}

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._started[trial.trial_id] = time.monotonic()

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        result = trial.last_result or {}
        if "metrics" not in result:
            return self._write(trial, status="failed", reason="it ended without a result")
        metrics = Metrics.model_validate_json(result["metrics"])
        reason = None
        if not result["complete"]:
            stopped = self._stopper.stopped if self._stopper is not None else {}
            reason = stopped.get(trial.trial_id, "the time was up, or others did better")
        return self._write(
            trial, status="finished" if result["complete"] else "stopped", reason=reason,
            metrics=metrics, node=result.get("node", ""),
        )  # fmt: skip

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._write(trial, status="failed", reason=_reason(trial))

    def _write(self, trial: Any, **fields: Any) -> None:
        point = Point.model_validate_json(trial.config["point"])
        metrics, constraints = fields.get("metrics"), self._space.document.constraints
        record = TrialRecord(
            key=point.key,
            number=trial.config["number"],
            point=point,
            predicted=self._predicted.get(point.key),
            refused=None if metrics is None else constraints.broken_by(metrics),
            seconds=time.monotonic() - self._started.get(trial.trial_id, time.monotonic()),
            **fields,
        )
        try:
            self._results.save_trial(record)
        except OSError as error:
            self.error = SweepError(
                f"cannot write {self._results.path('trials')}: {error}; make room and go on with "
                "--resume"
            )
            raise self.error from error
        self._records.append(record)
        self._done += 1
        self._best = best_trial(self._records, self._space.objectives[0])
        self._say(self._line(record))
        if time.monotonic() - self._table_at > _TABLE_EVERY_S:
            self._table_at = time.monotonic()
            for line in self._table():
                self._say(line)

    def _line(self, record: TrialRecord) -> str:
        spent = int(time.monotonic() - self._began)
        head = f"[{self._done:>3}/{self._total}] {spent // 60:>2}:{spent % 60:02}  "
        if record.metrics is None:
            return f"{head}failed            {record.point.label}: {record.reason}"
        text = f"{head}{self._ratio(record)}  {record.point.label}"
        if record.refused is not None:
            return f"{text}  refused: {record.refused}"
        if record.status == "stopped":
            return f"{text}  stopped early"
        if self._best is record and not record.point.is_ar:
            text += "  <- best"
        return text

    def _ratio(self, record: TrialRecord) -> str:
        ratio = record.objective(self._space.objectives[0])
        return f"{ratio.value:5.2f}x ({ratio.low:.2f}-{ratio.high:.2f})"

    def _table(self) -> list[str]:
        objective = self._space.objectives[0]
        counting = sorted(
            (record for record in self._records if record.counts),
            key=lambda record: -record.objective(objective).value,
        )
        lines = [f"        best so far ({objective} over AR):"]
        return lines + [
            f"        {self._ratio(record)}  {record.point.label}"
            for record in counting[:_TABLE_LINES]
        ]


def _reason(trial: Any) -> str:
    """The reason of a failure in one line: the exception without its traceback."""
    error = trial.get_pickled_error()
    text = str(error) if error is not None else (trial.get_error() or "")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    dead = next((line for line in lines if "died" in line or "OOM" in line), None)
    return dead or (lines[-1] if lines else "unknown")
