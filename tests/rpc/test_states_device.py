"""Heads on a device: the target is on a server, and its answers carry states."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, cast

import grpc
import numpy as np
import pytest
import torch

from benchmarks.netem import Link, Netem
from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.deployments.gateway import Relay
from paceline.deployments.lease import Endpoint, Lease, Unleased
from paceline.deployments.session_ids import SessionIds
from paceline.drafters.client import ClientDrafter
from paceline.drafters.head import HeadDrafter
from paceline.engine import Engine, EngineThread
from paceline.errors import InvalidArgument
from paceline.loading import load_head_drafter
from paceline.methods import METHODS
from paceline.models.base import Segment
from paceline.rpc import states as states_module
from paceline.rpc.access import Gate
from paceline.rpc.device import DeviceClient, DeviceResult
from paceline.rpc.errors import from_rpc_error
from paceline.rpc.gen.paceline.v1 import common_pb2, verify_pb2, verify_pb2_grpc
from paceline.rpc.ladder import Mode
from paceline.rpc.reconnect import Patience
from paceline.rpc.server import RpcServer
from paceline.rpc.states import StatesCodec, StatesInbox
from paceline.target import ModelTarget
from paceline.types import Need, StatesLayout
from tests.rpc.serving import eventually, serving
from tests.rpc.test_states import TRAINED, always, ar, beside_the_target, demo, params_of, prompts

SIZE = 160  # of a state of the demo target


@cache
def head_of(method: str) -> HeadDrafter:
    return load_head_drafter(METHODS[method].drafter, TARGET_DIR, kv_tokens=2048)


@contextmanager
def target_server() -> Iterator[RpcServer]:
    thread = EngineThread(Engine(ModelTarget(demo()))).start()
    try:
        with serving(engine=thread) as server:
            yield server
        client = cast(ClientDrafter, thread.engine.drafters["client"])
        assert eventually(lambda: client.is_idle)
    finally:
        thread.stop()
    assert demo().num_free == demo().kv_capacity


@pytest.fixture(scope="module")
def server() -> Iterator[RpcServer]:
    with target_server() as running:
        yield running


def device(method: str, *servers: str, **options: Any) -> DeviceClient:
    return DeviceClient(
        servers, {METHODS[method].drafter: head_of(method)},
        speculation=always(method),
        modes=(Mode.DEVICE,),
        patience=Patience(probe=5.0),  # the machine may be busy
        **options,
    )  # fmt: skip


def generate(client: DeviceClient, prompt: int, temperature: float) -> DeviceResult:
    return client.complete(prompts()[prompt], params_of(temperature))


# --- tokens --------------------------------------------------------------------------------------


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", TRAINED)
def test_a_head_on_a_device(method: str, temperature: float, server: RpcServer) -> None:
    """AR's tokens; and with exact states the drafts of a head beside the target.

    The first round brings the prompt's states and has no draft: so at most one round more, and the
    rounds after it accept as much.
    """
    params = params_of(temperature, 20)
    beside = beside_the_target(method, params)
    with device(method, server.address, states="float32") as client:
        for i, prompt in enumerate(prompts()):
            result = client.complete(prompt, params)
            assert result.token_ids == ar(temperature, 20)[i]
            stats = result.statistics
            assert stats.num_accepted > 0
            assert 0 <= stats.num_rounds - beside[i].stats.num_rounds <= 2
            assert not stats.drafter_failures
        layout = head_of(method).states
    assert layout is not None
    num_rows = sum(len(ids) + params.max_tokens for ids in prompts())
    most = num_rows * (4 * layout.num_values + 80)  # with what else is in a message
    assert 0.5 * most < client.target.counters.states_bytes < most  # each row once
    assert client.target.counters.num_failures == 0


def test_states_in_int8_take_a_quarter_of_the_bytes(server: RpcServer) -> None:
    sizes, rounds = {}, {}
    for encoding in ("int8", "float32"):
        with device("eagle", server.address, states=encoding) as client:
            results = [generate(client, i, 0.0) for i in range(len(prompts()))]
            sizes[encoding] = client.target.counters.states_bytes
            rounds[encoding] = sum(r.statistics.num_rounds for r in results)
    assert sizes["int8"] < 0.3 * sizes["float32"]
    assert rounds["int8"] <= 1.1 * rounds["float32"]


def test_through_a_gateway(server: RpcServer) -> None:
    async def lease() -> Lease:
        return cast(Lease, Unleased(Endpoint(server.address, 0, server.address, lease_id="1")))

    gate = Gate()
    relay = Relay(lease, idle_timeout_s=60, resume_s=5, gate=gate, session_ids=SessionIds.random())
    with (
        serving(register=relay.register, gate=gate) as gateway,
        device("moa", gateway.address) as client,
    ):
        result = generate(client, 1, 0.0)
    assert result.token_ids == ar(0.0)[1]
    assert result.statistics.num_accepted > 0
    assert client.target.counters.num_failures == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_server_that_dies_leaves_the_session_to_another(temperature: float) -> None:
    """The head has its states already; the new server adds those of the tokens since."""
    with ExitStack() as stack:
        first = ExitStack()
        one = first.enter_context(target_server())
        other = stack.enter_context(target_server())
        client = stack.enter_context(device("eagle", one.address, other.address))
        before = 0
        for item in client.generate(prompts()[0], params_of(temperature)):
            if not before and item.num_accepted:
                before = client.result.statistics.num_accepted
                first.close()
        result = client.result
    assert result.token_ids == ar(temperature)[0]
    assert result.counters.num_opened == 2
    assert result.statistics.num_accepted > before > 0


def test_states_follow_a_session_that_changes_its_mode(
    server: RpcServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them for some tokens, a head goes on with all of them."""
    accepted: list[int] = []

    def mode(tokens: int, seconds: float) -> Mode:
        accepted.append(client.result.statistics.num_accepted)
        return Mode.AR if 2 <= len(accepted) < 5 else Mode.DEVICE

    with device("eagle", server.address) as client:
        monkeypatch.setattr(client._ladder, "observe", mode)
        result = generate(client, 0, 0.0)
    assert result.token_ids == ar(0.0)[0]
    assert accepted[1] < accepted[-1]
    assert accepted[2] == accepted[4]  # the server decoded without drafts
    assert result.counters.num_opened >= 2


