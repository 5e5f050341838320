"""Adapters (LoRA): logits of the merged model, each row with its own, and exact in any company."""

from __future__ import annotations

import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel, DraftModels
from paceline.engine import Engine, EngineLimits
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.loading import load_engine, load_runner
from paceline.models.base import Segment
from paceline.models.heads import HeadLibrary
from paceline.models.llama import LlamaRunner
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.types import Outcome
from paceline.view import SessionView
from tests.adapters import ATTENTION, linears, make_adapter, merge
from tests.core.runners import load_runner_without_kernels
from tests.heads import untrained_heads
from tests.models import make_peft
from tests.modelzoo import make_model

IDS = np.random.default_rng(0).integers(0, 256, 60)
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=1.0, seed=5)
NAMES = ("", "all", "attention", "queries")


def logits(runner: LlamaRunner, adapter: str = "") -> torch.Tensor:
    return runner.forward([Segment(runner.new_sequence(adapter), IDS)]).logits


def of_transformers(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        return model(input_ids=torch.tensor(IDS)[None], use_cache=False).logits[0].float()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = 1e-4 * max(1.0, float(expected.std()))
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def folders(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three adapters of the small random Llama that change different layers by different ranks."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "all": make_adapter(root / "all", tiny_folder, rank=4, strength=0.5),
        "attention": make_adapter(root / "attention", tiny_folder, targets=ATTENTION, rank=3),
        "queries": make_adapter(root / "queries", tiny_folder, targets=("q_proj",), rank=8, seed=2),
    }


Load = Callable[..., LlamaRunner]


# --- numbers --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def merged(
    zoo: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Path, Path, torch.Tensor, torch.Tensor]]:
    """A model, an adapter of it, and the logits of the merged model and of the model alone."""

    @cache
    def get(kind: str) -> tuple[Path, Path, torch.Tensor, torch.Tensor]:
        base, root = make_model(kind, zoo), tmp_path_factory.mktemp(kind)
        fused = kind == "phi3"
        targets = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj") if fused else ATTENTION
        chosen = {"targets": targets} if fused or kind == "llama4" else {}
        adapter = make_adapter(root / "a", base, strength=0.5, **chosen)
        whole = merge(base, adapter, root / "merged")
        return base, adapter, of_transformers(whole), of_transformers(base)

    return get


@pytest.mark.parametrize("load", [LlamaRunner, load_runner_without_kernels], ids=["c", "torch"])
@pytest.mark.parametrize("kind", ["llama_gqa", "llama_bias", "qwen3", "phi3", "gemma2", "llama4"])
def test_logits_are_those_of_the_merged_model(
    kind: str, load: Load,
    merged: Callable[[str], tuple[Path, Path, torch.Tensor, torch.Tensor]],
) -> None:  # fmt: skip
    base, adapter, expected, plain = merged(kind)
    runner = load(base, adapters={"a": adapter})
    assert float((expected - plain).abs().max()) > 1.0  # it changes something
    assert_close(logits(runner, "a"), expected)
    assert_close(logits(runner), plain)


