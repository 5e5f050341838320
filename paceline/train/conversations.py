"""Conversations of a chat model with itself, and its distribution at each of its tokens.

A drafter learns best from text that its target writes when it serves (DistillSpec, arXiv
2310.08461). So the target writes the questions, too: it continues the empty user turn of its chat
template (Magpie, Xu et al. 2024, arXiv 2406.08464), and then answers. Some questions are about
texts (earlier answers, documentation of Python's standard library) or functions of that library,
and files may add questions and texts.

For every token of an answer the file keeps the target's ``top_k`` most likely tokens and their
probabilities, so that training need not run the target again.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from paceline.config import SpeculationConfig
from paceline.engine import Engine, EngineLimits, RoundEvent
from paceline.loading import load_engine
from paceline.request import Request
from paceline.sampling import SamplingParams
from paceline.tokenizer import Tokenizer

TOP_K = 20
Turn = Literal["more", "done", "dropped"]
"""What becomes of a conversation: the model goes on, it has ended, it is no good."""
SHARD = 64
"""Conversations in a file."""
MAX_TEXTS = 20_000
"""Answers that later questions may be about; further ones replace them."""
QUESTION_TOKENS = 80
"""Maximum length of a question that the model writes."""
BEGIN, END = "<|im_start|>", "<|im_end|>"
SYSTEMS = (
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face",
    "You are a helpful assistant.",
    "Answer in a few sentences.",
    "",
)
"""Instructions before a conversation; the first one is that of the model's template."""
OPENERS = (
    "", "", "", "", "", "What is", "What are", "How do I", "How can", "Why", "Can you", "Explain",
    "Write a short story about", "Write an email to", "Write a poem about", "Describe",
    "Give me a list of", "List", "Compare", "Who was", "When did", "Tell me about", "I need help",
    "Translate", "Translate to English:", "Translate from German to English:",
    "Write a Python function that", "Write a Python program", "In Python, how",
    "Write a class", "What does this code do?\n\n", "Fix the error in this code:\n\n",
    "Solve the following problem:", "If a train", "How many", "Calculate", "Suggest", "Plan",
    "Write a review of", "Compose", "What would happen if", "Imagine", "Rewrite the sentence",
    "Who", "Who", "When", "Where", "Where is", "How long", "How much", "Which", "What does", "Is",
    "who sang", "who played", "when was", "when did", "where is", "who won", "what is the",
    "how many",
)  # fmt: skip
"""Beginnings of user turns that the model completes."""
ARTICLES = (
    "Write a news article about", "Write a newspaper report about", "Write a short article about",
    "Write an encyclopedia article about", "Write a detailed description of",
    "Write a biography of", "Tell me the history of", "Write a report on the accident",
    "Write a sports report about", "Write an article about a politician who",
)  # fmt: skip
"""Beginnings of user turns whose answers are texts that later questions are about."""
OVER_TEXTS = (
    "Summarize: {}", "Summarize: {}", "Summarize this article: {}", "{}\n\nTL;DR",
    "Summarize the following text:\n\n{}", "Summarize this in one sentence:\n\n{}",
    "{}\n\nWhat is the main point of this text?",
    "Rewrite the following text in simple words:\n\n{}",
    "Make a list of the most important facts in this text:\n\n{}",
    "Correct the spelling and the grammar of this text:\n\n{}",
    "Read the text and answer the question.\n\nText: {}\n\nQuestion: What is it about?",
    "Give the following text a title and repeat its first two sentences:\n\n{}",
    "Which names, places and numbers occur in this text?\n\n{}",
)  # fmt: skip


