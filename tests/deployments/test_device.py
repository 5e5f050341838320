"""A drafter on the client's machine, through the gateway: the third topology, and AR's tokens."""

from __future__ import annotations

import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine
from paceline.rpc.device import DeviceClient
from paceline.rpc.ladder import Mode
from paceline.sampling import SamplingParams
from tests.deployments.conftest import PROMPTS, App
from tests.deployments.test_generate import AR, PARAMS

# The first test of a run waits for Ray, Serve and five replicas.
pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("params", PARAMS.values(), ids=PARAMS.keys())
@pytest.mark.parametrize("method", ["draft_model", "pearl", "prompt_lookup"])
def test_tokens_equal_local_ar(
    app: App, engine: Engine, ar: AR, method: str, params: SamplingParams
) -> None:
    local = engine.drafters["draft_model"]
    assert isinstance(local, DraftModel)
    assert engine.tokenizer is not None
    results = []
    for prompt in PROMPTS:
        with DeviceClient(
            [app.address], {"draft_model": DraftModel(local.runner, local.vocab_size)},
            speculation=SpeculationConfig(method=method),
            tokenizer=engine.tokenizer,
            modes=(Mode.DEVICE,),
        ) as client:  # fmt: skip
            results.append(client.complete(engine.tokenizer.encode(prompt), params))
    assert [tuple(result.token_ids) for result in results] == ar(PROMPTS, params)
    assert sum(result.statistics.num_accepted for result in results) > 0
    if method == "pearl":
        assert sum(result.counters.sent_ahead for result in results) > 0
