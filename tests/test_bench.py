"""Benchmarks: what is measured, what is compared, and how results look."""

from __future__ import annotations

import csv
import dataclasses
import gzip
import io
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from rich.console import Console

from paceline.bench import (
    BatchRun,
    BenchOptions,
    LocalBackend,
    SequenceRun,
    parse_methods,
    render_csv,
    render_page,
    render_table,
    run,
    run_bench,
)
from paceline.bench.environment import describe_environment
from paceline.bench.prompts import CATEGORIES, PROMPTS_PER_CATEGORY, builtin_prompts
from paceline.bench.suites import SUITES, read_prompts
from paceline.chat import encode_chat
from paceline.config import SpeculationConfig
from paceline.demo import TARGET_DIR
from paceline.errors import InvalidArgument, ModelNotFound
from paceline.loading import load_engine, load_runner
from paceline.masked_folder import MASKED_DRAFTERS
from paceline.methods import METHODS
from paceline.sampling import SamplingParams
from paceline.tokenizer import load_tokenizer
from paceline.train.corpus import held_out_modules, split
from tests.modelzoo import CONTEXT_LENGTH, VOCAB_SIZE, make_model

ROW_FIELDS = {
    "method": str,
    "category": str,
    "topology": str,
    "batch_invariant": bool | None,
    "tokens_per_second": float,
    "p25": float,
    "p75": float,
    "speedup_vs_ar": float,
    "workload_speedup_vs_ar": float,
    "speedup_p25": float,
    "speedup_p75": float,
    "speedup_bound": float | None,
    "decode_tokens_per_second": float | None,
    "mean_accepted_length": float,
    "acceptance_rate": float | None,
    "identical_to_ar": bool | None,
    "mismatch_rate": float | None,
    "round_overhead_us_p50": float | None,
    "round_overhead_us_p90": float | None,
    "round_ms_p50": float | None,
    "added_round_ms_p50": float | None,
    "verify_rows": float | None,
    "verify_ms": float | None,
    "draft_share": float | None,
    "drafted_by_depth": list,
    "accepted_by_depth": list,
    "num_prompts": int,
    "batch": int,
    "num_samples": int,
    "note": str | None,
}
# The tiny target has no trained heads, and no masked model.
ENGINE_METHODS = [
    name
    for name, method in METHODS.items()
    if method.lossless and not method.head and method.drafter not in MASKED_DRAFTERS
]
PEERS = ["transformers:ar", "transformers:assistant_model", "transformers:prompt_lookup"]


@pytest.fixture(scope="module")
def target(zoo: Path) -> Path:
    return make_model("llama", zoo)


