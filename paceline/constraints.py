"""Constraints: limit the output to what a JSON schema, a regular expression or a grammar allows.

llguidance (https://github.com/guidance-ai/llguidance) provides the grammars; the first constraint
imports it. Acceptance asks for a mask at each position that it visits, after exactly the tokens
that AR would have there, so a constrained request gets AR's tokens with any draft.

A constraint from outside may be made to hurt. It is looked at before anything compiles it
(:mod:`paceline.constraint_check`), compiled and tried out in a process of its own
(:mod:`paceline.constraint_process`), and its masks have a budget of processor time: one that
exceeds it ends its own session.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.constraint_check import check_constraint
from paceline.constraint_process import (
    BURST_S,
    MASK_S,
    STEP_S,
    ConstraintProcess,
    Refused,
    new_matcher,
)
from paceline.constraint_text import JsonLayout, TokenBytes, forced_tokens
from paceline.errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from paceline.sampling import SamplingParams
    from paceline.tokenizer import Tokenizer

T = TypeVar("T")
Mask = npt.NDArray[np.bool_]  # [vocab_size], True where a token is allowed

_MASK_THREADS = 8
_LOOK_S = 0.005
_CACHED = 64
_REFUSED, _REFUSED_S = 1024, 600.0  # how many are remembered, and for how long
MAX_WAITING, MAX_WAITING_OF_ONE = 32, 4
"""Constraints that may wait to be compiled: of all callers, and of one tenant."""


class Constraint:
    """Which tokens may come next in one session, from its first generated token on.

    Attributes:
        error: why it cannot continue (it reached a limit of llguidance, or its masks took more than
            ``STEP_S`` of a processor for each committed token); None: it can.
    """

    def __init__(self, matcher: Any, vocab_size: int, pieces: TokenBytes | None = None) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._pieces = pieces
        self._layout, self._laid_out = JsonLayout(), 0  # of the output's first tokens: how many
        self._ahead: list[int] = []  # tokens that the matcher has seen beyond the committed ones
        self._masks: dict[tuple[int, ...], Mask] = {}  # behind the committed tokens and these
        self._spent = 0.0  # processor seconds that committed tokens have not paid for
        self.error: Exception | None = None

    @property
    def complete(self) -> bool:
        """Whether the output must end after the committed tokens."""
        return self._go_to(()) and bool(self._matcher.is_stopped())

    def allowed(self, path_tokens: Sequence[int]) -> Mask | None:
        """Mask of the tokens that may follow the committed tokens and ``path_tokens``.

        None if one of ``path_tokens`` is itself not allowed or the constraint failed; only then
        :attr:`error` is set.
        """
        return self._mask() if self._go_to(path_tokens) else None

    def _mask(self) -> Mask | None:
        """The mask where the matcher is; None if it takes too long."""
        place = tuple(self._ahead)
        if place in self._masks:
            return self._masks[place]
        found = _within(MASK_S, self._matcher.compute_bitmask)
        if found is None:  # the matcher is still at it, and is left to that
            self._too_slow()
            return None
        data, seconds = found
        self._spend(seconds)
        if self.error is None and self._matcher.is_error():
            self._fail()
        if self.error is not None:
            return None
        mask = self._masks[place] = self._unpacked(data)
        return mask

    def _unpacked(self, data: bytes) -> Mask:
        bits = np.frombuffer(data, np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Length of the longest beginning of ``tokens`` that may follow the committed ones."""
        for count, token in enumerate(tokens):
            mask = self.allowed(tokens[:count])
            if mask is None or not mask[token]:
                return count
        return len(tokens)

    def forced(self, output_ids: Sequence[int], drafted: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens of the text that has to follow ``drafted``; [] if there is a
        choice, or if looking takes too long. It never sets :attr:`error`.

        Args:
            output_ids: the committed tokens of the output.
        """
        if self._pieces is None or self._spent > BURST_S / 2 or not self._go_to(drafted):
            return []
        if self._laid_out > len(output_ids):  # it was cut
            self._layout, self._laid_out = JsonLayout(), 0
        self._layout.feed(self._pieces.join(output_ids[self._laid_out :]))
        self._laid_out = len(output_ids)
        layout = self._layout.copy()
        layout.feed(self._pieces.join(drafted))

        def compute_mask(matcher: Any | None) -> Mask | None:
            if matcher is None:
                return self._mask()  # acceptance needs it, too
            found = _within(MASK_S, matcher.compute_bitmask)
            if found is None:
                self._spent += BURST_S / 2  # so that it is left alone for a while
                return None
            self._spent += found[1]
            late = matcher.is_error() or self._spent > BURST_S / 2
            return None if late else self._unpacked(found[0])

        return forced_tokens(self._matcher.deep_copy(), self._pieces, layout, count, compute_mask)

    def commit(self, token: int) -> None:
        """Advance by a committed token."""
        if self._ahead[:1] != [token] and not self._go_to((token,)):
            self._fail()
        else:
            del self._ahead[0]
        behind = {place[1:]: m for place, m in self._masks.items() if place[:1] == (token,)}
        self._masks = behind
        self._spent = max(0.0, self._spent - STEP_S)

    def rewind(self, count: int) -> None:
        """Forget the last ``count`` committed tokens."""
        if self._go_to(()):
            self._matcher.rollback(count)
        self._masks.clear()

    def _fail(self) -> None:
        if self.error is None:
            reason = self._matcher.get_error() or "a token that it does not allow"
            self.error = ResourceExhausted(f"the constraint cannot go on: {reason}", 0.0)

    def _timed(self, work: Callable[..., T], *arguments: Any) -> T:
        """The result of a call of the matcher, whose processor time counts.

        The time of this thread alone: what other threads and processes do must end no session.
        """
        started = time.thread_time()
        result = work(*arguments)
        self._spend(time.thread_time() - started)
        return result

    def _spend(self, seconds: float) -> None:
        self._spent += seconds
        if self._spent > BURST_S:
            self._too_slow()

    def _too_slow(self) -> None:
        if self.error is None:
            self.error = ResourceExhausted(
                f"the constraint takes more than {1e3 * STEP_S:g} ms of a processor for each token "
                "to find out what may follow: use one with fewer alternatives for the same text",
                0.0,
            )

    def _go_to(self, path_tokens: Sequence[int]) -> bool:
        """Move the matcher behind the committed tokens and ``path_tokens``; False if refused.

        A constraint with an error stays where it is: another thread may still use its matcher. The
        matcher gets a token only after the mask of its place: the mask bounds the time of both.
        """
        if self.error is not None:
            return False
        shared = 0
        for ours, theirs in zip(self._ahead, path_tokens, strict=False):
            if ours != theirs:
                break
            shared += 1
        if len(self._ahead) > shared:
            self._matcher.rollback(len(self._ahead) - shared)
            del self._ahead[shared:]
        for token in path_tokens[shared:]:
            mask = self._mask()
            if mask is None or not mask[token]:
                return False
            if self._timed(self._matcher.try_consume_tokens, [token]) != 1:
                if self._matcher.is_error():
                    self._fail()
                return False
            self._ahead.append(token)
        return True


@cache
def _mask_threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MASK_THREADS, "paceline-masks")


def _within(limit_s: float, work: Callable[[], T]) -> tuple[T, float] | None:
    """The result of ``work`` and its processor seconds; None if it takes more than ``limit_s``.

    It runs on another thread, which goes on with it after that: nothing can stop llguidance in the
    middle of a mask, but no other session has to wait for it.
    """
    began: list[tuple[int, float]] = []  # the thread's clock, and what it showed

    def timed() -> tuple[T, float]:
        clock = time.pthread_getcpuclockid(threading.get_ident())
        began.append((clock, time.clock_gettime(clock)))
        result = work()
        return result, time.clock_gettime(clock) - began[0][1]

    future = _mask_threads().submit(timed)
    while True:
        try:
            return future.result(_LOOK_S)
        except TimeoutError:
            if began and time.clock_gettime(began[0][0]) - began[0][1] > limit_s:
                return None


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
        self._lock = threading.Lock()  # of what is kept
        self._compiling = threading.Lock()  # one at a time
        self._pool: ThreadPoolExecutor | None = None
        self._waiting: Counter[str] = Counter()  # by tenant
        self._ll_tokenizer: Any = None
        self._pieces: TokenBytes | None = None
        self.process: ConstraintProcess | None = None
        self._matchers: OrderedDict[bytes, Any] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # why, and until when

    def compile(self, params: SamplingParams) -> Constraint | None:
        """A new constraint for the parameters; None if they set none.

        May take seconds; a thread that has better things to do uses :meth:`submit`.

        Raises:
            InvalidArgument: the constraint is invalid or exceeds a bound, the target has no
                tokenizer, or llguidance is not installed.
        """
        if params.constraint is None:
            return None
        kind, text = params.constraint
        key = _digest(kind, text)
        found = self._kept(key, kind, text)
        if found is None:
            with self._compiling:
                # Another thread may have compiled the same one.
                found = self._kept(key, kind, text) or self._new(key, kind, text)
        return found

    def submit(self, params: SamplingParams, scope: str = "") -> Future[Constraint | None]:
        """:meth:`compile` on a thread of its own.

        Args:
            scope: whose constraint it is; "" is unknown.

        Raises:
            InvalidArgument: as :meth:`compile`, if the constraint has been refused before.
            ResourceExhausted: too many constraints wait to be compiled.
        """
        found = self._known(params)
        if params.constraint is None or found is not None:
            done: Future[Constraint | None] = Future()
            done.set_result(found)
            return done
        with self._lock:
            of_one = bool(scope) and self._waiting[scope] >= MAX_WAITING_OF_ONE
            if of_one or self._waiting.total() >= MAX_WAITING:
                whose = "of one tenant " if of_one else ""
                raise ResourceExhausted(
                    f"{self._waiting[scope] if of_one else MAX_WAITING} constraints {whose}wait to "
                    "be compiled"
                )
            self._waiting[scope] += 1
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "paceline-constraints")
            future = self._pool.submit(self.compile, params)

        def ended(_: object) -> None:
            with self._lock:
                self._waiting[scope] -= 1
                if not self._waiting[scope]:
                    del self._waiting[scope]

        future.add_done_callback(ended)
        return future

    def _known(self, params: SamplingParams) -> Constraint | None:
        if params.constraint is None:
            return None
        kind, text = params.constraint
        return self._kept(_digest(kind, text), kind, text)

    def _kept(self, key: bytes, kind: str, text: str) -> Constraint | None:
        """A constraint that has been compiled before.

        Raises:
            InvalidArgument: it has been refused before.
        """
        with self._lock:
            reason, until = self._refused.get(key, ("", 0.0))
            if until > time.monotonic():
                raise InvalidArgument(kind, _start(text), reason)
            matcher = self._matchers.get(key)
            if matcher is None:
                return None
            self._matchers.move_to_end(key)
            return Constraint(matcher.deep_copy(), self._vocab_size, self._pieces)

    def _new(self, key: bytes, kind: str, text: str) -> Constraint:
        check_constraint(kind, text)
        self._prepare(kind, text)
        assert self.process is not None
        try:
            # The helper has compiled it within its budget, and with less stack than this thread's.
            matcher = new_matcher(self.process.compile(kind, text), self._ll_tokenizer)
        except Refused as error:
            with self._lock:
                self._refused[key] = (str(error), time.monotonic() + _REFUSED_S)
                if len(self._refused) > _REFUSED:
                    self._refused.popitem(last=False)
            raise InvalidArgument(kind, _start(text), str(error)) from None
        with self._lock:
            self._matchers[key] = matcher
            if len(self._matchers) > _CACHED:
                self._matchers.popitem(last=False)
            return Constraint(matcher.deep_copy(), self._vocab_size, self._pieces)

    def _prepare(self, kind: str, text: str) -> None:
        """Load the tokenizer, here and in the helper."""
        if self._ll_tokenizer is not None:
            return
        try:
            import llguidance
        except ImportError:
            raise InvalidArgument(
                kind, _start(text), "none: constraints need the package llguidance "
                "(pip install 'paceline[constraints]')",
            ) from None  # fmt: skip
        source = self._tokenizer.to_json() if self._tokenizer is not None else None
        if source is None:
            raise InvalidArgument(
                kind, _start(text), "none: constraints need a tokenizer with a tokenizer.json"
            )
        known = self._tokenizer.vocab_size if self._tokenizer is not None else 0
        options: dict[str, Any] = {
            "n_vocab": max(self._vocab_size, known), "eos_token": self._eos_token_ids or None,
        }  # fmt: skip
        self.process = ConstraintProcess(source, options)
        assert self._tokenizer is not None  # it gave the source
        self._pieces = TokenBytes(self._tokenizer, self._vocab_size, self._eos_token_ids)
        self._ll_tokenizer = llguidance.LLTokenizer(source, **options)


def _digest(kind: str, text: str) -> bytes:
    return hashlib.sha256(f"{kind}:{text}".encode("utf-8", "surrogatepass")).digest()


def _start(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
