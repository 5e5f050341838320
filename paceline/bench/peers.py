"""transformers' own ``generate`` with the same weights: what a user would run instead.

It runs on the same terms as the engine: the same dtype, device and number of threads, greedy
decoding, the same prompts and number of tokens (no end-of-sequence token stops it), the KV cache
on, inference mode, weights loaded and warmed up before the clock runs. Drafting keeps
transformers' defaults for an assistant model (which adapts the draft's length to its confidence)
and the knobs of the method ``prompt_lookup`` for prompt lookup. Unlike the engine, it does not turn
tokens into text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from paceline.bench.backends import BatchRun, SequenceRun
from paceline.methods import METHODS

AR = "transformers:ar"
ASSISTANT_MODEL = "transformers:assistant_model"
PROMPT_LOOKUP = "transformers:prompt_lookup"


class TransformersPeer:
    """``AutoModelForCausalLM.generate`` with and without its assisted decoding.

    Attributes:
        methods: that it runs at batch 1; at other batch sizes only ``transformers:ar``, because
            assisted decoding takes one sequence.
    """

    def __init__(
        self,
        target: str | Path,
        drafter: str | Path | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # The runner's loader names what a folder lacks, and never uses the network.
        from paceline.models.transformers_loading import load_causal_lm, quiet

        self._quiet = quiet
        self._device = device
        self.model = load_causal_lm(Path(target), dtype).to(device).eval()
        self._assistant = None
        self.methods = [AR, PROMPT_LOOKUP]
        if drafter is not None:
            self._assistant = load_causal_lm(Path(drafter), dtype).to(device).eval()
            self.methods.insert(1, ASSISTANT_MODEL)
        self._num_forwards = 0
        self.model.register_forward_pre_hook(self._count_forward)

    def generate(self, method: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> BatchRun:
        """Generate exactly ``max_tokens`` tokens for each prompt, all prompts together.

        ``num_target_forwards`` counts the forward that computes the prompt, since it gives the
        first token.
        """
        from transformers import GenerationConfig

        assisted: dict[str, Any] = {}
        options: dict[str, Any] = {}
        if method == ASSISTANT_MODEL:
            assisted["assistant_model"] = self._assistant
        elif method == PROMPT_LOOKUP:
            knobs = METHODS["prompt_lookup"].knob_defaults
            options["prompt_lookup_num_tokens"] = knobs["num_speculative_tokens"]
            options["max_matching_ngram_size"] = knobs["ngram_max"]
        config = GenerationConfig(
            max_new_tokens=max_tokens,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,  # ignore_eos, without the cost of a logits processor
            pad_token_id=0,
            **options,
        )
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros((len(prompts), longest), dtype=torch.int64, device=self._device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):  # padded on the left, as generate() expects
            ids[row, longest - len(prompt) :] = torch.tensor(prompt)
            mask[row, longest - len(prompt) :] = 1
        self._num_forwards = 0
        started = time.perf_counter()
        # transformers warns about options that its own assisted decoding sets.
        with self._quiet(), torch.inference_mode():
            output = self.model.generate(
                input_ids=ids, attention_mask=mask, generation_config=config, **assisted
            )
            generated = output[:, longest:].tolist()
        seconds = time.perf_counter() - started
        return BatchRun(
            sequences=tuple(
                SequenceRun(token_ids=tuple(row), num_target_forwards=self._num_forwards)
                for row in generated
            ),
            seconds=seconds,
        )

    def _count_forward(self, *_: Any) -> None:
        self._num_forwards += 1
