"""Rope tables: transformers' numbers, with the same bits on every processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig as ReferenceConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from paceline.errors import InvalidArgument
from paceline.models.rope import rope_frequencies, rope_table
from tests.core.exact_digests import LLAMA3, rope_config

THETAS = (10_000.0, 100_000.0, 500_000.0, 1_000_000, 12_345.678)
HEAD_DIMS = (16, 48, 64, 80, 96, 128, 256)
CONTEXT = 2048
KINDS = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 512},
    "llama3 without a middle": {
        **LLAMA3,
        "original_max_position_embeddings": 512,
        "low_freq_factor": 1.0,
        "high_freq_factor": 1.0,
    },
}


def reference(head_dim: int, rope: dict[str, Any]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        ReferenceConfig(
            hidden_size=head_dim, num_attention_heads=1, head_dim=head_dim,
            max_position_embeddings=CONTEXT, rope_parameters=rope,
        )
    )  # fmt: skip


@pytest.mark.one_of(1, slow=3)  # leaves each kind and each theta
@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_transformers(kind: str, theta: float) -> None:
    for head_dim in HEAD_DIMS:
        plain = {"rope_type": "default", "rope_theta": theta}
        ours = rope_frequencies(rope_config(head_dim, CONTEXT, **plain))
        theirs = reference(head_dim, plain).inv_freq.numpy()
        assert ours is not None
        np.testing.assert_array_max_ulp(ours, theirs, maxulp=1)
        # Where torch's power is rounded correctly, all that follows is the same.
        same = ours == theirs
        assert same.mean() > 0.5

        rope = plain | KINDS[kind] | {"rope_type": kind.split()[0]}
        config, model = rope_config(head_dim, CONTEXT, **rope), reference(head_dim, rope)
        frequencies = rope_frequencies(config)
        assert frequencies is not None
        assert np.array_equal(frequencies[same], model.inv_freq.numpy()[same])
        np.testing.assert_allclose(frequencies, model.inv_freq.numpy(), rtol=5e-7)
        cos, sin = model(torch.zeros(1), torch.arange(CONTEXT)[None])
        half = head_dim // 2
        expected = torch.stack([cos[0, :, :half], sin[0, :, :half]])[:, :, same]
        table = rope_table(config)
        assert table.shape == (CONTEXT, head_dim)
        assert table.dtype == torch.float32
        found = torch.stack([table[:, :half], table[:, half:]])[:, :, same]
        assert (found - expected).abs().max() < 1.3e-7


def test_other_types_take_transformers_frequencies() -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    config = rope_config(64, CONTEXT, **rope)
    assert rope_frequencies(config) is None
    model = reference(64, dict(rope))
    cos, sin = model(torch.zeros(1), torch.arange(CONTEXT)[None])
    expected = torch.cat([cos[0, :, :32], sin[0, :, :32]], -1)
    assert (rope_table(config) - expected).abs().max() < 2.5e-7  # yarn scales by 1.14


def test_rows_do_not_depend_on_the_context_length() -> None:
    long, short = rope_table(rope_config(96, 5000)), rope_table(rope_config(96, 700))
    assert torch.equal(long[:700], short)


@pytest.mark.parametrize(
    ("rope", "field"),
    [
        ({"rope_type": "linear"}, "rope_parameters.factor"),
        ({"rope_type": "linear", "factor": 0}, "rope_parameters.factor"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_parameters.low_freq_factor"),
        ({"rope_theta": None}, "rope_parameters.rope_theta"),
    ],
)
def test_bad_numbers_are_named(rope: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument, match="a number above 0") as error:
        rope_table(rope_config(16, 8, **rope))
    assert error.value.field == field
