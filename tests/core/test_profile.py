"""Cost profiles: measured, kept, read again, drawn, and used."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cluster.cli import app
from paceline.config import SpeculationConfig
from paceline.engine import Engine
from paceline.errors import InvalidArgument
from paceline.lengths.base import LengthContext
from paceline.loading import load_engine
from paceline.models import kernels
from paceline.models.threads import Cores
from paceline.profile import (
    MOST_TRIES,
    CostProfile,
    LoadCosts,
    _measure_load,
    default_path,
    find_profile,
    measure,
    plot,
    profile_key,
    report_costs,
    within,
)
from paceline.sampling import SamplingParams
from paceline.types import Load
from tests.core.engines import small_engine
from tests.core.lengths_sim import new_session

KEY = {"target": "t", "drafter": "d", "dtype": "float32", "device": "cpu", "host": "h"}
PROFILE = CostProfile(
    key=KEY,
    batches=(1, 4),
    nodes=(1, 3),
    verify_seconds=((1.0, 2.0), (2.0, 6.0)),
    depths=(1, 2),
    draft_seconds=((0.5, 1.0), (0.5, 1.0)),
    round_trip_seconds=0.25,
    methods=("draft_model",),
)


def test_costs_lie_between_the_measured_points_and_go_on_beyond_them() -> None:
    assert PROFILE.verify(1, 1) == 1.0
    assert PROFILE.verify(2, 1) == 1.5
    assert PROFILE.verify(5, 1) == 3.0
    assert PROFILE.verify(1, 2.5) == 1.5
    assert PROFILE.verify(1, 7) == 3.0
    assert PROFILE.draft(0, 1) == 0.0
    assert PROFILE.draft(2, 1) == 1.25
    alone = replace(PROFILE, batches=(1,), verify_seconds=((1.0, 2.0),))
    assert alone.verify(1, 3) == alone.verify(3, 1) == 2.0  # a row is a row


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "profile.json"
    PROFILE.save(file)
    assert CostProfile.load(file) == PROFILE
    assert [path.name for path in file.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    "damage",
    [{"version": 2}, {"nodes": [1]}, {"verify_seconds": [[1, -1], [1, 1]]}, {"batches": "x"}],
)
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, damage: dict[str, object]) -> None:
    file = tmp_path / "profile.json"
    PROFILE.save(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **damage}))
    with pytest.raises(InvalidArgument) as error:
        CostProfile.load(file)
    assert error.value.field == "profile"


def test_only_the_profile_with_the_same_key_is_found(
    own_cache: Path,
) -> None:
    assert find_profile(KEY) is None
    PROFILE.save(default_path(KEY))
    assert find_profile(KEY) == PROFILE
    assert find_profile({**KEY, "dtype": "bfloat16"}) is None
    default_path(KEY).write_text("no json")
    assert find_profile(KEY) is None


def test_measuring_leaves_the_engine_as_it_was(tiny_folder: Path) -> None:
    small = small_engine(tiny_folder)
    calls: list[tuple[int, int]] = []
    profile = measure(
        small.engine, KEY, batches=(1, 2), nodes=(1, 3), depths=(1, 2), repetitions=1,
        progress=lambda done, total: calls.append((done, total)),
    )  # fmt: skip
    assert len(profile.verify_seconds) == len(profile.draft_seconds) == 2
    assert profile.methods
    assert calls[-1] == (8, 8)
    small.assert_nothing_is_left()
    with pytest.raises(InvalidArgument) as error:
        measure(small.engine, KEY, batches=(2, 1))
    assert error.value.field == "batches"


def test_goodput_decides_by_the_profile() -> None:
    cheap = replace(PROFILE, verify_seconds=((1.0, 1.01), (1.0, 1.01)), round_trip_seconds=0.0,
                    draft_seconds=((0.01, 0.02), (0.01, 0.02)))  # fmt: skip
    dear = replace(PROFILE, round_trip_seconds=50.0)
    for profile, depth in ((cheap, 4), (dear, 0)):
        context = LengthContext(profile=profile)
        session = new_session(context, length="goodput", num_speculative_tokens=4)
        assert session.length_controller.budget(session, Load(1, 0)).depth == depth


# --- what an engine measures by itself ------------------------------------------------------------


@pytest.fixture
def cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without profiles, with the measuring that tests switch off, on a quiet machine."""
    monkeypatch.setenv("PACELINE_MEASURE", "on")
    monkeypatch.setattr("paceline.profile.taken_by_others", lambda: 0.0)
    return own_cache


