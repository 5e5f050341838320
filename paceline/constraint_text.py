"""The text that a constraint leaves no choice about: what a draft can have without any model.

A grammar rarely forces a token, because a text has many tokenizations; it forces bytes, such as the
rest of a key of a JSON schema. llguidance gives those (its documentation calls them fast-forward
bytes). Between them JSON allows blanks anywhere, so nearly every run of forced bytes ends at a
choice between a blank and one other byte. There :class:`JsonLayout` says what the output did at
such places before. The forced text, as the tokenizer writes it, is the draft. It is only a guess:
the target decides how to tokenize, and where blanks go.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from paceline.constraints import Mask
    from paceline.tokenizer import Tokenizer

_BLANKS = frozenset(b" \n\r\t")
_OPEN, _CLOSE, _MARKS = frozenset(b"{["), frozenset(b"}]"), frozenset(b",:")
_BYTES_OF_TOKEN = 16  # a text that is longer than so many for each wanted token is enough


class TokenBytes:
    """The bytes of a tokenizer's tokens.

    Args:
        vocab_size: the target's; it may exceed the tokenizer's.
        ending: tokens that end an output.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ending: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        known = min(vocab_size, tokenizer.vocab_size)
        self.pieces = [tokenizer.token_bytes(token) for token in range(known)]
        self.ending = frozenset(ending)
        firsts = [piece[0] if piece else -1 for piece in self.pieces]
        self._firsts = np.asarray(firsts + [-1] * (vocab_size - known), np.int16) + 1
        self.of_byte = {piece[0]: t for t, piece in enumerate(self.pieces) if len(piece) == 1}
        """Token that stands for just this byte."""

    def first_bytes(self, mask: Mask) -> frozenset[int]:
        """The bytes with which the allowed tokens begin; -1: a token without text, or an end."""
        # Counting is much faster than sorting, and this runs in every round.
        counts = np.bincount(self._firsts[: len(mask)][mask], minlength=257)
        found = {int(place) - 1 for place in np.flatnonzero(counts)}
        if any(token < len(mask) and mask[token] for token in self.ending):
            found.add(-1)
        return frozenset(found)

    def join(self, token_ids: Iterable[int]) -> bytes:
        """The text of tokens, as bytes."""
        known = len(self.pieces)
        return b"".join(self.pieces[token] for token in token_ids if token < known)

    def encode(self, text: bytes) -> list[int]:
        """The tokens of a text; a character that is cut at its end is left out."""
        return self._tokenizer.encode(text.decode(errors="ignore"), add_special_tokens=False)


