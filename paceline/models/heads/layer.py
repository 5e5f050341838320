"""A decoder layer for heads: of the target's kind and size, trainable, and fast when it drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import InvalidArgument
from paceline.models.cuda_ops import fused_ops
from paceline.models.heads.base import HeadTarget
from paceline.models.kernels import KernelsUnavailable
from paceline.models.kv_cache import KVPool, PooledSequence
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import read_floats, stored_weights
from paceline.models.native_ops import NativeOps
from paceline.models.ops import Fuse, Layer, Ops, Output, Stack
from paceline.models.rope import rope_table
from paceline.models.rows import Rows, append_chains, append_rows
from paceline.models.torch_ops import TorchOps
from paceline.types import FloatArray, IntArray


class ResidualBlock(nn.Module):
    """``x + SiLU(W x + b)``, the identity at first."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class DecoderLayer(nn.Module):
    """One layer as in the target (without biases and head norms), with weights of its own.

    Args:
        config: of the target; gives all widths.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        size, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self.input_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.qkv = nn.Linear(size, q_size + 2 * kv_size, bias=False)
        self.out = nn.Linear(q_size, size, bias=False)
        self.post_norm = nn.RMSNorm(size, eps=config.rms_norm_eps)
        self.gate_up = nn.Linear(size, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, size, bias=False)

    def forward(
        self,
        x: Tensor,
        cos_sin: Tensor,
        mask: Tensor | None = None,
        earlier: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Tensor:
        """For training: all places of whole texts at once.

        Args:
            x: # [batch, length, hidden_size]
            cos_sin: rows of :func:`paceline.models.rope.rope_table`.  # [length, head_dim]
            mask: True where a place sees another; None is causal.
                # [length, places of all calls]
            earlier: keys and values of the calls before, which places see, too; this call
                appends its own.
        """
        config, (batch, length, _) = self.config, x.shape
        heads = self.qkv(self.input_norm(x)).view(batch, length, -1, config.head_dim)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads], 2)
        q, k = rotate(q, cos_sin), rotate(k, cos_sin)
        if earlier is not None:
            earlier.append((k, v))
            k, v = (torch.cat(parts, 1) for parts in zip(*earlier, strict=True))
        attended = attention(q, k, v, mask)
        x = x + self.out(attended.flatten(2))
        gate, up = self.gate_up(self.post_norm(x)).chunk(2, -1)
        result: Tensor = x + self.down(F.silu(gate) * up)
        return result


class TargetLayers:
    """Some layers of a target and its final norm, frozen, with the weights that it has.

    Not a module, so a head that holds one neither trains nor saves it.

    Args:
        count: number of layers; negative: the last ones.
        option: that gives it, for errors.

    Raises:
        InvalidArgument: the target has fewer layers, or layers of another kind.
    """

    def __init__(self, target: HeadTarget, count: int, option: str) -> None:
        config = target.config
        if abs(count) >= config.num_layers:
            raise InvalidArgument(option, abs(count), f"below {config.num_layers}")
        if not config.is_plain:
            allowed = f"0 for a target of type {config.model_type}: its layers are not Llama's"
            raise InvalidArgument(option, abs(count), allowed)
        if target.folder is None:
            raise InvalidArgument(option, abs(count), "0 for a target without a folder")
        stored, like = stored_weights(target.folder, config), target.embedding
        numbers = range(config.num_layers)[count:] if count < 0 else range(count)
        self.layers: list[DecoderLayer] = []
        for i in numbers:
            prefix = f"model.layers.{i}."
            own = {
                name.removeprefix(prefix): read_floats(tensor)
                for name, tensor in stored.items()
                if name.startswith(prefix)
            }
            try:
                layer = DecoderLayer(config)
                layer.load_state_dict(_renamed(own))
            except (KeyError, RuntimeError) as error:
                raise InvalidArgument(
                    option, abs(count),
                    "0 for this target: its layers are not Llama's (biases, norms of heads)",
                ) from error  # fmt: skip
            self.layers.append(layer.to(like.device, like.dtype).requires_grad_(False))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norm.load_state_dict({"weight": read_floats(stored["model.norm.weight"])})
        self.norm.to(like.device, like.dtype).requires_grad_(False)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention in training, with heads in groups.

    Args:
        q: # [batch, n, num_heads, head_dim]
        k, v: # [batch, m, num_kv_heads, head_dim]
        mask: True where a query sees a key; None is causal.  # bool [n, m]

    Returns:
        # [batch, n, num_heads, head_dim]
    """
    groups = q.shape[2] // k.shape[2]
    if mask is not None and q.is_cuda:  # kernels with masks know no groups there
        k, v, groups = k.repeat_interleave(groups, 2), v.repeat_interleave(groups, 2), 1
    attended = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        attn_mask=mask, is_causal=mask is None, enable_gqa=groups > 1,
    )  # fmt: skip
    return attended.transpose(1, 2)


