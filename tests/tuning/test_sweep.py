"""Whole sweeps on a real Ray: what they write, what survives a kill, what is refused when."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file, save_file

from paceline.demo import DRAFTER_DIR
from paceline.deployments.config import read_config_file
from paceline.errors import InvalidArgument
from paceline.plan import resolve
from paceline.tuning.drafters import run_each, show
from paceline.tuning.results import Point, Results, TrialRecord
from paceline.tuning.space import Space, SweepError, parse_space
from paceline.tuning.stages import Sweep
from tests.modelzoo import make_model

pytestmark = [pytest.mark.serve, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
SMALL: Mapping[str, Any] = {
    "workload": {"limit": 1, "categories": ["code_completion"], "max_tokens": 16},
    "measurement": {"repetitions": 2},
    "search": {"trials": 4, "simulate": False, "confirm": 1},
    "resources": {"cpus": 1},  # other tests' deployments hold parts of the machine's CPUs
    "space": {"method": ["draft_model", "prompt_lookup"], "num_speculative_tokens": [2, 4, 6]},
}


def small(**blocks: Any) -> Space:
    merged = {
        name: {**SMALL.get(name, {}), **block} if isinstance(block, dict) else block
        for name, block in blocks.items()
    }
    if "space" in blocks:
        merged["space"] = blocks["space"]
    return parse_space({**SMALL, **merged})


def quiet() -> Console:
    return Console(quiet=True)


def keys(results: Results) -> list[str]:
    return [record.key for record in results.trials()]


def test_from_a_space_to_a_file_that_can_be_served(
    ray_here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = small(objective=["goodput", "latency_p99"], search={"simulate": True})
    results = Results(str(tmp_path / "sweep"))
    manifest = Sweep(space, results, Console(width=120)).run()

    assert manifest.state == "finished"
    assert manifest.num_points == 7
    records = results.trials()
    assert [record.number for record in records] == [0, 1, 2, 3]
    assert records[0].point.is_ar
    assert len(set(keys(results))) == 4
    for record in records:
        assert record.status == "finished"
        assert record.metrics is not None
        assert record.metrics.identical_to_ar is True
        assert record.counts
    assert {p.key for p in results.predictions()} == {point.key for point in space.points}
    assert all(record.predicted is not None for record in records)
    best = read_config_file(tmp_path / "sweep" / "best.yaml").config
    measured = {record.point.speculation for record in records}
    assert best.speculation in measured
    assert best.experience is not None
    learnt = json.loads(best.experience)
    assert {"draft_model", "suffix"} <= {drafter for _, _, drafter, *_ in learnt["rates"]}
    assert best.topology == "colocated"
    assert list((tmp_path / "sweep" / "pareto").glob("*.yaml"))
    assert "best.yaml" in (tmp_path / "sweep" / "report.html").read_text()
    printed = capsys.readouterr().out
    assert "[  4/4]" in printed
    assert "goodput over AR" in printed or "x (" in printed
    # TensorBoard's logs are there, and no file was left half written.
    assert list((tmp_path / "sweep" / "tune").rglob("events.out.tfevents*"))
    assert not list((tmp_path / "sweep").rglob("*.part"))

    with pytest.raises(InvalidArgument, match="--resume"):
        Sweep(space, results, quiet())
    with pytest.raises(InvalidArgument, match=r"workload\.max_tokens"):
        Sweep(small(workload={"max_tokens": 8}), results, quiet(), resume=True)
    # Nothing is left to do: the same trials, none again.
    before = {file.name: file.read_text() for file in (tmp_path / "sweep/trials").iterdir()}
    assert Sweep(space, results, quiet(), resume=True).run().num_runs == 2
    assert {f.name: f.read_text() for f in (tmp_path / "sweep/trials").iterdir()} == before


@pytest.mark.nightly
def test_the_draft_model_is_searched_too(
    ray_here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep with each; the one that is right and cheap beats the one that is never right."""
    wrong = tmp_path / "wrong"
    shutil.copytree(DRAFTER_DIR, wrong)
    weights = load_file(wrong / "model.safetensors")
    save_file({name: 0.01 * tensor.sign() for name, tensor in weights.items()},
              wrong / "model.safetensors", {"format": "pt"})  # fmt: skip
    search = {"trials": 2, "drafters": [str(wrong), str(DRAFTER_DIR)]}
    space = small(search=search, space={"method": ["draft_model"], "length": ["fixed"]})
    results = Results(str(tmp_path / "sweep"))
    run_each(space, results, Console(width=120))
    rows = json.loads((tmp_path / "sweep" / "drafters.json").read_text())
    assert [row["drafter"] for row in rows] == [DRAFTER_DIR.name, "wrong"]
    assert rows[0]["speedup"]["value"] > rows[1]["speedup"]["value"]
    best = read_config_file(tmp_path / "sweep" / "best.yaml").config
    assert best.model.drafter == str(DRAFTER_DIR)
    assert results.manifest().state == "finished"
    show(results, Console(width=120))
    assert "wrong" in capsys.readouterr().out
    with pytest.raises(InvalidArgument, match="--resume"):
        run_each(space, results, quiet())
    before = results.manifest().seconds["trials"]
    run_each(space, results, quiet(), resume=True)  # nothing is left to do
    assert results.manifest().seconds["trials"] < before + 1.0


