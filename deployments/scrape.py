"""GET /metrics of a gateway: what the nodes' own endpoints say of its application.

Ray exports the metrics of each node on a port of its own. This gathers them, so that one scrape of
the API's port sees every replica.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Iterable

from paceline.deployments.metrics import METRICS

_TIMEOUT_S = 5.0
_SAMPLE = re.compile(r"^(\w+)\{([^\n]*)\} \S+$", re.MULTILINE)


def metrics_addresses() -> list[str]:
    """HOST:PORT of the Prometheus metrics of each node of the Ray that this process has joined."""
    import ray

    return [
        f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
        for node in ray.nodes()
        if node["Alive"] and node.get("MetricsExportPort")
    ]


async def application_metrics(application: str) -> str:
    """Paceline's metrics of an application on all nodes, in Prometheus' text format.

    A node that does not answer in some seconds is left out.
    """
    addresses = await asyncio.to_thread(metrics_addresses)
    texts = await asyncio.gather(*(asyncio.to_thread(_read, each) for each in addresses))
    return gathered(texts, application)


def gathered(texts: Iterable[str], application: str) -> str:
    """The samples of an application in the answers of several endpoints, metric by metric."""
    label = f'application="{application}"'
    samples: dict[str, list[str]] = {}
    for text in texts:
        for found in _SAMPLE.finditer(text):
            if label in found[2].split(","):
                samples.setdefault(found[1], []).append(found[0])
    lines = []
    for metric in METRICS:
        own = [sample for name in metric.series for sample in samples.get(name, ())]
        if own:
            family = f"ray_paceline_{metric.name}" + "_total" * (metric.kind == "counter")
            lines += [f"# HELP {family} {metric.description}", f"# TYPE {family} {metric.kind}"]
            lines += own
    return "\n".join(lines) + "\n"


def _read(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=_TIMEOUT_S) as answer:
            return str(answer.read().decode(errors="replace"))
    except OSError:
        return ""
