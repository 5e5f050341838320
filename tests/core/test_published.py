"""Published drafters: their logits are those of their authors' code, their drafts change nothing.

``tests/published/make_fixtures.py`` made the checkpoints with ``speculators`` and says how.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.model_list import list_models
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import Head, HeadTarget
from paceline.models.heads.peagle import PEagle
from paceline.models.heads.published import (
    find_published,
    load_published,
    mtp_layer_in,
    published_in,
)
from paceline.models.llama import LlamaRunner
from paceline.models.llama_config import LlamaConfig
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from tests.core.engines import Reference
from tests.heads import untrained
from tests.modelzoo import make_model

FIXTURES = Path(__file__).parents[1] / "published" / "fixtures"
VARIANTS = ("plain", "reduced", "norms")  # EAGLE-3
PARALLEL = ("parallel", "parallel_reduced")  # P-EAGLE
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SIZE, VOCAB = 32, 96


def target_of(**changes: Any) -> HeadTarget:
    """A target with the sizes of the fixtures."""
    raw = {
        "model_type": "llama", "hidden_size": SIZE, "intermediate_size": 48, "vocab_size": VOCAB,
        "num_attention_heads": 4, "num_hidden_layers": 4, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6, **changes,
    }  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    rows = raw["vocab_size"], raw["hidden_size"]
    embedding, lm_head = (0.2 * torch.randn(rows, generator=generator) for _ in range(2))
    return HeadTarget("0", LlamaConfig.from_dict(raw), embedding, lm_head)


def load(folder: Path, target: HeadTarget | None = None) -> Head:
    found = find_published(folder)
    assert found is not None
    return load_published(found, target or target_of())


def chained(head: Head, features: Tensor, token_ids: list[int], steps: int) -> Tensor:
    """Logits of every step from every place; a place is a round that accepts one token.

    # [steps, length, vocab_size]
    """
    state, rows = head.new_state(), []
    for place in range(len(token_ids)):
        of_place = [head.root([state], [features[place : place + 1]], [[token_ids[place]]])]
        for step in range(1, steps):
            if place + step == len(token_ids):
                break
            # A sibling with another token, which the node must not see.
            wrong, right = (2 * step - 2, 1), (2 * step - 1, token_ids[place + step])
            parent = 2 * step - 3 if step > 1 else -1
            of_place.append(head.expand([state], [[(*wrong, parent), (*right, parent)]])[1:])
        of_place += [torch.zeros_like(of_place[0])] * (steps - len(of_place))
        rows.append(torch.cat(of_place))
    return torch.stack(rows, 1)


# --- parity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", VARIANTS + PARALLEL)
@torch.no_grad()
def test_eagle3_and_peagle_have_the_logits_of_speculators(name: str) -> None:
    expected = load_file(FIXTURES / name / "expected" / "logits.safetensors")
    head = load(FIXTURES / name)
    token_ids, wanted = expected["token_ids"].tolist(), expected["logits"]
    found = chained(head, expected["features"], token_ids, len(wanted))
    d2t = load_file(FIXTURES / name / "model.safetensors").get("d2t")
    if d2t is not None:
        can = torch.arange(len(d2t)) + d2t
        assert torch.isneginf(found[0]).sum(1).eq(VOCAB - len(can)).all()
        found = found[..., can]
    for step in range(len(wanted)):
        end = len(token_ids) - step
        torch.testing.assert_close(found[step, :end], wanted[step, :end], **CLOSE)


@torch.no_grad()
def test_what_transformers_has_as_a_default_may_be_missing(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURES / "plain", tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text())
    for key in ("rms_norm_eps", "attention_bias", "rope_parameters", "tie_word_embeddings"):
        del config["transformer_layer_config"][key]
    (folder / "config.json").write_text(json.dumps(config))
    expected = load_file(folder / "expected" / "logits.safetensors")
    found = chained(load(folder), expected["features"], expected["token_ids"].tolist(), 1)
    torch.testing.assert_close(found[0], expected["logits"][0], **CLOSE)


def mtp_target(expected: dict[str, Tensor]) -> HeadTarget:
    """The target whose parts the MTP layer's reference had."""
    return replace(target_of(), embedding=expected["embedding"], lm_head=expected["lm_head"])


@torch.no_grad()
def test_mtp_has_the_logits_of_speculators() -> None:
    expected = load_file(FIXTURES / "mtp" / "expected" / "logits.safetensors")
    head = load(FIXTURES / "mtp", mtp_target(expected))
    token_ids, wanted = expected["token_ids"].tolist(), expected["logits"]
    found = chained(head, expected["features"], token_ids, len(wanted))
    for step in range(len(wanted)):
        end = len(token_ids) - step
        torch.testing.assert_close(found[step, :end], wanted[step, :end], **CLOSE)


