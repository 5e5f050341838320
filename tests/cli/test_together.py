"""`paceline together`: what its commands print is what the library gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR, WORDS_FILE
from paceline.engine import EngineThread
from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.rpc.errors import InternalError, ServerUnavailable
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.writer import HttpWriter
from paceline.sampling import SamplingParams
from paceline.tokenizer import load_tokenizer
from tests.cli.conftest import Cli
from tests.deployments.http_serving import http_serving
from tests.rpc.serving import serving

QUESTION = "Question: Tom has 3 apples and buys 4 more. How many apples does he have?\nAnswer: "
STEPS = ("--separator", "\\n", "-n", 48)


def together(cli: Cli, *arguments: Any) -> dict[str, Any]:
    result = cli("together", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def ar_text(folder: Path, prompt: str, count: int) -> str:
    engine, params = load_engine(folder), SamplingParams(max_tokens=count)
    assert engine.tokenizer is not None
    ids = [engine.tokenizer.encode(prompt)]
    return engine.generate(ids, params, SpeculationConfig(method="ar"))[0].text


def test_entropy_says_who_wrote_each_token(cli: Cli) -> None:
    found = together(cli, "entropy", "class Stack:", "-n", 24)
    assert len(found["token_ids"]) == len(found["by_large"]) == len(found["entropies"]) == 24
    assert 0 < found["large_share"] == sum(found["by_large"]) / 24 < 1
    assert found["small_forwards"] + found["large_forwards"] == 24
    assert found["text"] == load_tokenizer(TARGET_DIR).decode(found["token_ids"])
    whole = together(cli, "entropy", "class Stack:", "-n", 24, "--threshold", 0)
    assert whole["text"] == ar_text(TARGET_DIR, "class Stack:", 24)
    part = together(cli, "entropy", "class Stack:", "-n", 24, "--threshold", "inf")
    assert part["text"] == ar_text(DRAFTER_DIR, "class Stack:", 24)


def test_the_oracle_writes_the_targets_text(cli: Cli) -> None:
    found = together(cli, "oracle", "class Stack:", "-n", 24)
    assert found["text"] == ar_text(TARGET_DIR, "class Stack:", 24)
    assert found["large_share"] == sum(found["by_large"]) / 24 < 0.5
    result = cli("together", "oracle", "class Stack:", "-n", 24)
    assert result.stdout == found["text"] + "\n"
    assert "24 tokens" in result.stderr


def test_superpose_writes_several_texts_for_the_forwards_of_one(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "known.py").write_text("import os\nimport sys\nimport json\n" * 3)
    options = ("superpose", "import os\nimport", "-n", 6, "--drafts")
    found = together(cli, *options, 4, "--corpus", tmp_path / "known.py")
    assert found["forwards"] == 6
    assert len({draft["text"] for draft in found["drafts"]}) == 4
    assert found != together(cli, *options, 4)
    one = together(cli, *options, 1, "--alpha", 0)["drafts"][0]["text"]
    assert one == ar_text(TARGET_DIR, "import os\nimport", 6)


def test_fuse_takes_models_of_any_vocabulary(cli: Cli, target_folder: Path) -> None:
    options = ("fuse", "class Stack:", "--max-bytes", 12)
    found = together(cli, *options, "--model", "demo", "--model", target_folder)
    assert 0 < len(found["text"].encode()) <= 12
    assert [row["weight"] for row in found["models"]] == [0.5, 0.5]
    alone = together(cli, *options, "--model", "demo")
    silent = ("--weight", 1, "--weight", 0)
    with_silent = together(cli, *options, "--model", "demo", "--model", target_folder, *silent)
    assert with_silent["text"] == alone["text"] != found["text"]


def test_fork_shows_each_branch_and_the_answer_in_order(cli: Cli) -> None:
    options = ("fork", "cat, owl, pike:\n", "--method", "ar")
    found = together(cli, *options)
    names = [row["branch"] for row in found["branches"]]
    assert sorted(names) == sorted(
        ["root", *(f"{i}{j}" for i in (1, 2, 3) for j in ("", ".1", ".2"))]
    )
    assert found["steps"] == found["longest_path"] < found["tokens"]
    one_by_one = together(cli, *options, "--one-by-one")
    assert one_by_one["text"] == found["text"]
    assert one_by_one["steps"] > 3 * found["steps"]
    result = cli("together", *options)
    assert result.stdout == found["text"] + "\n"
    assert "[2] ' is a bird. It eats, and it lives.'" in result.stderr
    assert f"{found['tokens']} tokens in 10 branches" in result.stderr


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    """Servers of the demo's drafter and of its target."""
    with ExitStack() as stack:
        found = []
        for folder in (DRAFTER_DIR, TARGET_DIR):
            thread = EngineThread(load_engine(folder)).start()
            stack.callback(thread.stop)
            found.append(stack.enter_context(serving(engine=thread)).address)
        yield found[0], found[1]


