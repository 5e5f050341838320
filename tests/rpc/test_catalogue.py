"""Choosing method and knobs at run time over gRPC: as in the library (tests/core)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from paceline.config import SpeculationConfig, parse_speculation
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.masked_folder import MASKED_DRAFTERS
from paceline.methods import METHODS
from paceline.models.base import ModelRunner
from paceline.rpc.client import Client
from paceline.rpc.gen.paceline.v1 import common_pb2
from paceline.rpc.generate import with_all_knobs
from paceline.rpc.messages import speculation_from_message, speculation_to_message
from paceline.rpc.server import RpcServer
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from tests.combinations import IMPOSSIBLE, POSSIBLE, Combination

PROMPT = list(b"def f(x): return x")


@pytest.mark.parametrize("combination", IMPOSSIBLE, ids=str)
def test_impossible_combinations_are_refused(server: RpcServer, combination: Combination) -> None:
    config = parse_speculation(combination.speculation)
    with Client(server.address) as client, pytest.raises(InvalidArgument) as caught:
        client.complete(PROMPT, combination.params, config)
    assert caught.value.field == combination.field
    for word in combination.words:
        assert word in str(caught.value)


@pytest.mark.parametrize("speculation", POSSIBLE, ids=str)
def test_method_and_knobs_are_chosen_for_each_request(
    server: RpcServer, runner: ModelRunner, speculation: Mapping[str, Any]
) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.8, seed=3)
    engine = Engine(ModelTarget(runner))
    (ar,) = engine.generate([PROMPT], params, SpeculationConfig(method="ar"))
    with Client(server.address) as client:
        done = client.complete(PROMPT, params, parse_speculation(speculation))
    assert list(done.token_ids) == ar.output_ids


@pytest.mark.parametrize(
    "knobs",
    [
        {"branching_vector": (4, 2, 1)},
        {"drafters": ("prompt_lookup", "draft_model")},
        {"rank_acceptance": (0.5, 0.25)},
        {"template": ((0,), (1,), (0, 0))},
        {"template": "medusa_63"},
        {"template": "[not a list"},
    ],
    ids=str,
)
def test_lists_travel_whole(knobs: Mapping[str, Any]) -> None:
    config = parse_speculation(knobs)
    wire = speculation_to_message(config).SerializeToString()
    assert speculation_from_message(common_pb2.Speculation.FromString(wire)) == config


def test_a_server_lists_what_it_can_run(server: RpcServer) -> None:
    with Client(server.address) as client:
        lacking = {n for n, m in METHODS.items() if m.head or m.acceptance == "judge"}
        lacking |= {n for n, m in METHODS.items() if m.drafter in MASKED_DRAFTERS}
        assert set(client.get_model().methods) == METHODS.keys() - lacking


def test_a_knob_that_the_proto_lacks_gets_the_next_number() -> None:
    head = "message Other {\n  int32 x = 40;\n}\n\n"
    proto = head + "message Speculation {\n  // Old.\n  optional string method = 7;\n}\n"
    text = with_all_knobs(proto)
    help_text = SpeculationConfig.model_fields["method"].description
    assert text.startswith(
        f"{head}message Speculation {{\n  // {help_text}\n  optional string method = 7;"
    )
    assert "  optional int32 num_speculative_tokens = 8;\n" in text
    assert "  optional bool allow_lossy = " in text
    assert text.count(" method = ") == 1
    assert with_all_knobs(text) == text
