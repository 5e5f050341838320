"""Rounds of a device that go to the target directly, with a ticket of a gateway."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from benchmarks.netem import Netem
from paceline.cluster.certs import make_certificates
from paceline.config import SpeculationConfig
from paceline.deployments.config import DeploymentConfig, parse_config
from paceline.deployments.session_ids import SessionIds
from paceline.deployments.tickets import DirectTicket, sign_ticket
from paceline.engine import EngineThread
from paceline.errors import (
    FailedPrecondition,
    InvalidArgument,
    PacelineError,
    ResourceExhausted,
    SessionNotFound,
)
from paceline.models.base import ModelRunner
from paceline.rpc.client import bearer, open_channel, open_direct
from paceline.rpc.device import DeviceClient
from paceline.rpc.direct import ConnectDirect
from paceline.rpc.errors import (
    DeadlineExceeded,
    InternalError,
    Unauthenticated,
    from_parts,
    from_rpc_error,
    from_status,
)
from paceline.rpc.gen.paceline.v1 import ticket_pb2, ticket_pb2_grpc, verify_pb2, verify_pb2_grpc
from paceline.rpc.ladder import Mode
from paceline.rpc.messages import sampling_to_message
from paceline.rpc.server import PortInUse
from paceline.rpc.transcript import ClientTranscript
from paceline.sampling import SamplingParams
from paceline.types import EMPTY_DRAFT
from tests.deployments.test_gateways import (
    ALICE,
    BOB,
    KEYS,
    PROMPT,
    Gateways,
    LocalLink,
    ar,
    engines,
    eventually,
    folder,
    runners,
    write_tenants,
)
from tests.fakes import WITH_FAKES
from tests.rpc import test_fuzz
from tests.rpc.test_device import RewindingMix
from tests.rpc.test_device_faults import QUICK
from tests.rpc.test_fuzz import complaints, fuzz, good_frames, plain

__all__ = ["engines", "folder", "runners"]

LONG = SamplingParams(max_tokens=120, temperature=1.0, seed=3, ignore_eos=True)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is refused asks again at once."""
    monkeypatch.setattr("paceline.rpc.direct.FIRST_PAUSE_S", 0.005)


def config(**direct: Any) -> DeploymentConfig:
    return parse_config({"direct": {"enabled": True, **direct}})


class Unhurried(RewindingMix):
    """Leaves the session time to move to the target before its end."""

    def propose(self, sessions: Any, budgets: Any) -> Any:
        time.sleep(0.004)
        return super().propose(sessions, budgets)


async def device(
    gateways: Gateways,
    truth: list[int],
    *,
    address: str | None = None,
    token: str | None = None,
    direct: ConnectDirect | None = open_direct,
    rho: float = 0.8,
    max_in_flight: int = 8,
) -> DeviceClient:
    """A client whose drafter is right with probability ``rho`` at each token."""

    def connect() -> DeviceClient:
        return DeviceClient(
            [address or gateways.servers[0].address],
            {"mix": Unhurried({tuple(PROMPT): truth}, 258, rho=rho)},
            speculation=SpeculationConfig(method="mix"),
            connect=partial(open_channel, token=token),
            modes=(Mode.DEVICE,),
            patience=QUICK,
            catalogue=WITH_FAKES,
            max_in_flight=max_in_flight,
            direct=direct,
        )

    client = await asyncio.to_thread(connect)
    client.target.direct.pause = 0.005
    return client


async def complete(client: DeviceClient, params: SamplingParams) -> list[int]:
    return (await asyncio.to_thread(client.complete, PROMPT, params)).token_ids


class Opened:
    """A session at a gateway, by unary calls: none is under way between them."""

    def __init__(self, gateways: Gateways, token: str | None) -> None:
        self.transcript = ClientTranscript(PROMPT)
        self._gateway = gateways.servers[0].address
        self._metadata = () if token is None else bearer(token)

    @property
    def session_id(self) -> str:
        return self.transcript.session_id

    async def call(self, method: str, request: Any) -> Any:
        """One call of VerifyService.

        Raises:
            PacelineError: as the server raised it.
        """
        async with grpc.aio.insecure_channel(self._gateway) as channel:
            stub: Any = verify_pb2_grpc.VerifyServiceStub(channel)
            try:
                return await getattr(stub, method)(request, metadata=self._metadata)
            except grpc.RpcError as error:
                raise from_rpc_error(error) from None

    async def verify(self) -> None:
        """A round with an empty draft."""
        request = self.transcript.request(self.transcript.propose(EMPTY_DRAFT))
        request.session_id, request.epoch = self.session_id, self.transcript.epoch
        self.transcript.verified(await self.call("Verify", request))

    async def close(self) -> None:
        epoch = self.transcript.epoch
        await self.call("Close", verify_pb2.CloseRequest(session_id=self.session_id, epoch=epoch))


