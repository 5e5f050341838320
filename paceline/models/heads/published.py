"""Published drafters: checkpoints of the hub, in the formats of their authors, as heads.

The folder's ``config.json`` and the names of its tensors decide the kind; ``READERS`` has what
reads each kind. Supported are EAGLE and EAGLE-3 in SafeAILab's layout, EAGLE-3, P-EAGLE and xPress
in that of ``speculators``, Medusa and Hydra in their authors', and DFlash and DSpark in either. A
file of pickles is read without running what is in it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from paceline.errors import InvalidArgument, ModelNotFound
from paceline.models.architectures import PLAIN_MODEL_TYPES
from paceline.models.heads.base import Head, HeadTarget
from paceline.models.heads.block_checkpoints import block_kind, read_block_head
from paceline.models.heads.filling import draft_vocabulary, fill, layers_config
from paceline.models.heads.hydra import Hydra, HydraOptions
from paceline.models.heads.medusa import Medusa, MedusaOptions
from paceline.models.heads.model_mtp import DEEPSEEK, QWEN, ModelMtp
from paceline.models.heads.mtp import Mtp, MtpOptions, mtp_layout, own_name
from paceline.models.heads.peagle import PEagle, PEagleOptions
from paceline.models.heads.published_eagle import Layout, PublishedEagle, PublishedEagle3
from paceline.models.layouts import read_config, stored_tensors
from paceline.models.llama_config import LlamaConfig
from paceline.models.llama_tensors import MTP_PREFIX

_OF_TARGET = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight")
_PICKLES = ("medusa_lm_head.pt", "hydra_lm_head.pt", "pytorch_model.bin")
_ANY_LENGTH = ("default", "linear", "llama3")  # rope types whose table does not depend on a length


@dataclass(frozen=True, slots=True)
class Published:
    """A folder with a published drafter.

    Attributes:
        kind: ``eagle``, ``eagle3``, ``medusa``, ``hydra``, or what the config calls it.
        config: its parsed config.json.
        prefix: of the names of its tensors, where the folder has others as well.
    """

    folder: Path
    kind: str
    config: Mapping[str, Any]
    prefix: str = ""

    @property
    def named(self) -> str:
        """What errors call it."""
        return str(self.folder)

    def refuse(self, found: str, expected: str) -> InvalidArgument:
        """The error about this drafter."""
        return InvalidArgument("head", f"{self.named}, {found}", expected)

    def tensors(self) -> dict[str, Tensor]:
        """All its tensors.

        Raises:
            ModelNotFound: no file of weights, or a damaged one.
            InvalidArgument: a pickle that holds more than tensors.
        """
        if not self.prefix:
            return _tensors(self.folder)
        return {
            name.removeprefix(self.prefix): tensor.read()
            for name, tensor in stored_tensors(self.folder).items()
            if name.startswith(self.prefix)
        }


def mtp_layer_in(target: Path) -> Published | None:
    """The MTP layer in a target's own checkpoint; None if it has none."""
    names = _names(target)
    if f"{MTP_PREFIX}{QWEN.fc}" in names:
        return Published(target, "mtp", read_config(target), MTP_PREFIX)
    config = read_config(target)
    behind = f"model.layers.{config.get('num_hidden_layers')}."
    return Published(target, "mtp", config, behind) if f"{behind}{DEEPSEEK.fc}" in names else None


def find_published(folder: Path) -> Published | None:
    """What a folder holds; None if it holds no published drafter.

    It reads no weights, and nothing again while the folder stays as it is: every request of method
    ``auto`` asks.
    """
    try:
        times = folder.stat().st_mtime_ns, (folder / "config.json").stat().st_mtime_ns
    except OSError:
        return None
    return _find(folder, times)


@lru_cache(maxsize=256)
def _find(folder: Path, times: tuple[int, int]) -> Published | None:
    """As :func:`find_published`, of a folder and its config.json last changed at ``times``."""
    try:
        config = read_config(folder)
    except ModelNotFound:
        return None
    if "kind" in config and "options" in config:
        return None  # a head of Paceline's own
    kind = _kind(folder, config)
    return None if kind is None else Published(folder, kind, config)


def published_in(folder: Path) -> Iterator[Published]:
    """The drafter that a folder is, or those in its subfolders."""
    places = [folder, *sorted(folder.iterdir())] if folder.is_dir() else []
    for place in places:
        found = find_published(place) if place.is_dir() else None
        if found is not None:
            yield found
            if place == folder:
                return


