"""Several drafters in one: what each part sees, how much it may draft, and what is accepted."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SpeculationConfig, parse_speculation
from paceline.drafters.base import Drafter, part_outcome
from paceline.drafters.draft_model import DraftModel
from paceline.engine import RoundEvent
from paceline.errors import InvalidArgument
from paceline.plan import resolve
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.tree import align, is_chain, merge
from paceline.types import Budget, Draft, Need, Outcome, Verification
from tests.core.engines import Reference, Small, small_engine
from tests.core.test_tree import VOCAB, Walk, token_path, token_paths, trees
from tests.fakes import WITH_FAKES, Mix
from tests.modelzoo import VOCAB_SIZE

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=0.8, seed=11)
PROMPTS = [[65, 66, 67], [70] * 9, [80, 81, 82] * 12]
LOGITS = frozenset({Need.TREE_LOGITS})


class Recorder(Drafter):
    """A part that remembers what it was asked, what it proposed and what it was told."""

    def __init__(self, inner: Drafter, needs: frozenset[Need] = LOGITS) -> None:
        self.inner = inner
        self.needs = needs
        self.drafts: dict[str, Draft] = {}
        self.budgets: list[Budget] = []
        self.outcomes: dict[str, Outcome] = {}

    def open(self, session: Session) -> None:
        self.inner.open(session)

    def close(self, session: Session) -> None:
        self.inner.close(session)

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        drafts = self.inner.propose(sessions, budgets)
        for session, draft in zip(sessions, drafts, strict=True):
            self.drafts[session.session_id] = draft
        self.budgets += budgets
        return drafts

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        for session, outcome in zip(sessions, outcomes, strict=True):
            self.outcomes[session.session_id] = outcome
        self.inner.observe(sessions, outcomes)

    def forget(self) -> None:
        self.drafts, self.outcomes = {}, {}


def matched(draft: Draft, tokens: Sequence[int]) -> int:
    """How many of ``tokens`` a draft holds along one path."""
    paths, count = token_paths(draft), 0
    while count < len(tokens) and tuple(tokens[: count + 1]) in paths:
        count += 1
    return count


# --- what a part sees --------------------------------------------------------------------------


@given(trees(), trees())
def test_aligning_finds_equal_paths_and_only_those(part: Draft, whole: Draft) -> None:
    whole = merge([whole])
    place, paths = align(part, whole), token_paths(whole)
    for node, at in enumerate(place):
        path = token_path(part, node)
        assert (path in paths) == (at >= 0)
        if at >= 0:
            assert token_path(whole, int(at)) == path


def verify(draft: Draft, target: Walk) -> Outcome:
    """A round of ``draft`` alone, with the logits that tell which prefix they follow."""
    tokens, next_token = target.accept(draft)
    nodes = {token_path(draft, node): node for node in range(draft.num_nodes)}
    prefixes = [(), *(token_path(draft, node) for node in range(draft.num_nodes))]
    logits = torch.tensor([[float(hash(prefix) % 9973)] * VOCAB for prefix in prefixes])
    return Outcome(
        draft=draft,
        path=tuple(nodes[tokens[: i + 1]] for i in range(len(tokens))),
        next_token=next_token,
        token_ids=(*tokens, next_token),
        num_accepted=len(tokens),
        verification=Verification(logits, {Need.HIDDEN_STATES: logits * 2}),
    )


@given(st.lists(trees(most=8), min_size=1, max_size=3), st.integers(0, 99))
def test_a_part_sees_what_its_own_draft_would_have_had(drafts: list[Draft], salt: int) -> None:
    target = Walk(salt)
    parts = [merge([draft]) for draft in drafts]
    whole = verify(merge(parts), target)
    for part in parts:
        seen, alone = part_outcome(whole, part, LOGITS), verify(part, target)
        assert seen.draft is part
        assert (seen.path, seen.next_token) == (alone.path, alone.next_token)
        assert seen.num_accepted == alone.num_accepted
        assert torch.equal(seen.verification.logits, alone.verification.logits)
        hidden = seen.verification.extras[Need.HIDDEN_STATES]
        assert torch.equal(hidden, alone.verification.logits * 2)
        assert seen.token_ids == whole.token_ids  # a part may count the round's tokens


@given(trees(most=8), trees(most=8), st.integers(0, 10), st.integers(0, 99))
def test_a_part_of_a_tree_that_was_cut(a: Draft, b: Draft, budget: int, salt: int) -> None:
    target = Walk(salt)
    whole = verify(merge([a, b], budget), target)
    for part in (a, b):
        seen = part_outcome(whole, part, LOGITS)
        count = seen.draft.num_nodes
        assert seen.draft.token_ids.tolist() == part.token_ids[:count].tolist()
        assert seen.verification.logits.shape == (count + 1, VOCAB)
        for before, node in zip((-1, *seen.path), seen.path, strict=False):
            assert seen.draft.parent_indices[node] == before
        tokens = [int(seen.draft.token_ids[node]) for node in seen.path]
        sequence = [*whole.token_ids]
        assert [*tokens, seen.next_token] == sequence[: len(tokens) + 1]


def test_parts_without_needs_get_the_verification_as_it_is() -> None:
    """Another process sends none, and gathering rows of a large vocabulary costs time."""
    draft = Draft.chain([1, 2])
    outcome = replace(verify(draft, Walk(1)), verification=Verification(torch.empty(0, 0)))
    assert part_outcome(outcome, draft, frozenset()).verification is outcome.verification


# --- in an engine ------------------------------------------------------------------------------

CATALOGUE = dict(WITH_FAKES) | {
    name: replace(WITH_FAKES["mix"], name=name, drafter=name) for name in ("a", "b", "c")
}


def fakes(truth: dict[tuple[int, ...], list[int]]) -> dict[str, Recorder]:
    return {
        name: Recorder(Mix(truth, VOCAB_SIZE, rho=rho, seed=seed))
        for seed, (name, rho) in enumerate((("a", 0.7), ("b", 0.6), ("c", 0.3)))
    }


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
def test_accepted_is_the_best_of_the_parts(
    params: SamplingParams, tiny_folder: Path, reference: Reference
) -> None:
    truth = {tuple(prompt): reference(prompt, params) for prompt in PROMPTS}
    parts = fakes(truth)
    small = small_engine(tiny_folder, catalogue=CATALOGUE, drafters=parts)
    better = []

    def check(event: RoundEvent) -> None:
        name = event.session.session_id
        assert event.outcome is not None
        each = [matched(part.drafts[name], event.token_ids) for part in parts.values()]
        paths = [token_paths(part.drafts[name]) for part in parts.values()]
        assert event.outcome.draft.num_nodes == len(set[tuple[int, ...]]().union(*paths))
        assert event.num_accepted == max(each)
        for part, count in zip(parts.values(), each, strict=True):
            outcome = part.outcomes[name]
            tokens = outcome.draft.token_ids[list(outcome.path)].tolist()
            assert (*tokens, outcome.next_token) == event.token_ids[: count + 1]
            assert len(outcome.verification.logits) == part.drafts[name].num_nodes + 1
        better.append(max(each) > each[0])

    config = SpeculationConfig(
        length="fixed",
        method="combined",
        drafters=("a", "b", "c"),
        num_speculative_tokens=4,
        node_budget=40,
    )
    for prompt in PROMPTS:
        small.engine.submit(Request(prompt, params, config), on_event=check)
    while small.engine.has_work:
        small.engine.step()
    assert any(better), "the first part was never helped"
    for part in parts.values():
        part.forget()
    small.assert_nothing_is_left()


def test_no_part_starves_another(tiny_folder: Path, reference: Reference) -> None:
    """An equal share of what is left; what a part does not use goes to those after it."""
    truth = {tuple(prompt): reference(prompt, GREEDY) for prompt in PROMPTS}
    parts = fakes(truth)  # these fill what they may have with wrong siblings
    small = small_engine(tiny_folder, catalogue=CATALOGUE, drafters=parts)
    config = SpeculationConfig(
        method="combined", drafters=("a", "b", "c"), num_speculative_tokens=2, node_budget=9
    )
    session = small.engine.submit(Request(PROMPTS[0], GREEDY, config))
    while not parts["c"].budgets:
        small.engine.step()
    first, second, third = (part.budgets[0].nodes for part in parts.values())
    drafts = [part.drafts[session.session_id] for part in parts.values()]
    assert first == 3
    assert second == -(-(9 - merge(drafts[:1]).num_nodes) // 2) >= 3
    assert third == 9 - merge(drafts[:2]).num_nodes >= 3
    small.engine.cancel(session.session_id)
    for part in parts.values():
        part.forget()
    small.assert_nothing_is_left()


@pytest.mark.parametrize("params", [GREEDY, SAMPLED])
@pytest.mark.parametrize(
    ("drafters", "options"),
    [
        (("prompt_lookup", "draft_model"), {}),
        (("draft_model", "prompt_lookup"), {"shape": "kary", "branching": 2}),
        (("token_recycling", "prompt_lookup", "draft_model"), {"shape": "confidence"}),
        (("lookahead", "suffix"), {"node_budget": 60}),
        (("prompt_lookup",), {"ngram_max": 5}),
    ],
)
def test_real_parts_give_the_tokens_of_ar(
    drafters: tuple[str, ...],
    options: dict[str, int | str],
    params: SamplingParams,
    tiny_folder: Path,
    reference: Reference,
) -> None:
    small = small_engine(tiny_folder)
    config = parse_speculation(
        {"method": "combined", "length": "fixed", "drafters": list(drafters), **options}
    )
    sessions = small.engine.generate(PROMPTS, params, config)
    for prompt, session in zip(PROMPTS, sessions, strict=True):
        assert session.output_ids == reference(prompt, params)
        assert not session.stats.drafter_lost
    if "draft_model" in drafters:
        assert sum(session.stats.num_accepted for session in sessions) > 0
    small.assert_nothing_is_left()


def test_the_draft_model_keeps_the_kv_of_what_was_accepted(tiny_folder: Path) -> None:
    """Its own nodes, wherever they stand in the merged tree."""
    small = small_engine(tiny_folder)
    model = small.engine.drafters["draft_model"]
    assert isinstance(model, DraftModel)
    behind = []

    def look(event: RoundEvent) -> None:
        if not event.finished:
            state = model._states[event.session.session_id]
            behind.append(event.session.length - state.sequence.length)

    for prompt in PROMPTS:
        config = SpeculationConfig(
            length="fixed", method="combined", shape="kary", branching=2, node_budget=40
        )
        small.engine.submit(Request(prompt, GREEDY, config), on_event=look)
    while small.engine.has_work:
        small.engine.step()
    assert behind
    # A draft's last token is never expanded, and then there is the target's own.
    assert max(behind) <= 2
    small.assert_nothing_is_left()


def test_sessions_with_other_parts_share_steps(tiny_folder: Path, reference: Reference) -> None:
    small = small_engine(tiny_folder)
    choices = [("prompt_lookup",), ("draft_model", "prompt_lookup"), ("prompt_lookup", "suffix")]
    sessions = [
        small.engine.submit(
            Request(
                p, SAMPLED, SpeculationConfig(length="fixed", method="combined", drafters=names)
            )
        )
        for p, names in zip(PROMPTS, choices, strict=True)
    ]
    sessions.append(small.engine.submit(Request(PROMPTS[0], SAMPLED, SpeculationConfig())))
    small.engine.step()
    small.engine.step()
    small.engine.truncate(sessions[1].session_id, sessions[1].prompt_length + 1)
    small.engine.cancel(sessions[2].session_id)
    while small.engine.has_work:
        small.engine.step()
    for i in (0, 1, 3):
        assert sessions[i].output_ids == reference(PROMPTS[i % 3], SAMPLED)
        assert not sessions[i].stats.drafter_lost
    small.assert_nothing_is_left()


def test_a_rule_for_chains_gets_the_first_draft_that_is_found(
    tiny_folder: Path, reference: Reference
) -> None:
    small = small_engine(tiny_folder)
    seen: list[Outcome] = []
    config = SpeculationConfig(length="fixed", method="combined", acceptance="rejection")
    for params in (GREEDY, SAMPLED):
        session = small.engine.submit(
            Request(PROMPTS[2], params, config),
            on_event=lambda event: seen.append(event.outcome) if event.outcome else None,
        )
        while small.engine.has_work:
            small.engine.step()
        assert params.temperature or session.output_ids == reference(PROMPTS[2], params)
    assert all(is_chain(outcome.draft.parent_indices) for outcome in seen)
    kinds = {outcome.draft.probs is None for outcome in seen if outcome.draft.num_nodes}
    assert kinds == {True, False}, "copied tokens are point masses, a model's come with q"
    small.assert_nothing_is_left()


class Broken(Drafter):
    """A part that fails where a test wants it."""

    needs: frozenset[Need] = frozenset()

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def _do(self, what: str) -> None:
        if what == self.fault:
            raise OSError(what)

    def open(self, session: Session) -> None:
        self._do("open")

    def close(self, session: Session) -> None:
        self._do("close")

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        self._do("propose")
        return [Draft.chain([1][: b.nodes]) for b in budgets]

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        self._do("observe")


@pytest.mark.parametrize("fault", ["open", "propose", "observe", "close"])
@pytest.mark.parametrize("first", [True, False])
def test_a_part_that_fails_takes_no_state_of_the_others_along(
    fault: str, first: bool, tiny_folder: Path, reference: Reference
) -> None:
    small = small_engine(tiny_folder, catalogue=CATALOGUE, drafters={"a": Broken(fault)})
    names = ("a", "draft_model") if first else ("draft_model", "a")
    config = SpeculationConfig(length="fixed", method="combined", drafters=names)
    sessions = small.engine.generate(PROMPTS, GREEDY, config)
    for prompt, session in zip(PROMPTS, sessions, strict=True):
        assert session.output_ids == reference(prompt, GREEDY)
        assert session.stats.drafter_lost == (fault != "close")
    small.assert_nothing_is_left()


# --- what may be chosen ------------------------------------------------------------------------


def chosen(**options: object) -> SpeculationConfig:
    return parse_speculation({"method": "combined", "length": "fixed", **options})


def test_parts_bring_their_knobs_and_needs() -> None:
    plan = resolve(chosen(drafters=["lookahead", "draft_model"], ngram_size=4))
    assert plan.drafters == ("combined", "lookahead", "draft_model")
    assert (plan.config.ngram_size, plan.config.window_size) == (4, 7)
    assert plan.needs == LOGITS
    assert plan.config.node_budget == 16, "the row's own defaults count before its parts'"
    assert hash(plan.config) == hash(plan.config.model_copy())
    assert resolve(chosen()).drafters == ("combined", "prompt_lookup", "draft_model")


@pytest.mark.parametrize(
    ("options", "field", "allowed"),
    [
        ({"drafters": ["unknown"]}, "drafters[0]", "prompt_lookup"),
        ({"drafters": ["prompt_lookup", "combined"]}, "drafters[1]", "one of"),
        ({"drafters": ["client"]}, "drafters[0]", "one of"),
        ({"drafters": ["ar"]}, "drafters[0]", "one of"),
        ({"drafters": ["draft_model", "draft_model"]}, "drafters[1]", "'draft_model'"),
        ({"drafters": ["draft_model", "staged"]}, "drafters[1]", "'draft_model'"),
        ({"drafters": ["prompt_lookup"], "window_size": 4}, "window_size", "a knob of"),
        ({"drafters": []}, "speculation.drafters", "at least 1"),
        ({"drafters": "draft_model"}, "speculation.drafters", "tuple"),
    ],
)
def test_what_cannot_be_combined(options: dict[str, object], field: str, allowed: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        resolve(chosen(**options))
    assert caught.value.field == field
    assert allowed in str(caught.value)


class Elsewhere(Drafter):
    """A draft model in another process."""

    elsewhere = True
    needs: frozenset[Need] = frozenset()

    def open(self, session: Session) -> None:
        raise AssertionError("must not be opened")

    def close(self, session: Session) -> None:
        raise AssertionError("must not be closed")

    def propose(
        self, sessions: Sequence[Session], budgets: Sequence[Budget]
    ) -> list[Future[Draft]]:
        raise AssertionError("must not be asked")

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None:
        raise AssertionError("must not be told")


def without_draft_model(folder: Path) -> Small:
    small = small_engine(folder)
    del small.engine.drafters["draft_model"]
    return small


def test_parts_that_are_not_loaded_or_live_elsewhere(
    tiny_folder: Path, reference: Reference
) -> None:
    engine = without_draft_model(tiny_folder).engine
    with pytest.raises(InvalidArgument, match="draft_model"):
        engine.submit(Request([1], GREEDY, chosen()))
    alone = chosen(drafters=["prompt_lookup"])
    assert engine.generate([PROMPTS[2]], GREEDY, alone)[0].output_ids == reference(
        PROMPTS[2], GREEDY
    )

    engine.drafters["draft_model"] = Elsewhere()
    with pytest.raises(InvalidArgument, match="in this process"):
        engine.submit(Request([1], GREEDY, chosen()))
    assert not engine.sessions