async def opened(gateways: Gateways, token: str | None = None) -> Opened:
    session = Opened(gateways, token)
    request = verify_pb2.OpenRequest(token_ids=PROMPT, sampling=sampling_to_message(LONG))
    session.transcript.opened(await session.call("Open", request))
    return session


async def issue(
    gateways: Gateways, session_id: str, token: str | None = None, tokens: int = 0, at: int = 0
) -> ticket_pb2.Ticket:
    """A ticket, as any client gets one at gateway ``at``."""
    metadata = () if token is None else bearer(token)
    async with grpc.aio.insecure_channel(gateways.servers[at].address) as channel:
        stub: Any = ticket_pb2_grpc.TicketServiceStub(channel)
        request = ticket_pb2.TicketRequest(session_id=session_id, tokens=tokens)
        try:
            ticket: ticket_pb2.Ticket = await stub.Issue(request, metadata=metadata)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    return ticket


class RawStream:
    """A stream at a target's listener."""

    def __init__(self, address: str, ticket: str | None) -> None:
        channel: Any = grpc.aio.insecure_channel(address)
        metadata = () if ticket is None else (("authorization", f"Bearer {ticket}"),)
        self._channel = channel
        self._call = verify_pb2_grpc.VerifyServiceStub(channel).Session(metadata=metadata)

    async def ask(self, **frame: Any) -> verify_pb2.VerifyReply:
        """The answer to a frame.

        Raises:
            PacelineError: a refusal, in its place or at the end of the stream.
        """
        try:
            await self._call.write(verify_pb2.VerifyFrame(**frame))
            reply: Any = await self._call.read()
            if reply is grpc.aio.EOF:
                raise AssertionError(await self._call.code())
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            code, text = await self._call.code(), await self._call.details()
            trailing = await self._call.trailing_metadata()
            raise from_parts(code, text, trailing) from None
        if reply.HasField("error"):
            raise from_status(reply.error)
        return cast(verify_pb2.VerifyReply, reply)

    async def resume(self, session_id: str) -> verify_pb2.OpenResult:
        reply = await self.ask(open=verify_pb2.OpenRequest(resume_session_id=session_id))
        return reply.open

    async def verify(self, session: ClientTranscript, ticket: str = "") -> None:
        """A round with an empty draft."""
        request = session.request(session.propose(EMPTY_DRAFT))
        session.verified((await self.ask(verify=request, ticket=ticket)).verify)

    async def close(self) -> None:
        self._call.cancel()
        await self._channel.close()


async def refused(address: str, ticket: str | None, session_id: str) -> str:
    """What a target says to a ticket that is not good for a session."""
    for _ in range(3):
        stream = RawStream(address, ticket)
        try:
            await stream.resume(session_id)
        except Unauthenticated as error:
            return str(error)
        except InternalError as error:  # gRPC's own, where the target refuses before this writes
            assert "from Core" in str(error)  # noqa: PT017
        finally:
            await stream.close()
    raise AssertionError(f"ticket {ticket!r} was not refused as such")


def says(text: str) -> DirectTicket:
    """What is written in a ticket."""
    payload = text.partition(".")[0]
    values = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    return DirectTicket(*values)


# --- tokens ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("temperature", "rho"), [(0.0, 0.8), (1.0, 0.8), (1.0, 1.0)])
async def test_tokens_past_the_gateway_are_those_of_ar(
    temperature: float, rho: float, engines: list[EngineThread], runners: list[ModelRunner]
) -> None:
    params = replace(LONG, temperature=temperature)
    truth = ar(runners[0], params)
    async with Gateways(engines, config=config()) as gateways:
        with await device(gateways, truth, rho=rho) as client:
            for _ in range(2):
                assert await complete(client, params) == truth
            counters = client.result.counters
        assert counters.num_tickets == counters.num_opened == 2
        assert counters.num_resumed == 2  # each session moved once
        assert counters.direct_rounds > 5
        assert counters.num_failures == counters.direct_failures == 0
        assert await gateways.idle()


