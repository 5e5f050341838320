"""Text to token ids and back, for a Hugging Face model folder.

``tokenizers`` reads ``tokenizer.json`` directly; a folder that has none goes through
``transformers.AutoTokenizer``, which is slow to import.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

from paceline.errors import ModelNotFound, TokenizerMismatch
from paceline.gguf import GgufTokenizer
from paceline.gguf_folder import is_foreign, model_folder
from paceline.model_names import resolve_model

_LONG_TEXT = 2000  # characters


class Tokenizer(Protocol):
    """What Paceline asks of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def vocabulary(self) -> dict[str, int]: ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; they may be a part of a character."""
        ...

    def to_json(self) -> str | None:
        """The text of ``tokenizer.json``; None for a tokenizer that has no such form."""
        ...


class _FastTokenizer:
    def __init__(self, path: Path) -> None:
        import tokenizers

        self._tokenizer = tokenizers.Tokenizer.from_file(str(path))

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if len(text) > _LONG_TEXT:  # a batch lets other threads run in the meantime
            encoded = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)
            return list(encoded[0].ids)
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def vocabulary(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def token_bytes(self, token_id: int) -> bytes:
        return _piece_bytes(self._tokenizer.id_to_token(token_id), self._byte_level)

    def to_json(self) -> str | None:
        return str(self._tokenizer.to_str())

    @cached_property
    def _byte_level(self) -> bool:
        return '"ByteLevel"' in json.dumps(json.loads(self._tokenizer.to_str())["decoder"])


class _AutoTokenizer:
    def __init__(self, path: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path))

    @property
    def vocab_size(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def vocabulary(self) -> dict[str, int]:
        return dict(self._tokenizer.get_vocab())

    def token_bytes(self, token_id: int) -> bytes:
        return _piece_bytes(self._tokenizer.convert_ids_to_tokens(token_id), False)

    def to_json(self) -> str | None:
        backend: Any = getattr(self._tokenizer, "backend_tokenizer", None)
        return str(backend.to_str()) if hasattr(backend, "to_str") else None


def _piece_bytes(piece: str | None, byte_level: bool) -> bytes:
    """The bytes of an entry of a vocabulary."""
    if piece is None:  # an id of the model's vocabulary that the tokenizer does not use
        return b""
    if byte_level:
        table = _bytes_of_characters()
        if all(character in table for character in piece):
            return bytes(table[character] for character in piece)
    elif re.fullmatch("<0x[0-9A-F]{2}>", piece):
        return bytes((int(piece[3:5], 16),))
    return piece.replace("\u2581", " ").encode()


@lru_cache(1)
def _bytes_of_characters() -> dict[str, int]:
    """GPT-2's alphabet, in which byte-level vocabularies are written.

    Printable bytes stand for themselves, the others for the characters from 256 on.
    """
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printing]
    table = {chr(byte): byte for byte in printing}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_loaded: WeakValueDictionary[bytes, _FastTokenizer] = WeakValueDictionary()
"""Those in use, by a digest of their files: an engine's models have equal files."""


def _fast_tokenizer(path: Path) -> _FastTokenizer:
    key = hashlib.sha256(path.read_bytes()).digest()
    found = _loaded.get(key)
    if found is None:
        found = _loaded[key] = _FastTokenizer(path)
    return found


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model.

    Args:
        path: its folder or GGUF file, or its name (:mod:`paceline.model_names`).

    Raises:
        ModelNotFound: there is no such model, or it has no tokenizer.
    """
    path = resolve_model(path, weights=False)
    if is_foreign(path):
        return GgufTokenizer(path)
    folder = model_folder(path)
    if (folder / "tokenizer.json").is_file():
        return _fast_tokenizer(folder / "tokenizer.json")
    known = ("tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if not any((folder / name).is_file() for name in known):
        raise ModelNotFound(
            f"model folder {str(folder)!r} has no tokenizer: expected tokenizer.json or one "
            f"of {', '.join(known)}"
        )
    return _AutoTokenizer(folder)


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The form in which a model expects a conversation, from its folder.

    Attributes:
        source: Jinja, or empty where the model has none.
        bos_token, eos_token: texts that templates use; empty where there are none.
    """

    source: str = ""
    bos_token: str = ""
    eos_token: str = ""


