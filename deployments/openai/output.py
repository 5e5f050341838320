"""Splits a model's output, as it comes, into thoughts, content and calls."""

from __future__ import annotations

import json
import re
import secrets
import string
from typing import Any, Literal

from paceline.deployments.openai.tools import Tools

Delta = dict[str, Any]
Thinking = Literal["no", "maybe", "yes"]

_THINK, _END_OF_THINK = "<think>", "</think>"
_CALL = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_ID = string.ascii_letters + string.digits


class OutputParser:
    """The parser of one choice's output.

    Args:
        tools: that the output may call; its grammar forbids calls of another form.
        thinking: "yes": the output begins inside of thoughts; "maybe": it may open them.
    """

    def __init__(self, tools: Tools | None, thinking: Thinking) -> None:
        self._tools = tools
        self._left = ""  # text that waits for more
        after = "call" if tools is not None and tools.must_call else "begin"
        self._after_thoughts = after
        self._has_thoughts = False
        self._state = {"no": after, "maybe": "undecided", "yes": "thought"}[thinking]
        self._depth, self._quoted, self._escaped = 0, False, False
        self.num_calls = 0

    def push(self, text: str) -> list[Delta]:
        """What a piece of the output adds to the message."""
        self._left += text
        deltas: list[Delta] = []
        while self._step(deltas):
            pass
        return deltas

    def close(self) -> list[Delta]:
        """What the output's end adds: text that might have begun something else."""
        left, self._left = self._left, ""
        if not left or self._state in ("call", "arguments"):
            return []
        return [{"reasoning_content" if self._state == "thought" else "content": left}]

    def _step(self, deltas: list[Delta]) -> bool:
        """Go on by one state; False: this needs more text."""
        return bool(self._left) and getattr(self, f"_{self._state}")(deltas)

    def _undecided(self, deltas: list[Delta]) -> bool:
        text = self._left.lstrip()
        if text.startswith(_THINK):
            self._state, self._left = "thought", text[len(_THINK) :]
        elif _THINK.startswith(text):
            return False
        else:
            self._state = self._after_thoughts
        return True

    def _thought(self, deltas: list[Delta]) -> bool:
        if not self._has_thoughts:
            self._left = self._left.lstrip("\n")
        self._has_thoughts = bool(self._left)
        before, found = self._until(_END_OF_THINK)
        if before:
            deltas.append({"reasoning_content": before})
        if found:
            self._state = self._after_thoughts
        return found

    def _begin(self, deltas: list[Delta]) -> bool:
        """The content begins; blank lines after thoughts are no part of it."""
        if self._has_thoughts:
            self._left = self._left.lstrip("\n")
        unmarked = self._tools is not None and not self._tools.format.marker
        if self._left:
            self._state = "call" if unmarked and self._left.startswith("{") else "content"
        return bool(self._left)

    def _content(self, deltas: list[Delta]) -> bool:
        marker = self._tools.format.marker if self._tools is not None else ""
        before, found = self._until(marker)
        if before:
            deltas.append({"content": before})
        if found:
            self._state = "call"
        return found

    def _call(self, deltas: list[Delta]) -> bool:
        found = _CALL.search(self._left)
        if found is None:
            return False
        deltas.append(
            {"tool_calls": [{
                "index": self.num_calls,
                "id": self._new_id(),
                "type": "function",
                "function": {"name": json.loads(found[1]), "arguments": ""},
            }]}
        )  # fmt: skip
        self.num_calls += 1
        self._state, self._left = "arguments", self._left[found.end() :]
        return True

    def _arguments(self, deltas: list[Delta]) -> bool:
        """The arguments, up to the bracket that closes them."""
        if self._depth == 0:
            self._left = self._left.lstrip()
            if not self._left:
                return False
        size = next((i for i, c in enumerate(self._left, 1) if self._closes(c)), None)
        piece = self._left[:size]
        self._left = self._left[len(piece) :]
        call = {"index": self.num_calls - 1, "function": {"arguments": piece}}
        deltas.append({"tool_calls": [call]})
        if size is not None:
            self._state = "call"
        return True

    def _closes(self, character: str) -> bool:
        """Whether the outermost bracket closes with this character."""
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif character == "\\":
                self._escaped = True
            elif character == '"':
                self._quoted = False
        elif character == '"':
            self._quoted = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            return self._depth == 0
        return False

    def _until(self, mark: str) -> tuple[str, bool]:
        """Take the text before ``mark``, which is dropped; holds back what might begin it.

        Without a mark, takes all of it.
        """
        before, found, after = self._left.partition(mark) if mark else (self._left, "", "")
        if found:
            self._left = after
            return before, True
        held = next((n for n in range(len(mark) - 1, 0, -1) if before.endswith(mark[:n])), 0)
        self._left = before[len(before) - held :]
        return before[: len(before) - held], False

    def _new_id(self) -> str:
        if self._tools is not None and self._tools.format.name == "mistral":
            return "".join(secrets.choice(_ID) for _ in range(9))  # its templates want this
        return f"call_{secrets.token_hex(12)}"


def merged(deltas: list[Delta]) -> Delta:
    """Several deltas as one; of all deltas of an output, this is the message."""
    result: Delta = {}
    for delta in deltas:
        for key, value in delta.items():
            if key != "tool_calls":
                result[key] = result.get(key, "") + value
                continue
            calls = result.setdefault("tool_calls", [])
            for call in value:
                same = next((c for c in calls if c["index"] == call["index"]), None)
                if same is None:
                    calls.append({**call, "function": dict(call["function"])})
                else:
                    same["function"]["arguments"] += call["function"]["arguments"]
    return result
