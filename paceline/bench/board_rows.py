"""The rows of the board: their schema, their files, and merging those of several machines.

A row is what one method reaches on one machine with one target and one suite. It has a JSON file of
its own, ``MACHINE/TARGET/SUITE/METHOD.json``, which anybody can add; :func:`read_row` checks all of
it. The module needs no package but this one, so that the documents' build can read rows, too.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import types
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from paceline.errors import InvalidArgument

VERSION = 1
"""Of the schema; a file of another one is refused."""
ALL = "all"
"""The category that has the numbers over all prompts."""


@dataclass(frozen=True, slots=True)
class _Between:
    least: float = 0.0
    most: float = math.inf

    def __str__(self) -> str:
        return f">= {self.least:g}" if self.most == math.inf else f"in [{self.least:g}, 1]"


_Positive = Annotated[float, _Between()]
_Count = Annotated[int, _Between()]
_Share = Annotated[float, _Between(0.0, 1.0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardMachine:
    """Where a row was measured.

    Attributes:
        name: tells kinds of machines apart, in file names, too.
        cpu, gpu, platform: as the system names them.
        cores: that the process might use.
        threads: of torch.
        kernels: the variant of the C kernels, or "off".
    """

    name: str
    cpu: str
    cores: Annotated[int, _Between(1)]
    threads: Annotated[int, _Between(1)]
    kernels: str
    platform: str
    gpu: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardResult:
    """The numbers of one category, or of all prompts.

    Attributes:
        num_samples: runs of the method, each beside one of AR.
        speedup: over AR, the median of paired ratios.
        interval: of the speedup, 95 %, by resampling prompts; None with fewer than two prompts.
        speedup_bound: the speedup if drafts took no time (:mod:`paceline.bench.run`).
        tokens_per_second: median, prefill included.
        drafted_by_depth, accepted_by_depth: counters, see
            :class:`paceline.session.SessionStatistics`.
        draft_share: share of the time that went into drafts.
        verify_rows, verify_ms: mean tokens and milliseconds of a verification.
        roofline_share: of the least time that the processor needs for a verification's products,
            in the measured one; None where the C kernels do not compute.
    """

    category: str
    num_prompts: Annotated[int, _Between(1)]
    num_samples: Annotated[int, _Between(1)]
    speedup: _Positive
    interval: tuple[_Positive, _Positive] | None
    speedup_bound: _Positive | None
    tokens_per_second: _Positive
    mean_accepted_length: _Positive
    drafted_by_depth: tuple[_Count, ...]
    accepted_by_depth: tuple[_Count, ...]
    draft_share: _Share | None
    verify_rows: _Positive | None
    verify_ms: _Positive | None
    roofline_share: _Positive | None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """Of the drafts that reached each depth, the share whose token there was accepted."""
        return [
            accepted / drafted
            for accepted, drafted in zip(self.accepted_by_depth, self.drafted_by_depth, strict=True)
            if drafted
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardMemory:
    """Bytes.

    Attributes:
        peak: of the process that measured the row, the models' loading included.
        drafter: weights, tables and whatever else only the drafter holds, without KV entries.
    """

    peak: _Count
    drafter: _Count


@dataclass(frozen=True, slots=True, kw_only=True)
class Exactness:
    """Prompts whose every run had AR's tokens.

    Attributes:
        differing: ids of the other prompts.
    """

    num_prompts: _Count
    num_identical: _Count
    differing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BoardRow:
    """One method on one machine, with one target and one suite.

    Attributes:
        version: of the schema.
        method: of the catalogue, with its knobs after colons.
        target, suite: names.
        command: that measured the row.
        commit: of Paceline, with ``+changes`` if files differed from it; None if unknown.
        date: ISO 8601, with a time zone.
        paceline, python, torch: versions.
        fingerprint: of the target's numerics (:mod:`paceline.numerics`).
        settings: what was asked for.
        digest: of method and settings; a file that has it needs no other run.
        results: of each category and of ``all``; empty if the method did not run.
        exactness: None where the method may have other tokens than AR.
        reason: why the method did not run; None if it did.
        note: what else to know about the row.
    """

    version: int
    method: str
    target: str
    suite: str
    machine: BoardMachine
    command: str
    commit: str | None
    date: str
    paceline: str
    python: str
    torch: str
    fingerprint: str | None
    settings: Mapping[str, Any]
    digest: str
    results: tuple[BoardResult, ...]
    memory: BoardMemory | None
    exactness: Exactness | None
    reason: str | None
    note: str | None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What only one row of a board has: machine, target, suite and method."""
        return self.machine.name, self.target, self.suite, self.method

    @property
    def path(self) -> Path:
        """Where its file lies in a folder of rows."""
        *folders, name = (slug(part) for part in self.key)
        return Path(*folders, f"{name}.json")


def slug(text: str) -> str:
    """A part of a file's path that reads like the text."""
    return re.sub(r"[^\w.=+-]+", "-", text).strip("-.") or "-"


