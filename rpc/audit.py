"""The audit log: callers that opened a session or were refused, one JSON object a line.

    {"time": "2026-01-31T12:00:00.000Z", "event": "open", "tenant": "alice",
     "peer": "ipv4:192.0.2.7:40312", "method": "/paceline.v1.VerifyService/Open",
     "session_id": "...", "outcome": "OK", "reason": ""}

It never has prompts, a model's tokens or a tenant's token.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import OrderedDict
from datetime import UTC, datetime
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path

from paceline.errors import InvalidArgument

_MAX_BYTES = 64 * 1024 * 1024
_NUM_OLD_FILES = 4
_REPEAT_S, _STRANGER_S = 1.0, 60.0
_STRANGERS = frozenset(("UNAUTHENTICATED", "public_calls"))  # reasons without a tenant
_MAX_KNOWN = 4096  # refusals that may repeat
_LONGEST = 100

logger = logging.getLogger("paceline.audit")


class _PrivateFile(RotatingFileHandler):
    """A file that only its owner can read."""

    def _open(self) -> TextIOWrapper:
        os.close(os.open(self.baseFilename, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
        return super()._open()


class Audit:
    """Writes the lines, to a file (at most 5 of 64 MB) or to the logger ``paceline.audit``.

    Of equal refusals (tenant, method, reason) it writes one line a second, which counts the others
    in ``repeated``: a flood of bad calls must not become a flood of lines. Of callers without a
    tenant's token it writes one a minute for each host and reason, because they make up methods.
    What a caller chooses is cut after 100 characters.

    Raises:
        InvalidArgument: the file cannot be written.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self._handler: logging.Handler | None = None
        self._refusals: OrderedDict[tuple[str, str, str], tuple[float, int]] = OrderedDict()
        if path is not None:
            try:
                self._handler = _PrivateFile(
                    Path(path).expanduser(), maxBytes=_MAX_BYTES, backupCount=_NUM_OLD_FILES
                )
            except OSError as error:
                allowed = f"a file that can be written ({error.strerror})"
                raise InvalidArgument("audit_log", str(path), allowed) from None

    def opened(self, *, tenant: str | None, peer: str, method: str, session_id: str) -> None:
        """A session began."""
        self._write("open", tenant, peer, method, session_id, "OK", "")

    def refused(
        self,
        *,
        tenant: str | None,
        peer: str,
        method: str,
        session_id: str = "",
        outcome: str,
        reason: str,
    ) -> None:
        """The server refused a call; ``outcome`` is the status code, and ``reason`` says more."""
        stranger = reason in _STRANGERS
        host = peer.rpartition(":")[0] if stranger else ""
        key = (tenant or "", host or method[:_LONGEST], reason)
        interval = _STRANGER_S if stranger else _REPEAT_S
        now = time.monotonic()
        written_at, repeated = self._refusals.pop(key, (now - interval, 0))
        if now - written_at < interval:
            self._refusals[key] = (written_at, repeated + 1)
            return
        self._refusals[key] = (now, 0)
        if len(self._refusals) > _MAX_KNOWN:
            self._refusals.popitem(last=False)
        self._write("refused", tenant, peer, method, session_id, outcome, reason, repeated)

    def _write(
        self,
        event: str,
        tenant: str | None,
        peer: str,
        method: str,
        session_id: str,
        outcome: str,
        reason: str,
        repeated: int = 0,
    ) -> None:
        now = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line: dict[str, object] = {
            "time": now,
            "event": event,
            "tenant": tenant,
            "peer": peer[:_LONGEST],
            "method": method[:_LONGEST],
            "session_id": session_id,
            "outcome": outcome,
            "reason": reason,
        }
        if repeated:
            line["repeated"] = repeated
        text = json.dumps(line)
        if self._handler is None:
            logger.info("%s", text)
        else:
            self._handler.handle(logging.makeLogRecord({"msg": text, "levelno": logging.INFO}))

    def close(self) -> None:
        """Close the file."""
        if self._handler is not None:
            self._handler.close()
