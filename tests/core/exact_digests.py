"""Digests of everything between logits and tokens, and of rope tables.

``python -m tests.core.exact_digests`` prints them as JSON, as this process computes them.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.exact_math import cos_sin, exp64, log64, sum64
from paceline.models.llama_config import LlamaConfig
from paceline.models.rope import rope_table
from paceline.sampling import Salt, SamplingParams, coupled_sample, gumbel, gumbel_at, probabilities

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
PARAMS = (
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, seed=2, top_k=40),
    SamplingParams(temperature=1.3, seed=3, top_p=0.9),
    SamplingParams(temperature=0.9, seed=4, min_p=0.02),
)


def rope_config(head_dim: int, context_length: int, **rope: Any) -> LlamaConfig:
    """A configuration that differs from others in its rope table only."""
    return LlamaConfig(
        model_type="llama", vocab_size=8, hidden_size=head_dim, intermediate_size=8, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=head_dim, context_length=context_length,
        rms_norm_eps=1e-6, tie_word_embeddings=True, windows=(None,),
        rope={"rope_type": "default", "rope_theta": 10000.0, **rope},
    )  # fmt: skip


def logits_row(number: int, vocab_size: int) -> npt.NDArray[np.float32]:
    """Logits that need no library's random numbers: sums of noise, in float32."""
    rows = [gumbel(99, 4 * number + i, vocab_size) for i in range(4)]
    return (2.0 * (rows[0] - rows[1] + rows[2] - rows[3])).astype(np.float32)


def digests() -> dict[str, str]:
    grid = np.arange(-400_000, 400_000, dtype=np.float64)
    tokens = [
        coupled_sample(logits_row(i, 4096), params, i) for i in range(32) for params in PARAMS
    ]
    p = probabilities(logits_row(0, 49_152), PARAMS[2])
    return {
        "noise": _digest(
            *(
                gumbel(s, i, 49_152)
                for s, i in ((0, 0), (1, 5), (12345, 678), (2**63 - 1, 131_071))
            ),
            gumbel(7, 7, 49_152, Salt.RESIDUAL),
            gumbel_at(7, 8, np.arange(5, 49_152, 777)),
        ),
        "exp": _digest(exp64(grid * 0.00186)),
        "log": _digest(log64((grid + 400_000.5) * 0.00043), log64(exp64(grid * 0.0018))),
        "cos and sin": _digest(*cos_sin(grid * 2.6)),
        "tokens": _digest(np.array(tokens, np.float64), p, np.array([sum64(p * p)])),
        "rope default": _digest(rope_table(rope_config(64, 8192)).numpy()),
        "rope linear": _digest(
            rope_table(
                rope_config(80, 4096, rope_type="linear", factor=4.0, rope_theta=1e6)
            ).numpy()
        ),
        "rope llama3": _digest(
            rope_table(
                rope_config(128, 16_384, rope_type="llama3", rope_theta=5e5, **LLAMA3)
            ).numpy()
        ),
    }


def _digest(*arrays: npt.NDArray[Any]) -> str:
    total = hashlib.sha256()
    for array in arrays:
        total.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return total.hexdigest()


if __name__ == "__main__":
    print(json.dumps(digests(), indent=4))
