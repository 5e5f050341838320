"""Conversations as rows of tokens, and which tokens have a loss."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.chat import encode_chat
from paceline.demo import TARGET_DIR
from paceline.errors import InvalidArgument
from paceline.memory import peak_memory, reset_peak_memory
from paceline.tokenizer import ChatTemplate, eos_token_ids, load_tokenizer
from paceline.train import chat_data
from paceline.train.chat_data import encode_conversation
from paceline.train.data import TrainingText, load_text

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "It is 3."},
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_CACHE_DIR", str(tmp_path / "cache"))


def copy_with(source: Path, folder: Path, template: str | None) -> Path:
    """A model folder with the files of another one, and with this chat template."""
    folder.mkdir()
    for file in source.iterdir():
        (folder / file.name).symlink_to(file)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@pytest.fixture
def chat_target(random_target: Path, tmp_path: Path) -> Path:
    """Every byte is a token."""
    return copy_with(random_target, tmp_path / "target", TEMPLATE)


def write(file: Path, records: Iterable[Any]) -> Path:
    with file.open("w") as out:
        out.writelines(json.dumps(record) + "\n" for record in records)
    return file


def talks(count: int) -> list[dict[str, Any]]:
    """Conversations of two turns, all different."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"say {i * 7919 % 1000}"},
                {"role": "assistant", "content": f"it is {i * 7919 % 1000}"},
                {"role": "user", "content": f"and {i}?"},
                {"role": "assistant", "content": f"that is {i}"},
            ]
        }
        for i in range(count)
    ]


# --- the mask of a conversation -------------------------------------------------------------------


def test_the_assistants_tokens_and_its_ends_of_turn_have_a_loss() -> None:
    """Each token, written by hand."""
    tokenizer = load_tokenizer(TARGET_DIR)
    (eos,) = eos_token_ids(TARGET_DIR)
    (end,) = [text for text, token in tokenizer.vocabulary().items() if token == eos]
    template = ChatTemplate(TEMPLATE, "", end)
    reference = [
        (False, "< s ystem > B e Ġb rie f .Ċ < user > t wo Ċ < ass ist ant >"),
        (True, "2 <|endoftext|>"),
        (False, "Ċ < user > th ree Ċ < ass ist ant >"),
        (True, "It Ġis Ġ 3 . <|endoftext|>"),
        (False, "Ċ"),
    ]
    vocabulary = tokenizer.vocabulary()
    expected = [(vocabulary[word], has) for has, words in reference for word in words.split(" ")]
    ids, mask = encode_conversation(tokenizer, template, TALK, (eos,))
    assert list(zip(ids, mask, strict=True)) == expected
    # Up to each answer these are the ids of the prompt that a server gets.
    for number in (2, 4):
        prompt = encode_chat(tokenizer, template, TALK[:number])
        assert ids[: len(prompt)] == prompt
        assert mask[len(prompt)] and not mask[len(prompt) - 1]


@pytest.mark.parametrize(
    ("template", "ends", "expected"),
    [
        # Without an end-of-sequence token, the first token after the content ends the turn.
        (ChatTemplate("", "", ""), (), " 2\n It is 3.\n"),
        (ChatTemplate(TEMPLATE, "", ";."), (), "2;It is 3.;"),
        # The last one of a turn, so that a content that holds one counts as a whole.
        (ChatTemplate(TEMPLATE, "", "..;"), (46,), "2..It is 3..."),
        (ChatTemplate(TEMPLATE.replace("m.content", "m.content | trim | upper"), "", ";"), (59,),
         "2;IT IS 3.;"),
    ],
)  # fmt: skip
def test_other_templates(
    random_target: Path, template: ChatTemplate, ends: tuple[int, ...], expected: str
) -> None:
    tokenizer = load_tokenizer(random_target)
    ends = tuple(tokenizer.encode(chr(c), add_special_tokens=False)[0] for c in ends)
    ids, mask = encode_conversation(tokenizer, template, TALK, ends)
    learnt = [token for token, counts in zip(ids, mask, strict=True) if counts]
    assert tokenizer.decode(learnt) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}",  # not what the answer begins with
        "{{ messages | length }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}",
    ],
)
def test_a_template_that_does_not_continue_is_refused(
    random_target: Path, tmp_path: Path, template: str
) -> None:
    folder = copy_with(random_target, tmp_path / "target", template)
    file = write(tmp_path / "talks.jsonl", [{"text": "fine"}, *talks(1)])
    with pytest.raises(InvalidArgument, match=r"talks\.jsonl:2'.*up to message 2 is no prefix"):
        load_text(folder, [file], 8, chat=True)


# --- files ----------------------------------------------------------------------------------------


def learnt(text: TrainingText, folder: Path) -> str:
    """What has a loss, in the training rows and in those held out."""
    tokenizer, found = load_tokenizer(folder), ""
    everything = list(range(len(text.training)))
    assert text.held_out_mask is not None
    for rows, mask in (
        (text.training[everything], text.mask(everything)),
        (text.held_out, text.held_out_mask),
    ):
        assert rows.dtype == torch.int64 and mask.dtype == torch.bool
        assert bool(mask[:, 1:].any(1).all()), "a row without a loss"
        found += tokenizer.decode(rows[:, 1:][mask[:, 1:]].tolist()) + "\n"
    return found


