"""OpenAI's HTTP API in front of the target replicas: each choice of a request is one generation."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import Depends, FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response

import paceline
from paceline.deployments import playground
from paceline.deployments.config import HttpConfig
from paceline.deployments.openai import answer_schema as answered
from paceline.deployments.openai import docs_page
from paceline.deployments.openai.answers import ChatAnswer, CompletionAnswer
from paceline.deployments.openai.errors import add_error_handlers
from paceline.deployments.openai.responses import ResponseAnswer
from paceline.deployments.openai.responses_schema import ResponsesRequest
from paceline.deployments.openai.schema import ChatRequest, CompletionRequest
from paceline.deployments.openai.schema_base import UNKNOWN_KEYS
from paceline.deployments.openai.server import App, Guard
from paceline.deployments.openai.streams import Targets, named_as_sent, respond
from paceline.deployments.openai.tokens import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenized,
    special_id,
    text_of,
    tokenized,
)
from paceline.deployments.openai.tools import format_of
from paceline.errors import ModelNotFound
from paceline.rpc.access import Gate
from paceline.rpc.gen.paceline.v1 import generate_pb2

Body = dict[str, Any]
Metrics = Callable[[], Awaitable[str]]
"""The metrics of a deployment, in Prometheus' text format."""

UNSUPPORTED = {
    "/v1/embeddings": "embeddings",
    "/pooling": "embeddings",
    "/classify": "classes",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/audio/translations": "translations of speech",
    "/v1/images/generations": "images",
    "/v1/moderations": "moderations",
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "ranks"),
    **dict.fromkeys(("/v1/score", "/score"), "scores of pairs"),
}
"""Paths of OpenAI's or vLLM's API for other kinds of models, and what those would give."""


def make_app(
    targets: Targets,
    gate: Gate,
    http: HttpConfig | None = None,
    metrics: Metrics | None = None,
) -> App:
    """The API as an ASGI app.

    Args:
        targets: relays generations to target replicas.
        gate: admits callers.
        http: how the API treats its clients.
        metrics: for GET /metrics; None: the path says that there are none.
    """
    http = http or HttpConfig()

    async def unknown_keys() -> None:
        UNKNOWN_KEYS.set(http.extra)

    app = FastAPI(
        title="Paceline",
        version=paceline.__version__,
        description="Language models served with draft-then-verify decoding. The API is OpenAI's, "
        "with the keys that vLLM has beside it; docs/http.md has the table.",
        docs_url=None,
        redoc_url=None,
        dependencies=[Depends(unknown_keys)],
    )
    add_error_handlers(app)
    known = _KnownModel(targets, http.model_aliases)
    app.include_router(playground.router)
    docs_page.add_to(app)
    _add_server_paths(app, known, metrics)
    _add_generation_paths(app, known, targets)
    _add_token_paths(app, known, targets)
    guard = Guard(app, gate)
    if not http.allow_origins:
        return guard
    return CORSMiddleware(
        guard,
        allow_origins=http.allow_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("Retry-After",),
    )


