"""A look at a constraint before anything compiles it: bytes, rules, nesting and repetition.

It costs milliseconds and refuses what can only be an attack or a mistake. What is within its
bounds may still be too much, which :mod:`paceline.constraint_process` finds out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from paceline.bounds import (
    CONSTRAINT_BYTES,
    CONSTRAINT_DEPTH,
    CONSTRAINT_REPEATS,
    CONSTRAINT_RULES,
)
from paceline.errors import InvalidArgument

_JSON_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_CLASS = r"\[\^?\]?(?:[^\]\\]|\\.)*\]"
_COUNT = r"\{\d+(?:,\d*)?\}|~\s*\d+(?:\s*\.\.\s*\d+)?"
# The last token is characters that a repetition may follow. `*`, `+` and `?` are none of these:
# `(a{9})+{9}` repeats both.
_REGEX_TOKENS = re.compile(rf"\\.|{_CLASS}|{_COUNT}|[()]|[^()\[{{\\*+?]+", re.DOTALL)
# Quoted texts and regular expressions inside a grammar. In GBNF square brackets are classes of
# characters, in Lark they group.
_QUOTED = r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|(?://|\#)[^\n]*'
_NAMES = r"[\w|:=.,-]+"
_LARK_TOKENS = re.compile(rf"{_QUOTED}|{_COUNT}|[()\[\]]|{_NAMES}")
_GBNF_TOKENS = re.compile(rf"{_QUOTED}|{_CLASS}|{_COUNT}|[()]|{_NAMES}")
_LARK_RULE = re.compile(r"^[?!]?[A-Za-z_][\w.-]*(?:\[[^\]\n]*\])?\s*:", re.MULTILINE)


def check_constraint(kind: str, text: str) -> None:
    """Refuse a constraint that is larger than the bounds.

    Args:
        kind: "json_schema", "regex" or "grammar".

    Raises:
        InvalidArgument: names ``kind``, the size and the bound.
    """
    try:
        CONSTRAINT_BYTES.check(len(text.encode()), kind)
    except UnicodeEncodeError:
        raise InvalidArgument(kind, "half of a surrogate pair", "Unicode text") from None
    if kind == "json_schema":
        _check_schema(kind, text)
    elif kind == "regex":
        _check_nesting(kind, _REGEX_TOKENS, text)
    else:
        gbnf = "::=" in text
        CONSTRAINT_RULES.check(text.count("::=") if gbnf else len(_LARK_RULE.findall(text)), kind)
        _check_nesting(kind, _GBNF_TOKENS if gbnf else _LARK_TOKENS, text)


def _check_schema(kind: str, text: str) -> None:
    CONSTRAINT_RULES.check(text.count('"$ref"'), kind)
    _check_nesting(kind, _JSON_TOKENS, text)
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InvalidArgument(kind, _start(text), f"a valid one ({error})") from None
    for pattern in _patterns(schema):
        _check_nesting(f"{kind}.pattern", _REGEX_TOKENS, pattern)


def _patterns(schema: Any) -> Iterator[str]:
    """The regular expressions of a schema, and texts that only look like them."""
    left = [schema]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            pattern, keys = value.get("pattern"), value.get("patternProperties")
            if isinstance(pattern, str):
                yield pattern
            if isinstance(keys, dict):
                yield from keys
            left.extend(value.values())
        elif isinstance(value, list):
            left.extend(value)


def _check_nesting(kind: str, tokens: re.Pattern[str], text: str) -> None:
    """Check the depth of brackets, and how often repetitions inside others repeat."""
    inside = [1]  # most repetitions in each open group so far
    last = 1  # of what a repetition would repeat
    for found in tokens.finditer(text):
        token = found[0]
        if token[0] in "([{" and len(token) == 1:
            inside.append(1)
            CONSTRAINT_DEPTH.check(len(inside) - 1, kind)
            last = 1
        elif token in (")", "]", "}"):
            last = inside.pop() if len(inside) > 1 else 1
            inside[-1] = max(inside[-1], last)
        elif token[0] in "{~":
            # int() refuses thousands of digits, and nine are too many already.
            last *= max([1, *(int(number[:9]) for number in re.findall(r"\d+", token))])
            CONSTRAINT_REPEATS.check(last, kind)
            inside[-1] = max(inside[-1], last)
        else:
            if token[0] == "/" and token[:2] != "//":
                _check_nesting(kind, _REGEX_TOKENS, token[1:-1])
            last = 1


def _start(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
