"""What a release consists of, made without a network: `make release` runs it after the wheels.

`--check` only compares the versions: pyproject.toml has the version, and everything else follows.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from pathlib import Path

import yaml
from packaging.version import Version

ROOT = Path(__file__).parents[1]


def project_version() -> str:
    """The version in pyproject.toml."""
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def wrong_versions(version: str) -> list[str]:
    """Places with another version. Charts and images have the release's, without .dev0 or rc1."""
    release = Version(version).base_version
    chart = yaml.safe_load((ROOT / "helm/paceline/Chart.yaml").read_text())
    package = (ROOT / "paceline/__init__.py").read_text()
    found = {
        "paceline/__init__.py: __version__": (package, r'__version__ = "(.+)"', version),
        "Dockerfile: paceline:": ((ROOT / "Dockerfile").read_text(), r"paceline:([\d.]+)", release),
        "helm/paceline/Chart.yaml: version": (f"v{chart['version']}", "^v(.+)$", release),
        "helm/paceline/Chart.yaml: appVersion": (f"v{chart['appVersion']}", "^v(.+)$", release),
    }
    for file in sorted((ROOT / "k8s").glob("*.yaml")):
        label = r'app\.kubernetes\.io/version: "(.+)"'
        found[f"k8s/{file.name}: app.kubernetes.io/version"] = (file.read_text(), label, release)
    return [
        f"{place} {', '.join(sorted(others)) or 'missing'}: it has to be {wanted}"
        for place, (text, pattern, wanted) in found.items()
        if (others := set(re.findall(pattern, text))) != {wanted}
    ]


def bill_of_materials(version: str) -> dict[str, object]:
    """A CycloneDX document of the tested set of packages, which images install."""
    pins = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": "paceline", "version": version}},
        "components": [
            {"type": "library", "name": name, "version": pin, "purl": f"pkg:pypi/{name}@{pin}"}
            for name, pin in pins
        ],
    }


def package(out: Path, version: str) -> None:
    """Write the chart's archive, the bill of materials and the checksums of everything."""
    from helm_python.chart import Chart

    with Chart.load(ROOT / "helm" / "paceline") as chart:
        chart.save(out)
    bom = json.dumps(bill_of_materials(version), indent=1) + "\n"
    (out / f"paceline-{version}.cdx.json").write_text(bom)
    files = sorted(file for file in out.iterdir() if file.is_file() and file.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    (out / "SHA256SUMS").write_text("".join(sums))


def main() -> None:
    """Check the versions; without --check, also package what is not a wheel."""
    version = project_version()
    if wrong := wrong_versions(version):
        sys.exit("\n".join(wrong))
    if "--check" not in sys.argv[1:]:
        package(ROOT / "dist", version)


if __name__ == "__main__":
    main()
