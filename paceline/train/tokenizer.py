"""The demo pair's tokenizer: byte-level BPE that `transformers.AutoTokenizer` loads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"
PAD = "<|pad|>"
VOCAB_SIZE = 4096

# GPT-4's split: words with one leading mark or space, digits by threes, punctuation with the line
# end that follows it, and whole runs of white space, so an indentation is one token.
_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Learn the merges. `decode(encode(x)) == x` holds for every string, seen or not."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load what `train_tokenizer(...).save_pretrained(folder)` wrote."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def pack(tokenizer: PreTrainedTokenizerFast, texts: Sequence[str]) -> NDArray[np.uint16]:
    """All texts as one stream of ids, uint16 [num_tokens]; each starts with `<|endoftext|>`."""
    start = np.array([tokenizer.bos_token_id], dtype=np.uint16)
    parts: list[NDArray[np.uint16]] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(texts, add_special_tokens=False):
        parts += [start, np.array(encoding.ids, dtype=np.uint16)]
    return np.concatenate(parts)
