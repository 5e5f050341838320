"""`engine: diffusion`: what it serves is what the library's denoise loop writes, by every road."""

from __future__ import annotations

import asyncio
import atexit
import json
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from safetensors.torch import load_file, save_file

from paceline.config import SpeculationConfig
from paceline.demo import DIFFUSION_DIR, DRAFTER_DIR, TARGET_DIR
from paceline.deployments.config import (
    CONFIGS_DIR,
    parse_config,
    read_config_file,
)
from paceline.deployments.engines.diffusion import DiffusionEngine
from paceline.deployments.metrics import METRICS, Exporter
from paceline.diffusion import SCHEDULES, Denoiser, DiffusionModel, make_schedule
from paceline.diffusion.filter import FILE as FILTER
from paceline.diffusion.model import Blocks
from paceline.engine import EngineThread, RoundEvent
from paceline.errors import (
    FailedPrecondition,
    InvalidArgument,
    PacelineError,
    ResourceExhausted,
)
from paceline.methods import DIFFUSION_METHODS, METHODS, VLLM_METHODS
from paceline.request import Request
from paceline.rpc.client import AsyncClient, Client
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.tenants import Tenants
from paceline.sampling import SamplingParams
from paceline.session import Session
from tests.deployments.conftest import SMALL, App, eventually, free_port
from tests.deployments.http_serving import http_serving
from tests.deployments.test_gateways import ALICE, Gateways, clients, write_tenants
from tests.deployments.test_gateways import eventually as soon
from tests.masked import HEADS, LAYERS, SIZE, masked_model

COPY, CODE, DEF = "copy: g p e ->", "import os\nimport ", "def fib(n):\n    "
PROSE = "Once upon a time"
STATIC = SpeculationConfig(method="static")
ARGS: dict[str, Any] = {
    "engine": "diffusion", "topology": "colocated", "speculation": {"method": "static"},
}  # fmt: skip
MODEL = ModelInfo(name="masked", default_speculation=STATIC)


