"""Pseudo tokens: rows of a verification that guess ahead, and the trees that are made for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.drafters.pseudo import node_paths
from paceline.engine import Engine, EngineLimits, RoundEvent
from paceline.errors import InvalidArgument
from paceline.models.base import PseudoTokens, Segment
from paceline.models.heads import HEADS, HeadLibrary
from paceline.models.heads.base import HeadBatch, HeadTarget, load_head
from paceline.models.heads.hidden_transfer import HiddenTransfer, TransferOptions
from paceline.models.heads.ppd import PromptDecoding, PromptOptions
from paceline.models.heads.pseudo import RANKS, PseudoHead
from paceline.models.llama import LlamaRunner
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.shapes.dynamic_sparse import (
    Accuracy,
    SparseTree,
    best_trees,
    expected_accepted,
    expected_tokens,
    next_states,
    reach,
    stationary,
)
from paceline.shapes.dynamic_sparse import (
    Path as RankPath,
)
from paceline.target import ModelTarget
from paceline.types import Draft, Need
from tests.core.engines import Reference
from tests.core.runners import load_runner, load_runner_without_kernels
from tests.core.toy_heads import (
    accepted_length,
    decode,
    demo_runner,
    demo_target,
    evaluate,
    read,
    texts,
    train,
)
from tests.modelzoo import make_model

CONTEXT = list(b"some context")
IDS = np.array([40, 41, 42, 43, 44], np.int64)
SHAPES = {"chain": None, "tree": np.array([-1, 0, 0, 1, 2], np.int32)}
# Two pseudo tokens behind the row 0, one behind row 3: a chain and a single one.
BEHIND = np.array([0, 5, 3], np.int32)
KINDS = ("ppd", "hidden_transfer")


RUNNERS = {
    "kernels": load_runner,
    "kernels-bfloat16": partial(load_runner, dtype=torch.bfloat16),
    "torch": load_runner_without_kernels,
}


@pytest.fixture(scope="module", params=RUNNERS)
def runner(request: pytest.FixtureRequest, zoo: Path) -> LlamaRunner:
    """With the kernels, and in plain torch; three layers."""
    load: Callable[..., LlamaRunner] = RUNNERS[request.param]
    return load(make_model("llama_gqa", zoo), kv_tokens=500, batch_invariant=True)


def forward(
    runner: LlamaRunner,
    ids: np.ndarray,
    parents: np.ndarray | None,
    pseudo: PseudoTokens | None = None,
    wants: frozenset[Need] = frozenset(),
) -> tuple[torch.Tensor, dict[Need, torch.Tensor]]:
    """Logits of all rows after the context, and extras; nothing stays in the pool."""
    sequence = runner.new_sequence()
    runner.forward([Segment(sequence, np.array(CONTEXT), logits="none")])
    runner.commit(sequence, range(len(CONTEXT)))
    result = runner.forward([Segment(sequence, ids, parents, pseudo=pseudo)], wants)
    runner.free(sequence)
    assert runner.num_free == runner.kv_capacity
    return result.logits, result.extras_of(0)


def fixed(parents: Sequence[int], layer: int, values: torch.Tensor) -> PseudoTokens:
    return PseudoTokens(np.asarray(parents, np.int32), layer, lambda stream: values)


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("parents", SHAPES.values(), ids=SHAPES)
def test_real_rows_do_not_notice_pseudo_tokens(
    runner: LlamaRunner, parents: np.ndarray | None, layer: int
) -> None:
    values = 5.0 * torch.randn(3, 64, generator=torch.Generator().manual_seed(layer))
    wants = frozenset({Need.HIDDEN_STATES})
    alone, hidden = forward(runner, IDS, parents, None, wants)
    beside, extras = forward(runner, IDS, parents, fixed(BEHIND.tolist(), layer, values), wants)
    assert torch.equal(beside[:5], alone)
    assert torch.equal(extras[Need.HIDDEN_STATES][:5], hidden[Need.HIDDEN_STATES])
    assert not torch.equal(beside[5], beside[6])


@pytest.mark.parametrize("layer", [0, 1])
def test_pseudo_tokens_see_their_ancestors_only(runner: LlamaRunner, layer: int) -> None:
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    parents = SHAPES["tree"]  # 0; 1 and 2 below it; 3 below 1, 4 below 2
    behind = [3, 5, 2]  # two behind row 3 (path 0, 1, 3), one behind row 2 (path 0, 2)
    before, _ = forward(runner, IDS, parents, fixed(behind, layer, values))
    for row in range(5):
        ids = IDS.copy()
        ids[row] += 100
        after, _ = forward(runner, ids, parents, fixed(behind, layer, values))
        for place, path in ((5, {0, 1, 3}), (6, {0, 1, 3}), (7, {0, 2})):
            assert torch.equal(after[place], before[place]) == (row not in path)
    for i, seen_by in ((0, {5, 6}), (1, {6}), (2, {7})):
        other = values.clone()
        other[i] += 1.0
        after, _ = forward(runner, IDS, parents, fixed(behind, layer, other))
        changed = {row for row in range(8) if not torch.equal(after[row], before[row])}
        assert changed == seen_by


def test_a_pseudo_token_is_a_token_with_that_input(runner: LlamaRunner) -> None:
    """At layer 0 with a token's embedding, further up with what the token's stream is there."""
    ids, parents = np.append(IDS, 77), np.array([-1, 0, 0, 1, 2, 3], np.int32)
    wants = frozenset({Need.LAYER_STATES})
    real, extras = forward(runner, ids, parents, None, wants)
    stream = extras[Need.LAYER_STATES][5]  # [num_layers, hidden_size]
    for layer in range(3):
        value = runner.embedding[77] if layer == 0 else stream[layer - 1]
        pseudo = fixed([3], layer, value[None])
        logits, _ = forward(runner, IDS, parents[:5], pseudo)
        assert torch.equal(logits[5], real[5])


def test_inputs_are_made_from_the_rows_of_their_own_session(runner: LlamaRunner) -> None:
    """Two sequences in a forward, each with pseudo tokens, and one without: as each alone."""
    seen: list[torch.Tensor] = []

    def inputs(stream: torch.Tensor) -> torch.Tensor:
        seen.append(stream)
        return 0.5 * stream[-1:]

    pseudo = PseudoTokens(np.array([2], np.int32), 1, inputs)
    ids = [np.array([5, 6, 7]), np.array([8, 9, 10, 11]), np.array([12, 13])]
    segments = [
        Segment(runner.new_sequence(), row, pseudo=pseudo if i < 2 else None)
        for i, row in enumerate(ids)
    ]
    together = runner.forward(segments)
    assert [len(stream) for stream in seen] == [3, 4]
    for i, segment in enumerate(segments):
        runner.free(segment.sequence)
        sequence = runner.new_sequence()
        alone = runner.forward([replace(segment, sequence=sequence)]).logits
        runner.free(sequence)
        assert torch.equal(together.logits[together.rows(i)], alone)


# --- trees ---------------------------------------------------------------------------------------


def random_accuracy(rng: random.Random, distances: int, ranks: int) -> Accuracy:
    rows = []
    for _ in range(distances):
        cuts = sorted((rng.random() for _ in range(ranks)), reverse=True)
        scale = rng.uniform(0.3, 0.99) / sum(cuts)
        rows.append(tuple(cut * scale for cut in cuts))
    return tuple(rows)


def random_tree(rng: random.Random, accuracy: Accuracy, state: int, size: int) -> SparseTree:
    paths: list[RankPath] = []
    pseudo: dict[RankPath, int] = {}
    for _ in range(size):
        grown = [(), *paths]
        owners = [path for path in grown if pseudo.get(path, 0) < len(accuracy)]
        parents = [
            path
            for path in grown
            if len(path) < state
            and sum(child[:-1] == path for child in paths) < len(accuracy[len(path)])
        ]
        if parents and (rng.random() < 0.5 or not owners):
            parent = rng.choice(parents)
            paths.append((*parent, sum(child[:-1] == parent for child in paths)))
        elif owners:
            owner = rng.choice(owners)
            pseudo[owner] = pseudo.get(owner, 0) + 1
    return SparseTree(tuple(paths), pseudo)


@pytest.mark.parametrize("seed", range(5))
def test_the_chosen_trees_beat_random_ones_of_equal_size(seed: int) -> None:
    rng = random.Random(seed)
    accuracy = random_accuracy(rng, 3, 4)
    for size in (3, 6, 12):
        trees = best_trees(accuracy, size)
        assert all(tree.size <= size for tree in trees)
        best = expected_tokens(trees, accuracy)
        for _ in range(100):
            others = [random_tree(rng, accuracy, state, size) for state in range(4)]
            assert expected_tokens(others, accuracy) <= best + 1e-9
            # Nor is it any better to change the tree of one state.
            state = rng.randrange(4)
            mixed = [*trees[:state], others[state], *trees[state + 1 :]]
            assert expected_tokens(mixed, accuracy) <= best + 1e-9


def all_trees(accuracy: Accuracy, state: int, size: int) -> Iterator[SparseTree]:
    """Every tree of at most ``size`` rows whose siblings have ranks from 0 on."""
    ranks = len(accuracy[0])
    places = [path for depth in range(1, state + 1) for path in product(range(ranks), repeat=depth)]
    for chosen in product((False, True), repeat=len(places)):
        paths = tuple(path for path, wanted in zip(places, chosen, strict=True) if wanted)
        known = {(), *paths}
        if len(paths) > size or any(
            path[:-1] not in known or (path[-1] and (*path[:-1], path[-1] - 1) not in known)
            for path in paths
        ):
            continue
        for counts in product(range(len(accuracy) + 1), repeat=len(paths) + 1):
            if len(paths) + sum(counts) <= size:
                yield SparseTree(paths, dict(zip(((), *paths), counts, strict=True)))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_chosen_trees_are_the_best_of_all(seed: int, size: int) -> None:
    accuracy = random_accuracy(random.Random(seed), 2, 2)
    candidates = [list(all_trees(accuracy, state, size)) for state in range(3)]
    # Of trees with the same distribution of the next state only the one with most tokens counts.
    distinct = []
    for trees in candidates:
        by_law: dict[tuple[float, ...], SparseTree] = {}
        for tree in trees:
            law = tuple(next_states(tree, accuracy).round(9))
            if law not in by_law or expected_accepted(tree, accuracy) > expected_accepted(
                by_law[law], accuracy
            ):
                by_law[law] = tree
        distinct.append(list(by_law.values()))
    best = 0.0
    for choice in product(*distinct):
        # From state 0, in the long run.
        transition = np.stack([next_states(tree, accuracy) for tree in choice])
        shares = np.linalg.matrix_power(0.5 * (transition + np.eye(3)), 1 << 20)[0]
        rewards = [1.0 + expected_accepted(tree, accuracy) for tree in choice]
        best = max(best, float(shares @ rewards))
    assert expected_tokens(best_trees(accuracy, size), accuracy) == pytest.approx(best, abs=1e-6)


def test_a_larger_tree_is_never_worse_and_deeper_guesses_never_hurt() -> None:
    accuracy = random_accuracy(random.Random(7), 3, 5)
    tokens = [expected_tokens(best_trees(accuracy, size), accuracy) for size in range(1, 30)]
    assert tokens == sorted(tokens)
    shallow = [expected_tokens(best_trees(accuracy[:d], 12), accuracy[:d]) for d in (1, 2, 3)]
    assert shallow == pytest.approx(sorted(shallow))


def test_guesses_that_are_never_right_leave_one_token_a_round() -> None:
    accuracy = ((0.0, 0.0),) * 3
    assert expected_tokens(best_trees(accuracy, 8), accuracy) == 1.0


@pytest.mark.parametrize("seed", range(3))
def test_the_shares_of_the_states_are_those_of_a_simulation(seed: int) -> None:
    rng = random.Random(seed)
    accuracy = random_accuracy(rng, 3, 3)
    trees = best_trees(accuracy, 10)
    transition = np.stack([next_states(tree, accuracy) for tree in trees])
    assert transition.sum(1) == pytest.approx(np.ones(4))
    shares = stationary(transition)
    assert shares.sum() == pytest.approx(1.0)
    # Rounds as they happen: in each one the guess of one rank, or none, is right at every depth.
    rounds, state, committed = 20000, 0, 0
    visits = np.zeros(4)
    for _ in range(rounds):
        visits[state] += 1
        tree, node = trees[state], ()
        for row in accuracy[:state]:
            (rank,) = rng.choices(range(4), [*row, 1 - sum(row)])
            if (*node, rank) not in tree.paths:
                break
            node = (*node, rank)
        committed += 1 + len(node)
        state = tree.pseudo.get(node, 0)
    assert visits / rounds == pytest.approx(shares, abs=0.02)
    assert committed / rounds == pytest.approx(expected_tokens(trees, accuracy), rel=0.02)


def test_a_node_is_known_by_its_ranks() -> None:
    draft = Draft(np.arange(5, dtype=np.int64), np.array([-1, -1, 0, 0, 3], np.int32))
    assert node_paths(draft) == [(), (0,), (1,), (0, 0), (0, 1), (0, 1, 0)]
    accuracy = ((0.5, 0.2), (0.25, 0.1), (0.4, 0.1))
    assert reach((1, 0, 0), accuracy) == pytest.approx(0.2 * 0.25 * 0.4)


# --- heads ---------------------------------------------------------------------------------------


def random_head(kind: str, target: HeadTarget, **options: int) -> PseudoHead:
    head_class = HEADS[kind]
    torch.manual_seed(3)
    head = head_class(target, head_class.Options(**options))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    assert isinstance(head, PseudoHead)
    return head.requires_grad_(False)


MODELS: dict[str, dict[str, object]] = {
    "llama_gqa": {},
    "mistral_sliding": {},  # a window of 16
    "qwen3": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", MODELS)
def test_training_computes_what_verification_does(kind: str, model: str, zoo: Path) -> None:
    folder = make_model(model, zoo, **MODELS[model])
    head = random_head(kind, HeadTarget.from_folder(folder), num_guesses=2)
    head.bind(folder)
    ids = torch.arange(30, 60)[None]
    places = torch.tensor([2, 7, 27])
    trained = head.guesses(ids, places)[0]  # [num_places, num_guesses, vocab_size]
    runner = LlamaRunner(folder, kv_tokens=200)
    index = torch.tensor([0, 1])
    for i, place in enumerate(places.tolist()):
        owners = torch.tensor([place, place])
        inputs = partial(head.inputs, owners=owners, index=index)
        pseudo = PseudoTokens(np.array([place, 30], np.int32), head.first_layer, inputs)
        sequence = runner.new_sequence()
        logits = runner.forward([Segment(sequence, ids[0].numpy(), pseudo=pseudo)]).logits[30:]
        runner.free(sequence)
        assert torch.allclose(trained[i], logits, atol=1e-3, rtol=1e-3)
        assert trained[i].argmax(-1).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_accuracies_are_measured_in_training(kind: str) -> None:
    """For each distance and rank, how often the guess is the target's argmax at that place."""
    batch = read(demo_runner(), texts()[:2, :24])
    head = HEADS[kind](demo_target(), HEADS[kind].Options(places=0))
    assert isinstance(head, PseudoHead)
    head.bind(TARGET_DIR)
    head.eval()
    assumed = head.accuracy.clone()
    head.loss(batch)
    assert torch.equal(head.accuracy, assumed)
    expected = measured(head, batch)
    head.train()
    head.loss(batch)
    assert torch.allclose(head.accuracy, 0.95 * assumed + 0.05 * expected, atol=1e-5)


