"""lm-eval's multiple choice through the HTTP API: its scores are those of the target's logits.

It runs `lm_eval` of an environment of its own (`pip install lm-eval transformers`), found on the
path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.engine import EngineThread
from paceline.loading import load_engine
from paceline.rpc.generate_service import ModelInfo
from paceline.sampling import token_logprobs
from tests.core.test_token_limits import rows_of
from tests.deployments.http_serving import http_serving

LM_EVAL = shutil.which("lm_eval")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(LM_EVAL is None, reason="no lm_eval on the path"),
]
TASK = """\
task: choices
dataset_path: json
dataset_kwargs: {data_files: FILE}
test_split: train
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
QUESTIONS = (
    ("The capital of France is", [" Paris", " a banana", " seven of them"]),
    ("def add(a, b):\n    return", [" a + b", " the sky", " import"]),
    ("import numpy as", [" np", " banana", " xyz"]),
)


@pytest.fixture(scope="module")
def target() -> Iterator[EngineThread]:
    thread = EngineThread(load_engine()).start()
    yield thread
    thread.stop()


def test_multiple_choice(target: EngineThread, tmp_path: Path) -> None:
    lines = [json.dumps({"question": q, "choices": c, "answer": 0}) for q, c in QUESTIONS]
    (tmp_path / "choices.jsonl").write_text("\n".join(lines))
    task = TASK.replace("FILE", str(tmp_path / "choices.jsonl"))
    (tmp_path / "choices.yaml").write_text(task)
    model = ModelInfo(name="demo", default_speculation=SpeculationConfig())
    with http_serving(target, model) as url:
        subprocess.run(
            [
                str(LM_EVAL), "run", "--model", "local-completions", "--tasks", "choices",
                "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"),
                "--log_samples", "--batch_size", "3", "--model_args",
                f"model=demo,base_url={url}/v1/completions,tokenizer={TARGET_DIR}",
            ],
            check=True, timeout=240, env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
    tokenizer, compared = target.engine.tokenizer, 0
    assert tokenizer is not None
    for file in tmp_path.glob("out/**/samples*.jsonl"):
        for sample in map(json.loads, file.read_text().splitlines()):
            asked = [(each["arg_0"], each["arg_1"]) for each in sample["arguments"].values()]
            for (context, choice), answer in zip(asked, sample["filtered_resps"], strict=True):
                ids, begin = tokenizer.encode(context + choice), len(tokenizer.encode(context))
                rows = rows_of(target.engine, ids)
                expected = [
                    token_logprobs(rows[i - 1], ids[i], 0).logprob for i in range(begin, len(ids))
                ]
                assert float(answer[0]) == sum(expected)
                compared += 1
    assert compared == 9
