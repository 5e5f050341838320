"""What clients of OpenAI's API send, and what of it is honoured.

A key that clients of OpenAI's API or of vLLM know is either honoured, or without effect on the text
(``user``), or refused by name. Any other key is an error, so that a misspelled one is not lost
silently; ``gateway.http.extra: ignore`` drops it. ``null`` is the same as leaving a key out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from paceline.bounds import (
    ALLOWED_TOKEN_IDS,
    LOGIT_BIASES,
    STOP_STRINGS,
    STOP_TOKEN_IDS,
    TEMPLATE_VARIABLES,
)
from paceline.chat import RESERVED
from paceline.deployments.openai.schema_base import (
    Body,
    Flag,
    Integer,
    Number,
    Text,
    TokenIds,
)
from paceline.deployments.openai.tools import MAX_TOOLS, Tool, ToolChoice
from paceline.errors import InvalidArgument
from paceline.request import MAX_PRIORITY
from paceline.sampling import MAX_SEED

MAX_CHOICES = 128
"""Of one request, all prompts together."""
MAX_LOGPROBS = 20
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class StreamOptions(Body):
    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None
    include_obfuscation: Flag | None = None  # pads the events of others; without effect here


class ContentPart(BaseModel):
    """A piece of a message's content."""

    type: Text
    text: Text | None = None


class PredictedOutput(Body):
    """The text that is expected as the output."""

    type: Literal["content"]
    content: Text | list[ContentPart]

    @property
    def text(self) -> str:
        return _joined(self.content, "prediction.content")


class JsonSchema(Body):
    """What ``response_format`` says of a JSON schema; a strict one is what every one is here."""

    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Body):
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


class StructuredOutputs(Body):
    """What the output has to be, beyond OpenAI's API and as vLLM has it. One key of these."""

    json_: dict[str, Any] | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1)] | None = None
    grammar: Text | None = None

    def sampling(self) -> dict[str, Any]:
        """Fields of SamplingParams."""
        given = {
            name: value
            for name in ("json", "regex", "choice", "grammar")
            if (value := getattr(self, "json_" if name == "json" else name)) is not None
        }
        if len(given) != 1:
            allowed = "one of json, regex, choice and grammar"
            raise InvalidArgument("structured_outputs", sorted(given), allowed)
        ((kind, value),) = given.items()
        return as_constraint(kind, value)


def as_constraint(kind: str, value: Any) -> dict[str, Any]:
    """The field of SamplingParams for a constraint as vLLM's clients name it.

    Args:
        kind: ``json``, ``regex``, ``grammar`` or ``choice``.
    """
    if kind == "json":
        return {"json_schema": value if isinstance(value, str) else json.dumps(value)}
    if kind == "choice":
        texts = (json.dumps(text, ensure_ascii=False) for text in value)
        # One terminal, not a rule: a rule may have 500 alternatives at a time.
        return {"grammar": "start: CHOICE\nCHOICE: " + " | ".join(texts)}
    return {kind: value}


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