def _add_server_paths(app: FastAPI, known: _KnownModel, metrics: Metrics | None) -> None:
    created = int(time.time())

    @app.get("/health", tags=["Server"], responses=_json(answered.Health))
    async def health() -> Response:
        """Whether the gateway serves; needs no token."""
        return JSONResponse({"status": "ok"})

    @app.get("/version", tags=["Server"], responses=_json(answered.Version))
    async def version() -> Response:
        """The version of Paceline."""
        return JSONResponse({"version": paceline.__version__})

    @app.get("/metrics", tags=["Server"], responses={200: {"content": {"text/plain": {}}}})
    async def all_metrics() -> Response:
        """Counters of all replicas, in Prometheus' text format."""
        if metrics is None:
            return _unsupported("no metrics: it runs without Ray")
        return Response(await metrics(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1/models", tags=["Models"], responses=_json(answered.ModelList))
    async def models() -> Response:
        """The model that this server has, under each of its names, and its adapters."""
        model = await known.get()
        names = (model.name, *known.aliases, *model.adapters)
        data = [_model_body(model, name, created) for name in names]
        return JSONResponse({"object": "list", "data": data})

    @app.get("/v1/models/{name:path}", tags=["Models"], responses=_json(answered.Model))
    async def model(name: str) -> Response:
        """One model or adapter by its name."""
        return JSONResponse(_model_body(await known.get(name), name, created))

    for path, what in UNSUPPORTED.items():
        app.add_api_route(path, _refuse(what), methods=["POST"], include_in_schema=False)


def _add_generation_paths(app: FastAPI, known: _KnownModel, targets: Targets) -> None:
    @app.post("/v1/completions", tags=["Generation"], responses=_json(answered.CompletionObject))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one or several prompts; with `stream`, as server-sent events."""
        with named_as_sent(body.keys):
            answer = CompletionAnswer(body, await known.get(body.model))
            await answer.prepare(lambda token_ids: text_of(targets, token_ids))
        return await respond(answer, targets, request)

    @app.post("/v1/chat/completions", tags=["Generation"], responses=_json(answered.ChatObject))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Write the next message of a conversation; with `stream`, as server-sent events."""
        with named_as_sent(body.keys):
            model = await known.get(body.model)
            answer = ChatAnswer(body, model, await known.marker_id(body))
        return await respond(answer, targets, request)

    @app.post("/v1/responses", tags=["Generation"], responses=_json(answered.ResponseObject))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer an input as items: thoughts, a message, calls. Nothing is stored."""
        chat = body.chat()
        with named_as_sent(body.keys):
            model = await known.get(body.model)
            answer = ResponseAnswer(body, chat, model, await known.marker_id(chat))
        return await respond(answer, targets, request)


def _add_token_paths(app: FastAPI, known: _KnownModel, targets: Targets) -> None:
    @app.post("/tokenize", tags=["Tokens"], responses=_json(answered.Tokens))
    async def tokenize(body: TokenizeRequest) -> Response:
        """The tokens of a text, or of a conversation as its chat template writes it."""
        return JSONResponse(await tokenized(body, await known.get(body.model), targets))

    @app.post("/detokenize", tags=["Tokens"], responses=_json(answered.Detokenized))
    async def detokenize(body: DetokenizeRequest) -> Response:
        """The text of tokens, special ones included."""
        return JSONResponse(await detokenized(body, await known.get(body.model), targets))


def _json(model: Any) -> dict[int | str, dict[str, Any]]:
    """What the documentation says of a path's answers."""
    return {
        200: {"model": model},
        "4XX": {"model": answered.ErrorBody, "description": "What is wrong, and with which key"},
        "5XX": {"model": answered.ErrorBody, "description": "The server cannot answer now"},
    }


def _refuse(what: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        return _unsupported(f"no {what}: its model writes text")

    return refuse


def _unsupported(what: str) -> Response:
    body = {
        "message": f"this server has {what}",
        "type": "invalid_request_error",
        "param": None,
        "code": "unsupported_endpoint",
    }
    return JSONResponse({"error": body}, 400)


class _KnownModel:
    """The model that the targets serve; asked for once, because it never changes."""

    def __init__(self, targets: Targets, aliases: Sequence[str]) -> None:
        self.aliases = aliases
        self._targets = targets
        self._model: generate_pb2.Model | None = None
        self._special: dict[str, int | None] = {}

    async def get(self, name: str | None = None) -> generate_pb2.Model:
        """The model.

        Raises:
            ModelNotFound: neither it nor one of its adapters has this ``name``.
            ServerUnavailable: no target runs yet.
        """
        if self._model is None:
            self._model = generate_pb2.Model.FromString(await self._targets.get_model())
        model = self._model
        if name is not None and name not in (model.name, *self.aliases, *model.adapters):
            also = f", and its adapters {', '.join(model.adapters)}" if model.adapters else ""
            raise ModelNotFound(f"no model {name!r} here: this server has {model.name!r}{also}")
        return model

    async def marker_id(self, body: ChatRequest) -> int | None:
        """The special token that begins the model's calls; None: it is text, or there are none."""
        if not body.tools or body.tool_choice == "none":
            return None
        marker = format_of((await self.get()).chat_template).marker
        if marker and marker not in self._special:
            self._special[marker] = await special_id(self._targets, marker)
        return self._special.get(marker)


def _model_body(model: generate_pb2.Model, name: str, created: int) -> Body:
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "paceline",
        "root": model.name,
        "parent": model.name if name in model.adapters else None,
        "max_model_len": model.context_length,
        "methods": list(model.methods),
        "default_method": model.default_method,
        "has_chat_template": bool(model.chat_template),
    }
