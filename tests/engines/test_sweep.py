"""A sweep whose trials run on vLLM."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from paceline.deployments.config import read_config_file
from paceline.tuning.results import Results
from tests.engines.conftest import HAS_VLLM, WITHOUT

pytestmark = [
    pytest.mark.skipif(not HAS_VLLM, reason=WITHOUT),
    pytest.mark.serve,
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parents[2]


def test_from_a_space_to_a_file_that_names_vllm(tmp_path: Path) -> None:
    command = [
        sys.executable, str(ROOT / "tuning" / "sweep.py"), "--space", "vllm",
        "--result", str(tmp_path / "sweep"),
        "--set", "workload={limit: 1, categories: [code_completion, repeated_structure], "
        "max_tokens: 32}",
        "--set", "measurement.repetitions=2", "--set", "search.trials=3",
        "--set", "search.confirm=1", "--set", "space.method=[draft_model]",
        "--set", "space.num_speculative_tokens=[4, 8]", "--set", "space.length=[fixed]",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = Results(str(tmp_path / "sweep"))
    assert results.manifest().state == "finished"
    records = results.trials()
    assert len(records) == 3
    for record in records:
        assert record.metrics is not None, record.reason
        assert record.metrics.identical_to_ar is True
    best = read_config_file(tmp_path / "sweep" / "best.yaml").config
    assert best.engine == "vllm"
    assert best.vllm.enforce_eager
    assert best.speculation in {record.point.speculation for record in records}
