"""Errors of the library. Each names what is wrong, the value, and what is allowed.

The gRPC layer maps these classes to status codes in one table (``rpc/errors.py``).
"""

from __future__ import annotations

_MOST_SHOWN = 100


class PacelineError(Exception):
    """Base of all errors that Paceline raises on purpose."""


class InvalidArgument(PacelineError, ValueError):
    """A value from outside is not allowed.

    Attributes:
        field: the name of the offending field, as the caller knows it.
        allowed: which values are accepted.
    """

    def __init__(self, field: str, value: object, allowed: str) -> None:
        super().__init__(f"{field}: got {shown(value)}, expected {allowed}")
        self.field = field
        self.value = value
        self.allowed = allowed


def shown(value: object) -> str:
    """A value for an error, or what there is of it: writing millions of entries takes seconds."""
    if isinstance(value, (list, tuple, dict, set)) and len(value) > _MOST_SHOWN:
        return f"{len(value)} entries"
    if isinstance(value, (str, bytes)) and len(value) > 10 * _MOST_SHOWN:
        return f"{value[: 10 * _MOST_SHOWN]!r}..."
    return repr(value)


class ModelNotFound(PacelineError, FileNotFoundError):
    """A model path does not exist, or lacks needed files."""

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
    """This replica has no session with that id: it was closed, or never opened."""

    def __init__(self, session_id: str) -> None:
        super().__init__(session_id)
        self.session_id = session_id

    def __str__(self) -> str:
        return f"no session {self.session_id!r} on this replica: open a new one"


class FailedPrecondition(PacelineError, RuntimeError):
    """The call does not fit the session's state (diverged prefix, fenced epoch, ...)."""


class NumericsMismatch(FailedPrecondition):
    """A target was asked to continue or verify tokens of another numerics fingerprint.

    Attributes:
        expected: the fingerprint of the tokens so far, as text.
        actual: the fingerprint of this target, as text.
    """

    def __init__(self, message: str, expected: str = "", actual: str = "") -> None:
        super().__init__(message)
        self.expected = expected
        self.actual = actual


class DrafterUnavailable(PacelineError, ConnectionError):
    """The drafter cannot be reached or has died; the session continues as AR."""
