"""The `device` topology: the drafter here, the target on a server, tokens equal to AR's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine
from paceline.models.base import ModelRunner
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from rpc.device import DeviceClient
from rpc.remote_target import Mode
from rpc.server import RpcServer
from tests.fakes import Mix
from tests.rpc.netem import Link, Netem

PROMPT = list(b"import os\nimport ")
METHODS_HERE = (
    "draft_model",
    "draft_model_tree",
    "prompt_lookup",
    "suffix_decoding",
    "copyspec",
    "combined",
)


def ar(runner: ModelRunner, params: SamplingParams, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What plain AR decoding adds to a prompt."""
    engine = Engine(ModelTarget(runner))
    (session,) = engine.generate([prompt], params, SpeculationConfig(method="ar"))
    return session.output_ids


@pytest.fixture
def drafter(draft_runner: ModelRunner) -> DraftModel:
    return DraftModel(draft_runner)


class RewindingMix(Mix):
    """A fake that can draft ahead, as it looks at nothing but the tokens."""

    rewinds = True


@pytest.mark.parametrize("rtt", [0.0, 0.02, 0.1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_over_a_slow_link_are_those_of_ar(
    rtt: float, temperature: float, server: RpcServer, runner: ModelRunner, drafter: DraftModel
) -> None:
    params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
    with Netem(server.address, Link(rtt=rtt, jitter=rtt / 10)) as netem:
        for method in METHODS_HERE if rtt < 0.1 else METHODS_HERE[:1]:
            speculation = SpeculationConfig(method=method)
            with DeviceClient(
                [netem.address], {"draft_model": drafter}, speculation=speculation,
                modes=(Mode.DEVICE,),
            ) as client:  # fmt: skip
                result = client.complete(PROMPT, params)
            assert result.token_ids == ar(runner, params), method
            assert result.finish_reason == "length"
            print(method, rtt, result.statistics.num_rounds, result.counters)