@pytest.mark.parametrize("load", [LlamaRunner, load_runner_without_kernels], ids=["c", "torch"])
@pytest.mark.parametrize("case", sorted(make_peft.CASES))
def test_logits_are_those_of_peft(case: str, load: Load, tmp_path: Path) -> None:
    """Folders that PEFT wrote, and the logits that it computed."""
    base = shutil.copytree(make_peft.base(tmp_path / "zoo"), tmp_path / "base")
    adapter = Path(make_peft.__file__).parent / "peft" / case
    expected = load_file(str(adapter / "expected.safetensors"))
    runner = load(base, adapters={case: adapter})
    segment = Segment(runner.new_sequence(case), expected["ids"].numpy())
    assert_close(runner.forward([segment]).logits, expected["logits"])


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "int8", "bfloat16"])
def test_other_dtypes_add_the_same_low_rank_product(
    dtype: str, tiny_folder: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """On a rounded base the change is that of the exact one, up to rounding."""
    plain = load_runner(tiny_folder, dtype=dtype, adapters=folders)
    assert isinstance(plain, LlamaRunner)
    exact = LlamaRunner(tiny_folder, adapters=folders)
    assert torch.equal(logits(plain), logits(load_runner(tiny_folder, dtype=dtype)))  # type: ignore[arg-type]
    for name in folders:
        error = (logits(plain, name) - logits(exact, name)).std()
        change = (logits(exact, name) - logits(exact)).std()
        assert error < 0.6 * change, name


def test_a_quantised_base_in_whole_numbers(tmp_path: Path, zoo: Path) -> None:
    """Where rounding to 8 bits changes no weight, logits are those of the merged model."""
    base = tmp_path / "base"
    shutil.copytree(make_model("llama_gqa", zoo), base)
    weights = load_file(str(base / "model.safetensors"))
    for name, weight in weights.items():
        if weight.ndim == 2:
            whole = (weight / weight.abs().max() * 127).round()
            whole[:, ::32] = 127.0  # the scale of each block of 32 is a power of two
            weights[name] = (whole / 512).contiguous()
    save_file(weights, str(base / "model.safetensors"), metadata={"format": "pt"})
    adapter = make_adapter(tmp_path / "a", base, strength=0.5)
    runner = load_runner(base, dtype="q8_0", adapters={"a": adapter})
    assert isinstance(runner, LlamaRunner)
    expected = of_transformers(merge(base, adapter, tmp_path / "merged"))
    change = (expected - of_transformers(base)).std()
    assert float((logits(runner, "a") - expected).std()) < 0.03 * change  # inputs have 8 bits, too


@pytest.mark.parametrize("use_rslora", [False, True])
def test_ranks_and_scales_by_pattern(use_rslora: bool, tiny_folder: Path, tmp_path: Path) -> None:
    """Patterns match as PEFT's do: the end of a name, the first that fits."""
    modules = [m for m in linears(tiny_folder) if m.endswith(("q_proj", "down_proj"))]
    ranks = {m: 2 if "layers.1" in m and m.endswith("q_proj") else 6 for m in modules}
    adapter = make_adapter(
        tmp_path / "a", tiny_folder, targets=("q_proj", "down_proj"), rank=6, use_rslora=use_rslora,
        rank_pattern={m: r for m, r in ranks.items() if r == 2},
        alpha_pattern={"down_proj": 5, r"model\.layers\.\d\.mlp\..*": 99},
    )  # fmt: skip
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["rank_pattern"] = {r"1\.self_attn\.q_proj": 2, "q_proj": 6}
    config["target_modules"] = r".*\.(self_attn\.q|mlp\.down)_proj"
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    scales = {
        m: (5 if "down" in m else 12) / (math.sqrt(ranks[m]) if use_rslora else ranks[m])
        for m in modules
    }
    runner = LlamaRunner(tiny_folder, adapters={"a": adapter})
    merged = merge(tiny_folder, adapter, tmp_path / "merged", **scales)
    assert_close(logits(runner, "a"), of_transformers(merged))


def test_layers_to_transform_and_excluded_modules(tiny_folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", tiny_folder)
    file = adapter / "adapter_model.safetensors"
    kept = {k: v for k, v in load_file(str(file)).items() if ".1." in k and "up_proj" not in k}
    save_file(kept, str(file))
    config = json.loads((adapter / "adapter_config.json").read_text())
    config |= {"target_modules": "all-linear", "exclude_modules": ["up_proj"]}
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"layers_to_transform": [1]}))
    runner = LlamaRunner(tiny_folder, adapters={"a": adapter})
    assert_close(logits(runner, "a"), of_transformers(merge(tiny_folder, adapter, tmp_path / "m")))


def test_rows_do_not_depend_on_their_neighbours(
    tiny_folder: Path, folders: dict[str, Path]
) -> None:
    """Any mix of adapters in a forward gives the bits of each alone, in the kernels' order."""
    runner = LlamaRunner(tiny_folder, adapters=folders)
    alone = {name: logits(runner, name) for name in NAMES}
    mixed = [NAMES[i] for i in np.random.default_rng(3).integers(0, 4, 11)]
    sequences = [runner.new_sequence(name) for name in mixed]
    for first, last in ((0, 37), (37, 38), (38, 60)):  # a prompt, a token, a chain
        result = runner.forward([Segment(each, IDS[first:last]) for each in sequences])
        for i, (name, sequence) in enumerate(zip(mixed, sequences, strict=True)):
            assert torch.equal(result.logits[result.rows(i)], alone[name][first:last]), (i, name)
            runner.commit(sequence, range(last - first))


