"""A shortlist of likely tokens, so that a head's output layer is not read whole for each token.

A product of low rank gives approximate logits, and those near the highest are computed again in
full: SVD-softmax (Shim et al. 2017, "SVD-Softmax: Fast Softmax Approximation on Large Vocabulary
Neural Networks"). That paper decomposes the output layer alone. Here the product is the best one of
its rank for the head's own states, and finds more of SmolLM2's best tokens with 32 dimensions than
that one with 192. It minimises E[|W x - W D E x|^2]: the answer are the first eigenvectors of
``L' W' W L``, where ``L L'`` is E[x x'] (:func:`fit_shortlist`).

It lies beside a head's weights in a file of its own, and holds for this head alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.errors import InvalidArgument, ModelNotFound

FILE = "shortlist.safetensors"
RANK = 128
FOUND = 0.995
"""Share of the states whose best token must be on their shortlist."""
_HELD_OUT = 5  # one state in so many does not shape the product, and sets the margin
_RIDGE = 1e-3  # added to E[x x'], in its mean variance: some directions hardly occur


class LowRankLogits(NamedTuple):
    """What a head keeps of its shortlist.

    Attributes:
        encode: # [rank, hidden]
        decode: times the output layer, the second factor.  # [hidden, rank]
        margin: see :class:`paceline.models.ops.Shortlist`.
    """

    encode: Tensor
    decode: Tensor
    margin: float

    def rows(self, weight: Tensor) -> Tensor:
        """The second factor for an output layer.  # [num_logits, hidden] -> [num_logits, rank]"""
        return (weight.float() @ self.decode.float()).to(weight.dtype)


def fit_shortlist(states: Tensor, weight: Tensor, rank: int = RANK) -> LowRankLogits:
    """The best product of a rank for these states.

    Args:
        states: what the output layer reads.  # [num_states, hidden]
        weight: the output layer.  # [num_logits, hidden]

    Raises:
        InvalidArgument: a rank above the hidden size.
    """
    hidden = weight.shape[1]
    if not 0 < rank <= hidden:
        raise InvalidArgument("rank", rank, f"from 1 to the hidden size, {hidden}")
    states, weight = states.float(), weight.float()
    held_out = torch.arange(len(states)) % _HELD_OUT == 0
    used = states[~held_out].double()
    moments = used.T @ used / max(1, len(used))
    moments += _RIDGE * moments.trace() / hidden * torch.eye(hidden, dtype=torch.double)
    lower = torch.linalg.cholesky(moments)
    seen = weight.double() @ lower
    vectors = torch.linalg.eigh(seen.T @ seen).eigenvectors[:, -rank:]
    encode = torch.linalg.solve_triangular(lower.T, vectors, upper=True).T
    made = LowRankLogits(encode.bfloat16(), (lower @ vectors).bfloat16(), 0.0)
    rows, below = made.rows(weight), []
    for some in states[held_out].split(1024):
        near = some @ made.encode.float().T @ rows.T
        best = (some @ weight.T).argmax(1, keepdim=True)
        below.append(near.amax(1) - near.gather(1, best)[:, 0])
    margin = float(torch.cat(below).sort().values[int(FOUND * (sum(map(len, below)) - 1))])
    return made._replace(margin=margin)


def save_shortlist(folder: Path, made: LowRankLogits) -> None:
    """Write it beside the weights of a head."""
    from safetensors.torch import save_file

    part = folder / f"{FILE}.tmp"
    tensors = {"encode": made.encode, "decode": made.decode, "margin": torch.tensor(made.margin)}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part)
    part.replace(folder / FILE)


def read_shortlist(folder: Path) -> LowRankLogits | None:
    """That of a saved head; None if it has none.

    Raises:
        ModelNotFound: the file is damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    file = folder / FILE
    if not file.is_file():
        return None
    try:
        tensors = load_file(str(file))
        encode, decode, margin = (tensors[name] for name in ("encode", "decode", "margin"))
    except (SafetensorError, OSError, KeyError) as error:
        raise ModelNotFound(f"{file} is damaged: {error}") from error
    if encode.ndim != 2 or decode.shape != encode.T.shape:
        sizes = f"{list(encode.shape)} and {list(decode.shape)}"
        raise ModelNotFound(f"{file} is damaged: factors of {sizes}")
    return LowRankLogits(encode, decode, float(margin))
