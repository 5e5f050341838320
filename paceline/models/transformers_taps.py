"""What draft heads read of a model of ``transformers``: its states, its embedding, its last layer.

A model returns logits. Its states are taken from its modules while it runs: the residual stream
after each layer, and the states after the final norm, on which the output layer works.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.differences import Differences
from paceline.models.llama_config import LlamaConfig
from paceline.models.torch_ops import finished
from paceline.types import Need

_ORDER = (Need.HIDDEN_STATES, Need.LAYER_STATES)


class StateTaps:
    """The states of a model's forwards.

    Args:
        model: a causal language model of ``transformers``.

    Attributes:
        num_layers, hidden_size: of the model.
        layers: its modules.

    Raises:
        LookupError: the model has no list of its layers.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self.num_layers, self.hidden_size = int(config.num_hidden_layers), int(config.hidden_size)
        self._decoder, self.layers = _find_layers(model, self.num_layers)

    def width(self, needs: frozenset[Need]) -> int:
        """Numbers of a token's states, as :meth:`taken` lays them out."""
        return self.hidden_size * sum(self._places(need) for need in _ORDER if need in needs)

    def split(self, states: Tensor, needs: frozenset[Need]) -> dict[Need, Tensor]:
        """What :meth:`taken` has laid out side by side, as extras of a forward.

        # [num_rows, width] -> [num_rows, hidden_size] and [num_rows, num_layers, hidden_size]
        """
        each = [need for need in _ORDER if need in needs]
        parts = states.split([self.hidden_size * self._places(need) for need in each], -1)
        found = dict(zip(each, parts, strict=True))
        if Need.LAYER_STATES in found:
            shape = (self.num_layers, self.hidden_size)
            found[Need.LAYER_STATES] = found[Need.LAYER_STATES].unflatten(-1, shape)
        return found

    @contextmanager
    def taken(self, needs: frozenset[Need]) -> Iterator[list[Tensor]]:
        """Take states from the forward in the block; afterwards they are in the list.

        # [num_rows, num_tokens, hidden_size] each; after the final norm, then after each layer
        """
        taken: list[Tensor] = []
        hidden: list[Tensor] = []
        hooks = []
        if Need.HIDDEN_STATES in needs:
            hooks.append(self._decoder.register_forward_hook(_into(hidden)))
        if Need.LAYER_STATES in needs:
            hooks += [layer.register_forward_hook(_into(taken)) for layer in self.layers]
        try:
            yield taken
        finally:
            for hook in hooks:
                hook.remove()
        taken[:0] = hidden

    @contextmanager
    def after(self, layers: Sequence[int]) -> Iterator[list[Tensor]]:
        """Take the states after some layers from the forward in the block, in its order.

        # [num_rows, num_tokens, hidden_size] each
        """
        taken: list[Tensor] = []
        hooks = [self.layers[layer].register_forward_hook(_into(taken)) for layer in layers]
        try:
            yield taken
        finally:
            for hook in hooks:
                hook.remove()

    def _places(self, need: Need) -> int:
        return 1 if need is Need.HIDDEN_STATES else self.num_layers


def _into(states: list[Tensor]) -> Any:
    """A hook that keeps a module's output."""

    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        del module, inputs
        states.append(output if isinstance(output, Tensor) else output[0])

    return keep


def _find_layers(model: nn.Module, count: int) -> tuple[nn.Module, nn.ModuleList]:
    """The module that runs all layers and the final norm, and its layers."""
    for module in model.modules():
        for child in module.children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return module, child
    raise LookupError(f"{type(model).__name__} has no list of {count} layers")


# --- for heads -----------------------------------------------------------------------------------


class OutputLayer:
    """The embedding and the output layer of a model, as draft heads use them.

    Args:
        model: of ``transformers``.
        raw: its parsed config.json.

    Attributes:
        config: sizes of the model, and of the layers that a head trained for it has: those of the
            fast path if that knows the model, else those of a plain Llama model.
        embedding: of every token.  # [vocab_size, hidden_size]
        lm_head: weight of the output layer.  # [vocab_size, hidden_size]

    Raises:
        LookupError: the model has them in another form.
    """

    def __init__(self, model: Any, raw: dict[str, Any], context_length: int) -> None:
        table, self._last = model.get_input_embeddings(), model.get_output_embeddings()
        self.config = head_config(model.config.get_text_config(), context_length)
        with suppress(InvalidArgument, KeyError):
            self.config = LlamaConfig.from_dict(raw)
        shape = (self.config.vocab_size, self.config.hidden_size)
        for each in (table, self._last):
            found = tuple(getattr(getattr(each, "weight", None), "shape", ()))
            if found != shape:
                raise LookupError(f"a table of {found} numbers instead of {shape}")
        # transformers has the scale in the model's code, or in that of its table.
        self.embedding: Tensor = table.weight.detach()
        if self.config.differs.embedding_scale != 1.0:
            self.embedding = self.embedding * self.config.differs.embedding_scale
        self.lm_head: Tensor = self._last.weight.detach()

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of states after the final norm.

        # [num_rows, hidden_size] -> float32 [num_rows, vocab_size]
        """
        with torch.inference_mode():
            logits = self._last(hidden.to(self.lm_head.dtype))
            return finished(logits, self.config.differs)


def head_config(config: Any, context_length: int) -> LlamaConfig:
    """Sizes of a model, with the layers that a head trained for it has.

    Args:
        config: of ``transformers``, of the model's text part.
    """
    size, heads = int(config.hidden_size), getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int) or size % heads or size // heads % 2:
        heads = max(1, size // 64)  # a model without attention, or with a different one by layer
        heads = heads if size % heads == 0 and size // heads % 2 == 0 else 1
    inner = getattr(config, "intermediate_size", None)
    layers = int(config.num_hidden_layers)
    # The names under which models have what comes behind the output layer.
    cap = getattr(config, "final_logit_softcapping", None) or getattr(
        config, "logits_soft_cap", None
    )
    divisor = getattr(config, "logits_scaling", None) or 1.0
    scale = getattr(config, "logit_scale", None) or getattr(config, "lm_head_multiplier", None)
    return LlamaConfig(
        model_type=str(config.model_type),
        vocab_size=int(config.vocab_size),
        hidden_size=size,
        intermediate_size=inner if isinstance(inner, int) else 4 * size,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=size // heads,
        context_length=context_length,
        rms_norm_eps=1e-6,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        rope={"rope_type": "default", "rope_theta": 10000.0},
        windows=(None,) * layers,
        differs=Differences(
            logit_divisor=divisor / (scale or 1.0),
            logit_cap=cap or 0.0,
        ),
    )