def test_fingerprints_differ(tiny_folder: Path, folders: dict[str, Path]) -> None:
    runner = LlamaRunner(tiny_folder, adapters=folders)
    prints = {name: runner.fingerprint_of(name) for name in NAMES}
    assert len({p.weights for p in prints.values()}) == len(NAMES)
    assert prints[""] == runner.fingerprint == LlamaRunner(tiny_folder).fingerprint
    # The name under which a replica has an adapter decides no bit; what it adds does.
    other = LlamaRunner(tiny_folder, adapters={"x": folders["queries"], "y": folders["all"]})
    assert other.fingerprint_of("x") == prints["queries"]
    assert other.fingerprint_of("y") == prints["all"]


# --- engines --------------------------------------------------------------------------------------


def engine(
    folder: Path, adapters: dict[str, Path], *, kv_tokens: int = 4000, **limits: Any
) -> Engine:
    runner = LlamaRunner(folder, kv_tokens=kv_tokens, adapters=adapters)
    drafter = DraftModel(LlamaRunner(folder, kv_tokens=kv_tokens))
    return Engine(
        ModelTarget(runner), {"draft_model": drafter}, limits=EngineLimits(**limits),
        heads=HeadLibrary(untrained_heads(folder), folder, runner),
    )  # fmt: skip


def prompt(i: int, length: int = 30) -> list[int]:
    return random.Random(i).choices(range(256), k=length)


def finish(engine: Engine, requests: list[Request]) -> list[list[int]]:
    sessions = [engine.submit(request) for request in requests]
    while engine.has_work:
        engine.step()
    assert all(session.error is None for session in sessions)
    return [session.output_ids for session in sessions]


@pytest.fixture(scope="module")
def ar(tiny_folder: Path, folders: dict[str, Path]) -> Callable[..., list[int]]:
    """AR's tokens, each request alone on an engine whose only adapter is the request's."""
    known: dict[tuple[Any, ...], list[int]] = {}

    def tokens(text: list[int], params: SamplingParams, name: str) -> list[int]:
        key = (*text, params.temperature, params.max_tokens, name)
        if key not in known:
            own = {name: folders[name]} if name else {}
            request = Request(text, params, SpeculationConfig(method="ar"), adapter=name)
            (known[key],) = finish(engine(tiny_folder, own), [request])
        return known[key]

    return tokens


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "method",
    ["ar", "prompt_lookup", "draft_model", "draft_model_tree", "layer_skip", "medusa", "eagle"],
)
def test_a_batch_of_adapters_has_the_tokens_of_each_alone(
    method: str, params: SamplingParams, tiny_folder: Path, folders: dict[str, Path],
    ar: Callable[..., list[int]],
) -> None:  # fmt: skip
    both = engine(tiny_folder, folders)
    requests = [
        Request(prompt(i % 3) * 2, params, SpeculationConfig(method=method), adapter=name)
        for i, name in enumerate(NAMES * 2)
    ]
    outputs = finish(both, requests)
    for request, output in zip(requests, outputs, strict=True):
        assert output == ar(list(request.prompt_ids), params, request.adapter), request.adapter
    assert len({tuple(output) for output in outputs[:4]}) == 4


