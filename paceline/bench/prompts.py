"""Prompts for benchmarks, and built-in ones by category.

The built-in prompts are cut from standard library modules that no demo model was trained on
(:func:`paceline.train.corpus.held_out_modules`), so they need no download and are the same on
every machine with the same Python, to its last version number (some systems leave modules out).
They are beginnings of texts, because the models are base models of code: they continue text and do
not follow instructions.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

PROMPTS_PER_CATEGORY = 8

# Size of a built-in prompt: about 100 to 350 tokens with the demo tokenizer.
_MIN_CHARS, _MAX_CHARS = 320, 720
_MAX_WORDS = 230  # words and signs, of which tables of numbers have many
_MAX_DIGITS = 120  # digits, of which a token holds few


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, or the user's turns of a conversation.

    Attributes:
        prompt_id: unique in its set; a file's own id, where its format has one.
        category: results are shown for each one and for all together.
        turns: the text, or what the user says turn by turn.
    """

    prompt_id: str
    category: str
    turns: tuple[str, ...]

    @property
    def text(self) -> str:
        """The first turn, which is all that a model without a chat template gets."""
        return self.turns[0]


@cache
def builtin_prompts() -> tuple[Prompt, ...]:
    """``PROMPTS_PER_CATEGORY`` prompts of each built-in category, in a fixed order."""
    from paceline.train.corpus import held_out_modules

    found: dict[str, list[tuple[str, list[str]]]] = {category: [] for category in CATEGORIES}
    for name, source in held_out_modules():
        for category, texts_of_module in cut_prompts(source).items():
            found[category].append((name, texts_of_module))
    prompts = []
    for category, texts in found.items():
        for index, (name, text) in enumerate(_spread(texts, PROMPTS_PER_CATEGORY)):
            prompts.append(Prompt(f"{category}/{index}:{name}", category, (text,)))
    return tuple(prompts)


def cut_prompts(source: str) -> dict[str, list[str]]:
    """All prompts of each built-in category that a Python module has."""
    return {category: list(find(source)) for category, find in _CATEGORIES.items()}


def limit_per_category(prompts: Iterable[Prompt], limit: int | None) -> list[Prompt]:
    """The first ``limit`` prompts of each category; None: all."""
    taken: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        taken[prompt.category] = taken.get(prompt.category, 0) + 1
        if limit is None or taken[prompt.category] <= limit:
            kept.append(prompt)
    return kept


# --- cutting prompts from modules ----------------------------------------------------------------


def _spread(found: list[tuple[str, list[str]]], count: int) -> list[tuple[str, str]]:
    """``count`` texts from as many modules as possible, evenly over the sorted modules.

    Skips a text with many long numbers for one of the next module.
    """
    modules = [(name, texts) for name, texts in found if texts]
    chosen: list[tuple[str, str]] = []
    turn = 0
    while len(chosen) < count:
        left = [(name, texts[turn]) for name, texts in modules if len(texts) > turn]
        if not left:
            break
        wanted = min(count - len(chosen), len(left))
        for start in [i * len(left) // wanted for i in range(wanted)]:
            others = (p for p in left[start:] + left[:start] if p not in chosen)
            chosen.append(next((p for p in others if _digits(p[1]) <= _MAX_DIGITS), left[start]))
        turn += 1
    return chosen


_Function = ast.FunctionDef | ast.AsyncFunctionDef


@lru_cache(maxsize=1)  # each category reads the same modules
def _functions(source: str) -> tuple[_Function, ...]:
    try:
        tree = ast.parse(source)
    except SyntaxError:  # lib2to3 and its kin keep files for other versions of Python
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, _Function))


def _ending_at(lines: list[str], end: int) -> str | None:
    """As many whole lines before line ``end`` (0-based, excluded) as fit into a prompt."""
    start, size = end, 0
    while start > 0 and size + len(lines[start - 1]) + 1 <= _MAX_CHARS:
        start -= 1
        size += len(lines[start]) + 1
    while start < end and not lines[start].strip():
        start += 1
    text = "\n".join(lines[start:end]) + "\n"
    return text if len(text) >= _MIN_CHARS and len(_words(text)) <= _MAX_WORDS else None