async def test_any_gateway_gives_tickets_for_any_session(
    engines: list[EngineThread], runners: list[ModelRunner]
) -> None:
    """The balancer sends each call to another gateway."""
    truth = ar(runners[0], LONG)
    async with Gateways(engines, config=config(ticket_tokens=20)) as gateways:
        with await device(
            gateways, truth, address=gateways.proxy.address, max_in_flight=1
        ) as client:
            for _ in range(3):
                assert await complete(client, LONG) == truth
            assert client.result.counters.num_tickets > 3
            assert client.result.counters.direct_rounds > 10
        assert set(gateways.proxy.seen["Issue"]) == set(gateways.proxy.servers)
        assert await gateways.idle()


async def test_without_tickets_rounds_go_through_the_gateway(
    engines: list[EngineThread], runners: list[ModelRunner]
) -> None:
    truth = ar(runners[0], LONG)
    async with Gateways(engines) as gateways:
        with await device(gateways, truth) as client:
            assert await complete(client, LONG) == truth
            assert client.result.counters.num_tickets == client.result.counters.direct_rounds == 0
            assert client.result.counters.num_resumed == 0
        session = await opened(gateways)
        with pytest.raises(PacelineError, match="no method"):
            await issue(gateways, session.session_id)
        await session.close()
        assert await gateways.idle()


async def test_a_client_that_wants_no_tickets_gets_none(
    engines: list[EngineThread], runners: list[ModelRunner]
) -> None:
    truth = ar(runners[0], LONG)
    async with Gateways(engines, config=config()) as gateways:
        with await device(gateways, truth, direct=None) as client:
            assert await complete(client, LONG) == truth
            assert client.result.counters.num_tickets == 0
        assert await gateways.idle()


async def test_the_targets_certificate_is_the_gateways(
    engines: list[EngineThread], runners: list[ModelRunner], tmp_path: Path
) -> None:
    """And it is checked by the name of the gateway, whatever the target's address is."""
    make_certificates(tmp_path, hosts=["localhost"])
    other = tmp_path / "other"
    make_certificates(other, hosts=["localhost"])
    files = {"cert": str(tmp_path / "server.crt"), "key": str(tmp_path / "server.key")}
    truth = ar(runners[0], LONG)
    secure = parse_config({"direct": {"enabled": True}, "gateway": {"tls": files}})
    async with Gateways(engines, config=secure) as gateways:

        def named(address: str, ticket: str, gateway: str, ca: Path) -> grpc.Channel:
            assert address.startswith("127.0.0.1:")
            return open_direct(address, ticket, "localhost:1", ca=ca / "ca.crt")

        with await device(gateways, truth, direct=partial(named, ca=tmp_path)) as client:
            assert await complete(client, LONG) == truth
            assert client.result.counters.direct_rounds > 5
        for ca, name in ((other, "localhost"), (tmp_path, "gateway.example.org")):

            def strange(address: str, ticket: str, gateway: str) -> grpc.Channel:
                return open_direct(address, ticket, f"{name}:1", ca=ca / "ca.crt")  # noqa: B023

            with await device(gateways, truth, direct=strange) as client:
                assert await complete(client, LONG) == truth
                assert client.result.counters.direct_rounds == 0
        assert await gateways.idle()


# --- tickets that are no good ---------------------------------------------------------------------


async def test_wrong_tickets_are_refused_and_harm_no_session(
    engines: list[EngineThread], tmp_path: Path
) -> None:
    tenants = write_tenants(tmp_path / "tenants.yaml")
    async with (
        Gateways(engines[:1], tenants=tenants, config=config()) as gateways,
    ):
        mine, other = await opened(gateways, ALICE), await opened(gateways, ALICE)
        theirs = await opened(gateways, BOB)
        own, others = mine.session_id, other.session_id
        for session_id, token in ((own, BOB), (theirs.session_id, ALICE)):
            with pytest.raises(SessionNotFound):  # at the gateway already
                await issue(gateways, session_id, token)
        good = await issue(gateways, own, ALICE)
        foreign = await issue(gateways, others, ALICE)
        bobs = await issue(gateways, theirs.session_id, BOB)
        key, ticket = SessionIds(KEYS).ticket_key(own), says(good.ticket)
        assert sign_ticket(ticket, key) == good.ticket
        payload, _, mac = good.ticket.partition(".")
        more = sign_ticket(replace(ticket, limit=10**9), key).partition(".")[0]
        strange = {
            "nonsense": "x" * 40,
            "a token": ALICE,
            "unsigned": payload,
            "another signature": f"{payload}.{'A' * len(mac)}",
            "more tokens": f"{more}.{mac}",
            "another owner": sign_ticket(replace(ticket, owner=says(bobs.ticket).owner), key),
            "another target": sign_ticket(replace(ticket, address="127.0.0.1:1"), key),
            "the id's own key": sign_ticket(ticket, KEYS[0]),
            "another session's key": sign_ticket(ticket, SessionIds(KEYS).ticket_key(others)),
            "a list": f"{base64.urlsafe_b64encode(b'[[1], 2, 3, 4, 5]').decode()}.{mac}",
            "long": "A" * 6000,
        }
        answers = {name: await refused(good.address, text, own) for name, text in strange.items()}
        assert set(answers.values()) == {str(await refused(good.address, "y" * 40, own))}, answers
        for text in (foreign.ticket, bobs.ticket):
            assert "another session's" in await refused(good.address, text, own)
        expired = sign_ticket(replace(ticket, expires_at=time.monotonic()), key)
        assert "expired" in await refused(good.address, expired, own)
        assert "no token" in await refused(good.address, None, own)
        for session in (mine, other, theirs):  # none of them was moved or ended
            await session.verify()
        stream = RawStream(good.address, good.ticket)
        assert (await stream.resume(own)).epoch == 2
        await stream.close()
        for session in (other, theirs):
            await session.close()
        assert await gateways.idle()


