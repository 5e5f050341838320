"""`paceline generate`: the JSON, the stream, the colours, the server."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.cluster.cli_generate import Piece, PieceSplitter
from paceline.demo import HEADS_DIR, TARGET_DIR
from paceline.methods import METHODS
from paceline.rpc.server import RpcServer
from paceline.tokenizer import load_tokenizer
from tests.cli.conftest import Cli

REQUIRED = {
    "text",
    "token_ids",
    "method",
    "num_tokens",
    "num_target_forwards",
    "mean_accepted_length",
    "acceptance_rate",
    "tokens_per_second",
    "finish_reason",
}
PROMPT = "def fibonacci(n):\n"


def generate(cli: Cli, *arguments: Any, **keywords: Any) -> dict[str, Any]:
    result = cli("generate", *arguments, "--json", **keywords)
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_json_document_on_the_demo_pair(cli: Cli) -> None:
    document = generate(cli, PROMPT, "--max-tokens", 24, "--ignore-eos")
    assert document.keys() >= REQUIRED
    assert document["method"] == "auto"
    assert document["explain"]["drafters"].keys() >= {"suffix", "draft_model"}
    assert document["num_tokens"] == len(document["token_ids"]) == 24
    assert document["finish_reason"] == "length"
    assert document["text"] == load_tokenizer(TARGET_DIR).decode(document["token_ids"])
    assert 1 <= document["num_target_forwards"] <= 24
    expected = document["num_tokens"] / document["num_target_forwards"]
    assert document["mean_accepted_length"] == pytest.approx(expected)
    assert document["acceptance_rate"] == pytest.approx(
        document["num_accepted"] / document["num_drafted"]
    )
    assert document["tokens_per_second"] > 0


@pytest.mark.parametrize(
    ("methods", "temperature"),
    [
        (("draft_model", "prompt_lookup", "eagle"), 0),
        pytest.param(METHODS, 0, marks=pytest.mark.nightly),
        pytest.param(METHODS, 1, marks=pytest.mark.nightly),
    ],
)
def test_lossless_methods_print_the_tokens_of_ar(
    cli: Cli, methods: Collection[str], temperature: float
) -> None:
    options = ("-n", 24, "--temperature", temperature, "--seed", 5, "--ignore-eos")
    expected = generate(cli, PROMPT, "--method", "ar", *options)["token_ids"]
    assert len(expected) == 24
    for name in methods:
        method = METHODS[name]
        # Rejection sampling keeps the distribution, and at temperature 0 the tokens.
        exact = method.lossless and (method.acceptance == "coupled" or temperature == 0)
        trained = method.head is None or (HEADS_DIR / method.head).is_dir()
        trained = trained and method.drafter != "non_autoregressive"
        if name != "ar" and exact and trained:
            document = generate(cli, PROMPT, "--method", name, *options)
            assert document["token_ids"] == expected, name
            assert document["method"] == name


def test_seed_decides_the_sample(cli: Cli, target_folder: Path) -> None:
    def tokens(seed: int) -> list[int]:
        options = ("--target", target_folder, "-t", 1, "-n", 16, "--ignore-eos", "--seed", seed)
        document = generate(cli, "abc", *options)
        ids: list[int] = document["token_ids"]
        return ids

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


def test_streamed_text_is_the_text(cli: Cli) -> None:
    options = (PROMPT, "-n", 32, "--ignore-eos")
    document = generate(cli, *options)
    result = cli("generate", *options)
    assert result.exit_code == 0
    assert result.stdout == document["text"] + "\n"
    assert "mean accepted length" in result.stderr
    assert "\x1b" not in result.stdout, "no colours in output that is not a terminal"


def test_prompt_from_standard_input(cli: Cli) -> None:
    from_argument = generate(cli, PROMPT, "-n", 8)
    assert generate(cli, "-", "-n", 8, stdin=PROMPT)["token_ids"] == from_argument["token_ids"]


def test_own_models_and_every_sampling_option(
    cli: Cli, target_folder: Path, drafter_folder: Path
) -> None:
    models = ("--target", target_folder, "--drafter", drafter_folder)
    biased = generate(cli, "abc", *models, "--logit-bias", "65=1000", "-n", 4, "--ignore-eos")
    assert biased["token_ids"] == [65, 65, 65, 65]
    stopped = generate(
        cli, "abc", *models, "--logit-bias", "65=1000", "--stop-token-id", 65, "-n", 4
    )
    assert (stopped["token_ids"], stopped["finish_reason"]) == ([65], "stop")
    letter = biased["text"][0]
    cut = generate(cli, "abc", *models, "--logit-bias", "65=1000", "--stop", letter * 3, "-n", 9)
    assert (cut["text"], cut["finish_reason"], cut["num_tokens"]) == ("", "stop", 3)

    options = ("-t", 0.9, "--top-k", 20, "--top-p", 0.9, "--min-p", 0.01, "--seed", 3, "-n", 20)
    options += ("--repetition-penalty", 1.2, "--ignore-eos")
    drafted = generate(cli, "abc", *models, *options)
    assert drafted["method"] == "auto"
    ar = generate(cli, "abc", *models, *options, "--method", "ar")
    assert drafted["token_ids"] == ar["token_ids"]
    plain = generate(cli, "abc", *models, *options[:2], "--seed", 3, "-n", 20, "--ignore-eos")
    assert plain["token_ids"] != ar["token_ids"], "the options changed nothing"


def test_default_method_with_knobs_is_that_of_the_usual_drafter(
    cli: Cli, target_folder: Path
) -> None:
    options = ("abcabc", "--target", target_folder, "-n", 4)
    assert generate(cli, *options)["method"] == "auto"
    assert generate(cli, *options, "-k", 3)["method"] == "prompt_lookup"
    assert generate(cli, "abcabc", "-n", 4, "-k", 3)["method"] == "draft_model"


def test_knobs_reach_the_method(cli: Cli, target_folder: Path, drafter_folder: Path) -> None:
    options = ("--target", target_folder, "--drafter", drafter_folder, "-n", 12, "--ignore-eos")
    fixed = ("--speculation", "length=fixed")  # the default depends on what rounds cost
    depth_one = generate(cli, "abc", *options, *fixed, "-k", 1)
    assert len(depth_one["drafted_by_depth"]) == 1
    by_key = generate(cli, "abc", *options, *fixed, "--speculation", "num_speculative_tokens=1")
    as_json = generate(
        cli, "abc", *options, "--speculation", '{"num_speculative_tokens": 1, "length": "fixed"}'
    )
    assert (
        by_key["drafted_by_depth"] == as_json["drafted_by_depth"] == depth_one["drafted_by_depth"]
    )
    nothing = generate(cli, "abc", *options, "-k", 0)
    assert nothing["num_drafted"] == 0
    assert nothing["num_target_forwards"] == 12


def test_a_method_that_was_mostly_ar_says_so(
    cli: Cli, target_folder: Path, drafter_folder: Path
) -> None:
    """The drafter is as large as the target and nearly always wrong, so goodput gives it up."""
    options = ("abc", "--target", target_folder, "--drafter", drafter_folder, "-n", 100)
    options += ("--ignore-eos", "--method", "draft_model")
    result = cli("generate", *options, "--json")
    document = json.loads(result.stdout)
    drafted, rounds = document["drafted_by_depth"][0], document["num_rounds"]
    assert 2 * drafted < rounds
    note = (
        f"{drafted} of {rounds} rounds drafted: drafts do not pay on this machine; "
        "`--set length=fixed` shows the method anyway"
    )
    assert document["note"] == note
    assert note in result.stderr
    assert "rounds drafted: drafts do not pay" in cli("generate", *options).stderr
    for quiet in (("--set", "length=fixed"), ("-k", 0)):
        silent = cli("generate", *options, *quiet)
        assert silent.exit_code == 0
        assert "rounds drafted" not in silent.stderr


def test_a_lookup_may_also_have_found_nothing(cli: Cli, target_folder: Path) -> None:
    options = ("abc", "--target", target_folder, "-n", 6, "--ignore-eos")
    document = generate(cli, *options, "--method", "prompt_lookup")
    assert document["num_drafted"] == 0
    assert "found nothing to draft, or drafts do not pay" in document["note"]
    assert "note" not in generate(cli, *options, "--method", "ar")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("invariant", ["--batch-invariant", "--no-batch-invariant"])
def test_precision_and_invariance_options(
    cli: Cli, target_folder: Path, dtype: str, invariant: str
) -> None:
    options = ("--target", target_folder, "--dtype", dtype, invariant, "-n", 6, "--ignore-eos")
    assert generate(cli, "abc", *options)["num_tokens"] == 6


# --- over gRPC ------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0, 1])
def test_server_gives_the_tokens_of_this_process(
    cli: Cli, server: RpcServer, target_folder: Path, drafter_folder: Path, temperature: float
) -> None:
    options = ("-n", 24, "-t", temperature, "--seed", 3, "--ignore-eos")
    pair = ("--target", target_folder, "--drafter", drafter_folder, "--method", "draft_model")
    here = generate(cli, "hello", *options, *pair)
    there = generate(cli, "hello", *options, "--server", server.address)
    assert there.keys() >= REQUIRED
    for key in ("text", "token_ids", "method", "num_tokens", "finish_reason", "num_prompt_tokens"):
        assert there[key] == here[key], key
    ar = generate(cli, "hello", *options, "--server", server.address, "--method", "ar")
    assert ar["token_ids"] == here["token_ids"]
    assert ar["num_target_forwards"] == 24


def test_server_streams_the_text(cli: Cli, server: RpcServer, target_folder: Path) -> None:
    options = ("hello", "-n", 16, "--ignore-eos", "--server", server.address)
    text = generate(cli, *options)["text"]
    # With the right tokenizer, with one that cannot be right, and without any.
    for extra in (("--target", target_folder), ("--target", TARGET_DIR), ()):
        result = cli("generate", *options, *extra)
        assert result.exit_code == 0, result.stderr
        assert result.stdout == text + "\n"


# --- attribution of text to tokens ----------------------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are bytes, so that most characters take several."""

    vocab_size = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Any, skip_special_tokens: bool = True) -> str:
        return bytes(token_ids).decode(errors="replace")

    def vocabulary(self) -> dict[str, int]:
        return {}


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=20), data=st.data())
def test_pieces_join_to_the_text_whatever_is_held_back(text: str, data: st.DataObject) -> None:
    text = text.replace("\ufffd", "")
    tokens = list(text.encode())
    splitter, result, sent, given_out = PieceSplitter(Bytes()), [], 0, 0
    while sent < len(tokens):
        size = data.draw(st.integers(1, len(tokens) - sent), "tokens in the round")
        accepted = data.draw(st.integers(0, size), "accepted")
        sent += size
        ready = len(bytes(tokens[:sent]).decode(errors="ignore"))
        until = ready if sent == len(tokens) else data.draw(st.integers(given_out, ready), "text")
        result += splitter.split(tokens[sent - size : sent], accepted, text[given_out:until])
        given_out = until
    assert "".join(piece.text for piece in result) == text
    assert all(piece.accepted is not None for piece in result), "every character has a token"


