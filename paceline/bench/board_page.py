"""The board as one HTML page that needs no network, and as CSV.

Like :mod:`paceline.bench.board_rows` it needs no torch: the documents' build makes the project's
own board with it.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.bench.board_rows import ALL, BoardResult, BoardRow
from paceline.bench.templating import templates

MAX_DEPTH_SHOWN = 12
"""Deeper tokens are too few for a line."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line of the table: a row's numbers of one category."""

    index: int
    row_index: int
    row: BoardRow
    result: BoardResult

    @property
    def is_baseline(self) -> bool:
        return self.row.method == "ar"

    @property
    def rates(self) -> list[float]:
        return self.result.acceptance_by_depth[:MAX_DEPTH_SHOWN]

    @property
    def most(self) -> float:
        """What has to fit into a bar's track."""
        high = self.result.interval[1] if self.result.interval else 0.0
        return max(self.result.speedup, high, self.result.speedup_bound or 0.0)


def render_board(rows: Sequence[BoardRow]) -> str:
    """The page of these rows (:func:`paceline.bench.board_rows.read_rows`)."""
    measured = [row for row in rows if row.reason is None]
    entries = [
        _Entry(0, row_index, row, result)
        for row_index, row in enumerate(measured)
        for result in row.results
    ]
    entries.sort(key=lambda entry: (entry.result.category != ALL, -entry.result.speedup))
    entries = [_Entry(i, e.row_index, e.row, e.result) for i, e in enumerate(entries)]
    groups: dict[tuple[str, str, str], set[str]] = {}
    for row in measured:
        asked = ", ".join(f"{k} {v}" for k, v in sorted(row.settings.items()) if v is not None)
        groups.setdefault(row.key[:3], set()).add(asked)
    return (
        templates()
        .get_template("board.html.j2")
        .render(
            rows=measured,
            entries=entries,
            machines=_distinct(row.machine.name for row in measured),
            targets=_distinct(row.target for row in measured),
            suites=_distinct(row.suite for row in measured),
            categories=_distinct(e.result.category for e in entries if e.result.category != ALL),
            facts={row.machine.name: row.machine for row in measured},
            settings={key: sorted(asked) for key, asked in groups.items()},
            missing=_missing(rows),
            most=max((entry.most for entry in entries), default=1.0),
            deepest=max((len(entry.rates) for entry in entries), default=1),
        )
    )


def render_board_csv(rows: Sequence[BoardRow]) -> str:
    """A line for each row and category; a row without numbers has one, with its reason."""
    lines = [
        _flat(row) | ({} if result is None else _flat_result(result))
        for row in rows
        for result in (row.results or (None,))
    ]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return stream.getvalue()


def _flat(row: BoardRow) -> dict[str, Any]:
    memory, exact = row.memory, row.exactness
    return {
        "method": row.method,
        "target": row.target,
        "suite": row.suite,
        **{
            f"machine_{name}" if name == "name" else name: value
            for name, value in asdict(row.machine).items()
        },
        "peak_memory": None if memory is None else memory.peak,
        "drafter_memory": None if memory is None else memory.drafter,
        "prompts_checked": None if exact is None else exact.num_prompts,
        "prompts_identical": None if exact is None else exact.num_identical,
        "reason": row.reason,
        "note": row.note,
        "command": row.command,
        "commit": row.commit,
        "date": row.date,
        "fingerprint": row.fingerprint,
        "digest": row.digest,
    }


def _flat_result(result: BoardResult) -> dict[str, Any]:
    low, high = result.interval or (None, None)
    lists = ("interval", "drafted_by_depth", "accepted_by_depth")
    plain = {name: value for name, value in asdict(result).items() if name not in lists}
    counters = {name: " ".join(map(str, getattr(result, name))) for name in lists[1:]}
    return {**plain, "speedup_low": low, "speedup_high": high, **counters}


def _missing(rows: Sequence[BoardRow]) -> dict[str, list[str]]:
    """Methods that did not run, by the reason."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.reason is not None:
            found.setdefault(f"{row.reason} ({row.target}, {row.machine.name})", []).append(
                row.method
            )
    return found


def _distinct(names: Any) -> list[str]:
    return list(dict.fromkeys(names))
