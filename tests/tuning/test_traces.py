"""Recordings: what they hold, how they are kept, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import SpeculationConfig
from paceline.drafters.base import Drafter
from paceline.drafters.copyspec import CopySpec
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.plan import resolve
from paceline.sampling import SamplingParams
from paceline.session import Session
from paceline.tuning import traces as module
from paceline.tuning.families import parts_of
from paceline.tuning.recorders import right_path
from paceline.tuning.recordings import ABSENT, DraftRecording, OrderRecording, RankRecording
from paceline.tuning.results import Results
from paceline.tuning.simulator import Simulator
from paceline.tuning.traces import Traces, record, traces_key
from paceline.types import Budget, Draft, Outcome
from tests.core.engines import small_engine
from tests.modelzoo import make_model

KEY = {"target": "t", "workload": "w"}
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True, logit_bias={3: 0.5}, stop_token_ids=(255,))
PROMPTS = [[40, 41, 42, 43] * 4, [50, 60, 70, 50, 60]]


def fixed(method: str, **knobs: Any) -> SpeculationConfig:
    return SpeculationConfig(method=method, length="fixed", **knobs)


CHAIN = fixed("draft_model", num_speculative_tokens=3)
CONFIDENCE = fixed(
    "draft_model", shape="confidence", num_speculative_tokens=3, node_budget=6, branching=2
)
LOOKUP = fixed("prompt_lookup", num_speculative_tokens=4)
THREE_KINDS = [CHAIN, CONFIDENCE, LOOKUP]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("llama_gqa", tmp_path_factory.mktemp("zoo"), num_hidden_layers=2)


@pytest.fixture
def engine(folder: Path) -> Engine:
    return small_engine(folder).engine


@pytest.fixture(scope="module")
def traces(folder: Path) -> Traces:
    return record(small_engine(folder).engine, THREE_KINDS, PROMPTS, PARAMS, key=KEY)


def only(traces: Traces, config: SpeculationConfig) -> Any:
    """The one recording of a configuration."""
    (part,) = parts_of(resolve(config))
    return traces.recordings[part.family.key]


def assert_equal(one: Traces, other: Traces) -> None:
    assert (one.key, one.concurrency, one.params) == (other.key, other.concurrency, other.params)
    assert one.refused == other.refused
    pairs: list[tuple[Any, Any]] = [(one.truth, other.truth)]
    assert list(one.recordings) == list(other.recordings)
    pairs += zip(one.recordings.values(), other.recordings.values(), strict=True)
    for mine, theirs in pairs:
        assert type(mine) is type(theirs)
        for field in fields(mine):
            a, b = getattr(mine, field.name), getattr(theirs, field.name)
            assert type(a) is type(b)
            assert np.array_equal(a, b)
            assert getattr(a, "dtype", None) == getattr(b, "dtype", None)


# --- what is recorded -----------------------------------------------------------------------------


def test_each_kind_of_drafter_has_its_recording(engine: Engine, traces: Traces) -> None:
    sessions = engine.sibling().generate(PROMPTS, PARAMS, SpeculationConfig(method="ar"))
    assert [traces.truth.output(i) for i in range(2)] == [s.output_ids for s in sessions]
    assert traces.truth.prompt_lengths.tolist() == [16, 5]
    ranks, order, drafts = (only(traces, config) for config in THREE_KINDS)
    assert isinstance(ranks, RankRecording)
    assert isinstance(order, OrderRecording)
    assert isinstance(drafts, DraftRecording)
    # The drafter is the target itself: always right, but no token is asked for after the last.
    assert ranks.ranks[:, 0].tolist() == [*[0] * 15, ABSENT] * 2
    assert ranks.prefix_only
    assert not order.before[0, 0].any(), "the right token comes before every other node"
    assert order.total[0].tolist() == [2, 6, 10]
    assert drafts.budgets.tolist() == [[4, 4]]
    assert (drafts.accepted <= drafts.nodes).all()
    assert (drafts.accepted[-1], drafts.nodes[-1]) == (0, 0)


def test_recording_repeats_itself(engine: Engine, traces: Traces) -> None:
    assert_equal(record(engine, THREE_KINDS, PROMPTS, PARAMS, key=KEY), traces)


def test_the_engine_learns_nothing(folder: Path) -> None:
    small = small_engine(folder)
    record(small.engine, [LOOKUP, fixed("suffix_decoding")], PROMPTS, PARAMS, key=KEY)
    assert "suffix" not in small.engine.drafters
    small.assert_nothing_is_left()


def test_configurations_share_what_they_can(traces: Traces) -> None:
    shared = [
        fixed("draft_model", num_speculative_tokens=9),
        fixed("sequoia", node_budget=20),
        fixed("draft_model", shape="kary", branching=3),
        fixed("speculative_sampling"),
        fixed("draft_model", shape="confidence", num_speculative_tokens=2, branching=2),
        SpeculationConfig(method="ar"),
        SpeculationConfig(method="draft_model", length="goodput"),
    ]
    assert traces.missing(shared) == []
    needed = [
        fixed("draft_model", shape="confidence", num_speculative_tokens=4, branching=2),
        fixed("draft_model", shape="confidence", num_speculative_tokens=3, branching=3),
        fixed("layer_skip", exit_layer=1),
        fixed("prompt_lookup", num_speculative_tokens=3),
    ]
    hopeless = [fixed("token_recycling"), SpeculationConfig(method="draft_model", length="adl")]
    assert traces.missing([*shared, *needed, *hopeless]) == needed


def test_known_traces_are_taken_over(engine: Engine, traces: Traces) -> None:
    told: list[str] = []
    more = [
        *THREE_KINDS,
        fixed("prompt_lookup", num_speculative_tokens=2),
        fixed(
            "draft_model", shape="confidence", num_speculative_tokens=2, node_budget=9, branching=2
        ),
    ]
    both = record(
        engine, more, PROMPTS, PARAMS, key=KEY, known=traces,
        progress=lambda done, total, what: told.append(f"{done}/{total}"),
    )  # fmt: skip
    assert told[-1] == "2/2", "what was known is not recorded again"
    assert both.truth is traces.truth
    assert only(both, CHAIN) is only(traces, CHAIN)
    assert both.missing(more) == []
    assert only(both, LOOKUP).budgets.tolist() == [[4, 4], [2, 2]]
    whole = record(engine, more, PROMPTS, PARAMS, key=KEY)
    for config in more:
        mine, theirs = (Simulator(t).rounds(config) for t in (both, whole))
        assert mine is not None
        assert theirs is not None
        assert mine.accepted.tolist() == theirs.accepted.tolist()
        assert mine.nodes.tolist() == theirs.nodes.tolist()
    with pytest.raises(InvalidArgument) as error:
        record(engine, more, PROMPTS, PARAMS, key={"target": "other"}, known=traces)
    assert error.value.field == "known"


def test_drafters_that_remember_find_what_came_before(engine: Engine) -> None:
    """The same prompt twice: what the first one taught serves the second, unless both at once."""
    config = fixed("suffix_decoding", num_speculative_tokens=8)
    prompts = [PROMPTS[1]] * 2
    for concurrency, learns in ((1, True), (2, False)):
        traces = record(engine, [config], prompts, PARAMS, key=KEY, concurrency=concurrency)
        rounds = Simulator(traces).rounds(config)
        assert rounds is not None
        first, second = (int((rounds.prompts == prompt).sum()) for prompt in (0, 1))
        assert (second < first) == learns


def test_no_recording_begins_after_the_time_is_up(engine: Engine) -> None:
    traces = record(engine, THREE_KINDS, PROMPTS, PARAMS, key=KEY, limit_s=0.0)
    assert traces.recordings == {}
    assert len(traces.truth.output_ids) == 32
    assert traces.missing(THREE_KINDS) == THREE_KINDS


def test_cheap_recordings_come_first(engine: Engine) -> None:
    told: list[str] = []
    budgets = [fixed("combined", num_speculative_tokens=n) for n in range(1, 7)]
    configs = [*budgets, CONFIDENCE, LOOKUP, CHAIN, replaced(CHAIN, num_speculative_tokens=1)]
    traces = record(
        engine, configs, PROMPTS, PARAMS, key=KEY,
        progress=lambda done, total, what: told.append(what.split()[0] + " shape" * ("sh" in what)),
    )  # fmt: skip
    assert told == [
        "the", "draft_model", "prompt_lookup", "draft_model shape",
        "combined shape", "combined shape", "done",
    ]  # fmt: skip
    assert len(only(traces, budgets[0]).budgets) == 6
    assert traces.missing(configs) == []


def replaced(config: SpeculationConfig, **changes: Any) -> SpeculationConfig:
    return SpeculationConfig.model_validate(config.overrides() | changes)


def test_a_hybrid_is_recorded_without_its_fallback(folder: Path) -> None:
    """Whose drafts have a recording already; and it has its fallback again afterwards."""
    drafter = CopySpec(small_engine(folder).engine.drafters["draft_model"])  # type: ignore[arg-type]
    fallback = drafter.fallback
    assert fallback is not None
    engine = small_engine(folder, drafters={"copyspec_or_draft_model": drafter}).engine
    hybrid = fixed("copyspec_draft_model")
    traces = record(engine, [hybrid, CHAIN], PROMPTS, PARAMS, key=KEY)
    assert sorted(each.kind for each in traces.recordings.values()) == ["drafts", "ranks"]
    assert drafter.fallback is fallback
    rounds = Simulator(traces).rounds(hybrid)
    assert rounds is not None
    assert rounds.fell_back.any()
    # Whatever the shape of the fallback's drafts, and however deep they are.
    others = [replaced(hybrid, shape="kary", node_budget=10), replaced(hybrid, fallback_depth=2)]
    assert traces.missing([hybrid, *others]) == []


def test_what_the_engine_refuses_is_left_out(folder: Path) -> None:
    engine = small_engine(folder).engine
    engine.drafters.heads = None
    configs = [fixed("layer_skip", exit_layer=3), fixed("eagle"), CHAIN]
    traces = record(engine, configs, PROMPTS, PARAMS, key=KEY)
    reasons = list(traces.refused.values())
    assert len(reasons) == 2
    assert "exit_layer" in reasons[0]
    assert "eagle" in reasons[1]
    assert traces.missing(configs) == []
    simulator = Simulator(traces)
    assert simulator.rounds(configs[0]) is None
    assert simulator.rounds(CHAIN) is not None


class _Broken(Drafter):
    """A drafter that fails after some tokens."""

    needs: frozenset[Any] = frozenset()

    def open(self, session: Session) -> None: ...

    def close(self, session: Session) -> None: ...

    def propose(self, sessions: Sequence[Session], budgets: Sequence[Budget]) -> list[Draft]:
        if any(session.length > session.prompt_length + 3 for session in sessions):
            raise ValueError("out of paper")
        return [Draft.chain([1])] * len(sessions)

    def observe(self, sessions: Sequence[Session], outcomes: Sequence[Outcome]) -> None: ...


class _Elsewhere(_Broken):
    elsewhere = True

    def propose(self, sessions: Any, budgets: Any) -> Any: ...


def test_a_drafter_that_fails_is_no_silent_zero(folder: Path) -> None:
    small = small_engine(folder, drafters={"prompt_lookup": _Broken()})
    with pytest.raises(RuntimeError, match="drafter failed while it was recorded") as error:
        record(small.engine, [LOOKUP], PROMPTS, PARAMS, key=KEY)
    assert str(error.value.__cause__) == "out of paper"
    small.assert_nothing_is_left()


def test_drafters_elsewhere_are_refused(folder: Path) -> None:
    small = small_engine(folder, drafters={"prompt_lookup": _Elsewhere()})
    with pytest.raises(InvalidArgument, match="in this process"):
        record(small.engine, [LOOKUP], PROMPTS, PARAMS, key=KEY)


def test_no_prompts_are_refused(engine: Engine) -> None:
    with pytest.raises(InvalidArgument) as error:
        record(engine, [CHAIN], [], PARAMS, key=KEY)
    assert error.value.field == "prompts"


def test_the_right_path_takes_the_first_of_equal_siblings() -> None:
    draft = Draft(np.array([7, 7, 8, 9, 8]), np.array([-1, -1, 0, 2, 1], np.int32))
    assert right_path(draft, [7, 8, 9, 1]) == [0, 2, 3]
    assert right_path(draft, [7, 8]) == [0, 2]
    assert right_path(draft, [8, 9]) == []
    assert right_path(draft, []) == []


# --- files ----------------------------------------------------------------------------------------


def test_what_is_read_is_what_was_written(tmp_path: Path, traces: Traces) -> None:
    results = Results(str(tmp_path))
    kept = replace(traces, refused={"family": "a reason"})
    kept.save(results)
    loaded = Traces.load(results, KEY)
    assert_equal(loaded, kept)
    for config in THREE_KINDS:
        mine, theirs = (Simulator(t).rounds(config) for t in (traces, loaded))
        assert mine is not None
        assert theirs is not None
        assert mine.accepted.tolist() == theirs.accepted.tolist()


@pytest.mark.parametrize(
    ("key", "allowed"),
    [
        ({"target": "another"}, "traces whose target is another, not t"),
        ({**KEY, "workload": "x"}, "traces whose workload is x, not w"),
        ({**KEY, "dtype": "float32"}, "traces whose dtype is float32, not None"),
    ],
)
def test_foreign_traces_are_refused(
    tmp_path: Path, traces: Traces, key: dict[str, str], allowed: str
) -> None:
    results = Results(str(tmp_path))
    traces.save(results)
    with pytest.raises(InvalidArgument) as error:
        Traces.load(results, key)
    assert (error.value.field, error.value.allowed) == ("traces", allowed)
    assert error.value.value == f"{tmp_path}/traces.npz"


@pytest.mark.parametrize("content", [None, b"", b"not an archive", b"PK\x03\x04 cut"])
def test_damaged_files_are_refused(tmp_path: Path, content: bytes | None) -> None:
    results = Results(str(tmp_path))
    if content is not None:
        results.write_bytes("traces.npz", content)
    with pytest.raises(InvalidArgument, match="a file of traces") as error:
        Traces.load(results, KEY)
    assert error.value.field == "traces"


def test_half_a_file_is_refused(tmp_path: Path, traces: Traces) -> None:
    results = Results(str(tmp_path))
    traces.save(results)
    whole = results.read_bytes("traces.npz")
    results.write_bytes("traces.npz", whole[: len(whole) // 2])
    with pytest.raises(InvalidArgument, match="a file of traces"):
        Traces.load(results, KEY)


def test_traces_of_another_version_are_refused(
    tmp_path: Path, traces: Traces, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(str(tmp_path))
    monkeypatch.setattr(module, "VERSION", 0)
    traces.save(results)
    monkeypatch.undo()
    with pytest.raises(InvalidArgument, match="traces of version 1, not 0"):
        Traces.load(results, KEY)


def test_the_key_tells_models_and_workloads_apart(folder: Path, tmp_path: Path) -> None:
    other = make_model("llama_gqa", tmp_path, num_hidden_layers=3)
    heads = tmp_path / "heads"
    (heads / "eagle").mkdir(parents=True)
    (heads / "eagle" / "config.json").write_text("{}")
    keys = [
        traces_key(folder, None, None, "float32", PROMPTS, PARAMS),
        traces_key(other, None, None, "float32", PROMPTS, PARAMS),
        traces_key(folder, other, None, "float32", PROMPTS, PARAMS),
        traces_key(folder, None, heads, "float32", PROMPTS, PARAMS),
        traces_key(folder, None, None, "bfloat16", PROMPTS, PARAMS),
        traces_key(folder, None, None, "float32", PROMPTS[:1], PARAMS),
        traces_key(folder, None, None, "float32", PROMPTS, replace(PARAMS, seed=1)),
        traces_key(folder, None, None, "float32", PROMPTS, PARAMS, concurrency=2),
    ]
    assert len({str(key) for key in keys}) == len(keys)
    again = traces_key(str(folder), None, None, "float32", [tuple(p) for p in PROMPTS], PARAMS)
    assert again == keys[0]
