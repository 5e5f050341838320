"""Mixture of Attentions: nothing after the last verified token is ever read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.drafters.head import HeadDrafter
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.models.heads import HeadLibrary
from paceline.models.heads.base import HeadTarget, load_head
from paceline.models.heads.moa import (
    MixtureOfAttentions,
    MixtureOptions,
    staircase_mask,
    step_starts,
)
from paceline.models.llama import LlamaRunner
from paceline.sampling import SamplingParams
from paceline.shapes.kary import chain
from paceline.target import ModelTarget
from paceline.types import Budget, Draws
from tests.core.toy_heads import (
    accepted_length,
    check_end_of_context,
    decode,
    demo_runner,
    demo_target,
    drafted_logits,
    evaluate,
    random_head,
    read,
    texts,
    train,
)

IDS = list(range(40, 54))


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> HeadTarget:
    return HeadTarget.from_folder(tiny_folder)


@pytest.fixture
def states(target: HeadTarget) -> torch.Tensor:
    """# [length, num_layers, hidden_size]"""
    shape = len(IDS), target.config.num_layers, target.config.hidden_size
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(params=[0, 1], ids=lambda n: f"N={n}")
def head(request: pytest.FixtureRequest, target: HeadTarget, tmp_path: Path) -> MixtureOfAttentions:
    """A random head as it is loaded to draft; with N = 0 only the ends of the target are there."""
    options = MixtureOptions(horizon=4, target_layers=request.param)
    random_head(MixtureOfAttentions, target, options).save(tmp_path)
    there = target if request.param else replace(target, folder=None)
    return load_head(MixtureOfAttentions, tmp_path, there)


