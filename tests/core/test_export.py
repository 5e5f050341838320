"""Heads in the format of ``speculators``: what is trained here is what others load.

``tests/published/exports.py`` made the folders in ``tests/published/exported`` and says how.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import Head, HeadTarget
from paceline.models.heads.export import export_head
from paceline.models.heads.published import find_published, load_published
from paceline.models.llama import LlamaRunner
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from tests.core.test_published import FIXTURES, chained, mtp_target, target_of
from tests.core.test_published import PARALLEL as PEAGLE
from tests.core.test_published import VARIANTS as EAGLE3
from tests.heads import untrained
from tests.models.test_block_checkpoints import FOLDER as BLOCKS
from tests.models.test_block_checkpoints import NAMES as BLOCK_NAMES
from tests.models.test_block_checkpoints import expected_in
from tests.models.test_block_checkpoints import target_of as block_target
from tests.published.exports import CASES, EXPORTED, LENGTH, by_speculators, make_head, text_for


def load(folder: Path, target: HeadTarget) -> Head:
    """A published head that drafts in float32 by the same operations on every machine."""
    found = find_published(folder)
    assert found is not None
    return load_published(found, target)


def drafts(head: Head, features: Tensor, token_ids: Tensor, steps: int) -> Tensor:
    """Logits of every step from every place, fed the text.  # [steps, length, vocab_size]"""
    return chained(head, features, token_ids.tolist(), steps)


