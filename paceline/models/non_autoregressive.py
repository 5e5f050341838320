"""Encoder-decoder models that fill a block of masks in one forward, for drafts.

The drafter of Generalised Aggressive Decoding (Ge et al. 2022, arXiv 2205.10350). It is an ordinary
encoder-decoder of ``transformers`` (of the BART kind, which takes a mask from its caller) but for
its config.json, which names a ``mask_token_id``, and its decoder, in which every position sees all
others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from paceline.errors import InvalidArgument
from paceline.models.layouts import read_config
from paceline.models.seq2seq import find_start
from paceline.models.transformers_loading import load_causal_lm


def everything_visible(seen: torch.Tensor) -> torch.Tensor:
    """A decoder's mask with which each position sees all that are ``seen``, later ones too.

    # bool [rows, length] -> float32 [rows, 1, length, length], added to scores
    """
    hidden = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return hidden[:, None, None, :].expand(-1, 1, seen.shape[1], -1)


class FillingModel:
    """A model that fills masks behind what is written, all at once, in float32 on the CPU.

    Args:
        path: the model's folder.

    Raises:
        ModelNotFound: something in the folder is missing or damaged.
        InvalidArgument: not a model of this kind.
    """

    def __init__(self, path: str | Path) -> None:
        config = read_config(Path(path))
        if config.get("model_type") != "bart" or "mask_token_id" not in config:
            raise InvalidArgument(
                "drafter", str(path), "an encoder-decoder of type bart with a mask_token_id"
            )
        self._model: Any = load_causal_lm(Path(path), torch.float32, "AutoModelForSeq2SeqLM").eval()
        self.mask_token_id, self._start = config["mask_token_id"], config["decoder_start_token_id"]
        self.vocab_size = int(config["vocab_size"])
        self.context_length = int(config["max_position_embeddings"])

    def split(self, prompt_ids: list[int]) -> tuple[list[int], list[int]]:
        """A prompt's encoder input, and what of the output it has already."""
        place, source = find_start(prompt_ids, self._start)
        return source, prompt_ids[place + 1 :]

    @torch.inference_mode()
    def encode(self, source: list[int]) -> Any:
        """The encoder's states, a tensor.  # [1, len(source), hidden_size]"""
        return self._model.get_encoder()(input_ids=torch.tensor([source]))[0]

    @torch.inference_mode()
    def fill(self, states: Any, written: list[int], count: int) -> torch.Tensor:
        """Logits of the ``count`` positions behind ``written``.  # [count, vocab_size]

        The mask itself is impossible.
        """
        from transformers.modeling_outputs import BaseModelOutput

        tokens = torch.tensor([[self._start, *written, *[self.mask_token_id] * count]])
        logits: torch.Tensor = self._model(
            encoder_outputs=BaseModelOutput(last_hidden_state=states),
            decoder_input_ids=tokens,
            decoder_attention_mask=everything_visible(torch.ones_like(tokens, dtype=torch.bool)),
            use_cache=False,
        ).logits[0, -count:]
        logits[:, self.mask_token_id] = -torch.inf
        return logits
