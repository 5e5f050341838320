"""The general path computes all sessions together, and no token more often than it must."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.models.base import Segment
from paceline.models.transformers import TransformersRunner
from paceline.models.transformers_sequence import TransformersSequence
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from tests.fakes import WITH_FAKES, Mix
from tests.models.conftest import Load
from tests.models.general_path_table import kinds
from tests.modelzoo import KINDS, VOCAB_SIZE, make_model

NUM_SESSIONS = 8
# Of these transformers is wrong (MiniMax's positions) or fails if it keeps a cache.
WITHOUT_CACHE = ("recurrent_gemma", "minimax")

# These attend in code of their own, or keep their state out of reach: a forward for each session.
ONE_BY_ONE = (
    "gptj", "bloom", "rwkv", "recurrent_gemma", "falcon", "mpt", "codegen", "gpt_neo", "xglm",
    "nemotron", "stablelm", "llama4",
)  # fmt: skip


def tokens(count: int, seed: int = 0) -> Any:
    return np.random.default_rng([seed, count]).integers(0, VOCAB_SIZE, count)


def prefill(runner: TransformersRunner, token_ids: Any) -> TransformersSequence:
    sequence = runner.new_sequence()
    runner.forward([Segment(sequence, token_ids, logits="none")])
    runner.commit(sequence, range(len(token_ids)))
    return sequence


@contextmanager
def counted(runner: TransformersRunner) -> Iterator[list[int]]:
    """How many positions each forward of the model computes."""
    positions: list[int] = []
    hook = runner.model.register_forward_pre_hook(
        lambda _model, _args, inputs: positions.append(inputs["input_ids"].numel()),
        with_kwargs=True,
    )
    try:
        yield positions
    finally:
        hook.remove()


def generate(
    runner: TransformersRunner,
    prompts: list[list[int]],
    count: int,
    method: str = "ar",
    drafters: dict[str, Any] | None = None,
    **knobs: Any,
) -> list[list[int]]:
    engine = Engine(ModelTarget(runner), drafters, catalogue=WITH_FAKES)
    params = SamplingParams(max_tokens=count, ignore_eos=True)
    speculation = SpeculationConfig(method=method, **knobs)
    outputs = [each.output_ids for each in engine.generate(prompts, params, speculation)]
    assert [len(output) for output in outputs] == [count] * len(prompts)
    assert runner.num_free == runner.kv_capacity
    return outputs


def greedy(folder: Path, prompts: list[list[int]], count: int, *, cache: bool) -> list[list[int]]:
    """What transformers generates, one prompt after the other, with the model's own attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    with torch.inference_mode():
        return [
            model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
                max_new_tokens=count,
                do_sample=False,
                use_cache=cache,
            )[0, len(prompt) :].tolist()
            for prompt in prompts
        ]


# --- as transformers -----------------------------------------------------------------------------


@pytest.mark.one_of(8, slow=5)
@pytest.mark.parametrize("kind", KINDS)
def test_one_and_eight_sessions_get_the_tokens_of_transformers(
    kind: str, zoo: Path, load: Load
) -> None:
    folder, runner, count = make_model(kind, zoo), load(kind), 12
    lengths = (3, 30, 9, 17, 24, 5, 40, 11)
    prompts = [tokens(length, seed=1).tolist() for length in lengths]
    expected = greedy(folder, prompts, count, cache=kind not in WITHOUT_CACHE)
    assert generate(runner, prompts, count) == expected
    assert [generate(runner, [prompt], count)[0] for prompt in prompts[:3]] == expected[:3]
    truth = {tuple(p): output for p, output in zip(prompts, expected, strict=True)}
    drafter = {"mix": Mix(truth, VOCAB_SIZE, rho=0.7, seed=2)}
    for nodes in (4, 9):  # chains and trees
        drafted = generate(
            runner, prompts, count, "mix", drafter, num_speculative_tokens=4, node_budget=nodes
        )
        assert drafted == expected


