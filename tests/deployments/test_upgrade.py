"""Upgrade, rollback, fewer replicas and a node that dies, under live sessions: no token is lost,
repeated or changed.

A Ray of two nodes, as the operator starts it for the chart's pools, and Serve's REST interface, to
which the operator sends ``serveConfigV2`` when it has changed.
"""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine
from paceline.rpc.client import Client
from paceline.rpc.device import DeviceClient
from paceline.rpc.ladder import Mode
from paceline.rpc.reconnect import Patience
from paceline.sampling import SamplingParams
from tests.deployments.conftest import PROMPTS, eventually, free_port
from tests.deployments.test_generate import AR
from tests.ray_nodes import ROOT, clean_environment, make_token, ray_node, raylets

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]

PATIENCE_S = 180.0
"""Two cores may have more to do than to start what replaces a target or a gateway."""
GREEDY = SamplingParams(max_tokens=320, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=320, ignore_eos=True, temperature=1.0, seed=17)
SMALL = {"num_cpus": 0.1}
NEW = {"method": "prompt_lookup", "num_speculative_tokens": 6}
OLD = {"method": "draft_model", "num_speculative_tokens": 3}


class Cluster:
    """Two Ray nodes with slots for one target and one drafter each; the gateway is on the first."""

    def __init__(self, home: Path, nodes: ExitStack) -> None:
        environment = {**clean_environment(home), "PYTHONPATH": str(ROOT)}
        make_token(environment)
        port, dashboard = free_port(), free_port()
        self.grpc = f"127.0.0.1:{free_port()}"
        self.http = f"127.0.0.1:{free_port()}"
        self._url = f"http://127.0.0.1:{dashboard}/api/serve/applications/"
        self._token = (home / ".ray" / "auth_token").read_text().strip()
        pool = {"paceline_target": 1, "paceline_drafter": 1}
        common = ["--num-cpus=2", "--node-ip-address=127.0.0.1"]
        head = [
            "--head", f"--port={port}", f"--dashboard-port={dashboard}", *common,
            f"--resources={json.dumps({**pool, 'paceline_gateway': 1})}",
        ]  # fmt: skip
        nodes.enter_context(ray_node(head, environment))
        worker = [f"--address=127.0.0.1:{port}", *common, f"--resources={json.dumps(pool)}"]
        self._worker = nodes.enter_context(ray_node(worker, environment))

    def deploy(self, speculation: dict[str, Any], num_replicas: int) -> None:
        """What a changed RayService comes to: Serve gets the whole configuration."""
        args = {
            "speculation": speculation,
            # Shorter than a generation: sessions move.
            "target": {**SMALL, "resources": {"paceline_target": 1}, "drain_s": 0.5},
            "drafter": {**SMALL, "resources": {"paceline_drafter": 1}},
            "gateway": {
                **SMALL, "resources": {"paceline_gateway": 1}, "drain_s": PATIENCE_S,
                "open_timeout_s": PATIENCE_S,
                "grpc_port": int(self.grpc.rpartition(":")[2]),
                "http_port": int(self.http.rpartition(":")[2]),
            },
        }  # fmt: skip
        application = {
            "name": "paceline", "import_path": "paceline.deployments.app:build",
            "route_prefix": None, "args": args,
            "deployments": [
                {"name": name, "num_replicas": num_replicas} for name in ("target", "drafter")
            ],
        }  # fmt: skip
        self._call("PUT", {"proxy_location": "Disabled", "applications": [application]})

    def replicas(self, deployment: str) -> set[str]:
        """Their ids."""
        application = self._call("GET")["applications"]["paceline"]
        return {r["replica_id"] for r in application["deployments"][deployment]["replicas"]}

    def settled(self, **numbers: int) -> bool:
        """Whether everything runs, with these numbers of replicas."""
        application = self._call("GET")["applications"].get("paceline", {})
        assert application.get("status") != "DEPLOY_FAILED", application
        deployments = application.get("deployments", {})
        return application.get("status") == "RUNNING" and all(
            [replica["state"] for replica in deployments[name]["replicas"]] == ["RUNNING"] * number
            for name, number in numbers.items()
        )

    def kill_worker(self) -> None:
        """Kill the second node, and its replicas with it, without a warning."""
        (raylet,) = raylets(self._worker.pid)
        os.kill(raylet, signal.SIGKILL)

    def _call(self, method: str, body: Any = None) -> Any:
        request = urllib.request.Request(
            self._url, method=method, data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None


class Clients:
    """Users who generate again and again: over gRPC, over HTTP, and with a drafter of their own.

    Args:
        each: so many in each way.

    Attributes:
        done: generations that have come to their end, with the tokens of AR.
        moved: generations that did not stay with one target; of HTTP that cannot be seen.
    """

    def __init__(self, cluster: Cluster, engine: Engine, ar: AR, each: int = 1) -> None:
        self._cluster = cluster
        self._engine = engine
        self.truths = [ar(PROMPTS, params) for params in (GREEDY, SAMPLED)]
        self.done: dict[str, int] = {}
        self.moved: dict[str, int] = {}
        self.errors: list[BaseException] = []
        self._stop = threading.Event()
        users = {"grpc": self._grpc, "http": self._http, "device": self._device}
        self._threads = [
            threading.Thread(
                target=self._run, args=(f"{kind} {i + 1}", user), name=f"{kind} {i + 1}"
            )
            for kind, user in users.items()
            for i in range(each)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)

    def check(self) -> None:
        """Every generation has come to its end, with the tokens of AR, and some have moved."""
        assert not self.errors
        for name, count in self.done.items():
            assert count
            print(f"{name}: {count} generations, {self.moved[name]} moved")
        assert self.all_moved

    @property
    def all_moved(self) -> bool:
        """Whether each client that can tell has gone on elsewhere at least once."""
        return all(moved for name, moved in self.moved.items() if not name.startswith("http"))

    @property
    def num_done(self) -> int:
        """Generations of the client that has the fewest."""
        return min(self.done.get(thread.name, 0) for thread in self._threads)

    def go_on(self, more: int = 1) -> bool:
        """Wait until each client has finished that many generations that began after this call."""
        before = self.num_done
        return eventually(lambda: self.num_done > before + more or bool(self.errors), PATIENCE_S)

    def _run(
        self, name: str, user: Callable[[str, SamplingParams], tuple[list[int], bool]]
    ) -> None:
        self.done[name] = self.moved[name] = turn = 0
        try:
            while not self._stop.is_set():
                params = (GREEDY, SAMPLED)[turn % 2]
                which = turn % len(PROMPTS)
                tokens, moved = user(PROMPTS[which], params)
                assert tuple(tokens) == self.truths[turn % 2][which], name
                self.done[name] += 1
                self.moved[name] += moved
                turn += 1
        except BaseException as error:
            self.errors.append(error)
            raise

    def _grpc(self, prompt: str, params: SamplingParams) -> tuple[list[int], bool]:
        with Client(self._cluster.grpc, timeout=300, resume_s=PATIENCE_S) as client:
            rounds = list(client.generate(prompt, params))
            assert [r.round for r in rounds] == list(range(1, len(rounds) + 1))
            statistics = rounds[-1].statistics
            assert statistics is not None
            assert statistics.num_tokens == params.max_tokens
            # Drafts are counted by the target that ended it.
            accepted = sum(r.num_accepted for r in rounds)
            return [t for r in rounds for t in r.token_ids], statistics.num_accepted < accepted

    def _http(self, prompt: str, params: SamplingParams) -> tuple[list[int], bool]:
        with openai.OpenAI(
            base_url=f"http://{self._cluster.http}/v1", api_key="x", max_retries=0, timeout=300
        ) as client:
            while True:
                try:
                    stream = client.completions.create(
                        model="paceline", prompt=prompt, max_tokens=params.max_tokens,
                        temperature=params.temperature, seed=params.seed, stream=True,
                        extra_body={"ignore_eos": True, "return_token_ids": True},
                    )  # fmt: skip
                    break
                except openai.APIConnectionError:  # refused: nothing has begun
                    assert not self._stop.wait(0.2)
            tokens = [t for chunk in stream for c in chunk.choices for t in c.token_ids]  # type: ignore[attr-defined]
            return tokens, False

    def _device(self, prompt: str, params: SamplingParams) -> tuple[list[int], bool]:
        drafter, tokenizer = self._engine.drafters["draft_model"], self._engine.tokenizer
        assert isinstance(drafter, DraftModel)
        assert tokenizer is not None
        with DeviceClient(
            [self._cluster.grpc], {"draft_model": DraftModel(drafter.runner, drafter.vocab_size)},
            speculation=SpeculationConfig(method="draft_model", num_speculative_tokens=3),
            tokenizer=tokenizer,
            modes=(Mode.DEVICE,),
            patience=Patience(give_up=PATIENCE_S),
        ) as client:  # fmt: skip
            result = client.complete(tokenizer.encode(prompt), params)
            return result.token_ids, result.counters.num_failures > 0


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as nodes:
        yield Cluster(tmp_path, nodes)


@pytest.mark.nightly
def test_sessions_outlive_upgrades_and_nodes(cluster: Cluster, engine: Engine, ar: AR) -> None:
    both = {"target": 2, "drafter": 2, "gateway": 1}
    one = {"target": 1, "drafter": 1, "gateway": 1}
    cluster.deploy(OLD, 2)
    assert eventually(lambda: cluster.settled(**both), PATIENCE_S)
    with Clients(cluster, engine, ar) as clients:

        def step(name: str, speculation: dict[str, Any], numbers: dict[str, int]) -> set[str]:
            """Change the configuration; the targets that have gone."""
            assert clients.go_on(), name
            began = time.monotonic()
            before = cluster.replicas("target")
            cluster.deploy(speculation, numbers["target"])
            time.sleep(1)  # until the controller has seen it
            done = eventually(
                lambda: cluster.settled(**numbers) or bool(clients.errors), PATIENCE_S
            )
            assert not clients.errors, name
            assert done, name
            total, seconds = sum(clients.done.values()), time.monotonic() - began
            print(f"{name}: {seconds:.0f} s, {total} generations so far")
            return before - cluster.replicas("target")

        assert len(step("upgrade", NEW, both)) == 2
        assert len(step("fewer", NEW, one)) == 1
        assert len(step("rollback", OLD, both)) == 1
        assert clients.go_on()
        cluster.kill_worker()
        assert clients.go_on()
    clients.check()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_changes_that_do_not_wait_for_one_another(cluster: Cluster, engine: Engine, ar: AR) -> None:
    """Twelve configurations or more, each a few seconds after the one before."""
    rng = random.Random(1)
    cluster.deploy(OLD, 2)
    assert eventually(lambda: cluster.settled(target=2, drafter=2, gateway=1), PATIENCE_S)
    with Clients(cluster, engine, ar, each=2) as clients:
        # Which client a change meets in the middle of a generation is chance: go on until all are.
        for change in range(60):
            if change >= 12 and clients.all_moved:
                break
            time.sleep(rng.uniform(0.0, 20.0))
            assert not clients.errors
            cluster.deploy(rng.choice((OLD, NEW)), rng.choice((1, 2)))
        assert clients.go_on()
    clients.check()
