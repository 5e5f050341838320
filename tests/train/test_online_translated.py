"""A drafter with tokens of its own that learns as it serves, and the head that ends its drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks.online import prompts_of
from paceline.config import SpeculationConfig
from paceline.demo import HEADS_DIR, OWN_TOKENS_DIR
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.omnidraft import OmniDraft, Translator
from paceline.engine import Engine, RoundEvent
from paceline.errors import InvalidArgument
from paceline.lengths.base import load_head
from paceline.lengths.specdecpp import AcceptanceHead, acceptance_head
from paceline.loading import load_engine
from paceline.models.llama import LlamaRunner
from paceline.rejections import JudgedDraft, RejectionBuffer, RejectionRecorder, packed_rows
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.train.checkpoints import load_model
from paceline.train.length_heads import (
    AcceptanceBlocks,
    collect_translated,
    train_length_head,
    weighted_cross_entropy,
)
from paceline.train.online import OnlineTrainer, hybrid_loss
from tests.core.prompts import code_prompts

FIXED = SpeculationConfig(method="omnidraft", length="fixed", num_speculative_tokens=6)
ENDED = SpeculationConfig(method="omnidraft", length="specdecpp", num_speculative_tokens=6)
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def loaded() -> Engine:
    return load_engine(translate=True)


@pytest.fixture
def engine(loaded: Engine) -> Iterator[Engine]:
    """Without what another test has taught it."""
    runner = runner_of(loaded)
    runner.use_weights(runner.read_weights((OWN_TOKENS_DIR / "model.safetensors").read_bytes()))
    acceptance_head(loaded.length_context, "omnidraft").use(shipped_head(loaded))
    yield loaded
    assert not loaded.sessions
    loaded.events.watchers.clear()


def drafter_of(engine: Engine) -> OmniDraft:
    drafter = engine.drafters["omnidraft"]
    assert isinstance(drafter, OmniDraft)
    return drafter


def translator_of(engine: Engine) -> Translator:
    translator = drafter_of(engine).translator
    assert translator is not None
    return translator


def runner_of(engine: Engine) -> LlamaRunner:
    model = drafter_of(engine).model
    assert isinstance(model, DraftModel)
    assert isinstance(model.runner, LlamaRunner)
    return model.runner


def shipped_head(engine: Engine) -> dict[str, Any]:
    return load_head(engine.length_context, "specdecpp", "omnidraft")


def prompts(engine: Engine, count: int) -> list[list[int]]:
    assert engine.tokenizer is not None
    return code_prompts(engine.tokenizer, count)


def watched(engine: Engine) -> RejectionRecorder:
    recorder = RejectionRecorder(
        10_000, records=lambda session: True, top_k=8, translator=translator_of(engine)
    )
    engine.events.watchers.append(recorder)
    return recorder


def draft(
    context: list[int], spelling: list[int], accepted: int = 0, top: tuple[int, ...] = ()
) -> JudgedDraft:
    probs = np.full(len(top), 0.8 / max(1, len(top)), np.float32)
    return JudgedDraft(
        "s", 0, np.array(context), np.array(top, np.int64), probs, 0.0, accepted,
        np.array(spelling, np.int64),
    )  # fmt: skip


# --- what is recorded -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_told_in_the_drafters_tokens(engine: Engine, temperature: float) -> None:
    """The context, what was accepted and the target's token, with the same text as committed."""
    recorder, rounds = watched(engine), list[RoundEvent]()
    lengths: list[int] = []

    def look(event: RoundEvent) -> None:
        if event.outcome is not None and event.outcome.draft.num_nodes:
            rounds.append(event)
            lengths.append(event.session.length)

    engine.events.watchers.append(look)
    params = replace(GREEDY, temperature=temperature, max_tokens=40)
    sessions = engine.generate(prompts(engine, 2), params, FIXED)
    target, own = translator_of(engine).target, translator_of(engine).drafter
    texts = {session.session_id: session.token_ids for session in sessions}
    wanted: list[tuple[str, str, str]] = []
    logits: list[Any] = []
    for event, length in zip(rounds, lengths, strict=True):
        assert event.outcome is not None
        accepted = event.outcome.num_accepted
        ids = texts[event.session.session_id][:length]
        own_one = len(event.outcome.token_ids) > accepted
        end = length - own_one
        rejected = own_one and accepted < event.outcome.draft.num_nodes
        wanted.append((
            target.decode(ids[:end]), target.decode(ids[end - accepted : end]),
            target.decode(ids[end:]) if rejected else "",
        ))  # fmt: skip
        logits.append(event.outcome.verification.logits[accepted].float())
    found = [each for each in recorder.take() if isinstance(each, JudgedDraft)]
    assert len(found) > 0.8 * len(wanted) > 8  # the others end within a character
    at = 0
    kinds = set()
    for each in found:
        context = own.decode(each.token_ids.tolist())
        at = next(i for i in range(at, len(wanted)) if wanted[i][0] == context)
        count = each.num_accepted
        assert own.decode(each.token_ids[len(each.token_ids) - count :].tolist()) == wanted[at][1]
        assert own.decode(each.spelling.tolist()) == wanted[at][2]
        kinds.add((count > 0, min(2, len(each.spelling))))
        if len(each.spelling) != 1:
            assert not len(each.top_ids)
            continue
        assert len(each.top_ids) == 8
        alone = translator_of(engine).alone[each.top_ids]
        probs = logits[at].softmax(-1)[torch.from_numpy(alone)]
        np.testing.assert_allclose(each.top_probs, probs.numpy(), rtol=1e-4)
        for mine, theirs in zip(each.top_ids.tolist(), alone.tolist(), strict=True):
            assert own.decode([mine]) == target.decode([theirs])
    sizes = {size for _, size in kinds}  # all right, one token, several
    assert sizes == {0, 1, 2} if temperature == 0 else sizes >= {1, 2}
    assert {any_right for any_right, _ in kinds} == {True, False}


