"""The target's states on their way to a drafter in another process.

A head drafts from what the target has computed for the committed tokens. Where it drafts in another
process, these states travel with the tokens: a row for each token, encoded as the drafter wants it
(:class:`StatesCodec`). The target's side keeps the rows of its running sessions
(:class:`StatesFeed`), so that a drafter that has lost them, or takes a session over, gets them
again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline.bounds import STATES_LAYERS
from paceline.drafters.base import Drafter, kept_rows
from paceline.errors import InvalidArgument
from paceline.rpc.errors import PrefixDiverged
from paceline.rpc.gen.paceline.v1 import common_pb2
from paceline.types import STATES, FloatArray, Need, Outcome, StatesLayout, Verification

if TYPE_CHECKING:
    import torch

    from paceline.view import SessionView

ENCODINGS = ("int8", "bfloat16", "float32")
GROUP = 32
"""Numbers that share a scale in int8: a residual stream has a few enormous numbers, which cost only
their neighbours precision."""
MAX_VALUES = 2**20
"""Numbers for each token, at most."""
LEAST_LAYERS = 8
"""Layers that a client may always ask for; of a larger target, as many as it has."""
PIECE_BYTES = 1024 * 1024
"""Rows in one message, at most, or one row: a long prompt's states go in pieces."""
KEPT_BYTES = 16 * 1024 * 1024
"""Encoded rows that a target keeps of a session at most, the latest ones."""

Bytes = npt.NDArray[np.uint8]


class StatesCodec:
    """Rows of states as bytes, all of one size.

    Args:
        encoding: one of :data:`ENCODINGS`; the message ``StatesLayout`` describes them.

    Attributes:
        row_bytes: bytes of a row.

    Raises:
        InvalidArgument: there is no such encoding.
    """

    def __init__(self, layout: StatesLayout, encoding: str) -> None:
        if encoding not in ENCODINGS:
            raise InvalidArgument("states.encoding", encoding, f"one of {', '.join(ENCODINGS)}")
        self.layout, self.encoding = layout, encoding
        self._num_groups = -(-layout.num_values // GROUP)
        sizes = {
            "int8": layout.num_values + 2 * self._num_groups,
            "bfloat16": 2 * layout.num_values,
            "float32": 4 * layout.num_values,
        }
        self.row_bytes = sizes[encoding]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, StatesCodec):
            return NotImplemented
        return self.layout == other.layout and self.encoding == other.encoding

    def __hash__(self) -> int:
        return hash((self.layout, self.encoding))

    @staticmethod
    def of_message(message: common_pb2.StatesLayout, field: str) -> StatesCodec:
        """The codec that another process asks for.

        Raises:
            InvalidArgument: it makes no sense; names the field after ``field``.
        """
        STATES_LAYERS.check(len(message.layers), f"{field}.layers")
        needs = {need.value: need for need in STATES}
        if message.need not in needs:
            allowed = f"one of {', '.join(sorted(needs))}"
            raise InvalidArgument(f"{field}.need", message.need, allowed)
        need, layers = needs[message.need], tuple(message.layers)
        if bool(layers) != (need is Need.LAYER_STATES) or 0 in layers:
            allowed = "numbers of layers from 1 with layer_states, and none with hidden_states"
            raise InvalidArgument(f"{field}.layers", list(layers)[:8], allowed)
        count = max(1, len(layers)) * message.hidden_size
        if not 0 < count <= MAX_VALUES:
            raise InvalidArgument(
                f"{field}.hidden_size", message.hidden_size,
                f"above 0, with at most {MAX_VALUES} numbers for each token in all",
            )  # fmt: skip
        return StatesCodec(StatesLayout(need, layers, message.hidden_size), message.encoding)

    def to_message(self) -> common_pb2.StatesLayout:
        """What it is, for another process."""
        layout = self.layout
        return common_pb2.StatesLayout(
            need=layout.need.value, layers=layout.layers, hidden_size=layout.hidden_size,
            encoding=self.encoding,
        )  # fmt: skip

    def encode(self, states: torch.Tensor) -> bytes:
        """The rows as bytes.  # [num_tokens, num_values] -> num_tokens * row_bytes

        Raises:
            InvalidArgument: the target's states have another size than the drafter reads.
        """
        layout, size = self.layout, states.shape[1] // max(1, len(self.layout.layers))
        if size != layout.hidden_size:
            raise InvalidArgument("states.hidden_size", layout.hidden_size, f"{size}, the target's")
        values: FloatArray = states.float().cpu().numpy()
        if self.encoding == "float32":
            return values.astype("<f4").tobytes()
        if self.encoding == "bfloat16":
            return _bfloat16(values).tobytes()
        padding = self._num_groups * GROUP - self.layout.num_values
        groups = np.pad(values, ((0, 0), (0, padding))).reshape(len(values), -1, GROUP)
        scales = _bfloat16(np.abs(groups).max(-1) / 127, up=True)
        over = _floats(scales)[..., None]
        over[over == 0] = 1.0
        codes = np.rint(groups / over).clip(-127, 127).astype(np.int8)
        codes = codes.reshape(len(values), -1)[:, : self.layout.num_values]
        return np.concatenate([scales.view(np.uint8), codes.view(np.uint8)], 1).tobytes()

    def decode(self, rows: bytes, count: int) -> FloatArray:
        """The states in ``count`` rows.  # float32 [count, num_values]

        Raises:
            InvalidArgument: the rows have another size, or a number is not finite.
        """
        if len(rows) != count * self.row_bytes:
            raise InvalidArgument(
                "states.rows", f"{len(rows)} bytes",
                f"{count} rows of {self.row_bytes} bytes ({self.encoding}, "
                f"{self.layout.num_values} numbers)",
            )  # fmt: skip
        raw: Bytes = np.frombuffer(rows, np.uint8).reshape(count, self.row_bytes)
        if self.encoding == "float32":
            values = raw.view("<f4").astype(np.float32)
        elif self.encoding == "bfloat16":
            values = _floats(raw.view("<u2"))
        else:
            scales = _floats(raw[:, : 2 * self._num_groups].copy().view("<u2"))
            codes = raw[:, 2 * self._num_groups :].view(np.int8).astype(np.float32)
            values = codes * scales.repeat(GROUP, 1)[:, : self.layout.num_values]
        if not np.isfinite(values).all():
            raise InvalidArgument("states.rows", "a number that is not finite", "finite numbers")
        return values