@pytest.fixture(scope="module")
def drafter(zoo: Path) -> Path:
    return make_model("llama", zoo, num_hidden_layers=1)


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """A file in Spec-Bench's format: two categories, three prompts and one."""
    records: list[dict[str, Any]] = [
        {"question_id": 1, "category": "coding", "turns": ["def add(a, b):", "never used"]},
        {"question_id": 2, "category": "writing", "turns": ["Once upon a time"]},
        {
            "question_id": "3",
            "category": "coding",
            "turns": ["import os\nimport "],
            "reference": [],
        },
        {"question_id": 4, "category": "coding", "turns": ["x = [1, 2, 3, 1, 2, 3, 1"]},
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("\n".join(map(json.dumps, records)) + "\n\n")
    return file


def rows_of(result: dict[str, Any], **wanted: Any) -> list[dict[str, Any]]:
    return [
        row for row in result["results"] if all(row[key] == value for key, value in wanted.items())
    ]


@pytest.mark.slow
def test_a_result_has_every_method_category_and_field(
    target: Path, drafter: Path, questions: Path
) -> None:
    steps: list[tuple[int, int, str]] = []
    options = BenchOptions(
        target=target, drafter=drafter, prompts=questions, max_tokens=8, repetitions=2
    )
    result = run_bench(options, lambda done, total, what: steps.append((done, total, what)))
    assert json.loads(json.dumps(result)) == result

    for row in result["results"]:
        assert row.keys() == ROW_FIELDS.keys()
        for name, kind in ROW_FIELDS.items():
            assert isinstance(row[name], kind), (name, row)
        assert row["p25"] <= row["tokens_per_second"] <= row["p75"]
        assert row["batch"] == 1
    methods = [*ENGINE_METHODS, *PEERS]
    for category, num_prompts in (("coding", 3), ("writing", 1), ("all", 4)):
        rows = rows_of(result, category=category)
        assert [row["method"] for row in rows] == methods
        assert {row["num_prompts"] for row in rows} == {num_prompts}
        assert {row["num_samples"] for row in rows} == {2 * num_prompts}

    for row in rows_of(result, method="ar"):
        assert row["speedup_vs_ar"] == row["speedup_p25"] == row["speedup_p75"] == 1
        assert row["mean_accepted_length"] == 1
        assert row["acceptance_rate"] is None
        assert (row["speedup_bound"], row["verify_rows"]) == (1, 1)
        assert row["drafted_by_depth"] == row["accepted_by_depth"] == []
    for row in result["results"]:  # greedy: all methods have the same tokens
        assert row["identical_to_ar"] is True, row
        assert row["mismatch_rate"] == 0
        if row["method"] in ENGINE_METHODS:
            assert row["batch_invariant"] is True
            assert 0 < row["round_overhead_us_p50"] <= row["round_overhead_us_p90"]
            assert row["decode_tokens_per_second"] > 0
            assert 0 <= row["draft_share"] < 1
            drafted, accepted = sum(row["drafted_by_depth"]), sum(row["accepted_by_depth"])
            assert row["acceptance_rate"] == (accepted / drafted if drafted else None)
        else:
            assert row["speedup_bound"] is row["draft_share"] is None

    environment = result["environment"]
    for name in ("python", "torch", "cpu", "cores", "threads", "dtype", "paceline", "date"):
        assert environment[name], name
    assert environment["batch_invariant"] is True
    assert environment["fingerprint"] == str(load_runner(target, kv_tokens=64).fingerprint)
    assert environment["target"] == str(target)

    runs = len(methods) * (1 + 2 * 4)  # a warm-up, then 2 repetitions of 4 prompts
    assert [done for done, _, _ in steps] == list(range(runs + 1))
    assert {total for _, total, _ in steps} == {runs}
    # Each method comes first in turn.
    firsts = [what.split(" on ")[0] for _, _, what in steps[len(methods) :: len(methods)]]
    assert firsts[:4] == methods[:4]
    assert firsts[4] == methods[1]


def _printed(result: dict[str, Any], width: int) -> str:
    stream = io.StringIO()
    render_table(result, Console(file=stream, width=width))
    return stream.getvalue()


def test_the_table_shows_every_row(target: Path, drafter: Path, questions: Path) -> None:
    options = BenchOptions(
        target=target,
        drafter=drafter,
        prompts=questions,
        methods="draft_model",
        max_tokens=4,
        repetitions=1,
        batch_invariant="both",
        peers=False,
    )
    result = run_bench(options)
    text, narrow = (_printed(result, width) for width in (160, 80))
    assert "p25–p75" in text
    assert "p25–p75" not in narrow  # so that every row stays on one line
    assert sum(line.startswith("draft_model ") for line in narrow.splitlines()) == 2 * 3
    lines = text.splitlines()
    assert sum(line.startswith("draft_model ") for line in lines) == 2 * 3
    assert sum(line.startswith("ar ") for line in lines) == 2 * 3
    assert "coding (3 prompts)" in text
    assert "all (4 prompts)" in text
    assert "batch-invariant mode" in text

    # "both" measures each method in each mode, each against AR in its own mode.
    assert result["environment"]["batch_invariant"] == "both"
    for mode in (True, False):
        for row in rows_of(result, method="ar", batch_invariant=mode):
            assert row["speedup_vs_ar"] == 1
        assert len(rows_of(result, method="draft_model", batch_invariant=mode)) == 3
    cost = result["batch_invariant_cost"]
    assert [entry["num_tokens"] for entry in cost] == [1, 5, 8, 16]
    for entry in cost:
        assert entry["cost"] == pytest.approx(entry["on_ms"] / entry["off_ms"])
        assert entry["cost_in_torch"] == pytest.approx(entry["torch_on_ms"] / entry["off_ms"])


@pytest.mark.slow
def test_sampled_tokens_are_compared_where_they_have_to_agree(
    target: Path, drafter: Path, questions: Path
) -> None:
    options = BenchOptions(
        target=target,
        drafter=drafter,
        prompts=questions,
        methods="all,draft_model:num_speculative_tokens=2:acceptance=rejection",
        max_tokens=12,
        repetitions=1,
        temperature=1.0,
        seed=5,
    )
    result = run_bench(options)
    identical = {row["method"]: row["identical_to_ar"] for row in rows_of(result, category="all")}
    # No peers: their noise is another one.
    assert identical == {
        **{n: METHODS[n].acceptance == "coupled" or None for n in ENGINE_METHODS},
        "draft_model:num_speculative_tokens=2:acceptance=rejection": None,
    }
    (row,) = rows_of(result, method="speculative_sampling", category="all")
    assert row["mismatch_rate"] is None
    assert "distribution" in row["note"]


class Remembering(LocalBackend):
    """A deployment, whose drafters cannot be told to forget."""

    topology = "actors"

    def forget(self) -> bool:
        return False


@pytest.mark.slow
def test_no_run_profits_from_another_one_of_the_same_prompts(target: Path, questions: Path) -> None:
    row = "suffix_decoding:length=fixed"

    def measure(
        repetitions: int, backend: LocalBackend | None = None, methods: str = row
    ) -> dict[str, Any]:
        options = BenchOptions(
            target=target,
            prompts=questions,
            methods=methods,
            max_tokens=24,
            repetitions=repetitions,
            topology="actors" if backend else "colocated",
            peers=False,
        )
        return run_bench(options, backends=[backend] if backend else [])

    def accepted(result: dict[str, Any]) -> float:
        (found,) = rows_of(result, method=row, category="all")
        return float(found["mean_accepted_length"])

    once, thrice = measure(1), measure(3)
    assert accepted(thrice) == accepted(once)
    # The same drafter, in another row that runs before it.
    beside = measure(1, methods=f"suffix_decoding_tree:length=fixed,{row}")
    assert accepted(beside) == accepted(once)
    assert not any("repetitions" in note for note in thrice["notes"])
    remembered = measure(3, Remembering(load_engine(target, device="cpu")))
    assert accepted(remembered) > accepted(once)
    assert any("have met the prompts in earlier repetitions" in n for n in remembered["notes"])


class Tampered(LocalBackend):
    """A deployment (as a benchmark sees it) that changes the last token of some sequences."""

    topology = "actors"

    def generate(
        self,
        speculation: SpeculationConfig,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> BatchRun:
        run = super().generate(speculation, prompts, params)
        if speculation.method != "prompt_lookup" or len(prompts[0]) % 2:
            return run
        first, *others = run.sequences
        other_token = (first.token_ids[-1] + 1) % VOCAB_SIZE
        changed = dataclasses.replace(first, token_ids=(*first.token_ids[:-1], other_token))
        return dataclasses.replace(run, sequences=(changed, *others))


def test_a_deployment_is_measured_beside_the_engine_and_checked(
    target: Path, questions: Path
) -> None:
    options = BenchOptions(
        target=target,
        prompts=questions,
        methods="prompt_lookup",
        max_tokens=6,
        repetitions=2,
        topology="both",
        peers=False,
    )
    result = run_bench(options, backends=[Tampered(load_engine(target, device="cpu"))])
    found = {
        (row["topology"], row["method"]): (row["identical_to_ar"], row["mismatch_rate"])
        for row in rows_of(result, category="all")
    }
    lengths = [len(prompt.text) for prompt in read_prompts(questions)]
    even = sum(length % 2 == 0 for length in lengths) / len(lengths)
    assert 0 < even < 1
    assert found == {
        ("colocated", "ar"): (True, 0),
        ("colocated", "prompt_lookup"): (True, 0),
        ("actors", "ar"): (True, 0),
        ("actors", "prompt_lookup"): (False, even),
    }
    for row in rows_of(result, method="ar"):
        assert row["speedup_vs_ar"] == 1

    alone = dataclasses.replace(options, topology="actors")
    result = run_bench(alone, backends=[Tampered(load_engine(target, device="cpu"))])
    assert {row["topology"] for row in result["results"]} == {"actors"}


def test_the_bound_is_what_drafts_in_no_time_would_give() -> None:
    def batch_run(tokens: int, *forwards: tuple[int, float]) -> BatchRun:
        sequence = SequenceRun(token_ids=(7,) * tokens, num_target_forwards=len(forwards))
        return BatchRun(
            sequences=(sequence,), seconds=1.0, forwards=forwards,
            round_seconds=tuple(seconds + 0.002 for _, seconds in forwards),
        )  # fmt: skip

    ar = batch_run(4, *[(1, 0.010)] * 4)
    assert run._bound(ar, ar) == 1
    # Three tokens a forward, whose mean of 16 ms makes a round of 12 ms one of 18 ms.
    bound = run._bound(batch_run(6, (5, 0.014), (3, 0.018)), ar)
    assert bound == pytest.approx(3 * 12 / 18)
    assert run._bound(batch_run(0), ar) is run._bound(ar, batch_run(0)) is None


def test_batches_are_filled_up(target: Path, drafter: Path, questions: Path) -> None:
    options = BenchOptions(
        target=target,
        drafter=drafter,
        prompts=questions,
        methods=["draft_model"],
        batch=2,
        max_tokens=6,
        repetitions=1,
    )
    result = run_bench(options)
    rows = rows_of(result, category="coding")
    assert [row["method"] for row in rows] == ["ar", "draft_model", "transformers:ar"]
    for row in rows:
        assert (row["num_prompts"], row["num_samples"], row["batch"]) == (3, 2, 2)
        assert row["identical_to_ar"] is True
    notes = " ".join(result["notes"])
    assert "coding: 3 prompts do not fill batches of 2" in notes
    assert "takes one sequence" in notes


def test_limit_and_long_prompts(target: Path, tmp_path: Path) -> None:
    long = "".join(chr(97 + i % 26) for i in range(2 * CONTEXT_LENGTH))
    file = tmp_path / "long.jsonl"
    lines = [
        json.dumps({"question_id": i, "category": "c", "turns": [long if i else "short"]})
        for i in range(3)
    ]
    file.write_text("\n".join(lines))
    options = BenchOptions(
        target=target, prompts=file, methods="ar", max_tokens=4, repetitions=1, limit=2, peers=False
    )
    result = run_bench(options)
    assert {row["num_prompts"] for row in result["results"]} == {2}
    (note,) = result["notes"]
    assert note.startswith(f"1 of 2 prompts were cut from the left to {CONTEXT_LENGTH - 4} tokens")


# --- Ctrl-C ---------------------------------------------------------------------------------------


def interrupted_bench(
    options: BenchOptions, after: int, *, partial: bool = True
) -> tuple[dict[str, Any], int]:
    """With Ctrl-C before run number ``after``; and how many runs a whole one would have had."""
    totals = []

    def interrupt(done: int, total: int, what: str) -> None:
        totals.append(total)
        if done == after:
            raise KeyboardInterrupt

    return run_bench(options, interrupt, partial=partial), totals[0]


def test_an_interrupted_bench_has_the_prompts_that_all_methods_had(
    target: Path, questions: Path
) -> None:
    options = BenchOptions(
        target=target, prompts=questions, max_tokens=8, repetitions=2, peers=False,
        methods=["prompt_lookup", "suffix_decoding"], samples=True,
    )  # fmt: skip
    count = 3  # with AR
    # Two prompts whole, and of a third one two methods.
    result, total = interrupted_bench(options, count + 2 * count + 2)
    assert total == count * (1 + 2 * 4)
    assert result["interrupted"]
    assert result["notes"] == ["interrupted: 2 of 8 runs of each method are in the table"]
    assert {row["category"] for row in result["results"]} == {"coding", "all"}
    assert {row["num_prompts"] for row in result["results"]} == {2}
    assert {row["num_samples"] for row in result["results"]} == {2}
    assert all(row["identical_to_ar"] for row in result["results"])
    assert len(result["samples"]) == 2 * count

    # In the second repetition: every prompt, and one of them twice.
    result, _ = interrupted_bench(options, count + 5 * count)
    assert {row["num_samples"] for row in rows_of(result, category="all")} == {5}
    assert {row["num_prompts"] for row in rows_of(result, category="all")} == {4}
    assert {row["num_samples"] for row in rows_of(result, category="coding")} == {4}


@pytest.mark.parametrize(
    ("after", "partial"), [(0, True), (3, True), (20, False)], ids=["warming up", "early", "all"]
)
def test_an_interrupted_bench_raises_where_there_is_nothing_to_show(
    after: int, partial: bool, target: Path, questions: Path
) -> None:
    options = BenchOptions(
        target=target, prompts=questions, max_tokens=8, methods=["prompt_lookup"], peers=False
    )
    with pytest.raises(KeyboardInterrupt):
        interrupted_bench(options, after, partial=partial)


# --- synthetic acceptance ------------------------------------------------------------------------


@pytest.mark.one_of(1, slow=2)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "rate", [0.7, *(pytest.param(end, marks=pytest.mark.nightly) for end in (0.0, 1.0))]
)
def test_synthetic_drafts_are_right_as_often_as_asked_and_change_no_token(
    rate: float, temperature: float, target: Path, questions: Path
) -> None:
    tokens, drafted, lookup = 40, 3, "prompt_lookup:length=fixed"
    options = BenchOptions(
        target=target, prompts=questions, methods=lookup, max_tokens=tokens,
        repetitions=2, temperature=temperature, batch=2, peers=False,
        synthetic_acceptance=rate, synthetic_tokens=drafted,
    )  # fmt: skip
    result = run_bench(options)
    name = f"synthetic({rate:g}, {drafted})"
    (row,) = rows_of(result, method=name, category="all")
    assert name not in METHODS
    assert row["identical_to_ar"] is True
    assert row["note"].startswith("not a method")
    assert result["environment"]["synthetic_acceptance"] == rate
    # The method whose place its drafter takes keeps its own.
    without = run_bench(dataclasses.replace(options, synthetic_acceptance=None))
    lengths = [
        [row["mean_accepted_length"] for row in rows_of(each, method=lookup)]
        for each in (result, without)
    ]
    assert lengths[0] == lengths[1]
    length = row["mean_accepted_length"]
    if rate in (0, 1):  # the prefill gives the first token
        assert length == pytest.approx(tokens / -(-tokens // (1 + drafted * rate)), rel=0.03)
    else:
        assert length == pytest.approx((1 - rate ** (drafted + 1)) / (1 - rate), rel=0.15)
    again = rows_of(run_bench(options), method=name, category="all")
    assert again[0]["mean_accepted_length"] == length


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"synthetic_acceptance": -0.1}, "synthetic_acceptance"),
        ({"synthetic_acceptance": 1.5}, "synthetic_acceptance"),
        ({"synthetic_acceptance": float("nan")}, "synthetic_acceptance"),
        ({"synthetic_acceptance": 0.5, "topology": "actors"}, "synthetic_acceptance"),
        ({"synthetic_tokens": 0}, "synthetic_tokens"),
    ],
)
def test_bad_synthetic_options(values: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as error:
        BenchOptions(**values)
    assert error.value.field == field


# --- files ---------------------------------------------------------------------------------------


def result_rows() -> list[dict[str, Any]]:
    """Measurements as ``run_bench`` returns them: three methods in two categories and all."""
    found = {
        ("ar", "a"): (1.0, 1.0), ("ar", "<b>"): (1.0, 1.0), ("ar", "all"): (1.0, 1.0),
        ("prompt_lookup", "a"): (1.5, 2.25), ("prompt_lookup", "<b>"): (0.9, 1.5),
        ("prompt_lookup", "all"): (1.2, 1.75), ("draft_model", "a"): (2.5, 10.5),
        ("draft_model", "<b>"): (1.7, 3.5), ("draft_model", "all"): (2.0, 3.25),
    }  # fmt: skip
    return [
        {
            "method": method, "category": category, "topology": "colocated",
            "batch_invariant": True, "tokens_per_second": 100 * speedup, "p25": 90 * speedup,
            "p75": 110 * speedup, "speedup_vs_ar": speedup, "speedup_p25": 0.9 * speedup,
            "speedup_p75": 1.25 * speedup, "speedup_bound": 1.5 * speedup,
            "mean_accepted_length": length,
            "acceptance_rate": None if method == "ar" else 0.5,
            "identical_to_ar": method != "draft_model", "mismatch_rate": 0.25,
            "round_ms_p50": 1.5, "num_prompts": 2, "note": None,
        }
        for (method, category), (speedup, length) in found.items()
    ]  # fmt: skip


@pytest.fixture
def measured() -> dict[str, Any]:
    environment = {
        **describe_environment(), "target": "<demo>", "drafter": "demo", "prompts": "built-in",
        "suite": None, "dtype": "float32", "device": "cpu", "batch_invariant": True,
        "fingerprint": "portable", "batch": 1, "max_tokens": 8, "temperature": 0.0, "seed": 0,
        "repetitions": 2, "chat": False,
    }  # fmt: skip
    unavailable = [{"method": "eagle", "reason": "no trained head", "topology": "colocated"}]
    return {
        "environment": environment, "results": result_rows(), "notes": ["a note"],
        "unavailable": unavailable,
    }  # fmt: skip


def test_csv_has_every_measurement_and_field(target: Path, questions: Path) -> None:
    options = BenchOptions(
        target=target, prompts=questions, methods="prompt_lookup", max_tokens=4, repetitions=1,
        peers=False,
    )  # fmt: skip
    result = run_bench(options)
    rows = list(csv.DictReader(io.StringIO(render_csv(result))))
    assert len(rows) == len(result["results"]) == 2 * 3
    for row, whole in zip(rows, result["results"], strict=True):
        assert row == {name: "" if v is None else str(v) for name, v in whole.items()}
    assert "<title>" in render_page(result)  # a result of run_bench has all that the page shows


def test_the_page_names_what_was_measured(measured: dict[str, Any]) -> None:
    page = render_page(measured, "paceline bench --methods '<all>'")
    assert "$ paceline bench --methods &#39;&lt;all&gt;&#39;" in page
    assert "&lt;demo&gt;" in page and "<demo>" not in page and "&lt;b&gt;" in page
    for shown in (
        "git_commit",
        "torch",
        "a note",
        "not run: eagle (no trained head)",
        "25 % differ",
    ):
        assert shown in page
    assert not re.findall(r"(?:src|href)=\"(?!data:)|https?://|@import|url\(", page)


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (380, "dark")])
def test_the_page_in_a_browser(
    width: int, scheme: str, chromium: Any, measured: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "bench.html"
    file.write_text(render_page(measured, "paceline bench " + "x" * 200), "utf-8")
    context = chromium.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda m: complaints.append(f"{m.type}: {m.text}"))
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.on("request", lambda r: requests.append(r.url))
    page.goto(file.as_uri())

    def bars(of: str) -> list[tuple[str, float]]:
        """The label of each bar, and its share of the longest possible one."""
        found = page.evaluate(
            "of => [...document.querySelectorAll(`${of} .bars > div`)].map(bar => ["
            "bar.querySelector('.label span').textContent,"
            "bar.querySelector('rect').getBoundingClientRect().width"
            " / bar.querySelector('svg').getBoundingClientRect().width])",
            of,
        )
        return [(name, share) for name, share in found]

    # The widest spread ends at the right: 1.25 x the largest speedup, 2.
    assert bars("#speedup") == [
        ("draft_model", pytest.approx(2 / 2.5, abs=0.01)),
        ("prompt_lookup", pytest.approx(1.2 / 2.5, abs=0.01)),
        ("ar", pytest.approx(1 / 2.5, abs=0.01)),
    ]
    assert bars("#lengths") == [
        ("draft_model", pytest.approx(1, abs=0.01)),
        ("prompt_lookup", pytest.approx(2.25 / 10.5, abs=0.01)),
        ("draft_model", pytest.approx(3.5 / 10.5, abs=0.01)),
        ("prompt_lookup", pytest.approx(1.5 / 10.5, abs=0.01)),
    ]
    assert page.locator("#lengths h3").all_text_contents() == ["a", "<b>"]

    def column(number: int) -> list[str]:
        cells: list[str] = page.locator(f"tbody td:nth-child({number})").all_text_contents()
        return cells

    assert column(2) == [*["all"] * 3, *["a"] * 3, *["<b>"] * 3]
    page.get_by_role("button", name="τ").click()
    lengths = ["10.50", "3.50", "3.25", "2.25", "1.75", "1.50", "1.00", "1.00", "1.00"]
    assert column(7) == lengths  # by value: as texts, 10.50 would be among the smallest
    assert page.locator("th[aria-sort=descending]").text_content() == "τ"
    page.get_by_role("button", name="τ").click()
    assert column(7) == lengths[::-1]
    page.get_by_role("button", name="method").click()
    assert column(1) == [*["prompt_lookup"] * 3, *["draft_model"] * 3, *["ar"] * 3]

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert complaints == []
    assert requests == [file.as_uri()]
    context.close()