# --- without a server ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_moa_goes_on_alone_and_its_text_is_verified_later(
    server: RpcServer, temperature: float
) -> None:
    """From the last states that it received, to the end; then AR's tokens, whatever it wrote."""
    alone: list[list[int]] = []

    def note(ids: Sequence[int]) -> None:
        alone.append(list(ids))
        if len(client.result.token_ids) + len(ids) >= 32 - 2:  # as far as it can go
            netem.refuse(False)

    with (
        Netem(server.address, Link(rtt=0.01)) as netem,
        device("moa", netem.address, offline_ok=True, on_unverified=note) as client,
    ):
        rounds = client.generate(prompts()[0], params_of(temperature))
        while not next(rounds).num_accepted:
            pass
        netem.refuse()
        for _ in rounds:
            pass
        result = client.result
    assert result.token_ids == ar(temperature)[0]
    assert not result.unverified_ids
    assert max(map(len, alone)) > 16  # more than the tree that was under way
    # What it wrote alone are the rounds ahead that the server verified first.
    assert result.counters.sent_ahead > 0


def test_only_heads_that_draft_on_go_on_alone(server: RpcServer) -> None:
    for method, goes_on in (("moa", True), ("eagle", False), ("medusa", False)):
        with device(method, server.address, offline_ok=True) as client:
            assert (client.target.ahead.draft is not None) == goes_on
            assert not client.target.goes_ahead  # while a server answers, nothing leaves ahead
            result = generate(client, 0, 0.0)
        assert result.token_ids == ar(0.0)[0]
        assert result.counters.sent_ahead == 0