@cache
def folder() -> Path:
    """The model that ships with two narrow random layers instead of its own, made once.

    A forward takes a tenth of the time. Where a test needs words that the model has learnt, it asks
    for the one that ships.
    """
    made = Path(tempfile.mkdtemp(prefix="paceline-masked-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DIFFUSION_DIR / name, made)
    raw = json.loads((DIFFUSION_DIR / "config.json").read_text())
    random = masked_model(raw["vocab_size"], Blocks.from_folder(DIFFUSION_DIR))
    save_file(random.weights, made / "model.safetensors")
    sizes = {
        "hidden_size": SIZE, "intermediate_size": 2 * SIZE, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": SIZE // HEADS,
    }  # fmt: skip
    (made / "config.json").write_text(json.dumps({**raw, **sizes}))
    return made


@cache
def model(path: Path | None = None) -> DiffusionModel:
    return DiffusionModel(path or folder())


def ids(prompt: str) -> list[int]:
    return model().tokenizer.encode(prompt, False)


WRITTEN: dict[str, tuple[list[int], str, Denoiser]] = {}
"""What :func:`library` has written, by its arguments."""


def library(
    prompt: str,
    params: SamplingParams,
    schedule: str = "static",
    path: Path | None = None,
    **knobs: Any,
) -> tuple[list[int], str, Denoiser]:
    """Tokens and text that the library's own loop writes, the end token left out, and the loop.

    Args:
        path: of the model; default: the small random one.
    """
    arguments = repr((prompt, params, schedule, path, knobs))
    if arguments in WRITTEN:
        return WRITTEN[arguments]
    stops = [*params.stop_token_ids, *(() if params.ignore_eos else model().end_ids)]
    denoiser = Denoiser(
        model(path).runner, make_schedule(schedule, **knobs), frozenset(stops), params.temperature,
        params.seed,
    )  # fmt: skip
    tokens = [t for block in denoiser.decode(ids(prompt), params.max_tokens) for t in block]
    WRITTEN[arguments] = tokens, model().tokenizer.decode(tokens), denoiser
    return WRITTEN[arguments]


def without_end(token_ids: Sequence[int]) -> list[int]:
    return [token for token in token_ids if token not in model().end_ids]


def engine_of(path: Path | None = None, **changes: Any) -> DiffusionEngine:
    served = {"target": str(path or folder())}
    return DiffusionEngine(parse_config({**ARGS, "model": served, **changes}))


@pytest.fixture
def engine() -> Iterator[DiffusionEngine]:
    made = engine_of()
    yield made
    assert not made.sessions, "sessions leaked"
    assert made.target.num_free == made.target.kv_capacity
    made.stop()


@pytest.fixture(scope="module")
def refusing() -> Iterator[DiffusionEngine]:
    """For requests that are refused: of those nothing is left, so one engine is enough for all."""
    made = engine_of()
    yield made
    assert not made.sessions, "sessions leaked"
    assert made.target.num_free == made.target.kv_capacity
    made.stop()


class Running:
    """A session of an engine on this event loop, and its events.

    Args:
        log: gets the session's name with each event.
    """

    def __init__(
        self,
        engine: DiffusionEngine,
        request: Request,
        name: str = "",
        log: list[str] | None = None,
    ) -> None:
        self.events: list[RoundEvent] = []
        self._ended = asyncio.Event()

        def listen(event: RoundEvent) -> None:
            self.events.append(event)
            if log is not None:
                log.append(name)
            if event.finished:
                self._ended.set()

        self.session: Session = engine.submit(request, listen).result()

    async def end(self) -> Session:
        async with asyncio.timeout(60):
            await self._ended.wait()
        if self.session.error is not None:
            raise self.session.error
        return self.session


def asking(prompt: str, params: SamplingParams, speculation: Any = None, **more: Any) -> Request:
    return Request(ids(prompt), params, speculation, **more)


# --- the text -------------------------------------------------------------------------------------


def test_the_catalogue_lists_every_schedule_and_says_which_are_static() -> None:
    listed = {method.name: method.lossless for method in DIFFUSION_METHODS.values()}
    assert listed == {name: schedule.lossless for name, schedule in SCHEDULES.items()}
    assert not DIFFUSION_METHODS.keys() & (METHODS.keys() | VLLM_METHODS.keys())
    for name, schedule in SCHEDULES.items():
        assert schedule.paper in DIFFUSION_METHODS[name].paper


@pytest.mark.nightly
async def test_every_schedule_beside_all_others_writes_the_librarys_text(
    engine: DiffusionEngine,
) -> None:
    """Ten sessions at once, one for each schedule, above temperature 0 and at it."""
    cases = [
        (name, SamplingParams(max_tokens=40, temperature=i % 2, seed=i, ignore_eos=i % 3 == 0))
        for i, name in enumerate(SCHEDULES)
    ]
    running = [
        Running(engine, asking(CODE, p, SpeculationConfig(method=name, allow_lossy=True)))
        for name, p in cases
    ]
    for (name, params), one in zip(cases, running, strict=True):
        session = await one.end()
        tokens, text, denoiser = library(CODE, params, name)
        assert without_end(session.output_ids) == without_end(tokens), name
        assert session.text == text, name
        assert session.stats.num_target_forwards == denoiser.counts.forwards, name
        assert session.stats.num_rounds == denoiser.counts.blocks == len(one.events), name
        assert "".join(event.text for event in one.events) == text, name


async def test_freedave_serves_the_static_text_in_fewer_forwards(engine: DiffusionEngine) -> None:
    for temperature in (0.0, 1.0):
        params = SamplingParams(max_tokens=40, temperature=temperature, seed=5)
        fast = SpeculationConfig(method="freedave", schedule_knobs=("draft_steps=4",))
        first, second = (Running(engine, asking(DEF, params, each)) for each in (fast, STATIC))
        quick, slow = await first.end(), await second.end()
        assert quick.output_ids == slow.output_ids
        assert quick.text == slow.text
        assert quick.stats.num_target_forwards < slow.stats.num_target_forwards
        assert quick.stats.mean_accepted_length > slow.stats.mean_accepted_length


async def test_knobs_come_from_the_request_and_else_from_the_deployment() -> None:
    own = engine_of(speculation={"method": "static", "schedule_knobs": ["tokens_per_step=4"]})
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    given = SpeculationConfig(schedule_knobs=("tokens_per_step=2",))  # the deployment's schedule
    for speculation, count in ((None, 4), (given, 2), (STATIC, 1)):
        session = await Running(own, asking(DEF, params, speculation)).end()
        tokens, _, denoiser = library(DEF, params, tokens_per_step=count)
        assert session.method_name == "static"
        assert session.output_ids == tokens
        assert session.stats.num_target_forwards == denoiser.counts.forwards
    own.stop()


async def test_sessions_take_turns_by_forwards(engine: DiffusionEngine) -> None:
    """A short text does not wait for the end of a long one, nor for the end of its block."""
    log: list[str] = []
    long = SamplingParams(max_tokens=90, ignore_eos=True)
    first = Running(engine, asking(CODE, long), "long", log)
    second = Running(engine, asking(COPY, SamplingParams(max_tokens=8)), "short", log)
    short = await second.end()
    assert log == ["short"]
    # In its few turns the other one has had as many, and one more under way.
    turns = first.session.stats.num_target_forwards
    assert abs(turns - short.stats.num_target_forwards) <= 1
    assert len((await first.end()).output_ids) == 90
    assert log == ["short", "long", "long", "long"]


async def test_a_text_comes_block_by_block(engine: DiffusionEngine) -> None:
    prompt = ids(CODE)
    running = Running(engine, asking(CODE, SamplingParams(max_tokens=70, ignore_eos=True)))
    await running.end()
    sizes = [len(event.token_ids) for event in running.events]
    assert sizes == [32 - len(prompt), 32, 70 - 64 + len(prompt)]
    assert [event.finished for event in running.events] == [False, False, True]
    assert {event.num_accepted for event in running.events} == {0}


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_text_goes_on_behind_committed_blocks(
    engine: DiffusionEngine, temperature: float
) -> None:
    params = SamplingParams(max_tokens=90, temperature=temperature, seed=3, ignore_eos=True)
    whole = await Running(engine, asking(CODE, params)).end()
    block = 32 - len(ids(CODE))
    for count in (block, block + 32):
        running = Running(engine, asking(CODE, params, committed=whole.output_ids[:count]))
        rest = await running.end()
        assert rest.output_ids == whole.output_ids
        told = [token for event in running.events for token in event.token_ids]
        assert told == whole.output_ids[count:]
        assert rest.stats.num_tokens == 90 - count
    with pytest.raises(InvalidArgument, match=r"committed_token_ids.*whole blocks"):
        Running(engine, asking(CODE, params, committed=whole.output_ids[: block + 1]))


# --- the end of a text ----------------------------------------------------------------------------


async def test_a_text_ends_at_its_end_a_token_a_string_or_the_limit(
    engine: DiffusionEngine,
) -> None:
    def params(**more: Any) -> SamplingParams:
        return SamplingParams(max_tokens=60, **more)

    trained = engine_of(DIFFUSION_DIR)
    ended = await Running(trained, asking(COPY, params())).end()
    assert (ended.text, ended.finish_reason, ended.stop_cause) == (" g p e", "stop", None)
    assert ended.output_ids[-1] in model().end_ids
    _, _, denoiser = library(COPY, params(), path=DIFFUSION_DIR)
    assert ended.stats.num_target_forwards == denoiser.counts.forwards  # none behind the end
    trained.stop()

    whole, text, _ = library(DEF, params(ignore_eos=True))
    limit = await Running(engine, asking(DEF, params(ignore_eos=True))).end()
    assert (limit.output_ids, limit.finish_reason) == (whole, "length")

    stop = text[20:26]
    cut = await Running(engine, asking(DEF, params(ignore_eos=True, stop=(stop,)))).end()
    assert cut.text == text[: text.index(stop)]
    assert (cut.finish_reason, cut.stop_cause) == ("stop", stop)
    assert cut.output_ids == whole[: len(cut.output_ids)]

    token = whole[10]
    named = await Running(engine, asking(DEF, params(stop_token_ids=(token,)))).end()
    until, _, denoiser = library(DEF, params(stop_token_ids=(token,)))
    assert named.output_ids == [*until, token]
    assert named.stats.num_target_forwards == denoiser.counts.forwards
    assert (named.finish_reason, named.stop_cause) == ("stop", token)


async def test_a_stream_holds_back_what_may_become_a_stop_string(engine: DiffusionEngine) -> None:
    params = SamplingParams(max_tokens=70, temperature=1.0, seed=1, ignore_eos=True)
    whole = Running(engine, asking(PROSE, params))
    text = (await whole.end()).text
    # It begins in the first block, which is not the first place of its two characters.
    block = len(whole.events[0].text)
    stop = text[block - 2 : block + 12]
    assert text.index(stop) == block - 2
    held = Running(engine, asking(PROSE, replace(params, stop=(stop,))))
    assert (await held.end()).text == text[: block - 2]
    assert [event.text for event in held.events] == [text[: block - 2], ""]


async def test_a_cancelled_session_ends_and_the_others_go_on(engine: DiffusionEngine) -> None:
    params = SamplingParams(max_tokens=90, ignore_eos=True)
    first, second = (Running(engine, asking(CODE, params)) for _ in range(2))
    while first.session.stats.num_target_forwards < 3:  # noqa: ASYNC110  # a count sets no event
        await asyncio.sleep(0)
    assert engine.cancel(first.session.session_id).result()
    assert not engine.cancel("unknown").result()
    assert (await first.end()).finish_reason == "cancelled"
    forwards = first.session.stats.num_target_forwards
    assert (await second.end()).output_ids == library(CODE, params)[0]
    assert first.session.stats.num_target_forwards == forwards < 30
    assert engine.take_counters().finished == {"cancelled": 1, "length": 1}


async def test_a_session_that_is_cancelled_at_once_leaves_nothing(engine: DiffusionEngine) -> None:
    running = Running(engine, asking(CODE, SamplingParams(max_tokens=90)))
    engine.cancel(running.session.session_id)
    assert (await running.end()).finish_reason == "cancelled"
    assert not engine.sessions


async def test_places_and_the_queue_are_limited() -> None:
    limits = {"max_sessions": 1, "max_waiting": 1}
    small = engine_of(target={"limits": limits})
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    first, second = (Running(small, asking(CODE, params)) for _ in range(2))
    with pytest.raises(ResourceExhausted):
        Running(small, asking(CODE, params))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (small.load.num_running, small.load.num_waiting) == (1, 1)
    await first.end()
    assert second.session.stats.num_rounds == 0
    assert (await second.end()).output_ids == first.session.output_ids
    admitted, done = second.session.stats.admitted_at, first.session.stats.finished_at
    assert admitted is not None and done is not None and admitted >= done
    small.stop()


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logprobs": 1}, "logprobs: got 1, expected none with engine diffusion"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"top_k": 4}, "top_k: got 4, expected 0 with engine diffusion"),
        ({"top_p": 0.5}, "top_p: got 0.5, expected 1.0"),
        ({"min_p": 0.1}, "min_p"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"presence_penalty": 1.0}, "presence_penalty"),
        ({"frequency_penalty": 1.0}, "frequency_penalty"),
        ({"logit_bias": {5: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": (5,)}, "allowed_token_ids"),
        ({"min_tokens": 2}, "min_tokens"),
        ({"json_schema": "{}"}, "json_schema"),
        ({"regex": "a+"}, "regex"),
        ({"grammar": 'start: "a"'}, "grammar"),
    ],
)
async def test_parameters_that_the_loop_does_not_read_are_refused(
    refusing: DiffusionEngine, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Running(refusing, asking(CODE, SamplingParams(max_tokens=4, **changes)))
    assert message in str(caught.value)
    assert not refusing.sessions


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"priority": 3}, "priority"),
        ({"prediction": (5, 6)}, "prediction"),
        ({"continuations": ((5, 6),)}, "continuations"),
        ({"adapter": "legal"}, "adapter"),
        ({"prompt_ids": ()}, "prompt"),
        ({"prompt_ids": [5] * 1024}, "prompt"),
        ({"prompt_ids": [5, 4096]}, "token_ids[1]"),
        ({"prompt_ids": [5, 1]}, "token_ids[1]"),  # the mask
        ({"committed": [-1]}, "token_ids[5]"),
    ],
)
async def test_requests_that_the_loop_cannot_run_are_refused(
    refusing: DiffusionEngine, changes: dict[str, Any], field: str
) -> None:
    params = SamplingParams(max_tokens=1 if "continuations" in changes else 4)
    with pytest.raises(InvalidArgument) as caught:
        Running(refusing, replace(asking(CODE, params), **changes))
    assert caught.value.field == field
    assert not refusing.sessions


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"method": "draft_model"}, "method: got 'draft_model', expected one of apd, confidence"),
        ({"method": "confidence"}, "method: got 'confidence', expected one that writes the text"),
        ({"method": "static", "sub_block_cache": True}, "sub_block_cache: got True"),
        (
            {"method": "freedave", "sub_block_cache": True, "allow_lossy": True},
            "sub_block_cache: got True, expected false with schedule freedave",
        ),
        ({"method": "static", "num_speculative_tokens": 4}, "num_speculative_tokens: got 4"),
        ({"method": "static", "acceptance": "coupled"}, "acceptance: got 'coupled'"),
        ({"method": "static", "length": "fixed"}, "length: got 'fixed'"),
        (
            {"method": "static", "schedule_knobs": ("threshold=0.5",)},
            "schedule_knobs.threshold: got '0.5', expected a knob of schedule static: tokens_per",
        ),
        (
            {"method": "static", "schedule_knobs": ("tokens_per_step=0",)},
            "schedule_knobs.tokens_per_step: got 0, expected at least 1",
        ),
        (
            {"method": "static", "schedule_knobs": ("tokens_per_step=x",)},
            "schedule_knobs.tokens_per_step: got 'x', expected a value of type int",
        ),
        ({"method": "static", "schedule_knobs": ("fast",)}, "schedule_knobs: got 'fast'"),
        (
            {"method": "sched", "allow_lossy": True, "schedule_knobs": ("rate=-1e9",)},
            "schedule_knobs.rate",
        ),
        (
            {"method": "remask", "allow_lossy": True, "schedule_knobs": (f"seed={2**80}",)},
            "schedule_knobs.seed",
        ),
    ],
)
async def test_wrong_schedules_name_the_field_the_value_and_what_is_allowed(
    refusing: DiffusionEngine, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Running(refusing, asking(CODE, SamplingParams(max_tokens=4), SpeculationConfig(**given)))
    assert message in str(caught.value)
    assert not refusing.sessions
    with pytest.raises(InvalidArgument) as caught:
        parse_config({**ARGS, "speculation": given})
    assert f"speculation.{message}" in str(caught.value)


async def test_a_request_names_no_files_but_those_of_the_deployment(tmp_path: Path) -> None:
    mine, other = tmp_path / "mine.safetensors", tmp_path / "other.safetensors"
    for path in (mine, other):
        save_file(load_file(DIFFUSION_DIR / FILTER), path)

    def asked(*knobs: str, method: str = "learn2pd") -> SpeculationConfig:
        return SpeculationConfig(method=method, allow_lossy=True, schedule_knobs=knobs or None)

    own = asked(f"filter={mine}")
    made = engine_of(DIFFUSION_DIR, speculation=own.overrides())
    params = SamplingParams(max_tokens=8)
    for fine in (None, own, asked(), asked("weight=0.5", "judge=drafter", method="apd")):
        await Running(made, asking(COPY, params, fine)).end()
    for bad in (asked(f"filter={other}"), asked(f"judge={TARGET_DIR}", method="apd")):
        with pytest.raises(InvalidArgument, match="a request names no files"):
            Running(made, asking(COPY, params, bad))
    made.stop()


# --- configuration --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topology": "actors"}, "topology: got 'actors', expected 'colocated'"),
        ({"model": {"drafter": str(DRAFTER_DIR)}}, "model.drafter"),
        ({"model": {"heads": "/heads"}}, "model.heads: got '/heads', expected null"),
        ({"model": {"target": str(TARGET_DIR)}}, "model.target"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype: got 'bfloat16', expected float32"),
        ({"model": {"device": "cuda"}}, "model.device: got 'cuda', expected auto or cpu"),
        ({"model": {"drafter_device": "cpu"}}, "model.drafter_device"),
        ({"model": {"kv_tokens": 4096}}, "model.kv_tokens: got 4096, expected null"),
        ({"model": {"batch_invariant": False}}, "model.batch_invariant"),
        ({"model": {"adapters": {"a": "/a"}}}, "model.adapters"),
        ({"drafter": {"method": "suffix_decoding"}}, "drafter.method"),
        ({"target": {"numerics": "portable"}}, "target.numerics"),
        ({"online": {"enabled": True}}, "online.enabled: got True, expected false with engine dif"),
        ({"direct": {"enabled": True}}, "direct.enabled: got True, expected false with engine dif"),
        ({"speculation": {"method": "prompt_lookup"}}, "speculation.method: got 'prompt_lookup'"),
    ],
)
def test_a_deployment_that_cannot_be_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_config({**ARGS, **changes})
    assert message in str(caught.value)


