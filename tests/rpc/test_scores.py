"""Scores of continuations over gRPC: those of one prompt at a time, and what they cost."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest
import yaml

from paceline.config import SpeculationConfig
from paceline.engine import EngineThread
from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.rpc import generate_replies
from paceline.rpc.access import Gate
from paceline.rpc.client import AsyncClient, Client, ContinuationScores, Round, Scores
from paceline.rpc.gen.paceline.v1 import generate_pb2
from paceline.rpc.server import RpcServer
from paceline.rpc.tenants import Tenants
from paceline.sampling import SamplingParams, TokenLogprobs
from paceline.session import SessionStatistics
from paceline.tokenizer import Tokenizer
from tests.rpc.serving import serving

PROMPT = list("naïve façade: ".encode())
VOCABULARY = 256
AR = SpeculationConfig(method="ar")
PARAMS = {
    "greedy": SamplingParams(prompt_logprobs=2, logprobs=1, max_tokens=1),
    "sampled": SamplingParams(temperature=1.0, seed=3, max_tokens=1, stop_token_ids=(7,)),
}
ALICE, BOB = "alice-" * 5, "bob-bob-" * 4


def continuations(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    words = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))] for _ in range(4)]
    found = [[*chain(*rng.choices(words, k=rng.randint(1, 3)))] for _ in range(8)]
    return [*found, [], list(found[0]), found[1][:-1], found[2] + [9]]


def check(
    client: Client,
    scores: Scores,
    given: Sequence[list[int]],
    params: SamplingParams,
    prompt: list[int] = PROMPT,
) -> None:
    """Compare with a request for each continuation."""
    assert len(scores.continuations) == len(given)
    alone = replace(params, prompt_logprobs=params.prompt_logprobs or 0)
    for each, told in zip(given, scores.continuations, strict=True):
        done = client.complete([*prompt, *each], alone, AR)
        entries = [entry for r in done.rounds for entry in r.prompt_logprobs]
        assert list(told.logprobs) == entries[len(prompt) :]
        if params.prompt_logprobs is not None:
            assert list(scores.prompt_logprobs) == entries[: len(prompt)]
        after = told.after
        assert (after.token_ids, after.text) == (done.token_ids, done.text)
        assert after.finish_reason == done.finish_reason
        assert after.logprobs == done.last.logprobs
        assert after.prompt_length == len(prompt) + len(each)
        assert told.logprob == sum(entry.logprob or 0.0 for entry in told.logprobs)
        assert told.is_greedy == all(entry.rank == 1 for entry in told.logprobs)


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("a_reply", [512, 3])
def test_scores_are_those_of_one_at_a_time(
    server: RpcServer, name: str, a_reply: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate_replies, "_LOGPROBS_A_REPLY", a_reply)
    params = PARAMS[name]
    with Client(server.address) as client:
        for seed in range(3):
            given = continuations(seed)
            scores = client.score(PROMPT, given, params)
            check(client, scores, given, params)
            nodes = {tuple(each[:i]) for each in given for i in range(1, len(each) + 1)}
            assert scores.num_positions == len(PROMPT) + len(nodes)
            assert scores.statistics.num_prefill_forwards == 1
            assert scores.statistics.num_target_forwards == 0
            assert scores.fingerprint


async def test_text_prompts_and_the_asyncio_client(server: RpcServer, tokenizer: Tokenizer) -> None:
    given, text = continuations(5), "naïve façade: ☃"
    with Client(server.address) as client:
        expected = client.score(text, given)
        check(client, expected, given, SamplingParams(max_tokens=1), tokenizer.encode(text))
    async with AsyncClient(server.address) as client:
        scores = await client.score(text, given)
    assert [told.logprobs for told in scores.continuations] == [
        told.logprobs for told in expected.continuations
    ]


def test_what_is_wrong_is_named(server: RpcServer) -> None:
    with Client(server.address) as client:
        for given, params, field in (
            ([], None, "continuations"),
            ([[1], [2, 9999]], None, "continuations[1][1]"),
            ([[1], [2, 2**40]], None, "continuations[1].token_ids"),
            ([[1]] * 257, None, "continuations"),
            ([[1] * 500], None, "continuations[0]"),
            ([[1]], SamplingParams(grammar="start: /a/"), "grammar"),
        ):
            with pytest.raises(InvalidArgument) as caught:
                client.score(PROMPT, given, params)
            assert caught.value.field.removeprefix("sampling.") == field, caught.value
        request = client._scoring(PROMPT, [[1]], None, None)._whole._request
        message = generate_pb2.GenerateRequest.FromString(request)
        for change, field in (
            ({"speculation": {"method": "ar"}}, "speculation"),
            ({"prediction_text": "x"}, "prediction"),
            ({"committed_token_ids": [4]}, "committed_token_ids"),
            ({"sampling": {"max_tokens": 5}}, "max_tokens"),
        ):
            wrong = generate_pb2.GenerateRequest(**change)
            other = generate_pb2.GenerateRequest()
            other.CopyFrom(message)
            other.MergeFrom(wrong)
            call = client._generation(client._start_generation, other, None, 0.0)
            with pytest.raises(InvalidArgument) as caught:
                list(call)
            assert caught.value.field.removeprefix("sampling.") == field


def test_quotas_count_what_is_computed(engine: EngineThread, tmp_path: Path) -> None:
    """Shared beginnings once; of one tenant and not of the others."""
    given = continuations(1)
    tenants = {
        "alice": {"token": ALICE, "quotas": {"tokens_per_minute": 80}},
        "bob": {"token": BOB},
    }
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    gate = Gate(tenants=Tenants(tmp_path / "tenants.yaml"))
    with (
        serving(engine=engine, gate=gate) as running,
        Client(running.address, token=ALICE) as alice,
        Client(running.address, token=BOB) as bob,
    ):
        one = alice.score(PROMPT, given).num_positions + len(given)
        assert one < 80 < 2 * one
        assert sum(len(PROMPT) + len(each) for each in given) > 2 * one  # one at a time
        alice.score(PROMPT, given)
        with pytest.raises(ResourceExhausted, match="tokens_per_minute"):
            alice.score(PROMPT, given)
        assert gate.usage()["alice"][2] == 2 * one
        scores = bob.score(PROMPT, given)
        assert gate.usage()["bob"][2] == scores.num_positions + len(given)
        with pytest.raises(InvalidArgument):
            bob.score(PROMPT, [*given, [9999]])
        assert gate.usage()["bob"][2] == scores.num_positions + len(given)  # it costs nothing


def test_a_lost_servers_part_is_void() -> None:
    def told(value: float) -> Round:
        entry = TokenLogprobs(1, value)
        return Round(
            round=1, token_ids=(2,), num_accepted=0, text="", prompt_logprobs=(entry,),
            finish_reason="length",
        )  # fmt: skip

    def part(fingerprint: str = "", **more: object) -> Round:
        return Round(  # type: ignore[arg-type]
            round=0, token_ids=(), num_accepted=0, text="", fingerprint=fingerprint, **more
        )

    statistics = SessionStatistics()
    scores = Scores.of([
        part("a", continuations=((0, told(-1.0)),)),
        part("b", continuations=((0, told(-2.0)), (1, told(-3.0)))),
        part(statistics=statistics, num_positions=5),
    ])  # fmt: skip
    assert [each.logprob for each in scores.continuations] == [-2.0, -3.0]
    assert isinstance(scores.continuations[0], ContinuationScores)
    assert (scores.fingerprint, scores.num_positions) == ("b", 5)
