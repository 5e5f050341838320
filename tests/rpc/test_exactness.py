"""The product's promise over the wire: drafts over gRPC, tokens over gRPC, and they are AR's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineThread
from paceline.loading import load_engine
from rpc.client import Client
from rpc.draft_service import DraftServicer
from rpc.generate_service import ModelInfo
from rpc.remote_drafter import RemoteDrafter
from rpc.server import RpcServer
from tests.core.suite import CASES, Suite
from tests.rpc.serving import serving


@pytest.fixture(scope="module")
def demo() -> Engine:
    return load_engine()


@pytest.fixture(scope="module")
def suite(demo: Engine) -> Suite:
    return Suite(demo, 16, 64, batch=8)


@pytest.fixture(scope="module")
def long_suite(demo: Engine) -> Suite:
    return Suite(demo, 256, 128, batch=32)


@pytest.fixture(scope="module")
def drafter_server(demo: Engine) -> Iterator[RpcServer]:
    """The demo drafter as a DraftService replica."""
    local = demo.drafters["draft_model"]
    assert isinstance(local, DraftModel)
    servicer = DraftServicer(
        DraftModel(local.runner), name="draft_model", vocab_size=demo.target.vocab_size
    )
    with serving(drafter=servicer) as server:
        yield server


def check(
    suite: Suite, drafter_server: RpcServer, method: str, variant: str, batch: int, count: int
) -> None:
    """Generate over gRPC, ``batch`` calls at a time, and compare every token id with AR's."""
    vocab_size = suite.demo.target.vocab_size
    remote = RemoteDrafter(drafter_server.address, vocab_size=vocab_size)
    assert remote.wait_ready(10)
    thread = EngineThread(suite.engine(method, variant, batch, draft_model=remote)).start()
    try:
        with (
            serving(engine=thread, model=ModelInfo(name="demo")) as server,
            Client(server.address, timeout=120) as client,
            ThreadPoolExecutor(batch) as pool,
        ):
            speculation = suite.speculation(method)
            completions = list(
                pool.map(
                    lambda prompt, params: client.complete(prompt, params, speculation),
                    suite.prompts[:count],
                    suite.params(variant)[:count],
                )
            )
    finally:
        thread.stop()
        remote.stop()
    assert [list(c.token_ids) for c in completions] == suite.expected(variant)[:count]
    assert not any(c.statistics.drafter_lost for c in completions)
    if method == "draft_model":
        assert sum(c.statistics.num_accepted for c in completions) > 0


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("method", "variant"), CASES)
def test_tokens_over_grpc_are_those_of_ar(
    method: str, variant: str, batch: int, suite: Suite, drafter_server: RpcServer
) -> None:
    check(suite, drafter_server, method, variant, batch, 16)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("method", "variant"), CASES)
def test_many_tokens_over_grpc_are_those_of_ar(
    method: str, variant: str, batch: int, long_suite: Suite, drafter_server: RpcServer
) -> None:
    check(long_suite, drafter_server, method, variant, batch, 256)
