"""A deployment whose draft model learns as it serves, with tenants who allow it and who do not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster import serving
from paceline.config import SpeculationConfig
from paceline.deployments import learner
from paceline.deployments.config import DeploymentConfig, parse_config
from paceline.deployments.learner import NewWeights, Rollout
from paceline.errors import InvalidArgument
from paceline.rpc.client import Client, Completion
from paceline.sampling import SamplingParams
from tests.deployments.conftest import PROMPTS, SMALL, config_file, eventually, free_port

AR = Callable[[Sequence[str], SamplingParams], list[tuple[int, ...]]]
NAME = "test-online"
TOKENS = {name: f"token-of-{name}-0123456789" for name in ("willing", "private")}
PARAMS = SamplingParams(max_tokens=200, ignore_eos=True)
DRAFTS = SpeculationConfig(method="draft_model", length="fixed", num_speculative_tokens=6)
INTERVAL = 8


@pytest.fixture(params=["actors", pytest.param("colocated", marks=pytest.mark.nightly)])
def gateway(
    ray_cluster: None, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[str, int]]:
    """Its address, and the number of replicas that host the draft model."""
    from ray import serve

    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(
        f"tenants:\n  willing: {{token: {TOKENS['willing']}, online_training: true}}\n"
        f"  private: {{token: {TOKENS['private']}}}\n"
    )
    port = free_port()
    file = config_file(request.param, NAME, port).with_args(
        {
            "drafter": {**SMALL, "num_replicas": 2},
            "gateway": {**SMALL, "grpc_port": port, "http_port": None, "tenants": str(tenants)},
            "online": {
                **SMALL, "enabled": True, "update_interval": INTERVAL, "rollout_s": 0.5,
                "learning_rate": 1e-3, "without_tenants": True,
            },
        }
    )  # fmt: skip
    try:
        serving.deploy(file, lambda line: None)
        yield serving.describe(NAME)["gateway"], 2 if request.param == "actors" else 1
    finally:
        serve.delete(NAME)


def replicas(deployment: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = serving.describe(NAME)["deployments"][deployment]["replicas"]
    return found


def learnt() -> dict[str, Any]:
    (status,) = replicas("learner")
    return status


def judged() -> int:
    return sum(learnt()["judged"].values())


@pytest.mark.nightly
@pytest.mark.serve
@pytest.mark.timeout(300)
def test_a_roll_out_under_traffic_loses_nothing_and_nothing_private_is_kept(
    gateway: tuple[str, int], ar: AR
) -> None:
    address, num_hosts = gateway
    with Client(address, token=TOKENS["private"], timeout=120) as client:
        private = client.complete(PROMPTS[0], PARAMS, DRAFTS)
    stats = private.statistics
    assert eventually(lambda: judged() >= stats.num_accepted > 0, 30)
    status = learnt()
    assert (status["buffered"], status["updates"], status["dropped"]) == (0, 0, 0)

    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(4)]
    expected = ar(prompts, PARAMS)
    done: list[tuple[int, Completion]] = []
    enough = threading.Event()

    def generate(i: int) -> None:
        with Client(address, token=TOKENS["willing"], timeout=120) as client:
            while not enough.is_set():
                done.append((i, client.complete(prompts[i], PARAMS, DRAFTS)))

    threads = [threading.Thread(target=generate, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:

        def rolled_out() -> bool:
            status = learnt()
            loaded = status["loaded"].values()
            return len(loaded) == num_hosts and min(loaded) > 0 and len(status["judged"]) >= 3

        assert eventually(rolled_out, 120), serving.describe(NAME)
    finally:
        enough.set()
        for thread in threads:
            thread.join(120)
    assert len(done) >= 4
    for i, completion in done:
        assert completion.token_ids == expected[i]
        assert completion.statistics.drafter_failures == 0
        assert completion.statistics.num_draft_nodes > 0
    assert private.token_ids == expected[0]

    def settled() -> bool:
        earlier = learnt()
        time.sleep(3 * learner.SEND_S)  # until the targets' last batches are there
        return earlier == learnt()

    assert eventually(settled, 60)
    before, seen = learnt(), judged()
    with Client(address, token=TOKENS["private"], timeout=120) as client:
        client.complete(PROMPTS[1], PARAMS, DRAFTS)
    assert eventually(lambda: judged() > seen, 30)
    after = learnt()
    assert [after[key] for key in ("buffered", "updates", "dropped")] == [
        before[key] for key in ("buffered", "updates", "dropped")
    ]


# --- without Ray ----------------------------------------------------------------------------------


def test_replicas_load_new_weights_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(learner.time, "monotonic", lambda: now)
    rollout = Rollout()
    assert rollout.ask("a", 0) is None
    assert rollout.ask("b", 0) is None
    rollout.weights = NewWeights(3, b"three")
    assert rollout.ask("a", 0) == rollout.weights
    assert rollout.ask("b", 0) is None  # a loads
    assert rollout.version == 0
    assert rollout.ask("a", 3) is None  # a has loaded
    assert rollout.ask("b", 0) == rollout.weights
    rollout.weights = NewWeights(5, b"five")
    assert rollout.ask("a", 3) is None  # b loads
    now = learner.TURN_S + 1  # b has died
    assert rollout.ask("a", 3) == rollout.weights
    assert rollout.version == 0
    now += learner.GONE_S
    assert rollout.ask("a", 5) is None
    assert rollout.version == 5  # b no longer counts
    assert rollout.ask("c", 0) == rollout.weights  # a new replica


@pytest.mark.parametrize(
    ("online", "more", "named"),
    [
        ({"enabled": True, "update_interval": 0}, {}, "online.update_interval"),
        ({"enabled": True, "batch": 8}, {}, "online"),
        ({"retention": {"positions": 8}}, {}, "online"),
        ({"retention": {"seconds": 0}}, {}, "online.retention.seconds"),
        ({"divergence": "tvd"}, {}, "online.divergence"),
        ({"interval": 3}, {}, "online.interval"),
        ({"enabled": True}, {"engine": "vllm"}, "online.enabled"),
        ({"enabled": True}, {"model": {"target": "x"}, "topology": "colocated",
                             "speculation": {"method": "prompt_lookup"}}, "online.enabled"),
    ],
)  # fmt: skip
def test_a_wrong_configuration_is_refused_by_name(
    online: dict[str, Any], more: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        parse_config({"online": online, **more}, models_here=False)
    assert refused.value.field == named


def test_nothing_learns_by_default() -> None:
    config = DeploymentConfig()
    assert not config.online.enabled
    assert not config.online.without_tenants
    assert config.online not in config.roles