# --- prompts -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_builtin_prompts_are_held_out_text_of_a_fitting_length() -> None:
    prompts = builtin_prompts()
    assert prompts == builtin_prompts.__wrapped__()  # cut anew, not from the cache
    assert len({prompt.prompt_id for prompt in prompts}) == len(prompts)
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    held_out = dict(held_out_modules())
    training = {document.name for document in split()[0]}
    tokenizer = load_tokenizer(TARGET_DIR)
    for category in CATEGORIES:
        members = [prompt for prompt in prompts if prompt.category == category]
        assert len(members) == PROMPTS_PER_CATEGORY >= 8
        for prompt in members:
            module = prompt.prompt_id.partition(":")[2]
            assert module not in training
            assert 90 <= len(tokenizer.encode(prompt.text)) <= 360, prompt.prompt_id
            assert prompt.text.endswith("\n")
            if category != "copy_heavy_edits":
                assert prompt.text in held_out[module] + "\n"
                continue
            before, after = prompt.text.split("\n\n# After renaming ")
            code = before.removeprefix("# Before:\n")
            names, beginning = after.split(":\n", 1)
            old, new = names.split(" to ")
            assert old in code
            assert code.startswith(beginning.replace(new, old).rstrip("\n"))


def test_a_spec_bench_file(questions: Path) -> None:
    prompts = read_prompts(questions)
    assert [(prompt.prompt_id, prompt.category) for prompt in prompts] == [
        ("1", "coding"),
        ("2", "writing"),
        ("3", "coding"),
        ("4", "coding"),
    ]
    assert prompts[0].text == "def add(a, b):"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ("", "at least one question"),
        ("{not json", "bad.jsonl:1"),
        ("[]", "bad.jsonl:1"),
        ('\n{"question_id": 1, "category": "c"}', 'bad.jsonl:2.*"turns" is missing'),
        ('{"category": "c", "turns": ["x"]}', '"question_id" is missing'),
        ('{"question_id": 1, "category": "c", "turns": []}', '"turns" has no text'),
        ('{"question_id": 1, "category": "c", "turns": [""]}', '"turns" has no text'),
        ('{"question_id": 1, "category": "c", "turns": "x"}', '"turns" has no text'),
        ('{"question_id": 1, "category": "all", "turns": ["x"]}', '"category"'),
        ('{"question_id": 1, "category": 7, "turns": ["x"]}', '"category"'),
        (b"\xff\xfe\xff", "readable"),
    ],
)
def test_bad_prompt_files(content: str | bytes, named: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InvalidArgument, match=named) as error:
        read_prompts(file)
    assert error.value.field == "prompts"