async def test_a_ticket_ends_with_its_session(engines: list[EngineThread]) -> None:
    async with Gateways(engines[:1], config=config()) as gateways:
        session = await opened(gateways)
        session_id = session.session_id
        ticket = await issue(gateways, session_id)
        await session.close()
        assert "knows no such ticket" in await refused(ticket.address, ticket.ticket, session_id)
        with pytest.raises(SessionNotFound):
            await issue(gateways, session_id)
        assert await gateways.idle()


async def test_a_ticket_is_good_for_rounds_of_its_session_alone(
    engines: list[EngineThread],
) -> None:
    async with Gateways(engines[:1], config=config()) as gateways:
        session = await opened(gateways)
        session_id = session.session_id
        ticket = await issue(gateways, session_id)
        stream = RawStream(ticket.address, ticket.ticket)
        with pytest.raises(FailedPrecondition, match="must resume"):
            await stream.ask(open=verify_pb2.OpenRequest(token_ids=PROMPT))
        await stream.close()
        async with grpc.aio.insecure_channel(ticket.address) as channel:
            for method in ("VerifyService/Open", "VerifyService/Close", "GenerateService/Generate"):
                call: Any = channel.unary_unary(f"/paceline.v1.{method}")
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"", metadata=bearer(ticket.ticket))
                assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call(b"")
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stream = RawStream(ticket.address, ticket.ticket)
        await stream.resume(session_id)
        with pytest.raises(FailedPrecondition, match="cut"):
            await stream.ask(truncate=verify_pb2.TruncateRequest(length=len(PROMPT)))
        with pytest.raises(InvalidArgument, match="session_id"):
            await stream.ask(verify=verify_pb2.VerifyRequest(session_id="another", round=1))
        await stream.verify(session.transcript)
        await stream.close()
        assert await gateways.idle()


async def test_a_ticket_that_expires_or_is_used_up_is_renewed_on_the_stream(
    engines: list[EngineThread],
) -> None:
    now = 0.0
    async with Gateways(engines[:1], config=config()) as gateways:
        gateways.listeners[0]._book._clock = lambda: now
        session = await opened(gateways)
        transcript = session.transcript
        first = await issue(gateways, transcript.session_id, tokens=2)
        assert (first.tokens, first.seconds) == (2, 60.0)
        stream = RawStream(first.address, first.ticket)
        await stream.resume(transcript.session_id)
        for _ in range(2):
            await stream.verify(transcript)
        with pytest.raises(ResourceExhausted, match="used up: ask the gateway for another ticket"):
            await stream.verify(transcript)
        transcript.rounds.clear()
        again = RawStream(first.address, first.ticket)
        with pytest.raises(ResourceExhausted, match="used up"):
            await again.resume(transcript.session_id)
        await again.close()
        with pytest.raises(Unauthenticated, match="knows no such ticket"):
            await stream.verify(transcript, "another")
        transcript.rounds.clear()
        second = await issue(gateways, transcript.session_id)
        await stream.verify(transcript, second.ticket)
        now += 59.0
        await stream.verify(transcript)
        now += 2.0
        with pytest.raises(Unauthenticated, match="expired: ask the gateway for another ticket"):
            await stream.verify(transcript)
        transcript.rounds.clear()
        third = await issue(gateways, transcript.session_id)
        await stream.verify(transcript, third.ticket)
        await stream.close()
        assert await gateways.idle()


