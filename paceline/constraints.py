"""Constraints: limit the output to what a JSON schema, a regular expression or a grammar allows.

llguidance (https://github.com/guidance-ai/llguidance) provides the grammars; the first constraint
imports it. Acceptance asks for a mask at each position that it visits, after exactly the tokens
that AR would have there, so a constrained request gets AR's tokens with any draft.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from paceline.sampling import SamplingParams
    from paceline.tokenizer import Tokenizer

Mask = npt.NDArray[np.bool_]  # [vocab_size], True where a token is allowed

_CACHED = 64
# Without this limit, a small model may write blanks for ever where JSON allows them. A schema with
# options of its own (`x-guidance`) keeps them.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,20}"}


class Constraint:
    """Which tokens may come next in one session, from its first generated token on.

    Attributes:
        error: why it cannot continue (it reached a limit of llguidance); None: it can.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ahead: list[int] = []  # tokens that the matcher has seen beyond the committed ones
        self.error: Exception | None = None

    @property
    def complete(self) -> bool:
        """Whether the output must end after the committed tokens."""
        self._go_to(())
        return bool(self._matcher.is_stopped())

    def allowed(self, path_tokens: Sequence[int]) -> Mask | None:
        """Mask of the tokens that may follow the committed tokens and ``path_tokens``.

        None if one of ``path_tokens`` is itself not allowed or the constraint failed; only then
        :attr:`error` is set.
        """
        if not self._go_to(path_tokens):
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            self._fail()
            return None
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Length of the longest beginning of ``tokens`` that may follow the committed ones."""
        self._go_to(())
        return int(self._matcher.validate_tokens(list(tokens)))

    def commit(self, token: int) -> None:
        """Advance by a committed token."""
        if self._ahead[:1] != [token] and not self._go_to((token,)):
            self._fail()
        else:
            del self._ahead[0]

    def rewind(self, count: int) -> None:
        """Forget the last ``count`` committed tokens."""
        self._go_to(())
        self._matcher.rollback(count)

    def _fail(self) -> None:
        if self.error is None:
            reason = self._matcher.get_error() or "a token that it does not allow"
            self.error = ResourceExhausted(f"the constraint cannot go on: {reason}", 0.0)

    def _go_to(self, path_tokens: Sequence[int]) -> bool:
        """Move the matcher behind the committed tokens and ``path_tokens``; False if refused."""
        shared = 0
        for ours, theirs in zip(self._ahead, path_tokens, strict=False):
            if ours != theirs:
                break
            shared += 1
        if len(self._ahead) > shared:
            self._matcher.rollback(len(self._ahead) - shared)
            del self._ahead[shared:]
        for token in path_tokens[shared:]:
            if self._matcher.try_consume_tokens([token]) != 1:
                if self._matcher.is_error():
                    self._fail()
                return False
            self._ahead.append(token)
        return True


class ConstraintCompiler:
    """Makes constraints for one tokenizer. Keeps compiled grammars for later requests.

    Thread-safe.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: Iterable[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._ll_tokenizer: Any = None
        self._matchers: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def compile(self, params: SamplingParams) -> Constraint | None:
        """A new constraint for the parameters; None if they set none.

        Raises:
            InvalidArgument: the grammar is invalid, the target has no tokenizer, or llguidance is
                not installed.
        """
        given = params.constraint
        if given is None:
            return None
        with self._lock:
            matcher = self._matchers.pop(given, None)
        if matcher is None:  # outside the lock: compiling may take a second
            matcher = self._new(*given)
        with self._lock:
            self._matchers[given] = matcher  # last in the dictionary: the most recently used
            if len(self._matchers) > _CACHED:
                self._matchers.popitem(last=False)
            return Constraint(matcher.deep_copy(), self._vocab_size)

    def _new(self, kind: Any, text: str) -> Any:
        try:
            import llguidance
        except ImportError:
            raise InvalidArgument(
                kind, _start(text), "none: constraints need the package llguidance "
                "(pip install 'paceline[constraints]')",
            ) from None  # fmt: skip
        if self._ll_tokenizer is None:
            self._ll_tokenizer = self._load(llguidance, kind, text)
        try:
            if kind == "json_schema" and '"x-guidance"' not in text:
                grammar = llguidance.LLMatcher.grammar_from_json_schema(text, _JSON_OPTIONS)
            else:
                grammar = llguidance.grammar_from(kind, text)
        except ValueError as error:
            raise InvalidArgument(kind, _start(text), f"a valid one ({error})") from None
        failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(
            grammar, self._ll_tokenizer
        )
        matcher = None if failed else llguidance.LLMatcher(self._ll_tokenizer, grammar, log_level=0)
        if matcher is None or matcher.is_error():
            reason = messages[0] if matcher is None else matcher.get_error()
            raise InvalidArgument(kind, _start(text), f"a valid one ({reason.strip()})")
        return matcher

    def _load(self, llguidance: Any, kind: str, text: str) -> Any:
        source = self._tokenizer.to_json() if self._tokenizer is not None else None
        if source is None:
            raise InvalidArgument(
                kind, _start(text), "none: constraints need a tokenizer with a tokenizer.json"
            )
        known = self._tokenizer.vocab_size if self._tokenizer is not None else 0
        return llguidance.LLTokenizer(
            source,
            n_vocab=max(self._vocab_size, known),
            eos_token=self._eos_token_ids or None,
        )


def _start(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
