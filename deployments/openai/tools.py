"""Tools: what a request may call, the grammar of its calls, and how the prompt says so.

The target's chat template names the form in which its model writes calls. A grammar holds every
call to that form and to the function's schema. It is a constraint like any other, so the tokens are
those of plain decoding under it, with any drafter (:mod:`paceline.constraints`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from paceline.chat import reads_tools
from paceline.deployments.openai.schema_base import Body, Flag, Text
from paceline.errors import InvalidArgument

MAX_TOOLS = 128
MAX_CALLS = 16
"""In one message: a small model may not find the end of its calls by itself."""
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"


class Function(Body):
    """A function that the model may call."""

    name: Annotated[str, Field(strict=True, pattern=_NAME)]
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: Flag | None = None  # every schema is strict here


class Tool(Body):
    """A tool; functions are the only kind."""

    type: Literal["function"]
    function: Function


class NamedFunction(Body):
    name: Text


class NamedTool(Body):
    """The function that must be called."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a model writes calls: ``opening (prefix call suffix) between (...) closing``.

    A call is ``{"name": NAME, KEY: ARGUMENTS}``.

    Attributes:
        marker: the text at which calls begin inside other text; empty: only an output that begins
            with ``{`` is a call.
        key: of the arguments.
    """

    name: str
    marker: str
    opening: str
    prefix: str
    suffix: str
    between: str
    closing: str
    key: str = "arguments"

    def head(self, name: str) -> str:
        """The text of a call before its arguments."""
        return f'{{"name": {json.dumps(name)}, "{self.key}": '

    def text(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls, each a name and its arguments as JSON, as the model writes them."""
        parts = []
        for name, arguments in calls:
            parts.append(f"{self.prefix}{self.head(name)}{arguments}}}{self.suffix}")
        return f"{self.opening}{self.between.join(parts)}{self.closing}"


HERMES = CallFormat("hermes", "<tool_call>", "", "<tool_call>\n", "\n</tool_call>", "\n", "")
"""Of Hermes and Qwen; also where a template says nothing."""
LLAMA = CallFormat("llama3", "", "", "", "", "; ", "", key="parameters")
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", "[TOOL_CALLS][", "", "", ", ", "]")


def format_of(template: str) -> CallFormat:
    """The form of calls in a chat template."""
    if "[TOOL_CALLS]" in template:
        return MISTRAL
    if "<tool_call>" not in template and '"parameters": ' in template and reads_tools(template):
        return LLAMA
    return HERMES


def thinks(template: str) -> bool:
    """Whether the model of a chat template writes its thoughts between ``<think>`` and
    ``</think>``."""
    return "<think>" in template


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request, checked.

    Attributes:
        functions: that may be called.
        must_call: the output is nothing but calls.
        named: the request names the function, which is called once.
    """

    format: CallFormat
    tools: Sequence[Tool]
    functions: Sequence[Function]
    must_call: bool
    named: bool
    parallel: bool

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool] | None,
        choice: ToolChoice | None,
        parallel: bool | None,
        template: str,
    ) -> Tools | None:
        """The tools that a request may use; None: it may call nothing.

        Raises:
            InvalidArgument: two tools have one name, the choice is none of them, or a schema is not
                that of an object.
        """
        functions = [tool.function for tool in tools or ()]
        names = [function.name for function in functions]
        for i, function in enumerate(functions):
            if function.name in names[:i]:
                field = f"tools[{i}].function.name"
                raise InvalidArgument(field, function.name, "a name of its own")
            kind = (function.parameters or {}).get("type", "object")
            if kind != "object":
                field = f"tools[{i}].function.parameters.type"
                raise InvalidArgument(field, kind, "'object'")
        named = isinstance(choice, NamedTool)
        if isinstance(choice, NamedTool):
            if choice.function.name not in names:
                allowed = "the name of one of the tools" + (f" ({', '.join(names)})" * bool(names))
                raise InvalidArgument("tool_choice.function.name", choice.function.name, allowed)
            functions = [functions[names.index(choice.function.name)]]
        elif choice == "required" and not functions:
            raise InvalidArgument("tool_choice", choice, "'none' or 'auto' without tools")
        if not functions or choice == "none":
            return None
        must = named or choice == "required"
        several = parallel is not False and not named
        return cls(format_of(template), tools or (), functions, must, named, several)

    def grammar(self, thinking: Literal["no", "maybe", "yes"], marker_id: int | None = None) -> str:
        """What the output may be, in Lark's notation as llguidance reads it.

        Args:
            thinking: whether thoughts come first; "yes": the prompt has opened them.
            marker_id: the special token that is the form's marker; None: the marker is text.
        """
        form = self.format
        marker = _text(form.marker) if marker_id is None else f"<[{marker_id}]>"
        first = (form.opening + form.prefix).removeprefix(form.marker)
        calls = f"{_text(first)} call"
        if self.parallel:
            calls += f" ({_text(form.suffix + form.between + form.prefix)} call)~0..{MAX_CALLS - 1}"
        calls += f" {_text(form.suffix + form.closing)}"
        thought = {"no": "", "maybe": "thought? ", "yes": "thought "}[thinking]
        lines = [r"ANY: /(.|\n)*/"]
        if thinking != "no":
            opened = _text("<think>") if thinking == "maybe" else ""
            lines.append(rf"thought: {opened} thought_end /\s*/")
            lines.append(f"thought_end[lazy]: ANY {_text('</think>')}")
        if self.must_call:
            lines.append(f"start: {thought}{marker} {calls}")
        elif form.marker:
            begun = "thought " if thinking == "yes" else ""  # else thoughts are part of the text
            lines.append(f"start: {begun}(ANY | begin {calls})")
            lazy = "[lazy]" if marker_id is None else ""
            lines.append(f"begin{lazy}: ANY {marker}")
        else:
            lines.append(rf"start: {thought}(OTHER? | {calls})")
            lines.append(r"OTHER: /[^{](.|\n)*/")
        lines.append("call: " + " | ".join(f"call_{i}" for i in range(len(self.functions))))
        for i, function in enumerate(self.functions):
            lines.append(f"call_{i}: {_text(form.head(function.name))} arguments_{i} {_text('}')}")
            lines.append(f"arguments_{i}: %json {json.dumps(_arguments(function))}")
        return "\n".join(lines)


def _arguments(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments, in the form that models write JSON."""
    given = function.parameters
    if given is None:
        given = {"properties": {}, "additionalProperties": False}
    return {"type": "object", "x-guidance": _JSON_OPTIONS, **given}


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


# --- the prompt -----------------------------------------------------------------------------------

_INSTRUCTIONS = """\
# Tools

You may call one or more functions. Their signatures, one a line, are within <tools></tools>:
<tools>
{tools}
</tools>

For each call, write a JSON object with the function's name and its arguments within \
<tool_call></tool_call>:
<tool_call>
{{"name": <name of the function>, "arguments": <object with its arguments>}}
</tool_call>"""


def prompt_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], template: str
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """The messages and the tools that a chat template renders.

    A template that reads tools gets them, and earlier calls with their arguments as objects. For
    any other, the system's message describes the tools, and earlier calls and results become text.

    Raises:
        InvalidArgument: an earlier call is not one.
    """
    described = [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
                 for tool in tools]  # fmt: skip
    known = reads_tools(template)
    result = [
        _message(dict(message), f"messages[{i}]", known) for i, message in enumerate(messages)
    ]
    if known or not tools:
        return result, described or None
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in described)
    text = _INSTRUCTIONS.format(tools=lines)
    if result and result[0]["role"] == "system":
        result[0]["content"] = f"{result[0]['content']}\n\n{text}"
    else:
        result.insert(0, {"role": "system", "content": text})
    return result, None


def _message(message: dict[str, Any], where: str, known: bool) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if calls:
        parsed = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
        message["tool_calls"] = parsed
        if not known:
            functions = [call["function"] for call in parsed]
            texts = [(f["name"], json.dumps(f["arguments"], ensure_ascii=False)) for f in functions]
            before = [message["content"]] if message["content"] else []
            message["content"] = "\n".join((*before, HERMES.text(texts)))
            del message["tool_calls"]
    if message["role"] == "tool" and not known:
        text = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": text}
    return message


def _call(call: Any, where: str) -> dict[str, Any]:
    """An earlier call, with its arguments as an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidArgument(where, call, "an object with a function, its name and arguments")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = None
    if not isinstance(arguments, dict):
        field = f"{where}.function.arguments"
        raise InvalidArgument(field, function.get("arguments"), "an object, as JSON")
    return {**call, "function": {**function, "arguments": arguments}}
