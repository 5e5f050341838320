"""Rounds of a device that go to the target directly, with a ticket of a gateway."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from benchmarks.netem import Netem
from paceline.config import SpeculationConfig
from paceline.deployments.config import DeploymentConfig, parse_config
from paceline.deployments.session_ids import SessionIds
from paceline.deployments.tickets import DirectTicket, sign_ticket
from paceline.engine import EngineThread
from paceline.errors import ResourceExhausted, SessionNotFound
from paceline.models.base import ModelRunner
from paceline.rpc.client import open_channel, open_direct
from paceline.rpc.device import DeviceClient
from paceline.rpc.direct import ConnectDirect
from paceline.rpc.errors import Unauthenticated, from_rpc_error, from_status
from paceline.rpc.gen.paceline.v1 import ticket_pb2, ticket_pb2_grpc, verify_pb2, verify_pb2_grpc
from paceline.rpc.ladder import Mode
from paceline.sampling import SamplingParams
from tests.deployments.test_gateways import (
    ALICE,
    BOB,
    KEYS,
    PROMPT,
    Gateways,
    ar,
    engines,
    eventually,
    folder,
    runners,
    write_tenants,
)
from tests.fakes import WITH_FAKES
from tests.rpc.test_device import RewindingMix
from tests.rpc.test_device_faults import QUICK

__all__ = ["engines", "folder", "runners"]

LONG = SamplingParams(max_tokens=120, temperature=1.0, seed=3, ignore_eos=True)


def config(**direct: Any) -> DeploymentConfig:
    return parse_config({"direct": {"enabled": True, **direct}})


def device(
    server: str,
    truth: list[int],
    *,
    token: str | None = None,
    direct: ConnectDirect | None = open_direct,
    rho: float = 0.8,
) -> DeviceClient:
    """A client whose drafter is right with probability ``rho`` at each token."""
    client = DeviceClient(
        [server], {"mix": RewindingMix({tuple(PROMPT): truth}, 258, rho=rho)},
        speculation=SpeculationConfig(method="mix"),
        connect=partial(open_channel, token=token),
        modes=(Mode.DEVICE,),
        patience=QUICK,
        catalogue=WITH_FAKES,
        direct=direct,
    )  # fmt: skip
    client.target._direct.pause = 0.01
    return client


async def complete(client: DeviceClient, params: SamplingParams) -> list[int]:
    return (await asyncio.to_thread(client.complete, PROMPT, params)).token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_tokens_past_the_gateway_are_those_of_ar(
    temperature: float, engines: list[EngineThread], runners: list[ModelRunner]
) -> None:
    params = replace(LONG, temperature=temperature)
    truth = ar(runners[0], params)
    async with Gateways(engines, config=config()) as gateways:
        with await asyncio.to_thread(device, gateways.servers[0].address, truth) as client:
            for _ in range(2):
                assert await complete(client, params) == truth
            counters = client.result.counters
        assert counters.num_tickets == counters.num_opened == 2
        assert counters.num_resumed == 2  # each session moved once
        assert counters.direct_rounds > 10
        assert counters.num_failures == counters.direct_failures == 0
        assert await gateways.idle()
