"""vLLM with Paceline's drafters has the tokens that vLLM has without."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.methods import METHODS, VLLM_METHODS
from paceline.request import Request
from paceline.sampling import SamplingParams
from tests.core.prompts import code_prompts
from tests.engines.conftest import HAS_VLLM, WITHOUT, DrafterProcess, running

if TYPE_CHECKING:
    from paceline.deployments.engines.local import LocalVllm

pytestmark = [pytest.mark.skipif(not HAS_VLLM, reason=WITHOUT), pytest.mark.timeout(900)]

NUM_PROMPTS = 64
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
EAGER: dict[str, Any] = {"enforce_eager": True, "max_model_len": 512}
CONFIG: dict[str, Any] = {"vllm": EAGER, "speculation": {"method": "draft_model"}}
# Room for three or four of the sessions.
SMALL_KV: dict[str, Any] = {
    **CONFIG, "vllm": {**EAGER, "max_model_len": 256}, "model": {"kv_tokens": 512}
}  # fmt: skip


# vLLM's workers load no drafters for these.
NOT_LOADED = ("omnidraft", "diffuspec", "generalized_aggressive")


def runs_in_vllm(name: str) -> bool:
    row = METHODS[name]
    from_tokens = not row.needs - row.optional_needs
    return from_tokens and row.acceptance == "coupled" and row.lossless and name not in NOT_LOADED


METHOD_NAMES = [name for name in METHODS if runs_in_vllm(name)]


def by(method: str) -> list[SpeculationConfig]:
    return [SpeculationConfig(method=method)]


@pytest.fixture(scope="module")
def vllm() -> Iterator[LocalVllm]:
    engine = running(CONFIG)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def prompts(vllm: LocalVllm) -> list[list[int]]:
    assert vllm.engine.tokenizer is not None
    return code_prompts(vllm.engine.tokenizer, NUM_PROMPTS)


@pytest.fixture(scope="module")
def ar(vllm: LocalVllm, prompts: list[list[int]]) -> list[list[int]]:
    """One after the other: nothing beside them in the batch."""
    sessions = vllm.generate(prompts, GREEDY, by("ar"), concurrency=1)
    assert not any(session.stats.num_drafted for session in sessions)
    return [session.output_ids for session in sessions]


@pytest.mark.parametrize("method", METHOD_NAMES)
def test_every_drafter_has_the_tokens_of_ar(
    vllm: LocalVllm, prompts: list[list[int]], ar: list[list[int]], method: str
) -> None:
    predictions: Sequence[Sequence[int]] = ar if METHODS[method].reads_prediction else ()
    sessions = vllm.generate(prompts, GREEDY, by(method), concurrency=8, predictions=predictions)
    assert [session.output_ids for session in sessions] == ar
    drafted = sum(session.stats.num_drafted for session in sessions)
    accepted = sum(session.stats.num_accepted for session in sessions)
    assert (drafted > 0) == (method != "ar") or METHODS[method].length == "goodput"
    assert accepted <= drafted
    for session in sessions:
        stats = session.stats
        assert stats.num_tokens == 40
        assert sum(stats.accepted_by_depth) == stats.num_accepted
        assert sum(stats.drafted_by_depth) == stats.num_drafted
    if method == "predicted_outputs":
        assert accepted > 0.8 * 40 * NUM_PROMPTS


def test_requests_choose_for_themselves(
    vllm: LocalVllm, prompts: list[list[int]], ar: list[list[int]]
) -> None:
    """Methods and lengths, 0 included, side by side in one batch."""
    wishes = [
        SpeculationConfig(method="ar"),
        SpeculationConfig(method="draft_model", num_speculative_tokens=3),
        SpeculationConfig(method="suffix_decoding"),
        SpeculationConfig(method="combined", drafters=("prompt_lookup", "draft_model")),
        SpeculationConfig(method="draft_model", length="goodput"),
    ]
    sessions = vllm.generate(prompts, GREEDY, wishes, concurrency=8)
    assert [session.output_ids for session in sessions] == ar
    assert not any(s.stats.num_drafted for s in sessions[::5])
    three = sessions[1::5]
    assert max(len(s.stats.drafted_by_depth) for s in three) == 3
    assert sum(s.stats.num_accepted for s in three) > 0


def test_tokens_stay_when_sessions_are_preempted(
    prompts: list[list[int]], ar: list[list[int]]
) -> None:
    small = running(SMALL_KV)
    try:
        wishes = [SpeculationConfig(method=m) for m in ("draft_model", "suffix_decoding", "ar")]
        sessions = small.generate(prompts, GREEDY, wishes, concurrency=8)
        counters = small.engine.take_counters()
    finally:
        small.stop()
    assert counters.num_preemptions > 0
    assert [session.output_ids for session in sessions] == ar


def test_draft_actors_die_and_others_come(
    prompts: list[list[int]],
    ar: list[list[int]],
    drafter_processes: Callable[..., DrafterProcess],
) -> None:
    """Two replicas; both are killed in the middle of it, and a third takes over."""
    pool = [drafter_processes(), drafter_processes()]
    config = {**CONFIG, "vllm": {**EAGER, "draft_deadline_s": 0.5}}
    remote = running(config, [drafter.address for drafter in pool])

    def kill(count: int) -> None:
        if count in (16, 24):
            pool[count == 24].kill()

    try:
        sessions = remote.generate(prompts, GREEDY, by("draft_model"), concurrency=8, on_done=kill)
        assert [session.output_ids for session in sessions] == ar
        drafted = [session.stats.num_drafted > 0 for session in sessions]
        assert all(drafted[:8])
        assert not any(drafted[-8:])
        heir = drafter_processes()
        remote.use_drafters([heir.address])
        sessions = remote.generate(prompts[:8], GREEDY, by("draft_model"))
        assert [session.output_ids for session in sessions] == ar[:8]
        assert all(session.stats.num_drafted for session in sessions)
    finally:
        remote.stop()


def test_a_late_draft_is_not_waited_for(
    prompts: list[list[int]],
    ar: list[list[int]],
    drafter_processes: Callable[..., DrafterProcess],
) -> None:
    slow = drafter_processes("--sleep", "1.0")
    impatient = running({**CONFIG, "vllm": {**EAGER, "draft_deadline_s": 0.02}}, [slow.address])
    try:
        sessions = impatient.generate(prompts[:8], GREEDY, by("draft_model"))
        assert [session.output_ids for session in sessions] == ar[:8]
        assert not any(session.stats.num_accepted for session in sessions)
        # 40 steps that each waited for a second would be 40 seconds.
        assert max(s.stats.finished_at - s.stats.started_at for s in sessions) < 20  # type: ignore[operator]
    finally:
        impatient.stop()


def test_stops_logprobs_and_constraints(vllm: LocalVllm, prompts: list[list[int]]) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    params = SamplingParams(
        max_tokens=40, json_schema=json.dumps({**schema, "additionalProperties": False})
    )
    plain, drafted = (
        vllm.generate(prompts[:4], params, by(method)) for method in ("ar", "draft_model")
    )
    assert [s.output_ids for s in drafted] == [s.output_ids for s in plain]
    for session in plain:
        if session.finish_reason == "stop":
            assert set(json.loads(session.text)) == {"a"}
    events: list[Any] = []
    stop = replace(GREEDY, stop=("\n",), logprobs=2)

    async def one() -> None:
        done = asyncio.Event()

        def listen(event: Any) -> None:
            events.append(event)
            if event.finished:
                done.set()

        vllm.engine.submit(
            Request(
                prompts[0], stop, SpeculationConfig(method="prompt_lookup"), session_id="stops"
            ),
            on_event=listen,
        ).result()
        await done.wait()

    vllm.run(one())
    assert "\n" not in "".join(event.text for event in events)
    entries = [entry for event in events for entry in event.logprobs]
    assert [e.token_id for e in entries] == [t for event in events for t in event.token_ids]
    assert all(len(e.top) == 2 and e.top[0][0] == e.token_id for e in entries)


def test_an_output_goes_on_from_its_first_tokens(
    vllm: LocalVllm, prompts: list[list[int]], ar: list[list[int]]
) -> None:
    """As when another replica has died in the middle of it."""

    async def go_on() -> list[int]:
        ended = asyncio.Event()
        session = vllm.engine.submit(
            Request(
                prompts[1],
                GREEDY,
                SpeculationConfig(method="draft_model"),
                session_id="again",
                committed=ar[1][:17],
            ),
            on_event=lambda event: event.finished and ended.set(),
        ).result()
        await ended.wait()
        return session.output_ids

    assert vllm.run(go_on()) == ar[1]


def test_cancelled_sessions_leave_nothing(vllm: LocalVllm, prompts: list[list[int]]) -> None:
    async def cancel() -> str | None:
        ended = asyncio.Event()
        session = vllm.engine.submit(
            Request(
                prompts[0],
                replace(GREEDY, max_tokens=400),
                SpeculationConfig(method="draft_model"),
                session_id="cancelled",
            ),
            on_event=lambda event: event.finished and ended.set(),
        ).result()
        await asyncio.sleep(0.2)
        assert vllm.engine.cancel("cancelled").result()
        await ended.wait()
        return session.finish_reason

    assert vllm.run(cancel()) == "cancelled"
    assert not vllm.engine.sessions
    assert not vllm.engine.cancel("cancelled").result()


@pytest.mark.parametrize(
    ("method", "field", "text"),
    [
        ("eagle", "method", "hidden_states"),
        ("speculative_sampling", "acceptance", "rule of its own"),
        ("vllm_ngram", "method", "started vLLM with Paceline's drafters"),
        ("warp", "method", "one of"),
    ],
)
def test_what_cannot_be_is_refused(vllm: LocalVllm, method: str, field: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text) as caught:
        vllm.engine.submit(Request([1, 2], GREEDY, SpeculationConfig(method=method))).result()
    assert caught.value.field == field
    assert vllm.engine.refusal(VLLM_METHODS["vllm_ngram"])
    assert "hidden_states" in (vllm.engine.refusal(METHODS["eagle"]) or "")
    assert vllm.engine.refusal(METHODS["draft_model_tree"]) is None


@pytest.mark.parametrize("method", ["vllm_ngram", "vllm_suffix", "vllm_draft_model"])
def test_its_own_methods(prompts: list[list[int]], ar: list[list[int]], method: str) -> None:
    speculation = {"method": method, "num_speculative_tokens": 4}
    if method == "vllm_ngram":
        speculation |= {"ngram_min": 2, "ngram_max": 3}
    own = running({**CONFIG, "speculation": speculation})
    try:
        with pytest.raises(InvalidArgument, match=method):
            own.engine.submit(Request([1, 2], GREEDY, SpeculationConfig(method="ar"))).result()
        wanted = SpeculationConfig(**speculation)  # type: ignore[arg-type]
        sessions = own.generate(prompts, GREEDY, [wanted], concurrency=8)
    finally:
        own.stop()
    assert [session.output_ids for session in sessions] == ar
    assert sum(session.stats.num_accepted for session in sessions) > 0