@torch.no_grad()
def test_mtp_trains_on_the_steps_of_speculators() -> None:
    expected = load_file(FIXTURES / "mtp" / "expected" / "logits.safetensors")
    head = load(FIXTURES / "mtp", mtp_target(expected))
    steps, length, _ = expected["trained"].shape
    drafted = head(expected["features"][None, :length], expected["token_ids"][None], steps)
    found = torch.stack([head.logits(x)[0] for x in drafted])  # type: ignore[operator]
    torch.testing.assert_close(found, expected["trained"], **CLOSE)


@pytest.mark.parametrize("name", PARALLEL)
@torch.no_grad()
def test_peagle_trains_on_what_it_drafts(name: str) -> None:
    """The training pass has the logits of the drafts from every place."""
    expected = load_file(FIXTURES / name / "expected" / "logits.safetensors")
    head, wanted = load(FIXTURES / name), expected["logits"]
    assert isinstance(head, PEagle)
    count = len(expected["token_ids"])
    anchors, depths = head.masks(count, torch.Generator().manual_seed(1))
    x = head(expected["features"][None], expected["token_ids"][None], anchors, depths)[0]
    d2t = load_file(FIXTURES / name / "model.safetensors").get("d2t")
    can = torch.arange(VOCAB) if d2t is None else torch.arange(len(d2t)) + d2t
    found = head.logits(x)[:, can]
    torch.testing.assert_close(found[:count], wanted[0], **CLOSE)
    torch.testing.assert_close(found[count:], wanted[depths, anchors], **CLOSE)
    assert 0 < int((depths == 2).sum()) < int((depths == 1).sum()) < count


@pytest.mark.parametrize("name", VARIANTS + PARALLEL)
@torch.no_grad()
def test_a_prefill_equals_its_places_one_by_one(name: str) -> None:
    expected = load_file(FIXTURES / name / "expected" / "logits.safetensors")
    head, token_ids = load(FIXTURES / name), expected["token_ids"].tolist()
    whole = head.root([head.new_state()], [expected["features"]], [token_ids])
    one_by_one = chained(head, expected["features"], token_ids, 1)[0, -1:]
    torch.testing.assert_close(whole, one_by_one, **CLOSE)


def random_tensors(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        name: 0.3 * torch.randn(shape) + float("norm" in name) for name, shape in shapes.items()
    }


