"""A draft model that learns from its rejections while it serves, and tokens that stay AR's."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from torch.nn.functional import kl_div

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, RoundEvent
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.loading import load_engine
from paceline.models.llama import LlamaRunner
from paceline.rejections import (
    RejectedPosition,
    RejectionBuffer,
    RejectionRecorder,
    drafted_by,
    packed_rows,
    rejected_row,
)
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.train.checkpoints import first_layers, load_model, save_model
from paceline.train.data import load_text
from paceline.train.early_exit import ExitsTask
from paceline.train.online import (
    ONLINE_DIVERGENCES,
    OnlineTrainer,
    rejection_loss,
    top_events,
)
from paceline.train.trainer import TrainOptions, train
from paceline.types import Draft, Outcome, Verification
from tests.core.prompts import code_prompts
from tests.train.conftest import LENGTH

DRAFTS = SpeculationConfig(method="draft_model", length="fixed", num_speculative_tokens=4)
TREES = SpeculationConfig(method="draft_model_tree", length="fixed")
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def drafter(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's first layer: it is often wrong."""
    folder = tmp_path_factory.mktemp("drafter")
    save_model(first_layers(load_model(target), 1), target, folder)
    return folder


@pytest.fixture
def engine(target: Path, drafter: Path) -> Iterator[Engine]:
    engine = load_engine(target, drafter)
    yield engine
    assert not engine.sessions
    assert runner_of(engine).num_free == runner_of(engine).kv_capacity


def runner_of(engine: Engine) -> LlamaRunner:
    drafter = engine.drafters["draft_model"]
    assert isinstance(drafter, DraftModel)
    assert isinstance(drafter.runner, LlamaRunner)
    return drafter.runner


def swap(engine: Engine, data: bytes) -> None:
    runner = runner_of(engine)
    runner.use_weights(runner.read_weights(data))


def watched(engine: Engine, limit: int = 10_000, **options: Any) -> RejectionRecorder:
    recorder = RejectionRecorder(limit, **({"records": lambda session: True} | options))
    engine.events.watchers.append(recorder)
    return recorder


def encoded(text: str) -> list[int]:
    """A token for each letter, in the order of GPT-2's bytes."""
    return [ord(letter) - 33 if letter > " " else {" ": 220, "\n": 198}[letter] for letter in text]


def prompts(count: int, seed: int = 0, letters: str = "abcdefghij") -> list[list[int]]:
    rng = random.Random(seed)
    return [encoded("".join(rng.choices(letters, k=rng.randint(4, 12)))) for _ in range(count)]


def code(count: int, seed: int = 0) -> list[list[int]]:
    """Beginnings as those that the target was trained on."""
    rng = random.Random(seed)
    verbs, nouns = ("get", "set", "find", "load", "drop"), ("path", "name", "user", "file")
    return [
        encoded(f"def {rng.choice(verbs)}_{rng.choice(nouns)}({rng.choice(nouns)}):\n")
        for _ in range(count)
    ]


def rejection(tokens: Sequence[int] = (1, 2, 3), *, at: float = 0.0, who: str = "s", k: int = 3,
              start: int = 0) -> RejectedPosition:  # fmt: skip
    ids = np.arange(5, 5 + k)
    probs = np.full(k, 0.9 / k, np.float32)
    return RejectedPosition(who, start, np.asarray(tokens, np.int64), ids, probs, at)


# --- what is recorded -----------------------------------------------------------------------------


