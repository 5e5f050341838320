"""exp, log, cos and sin with the same bits on every processor.

NumPy, torch and the C library choose their functions by the processor's instructions. The results
differ in the last bit, which can decide a token. IEEE 754 fixes the results of ``+ - * /``, of
comparisons, conversions and all operations on integers, and NumPy computes each operation by
itself. Functions that consist of these alone, in one order, have the same bits everywhere, unless
the process makes the processor flush subnormal numbers to zero. Algorithms and coefficients are
those of Sun's fdlibm (e_log.c, e_exp.c, k_sin.c, k_cos.c, e_rem_pio2.c); the error is below 1 unit
in the last place (ulp).

``paceline/models/kernels/noise.c`` repeats ``exp64``, ``log64`` and the noise, operation by
operation, and :class:`Native` calls it. Where it cannot be loaded, NumPy computes the same bits.

These are the same everywhere, too, and Paceline uses them as they are: NumPy's elementwise
arithmetic, ``max`` and ``argmax``, ``cumsum`` (one number after the other), stable sorts, and the
value (not the order) that ``partition`` puts in its place. ``np.sum`` is not: its order depends on
NumPy's version and build. :func:`sum64` replaces it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

_hex = float.fromhex
_LN2_HIGH, _LN2_LOW = _hex("0x1.62e42feep-1"), _hex("0x1.a39ef35793c76p-33")
_LG1, _LG2 = _hex("0x1.5555555555593p-1"), _hex("0x1.999999997fa04p-2")
_LG3, _LG4 = _hex("0x1.2492494229359p-2"), _hex("0x1.c71c51d8e78afp-3")
_LG5, _LG6 = _hex("0x1.7466496cb03dep-3"), _hex("0x1.39a09d078c69fp-3")
_LG7 = _hex("0x1.2f112df3e5244p-3")
_LOG2_E = _hex("0x1.71547652b82fep0")
_EXP = tuple(
    _hex(c)
    for c in (
        "0x1.6376972bea4d0p-25",
        "-0x1.bbd41c5d26bf1p-20",
        "0x1.1566aaf25de2cp-14",
        "-0x1.6c16c16bebd93p-9",
        "0x1.555555555553ep-3",
    )
)
_SIN = tuple(
    _hex(c)
    for c in (
        "0x1.5d93a5acfd57cp-33",
        "-0x1.ae5e68a2b9cebp-26",
        "0x1.71de357b1fe7dp-19",
        "-0x1.a01a019c161d5p-13",
        "0x1.111111110f8a6p-7",
        "-0x1.5555555555549p-3",
    )
)
_COS = tuple(
    _hex(c)
    for c in (
        "-0x1.8fae9be8838d4p-37",
        "0x1.1ee9ebdb4b1c4p-29",
        "-0x1.27e4f809c52adp-22",
        "0x1.a01a019cb1590p-16",
        "-0x1.6c16c16c15177p-10",
        "0x1.555555555554cp-5",
    )
)
_TWO_OVER_PI = _hex("0x1.45f306dc9c883p-1")
# pi / 2 in three parts; products of the first two with an integer below 2^20 are exact.
_HALF_PI1, _HALF_PI2 = _hex("0x1.921fb544p0"), _hex("0x1.0b4611a6p-34")
_HALF_PI3 = _hex("0x1.3198a2e037073p-69")

_ROUNDER = 1.5 * 2.0**52  # x + _ROUNDER - _ROUNDER is x rounded to an integer
_TWO52 = 2.0**52
_ONE_BITS = np.uint64(0x3FF00000_00000000)
_ROOT_HALF_BITS = np.uint64(0x3FE6A09E_00000000)  # sqrt(0.5), the lower end of log's mantissas
_MANTISSA = np.uint64(0x000FFFFF_FFFFFFFF)
_EXPONENT = np.uint64(52)

_CHUNK = 8192  # numbers at a time: what they need stays in a core's cache


def log64(x: Doubles) -> Doubles:
    """Natural logarithm within 1 ulp: -inf for 0, nan below 0.  # any shape"""
    library = native()
    if library is not None:
        return library.log(x)
    return in_chunks(_log, np.ascontiguousarray(x, np.float64))


def _log(x: Doubles) -> Doubles:
    small = x < 2.0**-1022  # subnormal, zero or negative
    with np.errstate(over="ignore", invalid="ignore"):
        normal = x * np.where(small, 2.0**54, 1.0)
    result = log_of_normal(normal, np.where(small, -54.0, 0.0))
    result = np.where(x == np.inf, np.inf, result)
    result = np.where(x == 0.0, -np.inf, result)
    return np.where(x >= 0.0, result, np.nan)


