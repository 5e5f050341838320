"""TLS, tenants, quotas, limits and the audit log: hostile clients beside honest ones."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import grpc
import pytest
import yaml
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from paceline.cluster.certs import REPLICA_NAME, make_certificates
from paceline.config import SpeculationConfig
from paceline.engine import EngineThread
from paceline.errors import InvalidArgument, ResourceExhausted, SessionNotFound
from paceline.rpc.access import REFUSAL_BYTES, REFUSALS_PER_SECOND, Gate, Limits
from paceline.rpc.audit import Audit
from paceline.rpc.client import AsyncClient, Client, open_channel
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.errors import (
    DeadlineExceeded,
    EpochFenced,
    PermissionDenied,
    ServerUnavailable,
    Unauthenticated,
)
from paceline.rpc.gen.paceline.v1 import (
    generate_pb2,
    generate_pb2_grpc,
    verify_pb2,
    verify_pb2_grpc,
)
from paceline.rpc.remote_drafter import RemoteDrafter
from paceline.rpc.server import RpcServer, start_server
from paceline.rpc.tenants import CHECK_INTERVAL_S, Tenants, digest_of, read_tenants
from paceline.rpc.tls import ClientTls, ServerTls
from paceline.sampling import SamplingParams
from paceline.types import Draft
from tests.rpc.drafter_process import Copycat
from tests.rpc.serving import eventually, serving

PROMPT = list(b"import os\nimport ")
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
AR = SpeculationConfig(method="ar")
ALICE, BOB, MALLORY = (f"{name}-token-of-many-characters" for name in ("alice", "bob", "mallory"))


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certs")
    make_certificates(folder)
    return folder


def server_tls(certs: Path, **options: Any) -> ServerTls:
    return ServerTls(cert=str(certs / "server.crt"), key=str(certs / "server.key"), **options)


def write_tenants(path: Path, **tenants: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"tenants": tenants}))
    return path


@pytest.fixture
def tenants_file(tmp_path: Path) -> Path:
    return write_tenants(
        tmp_path / "tenants.yaml",
        alice={"token": ALICE},
        bob={"token_sha256": digest_of(BOB).hex()},
        mallory={"token": MALLORY, "suspended": True},
    )


@pytest.fixture
def audit_file(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def shared(engine: EngineThread, tenants_file: Path, audit_file: Path) -> Iterator[RpcServer]:
    """A server with tenants."""
    gate = Gate(tenants=Tenants(tenants_file), audit=Audit(audit_file))
    with serving(engine=engine, gate=gate, idle_timeout_s=20) as running:
        yield running


def works(client: Client) -> None:
    """What an honest client does."""
    assert len(client.complete(PROMPT, PARAMS, AR).token_ids) == 24


def details_of(error: grpc.RpcError) -> dict[str, Any]:
    """The ``google.rpc`` details of a status, by the name of their type."""
    found = {}
    for packed in rpc_status.from_call(error).details:
        name = packed.TypeName().rpartition(".")[2]
        found[name] = getattr(error_details_pb2, name).FromString(packed.value)
    return found


# --- TLS ----------------------------------------------------------------------------------------


def test_tls_round_trip(engine: EngineThread, certs: Path) -> None:
    with (
        serving(engine=engine, credentials=server_tls(certs).credentials()) as running,
        Client(running.address, timeout=10, ca=certs / "ca.crt") as client,
    ):
        works(client)
        with client.open_session(PROMPT) as session:
            assert session.verify().next_token is not None


async def test_tls_round_trip_asyncio(engine: EngineThread, certs: Path) -> None:
    credentials = server_tls(certs).credentials()
    async with (
        await start_server(engine=engine, credentials=credentials) as running,
        AsyncClient(running.address, timeout=10, ca=certs / "ca.crt") as client,
    ):
        session = await client.open_session(PROMPT)
        assert (await session.verify()).next_token is not None
        await session.close()


def test_plain_text_to_a_tls_port_and_the_wrong_authority(
    engine: EngineThread, certs: Path, tmp_path: Path
) -> None:
    make_certificates(tmp_path)
    with serving(engine=engine, credentials=server_tls(certs).credentials()) as running:
        with Client(running.address, timeout=5) as plain, pytest.raises(ServerUnavailable):
            plain.get_model()
        untrusted = pytest.raises(ServerUnavailable, match="CERTIFICATE_VERIFY_FAILED")
        with Client(running.address, timeout=5, ca=tmp_path / "ca.crt") as stranger, untrusted:
            stranger.get_model()
        with Client(running.address, timeout=10, ca=certs / "ca.crt") as honest:
            works(honest)


def test_mtls(engine: EngineThread, certs: Path, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    ca = certs / "ca.crt"
    tls = server_tls(certs, client_ca=str(ca), require_client_cert=True)
    with serving(engine=engine, credentials=tls.credentials()) as running:
        with (
            Client(running.address, timeout=5, ca=ca) as stranger,
            pytest.raises(ServerUnavailable),
        ):
            stranger.get_model()
        # A certificate of another authority, and of the one that signs replicas.
        for cert, key in (
            (tmp_path / "client.crt", tmp_path / "client.key"),
            (certs / "replica.crt", certs / "replica.key"),
        ):
            stranger = Client(running.address, timeout=5, ca=ca, cert=cert, key=key)
            with stranger, pytest.raises(ServerUnavailable):
                stranger.get_model()
        own = {"cert": certs / "client.crt", "key": certs / "client.key"}
        with Client(running.address, timeout=10, ca=ca, **own) as honest:
            works(honest)


def test_health_needs_no_more_than_the_handshake(shared: RpcServer) -> None:
    with grpc.insecure_channel(shared.address) as channel:
        reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_needs_a_token(shared: RpcServer) -> None:
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    for token, allowed in ((None, False), (ALICE, True)):
        with open_channel(shared.address, token=token) as channel:
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            if allowed:
                (reply,) = stub.ServerReflectionInfo(iter([request]))
                assert len(reply.list_services_response.service) >= 3
            else:
                with pytest.raises(grpc.RpcError) as caught:
                    list(stub.ServerReflectionInfo(iter([request])))
                assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def serial_shown(port: int) -> bytes:
    """What the server shows to a new connection."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", port), 5) as plain,
        context.wrap_socket(plain) as wrapped,
    ):
        shown = wrapped.getpeercert(binary_form=True)
        assert shown is not None
        return shown


