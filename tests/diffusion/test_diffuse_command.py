"""`paceline diffuse` and the model that ships."""

import json

import pytest
from typer.testing import CliRunner

from paceline.cluster.cli import app
from paceline.diffusion import DiffusionModel, make_schedule

PROMPT = "copy: c f a b ->"


def run(*arguments: str) -> dict:
    result = CliRunner().invoke(app, ["diffuse", PROMPT, "-n", "16", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_freedave_is_the_static_text_of_the_command() -> None:
    static, fast = run("--schedule", "static"), run()
    assert fast["token_ids"] == static["token_ids"]
    assert fast["forwards"] < static["forwards"]
    assert fast["tokens_per_forward"] == fast["tokens"] / fast["forwards"]
    assert fast["lossless"]
    assert not run("--schedule", "confidence", "--set", "threshold=0.5")["lossless"]


def test_the_sub_block_cache_computes_the_text_to_its_end() -> None:
    model = DiffusionModel()

    cached = model.generate(
        PROMPT, schedule=make_schedule("static"), max_tokens=40, sub_block_cache=True
    )
    assert cached.token_ids


@pytest.mark.parametrize("option", [["--schedule", "no"], ["--set", "draft_steps"]])
def test_bad_options_are_named(option: list[str]) -> None:
    result = CliRunner().invoke(app, ["diffuse", PROMPT, *option])
    assert result.exit_code != 0
