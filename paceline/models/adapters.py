"""Adapters (LoRA, arXiv 2106.09685) in the format of PEFT, for the fast path.

A folder holds adapter_config.json and adapter_model.safetensors. A linear layer with the weight W
then computes ``W x + s B (A x)``, with ``s = lora_alpha / r``, or ``lora_alpha / sqrt(r)`` with
``use_rslora`` (arXiv 2312.03732). B is multiplied by s at load. The low-rank products are those of
the model's dtype on top of a base in any, also a quantised one.

As with models, nothing loads that is not understood: each tensor belongs to a linear layer that the
configuration names, each of those has its two tensors, and a field that asks for anything else is
refused by its name.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from paceline.errors import InvalidArgument, ModelNotFound
from paceline.model_names import ADAPTER_NAME
from paceline.models.layouts import WEIGHT_DTYPES, listed, read_config
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import linear_names, tensor_shapes, turned_pairs
from paceline.models.native_ops import NativeOps
from paceline.models.ops import AdaptedLayer, Adapter, LowPart, LowRank, Ops
from paceline.models.packing import Packer, Weight
from paceline.numerics import PORTABLE, digest_tensors

Tensor = torch.Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

# What the values of these fields mean here; with another value a field is refused.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Others replace the base's weights by what their first A and B leave of them.
    "init_lora_weights": (True, False, None, "gaussian", "eva", "orthogonal"),
    "layers_pattern": (None, [], "layers", ["layers"]),
}
# Modules that no adapter changes here.
_REFUSED = r"(^|\.)(embed_tokens|lm_head|experts\.\d+\.\w+|shared_expert\.\w+|router|mlp\.gate)$"
_READ = {
    "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "exclude_modules", "layers_to_transform",
}  # fmt: skip
# Of training, or of where things were.
_NO_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "revision", "peft_version", "task_type",
    "inference_mode", "lora_dropout", "megatron_core", "qalora_group_size", "loftq_config",
    "eva_config", "corda_config", "lora_ga_config", "runtime_config", "ensure_weight_tying",
}  # fmt: skip


class _Peft:
    """A checked adapter_config.json."""

    def __init__(self, name: str, folder: Path) -> None:
        self._name = name
        self.raw = raw = read_config(folder, CONFIG)
        for field, value in raw.items():
            if field in _MUST_BE:
                if value not in _MUST_BE[field]:
                    allowed = (json.dumps(each) for each in _MUST_BE[field])
                    raise self.refusal(field, value, " or ".join(allowed))
            elif field not in _READ | _NO_EFFECT and value not in (None, False, 0, "", [], {}):
                raise self.refusal(field, value, "nothing there: Paceline does not support it")
        if "peft_type" not in raw:
            raise self.refusal("peft_type", None, '"LORA"')
        self._ranks = self._pattern("rank_pattern", int)
        self._alphas = self._pattern("alpha_pattern", (int, float))
        self._rank = self._number("r", raw.get("r"), int)
        self._alpha = self._number("lora_alpha", raw.get("lora_alpha"), (int, float))
        self._targets = self._modules("target_modules")
        if not self._targets:
            raise self.refusal("target_modules", raw.get("target_modules"), "names, or one regex")
        self._excluded = self._modules("exclude_modules")
        layers = raw.get("layers_to_transform")
        self._layers = [layers] if isinstance(layers, int) else layers or []
        if not all(isinstance(layer, int) for layer in self._layers):
            raise self.refusal("layers_to_transform", layers, "numbers of layers")

    def refusal(self, field: str, value: object, allowed: str) -> InvalidArgument:
        return InvalidArgument(f"adapters.{self._name}.{field}", value, allowed)

    def _number(self, field: str, value: Any, kind: Any) -> Any:
        if not isinstance(value, kind) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refusal(field, value, "a number above 0")
        return value

    def _pattern(self, field: str, kind: Any) -> dict[str, Any]:
        found = self.raw.get(field) or {}
        if not isinstance(found, dict):
            raise self.refusal(field, found, "numbers by names of modules")
        return {key: self._number(f"{field}.{key}", each, kind) for key, each in found.items()}

    def _modules(self, field: str) -> str | list[str]:
        found = self.raw.get(field) or []
        if isinstance(found, list) and all(isinstance(each, str) for each in found):
            return found
        if not isinstance(found, str):
            raise self.refusal(field, found, "names, or one regex")
        return found

    def _matches(self, field: str, wanted: str | list[str], module: str) -> bool:
        if isinstance(wanted, str):
            try:
                return re.fullmatch(wanted, module) is not None
            except re.error as error:
                raise self.refusal(field, wanted, f"a regular expression: {error}") from None
        return any(module == each or module.endswith(f".{each}") for each in wanted)

    def adapts(self, module: str) -> bool:
        """Whether the adapter has matrices for a linear layer."""
        if self._excluded and self._matches("exclude_modules", self._excluded, module):
            return False
        layer = re.search(r"\.layers\.(\d+)\.", module)
        if self._layers and (layer is None or int(layer[1]) not in self._layers):
            return False
        if self._targets == "all-linear":
            return ".layers." in module  # neither the embedding nor the output layer
        return self._matches("target_modules", self._targets, module)

    def _of(self, field: str, patterns: Mapping[str, Any], module: str, default: Any) -> Any:
        """The value of the first pattern that ends the module's name, as PEFT looks it up."""
        for pattern, value in patterns.items():
            try:
                if re.match(rf"(.*\.)?({pattern})$", module):
                    return value
            except re.error as error:
                raise self.refusal(field, pattern, f"a regular expression: {error}") from None
        return default

    def rank(self, module: str) -> int:
        """Rank of a linear layer's matrices."""
        return int(self._of("rank_pattern", self._ranks, module, self._rank))

    def scale(self, module: str) -> float:
        """What the product of a linear layer's matrices is multiplied by."""
        alpha = self._of("alpha_pattern", self._alphas, module, self._alpha)
        rank = self.rank(module)
        return float(alpha / (math.sqrt(rank) if self.raw.get("use_rslora") else rank))


