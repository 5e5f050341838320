"""The benchmark of method auto by class of requests: its requests, and its arithmetic."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.classes import (
    CONTROL,
    Requests,
    Timed,
    best_of,
    interval,
    measure,
    methods_of,
    report,
    speed,
)
from paceline.engine import Engine
from paceline.loading import load_engine

SHARED = '{"question_id": %d, "category": "%s", "turns": ["%s %d?"]}\n'


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine()


def test_each_class_has_different_requests(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(SHARED % (i, "qa", "What is", i) for i in range(4)))
    assert engine.tokenizer is not None
    requests = Requests(engine.tokenizer, None, file, seed=0)
    assert [*requests.classes] == ["qa", "second turn", "edit", "json", "random"]
    for kind in ("qa", "edit", "json", "random"):
        asked = [*itertools.islice(requests.classes[kind], 4)]
        assert (
            len({tuple(each.prompt_ids) + tuple(each.constraint.values()) for each in asked}) == 4
        )
        assert all(bool(each.prediction) == (kind == "edit") for each in asked)


def test_all_methods_decode_the_same_groups(engine: Engine) -> None:
    assert engine.tokenizer is not None
    requests = Requests(engine.tokenizer, None, None, seed=0)
    methods = methods_of("random", ["prompt_lookup"], control=True)
    assert methods == ["ar", "prompt_lookup", "auto", CONTROL]
    engines = {method: engine.sibling() for method in methods}
    timed = measure(engines, "random", requests.classes["random"], 2, 3, methods, 8)
    assert len(timed) == 3  # and one that warms up
    assert all(0 < each.num_tokens <= 16 and set(each.seconds) == set(methods) for each in timed)


def test_other_tokens_than_those_of_ar_end_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.tokenizer is not None
    requests = Requests(engine.tokenizer, None, None, seed=0)
    engines = {"ar": engine.sibling(), "auto": engine.sibling()}
    submit = engines["auto"].submit
    monkeypatch.setattr(
        engines["auto"], "submit", lambda request: submit(replace(request, prompt_ids=(1, 2, 3)))
    )
    with pytest.raises(AssertionError, match="other tokens"):
        measure(engines, "random", requests.classes["random"], 1, 1, ["ar", "auto"], 16)


def test_speeds_and_shares() -> None:
    timed = [
        Timed(100, {"ar": 1.0, "sam": 0.5, "auto": 0.625}),
        Timed(60, {"ar": 0.6, "sam": 0.7, "auto": 0.6}),
    ]
    assert speed(timed, "ar") == pytest.approx(100.0)
    assert best_of(timed) == "sam"
    assert timed[0].gain("auto") == pytest.approx(1.6)
    low, high = interval(timed, "sam")
    assert low == pytest.approx(0.8)  # the first group twice
    assert high == pytest.approx(0.7 / 0.6)


def test_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "one": [Timed(100, {"ar": 1.0, "sam": 0.5, "auto": 0.5})],
        "two": [Timed(100, {"ar": 1.0, "sam": 2.0, "auto": 1.25})],
    }
    rows = report(4, found, ("sam",))
    assert rows["one"]["best"] == "sam"
    assert rows["two"]["best"] == "ar"
    assert rows["two"]["share"] == pytest.approx(0.8)
    assert rows["all"]["best"] == "ar"  # 2 s, and sam 2.5 s
    assert rows["all"]["share"] == pytest.approx(2.0 / 1.75)
    assert rows["all"]["kept"] == 0.5
    assert "50% of groups" in capsys.readouterr().out


def test_ar_is_compared_with_itself_and_is_no_method(capsys: pytest.CaptureFixture[str]) -> None:
    found = {
        "one": [
            Timed(100, {"ar": 1.0, "auto": 0.9, CONTROL: 0.8}),
            Timed(100, {"ar": 1.0, "auto": 0.9, CONTROL: 1.2}),
        ]
    }
    rows = report(4, found, ())
    assert rows["one"]["best"] == "ar"
    assert rows["control"]["share"] == pytest.approx(1.0)
    assert rows["control"]["share_low"] == pytest.approx(1.0 / 1.2)
    assert rows["control"]["share_high"] == pytest.approx(1.25)
    assert rows["control"]["kept"] == 0.5
    assert "AR beside itself: 1.00 (0.83 to 1.25); 50% of groups" in capsys.readouterr().out