def test_a_prompt_file_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"none\.jsonl") as error:
        read_prompts(tmp_path / "none.jsonl")
    assert error.value.field == "prompts"


# --- suites --------------------------------------------------------------------------------------

CHAT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "Hi"},
    {"from": "gpt", "value": "Hello!"},
    {"from": "human", "value": "Grüße\u2028 "},
]
RECORDS: dict[str, list[dict[str, Any]]] = {
    "spec-bench": [{"question_id": 1, "category": "qa", "turns": ["Why?"], "reference": []}],
    "mt-bench": [{"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."]}],
    "gsm8k": [
        {"question": "2 + 2?", "answer": "#### 4"},
        {"question": "3 + 3?", "answer": "#### 6"},
    ],
    "humaneval": [
        {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f", "test": ""}
    ],
    "speed-bench": [
        {
            "question_id": "a1", "category": "coding", "sub_category": None, "turns": ["x", "y"],
            "source": "s", "src_id": None, "difficulty": "", "multiturn": True,
        }
    ],
    "sharegpt": [
        {"id": "one", "conversations": CHAT},
        {"id": "empty", "conversations": []},
        {"id": "silent", "conversations": [{"from": "human", "value": ""}, CHAT[2]]},
    ],
}  # fmt: skip


def write_suite(suite: str, records: list[Any], folder: Path, ending: str = ".jsonl") -> Path:
    """A file of the suite; its format follows from the suite and the ending."""
    file = folder / f"prompts{ending if suite != 'speed-bench' else '.parquet'}"
    lines = "\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    if suite == "speed-bench":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), file)
    elif ending == ".json":
        file.write_text(json.dumps(records, indent=1))
    elif ending.endswith(".gz"):
        file.write_bytes(gzip.compress(lines.encode()))
    else:
        file.write_text(lines, encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("suite", "ending", "expected"),
    [
        ("spec-bench", ".jsonl", [("1", "qa", ("Why?",))]),
        ("mt-bench", ".jsonl", [("81", "writing", ("Write.", "Rewrite."))]),
        ("gsm8k", ".jsonl", [("1", "gsm8k", ("2 + 2?",)), ("2", "gsm8k", ("3 + 3?",))]),
        ("humaneval", ".jsonl", None),
        ("humaneval", ".jsonl.gz", None),
        ("speed-bench", ".parquet", [("a1", "coding", ("x", "y"))]),
        ("sharegpt", ".jsonl", [("one", "sharegpt", ("Hi", "Grüße\u2028 "))]),
        ("sharegpt", ".json", [("one", "sharegpt", ("Hi", "Grüße\u2028 "))]),
    ],
)
def test_a_suite_reads_its_format(
    suite: str, ending: str, expected: list[Any] | None, tmp_path: Path
) -> None:
    asked = "Complete the following Python function.\n\ndef f(x):\n"
    prompts = read_prompts(write_suite(suite, RECORDS[suite], tmp_path, ending), suite)
    assert [(p.prompt_id, p.category, p.turns) for p in prompts] == (
        expected or [("HumanEval/0", "humaneval", (asked,))]
    )


