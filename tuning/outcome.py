"""What a sweep leaves for its user: files for `paceline up --config`, and the report."""

from __future__ import annotations

from typing import Any

import yaml

from paceline.deployments.config import IMPORT_PATH
from paceline.tuning.results import EXPERIENCE, Results, TrialRecord, best_trial, pareto_front
from paceline.tuning.space import Space


def write_outcome(space: Space, results: Results) -> None:
    """Write ``best.yaml``, with several objectives ``pareto/``, and the report."""
    records = results.trials()
    objectives = space.objectives
    experience = results.read(EXPERIENCE) if results.exists(EXPERIENCE) else None
    best = best_trial(records, objectives[0])
    if best is not None:
        results.write("best.yaml", deployment_yaml(space, best, objectives[0], experience))
    if len(objectives) > 1:
        for record in pareto_front(records, objectives):
            text = deployment_yaml(space, record, objectives[0], experience)
            results.write(f"pareto/{record.key}.yaml", text)
    from paceline.tuning.report import write_report  # loads plotly

    write_report(results)


def deployment_yaml(
    space: Space, record: TrialRecord, objective: str, experience: str | None = None
) -> str:
    """A trial's configuration, as a file for `paceline up --config`, `serve run` and the chart.

    Args:
        objective: the one whose ratio the file's comment gives.
        experience: JSON text of what method ``auto`` has learnt.
    """
    model = space.document.model.model_dump(mode="json", exclude_defaults=True)
    speculation = record.point.speculation.model_dump(mode="json", exclude_defaults=True)
    args: dict[str, Any] = {
        "model": {**model, "dtype": record.point.dtype},
        "topology": record.point.topology,
        "speculation": {"method": record.point.speculation.method, **speculation},
    }
    if experience is not None:
        args["experience"] = experience.strip()
    if space.document.engine == "vllm":
        vllm = space.document.vllm.model_dump(mode="json", exclude_defaults=True)
        args |= {"engine": "vllm"} | ({"vllm": vllm} if vllm else {})
    document = {
        "proxy_location": "Disabled",
        "applications": [
            {
                "name": "paceline",
                "import_path": IMPORT_PATH,
                "route_prefix": None,
                "args": args,
            }
        ],
    }
    ratio = record.objective(objective)
    metrics = record.confirmed or record.metrics
    assert metrics is not None
    workload = space.document.workload
    return (
        f"# Written by the sweep {space.document.name!r}, for `paceline up --config`.\n"
        f"# {objective}: {ratio.value:.2f} times AR "
        f"({ratio.low:.2f} to {ratio.high:.2f}, {space.document.measurement.confidence:.0%}), "
        f"{metrics.tokens_per_second:.0f} tokens/s, mean accepted length "
        f"{metrics.mean_accepted_length:.2f},\n"
        f"# with {workload.concurrency} request(s) at a time at temperature "
        f"{workload.temperature:g}.\n"
        + yaml.safe_dump(document, sort_keys=False, allow_unicode=True)
    )
