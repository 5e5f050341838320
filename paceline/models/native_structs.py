"""The structures of kernels/model.h, field by field as C has them."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from paceline.models.differences import Activation, Rope
from paceline.models.ops import (
    AdaptedLayer,
    Adapter,
    Experts,
    Layer,
    LowPart,
    LowRank,
    Shortlist,
    Stack,
)
from paceline.models.packing import Weight
from paceline.models.rows import Rows

_ROPES: tuple[Rope | None, ...] = ("global", "local", None)
"""In the order of ``enum rope`` in kernels/model.h."""
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped")
"""In the order of ``enum activation`` in kernels/model.h."""


class CRows(ctypes.Structure):
    """``struct rows``."""

    _fields_ = [
        ("count", ctypes.c_int32),
        ("longest", ctypes.c_int32),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("prefix_length", ctypes.c_void_p),
        ("path_length", ctypes.c_void_p),
        ("prefix", ctypes.c_void_p),
        ("path", ctypes.c_void_p),
        ("adapters", ctypes.c_void_p),
    ]

    @classmethod
    def of(cls, count: int, rows: Rows, paths: npt.NDArray[np.int64]) -> CRows:
        """Over the arrays of ``rows`` and over ``paths``, all of which must outlive it.

        Args:
            paths: addresses of each row's path (:func:`path_addresses`).  # [R]
        """
        return cls(
            count,
            rows.longest,
            rows.positions.ctypes.data,
            rows.slots.ctypes.data,
            rows.prefix_length.ctypes.data,
            rows.path_length.ctypes.data,
            rows.table_addresses.ctypes.data,
            paths.ctypes.data,
            None if rows.adapters is None else rows.adapters.ctypes.data,
        )


class CWeight(ctypes.Structure):
    """``struct weight``."""

    _fields_ = [("packed", ctypes.c_void_p), ("packing", ctypes.c_int64)]

    @classmethod
    def of(cls, weight: Weight | None) -> CWeight:
        """Points to the weight's data; to nothing for None."""
        return cls() if weight is None else cls(weight.data.data_ptr(), weight.packing)


