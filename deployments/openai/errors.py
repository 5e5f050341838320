"""Errors as HTTP's clients see them: under the keys that they sent, and in plain words."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from paceline.config import SpeculationConfig
from paceline.deployments.openai.server import error_response
from paceline.errors import InvalidArgument, PacelineError


def add_error_handlers(app: FastAPI) -> None:
    """Answer every exception of an app with a body of OpenAI's shape."""
    app.add_exception_handler(PacelineError, _on_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Exception, _on_error)


def as_sent(error: InvalidArgument, keys: Mapping[str, str]) -> InvalidArgument:
    """The error with the name that its field has in the HTTP request, not in the target's message.

    Args:
        keys: names of the target's, and those that the request has for them.
    """
    name = error.field.removeprefix("sampling.")
    if name == "message":  # other fields have bounds of their own
        both = f"{keys.get('prompt', 'prompt')} or prediction.content"
        return InvalidArgument(both, error.value, error.allowed)
    name = "prompt" if name == "prompt.text" else name.replace("prompt_token_ids", "prompt")
    if name in SpeculationConfig.model_fields:  # the target names knobs without `speculation.`
        name = f"speculation.{name}"
    name = keys.get(name, name)
    return error if name == error.field else InvalidArgument(name, error.value, error.allowed)


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer an unknown path, or a method that the path does not have."""
    assert isinstance(error, HTTPException)
    if error.status_code == 400:  # bytes that are no text, brackets in thousands, endless digits
        allowed = "a JSON object in UTF-8, not nested deeply, with numbers of usual length"
        return error_response(InvalidArgument("body", "no JSON that can be read", allowed))
    body = {
        "message": f"{request.method} {request.url.path}: {error.detail}",
        "type": "invalid_request_error",
        "param": None,
        "code": {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code),
    }
    return JSONResponse({"error": body}, error.status_code, error.headers)


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(described(error.errors()))


_ALLOWED = {
    "bool_type": "true or false",
    "dict_type": "an object",
    "extra_forbidden": "only keys that this server knows",
    "finite_number": "a finite number",
    "float_type": "a number",
    "int_from_float": "an integer",
    "int_type": "an integer",
    "list_type": "a list",
    "missing": "a value",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a text",
    "string_unicode": "Unicode text",
}
_BOUNDED = {
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "string_too_long": "a text of at most {max_length} characters",
    "string_too_short": "a text of at least {min_length} characters",
    "too_long": "a list of at most {max_length} entries",
    "too_short": "a list of at least {min_length} entries",
}


def described(errors: Sequence[Any]) -> InvalidArgument:
    """What is wrong with a body, from the validator's list of errors."""
    # A union has an error for each of its types: the deepest one is the most specific.
    same = [each for each in errors if each["loc"][1:2] == errors[0]["loc"][1:2]]
    deepest = max(len(each["loc"]) for each in same)
    found = [each for each in same if len(each["loc"]) == deepest]
    first = found[0]
    field, value = _field(first["loc"][1:]), first.get("input")
    if first["type"] == "json_invalid":
        return InvalidArgument("body", "no JSON", f"a JSON object ({first['ctx']['error']})")
    if not field and isinstance(value, bytes):
        allowed = "JSON, with the header content-type: application/json"
        return InvalidArgument("body", "another type of content", allowed)
    if first["type"] == "missing":
        value = "nothing"
    elif first["type"] == "string_unicode":
        value = "half of a surrogate pair"
    elif first["type"] == "too_long":
        value = f"{len(value)} entries"
    alternatives = [each for each in found if _field(each["loc"][1:]) == field]
    allowed = " or ".join(dict.fromkeys(map(_allowed, alternatives)))
    return InvalidArgument(field or "body", value, allowed)


def _allowed(error: Mapping[str, Any]) -> str:
    kind = error["type"]
    if kind in _BOUNDED:
        return _BOUNDED[kind].format(**error["ctx"])
    return _ALLOWED.get(kind, "another value: see /docs")


def _field(loc: Sequence[str | int]) -> str:
    """The path of a wrong key, without pydantic's names for the types of a union."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif re.fullmatch(r"\w+", part) and part not in _TYPE_NAMES:
            name += f".{part}" if name else part
    return name


_TYPE_NAMES = ("str", "int", "float", "bool", "dict", "list")
