"""lm-eval through the HTTP API: its scores and texts are those of its own `hf` model.

It runs `lm_eval` of an environment of its own (`pip install "lm-eval[api,hf]"`), found on the path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import write_folder
from paceline.config import SpeculationConfig
from paceline.engine import EngineThread
from paceline.errors import ModelNotFound
from paceline.gguf_folder import model_folder
from paceline.loading import load_engine
from paceline.model_names import resolve_model
from paceline.models.base import ForwardResult, Segment
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import load_weights
from paceline.rpc.generate_service import ModelInfo
from paceline.sampling import token_logprobs
from tests.core.test_token_limits import rows_of
from tests.deployments.http_serving import http_serving
from tests.deployments.test_vllm_keys import ask

LM_EVAL = shutil.which("lm_eval")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(LM_EVAL is None, reason="no lm_eval on the path"),
]
MULTIPLE_CHOICE = """\
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
GENERATE = """\
output_type: generate_until
doc_to_target: "{{text}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 16, do_sample: false}
metric_list: [{metric: exact_match}]
"""
CAPITALS = {
    "France": "Paris", "Germany": "Berlin", "Italy": "Rome", "Spain": "Madrid",
    "Japan": "Tokyo", "Egypt": "Cairo", "Peru": "Lima", "Norway": "Oslo",
}  # fmt: skip
EXAMPLES = "".join(
    f"Question: What is {a} plus {b}?\nAnswer: {a + b}, because {b} comes on top of {a}.\n\n"
    for a, b in ((3, 4), (10, 2))
)
ROUNDING = 5e-5
"""Sums of float32 in another order move the log-probability of a token by less, in 30 layers."""


def capitals() -> list[dict[str, Any]]:
    countries, cities = list(CAPITALS), list(CAPITALS.values())
    rows = []
    for i, country in enumerate(countries):
        choices = [f" the city of {cities[(i + 5 * j) % len(cities)]}." for j in range(3)]
        choices.insert(i % 4, f" {cities[i]}.")
        choices[choices.index(f" the city of {cities[i]}.")] = f" {cities[i]}, of course."
        rows.append({
            "question": f"The capital of {country} is", "choices": choices, "answer": i % 4,
            "text": cities[i],
        })  # fmt: skip
    return rows


def sums() -> list[dict[str, Any]]:
    """With two examples before each question, which are the same for all."""
    rows = []
    for i in range(4):
        a, b = 2 + i, 3 + 2 * i % 7
        choices = [f" {a + b + j - i % 4}, because {b} comes on top of {a}." for j in range(4)]
        question = f"{EXAMPLES}Question: What is {a} plus {b}?\nAnswer:"
        rows.append({
            "question": question, "choices": choices, "answer": i % 4, "text": str(a + b),
        })  # fmt: skip
    return rows


TASKS = {"capitals": (MULTIPLE_CHOICE, capitals), "sums": (MULTIPLE_CHOICE, sums),
         "writes": (GENERATE, sums)}  # fmt: skip