@pytest.mark.one_of(12, slow=2)
@pytest.mark.parametrize("kind", sorted(kinds()))
def test_eight_sessions_take_the_forwards_of_one(kind: str, load: Load) -> None:
    runner, count = load(kind), 16
    # Prompts of one length, since those of recurrent models run together only then. After one of
    # gpt-oss's first eight, the two best tokens are equal but for rounding, which may differ here.
    first = 100 if kind == "gpt_oss" else 0
    prompts = [tokens(20, seed=first + seed).tolist() for seed in range(NUM_SESSIONS)]
    with counted(runner) as alone:
        outputs = [generate(runner, [prompt], count)[0] for prompt in prompts]
    with counted(runner) as together:
        assert generate(runner, prompts, count) == outputs
    if kind in ONE_BY_ONE:
        assert len(together) == len(alone)
    else:
        assert len(together) <= 1.1 * len(alone) / NUM_SESSIONS
    assert sum(together) == sum(alone)  # no padding


def test_prompts_of_all_lengths_share_a_forward(load: Load) -> None:
    runner = load("gemma2")
    prompts = [tokens(3 + 5 * number, seed=number).tolist() for number in range(NUM_SESSIONS)]
    with counted(runner) as together:
        generate(runner, prompts, 24)
    with counted(runner) as alone:
        generate(runner, prompts[-1:], 24)
    assert len(together) <= 1.1 * len(alone)


# --- no token more often than it must ------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["mamba", "jamba", "mamba2", "falcon_h1", "lfm2", "minimax", "rwkv"]
)
def test_recurrent_models_compute_drafted_and_accepted_tokens(kind: str, load: Load) -> None:
    """A chain in each round; Mamba and Jamba do not even compute the accepted ones again."""
    runner = load(kind)
    prompt, drafted = tokens(30), tokens(6, seed=1)
    sequence = prefill(runner, prompt)
    replayed = 0
    for accepted in (6, 0, 2, 1, 5, 6, 3, 0):
        with counted(runner) as positions:
            runner.forward([Segment(sequence, drafted)])
        assert sum(positions) == len(drafted) + replayed
        assert len(positions) <= (6 if runner.strategy == "steps" else 1 + (replayed > 0))
        with counted(runner) as positions:
            runner.commit(sequence, range(accepted))
        assert not positions
        is_behind = runner.strategy != "steps" and 0 < accepted < len(drafted)
        replayed = accepted if is_behind else 0
    runner.free(sequence)


@pytest.mark.parametrize("kind", ["mamba", "falcon_h1"])
def test_positions_of_whole_generations(kind: str, load: Load) -> None:
    runner, count = load(kind), 24
    prompt = tokens(20, seed=3).tolist()
    truth = {tuple(prompt): generate(runner, [prompt], count)[0]}
    drafters = {"mix": Mix(truth, VOCAB_SIZE, rho=0.6, seed=4)}
    engine = Engine(ModelTarget(runner), drafters, catalogue=WITH_FAKES)
    with counted(runner) as positions:
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        speculation = SpeculationConfig(method="mix", num_speculative_tokens=4)
        (session,) = engine.generate([prompt], params, speculation)
    assert session.output_ids == truth[tuple(prompt)]
    # In each round, the last committed token and the draft.
    needed = len(prompt) + session.stats.num_rounds + session.stats.num_draft_nodes
    assert 0.1 < session.stats.acceptance_rate < 1
    if kind == "mamba":
        assert sum(positions) <= needed
    else:  # accepted ones again, and the tokens that the target added
        assert needed < sum(positions) <= needed + count


@pytest.mark.parametrize("kind", ["mamba", "falcon_h1", "rwkv", "gemma2"])
def test_a_chain_may_follow_a_tree_that_is_pending(kind: str, load: Load) -> None:
    runner = load(kind)
    drafted, more = tokens(5, seed=1), tokens(3, seed=2)
    sequence, whole = prefill(runner, tokens(20)), prefill(runner, tokens(20))
    # The state behind the last node is not known under ``chunks``: another path is longer.
    runner.forward([Segment(sequence, drafted, np.array([-1, 0, 1, -1, 3], np.int32))])
    last = runner.forward([Segment(sequence, more, logits="last")]).logits
    chain = np.concatenate([drafted[3:], more])
    expected = runner.forward([Segment(whole, chain)]).logits[-1:]
    torch.testing.assert_close(last, expected, atol=1e-4, rtol=1e-4)
    runner.commit(sequence, (3, 4, 5, 6, 7))
    runner.commit(whole, range(5))
    results = [runner.forward([Segment(each, more)]).logits for each in (sequence, whole)]
    torch.testing.assert_close(*results, atol=1e-4, rtol=1e-4)
    runner.free(sequence)
    runner.free(whole)


