"""The exactness promise on SmolLM2: which cases there are, and how one of them is checked.

A case is a method of the catalogue, a precision of the model, a batch size, a temperature and a
place: in one process, in actors (drafter and target behind gRPC), or from a device that drafts for
a target elsewhere. Whatever the case, the tokens are those of AR in one process.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

import pytest

from benchmarks.throughput import smollm2
from paceline.cache import cache_folder, locked
from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModel
from paceline.drafters.head import HeadDrafter
from paceline.engine import Engine, EngineLimits, EngineThread
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.gguf_folder import model_folder
from paceline.loading import load_runner, make_drafter
from paceline.masked_folder import MASKED_DRAFTERS
from paceline.methods import METHODS
from paceline.model_names import resolve_model
from paceline.models.llama import LlamaRunner
from paceline.request import Request
from paceline.rpc.client import Client
from paceline.rpc.device import DeviceClient, checked_speculation
from paceline.rpc.draft_service import DraftServicer
from paceline.rpc.generate_service import ModelInfo
from paceline.rpc.ladder import Mode
from paceline.rpc.mirrors import served_with
from paceline.rpc.reconnect import Patience
from paceline.rpc.remote_drafter import RemoteDrafter
from paceline.rpc.server import RpcServer
from paceline.sampling import SamplingParams
from paceline.session import SessionStatistics
from paceline.target import ModelTarget
from paceline.tokenizer import chat_template, eos_token_ids, load_tokenizer
from tests.chat.prompts import chat_prompts
from tests.heads import UntrainedHeads
from tests.rpc.serving import serving

PRECISIONS = ("q4_1", "q8_0", "bfloat16", "float32")
"""``q4_1`` is the file as it is; the others are loaded from its weights in bfloat16."""
BATCHES = (1, 8)
TEMPERATURES = (0.0, 0.8)
PLACES = ("process", "actors", "device")
LOSSLESS = tuple(
    name
    for name, method in METHODS.items()
    if method.lossless and method.drafter not in MASKED_DRAFTERS  # SmolLM2 has no such model
)
DEADLINE_S = 300.0
"""Of one request, on a machine that does much else."""


def speculation(name: str) -> SpeculationConfig:
    """A method with its defaults, always drafting: no controller may find that drafts do not pay.

    A method whose paper is about the length keeps its own controller.
    """
    own = METHODS[name].length
    return SpeculationConfig(method=name, length="fixed" if own == "goodput" else own)


def same_tokens_as_ar(name: str, temperature: float) -> bool:
    """True where a method promises AR's tokens; above 0 rejection rules promise its law."""
    return METHODS[name].acceptance == "coupled" or temperature == 0


def copies(name: str) -> bool:
    """Whether a method drafts without any model, where it finds something to copy."""
    method = METHODS[name]
    return not method.needs and "draft_model" not in (method.drafter, *method.uses)


@cache
def drafts_on_a_device(name: str) -> bool:
    """Whether a method can draft away from its target; the others are refused by name."""
    try:
        checked_speculation(speculation(name))
    except InvalidArgument:
        return False
    return True


def places_of(name: str) -> tuple[str, ...]:
    """Where a method can run."""
    return PLACES if drafts_on_a_device(name) else PLACES[:2]


class Case(NamedTuple):
    """What is compared with AR."""

    method: str
    precision: str
    batch: int
    temperature: float
    place: str

    def __str__(self) -> str:
        return f"{self.precision}-{self.place}-batch{self.batch}-t{self.temperature}-{self.method}"


def everyday_cases() -> list[Case]:
    """Each method once; every pair of precision, batch, temperature and place is among them.

    Methods that can run on a device and those that cannot are spread by themselves.
    """
    cases = []
    for places in (PLACES, PLACES[:2]):
        names = [name for name in LOSSLESS if places_of(name) == places]
        choices = itertools.product(TEMPERATURES, BATCHES, PRECISIONS, places)
        plan = _spread(list(choices), len(names))
        for name, (temperature, batch, precision, place) in zip(names, plan, strict=True):
            if not same_tokens_as_ar(name, temperature):
                temperature = 0.0  # where there is something to compare
            cases.append(Case(name, precision, batch, temperature, place))
    return cases


