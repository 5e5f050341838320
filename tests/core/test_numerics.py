"""A numerics fingerprint: what it depends on, and what it does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.bench.backends import without_kernels
from paceline.errors import InvalidArgument
from paceline.loading import load_engine, load_runner
from paceline.models.llama import LlamaRunner
from paceline.numerics import (
    Fingerprint,
    class_name,
    digest_files,
    digest_tensors,
    mismatch,
    torch_class,
)
from tests.modelzoo import make_model


@pytest.fixture(scope="module")
def folder(zoo: Path) -> Path:
    return make_model("llama_gqa", zoo)


def fingerprint(folder: Path, **options: Any) -> Fingerprint:
    return load_runner(folder, kv_tokens=64, **options).fingerprint


def changed(folder: Path, to: Path, **config: Any) -> Path:
    """A copy with other values in its config.json."""
    shutil.copytree(folder, to)
    file = to / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return to


def with_bit_flipped(folder: Path, to: Path, name: str) -> Path:
    """A copy with another lowest bit in the last number of one tensor."""
    shutil.copytree(folder, to)
    tensors = load_file(str(to / "model.safetensors"))
    tensors[name].view(-1)[-1:].view(torch.int32).bitwise_xor_(1)
    save_file(tensors, str(to / "model.safetensors"), {"format": "pt"})
    return to


def test_two_loads_have_the_same(folder: Path, tmp_path: Path) -> None:
    assert fingerprint(folder) == fingerprint(folder)
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert fingerprint(folder) == fingerprint(tmp_path / "elsewhere")


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
    ],
)
def test_one_bit_of_one_weight_counts(folder: Path, tmp_path: Path, name: str) -> None:
    before = fingerprint(folder)
    after = fingerprint(with_bit_flipped(folder, tmp_path / "other", name))
    assert len(before.differences(after)) == 1
    assert "the weights" in before.differences(after)[0]


def test_so_does_it_on_the_general_path(zoo: Path, tmp_path: Path) -> None:
    folder = make_model("gpt2", zoo)
    before = fingerprint(folder)
    assert before == fingerprint(folder)
    name = "transformer.h.1.ln_1.bias"
    assert fingerprint(with_bit_flipped(folder, tmp_path / "other", name)) != before
    assert "transformers" in before.numerics_class


@pytest.mark.parametrize(
    "config",
    [
        {"rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}},
        {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8},
    ],
    ids=["epsilon", "rope", "heads"],
)
def test_numbers_beside_the_weights_count(
    folder: Path, tmp_path: Path, config: dict[str, Any]
) -> None:
    """The shapes of all tensors stay."""
    assert load_runner(folder, kv_tokens=64).config.head_dim == 16  # type: ignore[attr-defined]
    other = fingerprint(changed(folder, tmp_path / "other", **config))
    assert other.weights != fingerprint(folder).weights


def test_windows_count(zoo: Path, tmp_path: Path) -> None:
    folder = make_model("mistral_sliding", zoo)
    other = changed(folder, tmp_path / "other", sliding_window=17)
    assert fingerprint(folder).weights != fingerprint(other).weights


def test_dtype_and_class_are_parts_of_it(folder: Path) -> None:
    single, half = fingerprint(folder), fingerprint(folder, dtype="float16")
    assert (single.dtype, half.dtype) == ("float32", "float16")
    with without_kernels():
        slow = fingerprint(folder)
        loose = fingerprint(folder, batch_invariant=False)
    assert slow.numerics_class.startswith(f"torch-{torch.__version__.partition('+')[0]}-")
    assert slow.numerics_class.endswith("-rows")
    assert slow.numerics_class == f"{loose.numerics_class}-rows"
    # The layout that the kernels want does not change what the weights are.
    assert slow.weights == loose.weights == single.weights
    assert len(single.differences(slow)) == 1
    assert "the numerics class" in single.differences(slow)[0]
    general = fingerprint(folder, general=True)
    assert "-transformers-" in general.numerics_class


def test_how_a_checkpoint_is_cut_into_files_does_not_count(folder: Path, zoo: Path) -> None:
    assert fingerprint(make_model("llama_sharded", zoo)) == fingerprint(folder)


def test_portable_is_a_class_of_its_own(folder: Path, zoo: Path) -> None:
    portable = fingerprint(folder, numerics="portable")
    assert portable.numerics_class == "portable"
    # bfloat16 numbers are what matrix tiles take, where there are some.
    bfloat16 = make_model("llama", zoo, dtype="bfloat16")
    wanted = fingerprint(bfloat16, numerics="portable")
    fastest = fingerprint(bfloat16)
    assert wanted.numerics_class == "portable"
    assert fastest.numerics_class in ("portable", "amx")
    assert fastest.weights == wanted.weights


def test_portable_is_refused_where_there_is_none(folder: Path, zoo: Path) -> None:
    with pytest.raises(InvalidArgument, match="fastest, portable"):
        load_runner(folder, numerics="exact")
    for options in ({"general": True}, {"dtype": "float16"}):
        with pytest.raises(InvalidArgument, match="the C kernels alone") as caught:
            load_runner(folder, numerics="portable", **options)  # type: ignore[arg-type]
        assert caught.value.field == "numerics"
    with without_kernels(), pytest.raises(InvalidArgument, match="class torch-"):
        load_engine(folder, numerics="portable")
    with pytest.raises(InvalidArgument, match="'gpt2' runs in transformers"):
        load_runner(make_model("gpt2", zoo), numerics="portable")


def test_as_text_and_back(folder: Path) -> None:
    for numerics_class in ("portable", "torch-2.13.0-avx512-rows", class_name("vLLM", "0.3+x y")):
        value = Fingerprint(
            numerics_class=numerics_class, dtype="bfloat16", kernel_version=12, weights=16 * "0f"
        )
        assert str(value) == f"{numerics_class}-bfloat16-k12-{16 * '0f'}"
        assert Fingerprint.parse(str(value)) == value
    own = fingerprint(folder)
    assert Fingerprint.parse(str(own)) == own
    text = str(own)
    for bad in ("", "portable", text[:-1], text + "0", text.upper(), "-" + text[8:], text + "\n"):
        with pytest.raises(InvalidArgument, match="CLASS-DTYPE-kVERSION-DIGEST"):
            Fingerprint.parse(bad)
    assert Fingerprint.parse(f"{torch_class(torch.device('cpu'))}-float32-k1-{32 * 'a'}")


def test_the_error_names_what_differs() -> None:
    one = Fingerprint(
        numerics_class="portable", dtype="float32", kernel_version=1, weights=32 * "0"
    )
    two = Fingerprint(numerics_class="amx", dtype="float32", kernel_version=2, weights=32 * "0")
    error = mismatch("they are of", one, two, "do this")
    assert (error.expected, error.actual) == (str(one), str(two))
    assert "the numerics class (portable, here amx)" in str(error)
    assert "the kernel version (1, here 2)" in str(error)
    assert "dtype" not in str(error)
    assert str(error).endswith("do this")


def test_digests_tell_tensors_apart() -> None:
    ones = torch.ones(2, 3)
    digest = digest_tensors([("a", ones)], {"n": 1})
    assert digest == digest_tensors([("a", ones.clone().t().contiguous().t())], {"n": 1})
    for other in (
        digest_tensors([("b", ones)], {"n": 1}),
        digest_tensors([("a", ones.view(3, 2))], {"n": 1}),
        digest_tensors([("a", ones.view(torch.int32))], {"n": 1}),
        digest_tensors([("a", ones)], {"n": 2}),
        digest_tensors([("a", ones), ("c", torch.empty(0))], {"n": 1}),
    ):
        assert other != digest
    # Longer than a piece: every piece counts, and their order.
    long = torch.arange(10_000_000, dtype=torch.float32)
    whole = digest_tensors([("a", long)], {})
    assert whole == digest_tensors([("a", long)], {})
    assert whole != digest_tensors([("a", long.roll(1 << 22))], {})


def test_digests_of_files(tmp_path: Path) -> None:
    one, two = tmp_path / "1", tmp_path / "2"
    one.write_bytes(b"a" * 20_000_000)
    two.write_bytes(b"b")
    digest = digest_files([one, two])
    assert digest == digest_files([one, two])
    with one.open("r+b") as file:
        file.seek(18_000_000)
        file.write(b"b")
    assert digest != digest_files([one, two])


def test_it_is_read_once(folder: Path) -> None:
    runner = load_runner(folder, kv_tokens=64)
    assert isinstance(runner, LlamaRunner)
    assert runner.fingerprint is runner.fingerprint