@torch.no_grad()
def measured(head: PseudoHead, batch: HeadBatch) -> torch.Tensor:
    """The same, one by one.  # [num_guesses, RANKS]"""
    places = range(batch.token_ids.shape[1] - head.num_guesses)
    logits = head.guesses(batch.token_ids, torch.tensor(places))
    result = torch.zeros_like(head.accuracy)
    for row, place, i in product(range(len(logits)), places, range(head.num_guesses)):
        right = int(batch.logits[row, place + 1 + i].argmax())
        ranked = logits[row, place, i].argsort(descending=True).tolist()
        if ranked.index(right) < RANKS:
            result[i, ranked.index(right)] += 1
    return result / (len(logits) * len(places))


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_training_makes_guesses_right(kind: str, tmp_path: Path) -> None:
    """The loss falls, accuracies are kept with the head, and tokens are accepted."""
    batch = read(demo_runner(), texts()[:, :36])
    torch.manual_seed(0)
    head = HEADS[kind](demo_target(), HEADS[kind].Options(places=12))
    assert isinstance(head, PseudoHead)
    head.bind(TARGET_DIR)
    assumed = head.accuracy.clone()
    before, _ = evaluate(head, batch)
    train(head, batch, 15, rows=4, rate=1e-2 if kind == "ppd" else 3e-3)
    after, agreement = evaluate(head, batch)
    assert after < 0.8 * before
    assert agreement.shape == (3,)
    assert not torch.equal(head.accuracy, assumed)
    assert accepted_length(decode(head, tmp_path, kind)) > 1.1
    again = load_head(HEADS[kind], tmp_path / kind, demo_target())
    assert torch.equal(again.accuracy, head.accuracy)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_maps_or_embeddings_are_trained(kind: str) -> None:
    head = HEADS[kind](demo_target(), HEADS[kind].Options())
    head.bind(TARGET_DIR)
    names = {name for name, _ in head.named_parameters()}
    assert names == {"prompts" if kind == "ppd" else "maps"}
    assert set(head.state_dict()) == {*names, "accuracy"}