def _spread(
    choices: list[tuple[float, int, str, str]], count: int
) -> list[tuple[float, int, str, str]]:
    """``count`` of the choices; each next one has the pairs of values that were met least."""
    met: dict[tuple[object, object], int] = {}
    plan: list[tuple[float, int, str, str]] = []
    for _ in range(count):
        best = min(
            choices,
            key=lambda choice: (
                plan.count(choice),
                sum(met.get(pair, 0) for pair in itertools.combinations(choice, 2)),
            ),
        )
        plan.append(best)
        for pair in itertools.combinations(best, 2):
            met[pair] = met.get(pair, 0) + 1
    return plan


def all_cases() -> list[Case]:
    """The whole product, the file's own precision and the cheapest batch first."""
    return [
        Case(name, precision, batch, temperature, place)
        for precision in PRECISIONS
        for place in PLACES
        for batch in reversed(BATCHES)
        for temperature in TEMPERATURES
        for name in LOSSLESS
        if place in places_of(name)
    ]


def is_here() -> bool:
    """Whether there is a SmolLM2 on this machine; tests fetch nothing."""
    try:
        resolve_model("smollm2")
    except ModelNotFound:
        return False
    return True


class Answer(NamedTuple):
    """What a session ended with."""

    token_ids: list[int]
    finish_reason: str | None
    statistics: SessionStatistics

    def starts(self, num_tokens: int) -> tuple[list[int], str | None]:
        """Tokens and end of the same session with ``num_tokens`` at most."""
        cut = len(self.token_ids) > num_tokens
        return self.token_ids[:num_tokens], "length" if cut else self.finish_reason


