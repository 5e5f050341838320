"""The other commands, and what all commands have in common, in processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from paceline.bench import BenchOptions, run_bench
from paceline.bench.run import Progress
from paceline.cluster import cli_bench, doctor
from paceline.cluster.cli_output import DEBUG_VARIABLE
from paceline.cluster.doctor import Status
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.methods import DIFFUSION_METHODS, METHODS, VLLM_METHODS
from paceline.models import kernels
from paceline.profile import MOST_TRIES
from paceline.rpc.server import RpcServer
from tests.cli.conftest import Cli

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("generate", "methods", "doctor", "bench", "demo", "up", "down", "status")
BLOCK_SERVING = (
    "import sys; sys.modules.update(ray=None, grpc=None); "
    "from paceline.cluster.cli import app; app()"
)


def paceline(*arguments: object, code: str | None = None) -> subprocess.CompletedProcess[str]:
    command = ["-c", code] if code else ["-m", "paceline.cluster.cli"]
    return subprocess.run(
        [sys.executable, *command, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )


# --- methods --------------------------------------------------------------------------------------


def test_methods_json_is_the_catalogue(cli: Cli) -> None:
    result = cli("methods", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert [row["name"] for row in rows] == [*METHODS, *VLLM_METHODS, *DIFFUSION_METHODS]
    wanted = {"name", "paper", "drafter", "shape", "acceptance", "length", "lossless", "needs"}
    for row in rows:
        assert row.keys() >= wanted
        assert isinstance(row["lossless"], bool)
        assert isinstance(row["needs"], list)


def test_methods_table_shows_every_method_whole(cli: Cli) -> None:
    result = cli("methods")
    assert result.exit_code == 0
    assert "…" not in result.stdout
    for method in METHODS.values():
        assert method.name in result.stdout
        assert method.drafter in result.stdout


# --- bench ----------------------------------------------------------------------------------------


def test_bench_json(cli: Cli, tmp_path: Path) -> None:
    prompts = tmp_path / "questions.jsonl"
    lines = [
        {"question_id": 1, "category": "code", "turns": ["def add(a, b):\n"]},
        {"question_id": 2, "category": "maths", "turns": ["Tom has 3 apples."]},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = cli(
        *("bench", "--prompts", prompts, "--methods", "draft_model,prompt_lookup", "--no-peers"),
        *("--repetitions", 1, "--max-tokens", 12, "--json"),
    )
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    assert document["environment"]["torch"]
    rows = {(row["method"], row["category"]): row for row in document["results"]}
    for method in ("ar", "draft_model", "prompt_lookup"):
        for category in ("code", "maths", "all"):
            row = rows[method, category]
            assert row["identical_to_ar"] is True
            assert row["tokens_per_second"] > 0
            assert row["mean_accepted_length"] >= 1
            assert {"speedup_vs_ar", "acceptance_rate"} <= row.keys()
    assert rows["ar", "all"]["speedup_vs_ar"] == 1


def test_bench_writes_files_beside_the_json_document(cli: Cli, tmp_path: Path) -> None:
    html, table = tmp_path / "bench.html", tmp_path / "bench.csv"
    options = (
        "--limit",
        1,
        "--no-peers",
        "-r",
        1,
        "-n",
        4,
        "--json",
        "--html",
        html,
        "--csv",
        table,
    )
    result = cli("bench", "--methods", "prompt_lookup", *options)
    assert result.exit_code == 0, result.stderr
    rows = json.loads(result.stdout)["results"]
    assert len(table.read_text().splitlines()) == len(rows) + 1
    assert "<title>demo: benchmark</title>" in html.read_text()


def test_bench_shows_what_was_measured_before_ctrl_c(
    cli: Cli, target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(options: BenchOptions, progress: Progress, *more: Any, **rest: Any) -> Any:
        def report(done: int, total: int, what: str) -> None:
            progress(done, total, what)
            if done == 7:  # the last run of the third prompt
                raise KeyboardInterrupt

        return run_bench(options, report, *more, **rest)

    monkeypatch.setattr(cli_bench, "run_bench", interrupted)
    options = ("--target", target_folder, "--methods", "prompt_lookup", "--no-peers", "-n", 4)
    result = cli("bench", *options)
    assert result.exit_code == 130
    assert "all (2 prompts)" in result.stdout
    assert "interrupted: 2 of 96 runs of each method are in the table" in result.stdout


def test_bench_measures_a_server_beside_this_process(
    cli: Cli, server: RpcServer, target_folder: Path, drafter_folder: Path
) -> None:
    options = ("--server", server.address, "--no-peers", "--limit", 1, "-r", 1, "-n", 8, "--json")
    models = ("--target", target_folder, "--drafter", drafter_folder)
    result = cli("bench", *models, *options, "--methods", "draft_model", "--batch", 2)
    assert result.exit_code == 0, result.stderr
    rows = [row for row in json.loads(result.stdout)["results"] if row["category"] == "all"]
    assert {(row["method"], row["topology"]) for row in rows} == {
        (method, topology)
        for method in ("ar", "draft_model")
        for topology in ("colocated", "actors")
    }
    assert all(row["identical_to_ar"] for row in rows)


def test_bench_refuses_a_server_with_another_model(cli: Cli, server: RpcServer) -> None:
    result = cli("bench", "--server", server.address, "--no-peers", "--json")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "258 tokens" in result.stderr


# --- doctor ---------------------------------------------------------------------------------------


def test_doctor_json(cli: Cli) -> None:
    result = cli("doctor", "--json")
    document = json.loads(result.stdout)
    assert result.exit_code == (0 if document["ok"] else 1)
    checks = {check["name"]: check for check in document["checks"]}
    assert set(checks) >= {"python", "torch", "ray", "ports", "memory", "models", "exactness"}
    for name in ("python", "torch", "models", "exactness"):
        assert checks[name]["status"] == "ok", checks[name]
    for check in checks.values():
        assert check["status"] == "ok" or check["mend"], f"{check['name']} does not say what to do"


def test_doctor_finds_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = doctor.check_ports({port: "gRPC gateway"})
        assert result.status is Status.WARN
        assert str(port) in result.detail
        assert str(port) in result.mend
    assert doctor.check_ports({port: "gRPC gateway"}).status is Status.OK


def test_doctor_finds_missing_models_and_a_wrong_tokenizer(
    tmp_path: Path, drafter_folder: Path
) -> None:
    missing = doctor.check_models((tmp_path / "target", DRAFTER_DIR))
    assert missing.status is Status.FAIL
    assert str(tmp_path / "target") in missing.detail
    assert "make demo-models" in missing.mend
    foreign = doctor.check_models((TARGET_DIR, drafter_folder))
    assert foreign.status is Status.FAIL
    assert "tokenizer" in foreign.detail


@pytest.mark.slow
def test_doctor_without_the_serving_extra() -> None:
    result = paceline("doctor", "--json", code=BLOCK_SERVING)
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    for name in ("ray", "grpc"):
        assert checks[name]["status"] == "warn"
        assert "paceline[serve]" in checks[name]["mend"]
    assert result.returncode == 0


def doctor_says(check: str, **environment: str) -> dict[str, str]:
    """A check of the doctor in a process of its own, since kernels are chosen once."""
    code = (
        f"import json; from paceline.cluster.doctor import {check}; r = {check}(); "
        "print(json.dumps({'status': r.status.value, 'detail': r.detail, 'mend': r.mend}))"
    )
    inherited = {k: v for k, v in os.environ.items() if k not in ("CC", "PACELINE_KERNELS")}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=inherited | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    said: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    return said


def test_doctor_without_a_compiler(tmp_path: Path) -> None:
    said = doctor_says("check_kernels", PACELINE_CACHE_DIR=str(tmp_path), PATH=str(tmp_path))
    assert said["status"] == "warn"
    assert said["mend"].startswith("install a C compiler")


@pytest.mark.slow
def test_doctor_names_the_variant_its_class_and_its_share_of_the_roofline() -> None:
    best = next(iter(kernels.runnable()))
    said = doctor_says("check_kernels")
    assert f"variant {best}; numerics class portable (float32)" in said["detail"]
    assert re.search(r"one row reaches \d+% of what memory gives \(\d+ GB/s\)", said["detail"])
    assert re.search(r"eight rows \d+% of the roofline \(\d+ GFLOP/s\)", said["detail"])
    slower = doctor_says("check_kernels", PACELINE_KERNELS="portable")
    assert slower["status"] == "warn"
    assert "variant portable; numerics class portable" in slower["detail"]
    assert slower["mend"].startswith(f"unset PACELINE_KERNELS: {best} runs here")
    off = doctor_says("check_kernels", PACELINE_KERNELS="off")
    assert (off["status"], off["mend"]) == ("warn", "unset PACELINE_KERNELS")
    wrong = doctor_says("check_kernels", PACELINE_KERNELS="sse9")
    assert (wrong["status"], wrong["mend"]) == ("fail", "unset PACELINE_KERNELS")
    assert "sse9" in wrong["detail"]


@pytest.mark.nightly
def test_doctor_tells_how_many_threads_and_why(own_cache: Path) -> None:
    first = doctor_says("check_threads", PACELINE_MEASURE="on")
    for part in ("costs: measured in", "processors:", "verify ms by rows:", "threads:", "rows:"):
        assert part in first["detail"]
    for _ in range(MOST_TRIES):  # as often as a machine that other tests keep busy is measured
        again = doctor_says("check_threads", PACELINE_MEASURE="on")
        if "measures again" not in first["detail"]:
            break
        first = again
    assert "costs: read from" in again["detail"]


@pytest.mark.parametrize(
    ("reason", "mend"),
    [
        ("libgomp.so.1: cannot open shared object file", "libgomp1"),
        ("no C compiler found", "install a C compiler"),
        ("switched off by PACELINE_KERNELS=off", "unset PACELINE_KERNELS"),
    ],
)
def test_doctor_mends_what_keeps_the_kernels_from_running(
    reason: str, mend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "status", lambda: (False, reason))
    result = doctor.check_kernels()
    assert result.status is Status.WARN
    assert reason in result.detail
    assert mend in (result.mend or "")


# --- all commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_help(cli: Cli, command: str) -> None:
    result = cli(command, "--help")
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_help_lists_every_command_and_is_light() -> None:
    result = paceline("--help")
    assert result.returncode == 0
    for command in COMMANDS:
        assert command in result.stdout
    code = (
        "import sys, paceline.cluster.cli; "
        "print(sorted({'torch', 'ray', 'grpc', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    assert paceline(code=code).stdout.strip() == "[]"


def test_console_script_generates_in_a_process_of_its_own() -> None:
    script = Path(sys.executable).parent / "paceline"
    result = subprocess.run(
        [script, "generate", "import os\n", "--max-tokens", "8", "--json"],
        cwd=ROOT / "docs",  # not the folder that holds the packages
        capture_output=True,
        text=True,
        timeout=220,
        check=True,
    )
    assert json.loads(result.stdout)["num_tokens"] == len(json.loads(result.stdout)["token_ids"])
    assert result.stderr == ""


@pytest.mark.slow
def test_generate_needs_neither_ray_nor_grpc() -> None:
    result = paceline("generate", "import os\n", "-n", 4, "--json", code=BLOCK_SERVING)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["num_tokens"] == 4


@pytest.mark.parametrize(
    "arguments",
    [["up"], ["down"], ["status"], ["demo"], ["generate", "x", "--server", "127.0.0.1:1"]],
    ids=" ".join,
)
def test_a_command_without_its_extra_names_it(
    arguments: list[str], cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ray", "grpc"):
        monkeypatch.setitem(sys.modules, name, None)
    result = cli(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert "pip install 'paceline[serve]'" in result.stderr


def test_debug_shows_the_traceback(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "")  # so that it is restored
    plain = cli("generate", "")
    assert (plain.exit_code, plain.stderr.count("\n")) == (2, 1)
    debug = cli("--debug", "generate", "")
    assert debug.exit_code == 2
    assert "Traceback" in debug.stderr
    assert plain.stderr in debug.stderr


def test_ctrl_c_ends_cleanly() -> None:
    process = subprocess.Popen(
        # Shells let what they start in the background ignore the signal, and children inherit that.
        # With drafts it is nearly done before the signal is there.
        [
            "env",
            "--default-signal=INT",
            sys.executable,
            "-m",
            "paceline.cluster.cli",
            "generate",
            "import",
            "-n",
            "1000",
            "--ignore-eos",
            "--method",
            "ar",
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.read(1), "nothing was generated"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr == "interrupted\n"


@pytest.mark.parametrize(
    "arguments",
    [["methods"], pytest.param(["methods", "--json"], marks=pytest.mark.nightly)],
    ids=" ".join,
)
def test_reader_that_goes_away(arguments: list[str]) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    result = subprocess.run(
        [sys.executable, "-m", "paceline.cluster.cli", *arguments],
        cwd=ROOT,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        timeout=220,
        check=False,
    )
    os.close(write_end)
    assert result.returncode == 1
    assert result.stderr == ""


def test_certs(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    result = cli("certs", folder, "--host", "gateway.example.org", "--host", "10.1.2.3", "--json")
    assert result.exit_code == 0, result.output
    files = {name: Path(path) for name, path in json.loads(result.stdout).items()}
    assert {path.name for path in folder.iterdir()} == set(files)
    for name, path in files.items():
        assert (path.stat().st_mode & 0o777 == 0o600) == name.endswith(".key")
    authority = files["ca.crt"].read_bytes()
    shown = cli("certs", folder)  # renews the certificates
    assert shown.exit_code == 0
    assert "gateway.tls.cert" in shown.stdout
    assert files["ca.crt"].read_bytes() == authority
    assert cli("certs", folder, "--host", "no host").exit_code == 2
    assert cli("certs", folder, "--days", 0).exit_code == 2
    files["ca.key"].write_text("nothing")
    broken = cli("certs", folder)
    assert broken.exit_code == 2
    assert "ca.key" in broken.stderr


def test_tokens_of_the_command_line(
    cli: Cli, server: RpcServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A token that the server does not ask for does no harm; one with blanks is not sent.
    monkeypatch.setenv("PACELINE_TOKEN", "a-token-of-many-characters")
    result = cli("generate", "hello", "--server", server.address, "-n", 4, "--json")
    assert result.exit_code == 0, result.output
    bad = tmp_path / "token"
    bad.write_text("two words")
    refused = cli("generate", "hello", "--server", server.address, "--token-file", bad)
    assert refused.exit_code == 2
    assert "two words" not in refused.stderr
    elsewhere = cli("generate", "hello", "--server", "192.0.2.1:50051")
    assert elsewhere.exit_code == 2
    assert "a-token" not in elsewhere.stderr
    assert "loopback" in elsewhere.stderr