def test_every_suite_is_tested() -> None:
    assert RECORDS.keys() == SUITES.keys()


@pytest.mark.parametrize(
    ("suite", "change", "named"),
    [
        ("spec-bench", {"turns": None}, '"turns"'),
        ("mt-bench", {"category": "all"}, '"category"'),
        ("mt-bench", {"question_id": None}, '"question_id" is a text or a number'),
        ("gsm8k", {"question": 4}, '"question" has no text'),
        ("gsm8k", {"question": " "}, '"question" has no text'),
        ("gsm8k", {"question": ...}, '"question" is missing'),
        ("gsm8k", {"question": "\udc80"}, "surrogates"),
        ("humaneval", {"task_id": ...}, '"task_id" is missing'),
        ("humaneval", {"prompt": []}, '"prompt" has no text'),
        ("speed-bench", {"turns": []}, '"turns" has no text'),
        ("speed-bench", {"turns": ["x", None]}, "a turn is not a text"),
        ("speed-bench", {"category": ...}, '"category"'),
        (
            "speed-bench",
            {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING ..."]},
            "placeholder.*specdec_bench",
        ),
        ("sharegpt", {"id": ...}, '"id" is missing'),
        ("sharegpt", {"conversations": "Hi"}, '"conversations" is a list'),
        ("sharegpt", {"conversations": [*CHAT, "Hi"]}, '"from" of message 5'),
        ("sharegpt", {"conversations": [{"from": "human"}]}, '"value" of message 1'),
    ],
)
def test_a_broken_record_is_named(
    suite: str, change: dict[str, Any], named: str, tmp_path: Path
) -> None:
    right = RECORDS[suite][0]
    broken = {k: v for k, v in (right | change).items() if v is not ...}
    for ending in (".jsonl", ".json") if suite == "sharegpt" else (".jsonl",):
        file = tmp_path / f"prompts{ending}"
        if suite == "gsm8k":  # half a surrogate pair can be escaped only
            file.write_text(json.dumps(right) + "\n\n" + json.dumps(broken))
            place = f"{file}:3"
        else:
            file = write_suite(suite, [right, broken], tmp_path, ending)
            place = f"{file}:2" if file.suffix == ".jsonl" else f"{file}: record 2"
        with pytest.raises(InvalidArgument, match=named) as error:
            read_prompts(file, suite)
        assert (error.value.field, error.value.value) == ("prompts", place)
        assert "an object with" in error.value.allowed or "a record with" in error.value.allowed


@pytest.mark.parametrize(
    ("suite", "content", "named"),
    [
        ("gsm8k", b'{"question": "a"}\n{"question": ', r"prompts:2.*JSON"),
        ("gsm8k", b'{"question": "a"}\n\xff', r"prompts:2.*UTF-8"),
        ("gsm8k", b"[" * 100_000, r"prompts:1.*JSON"),
        ("gsm8k", b"\n\n", 'at least one question .JSONL with "question"'),
        ("sharegpt", b'[{"id": 1, "conversations": []}]', "at least one question"),
        ("sharegpt", b' [{"id": 1}, ', "JSON"),
        ("speed-bench", b"PAR1 no", "a readable parquet file"),
    ],
)
def test_a_broken_file_is_named(suite: str, content: bytes, named: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts"
    file.write_bytes(content)
    with pytest.raises(InvalidArgument, match=named) as error:
        read_prompts(file, suite)
    assert error.value.field == "prompts"


def test_a_broken_compressed_file_is_named(tmp_path: Path) -> None:
    file = write_suite("humaneval", RECORDS["humaneval"] * 9, tmp_path, ".jsonl.gz")
    whole = file.read_bytes()
    for content in (whole[:-20], b"x" * 40, whole[:20] + b"\0" * 20 + whole[40:]):
        file.write_bytes(content)
        with pytest.raises(InvalidArgument, match=r"prompts\.jsonl\.gz.*readable"):
            read_prompts(file, "humaneval")


@pytest.mark.parametrize("suite", list(SUITES))
def test_a_suite_without_its_file(suite: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="no_such_file"):
        read_prompts(tmp_path / "no_such_file", suite)
    with pytest.raises(InvalidArgument, match="a file in prompts"):
        BenchOptions(suite=suite)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_suite("speed-bench", RECORDS["speed-bench"], tmp_path)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'paceline\[bench\]'"):
        read_prompts(file, "speed-bench")


def test_a_bench_of_a_suite(target: Path, tmp_path: Path) -> None:
    options = BenchOptions(
        target=target, prompts=write_suite("gsm8k", RECORDS["gsm8k"], tmp_path), suite="gsm8k",
        methods="prompt_lookup", max_tokens=4, repetitions=1, peers=False,
    )  # fmt: skip
    result = run_bench(options)
    assert {row["category"] for row in result["results"]} == {"gsm8k", "all"}
    assert {row["num_prompts"] for row in result["results"]} == {2}
    assert result["environment"]["suite"] == "gsm8k"
    with pytest.raises(InvalidArgument, match="spec-bench, mt-bench") as error:
        BenchOptions(prompts=tmp_path, suite="alpaca")
    assert error.value.field == "suite"


# --- options -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("batch", 0),
        ("batch", 1.5),
        ("max_tokens", 0),
        ("max_tokens", -3),
        ("repetitions", 0),
        ("limit", 0),
        ("temperature", float("nan")),
        ("temperature", -1.0),
        ("seed", -1),
        ("batch_invariant", "maybe"),
        ("topology", "device"),
        ("dtype", "int4"),
    ],
)
def test_bad_options_name_the_field(field: str, value: Any) -> None:
    options: dict[str, Any] = {field: value}
    with pytest.raises(InvalidArgument) as error:
        BenchOptions(**options)
    assert error.value.field == field


