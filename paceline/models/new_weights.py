"""New weights for a model in use, as a draft model that learns while it serves gets them."""

from __future__ import annotations

import os
import shutil
import tempfile
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

import torch

from paceline.models.cuda_ops import fused_ops
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_weights import LlamaWeights, load_llama_weights
from paceline.models.ops import Ops


class TakesWeights(ABC):
    """The part of :class:`paceline.models.llama.LlamaRunner` that changes its weights."""

    config: LlamaConfig
    dtype: torch.dtype
    device: torch.device
    batch_invariant: bool
    _folder: Path
    _blocks: str | None
    _ops: Ops
    _weights: LlamaWeights

    @abstractmethod
    def _use_graphs(self) -> None: ...

    def _prepare_device(self) -> None:
        if self.device.type == "cuda":
            self._ops = fused_ops(self._weights.stack, self.batch_invariant)
            if os.environ.get("PACELINE_CUDA_GRAPHS", "on") != "off":
                self._use_graphs()

    def read_weights(self, data: bytes) -> LlamaWeights:
        """Weights for :meth:`use_weights`, packed; may run beside forwards, in another thread.

        Args:
            data: safetensors with the tensors of the model's own checkpoint.

        Raises:
            ModelNotFound, InvalidArgument: as at the load, or no safetensors.
        """
        with tempfile.TemporaryDirectory(prefix="paceline-weights-") as place:
            folder = Path(place)
            shutil.copyfile(self._folder / "config.json", folder / "config.json")
            (folder / "model.safetensors").write_bytes(data)
            weights = load_llama_weights(
                folder, self.config, self._ops, dtype=self.dtype, device=self.device,
                blocks=self._blocks, on_disk=False,
            )  # fmt: skip
        adapters = self._weights.stack.adapters
        return replace(weights, stack=replace(weights.stack, adapters=adapters))

    def use_weights(self, weights: LlamaWeights) -> None:
        """Compute with other weights from the next forward on; call it between two forwards.

        KV entries stay, so what follows them mixes both. That is no harm to a model that drafts;
        a target must not do it.
        """
        old, self._weights = self._weights, weights
        self._ops.forget(old.stack)
        self._prepare_device()
        self.__dict__.pop("fingerprint", None)  # of the old ones
