"""Adapters (LoRA) of one target over HTTP and gRPC: chosen by name, each with the tokens of AR."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from paceline.config import SpeculationConfig
from paceline.deployments.config import parse_config
from paceline.deployments.lease import Endpoint
from paceline.deployments.target import _load
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineThread
from paceline.errors import InvalidArgument, ModelNotFound, NumericsMismatch
from paceline.loading import load_runner
from paceline.models.llama import LlamaRunner
from paceline.request import Request
from paceline.rpc.client import AsyncClient, Client
from paceline.rpc.device import DeviceClient
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.ladder import Mode
from paceline.rpc.server import RpcServer
from paceline.sampling import SamplingParams
from paceline.target import ModelTarget
from paceline.tokenizer import load_tokenizer
from tests.adapters import ATTENTION, make_adapter, merge
from tests.deployments.http_serving import http_serving
from tests.modelzoo import make_model
from tests.rpc.serving import TargetProcess, eventually, serving

PROMPT = list(b"import os\nimport ")
PARAMS = SamplingParams(max_tokens=24, temperature=1.0, seed=4, ignore_eos=True)
NAMES = ("", "law", "org/sql-lora")
LOOKUP = SpeculationConfig(method="prompt_lookup", length="fixed")
MODEL = ModelInfo(name="tiny", default_speculation=SpeculationConfig(method="prompt_lookup"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama_gqa", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        "law": make_adapter(root / "law", base, strength=0.5),
        "org/sql-lora": make_adapter(root / "sql", base, targets=ATTENTION, rank=3, seed=1),
    }


def thread_over(base: Path, adapters: dict[str, Path]) -> EngineThread:
    target = ModelTarget(load_runner(base, kv_tokens=4096, adapters=adapters))
    drafter = DraftModel(load_runner(base, kv_tokens=4096, batch_invariant=False))
    tokenizer = load_tokenizer(base)
    return EngineThread(Engine(target, {"draft_model": drafter}, tokenizer=tokenizer)).start()


@pytest.fixture(scope="module")
def target(base: Path, adapters: dict[str, Path]) -> Iterator[EngineThread]:
    thread = thread_over(base, adapters)
    yield thread
    assert eventually(lambda: not thread.engine.sessions), "sessions leaked"
    thread.stop()


@pytest.fixture(scope="module")
def server(target: EngineThread) -> Iterator[RpcServer]:
    with serving(engine=target, model=MODEL) as running:
        yield running


@pytest.fixture(scope="module")
def url(target: EngineThread) -> Iterator[str]:
    with http_serving(target, MODEL) as url:
        yield url


@pytest.fixture(scope="module")
def truth(base: Path, adapters: dict[str, Path]) -> dict[str, list[int]]:
    """What AR generates with each adapter, on an engine that has no other."""
    found = {}
    for name in NAMES:
        own = {name: adapters[name]} if name else {}
        engine = Engine(ModelTarget(LlamaRunner(base, adapters=own)))
        ar = SpeculationConfig(method="ar")
        session = engine.submit(Request(PROMPT, PARAMS, ar, adapter=name))
        while engine.has_work:
            engine.step()
        found[name] = session.output_ids
    assert len({tuple(tokens) for tokens in found.values()}) == len(NAMES)
    return found


# --- HTTP -----------------------------------------------------------------------------------------


def test_http_takes_an_adapter_as_the_model(url: str, truth: dict[str, list[int]]) -> None:
    ids = {"return_token_ids": True, "ignore_eos": True}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        models = {model.id: model for model in client.models.list()}
        assert list(models) == ["tiny", "law", "org/sql-lora"]
        assert models["tiny"].parent is None  # type: ignore[attr-defined]
        assert models["org/sql-lora"].parent == "tiny"  # type: ignore[attr-defined]
        assert client.models.retrieve("org/sql-lora").id == "org/sql-lora"
        prints = set()
        for name in NAMES:
            for speculation in ({}, {"speculation": {"method": "draft_model_tree"}}):
                done = client.completions.create(
                    model=name or "tiny", prompt=PROMPT, max_tokens=24, temperature=1.0, seed=4,
                    extra_body={**ids, **speculation},
                )  # fmt: skip
                assert list(done.choices[0].token_ids) == truth[name], name  # type: ignore[attr-defined]
                assert done.model == (name or "tiny")
                prints |= set(done.numerics["fingerprints"])  # type: ignore[attr-defined]
        assert len(prints) == len(NAMES)
        chat = client.chat.completions.create(
            model="law", messages=[{"role": "user", "content": "Hi"}], max_tokens=2
        )
        assert chat.model == "law"
        response = client.responses.create(model="law", input="Hi", max_output_tokens=2)
        assert response.model == "law"
        with pytest.raises(
            openai.NotFoundError, match=r"no model 'nom' here: .*'tiny', .*law, org/sql-lora"
        ):
            client.completions.create(model="nom", prompt="x", max_tokens=1)


# --- gRPC -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ar", "prompt_lookup", "draft_model"])
def test_grpc_generates_with_an_adapter(
    method: str, server: RpcServer, truth: dict[str, list[int]]
) -> None:
    with Client(server.address) as client:
        assert list(client.get_model().adapters) == list(NAMES[1:])
        runs = [
            client.generate(PROMPT, PARAMS, SpeculationConfig(method=method), adapter=name)
            for name in NAMES
        ]  # side by side
        for name, run in zip(NAMES, runs, strict=True):
            assert [token for part in run for token in part.token_ids] == truth[name], name
        with pytest.raises(
            InvalidArgument, match=r"adapter: got 'x', .*law, org/sql-lora, or none"
        ):
            client.complete(PROMPT, PARAMS, adapter="x")


def test_clients_verify_with_an_adapter(server: RpcServer, truth: dict[str, list[int]]) -> None:
    """Drafts of a client, over unary calls, a stream, and on a device in each of its modes."""
    with Client(server.address) as client:
        session = client.open_session(PROMPT, PARAMS, adapter="law")
        while session.finish_reason is None:
            session.verify()
        assert session.token_ids[len(PROMPT) :] == truth["law"]
        with pytest.raises(InvalidArgument, match="adapter: got 'x'"):
            client.open_session(PROMPT, PARAMS, adapter="x")

    async def stream() -> list[int]:
        async with AsyncClient(server.address) as client:
            session = await client.open_session(PROMPT, PARAMS, adapter="org/sql-lora")
            while session.finish_reason is None:
                await session.verify()
            return session.token_ids[len(PROMPT) :]

    assert asyncio.run(stream()) == truth["org/sql-lora"]
    for mode in (Mode.DEVICE, Mode.SERVER, Mode.AR):
        with DeviceClient([server.address], speculation=LOOKUP, modes=(mode,)) as device:
            for name in NAMES:
                assert device.complete(PROMPT, PARAMS, name).token_ids == truth[name], (mode, name)
            with pytest.raises(InvalidArgument, match="adapter: got 'x'"):
                device.complete(PROMPT, PARAMS, "x")


def test_a_session_goes_on_only_where_its_adapter_is(
    base: Path, adapters: dict[str, Path], server: RpcServer, truth: dict[str, list[int]]
) -> None:
    """On the same adapter under any name's replica; not on another one, nor without it."""
    with Client(server.address) as client:
        session = client.open_session(PROMPT, PARAMS, adapter="law")
        for _ in range(5):
            session.verify()
        so_far, own = session.token_ids, session.transcript.fingerprint
        session.close()
    assert own != client_fingerprint(server)

    def go_on(others: dict[str, Path]) -> list[int]:
        thread = thread_over(base, others)
        try:
            with serving(engine=thread, model=MODEL) as there, Client(there.address) as client:
                session = client.open_session(so_far, PARAMS, fingerprint=own, adapter="law")
                while len(session.token_ids) < len(PROMPT) + 24:
                    session.verify()
                session.close()
                return session.token_ids[len(PROMPT) :]
        finally:
            thread.stop()

    assert go_on({"law": adapters["law"]}) == truth["law"]
    with pytest.raises(InvalidArgument, match="adapter: got 'law', expected one of other, or none"):
        go_on({"other": adapters["law"]})
    with pytest.raises(NumericsMismatch, match="they differ in the weights"):
        go_on({"law": adapters["org/sql-lora"]})


