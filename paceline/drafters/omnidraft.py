"""OmniDraft: a draft model with another tokenizer than the target's.

Ramakrishnan et al. 2025, arXiv 2507.02659. The draft model reads the target's text in its own
tokens and drafts a chain of them. An n-gram cache C holds pairs of draft tokens and target tokens
that spell the same text; the longest known n-gram is replaced first, so that ``k`` drafted tokens
become ``m <= k`` target tokens. What the cache does not know is translated by its text, and the
pairs found on the way enter it, as do those of everything that the target commits.

Exact because the target's own sample decides about every token. Above temperature 0 the noise of a
draft token that maps to one target token is that token's own, as in coupled sampling; the others
have noise of their own, so they match the target's sample only by chance.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from paceline.drafters.base import Drafter
from paceline.sampling import gumbel_at
from paceline.types import EMPTY_DRAFT, Budget, Draft, DraftStep, Outcome

if TYPE_CHECKING:
    from paceline.models.base import ModelRunner
    from paceline.tokenizer import Tokenizer
    from paceline.types import StopRule
    from paceline.view import SessionView, TokensView

MAX_NGRAM = 8  # draft tokens of one pair
MAX_PAIRS = 65_536
WINDOW = 48  # target tokens that are compared at a time
CANDIDATES = 64  # draft tokens that are looked at above temperature 0
_UNFINISHED = "\ufffd"

Scores = npt.NDArray[np.floating[Any]]


class Translator:
    """From draft tokens to target tokens of the same text, with what it has learned.

    Attributes:
        pairs: draft tokens -> target tokens; one of the two sides is a single token.
        num_by_text: translations made by text because the cache lacked them.
    """

    def __init__(self, target: Tokenizer, drafter: Tokenizer) -> None:
        self.target = target
        self.drafter = drafter
        self.pairs: OrderedDict[tuple[int, ...], tuple[int, ...]] = OrderedDict()
        self.num_by_text = 0
        # The target token that a draft token stands for alone; -1: not known.
        self.alone = np.full(drafter.vocab_size, -1, np.int64)

    def read(self, token_ids: Sequence[int]) -> list[int]:
        """The target's text in draft tokens; empty where it ends within a character."""
        text = self.target.decode(token_ids)
        return [] if text.endswith(_UNFINISHED) else self.drafter.encode(text)

    def spell(self, token_ids: Sequence[int]) -> list[int]:
        """Draft tokens with the text of target tokens; empty where that ends within a character."""
        text = self.target.decode(token_ids)
        ends = not text or text.endswith(_UNFINISHED)
        return [] if ends else self.drafter.encode(text, add_special_tokens=False)

    def translate(self, draft_ids: Sequence[int], limit: int) -> list[int]:
        """Target tokens with the text of ``draft_ids``, or of its beginning; ``limit`` at most."""
        out: list[int] = []
        at = 0
        while at < len(draft_ids) and len(out) < limit:
            for n in range(min(MAX_NGRAM, len(draft_ids) - at), 0, -1):
                found = self.pairs.get(tuple(draft_ids[at : at + n]))
                if found is not None:
                    out += found
                    at += n
                    break
            else:
                out += self._by_text(draft_ids[at:])
                break
        return out[:limit]

    def _by_text(self, draft_ids: Sequence[int]) -> list[int]:
        self.num_by_text += 1
        text = self.drafter.decode(draft_ids)
        token_ids = self.target.encode(text, add_special_tokens=False)
        if not text or text.endswith(_UNFINISHED) or self.target.decode(token_ids) != text:
            return []
        self.learn(draft_ids, token_ids)
        return token_ids

    def learn_from(self, token_ids: Sequence[int]) -> None:
        """Learn from tokens of the target."""
        if spelled := self.spell(token_ids):
            self.learn(spelled, token_ids)

    def learn(self, draft_ids: Sequence[int], token_ids: Sequence[int]) -> None:
        """Take the pairs of two spellings of one text; others are ignored."""
        if self.drafter.decode(draft_ids) != self.target.decode(token_ids):
            return
        ours, theirs = _ends(self.drafter, draft_ids), _ends(self.target, token_ids)
        i = j = first = other = 0
        while i < len(ours) and j < len(theirs):
            if ours[i] < theirs[j]:
                i += 1
            elif ours[i] > theirs[j]:
                j += 1
            else:
                i, j = i + 1, j + 1
                if ours[i - 1] == int(ours[i - 1]):
                    self._insert(tuple(draft_ids[first:i]), tuple(token_ids[other:j]))
                    first, other = i, j

    def _insert(self, draft_ids: tuple[int, ...], token_ids: tuple[int, ...]) -> None:
        if min(len(draft_ids), len(token_ids)) != 1 or len(draft_ids) > MAX_NGRAM:
            return
        self.pairs[draft_ids] = token_ids
        self.pairs.move_to_end(draft_ids)
        if len(self.pairs) > MAX_PAIRS:
            self.pairs.popitem(last=False)
        if len(draft_ids) == len(token_ids) == 1 and draft_ids[0] < len(self.alone):
            self.alone[draft_ids[0]] = token_ids[0]


def _ends(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[float]:
    """Where each token ends in the text, in characters; within a character it is a half."""
    ends = []
    for n in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:n])
        ends.append(len(text) - 0.5 if text.endswith(_UNFINISHED) else float(len(text)))
    return ends


