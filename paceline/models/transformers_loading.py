"""Loading the general path's models: ``transformers`` models from a local folder."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.errors import InvalidArgument, ModelNotFound
from paceline.memory import check_fits
from paceline.models.layouts import (
    INDEX,
    WEIGHT_DTYPES,
    StoredTensor,
    check_quantization,
    count_weights,
    in_pieces,
    listed,
    not_weights,
    read_config,
    read_index,
    stored_dtypes,
    stored_tensors,
)


def load_parts(kind: Any, config: Any, tensors: Mapping[str, torch.Tensor], named: str) -> Any:
    """A model of a class of ``transformers`` with these weights, and without embeddings.

    Args:
        kind: a class for causal language models.
        config: with a vocabulary of one token.
        tensors: of its base model.
        named: what errors call it.

    Raises:
        InvalidArgument: tensors are missing, left over, or of other shapes.
    """
    size, dtype = config.hidden_size, next(iter(tensors.values())).dtype
    inside = {f"{kind.base_model_prefix}.{name}": value for name, value in tensors.items()}
    table = torch.zeros((1, size), dtype=dtype)
    inside |= {f"{kind.base_model_prefix}.embed_tokens.weight": table, "lm_head.weight": table}
    with quiet():
        model, info = kind.from_pretrained(
            None, config=config, state_dict=inside, dtype=dtype, output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    for what, names in (
        ("without", info["missing_keys"]),
        ("with unknown", info["unexpected_keys"]),
        ("with other shapes of", {name for name, *_ in info["mismatched_keys"]}),
    ):
        if names:
            found = f"{named}, {what} {listed(names)}"
            raise InvalidArgument("head", found, f"a layer of a {config.model_type} model")
    return model.eval()


def load_causal_lm(
    folder: Path, dtype: torch.dtype, auto_class: str = "AutoModelForCausalLM", **options: Any
) -> Any:
    """The ``transformers`` model of a local folder; no network, no code from the folder.

    Every tensor in the folder is used, but for those of which the model's class says that they may
    be ignored (buffers of earlier versions, layers for training).

    Args:
        auto_class: the kind of model that it must be.
        options: of ``from_pretrained``.

    Raises:
        ModelNotFound: the folder, its config or its weights are missing, damaged or incomplete.
        InvalidArgument: the folder holds another kind of model, quantised weights, or tensors that
            the model does not have.
    """
    check_quantization(read_config(folder))
    dtypes, is_mapped = _stored_dtypes(folder), _has_safetensors(folder)
    if is_mapped:
        check_fits(count_weights(folder) * dtype.itemsize, folder)
    from transformers import AutoConfig

    if read_config(folder).get("model_type") == "block_ffn":
        from paceline.models import block_ffn

        block_ffn.register()
    model: Any
    info: Any
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelNotFound(
            f"config.json of model folder {str(folder)!r} cannot be read: {_first_line(error)}"
        ) from error
    try:
        with quiet():
            kind = _model_class(config, auto_class)
            is_part = not isinstance(config, kind.config_class)
            if is_mapped:
                options["state_dict"] = _mapped_tensors(folder, dtype)
                options["generation_config"] = _generation_config(folder)
            model, info = kind.from_pretrained(
                None if is_mapped else folder,
                # Of a model that also sees pictures, AutoModelForCausalLM takes the part for text.
                config=config.get_text_config() if is_part else config,
                dtype=dtype,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are named below
                **options,
            )
    except ValueError as error:
        if auto_class not in str(error):
            raise ModelNotFound(
                f"weights of model folder {str(folder)!r} cannot be read: {_first_line(error)}"
            ) from error
        raise InvalidArgument(
            "model",
            config.model_type,
            f"a model for {auto_class}; {str(folder)!r} holds another kind",
        ) from error
    except Exception as error:  # safetensors, pickle and torch each have errors of their own
        raise ModelNotFound(
            f"weights of model folder {str(folder)!r} cannot be read: {_first_line(error)}"
        ) from error
    if info["missing_keys"]:
        raise ModelNotFound(
            f"the weights of model folder {str(folder)!r} lack {listed(info['missing_keys'])}"
        )
    for name, stored, expected in sorted(info["mismatched_keys"]):
        raise ModelNotFound(
            f"{name} in {str(folder)!r} has shape {tuple(stored)}, but config.json says "
            f"{tuple(expected)}"
        )
    if info["unexpected_keys"] or info["error_msgs"]:
        unknown = listed(info["unexpected_keys"]) or _first_line(info["error_msgs"][0])
        raise InvalidArgument(
            "weights",
            f"{folder}, with tensors that a {config.model_type} model with this config.json does "
            f"not have: {unknown}",
            "the weights that config.json describes and no others",
        )
    _check_codes(folder, model, dtypes)
    return model


def _model_class(config: Any, auto_class: str) -> Any:
    """The class of a configuration's model; ValueError names ``auto_class`` if it has none.

    The automatic class tells by making a model, without memory for its weights; its own
    ``from_pretrained`` takes no tensors.
    """
    import transformers

    with torch.device("meta"):
        auto = getattr(transformers, auto_class)
        return type(auto.from_config(copy.deepcopy(config), trust_remote_code=False))


@dataclass(frozen=True, slots=True)
class _Unread:
    """A tensor of a safetensors file as transformers' loader takes it.

    The loader calls ``tensor[...].to(device=..., dtype=...)``. Of a mapped tensor, that would leave
    the file's pages in memory beside the copy; this one reads a million numbers at a time.
    """

    stored: StoredTensor

    def __getitem__(self, index: Any) -> _Unread:
        assert index is Ellipsis
        return self

    def to(self, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
        stored = self.stored
        if not stored.shape:
            return stored.read().to(device, dtype)
        whole = torch.empty(stored.shape, dtype=dtype, device=device)
        for rows in in_pieces(stored.shape[0], math.prod(stored.shape[1:])):
            whole[rows] = stored.read(rows)
        return whole


def _mapped_tensors(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor | _Unread]:
    """All tensors of the safetensors files: mapped, or unread where they need another dtype."""
    from safetensors import safe_open

    codes = set(_stored_dtypes(folder).values())  # the caller refuses those that it cannot take
    stored = stored_tensors(folder, codes)
    found: dict[str, torch.Tensor | _Unread] = {}
    for file in {tensor.file for tensor in stored.values()}:
        with safe_open(str(file), "pt") as opened:  # one mapping for all tensors of the file
            found |= {
                name: opened.get_tensor(name) if tensor.dtype is dtype else _Unread(tensor)
                for name, tensor in stored.items()
                if tensor.file == file
            }
    return found


def _generation_config(folder: Path) -> Any:
    """The generation settings of a folder, where ``from_pretrained`` looks for them."""
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except OSError:
        return GenerationConfig.from_model_config(read_config(folder))


def _has_safetensors(folder: Path) -> bool:
    """Whether transformers would read safetensors rather than pickled tensors."""
    return (folder / "model.safetensors").is_file() or (folder / INDEX).is_file()


def _stored_dtypes(folder: Path) -> dict[str, str]:
    """The dtype of every tensor in the files that transformers would read."""
    if _has_safetensors(folder):
        stored = stored_dtypes(folder)
        return {name: dtype for dtypes in stored.values() for name, dtype in dtypes.items()}
    names, index = {"pytorch_model.bin"}, folder / "pytorch_model.bin.index.json"
    if not (folder / "pytorch_model.bin").is_file():
        if not index.is_file():
            raise ModelNotFound(
                f"model folder {str(folder)!r} has no weights: expected model.safetensors, "
                f"{INDEX} with its shards, or pytorch_model.bin"
            )
        names = set(read_index(index).values())
    found: dict[str, str] = {}
    for name in sorted(names):
        try:
            tensors = torch.load(folder / name, map_location="meta", weights_only=True)
        except Exception as error:  # pickle and torch each have errors of their own
            raise ModelNotFound(
                f"weights of model folder {str(folder)!r} cannot be read: {name}: "
                f"{_first_line(error)}"
            ) from error
        for key, value in tensors.items():
            found[key] = str(value.dtype).removeprefix("torch.")
    return found


def _check_codes(folder: Path, model: Any, dtypes: dict[str, str]) -> None:
    """Refuse integers and eight-bit floats where the model has weights.

    transformers casts them, as if codes were weights.
    """
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    for name, dtype in sorted(dtypes.items()):
        if dtype in WEIGHT_DTYPES or any(re.search(pattern, name) for pattern in ignored):
            continue
        # Checkpoints of base models lack the prefix.
        tensor = own.get(name, own.get(f"{model.base_model_prefix}.{name}"))
        is_number = tensor is not None and not tensor.is_floating_point()
        if not is_number and not name.endswith("position_ids"):
            raise not_weights(f"{name} in {str(folder)!r}", dtype)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars or warnings from transformers; errors are raised, not logged."""
    from transformers.utils import logging as untyped_logging

    logging: Any = untyped_logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