PASSAGES = (
    "Use these passages to answer the question.\n\n{}\n\nQuestion: {}",
    "Answer the question from the text.\n\n{}\n\n{}",
    "{}\n{}",
    "{}\n\nQuestion: {}",
)
"""Around texts, and the beginning of a question about them that the model completes."""
QUESTION_OPENERS = ("What", "What is", "How", "Why", "Who", "When", "Where", "Which", "Describe")
TRANSLATIONS = (
    "Translate German to English: {}", "Translate German to English: {}",
    "Translate from German to English:\n\n{}", "What does this mean in English? {}",
    "Translate this German sentence into English: {}",
)  # fmt: skip
GERMAN = (
    (
        "Die Regierung", "Der Bürgermeister von Hamburg", "Eine Sprecherin der Polizei",
        "Das Unternehmen aus München", "Die junge Ärztin", "Mein Bruder", "Der neue Trainer",
        "Die Europäische Union", "Ein Forscher der Universität", "Unsere Nachbarin",
        "Die Zeitung", "Der Präsident", "Eine Gruppe von Schülern", "Das Gericht",
        "Die Bank in Frankfurt", "Ein Sprecher des Ministeriums", "Die Gewerkschaft",
        "Der Hersteller", "Die Mehrheit der Bürger", "Das Museum",
    ),
    (
        "hat am Montag einen Plan vorgestellt,", "will die Preise nicht weiter erhöhen,",
        "wartet seit drei Wochen auf eine Antwort,", "sprach in Berlin über die Zukunft der Stadt,",
        "hat im vergangenen Jahr viel Geld verloren,", "sucht dringend neue Mitarbeiter,",
        "lehnte den Vorschlag zunächst ab,", "musste die Straße für mehrere Stunden sperren,",
        "freut sich über den großen Erfolg,", "warnt vor den Folgen der Krise,",
        "plant den Bau einer neuen Brücke,", "kann die Kosten noch nicht nennen,",
        "bestätigte den Bericht am Freitag,", "kaufte ein altes Haus am See,",
        "fordert bessere Regeln für den Verkehr,", "verkauft jedes Jahr mehr Fahrräder,",
        "hat die Kinder zu einem Fest eingeladen,", "untersucht den Unfall vom Sonntag,",
        "liest jeden Morgen die Nachrichten,", "veröffentlichte eine lange Studie,",
    ),
    (
        "obwohl viele Menschen dagegen sind.", "weil das Wetter so schlecht war.",
        "um die Umwelt zu schützen.", "wie eine Zeitung berichtet.",
        "nachdem die Verhandlungen gescheitert waren.", "damit mehr Wohnungen entstehen.",
        "aber niemand weiß, wie lange es dauern wird.", "und das ist erst der Anfang.",
        "ohne die Nachbarn zu fragen.", "sobald das Parlament zugestimmt hat.",
        "denn die Zahl der Touristen steigt.", "bevor der Winter beginnt.",
        "was in anderen Ländern schon lange üblich ist.", "doch der Erfolg ist unsicher.",
        "sagte sie der Presse.", "und ihre Familie hilft dabei.",
        "wenn genug Geld vorhanden ist.", "seit die Grenze wieder offen ist.",
        "während die Wirtschaft langsam wächst.", "deshalb gibt es viele Fragen.",
    ),
)  # fmt: skip
"""Parts of sentences to translate."""
KINDS = {
    "file": 0.13, "text": 0.22, "passages": 0.17, "code": 0.1, "translation": 0.07, "own": 0.24,
    "article": 0.07,
}  # fmt: skip
"""Shares of the kinds of first questions."""
GIVEN = 0.7
"""Share of the questions about texts that are about texts from files, where there are some."""
MAX_GIVEN = 3300
"""Characters of text from files in a question."""
PASSAGE = 650
"""Characters of a passage."""
OVER_CODE = (
    "Complete the following Python function:\n\n```python\n{}\n```",
    "Complete this code.\n\n{}",
    "Write the body of this Python function. Answer with code only.\n\n```python\n{}\n```",
    "Write a test for this function:\n\n```python\n{}\n```",
    "{}\n\nExplain what this function does.",
)
"""Questions about the head of a function: its signature and its docstring."""


@dataclass(slots=True)
class Conversation:
    """A conversation in progress.

    Attributes:
        system: instruction before it.
        kind: of its first question, one of ``KINDS``; or ``quote``, see :meth:`Dialogues.quote`.
        tokens: so far.
        positions: of the tokens that the model wrote as the assistant.
        top_ids, top_probs: for each of these, its likeliest tokens and their probabilities; empty
            where the writer does not keep them.
        turns: number of answers still to come.
        answering: the model goes on as the assistant, not as the user.
        temperature: at which it goes on.
        max_tokens: how many tokens it may add.
    """

    system: str
    kind: str
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    top_ids: list[list[int]] = field(default_factory=list)
    top_probs: list[list[float]] = field(default_factory=list)
    turns: int = 1
    answering: bool = False
    temperature: float = 0.0
    max_tokens: int = 0


