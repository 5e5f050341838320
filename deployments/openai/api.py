"""OpenAI's HTTP API in front of the target replicas: each choice of a request is one generation."""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from contextlib import aclosing, suppress
from itertools import pairwise
from typing import Any, Protocol, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

import paceline
from paceline.chat import render_chat
from paceline.config import parse_speculation
from paceline.deployments import playground
from paceline.deployments.openai.schema import MAX_CHOICES, ChatRequest, CompletionRequest
from paceline.deployments.openai.server import (
    Guard,
    Receive,
    Scope,
    Send,
    error_body,
    error_response,
)
from paceline.drafters.predicted_outputs import method_with_prediction
from paceline.errors import InvalidArgument, ModelNotFound, PacelineError
from paceline.rpc.access import Gate
from paceline.rpc.errors import Cancelled, ServerUnavailable
from paceline.rpc.gen.paceline.v1 import common_pb2, generate_pb2
from paceline.rpc.messages import sampling_to_message, speculation_to_message
from paceline.sampling import MAX_SEED, SamplingParams

T = TypeVar("T")
Body = dict[str, Any]


class Targets(Protocol):
    """What the API needs of :class:`paceline.deployments.gateway.Relay`."""

    def generate(
        self, request: bytes, timeout_s: float | None = None, traceparent: str = ""
    ) -> AsyncGenerator[tuple[bytes, generate_pb2.GenerateReply]]: ...

    async def get_model(self, request: bytes = b"", timeout_s: float | None = None) -> bytes: ...


