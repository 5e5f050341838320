"""Heads for SmolLM2-135M-Instruct that ship with the package; how they were made: MODEL_CARD.md.

Importing this stays light: it names a folder and loads nothing.
"""

from pathlib import Path

HEADS_DIR = Path(__file__).parent / "heads"
"""A folder for each kind of head (:class:`paceline.models.heads.HeadLibrary`)."""
