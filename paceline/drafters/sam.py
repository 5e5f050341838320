"""SAM Decoding: suffix automata find the longest suffix that occurred before; copy what followed.

Hu et al. 2024 (arXiv 2411.10666). A dynamic automaton over the session's own tokens grows with
them; static ones hold earlier outputs of this engine, and a corpus that its owner gives. If the
longest match (outside the session, it counts ``corpus_bias`` tokens less) has at least
``min_match`` tokens, the draft is copied from there, otherwise another drafter drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from paceline.drafters.base import (
    DRAFT_PER_MATCH,
    FALLBACK_DEPTH,
    MIN_MATCH,
    Drafter,
    DrafterPart,
    LookupDrafter,
)
from paceline.knobs import Knob
from paceline.types import Budget, Draft

if TYPE_CHECKING:
    from paceline.view import SessionView

MAX_CORPUS = 100_000  # tokens in each of two automata, 0.4 KB each
_BORDER = -1  # between two sequences of a corpus; no context contains it


class SuffixAutomaton:
    """Every substring of a growing text; at most two states for each token.

    Attributes:
        tokens: the text.
        next: successors of each state by token.
        link: the state of the longest suffix that occurs in more places; -1 at the root, state 0.
        length: of the longest substring of each state.
        after: position after the earliest occurrence of each state's substrings.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.after = [0]
        self._last = 0

    @property
    def repeated(self) -> int:
        """State of the longest suffix of the text that occurred earlier in it."""
        return max(0, self.link[self._last])

    def append(self, token: int) -> None:
        """Extend the text; constant time on average (Blumer et al. 1985)."""
        self.tokens.append(token)
        state, new = self._last, self._add({}, 0, self.length[self._last] + 1, len(self.tokens))
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        if state >= 0:
            old = self.next[state][token]
            length = self.length[state] + 1
            if length < self.length[old]:  # only its shorter substrings end here: split them off
                clone = self._add(self.next[old].copy(), self.link[old], length, self.after[old])
                while state >= 0 and self.next[state].get(token) == old:
                    self.next[state][token] = clone
                    state = self.link[state]
                self.link[old] = old = clone
            self.link[new] = old
        self._last = new

    def _add(self, successors: dict[int, int], link: int, length: int, after: int) -> int:
        self.next.append(successors)
        self.link.append(link)
        self.length.append(length)
        self.after.append(after)
        return len(self.next) - 1


class Cursor:
    """The longest suffix of a context that occurs in an automaton over another text.

    Attributes:
        automaton: may grow between the calls.
        state, length: where the suffix is, and how many tokens it has.
    """

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.state = self.length = 0

    def advance(self, token: int) -> None:
        """Append a token to the context; constant time on average."""
        successors, link = self.automaton.next, self.automaton.link
        self.settle()
        while self.state and token not in successors[self.state]:
            self.state = link[self.state]
            self.length = self.automaton.length[self.state]
        if token in successors[self.state]:
            self.state = successors[self.state][token]
            self.length += 1

    def settle(self) -> None:
        """Move to the state of this suffix: the automaton may have split states since the last
        call."""
        link, length = self.automaton.link, self.automaton.length
        while self.state and self.length <= length[link[self.state]]:
            self.state = link[self.state]


class _State:
    """SAM Decoding's state for a session."""

    def __init__(self) -> None:
        self.own = SuffixAutomaton()
        self.cursors: list[Cursor] = []


CORPUS_BIAS = Knob[int](
    "corpus_bias", int, 5,
    "A match in earlier outputs, or in the corpus, must be this many tokens longer than one in the "
    "session's own tokens.",
    ge=0, le=64, search=(0, 2, 5),
)  # fmt: skip


