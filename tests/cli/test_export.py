"""`paceline export`: a trained head in the format of other engines."""

from __future__ import annotations

import json
from pathlib import Path

from paceline.config import SpeculationConfig
from paceline.demo import HEADS_DIR, TARGET_DIR
from paceline.loading import load_engine
from paceline.models.heads.published import find_published
from paceline.sampling import SamplingParams
from tests.cli.conftest import Cli
from tests.cli.test_train_heads import SHORT


def test_a_head_that_ships_is_written(cli: Cli, tmp_path: Path) -> None:
    result = cli("export", HEADS_DIR / "dspark", "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said == {"kind": "dspark", "out": str(tmp_path / "out"), "verifier": str(TARGET_DIR)}
    found = find_published(tmp_path / "out")
    assert found is not None and found.kind == "dspark"
    assert found.config["speculators_config"]["verifier"]["name_or_path"] == str(TARGET_DIR)
    chosen = SpeculationConfig(method="dspark", length="fixed")
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    before, after = (
        load_engine(**given).generate([[5, 6, 7]], params, chosen)[0]
        for given in ({}, {"heads": tmp_path / "out"})
    )
    assert after.output_ids == before.output_ids
    assert after.stats.num_drafted == before.stats.num_drafted > 0
    assert after.stats.num_accepted == before.stats.num_accepted


def test_eagle3_is_trained_with_the_published_layer(
    cli: Cli, target_folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"It is {i}.\n" * 40 for i in range(60)))
    trained = tmp_path / "heads" / "eagle3"
    result = cli(
        "train", "eagle3", "--target", target_folder, "--data", text, "--out", trained, *SHORT,
        "--set", "published=true", "--set", "features=[1,2]",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    result = cli(
        "export", trained, "--target", target_folder, "--out", tmp_path / "out",
        "--verifier", "org/name",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "verifier: org/name" in result.stdout
    for heads in (trained.parent, tmp_path / "out"):
        (session,) = load_engine(target_folder, heads=heads).generate(
            [[1, 2, 3]], SamplingParams(max_tokens=8),
            SpeculationConfig(method="eagle3", length="fixed"),
        )  # fmt: skip
        assert session.stats.num_drafted > 0


def test_what_cannot_be_written_is_one_line(cli: Cli, tmp_path: Path, target_folder: Path) -> None:
    out = tmp_path / "out"
    for arguments, message in (
        ((HEADS_DIR / "eagle",), "eagle, of Paceline's own layout"),
        ((HEADS_DIR / "dflash", "--target", target_folder), "for the loaded target"),
        ((tmp_path,), "config.json"),
        ((TARGET_DIR,), "the folder of a trained head"),
    ):
        result = cli("export", *arguments, "--out", out)
        assert result.exit_code == 2, result.output
        (line,) = result.stderr.strip().splitlines()
        assert message in line
    assert not out.exists()
