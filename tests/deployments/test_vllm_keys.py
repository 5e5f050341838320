"""What clients of vLLM send beyond OpenAI's API, and docs/http.md's table of it."""

from __future__ import annotations

import http.client
import json
import re
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import response_create_params

from paceline.config import SpeculationConfig
from paceline.deployments.config import HttpConfig
from paceline.deployments.openai import answer_schema
from paceline.deployments.openai.api import UNSUPPORTED
from paceline.deployments.openai.responses_schema import ResponsesRequest
from paceline.deployments.openai.schema import ChatRequest, CompletionRequest
from paceline.deployments.scrape import gathered
from paceline.engine import Engine, EngineThread
from paceline.rpc import access
from paceline.rpc.access import MAX_MESSAGE_BYTES, Gate, Limits
from paceline.rpc.generate_service import ModelInfo
from paceline.sampling import SamplingParams, token_logprobs
from tests.core.test_token_limits import rows_of
from tests.deployments.conftest import PROMPTS, eventually
from tests.deployments.http_serving import http_serving

MODEL = ModelInfo(name="demo", default_speculation=SpeculationConfig())
AR = Callable[[Sequence[str], SamplingParams], list[tuple[int, ...]]]
CHAT = [{"role": "user", "content": "Write a stack."}]
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}


@pytest.fixture(scope="module")
def target(demo: Engine) -> Iterator[EngineThread]:
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


