"""Linear layers of 4 bits, as GPTQ's and AWQ's tools write them.

Of each layer a checkpoint has codes (``qweight``), zeros (``qzeros``) and scales for groups of
inputs; a weight is ``scale * (code - zero)``. Eight codes are in one int32: GPTQ's are neighbours
along the inputs, AWQ's along the outputs and in an order of their own. The layouts are those of
AutoGPTQ and AutoAWQ (its version `gemm`), which GPTQModel and llm-awq's converters write, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.errors import InvalidArgument, ModelNotFound
from paceline.models.layouts import StoredTensor, described
from paceline.models.quants import Quantised

BLOCK = 32
"""Inputs that share a scale in the kernels; a group is some of them."""
_PER_WORD = 8
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each of eight outputs
_FIELD = "quantization_config"

Integers = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Int4Format:
    """The fields of a checkpoint's ``quantization_config``.

    Attributes:
        method: gptq or awq.
        group: inputs that share a scale and a zero; -1: all.
        offset: what is added to a stored zero; 1 in the first format of GPTQ.
    """

    method: str
    group: int
    offset: int


def int4_format(config: Mapping[str, Any]) -> Int4Format | None:
    """The format in a parsed config.json; None if the weights are not GPTQ's or AWQ's.

    Raises:
        InvalidArgument: Paceline does not read the format; the message names the field.
    """
    values = config.get(_FIELD)
    if not isinstance(values, dict) or values.get("quant_method") not in ("gptq", "awq"):
        return None
    is_gptq = values["quant_method"] == "gptq"
    group = values.get("group_size", 128)
    form = values.get("checkpoint_format") or "gptq"
    for wrong, allowed in (
        (values.get("bits") != 4, "4 bits"),
        (type(group) is not int or (group != -1 and (group < 1 or group % BLOCK)),
         f"a group_size of -1 or a multiple of {BLOCK}"),
        (is_gptq and form not in ("gptq", "gptq_v2"), "a checkpoint_format of gptq or gptq_v2"),
        (is_gptq and values.get("is_marlin_format"), "no is_marlin_format"),
        (is_gptq and values.get("dynamic"), "no dynamic rules: one format for all layers"),
        (values.get("pack_dtype") not in (None, "int32"), "a pack_dtype of int32"),
        (not is_gptq and str(values.get("version", "gemm")).lower() != "gemm", "version gemm"),
        (not is_gptq and values.get("zero_point") is False, "zero_point true"),
    ):  # fmt: skip
        if wrong:
            raise InvalidArgument(_FIELD, described(values), f"{values['quant_method']} {allowed}")
    return Int4Format(values["quant_method"], group, int(is_gptq and form == "gptq"))


@dataclass(frozen=True, slots=True)
class Int4Tensor:
    """A weight matrix of 4 bits, read on demand.

    Attributes:
        name: of the matrix, as it would be without quantisation.
        shape: outputs, inputs.
        group: inputs that share a scale.
    """

    name: str
    shape: tuple[int, int]
    group: int
    format: Int4Format
    codes: StoredTensor
    zeros: StoredTensor
    scales: StoredTensor

    def read(self, rows: slice = slice(None)) -> Quantised:
        """Some of its outputs, exactly."""
        outputs, inputs = self.shape
        start, stop, _ = rows.indices(outputs)
        words = slice(start // _PER_WORD, -(-stop // _PER_WORD))  # with all of these outputs
        within = slice(start - words.start * _PER_WORD, stop - words.start * _PER_WORD)
        order = range(_PER_WORD) if self.format.method == "gptq" else _AWQ_ORDER
        if self.format.method == "gptq":
            codes = _unpacked(self.codes.read_columns(slice(start, stop)).T, order)
        else:
            codes = _unpacked(self.codes.read_columns(words), order)[:, within].T
        zeros = _unpacked(self.zeros.read_columns(words), order)[:, within].T
        scale = self.scales.read_columns(slice(start, stop)).T.astype(np.float32)
        least = -scale * (zeros + np.float32(self.format.offset))
        times = self.group // BLOCK
        return Quantised(
            np.ascontiguousarray(codes).view(np.int8).reshape(stop - start, inputs),
            np.repeat(scale, times, 1), np.repeat(least, times, 1), 4,
        )  # fmt: skip

    @property
    def size(self) -> int:
        """Bytes in memory: 4 bits a weight, and for 32 of them two numbers of float32."""
        return self.shape[0] * self.shape[1] * 3 // 4


def _unpacked(words: npt.NDArray[np.int32], order: Any) -> Integers:
    """Codes of 4 bits along the last dimension.  # [n, m] -> [n, 8 * m]"""
    shifts = 4 * np.array(order, np.uint32)
    words = np.ascontiguousarray(words).view(np.uint32)
    return (words[..., None] >> shifts & 15).astype(np.uint8).reshape(len(words), -1)


