"""How the folder of a masked-diffusion model is told from that of a model that writes in order."""

from __future__ import annotations

import json
from pathlib import Path


def is_masked_model(folder: str | Path) -> bool:
    """Whether a folder's config.json names a mask token and blocks; False without such a file."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        return False
    keys: set[str] = set(json.loads(file.read_text(encoding="utf-8")))
    return {"mask_token_id", "block_size"} <= keys
