"""What Prometheus sees of a deployment, read from the node's real endpoint."""

from __future__ import annotations

import json
import re
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import SpeculationConfig
from paceline.deployments.dashboard import DASHBOARD, series_of, write_observability
from paceline.deployments.metrics import MAX_TENANTS, METRICS, OTHER, SERIES, Exporter
from paceline.deployments.scrape import metrics_addresses
from paceline.errors import InvalidArgument
from paceline.rpc.access import Gate
from paceline.rpc.client import Client
from paceline.rpc.tenants import Tenants
from paceline.sampling import SamplingParams
from tests.deployments.conftest import PROMPTS, App, eventually

ROOT = Path(__file__).parents[2]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
_LINE = re.compile(r"^(\w+)\{(.*)\} (\S+)$", re.MULTILINE)


class Scrape(Counter[str]):
    """The values of one application, by name and the named labels; other labels are added up."""


def scrape(app: App, *labels: str) -> Scrape:
    result = Scrape()
    for address in metrics_addresses():
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for name, inside, value in _LINE.findall(text):
            tags = dict(re.findall(r'(\w+)="([^"]*)"', inside))
            if name in SERIES and tags.get("application") == app.name:
                shown = ",".join(tags[label] for label in labels if label in tags)
                result[f"{name}:{shown}" if shown else name] += float(value)
    return result


def reported(app: App, name: str, wanted: float, before: Scrape) -> bool:
    return eventually(lambda: scrape(app)[name] - before[name] == wanted, 30)


@pytest.mark.slow
@pytest.mark.one_of(2)
@pytest.mark.serve
@pytest.mark.timeout(300)
def test_the_endpoint_has_exactly_what_the_requests_had(app: App) -> None:
    before = scrape(app)
    by_method, by_length = scrape(app, "method"), scrape(app, "method", "length")
    by_position = scrape(app, "method", "position")
    with Client(app.address, timeout=60) as client:
        methods = ("ar", "draft_model", "prompt_lookup")
        done = {
            m: [client.complete(p, PARAMS, SpeculationConfig(method=m)) for p in PROMPTS]
            for m in methods
        }
        with pytest.raises(InvalidArgument):
            client.complete([1, 10**6], PARAMS)
    everyone = [completion.statistics for each in done.values() for completion in each]
    rounds = sum(stats.num_rounds for stats in everyone)
    assert reported(app, "ray_paceline_rounds_total", rounds, before)
    ended = "ray_paceline_e2e_request_latency_seconds_count"  # perhaps one report later
    assert reported(app, ended, len(everyone), before)

    with urllib.request.urlopen(f"{app.http}/metrics", timeout=10) as answer:
        gathered = answer.read().decode()
    told = [float(v) for n, _, v in _LINE.findall(gathered) if n == "ray_paceline_rounds_total"]
    assert sum(told) == scrape(app)["ray_paceline_rounds_total"]
    assert "# TYPE ray_paceline_e2e_request_latency_seconds histogram" in gathered

    new = scrape(app, "method") - by_method
    for method, completions in done.items():
        stats = [completion.statistics for completion in completions]
        prefix = "ray_paceline_spec_decode_num"
        expected = {
            "ray_paceline_rounds_total": sum(s.num_rounds for s in stats),
            "ray_paceline_generation_tokens_total": sum(s.num_tokens for s in stats),
            f"{prefix}_drafts_total": sum(sum(s.drafted_by_depth[:1]) for s in stats),
            f"{prefix}_draft_tokens_total": sum(s.num_drafted for s in stats),
            f"{prefix}_draft_nodes_total": sum(s.num_draft_nodes for s in stats),
            f"{prefix}_accepted_tokens_total": sum(s.num_accepted for s in stats),
            "ray_paceline_e2e_request_latency_seconds_count": len(stats),
            "ray_paceline_time_to_first_token_seconds_count": len(stats),
            "ray_paceline_request_generation_tokens_sum": sum(s.num_tokens for s in stats),
            "ray_paceline_inter_token_latency_seconds_count": sum(s.num_rounds - 1 for s in stats),
        }
        assert {name: new[f"{name}:{method}"] for name in expected} == expected
        for name, value in {"draft": "draft_seconds", "verify": "verify_seconds"}.items():
            seconds = sum(getattr(s, value) for s in stats)
            assert new[f"ray_paceline_{name}_seconds_total:{method}"] == pytest.approx(seconds)

    positions = scrape(app, "method", "position") - by_position
    accepted = [c.statistics.accepted_by_depth for c in done["draft_model"]]
    for position in range(max(map(len, accepted))):
        wanted = sum(depths[position] for depths in accepted if position < len(depths))
        name = "ray_paceline_spec_decode_num_accepted_tokens_per_pos_total"
        assert positions[f"{name}:draft_model,{position}"] == wanted

    lengths = scrape(app, "method", "length") - by_length
    name = "ray_paceline_spec_decode_draft_length_total"
    assert lengths[f"{name}:ar,0"] == sum(c.statistics.num_rounds for c in done["ar"])
    drafted = {int(k.rpartition(",")[2]): n for k, n in lengths.items() if f"{name}:draft_mod" in k}
    draft_model = [c.statistics for c in done["draft_model"]]
    assert sum(drafted.values()) == sum(s.num_rounds for s in draft_model)
    assert sum(n * length for length, n in drafted.items()) == sum(
        s.num_drafted for s in draft_model
    )

    now = scrape(app)
    assert now["ray_paceline_request_success_total"] - before[
        "ray_paceline_request_success_total"
    ] == len(everyone)
    assert now["ray_paceline_prompt_tokens_total"] > before["ray_paceline_prompt_tokens_total"]
    assert now["ray_paceline_step_seconds_count"] > before["ray_paceline_step_seconds_count"]
    assert eventually(lambda: bool(scrape(app)["ray_paceline_kv_cache_tokens"]))
    assert scrape(app)["ray_paceline_kv_cache_tokens"] == app.replica("target")["kv_capacity"]

    def refused() -> Counter[str]:
        return scrape(app, "deployment", "reason") - Counter(before)

    name = "ray_paceline_refusals_total"
    assert eventually(
        lambda: (
            refused()[f"{name}:target,INVALID_ARGUMENT"] >= 1
            and refused()[f"{name}:gateway,INVALID_ARGUMENT"] >= 1
        ),
        10,
    ), refused()
    states = {f"ray_paceline_sessions:{s}" for s in ("waiting", "prefilling", "ready")}
    assert eventually(lambda: states <= scrape(app, "state").keys())

    for name in ("num_requests_running", "num_requests_waiting"):
        assert f"ray_paceline_{name}:paceline" in scrape(app, "model_name")
    scraped = {name for name, _, _ in _LINE.findall(gathered)}
    read = {s for rule in alert_rules() for s in series_of(rule["expr"])}
    rare = {"ray_paceline_drafters_lost_total"}  # counters that nothing here raises
    assert read - rare <= scraped | set(scrape(app))