class Dialogues:
    """What a model is asked in its conversations with itself; writers let it go on from there.

    Args:
        questions: from files; without them, no conversation is of the kind ``file``.
        texts: from files, for questions about texts. Copying their names and numbers is learnt
            from them: a model's own texts repeat those that it likes.
        seed: of all choices.
        answer_tokens: maximum length of an answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        questions: Sequence[str] = (),
        texts: Sequence[str] = (),
        *,
        seed: int = 0,
        answer_tokens: int = 256,
    ) -> None:
        self._tokenizer = tokenizer
        (self.end,) = tokenizer.encode(END, add_special_tokens=False)
        self._questions, self._answer_tokens = questions, answer_tokens
        self._random = np.random.default_rng(seed)
        self._texts, self._functions = documentation()
        self._given = texts

    @property
    def room(self) -> int:
        """Tokens that the first two turns may add to a conversation that begins."""
        return QUESTION_TOKENS + self._answer_tokens

    def begin(self) -> Conversation:
        """A conversation with its first question, or the beginning of one."""
        random = self._random
        talk = Conversation(SYSTEMS[int(random.choice(len(SYSTEMS), p=(0.5, 0.2, 0.1, 0.2)))], "")
        talk.turns = int(random.choice((1, 2, 3), p=(0.7, 0.2, 0.1)))
        head = _instruction(talk.system)
        kinds = [*KINDS] if self._questions else [*KINDS][1:]
        shares = np.array([KINDS[kind] for kind in kinds])
        talk.kind = str(random.choice(kinds, p=shares / shares.sum()))
        if talk.kind == "own":
            question = self._one_of(OPENERS)
        elif talk.kind == "article":
            question = self._one_of(ARTICLES)
        elif talk.kind == "file":
            question = self._one_of(self._questions)
        elif talk.kind == "code":
            question = self._one_of(OVER_CODE).format(self._one_of(self._functions))
        elif talk.kind == "text":
            question = self._one_of(OVER_TEXTS).format(self._some_texts())
        elif talk.kind == "translation":
            sentence = " ".join(self._one_of(parts) for parts in GERMAN)
            question = self._one_of(TRANSLATIONS).format(sentence)
        else:
            question = self._one_of(PASSAGES).format(
                self._some_texts(passages=True), self._one_of(QUESTION_OPENERS)
            )
        talk.tokens = self._encode(f"{head}{BEGIN}user\n{question}")
        if talk.kind in ("own", "article", "passages"):
            _to_ask(talk)
        else:
            self._to_answer(talk)
        return talk

    def hear(self, talk: Conversation, written: Sequence[int]) -> Turn:
        """Add what the model wrote, and say how it goes on."""
        ended = bool(written) and written[-1] == self.end
        if not talk.answering:
            talk.tokens += written[:-1] if ended else written
            if len(written) < 3 or not ended:
                return "dropped"  # an unfinished question
            self._to_answer(talk)
            return "more"
        talk.positions += range(len(talk.tokens), len(talk.tokens) + len(written))
        talk.tokens += written
        if ended and len(written) > 60:
            text = self._tokenizer.decode(list(written[:-1]))
            if len(self._texts) < MAX_TEXTS:
                self._texts.append(text)
            else:
                self._texts[int(self._random.integers(MAX_TEXTS))] = text
        if not ended or not talk.turns or len(talk.tokens) > 1200:
            return "done"
        talk.tokens += self._encode(f"\n{BEGIN}user\n")
        _to_ask(talk)
        return "more"

    def quote(self) -> Conversation:
        """A question about texts from files, answered by some of their sentences.

        The target did not write it: what it would have written is learnt at each place all the
        same, and copying is learnt from more texts than it can be asked about in the same time.
        """
        random = self._random
        passages = random.random() < 0.3
        system = self._one_of(SYSTEMS)
        text = self._files(passages)
        about = self._one_of(text.split("\n")) if passages else text
        whole = re.split(r"(?<=[.!?])\s+|\n", about)
        sentences = [each for each in whole if len(each) > 25] or [about]
        if passages:
            question = self._one_of(PASSAGES).format(
                text, self._one_of(self._questions or ("Why?",))
            )
        else:
            question = self._one_of(OVER_TEXTS).format(text)
        first = int(random.integers(len(sentences))) if random.random() < 0.5 else 0
        steps = random.integers(1, 3, size=int(random.integers(0, 5)))
        chosen = [n for n in (first, *(first + np.cumsum(steps))) if n < len(sentences)]
        answer = self._encode(" ".join(sentences[n] for n in chosen))[: self._answer_tokens - 1]
        talk = Conversation(system, "quote")
        talk.tokens = self._encode(
            f"{_instruction(system)}{BEGIN}user\n{question}{END}\n{BEGIN}assistant\n"
        )
        talk.positions = [*range(len(talk.tokens), len(talk.tokens) + len(answer) + 1)]
        talk.tokens += [*answer, self.end]
        return talk

    def _one_of(self, texts: Sequence[str]) -> str:
        return texts[int(self._random.integers(len(texts)))]

    def _some_texts(self, *, passages: bool = False) -> str:
        """One to four earlier texts; or from files, several ``passages`` or a longer text."""
        if not self._given or self._random.random() > GIVEN:
            count = int(self._random.integers(1, 5))
            return "\n\n".join(self._one_of(self._texts) for _ in range(count))
        return self._files(passages)

    def _files(self, passages: bool) -> str:
        """Passages of texts from files, one in a line; or a longer text."""
        if passages:
            count = int(self._random.integers(2, MAX_GIVEN // PASSAGE + 1))
            given = (self._one_of(self._given)[:PASSAGE] for _ in range(count))
            return "\n".join(text.replace("\n", " ") for text in given)
        wanted, text = int(self._random.integers(MAX_GIVEN)), self._one_of(self._given)
        while len(text) < wanted:
            text += " " + self._one_of(self._given)
        return text[:MAX_GIVEN]

    def _to_answer(self, talk: Conversation) -> None:
        """End the user's turn."""
        talk.tokens += self._encode(f"{END}\n{BEGIN}assistant\n")
        talk.turns -= 1
        talk.answering = True
        # Most answers are served greedily.
        talk.temperature = float(self._random.choice((0.0, 0.0, 0.0, 0.7, 1.0)))
        talk.max_tokens = self._answer_tokens

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)