def load_adapters(
    folders: Mapping[str, Path],
    base: Path,
    config: LlamaConfig,
    ops: Ops,
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Adapter, ...]:
    """Adapters of a model, packed.

    Args:
        folders: in PEFT's format, by the adapters' names.
        base: the model's folder.
        config: of the model.
        ops: of the model. In the kernels adapters' products are of class portable, whatever the
            model's are of, and so its class stays what it is.
        dtype: of the model's activations; matrices are rounded to it.

    Raises:
        ModelNotFound: a file is missing or damaged.
        InvalidArgument: something in a folder is not understood, or is of another base.
    """
    pack = ops.pack
    if isinstance(ops, NativeOps):
        pack = Packer(dtype, numerics=PORTABLE).pack
    return tuple(
        _load(name, folder, base, config, pack, dtype, device) for name, folder in folders.items()
    )


def _load(
    name: str,
    folder: Path,
    base: Path,
    config: LlamaConfig,
    pack: Callable[[Tensor], Weight],
    dtype: torch.dtype,
    device: torch.device,
) -> Adapter:
    if not re.match(ADAPTER_NAME, name):
        raise InvalidArgument("adapters", name, f"names that match {ADAPTER_NAME}")
    try:
        peft = _Peft(name, folder)
        tensors = _tensors(name, folder)
    except ModelNotFound as error:
        raise ModelNotFound(f"adapter {name!r}: {error}") from error
    _warn_of_base(name, peft, base)
    shapes = tensor_shapes(config)
    pairs = _pairs(name, peft, shapes, tensors)
    for module, (a, b) in pairs.items():
        if (order := turned_pairs(config, module, len(b))) is not None:
            pairs[module] = a, b[order]
    digest = digest_tensors(
        ((f"{module}.{i}", part.to(dtype)) for module, pair in pairs.items() for i, part in
         enumerate(pair)), {},
    )  # fmt: skip
    layers = []
    for i in range(config.num_layers):
        products = {
            product: _low_rank(
                [pairs.get(module) for module in modules],
                [shapes[f"{module}.weight"][0] for module in modules],
                lambda part: pack(part.to(device, dtype).contiguous()),
            )
            for product, modules in linear_names(config, i).items()
        }
        layers.append(AdaptedLayer(**products))
    return Adapter(name, tuple(layers), digest)