def test_a_schedule_belongs_to_this_engine() -> None:
    with pytest.raises(InvalidArgument, match="runs in a deployment with engine: diffusion"):
        parse_config({"speculation": {"method": "freedave"}})


@pytest.mark.parametrize("speculation", [{}, {"schedule_knobs": ["tokens_per_step=2"]}, None])
def test_the_default_is_the_model_that_ships_and_the_static_schedule(speculation: Any) -> None:
    args = {key: value for key, value in ARGS.items() if key != "speculation"}
    config = parse_config(args if speculation is None else {**args, "speculation": speculation})
    assert config.speculation.method == "static"
    assert config.target_folder == str(DIFFUSION_DIR)
    assert config.drafter_folder is None
    assert config.num_threads(num_cpus=8) == 1


# --- counters -------------------------------------------------------------------------------------


@pytest.mark.slow
async def test_counters_say_what_the_loop_did(engine: DiffusionEngine) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    fast = SpeculationConfig(method="freedave")
    sessions = [await Running(engine, asking(CODE, params, s)).end() for s in (STATIC, fast, fast)]
    loops = [library(CODE, params, s.method_name)[2].counts for s in sessions]
    counters = engine.take_counters()
    for name, mine in (("static", loops[:1]), ("freedave", loops[1:])):
        counts = counters.methods[name]
        assert counts.num_forwards == sum(each.forwards for each in mine)
        assert counts.num_rounds == sum(each.blocks for each in mine)
        assert counts.num_tokens == sum(each.tokens for each in mine)
        assert counts.num_draft_tokens == counts.num_accepted_tokens == 0
    forwards = sum(each.forwards for each in loops)
    assert engine.denoising == {
        "blocks": 6, "forwards": forwards, "tokens": 120, "tokens_per_forward": 120 / forwards,
    }  # fmt: skip
    assert counters.num_prompt_tokens == 3 * len(ids(CODE))
    assert len(counters.steps) >= forwards
    for ended in counters.requests:
        assert ended.first_token_seconds is not None and ended.queue_seconds is not None
        assert 0 <= ended.queue_seconds <= ended.first_token_seconds <= ended.seconds
        assert ended.seconds_per_token is not None and ended.seconds_per_token > 0


