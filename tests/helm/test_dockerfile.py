"""The image's recipe: checked by hadolint, and against the tree. Nothing is built here."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_hadolint_finds_nothing() -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_is_copied_is_there() -> None:
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, re.MULTILINE)
        for source in line.split()
    ]
    kept = {
        line[1:].rstrip("/")
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    assert {source.rstrip("/") for source in sources} == kept
    assert all((ROOT / source).exists() for source in sources)


def test_the_image_has_what_pods_need() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.search(r'"\.\[([\w,]+)\]"', DOCKERFILE)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])
    assert {"serve", "tune"} <= set(extras[1].split(","))
    assert DOCKERFILE.rindex("USER 1000:1000") > DOCKERFILE.rindex("FROM")
    for package in ("paceline", "rpc", "deployments", "cluster", "tuning"):
        assert f"COPY {package}/ {package}/" in DOCKERFILE


def test_kernels_are_compiled_where_the_wheel_is_made_and_nowhere_else() -> None:
    build, final = DOCKERFILE.split("FROM torch-${DEVICE} AS build")[1].rsplit("\nFROM ", 1)
    assert re.search(r"install .*\bgcc libc6-dev\b", build)
    assert build.index("gcc libc6-dev") < build.index("pip install")
    assert "gcc" not in final
    assert "libgomp1" in final