def make_app(targets: Targets, gate: Gate) -> Guard:
    """The API as an ASGI app.

    Args:
        targets: relays generations to target replicas.
        gate: admits callers.
    """
    app = FastAPI(
        title="Paceline", version=paceline.__version__, docs_url=None, redoc_url=None,
    )  # fmt: skip
    app.add_exception_handler(PacelineError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_error)
    known = _KnownModel(targets)
    created = int(time.time())

    @app.get("/health")
    async def health() -> Body:
        return {"status": "ok"}

    app.include_router(playground.router)

    @app.get("/version")
    async def version() -> Body:
        return {"version": paceline.__version__}

    @app.get("/v1/models")
    async def models() -> Body:
        return {"object": "list", "data": [_model_body(await known.get(), created)]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Body:
        return _model_body(await known.get(name), created)

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        answer = _CompletionAnswer(body, await known.get(body.model))
        return await _respond(answer, targets, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        answer = _ChatAnswer(body, await known.get(body.model))
        return await _respond(answer, targets, request)

    return Guard(app, gate)


class _KnownModel:
    """The model that the targets serve; asked for once, because it never changes."""

    def __init__(self, targets: Targets) -> None:
        self._targets = targets
        self._model: generate_pb2.Model | None = None

    async def get(self, name: str | None = None) -> generate_pb2.Model:
        """The model.

        Raises:
            ModelNotFound: its name is not ``name``.
            ServerUnavailable: no target runs yet.
        """
        if self._model is None:
            self._model = generate_pb2.Model.FromString(await self._targets.get_model())
        if name is not None and name != self._model.name:
            raise ModelNotFound(f"no model {name!r} here: this server has {self._model.name!r}")
        return self._model


def _model_body(model: generate_pb2.Model, created: int) -> Body:
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "paceline",
        "max_model_len": model.context_length,
        "methods": list(model.methods),
        "default_method": model.default_method,
        "has_chat_template": bool(model.chat_template),
    }


# --- answers --------------------------------------------------------------------------------------


class _Choice:
    """One choice of an answer, as far as its generation has come."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[generate_pb2.TokenLogprobs] = []
        self.offset = (
            0  # of the next token in the text, in characters; streamed log-probabilities name it
        )
        self.rounds: list[Body] = []  # only if the request asks for them
        self.fingerprint = ""  # numerics of the target that committed the last token
        self.numerics_changed = False
        self.last: generate_pb2.GenerateReply | None = None

    def add(self, reply: generate_pb2.GenerateReply) -> None:
        """Add a reply of the target.

        Raises:
            ServerUnavailable: the target stopped before the end.
        """
        self.text += reply.text
        self.token_ids.extend(reply.token_ids)
        self.logprobs.extend(reply.logprobs)
        self.fingerprint = reply.fingerprint or self.fingerprint
        self.numerics_changed |= reply.numerics_changed
        if reply.HasField("draft"):
            self.rounds.append(round_body(reply))
        if reply.finish_reason == "cancelled":
            raise ServerUnavailable("the target is going away: send the request again")
        if reply.finish_reason:
            self.last = reply


class _Answer(ABC):
    """One HTTP request: its requests to the targets, and the bodies that answer it."""

    kind: str  # "object" of the body
    chunk_kind: str

    def __init__(self, body: CompletionRequest | ChatRequest, model: generate_pb2.Model) -> None:
        body.check()
        self.body = body
        self.model = model
        self.created = int(time.time())
        self.id = f"{self.id_prefix}-{secrets.token_hex(12)}"
        self.n = body.n or 1
        self.messages = self._messages()
        self.choices = [_Choice(i) for i in range(len(self.messages))]

    id_prefix: str

    @abstractmethod
    def prompts(self) -> list[generate_pb2.GenerateRequest]:
        """A request to the targets for each prompt, with nothing but the prompt."""

    @abstractmethod
    def whole(self, choice: _Choice) -> Body:
        """A finished choice of the body."""

    @abstractmethod
    def piece(self, choice: _Choice, reply: generate_pb2.GenerateReply) -> Body:
        """A choice of a streamed chunk: what a reply adds."""

    def opening(self) -> Iterable[Body]:
        """Choices of the chunks that come before the first text."""
        return ()

    def _messages(self) -> list[generate_pb2.GenerateRequest]:
        """The requests to the targets, choice by choice.

        The first choice has the request's seed, or a random one if there is none, and choice i that
        seed + i. So choice i equals the only choice of a request with that seed.
        """
        prompts = self.prompts()
        if len(prompts) * self.n > MAX_CHOICES:
            raise InvalidArgument("n", self.n, f"at most {MAX_CHOICES} choices in one request")
        seed = secrets.randbelow(MAX_SEED - MAX_CHOICES)
        values = self.body.sampling(seed)
        values.setdefault("max_tokens", self.model.context_length)
        speculation = self._speculation()
        messages = []
        for prompt in prompts:
            for i in range(self.n):
                params = SamplingParams(**{**values, "seed": values["seed"] + i & MAX_SEED})
                message = generate_pb2.GenerateRequest()
                message.CopyFrom(prompt)
                message.sampling.CopyFrom(sampling_to_message(params))
                message.return_draft = bool(self.body.return_rounds)
                message.numerics_mismatch = self.body.numerics_mismatch or ""
                if speculation is not None:
                    message.speculation.CopyFrom(speculation)
                if self.body.prediction is not None:
                    message.prediction_text = self.body.prediction.text
                messages.append(message)
        return messages

    def _speculation(self) -> common_pb2.Speculation | None:
        given = self.body.speculation
        if given is None:
            return None
        config = parse_speculation({"method": self.method, **given})
        return speculation_to_message(config)

    @property
    def method(self) -> str:
        """The method that the request names, else the target's default."""
        default = self.model.default_method
        if self.body.prediction is not None and self.body.prediction.text:
            default = method_with_prediction(default, self.model.methods)
        return str((self.body.speculation or {}).get("method", default))

    def result(self) -> Body:
        """The body of an answer that is not streamed."""
        return {
            **self._head(self.kind),
            "choices": [
                self.whole(choice) | ({"rounds": choice.rounds} if choice.rounds else {})
                for choice in self.choices
            ],
            **self.closing(),
        }

    def closing(self) -> Body:
        """The keys that are known at the end: usage, metrics and numerics."""
        numerics = {
            "fingerprints": list(dict.fromkeys(choice.fingerprint for choice in self.choices)),
            "changed": any(choice.numerics_changed for choice in self.choices),
        }
        return {"usage": self._usage(), "metrics": self._metrics(), "numerics": numerics}

    def chunk(self, choices: Sequence[Body], **more: Any) -> Body:
        return {**self._head(self.chunk_kind), "choices": list(choices), **more}

    def _head(self, kind: str) -> Body:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": f"paceline-{paceline.__version__}",
        }

    @property
    def _last(self) -> list[generate_pb2.GenerateReply]:
        return [choice.last for choice in self.choices if choice.last is not None]

    def _usage(self) -> Body:
        last = self._last
        prompt = sum(reply.prompt_length for reply in last[:: self.n])
        completion = sum(reply.statistics.num_tokens for reply in last)
        predicted = sum(reply.num_predicted for reply in last)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": predicted,
                "rejected_prediction_tokens": sum(r.prediction_length for r in last) - predicted,
            },
        }

    def _metrics(self) -> Body:
        if self.method == "ar":
            return {"speculative_decoding": None}
        return {"speculative_decoding": speculative_decoding(r.statistics for r in self._last)}