def log_of_normal(x: Doubles, scaling: Doubles | float = 0.0) -> Doubles:
    """:func:`log64` of normal numbers above 0; ``scaling`` is added to their exponents.  # [n]"""
    bits = x.view(np.uint64) + (_ONE_BITS - _ROOT_HALF_BITS)
    k = (bits >> _EXPONENT).astype(np.float64)
    k -= 1023.0 - scaling
    bits &= _MANTISSA
    bits += _ROOT_HALF_BITS
    f = bits.view(np.float64)
    f -= 1.0
    s = f / (f + 2.0)
    z = s * s
    w = z * z
    odd = w * _LG6
    odd += _LG4
    odd *= w
    odd += _LG2
    odd *= w
    even = w * _LG7
    even += _LG5
    even *= w
    even += _LG3
    even *= w
    even += _LG1
    even *= z
    half = f * f
    half *= 0.5
    odd += even
    odd += half
    odd *= s
    odd += k * _LN2_LOW
    half -= odd
    half -= f
    k *= _LN2_HIGH
    k -= half
    return k


def exp64(x: Doubles) -> Doubles:
    """e to the x within 1 ulp: 0 for -inf; results may be subnormal.  # any shape"""
    library = native()
    if library is not None:
        return library.exp(x)
    return in_chunks(_exp, np.ascontiguousarray(x, np.float64))


def _exp(x: Doubles) -> Doubles:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        y = np.minimum(np.maximum(x, -746.0), 710.0)
        k = (y * _LOG2_E + _ROUNDER) - _ROUNDER
        high = y - k * _LN2_HIGH
        low = k * _LN2_LOW
        r = high - low
        t = r * r
        c = r - t * _polynomial(t, _EXP)
        e = 1.0 - ((low - (r * c) / (2.0 - c)) - high)
        # Times 2^k in two steps: each factor is a normal number, 2^k need not be.
        half = (k * 0.5 + _ROUNDER) - _ROUNDER
        result: Doubles = e * _power_of_two(half) * _power_of_two(k - half)
    return np.where(np.isnan(x), np.nan, result)


def _power_of_two(k: Doubles) -> Doubles:
    bits = (k + (_TWO52 + 1023.0)).view(np.uint64)  # the exponent in the last places
    return (bits << _EXPONENT).view(np.float64)


def _polynomial(x: Doubles, coefficients: tuple[float, ...]) -> Doubles:
    """Horner's rule, the highest power first."""
    total = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        total += coefficient
        total *= x
    total += coefficients[-1]
    return total


def cos_sin(x: Doubles) -> tuple[Doubles, Doubles]:
    """Cosine and sine of angles in radians, from -2^20 to 2^20.  # any shape"""
    x = np.asarray(x, np.float64)
    n = x * _TWO_OVER_PI
    n += _ROUNDER
    n -= _ROUNDER
    # The remainder of the angle is y + tail, with pi / 2 to 118 bits.
    t = x - n * _HALF_PI1
    w = n * _HALF_PI2
    r = t - w
    w = n * _HALF_PI3 - ((t - r) - w)
    y = r - w
    tail = (r - y) - w

    z = y * y
    cube = z * y
    sine = y - ((z * (0.5 * tail - cube * _polynomial(z, _SIN[:-1])) - tail) - cube * _SIN[-1])
    half = 0.5 * z
    w = 1.0 - half
    cosine = w + (((1.0 - w) - half) + (z * (z * _polynomial(z, _COS)) - y * tail))

    quarter = n.astype(np.int64)
    swap = (quarter & 1).astype(np.bool_)
    cos = np.where(swap, sine, cosine)
    sin = np.where(swap, cosine, sine)
    np.negative(cos, out=cos, where=((quarter + 1) & 2).astype(np.bool_))
    np.negative(sin, out=sin, where=(quarter & 2).astype(np.bool_))
    return cos, sin