def all_layers(target: HeadTarget) -> TargetLayers:
    """All layers of a target."""
    count = target.config.num_layers
    layers = TargetLayers(target, count - 1, "num_layers")
    layers.layers += TargetLayers(target, -1, "num_layers").layers
    return layers


def _renamed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A Llama checkpoint's weights of one layer by the names of :class:`DecoderLayer`.

    Other weights keep their names, and loading them fails.
    """
    rest = dict(tensors)

    def joined(*names: str) -> Tensor:
        return torch.cat([rest.pop(f"{name}_proj.weight") for name in names])

    renamed = {
        "input_norm.weight": rest.pop("input_layernorm.weight"),
        "qkv.weight": joined("self_attn.q", "self_attn.k", "self_attn.v"),
        "out.weight": joined("self_attn.o"),
        "post_norm.weight": rest.pop("post_attention_layernorm.weight"),
        "gate_up.weight": joined("mlp.gate", "mlp.up"),
        "down.weight": joined("mlp.down"),
    }
    return {**rest, **renamed}


def rotate(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotary embedding of the first numbers of heads.

    # [..., length, heads, head_dim], [length, rotary_dim]
    """
    cosine, sine = cos_sin.to(heads.dtype)[:, None].chunk(2, -1)  # [length, 1, rotary_dim / 2]
    turning, rest = heads[..., : cos_sin.shape[-1]], heads[..., cos_sin.shape[-1] :]
    a, b = turning.chunk(2, -1)
    return torch.cat([a * cosine - b * sine, b * cosine + a * sine, rest], -1)