def _tensors(name: str, folder: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / WEIGHTS
    if not file.is_file():
        raise ModelNotFound(f"folder {str(folder)!r} has no {WEIGHTS}")
    try:
        tensors: dict[str, Tensor] = load_file(str(file))
    except (SafetensorError, OSError) as error:
        raise ModelNotFound(f"{file} is damaged: {error}") from error
    for each, tensor in tensors.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in WEIGHT_DTYPES:
            raise InvalidArgument(
                f"adapters.{name}", f"{each} of dtype {dtype}", " or ".join(WEIGHT_DTYPES)
            )
    return tensors


def _warn_of_base(name: str, peft: _Peft, base: Path) -> None:
    """Warn of an adapter that was trained on a model of another name."""
    trained_on = str(peft.raw.get("base_model_name_or_path") or "")
    short = trained_on.rstrip("/").rpartition("/")[2].lower()
    known = f"{base.resolve()} {read_config(base).get('_name_or_path', '')}".lower()
    if short and short not in known:
        warnings.warn(
            f"adapter {name!r} was trained on {trained_on!r}, and the target is {str(base)!r}: "
            "its shapes fit, but only the weights it was trained on make sense with it",
            stacklevel=5,
        )


def _pairs(
    name: str,
    peft: _Peft,
    shapes: Mapping[str, tuple[int, ...]],
    tensors: dict[str, Tensor],
) -> dict[str, tuple[Tensor, Tensor]]:
    """A and scaled B of each linear layer that the adapter changes, in float32."""
    linears = [n.removesuffix(".weight") for n, shape in shapes.items() if len(shape) == 2]
    wanted = [module for module in linears if peft.adapts(module)]
    if not wanted:
        raise peft.refusal(
            "target_modules", peft.raw["target_modules"],
            f"some of the model's linear layers: {', '.join(_kinds(linears))}",
        )  # fmt: skip
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    for module in wanted:
        if re.search(_REFUSED, module):
            raise peft.refusal(
                "target_modules", module, "linear layers of attention and of dense MLPs"
            )
        outputs, inputs = shapes[f"{module}.weight"]
        rank = peft.rank(module)
        found = []
        for part, shape in (("lora_A", (rank, inputs)), ("lora_B", (outputs, rank))):
            full = f"{_PREFIX}{module}.{part}.weight"
            tensor = tensors.pop(full, None)
            if tensor is None:
                raise ModelNotFound(
                    f"adapter {name!r}: {WEIGHTS} lacks {full}, which target_modules asks for"
                )
            if tuple(tensor.shape) != shape:
                raise InvalidArgument(
                    f"adapters.{name}", f"{full} of shape {tuple(tensor.shape)}",
                    f"shape {shape}: that of the target and of rank {rank}",
                )  # fmt: skip
            found.append(tensor.float())
        pairs[module] = found[0], found[1] * peft.scale(module)
    if tensors:
        raise InvalidArgument(
            f"adapters.{name}", f"{WEIGHTS} with {listed(tensors)}",
            "tensors lora_A and lora_B of the linear layers that target_modules names, no others",
        )  # fmt: skip
    return pairs


def _kinds(modules: Sequence[str]) -> list[str]:
    """The last parts of the names of layers' modules."""
    return sorted({module.rpartition(".")[2] for module in modules if ".layers." in module})


def _low_rank(
    pairs: Sequence[tuple[Tensor, Tensor] | None],
    outputs: Sequence[int],
    pack: Callable[[Tensor], Weight],
) -> LowRank | None:
    """What the pairs of linear layers that are one product add to it; None: nothing.

    Args:
        outputs: of each layer, also of those without a pair.
    """
    firsts = accumulate(outputs, initial=0)
    parts = [
        LowPart(pack(pair[1]), first)
        for pair, first in zip(pairs, firsts, strict=False)
        if pair is not None
    ]
    if not parts:
        return None
    return LowRank(pack(torch.cat([pair[0] for pair in pairs if pair])), tuple(parts))