@pytest.mark.parametrize("speculation", [DRAFTS, TREES], ids=["chains", "trees"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_rejected_position_is_recorded_and_no_other(
    engine: Engine, speculation: SpeculationConfig, temperature: float
) -> None:
    recorder, wanted = watched(engine, top_k=8), []
    judged = accepted = 0

    def look(event: RoundEvent) -> None:
        nonlocal judged, accepted
        assert event.outcome is not None
        draft, path, tokens = event.outcome.draft, event.outcome.path, event.outcome.token_ids
        node, depth = -1, 0
        for token in tokens:  # down the tree, by tokens alone
            children = [i for i, p in enumerate(draft.parent_indices.tolist()) if p == node]
            matching = [i for i in children if draft.token_ids[i] == token]
            if not matching:
                break
            node, depth = matching[0], depth + 1
        assert depth == min(len(path), len(tokens))
        accepted += depth
        if depth == len(tokens) - 1 and children:
            judged += 1
            wanted.append(
                (event.session.token_ids[:-1], event.outcome.verification.logits[node + 1])
            )

    engine.events.watchers.append(look)
    params = [replace(GREEDY, temperature=temperature, seed=i) for i in range(6)]
    engine.generate([*code(3), *prompts(3)], params, speculation)
    found = recorder.take()
    assert len(found) == len(wanted) > 10
    assert (recorder.num_judged, recorder.num_accepted) == (judged + accepted, accepted)
    for got, (context, logits) in zip(found, wanted, strict=True):
        assert got.start == 0
        assert got.token_ids.tolist() == context
        probs = logits.float().softmax(-1)
        assert got.top_ids.tolist() == probs.topk(8).indices.tolist()
        np.testing.assert_allclose(got.top_probs, probs.topk(8).values.numpy(), rtol=1e-5)


@pytest.mark.parametrize(
    ("parents", "path", "committed", "row"),
    [
        ((-1, 0, 1), (), (9,), 0),  # the first token is wrong
        ((-1, 0, 1), (0, 1), (1, 2, 9), 2),
        ((-1, 0, 1), (0, 1, 2), (1, 2, 3, 9), None),  # all are right
        ((-1, 0, 1), (0, 1), (1,), None),  # an accepted token ends the text: none was wrong
        ((-1, -1, 0), (1,), (2, 9), None),  # nothing was drafted behind the accepted token
        ((-1, -1, 0), (0,), (1, 9), 1),
        ((), (), (9,), None),
    ],
)
def test_the_row_of_the_rejected_position(
    parents: tuple[int, ...], path: tuple[int, ...], committed: tuple[int, ...], row: int | None
) -> None:
    draft = Draft(np.arange(1, len(parents) + 1), np.asarray(parents, np.int32))
    accepted = min(len(path), len(committed))
    verification = Verification(torch.zeros(len(parents) + 1, 12))
    outcome = Outcome(draft, path, 9, committed, accepted, verification)
    assert rejected_row(outcome) == row


def test_what_is_kept_of_a_context_is_bounded_and_shared(engine: Engine) -> None:
    recorder = watched(engine, window=16)
    engine.generate(prompts(1), GREEDY, DRAFTS)
    found = recorder.take()
    assert {each.start for each in found} >= {0, 8, 16, 24}
    assert all(each.start % 8 == 0 for each in found)
    assert max(len(each.token_ids) for each in found) <= 16
    late = [each for each in found if each.start]
    assert min(len(each.token_ids) for each in late) >= 8  # there is a past to look back on
    ids, rows, places = packed_rows(found)
    assert len(ids) == len({each.start for each in found})
    for each, row, place in zip(found, rows.tolist(), places.tolist(), strict=True):
        assert ids[row, : place + 1].tolist() == each.token_ids.tolist()


def test_only_sessions_that_allow_it_are_recorded(engine: Engine) -> None:
    recorder = RejectionRecorder(10_000)
    engine.events.watchers.append(recorder)
    sessions = [
        engine.submit(Request(prompt, GREEDY, DRAFTS, teaches_drafter=allows))
        for prompt, allows in zip(prompts(4), (True, False, True, False), strict=True)
    ]
    while engine.has_work:
        engine.step()
    allowed = {sessions[0].session_id, sessions[2].session_id}
    assert {each.session_id for each in recorder.take()} == allowed


def test_a_recorder_that_is_full_drops_and_counts(engine: Engine) -> None:
    everything, few = watched(engine), watched(engine, limit=5)
    engine.generate(prompts(3), GREEDY, DRAFTS)
    total = len(everything.take())
    assert len(few.take()) == 5
    assert few.num_dropped == total - 5 > 0


def test_drafts_of_other_drafters_teach_nothing(engine: Engine) -> None:
    recorder = watched(engine)
    repeated = [encoded("abcabcabcabdabcabc")] * 2
    engine.generate(repeated, GREEDY, SpeculationConfig(method="prompt_lookup"))
    engine.generate(repeated, GREEDY, SpeculationConfig(method="ar"))
    assert recorder.num_judged == 0
    assert not recorder.take()


def test_method_auto_records_what_the_draft_model_drafted(tmp_path: Path) -> None:
    engine = load_engine(heads=tmp_path)  # without heads
    recorder, drafted = watched(engine), []

    def look(event: RoundEvent) -> None:
        assert event.outcome is not None
        if rejected_row(event.outcome) is not None:
            drafted.append(drafted_by(event.session))

    engine.events.watchers.append(look)
    assert engine.tokenizer is not None
    # Which drafter pays is measured; on a busy machine it takes a while until it is this one.
    for _ in range(12):
        prompts = code_prompts(engine.tokenizer, 3)
        engine.generate(prompts, GREEDY, SpeculationConfig(method="auto"))
        if "draft_model" in drafted:
            break
    assert len(recorder.take()) == drafted.count("draft_model") > 0


def test_a_watcher_that_fails_ends_no_session(engine: Engine) -> None:
    def fails(event: RoundEvent) -> None:
        raise RuntimeError("no room")

    engine.events.watchers.append(fails)
    recorder = watched(engine)
    (session,) = engine.generate(prompts(1), GREEDY, DRAFTS)
    assert len(session.output_ids) == 40
    assert recorder.take()
    assert engine.events.watchers == [recorder]


# --- the buffer -----------------------------------------------------------------------------------


def test_an_update_is_due_for_each_full_interval() -> None:
    buffer = RejectionBuffer(4, seconds=1e12)
    taken = {}
    for i in range(19):
        buffer.add([rejection([i])])
        if buffer.due:
            taken[i] = [int(each.token_ids[0]) for each in buffer.take()]
            assert not buffer.due
    assert taken == {3: [0, 1, 2, 3], 7: [4, 5, 6, 7], 11: [8, 9, 10, 11], 15: [12, 13, 14, 15]}
    assert len(buffer) == 3  # each is used once and forgotten


def test_older_rejections_fill_a_larger_batch() -> None:
    buffer = RejectionBuffer(2, 5, positions=6, seconds=1e12)
    seen = []
    for i in range(0, 12, 2):
        buffer.add([rejection([i]), rejection([i + 1])])
        seen.append([int(each.token_ids[0]) for each in buffer.take()])
    assert seen[0] == [0, 1]
    assert all(update[:2] == [2 * i, 2 * i + 1] for i, update in enumerate(seen))
    assert [len(update) for update in seen] == [2, 4, 5, 5, 5, 5]
    assert min(seen[-1]) >= 4  # at most six are kept, the newest
    assert len(buffer) == 6


def test_nothing_is_kept_longer_or_in_greater_number_than_allowed() -> None:
    buffer = RejectionBuffer(4, positions=8, seconds=60.0)
    buffer._new.extend(rejection([i], at=1000.0 + 10 * i) for i in range(12))
    buffer.expire(now=1110.0)
    assert [int(each.token_ids[0]) for each in buffer._new] == [5, 6, 7, 8, 9, 10, 11]
    assert buffer.num_dropped == 5
    buffer.expire(now=1e9)
    assert len(buffer) == 0
    assert buffer.num_dropped == 12


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"update_interval": 0}, "update_interval"),
        ({"update_interval": 8, "batch": 7}, "batch"),
        ({"update_interval": 8, "batch": 16, "positions": 15}, "positions"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(values: dict[str, int], field: str) -> None:
    with pytest.raises(InvalidArgument, match=field):
        RejectionBuffer(**values)


# --- the loss -------------------------------------------------------------------------------------


def test_the_loss_is_the_divergence_of_the_kept_tokens_and_the_rest() -> None:
    logits = torch.randn(2, 11, generator=torch.Generator().manual_seed(1))
    top = torch.tensor([[3, 1], [10, 0]])
    events = top_events(logits, top).exp()
    whole = logits.softmax(-1)
    torch.testing.assert_close(events[:, :2], whole.gather(1, top))
    torch.testing.assert_close(events.sum(1), torch.ones(2))
    everything = torch.arange(11).expand(2, 11)
    torch.testing.assert_close(top_events(logits, everything).exp(), whole)


@pytest.mark.parametrize("divergence", ["forward_kl", "reverse_kl", "jsd"])
def test_the_divergences_against_their_definitions(drafter: Path, divergence: str) -> None:
    model = load_model(drafter)
    given = [rejection([1, 2, 3, 4]), rejection([9, 8], who="t")]
    p = torch.tensor([[0.3, 0.3, 0.3, 0.1]] * 2).double()
    rows = []
    for each in given:
        whole = model(torch.tensor([each.token_ids.tolist()])).logits[0, -1].double().softmax(-1)
        kept = whole[torch.from_numpy(each.top_ids)]
        rows.append(torch.cat([kept, 1 - kept.sum(0, keepdim=True)]))
    q = torch.stack(rows)

    def kl(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return kl_div(b.log(), a, reduction="batchmean")

    m = 0.9 * p + 0.1 * q
    wanted = {
        "forward_kl": kl(p, q),
        "reverse_kl": kl(q, p),
        "jsd": 0.9 * kl(p, m) + 0.1 * kl(q, m),
    }
    found = rejection_loss(model, given, divergence)
    torch.testing.assert_close(found.double(), wanted[divergence], rtol=1e-4, atol=1e-6)


def test_no_gradient_comes_from_accepted_positions(engine: Engine, drafter: Path) -> None:
    recorder = watched(engine)
    engine.generate([*code(2), *prompts(2)], GREEDY, DRAFTS)
    found = recorder.take()
    model, outputs = load_model(drafter), []

    def keep(module: Any, inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        outputs.append(output)

    model.model.norm.register_forward_hook(keep)
    rejection_loss(model, found).backward()
    ids, rows, places = packed_rows(found)
    reached = (outputs[0].grad.abs().sum(-1) > 0).nonzero().tolist()
    rejected = torch.stack([rows, places], 1).tolist()
    assert sorted(reached) == sorted(rejected)
    assert len(reached) == len(found) < ids.numel()
    assert recorder.num_accepted > 10


# --- training while sessions run ------------------------------------------------------------------


def serve(
    engine: Engine, trainer: OnlineTrainer, recorder: RejectionRecorder,
    prompts: Sequence[list[int]], params: Sequence[SamplingParams], speculation: SpeculationConfig,
) -> tuple[list[Session], int]:  # fmt: skip
    """Serve prompts, four at a time, and give the drafter new weights after each update."""
    waiting = list(zip(prompts, params, strict=True))
    sessions: list[Session] = []
    swaps_under_way = 0
    while waiting or engine.has_work:
        while waiting and len(engine.sessions) < 4:
            sessions.append(engine.submit(Request(waiting[0][0], waiting[0][1], speculation)))
            waiting.pop(0)
        engine.step()
        trainer.buffer.add(recorder.take())
        if trainer.update() is not None:
            swap(engine, trainer.weights())
            swaps_under_way += bool(engine.sessions)
    return sessions, swaps_under_way


@pytest.mark.parametrize("speculation", [DRAFTS, TREES], ids=["chains", "trees"])
def test_tokens_are_those_of_ar_while_weights_change(
    engine: Engine, drafter: Path, speculation: SpeculationConfig
) -> None:
    inputs = [*code(6), *prompts(6)]
    params = [
        replace(GREEDY, temperature=(0.0, 0.8)[i % 2], seed=i, max_tokens=30 + 5 * (i % 3))
        for i in range(12)
    ]
    plain = engine.sibling().generate(inputs, params, SpeculationConfig(method="ar"))
    before = engine.local_target.runner.fingerprint.weights
    trainer = OnlineTrainer(drafter, RejectionBuffer(16), learning_rate=3e-3)
    recorder = watched(engine)
    sessions, swaps = serve(engine, trainer, recorder, inputs, params, speculation)
    assert swaps >= 4
    assert [s.output_ids for s in sessions] == [s.output_ids for s in plain]
    assert not any(s.stats.drafter_lost for s in sessions)
    target = engine.local_target.runner
    target.__dict__.pop("fingerprint")
    assert target.fingerprint.weights == before


def test_weights_of_another_drafter_cost_drafts_and_no_token(engine: Engine) -> None:
    """Whatever the weights are: here, noise in the middle of each session."""
    plain = engine.sibling().generate(code(4), GREEDY, SpeculationConfig(method="ar"))
    runner = runner_of(engine)
    own = load((runner._folder / "model.safetensors").read_bytes())
    sessions = [engine.submit(Request(prompt, GREEDY, DRAFTS)) for prompt in code(4)]
    generator = torch.Generator().manual_seed(2)
    while engine.has_work:
        engine.step()
        swap(engine, save({n: torch.randn(t.shape, generator=generator) for n, t in own.items()}))
    assert [s.output_ids for s in sessions] == [s.output_ids for s in plain]


def test_swapped_weights_are_those_of_a_fresh_load(
    engine: Engine, drafter: Path, target: Path, tmp_path: Path
) -> None:
    runner = runner_of(engine)
    before = runner.fingerprint.weights
    model = load_model(drafter)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    save_model(model, drafter, tmp_path)
    swap(engine, (tmp_path / "model.safetensors").read_bytes())
    fresh = runner_of(load_engine(target, tmp_path))
    assert runner.fingerprint.weights == fresh.fingerprint.weights != before


def test_old_weights_are_freed(engine: Engine, drafter: Path) -> None:
    runner = runner_of(engine)
    for _ in range(3):
        engine.generate(code(1), GREEDY, DRAFTS)
        swap(engine, (drafter / "model.safetensors").read_bytes())
    engine.generate(code(1), GREEDY, DRAFTS)
    if runner.native_ops is not None:
        assert len(runner.native_ops._tables) == 1


def test_weights_that_do_not_fit_are_refused_and_change_nothing(engine: Engine) -> None:
    runner = runner_of(engine)
    before = runner.fingerprint.weights
    data = (runner._folder / "model.safetensors").read_bytes()
    tensors = load(data)
    first = next(iter(tensors))
    for broken in (
        data[: len(data) // 2], b"", save({n: t for n, t in tensors.items() if n != first}),
        save(tensors | {"more": torch.zeros(2)}), save(tensors | {first: tensors[first][:-1]}),
    ):  # fmt: skip
        with pytest.raises((ModelNotFound, InvalidArgument)):
            runner.read_weights(broken)
    assert runner.fingerprint.weights == before


def test_an_unknown_divergence_is_refused(drafter: Path) -> None:
    with pytest.raises(InvalidArgument, match="divergence"):
        OnlineTrainer(drafter, RejectionBuffer(4), divergence="tvd")


def acceptance(engine: Engine, inputs: Sequence[list[int]]) -> float:
    """Share of the judged drafted tokens that are accepted."""
    recorder = watched(engine, records=lambda session: False)
    engine.generate(inputs, GREEDY, DRAFTS)
    engine.events.watchers.remove(recorder)
    return recorder.num_accepted / recorder.num_judged


def learn(engine: Engine, trainer: OnlineTrainer, inputs: Sequence[list[int]]) -> None:
    recorder = watched(engine)
    serve(engine, trainer, recorder, inputs, [GREEDY] * len(inputs), DRAFTS)
    engine.events.watchers.remove(recorder)


class Domains:
    """Two languages in which each letter decides the next one: of small letters and of capitals."""

    def __init__(self) -> None:
        self.after = {
            first: random.Random(seed).sample(range(26), 26) for seed, first in enumerate("aA")
        }

    def text(self, rng: random.Random, count: int, first: str) -> str:
        letters = [rng.randrange(26)]
        while len(letters) < count:
            # Now and then a new beginning, so that a text is no mere cycle.
            fresh = rng.random() < 0.05
            letters.append(rng.randrange(26) if fresh else self.after[first][letters[-1]])
        return "".join(chr(ord(first) + letter) for letter in letters)

    def prompts(self, count: int, seed: int, first: str) -> list[list[int]]:
        rng = random.Random(seed)
        return [encoded(self.text(rng, 6, first)) for _ in range(count)]


@pytest.fixture(scope="module")
def two_domains(random_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target that has learnt both languages, and its first layer."""
    folder, domains = tmp_path_factory.mktemp("domains"), Domains()
    file = folder / "words.txt"
    rng = random.Random(1)
    file.write_text("\n\n".join(domains.text(rng, 2000, "aA"[i % 2]) for i in range(20)))
    text = load_text(random_target, [file], LENGTH, held_out_rows=4)
    task = ExitsTask(random_target, text, exit_scale=0.0, layer_dropout=0.0)
    out = folder / "target"
    train(task, TrainOptions(out=out, steps=150, learning_rate=5e-3, eval_every=150))
    save_model(first_layers(load_model(out), 1), out, folder / "drafter")
    return out, folder / "drafter"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("divergence", "rounds"),
    [("forward_kl", 1), *((each, 4) for each in ONLINE_DIVERGENCES)],
)
def test_acceptance_rises_falls_after_a_shift_and_recovers(
    two_domains: tuple[Path, Path], divergence: str, rounds: int
) -> None:
    engine, domains = load_engine(*two_domains), Domains()
    buffer = RejectionBuffer(16, 64)
    trainer = OnlineTrainer(two_domains[1], buffer, divergence=divergence, learning_rate=1e-2)
    first, second = (domains.prompts(8, 0, letter) for letter in "aA")
    start = acceptance(engine, first)
    learn(engine, trainer, domains.prompts(48 * rounds, 1, "a"))
    learnt, fallen = acceptance(engine, first), acceptance(engine, second)
    learn(engine, trainer, domains.prompts(24 * rounds, 2, "A"))
    recovered = acceptance(engine, second)
    print(f"{start:.3f} -> {learnt:.3f}, shift {fallen:.3f} -> {recovered:.3f}, "
          f"{trainer.num_updates} updates")  # fmt: skip
    assert learnt > start + 0.25
    assert fallen < learnt - 0.15
    assert recovered > fallen + 0.25
