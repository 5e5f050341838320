"""Errors of the library. Each one says what is wrong, with which value, and what is allowed.

The gRPC layer maps these classes to status codes in one table (``rpc/errors.py``).
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base of all errors that Paceline raises on purpose."""


class InvalidArgument(PacelineError, ValueError):
    """A value from outside is not allowed.

    Attributes:
        field: the name of the offending field, as the caller knows it.
        allowed: what would have been accepted.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: got {value!r}, expected {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


class ModelNotFound(PacelineError, FileNotFoundError):
    """A model path does not exist or lacks files that are needed."""

    def __init__(self, message: str) -> None:
        super().__init__(message)


class TokenizerMismatch(PacelineError, ValueError):
    """Drafter and target do not share a tokenizer."""


class ResourceExhausted(PacelineError, RuntimeError):
    """A limit (KV memory, sessions, queue) does not admit the request right now."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class SessionNotFound(PacelineError, KeyError):
    """No session with that id lives here (it may have been closed, or never opened)."""

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id)
        self.session_id = session_id

    def __str__(self) -> str:
        return f"no session {self.session_id!r} on this replica: open a new one"


class FailedPrecondition(PacelineError, RuntimeError):
    """The call does not fit the state of the session (diverged prefix, fenced epoch, ...)."""


class NumericsMismatch(FailedPrecondition):
    """Tokens of one numerics fingerprint are to be continued, or verified, with another one.

    Attributes:
        expected: the fingerprint of the tokens so far, as text.
        actual: the one that was met.
    """

    def __init__(self, message: str, expected: str = "", actual: str = "") -> None:
        super().__init__(message)
        self.expected = expected
        self.actual = actual


class DrafterUnavailable(PacelineError, ConnectionError):
    """The drafter cannot be reached or has died; the session goes on as AR."""
