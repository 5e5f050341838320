"""A model of any token given any others, and speculative sampling of several tokens with it.

ASSD, arXiv 2504.20456. The model is trained with permutation masks: in one forward it gives the
probability of each token given those before it in an order, whatever the order. It drafts the next
tokens of the order side by side, each given the known ones alone; a second forward has the joint
conditionals, and rejection sampling corrects the drafts. The text has the law of the order's chain
rule, as if each token had been drawn alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file

from paceline.demo import ANY_SUBSET_DIR
from paceline.diffusion.model import Blocks, MaskedModel
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.models.llama_config import LlamaConfig

Tensor = torch.Tensor
MASK = 256
"""The token of a position whose own token is not seen; those below are bytes."""
KEY = "any_subset"


class Conditionals(Protocol):
    """What the sampler needs of a model."""

    vocab_size: int

    def logits(
        self, tokens: Sequence[int], order: Sequence[int], first: int, count: int, *, joint: bool
    ) -> Tensor: ...


class AnySubsetModel:
    """Two streams of a Llama's layers: rows that hold tokens, and rows that ask for one.

    A row of a token sees the tokens up to its own in the order; a row that asks sees those before
    it, and itself.
    """

    def __init__(self, model: MaskedModel) -> None:
        self.model = model
        self.vocab_size = model.config.vocab_size
        self.context_length = model.config.context_length

    @staticmethod
    def load(folder: str | Path = ANY_SUBSET_DIR) -> AnySubsetModel:
        """Read a folder that :mod:`paceline.diffusion.train_any_subset` wrote.

        Raises:
            ModelNotFound: it is missing, or holds another kind of model.
        """
        folder = Path(folder)
        file = folder / "config.json"
        if not file.is_file():
            raise ModelNotFound(f"{file} does not exist")
        raw = json.loads(file.read_text(encoding="utf-8"))
        if not raw.get(KEY):
            raise ModelNotFound(f"{file} lacks {KEY!r}")
        config = LlamaConfig.from_dict(raw)
        weights = {n: t.float() for n, t in load_file(folder / "model.safetensors").items()}
        return AnySubsetModel(MaskedModel(config, weights, whole_text(config.context_length)))

    @torch.inference_mode()
    def logits(
        self, tokens: Sequence[int], order: Sequence[int], first: int, count: int, *, joint: bool
    ) -> Tensor:
        """Logits of the ``count`` tokens from place ``first`` of the order on.

        Args:
            tokens: of each position; those that the rows do not see are not read.
            order: positions, in which each token is given those before it.
            joint: each token is given all tokens before it in the order; else the first ``first``.

        Returns:
            # [count, vocab_size]
        """
        seen = first + count - 1 if joint else first
        content, asked = list(order[:seen]), list(order[first : first + count])
        ids = torch.tensor([[*(tokens[place] for place in content), *([MASK] * count)]])
        positions = torch.tensor([*content, *asked])
        limits = torch.arange(first, first + count) if joint else torch.full((count,), first)
        states, _ = self.model.forward(ids, positions, two_streams(seen, limits))
        logits = self.model.logits(states[0, seen:])
        logits[:, MASK:] = -torch.inf
        return logits


def whole_text(length: int) -> Blocks:
    """One block, as the layers' host wants to be told."""
    return Blocks(MASK, length, length)


def two_streams(seen: int, limits: Tensor) -> Tensor:
    """Who sees whom: ``seen`` rows of tokens in their order, then the rows that ask.

    Args:
        limits: how many of the tokens each asking row sees.  # [count]

    Returns:
        # bool [seen + count, seen + count]
    """
    count, places = len(limits), torch.arange(seen)
    tokens = places[None, :] <= places[:, None]
    asking = places[None, :] < limits[:, None]
    nothing = torch.zeros(seen, count, dtype=torch.bool)
    own = torch.eye(count, dtype=torch.bool)
    return torch.cat([torch.cat([tokens, nothing], 1), torch.cat([asking, own], 1)])


