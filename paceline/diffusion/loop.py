"""The denoise loop: block by block, in numbered steps."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch

from paceline.demo import DIFFUSION_DIR
from paceline.diffusion.model import Blocks, MaskedModel
from paceline.diffusion.runner import BlockRunner, Context
from paceline.diffusion.schedules import (
    FreeDave,
    Schedule,
    View,
    check_sub_block_cache,
    perturbed,
)
from paceline.errors import InvalidArgument
from paceline.tokenizer import Tokenizer, eos_token_ids, load_tokenizer

Tensor = torch.Tensor


class Runner(Protocol):
    """What the loop needs of a model; :class:`BlockRunner` is the one that ships."""

    blocks: Blocks
    vocab_size: int
    context_length: int

    def append(self, context: Context, tokens: Sequence[int]) -> None: ...

    def predict(self, context: Context, states: Sequence[Tensor]) -> list[Tensor]: ...

    def predict_sub_block(
        self, context: Context, state: Tensor, start: int, stop: int
    ) -> Tensor: ...


@dataclass(slots=True)
class Counts:
    """What a text cost."""

    tokens: int = 0
    forwards: int = 0
    """Denoising forwards, each of one or more states, and one for each finished block's cache."""
    states: int = 0
    """States of blocks evaluated in the denoising forwards; FreeDave evaluates several at once."""
    positions: int = 0
    """Rows of all evaluated states."""
    blocks: int = 0

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.forwards, 1)


@dataclass(slots=True)
class _OpenBlock:
    """A block while it is written.

    Attributes:
        front: tokens of the finished blocks, prompt included.
        known: rows of the block that the prompt fills.
        noise: of each row, above temperature 0.  # [rows, vocab_size]
        sureness: how probable each row's token was when it was committed.  # [rows]
        step: forwards so far.
    """

    context: Context
    front: list[int]
    known: int
    noise: Tensor | None
    sureness: Tensor
    step: int = 0