def test_a_renewed_certificate_is_used_from_the_next_connection_on(
    engine: EngineThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_certificates(tmp_path)
    ca, key_file = tmp_path / "ca.crt", tmp_path / "server.key"
    with (
        serving(engine=engine, credentials=server_tls(tmp_path).credentials()) as running,
        Client(running.address, timeout=10, ca=ca) as old,
    ):
        generation = iter(old.generate(PROMPT, PARAMS, AR))
        next(generation)
        first = serial_shown(running.port)
        assert serial_shown(running.port) == first
        make_certificates(tmp_path)  # the authority stays, the rest is new
        second = serial_shown(running.port)
        assert second != first
        assert sum(1 for _ in generation) > 0  # the old connection goes on
        works(old)
        with Client(running.address, timeout=10, ca=ca) as new:
            works(new)
        # Half of a renewal, or a broken file: what was good stays in use.
        good = key_file.read_bytes()
        key_file.write_text("-----BEGIN NONSENSE-----")
        assert serial_shown(running.port) == second
        key_file.unlink()
        assert serial_shown(running.port) == second
        key_file.write_bytes(good)
        with Client(running.address, timeout=10, ca=ca) as new:
            works(new)
    assert "the certificate stays as it was" in caplog.text
    assert "NONSENSE" not in caplog.text


def test_a_drafter_replica_over_mutual_tls(certs: Path) -> None:
    replica = {
        "cert": str(certs / "replica.crt"),
        "key": str(certs / "replica.key"),
    }
    ca = str(certs / "replica-ca.crt")
    server = ServerTls(**replica, client_ca=ca, require_client_cert=True)
    servicer = DraftServicer(Copycat(), name=None, vocab_size=258)
    with serving(drafter=servicer, credentials=server.credentials()) as running:
        tls = ClientTls(ca=ca, **replica, server_name=REPLICA_NAME)
        with RemoteDrafter(running.address, vocab_size=258, tls=tls) as remote:
            assert remote.wait_ready(10)
        with RemoteDrafter(running.address, vocab_size=258, tls=ClientTls(ca=ca)) as stranger:
            assert not stranger.wait_ready(1)


def test_files_that_cannot_be_used_are_named(certs: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret.key"
    secret.write_text("-----BEGIN PRIVATE KEY-----\nTOPSECRET\n-----END PRIVATE KEY-----\n")
    text = tmp_path / "text"
    text.write_text("TOPSECRET")
    cert = str(certs / "server.crt")
    for key in (secret, text, certs / "client.key", tmp_path / "missing", tmp_path):
        with pytest.raises(InvalidArgument) as caught:
            ServerTls(cert=cert, key=str(key), prefix="gateway.tls.").credentials()
        assert caught.value.field == "gateway.tls.key"
        assert str(key) in str(caught.value)
        assert "TOPSECRET" not in str(caught.value)
    with pytest.raises(InvalidArgument, match="client_ca"):
        ServerTls(cert=cert, key=cert, require_client_cert=True)
    for options in ({"cert": cert}, {"key": cert}, {"ca": text}, {"ca": certs / "ca.key"}):
        with pytest.raises(InvalidArgument):
            Client("127.0.0.1:1", **options)


def test_keys_are_private_and_hosts_are_checked(certs: Path, tmp_path: Path) -> None:
    keys = sorted(certs.glob("*.key"))
    assert len(keys) == 5
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}
    for host in ("a b", "host:1", "", "..", "x/y"):
        with pytest.raises(InvalidArgument, match="host"):
            make_certificates(tmp_path / "none", [host])
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "example.org"])
async def test_plain_text_stays_on_loopback(host: str) -> None:
    with pytest.raises(InvalidArgument, match="insecure=True"):
        await start_server(register=lambda _: [], host=host)