def files(cache: Path) -> list[Path]:
    return sorted(cache.rglob("*.json"))


def test_only_an_engine_that_drafts_measures_and_the_next_one_reads(
    tiny_folder: Path, cache: Path
) -> None:
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    engine = load_engine(tiny_folder, tiny_folder)
    engine.generate([[5, 6]], params, SpeculationConfig(method="ar"))
    assert not files(cache)
    assert "nothing has drafted" in measured_by(engine).report()["costs"]
    engine.generate([[5, 6]], params, SpeculationConfig(method="prompt_lookup"))
    (file,) = files(cache)
    profile = CostProfile.load(file)
    assert profile == engine.length_context.costs
    assert profile.batches == (1,)
    assert profile.nodes[:5] == (1, 2, 4, 5, 8)
    assert list(profile.verify_seconds[0]) == sorted(profile.verify_seconds[0])
    assert "draft_model" in profile.methods
    assert profile.read_seconds >= 0
    assert engine.local_target.num_free == engine.local_target.kv_capacity
    written = file.stat().st_mtime_ns
    other = load_engine(tiny_folder, tiny_folder)
    assert other.length_context.costs == profile
    assert file.stat().st_mtime_ns == written
    report = report_costs(other)
    assert str(file) in report["costs"]
    assert set(report["verify_ms_by_rows"]) == set(profile.nodes)
    assert report["threads"]