async def test_limits_of_a_listener_are_the_gateways(engines: list[EngineThread]) -> None:
    limited = parse_config({"direct": {"enabled": True}, "gateway": {"limits": {"max_nodes": 2}}})
    async with Gateways(engines[:1], config=limited) as gateways:
        session = await opened(gateways)
        ticket = await issue(gateways, session.session_id)
        stream = RawStream(ticket.address, ticket.ticket)
        await stream.resume(session.session_id)
        with pytest.raises(ResourceExhausted, match="max_nodes"):
            await stream.ask(verify=verify_pb2.VerifyRequest(round=1, token_ids=[1, 2, 3]))
        await stream.verify(session.transcript)
        await stream.close()
        assert await gateways.idle()


# --- what breaks ----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["stops", "resets", "falls silent"])
async def test_rounds_go_through_the_gateway_when_the_listener_is_lost(
    how: str, engines: list[EngineThread], runners: list[ModelRunner]
) -> None:
    truth = ar(runners[0], LONG)
    async with Gateways(engines[:1], config=config()) as gateways:
        loop, listener = asyncio.get_running_loop(), gateways.listeners[0]
        with Netem(listener.address) as netem:

            def through(address: str, ticket: str, gateway: str) -> grpc.Channel:
                return open_direct(netem.address, ticket, gateway)

            def run(client: DeviceClient) -> None:
                is_lost = False
                for done in client.generate(PROMPT, LONG):
                    if not is_lost and client.result.counters.direct_rounds > 3:
                        is_lost = True
                        assert done.finish_reason is None
                        if how == "stops":
                            asyncio.run_coroutine_threadsafe(listener.stop(0), loop).result(5)
                        elif how == "resets":
                            netem.reset()
                        else:
                            netem.partition()
                assert is_lost

            with await device(gateways, truth, direct=through) as client:
                await asyncio.to_thread(run, client)
                assert client.result.token_ids == truth
                counters = client.result.counters
                assert counters.direct_failures >= 1
                if how == "stops":
                    assert counters.direct_failures == 1
            netem.partition(False)
        assert await gateways.idle()


async def test_a_session_goes_on_at_another_target(
    engines: list[EngineThread], runners: list[ModelRunner]
) -> None:
    truth = ar(runners[0], LONG)
    async with Gateways(engines, config=config()) as gateways:
        loop = asyncio.get_running_loop()

        async def stop() -> None:
            pairs = zip(gateways.targets, gateways.listeners, strict=True)
            (lost,) = [pair for pair in pairs if pair[0].verify and pair[0].verify.sessions]
            gateways.leases.addresses.remove(lost[0].address)
            for server in lost:
                await server.stop(0)

        def run(client: DeviceClient) -> None:
            is_lost = False
            for _ in client.generate(PROMPT, LONG):
                if not is_lost and client.result.counters.direct_rounds > 3:
                    is_lost = True
                    asyncio.run_coroutine_threadsafe(stop(), loop).result(5)
            assert is_lost

        with await device(gateways, truth) as client:
            await asyncio.to_thread(run, client)
            assert client.result.token_ids == truth
            assert client.result.counters.direct_failures == 1
            assert client.result.counters.num_opened >= 2
        assert await gateways.idle()