@pytest.mark.parametrize("phase", range(4))
def test_drafts_depend_on_nothing_after_the_last_verified_token(
    phase: int, head: MixtureOfAttentions, states: torch.Tensor
) -> None:
    length, ids = len(IDS), torch.tensor([IDS])
    starts = step_starts(length, 4, phase).tolist()
    assert all(place - 3 <= start <= place for place, start in enumerate(starts))
    assert len(set(starts)) == len({(place + phase) // 4 for place in range(length)})
    mask = staircase_mask(length, 4, phase)
    before = head(states[None], ids, phase)[0]
    for place in range(length):
        other = states.clone()
        other[place] += 1.0
        after = head(other[None], ids, phase)[0]
        for row in range(length):
            assert mask[row, place] == (place <= starts[row])
            assert torch.equal(before[row], after[row]) == (place > starts[row])


def test_drafting_computes_what_training_does(
    head: MixtureOfAttentions, states: torch.Tensor, target: HeadTarget
) -> None:
    for last in range(len(IDS) - 4):
        phase = -last % 4  # a step begins with the last verified place
        drafted = head(states[None], torch.tensor([IDS]), phase)[0, last : last + 4]
        state = head.new_state()
        logits = [head.root([state], [states[: last + 1]], [IDS[: last + 1]])[0]]
        for node in range(3):
            step = (node, IDS[last + 1 + node], node - 1)
            logits.append(head.expand([state], [[step]])[0])
        head.free(state)
        assert torch.allclose(torch.stack(logits), target.logits(drafted), atol=1e-4)


def test_rounds_leave_no_trace_of_their_drafts(
    head: MixtureOfAttentions, states: torch.Tensor
) -> None:
    state, done = head.new_state(), 0
    for count in (5, 1, 2, 1, 4):
        rows, ids = states[done : done + count], IDS[done : done + count]
        logits = head.root([state], [rows], [ids])
        head.greedy_chains([state], [3], 4)
        done += count
        fresh = head.new_state()
        at_once = head.root([fresh], [states[:done]], [IDS[:done]])
        assert torch.allclose(logits, at_once, atol=1e-4)
        head.free(fresh)
    head.free(state)
    for stack in [head.stack, head.inference] if head.options.target_layers else [head.stack]:
        assert stack.pool.num_free == stack.pool.capacity


def test_a_node_of_a_tree_is_as_on_its_path_alone(
    head: MixtureOfAttentions, states: torch.Tensor
) -> None:
    paths = [[60, 61, 62], [60, 63, 64], [65, 66, 67]]
    together = drafted_logits(head, states, IDS, paths)
    alone = torch.cat([drafted_logits(head, states, IDS, [path]) for path in paths])
    assert torch.allclose(together, alone, atol=1e-4)


def test_sessions_do_not_mix(head: MixtureOfAttentions, states: torch.Tensor) -> None:
    pair = [head.new_state(), head.new_state()]
    features, ids = [states[:9], states[3:7]], [IDS[:9], IDS[3:7]]
    together = [head.root(pair, features, ids)]
    together.append(head.expand(pair, [[(0, 60, -1), (1, 61, -1)], [(0, 62, -1)]]))
    apart: list[list[torch.Tensor]] = [[], []]
    for i, frontier in enumerate([[(0, 60, -1), (1, 61, -1)], [(0, 62, -1)]]):
        state = head.new_state()
        apart[0].append(head.root([state], [features[i]], [ids[i]]))
        apart[1].append(head.expand([state], [frontier]))
    for whole, parts in zip(together, apart, strict=True):
        assert torch.allclose(whole, torch.cat(parts), atol=1e-4)


class Behind:
    """A session whose last tokens no target has seen."""

    params, draws, stop_rule, session_id = SamplingParams(), Draws.TOP, None, "s"
    adapter = tenant = ""

    def __init__(self, token_ids: list[int]) -> None:
        self.token_ids = token_ids
        self.shape = chain()

    @property
    def length(self) -> int:
        return len(self.token_ids)


@pytest.mark.parametrize("head", [0], indirect=True, ids=["N=0"])
def test_it_drafts_on_from_the_last_states_that_it_received(
    head: MixtureOfAttentions, states: torch.Tensor
) -> None:
    """States that come later are not read, and each step costs one node."""
    nodes: list[int] = []
    expand = head.expand
    head.expand = lambda states, frontiers: (  # type: ignore[method-assign]
        nodes.append(sum(map(len, frontiers))) or expand(states, frontiers)  # type: ignore[func-returns-value]
    )

    def alone(later: torch.Tensor | None) -> list[int]:
        drafter, session = HeadDrafter(head), cast(Any, Behind(IDS[:9]))
        assert drafter.drafts_on
        drafter.open(session)
        assert not drafter.draft_on(session, Budget(3, 3)).num_nodes  # nothing to begin with
        drafter.read_states(session, states[:8].flatten(1))
        (draft,) = drafter.propose([session], [Budget(4, 4)])
        session.token_ids += draft.token_ids.tolist()
        for step in range(3):
            if later is not None:
                drafter.read_states(session, later[step : step + 1].flatten(1))
            nodes.clear()
            tokens = drafter.draft_on(session, Budget(3, 3)).token_ids.tolist()
            assert len(tokens) == 3
            # The first draft's four tokens; later the last one of the three; and two of the new.
            assert sum(nodes) == (4 if step == 0 else 1) + 2
            session.token_ids += tokens
        drafter.close(session)
        return session.token_ids[9:]  # type: ignore[no-any-return]

    found = alone(None)
    assert found == alone(states[8:11] + 1.0)
    state = head.new_state()
    logits, path = head.root([state], [states[:8]], [IDS[1:9]]), []
    for node, token in enumerate(found):
        assert token == int(logits[0].argmax())
        path.append(token)
        logits = expand([state], [[(node, token, node - 1)]])
    head.free(state)
    assert head.stack.pool.num_free == head.stack.pool.capacity


@pytest.mark.parametrize("head", [0], indirect=True, ids=["N=0"])
def test_a_guess_that_changes_is_drafted_on_from_where_it_does(
    head: MixtureOfAttentions, states: torch.Tensor
) -> None:
    drafter, session = HeadDrafter(head), cast(Any, Behind(IDS[:9]))
    drafter.open(session)
    drafter.read_states(session, states[:8].flatten(1))
    drafter.propose([session], [Budget(2, 2)])
    found: dict[tuple[int, ...], list[list[int]]] = {}
    for last in ([3, 4, 5], [3, 6], [3, 4, 5]):
        session.token_ids = [*IDS[:9], *last]
        found.setdefault(tuple(last), []).append(
            drafter.draft_on(session, Budget(2, 2)).token_ids.tolist()
        )
    first, again = found[3, 4, 5]
    assert first == again
    state = head.new_state()
    head.root([state], [states[:8]], [IDS[1:9]])
    head.expand([state], [[(0, 3, -1)]])
    assert found[3, 6][0][0] == int(head.expand([state], [[(1, 6, 0)]])[0].argmax())
    assert first[0] == int(
        [head.expand([state], [[(2, 4, 0)]]), head.expand([state], [[(3, 5, 2)]])][1][0].argmax()
    )
    head.free(state)
    drafter.close(session)


def test_all_layers_count(head: MixtureOfAttentions, states: torch.Tensor) -> None:
    """And the layers are told apart: swapping two of them changes the summary."""
    summary = head.summary(states)
    assert summary.shape == (len(IDS), states.shape[-1])
    for layer in range(states.shape[1]):
        other = states.clone()
        other[:, layer] += torch.randn_like(other[:, layer])
        assert not torch.allclose(head.summary(other), summary, atol=1e-3)
    assert not torch.allclose(head.summary(states.flip(1)), summary, atol=1e-4)


def test_drafting_needs_no_layer_of_the_target(tiny_folder: Path, tmp_path: Path) -> None:
    """The target itself runs once in a round, to verify, and its layers are no part of the head."""
    target = HeadTarget.from_folder(tiny_folder)
    random_head(MixtureOfAttentions, target, MixtureOptions()).save(tmp_path / "moa")
    runner = LlamaRunner(tiny_folder, kv_tokens=500)
    forwards = []
    forward = runner.forward
    runner.forward = lambda *a, **k: forwards.append(0) or forward(*a, **k)  # type: ignore
    engine = Engine(ModelTarget(runner), heads=HeadLibrary(tmp_path, tiny_folder, runner))
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    config = SpeculationConfig(method="moa", length="fixed")
    (session,) = engine.generate([list(b"prompt")], params, config)
    assert session.stats.num_draft_nodes > session.stats.num_rounds
    assert len(forwards) == session.stats.num_rounds + 1  # and once to read the prompt


def test_what_a_drafter_elsewhere_would_be_sent(
    head: MixtureOfAttentions, states: torch.Tensor
) -> None:
    """One vector for each token: a share of ``1 / num_layers`` of what the layers computed.

    With layers of the target, also what enters the first of them.
    """
    state, done, vectors = head.new_state(), 0, 1 + (head.options.target_layers > 0)
    for count in (6, 1, 3):
        rows = states[done : done + count]
        head.root([state], [rows], [IDS[done : done + count]])
        done += count
        assert state.payload_bytes == vectors * count * states.shape[-1] * 4
        assert state.payload_bytes * states.shape[1] == vectors * rows.numel() * 4


@pytest.mark.parametrize("count", [1, 3])
def test_the_targets_layers_complete_what_is_drafted(count: int) -> None:
    """With the true state in place of a draft, the logits are the target's own."""
    batch = read(demo_runner(), texts()[:2])
    assert batch.layer_states is not None
    head = MixtureOfAttentions(demo_target(), MixtureOptions(target_layers=count))
    states = batch.layer_states
    for phase in range(2):
        features = head._inferred(states[:, :-1], states[:, 1:, -1 - count], phase)
        assert torch.allclose(features, batch.hidden[:, 1:], atol=1e-3)


def test_layers_of_the_target_are_not_trained_and_not_saved(tmp_path: Path) -> None:
    """Its norm and its layers stay the target's."""
    plain, inferring = (
        MixtureOfAttentions(demo_target(), MixtureOptions(target_layers=count)) for count in (0, 3)
    )
    assert set(plain.state_dict()) - set(inferring.state_dict()) == {"norm.weight"}
    assert not set(inferring.state_dict()) - set(plain.state_dict())


@pytest.mark.parametrize(
    ("count", "allowed"), [(-1, "at least 0"), (2, "below 2"), (1, "0 for a target without")]
)
def test_layers_that_the_target_does_not_give(count: int, allowed: str, target: HeadTarget) -> None:
    assert target.config.num_layers == 2
    with pytest.raises(InvalidArgument, match=f"target_layers.*{allowed}"):
        MixtureOfAttentions(replace(target, folder=None), MixtureOptions(target_layers=count))


@pytest.mark.nightly
@pytest.mark.parametrize("count", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_training_makes_drafts_right(count: int, tmp_path: Path) -> None:
    batch = read(demo_runner(), texts())
    torch.manual_seed(0)
    head = MixtureOfAttentions(demo_target(), MixtureOptions(horizon=6, target_layers=count))
    before, _ = evaluate(head, batch)
    train(head, batch, 40, rate=2e-3)
    after, agreement = evaluate(head, batch)
    assert after < 0.5 * before
    assert agreement.shape == (6,) and agreement.min() > 0.5
    assert accepted_length(decode(head, tmp_path, "moa")) > 2.5


@pytest.mark.slow
@pytest.mark.one_of(2)
@pytest.mark.parametrize("count", [0, 1])
def test_exact_to_the_end_of_the_context(count: int, zoo: Path, tmp_path: Path) -> None:
    check_end_of_context(
        MixtureOfAttentions, MixtureOptions(target_layers=count), zoo, tmp_path,
        num_speculative_tokens=12,
    )  # fmt: skip


def test_a_horizon_is_at_least_one_token(target: HeadTarget) -> None:
    with pytest.raises(InvalidArgument, match="horizon"):
        MixtureOfAttentions(target, MixtureOptions(horizon=0))