async def test_plain_text_elsewhere_with_a_flag() -> None:
    async with await start_server(register=lambda _: [], host="0.0.0.0", insecure=True) as running:
        assert running.port > 0


# --- tokens -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("token", "expected"),
    [(None, Unauthenticated), ("wrong-token-wrong-token", Unauthenticated),
     (ALICE[:-1], Unauthenticated), (ALICE + "x", Unauthenticated), (MALLORY, PermissionDenied)],
    ids=["none", "wrong", "shorter", "longer", "suspended"],
)  # fmt: skip
def test_who_is_not_let_in(shared: RpcServer, token: str | None, expected: type[Exception]) -> None:
    with Client(shared.address, timeout=10, token=token) as client:
        calls = (
            lambda: client.get_model(),
            lambda: client.complete(PROMPT, PARAMS, AR),
            lambda: client.open_session(PROMPT),
        )
        for call in calls:
            with pytest.raises(expected):
                call()
        # A stream that is not let in ends before its first frame.
        stub = verify_pb2_grpc.VerifyServiceStub(client._channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Session(iter([verify_pb2.VerifyFrame()]), metadata=client._metadata))
        assert caught.value.code().name in ("UNAUTHENTICATED", "PERMISSION_DENIED")
    with Client(shared.address, timeout=10, token=BOB) as honest:
        works(honest)


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic YWxpY2U6eA==", ALICE])
def test_metadata_that_is_no_token(shared: RpcServer, value: str) -> None:
    with grpc.insecure_channel(shared.address) as channel:
        stub = generate_pb2_grpc.GenerateServiceStub(channel)
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetModel(generate_pb2.GetModelRequest(), metadata=(("authorization", value),))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def test_tokens_do_not_travel_in_the_clear() -> None:
    with pytest.raises(InvalidArgument) as caught:
        Client("192.0.2.1:50051", token=ALICE)
    assert caught.value.field == "token"
    assert ALICE not in str(caught.value)
    for bad in ("", "two words", "línea", "a\nb"):
        with pytest.raises(InvalidArgument) as caught:
            Client("127.0.0.1:50051", token=bad)
        assert not bad or bad not in str(caught.value)