class TokenModel(Protocol):
    """A draft model that drafts chains by itself, and answers what comes after a few tokens.

    Attributes:
        last_hidden: as :attr:`paceline.drafters.draft_model.DraftModel.last_hidden`.
    """

    runner: ModelRunner
    last_hidden: torch.Tensor | None

    def open(self, session: SessionView) -> None: ...

    def close(self, session: SessionView) -> None: ...

    def propose(
        self, sessions: Sequence[SessionView], budgets: Sequence[Budget]
    ) -> list[Draft]: ...

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None: ...

    def root(self, sessions: Sequence[TokensView]) -> torch.Tensor: ...

    def expand(
        self, sessions: Sequence[TokensView], frontiers: Sequence[Sequence[tuple[int, int, int]]]
    ) -> torch.Tensor: ...


class _Mirror:
    """A session in draft tokens, as the draft model looks at it."""

    def __init__(self, session: SessionView) -> None:
        self._session = session
        self.session_id = session.session_id
        self.token_ids: list[int] = []
        self.num_learned = 0  # target tokens that the cache has seen

    @property
    def stop_rule(self) -> StopRule | None:
        return self._session.stop_rule


class OmniDraft(Drafter):
    """Drafts in its own tokens and proposes the target's.

    Args:
        model: made for its own vocabulary.
        translator: None where both have the same tokenizer: the plain draft model.

    Attributes:
        num_drafted: tokens of its own that it has drafted; they become fewer when translated.
    """

    rewinds = True

    def __init__(self, model: TokenModel, translator: Translator | None = None) -> None:
        self.model = model
        self.translator = translator
        self.num_drafted = 0
        self._states: dict[str, _Mirror] = {}

    def open(self, session: SessionView) -> None:
        self.model.open(session)
        self._states[session.session_id] = _Mirror(session)

    def close(self, session: SessionView) -> None:
        self._states.pop(session.session_id, None)
        self.model.close(session)

    def propose(self, sessions: Sequence[SessionView], budgets: Sequence[Budget]) -> list[Draft]:
        if self.translator is None:
            return self.model.propose(sessions, budgets)
        drafts = [EMPTY_DRAFT] * len(sessions)
        asked = []
        for i, (session, budget) in enumerate(zip(sessions, budgets, strict=True)):
            mirror, depth = self._states[session.session_id], min(budget.depth, budget.nodes)
            mirror.token_ids = self.translator.read(session.token_ids) if depth > 0 else []
            self._learn(mirror, session)
            size = len(mirror.token_ids)
            if size and size + depth <= self.model.runner.context_length:
                asked.append((i, mirror, depth))
        if asked:
            chosen = [(sessions[i], mirror, depth) for i, mirror, depth in asked]
            for (i, _, depth), drafted in zip(asked, self._draft(chosen), strict=True):
                drafts[i] = Draft.chain(self.translator.translate(drafted, depth))
        return drafts

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        """With a translator, do nothing: the next draft starts from the text."""
        if self.translator is None:
            self.model.observe(sessions, outcomes)

    def _learn(self, mirror: _Mirror, session: SessionView) -> None:
        assert self.translator is not None
        length = session.length
        if length - mirror.num_learned >= WINDOW // 4 or not mirror.num_learned:
            self.translator.learn_from(session.token_ids[-min(WINDOW, length) :])
            mirror.num_learned = length

    def _draft(self, asked: Sequence[tuple[SessionView, _Mirror, int]]) -> list[list[int]]:
        """Chains of draft tokens, each as long as its depth unless its stop rule ends it before."""
        drafted: list[list[int]] = [[] for _ in asked]
        mirrors = [mirror for _, mirror, _ in asked]
        logits = self.model.root(mirrors)  # [len(asked), draft_vocab_size]
        active = list(range(len(asked)))
        while True:
            going = []
            for row, i in enumerate(active):
                session, mirror, _ = asked[i]
                token, scores = self._choose(session, drafted[i], logits[row])
                drafted[i].append(token)
                self.num_drafted += 1
                if not self._ends(mirror.stop_rule, drafted[i], scores, row):
                    going.append(i)
            active = [i for i in going if len(drafted[i]) < asked[i][2]]
            if not active:
                return drafted
            steps = [[(len(d) - 1, d[-1], len(d) - 2)] for d in (drafted[i] for i in active)]
            logits = self.model.expand([mirrors[i] for i in active], steps)

    def _ends(self, rule: StopRule | None, drafted: list[int], scores: Scores, row: int) -> bool:
        """Whether a stop rule ends a draft at its last token, which came from this row."""
        if rule is None:
            return False
        hidden = self.model.last_hidden if rule.wants_hidden else None
        step = DraftStep(len(drafted), drafted[-1], scores, None if hidden is None else hidden[row])
        ends = rule.stop_after(step)
        if ends and rule.drops:
            drafted.pop()
        return ends

    def _choose(
        self, session: SessionView, drafted: list[int], logits: torch.Tensor
    ) -> tuple[int, Scores]:
        """The next draft token, and the scores that it is the best of.  # [k]"""
        params = session.params
        if params.temperature == 0:
            return int(logits.argmax()), logits.float().cpu().numpy()
        translator = self.translator
        assert translator is not None
        values, ids = logits.topk(min(CANDIDATES, len(logits)))
        candidates = ids.cpu().numpy().astype(np.int64)
        stands_for = translator.alone[candidates]
        # Beyond the target's vocabulary, noise that no target token uses.
        own = translator.target.vocab_size + candidates
        position = session.length + len(translator.translate(drafted, len(drafted)))
        noise = gumbel_at(params.seed, position, np.where(stands_for >= 0, stands_for, own))
        scores = values.double().cpu().numpy() / params.temperature + noise
        return int(candidates[int(scores.argmax())]), scores