def test_chains_of_moa_do_not_leave_ahead_while_a_server_answers(server: RpcServer) -> None:
    with DeviceClient(
        [server.address], {"moa": head_of("moa")},
        speculation=SpeculationConfig(method="moa", length="fixed", shape="chain"),
        modes=(Mode.DEVICE,),
        offline_ok=True,
    ) as client:  # fmt: skip
        result = generate(client, 0, 0.0)
    assert result.token_ids == ar(0.0)[0]
    assert result.counters.sent_ahead == 0


# --- the wire ------------------------------------------------------------------------------------


LAYOUT = common_pb2.StatesLayout(
    need="layer_states", layers=[20, 3], hidden_size=SIZE, encoding="float32"
)


def opened(stub: Any, layout: common_pb2.StatesLayout | None = LAYOUT) -> verify_pb2.OpenResult:
    request = verify_pb2.OpenRequest(token_ids=prompts()[1], states=layout)
    request.sampling.max_tokens = 16
    request.sampling.ignore_eos = True
    return stub.Open(request)  # type: ignore[no-any-return]


def verify(
    stub: Any, session: verify_pb2.OpenResult, number: int, base: int, **more: Any
) -> verify_pb2.VerifyResult:
    request = verify_pb2.VerifyRequest(
        session_id=session.session_id, epoch=1, round=number, base_length=base, **more
    )
    return stub.Verify(request, timeout=20)  # type: ignore[no-any-return]


@pytest.fixture
def stub(server: RpcServer) -> Iterator[Any]:
    with grpc.insecure_channel(server.address) as channel:
        yield verify_pb2_grpc.VerifyServiceStub(channel)


def test_answers_have_the_states_of_what_is_committed(stub: Any) -> None:
    """Also where a draft is accepted in part: never of a rejected token, and exactly as computed
    for the text alone."""
    true, length = ar(0.0)[1], len(prompts()[1])
    session = opened(stub)
    wrong = (true[3] + 1) % demo().vocab_size
    draft = {"token_ids": [*true[:3], wrong, wrong]}
    answer = verify(stub, session, 1, length, states_from=0, **draft)
    assert answer.committed_length == length + 4
    codec = StatesCodec.of_message(answer.states.layout, "states")
    assert answer.states.num_positions == length + 3
    assert verify(stub, session, 1, length, states_from=0, **draft) == answer  # once more
    got = codec.decode(answer.states.rows, answer.states.num_positions)
    later = verify(stub, session, 2, length + 4, states_from=length + 3)
    assert (later.states.first_position, later.states.num_positions) == (length + 3, 1)
    assert not verify(stub, session, 3, later.committed_length).HasField("states")
    stub.Close(verify_pb2.CloseRequest(session_id=session.session_id, epoch=1))
    text = np.asarray([*prompts()[1], *true[:4]], np.int64)
    sequence = demo().new_sequence()
    computed = demo().forward([Segment(sequence, text)], frozenset({Need.LAYER_STATES}))
    demo().free(sequence)
    expected = computed.extras[Need.LAYER_STATES][:, [19, 2]].flatten(1)
    rows = torch.cat([torch.from_numpy(got), torch.from_numpy(
        codec.decode(later.states.rows, 1)
    )])  # fmt: skip
    assert torch.equal(rows, expected)


def test_sessions_without_states_get_none(stub: Any) -> None:
    request = verify_pb2.OpenRequest(token_ids=prompts()[1])
    session = stub.Open(request)
    answer = verify(stub, session, 1, len(prompts()[1]), states_from=0)
    assert not answer.HasField("states")
    stub.Close(verify_pb2.CloseRequest(session_id=session.session_id, epoch=1))


