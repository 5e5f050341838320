"""The real model's logits beside transformers' and llama.cpp's (docs/performance.md)."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import measure
from paceline.errors import PacelineError
from paceline.model_names import resolve_model

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1800)]
DOCS = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
ROUNDED_INPUTS = 0.05
"""Nats. What rounding a layer's inputs to eight bits may cost on average; llama.cpp rounds them,
too."""


ROUNDED_WEIGHTS = 0.15
"""Nats. What rounding the weights of the file once more, to symmetric four bits, may cost."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    try:
        resolve_model("smollm2")
    except PacelineError as error:
        pytest.skip(str(error))
    text = tmp_path_factory.mktemp("text") / "docs.txt"
    text.write_text("\n".join(file.read_text("utf-8") for file in DOCS), "utf-8")
    return measure(
        argparse.Namespace(
            model="smollm2", text=text, tokens=20_000, windows=4, positions=64, threads=2
        )
    )


def test_logits_are_near_those_of_the_weights(measured: dict[str, Any]) -> None:
    found = measured["divergence"]
    for name, each in found.items():
        again = name == "--dtype q4_0"
        assert each["mean"] < (ROUNDED_WEIGHTS if again else ROUNDED_INPUTS), name
        assert again or each["same_best"] > 0.9, name
    if "llama.cpp" in found:
        assert found["as the file has them"]["mean"] <= 1.1 * found["llama.cpp"]["mean"]


def test_perplexity_is_that_of_llama_cpp(measured: dict[str, Any]) -> None:
    found = measured["perplexity"]
    if "llama.cpp" not in found:
        pytest.skip("llama-cpp-python is not installed (docs/benchmarks.md)")
    assert measured["tokens"] > 19_000
    assert found["Paceline"] == pytest.approx(found["llama.cpp"], rel=0.01)


def test_one_or_sixteen_tokens_at_once(measured: dict[str, Any]) -> None:
    assert len(measured["one_or_sixteen"]) >= 8
    for kind, row in measured["one_or_sixteen"].items():
        ours = row["Paceline"]
        assert ours["same_bits"] == ours["same_best"] == ours["positions"], kind
