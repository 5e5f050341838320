"""What clients of OpenAI's API send, and what of it is honoured.

A key that OpenAI's clients know is either honoured, or without effect on the text (``user``), or
refused by name. Any other key is an error, so that a misspelled one is not lost silently. ``null``
is the same as leaving a key out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.errors import InvalidArgument
from paceline.sampling import MAX_SEED

MAX_CHOICES = 128
"""Of one request, all prompts together."""
MAX_LOGPROBS = 20

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Integer = Annotated[int, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True)]
TokenIds = list[Integer]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(_Body):
    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None
    include_obfuscation: Flag | None = None  # pads the events of others; without effect here


class ContentPart(BaseModel):
    """A piece of a message's content."""

    type: Text
    text: Text | None = None


class PredictedOutput(_Body):
    """The text that is expected as the output."""

    type: Literal["content"]
    content: Text | list[ContentPart]

    @property
    def text(self) -> str:
        return _joined(self.content, "prediction.content")


class JsonSchema(_Body):
    """What ``response_format`` says of a JSON schema; a strict one is what every one is here."""

    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(_Body):
    """What the output has to be, as OpenAI's clients say it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def sampling(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        if self.type == "text":
            return {}
        if self.type == "json_object":
            return {"json_schema": json.dumps({"type": "object"})}
        if self.json_schema is None or self.json_schema.schema_ is None:
            raise InvalidArgument("response_format.json_schema", None, "an object with a schema")
        return {"json_schema": json.dumps(self.json_schema.schema_)}


class StructuredOutputs(_Body):
    """What the output has to be, beyond OpenAI's API and as vLLM has it. One key of these."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = None

    def sampling(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        schema, choice = self.json_, self.choice
        given = {
            "json_schema": json.dumps(schema) if isinstance(schema, dict) else schema,
            "regex": self.regex,
            "grammar": self.grammar,
            "choice": choice,
        }
        given = {name: value for name, value in given.items() if value is not None}
        if len(given) != 1:
            allowed = "one of json, regex, choice and grammar"
            raise InvalidArgument("structured_outputs", sorted(given), allowed)
        if choice is not None:
            texts = (json.dumps(text, ensure_ascii=False) for text in choice)
            return {"grammar": "start: " + " | ".join(texts)}
        return given


def _joined(content: str | list[ContentPart], where: str) -> str:
    """The text of a content that may be in pieces.

    Raises:
        InvalidArgument: there is more in it than text.
    """
    if isinstance(content, str):
        return content
    for i, part in enumerate(content):
        if part.type != "text" or part.text is None:
            raise InvalidArgument(f"{where}[{i}].type", part.type, "'text': this model reads text")
    return "".join(part.text or "" for part in content)


class _Request(_Body):
    """What both kinds of completion have in common."""

    model: Text | None = None
    max_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] | None = None
    stop: Text | list[Text] | None = None
    seed: Integer | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    logit_bias: dict[str, Number] | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    response_format: ResponseFormat | None = None

    # Beyond OpenAI's API, under the names that other servers gave them.
    top_k: Integer | None = None
    min_p: Number | None = None
    repetition_penalty: Number | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: Flag | None = None
    add_special_tokens: Flag | None = None
    return_token_ids: Flag | None = None
    return_rounds: Flag | None = None
    numerics_mismatch: Literal["refuse", "allow"] | None = None
    speculation: dict[str, Any] | None = None
    prediction: PredictedOutput | None = None

    structured_outputs: StructuredOutputs | None = None

    # Without effect on the text.
    user: Any = None

    # Refused, unless they say what happens anyway.
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    def check(self) -> None:
        """Refuse what cannot be honoured.

        Raises:
            InvalidArgument: naming the key.
        """
        for name, allowed in self.neutral.items():
            value = getattr(self, name)
            if value is not None and value not in allowed:
                what = " or ".join(repr(a) for a in allowed) if allowed else "nothing"
                raise InvalidArgument(name, value, f"{what}: this server does not support more")
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options", "set", "stream: true with it")
        if self.structured_outputs is not None and self.response_format is not None:
            raise InvalidArgument("structured_outputs", "set", "nothing beside response_format")

    @property
    def output_limit(self) -> int | None:
        """Tokens to generate at most; None: the rest of the context."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to tell beside each one; None: no log-probabilities at all."""
        raise NotImplementedError

    def sampling(self, seed: int) -> dict[str, Any]:
        """Fields of SamplingParams, as far as the request says them.

        Args:
            seed: where the request has none.
        """
        given = seed if self.seed is None else self.seed
        values: dict[str, Any] = {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "seed": given & MAX_SEED,
            "max_tokens": self.output_limit,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
        }
        for name in (
            "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty",
            "presence_penalty", "stop_token_ids", "ignore_eos",
        ):  # fmt: skip
            values[name] = getattr(self, name)
        values["logprobs"] = self.num_logprobs
        for constraint in (self.response_format, self.structured_outputs):
            if constraint is not None:
                values |= constraint.sampling()
        if self.logit_bias:
            values["logit_bias"] = dict(_biases(self.logit_bias))
        return {name: value for name, value in values.items() if value is not None}


def _biases(given: dict[str, float]) -> Iterator[tuple[int, float]]:
    for key, value in given.items():
        try:
            yield int(key), value
        except ValueError:
            raise InvalidArgument("logit_bias", key, "token ids as keys") from None


class CompletionRequest(_Request):
    """The body of POST /v1/completions."""

    prompt: Any
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None

    best_of: Any = None
    echo: Any = None
    suffix: Any = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "echo": (False,), "suffix": ("",),
    }  # fmt: skip

    def check(self) -> None:
        super().check()
        if self.best_of not in (None, self.n or 1):
            raise InvalidArgument("best_of", self.best_of, "n: choices are not ranked here")

    @property
    def output_limit(self) -> int:
        return 16 if self.max_tokens is None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several, as text or as token ids.

        Raises:
            InvalidArgument: something else.
        """
        given = self.prompt
        single = isinstance(given, str) or _are_ids(given)
        several = [given] if single else given
        if not isinstance(several, list) or not several:
            raise _bad_prompt(given)
        for prompt in several:
            if not prompt or not (isinstance(prompt, str) or _are_ids(prompt)):
                raise _bad_prompt(prompt)
        return several


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is int for item in value)


def _bad_prompt(value: Any) -> InvalidArgument:
    allowed = "a text or a list of token ids that is not empty, or a list of such"
    return InvalidArgument("prompt", value, allowed)


class Message(BaseModel):
    """One message of a conversation. Keys of one's own are for the chat template."""

    model_config = ConfigDict(extra="allow")

    role: Text
    content: Text | list[ContentPart] | None = None

    def plain(self, where: str) -> dict[str, Any]:
        """The message as chat templates expect it: its content is one text.

        Raises:
            InvalidArgument: there is more in it than text.
        """
        content = _joined(self.content or "", f"{where}.content")
        return {**self.model_dump(exclude_none=True), "content": content}


class ChatRequest(_Request):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Integer | None = None
    logprobs: Flag | None = None
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None

    # As other servers have them.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag | None = None

    metadata: Any = None
    parallel_tool_calls: Any = None
    prompt_cache_key: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    safety_identifier: Any = None
    service_tier: Any = None
    store: Any = None

    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    reasoning_effort: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "reasoning_effort": ("none",),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    @property
    def output_limit(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument("top_logprobs", self.top_logprobs, "logprobs: true with it")
