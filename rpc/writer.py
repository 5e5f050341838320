"""Models on servers as writers of :mod:`paceline.together.reasoning`: over gRPC and over HTTP."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.parse
import urllib.request
from os import PathLike
from typing import Any

from paceline.config import SpeculationConfig
from paceline.errors import InvalidArgument
from paceline.rpc.client import SYSTEM_CA, Client, Hidden, bearer
from paceline.rpc.errors import InternalError, ServerUnavailable
from paceline.rpc.tls import is_loopback
from paceline.sampling import SamplingParams
from paceline.together.reasoning import StepText


class ClientWriter:
    """The target of a server, over gRPC.

    Args:
        speculation: how the server decodes; None: by its default method, or as AR if it cannot.
    """

    def __init__(self, client: Client, speculation: SpeculationConfig | None = None) -> None:
        self._client = client
        if speculation is None:
            model = client.get_model()
            able = model.default_method in model.methods
            speculation = SpeculationConfig(method=model.default_method if able else "ar")
        self._speculation = speculation

    def write(self, text: str, params: SamplingParams) -> StepText:
        """See :class:`paceline.together.reasoning.StepWriter`.

        Raises:
            PacelineError: the server's refusal, or its loss.
        """
        done = self._client.complete(text, params, self._speculation)
        return _step(done.text, len(done.token_ids), done.finish_reason, params)


class HttpWriter:
    """The model of a server with OpenAI's completions, Paceline's or vLLM's.

    The server has to know ``include_stop_str_in_output`` and ``structured_outputs``.

    Args:
        url: http://HOST:PORT or https://HOST:PORT.
        model: its name on the server; None: the first that the server lists.
        ca: PEM file of the authority that signs the server's certificate; None or "system": the
            public ones.
        token: key of the API. Over plain text only to loopback.
        timeout: seconds for each request.

    Raises:
        InvalidArgument: no such URL, a file that is not usable, or a token that plain text would
            carry to another machine.
        PacelineError: the server's refusal, or its loss.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        ca: str | PathLike[str] | None = None,
        token: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidArgument("url", url, "http://HOST:PORT or https://HOST:PORT")
        if token is not None and parts.scheme == "http" and not is_loopback(parts.hostname):
            raise InvalidArgument("token", Hidden(), f"https with it: {url} is plain text")
        self._url, self._timeout = url.rstrip("/").removesuffix("/v1"), timeout
        self._headers = {"content-type": "application/json"}
        if token is not None:
            self._headers |= dict(bearer(token))
        self._tls = None
        if parts.scheme == "https":
            try:
                file = None if ca in (None, SYSTEM_CA) else str(ca)
                self._tls = ssl.create_default_context(cafile=file)
            except (OSError, ssl.SSLError) as error:
                raise InvalidArgument("ca", str(ca), f"a PEM file ({error})") from None
        self._model = model or self._first_model()

    def write(self, text: str, params: SamplingParams) -> StepText:
        """See :class:`paceline.together.reasoning.StepWriter`."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": text,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": params.seed,
        }
        if params.stop:
            body |= {"stop": list(params.stop), "include_stop_str_in_output": True}
        if params.regex is not None:
            body["structured_outputs"] = {"regex": params.regex}
        answer = self._call("completions", body)
        try:
            (choice,), usage = answer["choices"], answer["usage"]
            return _step(
                choice["text"], int(usage["completion_tokens"]), choice["finish_reason"], params
            )
        except (KeyError, TypeError, ValueError) as error:
            raise InternalError(f"{self._url} answers without {error}") from None

    def _first_model(self) -> str:
        try:
            return str(self._call("models", None)["data"][0]["id"])
        except (KeyError, TypeError, IndexError):
            raise InternalError(f"{self._url} lists no model") from None

    def _call(self, path: str, body: dict[str, Any] | None) -> Any:
        """What the server answers to a GET, or to a POST of ``body``."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/v1/{path}", data, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout, context=self._tls) as reply:
                return json.load(reply)
        except urllib.error.HTTPError as error:
            said = error.read(2000).decode("utf-8", "replace")
            raise InternalError(f"{self._url} answers {error.code}: {said}") from None
        except (OSError, ValueError) as error:
            raise ServerUnavailable(f"{self._url}: {error}") from None


def _step(text: str, num_tokens: int, finish_reason: str, params: SamplingParams) -> StepText:
    """What a server has written; it tells no stop string from the model's own end."""
    at_stop = any(text.endswith(stop) for stop in params.stop)
    return StepText(text, num_tokens, finish_reason == "stop" and not at_stop)