def test_options_that_do_not_fit_together(target: Path, questions: Path) -> None:
    with pytest.raises(InvalidArgument, match="peers"):
        BenchOptions(peers=True, temperature=1.0)
    with pytest.raises(InvalidArgument, match="drafter"):
        BenchOptions(drafter=target)
    with pytest.raises(InvalidArgument, match="topology"):
        run_bench(BenchOptions(target=target, topology="actors"))
    with pytest.raises(InvalidArgument, match="context"):
        run_bench(BenchOptions(target=target, prompts=questions, max_tokens=CONTEXT_LENGTH))
    with pytest.raises(ModelNotFound, match="no_such_folder"):
        run_bench(BenchOptions(target="no_such_folder"))
    # Without a drafter, methods that need one are not there, and `all` leaves them out.
    with pytest.raises(InvalidArgument, match="ar, prompt_lookup") as error:
        run_bench(BenchOptions(target=target, prompts=questions, methods="draft_model"))
    assert (error.value.field, error.value.value) == ("methods", "draft_model")


def test_methods_and_their_knobs() -> None:
    plans = parse_methods("prompt_lookup, draft_model:num_speculative_tokens=6", METHODS)
    assert list(plans) == ["ar", "prompt_lookup", "draft_model:num_speculative_tokens=6"]
    config, plan = plans["draft_model:num_speculative_tokens=6"]
    assert config == SpeculationConfig(method="draft_model", num_speculative_tokens=6)
    assert plan.config.num_speculative_tokens == 6
    assert list(parse_methods("all", METHODS)) == [n for n, m in METHODS.items() if m.lossless]
    assert list(parse_methods(["all"], ["ar", "prompt_lookup"])) == ["ar", "prompt_lookup"]