def with_gaps(text: str, blank: str, longest: int) -> list[int | None]:
    """The bytes of a text, None for each ``blank``.

    Raises:
        InvalidArgument: ``blank`` is not one character, or the text has none, or more bytes than
            ``longest``.
    """
    if len(blank) != 1:
        raise InvalidArgument("blank", blank, "one character")
    if blank not in text:
        raise InvalidArgument("text", text, f"a text with {blank!r} for each byte to be written")
    tokens: list[int | None] = []
    for character in text:
        tokens += [None] if character == blank else list(character.encode())
    if len(tokens) > longest:
        raise InvalidArgument("text", f"one of {len(tokens)} bytes", f"at most {longest} bytes")
    return tokens


# --- the sampler ---------------------------------------------------------------------------------


class Dice(Protocol):
    """Where the sampler's randomness comes from."""

    def draw(self, probs: Tensor) -> int:
        """A token from a distribution.  # probs: [vocab_size] float64"""
        ...

    def accept(self, probability: float) -> bool: ...


class SeededDice:
    """Pseudo-random numbers; equal seeds give equal texts."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self, probs: Tensor) -> int:
        return int(torch.multinomial(probs, 1, generator=self._generator))

    def accept(self, probability: float) -> bool:
        drawn = torch.rand((), generator=self._generator, dtype=torch.float64)
        return float(drawn) < probability


@dataclass(slots=True)
class Infilled:
    """A text without gaps, and what it cost.

    Attributes:
        token_ids: of every position.
        forwards: of the model; at most one for each written token.
        accepted: tokens that each pair of forwards took from its draft.
    """

    token_ids: list[int]
    tokens: int = 0
    forwards: int = 0
    drafted: int = 0
    accepted: list[int] = field(default_factory=list)


def infill(
    model: Conditionals,
    tokens: Sequence[int | None],
    *,
    order: Sequence[int] | None = None,
    draft_tokens: int = 10,
    temperature: float = 1.0,
    dice: Dice | None = None,
) -> Infilled:
    """Fill the gaps of a text.

    Args:
        tokens: of each position; None: to be written.
        order: of the positions to be written; default: from left to right.
        draft_tokens: most tokens to draft side by side (the paper's k); 1: one token a forward.
        temperature: 0 takes the most probable tokens.

    Raises:
        InvalidArgument: an argument out of its range, or an order that is not of the gaps.
    """
    if draft_tokens < 1:
        raise InvalidArgument("draft_tokens", draft_tokens, "at least 1")
    if temperature < 0:
        raise InvalidArgument("temperature", temperature, "at least 0")
    gaps = [place for place, token in enumerate(tokens) if token is None]
    chosen = gaps if order is None else list(order)
    if sorted(chosen) != gaps:
        raise InvalidArgument("order", chosen, f"each of the gaps once: {gaps}")
    dice = dice or SeededDice(0)
    known = [place for place, token in enumerate(tokens) if token is not None]
    whole = [*known, *chosen]
    result = Infilled([MASK if token is None else token for token in tokens], len(gaps))
    first = len(known)
    while first < len(whole):
        count = min(draft_tokens, len(whole) - first)
        rows = model.logits(result.token_ids, whole, first, count, joint=False)
        drafts = [_distribution(row, temperature) for row in rows]
        for place, draft in zip(whole[first:], drafts, strict=False):
            result.token_ids[place] = dice.draw(draft)
        result.forwards += 1
        result.drafted += count
        if count == 1:  # a token that was drafted alone has its conditional already
            result.accepted.append(1)
            first += 1
            continue
        rows = model.logits(result.token_ids, whole, first, count, joint=True)
        result.forwards += 1
        # The first token was drafted from the very conditional that would judge it.
        taken = 1
        for place, draft, row in zip(whole[first + 1 :], drafts[1:], rows[1:], strict=False):
            joint, token = _distribution(row, temperature), result.token_ids[place]
            left = (joint - draft).clamp_min(0)
            # Nothing is left where both are the same: rounding must not reject then.
            if not left.any() or dice.accept(min(1.0, float(joint[token] / draft[token]))):
                taken += 1
                continue
            result.token_ids[place] = dice.draw(left / left.sum())
            break
        result.accepted.append(taken)
        first += min(taken + 1, count)
    return result


def _distribution(logits: Tensor, temperature: float) -> Tensor:
    """What a token is drawn from.  # [vocab_size] float64"""
    if temperature:
        return (logits.double() / temperature).softmax(-1)
    point = torch.zeros(len(logits), dtype=torch.float64)
    point[logits.argmax()] = 1.0
    return point
