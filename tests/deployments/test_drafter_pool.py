"""Drafters are added to a running deployment: its target leases and uses all of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from paceline.cluster import serving
from paceline.config import SpeculationConfig
from paceline.rpc.client import Client, Completion
from paceline.sampling import SamplingParams
from tests.deployments.conftest import PROMPTS, SMALL, config_file, eventually, free_port

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

AR = Callable[[Sequence[str], SamplingParams], list[tuple[int, ...]]]
NAME = "test-pool"
PARAMS = SamplingParams(max_tokens=400, ignore_eos=True)
DRAFTS = SpeculationConfig(method="draft_model", length="fixed")
SESSIONS = 3
ADDED_WITHIN_S = 120.0
"""Two replicas import torch on a machine that may be busy."""


@pytest.fixture
def gateway(ray_cluster: None) -> Iterator[str]:
    """One drafter, which Serve makes two as soon as there are three sessions."""
    from ray import serve

    scaling = {"max_replicas": 2, "target_sessions": 1.5, "upscale_delay_s": 0}
    file = config_file("actors", NAME, free_port()).with_args(
        {"drafter": {**SMALL, "autoscaling": scaling}}
    )
    try:
        serving.deploy(file, lambda line: None)
        yield serving.describe(NAME)["gateway"]
    finally:
        serve.delete(NAME)


def _replicas(deployment: str) -> list[dict[str, Any]]:
    replicas: list[dict[str, Any]] = serving.describe(NAME)["deployments"][deployment]["replicas"]
    return replicas


@pytest.mark.slow
def test_drafters_that_are_added_get_sessions(gateway: str, ar: AR) -> None:
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(SESSIONS)]
    expected = ar(prompts, PARAMS)
    done: list[tuple[int, Completion]] = []
    enough = threading.Event()

    def generate(i: int) -> None:
        with Client(gateway, timeout=120) as client:
            while not enough.is_set():
                done.append((i, client.complete(prompts[i], PARAMS, DRAFTS)))

    threads = [threading.Thread(target=generate, args=(i,)) for i in range(SESSIONS)]
    for thread in threads:
        thread.start()
    try:
        assert eventually(lambda: sum(d["sessions"] for d in _replicas("drafter")) == SESSIONS)
        assert len(_replicas("drafter")) == 1

        def all_drafters_have_sessions() -> bool:
            drafters = _replicas("drafter")
            return len(drafters) == 2 and all(d["sessions"] for d in drafters)

        assert eventually(all_drafters_have_sessions, ADDED_WITHIN_S), serving.describe(NAME)
        assert [drafter["leases"] for drafter in _replicas("drafter")] == [1, 1]
        (target,) = _replicas("target")
        assert len(target["drafters"]) == 2

        def both_have_drafted_to_the_end() -> bool:
            return len({each.last.drafter_address for _, each in list(done)}) == 2

        assert eventually(both_have_drafted_to_the_end, ADDED_WITHIN_S)
    finally:
        enough.set()
        for thread in threads:
            thread.join(120)
    assert len(done) >= SESSIONS
    for i, completion in done:
        assert completion.token_ids == expected[i]
        assert completion.statistics.drafter_failures == 0
        assert completion.statistics.num_draft_nodes > 0
    assert eventually(lambda: not any(drafter["sessions"] for drafter in _replicas("drafter")))
