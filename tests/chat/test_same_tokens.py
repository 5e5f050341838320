"""A question has the same token ids wherever it is asked."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from paceline.bench import run
from paceline.bench.backends import LocalBackend
from paceline.bench.run import BenchOptions
from paceline.chat import encode_chat
from paceline.cluster.cli_chat import Chat
from paceline.cluster.cli_generate import GenerateOptions, prompt_ids
from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.engine import Engine, EngineThread
from paceline.loading import load_engine
from paceline.rpc.generate_service import ModelInfo
from paceline.sampling import SamplingParams
from paceline.tokenizer import chat_template
from paceline.train.data import load_text
from paceline.tuning.space import parse_space
from tests.deployments.http_serving import http_serving

QUESTION = "def load(path):\n  "
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
FEW = 12  # tokens of an answer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The demo's target and drafter with a chat template."""
    made = []
    for source in (TARGET_DIR, DRAFTER_DIR):
        folder = tmp_path_factory.mktemp(source.name)
        for file in source.iterdir():
            (folder / file.name).symlink_to(file)
        (folder / "chat_template.jinja").write_text(TEMPLATE)
        made.append(folder)
    return made[0], made[1]


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The question, as the only turn of one conversation and the second of another one."""
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    lines = [
        {"question_id": 0, "category": "talk", "turns": [QUESTION]},
        {"question_id": 1, "category": "talk", "turns": ["class Store:", QUESTION]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture(scope="module")
def engine(folders: tuple[Path, Path]) -> Engine:
    return load_engine(folders[0])


@pytest.fixture(scope="module")
def ids(folders: tuple[Path, Path], engine: Engine) -> list[int]:
    """The question as the library encodes it."""
    assert engine.tokenizer is not None
    template = chat_template(folders[0])
    found = encode_chat(engine.tokenizer, template, [{"role": "user", "content": QUESTION}])
    assert engine.tokenizer.decode(found) == f"<user>{QUESTION}\n<assistant>"
    return found


def test_on_the_command_line(folders: tuple[Path, Path], engine: Engine, ids: list[int]) -> None:
    assert engine.tokenizer is not None
    asked = GenerateOptions(prompt=QUESTION, params=SamplingParams(), speculation={}, chat=True)
    for folder in folders:  # `generate` asks the target's folder, `draft` the drafter's
        assert prompt_ids(asked, engine.tokenizer, folder) == ids
    params = SamplingParams(max_tokens=2)
    chat = Chat(engine, chat_template(folders[0]), params, "ar")
    for _ in chat.answer(QUESTION):
        pass
    assert chat.last is not None
    assert chat.last.token_ids[: chat.last.prompt_length] == ids


def test_over_http(
    folders: tuple[Path, Path], ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = load_engine(folders[0])
    seen: list[list[int]] = []
    submit = own.submit

    def listening(request, *args, **kwargs):  # type: ignore[no-untyped-def]
        seen.append(list(request.prompt_ids))
        return submit(request, *args, **kwargs)

    monkeypatch.setattr(own, "submit", listening)
    model = ModelInfo(
        name="demo", default_speculation=SpeculationConfig(method="ar"),
        chat_template=chat_template(folders[0]),
    )  # fmt: skip
    thread = EngineThread(own).start()
    try:
        with (
            http_serving(thread, model) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="unknown", max_retries=0) as client,
        ):
            client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": QUESTION}], max_tokens=2
            )
    finally:
        thread.stop()
    assert seen == [ids]


def test_in_training(
    folders: tuple[Path, Path], tmp_path: Path, ids: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))
    file = tmp_path / "talks.jsonl"
    talk = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": "pass"}]
    file.write_text((json.dumps({"messages": talk}) + "\n") * 9)
    rows = load_text(folders[0], [file], len(ids) + 2)
    first, has_loss = rows.training[[0]][0].tolist(), rows.mask([0])[0].tolist()
    assert first[: len(ids)] == ids
    assert not any(has_loss[: len(ids)]) and has_loss[len(ids)]


def test_in_bench_and_in_a_sweep(folders: tuple[Path, Path], talks: Path, ids: list[int]) -> None:
    from paceline.tuning.trial import Models, Work  # imports Ray

    options = BenchOptions(target=folders[0], prompts=talks, max_tokens=FEW)
    template = options.template()
    assert template is not None
    backend = LocalBackend(load_engine(folders[0]))
    params = options.sampling_params(is_chat=True)
    measured = [
        list(prompt)
        for group in run._groups(options, backend, template, params, [])
        for prompt in group.token_ids
    ]
    assert measured[0] == ids
    assert len(measured) == 3  # the second conversation has two turns

    space = parse_space(
        {
            "model": {"target": str(folders[0])},
            "workload": {"prompts": str(talks), "max_tokens": FEW},
            "space": {"method": "prompt_lookup"},
        }
    )
    models = Models(Work(document=space.as_dict(), prompts=space.prompts, num_cpus=1))
    assert models.groups == [[prompt] for prompt in measured]
    assert not models.params.ignore_eos
    models.close()
