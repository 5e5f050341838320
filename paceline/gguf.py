"""GGUF files: llama.cpp through `llama-cpp-python` (extra `gguf`), and the tokenizer in a file.

The model itself is :class:`paceline.models.gguf.GgufRunner`.
"""

from __future__ import annotations

import ctypes
import logging
import re
import weakref
from collections import deque
from collections.abc import Sequence
from functools import cached_property, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from paceline.errors import ModelNotFound

logger = logging.getLogger(__name__)

_INFO, _WARNING, _ERROR = 2, 3, 4  # ggml's log levels
_errors: deque[str] = deque(maxlen=8)  # the last ones: llama.cpp's functions return no reasons
_PADDING = re.compile(r"\[PAD\d+\]")  # with these, conversion fills a vocabulary up


@lru_cache(1)
def library() -> Any:
    """llama.cpp's C functions; what it logs goes to Python's logging."""
    if find_spec("llama_cpp") is None:
        raise ModelNotFound(
            "a GGUF file needs llama-cpp-python, not installed here: pip install 'paceline[gguf]'"
        )
    from llama_cpp import llama_cpp as lib

    lib.llama_log_set(_log_callback(lib), None)
    lib.llama_backend_init()
    return lib


@lru_cache(1)
def _log_callback(lib: Any) -> Any:
    def log(level: int, text: bytes, user_data: object) -> None:
        line = text.decode("utf-8", "replace").strip()
        if level == _ERROR:
            _errors.append(line)
        if line and level in (_INFO, _WARNING, _ERROR):
            logger.log(logging.DEBUG if level == _INFO else logging.INFO, "%s", line)

    return lib.llama_log_callback(log)


def load_model(path: str | Path, **options: Any) -> Any:
    """Load a model, or with ``vocab_only`` its vocabulary.

    Args:
        options: fields of llama.cpp's ``llama_model_params``.

    Raises:
        ModelNotFound: there is no such file, it is not GGUF, or llama.cpp does not know the model.
    """
    file = Path(path)
    if not file.is_file():
        raise ModelNotFound(f"GGUF file {str(path)!r} does not exist")
    lib = library()
    params = lib.llama_model_default_params()
    for name, value in options.items():
        setattr(params, name, value)
    _errors.clear()
    model = lib.llama_model_load_from_file(str(file).encode(), params)
    if not model:
        reason = _errors[0].rpartition("error loading model: ")[2] if _errors else "no reason given"
        raise ModelNotFound(f"llama.cpp cannot load {str(path)!r}: {reason}")
    return model


class GgufTokenizer:
    """The tokenizer in a GGUF file, as :class:`paceline.tokenizer.Tokenizer`."""

    def __init__(self, path: str | Path) -> None:
        self._lib = lib = library()
        self._model = load_model(path, vocab_only=True)
        weakref.finalize(self, lib.llama_model_free, self._model)
        self._vocab = lib.llama_model_get_vocab(self._model)

    @property
    def vocab_size(self) -> int:
        """Number of entries that text can have; conversion adds others as padding."""
        return len(self.vocabulary())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token after which a generation ends."""
        count = self._lib.llama_vocab_n_tokens(self._vocab)
        return tuple(i for i in range(count) if self._lib.llama_vocab_is_eog(self._vocab, i))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raw = text.encode()
        room = len(raw) + 8  # a token has at least a byte, and few are special
        tokens = (self._lib.llama_token * room)()
        count = self._lib.llama_tokenize(
            self._vocab, raw, len(raw), tokens, room, add_special_tokens, True
        )
        assert count >= 0, f"{-count} tokens of {len(raw)} bytes"
        return list(tokens[:count])

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = not skip_special_tokens
        text = b"".join(self._piece(token, special) for token in token_ids)
        # SentencePiece puts a space before the first word, too; the text does not have it.
        if text.startswith(b" ") and self._drops_space:
            text = text[1:]
        return text.decode("utf-8", "replace")

    @cached_property
    def _drops_space(self) -> bool:
        return bool(self._lib.llama_vocab_type(self._vocab) == self._lib.LLAMA_VOCAB_TYPE_SPM)

    def _piece(self, token_id: int, special: bool = False) -> bytes:
        """The bytes that a token adds to a text; a special one has some only with ``special``."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            count = self._lib.llama_token_to_piece(self._vocab, token_id, buffer, size, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            size = -count

    def vocabulary(self) -> dict[str, int]:
        return dict(self._entries)

    @cached_property
    def _entries(self) -> dict[str, int]:
        lib, vocab, entries = self._lib, self._vocab, {}
        for token in range(lib.llama_vocab_n_tokens(vocab)):
            text = lib.llama_vocab_get_text(vocab, token).decode("utf-8", "replace")
            unused = lib.llama_vocab_get_attr(vocab, token) & lib.LLAMA_TOKEN_ATTR_UNUSED
            if not (unused and _PADDING.fullmatch(text)):
                entries[text] = token
        return entries

    def token_bytes(self, token_id: int) -> bytes:
        """As :meth:`paceline.tokenizer.Tokenizer.token_bytes`."""
        return self._piece(token_id)

    def to_json(self) -> str | None:
        return None
