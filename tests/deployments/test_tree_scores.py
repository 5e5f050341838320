"""Many prompts of one request that are only scored: one tree, and the answer of one at a time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.config import SpeculationConfig
from paceline.deployments.openai.answers import CompletionAnswer
from paceline.deployments.openai.schema import CompletionRequest
from paceline.engine import Engine, EngineThread
from paceline.loading import load_engine
from paceline.rpc.access import Gate
from paceline.rpc.gen.paceline.v1 import generate_pb2
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.tenants import Tenants
from tests.deployments.http_serving import http_serving
from tests.deployments.test_vllm_keys import ask

MODEL = ModelInfo(name="demo", default_speculation=SpeculationConfig())
CONTEXTS = ("Question: What is the capital of France?\nAnswer:", "def add(a, b):\n    return", "é")
KINDS: dict[str, dict[str, Any]] = {
    "echo": {"echo": True, "logprobs": 2, "temperature": 0},
    "lm_eval": {"echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 1, "seed": 1234},
    "ids": {"echo": True, "logprobs": 0, "return_tokens_as_token_ids": True, "temperature": 0},
    "vllm": {"prompt_logprobs": 1, "temperature": 0},
    "sampled": {"echo": True, "logprobs": 1, "temperature": 1.0, "seed": 5, "max_tokens": 1},
}


@pytest.fixture(scope="module")
def target(demo: Engine) -> Iterator[EngineThread]:
    thread = EngineThread(demo.sibling()).start()
    yield thread
    thread.stop()


@pytest.fixture(scope="module")
def url(target: EngineThread) -> Iterator[str]:
    with http_serving(target, MODEL) as url:
        yield url


@contextmanager
def forwards(target: EngineThread) -> Iterator[list[int]]:
    """The rows of each of the target's forwards."""
    runner, rows = target.engine.local_target.runner, []
    forward = runner.forward

    def counting(segments: Any, *rest: Any) -> Any:
        rows.append(sum(segment.num_rows for segment in segments))
        return forward(segments, *rest)

    runner.forward = counting  # type: ignore[method-assign]
    try:
        yield rows
    finally:
        del runner.forward  # type: ignore[method-assign]


def prompts_of(target: EngineThread, context: str) -> list[list[int]]:
    """Continuations of a context: equal ones, nested ones, none, and halves of a character."""
    tokenizer = target.engine.tokenizer
    assert tokenizer is not None
    begin = tokenizer.encode(context)
    snowmen = tokenizer.encode(" ☃☃", False)
    words = [tokenizer.encode(text, False) for text in (" Paris", " Paris, of course", " a + b")]
    rests = [*words, words[0], [], snowmen, snowmen[:2], snowmen[:-1]]
    return [begin + rest for rest in rests]


def score(url: str, prompts: Any, **more: Any) -> Any:
    body = {"model": "demo", "max_tokens": 0, "return_token_ids": True, "prompt": prompts, **more}
    status, answer, _ = ask(url, "/v1/completions", body)
    assert status == 200, answer
    return answer


def check(url: str, prompts: list[list[int]], **more: Any) -> Any:
    """The answer for all prompts, which is that of one at a time."""
    whole = score(url, prompts, **more)
    assert [choice["index"] for choice in whole["choices"]] == [*range(len(prompts))]
    usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 0)
    for prompt, choice in zip(prompts, whole["choices"], strict=True):
        alone = score(url, [prompt], **more)
        assert {**choice, "index": 0} == alone["choices"][0]
        assert whole["numerics"] == alone["numerics"]
        for name in usage:
            usage[name] += alone["usage"][name]
    assert {name: whole["usage"][name] for name in usage} == usage
    return whole


@pytest.mark.parametrize("kind", KINDS)
def test_the_answer_is_that_of_one_at_a_time(url: str, target: EngineThread, kind: str) -> None:
    for context in CONTEXTS:
        prompts = prompts_of(target, context)
        random.Random(1).shuffle(prompts)
        with forwards(target) as rows:
            score(url, prompts, **KINDS[kind])
        nodes = {tuple(each[:i]) for each in prompts for i in range(1, len(each) + 1)}
        assert rows == [len(nodes)]  # one forward, and no token twice
        whole = check(url, prompts, **KINDS[kind])
        assert whole["metrics"]["prompt_scores"] == {
            "num_positions": len(nodes), "num_target_forwards": 1
        }  # fmt: skip


def test_prompts_that_share_nothing(url: str, target: EngineThread) -> None:
    prompts = [each for context in CONTEXTS for each in prompts_of(target, context)]
    random.Random(2).shuffle(prompts)
    whole = check(url, prompts, **KINDS["echo"])
    nodes = {tuple(each[:i]) for each in prompts for i in range(1, len(each) + 1)}
    assert len(nodes) <= whole["metrics"]["prompt_scores"]["num_positions"] < 1.3 * len(nodes)


