"""Prompts go to the replica that has their beginning in its cache, unless it is too busy."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.common import DeploymentID  # a ReplicaID takes one
from ray.serve.request_router import ReplicaID

from paceline.deployments.affinity import (
    MISSING_S,
    MOST_STEPS,
    SLACK,
    STEP_BYTES,
    AffinityRouter,
    PrefixTable,
    message_keys,
    prefix_keys,
)
from paceline.rpc.access import CACHE_SCOPE
from paceline.rpc.gen.paceline.v1 import common_pb2, generate_pb2, verify_pb2

SYSTEM = "You are a careful assistant. " * 40  # 1,160 characters


# --- keys and table -------------------------------------------------------------------------------


def test_prompts_share_the_keys_of_what_they_share() -> None:
    one, other = (prefix_keys(f"{SYSTEM}{text * 100}".encode()) for text in ("hello", "what!"))
    shared = len(SYSTEM) // STEP_BYTES
    assert one[:shared] == other[:shared]
    assert not set(one[shared:]) & set(other[shared:])
    assert prefix_keys(SYSTEM.encode(), "tenant") != prefix_keys(SYSTEM.encode(), "other")
    assert prefix_keys(b"short") == ()
    assert len(prefix_keys(b"x" * 10_000_000)) == MOST_STEPS


def test_the_longest_known_beginning_decides() -> None:
    table = PrefixTable()
    prompt = SYSTEM.encode()
    table.note(prefix_keys(prompt[:600]), "a")
    table.note(prefix_keys(prompt[:300]), "b")
    assert table.find(prefix_keys(prompt)) == "a"
    assert table.find(prefix_keys(prompt[:300] + b"?" * 500)) == "b"
    assert table.find(prefix_keys(b"?" * 500)) == ""
    assert table.find(()) == ""


def test_the_table_is_bounded_and_forgets_the_oldest() -> None:
    table = PrefixTable(most=8)
    for number in range(20):
        table.note(prefix_keys(bytes([number]) * STEP_BYTES * 2), f"replica {number}")
    known = [table.find(prefix_keys(bytes([n]) * STEP_BYTES * 2)) for n in range(20)]
    assert known == [""] * 16 + [f"replica {n}" for n in range(16, 20)]


def test_token_ids_and_texts_of_every_request_have_keys() -> None:
    ids = list(range(200))
    generate = generate_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(token_ids=ids))
    opening = verify_pb2.OpenRequest(token_ids=ids)
    text = generate_pb2.GenerateRequest(text=SYSTEM)
    assert message_keys(generate, ()) == message_keys(opening, ())
    assert len(message_keys(generate, ())) == 200 * 4 // STEP_BYTES
    assert message_keys(text, ()) == prefix_keys(SYSTEM.encode())
    scoped = message_keys(text, (("traceparent", "x"), (CACHE_SCOPE, "one")))
    assert scoped == prefix_keys(SYSTEM.encode(), "one")
    assert message_keys(verify_pb2.OpenRequest(token_ids=[-1] * 64), ())


# --- Serve's router -------------------------------------------------------------------------------


def _router(lengths: dict[str, int | None]) -> Any:
    """Of replicas with these queues, as Serve knows them."""
    deployment_id = DeploymentID(name="target")

    class Queues:
        def get(self, replica_id: Any) -> int | None:
            return router.lengths[replica_id.unique_id]

    class Router(AffinityRouter):
        replica_queue_len_cache = Queues()  # type: ignore[assignment]

        def __init__(self) -> None:
            """Without Serve."""
            self.lengths = lengths

        @property
        def replicas(self) -> list[Any]:
            return [
                SimpleNamespace(replica_id=ReplicaID(name, deployment_id), max_ongoing_requests=64)
                for name in self.lengths
            ]

        def apply_locality_routing(self, pending_request: Any = None) -> Any:
            return [replica.replica_id for replica in self.replicas]

    router = Router()
    return router


def _ranks(router: Any, prefer: str) -> list[list[str]]:
    request = SimpleNamespace(kwargs={"prefer": prefer} if prefer else {})
    ranks = asyncio.run(router.choose_replicas(router.replicas, request))
    return [[each.replica_id.unique_id for each in rank] for rank in ranks]


def choose(lengths: dict[str, int | None], prefer: str) -> list[list[str]]:
    """The ranks of replicas with these queues."""
    return _ranks(_router(lengths), prefer)


def test_the_preferred_replica_comes_first_unless_it_is_busier_than_others() -> None:
    assert choose({"a": 1, "b": 1 + SLACK, "c": 9}, "b")[0] == ["b"]
    assert len(choose({"a": 1, "b": 2 + SLACK, "c": 9}, "b")) == 1, "any two"
    assert choose({"a": None, "b": None}, "b")[0] == ["b"], "Serve looks by itself"


@pytest.mark.parametrize("prefer", ["", "gone"])
def test_without_a_preferred_replica_there_are_two_at_random(prefer: str) -> None:
    seen = set()
    for _ in range(60):
        (rank,) = choose({"a": 0, "b": 0, "c": 0}, prefer)
        assert len(set(rank)) == 2
        seen.update(rank)
    assert seen == {"a", "b", "c"}


def test_a_lone_replica_is_chosen() -> None:
    assert choose({"a": 3}, "") == [["a"]]
    assert choose({"a": 3}, "a") == [["a"], ["a"]]
    assert choose({}, "a") == [[]]


class Replicas:
    """What Serve's router of one gateway chooses, as replicas come and go."""

    def __init__(self, standby: int) -> None:
        self.router = _router({})
        self.router.initialize_state(standby=standby)

    def ranks(self, *names: str, prefer: str = "") -> list[set[str]]:
        self.router.lengths = dict.fromkeys(names, 0)
        return [set(rank) for rank in _ranks(self.router, prefer)]


def test_a_replica_on_standby_gets_only_what_others_have_no_room_for() -> None:
    """In every gateway the same one, whatever the order in which it knows them."""
    assert (
        Replicas(1).ranks("b", "a", "c") == Replicas(1).ranks("c", "b", "a") == [{"a", "b"}, {"c"}]
    )
    assert Replicas(2).ranks("b", "a", "c") == [{"a"}, {"b", "c"}]
    assert Replicas(1).ranks("b", "a", prefer="a") == [{"a"}, {"a"}, {"b"}]
    assert Replicas(1).ranks("b", "a", prefer="b") == [{"a"}, {"b"}], "it read a prompt long ago"
    assert Replicas(5).ranks("b", "a") == [{"a"}, {"b"}], "one is always there"


def test_a_standby_takes_the_place_of_one_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("paceline.deployments.affinity.time.monotonic", lambda: now)
    replicas = Replicas(1)
    assert replicas.ranks("a", "b", "c") == [{"a", "b"}, {"c"}]
    assert replicas.ranks("b", "c") == [{"b", "c"}]
    now = MISSING_S / 2
    assert replicas.ranks("b", "c", "d") == [{"b", "c"}, {"d"}]
    assert replicas.ranks("c", "d") == [{"c", "d"}]
    now += MISSING_S + 1  # none has come: there are to be two now
    assert replicas.ranks("c", "d") == [{"c"}, {"d"}]