def test_pieces_know_who_made_them() -> None:
    splitter = PieceSplitter(Bytes())
    assert splitter.split(list(b"abc"), 2, "abc") == [
        Piece("a", True),
        Piece("b", True),
        Piece("c", False),
    ]
    # "de" is held back by a stop string that might come; then it turns out not to.
    assert splitter.split(list(b"de"), 1, "") == []
    assert splitter.split(list(b"f"), 0, "def") == [
        Piece("d", True),
        Piece("e", False),
        Piece("f", False),
    ]


def test_text_of_another_tokenizer_is_shown_without_a_claim() -> None:
    splitter = PieceSplitter(Bytes())
    assert splitter.split(list(b"ab"), 1, "xyz") == [Piece("xyz", None)]
    assert PieceSplitter(None).split([1], 1, "xyz") == [Piece("xyz", None)]


def test_a_prediction_saves_forwards_and_changes_nothing(cli: Cli, tmp_path: Path) -> None:
    # Lengths that follow measured costs would make the number of forwards a matter of the clock.
    options = (PROMPT, "-n", 40, "--ignore-eos", "--set", "length=fixed")
    plain = generate(cli, *options)
    (tmp_path / "prediction.txt").write_text(plain["text"])
    predicted = generate(cli, *options, "--prediction", tmp_path / "prediction.txt")
    assert predicted["token_ids"] == plain["token_ids"]
    assert predicted["method"] == "predicted_outputs_draft_model"
    assert predicted["num_target_forwards"] < plain["num_target_forwards"]
    missing = cli("generate", PROMPT, "--prediction", tmp_path / "nothing.txt")
    assert missing.exit_code == 2
    assert "prediction" in missing.stderr


def test_omnidraft_drafts_with_the_model_that_has_tokens_of_its_own(cli: Cli) -> None:
    """Its head of acceptance knows no other, and ends drafts that are wrong."""
    rates = []
    for length in ("fixed", "specdecpp"):
        document = generate(
            cli, "import os", "--method", "omnidraft", "--max-tokens", 32, "--set",
            f"length={length}",
        )  # fmt: skip
        assert not document["drafter_lost"]
        rates.append(document["acceptance_rate"])
    assert rates[1] > 2 * rates[0] > 0
