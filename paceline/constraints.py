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

import contextlib
import hashlib
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from paceline.constraint_check import check_constraint
from paceline.constraint_process import (
    BURST_S,
    MASK_S,
    PATIENCE_S,
    STEP_S,
    ConstraintProcess,
    Killed,
    Refused,
    new_matcher,
)
from paceline.constraint_text import JsonLayout, TokenBytes, forced_tokens
from paceline.errors import InvalidArgument, ResourceExhausted

if TYPE_CHECKING:
    from paceline.sampling import SamplingParams
    from paceline.tokenizer import Tokenizer

T = TypeVar("T")
_Found = tuple[bytes, bool]  # a mask in bits, and whether the matcher has failed
Mask = npt.NDArray[np.bool_]  # [vocab_size], True where a token is allowed

_MASK_THREADS = 4  # and one for all constraints of which a mask has taken long
_LOOK_S, _LONGEST_WAIT_S = 0.001, 0.005
_VAIN_S, _VAIN_SHARE = 0.01, 0.02
_CACHED = 64
_REFUSED, _REFUSED_S = 1024, 600.0  # how many are remembered, and for how long
_HARM_SHARE, _HARM_S, _LONGEST_PAUSE_S = 0.02, 0.5, 30.0
"""Constraints that are too slow or kill the helper may take this share of a processor, for each
tenant, and before that so many seconds of it; new ones wait for no longer than that."""
_HELPER_S = 0.2  # processor seconds that a helper needs to start
MAX_WAITING, MAX_WAITING_OF_ONE = 32, 4
"""Constraints that may wait to be compiled: of all callers, and of one tenant."""


class _Group:
    """The constraints with the same text: their matchers are copies, which share a lock.

    Attributes:
        is_refused: masks of one of them took too long.
        late: masks that take long and may still be under way. While they are, a call of any of the
            matchers would wait for them.
    """

    def __init__(self) -> None:
        self.is_refused = False
        self.late: list[_Job[_Found]] = []

    @property
    def is_held(self) -> bool:
        self.late = [job for job in self.late if not job.done]
        return bool(self.late)


