"""Tiny models and text for training, and a task without a model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.train import trainer
from paceline.train.data import TrainingText, load_text
from paceline.train.early_exit import ExitsTask
from paceline.train.trainer import Batch, TrainOptions, TrainResult, train
from paceline.types import IntArray
from tests.modelzoo import make_model

LENGTH = 32


@pytest.fixture(autouse=True)
def _no_picture(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than most trainings of this folder; who looks asks for ``picture``."""
    if "picture" not in request.fixturenames:
        monkeypatch.setattr(trainer, "plot", draw_nothing)


def draw_nothing(history: object, file: Path, title: str) -> None:
    pass


@pytest.fixture
def picture() -> None:
    """Trainings draw."""


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python-like text in which much can be predicted and something cannot."""
    verbs, nouns = ("get", "set", "find", "load", "drop"), ("path", "name", "user", "file")
    functions = [
        f"def {verbs[i % 5]}_{nouns[i % 7 % 4]}({nouns[i % 3]}):\n    return {i * 37 % 101}\n"
        for i in range(700)
    ]
    file = tmp_path_factory.mktemp("text") / "functions.txt"
    file.write_text("\n".join(functions))
    return file


@pytest.fixture(scope="session")
def random_target(zoo: Path) -> Path:
    """4 layers, 32 wide, every byte a token."""
    return make_model("llama_tied", zoo, num_hidden_layers=4, hidden_size=32, intermediate_size=64)


@pytest.fixture(scope="session")
def text(random_target: Path, text_file: Path) -> TrainingText:
    return load_text(random_target, [text_file], LENGTH, held_out_rows=16)


@pytest.fixture(scope="session")
def chat_target(random_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The random target with a chat template; ``;`` ends an answer."""
    folder = tmp_path_factory.mktemp("chat") / "target"
    folder.mkdir()
    for file in random_target.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}"
        "{% if m.role == 'assistant' %};{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<a>{% endif %}"
    )
    return folder


@pytest.fixture(scope="session")
def talks_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of two turns."""
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    talks = [
        [("human", f"f {i}"), ("gpt", f"return {i * 37 % 101}"), ("human", "why"), ("gpt", "so")]
        for i in range(300)
    ]
    records = [{"conversations": [{"from": w, "value": v} for w, v in talk]} for talk in talks]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return file


@pytest.fixture(scope="session")
def talks(
    chat_target: Path, talks_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> TrainingText:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return load_text(chat_target, [talks_file], LENGTH, held_out_rows=6)


@pytest.fixture(scope="session")
def target(
    random_target: Path, text: TrainingText, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The random target after some training on the text, without early exits."""
    out = tmp_path_factory.mktemp("target")
    task = ExitsTask(random_target, text, exit_scale=0.0, layer_dropout=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "plot", draw_nothing)
        train(task, TrainOptions(out=out, steps=150, learning_rate=5e-3, eval_every=150))
    return out


class Toy:
    """A linear model after another; its loss is noisy in every way that a loss can be."""

    name, criterion = "toy", "acceptance"

    def __init__(self, bad_step: int | None = None, drop: bool = True) -> None:
        generator = torch.Generator().manual_seed(5)
        self.model: nn.Module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1 if drop else 0.0))
        self.num_rows = 24
        self.settings = {"kind": "toy"}
        self._x = torch.randn(24, 4, generator=generator)
        self._y = self._x @ torch.randn(4, 4, generator=generator)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.zero_()
        self._bad_step = bad_step
        self.seen: list[Batch] = []

    def loss(self, batch: Batch) -> Tensor:
        self.seen.append(batch)
        noise = torch.randn(len(batch.rows), 4, generator=batch.generator)
        scale = 1.0 + 0.1 * batch.random.random()
        wanted = self._y[batch.rows] + 0.1 * noise
        loss: Tensor = (scale * (self.model(self._x[batch.rows]) - wanted) ** 2).mean()
        return loss * float("nan") if batch.step == self._bad_step else loss

    def evaluate(self) -> dict[str, float]:
        error = float(((self.model(self._x) - self._y) ** 2).mean())
        return {"acceptance": 1 / (1 + error)}

    def save(self, folder: Path) -> None:
        torch.save(self.model.state_dict(), folder / "toy.pt")

    def describe_rows(self, rows: IntArray) -> str:
        return f"rows {rows.tolist()}"


RunToy = Callable[..., tuple[Toy, TrainResult]]


@pytest.fixture
def run_toy(tmp_path: Path) -> RunToy:
    """Train a new toy below ``tmp_path`` and return it with the result."""

    def run(folder: str = "out", task: Toy | None = None, **options: object) -> object:
        task = task or Toy()
        values = {"steps": 20, "batch_size": 4, "eval_every": 5, "learning_rate": 0.05} | options
        return task, train(task, TrainOptions(out=tmp_path / folder, **values))  # type: ignore[arg-type]

    return run  # type: ignore[return-value]
