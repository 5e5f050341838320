"""Continuations of one prompt, scored in one reading of their token tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.acceptance.base import PathLogits
from paceline.plan import AR_PLAN
from paceline.sampling import SamplingParams, TokenLogprobs, logprobs_of, token_logprobs
from paceline.scoring import token_tree
from paceline.session import Session
from paceline.tree import children, path_to
from paceline.types import EMPTY_DRAFT

if TYPE_CHECKING:
    import torch

    from paceline.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ScoredContinuation:
    """What a tree has told of one continuation.

    Attributes:
        logprobs: of each of its tokens, after the prompt and its tokens before.
        after: a finished session whose prompt is the whole, with the one token that AR generates.
        logprob: of that token, if the request wants it.
    """

    logprobs: tuple[TokenLogprobs, ...]
    after: Session
    logprob: TokenLogprobs | None


class ScoredTree(Session):
    """A session that ends when the target has read a prompt and all continuations behind it.

    Each token that several of them begin with is computed once, and steps read the tree in parts as
    they read a long prompt. On the fast path its scores are those of one continuation at a time, to
    the last bit.

    Args:
        continuations: each with at least one token of the context left behind it.
    """

    def __init__(
        self,
        session_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        continuations: Sequence[Sequence[int]],
        *,
        eos_token_ids: Iterable[int] = (),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        super().__init__(session_id, prompt_ids, params, AR_PLAN, eos_token_ids=eos_token_ids)
        self.branches, self._ends = token_tree(continuations)
        self._following = children(self.branches.parent_indices)
        self._logprobs: dict[int, TokenLogprobs] = {}  # by node
        self._after = [
            Session(
                f"{session_id}/{i}", [*prompt_ids, *each], params, AR_PLAN,
                eos_token_ids=eos_token_ids, tokenizer=tokenizer,
            )
            for i, each in enumerate(continuations)
        ]  # fmt: skip
        self._ending: dict[int, list[int]] = {}  # continuations by their last node
        for i, node in enumerate(self._ends):
            self._ending.setdefault(node, []).append(i)
        self._after_logprobs: dict[int, TokenLogprobs] = {}

    @property
    def num_positions(self) -> int:
        """Tokens of the prompt and nodes of the tree."""
        return self.num_to_read

    def read_prompt(self, end: int, logits: torch.Tensor) -> None:
        """As for any session, and the same for the branches."""
        super().read_prompt(end, logits)
        for node, row in enumerate(logits, end - len(logits) - self.prompt_length):
            if node >= -1:  # -1: the prompt's last token
                self._read(node, row)

    def _read(self, node: int, row: torch.Tensor) -> None:
        """Note what the target says after a node.  # row: [vocab_size]"""
        values, count = row.float().cpu().numpy(), self.params.prompt_logprobs or 0
        assert self.branches is not None
        if following := self._following[node]:
            tokens = self.branches.token_ids[following].tolist()
            told = logprobs_of(values, tokens, count)
            self._logprobs.update(zip(following, told, strict=True))
        for i in self._ending.get(node, ()):
            after = self._after[i]
            if after.finished:
                continue  # the tree is read again, because the session had to give way
            found = PathLogits(
                row[None], self.params, after.token_ids, None, after.prompt_length,
                stop_ids=after.stop_ids,
            )  # fmt: skip
            (token,) = after.commit([self.plan.rule.accept(EMPTY_DRAFT, found).next_token])
            self.stats.num_tokens += 1
            if self.params.logprobs is not None:
                self._after_logprobs[i] = token_logprobs(values, token, self.params.logprobs)

    def scores(self) -> list[ScoredContinuation]:
        """One for each continuation, when all are read."""
        assert self.branches is not None
        parents = self.branches.parent_indices
        return [
            ScoredContinuation(
                tuple(self._logprobs[node] for node in path_to(parents, end)),
                self._after[i],
                self._after_logprobs.get(i),
            )
            for i, end in enumerate(self._ends)
        ]
