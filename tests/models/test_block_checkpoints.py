"""Published DFlash, DFlash 2, DSpark and xPress checkpoints draft what their own library computes.

``make_blocks.py`` made the folders in ``blocks`` with speculators 0.9.0.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.block_checkpoints import read_block_head
from paceline.models.heads.dflash import DFlash
from paceline.models.llama import LlamaRunner
from paceline.models.llama_config import LlamaConfig
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from tests.modelzoo import make_model

FOLDER = Path(__file__).parent / "blocks"
NAMES = sorted(path.name for path in FOLDER.glob("*") if path.is_dir())
Tensors = dict[str, torch.Tensor]


def expected_in(folder: Path) -> Tensors:
    stored = load_file(folder / "expected.safetensors")
    return {k: v.float() if v.is_floating_point() else v for k, v in stored.items()}


def target_of(expected: Tensors, num_layers: int = 6) -> HeadTarget:
    vocab, size = expected["embedding"].shape
    config = LlamaConfig(
        model_type="llama", vocab_size=vocab, hidden_size=size, intermediate_size=2 * size,
        num_layers=num_layers, num_heads=1, num_kv_heads=1, head_dim=size, context_length=48,
        rms_norm_eps=1e-5, tie_word_embeddings=False, windows=(None,) * num_layers,
        rope={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    return HeadTarget("any", config, expected["embedding"], expected["lm_head"])


def read_head(folder: Path, target: HeadTarget, **changed: Any) -> DFlash:
    config = json.loads((folder / "config.json").read_text()) | changed
    head = read_block_head(config, load_file(folder / "model.safetensors"), target)
    head.options = replace(head.options, int8=False)
    head.to(torch.float32).requires_grad_(False).eval().prepare()
    return head


def rounds(expected: Tensors) -> Iterator[tuple[int, list[int], int]]:
    """The places at which blocks are drafted, the tokens that are fed, and the depth."""
    for name in expected:
        if name.startswith("logits."):
            place, ids = int(name.removeprefix("logits.")), expected["token_ids"].tolist()
            yield place, ids[place + 1 :], len(expected[name])


def check(folder: Path) -> None:
    """Several rounds, each with a branch that is rejected, against what is expected."""
    expected = expected_in(folder)
    head = read_head(folder, target_of(expected))
    features, ids = expected["features"], expected["token_ids"].tolist()
    state, read = head.new_state(), 0
    for place, fed, depth in sorted(rounds(expected)):
        rows = [head.root([state], [features[read:place]], [ids[read + 1 : place + 1]])[0]]
        sure = [head.last_acceptance]
        if depth > 2:  # a tree that is rejected
            head.expand([state], [[(100, 3, -1), (101, 5, -1)]])
            head.expand([state], [[(102, 7, 101)]])
        for node in range(depth - 1):
            rows.append(head.expand([state], [[(node, fed[node], node - 1)]])[0])
            sure.append(head.last_acceptance)
        wanted = expected[f"logits.{place}"]
        drafted = torch.stack(rows)[:, head.vocabulary]
        torch.testing.assert_close(drafted, wanted, atol=2e-4, rtol=2e-4)
        outside = torch.isneginf(torch.stack(rows)).sum(-1)
        inside = wanted.isfinite().sum(-1)
        assert torch.equal(outside, len(expected["embedding"]) - inside)
        if f"acceptance.{place}" in expected:
            found = torch.tensor([float(each[0]) for each in sure if each is not None])
            torch.testing.assert_close(found, expected[f"acceptance.{place}"], atol=1e-4, rtol=1e-4)
        read = place
    free = head.stack.pool.num_free
    head.free(state)
    assert head.stack.pool.num_free == free + read == head.stack.pool.capacity


@pytest.mark.parametrize("kernels", ["fastest", "off"])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_those_of_speculators(
    name: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "off":
        monkeypatch.setenv("PACELINE_KERNELS", "off")
    check(FOLDER / name)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the sizes of the targets in ``make_blocks.py``."""
    return make_model(
        "llama_gqa", tmp_path_factory.mktemp("zoo"), vocab_size=64, hidden_size=24,
        num_hidden_layers=5, num_attention_heads=2, num_key_value_heads=1, bos_token_id=0,
        eos_token_id=0, pad_token_id=1,
    )  # fmt: skip


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("shape", ["chain", "best_first"])
@pytest.mark.parametrize("name", NAMES)
def test_a_published_folder_drafts_and_changes_no_token(
    name: str, shape: str, target_folder: Path, tmp_path: Path
) -> None:
    kind = name.partition("_")[0]
    shutil.copytree(FOLDER / name, tmp_path / kind)
    (tmp_path / kind / "expected.safetensors").unlink()
    runner = LlamaRunner(target_folder, kv_tokens=400)
    engine = Engine(
        ModelTarget(runner), heads=HeadLibrary(tmp_path, target_folder, runner), eos_token_ids=()
    )
    config = SpeculationConfig(
        method=kind, shape=shape, length="fixed", num_speculative_tokens=4,
        node_budget=None if shape == "chain" else 8,
    )  # fmt: skip
    prompts = [[5, 9, 33, 7], [8] * 12]
    for temperature in (0.0, 0.9):
        params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=3)
        drafted = engine.generate(prompts, params, config)
        plain = engine.generate(prompts, params, SpeculationConfig(method="ar"))
        assert [s.output_ids for s in drafted] == [s.output_ids for s in plain]
        assert all(s.stats.num_drafted > 0 and not s.stats.drafter_lost for s in drafted)
    assert runner.num_free == runner.kv_capacity