def test_the_session_of_another_tenant_is_one_that_is_not_there(
    shared: RpcServer, audit_file: Path
) -> None:
    with (
        Client(shared.address, timeout=10, token=ALICE) as alice,
        Client(shared.address, timeout=10, token=BOB) as bob,
        alice.open_session(PROMPT) as session,
    ):
        verify = verify_pb2_grpc.VerifyServiceStub(bob._channel)

        def answers(session_id: str) -> list[tuple[Any, str]]:
            """Code and text of every call that names a session, without the id itself."""
            found = []
            for epoch in (1, 9):
                named = {"session_id": session_id, "epoch": epoch}
                for method, request in (
                    (verify.Verify, verify_pb2.VerifyRequest(**named, round=1)),
                    (verify.Truncate, verify_pb2.TruncateRequest(**named, length=1)),
                    (verify.Close, verify_pb2.CloseRequest(**named)),
                    (verify.Open, verify_pb2.OpenRequest(resume_session_id=session_id)),
                ):
                    try:
                        reply = method(request, metadata=bob._metadata, timeout=5)
                        found.append((grpc.StatusCode.OK, str(reply)))
                    except grpc.RpcError as error:
                        text = str(rpc_status.from_call(error)).replace(session_id, "ID")
                        found.append((error.code(), text))
            frame = verify_pb2.VerifyFrame(
                open=verify_pb2.OpenRequest(resume_session_id=session_id)
            )
            with pytest.raises(grpc.RpcError) as caught:
                list(verify.Session(iter([frame]), metadata=bob._metadata, timeout=5))
            text = str(rpc_status.from_call(caught.value)).replace(session_id, "ID")
            return [*found, (caught.value.code(), text)]

        theirs = session.transcript.session_id
        unknown = theirs[::-1]  # as long: the packed details have their length in them
        assert answers(theirs) == answers(unknown)
        assert session.verify().next_token is not None  # and nothing has happened to it
    refused = [line for line in lines(audit_file) if line["event"] == "refused"]
    assert {(line["tenant"], line["session_id"]) for line in refused} == {("bob", theirs)}


async def test_a_stream_of_one_tenant_cannot_be_taken_over_by_another(shared: RpcServer) -> None:
    async with (
        AsyncClient(shared.address, timeout=10, token=ALICE) as alice,
        AsyncClient(shared.address, timeout=10, token=BOB) as bob,
    ):
        session = await alice.open_session(PROMPT)
        with pytest.raises(SessionNotFound):
            await bob.resume_session(session.transcript)
        await session.verify()
        again = await alice.resume_session(session.transcript)
        await again.verify()
        with pytest.raises(EpochFenced):  # the old stream is over, for its owner too
            await session.verify()
        await again.close()


def test_replay_of_an_old_epoch(shared: RpcServer) -> None:
    with Client(shared.address, timeout=10, token=ALICE) as client:
        session = client.open_session(PROMPT)
        session.verify()
        old = verify_pb2.VerifyRequest(
            session_id=session.transcript.session_id, epoch=session.transcript.epoch, round=1,
        )  # fmt: skip
        request = verify_pb2.OpenRequest(resume_session_id=session.transcript.session_id)
        opened = client._verify.Open(request, metadata=client._metadata)
        assert opened.epoch == session.transcript.epoch + 1
        with pytest.raises(EpochFenced):
            client._unary(client._verify.Verify, old)
        session.transcript.epoch = opened.epoch
        session.verify()
        session.close()


# --- the tenants file ---------------------------------------------------------------------------