@dataclass(slots=True)
class Denoiser:
    """One text: a context of finished blocks and the block in work.

    Args:
        schedule: which positions a step commits.
        temperature: 0 commits the most probable tokens. Above it, each position has Gumbel noise
            of its own, drawn once from ``seed``, so that equal states predict equal tokens.
        sub_block_cache: compute only the sub-block in work, but for its first step; faster and no
            longer the same text.
    """

    runner: Runner
    schedule: Schedule
    end_ids: frozenset[int] = frozenset()
    temperature: float = 0.0
    seed: int = 0
    sub_block_cache: bool = False
    counts: Counts = field(default_factory=Counts)
    trace: list[int] = field(default_factory=list)
    """Positions committed by each forward, less those that it masked again."""

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise InvalidArgument("temperature", self.temperature, "at least 0")
        if self.sub_block_cache:
            check_sub_block_cache(self.schedule)

    def decode(self, prompt: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
        """Write up to ``max_tokens`` tokens behind a prompt; yields each finished block's.

        Raises:
            InvalidArgument: as :meth:`steps`.
        """
        for tokens in self.steps(prompt, max_tokens):
            if tokens is not None:
                yield [token for token in tokens if token not in self.end_ids]

    def steps(
        self, prompt: Sequence[int], max_tokens: int, written: Sequence[int] = ()
    ) -> Iterator[list[int] | None]:
        """The loop of :meth:`decode`, a forward at a time, so that several texts can take turns.

        Yields the tokens of a block, with the one that ends the text, when the block is finished,
        and None when another forward is due.

        Args:
            written: whole blocks of the text that another loop has written. They are read as that
                loop read them, so the text goes on with the same bits.

        Raises:
            InvalidArgument: no prompt, a mask in it, more tokens than the model's context holds,
                or ``written`` ends within a block.
        """
        blocks, tokens = self.runner.blocks, [*prompt, *written]
        size, room = blocks.block_size, self.runner.context_length - len(prompt)
        if not prompt:
            raise InvalidArgument("prompt", "", "at least one token")
        if room < 1:
            allowed = f"fewer tokens than the context of {self.runner.context_length}"
            raise InvalidArgument("prompt", f"{len(prompt)} tokens", allowed)
        if not 1 <= max_tokens <= room:
            raise InvalidArgument("max_tokens", max_tokens, f"1 to {room}, what the context holds")
        if blocks.mask_token_id in tokens:
            place = tokens.index(blocks.mask_token_id)
            raise InvalidArgument(f"token_ids[{place}]", blocks.mask_token_id, "no mask token")
        if written and len(tokens) % size:
            allowed = f"whole blocks of {size}, {size - len(prompt) % size} in the first one"
            raise InvalidArgument("committed_token_ids", f"{len(written)} tokens", allowed)
        return self._steps(tokens, len(prompt) // size * size, len(prompt) + max_tokens)

    def _steps(self, tokens: list[int], whole: int, end: int) -> Iterator[list[int] | None]:
        """See :meth:`steps`.

        Args:
            tokens: prompt and written blocks.
            whole: tokens of the prompt's whole blocks, which are read in one forward.
            end: most tokens of prompt and text.
        """
        size = self.runner.blocks.block_size
        context, front = Context(), tokens[:whole]
        self.runner.append(context, front)
        while len(tokens) - context.length >= size:
            yield None
            self._finish(context, front, tokens[context.length : context.length + size])
        known = tokens[context.length :]
        while context.length < end:
            yield None
            rows = min(size, end - context.length)
            state = torch.full((rows,), self.runner.blocks.mask_token_id)
            state[: len(known)] = torch.tensor(known, dtype=state.dtype)
            noise = self._noise(context.length, rows)
            block = _OpenBlock(context, front, len(known), noise, torch.ones(rows))
            state = yield from self._denoise(block, state)
            new, ended = self._until_end(state[len(known) :].tolist())
            self.counts.tokens += len(new) - ended
            self.counts.blocks += 1
            yield new
            if ended or context.length + rows >= end:
                return
            self._finish(context, front, state.tolist())
            known = []

    def _finish(self, context: Context, front: list[int], tokens: list[int]) -> None:
        """Cache a block that was written."""
        self.runner.append(context, tokens)
        self.counts.forwards += 1
        front += tokens

    def _denoise(self, block: _OpenBlock, state: Tensor) -> Generator[None, None, Tensor]:
        """The block without its masks; yields between two forwards."""
        states, fresh = [state], -1
        while not self._is_done(block, state):
            if block.step:
                yield
            # 1. predict: every position of the state, and of the drafted later states.
            start = self._sub_block(state)
            if self.sub_block_cache and start == fresh:
                predictions = [self._predict_sub_block(block.context, state, start)]
            else:
                predictions, fresh = self.runner.predict(block.context, states), start
            self.counts.forwards += 1
            self.counts.states += len(states)
            self.counts.positions += sum(map(len, states))
            before = self._num_masks(state)
            for logits, evaluated in zip(predictions, states, strict=True):
                if self._is_done(block, state) or not torch.equal(evaluated, state):
                    break  # a draft that the schedule did not reach
                # 2. score: the token of each position, and how sure it is.
                view = self._score(block, logits, state)
                # 3. choose, and 4. commit.
                state = self._commit(view, state)
                new = view.masked & (state != self.runner.blocks.mask_token_id)
                block.sureness[: len(state)][new] = view.confidence[new]
            # 5. observe: what the forward brought, and the states to evaluate in the next one.
            block.step += 1
            self.trace.append(before - self._num_masks(state))
            if self.schedule.truncates:
                state = self._until_committed_end(block, state)
            states = [state, *self._drafts(block, view.logits, state)]
        return state

    def _drafts(self, block: _OpenBlock, logits: Tensor, state: Tensor) -> list[Tensor]:
        """The next steps' states, if their predictions were these logits."""
        drafts: list[Tensor] = []
        while len(drafts) < self.schedule.num_drafts and not self._is_done(block, state):
            state = self._commit(self._score(block, logits, state), state)
            drafts.append(state)
        return [draft for draft in drafts if self._num_masks(draft)]

    def _commit(self, view: View, state: Tensor) -> Tensor:
        chosen = self.schedule.choose(view)
        assert (chosen & view.masked).any(), "a step commits at least one position"
        state = torch.where(chosen, view.tokens, state)
        if not self.schedule.remasks:
            return state
        again = self.schedule.remask(view)
        return state.masked_fill(again, self.runner.blocks.mask_token_id)

    def _score(self, block: _OpenBlock, logits: Tensor, state: Tensor) -> View:
        masked = state == self.runner.blocks.mask_token_id
        logits = logits.clone()
        logits[:, self.runner.blocks.mask_token_id] = -torch.inf
        noise = None if block.noise is None else block.noise[: len(state)]
        drawn = perturbed(logits, self.temperature, noise).argmax(-1)
        tokens = torch.where(masked, drawn, state)
        confidence = logits.softmax(-1).gather(1, tokens[:, None])[:, 0]
        start, size = self._sub_block(state), self.runner.blocks.sub_block_size
        inside = torch.zeros_like(masked)
        inside[start : start + size] = True
        before = state[: int(masked.nonzero()[0])].tolist()
        return View(
            logits, tokens, confidence, masked, masked & inside,
            text=[*block.front, *before], temperature=self.temperature, noise=noise,
            known=block.known, step=block.step, sureness=block.sureness[: len(state)],
        )  # fmt: skip

    def _predict_sub_block(self, context: Context, state: Tensor, start: int) -> Tensor:
        stop = min(start + self.runner.blocks.sub_block_size, len(state))
        logits = torch.zeros(len(state), self.runner.vocab_size)
        logits[start:stop] = self.runner.predict_sub_block(context, state, start, stop)
        return logits

    def _sub_block(self, state: Tensor) -> int:
        """First row of the first sub-block that has a mask."""
        masks = (state == self.runner.blocks.mask_token_id).nonzero()
        size = self.runner.blocks.sub_block_size
        return int(masks[0]) // size * size if len(masks) else len(state)

    def _noise(self, position: int, rows: int) -> Tensor | None:
        if not self.temperature:
            return None
        seed = (self.seed * 1_000_003 + position) % 2**63
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand(rows, self.runner.vocab_size, generator=generator, dtype=torch.float64)
        return -(-uniform.clamp_min(1e-300).log()).log()

    def _until_end(self, tokens: list[int]) -> tuple[list[int], bool]:
        """The tokens up to the first that ends the text, and whether one does."""
        for index, token in enumerate(tokens):
            if token in self.end_ids:
                return tokens[: index + 1], True
        return tokens, False

    def _num_masks(self, state: Tensor) -> int:
        return int((state == self.runner.blocks.mask_token_id).sum())

    def _is_done(self, block: _OpenBlock, state: Tensor) -> bool:
        """No masks, or none before the end of the text: what follows it is never read."""
        for token in state[block.known :].tolist():
            if token == self.runner.blocks.mask_token_id:
                return False
            if token in self.end_ids:
                return True
        return True

    def _until_committed_end(self, block: _OpenBlock, state: Tensor) -> Tensor:
        """The state without what follows the first committed end of the text."""
        for row, token in enumerate(state.tolist()):
            if row >= block.known and token in self.end_ids:
                return state[: row + 1]
        return state


@dataclass(frozen=True, slots=True)
class Denoised:
    """A whole text and what it cost."""

    text: str
    token_ids: list[int]
    counts: Counts


class DiffusionModel:
    """A masked-diffusion model with its tokenizer.

    Example:
        >>> model = DiffusionModel()
        >>> model.generate("copy: c a b ->", schedule=make_schedule("freedave")).text

    Args:
        folder: in Hugging Face format, config.json with mask_token_id, block_size and
            sub_block_size; default: the model that ships.
    """

    def __init__(self, folder: str | Path = DIFFUSION_DIR) -> None:
        self.runner = BlockRunner(MaskedModel.load(folder))
        self.tokenizer: Tokenizer = load_tokenizer(folder)
        self.end_ids = frozenset(eos_token_ids(folder))

    @cached_property
    def num_parameters(self) -> int:
        return sum(tensor.numel() for tensor in self.runner.model.weights.values())

    def denoiser(
        self,
        schedule: Schedule | None = None,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        sub_block_cache: bool = False,
    ) -> Denoiser:
        """The loop for one text; see :class:`Denoiser`."""
        return Denoiser(
            self.runner, schedule or FreeDave(), self.end_ids, temperature, seed, sub_block_cache
        )

    def generate(
        self,
        prompt: str,
        *,
        schedule: Schedule | None = None,
        max_tokens: int = 64,
        temperature: float = 0.0,
        seed: int = 0,
        sub_block_cache: bool = False,
    ) -> Denoised:
        """A whole text (default schedule: FreeDave)."""
        denoiser = self.denoiser(
            schedule, temperature=temperature, seed=seed, sub_block_cache=sub_block_cache
        )
        blocks = denoiser.decode(self.tokenizer.encode(prompt, False), max_tokens)
        token_ids = _joined(blocks)
        return Denoised(self.tokenizer.decode(token_ids), token_ids, denoiser.counts)


def _joined(blocks: Iterable[list[int]]) -> list[int]:
    return [token for block in blocks for token in block]
