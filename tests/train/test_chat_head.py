"""Training an EAGLE-3 head on a model's own answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.engine import Engine, RoundEvent
from paceline.errors import ModelNotFound
from paceline.loading import load_engine
from paceline.models.heads.base import HeadTarget
from paceline.models.heads.dspark import DSparkOptions
from paceline.models.heads.eagle import MEASURED_DEPTH
from paceline.models.heads.eagle3 import Eagle3, Eagle3Options
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.train.chat_head import (
    KEPT,
    BlockTrainer,
    ChainTrainer,
    ChatBatch,
    Talk,
    Teacher,
    choose_vocabulary,
    loss_of,
    read_talks,
    write_features,
)
from paceline.train.conversations import TOP_K, Conversation, save
from paceline.train.shortlist import states_of

LAYERS = (2, 10, 18)
OPTIONS = Eagle3Options(features=LAYERS, vocabulary=2048, unroll=2, int8=False)
PROMPT, ANSWER = 24, 48


def submitted(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    speculation: SpeculationConfig,
    events: dict[str, list[RoundEvent]],
) -> list[Session]:
    """Generate for all prompts together; ``events`` gets the rounds of each session."""
    sessions = [
        engine.submit(
            Request(list(prompt), params, speculation),
            on_event=lambda event: events.setdefault(event.session.session_id, []).append(event),
        )
        for prompt in prompts
    ]
    while not all(session.finished for session in sessions):
        engine.step()
    return sessions


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> list[Talk]:
    """Greedy answers of the demo target to 56 beginnings, with its five likeliest tokens."""
    folder = tmp_path_factory.mktemp("talks")
    engine = load_engine("demo")
    assert engine.tokenizer is not None
    text = engine.tokenizer.encode(Path(__file__).read_text() * 2)
    prompts = [text[i * 20 : i * 20 + PROMPT] for i in range(56)]
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, logprobs=5)
    tops: dict[str, list[RoundEvent]] = {}

    sessions = submitted(engine, prompts, params, SpeculationConfig(method="ar"), tops)
    shard = []
    for number, session in enumerate(sessions):
        top = [entry.top for event in tops[session.session_id] for entry in event.logprobs]
        shard.append(
            Conversation(
                "", "even" if number % 2 else "odd", list(session.token_ids),
                list(range(PROMPT, PROMPT + ANSWER)), [[t for t, _ in row] for row in top],
                [[math.exp(p) for _, p in row] for row in top],
            )
        )  # fmt: skip
    save(shard, folder / "00000.npz")
    write_features(folder, "demo", LAYERS, 64)
    training, held_out = read_talks([folder], 64, LAYERS)
    return training + held_out


@pytest.mark.slow
def test_features_belong_to_their_tokens(talks: list[Talk]) -> None:
    """Cut at 64 tokens, and each conversation has its own rows of the file."""
    assert {len(talk.tokens) for talk in talks} == {64}
    assert {talk.features.shape for talk in talks} == {(64, 3 * 160)}
    assert all(talk.positions.tolist() == list(range(PROMPT, 64)) for talk in talks)
    assert all((talk.top_ids[:, 0] == talk.tokens[talk.positions]).all() for talk in talks)
    by_prompt = {tuple(talk.tokens[:8].tolist()): talk for talk in talks}
    for one in talks:
        twin = by_prompt[tuple(one.tokens[:8].tolist())]
        assert (np.array(one.features[:8]) == np.array(twin.features[:8])).all()


def test_a_step_less_or_more_changes_no_weight(talks: list[Talk], tmp_path: Path) -> None:
    """Interrupted and resumed, training gives the weights of one that ran through."""

    def trainer(work: Path) -> ChainTrainer:
        return ChainTrainer(
            TARGET_DIR, talks, work, options=OPTIONS, steps=6, batch_tokens=512,
            checkpoint_seconds=0.0,
        )  # fmt: skip

    whole = trainer(tmp_path / "whole")
    whole.run()
    first = trainer(tmp_path / "parts")
    step = first._loss_of_step

    def killed(number: int, progress: float) -> tuple[torch.Tensor, float, int]:
        if number == 3:
            raise KeyboardInterrupt
        return step(number, progress)

    first._loss_of_step = killed  # type: ignore[assignment,method-assign]
    with pytest.raises(KeyboardInterrupt):
        first.run()
    second = trainer(tmp_path / "parts")
    assert second.run().step == 6
    for (name, one), other in zip(
        whole.head.state_dict().items(), second.head.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name


def test_a_head_goes_on_from_an_earlier_one(talks: list[Talk], tmp_path: Path) -> None:
    """It begins as the earlier one, and ends as the average of what it became and that one."""

    def trainer(work: str, **options: Any) -> ChainTrainer:
        return ChainTrainer(
            TARGET_DIR, talks, tmp_path / work, steps=2, batch_tokens=512, chains_from=0.0,
            **{"options": OPTIONS, **options},
        )  # fmt: skip

    first = trainer("first")
    first.run()
    first.save(tmp_path / "head")
    second = trainer("second", earlier=tmp_path / "head")
    before = {name: p.detach().clone() for name, p in second.head.named_parameters()}
    for name, parameter in first.head.named_parameters():
        close = torch.isclose(before[name], parameter, rtol=0.01, atol=0.02)
        assert close.float().mean() > 0.99, name  # rounded to eight bits or sixteen
    second.run()
    became = torch.load(tmp_path / "second" / "head.pt", weights_only=True)["model"]
    for name, parameter in second.head.named_parameters():
        assert torch.equal(parameter, became[name].lerp(before[name], KEPT)), name
        assert not torch.equal(parameter, before[name]), name
    with pytest.raises(ModelNotFound, match="does not fit"):
        trainer("third", earlier=tmp_path / "head", **{"options": replace(OPTIONS, num_layers=2)})
    with pytest.raises(ModelNotFound, match=r"no model\.safetensors to go on from"):
        trainer("fourth", earlier=tmp_path / "nothing")


@pytest.mark.nightly
def test_the_measured_length_is_that_of_serving(talks: list[Talk], tmp_path: Path) -> None:
    """A trained head drafts better than an untrained one, and as the measurement says."""
    trainer = ChainTrainer(
        TARGET_DIR, talks, tmp_path / "work", options=OPTIONS, steps=60, batch_tokens=1024
    )
    before = trainer.measure(talks[:12])["all"]["accepted_length"]
    trainer.run()
    measured = trainer.measure(talks[:12])
    after = measured["all"]["accepted_length"]
    assert after > before + 0.5
    assert set(measured) == {"all", "even", "odd"}
    trainer.save(tmp_path / "heads" / "eagle3")
    engine = load_engine("demo", heads=tmp_path / "heads")
    speculation = SpeculationConfig(
        method="eagle3", length="fixed", num_speculative_tokens=5, shape="chain"
    )
    rounds = committed = 0
    for talk in talks[:12]:
        first = PROMPT + 1  # the first draft follows the first token of the answer
        params = SamplingParams(max_tokens=64 - first, ignore_eos=True)
        events: dict[str, list[RoundEvent]] = {}
        prompt = talk.tokens[:first].tolist()
        (session,) = submitted(engine, [prompt], params, speculation, events)
        assert list(session.token_ids) == talk.tokens.tolist()
        sizes = [len(event.token_ids) for event in events[session.session_id]]
        rounds, committed = rounds + len(sizes) - 1, committed + sum(sizes[1:])
    assert committed / rounds == pytest.approx(after, abs=0.35)


def test_the_loss_against_whole_distributions() -> None:
    """The k likeliest tokens and one event for the rest, by hand for a vocabulary of four."""
    logits = torch.tensor([[0.5, -1.0, 2.0]])  # of tokens 0, 2 and 3
    logit_of = torch.tensor([0, -1, 1, 2])
    ids, probs = torch.tensor([[3, 1]]), torch.tensor([[0.6, 0.3]])
    q = logits.softmax(-1)[0, 2]
    kl = -(0.6 * q.log() + 0.4 * (1 - q).log())
    total_variation = 0.5 * ((0.6 - q).abs() + (0.4 - (1 - q)).abs())
    expected = 0.4 * kl - 0.4 * q.log() + 0.6 * total_variation
    loss, accepted = loss_of(logits, ids, probs, logit_of)
    assert float(loss) == pytest.approx(float(expected))
    assert float(accepted) == pytest.approx(1 - float(total_variation))


def test_the_vocabulary_is_what_the_target_says(talks: list[Talk]) -> None:
    chosen = choose_vocabulary(talks, 300, 4096)
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    mass = np.zeros(4096)
    for talk in talks:
        for ids, probs in zip(talk.top_ids, talk.top_probs, strict=True):
            mass[ids] += probs
    others = np.setdiff1d(np.arange(4096), chosen)
    assert mass[chosen].min() >= mass[others].max() - 1e-5


def without_what_is_stored(talks: Sequence[Talk]) -> list[Talk]:
    nothing = np.zeros((PROMPT, 0))
    return [
        replace(talk, features=None, top_ids=nothing.astype(np.uint16), top_probs=nothing)
        for talk in talks
    ]


def test_a_teacher_says_what_is_stored(talks: list[Talk]) -> None:
    """Features and likeliest tokens, up to bfloat16's products; others are out of the question."""
    target = HeadTarget.from_folder(TARGET_DIR)
    stored = ChatBatch.of(talks[:4])
    vocabulary = torch.from_numpy(choose_vocabulary(talks, 4000, 4096))
    taught = Teacher(target, LAYERS, vocabulary).complete(
        ChatBatch.of(without_what_is_stored(talks[:4]))
    )
    for name in ("tokens", "rows", "places"):
        assert torch.equal(getattr(taught, name), getattr(stored, name)), name
    size = len(talks[0].tokens)
    expected, found = (batch.features[:, :size].float() for batch in (stored, taught))
    assert float((found - expected).norm() / expected.norm()) < 0.03
    assert taught.probs.shape == (len(stored.rows), TOP_K)
    assert float((taught.ids[:, 0] == stored.ids[:, 0]).float().mean()) > 0.9
    assert float((taught.probs[:, 0] - stored.probs[:, 0]).abs().mean()) < 0.05
    assert set(taught.ids.flatten().tolist()) <= set(vocabulary.tolist())


