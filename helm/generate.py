"""``python helm/generate.py`` writes the generated files for Kubernetes; ``--check`` tells which
are stale.

- ``helm/paceline/values.schema.json``: helm/schema.yaml, with the blocks of a Serve config file
  from deployments/config.py and the descriptions of values.yaml.
- ``helm/paceline/README.md``: a table of the values.
- ``helm/paceline/files/dashboard.json``: the dashboard of deployments/observability.
- ``k8s/*.yaml``: the rendered chart, for clusters without Helm.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":  # as a script, its own folder would come first on the path
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import yaml

from paceline.deployments.config import DeploymentConfig, hosted_methods
from paceline.methods import DIFFUSION_METHODS, METHODS, VLLM_METHODS

HERE = Path(__file__).parent
CHART = HERE / "paceline"
MANIFESTS = HERE.parent / "k8s"

# Fields that the chart decides: folders of models, hosts of ports, and what follows from a pod.
DECIDED = {
    "": {"data_plane", "data_plane_tls", "data_plane_insecure"},
    "model": {"target", "drafter", "heads"},
    "target": {"num_cpus", "num_gpus", "resources"},
    "drafter": {"num_cpus", "num_gpus", "resources"},
    "gateway": {
        "num_cpus",
        "resources",
        "host",
        "tls",
        "insecure",
        "tenants",
        "session_keys",
        "audit_log",
    },
    "direct": {"host"},
    "tracing": {"folder"},
}

VALUE_SETS: dict[str, dict[str, Any]] = {
    "paceline.yaml": {
        "tls": {
            "mode": "secret",
            "secret": {"gateway": "paceline-gateway-tls", "replicas": "paceline-replica-tls"},
        },
    },
    "sweep.yaml": {"sweep": {"enabled": True, "claimName": "paceline-results"}},
}
"""The values of each file under k8s/, which holds no certificates: README.md makes some."""


# --- values.schema.json ---------------------------------------------------------------------------


def schema() -> dict[str, Any]:
    """The JSON schema of the chart's values."""
    loaded = yaml.safe_load((HERE / "schema.yaml").read_text())
    # A copy of each anchor where it is used, so that each gets its own description.
    result: dict[str, Any] = json.loads(json.dumps(loaded))
    del result["$defs"]  # it only holds anchors
    config = _inlined(DeploymentConfig.model_json_schema(mode="validation"))
    _narrow(config["properties"])
    blocks: dict[str, Any] = copy.deepcopy(config["properties"])
    for name in DECIDED[""]:
        del blocks[name]
    for block, names in DECIDED.items():
        for name in names if block else ():
            del blocks[block]["properties"][name]
    result["properties"] |= blocks
    result["properties"]["applications"] = _applications(config)
    _close(result)
    for value in values():
        _describe(result, value)
    return {"$schema": "http://json-schema.org/draft-07/schema#", "title": "Values", **result}


def _narrow(blocks: dict[str, Any]) -> None:
    """Say in the schema what otherwise only Paceline knows, when a pod has already started."""
    listed = {**METHODS, **VLLM_METHODS, **DIFFUSION_METHODS}
    blocks["speculation"]["properties"]["method"]["enum"] = list(listed)
    blocks["drafter"]["properties"]["method"] = {"enum": [*hosted_methods(), None]}
    device = {"type": "string", "pattern": "^(auto|cpu|cuda(:[0-9]+)?)$"}
    blocks["model"]["properties"]["device"] = device
    blocks["model"]["properties"]["drafter_device"] = {**device, "type": ["string", "null"]}
    gateway = blocks["gateway"]["properties"]
    gateway["grpc_port"]["minimum"] = 1  # a Service needs to know it
    blocks["direct"]["properties"]["port"]["minimum"] = 1  # and a network policy
    gateway["http_port"]["anyOf"][0]["minimum"] = 1


def _applications(config: dict[str, Any]) -> dict[str, Any]:
    """The schema of `applications`, as a sweep writes it for `paceline up --config`."""
    return {
        "type": "array",
        "maxItems": 1,
        "items": {
            "type": "object",
            "required": ["import_path", "args"],
            "properties": {
                "name": {"type": "string"},
                "import_path": {"const": "paceline.deployments.app:build"},
                "route_prefix": {"type": ["string", "null"]},
                "args": {"type": "object", "properties": config["properties"]},
            },
        },
    }


