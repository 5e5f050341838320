"""A deployment with TLS on every port, client certificates and tenants."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import ray
import yaml
from ray import serve
from typer.testing import CliRunner

from paceline.cluster import local, serving
from paceline.cluster.certs import REPLICA_NAME, make_certificates
from paceline.cluster.cli import app as command_line
from paceline.config import SpeculationConfig
from paceline.errors import (
    InvalidArgument,
    PacelineError,
    ResourceExhausted,
    SessionNotFound,
)
from paceline.rpc.client import CHANNEL_OPTIONS, AsyncClient, Client, bearer
from paceline.rpc.errors import ServerUnavailable, Unauthenticated
from paceline.rpc.gen.paceline.v1 import ticket_pb2, ticket_pb2_grpc, verify_pb2
from paceline.rpc.tenants import CHECK_INTERVAL_S
from paceline.rpc.tls import ClientTls
from paceline.sampling import SamplingParams
from tests.deployments.conftest import PROMPTS, App, config_file, eventually, free_port
from tests.rpc.test_fuzz import TARGET_CALLS, fuzz

# The first test of a run waits for Ray, Serve and three replicas.
pytestmark = [pytest.mark.serve, pytest.mark.slow, pytest.mark.timeout(300)]

ALICE, BOB, CAROL = (f"{name}-token-of-many-characters" for name in ("alice", "bob", "carol"))
PARAMS = SamplingParams(max_tokens=32, ignore_eos=True, temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secure")
    make_certificates(folder)
    tenants = {
        "alice": {"token": ALICE},
        "bob": {"token": BOB, "quotas": {"max_sessions": 1, "rounds_per_second": 2}},
        "carol": {"token": CAROL, "quotas": {"tokens_per_minute": 600}},
    }
    (folder / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    (folder / "alice.token").write_text(f"{ALICE}\n")
    return folder


@pytest.fixture(scope="module")
def secure(ray_cluster: None, folder: Path) -> Iterator[App]:
    path = lambda name: str(folder / name)  # noqa: E731
    blocks = {
        "gateway": {
            "tls": {
                "cert": path("server.crt"),
                "key": path("server.key"),
                "client_ca": path("ca.crt"),
                "require_client_cert": True,
            },
            "tenants": path("tenants.yaml"),
            "audit_log": path("audit.jsonl"),
        },
        "data_plane_tls": {
            "cert": path("replica.crt"),
            "key": path("replica.key"),
            "ca": path("replica-ca.crt"),
            "server_name": REPLICA_NAME,
        },
        "target": {"idle_timeout_s": 2},
        "direct": {"enabled": True},
    }
    file = config_file("actors", "test-secure", free_port()).with_args(blocks)
    serving.deploy(file, lambda line: None)
    described = serving.describe(file.name)
    app = App(file.name, "actors", described["gateway"], described["http"])
    yield app
    assert eventually(lambda: app.idle), app.describe()
    assert app.replica("gateway")["sessions"] == 0
    serve.delete(file.name)


def own(folder: Path) -> dict[str, Path]:
    return {
        "ca": folder / "ca.crt",
        "cert": folder / "client.crt",
        "key": folder / "client.key",
    }


def test_tokens_are_those_of_ar(
    secure: App, folder: Path, ar: Callable[[Sequence[str], SamplingParams], list[tuple[int, ...]]]
) -> None:
    with Client(secure.address, timeout=60, token=ALICE, **own(folder)) as client:
        for prompt, expected in zip(PROMPTS, ar(PROMPTS, PARAMS), strict=True):
            method = SpeculationConfig(method="draft_model", length="fixed")
            done = client.complete(prompt, PARAMS, method)
            assert done.token_ids == expected
            assert done.statistics.num_drafted > 0
            assert not done.statistics.drafter_lost
            assert done.last.drafter_pid != done.last.target_pid


def test_the_command_line(secure: App, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [text for name, path in own(folder).items() for text in (f"--{name}", str(path))]
    command = ["generate", "def f(", "--server", secure.address, "--json", "-n", "8", *files]
    token = ["--token-file", str(folder / "alice.token")]
    result = CliRunner().invoke(command_line, [*command, *token])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_tokens"] == 8
    refused = CliRunner().invoke(command_line, command)
    assert refused.exit_code == 2
    assert "authorization: Bearer" in refused.stderr
    monkeypatch.setenv("PACELINE_TOKEN", ALICE)
    assert CliRunner().invoke(command_line, command).exit_code == 0


def test_a_device_sends_its_rounds_to_the_target(secure: App, folder: Path) -> None:
    files = [text for name, path in own(folder).items() for text in (f"--{name}", str(path))]
    options = ["--token-file", str(folder / "alice.token"), "--only-device", "--ignore-eos"]
    command = ["draft", PROMPTS[0], "--server", secure.address, "-n", "48", "--json"]
    results = []
    for direct in ("auto", "never"):
        done = CliRunner().invoke(command_line, [*command, *files, *options, "--direct", direct])
        assert done.exit_code == 0, done.output
        results.append(json.loads(done.stdout))
    with Client(secure.address, timeout=60, token=ALICE, **own(folder)) as client:
        greedy = SamplingParams(max_tokens=48, ignore_eos=True)
        expected = list(
            client.complete(PROMPTS[0], greedy, SpeculationConfig(method="ar")).token_ids
        )
    assert [result["token_ids"] for result in results] == [expected, expected]
    assert [result["direct_rounds"] > 0 for result in results] == [True, False]
    assert [result["num_failures"] for result in results] == [0, 0]


async def test_what_tickets_have_left_comes_back_with_the_lease(secure: App, folder: Path) -> None:
    """Else the tenant would wait for the better part of a minute."""
    async with AsyncClient(secure.address, timeout=30, token=CAROL, **own(folder)) as carol:
        sessions = [await carol.open_session([5, 6, 7], PARAMS) for _ in range(2)]
        tickets: Any = ticket_pb2_grpc.TicketServiceStub(carol._channel)
        for session in sessions:
            request = ticket_pb2.TicketRequest(session_id=session.transcript.session_id)
            ticket = await tickets.Issue(request, metadata=carol._metadata)
            assert ticket.tokens == 512
        with pytest.raises(ResourceExhausted, match="tokens_per_minute"):
            await carol.open_session([5, 6, 7], PARAMS)
        for session in sessions:
            await session.close()
        started = time.monotonic()
        while True:
            try:
                session = await carol.open_session([5, 6, 7], PARAMS)
                break
            except ResourceExhausted:
                await asyncio.sleep(0.2)
        assert time.monotonic() - started < 15  # of the 43 s until the debt is paid by itself
        await session.close()


def test_who_is_refused(secure: App, folder: Path) -> None:
    client = Client(secure.address, timeout=10, **own(folder))
    with client, pytest.raises(Unauthenticated):
        client.get_model()
    client = Client(secure.address, timeout=10, token=ALICE, ca=folder / "ca.crt")
    with client, pytest.raises(ServerUnavailable):
        client.get_model()


def test_data_ports_are_for_replicas_only(secure: App, folder: Path) -> None:
    for deployment in ("target", "drafter"):
        address = secure.replica(deployment)["address"]
        with Client(address, timeout=5) as plain, pytest.raises(ServerUnavailable):
            plain.get_model()
        # The certificate of a client of the gateway does not open them.
        files = {name: str(path) for name, path in own(folder).items()}
        files["ca"] = str(folder / "replica-ca.crt")
        client = Client(address, timeout=5, **files)
        with client, pytest.raises(ServerUnavailable):
            client.get_model()


async def test_sessions_belong_to_tenants(secure: App, folder: Path) -> None:
    async with (
        AsyncClient(secure.address, timeout=30, token=ALICE, **own(folder)) as alice,
        AsyncClient(secure.address, timeout=30, token=BOB, **own(folder)) as bob,
    ):
        session = await alice.open_session([5, 6, 7], PARAMS)
        await session.verify()
        with pytest.raises(SessionNotFound):
            await bob.resume_session(session.transcript)
        request = verify_pb2.VerifyRequest(
            session_id=session.transcript.session_id, epoch=session.transcript.epoch, round=2
        )
        with pytest.raises(grpc.RpcError) as caught:
            await bob._verify.Verify(request, metadata=bob._metadata)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        await session.verify()
        await session.close()


async def test_quotas_in_a_stream_through_the_gateway(secure: App, folder: Path) -> None:
    async with AsyncClient(secure.address, timeout=30, token=BOB, **own(folder)) as bob:
        session = await bob.open_session([5, 6, 7], PARAMS)
        with pytest.raises(ResourceExhausted, match="max_sessions"):
            await bob.open_session([5, 6, 7], PARAMS)
        waits = []
        while len(session.token_ids) < 3 + 5:
            try:
                await session.verify()
            except ResourceExhausted as error:
                waits.append(error.retry_after_s)
                await asyncio.sleep(error.retry_after_s)
        assert len(waits) >= 2
        assert 0 < max(waits) <= 0.5
        await session.close()


async def test_hostile_messages_through_the_gateway(secure: App, folder: Path) -> None:
    tls = ClientTls(**{name: str(path) for name, path in own(folder).items()})
    connect = lambda: grpc.aio.secure_channel(  # noqa: E731
        secure.address, tls.credentials(), options=CHANNEL_OPTIONS
    )
    before = (await asyncio.to_thread(secure.replica, "gateway"))["pid"]
    codes = await fuzz(connect, TARGET_CALLS, 250, 3, bearer(ALICE))
    assert {"OK", "INVALID_ARGUMENT", "NOT_FOUND"} <= set(codes)
    assert await asyncio.to_thread(eventually, lambda: secure.idle, 20)
    assert (await asyncio.to_thread(secure.replica, "gateway"))["pid"] == before


def test_the_audit_log_of_the_gateway(secure: App, folder: Path) -> None:
    with Client(secure.address, timeout=30, token=ALICE, **own(folder)) as client:
        client.complete(PROMPTS[0], PARAMS)
        with pytest.raises(InvalidArgument):
            client.complete([999_999], PARAMS)
    text = (folder / "audit.jsonl").read_text()
    written = [json.loads(line) for line in text.splitlines()]
    assert ("open", "alice", "OK") in {(w["event"], w["tenant"], w["outcome"]) for w in written}
    assert ("refused", "alice", "INVALID_ARGUMENT") in {
        (w["event"], w["tenant"], w["outcome"]) for w in written
    }
    for secret in (ALICE, BOB, PROMPTS[0], "fibonacci"):
        assert secret not in text
    assert os.stat(folder / "audit.jsonl").st_mode & 0o077 == 0


def test_no_log_has_a_token(secure: App, folder: Path) -> None:
    """Ray's logs and Paceline's, after calls, mistakes and a tenants file that cannot be used."""
    wrong = "wrong-token-of-many-characters"
    for token in (ALICE, BOB, wrong):
        with (
            suppress(PacelineError),
            Client(secure.address, timeout=30, token=token, **own(folder)) as client,
        ):
            client.complete(PROMPTS[0], PARAMS)
            client.complete([999_999], PARAMS)
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.load_cert_chain(folder / "client.crt", folder / "client.key")
    for token in (ALICE, BOB, wrong):
        for path, header in (
            ("/v1/models", f"Bearer {token}"), ("/v1/nothing", f"Bearer {token}"),
            (f"/v1/models?api_key={token}", token), (f"/v1/{token}", "Basic x"),
        ):  # fmt: skip
            request = urllib.request.Request(secure.http + path, headers={"Authorization": header})
            with suppress(urllib.error.HTTPError):
                urllib.request.urlopen(request, timeout=30, context=context).close()
    file = folder / "tenants.yaml"
    text = file.read_text()
    for broken in (text.replace("max_sessions", "max_session"), f"{text}: {{"):
        file.write_text(broken)
        time.sleep(2 * CHECK_INTERVAL_S)
        with Client(secure.address, timeout=30, token=ALICE, **own(folder)) as client:
            client.get_model()
    file.write_text(text)
    logs = Path(ray._private.worker._global_node.get_session_dir_path())
    where = [logs, folder / "audit.jsonl", local.state_folder()]
    secrets = [secret for token in (ALICE, BOB, wrong) for secret in forms_of(token)]
    found = {path: said_in(path, secrets) for path in files_in(*where)}
    assert not [path for path, said in found.items() if said]
    # The search finds what is there: the broken file was noticed, in one of these logs.
    assert any(said_in(path, [b"the tenants stay as they were"]) for path in found)


def forms_of(token: str) -> list[bytes]:
    """A token as text and as its digest."""
    digest = hashlib.sha256(token.encode())
    return [token.encode(), digest.digest(), digest.hexdigest().encode()]


def files_in(*places: Path) -> list[Path]:
    below = [path for place in places for path in (place, *place.rglob("*"))]
    return [path for path in below if path.is_file()]


def said_in(path: Path, texts: Sequence[bytes]) -> bool:
    try:
        data = path.read_bytes()
    except OSError:  # a socket, or a file that has gone
        return False
    return any(text in data for text in texts)