def load_published(found: Published, target: HeadTarget) -> Head:
    """The drafter, ready to draft for ``target``.

    Raises:
        ModelNotFound: a missing or damaged file.
        InvalidArgument: an unknown kind, a drafter for another target or tokenizer, a field or
            a tensor that changes what it computes in a way that Paceline does not.
    """
    reader = READERS.get(found.kind)
    if reader is None:
        raise found.refuse(f"a drafter of kind {found.kind}", f"one of {', '.join(READERS)}")
    _check_tokenizer(found, target)
    head = reader(found, target)
    head.to(target.embedding.device, target.embedding.dtype).requires_grad_(False)
    head.eval()
    head.prepare()
    return head


def problem_with(found: Published, config: Mapping[str, Any]) -> str:
    """Why a drafter does not fit the target with this config.json, from sizes; or nothing."""
    if found.kind not in READERS:
        return f"unknown kind {found.kind}"
    own = _layers_config(found.config)
    for key in ("hidden_size", "vocab_size"):
        there, here = own.get(key), config.get(key)
        if there is not None and there != here:
            return f"{key} {there}, the target's is {here}"
    return ""


# --- what a folder holds --------------------------------------------------------------------------


def _kind(folder: Path, config: Mapping[str, Any]) -> str | None:
    block = block_kind(config)
    if block is not None:
        return block
    if "speculators_model_type" in config:
        return str(config["speculators_model_type"])
    for kind in ("medusa", "hydra"):
        if f"{kind}_num_heads" in config or f"{kind}_num_layers" in config:
            return kind
    architectures = " ".join(config.get("architectures") or ())
    if "Eagle3" in architectures or "draft_vocab_size" in config:
        return "eagle3"
    if "model_type" not in config:
        return None
    names = _names(folder)
    if "midlayer.self_attn.q_proj.weight" in names:
        return "eagle3"
    return "eagle" if {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names else None


def _names(folder: Path) -> set[str]:
    try:
        files = _safetensors(folder)
        if not files:
            return set(_tensors(folder, "meta"))
        names: set[str] = set()
        for file in files:
            with safe_open(str(file), "pt") as opened:
                names |= set(opened.keys())
        return names
    except (ModelNotFound, InvalidArgument, SafetensorError, OSError):
        return set()


def _safetensors(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _tensors(folder: Path, device: str = "cpu") -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for part in _safetensors(folder):
        try:
            tensors |= load_file(part)
        except (SafetensorError, OSError) as error:
            raise ModelNotFound(f"{part} is damaged: {error}") from error
    if tensors:
        return tensors
    file = next((folder / name for name in _PICKLES if (folder / name).is_file()), None)
    if file is None:
        raise ModelNotFound(
            f"folder {str(folder)!r} has no weights: expected safetensors or one of "
            f"{', '.join(_PICKLES)}"
        )
    try:
        loaded = torch.load(file, map_location=device, weights_only=True)
    except Exception as error:  # of pickle, zip and torch, many kinds
        allowed = "a file of tensors alone: convert it to safetensors where you trust it"
        raise InvalidArgument("head", f"{file}, which is damaged or runs code", allowed) from error
    if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
        raise InvalidArgument("head", str(file), "a dictionary of tensors")
    return loaded


def _check_tokenizer(found: Published, target: HeadTarget) -> None:
    own = found.folder / "tokenizer.json"
    theirs = None if target.folder is None else target.folder / "tokenizer.json"
    if theirs is None or not (own.is_file() and theirs.is_file()):
        return
    a, b = (json.loads(file.read_text()).get("model", {}).get("vocab") for file in (own, theirs))
    if a != b:
        raise found.refuse(
            f"whose tokenizer.json has {len(a or ())} tokens",
            f"the target's tokenizer, {len(b or ())} tokens with the same numbers",
        )


# --- EAGLE ----------------------------------------------------------------------------------------


def _layers_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json that the drafter's layers would have as a model of their own."""
    inner = config.get("transformer_layer_config")
    return dict(inner if isinstance(inner, dict) else config)


def _eagle(found: Published, target: HeadTarget) -> Head:
    if "speculators_model_type" in found.config:
        raise found.refuse("EAGLE in the format of speculators", "SafeAILab's format, or EAGLE-3")
    tensors = found.tensors()
    layout = _layout(found, target, tensors)
    head = PublishedEagle(target, layout)
    fill(head, _without_output(tensors, layout), found.named)
    return head


def _eagle3(found: Published, target: HeadTarget) -> Head:
    layout, tensors = _eagle3_parts(found, target)
    head = PublishedEagle3(target, layout)
    _fill_eagle3(found, head, tensors)
    return head


def _peagle(found: Published, target: HeadTarget) -> Head:
    layout, tensors = _eagle3_parts(found, target)
    if found.config.get("mask_token_id") is None:
        raise found.refuse("without mask_token_id", "the token that stands for one to draft")
    options = PEagleOptions(
        num_layers=layout.config.num_layers, features=layout.features,
        depths=_speculative_tokens(found, 8), mask_token=found.config["mask_token_id"],
    )  # fmt: skip
    head = PEagle(target, options, layout)
    _fill_eagle3(found, head, tensors)
    return head


def _mtp(found: Published, target: HeadTarget) -> Head:
    kind = _layers_config(found.config).get("model_type")
    if target.model is not None and found.prefix:
        dtype = target.embedding.dtype
        tensors = {name: value.to(dtype) for name, value in found.tensors().items()}
        names = QWEN if found.prefix == MTP_PREFIX else DEEPSEEK
        return ModelMtp(target, tensors, names, found.named)
    if kind not in PLAIN_MODEL_TYPES:
        raise found.refuse(
            f"an MTP layer of model_type {kind}", f"one of {', '.join(PLAIN_MODEL_TYPES)}"
        )
    tensors = {
        own_name(name): value for name, value in found.tensors().items() if name not in _OF_TARGET
    }
    layout = mtp_layout(_layout(found, target, {}, windows=True))
    head = Mtp(target, MtpOptions(), layout)
    fill(head, tensors, found.named)
    return head


def _eagle3_parts(found: Published, target: HeadTarget) -> tuple[Layout, dict[str, Tensor]]:
    tensors = {
        re.sub(r"^midlayer\.", "layers.0.", name): value
        for name, value in found.tensors().items()
        if not name.startswith("verifier_")
    }
    layout = _layout(found, target, tensors)
    flags = {
        key: bool(found.config.get(key))
        for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    }
    return replace(
        layout,
        features=_features(found, target, tensors),
        vocabulary=len(tensors.get("d2t", ())),
        own_output="lm_head.weight" in tensors,
        **cast("dict[str, Any]", flags),
    ), tensors


def _fill_eagle3(found: Published, head: PublishedEagle3, tensors: dict[str, Tensor]) -> None:
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    fill(head, tensors, found.named)
    if d2t is not None:
        size = head.target.config.vocab_size
        tokens = draft_vocabulary(d2t, t2d, len(d2t), size, found.named)
        head.vocabulary = tokens.to(head.target.embedding.device)


def _speculative_tokens(found: Published, default: int) -> int:
    """The length of its drafts in speculators' layout."""
    methods = (found.config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    value = methods[0].get("speculative_tokens") or default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64:
        raise found.refuse(f"speculative_tokens {value}", "an integer from 1 to 64")
    return value


def _layout(
    found: Published, target: HeadTarget, tensors: Mapping[str, Tensor], *, windows: bool = False
) -> Layout:
    """What an EAGLE drafter of either age is, but for EAGLE-3's own choices.

    Args:
        windows: the config may have windows, which the drafter's layers have not.
    """
    raw = _layers_config(found.config)
    if "transformer_layer_config" in found.config:
        raw = layers_config(raw, "qwen3")
    raw.setdefault("model_type", "llama")
    if (raw.get("num_key_value_heads") or 0) < 1:
        raw["num_key_value_heads"] = raw.get("num_attention_heads")
    try:
        config = LlamaConfig.from_dict(raw, PLAIN_MODEL_TYPES)
    except KeyError as error:
        raise ModelNotFound(f"{found.folder}/config.json lacks {error}") from error
    for key in ("hidden_size", "vocab_size"):
        there, here = getattr(config, key), getattr(target.config, key)
        if there != here:
            raise found.refuse(
                f"for a target with {key} {there}", f"the loaded target's {key}, {here}"
            )
    if not windows and any(window is not None for window in config.windows):
        raise found.refuse("with sliding_window in its layers", "layers with full attention")
    if (found.config.get("target_hidden_size") or config.hidden_size) != config.hidden_size:
        wide = found.config["target_hidden_size"]
        raise found.refuse(f"target_hidden_size {wide}", f"its own width, {config.hidden_size}")
    if config.rope.get("rope_type", "default") in _ANY_LENGTH:
        longest = max(config.context_length, target.config.context_length)
        config = replace(config, context_length=longest)
    elif config.context_length < target.config.context_length:
        raise found.refuse(
            f"for {config.context_length} tokens of context",
            f"at least the target's, {target.config.context_length}",
        )
    own = "embed_tokens.weight" in tensors
    return Layout(config, fc_bias="fc.bias" in tensors, own_embedding=own)


def _without_output(tensors: Mapping[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """EAGLE drafts with the target's output layer, also where its file has a copy."""
    return {name: value for name, value in tensors.items() if name != "lm_head.weight"}


def _features(
    found: Published, target: HeadTarget, tensors: Mapping[str, Tensor]
) -> tuple[int, ...]:
    """Numbers of the layers after which EAGLE-3 reads the residual stream."""
    count = target.config.num_layers
    inner = found.config.get("eagle_config") or {}
    given = found.config.get("eagle_aux_hidden_state_layer_ids") or inner.get(
        "eagle_aux_hidden_state_layer_ids"
    )
    numbers = tuple(given or (2, count // 2, count - 3))
    if any(not isinstance(n, int) or not 1 <= n <= count for n in numbers):
        raise found.refuse(
            f"which reads layers {list(numbers)}", f"layers from 1 to the target's last, {count}"
        )
    return numbers


# --- Medusa, Hydra --------------------------------------------------------------------------------


def _number(found: Published, key: str, default: int) -> int:
    value = found.config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64:
        raise found.refuse(f"{key} {value}", "an integer from 1 to 64")
    return value


def _medusa(found: Published, target: HeadTarget) -> Head:
    tensors = {name.removeprefix("medusa_head."): v for name, v in found.tensors().items()}
    layers, there = _number(found, "medusa_num_layers", 1), set()
    renamed = {}
    for name, value in tensors.items():
        match = re.fullmatch(r"(\d+)\.(\d+)\.(linear\.weight|linear\.bias|weight)", name)
        if match is None:
            renamed[name] = value  # left over: refused
            continue
        there.add(int(match[1]))
        if match[3] == "weight":
            renamed[f"outputs.{match[1]}.weight"] = value
        else:
            inner = f".{match[2]}" if layers > 1 else ""
            renamed[f"blocks.{match[1]}{inner}.{match[3]}"] = value
    # The authors' config.json names a number of heads that may differ from the file's.
    options = MedusaOptions(num_heads=len(there) or 1, num_layers=layers, own_output=True)
    head = Medusa(target, options)
    fill(head, renamed, found.named)
    return head


def _hydra(found: Published, target: HeadTarget) -> Head:
    config = found.config
    if config.get("hydra_head_arch", "mlp") != "mlp" or not config.get("grounded_heads", True):
        raise found.refuse(
            f"hydra_head_arch {config.get('hydra_head_arch')}, "
            f"grounded_heads {config.get('grounded_heads')}",
            "hydra_head_arch mlp with grounded_heads true",
        )
    if config.get("hidden_state_offset", 0):
        raise found.refuse(f"hidden_state_offset {config['hidden_state_offset']}", "0")
    count, layers = _number(found, "hydra_num_heads", 4), _number(found, "hydra_num_layers", 1)
    head = Hydra(
        target,
        HydraOptions(num_heads=count, num_layers=layers, own_output=True, scaled=False),
    )
    fill(head, _hydra_names(found.tensors()), found.named)
    return head


def _hydra_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Hydra's tensors by the names of :class:`paceline.models.heads.hydra.Hydra`.

    A block is at every second place of its head: dropout is at the others.
    """
    renamed = {}
    for name, value in tensors.items():
        block = re.fullmatch(r"hydra_mlp\.(\d+)\.(\d+)\.linear\.(weight|bias)", name)
        output = re.fullmatch(r"hydra_lm_head\.(\d+)\.1\.(weight|bias)", name)
        if output is not None:
            renamed[f"outputs.{output[1]}.{output[2]}"] = value
        elif block is not None and block[2] == "1":
            skip = tensors.get(f"hydra_mlp.{block[1]}.1.res_connection.{block[3]}")
            if skip is not None:
                joined = torch.cat([skip, value])
                renamed[f"heads.{block[1]}.join.{block[3]}"] = joined
        elif block is not None:
            inner = int(block[2]) // 2 - 1
            renamed[f"heads.{block[1]}.blocks.{inner}.linear.{block[3]}"] = value
        elif ".res_connection." not in name:
            renamed[name] = value  # left over: refused
    return renamed


def _block(found: Published, target: HeadTarget) -> Head:
    return read_block_head(found.config, found.tensors(), target)


READERS: dict[str, Callable[[Published, HeadTarget], Head]] = {
    "eagle": _eagle,
    "eagle3": _eagle3,
    "peagle": _peagle,
    "mtp": _mtp,
    "medusa": _medusa,
    "hydra": _hydra,
    "dflash": _block,
    "dflash2": _block,
    "dspark": _block,
    "xpress": _block,
}
"""What reads each kind; its head's kind has the same name."""