def client_fingerprint(server: RpcServer) -> str:
    with Client(server.address) as client:
        return client.get_model().fingerprint


def test_a_gateway_knows_which_replica_has_an_adapter() -> None:
    endpoint = Endpoint("host:1", 1, "r", "base", with_adapters=("law", "sql"))
    assert all(endpoint.has(each) for each in ("", "base", "law", "sql"))
    assert not endpoint.has("other")


def test_a_target_process_serves_adapters(
    base: Path, adapters: dict[str, Path], truth: dict[str, list[int]]
) -> None:
    with TargetProcess(base, adapters=adapters) as process, Client(process.address) as client:
        for name in NAMES:
            done = client.complete(PROMPT, PARAMS, LOOKUP, adapter=name)
            assert list(done.token_ids) == truth[name]


# --- configuration --------------------------------------------------------------------------------


def test_a_target_replica_loads_the_adapters_of_its_configuration(
    base: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(adapters["law"].parent)
    config = parse_config(
        {
            "model": {"target": str(base), "adapters": {"law": "law"}},
            "topology": "colocated",
            "speculation": {"method": "prompt_lookup"},
        }
    )
    monkeypatch.chdir(tmp_path)  # replicas have another working folder
    assert config.model.adapters == {"law": str(adapters["law"])}
    assert _load(config).target.adapters == ("law",)


@pytest.mark.parametrize(
    ("model", "error", "message"),
    [
        ({"adapters": {"a": "/nowhere"}}, ModelNotFound, "model.adapters.a: folder '/nowhere' doe"),
        ({"adapters": {"a b": "/tmp"}}, InvalidArgument, "model.adapters.a b"),
        ({"adapters": {"a": ""}}, InvalidArgument, "model.adapters.a: got ''"),
        ({"adapters": ["a"]}, InvalidArgument, "model.adapters: got ['a']"),
        ({"adapters": {"m": "/tmp"}, "name": "m"}, InvalidArgument, "model.adapters.m: got '/tmp'"),
    ],
)
def test_wrong_adapters_of_a_configuration(
    model: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        parse_config({"model": model})


def test_a_target_replica_loads_a_draft_model_for_an_adapter(
    base: Path, adapters: dict[str, Path], truth: dict[str, list[int]], tmp_path: Path
) -> None:
    merged = merge(base, adapters["law"], tmp_path / "merged")
    model = {
        "target": str(base), "drafter": str(base), "adapters": {"law": str(adapters["law"])},
        "kv_tokens": 2048,
    }  # fmt: skip
    speculation = SpeculationConfig(method="draft_model", length="fixed", num_speculative_tokens=3)
    rounds = []
    for own in ({"law": str(merged)}, {}):
        args = {"model": model | {"adapter_drafters": own}, "topology": "colocated"}
        config = parse_config(args)
        assert config.model.adapter_drafters == own
        engine = _load(config)
        sessions = [
            engine.submit(Request(PROMPT, PARAMS, speculation, adapter=name))
            for name in ("", "law")
        ]
        while engine.has_work:
            engine.step()
        assert [each.output_ids for each in sessions] == [truth[""], truth["law"]]
        rounds.append([each.stats.num_rounds for each in sessions])
    (base_rounds, with_own), (same, with_base) = rounds
    assert base_rounds == same
    assert with_own < with_base - 2, rounds  # drafts in 8 bits are right most of the time


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "actors"}, "model.adapter_drafters: got ['law'], expected none, or topology"),
        ({"target": "smollm2"}, "model.adapter_drafters: got ['law'], expected none, or topology"),
        ({"adapters": {}}, "model.adapter_drafters.law: got 'demo-drafter', expected the name of"),
        ({"adapter_drafters": {"law": ""}}, "model.adapter_drafters.law: got ''"),
    ],
)
def test_draft_models_of_adapters_that_do_not_fit(
    changes: dict[str, object], message: str, adapters: dict[str, Path]
) -> None:
    model: dict[str, object] = {
        "adapters": {"law": str(adapters["law"])}, "adapter_drafters": {"law": "demo-drafter"},
    }  # fmt: skip
    args = {"topology": changes.pop("topology", "colocated"), "model": model | changes}
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        parse_config({**args, "speculation": {"method": "prompt_lookup"}})


def test_adapters_are_for_our_own_engine(adapters: dict[str, Path]) -> None:
    model = {"target": "smollm2", "adapters": {"law": str(adapters["law"])}}
    args = {"engine": "vllm", "topology": "colocated", "model": model}
    with pytest.raises(InvalidArgument, match=r"model.adapters: got \['law'\], expected none with"):
        parse_config(args)