async def test_a_target_that_cannot_be_reached_costs_nothing(
    engines: list[EngineThread], runners: list[ModelRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream at the gateway goes on until the other connection stands."""
    monkeypatch.setattr("paceline.rpc.direct.CONNECT_S", 0.2)
    truth = ar(runners[0], LONG)
    async with Gateways(engines, config=config()) as gateways:
        tried = []

        def nowhere(address: str, ticket: str, gateway: str) -> grpc.Channel:
            tried.append(address)
            return open_direct("127.0.0.1:1", ticket, gateway)

        with await device(gateways, truth, direct=nowhere) as client:
            for _ in range(4):
                assert await complete(client, LONG) == truth
            counters = client.result.counters
        assert tried
        assert counters.direct_rounds == counters.direct_failures == counters.num_failures == 0
        assert counters.num_resumed == 0
        assert await gateways.idle()


@pytest.mark.parametrize("when", ["first", "later"])
async def test_a_refusal_sends_rounds_back_to_the_gateway(
    when: str, engines: list[EngineThread], runners: list[ModelRunner]
) -> None:
    """The session comes back as it is, and goes to the target again with another ticket."""
    truth = ar(runners[0], LONG)
    async with Gateways(engines[:1], config=config()) as gateways:
        late, num_grants = 0.0, 0
        book = gateways.listeners[0]._book
        grant = book.grant
        book._clock = lambda: time.monotonic() + late

        def granted(*arguments: Any) -> Any:
            nonlocal num_grants
            num_grants += 1
            given = grant(*arguments)
            return given._replace(expires_at=0.0) if (when, num_grants) == ("first", 1) else given

        book.grant = granted  # type: ignore[method-assign]

        def run(client: DeviceClient) -> None:
            nonlocal late
            for _ in client.generate(PROMPT, LONG):
                if when == "later" and client.result.counters.direct_rounds > 3:
                    late = 1000.0

        with await device(gateways, truth) as client:
            await asyncio.to_thread(run, client)
            assert client.result.token_ids == truth
            counters = client.result.counters
        assert counters.direct_failures == 1
        assert counters.num_tickets == 2
        assert counters.direct_rounds > 5
        assert counters.num_opened == 1  # never opened anew
        assert counters.num_failures == 0
        assert await gateways.idle()


@pytest.mark.parametrize("what", ["tokens", "seconds"])
async def test_a_ticket_is_renewed_by_the_client_before_its_end(
    what: str, engines: list[EngineThread], runners: list[ModelRunner]
) -> None:
    truth = ar(runners[0], LONG)
    short = config(ticket_tokens=30 if what == "tokens" else 512)
    if what == "seconds":  # fewer than a configuration may have
        direct = short.direct.model_copy(update={"ticket_s": 0.4})
        short = short.model_copy(update={"direct": direct})
    async with Gateways(engines, config=short) as gateways:
        with await device(gateways, truth, max_in_flight=1, rho=0.3) as client:
            assert await complete(client, LONG) == truth
            counters = client.result.counters
        assert counters.num_tickets >= (3 if what == "tokens" else 2)
        assert counters.direct_failures == counters.num_failures == 0
        assert counters.num_resumed == 1
        assert await gateways.idle()


# --- quotas ---------------------------------------------------------------------------------------


async def test_tokens_of_direct_rounds_count(
    engines: list[EngineThread], runners: list[ModelRunner], tmp_path: Path
) -> None:
    """Exactly, however many tickets there were, when the session has ended."""
    truth = ar(runners[0], LONG)
    tenants = write_tenants(tmp_path / "tenants.yaml", alice={"tokens_per_minute": 10_000})
    async with Gateways(engines, tenants=tenants, config=config(ticket_tokens=50)) as gateways:
        for address in (gateways.servers[0].address, gateways.proxy.address):
            before = tokens_used(gateways)
            with await device(
                gateways, truth, address=address, token=ALICE, max_in_flight=1
            ) as client:
                assert await complete(client, LONG) == truth
                assert client.result.counters.direct_rounds > 5
            assert await gateways.idle()
            assert tokens_used(gateways) - before == len(PROMPT) + len(truth)


def tokens_used(gateways: Gateways) -> int:
    return sum(gate.usage().get("alice", (0, 0, 0))[2] for gate in gateways.gates)


async def test_a_ticket_is_paid_at_once_and_what_is_left_comes_back(
    engines: list[EngineThread], tmp_path: Path
) -> None:
    tenants = write_tenants(tmp_path / "tenants.yaml", alice={"tokens_per_minute": 300})
    async with (
        Gateways(engines[:1], tenants=tenants, config=config()) as gateways,
    ):
        session = await opened(gateways, ALICE)
        transcript, paid = session.transcript, len(PROMPT)
        assert tokens_used(gateways) == paid
        ticket = await issue(gateways, transcript.session_id, ALICE)
        assert ticket.tokens == 300  # not 512: at most a minute's worth
        assert tokens_used(gateways) == paid + 300
        other = await opened(gateways, BOB)
        with pytest.raises(ResourceExhausted, match="tokens_per_minute"):
            await issue(gateways, transcript.session_id, ALICE)
        with pytest.raises(ResourceExhausted, match="tokens_per_minute"):
            await opened(gateways, ALICE)
        assert tokens_used(gateways) == paid + 300
        stream = RawStream(ticket.address, ticket.ticket)
        await stream.resume(transcript.session_id)
        for _ in range(5):
            await stream.verify(transcript)
        assert tokens_used(gateways) == paid + 300
        await stream.close()  # ends the session
        await other.close()
        assert await gateways.idle()
        assert tokens_used(gateways) == paid + 5
        session = await opened(gateways, ALICE)
        await session.close()
        assert await gateways.idle()


async def test_tickets_of_two_gateways_are_bounded_by_the_quota(
    engines: list[EngineThread], tmp_path: Path
) -> None:
    """By one ticket at each gateway, when the quota has a token left there."""
    most, ticket = 400, 100
    tenants = write_tenants(tmp_path / "tenants.yaml", alice={"tokens_per_minute": most})
    async with Gateways(
        engines, link=LocalLink(), tenants=tenants, config=config(ticket_tokens=ticket)
    ) as gateways:
        sessions = [await opened(gateways, ALICE) for _ in range(8)]
        started, granted, num_refused = time.monotonic(), 0, 0
        for i, session in enumerate(sessions):
            try:
                granted += (await issue(gateways, session.session_id, ALICE, at=i % 2)).tokens
            except ResourceExhausted:
                num_refused += 1
        filled = most / 60 * (time.monotonic() - started + 1)
        assert num_refused
        assert granted + len(sessions) * len(PROMPT) <= most + filled + 2 * ticket
        for session in sessions:
            await session.close()
        assert await gateways.idle()


async def test_a_renewed_ticket_gives_back_what_is_left_of_the_last_one(
    engines: list[EngineThread], tmp_path: Path
) -> None:
    tenants = write_tenants(tmp_path / "tenants.yaml", alice={"tokens_per_minute": 10_000})
    async with (
        Gateways(engines[:1], tenants=tenants, config=config(ticket_tokens=100)) as gateways,
    ):
        session = await opened(gateways, ALICE)
        transcript, paid = session.transcript, len(PROMPT)
        old = await issue(gateways, transcript.session_id, ALICE)
        stream = RawStream(old.address, old.ticket)
        await stream.resume(transcript.session_id)
        for _ in range(3):
            await stream.verify(transcript)
        new = await issue(gateways, transcript.session_id, ALICE)
        assert tokens_used(gateways) == paid + 3 + 100
        assert says(new.ticket).limit == 103
        for _ in range(4):
            await issue(gateways, transcript.session_id, ALICE)
        assert tokens_used(gateways) == paid + 3 + 100  # tickets of a session do not add up
        await stream.close()
        assert await gateways.idle()
        assert tokens_used(gateways) == paid + 3


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_caller_that_does_not_wait_has_paid_for_its_ticket(
    leaves: bool, engines: list[EngineThread], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever cancels in time, or has a short deadline, would get the next one for nothing."""
    tenants = write_tenants(tmp_path / "tenants.yaml", alice={"tokens_per_minute": 10_000})
    async with (
        Gateways(engines[:1], tenants=tenants, config=config(ticket_tokens=100)) as gateways,
    ):
        session = await opened(gateways, ALICE)
        session_id, paid = session.session_id, len(PROMPT)
        calls, granted = gateways.relays[0]._calls, asyncio.Event()
        unary = calls.unary

        async def slow(*arguments: Any) -> bytes:
            reply = await unary(*arguments)
            granted.set()
            if not leaves:
                raise DeadlineExceeded("too late")
            await asyncio.sleep(10)
            return reply

        monkeypatch.setattr(calls, "unary", slow)
        call = asyncio.create_task(issue(gateways, session_id, ALICE))
        await granted.wait()
        if leaves:
            call.cancel()
        assert await eventually(lambda: call.done())
        with pytest.raises((asyncio.CancelledError, DeadlineExceeded)):
            call.result()
        monkeypatch.setattr(calls, "unary", unary)
        assert tokens_used(gateways) == paid + 100
        await issue(gateways, session_id, ALICE)
        assert tokens_used(gateways) == paid + 100
        await session.close()
        assert await gateways.idle()
        assert tokens_used(gateways) == paid


async def test_a_target_that_grants_nothing_costs_nothing(
    engines: list[EngineThread], tmp_path: Path
) -> None:
    tenants = write_tenants(tmp_path / "tenants.yaml", alice={"tokens_per_minute": 10_000})
    async with Gateways(engines[:1], tenants=tenants, config=config()) as gateways:
        session = await opened(gateways, ALICE)
        book = gateways.listeners[0]._book
        with pytest.raises(SessionNotFound):
            book.grant("session", "", "", b"k", 10, 1.0)  # without a lease, with which it would end
        assert book.ended("") == book.ended("lease") == 0
        verify = gateways.targets[0].verify
        assert verify is not None
        verify.close()  # of all sessions
        with pytest.raises(SessionNotFound):
            await issue(gateways, session.session_id, ALICE)
        assert await gateways.idle()
        assert tokens_used(gateways) == len(PROMPT)


# --- secrets, and hostile messages ----------------------------------------------------------------


async def test_no_ticket_and_no_key_is_in_a_log(
    engines: list[EngineThread],
    runners: list[ModelRunner],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    truth = ar(runners[0], LONG)
    tenants, audit = write_tenants(tmp_path / "tenants.yaml"), tmp_path / "audit"
    secrets: list[str] = []
    with caplog.at_level(logging.DEBUG):
        async with Gateways(
            engines[:1], tenants=tenants, audit=audit, config=config(ticket_tokens=30)
        ) as gateways:
            grant = gateways.listeners[0]._book.grant

            def keep_key(*arguments: Any) -> Any:
                key = arguments[3]
                secrets.extend((key.hex(), repr(key)[2:-1], base64.b64encode(key).decode()))
                return grant(*arguments)

            gateways.listeners[0]._book.grant = keep_key  # type: ignore[method-assign]

            def keep_ticket(address: str, ticket: str, gateway: str) -> grpc.Channel:
                secrets.append(ticket)
                secrets.extend(ticket.split("."))
                return open_direct(address, ticket, gateway)

            with await device(gateways, truth, token=ALICE, direct=keep_ticket) as client:
                assert await complete(client, LONG) == truth
                assert client.result.counters.direct_rounds > 5
            address = gateways.listeners[0].address
            for ticket in [text for text in secrets if "." in text]:
                await refused(address, ticket, "session")  # of a session that has ended
            assert await gateways.idle()
    logged = caplog.text + audit.with_suffix(".0").read_text()
    assert "UNAUTHENTICATED" in logged  # the listener's audit log
    assert len(secrets) > 8
    for secret in (*secrets, ALICE):
        assert secret not in logged
    book = gateways.listeners[0]._book
    assert not any(secret in repr(book.__dict__) for secret in secrets)


async def test_hostile_messages_with_a_ticket(
    engines: list[EngineThread],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.rpc.access.REFUSALS_PER_SECOND", 1e6)
    monkeypatch.setattr(test_fuzz, "REFUSALS", {*test_fuzz.REFUSALS, "UNAUTHENTICATED"})
    calls: dict[str, Callable[[], Any]] = {
        "/paceline.v1.VerifyService/Session": good_frames,
        "/paceline.v1.TicketService/Grant": ticket_pb2.GrantRequest,
    }
    async with Gateways(engines[:1], config=config()) as gateways:
        session = await opened(gateways)
        ticket = await issue(gateways, session.session_id)
        codes = await fuzz(plain(ticket.address), calls, 300, 4, bearer(ticket.ticket))
        assert {"FAILED_PRECONDITION", "UNIMPLEMENTED"} <= set(codes)
        requests = {"/paceline.v1.TicketService/Issue": ticket_pb2.TicketRequest}
        codes = await fuzz(plain(gateways.servers[0].address), requests, 100, 5)
        assert "NOT_FOUND" in codes
        requests = {"/paceline.v1.TicketService/Grant": ticket_pb2.GrantRequest}
        codes = await fuzz(plain(gateways.targets[0].address), requests, 100, 6)
        assert "NOT_FOUND" in codes
        stream = RawStream(ticket.address, ticket.ticket)
        await stream.resume(session.session_id)
        await stream.verify(session.transcript)
        await stream.close()
        assert await gateways.idle()
    assert not complaints(caplog)


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "field"),
    [
        ({"direct": {"enabled": True}, "engine": "vllm"}, "direct.enabled"),
        ({"direct": {"enabled": True, "host": "0.0.0.0"}}, "gateway.tls"),
        ({"direct": {"enabled": True, "port": 70_000}}, "direct.port"),
        ({"direct": {"ticket_tokens": 0}}, "direct.ticket_tokens"),
        ({"direct": {"ticket_s": 0.5}}, "direct.ticket_s"),
        ({"direct": {"ticket": 5}}, "direct.ticket"),
    ],
)
def test_configurations_that_are_refused(args: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_config(args)
    assert caught.value.field == field


def test_configurations_that_are_not() -> None:
    assert not parse_config({}).direct.enabled
    assert not parse_config({"direct": {"host": "0.0.0.0"}}).direct.enabled
    config(host="::1", port=50061)
    parse_config({"direct": {"enabled": True, "host": "0.0.0.0"}, "gateway": {"insecure": True}})


async def test_a_port_in_use_is_named(engines: list[EngineThread]) -> None:
    async with Gateways(engines[:1], config=config()) as gateways:
        port = int(gateways.listeners[0].address.rpartition(":")[2])
        other = Gateways(engines[:1], config=config(port=port))
        with pytest.raises(PortInUse, match=r"direct\.host, direct\.port: cannot listen"):
            await other.__aenter__()
        await other.targets[0].stop(0)
