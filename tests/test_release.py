"""What publishes the project: its workflows, its templates, and one version everywhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
HOSTED = {"sudo", "echo", "lscpu", "helm", "gh", "buildah", "apt-get"}
"""Programs that hosted machines have."""


def load_release() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = load_release()


def steps(workflow: Path) -> list[dict[str, Any]]:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_command_of_a_workflow_exists(workflow: Path) -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for step in steps(workflow):
        for command in re.split(r"&&|\|(?!\|)|\n", step.get("run", "")):
            words = command.split()
            if not words:
                continue
            if words[0] == "make":
                assert words[1] in targets, command
            elif "/" in words[0]:
                assert os.access(ROOT / words[0], os.X_OK), command
            else:
                assert words[0] in HOSTED, command
            # What others may name, such as a tag, reaches a shell as a variable only.
            assert "${{" not in command


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_jobs_may_do_little(workflow: Path) -> None:
    parsed = yaml.safe_load(workflow.read_text())
    assert {"name", "jobs", "permissions", True} <= set(parsed)  # YAML reads `on` as true
    assert parsed["permissions"] == {"contents": "read"}
    for name, job in parsed["jobs"].items():
        assert job["timeout-minutes"] <= 90
        needs = job.get("needs", [])
        assert set([needs] if isinstance(needs, str) else needs) <= parsed["jobs"].keys() - {name}
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            if "uses" in step:
                assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step["uses"]), step["uses"]


def test_scripts_are_bash() -> None:
    for name in ("run", "image", "kind"):
        subprocess.run(["bash", "-n", ROOT / ".ci" / name], check=True)


def test_images_are_those_of_the_dockerfile() -> None:
    (images,) = (
        job
        for workflow in WORKFLOWS
        for name, job in yaml.safe_load(workflow.read_text())["jobs"].items()
        if name == "images"
    )
    stages = set(re.findall(r"^FROM runtime AS (\w+)$", (ROOT / "Dockerfile").read_text(), re.M))
    assert set(images["strategy"]["matrix"]["target"]) == stages == {"cpu", "cuda", "vllm"}


def test_one_version_is_everywhere() -> None:
    assert release.wrong_versions(release.project_version()) == []
    wrong = release.wrong_versions("7.8.9rc1")
    assert len(wrong) == 4 + len(list((ROOT / "k8s").glob("*.yaml")))
    assert all(line.endswith(("7.8.9", "7.8.9rc1")) for line in wrong)


def test_a_release_has_chart_packages_and_checksums(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"wheel")
    release.package(tmp_path, "1.2.3")
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"a.whl", "paceline-0.1.0.tgz", "paceline-1.2.3.cdx.json", "SHA256SUMS"}
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True)
    assert len((tmp_path / "SHA256SUMS").read_text().splitlines()) == 3
    bom = yaml.safe_load((tmp_path / "paceline-1.2.3.cdx.json").read_text())
    assert any(part["purl"].startswith("pkg:pypi/torch@") for part in bom["components"])


def test_templates_are_forms() -> None:
    folder = ROOT / ".github" / "ISSUE_TEMPLATE"
    for file in set(folder.glob("*.yml")) - {folder / "config.yml"}:
        form = yaml.safe_load(file.read_text())
        assert {"name", "description", "body"} <= form.keys()
        assert len({part["id"] for part in form["body"]}) == len(form["body"])
    for name in ("SECURITY.md", "CODE_OF_CONDUCT.md", ".github/pull_request_template.md"):
        assert (ROOT / name).read_text().strip()