def test_every_expression_of_the_dashboard_names_a_metric() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [t for panel in dashboard["panels"] for t in panel.get("targets", ())]
    shown: set[str] = set()
    for target in targets:
        series = series_of(target["expr"])
        assert series
        assert series <= SERIES, target["expr"]
        shown |= series
    (application,) = [v for v in dashboard["templating"]["list"] if v["name"] == "application"]
    assert series_of(application["query"]) <= SERIES
    never = [m.name for m in METRICS if not shown & set(m.series)]
    assert set(never) <= {
        "kv_cache_tokens",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_nodes",
    }


def alert_rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((ROOT / "helm/paceline/files/alerts.yaml").read_text())["groups"]
    return list(group["rules"])


def test_every_alert_names_metrics_and_has_a_line_in_the_runbook() -> None:
    tags = {
        m.name: {*m.tags, "application", "deployment", "replica", "model_name"} for m in METRICS
    }
    tags = {name: tags[m.name] for m in METRICS for name in m.series}
    page = (ROOT / "docs/observability.md").read_text()
    runbook = set(re.findall(r"^\| `(Paceline\w+)` \|", page, re.MULTILINE))
    rules = alert_rules()
    assert runbook == {rule["alert"] for rule in rules}
    for rule in rules:
        series = series_of(rule["expr"])
        assert series
        assert series <= SERIES, rule["alert"]
        known = {"le"}.union(*(tags[name] for name in series))
        grouped = re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"])
        assert {label.strip() for each in grouped for label in each.split(",")} <= known
        shown = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        assert shown <= known
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}


def test_tenants_beyond_a_number_share_a_label(tmp_path: Path) -> None:
    """Whoever writes a tenants file does not decide how many series Prometheus keeps."""
    names = [f"tenant-{i}" for i in range(2 * MAX_TENANTS)]
    file = tmp_path / "tenants.yaml"
    tenants = {name: {"token": f"secret-of-{name}-{'x' * 32}"} for name in names}
    file.write_text(yaml.safe_dump({"tenants": tenants}))
    gate, exporter = Gate(tenants=Tenants(file)), Exporter("m")
    told: dict[str, float] = {}

    def total(name: str, value: float, **tags: str) -> None:
        if name == "tenant_opens":
            told[tags["tenant"]] = value

    exporter.total = total  # type: ignore[method-assign]
    exporter.set = lambda *_args, **_tags: None  # type: ignore[method-assign]
    for name in names:
        header = ("authorization", f"Bearer {tenants[name]['token']}")
        gate.authenticate("ipv4:127.0.0.1:1", "/paceline.v1.GenerateService/Generate", [header])
        gate.count_open()
        exporter.refusals(gate)
    assert told == dict.fromkeys(names[:MAX_TENANTS], 1) | {OTHER: MAX_TENANTS}


def test_the_names_of_metrics_are_those_that_ray_allows() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    allowed: Callable[[str], object] = re.compile(r"[a-z][a-z0-9_]*").fullmatch
    assert all(allowed(name) for name in names)


def test_files_for_a_prometheus_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "o"
    files = write_observability(folder, ["127.0.0.1:8080"])
    prometheus = yaml.safe_load(Path(files["prometheus"]).read_text())
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["127.0.0.1:8080"]}]
    assert Path(files["dashboard"]).read_text() == DASHBOARD.read_text()
    provider = yaml.safe_load(Path(files["provider"]).read_text())
    assert provider["providers"][0]["options"]["path"] == str(Path(files["dashboard"]).parent)
