"""A benchmark's result as files: an HTML page that needs no network, and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.bench import peers
from paceline.bench.table import fastest_first
from paceline.bench.templating import templates

_FACTS = (
    "date", "git_commit", "paceline", "cpu", "gpu", "cores", "threads", "platform", "python",
    "torch", "target", "drafter", "dtype", "device", "fingerprint", "suite", "prompts", "chat",
    "batch", "max_tokens", "temperature", "seed", "repetitions",
)  # fmt: skip


def render_csv(result: Mapping[str, Any]) -> str:
    """``results`` of :func:`paceline.bench.run_bench`: a line for each method and category.

    The columns are the fields of the JSON document; a field without a value is empty.
    """
    stream = io.StringIO()
    rows = result["results"]
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def render_page(result: Mapping[str, Any], command: str | None = None) -> str:
    """A result of :func:`paceline.bench.run_bench` as one HTML page.

    Args:
        command: that made the result, to be shown.
    """
    template = templates().get_template("bench.html.j2")
    facts, rows = result["environment"], fastest_first(result["results"])
    several = {
        "topology": len({row["topology"] for row in rows}) > 1,
        "batch_invariant": facts["batch_invariant"] == "both",
    }
    overall = [row for row in rows if row["category"] == "all"]
    drafting = [row for row in rows if row["method"] not in ("ar", peers.AR)]
    drafting = [row for row in drafting if row["mean_accepted_length"] is not None]
    categories = list(dict.fromkeys(row["category"] for row in rows if row["category"] != "all"))
    return template.render(
        command=command,
        environment=facts,
        facts={name: facts[name] for name in _FACTS if facts[name] is not None},
        name_of=lambda row: _name(row, several),
        overall=overall,
        fastest_time=max(row["speedup_p75"] for row in overall),
        by_category={
            category: sorted(
                (row for row in drafting if row["category"] == category),
                key=lambda row: -row["mean_accepted_length"],
            )
            for category in categories
        },
        longest=max((row["mean_accepted_length"] for row in drafting), default=1.0),
        rows=[*overall, *(row for row in rows if row["category"] != "all")],
        remarks=_remarks(result, rows),
    )


def _name(row: Mapping[str, Any], several: Mapping[str, bool]) -> str:
    """The method, and what else tells this row from others."""
    parts = [row["method"]]
    if several["topology"]:
        parts.append(row["topology"])
    if several["batch_invariant"] and row["batch_invariant"] is not None:
        parts.append("invariant" if row["batch_invariant"] else "not invariant")
    return " · ".join(parts)


def _remarks(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    reasons = [f"not run: {row['method']} ({row['reason']})" for row in result["unavailable"]]
    notes = [f"{row['method']}: {row['note']}" for row in rows if row["note"]]
    return list(dict.fromkeys([*result["notes"], *notes, *reasons]))