@pytest.mark.parametrize("layer", [-1, 20])
def test_a_layer_that_the_target_does_not_have_is_refused(layer: int) -> None:
    with pytest.raises(InvalidArgument, match="layer"):
        HiddenTransfer(demo_target(), TransferOptions(layer=layer))
    with pytest.raises(InvalidArgument, match="num_guesses"):
        PromptDecoding(demo_target(), PromptOptions(num_guesses=0))


# --- in the loop ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny_heads(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    target = HeadTarget.from_folder(tiny_folder)
    for kind in KINDS:
        random_head(kind, target).save(folder / kind)
    return folder


def tiny_engine(folder: Path, heads: Path, kv_tokens: int = 600) -> Engine:
    runner = LlamaRunner(folder, kv_tokens=kv_tokens)
    return Engine(
        ModelTarget(runner),
        limits=EngineLimits(max_sessions=4),
        heads=HeadLibrary(heads, folder, runner),
    )


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("nodes", [1, 2, 5, 40])
def test_exact_at_the_end_of_the_context_with_any_size(
    kind: str, nodes: int, zoo: Path, tmp_path: Path
) -> None:
    """Pseudo tokens never take a place that the context does not have."""
    folder = make_model("llama_gqa", zoo, num_hidden_layers=2, max_position_embeddings=32)
    random_head(kind, HeadTarget.from_folder(folder)).save(tmp_path / kind)
    engine, reference = tiny_engine(folder, tmp_path), Reference(folder)
    config = SpeculationConfig(method=kind, node_budget=nodes, length="fixed")
    for temperature in (0.0, 0.8):
        params = SamplingParams(max_tokens=200, ignore_eos=True, temperature=temperature)
        prompts = [list(b"ab"), list(b"0123456789abcdefghijklmn"), list(b"x")]
        sessions = engine.generate(prompts, params, config)
        for prompt, session in zip(prompts, sessions, strict=True):
            assert session.finish_reason == "length" and session.length == 32
            assert session.output_ids == reference(prompt, params)
            assert not session.stats.drafter_lost
    runner = engine.target.runner
    assert runner.num_free == runner.kv_capacity
    assert not engine.drafters[kind]._rounds  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_with_and_without_pseudo_tokens_share_a_step(
    kind: str, tiny_folder: Path, tiny_heads: Path, reference: Reference
) -> None:
    engine = tiny_engine(tiny_folder, tiny_heads)
    params = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.7, seed=3)
    prompts = [list(b"one"), list(b"two two two"), list(b"three")]
    methods = [kind, "prompt_lookup", "ar"]
    sessions = [
        engine.submit(Request(prompt, params, SpeculationConfig(method=method)))
        for prompt, method in zip(prompts, methods, strict=True)
    ]
    while engine.has_work:
        engine.step()
    for prompt, session in zip(prompts, sessions, strict=True):
        assert session.output_ids == reference(prompt, params)


