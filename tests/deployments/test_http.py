"""OpenAI's API with OpenAI's own client, over a target in this process."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import socket
import ssl
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from transformers.utils.chat_template_utils import render_jinja_template

from paceline.chat import DEFAULT_TEMPLATE, render_chat
from paceline.cluster.certs import make_certificates
from paceline.config import SpeculationConfig
from paceline.deployments.openai.answers import speculative_decoding
from paceline.deployments.openai.schema import ChatRequest, CompletionRequest
from paceline.engine import Engine, EngineThread
from paceline.errors import InvalidArgument
from paceline.loading import load_engine
from paceline.numerics import Fingerprint
from paceline.rpc import access
from paceline.rpc.access import Gate, Limits
from paceline.rpc.gen.paceline.v1 import common_pb2
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.tenants import Tenants
from paceline.rpc.tls import ServerTls
from paceline.rpc.tracing import Tracing
from paceline.sampling import SamplingParams
from tests.deployments.conftest import PROMPTS, eventually
from tests.deployments.http_serving import http_serving

MODEL = ModelInfo(name="demo", default_speculation=SpeculationConfig())
AR = Callable[[Sequence[str], SamplingParams], list[tuple[int, ...]]]
LONG = {"max_tokens": 900, "temperature": 0, "extra_body": {"ignore_eos": True}}
IDS = {"return_token_ids": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def target(demo: Engine) -> Iterator[EngineThread]:
    """The demo pair, drafter and target in this process."""
    thread = EngineThread(demo.sibling()).start()
    yield thread
    thread.stop()


@pytest.fixture(scope="module")
def url(target: EngineThread) -> Iterator[str]:
    with http_serving(target, MODEL) as url:
        yield url


@pytest.fixture
def client(target: EngineThread, url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="unknown", max_retries=0) as client:
        yield client
    assert eventually(lambda: not target.engine.sessions), "sessions leaked"


def ids_of(choice: Any) -> tuple[int, ...]:
    return tuple(choice.token_ids)


# --- completions ----------------------------------------------------------------------------------


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("method", ["ar", "draft_model", "draft_model_tree", "prompt_lookup", None])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_equal_ar(
    client: openai.OpenAI, ar: AR, engine: Engine, method: str | None, temperature: float
) -> None:
    params = SamplingParams(max_tokens=32, ignore_eos=True, temperature=temperature, seed=7)
    speculation = {"speculation": {"method": method}} if method else {}
    answer = client.completions.create(
        model="demo", prompt=list(PROMPTS), max_tokens=32, temperature=temperature, seed=7,
        extra_body={**IDS, **speculation},
    )  # fmt: skip
    assert [ids_of(choice) for choice in answer.choices] == ar(PROMPTS, params)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    assert all(c.text == tokenizer.decode(ids_of(c)) for c in answer.choices)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * 32
    assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(p)) for p in PROMPTS)
    assert {choice.finish_reason for choice in answer.choices} == {"length"}


def test_a_stream_says_the_same(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "demo", "prompt": PROMPTS[1], "max_tokens": 40, "seed": 3, "n": 2,
        "extra_body": {**IDS, "speculation": {"method": "draft_model", "length": "fixed"}},
    }  # fmt: skip
    whole = client.completions.create(**request)
    chunks = list(
        client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert sum((ids_of(c) for c in mine), ()) == ids_of(choice)
        assert [c.finish_reason for c in mine if c.finish_reason] == [choice.finish_reason]
    assert len(chunks) > 4
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].metrics["speculative_decoding"]["num_spec_steps"] > 0  # type: ignore[attr-defined]


def test_asynchronous_clients(url: str, ar: AR) -> None:
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5)

    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        stream = await client.completions.create(
            model="demo", prompt=prompt, max_tokens=24, temperature=0.8, seed=5, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x") as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS))

    engine = load_engine()
    assert engine.tokenizer is not None
    expected = [engine.tokenizer.decode(ids) for ids in ar(PROMPTS, params)]
    assert asyncio.run(all_of_them()) == expected


def test_choices_have_seeds_of_their_own(client: openai.OpenAI, ar: AR) -> None:
    answer = client.completions.create(
        model="demo", prompt=PROMPTS[0], n=3, seed=11, max_tokens=16, extra_body=IDS
    )
    expected = [
        ar(PROMPTS[:1], SamplingParams(max_tokens=16, temperature=1, seed=s, ignore_eos=True))[0]
        for s in (11, 12, 13)
    ]
    assert [ids_of(choice) for choice in answer.choices] == expected
    unseeded = client.completions.create(model="demo", prompt=PROMPTS[0], n=2, max_tokens=16)
    assert len({choice.text for choice in unseeded.choices}) == 2


def test_prompts_as_token_ids(client: openai.OpenAI, engine: Engine) -> None:
    assert engine.tokenizer is not None
    ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    request = {"model": "demo", "max_tokens": 8, "temperature": 0}
    texts = client.completions.create(prompt=list(PROMPTS), **request)  # type: ignore[call-overload]
    several = client.completions.create(prompt=ids, **request)  # type: ignore[call-overload]
    assert [c.text for c in several.choices] == [c.text for c in texts.choices]
    single = client.completions.create(prompt=ids[0], **request)  # type: ignore[call-overload]
    assert [c.text for c in single.choices] == [texts.choices[0].text]


def test_stop_and_bias(client: openai.OpenAI, engine: Engine) -> None:
    request: dict[str, Any] = {"model": "demo", "prompt": PROMPTS[0], "temperature": 0}
    text = client.completions.create(**request, max_tokens=24).choices[0].text
    stop = text[10:14]
    answer = client.completions.create(**request, max_tokens=24, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert engine.tokenizer is not None
    banned = engine.tokenizer.encode(text)[0]
    biased = client.completions.create(
        **request, max_tokens=24, logit_bias={str(banned): -100}, extra_body=IDS
    )
    assert banned not in ids_of(biased.choices[0])


# --- chat -----------------------------------------------------------------------------------------

CHAT: Any = [
    {"role": "system", "content": "Write Python."},
    {
        "role": "user",
        "content": [{"type": "text", "text": "A stack"}, {"type": "text", "text": "!"}],
    },
]


def test_chat_without_a_template_of_the_model(client: openai.OpenAI, ar: AR) -> None:
    prompt = "System: Write Python.\nUser: A stack!\nAssistant:"
    params = SamplingParams(max_tokens=24, temperature=0)
    request: dict[str, Any] = {"model": "demo", "messages": CHAT, "temperature": 0}
    answer = client.chat.completions.create(
        **request, max_completion_tokens=24, extra_body={"return_token_ids": True}
    )
    assert ids_of(answer.choices[0]) == ar([prompt], params)[0]
    assert answer.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**request, max_tokens=24, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == answer.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks].count("length") == 1
    assert chunks[-1].choices[0].finish_reason == "length"


TEMPLATES = {
    "default": DEFAULT_TEMPLATE,
    "tags": "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "everything": """
    {%- for m in messages %}
        {%- if loop.first and m.role != 'system' %}{% continue %}{% endif %}
        {%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}
        {%- else %}{{ m | tojson }}{% endif %}
    {% endfor %}""",
}


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_templates_render_as_in_transformers(source: str) -> None:
    messages = [
        {"role": "system", "content": "<b>é</b>"},
        {"role": "user", "content": " hi\n"},
        {"role": "assistant", "content": "yes"},
    ]
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    (expected,), _ = render_jinja_template(
        conversations=[messages], chat_template=source, add_generation_prompt=True, **tokens
    )
    assert render_chat(source, messages, **tokens) == expected


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('users first') }}", "{{ messages.__class__.__mro__ }}", "{{ 1 / 0 }}"],
)
def test_a_template_that_refuses_is_bad_input(source: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        render_chat(source, [{"role": "system", "content": ""}])
    assert caught.value.field == "messages"


# --- speculation and metrics ----------------------------------------------------------------------


def test_metrics_are_what_aiperf_reads(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="demo", prompt=PROMPTS[1], max_tokens=48, temperature=0,
        extra_body={"speculation": {"num_speculative_tokens": 3, "length": "fixed"}},
    )  # fmt: skip
    metrics = answer.metrics["speculative_decoding"]  # type: ignore[attr-defined]
    histogram, steps = metrics["acceptance_histogram"], metrics["num_spec_steps"]
    accepted, drafted = metrics["num_accepted_draft_tokens"], metrics["num_draft_tokens"]
    assert metrics["num_spec_tokens"] == 3
    assert len(histogram) == 4
    assert all(type(count) is int for count in histogram)
    assert sum(histogram) == steps > 0
    assert sum(j * count for j, count in enumerate(histogram)) == accepted > 0
    assert metrics["mean_acceptance_length"] == 1 + accepted / steps
    assert metrics["draft_acceptance_rate"] == accepted / drafted
    plain = client.completions.create(
        model="demo", prompt="x", max_tokens=2, extra_body={"speculation": {"method": "ar"}}
    )
    assert plain.metrics == {"speculative_decoding": None}  # type: ignore[attr-defined]


def test_the_answer_names_its_numerics(client: openai.OpenAI) -> None:
    for extra in ({}, {"numerics_mismatch": "allow"}):
        answer = client.completions.create(
            model="demo", prompt="abc", max_tokens=4, n=2, extra_body=extra
        )
        numerics = answer.numerics  # type: ignore[attr-defined]
        (fingerprint,) = numerics["fingerprints"]
        assert str(Fingerprint.parse(fingerprint)) == fingerprint
        assert numerics["changed"] is False
    with pytest.raises(openai.BadRequestError, match="numerics_mismatch"):
        client.completions.create(
            model="demo", prompt="abc", extra_body={"numerics_mismatch": "perhaps"}
        )


def test_metrics_of_several_choices_add_up() -> None:
    one = common_pb2.Statistics(drafted_by_depth=[5, 4], accepted_by_depth=[3, 1])
    two = common_pb2.Statistics(drafted_by_depth=[2], accepted_by_depth=[1])
    assert speculative_decoding([one, two]) == {
        "mean_acceptance_length": 1 + 5 / 7,
        "draft_acceptance_rate": 5 / 11,
        "acceptance_histogram": [3, 3, 1],
        "num_spec_steps": 7,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 11,
        "num_spec_tokens": 2,
    }
    assert speculative_decoding([common_pb2.Statistics()])["acceptance_histogram"] == [0]


def test_predicted_outputs(client: openai.OpenAI, engine: Engine) -> None:
    request: dict[str, Any] = {
        "model": "demo",
        "messages": CHAT,
        "max_tokens": 60,
        "temperature": 0,
    }
    plain = client.chat.completions.create(**request)
    text = plain.choices[0].message.content or ""
    true = client.chat.completions.create(
        **request, prediction={"type": "content", "content": [{"type": "text", "text": text}]}
    )
    false = client.chat.completions.create(
        **request, prediction={"type": "content", "content": "Something else entirely."}
    )
    assert [a.choices[0].message.content for a in (true, false)] == [text, text]

    def counts(answer: Any) -> tuple[int, int]:
        details = answer.usage.completion_tokens_details
        return details.accepted_prediction_tokens, details.rejected_prediction_tokens

    assert engine.tokenizer is not None
    size = len(engine.tokenizer.encode(text))
    assert sum(counts(true)) == size
    assert counts(true)[0] > 0.9 * size
    assert counts(false)[0] == 0 < counts(false)[1]
    assert counts(plain) == (0, 0)
    # A busy machine makes "goodput" draft less; this one drafts all of the prediction.
    fixed = client.chat.completions.create(
        **request, prediction={"type": "content", "content": text},
        extra_body={"speculation": {"method": "predicted_outputs", "length": "fixed"}},
    )  # fmt: skip
    assert fixed.choices[0].message.content == text
    assert fixed.metrics["speculative_decoding"]["num_spec_steps"] < size / 4  # type: ignore[attr-defined]
    completion = client.completions.create(
        model="demo", prompt="x", max_tokens=4,
        extra_body={"prediction": {"type": "content", "content": "y"}},
    )  # fmt: skip
    assert completion.usage is not None
    assert completion.usage.completion_tokens_details is not None


# --- log-probabilities and constraints ------------------------------------------------------------


def test_log_probabilities(client: openai.OpenAI, target: EngineThread) -> None:
    request: dict[str, Any] = {"model": "demo", "max_tokens": 12, "temperature": 0}
    answer = client.completions.create(**request, prompt=PROMPTS[0], logprobs=3)
    told = answer.choices[0].logprobs
    assert told is not None
    assert told.tokens is not None
    assert told.top_logprobs is not None
    assert told.token_logprobs is not None
    assert "".join(told.tokens) == answer.choices[0].text
    assert told.text_offset == [len("".join(told.tokens[:i])) for i in range(12)]
    for token, logprob, top in zip(
        told.tokens, told.token_logprobs, told.top_logprobs, strict=True
    ):
        assert len(top) == 3
        assert max(top, key=lambda name: top[name]) == token  # greedy: the most likely one
        assert top[token] == logprob < 0
    chat = client.chat.completions.create(**request, messages=CHAT, logprobs=True, top_logprobs=2)
    content = chat.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert b"".join(bytes(entry.bytes or ()) for entry in content).decode() == (
        chat.choices[0].message.content
    )
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    chunks = list(
        client.chat.completions.create(
            **request, messages=CHAT, logprobs=True, top_logprobs=2, stream=True
        )
    )
    streamed = [e for c in chunks for e in (c.choices[0].logprobs or Empty).content or ()]
    assert streamed == content
    text = client.completions.create(
        **request, prompt=PROMPTS[0], logprobs=0, stream=True, extra_body={"n": 1}
    )
    offsets = [o for c in text for o in c.choices[0].logprobs.text_offset]  # type: ignore[union-attr]
    assert offsets == told.text_offset


class Empty:
    content = ()


def test_a_json_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "size": {"enum": [1, 2]}},
        "required": ["name", "size"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    }
    answers = [
        client.chat.completions.create(
            model="demo", messages=CHAT, seed=4, max_tokens=60,
            response_format={
                "type": "json_schema", "json_schema": {"name": "thing", "schema": schema},
            },
            extra_body={"speculation": {"method": method}},
        )
        for method in ("ar", "draft_model", "prompt_lookup")
    ]  # fmt: skip
    (text,) = {answer.choices[0].message.content for answer in answers}
    value = json.loads(text or "")
    assert set(value) == {"name", "size"}
    assert {answer.choices[0].finish_reason for answer in answers} == {"stop"}


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"structured_outputs": {"regex": "[a-c]{4}"}}, "[a-c]{4}"),
        ({"structured_outputs": {"choice": ["yes", 'the "no"', "é\n"]}}, '(yes|the "no"|é\n)'),
        ({"structured_outputs": {"grammar": 'start: "a" "b"~2..3'}}, "ab{2,3}"),
        (
            {"structured_outputs": {"json": {"const": [1, "x"]}}, "max_tokens": 90},
            r'\[\s*1\s*,\s*"x"\s*\]',
        ),
        ({"response_format": {"type": "json_object"}, "max_tokens": 6}, r"\{.*"),
    ],
)
def test_other_constraints(client: openai.OpenAI, constraint: Any, pattern: str) -> None:
    answer = client.completions.create(
        **{
            "model": "demo",
            "prompt": "Say: ",
            "seed": 2,
            "max_tokens": 40,
            "extra_body": constraint,
        }
    )
    assert re.fullmatch(pattern, answer.choices[0].text, re.DOTALL)


def test_penalties_are_the_samplers(client: openai.OpenAI, ar: AR) -> None:
    params = SamplingParams(max_tokens=24, frequency_penalty=1.5, presence_penalty=0.5)
    answer = client.completions.create(
        model="demo", prompt=PROMPTS[0], max_tokens=24, temperature=0, frequency_penalty=1.5,
        presence_penalty=0.5, extra_body={"return_token_ids": True},
    )  # fmt: skip
    assert ids_of(answer.choices[0]) == ar(PROMPTS[:1], params)[0]


# --- bad input ------------------------------------------------------------------------------------

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "[0.0001, 100]"),
    ({"temperature": "hot"}, "temperature", "number"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"max_tokens": -1}, "max_tokens", ">= 1"),
    ({"n": 0}, "n", "1"),
    ({"n": 129}, "n", "128"),
    ({"prompt": ["x"] * 100, "n": 2}, "n", "128 choices"),
    ({"prompt": ""}, "prompt", "not empty"),
    ({"prompt": []}, "prompt", "not empty"),
    ({"prompt": [[1], "x", {}]}, "prompt", "token ids"),
    ({"prompt": [4096]}, "prompt[0]", "[0, 4096)"),
    ({"prompt": [-1]}, "prompt[0]", "[0, 4096)"),
    ({"prompt": [2**40]}, "prompt", "[0, 4096)"),
    ({"prompt": "x" * 9000}, "prompt", "context of 1024"),
    ({"stop": ["a", ""]}, "stop", "non-empty"),
    ({"stop": [1]}, "stop[0]", "a text"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": {"5000": 1}}, "logit_bias", "[0, 4096)"),
    ({"best_of": 1, "n": 2}, "best_of", "at least n, 2"),
    ({"echo": 1}, "echo", "true or false"),
    ({"suffix": "end"}, "suffix", "''"),
    ({"frequency_penalty": 3}, "frequency_penalty", "[-2, 2]"),
    ({"logprobs": 21}, "logprobs", "20"),
    ({"extra_body": {"priority": 1001}}, "priority", "1000"),
    ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs.regex",
     "unclosed group"),
    ({"extra_body": {"structured_outputs": {}}}, "structured_outputs", "one of json"),
    ({"extra_body": {"response_format": {"type": "xml"}}}, "response_format.type", "json_schema"),
    ({"extra_body": {"response_format": {"type": "json_schema"}}}, "response_format.json_schema",
     "schema"),
    ({"extra_body": {"response_format": {
        "type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strin"}}}}},
     "response_format", "Invalid type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream: true"),
    ({"extra_body": {"temprature": 1}}, "temprature", "knows"),
    ({"extra_body": {"speculation": {"method": "warp"}}}, "speculation.method", "draft_model_tree"),
    ({"extra_body": {"speculation": {"depth": 4}}}, "speculation.depth", "one of the keys"),
    ({"extra_body": {"speculation": {"branching": 4, "method": "ar"}}}, "speculation.branching",
     "a knob"),
    ({"extra_body": {"speculation": "fast"}}, "speculation", "an object"),
    ({"extra_body": {"prediction": {"type": "content", "content": "x"},
                     "speculation": {"method": "ar"}}}, "prediction", "that use it: predicted_"),
    ({"extra_body": {"prediction": {"type": "audio", "content": "x"}}}, "prediction.type",
     "content"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "param", "allowed"), BAD, ids=[f"{b[0]}"[:40] for b in BAD])
def test_bad_input_is_named(
    client: openai.OpenAI, given: dict[str, Any], param: str, allowed: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "demo", "prompt": "x", "max_tokens": 2, **given})
    error = caught.value
    assert error.param == param
    assert allowed in error.message
    assert error.type == "invalid_request_error"
    if "stream_options" not in given:  # a stream is refused before it begins
        with pytest.raises(openai.BadRequestError) as streamed:
            client.completions.create(
                **{"model": "demo", "prompt": "x", "max_tokens": 2, "stream": True, **given}
            )
        assert streamed.value.param == param


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
         "messages[0].content[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"reasoning_effort": "a lot"}, "reasoning_effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)  # fmt: skip
def test_bad_conversations(client: openai.OpenAI, given: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **{"model": "demo", "messages": [{"role": "user", "content": "x"}], **given}
        )
    assert caught.value.param == param


def test_every_key_of_the_sdk_is_known() -> None:
    for request, params in (
        (CompletionRequest, completion_create_params.CompletionCreateParamsBase),
        (ChatRequest, chat_create_params.CompletionCreateParamsBase),
    ):
        assert set(typing.get_type_hints(params)) <= set(request.model_fields)


def test_models_and_unknown_names(client: openai.OpenAI, url: str) -> None:
    (model,) = client.models.list().data
    assert model.id == "demo"
    assert client.models.retrieve("demo") == model
    for call in (
        lambda: client.models.retrieve("gpt-4"),
        lambda: client.completions.create(model="gpt-4", prompt="x"),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert caught.value.code == "model_not_found"
    assert _get(url, "/health") == (200, {"status": "ok"})
    assert _get(url, "/version")[0] == 200
    assert _get(url, "/v1/nothing")[1]["error"]["code"] == "unknown_url"
    assert _get(url, "/v1/completions")[1]["error"]["code"] == "method_not_allowed"


def _get(url: str, path: str, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    result = answer.status, json.loads(answer.read())
    connection.close()
    return result


def _post(url: str, path: str, body: dict[str, Any], **headers: str) -> int:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    headers["content-type"] = "application/json"
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status


def test_what_is_no_json(url: str) -> None:
    for body in (b"", b"{", b"[]", b"\xff\xfe", b'"text"', b"null", b'{"prompt": NaN}'):
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 400
        assert json.loads(answer.read())["error"]["type"] == "invalid_request_error"
        connection.close()


# --- clients that go away -------------------------------------------------------------------------


def test_leaving_a_stream_frees_its_session(client: openai.OpenAI, target: EngineThread) -> None:
    stream = client.completions.create(model="demo", prompt="x", n=2, stream=True, **LONG)  # type: ignore[call-overload]
    next(iter(stream))
    assert eventually(lambda: len(target.engine.sessions) == 2, 5.0)
    stream.close()
    assert eventually(lambda: not target.engine.sessions, 1.0)


def test_a_client_that_vanishes_frees_its_session(url: str, target: EngineThread) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"prompt": "x", "max_tokens": 900, "temperature": 0, "ignore_eos": True})
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            + f"content-length: {len(body)}\r\n\r\n{body}".encode()
        )
        assert eventually(lambda: bool(target.engine.sessions), 5.0)
    assert eventually(lambda: not target.engine.sessions, 1.0)


# --- access ---------------------------------------------------------------------------------------


def test_keys_and_quotas(target: EngineThread, tmp_path: Path) -> None:
    tenants = {
        "alice": {"token": "alice-" * 4, "quotas": {"max_sessions": 1}},
        "eve": {"token": "eve-" * 6, "suspended": True},
    }
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    gate = Gate(tenants=Tenants(tmp_path / "tenants.yaml"), limits=Limits(max_message_bytes=4096))
    with http_serving(target, MODEL, gate=gate) as url:
        alice, eve, stranger = (
            openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
            for key in ("alice-" * 4, "eve-" * 6, "mallory-mallory")
        )
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.PermissionDeniedError):
            eve.completions.create(model="demo", prompt="x")
        assert _get(url, "/health")[0] == 200
        assert _get(url, "/version")[0] == 401
        assert _get(url, "/version", Authorization="Bearer " + "alice-" * 4)[0] == 200
        stream = alice.completions.create(model="demo", prompt="x", stream=True, **LONG)  # type: ignore[call-overload]
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as caught:
            alice.completions.create(model="demo", prompt="x")
        assert "max_sessions" in caught.value.message
        assert int(caught.value.response.headers["retry-after"]) >= 1
        stream.close()
        assert eventually(lambda: gate.num_sessions == 0, 1.0)
        with pytest.raises(openai.APIStatusError) as large:
            alice.completions.create(model="demo", prompt="x" * 5000)
        assert large.value.status_code == 413
        assert large.value.body["param"] == "body"  # type: ignore[index]
        with pytest.raises(openai.RateLimitError):
            alice.completions.create(model="demo", prompt="x", n=2, max_tokens=4)
        assert eventually(lambda: gate.num_sessions == 0, 1.0)
        for client in (alice, eve, stranger):
            client.close()


def test_refusals_queue(
    target: EngineThread, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of one host or tenant, as over gRPC; answers to others and to good requests do not."""
    rate, count = 20.0, 30
    monkeypatch.setattr(access, "REFUSALS_PER_SECOND", rate)
    tenants = {
        name: {"token": f"{name}-" * 4, "quotas": {"opens_per_second": 0.001}}
        for name in ("alice", "bob", "carol")
    }
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    gate = Gate(tenants=Tenants(tmp_path / "tenants.yaml"))

    def as_tenant(name: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {name}-{name}-{name}-{name}-"}

    with http_serving(target, MODEL, gate=gate) as url:
        body = {"model": "demo", "prompt": "x", "max_tokens": 1}
        assert _post(url, "/v1/completions", body, **as_tenant("bob")) == 200  # his only one
        floods: list[tuple[int, Callable[[], int]]] = [
            (401, lambda: _get(url, "/version")[0]),
            (404, lambda: _get(url, "/no/such", **as_tenant("alice"))[0]),
            (429, lambda: _post(url, "/v1/completions", body, **as_tenant("bob"))),
        ]
        for status, request in floods:
            started = time.monotonic()
            assert {request() for _ in range(count)} == {status}
            assert time.monotonic() - started >= (count - rate) / rate - 0.05
        # No other tenant pays for it, and only refusals count as refusals.
        assert _get(url, "/version", **as_tenant("carol"))[0] == 200
        assert set(gate._refusals) == {("", "ipv4:127.0.0.1"), ("alice", ""), ("bob", "")}
        # Probes have no token, and are answers of the same host.
        started = time.monotonic()
        assert {_get(url, "/health")[0] for _ in range(count)} == {200}
        assert time.monotonic() - started >= (count - rate) / rate - 0.05


def test_a_traceparent_is_the_parent_of_the_gateways_span(target: EngineThread) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    tracing = Tracing("test", exporter)
    trace_id, parent_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    body = {"model": "demo", "prompt": "x", "max_tokens": 1}
    with http_serving(target, MODEL, tracing=tracing) as url:
        for value in (f"00-{trace_id}-{parent_id}-01", f"00-{trace_id}-{parent_id}-00", "nonsense"):
            for stream in (False, True):
                given = {**body, "stream": stream}
                assert _post(url, "/v1/completions", given, traceparent=value) == 200
    tracing.stop()
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["gateway.generate"] * 4  # two traces are not sampled
    own, others = spans[:2], spans[2:]
    for span in own:
        assert f"{span.context.trace_id:032x}" == trace_id
        assert span.parent is not None and f"{span.parent.span_id:016x}" == parent_id
    assert all(span.parent is None for span in others)


def test_tls_follows_its_files(target: EngineThread, tmp_path: Path) -> None:
    make_certificates(tmp_path)
    tls = ServerTls(
        cert=str(tmp_path / "server.crt"),
        key=str(tmp_path / "server.key"),
        client_ca=str(tmp_path / "ca.crt"),
        require_client_cert=True,
    )
    with http_serving(target, MODEL, tls=tls) as url:
        assert url.startswith("https://")

        def serial(certificate: bool = True) -> str:
            context = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
            if certificate:
                context.load_cert_chain(tmp_path / "client.crt", tmp_path / "client.key")
            port = int(url.rpartition(":")[2])
            connection = http.client.HTTPSConnection("localhost", port, context=context, timeout=10)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200
            number = connection.sock.getpeercert()["serialNumber"]  # type: ignore[union-attr]
            connection.close()
            return str(number)

        before = serial()
        assert serial() == before
        with pytest.raises((ssl.SSLError, ConnectionError)):
            serial(certificate=False)
        make_certificates(tmp_path)  # renews them
        assert serial() != before
