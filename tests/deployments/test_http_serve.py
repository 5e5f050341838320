"""HTTP through the gateway of a deployed application, in both topologies."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import openai
import pytest

from paceline.config import SpeculationConfig
from paceline.deployments import playground
from paceline.rpc.client import Client
from paceline.sampling import SamplingParams
from tests.deployments.conftest import PROMPTS, App, eventually

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]

AR = Callable[[Sequence[str], SamplingParams], list[tuple[int, ...]]]


@pytest.fixture
def sdk(app: App) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{app.http}/v1", api_key="x", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("method", ["draft_model", "prompt_lookup"])
def test_http_equals_grpc_equals_ar(
    sdk: openai.OpenAI, client: Client, ar: AR, method: str
) -> None:
    params = SamplingParams(max_tokens=32, ignore_eos=True, temperature=1.0, seed=9)
    answer = sdk.completions.create(
        model="paceline", prompt=list(PROMPTS), max_tokens=32, seed=9,
        extra_body={
            "ignore_eos": True, "return_token_ids": True,
            "speculation": {"method": method, "length": "fixed"},
        },
    )  # fmt: skip
    over_http = [tuple(choice.token_ids) for choice in answer.choices]  # type: ignore[attr-defined]
    speculation = SpeculationConfig(method=method)
    over_grpc = [client.complete(prompt, params, speculation).token_ids for prompt in PROMPTS]
    assert over_http == over_grpc == ar(PROMPTS, params)
    assert answer.metrics["speculative_decoding"]["num_spec_steps"] > 0  # type: ignore[attr-defined]


def test_a_prediction_is_drafted_in_both_topologies(
    app: App, sdk: openai.OpenAI, client: Client, ar: AR
) -> None:
    """In topology ``actors`` the drafter's process copies it, beside its draft model."""
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    (expected,) = ar(PROMPTS[:1], params)
    changed = (*expected[:20], 7, 7, *expected[22:])
    method = SpeculationConfig(method="predicted_outputs_draft_model", length="fixed")
    completion = client.complete(PROMPTS[0], params, method, prediction=changed)
    assert completion.token_ids == expected
    assert completion.last.prediction_length == 48
    assert completion.last.num_predicted > 36
    assert completion.statistics.num_rounds < 8
    assert not completion.statistics.drafter_lost
    if app.topology == "actors":
        assert completion.last.drafter_pid == app.replica("drafter")["pid"]
    answer = sdk.completions.create(
        model="paceline", prompt=PROMPTS[0], max_tokens=48, temperature=0,
        extra_body={
            "ignore_eos": True, "return_token_ids": True,
            "prediction": {"type": "content", "content": "def fibonacci"},
        },
    )  # fmt: skip
    assert tuple(answer.choices[0].token_ids) == expected  # type: ignore[attr-defined]


def test_a_gateway_serves_without_torch(app: App, sdk: openai.OpenAI, client: Client) -> None:
    """Neither its start nor a request may take the second that importing torch takes."""
    client.complete(PROMPTS[0], SamplingParams(max_tokens=4))
    sdk.completions.create(model="paceline", prompt=PROMPTS[0], max_tokens=4)
    mapped = {
        role: Path(f"/proc/{app.replica(role)['pid']}/maps").read_text()
        for role in ("gateway", "target")
    }
    assert "libtorch" in mapped["target"]
    assert "libtorch" not in mapped["gateway"]


def test_the_playground_is_at_the_gateways_root(app: App) -> None:
    """Its files as they are in the package, and the list of methods."""
    for path in playground.PATHS:
        with urllib.request.urlopen(f"{app.http}{path}", timeout=10) as answer:
            content = answer.read()
        if path.endswith("methods.json"):
            assert len(json.loads(content)) > 50
        else:
            name = path.rpartition("/")[2] or "index.html"
            assert content == (playground.FOLDER / name).read_bytes()


@pytest.mark.parametrize("method", ["ar", "draft_model", "draft_model_tree"])
def test_rounds_come_through_the_gateway(sdk: openai.OpenAI, ar: AR, method: str) -> None:
    """What the playground shows: drafts of targets in other processes, round by round."""
    params = SamplingParams(max_tokens=32, ignore_eos=True, temperature=1.0, seed=9)
    (expected,) = ar(PROMPTS[:1], params)
    # By goodput, drafts may stop when the machine is so busy that they do not pay.
    knobs = {"length": "fixed"} if method != "ar" else {}
    speculation = {"method": method, **knobs}
    stream = sdk.completions.create(
        model="paceline", prompt=PROMPTS[0], max_tokens=32, seed=9, stream=True,
        extra_body={"ignore_eos": True, "return_rounds": True, "speculation": speculation},
    )  # fmt: skip
    chunks = [chunk.model_dump()["choices"][0] for chunk in stream if chunk.choices]
    rounds = [chunk["round"] for chunk in chunks]
    assert [each["round"] for each in rounds] == list(range(1, len(rounds) + 1))
    assert tuple(token for each in rounds for token in each["token_ids"]) == expected
    texts = "".join(text for each in rounds for text in each["texts"])
    assert texts == "".join(chunk["text"] for chunk in chunks)
    seconds = [each["seconds"] for each in rounds]
    assert seconds == sorted(seconds)
    for each in rounds:
        draft, count = each["draft"], each["num_accepted"]
        path = draft["accepted_indices"][:count]
        assert [draft["token_ids"][node] for node in path] == each["token_ids"][:count]
        assert [draft["parent_indices"][node] for node in path] == [-1, *path][:count]
    drafted = sum(len(each["draft"]["token_ids"]) for each in rounds)
    assert (drafted > 0) == (method != "ar")


def test_leaving_a_stream_frees_target_and_lease(sdk: openai.OpenAI, app: App) -> None:
    stream = sdk.chat.completions.create(
        model="paceline", messages=[{"role": "user", "content": "Count."}], max_tokens=900,
        stream=True, extra_body={"ignore_eos": True},
    )  # fmt: skip
    next(iter(stream))
    assert app.replica("target")["sessions"] == 1
    stream.close()
    assert eventually(lambda: app.idle, 3.0)
