"""Search the draft model as well: a sweep with each, and the best configuration of all.

Which draft model is fastest is not the one that predicts text best: what one costs counts as much
(Decoding Speculative Decoding, arXiv 2402.01528). Every sweep measures its points against AR of the
same target, side by side, so their ratios compare.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline.tuning.results import Interval, Manifest, Results, best_trial
from paceline.tuning.space import Space
from paceline.tuning.stages import Sweep, earlier_run
from paceline.tuning.tables import latest, ratio, short_label

SUMMARY = "drafters.json"


def spaces(space: Space) -> dict[str, Space]:
    """The space of each draft model that is searched, by the name of its folder in the results."""
    found: dict[str, Space] = {}
    for drafter in space.document.search.drafters:
        model = space.document.model.model_copy(update={"drafter": drafter})
        search = space.document.search.model_copy(update={"drafters": ()})
        document = space.document.model_copy(update={"model": model, "search": search})
        name = base = PurePath(drafter.rpartition("@")[0] or drafter).name
        number = 2
        while name in found:
            name, number = f"{base}-{number}", number + 1
        found[name] = dataclasses.replace(space, document=document)
    return found


def run_each(space: Space, results: Results, console: Console, *, resume: bool = False) -> None:
    """A sweep with each draft model, in a folder of its own; then ``best.yaml`` of all.

    Raises: as :class:`Sweep` and :meth:`Sweep.run`.
    """
    earlier_run(space, results, resume=resume)  # which refuses a folder with another
    manifests: list[Manifest] = []
    for name, each in spaces(space).items():
        own = Results(f"{results.url}/{name}")
        console.print(f"draft model {name}", markup=False, highlight=False)
        manifests.append(Sweep(each, own, console, resume=own.exists()).run())
        _save(space, results, manifests)
    found = rows(results)
    results.write(SUMMARY, json.dumps(found, indent=2) + "\n")
    results.write("best.yaml", Results(f"{results.url}/{found[0]['drafter']}").read("best.yaml"))


def rows(results: Results) -> list[dict[str, Any]]:
    """What the sweep with each draft model found, the fastest first, as JSON values.

    Returns:
        Of each: ``drafter``, its folder's name; ``speedup`` over AR with its interval;
        ``configuration``; and ``mean_accepted_length``.
    """
    return sorted(_rows(results), key=lambda row: -float(row["speedup"]["value"]))


def _rows(results: Results) -> Iterator[dict[str, Any]]:
    space = Space.from_dict(results.manifest().space)
    for name in spaces(space):
        own = Results(f"{results.url}/{name}")
        best = best_trial(own.trials(), space.objectives[0]) if own.exists() else None
        if best is not None:
            yield {
                "drafter": name,
                "speedup": best.objective(space.objectives[0]).model_dump(mode="json"),
                "configuration": short_label(best.point),
                "mean_accepted_length": latest(best).mean_accepted_length,
            }


def show(results: Results, console: Console) -> None:
    """Print :func:`rows`, and where the results of each are."""
    objective = results.manifest().objectives[0]
    table = Table("draft model", f"{objective} over AR", "τ", "configuration", box=None)
    for row in rows(results):
        speedup = ratio(Interval.model_validate(row["speedup"]))
        accepted = f"{row['mean_accepted_length']:.2f}"
        table.add_row(row["drafter"], speedup, accepted, row["configuration"])
    console.print(table)
    console.print(
        f"`paceline sweep show {results.url}/NAME` shows the sweep with one of them; the best of "
        f"all is {results.path('best.yaml')}",
        markup=False, highlight=False, soft_wrap=True,
    )  # fmt: skip


def _save(space: Space, results: Results, manifests: list[Manifest]) -> None:
    """A manifest of the whole: it has what the last one has, with the sums of all."""
    seconds: dict[str, float] = {}
    for manifest in manifests:
        for stage, spent in manifest.seconds.items():
            seconds[stage] = seconds.get(stage, 0.0) + spent
    done = len(manifests) == len(space.document.search.drafters)
    changes = {
        "space": space.as_dict(),
        "started": manifests[0].started,
        "state": "finished" if done else "running",
        "finished": manifests[-1].finished if done else None,
        "num_points": sum(manifest.num_points or 0 for manifest in manifests),
        "seconds": seconds,
    }
    results.save_manifest(manifests[-1].model_copy(update=changes))
