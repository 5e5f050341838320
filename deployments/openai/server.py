"""The HTTP server of a gateway: uvicorn on a socket of its own, and the guard before its app."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import uvicorn
from starlette.responses import JSONResponse

from paceline.deployments.openai.docs_page import PATHS as DOCS_PATHS
from paceline.deployments.playground import PATHS as PLAYGROUND_PATHS
from paceline.errors import InvalidArgument, ResourceExhausted
from paceline.rpc.access import Gate
from paceline.rpc.errors import DeadlineExceeded, Unauthenticated, http_status, info_of, to_status
from paceline.rpc.server import PortInUse
from paceline.rpc.tls import ServerTls, check_plain_text

logger = logging.getLogger(__name__)

PUBLIC_PATHS = frozenset(("/health", *DOCS_PATHS, *PLAYGROUND_PATHS))
"""Open without a token: probes have none and learn only that the gateway serves; the page of the
playground holds no data and asks its reader for the token."""
BODY_TIMEOUT_S = 30.0
"""Seconds in which a body must arrive, so that a client with half of one does not hold a socket."""
_READ_AT_MOST = 8
"""Times the limit that is read of a larger body, to be dropped: a client that asked for the end of
its connection, and reads no answer before it has sent everything, would else see it break."""
_CHEAP = frozenset((400, 401, 403, 404, 405, 413, 429))
"""Statuses that cost a client nothing, so the gate slows them down."""
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
          404: "invalid_request_error", 429: "rate_limit_error"}  # fmt: skip

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def error_body(error: BaseException) -> dict[str, Any]:
    """The body of an error, in the form that OpenAI's clients read."""
    return _described(error)[1]


def error_response(error: BaseException) -> JSONResponse:
    """The response for an exception; :mod:`paceline.rpc.errors` has the table of statuses."""
    status, body = _described(error)
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, ResourceExhausted):
        if error.retry_after_s > 0:
            headers["Retry-After"] = str(math.ceil(error.retry_after_s))
        else:  # it will never fit, and OpenAI's clients would retry by themselves
            headers["x-should-retry"] = "false"
    return JSONResponse(body, status, headers)


def _described(error: BaseException) -> tuple[int, dict[str, Any]]:
    status = to_status(error)
    code, info = http_status(status), info_of(status)
    body = {
        "message": status.message,
        "type": _TYPES.get(code, "server_error"),
        "param": info.metadata.get("field"),
        "code": info.reason.lower(),
    }
    return code, {"error": body}


class _TooLarge(InvalidArgument):
    """A body with more bytes than the limit."""


class Guard:
    """Passes a request on to an app once its caller is known and its body has arrived.

    Refusals, the app's own among them, and answers that need no token are slowed down
    (:meth:`paceline.rpc.access.Gate.slow_down`).

    Args:
        gate: identifies callers; its limit for messages holds for bodies as well.
    """

    def __init__(self, app: App, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        public = scope["path"] in PUBLIC_PATHS

        async def answer(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start" and (public or message["status"] in _CHEAP):
                await self._gate.slow_down()
            await send(message)

        try:
            headers = ((k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"])
            self._gate.authenticate(_peer(scope), scope["path"], headers, public=public)
            body = await self._body(receive)
        except Exception as error:
            response = error_response(error)
            if isinstance(error, _TooLarge):
                response.status_code = 413
            await response(scope, receive, answer)
            return
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def received() -> MutableMapping[str, Any]:
            return pending.pop() if pending else await receive()

        await self._app(scope, received, answer)

    async def _body(self, receive: Receive) -> bytes:
        limit, body, received = self._gate.limits.max_message_bytes, bytearray(), 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    received += len(message.get("body", b""))
                    if received > limit:
                        body.clear()
                    is_last = not message.get("more_body", False)
                    if received > limit and (is_last or received > _READ_AT_MOST * limit):
                        raise _TooLarge(
                            "body", f"more than {limit} bytes", "a smaller body (max_message_bytes)"
                        )
                    if is_last:
                        return bytes(body)
        except TimeoutError:
            raise DeadlineExceeded(f"the body did not come within {BODY_TIMEOUT_S:g} s") from None


def _peer(scope: Scope) -> str:
    """The address of a request's client, in gRPC's notation."""
    host, port = scope.get("client") or ("", 0)
    try:
        version = ipaddress.ip_address(host).version
    except ValueError:
        return str(host)
    return f"ipv6:[{host}]:{port}" if version == 6 else f"ipv4:{host}:{port}"


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # signal handlers belong to the process, not to this server


class HttpServer:
    """A running server.

    Attributes:
        url: where clients connect.
    """

    def __init__(self, url: str, port: int, server: uvicorn.Server, task: asyncio.Task[None]):
        self.url = url
        self.port = port
        self._server = server
        self._task = task

    async def stop(self, grace: float = 1.0) -> None:
        """Refuse new requests, give running ones ``grace`` seconds, then cancel them."""
        self._server.config.timeout_graceful_shutdown = math.ceil(grace)
        self._server.should_exit = True
        await asyncio.gather(self._task, return_exceptions=True)


async def start_http(
    app: App,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    tls: ServerTls | None = None,
    insecure: bool = False,
) -> HttpServer:
    """Serve an ASGI app on the running event loop.

    Args:
        port: 0 picks a free one.
        tls: None serves plain text.
        insecure: allow plain text on addresses that other machines reach.

    Raises:
        InvalidArgument: plain text beyond loopback without ``insecure``, or a wrong TLS file.
        PortInUse: the port is taken, or the host is not an address of this machine.
    """
    if tls is None and not insecure:
        check_plain_text(host, "tls", "TLS, or insecure=True")
    context = None if tls is None else tls.context()
    listener = _listen(host, port)
    config = uvicorn.Config(
        app,
        loop="none",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ssl_context_factory=None if context is None else lambda config, default: context,
    )
    server = _Uvicorn(config)
    task = asyncio.create_task(server.serve([listener]))
    while not server.started:
        if task.done():
            await task
        await asyncio.sleep(0.005)
    port = listener.getsockname()[1]
    scheme = "http" if tls is None else "https"
    name = f"[{host}]" if ":" in host.strip("[]") else host
    return HttpServer(f"{scheme}://{name}:{port}", port, server, task)


def _listen(host: str, port: int) -> socket.socket:
    host = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise PortInUse(
            f"cannot listen on {host}:{port} ({error.strerror}); choose another port (0 takes a "
            "free one)"
        ) from None
    listener.setblocking(False)
    return listener