def _bfloat16(values: FloatArray, *, up: bool = False) -> npt.NDArray[np.uint16]:
    """Bits of the nearest bfloat16 numbers, or (for numbers from 0) of the next larger ones."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    more = np.uint32(0xFFFF) if up else np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return ((bits + more) >> np.uint32(16)).astype("<u2")


def _floats(bits: npt.NDArray[np.uint16]) -> FloatArray:
    return (bits.astype("<u4") << np.uint32(16)).view("<f4").astype(np.float32)


class StatesReader:
    """The drafter's side of one session: which states it has, and checks on those that come.

    Attributes:
        end: how many first tokens it has been told the states of; None: none at all.
    """

    __slots__ = ("_codec", "end")

    def __init__(self, codec: StatesCodec) -> None:
        self._codec = codec
        self.end: int | None = None

    def read(self, message: common_pb2.States, length: int) -> FloatArray:
        """The states of the session's next tokens.  # float32 [num_positions, num_values]

        Args:
            length: number of the session's committed tokens.

        Raises:
            InvalidArgument: they are not what this drafter reads; names the field.
            PrefixDiverged: they do not follow those before.
        """
        first, count = message.first_position, message.num_positions
        if self.end is None or message.HasField("layout"):
            given = StatesCodec.of_message(message.layout, "states.layout")
            if given != self._codec:
                raise InvalidArgument("states.layout", _shown(given), _shown(self._codec))
        if not 0 < count <= length - 1 - first:
            raise InvalidArgument(
                "states.num_positions", count,
                f"from 1 to {length - 1 - first}: the session has {length} tokens, and the last "
                "has no states",
            )  # fmt: skip
        if self.end is not None and first != self.end:
            raise PrefixDiverged(
                f"states.first_position {first}: the drafter has those of {self.end} tokens", length
            )
        states = self._codec.decode(message.rows, count)
        self.end = first + count
        return states

    def check_complete(self, length: int) -> None:
        """Raise PrefixDiverged unless a draft can follow ``length`` committed tokens."""
        if length > 1 and self.end != length - 1:
            raise PrefixDiverged(
                f"states: the drafter has those of {self.end or 0} tokens, a draft needs those of "
                f"{length - 1}", length,
            )  # fmt: skip


class StatesInbox:
    """States that have come for one session, until its drafter reads them.

    Args:
        codec: what was asked for.
    """

    def __init__(self, codec: StatesCodec) -> None:
        self._codec = codec
        self._reader = StatesReader(codec)
        self._arrived: list[FloatArray] = []
        self._anew = False

    @property
    def end(self) -> int:
        """How many first tokens there are states up to."""
        return self._reader.end or 0

    @property
    def layout(self) -> common_pb2.StatesLayout:
        """What to ask for."""
        return self._codec.to_message()

    def take(self, message: common_pb2.States, length: int) -> None:
        """Take what a server has sent for a session of ``length`` tokens.

        Rounds that left together ask for states from the same place on: what is there already is
        left out.

        Raises:
            InvalidArgument: as :meth:`StatesReader.read`.
        """
        again = self.end - message.first_position
        if self._reader.end is not None and again > 0:
            if again >= message.num_positions:
                return
            new = common_pb2.States()
            new.CopyFrom(message)
            new.first_position, new.num_positions = self.end, message.num_positions - again
            new.rows = message.rows[again * self._codec.row_bytes :]
            message = new
        if message.first_position != self._reader.end:  # some are missing in between
            self._reader, self._anew = StatesReader(self._codec), self._reader.end is not None
            self._arrived.clear()
        self._arrived.append(self._reader.read(message, length))

    def read_by(self, drafter: Drafter, session: SessionView) -> bool:
        """Let a drafter read what has come; False if that is too little for a draft."""
        import torch

        if self._anew:
            drafter.close(session)
            drafter.open(session)
        for states in self._arrived:
            drafter.read_states(session, torch.from_numpy(states))
        self._anew, self._arrived = False, []
        return self.end == session.length - 1


def _shown(codec: StatesCodec) -> str:
    layout = codec.layout
    layers = f" of layers {list(layout.layers)[:8]}" if layout.layers else ""
    return f"{layout.need.value}{layers}, {layout.hidden_size} numbers each, {codec.encoding}"


class StatesLog:
    """The rows that a target keeps of one session: of its tokens from ``first`` to ``end``.

    Args:
        codec: of the rows.
    """

    __slots__ = ("_codec", "_rows", "first", "num_read")

    def __init__(self, codec: StatesCodec) -> None:
        self._codec = codec
        self._rows = bytearray()
        self.first = 0
        self.num_read = 0  # prompt tokens since the session was opened

    @property
    def end(self) -> int:
        """The place behind the last row."""
        return self.first + len(self._rows) // self._codec.row_bytes

    def add(self, first: int, states: torch.Tensor) -> None:
        """Add the rows of the tokens from ``first`` on; those before a gap are forgotten."""
        if first != self.end:
            self._rows.clear()
            self.first = first
        self._rows += self._codec.encode(states)
        size = self._codec.row_bytes
        extra = -(-max(0, len(self._rows) - KEPT_BYTES) // size)
        del self._rows[: extra * size]
        self.first += extra

    def pieces(self, first: int, end: int) -> Iterator[common_pb2.States]:
        """Messages with the rows from ``first``, or the first there is, up to ``end``."""
        first, size = max(first, self.first), self._codec.row_bytes
        most = max(1, PIECE_BYTES // size)
        while first < end:
            count = min(most, end - first)
            start = (first - self.first) * size
            rows = bytes(self._rows[start : start + count * size])
            yield common_pb2.States(first_position=first, num_positions=count, rows=rows)
            first += count


class StatesFeed:
    """The states of an engine's sessions, for the drafters of one kind in other processes.

    The engine's thread adds; the threads that read replies may look as well.

    Args:
        codec: what the drafters read; None: :meth:`use` will tell.
    """

    def __init__(self, codec: StatesCodec | None = None) -> None:
        self._lock = threading.Lock()
        self._codec = codec
        self._logs: dict[str, StatesLog] = {}

    @property
    def codec(self) -> StatesCodec | None:
        """What the drafters read; None: nothing, or not known yet."""
        return self._codec

    @property
    def needs(self) -> frozenset[Need]:
        """What it takes of the target's forwards."""
        return frozenset() if self._codec is None else frozenset({self._codec.layout.need})

    def use(self, wanted: common_pb2.StatesLayout) -> None:
        """Keep from now on what a drafter asks for.

        Raises:
            InvalidArgument: that makes no sense.
        """
        codec = StatesCodec.of_message(wanted, "states")
        with self._lock:
            if codec != self._codec:
                self._codec = codec
                self._logs.clear()

    def _log(self, session: SessionView) -> StatesLog | None:
        if self._codec is None or self._codec.layout.need not in session.needs:
            return None
        return self._logs.setdefault(session.session_id, StatesLog(self._codec))

    def open(self, session: SessionView) -> None:
        """Begin a session anew: the target reads all of its tokens."""
        self.close(session)

    def close(self, session: SessionView) -> None:
        """Forget a session."""
        with self._lock:
            self._logs.pop(session.session_id, None)

    def read_prompt(self, session: SessionView, read: Verification) -> None:
        """As :meth:`Drafter.read_prompt`."""
        with self._lock:
            log = self._log(session)
            if log is not None and self._codec is not None:
                states = self._codec.layout.take(read.extras)
                log.add(log.num_read, states)
                log.num_read += len(states)

    def observe(self, session: SessionView, outcome: Outcome) -> None:
        """Keep the states of a round's tokens that were committed."""
        with self._lock:
            log = self._log(session)
            if log is not None and self._codec is not None:
                states = self._codec.layout.take(outcome.verification.extras)
                states = states[kept_rows(outcome)]
                log.add(session.length - 1 - len(states), states)

    def end(self, session: SessionView) -> int:
        """How many first tokens it has states up to."""
        with self._lock:
            log = self._logs.get(session.session_id)
            return 0 if log is None else log.end

    def is_behind(self, session: SessionView) -> bool:
        """Whether the drafter needs states that are not there, so it cannot draft in this round."""
        return bool(session.needs & STATES) and self.end(session) < session.length - 1

    def pieces(self, session: SessionView, first: int, end: int) -> list[common_pb2.States]:
        """Messages with a session's states from ``first`` on, as far as they are kept."""
        with self._lock:
            log = self._logs.get(session.session_id)
            if log is None or self._codec is None:
                return []
            found = list(log.pieces(first, min(end, log.end)))
            if found:
                found[0].layout.CopyFrom(self._codec.to_message())
            return found

    def latest(self, session: SessionView, first: int, end: int) -> common_pb2.States | None:
        """As :meth:`pieces`, in one message; where that is too little, the last ones."""
        codec = self._codec
        if codec is None:
            return None
        first = max(first, end - max(1, PIECE_BYTES // codec.row_bytes))
        found = self.pieces(session, first, end)
        return found[-1] if found else None


class StatesForwarder(Drafter):
    """A drafter in another process that is sent the target's states, where it reads some."""

    elsewhere = True
    forwards = STATES

    def __init__(self, feed: StatesFeed | None = None) -> None:
        self._feed = feed or StatesFeed()

    def open(self, session: SessionView) -> None:
        self._feed.open(session)

    def close(self, session: SessionView) -> None:
        self._feed.close(session)

    def read_prompt(self, session: SessionView, read: Verification) -> None:
        self._feed.read_prompt(session, read)

    def observe(self, sessions: Sequence[SessionView], outcomes: Sequence[Outcome]) -> None:
        for session, outcome in zip(sessions, outcomes, strict=True):
            self._feed.observe(session, outcome)


def checked_codec(
    message: common_pb2.StatesLayout, num_layers: int, hidden_size: int
) -> StatesCodec:
    """What a client asks for of a target with these sizes.

    Raises:
        InvalidArgument: the target has no such states; names the field.
    """
    codec = StatesCodec.of_message(message, "states")
    if codec.layout.hidden_size != hidden_size:
        allowed = f"{hidden_size}, the target's"
        raise InvalidArgument("states.hidden_size", codec.layout.hidden_size, allowed)
    # A head of a small target may read a layer twice; a client must not ask for states without end.
    layers, most = codec.layout.layers, max(num_layers, LEAST_LAYERS)
    if max(layers, default=1) > num_layers or len(layers) > most:
        allowed = f"at most {most} numbers of layers up to the target's {num_layers}"
        raise InvalidArgument("states.layers", list(layers)[:8], allowed)
    return codec


def count_states(session: Any, pieces: Sequence[common_pb2.States]) -> int:
    """Add to a session's statistics what it sends; returns the bytes."""
    size = sum(piece.ByteSize() for piece in pieces)
    session.stats.states_bytes += size
    return size
