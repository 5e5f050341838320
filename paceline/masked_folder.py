"""How the folders of models that fill masks are told from those of models that write in order."""

from __future__ import annotations

import json
from pathlib import Path

MASKED_DRAFTERS = ("diffuspec", "non_autoregressive")
"""The drafters, as the catalogue names them, that such models are."""


def masked_kind(folder: str | Path) -> str | None:
    """The drafter that a folder's model is; None if it writes in order.

    ``diffuspec``: config.json names a mask token and blocks. ``non_autoregressive``: it names a
    mask token and is that of an encoder-decoder.
    """
    file = Path(folder) / "config.json"
    if not file.is_file():
        return None
    config = json.loads(file.read_text(encoding="utf-8"))
    if "mask_token_id" not in config:
        return None
    if config.get("is_encoder_decoder"):
        return "non_autoregressive"
    return "diffuspec" if "block_size" in config else None