def _instruction(system: str) -> str:
    """The turn before a conversation."""
    return f"{BEGIN}system\n{system}{END}\n" if system else ""


def _to_ask(talk: Conversation) -> None:
    """Let the model write the user's turn; its questions must differ."""
    talk.answering, talk.temperature, talk.max_tokens = False, 1.0, QUESTION_TOKENS


class Writer:
    """Runs conversations of a model with itself, many at once.

    Args:
        model: folder or name of the target.
        questions, texts: see :class:`Dialogues`.
        seed: of all random choices.
        batch: number of concurrent conversations.
    """

    def __init__(
        self,
        model: str,
        questions: Sequence[str] = (),
        texts: Sequence[str] = (),
        *,
        seed: int = 0,
        batch: int = 16,
    ) -> None:
        self._engine: Engine = load_engine(
            model, dtype="auto", limits=EngineLimits(max_sessions=batch)
        )
        assert self._engine.tokenizer is not None
        self._dialogues = Dialogues(self._engine.tokenizer, questions, texts, seed=seed)
        self._batch, self._count = batch, 0
        self._running: dict[str, Conversation] = {}

    def write(self) -> Iterator[Conversation]:
        """Yield conversations as they end, for ever."""
        ended: list[Conversation] = []

        def hear(event: RoundEvent) -> None:
            talk = self._running[event.session.session_id]
            if talk.answering:
                for entry in event.logprobs:
                    talk.top_ids.append([token for token, _ in entry.top])
                    talk.top_probs.append([float(np.exp(value)) for _, value in entry.top])
            if event.finished:
                del self._running[event.session.session_id]
                turn = self._dialogues.hear(talk, event.session.output_ids)
                if turn == "more":
                    self._submit(talk)
                elif turn == "done":
                    ended.append(talk)

        self._hear = hear
        while True:
            while len(self._running) < self._batch:
                self._submit(self._dialogues.begin())
            self._engine.step()
            yield from ended
            ended.clear()

    def _submit(self, talk: Conversation) -> None:
        self._count += 1
        params = SamplingParams(
            temperature=talk.temperature, top_p=1.0 if talk.answering else 0.95, seed=self._count,
            max_tokens=talk.max_tokens, stop_token_ids=(self._dialogues.end,),
            logprobs=TOP_K if talk.answering else None,
        )  # fmt: skip
        session = self._engine.submit(
            Request(talk.tokens, params, SpeculationConfig(method="ar")), on_event=self._hear
        )
        self._running[session.session_id] = talk