Change = Callable[[dict[str, Any], Tensors], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "another width": (lambda c, t: c["transformer_layer_config"].update(hidden_size=32), "is 24"),
    "another vocabulary": (lambda c, t: c["transformer_layer_config"].update(vocab_size=90), "64"),
    "another kind": (
        lambda c, t: c.update(speculators_model_type="eagle9"),
        "dflash, dflash2, dspark, xpress",
    ),
    "no layers named": (lambda c, t: c.pop("aux_hidden_state_layer_ids"), "aux_hidden_state"),
    "no mask token": (lambda c, t: c.pop("mask_token_id"), "mask_token_id"),
    "a layer too high": (lambda c, t: c.update(aux_hidden_state_layer_ids=[1, 3, 7]), "1 to 6"),
    "a missing tensor": (lambda c, t: t.pop("norm.weight"), "without norm.weight"),
    "a strange tensor": (lambda c, t: t.update(strange=t["norm.weight"]), "with strange"),
    "another shape": (lambda c, t: t.update({"fc.weight": t["fc.weight"][:, 1:]}), "fc.weight"),
    "no vocabulary": (lambda c, t: t.pop("d2t"), "one for each logit"),
    "a token twice": (lambda c, t: t.update(d2t=-torch.arange(40)), "different tokens"),
    "other tokens": (lambda c, t: t.update(t2d=~t["t2d"]), "same ones"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_does_not_fit_is_named(change: str) -> None:
    folder = FOLDER / "dspark_rnn"
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    apply, named = CHANGES[change]
    apply(config, tensors)
    with pytest.raises(InvalidArgument, match=named):
        read_block_head(config, tensors, target_of(expected_in(folder)))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"xpress_rank": 9}, r"refiner_head\..* of shape .* as config.json says"),
        ({"xpress_rank": 0}, "refiner_rank"),
        ({"xpress_mlp_ratio": 3}, r"mlp_.* of shape"),
        ({"block_size": 6}, r"mix_l of shape \[6, 5, 5\]"),
        ({"num_jacobi_passes": -1}, "jacobi_passes"),
    ],
)
def test_a_refiner_that_does_not_fit_is_named(changed: dict[str, int], named: str) -> None:
    folder = FOLDER / "xpress"
    with pytest.raises(InvalidArgument, match=named):
        read_head(folder, target_of(expected_in(folder)), **changed)


def test_the_authors_layout_is_read_as_well() -> None:
    """z-lab's config.json: layers counted from 0, everything else beside the layers' fields."""
    folder = FOLDER / "dflash"
    config = json.loads((folder / "config.json").read_text())
    own = config["transformer_layer_config"] | {
        "architectures": ["DFlashDraftModel"], "block_size": config["block_size"],
        "dflash_config": {"mask_token_id": config["mask_token_id"], "target_layer_ids": [0, 2, 3]},
    }  # fmt: skip
    tensors, target = load_file(folder / "model.safetensors"), target_of(expected_in(folder))
    one, other = read_block_head(config, tensors, target), read_block_head(own, tensors, target)
    assert one.options == other.options
    assert one.config == other.config
    own["dflash_config"]["output_multiplier"] = 0.2
    with pytest.raises(InvalidArgument, match="output_multiplier"):
        read_block_head(own, tensors, target)