@pytest.mark.parametrize("kind", KINDS)
def test_a_round_drafts_what_the_one_before_guessed(
    kind: str, tiny_folder: Path, tiny_heads: Path
) -> None:
    """In the tree that is best for the number of guesses; the first round can only guess."""
    engine = tiny_engine(tiny_folder, tiny_heads)
    assert engine.drafters.heads is not None
    head = engine.drafters.heads.load(kind)
    assert isinstance(head, PseudoHead)
    trees = best_trees(tuple(tuple(row) for row in head.accuracy.tolist()), 8)
    rounds: list[RoundEvent] = []
    config = SpeculationConfig(method=kind, length="fixed", node_budget=8)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engine.submit(Request(list(b"prompt"), params, config), on_event=rounds.append)
    while engine.has_work:
        engine.step()
    guesses, compared = torch.empty(0), 0
    for event in rounds[:-3]:  # the last ones have no room for all of it
        outcome, tree = event.outcome, trees[len(guesses)]
        assert outcome is not None
        paths = node_paths(outcome.draft)
        assert set(paths) == {(), *tree.paths}
        for path, token in zip(paths[1:], outcome.draft.token_ids.tolist(), strict=True):
            best = guesses[len(path) - 1].topk(path[-1] + 1).indices
            assert token == best[path[-1]]
            compared += 1
        logits = outcome.verification.pseudo_logits
        counts = [tree.pseudo.get(path, 0) for path in paths]
        assert logits is not None and len(logits) == sum(counts)
        node = outcome.path[-1] + 1 if outcome.path else 0
        guesses = logits[sum(counts[:node]) : sum(counts[: node + 1])]
    assert compared > 10


