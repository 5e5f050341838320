"""Requests over HTTP that are made to hurt: each is refused at once, by the key that is wrong."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from paceline.engine import EngineThread
from paceline.loading import load_engine
from paceline.rpc.access import Gate
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.tenants import Tenants
from tests.deployments.conftest import eventually
from tests.deployments.http_serving import http_serving

DEMO = ModelInfo(name="demo")
HONEST = {"prompt": "def read(path):", "max_tokens": 48, "temperature": 0, "ignore_eos": True}
SAID = [{"role": "user", "content": "hi"}]
AMBIGUOUS = "start: e\ne: " + " | ".join(f'e e "{c}{d}" | e "{c}" e' for c in "abcdefgh" for d in "abcdefghijklmnopqrst")  # noqa: E501  # fmt: skip


@pytest.fixture(scope="module")
def target() -> Iterator[EngineThread]:
    thread = EngineThread(load_engine()).start()
    yield thread
    thread.stop()


@pytest.fixture(scope="module")
def url(target: EngineThread) -> Iterator[str]:
    with http_serving(target, DEMO) as url:
        yield url


def post(
    url: str, path: str, body: str | dict[str, Any], **headers: str
) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    data = body if isinstance(body, str) else json.dumps(body)
    headers["content-type"] = "application/json"
    connection.request("POST", f"/v1/{path}", data, headers)
    answer = connection.getresponse()
    try:
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def completion(**keys: Any) -> tuple[str, dict[str, Any]]:
    return "completions", {"prompt": "x", "max_tokens": 2, **keys}


def chat(**keys: Any) -> tuple[str, dict[str, Any]]:
    return "chat/completions", {"messages": SAID, "max_tokens": 2, **keys}


def grammar(text: str) -> tuple[str, dict[str, Any]]:
    return completion(structured_outputs={"grammar": text})


HOSTILE: dict[str, tuple[tuple[str, Any], str]] = {
    "chain of rules": (
        grammar("start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)) + '\na3000: "x"'),
        "structured_outputs.grammar",
    ),
    "chain within the bound of rules": (
        grammar("start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(990)) + '\na990: "x"'),
        "structured_outputs.grammar",
    ),
    "ambiguous grammar": (grammar(AMBIGUOUS), "structured_outputs.grammar"),
    "31 bytes": (grammar('start: s\ns: s s | /[^x]/ | ""\n'), "structured_outputs.grammar"),
    "repetition": (
        completion(structured_outputs={"regex": "((a{1000}){1000}){1000}"}),
        "structured_outputs.regex",
    ),
    "slow schema": (
        chat(
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "schema": {"type": "integer", "multipleOf": 1000003, "maximum": 1e15}
                },
            }
        ),
        "response_format",
    ),
    "nested schema": (
        ("completions", '{"prompt": "x", "structured_outputs": {"json": '
         + '{"items":' * 200 + "{}" + "}" * 202),
        "structured_outputs.json",
    ),
    "stop strings": (completion(stop=["x"] * 350_000), "stop"),
    "bytes of stop strings": (completion(stop=["é" * 1000] * 3), "stop"),
    "stop ids": (completion(stop_token_ids=[1] * 400_000), "stop_token_ids"),
    "logit biases": (completion(logit_bias={str(i): 1 for i in range(6000)}), "logit_bias"),
    "prompt ids": (completion(prompt=[1] * 1_000_000), "prompt"),
    "prompt text": (completion(prompt="x y" * 1_300_000), "prompt"),
    "predicted text": (completion(prediction={"type": "content", "content": "x y" * 1_000_000}),
                       "prediction.content"),
    **{
        f"template variable {name}": (
            chat(chat_template_kwargs={name: "x"}), "chat_template_kwargs"
        )
        for name in ("messages", "source", "bos_token", "add_generation_prompt", "tools")
    },
    "template variables": (
        chat(chat_template_kwargs={f"v{i}": 1 for i in range(100)}), "chat_template_kwargs"
    ),
    "surrogate in a prompt": (completion(prompt="\ud800"), "prompt"),
    "surrogate in a message": (
        chat(messages=[{"role": "user", "content": "\udc00 \ud800"}]), "messages"
    ),
    "surrogate in a key of the message": (
        chat(messages=[{"role": "user", "content": "x", "name\ud800": "x"}]), "messages"
    ),
    "surrogate in a stop string": (completion(stop="\ud800"), "stop"),
    "surrogate in a regex": (completion(structured_outputs={"regex": "\ud800"}), "regex"),
    "surrogate in a schema": (
        completion(structured_outputs={"json": {"enum": ["\ud800"]}}), "structured_outputs"
    ),
    "surrogate in speculation": (completion(speculation={"method": "\ud800"}), "speculation"),
    "surrogate in the model": (completion(model="\ud800"), "model"),
    "surrogate in prediction": (
        completion(prediction={"type": "content", "content": "\ud800"}), "prediction"
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def calm(url: str) -> str:
    status, answer = post(url, "completions", HONEST)
    assert status == 200
    return str(answer["choices"][0]["text"])


@pytest.mark.one_of(1, slow=3)
@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_and_others_go_on(name: str, url: str, calm: str) -> None:
    (path, body), param = HOSTILE[name]
    texts: list[str] = []

    def honest() -> None:
        texts.append(post(url, "completions", HONEST)[1]["choices"][0]["text"])

    beside = threading.Thread(target=honest)
    beside.start()
    status, answer = post(url, path, body)
    beside.join(60)
    assert status in (400, 404), answer
    assert param.split(".")[0] in (answer["error"]["param"] or answer["error"]["message"]), answer
    assert len(answer["error"]["message"]) < 2000
    assert texts == [calm]


def test_a_body_that_is_too_large(url: str) -> None:
    status, answer = post(url, "completions", completion(prompt="x" * 5_000_000)[1])
    assert status == 413
    assert answer["error"]["param"] == "body"


def test_a_refused_constraint_is_refused_again_at_once(url: str, target: EngineThread) -> None:
    path, body = HOSTILE["chain within the bound of rules"][0]
    assert post(url, path, body)[0] == 400
    process = target.engine.constraints.process
    assert process is not None
    pid = process.pid
    started = time.perf_counter()
    for _ in range(5):
        assert post(url, path, body)[0] == 400
    assert process.pid == pid  # no new helper had to die for it
    assert time.perf_counter() - started < 2.0


def test_choices_by_the_thousand(url: str) -> None:
    choices = [f"choice {i}" for i in range(2000)]
    status, answer = post(url, *completion(structured_outputs={"choice": choices}, max_tokens=40))
    assert status == 200
    assert answer["choices"][0]["text"] in choices


@pytest.mark.parametrize("waits", [True, False], ids=["after the first reply", "before it"])
def test_a_cancelled_prompt_is_not_free(target: EngineThread, tmp_path: Path, waits: bool) -> None:
    """900 tokens against 2,000 a minute: two fit, the third is a debt, the fourth is refused."""
    quotas = {"tokens_per_minute": 2000}
    tenants = {"mallory": {"token": "mallory-" * 4, "quotas": quotas}, "bob": {"token": "bob-" * 8}}
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    gate = Gate(tenants=Tenants(tmp_path / "tenants.yaml"))
    head = {"authorization": "Bearer " + "mallory-" * 4, "content-type": "application/json"}
    with http_serving(target, DEMO, gate=gate) as url:
        answers = []
        for i in range(6):
            body = {"prompt": [i + 5] * 900, "max_tokens": 100, "stream": True, "ignore_eos": True}
            connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
            connection.request("POST", "/v1/completions", json.dumps(body), head)
            if not waits and i < 3:
                assert eventually(lambda: gate.num_sessions == 1, 5.0)
                answers.append(200)
            else:
                answer = connection.getresponse()
                answers.append(answer.status)
                line = answer.readline()
                answer.close()
                assert line.startswith(b"data: ") or b"tokens_per_minute" in line
            connection.close()
            assert eventually(lambda: gate.num_sessions == 0, 5.0)
        assert answers == [200, 200, 200, 429, 429, 429]
    assert eventually(lambda: not target.engine.sessions, 5.0)


def test_a_refused_prompt_is_free(target: EngineThread, tmp_path: Path) -> None:
    tenants = {"alice": {"token": "alice-" * 4, "quotas": {"tokens_per_minute": 200}}}
    (tmp_path / "tenants.yaml").write_text(yaml.safe_dump({"tenants": tenants}))
    head = {"authorization": "Bearer " + "alice-" * 4}
    with http_serving(target, DEMO, gate=Gate(tenants=Tenants(tmp_path / "tenants.yaml"))) as url:
        for _ in range(5):
            assert post(url, *completion(prompt=[1] * 2000), **head)[0] == 400
        assert post(url, *completion(prompt="x y " * 40), **head)[0] == 200