def test_a_knob_in_a_list_of_methods_may_be_a_list() -> None:
    label = 'combined:drafters=["prompt_lookup","draft_model"]:node_budget=9'
    plans = parse_methods(f"prompt_lookup,{label},draft_model", METHODS)
    assert list(plans) == ["ar", "prompt_lookup", label, "draft_model"]
    config, _ = plans[label]
    assert (config.drafters, config.node_budget) == (("prompt_lookup", "draft_model"), 9)


def test_lossy_methods_are_measured_on_request_only(
    target: Path, drafter: Path, questions: Path
) -> None:
    lossy = next(name for name, method in METHODS.items() if not method.lossless)
    assert lossy not in parse_methods("all", METHODS)
    assert set(parse_methods("all", METHODS, allow_lossy=True)) == set(METHODS)
    with pytest.raises(InvalidArgument, match="allow_lossy"):
        parse_methods(lossy, METHODS)
    options = BenchOptions(
        target=target, drafter=drafter, prompts=questions, methods=lossy, max_tokens=4,
        repetitions=1, limit=1, allow_lossy=True, peers=False,
    )  # fmt: skip
    (row,) = rows_of(run_bench(options), method=lossy, category="all")
    assert row["identical_to_ar"] is None
    assert "not lossless" in row["note"]