class _Request(Body):
    """What both kinds of completion have in common."""

    model: Text | None = None
    max_tokens: Integer | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] | None = None
    stop: Text | Annotated[list[Text], Field(max_length=STOP_STRINGS.most)] | None = None
    seed: Integer | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Annotated[dict[str, Number], Field(max_length=LOGIT_BIASES.most)] | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    response_format: ResponseFormat | None = None

    # Beyond OpenAI's API, under the names that other servers gave them.
    best_of: Annotated[int, Field(strict=True, ge=1, le=MAX_CHOICES)] | None = None
    top_k: Integer | None = None
    min_p: Number | None = None
    min_tokens: Integer | None = None
    repetition_penalty: Number | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=STOP_TOKEN_IDS.most)] | None = None
    allowed_token_ids: (
        Annotated[TokenIds, Field(min_length=1, max_length=ALLOWED_TOKEN_IDS.most)] | None
    ) = None
    include_stop_str_in_output: Flag | None = None
    skip_special_tokens: Flag | None = None
    ignore_eos: Flag | None = None
    add_special_tokens: Flag | None = None
    prompt_logprobs: Annotated[int, Field(strict=True, ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: Flag | None = None
    return_tokens_as_token_ids: Flag | None = None
    return_rounds: Flag | None = None
    return_explanation: Flag | None = None
    numerics_mismatch: Literal["refuse", "allow"] | None = None
    priority: Annotated[int, Field(strict=True, ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    speculation: dict[str, Any] | None = None
    prediction: PredictedOutput | None = None

    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = None
    guided_regex: Text | None = None
    guided_grammar: Text | None = None
    guided_choice: Annotated[list[Text], Field(min_length=1)] | None = None

    # Without effect on the text.
    user: Any = None
    request_id: Any = None
    session_id: Any = None
    guided_decoding_backend: Any = None
    mm_payload: Any = None
    return_mm_kwargs: Any = None
    return_token_offsets: Any = None
    truncation_side: Any = None

    # Refused, unless they say what happens anyway.
    bad_words: Any = None
    cache_salt: Any = None
    ec_transfer_params: Any = None
    guided_whitespace_pattern: Any = None
    kv_transfer_params: Any = None
    length_penalty: Any = None
    logits_processors: Any = None
    logprob_token_ids: Any = None
    repetition_detection: Any = None
    routed_experts_prompt_start: Any = None
    spaces_between_special_tokens: Any = None
    stream_interval: Any = None
    thinking_token_budget: Any = None
    truncate_prompt_tokens: Any = None
    use_beam_search: Any = None
    vllm_xargs: Any = None
    watermarking: Any = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        "bad_words": ([],),
        "cache_salt": (),
        "ec_transfer_params": ({},),
        "guided_whitespace_pattern": (),
        "kv_transfer_params": (),
        "length_penalty": (1,),
        "logits_processors": ([],),
        "logprob_token_ids": ([],),
        "repetition_detection": (),
        "routed_experts_prompt_start": (0,),
        "spaces_between_special_tokens": (True,),
        "stream_interval": (1,),
        "thinking_token_budget": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    }

    def check(self) -> None:
        """Refuse what cannot be honoured.

        Raises:
            InvalidArgument: naming the key.
        """
        refuse_others(self, self.neutral)
        if self.stream_options is not None and not self.stream:
            raise InvalidArgument("stream_options", "set", "stream: true with it")
        if self.best_of is not None:
            if self.best_of < (self.n or 1):
                raise InvalidArgument("best_of", self.best_of, f"at least n, {self.n or 1}")
            if self.stream and self.num_samples > (self.n or 1):
                raise InvalidArgument("best_of", self.best_of, "n in a stream")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidArgument("prompt_logprobs", self.prompt_logprobs, "none in a stream")
        self.constraint()

    @property
    def num_samples(self) -> int:
        """Generations for each prompt, of which the best n are the answer."""
        return self.best_of or self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def not_unicode(self) -> str | None:
        """The first key that has half of a surrogate pair in it, which JSON can write."""
        for name, value in self.model_dump(exclude_none=True).items():
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                return name
        return None

    @property
    def output_limit(self) -> int | None:
        """Tokens to generate at most; None: the rest of the context."""
        return self.max_tokens

    def constraint(self) -> tuple[str, dict[str, Any]] | None:
        """The key of the request that limits its output, and the field of SamplingParams for it.

        Raises:
            InvalidArgument: there are several.
        """
        given = []
        if self.response_format is not None and self.response_format.type != "text":
            given.append(("response_format", self.response_format.sampling()))
        if self.structured_outputs is not None:
            values = self.structured_outputs.sampling()
            (kind,) = self.structured_outputs.model_dump(by_alias=True, exclude_none=True)
            given.append((f"structured_outputs.{kind}", values))
        for kind in ("json", "regex", "grammar", "choice"):
            value = getattr(self, f"guided_{kind}")
            if value is not None:
                given.append((f"guided_{kind}", as_constraint(kind, value)))
        if len(given) > 1:
            raise InvalidArgument(
                given[1][0].partition(".")[0], "set", f"nothing beside {given[0][0]}"
            )
        return given[0] if given else None

    @property
    def keys(self) -> dict[str, str]:
        """Fields of the target's messages, and the keys that this request has for them."""
        found = self.constraint()
        keys = {} if found is None else dict.fromkeys(found[1], found[0])
        return {**keys, "prediction_text": "prediction.content"}

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
            "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
            "stop_token_ids", "allowed_token_ids", "min_tokens", "ignore_eos",
            "skip_special_tokens", "include_stop_str_in_output", "prompt_logprobs",
        ):  # fmt: skip
            values[name] = getattr(self, name)
        values["top_k"] = 0 if self.top_k == -1 else self.top_k  # vLLM's "all"
        values["logprobs"] = self.num_logprobs
        if values["logprobs"] is None and self.num_samples > (self.n or 1):
            values["logprobs"] = 0  # to find the best
        found = self.constraint()
        if found is not None:
            values |= found[1]
        if self.logit_bias:
            values["logit_bias"] = dict(_biases(self.logit_bias))
        return {name: value for name, value in values.items() if value is not None}


def refuse_others(body: Body, neutral: dict[str, tuple[Any, ...]]) -> None:
    """Refuse keys that ask for more than what happens anyway.

    Args:
        neutral: those keys, each with the values that ask for no more.

    Raises:
        InvalidArgument: naming the key.
    """
    for name, allowed in neutral.items():
        value = getattr(body, name)
        if value is not None and not any(_same(value, each) for each in allowed):
            what = " or ".join(repr(a) for a in allowed) if allowed else "nothing"
            raise InvalidArgument(name, value, f"{what}: this server does not support more")


def _same(value: Any, other: Any) -> bool:
    """Equality that tells true from 1."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


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

    echo: Flag | None = None

    prompt_embeds: Any = None
    suffix: Any = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_Request.neutral, "prompt_embeds": (), "suffix": ("",),
    }  # fmt: skip

    @property
    def scores_only(self) -> bool:
        """Whether the answer has no generated token."""
        return self.max_tokens == 0

    @property
    def reads_only(self) -> bool:
        """Whether the request asks for its prompts' scores, and at most one token after each."""
        scored = self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)
        return bool(scored) and self.output_limit == 1 and self.num_samples == 1

    @property
    def may_share(self) -> bool:
        """Whether prompts may be read together."""
        alone = (
            self.stream, self.speculation is not None, self.prediction is not None,
            self.return_rounds, self.return_explanation, self.constraint() is not None,
        )  # fmt: skip
        return self.reads_only and not any(alone)

    @property
    def output_limit(self) -> int:
        """The target generates at least one token, which ``max_tokens: 0`` drops."""
        return 16 if self.max_tokens is None else self.max_tokens or 1

    def sampling(self, seed: int) -> dict[str, Any]:
        values = super().sampling(seed)
        if self.echo and self.logprobs is not None:
            values.setdefault("prompt_logprobs", self.logprobs)
        return values

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

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: Flag | None = None
    include_reasoning: Flag | None = None
    reasoning_effort: Effort | None = None

    # As other servers have them.
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: Flag | None = None

    metadata: Any = None
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
    verbosity: Any = None
    web_search_options: Any = None

    chat_template: Any = None
    continue_final_message: Any = None
    documents: Any = None
    echo: Any = None
    media_io_kwargs: Any = None
    mm_processor_kwargs: Any = None
    return_prompt_text: Any = None

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {
        **_Request.neutral,
        "audio": (),
        "chat_template": (),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "return_prompt_text": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "modalities": (["text"],),
        "moderation": (),
        "verbosity": ("medium",),
        "web_search_options": (),
    }

    @property
    def keys(self) -> dict[str, str]:
        limit = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return {**super().keys, "max_tokens": limit}

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
        variables = self.chat_template_kwargs or {}
        TEMPLATE_VARIABLES.check(len(variables))
        for name in variables:
            if name in RESERVED:
                allowed = f"other names than {', '.join(sorted(RESERVED))}"
                raise InvalidArgument("chat_template_kwargs", name, allowed)