class Chat:
    """SmolLM2, loaded once in each precision that is asked for, and AR's answers.

    The draft model is SmolLM2 once more, with its weights rounded to blocks of 4 bits a second
    time: right for two or three tokens in a row, then wrong. Draft heads are not trained.

    Args:
        cache: folder that keeps what is made of the model's file.
        num_prompts, num_tokens: of a case, at most.
    """

    def __init__(self, cache: Path, num_prompts: int, num_tokens: int) -> None:
        file = resolve_model("smollm2")
        self._cache = cache
        self.gguf = model_folder(file)
        self.tokenizer = load_tokenizer(file)
        self.eos_token_ids = eos_token_ids(file)
        self.num_tokens = num_tokens
        self.prompts = chat_prompts(self.tokenizer, chat_template(file), num_prompts)
        self._targets: dict[str, LlamaRunner] = {}
        self._heads: dict[str, UntrainedHeads] = {}
        self._expected: dict[tuple[str, float], list[Answer]] = {}
        self._device_drafters: list[DraftModel] = []

    # --- models -----------------------------------------------------------------------------------

    @cached_property
    def folder(self) -> Path:
        """The file's weights in bfloat16, as a model folder; made once."""
        self._cache.mkdir(parents=True, exist_ok=True)
        with locked(self._cache / "lock"):
            return smollm2("bfloat16", self._cache)

    @contextmanager
    def _own_cache(self) -> Iterator[None]:
        """Keep packed weights of models that only tests have out of the user's cache."""
        kernels, own = cache_folder("kernels"), self._cache / "paceline"
        own.mkdir(parents=True, exist_ok=True)
        with locked(self._cache / "lock"):
            if kernels.is_dir() and not (own / "kernels").exists():
                (own / "kernels").symlink_to(kernels)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PACELINE_CACHE_DIR", str(self._cache))
            yield

    def _load(self, precision: str, kv_tokens: int) -> LlamaRunner:
        if precision == "q4_1":
            runner = load_runner("smollm2", dtype="auto", kv_tokens=kv_tokens)
        else:
            folder = self.folder
            with self._own_cache():
                runner = load_runner(folder, dtype=precision, kv_tokens=kv_tokens)
        assert isinstance(runner, LlamaRunner)
        return runner

    def target(self, precision: str) -> LlamaRunner:
        """The target in a precision, with what earlier sessions left in its prefix cache."""
        if precision not in self._targets:
            self._targets[precision] = self._load(precision, kv_tokens=8192)
        return self._targets[precision]

    def heads(self, precision: str) -> UntrainedHeads:
        """Its draft heads."""
        if precision not in self._heads:
            folder = self._folder_of(precision)
            self._heads[precision] = UntrainedHeads(folder, self.target(precision))
        return self._heads[precision]

    def _folder_of(self, precision: str) -> Path:
        return self.gguf if precision == "q4_1" else self.folder

    @cached_property
    def drafter(self) -> LlamaRunner:
        """The draft model's weights and KV memory."""
        return self._load("q4_0", kv_tokens=16384)

    def device_drafters(self, count: int) -> list[DraftModel]:
        """``count`` draft models with memory of their own, over the same weights."""
        while len(self._device_drafters) < count:
            self._device_drafters.append(DraftModel(self._load("q4_0", kv_tokens=2048)))
        return self._device_drafters[:count]

    def engine(self, precision: str, batch: int, drafters: dict[str, Drafter]) -> Engine:
        """A fresh engine over a target."""
        return Engine(
            ModelTarget(self.target(precision)), drafters,
            tokenizer=self.tokenizer,
            eos_token_ids=self.eos_token_ids,
            limits=EngineLimits(max_sessions=batch),
            heads=self.heads(precision),
        )  # fmt: skip

    # --- what is asked, and what AR says ----------------------------------------------------------

    def params(self, temperature: float, num_tokens: int) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens)
            for seed in range(len(self.prompts))
        ]

    def expected(self, precision: str, temperature: float) -> list[Answer]:
        """AR's answers, computed together in one process."""
        key = precision, temperature
        if key not in self._expected:
            engine = self.engine(precision, 8, {})
            params = self.params(temperature, self.num_tokens)
            sessions = engine.generate(self.prompts, params, SpeculationConfig(method="ar"))
            self._expected[key] = [Answer(s.output_ids, s.finish_reason, s.stats) for s in sessions]
        return self._expected[key]

    def prediction(self, case: Case, prompt: int) -> list[int]:
        """For methods that read one: AR's answer, but for some tokens."""
        if not METHODS[case.method].reads_prediction:
            return []
        right = self.expected(case.precision, case.temperature)[prompt].token_ids
        return [0 if i % 11 == 7 else token for i, token in enumerate(right)]

    # --- places -----------------------------------------------------------------------------------

    def in_process(
        self, case: Case, prompts: Sequence[int], params: Sequence[SamplingParams]
    ) -> list[Answer]:
        engine = self.engine(case.precision, case.batch, {"draft_model": DraftModel(self.drafter)})
        sessions = [
            engine.submit(
                Request(
                    self.prompts[i],
                    params[i],
                    speculation(case.method),
                    prediction=self.prediction(case, i),
                )
            )
            for i in prompts
        ]
        while not all(session.finished for session in sessions):
            engine.step()
        for session in sessions:
            assert session.error is None, session.error
        return [Answer(s.output_ids, s.finish_reason, s.stats) for s in sessions]

    @contextmanager
    def _served(self, case: Case, drafters: dict[str, Drafter]) -> Iterator[RpcServer]:
        """A target replica."""
        thread = EngineThread(self.engine(case.precision, case.batch, drafters)).start()
        try:
            info = ModelInfo(name="smollm2", batch_invariant=True)
            with serving(engine=thread, model=info) as server:
                yield server
        finally:
            thread.stop()

    def hosted(self, name: str) -> Drafter | None:
        """What a drafter replica hosts for a method; None where only the target's process can."""
        method = METHODS[name]
        if served_with(method, "draft_model"):
            return DraftModel(self.drafter)
        if method.needs or method.drafter == "none":
            return None
        return make_drafter(method.drafter, self.gguf)[0]

    def in_actors(
        self, case: Case, prompts: Sequence[int], params: Sequence[SamplingParams]
    ) -> list[Answer]:
        method, hosted = METHODS[case.method], self.hosted(case.method)
        drafters: dict[str, Drafter] = {}
        drafts_from = ""
        with ExitStack() as stack:
            if hosted is not None:
                name = "draft_model" if served_with(method, "draft_model") else method.drafter
                vocab_size = self.target(case.precision).vocab_size
                servicer = DraftServicer(hosted, name=name, vocab_size=vocab_size)
                drafts_from = stack.enter_context(serving(drafter=servicer)).address
                remote = RemoteDrafter(drafts_from, vocab_size=vocab_size, deadline_s=DEADLINE_S)
                stack.callback(remote.stop)
                assert remote.wait_ready(30)
                drafters[method.drafter] = remote
            server = stack.enter_context(self._served(case, drafters))
            return self.over_grpc(server.address, case, prompts, params, drafts_from)

    def over_grpc(
        self,
        address: str,
        case: Case,
        prompts: Sequence[int],
        params: Sequence[SamplingParams],
        drafts_from: str = "",
    ) -> list[Answer]:
        """What a server answers.

        Args:
            drafts_from: the address of the drafter that it has to ask; empty: any.
        """
        config = speculation(case.method)

        def complete(i: int) -> Answer:
            done = client.complete(
                self.prompts[i], params[i], config, prediction=self.prediction(case, i)
            )
            assert not drafts_from or done.last.drafter_address == drafts_from
            return Answer(list(done.token_ids), done.finish_reason, done.statistics)

        with Client(address, timeout=DEADLINE_S) as client:
            return _at_a_time(case.batch, complete, prompts)

    def on_devices(
        self, case: Case, prompts: Sequence[int], params: Sequence[SamplingParams]
    ) -> list[Answer]:
        with self._served(case, {}) as server:
            return self.from_devices(server.address, case, prompts, params)

    def from_devices(
        self, address: str, case: Case, prompts: Sequence[int], params: Sequence[SamplingParams]
    ) -> list[Answer]:
        """What devices, as many as there are sessions at a time, get from a server."""
        devices: SimpleQueue[dict[str, Drafter]] = SimpleQueue()
        count = min(case.batch, len(prompts))
        for drafters in self._drafters_of_devices(case, count):
            devices.put(drafters)

        def complete(i: int) -> Answer:
            drafters = devices.get()
            try:
                with DeviceClient(
                    [address], drafters,
                    speculation=speculation(case.method),
                    tokenizer=self.tokenizer,
                    modes=(Mode.DEVICE,),
                    # A busy machine may leave the target's threads no time for half a minute.
                    patience=Patience(give_up=600.0),
                ) as client:  # fmt: skip
                    done = client.complete(self.prompts[i], params[i])
            finally:
                devices.put(drafters)
            return Answer(done.token_ids, done.finish_reason, done.statistics)

        return _at_a_time(case.batch, complete, prompts)

    def _drafters_of_devices(self, case: Case, count: int) -> list[dict[str, Drafter]]:
        method = METHODS[case.method]
        if method.head:  # each device has its own
            heads = self.heads(case.precision).copies(method.head, count)
            return [{method.drafter: HeadDrafter(each)} for each in heads]
        if copies(case.method):
            return [{} for _ in range(count)]
        return [{"draft_model": each} for each in self.device_drafters(count)]

    # --- the check --------------------------------------------------------------------------------

    def run(self, case: Case, prompts: Sequence[int], num_tokens: int) -> list[Answer]:
        """Answers to some of the prompts, by number."""
        places: dict[str, Callable[..., list[Answer]]] = {
            "process": self.in_process,
            "actors": self.in_actors,
            "device": self.on_devices,
        }
        return places[case.place](case, prompts, self.params(case.temperature, num_tokens))

    def check(self, case: Case, prompts: Sequence[int], num_tokens: int) -> list[Answer]:
        """Compare every token and every end with AR's, where the method promises them."""
        answers = self.run(case, prompts, num_tokens)
        self.compare(case, prompts, num_tokens, answers)
        if METHODS[case.method].drafter == "draft_model":
            assert sum(answer.statistics.num_drafted for answer in answers) > 0
        target = self.target(case.precision)
        assert target.num_free == target.kv_capacity, "KV memory leaked"
        return answers

    def compare(
        self, case: Case, prompts: Sequence[int], num_tokens: int, answers: Sequence[Answer]
    ) -> None:
        expected = self.expected(case.precision, case.temperature)
        for i, answer in zip(prompts, answers, strict=True):
            statistics = answer.statistics
            assert not statistics.drafter_lost
            assert statistics.drafter_failures == 0
            if same_tokens_as_ar(case.method, case.temperature):
                found = answer.token_ids, answer.finish_reason
                assert found == expected[i].starts(num_tokens), f"{case}, prompt {i}"
            else:
                assert answer.finish_reason in ("length", "stop")
                assert 0 < len(answer.token_ids) <= num_tokens


def _at_a_time(
    batch: int, complete: Callable[[int], Answer], prompts: Sequence[int]
) -> list[Answer]:
    with ThreadPoolExecutor(batch) as pool:
        return list(pool.map(complete, prompts))
