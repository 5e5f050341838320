"""Small random models that fill masks, as drafters for engines over the small random models."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch

from paceline.diffusion.model import Blocks, MaskedModel
from paceline.diffusion.runner import BlockRunner
from paceline.drafters.base import Drafter
from paceline.drafters.diffuspec import DiffuSpec
from paceline.drafters.non_autoregressive import NonAutoregressive
from paceline.models.llama_config import LlamaConfig
from paceline.models.non_autoregressive import FillingModel

SIZE, LAYERS, HEADS = 32, 2, 2


def masked_model(vocab_size: int, blocks: Blocks, *, seed: int = 0) -> MaskedModel:
    """Two random layers of width 32, wide enough that predictions differ."""
    config = LlamaConfig.from_dict(
        {
            "model_type": "llama",
            "vocab_size": vocab_size,
            "hidden_size": SIZE,
            "intermediate_size": 2 * SIZE,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "max_position_embeddings": 512,
            "tie_word_embeddings": True,
        }
    )
    made = MaskedModel.untrained(config, blocks, seed)
    for name, tensor in made.weights.items():
        if tensor.ndim > 1:
            tensor.mul_(14.0 if "embed" in name else 3.0)
    return made


def masked_drafter(vocab_size: int) -> DiffuSpec:
    """A drafter for the method `diffuspec`, whose mask is the last token of the vocabulary."""
    blocks = Blocks(mask_token_id=vocab_size - 1, block_size=8, sub_block_size=4)
    return DiffuSpec(BlockRunner(masked_model(vocab_size, blocks)), vocab_size)


@cache
def filling_folder(vocab_size: int) -> Path:
    """A random encoder-decoder with a mask, the last token; made once, removed at exit."""
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=vocab_size, d_model=SIZE, encoder_layers=1, decoder_layers=LAYERS,
        encoder_ffn_dim=SIZE, decoder_ffn_dim=SIZE, encoder_attention_heads=HEADS,
        decoder_attention_heads=HEADS, max_position_embeddings=512, dropout=0.0, init_std=0.4,
        pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=0,
        forced_eos_token_id=None, mask_token_id=vocab_size - 1,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = BartForConditionalGeneration(config)
    with torch.no_grad():  # so that positions get different tokens
        model.model.decoder.embed_positions.weight.mul_(3.0)
    folder = Path(tempfile.mkdtemp(prefix="paceline-filling-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model.save_pretrained(folder)
    return folder


@cache
def _filling_model(vocab_size: int) -> FillingModel:
    """It keeps nothing of what it reads, so all drafters may have the same."""
    return FillingModel(filling_folder(vocab_size))


def masked_drafters(vocab_size: int) -> dict[str, Drafter]:
    """A random model for each drafter that fills masks."""
    filling = NonAutoregressive(_filling_model(vocab_size), vocab_size)
    return {"diffuspec": masked_drafter(vocab_size), "non_autoregressive": filling}
