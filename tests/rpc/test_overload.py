"""Twice the load that a server can hold: who is admitted keeps its latency, the rest is told when
to come again."""

from __future__ import annotations

import threading
from pathlib import Path

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineLimits, EngineThread
from paceline.errors import ResourceExhausted
from paceline.loading import load_runner
from paceline.request import Request
from paceline.rpc.client import Client
from paceline.rpc.gen.paceline.v1 import generate_pb2, generate_pb2_grpc
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from tests.rpc.serving import eventually, serving

PLACES, QUEUE, LENGTH = 4, 2, 40
LIMITS = EngineLimits(max_sessions=PLACES, max_waiting=QUEUE)
AR = SpeculationConfig(method="ar")
PARAMS = SamplingParams(max_tokens=LENGTH, ignore_eos=True)


@pytest.mark.parametrize("load", [1, 2, 10])
def test_latency_in_steps_is_bounded_by_the_queue(model_folder: Path, load: int) -> None:
    """Arrivals at ``load`` times the rate at which places become free, counted in steps: seconds
    would be those of a busy machine."""
    engine = Engine(ModelTarget(load_runner(model_folder, kv_tokens=2000)), limits=LIMITS)
    steps_each = LENGTH + 1  # one more for the prompt
    submitted: dict[Session, int] = {}
    took: list[int] = []
    refused = offered = 0
    for step in range(8 * steps_each):
        due = (step + 1) * PLACES * load // steps_each
        while offered < due:
            offered += 1
            try:
                submitted[engine.submit(Request([1, 2, offered % 250], PARAMS, AR))] = step
            except ResourceExhausted as error:
                refused += error.retry_after_s > 0
        engine.step()
        ended = [session for session in submitted if session.finished]
        took += [step - submitted.pop(session) + 1 for session in ended]
    assert len(took) + refused + len(submitted) == offered
    assert max(took) <= steps_each * (1 + QUEUE / PLACES) + steps_each
    if load == 1:
        assert refused == 0
    else:
        assert refused >= 0.8 * (offered - offered / load) - 2 * (PLACES + QUEUE)
    done = len(took) / 8
    assert done >= 0.8 * PLACES  # the places are in use all the time


@pytest.mark.slow
@pytest.mark.alone
def test_a_server_at_twice_its_load(model_folder: Path) -> None:
    runner = load_runner(model_folder, kv_tokens=4000)
    thread = EngineThread(Engine(ModelTarget(runner), limits=LIMITS)).start()
    prompts = [[1 + i, 2, 3] for i in range(8)]
    expected = [
        s.output_ids for s in Engine(ModelTarget(runner)).generate(prompts, PARAMS, AR)
    ]  # before the server has any
    admitted: list[int] = []
    refused: list[ResourceExhausted] = []
    wrong: list[int] = []
    with serving(engine=thread) as server, Client(server.address, timeout=60) as client:

        def ask(i: int) -> None:
            try:
                completion = client.complete(prompts[i % 8], PARAMS, AR)
            except ResourceExhausted as error:
                refused.append(error)
                return
            admitted.append(i)
            if list(completion.token_ids) != expected[i % 8]:
                wrong.append(i)

        def offer(count: int) -> None:
            threads = [threading.Thread(target=ask, args=(i,)) for i in range(count)]
            for each in threads:
                each.start()
            for each in threads:
                each.join(60)

        offer(PLACES)
        assert len(admitted) == PLACES
        admitted.clear()
        for _ in range(5):
            offer(2 * (PLACES + QUEUE))

        assert not wrong
        assert len(admitted) + len(refused) == 5 * 2 * (PLACES + QUEUE)
        assert len(refused) >= 5
        assert all(error.retry_after_s and error.retry_after_s > 0 for error in refused)
        # Half of the queue is kept for those that were refused, until their time is over.
        returns = thread.engine.scheduler._returns
        assert eventually(lambda: not returns.num_before(("", 0), lambda: 0), 15)
        # On the wire it is RESOURCE_EXHAUSTED with RetryInfo, which HTTP makes 429 of.
        long = SamplingParams(max_tokens=400, ignore_eos=True)
        running = [client.generate([1], long, AR) for _ in range(PLACES + QUEUE)]
        readers = [threading.Thread(target=lambda each=each: list(each)) for each in running]
        for reader in readers:
            reader.start()
        assert eventually(lambda: len(thread.engine.sessions) == PLACES + QUEUE)
        request = generate_pb2.GenerateRequest(token_ids={"token_ids": [1]})
        request.speculation.method = "ar"
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as e:
            list(generate_pb2_grpc.GenerateServiceStub(channel).Generate(request, timeout=20))
        status = rpc_status.from_call(e.value)
        assert status is not None
        assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        retry = error_details_pb2.RetryInfo()
        assert any(detail.Unpack(retry) for detail in status.details)
        assert retry.retry_delay.ToTimedelta().total_seconds() > 0
        for reader in readers:
            reader.join(60)
    thread.stop()
