"""The fast path: Llama, Mistral, Qwen2 and Qwen3 checkpoints in Hugging Face format.

One packed forward serves any mix of prompts, chains and trees of any number of sequences. Rows of
all of them lie behind one another; only attention knows where a row's context is. With
``batch_invariant`` the logits of a token are bit-identical whatever is computed beside it: matrix
products see at least ``_min_rows`` rows (found by a check at load, because libraries use another
algorithm for one or two), and everything else treats rows one by one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from paceline.errors import InvalidArgument, ModelNotFound
from paceline.models.base import ForwardResult, KVSequence, Segment
from paceline.models.kernels import KernelsUnavailable
from paceline.models.kv_cache import KVPool, PooledSequence
from paceline.models.ops import NativeOps, Ops, Rows, TorchOps
from paceline.types import Need

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")

Tensor = torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The numbers of a Llama-type model, from its config.json."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: dict[str, Any]
    windows: tuple[int | None, ...]  # sliding window of each layer, None = full attention

    @staticmethod
    def from_folder(folder: Path) -> LlamaConfig:
        """Read config.json.

        Raises:
            ModelNotFound: the file is missing or lacks a key.
            InvalidArgument: a model type or a feature that this file does not implement.
        """
        raw = read_config(folder)
        try:
            return LlamaConfig._from_dict(raw)
        except KeyError as error:
            raise ModelNotFound(f"{folder}/config.json lacks {error}") from error

    @staticmethod
    def _from_dict(raw: dict[str, Any]) -> LlamaConfig:
        model_type = raw["model_type"]
        if model_type not in MODEL_TYPES:
            raise InvalidArgument("model_type", model_type, f"one of {', '.join(MODEL_TYPES)}")
        if raw.get("hidden_act", "silu") != "silu":
            raise InvalidArgument("hidden_act", raw["hidden_act"], "silu")
        heads, layers = raw["num_attention_heads"], raw["num_hidden_layers"]
        # Older checkpoints have rope_theta and rope_scaling, newer ones rope_parameters.
        rope = {"rope_type": "default", "rope_theta": raw.get("rope_theta", 10000.0)}
        rope |= raw.get("rope_scaling") or {}
        rope |= raw.get("rope_parameters") or {}
        rope["rope_type"] = rope.get("type", rope["rope_type"]) or "default"
        window = raw.get("sliding_window")
        if model_type.startswith("qwen") and not raw.get("use_sliding_window", False):
            window = None
        kinds = raw.get("layer_types") or ["sliding_attention"] * layers
        return LlamaConfig(
            model_type=model_type,
            vocab_size=raw["vocab_size"],
            hidden_size=raw["hidden_size"],
            intermediate_size=raw["intermediate_size"],
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            context_length=raw.get("max_position_embeddings", 2048),
            rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
            tie_word_embeddings=raw.get("tie_word_embeddings", False),
            rope=rope,
            windows=tuple(window if kind == "sliding_attention" else None for kind in kinds),
        )


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed config.json of a model folder; ModelNotFound says what is missing."""
    if not folder.is_dir():
        raise ModelNotFound(f"model folder {str(folder)!r} does not exist")
    file = folder / "config.json"
    if not file.is_file():
        raise ModelNotFound(f"model folder {str(folder)!r} has no config.json")
    try:
        return dict(json.loads(file.read_text()))
    except ValueError as error:
        raise ModelNotFound(f"{file} is not valid JSON: {error}") from error


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards that its index names."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            raise ModelNotFound(f"model folder {str(folder)!r} has no {name}")
        try:
            tensors |= load_file(str(folder / name))
        except SafetensorError as error:
            raise ModelNotFound(f"{folder / name} is damaged: {error}") from error
    return tensors


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    input_norm: Tensor
    qkv: Tensor  # [(H + 2G) * D, hidden]
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    out: Tensor  # [hidden, H * D]
    out_bias: Tensor | None
    post_norm: Tensor
    gate_up: Tensor  # [2 * ffn, hidden]
    gate_up_bias: Tensor | None
    down: Tensor  # [hidden, ffn]
    down_bias: Tensor | None