def int4_tensors(
    form: Int4Format, stored: Mapping[str, StoredTensor]
) -> dict[str, StoredTensor | Int4Tensor]:
    """A checkpoint's tensors, with one for the parts of each layer of 4 bits.

    Raises:
        ModelNotFound: a part is missing, or of another shape or dtype.
        InvalidArgument: groups of inputs that are not neighbours (GPTQ's ``desc_act``).
    """
    tensors: dict[str, StoredTensor | Int4Tensor] = dict(stored)
    for name, codes in stored.items():
        layer, _, part = name.rpartition(".")
        if part != "qweight":
            continue
        parts = {each: stored.get(f"{layer}.{each}") for each in ("qzeros", "scales")}
        for each, found in parts.items():
            if found is None:
                raise ModelNotFound(f"{codes.file} has {name}, but the weights lack {layer}.{each}")
        zeros, scales = parts["qzeros"], parts["scales"]
        assert zeros is not None
        assert scales is not None
        tensor = _tensor(layer, form, codes, zeros, scales)
        _check_groups(tensor, stored.get(f"{layer}.g_idx"))
        for each in ("qweight", "qzeros", "scales", "g_idx"):
            tensors.pop(f"{layer}.{each}", None)
        tensors[tensor.name] = tensor
    return tensors


def _tensor(
    layer: str, form: Int4Format, codes: StoredTensor, zeros: StoredTensor, scales: StoredTensor
) -> Int4Tensor:
    if len(codes.shape) != 2:
        raise ModelNotFound(f"{codes.name} in {codes.file} has shape {codes.shape}, not two sizes")
    along_inputs = form.method == "gptq"
    inputs = codes.shape[0] * (_PER_WORD if along_inputs else 1)
    outputs = codes.shape[1] * (1 if along_inputs else _PER_WORD)
    group = inputs if form.group == -1 else form.group
    if inputs % group or group % BLOCK or outputs % _PER_WORD:
        raise InvalidArgument(
            _FIELD, f"group_size {form.group} with {layer} of {outputs} x {inputs}",
            f"groups that are multiples of {BLOCK} and divide the inputs",
        )  # fmt: skip
    groups = inputs // group
    for part, shape, dtypes in (
        (codes, codes.shape, (torch.int32,)),
        (zeros, (groups, outputs // _PER_WORD), (torch.int32,)),
        (scales, (groups, outputs), (torch.float16,)),
    ):
        if part.shape != shape or part.dtype not in dtypes:
            raise ModelNotFound(
                f"{part.name} in {part.file} has shape {part.shape} and dtype {part.dtype}, "
                f"expected {tuple(shape)} and {dtypes[0]}"
            )
    return Int4Tensor(f"{layer}.weight", (outputs, inputs), group, form, codes, zeros, scales)


def _check_groups(tensor: Int4Tensor, index: StoredTensor | None) -> None:
    """Check that each group is a run of consecutive inputs."""
    if index is None:
        return
    expected = torch.arange(tensor.shape[1]) // tensor.group
    if index.shape != expected.shape or not torch.equal(index.read().long(), expected):
        raise InvalidArgument(
            _FIELD, f"{index.name}, whose groups hold scattered inputs (desc_act)",
            f"groups of {tensor.group} consecutive inputs",
        )  # fmt: skip
