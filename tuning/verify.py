"""Serve the best configuration of a sweep, and measure its speedup as clients see it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from paceline.errors import InvalidArgument
from paceline.tuning.objective import PairedMeasurement, encode_groups
from paceline.tuning.results import Interval, Metrics, Results, TrialRecord, best_trial
from paceline.tuning.space import Space

_CONFIG = "best.yaml"
REPETITIONS = 3


def verify(results: Results, report: Callable[[str], None]) -> dict[str, Any]:
    """Deploy ``best.yaml`` on a local Ray, as `paceline up --config` does, and measure it.

    It sends the sweep's prompts through the gateway over gRPC, by turns with the configuration and
    with AR, with the sweep's concurrency and sampling.

    Returns:
        ``measured`` and ``served`` (intervals of the goodput ratio), ``difference`` (served over
        measured, minus 1), and tokens per second through the gateway.

    Raises:
        InvalidArgument: the sweep has no best configuration, or it is AR.
    """
    from paceline.cluster import serving
    from paceline.cluster.cli_bench import ServerBackend
    from paceline.deployments.config import read_config_file
    from paceline.rpc.client import Client
    from paceline.tokenizer import load_tokenizer

    space = Space.from_dict(results.manifest().space)
    best = best_trial(results.trials(), space.objectives[0])
    if best is None or not results.exists(_CONFIG):
        raise InvalidArgument("result", results.url, "a sweep that has measured something")
    if best.point.is_ar:
        raise InvalidArgument("result", results.url, "a sweep whose best configuration is not AR")
    with tempfile.TemporaryDirectory() as folder:  # the result may be on remote storage
        path = Path(folder) / _CONFIG
        path.write_text(results.read(_CONFIG), encoding="utf-8")
        file = read_config_file(path).with_args({"gateway": {"grpc_port": 0, "http_port": None}})
    tokenizer = load_tokenizer(file.config.target_folder)
    workload = space.document.workload
    template = workload.template(file.config.target_folder)
    measurement: PairedMeasurement | None = None
    for number in range(1, REPETITIONS + 1):
        # Drafters remember earlier outputs: only new replicas have not seen the prompts.
        with (
            serving.deployed(file, report=report) as running,
            Client(str(running["gateway"])) as client,
            closing(ServerBackend(client, tokenizer, workload.concurrency)) as backend,
        ):
            report(f"measuring, {number} of {REPETITIONS}")
            if measurement is None:
                groups = encode_groups(workload, space.prompts, backend, template)
                measurement = PairedMeasurement(
                    best.point, space, backend, backend, groups, is_chat=template is not None
                )
            measurement.repeat(backend)
    assert measurement is not None
    served = measurement.metrics()
    return _comparison(best, served)


def _comparison(best: TrialRecord, served: Metrics) -> dict[str, Any]:
    measured = best.confirmed or best.metrics
    assert measured is not None

    def values(interval: Interval) -> Mapping[str, float]:
        return interval.model_dump()

    ratio = served.goodput_ratio.value / measured.goodput_ratio.value
    return {
        "configuration": best.point.label,
        "measured": values(measured.goodput_ratio),
        "served": values(served.goodput_ratio),
        "difference": ratio - 1,
        "tokens_per_second": served.tokens_per_second,
        "ar_tokens_per_second": served.ar_tokens_per_second,
        "identical_to_ar": served.identical_to_ar,
    }