def block_trainer(talks: Sequence[Talk], work: Path, **options: Any) -> BlockTrainer:
    given = {"num_layers": 1, "vocabulary": 2048, "markov_rank": 16, "int8": False, "anchors": 16}
    return BlockTrainer(
        TARGET_DIR, talks, work, options=DSparkOptions(features=LAYERS, **(given | options)),
        steps=40, batch_tokens=1024,
    )  # fmt: skip


def test_a_block_drafts_what_follows_its_anchor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each token is the one before plus one, a head that adds one is always right."""
    positions, none = np.arange(5, 40), np.zeros((35, 0))
    counting = [
        Talk(
            "odd", np.arange(first, first + 40).astype(np.uint16), None, positions,
            none.astype(np.uint16), none.astype(np.float16),
        )
        for first in range(100, 105)
    ]  # fmt: skip
    trainer = block_trainer(counting, tmp_path, vocabulary=4096)
    monkeypatch.setattr(
        trainer.head, "heads", lambda _, before: (F.one_hot(before + 1, 4096).float(), None)
    )
    measured = trainer.measure(counting)["all"]
    # The first answer tokens have no anchors that lie so far before them.
    expected = [(35 - depth) / 35 for depth in range(5)]
    assert measured["agreement"] == pytest.approx(expected, abs=1e-4)
    assert measured["accepted_length"] == 6.0


@pytest.mark.nightly
def test_trained_blocks_draft_as_measured(talks: list[Talk], tmp_path: Path) -> None:
    trainer = block_trainer(without_what_is_stored(talks), tmp_path / "work")
    before = trainer.measure(talks[:12])["all"]["accepted_length"]
    trainer.run()
    after = trainer.measure(talks[:12])["all"]["accepted_length"]
    assert after > before + 0.2
    trainer.save(tmp_path / "heads" / "dspark")
    engine = load_engine("demo", heads=tmp_path / "heads")
    speculation = SpeculationConfig(
        method="dspark", length="fixed", num_speculative_tokens=5, shape="chain"
    )
    events: dict[str, list[RoundEvent]] = {}
    params = SamplingParams(max_tokens=63 - PROMPT, ignore_eos=True)
    prompts = [talk.tokens[: PROMPT + 1].tolist() for talk in talks[:12]]
    sessions = submitted(engine, prompts, params, speculation, events)
    for talk, session in zip(talks, sessions, strict=False):
        assert list(session.token_ids) == talk.tokens.tolist()[: len(session.token_ids)]
    sizes = [len(event.token_ids) for of in events.values() for event in of[1:]]
    assert sum(sizes) / len(sizes) == pytest.approx(after, abs=0.35)


def test_a_shortlist_is_fitted_to_what_chains_are_drafted_from(talks: list[Talk]) -> None:
    """All depths of all places, beginning with what drafting reads from the first one."""
    torch.manual_seed(1)
    head = Eagle3(HeadTarget.from_folder(TARGET_DIR), OPTIONS).eval().requires_grad_(False)
    head.prepare()
    talk = talks[0]
    states = states_of(head, talk)
    places = talk.positions - 2
    assert len(states) == sum(int((places >= depth).sum()) for depth in range(MEASURED_DEPTH))
    place = int(places[0])
    read = ChatBatch.of([talk]).features[0, : place + 1].float()
    drafted = head.root([head.new_state()], [read], [talk.tokens[1 : place + 2].tolist()])
    torch.testing.assert_close(
        states[0] @ head.output_rows.T, drafted[0, head.vocabulary], atol=1e-3, rtol=1e-3
    )