def test_the_tenants_file_is_read_again(shared: RpcServer, tenants_file: Path) -> None:
    with (
        Client(shared.address, timeout=10, token=ALICE) as alice,
        Client(shared.address, timeout=10, token=BOB) as bob,
    ):
        works(alice)
        session = alice.open_session(PROMPT)
        session.verify()
        tenants_file.write_text("tenants: [what")  # broken: no tenant loses access
        time.sleep(1.1 * CHECK_INTERVAL_S)
        works(alice)
        write_tenants(tenants_file, bob={"token": BOB}, carol={"token": "carol-token-carol-token"})
        time.sleep(1.1 * CHECK_INTERVAL_S)
        works(bob)
        with pytest.raises(Unauthenticated):
            session.verify()  # what she has open is over too
        with pytest.raises(Unauthenticated):
            alice.get_model()
        with Client(shared.address, timeout=10, token="carol-token-carol-token") as carol:
            works(carol)


async def test_a_withdrawn_token_ends_a_running_stream(
    shared: RpcServer, tenants_file: Path, engine: EngineThread
) -> None:
    async with AsyncClient(shared.address, timeout=10, token=ALICE) as alice:
        session = await alice.open_session(PROMPT)
        await session.verify()
        write_tenants(tenants_file, bob={"token": BOB})
        await asyncio.sleep(1.1 * CHECK_INTERVAL_S)
        with pytest.raises(Unauthenticated):
            await session.verify()
        assert await asyncio.to_thread(eventually, lambda: not engine.engine.sessions)


