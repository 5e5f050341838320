"""The product's promise over the wire: drafts over gRPC, tokens over gRPC, and they are AR's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineThread
from paceline.loading import load_engine
from paceline.rpc.client import Client, Completion
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.mirrors import served_with
from paceline.rpc.remote_drafter import RemoteDrafter
from paceline.rpc.server import RpcServer
from tests.core.suite import (
    CORE_CASES,
    OTHER_CASES,
    OTHER_LOSSLESS_CASES,
    Suite,
    count_for,
)
from tests.fakes import WITH_FAKES
from tests.rpc.serving import serving


@pytest.fixture(scope="module")
def demo() -> Engine:
    return load_engine()


@pytest.fixture(scope="module")
def suite(demo: Engine) -> Suite:
    return Suite(demo, 8, 32, batch=8)


@pytest.fixture(scope="module")
def short_suite(demo: Engine) -> Suite:
    """In one process (tests/core) each method has more tokens: the wire is the same for all."""
    return Suite(demo, 8, 8, batch=8)


@pytest.fixture(scope="module")
def long_suite(demo: Engine) -> Suite:
    return Suite(demo, 256, 128, batch=32)


@pytest.fixture(scope="module")
def shorter_suite(demo: Engine) -> Suite:
    return Suite(demo, 40, 64, batch=32)


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


class Wire:
    """Servers over the demo pair, kept for all cases; their drafters learn from one to the next.

    Args:
        drafter_address: of a DraftService with the demo drafter.
        batch: sessions at a time at most.
    """

    def __init__(self, suite: Suite, drafter_address: str, batch: int) -> None:
        self._suite = suite
        self._drafter_address = drafter_address
        self._batch = batch
        self._stack = ExitStack()
        self._clients: dict[tuple[str, bool], Client] = {}

    def client(self, method: str, variant: str) -> Client:
        """A client of a server that can run the method.

        The draft model, and drafters that are made of it, are behind gRPC, too, where the method
        lets them: a drafter that needs more of the target than tokens does not.
        """
        remote = served_with(WITH_FAKES.get(method, WITH_FAKES["mix"]), "draft_model")
        if (variant, remote) not in self._clients:
            self._clients[variant, remote] = self._serve(variant, remote)
        return self._clients[variant, remote]

    def _serve(self, variant: str, remote: bool) -> Client:
        suite, stack = self._suite, self._stack
        drafters: dict[str, RemoteDrafter] = {}
        if remote:
            vocab_size = suite.demo.target.vocab_size
            # On a machine that does much else at once a draft may take seconds.
            drafter = RemoteDrafter(self._drafter_address, vocab_size=vocab_size, deadline_s=30.0)
            stack.callback(drafter.stop)
            assert drafter.wait_ready(10)
            rows = (row for row in WITH_FAKES.values() if served_with(row, "draft_model"))
            drafters = dict.fromkeys((row.drafter for row in rows), drafter)
        engine = suite.engine("always_right", variant, self._batch, **drafters)
        thread = EngineThread(engine).start()
        stack.callback(thread.stop)
        server = stack.enter_context(serving(engine=thread, model=ModelInfo(name="demo")))
        return stack.enter_context(Client(server.address, timeout=120))

    def close(self) -> None:
        self._stack.close()


def open_wire(suite: Suite, drafter_server: RpcServer) -> Iterator[Wire]:
    wire = Wire(suite, drafter_server.address, batch=8)
    yield wire
    wire.close()


@pytest.fixture(scope="module")
def wire(suite: Suite, drafter_server: RpcServer) -> Iterator[Wire]:
    yield from open_wire(suite, drafter_server)


@pytest.fixture(scope="module")
def short_wire(short_suite: Suite, drafter_server: RpcServer) -> Iterator[Wire]:
    yield from open_wire(short_suite, drafter_server)


@pytest.fixture(scope="module")
def long_wire(long_suite: Suite, drafter_server: RpcServer) -> Iterator[Wire]:
    yield from open_wire(long_suite, drafter_server)


@pytest.fixture(scope="module")
def shorter_wire(shorter_suite: Suite, drafter_server: RpcServer) -> Iterator[Wire]:
    yield from open_wire(shorter_suite, drafter_server)


def complete(
    suite: Suite, wire: Wire, method: str, variant: str, batch: int, count: int | None = None
) -> list[Completion]:
    """Generate over gRPC for the first ``count`` prompts, ``batch`` calls at a time."""
    client, speculation = wire.client(method, variant), suite.speculation(method)
    with ThreadPoolExecutor(batch) as pool:
        completions = list(
            pool.map(
                lambda prompt, params: client.complete(prompt, params, speculation),
                suite.prompts[:count],
                suite.params(variant)[:count],
            )
        )
    assert not any(c.statistics.drafter_lost for c in completions)
    assert all(len(c.token_ids) == suite.num_tokens for c in completions)
    return completions


def check(
    suite: Suite, wire: Wire, method: str, variant: str, batch: int, count: int | None = None
) -> None:
    """Compare every token id with AR's."""
    completions = complete(suite, wire, method, variant, batch, count)
    assert [list(c.token_ids) for c in completions] == suite.expected(variant)[:count]
    if method == "draft_model":
        assert sum(c.statistics.num_accepted for c in completions) > 0


@pytest.mark.one_of(3, slow=9)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("method", "variant"), CORE_CASES)
def test_tokens_over_grpc_are_those_of_ar(
    method: str, variant: str, batch: int, suite: Suite, wire: Wire
) -> None:
    check(suite, wire, method, variant, batch, count_for(batch, core=True))


@pytest.mark.one_of(5, slow=7)
@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.nightly), 8])
@pytest.mark.parametrize(("method", "variant"), OTHER_LOSSLESS_CASES)
def test_tokens_of_every_method_over_grpc_are_those_of_ar(
    method: str, variant: str, batch: int, short_suite: Suite, short_wire: Wire
) -> None:
    check(short_suite, short_wire, method, variant, batch, count_for(batch))


@pytest.mark.one_of(5, slow=2)
@pytest.mark.parametrize(("method", "variant"), OTHER_CASES)
def test_methods_with_other_tokens_run_over_grpc(
    method: str, variant: str, short_suite: Suite, short_wire: Wire
) -> None:
    """Lossy methods, and sampling rules that promise AR's law."""
    complete(short_suite, short_wire, method, variant, 8)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("method", "variant"), CORE_CASES)
def test_many_tokens_over_grpc_are_those_of_ar(
    method: str, variant: str, batch: int, long_suite: Suite, long_wire: Wire
) -> None:
    check(long_suite, long_wire, method, variant, batch)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize(("method", "variant"), OTHER_LOSSLESS_CASES)
def test_more_tokens_of_every_method_over_grpc_are_those_of_ar(
    method: str, variant: str, batch: int, shorter_suite: Suite, shorter_wire: Wire
) -> None:
    """Ten times the tokens of the everyday suite."""
    check(shorter_suite, shorter_wire, method, variant, batch)