def ask(
    url: str, path: str, body: Any = None, method: str | None = None, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """Status, body (of JSON, or the text) and headers of an answer."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=30)
    data = body if body is None or isinstance(body, bytes) else json.dumps(body)
    headers.setdefault("content-type", "application/json")
    connection.request(method or ("GET" if body is None else "POST"), path, data, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    given = {key.lower(): value for key, value in answer.getheaders()}
    is_json = given.get("content-type", "").startswith("application/json")
    return answer.status, json.loads(text) if is_json else text, given


# --- scores of the prompt -------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ar", "draft_model_tree"])
@pytest.mark.parametrize("max_tokens", [0, 1, 6])
@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_has_the_targets_scores(
    client: openai.OpenAI, engine: Engine, method: str, max_tokens: int, as_ids: bool
) -> None:
    """What lm-eval's multiple choice reads, from the target's logits of one forward."""
    assert engine.tokenizer is not None
    ids = [engine.tokenizer.encode(prompt) for prompt in PROMPTS]
    answer = client.completions.create(
        **GREEDY, prompt=ids if as_ids else list(PROMPTS), max_tokens=max_tokens, logprobs=2,
        echo=True, extra_body={"return_token_ids": True, "speculation": {"method": method}},
    )  # fmt: skip
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3 * max_tokens
    for prompt, prompt_ids, choice in zip(PROMPTS, ids, answer.choices, strict=True):
        tokens = [*prompt_ids, *choice.token_ids]  # type: ignore[attr-defined]
        rows = rows_of(engine, tokens)
        told: Any = choice.logprobs
        expected = [token_logprobs(r, t, 2) for r, t in zip(rows, tokens[1:], strict=False)]
        assert told.token_logprobs == [None, *(entry.logprob for entry in expected)]
        assert told.top_logprobs[0] is None
        for top, entry in zip(told.top_logprobs[1:], expected, strict=True):
            assert sorted(top.values()) == sorted(
                {*(value for _, value in entry.top), entry.logprob}
            )
        assert "".join(told.tokens) == choice.text
        assert choice.text.startswith(prompt)
        assert choice.text == prompt + engine.tokenizer.decode(tokens[len(prompt_ids) :])
        assert told.text_offset[-1] == len(choice.text) - len(told.tokens[-1])
        assert choice.finish_reason == "length"


def test_echo_in_a_stream_and_without_scores(client: openai.OpenAI, engine: Engine) -> None:
    assert engine.tokenizer is not None
    request: dict[str, Any] = {**GREEDY, "prompt": PROMPTS[1], "max_tokens": 8, "n": 2,
                               "echo": True, "logprobs": 1}  # fmt: skip
    whole = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True))
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert mine[0].text.startswith(PROMPTS[1])
        streamed = [v for c in mine for v in c.logprobs.token_logprobs]  # type: ignore[union-attr]
        assert streamed == choice.logprobs.token_logprobs  # type: ignore[union-attr]
    ids = engine.tokenizer.encode(PROMPTS[1])
    plain = client.completions.create(**GREEDY, prompt=ids, max_tokens=8, echo=True)
    assert plain.choices[0].text == whole.choices[0].text
    assert plain.choices[0].logprobs is None
    nothing = client.completions.create(**GREEDY, prompt=ids, max_tokens=0)
    assert nothing.choices[0].text == ""


def test_prompt_logprobs_as_vllm_tells_them(client: openai.OpenAI, engine: Engine) -> None:
    assert engine.tokenizer is not None
    extra = {"prompt_logprobs": 1}
    answer: Any = client.completions.create(
        **GREEDY, prompt=PROMPTS[0], max_tokens=2, n=2, extra_body=extra
    )
    ids = engine.tokenizer.encode(PROMPTS[0])
    rows = rows_of(engine, ids)
    for choice in answer.choices:
        told = choice.prompt_logprobs
        assert told[0] is None
        assert len(told) == len(ids)
        for entries, row, token in zip(told[1:], rows, ids[1:], strict=False):
            expected = token_logprobs(row, token, 1)
            own = entries[str(token)]
            assert own["logprob"] == expected.logprob
            assert own["rank"] == expected.rank
            assert own["decoded_token"] == engine.tokenizer.token_bytes(token).decode()
            assert entries[str(expected.top[0][0])]["rank"] == 1
    chat: Any = client.chat.completions.create(
        **GREEDY,
        messages=CHAT,
        max_tokens=2,
        extra_body=extra,  # type: ignore[arg-type]
    )
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


# --- what may come, and what the text keeps -------------------------------------------------------


def test_limits_reach_the_sampler(client: openai.OpenAI, ar: AR) -> None:
    extra = {
        "min_tokens": 12, "allowed_token_ids": list(range(0, 4000, 3)), "stop_token_ids": [33],
        "top_k": -1, "return_token_ids": True,
    }  # fmt: skip
    params = SamplingParams(
        max_tokens=24, min_tokens=12, allowed_token_ids=tuple(range(0, 4000, 3)),
        stop_token_ids=(33,), temperature=0.9, seed=3,
    )  # fmt: skip
    for method in ("ar", "draft_model", "prompt_lookup"):
        answer: Any = client.completions.create(
            model="demo", prompt=PROMPTS[2], max_tokens=24, temperature=0.9, seed=3,
            extra_body={**extra, "speculation": {"method": method}},
        )  # fmt: skip
        assert tuple(answer.choices[0].token_ids) == ar(PROMPTS[2:], params)[0]


def test_the_end_is_told_and_kept(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {**GREEDY, "prompt": PROMPTS[0], "max_tokens": 24}
    text = client.completions.create(**request).choices[0].text
    stop = text[10:14]
    plain: Any = client.completions.create(**request, stop=stop).choices[0]
    kept: Any = client.completions.create(
        **request, stop=stop, extra_body={"include_stop_str_in_output": True}
    ).choices[0]
    assert kept.text == plain.text + stop
    assert kept.stop_reason == plain.stop_reason == stop
    first: Any = client.completions.create(**request, extra_body={"return_token_ids": True})
    token = first.choices[0].token_ids[2]
    ended: Any = client.completions.create(**request, extra_body={"stop_token_ids": [token]})
    assert ended.choices[0].stop_reason == token


@pytest.mark.parametrize(
    ("guided", "pattern"),
    [
        ({"guided_regex": "[a-c]{4}"}, "[a-c]{4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_grammar": 'start: "a" "b"~2..3'}, "ab{2,3}"),
        ({"guided_json": {"const": 12}}, "12"),
        ({"guided_json": '{"const": 12}', "guided_decoding_backend": "xgrammar"}, "12"),
    ],
)
def test_guided_output(client: openai.OpenAI, guided: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(
        model="demo", prompt="Say: ", seed=2, max_tokens=40, extra_body=guided
    )
    assert re.fullmatch(pattern, answer.choices[0].text)


def test_best_of_are_the_most_likely(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "demo", "prompt": list(PROMPTS[:2]), "seed": 5,
                               "max_tokens": 8, "temperature": 1.0}  # fmt: skip
    every = client.completions.create(**request, n=5, logprobs=0).choices

    def score(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs)

    expected = [
        choice.text
        for start in (0, 5)
        for choice in sorted(every[start : start + 5], key=score, reverse=True)[:2]
    ]
    best = client.completions.create(**request, n=2, best_of=5)
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1, 2, 3]
    assert best.choices[0].logprobs is None
    assert best.usage is not None
    assert best.usage.completion_tokens >= 2 * 5


def test_tokens_named_by_id(client: openai.OpenAI) -> None:
    answer: Any = client.completions.create(
        **GREEDY, prompt="x", max_tokens=3, logprobs=1,
        extra_body={"return_tokens_as_token_ids": True, "return_token_ids": True},
    )  # fmt: skip
    choice = answer.choices[0]
    assert choice.logprobs.tokens == [f"token_id:{token}" for token in choice.token_ids]


# --- other paths ----------------------------------------------------------------------------------


def test_tokenize_and_back(url: str, engine: Engine) -> None:
    assert engine.tokenizer is not None
    text = PROMPTS[1] + "\u00e9"
    ids = engine.tokenizer.encode(text)
    body = {"model": "demo", "prompt": text, "return_token_strs": True}
    status, told, _ = ask(url, "/tokenize", body)
    assert status == 200
    assert told["tokens"] == ids
    assert told["count"] == len(ids)
    assert told["max_model_len"] == 1024
    assert len(told["token_strs"]) == len(ids)
    assert ask(url, "/detokenize", {"tokens": ids})[1] == {"prompt": text}
    _, chat, _ = ask(url, "/tokenize", {"messages": CHAT})
    assert chat["tokens"] == engine.tokenizer.encode("User: Write a stack.\nAssistant:")
    for path, wrong, field in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"prompt": ""}, "prompt"),
        ("/detokenize", {"tokens": [1, 99_999]}, "tokens[1]"),
        ("/detokenize", {"tokens": [2**40]}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
    ):
        status, told, _ = ask(url, path, wrong)
        assert (status, told["error"]["param"]) == (400, field)


def test_paths_of_other_models_say_so(url: str) -> None:
    for path in UNSUPPORTED:
        status, told, _ = ask(url, path, {"input": "x"})
        assert status == 400
        assert told["error"]["code"] == "unsupported_endpoint"
    assert "embeddings" in ask(url, "/v1/embeddings", {"input": "x"})[1]["error"]["message"]
    assert ask(url, "/metrics")[1]["error"]["code"] == "unsupported_endpoint"  # no Ray here


def test_browsers_of_listed_origins_may_call(target: EngineThread, url: str) -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST",
             "Access-Control-Request-Headers": "authorization,content-type"}  # fmt: skip
    assert ask(url, "/v1/models", method="OPTIONS", **asked)[0] == 405
    assert (
        "access-control-allow-origin" not in ask(url, "/v1/models", Origin="https://a.example")[2]
    )
    with http_serving(
        target, MODEL, http=HttpConfig(allow_origins=("https://a.example",))
    ) as open_:
        status, _, headers = ask(open_, "/v1/chat/completions", method="OPTIONS", **asked)
        assert status == 200
        assert headers["access-control-allow-origin"] == "https://a.example"
        assert "authorization" in headers["access-control-allow-headers"].lower()
        _, _, headers = ask(open_, "/v1/models", Origin="https://a.example")
        assert headers["access-control-allow-origin"] == "https://a.example"
        other = {**asked, "Origin": "https://evil.example"}
        assert ask(open_, "/v1/models", method="OPTIONS", **other)[0] == 400
        _, _, headers = ask(open_, "/v1/models", Origin="https://evil.example")
        assert "access-control-allow-origin" not in headers


def test_a_lenient_server_and_aliases(target: EngineThread) -> None:
    options = HttpConfig(extra="ignore", model_aliases=("gpt-4o", "default"))
    body = {"model": "gpt-4o", "prompt": "x", "max_tokens": 1, "temprature": 2,
            "response_format": {"type": "text", "x": 1}}  # fmt: skip
    with http_serving(target, MODEL, http=options) as url:
        assert ask(url, "/v1/completions", body)[0] == 200
        _, models, _ = ask(url, "/v1/models")
        assert [model["id"] for model in models["data"]] == ["demo", "gpt-4o", "default"]
        assert ask(url, "/v1/models/gpt-4o")[1]["root"] == "demo"
        assert ask(url, "/v1/completions", {**body, "max_tokens": "x"})[0] == 400
        assert ask(url, "/v1/completions", {**body, "model": "other"})[0] == 404
    with http_serving(target, MODEL) as url:
        strict = {**body, "model": "demo"}
        assert ask(url, "/v1/completions", strict)[1]["error"]["param"] == "response_format.x"


def test_metrics_of_several_nodes_are_one_page() -> None:
    one = (
        "# HELP ray_paceline_rounds_total x\n"
        'ray_paceline_rounds_total{application="a",method="ar"} 3.0\n'
        'ray_paceline_rounds_total{application="ab",method="ar"} 9.0\n'
        'ray_other_total{application="a"} 1.0\n'
    )
    two = 'ray_paceline_rounds_total{application="a",method="eagle"} 4.0\n'
    lines = gathered([one, two], "a").splitlines()
    assert lines[0].startswith("# HELP ray_paceline_rounds_total ")
    assert lines[1] == "# TYPE ray_paceline_rounds_total counter"
    assert [line.rpartition(" ")[2] for line in lines[2:]] == ["3.0", "4.0"]


# --- the description of the API -------------------------------------------------------------------


def test_openapi_describes_real_answers(url: str) -> None:
    api = ask(url, "/openapi.json")[1]
    for path, methods in api["paths"].items():
        for operation in methods.values():
            assert operation["description"], path
            answers = operation["responses"]["200"]["content"]
            assert path == "/metrics" or answers["application/json"]["schema"]
    check = answer_schema
    completion = {"prompt": "x", "max_tokens": 3, "logprobs": 1, "echo": True, "prompt_logprobs": 1,
                  "return_rounds": True, "return_token_ids": True}  # fmt: skip
    check.CompletionObject.model_validate(ask(url, "/v1/completions", completion)[1])
    chat = {"messages": CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 1,
            "prompt_logprobs": 0, "n": 2}  # fmt: skip
    check.ChatObject.model_validate(ask(url, "/v1/chat/completions", chat)[1])
    check.ModelList.model_validate(ask(url, "/v1/models")[1])
    check.Tokens.model_validate(ask(url, "/tokenize", {"prompt": "x"})[1])
    check.ErrorBody.model_validate(ask(url, "/v1/completions", {})[1])
    response = {"input": "x", "max_output_tokens": 2, "top_logprobs": 1,
                "include": ["message.output_text.logprobs"]}  # fmt: skip
    check.ResponseObject.model_validate(ask(url, "/v1/responses", response)[1])


def test_the_documentation_needs_no_network(url: str) -> None:
    status, page, headers = ask(url, "/docs")
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    for path in ask(url, "/openapi.json")[1]["paths"]:
        assert path in page
    assert "allowed_token_ids" in page
    assert "prompt_logprobs" in page
    assert not re.findall(r"(?:src|href)=\"(?:https?:)?//", page)
    assert "<script" not in page


# --- errors ---------------------------------------------------------------------------------------


def test_errors_name_the_keys_that_were_sent(url: str) -> None:
    for given, field in (
        ({"grammar": "start: x"}, "grammar"),
        ({"method": "ar"}, "method"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_grammar": "start: ("}, "guided_grammar"),
        ({"structured_outputs": {"grammar": "start: ("}}, "structured_outputs.grammar"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
         "response_format"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex"),
        ({"guided_regex": "a", "allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"top_k": -2}, "top_k"),
        ({"prompt_logprobs": 2, "stream": True}, "prompt_logprobs"),
        ({"best_of": 3, "stream": True}, "best_of"),
    ):  # fmt: skip
        status, told, _ = ask(url, "/v1/completions", {"prompt": "x", **given})
        assert (status, told["error"]["param"]) == (400, field)


WRONG: tuple[Any, ...] = ("text", -1, 0.5, 10**30, True, [], [None], {"type": "x"})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "model", "valid"),
    [
        ("/v1/completions", CompletionRequest, {"prompt": "x", "max_tokens": 1}),
        ("/v1/chat/completions", ChatRequest, {"messages": CHAT, "max_tokens": 1}),
        ("/v1/responses", ResponsesRequest, {"input": "x", "max_output_tokens": 1}),
    ],
)
def test_no_words_of_the_validator(
    path: str, model: Any, valid: dict[str, Any], target: EngineThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Wrong values of every key get plain words, under that key."""
    monkeypatch.setattr(access, "REFUSALS_PER_SECOND", 1e6)
    with http_serving(target, MODEL) as url:
        check_wrong_values(url, path, model, valid)


def check_wrong_values(url: str, path: str, model: Any, valid: dict[str, Any]) -> None:
    for name, field in model.model_fields.items():
        if name == "stream":
            continue
        for value in WRONG:
            status, told, _ = ask(url, path, {**valid, field.alias or name: value})
            if status == 200:
                continue
            assert status in (400, 404), (name, value, told)
            error = told["error"]
            assert not re.search(
                r"[Ii]nput should|valid (dict|string|number|int|bool|list)|pydantic|see /docs",
                error["message"],
            ), error  # fmt: skip
            if status == 400 and name not in ("model", "n", "best_of", "max_tokens"):
                assert error["param"].split(".")[0].split("[")[0] == name, (name, value, error)


def test_every_key_of_the_sdk_is_known() -> None:
    keys = typing.get_type_hints(response_create_params.ResponseCreateParamsBase)
    assert set(keys) <= set(ResponsesRequest.model_fields)


def test_a_body_that_is_too_large(target: EngineThread) -> None:
    gate = Gate(limits=Limits(max_message_bytes=4096))
    with http_serving(target, MODEL, gate=gate) as url:
        status, told, _ = ask(url, "/v1/completions", {"prompt": "x" * 5000})
        assert (status, told["error"]["param"]) == (413, "body")


def test_a_client_that_sends_a_large_body_to_its_end_gets_the_answer(url: str) -> None:
    body = {"prompt": "x" * 3 * MAX_MESSAGE_BYTES}
    status, told, _ = ask(url, "/v1/completions", body, connection="close")
    assert (status, told["error"]["param"]) == (413, "body")


@pytest.mark.parametrize(
    "body",
    [b'{"prompt": "\xff"}', b'{"prompt": ' + b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"],
    ids=["bytes", "brackets", "digits"],
)
def test_bodies_that_no_reader_takes(url: str, body: bytes) -> None:
    status, told, _ = ask(url, "/v1/completions", body)
    assert (status, told["error"]["param"]) == (400, "body")
    assert told["error"]["code"] == "invalid_argument"
    assert "JSON" in told["error"]["message"]


def test_another_type_of_content(url: str) -> None:
    kind = {"content-type": "text/plain"}
    status, told, _ = ask(url, "/v1/completions", b'{"prompt": "x"}', **kind)
    assert (status, told["error"]["param"]) == (400, "body")
    assert "content-type: application/json" in told["error"]["message"]


HALF = "\ud800"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"prompt": HALF}, "prompt"),
        ({"stop": HALF}, "stop"),
        ({"messages": [{"role": "user", "content": HALF}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x", HALF: "x"}]}, "messages[0]"),
        ({"messages": CHAT, "tools": [{"type": "function", "function": {"name": HALF}}]},
         "tools[0].function.name"),
        ({"messages": CHAT, "stop": ["x", HALF]}, "stop"),
        ({HALF: 1}, "body"),
    ],
)  # fmt: skip
def test_half_of_a_surrogate_pair(url: str, given: dict[str, Any], param: str) -> None:
    path = "/v1/chat/completions" if "messages" in given else "/v1/completions"
    least = {} if "messages" in given else {"prompt": "x"}
    status, told, _ = ask(url, path, {**least, **given})
    assert (status, told["error"]["param"]) == (400, param)
    assert "got 'half of a surrogate pair', expected Unicode text" in told["error"]["message"]


# --- the table of docs/http.md --------------------------------------------------------------------


def table() -> dict[str, str]:
    """What docs/http.md says of each key and path."""
    page = (Path(__file__).parents[2] / "docs" / "http.md").read_text()
    rows = re.findall(r"^\| (`.*?) \| .*? \| (.*?) \|$", page.partition("<!-- keys -->")[2], re.M)
    return {name: what for names, what in rows for name in re.findall(r"`(.*?)`", names)}


TABLE = table()
TOOL = {"type": "function", "function": {"name": "ping"}}
# For each key a value that its default does not have, and what else the request needs for it.
EXAMPLES: dict[str, Any] = {
    "model": "demo", "prompt": [[3, 4], [5]], "messages": CHAT, "max_tokens": 3,
    "max_completion_tokens": 3, "min_tokens": 2, "temperature": 0.5, "top_p": 0.5, "min_p": 0.1,
    "top_k": -1, "repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5,
    "logit_bias": {"5": 1}, "allowed_token_ids": [5, 6, 7], "bad_words": ["x"], "seed": 4, "n": 2,
    "best_of": 2, "use_beam_search": True, "length_penalty": 0.5, "stop": ["x"],
    "stop_token_ids": [5], "ignore_eos": True, "include_stop_str_in_output": True,
    "skip_special_tokens": False, "spaces_between_special_tokens": False, "stream": True,
    "stream_options": {"include_usage": True}, "logprobs": 1, "top_logprobs": 1,
    "prompt_logprobs": 1, "echo": True, "return_token_ids": True,
    "return_tokens_as_token_ids": True, "suffix": "x", "prompt_embeds": "x",
    "truncate_prompt_tokens": 5, "add_special_tokens": False,
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
    "guided_json": {"const": 1}, "guided_regex": "a", "guided_grammar": 'start: "a"',
    "guided_choice": ["a"], "guided_decoding_backend": "outlines",
    "guided_whitespace_pattern": " ", "tools": [TOOL], "tool_choice": "required",
    "parallel_tool_calls": False, "functions": [{"name": "x"}], "function_call": "auto",
    "reasoning_effort": "low", "include_reasoning": False, "chat_template_kwargs": {"x": 1},
    "add_generation_prompt": False, "chat_template": "x", "continue_final_message": True,
    "documents": [{"text": "x"}], "audio": {}, "modalities": ["audio"],
    "mm_processor_kwargs": {"x": 1}, "verbosity": "low", "web_search_options": {},
    "moderation": "x", "prediction": {"type": "content", "content": "x"}, "priority": 1,
    "cache_salt": "x", "kv_transfer_params": {"x": 1}, "vllm_xargs": {"x": 1},
    "logits_processors": ["x"], "request_id": "x", "user": "x", "metadata": {"x": "y"},
    "store": True, "service_tier": "flex", "safety_identifier": "x", "prompt_cache_key": "x",
    "prompt_cache_options": {}, "prompt_cache_retention": "24h",
    "speculation": {"method": "ar"}, "return_rounds": True, "return_explanation": True,
    "numerics_mismatch": "allow", "ec_transfer_params": {"x": 1}, "logprob_token_ids": [5],
    "media_io_kwargs": {"x": {}}, "mm_payload": "none", "repetition_detection": {"x": 1},
    "return_mm_kwargs": True, "return_prompt_text": True, "return_token_offsets": True,
    "routed_experts_prompt_start": 1, "session_id": "x", "stream_interval": 2,
    "thinking_token_budget": 5, "truncation_side": "left", "watermarking": True,
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True}, "top_logprobs": {"logprobs": True},
    "tool_choice": {"tools": [TOOL]}, "parallel_tool_calls": {"tools": [TOOL]},
}  # fmt: skip