def test_a_tracker_that_is_not_installed_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.tuning.tuner.find_spec", lambda name: None)
    space = small(tracking={"mlflow_uri": "sqlite:///runs.db"})
    with pytest.raises(InvalidArgument, match=r"tracking\.mlflow_uri.*pip install mlflow"):
        Sweep(space, Results(str(tmp_path / "sweep")), quiet())
    assert not (tmp_path / "sweep").exists()


@pytest.mark.nightly
def test_a_drafter_in_an_actor_of_its_own(ray_here: None, tmp_path: Path) -> None:
    space = small(space={"method": "draft_model", "length": "fixed", "topology": ["actors"]})
    results = Results(str(tmp_path))
    Sweep(space, results, quiet()).run()
    ar, actors = results.trials()
    assert (ar.point.topology, actors.point.topology) == ("colocated", "actors")
    assert actors.metrics is not None
    assert actors.metrics.identical_to_ar is True
    assert actors.metrics.mean_accepted_length > 1.5  # it did draft


@pytest.mark.nightly
def test_a_grid_is_measured_in_full_but_for_what_the_target_refuses(
    ray_here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = small(
        search={"algorithm": "grid", "trials": None, "early_stopping": False},
        space={"method": "layer_skip", "exit_layer": [6, 8, 60]},
    )
    results = Results(str(tmp_path))
    Sweep(space, results, Console(width=200)).run()
    exits = [resolve(r.point.speculation).config.exit_layer for r in results.trials()]
    assert sorted(exits, key=str) == [6, 8, None]
    points = {point.key for point in space.points if point.speculation.exit_layer != 60}
    assert set(keys(results)) == points
    assert "1 point(s) left out: exit_layer: got 60" in capsys.readouterr().out


# --- what goes wrong ------------------------------------------------------------------------------


def test_nothing_that_the_target_can_run(ray_here: None, tmp_path: Path) -> None:
    space = small(space={"method": "layer_skip", "exit_layer": [60]})
    results = Results(str(tmp_path))
    with pytest.raises(SweepError, match="exit_layer: got 60"):
        Sweep(space, results, quiet()).run()
    assert results.manifest().state == "failed"
    assert results.trials() == []


def test_a_prompt_that_is_too_long_is_named_before_the_first_trial(
    ray_here: None, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [("short", "def f():"), ("long", "word " * 4000)]
    prompts.write_text(
        "".join(
            json.dumps({"question_id": name, "category": "code_completion", "turns": [text]}) + "\n"
            for name, text in lines
        )
    )
    space = small(workload={"prompts": str(prompts), "limit": None})
    results = Results(str(tmp_path / "sweep"))
    with pytest.raises(SweepError, match=r"workload\.prompts: got 'long \(\d+ tokens\)'"):
        Sweep(space, results, quiet()).run()
    assert results.trials() == []


def test_a_model_that_does_not_load_is_named_before_the_first_trial(
    ray_here: None, tmp_path: Path
) -> None:
    folder = make_model("llama", tmp_path / "models")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    space = small(model={"target": str(folder)}, space={"method": "prompt_lookup"})
    results = Results(str(tmp_path / "sweep"))
    with pytest.raises(SweepError, match=r"on node .*model\.safetensors"):
        Sweep(space, results, quiet()).run()
    assert results.trials() == []


def test_more_than_a_node_has(ray_here: None, tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"resources\.cpus: no node has 5000 CPUs"):
        Sweep(small(resources={"cpus": 5000}), Results(str(tmp_path / "a")), quiet()).run()
    with pytest.raises(SweepError, match="no node of the cluster has 64 GPUs"):
        Sweep(small(resources={"gpus": 64}), Results(str(tmp_path / "b")), quiet()).run()


def test_storage_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SweepError, match="cannot write to"):
        Sweep(small(), Results(str(tmp_path / "file" / "sweep")), quiet())


@pytest.mark.nightly
def test_no_room_for_a_record_ends_the_sweep_and_says_so(
    ray_here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = Results(str(tmp_path / "sweep"))
    save = results.save_trial

    def full_after_two(record: TrialRecord) -> None:
        if len(results.trials()) == 2:
            raise OSError(28, "No space left on device")
        save(record)

    monkeypatch.setattr(results, "save_trial", full_after_two)
    with pytest.raises(SweepError, match=r"trials: .*No space left.*--resume"):
        Sweep(small(), results, quiet()).run()
    monkeypatch.undo()
    assert len(results.trials()) == 2
    assert results.manifest().state == "failed"
    Sweep(small(), results, quiet(), resume=True).run()
    assert len({record.key for record in results.trials()}) == 4


def sweep_command(result: Path, *changes: str) -> list[str]:
    options = [
        "--set", "workload={limit: 1, categories: [code_completion, copy_heavy_edits], "
        "max_tokens: 16}",
        "--set", "measurement.repetitions=2", "--set", "search.simulate=false",
        "--set", "search.confirm=1", "--set", "search.time_s=null",
        *(part for change in changes for part in ("--set", change)),
    ]  # fmt: skip
    script = ROOT / "tuning" / "sweep.py"
    return [sys.executable, str(script), "--space", "demo", "--result", str(result), *options]


@pytest.mark.nightly
def test_no_room_on_the_storage(tmp_path: Path) -> None:
    """A limit on the size of files stands for a full disk: the same call fails."""

    def limit() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    done = subprocess.run(
        sweep_command(tmp_path / "sweep"), capture_output=True, text=True, preexec_fn=limit,
        cwd=ROOT, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write to")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_bad_file_ends_before_ray_starts(tmp_path: Path) -> None:
    """test_cli_sweep.py has others."""
    done = subprocess.run(
        sweep_command(tmp_path / "sweep", "space.exit_leyer=3"), capture_output=True, text=True,
        cwd=ROOT, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: space.exit_leyer")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "sweep").exists()


# --- kills ----------------------------------------------------------------------------------------


def start(command: Sequence[str]) -> subprocess.Popen[str]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("RAY_AUTH")}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT,
        start_new_session=True, env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # we may ignore it
    )  # fmt: skip


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.stdout and process.stdout.read()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.nightly
def test_a_killed_driver_goes_on_with_the_same_trials(tmp_path: Path) -> None:
    results = Results(str(tmp_path / "sweep"))
    command = sweep_command(tmp_path / "sweep", "search.trials=6")
    process = start(command)
    try:
        wait_for(lambda: len(results.trials()) >= 2, process)
        time.sleep(0.7)  # somewhere in the next trial
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    before = {f.name: f.read_text() for f in (tmp_path / "sweep/trials").glob("*.json")}
    assert results.manifest().state == "running"

    done = subprocess.run(
        [*command, "--resume"], capture_output=True, text=True, cwd=ROOT, timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    after = {f.name: f.read_text() for f in (tmp_path / "sweep/trials").glob("*.json")}
    unconfirmed = {name: _without_confirmation(text) for name, text in after.items()}
    assert {n: _without_confirmation(t) for n, t in before.items()}.items() <= unconfirmed.items()
    records = results.trials()
    assert [record.number for record in records] == list(range(6))
    assert len({record.key for record in records}) == 6
    # What was measured again is not among what was there.
    assert f"[{len(before) + 1:>3}/6]" in done.stdout
    assert results.manifest().state == "finished"


def _without_confirmation(text: str) -> str:
    return json.dumps({**json.loads(text), "confirmed": None, "refused": None})


@pytest.mark.nightly
def test_a_trial_whose_process_dies_fails_alone(tmp_path: Path) -> None:
    results = Results(str(tmp_path / "sweep"))
    process = start(sweep_command(tmp_path / "sweep", "search.trials=5"))
    try:
        wait_for(lambda: len(results.trials()) >= 2, process)
        found: list[int] = []
        wait_for(lambda: bool(found.extend(_trial_processes(process.pid)) or found), process)
        os.kill(found[0], signal.SIGKILL)
        output, _ = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert process.returncode == 0, output
    records = results.trials()
    failed = [record for record in records if record.status == "failed"]
    assert len(failed) == 1
    assert failed[0].reason
    assert not failed[0].counts
    # The others were measured, to their end or until it was clear that they cannot win.
    others = [record for record in records if record.status != "failed"]
    assert len(others) == 4
    assert all(record.counts and record.metrics for record in others)
    assert results.manifest().state == "finished"
    assert (tmp_path / "sweep" / "best.yaml").exists()
    assert "1 failed" in output


def _trial_processes(group: int) -> list[int]:
    """Worker processes of the sweep's own Ray that run a trial."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            name = (folder / "cmdline").read_text()
            session = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[3])
        except OSError:
            continue
        if name.startswith("ray::") and "Trial" in name and session == group:
            found.append(int(folder.name))
    return found


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tmp_path: Path) -> None:
    results = Results(str(tmp_path / "sweep"))
    process = start(sweep_command(tmp_path / "sweep", "search.trials=6"))
    wait_for(lambda: len(results.trials()) >= 1, process)
    os.kill(process.pid, signal.SIGINT)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "--resume goes on from here" in output
    assert "Traceback" not in output
    assert results.manifest().state == "interrupted"
    assert (tmp_path / "sweep" / "report.html").exists()


def test_points_are_json_values_on_the_way_to_a_trial() -> None:
    for point in small().points:
        assert Point.model_validate_json(point.model_dump_json(exclude_defaults=True)) == point