def assert_same_drafts(found: Tensor, wanted: Tensor) -> None:
    """# [steps, length, vocab_size], [steps, length, num_logits]; steps beyond the text are left
    out, and tokens that the head does not draft.
    """
    steps, length, count = wanted.shape
    if found.shape[-1] > count:
        found = found[..., found[0, 0].isfinite()]
    for step in range(steps):
        end = length - step
        torch.testing.assert_close(found[step, :end], wanted[step, :end], atol=2e-4, rtol=2e-4)


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts in float32: the kernels round weights to eight bits."""
    monkeypatch.setenv("PACELINE_KERNELS", "off")


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_an_exported_head_drafts_as_before(name: str, tmp_path: Path) -> None:
    head = make_head(name, tmp_path)
    export_head(head, tmp_path / "out")
    again = load(tmp_path / "out", head.target)
    own, other = dict(head.named_parameters()), dict(again.named_parameters())
    assert all(torch.equal(other[key], value) for key, value in own.items())
    features, token_ids = text_for(head)
    head.prepare()
    steps = again.max_depth or 3
    found = drafts(again, features, token_ids, steps)
    assert torch.equal(found, drafts(head, features, token_ids, steps))


@torch.no_grad()
def test_published_eagle3_trains_on_what_it_drafts(tmp_path: Path) -> None:
    """The training pass has the logits of the drafts from every place."""
    head: Any = make_head("eagle3", tmp_path)
    features, token_ids = text_for(head)
    passes = head(head.read(features)[None], token_ids[None], 3)
    head.prepare()
    found = drafts(head, features, token_ids, 3)
    for step, x in enumerate(passes):
        wanted = head.logits(x[0, step:])
        torch.testing.assert_close(found[step, : LENGTH - step], wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_an_exported_head_changes_no_token(name: str, tmp_path: Path) -> None:
    head = make_head(name, tmp_path)
    export_head(head, tmp_path / "out")
    folder = head.target.folder
    assert folder is not None
    runner = LlamaRunner(folder, kv_tokens=400)
    heads = HeadLibrary(tmp_path / "out", folder, runner)
    engine = Engine(ModelTarget(runner), heads=heads, eos_token_ids=())
    for temperature in (0.0, 0.9):
        params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=3)
        drafted, plain = (
            engine.generate([[5, 9, 33, 7], [8] * 12], params, SpeculationConfig(**chosen))
            for chosen in ({"method": head.kind, "length": "fixed"}, {"method": "ar"})
        )
        assert [s.output_ids for s in drafted] == [s.output_ids for s in plain]
        assert all(s.stats.num_drafted > 0 and not s.stats.drafter_lost for s in drafted)
    assert runner.num_free == runner.kv_capacity


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_speculators_computed_the_same_with_what_was_exported(name: str) -> None:
    expected = load_file(EXPORTED / name / "expected" / "logits.safetensors")
    parts = {k: v.float() for k, v in expected.items() if k in ("embedding", "lm_head")}
    head = load(EXPORTED / name, block_target(parts, num_layers=5))
    wanted = expected["logits"]
    found = drafts(head, expected["features"].float(), expected["token_ids"], len(wanted))
    assert_same_drafts(found, wanted)


@pytest.mark.usefixtures("no_kernels")
@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_speculators_loads_what_is_exported(name: str, tmp_path: Path) -> None:
    pytest.importorskip("speculators", reason="the reference, in an environment of its own")
    head = make_head(name, tmp_path)
    export_head(head, tmp_path / "out")
    features, token_ids = text_for(head)
    wanted = by_speculators(tmp_path / "out", features, token_ids)
    head.prepare()
    assert_same_drafts(drafts(head, features, token_ids, len(wanted)), wanted)


def values(folder: Path) -> dict[str, Tensor]:
    """What defines a published head, without the parts of the target."""
    of_target = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight")
    stored = load_file(folder / "model.safetensors")
    return {k: v.bfloat16() if v.dtype == torch.float32 else v for k, v in stored.items()
            if k not in of_target}  # fmt: skip


PUBLISHED = [*(FIXTURES / name for name in (*EAGLE3, *PEAGLE, "mtp"))]
PUBLISHED += [BLOCKS / name for name in BLOCK_NAMES]


@pytest.mark.parametrize("folder", PUBLISHED, ids=lambda folder: folder.name)
def test_a_published_head_is_written_as_it_was_read(folder: Path, tmp_path: Path) -> None:
    if folder.parent == BLOCKS:
        target = block_target(expected_in(folder))
        folder = Path(shutil.copytree(folder, tmp_path / "in"))
        (folder / "expected.safetensors").unlink()
    elif folder.name == "mtp":
        target = mtp_target(load_file(folder / "expected" / "logits.safetensors"))
    else:
        target = target_of()
    out = tmp_path / "out"
    export_head(load(folder, target), out, "org/name")
    before, after = values(folder), values(out)
    if "lm_head.weight" not in after:
        before.pop("lm_head.weight", None)
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    was, now = (json.loads((place / "config.json").read_text()) for place in (folder, out))
    same_for_all = {"speculators_version", "transformers_version", "target_hidden_size", "auto_map"}
    for key in was.keys() - same_for_all - {"speculators_config", "transformer_layer_config"}:
        assert now.get(key) == was[key] or key in ("dtype", "embed_requires_grad"), key
    inner = now["transformer_layer_config"]
    for key in ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "model_type"):
        assert inner[key] == was["transformer_layer_config"][key], key
    assert now["speculators_config"]["verifier"]["name_or_path"] == "org/name"


@pytest.mark.parametrize("name", CASES)
def test_the_config_has_what_vllm_checks(name: str, tmp_path: Path) -> None:
    """The fields that vLLM's ``SpeculatorsConfig`` needs, and those that decide what it runs."""
    head = make_head(name, tmp_path)
    export_head(head, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    methods = config["speculators_config"]["proposal_methods"]
    depth = {"eagle3": 5, "mtp": 3}.get(head.kind, head.max_depth)
    assert methods[0]["speculative_tokens"] == depth
    verifier = config["speculators_config"]["verifier"]
    assert verifier["name_or_path"] == str(head.target.folder)
    assert verifier["architectures"] == json.loads(
        (Path(verifier["name_or_path"]) / "config.json").read_text()
    )["architectures"]  # fmt: skip
    inner = config["transformer_layer_config"]
    assert inner["model_type"] in ("llama", "qwen3")
    assert inner["vocab_size"] == head.target.config.vocab_size
    if head.kind in ("peagle", "dflash", "dflash2", "dspark", "xpress"):
        assert config["mask_token_id"] == 63
    if head.kind == "peagle":
        assert config["draft_vocab_size"] == 64 and config["norm_before_residual"] is False


NOT_IN_VLLM = ("mtp", "xpress", "xpress_anchor")  # 0.32


@pytest.mark.parametrize("name", [name for name in CASES if name not in NOT_IN_VLLM])
def test_vllm_reads_the_config(name: str) -> None:
    vllm = pytest.importorskip("vllm.transformers_utils.configs.speculators.base")
    config = json.loads((EXPORTED / name / "config.json").read_text())
    read = vllm.SpeculatorsConfig.extract_vllm_speculative_config(config)
    methods = config["speculators_config"]["proposal_methods"]
    assert read["num_speculative_tokens"] == methods[0]["speculative_tokens"]
    assert vllm.SpeculatorsConfig.from_pretrained(str(EXPORTED / name)).architectures


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_other_layouts_are_refused(kind: str, tmp_path: Path, tiny_folder: Path) -> None:
    head = untrained(kind, HeadTarget.from_folder(tiny_folder))
    kinds = "dflash, dflash2, dspark, xpress, eagle3, peagle, mtp"
    with pytest.raises(InvalidArgument, match=kinds):
        export_head(head, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_mtp_layer_of_another_target_is_refused(tmp_path: Path, tiny_folder: Path) -> None:
    head: Any = untrained("mtp", HeadTarget.from_folder(tiny_folder))
    with pytest.raises(InvalidArgument, match="qwen3"):
        export_head(head, tmp_path / "out")