# --- beside others -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gpt2", "gemma2", "falcon_h1", "bloom"])
def test_a_forward_that_fails_leaves_no_trace_in_any_sequence(kind: str, load: Load) -> None:
    runner = load(kind)
    sequences = [prefill(runner, tokens(9 + number)) for number in range(3)]
    first = [Segment(each, tokens(2, seed=1)) for each in sequences]
    runner.forward(first)
    more = [Segment(each, tokens(3, seed=2), np.array([1, 2, 1], np.int32)) for each in sequences]
    free, calls = runner.num_free, 0

    def fail(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == (2 if kind == "bloom" else 1):  # which is on with its second sequence then
            raise RuntimeError("out of memory")

    layers = next(m for m in runner.model.modules() if isinstance(m, torch.nn.ModuleList))
    hook = layers[-1].register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        runner.forward(more)
    hook.remove()
    assert [each.num_pending for each in sequences] == [2] * 3
    assert runner.num_free == free
    after = runner.forward(more)
    for number, sequence in enumerate(sequences):
        fresh = prefill(runner, tokens(9 + number))
        runner.forward([Segment(fresh, tokens(2, seed=1))])
        alone = runner.forward([Segment(fresh, tokens(3, seed=2), more[number].parent_indices)])
        torch.testing.assert_close(
            after.logits[after.rows(number)], alone.logits, atol=1e-4, rtol=1e-4
        )
        runner.free(sequence)
        runner.free(fresh)
    assert runner.num_free == runner.kv_capacity


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe", "falcon_h1"])
def test_what_batch_mates_change_is_rounding(kind: str, load: Load) -> None:
    """docs/architecture.md has these numbers."""
    runner = load(kind)
    assert not runner.batch_invariant
    drafted = [tokens(5, seed=seed) for seed in range(NUM_SESSIONS)]
    rows = []
    for count in (1, NUM_SESSIONS):
        sequences = [prefill(runner, tokens(20 + seed, seed=seed)) for seed in range(count)]
        result = runner.forward([Segment(*each) for each in zip(sequences, drafted, strict=False)])
        rows.append(result.logits[result.rows(0)])
        for sequence in sequences:
            runner.free(sequence)
    difference = (rows[0] - rows[1]).abs().max() / rows[0].std()
    assert float(difference) < 3e-5


def test_long_sequences_outgrow_their_buffers(zoo: Path, load: Load) -> None:
    runner = load("gemma2")
    ids = tokens(300)
    model = AutoModelForCausalLM.from_pretrained(
        make_model("gemma2", zoo), attn_implementation="eager"
    ).eval()
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)[None]).logits[0]
    sequence, rows = prefill(runner, ids[:250]), []
    for start in range(250, 300, 5):
        rows.append(runner.forward([Segment(sequence, ids[start : start + 5])]).logits)
        runner.commit(sequence, range(5))
    torch.testing.assert_close(torch.cat(rows), expected[250:], atol=1e-4, rtol=1e-4)
    runner.free(sequence)


def test_a_long_sequence_does_not_change_the_frequencies_of_short_ones(load: Load) -> None:
    """LongRoPE turns faster or slower for all tokens of a forward, by its longest sequence."""
    runner = load("phi3")
    drafted = tokens(4, seed=7)
    alone = []
    for length in (30, 300):  # the original context is 256
        sequence = prefill(runner, tokens(length))
        alone.append(runner.forward([Segment(sequence, drafted)]).logits)
        runner.free(sequence)
    sequences = [prefill(runner, tokens(length)) for length in (30, 300)]
    result = runner.forward([Segment(each, drafted) for each in sequences])
    torch.testing.assert_close(result.logits, torch.cat(alone), atol=1e-4, rtol=1e-4)
    for each in sequences:
        runner.free(each)
