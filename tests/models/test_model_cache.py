"""The cache that releases share: each gets what it named, once, and never half of it."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit
from xml.sax.saxutils import escape

import pytest

from paceline.cluster.certs import make_certificates
from tests.hub import FakeHub, commit_of, hub

pytest.importorskip("pyarrow")
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "model.safetensors": b"weights" * 50_000,
    "heads/eagle3/config.json": b"{}",
    "heads/eagle3/model.safetensors": b"head",
    "onnx/model.json": b"not needed",
    "README.md": b"not needed",
}
NEEDED = {name for name in FILES if "not needed" not in FILES[name].decode()}


def write(folder: Path, label: str) -> Path:
    """A folder with the files of a model, whose configuration is ``label``."""
    for name, content in {**FILES, "config.json": label.encode()}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def files_in(folder: Path) -> set[str]:
    return {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeHub]:
    models = {f"org/{name}": write(tmp_path / "hub" / name, name) for name in ("one", "two")}
    with hub(models) as running:
        yield running
        running.go_on.set()


def start(server: FakeHub, name: str, cache: Path, *more: str) -> subprocess.Popen[str]:
    """A pod's download, as the chart starts it."""
    environment = {
        **os.environ, "HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(cache.parent / "home"), "HF_HUB_DOWNLOAD_TIMEOUT": "60",
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", "paceline.model_cache", name, f"--cache={cache}", *more],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> Path:
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return Path(said.strip())


def fail(process: subprocess.Popen[str]) -> str:
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "Traceback" not in errors
    return errors


def contents(server: FakeHub) -> list[str]:
    """The files whose content was asked for, with one HEAD and one GET each."""
    return [path for path in server.requests if "/resolve/" in path]


def test_releases_with_one_cache_get_their_own_models(server: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    links = {name: tmp_path / f"{name}-models" for name in ("one", "two")}
    for name, link in links.items():
        link.mkdir()
        finish(start(server, f"hf:org/{name}", cache, f"--link={link / 'target'}"))
    for name, link in links.items():
        folder = link / "target"
        assert (folder / "config.json").read_text() == name
        assert files_in(folder) == NEEDED
        assert folder.resolve().name == f"org--{name}@{commit_of(server.models[f'org/{name}'])}"


def test_a_killed_download_is_not_complete_and_the_next_one_goes_on(
    server: FakeHub, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    server.stalled = {"model.safetensors"}
    process = start(server, "org/one", cache)
    part = cache / "hf" / f"org--one@{commit_of(server.models['org/one'])}.part"
    deadline = time.monotonic() + 60
    while not (part / "config.json").is_file() or not any(part.rglob("*.incomplete")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert [p.name for p in cache.glob("hf/*") if p.is_dir()] == [part.name]
    server.go_on.set()
    server.requests.clear()
    folder = finish(start(server, "org/one", cache))
    assert files_in(folder) == NEEDED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not part.exists()
    assert not [path for path in contents(server) if path.endswith("one/config.json")]


def test_eight_processes_download_once(server: FakeHub, tmp_path: Path) -> None:
    server.stalled = {"model.safetensors"}
    threading.Timer(2, server.go_on.set).start()  # so that all of them meet a download
    started = [start(server, "hf:org/one@main", tmp_path / "cache") for _ in range(8)]
    assert len({finish(process) for process in started}) == 1
    counts = {path: contents(server).count(path) for path in contents(server)}
    assert len(counts) == len(NEEDED)
    assert max(counts.values()) <= 2, "HEAD and GET"


@pytest.mark.slow
def test_light_copies_chosen_files_and_heads(server: FakeHub, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    light = finish(start(server, "org/one", cache, "--no-weights"))
    assert files_in(light) == {"config.json", "tokenizer.json"}
    chosen = finish(start(server, "org/one", cache, "--include=*.json", "--include=*.md"))
    assert files_in(chosen) == {name for name in FILES if name.endswith((".json", ".md"))}
    whole = finish(start(server, "org/one", cache))
    assert len({light, chosen, whole}) == 3
    assert finish(start(server, "org/one", cache, "--no-weights")) == whole
    assert "no file called *.bin" in fail(start(server, "org/one", cache, "--include=*.bin"))
    (server.models["org/one"] / "model.safetensors").unlink()
    for file in server.models["org/one"].glob("heads/*/model.safetensors"):
        file.unlink()
    for _ in range(2):  # what failed is not taken for complete
        assert "no weights" in fail(start(server, "org/one", tmp_path / "other"))


@pytest.mark.slow
def test_the_last_known_revision_serves_while_the_hub_is_away(
    server: FakeHub, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    folder = finish(start(server, "org/one", cache))
    for message, name in {
        "has no revision 'v2'": "org/one@v2", "the hub has no model": "org/three",
        "expected hf:ORG/NAME@REVISION, s3://BUCKET/PATH or smollm2": "ftp://x",
    }.items():  # fmt: skip
        assert message in fail(start(server, name, cache))
    server.shutdown()
    server.server_close()
    assert finish(start(server, "org/one", cache)) == folder
    commit = folder.name.partition("@")[2]
    assert finish(start(server, f"org/one@{commit}", cache)) == folder
    assert "cannot be reached" in fail(start(server, "org/two", cache))


# --- S3 -------------------------------------------------------------------------------------------


class FakeS3(ThreadingHTTPServer):
    """One bucket called ``bucket`` with a folder's files, as much of S3 as a download needs."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Object)
        self.folder = folder
        self.gets: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Object(BaseHTTPRequestHandler):
    server: FakeS3
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = parse_qs(address.query)
        key = address.path.removeprefix("/bucket").strip("/")
        file = self.server.folder / key
        if "list-type" in query:
            self._list(query["prefix"][0])
        elif not file.is_file():
            self._reply(404, b"<Error><Code>NoSuchKey</Code></Error>")
        else:
            body = file.read_bytes()
            if self.command == "GET":
                self.server.gets.append(key)
            self._reply(200, body, {"Last-Modified": "Tue, 24 Nov 2026 10:00:00 GMT"})

    do_HEAD = do_GET

    def _list(self, prefix: str) -> None:
        entries = []
        for file in sorted(p for p in self.server.folder.rglob("*") if p.is_file()):
            key = file.relative_to(self.server.folder).as_posix()
            changed = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(file.stat().st_mtime))
            if key.startswith(prefix):
                entries.append(
                    f"<Contents><Key>{escape(key)}</Key><Size>{file.stat().st_size}</Size>"
                    f"<LastModified>{changed}</LastModified></Contents>"
                )
        found = f"<KeyCount>{len(entries)}</KeyCount><IsTruncated>false</IsTruncated>"
        self._reply(200, f"<ListBucketResult>{found}{''.join(entries)}</ListBucketResult>".encode())

    def _reply(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[FakeS3]:
    write(tmp_path / "bucket" / "models" / "one", "one")
    server = FakeS3(tmp_path / "bucket")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_prefix_of_a_bucket(bucket: FakeS3, tmp_path: Path) -> None:
    def get(name: str) -> subprocess.Popen[str]:
        environment = {
            **os.environ, "AWS_ENDPOINT_URL": bucket.url, "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "local",
            "AWS_EC2_METADATA_DISABLED": "true",
        }  # fmt: skip
        return subprocess.Popen(
            [sys.executable, "-m", "paceline.model_cache", name, f"--cache={tmp_path / 'cache'}"],
            env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    folder = finish(get("s3://bucket/models/one"))
    assert files_in(folder) == NEEDED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    bucket.gets.clear()
    assert finish(get("s3://bucket/models/one/")) == folder
    assert bucket.gets == []
    # Other files under the same name are another revision.
    (bucket.folder / "models/one/config.json").write_text("one, again")
    newer = finish(get("s3://bucket/models/one"))
    assert newer != folder
    assert (newer / "config.json").read_text() == "one, again"
    assert (folder / "config.json").read_text() == "one"
    assert "there are no files at s3://bucket/none" in fail(get("s3://bucket/none"))
    assert "expected s3://BUCKET/PATH" in fail(get("s3://bucket"))


# --- an authority of one's own --------------------------------------------------------------------


def test_a_hub_behind_an_authority_of_its_own(server: FakeHub, tmp_path: Path) -> None:
    made = make_certificates(tmp_path / "certs", hosts=["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made["server.crt"], made["server.key"])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.scheme = "https"
    cache = tmp_path / "cache"
    assert "cannot be reached" in fail(start(server, "org/one", cache))
    assert files_in(finish(start(server, "org/one", cache, f"--ca={made['ca.crt']}"))) == NEEDED