def without_grades(document: dict[str, Any]) -> dict[str, Any]:
    steps = [{**step, "grade": step["grade"] is None} for step in document["steps"]]
    return {**document, "steps": steps}


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("threshold", [0, 4, 10])
def test_reason_over_two_servers_is_reason_here(
    cli: Cli, addresses: tuple[str, str], threshold: int
) -> None:
    options = ("reason", QUESTION, *STEPS, "--threshold", threshold)
    here = together(cli, *options)
    there = together(cli, *options, "--small", addresses[0], "--large", addresses[1])
    # A grade may differ: a server reads the text anew, an engine keeps the tokens it has written.
    assert without_grades(there) == without_grades(here)
    assert here["tokens"] == sum(step["tokens"] for step in here["steps"])
    by_large = sum(step["tokens"] for step in here["steps"] if step["by_large"])
    assert here["large_share"] == by_large / here["tokens"]
    if threshold == 4:
        assert 0 < here["large_share"] < 1
        assert 0 < here["accepted_steps"] < here["grades"] == len(here["steps"])
    else:
        folder = TARGET_DIR if threshold else DRAFTER_DIR
        assert here["text"] == ar_text(folder, QUESTION, 48)


@pytest.mark.slow
def test_reason_over_http_is_reason_here(cli: Cli) -> None:
    here = together(cli, "reason", QUESTION, *STEPS, "--threshold", 4)
    with ExitStack() as stack:
        urls = []
        for folder in (DRAFTER_DIR, TARGET_DIR):
            thread = EngineThread(load_engine(folder)).start()
            stack.callback(thread.stop)
            model = ModelInfo(name=folder.name, default_speculation=SpeculationConfig(method="ar"))
            urls.append(stack.enter_context(http_serving(thread, model)))
        servers = ("--small", urls[0], "--large", urls[1] + "/v1")
        there = together(cli, "reason", QUESTION, *STEPS, "--threshold", 4, *servers)
        assert without_grades(there) == without_grades(here)
        with pytest.raises(InternalError, match=r"answers 400: .*prompt"):
            HttpWriter(urls[0]).write("", SamplingParams())
    with pytest.raises(ServerUnavailable, match="127"):
        HttpWriter(urls[0])


def test_a_token_does_not_travel_in_plain_text() -> None:
    with pytest.raises(InvalidArgument, match="https with it") as refused:
        HttpWriter("http://10.0.0.5:8000", "m", token="secret")
    assert "secret" not in str(refused.value)
    with pytest.raises(InvalidArgument, match="url: got 'ftp://x'"):
        HttpWriter("ftp://x")
    with pytest.raises(InvalidArgument, match=r"ca: got '/nowhere\.pem'"):
        HttpWriter("https://10.0.0.5:8000", "m", ca="/nowhere.pem")


def test_the_first_steps_are_the_large_models(cli: Cli) -> None:
    found = together(cli, "reason", QUESTION, *STEPS, "--threshold", 0, "--first-steps", 2)
    assert [step["by_large"] for step in found["steps"][:3]] == [True, True, False]
    assert [step["grade"] is None for step in found["steps"][:3]] == [True, True, False]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("entropy", "x", "--threshold", -1), "threshold: got -1.0"),
        (("entropy", "x", "--small", "smollm"), "no model is called 'smollm'"),
        (("oracle", ""), "prompt"),
        (("superpose", "x", "--drafts", 0), "drafts: got 0"),
        (("superpose", "x", "--corpus", "nowhere.txt"), "corpus"),
        (("fuse", "x", "--weight", 0.5), "weights: got [0.5]"),
        (("fuse", "x", "--max-bytes", 0), "max_bytes: got 0"),
        (("fork", "x", "--fork", "two words"), "fork: got 'two words'"),
        (("fork", "x", "--model", "demo"), "fork: got '[Fork]'"),
        (("reason", "x", "--threshold", 11), "threshold: got 11"),
        (("reason", "x", "--ca", "ca.pem"), "together with --server"),
    ],
)
def test_bad_input_is_one_line(cli: Cli, arguments: tuple[Any, ...], said: str) -> None:
    result = cli("together", *arguments)
    assert result.exit_code != 0
    assert said in result.stderr.replace("\n", " ")
    assert "Traceback" not in result.stderr


def test_models_that_share_no_tokenizer_are_refused(cli: Cli, target_folder: Path) -> None:
    for command in ("entropy", "oracle"):
        result = cli("together", command, "x", "--small", target_folder)
        assert result.exit_code != 0
        assert "tokenizer" in result.stderr


def test_words_take_fewer_steps_than_tokens(cli: Cli) -> None:
    prompt = "class Stack:\n    def __init__(self"
    found = together(cli, "words", prompt, "-n", 24)
    assert len(found["token_ids"]) == 24 > len(found["steps"])
    assert found["words"] == sum(len(step["token_ids"]) > 1 for step in found["steps"]) > 0
    assert "".join(step["text"] for step in found["steps"]).startswith(found["text"])
    plain = together(cli, "words", prompt, "-n", 24, "--no-words")
    assert plain["text"] == ar_text(TARGET_DIR, prompt, 24)
    assert plain["words"] == 0 and len(plain["steps"]) == 24
    shown = cli("together", "words", prompt, "-n", 24, "--length-power", 0)
    assert plain["text"] in shown.stdout and "24 tokens in 24 steps, 0 of them" in shown.stderr


def test_words_of_another_model_are_refused(cli: Cli, drafter_folder: Path) -> None:
    result = cli("together", "words", "a", "--model", drafter_folder, "--words", WORDS_FILE)
    assert result.exit_code == 2 and "words: got 'a head for states of 160'" in result.stderr