class LlamaRunner:
    """A Llama-type model with its KV pool (see :class:`paceline.models.base.ModelRunner`).

    Args:
        folder: a Hugging Face model folder.
        dtype: of weights, activations and KV entries.
        kv_tokens: capacity of the KV pool over all sequences.
        batch_invariant: see the module; ``None`` means on for float32 on a CPU.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        kv_tokens: int | None = None,
        batch_invariant: bool | None = None,
    ) -> None:
        folder, device = Path(folder), torch.device(device)
        self.config = config = LlamaConfig.from_folder(folder)
        self.dtype, self.device = dtype, device
        self.vocab_size, self.context_length = config.vocab_size, config.context_length
        if batch_invariant is None:
            batch_invariant = device.type == "cpu" and dtype is torch.float32
        self.batch_invariant = batch_invariant
        self._load(folder, load_tensors(folder))
        self._ops = self._choose_ops()
        self._cos_sin = self._rope_table()
        tokens = kv_tokens or min(16 * config.context_length, 65536)
        self._pool = KVPool(
            config.num_layers, tokens, config.num_kv_heads, config.head_dim, dtype, device
        )
        self._scale = config.head_dim**-0.5
        self._min_rows, self._tile, self._num_threads = 1, 0, 0

    # --- loading -------------------------------------------------------------------------------

    def _load(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        config = self.config

        def take(name: str, *shape: int) -> Tensor:
            if name not in tensors:
                raise ModelNotFound(f"the weights in {str(folder)!r} lack {name}")
            tensor = tensors.pop(name)
            if tensor.shape != shape:
                raise ModelNotFound(
                    f"{name} in {str(folder)!r} has shape {tuple(tensor.shape)}, but config.json "
                    f"says {shape}"
                )
            return tensor.to(self.device, self.dtype).contiguous()

        def fused(names: Sequence[str], sizes: Sequence[int], *shape: int) -> Tensor:
            parts = [take(n, size, *shape) for n, size in zip(names, sizes, strict=True)]
            return torch.cat(parts)

        def bias(names: Sequence[str], sizes: Sequence[int]) -> Tensor | None:
            return fused(names, sizes) if names[0] in tensors else None

        hidden, ffn, dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
        self._embedding = take("model.embed_tokens.weight", config.vocab_size, hidden)
        self._layers: list[_Layer] = []
        for i in range(config.num_layers):
            at, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            qkv_names, qkv_sizes = [f"{at}.{x}_proj" for x in "qkv"], [q_size, kv_size, kv_size]
            has_head_norms = f"{at}.q_norm.weight" in tensors
            self._layers.append(
                _Layer(
                    input_norm=take(f"model.layers.{i}.input_layernorm.weight", hidden),
                    qkv=fused([f"{n}.weight" for n in qkv_names], qkv_sizes, hidden),
                    qkv_bias=bias([f"{n}.bias" for n in qkv_names], qkv_sizes),
                    q_norm=take(f"{at}.q_norm.weight", dim) if has_head_norms else None,
                    k_norm=take(f"{at}.k_norm.weight", dim) if has_head_norms else None,
                    out=take(f"{at}.o_proj.weight", hidden, q_size),
                    out_bias=bias([f"{at}.o_proj.bias"], [hidden]),
                    post_norm=take(f"model.layers.{i}.post_attention_layernorm.weight", hidden),
                    gate_up=fused(
                        [f"{mlp}.gate_proj.weight", f"{mlp}.up_proj.weight"], [ffn, ffn], hidden
                    ),
                    gate_up_bias=bias([f"{mlp}.gate_proj.bias", f"{mlp}.up_proj.bias"], [ffn, ffn]),
                    down=take(f"{mlp}.down_proj.weight", hidden, ffn),
                    down_bias=bias([f"{mlp}.down_proj.bias"], [hidden]),
                )
            )
        self._final_norm = take("model.norm.weight", hidden)
        if config.tie_word_embeddings or "lm_head.weight" not in tensors:
            self._head = self._embedding
        else:
            self._head = take("lm_head.weight", config.vocab_size, hidden)

    def _choose_ops(self) -> Ops:
        native = (
            self.device.type == "cpu"
            and self.dtype in NativeOps.DTYPES
            and self.config.head_dim <= NativeOps.MAX_HEAD_DIM
        )
        if native:
            try:
                return NativeOps(self.dtype)
            except KernelsUnavailable as error:
                import warnings

                warnings.warn(f"running without the C kernels, slower: {error}", stacklevel=3)
        return TorchOps(by_row=self.batch_invariant)

    def _rope_table(self) -> Tensor:
        """Cosines and sines of every position.  # [context_length, head_dim] float32"""
        config, rope = self.config, self.config.rope
        scaling = 1.0
        if rope["rope_type"] == "default":
            exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            frequencies = 1.0 / rope["rope_theta"] ** exponent
        else:
            # Long-context variants follow transformers, which defines these checkpoints.
            from transformers import LlamaConfig as Reference
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            if rope["rope_type"] not in ROPE_INIT_FUNCTIONS:
                known = ", ".join(("default", *sorted(ROPE_INIT_FUNCTIONS)))
                raise InvalidArgument("rope_type", rope["rope_type"], f"one of {known}")
            reference = Reference(
                hidden_size=config.hidden_size, num_attention_heads=config.num_heads,
                head_dim=config.head_dim, max_position_embeddings=config.context_length,
                rope_parameters=rope,
            )  # fmt: skip
            frequencies, scaling = ROPE_INIT_FUNCTIONS[rope["rope_type"]](reference, "cpu")
        positions = torch.arange(config.context_length, dtype=torch.float32)
        angles = torch.outer(positions, frequencies.float())
        table = torch.cat([angles.cos(), angles.sin()], dim=-1) * scaling
        return table.to(self.device).contiguous()

    def _find_invariant_products(self) -> tuple[int, int]:
        """Smallest batch from which a row of a product stops depending on the others.

        Returns ``(min_rows, tile)``: batches are padded to ``min_rows``; when no padding is
        enough on this machine, ``tile`` > 0 asks for products of exactly that many rows each.
        """
        generator = torch.Generator().manual_seed(0)
        layer, head = self._layers[0], self._head
        weights = {w.shape: w for w in (layer.qkv, layer.out, layer.gate_up, layer.down, head)}
        inputs = {
            shape: torch.randn(67, shape[1], generator=generator).to(self.device, self.dtype)
            for shape in weights
        }
        counts = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 33, 48, 64, 67)
        agrees = {
            count: all(
                torch.equal(
                    F.linear(x[-count:], weights[shape]), F.linear(x, weights[shape])[-count:]
                )
                for shape, x in inputs.items()
            )
            for count in counts
        }
        for minimum in (1, 2, 4, 8, 16):
            if all(agrees[count] for count in counts if count >= minimum):
                return minimum, 0
        return 1, 8

    # --- sequences -----------------------------------------------------------------------------

    @property
    def kv_capacity(self) -> int:
        return self._pool.capacity

    @property
    def num_free(self) -> int:
        return self._pool.num_free

    @property
    def num_parameters(self) -> int:
        """Number of weights, a tied embedding counted once."""
        tensors = [self._embedding, self._final_norm]
        if self._head is not self._embedding:
            tensors.append(self._head)
        for layer in self._layers:
            fields = (getattr(layer, name) for name in _Layer.__slots__)
            tensors += [t for t in fields if t is not None]
        return sum(t.numel() for t in tensors)

    def new_sequence(self) -> KVSequence:
        return PooledSequence(self.context_length)

    def free(self, sequence: KVSequence) -> None:
        assert isinstance(sequence, PooledSequence)
        self._pool.free(sequence)

    def commit(self, sequence: KVSequence, pending: Sequence[int]) -> None:
        assert isinstance(sequence, PooledSequence)
        self._pool.commit(sequence, pending)

    def truncate(self, sequence: KVSequence, length: int) -> None:
        assert isinstance(sequence, PooledSequence)
        self._pool.truncate(sequence, length)

    def keys_and_values(self, sequence: KVSequence) -> tuple[Tensor, Tensor]:
        """Committed KV entries in position order.  # 2 x [layers, length, kv_heads, head_dim]"""
        assert isinstance(sequence, PooledSequence)
        index = torch.from_numpy(sequence.slots[: sequence.length].astype(np.int64))
        index = index.to(self.device)
        return self._pool.keys[:, index], self._pool.values[:, index]

    # --- forward -------------------------------------------------------------------------------

    @torch.inference_mode()
    def forward(
        self, segments: Sequence[Segment], wants: frozenset[Need] = frozenset()
    ) -> ForwardResult:
        if self.batch_invariant and torch.get_num_threads() != self._num_threads:
            # Products are split over threads, so what is invariant depends on their number.
            self._num_threads = torch.get_num_threads()
            self._min_rows, self._tile = self._find_invariant_products()
        tokens, selected, offsets, rows = self._pack(segments)
        x = F.embedding(tokens, self._embedding)
        hidden = self._run_layers(x, rows)
        if not len(selected):
            return ForwardResult(x.new_empty(0, self.vocab_size), offsets, {})
        hidden = hidden[selected]
        count = len(selected)
        if count < self._min_rows:
            hidden = F.pad(hidden, (0, 0, 0, self._min_rows - count))
        logits = self._linear(hidden, self._head, None)[:count].float()
        extras = {}
        if Need.HIDDEN_STATES in wants:
            extras[Need.HIDDEN_STATES] = hidden[:count]
        return ForwardResult(logits, offsets, extras)

    def _run_layers(self, x: Tensor, rows: Rows) -> Tensor:
        """All layers and the final norm.  # [R, hidden] -> [R, hidden]"""
        ops, eps, scale = self._ops, self.config.rms_norm_eps, self._scale
        delta: Tensor | None = None
        windowed = {window: _with_window(rows, window) for window in set(self.config.windows)}
        for i, layer in enumerate(self._layers):
            keys, values = self._pool.keys[i], self._pool.values[i]
            normed = ops.add_rmsnorm(x, delta, layer.input_norm, eps)
            qkv = self._linear(normed, layer.qkv, layer.qkv_bias)
            ops.rope_store(qkv, self._cos_sin, rows, keys, values, layer.q_norm, layer.k_norm, eps)
            context = windowed[self.config.windows[i]]
            attended = ops.attention(qkv, keys, values, context, scale)
            delta = self._linear(attended, layer.out, layer.out_bias)
            normed = ops.add_rmsnorm(x, delta, layer.post_norm, eps)
            gate_up = self._linear(normed, layer.gate_up, layer.gate_up_bias)
            delta = self._linear(ops.silu_mul(gate_up), layer.down, layer.down_bias)
        return ops.add_rmsnorm(x, delta, self._final_norm, eps)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not self._tile:
            return F.linear(x, weight, bias)
        padded = F.pad(x, (0, 0, 0, -len(x) % self._tile))
        parts = [F.linear(part, weight, bias) for part in padded.split(self._tile)]
        return torch.cat(parts)[: len(x)]

    def _pack(self, segments: Sequence[Segment]) -> tuple[Tensor, Tensor, tuple[int, ...], Rows]:
        """Append all tokens as pending entries and lay the rows of the batch out."""
        total = sum(len(segment.token_ids) for segment in segments)
        count = max(total, self._min_rows)
        table = np.zeros((5, count), np.int32)  # positions, slots, start, prefix, path lengths
        positions, slots, starts, prefixes, path_lengths = table
        prefixes[total:] = 1  # padding rows attend to the scratch slot
        addresses = np.full((2, count), _SCRATCH.ctypes.data, np.int64)
        tables = [_SCRATCH] * count
        tokens = np.zeros(count, np.int64)
        path_slots: list[int] = []
        path_offsets = np.zeros(count, np.int32)
        selected: list[int] = []
        offsets = [0]
        row = 0
        for segment in segments:
            sequence = segment.sequence
            assert isinstance(sequence, PooledSequence)
            size, first = len(segment.token_ids), sequence.num_pending
            if segment.parent_indices is None:
                parents = list(range(first - 1, first + size - 1))
            else:
                parents = segment.parent_indices.tolist()
            end = row + size
            slots[row:end] = self._pool.append(sequence, parents)
            tokens[row:end] = segment.token_ids
            addresses[0, row:end] = sequence.address
            tables[row:end] = [sequence.slots] * size
            if sequence.chain:
                start = sequence.length + first
                positions[row:end] = np.arange(start, start + size)
                prefixes[row:end] = positions[row:end] + 1
            else:
                prefixes[row:end] = sequence.length
                for i in range(size):
                    path = sequence.path_slots(first + i)
                    positions[row + i] = sequence.length + len(path) - 1
                    path_offsets[row + i] = len(path_slots)
                    path_lengths[row + i] = len(path)
                    path_slots += path
            if segment.logits == "all":
                selected += range(row, end)
            elif segment.logits == "last":
                selected.append(end - 1)
            offsets.append(len(selected))
            row = end
        paths = np.asarray(path_slots or [0], np.int32)
        addresses[1] = 4 * path_offsets.astype(np.int64) + int(paths.ctypes.data)
        if int(positions.max()) >= self.context_length:
            raise InvalidArgument(
                "position", int(positions.max()), f"below the context of {self.context_length}"
            )
        base, wide = int(table.ctypes.data), int(addresses.ctypes.data)
        rows = Rows(
            positions, slots, starts, prefixes, path_lengths, addresses[0], addresses[1],
            tables, paths, path_offsets,
            longest=int((prefixes + path_lengths).max()),
            addresses=(*(base + 4 * count * i for i in range(5)), wide, wide + 8 * count),
        )  # fmt: skip
        index = torch.tensor(selected, dtype=torch.long, device=self.device)
        return torch.from_numpy(tokens).to(self.device), index, tuple(offsets), rows


_SCRATCH = np.zeros(1, np.int32)  # slot table of a padding row


def _with_window(rows: Rows, window: int | None) -> Rows:
    """The same rows, seeing at most the last ``window`` positions of their context."""
    if window is None or rows.longest <= window:
        return rows
    # A path is never cut: it would take a draft deeper than the window.
    starts = np.maximum(0, rows.prefix_length + rows.path_length - window).astype(np.int32)
    starts = np.minimum(starts, rows.prefix_length)
    addresses = (*rows.addresses[:2], int(starts.ctypes.data), *rows.addresses[3:])
    return Rows(
        rows.positions, rows.slots, starts, rows.prefix_length, rows.path_length,
        rows.prefix_address, rows.path_address, rows.tables, rows.paths, rows.path_offset,
        longest=min(rows.longest, math.ceil(window) + int(rows.path_length.max())),
        addresses=addresses,
    )  # fmt: skip
