"""Where heads for SmolLM2-135M-Instruct are: `python -m paceline.train.smollm2` writes them.

Importing this stays light: it names a folder and loads nothing.
"""

from pathlib import Path

HEADS_DIR = Path(__file__).parent / "heads"
"""A folder for each kind of head (:class:`paceline.models.heads.HeadLibrary`)."""
