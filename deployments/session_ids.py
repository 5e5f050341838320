"""Ids of verify sessions that say where a session is, so that any gateway finds it.

An id names the target's data address and, by a tag, the owner, and is signed (HMAC-SHA256) with a
key that all gateways of a deployment have. So a gateway needs no table, and connects to no address
that another gateway has not been given by Serve.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import InvalidArgument, SessionNotFound

logger = logging.getLogger(__name__)

MIN_KEY_LENGTH = 32
MAX_KEYS = 8
REFRESH_S = 1.0
"""A gateway looks for new keys at most this often."""

_VERSION = b"\x01"
_NONCE, _TAG, _MAC = 12, 8, 16  # bytes


@dataclass(frozen=True, slots=True)
class SessionPlace:
    """Where a session is.

    Attributes:
        address: of its target's data plane.
        is_owners: the caller's tenant opened it.
    """

    address: str
    is_owners: bool


class SessionIds:
    """Makes session ids and reads them.

    Args:
        keys: the first one signs, all are accepted.
        source: gives the present keys; None: they do not change.
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        source: Callable[[], Awaitable[Sequence[bytes]]] | None = None,
    ) -> None:
        self._keys = tuple(keys)
        self._source = source
        self._refreshed_at = -REFRESH_S
        self._refreshing = asyncio.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._keys)} keys)"

    @staticmethod
    def random() -> SessionIds:
        """With a key that no other gateway has."""
        return SessionIds([secrets.token_bytes(MIN_KEY_LENGTH)])

    def make(self, address: str, owner: str | None) -> str:
        """The id of a new session at a target.

        Args:
            owner: the tenant; None without tenants.
        """
        nonce = secrets.token_bytes(_NONCE)
        payload = _VERSION + nonce + _tag(self._keys[0], nonce, owner) + address.encode()
        signed = payload + _mac(self._keys[0], payload)
        return base64.urlsafe_b64encode(signed).rstrip(b"=").decode()

    async def find(self, session_id: str, owner: str | None) -> SessionPlace | None:
        """Where the session is; None: no gateway of this deployment made the id.

        Args:
            owner: the caller's tenant.
        """
        signed = _decoded(session_id)
        if signed is None:
            return None
        place = self._read(signed, owner)
        if place is None and self._source is not None:
            await self.refresh()
            place = self._read(signed, owner)
        return place

    async def refresh(self) -> None:
        """Take the present keys, unless that was done a moment ago."""
        async with self._refreshing:  # one look for all that wait
            if self._source is not None and time.monotonic() - self._refreshed_at >= REFRESH_S:
                self._refreshed_at = time.monotonic()
                self._keys = tuple(await self._source()) or self._keys

    def ticket_key(self, session_id: str) -> bytes:
        """The key of a session's tickets, made of the key that signed its id.

        Raises:
            SessionNotFound: as :meth:`find` returns None.
        """
        signed = _decoded(session_id)
        key = None if signed is None else self._key_of(signed)
        if key is None:
            raise SessionNotFound(session_id)
        return hmac.digest(key, b"ticket" + session_id.encode(), hashlib.sha256)

    def _key_of(self, signed: bytes) -> bytes | None:
        payload, mac = signed[:-_MAC], signed[-_MAC:]
        signers = (key for key in self._keys if hmac.compare_digest(_mac(key, payload), mac))
        return next(signers, None)

    def _read(self, signed: bytes, owner: str | None) -> SessionPlace | None:
        key = self._key_of(signed)
        if key is None:
            return None
        payload = signed[:-_MAC]
        nonce, rest = payload[1 : 1 + _NONCE], payload[1 + _NONCE :]
        is_owners = hmac.compare_digest(_tag(key, nonce, owner), rest[:_TAG])
        return SessionPlace(rest[_TAG:].decode(), is_owners)


def _mac(key: bytes, payload: bytes) -> bytes:
    return hmac.digest(key, b"id" + payload, hashlib.sha256)[:_MAC]


def _tag(key: bytes, nonce: bytes, owner: str | None) -> bytes:
    """Tells a tenant's session from another's, to readers that have the key."""
    name = b"\0" if owner is None else b"\1" + owner.encode()
    return hmac.digest(key, b"owner" + nonce + name, hashlib.sha256)[:_TAG]


def _decoded(session_id: str) -> bytes | None:
    """The bytes of an id that looks like ours."""
    if not 40 <= len(session_id) <= 400:
        return None
    try:
        padded = session_id + "=" * (-len(session_id) % 4)
        signed = base64.b64decode(padded, altchars=b"-_", validate=True)
    except (ValueError, binascii.Error):
        return None
    # Of several spellings of the same bytes, which base64 has, only ours.
    canonical = base64.urlsafe_b64encode(signed).rstrip(b"=").decode() == session_id
    ours = canonical and signed[:1] == _VERSION and len(signed) > 1 + _NONCE + _TAG + _MAC
    return signed if ours else None


def read_keys(path: str | Path) -> tuple[bytes, ...]:
    """Keys of a file: one a line, the first one signs; empty lines and those with ``#`` are none.

    Raises:
        InvalidArgument: the file is not usable; never shows a key.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(
            "gateway.session_keys", str(path), f"a file ({error.strerror})"
        ) from None
    except UnicodeDecodeError:
        raise InvalidArgument("gateway.session_keys", str(path), "a text file") from None
    lines = [line.strip() for line in text.splitlines()]
    keys = [line for line in lines if line and not line.startswith("#")]
    if not 1 <= len(keys) <= MAX_KEYS or min(map(len, keys)) < MIN_KEY_LENGTH:
        raise InvalidArgument(
            "gateway.session_keys",
            str(path),
            f"1 to {MAX_KEYS} lines of at least {MIN_KEY_LENGTH} characters",
        )
    return tuple(key.encode() for key in keys)


class KeyFile:
    """Session keys in a file, which is read again when it has changed.

    A change that is not usable leaves the keys as they were, and a line in the log.

    Raises:
        InvalidArgument: as :func:`read_keys`.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._keys = read_keys(path)

    def session_ids(self) -> SessionIds:
        return SessionIds(self._keys, self._read_again)

    async def _read_again(self) -> Sequence[bytes]:
        try:
            self._keys = await asyncio.to_thread(read_keys, self._path)
        except InvalidArgument as error:
            logger.error("the session keys stay as they were: %s", error)
        return self._keys
