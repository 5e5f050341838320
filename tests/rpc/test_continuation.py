"""A generation that continues elsewhere: the same tokens, text and counts as an unbroken one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest

from benchmarks.netem import Netem
from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.rpc.client import AsyncClient, Client, Completion, Round
from paceline.rpc.continuation import Continuation
from paceline.rpc.errors import Cancelled, ServerUnavailable
from paceline.rpc.gen.paceline.v1 import generate_pb2
from paceline.rpc.messages import sampling_to_message, speculation_to_message
from paceline.rpc.server import RpcServer
from paceline.sampling import SamplingParams

PROMPT = list(b"def fibonacci(n):\n    ")
CASES = {
    "greedy": SamplingParams(max_tokens=40),
    "sampled": SamplingParams(max_tokens=40, temperature=1.0, seed=5, logprobs=2),
    "penalties": SamplingParams(
        max_tokens=40, temperature=0.8, seed=6, frequency_penalty=0.7, repetition_penalty=1.3
    ),
    "constraint": SamplingParams(max_tokens=40, temperature=1.0, seed=7, regex="[a-f ]{30,60}!"),
    "limits": SamplingParams(
        max_tokens=40,
        temperature=1.0,
        seed=8,
        min_tokens=20,
        stop_token_ids=tuple(range(97, 110)),
        allowed_token_ids=tuple(range(32, 127)),
        include_stop_str_in_output=True,
        prompt_logprobs=1,
    ),
}
METHODS = ("ar", "draft_model", "draft_model_tree", "prompt_lookup")


def whole(client: Client, params: SamplingParams, method: str) -> Completion:
    return client.complete(PROMPT, params, SpeculationConfig(method=method))


def rest(
    client: Client, params: SamplingParams, method: str, committed: tuple[int, ...]
) -> list[generate_pb2.GenerateReply]:
    """What comes after committed tokens."""
    request = generate_pb2.GenerateRequest(
        sampling=sampling_to_message(params),
        speculation=speculation_to_message(SpeculationConfig(method=method)),
        committed_token_ids=committed,
        return_draft=True,
    )
    request.token_ids.token_ids.extend(PROMPT)
    return list(client._generate.Generate(request))


@pytest.mark.parametrize("params", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("method", METHODS)
def test_it_is_cut_anywhere(server: RpcServer, method: str, params: SamplingParams) -> None:
    with Client(server.address, timeout=30) as client:
        expected = whole(client, params, method)
        count = len(expected.token_ids)
        for cut in (1, count // 2, count - 1):
            replies = rest(client, params, method, expected.token_ids[:cut])
            assert expected.token_ids[cut:] == tuple(t for r in replies for t in r.token_ids)
            assert expected.text.endswith("".join(r.text for r in replies))
            assert replies[-1].finish_reason == expected.finish_reason
            assert replies[-1].statistics.num_tokens == count - cut
            assert replies[-1].prompt_length == len(PROMPT)
            texts = "".join(text for r in replies for text in r.draft.committed_texts)
            assert expected.text.endswith(texts)


def test_a_stop_string_may_begin_before_the_cut(server: RpcServer) -> None:
    """Text that was held back because it might begin a stop string is not lost."""
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=8)
    with Client(server.address, timeout=30) as client:
        text = whole(client, params, "ar").text
        stopped = SamplingParams(
            max_tokens=60, temperature=1.0, seed=8, stop=(text[20:24], text[30:32] + "\0")
        )
        expected = whole(client, stopped, "ar")
        assert expected.finish_reason == "stop"
        for cut in range(1, len(expected.token_ids)):
            before = "".join(r.text for r in expected.rounds[:cut])  # AR: a token each
            replies = rest(client, stopped, "ar", expected.token_ids[:cut])
            assert before + "".join(r.text for r in replies) == expected.text
            assert replies[-1].finish_reason == "stop"


def test_what_has_ended_does_not_go_on(server: RpcServer) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    with Client(server.address, timeout=30) as client:
        done = whole(client, params, "ar")
        for committed in (done.token_ids, (*done.token_ids, 1)):
            with pytest.raises(Exception, match=r"committed_token_ids.*it ends: length"):
                rest(client, params, "ar", committed)
        with pytest.raises(Exception, match=r"committed_token_ids\[0\].*99999"):
            rest(client, params, "ar", (99_999,))


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_client_goes_on_where_it_was(server: RpcServer, kind: str) -> None:
    """The connection breaks four times; rounds and statistics count from the beginning."""
    params = SamplingParams(max_tokens=200, temperature=1.0, seed=9, ignore_eos=True)
    ar = SpeculationConfig(method="ar")
    with Client(server.address, timeout=30) as client:
        expected = client.complete(PROMPT, params, ar)
    breaks = {20, 21, 90, 150}
    with Netem(server.address) as netem:

        async def go_on() -> Completion:
            async with AsyncClient(netem.address, timeout=30, resume_s=10) as client:
                rounds = []
                async for item in client.generate(PROMPT, params, ar):
                    rounds.append(item)
                    if len(rounds) in breaks:
                        netem.reset()
                return Completion.of(rounds)

        if kind == "asyncio":
            done = asyncio.run(go_on())
        else:
            with Client(netem.address, timeout=30, resume_s=10) as client:
                rounds = []
                for item in client.generate(PROMPT, params, ar):
                    rounds.append(item)
                    if len(rounds) in breaks:
                        netem.reset()
                done = Completion.of(rounds)
    assert done.token_ids == expected.token_ids
    assert done.text == expected.text
    assert [r.round for r in done.rounds] == list(range(1, len(done.rounds) + 1))
    assert done.statistics.num_tokens == done.statistics.num_rounds == 200


class _Unavailable(grpc.RpcError):
    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "the connection broke"

    def trailing_metadata(self) -> tuple[()]:
        return ()


class _LostAtTheEnd:
    """A call whose status never comes, although all of its replies did."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self.cancel = call.cancel

    def __iter__(self) -> Iterator[generate_pb2.GenerateReply]:
        yield from self._call
        raise _Unavailable

    async def __aiter__(self) -> AsyncIterator[generate_pb2.GenerateReply]:
        async for reply in self._call:
            yield reply
        raise _Unavailable


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_call_that_is_lost_after_its_last_reply_has_ended(server: RpcServer, kind: str) -> None:
    """All tokens are there: no server is asked for more of them, which it would refuse."""
    params = SamplingParams(max_tokens=20, ignore_eos=True)

    async def complete() -> list[Round]:
        async with AsyncClient(server.address, timeout=30, resume_s=10) as client:
            generation = client.generate(PROMPT, params)
            generation._call = _LostAtTheEnd(generation._call)
            return [item async for item in generation]

    with Client(server.address, timeout=30, resume_s=10) as client:
        if kind == "asyncio":
            rounds = asyncio.run(complete())
        else:
            generation = client.generate(PROMPT, params)
            generation._call = _LostAtTheEnd(generation._call)
            rounds = list(generation)
        assert Completion.of(rounds).token_ids == client.complete(PROMPT, params).token_ids


def test_the_search_for_a_server_ends(server: RpcServer) -> None:
    params = SamplingParams(max_tokens=400, ignore_eos=True)
    with Netem(server.address) as netem, Client(netem.address, resume_s=1.0) as client:
        rounds = iter(client.generate(PROMPT, params))
        next(rounds)
        netem.refuse()
        with pytest.raises(ServerUnavailable):
            list(rounds)


def test_what_is_worth_another_try() -> None:
    lost, full = ServerUnavailable("gone"), ResourceExhausted("full", retry_after_s=1.0)
    assert Continuation(b"").may_go_on(lost, 5)
    assert Continuation(b"").may_go_on(Cancelled("stopping"), 5)
    assert not Continuation(b"").may_go_on(full, 5)  # refused: the caller decides
    assert not Continuation(b"").may_go_on(InvalidArgument("a", 1, "2"), 5)
    assert not Continuation(b"").may_go_on(lost, 0)
    assert not Continuation(b"", timeout_s=0.0).may_go_on(lost, 5)
    resumed = Continuation(b"")
    assert resumed.may_go_on(lost, 5)
    assert resumed.may_go_on(full, 5)
    assert not resumed.may_go_on(ResourceExhausted("never fits", retry_after_s=0), 5)