class Constraint:
    """Which tokens may come next in one session, from its first generated token on.

    Args:
        matcher: llguidance's.
        pieces: the bytes of the tokens, for :meth:`forced`.
        group: shared by those with the same text; None: it is alone.
        on_too_slow: called when a mask takes too long, with 0, and when it is done, with the
            processor seconds that it took.

    Attributes:
        error: why it cannot continue (it reached a limit of llguidance, or its masks took more than
            ``STEP_S`` of a processor for each committed token); None: it can.
    """

    def __init__(
        self,
        matcher: Any,
        vocab_size: int,
        pieces: TokenBytes | None = None,
        group: _Group | None = None,
        on_too_slow: Callable[[float], object] = lambda seconds: None,
    ) -> None:
        self._group = group or _Group()
        self._matcher = matcher  # behind the committed tokens
        self._scout: Any = None  # a copy, behind those and the tokens in _ahead
        self._ahead: list[int] = []
        self._vocab_size = vocab_size
        self._pieces = pieces
        self._layout, self._laid_out = JsonLayout(), 0  # of the output's first tokens: how many
        self._masks: dict[tuple[int, ...], Mask] = {}  # behind the committed tokens and these
        self._next: _Job[_Found] | None = None  # the mask behind the committed tokens, under way
        self._slow = False  # whether a mask has ever taken long
        self._num_late = 0
        self._spent = 0.0  # processor seconds that committed tokens have not paid for
        self._on_too_slow = on_too_slow
        self.error: Exception | None = None

    @property
    def complete(self) -> bool:
        """Whether the output must end after the committed tokens."""
        return self._settle(MASK_S) and bool(self._matcher.is_stopped())

    @property
    def is_held(self) -> bool:
        """Whether a call would have to wait for a late mask of a constraint with the same text."""
        return self.error is None and self._group.is_held

    def begin(self) -> None:
        """Have the mask behind the committed tokens computed, on another thread."""
        if self.error is None and () not in self._masks and self._next is None and not self.is_held:
            self._next = self._job(self._matcher)

    def ready(self, wait: bool = True) -> bool:
        """Whether a round may begin: the mask behind the committed tokens is known.

        If not, another session's round need not wait for it. A constraint with an error is ready,
        too: the round ends its session.

        Args:
            wait: for the mask, as long as :data:`PATIENCE_S`.
        """
        if self._group.is_refused:
            self._too_slow()
        if self.error is None and () not in self._masks:
            self.begin()
            self._settle(PATIENCE_S if wait and not self._slow else 0.0)
        return self.error is not None or (() in self._masks and not self.is_held)

    def allowed(self, path_tokens: Sequence[int]) -> Mask | None:
        """Mask of the tokens that may follow the committed tokens and ``path_tokens``.

        None if one of ``path_tokens`` is itself not allowed or the constraint failed; only then
        :attr:`error` is set.
        """
        return self._mask(path_tokens, MASK_S)

    def permits(self, path_tokens: Sequence[int]) -> bool:
        """Whether ``path_tokens`` may follow; False also if that takes long to find out.

        A constraint that has once taken long is not asked for more than its next mask.
        """
        if not path_tokens or self._slow or self.is_held:
            return not path_tokens
        mask = self._mask(path_tokens[:-1], PATIENCE_S)
        return mask is not None and bool(mask[path_tokens[-1]])

    def num_allowed(self, tokens: Sequence[int]) -> int:
        """Length of the longest beginning of ``tokens`` that :meth:`permits`.

        The mask behind them is known as well, so that acceptance has to wait for none.
        """
        if self._slow or self.is_held:
            return 0
        num_late = self._num_late
        for count in range(len(tokens) + 1):
            mask = self._mask(tokens[:count], PATIENCE_S)
            if mask is None:  # late, or behind the end of the output
                return count if self._num_late == num_late else max(0, count - 1)
            if count < len(tokens) and not mask[tokens[count]]:
                return count
        return len(tokens)

    def forced(self, output_ids: Sequence[int], drafted: Sequence[int], count: int) -> list[int]:
        """Up to ``count`` tokens of the text that has to follow ``drafted``; [] if there is a
        choice, or if looking takes too long. It never sets :attr:`error`.

        Args:
            output_ids: the committed tokens of the output.
        """
        if self._pieces is None or self._spent > BURST_S / 2 or self._slow or self.is_held:
            return []
        if not self._settle(PATIENCE_S) or not self._go_to(drafted, PATIENCE_S):
            return []
        if self._laid_out > len(output_ids):  # it was cut
            self._layout, self._laid_out = JsonLayout(), 0
        self._layout.feed(self._pieces.join(output_ids[self._laid_out :]))
        self._laid_out = len(output_ids)
        layout = self._layout.copy()
        layout.feed(self._pieces.join(drafted))

        def compute_mask(matcher: Any | None) -> Mask | None:
            if matcher is None:
                return self._mask(drafted, PATIENCE_S)  # acceptance needs it, too
            job = self._job(matcher)
            done = job.wait(PATIENCE_S)
            self._spent += job.seconds
            if not done:
                self._came_late(job)
                return None
            data, failed = job.result()
            return None if failed or self._spent > BURST_S / 2 else self._unpacked(data)

        matcher = self._matcher if self._scout is None else self._scout
        return forced_tokens(matcher.deep_copy(), self._pieces, layout, count, compute_mask)

    def commit(self, token: int) -> None:
        """Advance by a committed token."""
        mask = self._mask((), MASK_S)  # which bounds the time of what follows
        if mask is None:
            return
        if not mask[token] or self._timed(self._matcher.try_consume_tokens, [token]) != 1:
            self._fail()
        if self._ahead[:1] == [token]:
            del self._ahead[0]
        else:
            self._leave_scout()
        behind = {place[1:]: m for place, m in self._masks.items() if place[:1] == (token,)}
        self._masks = behind
        self._spent = max(0.0, self._spent - STEP_S)

    def rewind(self, count: int) -> None:
        """Forget the last ``count`` committed tokens."""
        if self._settle(MASK_S):
            self._matcher.rollback(count)
        self._leave_scout()
        self._masks.clear()

    # --- masks ----------------------------------------------------------------------------------

    def _mask(self, path_tokens: Sequence[int], limit_s: float) -> Mask | None:
        """The mask behind the committed tokens and these, if it takes no more processor time."""
        place = tuple(path_tokens)
        if place in self._masks:
            return self._masks[place]
        if not self._settle(limit_s) or (place and not self._go_to(place, limit_s)):
            return None
        if place not in self._masks:
            matcher = self._scout if place else self._matcher
            job = self._job(matcher)
            if not place:
                self._next = job
                self._settle(limit_s)
            elif not job.wait(limit_s):
                self._leave_scout()  # to the job
                self._spend(job.seconds)
                self._came_late(job)
            elif job.result()[1] and limit_s < MASK_S:
                self._leave_scout()  # AR may never come here: a draft must not end the session
                self._spend(job.seconds)
            else:
                self._keep(place, job, matcher)
        return self._masks.get(place)

    def _settle(self, limit_s: float) -> bool:
        """Whether nothing else uses the matcher: wait for its mask, if one is under way.

        A constraint with an error is never settled: the mask that failed may go on.
        """
        job = self._next
        if job is None or self.error is not None:
            return self.error is None
        if not job.wait(limit_s):
            self._came_late(job)
            return False
        self._next = None
        self._keep((), job, self._matcher)
        return self.error is None

    def _job(self, matcher: Any) -> _Job[_Found]:
        def work() -> _Found:
            # Together: a later call would wait for masks of others that are under way by then.
            return matcher.compute_bitmask(), matcher.is_error()

        return _Job(work, self._slow)

    def _came_late(self, job: _Job[_Found]) -> None:
        self._num_late += 1
        if job not in self._group.late:
            self._group.late.append(job)
        self._slow |= job.seconds >= PATIENCE_S  # else it waits for a thread, or nothing for it
        if job.seconds >= MASK_S and self.error is None:
            self._too_slow()
            self._on_too_slow(0.0)
            job.when_done(self._on_too_slow)

    def _keep(self, place: tuple[int, ...], job: _Job[_Found], matcher: Any) -> None:
        """Keep a mask that is done; its time counts."""
        self._spend(job.seconds)
        data, failed = job.result()
        if self.error is None and failed:
            self._fail(matcher)
        if self.error is None:
            self._masks[place] = self._unpacked(data)

    def _unpacked(self, data: bytes) -> Mask:
        bits = np.frombuffer(data, np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def _fail(self, matcher: Any = None) -> None:
        if self.error is None:
            reason = (matcher or self._matcher).get_error() or "a token that it does not allow"
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
        if self._spent > BURST_S and self.error is None:
            self._too_slow()
            self._on_too_slow(self._spent)

    def _too_slow(self) -> None:
        self._group.is_refused = True
        if self.error is None:
            self.error = ResourceExhausted(
                f"the constraint takes more than {1e3 * STEP_S:g} ms of a processor for each token "
                "to find out what may follow: use one with fewer alternatives for the same text",
                0.0,
            )

    def _leave_scout(self) -> None:
        self._scout, self._ahead = None, []

    def _go_to(self, path_tokens: Sequence[int], limit_s: float) -> bool:
        """Move the scout behind the committed tokens and ``path_tokens``; False if refused.

        It gets a token only after the mask of its place: the mask bounds the time of both.
        """
        if self._scout is None:
            if not path_tokens:
                return True
            self._scout = self._matcher.deep_copy()
        shared = 0
        for ours, theirs in zip(self._ahead, path_tokens, strict=False):
            if ours != theirs:
                break
            shared += 1
        if len(self._ahead) > shared:
            self._scout.rollback(len(self._ahead) - shared)
            del self._ahead[shared:]
        for count in range(shared, len(path_tokens)):
            token = path_tokens[count]
            mask = self._mask(path_tokens[:count], limit_s)
            if mask is None or not mask[token] or self._scout is None:
                return False
            if self._timed(self._scout.try_consume_tokens, [token]) != 1:
                if self._scout.is_error() and limit_s >= MASK_S:
                    self._fail(self._scout)
                self._leave_scout()
                return False
            self._ahead.append(token)
        return self.error is None


class _VainWaits:
    """Seconds that rounds have waited for masks in vain: they have a budget, of all sessions."""

    def __init__(self) -> None:
        self._left, self._at = _VAIN_S, time.monotonic()

    def may_wait(self) -> bool:
        """Whether some of it is left."""
        now = time.monotonic()
        self._left = min(_VAIN_S, self._left + (now - self._at) * _VAIN_SHARE)
        self._at = now
        return self._left > 0.0

    def add(self, seconds: float) -> None:
        """Take a wait's time off it."""
        self._left -= seconds


class _Job(Generic[T]):
    """A call on another thread, whose processor time is known while it runs.

    Nothing can stop llguidance in the middle of a mask, but nothing has to wait for it.
    """

    def __init__(self, work: Callable[[], T], is_slow: bool) -> None:
        self._work = work
        self._clock: tuple[int, float] | None = None  # the thread's, and what it showed first
        self._seconds: float | None = None  # once it is done
        self._future = _mask_threads(is_slow).submit(self._run)

    def _run(self) -> T:
        clock = time.pthread_getcpuclockid(threading.get_ident())
        self._clock = clock, time.clock_gettime(clock)
        try:
            return self._work()
        finally:
            self._seconds = time.clock_gettime(clock) - self._clock[1]

    @property
    def seconds(self) -> float:
        """Processor seconds so far."""
        if self._seconds is not None:
            return self._seconds
        return 0.0 if self._clock is None else time.clock_gettime(self._clock[0]) - self._clock[1]

    def wait(self, limit_s: float) -> bool:
        """Whether it is done; waits for it until it has taken so many seconds of a processor.

        For less than a whole mask's time it does not wait long for a thread or a lock either, and
        not at all where such waits have been in vain too often.
        """
        patient = limit_s >= MASK_S
        if not patient and not _vain_waits.may_wait():
            return self._future.done()
        started = time.monotonic()
        while not self._future.done():
            waited = time.monotonic() - started
            if self.seconds >= limit_s or (waited > _LONGEST_WAIT_S and not patient):
                _vain_waits.add(waited)
                return False
            with contextlib.suppress(TimeoutError):
                self._future.exception(_LOOK_S)
        return True

    @property
    def done(self) -> bool:
        return self._future.done()

    def result(self) -> T:
        """What the call has returned."""
        return self._future.result()

    def when_done(self, tell: Callable[[float], object]) -> None:
        """Tell its processor seconds, on its thread, once it has returned."""
        self._future.add_done_callback(lambda _: tell(self.seconds))


_vain_waits = _VainWaits()


@cache
def _mask_threads(slow: bool) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1 if slow else _MASK_THREADS, "paceline-masks")


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
        self._matchers: OrderedDict[bytes, tuple[Any, _Group]] = OrderedDict()
        self._refused: OrderedDict[bytes, tuple[str, float]] = OrderedDict()  # why, and until when
        self._paused: dict[str, float] = {}  # until when no new one is compiled, by scope

    def compile(self, params: SamplingParams, scope: str = "") -> Constraint | None:
        """A new constraint for the parameters; None if they set none.

        May take seconds; a thread that has better things to do uses :meth:`submit`.

        Args:
            scope: whose constraint it is; "" is unknown.

        Raises:
            InvalidArgument: the constraint is invalid or exceeds a bound, the target has no
                tokenizer, or llguidance is not installed.
        """
        if params.constraint is None:
            return None
        kind, text = params.constraint
        key = _digest(kind, text)
        found = self._kept(key, kind, text, scope)
        if found is None:
            with self._compiling:
                # Another thread may have compiled the same one.
                found = self._kept(key, kind, text, scope) or self._new(key, kind, text, scope)
        return found

    def submit(self, params: SamplingParams, scope: str = "") -> Future[Constraint | None]:
        """:meth:`compile` on a thread of its own.

        Args:
            scope: whose constraint it is; "" is unknown.

        Raises:
            InvalidArgument: as :meth:`compile`, if the constraint has been refused before.
            ResourceExhausted: too many constraints wait to be compiled, or masks of others in
                this scope have taken too long a moment ago.
        """
        found = self._known(params, scope)
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
            pause = self._paused.get(scope, 0.0) - time.monotonic()
            if pause > 0:
                raise ResourceExhausted(
                    "a constraint has taken too much of a processor: no new one is compiled for "
                    f"{pause:.0f} s", retry_after_s=pause,
                )  # fmt: skip
            self._waiting[scope] += 1
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, "paceline-constraints")
            future = self._pool.submit(self.compile, params, scope)

        def ended(_: object) -> None:
            with self._lock:
                self._waiting[scope] -= 1
                if not self._waiting[scope]:
                    del self._waiting[scope]

        future.add_done_callback(ended)
        return future

    def _known(self, params: SamplingParams, scope: str) -> Constraint | None:
        if params.constraint is None:
            return None
        kind, text = params.constraint
        return self._kept(_digest(kind, text), kind, text, scope)

    def _kept(self, key: bytes, kind: str, text: str, scope: str) -> Constraint | None:
        """A constraint that has been compiled before.

        Raises:
            InvalidArgument: it has been refused before.
        """
        with self._lock:
            reason, until = self._refused.get(key, ("", 0.0))
            if until > time.monotonic():
                raise InvalidArgument(kind, _start(text), reason)
            if key not in self._matchers:
                return None
            self._matchers.move_to_end(key)
            return self._constraint(key, scope)

    def _constraint(self, key: bytes, scope: str) -> Constraint:
        matcher, group = self._matchers[key]
        late = partial(self._note_late, key, scope)
        return Constraint(matcher.deep_copy(), self._vocab_size, self._pieces, group, late)

    def _note_late(self, key: bytes, scope: str, seconds: float) -> None:
        """Refuse a constraint from now on, and perhaps new ones of its scope for a while."""
        with self._lock:
            self._refuse(key, f"one whose masks take at most {1e3 * STEP_S:g} ms a token")
            self._matchers.pop(key, None)
            self._charge(scope, seconds)

    def _charge(self, scope: str, seconds: float) -> None:
        now = time.monotonic()
        free_since = now - _HARM_S / _HARM_SHARE
        paused = max(free_since, self._paused.get(scope, free_since)) + seconds / _HARM_SHARE
        self._paused[scope] = min(paused, now + _LONGEST_PAUSE_S)
        if len(self._paused) > _REFUSED:
            kept = ((each, at) for each, at in self._paused.items() if at > free_since)
            self._paused = dict(kept)

    def _refuse(self, key: bytes, reason: str) -> None:
        self._refused[key] = reason, time.monotonic() + _REFUSED_S
        if len(self._refused) > _REFUSED:
            self._refused.popitem(last=False)

    def _new(self, key: bytes, kind: str, text: str, scope: str) -> Constraint:
        check_constraint(kind, text)
        self._prepare(kind, text)
        assert self.process is not None
        try:
            # The helper has compiled it within its budget, and with less stack than this thread's.
            matcher = new_matcher(self.process.compile(kind, text), self._ll_tokenizer)
        except Refused as error:
            with self._lock:
                self._refuse(key, str(error))
                if isinstance(error, Killed):
                    self._charge(scope, _HELPER_S)
            raise InvalidArgument(kind, _start(text), str(error)) from None
        with self._lock:
            self._matchers[key] = matcher, _Group()
            if len(self._matchers) > _CACHED:
                self._matchers.popitem(last=False)
            return self._constraint(key, scope)

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