def test_rules_for_chains_are_refused(tiny_folder: Path, tiny_heads: Path) -> None:
    engine = tiny_engine(tiny_folder, tiny_heads)
    with pytest.raises(InvalidArgument, match="acceptance"):
        engine.submit(
            Request([1], speculation=SpeculationConfig(method="ppd", acceptance="rejection"))
        )


@pytest.mark.parametrize("acceptance", ["recursive_rejection", "k_seq", "greedy"])
def test_drafts_are_point_masses_for_rules_that_want_q(
    acceptance: str, tiny_folder: Path, tiny_heads: Path, reference: Reference
) -> None:
    engine = tiny_engine(tiny_folder, tiny_heads)
    config = SpeculationConfig(method="ppd", acceptance=acceptance, length="fixed")
    greedy = SamplingParams(max_tokens=10, ignore_eos=True)
    (session,) = engine.generate([[1, 2]], greedy, config)
    assert session.output_ids == reference([1, 2], greedy)
    if acceptance != "greedy":
        (session,) = engine.generate([[1, 2]], replace(greedy, temperature=1.0), config)
        assert session.finish_reason == "length" and not session.stats.drafter_lost


def test_a_cut_session_forgets_its_guesses(
    tiny_folder: Path, tiny_heads: Path, reference: Reference
) -> None:
    engine = tiny_engine(tiny_folder, tiny_heads)
    params = SamplingParams(max_tokens=15, ignore_eos=True)
    session = engine.submit(
        Request(list(b"prompt"), params, SpeculationConfig(method="ppd", length="fixed"))
    )
    for _ in range(4):
        engine.step()
    engine.truncate(session.session_id, 7)
    while engine.has_work:
        engine.step()
    assert session.output_ids == reference(list(b"prompt"), params)
