"""Judge Decoding: the judge only ever adds to what the standard rule accepts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.acceptance.base import PathLogits
from paceline.acceptance.exact_match import Coupled
from paceline.acceptance.judge import Judge, JudgeHead
from paceline.config import SpeculationConfig, parse_speculation
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.lengths.base import LengthContext
from paceline.loading import load_engine
from paceline.methods import METHODS
from paceline.models.base import Segment
from paceline.models.llama import LlamaRunner
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.types import Draft, FloatArray, Need
from tests.core.prompts import code_prompts
from tests.heads import save_judge
from tests.modelzoo import make_model

HIDDEN, VOCAB = 64, 258
THRESHOLDS = (1.0, 0.9, 0.7, 0.5, 0.3, 0.1, 0.0)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=5, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


def judged_by(folder: Path, weight: torch.Tensor, bias: float = 0.0) -> LengthContext:
    save_judge(folder, VOCAB, weight, bias)
    return LengthContext(heads=folder, vocab_size=VOCAB, target_hidden_size=HIDDEN)


def judging_engine(zoo: Path, heads: Path) -> Engine:
    """Two random models that often differ, and a judge with random weights."""
    target = LlamaRunner(make_model("llama", zoo))
    drafter = DraftModel(LlamaRunner(make_model("llama", zoo, seed=1, num_hidden_layers=1)))
    generator = torch.Generator().manual_seed(0)
    context = judged_by(heads, 0.3 * torch.randn(HIDDEN, generator=generator))
    return Engine(ModelTarget(target), {"draft_model": drafter}, length_context=context)


def judging(threshold: float) -> SpeculationConfig:
    knobs = {"method": "judge_decoding", "judge_threshold": threshold, "allow_lossy": True}
    return parse_speculation(knobs)


def decode(
    engine: Engine,
    threshold: float | None,
    params: SamplingParams,
    prompt: Sequence[int] = (5, 6, 7),
) -> Session:
    config = SpeculationConfig(method="draft_model", length="fixed")
    if threshold is not None:
        config = judging(threshold)
    return engine.generate([prompt], params, config)[0]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_judge_that_says_no_is_the_standard_method(
    zoo: Path, tmp_path: Path, params: SamplingParams
) -> None:
    engine = judging_engine(zoo, tmp_path)
    never, standard = decode(engine, 1.0, params), decode(engine, None, params)
    assert never.output_ids == standard.output_ids
    assert never.stats.num_accepted == standard.stats.num_accepted
    assert decode(engine, 0.5, params).output_ids != standard.output_ids, "the judge has a say"


def test_a_judge_that_says_yes_gives_the_drafts_text(zoo: Path, tmp_path: Path) -> None:
    """All but the last token of each round, which is the target's own."""
    engine = judging_engine(zoo, tmp_path)
    drafts: list[tuple[list[int], tuple[int, ...]]] = []
    config = judging(0.0)
    session = engine.submit(
        Request([5, 6, 7], replace(GREEDY, max_tokens=27), config),
        on_event=lambda event: drafts.append(
            (event.outcome.draft.token_ids.tolist(), event.outcome.token_ids)
        ) if event.outcome else None,
    )  # fmt: skip
    while engine.has_work:
        engine.step()
    assert len(drafts) == session.stats.num_rounds == 3
    for drafted, committed in drafts:
        assert list(committed[:-1]) == drafted


def random_case(rng: np.random.Generator) -> tuple[Draft, torch.Tensor, torch.Tensor]:
    """A bushy draft over a small vocabulary, logits and states of the target."""
    parents = np.array([-1, -1, 0, 0, 1, 2, 2, 4, 6], np.int32)
    draft = Draft(rng.integers(0, 4, len(parents)), parents)
    rows = len(parents) + 1
    logits = torch.from_numpy(rng.normal(size=(rows, 4))).float()
    return draft, logits, torch.from_numpy(rng.normal(size=(rows, 3))).float()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_accepted_lengths_grow_as_the_threshold_falls(temperature: float) -> None:
    """And are never below the standard rule's, on the same draft."""
    rng = np.random.default_rng(0)
    head = JudgeHead(np.array([1.0, -2.0, 0.5], np.float32), 0.1)
    gains = 0
    for seed in range(60):
        draft, logits, states = random_case(rng)
        params = SamplingParams(temperature=temperature, seed=seed)
        target = PathLogits(logits, params, [0] * 5, states=states)
        path = Coupled().accept(draft, target).path
        for threshold in THRESHOLDS:
            found = Judge(threshold, head).accept(draft, target)
            assert found.path[: len(path)] == path, "a lower threshold goes on where a higher ends"
            own = target.token(draft.token_ids[list(found.path)].tolist(), (-1, *found.path)[-1])
            assert found.next_token == own
            gains += len(found.path) - len(path)
            path = found.path
        assert threshold == 0.0
        assert path[-1] not in draft.parent_indices, "it accepts down to a leaf"
    assert gains > 60