async def test_only_schedules_have_the_metrics_of_the_loop(
    engine: DiffusionEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await Running(engine, asking(COPY, SamplingParams(max_tokens=8))).end()
    counters = engine.take_counters()
    counters.methods["ar"] = counters.methods["static"].copy()
    told: dict[tuple[str, str], float] = {}
    monkeypatch.setattr(Exporter, "__init__", lambda self: None)
    monkeypatch.setattr(Exporter, "set", lambda self, *a, **k: None)
    monkeypatch.setattr(Exporter, "observe", lambda self, *a, **k: None)
    monkeypatch.setattr(
        Exporter, "total",
        lambda self, name, value, **tags: told.update({(name, tags.get("method", "")): value}),
    )  # fmt: skip
    Exporter().engine(counters)  # type: ignore[call-arg]
    mine = counters.methods["static"]
    assert told["denoising_forwards", "static"] == mine.num_forwards > 0
    assert told["denoising_blocks", "static"] == mine.num_rounds == 1
    assert told["generation_tokens", "static"] == mine.num_tokens
    assert ("rounds", "ar") in told
    assert ("denoising_forwards", "ar") not in told
    assert {"denoising_forwards", "denoising_blocks"} <= {metric.name for metric in METRICS}


# --- gRPC through gateways ------------------------------------------------------------------------


async def with_gateways(
    test: Callable[[Gateways, AsyncClient], Awaitable[None]],
    *engines: DiffusionEngine,
    token: str | None = None,
    **options: Any,
) -> None:
    serving = cast("list[EngineThread]", list(engines))
    async with Gateways(serving, **options) as gateways, clients(gateways, token) as [client]:
        await test(gateways, client)
        assert await gateways.idle()


async def test_grpc_serves_the_librarys_text_to_several_at_once(engine: DiffusionEngine) -> None:
    async def test(gateways: Gateways, client: AsyncClient) -> None:
        info = await client.get_model()
        assert sorted(SCHEDULES) == list(info.methods)
        assert info.context_length == 1024
        cases = [
            (prompt, SamplingParams(max_tokens=50, temperature=t, seed=7))
            for prompt in (COPY, CODE, DEF)
            for t in (0.0, 1.0)
        ]
        answers = await asyncio.gather(
            *(client.complete(prompt, params, STATIC) for prompt, params in cases)
        )
        for (prompt, params), answer in zip(cases, answers, strict=True):
            tokens, text, denoiser = library(prompt, params)
            assert without_end(answer.token_ids) == tokens
            assert answer.text == text
            assert answer.statistics.num_target_forwards == denoiser.counts.forwards
            assert [r.round for r in answer.rounds] == list(range(1, denoiser.counts.blocks + 1))
            assert answer.last.prompt_length == len(ids(prompt))

    await with_gateways(test, engine)


async def test_grpc_refuses_with_the_fields_name(engine: DiffusionEngine) -> None:
    async def test(gateways: Gateways, client: AsyncClient) -> None:
        for bad in (
            SamplingParams(logprobs=2), SamplingParams(regex="a+"), SamplingParams(top_k=3),
        ):  # fmt: skip
            with pytest.raises(InvalidArgument, match="with engine diffusion"):
                await client.complete(CODE, bad, STATIC)
        with pytest.raises(InvalidArgument, match="method"):
            await client.complete(CODE, None, SpeculationConfig(method="draft_model"))
        with pytest.raises(PacelineError, match="predict"):
            await client.complete(CODE, None, prediction="os")
        with pytest.raises(FailedPrecondition, match="through GenerateService"):
            await client.open_session(ids(CODE), SamplingParams())

    await with_gateways(test, engine)


async def test_a_client_that_leaves_ends_its_session(engine: DiffusionEngine) -> None:
    async def test(gateways: Gateways, client: AsyncClient) -> None:
        params = SamplingParams(max_tokens=900, ignore_eos=True)
        stream = client.generate(CODE, params, STATIC)
        first = await anext(aiter(stream))
        assert len(first.token_ids) == 32 - len(ids(CODE))
        assert len(engine.sessions) == 1
        stream.cancel()
        assert await soon(lambda: not engine.sessions)

    await with_gateways(test, engine)


async def test_a_tenant_pays_for_the_prompt_and_the_tokens(
    engine: DiffusionEngine, tmp_path: Path
) -> None:
    path = write_tenants(tmp_path / "tenants.yaml", alice={"tokens_per_minute": 60})
    Tenants(path)

    async def test(gateways: Gateways, client: AsyncClient) -> None:
        answer = await client.complete(DEF, SamplingParams(max_tokens=40, ignore_eos=True), STATIC)
        used = sum(
            tokens for gate in gateways.gates for _, _, tokens in gate.usage().values()
        )  # fmt: skip
        assert used == len(ids(DEF)) + len(answer.token_ids) == 46

    await with_gateways(test, engine, token=ALICE, tenants=path)


async def test_a_text_survives_its_target(engine: DiffusionEngine) -> None:
    """The other target goes on behind the last block, with the same tokens."""
    other = engine_of()

    async def test(gateways: Gateways, client: AsyncClient) -> None:
        params = SamplingParams(max_tokens=120, temperature=1.0, seed=9, ignore_eos=True)
        tokens, text = [], ""
        async for part in client.generate(CODE, params, STATIC):
            if not tokens:
                taken = 0 if engine.sessions else 1
                await gateways.targets[taken].stop(0)
            tokens += part.token_ids
            text += part.text
        assert tokens == library(CODE, params)[0]
        assert text == library(CODE, params)[1]
        assert min(e.take_counters().num_prompt_tokens for e in (engine, other)) > 0

    await with_gateways(test, engine, other)
    other.stop()


# --- OpenAI's API ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[DiffusionEngine, openai.OpenAI]]:
    made = engine_of()
    serving = cast(EngineThread, made)
    with (
        http_serving(serving, MODEL) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield made, client
    made.stop()


@pytest.fixture
def sdk(served: tuple[DiffusionEngine, openai.OpenAI]) -> Iterator[openai.OpenAI]:
    engine, client = served
    yield client
    assert eventually(lambda: not engine.sessions), "sessions leaked"
    assert engine.target.num_free == engine.target.kv_capacity


def test_completions_and_their_streams(sdk: openai.OpenAI) -> None:
    params = SamplingParams(max_tokens=50, temperature=1.0, seed=4, ignore_eos=True)
    request: dict[str, Any] = {
        "model": "masked", "prompt": [CODE, DEF], "max_tokens": 50, "seed": 4,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }  # fmt: skip
    answer: Any = sdk.completions.create(**request)
    loops = [library(prompt, params) for prompt in (CODE, DEF)]
    assert [choice.token_ids for choice in answer.choices] == [tokens for tokens, _, _ in loops]
    assert [choice.text for choice in answer.choices] == [text for _, text, _ in loops]
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.completion_tokens == 100
    assert answer.usage.prompt_tokens == len(ids(CODE)) + len(ids(DEF))
    forwards = sum(denoiser.counts.forwards for _, _, denoiser in loops)
    assert answer.metrics == {
        "speculative_decoding": None,
        "denoising": {
            "num_blocks": 4, "num_forwards": forwards, "tokens_per_forward": 100 / forwards,
        },
    }  # fmt: skip

    chunks: list[Any] = list(
        sdk.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    for choice in answer.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        blocks = [len(c.token_ids) for c in mine if c.token_ids]
        first = 32 - len(ids((CODE, DEF)[choice.index]))
        assert blocks == [first, 50 - first]
    assert chunks[-1].usage == answer.usage
    assert chunks[-1].metrics == answer.metrics


def test_choices_have_the_seeds_behind_the_first(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(model="masked", prompt=DEF, max_tokens=30, seed=8, n=2)
    texts = [
        library(DEF, SamplingParams(max_tokens=30, temperature=1.0, seed=seed))[1]
        for seed in (8, 9)
    ]
    assert [choice.text for choice in answer.choices] == texts
    assert texts[0] != texts[1]
    # Without a seed each has one of 63 bits.
    assert sdk.completions.create(model="masked", prompt=DEF, max_tokens=4).choices[0]


def test_chats_and_their_streams(sdk: openai.OpenAI) -> None:
    text = library("User: copy: g p e ->\nAssistant:", SamplingParams(max_tokens=60))[1]
    stop = text[30:36]
    request: dict[str, Any] = {
        "model": "masked", "messages": [{"role": "user", "content": "copy: g p e ->"}],
        "max_tokens": 60, "temperature": 0, "stop": [stop],
        "extra_body": {"speculation": {"method": "freedave", "schedule_knobs": ["draft_steps=2"]}},
    }  # fmt: skip
    answer: Any = sdk.chat.completions.create(**request)
    assert answer.choices[0].message.content.strip() == text.partition(stop)[0].strip() != ""
    chunks: list[Any] = list(sdk.chat.completions.create(**request, stream=True))
    said = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert said == answer.choices[0].message.content
    assert answer.metrics["denoising"]["num_blocks"] >= 1


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("completion", {"logprobs": 2}, "logprobs"),
        ("completion", {"extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ("completion", {"extra_body": {"speculation": {"method": "ar"}}}, "method: got 'ar'"),
        ("completion", {"presence_penalty": 0.5}, "presence_penalty"),
        ("completion", {"extra_body": {"guided_regex": "a+"}}, "regex"),
        ("chat", {"response_format": {"type": "json_object"}}, "response_format"),
        ("chat", {"logprobs": True}, "logprobs"),
        ("chat", {"prediction": {"type": "content", "content": "a"}}, "predict"),
    ],
)
def test_http_refuses_what_the_loop_does_not_do(
    sdk: openai.OpenAI, kind: str, changes: dict[str, Any], message: str
) -> None:
    messages = [{"role": "user", "content": "x"}]
    asked: dict[str, Any] = {"messages": messages} if kind == "chat" else {"prompt": "x"}
    create: Any = sdk.chat.completions.create if kind == "chat" else sdk.completions.create
    with pytest.raises(openai.BadRequestError) as caught:
        create(model="masked", max_tokens=4, **asked, **changes)
    assert message in caught.value.message


# --- a deployment ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def app(ray_cluster: None) -> Iterator[App]:
    """The file that ships, under another name and ports."""
    from ray import serve

    from paceline.cluster import serving

    shipped = read_config_file(CONFIGS_DIR / "diffusion.yaml")
    changes = {"target": SMALL, "gateway": {**SMALL, "grpc_port": free_port(), "http_port": 0}}
    file = shipped.with_args(changes).model_copy(update={"name": "test-diffusion"})
    serving.deploy(file, lambda line: None)
    told = serving.describe(file.name)
    yield App(file.name, "colocated", told["gateway"], told["http"])
    serve.delete(file.name)


@pytest.mark.slow
@pytest.mark.serve
@pytest.mark.timeout(300)
def test_the_shipped_file_serves_the_librarys_text(app: App) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=5)
    tokens, text, static = library(CODE, params, path=DIFFUSION_DIR)
    _, _, freedave = library(CODE, params, "freedave", DIFFUSION_DIR)
    with Client(app.address, timeout=60) as client:
        assert client.get_model().default_method == "static"
        stream = list(client.generate(CODE, params))
        quick = client.complete(CODE, params, SpeculationConfig(method="freedave"))
        with pytest.raises(InvalidArgument, match="logprobs"):
            client.complete(CODE, SamplingParams(logprobs=1))
    assert without_end([t for part in stream for t in part.token_ids]) == tokens
    assert len([part for part in stream if part.token_ids]) == static.counts.blocks == 2
    assert without_end(quick.token_ids) == tokens
    assert quick.text == text
    assert quick.statistics.num_target_forwards == freedave.counts.forwards
    assert freedave.counts.forwards < static.counts.forwards

    with openai.OpenAI(base_url=f"{app.http}/v1", api_key="none", max_retries=0) as sdk:
        answer: Any = sdk.completions.create(model="paceline", prompt=CODE, max_tokens=40, seed=5)
    assert answer.choices[0].text == text
    assert answer.metrics["denoising"]["num_forwards"] == static.counts.forwards
    assert eventually(lambda: app.idle), app.describe()
    assert app.replica("target")["denoising"]["forwards"] == (
        2 * static.counts.forwards + freedave.counts.forwards
    )
    told = "ray_paceline_denoising_forwards_total"
    assert eventually(lambda: told in _metrics(app), 30), _metrics(app)


def _metrics(app: App) -> str:
    import urllib.request

    with urllib.request.urlopen(f"{app.http}/metrics", timeout=10) as answer:
        return str(answer.read().decode())