def test_one_at_a_time_where_each_prompt_needs_its_own(url: str, target: EngineThread) -> None:
    """What a tree cannot give goes on as it was."""
    prompts = prompts_of(target, CONTEXTS[0])[:3]
    for more in (
        {"max_tokens": 3, **KINDS["vllm"]}, {"n": 2, **KINDS["vllm"]}, {"temperature": 0},
        {"speculation": {"method": "ar"}, **KINDS["vllm"]},
        {"guided_regex": "[a-z]", "max_tokens": 1, **KINDS["vllm"]},
    ):  # fmt: skip
        with forwards(target) as rows:
            score(url, prompts, **more)
        assert len(rows) > 1
    single = score(url, prompts[:1], **KINDS["echo"])
    assert single["metrics"]["prompt_scores"] == {
        "num_positions": len(prompts[0]), "num_target_forwards": 2
    }  # fmt: skip


def test_what_is_wrong_is_named_as_alone(url: str, target: EngineThread) -> None:
    prompts = prompts_of(target, CONTEXTS[0])
    size, context = target.engine.target.vocab_size, target.engine.target.context_length
    begin = prompts[0]
    for wrong in ([size], [*begin, size], [*begin, -1], [*begin, *[1] * context], [*begin, 2**40]):
        bodies = [
            ask(url, "/v1/completions", {
                "model": "demo", "max_tokens": 0, "prompt": given, **KINDS["echo"]
            })
            for given in ([*prompts, wrong], [wrong])
        ]  # fmt: skip
        (status, told, _), (alone_status, alone, _) = bodies
        assert (status, told) == (alone_status, alone)
        assert status == 400
        assert told["error"]["param"].partition("[")[0] == "prompt"


def test_little_memory_takes_several_trees() -> None:
    thread = EngineThread(load_engine(kv_tokens=48)).start()
    try:
        with http_serving(thread, MODEL) as url:
            prompts = prompts_of(thread, CONTEXTS[0])
            check(url, [*prompts, *([*each[:-1], 5, 6, 7] for each in prompts)], **KINDS["echo"])
    finally:
        thread.stop()


def test_quotas_of_tenants(target: EngineThread, tmp_path: Path) -> None:
    tenants = {
        "alice": {"token": "alice-" * 4, "quotas": {"max_sessions": 1, "tokens_per_minute": 60}},
        "bob": {"token": "bob-" * 6},
    }
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    gate = Gate(tenants=Tenants(tmp_path / "tenants.yaml"))
    prompts = prompts_of(target, CONTEXTS[0])
    body = {"model": "demo", "prompt": prompts, **KINDS["lm_eval"]}
    with http_serving(target, MODEL, gate=gate) as url:

        def as_tenant(name: str) -> tuple[int, Any, Any]:
            return ask(url, "/v1/completions", body, Authorization=f"Bearer {name}")

        status, answer, _ = as_tenant("alice-" * 4)  # one session, although there are 8 prompts
        assert status == 200
        computed = answer["metrics"]["prompt_scores"]["num_positions"] + len(prompts)
        assert answer["usage"]["total_tokens"] > 60 > computed > 30
        assert gate.usage()["alice"][2] == computed
        assert as_tenant("alice-" * 4)[0] == 200
        status, answer, headers = as_tenant("alice-" * 4)
        assert status == 429
        assert "tokens_per_minute" in answer["error"]["message"]
        assert int(headers["retry-after"]) >= 1
        assert as_tenant("bob-" * 6)[0] == 200
        assert gate.usage()["bob"][2] == computed


async def test_what_a_lost_target_told_is_void() -> None:
    """Its part of the scores does not stay beside those of the next one."""
    model = generate_pb2.Model(name="demo", vocab_size=99, context_length=99)
    model.limits.kv_capacity = 99
    body = CompletionRequest(
        model="demo", prompt=[[1, 2, 3], [1, 2, 4]], max_tokens=0, echo=True, logprobs=0
    )
    answer = CompletionAnswer(body, model)
    await answer.prepare(lambda token_ids: pytest.fail("the text comes with the scores"))
    (message,) = answer.messages
    assert list(message.token_ids.token_ids) == [1, 2]
    assert [list(each.token_ids) for each in message.continuations] == [[3], [4]]

    def part(value: float) -> generate_pb2.GenerateReply:
        return generate_pb2.GenerateReply(
            prompt_logprobs=[{"logprob": value, "token_id": 3}], finish_reason="length",
            token_ids=[5], prompt_length=3, statistics={"num_tokens": 1},
        )  # fmt: skip

    def reply(**fields: Any) -> generate_pb2.GenerateReply:
        return generate_pb2.GenerateReply(**fields)

    begin = [{"token_id": 1}, {"logprob": -0.5, "token_id": 2}]
    answer.add(0, reply(fingerprint="a", prompt_logprobs=begin))
    answer.add(0, reply(continuations=[{"index": 0, "reply": part(-1.0)}]))
    answer.add(0, reply(fingerprint="b", prompt_logprobs=begin))
    answer.add(0, reply(continuations=[{"index": i, "reply": part(-2.0 - i)} for i in (0, 1)]))
    assert not any(choice.token_ids for choice in answer.choices)
    answer.add(0, reply(finish_reason="length", num_positions=4))
    whole = answer.result()
    assert [choice["logprobs"]["token_logprobs"] for choice in whole["choices"]] == [
        [None, -0.5, -2.0], [None, -0.5, -3.0]
    ]  # fmt: skip
    assert whole["numerics"]["fingerprints"] == ["b"]
