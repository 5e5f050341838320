"""Generalised aggressive decoding: a block of masks filled in one forward, and verified in one."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.config import SpeculationConfig, parse_speculation
from paceline.demo import TARGET_DIR, TRANSLATION_DIR
from paceline.drafters.base import at_once
from paceline.drafters.non_autoregressive import NonAutoregressive
from paceline.engine import Engine, RoundEvent
from paceline.errors import InvalidArgument, TokenizerMismatch
from paceline.loading import load_drafter, load_engine, load_masked_drafter
from paceline.masked_folder import masked_kind
from paceline.models.non_autoregressive import FillingModel
from paceline.models.seq2seq import Seq2SeqRunner
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams, coupled_sample
from paceline.session import Session
from paceline.train.translation import german, measure, some_text
from paceline.types import Budget
from tests.masked import filling_folder

VOCAB, MASK, START = 40, 39, 0
TARGET, DRAFTER = TRANSLATION_DIR / "target", TRANSLATION_DIR / "drafter"
PROMPT = [5, 6, 7, 8, 9, START]
GREEDY = SamplingParams(max_tokens=80)
FIXED = {"method": "generalized_aggressive", "length": "fixed"}
LOOSE = {"method": "generalized_aggressive_tolerance", "allow_lossy": True}


@pytest.fixture(scope="module")
def model() -> FillingModel:
    return FillingModel(filling_folder(VOCAB))


@pytest.fixture
def drafter(model: FillingModel) -> NonAutoregressive:
    return NonAutoregressive(model, VOCAB)


def session_of(
    prompt: list[int], output: list[int] | None = None, params: SamplingParams = GREEDY
) -> Session:
    session = Session("s", prompt, params, resolve(parse_speculation(FIXED)))
    session.token_ids += output or []
    return session


def draft(drafter: NonAutoregressive, session: Session, depth: int) -> list[int]:
    drafter.open(session)
    (made,) = at_once(drafter.propose([session], [Budget(depth=depth, nodes=depth)]))
    assert made.parent_indices.tolist() == list(range(-1, made.num_nodes - 1))
    return made.token_ids.tolist()


# --- the model -----------------------------------------------------------------------------------


def test_a_position_sees_those_behind_it(model: FillingModel) -> None:
    """Which makes it a model without order: masks behind change what comes first."""
    states = model.encode([5, 6, 7])
    few, many = model.fill(states, [8, 9], 2), model.fill(states, [8, 9], 6)
    assert few.shape == (2, VOCAB)
    assert many.shape == (6, VOCAB)
    assert (few - many[:2]).nan_to_num(0.0).abs().max() > 1e-3


def test_what_is_filled_depends_on_the_input_and_what_is_written(model: FillingModel) -> None:
    fill = [
        model.fill(model.encode(source), written, 3).nan_to_num(0.0)
        for source, written in (([5, 6], [8]), ([6, 5], [8]), ([5, 6], [9]))
    ]
    assert not torch.allclose(fill[0], fill[1], atol=1e-3)
    assert not torch.allclose(fill[0], fill[2], atol=1e-3)


def test_the_mask_is_no_token(drafter: NonAutoregressive) -> None:
    logits = drafter.model.fill(drafter.model.encode([5]), [], 4)
    assert torch.isinf(logits[:, MASK]).all()
    sampled = replace(GREEDY, temperature=4.0, seed=3)
    assert MASK not in draft(drafter, session_of(PROMPT, [], sampled), 60)


def test_other_folders_are_refused(tmp_path: Path) -> None:
    assert masked_kind(DRAFTER) == "non_autoregressive"
    assert masked_kind(TARGET) is None
    assert masked_kind(tmp_path) is None
    with pytest.raises(InvalidArgument, match="mask_token_id"):
        FillingModel(TARGET)
    with pytest.raises(InvalidArgument, match="non_autoregressive"):
        load_drafter(DRAFTER, TARGET)
    with pytest.raises(TokenizerMismatch):
        load_masked_drafter(DRAFTER, TARGET_DIR)


# --- the drafter ---------------------------------------------------------------------------------


def test_a_draft_is_the_best_token_of_each_mask_behind_the_text(
    drafter: NonAutoregressive,
) -> None:
    states = drafter.model.encode(PROMPT[:-1])
    logits = drafter.model.fill(states, [11, 12], 5)
    expected = logits.argmax(-1).tolist()
    assert draft(drafter, session_of(PROMPT, [11, 12]), 5) == expected
    # The same where the input has no start token, or the output has begun in the prompt.
    assert draft(drafter, session_of(PROMPT[:-1], [11, 12]), 5) == expected
    assert draft(drafter, session_of([*PROMPT, 11], [12]), 5) == expected


def test_above_zero_a_position_has_the_targets_noise(drafter: NonAutoregressive) -> None:
    params = replace(GREEDY, temperature=2.0, seed=11)
    logits = drafter.model.fill(drafter.model.encode(PROMPT[:-1]), [11, 12], 5)
    expected = [
        coupled_sample(row.numpy(), params, len(PROMPT) + 2 + place)
        for place, row in enumerate(logits)
    ]
    assert draft(drafter, session_of(PROMPT, [11, 12], params), 5) == expected
    assert expected != logits.argmax(-1).tolist()


def test_a_draft_takes_one_forward_and_a_session_one_encoding(
    drafter: NonAutoregressive, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("encode", "fill"):
        made = getattr(drafter.model, name)

        def counted(*args: Any, name: str = name, made: Any = made) -> Any:
            calls.append(name)
            return made(*args)

        monkeypatch.setattr(drafter.model, name, counted)
    session = session_of(PROMPT)
    drafter.open(session)
    for _ in range(3):
        drafter.propose([session], [Budget(depth=9, nodes=9)])
        session.token_ids.append(4)
    assert calls == ["encode", "fill", "fill", "fill"]
    drafter.close(session)
    assert not drafter._states


def test_a_draft_ends_with_a_token_that_ends_the_text(drafter: NonAutoregressive) -> None:
    tokens = draft(drafter, session_of(PROMPT), 12)
    end = next(token for token in tokens if token != tokens[0])
    params = replace(GREEDY, stop_token_ids=(end,))
    ended = draft(drafter, session_of(PROMPT, [], params), 12)
    assert ended == tokens[: tokens.index(end) + 1]


def test_no_draft_beyond_the_models_context(drafter: NonAutoregressive) -> None:
    room = drafter.context_length - 1  # the decoder's start token takes a place
    assert len(draft(drafter, session_of(PROMPT, [4] * (room - 3)), 3)) == 3
    assert draft(drafter, session_of(PROMPT, [4] * (room - 3)), 4) == []
    assert draft(drafter, session_of([7] * (room + 2)), 3) == []
    assert draft(drafter, session_of(PROMPT), 0) == []


# --- the shipped pair ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(TARGET, DRAFTER)


@pytest.fixture(scope="module")
def prompts(engine: Engine) -> list[list[int]]:
    assert engine.tokenizer is not None
    rng = random.Random(5)
    texts = [" ".join(map(german, some_text(rng, held_out=True))) for _ in range(8)]
    return [engine.tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def plain(engine: Engine, prompts: list[list[int]]) -> Any:
    """What AR writes at temperature 0."""
    return run(engine, prompts, GREEDY, method="ar")


def run(engine: Engine, prompts: list[list[int]], params: SamplingParams, **knobs: Any) -> Any:
    sessions = engine.generate(prompts, params, SpeculationConfig.model_validate(knobs))
    assert not any(session.stats.drafter_failures for session in sessions)
    return sessions


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_tokens_are_those_of_ar_in_fewer_forwards(
    temperature: float, engine: Engine, prompts: list[list[int]], plain: Any
) -> None:
    assert isinstance(engine.local_target.runner, Seq2SeqRunner)
    params = replace(GREEDY, temperature=temperature, seed=7)
    if temperature:
        prompts = prompts[:4]
        plain = run(engine, prompts, params, method="ar")
    drafted = run(engine, prompts, params, **FIXED)
    assert [s.output_ids for s in drafted] == [s.output_ids for s in plain]
    assert all(session.finish_reason == "stop" for session in plain)
    forwards = [sum(s.stats.num_target_forwards for s in each) for each in (plain, drafted)]
    assert forwards[1] * 2 < forwards[0]


def test_an_output_goes_on_from_a_prompt_that_has_its_beginning(
    engine: Engine, prompts: list[list[int]], plain: Any
) -> None:
    start = engine.local_target.runner.start_token_id  # type: ignore[attr-defined]
    whole = plain[0]
    prompt = [*prompts[0], start, *whole.output_ids[:7]]
    (rest,) = run(engine, [prompt], GREEDY, **FIXED)
    assert rest.output_ids == whole.output_ids[7:]
    assert rest.stats.num_target_forwards < len(rest.output_ids) / 2


@pytest.mark.parametrize("knobs", [{"tolerance_beta": 1}, {"tolerance_tau": 0.0}], ids=str)
def test_without_tolerance_it_is_exact(
    knobs: dict[str, Any], engine: Engine, prompts: list[list[int]], plain: Any
) -> None:
    strict = run(engine, prompts, GREEDY, **LOOSE, **knobs)
    assert [s.output_ids for s in strict] == [s.output_ids for s in plain]


def test_more_tolerance_accepts_more(engine: Engine, prompts: list[list[int]]) -> None:
    """Of the same drafts: later rounds would go on from other texts."""

    def first_accepted(beta: int, tau: float) -> int:
        config = SpeculationConfig.model_validate(
            {**LOOSE, "tolerance_beta": beta, "tolerance_tau": tau}
        )
        accepted = 0
        for prompt in prompts:
            rounds: list[RoundEvent] = []
            session = engine.submit(Request(prompt, GREEDY, config), on_event=rounds.append)
            while not rounds:
                engine.step()
            engine.cancel(session.session_id)
            assert not session.stats.drafter_lost
            assert session.error is None
            assert rounds[0].outcome is not None
            accepted += rounds[0].outcome.num_accepted
        assert not engine.has_work
        for drafter in engine.drafters.values():
            assert not getattr(drafter, "_states", None)
        return accepted

    grid = [[first_accepted(beta, tau) for tau in (0.0, 0.5, 3.0)] for beta in (1, 2, 5)]
    for line in (*grid, *zip(*grid, strict=True)):
        assert list(line) == sorted(line)
    assert grid[0] == [grid[0][0]] * 3
    assert grid[-1][-1] > grid[0][0]


@pytest.mark.nightly
def test_tolerance_finds_other_right_translations() -> None:
    """What it changes is which of two translations a part has, not whether it is right."""
    exact = measure(TRANSLATION_DIR, parse_speculation(FIXED), count=30)
    loose = measure(TRANSLATION_DIR, parse_speculation(LOOSE), count=30)
    assert exact.same == 1.0
    assert loose.same < 0.8
    assert loose.right >= exact.right - 0.1 >= 0.75
    assert loose.num_rounds < exact.num_rounds < exact.num_tokens / 3