def test_both_formats_are_the_same_conversation(chat_target: Path, tmp_path: Path) -> None:
    own = talks(60)
    names = {"user": "human", "assistant": "gpt"}
    shared = [
        {
            "conversations": [
                {"from": names[m["role"]], "value": m["content"]} for m in talk["messages"]
            ]
        }
        for talk in own
    ]
    files = [write(tmp_path / "own.jsonl", own), write(tmp_path / "shared.jsonl", shared)]
    first, second = (load_text(chat_target, [file], 32, held_out_rows=1000) for file in files)
    assert first.digest == second.digest
    assert first.sources[0] == f"{files[0]}:1" and second.sources[0] == f"{files[1]}:1"
    words = learnt(first, chat_target)
    assert "it is 919" in words and "that is 7" in words
    assert "say" not in words and "user" not in words and "?" not in words


def test_pairs_are_conversations_where_chat_says_so(chat_target: Path, tmp_path: Path) -> None:
    pairs = [
        {"prompt": f"what {i}", "completion": f"it {i}"} if i % 2 else
        {"question": f"what {i}", "answer": f"it {i}"}
        for i in range(80)
    ]  # fmt: skip
    file = write(tmp_path / "pairs.jsonl", pairs)
    plain = load_text(chat_target, [file], 16, held_out_rows=1000)
    assert plain.training_mask is None
    assert plain.digest == load_text(chat_target, [file], 16, 1000, chat=False).digest
    chat = load_text(chat_target, [file], 16, held_out_rows=1000, chat=True)
    words = learnt(chat, chat_target)
    assert "it 3" in words and "it 4" in words and "what" not in words


def test_conversations_need_a_template(random_target: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "talks.jsonl", talks(60))
    with pytest.raises(InvalidArgument, match=r"talks\.jsonl:1'.*a chat template, or --chat"):
        load_text(random_target, [file], 32)
    words = learnt(load_text(random_target, [file], 32, chat=True), random_target)
    assert "it is 919" in words and "User" not in words


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": []}', "a list of"),
        ('{"messages": [{"role": "user"}]}', "with texts"),
        ('{"messages": ["hello"]}', "a list of"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "a message of the assistant"),
        ('{"conversations": [{"from": "cat", "value": "x"}]}', "speakers among .*'cat'"),
        ('{"conversations": [{"role": "user", "content": "x"}]}', "a list of"),
        ('{"messages": [{"role"', "JSON"),
        ("[]", "an object"),
        ('{"words": "x"}', r"a conversation or a text.*\['words'\]"),
    ],
)
def test_a_broken_line_is_named(chat_target: Path, tmp_path: Path, line: str, message: str) -> None:
    file = write(tmp_path / "talks.jsonl", talks(3))
    file.write_text(file.read_text() + "\n" + line + "\n")
    with pytest.raises(InvalidArgument, match=rf"talks\.jsonl:5'.*{message}") as caught:
        load_text(chat_target, [file], 8)
    assert caught.value.field == "data"
    assert not [*(tmp_path / "cache").rglob("*.tmp")]


def test_a_line_that_is_no_utf8_and_messages_that_the_template_refuses(
    random_target: Path, tmp_path: Path
) -> None:
    refusing = (
        TEMPLATE + "{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}"
    )
    folder = copy_with(random_target, tmp_path / "target", refusing)
    file = write(tmp_path / "talks.jsonl", talks(2))
    good = file.read_bytes()
    file.write_bytes(good + b'{"text": "caf\xe9"}\n')
    with pytest.raises(InvalidArgument, match=r"talks\.jsonl:3'.*utf-8"):
        load_text(folder, [file], 8)
    bad = {"messages": [{"role": "user", "content": "no"}, {"role": "assistant", "content": "x"}]}
    file.write_bytes(good + json.dumps(bad).encode() + b"\n")
    with pytest.raises(InvalidArgument, match=r"talks\.jsonl:3'.*template takes \(no\)"):
        load_text(folder, [file], 8)


def test_files_are_tokenized_once(
    chat_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path / "talks.jsonl", talks(60))
    first = load_text(chat_target, [file], 32)
    with monkeypatch.context() as patch:
        patch.setattr(chat_data, "encode_conversation", None)
        assert load_text(chat_target, [file], 32).digest == first.digest
        assert load_text(chat_target, [file], 16).digest != first.digest
    write(file, talks(61))
    assert load_text(chat_target, [file], 32).digest != first.digest
    (chat_target / "chat_template.jinja").write_text(TEMPLATE.replace("<", "["))
    again = load_text(chat_target, [file], 32)
    assert "[user>" in load_tokenizer(chat_target).decode(again.training[[0]][0].tolist())


def peak(target: Path, folder: Path, count: int) -> float:
    """Resident memory in MB at most, with conversations of one short turn."""
    file = folder / f"{count}.jsonl"
    names = ("human", "gpt")
    write(
        file,
        (
            {"conversations": [{"from": name, "value": f"{name[0]}{i}"} for name in names]}
            for i in range(count)
        ),
    )
    reset_peak_memory()
    text = load_text(target, [file], 64)
    for first in range(0, len(text.training) - 8, len(text.training) // 50):
        rows = range(first, first + 8)
        assert text.training[rows].shape == text.mask(rows).shape == (8, 65)
    assert len(text.digest) == 16  # which reads everything
    return peak_memory() / 2**20


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_data(chat_target: Path, tmp_path: Path) -> None:
    # A process of its own: what other tests left in this one may be freed or swapped meanwhile.
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        counts = (1000, 20_000, 100_000)  # the first for imports
        _, small, large = process.map(partial(peak, chat_target, tmp_path), counts)
    print(f"{small:.0f} MB for 20,000 conversations, {large:.0f} MB for 100,000")
    # 13 MB of files are mapped, in part. The records alone would take more than 60 MB.
    assert large - small < 30
