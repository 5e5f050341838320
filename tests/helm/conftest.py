"""The chart under Helm's own engine, as a user with its dependency has it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python.chart import Chart

from tests.helm.schemas import Loader

CHART = Path(__file__).parents[2] / "helm" / "paceline"


@pytest.fixture(scope="session")
def chart_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart, and in charts/ the place of the operator's: its archive cannot be fetched here."""
    folder = tmp_path_factory.mktemp("chart") / "paceline"
    shutil.copytree(CHART, folder, ignore=shutil.ignore_patterns("charts"))
    (dependency,) = yaml.safe_load((folder / "Chart.yaml").read_text())["dependencies"]
    place = folder / "charts" / dependency["name"]
    place.mkdir(parents=True)
    (place / "Chart.yaml").write_text(
        yaml.safe_dump({"apiVersion": "v2", "name": dependency["name"], "version": "1.7.0"})
    )
    (place / "templates").mkdir()
    operator = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "operator"}}
    (place / "templates" / "operator.yaml").write_text(yaml.safe_dump(operator))
    return folder


@pytest.fixture(scope="session")
def chart(chart_folder: Path) -> Iterator[Chart]:
    with Chart.load(chart_folder) as chart:
        yield chart


def render(chart: Chart, values: dict[str, Any]) -> list[dict[str, Any]]:
    """All objects of a release called `paceline` in the namespace `models`."""
    files = chart.render(values, name="paceline", namespace="models")
    return [
        document
        for path, text in sorted(files.items())
        if not path.endswith(".txt")
        for document in yaml.load_all(text, Loader=Loader)
        if document
    ]


def only(objects: list[dict[str, Any]], kind: str, name: str | None = None) -> dict[str, Any]:
    """The one object of a kind (and a name)."""
    (found,) = (o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"]))
    return found


def serve_config(objects: list[dict[str, Any]]) -> dict[str, Any]:
    """What the operator would send to Serve."""
    text = only(objects, "RayService")["spec"]["serveConfigV2"]
    config: dict[str, Any] = yaml.safe_load(text)
    return config
