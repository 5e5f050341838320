"""The fast path computes what transformers computes, and says what is wrong with a folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.loading import load_runner
from paceline.models.base import Segment
from paceline.models.llama import LlamaRunner
from paceline.models.transformers import TransformersRunner
from tests.core.runners import load_runner_without_kernels
from tests.modelzoo import FAST_PATH_KINDS, VOCAB_SIZE, make_model

IDS = np.random.default_rng(0).integers(0, VOCAB_SIZE, 120)


def ours(runner: LlamaRunner, ids: np.ndarray) -> torch.Tensor:
    sequence = runner.new_sequence()
    logits = runner.forward([Segment(sequence, ids)]).logits
    runner.free(sequence)
    return logits


def theirs(folder: Path, ids: np.ndarray, dtype: str = "float32") -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager"
    ).eval()  # not all of transformers' attentions cap their scores
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=torch.tensor(ids)[None], use_cache=False).logits
    return logits[0].float()


def assert_close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("kind", FAST_PATH_KINDS)
def test_every_kind(kind: str, zoo: Path) -> None:
    folder = make_model(kind, zoo)
    expected = theirs(folder, IDS)
    assert expected.std() > 0.5  # not trivially close
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    assert_close(ours(LlamaRunner(folder), IDS), expected, tolerance)
    assert_close(ours(load_runner_without_kernels(folder), IDS), expected, tolerance)


@pytest.mark.parametrize("folder", [TARGET_DIR, DRAFTER_DIR], ids=["target", "drafter"])
def test_the_demo_pair(folder: Path) -> None:
    assert_close(ours(LlamaRunner(folder), IDS), theirs(folder, IDS), 2e-4)


@pytest.mark.one_of(1, slow=4)  # all kinds in float32, above
@pytest.mark.parametrize("kind", FAST_PATH_KINDS)
@pytest.mark.parametrize("kernels", [True, False])
def test_bfloat16(kind: str, kernels: bool, zoo: Path) -> None:
    """Rounding to 8 bits after every operation: both differ from float32 by about as much."""
    folder = make_model(kind, zoo)
    exact = ours(LlamaRunner(folder), IDS)
    load = LlamaRunner if kernels else load_runner_without_kernels
    rounded = ours(load(folder, dtype=torch.bfloat16), IDS)
    error = (rounded - exact).pow(2).mean().sqrt()
    reference_error = (theirs(folder, IDS, "bfloat16") - exact).pow(2).mean().sqrt()
    assert 0 < error < 2 * reference_error
    assert reference_error < 0.3 * exact.std()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_stored_in_half_precision(dtype: str, zoo: Path) -> None:
    folder = make_model("llama_gqa", zoo, dtype=dtype)
    assert_close(ours(LlamaRunner(folder), IDS), theirs(folder, IDS), 1e-4)


def test_computing_in_float16(zoo: Path) -> None:
    """No kernels for it: the plain torch version takes over by itself."""
    folder = make_model("llama_gqa", zoo)
    runner = load_runner(folder, dtype="float16", general=False)
    assert isinstance(runner, LlamaRunner)
    exact = ours(LlamaRunner(folder), IDS)
    assert (ours(runner, IDS) - exact).abs().max() < 0.05 * exact.std()


HEADS = "num_attention_heads", "num_key_value_heads"


@pytest.mark.parametrize(
    "sizes",
    [
        {"head_dim": 24, "hidden_size": 72, HEADS[0]: 3, HEADS[1]: 1},
        {"head_dim": 6, "hidden_size": 52, "intermediate_size": 38, "vocab_size": 259},
        {"head_dim": 2, "hidden_size": 36, "intermediate_size": 2},
        {"head_dim": 256, HEADS[0]: 2, HEADS[1]: 2},
        {"num_hidden_layers": 1, "vocab_size": 300},
        {"rms_norm_eps": 1e-2},
    ],
    ids=str,
)
def test_unusual_sizes(sizes: dict[str, int], zoo: Path) -> None:
    folder = make_model("llama", zoo, **sizes)
    expected = theirs(folder, IDS)
    tolerance = 1e-4 * max(1.0, float(expected.std()))  # as above
    assert_close(ours(load_runner(folder), IDS), expected, tolerance)
    assert_close(ours(load_runner_without_kernels(folder), IDS), expected, tolerance)


@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 63, "intermediate_size": 31, "head_dim": 10, HEADS[0]: 3, HEADS[1]: 3},
        {"head_dim": 258, HEADS[0]: 2, HEADS[1]: 2},
    ],
    ids=["odd", "wide"],
)
def test_sizes_that_the_kernels_do_not_take(sizes: dict[str, int], zoo: Path) -> None:
    """Plain torch takes over, without a warning: nothing is missing on this machine."""
    folder = make_model("llama", zoo, **sizes)
    assert_close(ours(LlamaRunner(folder), IDS), theirs(folder, IDS), 1e-4)


@pytest.mark.parametrize("window", [1, 2, 7, 119, 120, 121])
def test_sliding_windows(window: int, zoo: Path) -> None:
    folder = make_model("mistral_sliding", zoo, sliding_window=window)
    assert_close(ours(LlamaRunner(folder), IDS), theirs(folder, IDS), 1e-4)


@pytest.mark.parametrize("legacy", [False, True])
def test_qwen2_slides_only_the_upper_layers(legacy: bool, zoo: Path, tmp_path: Path) -> None:
    folder = make_model(
        "qwen2", zoo, use_sliding_window=True, sliding_window=9, max_window_layers=1
    )
    if legacy:  # checkpoints from before `layer_types`
        folder = Path(shutil.copytree(folder, tmp_path / "legacy"))
        edit_config(folder, lambda config: config.pop("layer_types"))
    expected = theirs(folder, IDS)
    assert_close(ours(LlamaRunner(folder), IDS), expected, 1e-4)
    full = ours(LlamaRunner(make_model("qwen2", zoo)), IDS)
    assert not torch.allclose(full, expected, atol=1e-2)


def test_the_number_of_parameters(zoo: Path) -> None:
    for kind in ("llama", "llama_tied", "qwen3", "llama_bias"):
        folder = make_model(kind, zoo)
        stored = load_file(folder / "model.safetensors")
        assert LlamaRunner(folder).num_parameters == sum(t.numel() for t in stored.values())


def test_the_fast_path_is_taken_where_it_can(zoo: Path) -> None:
    assert isinstance(load_runner(make_model("qwen3", zoo)), LlamaRunner)
    assert isinstance(load_runner(make_model("gpt2", zoo)), TransformersRunner)
    assert isinstance(load_runner(make_model("qwen3", zoo), general=True), TransformersRunner)


# --- what is wrong with a folder -----------------------------------------------------------------


def edit_config(folder: Path, change: Callable[[dict], object]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1000])


DAMAGES: dict[str, tuple[Callable[[Path], object], type[Exception], tuple[str, ...]]] = {
    "no folder": (shutil.rmtree, ModelNotFound, ("does not exist",)),
    "no config": (lambda f: (f / "config.json").unlink(), ModelNotFound, ("config.json",)),
    "broken config": (
        lambda f: (f / "config.json").write_text("{"), ModelNotFound, ("config.json", "JSON"),
    ),
    "config is a list": (
        lambda f: (f / "config.json").write_text("[1]"), ModelNotFound, ("config.json",),
    ),
    "missing key": (
        lambda f: edit_config(f, lambda c: c.pop("num_hidden_layers")),
        ModelNotFound, ("num_hidden_layers",),
    ),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(), ModelNotFound, ("model.safetensors",),
    ),
    "truncated weights": (
        lambda f: cut(f / "model.safetensors"), ModelNotFound, ("model.safetensors", "damaged"),
    ),
    "empty weights": (
        lambda f: (f / "model.safetensors").write_bytes(b""), ModelNotFound, ("damaged",),
    ),
    "missing tensor": (
        lambda f: edit_weights(f, lambda t: t.pop("model.layers.1.mlp.up_proj.weight")),
        ModelNotFound, ("model.layers.1.mlp.up_proj.weight",),
    ),
    "wrong shape": (
        lambda f: edit_weights(f, lambda t: t.update({"model.norm.weight": torch.ones(5)})),
        ModelNotFound, ("model.norm.weight", "(5,)", "(64,)"),
    ),
    "unknown rope": (
        lambda f: edit_config(f, lambda c: c.update(rope_parameters={"rope_type": "wavy"})),
        InvalidArgument, ("rope_type", "wavy", "llama3"),
    ),
    "unknown activation": (
        lambda f: edit_config(f, lambda c: c.update(hidden_act="gelu")),
        InvalidArgument, ("hidden_act", "gelu", "silu"),
    ),
    "another model type": (
        lambda f: edit_config(f, lambda c: c.update(model_type="gpt2")),
        InvalidArgument, ("model_type", "gpt2", "llama"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_folder_is_named(damage: str, zoo: Path, tmp_path: Path) -> None:
    change, error, parts = DAMAGES[damage]
    folder = Path(shutil.copytree(make_model("llama_gqa", zoo), tmp_path / "model"))
    change(folder)
    with pytest.raises(error) as info:
        LlamaRunner(folder)
    for part in parts:
        assert part in str(info.value)


def test_a_missing_shard_is_named(zoo: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(make_model("llama_sharded", zoo), tmp_path / "model"))
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelNotFound, match=shard.name):
        LlamaRunner(folder)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"dtype": "float8"}, "dtype"),
        ({"device": "tpu"}, "device"),
        ({"kv_tokens": -5}, "kv_tokens"),
        ({"kv_tokens": 0}, "kv_tokens"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, object], name: str, zoo: Path) -> None:
    with pytest.raises(InvalidArgument) as info:
        load_runner(make_model("llama_gqa", zoo), **options)
    assert info.value.field == name


def test_a_forward_beyond_the_context_takes_nothing(zoo: Path) -> None:
    runner = LlamaRunner(
        make_model("llama_gqa", zoo, num_hidden_layers=2, max_position_embeddings=64)
    )
    for parents in (None, np.array([-1, -1, *range(1, 65)], np.int32)):
        sequence = runner.new_sequence()
        with pytest.raises((InvalidArgument, RuntimeError), match="context"):
            runner.forward([Segment(sequence, np.zeros(66, np.int64), parents)])
        runner.free(sequence)
        assert runner.num_free == runner.kv_capacity
