"""LangChain and LiteLLM as clients of the HTTP API, in an environment that the test makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.chat import chat_template
from paceline.config import SpeculationConfig
from paceline.engine import EngineThread
from paceline.errors import ModelNotFound
from paceline.loading import load_engine
from paceline.model_names import resolve_model
from paceline.rpc.generate_service import ModelInfo
from tests.deployments.http_serving import http_serving

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
SCRIPT = Path(__file__).with_name("foreign_clients.py")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter with both packages; PACELINE_CLIENTS_PYTHON names one that is there."""
    given = os.environ.get("PACELINE_CLIENTS_PYTHON")
    if given:
        return given
    folder = tmp_path_factory.mktemp("clients")
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    packages = ("langchain-openai", "litellm")
    pip = [str(folder / "bin" / "pip"), "install", "--quiet", *packages]
    if subprocess.run(pip, check=False).returncode:
        pytest.skip(f"cannot install {', '.join(packages)} (it needs a package index)")
    return str(folder / "bin" / "python")


@pytest.fixture(scope="module")
def answers(python: str) -> Iterator[dict[str, Any]]:
    try:
        folder = resolve_model("smollm2")
    except ModelNotFound as error:
        pytest.skip(str(error))
    thread = EngineThread(load_engine("smollm2", dtype="auto")).start()
    info = ModelInfo(
        name="smollm2",
        default_speculation=SpeculationConfig(method="auto"),
        chat_template=chat_template(folder),
    )
    clean = {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/")}
    try:
        with http_serving(thread, info) as url:
            command = [python, str(SCRIPT), f"{url}/v1", "smollm2"]
            done = subprocess.run(command, capture_output=True, text=True, env=clean, check=False)
            assert done.returncode == 0, done.stderr
            yield json.loads(done.stdout.strip().splitlines()[-1])
    finally:
        thread.stop()


def test_langchain(answers: dict[str, Any]) -> None:
    found = answers["langchain"]
    assert "Berlin" in found["whole"]
    assert "".join(found["pieces"]) == found["whole"]
    assert len(found["pieces"]) > 2
    assert found["usage"] > 4
    assert found["call"] == found["streamed_call"] == ["get_weather", ["city", "unit"]]
    assert found["after_the_tool"]
    assert found["structured"] == ["city"]
    assert "Berlin" in found["completion"]


def test_litellm(answers: dict[str, Any]) -> None:
    found = answers["litellm"]
    assert found["whole"] == answers["langchain"]["whole"] == found["with_a_method"]
    assert "".join(found["pieces"]) == found["whole"]
    assert "temperature" in found["refused"]
    assert "1000" in found["refused"]
