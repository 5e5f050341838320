"""What clients of /v1/responses send, and the chat request that it comes to."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from paceline.deployments.openai.errors import described
from paceline.deployments.openai.schema import MAX_LOGPROBS, ChatRequest, Effort, refuse_others
from paceline.deployments.openai.schema_base import Body, Flag, Integer, Number, Text
from paceline.errors import InvalidArgument

_TEXTS = ("input_text", "output_text", "text")
LOGPROBS = "message.output_text.logprobs"


class Item(BaseModel):
    """An item of an input: a message, an earlier call, its result, or earlier thoughts."""

    model_config = ConfigDict(extra="allow")

    type: Text = "message"
    role: Text | None = None
    content: Any = None
    call_id: Text | None = None
    name: Text | None = None
    arguments: Text | None = None
    output: Any = None


class Format(Body):
    """What the output has to be."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None


class TextOptions(Body):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    effort: Effort | None = None
    summary: Any = None  # thoughts are not summarized
    generate_summary: Any = None


class ResponsesRequest(Body):
    """The body of POST /v1/responses."""

    model: Text | None = None
    input: Text | Annotated[list[Item], Field(min_length=1)]
    instructions: Text | None = None
    max_output_tokens: Annotated[int, Field(strict=True, ge=1)] | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[Text] | None = None
    text: TextOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Flag | None = None
    reasoning: Reasoning | None = None
    stream: Flag | None = None

    # Beyond OpenAI's API.
    seed: Integer | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    ignore_eos: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    speculation: dict[str, Any] | None = None

    # Without effect: nothing is stored here.
    metadata: dict[str, Any] | None = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None
    stream_options: Any = None
    user: Any = None

    # Refused, unless they say what happens anyway.
    access_programs: Any = None
    background: Any = None
    background_options: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    previous_response_id: Any = None
    prompt: Any = None
    truncation: Any = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "access_programs": ([],),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "truncation": ("disabled",),
    }

    @property
    def keys(self) -> dict[str, str]:
        """Keys of a chat request and of the target's messages, and those that this one has."""
        return {
            "json_schema": "text.format", "max_tokens": "max_output_tokens", "messages": "input",
            "max_completion_tokens": "max_output_tokens", "prompt": "input",
            "response_format": "text.format",
        }  # fmt: skip

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    def chat(self) -> ChatRequest:
        """The same as a request to /v1/chat/completions.

        Raises:
            InvalidArgument: it cannot be honoured; names the key of this request.
        """
        refuse_others(self, self.neutral)
        for i, what in enumerate(self.include or ()):
            if what not in (LOGPROBS, "reasoning.encrypted_content"):  # all thoughts are readable
                raise InvalidArgument(f"include[{i}]", what, f"{LOGPROBS!r}")
        if self.top_logprobs and not self.wants_logprobs:
            allowed = f"{LOGPROBS!r} in include with it"
            raise InvalidArgument("top_logprobs", self.top_logprobs, allowed)
        values: dict[str, Any] = {
            name: getattr(self, name)
            for name in (
                "model", "temperature", "top_p", "stream", "seed", "top_k", "min_p", "ignore_eos",
                "repetition_penalty", "chat_template_kwargs", "speculation", "parallel_tool_calls",
            )
        }  # fmt: skip
        values |= {
            "messages": self._messages(),
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs,
            "response_format": self._format(),
            "tools": [_nested(tool, i) for i, tool in enumerate(self.tools or ())] or None,
            "tool_choice": _choice(self.tool_choice),
            "reasoning_effort": None if self.reasoning is None else self.reasoning.effort,
        }
        try:
            return ChatRequest.model_validate(values)
        except ValidationError as error:
            found = described([{**e, "loc": ("body", *e["loc"])} for e in error.errors()])
            field = found.field.replace("].function.", "].")
            first = re.split(r"\W", field)[0]
            field = self.keys.get(first, first) + field[len(first) :]
            raise InvalidArgument(field, found.value, found.allowed) from None

    def _format(self) -> dict[str, Any] | None:
        given = None if self.text is None else self.text.format
        if given is None or given.type != "json_schema":
            return None if given is None else {"type": given.type}
        if given.schema_ is None:
            raise InvalidArgument("text.format.schema", None, "a JSON schema")
        return {"type": "json_schema", "json_schema": {"schema": given.schema_}}

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for i, item in enumerate(self.input):
            _append(messages, item, f"input[{i}]")
        return messages


def _append(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    """Add what an item says to a conversation."""
    if item.type == "message":
        role = {"developer": "system"}.get(item.role or "", item.role)
        if role is None:
            raise InvalidArgument(f"{where}.role", "nothing", "a role")
        messages.append({"role": role, "content": _content(item.content, f"{where}.content")})
    elif item.type == "function_call":
        function = {"name": item.name or "", "arguments": item.arguments or "{}"}
        call = {"id": item.call_id, "type": "function", "function": function}
        if not (messages and messages[-1]["role"] == "assistant"):
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif item.type == "function_call_output":
        content = _content(item.output, f"{where}.output")
        messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
    elif item.type != "reasoning":  # a model gets no thoughts of earlier turns
        allowed = "message, function_call, function_call_output or reasoning"
        raise InvalidArgument(f"{where}.type", item.type, allowed)


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(where, content, "a text or a list of parts")
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in _TEXTS or not isinstance(part.get("text"), str):
            raise InvalidArgument(f"{where}[{i}].type", kind, "'input_text': this model reads text")
        texts.append(part["text"])
    return "".join(texts)


def _nested(tool: dict[str, Any], place: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        allowed = "'function': this server calls nothing itself"
        raise InvalidArgument(f"tools[{place}].type", tool.get("type"), allowed)
    function = {key: value for key, value in tool.items() if key != "type"}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if isinstance(choice, dict) and "name" in choice:
        return {"type": choice.get("type"), "function": {"name": choice["name"]}}
    return choice