def test_the_judge_reads_the_state_at_the_drafted_token() -> None:
    """Of two children it takes the one that it is surer of."""
    draft = Draft(np.array([1, 2]), np.array([-1, -1], np.int32))
    logits = torch.tensor([[9.0, 0, 0], [0, 0, 0], [0, 0, 0]])
    states = torch.tensor([[-50.0], [0.3], [0.4]])  # of the root, node 0 and node 1
    target = PathLogits(logits, GREEDY, [0], states=states)
    rule = Judge(0.5, JudgeHead(np.ones(1, np.float32), 0.0))
    assert rule.accept(draft, target).path == (1,)
    assert replace(rule, judge_threshold=0.6).accept(draft, target).path == ()
    masked = replace(GREEDY, allowed_token_ids=(0, 1))
    assert rule.accept(draft, PathLogits(logits, masked, [0], states=states)).path == (0,)


def test_the_loop_hands_over_the_targets_states(zoo: Path, tmp_path: Path) -> None:
    """A judge that knows one state lets the token at it pass, and no other."""
    engine = judging_engine(zoo, tmp_path)
    runner = engine.local_target.runner
    one = replace(GREEDY, max_tokens=2)
    prompt = next(
        prompt
        for prompt in ([5, 6, last] for last in range(50))
        if decode(engine, 0.0, one, prompt).output_ids[0]
        != decode(engine, None, one, prompt).output_ids[0]
    )
    drafted = decode(engine, 0.0, one, prompt).output_ids[:1]
    sequence = runner.new_sequence()
    ids = np.array([*prompt, *drafted], np.int64)
    states = runner.forward([Segment(sequence, ids)], frozenset({Need.HIDDEN_STATES})).extras[
        Need.HIDDEN_STATES
    ]
    runner.free(sequence)
    weight: FloatArray = states[-1].numpy()
    bias = -0.999 * float(weight @ weight)
    other = tmp_path / "other"
    other.mkdir()
    context = judged_by(other, torch.from_numpy(weight), bias)
    strict = Engine(engine.target, engine.drafters.given, length_context=context)
    assert decode(strict, 0.5, one, prompt).output_ids[:1] == drafted
    (standard, judged) = (decode(strict, level, one, [9, *prompt]) for level in (None, 0.5))
    assert judged.output_ids == standard.output_ids


def test_lossy_and_without_weights_it_is_refused(zoo: Path, tmp_path: Path) -> None:
    engine = judging_engine(zoo, tmp_path)
    with pytest.raises(InvalidArgument, match="allow_lossy"):
        engine.generate([[5]], GREEDY, SpeculationConfig(method="judge_decoding"))
    assert engine.refusal(METHODS["judge_decoding"]) is None
    bare = Engine(
        engine.target, engine.drafters.given,
        length_context=LengthContext(heads=tmp_path / "none"),
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match=r"acceptance: got 'judge.*paceline train judge"):
        decode(bare, 0.5, GREEDY)
    assert "paceline train judge" in (bare.refusal(METHODS["judge_decoding"]) or "")
    (tmp_path / "wide").mkdir()
    wide = judged_by(tmp_path / "wide", torch.zeros(HIDDEN + 1))
    other = Engine(engine.target, engine.drafters.given, length_context=wide)
    with pytest.raises(InvalidArgument, match="target_hidden_size 65"):
        decode(other, 0.5, GREEDY)


def test_the_shipped_judge_accepts_more_than_the_standard_rule() -> None:
    engine = load_engine()
    assert engine.tokenizer is not None
    prompts = code_prompts(engine.tokenizer, 5)
    params = SamplingParams(max_tokens=32, ignore_eos=True)

    def rounds(config: SpeculationConfig) -> int:
        return sum(s.stats.num_rounds for s in engine.generate(prompts, params, config))

    standard = SpeculationConfig(method="draft_model", length="fixed")
    assert rounds(judging(0.3)) < rounds(standard)
