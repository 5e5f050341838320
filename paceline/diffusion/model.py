"""A masked-diffusion model of Llama's layers with block-causal attention, in plain torch.

Positions are cut into blocks. A position sees its own block in both directions and all earlier
blocks, no later one. The state at position i - 1 predicts the token at position i ("token shift",
Fast-dLLM v2, arXiv 2509.26328), so an AR model's weights are a good start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from paceline.errors import InvalidArgument, ModelNotFound
from paceline.models.architectures import PLAIN_MODEL_TYPES
from paceline.models.llama_config import LlamaConfig

Tensor = torch.Tensor
KV = list[tuple[Tensor, Tensor]]
"""Of each layer: keys and values.  # 2 x [batch, kv_heads, length, head_dim]"""


@dataclass(frozen=True, slots=True)
class Blocks:
    """What config.json says beside a Llama-type model's keys.

    Attributes:
        causal_past: a finished block sees only earlier positions, as a model that predicts the next
            token sees them (Set Block Decoding, arXiv 2509.04185); else its own block as well.
    """

    mask_token_id: int
    block_size: int
    sub_block_size: int
    causal_past: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise InvalidArgument("block_size", self.block_size, "at least 1")
        if self.sub_block_size < 1 or self.block_size % self.sub_block_size:
            allowed = f"a divisor of block_size, {self.block_size}"
            raise InvalidArgument("sub_block_size", self.sub_block_size, allowed)

    @staticmethod
    def from_folder(folder: Path) -> Blocks:
        """Read config.json.

        Raises:
            ModelNotFound: it lacks a key, so the folder holds no masked-diffusion model.
        """
        raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        try:
            return Blocks(
                raw["mask_token_id"],
                raw["block_size"],
                raw["sub_block_size"],
                raw.get("causal_past", False),
            )
        except KeyError as error:
            raise ModelNotFound(f"{folder}/config.json lacks {error}") from error

    def past_mask(self, length: int) -> Tensor:
        """True where a finished position sees another.  # bool [length, length]"""
        return block_causal(length, 1 if self.causal_past else self.block_size)


class MaskedModel:
    """Weights and forward of a masked model.

    Args:
        config: sizes, as a Llama-type checkpoint has them.
        weights: tensors by their names in a Hugging Face checkpoint.
    """

    def __init__(self, config: LlamaConfig, weights: dict[str, Tensor], blocks: Blocks) -> None:
        self.config, self.weights, self.blocks = config, weights, blocks
        theta, size = float(config.rope.get("rope_theta", 10000.0)), config.head_dim
        self._frequencies = theta ** (-torch.arange(0, size, 2).float() / size)

    @staticmethod
    def load(folder: str | Path) -> MaskedModel:
        """Read a folder in Hugging Face format whose config.json has the keys of :class:`Blocks`.

        Raises:
            ModelNotFound: a file or a key is missing.
        """
        folder = Path(folder)
        config = LlamaConfig.from_folder(folder, PLAIN_MODEL_TYPES)
        file = folder / "model.safetensors"
        if not file.exists():
            raise ModelNotFound(f"{file} does not exist")
        weights = {name: tensor.float() for name, tensor in load_file(file).items()}
        return MaskedModel(config, weights, Blocks.from_folder(folder))

    @staticmethod
    def untrained(config: LlamaConfig, blocks: Blocks, seed: int = 0) -> MaskedModel:
        """Small random weights, with the embedding as head."""
        generator = torch.Generator().manual_seed(seed)

        def normal(rows: int, columns: int, scale: float) -> Tensor:
            values: Tensor = torch.randn(rows, columns, generator=generator)
            return values.mul_(scale)

        width, inner = config.hidden_size, config.intermediate_size
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        weights = {
            "model.embed_tokens.weight": normal(config.vocab_size, width, 0.05),
            "model.norm.weight": torch.ones(width),
        }
        scale = 0.7 / width**0.5
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            for name in ("input_layernorm", "post_attention_layernorm"):
                weights[f"{prefix}{name}.weight"] = torch.ones(width)
            for name, count in heads.items():
                rows = count * config.head_dim
                weights[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows, width, scale)
            mixed = config.num_heads * config.head_dim
            weights[f"{prefix}self_attn.o_proj.weight"] = normal(width, mixed, scale)
            for name in ("gate", "up"):
                weights[f"{prefix}mlp.{name}_proj.weight"] = normal(inner, width, scale)
            weights[f"{prefix}mlp.down_proj.weight"] = normal(width, inner, scale)
        return MaskedModel(config, weights, blocks)

    def forward(
        self, tokens: Tensor, positions: Tensor, mask: Tensor | None = None, past: KV | None = None
    ) -> tuple[Tensor, KV]:
        """Final states and the rows' own keys and values.

        Args:
            tokens: ids.  # [batch, rows]
            positions: of the rows.  # [rows]
            mask: True where a row sees a column; None: all.  # [rows, past + rows]
            past: keys and values in front of the rows'.

        Returns:
            States behind the final norm # [batch, rows, hidden], and keys and values.
        """
        config, weights = self.config, self.weights
        angles = positions[:, None].float() * self._frequencies
        turn = torch.cat([angles, angles], -1)
        cos, sin = turn.cos(), turn.sin()
        x = F.embedding(tokens, weights["model.embed_tokens.weight"])
        entries: KV = []
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            hidden = self._norm(x, prefix + "input_layernorm.weight")
            queries, keys, values = (
                self._linear(hidden, f"{prefix}self_attn.{name}_proj.weight")
                .unflatten(-1, (-1, config.head_dim))
                .transpose(1, 2)
                for name in "qkv"
            )
            queries, keys = _rotate(queries, cos, sin), _rotate(keys, cos, sin)
            entries.append((keys, values))
            if past is not None:
                batch = len(tokens)
                keys = torch.cat([past[layer][0].expand(batch, -1, -1, -1), keys], 2)
                values = torch.cat([past[layer][1].expand(batch, -1, -1, -1), values], 2)
            grouped = config.num_heads != config.num_kv_heads
            mixed = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, enable_gqa=grouped
            )
            mixed = mixed.transpose(1, 2).flatten(2)
            x = x + self._linear(mixed, prefix + "self_attn.o_proj.weight")
            hidden = self._norm(x, prefix + "post_attention_layernorm.weight")
            gate = F.silu(self._linear(hidden, prefix + "mlp.gate_proj.weight"))
            up = self._linear(hidden, prefix + "mlp.up_proj.weight")
            x = x + self._linear(gate * up, prefix + "mlp.down_proj.weight")
        return self._norm(x, "model.norm.weight"), entries

    def logits(self, states: Tensor) -> Tensor:
        """Of the token behind each state.  # [..., hidden] -> [..., vocab_size]"""
        tied = self.config.tie_word_embeddings
        head = "model.embed_tokens.weight" if tied else "lm_head.weight"
        return F.linear(states, self.weights[head]).float()

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weights[name])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weights[name]
        return F.rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def block_causal(length: int, block_size: int) -> Tensor:
    """True where a row's block is the column's or a later one.  # bool [length, length]"""
    block = torch.arange(length) // block_size
    return block[:, None] >= block[None, :]