def test_places_and_labels_of_a_draft() -> None:
    places, labels = draft([5, 6, 7, 8], [9], accepted=2).judged(3)
    assert places.tolist() == [1, 2, 3]
    assert labels.tolist() == [1, 1, 0]
    places, labels = draft([5, 6, 7, 8], [], accepted=2).judged(3)
    assert (places.tolist(), labels.tolist()) == ([1, 2], [1, 1])


def test_rows_are_shared_as_long_as_the_tokens_are_the_same() -> None:
    drafts = [draft([5, 6], [7, 8]), draft([5, 6, 7, 8, 9], [4]), draft([5, 2, 7], [8, 8, 8])]
    ids, rows, places = packed_rows(drafts)
    assert ids.tolist() == [[5, 6, 7, 8, 9], [5, 2, 7, 8, 8]]
    assert (rows.tolist(), places.tolist()) == ([0, 0, 1], [1, 4, 2])


# --- the loss -------------------------------------------------------------------------------------


def log_probs(model: Any, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits.double().log_softmax(-1)


def test_the_hybrid_loss_by_hand() -> None:
    """Accepted and several draft tokens: their likelihood. One draft token in place of a rejected
    one: divergence over those that stand alone."""
    model = load_model(OWN_TOKENS_DIR)
    drafts = [
        draft([3, 40, 50], [60], top=(60, 61)), draft([3, 40, 50, 60], [70, 80, 90]),
        draft([9, 8, 7, 6], [], accepted=2),
    ]  # fmt: skip
    q = log_probs(model, [3, 40, 50]).exp()
    events = torch.stack([q[60], q[61], 1 - q[60] - q[61]])
    p = torch.tensor([0.4, 0.4, 0.2]).double()
    spelled = sum(
        log_probs(model, [3, 40, 50, 60, *before])[token]
        for before, token in (([], 70), ([70], 80), ([70, 80], 90))
    )
    accepted = log_probs(model, [9, 8])[7] + log_probs(model, [9, 8, 7])[6]
    for kind, distance in (
        ("forward_kl", (p * (p / events).log()).sum()),
        ("reverse_kl", (events * (events / p).log()).sum()),
    ):
        for weight in (1.0, 0.25):
            wanted = (distance - weight * spelled - accepted) / 4  # two rejected, two accepted
            found = hybrid_loss(model, drafts, kind, weight)
            torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_judged_tokens_reach_the_drafter_and_nothing_of_the_heads_loss() -> None:
    model, head = load_model(OWN_TOKENS_DIR), AcceptanceBlocks(96)
    drafts = [
        draft([3, 40, 50, 60, 11], [70, 80], accepted=2), draft([9, 8, 7, 6, 5], [], accepted=3)
    ]  # fmt: skip
    outputs: list[torch.Tensor] = []

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    model.model.norm.register_forward_hook(keep)
    hybrid_loss(model, drafts, head=head).backward()
    _, rows, _ = packed_rows(drafts)
    reached = (outputs[0].grad.abs().sum(-1) > 0).nonzero().tolist()  # type: ignore[union-attr]
    places = [[int(rows[0]), at] for at in (2, 3, 4, 5)] + [[int(rows[1]), at] for at in (1, 2, 3)]
    assert reached == sorted(places)
    assert float(head.out.bias.grad.abs()) > 0  # type: ignore[union-attr]
    hidden = outputs[0].detach()
    states = torch.cat([hidden[rows[0], 2:5], hidden[rows[1], 1:4]])
    wanted = weighted_cross_entropy(head(states), torch.tensor([1.0, 1, 0, 1, 1, 1]))
    with_head, without = (hybrid_loss(model, drafts, head=each) for each in (head, None))
    torch.testing.assert_close(with_head - without, wanted)


# --- training while sessions run ------------------------------------------------------------------


def learning(
    engine: Engine, asked: list[list[int]], params: SamplingParams, config: SpeculationConfig,
    **options: Any,
) -> tuple[list[Session], OnlineTrainer]:  # fmt: skip
    """Serve prompts, two at a time; drafter and head get new weights after each update."""
    head = AcceptanceBlocks.of(shipped_head(engine))
    buffer = RejectionBuffer(8, seconds=1e12)
    trainer = OnlineTrainer(OWN_TOKENS_DIR, buffer, head=head, **options)
    recorder, runner = watched(engine), runner_of(engine)
    live = acceptance_head(engine.length_context, "omnidraft")
    sessions: list[Session] = []
    while len(sessions) < len(asked) or engine.has_work:
        while len(sessions) < len(asked) and len(engine.sessions) < 2:
            each = replace(params, seed=len(sessions))
            sessions.append(engine.submit(Request(asked[len(sessions)], each, config)))
        engine.step()
        buffer.add(recorder.take())
        if trainer.update() is not None:
            runner.use_weights(runner.read_weights(trainer.weights()))
            live.use(trainer.head_weights())
    engine.events.watchers.remove(recorder)
    return sessions, trainer


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_those_of_ar_while_drafter_and_head_learn(
    engine: Engine, temperature: float
) -> None:
    asked, params = prompts(engine, 4), replace(GREEDY, temperature=temperature)
    before = runner_of(engine).fingerprint.weights
    sessions, trainer = learning(
        engine, asked, params, ENDED, learning_rate=3e-3, head_learning_rate=1e-2
    )
    assert trainer.num_updates >= 3
    assert runner_of(engine).fingerprint.weights != before
    old, new = shipped_head(engine), trainer.head_weights()
    assert all(not np.array_equal(new[name], old[name]) for name in new)
    for i, session in enumerate(sessions):
        alone = replace(params, seed=i)
        (plain,) = engine.generate([asked[i]], alone, SpeculationConfig(method="ar"))
        assert session.output_ids == plain.output_ids
        assert not session.stats.drafter_failures


@pytest.mark.nightly
def test_more_is_accepted_after_learning(engine: Engine) -> None:
    """Of answers to questions, which are new to a drafter of code; on other questions."""

    def accepted() -> float:
        stats = [s.stats for s in engine.generate(new, GREEDY, FIXED)]
        return sum(s.num_accepted for s in stats) / sum(s.num_rounds for s in stats)

    assert engine.tokenizer is not None
    asked = list(islice(prompts_of("questions", engine.tokenizer, 1), 72))
    new = asked[:8]
    before = accepted()
    learning(engine, asked[8:], replace(GREEDY, max_tokens=64), FIXED, learning_rate=1e-3)
    after = accepted()
    print(f"accepted tokens a round: {before:.3f} -> {after:.3f}")
    assert after > before + 0.3


# --- the head that ends drafts --------------------------------------------------------------------


def drafted_a_round(engine: Engine, config: SpeculationConfig) -> float:
    before = drafter_of(engine).num_drafted
    sessions = engine.generate(prompts(engine, 1), GREEDY, config)
    return (drafter_of(engine).num_drafted - before) / sum(s.stats.num_rounds for s in sessions)


@pytest.mark.parametrize("params", [GREEDY, replace(GREEDY, temperature=0.8, seed=5)])
def test_the_head_decides_how_long_drafts_are(engine: Engine, params: SamplingParams) -> None:
    head = acceptance_head(engine.length_context, "omnidraft")
    certain = {name: 0 * value for name, value in shipped_head(engine).items()}
    config = ENDED.model_copy(update={"length_max": 9, "length_min": 3})
    lengths = []
    for bias in (20.0, -20.0):
        head.use(certain | {"out.bias": np.array([bias], np.float32)})
        before, (session,) = drafter_of(engine).num_drafted, engine.generate(
            prompts(engine, 1), replace(params, max_tokens=24), config
        )  # fmt: skip
        lengths.append((drafter_of(engine).num_drafted - before) / session.stats.num_rounds)
    assert lengths[0] > 6  # the longest, but near the end
    assert 2 < lengths[1] <= 3  # the shortest


def test_the_head_reads_what_the_token_was_drafted_from(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same states that training finds there, up to the runner's rounding."""
    seen: list[torch.Tensor] = []
    own = AcceptanceHead.__call__

    def look(self: AcceptanceHead, step: Any) -> float:
        seen.append(step.hidden.float().clone())
        assert step.token_id == int(step.scores.argmax())
        assert step.depth == len(seen)
        return own(self, step)

    monkeypatch.setattr(AcceptanceHead, "__call__", look)
    prompt = prompts(engine, 1)[0]
    config = ENDED.model_copy(update={"length_min": 4, "length_max": 4})
    engine.generate([prompt], replace(GREEDY, max_tokens=5), config)
    model = load_model(OWN_TOKENS_DIR)
    ids = translator_of(engine).read(prompt)
    for state in seen[:4]:
        hidden = model.model(torch.tensor([ids])).last_hidden_state[0, -1]
        close = torch.cosine_similarity(state, hidden, dim=0)
        assert close > 0.99
        ids.append(int(model.lm_head(hidden).argmax()))


def test_a_head_for_another_draft_model_is_refused() -> None:
    head = AcceptanceHead(AcceptanceBlocks(5).state_dict())
    with pytest.raises(InvalidArgument, match="hidden states of 5 numbers"):
        head(type("Step", (), {"hidden": torch.zeros(96)}))  # type: ignore[arg-type]


def test_the_head_that_ships_is_small_and_ends_drafts(engine: Engine) -> None:
    file = HEADS_DIR / "omnidraft" / "specdecpp.safetensors"
    assert file.stat().st_size < 0.1e6
    assert load_file(file)["out.weight"].shape == (1, 96)
    longest = drafted_a_round(engine, FIXED.model_copy(update={"num_speculative_tokens": 20}))
    assert drafted_a_round(engine, ENDED.model_copy(update={"length_max": 20})) < 0.7 * longest


@pytest.mark.nightly
def test_the_head_is_trained_on_the_drafters_rounds(engine: Engine, tmp_path: Path) -> None:
    asked = prompts(engine, 20)
    rows = collect_translated(engine, asked[:2], 24)
    assert len(rows.token_ids) == len(rows.accepted) == len(rows.mixed_hidden) > 20
    assert set(rows.accepted.tolist()) == {0.0, 1.0}
    result = train_length_head(
        engine, "specdecpp", tmp_path, asked, head="omnidraft", num_tokens=24, epochs=2
    )
    file = tmp_path / "omnidraft" / "specdecpp.safetensors"
    assert result["specdecpp"]["bytes"] > 10_000
    assert "threshold" in load_file(file)
    with pytest.raises(InvalidArgument, match="kind: got 'disco'"):
        train_length_head(engine, "disco", tmp_path, asked, head="omnidraft")
