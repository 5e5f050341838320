"""The image's recipe: checked by hadolint, and against the tree. Nothing is built here."""

from __future__ import annotations

import importlib.util
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
    for target, needed in {
        "cpu": {"serve", "tune", "train", "tracing"},
        "cuda": {"serve", "tune", "train", "tracing"},
        "vllm": {"serve", "tracing", "vllm"},
    }.items():
        extras = re.search(r"\[([\w,]+)\]\"", stage(f"{target}-packages"))
        assert extras is not None
        assert set(extras[1].split(",")) == needed <= set(project["optional-dependencies"])
        assert stage(target).rstrip().endswith("USER 1000:1000")
        assert f"COPY --from={target}-packages /opt/venv /opt/venv" in stage(target)
    for package in ("paceline", "rpc", "deployments", "cluster", "tuning"):
        assert f"COPY {package}/ {package}/" in stage("wheel")


def stage(name: str) -> str:
    """The instructions of a stage, without comments."""
    (found,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", DOCKERFILE, re.M | re.S)
    return re.sub(r"^#.*\n", "", found, flags=re.MULTILINE)


def test_kernels_are_compiled_where_the_wheel_is_made_and_nowhere_else() -> None:
    wheel = stage("wheel")
    assert re.search(r"install .*\bgcc libc6-dev\b", wheel)
    assert wheel.index("gcc libc6-dev") < wheel.index("pip wheel")
    for name in ("base", "runtime", "cpu", "cpu-packages", "cuda", "cuda-packages"):
        assert "gcc" not in stage(name)
    assert "libgomp1" in stage("runtime")


def test_both_ends_have_the_same_python() -> None:
    """The environment's Python is a link to the base's."""
    froms = re.findall(r"^FROM (\S+) AS (\S+)$", DOCKERFILE, re.MULTILINE)
    assert [name for base, name in froms if base == "${BASE}"] == ["base", "runtime"]
    assert froms[-1][1] == "cpu"  # what a build without --target makes


def test_what_torch_wrote_for_newer_pythons_is_not_compiled(tmp_path: Path) -> None:
    """The build's own command, on torch's files that this Python cannot compile."""
    pattern = re.search(r"compileall -q -x '(.+)' /opt/venv/lib", DOCKERFILE)
    assert pattern is not None
    torch = Path(importlib.util.find_spec("torch").origin).parent  # type: ignore[union-attr,arg-type]
    place = tmp_path / "torch" / "testing" / "_internal"
    place.mkdir(parents=True)
    (place / "py312_intrinsics.py").write_text("def f[T](a: T): ...\n")
    for file in (torch / "testing" / "_internal").glob("py3*.py"):
        (place / file.name).write_bytes(file.read_bytes())
    (place / "common.py").write_text("a = 1\n")
    command = [sys.executable, "-m", "compileall", "-q", "-x", pattern[1], tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert [p.name.partition(".")[0] for p in place.rglob("*.pyc")] == ["common"]
    (place / "other.py").write_text("def\n")
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_recipes_install_as_root_and_run_as_a_user() -> None:
    """The environment in the image is root's, and its last USER is another one."""
    recipes = [
        recipe
        for page in (ROOT / "docs").glob("*.md")
        for recipe in re.findall(r"```dockerfile\n(.+?)```", page.read_text(), re.DOTALL)
    ]
    assert recipes
    for recipe in recipes:
        words = [line.split(maxsplit=1) for line in recipe.strip().splitlines()]
        verbs = [verb for verb, _ in words]
        assert verbs == ["FROM", "USER", "RUN", "USER"]
        assert [rest for verb, rest in words if verb == "USER"] == ["root", "1000:1000"]
    for page in (ROOT / "docs").glob("*.md"):
        assert "RUN pip" not in re.sub(r"```dockerfile.+?```", "", page.read_text(), flags=re.S)
