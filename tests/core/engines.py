"""Engines over the small random model, with everything that a test needs to inspect."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.drafters.draft_model import DraftModel
from paceline.engine import Engine, EngineLimits
from paceline.lengths.base import LengthContext
from paceline.methods import METHODS, Method
from paceline.models.heads import HeadLibrary
from paceline.models.llama import LlamaRunner
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.target import ModelTarget
from paceline.tokenizer import load_tokenizer
from tests.fakes import WITH_FAKES
from tests.heads import untrained_heads
from tests.masked import masked_drafters

# Every method that promises AR's tokens or AR's law; the small engine has all that they need.
LOCAL_METHODS = tuple(name for name, method in METHODS.items() if method.lossless)


def has_tokens_of_ar(method: str, params: SamplingParams) -> bool:
    """Whether a method's tokens, not only their law, are those of AR."""
    chosen = METHODS[method]
    return chosen.lossless and (params.temperature == 0 or chosen.acceptance == "coupled")


class WatchedEngine(Engine):
    """An engine that remembers the ids of all sessions it ever had."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.session_ids: set[str] = set()

    def submit(self, *arguments: Any, **options: Any) -> Session:
        session = super().submit(*arguments, **options)
        self.session_ids.add(session.session_id)
        return session


def find_session(root: object, session_ids: set[str]) -> str | None:
    """Where ``root`` still holds a session, or a container has one's id as a key or element."""
    seen: set[int] = set()
    left: list[tuple[str, object]] = [(type(root).__name__, root)]
    while left:
        place, value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Session) or (isinstance(value, str) and value in session_ids):
            return place
        if isinstance(value, Mapping):
            left += [(f"{place}[{key!r}]", item) for key, item in value.items()]
            left += [(f"{place} (key)", key) for key in value if isinstance(key, str | tuple)]
        elif isinstance(value, list | tuple | set | frozenset | deque):
            left += [(f"{place}[...]", item) for item in value if not isinstance(item, int | float)]
        elif type(value).__module__.partition(".")[0] in ("paceline", "tests"):
            left += [(f"{place}.{name}", item) for name, item in _attributes(value)]
    return None


def _attributes(value: object) -> Iterator[tuple[str, object]]:
    yield from getattr(value, "__dict__", {}).items()
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                yield name, getattr(value, name)


@dataclass
class Small:
    """An engine over a random target, whose drafter is the same model: right at temperature 0."""

    engine: WatchedEngine
    target: LlamaRunner
    drafter: LlamaRunner

    def assert_nothing_is_left(self) -> None:
        """No session, no KV entry, no drafter state: what an idle engine looks like."""
        engine = self.engine
        assert not engine.sessions
        assert not engine.has_work
        assert engine.scheduler.is_idle
        assert not engine.drafting._asked
        for name in ("_handlers", "_num_sent"):
            assert not getattr(engine.events, name), name
        assert self.target.num_free == self.target.kv_capacity
        assert self.drafter.num_free == self.drafter.kv_capacity
        for name, drafter in engine.drafters.items():
            assert not getattr(drafter, "_states", None), name
            place = find_session(drafter, engine.session_ids)
            assert place is None, f"{name}: {place}"


def small_engine(
    folder: Path,
    *,
    kv_tokens: int = 4000,
    limits: EngineLimits | None = None,
    drafters: Mapping[str, Drafter] | None = None,
    catalogue: Mapping[str, Method] = WITH_FAKES,
    eos_token_ids: Sequence[int] = (),
) -> Small:
    target = LlamaRunner(folder, kv_tokens=kv_tokens)
    drafter = LlamaRunner(folder, kv_tokens=kv_tokens)
    engine = WatchedEngine(
        ModelTarget(target),
        {
            "draft_model": DraftModel(drafter),
            **masked_drafters(target.vocab_size),
            **(drafters or {}),
        },
        tokenizer=load_tokenizer(folder),
        eos_token_ids=eos_token_ids,
        limits=limits,
        catalogue=catalogue,
        length_context=LengthContext(heads=untrained_heads(folder)),
        heads=HeadLibrary(untrained_heads(folder), folder, target),
    )
    return Small(engine, target, drafter)


class Reference:
    """What AR generates, computed once for each prompt and parameters, each alone."""

    def __init__(self, folder: Path) -> None:
        runner = LlamaRunner(folder, kv_tokens=4000)
        self._engine = Engine(ModelTarget(runner), tokenizer=load_tokenizer(folder))
        self._known: dict[str, list[int]] = {}

    def __call__(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        key = repr((list(prompt), params))
        if key not in self._known:
            ar = SpeculationConfig(method="ar")
            self._known[key] = self._engine.generate([prompt], params, ar)[0].output_ids
        return self._known[key]