def layer_shapes(size: int, ffn: int, inputs: int, kv: int, prefix: str) -> dict[str, Any]:
    """Of a decoder layer in Llama's names, without its first norm."""
    return {
        f"{prefix}self_attn.q_proj.weight": (size, inputs),
        f"{prefix}self_attn.k_proj.weight": (kv, inputs),
        f"{prefix}self_attn.v_proj.weight": (kv, inputs),
        f"{prefix}self_attn.o_proj.weight": (size, size),
        f"{prefix}mlp.gate_proj.weight": (ffn, size),
        f"{prefix}mlp.up_proj.weight": (ffn, size),
        f"{prefix}mlp.down_proj.weight": (size, ffn),
        f"{prefix}post_attention_layernorm.weight": (size,),
    }


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], file: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file(tensors, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


def llama(size: int = SIZE, vocab: int = VOCAB, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": size,
        "intermediate_size": 48, "vocab_size": vocab, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_hidden_layers": 1, "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5, **changes,
    }  # fmt: skip


def eagle(folder: Path, size: int = SIZE, vocab: int = VOCAB) -> Path:
    """SafeAILab's layout of EAGLE, in its pickle."""
    shapes = {
        "embed_tokens.weight": (vocab, size), "fc.weight": (size, 2 * size), "fc.bias": (size,),
        **layer_shapes(size, 48, size, size // 2, "layers.0."),
    }  # fmt: skip
    tensors = random_tensors(shapes)
    return write(folder, llama(size, vocab), tensors, "pytorch_model.bin")


def eagle3(folder: Path, size: int = SIZE, vocab: int = VOCAB) -> Path:
    """SafeAILab's layout of EAGLE-3."""
    shapes = {
        "fc.weight": (size, 3 * size), "norm.weight": (size,), "lm_head.weight": (vocab // 2, size),
        "midlayer.hidden_norm.weight": (size,), "midlayer.input_layernorm.weight": (size,),
        **layer_shapes(size, 48, 2 * size, size // 2, "midlayer."),
    }  # fmt: skip
    tensors = random_tensors(shapes)
    tensors["d2t"] = torch.arange(vocab // 2)  # every second token
    tensors["t2d"] = torch.arange(vocab) % 2 == 0
    config = llama(size, vocab, architectures=["LlamaForCausalLMEagle3"])
    config |= {"draft_vocab_size": vocab // 2, "eagle_aux_hidden_state_layer_ids": [1, 1, 2]}
    return write(folder, config, tensors, "model.safetensors")


def medusa(folder: Path, size: int = SIZE, vocab: int = VOCAB) -> Path:
    """Two blocks for each of three heads."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        for j in range(2):
            shapes |= {f"{i}.{j}.linear.weight": (size, size), f"{i}.{j}.linear.bias": (size,)}
        shapes[f"{i}.2.weight"] = (vocab, size)
    config = {"medusa_num_heads": 3, "medusa_num_layers": 2, "base_model_name_or_path": "x"}
    return write(folder, config, random_tensors(shapes), "medusa_lm_head.pt")


def hydra(folder: Path, size: int = SIZE, vocab: int = VOCAB) -> Path:
    """Two blocks for each of three heads."""
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(3):
        for part in ("linear", "res_connection"):
            name = f"hydra_mlp.{i}.1.{part}"
            shapes |= {f"{name}.weight": (size, (i + 2) * size), f"{name}.bias": (size,)}
        name = f"hydra_mlp.{i}.3.linear"
        shapes |= {f"{name}.weight": (size, size), f"{name}.bias": (size,)}
        shapes |= {
            f"hydra_lm_head.{i}.1.weight": (vocab, size),
            f"hydra_lm_head.{i}.1.bias": (vocab,),
        }
    config = {"hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "mlp"}
    return write(folder, config, random_tensors(shapes), "hydra_lm_head.pt")


MAKERS: dict[str, Callable[..., Path]] = {
    "eagle": eagle, "eagle3": eagle3, "medusa": medusa, "hydra": hydra,
}  # fmt: skip


def reference_eagle(tensors: dict[str, Tensor], x: Tensor, embedded: Tensor) -> Tensor:
    """The paper's layer over whole texts.  # 2 x [length, SIZE] -> [length, SIZE]"""
    t = {name.removeprefix("layers.0."): value for name, value in tensors.items()}
    x = F.linear(torch.cat([embedded, x], -1), t["fc.weight"], t["fc.bias"])
    length, dim = len(x), SIZE // 4

    def rotated(heads: Tensor) -> Tensor:
        angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        turned = torch.polar(torch.ones_like(angles), angles)[:, None]
        pairs = torch.complex(*heads.chunk(2, -1)) * turned
        return torch.cat([pairs.real, pairs.imag], -1)

    q, k, v = (F.linear(x, t[f"self_attn.{n}_proj.weight"]).view(length, -1, dim) for n in "qkv")
    q, k, v = rotated(q), rotated(k).repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) / dim**0.5
    scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    x = x + F.linear(mixed, t["self_attn.o_proj.weight"])
    y = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
    y = y * t["post_attention_layernorm.weight"]
    gate = F.silu(F.linear(y, t["mlp.gate_proj.weight"])) * F.linear(y, t["mlp.up_proj.weight"])
    return x + F.linear(gate, t["mlp.down_proj.weight"])


@torch.no_grad()
def test_eagle_has_the_logits_of_the_papers_layer(tmp_path: Path) -> None:
    folder, target = eagle(tmp_path / "e"), target_of()
    tensors = torch.load(folder / "pytorch_model.bin", weights_only=True)
    features, token_ids = torch.randn(6, SIZE), [3, 1, 4, 1, 5, 9]
    found = chained(load(folder, target), features, token_ids, 3)
    embedded = tensors["embed_tokens.weight"][token_ids]
    for place in range(4):
        rows = features[: place + 1]
        for step in range(3):
            drafted = reference_eagle(tensors, rows, embedded[: place + 1 + step])
            expected = drafted[-1] @ target.lm_head.T
            torch.testing.assert_close(found[step, place], expected, **CLOSE)
            rows = torch.cat([rows, drafted[-1:]])


@torch.no_grad()
def test_medusa_has_the_logits_of_its_authors(tmp_path: Path) -> None:
    folder, x = medusa(tmp_path / "m"), torch.randn(1, SIZE)
    t = torch.load(folder / "medusa_lm_head.pt", weights_only=True)
    head = load(folder)
    found = head.guesses(x)  # type: ignore[operator]
    for i, logits in enumerate(found):
        y = x
        for j in range(2):
            y = y + F.silu(y @ t[f"{i}.{j}.linear.weight"].T + t[f"{i}.{j}.linear.bias"])
        torch.testing.assert_close(logits, y @ t[f"{i}.2.weight"].T, **CLOSE)


@torch.no_grad()
def test_hydra_has_the_logits_of_its_authors(tmp_path: Path) -> None:
    folder, target, x = hydra(tmp_path / "h"), target_of(), torch.randn(1, SIZE)
    t = torch.load(folder / "hydra_lm_head.pt", weights_only=True)
    found = chained(load(folder, target), x, [7], 1)[0]
    head, state, tokens = load(folder, target), None, [7, 8, 9]
    state = head.new_state()
    found = [head.root([state], [x], [tokens[:1]])]
    found += [head.expand([state], [[(i, tokens[i + 1], i - 1)]]) for i in range(2)]
    for i, logits in enumerate(found):
        y = torch.cat([x[0], *target.embedding[tokens[: i + 1]]])
        block = f"hydra_mlp.{i}.1."

        def linear(name: str, y: Tensor) -> Tensor:
            return t[f"{name}.weight"] @ y + t[f"{name}.bias"]

        y = linear(block + "res_connection", y) + F.silu(linear(block + "linear", y))
        y = y + F.silu(linear(f"hydra_mlp.{i}.3.linear", y))
        torch.testing.assert_close(logits[0], linear(f"hydra_lm_head.{i}.1", y), **CLOSE)


# --- drafting -------------------------------------------------------------------------------------

METHODS = {
    "eagle": ("chain", "kary"), "eagle2": (None,), "eagle3": ("chain", "kary"),
    "medusa": ("chain", "kary"), "hydra": ("chain", "kary"),
}  # fmt: skip


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("method", METHODS)
def test_tokens_are_those_of_ar(method: str, tmp_path: Path, zoo: Path) -> None:
    folder = make_model("llama_gqa", zoo, num_hidden_layers=2)
    config = json.loads((folder / "config.json").read_text())
    kind = method.rstrip("2")
    MAKERS[kind](tmp_path / "any-name", config["hidden_size"], config["vocab_size"])
    runner, reference = LlamaRunner(folder, kv_tokens=2000), Reference(folder)
    engine = Engine(ModelTarget(runner), heads=HeadLibrary(tmp_path, folder, runner))
    prompts = [list(b"a first prompt"), list(b"ab")]
    for shape in METHODS[method]:
        chosen = {} if shape is None else {"shape": shape}
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature)
            speculation = SpeculationConfig(method=method, length="fixed", **chosen)
            sessions = engine.generate(prompts, params, speculation)
            for prompt, session in zip(prompts, sessions, strict=True):
                assert session.output_ids == reference(prompt, params)
                assert session.stats.num_drafted > 0 and not session.stats.drafter_lost
    assert runner.num_free == runner.kv_capacity


def test_an_mtp_layer_in_the_targets_checkpoint_drafts(tmp_path: Path) -> None:
    """Its tensors are stored under Qwen3-Next's names; without them the target is the same."""
    folder = make_model("qwen3", tmp_path, num_hidden_layers=2)
    plain = Reference(folder)
    prompt, params = list(b"a prompt"), SamplingParams(max_tokens=24, ignore_eos=True)
    wanted = plain(prompt, params)
    head = untrained("mtp", HeadTarget.from_folder(folder), noise=0.2)
    tensors = load_file(folder / "model.safetensors")
    inside = {f"mtp.{name}": value.clone() for name, value in head.state_dict().items()}
    assert "mtp.pre_fc_norm_hidden.weight" in inside and "mtp.layers.0.mlp.up_proj.weight" in inside
    save_file(tensors | inside, folder / "model.safetensors", {"format": "pt"})
    runner = LlamaRunner(folder, kv_tokens=400)
    engine = Engine(ModelTarget(runner), heads=HeadLibrary(folder / "heads", folder, runner))
    config = SpeculationConfig(method="mtp", length="fixed")
    (session,) = engine.generate([prompt], params, config)
    assert session.output_ids == wanted
    assert session.stats.num_drafted > 0 and not session.stats.drafter_lost
    found = mtp_layer_in(folder)
    assert found is not None
    loaded = load_published(found, HeadTarget.from_folder(folder))
    assert all(torch.equal(loaded.state_dict()[k], v) for k, v in head.state_dict().items())


def test_a_folder_may_be_the_drafter_itself(tmp_path: Path) -> None:
    eagle3(tmp_path / "head")
    assert [found.kind for found in published_in(tmp_path / "head")] == ["eagle3"]
    medusa(tmp_path / "other")
    assert [found.kind for found in published_in(tmp_path)] == ["eagle3", "medusa"]


def test_the_list_of_models_says_what_fits(tmp_path: Path) -> None:
    demo = json.loads((TARGET_DIR / "config.json").read_text())
    eagle3(tmp_path / "fits", demo["hidden_size"], demo["vocab_size"])
    eagle(tmp_path / "small", 32, demo["vocab_size"])
    found = {entry.path: entry for entry in list_models(tmp_path)}
    assert found[tmp_path / "fits"].model_type == "eagle3 head"
    assert "demo" in found[tmp_path / "fits"].fits
    reason = f"demo: hidden_size 32, the target's is {demo['hidden_size']}"
    assert reason in found[tmp_path / "small"].misfits


def test_load_engine_takes_the_folder_of_a_drafter(tmp_path: Path) -> None:
    demo = json.loads((TARGET_DIR / "config.json").read_text())
    medusa(tmp_path / "m", demo["hidden_size"], demo["vocab_size"])
    engine = load_engine(heads=tmp_path / "m")
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    plain, drafted = (
        engine.generate([[1, 2, 3]], params, SpeculationConfig(method=method, length="fixed"))[0]
        for method in ("ar", "medusa")
    )
    assert drafted.output_ids == plain.output_ids and drafted.stats.num_drafted > 0


# --- refusals -------------------------------------------------------------------------------------


def refused(folder: Path, target: HeadTarget | None = None) -> str:
    with pytest.raises(InvalidArgument) as error:
        load(folder, target)
    return str(error.value)


def changed(folder: Path, **changes: Any) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return folder


def test_refusals_say_what_was_found_and_expected(tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(FIXTURES / "reduced", folder)
    assert "hidden_size 32" in refused(folder, target_of(hidden_size=64))
    assert "vocab_size 96" in refused(folder, target_of(vocab_size=100))
    assert "[1, 2, 4]" in refused(folder, target_of(num_hidden_layers=3))
    assert "target_hidden_size 64" in refused(changed(folder, target_hidden_size=64))
    tensors = load_file(folder / "model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "fc.weight"}, folder / "model.safetensors")
    changed(folder, target_hidden_size=None)
    assert "without fc.weight" in refused(folder)
    save_file({**tensors, "extra": torch.zeros(1)}, folder / "model.safetensors")
    assert "with extra" in refused(folder)
    save_file({**tensors, "d2t": tensors["d2t"] + 1}, folder / "model.safetensors")
    assert "d2t" in refused(folder)
    assert "kind unheard" in refused(changed(folder, speculators_model_type="unheard"))


def test_what_peagle_and_mtp_lack_is_named(tmp_path: Path) -> None:
    parallel = Path(shutil.copytree(FIXTURES / "parallel", tmp_path / "parallel"))
    changed(parallel, mask_token_id=None)
    assert "without mask_token_id" in refused(parallel)
    changed(parallel, mask_token_id=VOCAB)
    assert "mask_token" in refused(parallel)
    layer = Path(shutil.copytree(FIXTURES / "mtp", tmp_path / "mtp"))
    config = json.loads((layer / "config.json").read_text())["transformer_layer_config"]
    changed(layer, transformer_layer_config=config | {"model_type": "qwen3_next"})
    assert "an MTP layer of model_type qwen3_next" in refused(layer)
    tensors = load_file(layer / "model.safetensors")
    changed(layer, transformer_layer_config=config)
    del tensors["mtp_layers.0.input_proj.weight"]
    save_file(tensors, layer / "model.safetensors")
    assert "without fc.weight" in refused(layer)


def test_a_pickle_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "ran",)

    folder = medusa(tmp_path / "m")
    torch.save({"0.0.linear.weight": Evil()}, folder / "medusa_lm_head.pt")
    assert "runs code" in refused(folder)
    assert not (tmp_path / "ran").exists()


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    folder, other = eagle(tmp_path / "e"), tmp_path / "target"
    other.mkdir()
    for place, token in ((folder, "a"), (other, "b")):
        text = json.dumps({"model": {"vocab": {token: 0}}})
        (place / "tokenizer.json").write_text(text)
    assert "tokenizer.json" in refused(folder, replace(target_of(), folder=other))
