"""An attacker's list, each item beside an honest client that measures its rounds.

The server is a process of its own, with TLS, tenants and the demo target. The attacker is another
one (``attacker.py``), which is stopped and continued in turn, so that a busy machine slows the calm
rounds as much as the others.
"""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import yaml

from paceline.cluster.certs import make_certificates
from paceline.demo import TARGET_DIR
from paceline.rpc.client import Client
from paceline.sampling import SamplingParams
from paceline.types import Draft
from tests.rpc.forking import ROOT
from tests.rpc.serving import ReplicaProcess

ALICE = "alice-token-of-many-characters"
MALLORY = "{kind}-token-of-many-characters"  # for each kind of attack a tenant: refusals queue
PROMPT = list(range(5, 37))
MAX_MESSAGE_BYTES = 65_536
IDLE_TIMEOUT_S = 4.0  # longer than the windows together
WINDOW_S = 0.3  # calm, then attacked, and so on
WINDOWS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Its address, and the honest client."""

    address: str
    ca: Path
    client: Client


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("attacked")
    make_certificates(folder)
    tenants: dict[str, Any] = {
        "alice": {"token": ALICE},
    }
    for arguments, _ in ATTACKS.values():
        kind = arguments[0]
        quotas = {"opens_per_second": 5, "max_sessions": 2}
        tenants[kind] = {"token": MALLORY.format(kind=kind), "quotas": quotas}
    (folder / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    ca = folder / "ca.crt"
    with (
        ReplicaProcess(
            "tests.rpc.target_process", "--model", str(TARGET_DIR),
            "--cert", str(folder / "server.crt"), "--key", str(folder / "server.key"),
            "--tenants", str(folder / "tenants.yaml"),
            "--max-message-bytes", str(MAX_MESSAGE_BYTES),
            "--idle-timeout-s", str(IDLE_TIMEOUT_S),
        ) as replica,
        Client(replica.address, timeout=30, ca=ca, token=ALICE) as client,
    ):  # fmt: skip
        Honest(client).rounds(0.5)  # kernels are built and caches are warm
        yield Server(address=replica.address, ca=ca, client=client)


class Honest:
    """Verifies rounds in sessions of the same prompt, and notes how long each took."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._session: Any = None
        self._longest: list[int] = []

    def rounds(self, seconds: float) -> list[float]:
        """Milliseconds of each round of that time."""
        found = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            if self._session is None or len(self._session.token_ids) > len(PROMPT) + 150:
                self.close()
                params = SamplingParams(max_tokens=200, ignore_eos=True)
                self._session = self._client.open_session(PROMPT, params)
            begun = time.perf_counter()
            self._session.verify(Draft.chain([1, 2, 3, 4]))
            found.append(1e3 * (time.perf_counter() - begun))
        return found

    def close(self) -> None:
        """End the session; its tokens are those of any other."""
        if self._session is not None:
            self._session.close()
            tokens = self._session.token_ids
            self._longest = max(self._longest, tokens, key=len)
            assert tokens == self._longest[: len(tokens)]
            self._session = None


class Attacker:
    """``attacker.py``, which attacks while it is not paused."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rpc.attacker"],
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def begin(self, server: Server, kind: str, *options: str) -> None:
        self._say(shlex.join([kind, server.address, "--ca", str(server.ca), *options]))
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the attacker did not start"
        self._say()
        self.pause()

    def _say(self, line: str = "") -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def pause(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def end(self) -> dict[str, Any]:
        """What it was answered."""
        self.go_on()
        self._say()
        output, _ = self._process.communicate(timeout=30)
        result: dict[str, Any] = json.loads(output)
        return result

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(10)


@pytest.fixture(scope="module")
def attackers() -> Iterator[list[Attacker]]:
    """One for each test, started together: that takes them a second of a core each."""
    started = [Attacker() for _ in ATTACKS]
    yield started.copy()
    for attacker in started:
        attacker.kill()


ATTACKS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "no token": (("flood", "--heedless"), {"UNAUTHENTICATED"}),
    "wrong token": (
        # From a host of its own: the last one's refusals are still in the queue.
        ("flood", "--token", "wrong-token-wrong-token", "--source", "127.0.0.2"),
        {"UNAUTHENTICATED"},
    ),
    "opens over the quota": (
        ("flood", "--heedless", "--token", MALLORY), {"OK", "RESOURCE_EXHAUSTED"}
    ),
    "session of another tenant": (
        # An attempt to take it over counts as an open, and there is a quota of these.
        ("other", "--token", MALLORY), {"NOT_FOUND", "RESOURCE_EXHAUSTED"},
    ),
    "replay of an old epoch": (("replay", "--token", MALLORY), {"FAILED_PRECONDITION"}),
    "oversized messages": (
        ("oversized", "--token", MALLORY, "--max-message-bytes", str(MAX_MESSAGE_BYTES)),
        {"RESOURCE_EXHAUSTED"},
    ),
    "slow loris": (("loris", "--token", MALLORY), {"DEADLINE_EXCEEDED"}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.one_of(3)
@pytest.mark.alone
@pytest.mark.parametrize("name", ATTACKS)
def test_an_honest_client_keeps_its_latency(
    name: str, attackers: list[Attacker], server: Server
) -> None:
    arguments, expected = ATTACKS[name]
    arguments = tuple(argument.format(kind=arguments[0]) for argument in arguments)
    honest, owned = Honest(server.client), server.client.open_session(PROMPT)
    if arguments[0] == "other":
        arguments = (*arguments, f"--session={owned.transcript.session_id}")  # it may begin with -
    calm: list[float] = []
    attacked: list[float] = []
    attacker = attackers.pop()
    try:
        attacker.begin(server, *arguments)
        for _ in range(WINDOWS):
            attacker.pause()
            calm += honest.rounds(WINDOW_S)
            attacker.go_on()
            attacked += honest.rounds(WINDOW_S)
        result = attacker.end()
    finally:
        attacker.kill()
    honest.close()
    owned.close()
    answers = result["answers"]
    print(
        f"{name}: {result['sent'] / WINDOWS / WINDOW_S:,.0f} calls a second, answers {answers}; "
        f"rounds p50 {median(calm):.1f} ms calm, {median(attacked):.1f} ms attacked "
        f"({median(attacked) / median(calm):.2f}), p99 {percentile(calm):.1f} and "
        f"{percentile(attacked):.1f} ms"
    )
    assert set(answers) - {"REFUSED_STREAM"} == expected  # HTTP/2's own, over the limit of calls
    assert answers.get("OK", 0) <= 4  # max_sessions, again after the time-out
    if "--heedless" in arguments:
        assert result["sent"] > 1000
    assert median(attacked) < 2 * median(calm)


def percentile(values: list[float], q: float = 0.99) -> float:
    return sorted(values)[int(q * (len(values) - 1))]