def test_a_withdrawn_token_ends_a_running_generation(
    shared: RpcServer, tenants_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.rpc.tenants.CHECK_INTERVAL_S", 0.01)
    with Client(shared.address, timeout=10, token=ALICE) as alice:
        generation = iter(
            alice.generate(PROMPT, SamplingParams(max_tokens=400, ignore_eos=True), AR)
        )
        next(generation)
        write_tenants(tenants_file, bob={"token": BOB})
        with pytest.raises(Unauthenticated):
            list(generation)


BAD_FILES = {
    "not yaml": "tenants: {alice: {token: TOPSECRETTOPSECRET",
    "no mapping": "- TOPSECRETTOPSECRET",
    "empty": "",
    "token as tenant": "tenants: {alice: TOPSECRETTOPSECRET}",
    "short": "tenants: {alice: {token: TOPSECRET}}",
    "no token": "tenants: {alice: {}}",
    "number": "tenants: {alice: {token: 1234567890123456}}",
    "bad hash": "tenants: {alice: {token_sha256: TOPSECRET}}",
    "same token": "tenants: {a: {token: TOPSECRETTOPSECRET}, b: {token: TOPSECRETTOPSECRET}}",
    "bad quota": "tenants: {a: {token: TOPSECRETTOPSECRET, quotas: {max_sessions: 0}}}",
    "unknown quota": "tenants: {a: {token: TOPSECRETTOPSECRET, quotas: {sessions: 1}}}",
    "unknown key": "tenants: {a: {token: TOPSECRETTOPSECRET, pasword: TOPSECRET}}",
    "bad name": "tenants: {'a b': {token: TOPSECRETTOPSECRET}}",
    "binary": "tenants: \x00TOPSECRET",
}


@pytest.mark.parametrize("text", BAD_FILES.values(), ids=BAD_FILES.keys())
def test_bad_tenants_files(text: str, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgument) as caught:
        Tenants(path)
    assert caught.value.field == "tenants"
    assert str(path) in str(caught.value)
    assert "TOPSECRET" not in str(caught.value)


def test_several_tokens_of_one_tenant(tmp_path: Path) -> None:
    path = write_tenants(
        tmp_path / "t.yaml", a={"token": [ALICE, BOB], "token_sha256": [digest_of("x").hex()]}
    )
    tenants = Tenants(path)
    for token in (ALICE, BOB, "x"):
        assert tenants.find(digest_of(token)).name == "a"
    assert ALICE not in repr(read_tenants(path))
    assert digest_of(ALICE).hex() not in repr(read_tenants(path))


# --- quotas and limits --------------------------------------------------------------------------


def quota_server(
    stack: ExitStack, engine: EngineThread, folder: Path, **quotas: Any
) -> tuple[Client, Client]:
    """A client under ``quotas`` and one without any."""
    file = write_tenants(
        folder / "quotas.yaml", alice={"token": ALICE, "quotas": quotas}, bob={"token": BOB}
    )
    running = stack.enter_context(serving(engine=engine, gate=Gate(tenants=Tenants(file))))
    alice, bob = (
        stack.enter_context(Client(running.address, timeout=10, token=token))
        for token in (ALICE, BOB)
    )
    return alice, bob


def refused(call: Any, *arguments: Any, match: str) -> float:
    """Expect RESOURCE_EXHAUSTED with RetryInfo on the wire; its seconds."""
    with pytest.raises(grpc.RpcError) as caught:
        call(*arguments)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert match in caught.value.details()
    details = details_of(caught.value)
    assert details["ErrorInfo"].reason == "RESOURCE_EXHAUSTED"
    seconds: float = details["RetryInfo"].retry_delay.ToNanoseconds() / 1e9
    assert seconds > 0
    return seconds


def test_max_sessions_of_a_tenant(engine: EngineThread, tmp_path: Path) -> None:
    with ExitStack() as stack:
        alice, bob = quota_server(stack, engine, tmp_path, max_sessions=2)
        sessions = [alice.open_session(PROMPT) for _ in range(2)]
        request = verify_pb2.OpenRequest(token_ids=PROMPT)

        def open_one() -> None:
            alice._verify.Open(request, metadata=alice._metadata)

        refused(open_one, match="max_sessions")
        with pytest.raises(ResourceExhausted, match="max_sessions"):
            alice.complete(PROMPT, PARAMS, AR)
        works(bob)
        sessions[0].close()
        works(alice)
        with pytest.raises(InvalidArgument):  # a session that did not come about is not counted
            alice.open_session([])
        works(alice)
        sessions[1].close()


def test_opens_over_the_rate(engine: EngineThread, tmp_path: Path) -> None:
    with ExitStack() as stack:
        alice, bob = quota_server(stack, engine, tmp_path, opens_per_second=2)

        def open_one() -> None:
            alice._generate.GetModel(generate_pb2.GetModelRequest(), metadata=alice._metadata)

        def flood() -> None:
            for _ in range(10):
                open_one()

        seconds = refused(flood, match="opens_per_second")
        works(bob)
        assert seconds <= 0.5
        time.sleep(seconds)
        open_one()


async def test_rounds_over_the_rate_leave_the_session_as_it_was(
    engine: EngineThread, tmp_path: Path
) -> None:
    file = write_tenants(
        tmp_path / "q.yaml", alice={"token": ALICE, "quotas": {"rounds_per_second": 4}}
    )
    async with (
        await start_server(engine=engine, gate=Gate(tenants=Tenants(file))) as running,
        AsyncClient(running.address, timeout=10, token=ALICE) as client,
    ):
        session = await client.open_session(PROMPT, PARAMS)
        waits = []
        while session.finish_reason is None and len(session.token_ids) < len(PROMPT) + 8:
            try:
                await session.verify()
            except ResourceExhausted as error:
                waits.append(error.retry_after_s)
                await asyncio.sleep(error.retry_after_s)
        assert len(waits) >= 2
        assert 0 < min(waits) <= max(waits) <= 0.25
        statistics = await session.close()
        assert statistics.num_tokens == 8


def test_tokens_of_a_minute(engine: EngineThread, tmp_path: Path) -> None:
    with ExitStack() as stack:
        alice, bob = quota_server(stack, engine, tmp_path, tokens_per_minute=30)
        works(alice)  # prompt and tokens: 41; what runs is not cut off
        with pytest.raises(ResourceExhausted, match="tokens_per_minute") as caught:
            works(alice)
        assert 1 < caught.value.retry_after_s <= 25
        works(bob)


@pytest.mark.parametrize(
    ("limits", "match"),
    [({"max_sessions": 1}, "max_sessions"), ({"opens_per_second": 1}, "opens_per_second")],
    ids=["sessions", "opens"],
)
def test_limits_of_a_server_on_opens(
    engine: EngineThread, limits: dict[str, Any], match: str
) -> None:
    with (
        serving(engine=engine, gate=Gate(limits=Limits(**limits))) as running,
        Client(running.address, timeout=10) as client,
        client.open_session(PROMPT),
    ):
        request = verify_pb2.OpenRequest(token_ids=PROMPT)
        refused(client._verify.Open, request, match=match)


def test_limits_of_a_server_on_rounds(engine: EngineThread) -> None:
    gate = Gate(limits=Limits(rounds_per_second=2, max_nodes=3))
    with (
        serving(engine=engine, gate=gate) as running,
        Client(running.address, timeout=10) as client,
        client.open_session(PROMPT) as session,
    ):
        proposed = session.transcript.propose(Draft.chain([1, 2, 3, 4]))
        request = session.transcript.request(proposed)
        request.session_id, request.epoch = session.transcript.session_id, session.transcript.epoch
        refused(client._verify.Verify, request, match="max_nodes")
        assert session.transcript.max_nodes == 3
        session.verify(Draft.chain([1, 2, 3]))
        session.verify()
        with pytest.raises(ResourceExhausted, match="rounds_per_second"):
            session.verify()


def test_an_oversized_message(engine: EngineThread) -> None:
    gate = Gate(limits=Limits(max_message_bytes=4096))
    with (
        serving(engine=engine, gate=gate) as running,
        Client(running.address, timeout=10) as client,
    ):
        assert client.get_model().limits.max_message_bytes == 4096
        stub = generate_pb2_grpc.GenerateServiceStub(client._channel)
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(generate_pb2.GenerateRequest(text="x" * 5000)))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        works(client)