class JsonLayout:
    """How a JSON text uses blanks, learnt from its beginning.

    What it does around colons and commas, and around the entries of objects and of arrays, is kept,
    the indentation as a unit for each level. Text that is not JSON gives useless guesses.
    """

    def __init__(self) -> None:
        self._open: list[int] = []  # brackets
        self._last = 0  # byte that is no blank
        self._blanks = bytearray()  # since then
        self._in_string = self._escaped = False
        self._after: dict[int, bytes] = {ord(":"): b" ", ord(","): b" "}
        self._before: dict[tuple[int, bool], bytes] = {}  # and whether behind a closing bracket
        self._lines: dict[int, bytes] = {}  # bracket -> ends of lines before each of its entries
        self._unit = b"  "

    def copy(self) -> JsonLayout:
        """An independent copy."""
        other = copy.copy(self)
        other._open, other._blanks = self._open.copy(), self._blanks.copy()
        other._after, other._before = self._after.copy(), self._before.copy()
        other._lines = self._lines.copy()
        return other

    @property
    def inside_string(self) -> bool:
        """Whether the text so far ends within a string, where blanks are characters."""
        return self._in_string

    def feed(self, text: bytes) -> None:
        """The next bytes of the text."""
        for byte in text:
            if self._in_string:
                self._in_string = self._escaped or byte != ord('"')
                self._escaped = byte == ord("\\") and not self._escaped
            elif byte in _BLANKS:
                self._blanks.append(byte)
                continue
            else:
                self._learn(byte)
                self._in_string = byte == ord('"')
                if byte in _OPEN:
                    self._open.append(byte)
                elif byte in _CLOSE and self._open:
                    self._open.pop()
            self._last = byte
            self._blanks.clear()

    def blanks_before(self, byte: int) -> bytes | None:
        """The blanks that are still missing before ``byte``.

        None: it has seen no such place yet, or there are other ones already.
        """
        if self._in_string:
            return b""
        expected = self._after.get(self._last, b"")
        if byte in _MARKS:
            closed = self._last in _CLOSE
            expected = self._before.get((byte, closed), self._before.get((byte, not closed), b""))
        elif self._at_edge(byte):
            kind, level = self._open[-1], len(self._open) - (byte in _CLOSE)
            if kind not in self._lines:
                return None
            if self._lines[kind]:
                expected = self._lines[kind] + self._unit * level
            elif self._last != ord(","):
                expected = b""
        there = bytes(self._blanks)
        return expected[len(there) :] if expected.startswith(there) else None

    def _at_edge(self, byte: int) -> bool:
        """Whether an entry of an object or array begins or the last one has ended."""
        at_edge = self._last in _OPEN or self._last == ord(",") or byte in _CLOSE
        return bool(self._open) and at_edge

    def _learn(self, byte: int) -> None:
        blanks = bytes(self._blanks)
        if byte in _MARKS:
            self._before[byte, self._last in _CLOSE] = blanks
        elif self._at_edge(byte):
            lines, indent = blanks[: (end := blanks.rfind(b"\n") + 1)], blanks[end:]
            self._lines[self._open[-1]] = lines
            level = len(self._open) - (byte in _CLOSE)
            if lines and level:
                self._unit = indent[: len(indent) // level]
            elif not lines and self._last == ord(","):
                self._after[ord(",")] = blanks
        elif self._last == ord(":"):
            self._after[ord(":")] = blanks


def forced_tokens(
    matcher: Any,
    pieces: TokenBytes,
    layout: JsonLayout,
    count: int,
    compute_mask: Callable[[Any | None], Mask | None],
) -> list[int]:
    """Up to ``count`` tokens of the text that has to come next; [] where there is a choice.

    Args:
        matcher: a copy of llguidance's matcher at the place; it is moved.
        layout: of the text so far; it is moved.
        compute_mask: mask of a matcher's place, or of the place where it began if that is None;
            returns None if it takes too long.
    """
    tokens: list[int] = []
    moved = False
    text = bytearray()

    def take(new: Sequence[int]) -> bool:
        """Move on by these bytes, if the constraint lets them pass."""
        nonlocal moved
        moved = True
        found = [pieces.of_byte.get(byte, -1) for byte in new]
        if -1 in found or matcher.try_consume_tokens(found) != len(found):
            return False
        text.extend(new)
        layout.feed(bytes(new))
        return True

    while len(tokens) < count and len(text) < _BYTES_OF_TOKEN * count:
        run = matcher.compute_ff_bytes()
        if run:
            if not take(run):
                break
            continue
        mask = None if matcher.is_stopped() else compute_mask(matcher if moved else None)
        if mask is None:
            break
        allowed = np.flatnonzero(mask)
        if len(allowed) == 1 and int(allowed[0]) not in pieces.ending:
            # One token alone may follow, perhaps a special one without a text.
            token = int(allowed[0])
            if matcher.try_consume_tokens([token]) != 1:
                break
            moved = True
            tokens += [*pieces.encode(bytes(text)), token]
            text.clear()
            layout.feed(pieces.join([token]))
            continue
        choices = pieces.first_bytes(mask)
        others = choices - _BLANKS
        if len(others) != 1 or -1 in others:
            break
        (byte,) = others
        blanks = layout.blanks_before(byte) if choices & _BLANKS else b""
        if blanks is None or not take(bytes([*blanks, byte])):
            break
    return [*tokens, *pieces.encode(bytes(text))][:count]