def sum64(x: npt.NDArray[Any]) -> float:
    """The sum in one order: add the second half to the first until one number is left.

    NumPy adds in pairs, too, but its order depends on version, memory layout and compiler. The
    error is as small.  # [n], in float64
    """
    values = np.ascontiguousarray(x, np.float64)
    library = native()
    if library is not None:
        return library.sum(values)
    if not len(values):
        return 0.0
    total = values[: (len(values) + 1) // 2].copy()
    total[: len(values) - len(total)] += values[len(total) :]
    count = len(total)
    while count > 1:
        half = (count + 1) // 2
        total[: count - half] += total[half:count]
        count = half
    return float(total[0])


def weights64(scores: Doubles) -> tuple[Doubles, float]:
    """``exp(scores - scores.max())`` and its sum: a softmax before its division.  # [n], n > 0"""
    library = native()
    if library is not None:
        return library.weights(scores)
    weights = exp64(scores - scores.max())
    return weights, sum64(weights)


def log_of(x: float) -> float:
    """:func:`log64` of one number."""
    return float(log64(np.array([x]))[0])


def exp_of(x: float) -> float:
    """:func:`exp64` of one number."""
    return float(exp64(np.array([x]))[0])


def log1p_of(x: float) -> float:
    """``log(1 + x)`` without losing small ``x`` (Kahan's correction), within a few ulp."""
    near = 1.0 + x
    if near == 1.0:
        return x
    logarithm = log_of(near)
    return logarithm if near == np.inf or near <= 0.0 else logarithm * (x / (near - 1.0))


def in_chunks(function: Callable[[npt.NDArray[Any]], Doubles], x: npt.NDArray[Any]) -> Doubles:
    """An elementwise ``function`` of a contiguous array, in parts that fit a core's cache."""
    flat = x.reshape(-1)
    if len(flat) <= _CHUNK:
        return function(flat).reshape(x.shape)
    out = np.empty(len(flat), np.float64)
    for start in range(0, len(flat), _CHUNK):
        out[start : start + _CHUNK] = function(flat[start : start + _CHUNK])
    return out.reshape(x.shape)


class Native:
    """The functions of noise.c in a loaded library of kernels.

    Each has the bits of the NumPy function of the same name.

    Raises:
        AttributeError: the library has none of them.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, double = ctypes.c_void_p, ctypes.c_double
        count, word = ctypes.c_int64, ctypes.c_uint64
        self._log = _function(library.exact_log, None, pointer, pointer, count)
        self._exp = _function(library.exact_exp, None, pointer, pointer, count)
        self._sum = _function(library.exact_sum, double, pointer, pointer, count)
        scores = (pointer, double, pointer, pointer, count)
        self._weights = _function(library.exact_weights, double, *scores)
        self._gumbel = _function(library.gumbel, None, word, count, pointer)
        self._gumbel_at = _function(library.gumbel_at, None, word, pointer, count, pointer)
        self._sample_logits = _function(library.sample_logits, count, pointer, count, double, word)
        self._sample_scores = _function(library.sample_scores, count, pointer, count, word)

    def log(self, x: Doubles) -> Doubles:
        x = np.ascontiguousarray(x, np.float64)
        out = np.empty_like(x)
        self._log(x.ctypes.data, out.ctypes.data, x.size)
        return out

    def exp(self, x: Doubles) -> Doubles:
        x = np.ascontiguousarray(x, np.float64)
        out = np.empty_like(x)
        self._exp(x.ctypes.data, out.ctypes.data, x.size)
        return out

    def sum(self, x: Doubles) -> float:
        scratch = np.empty((len(x) + 1) // 2, np.float64)
        total: float = self._sum(x.ctypes.data, scratch.ctypes.data, len(x))
        return total

    def weights(self, scores: Doubles) -> tuple[Doubles, float]:
        scores, count = np.ascontiguousarray(scores, np.float64), len(scores)
        out = np.empty(count + (count + 1) // 2, np.float64)
        place, highest = out.ctypes.data, float(scores.max())
        total: float = self._weights(scores.ctypes.data, highest, place, place + 8 * count, count)
        return out[:count], total

    def gumbel(self, stream: int, count: int) -> Doubles:
        """Noise of the token ids below ``count``.  # [count]"""
        out = np.empty(count, np.float64)
        self._gumbel(stream, count, out.ctypes.data)
        return out

    def gumbel_at(self, stream: int, token_ids: npt.NDArray[np.int64]) -> Doubles:
        """Noise of these token ids.  # [len(token_ids)]"""
        token_ids = np.ascontiguousarray(token_ids, np.int64)
        out = np.empty(len(token_ids), np.float64)
        self._gumbel_at(stream, token_ids.ctypes.data, len(out), out.ctypes.data)
        return out

    def sample_logits(
        self, logits: npt.NDArray[np.float32], temperature: float, stream: int
    ) -> int:
        """Argmax of ``logits / temperature`` plus noise.  # [vocab_size] float32"""
        logits = np.ascontiguousarray(logits, np.float32)
        best: int = self._sample_logits(logits.ctypes.data, len(logits), temperature, stream)
        return best

    def sample_scores(self, scores: Doubles, stream: int) -> int:
        """Argmax of ``scores`` plus noise.  # [vocab_size] float64"""
        scores = np.ascontiguousarray(scores, np.float64)
        best: int = self._sample_scores(scores.ctypes.data, len(scores), stream)
        return best


def _function(symbol: Any, result: Any, *arguments: Any) -> Any:
    symbol.restype, symbol.argtypes = result, arguments
    return symbol


def is_exact(library: Native) -> bool:
    """Whether the compiler kept the operations as written; by default, some fuse them."""
    x = np.concatenate([np.linspace(-800.0, 800.0, 1001), np.linspace(-2.0, 2.0, 1001)])
    positive = np.linspace(2.0**-60, 40.0, 4001)
    return np.array_equal(library.exp(x), _exp(x)) and np.array_equal(
        library.log(positive), log_of_normal(positive)
    )


@lru_cache(maxsize=1)
def native() -> Native | None:
    """The C functions; None without kernels, or if the compiler has changed their bits."""
    from paceline.models import kernels

    try:
        library = Native(kernels.load())
    except (kernels.KernelsUnavailable, ImportError):  # clients need not have torch
        return None
    return library if is_exact(library) else None
