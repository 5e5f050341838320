"""`paceline chat`: answers, commands, and ctrl-c."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.chat import encode_chat, encode_prompt
from paceline.cluster.cli_chat import Chat
from paceline.cluster.cli_generate import GenerateOptions, chat_note
from paceline.demo import TARGET_DIR
from paceline.engine import Engine
from paceline.errors import InvalidArgument, PacelineError
from paceline.loading import load_engine
from paceline.sampling import SamplingParams
from paceline.tokenizer import ChatTemplate, chat_template
from tests.cli.conftest import Cli

TEMPLATE = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine()


def talk(engine: Engine, max_tokens: int = 8, system: str = "") -> Chat:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Chat(engine, TEMPLATE, params, "draft_model", system)


def said(chat: Chat, text: str) -> str:
    return "".join(piece.text for pieces in chat.answer(text) for piece in pieces)


def test_the_conversation_is_in_the_prompt(engine: Engine) -> None:
    chat = talk(engine, system="Be brief.")
    first = said(chat, "def load(path):")
    second = said(chat, "def save(path):")
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "def load(path):"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "def save(path):"},
        {"role": "assistant", "content": second},
    ]
    assert chat.last is not None
    prompt = engine.tokenizer.decode(chat.last.token_ids[: chat.last.prompt_length])
    assert prompt == (
        f"<system>Be brief.\n<user>def load(path):\n<assistant>{first}\n<user>def save(path):\n"
        "<assistant>"
    )
    chat.reset()
    assert chat.messages == []


def test_answers_do_not_depend_on_the_method(engine: Engine) -> None:
    answers = set()
    for method in ("ar", "draft_model", "prompt_lookup"):
        chat = talk(engine, max_tokens=24)
        chat.use(method)
        answers.add(said(chat, "class Queue:"))
    assert len(answers) == 1


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(engine: Engine) -> None:
    chat = talk(engine, max_tokens=400)
    answer = chat.answer("def load(path):")
    come = "".join(piece.text for piece in next(answer))
    answer.close()
    assert not engine.has_work
    assert chat.messages[-1] == {"role": "assistant", "content": come}


def test_a_conversation_that_is_too_long_is_refused_and_forgotten(engine: Engine) -> None:
    chat = talk(engine)
    said(chat, "a")
    before = list(chat.messages)
    with pytest.raises(PacelineError, match="context"):
        said(chat, "x = 1\n" * 2000)
    assert chat.messages == before
    assert said(chat, "b")


def test_a_method_that_there_is_not(engine: Engine) -> None:
    chat = talk(engine)
    with pytest.raises(InvalidArgument, match="nothing_like_it"):
        chat.use("nothing_like_it")
    assert chat.config.method == "draft_model"


def test_commands(cli: Cli) -> None:
    lines = [
        "/stats",
        "/help",
        "def load(path):",
        "/method ar",
        "/stats",
        "/nope",
        "/reset",
        "/exit",
        "x",
    ]
    result = cli("chat", "--target", "demo", "-n", "8", stdin="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    for words in ("no answer yet", "/system TEXT", "method ar", "8 tokens", "num_rounds",
                  "command: got '/nope'", "a new conversation", "no chat template"):  # fmt: skip
        assert words in result.stderr, words
    assert result.stderr.count("tokens ·") == 1  # nothing after /exit
    assert result.stdout.strip()


def test_who_names_no_model_talks_with_smollm2(cli: Cli) -> None:
    result = cli("chat", "-n", "16", stdin="What is the capital of Germany?\n/stats\n")
    assert result.exit_code == 0, result.stderr
    assert "The capital of Germany is Berlin." in result.stdout
    assert "· auto" in result.stderr


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ctrl_c_stops_an_answer_and_ctrl_d_ends() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline.cluster.cli", "chat", "--target", "demo", "-n", "900"],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=_own_terminal, env=os.environ | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    try:
        shown = _until(ours, "> ")
        os.write(ours, b"class Queue:\n")
        _until(ours, "self")
        os.write(ours, b"\x03")
        shown = _until(ours, "stopped", "> ")
        os.write(ours, b"\x04")
        assert process.wait(20) == 0, shown
    finally:
        process.kill()
        os.close(ours)


def _own_terminal() -> None:
    import fcntl
    import signal
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that ctrl-c reaches the process,
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # even where the tests run in the background


def _until(terminal: int, *words: str) -> str:
    """Read from the terminal until it has shown these, one after the other."""
    shown, end = "", time.monotonic() + 60
    while not re.search(".*".join(map(re.escape, words)), shown, re.DOTALL):
        assert time.monotonic() < end, shown
        if select.select([terminal], [], [], 1)[0]:
            shown += os.read(terminal, 4096).decode("utf-8", "replace")
    return shown


def test_a_question_has_the_same_tokens_on_the_command_line_and_in_the_api(
    cli: Cli, tmp_path: Path
) -> None:
    """`generate --chat` writes its prompt into a transcript; the API renders the messages."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in TARGET_DIR.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").write_text(TEMPLATE.source)
    transcript = tmp_path / "t.json"
    done = cli(
        "generate", "def load(path):", "--chat", "--target", str(folder), "--method", "ar",
        "--numerics", "portable", "--max-tokens", "4", "--transcript", str(transcript),
    )  # fmt: skip
    assert done.exit_code == 0
    engine = load_engine()
    template = chat_template(folder)
    ids = encode_chat(engine.tokenizer, template, [{"role": "user", "content": "def load(path):"}])
    assert json.loads(transcript.read_text())["prompt_token_ids"] == ids
    assert encode_prompt(engine.tokenizer, template, "def load(path):") == ids
    assert encode_prompt(engine.tokenizer, None, "def load(path):") != ids


def test_a_model_without_a_template_answers_no_questions(cli: Cli) -> None:
    done = cli("generate", "Hello", "--chat")
    assert done.exit_code == 2
    assert "chat" in done.stderr
    assert "smollm2" in done.stderr


def test_a_chat_model_that_ends_a_text_at_once_is_said_to_answer_questions(tmp_path: Path) -> None:
    for file in TARGET_DIR.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE.source)
    plain = GenerateOptions("Hello", SamplingParams(max_tokens=4), {})
    assert "--chat" in chat_note(plain, tmp_path, "\n", "stop")["note"]
    for others in (
        (replace(plain, chat=True), tmp_path, "", "stop"),
        (replace(plain, params=SamplingParams(stop=("x",))), tmp_path, "", "stop"),
        (plain, tmp_path, "word", "stop"),
        (plain, tmp_path, "", "length"),
        (plain, TARGET_DIR, "", "stop"),  # no chat model
        (plain, None, "", "stop"),
    ):
        assert chat_note(*others) == {}
