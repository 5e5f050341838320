"""A head in a drafter replica of a real deployment, fed with the target's states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from paceline.cluster import serving
from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.rpc.client import Client
from paceline.sampling import SamplingParams
from paceline.tokenizer import load_tokenizer
from tests.deployments.conftest import PROMPTS, SMALL, config_file, eventually, free_port

AR = Callable[[Sequence[str], SamplingParams], list[tuple[int, ...]]]
NAME = "test-heads"


@pytest.fixture
def gateway(ray_cluster: None) -> Iterator[str]:
    from ray import serve

    file = config_file("actors", NAME, free_port()).with_args(
        {
            "model": {"target": str(TARGET_DIR)},
            "drafter": {**SMALL, "method": "eagle"},
            "speculation": {"method": "eagle", "length": "fixed"},
        }
    )
    try:
        serving.deploy(file, lambda line: None)
        yield serving.describe(NAME)["gateway"]
    finally:
        serve.delete(NAME)


@pytest.mark.serve
@pytest.mark.slow  # the processes of a deployment; tests/rpc/test_states.py has the same parts
def test_tokens_of_a_head_in_a_replica_are_those_of_ar(gateway: str, ar: AR) -> None:
    encode = load_tokenizer(TARGET_DIR).encode
    with Client(gateway) as client:
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=24, temperature=temperature, ignore_eos=True)
            expected = ar(PROMPTS, params)
            for text, tokens in zip(PROMPTS, expected, strict=True):
                completion = client.complete(encode(text), params)
                assert tuple(completion.token_ids) == tokens
                assert completion.statistics.num_accepted > 0
                assert completion.statistics.states_bytes > 24 * 160
            # A request may still name a method whose head is beside the target.
            beside = client.complete(
                encode(PROMPTS[0]), params, SpeculationConfig(method="medusa", length="fixed")
            )
            assert tuple(beside.token_ids) == expected[0]
            assert beside.statistics.states_bytes == 0
    (target,) = serving.describe(NAME)["deployments"]["target"]["replicas"]
    assert target["states_bytes"] > 0
    assert eventually(lambda: target["drafters"])