def test_costs_of_a_busy_machine_are_measured_again(
    tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others take both processors, a part, all, then half of one in three measurements."""
    monkeypatch.setattr("paceline.profile.usable_cores", lambda: Cores(2, 2))
    now = [0.0]
    monkeypatch.setattr("paceline.profile.taken_by_others", lambda: now[0])

    def found(taken: float) -> tuple[CostProfile, str]:
        """The costs of a new engine, and their source, where others take seconds per second."""
        engine = load_engine(tiny_folder)

        def measured(*args: Any) -> CostProfile | None:
            started = time.perf_counter()
            profile = _measure_load(*args)
            now[0] += taken * (time.perf_counter() - started)
            return profile

        with monkeypatch.context() as patch:
            patch.setattr("paceline.profile._measure_load", measured)
            costs = engine.length_context.costs
        assert costs is not None
        assert CostProfile.load(files(cache)[0]) == costs
        return costs, report_costs(engine)["costs"]

    costs, source = found(1.9)
    assert costs.provisional
    assert "while others took 9" in source
    assert "the next engine measures again" in source
    quieter, source = found(0.6)
    assert quieter.provisional
    assert 0.2 < quieter.others < 0.31
    assert quieter.verify_seconds != costs.verify_seconds
    still, source = found(1.9)  # the quieter ones stay
    assert (still.verify_seconds, still.threads) == (quieter.verify_seconds, quieter.threads)
    assert "read from" in source
    assert "not 9" in source
    quiet, source = found(0.1)
    assert (quiet.tries, quiet.provisional) == (4, False)
    assert "again" not in source
    assert found(0.0)[0] == quiet  # and that is that


def test_a_machine_that_is_always_busy_is_measured_a_few_times(
    tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 100.0)
    monkeypatch.setattr("paceline.profile.taken_by_others", lambda: next(clock))
    tries = [load_engine(tiny_folder).length_context.costs for _ in range(MOST_TRIES + 2)]
    assert [costs and costs.tries for costs in tries] == [1, 2, 3, 4, 5, 5, 5]
    monkeypatch.setenv("PACELINE_MEASURE", "off")
    assert load_engine(tiny_folder).length_context.costs == tries[-1]


def test_what_costs_depend_on_is_in_their_key(
    tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [profile_key(tiny_folder, None, "float32", "cpu")]
    keys.append(profile_key(tiny_folder, tiny_folder, "float32", "cpu"))
    keys.append(profile_key(tiny_folder, None, "bfloat16", "cpu"))
    monkeypatch.setattr(kernels, "num_threads", lambda: 64)
    monkeypatch.setattr(kernels, "available_cores", lambda: 64)
    keys.append(profile_key(tiny_folder, None, "float32", "cpu"))
    monkeypatch.setattr(kernels, "status", lambda: (False, "no compiler"))
    keys.append(profile_key(tiny_folder, None, "float32", "cpu"))
    assert len({default_path(key) for key in keys}) == len(keys)


def test_a_damaged_file_is_measured_anew(tiny_folder: Path, cache: Path) -> None:
    assert load_engine(tiny_folder).length_context.costs is not None
    (file,) = files(cache)
    file.write_text("{}")
    engine = load_engine(tiny_folder)
    assert engine.length_context.costs == CostProfile.load(file)


def test_a_cache_that_cannot_be_written_is_done_without(tiny_folder: Path, cache: Path) -> None:
    (cache / "paceline" / "profiles").write_text("not a folder")
    engine = load_engine(tiny_folder)
    assert engine.length_context.costs is not None
    assert "not kept" in report_costs(engine)["costs"]


def test_without_room_or_where_it_is_switched_off_rounds_teach(
    tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_engine(tiny_folder, kv_tokens=16)
    assert engine.length_context.costs is None
    monkeypatch.setenv("PACELINE_MEASURE", "off")
    engine = load_engine(tiny_folder)
    assert engine.length_context.costs is None
    assert "PACELINE_MEASURE" in report_costs(engine)["costs"]
    assert not files(cache)


def measured_by(engine: Engine) -> LoadCosts:
    measure = engine.length_context.measure
    assert isinstance(measure, LoadCosts)
    return measure


def test_large_sizes_are_left_out_where_they_take_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine on which every row takes 40 ms."""
    now = [0.0]

    def call(size: int) -> None:
        now[0] += 0.04 * size

    monkeypatch.setattr("paceline.profile.time.perf_counter", lambda: now[0])
    seconds = within(0.25)(call, (1, 2, 4, 5, 8, 16, 32))
    assert seconds == pytest.approx((0.04, 0.08, 0.16, 0.2, 0.32))
    assert now[0] < 1.0


def test_half_of_the_time_is_for_measuring_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second measurement of a size is disturbed, the first one among them."""
    now, calls = [0.0], Counter[int]()

    def call(size: int) -> None:
        calls[size] += 1
        now[0] += 0.001 * size * (3 if calls[size] % 2 else 1)

    monkeypatch.setattr("paceline.profile.time.perf_counter", lambda: now[0])
    seconds = within(0.25)(call, (1, 2, 4, 5, 8, 16, 32))
    assert seconds == pytest.approx((0.001, 0.002, 0.004, 0.005, 0.008, 0.016))
    assert 0.15 < now[0] < 0.27


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    plot(PROFILE, tmp_path / "costs.png")
    assert (tmp_path / "costs.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidArgument) as error:
        plot(PROFILE, tmp_path / "costs.unknown")
    assert error.value.field == "plot"


def test_the_command_keeps_a_profile_that_an_engine_finds(
    tiny_folder: Path, own_cache: Path
) -> None:
    arguments = ["profile", "--target", tiny_folder, "--drafter", tiny_folder, "-r", "1", "--json"]
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    assert result.exit_code == 0, result.output
    kept = json.loads(result.stdout)
    assert kept["file"].startswith(str(own_cache))
    profile = load_engine(tiny_folder, tiny_folder).length_context.costs
    assert profile is not None
    assert profile.key == profile_key(tiny_folder, tiny_folder, "float32", "cpu")
