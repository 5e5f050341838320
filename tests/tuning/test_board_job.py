"""The rows of a board on the nodes of a Ray."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.bench import BenchOptions
from paceline.bench.board_rows import BoardRow, read_rows
from paceline.cluster import board_job
from paceline.cluster.board_job import BoardJob, run_on_ray
from paceline.cluster.local_ray import ClusterError
from tests.modelzoo import make_model

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]


@pytest.mark.slow
def test_nodes_measure_rows_and_the_job_writes_them(
    ray_here: None, zoo: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "questions.jsonl"
    line = {"question_id": 1, "category": "coding", "turns": ["x = 1, 1, 1, "]}
    prompts.write_text(json.dumps(line))
    options = BenchOptions(
        target=make_model("llama", zoo), prompts=prompts, max_tokens=8, repetitions=1, peers=False
    )
    job = BoardJob(
        options=options, methods=("prompt_lookup", "medusa"), command="paceline board run",
        out=tmp_path / "rows", cpus=1,  # other tests' replicas may hold parts of the two
    )  # fmt: skip
    reported: list[BoardRow] = []
    steps: list[tuple[int, int, str]] = []
    skipped = run_on_ray(job, "auto", reported.append, lambda *step: steps.append(step))
    assert skipped == 0
    assert steps == [(0, 2, "prompt_lookup"), (1, 2, "medusa")]  # one at a time on a node
    assert {row.method: row.reason is None for row in reported} == {
        "prompt_lookup": True, "medusa": False,
    }  # fmt: skip
    assert read_rows([job.out]) == sorted(reported, key=lambda row: row.key)
    # What is there is left out, and what could not run is tried again.
    assert run_on_ray(job, "auto", reported.append, lambda *step: None) == 1
    assert [row.method for row in reported] == ["prompt_lookup", "medusa", "medusa"]


@pytest.mark.slow
def test_rows_that_others_leave_no_cpus_are_given_up_with_the_reason(
    ray_here: None, zoo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(board_job, "WATCH_S", 0.3)
    monkeypatch.setattr(board_job, "START_WAIT_S", 1.0)

    @ray.remote(num_cpus=0.3)
    class Other:
        def here(self) -> bool:
            return True

    other = Other.remote()  # type: ignore[attr-defined]
    ray.get(other.here.remote())
    job = BoardJob(
        options=BenchOptions(target=make_model("llama", zoo), max_tokens=8, peers=False),
        methods=("prompt_lookup",), command="paceline board run", out=tmp_path / "rows",
    )  # fmt: skip
    steps: list[str] = []
    try:
        with pytest.raises(ClusterError, match=r"others hold [\d.]+ for 1 s.*--cpus"):
            run_on_ray(job, "auto", lambda row: None, lambda done, total, what: steps.append(what))
    finally:
        ray.kill(other)
    assert steps[-1].startswith("waiting for CPUs for prompt_lookup")
    assert not job.out.exists()