def chat_template(path: str | Path) -> ChatTemplate:
    """The default chat template of a model folder or GGUF file.

    Raises:
        ModelNotFound: there is no such folder or file.
    """
    if not Path(path).exists():
        raise ModelNotFound(f"model {str(path)!r} does not exist")
    folder = model_folder(path)
    file = folder / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    source = config.get("chat_template") or ""
    if isinstance(source, list):  # several, each with a name
        named = {entry["name"]: entry["template"] for entry in source}
        source = named.get("default", "")
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text("utf-8")
    return ChatTemplate(source, *(_token_text(config.get(f"{n}_token")) for n in ("bos", "eos")))


def _token_text(value: Any) -> str:
    return str(value.get("content", "") if isinstance(value, dict) else value or "")


def eos_token_ids(path: str | Path) -> tuple[int, ...]:
    """End-of-sequence ids of generation_config.json, else of config.json, or of a GGUF file."""
    if is_foreign(path):
        return GgufTokenizer(path).eos_token_ids
    folder = model_folder(path)
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if file.is_file():
            value = json.loads(file.read_text()).get("eos_token_id")
            if isinstance(value, int):
                return (value,)
            if isinstance(value, list):
                return tuple(int(token) for token in value)
    return ()


def check_same_tokenizer(target: Tokenizer, drafter: Tokenizer) -> None:
    """Raise TokenizerMismatch, naming entries that differ, unless both agree on every token."""
    if target is drafter:
        return
    ours, theirs = target.vocabulary(), drafter.vocabulary()
    if ours == theirs:
        return
    differing = sorted(
        (token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token)),
        key=lambda token: ours.get(token, theirs.get(token, 0)),
    )
    shown = ", ".join(
        f"{token!r} (target {ours.get(token, 'none')}, drafter {theirs.get(token, 'none')})"
        for token in differing[:5]
    )
    raise TokenizerMismatch(
        f"drafter and target must share a tokenizer, but {len(differing)} of "
        f"{len(ours.keys() | theirs.keys())} entries differ: {shown}"
        + (", ..." if len(differing) > 5 else "")
        + "; the method omnidraft translates between them"
    )


def fingerprint(tokenizer: Tokenizer) -> str:
    """32 hex digits that tell whether two tokenizers have the same tokens with the same ids."""
    return vocabulary_fingerprint(tokenizer.vocabulary())


def vocabulary_fingerprint(vocabulary: Mapping[str, int]) -> str:
    """:func:`fingerprint` of the tokenizer with these tokens and ids."""
    entries = sorted(vocabulary.items())
    return hashlib.sha256(json.dumps(entries).encode()).hexdigest()[:32]


class IncrementalDecoder:
    """Decodes a growing token sequence piece by piece.

    A piece is held back while it ends in an unfinished UTF-8 sequence. Earlier tokens are decoded
    along with new ones, because some tokenizers drop a space at the start of a text.
    """

    _KEPT, _LONGEST = 6, 24  # tokens of context after it was cut, and before

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip_special_tokens)
        self.reset()

    def reset(self) -> None:
        """Start over with an empty sequence."""
        self._ids: list[int] = []  # context, then what is held back
        self._known = ""  # text of the context

    def push(self, token_id: int) -> str:
        """The text that ``token_id`` completes; may be empty."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text.endswith("\ufffd") or len(text) <= len(self._known):
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """The text still held back, with replacement characters where bytes are missing."""
        return self._advance(self._decode(self._ids))

    def _advance(self, text: str) -> str:
        piece = text[len(self._known) :]
        self._known = text
        if len(self._ids) > self._LONGEST:
            # The first token of a context may decode differently, so decode it again.
            self._ids = self._ids[-self._KEPT :]
            self._known = self._decode(self._ids)
        return piece