def documentation(limit: int = 900) -> tuple[list[str], list[str]]:
    """Docstrings of Python's standard library, and heads of its functions.

    Each has at most ``limit`` characters.
    """
    texts: list[str] = []
    functions: list[str] = []
    for file in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(file.read_text("utf-8"))
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                continue
            text = inspect.cleandoc(ast.get_docstring(node) or "")
            if len(text) >= 200:
                texts.append(text[:limit].rsplit("\n", 1)[0])
            if isinstance(node, ast.FunctionDef) and 40 <= len(text) <= limit:
                node.body, node.decorator_list = node.body[:1], []
                functions.append(ast.unparse(node))
    return texts, functions


def save(shard: Sequence[Conversation], file: Path) -> None:
    """Write conversations, one after the other, into one file.

    It holds ``tokens`` (uint16) and the ``ends`` of the conversations in them; the ``positions`` of
    answers' tokens, and for these ``top_ids`` (uint16) and ``top_probs`` (float16), [n, TOP_K];
    and the ``kinds`` of the conversations.
    """
    starts = np.cumsum([0, *(len(talk.tokens) for talk in shard)])
    count = sum(len(talk.positions) for talk in shard)
    arrays: dict[str, Any] = {
        "tokens": np.array([t for talk in shard for t in talk.tokens], np.uint16),
        "ends": starts[1:].astype(np.int64),
        "positions": np.concatenate(
            [np.array(talk.positions, np.int64) + s for talk, s in zip(shard, starts, strict=False)]
        ),
        "top_ids": _rows([row for talk in shard for row in talk.top_ids], count, np.uint16),
        "top_probs": _rows([row for talk in shard for row in talk.top_probs], count, np.float16),
        "kinds": np.array([talk.kind for talk in shard]),
    }  # fmt: skip
    part = file.with_suffix(".tmp")
    with part.open("wb") as out:
        np.savez(out, **arrays)
    os.replace(part, file)


def _rows(rows: Sequence[Sequence[float]], count: int, dtype: type) -> NDArray[Any]:
    """# [count, k]; k is 0 without rows."""
    if not rows:
        return np.zeros((count, 0), dtype)
    assert len(rows) == count
    return np.array(rows, dtype)


def write_conversations(
    talks: Iterator[Conversation], out: Path, *, tokens: int, shard_size: int = SHARD
) -> None:
    """Save conversations until the folder has a number of answer tokens; resumes where it stopped.

    Args:
        shard_size: conversations in a file.
    """
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(out.glob("*.npz"))
    have = sum(len(np.load(file)["positions"]) for file in files)
    number = len(files)
    bar = tqdm(total=tokens, initial=have, unit="token", unit_scale=True, desc="conversations")
    shard: list[Conversation] = []
    for talk in talks if have < tokens else ():
        shard.append(talk)
        bar.update(len(talk.positions))
        have += len(talk.positions)
        if len(shard) == shard_size or have >= tokens:
            save(shard, out / f"{number:05}.npz")
            number, shard = number + 1, []
        if have >= tokens:
            break
    if shard:  # there are no more
        save(shard, out / f"{number:05}.npz")
    bar.close()
