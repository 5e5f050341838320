"""Finding out by trial how a model of ``transformers`` computes trees."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from paceline.errors import InvalidArgument
from paceline.models.base import ModelRunner, Segment
from paceline.models.transformers_packed import IMPLEMENTATION, register
from paceline.models.transformers_taps import OutputLayer
from paceline.models.transformers_trees import (
    STRATEGIES,
    ModelCalls,
    PackedTrees,
    SingleTrees,
    Strategy,
    Trees,
)
from paceline.types import STATES, IntArray, Need

# Logits of one token computed in two ways may differ by rounding; a wrong mask or position changes
# them altogether. Root mean square of the difference over that of the (centred) logits.
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.03}


def make_trees(calls: ModelCalls, strategy: Strategy) -> Trees:
    """What runs trees by a strategy; the model attends as that needs from now on."""
    from paceline.models.transformers_states import StateTrees  # imports transformers

    register()
    is_single = strategy in ("tree", "paths", "recompute")
    calls.attend(calls.attention if is_single else IMPLEMENTATION)
    if is_single:
        return SingleTrees(calls, strategy)
    return PackedTrees(calls) if strategy == "packed" else StateTrees(calls, strategy)


def find_strategy(
    runner: ModelRunner,
    calls: ModelCalls,
    use: Callable[[Strategy], None],
    *,
    has_window: bool,
) -> Strategy:
    """The first strategy whose logits agree with runs of each path from scratch.

    Args:
        runner: of the model; its sequences are free again afterwards.
        calls: of the model. If its attention is not that of its own code (a faster one leaves out
            caps of scores, as Gemma 2 has them), it attends with its own code from now on.
        use: changes the runner's strategy.
        has_window: some layer attends to less than the whole context.

    Raises:
        InvalidArgument: the logits overflow in this dtype.
    """
    generator = np.random.default_rng(0)
    length = min(12, runner.context_length - 4)
    tokens = generator.integers(0, runner.vocab_size, (2, length + 11)).astype(np.int64)
    use("recompute")
    fast = _check_logits(runner, tokens, length)
    calls.attend("eager")
    reference = _check_logits(runner, tokens, length)
    if not bool(torch.isfinite(reference).all()):
        raise InvalidArgument(
            "dtype",
            str(calls.dtype).removeprefix("torch."),
            "a dtype in which this model's logits are finite (try float32 or bfloat16)",
        )
    spread = (reference - reference.mean(-1, keepdim=True)).square().mean().sqrt()

    def errors(logits: torch.Tensor) -> torch.Tensor:
        return (logits - reference).square().mean(-1).sqrt() / spread  # [num_rows]

    tolerance = _TOLERANCE[calls.dtype]
    # A model's own code rounds more than a faster one does, and a router may then choose other
    # experts for some token; what leaves out a cap is wrong for most tokens.
    if bool(errors(fast).median() <= 2 * tolerance):
        reference = fast
    else:
        calls.attention = "eager"
    for strategy in STRATEGIES:
        # A short check would not detect a window, so rule out trees with a mask from outside.
        if strategy == "tree" and has_window:
            continue
        if strategy in ("packed", "tree") and not calls.takes_positions:
            continue
        use(strategy)
        try:
            logits = _check_logits(runner, tokens, length)
        # Each model fails in its own way at a strategy that it lacks. Such a failure is no
        # error here, because the last strategy needs only a plain forward.
        except Exception:
            continue
        if bool(errors(logits).max() <= tolerance):
            return strategy
    return "recompute"


def has_states(runner: ModelRunner, calls: ModelCalls, layer: OutputLayer) -> bool:
    """Whether the states that a model gives are what draft heads take them for.

    Those after the final norm must give its logits through its output layer, and every layer must
    give one state for each token.

    Args:
        layer: of the model.
    """
    if calls.taps is None:
        return False
    ids = np.random.default_rng(1).integers(0, runner.vocab_size, 5).astype(np.int64)
    sequence = runner.new_sequence()
    try:
        result = runner.forward([Segment(sequence, ids)], STATES)
    # As in `find_strategy`: each model fails in its own way, and such a one has no states.
    except Exception:
        return False
    finally:
        runner.free(sequence)
    states = result.extras[Need.LAYER_STATES]
    if tuple(states.shape) != (len(ids), calls.taps.num_layers, calls.taps.hidden_size):
        return False
    own = layer.logits(result.extras[Need.HIDDEN_STATES])
    spread = (result.logits - result.logits.mean(-1, keepdim=True)).square().mean().sqrt()
    error = (own - result.logits).square().mean().sqrt() / spread
    return bool(error <= _TOLERANCE[calls.dtype])


def why_no_exits(strategy: Strategy, provides: frozenset[Need]) -> str:
    """Why a model cannot run some of its layers alone, as far as is known of it; else empty."""
    if not provides >= STATES:
        return "the states after its layers are not found"
    if strategy == "packed":
        return ""
    if strategy in ("tree", "paths"):
        return "its attention is code of its own, so its KV entries are not Paceline's"
    return "its layers keep a state, which goes on only when a token has passed all of them"


def exits_fail(runner: ModelRunner, num_layers: int, dtype: torch.dtype) -> str:
    """Why a model cannot go on from an exit; empty if it can.

    A tree that leaves after the first layers and goes on must have the logits of one that runs as
    a whole, and so must new rows beside it.

    Args:
        runner: of the model, which must take segments that choose their layers.
    """
    ids = np.random.default_rng(2).integers(0, runner.vocab_size, 11).astype(np.int64)
    prompt, drafted, parents = ids[:6], ids[6:], np.array([-1, 0, 0, 1, 2], np.int32)
    exits = range(max(1, num_layers // 2))
    sequences = [runner.new_sequence() for _ in range(2)]
    try:
        for sequence in sequences:
            runner.forward([Segment(sequence, prompt, logits="none")])
            runner.commit(sequence, range(len(prompt)))
        plain = runner.forward([Segment(sequences[0], drafted, parents)]).logits
        first = Segment(sequences[1], drafted[:3], parents[:3], layers=exits, resumable=True)
        runner.forward([first])
        rest = Segment(sequences[1], drafted[3:], parents[3:], resume=(0, 1, 2))
        resumed = runner.forward([rest]).logits
    # As in `find_strategy`: each model fails in its own way, and such a one has no exits.
    except Exception as failure:
        return f"its layers do not run without one another ({type(failure).__name__})"
    finally:
        for sequence in sequences:
            runner.free(sequence)
    spread = (plain - plain.mean(-1, keepdim=True)).square().mean().sqrt()
    error = (plain - resumed).square().mean(-1).sqrt().max() / spread
    if bool(error <= _TOLERANCE[dtype]):
        return ""
    return "more than the residual stream passes from one of its layers to the next"


def _check_logits(runner: ModelRunner, tokens: IntArray, length: int) -> torch.Tensor:
    """Logits of two trees with a commit between them, for two sequences side by side.

    The second one has a shorter prompt.

    Args:
        tokens: # [2, length + 11]

    # [22, vocab_size]
    """
    sequences = [runner.new_sequence() for _ in tokens]
    short = max(length - 5, 1)
    rows = []

    def forward(first: int, end: int, tree: list[int]) -> None:
        parents = np.array(tree, np.int32)
        segments = [
            Segment(sequence, ids[first:end], parents)
            for sequence, ids in zip(sequences, tokens, strict=True)
        ]
        rows.append(runner.forward(segments).logits)

    try:
        prompts = [tokens[0, :length], tokens[1, length - short : length]]
        runner.forward(
            [
                Segment(sequence, prompt, logits="none")
                for sequence, prompt in zip(sequences, prompts, strict=True)
            ]
        )
        for sequence, prompt in zip(sequences, prompts, strict=True):
            runner.commit(sequence, range(len(prompt)))
        forward(length, length + 7, [-1, -1, 0, 1, 0, 2, 2])
        for sequence in sequences:
            runner.commit(sequence, (0, 4))
        forward(length + 7, length + 9, [-1, -1])
        # Nodes added to a tree that is pending already, as an expanding drafter does.
        forward(length + 9, length + 11, [0, 1])
        return torch.cat(rows)
    finally:
        for sequence in sequences:
            runner.free(sequence)
