"""The tenants file: the tenants, their tokens and their quotas.

    tenants:
      alice:
        token_sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08
        weight: 2
        online_training: true
        quotas: {max_sessions: 8, tokens_per_minute: 60000}
      bob:
        token: a-text-of-16-characters-or-more

Only digests of tokens stay in memory, and no error, log line or repr shows a token.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError

from paceline.errors import InvalidArgument
from paceline.rpc.errors import PermissionDenied, Unauthenticated

logger = logging.getLogger(__name__)

MIN_TOKEN_LENGTH = 16
CHECK_INTERVAL_S = 0.5
"""Seconds until a change of the file counts."""

_Sha256 = Annotated[str, Field(pattern="^[0-9a-fA-F]{64}$")]


class _Block(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


class Quotas(_Block):
    """What one tenant may use of one server; null is no limit.

    Rates allow a burst of one second's worth; tokens per minute one of a minute's.
    """

    max_sessions: int | None = Field(None, ge=1, description="Open sessions and generations.")
    opens_per_second: float | None = Field(None, gt=0, description="New ones, and GetModel.")
    rounds_per_second: float | None = Field(None, gt=0, description="Of verify sessions.")
    tokens_per_minute: float | None = Field(
        None,
        gt=0,
        description="Tokens of prompts, from their admission on, and committed ones. What runs is "
        "not cut off; the next open or round waits until the minute has room again.",
    )


class _Entry(_Block):
    token: SecretStr | tuple[SecretStr, ...] = ()
    token_sha256: _Sha256 | tuple[_Sha256, ...] = ()
    suspended: bool = False
    quotas: Quotas = Quotas()
    weight: float = Field(1.0, ge=0.01, le=100)
    online_training: bool = False

    def digests(self) -> list[bytes]:
        tokens = (self.token,) if isinstance(self.token, SecretStr) else self.token
        hashes = (self.token_sha256,) if isinstance(self.token_sha256, str) else self.token_sha256
        return [*(digest_of(t.get_secret_value()) for t in tokens), *map(bytes.fromhex, hashes)]


class _File(_Block):
    tenants: dict[Annotated[str, Field(pattern=r"^[\w.@-]{1,64}$")], _Entry]


@dataclass(frozen=True, slots=True)
class Tenant:
    """One tenant as the file has it.

    Attributes:
        weight: of its share of a busy target.
        online_training: the draft model may learn from its sessions (``online`` of a deployment).
    """

    name: str
    quotas: Quotas
    suspended: bool = False
    digests: tuple[bytes, ...] = field(default=(), repr=False)
    weight: float = 1.0
    online_training: bool = False


def digest_of(token: str) -> bytes:
    """What stays of a token. Tokens are long and random, so that a plain hash keeps them safe."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()


def read_tenants(path: str | Path) -> dict[str, Tenant]:
    """Read and check a tenants file.

    Raises:
        InvalidArgument: the file is not usable; names the file and the key, never a value.
    """
    path = Path(path).expanduser()
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument("tenants", str(path), f"a file ({error.strerror})") from None
    except yaml.MarkedYAMLError as error:
        # The error's own text quotes the file.
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise InvalidArgument("tenants", str(path), f"YAML; line {line} is not") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise InvalidArgument("tenants", str(path), "a YAML file") from None
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        key = ".".join(str(part) for part in first["loc"] if part != "[key]")
        raise InvalidArgument("tenants", str(path), _allowed(key, first)) from None
    return _checked(str(path), file)


def _allowed(key: str, first: Any) -> str:
    if first["type"] == "extra_forbidden":
        known = ", ".join(_Entry.model_fields)
        if ".quotas." in key:
            known = ", ".join(Quotas.model_fields)
        return f"for {key.rpartition('.')[0] or 'the file'} one of the keys tenants, {known}"
    return f"another value of {key or 'the file'}: {first['msg']}"


def _checked(path: str, file: _File) -> dict[str, Tenant]:
    owners: dict[bytes, str] = {}
    for name, entry in file.tenants.items():
        tokens = (entry.token,) if isinstance(entry.token, SecretStr) else entry.token
        if any(len(token.get_secret_value()) < MIN_TOKEN_LENGTH for token in tokens):
            raise InvalidArgument(
                "tenants", path, f"for tenants.{name}.token at least {MIN_TOKEN_LENGTH} characters"
            )
        digests = entry.digests()
        if not digests:
            raise InvalidArgument("tenants", path, f"for tenants.{name} a token or token_sha256")
        for digest in digests:
            if owners.setdefault(digest, name) != name:
                raise InvalidArgument(
                    "tenants", path, f"another token for {name} than for {owners[digest]}"
                )
    return {
        name: Tenant(
            name,
            entry.quotas,
            entry.suspended,
            tuple(entry.digests()),
            entry.weight,
            entry.online_training,
        )
        for name, entry in file.tenants.items()
    }


class Tenants:
    """The tenants of a file; reads it again when it has changed.

    A change that is not usable leaves the tenants as they were, and a line in the log.

    Raises:
        InvalidArgument: as :func:`read_tenants`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).expanduser()
        self._seen = self._stamp()
        self._tenants = read_tenants(self._path)
        self._checked_at = time.monotonic()
        self.generation = 1  # counts the versions of the file

    def find(self, digest: bytes) -> Tenant:
        """The tenant whose token has this digest.

        Raises:
            Unauthenticated: the token is unknown.
            PermissionDenied: the tenant is suspended.
        """
        self.refresh()
        found: Tenant | None = None
        # Compare with all of them, so that the time does not tell how far the search came.
        for tenant in self._tenants.values():
            for known in tenant.digests:
                if hmac.compare_digest(known, digest):
                    found = tenant
        if found is None:
            raise Unauthenticated(
                "no tenant has this token: ask the operator for one that is valid"
            )
        if found.suspended:
            raise PermissionDenied(f"tenant {found.name!r} is suspended")
        return found

    def refresh(self) -> None:
        """Read the file again if it has changed."""
        now = time.monotonic()
        if now - self._checked_at < CHECK_INTERVAL_S:
            return
        self._checked_at = now
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._tenants = read_tenants(self._path)
        except InvalidArgument as error:
            logger.error("the tenants stay as they were: %s", error)
            return
        self.generation += 1
        logger.info("%s is read again: %d tenants", self._path, len(self._tenants))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