def test_messages_that_are_too_long_to_be_read_queue(engine: EngineThread) -> None:
    """By their size: to receive a megabyte costs more than to refuse a word."""
    size = 1_000_000
    pause = size / REFUSAL_BYTES / REFUSALS_PER_SECOND
    with (
        serving(engine=engine) as running,
        Client(running.address, timeout=10) as client,
    ):
        stub = generate_pb2_grpc.GenerateServiceStub(client._channel)
        started = time.monotonic()
        for _ in range(6):
            with pytest.raises(grpc.RpcError, match="at most") as caught:
                list(stub.Generate(generate_pb2.GenerateRequest(text="x" * size)))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert time.monotonic() - started >= 6 * pause - 1.0  # a second's worth is free
        works(client)


def test_slow_streams_that_send_nothing(engine: EngineThread) -> None:
    with (
        serving(engine=engine, idle_timeout_s=0.3) as running,
        Client(running.address, timeout=10) as client,
    ):
        stub = verify_pb2_grpc.VerifyServiceStub(client._channel)
        for first in ([], [verify_pb2.VerifyFrame(open=verify_pb2.OpenRequest(token_ids=PROMPT))]):

            def slow(frames: list[verify_pb2.VerifyFrame] = first) -> Iterator[Any]:
                yield from frames
                time.sleep(2)

            started = time.monotonic()
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Session(slow()))
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "no frame within 0.3 s" in caught.value.details()
            assert time.monotonic() - started < 1.5
            works(client)
        assert eventually(lambda: not engine.engine.sessions)


async def test_the_client_learns_that_its_stream_was_idle(engine: EngineThread) -> None:
    async with (
        await start_server(engine=engine, idle_timeout_s=0.2) as running,
        AsyncClient(running.address, timeout=10) as client,
    ):
        session = await client.open_session(PROMPT)
        await asyncio.sleep(0.6)
        with pytest.raises((DeadlineExceeded, SessionNotFound)):
            await session.verify()


async def test_a_round_that_takes_long_is_not_the_clients_idle_time(engine: EngineThread) -> None:
    async with (
        await start_server(engine=engine, idle_timeout_s=0.8) as running,
        AsyncClient(running.address, timeout=10) as client,
    ):
        session = await client.open_session(PROMPT)
        engine.call(lambda engine: time.sleep(1.2))  # others keep the engine busy
        await session.verify()
        await asyncio.sleep(0.5)  # long enough for a look at idle sessions
        assert (await session.verify()).token_ids