class LayerStack:
    """Trained layers with a KV cache: committed tokens as a chain, drafted ones as a tree.

    Args:
        layers: their weights are packed here; later changes of them have no effect.
        kv_tokens: maximum number of tokens of the target's sessions; the cache has room for as many
            drafted ones.
        int8, int4: round weights to eight bits, or to blocks of four, where the C kernels run.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        kv_tokens: int | None = None,
        *,
        int8: bool = False,
        int4: bool = False,
    ) -> None:
        self.config = config = layers[0].config
        weight = layers[0].out.weight
        self.ops = layer_ops(config, weight, int8=int8, int4=int4)
        self.stack = Stack(
            layers=tuple(_packed(layer, self.ops) for layer in layers),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            cos_sin=rope_table(config).to(weight.device).contiguous(),
        )
        if weight.is_cuda:
            self.ops = fused_ops(self.stack, by_row=False)
        # A tree has more nodes while it grows than the target has reserved room for.
        tokens = 2 * (kv_tokens or min(16 * config.context_length, 65536))
        self.pool = KVPool(
            len(layers), tokens, config.num_kv_heads, config.head_dim, weight.dtype, weight.device
        )

    def new_sequence(self) -> PooledSequence:
        return PooledSequence(self.config.context_length)

    def append(self, parts: Sequence[tuple[PooledSequence, Sequence[int]]]) -> Rows:
        """Pending entries for new rows; see :meth:`run`.

        Args:
            parts: sequences with the parents of their new entries; -1 is the committed prefix.
        """
        return append_rows(
            self.pool, [(s, (), parents) for s, parents in parts], self.config.context_length
        )

    def run(self, inputs: Tensor, rows: Rows, first: int = 0, last: int | None = None) -> Tensor:
        """The layers from ``first`` to before ``last``, or all, on new rows.

        # [num_rows, hidden_size] -> the same
        """
        x = inputs.contiguous().clone()
        last = len(self.stack.layers) if last is None else last
        self.ops.run_layers(self.stack, first, last, x, self.pool.keys, self.pool.values, rows)
        return x

    def has_chains(self, target: HeadTarget) -> bool:
        """Whether :meth:`greedy_chain` works: it needs the C kernels."""
        return isinstance(self.ops, NativeOps) and target.packed_lm_head is not None

    def greedy_chain(
        self,
        sequences: Sequence[PooledSequence],
        given: Sequence[Sequence[int]],
        num_steps: int,
        target: HeadTarget,
        fuse: Fuse,
        output: Output | None = None,
        stop_below: FloatArray | None = None,
    ) -> IntArray:
        """Give sequences some tokens and continue each by argmax, all steps in one call.

        The new entries are pending, after pending ones that are a chain.

        Args:
            given: what follows the last entry of each sequence, at least one token.
            fuse: makes the input of a step from the token and the state of the step before.
            output: makes logits from a state; None is the target's output layer.
            stop_below: a sequence ends after a token whose probability is less than this.
                # [num_steps, num_sequences]

        Returns:
            The new tokens, -1 behind the end of a sequence; the last of them gets no entry.
            # [num_steps, num_sequences]
        """
        assert isinstance(self.ops, NativeOps)
        if output is None:
            assert target.packed_lm_head is not None
            output = Output(None, target.packed_lm_head, None)
        rows = append_chains(self.pool, sequences, [*map(len, given)], num_steps)
        return self.ops.greedy_chain(
            self.stack, len(self.stack.layers), target.embedding, output.norm, output.weight,
            self.pool.keys, self.pool.values, rows, given, num_steps,
            fuse=fuse, vocabulary=output.vocabulary, shortlist=output.shortlist,
            stop_below=stop_below,
        )  # fmt: skip

    def commit(self, sequence: PooledSequence, entries: Sequence[int]) -> None:
        """Keep a path of pending entries, free the other ones."""
        self.pool.commit(sequence, entries)

    def free(self, sequence: PooledSequence) -> None:
        """Free everything."""
        self.pool.free(sequence)


def distant_target(
    folder: Path, *, dtype: torch.dtype, device: torch.device | str, kv_tokens: int | None
) -> HeadTarget:
    """The parts of a target on disk, to draft with where the target itself is not.

    Reads the embedding and the output layer alone, and packs the latter as the target would.

    Args:
        kv_tokens: as :attr:`HeadTarget.kv_tokens`.

    Raises:
        ModelNotFound, InvalidArgument: as :meth:`HeadTarget.from_folder`.
    """
    target = HeadTarget.from_folder(folder, dtype=dtype, device=device)
    target = replace(target, kv_tokens=kv_tokens)
    ops = layer_ops(target.config, target.lm_head)
    if not isinstance(ops, NativeOps) or target.config.differs.finishes_logits:
        return target
    head = ops.pack(target.lm_head.contiguous())
    return replace(
        target, packed_lm_head=head,
        fast_logits=lambda hidden: ops.linear(hidden.contiguous(), head).float(),
    )  # fmt: skip


def layer_ops(
    config: LlamaConfig, weight: Tensor, *, int8: bool = False, int4: bool = False
) -> Ops:
    """What computes a head's layers with weights like this one; options as in LayerStack."""
    widths = config.head_dim, config.hidden_size, config.intermediate_size
    if NativeOps.supports(weight.dtype, weight.device, *widths):
        try:
            return NativeOps(weight.dtype, int8=int8, int4=int4)
        except KernelsUnavailable:
            pass  # the target has warned already
    return TorchOps(by_row=False)


def _packed(layer: DecoderLayer, ops: Ops) -> Layer:
    def frozen(tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous()

    return Layer(
        input_norm=frozen(layer.input_norm.weight),
        qkv=ops.pack(frozen(layer.qkv.weight)),
        qkv_bias=None,
        q_norm=None,
        k_norm=None,
        out=ops.pack(frozen(layer.out.weight)),
        out_bias=None,
        post_norm=frozen(layer.post_norm.weight),
        gate_up=ops.pack(frozen(layer.gate_up.weight)),
        gate_up_bias=None,
        down=ops.pack(frozen(layer.down.weight)),
        down_bias=None,
        window=None,
    )
