"""/tokenize and /detokenize, as vLLM has them: what the target's tokenizer makes of a text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field

from paceline.deployments.openai.answers import chat_prompt, token_name_of
from paceline.deployments.openai.schema import Message
from paceline.deployments.openai.schema_base import Body, Flag, Integer, Text
from paceline.deployments.openai.streams import Targets, named_as_sent
from paceline.deployments.openai.tools import MAX_TOOLS, Tool, ToolChoice
from paceline.errors import InvalidArgument
from paceline.rpc.gen.paceline.v1 import generate_pb2


class TokenizeRequest(Body):
    """The body of POST /tokenize: a prompt or messages."""

    model: Text | None = None
    prompt: Text | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: Flag | None = None
    return_token_strs: Flag | None = None
    add_generation_prompt: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None


class DetokenizeRequest(Body):
    """The body of POST /detokenize."""

    model: Text | None = None
    tokens: list[Integer]


class _Chat:
    """The conversation of a request, as :func:`chat_prompt` reads it."""

    tool_choice: ToolChoice | None = None
    reasoning_effort: Any = None

    def __init__(self, body: TokenizeRequest) -> None:
        self.messages = body.messages or []
        self.tools = body.tools
        self.chat_template_kwargs = body.chat_template_kwargs
        self.add_generation_prompt = body.add_generation_prompt


async def tokenized(
    body: TokenizeRequest, model: generate_pb2.Model, targets: Targets
) -> dict[str, Any]:
    """The answer of /tokenize.

    Raises:
        InvalidArgument: there is not exactly one of prompt and messages.
    """
    if (body.prompt is None) == (body.messages is None):
        given = "neither" if body.prompt is None else "both"
        raise InvalidArgument("prompt", given, "a prompt or messages")
    if body.prompt is not None:
        text, special = body.prompt, body.add_special_tokens is not False
    else:
        # A template writes the special tokens itself; the default one leaves them to the tokenizer.
        text = chat_prompt(_Chat(body), model)
        special = body.add_special_tokens
        special = not model.chat_template if special is None else special
    try:
        request = generate_pb2.TokenizeRequest(
            text=text, add_special_tokens=special, return_texts=bool(body.return_token_strs)
        )
    except UnicodeEncodeError:
        key = "prompt" if body.messages is None else "messages"
        raise InvalidArgument(key, "half of a surrogate pair", "Unicode text") from None
    with named_as_sent({"text": "prompt"}):
        reply = await targets.tokenize(request.SerializeToString())
    tokens = generate_pb2.Tokens.FromString(reply)
    return {
        "count": len(tokens.token_ids),
        "max_model_len": model.context_length,
        "tokens": list(tokens.token_ids),
        "token_strs": list(map(token_name_of, tokens.texts)) if body.return_token_strs else None,
    }


async def detokenized(
    body: DetokenizeRequest, model: generate_pb2.Model, targets: Targets
) -> dict[str, Any]:
    """The answer of /detokenize.

    Raises:
        InvalidArgument: a token is not in the vocabulary.
    """
    try:
        return {"prompt": await text_of(targets, body.tokens)}
    except ValueError as error:
        place = getattr(error, "field", "").removeprefix("token_ids")
        value = getattr(error, "value", body.tokens)
        raise InvalidArgument(
            f"tokens{place}", value, f"token ids in [0, {model.vocab_size})"
        ) from None


async def special_id(targets: Targets, text: str) -> int | None:
    """The special token with this text; None: the text has other tokens."""
    request = generate_pb2.TokenizeRequest(text=text, add_special_tokens=False)
    reply = await targets.tokenize(request.SerializeToString())
    token_ids = generate_pb2.Tokens.FromString(reply).token_ids
    if len(token_ids) == 1 and await text_of(targets, token_ids, skip_special_tokens=True) == "":
        return token_ids[0]
    return None


async def text_of(
    targets: Targets, token_ids: Sequence[int], *, skip_special_tokens: bool = False
) -> str:
    """The text of tokens."""
    request = generate_pb2.DetokenizeRequest(
        token_ids=token_ids, skip_special_tokens=skip_special_tokens
    )
    reply = await targets.detokenize(request.SerializeToString())
    return generate_pb2.Text.FromString(reply).text