def digest_of(method: str, settings: Mapping[str, Any]) -> str:
    """What :attr:`BoardRow.digest` has to be."""
    text = json.dumps([method, settings], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# --- files ----------------------------------------------------------------------------------------


def write_row(row: BoardRow, folder: Path) -> Path:
    """Write a row to its place in a folder, whole or not at all; returns the file."""
    file = folder / row.path
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    text = json.dumps(asdict(row), indent=1, ensure_ascii=False, allow_nan=False)
    # Lists of numbers on one line: a row is read by people, too.
    text = re.sub(r"\[\s+([-+\d.eE,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    part.write_text(text + "\n", "utf-8")
    part.replace(file)
    return file


def read_row(file: Path) -> BoardRow:
    """Read and check a row's file.

    Raises:
        InvalidArgument: it cannot be read, or a field is missing, unknown or wrong; names the file,
            the field, its value and what is allowed.
    """
    try:
        value = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(str(file), "no row", f"a readable JSON file ({error})") from error
    if isinstance(value, dict) and value.get("version", VERSION) != VERSION:
        raise InvalidArgument(f"{file}: version", value["version"], str(VERSION))
    row: BoardRow = _parsed(BoardRow, value, f"{file}: ")
    _check(row, f"{file}: ")
    return row


def read_rows(places: Iterable[Path]) -> list[BoardRow]:
    """The rows of files and of folders with files, merged: of equal keys the newest one.

    Raises:
        InvalidArgument: a file is no row (:func:`read_row`), or there are none.
    """
    places = list(places)
    files = [
        file
        for place in places
        for file in (sorted(place.rglob("*.json")) if place.is_dir() else [place])
    ]
    if not files:
        raise InvalidArgument("rows", [str(p) for p in places], "folders with files of rows")
    return merged(read_row(file) for file in files)


def merged(rows: Iterable[BoardRow]) -> list[BoardRow]:
    """One row for each key, the newest, in the order of the keys."""
    newest: dict[tuple[str, str, str, str], BoardRow] = {}
    for row in rows:
        other = newest.get(row.key)
        if other is None or _date(other) <= _date(row):
            newest[row.key] = row
    return [newest[key] for key in sorted(newest)]


def _date(row: BoardRow) -> datetime:
    return datetime.fromisoformat(row.date)


# --- checks ---------------------------------------------------------------------------------------


def _check(row: BoardRow, place: str) -> None:
    """What types and bounds cannot say."""

    def require(fits: bool, field: str, value: object, allowed: str) -> None:
        if not fits:
            raise InvalidArgument(place + field, value, allowed)

    try:
        has_zone = _date(row).tzinfo is not None
    except ValueError:
        has_zone = False
    require(has_zone, "date", row.date, "an ISO 8601 date with a time zone")
    wanted = digest_of(row.method, row.settings)
    require(row.digest == wanted, "digest", row.digest, f"{wanted}, which method and settings have")
    if row.reason is not None:
        require(not row.results, "results", f"{len(row.results)} results", "none with a reason")
        return
    names = [result.category for result in row.results]
    require(names.count(ALL) == 1, "results", names, f'categories, one of them "{ALL}"')
    require(len(set(names)) == len(names), "results", names, "each category once")
    require(row.memory is not None, "memory", None, "an object, where results are")
    for index, result in enumerate(row.results):
        at = f"results[{index}]."
        low, high = result.interval or (0.0, 0.0)
        require(low <= high, f"{at}interval", result.interval, "the lower end first")
        drafted, accepted = result.drafted_by_depth, result.accepted_by_depth
        require(
            len(accepted) == len(drafted)
            and all(a <= d for a, d in zip(accepted, drafted, strict=True)),
            f"{at}accepted_by_depth", list(accepted),
            "as many numbers as drafted_by_depth, none larger than the one there",
        )  # fmt: skip
    exact = row.exactness
    if exact is not None:
        whole = exact.num_identical + len(exact.differing)
        require(
            exact.num_prompts == whole, "exactness.num_prompts", exact.num_prompts,
            f"{whole}: num_identical and the differing ones",
        )  # fmt: skip


def _parsed(kind: Any, value: Any, place: str) -> Any:
    """A JSON value as this type; raises InvalidArgument, whose field begins with ``place``."""

    def refuse(allowed: str) -> InvalidArgument:
        return InvalidArgument(place.rstrip(". "), _short(value), allowed)

    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise refuse("an object")
        return _parsed_object(kind, value, place)
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):  # only ever "or None"
        return None if value is None else _parsed(args[0], value, place)
    if origin is Annotated:
        number, bounds = _parsed(args[0], value, place), args[1]
        if not bounds.least <= number <= bounds.most:
            raise refuse(f"a number {bounds}")
        return number
    if origin is tuple:
        if not isinstance(value, list):
            raise refuse("a list")
        kinds: Sequence[Any] = args[:1] * len(value) if args[-1] is Ellipsis else args
        if len(kinds) != len(value):
            raise refuse(f"a list of {len(kinds)}")
        start = place.rstrip(". ")
        return tuple(
            _parsed(each, item, f"{start}[{i}].")
            for i, (each, item) in enumerate(zip(kinds, value, strict=True))
        )
    if kind is str:
        if not isinstance(value, str) or not value:
            raise refuse("a text")
        return value
    if kind in (int, float):
        kinds_of_number = int if kind is int else int | float
        if not isinstance(value, kinds_of_number) or isinstance(value, bool):
            raise refuse("an integer" if kind is int else "a number")
        if not math.isfinite(value):
            raise refuse("a finite number")
        return kind(value)
    if not isinstance(value, dict):
        raise refuse("an object")
    return value


def _parsed_object(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    hints = get_type_hints(kind, include_extras=True)
    needed = [each.name for each in fields(kind) if each.default is MISSING]
    for name in value:
        if name not in hints:
            raise InvalidArgument(place + name, _short(value[name]), f"one of {', '.join(hints)}")
    for name in needed:
        if name not in value:
            raise InvalidArgument(place + name, None, "a value: the field is missing")
    return kind(**{k: _parsed(hints[k], v, f"{place}{k}.") for k, v in value.items()})


def _short(value: Any) -> Any:
    """The value, or where it is long its beginning."""
    text = str(value)
    return value if len(text) <= 80 else f"{text[:77]}..."
