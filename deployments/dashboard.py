"""The Grafana dashboard, and the files with which your own Prometheus scrapes a deployment.

`python -m paceline.deployments.dashboard` writes deployments/observability/paceline.json; `--check`
says whether it is stale.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "observability"
DASHBOARD = FOLDER / "paceline.json"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_SELECT = '{application=~"$application"}'
_WINDOW = "[$__rate_interval]"


def _rate(name: str, by: str = "") -> str:
    suffix = f" by ({by})" if by else ""
    return f"sum(rate(ray_paceline_{name}_total{_SELECT}{_WINDOW})){suffix}"


def _ratio(above: str, below: str, by: str = "") -> str:
    return f"{_rate(above, by)} / {_rate(below, by)}"


def _quantile(q: float, name: str) -> str:
    buckets = f"rate(ray_paceline_{name}_bucket{_SELECT}{_WINDOW})"
    return f"histogram_quantile({q}, sum({buckets}) by (le))"


def _quantiles(name: str) -> list[tuple[str, str]]:
    return [(_quantile(q, name), f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99)]


def _sum(name: str, by: str) -> str:
    return f"sum(ray_paceline_{name}{_SELECT}) by ({by})"


Panel = tuple[str, str, Sequence[tuple[str, str]]]  # title, unit, expressions with their legends
ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Speculation",
        (
            (
                "Acceptance rate", "percentunit",
                [(_ratio(
                    "spec_decode_num_accepted_tokens", "spec_decode_num_draft_tokens", "method"
                ), "{{method}}")],
            ),
            (
                "Mean accepted length (committed tokens a round)", "short",
                [(_ratio("generation_tokens", "rounds", "method"), "{{method}}")],
            ),
            (
                "Acceptance by position", "percentunit",
                [(_ratio(
                    "spec_decode_num_accepted_tokens_per_pos",
                    "spec_decode_num_draft_tokens_per_pos", "position",
                ), "position {{position}}")],
            ),
            (
                "Rounds by speculation length", "ops",
                [(_rate("spec_decode_draft_length", "length"), "{{length}}")],
            ),
            (
                "Draft and verify time of a round", "s",
                [(_ratio("draft_seconds", "rounds", "method"), "draft {{method}}"),
                 (_ratio("verify_seconds", "rounds", "method"), "verify {{method}}")],
            ),
            ("Drafters lost", "ops", [(_rate("drafters_lost", "method"), "{{method}}")]),
            (
                "States sent for a token", "bytes",
                [(_ratio("states_bytes", "generation_tokens", "method"), "{{method}}")],
            ),
        ),
    ),
    (
        "Denoising",
        (
            (
                "Tokens a forward", "short",
                [(_ratio("generation_tokens", "denoising_forwards", "method"), "{{method}}")],
            ),
            (
                "Forwards a block", "short",
                [(_ratio("denoising_forwards", "denoising_blocks", "method"), "{{method}}")],
            ),
            (
                "Forwards and blocks a second", "ops",
                [(_rate("denoising_forwards", "method"), "forwards {{method}}"),
                 (_rate("denoising_blocks", "method"), "blocks {{method}}")],
            ),
        ),
    ),
    (
        "Requests",
        (
            (
                "Tokens a second", "short",
                [(_rate("generation_tokens"), "generated"), (_rate("prompt_tokens"), "prompt")],
            ),
            ("Time to first token", "s", _quantiles("time_to_first_token_seconds")),
            ("Time per output token", "s", _quantiles("request_time_per_output_token_seconds")),
            ("Between two outputs", "s", _quantiles("inter_token_latency_seconds")),
            ("Latency", "s", _quantiles("e2e_request_latency_seconds")),
            ("Time in the queue", "s", _quantiles("request_queue_time_seconds")),
            (
                "Ends and refusals", "ops",
                [(_rate("request_success", "finished_reason"), "{{finished_reason}}"),
                 (_rate("refusals", "reason, deployment"), "refused {{reason}} ({{deployment}})")],
            ),
            ("Prompt tokens of a request", "short", _quantiles("request_prompt_tokens")),
            ("Tokens of an answer", "short", _quantiles("request_generation_tokens")),
        ),
    ),
    (
        "Replicas",
        (
            ("Sessions by state", "short", [(_sum("sessions", "state"), "{{state}}")]),
            (
                "Requests by model", "short",
                [(_sum("num_requests_running", "model_name"), "running {{model_name}}"),
                 (_sum("num_requests_waiting", "model_name"), "waiting {{model_name}}")],
            ),
            (
                "KV memory in use", "percentunit",
                [(f"ray_paceline_kv_cache_usage_perc{_SELECT}", "{{replica}}"),
                 (f"ray_paceline_prefix_cache_usage_perc{_SELECT}", "prefixes {{replica}}")],
            ),
            (
                "Prefix cache: share of prompt tokens found", "percentunit",
                [(_ratio("prefix_cache_hits", "prefix_cache_queries"), "found")],
            ),
            (
                "Prefix cache: evicted tokens; preemptions", "ops",
                [(_rate("prefix_cache_evictions"), "tokens"),
                 (_rate("num_preemptions"), "preemptions")],
            ),
            ("Time of a step", "s", _quantiles("step_seconds")),
            (
                "Gateway and drafters", "short",
                [(_sum("gateway_sessions", "replica"), "sessions at {{replica}}"),
                 (_sum("gateway_calls", "replica"), "calls from {{replica}}"),
                 (_sum("drafter_sessions", "replica"), "drafting at {{replica}}")],
            ),
        ),
    ),
    (
        "Tenants",
        (
            ("Open sessions", "short", [(_sum("tenant_sessions", "tenant"), "{{tenant}}")]),
            ("Opens", "ops", [(_rate("tenant_opens", "tenant"), "{{tenant}}")]),
            ("Tokens a second", "short", [(_rate("tenant_tokens", "tenant"), "{{tenant}}")]),
        ),
    ),
    (
        "Online training",
        (
            (
                "Acceptance by version of the draft model's weights", "percentunit",
                [(f"ray_paceline_online_acceptance{_SELECT}", "{{weights}}")],
            ),
            (
                "Updates", "ops",
                [(_rate("online_updates"), "updates"),
                 (_rate("online_positions_dropped"), "dropped positions")],
            ),
            (
                "Learner", "short",
                [(f"ray_paceline_online_positions_buffered{_SELECT}", "kept positions"),
                 (f"ray_paceline_online_weights_version{_SELECT}", "version of the weights")],
            ),
        ),
    ),
)  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        panels.append({
            "id": len(panels) + 1, "type": "row", "title": title, "collapsed": False,
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": [],
        })  # fmt: skip
        y += 1
        for i, (name, unit, expressions) in enumerate(row):
            targets = [
                {"refId": "ABCDEF"[j], "expr": e, "legendFormat": legend, "datasource": _SOURCE}
                for j, (e, legend) in enumerate(expressions)
            ]
            panels.append({
                "id": len(panels) + 1, "type": "timeseries", "title": name,
                "datasource": _SOURCE, "targets": targets,
                "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
                "gridPos": {"x": 8 * (i % 3), "y": y + 8 * (i // 3), "w": 8, "h": 8},
            })  # fmt: skip
        y += 8 * -(-len(row) // 3)
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "application", "type": "query", "datasource": _SOURCE, "includeAll": True,
            "allValue": ".*", "multi": True, "refresh": 2,
            "query": "label_values(ray_paceline_sessions, application)",
        },
    ]  # fmt: skip
    return {
        "uid": "paceline", "title": "Paceline", "tags": ["paceline"], "schemaVersion": 39,
        "refresh": "5s", "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": variables}, "panels": panels,
    }  # fmt: skip


def series_of(expression: str) -> set[str]:
    """Names of the metrics that an expression reads."""
    return set(re.findall(r"\bray_\w+", expression))


def text() -> str:
    """The content of deployments/observability/paceline.json."""
    return json.dumps(dashboard(), indent=1) + "\n"


def write_observability(folder: Path, scrape: Sequence[str]) -> dict[str, str]:
    """Write the config files for your own Prometheus and Grafana.

    Args:
        scrape: HOST:PORT of each node's metrics.

    Returns:
        The paths of the files, by their purpose.
    """
    folder.mkdir(parents=True, exist_ok=True)
    prometheus = {
        "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
        "scrape_configs": [{"job_name": "paceline", "static_configs": [{"targets": [*scrape]}]}],
    }
    source = {
        "apiVersion": 1,
        "datasources": [{
            "name": "Prometheus", "type": "prometheus", "access": "proxy", "isDefault": True,
            "url": "http://127.0.0.1:9090",
        }],
    }  # fmt: skip
    provider = {
        "apiVersion": 1,
        "providers": [
            {"name": "paceline", "options": {"path": str(folder / "dashboards")}},
        ],
    }
    files = {
        "prometheus": (folder / "prometheus.yml", yaml.safe_dump(prometheus, sort_keys=False)),
        "dashboard": (folder / "dashboards" / "paceline.json", text()),
        "datasource": (
            folder / "provisioning" / "datasources" / "prometheus.yml",
            yaml.safe_dump(source, sort_keys=False),
        ),
        "provider": (
            folder / "provisioning" / "dashboards" / "paceline.yml",
            yaml.safe_dump(provider, sort_keys=False),
        ),
    }
    for path, content in files.values():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    return {name: str(path) for name, (path, _) in files.items()}


def main() -> None:
    """Write the dashboard, or check it."""
    if "--check" in sys.argv[1:]:
        if not DASHBOARD.is_file() or DASHBOARD.read_text(encoding="utf-8") != text():
            sys.exit(f"{DASHBOARD} is stale: run `python -m paceline.deployments.dashboard`")
        return
    DASHBOARD.parent.mkdir(exist_ok=True)
    DASHBOARD.write_text(text(), encoding="utf-8")


if __name__ == "__main__":
    main()
