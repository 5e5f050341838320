"""The commands and the Python of the documents are run, or a comment says why not.

A line of a block that begins with `$ ` is a command, and so is every line of a block `sh` or
`bash`. A comment before the block says more than "by day, as it stands":

    <!-- run: no, REASON -->
    <!-- run: slow -->                     with `make test-slow`; `nightly` at night
    <!-- run: slow, with --steps 2 -->     options that `paceline train` gets in addition

A block that names the gateway's addresses gets a gateway in this process, with the demo pair, in
`docs/http.md` with SmolLM2. A block with `paceline up` gets a Ray of its own, on free ports.
"""

from __future__ import annotations

import glob
import io
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.cluster.cli import app
from paceline.config import SpeculationConfig
from paceline.demo import DRAFTER_DIR, TARGET_DIR
from paceline.engine import EngineThread
from paceline.gguf_folder import model_folder
from paceline.loading import load_engine
from paceline.model_names import resolve_model
from paceline.rpc.generate_service import ModelInfo
from paceline.tokenizer import chat_template
from tests.chat.suite import is_here
from tests.command_line import CliRunner
from tests.deployments.conftest import free_port
from tests.deployments.http_serving import http_serving
from tests.docs.pages import ROOT, Block, blocks
from tests.modelzoo import make_model
from tests.rpc.serving import serving

PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
PROGRAMS = ["docs/tutorial-drafter.md"]  # whose Python test_tutorial.py runs
HERE = ("benchmarks.adapters", "benchmarks.codebooks")  # which leave a process as it was
GRPC, HTTP = "127.0.0.1:50051", "127.0.0.1:8000"
_MARK = re.compile(r"(?P<when>no|slow|nightly|with)(?:(?<=with) |, with |, |$)(?P<rest>.*)$")


@dataclass(frozen=True, slots=True)
class Command:
    """A command, and what the page shows of its output."""

    text: str
    shown: str


def commands(block: Block) -> list[Command]:
    """The commands of a block; none in a block that only shows something."""
    is_script = block.language in ("sh", "bash")
    found: list[Command] = []
    lines = block.text.splitlines()
    while lines:
        line = lines.pop(0)
        if not (is_script or line.startswith("$ ")):
            continue
        text = line.removeprefix("$ ")
        while not _is_whole(text):
            text += "\n" + lines.pop(0)
        shown: list[str] = []
        while lines and not (is_script or lines[0].startswith("$ ")):
            shown.append(lines.pop(0))
        if text.strip():
            found.append(Command(text, "\n".join(shown)))
    return found


def _is_whole(text: str) -> bool:
    try:
        shlex.split(text, comments=True)
    except ValueError:  # a quote is open
        return False
    return not text.endswith("\\")


def when(block: Block) -> str:
    """`day`, `slow`, `nightly` or `no`."""
    if not block.mark:
        return "day"
    mark = _MARK.match(block.mark)
    assert mark is not None, f"{block}: the comment says {block.mark!r}"
    if mark["when"] == "no":
        assert len(mark["rest"].split()) > 2, f"{block}: no reason in {block.mark!r}"
    return "day" if mark["when"] == "with" else mark["when"]


def options(block: Block) -> list[str]:
    """What `paceline train` gets in addition."""
    _, found, more = f" {block.mark}".partition(" with ")
    return more.split() if found and when(block) != "no" else []


BLOCKS = [block for page in PAGES for block in blocks(page)]


def cases(chosen: Callable[[Block], bool]) -> list[Any]:
    """Parameters of a test: the blocks that are run, each with its marks."""
    return [
        pytest.param(block, id=str(block), marks=_marks(when(block)))
        for block in BLOCKS
        if chosen(block) and when(block) != "no"
    ]


def _marks(at: str) -> list[Any]:
    if at == "day":
        return []
    return [getattr(pytest.mark, at), pytest.mark.timeout(600 if at == "slow" else 2 * 3600)]


def starts_ray(block: Block) -> bool:
    return any(re.match(r"paceline up\b", command.text) for command in commands(block))


# --- what is there ------------------------------------------------------------------------------


def test_every_block_is_run_or_says_why_not() -> None:
    with_commands = [block for block in BLOCKS if commands(block)]
    assert len(with_commands) > 40
    for block in BLOCKS:
        when(block)  # the comment can be read
        if block.language in ("console", "sh", "bash"):
            assert commands(block), f"{block}: no line begins with `$ `"
        if block.mark:
            assert commands(block) or block.language == "python", f"{block}: nothing to run"


def test_commands_are_not_in_blocks_that_are_only_indented() -> None:
    command = re.compile(r"^    (\$ |paceline |make |python -m |pip |\.venv/)", re.MULTILINE)
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        for block in blocks(page):
            text = text.replace(block.text, "")
        assert command.findall(text) == [], f"{page}: put it between fences"


