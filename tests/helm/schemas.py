"""Objects against the schemas of Kubernetes and of custom resource definitions."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml
from kubernetes_validate import utils as _validate

# LibYAML reads KubeRay's definitions, 3 MB, and what the chart renders in a tenth of the time.
Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# The package reads the definitions of a version, a megabyte of JSON, for each object anew.
for _name in ("schema_contents", "all_versions", "major_minor"):
    setattr(_validate, _name, cache(getattr(_validate, _name)))
VERSIONS = ("1.31", "1.34", "1.37")
_BUILT_IN = {"v1", "apps/v1", "batch/v1", "networking.k8s.io/v1", "policy/v1"}


def crd_folder() -> Path | None:
    """Where definitions of custom resources lie: KUBERAY_CRDS, else beside the project."""
    named = os.environ.get("KUBERAY_CRDS")
    folder = Path(named) if named else Path(__file__).parents[3] / "shared" / "crds"
    return folder if folder.is_dir() else None


@cache
def custom_schemas() -> dict[tuple[str, str], dict[str, Any]]:
    """Schemas of the folder's definitions by apiVersion and kind. Unknown fields are errors."""
    folder = crd_folder()
    found = {}
    for file in sorted(folder.glob("*.yaml")) if folder else ():
        for document in yaml.load_all(file.read_text(), Loader=Loader):
            if not document or document.get("kind") != "CustomResourceDefinition":
                continue
            spec = document["spec"]
            for version in spec["versions"]:
                key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                found[key] = _closed(version["schema"]["openAPIV3Schema"])
    return found


def _closed(node: Any, inside_properties: bool = False) -> Any:
    """A structural schema as JSON schema, in which fields that the server would drop are errors."""
    if isinstance(node, list):
        return [_closed(item) for item in node]
    if not isinstance(node, dict):
        return node
    result = {k: _closed(v, k == "properties") for k, v in node.items()}
    if inside_properties:
        return result
    if "properties" in node and not node.get("x-kubernetes-preserve-unknown-fields"):
        if node["properties"].keys() >= {"apiVersion", "kind", "metadata", "spec"}:
            result["properties"]["metadata"] = {"type": "object"}
        result.setdefault("additionalProperties", False)
    elif node.get("type") == "object" and set(node) <= {"type", "description"}:
        pass  # metadata: anything
    if node.get("x-kubernetes-int-or-string"):
        result.pop("type", None)
    return result


def problems(thing: dict[str, Any]) -> list[str]:
    """What is wrong with an object in any version. Of kinds without a definition here, nothing."""
    key = (thing["apiVersion"], thing["kind"])
    if key[0] in _BUILT_IN:
        found = []
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(thing, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                path = ".".join(str(part) for part in error.path)
                found.append(f"Kubernetes {version}: {path}: {error.message}")
        return found
    schema = custom_schemas().get(key)
    if schema is None:
        return []
    errors = jsonschema.Draft7Validator(schema).iter_errors(thing)
    return [f"{'.'.join(str(part) for part in e.absolute_path)}: {e.message}" for e in errors]
