"""The playground at the gateway's root: a page that shows generations round by round.

It consists of the files in ``static/`` alone. The page uses the same HTTP API as all clients, with
the token that its reader types in. It needs no other server and runs no inline code.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline.masked_folder import MASKED_DRAFTERS
from paceline.methods import METHODS, Method

FOLDER = Path(__file__).parent / "static"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript",
          ".svg": "image/svg+xml", ".json": "application/json"}  # fmt: skip
_HEADERS = {
    "Cache-Control": "no-cache",  # ask each time; the ETag tells if it has changed
    "Content-Security-Policy": "; ".join((
        "default-src 'none'", "script-src 'self'", "style-src 'self'", "img-src 'self'",
        "connect-src 'self'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    )),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}  # fmt: skip


class _File(NamedTuple):
    content: bytes
    headers: dict[str, str]


def _file(name: str, content: bytes) -> _File:
    kind = f"{_TYPES[Path(name).suffix]}; charset=utf-8"
    etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    return _File(content, {**_HEADERS, "Content-Type": kind, "ETag": etag})


def _group(method: Method) -> str:
    """The group of a method in the page's list: where its drafts come from."""
    if method.drafter == "none":
        return "No drafts"
    if method.head is not None:
        return "Trained heads"
    if {"draft_model", *MASKED_DRAFTERS} & {method.drafter, *method.uses}:
        return "A draft model"
    return "The target itself" if method.needs else "Text seen before"


def _catalogue() -> bytes:
    """What the page shows about each method, as JSON."""
    entries = [
        {
            "name": method.name,
            "group": _group(method),
            "summary": method.summary,
            "paper": method.paper,
            "lossless": method.lossless,
            "coupled": method.lossless and method.acceptance == "coupled",  # has the tokens of AR
            "length": method.defaults.get("num_speculative_tokens"),
            "adaptive": method.length in ("goodput", "auto"),  # chooses the length by itself
        }
        for method in METHODS.values()
    ]
    return json.dumps(entries, ensure_ascii=False).encode()


_FILES = {
    "/" if path.name == "index.html" else f"/playground/{path.name}": _file(
        path.name, path.read_bytes()
    )
    for path in sorted(FOLDER.iterdir())
} | {"/playground/methods.json": _file("methods.json", _catalogue())}

PATHS = tuple(_FILES)

router = APIRouter(include_in_schema=False)


async def _serve(request: Request) -> Response:
    file = _FILES[request.scope["path"]]
    known = request.headers.get("if-none-match", "").split(",")
    if file.headers["ETag"] in (tag.strip().removeprefix("W/") for tag in known):
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)


for _path in PATHS:
    router.add_api_route(_path, _serve, methods=["GET", "HEAD"], response_model=None)