# --- what is run --------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path, zoo: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what the documents name: the checkout's folders, small models, texts."""
    for name in (
        "paceline",
        "deployments",
        "tuning",
        "benchmarks",
        "helm",
        "rpc",
        "cluster",
        "docs",
    ):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "big").symlink_to(TARGET_DIR)
    (tmp_path / "small").symlink_to(DRAFTER_DIR)
    shutil.copytree(make_model("llama_gqa", zoo, num_hidden_layers=2), tmp_path / "model")
    (tmp_path / "other").symlink_to(tmp_path / "model")
    lines = [{"prompt": f"What is {i}?", "completion": f" It is {i}.\n" * 9} for i in range(60)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"question": f"What is {i} + {i}?", "answer": f"#### {2 * i}"} for i in range(3)]
    (tmp_path / "gsm8k.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "code.txt").write_text(Path(shutil.__file__).read_text("utf-8"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def gateways() -> Iterator[Callable[[str], Mapping[str, str]]]:
    """Returns the addresses that stand for the documents' own, by the target; started once."""
    with ExitStack() as stack:
        started: dict[str, dict[str, str]] = {}

        def gateway(target: str) -> Mapping[str, str]:
            if target not in started:
                if target == "smollm2" and not is_here():
                    pytest.skip("not here: paceline models get smollm2")
                engine = load_engine() if target == "demo" else load_engine(target)
                thread = EngineThread(engine).start()
                stack.callback(thread.stop)
                folder = TARGET_DIR if target == "demo" else model_folder(resolve_model(target))
                # As in deployments/configs: SmolLM2 has no draft model.
                method = "draft_model" if target == "demo" else "suffix_decoding"
                info = ModelInfo(
                    name="paceline",
                    default_speculation=SpeculationConfig(method=method),
                    chat_template=chat_template(folder),
                )
                grpc = stack.enter_context(serving(engine=thread, model=info)).address
                http = stack.enter_context(http_serving(thread, info))
                started[target] = {GRPC: grpc, HTTP: http.removeprefix("http://")}
            return started[target]

        yield gateway


@pytest.fixture
def addressed(gateways: Callable[[str], Mapping[str, str]]) -> Callable[[Block, str], str]:
    """The text of a block with the addresses of a gateway that is there."""

    def addressed(block: Block, text: str) -> str:
        if GRPC not in text and HTTP not in text:
            return text
        found = gateways("smollm2" if block.page == "docs/http.md" else "demo")
        for address, own in found.items():
            text = text.replace(address, own)
        return text

    return addressed


@pytest.mark.parametrize("block", cases(lambda b: bool(commands(b)) and not starts_ray(b)))
def test_commands(block: Block, work: Path, addressed: Callable[[Block, str], str]) -> None:
    for command in commands(block):
        run(command, addressed(block, command.text), options(block))


@pytest.mark.serve
@pytest.mark.parametrize("block", cases(starts_ray))
def test_commands_with_a_deployment(block: Block, work: Path, own_cache: Path) -> None:
    grpc, http = (str(free_port()) for _ in range(2))
    try:
        for command in commands(block):
            text = command.text.replace(GRPC, f"127.0.0.1:{grpc}")
            if text.startswith("paceline up"):
                words = f"paceline up --port {grpc} --http-port {http}"
                text = text.replace("paceline up", words, 1)
            # In processes of their own: this one may have another Ray.
            run(command, f"exec {text}", [])
    finally:
        run(Command("paceline down", ""), "exec paceline down", [])


def run(command: Command, text: str, more: list[str]) -> None:
    """Run a command, which has to fail iff the page shows an error."""
    words = shlex.split(text.replace("\\\n", " "), comments=True)  # as a shell joins lines
    first, pipe, others = text.partition(" | ")
    if pipe and _is_whole(first) and runs_here(shlex.split(first)):
        code, printed, complaints = run_here(shlex.split(first))
        if code == 0:
            code, printed, complaints = run_in_shell(others, printed)
    elif runs_here(words):
        code, printed, complaints = run_here(words + (more if words[1] == "train" else []))
    else:
        code, printed, complaints = run_in_shell(text)
    printed += complaints
    error = re.search(r"^error: .*", command.shown, re.MULTILINE)
    assert (code != 0) == (error is not None), f"{text}\n{printed}"
    if error is not None:
        begin = error[0].removesuffix("...").strip()
        assert begin in " ".join(printed.split()), printed
    if words[0] == "curl":  # it ends well whatever the answer is
        assert ('"error"' in printed) == ('"error"' in command.shown), printed


def runs_here(words: list[str]) -> bool:
    """Whether this process, which has imported everything already, can run a command."""
    if set(words) & {"|", "&&", ">"} or any(glob.glob(word) for word in words if "*" in word):
        return False  # the shell knows what to do with them
    return words[0] == "paceline" or (words[:2] == ["python", "-m"] and words[2] in HERE)


def run_here(words: list[str]) -> tuple[int, str, str]:
    """The exit code, standard output and standard error of a command."""
    if words[0] == "paceline":
        result = CliRunner().invoke(app, words[1:])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr
    printed, complaints = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(printed),
        redirect_stderr(complaints),
    ):
        patch.setattr(sys, "argv", words[2:])
        patch.delitem(sys.modules, words[2], raising=False)  # it may be that of other tests
        try:
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return code, printed.getvalue(), complaints.getvalue()


def run_in_shell(text: str, stdin: str = "") -> tuple[int, str, str]:
    """As :func:`run_here`."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", text], env=environment(), capture_output=True, text=True,
        check=False, input=stdin,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def environment() -> dict[str, str]:
    """`paceline` and `python` are those of this process, and import this checkout."""
    paths = [str(Path(sys.executable).parent), os.environ["PATH"]]
    return os.environ | {"PATH": os.pathsep.join(paths), "PYTHONPATH": str(ROOT)}


def python_cases() -> list[Any]:
    """The pages that have Python to run; a page is one program."""
    found = []
    for page in [page for page in PAGES if page not in PROGRAMS]:
        programs = [b for b in blocks(page) if b.language == "python" and when(b) != "no"]
        if programs:
            marks = [mark for at in {when(block) for block in programs} for mark in _marks(at)]
            found.append(pytest.param(programs, id=page, marks=marks))
    return found


@pytest.mark.parametrize("programs", python_cases())
def test_python(programs: list[Block], work: Path, addressed: Callable[[Block, str], str]) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    for block in programs:
        exec(compile(addressed(block, block.text), str(block), "exec"), names)
    client = names.get("client")
    if client is not None:
        client.close()
