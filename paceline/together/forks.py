"""APAR: a model that opens branches of its own answer, which are written in parallel (lossy).

Liu et al. 2024 (arXiv 2401.06761, section 3): a model that was fine-tuned on answers that are trees
writes the token *fork* where a detail belongs. A branch begins there: it has the text so far up to
the fork, then the token *child*, which tells the model that it is to write the detail. The branch
that forked goes on as if the detail were there already. A branch sees what its ancestors wrote
before it began, and nothing of its siblings; an end-of-text token ends it, and its KV entries are
free at once.

Every branch is a session of an engine, so all branches of a step share a forward, and each may
decode with any method. Cached entries of what a branch has in common with the one that it leaves
are shared, in whole blocks of the prefix cache; the rest of a block, up to 15 tokens, is read again
beside the rounds of the others.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.request import Request
from paceline.sampling import MAX_SEED, SamplingParams
from paceline.session import Session
from paceline.tokenizer import IncrementalDecoder, Tokenizer

Address = tuple[int, ...]
"""Where a branch is in the tree: the number of the fork taken in each ancestor; () is the root."""


@dataclass(frozen=True, slots=True)
class ForkTokens:
    """The two control tokens that a model was fine-tuned with.

    Attributes:
        fork: a branch begins behind it.
        child: given to a branch as its first token.
    """

    fork: int
    child: int

    @staticmethod
    def named(tokenizer: Tokenizer, fork: str, child: str) -> ForkTokens:
        """The tokens with these texts.

        Raises:
            InvalidArgument: one is no token of the vocabulary, or both are the same.
        """
        ids = []
        for name, text in (("fork", fork), ("child", child)):
            spelled = tokenizer.encode(text, False)
            if len(spelled) != 1:
                raise InvalidArgument(name, text, "the text of one token of the model")
            ids += spelled
        if ids[0] == ids[1]:
            raise InvalidArgument("child", child, "another token than fork")
        return ForkTokens(*ids)


@dataclass(slots=True)
class Branch:
    """A branch of an answer.

    Attributes:
        above: tokens of the path from the prompt to where it begins, *child* included.
        session: that writes it; its prompt ends with the path above.
        forks: places in its output at which branches begin, in order.
        num_seen: tokens of its output in which forks were looked for.
    """

    address: Address
    above: int
    session: Session
    decoder: IncrementalDecoder
    forks: list[int] = field(default_factory=list)
    num_seen: int = 0

    @property
    def end(self) -> int:
        """Tokens of the path from the prompt to its last token."""
        return self.above + len(self.session.output_ids)


@dataclass(frozen=True, slots=True)
class BranchPiece:
    """What a step added to a branch; control and stop tokens have no text."""

    address: Address
    token_ids: tuple[int, ...]
    text: str
    finished: bool


class ForkedAnswer:
    """An answer as a tree of branches.

    Args:
        engine: with a tokenizer and a target in this process. Other sessions may run in it.
        tokens: the model's control tokens.
        params: of each branch. ``max_tokens`` is the most of a path from the root to a leaf. Each
            branch has a seed of its own, which follows from this one and its address.
        speculation: how each branch decodes; None: with the method `auto`.
        parallel: False writes one branch after another, in the order in which they begin. The
            tokens are the same.
        max_forks: branches that one branch may begin; what it forks later is not written.
        max_depth: of the tree; a branch of this depth begins none.

    Attributes:
        branches: by their addresses, those begun so far.
        num_steps: forwards from the one that gave the first token on.
    """

    def __init__(
        self,
        engine: Engine,
        tokens: ForkTokens,
        params: SamplingParams | None = None,
        speculation: SpeculationConfig | None = None,
        *,
        parallel: bool = True,
        max_forks: int = 16,
        max_depth: int = 3,
    ) -> None:
        if engine.tokenizer is None:
            raise InvalidArgument("engine", "without a tokenizer", "an engine with a tokenizer")
        for name, value in (("max_forks", max_forks), ("max_depth", max_depth)):
            if value < 0:
                raise InvalidArgument(name, value, "0 or more")
        self._engine, self._tokenizer, self._tokens = engine, engine.tokenizer, tokens
        self._target = engine.local_target
        self._params = params or SamplingParams()
        self._speculation = speculation or SpeculationConfig(method="auto")
        self._parallel = parallel
        self._max_forks, self._max_depth = max_forks, max_depth
        self._later: list[tuple[Address, int, list[int]]] = []
        self.branches: dict[Address, Branch] = {}
        self.num_steps = 0

    def write(self, prompt_ids: Sequence[int]) -> Iterator[BranchPiece]:
        """Write the answer; call it once.

        Raises:
            InvalidArgument, ResourceExhausted: the engine refuses the request.
        """
        self._later.append(((), 0, list(prompt_ids)))
        try:
            while running := self._begin_branches():
                events = self._engine.step()
                self.num_steps += self.num_steps > 0 or bool(running[0].session.output_ids)
                texts = {event.session.session_id: event.token_ids for event in events}
                for branch in running:
                    if branch.session.error is not None:
                        raise branch.session.error
                    if branch.session.session_id in texts:
                        yield self._advance(branch, texts[branch.session.session_id])
        finally:
            for branch in self.branches.values():
                self._engine.cancel(branch.session.session_id)

    def _begin_branches(self) -> list[Branch]:
        """Begin the branches whose turn it is; returns all that are not finished."""
        running = [each for each in self.branches.values() if not each.session.finished]
        while self._later and (self._parallel or not running):
            address, above, prompt_ids = self._later.pop(0)
            params = replace(
                self._params,
                max_tokens=self._params.max_tokens - above,
                seed=_branch_seed(self._params.seed, address),
            )
            session = self._engine.submit(Request(prompt_ids, params, self._speculation))
            decoder = IncrementalDecoder(self._tokenizer)
            running.append(Branch(address, above, session, decoder))
            self.branches[address] = running[-1]
        return running

    def _advance(self, branch: Branch, token_ids: Sequence[int]) -> BranchPiece:
        """Note what a step added to a branch."""
        session, text = branch.session, ""
        for place in range(branch.num_seen, len(session.output_ids)):
            token = session.output_ids[place]
            if token == self._tokens.fork:
                self._fork(branch, place)
            if not self._is_control(session, token):
                text += branch.decoder.push(token)
        branch.num_seen = len(session.output_ids)
        if session.finished:
            text += branch.decoder.flush()
        return BranchPiece(branch.address, tuple(token_ids), text, session.finished)

    def _fork(self, branch: Branch, place: int) -> None:
        """Begin a branch behind a fork, if one may begin there."""
        above = branch.above + place + 2  # with the fork and *child*
        end = branch.session.prompt_length + place + 1
        if (
            len(branch.forks) == self._max_forks
            or len(branch.address) == self._max_depth
            or above >= self._params.max_tokens
            or end + 1 >= self._target.context_length
        ):
            return
        address = (*branch.address, len(branch.forks))
        branch.forks.append(place)
        if not branch.session.finished:  # else it has left its entries already
            self._target.publish(branch.session)
        prompt = [*branch.session.token_ids[:end], self._tokens.child]
        self._later.append((address, above, prompt))

    def _is_control(self, session: Session, token: int) -> bool:
        return token in (self._tokens.fork, self._tokens.child) or token in session.stop_ids

    @property
    def num_tokens(self) -> int:
        """Tokens of all branches, *child* of each included."""
        written = sum(len(each.session.output_ids) for each in self.branches.values())
        return written + len(self.branches) - 1

    @property
    def longest_path(self) -> int:
        """Tokens from the prompt to the leaf that is furthest from it."""
        return max(each.end for each in self.branches.values())

    @property
    def text(self) -> str:
        """The answer as it reads: each branch where it begins."""
        return self._tokenizer.decode(self.token_ids())

    def token_ids(self, address: Address = ()) -> list[int]:
        """Tokens of :attr:`text`, from a branch on: those of the tree in its order."""
        branch = self.branches[address]
        number, found = 0, list[int]()
        for place, token in enumerate(branch.session.output_ids):
            if not self._is_control(branch.session, token):
                found.append(token)
            if number < len(branch.forks) and branch.forks[number] == place:
                if (*address, number) in self.branches:
                    found += self.token_ids((*address, number))
                number += 1
        return found


def _branch_seed(seed: int, address: Address) -> int:
    """A seed that follows from where a branch is, not from when it begins."""
    return (seed + zlib.crc32(repr(address).encode()) * len(address)) % (MAX_SEED + 1)
