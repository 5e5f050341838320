"""A small random masked model as a drafter, for engines over the small random models."""

from __future__ import annotations

from paceline.diffusion.model import Blocks, MaskedModel
from paceline.diffusion.runner import BlockRunner
from paceline.drafters.diffuspec import DiffuSpec
from paceline.models.llama_config import LlamaConfig

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