class SamDecoding(LookupDrafter[_State]):
    """A chain copied from the session's own tokens, from earlier outputs or from a corpus.

    Args:
        fallback: drafts where the match is too short.
        corpus: texts that are never forgotten (the paper's static automaton), as token ids.
        max_corpus: tokens in each of the two automata over earlier outputs. A text cannot leave
            an automaton, so the older of the two goes when the newer is full.
    """

    finds_chains = True

    def __init__(
        self,
        fallback: Drafter | None = None,
        *,
        corpus: Iterable[Sequence[int]] = (),
        max_corpus: int = MAX_CORPUS,
    ) -> None:
        super().__init__(fallback)
        self._max_corpus = max_corpus
        self._corpora = [SuffixAutomaton()]  # of earlier outputs, the newest first
        self._static = SuffixAutomaton()
        for text in corpus:
            _add_text(self._static, text)

    def start(self, session: SessionView) -> _State:
        state = _State()
        self._catch_up(session, state)
        return state

    def find(self, session: SessionView, state: _State, budget: Budget) -> Draft | None:
        config = session.config
        bias, least, factor = config[CORPUS_BIAS], config[MIN_MATCH], config[DRAFT_PER_MATCH]
        self._catch_up(session, state)
        own = state.own
        place, match = own.repeated, own.length[own.repeated]
        best = max(state.cursors, key=lambda cursor: cursor.length)
        copied = own
        if best.length - bias > match:
            best.settle()
            copied, place, match = best.automaton, best.state, best.length - bias
        if match < least:
            return None
        count = min(budget.depth, budget.nodes)
        if factor is not None:
            count = min(count, int(factor * match))
        while (
            copied is own
            and copied.after[place] + count > len(copied.tokens)
            and copied.length[copied.link[place]] >= least
        ):
            place = copied.link[place]  # a shorter match may lie further back, with more after it
        tokens = copied.tokens[copied.after[place] : copied.after[place] + count]
        if _BORDER in tokens:
            tokens = tokens[: tokens.index(_BORDER)]
        return Draft.chain(tokens) if tokens else None

    def _catch_up(self, session: SessionView, state: _State) -> None:
        known = {id(cursor.automaton): cursor for cursor in state.cursors}
        corpora = [*self._corpora, *([self._static] if self._static.tokens else [])]
        state.cursors = [known.get(id(corpus)) or Cursor(corpus) for corpus in corpora]
        for token in session.token_ids[len(state.own.tokens) :]:
            state.own.append(token)
            for cursor in state.cursors:
                cursor.advance(token)

    def finish(self, session: SessionView, state: _State) -> None:
        """Add the output to the corpus."""
        output = session.output_ids[: self._max_corpus - 1]
        if not output:
            return
        if len(self._corpora[0].tokens) + len(output) >= self._max_corpus:
            self._corpora = [SuffixAutomaton(), self._corpora[0]]
        _add_text(self._corpora[0], output)


def _add_text(automaton: SuffixAutomaton, text: Sequence[int]) -> None:
    for token in (*text, _BORDER):
        automaton.append(token)


SAM = DrafterPart(
    make=lambda context: SamDecoding(corpus=context.corpus),
    knobs=(MIN_MATCH.but(5), CORPUS_BIAS, DRAFT_PER_MATCH.but(4.0)),
    replay="lookup",
    remembers=True,
)
SAM_OR_TOKEN_RECYCLING = DrafterPart(
    make=lambda context: SamDecoding(context.drafter("token_recycling"), corpus=context.corpus),
    knobs=(MIN_MATCH.but(5), CORPUS_BIAS, DRAFT_PER_MATCH, FALLBACK_DEPTH.but(6)),
)
SAM_OR_EAGLE = DrafterPart(
    make=lambda context: SamDecoding(context.drafter("eagle"), corpus=context.corpus),
    knobs=(MIN_MATCH.but(5), CORPUS_BIAS, DRAFT_PER_MATCH, FALLBACK_DEPTH.but(5)),
    remembers=True,
    halves=("sam_decoding", "eagle2"),
)
