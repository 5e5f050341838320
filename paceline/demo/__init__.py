"""The demo pair that ships with the package; what it is and how it was made: MODEL_CARD.md.

Importing this stays light: it names two standard Hugging Face folders and loads nothing.
"""

from pathlib import Path

TARGET_DIR = Path(__file__).parent / "target"
"""20 layers x 160, trained with early-exit losses (LayerSkip, arXiv 2404.16710)."""
HEADS_DIR = Path(__file__).parent / "heads"
"""Length controllers that were trained on the pair (``paceline.train.length_heads``)."""
DRAFTER_DIR = Path(__file__).parent / "drafter"
"""2 layers x 160, distilled from the target; the same tokenizer and vocabulary."""
OWN_TOKENS_DIR = Path(__file__).parent / "own_tokens"
"""2 layers x 96 with 768 tokens of its own; method ``omnidraft`` drafts with it for the target."""
DIFFUSION_DIR = Path(__file__).parent / "diffusion"
"""8 layers x 160, masked diffusion in blocks of 32; started from the target's first layers."""
ANY_SUBSET_DIR = Path(__file__).parent / "any_subset"
"""4 layers x 128 over bytes, trained with permutation masks: any token given any others."""
ACTIONS_DIR = Path(__file__).parent / "actions"
"""1 layer x 64 over words, masked diffusion: chunks of a wiping hand's actions."""
FORKS_DIR = Path(__file__).parent / "forks"
"""3 layers x 96 with a vocabulary of its own, trained on lists whose details are branches."""
TRANSLATION_DIR = Path(__file__).parent / "translation"
"""``target`` and ``drafter``: encoder-decoders, 2 + 2 layers x 64; the drafter fills masks."""
BLOCK_FFN_DIR = Path(__file__).parent / "block_ffn"
"""2 layers x 64 with 32 experts each, of which neighbouring tokens use the same few."""
WORDS_FILE = Path(__file__).parent / "words.safetensors"
"""A second output layer for the target, of whole words (``paceline train words``)."""
GRID_FILE = Path(__file__).parent / "drafter_grid.json"
"""Points of a grid of small drafters for the target (``paceline train scaling``)."""