def _inlined(node: Any, definitions: dict[str, Any] | None = None) -> Any:
    """A schema without references, titles and defaults, in which tuples are arrays."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    definitions = node.get("$defs", {}) if definitions is None else definitions
    if "$ref" in node:
        found = _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return {**found, **{k: v for k, v in node.items() if k == "description"}}
    dropped = {"$defs", "default"} | ({"title"} if isinstance(node.get("title"), str) else set())
    return {k: _inlined(v, definitions) for k, v in node.items() if k not in dropped}


def _close(node: Any) -> None:
    """Forbid further keys in objects with known keys."""
    if isinstance(node, dict):
        if "properties" in node:
            node.setdefault("additionalProperties", False)
        for part in node.values():
            _close(part)
    elif isinstance(node, list):
        for part in node:
            _close(part)


def _describe(root: dict[str, Any], value: Value) -> None:
    node = root
    for name in value.path:
        node = node["properties"][name]
    node["description"] = value.text


# --- README.md ------------------------------------------------------------------------------------


class Value(NamedTuple):
    """A value of values.yaml with the comment before it."""

    path: tuple[str, ...]
    default: Any
    text: str


def values() -> Iterator[Value]:
    """All values with a comment ``# --``, in the order of the file.

    Raises:
        ValueError: neither a value nor a block around it has such a comment.
    """
    lines = (CHART / "values.yaml").read_text().splitlines()
    defaults = yaml.safe_load("\n".join(lines))
    path: list[tuple[int, str]] = []
    comment: list[str] = []
    covered: tuple[str, ...] | None = None  # a block whose comment covers all of it
    for number, line in enumerate(lines, 1):
        text = line.strip()
        if text.startswith("# -- ") or (comment and text.startswith("# ")):
            comment.append(text.removeprefix("# -- ").removeprefix("# "))
            continue
        key = re.match(r"( *)([\w-]+):(.*)", line)
        if key is None:
            comment = []
            continue
        indent = len(key[1])
        path = [part for part in path if part[0] < indent] + [(indent, key[2])]
        names = tuple(name for _, name in path)
        if covered is not None and names[: len(covered)] != covered:
            covered = None
        if comment:
            yield Value(names, _at(defaults, names), " ".join(comment))
            if not key[3].strip() and not _documents_inside(lines[number:], indent):
                covered = names
        elif covered is None and key[3].strip():
            raise ValueError(f"values.yaml:{number}: {'.'.join(names)} has no comment `# --`")
        comment = []


def _documents_inside(lines: list[str], indent: int) -> bool:
    for line in lines:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            return False
        if line.strip().startswith("# -- "):
            return True
    return False


def _at(node: Any, names: tuple[str, ...]) -> Any:
    for name in names:
        node = node[name]
    return node


_README = """\
# The Helm chart

{description}

```console
$ helm install paceline helm/paceline --dependency-update --set kuberay-operator.enabled=true
```

starts the demo pair on a cluster: Ray's head, a target, a drafter and a gateway, with TLS on every
port and Ray's token authentication. [docs/kubernetes.md](../../docs/kubernetes.md) explains it and
shows other installations. Helm refuses wrong and unknown values (`values.schema.json`).

`python helm/generate.py` writes this file from the comments in `values.yaml`.

| chart | app | Kubernetes | Ray | KubeRay operator |
|---|---|---|---|---|
| {version} | {app} | {kubernetes} | {ray} | {operator} |

## Values

| key | default | |
|---|---|---|
{rows}
"""


def readme() -> str:
    """The chart's README."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    known = list(values())
    rows = []
    for value in known:
        if isinstance(value.default, dict) and any(
            other.path[:-1] == value.path for other in known
        ):  # its parts have their own rows
            rows.append(f"| **`{'.'.join(value.path)}`** | | {_cell(value.text)} |")
            continue
        default = json.dumps(value.default)
        rows.append(f"| `{'.'.join(value.path)}` | `{_cell(default)}` | {_cell(value.text)} |")
    return _README.format(
        description=chart["description"],
        version=chart["version"],
        app=chart["appVersion"],
        kubernetes=chart["kubeVersion"].removesuffix("-0"),
        ray=yaml.safe_load((CHART / "values.yaml").read_text())["ray"]["version"],
        operator=chart["dependencies"][0]["version"],
        rows="\n".join(rows),
    )


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


# --- k8s/ -----------------------------------------------------------------------------------------


def manifests() -> dict[str, str]:
    """The files of k8s/ by name."""
    from helm_python.chart import Chart

    files = {}
    with Chart.load(CHART) as chart:
        for name, changes in VALUE_SETS.items():
            rendered = chart.render(
                {"kuberay-operator": {"enabled": False}, **changes},
                name="paceline",
                namespace="default",
            )
            objects = []
            for path, text in sorted(rendered.items()):
                if path.endswith(".txt") or "/tests/" in path:
                    continue
                for document in re.split(r"^---$", text, flags=re.MULTILINE):
                    kind = (yaml.safe_load(document) or {}).get("kind")
                    # paceline.yaml beside it has the other objects.
                    if kind and (name != "sweep.yaml" or kind == "RayJob"):
                        objects.append(_plain(document).strip())
            header = f"# Written by `python helm/generate.py` from helm/paceline: {name}.\n"
            files[name] = header + "---\n" + "\n---\n".join(objects) + "\n"
    return files


def _plain(document: str) -> str:
    """A document without the labels by which Helm manages objects."""
    managed = r"^ *(helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n"
    return re.sub(managed, "", document, flags=re.MULTILINE)


# --- the command ----------------------------------------------------------------------------------


def outputs() -> dict[Path, str]:
    """Every generated file with its text."""
    root = HERE.parent
    files = {
        CHART / "values.schema.json": json.dumps(schema(), indent=1, ensure_ascii=False) + "\n",
        CHART / "README.md": readme(),
        CHART / "files" / "dashboard.json": (
            root / "deployments" / "observability" / "paceline.json"
        ).read_text(),
    }
    return files


def main() -> None:
    check = sys.argv[1:] == ["--check"]
    stale = []
    # Rendering reads the schema and the other files, so write these first.
    for group in (outputs, lambda: {MANIFESTS / n: t for n, t in manifests().items()}):
        for path, text in group().items():
            if path.exists() and path.read_text() == text:
                continue
            stale.append(path)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    names = ", ".join(str(path.relative_to(HERE.parent)) for path in stale)
    if check and stale:
        sys.exit(f"stale: {names}; run `python helm/generate.py`")
    if stale:
        print(f"written: {names}")


if __name__ == "__main__":
    main()
