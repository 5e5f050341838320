"""Hostile messages for every RPC: values that no client would send, and broken bytes."""

from __future__ import annotations

import random
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from paceline.methods import METHODS

INTS = (0, 1, -1, 2, 3, 7, 64, 65, 255, 256, 257, 258, 4096, 2**31 - 1, -(2**31))
LONGS = (*INTS, 2**32 - 1, 2**53, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-30, 1e38, -1e38, float("nan"), float("inf"), float("-inf"))
STRINGS = (
    "", "x", "ar", "client", "kary", "coupled", "rejection", "fixed", "goodput", "\x00", "é𝄞\u202e",
    "[", "[1, 2]", "[[0], [0, 0]]", "[" * 500, "{}", "null", "a" * 3000, "../../etc/passwd",
    "__class__", "%s%n", "[1e400]", '["prompt_lookup", "draft_model"]', "template", "medusa_63",
)  # fmt: skip

_SIGNED = {FieldDescriptor.TYPE_INT32, FieldDescriptor.TYPE_SINT32}
_UNSIGNED = {FieldDescriptor.TYPE_UINT32}
_SIGNED_64 = {FieldDescriptor.TYPE_INT64}
_UNSIGNED_64 = {FieldDescriptor.TYPE_UINT64}


class Fuzzer:
    """Random messages; equal seeds give equal ones.

    Attributes:
        session_ids: of sessions that are there, which some messages name.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.session_ids: list[tuple[str, int]] = []

    def scalar(self, field: FieldDescriptor) -> Any:
        pick = self.random.choice
        small = self.random.random() < 0.5
        if field.type in _SIGNED:
            return self.random.randint(0, 257) if small else pick(INTS)
        if field.type in _UNSIGNED:
            return self.random.randint(0, 20) if small else abs(pick(INTS))
        if field.type in _SIGNED_64:
            return self.random.randint(0, 20) if small else pick(LONGS)
        if field.type in _UNSIGNED_64:
            return self.random.randint(0, 20) if small else abs(pick(LONGS))
        if field.type == FieldDescriptor.TYPE_BOOL:
            return self.random.random() < 0.5
        if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
            return self.random.random() if small else pick(FLOATS)
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.random.randbytes(pick((0, 1, 16, 17, 400)))
        if field.name in ("method", "shape", "acceptance", "length") and small:
            return pick(list(METHODS))
        return pick(STRINGS)

    def fill(self, message: Message, chance: float = 0.4, depth: int = 0) -> None:
        """Set some of the fields to something."""
        descriptor: Descriptor = message.DESCRIPTOR
        for field in descriptor.fields:
            if self.random.random() > chance or depth > 4:
                continue
            if field.is_repeated:
                self._fill_repeated(message, field, depth)
            elif field.message_type is not None:
                inner = getattr(message, field.name)
                inner.SetInParent()
                self.fill(inner, chance, depth + 1)
            else:
                setattr(message, field.name, self.scalar(field))

    def _fill_repeated(self, message: Message, field: FieldDescriptor, depth: int) -> None:
        values: Any = getattr(message, field.name)
        count = self.random.choice((0, 1, 2, 3, 5, 8, 40, 300))
        entry = field.message_type
        if entry is None:
            values.extend(self.scalar(field) for _ in range(count))
        elif entry.GetOptions().map_entry:
            key, value = entry.fields
            for _ in range(min(count, 40)):
                values[self.scalar(key)] = self.scalar(value)
        else:
            for _ in range(min(count, 8)):
                self.fill(values.add(), depth=depth + 1)

    def bend(self, message: Message) -> None:
        """Change a few things in a good message."""
        for _ in range(self.random.randint(0, 3)):
            self.fill(message, chance=0.08)

    def mutate(self, data: bytes) -> bytes:
        """Break the bytes themselves: flip, drop, repeat, insert, cut."""
        broken = bytearray(data)
        for _ in range(self.random.randint(1, 6)):
            at = self.random.randrange(len(broken) + 1)
            kind = self.random.randrange(5)
            if kind == 0 and at < len(broken):
                broken[at] ^= 1 << self.random.randrange(8)
            elif kind == 1:
                del broken[at : at + self.random.randint(1, 4)]
            elif kind == 2:
                broken[at:at] = broken[at : at + self.random.randint(1, 20)]
            elif kind == 3:
                broken[at:at] = self.random.randbytes(self.random.randint(1, 8))
            else:
                del broken[at:]
        return bytes(broken)

    def json(self, depth: int = 0) -> Any:
        """A value that may stand anywhere in a body of HTTP."""
        pick = self.random.choice
        kind = self.random.randrange(6 if depth < 3 else 4)
        if kind == 0:
            return pick((None, True, False, *LONGS, 2**70))
        if kind == 1:
            return pick(FLOATS)
        if kind in (2, 3):
            return pick((*STRINGS, "\ud800", *METHODS))
        count = pick((0, 1, 2, 3) if depth else (0, 1, 2, 8, 300))
        if kind == 4:
            return [self.json(depth + 1) for _ in range(count)]
        return {pick(STRINGS): self.json(depth + 1) for _ in range(min(count, 8))}

    def bend_json(self, value: Any, chance: float = 0.1) -> Any:
        """A good body, in which some of the values are others."""
        if self.random.random() < chance:
            return self.json()
        if isinstance(value, dict):
            return {key: self.bend_json(item, chance) for key, item in value.items()}
        if isinstance(value, list):
            return [self.bend_json(item, chance) for item in value]
        return value

    def spoil(self, good: Message) -> bytes:
        """Bytes that began as ``good`` (which may be empty) and may be anything now."""
        kind = self.random.random()
        if kind < 0.05:
            return self.random.randbytes(self.random.choice((0, 1, 10, 200, 5000)))
        if kind < 0.35:
            message = type(good)()
            self.fill(message)
        else:
            message = good
            self.bend(message)
        self._name_session(message)
        data = message.SerializeToString()
        return self.mutate(data) if self.random.random() < 0.35 else data

    def _name_session(self, message: Any) -> None:
        if not self.session_ids or self.random.random() < 0.2:
            return
        session_id, epoch = self.random.choice(self.session_ids)
        names = message.DESCRIPTOR.fields_by_name
        if "session_id" in names:
            message.session_id = session_id
        if "epoch" in names and self.random.random() < 0.9:
            message.epoch = epoch
        if "resume_session_id" in names and self.random.random() < 0.2:
            message.resume_session_id = session_id