def speculative_decoding(statistics: Iterable[common_pb2.Statistics]) -> Body:
    """A request's acceptance in the form that vLLM reports and AIPerf reads.

    A step is a round with a draft. ``acceptance_histogram[j]`` counts the steps that accepted
    exactly ``j`` drafted tokens, and ``num_spec_tokens`` is the depth of the deepest draft.
    """
    drafted: list[int] = []  # steps whose draft was deeper than i
    accepted: list[int] = []  # steps that accepted more than i tokens
    for each in statistics:
        for total, counts in ((drafted, each.drafted_by_depth), (accepted, each.accepted_by_depth)):
            total += [0] * (len(counts) - len(total))
            for i, count in enumerate(counts):
                total[i] += count
    steps = drafted[0] if drafted else 0
    at_least = [steps, *accepted, 0]
    num_drafted, num_accepted = sum(drafted), sum(accepted)
    return {
        "mean_acceptance_length": 1 + num_accepted / steps if steps else 1.0,
        "draft_acceptance_rate": num_accepted / num_drafted if num_drafted else 0.0,
        "acceptance_histogram": [a - b for a, b in pairwise(at_least)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": num_drafted,
        "num_spec_tokens": len(drafted),
    }


def round_body(reply: generate_pb2.GenerateReply) -> Body:
    """What a round drafted and committed, for requests with ``return_rounds``."""
    draft = reply.draft
    return {
        "round": reply.round,
        "token_ids": list(reply.token_ids),
        "texts": list(draft.committed_texts),
        "num_accepted": reply.num_accepted,
        "seconds": round(draft.seconds, 6),
        "draft": {
            "token_ids": list(draft.token_ids),
            "texts": list(draft.texts),
            "parent_indices": list(draft.parent_indices),
            "accepted_indices": list(draft.accepted_indices),
        },
    }


class _CompletionAnswer(_Answer):
    kind = chunk_kind = "text_completion"
    id_prefix = "cmpl"
    body: CompletionRequest

    def prompts(self) -> list[generate_pb2.GenerateRequest]:
        messages = []
        for prompt in self.body.prompts():
            message = generate_pb2.GenerateRequest(
                add_special_tokens=self.body.add_special_tokens is not False
            )
            if isinstance(prompt, str):
                message.text = prompt
            else:
                try:
                    message.token_ids.token_ids.extend(prompt)
                except ValueError:
                    raise InvalidArgument(
                        "prompt", prompt, f"token ids in [0, {self.model.vocab_size})"
                    ) from None
            messages.append(message)
        return messages

    def whole(self, choice: _Choice) -> Body:
        return self._choice(choice, choice.text, choice.token_ids, choice.logprobs)

    def piece(self, choice: _Choice, reply: generate_pb2.GenerateReply) -> Body:
        return self._choice(choice, reply.text, reply.token_ids, reply.logprobs)

    def _choice(
        self,
        choice: _Choice,
        text: str,
        token_ids: Iterable[int],
        logprobs: Iterable[generate_pb2.TokenLogprobs],
    ) -> Body:
        body: Body = {
            "index": choice.index,
            "text": text,
            "logprobs": self._logprobs(choice, logprobs),
            "finish_reason": choice.last.finish_reason if choice.last else None,
        }
        if self.body.return_token_ids:
            body["token_ids"] = list(token_ids)
        return body

    def _logprobs(
        self, choice: _Choice, entries: Iterable[generate_pb2.TokenLogprobs]
    ) -> Body | None:
        if self.body.logprobs is None:
            return None
        body: Body = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            name = _token_name(entry.text)
            top = {_token_name(other.text): other.logprob for other in entry.top}
            body["tokens"].append(name)
            body["token_logprobs"].append(entry.logprob)
            body["top_logprobs"].append({**top, name: entry.logprob})
            body["text_offset"].append(choice.offset)
            choice.offset += len(entry.text.decode(errors="ignore"))
        return body


class _ChatAnswer(_Answer):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    id_prefix = "chatcmpl"
    body: ChatRequest

    def prompts(self) -> list[generate_pb2.GenerateRequest]:
        body, model = self.body, self.model
        text = render_chat(
            model.chat_template,
            [message.plain(f"messages[{i}]") for i, message in enumerate(body.messages)],
            add_generation_prompt=body.add_generation_prompt is not False,
            bos_token=model.bos_token,
            eos_token=model.eos_token,
            **(body.chat_template_kwargs or {}),
        )
        # A template writes the special tokens itself; the default one leaves them to the tokenizer.
        special = body.add_special_tokens
        special = not model.chat_template if special is None else special
        return [generate_pb2.GenerateRequest(text=text, add_special_tokens=special)]

    def opening(self) -> Iterable[Body]:
        return [
            self.chunk([self._delta(choice, {"role": "assistant", "content": ""})])
            for choice in self.choices
        ]

    def whole(self, choice: _Choice) -> Body:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        body = {
            "index": choice.index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.last.finish_reason if choice.last else None,
        }
        if self.body.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def piece(self, choice: _Choice, reply: generate_pb2.GenerateReply) -> Body:
        body = self._delta(choice, {"content": reply.text} if reply.text else {})
        body["logprobs"] = self._logprobs(reply.logprobs)
        if self.body.return_token_ids:
            body["token_ids"] = list(reply.token_ids)
        return body

    def _delta(self, choice: _Choice, delta: Body) -> Body:
        return {
            "index": choice.index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": choice.last.finish_reason if choice.last else None,
        }

    def _logprobs(self, entries: Iterable[generate_pb2.TokenLogprobs]) -> Body | None:
        if not self.body.logprobs:
            return None
        content = [
            {**_token(entry), "top_logprobs": [_token(other) for other in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}


def _token(entry: generate_pb2.TokenLogprobs | generate_pb2.TopLogprob) -> Body:
    return {
        "token": _token_name(entry.text), "logprob": entry.logprob, "bytes": list(entry.text),
    }  # fmt: skip


def _token_name(text: bytes) -> str:
    """A token's name: its text, or its bytes if they are no text by themselves."""
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


# --- from the targets to the client ---------------------------------------------------------------


async def _respond(answer: _Answer, targets: Targets, request: Request) -> Response:
    replies = _together(targets, answer.messages, request.headers.get("traceparent", ""))
    if not answer.body.stream:
        return await while_connected(request.receive, _collect(answer, replies))
    try:
        # Wait for the first token before sending anything: a refusal can still set the status.
        first = await while_connected(request.receive, anext(replies))
    except BaseException:
        await replies.aclose()
        raise
    return _EventStream(_events(answer, first, replies))


async def _collect(answer: _Answer, replies: AsyncGenerator[_Reply]) -> Response:
    async with aclosing(replies):
        async for index, reply in replies:
            answer.choices[index].add(reply)
    return JSONResponse(answer.result())


async def _events(
    answer: _Answer, first: _Reply, replies: AsyncGenerator[_Reply]
) -> AsyncGenerator[bytes]:
    """The server-sent events of a stream."""
    options = answer.body.stream_options
    with_usage = options is not None and bool(options.include_usage)
    try:
        async with aclosing(replies):
            for body in answer.opening():
                yield _event(body)
            left = len(answer.choices)
            async for index, reply in _after(first, replies):
                choice = answer.choices[index]
                choice.add(reply)
                left -= choice.last is not None
                # A round's tokens may complete no text (half of a character, the start of a stop
                # string); the chunk still carries their ids and log-probabilities.
                more: Body = {}
                if left == 0 and not with_usage:
                    more["metrics"] = answer.closing()["metrics"]
                piece = answer.piece(choice, reply)
                if reply.HasField("draft"):
                    piece["round"] = choice.rounds[-1]
                yield _event(answer.chunk([piece], **more))
            if with_usage:
                yield _event(answer.chunk([], **answer.closing()))
            yield b"data: [DONE]\n\n"
    except Exception as error:
        yield _event(error_body(error))


def _event(body: Body) -> bytes:
    text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


_Reply = tuple[int, generate_pb2.GenerateReply]


async def _after(first: _Reply, rest: AsyncIterator[_Reply]) -> AsyncIterator[_Reply]:
    yield first
    async for reply in rest:
        yield reply


async def _together(
    targets: Targets, messages: Sequence[generate_pb2.GenerateRequest], traceparent: str
) -> AsyncGenerator[_Reply]:
    """Run all generations at once; yields each reply with the index of its request.

    The first error ends all of them, as closing this generator does.
    """
    arrived: asyncio.Queue[_Reply | None] = asyncio.Queue()

    async def relay(index: int, message: generate_pb2.GenerateRequest) -> None:
        call = targets.generate(message.SerializeToString(), traceparent=traceparent)
        try:
            async with aclosing(call) as replies:
                async for _, reply in replies:
                    arrived.put_nowait((index, reply))
        finally:
            arrived.put_nowait(None)

    tasks = [asyncio.create_task(relay(i, message)) for i, message in enumerate(messages)]
    try:
        left = len(tasks)
        while left:
            item = await arrived.get()
            if item is not None:
                yield item
                continue
            left -= 1
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``; cancels it when the client disconnects.

    Raises:
        Cancelled: the client disconnected.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Cancelled("the client has gone")
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _EventStream(Response):
    """Server-sent events. When the client disconnects, their generator ends at once."""

    def __init__(self, events: AsyncGenerator[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self._events = events
        self.init_headers(
            {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for event in self._events:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

        async with aclosing(self._events):
            with suppress(Cancelled):
                await while_connected(receive, write())


# --- errors ---------------------------------------------------------------------------------------


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    body = {
        "message": f"{request.method} {request.url.path}: {error.detail}",
        "type": "invalid_request_error",
        "param": None,
        "code": {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code),
    }
    return JSONResponse({"error": body}, error.status_code, error.headers)


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    # A union has an error for each of its types: the deepest one is the most specific.
    same = [each for each in errors if each["loc"][1:2] == errors[0]["loc"][1:2]]
    first = max(same, key=lambda each: len(each["loc"]))
    kind, value, allowed = first["type"], first.get("input"), first["msg"]
    field = _field(first["loc"][1:])
    if kind == "json_invalid":
        field, value, allowed = "body", "no JSON", f"a JSON object ({first['ctx']['error']})"
    elif kind == "missing":
        value, allowed = "nothing", "a value"
    elif kind == "extra_forbidden":
        allowed = "only keys that this server knows"
    return error_response(InvalidArgument(field or "body", value, allowed))


def _field(loc: Sequence[str | int]) -> str:
    """The path of a wrong key, without pydantic's names for the types of a union."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif re.fullmatch(r"\w+", part) and part not in ("str", "int", "float", "bool"):
            name += f".{part}" if name else part
    return name
