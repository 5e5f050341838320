"""EAGLE-3: drafting computes what training computed, over some tokens or all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.errors import InvalidArgument
from paceline.models.heads.base import HeadTarget, confidence, load_head
from paceline.models.heads.eagle3 import Eagle3
from paceline.models.llama import LlamaRunner
from paceline.types import FloatArray
from tests.core.toy_heads import read as read_texts
from tests.heads import untrained

STEPS = 4


@pytest.fixture(scope="module")
def target(tiny_folder: Path, tiny: LlamaRunner) -> HeadTarget:
    return HeadTarget.of_runner(tiny_folder, tiny)


@pytest.fixture(
    params=[(0, "native", 0), (60, "native", 0), (60, "native", 1), (60, "torch", 1)], ids=str
)
def head(
    request: pytest.FixtureRequest, target: HeadTarget, monkeypatch: pytest.MonkeyPatch
) -> Eagle3:
    """A head over all tokens or over some of them, in the C kernels or in plain torch.

    With a shallow layer, it reads tokens through one of the target's layers.
    """
    vocabulary, ops, shallow = request.param
    result = untrained(
        "eagle3", target, vocabulary=vocabulary, features=(1, 2), shallow_layers=shallow, int8=False
    )
    assert isinstance(result, Eagle3)
    if vocabulary:
        chosen = torch.randperm(256, generator=torch.Generator().manual_seed(3))[:vocabulary]
        result.vocabulary.copy_(chosen.sort().values)
    torch.nn.init.normal_(result.norm.weight, 1.0, 0.1)
    if ops == "torch":
        monkeypatch.setenv("PACELINE_KERNELS", "off")
    return result.eval().requires_grad_(False)


def test_drafting_equals_the_training_forward(head: Eagle3, tiny: LlamaRunner) -> None:
    """Chains and single nodes, from several places on."""
    ids = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(1))
    batch = read_texts(tiny, ids)
    assert batch.layer_states is not None
    features = head.select(batch.layer_states[:, :-1])  # [1, length, 2 * hidden]
    places = 9
    following = ids[0, 1 : places + 1].tolist()

    def expected(fed: list[int]) -> torch.Tensor:
        """Logits behind each token of a chain.  # [len(fed) + 1, vocab_size]"""
        head.output = None
        given = head.read(features[:, :places])
        padded = torch.cat([given, given.new_zeros(1, len(fed), given.shape[-1])], 1)
        steps = head(padded, torch.tensor([[*following, *fed]]), len(fed) + 1)
        return torch.stack([head.logits(steps[k][0, places - 1 + k]) for k in range(len(fed) + 1)])

    head.prepare()
    output = head.output
    read = [features[0, :places]], [following]

    def drafted(limits: FloatArray | None = None) -> list[int]:
        state = head.new_state()
        (chain,) = head.chains([state], *read, STEPS, limits).tolist()
        head.free(state)
        return [token for token in chain if token >= 0]

    chain = drafted()
    state = head.new_state()
    root = head.root([state], *read)
    nodes = [
        head.expand([state], [[(node, token, node - 1)]])[0]
        for node, token in enumerate(chain[:-1])
    ]
    head.free(state)
    wanted = expected(chain[:-1])
    torch.testing.assert_close(torch.stack([root[0], *nodes]), wanted, atol=1e-4, rtol=1e-4)
    assert wanted.argmax(-1).tolist() == chain
    assert torch.isfinite(root[0]).sum() == len(head.vocabulary)
    head.output = output
    sure = float(confidence(root)[0])
    for share, length in ((0.999, STEPS), (1.001, 1)):
        limits = np.zeros((STEPS, 1), np.float32)
        limits[0] = share * sure
        assert drafted(limits) == chain[:length]


def test_a_head_is_read_back_with_its_vocabulary(
    head: Eagle3, target: HeadTarget, tmp_path: Path
) -> None:
    head.save(tmp_path)
    again = load_head(Eagle3, tmp_path, target)
    assert again.vocabulary.tolist() == head.vocabulary.tolist()
    assert again.options == head.options


@pytest.mark.parametrize(
    ("options", "problem"),
    [({"features": (0,)}, "from 1 to"), ({"vocabulary": 10**6}, "the number of tokens")],
)
def test_impossible_options_are_named(
    target: HeadTarget, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        untrained("eagle3", target, **options)