def test_the_table_has_every_key() -> None:
    keys = {*CompletionRequest.model_fields, *ChatRequest.model_fields}
    assert {name for name in TABLE if " " not in name and name != "json"} >= keys
    assert EXAMPLES.keys() == keys
    assert {name.partition(" ")[2] for name in TABLE if name.startswith("POST")} <= {
        *UNSUPPORTED, "/v1/completions", "/v1/chat/completions", "/v1/responses", "/tokenize",
        "/detokenize",
    }  # fmt: skip


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_the_table_says_what_happens(
    target: EngineThread, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access, "REFUSALS_PER_SECOND", 1e6)
    chat = path == "/v1/chat/completions"
    request = ChatRequest if chat else CompletionRequest
    least: dict[str, Any] = {"messages": CHAT} if chat else {"prompt": "x"}
    with http_serving(target, MODEL) as url:
        plain = ask(url, path, {**least, "max_tokens": 2, "temperature": 0})[1]
        for key in request.model_fields:
            value = EXAMPLES[key]
            if chat and key == "logprobs":
                value = True
            body = {**least, "max_tokens": 2, "temperature": 0, **BESIDE.get(key, {}), key: value}
            status, told, _ = ask(url, path, body)
            what = TABLE[key].split()[0].rstrip(";,:")
            if chat and key == "echo":
                what = "refused"
            if what == "refused":
                assert (status, told["error"]["param"]) == (400, key), key
                assert key in told["error"]["message"]
            else:
                assert what in ("same", "no", "Paceline's"), what
                assert status == 200, (key, told)
            if what == "no":
                assert told["choices"] == plain["choices"], key


@pytest.mark.parametrize("name", [name for name in TABLE if " " in name])
def test_the_table_names_real_paths(url: str, name: str) -> None:
    method, _, path = name.partition(" ")
    if method not in ("GET", "POST"):
        pytest.skip("no path")
    status, told, _ = ask(url, path, {} if method == "POST" else None)
    refused = TABLE[name].startswith("refused")
    if path == "/metrics":  # there are none without Ray; test_metrics.py reads them
        assert told["error"]["code"] == "unsupported_endpoint"
    elif refused:
        assert (status, told["error"]["code"]) == (400, "unsupported_endpoint")
    elif method == "GET":
        assert status == 200
    else:
        assert (status, told["error"]["code"]) == (400, "invalid_argument")