def test_sessions_of_one_adapter_are_neighbours_in_a_step(
    tiny_folder: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    both, seen = engine(tiny_folder, folders), []
    ops: Any = both.local_target.runner._ops  # type: ignore[attr-defined]
    run_layers = ops.run_layers

    def watched(*arguments: Any) -> None:
        seen.append(arguments[6].adapters)
        run_layers(*arguments)

    monkeypatch.setattr(ops, "run_layers", watched)
    ar = SpeculationConfig(method="ar")
    finish(both, [Request([1], GREEDY, ar, adapter=NAMES[i % 4]) for i in range(8)])
    full = [adapters.tolist() for adapters in seen if len(adapters) == 8]
    assert len(full) > 10
    assert all(adapters == sorted(adapters) for adapters in full)


def test_the_prefix_cache_keeps_adapters_apart(
    tiny_folder: Path, folders: dict[str, Path], ar: Callable[..., list[int]]
) -> None:
    """The same prompt with one adapter after the other; each hits its own entries alone."""
    both, text = engine(tiny_folder, folders), prompt(9, 50)
    prefixes = both.local_target.prefixes
    assert prefixes is not None
    for name in NAMES:
        before = prefixes.num_hit
        for hit in (0, 48):
            request = Request(text, GREEDY, SpeculationConfig(method="ar"), adapter=name)
            assert finish(both, [request]) == [ar(text, GREEDY, name)]
            assert prefixes.num_hit - before == hit, name


@pytest.mark.parametrize("method", ["ar", "draft_model_tree"])
def test_preempted_sessions_keep_their_adapter(
    method: str, tiny_folder: Path, folders: dict[str, Path], ar: Callable[..., list[int]]
) -> None:
    params = replace(GREEDY, max_tokens=100)
    small = engine(tiny_folder, folders, kv_tokens=330)
    requests = [
        Request(prompt(i), params, SpeculationConfig(method=method), adapter=NAMES[i % 4])
        for i in range(6)
    ]
    outputs = finish(small, requests)
    assert small.take_counters().num_preemptions > 0
    for request, output in zip(requests, outputs, strict=True):
        assert output == ar(list(request.prompt_ids), params, request.adapter)


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ["draft_model", "draft_model_tree"])
def test_an_adapter_may_have_a_draft_model_of_its_own(
    method: str, params: SamplingParams, tiny_folder: Path, folders: dict[str, Path],
    ar: Callable[..., list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The merged model is right about its adapter, and the base about itself alone."""
    merged = merge(tiny_folder, folders["all"], tmp_path / "merged")
    models = [DraftModel(LlamaRunner(each, kv_tokens=4000)) for each in (tiny_folder, merged)]
    both = engine(tiny_folder, folders)
    both.drafters["draft_model"] = DraftModels(models[0], {"all": models[1]})
    told: list[str] = []  # whose outcomes its own model hears: without, it computes drafts again
    observe = models[1].observe

    def listen(sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        told.extend(session.adapter for session in sessions)
        observe(sessions, outcomes)

    monkeypatch.setattr(models[1], "observe", listen)
    speculation = SpeculationConfig(method=method, length="fixed", num_speculative_tokens=3)
    requests = [
        Request(prompt(i) * 2, params, speculation, adapter=name)
        for i, name in enumerate(("attention", "all", "", "all", ""))
    ]
    sessions = [both.submit(request) for request in requests]
    while both.has_work:
        both.step()
    right: dict[str, list[float]] = {}
    for request, session in zip(requests, sessions, strict=True):
        assert session.error is None and not session.stats.drafter_failures
        assert session.output_ids == ar(list(request.prompt_ids), params, request.adapter)
        right.setdefault(request.adapter, []).append(session.stats.num_rounds)
    fewest = -(-GREEDY.max_tokens // 4)  # rounds in which three drafts and one more token are right
    assert right["all"] == right[""] == [fewest, fewest]
    assert told == ["all"] * len(told) and len(told) >= 2 * (fewest - 1)
    assert right["attention"][0] > fewest + 2
    for model in models:
        assert model.runner.num_free == model.runner.kv_capacity  # sessions left where they came in


def test_draft_models_of_adapters_need_their_adapter_and_a_draft_model(
    tiny_folder: Path, folders: dict[str, Path]
) -> None:
    own = {"all": tiny_folder}
    with pytest.raises(InvalidArgument, match=r"adapter: got 'all', expected one of queries"):
        load_engine(
            tiny_folder, tiny_folder, adapters={"queries": folders["queries"]},
            adapter_drafters=own,
        )  # fmt: skip
    with pytest.raises(InvalidArgument, match=r"adapter_drafters: .*none without a draft model"):
        load_engine(tiny_folder, adapters=folders, adapter_drafters=own)


def test_an_unknown_adapter_is_an_error_with_the_names(
    tiny_folder: Path, folders: dict[str, Path]
) -> None:
    with pytest.raises(InvalidArgument, match=r"adapter: got 'al', .*one of all, attention, quer"):
        engine(tiny_folder, folders).submit(Request([1, 2], adapter="al"))
    with pytest.raises(InvalidArgument, match=r"adapter: got 'all', .*the target has none"):
        engine(tiny_folder, {}).submit(Request([1, 2], adapter="all"))


# --- bad folders ----------------------------------------------------------------------------------


def change_config(adapter: Path, **values: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(adapter: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(str(file))
    change(tensors)
    save_file(tensors, str(file))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"use_dora": True}, r"adapters\.bad\.use_dora: got True"),
        ({"bias": "all"}, r'bias: got .all., expected "none"'),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save: got \['lm_head'\]"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out: got True"),
        ({"lora_bias": True}, "lora_bias"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: got 'pissa'"),
        ({"layers_pattern": "blocks"}, "layers_pattern"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"field_of_tomorrow": 7}, "field_of_tomorrow: got 7, expected nothing there: .* support"),
        ({"peft_type": "IA3"}, 'peft_type: got .IA3., expected "LORA"'),
        ({"r": 0}, r"\.r: got 0"),
        ({"lora_alpha": "16"}, "lora_alpha"),
        ({"rank_pattern": {"q_proj": 5}}, r"q_proj.lora_A.weight of shape \(4, 64\).*\(5, 64\)"),
        ({"target_modules": ["c_attn"]}, r"target_modules: got \['c_attn'\], .*q_proj"),
        ({"target_modules": "(", }, "a regular expression"),
        ({"target_modules": ["q_proj", "lm_head"]}, "got 'lm_head'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_field_that_is_not_understood(
    values: dict[str, Any], message: str, tiny_folder: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "a", tiny_folder, targets=("q_proj",))
    change_config(adapter, **values)
    with pytest.raises(InvalidArgument, match=message):
        LlamaRunner(tiny_folder, adapters={"bad": adapter})


def test_tensors_that_do_not_belong(tiny_folder: Path, tmp_path: Path) -> None:
    at = "base_model.model.model.layers.0.self_attn.q_proj"
    adapter = make_adapter(tmp_path / "a", tiny_folder, targets=("q_proj",))
    good = (adapter / "adapter_model.safetensors").read_bytes()

    def refused(error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            LlamaRunner(tiny_folder, adapters={"bad": adapter})
        (adapter / "adapter_model.safetensors").write_bytes(good)

    change_tensors(adapter, lambda t: t.update({f"{at}.lora_magnitude_vector": torch.ones(4)}))
    refused(InvalidArgument, "lora_magnitude_vector")
    change_tensors(adapter, lambda t: t.pop(f"{at}.lora_B.weight"))
    refused(ModelNotFound, r"lacks .*layers\.0\.self_attn\.q_proj\.lora_B")
    change_tensors(adapter, lambda t: t.update({f"{at}.lora_A.weight": torch.ones(4, 48)}))
    refused(InvalidArgument, r"lora_A.weight of shape \(4, 48\)', expected shape \(4, 64\)")
    change_tensors(adapter, lambda t: t.update({f"{at}.lora_A.weight": torch.ones(4, 64).char()}))
    refused(InvalidArgument, "of dtype int8")
    (adapter / "adapter_model.safetensors").write_bytes(good[:-7])
    refused(ModelNotFound, "adapter 'bad': .* is damaged")
    (adapter / "adapter_model.safetensors").unlink()
    refused(ModelNotFound, "has no adapter_model.safetensors")
    (adapter / "adapter_config.json").unlink()
    refused(ModelNotFound, "adapter 'bad': .* has no adapter_config.json")
    shutil.rmtree(adapter)
    with pytest.raises(ModelNotFound, match="does not exist"):
        LlamaRunner(tiny_folder, adapters={"bad": adapter})


def test_experts_and_the_general_path_have_no_adapters(zoo: Path, tmp_path: Path) -> None:
    base = make_model("qwen3_moe", zoo)
    adapter = make_adapter(tmp_path / "a", base, targets=("gate_proj",))
    with pytest.raises(InvalidArgument, match=r"experts\.0\.gate_proj.*dense MLPs"):
        LlamaRunner(base, adapters={"a": adapter})
    shared = "model.layers.2.feed_forward.shared_expert.up_proj"
    base = make_model("llama4", zoo)
    adapter = make_adapter(tmp_path / "b", base, targets=("up_proj",), target_modules=shared)
    with pytest.raises(InvalidArgument, match=r"shared_expert\.up_proj.*dense MLPs"):
        LlamaRunner(base, adapters={"b": adapter})
    with pytest.raises(InvalidArgument, match=r"adapters: got \['a'\].*runs in transformers"):
        load_runner(make_model("gpt2", zoo), adapters={"a": adapter})


def test_another_base_is_a_warning(tiny_folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "a", tiny_folder)
    change_config(adapter, base_model_name_or_path="org/Another-7B")
    with pytest.warns(UserWarning, match="trained on 'org/Another-7B'"):
        LlamaRunner(tiny_folder, adapters={"a": adapter})