def test_of_a_long_prompt_the_latest_states_come(
    server: RpcServer, stub: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states_module, "PIECE_BYTES", 3 * 2 * SIZE * 4)
    length = len(prompts()[1])
    session = opened(stub)
    states = verify(stub, session, 1, length, states_from=0).states
    assert (states.first_position, states.num_positions) == (length - 3, 3)
    stub.Close(verify_pb2.CloseRequest(session_id=session.session_id, epoch=1))
    with device("eagle", server.address) as client:
        assert generate(client, 1, 0.0).token_ids == ar(0.0)[1]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"hidden_size": 96}, "states.hidden_size"),
        ({"hidden_size": 2**32 - 1}, "states.hidden_size"),
        ({"layers": [21]}, "states.layers"),
        ({"layers": [0]}, "states.layers"),
        ({"layers": []}, "states.layers"),
        ({"layers": [1] * 21}, "states.layers"),
        ({"layers": [1] * 7000}, "states.layers"),
        ({"layers": [1] * 1000, "hidden_size": 2000}, "states.hidden_size"),
        ({"need": "tree_logits"}, "states.need"),
        ({"encoding": "gzip"}, "states.encoding"),
    ],
)
def test_wrong_wishes_are_refused_by_name(stub: Any, changes: Any, field: str) -> None:
    values = {
        "need": "layer_states", "layers": [1], "hidden_size": SIZE, "encoding": "int8", **changes,
    }  # fmt: skip
    with pytest.raises(grpc.RpcError) as caught:
        opened(stub, common_pb2.StatesLayout(**values))
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidArgument)
    assert error.field == field


def test_a_server_that_sends_nonsense_is_refused_by_name() -> None:
    codec = StatesCodec(StatesLayout(Need.HIDDEN_STATES, (), 8), "float32")
    inbox = StatesInbox(codec)
    wrong = common_pb2.States(layout=codec.to_message(), num_positions=2, rows=bytes(65))
    with pytest.raises(InvalidArgument, match=r"states\.rows"):
        inbox.take(wrong, 5)
    with pytest.raises(InvalidArgument, match=r"states\.num_positions"):
        inbox.take(wrong, 2)


def test_a_gap_makes_the_head_begin_anew() -> None:
    class Reading:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def open(self, session: Any) -> None:
            self.calls.append("open")

        def close(self, session: Any) -> None:
            self.calls.append("close")

        def read_states(self, session: Any, states: torch.Tensor) -> None:
            self.calls.append(states[:, 0].tolist())

    class Seen:
        length = 3

    codec = StatesCodec(StatesLayout(Need.HIDDEN_STATES, (), 2), "float32")

    def message(first: int, *values: float) -> common_pb2.States:
        rows = codec.encode(torch.tensor([[each, each] for each in values]))
        return common_pb2.States(
            layout=codec.to_message(), first_position=first, num_positions=len(values), rows=rows
        )

    inbox, head, session = StatesInbox(codec), cast(Any, Reading()), cast(Any, Seen())
    assert not inbox.read_by(head, session)
    inbox.take(message(0, 1.0, 2.0), 3)
    assert inbox.read_by(head, session)
    session.length = 5
    inbox.take(message(2, 3.0), 5)
    assert not inbox.read_by(head, session)  # one is missing for a draft
    inbox.take(message(3, 4.0), 5)
    assert inbox.read_by(head, session)
    session.length = 9
    inbox.take(message(6, 7.0, 8.0), 9)
    assert inbox.read_by(head, session)
    assert head.calls == [[1.0, 2.0], [3.0], [4.0], "close", "open", [7.0, 8.0]]
    # Rounds that left together bring states again.
    session.length = 11
    inbox.take(message(6, 7.0, 8.0, 9.0), 11)
    inbox.take(message(7, 8.0, 9.0), 11)
    inbox.take(message(6, 7.0, 8.0, 9.0, 10.0), 11)
    assert inbox.read_by(head, session)
    assert head.calls[6:] == [[9.0], [10.0]]
