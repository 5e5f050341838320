"""The general path drafts with some of the model's own layers, and goes on from where it left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import parse_speculation
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.methods import METHODS
from paceline.models.base import PseudoTokens, Segment
from paceline.models.llama import LlamaRunner
from paceline.models.transformers import TransformersRunner
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.types import STATES, Need
from tests.models.conftest import Load
from tests.models.test_transformers_batches import prefill, tokens
from tests.modelzoo import make_model

# None of these is on the fast path: learned positions, scaled embeddings, both halves of a layer
# side by side, windows, norms of states.
KINDS = ("gpt2", "gemma", "gpt_neox", "cohere2", "biogpt")
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.9, seed=11)
PROMPTS = [list(b"def f(x): return x"), [65] * 20, list(b"0123456789")]
NOTHING = np.empty(0, np.int64)
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"method": "layer_skip", "length": "fixed", "exit_layer": 2},
    "tree": {
        "method": "layer_skip", "length": "fixed", "exit_layer": 1, "shape": "kary",
        "node_budget": 6,
    },
    "del": {"method": "del", "length_min": 2, "num_speculative_tokens": 3},
    "spread": {"method": "unified_layer_skipping", "length": "fixed"},
    "d3": {"method": "d3", "length": "fixed", "min_layers": 0.6},
}  # fmt: skip


def layers_of(runner: TransformersRunner) -> torch.nn.ModuleList:
    assert runner._calls.taps is not None
    return runner._calls.taps.layers


@contextmanager
def computed(runner: TransformersRunner) -> Iterator[Counter[int]]:
    """How many tokens each layer computes: those that its own first part sees."""
    found: Counter[int] = Counter()
    hooks = []
    for number, layer in enumerate(layers_of(runner)):

        def count(_: Any, inputs: Any, output: Any, number: int = number) -> None:
            states = output if isinstance(output, torch.Tensor) else output[0]
            found[number] += states[..., 0].numel()

        hooks.append(next(layer.children()).register_forward_hook(count))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


# --- exits of the model ---------------------------------------------------------------------------


@pytest.mark.one_of(5)
@pytest.mark.parametrize("kind", KINDS)
def test_an_exit_is_the_first_layers_with_the_models_own_norm_and_head(
    kind: str, zoo: Path, load: Load
) -> None:
    folder, ids, runner = make_model(kind, zoo), tokens(40), load(kind)
    assert runner.why_no_exits == ""
    for exit_layer in range(1, runner.num_layers + 1):
        short = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        stack = next(m for m in short.modules() if isinstance(m, torch.nn.ModuleList))
        assert len(stack) == runner.num_layers
        del stack[exit_layer:]
        with torch.inference_mode():
            expected = short(torch.from_numpy(ids)[None], use_cache=False).logits[0]
        sequence = runner.new_sequence()
        exits = Segment(sequence, ids, layers=range(exit_layer), resumable=True)
        assert_close(runner.forward([exits]).logits, expected)
        plain = runner.new_sequence()
        states = runner.forward([Segment(plain, ids)], STATES).extras[Need.LAYER_STATES]
        assert_close(runner.logits_of(states[:, exit_layer - 1]), expected)
        runner.free(sequence)
        runner.free(plain)
    assert runner.head_layers > 0


@pytest.mark.one_of(7)
@pytest.mark.parametrize("stops", [(1, 2), (1,), (2,), (3,)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_goes_on_from_an_exit_is_what_never_left(
    kind: str, stops: tuple[int, ...], load: Load
) -> None:
    """A tree that leaves at one exit after the other, beside a stranger, and a new row below it."""
    runner = load(kind)
    drafted, parents = tokens(6, seed=1), np.array([-1, 0, 0, 1, 1, 3], np.int32)
    plain, split, stranger = (prefill(runner, tokens(n)) for n in (30, 30, 12))
    expected = runner.forward([Segment(plain, drafted, parents)], STATES)
    first = Segment(split, drafted[:5], parents[:5], layers=range(stops[0]), resumable=True)
    runner.forward([first])
    nothing = NOTHING, NOTHING.astype(np.int32)
    for stop in stops[1:]:
        more = Segment(split, *nothing, layers=range(stop), resumable=True, resume=range(5))
        runner.forward([more])
    rest = Segment(split, drafted[5:], parents[5:], resume=range(5))
    found = runner.forward([Segment(stranger, tokens(4, seed=2)), rest], STATES)
    assert_close(found.logits[found.rows(1)], expected.logits)
    for need, states in found.extras_of(1).items():
        # As in test_general_heads.py: a residual stream is large where layers cancel each other.
        torch.testing.assert_close(states, expected.extras_of(0)[need], rtol=2e-3, atol=2e-4)
    alone = prefill(runner, tokens(12))
    assert_close(
        found.logits[found.rows(0)],
        runner.forward([Segment(alone, tokens(4, seed=2))]).logits,
    )
    # Entries that were committed after an exit are those of a whole forward.
    for sequence in (plain, split):
        runner.commit(sequence, (0, 1, 3))
    after = [runner.forward([Segment(each, tokens(3, seed=3))]).logits for each in (plain, split)]
    assert_close(after[1], after[0])
    for sequence in (plain, split, stranger, alone):
        runner.free(sequence)
    assert runner.num_free == runner.kv_capacity


@pytest.mark.one_of(5)
@pytest.mark.parametrize("kind", KINDS)
def test_no_layer_computes_a_token_twice(kind: str, load: Load) -> None:
    runner = load(kind)
    sequence, drafted = prefill(runner, tokens(20)), tokens(4, seed=1)
    with computed(runner) as found:
        for i in range(3):
            segment = Segment(sequence, drafted[i : i + 1], layers=range(1), resumable=True)
            runner.forward([segment])
    assert found == {0: 3}
    with computed(runner) as found:
        last = Segment(sequence, drafted[3:], np.array([2], np.int32), resume=range(3))
        runner.forward([last])
    assert found == {0: 1} | dict.fromkeys(range(1, runner.num_layers), 4)
    runner.free(sequence)


# --- methods --------------------------------------------------------------------------------------


def generate(
    runner: TransformersRunner, prompts: Sequence[list[int]], params: SamplingParams,
    **speculation: Any,
) -> list[Any]:  # fmt: skip
    engine = Engine(ModelTarget(runner))
    sessions = engine.generate(prompts, params, parse_speculation(speculation))
    for session in sessions:
        assert session.error is None
        assert not session.stats.drafter_lost and not session.stats.drafter_failures
    assert runner.num_free == runner.kv_capacity
    return sessions


@pytest.mark.one_of(7)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_its_own_layers_do_not_change_a_token(
    kind: str, params: SamplingParams, load: Load
) -> None:
    runner = load(kind)
    expected = [each.output_ids for each in generate(runner, PROMPTS, params, method="ar")]
    accepted = drafted = 0
    for speculation in DRAFTS.values():
        sessions = generate(runner, PROMPTS, params, **speculation)
        assert [each.output_ids for each in sessions] == expected, speculation
        drafted += sum(each.stats.num_draft_nodes for each in sessions)
        accepted += sum(each.stats.num_accepted for each in sessions)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_an_exit_after_the_last_layer_is_always_right(params: SamplingParams, load: Load) -> None:
    runner = load("gemma")
    whole = {"method": "layer_skip", "length": "fixed", "exit_layer": runner.num_layers}
    for session in generate(runner, PROMPTS, params, num_speculative_tokens=3, **whole):
        assert session.stats.num_rounds == GREEDY.max_tokens // 4
    with pytest.raises(InvalidArgument, match=f"exit_layer: got {runner.num_layers + 1}, .*1 to "):
        generate(runner, PROMPTS, params, method="layer_skip", exit_layer=runner.num_layers + 1)


def test_a_lossy_policy_leaves_layers_out(load: Load) -> None:
    runner = load("gpt2")
    lossy = {"method": "unified_layer_skipping_lossy", "allow_lossy": True}
    expected = [each.output_ids for each in generate(runner, PROMPTS, GREEDY, method="ar")]
    with computed(runner) as found:
        whole = generate(runner, PROMPTS, GREEDY, speedup_ratio=1.0, **lossy)
    assert [each.output_ids for each in whole] == expected
    assert len(set(found.values())) == 1
    with computed(runner) as found:
        fewer = generate(runner, PROMPTS, GREEDY, speedup_ratio=1.5, **lossy)
    assert [each.output_ids for each in fewer] != expected
    # Prompts run through all three layers, and then each token through the first and the last.
    prompts = sum(map(len, PROMPTS)) - len(PROMPTS)
    assert found == {0: found[0], 1: prompts, 2: found[0]}
    assert found[0] > prompts


@pytest.mark.parametrize("first_layer", [0, 1, 2])
def test_pseudo_tokens_are_those_of_the_fast_path(first_layer: int, zoo: Path, load: Load) -> None:
    folder, drafted = make_model("llama_gqa", zoo), tokens(3, seed=1)
    parents = np.array([-1, 0, 0], np.int32)
    results = []
    for runner in (LlamaRunner(folder), load("llama_gqa")):
        sequence = runner.new_sequence()
        runner.forward([Segment(sequence, tokens(12), logits="none")])
        runner.commit(sequence, range(12))
        pseudo = PseudoTokens(
            np.array([1, 3, 0], np.int32), first_layer, lambda stream: stream[[1, 1, 0]] * 0.5 + 0.1
        )
        result = runner.forward([Segment(sequence, drafted, parents, pseudo=pseudo)], STATES)
        results.append(result)
        runner.commit(sequence, (0, 1))
        runner.free(sequence)
        assert runner.num_free == runner.kv_capacity
    fast, general = results
    assert_close(general.logits, fast.logits)
    assert_close(*(each.extras[Need.HIDDEN_STATES] for each in (general, fast)))


# --- what can fail --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "gemma"])
def test_a_forward_that_fails_leaves_the_exits_as_they_were(kind: str, load: Load) -> None:
    runner = load(kind)
    drafted = tokens(4, seed=1)
    sequence, plain = prefill(runner, tokens(9)), prefill(runner, tokens(9))
    runner.forward([Segment(sequence, drafted[:3], layers=range(1), resumable=True)])
    more = Segment(sequence, drafted[3:], np.array([2], np.int32), resume=range(3))

    def fail(*_: Any) -> None:
        raise RuntimeError("out of memory")

    hook = layers_of(runner)[-1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.forward([more])
    hook.remove()
    assert sequence.num_pending == 3
    expected = runner.forward([Segment(plain, drafted)]).logits
    assert_close(runner.forward([more]).logits, expected)
    for each in (sequence, plain):
        runner.free(each)
    assert runner.num_free == runner.kv_capacity


@pytest.mark.one_of(3)
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("gptj", "its attention is code of its own"),
        ("bloom", "its attention is code of its own"),
        ("mamba", "its layers keep a state"),
        ("falcon_h1", "its layers keep a state"),
        ("recurrent_gemma", "its layers keep a state"),
    ],
)
def test_other_architectures_say_why_they_have_no_exits(kind: str, why: str, zoo: Path) -> None:
    runner = TransformersRunner(make_model(kind, zoo), device="cpu", kv_tokens=500)
    engine = Engine(ModelTarget(runner))
    assert engine.target.num_layers == 0
    for name in ("layer_skip", "d3_lossy"):
        config = parse_speculation({"method": name, "allow_lossy": not METHODS[name].lossless})
        with pytest.raises(InvalidArgument, match=f"shared_model, .*fast path.*{why}"):
            engine.submit(Request(PROMPTS[0], GREEDY, config))
    assert why in str(engine.refusal(METHODS["layer_skip"]))


def test_layers_that_pass_more_than_the_stream_have_no_exits(
    zoo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the trial at load is for: here a layer adds what another one left behind."""
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    forward: Any = GPT2Block.forward
    left: list[torch.Tensor] = []

    def with_memory(self: Any, hidden_states: torch.Tensor, *args: Any, **named: Any) -> Any:
        if self.attn.layer_idx == 0:
            left[:] = [hidden_states]
        result = forward(self, hidden_states, *args, **named)
        same = left and left[0].shape == result.shape
        return result + left[0] if same and self.attn.layer_idx == 2 else result

    monkeypatch.setattr(GPT2Block, "forward", with_memory)
    runner = TransformersRunner(make_model("gpt2", zoo), device="cpu")
    assert runner.strategy == "packed"
    assert Need.SHARED_MODEL not in runner.provides
    assert "more than the residual stream" in runner.why_no_exits
