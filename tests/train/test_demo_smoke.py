"""The training of the demo pair, at toy size: every stage, and what a kill may not change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from paceline.train import corpus, demo, pretrain

MODELS = ("target", "drafter")


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_EAGER", "1")


def test_an_interrupted_training_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = np.random.default_rng(0).integers(0, 512, 20_000).astype(np.uint16)
    config = replace(demo.smoke_configs()[0], max_steps=8)
    straight = pretrain.pretrain(config, stream, tmp_path / "straight.pt")

    batch_of = pretrain.token_batch

    def power_cut(stream, step, batch, length, seed):  # type: ignore[no-untyped-def]
        if step == 5:
            raise KeyboardInterrupt
        return batch_of(stream, step, batch, length, seed)

    with monkeypatch.context() as patch:
        patch.setattr(pretrain, "token_batch", power_cut)
        with pytest.raises(KeyboardInterrupt):
            pretrain.pretrain(config, stream, tmp_path / "cut.pt")
    resumed = pretrain.pretrain(config, stream, tmp_path / "cut.pt")

    assert (resumed.steps, resumed.tokens) == (straight.steps, straight.tokens)
    for name, weight in straight.model.state_dict().items():
        assert torch.equal(weight, resumed.model.state_dict()[name]), name


@pytest.mark.nightly
def test_the_pipeline_survives_a_kill(tmp_path: Path) -> None:
    (tmp_path / "extra.jsonl").write_text(
        "".join(json.dumps({"text": f"record {i} " * 40}) + "\n" for i in range(40))
    )
    work, out = tmp_path / "work", tmp_path / "out"
    command = [
        sys.executable, "-m", "paceline.train.demo", "--smoke", "--threads", "1", "--out", str(out),
        "--work-dir", str(work), "--extra-corpus", str(tmp_path / "extra.jsonl"),
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (work / "target.pt").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    first.kill()
    first.wait()
    stopped_at = torch.load(work / "target.pt", weights_only=True)["step"]

    second = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert f"target: resumed at step {stopped_at}," in second.stdout
    max_steps = demo.smoke_configs()[0].max_steps
    assert torch.load(work / "target.pt", weights_only=True)["step"] == max_steps

    for name in MODELS:
        model = AutoModelForCausalLM.from_pretrained(out / name)
        assert model.dtype == torch.bfloat16
        tokenizer = AutoTokenizer.from_pretrained(out / name)
        text = "def f(x):\n\tif x:\n        return 'héllo 🙂'  \r\n\n"
        assert tokenizer.decode(tokenizer.encode(text)) == text
    card = (out / "MODEL_CARD.md").read_text(encoding="utf-8")
    assert "extra: loss" in card
    assert str(tmp_path) not in card

    # The drafter learns on: the target and the card's row of the earlier training stay.
    weights = {name: (out / name / "model.safetensors").read_bytes() for name in MODELS}
    command[command.index(str(work))] = str(tmp_path / "on")
    subprocess.run([*command, "--drafter-only"], env=environment, capture_output=True, check=True)
    assert (out / "target" / "model.safetensors").read_bytes() == weights["target"]
    assert (out / "drafter" / "model.safetensors").read_bytes() != weights["drafter"]
    rows = [row for row in card.splitlines() if row.startswith(("| target", "| drafter"))]
    longer = (out / "MODEL_CARD.md").read_text(encoding="utf-8").splitlines()
    first = longer.index(rows[0])
    assert longer[first : first + 2] == rows
    assert longer[first + 2].startswith("| drafter |")


def test_a_work_dir_of_another_corpus_is_refused(tmp_path: Path) -> None:
    demo.prepare(tmp_path, [], 300, max_documents=3)
    with pytest.raises(ValueError, match="another corpus"):
        demo.prepare(tmp_path, [], 300, max_documents=4)


def test_held_out_modules_are_never_trained_on() -> None:
    training, held_out = corpus.split()
    names = {name for name, _ in corpus.held_out_modules()}
    assert names == {d.name for d in held_out}
    assert not names & {d.name for d in training}
    assert 0.05 < len(names) / (len(names) + len(training)) < 0.15
    assert not any("test" in name.split("/")[:-1] for name in names)


def test_extra_corpus_names_the_bad_record(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"prompt": "?"}\n')
    with pytest.raises(ValueError, match=r"bad.jsonl:2: .*\['prompt'\]"):
        corpus.read_extra(path)