def _code_completion(source: str) -> Iterator[str]:
    """A module up to the middle of a function body."""
    lines = source.splitlines()
    for function in _functions(source):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        if not body or (function.end_lineno or 0) - body[0].lineno < 11:
            continue
        middle = (body[0].lineno + (function.end_lineno or 0)) // 2
        # End before a statement, so that the line to come is neither blank nor a comment.
        starts = [s.lineno for s in ast.walk(function) if isinstance(s, ast.stmt)]
        text = _ending_at(lines, min(starts, key=lambda line: abs(line - middle)) - 1)
        if text is not None:
            yield text


def _docstring_continuation(source: str) -> Iterator[str]:
    """A module up to the middle of a function's or method's docstring."""
    lines = source.splitlines()
    for function in _functions(source):
        if not ast.get_docstring(function):
            continue
        first, last = function.body[0].lineno, function.body[0].end_lineno or 0
        if last - first < 7:
            continue
        end = (first + last) // 2
        while end > first + 1 and not lines[end - 1].strip():
            end -= 1  # end after a line of text
        text = _ending_at(lines, end)
        if text is not None:
            yield text


def _copy_heavy_edits(source: str) -> Iterator[str]:
    """A function, and the beginning of the same function with a variable renamed."""
    lines = source.splitlines()
    for function in _functions(source):
        start = min([function.lineno, *(d.lineno for d in function.decorator_list)]) - 1
        code = textwrap.dedent("\n".join(lines[start : function.end_lineno]))
        if not _MIN_CHARS <= len(code) <= 520:
            continue
        uses: dict[str, int] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                uses[node.id] = uses.get(node.id, 0) + 1
        stored = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and _is_store(n)}
        arguments = {argument.arg for argument in function.args.args} - {"self", "cls"}
        names = sorted(n for n in stored | arguments if len(n) > 1 and uses.get(n, 0) >= 2)
        if not names:
            continue
        old = max(names, key=lambda name: uses[name])
        new = f"new_{old}"
        renamed = re.sub(rf"\b{re.escape(old)}\b", new, code).splitlines()
        beginning = "\n".join(renamed[: max(2, len(renamed) // 4)])
        yield f"# Before:\n{code}\n\n# After renaming {old} to {new}:\n{beginning}\n"


def _is_store(name: ast.Name) -> bool:
    return isinstance(name.ctx, ast.Store)


def _repeated_structure(source: str) -> Iterator[str]:
    """Tables, constants and sibling methods: where lines look like the lines before them."""
    lines = source.splitlines()
    windows = []
    for end in range(16, len(lines) - 8, 4):
        text = _ending_at(lines, end)
        if text is not None:
            # The continuation must repeat too, or the prompt shows the end of a table.
            following = "\n".join(lines[end : end + 8])
            windows.append((_repetition(text, following), end, text))
    windows.sort(key=lambda window: (-window[0], window[1]))
    taken: list[int] = []
    for score, end, text in windows:
        if score >= 0.6 and all(abs(end - other) > 40 for other in taken):
            taken.append(end)
            yield text


def _repetition(text: str, following: str) -> float:
    """Share of the following text's 3-grams of words and signs that occur in ``text``."""
    known, seen = set(_trigrams(text)), _trigrams(following)
    return sum(gram in known for gram in seen) / len(seen) if len(seen) >= 30 else 0.0


def _trigrams(text: str) -> list[tuple[str, ...]]:
    # Names and numbers count by their kind, since the lines of a table differ in their values.
    words = ["0" if word[0].isdigit() else word for word in _words(text)]
    return list(zip(words, words[1:], words[2:], strict=False))


def _digits(text: str) -> int:
    return sum(len(word) for word in _words(text) if word[0].isdigit())


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


_CATEGORIES: dict[str, Callable[[str], Iterator[str]]] = {
    "code_completion": _code_completion,
    "docstring_continuation": _docstring_continuation,
    "copy_heavy_edits": _copy_heavy_edits,
    "repeated_structure": _repeated_structure,
}

CATEGORIES = tuple(_CATEGORIES)