def test_methods_that_cannot_run_are_listed_with_the_reason(target: Path, questions: Path) -> None:
    """Without draft models and heads, "all" leaves out and names the methods that need them."""
    backend = LocalBackend(load_engine(target, device="cpu"))
    models = {"draft_model", *MASKED_DRAFTERS}
    wants = {n for n, m in METHODS.items() if models & {m.drafter, *m.uses}}
    headed = {n for n, m in METHODS.items() if m.head}
    assert set(backend.unavailable) == wants | headed
    assert set(backend.methods) == set(METHODS) - wants - headed
    with pytest.raises(InvalidArgument, match="drafter not loaded here: draft_model"):
        parse_methods("draft_model", backend.methods, unavailable=backend.unavailable)

    options = BenchOptions(
        target=target, prompts=questions, max_tokens=4, repetitions=1, limit=1, peers=False
    )
    result = run_bench(options)
    assert {row["method"] for row in result["results"]} == set(ENGINE_METHODS) - wants
    for entry in result["unavailable"]:
        assert entry.keys() == {"method", "reason", "topology"}
        missing = "drafter not loaded" if entry["method"] in wants else "no trained head in"
        assert missing in entry["reason"]
    assert {entry["method"] for entry in result["unavailable"]} == wants | headed
    assert "not run (drafter not loaded here: draft_model): draft_model, " in _printed(result, 160)


def test_the_table_has_the_fastest_first(target: Path, questions: Path) -> None:
    options = BenchOptions(
        target=target, prompts=questions, methods="prompt_lookup,aggressive", max_tokens=4,
        repetitions=1, peers=False,
    )  # fmt: skip
    result = run_bench(options)
    speeds = {"ar": 1.0, "prompt_lookup": 0.5, "aggressive": 3.0}
    for row in result["results"]:
        row["speedup_vs_ar"] = speeds[row["method"]]
    lines = [line.partition(" ")[0] for line in _printed(result, 160).splitlines()]
    assert [name for name in lines if name in speeds] == ["aggressive", "ar", "prompt_lookup"] * 3
    assert result["unavailable"] == []  # no other methods were asked for


@pytest.mark.parametrize(
    ("methods", "named"),
    [
        ("", "all, or some of"),
        ("no_such_method", "no_such_method.*draft_model"),
        ("draft_model:gamma=3", "gamma"),
        ("draft_model:num_speculative_tokens=many", "num_speculative_tokens"),
        ("draft_model:num_speculative_tokens", "name:key=value"),
        ("prompt_lookup:branching=2", "branching"),
    ],
)
def test_bad_methods(methods: str, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        parse_methods(methods, METHODS)


# --- conversations --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    turns = (["def load(path):"], ["class Store:", "def save(path):"])
    file.write_text(
        "".join(
            json.dumps({"question_id": i, "category": "talk", "turns": list(each)}) + "\n"
            for i, each in enumerate(turns)
        )
    )
    return file


def test_all_turns_of_a_conversation_are_measured_with_ars_answers_before_them(talks: Path) -> None:
    options = BenchOptions(prompts=talks, chat=True, max_tokens=12, repetitions=1)
    template = options.template()
    assert template is not None
    backend = LocalBackend(load_engine())
    params = options.sampling_params(is_chat=True)
    assert not params.ignore_eos
    groups = run._groups(options, backend, template, params, [])
    assert [g.prompt_ids for g in groups] == [("0",), ("1/turn1",), ("1/turn2",)]

    engine, asked = load_engine(), {"role": "user", "content": "class Store:"}
    ids = encode_chat(engine.tokenizer, template, [asked])
    assert groups[1].token_ids == (tuple(ids),)
    (session,) = engine.generate([ids], params, SpeculationConfig(method="ar"))
    messages = [
        asked,
        {"role": "assistant", "content": engine.tokenizer.decode(session.output_ids)},
        {"role": "user", "content": "def save(path):"},
    ]
    assert groups[2].token_ids == (tuple(encode_chat(engine.tokenizer, template, messages)),)


def test_a_bench_of_conversations(talks: Path) -> None:
    options = BenchOptions(
        prompts=talks, chat=True, methods="prompt_lookup", max_tokens=12, repetitions=1
    )
    result = run_bench(options)
    assert result["environment"]["chat"] is True
    rows = rows_of(result, category="all")
    assert [row["method"] for row in rows] == ["ar", "prompt_lookup"]  # no peers
    assert all(row["num_prompts"] == 3 and row["identical_to_ar"] for row in rows)


def test_prompts_are_questions_by_themselves_where_the_target_has_a_template(
    talks: Path, tmp_path: Path
) -> None:
    for file in TARGET_DIR.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert BenchOptions(target=tmp_path, prompts=talks).template() is None
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert BenchOptions(target=tmp_path, prompts=talks).template() is not None
    assert BenchOptions(target=tmp_path, prompts=talks, chat=False).template() is None
    assert BenchOptions(target=tmp_path, prompts=talks, peers=True).template() is None
    assert BenchOptions(target=tmp_path).template() is None  # built-in prompts are beginnings
    with pytest.raises(InvalidArgument, match=r"peers.*no chat"):
        BenchOptions(prompts=talks, chat=True, peers=True)


def test_a_turn_that_is_not_a_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "q.jsonl"
    file.write_text('{"question_id": 1, "category": "a", "turns": ["x", 3]}\n')
    with pytest.raises(InvalidArgument, match=r"q\.jsonl:1.*a turn is not a text"):
        read_prompts(file)