CHOICES = ("capitals", "sums")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    for name, (template, rows) in TASKS.items():
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(map(json.dumps, rows())))
        (folder / f"{name}.yaml").write_text(
            f"task: {name}\ndataset_path: json\ndataset_kwargs: {{data_files: {data}}}\n"
            f'test_split: train\ndoc_to_text: "{{{{question}}}}"\n{template}'
        )
    return folder


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2 with the numbers that its codes stand for, as a folder that transformers reads."""
    try:
        source = resolve_model("smollm2")
    except ModelNotFound as error:
        pytest.skip(str(error))
    model = model_folder(source)
    weights = load_weights(model, LlamaConfig.from_folder(model))
    out = tmp_path_factory.mktemp("smollm2") / "floats"
    return write_folder(source, {name: w.float() for name, w in weights.items()}, out)


@pytest.fixture(scope="module")
def target(floats: Path) -> Iterator[EngineThread]:
    thread = EngineThread(load_engine(floats)).start()
    yield thread
    thread.stop()


Samples = dict[str, list[dict[str, Any]]]


def evaluate(tasks: Path, out: Path, model: str, args: str, batch_size: int) -> Samples:
    """Run lm-eval; returns each task's samples in the order of its file."""
    subprocess.run(
        [
            str(LM_EVAL), "run", "--model", model, "--tasks", ",".join(TASKS),
            "--include_path", str(tasks), "--output_path", str(out), "--log_samples",
            "--batch_size", str(batch_size), "--model_args", args,
            *(["--device", "cpu"] if model == "hf" else []),
        ],
        check=True, timeout=1200, env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    samples: Samples = {}
    for name in TASKS:
        (file,) = out.glob(f"**/samples_{name}_*.jsonl")
        lines = map(json.loads, file.read_text().splitlines())
        samples[name] = sorted(lines, key=lambda sample: int(sample["doc_id"]))
    return samples


@dataclass
class Work:
    """Forwards of a target that score, and the tokens that they compute."""

    forwards: int = 0
    positions: int = 0


@contextmanager
def counted(thread: EngineThread) -> Iterator[Work]:
    engine, work = thread.engine, Work()
    runner = engine.local_target.runner
    forward = runner.forward

    def counting(segments: Sequence[Segment], *rest: Any) -> ForwardResult:
        if all(s.params.prompt_logprobs is not None for s in engine.sessions.values()):
            work.forwards += 1
            work.positions += sum(segment.num_rows for segment in segments)
        return forward(segments, *rest)

    runner.forward = counting  # type: ignore[method-assign]
    try:
        yield work
    finally:
        del runner.forward  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def of_transformers(tasks: Path, floats: Path, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    out = tmp_path_factory.mktemp("hf")
    return evaluate(tasks, out, "hf", f"pretrained={floats},dtype=float32", 1)


@pytest.fixture(scope="module")
def url(target: EngineThread) -> Iterator[str]:
    with http_serving(
        target, ModelInfo(name="smollm2", default_speculation=SpeculationConfig(method="auto"))
    ) as url:
        yield url


@pytest.fixture(scope="module")
def of_paceline(
    tasks: Path, floats: Path, target: EngineThread, url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Samples, Work]:  # fmt: skip
    args = f"model=smollm2,base_url={url}/v1/completions,tokenizer={floats}"
    with counted(target) as work:
        out = tmp_path_factory.mktemp("paceline")
        return evaluate(tasks, out, "local-completions", args, 128), work


def answers(sample: dict[str, Any]) -> list[tuple[float, bool]]:
    """Log-probability and greediness of each choice."""
    return [(float(value), str(greedy) == "True") for value, greedy in sample["filtered_resps"]]


def check_alone(thread: EngineThread, url: str, sample: dict[str, Any]) -> list[int]:
    """Compare an item's scores with those of its choices one by one, to the last bit.

    Returns:
        The number of tokens of each choice.
    """
    tokenizer, sizes = thread.engine.tokenizer, []
    assert tokenizer is not None
    choices = sample["arguments"].values()
    for asked, (value, _) in zip(choices, answers(sample), strict=True):
        ids = tokenizer.encode(asked["arg_0"] + asked["arg_1"])
        begin = len(tokenizer.encode(asked["arg_0"]))
        # What lm-eval asks with a batch size of 1.
        status, answer, _ = ask(url, "/v1/completions", {
            "model": "smollm2", "prompt": [ids], "temperature": 0, "max_tokens": 1, "logprobs": 1,
            "seed": 1234, "echo": True,
        })  # fmt: skip
        assert status == 200
        told = answer["choices"][0]["logprobs"]["token_logprobs"]
        assert value == sum(told[begin:-1])
        sizes.append(len(ids) - begin)
    return sizes


def check_logits(thread: EngineThread, sample: dict[str, Any]) -> None:
    """Compare an item's scores with one forward for each choice, without a server."""
    tokenizer = thread.engine.tokenizer
    assert tokenizer is not None
    choices = sample["arguments"].values()
    for asked, (value, _) in zip(choices, answers(sample), strict=True):
        ids = tokenizer.encode(asked["arg_0"] + asked["arg_1"])
        rows = rows_of(thread.engine, ids)
        begin = len(tokenizer.encode(asked["arg_0"]))
        told = [token_logprobs(rows[i - 1], ids[i], 0) for i in range(begin, len(ids))]
        assert value == sum(entry.logprob or 0.0 for entry in told)


def test_multiple_choice(
    target: EngineThread, url: str, of_transformers: Samples, of_paceline: tuple[Samples, Work]
) -> None:
    samples, work = of_paceline
    items = [
        pair for name in CHOICES for pair in zip(samples[name], of_transformers[name], strict=True)
    ]
    count, largest, closest = 0, 0.0, float("inf")
    with counted(target) as alone:
        sizes = [check_alone(target, url, mine) for mine, _ in items]
    check_logits(target, items[0][0])
    for (mine, theirs), tokens in zip(items, sizes, strict=True):
        values, others = ([value for value, _ in answers(each)] for each in (mine, theirs))
        differences = [abs(a - b) for a, b in zip(values, others, strict=True)]
        assert all(d < ROUNDING * size for d, size in zip(differences, tokens, strict=True))
        assert [greedy for _, greedy in answers(mine)] == [g for _, g in answers(theirs)]
        assert (mine["acc"], mine["acc_norm"]) == (theirs["acc"], theirs["acc_norm"])
        second, best = sorted(others)[-2:]
        closest = min(closest, best - second)
        largest, count = max(largest, *differences), count + len(values)
    print(
        f"\n{len(items)} items, {count} continuations. Trees: {work}; one by one: {alone}. Largest "
        f"difference from transformers {largest:.1e}; the two best choices of an item are at least "
        f"{closest:.1e} apart"
    )
    assert count == 4 * len(items) == 4 * (len(capitals()) + len(sums()))
    assert closest > 2 * largest  # so rounding decides no item
    assert work.forwards < len(items)
    assert alone.forwards >= 2 * count  # the prompt, and the token after it
    assert 3 * work.positions < alone.positions


def test_generate_until(of_transformers: Samples, of_paceline: tuple[Samples, Work]) -> None:
    mine, theirs = of_paceline[0]["writes"], of_transformers["writes"]
    assert [each["resps"] for each in mine] == [each["resps"] for each in theirs]
    assert [each["exact_match"] for each in mine] == [each["exact_match"] for each in theirs]
    assert len({each["resps"][0][0] for each in mine}) > 2  # it has written something