class CLowPart(ctypes.Structure):
    """``struct low_part``."""

    _fields_ = [
        ("b", CWeight),
        ("rank", ctypes.c_int64),
        ("first", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
    ]

    @classmethod
    def of(cls, part: LowPart) -> CLowPart:
        """Points to the weight's data."""
        return cls(CWeight.of(part.b), part.b.num_inputs, part.first, part.b.num_outputs)


class CLowRank(ctypes.Structure):
    """``struct low_rank``."""

    _fields_ = [
        ("a", CWeight),
        ("rank", ctypes.c_int64),
        ("num_parts", ctypes.c_int64),
        ("parts", CLowPart * 3),
    ]

    @classmethod
    def of(cls, low: LowRank | None) -> CLowRank:
        """Points to the weights' data; without parts for None."""
        if low is None:
            return cls()
        parts = (CLowPart * 3)(*map(CLowPart.of, low.parts))
        return cls(CWeight.of(low.a), low.a.num_outputs, len(low.parts), parts)


class CAdapted(ctypes.Structure):
    """``struct adapted``."""

    _fields_ = [(name, CLowRank) for name in AdaptedLayer._fields]

    @classmethod
    def of(cls, layer: AdaptedLayer) -> CAdapted:
        """Points to the weights' data."""
        return cls(*map(CLowRank.of, layer))


class CShortlist(ctypes.Structure):
    """``struct shortlist``."""

    _fields_ = [
        ("encode", CWeight),
        ("rows", CWeight),
        ("exact", ctypes.c_void_p),
        ("rank", ctypes.c_int32),
        ("margin", ctypes.c_float),
    ]

    @classmethod
    def of(cls, likely: Shortlist) -> CShortlist:
        """Points to the weights' data."""
        return cls(
            CWeight.of(likely.encode), CWeight.of(likely.rows), likely.exact.data_ptr(),
            likely.encode.num_outputs, likely.margin,
        )  # fmt: skip


class CModel(ctypes.Structure):
    """``struct model``."""

    _fields_ = [
        ("hidden", ctypes.c_int32),
        ("ffn", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("num_slots", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("cos_sin", ctypes.c_void_p),
        ("local_cos_sin", ctypes.c_void_p),
        ("rotary", ctypes.c_int32),
        ("activation", ctypes.c_int32),
        ("wide_norms", ctypes.c_int32),
        ("residual_scale", ctypes.c_float),
        ("attention_cap", ctypes.c_float),
        ("logit_divisor", ctypes.c_float),
        ("logit_cap", ctypes.c_float),
        ("gate_slope", ctypes.c_float),
        ("gate_limit", ctypes.c_float),
        ("chunked", ctypes.c_int32),
        ("turned_norms", ctypes.c_int32),
        ("scaled_inputs", ctypes.c_int32),
        ("temperatures", ctypes.c_void_p),
        ("adapters", ctypes.POINTER(ctypes.POINTER(CAdapted))),
    ]

    @classmethod
    def of(cls, stack: Stack, num_slots: int) -> CModel:
        """For one thread; points to the stack's tensors."""
        return cls(
            hidden=stack.hidden_size,
            ffn=stack.intermediate_size,
            heads=stack.num_heads,
            kv_heads=stack.num_kv_heads,
            dim=stack.head_dim,
            num_slots=num_slots,
            threads=1,
            eps=stack.eps,
            scale=stack.attention_scale,
            cos_sin=stack.cos_sin.data_ptr(),
            local_cos_sin=address(stack.local_cos_sin),
            rotary=stack.cos_sin.shape[1],
            activation=_ACTIVATIONS.index(stack.differs.activation),
            wide_norms=stack.differs.wide_norms,
            residual_scale=stack.differs.residual_scale,
            attention_cap=stack.differs.attention_cap,
            logit_divisor=stack.differs.logit_divisor,
            logit_cap=stack.differs.logit_cap,
            gate_slope=stack.differs.gate_slope,
            gate_limit=stack.differs.gate_limit,
            chunked=stack.differs.chunked,
            turned_norms=stack.differs.turned_norms,
            scaled_inputs=stack.differs.scaled_inputs,
            temperatures=address(stack.temperatures),
            adapters=_adapter_tables(stack.adapters),
        )


class CExperts(ctypes.Structure):
    """``struct experts``."""

    _fields_ = [
        ("count", ctypes.c_int32),
        ("top", ctypes.c_int32),
        ("size", ctypes.c_int32),
        ("normed", ctypes.c_int32),
        ("router", CWeight),
        ("gate_up", ctypes.POINTER(CWeight)),
        ("down", ctypes.POINTER(CWeight)),
        ("router_bias", ctypes.c_void_p),
        ("gate_up_bias", ctypes.POINTER(ctypes.c_void_p)),
        ("down_bias", ctypes.POINTER(ctypes.c_void_p)),
        ("shared_gate_up", CWeight),
        ("shared_down", CWeight),
    ]

    @classmethod
    def of(cls, experts: Experts) -> CExperts:
        """Points to the weights' data."""
        routing = experts.routing
        table = CWeight * routing.count
        return cls(
            count=routing.count,
            top=routing.top,
            size=routing.size,
            normed=routing.normed,
            router=CWeight.of(experts.router),
            gate_up=table(*map(CWeight.of, experts.gate_up)),
            down=table(*map(CWeight.of, experts.down)),
            router_bias=address(experts.router_bias),
            gate_up_bias=_addresses(experts.gate_up_bias),
            down_bias=_addresses(experts.down_bias),
            shared_gate_up=CWeight.of(experts.shared_gate_up),
            shared_down=CWeight.of(experts.shared_down),
        )


class CLayer(ctypes.Structure):
    """``struct layer``."""

    _fields_ = [
        ("input_norm", ctypes.c_void_p),
        ("qkv", CWeight),
        ("qkv_bias", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("out", CWeight),
        ("out_bias", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("gate_up", CWeight),
        ("gate_up_bias", ctypes.c_void_p),
        ("down", CWeight),
        ("down_bias", ctypes.c_void_p),
        ("window", ctypes.c_int64),  # 0 for all positions
        ("attention_norm", ctypes.c_void_p),
        ("mlp_norm", ctypes.c_void_p),
        ("rope", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("experts", ctypes.POINTER(CExperts)),
    ]

    @classmethod
    def of(cls, layer: Layer) -> CLayer:
        """Points to the layer's tensors."""
        return cls(
            input_norm=address(layer.input_norm),
            qkv=CWeight.of(layer.qkv),
            qkv_bias=address(layer.qkv_bias),
            q_norm=address(layer.q_norm),
            k_norm=address(layer.k_norm),
            out=CWeight.of(layer.out),
            out_bias=address(layer.out_bias),
            post_norm=address(layer.post_norm),
            gate_up=CWeight.of(layer.gate_up),
            gate_up_bias=address(layer.gate_up_bias),
            down=CWeight.of(layer.down),
            down_bias=address(layer.down_bias),
            window=layer.window or 0,
            attention_norm=address(layer.attention_norm),
            mlp_norm=address(layer.mlp_norm),
            rope=_ROPES.index(layer.rope),
            sinks=address(layer.sinks),
            experts=None if layer.experts is None else ctypes.pointer(CExperts.of(layer.experts)),
        )


STRUCTS = (CRows, CModel, CWeight, CLayer, CExperts, CLowPart, CLowRank, CAdapted, CShortlist)
"""In the order of ``struct_size`` in kernels/decode.c."""


def check_structs(library: ctypes.CDLL) -> None:
    """Compare the structures above with those that the kernels were compiled with.

    Raises:
        RuntimeError: a structure has another size in C.
    """
    for i, struct in enumerate(STRUCTS):
        here, there = ctypes.sizeof(struct), library.struct_size(i)
        if here != there:
            name = struct.__name__.removeprefix("C").lower()
            raise RuntimeError(
                f"struct {name} has {here} bytes in native_structs.py, and {there} in C"
            )


def path_addresses(rows: Rows) -> npt.NDArray[np.int64]:
    """Where each row's path begins in memory.  # [R]"""
    return rows.path_offset.astype(np.int64) * 4 + int(rows.paths.ctypes.data)


def address(value: torch.Tensor | None) -> int | None:
    """Where a tensor's data are; None is C's null pointer."""
    return None if value is None else value.data_ptr()


def _adapter_tables(adapters: tuple[Adapter, ...]) -> ctypes.Array[Any] | None:
    """A table of layers for each adapter."""
    tables = [(CAdapted * len(each.layers))(*map(CAdapted.of, each.layers)) for each in adapters]
    pointer: Any = ctypes.POINTER(CAdapted)  # takes arrays, too
    return (pointer * len(tables))(*tables) if tables else None


def _addresses(values: tuple[torch.Tensor, ...] | None) -> ctypes.Array[ctypes.c_void_p] | None:
    return None if values is None else (ctypes.c_void_p * len(values))(*map(address, values))
