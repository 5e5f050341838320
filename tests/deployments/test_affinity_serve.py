"""Two targets on Ray: conversations go on where their beginnings are cached."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from ray import serve

from paceline.cluster import serving
from paceline.config import SpeculationConfig
from paceline.rpc.client import Client
from paceline.sampling import SamplingParams
from tests.deployments.conftest import SMALL, config_file

pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(300)]

NAME = "test-affinity"
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
CONVERSATIONS, TURNS, FIRST, MORE = 10, 4, 192, 64


@pytest.fixture(
    params=[True, pytest.param(False, marks=pytest.mark.nightly)], ids=["affinity", "load alone"]
)
def affinity(request: pytest.FixtureRequest, ray_cluster: None) -> Iterator[bool]:
    targets = {"num_replicas": 2, "num_cpus": 0.1, "prefix_affinity": request.param}
    file = config_file("colocated", NAME, 0).with_args(
        {"gateway": {**SMALL, "http_port": None}, "target": targets}
    )
    try:
        serving.deploy(file, lambda line: None)
        yield request.param
    finally:
        serve.delete(NAME)


def cached_share(counters: list[dict[str, float]]) -> float:
    """Share of the looked-up prompt tokens that were cached."""
    return sum(c["prefix_hit"] for c in counters) / sum(c["prefix_queried"] for c in counters)


def test_turns_of_a_conversation_find_the_ones_before(affinity: bool) -> None:
    draw = random.Random(1)
    (gateway,) = serving.describe(NAME)["deployments"]["gateway"]["replicas"]
    prompts = [draw.choices(range(4, 4000), k=FIRST) for _ in range(CONVERSATIONS)]
    ar = SpeculationConfig(method="ar")
    with Client(gateway["address"], timeout=60) as client, ThreadPoolExecutor(4) as users:
        for _ in range(TURNS):
            draw.shuffle(prompts)
            answers = users.map(lambda prompt: client.complete(prompt, PARAMS, ar), prompts)
            for prompt, answer in zip(prompts, answers, strict=True):
                prompt += [*answer.token_ids, *draw.choices(range(4, 4000), k=MORE)]
    targets = serving.describe(NAME)["deployments"]["target"]["replicas"]
    share = cached_share(targets)
    print(f"affinity {affinity}: {share:.0%} of prompt tokens cached")
    assert min(target["prefix_queried"] for target in targets) > 0, "one replica got everything"
    if affinity:
        assert share > 0.6
    else:
        assert share < 0.6