# --- what is written ----------------------------------------------------------------------------


def test_the_audit_log(shared: RpcServer, audit_file: Path) -> None:
    with Client(shared.address, timeout=10, token=ALICE) as alice:
        works(alice)
        with alice.open_session(PROMPT) as session:
            pass
        with pytest.raises(InvalidArgument):
            alice.open_session([])
    for _ in range(50):
        with Client(shared.address, timeout=10) as stranger, pytest.raises(Unauthenticated):
            stranger.get_model()
    written = lines(audit_file)
    opened = [line for line in written if line["event"] == "open"]
    assert [line["method"].rpartition("/")[2] for line in opened] == ["Generate", "Open"]
    assert opened[1]["session_id"] == session.transcript.session_id
    assert {line["tenant"] for line in opened} == {"alice"}
    assert all(line["peer"].startswith("ipv4:127.0.0.1:") for line in written)
    refusals = [line for line in written if line["event"] == "refused"]
    assert (refusals[0]["tenant"], refusals[0]["outcome"]) == ("alice", "INVALID_ARGUMENT")
    strangers = [line for line in refusals if line["tenant"] is None]
    assert {line["outcome"] for line in strangers} == {"UNAUTHENTICATED"}
    assert 1 <= len(strangers) < 25  # a flood of calls is not one of lines
    assert stat.S_IMODE(audit_file.stat().st_mode) == 0o600


def test_no_secret_is_written_anywhere(
    engine: EngineThread, tenants_file: Path, audit_file: Path, caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    caplog.set_level(logging.DEBUG)
    prompt = "a prompt that is private"
    tenants = Tenants(tenants_file)
    gate = Gate(tenants=tenants, audit=Audit(audit_file))
    shown = []
    with (
        serving(engine=engine, gate=gate) as running,
        Client(running.address, timeout=10, token=ALICE) as alice,
        Client(running.address, timeout=10, token=ALICE[:-1]) as wrong,
    ):
        alice.complete(prompt, PARAMS, AR)
        alice.open_session(list(prompt.encode())).close()
        with pytest.raises(Unauthenticated) as caught:
            wrong.complete(prompt, PARAMS, AR)
        shown += [str(caught.value), repr(caught.value), repr(running), repr(gate), repr(alice)]
        shown += [repr(vars(tenants)), str(vars(gate)), repr(tenants.find(digest_of(ALICE)))]
    out, err = capfd.readouterr()
    everything = "\n".join([*shown, out, err, caplog.text, audit_file.read_text()])
    assert "alice" in everything
    for secret in (ALICE, ALICE[:-1], BOB, digest_of(ALICE).hex(), digest_of(BOB).hex(), prompt):
        assert secret not in everything


# --- cost ---------------------------------------------------------------------------------------


@pytest.mark.alone
async def test_a_round_over_tls_costs_less_than_a_millisecond_more(
    engine: EngineThread, certs: Path, tenants_file: Path
) -> None:
    gate = Gate(tenants=Tenants(tenants_file))
    async with (
        await start_server(engine=engine) as plain,
        await start_server(
            engine=engine, gate=gate, credentials=server_tls(certs).credentials()
        ) as secure,
        AsyncClient(plain.address, timeout=30) as plain_client,
        AsyncClient(secure.address, timeout=30, ca=certs / "ca.crt", token=ALICE) as tls_client,
    ):
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        sessions = [
            await client.open_session(PROMPT, params) for client in (plain_client, tls_client)
        ]
        seconds: list[list[float]] = [[], []]
        for _ in range(150):  # taking turns, so that a busy machine slows both
            for session, times in zip(sessions, seconds, strict=True):
                started = time.perf_counter()
                verified = await session.verify()
                times.append(time.perf_counter() - started - verified.verify_seconds)
        for session in sessions:
            await session.close()
    without, with_tls = (1e3 * median(times) for times in seconds)
    print(f"round without the forward, p50: {without:.3f} ms plain, {with_tls:.3f} ms TLS + token")
    assert with_tls - without < 1.0
