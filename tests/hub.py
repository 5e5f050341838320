"""A server that speaks as much of the Hugging Face hub as a download needs, for a few folders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BRANCH = "main"


def commit_of(folder: Path) -> str:
    """The commit that the server gives a folder.  # 40 hex digits"""
    return hashlib.sha1(str(folder).encode()).hexdigest()


@contextlib.contextmanager
def hub(models: dict[str, Path], gated: tuple[str, ...] = ()) -> Iterator[FakeHub]:
    """Serve model folders by ORG/NAME; files of ``gated`` ones are refused."""
    server = FakeHub(models, gated)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class FakeHub(ThreadingHTTPServer):
    """The server; ``requests`` are the paths that were asked for.

    Files whose name is in ``stalled`` stop in the middle until ``go_on`` is set.
    """

    def __init__(self, models: dict[str, Path], gated: tuple[str, ...]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.gated = gated
        self.requests: list[str] = []
        self.scheme = "http"
        self.stalled: set[str] = set()
        self.go_on = threading.Event()

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FakeHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.server.requests.append(path)
        parts = path.removeprefix("api/models/").split("/")
        repo, rest = "/".join(parts[:2]), parts[2:]
        folder = self.server.models.get(repo)
        if folder is None:
            self._refuse(404, "RepoNotFound")
        elif rest and rest[1] not in (BRANCH, commit_of(folder)):
            self._refuse(404, "RevisionNotFound")
        elif not rest or rest[0] == "revision":
            self._json({"id": repo, "sha": commit_of(folder)})
        elif rest[0] == "tree":
            files = sorted(path for path in folder.rglob("*") if path.is_file())
            self._json([self._file(folder, file) for file in files])
        elif repo in self.server.gated:
            self._refuse(403, "GatedRepo")
        else:
            self._send(folder, folder / "/".join(rest[2:]))

    do_HEAD = do_GET

    def _file(self, folder: Path, file: Path) -> dict[str, Any]:
        name = file.relative_to(folder).as_posix()
        return {"type": "file", "path": name, "size": file.stat().st_size, "oid": _digest(file)}

    def _send(self, folder: Path, file: Path) -> None:
        if not file.is_file():
            self._refuse(404, "EntryNotFound")
            return
        headers = {"X-Repo-Commit": commit_of(folder), "ETag": f'"{_digest(file)}"'}
        self._reply(200, file.read_bytes(), headers, stalls=file.name in self.server.stalled)

    def _json(self, value: Any) -> None:
        self._reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._reply(status, b"", {"X-Error-Code": code})

    def _reply(
        self, status: int, body: bytes, headers: dict[str, str], stalls: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            with contextlib.suppress(OSError):  # a client that was killed
                if stalls:
                    self.wfile.write(body[: len(body) // 2])
                    self.wfile.flush()
                    self.server.go_on.wait(60)
                    body = body[len(body) // 2 :]
                self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


def _digest(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()
